"""Decoding with a key-value cache: read prompts, then one token per row at a time."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from heedful.core.masking import at_least_float32
from heedful.data.batches import collate
from heedful.devices import upload
from heedful.distributed.sharding import gathered
from heedful.engines.cuda_graph import GraphDecoder, graph_decoder
from heedful.engines.kv_cache import KEYS_AND_VALUES, PromptPlaces, Slots, cache_argument, takes_slots
from heedful.engines.one_token import step_of
from heedful.kernels.cpu.products import pack_linears
from heedful.kernels.device import HALF, autocast, check_graphs
from heedful.kernels.packing import positions
from heedful.kernels.weights import as_sampled, inference_copy, join_matrices, refresh
from heedful.models.adapters import can_merge, merged, merged_weights
from heedful.models.policy import Policy


class SamplingModel:
    """A copy of a policy for decoding, with its current weights; usable for any number of batches.

    Of a sharded policy each rank gathers a full copy (collective), so decoding needs no other rank.

    Args:
        policy: the model to sample from.
        cuda_graphs: decode with CUDA graphs (`heedful.engines.cuda_graph`).
        longest: number of tokens for which graphs have room from the first batch on; a longer text needs new graphs.
        merge_adapters: add the adapters to the copy's matrices, if the model has such (`can_merge`).

    Raises ConfigError for CUDA graphs on a device without them.
    """

    def __init__(
        self, policy: Policy, *, cuda_graphs: bool = False, longest: int = 0, merge_adapters: bool = False
    ) -> None:
        self.device, self.compute_dtype, self.longest = policy.device, policy.compute_dtype, longest
        self.graph: GraphDecoder | None = None
        if cuda_graphs:
            check_graphs(self.device)
            self.lm, self.graph = _recorded(policy, merge_adapters=merge_adapters)
        else:
            lm = gathered(policy, convert=as_sampled(self.compute_dtype)).lm
            self.lm = pack_linears(_copy(lm, self.compute_dtype, merge_adapters=merge_adapters))
        self.takes_slots = takes_slots(self.lm)
        """Whether rows may begin while others go on."""


class Decoder:
    """Model and cache for decoding a batch of rows.

    Args:
        model: the copy of the policy for decoding.
        num_rows: maximum number of rows at a time.
        longest: maximum number of tokens that a row reads, with its prompt.
        pad_id: the padding token.
    """

    def __init__(self, model: SamplingModel, *, num_rows: int, longest: int, pad_id: int) -> None:
        self.model, self.pad_id = model, pad_id
        half = model.compute_dtype if model.compute_dtype in HALF else None
        self.slots: Slots | None = None
        if model.graph is not None:
            self.slots = model.graph.room(num_rows, max(longest, model.longest))
        elif model.takes_slots:
            self.slots = Slots(model.lm, num_rows, longest, dtype=half)
            self.step = step_of(model.lm, model.compute_dtype)
        else:
            self.cache, self.argument = DynamicCache(config=model.lm.config), cache_argument(model.lm)

    @torch.no_grad()
    def read_prompts(self, prompts: Sequence[Sequence[int]], slots: Sequence[int] | None = None) -> Tensor:
        """Read the prompts of rows that begin. Equal ones are read only once.

        Args:
            prompts: token ids of each row's prompt.
            slots: the place of each row in the batch; None are the first ones, and then no other row goes on.

        Returns the logits ``[rows, vocab]`` of every row's first response token.
        """
        place = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        rows = [place[tuple(prompt)] for prompt in prompts]
        batch = collate(list(place), [[]] * len(place), pad_id=self.pad_id).to(self.model.device)
        mask = batch.attention_mask
        position_ids = positions(mask)
        rows_on_device = upload(torch.tensor(rows), self.model.device)
        if self.slots is None:
            logits = self._forward(batch.ids, mask.long(), position_ids, self.cache, self.argument)
            self.position_ids, self.mask = position_ids[:, -1:], mask.long()
            self.keep(rows)
            return logits[rows_on_device]
        if slots is None:
            self.slots.num_rows = len(prompts)
        where = range(len(prompts)) if slots is None else slots
        lengths = [len(prompt) for prompt in prompts]
        self.slots.fill(where, lengths)
        self.slots.prompts = PromptPlaces([len(prompt) for prompt in place], rows, where, self.model.device)
        logits = self._forward(batch.ids, mask.long(), position_ids, self.slots)
        self.slots.prompts = None
        return logits[rows_on_device]

    @torch.no_grad()
    def read_tokens(self, tokens: Tensor) -> Tensor:
        """Read one more token per row, ``[rows]``. Returns the logits ``[rows, vocab]`` of the next one."""
        if self.model.graph is not None:
            return at_least_float32(self.model.graph.step(tokens))
        if self.slots is not None:
            self.slots.begin_step()
            with autocast(self.model.device, self.model.compute_dtype):
                logits = self.step(tokens, self.slots)
            self.slots.end_step()
            return at_least_float32(logits)
        self.position_ids = self.position_ids + 1
        self.mask = nn.functional.pad(self.mask, (0, 1), value=1)
        mask = self.mask if self.argument == KEYS_AND_VALUES else None
        return self._forward(tokens.unsqueeze(1), mask, self.position_ids, self.cache, self.argument)

    @torch.no_grad()
    def keep(self, rows: Sequence[int]) -> None:
        """Continue with only the rows at these indices, in this order; an index may occur more than once."""
        if self.slots is not None:
            self.slots.keep(rows)
            return
        chosen = upload(torch.tensor(rows), self.model.device)
        self.cache.reorder_cache(chosen)  # layers with recurrent states have it too
        self.position_ids, self.mask = self.position_ids[chosen], self.mask[chosen]

    def _forward(
        self,
        ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        cache: Slots | DynamicCache,
        argument: str = KEYS_AND_VALUES,
    ) -> Tensor:
        with autocast(self.model.device, self.model.compute_dtype):
            output = self.model.lm(
                input_ids=ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                use_cache=True,
                logits_to_keep=1,
                **{argument: cache},
            )
        return at_least_float32(output.logits[:, -1])


_RECORDED: WeakKeyDictionary[PreTrainedModel, tuple[PreTrainedModel, GraphDecoder | None]] = WeakKeyDictionary()
"""For each model, the copy whose memory its CUDA graphs read. Capturing anew for every batch would cost more than it
saves."""


def _recorded(policy: Policy, *, merge_adapters: bool) -> tuple[PreTrainedModel, GraphDecoder | None]:
    """Return the policy's inference copy with its current weights, and its graphs, if it can be captured."""
    if policy.lm not in _RECORDED:
        copied = _copy(policy.lm, policy.compute_dtype, merge_adapters=merge_adapters)
        _RECORDED[policy.lm] = copied, graph_decoder(copied, policy.compute_dtype)
    copied, graph = _RECORDED[policy.lm]
    if merge_adapters and can_merge(policy.lm):
        for name, weight in merged_weights(policy.lm):
            copied.get_submodule(name).weight.data.copy_(weight)
    else:
        refresh(copied, policy.lm)
    return copied, graph


def _copy(lm: PreTrainedModel, compute_dtype: torch.dtype, *, merge_adapters: bool) -> PreTrainedModel:
    if merge_adapters and can_merge(lm):
        lm = merged(lm, compute_dtype)
    copied = inference_copy(lm, compute_dtype)
    if lm.device.type != "cpu":  # there a product of all was as fast as one of each
        join_matrices(copied, but=lm.parameters())
    return copied
