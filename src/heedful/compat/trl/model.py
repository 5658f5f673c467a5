"""A causal language model with TRL's value head: a linear layer on the last hidden states, on the policy's own trunk."""

import copy
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import HfApi, get_token
from peft import PeftConfig, PeftModel, PromptLearningConfig, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from heedful.core.masking import at_least_float32
from heedful.errors import CheckpointError, ConfigError, MachineError
from heedful.models.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, OLD_WEIGHTS
from heedful.models.origins import read_tensors, stored_file, trl_head
from heedful.models.source import explained
from heedful.redact import redact

__all__ = ["AutoModelForCausalLMWithValueHead", "ValueHead", "create_reference_model"]

FIRST_OF_LAYER = ("transformer.h.{}.", "model.decoder.layers.{}.", "gpt_neox.layers.{}.", "model.layers.{}.")
"""Names of a layer's parameters, by architecture."""


class ValueHead(nn.Module):
    """``V_t = w . dropout(h_t) + b`` of the last hidden state h_t: the value of the state after token t. Shape [..., 1]."""

    def __init__(self, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.summary = nn.Linear(hidden_size, 1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.summary(self.dropout(hidden_states).to(self.summary.weight.dtype))


class AutoModelForCausalLMWithValueHead(nn.Module):
    """A causal language model ``pretrained_model`` (of transformers, or PEFT's around one) with a value head ``v_head``.

    Made by `from_pretrained`. Called with ``input_ids`` and ``attention_mask``, it returns logits in float32, the language
    model's loss if there were labels (else None), and values ``[batch, time]``.
    """

    def __init__(
        self,
        pretrained_model: PreTrainedModel | PeftModel,
        *,
        summary_dropout_prob: float = 0.1,
        v_head_init_strategy: Literal["normal"] | None = None,
        v_head_initializer_range: float = 0.2,
    ) -> None:
        super().__init__()
        config = pretrained_model.config
        adapter = pretrained_model.active_peft_config if isinstance(pretrained_model, PeftModel) else None
        devices = {str(device) for device in getattr(pretrained_model, "hf_device_map", {}).values()}
        if isinstance(adapter, PromptLearningConfig):
            raise ConfigError(f"{adapter.peft_type.value} cannot be trained by PPO; use peft.LoraConfig")
        if len(devices) > 1:
            raise ConfigError(
                f"device_map spreads the model over {', '.join(sorted(devices))}, which is not supported; leave it out for "
                "one device, or start one process per device with `accelerate launch`"
            )
        if getattr(config, "is_encoder_decoder", False):
            raise ConfigError(
                f"{config.model_type} is an encoder-decoder, which is not supported; use a causal language model such as gpt2"
            )
        if pretrained_model.get_output_embeddings() is None:
            raise ConfigError(
                f"{type(pretrained_model).__name__} has no language model head; load a causal language model"
            )
        if v_head_init_strategy not in (None, "normal"):
            raise ConfigError(f"v_head_init_strategy is {v_head_init_strategy!r}; choose 'normal' or None")
        self.pretrained_model = pretrained_model
        self.config = config
        self.is_peft_model = isinstance(pretrained_model, PeftModel)
        self.is_loaded_in_8bit = getattr(pretrained_model, "is_loaded_in_8bit", False)
        self.is_loaded_in_4bit = getattr(pretrained_model, "is_loaded_in_4bit", False)
        self.rm_adapter_name: str | None = None
        text = config.get_text_config()
        size = getattr(text, "word_embed_proj_dim", text.hidden_size)  # OPT projects its states before the head
        self.v_head = ValueHead(size, getattr(config, "summary_dropout_prob", summary_dropout_prob))
        if v_head_init_strategy == "normal":
            nn.init.normal_(self.v_head.summary.weight, std=v_head_initializer_range)
            nn.init.zeros_(self.v_head.summary.bias)
        self.v_head.to(pretrained_model.device)
        self.gradient_checkpointing_enable = pretrained_model.gradient_checkpointing_enable
        self.gradient_checkpointing_disable = pretrained_model.gradient_checkpointing_disable
        self.enable_input_require_grads = pretrained_model.enable_input_require_grads

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | PreTrainedModel | PeftModel,
        *,
        peft_config: PeftConfig | None = None,
        is_trainable: bool = False,
        reward_adapter: str | None = None,
        reward_adapter_name: str = "reward_adapter",
        summary_dropout_prob: float = 0.1,
        v_head_init_strategy: Literal["normal"] | None = None,
        v_head_initializer_range: float = 0.2,
        **kwargs: Any,
    ) -> "AutoModelForCausalLMWithValueHead":
        """Load a model, or wrap one.

        Args:
            pretrained_model_name_or_path: a folder, a name on the Hub, or a model in memory. A folder or repository of an
                adapter loads its base model too. If it has weights ``v_head.*``, they are loaded; otherwise the head is
                new and random.
            peft_config: makes a new adapter, which is trained instead of the model's weights.
            is_trainable: whether a loaded adapter is trained on.
            reward_adapter: folder or repository of a reward model's adapter on the same base model, for
                `compute_reward_score`.
            reward_adapter_name: the adapter's name in this model.
            summary_dropout_prob: dropout before the value head; ``config.summary_dropout_prob`` goes first. `PPOTrainer`
                computes all its passes without dropout.
            v_head_init_strategy: "normal" draws the weights from a normal distribution, and the bias is 0; None is torch's
                initialisation of a linear layer.
            v_head_initializer_range: standard deviation of "normal".
            kwargs: of ``AutoModelForCausalLM.from_pretrained``, such as ``device_map``, ``torch_dtype``, ``revision``,
                ``quantization_config``. Without a dtype it is float32. ``load_in_8bit`` and ``load_in_4bit`` become a
                ``BitsAndBytesConfig``.

        Raises ConfigError and CheckpointError.
        """
        source = pretrained_model_name_or_path
        if "use_auth_token" in kwargs:
            kwargs["token"] = kwargs.pop("use_auth_token")
        hub: dict[str, Any] = {name: kwargs[name] for name in ("token", "revision", "cache_dir") if name in kwargs}
        if isinstance(source, PreTrainedModel | PeftModel):
            if kwargs:
                raise ConfigError(
                    f"from_pretrained: {', '.join(kwargs)} cannot change a model that is loaded; pass them where it is loaded"
                )
            model = source
        elif isinstance(source, str | Path):
            with explained(str(source), "causal language model"):
                model = _load(str(source), is_trainable=is_trainable, hub=hub, kwargs=kwargs)
        else:
            raise ConfigError(
                f"from_pretrained: got a {type(source).__name__}; pass a folder, a name on the Hub, or a model"
            )
        if peft_config is not None:
            model = _add_adapter(model, peft_config)
        wrapped = cls(
            model,
            summary_dropout_prob=summary_dropout_prob,
            v_head_init_strategy=v_head_init_strategy,
            v_head_initializer_range=v_head_initializer_range,
        )
        if isinstance(source, str | Path):
            with explained(str(source), "value head"):
                head = trl_head(str(source), **hub)
            if head is not None:
                head.copy_to(wrapped.v_head.summary)
        if reward_adapter is not None:
            wrapped._add_reward_adapter(reward_adapter, reward_adapter_name, hub)
        return wrapped

    @property
    def current_device(self) -> torch.device:
        """The model's device."""
        return self.v_head.summary.weight.device

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        output = self.pretrained_model(
            input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True, use_cache=False, **kwargs
        )
        return at_least_float32(output.logits), output.loss, self.v_head(output.hidden_states[-1]).squeeze(-1)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """``pretrained_model.generate``."""
        return self.pretrained_model.generate(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Weights under the names of TRL's checkpoints: the language model's own, and ``v_head.summary.*``.

        With an adapter only the head's: PEFT saves the adapter.
        """
        weights = {} if self.is_peft_model else self.pretrained_model.state_dict(*args, **kwargs)
        return {**weights, **{f"v_head.{name}": weight for name, weight in self.v_head.state_dict().items()}}

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write a folder that `from_pretrained` and TRL load, and transformers or PEFT without the head.

        ``v_head.summary.*`` is beside the language model's weights, or in ``pytorch_model.bin`` beside an adapter.

        Args:
            save_directory: the folder.
            kwargs: of ``save_pretrained`` of transformers, or of PEFT for an adapter.
        """
        if self.is_peft_model:
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            torch.save(self.state_dict(), Path(save_directory) / "pytorch_model.bin")
        else:
            kwargs.setdefault("state_dict", self.state_dict())
        self.pretrained_model.save_pretrained(str(save_directory), **kwargs)

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Upload what `save_pretrained` writes to a repository of the Hub, which is made if there is none.

        Returns its address.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return upload(folder, repo_id, private=private, token=token)

    def compute_reward_score(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Scores ``[batch, time, labels]`` of the reward adapter at every token. Raises ConfigError if there is none."""
        if self.rm_adapter_name is None:
            raise ConfigError(
                "this model has no reward adapter; load it with from_pretrained(..., reward_adapter=FOLDER)"
            )
        policy = self.pretrained_model.active_adapter
        trainable = {weight for weight in self.pretrained_model.parameters() if weight.requires_grad}
        self.eval()
        self.pretrained_model.set_adapter(self.rm_adapter_name)
        try:
            with torch.no_grad():
                output = self.pretrained_model(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    output_hidden_states=True,
                    use_cache=False,
                    **kwargs,
                )
                return self.score(output.hidden_states[-1].to(self.score.weight.dtype))
        finally:
            self.pretrained_model.set_adapter(policy)
            for weight in self.pretrained_model.parameters():  # set_adapter changes what is trained
                weight.requires_grad_(weight in trainable)

    def _add_reward_adapter(self, adapter: str, name: str, hub: dict[str, Any]) -> None:
        if not self.is_peft_model:
            raise ConfigError(
                "reward_adapter needs a policy that is an adapter on the same base model; pass peft_config too"
            )
        self.pretrained_model.load_adapter(adapter, name, is_trainable=False, **hub)
        path = stored_file(adapter, ADAPTER_WEIGHTS, **hub) or stored_file(adapter, OLD_WEIGHTS, **hub)
        weights = (
            {key: weight for key, weight in read_tensors(path).items() if "score" in key.split(".")} if path else {}
        )
        head = {key.rpartition(".")[2]: weight for key, weight in weights.items()}
        if "weight" not in head:
            raise CheckpointError(
                f"{adapter}: its adapter has no weight named score, so it is no reward model's; train one with "
                "peft.LoraConfig(task_type='SEQ_CLS')"
            )
        labels, size = head["weight"].shape
        self.score = nn.Linear(size, labels, bias="bias" in head)
        self.score.load_state_dict(head)
        self.score.to(self.current_device, self.pretrained_model.dtype).requires_grad_(False)
        self.rm_adapter_name = name


def create_reference_model(
    model: AutoModelForCausalLMWithValueHead, num_shared_layers: int | None = None, pattern: str | None = None
) -> AutoModelForCausalLMWithValueHead:
    """A frozen copy of a model, in eval mode.

    Args:
        model: the policy.
        num_shared_layers: number of first layers that both models share. The policy's are frozen with the embeddings,
            before any layer, so they are not copied. None shares nothing.
        pattern: names of a layer's parameters with ``{layer}`` for its number, if the architecture is unknown:
            "transformer.h.{layer}." for GPT-2.

    Raises ConfigError if the layer ``num_shared_layers`` is not found.
    """
    shared: dict[int, Any] = {}
    if num_shared_layers is not None:
        patterns = FIRST_OF_LAYER if pattern is None else (pattern.replace("{layer}", "{}"),)
        names = [name for name, _ in model.named_parameters()]
        firsts = [i for one in patterns for i, name in enumerate(names) if one.format(num_shared_layers) in name][:1]
        if not firsts:
            numbers = [int(found[1]) for name in names if (found := re.search(r"\.(\d+)\.", name))]
            raise ConfigError(
                f"create_reference_model: num_shared_layers is {num_shared_layers}, but the layers' numbers end at "
                f"{max(numbers, default=0)}; share fewer, or pass pattern, such as 'transformer.h.{{layer}}.'"
            )
        shared = {id(weight): weight.requires_grad_(False) for weight in list(model.parameters())[: firsts[0]]}
    return copy.deepcopy(model, shared).requires_grad_(False).eval()


def upload(folder: str, repo_id: str, *, private: bool | None, token: str | None) -> str:
    """Upload a folder to a repository of the Hub. Returns its address. Raises ConfigError and MachineError."""
    kept = f"the model is unchanged: write it with save_pretrained(FOLDER), and later run `hf upload {repo_id} FOLDER`"
    if token is None and get_token() is None:
        raise ConfigError(f"push_to_hub: you are not logged in to the Hub; run `hf auth login` or set HF_TOKEN; {kept}")
    api = HfApi(library_name="heedful", token=token)
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=address.repo_id)
    except Exception as error:  # from the Hub's client, its HTTP library, or the system
        reason = redact(next(iter(str(error).strip().splitlines()), type(error).__name__))
        raise MachineError(f"push_to_hub: nothing was uploaded to {repo_id}: {reason:.200}; {kept}") from error
    return str(address)


def _load(name: str, *, is_trainable: bool, hub: dict[str, Any], kwargs: dict[str, Any]) -> PreTrainedModel | PeftModel:
    """The model of a folder or of a name on the Hub; with the adapter, if that is what it has."""
    bits = {key: kwargs.pop(key) for key in ("load_in_8bit", "load_in_4bit") if key in kwargs}
    if any(bits.values()):
        kwargs["quantization_config"] = BitsAndBytesConfig(**bits)
        kwargs.setdefault("device_map", {"": torch.cuda.current_device() if torch.cuda.is_available() else "cpu"})
    is_quantized = kwargs.get("quantization_config") is not None
    dtype = kwargs.pop("torch_dtype", None)
    kwargs.setdefault("dtype", dtype or (torch.float16 if is_quantized else torch.float32))
    if stored_file(name, ADAPTER_CONFIG, **hub) is None:
        return AutoModelForCausalLM.from_pretrained(name, **kwargs)
    base = PeftConfig.from_pretrained(name, **hub).base_model_name_or_path
    own = {key: value for key, value in kwargs.items() if key != "revision"}  # of the adapter, not of its base
    model = AutoModelForCausalLM.from_pretrained(base, **own)
    with _peft_reads_an_old_name():
        return PeftModel.from_pretrained(model, name, is_trainable=is_trainable, **hub)


def _add_adapter(model: PreTrainedModel | PeftModel, peft_config: PeftConfig) -> PeftModel:
    if not isinstance(peft_config, PeftConfig):
        raise ConfigError(
            f"peft_config is a {type(peft_config).__name__}; it must be of peft, such as peft.LoraConfig(r=16)"
        )
    if isinstance(model, PeftModel):
        raise ConfigError(
            "from_pretrained: the model has an adapter already, so peft_config has no use; leave it out, and pass "
            "is_trainable=True to train that adapter on"
        )
    if getattr(model, "is_quantized", False):
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    with _peft_reads_an_old_name():
        return get_peft_model(model, peft_config)


@contextmanager
def _peft_reads_an_old_name() -> Iterator[None]:
    """transformers warns of a name that PEFT reads, about which nobody here can do anything."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield
