"""The user's functions, called after steps, evaluations and saves."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from heedful.distributed import ranks
from heedful.errors import ConfigError


class Stop(enum.Enum):
    """What ``on_step`` or ``on_evaluation`` returns to end the run after this step, with its model saved. Otherwise they
    return None."""

    STOP = "heedful.STOP"

    @property
    def __name__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return self.value


STOP: Final = Stop.STOP

OnMetrics = Callable[[int, dict[str, float]], object]
OnSave = Callable[[int, Path], object]


@dataclass(frozen=True)
class Callbacks:
    """Called by a run on rank 0, synchronously. An exception ends the run like any other; its note names callback and
    step."""

    on_step: OnMetrics | None = None
    """Called with a step's number and its metrics, after it is logged. May return `STOP`."""
    on_evaluation: OnMetrics | None = None
    """Called with a step and its metrics on held-out data; step 0 is the initial model. May return `STOP`."""
    on_save: OnSave | None = None
    """Called with a step and the folder of a checkpoint, ``best`` or ``final``, once it is complete."""

    def step(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """After a step is logged. Returns who ends the run, if anybody does. Collective."""
        return _stopped_by("on_step", self.on_step, step, metrics)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """After an evaluation. Returns who ends the run, if anybody does. Collective."""
        return _stopped_by("on_evaluation", self.on_evaluation, step, metrics)

    def save(self, step: int, folder: Path) -> None:
        """After a model or a checkpoint is written."""
        if self.on_save is not None and ranks.is_first():
            call("on_save", self.on_save, step, folder)


NO_CALLBACKS = Callbacks()


def _stopped_by(name: str, function: OnMetrics | None, step: int, metrics: Mapping[str, float]) -> str | None:
    if function is None:
        return None
    stops = ranks.is_first() and wants_stop(name, function, step, metrics)
    return f"{name} ({_name(function)})" if ranks.broadcast(stops) else None


def wants_stop(name: str, function: OnMetrics, step: int, metrics: Mapping[str, float]) -> bool:
    """Whether a user's function, called with a step's metrics, returned `STOP`. Raises ConfigError for what is neither that
    nor None."""
    returned = call(name, function, step, dict(metrics))
    if returned is not None and returned is not STOP:
        raise ConfigError(
            f"{name} ({_name(function)}) returned {returned!r:.60} at step {step}; return heedful.STOP to end the run after "
            "this step, else None"
        )
    return returned is STOP


def call(name: str, function: Callable[..., object], step: int, argument: object) -> object:
    """Call a user's function, with a note in its exceptions."""
    try:
        return function(step, argument)
    except Exception as error:
        error.add_note(f"raised by {name} ({_name(function)}) at step {step}")
        raise


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", type(function).__name__)
