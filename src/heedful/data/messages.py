"""Read messages in the format of Hugging Face's chat templates, tool calls included, and write them in it.

Messages of OpenAI's API (``developer``, ``function_call``, parts of text) and of ShareGPT (``from`` and ``value``) are
converted. Text in unknown keys is refused, because the template would lose it. Ids and times are dropped (`is_metadata`).
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from heedful.data.readers import fault_in, kind_of, listed, parse_json
from heedful.errors import DataError
from heedful.types import THINK, THINK_END, Conversation, Message, ToolCall, split_thinking

ROLES = ("system", "user", "assistant", "tool")
OTHER_ROLES = {
    "developer": "system",
    "function": "tool",
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
"""OpenAI's and ShareGPT's own roles. The content of a function_call is its calls, as JSON."""
THINKING = ("reasoning_content", "thinking", "reasoning")
"""Keys in use for a message's thinking."""
COMMON = {"role", "content", "name", "weight", "train", "loss"}
KEYS = {
    "system": COMMON,
    "user": COMMON,
    "assistant": COMMON | {"tool_calls", *THINKING},
    "tool": COMMON | {"tool_call_id"},
}
"""The keys that a message of each role may have."""
KEPT = {"role", "content", "from", "value"}
"""Keys of a message whose empty values are not absent: a tool may return nothing."""
METADATA = {"id", "uuid", "timestamp", "time", "date", "created", "model", "language", "lang", "status"}
METADATA_ENDINGS = ("_id", "_at", "_time", "_ip", "_identifier")
MEASURES = ("score", "rating", "reward", "quality", "rank", "votes", "likes", "tokens", "count")
"""Keys of numbers about a message, also as endings after an underscore. None of them affects the loss."""
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a content that are text."""


def as_dict(message: Message) -> dict[str, Any]:
    """Return a message in this format, as chat templates and reward functions see it."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.thinking is not None:
        fields["reasoning_content"] = message.thinking
    if message.tool_calls:
        fields["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
            | ({} if call.id is None else {"id": call.id})
            for call in message.tool_calls
        ]
    optional = {"name": message.name, "tool_call_id": message.tool_call_id}
    return fields | {name: value for name, value in optional.items() if value is not None}


def from_dict(fields: Mapping[str, Any]) -> Message:
    """Return the message that `as_dict` wrote; ``tools`` may be among its keys."""
    calls = [(call["function"], call.get("id")) for call in fields.get("tool_calls", [])]
    return Message(
        fields["role"],
        fields["content"],
        thinking=fields.get("reasoning_content"),
        tool_calls=tuple(ToolCall(f["name"], json.dumps(f["arguments"], ensure_ascii=False), i) for f, i in calls),
        name=fields.get("name"),
        tool_call_id=fields.get("tool_call_id"),
        tools=json.dumps(fields["tools"], ensure_ascii=False) if fields.get("tools") else "",
    )


def read_conversation(source: str, name: str, value: Any) -> Conversation:
    """Return the messages of a list. Raises DataError, with ``source`` and the place in ``name``, for anything else."""
    if not isinstance(value, list) or not value:
        raise wrong(source, f"`{name}` is {shown(value)}", "a list of messages, each {role, content}")
    messages = tuple(read_message(source, f"{name}[{i}]", item) for i, item in enumerate(value))
    _check_results(source, name, messages)
    return messages


def is_metadata(key: str, value: Any) -> bool:
    """Whether an unknown key of a message is metadata (an id, a time, a score) that no template needs."""
    known = key.lower() in METADATA or key.lower().endswith(METADATA_ENDINGS)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_measure = is_number and key.lower().rpartition("_")[2] in MEASURES
    return (is_measure or (known and (is_number or isinstance(value, str)))) and not any(
        key in keys for keys in KEYS.values()
    )


def read_tools(source: str, value: Any) -> str:
    """Return a record's tools as JSON text, ``""`` for none. Raises DataError for anything but a list of tools."""
    accepted = "a list of JSON schemas, each with the name of a function, or such a list as JSON text"
    if is_empty(value):
        return ""
    tools = _parsed(source, "tools", value, accepted) if isinstance(value, str) else value
    if is_empty(tools):
        return ""
    if not isinstance(tools, list):
        raise wrong(source, f"`tools` is {shown(tools)}", accepted)
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise wrong(source, f"`tools[{i}]` is {shown(tool)}", accepted)
    return json.dumps(tools, ensure_ascii=False)


def text(source: str, name: str, value: Any) -> str:
    """Return a string that holds more than white space. Raises DataError for anything else."""
    if not isinstance(value, str):
        raise wrong(source, f"`{name}` is {shown(value)}", "a string")
    if not value.strip():
        raise wrong(
            source,
            f"`{name}` is empty or only white space ({value[:20]!r})",
            "text; remove the record",
            cause="empty " + re.sub(r"\[\d+\]", "", name),
        )
    return value


def wrong(source: str, found: str, accepted: str, *, cause: str = "") -> DataError:
    """Return an error with the found and the accepted values; unusable records are counted by its ``cause``."""
    error = DataError(f"{source}: {found}. Accepted: {accepted}.")
    name = re.match(r"`([^`]*)`", found)
    error.cause = cause or ("bad " + re.sub(r"\[\d+\]", "", name[1]) if name else "")
    return error


def shown(value: Any) -> str:
    """Return the beginning of a value and its kind, for messages."""
    text = repr(value)
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({kind_of(value)})"


def read_message(source: str, name: str, item: Any) -> Message:
    """Return a message by itself. Raises DataError as `read_conversation` does."""
    fields = _fields(source, name, item) if isinstance(item, dict) else {}
    if "role" not in fields:
        found = f"an object with {listed(fields) or 'no keys'}" if isinstance(item, dict) else shown(item)
        raise wrong(source, f"`{name}` is {found}", "an object with role and content, or with from and value")
    role = fields["role"]
    if role not in ROLES:
        known = ", ".join((*ROLES, *OTHER_ROLES))
        raise wrong(source, f"`{name}.role` is {shown(role)}", f"one of {known}", cause="unknown role")
    unknown = sorted(key for key in fields.keys() - KEYS[role] if not is_metadata(key, fields[key]))
    calls = _calls(source, f"{name}.tool_calls", fields.get("tool_calls"))
    if unknown or ("content" not in fields and not calls):
        raise wrong(
            source,
            f"`{name}` is an object with {listed(fields)}",
            f"for the role {role} role and content, and perhaps {', '.join(sorted(KEYS[role] - {'role', 'content'}))}; ids, "
            "times and scores are left out",
            cause="unknown keys in a message" if unknown else "a message without content",
        )
    content = fields.get("content", "")
    if not isinstance(content, str):
        raise wrong(source, f"`{name}.content` is {shown(content)}", "a string")
    # A tool may return nothing, and an empty system message keeps a template from adding its own.
    if role == "user" or (role == "assistant" and not calls):
        text(source, f"{name}.content", content)
    return Message(
        role,
        content,
        thinking=_thinking(source, name, fields),
        tool_calls=calls,
        name=_optional(source, f"{name}.name", fields.get("name")),
        tool_call_id=_optional(source, f"{name}.tool_call_id", fields.get("tool_call_id")),
        learned=_learned(source, name, fields),
    )


def _fields(source: str, name: str, item: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message's fields under Hugging Face's names, without empty ones."""
    # OpenAI's API writes `annotations: []`, others `reasoning_content: ""`.
    fields = {key: value for key, value in item.items() if not is_empty(value) or (key in KEPT and value is not None)}
    if "role" not in fields and "content" not in fields and "from" in fields:
        fields = {{"from": "role", "value": "content"}.get(key, key): value for key, value in fields.items()}
    role = fields.get("role")
    if not isinstance(role, str):
        return fields
    fields["role"] = OTHER_ROLES.get(role, role)
    if isinstance(fields.get("content"), list):
        fields["content"] = _joined(source, f"{name}.content", fields["content"])
    if role == "function_call" and isinstance(fields.get("content"), str):
        thinking, said = split_thinking(fields.pop("content"))
        called = _parsed(source, f"{name}.value", said or "", "the call of a function, or a list of them, as JSON text")
        fields |= {"tool_calls": called if isinstance(called, list) else [called]}
        fields |= {} if thinking is None else {"reasoning_content": thinking}
    if fields["role"] == "assistant" and "function_call" in fields and "tool_calls" not in fields:
        fields["tool_calls"] = [{"type": "function", "function": fields.pop("function_call")}]
    return fields


def is_empty(value: Any) -> bool:
    """Whether an optional field holds nothing (null, white space, no items), so that it counts as absent."""
    return not value.strip() if isinstance(value, str) else value in (None, [], {})


def _joined(source: str, name: str, parts: list[Any]) -> Any:
    """Return the text of a content in parts."""
    for i, part in enumerate(parts):
        is_text = isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str)
        if not is_text:
            raise wrong(
                source,
                f"`{name}[{i}]` is {shown(part)}",
                'a string, or parts {"type": "text", "text": ...}',
                cause="a part that is no text",
            )
    return "".join(part["text"] for part in parts)


def _calls(source: str, name: str, value: Any) -> tuple[ToolCall, ...]:
    accepted = 'a list of {"type": "function", "function": {"name": ..., "arguments": {...}}}'
    if value is None:
        return ()
    if not isinstance(value, list):
        raise wrong(source, f"`{name}` is {shown(value)}", accepted)
    calls = []
    for i, item in enumerate(value):
        call = item.get("function", item) if isinstance(item, dict) else None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            raise wrong(source, f"`{name}[{i}]` is {shown(item)}", accepted)
        place = f"{name}[{i}].function.arguments"
        arguments = {} if is_empty(call.get("arguments")) else call["arguments"]
        wanted = "an object of names and values, or such an object as JSON text"
        if isinstance(arguments, str):
            arguments = _parsed(source, place, arguments, wanted)
        if not isinstance(arguments, dict):
            raise wrong(source, f"`{place}` is {shown(arguments)}", wanted)
        identity = _optional(source, f"{name}[{i}].id", item.get("id"))
        calls.append(ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False), identity))
    return tuple(calls)


def _thinking(source: str, name: str, fields: Mapping[str, Any]) -> str | None:
    given = [key for key in THINKING if key in fields]
    if not given:
        return None
    key, value = given[0], fields[given[0]]
    if any(fields[other] != value for other in given):
        raise wrong(source, f"`{name}` thinks twice, in {' and '.join(given)}", "only one of them")
    if not isinstance(value, str):
        raise wrong(source, f"`{name}.{key}` is {shown(value)}", "a string")
    if fields.get("content", "").lstrip().startswith(THINK):
        raise wrong(source, f"`{name}` thinks twice, in {key} and in {THINK} of its content", "only one of them")
    if THINK_END in value:
        raise wrong(
            source, f"`{name}.{key}` contains {THINK_END}", f"the thinking itself, without {THINK} and {THINK_END}"
        )
    return value


def _learned(source: str, name: str, fields: Mapping[str, Any]) -> bool:
    """Read ``weight`` (OpenAI's and Mistral's), ``train`` (Axolotl's) and ``loss`` (ms-swift's)."""
    given = {key: fields[key] for key in ("weight", "train", "loss") if key in fields}
    for key, value in given.items():
        yes, no = (1, 0) if key == "weight" else ("true", "false")
        if isinstance(value, bool) == (key == "weight") or value not in (0, 1):
            raise wrong(source, f"`{name}.{key}` is {shown(value)}", f"{yes} (learn this message) or {no} (do not)")
    if len(set(given.values())) > 1:
        found = " and ".join(f"{key} {json.dumps(value)}" for key, value in given.items())
        raise wrong(source, f"`{name}` has {found}", "only one of them")
    return all(given.values())


def _check_results(source: str, name: str, messages: Conversation) -> None:
    """Raise DataError for a tool result without a call, or with the id of no open call."""
    open_calls: tuple[ToolCall, ...] = ()
    for i, message in enumerate(messages):
        if message.role != "tool":
            open_calls = message.tool_calls
            continue
        if not open_calls:
            raise wrong(
                source,
                f"`{name}[{i}]` is the result of a tool, but no open call is left for it",
                "as many tool messages as the assistant's message before them has `tool_calls`, or fewer",
                cause="the result of a tool without a call",
            )
        known = [call for call in open_calls if call.id is not None and call.id == message.tool_call_id]
        ids = [call.id for call in open_calls if call.id is not None]
        if message.tool_call_id is not None and ids and not known:
            raise wrong(
                source,
                f"`{name}[{i}].tool_call_id` is {message.tool_call_id!r:.80}",
                f"the id of an open call: {listed(ids)}",
            )
        answered = known[0] if known else open_calls[0]
        open_calls = tuple(call for call in open_calls if call is not answered)


def _optional(source: str, name: str, value: Any) -> str | None:
    if is_empty(value):
        return None
    if not isinstance(value, str):
        raise wrong(source, f"`{name}` is {shown(value)}", "a string")
    return value


def _parsed(source: str, name: str, value: str, accepted: str) -> Any:
    try:
        parsed = parse_json(value)
    except ValueError as error:
        raise wrong(source, f"`{name}` is not JSON ({error}): {shown(value)}", accepted) from error
    fault = fault_in(parsed)
    if fault is not None:
        raise wrong(source, f"`{name}` as JSON: {fault}", accepted)
    return parsed
