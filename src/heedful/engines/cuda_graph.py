"""Decoding with CUDA graphs: the kernels of one token are captured once, then launched together.

The model is not modified. Launching the thousand small kernels of a token one by one from Python takes several times as
long as running them. A graph always uses the same addresses: the weights and a `FixedBatch`. It has a fixed number of
rows and of positions; a few sizes suffice.
"""

import warnings
from itertools import chain

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from heedful.devices import capabilities
from heedful.engines.fixed_batch import FixedBatch
from heedful.kernels.attention import mask_of_scores
from heedful.kernels.packing import positions

SMALLEST_ROWS = 8
"""Minimum rows of a graph. Larger graphs have a power of two of rows, or as many as fit."""
POSITIONS = 128
"""A graph's attention reads a multiple of this many positions."""


class GraphDecoder:
    """Decodes a batch after its prefill: call `start`, then `step` for each token, and `keep` when rows have ended.

    Graphs are captured at first use and stay valid while the weights keep their addresses, so a copy of the policy that
    is refreshed in place reuses them. If capturing fails, and on devices without graphs, the same step runs kernel by
    kernel. Nothing here synchronises with the device.

    Args:
        lm: the model to decode with.
        compute_dtype: half precision runs matrix products under autocast, unless the weights already have that dtype.
        capture: capture graphs; None means where the device has them.
    """

    def __init__(self, lm: PreTrainedModel, compute_dtype: torch.dtype, *, capture: bool | None = None) -> None:
        self.lm = lm
        self.compute_dtype = compute_dtype
        self._capture = capabilities(lm.device).graphs if capture is None else capture
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._weights: list[int] = []
        self._batch: FixedBatch | None = None
        self._num_rows = self._written = 0

    @property
    def graphs(self) -> dict[tuple[int, int], object]:
        """The captured graphs, by rows and positions."""
        return dict(self._graphs)

    @torch.no_grad()
    def start(self, cache: Cache, attention_mask: Tensor, max_new_tokens: int, rows: Tensor | None = None) -> None:
        """Start decoding after a prefill.

        Args:
            cache: the keys and values of the prompts.
            attention_mask: ``[prompts, time]``, 1 at real tokens.
            max_new_tokens: maximum number of steps.
            rows: row i continues the prompt ``rows[i]``; several rows may continue one prompt. None continues each
                once.
        """
        if rows is None:
            rows = torch.arange(len(attention_mask), device=attention_mask.device)
        self._num_rows, self._written = len(rows), attention_mask.shape[1]
        self._make_room(cache, self._num_rows, self._written + max_new_tokens)
        self._started().fill(cache, attention_mask, rows)

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Read one token per row, ``[rows]``. Returns logits of the next, ``[rows, vocab]``, valid until the next step."""
        batch = self._started()
        bucket = self._bucket()
        batch.ids[: self._num_rows, 0] = ids
        if self._capture and bucket not in self._graphs:
            self._try_capture(bucket)
        if bucket in self._graphs:
            graph, logits = self._graphs[bucket]
            graph.replay()
        else:
            logits = self._forward(bucket)
            batch.advance()
        self._written += 1
        return logits[: self._num_rows]

    @torch.no_grad()
    def keep(self, rows: Tensor) -> None:
        """Continue with only the rows at these indices, in this order; a smaller graph is used if they fit into it."""
        self._started().keep(rows, self._written)
        self._num_rows = len(rows)

    def _started(self) -> FixedBatch:
        assert self._batch is not None, "call start first"
        return self._batch

    def _make_room(self, cache: Cache, num_rows: int, num_positions: int) -> None:
        """Keep the current batch or make a larger one, and drop graphs whose addresses are no longer valid."""
        old = self._batch
        if old is None or num_rows > old.num_rows or num_positions > old.num_positions:
            if old is not None:
                num_rows, num_positions = max(num_rows, old.num_rows), max(num_positions, old.num_positions)
            self._graphs.clear()
            self._batch = old = None  # freed before the new one needs the memory
            self._batch = FixedBatch.like(cache, num_rows, -(-num_positions // POSITIONS) * POSITIONS)
        weights = [tensor.data_ptr() for tensor in chain(self.lm.parameters(), self.lm.buffers())]
        if weights != self._weights:
            self._graphs.clear()
            self._weights = weights

    def _bucket(self) -> tuple[int, int]:
        """Return rows and positions of the smallest graph that fits the next step."""
        batch = self._started()
        num_positions = (self._written // POSITIONS + 1) * POSITIONS
        assert num_positions <= batch.num_positions, "more steps than max_new_tokens of start"
        num_rows = max(SMALLEST_ROWS, 1 << (self._num_rows - 1).bit_length())
        return min(num_rows, batch.num_rows), num_positions

    def _forward(self, bucket: tuple[int, int]) -> Tensor:
        with _uncached_autocast(self.lm, self.compute_dtype):
            return self._started().forward(self.lm, *bucket)

    def _try_capture(self, bucket: tuple[int, int]) -> None:
        """Capture a step, or warn once with the reason why it is not possible."""
        batch, outside, cause = self._started(), None, None
        try:
            outside = torch.cuda.current_stream()
            stream = torch.cuda.Stream()
            stream.wait_stream(outside)
            with torch.cuda.stream(stream):  # libraries allocate workspaces in the first call, which is not captured
                self._forward(bucket)
            outside.wait_stream(stream)
            pool = (
                next(iter(self._graphs.values()))[0].pool() if self._graphs else None
            )  # shared, since only one graph replays at a time
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                try:
                    logits = self._forward(bucket)
                    batch.advance()
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
            self._graphs[bucket] = graph, logits


def graph_decoder(lm: PreTrainedModel, compute_dtype: torch.dtype) -> GraphDecoder | None:
    """Return a decoder for the model; None, with a warning, if the model cannot decode on a fixed cache (`obstacle`)."""
    reason = obstacle(lm, compute_dtype)
    if reason is None:
        return GraphDecoder(lm, compute_dtype)
    warnings.warn(f"{type(lm).__name__} is sampled without CUDA graphs, so slower: {reason}", stacklevel=2)
    return None


@torch.no_grad()
def obstacle(lm: PreTrainedModel, compute_dtype: torch.dtype) -> str | None:
    """Return why the model cannot decode on a fixed cache, or None if it can.

    Checks the model's declarations, and compares its logits for a padded batch with and without the cache.
    """
    if not (lm._supports_attention_backend and lm._can_compile_fullgraph):
        return "transformers does not declare that it can use a fixed cache"
    attention = lm.config._attn_implementation
    if attention != "eager" and ALL_MASK_ATTENTION_FUNCTIONS.get(attention) not in (sdpa_mask, mask_of_scores):
        return f"its attention is {attention}, which may not take a mask of scores"
    cache = DynamicCache(config=lm.config)
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        return "some of its layers do not read all positions, or keep something other than keys and values"
    ids = torch.arange(1, 11, device=lm.device).view(2, 5) % lm.config.get_text_config(decoder=True).vocab_size
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    prompt = {"attention_mask": mask[:, :4], "position_ids": positions(mask[:, :4])}
    decoder = GraphDecoder(lm, compute_dtype, capture=False)
    try:
        with _uncached_autocast(lm, compute_dtype):
            whole = lm(input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=False)
            lm(input_ids=ids[:, :4], **prompt, past_key_values=cache, use_cache=True)
        decoder.start(cache, mask[:, :4], max_new_tokens=1)
        expected = whole.logits[:, -1].float()
        difference = float((decoder.step(ids[:, 4]) - expected).abs().max() / expected.std())
    except Exception as error:  # an architecture with its own kind of cache, mask or positions
        return _first_line(error)
    limit = 0.1 if whole.logits.dtype in (torch.bfloat16, torch.float16) else 1e-3
    return None if difference < limit else f"its logits change by {difference:.2g} of their standard deviation"


def _uncached_autocast(lm: PreTrainedModel, compute_dtype: torch.dtype) -> torch.autocast:
    """Return autocast without a cache of cast weights, since a graph would keep reading stale ones. Disabled for
    half-precision models."""
    is_half = compute_dtype in (torch.bfloat16, torch.float16)
    casts = is_half and any(parameter.dtype != compute_dtype for parameter in lm.parameters())
    return torch.autocast(lm.device.type, dtype=compute_dtype if casts else None, enabled=casts, cache_enabled=False)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
