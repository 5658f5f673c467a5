"""What happens when memory runs out: the same work again, with half as many rows at a time."""

import gc
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from heedful.display import say
from heedful.errors import MemoryFullError, is_out_of_memory
from heedful.parallel import ranks
from heedful.parallel.lockstep import check_present, others_wait
from heedful.types import MicroBatch

T = TypeVar("T")


class Room:
    """How many rows at a time memory has room for: what the settings say, or less once it has run out.

    The smaller micro-batch stays for the rest of the run, and is part of its state. Micro-batches never change a gradient
    but by rounding.

    Args:
        flag: the setting that would have been right from the start, named in messages.
    """

    def __init__(self, flag: str = "--micro-batch-size") -> None:
        self.flag = flag
        self.found: MicroBatch | None = None
        """What memory was found to have room for; None if it never ran out."""

    def within(self, limit: MicroBatch) -> MicroBatch:
        """The smaller of what the settings say and what was found."""
        if self.found is None:
            return limit
        tokens = [count for count in (limit.tokens, self.found.tokens) if count is not None]
        return MicroBatch(min(limit.rows, self.found.rows), min(tokens, default=None))

    def run(
        self,
        work: Callable[[MicroBatch], T],
        limit: MicroBatch,
        *,
        rows: int,
        undo: Callable[[], None] = lambda: None,
    ) -> T:
        """Return ``work(micro-batch)``. Whenever memory runs out in it, do it again from its start with half the micro-batch.

        If it runs out on one of several ranks, all do it again. In ``work``, ranks may talk to each other only after
        `heedful.parallel.ranks.all_well`.

        Args:
            work: takes the micro-batch to use.
            limit: the micro-batch of the settings.
            rows: how many there are in all (pairs, if the limit counts pairs): half of more would be no fewer.
            undo: undoes what an unfinished ``work`` may have left, such as gradients. torch's random numbers are put back
                without it.

        Raises MemoryFullError if memory runs out with one row at a time, or in a pass through divided models.
        """
        before = _random_state()
        while True:
            tried = self.within(limit)
            try:
                done = work(tried)
                ranks.all_well()
                return done
            except Exception as error:
                if not is_out_of_memory(error):
                    check_present(error)
                    raise
                if others_wait():
                    raise MemoryFullError(_cannot_be_done_again(error, self.flag, min(tried.rows, rows))) from error
                if not isinstance(error, ranks.ElsewhereMemoryError):
                    ranks.any_of(True)
                count = min(tried.rows, -(-rows // ranks.size()))
                if count <= 1:
                    raise MemoryFullError(_nothing_left(error)) from error
            # Out of the handler, the error and all that its frames hold is gone.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.found = MicroBatch((count + 1) // 2, None if tried.tokens is None else max(1, tried.tokens // 2))
            undo()
            _set_random_state(before)
            say(
                f"out of memory with {count} rows at a time, so from here on {self.found.rows}: the same results, more "
                f"slowly ({self.flag} {self.found.rows} would do so from the start; heedful plan says what takes the memory)"
            )

    def state_dict(self) -> dict[str, int | None]:
        return {} if self.found is None else {"rows": self.found.rows, "tokens": self.found.tokens}

    def load_state_dict(self, state: Mapping[str, int | None]) -> None:
        rows = state.get("rows")
        self.found = None if rows is None else MicroBatch(rows, state["tokens"])


def _cannot_be_done_again(error: Exception, flag: str, count: int) -> str:
    reason = (str(error) or type(error).__name__).partition("\n")[0]
    return (
        f"out of memory with up to {count} rows at a time ({reason}); with --shard full the other ranks wait in the midst of "
        f"the pass, so it cannot be done again in smaller parts: start again with {flag} {max(1, count // 2)}, and the run "
        "goes on from its newest checkpoint"
    )


def _nothing_left(error: Exception) -> str:
    reason = (str(error) or type(error).__name__).partition("\n")[0]
    return (
        f"out of memory with one row at a time ({reason}); heedful plan says what each part of a run takes and which "
        "settings make it fit, such as --gradient-checkpointing, --lora-rank 16, --weights-dtype bfloat16, or shorter texts "
        "(--max-length, --max-prompt-tokens, --max-new-tokens)"
    )


def _random_state() -> tuple[torch.Tensor, torch.Tensor | None]:
    """State of torch's generators, of which dropout takes its numbers. Nothing waits for a GPU here."""
    is_on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.get_rng_state(), torch.cuda.get_rng_state() if is_on_gpu else None


def _set_random_state(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    on_cpu, on_gpu = state
    torch.set_rng_state(on_cpu)
    if on_gpu is not None:
        torch.cuda.set_rng_state(on_gpu)
