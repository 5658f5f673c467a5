"""Turn records into demonstrations, rankings, labelled responses and prompts, by the names of their columns.

Strings are raw text and lists of messages are conversations, everywhere. A null column counts as absent (Parquet has no
other way to leave one out). If a record fits several shapes, the shape with the most columns named by ``--columns`` wins
(``--columns messages=messages`` picks the conversation), then the shape that comes first in the reader's docstring.

The readers take `ReadOptions`. They raise DataError, with file and line, for an unusable record, ConfigError if
``system_prompt`` is given for raw text, and the errors of `read_records` and `parse_columns`.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypedDict, TypeVar, Unpack

from heedful.data.formats import Shape, Task, in_known_shape, shape_of
from heedful.data.messages import read_conversation, read_tools, shown, text, wrong
from heedful.data.readers import Record, parse_columns, read_records
from heedful.errors import ConfigError, DataError
from heedful.types import (
    Conversation,
    Demonstration,
    Labelled,
    Message,
    Prompt,
    Ranking,
    Response,
    Text,
    Turn,
    plain_response,
    split_thinking,
)

Item = TypeVar("Item")
LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
HH_MARKER = "\n\nAssistant:"

DEMONSTRATIONS = Task(
    "demonstration",
    (("prompt", "completion"), ("messages",), ("text",)),
    "`prompt` and `completion`; or `messages`; or `text`",
)
RANKINGS = Task(
    "preference pair or ranking",
    (("prompt", "chosen", "rejected"), ("prompt", "responses", "ranks"), ("chosen", "rejected")),
    "`prompt`, `chosen` and `rejected`; or `prompt`, `responses` and `ranks`; or only `chosen` and `rejected`, as "
    "conversations that share all but the last message or as Anthropic HH dialogues",
)
LABELLED = Task(
    "labelled response",
    (
        ("prompt", "completion", "label"),
        ("messages", "label"),
        ("prompt", "chosen", "rejected"),
        ("chosen", "rejected"),
    ),
    "`prompt`, `completion` and `label` (true or false); or `messages` and `label`; or pairs, `prompt`, `chosen` "
    "and `rejected`, of which each response is labelled",
)
PROMPTS = Task(
    "prompt",
    (("prompt",), ("messages",)),
    "`prompt`; or `messages`",
    "`text` is for plain language modelling (sft): it has no prompt. If it is one: --columns instruction=text (rendered by "
    "the chat template), or --columns prompt=text (raw text)",
    "Reward functions receive them",
)


class ReadOptions(TypedDict, total=False):
    """How the records of a file are read."""

    columns: str
    """The file's own column names, as ``--columns`` gives them (`parse_columns`)."""
    system_prompt: str | None
    """A system message for conversations that have none."""
    refused: list[DataError] | None
    """Collects the errors of unusable records and drops these records; None raises the first error."""
    max_samples: int | None
    """Read only the first N records."""


def read_demonstrations(path: str, **options: Unpack[ReadOptions]) -> list[Demonstration]:
    """Read demonstrations from ``prompt`` + ``completion``, ``messages`` or ``text``.

    Every assistant turn of ``messages``, except those with ``weight: 0``, ``train: false`` or ``loss: false``, becomes one
    demonstration, whose prompt is the conversation before it. With ``text`` the prompt is empty. ``completion`` is a
    string, or messages that begin and end with the assistant's, such as a call, its result and an answer, perhaps after the
    prompt's messages again; each of its assistant turns is one demonstration. A boolean ``truncated`` says that the (last)
    response was cut off.

    A prompt that ends with the assistant's words gives the beginning of the answer, which the completion continues.
    """
    turns = _read(path, DEMONSTRATIONS, _demonstrations, **options)
    return [demonstration for of_record in turns for demonstration in of_record]


def read_rankings(path: str, **options: Unpack[ReadOptions]) -> list[Ranking]:
    """Read rankings from ``prompt`` + ``chosen`` + ``rejected``, ``prompt`` + ``responses`` + ``ranks``, or a pair only.

    A pair has ranks (0, 1) and may have a ``margin``. A response is a string, or messages that begin and end with the
    assistant's, perhaps after the prompt's messages again. A prompt that ends with the assistant's words gives the beginning
    of all responses. A boolean ``truncated`` says that the responses were cut off. If ``prompt`` is ``""``, whole texts are
    compared.

    A pair without ``prompt`` contains it. Of two conversations it is what they share, up to an assistant's turn. Two
    strings must be Anthropic HH dialogues that agree up to and including their last ``"\\n\\nAssistant:"``; this part is the
    prompt, as raw text. The rest are the responses, with their leading space.
    """
    return _read(path, RANKINGS, ranking_of, **options)


def read_labelled(path: str, **options: Unpack[ReadOptions]) -> list[Labelled]:
    """Read responses that are good or bad, from ``prompt`` + ``completion`` + ``label``, or from pairs.

    ``label`` is true for a good response. A pair, in the shapes of `read_rankings`, is two records: the chosen response is a
    good one, the rejected one a bad one.
    """
    of_records = _read(path, LABELLED, _labelled, **options)
    return [response for of_record in of_records for response in of_record]


def read_prompts(path: str, **options: Unpack[ReadOptions]) -> list[Prompt]:
    """Read prompts from ``prompt`` or ``messages``. The record's other fields go to ``Prompt.columns`` under their names.

    If ``prompt`` ends with an assistant turn, its text is the beginning of the answer, which the policy continues.

    If ``messages`` ends with an assistant turn, the prompt is what comes before it, and the turn's text goes to
    ``columns["completion"]`` as the reference answer.
    """
    return _read(path, PROMPTS, _prompt, **options)


def _read(
    path: str,
    task: Task,
    convert: Callable[[Record, Mapping[str, str], str | None], Item],
    *,
    columns: str = "",
    system_prompt: str | None = None,
    refused: list[DataError] | None = None,
    max_samples: int | None = None,
) -> list[Item]:
    mapping = parse_columns(columns)
    records = read_records(path, columns=mapping, max_samples=max_samples)
    known = in_known_shape(path, records, mapping, task)
    items = []
    for record in records:
        try:
            items.append(convert(known(record), mapping, system_prompt))
        except DataError as error:
            if refused is None:
                raise
            refused.append(error)
    return items


def _demonstrations(record: Record, mapping: Mapping[str, str], system_prompt: str | None) -> list[Demonstration]:
    shape = shape_of(record, mapping, DEMONSTRATIONS)
    truncated = is_truncated(record)
    begun = ""
    if shape == ("messages",):
        turns = answers_in(record, read_conversation(record.source, "messages", record.fields["messages"]))
    elif shape == ("text",):
        turns = [("", text(record.source, "text", record.fields["text"]))]
    else:
        asked, begun = prompt_of(record)
        response = response_of(record, "completion", record.fields["completion"], asked, begun)
        turns = [(asked, response)]
        if isinstance(response, tuple) and not isinstance(asked, str):
            turns = answers_in(record, (*asked, *response), after=len(asked))
    learned = []
    for i, (prompt, response) in enumerate(turns):
        cut = truncated and i == len(turns) - 1
        if prompt != "" and not cut and split_thinking(plain_response(response))[1] is None:
            raise wrong(
                record.source,
                "a response that begins with <think> and has no </think>",
                "both, or truncated: true",
                cause="a thought without an end",
            )
        given = begun if i == 0 else ""
        asked = with_system(prompt, system_prompt, record)
        learned.append(Demonstration(asked, response, record.source, cut, prefill=given))
    return learned


def answers_in(record: Record, turns: Conversation, *, after: int = 0) -> list[tuple[Text, Response]]:
    """Return each assistant turn to learn, from the place ``after`` on, with the conversation before it.

    Raises DataError if there is none.
    """
    ends = [i for i, turn in enumerate(turns) if i >= after and turn.role == "assistant" and turn.learned]
    if not ends:
        masked = " with weight 0, train false or loss false" if "assistant" in roles(turns) else ""
        raise wrong(
            record.source,
            f"`{'completion' if after else 'messages'}` has no assistant turn, only {roles(turns[after:])}{masked}",
            "at least one to learn from",
            cause="no answer to learn from",
        )
    return [(turns[:end], reply_of(turns[end])) for end in ends]


def ranking_of(record: Record, mapping: Mapping[str, str], system_prompt: str | None) -> Ranking:
    """Return the ranking of one record, as `read_rankings` does."""
    shape = shape_of(record, mapping, RANKINGS)
    return _k_wise(record, system_prompt) if "ranks" in shape else _pair(record, shape, system_prompt)


def _pair(record: Record, shape: Shape, system_prompt: str | None) -> Ranking:
    prompt, begun = _ranked_prompt(record) if "prompt" in shape else (_shared_prompt(record), "")
    responses: list[Response] = []
    for name in ("chosen", "rejected"):
        value = record.fields[name]
        if "prompt" not in shape and isinstance(prompt, str):
            responses.append(text(record.source, name, value[len(prompt) :]))
        else:
            responses.append(response_of(record, name, value, prompt, begun))
    prompt = with_system(prompt, system_prompt, record)
    return Ranking(
        prompt, tuple(responses), (0, 1), record.source, _margin(record), is_truncated(record), prefill=begun
    )


def _labelled(record: Record, mapping: Mapping[str, str], system_prompt: str | None) -> list[Labelled]:
    shape = shape_of(record, mapping, LABELLED)
    if "label" not in shape:
        return _both_of_a_pair(record, shape, system_prompt)
    label, begun = is_good(record.source, record.fields["label"]), ""
    if shape == ("messages", "label"):
        turns = read_conversation(record.source, "messages", record.fields["messages"])
        if turns[-1].role != "assistant":
            raise wrong(
                record.source,
                f"`messages` has the turns {roles(turns)}",
                "messages that end with the assistant's, which is labelled",
                cause="no answer of the assistant",
            )
        prompt: Text = turns[:-1]
        response: Response = reply_of(turns[-1])
    else:
        prompt, begun = prompt_of(record)
        response = response_of(record, "completion", record.fields["completion"], prompt, begun)
    prompt = with_system(prompt, system_prompt, record)
    return [Labelled(prompt, response, record.source, is_truncated(record), label=label, prefill=begun)]


def is_good(source: str, label: Any) -> bool:
    """Return True for a good label (true or 1) and False for a bad one (false or 0); both may be text.

    Raises DataError for anything else.
    """
    said = str(label).lower() if isinstance(label, bool | int | float | str) else ""
    if said not in LABELS:
        raise wrong(source, f"`label` is {shown(label)}", "true or 1 for a good response, false or 0 for a bad one")
    return LABELS[said]


def _both_of_a_pair(record: Record, shape: Shape, system_prompt: str | None) -> list[Labelled]:
    pair = _pair(record, shape, system_prompt)
    chosen, rejected = pair.responses
    if pair.prompt == "":
        raise wrong(record.source, "`prompt` is empty", "a prompt that the responses answer")
    if chosen == rejected:
        raise wrong(
            record.source,
            "`chosen` and `rejected` are equal, so the response would be good and bad",
            "two texts",
            cause="equal answers",
        )
    return [
        Labelled(pair.prompt, response, pair.source, pair.truncated, prefill=pair.prefill, label=label, of_a_pair=True)
        for response, label in ((chosen, True), (rejected, False))
    ]


def _k_wise(record: Record, system_prompt: str | None) -> Ranking:
    (prompt, begun), responses, ranks = _ranked_prompt(record), record.fields["responses"], record.fields["ranks"]
    if not isinstance(responses, list) or len(responses) < 2:
        raise wrong(record.source, f"`responses` is {shown(responses)}", "a list of two or more responses")
    if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
        raise wrong(record.source, f"`ranks` is {shown(ranks)}", "a list of integers, 0 the best; equal ranks tie")
    if len(ranks) != len(responses):
        raise wrong(
            record.source, f"{len(responses)} `responses` but {len(ranks)} `ranks`", "one rank for each response"
        )
    if len(set(ranks)) < 2:
        raise wrong(
            record.source,
            f"`ranks` are all {ranks[0]}: nothing is preferred",
            "at least two different ranks",
            cause="no preference: all ranks are equal",
        )
    if record.fields.get("margin") is not None:
        raise wrong(record.source, "`margin` beside `ranks`", "`margin` only with `chosen` and `rejected`")
    texts = tuple(response_of(record, f"responses[{i}]", value, prompt, begun) for i, value in enumerate(responses))
    prompt = with_system(prompt, system_prompt, record)
    return Ranking(prompt, texts, tuple(ranks), record.source, truncated=is_truncated(record), prefill=begun)


def _prompt(record: Record, mapping: Mapping[str, str], system_prompt: str | None) -> Prompt:
    if shape_of(record, mapping, PROMPTS) == ("prompt",):
        columns = {name: value for name, value in record.fields.items() if name != "prompt"}
        asked, begun = prompt_of(record)
        return Prompt(with_system(asked, system_prompt, record), record.source, columns, begun)
    turns = read_conversation(record.source, "messages", record.fields["messages"])
    columns = {name: value for name, value in record.fields.items() if name != "messages"}
    if turns[-1].role == "assistant":
        if columns.get("completion") is not None:
            raise wrong(
                record.source, "two reference answers: `messages` ends with one and `completion` is another", "only one"
            )
        turns, columns["completion"] = turns[:-1], plain_response(turns[-1])
    if not turns:
        raise wrong(
            record.source,
            "`messages` has only an assistant turn",
            "a conversation to answer",
            cause="an answer that follows no question",
        )
    return Prompt(with_system(turns, system_prompt, record), record.source, columns)


def _ranked_prompt(record: Record) -> tuple[Text, str]:
    """Return the prompt as `prompt_of` does, or ``""`` if whole texts are compared."""
    return ("", "") if record.fields["prompt"] == "" else prompt_of(record)


def _shared_prompt(record: Record) -> Text:
    chosen, rejected = record.fields["chosen"], record.fields["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _shared_dialogue(record, chosen, rejected)
    sides = [read_conversation(record.source, name, record.fields[name]) for name in ("chosen", "rejected")]
    one, other = sides
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(map(len, sides)))
    shared = min(shared, len(one) - 1, len(other) - 1)
    if one[shared].role != "assistant" or other[shared].role != "assistant":
        raise wrong(
            record.source,
            f"without `prompt`, and `chosen` ({roles(one)}) and `rejected` ({roles(other)}) differ before an answer",
            "two conversations that are equal up to the assistant's turn in which they differ, or a `prompt`",
            cause="no shared prompt",
        )
    return one[:shared]


def _shared_dialogue(record: Record, chosen: str, rejected: str) -> str:
    (prompt, marker, _), (other, *_) = chosen.rpartition(HH_MARKER), rejected.rpartition(HH_MARKER)
    if not marker or HH_MARKER not in rejected or prompt != other:
        fault = "differ before their last Assistant turn" if marker and HH_MARKER in rejected else "are not dialogues"
        raise wrong(
            record.source,
            f"without `prompt`, and the strings `chosen` {shown(chosen)} and `rejected` {shown(rejected)} {fault}",
            "Anthropic HH dialogues (\\n\\nHuman: ...\\n\\nAssistant: ...) that agree up to and including the last "
            "\\n\\nAssistant:, or a `prompt`. Repair or remove the record",
            cause="no shared prompt" if fault.startswith("differ") else "no dialogue",
        )
    return prompt + marker


def _margin(record: Record) -> float | None:
    value = record.fields.get("margin")
    if value is None:
        return None
    largest = sys.float_info.max  # an integer may be too large for a float
    if isinstance(value, bool) or not isinstance(value, int | float) or not -largest <= value <= largest:
        raise wrong(record.source, f"`margin` is {shown(value)}", "a finite number")
    return float(value)


# The parts of a record -------------------------------------------------------------------------------------------------


def prompt_of(record: Record) -> tuple[Text, str]:
    """Return the column ``prompt``: text, or messages; and the beginning of the answer, if they end with one.

    Raises DataError for anything else.
    """
    value = record.fields["prompt"]
    if isinstance(value, str):
        return text(record.source, "prompt", value), ""
    if not isinstance(value, list):
        raise wrong(record.source, f"`prompt` is {shown(value)}", "a string or a list of messages")
    turns = read_conversation(record.source, "prompt", value)
    if turns[-1].role != "assistant":
        return turns, ""
    if turns[-1].tool_calls or turns[-1].thinking is not None or len(turns) == 1:
        raise wrong(
            record.source,
            f"`prompt` has the turns {roles(turns)}, the last with "
            f"{'nothing before it' if len(turns) == 1 else 'tool calls or separate thinking'}",
            "a conversation that ends with a user, system or tool turn, or with the first words of the answer",
            cause="an answer that follows no question",
        )
    return turns[:-1], turns[-1].content


def response_of(record: Record, name: str, value: Any, prompt: Text, prefill: str = "") -> Response:
    """Return a ``value`` of the column ``name`` as a response to the prompt, after the beginning that the prompt gives.

    Raises DataError for anything else.
    """
    if isinstance(value, str):
        return prefill + text(record.source, name, value)
    if isinstance(prompt, str):
        raise wrong(
            record.source,
            f"`prompt` is a string but `{name}` is {shown(value)}",
            "both strings, or both lists of messages",
        )
    turns = read_conversation(record.source, name, [value] if isinstance(value, dict) else value)
    if not prefill and len(turns) > len(prompt) and turns[: len(prompt)] == prompt:
        turns = turns[len(prompt) :]
    if turns[0].role != "assistant" or turns[-1].role != "assistant":
        raise wrong(
            record.source,
            f"`{name}` has the turns {roles(turns)} after a prompt of {roles(prompt)}",
            "a string, or messages that begin and end with the assistant's, perhaps after the prompt's messages again",
            cause="no shared prompt" if len(turns) > 1 else "no answer of the assistant",
        )
    if not any(turn.learned for turn in turns if turn.role == "assistant"):
        raise wrong(
            record.source,
            f"`{name}` has weight 0, train false or loss false, but it is what is learned",
            "no such mark; or remove the record",
        )
    turns = (replace(turns[0], content=prefill + turns[0].content), *turns[1:]) if prefill else turns
    return turns if len(turns) > 1 else reply_of(turns[0])


def reply_of(message: Message) -> Turn:
    """Return an assistant's message as a response: as text, unless it has tool calls, separate thinking or a name."""
    plain = message.thinking is None and not message.tool_calls and message.name is None
    return message.content if plain else message


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
    if system_prompt is not None and (not prompt or prompt[0].role != "system"):
        prompt = (Message("system", system_prompt), *prompt)
    if tools and not prompt:
        raise wrong(record.source, "`tools` beside a conversation that begins with an answer", "a turn before it")
    return (replace(prompt[0], tools=tools), *prompt[1:]) if tools else prompt


def is_truncated(record: Record) -> bool:
    """Return the column ``truncated``, False if there is none. Raises DataError if it is not a boolean."""
    value = record.fields.get("truncated")
    if value is not None and not isinstance(value, bool):
        raise wrong(record.source, f"`truncated` is {shown(value)}", "true or false")
    return bool(value)


def roles(turns: Text) -> str:
    """Return the roles of messages, for error messages."""
    return "/".join(turn.role for turn in turns if isinstance(turn, Message)) or "(none)"
