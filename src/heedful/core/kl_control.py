"""Coefficients of the KL penalty: fixed, or adapted to a target KL."""

__all__ = ["AdaptiveKL", "FixedKL"]


class FixedKL:
    """A constant KL coefficient with the interface of `AdaptiveKL`."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, num_episodes: int) -> None:
        """Do nothing: the coefficient is fixed."""

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]


class AdaptiveKL:
    """Proportional controller that keeps the KL to the reference near a target (Ziegler et al. 2019, section 2.2).

        coef <- coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_episodes / horizon)

    Call `update` once per rollout batch, after its optimizer steps.

    Args:
        init_coef: coefficient at the start.
        target: target KL, in nats per response.
        horizon: time constant in responses (episodes); larger is slower. With more than 5 horizons of responses per
            update ``coef`` could become negative.

    As in lm-human-preferences, the KL is summed over a response's tokens and averaged over responses. Some libraries
    use a per-token mean in the same formula; their targets are smaller by the response length.

    Raises ValueError if ``target`` or ``horizon`` is not positive, or ``init_coef`` is negative.
    """

    def __init__(self, init_coef: float, target: float, horizon: int | float) -> None:
        if target <= 0 or horizon <= 0:
            raise ValueError(f"AdaptiveKL: target and horizon must be positive, got {target} and {horizon}")
        if init_coef < 0:
            raise ValueError(f"AdaptiveKL: init_coef must not be negative, got {init_coef}")
        self.coef = init_coef
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, num_episodes: int) -> None:
        """Adjust ``coef`` after ``num_episodes`` responses whose mean KL was ``kl`` nats per response."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * num_episodes / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]
