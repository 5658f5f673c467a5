"""The model in training: a causal language model and optionally a value head, in one module.

``forward`` computes both heads, and no caller runs trunk or head separately. So wrappers of the module (data
parallelism, sharding, adapters) wrap all of it.
"""

import copy
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heedful import core
from heedful.devices import on_host
from heedful.errors import CheckpointError
from heedful.kernels.cpu.products import filling, is_plain_linear
from heedful.kernels.device import HALF, autocast, scale_gradient
from heedful.kernels.head_logprobs import head_logprobs
from heedful.kernels.packing import before_each, marked, response_tokens, scatter, token_states
from heedful.kernels.weights import TiedMatrix
from heedful.models.heads import logit_map
from heedful.models.value_model import ValueHead


class TokenOutputs(NamedTuple):
    """Results of a pass for each response token, ``[batch, time]``, zero outside the response mask.

    ``values`` is None for a policy without a value head.
    """

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None
    states: dict[int, Tensor] | None = None
    """Inputs of the value head without gradient, ``[tokens, hidden]`` by row; None unless requested."""


class Policy(nn.Module):
    """A causal language model with an optional value head on its trunk.

    Args:
        lm: the language model.
        with_value_head: add a zero-initialised value head.
        compute_dtype: half precision runs matrix products under autocast. Weights keep their dtype; log-softmax and
            value head are computed in float32.
    """

    def __init__(
        self, lm: PreTrainedModel, *, with_value_head: bool = False, compute_dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.logit_map = logit_map(lm)
        self.lm = lm
        self.compute_dtype = compute_dtype
        self.grad_scaler: torch.amp.GradScaler | None = None
        self.tokenizer: PreTrainedTokenizerBase | None = None
        """The model's tokenizer, if loaded by `from_pretrained`."""
        self.value_head: ValueHead | None = None
        if with_value_head:
            self.add_value_head()
        self.train(lm.training)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        value_head: bool = False,
        device: str = "auto",
        dtype: Literal["auto", "float32", "bfloat16", "float16"] | torch.dtype = "auto",
        chat_template: str = "",
    ) -> "Policy":
        """A policy with its tokenizer, ready for sampling and training. Dropout is 0, so that its log-probs are
        deterministic.

        Args:
            model: a folder, an adapter folder, a name on the Hub, or a causal language model in memory. The latter is
                not copied: it keeps device and dtype, and is changed in place like a loaded one: dropout becomes 0, the
                padding token's embedding trainable, and sdpa attention is replaced by heedful's.
            tokenizer: required for a model in memory. With a name, None loads the one saved with the model.
            value_head: add a value head: the saved one, or else zero-initialised.
            device: device of a loaded model: auto, cpu, cuda, mps.
            dtype: dtype of matrix products: auto (bfloat16 where the hardware is fast at it), float32, bfloat16,
                float16.
            chat_template: replaces the tokenizer's own: ``plain``, or the path of a Jinja file.

        A model in memory is accepted if one of its kind is accepted from a folder, as a whole.

        Raises CheckpointError if the model or its tokenizer is missing or unusable, ConfigError if the device is.
        """
        from heedful.kernels.attention import use_attention
        from heedful.kernels.device import resolve_device, resolve_dtype
        from heedful.models.heads import disable_dropout
        from heedful.models.load import check_causal_lm, learn_every_embedding, load_policy
        from heedful.models.tokenizer import load_tokenizer

        is_named = isinstance(model, str | Path)
        if not isinstance(tokenizer, PreTrainedTokenizerBase) and not (is_named and tokenizer is None):
            raise CheckpointError(
                f"a model in memory needs its tokenizer, got {tokenizer!r:.60}; pass it: "
                "Policy.from_pretrained(model, tokenizer)"
            )
        if isinstance(model, str | Path):
            place, name = resolve_device(device), str(model)
            policy = load_policy(
                name, with_value_head=value_head, device=place, compute_dtype=resolve_dtype(dtype, place)
            )
            tokenizer = load_tokenizer(name, chat_template=chat_template) if tokenizer is None else tokenizer
        else:
            check_causal_lm(model)
            use_attention(learn_every_embedding(model))
            policy = cls(model, with_value_head=value_head, compute_dtype=resolve_dtype(dtype, model.device)).to(
                model.device
            )
        disable_dropout(policy)
        policy.tokenizer = tokenizer
        return policy

    def add_value_head(self) -> None:
        """Add a zero-initialised value head, unless there is one."""
        if self.value_head is None:
            head = ValueHead(self.lm.get_output_embeddings().weight.shape[1])
            self.value_head = head.to(self.lm.device, torch.promote_types(self.lm.dtype, torch.float32))

    def save(self, folder: str | Path) -> None:
        """Write weights, config and tokenizer to a folder in Hugging Face format, with the value head if there is one.

        `from_pretrained` and every command of heedful read it; so does transformers, without the value head.

        Raises CheckpointError if the policy has no tokenizer, or if it cannot be saved.
        """
        from heedful.models.save import save_as_it_is

        if self.tokenizer is None:
            raise CheckpointError("the policy has no tokenizer; load it with Policy.from_pretrained")
        save_as_it_is(self, self.tokenizer, Path(folder))

    def frozen_copy(self) -> "Policy":
        """A frozen copy of the current policy, for use as reference."""
        return freeze(copy.deepcopy(self))  # type: ignore[return-value]  # a copy of self

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
        with_values: bool = True,
        with_states: bool = False,
    ) -> TokenOutputs:
        """Log-probs, entropy and values of the response tokens.

        Args:
            ids: token ids ``[batch, prompt + time]``; prompts are padded on the left, responses on the right.
            attention_mask: True (or 1) at real tokens, ``[batch, prompt + time]``.
            response_mask: True at response tokens, ``[batch, time]``.
            temperature: divides the logits, for log-probs and entropy; 0 (greedy sampling) is 1, as in `Responses`.
            with_entropy: compute the entropy; else it is zeros.
            with_values: compute the values, if there is a value head.
            with_states: also return the value head's inputs.

        A token's prediction is read one position before it, and so is its value, that of the state before the token.
        Logits are computed only inside the mask, in chunks.
        """
        responses = response_tokens(attention_mask, response_mask)
        with autocast(ids.device, self.compute_dtype), TiedMatrix(self.lm) as tied:
            before = token_states(self.lm.base_model, ids, attention_mask, before_each(responses))
            tokens = marked(ids[:, ids.shape[1] - response_mask.shape[1] :], response_mask)
            logprobs, entropy = self._logprobs(before, tokens, tied.weight, temperature or 1.0, with_entropy)
        values = states = None
        if with_states or (with_values and self.value_head is not None):
            read = before.to(self.compute_dtype) if self.compute_dtype in HALF else before
            if with_states:
                states = dict(enumerate(read.detach().split(on_host(response_mask).sum(dim=1).tolist())))
            if with_values and self.value_head is not None:
                values = self._per_token(self.value_head(read, response_mask), response_mask)
        logprobs, entropy = self._per_token(logprobs, response_mask), self._per_token(entropy, response_mask)
        return TokenOutputs(logprobs, entropy, values, states)

    def dummy_loss(self, *, with_values: bool = True) -> Tensor:
        """Zero loss that touches every weight, so that an idle rank joins the collective."""
        ids = torch.tensor([[1, 2]], device=self.device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        outputs = self(ids, mask, mask[:, 1:], with_values=with_values)
        total = outputs.logprobs.sum() if outputs.values is None else outputs.logprobs.sum() + outputs.values.sum()
        return 0.0 * total

    def _per_token(self, numbers: Tensor, mask: Tensor) -> Tensor:
        """Scatter numbers to the True positions of the mask; zeros elsewhere."""
        return scale_gradient(scatter(numbers, mask), self.grad_scaler)

    def _logprobs(
        self, hidden: Tensor, tokens: Tensor, weight: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        head = self.lm.get_output_embeddings()
        if is_plain_linear(head):
            count, missing = len(tokens), filling(len(tokens), tokens.device, weights=[weight.numel()])
            if missing:
                hidden, tokens = nn.functional.pad(hidden, (0, 0, 0, missing)), nn.functional.pad(tokens, (0, missing))
            logprobs, entropy = head_logprobs(
                hidden,
                weight,
                tokens,
                bias=head.bias,
                temperature=temperature / self.logit_map.scale,
                cap=self.logit_map.cap,
                with_entropy=with_entropy,
                compute_dtype=self.compute_dtype if self.compute_dtype in HALF else None,
            )
            return logprobs[:count], entropy[:count]
        # The head is not a plain linear layer: it is quantised or has adapters.
        logits = self.logit_map(head(hidden))
        logprobs = core.token_logprobs(logits, tokens, temperature=temperature)
        entropy = core.entropy(logits, temperature=temperature) if with_entropy else torch.zeros_like(logprobs)
        return logprobs, entropy


def freeze(model: nn.Module) -> nn.Module:
    """Disable gradients and set evaluation mode, for a reference, or a reward model that only scores."""
    return model.requires_grad_(False).eval()
