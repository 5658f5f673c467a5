"""The model in training: a causal language model and, where wanted, a value head, in one module.

Its ``forward`` contains both heads, so that whatever wraps the module (data parallelism, sharding, adapters) wraps all
of it; nobody calls trunk and head from outside.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heedful import core
from heedful.errors import CheckpointError
from heedful.hub import local_model
from heedful.models.checkpoints import load_causal_lm, load_tensors, save_tensors
from heedful.models.device import autocast
from heedful.models.heads import hidden_states, scalar_head, split_language_model

LOGITS_BUDGET = 2**24
"""How many logits exist at a time: 64 MiB in float32. More tokens are taken in chunks, recomputed in the backward pass."""


VALUE_HEAD = Path("value_head") / "value_head.safetensors"
"""Where a saved model's value head lies in its folder."""


class TokenOutputs(NamedTuple):
    """What a pass says of each response token, ``[batch, time]``, zero outside the response mask."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None


class Policy(nn.Module):
    """A causal language model with an optional value head on its trunk.

    ``compute_dtype`` half precision runs the matrix products under autocast; weights keep their dtype, log-softmax and
    the value head are float32.
    """

    def __init__(
        self, lm: PreTrainedModel, *, with_value_head: bool = False, compute_dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        split_language_model(lm)
        self.lm = lm
        self.compute_dtype = compute_dtype
        hidden_size = lm.get_output_embeddings().weight.shape[1]
        self.value_head = scalar_head(hidden_size, std=0.0).to(lm.dtype) if with_value_head else None
        self.train(lm.training)

    @property
    def device(self) -> torch.device:
        return self.lm.device

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor,
        response_mask: Tensor,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> TokenOutputs:
        """Log-probs, entropy and values of the response tokens.

        ``ids`` and ``attention_mask`` are ``[batch, prompt + time]``, prompts padded on the left, responses on the right;
        ``response_mask`` is ``[batch, time]``. The prediction for token t is read one position before it, and so is its
        value: the state before the token. Logits exist only at the positions inside the mask, and only
        `LOGITS_BUDGET` of them at a time. Entropy is zeros unless ``with_entropy``.
        """
        with autocast(ids.device, self.compute_dtype):
            hidden = hidden_states(self.lm.base_model, ids, attention_mask)
            time = response_mask.shape[1]
            before = hidden[:, -time - 1 : -1][response_mask]
            tokens = ids[:, -time:][response_mask]
            logprobs, entropy = self._chunked_logprobs(before, tokens, temperature, with_entropy)
        values = None
        if self.value_head is not None:
            values = _scatter(self.value_head(before.to(self.value_head.weight.dtype)).squeeze(-1), response_mask)
        return TokenOutputs(_scatter(logprobs, response_mask), _scatter(entropy, response_mask), values)

    def _chunked_logprobs(
        self, hidden: Tensor, tokens: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        head = self.lm.get_output_embeddings()
        rows = max(1, LOGITS_BUDGET // head.weight.shape[0])

        def one_chunk(hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
            logits = head(hidden)
            logprobs = core.token_logprobs(logits, tokens, temperature=temperature)
            entropy = core.entropy(logits, temperature=temperature) if with_entropy else torch.zeros_like(logprobs)
            return logprobs, entropy

        if tokens.shape[0] <= rows:
            return one_chunk(hidden, tokens)
        parts = [
            checkpoint(one_chunk, hidden[i : i + rows], tokens[i : i + rows], use_reentrant=False)
            for i in range(0, tokens.shape[0], rows)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _scatter(per_token: Tensor, mask: Tensor) -> Tensor:
    """Numbers of the masked positions back in their places, zeros elsewhere."""
    return per_token.new_zeros(mask.shape).masked_scatter(mask, per_token)


def load_policy(
    name: str, *, device: torch.device, compute_dtype: torch.dtype, with_value_head: bool = False
) -> Policy:
    """A policy from a Hugging Face folder or Hub name; a saved value head is loaded too.

    Raises CheckpointError where the model is missing, incomplete or of an unsupported kind.
    """
    policy = Policy(load_causal_lm(name), with_value_head=with_value_head, compute_dtype=compute_dtype)
    head_file = Path(local_model(name)) / VALUE_HEAD
    if policy.value_head is not None and head_file.is_file():
        load_head(policy.value_head, head_file)
    return policy.to(device)


def load_head(head: nn.Linear, path: Path) -> None:
    """Weights of a scalar head. Raises CheckpointError where they do not fit."""
    tensors = load_tensors(path)
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    wanted = {name: list(tensor.shape) for name, tensor in head.state_dict().items()}
    if found != wanted:
        raise CheckpointError(f"{path}: holds {found}, the model needs {wanted}; it belongs to another model")
    head.load_state_dict(tensors)


def save_policy(policy: Policy, tokenizer: PreTrainedTokenizerBase, folder: Path, *, stop_ids: Sequence[int]) -> None:
    """Write a folder that transformers, vLLM and others load.

    ``stop_ids`` go into its generation config, so that generation ends elsewhere where it ends here. The value head lies in
    a folder of its own: vLLM reads every safetensors file beside config.json as weights of the language model.
    """
    policy.lm.generation_config.eos_token_id = list(stop_ids)
    policy.lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if policy.value_head is not None:
        save_tensors(policy.value_head.state_dict(), folder / VALUE_HEAD)


def freeze(model: nn.Module) -> nn.Module:
    """No gradients and evaluation mode: a reference, or a reward model that only scores."""
    return model.requires_grad_(False).eval()
