"""The coefficient of the entropy bonus: fixed, or adapted to keep the entropy above a target."""

__all__ = ["EntropyControl"]


class EntropyControl:
    """A coefficient that rises while the entropy is below a target (He et al. 2025, "Skywork Open Reasoner 1").

        c <- c + step if H < target, max(0, c - step) if H > target
        coef = c if H <= target, otherwise 0

    Call `update` once per rollout batch with the entropy H of the policy that sampled it; the new ``coef`` is for the
    next batch. The paper applies it in the same step, which would need an extra pass before the update.

    Args:
        coef: c at the start, and the coefficient until the first update.
        target: target of the mean entropy per token, in nats; None keeps ``coef`` fixed.
        step: change of c per update.

    Raises ValueError if ``coef`` is negative, or ``target`` or ``step`` is not positive.
    """

    def __init__(self, coef: float, target: float | None = None, step: float = 0.005) -> None:
        if coef < 0 or step <= 0 or (target is not None and target <= 0):
            raise ValueError(
                "EntropyControl: coef must not be negative, target and step must be positive, "
                f"got {coef}, {target} and {step}"
            )
        self.coef = coef
        self.target = target
        self.step = step
        self._held = coef

    def update(self, entropy: float) -> None:
        """Adjust ``coef`` after a rollout batch with this mean entropy per token, in nats."""
        if self.target is None:
            return
        if entropy != self.target:
            self._held = max(0.0, self._held + (self.step if entropy < self.target else -self.step))
        self.coef = self._held if entropy <= self.target else 0.0

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef, "held": self._held}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef, self._held = state["coef"], state["held"]
