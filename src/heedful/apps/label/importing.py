"""Read prompts, answers and preferences as items to label, with labels already in the file (docs/labelling-data.md).

Records are read and checked as in the trainers (`heedful.data`), so errors have file and line.
"""

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from heedful.apps.label.answers import CANDIDATES, JUDGED, check_suggestion, dense_ranks, from_screen
from heedful.apps.label.people import IMPORT, is_import
from heedful.apps.label.project import Project
from heedful.apps.label.records import Candidate, Item, Standing, Task, item_id, places_in
from heedful.data.formats import Task as Shapes
from heedful.data.formats import in_known_shape, shape_of
from heedful.data.messages import as_dict, read_conversation, shown, wrong
from heedful.data.readers import Record, parse_columns, read_records
from heedful.data.schemas import is_good, prompt_of, ranking_of, reply_of, response_of, with_system
from heedful.display import counted
from heedful.errors import ConfigError, DataError
from heedful.types import Message, Response, Text

ChosenBy = Literal["import", "random", "active"]
T = TypeVar("T")

TO_LABEL = Shapes(
    "record to label",
    (
        ("prompt", "chosen", "rejected"),
        ("prompt", "responses"),
        ("chosen", "rejected"),
        ("prompt", "completion"),
        ("prompt",),
        ("messages",),
    ),
    "`prompt`; `messages`; `prompt` and `completion`; `prompt` and `responses`, perhaps with `ranks`; `prompt`, `chosen` and "
    "`rejected`; or only `chosen` and `rejected`, as conversations that share all but the last message or as Anthropic HH "
    "dialogues",
    "`text` has no prompt. If it is one: --columns prompt=text",
    "They stay with the item",
    frozenset({"label", "chosen_by", "feedback", "suggestion", "suggestion_followed"}),
)
OF_AN_ANSWER: tuple[Task | None, ...] = (None, "rating", "correction", "demonstration")
OF_A_PROMPT: tuple[Task | None, ...] = ("demonstration", "chat")
"""Tasks for one answer (one must be chosen), and for a prompt."""
READ = {*itertools.chain(*TO_LABEL.shapes), *TO_LABEL.also_read, "ranks"}
"""Columns that are converted; all others are kept."""
BEST_RATING, WORST_RATING = 7, 1
"""Ratings for a ``label`` of true and false."""
FORMATS = (".jsonl", ".json", ".csv", ".tsv")
"""Formats that can be imported as text."""


class EqualAnswersError(DataError):
    """All answers of a record are equal, so there is nothing to compare."""


@dataclass(frozen=True)
class ImportOptions:
    """How records become items."""

    task: Task | None = None
    """The task of each record; None: from its columns."""
    usual: Task | None = None
    """The project's task, for records whose columns do not decide it."""
    columns: str = ""
    """The file's own column names, as ``--columns`` gives them."""
    screening: bool = False
    """Whether the items are of the screening set."""
    gold: bool = False
    """Whether the items are gold questions, whose labels in the file are their known answers."""
    round: int | None = None
    """Round of the items; None: from an exported record, else 1."""
    chosen_by: ChosenBy = "import"
    """How the items were chosen, for records without a column ``chosen_by``."""
    max_samples: int | None = None
    unusable: Literal["error", "drop"] = "error"
    """Whether an unusable record stops the import, or is left out and counted."""


@dataclass
class Imported:
    """The content of a file."""

    file: str
    """The name of the file."""
    records: int
    """Number of records read."""
    items: list[Item] = field(default_factory=list)
    """Without repetitions."""
    answers: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Label of each record by item id, as in the content of `heedful.apps.label.records.Event`."""
    said: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    """Labels of several people from an export, each with its item's id: ``person``, ``standing``, ``answer``, ..."""
    repeated: int = 0
    """Number of repeated items, left out."""
    same_labels: int = 0
    """Number of labels equal to an earlier record's of the same item, left out."""
    against: list[DataError] = field(default_factory=list)
    """Labels different from an earlier record's of the same item, left out, with file and line."""
    equal: list[DataError] = field(default_factory=list)
    """Records whose ``responses`` are all equal, left out."""
    refused: list[DataError] = field(default_factory=list)
    """Errors of unusable records, with file and line."""

    def preview(self, first: int = 5) -> dict[str, Any]:
        """Return counts, the first items and the errors, ready for JSON, without the sources of answers."""
        tasks = {task: sum(item.task == task for item in self.items) for task in CANDIDATES}
        shown_items = [
            {"task": item.task, "prompt": item.prompt, "answers": [one.response for one in item.candidates]}
            for item in self.items[:first]
        ]
        return {
            "records": self.records,
            "items": len(self.items),
            "tasks": {task: count for task, count in tasks.items() if count},
            "labels": len(self.answers) + len(self.said),
            "repeated": self.repeated,
            "same_labels": self.same_labels,
            "against": len(self.against),
            "against_at": [str(error) for error in self.against[:20]],
            "equal": len(self.equal),
            "equal_at": [str(error) for error in self.equal[:3]],
            "refused": len(self.refused),
            "errors": [str(error) for error in self.refused[:20]],
            "first": shown_items,
        }


def read_items(path: str, options: ImportOptions = ImportOptions()) -> Imported:
    """Read a file or data set as items.

    Raises DataError as `heedful.data.readers.read_records` does, and for the first unusable record unless
    ``options.unusable`` is "drop".
    """
    records = read_records(path, columns=parse_columns(options.columns), max_samples=options.max_samples)
    return _imported(records, path, options)


def read_items_text(
    text: str, ending: str = ".jsonl", options: ImportOptions = ImportOptions(), *, name: str = ""
) -> Imported:
    """Read the text of a file as `read_items` reads the file; messages call it ``name``, or ``import`` with the extension.

    Raises ConfigError for an extension not in `FORMATS`.
    """
    if ending not in FORMATS:
        raise ConfigError(f"the format must be one of {', '.join(FORMATS)}, got {ending!r}")
    name = name or f"import{ending}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"import{ending}")
        try:
            path.write_bytes(text.encode())
            records = read_records(str(path), columns=parse_columns(options.columns), max_samples=options.max_samples)
        except UnicodeEncodeError as error:
            raise DataError(f"{name}: holds a lone surrogate (half of a character); repair the text") from error
        except DataError as error:
            raise DataError(str(error).replace(str(path), name)) from None
    named = [replace(record, source=record.source.replace(str(path), name)) for record in records]
    return _imported(named, name, options)


def _imported(records: Sequence[Record], path: str, options: ImportOptions) -> Imported:
    mapping = parse_columns(options.columns)
    known = in_known_shape(path, records, mapping, TO_LABEL)
    found = Imported(Path(path).name or path, len(records))
    items: dict[str, Item] = {}
    said_by: dict[str, str] = {}
    for record in records:
        try:
            of_record = _items(known(record), mapping, options)
        except EqualAnswersError as error:
            found.equal.append(error)
            continue
        except DataError as error:
            if options.unusable == "error":
                raise
            found.refused.append(error)
            continue
        for item, answer in of_record:
            found.repeated += item.item_id in items
            first = items.setdefault(item.item_id, item)
            if _suggests_other(first, item):
                said = "the suggestion differs from that of an earlier record of the same item"
                found.against.append(DataError(f"{record.source}: {said}"))
            if kept := _kept_labels(record):
                found.said += [(item.item_id, one) for one in kept if first is item]
            elif answer is not None:
                label = from_screen(answer, places_in(first.candidates, item.candidates))
                by = said_by.setdefault(item.item_id, record.source)
                if item.item_id not in found.answers:
                    found.answers[item.item_id] = label
                elif found.answers[item.item_id] == label:
                    found.same_labels += 1
                else:
                    found.against.append(DataError(f"{record.source}: the label differs from that of {by}"))
    found.items = list(items.values())
    return found


def add(project: Project, imported: Imported, *, with_labels: bool = False) -> dict[str, int]:
    """Add items to a project, and with ``with_labels`` their labels, under a person "import" who cannot sign in.

    Labels refer to the candidates of an existing item, in any order in the file. Returns how many ``items`` and ``labels``
    were new, and how many labels differ from the project's (``against``), which are kept. Raises DataError, and adds nothing,
    if an item is invalid, or is for screening but already in the project outside the screening set.
    """
    there = {item_id(item.task, item.prompt, item.candidates): item for item in project.items(also_withdrawn=True)}
    for item in imported.items:
        known = there.get(item.item_id)
        if known is None:
            continue
        if item.screening and not known.screening:
            what = ", outside the screening set"
            remedy = "import other items for screening, or import the screening set first"
        elif item.gold is not None and known.gold is None:
            what, remedy = " and is not a gold question", "import other items as gold questions"
        elif _suggests_other(known, item):
            what = ", with another or no suggestion"
            remedy = "import a suggestion together with its item, or remove `suggestion` from the record"
        else:
            continue
        raise DataError(
            f"the item {item.item_id} ({shown(item.prompt)}) is already in the project{what}, and items cannot be changed; "
            f"{remedy}"
        )
    new = [one for one in imported.items if one.item_id not in there]
    batch = project.begin_batch(imported.file) if new else ""
    added = {"items": project.add_items([replace(one, batch=batch) for one in new])}
    added |= {"labels": 0, "against": 0}
    if with_labels and imported.answers:
        person = next(filter(is_import, project.people()), None) or project.add_person(*IMPORT)
        answers = [
            _of_there(there, item, imported.answers) for item in imported.items if item.item_id in imported.answers
        ]
        labels = (one for one in project.labels(also_withdrawn=True) if one.person == person)
        before = {one.item.item_id: one.event.content["answer"] for one in labels}
        added["against"] = sum(before.get(name, answer) != answer for name, answer in answers)
        added["labels"] = project.add_labels(person.person_id, answers)
    if with_labels and imported.said:
        added["labels"] += _add_said(project, imported, there)
    return added


def _add_said(project: Project, imported: Imported, there: Mapping[str, Item]) -> int:
    """Add labels from an export, each under its person, by name; return how many were new.

    A missing person is added and cannot sign in: as removed, unless they were refused or labelled for evaluation only.
    """
    items = {item.item_id: item for item in imported.items}
    people = {one.name: one.person_id for one in project.people()}
    by_person: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    extra: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, one in imported.said:
        person = one["person"]
        if person not in people:
            standing: Standing = one["standing"] if one["standing"] in ("refused", "held-out") else "removed"
            people[person] = project.add_person(person, "annotator", standing).person_id
        label = _of_there(there, items[name], {name: one["answer"]})
        by_person.setdefault(people[person], []).append(label)
        extra.setdefault(people[person], {})[label[0]] = {
            "comment": one.get("comment", ""),
            "flags": one.get("flags", []),
            "suggestion_followed": one.get("suggestion_followed"),
        }
    return sum(project.add_labels(person, answers, extra[person]) for person, answers in by_person.items())


def _of_there(
    there: Mapping[str, Item], item: Item, answers: Mapping[str, Mapping[str, Any]]
) -> tuple[str, Mapping[str, Any]]:
    """An item's label, with the candidate order of the same item in the project."""
    known = there.get(item.item_id, item)
    return known.item_id, from_screen(answers[item.item_id], places_in(known.candidates, item.candidates))


def _suggests_other(there: Item, item: Item) -> bool:
    """True if an item's suggestion differs from that of the existing item, independent of candidate order."""
    if item.suggestion is None:
        return False
    return from_screen(item.suggestion, places_in(there.candidates, item.candidates)) != there.suggestion


def _items(
    record: Record, mapping: Mapping[str, str], options: ImportOptions
) -> list[tuple[Item, Mapping[str, Any] | None]]:
    """The items of a record, with its label."""
    prompt, candidates, tasks = _content(record, mapping)
    task = options.task or _exported_task(record) or (options.usual if options.usual in tasks else tasks[0])
    if task is None:
        raise wrong(
            record.source,
            "an answer to a prompt: people can rate, correct or edit it",
            "a task: --task rating, --task correction or --task demonstration",
        )
    groups = [candidates]
    if task in ("rating", "correction") and len(candidates) > 1:
        groups = [(one,) for one in candidates]  # each answer by itself
    fewest, most = CANDIDATES[task]
    if not fewest <= len(groups[0]) <= most:
        number = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        raise wrong(
            record.source, f"{counted(len(candidates), 'answer')} for the task {task}", f"{number} for each record"
        )
    responses = [one.response for one in candidates]
    if task in ("correction", "demonstration") and any(isinstance(one, list) for one in responses):
        raise wrong(
            record.source,
            f"an answer of several turns, for the task {task}, which is written as one text",
            "--task rating; or `responses`, to compare",
        )
    if task in ("pair", "ranking") and all(one == responses[0] for one in responses):
        error = wrong(record.source, f"{len(responses)} answers that are all equal", "at least two different ones")
        if "chosen" in record.fields or "ranks" in record.fields:  # an answer preferred to itself
            raise error
        raise EqualAnswersError(str(error))
    exported = _exported(record)
    chosen_by = record.fields.get("chosen_by", exported.get("chosen_by", options.chosen_by))
    if chosen_by not in get_args(ChosenBy):
        raise wrong(record.source, f"`chosen_by` is {shown(chosen_by)}", f"one of {', '.join(get_args(ChosenBy))}")
    columns = {name: value for name, value in record.fields.items() if name not in READ and value is not None}
    answer = _answer(record, task, candidates) if len(groups) == 1 else None
    gold = answer if options.gold else exported.get("gold")
    if options.gold and (answer is None or task not in JUDGED):
        raise wrong(
            record.source,
            "a gold question without its answer",
            "`chosen` and `rejected`, `ranks`, or `rating` (docs/labelling-data.md)",
        )
    items = [
        Item(
            item_id(task, prompt, group),
            task,
            prompt,
            group,
            round=_round(record, options),
            chosen_by=chosen_by,
            screening=options.screening or exported.get("screening") is True,
            columns=columns,
            gold=gold,
        )
        for group in groups
    ]
    return [(_suggested(record, item, len(groups)), answer if gold is None else None) for item in items]


def _suggested(record: Record, item: Item, items: int) -> Item:
    """An item with its record's suggestion, if any."""
    given = record.fields.get("suggestion")
    if given is None:
        return item
    if items > 1:
        raise wrong(record.source, f"one `suggestion` for {items} items", "one record with a suggestion per response")
    try:
        return replace(item, suggestion=check_suggestion(item, given))
    except DataError as error:
        raise DataError(f"{record.source}: `suggestion`: {error} (docs/labelling-data.md)") from None


def _exported_task(record: Record) -> Task | None:
    """The task of an exported record (items.jsonl)."""
    task = _exported(record).get("task")
    return task if task in CANDIDATES else None


def _exported(record: Record) -> Mapping[str, Any]:
    """An export's data about the item of a record; empty for other records."""
    feedback = record.fields.get("feedback")
    return feedback if isinstance(feedback, dict) else {}


def _kept_labels(record: Record) -> list[Mapping[str, Any]]:
    """The labels of several people in an exported item."""
    kept = _exported(record).get("labels", [])
    fields = {"person": str, "standing": str, "answer": dict}
    if not isinstance(kept, list) or not all(
        isinstance(one, dict) and all(isinstance(one.get(name), kind) for name, kind in fields.items()) for one in kept
    ):
        raise wrong(
            record.source, "`feedback.labels`, which are not", "a list of objects with person, standing and answer"
        )
    return kept


def _round(record: Record, options: ImportOptions) -> int:
    number = _exported(record).get("round", 1) if options.round is None else options.round
    if type(number) is not int or number < 1:
        raise wrong(record.source, f"`feedback.round` is {shown(number)}", "a whole number from 1")
    return number


def _content(record: Record, mapping: Mapping[str, str]) -> tuple[Any, tuple[Candidate, ...], tuple[Task | None, ...]]:
    """A record's prompt, its answers, and the tasks that its columns allow, the default first."""
    shape = shape_of(record, mapping, TO_LABEL)
    if len(lone := [name for name in ("chosen", "rejected") if record.fields.get(name) is not None]) == 1:
        raise wrong(record.source, f"`{lone[0]}` by itself", "`chosen` and `rejected` together, or neither")
    if "chosen" in shape:
        ranking = ranking_of(record, mapping, None)
        candidates = tuple(Candidate(plain(one)) for one in ranking.responses)
        return plain(ranking.prompt), candidates, ("pair",)
    if shape == ("messages",):
        turns = read_conversation(record.source, "messages", record.fields["messages"])
        last = turns[-1] if turns[-1].role == "assistant" else None
        turns = turns if last is None else turns[:-1]
        if not turns:
            raise wrong(record.source, "`messages` has only an assistant turn", "a conversation to answer")
        answers = () if last is None else (Candidate(plain(reply_of(last))),)
        return _prompt(record, turns), answers, OF_AN_ANSWER if answers else OF_A_PROMPT
    is_whole = "responses" in shape and record.fields["prompt"] == ""
    prompt, begun = ("", "") if is_whole else prompt_of(record)
    if begun and shape == ("prompt",):
        raise wrong(
            record.source,
            f"`prompt` ends with the beginning of an answer ({begun[:40]!r})",
            "a conversation that ends with a user, system or tool turn: people write the whole answer",
        )
    if shape == ("prompt",):
        return _prompt(record, prompt), (), OF_A_PROMPT
    if "completion" in shape:
        answer = response_of(record, "completion", record.fields["completion"], prompt, begun)
        rated = record.fields.get("label") is not None or record.fields.get("rating") is not None
        return (
            _prompt(record, prompt),
            (Candidate(plain(answer)),),
            ("rating",) if rated else OF_AN_ANSWER,
        )
    candidates = _candidates(record, prompt, begun)
    tasks = OF_AN_ANSWER if len(candidates) == 1 else ("ranking", "rating", "correction")
    if len(candidates) == 2 and record.fields.get("ranks") is None:
        tasks = ("pair", *tasks)
    return _prompt(record, prompt), candidates, tasks


def _prompt(record: Record, prompt: Text) -> Any:
    """A prompt as JSON; its tools are checked and stay a column."""
    with_system(prompt, None, record)
    return plain(prompt)


def plain(text: Text | Response) -> Any:
    """Return text unchanged, a message as an object, a conversation as a list of messages."""
    if isinstance(text, str):
        return text
    if isinstance(text, Message):
        return as_dict(text) | ({} if text.learned else {"weight": 0})
    return [plain(turn) for turn in text]


def _candidates(record: Record, prompt: Text, begun: str) -> tuple[Candidate, ...]:
    """The column ``responses``: each a response, or an object with ``response`` and ``source``."""
    values = record.fields["responses"]
    if not isinstance(values, list) or not values:
        raise wrong(record.source, f"`responses` is {shown(values)}", "a list of responses")
    found = []
    for i, value in enumerate(values):
        name = f"responses[{i}]"
        has_source = isinstance(value, dict) and "response" in value
        response, source = (value["response"], value.get("source")) if has_source else (value, None)
        if has_source and (value.keys() - {"response", "source"} or not isinstance(source, dict | None)):
            raise wrong(record.source, f"`{name}` is {shown(value)}", "{response, source: {...}}")
        message_alone = isinstance(response, dict)
        read = response_of(record, name, [response] if message_alone else response, prompt, begun)
        found.append(Candidate(plain(read), source))
    return tuple(found)


def _answer(record: Record, task: Task, candidates: Sequence[Candidate]) -> Mapping[str, Any] | None:
    """A record's label for a task, or None."""
    fields = record.fields
    ranks = fields.get("ranks") if fields.get("responses") is not None else None
    if ranks is None and task in ("pair", "ranking") and fields.get("chosen") is not None:
        ranks = [0, 1]
    if ranks is not None and task in ("pair", "ranking"):
        if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
            raise wrong(record.source, f"`ranks` is {shown(ranks)}", "a list of integers, 0 the best; equal ranks tie")
        if len(ranks) != len(candidates):
            found = f"{len(candidates)} `responses` but {len(ranks)} `ranks`"
            raise wrong(record.source, found, "one rank for each response")
        if task == "ranking":
            return {"ranks": dense_ranks(ranks)}
        preferred = None if ranks[0] == ranks[1] else int(ranks[1] < ranks[0])
        return {"preferred": preferred, "strength": None, "both_bad": False}
    if task == "rating":
        return _rating(record)
    if task == "demonstration" and candidates and isinstance(candidates[0].response, str):
        return {"text": candidates[0].response}
    return None


def _rating(record: Record) -> Mapping[str, Any] | None:
    rating, label = record.fields.get("rating"), record.fields.get("label")
    if rating is not None:
        if type(rating) is not int or not WORST_RATING <= rating <= BEST_RATING:
            raise wrong(record.source, f"`rating` is {shown(rating)}", f"{WORST_RATING} to {BEST_RATING}")
        return {"rating": rating, "flags": []}
    if label is None:
        return None
    return {"rating": BEST_RATING if is_good(record.source, label) else WORST_RATING, "flags": []}
