"""Reward models: Hugging Face sequence classifiers with one output, both decoders and encoders."""

import inspect
import math
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from torch import Tensor, nn
from transformers import PreTrainedModel

from heedful.core.masking import at_least_float32
from heedful.devices import upload
from heedful.errors import CheckpointError
from heedful.files import read_object, write_json
from heedful.kernels.device import autocast, scale_gradient
from heedful.kernels.packing import can_pack, hidden_states, token_states
from heedful.models.shape import context_length
from heedful.models.source import explained
from heedful.types import Reading

HEADS = ("score", "classifier")
"""Names of the last linear layer of sequence classifiers: for decoders, and for encoders."""


class RewardModel(nn.Module):
    """A sequence classifier with one output: maps token ids to one score per row.

    Args:
        classifier: the Hugging Face model.
        compute_dtype: dtype of the trunk's matrix products. The head is computed in float32; bfloat16 would have steps
            of 1/32 for scores near 5.
        offset: subtracted from the head's output; see `RewardFacts`.
        reads: end of a conversation's text, for `heedful.data.chat.RewardInputs`; None for an encoder.
    """

    def __init__(
        self,
        classifier: PreTrainedModel,
        *,
        compute_dtype: torch.dtype,
        offset: float = 0.0,
        reads: Reading | None = None,
    ) -> None:
        super().__init__()
        self.offset = offset
        self.reads = reads
        self.classifier = classifier
        self.compute_dtype = compute_dtype
        self.grad_scaler: torch.amp.GradScaler | None = None
        self._is_read_at_the_end: bool | None = None
        score_head(classifier).register_forward_hook(_recompute_in_float32)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens.

        RoBERTa's positions start after its padding index, so it has fewer than in its configuration.
        """
        taken = [
            module.padding_idx + 1
            for name, module in self.classifier.named_modules()
            if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
        ]
        return context_length(self.classifier.config) - max(taken, default=0)

    def forward(self, rows: Sequence[dict[str, list[int]]]) -> Tensor:
        """Scores ``[batch]`` in at least float32.

        Args:
            rows: encoded texts from `heedful.data.chat.RewardInputs.encode`.

        A decoder's score is read at the last token that is not padding, as in all tools that load the folder. Scores do
        not depend on the rest of the batch, up to rounding.
        """
        device, pad_id = self.classifier.device, padding_id(self.classifier)
        with autocast(device, self.compute_dtype):
            texts = [_without_padding(row["input_ids"], pad_id) for row in rows]
            lengths = [len(text) for text in texts]
            if min(lengths) > 0 and self._can_pack():  # only for decoders, whose rows have only ids
                ids, mask = (
                    _padded(texts, 0, device),
                    _padded([[1] * n for n in lengths], 0, torch.device("cpu")).bool(),
                )
                read = torch.zeros(sum(lengths), dtype=torch.bool)
                read[torch.tensor(lengths).cumsum(0) - 1] = True
                logits = self.classifier.score(token_states(self.classifier.base_model, ids, mask, read))
            else:
                logits = self._padded_logits(rows)
        return scale_gradient(at_least_float32(logits.squeeze(-1)), self.grad_scaler) - self.offset

    def dummy_loss(self) -> Tensor:
        """Zero loss that touches every weight, so that an idle rank joins the collective."""
        return 0.0 * self([{"input_ids": [1, 2]}]).sum()

    def try_packing(self) -> None:
        """Test packing now, and not in a later pass."""
        with autocast(self.classifier.device, self.compute_dtype):
            self._can_pack()

    def _can_pack(self) -> bool:
        """Whether the score is the head's output at a row's last token, and the trunk supports packed rows."""
        trunk, score = self.classifier.base_model, getattr(self.classifier, "score", None)
        if score is None or not can_pack(trunk):
            return False
        if self._is_read_at_the_end is None:
            self._is_read_at_the_end = self._try_reading(trunk)
        return self._is_read_at_the_end

    @torch.no_grad()
    def _try_reading(self, trunk: PreTrainedModel) -> bool:
        """Whether the classifier's output is its head's at the last token."""
        ids = [i for i in range(5) if i != padding_id(self.classifier)]
        was_training = self.classifier.training
        self.classifier.eval()
        try:
            whole = self._padded_logits([{"input_ids": ids}])
            states = hidden_states(trunk, torch.tensor([ids], device=self.classifier.device))
        finally:
            self.classifier.train(was_training)
        return bool(whole.any()) and torch.allclose(whole, self.classifier.score(states[:, -1]), rtol=1e-2, atol=0)

    def _padded_logits(self, rows: Sequence[dict[str, list[int]]]) -> Tensor:
        device, texts = self.classifier.device, [row["input_ids"] for row in rows]
        arguments: dict[str, Any] = {"input_ids": _padded(texts, padding_id(self.classifier), device)}
        if "use_cache" in inspect.signature(self.classifier.forward).parameters:
            arguments["use_cache"] = False
        if "token_type_ids" in rows[0]:
            arguments["token_type_ids"] = _padded([row["token_type_ids"] for row in rows], 0, device)
        mask = _padded([[1] * len(text) for text in texts], 0, device)
        logits: Tensor = self.classifier(attention_mask=mask, **arguments).logits
        return logits


def _padded(rows: Sequence[list[int]], value: int, device: torch.device) -> Tensor:
    """Rows of numbers as a tensor, padded on the right with a value."""
    longest = max(map(len, rows))
    return upload(torch.tensor([row + [value] * (longest - len(row)) for row in rows]), device)


def _without_padding(ids: list[int], pad_id: int) -> list[int]:
    """A text up to its last token that is not padding, where transformers reads the score.

    If all tokens are padding, the first one is kept.
    """
    end = len(ids)
    while end > 1 and ids[end - 1] == pad_id:
        end -= 1
    return ids[:end]


def padding_id(classifier: PreTrainedModel) -> Any:
    """transformers' padding token; for a multimodal model, the text part's.

    None if the configuration has none.
    """
    return classifier.config.get_text_config().pad_token_id


def score_head(classifier: PreTrainedModel) -> nn.Linear:
    """The last linear layer. Raises CheckpointError if it has none of the usual names."""
    for name in HEADS:
        head = getattr(classifier, name, None)
        head = getattr(head, "out_proj", head)  # RoBERTa's head has several layers
        if isinstance(head, nn.Linear):
            return head
    raise CheckpointError(f"{type(classifier).__name__}: it has no linear head named {' or '.join(HEADS)}")


def _recompute_in_float32(head: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """A forward hook: if autocast made the output half precision, compute it again in float32."""
    assert isinstance(head, nn.Linear)
    if output.dtype == at_least_float32(output).dtype:
        return output
    with torch.autocast(output.device.type, enabled=False):
        return nn.functional.linear(at_least_float32(inputs[0]), head.weight, head.bias)


# heedful.json: facts about a reward model besides its weights, ignored by other tools ---------------------------------
#
#     {"offset": 0.25, "reads": "turn-end"}
#
# offset: score = head(x) - offset. Heads of decoders have no bias, so it needs a separate file.
# reads: end of a conversation's text (`heedful.types.Reading`).

FILE = "heedful.json"


@dataclass(frozen=True)
class RewardFacts:
    """Facts about a reward model besides its weights."""

    offset: float = 0.0
    reads: Reading | None = None
    """None if not given. Encoders read pairs of texts and do not need it."""


def save_facts(folder: Path, facts: RewardFacts) -> None:
    """Write the facts into a model's folder. Omits an offset of 0 and a reading of None."""
    content: dict[str, float | str] = {"offset": facts.offset} if facts.offset else {}
    content |= {"reads": facts.reads} if facts.reads else {}
    if content:
        write_json(folder / FILE, content)


def load_facts(name: str) -> RewardFacts:
    """The facts of a reward model in a folder or on the Hub. heedful's folders from before ``reads`` are read as they
    were trained: to the end of the turn.

    Raises CheckpointError if the file is unreadable or invalid, or the Hub unreachable: scores would silently be
    shifted, or those of another text.
    """
    with explained(name, FILE):
        path = Path(name) / FILE if Path(name).is_dir() else _fetched(name)
        has_file = path is not None and path.is_file()
        content = read_object(path, "download the model again") if path is not None and has_file else {}
    offset = content.get("offset", 0.0)
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not math.isfinite(offset):
        raise CheckpointError(f"{name}: offset in its {FILE} is {offset!r}; expected a finite number")
    reads = content.get("reads")
    if reads not in (None, *typing.get_args(Reading)):
        allowed = " or ".join(typing.get_args(Reading))
        raise CheckpointError(f"{name}: reads in its {FILE} is {reads!r}; expected {allowed}")
    if reads is None and (has_file or _of_an_older_run(Path(name))):
        reads = "turn-end"
    return RewardFacts(float(offset), reads)


def _fetched(name: str) -> Path | None:
    """The file of a model on the Hub; None if it has none. Raises CheckpointError if the Hub is unreachable."""
    try:
        return Path(hf_hub_download(name, FILE))
    except Exception as error:  # errors of the Hub, of the connection, and OSError
        says_none = isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError)
        if says_none or try_to_load_from_cache(name, FILE) is not None:  # the cache marks files that do not exist
            return None
        raise CheckpointError(
            f"{name}: its {FILE} cannot be fetched from the Hub, so its score offset and end of text are unknown "
            f"({str(error).strip().splitlines()[0]}). Try again with a connection, or download the whole model "
            f"(hf download {name} --local-dir FOLDER) and use that folder"
        ) from error


def _of_an_older_run(folder: Path) -> bool:
    """Whether a folder is ``final/``, ``best/`` or a checkpoint of ``heedful reward``."""
    for run in (folder.parent, folder.parent.parent):
        if (run / "environment.json").exists():
            remedy = "it tells how a reward model reads texts: bring it back"
            return bool(read_object(run / "environment.json", remedy).get("command") == "heedful reward")
    return False
