"""Decoding with a key-value cache: read prompts, then one token per row at a time."""

import math
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heedful.core.masking import at_least_float32
from heedful.data.batches import collate
from heedful.devices import upload
from heedful.distributed.sharding import gathered
from heedful.engines.cuda_graph import GraphDecoder, graph_decoder
from heedful.engines.kv_cache import KEYS_AND_VALUES, cache_argument, capacity, make_cache
from heedful.kernels.cpu.products import pack_linears
from heedful.kernels.device import HALF, autocast, check_graphs
from heedful.kernels.packing import positions
from heedful.kernels.weights import as_sampled, inference_copy, refresh
from heedful.models.policy import Policy


class SamplingModel:
    """A copy of a policy for decoding, with its current weights; usable for any number of batches.

    Of a sharded policy each rank gathers a full copy (collective), so decoding needs no other rank.

    Args:
        policy: the model to sample from.
        cuda_graphs: decode with CUDA graphs (`heedful.engines.cuda_graph`).

    Raises ConfigError for CUDA graphs on a device without them.
    """

    def __init__(self, policy: Policy, *, cuda_graphs: bool = False) -> None:
        self.device, self.compute_dtype = policy.device, policy.compute_dtype
        self.graph: GraphDecoder | None = None
        if cuda_graphs:
            check_graphs(self.device)
            self.lm, self.graph = _recorded(policy)
        else:
            lm = gathered(policy, convert=as_sampled(self.compute_dtype)).lm
            self.lm = pack_linears(inference_copy(lm, self.compute_dtype))


class Decoder:
    """Model and cache for decoding a batch, one row per prompt. Equal prompts are read only once.

    Args:
        model: the copy of the policy for decoding.
        prompts: token ids of each row's prompt.
        pad_id: the padding token.
        max_new_tokens: maximum number of tokens read after the prompts; only for CUDA graphs.
    """

    def __init__(
        self, model: SamplingModel, prompts: Sequence[Sequence[int]], *, pad_id: int, max_new_tokens: int = 0
    ) -> None:
        self.lm, self.graph, self.device, self.compute_dtype = model.lm, model.graph, model.device, model.compute_dtype
        self.max_new_tokens = max_new_tokens
        half = self.compute_dtype if self.compute_dtype in HALF else None
        self.cache, self.in_place = make_cache(self.lm, half)
        self.cache_argument = cache_argument(self.lm)
        self.mask_dtype = half or self.lm.dtype
        place = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        self.prompt = collate(list(place), [[]] * len(place), pad_id=pad_id).to(self.device)
        self.prompt_of_row = upload(torch.tensor([place[tuple(prompt)] for prompt in prompts]), self.device)

    def read_prompts(self) -> Tensor:
        """Read the prompts. Returns the logits ``[rows, vocab]`` of every row's first response token."""
        mask = self.prompt.attention_mask
        position_ids = positions(mask)
        logits = self._forward(self.prompt.ids, mask.long(), position_ids)
        if self.graph is not None:
            self.graph.start(self.cache, mask, self.max_new_tokens, rows=self.prompt_of_row)
            return logits[self.prompt_of_row]
        self.position_ids = position_ids[:, -1:]
        self.length = mask.shape[1]
        self.mask = self._additive(mask) if self.in_place else mask.long()
        self.keep(self.prompt_of_row)
        return logits[self.prompt_of_row]

    def read_tokens(self, tokens: Tensor) -> Tensor:
        """Read one more token per row, ``[rows]``. Returns the logits ``[rows, vocab]`` of the next one."""
        if self.graph is not None:
            return at_least_float32(self.graph.step(tokens))
        self.position_ids = self.position_ids + 1
        self.length += 1
        if self.in_place:
            if self.length > self.mask.shape[-1]:
                more = capacity(self.length) - self.mask.shape[-1]
                self.mask = nn.functional.pad(self.mask, (0, more), value=-math.inf)
            self.mask[..., self.length - 1] = 0.0
        else:
            self.mask = nn.functional.pad(self.mask, (0, 1), value=1)
        return self._forward(tokens.unsqueeze(1), self.mask, self.position_ids)

    def keep(self, rows: Tensor) -> None:
        """Continue with only the rows at these indices, in this order; an index may occur more than once."""
        if self.graph is not None:
            self.graph.keep(rows)
        else:
            self.cache.reorder_cache(rows)  # layers with recurrent states have it too
            self.position_ids, self.mask = self.position_ids[rows], self.mask[rows]

    def _additive(self, mask: Tensor) -> Tensor:
        """Return ``[rows, 1, 1, capacity]``: 0 at prompt tokens, -inf at padding and unwritten positions."""
        places = nn.functional.pad(mask, (0, capacity(mask.shape[1]) - mask.shape[1]), value=False)
        additive = torch.zeros(places.shape, dtype=self.mask_dtype, device=self.device)
        return additive.masked_fill_(~places, -math.inf)[:, None, None]

    def _forward(self, ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        has_states_only = self.cache_argument != KEYS_AND_VALUES
        with autocast(self.device, self.compute_dtype):
            output = self.lm(
                input_ids=ids,
                attention_mask=None if has_states_only and ids.shape[1] == 1 else attention_mask,
                position_ids=position_ids,
                use_cache=True,
                logits_to_keep=1,
                **{self.cache_argument: self.cache},
            )
        return at_least_float32(output.logits[:, -1])


_RECORDED: WeakKeyDictionary[PreTrainedModel, tuple[PreTrainedModel, GraphDecoder | None]] = WeakKeyDictionary()
"""For each model, the copy whose memory its CUDA graphs read. Capturing anew for every batch would cost more than it
saves."""


def _recorded(policy: Policy) -> tuple[PreTrainedModel, GraphDecoder | None]:
    """Return the policy's inference copy with its current weights, and its graphs, if it can be captured."""
    if policy.lm not in _RECORDED:
        copied = inference_copy(policy.lm, policy.compute_dtype)
        _RECORDED[policy.lm] = copied, graph_decoder(copied, policy.compute_dtype)
    copied, graph = _RECORDED[policy.lm]
    refresh(copied, policy.lm)
    return copied, graph
