"""Functions of the user's that a run calls after its steps, evaluations and savings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from heedful.distributed import ranks

OnMetrics = Callable[[int, Mapping[str, float]], object]
OnSave = Callable[[int, Path], object]


@dataclass(frozen=True)
class Callbacks:
    """What a run calls, on rank 0, while it waits. An exception ends the run as any other does; a note on it says where."""

    on_step: Callable[[int, Mapping[str, float]], object] | None = None
    """Called with the number of a step that is learned and logged, and its metrics."""
    on_evaluation: Callable[[int, Mapping[str, float]], object] | None = None
    """Called with a step and its metrics on held-out data; step 0 is the model before its first."""
    on_save: Callable[[int, Path], object] | None = None
    """Called with a step and the folder of a checkpoint, of ``best`` or of ``final``, once that is whole."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is learned and logged."""
        _call("on_step", self.on_step, step, dict(metrics))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is evaluated."""
        _call("on_evaluation", self.on_evaluation, step, dict(metrics))

    def save(self, step: int, folder: Path) -> None:
        """A model or a checkpoint is written."""
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
