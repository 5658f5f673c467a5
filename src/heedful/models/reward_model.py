"""Reward models: Hugging Face sequence classifiers with one output, decoders and encoders alike."""

import inspect
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from heedful.core.masking import at_least_float32
from heedful.errors import CheckpointError
from heedful.hub import local_model
from heedful.models.adapters import adapter_chain, attach_adapter, merge_adapters, save_model, whole_weights
from heedful.models.attention import use_attention
from heedful.models.checkpoints import (
    check_model_folder,
    context_length,
    explained,
    learn_every_embedding,
    refuse_hub_adapters,
)
from heedful.models.device import autocast, scale_gradient
from heedful.models.heads import hidden_states
from heedful.models.packing import can_pack, is_worth_packing, packed_states
from heedful.models.quantize import FourBit
from heedful.models.score_offset import load_offset, save_offset

HEADS = ("score", "classifier")
"""Names of the last linear layer of sequence classifiers, decoder and encoder."""


class RewardModel(nn.Module):
    """A sequence classifier with one output: token ids in, one score a row out.

    The score is the head's output minus ``offset`` (see `heedful.models.score_offset`), which is 0 unless one was saved.
    Half precision is for the trunk; the head computes in float32, or scores near 5 would come in steps of 1/32.
    """

    def __init__(self, classifier: PreTrainedModel, *, compute_dtype: torch.dtype, offset: float = 0.0) -> None:
        super().__init__()
        self.offset = offset
        self.classifier = classifier
        self.compute_dtype = compute_dtype
        self.grad_scaler: torch.amp.GradScaler | None = None
        self._is_read_at_the_end: bool | None = None
        score_head(classifier).register_forward_hook(_recompute_in_float32)

    @property
    def max_length(self) -> int:
        """How many tokens it can read. RoBERTa's positions start after its padding index, which takes some away."""
        taken = [
            module.padding_idx + 1
            for name, module in self.classifier.named_modules()
            if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
        ]
        return context_length(self.classifier.config) - max(taken, default=0)

    def forward(self, rows: Sequence[dict[str, list[int]]]) -> Tensor:
        """Scores ``[batch]`` in at least float32 of encoded rows (`heedful.data.chat.RewardInputs.encode`).

        A decoder is read at its last token that is not padding, as every tool that loads the folder does. Scores do not
        depend on what else is in the batch, up to rounding.
        """
        device = self.classifier.device
        with autocast(device, self.compute_dtype):
            texts = [_without_padding(row["input_ids"], self.classifier.config.pad_token_id) for row in rows]
            lengths = [len(text) for text in texts]
            if is_worth_packing(lengths) and self._can_pack():  # of decoders only, whose rows are ids alone
                ids = torch.tensor(list(itertools.chain.from_iterable(texts)), device=device)
                ends = torch.tensor(list(itertools.accumulate(lengths)), device=device)
                logits = self.classifier.score(packed_states(self.classifier.base_model, ids, lengths)[ends - 1])
            else:
                logits = self._padded_logits(rows)
        return scale_gradient(at_least_float32(logits.squeeze(-1)), self.grad_scaler) - self.offset

    def _can_pack(self) -> bool:
        """Whether the score is the head's output at a row's last token, and the trunk takes packed rows."""
        trunk, score = self.classifier.base_model, getattr(self.classifier, "score", None)
        if score is None or not can_pack(trunk):
            return False
        if self._is_read_at_the_end is None:
            self._is_read_at_the_end = self._try_reading(trunk)
        return self._is_read_at_the_end

    @torch.no_grad()
    def _try_reading(self, trunk: PreTrainedModel) -> bool:
        """Whether the classifier's output is its head's at the last token."""
        ids = [i for i in range(5) if i != self.classifier.config.pad_token_id]
        was_training = self.classifier.training
        self.classifier.eval()
        try:
            whole = self._padded_logits([{"input_ids": ids}])
            states = hidden_states(trunk, torch.tensor([ids], device=self.classifier.device))
        finally:
            self.classifier.train(was_training)
        return bool(whole.any()) and torch.allclose(whole, self.classifier.score(states[:, -1]), rtol=1e-2, atol=0)

    def _padded_logits(self, rows: Sequence[dict[str, list[int]]]) -> Tensor:
        device, lengths = self.classifier.device, [len(row["input_ids"]) for row in rows]
        longest = max(lengths)

        def padded(name: str, value: int) -> Tensor:
            return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows], device=device)

        arguments: dict[str, Any] = {"input_ids": padded("input_ids", self.classifier.config.pad_token_id)}
        if "use_cache" in inspect.signature(self.classifier.forward).parameters:
            arguments["use_cache"] = False
        if "token_type_ids" in rows[0]:
            arguments["token_type_ids"] = padded("token_type_ids", 0)
        mask = torch.arange(longest, device=device) < torch.tensor(lengths, device=device).unsqueeze(1)
        logits: Tensor = self.classifier(attention_mask=mask.long(), **arguments).logits
        return logits


def _without_padding(ids: list[int], pad_id: int) -> list[int]:
    """A text up to its last token that is not padding, where transformers reads it; of nothing but padding the first."""
    end = len(ids)
    while end > 1 and ids[end - 1] == pad_id:
        end -= 1
    return ids[:end]


def load_reward_model(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    seed: int | None = None,
    merged: bool = False,
    four_bit: FourBit | None = None,
) -> RewardModel:
    """A reward model from a folder, an adapter folder or a Hub name.

    With ``seed`` None the checkpoint must hold a trained head. With a seed, training can start from any language model: a
    missing head is made with weights N(0, 1/(d+1)) (standard deviation 1/sqrt(d+1), Stiennon et al. 2020), and a padding
    token is added where the tokenizer has none of its own, because the score is read at the last token that is not
    padding.

    Adapters are merged with a seed, or where ``merged`` says so. Else the last ones stay beside the weights, so that scores
    are those of the run that trained them, bit for bit.

    Raises CheckpointError where the model has more than one output, no head, or no padding token.
    """
    name = local_model(name)
    check_model_folder(name)
    base, adapters = adapter_chain(name)
    with explained(name, "sequence classifier"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed or 0)  # for layers below the head that the checkpoint lacks, such as a pooler
        classifier, info = AutoModelForSequenceClassification.from_pretrained(
            base,
            dtype=torch.float32,
            num_labels=1,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **(four_bit.arguments(keep=[*HEADS, "pooler"]) if four_bit else {}),
        )
        refuse_hub_adapters(classifier, name)
        beside = [] if merged or seed is not None else adapters[-1:]
        classifier = merge_adapters(classifier, adapters[: len(adapters) - len(beside)])
        for folder in beside:
            attach_adapter(classifier, folder)
    if info["mismatched_keys"]:
        raise CheckpointError(f"{name}: its classification head has more than one output; a reward model has one score")
    missing = set(info["missing_keys"]) - whole_weights(adapters)
    head_missing = any(key.split(".")[0] in HEADS for key in missing)
    if head_missing and seed is None:
        raise CheckpointError(f"{name} has no reward head: it is no reward model yet; train one with: heedful reward")
    # A fresh head may lie on further layers that a language model lacks, such as a pooler; a trunk must be complete.
    trunk = f"{classifier.base_model_prefix}."
    lacking = sorted(
        key for key in missing if not head_missing or (key.startswith(trunk) and "pooler" not in key.split("."))
    )
    if lacking:
        raise CheckpointError(f"{name}: not a complete model; it lacks {len(lacking)} weights, first {lacking[0]}")
    if head_missing and seed is not None:
        _init_head(classifier, seed)
    if seed is not None or (adapters and tokenizer.pad_token_id is not None):  # adapters have no config.json to name it
        ensure_distinct_pad(tokenizer, classifier)
    elif classifier.config.pad_token_id is None:
        if tokenizer.pad_token_id is None:
            raise CheckpointError(f"{name}: neither config.json nor the tokenizer names a padding token (pad_token_id)")
        classifier.config.pad_token_id = tokenizer.pad_token_id
    use_attention(learn_every_embedding(classifier))
    return RewardModel(classifier, compute_dtype=compute_dtype, offset=load_offset(name)).to(device)


def score_head(classifier: PreTrainedModel) -> nn.Linear:
    """The last linear layer. Raises CheckpointError where a classifier has none of the usual names."""
    for name in HEADS:
        head = getattr(classifier, name, None)
        head = getattr(head, "out_proj", head)  # RoBERTa's head is a small network
        if isinstance(head, nn.Linear):
            return head
    raise CheckpointError(f"{type(classifier).__name__}: no linear head named {' or '.join(HEADS)} was found in it")


def _recompute_in_float32(head: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """A forward hook: where autocast made the output half precision, compute it again in float32."""
    assert isinstance(head, nn.Linear)
    if output.dtype == at_least_float32(output).dtype:
        return output
    with torch.autocast(output.device.type, enabled=False):
        return nn.functional.linear(at_least_float32(inputs[0]), head.weight, head.bias)


def _init_head(classifier: PreTrainedModel, seed: int) -> None:
    head = score_head(classifier)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head.weight.normal_(0.0, (head.in_features + 1) ** -0.5, generator=generator)
        if head.bias is not None:
            head.bias.zero_()


def ensure_distinct_pad(tokenizer: PreTrainedTokenizerBase, classifier: PreTrainedModel) -> None:
    """Give tokenizer and classifier a padding token that is not the end-of-sequence token."""
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    if tokenizer.pad_token_id >= classifier.get_input_embeddings().weight.shape[0]:
        classifier.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    classifier.config.pad_token_id = tokenizer.pad_token_id


def save_reward_model(
    model: RewardModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, offset: float | None = None
) -> None:
    """Write a folder that ``AutoModelForSequenceClassification`` loads, with its tokenizer; adapters with the head.

    ``offset`` is written beside it (None: the model's own); that class knows nothing of it and gives the raw head.
    """
    save_model(model.classifier, folder)
    tokenizer.save_pretrained(folder)
    save_offset(folder, model.offset if offset is None else offset)
