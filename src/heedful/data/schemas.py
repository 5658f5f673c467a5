"""Turn records into demonstrations, rankings and prompts, by the names of their columns.

Strings are raw text and lists of messages are conversations, everywhere. A null column counts as absent (Parquet has no
other way to leave one out). If a record fits several shapes, the shape with the most columns named by ``--columns`` wins
(``--columns messages=messages`` picks the conversation), then the shape that comes first in the reader's docstring.

The readers share their arguments:

    path           a data file or a data set (`heedful.data.readers`)
    columns        the file's own column names, as ``--columns`` gives them (`parse_columns`)
    system_prompt  a system message for conversations that have none
    refused        a list that collects the errors of unusable records, which are then left out; None raises the first
    max_samples    read only the first N records

They raise DataError for a record that they cannot use, with its file and line, and ConfigError if ``system_prompt`` is
given for raw text; `read_records` and `parse_columns` say what else is raised.
"""

import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from heedful.data.messages import read_conversation, read_tools, shown, text, wrong
from heedful.data.readers import CANONICAL_NAMES, Record, kind_of, listed, parse_columns, read_records
from heedful.display import shown as printable
from heedful.errors import ConfigError, DataError
from heedful.types import (
    Conversation,
    Demonstration,
    Message,
    Prompt,
    Ranking,
    Response,
    Text,
    plain_response,
    split_thinking,
)

HH_MARKER = "\n\nAssistant:"

Shape = tuple[str, ...]
Item = TypeVar("Item")


@dataclass(frozen=True)
class _Task:
    name: str
    shapes: tuple[Shape, ...]
    accepted: str


DEMONSTRATIONS = _Task(
    "demonstration",
    (("prompt", "completion"), ("messages",), ("text",)),
    "`prompt` and `completion`; or `messages`; or `text`",
)
RANKINGS = _Task(
    "ranking",
    (("prompt", "chosen", "rejected"), ("prompt", "responses", "ranks"), ("chosen", "rejected")),
    "`prompt`, `chosen` and `rejected`; or `prompt`, `responses` and `ranks`; or only `chosen` and `rejected`, as "
    "conversations that share all but the last message or as Anthropic HH dialogues",
)
PROMPTS = _Task("prompt", (("prompt",), ("messages",)), "`prompt`; or `messages`")

STAND_INS = {
    "text": ("sentence", "document", "content", "story", "body"),
    "messages": ("conversation", "conversations", "dialogue", "chat", "turns"),
    "prompt": ("question", "instruction", "query", "problem", "input", "context"),
    "completion": ("answer", "response", "output", "solution", "target", "reply", "chosen"),
    "chosen": ("preferred", "accepted", "winner", "better", "chosen_response", "response_chosen"),
    "rejected": ("dispreferred", "loser", "worse", "rejected_response", "response_rejected"),
    "responses": ("answers", "candidates", "completions", "outputs"),
    "ranks": ("rank", "ranking", "rankings"),
}
"""Names that other data sets use for a column. They serve only as hints: no column is mapped unless the user asks."""


def read_demonstrations(
    path: str,
    *,
    columns: str = "",
    system_prompt: str | None = None,
    refused: list[DataError] | None = None,
    max_samples: int | None = None,
) -> list[Demonstration]:
    """Read demonstrations from ``prompt`` + ``completion``, ``messages`` or ``text``.

    Every assistant turn of ``messages``, except those with ``weight: 0`` or ``train: false``, becomes one demonstration,
    whose prompt is the conversation before it. With ``text`` the prompt is empty. ``completion`` is a string, one assistant
    message, or the prompt's conversation again followed by one assistant message. A boolean ``truncated`` says that the
    (last) response was cut off. The module explains the arguments.
    """
    mapping = parse_columns(columns)
    turns = _each(
        read_records(path, columns=mapping, max_samples=max_samples),
        refused,
        lambda record: _demonstrations(record, mapping, system_prompt),
    )
    return [demonstration for of_record in turns for demonstration in of_record]


def read_rankings(
    path: str,
    *,
    columns: str = "",
    system_prompt: str | None = None,
    refused: list[DataError] | None = None,
    max_samples: int | None = None,
) -> list[Ranking]:
    """Read rankings from ``prompt`` + ``chosen`` + ``rejected``, ``prompt`` + ``responses`` + ``ranks``, or a pair only.

    A pair has ranks (0, 1) and may have a ``margin``. A response is a string, one assistant message, or the prompt's
    conversation again followed by one assistant message. A boolean ``truncated`` says that the responses were cut off. If
    ``prompt`` is ``""``, whole texts are compared.

    A pair without ``prompt`` contains it. Two conversations must share all messages but the last; these are the prompt. Two
    strings must be Anthropic HH dialogues that agree up to and including their last ``"\\n\\nAssistant:"``; this part is the
    prompt, as raw text. The responses are what follows it, with the space that they begin with. The module explains the
    arguments.
    """
    mapping = parse_columns(columns)
    return _each(
        read_records(path, columns=mapping, max_samples=max_samples),
        refused,
        lambda record: _ranking(record, mapping, system_prompt),
    )


def read_prompts(
    path: str,
    *,
    columns: str = "",
    system_prompt: str | None = None,
    refused: list[DataError] | None = None,
    max_samples: int | None = None,
) -> list[Prompt]:
    """Read prompts from ``prompt`` or ``messages``. The record's other fields go to ``Prompt.columns`` under their names.

    If ``messages`` ends with an assistant turn, the prompt is what comes before it, and the turn's text goes to
    ``columns["completion"]`` as the reference answer. The module explains the arguments.
    """
    mapping = parse_columns(columns)
    return _each(
        read_records(path, columns=mapping, max_samples=max_samples),
        refused,
        lambda record: _prompt(record, mapping, system_prompt),
    )


def _each(records: Sequence[Record], refused: list[DataError] | None, convert: Callable[[Record], Item]) -> list[Item]:
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


def _demonstrations(record: Record, mapping: Mapping[str, str], system_prompt: str | None) -> list[Demonstration]:
    shape = _shape(record, mapping, DEMONSTRATIONS)
    truncated = _truncated(record)
    prompt: Text = ""
    if shape == ("messages",):
        turns = _turns_to_learn(record)
    elif shape == ("text",):
        turns = [("", text(record.source, "text", record.fields["text"]))]
    else:
        prompt = _prompt_text(record)
        turns = [(prompt, _response(record, "completion", record.fields["completion"], prompt))]
    learned = []
    for i, (prompt, response) in enumerate(turns):
        cut = truncated and i == len(turns) - 1
        if prompt and not cut and split_thinking(plain_response(response))[1] is None:
            raise wrong(
                record.source, "a response that begins with <think> and has no </think>", "both, or truncated: true"
            )
        learned.append(Demonstration(_with_system(prompt, system_prompt, record), response, record.source, cut))
    return learned


def _turns_to_learn(record: Record) -> list[tuple[Text, Response]]:
    turns = read_conversation(record.source, "messages", record.fields["messages"])
    ends = [index for index, turn in enumerate(turns) if turn.role == "assistant" and turn.learned]
    if not ends:
        masked = " with the weight 0" if "assistant" in _roles(turns) else ""
        raise wrong(
            record.source,
            f"`messages` has no assistant turn, only {_roles(turns)}{masked}",
            "at least one to learn from",
        )
    for end in ends:
        _require_question(record, f"messages[:{end}], before an assistant turn,", turns[:end])
    return [(turns[:end], _reply(turns[end])) for end in ends]


def _ranking(record: Record, mapping: Mapping[str, str], system_prompt: str | None) -> Ranking:
    shape = _shape(record, mapping, RANKINGS)
    if "ranks" in shape:
        return _k_wise(record, system_prompt)
    prompt = _ranked_prompt(record) if "prompt" in shape else _shared_prompt(record)
    responses: list[Response] = []
    for name in ("chosen", "rejected"):
        value = record.fields[name]
        if "prompt" not in shape and isinstance(prompt, str):
            responses.append(text(record.source, name, value[len(prompt) :]))
        else:
            responses.append(_response(record, name, value, prompt))
    prompt = _with_system(prompt, system_prompt, record)
    return Ranking(prompt, tuple(responses), (0, 1), record.source, _margin(record), _truncated(record))


def _k_wise(record: Record, system_prompt: str | None) -> Ranking:
    prompt, responses, ranks = _ranked_prompt(record), record.fields["responses"], record.fields["ranks"]
    if not isinstance(responses, list) or len(responses) < 2:
        raise wrong(record.source, f"`responses` is {shown(responses)}", "a list of two or more responses")
    if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
        raise wrong(record.source, f"`ranks` is {shown(ranks)}", "a list of integers, 0 the best; equal ranks tie")
    if len(ranks) != len(responses):
        raise wrong(
            record.source, f"{len(responses)} `responses` but {len(ranks)} `ranks`", "one rank for each response"
        )
    if len(set(ranks)) < 2:
        raise wrong(record.source, f"`ranks` are all {ranks[0]}: nothing is preferred", "at least two different ranks")
    if record.fields.get("margin") is not None:
        raise wrong(record.source, "`margin` beside `ranks`", "`margin` only with `chosen` and `rejected`")
    texts = tuple(_response(record, f"responses[{i}]", value, prompt) for i, value in enumerate(responses))
    prompt = _with_system(prompt, system_prompt, record)
    return Ranking(prompt, texts, tuple(ranks), record.source, truncated=_truncated(record))


def _prompt(record: Record, mapping: Mapping[str, str], system_prompt: str | None) -> Prompt:
    if _shape(record, mapping, PROMPTS) == ("prompt",):
        columns = {name: value for name, value in record.fields.items() if name != "prompt"}
        return Prompt(_with_system(_prompt_text(record), system_prompt, record), record.source, columns)
    turns = read_conversation(record.source, "messages", record.fields["messages"])
    columns = {name: value for name, value in record.fields.items() if name != "messages"}
    if turns[-1].role == "assistant":
        if columns.get("completion") is not None:
            raise wrong(
                record.source, "two reference answers: `messages` ends with one and `completion` is another", "only one"
            )
        turns, columns["completion"] = turns[:-1], plain_response(turns[-1])
    _require_question(record, "`messages`, without a last assistant turn,", turns)
    return Prompt(_with_system(turns, system_prompt, record), record.source, columns)


def _shape(record: Record, mapping: Mapping[str, str], task: _Task) -> Shape:
    present = {name for name, value in record.fields.items() if value is not None}
    fitting = [shape for shape in task.shapes if present.issuperset(shape)]
    if fitting:
        return max(fitting, key=lambda shape: sum(name in mapping for name in shape))
    found = listed(f"`{name}` ({kind_of(value)})" for name, value in record.fields.items()) or "no columns"
    raise DataError(
        f"{record.source}: not a {task.name}: found {found}. Accepted: {task.accepted}.{_hint(record, present, task)}"
    )


def _hint(record: Record, present: set[str], task: _Task) -> str:
    for shape in task.shapes:
        missing = {name: _stand_in(name, record.fields) for name in shape if name not in present}
        if all(missing.values()):
            return f" Perhaps: --columns {printable(','.join(f'{name}={column}' for name, column in missing.items()))}"
    if task is PROMPTS and "text" in present:
        return " `text` is for plain language modelling (sft): it has no prompt. If it is one: --columns prompt=text"
    return " Name this file's columns with --columns, for example --columns prompt=question,completion=answer"


def _stand_in(name: str, fields: Mapping[str, Any]) -> str | None:
    known = [column for column in STAND_INS[name] if fields.get(column) is not None]
    others = [column for column, value in fields.items() if value is not None and column not in CANONICAL_NAMES]
    return next(iter(known + difflib.get_close_matches(name, others, n=1, cutoff=0.75)), None)


def _ranked_prompt(record: Record) -> Text:
    """Return the prompt as `_prompt_text` does, or ``""`` if whole texts are compared."""
    return "" if record.fields["prompt"] == "" else _prompt_text(record)


def _prompt_text(record: Record) -> Text:
    value = record.fields["prompt"]
    if isinstance(value, str):
        return text(record.source, "prompt", value)
    if not isinstance(value, list):
        raise wrong(record.source, f"`prompt` is {shown(value)}", "a string or a list of messages")
    turns = read_conversation(record.source, "prompt", value)
    _require_question(record, "`prompt`", turns)
    return turns


def _response(record: Record, name: str, value: Any, prompt: Text) -> Response:
    if isinstance(value, str):
        return text(record.source, name, value)
    if isinstance(prompt, str):
        raise wrong(
            record.source,
            f"`prompt` is a string but `{name}` is {shown(value)}",
            "both strings, or both lists of messages",
        )
    turns = read_conversation(record.source, name, value)
    if turns[-1].role != "assistant" or turns[:-1] not in ((), prompt):
        raise wrong(
            record.source,
            f"`{name}` has the turns {_roles(turns)} after a prompt of {_roles(prompt)}",
            "a string, one assistant message, or the prompt's messages again followed by one assistant message",
        )
    if not turns[-1].learned:
        raise wrong(
            record.source, f"`{name}` has the weight 0, but it is what is learned", "the weight 1; or remove the record"
        )
    return _reply(turns[-1])


def _reply(message: Message) -> Response:
    """Return an assistant's message as a response: as text, unless it calls tools or has its thinking apart."""
    return message.content if message.thinking is None and not message.tool_calls else message


def _shared_prompt(record: Record) -> Text:
    chosen, rejected = record.fields["chosen"], record.fields["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _shared_dialogue(record, chosen, rejected)
    before = [read_conversation(record.source, name, record.fields[name])[:-1] for name in ("chosen", "rejected")]
    if before[0] != before[1]:
        raise wrong(
            record.source,
            "without `prompt`, and `chosen` and `rejected` differ before their last message",
            "two conversations that share all but the last message, or a `prompt`",
        )
    _require_question(record, "what `chosen` and `rejected` share (there is no `prompt`)", before[0])
    return before[0]


def _shared_dialogue(record: Record, chosen: str, rejected: str) -> str:
    (prompt, marker, _), (other, *_) = chosen.rpartition(HH_MARKER), rejected.rpartition(HH_MARKER)
    if not marker or HH_MARKER not in rejected or prompt != other:
        fault = "differ before their last Assistant turn" if marker and HH_MARKER in rejected else "are not dialogues"
        raise wrong(
            record.source,
            f"without `prompt`, and the strings `chosen` {shown(chosen)} and `rejected` {shown(rejected)} {fault}",
            "Anthropic HH dialogues (\\n\\nHuman: ...\\n\\nAssistant: ...) that agree up to and including the last "
            "\\n\\nAssistant:, or a `prompt`. Repair or remove the record",
        )
    return prompt + marker


def _require_question(record: Record, what: str, turns: Conversation) -> None:
    if not turns or turns[-1].role not in ("user", "tool"):
        raise wrong(
            record.source, f"{what} has the turns {_roles(turns)}", "a conversation that ends with a user or tool turn"
        )


def _with_system(prompt: Text, system_prompt: str | None, record: Record) -> Text:
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


def _truncated(record: Record) -> bool:
    value = record.fields.get("truncated")
    if value is not None and not isinstance(value, bool):
        raise wrong(record.source, f"`truncated` is {shown(value)}", "true or false")
    return bool(value)


def _margin(record: Record) -> float | None:
    value = record.fields.get("margin")
    if value is None:
        return None
    largest = sys.float_info.max  # an integer may be too large for a float
    if isinstance(value, bool) or not isinstance(value, int | float) or not -largest <= value <= largest:
        raise wrong(record.source, f"`margin` is {shown(value)}", "a finite number")
    return float(value)


def _roles(turns: Text) -> str:
    return "/".join(turn.role for turn in turns if isinstance(turn, Message)) or "(none)"
