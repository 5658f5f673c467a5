"""Models and tokenizers on disk, in Hugging Face format."""

import contextlib
import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from heedful.errors import CheckpointError, ConfigError
from heedful.hub import local_model
from heedful.models.adapters import ADAPTER_CONFIG, adapter_chain, merge_adapters
from heedful.models.attention import use_attention
from heedful.models.quantize import FourBit

PLAIN_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ 'Assistant: ' + message['content'] + eos_token + '\n' }}"
    "{% else %}{{ message['role'] | capitalize + ': ' + message['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
"""``--chat-template plain``: ``User: ...``, ``System: ...`` and ``Assistant: ...`` lines, answers closed by EOS."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)

transformers.utils.logging.disable_progress_bar()


def check_model_folder(name: str) -> None:
    """Refuse a local path that is missing or holds no model, before anything heavy is loaded.

    A folder of LoRA adapters stands for its base model, which must be there too. Raises CheckpointError. A name of the form
    ``org/model`` or ``model`` that is no local path is left to the Hub.
    """
    name = local_model(name)
    base, adapters = adapter_chain(name)
    if adapters:
        try:
            check_model_folder(base)
        except CheckpointError as error:
            raise CheckpointError(f"{adapters[0]} holds adapters, whose base is not there: {error}") from error
        return
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            models = sorted({str(p.parent) for kind in ("config.json", ADAPTER_CONFIG) for p in path.glob(f"*/{kind}")})
            hint = f"; did you mean {' or '.join(models)}?" if models else ""
            raise CheckpointError(f"{name} is a folder without a config.json, so it is no Hugging Face model{hint}")
    elif path.exists():
        raise CheckpointError(f"{name} is a file; a model is a folder in Hugging Face format, or a Hub name")
    else:
        parent = path.parent
        siblings = [p.name for p in parent.iterdir()] if parent.is_dir() else []
        near = difflib.get_close_matches(path.name, siblings, n=1)
        looks_local = HUB_NAME.fullmatch(name) is None or Path(path.parts[0]).is_dir()
        if looks_local or (near and len(path.parts) == 1):
            hint = f"; did you mean {parent / near[0]}?" if near else ""
            raise CheckpointError(f"model {name} does not exist{hint}")


def load_tokenizer(name: str, *, chat_template: str = "") -> PreTrainedTokenizerBase:
    """The tokenizer of a model. ``chat_template`` replaces its template: ``plain`` or the path of a Jinja file.

    Raises CheckpointError where there is none.
    """
    name = local_model(name)
    check_model_folder(name)
    with explained(name, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(_tokenizer_home(name))
        if set(tokenizer.get_vocab()) <= {token.content for token in tokenizer.added_tokens_decoder.values()}:
            raise CheckpointError(f"{name}: cannot load a tokenizer from it: no vocabulary; is tokenizer.json missing?")
    if chat_template == "plain":
        adds_bos = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
        tokenizer.chat_template = ("{{ bos_token }}" if adds_bos else "") + PLAIN_TEMPLATE
    elif chat_template:
        if not Path(chat_template).is_file():
            raise ConfigError(f"--chat-template: {chat_template!r} is neither 'plain' nor an existing Jinja file")
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    return tokenizer


def _tokenizer_home(name: str) -> str:
    """The model's folder; where adapters came without a tokenizer, that of the nearest base that has one."""
    base, adapters = adapter_chain(name)
    with_one = [str(folder) for folder in adapters if (folder / "tokenizer_config.json").is_file()]
    return with_one[-1] if with_one else base


def load_causal_lm(name: str, four_bit: FourBit | None = None) -> PreTrainedModel:
    """A causal language model with float32 weights, or with linear layers in 4 bits; adapters are merged into it.

    Raises CheckpointError where weights are missing.
    """
    name = local_model(name)
    check_model_folder(name)
    base, adapters = adapter_chain(name)
    with explained(name, "causal language model"):
        model, info = AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, output_loading_info=True, **(four_bit.arguments() if four_bit else {})
        )
        refuse_hub_adapters(model, name)
        model = merge_adapters(model, adapters)
        for folder in adapters:
            if (folder / "generation_config.json").is_file():
                model.generation_config = GenerationConfig.from_pretrained(folder)
    if info["missing_keys"]:
        raise CheckpointError(
            f"{name}: not a complete causal language model; it lacks {len(info['missing_keys'])} weights, "
            f"first {sorted(info['missing_keys'])[0]}"
        )
    return use_attention(learn_every_embedding(model))


def load_trunk(name: str, four_bit: FourBit | None = None) -> PreTrainedModel:
    """The trunk of a model, without its head, as `load_causal_lm` does. Raises CheckpointError where weights are missing."""
    name = local_model(name)
    check_model_folder(name)
    base, adapters = adapter_chain(name)
    with explained(name, "model"):
        model, info = AutoModel.from_pretrained(
            base, dtype=torch.float32, output_loading_info=True, **(four_bit.arguments() if four_bit else {})
        )
        refuse_hub_adapters(model, name)
        model = merge_adapters(model, adapters)
    if info["missing_keys"]:
        raise CheckpointError(f"{name}: its trunk lacks weights, first {sorted(info['missing_keys'])[0]}")
    return use_attention(learn_every_embedding(model))


def load_config(name: str) -> Any:
    """A model's configuration alone. Raises CheckpointError."""
    name = local_model(name)
    check_model_folder(name)
    with explained(name, "configuration"):
        return AutoConfig.from_pretrained(adapter_chain(name)[0])


def refuse_hub_adapters(model: PreTrainedModel, name: str) -> None:
    """transformers follows adapters on the Hub to their base and leaves them unmerged. Raises CheckpointError."""
    if getattr(model, "_hf_peft_config_loaded", False):
        raise CheckpointError(f"{name} holds adapters, and is no folder here: download it, and give the folder")


def context_length(config: Any) -> int:
    """How many tokens a model can read at once; a very large number where its configuration sets no limit."""
    for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, key, None)
        if value:
            return int(value)
    return 2**31


def check_companion(flag: str, name: str | None, tokenizer: PreTrainedTokenizerBase, longest: int) -> None:
    """Refuse a reference or value model that cannot read the policy's token ids, before it is loaded.

    It must give every token of the policy's tokenizer the same id (it may know more) and read ``longest`` tokens. Nothing is
    checked where ``name`` is None. Raises ConfigError and CheckpointError.
    """
    if name is None:
        return
    own, theirs = tokenizer.get_vocab(), load_tokenizer(name).get_vocab()
    different = [token for token, i in own.items() if theirs.get(token) != i]
    if different:
        raise ConfigError(
            f"{flag} {name} has another vocabulary than the policy: {len(different)} of {len(own)} tokens differ, such as "
            f"{different[0]!r}; it must share the policy's tokenizer"
        )
    config = load_config(name)
    if context_length(config) < longest:
        raise ConfigError(
            f"{flag} {name} reads {context_length(config)} tokens, but prompts and responses need {longest}"
        )
    if getattr(config, "vocab_size", len(own)) <= max(own.values()):
        raise ConfigError(
            f"{flag} {name} has {config.vocab_size} embeddings, fewer than the policy's {len(own)} tokens"
        )


def learn_every_embedding(model: PreTrainedModel) -> PreTrainedModel:
    """Let the padding token's embedding learn too: transformers freezes it, and it often is the end-of-sequence token."""
    model.get_input_embeddings().padding_idx = None
    return model


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """A few named tensors as a safetensors file, with the folder it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The named tensors of a safetensors file. Raises CheckpointError where it cannot be read."""
    with explained(str(path), "safetensors file"):
        return load_file(path)


@contextlib.contextmanager
def explained(name: str, kind: str) -> Iterator[None]:
    """Turn what a library raises while it reads ``name`` into a CheckpointError that says what was wanted.

    transformers' own report of missing weights is silenced meanwhile: every caller checks them itself.
    """
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        nowhere = "" if Path(name).exists() else " (and there is no folder of that name here)"
        raise CheckpointError(f"{name}: cannot load a {kind} from it: {first_line}{nowhere}") from error
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
