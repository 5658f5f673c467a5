"""Recognise the formats of other tools by their columns, and turn their records into those that `heedful.data.schemas` reads.

A file has one format. It is reported once, with the unread columns of text. If two formats fit, the one with the most columns
named by ``--columns`` wins; if none has more, the file is refused.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heedful.data.messages import is_metadata, read_conversation, shown, text, wrong
from heedful.data.readers import CANONICAL_NAMES, Record, kind_of, listed
from heedful.display import say
from heedful.display import shown as printable
from heedful.errors import DataError

Shape = tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """The target kind of a record, and the columns it may be made of."""

    name: str
    shapes: tuple[Shape, ...]
    accepted: str
    """The shapes in words, for messages."""
    about_text: str = ""
    """Advice for a record that has the column ``text`` instead."""
    others: str = ""
    """Use of the other columns, if they are kept."""
    also_read: frozenset[str] = frozenset()
    """Columns that are read in addition to those of a shape."""


STAND_INS = {
    "text": ("sentence", "document", "content", "story", "body"),
    "messages": ("conversation", "conversations", "dialogue", "chat", "turns"),
    "prompt": ("question", "instruction", "query", "problem", "input", "context"),
    "completion": ("answer", "response", "output", "solution", "target", "reply", "chosen"),
    "chosen": (
        "preferred",
        "accepted",
        "winner",
        "better",
        "chosen_response",
        "response_chosen",
        "good_answer",
        "good",
    ),
    "rejected": ("dispreferred", "loser", "worse", "rejected_response", "response_rejected", "bad_answer", "bad"),
    "responses": ("answers", "candidates", "completions", "outputs"),
    "ranks": ("rank", "ranking", "rankings"),
    "label": ("labels", "desirable", "is_good", "good", "liked", "thumbs_up", "feedback"),
}
"""Other data sets' names for a column. They serve only as hints: no column is mapped unless the user asks."""


ALPACA, ORCA = ("instruction", "input", "system", "history"), ("question", "system", "system_prompt")
"""Columns of which `heedful.data.formats` makes a prompt."""


def present_in(fields: Mapping[str, Any]) -> set[str]:
    """Return the columns that are not null."""
    return {name for name, value in fields.items() if value is not None}


def fitting_shapes(fields: Mapping[str, Any], task: Task) -> list[Shape]:
    """Return the task's shapes of which a record has all columns."""
    present = present_in(fields)
    return [shape for shape in task.shapes if present.issuperset(shape)]


def best_shape(fields: Mapping[str, Any], mapping: Mapping[str, str], task: Task) -> Shape | None:
    """Return the shape to read a record by: with the most columns in ``mapping``, then the first; None if none fits."""
    fitting = fitting_shapes(fields, task)
    return max(fitting, key=lambda shape: sum(name in mapping for name in shape)) if fitting else None


def shape_of(record: Record, mapping: Mapping[str, str], task: Task) -> Shape:
    """Return the columns to read the record by. Raises DataError, with a hint, if no shape fits."""
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
            rendered = _rendered(named, record.fields)
            return f" Perhaps: {f'{rendered}, or ' if rendered else ''}{_flag(named)}{RAW if rendered else ''}{rest}"
    if record.source.endswith(".txt:1"):
        lines = f" To make a prompt of each line: {PROMPTS_OF_LINES}".format(record.source.removesuffix(":1"))
        return f" A .txt file is one text.{lines if task.about_text else ' Write .jsonl or .csv with these columns'}"
    if task.about_text and "text" in present:
        return f" {task.about_text}"
    return f" Name this file's columns with --columns, for example {COLUMNS}"


RAW = " (raw text)"
COLUMNS = (
    "--columns instruction=question,output=answer (rendered by the chat template), or --columns "
    f"prompt=question,completion=answer{RAW}"
)
"""Both ways to read a question of a column of another name."""


def _flag(columns: Mapping[str, str | None]) -> str:
    return f"--columns {printable(','.join(f'{name}={column}' for name, column in columns.items()))}"


def _rendered(missing: Mapping[str, str | None], fields: Mapping[str, Any]) -> str:
    """The columns that make a string a user's message, which the chat template renders; nothing if no string is asked for."""
    if not isinstance(fields.get(missing.get("prompt") or ""), str):
        return ""
    names = {"prompt": "instruction", "completion": "output"}
    return (
        f"{_flag({names.get(name, name): column for name, column in missing.items()})} (rendered by the chat template)"
    )


PROMPTS_OF_LINES = (
    """python -c "import json; [print(json.dumps({{'prompt': line.strip()}})) for line in open('{}', encoding='utf-8') """
    """if line.strip()]" > prompts.jsonl"""
)


def _with_others(missing: Mapping[str, str | None], fields: Mapping[str, Any]) -> Mapping[str, str | None]:
    """For an instruction or a question, suggest the answer's column of alpaca's and Orca's formats instead of a prompt."""
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


Fields = Mapping[str, Any]
BESIDE = ("tools", "margin", "truncated", "label")
"""Columns that go with any format."""
OF_THE_DEMO = ({"family", "kind"}, {"family", "chosen_kind", "rejected_kind"}, {"family", "fact", "answer"})
"""What describes the records that the demo writes: known, so not reported."""
OF_THE_RECORD = ("system", "history")
RENAMED = {"kto_tag": "label", "functions": "tools"}
"""Other names of the same columns: LLaMA-Factory's and OpenAI's."""


@dataclass(frozen=True)
class Format:
    """A format of another tool."""

    name: str
    how: str
    """How its columns are read, for the report."""
    columns: Shape
    """The columns that identify it."""
    convert: Callable[[Record], dict[str, Any]]
    """Returns the columns of ``gives``."""
    gives: Shape
    """The columns of the converted records, which `heedful.data.schemas` reads."""
    optional: Shape = ()
    has_kinds: Callable[[Fields], bool] | None = None
    """Checks the types of its columns' values; None: all are text."""
    answer: str = ""
    """The column of the last message of ``messages``. If only a prompt is wanted, it may be empty."""

    @property
    def read(self) -> set[str]:
        """Every column that it reads."""
        return {*self.columns, *self.optional}

    def fits(self, fields: Fields, task: Task) -> bool:
        """Whether a record has this format, and the task can be made of it."""
        present = present_in(fields)
        given = {*self.gives, *(present & {"label"})}
        is_wanted = any(given.issuperset(shape) for shape in task.shapes)
        has_kinds = self.has_kinds or _are(str, *self.columns)
        return is_wanted and present.issuperset(self.columns) and has_kinds(fields)


def in_known_shape(path: str, records: Sequence[Record], mapping: Mapping[str, str], task: Task) -> "SchemaReader":
    """Recognise the format of a file's records, and report it and the unread texts on standard error.

    Returns a function that turns a record into one of the task's own shapes. It raises DataError for a record of another
    format than the first one's. Raises DataError too if two formats fit.
    """
    records = [_with_usual_names(record) for record in records]
    found = next((one for record in records if (one := _recognised(record, mapping, task)) is not None), None)
    known = SchemaReader(found if isinstance(found, Format) else None, mapping, task)
    _report(path, records, known)
    return known


@dataclass(frozen=True)
class SchemaReader:
    """Turns the records of one file into those of a task's own shapes."""

    format: Format | None
    """None: the file has these shapes already."""
    mapping: Mapping[str, str]
    task: Task

    def __call__(self, record: Record) -> Record:
        record = _with_usual_names(record)
        if self.format is None:
            return record
        if not self.format.fits(record.fields, self.task):
            raise wrong(
                record.source,
                f"not {self.format.name} like the other records: found {_listed(record.fields) or 'no columns'}",
                f"{_columns(self.format.columns)}",
                cause=f"not {self.format.name}",
            )
        try:
            if self.format.answer and not self.task.others:
                text(record.source, self.format.answer, record.fields[self.format.answer])
            given = self.format.convert(record)
        except DataError as error:
            explained = DataError(f"{error} (read as {self.format.name})")
            explained.cause = error.cause
            raise explained from error
        own = {name for shape in self.task.shapes for name in shape}
        own -= {"messages"} if "prompt" in given else set()
        kept = {n: v for n, v in record.fields.items() if n in BESIDE or (self.task.others and n not in own)}
        return Record(record.source, kept | given)


def _recognised(record: Record, mapping: Mapping[str, str], task: Task) -> Format | Shape | None:
    """The format of a record or the task's own shape of it; None if it has neither. Raises DataError if it has two."""
    own = best_shape(record.fields, mapping, task)
    fitting = [one for one in FORMATS if one.fits(record.fields, task)]
    fitting = [one for one in fitting if not any(one.read < other.read for other in fitting)]
    if not fitting:
        return own

    def named(columns: Iterable[str]) -> int:
        return sum(name in mapping for name in columns)

    best = max(fitting, key=lambda one: named(one.read))
    rivals: list[tuple[str, Shape]] = [
        (one.name, one.columns) for one in fitting if one is not best and named(one.read) == named(best.read)
    ]
    if own is not None and not best.read.issuperset(own):
        if named(own) > named(best.read) or (named(own) == named(best.read) and task.others):
            return own
        if named(own) == named(best.read) and own != ("text",):
            rivals.append((_columns(own), own))
    if rivals:
        choices = [(best.name, best.columns), *rivals]
        every = [f"{name} by --columns {_as_flag(_distinguishing(columns, choices))}" for name, columns in choices]
        raise DataError(
            f"{record.source}: this may be {' or '.join(name for name, _ in choices)}, and what is learned depends on it. "
            f"Choose: {'; '.join(every)}"
        )
    return best


def _distinguishing(columns: Shape, choices: Sequence[tuple[str, Shape]]) -> list[str]:
    others = [other for _, other in choices if other != columns]
    return [name for name in columns if not any(name in other for other in others)] or list(columns)


def _as_flag(names: Iterable[str]) -> str:
    return ",".join(f"{name}={name}" for name in names)


def _columns(names: Iterable[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)


def _listed(names: Iterable[str]) -> str:
    return listed(f"`{name}`" for name in names)


def _with_usual_names(record: Record) -> Record:
    """Return a record with the usual names for its columns."""
    fields = record.fields
    for name, usual in RENAMED.items():
        if fields.get(name) is not None and fields.get(usual) is None:
            value = fields[name]
            if name == "functions" and isinstance(value, list):
                value = [{"type": "function", "function": one} for one in value]
            fields = {key: one for key, one in fields.items() if key not in (name, usual)} | {usual: value}
    return record if fields is record.fields else Record(record.source, dict(fields))


# The report at the start -----------------------------------------------------------------------------------------------


def _report(path: str, records: Sequence[Record], known: SchemaReader) -> None:
    if known.format is not None and known.mapping.keys().isdisjoint(known.format.columns):
        say(f"{path}: read as {known.format.name}: {known.format.how}")
    texts: dict[str, None] = {}
    keys: dict[str, None] = {}
    shapes: dict[Shape, None] = {}
    for record in records:
        shape = None if known.format else best_shape(record.fields, known.mapping, known.task)
        if known.format is None and shape is None:
            continue
        read = known.format.read if known.format else set(shape or ())
        shapes |= {} if shape is None else {shape: None}
        for name, value in record.fields.items():
            if name in read and isinstance(value, list):
                keys |= dict.fromkeys(_unread_keys(value))
            elif name not in (*read, *BESIDE, *known.task.also_read) and name not in texts and _has_text(value):
                texts[name] = None
    if texts and set(texts) not in OF_THE_DEMO:
        unread = f"beside the {known.task.name}" if known.task.others else "not read"
        remedy = _remedy(records[0], list(texts), list(shapes), known)
        say(f"{path}: {unread}: {_listed(texts)}. {'. '.join(filter(None, (known.task.others, remedy)))}")
    if keys:
        say(f"{path}: not read in messages: {_listed(keys)}")


def _has_text(value: Any) -> bool:
    return bool(value.strip()) if isinstance(value, str) else isinstance(value, list | dict) and bool(value)


def _unread_keys(messages: Sequence[Any]) -> list[str]:
    return [
        key
        for message in messages
        if isinstance(message, dict)
        for key, value in message.items()
        if is_metadata(key, value)
    ]


def _remedy(record: Record, texts: Sequence[str], shapes: Sequence[Shape], known: SchemaReader) -> str:
    """The flags that would read the unread columns."""
    original = {known.mapping.get(name, name): value for name, value in record.fields.items()}
    if known.format is None and known.mapping:
        whole = [one for one in FORMATS if one.fits(original, known.task) and not one.read.isdisjoint(texts)]
        if whole:
            reads = _listed(name for name in texts if name in whole[0].read)
            return f"Without --columns the file is read as {whole[0].name}, with {reads}"
    others = [
        shape
        for shape in [
            *fitting_shapes(record.fields, known.task),
            *(f.columns for f in FORMATS if f.fits(record.fields, known.task)),
        ]
        if shape not in shapes and any(name in texts for name in shape)
    ]
    if others and known.format is None:
        return f"--columns {_as_flag(others[0])} reads {_columns(others[0])} instead"
    if "system" in texts and shapes:
        instead = WITH_SYSTEM.get(shapes[0])
        if instead and (shapes[0] == ("messages",) or isinstance(record.fields.get("prompt"), str)):
            return f"--columns {instead} reads `system` as the system message"
    return "" if known.task.others else "--columns NAME=COLUMN reads a column as NAME (docs/data.md)"


WITH_SYSTEM: Mapping[Shape, str] = {
    ("messages",): "conversations=messages",
    ("prompt", "completion"): "question=prompt,response=completion",
    ("prompt", "chosen", "rejected"): "question=prompt",
}
"""The ``--columns`` that read a column ``system`` beside a shape that does not."""


# The formats -----------------------------------------------------------------------------------------------------------


def _are(kind: type | tuple[type, ...], *names: str) -> Callable[[Fields], bool]:
    return lambda fields: all(isinstance(fields.get(name), kind) for name in names)


def _are_messages(*names: str) -> Callable[[Fields], bool]:
    return lambda fields: all(_is_conversation(fields.get(name)) for name in names)


def _have_system(*names: str) -> Callable[[Fields], bool]:
    return lambda fields: _are(str, *names)(fields) and any(name in fields for name in SYSTEM)


def _are_orca(asked: str) -> Callable[[Fields], bool]:
    return lambda fields: _have_system(asked, "chosen", "rejected")(fields) and "instruction" not in fields


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _system_of(record: Record, *names: str) -> list[dict[str, Any]]:
    """The system message of a record, from the first of these columns that is not empty."""
    for name in names:
        value = record.fields.get(name)
        if value is not None and value != "":
            if not isinstance(value, str):
                raise wrong(record.source, f"`{name}` is {shown(value)}", "a string")
            return [_message("system", value)]
    return []


def _history_of(record: Record) -> list[dict[str, Any]]:
    history = record.fields.get("history") or []
    accepted = "a list of [question, answer]"
    if not isinstance(history, list):
        raise wrong(record.source, f"`history` is {shown(history)}", accepted)
    turns = []
    for i, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(one, str) for one in pair):
            raise wrong(record.source, f"`history[{i}]` is {shown(pair)}", accepted)
        turns += [_message("user", pair[0]), _message("assistant", pair[1])]
    return turns


def instruction(record: Record, added: str = "input") -> list[dict[str, Any]]:
    """The conversation up to the answer: system, history, then the instruction and its input in one message."""
    parts = [record.fields.get(name) for name in ("instruction", added)]
    for name, part in zip(("instruction", added), parts, strict=True):
        if part is not None and not isinstance(part, str):
            raise wrong(record.source, f"`{name}` is {shown(part)}", "a string")
    question = "\n".join(part for part in parts if part)
    text(record.source, "instruction", question)
    return [*_system_of(record, "system"), *_history_of(record), _message("user", question)]


def _answered(turns: list[dict[str, Any]], answer: str) -> dict[str, Any]:
    return {"messages": [*turns, _message("assistant", answer)] if answer.strip() else turns}


def _sharegpt(record: Record) -> dict[str, Any]:
    turns = record.fields["conversations"]
    system = _system_of(record, "system")
    if system and isinstance(turns, list) and turns and isinstance(turns[0], dict):
        first = read_conversation(record.source, "conversations", turns)[0]
        if first.role == "system" and first.content != system[0]["content"]:
            raise wrong(
                record.source, "two system messages: `system` and the first of `conversations`", "only one of them"
            )
        system = [] if first.role == "system" else system
    return {"messages": [*system, *turns]}


def _sharegpt_pair(record: Record) -> dict[str, Any]:
    prompt = _sharegpt(record)["messages"]
    return {"prompt": prompt, **_pair(record)}


def _text_prompt(record: Record) -> dict[str, Any]:
    """``prompt`` as text is a user message of the conversations beside it, or, if they are answers, the whole prompt."""
    prompt = record.fields["prompt"]
    answers = {name: record.fields[name] for name in ("completion", "chosen", "rejected") if record.fields.get(name)}
    name, longest = max(answers.items(), key=lambda item: len(item[1]))
    if len(longest) == 1:
        return {**answers, "prompt": [_message("user", prompt)]}
    before = read_conversation(record.source, name, longest)[:-1]
    if prompt.strip() and prompt.strip() not in [turn.content.strip() for turn in before if turn.role == "user"]:
        raise wrong(
            record.source,
            f"`prompt` is {shown(prompt)}, which is not a user message of `{name}`",
            f"a user message of `{name}`, whose messages before the last are the prompt; or no `prompt`",
            cause="no shared prompt",
        )
    return {**answers, "prompt": longest[:-1]}


def _preferred(record: Record) -> dict[str, Any]:
    asked = record.fields["input"]
    tools = {name: asked[name] for name in ("tools", "functions") if asked.get(name)}
    return {
        "prompt": asked["messages"],
        "chosen": record.fields["preferred_output"],
        "rejected": record.fields["non_preferred_output"],
        **_with_usual_names(Record(record.source, tools)).fields,
    }


def _of_two(record: Record) -> dict[str, Any]:
    chosen, rejected = record.fields["output"]
    return {"prompt": instruction(record), "chosen": chosen, "rejected": rejected}


def _pair_after(prompt: Callable[[Record], list[dict[str, Any]]]) -> Callable[[Record], dict[str, Any]]:
    return lambda record: {"prompt": prompt(record), **_pair(record)}


def _pair(record: Record) -> dict[str, Any]:
    return {name: record.fields[name] for name in ("chosen", "rejected")}


def _ranked(record: Record) -> dict[str, Any]:
    return {name: record.fields[name] for name in ("responses", "ranks")}


def _question(record: Record, name: str = "question") -> list[dict[str, Any]]:
    asked = text(record.source, name, record.fields[name])
    return [*_system_of(record, *SYSTEM), _message("user", asked)]


PAIR = ("prompt", "chosen", "rejected")
SYSTEM = ("system", "system_prompt")
INSTRUCTION = "`instruction` and `input` are the user's message, after `system` and `history`"
FORMATS = (
    Format(
        "UltraFeedback",
        "the prompt is what `chosen` and `rejected` share, in which `prompt` is a user message",
        PAIR, _text_prompt, PAIR,
        has_kinds=lambda fields: isinstance(fields["prompt"], str) and _are_messages("chosen", "rejected")(fields),
    ),
    Format(
        "a prompt with a conversation",
        "`prompt` is a user message before the answer in `completion`",
        ("prompt", "completion"), _text_prompt, ("prompt", "completion"),
        has_kinds=lambda fields: isinstance(fields["prompt"], str) and _are_messages("completion")(fields),
    ),
    Format(
        "ShareGPT",
        "`conversations` are the messages, after `system`",
        ("conversations",), _sharegpt, ("messages",), ("system",),
        has_kinds=_are(list, "conversations"),
    ),
    Format(
        "ShareGPT pairs",
        "`conversations` are the prompt, after `system`; `chosen` and `rejected` answer it",
        ("conversations", "chosen", "rejected"), _sharegpt_pair, PAIR, ("system",),
        has_kinds=_are(list, "conversations"),
    ),
    Format(
        "pairs after messages",
        "`messages` are the prompt; `chosen` and `rejected` answer it",
        ("messages", "chosen", "rejected"), lambda record: {"prompt": record.fields["messages"], **_pair(record)}, PAIR,
        has_kinds=lambda fields: _are_messages("messages")(fields) and _are((dict, str), "chosen", "rejected")(fields),
    ),
    Format(
        "alpaca",
        f"{INSTRUCTION}; `output` is the answer",
        ("instruction", "output"), lambda record: _answered(instruction(record), record.fields["output"]),
        ("messages",), ("input", *OF_THE_RECORD), answer="output",
    ),
    Format(
        "alpaca pairs",
        f"{INSTRUCTION}; `chosen` and `rejected` answer it",
        ("instruction", "chosen", "rejected"), _pair_after(instruction), PAIR, ("input", *OF_THE_RECORD),
    ),
    Format(
        "alpaca pairs in `output`",
        f"{INSTRUCTION}; `output` is the better answer and the worse",
        ("instruction", "output"), _of_two, PAIR, ("input", *OF_THE_RECORD),
        has_kinds=lambda fields: isinstance(fields["output"], list) and len(fields["output"]) == 2,
    ),
    Format(
        "Dolly",
        "`instruction` and `context` are the user's message; `response` is the answer",
        ("instruction", "response"), lambda record: _answered(instruction(record, "context"), record.fields["response"]),
        ("messages",), ("context", *OF_THE_RECORD), answer="response",
    ),
    Format(
        "a prompt in alpaca's columns",
        INSTRUCTION,
        ("instruction", "input"), lambda record: {"prompt": instruction(record)}, ("prompt",), OF_THE_RECORD,
    ),
    Format(
        "an instruction",
        "`instruction` is the user's message, after `system` and `history`",
        ("instruction",), lambda record: {"prompt": instruction(record)}, ("prompt",), OF_THE_RECORD,
        has_kinds=lambda fields: _are(str, "instruction")(fields)
        and present_in(fields).isdisjoint(("prompt", "messages", "conversations")),
    ),
    Format(
        "a ranking after an instruction",
        "`instruction` is the user's message, after `system` and `history`; `responses` answer it",
        ("instruction", "responses", "ranks"), lambda record: {"prompt": instruction(record), **_ranked(record)},
        ("prompt", "responses", "ranks"), OF_THE_RECORD, has_kinds=_are(str, "instruction"),
    ),
    Format(
        "Orca",
        "the system prompt and `question` are the prompt; `response` is the answer",
        ("question", "response"), lambda record: _answered(_question(record), record.fields["response"]),
        ("messages",), SYSTEM, _have_system("question", "response"), "response",
    ),
    Format(
        "OpenAI's preference format",
        "`input` is the prompt, `preferred_output` chosen and `non_preferred_output` rejected",
        ("input", "preferred_output", "non_preferred_output"), _preferred, PAIR,
        has_kinds=lambda fields: isinstance(fields["input"], dict) and isinstance(fields["input"].get("messages"), list),
    ),
    Format(
        "Orca pairs",
        "the system prompt and `question` are the prompt",
        ("question", "chosen", "rejected"), _pair_after(_question), PAIR, SYSTEM,
        _are_orca("question"),
    ),
    Format(
        "Orca pairs with `input`",
        "the system prompt and `input` are the prompt",
        ("input", "chosen", "rejected"), _pair_after(lambda record: _question(record, "input")), PAIR, SYSTEM,
        _are_orca("input"),
    ),
)  # fmt: skip
