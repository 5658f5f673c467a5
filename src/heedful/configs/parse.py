"""Parse YAML and the command line to a configuration, and write a configuration as YAML.

Both give texts by the names of settings. `value_of` reads a text as its setting's type says, and the configuration checks it,
as it checks values from Python; a flag overrides the file.
"""

import codecs
import dataclasses
import itertools
import json
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml

from heedful import user_code
from heedful.configs.help import every_setting, first_screen, settings
from heedful.configs.names import answer, is_hydra
from heedful.configs.settings import UNIONS, answering_command, flag, is_list, required, types_of
from heedful.errors import CheckpointError, ConfigError
from heedful.files import LARGEST_YAML, read_object, shallow
from heedful.redact import HIDDEN, redact

C = TypeVar("C")
PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}
"""The tags of values without an explicit tag."""
LARGEST_NODE = 5000
"""Maximal number of keys, values and marks between them of a mapping in a list of settings, its aliases unfolded."""
PRESETS = {path.stem: path for path in (Path(__file__).parent / "presets").glob("*.yaml")}
"""Settings of papers, by the names of their algorithms."""
MOST_NAMED, LONGEST_NAME = 5, 60
"""Maximal number of unknown keys in a message, and of characters shown of each."""
NULLS = ("", "null", "Null", "NULL", "~", "None", "none")


@dataclass(frozen=True)
class Given:
    """One key of a YAML file."""

    key: str
    value: str | tuple[str, ...] | None
    """Its text as written, or that of each item of a list; None is null."""
    place: str
    """File and line."""

    @property
    def flag(self) -> str:
        return flag(self.key)


def parse(config_class: type[C], arguments: Sequence[str], *, prog: str) -> C:
    """Make a configuration from the arguments after a command; the first may be a YAML file. It records the ``given`` ones.

    ``--help`` and ``--help-all`` print and exit with status 0 (SystemExit).

    Raises ConfigError with the fault in the YAML file, flag or value, its place, and the nearest valid name.
    """
    command = prog.removeprefix("heedful ")
    for word, text in (("--help-all", every_setting), ("--help", first_screen), ("-h", first_screen)):
        if word in arguments:
            print(text(config_class, command))
            raise SystemExit(0)
    words = _with_flags(arguments, config_class)
    file = _file(words.pop(0)) if words and not words[0].startswith("-") and not is_hydra(words[0]) else None
    flags = _read_flags(words, config_class, command)
    from_yaml = [] if file is None else read_keys(file, config_class)
    keys = [(one, redact(one.key[:LONGEST_NAME])) for one in from_yaml if one.key not in types_of(config_class)]
    unknown = {one.flag: f"{one.place}: {key} ({flag(key)})" for one, key in keys}
    _refuse_unknown(unknown, types_of(config_class), command)
    _refuse_hidden(file, from_yaml, flags)
    texts = {one.key: one.value for one in from_yaml} | flags
    values = {name: value_of(text, types_of(config_class)[name]) for name, text in texts.items()}
    _require(config_class, [name for name, value in values.items() if value is not None], command)
    try:
        with answering_command():
            config = config_class(**values)
    except ConfigError as error:
        named = set(re.findall(r"--[\w-]+", str(error)))
        blamed = [one for one in from_yaml if one.flag in named and one.key not in flags]
        places = [f"{one.place}: {one.key} is set here" for one in blamed]
        raise ConfigError("\n".join([str(error), *places])) from error
    object.__setattr__(config, "given", frozenset(texts))
    return config


def _file(name: str) -> Path:
    """A YAML file of settings, or the one of a preset that comes with heedful: ``vapo`` or ``sao``."""
    return Path(name) if Path(name).is_file() else PRESETS.get(name, Path(name))


def value_of(text: str | tuple[str, ...] | None, hint: Any) -> Any:
    """A text as a value of a type. One that is none stays a text, which the configuration then refuses."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if is_list(hint) and text is not None:
        return tuple(value_of(one, parts[0]) for one in (text if isinstance(text, tuple) else [text]))
    if not isinstance(text, str):
        return text
    if origin is Annotated or origin in UNIONS:
        return None if type(None) in parts and text in ("None", "none") else value_of(text, parts[0])
    read: dict[Any, Callable[[str], Any]] = {int: int, float: float, bool: _switch}
    try:
        return read.get(hint, str)(text)
    except ValueError:
        return text


def _switch(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def _read_flags(words: Sequence[str], config_class: type, command: str) -> dict[str, str | tuple[str, ...]]:
    """The texts of the settings named by flags. Raises ConfigError for an unknown flag, a stray word, and a missing value."""
    hints = types_of(config_class)
    texts: dict[str, str | tuple[str, ...]] = {}
    unknown: dict[str, None] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            _refuse_stray(word, hints)
        spelling, has_value, text = word.partition("=")
        name = spelling[2:].replace("-", "_")
        switch = name.removeprefix("no_")
        hint = hints.get(name)
        values = list(itertools.takewhile(lambda one: not one.startswith("--"), left))
        if hint is None and hints.get(switch) is not bool:
            unknown[spelling] = None
            left = left[len(values) :]
        elif hint is None:
            texts[switch] = "false"
        elif has_value:
            texts[name] = (text,) if is_list(hint) else text
        elif hint is bool:
            texts[name] = "true"
        elif is_list(hint):
            values = list(itertools.takewhile(lambda one: not one.endswith((".yaml", ".yml")), values))
            texts[name], left = tuple(values), left[len(values) :]
        elif values:
            texts[name] = left.pop(0)
        else:
            explained = next(one for one in settings(config_class) if one.name == name)
            raise ConfigError(f"{flag(name)} needs a value: {explained.values}\n{flag(name)}: {explained.explanation}")
    _refuse_unknown({one: redact(one[:LONGEST_NAME]) for one in unknown}, hints, command)
    return texts


def _refuse_unknown(unknown: Mapping[str, str], hints: Mapping[str, Any], command: str) -> None:
    """Raise ConfigError for names that are no settings. A file with thousands of them is probably not a file of settings.

    Args:
        unknown: flags, with their text in the message.
        hints: the types of the command's settings.
        command: its name.
    """
    lines = [
        f"{shown} is not a setting of heedful {command}{_advice(one[:LONGEST_NAME], hints)}"
        for one, shown in itertools.islice(unknown.items(), MOST_NAMED)
    ]
    if len(unknown) > MOST_NAMED:
        lines.append(f"and {len(unknown) - MOST_NAMED:,} more names that are not settings; is this a file of settings?")
    if lines:
        raise ConfigError("\n".join([*lines, f"heedful {command} --help-all lists its settings"]))


def _advice(spelling: str, hints: Mapping[str, Any]) -> str:
    """What to write in the place of an unknown flag."""
    name = spelling[2:].replace("-", "_")
    switch = name.removeprefix("no_")
    if name != switch and "off" in typing.get_args(hints.get(switch)):
        return f"; use {flag(switch)} off"
    return answer(name, hints) or answer(switch, hints)


def _refuse_stray(word: str, hints: Mapping[str, Any]) -> None:
    """Raise ConfigError for a word that is neither a flag nor a flag's value: a misplaced YAML file, most likely."""
    if is_hydra(word):
        name, _, value = word.lstrip("+").partition("=")
        raise ConfigError(f"{word!r} is not a flag{answer(name, hints)}; a setting is written --setting {value}")
    raise ConfigError(f"{word!r} is not a flag; a YAML file comes directly after the command, flags start with --")


def _require(config_class: type, given: Collection[str], command: str) -> None:
    """Raise ConfigError if a required setting is missing."""
    if required(config_class) - set(given):  # reading the explanations of settings is slow
        missing = [one for one in settings(config_class) if one.is_required and one.name not in given]
        positions = getattr(config_class, "POSITIONAL", ())
        lines = [f"{one.flag} is missing: {one.summary}" for one in missing if one.name not in positions]
        places = [one for one in missing if one.name in positions]
        lines += [f"{one.name.upper()} is missing ({one.flag}): {one.summary}" for one in places]
        raise ConfigError("\n".join([*lines, f"heedful {command} --help shows an example"]))


def _refuse_hidden(file: Path | None, from_yaml: Sequence[Given], flags: Collection[str]) -> None:
    """Raise ConfigError for a run's config.yaml with a setting whose secret was removed."""
    if file is None or file.name != "config.yaml" or not (file.parent / "environment.json").exists():
        return
    try:
        hidden = read_object(file.parent / "environment.json", "bring it back", needs=["hidden"])["hidden"]
    except CheckpointError:  # not a run's, or damaged: then ask for every setting that may have held a secret
        hidden = {one.key for one in from_yaml if HIDDEN in str(one.value)}
    for one in from_yaml:
        if one.key in hidden and one.key not in flags:
            raise ConfigError(
                f"{one.place}: {one.key} held a secret, which was removed ({HIDDEN}) when the run was saved; add "
                f"{one.flag} with its whole value"
            )


def _with_flags(arguments: Sequence[str], config_class: type) -> list[str]:
    """Put flags before the first words, if the command takes words without flags.

    A YAML file of settings may come first, unless the command takes none (``NO_SETTINGS_FILE``). The last position takes all
    remaining words if it is a list.
    """
    names = getattr(config_class, "POSITIONAL", ())
    is_settings = (
        arguments and arguments[0].endswith((".yaml", ".yml")) and not hasattr(config_class, "NO_SETTINGS_FILE")
    )
    if not names or not arguments or is_settings:
        return list(arguments)
    most = len(arguments) if is_list(types_of(config_class)[names[-1]]) else len(names)
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments[:most]))
    flags = [part for name, word in zip(names, words, strict=False) for part in (flag(name), word)]
    return [*flags, *words[len(names) :], *arguments[len(words) :]]


def read_keys(path: Path, config_class: type) -> list[Given]:
    """The keys of a YAML file, unknown ones included. Scalars keep their text (``no`` and ``1e-5`` too).

    Raises ConfigError: missing file, bad YAML, not a mapping, a repeated key, or a nested value.
    """
    text = _settings_text(path)
    try:
        root = yaml.compose(text, Loader=shallow(yaml.BaseLoader))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply; settings are flat 'key: value' lines") from error
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        found = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        raise ConfigError(f"{path}: expected 'key: value' lines, found {found}")
    _refuse_tag(root, str(path))
    hints = types_of(config_class)
    given: dict[str, Given] = {}
    for key_node, value_node in root.value:
        place = f"{path}:{key_node.start_mark.line + 1}"
        key = _key(key_node, hints, place)
        if key in given:
            raise ConfigError(f"{place}: the key {key!r} is set twice")
        if key in getattr(config_class, "NESTED", ()) and isinstance(value_node, yaml.SequenceNode):
            value_node.value = [_flattened(node) for node in value_node.value]
        given[key] = Given(key, _text(key, value_node, hints.get(key), place), place)
    return list(given.values())


def _settings_text(path: Path) -> str:
    """The text of a file of settings. Raises ConfigError for a file that cannot be one."""
    if not path.exists():
        raise ConfigError(
            f"{path}: there is no such YAML file (a configuration file comes directly after the command; of papers there are "
            f"{' and '.join(sorted(PRESETS))})"
        )
    if not path.is_file():
        raise ConfigError(f"{path} is {'a folder' if path.is_dir() else 'no file'}; name a YAML file of settings")
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_YAML + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > LARGEST_YAML:
        raise ConfigError(
            f"{path} has more than {LARGEST_YAML:,} bytes, so it cannot be a settings file; a command's settings are flat "
            "'key: value' lines, and its data is named by --data"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        kind = "it is UTF-16" if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else str(error)
        raise ConfigError(f"{path}: not valid YAML: not UTF-8 ({kind}); save it as UTF-8") from error


def _key(node: yaml.Node, hints: Mapping[str, Any], place: str) -> str:
    """A key as the name of a setting, if it can be one. Raises ConfigError."""
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{place}: expected a name before the colon; settings are flat 'key: value' lines")
    _refuse_tag(node, place)
    key = str(node.value).replace("-", "_")
    if not key.isidentifier():
        raise ConfigError(f"{place}: {node.value!r:.80} is not the name of a setting; write key: value")
    if key not in hints and hints.get(key.removeprefix("no_")) is bool:
        raise ConfigError(f"{place}: {key} is not a setting; write {key.removeprefix('no_')}: false")
    return key


def _flattened(node: yaml.Node) -> yaml.Node:
    """A mapping in a list as one line of JSON, which is also YAML, for settings listed in their class's ``NESTED``."""
    if not isinstance(node, yaml.MappingNode):
        return node
    try:
        content = yaml.BaseLoader("").construct_document(node)
        parts = itertools.islice(json.JSONEncoder(ensure_ascii=False).iterencode(content), LARGEST_NODE + 1)
        text = list(parts)
    except (yaml.YAMLError, ValueError):  # a list as a key, or an alias of its own parent
        return node
    return node if len(text) > LARGEST_NODE else yaml.ScalarNode("tag:yaml.org,2002:str", "".join(text))


def _text(key: str, node: yaml.Node, hint: Any, place: str) -> str | tuple[str, ...] | None:
    """The text of a value, or of each item of a list. Raises ConfigError for a nested one."""
    what = f"{place}: {key}"
    for one in (node, *(node.value if isinstance(node, yaml.SequenceNode) else ())):
        _refuse_tag(one, what)
    if isinstance(node, yaml.SequenceNode):
        if not all(isinstance(item, yaml.ScalarNode) for item in node.value):
            raise ConfigError(f"{what} holds a nested item; a list holds plain values")
        if hint is not None and not is_list(hint):
            raise ConfigError(f"{what} takes one value, got a list of {len(node.value)}")
        return tuple(_whole(item.value, what) for item in node.value)
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{what} holds a mapping; settings are flat 'key: value' lines")
    if node.style is None and node.value in NULLS and type(None) in typing.get_args(_without_marks(hint)):
        return None
    return _whole(node.value, what)


def _without_marks(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


def _whole(value: str, what: str) -> str:
    """Join surrogate pairs of JSON escapes, such as ``\\ud83d\\ude00``, to characters."""
    try:
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} has half a character (a lone surrogate); write the text as UTF-8") from error


def _refuse_tag(node: yaml.Node, what: str) -> None:
    """Raise ConfigError for an explicit tag, such as !!python/object; tags are never executed."""
    if node.tag not in PLAIN_TAGS:
        raise ConfigError(f"{what} has the tag {node.tag!r}; settings are plain values, without tags")


def to_yaml(config: Any, *, leave_out: Sequence[str] = (), without_secrets: bool = False) -> str:
    """A configuration as YAML that `parse` reads back to an equal one, except for removed secrets."""
    plain = to_plain(config, leave_out=leave_out, without_secrets=without_secrets)
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=1000)
    if "\x85" in text:  # a line break that PyYAML writes unescaped and reads as a space
        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=False, width=1000)
    return text


def to_plain(config: Any, *, leave_out: Sequence[str] = (), without_secrets: bool = False) -> dict[str, Any]:
    """A configuration as in its YAML file: names with texts, numbers, booleans, lists."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in leave_out}
    nested = getattr(config, "NESTED", ())
    plain = {
        name: [json.loads(one) for one in value] if name in nested else plain_value(value)
        for name, value in fields.items()
    }
    return redact(plain) if without_secrets else plain


def plain_value(value: Any) -> Any:
    """A setting as a value of YAML and JSON."""
    if callable(value):
        return user_code.text_of(value)
    if isinstance(value, Path):
        return str(value)
    return [plain_value(one) for one in value] if isinstance(value, tuple) else value
