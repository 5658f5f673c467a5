"""Coefficients of the KL penalty, fixed or steered towards a target."""

__all__ = ["AdaptiveKL", "FixedKL"]


class FixedKL:
    """A constant KL coefficient, with the interface of `AdaptiveKL`."""

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

    ``kl`` is the mean over responses of the KL summed over a response's tokens, in nats, as in lm-human-preferences
    (others feed a per-token mean to the same formula: their targets differ by the response length). ``horizon`` is in
    episodes; raising it makes the controller slower. More than 5 horizons of episodes in one update could turn ``coef``
    negative. Call `update` once a rollout batch, after its optimizer steps.

    Raises ValueError where ``target`` or ``horizon`` is not positive, or ``init_coef`` is negative.
    """

    def __init__(self, init_coef: float, target: float, horizon: int) -> None:
        if target <= 0 or horizon <= 0:
            raise ValueError(f"AdaptiveKL: target and horizon must be positive, got {target} and {horizon}")
        if init_coef < 0:
            raise ValueError(f"AdaptiveKL: init_coef must not be negative, got {init_coef}")
        self.coef = init_coef
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, num_episodes: int) -> None:
        """Adjust ``coef`` after ``num_episodes`` responses with mean KL ``kl``."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * num_episodes / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]
