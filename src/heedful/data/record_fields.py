"""Read the parts of a record, whatever it is to become: its shape by the names of its columns, its prompt, its responses."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from heedful.data.messages import read_conversation, read_tools, shown, text, wrong
from heedful.data.readers import CANONICAL_NAMES, Record, kind_of, listed
from heedful.display import shown as printable
from heedful.errors import ConfigError, DataError
from heedful.types import Conversation, Message, Response, Text

Shape = tuple[str, ...]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Task:
    """What a record is to become, and the columns that it may be made of."""

    name: str
    shapes: tuple[Shape, ...]
    accepted: str
    """The shapes in words, for messages."""
    about_text: str = ""
    """What to say of a record that has the column ``text`` instead."""
    others: str = ""
    """What becomes of the other columns, if they are kept."""
    also_read: frozenset[str] = frozenset()
    """Columns that are read beside those of a shape."""


STAND_INS = {
    "text": ("sentence", "document", "content", "story", "body"),
    "messages": ("conversation", "conversations", "dialogue", "chat", "turns"),
    "prompt": ("question", "instruction", "query", "problem", "input", "context"),
    "completion": ("answer", "response", "output", "solution", "target", "reply", "chosen"),
    "chosen": ("preferred", "accepted", "winner", "better", "chosen_response", "response_chosen"),
    "rejected": ("dispreferred", "loser", "worse", "rejected_response", "response_rejected"),
    "responses": ("answers", "candidates", "completions", "outputs"),
    "ranks": ("rank", "ranking", "rankings"),
    "label": ("labels", "desirable", "is_good", "good", "liked", "thumbs_up", "feedback"),
}
"""Names that other data sets use for a column. They serve only as hints: no column is mapped unless the user asks."""


ALPACA, ORCA = ("instruction", "input", "system", "history"), ("question", "system", "system_prompt")
"""Columns of which `heedful.data.formats` makes a prompt."""


def each_record(
    records: Sequence[Record], refused: list[DataError] | None, convert: Callable[[Record], Item]
) -> list[Item]:
    """Convert every record. If ``refused`` is a list, it collects the errors of unusable records."""
    items = []
    for record in records:
        try:
            items.append(convert(record))
        except DataError as error:
            if refused is None:
                raise
            refused.append(error)
    return items


def present_in(fields: Mapping[str, Any]) -> set[str]:
    """Return the columns that are not null."""
    return {name for name, value in fields.items() if value is not None}


def fitting_shapes(fields: Mapping[str, Any], task: Task) -> list[Shape]:
    """Return the task's shapes of which a record has all columns."""
    present = present_in(fields)
    return [shape for shape in task.shapes if present.issuperset(shape)]


def best_shape(fields: Mapping[str, Any], mapping: Mapping[str, str], task: Task) -> Shape | None:
    """Return the shape that a record is read by: that with the most columns in ``mapping``, then the first; None if none."""
    fitting = fitting_shapes(fields, task)
    return max(fitting, key=lambda shape: sum(name in mapping for name in shape)) if fitting else None


def shape_of(record: Record, mapping: Mapping[str, str], task: Task) -> Shape:
    """Return the columns that the record is read by. Raises DataError, with a hint, if it has those of no shape."""
    shape = best_shape(record.fields, mapping, task)
    if shape is not None:
        return shape
    found = listed(f"`{name}` ({kind_of(value)})" for name, value in record.fields.items()) or "no columns"
    error = DataError(
        f"{record.source}: not a {task.name}: found {found}. Accepted: {task.accepted}; or a format of docs/data.md."
        f"{_hint(record, present_in(record.fields), task)}"
    )
    error.cause = f"not a {task.name}"
    raise error


def _hint(record: Record, present: set[str], task: Task) -> str:
    for shape in task.shapes:
        missing = {name: _stand_in(name, record.fields) for name in shape if name not in present}
        if all(missing.values()):
            named = _with_others(missing, record.fields)
            read = {*shape, *named.values()} | ({*ALPACA, *ORCA} if named is not missing else set())
            lost = [n for n, v in record.fields.items() if _is_text(v) and n not in read]
            rest = f", which does not read {listed(f'`{name}`' for name in lost)}" if lost and not task.others else ""
            return (
                f" Perhaps: --columns {printable(','.join(f'{name}={column}' for name, column in named.items()))}{rest}"
            )
    if task.about_text and "text" in present:
        return f" {task.about_text}"
    return " Name this file's columns with --columns, for example --columns prompt=question,completion=answer"


def _with_others(missing: Mapping[str, str | None], fields: Mapping[str, Any]) -> Mapping[str, str | None]:
    """Instead of naming an instruction or a question the prompt, name the answer as in alpaca's and Orca's records."""
    answer = {"instruction": "output", "question": "response"}.get(missing.get("prompt") or "")
    beside = ALPACA if answer == "output" else ORCA
    if answer is None or len(missing) == 1 or not any(name in fields for name in beside[1:]):
        return missing
    return {answer if n == "completion" else n: column for n, column in missing.items() if n != "prompt"}


def _is_text(value: Any) -> bool:
    return isinstance(value, str | list) and bool(value)


def _stand_in(name: str, fields: Mapping[str, Any]) -> str | None:
    known = [column for column in STAND_INS[name] if fields.get(column) is not None]
    others = [column for column, value in fields.items() if value is not None and column not in CANONICAL_NAMES]
    return next(iter(known + difflib.get_close_matches(name, others, n=1, cutoff=0.75)), None)


def prompt_of(record: Record) -> Text:
    """Return the column ``prompt``: text, or messages that end with a question. Raises DataError for anything else."""
    value = record.fields["prompt"]
    if isinstance(value, str):
        return text(record.source, "prompt", value)
    if not isinstance(value, list):
        raise wrong(record.source, f"`prompt` is {shown(value)}", "a string or a list of messages")
    turns = read_conversation(record.source, "prompt", value)
    require_question(record, "`prompt`", turns)
    return turns


def response_of(record: Record, name: str, value: Any, prompt: Text) -> Response:
    """Return a ``value`` of the column ``name`` as a response to the prompt. Raises DataError for anything else."""
    if isinstance(value, str):
        return text(record.source, name, value)
    if isinstance(prompt, str):
        raise wrong(
            record.source,
            f"`prompt` is a string but `{name}` is {shown(value)}",
            "both strings, or both lists of messages",
        )
    turns = read_conversation(record.source, name, [value] if isinstance(value, dict) else value)
    if turns[-1].role != "assistant" or turns[:-1] not in ((), prompt):
        raise wrong(
            record.source,
            f"`{name}` has the turns {roles(turns)} after a prompt of {roles(prompt)}",
            "a string, one assistant message, or the prompt's messages again followed by one assistant message",
            cause="no shared prompt" if len(turns) > 1 else "no answer of the assistant",
        )
    if not turns[-1].learned:
        raise wrong(
            record.source,
            f"`{name}` has weight 0, train false or loss false, but it is what is learned",
            "no such mark; or remove the record",
        )
    return reply_of(turns[-1])


def reply_of(message: Message) -> Response:
    """Return an assistant's message as a response: as text, unless it calls tools, thinks apart or has a name."""
    plain = message.thinking is None and not message.tool_calls and message.name is None
    return message.content if plain else message


def require_question(record: Record, what: str, turns: Conversation) -> None:
    """Raise DataError, which calls the messages ``what``, unless they end with a user or tool turn."""
    if not turns or turns[-1].role not in ("user", "tool"):
        raise wrong(
            record.source,
            f"{what} has the turns {roles(turns)}",
            "a conversation that ends with a user or tool turn",
            cause="an answer that follows no question",
        )


def with_system(prompt: Text, system_prompt: str | None, record: Record) -> Text:
    """Return a prompt with the system message of ``--system-prompt`` if it has none, and with the record's tools."""
    tools = read_tools(record.source, record.fields.get("tools"))
    if isinstance(prompt, str):
        if system_prompt is not None:
            raise ConfigError(
                f"--system-prompt is set, but {record.source} is raw text, which has no place for one. Leave "
                "--system-prompt out, or write the prompt as messages: [{role: user, content: ...}]"
            )
        if tools:
            raise wrong(record.source, "`tools` beside raw text, which has no place for them", "`tools` with messages")
        return prompt
    if system_prompt is not None and prompt[0].role != "system":
        prompt = (Message("system", system_prompt), *prompt)
    return (replace(prompt[0], tools=tools), *prompt[1:]) if tools else prompt


def is_truncated(record: Record) -> bool:
    """Return the column ``truncated``, False if there is none. Raises DataError if it is no boolean."""
    value = record.fields.get("truncated")
    if value is not None and not isinstance(value, bool):
        raise wrong(record.source, f"`truncated` is {shown(value)}", "true or false")
    return bool(value)


def roles(turns: Text) -> str:
    """Return the roles of messages, for error messages."""
    return "/".join(turn.role for turn in turns if isinstance(turn, Message)) or "(none)"
