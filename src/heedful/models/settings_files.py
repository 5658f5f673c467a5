"""The settings files of a model, read before anything is loaded: what is damaged or nonsense is refused with file, key and
value.

transformers accepts much of it: a broken ``generation_config.json`` counts as none, a negative padding token is refused when
the model is saved, after training. Checked here is what decides where a response stops, how other tools sample from what
is saved, and whether the model can be run and saved. Keys that nobody here knows are left alone.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from heedful.errors import CheckpointError
from heedful.files import read_object

FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
"""Files that hold a JSON object, if they are there."""
OTHERS = ("tokenizer.json", "chat_template.jinja")
"""Files that must be files, if they are there."""


class Rule(NamedTuple):
    """What a value must be."""

    words: str
    holds: Callable[[Any], bool]


def check_settings(folder: Path) -> None:
    """Refuse settings files of a model or adapter folder that are damaged or hold nonsense. Raises CheckpointError."""
    read = {name: content for name in FILES if (content := _read(folder / name)) is not None}
    for name in OTHERS:
        if (folder / name).is_dir():
            raise CheckpointError(f"{folder / name}: is a folder; download the model again")
    config = read.get("config.json", {})
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, dict) else [config]
    sizes = [part["vocab_size"] for part in parts if _is_count(part.get("vocab_size"))]
    tokens = token_rules(max(sizes, default=None))
    of_config = dict(tokens)
    if any("Classification" in str(name) for name in _listed(config.get("architectures"))):
        del of_config["eos_token_id"]  # such a model writes nothing, and GPT2Config writes 50256 for every vocabulary
    for part in parts:
        _check(folder / "config.json", part, SIZES | _dropouts(part) | of_config)
    _check(folder / "generation_config.json", read.get("generation_config.json", {}), GENERATION | tokens)
    _check(folder / "tokenizer_config.json", read.get("tokenizer_config.json", {}), TOKENIZER)


def check_generation(path: Path, content: Mapping[str, Any], rows: int) -> None:
    """Refuse a generation config that holds nonsense.

    Args:
        path: its file, for messages.
        content: its keys and values.
        rows: how many tokens the model has.

    Raises CheckpointError.
    """
    _check(path, content, GENERATION | token_rules(rows))


def check_eos(folder: Path, token: str) -> None:
    """Refuse an end-of-sequence token that the tokenizer's files do not have: transformers adds it, as a new token that the
    model never learned to write.

    Args:
        folder: the tokenizer's folder; one without ``tokenizer.json`` is not checked.
        token: the end-of-sequence token.

    Raises CheckpointError.
    """
    if not (folder / "tokenizer.json").is_file():
        return
    settings = _read(folder / "tokenizer_config.json") or {}
    with_tokens = [settings.get("added_tokens_decoder") or {}, _read(folder / "added_tokens.json") or {}]
    text = (folder / "tokenizer.json").read_text(encoding="utf-8") + json.dumps(with_tokens, ensure_ascii=False)
    if not any(json.dumps(token, ensure_ascii=escaped) in text for escaped in (False, True)):
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: eos_token is {token!r}, which is no token of tokenizer.json, so no "
            "response could end with it; name the token that ends a response"
        )


def token_rules(rows: int | None) -> dict[str, Rule]:
    """Rules of the keys that name tokens.

    Args:
        rows: how many tokens the model has; None if that is not known.
    """
    allowed = "a token id (0 or above)" if rows is None else f"a token id from 0 to {rows - 1}"

    def is_id(value: Any) -> bool:
        return type(value) is int and 0 <= value < (math.inf if rows is None else rows)

    several = Rule(
        f"{allowed}, or a list of them",
        lambda value: is_id(value) or (isinstance(value, list) and all(map(is_id, value))),
    )
    # Nothing is looked up by the config's own BOS, and GPT2Config writes 50256 for every vocabulary.
    start = Rule("a token id (0 or above)", lambda value: type(value) is int and value >= 0)
    return {"eos_token_id": several, "pad_token_id": Rule(allowed, is_id), "bos_token_id": start}


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON object; None if there is no such file. Raises CheckpointError."""
    return read_object(path, "download the model again") if path.exists() else None


def _check(path: Path, content: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    """Refuse values that break a rule; a missing value or null breaks none."""
    for key, rule in rules.items():
        value = content.get(key)
        if value is not None and not rule.holds(value):
            shown = json.dumps(value, ensure_ascii=False)
            raise CheckpointError(
                f"{path}: {key} is {shown if len(shown) < 100 else shown[:100] + '...'}; it must be {rule.words}, or null. "
                "Correct it, or take the key out"
            )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_template(value: Any) -> bool:
    """Text, or several texts by name, as a list of ``{"name", "template"}`` or a mapping."""
    if isinstance(value, list):
        return all(isinstance(one, dict) and isinstance(one.get("template"), str) for one in value)
    return isinstance(value, str) or (isinstance(value, dict) and all(isinstance(one, str) for one in value.values()))


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _dropouts(content: Mapping[str, Any]) -> dict[str, Rule]:
    named = (key for key, value in content.items() if key.endswith(DROPOUTS) and not isinstance(value, bool))
    return dict.fromkeys(named, SHARE)


def _from(low: float, high: float = math.inf, *, without: bool = False) -> Callable[[Any], bool]:
    """Whether a value is a number in a range, whose low end does not count if ``without``."""
    return lambda value: _is_number(value) and (low < value if without else low <= value) and value <= high


DROPOUTS = ("dropout", "dropout_prob", "dropout_rate", "pdrop")
"""The ends of keys that hold a share to drop."""
SHARE = Rule("a number from 0 to 1", _from(0, 1))
POSITIVE = Rule("a number above 0", _from(0, without=True))
COUNT = Rule("a whole number above 0", _is_count)
COUNTS = Rule(
    "a whole number above 0", lambda value: _is_count(value) or isinstance(value, list)
)  # some have one per layer
SIZES = {
    "vocab_size": COUNT,
    **dict.fromkeys(("hidden_size", "n_embd", "num_hidden_layers", "n_layer", "head_dim"), COUNT),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads"), COUNTS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), COUNT),
}
GENERATION = {
    "temperature": Rule("a number, 0 or above", _from(0)),
    **dict.fromkeys(("top_p", "min_p", "typical_p"), SHARE),
    # -1: all, as vLLM writes it
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
