"""The user's functions, called after steps, evaluations and saves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from heedful.distributed import ranks

OnMetrics = Callable[[int, Mapping[str, float]], object]
OnSave = Callable[[int, Path], object]


@dataclass(frozen=True)
class Callbacks:
    """Called by a run on rank 0, synchronously. An exception ends the run like any other; its note names callback and
    step."""

    on_step: Callable[[int, Mapping[str, float]], object] | None = None
    """Called with a step's number and its metrics, after it is logged."""
    on_evaluation: Callable[[int, Mapping[str, float]], object] | None = None
    """Called with a step and its metrics on held-out data; step 0 is the initial model."""
    on_save: Callable[[int, Path], object] | None = None
    """Called with a step and the folder of a checkpoint, ``best`` or ``final``, once it is complete."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """After a step is logged."""
        _call("on_step", self.on_step, step, dict(metrics))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """After an evaluation."""
        _call("on_evaluation", self.on_evaluation, step, dict(metrics))

    def save(self, step: int, folder: Path) -> None:
        """After a model or a checkpoint is written."""
        _call("on_save", self.on_save, step, folder)


NO_CALLBACKS = Callbacks()


def _call(name: str, function: Callable[..., object] | None, step: int, argument: object) -> None:
    if function is None or not ranks.is_first():
        return
    try:
        function(step, argument)
    except Exception as error:
        error.add_note(f"raised by {name} ({getattr(function, '__name__', type(function).__name__)}) at step {step}")
        raise
