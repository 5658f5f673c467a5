"""Resolve a model's name: a local folder, a name on the Hub, or adapters and their base. Custom code is refused,
ignored, or run with the user's permission."""

import contextlib
import difflib
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from heedful.configs.options import TrustOptions
from heedful.errors import CheckpointError, is_out_of_memory
from heedful.files import read_object
from heedful.hub import is_download, local_model
from heedful.models.adapters import ADAPTER_CONFIG, adapter_chain

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


@dataclass(frozen=True)
class Source:
    """A resolved model name.

    All loading functions accept it in place of the name.
    """

    name: str
    """The name as the user wrote it."""
    folder: str
    """The folder on this machine, or the name on the Hub."""
    base: str
    """The plain model to load: the folder itself, or the base of its adapters."""
    adapters: tuple[Path, ...]
    """Adapter folders to merge into the base, in order."""
    runs_code: bool = False
    """Whether Python code in the folders may run."""


NO_CODE = TrustOptions()


def resolve(model: str | Source, options: TrustOptions = NO_CODE) -> Source:
    """Resolve a name, and check that the model exists, before anything large is loaded.

    Args:
        model: a folder, an adapter folder (its base must also exist), or a name on the Hub. A name of the form
            ``org/model`` or ``model`` that is not a local path is assumed to be on the Hub, unchecked. A `Source` is
            returned unchanged.
        options: whether code in the folder may run. Code downloaded by name never may: it could differ in the next run.

    Raises CheckpointError if a local path is missing or is not a model, if its settings are damaged or invalid, if its
    weight index refers to files elsewhere, or if trusted code is not in the folder.
    """
    if isinstance(model, Source):
        return model
    folder = str(local_model(model))
    base, adapters = adapter_chain(folder)
    if adapters:
        try:
            _check_model_folder(base)
        except CheckpointError as error:
            raise CheckpointError(f"{adapters[0]} has adapters without their base: {error}") from error
    else:
        _check_model_folder(folder)
    for place in (Path(base), *adapters):
        check_settings(place)
    runs_code = options.trust_remote_code and Path(base).is_dir() and not is_download(base)
    if runs_code:
        for place in (Path(base), *adapters):
            check_code_is_here(place)
    return Source(str(model), folder, base, tuple(adapters), runs_code)


def _check_model_folder(name: str) -> None:
    """Raises CheckpointError for a local path that is missing or is not a model."""
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            models = sorted({str(p.parent) for kind in ("config.json", ADAPTER_CONFIG) for p in path.glob(f"*/{kind}")})
            hint = f"; did you mean {' or '.join(models)}?" if models else ""
            raise CheckpointError(f"{name} is a folder without a config.json, so it is not a Hugging Face model{hint}")
        _check_shards(path)
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


def _check_shards(folder: Path) -> None:
    """Raises CheckpointError for a weight index with files outside its folder."""
    for index in sorted(folder.glob("*.index.json")):
        with explained(str(index), "list of weights"):
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            outside = [file for file in files if Path(file).is_absolute() or ".." in Path(file).parts]
        if outside:
            raise CheckpointError(f"{index}: lists a file outside its folder: {outside[0]!r}; download the model again")


def load_config(model: str | Source) -> Any:
    """Load only a model's configuration. Raises CheckpointError."""
    source = resolve(model)
    with explained(source.folder, "configuration"):
        return AutoConfig.from_pretrained(source.base, trust_remote_code=source.runs_code)


HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}
"""Half precisions by their names in safetensors files."""


def half_of_file(source: Source) -> torch.dtype | None:
    """The half precision of a model's weights in its files; None if they are in another dtype, or in several.

    TRL's value head beside them, often in float32, does not count: it is not loaded with them.
    """
    try:
        one, index = (
            cached_file(source.base, name, _raise_exceptions_for_missing_entries=False)
            for name in ("model.safetensors", "model.safetensors.index.json")
        )
        files = [one] if one else get_checkpoint_shard_files(source.base, index)[0] if index else []
        found = set()
        for path in files:
            with safe_open(path, "pt") as file:
                names = [name for name in file.keys() if not name.startswith("v_head.")]  # noqa: SIM118  no dictionary
                found |= {file.get_slice(name).get_dtype() for name in names}
    except (OSError, ValueError, SafetensorError):
        return None  # loading says what is wrong
    return HALVES.get(found.pop()) if len(found) == 1 else None


@contextlib.contextmanager
def explained(name: str, kind: str) -> Iterator[None]:
    """Converts exceptions while a ``kind`` is loaded from ``name`` to CheckpointError, except out of memory.

    Silences transformers' report of missing weights, because all callers check them.
    """
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if "trust_remote_code" in str(error):  # transformers needs to run code, which is not allowed
            raise CheckpointError(needs_code(name)) from error
        cause = _cause(error)
        nowhere = "" if Path(name).exists() else " (and no local folder has that name)"
        raise CheckpointError(f"{name}: cannot load a {kind} from it: {cause}{nowhere}") from error
    finally:
        transformers.utils.logging.set_verbosity(verbosity)


def _cause(error: Exception) -> str:
    """The message of a transformers exception, on one line."""
    said = str(error).strip()
    if "ignore_mismatched_sizes" in said:
        return "its weights have other shapes than config.json says (vocab_size, hidden_size, heads); one of the two is wrong"
    lines = [line.strip() for line in said.splitlines()]
    if isinstance(error, KeyError) and said:
        return f"it refers to {said}, which does not exist"
    if lines and "alidation error" in lines[0]:  # of a configuration, which tokenizers also read
        return f"config.json: {' '.join(lines[:2])}"
    return lines[0] if lines else type(error).__name__


# Python code that comes with a model (``auto_map`` in its config.json) ----------------------------------------------------


CODE_FILES = ("config.json", "tokenizer_config.json")
"""The files of a model that may refer to code."""


def needs_code(name: str) -> str:
    """Return the message for a model that cannot be loaded without its own code."""
    what = f"{name} needs its own Python code (auto_map in its config), which can do anything that you can, so"
    if Path(name).is_dir():
        downloaded = f" and use the folder itself: {name}" if is_download(name) else ""
        return f"{what} it runs only with your permission: read its .py files, and add --trust-remote-code{downloaded}"
    return (
        f"{what} it is never run for a model downloaded by name: the code could differ in the next run. Download it "
        f"(hf download {name} --local-dir FOLDER), read its .py files, and use that folder, with --trust-remote-code"
    )


def check_code_is_here(folder: Path) -> None:
    """Raises CheckpointError for a trusted folder that refers to code in a Hub repository, which may change."""
    for file in CODE_FILES:
        path = folder / file
        if not path.is_file():
            continue
        code = read_object(path, "download the model again").get("auto_map")
        elsewhere = [name for name in _names(code) if "--" in name]
        if elsewhere:
            raise CheckpointError(
                f"{path}: auto_map refers to {elsewhere[0]!r}, code in a Hub repository that may change. "
                "Copy the file into the folder, and remove the repository's name and -- from auto_map"
            )


def _names(code: Any) -> list[str]:
    """All strings in an ``auto_map``: its values are names, or lists of names."""
    if isinstance(code, dict | list):
        return [name for part in (code.values() if isinstance(code, dict) else code) for name in _names(part)]
    return [code] if isinstance(code, str) else []


def leave_code(config: Any, name: str) -> None:
    """Warn that a model's code is not run, if transformers can load the model without it."""
    if getattr(config, "auto_map", None):
        warnings.warn(
            f"{name} has Python code (auto_map in its config.json), which is not run: transformers' own "
            f"{config.model_type} is loaded. --trust-remote-code runs the code",
            stacklevel=4,
        )


# Settings in a model's files -------------------------------------------------------------------------------------------


FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
"""Optional files with a JSON object."""
OTHERS = ("tokenizer.json", "chat_template.jinja")
"""Names that must not be folders."""


class Rule(NamedTuple):
    """A condition on a value, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


def check_settings(folder: Path) -> None:
    """Raises CheckpointError for damaged or invalid settings files of a model or adapter folder."""
    read = {name: content for name in FILES if (content := _read(folder / name)) is not None}
    for name in OTHERS:
        if (folder / name).is_dir():
            raise CheckpointError(f"{folder / name} is a folder, not a file; download the model again")
    config = read.get("config.json", {})
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, dict) else [config]
    sizes = [part["vocab_size"] for part in parts if _is_count(part.get("vocab_size"))]
    tokens = token_rules(max(sizes, default=None))
    of_config = dict(tokens)
    if "Classification" in str(config.get("architectures")):
        del of_config["eos_token_id"]  # such a model does not generate, and GPT2Config has 50256 for every vocabulary
    for part in parts:
        dropouts = (key for key, value in part.items() if key.endswith(DROPOUTS) and not isinstance(value, bool))
        _check(folder / "config.json", part, SIZES | dict.fromkeys(dropouts, SHARE) | of_config)
    _check(folder / "generation_config.json", read.get("generation_config.json", {}), GENERATION | tokens)
    _check(folder / "tokenizer_config.json", read.get("tokenizer_config.json", {}), TOKENIZER)


def check_generation(path: Path, content: Mapping[str, Any], rows: int) -> None:
    """Raises CheckpointError, with the path, for an invalid generation config of a model with ``rows`` tokens."""
    _check(path, content, GENERATION | token_rules(rows))


def check_eos(folder: Path, token: str) -> None:
    """Raises CheckpointError for an end-of-sequence token missing in the tokenizer's files.

    transformers would add it as a new token that the model never generates. A folder without ``tokenizer.json`` is not
    checked.
    """
    if not (folder / "tokenizer.json").is_file():
        return
    settings = _read(folder / "tokenizer_config.json") or {}
    with_tokens = [settings.get("added_tokens_decoder") or {}, _read(folder / "added_tokens.json") or {}]
    text = (folder / "tokenizer.json").read_text(encoding="utf-8") + json.dumps(with_tokens, ensure_ascii=False)
    if not any(json.dumps(token, ensure_ascii=escaped) in text for escaped in (False, True)):
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: eos_token is {token!r}, which is not in tokenizer.json, so no "
            "response could end with it; set it to the token that ends a response"
        )


def token_rules(rows: int | None) -> dict[str, Rule]:
    """Rules for keys with token ids, for a model with ``rows`` tokens (None: unknown)."""
    allowed = "a token id (0 or above)" if rows is None else f"a token id from 0 to {rows - 1}"

    def is_id(value: Any) -> bool:
        return type(value) is int and 0 <= value < (math.inf if rows is None else rows)

    several = Rule(
        f"{allowed}, or a list of them",
        lambda value: is_id(value) or (isinstance(value, list) and all(map(is_id, value))),
    )
    # The config's BOS is not used for lookups, and GPT2Config has 50256 for every vocabulary.
    start = Rule("a token id (0 or above)", lambda value: type(value) is int and value >= 0)
    return {"eos_token_id": several, "pad_token_id": Rule(allowed, is_id), "bos_token_id": start}


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON object; None if there is no such file. Raises CheckpointError."""
    return read_object(path, "download the model again") if path.exists() else None


def _check(path: Path, content: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    """Raises CheckpointError for values that break a rule; missing values and null are allowed."""
    for key, rule in rules.items():
        value = content.get(key)
        if value is not None and not rule.holds(value):
            shown = json.dumps(value, ensure_ascii=False)
            raise CheckpointError(
                f"{path}: {key} is {shown if len(shown) < 100 else shown[:100] + '...'}; it must be {rule.words}, or null. "
                "Correct it, or remove the key"
            )


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_template(value: Any) -> bool:
    """Whether it is text, or several named texts, as a list of ``{"name", "template"}`` or a mapping."""
    if isinstance(value, list):
        return all(isinstance(one, dict) and isinstance(one.get("template"), str) for one in value)
    return isinstance(value, str) or (isinstance(value, dict) and all(isinstance(one, str) for one in value.values()))


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _from(low: float, high: float = math.inf, *, without: bool = False) -> Callable[[Any], bool]:
    """A test for numbers in a range, without its low end if ``without``."""
    return lambda value: _is_number(value) and (low < value if without else low <= value) and value <= high


DROPOUTS = ("dropout", "dropout_prob", "dropout_rate", "pdrop")
"""Suffixes of keys with a dropout rate."""
SHARE = Rule("a number from 0 to 1", _from(0, 1))
POSITIVE = Rule("a number above 0", _from(0, without=True))
COUNT = Rule("a whole number above 0", _is_count)
COUNTS = Rule(
    "a whole number above 0", lambda value: _is_count(value) or isinstance(value, list)
)  # some models have one per layer
SIZES = {
    "vocab_size": COUNT,
    **dict.fromkeys(("hidden_size", "n_embd", "num_hidden_layers", "n_layer", "head_dim"), COUNT),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads"), COUNTS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), COUNT),
}
GENERATION = {
    "temperature": Rule("a number, 0 or above", _from(0)),
    **dict.fromkeys(("top_p", "min_p", "typical_p"), SHARE),
    # -1 means all, as in vLLM
    "top_k": Rule("a whole number", lambda value: _is_number(value) and value >= -1 and value == int(value)),
    "repetition_penalty": POSITIVE,
    "max_new_tokens": COUNT,
    "do_sample": Rule("true or false", lambda value: isinstance(value, bool)),
}
TOKENIZER = {
    "model_max_length": POSITIVE,
    "chat_template": Rule("text, or named texts", _is_template),
    **dict.fromkeys(("eos_token", "bos_token", "pad_token", "unk_token"), Rule("the text of a token", _is_token)),
}
