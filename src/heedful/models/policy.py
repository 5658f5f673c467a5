"""The model in training: a causal language model and, where wanted, a value head, in one module.

Its ``forward`` contains both heads, so that whatever wraps the module (data parallelism, sharding, adapters) wraps all
of it; nobody calls trunk and head from outside.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heedful import core
from heedful.errors import CheckpointError
from heedful.hub import local_model
from heedful.models.adapters import has_adapters, save_model
from heedful.models.checkpoints import load_causal_lm, load_tensors, save_tensors
from heedful.models.device import HALF, autocast, scale_gradient
from heedful.models.heads import scalar_head, scatter, split_language_model
from heedful.models.packing import response_tokens, token_states
from heedful.models.quantize import FourBit
from heedful.models.shapes import filling
from heedful.models.tied_matrix import TiedMatrix

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
        self.grad_scaler: torch.amp.GradScaler | None = None
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
        value: the state before the token. Logits exist only at the positions inside the mask, and only for a chunk of them at
        a time. Entropy is zeros unless ``with_entropy``.
        """
        responses = response_tokens(attention_mask, response_mask)
        with autocast(ids.device, self.compute_dtype), TiedMatrix(self.lm) as tied:
            before = token_states(self.lm.base_model, ids, attention_mask)[:-1][responses[1:]]
            tokens = ids[attention_mask.bool()][responses]
            logprobs, entropy = self._logprobs(before, tokens, tied.weight, temperature, with_entropy)
        values = None
        if self.value_head is not None:
            values = self._per_token(
                self.value_head(before.to(self.value_head.weight.dtype)).squeeze(-1), response_mask
            )
        return TokenOutputs(self._per_token(logprobs, response_mask), self._per_token(entropy, response_mask), values)

    def _per_token(self, numbers: Tensor, mask: Tensor) -> Tensor:
        """Numbers of the masked positions back in their places, zeros elsewhere."""
        return scale_gradient(scatter(numbers, mask), self.grad_scaler)

    def _logprobs(
        self, hidden: Tensor, tokens: Tensor, weight: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        head = self.lm.get_output_embeddings()
        if type(head) is nn.Linear:
            count, missing = len(tokens), filling(len(tokens), tokens.device, weights=weight.numel())
            if missing:
                hidden, tokens = nn.functional.pad(hidden, (0, 0, 0, missing)), nn.functional.pad(tokens, (0, missing))
            logprobs, entropy = core.head_logprobs(
                hidden,
                weight,
                tokens,
                bias=head.bias,
                temperature=temperature,
                with_entropy=with_entropy,
                compute_dtype=self.compute_dtype if self.compute_dtype in HALF else None,
            )
            return logprobs[:count], entropy[:count]
        # A head of another kind: quantised, or with adapters.
        logits = head(hidden)
        logprobs = core.token_logprobs(logits, tokens, temperature=temperature)
        entropy = core.entropy(logits, temperature=temperature) if with_entropy else torch.zeros_like(logprobs)
        return logprobs, entropy


def load_policy(
    name: str,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    with_value_head: bool = False,
    four_bit: FourBit | None = None,
) -> Policy:
    """A policy from a Hugging Face folder, an adapter folder or a Hub name; a saved value head is loaded too.

    Raises CheckpointError where the model is missing, incomplete or of an unsupported kind.
    """
    policy = Policy(load_causal_lm(name, four_bit), with_value_head=with_value_head, compute_dtype=compute_dtype)
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
    """Write a folder that transformers, vLLM and others load; of a policy with adapters, the adapters.

    ``stop_ids`` go into its generation config, so that generation ends elsewhere where it ends here. The value head lies in
    a folder of its own: vLLM reads every safetensors file beside config.json as weights of the language model.
    """
    policy.lm.generation_config.eos_token_id = list(stop_ids)
    save_model(policy.lm, folder)
    if has_adapters(policy.lm):
        policy.lm.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if policy.value_head is not None:
        save_tensors(policy.value_head.state_dict(), folder / VALUE_HEAD)


def freeze(model: nn.Module) -> nn.Module:
    """No gradients and evaluation mode: a reference, or a reward model that only scores."""
    return model.requires_grad_(False).eval()
