"""Decoding with CUDA graphs: the kernels of one token are captured once, then launched together.

The model is not modified. Launching the hundreds of small kernels of a token one by one from Python takes several times as
long as running them. A graph always uses the same addresses: the weights, a cache (`Slots`), and one tensor of logits. It has
a fixed number of rows and of positions; a few sizes suffice.
"""

import warnings
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heedful.devices import capabilities
from heedful.engines.kv_cache import Slots, takes_slots
from heedful.engines.one_token import step_of
from heedful.kernels.device import HALF

SMALLEST_ROWS = 8
"""Minimum rows of a graph. Larger graphs have a power of two of rows, or as many as fit."""
POSITIONS = 128
"""A graph's attention reads a multiple of this many positions."""


class GraphDecoder:
    """Reads a token of each row of a cache: call `room` for the cache, which a prefill fills, then `step` for each token.

    Graphs are captured at first use and stay valid while the weights keep their addresses, so a copy of the policy that
    is refreshed in place reuses them. If capturing fails, and on devices without graphs, the same step runs kernel by
    kernel. Nothing here synchronises with the device.

    Args:
        lm: the model to decode with; it `takes_slots`.
        compute_dtype: half precision runs matrix products under autocast, unless the weights already have that dtype.
        capture: capture graphs; None means where the device has them.
    """

    def __init__(self, lm: PreTrainedModel, compute_dtype: torch.dtype, *, capture: bool | None = None) -> None:
        self.lm = lm
        self.compute_dtype = compute_dtype
        self._capture = capabilities(lm.device).graphs if capture is None else capture
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._weights: list[int] = []
        self._slots: Slots | None = None

    @property
    def graphs(self) -> dict[tuple[int, int], object]:
        """The captured graphs, by rows and positions."""
        return dict(self._graphs)

    @torch.no_grad()
    def room(self, num_rows: int, longest: int) -> Slots:
        """Return the cache for so many rows of so many tokens: the current one, or a larger one, for which graphs are
        captured anew."""
        old = self._slots
        if old is None or num_rows > old.capacity or longest > old.longest:
            if old is not None:
                num_rows, longest = max(num_rows, old.capacity), max(longest, old.longest)
            self._graphs.clear()
            self._slots = old = None  # freed before the new one needs the memory
            half = self.compute_dtype if self.compute_dtype in HALF else None
            old = self._slots = Slots(self.lm, num_rows, longest, dtype=half, block=POSITIONS)
            self._ids = torch.zeros(num_rows, dtype=torch.long, device=self.lm.device)
            self._logits: Tensor | None = None
        weights = [tensor.data_ptr() for tensor in chain(self.lm.parameters(), self.lm.buffers())]
        if weights != self._weights:
            self._graphs.clear()
            self._step, self._weights = step_of(self.lm, self.compute_dtype), weights
        return old

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Read one token per row, ``[rows]``. Returns logits of the next, ``[rows, vocab]``, valid until the next step."""
        slots = self._slots
        assert slots is not None, "call room first"
        slots.begin_step()
        rows = slots.num_rows
        self._ids[:rows] = ids
        bucket = min(max(SMALLEST_ROWS, 1 << (rows - 1).bit_length()), slots.capacity), slots.length
        slots.num_rows = bucket[0]  # others compute, and write into rows that are free
        if self._capture and bucket not in self._graphs:
            self._try_capture(bucket)
        if bucket in self._graphs:
            self._graphs[bucket].replay()
        else:
            self._run(bucket)
            slots.advance()
        slots.num_rows = rows
        slots.steps += 1
        assert self._logits is not None
        return self._logits[:rows]

    def _run(self, bucket: tuple[int, int]) -> None:
        """Fill the logits, which all graphs share: a tensor for each would take gigabytes with a large vocabulary."""
        assert self._slots is not None
        self._slots.begin_places()
        with _uncached_autocast(self.lm, self.compute_dtype):
            logits = self._step(self._ids[: bucket[0]], self._slots)
        if self._logits is None:
            self._logits = logits.new_zeros(self._slots.capacity, logits.shape[1])
        self._logits[: bucket[0]] = logits

    def _try_capture(self, bucket: tuple[int, int]) -> None:
        """Capture a step, or warn once with the reason why it is not possible."""
        slots, outside, cause = self._slots, None, None
        assert slots is not None
        try:
            outside = torch.cuda.current_stream()
            stream = torch.cuda.Stream()
            stream.wait_stream(outside)
            with torch.cuda.stream(stream):  # libraries allocate workspaces in the first call, which is not captured
                self._run(bucket)
            outside.wait_stream(stream)
            pool = (
                next(iter(self._graphs.values())).pool() if self._graphs else None
            )  # shared, since only one graph replays at a time
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                try:
                    self._run(bucket)
                    slots.advance()
                except Exception as first:  # ending a failed capture raises another
                    cause = first
                    raise
        except Exception as error:  # a model that cannot be captured can still run kernel by kernel
            if outside is not None:
                torch.cuda.set_stream(outside)  # a failed capture leaves its own stream current
            self._capture = False
            self._graphs.clear()
            warnings.warn(
                f"{type(self.lm).__name__} cannot be captured as a CUDA graph, so sampling is slower: "
                f"{_first_line(cause or error)}",
                stacklevel=3,
            )
        else:
            self._graphs[bucket] = graph


def graph_decoder(lm: PreTrainedModel, compute_dtype: torch.dtype) -> GraphDecoder | None:
    """Return a decoder for the model; None, with a warning, if the model cannot decode on a fixed cache (`obstacle`)."""
    reason = obstacle(lm)
    if reason is None:
        return GraphDecoder(lm, compute_dtype)
    warnings.warn(f"{type(lm).__name__} is sampled without CUDA graphs, so slower: {reason}", stacklevel=2)
    return None


def obstacle(lm: PreTrainedModel) -> str | None:
    """Return why the model cannot be captured, or None if it may be."""
    if not lm._can_compile_fullgraph:
        return "transformers does not declare that it can use a fixed cache"
    if not takes_slots(lm):
        return "its attention is not heedful's, or some of its layers do not read all positions"
    return None


def _uncached_autocast(lm: PreTrainedModel, compute_dtype: torch.dtype) -> torch.autocast:
    """Return autocast without a cache of cast weights, since a graph would keep reading stale ones. Disabled for
    half-precision models."""
    is_half = compute_dtype in (torch.bfloat16, torch.float16)
    casts = is_half and any(parameter.dtype != compute_dtype for parameter in lm.parameters())
    return torch.autocast(lm.device.type, dtype=compute_dtype if casts else None, enabled=casts, cache_enabled=False)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
