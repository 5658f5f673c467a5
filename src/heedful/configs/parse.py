"""Parse YAML and the command line to a configuration, and write a configuration as YAML.

A YAML file becomes flags before the user's own, so one parser handles both: with the same checks and the same "perhaps you
meant", and a flag overrides the file.
"""

import codecs
import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from heedful.configs.help import every_setting, first_screen, settings
from heedful.configs.names import GONE, REMOVED, answer, is_hydra, was_default
from heedful.configs.settings import required
from heedful.errors import CheckpointError, ConfigError
from heedful.files import LARGEST_YAML, read_object
from heedful.redact import HIDDEN, redact

C = TypeVar("C")
PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}
"""The tags of values without an explicit tag."""
LARGEST_NODE = 1000
"""Maximal number of keys and values of a mapping in a list of settings."""
MOST_NAMED, LONGEST_NAME = 5, 60
"""Maximal number of unknown keys in a message, and of characters shown of each."""
NULLS = ("", "null", "Null", "NULL", "~", "None")


@dataclass(frozen=True)
class YamlFlag:
    """One key of a YAML file as command-line arguments, with its file and line."""

    key: str
    arguments: tuple[str, ...]
    place: str


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
    _refuse_unknown_flags(arguments, config_class, command)
    arguments = _with_flags(arguments, config_class)
    from_yaml: list[YamlFlag] = []
    if arguments and not arguments[0].startswith("-") and not is_hydra(arguments[0]):
        from_yaml = read_yaml_flags(Path(arguments[0]), config_class)
        _refuse_unknown(from_yaml, config_class)
        file, *arguments = arguments
        _refuse_hidden(Path(file), from_yaml, arguments)
    _refuse_stray(arguments, config_class)
    given = _given(config_class, from_yaml, arguments)
    _require(config_class, given, command)
    try:
        flags = [*(argument for flag in from_yaml for argument in flag.arguments), *arguments]
        values = _values(config_class, flags, given)
        _require(config_class, [name for name, value in values.items() if value is not None], command)
        config = config_class(**values)
    except ConfigError as error:
        places = [f"{flag.place}: {flag.key} is set here" for flag in _blamed(str(error), from_yaml, arguments)]
        raise ConfigError("\n".join([str(error), *places])) from error
    object.__setattr__(config, "given", given)
    return config


def _values(config_class: type, flags: Sequence[str], given: Collection[str]) -> dict[str, Any]:
    """The values of the settings given by flags. Raises ConfigError for a text that is not a value of its setting.

    The parser gets only these settings: all settings of PPO would take a tenth of a second.
    """
    import tyro

    hints = typing.get_type_hints(config_class)
    fields = [
        (one.name, hints[one.name], dataclasses.field(default=one.default))
        for one in dataclasses.fields(config_class)
        if one.name in given
    ]
    said = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(
        200 + 2 * sum(map(len, flags))
    )  # no line breaks inside a message, so that a secret can be found
    try:
        with contextlib.redirect_stderr(said):
            shown = dataclasses.make_dataclass("Given", fields, kw_only=True)
            parsed: Any = tyro.cli(shown, args=flags, config=(tyro.conf.AvoidSubcommands,), add_help=False)
            return vars(parsed)
    except SystemExit:
        raise ConfigError(_without_frame(said.getvalue(), config_class)) from None
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.__setitem__("COLUMNS", before)


def _without_frame(message: str, config_class: type) -> str:
    """The parser's message without its frame and its excerpt of the help."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", message)
    has_frame = plain.startswith("╭")
    lines = [line.strip("│ ") for line in plain.splitlines() if not line.startswith(("╭", "╰"))]
    lines = lines if has_frame else lines[2:]  # a title and a rule
    lines = list(itertools.takewhile(lambda line: not line.startswith(("───", "---")), lines))
    text = "\n".join(lines).strip().removeprefix("Error parsing ")
    refused = re.match(r"(--[\w-]+): |(?:invalid choice .*|Missing value) for argument '(--[\w-]+)'", text)
    if refused is None:
        return text
    flag = refused[1] or refused[2]
    explained = {one.flag: one.explanation for one in settings(config_class)}
    return f"{text}\n{flag}: {explained[flag]}"


def _refuse_unknown_flags(arguments: Sequence[str], config_class: type, command: str) -> None:
    """Raise ConfigError for unknown flags, with the probable name."""
    known = [field.name for field in dataclasses.fields(config_class)]
    hints = typing.get_type_hints(config_class)
    lines = []
    for name in sorted(_names(arguments)):
        word = name.removeprefix("--").replace("-", "_")
        if name.startswith("--") and f"{command} {name}" in GONE:
            lines.append(f"{name} is gone: {GONE[f'{command} {name}']}")
        elif name.startswith("--") and word not in known and hints.get(word.removeprefix("no_")) is not bool:
            switch = word.removeprefix("no_")
            has_off = word != switch and "off" in typing.get_args(hints.get(switch))
            hint = (
                f"; use --{switch.replace('_', '-')} off" if has_off else answer(word, known) or answer(switch, known)
            )
            lines.append(f"{redact(name[:LONGEST_NAME])} is not a setting of heedful {command}{hint}")
    if lines:
        raise ConfigError("\n".join([*lines, f"heedful {command} --help-all lists its settings"]))


def _refuse_stray(arguments: Sequence[str], config_class: type) -> None:
    """Raise ConfigError for an argument that is neither a flag nor a flag's value."""
    stray = _stray_argument(arguments, config_class)
    if stray is None:
        return
    if is_hydra(stray):
        name, _, value = stray.lstrip("+").partition("=")
        known = [field.name for field in dataclasses.fields(config_class)]
        raise ConfigError(f"{stray!r} is not a flag{answer(name, known)}; a setting is written --setting {value}")
    raise ConfigError(f"{stray!r} is not a flag; a YAML file comes directly after the command, flags start with --")


def _require(config_class: type, given: Collection[str], command: str) -> None:
    """Raise ConfigError if a required setting is missing."""
    if required(config_class) - set(given):  # reading the explanations of settings is slow
        missing = [one for one in settings(config_class) if one.is_required and one.name not in given]
        positions = getattr(config_class, "POSITIONAL", ())
        lines = [f"{one.flag} is missing: {one.summary}" for one in missing if one.name not in positions]
        places = [one for one in missing if one.name in positions]
        lines += [f"{one.name.upper()} is missing ({one.flag}): {one.summary}" for one in places]
        raise ConfigError("\n".join([*lines, f"heedful {command} --help shows an example"]))


def _given(config_class: type, from_yaml: Sequence[YamlFlag], arguments: Sequence[str]) -> frozenset[str]:
    """The settings named by a file or flags."""
    known = typing.get_type_hints(config_class)
    flags = {name[2:].replace("-", "_") for name in _names(arguments) if name.startswith("--")}
    return frozenset(
        {flag.key for flag in from_yaml} | {name if name in known else name.removeprefix("no_") for name in flags}
    )


def _refuse_hidden(file: Path, from_yaml: Sequence[YamlFlag], arguments: Sequence[str]) -> None:
    """Raise ConfigError for a run's config.yaml with a setting whose secret was removed."""
    environment = file.parent / "environment.json"
    if file.name != "config.yaml" or not environment.exists():
        return
    try:
        hidden = read_object(environment, "bring it back", needs=["hidden"])["hidden"]
    except CheckpointError:  # not a run's, or damaged: then ask for every setting that may have held a secret
        hidden = {flag.key for flag in from_yaml if any(HIDDEN in word for word in flag.arguments)}
    for flag in from_yaml:
        if flag.key in hidden and _name(flag) not in _names(arguments):
            raise ConfigError(
                f"{flag.place}: {flag.key} held a secret, which was removed ({HIDDEN}) when the run was saved; add "
                f"{_name(flag)} with its whole value"
            )


def _with_flags(arguments: Sequence[str], config_class: type) -> list[str]:
    """Put flags before the first words, if the command takes words without flags.

    A YAML file may come first, as everywhere. The last position takes all remaining words if it is a list.
    """
    names = getattr(config_class, "POSITIONAL", ())
    if not names or not arguments or arguments[0].endswith((".yaml", ".yml")):
        return list(arguments)
    takes_all = typing.get_origin(typing.get_type_hints(config_class)[names[-1]]) is tuple
    most = len(arguments) if takes_all else len(names)
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments[:most]))
    flags = [part for name, word in zip(names, words, strict=False) for part in (f"--{name.replace('_', '-')}", word)]
    return [*flags, *words[len(names) :], *arguments[len(words) :]]


def read_yaml_flags(path: Path, config_class: type) -> list[YamlFlag]:
    """The keys of a YAML file as flags. Scalars keep their text (``no`` and ``1e-5`` too).

    Unknown keys are included.

    Raises ConfigError: missing file, bad YAML, not a mapping, a repeated key, or a nested value.
    """
    text = _settings_text(path)
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
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
    hints = typing.get_type_hints(config_class)
    flags: dict[str, YamlFlag] = {}
    gone = {name for name, one in REMOVED.items() if one.beside in hints} - hints.keys()
    for key_node, value_node in root.value:
        place = f"{path}:{key_node.start_mark.line + 1}"
        key = _key(key_node, hints, place)
        if key in flags:
            raise ConfigError(f"{place}: the key {key!r} is set twice")
        if key in getattr(config_class, "NESTED", ()) and isinstance(value_node, yaml.SequenceNode):
            value_node.value = [_flattened(node) for node in value_node.value]
        flags[key] = YamlFlag(key, _arguments(key, value_node, hints.get(key), place), place)
    values = {key_node.value.replace("-", "_"): value_node for key_node, value_node in root.value}
    return [flag for key, flag in flags.items() if key not in gone or not was_default(key, _typed(values[key]))]


def _typed(node: yaml.Node) -> Any:
    """The YAML value of a scalar or a list of scalars; an invalid one, such as the date 2024-02-30, is text."""
    if isinstance(node, yaml.SequenceNode):
        return [_typed(one) for one in node.value]
    if not isinstance(node, yaml.ScalarNode) or node.style is not None:
        return node.value
    try:
        return yaml.safe_load(node.value)
    except (ValueError, yaml.YAMLError):
        return node.value


def _settings_text(path: Path) -> str:
    """The text of a file of settings. Raises ConfigError for a file that cannot be one."""
    if not path.exists():
        raise ConfigError(f"{path}: there is no such YAML file (a configuration file comes directly after the command)")
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


def _refuse_unknown(flags: Sequence[YamlFlag], config_class: type) -> None:
    """Raise ConfigError for unknown keys. A file with thousands of them is probably not a file of settings."""
    names = {field.name for field in dataclasses.fields(config_class)}
    keys = [(flag.place, flag.key) for flag in flags if flag.key not in names]
    if not keys:
        return
    lines = [
        f"{place}: {redact(key[:LONGEST_NAME])} (--{redact(key[:LONGEST_NAME]).replace('_', '-')}) is not a setting"
        + answer(key[:LONGEST_NAME], names)
        for place, key in keys[:MOST_NAMED]
    ]
    if len(keys) > MOST_NAMED:
        lines.append(f"and {len(keys) - MOST_NAMED:,} more keys that are not settings; is this a file of settings?")
    lines.append("heedful COMMAND --help-all lists the settings of a command")
    raise ConfigError("\n".join(lines))


def _key(node: yaml.Node, hints: Mapping[str, Any], place: str) -> str:
    """A key as the name of a setting, if it can be one. Raises ConfigError."""
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{place}: expected a name before the colon; settings are flat 'key: value' lines")
    _refuse_tag(node, place)
    key = str(node.value).replace("-", "_")
    if not key.isidentifier():
        raise ConfigError(f"{place}: {node.value!r:.80} is not the name of a setting; write key: value")
    if key in ("help", "h"):
        raise ConfigError(f"{place}: {key} is not a setting; heedful COMMAND --help-all lists them")
    if key not in hints and hints.get(key.removeprefix("no_")) is bool:
        raise ConfigError(f"{place}: {key} is not a setting; write {key.removeprefix('no_')}: false")
    return key


def _flattened(node: yaml.Node) -> yaml.Node:
    """A mapping in a list as one line of JSON, which is also YAML, for settings listed in their class's ``NESTED``."""
    if not isinstance(node, yaml.MappingNode) or not _is_small(node):
        return node
    try:
        content = yaml.BaseLoader("").construct_document(node)
    except yaml.YAMLError:  # a list as a key, or an alias of its own parent
        return node
    return yaml.ScalarNode("tag:yaml.org,2002:str", json.dumps(content, ensure_ascii=False))


def _is_small(node: yaml.Node) -> bool:
    """Whether a node stays small after its aliases are expanded."""
    count, left = 0, [node]
    while left and count <= LARGEST_NODE:
        one = left.pop()
        count += 1
        if isinstance(one, yaml.MappingNode):
            left += itertools.chain.from_iterable(one.value)
        elif isinstance(one, yaml.SequenceNode):
            left += one.value
    return count <= LARGEST_NODE


def _arguments(key: str, node: yaml.Node, annotation: Any, place: str) -> tuple[str, ...]:
    name = "--" + key.replace("_", "-")
    for one in (node, *(node.value if isinstance(node, yaml.SequenceNode) else ())):
        _refuse_tag(one, f"{place}: {key}")
    if isinstance(node, yaml.SequenceNode):
        if any(not isinstance(item, yaml.ScalarNode) or _is_dashed(item.value) for item in node.value):
            raise ConfigError(f"{place}: {key} holds a nested or dashed item; a list holds plain values")
        if annotation is not None and typing.get_origin(annotation) is not tuple:
            raise ConfigError(f"{place}: {key} takes one value, got a list of {len(node.value)}")
        return (name, *(_whole(item.value, f"{place}: {key}") for item in node.value))
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{place}: {key} holds a mapping; settings are flat 'key: value' lines")
    value = _whole(node.value, f"{place}: {key}")
    if annotation is bool:
        if value.lower() not in ("true", "false"):
            raise ConfigError(f"{place}: {key} must be true or false, got {value!r}")
        return (name,) if value.lower() == "true" else (name.replace("--", "--no-", 1),)
    if typing.get_origin(annotation) is tuple:
        if _is_dashed(value):
            raise ConfigError(f"{place}: {key} is {value!r:.80}; no item of it may begin with a dash, as flags do")
        return (name, value)
    if {"on", "off"} <= set(typing.get_args(annotation)):  # --compile was true or false
        value = {"true": "on", "false": "off"}.get(value.lower(), value)
    if node.style is None and value in NULLS and _is_optional(annotation):
        return (f"{name}=None",)
    return (f"{name}={value}",)


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


def _is_dashed(value: str) -> bool:
    """Whether the parser would take the value for a flag; not true of a negative number."""
    try:
        return value.startswith("-") and math.isnan(float(value))
    except ValueError:
        return True


def _is_optional(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (types.UnionType, typing.Union) and type(None) in typing.get_args(
        annotation
    )


def _stray_argument(arguments: Sequence[str], config_class: type) -> str | None:
    """The first argument that is neither a flag nor a flag's value: a misplaced YAML file, most likely."""
    hints = typing.get_type_hints(config_class)
    many = {"--" + name.replace("_", "-") for name, hint in hints.items() if typing.get_origin(hint) is tuple}
    switches = {"--" + name.replace("_", "-") for name, hint in hints.items() if hint is bool}
    values_left = 0.0
    for argument in arguments:
        if argument == "-h":
            values_left = 0
        elif argument.startswith("--"):
            name = argument.partition("=")[0].replace("_", "-")
            takes_none = "=" in argument or name in switches or name.replace("--no-", "--", 1) in switches
            values_left = 0 if takes_none else float("inf") if name in many else 1
        elif values_left and not (argument.endswith((".yaml", ".yml")) and values_left == float("inf")):
            values_left -= 1
        else:
            return argument
    return None


def _blamed(message: str, from_yaml: Sequence[YamlFlag], arguments: Sequence[str]) -> list[YamlFlag]:
    """The keys of the YAML file that are named in an error message and not overridden by a later flag."""
    words = set(message.replace("=", " ").replace(",", " ").replace("'", " ").replace(":", " ").split())
    own = _names(arguments)
    return [flag for flag in from_yaml if _name(flag) in words and _name(flag) not in own]


def _name(flag: YamlFlag) -> str:
    return "--" + flag.key.replace("_", "-")


def _names(arguments: Sequence[str]) -> set[str]:
    """The flags among arguments."""
    return {argument.partition("=")[0].replace("_", "-") for argument in arguments}


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
    if isinstance(value, Path):
        return str(value)
    return [plain_value(one) for one in value] if isinstance(value, tuple) else value


def is_plain(value: Any, hint: Any) -> bool:
    """Whether a setting of this type can have such a value after `plain_value`."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return isinstance(value, list) and all(is_plain(one, parts[0]) for one in value)
    if origin is typing.Literal:
        return value in parts
    if parts:
        return any(is_plain(value, part) for part in parts)
    return type(value) in {Path: (str,), float: (float, int)}.get(hint, (hint,))
