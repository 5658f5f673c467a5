"""Write labels as training files for `heedful sft`, `reward`, `dpo` and `kto` (docs/labelling-data.md).

The files depend only on the project's events and the options: same events, same bytes.
"""

import hashlib
import io
import json
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from heedful.apps.label.answers import dense_ranks, sides
from heedful.apps.label.project import Project
from heedful.apps.label.records import Candidate, Event, Item, LabelledItem, Snapshot
from heedful.data.splits import split_by_prompt
from heedful.display import counted
from heedful.errors import ConfigError
from heedful.files import check_output_folder, complete_or_absent, to_json, write_bytes
from heedful.types import Message, Prompt, Text

Fields = dict[str, Any]
WEIGHTING = "every label is one record: an item with labels of three people has three"
TRAINING = ("preferences", "pairs", "demonstrations", "labelled")
"""Kinds of training files, each split into parts."""


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export."""

    eval_fraction: float = 0.1
    """Share of the prompts held out for evaluation, as `heedful.data.splits.split_by_prompt` chooses them."""
    margin: Literal["none", "small", "large"] = "small"
    """How the strength of a preference becomes a margin (`heedful.apps.label.exporting.MARGINS`)."""
    flagged: Literal["keep", "leave-out"] = "keep"
    """Include labels of flagged items (personal data, unsafe, broken) in the training files."""
    without: tuple[str, ...] = ()
    """Ids of people to exclude from the training files. Refused people are always excluded."""
    gold: Literal["keep", "leave-out"] = "leave-out"
    """Include labels of gold questions in the training files."""
    withdrawn: Literal["keep", "leave-out"] = "leave-out"
    """Include withdrawn items and their labels in the files; events.jsonl always has them."""


@dataclass(frozen=True)
class Export:
    """Files by name, and their manifest."""

    files: Mapping[str, bytes]
    manifest: Mapping[str, Any]
    """``content_hash``, ``files`` (records and SHA-256 of each), ``left_out`` (counts), ``notes`` (sentences), ``options``,
    ``weighting``."""

    def write(self, folder: Path, project: Path | None, *, overwrite: bool = False) -> None:
        """Write the files and manifest.json; the folder is complete or absent.

        Raises ConfigError if it overlaps with the folder of the ``project``, or if it exists, unless it is an export and
        ``overwrite`` is set. ``project`` is None for heedful's own folders in a project, such as those of a round.
        """
        _refuse_output(folder, project, overwrite)
        with complete_or_absent(folder) as partial:
            for name, content in self._all().items():
                write_bytes(partial / name, content)

    def zipped(self) -> bytes:
        """Return a zip archive of the files and manifest.json, the same bytes for the same files."""
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in self._all().items():
                archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
        return packed.getvalue()

    def _all(self) -> dict[str, bytes]:
        return {**self.files, "manifest.json": (to_json(self.manifest, indent=2) + "\n").encode()}


def _refuse_output(folder: Path, project: Path | None, overwrite: bool) -> None:
    """Raise ConfigError if an export to a folder would replace anything but an earlier export."""
    real, own = folder.resolve(), None if project is None else project.resolve()
    if own is not None and (real.is_relative_to(own) or own.is_relative_to(real)):
        raise ConfigError(
            f"--output {folder} overlaps with the project {project}, whose labels would be lost; choose a folder "
            "outside it that does not contain it"
        )
    check_output_folder(folder, "heedful label export", overwrite=overwrite, ours=lambda: _exported_names(folder))


def _exported_names(folder: Path) -> set[str]:
    """The file names in a folder's manifest.json; empty without a manifest."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        return {"manifest.json", *manifest["files"]} if manifest["weighting"] == WEIGHTING else set()
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return set()


def export_project(project: Project, options: ExportOptions = ExportOptions()) -> Export:
    """Export a project as it is now.

    Raises ConfigError for an invalid eval fraction and for an unknown person. An empty side of the split is not an error; it
    is reported in ``notes``.
    """
    return export(project.snapshot(), options)


def export(now: Snapshot, options: ExportOptions) -> Export:
    """Export a project as it was at a moment. Raises as `export_project`."""
    withdrawn = now.withdrawn if options.withdrawn == "leave-out" else frozenset[str]()
    known = [person.person_id for person in now.people]
    if unknown := sorted({*options.without} - {*known}):
        raise ConfigError(f"--without {unknown[0]}: there is no such person; the project has {', '.join(known)}")
    place = {item.item_id: i for i, item in enumerate(now.items)}
    ordered = sorted(now.labels, key=lambda one: (place[one.item.item_id], one.event.seq))
    refused = {person.person_id for person in now.people if person.standing == "refused"}
    flagged = _flagged(now.events) if options.flagged == "leave-out" else set()
    usable, left_out = _usable(ordered, options, refused, flagged, withdrawn)
    held_out = {person.person_id for person in now.people if person.standing == "held-out"}
    _, of_eval = split_by_prompt(map(_prompt, usable), options.eval_fraction, may_be_one_sided=True)
    evaluated = {prompt.source for prompt in of_eval}
    records: dict[str, list[Fields]] = {}
    for one in usable:
        event = one.event
        part = "train"
        if event.event_id in evaluated:
            part = "eval"
        elif event.person in held_out:
            part = "held-out"
        kind, fields = record_of(one.item, event, options.margin)
        records.setdefault(f"{kind}.{part}" if kind in TRAINING else kind, []).append(fields)
        left_out[kind] += kind in ("ties", "contradictions")
        if kind == "preferences":
            records.setdefault(f"pairs.{part}", []).extend(pairs_of(fields, event.event_id))
        if kind == "ratings":
            good_or_bad = labelled_of(fields)
            left_out["ratings in the middle"] += good_or_bad is None
            records.setdefault(f"labelled.{part}", []).extend([good_or_bad] if good_or_bad else [])
    said: dict[str, list[LabelledItem]] = {}
    for one in ordered:
        if one.item.task != "chat" and not one.event.content.get("repeat"):
            said.setdefault(one.item.item_id, []).append(one)
    records["items"] = [
        item_record(item, said.get(item.item_id, ())) for item in now.items if item.item_id not in withdrawn
    ]
    records["events"] = [vars(event) for event in now.events]
    files = {f"{name}.jsonl": _lines(records[name]) for name in sorted(records) if records[name]}
    notes = _one_sided(records, options) + _without_margin(records)
    if corrected := sum("corrected_by" in one.event.content for one in usable):
        notes.append(f"{counted(corrected, 'label')} with an answer corrected by an owner (feedback.corrected_by)")
    return Export(files, _manifest(files, left_out, options) | {"notes": notes})


def _usable(
    labels: Sequence[LabelledItem], options: ExportOptions, refused: Set[str], flagged: Set[str], withdrawn: Set[str]
) -> tuple[list[LabelledItem], Counter[str]]:
    """Labels to export, and counts of the others by reason."""
    usable, left_out = [], Counter[str]()
    for one in labels:
        if one.item.item_id in withdrawn:
            left_out["withdrawn items"] += 1
        elif one.item.gold is not None and options.gold == "leave-out":
            left_out["gold questions"] += 1
        elif one.item.screening:
            left_out["screening items"] += 1
        elif one.event.content.get("repeat"):
            left_out["hidden repeats"] += 1
        elif one.event.person in refused:
            left_out["refused people"] += 1
        elif one.event.person in options.without:
            left_out["people"] += 1
        elif one.item.item_id in flagged:
            left_out["flagged"] += 1
        else:
            usable.append(one)
    return usable, left_out


def _flagged(events: Sequence[Event]) -> set[str]:
    """Items flagged with a label or skip that was not taken back."""
    taken_back = {event.content["event"] for event in events if event.kind == "retract"}
    return {
        event.content["item"]
        for event in events
        if event.kind in ("label", "skip") and event.content.get("flags") and event.event_id not in taken_back
    }


def _one_sided(records: Mapping[str, Sequence[Fields]], options: ExportOptions) -> list[str]:
    """Notes about kinds of records that are all on one side of the split."""
    notes = []
    for kind in ("preferences", "demonstrations", "labelled"):
        sides = {part: len(records.get(f"{kind}.{part}", ())) for part in ("train", "eval")}
        for part, other in (("train", "eval"), ("eval", "train")):
            if options.eval_fraction > 0 and sides[other] and not sides[part]:
                notes.append(
                    f"{kind}: all records ({sides[other]}) are in {kind}.{other}, none in {kind}.{part}, because the split "
                    f"is by prompt and there are few prompts; label more prompts, or choose another eval fraction than "
                    f"{options.eval_fraction:g}"
                )
    return notes


def _without_margin(records: Mapping[str, Sequence[Fields]]) -> list[str]:
    """Notes about preferences without a margin in a file where others have one."""
    notes = []
    for name in sorted(name for name in records if name.startswith("preferences.")):
        without = sum("margin" not in record for record in records[name])
        if 0 < without < len(records[name]):
            notes.append(
                f"{name}: {without} of {len(records[name])} records have no margin (corrections, rankings, and imported "
                "labels without one); heedful reward uses 0 for them"
            )
    return notes


def _prompt(one: LabelledItem) -> Prompt:
    """The key of the split: a label's prompt, or the item's first answer if whole texts are compared.

    All turns of a chat are on one side, because they share the first message.
    """
    answer = one.event.content["answer"]
    prompt = answer["messages"] if one.item.task == "chat" else one.item.prompt
    text: Text
    if isinstance(prompt, str):
        first = one.item.candidates[0].response if one.item.candidates else ""
        text = prompt or (first if isinstance(first, str) else first.get("content") or "")
    else:
        text = tuple(Message(turn["role"], turn.get("content") or "") for turn in prompt)
    return Prompt(text, one.event.event_id)


def _lines(records: Sequence[Fields]) -> bytes:
    return b"".join(f"{to_json(record)}\n".encode() for record in records)


def _manifest(files: Mapping[str, bytes], left_out: Mapping[str, int], options: ExportOptions) -> dict[str, Any]:
    facts = {
        name: {"records": content.count(b"\n"), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    }
    whole = hashlib.sha256("".join(f"{name} {fact['sha256']}\n" for name, fact in facts.items()).encode())
    return {
        "content_hash": whole.hexdigest(),
        "files": facts,
        "left_out": {name: count for name, count in sorted(left_out.items()) if count},
        "options": asdict(options),
        "weighting": WEIGHTING,
    }


# The record of a label


OURS = (
    "text", "messages", "prompt", "completion", "chosen", "rejected", "margin", "responses", "ranks", "label",
    "rating", "group_id", "feedback", "criteria", "chosen_criteria", "rejected_criteria", "completion_criteria",
    "suggestion", "suggestion_followed",
)  # fmt: skip
"""Columns written by an export. Other columns of an imported record are copied."""
MARGINS: Mapping[str, tuple[float, ...]] = {"small": (0.0, 1 / 3, 2 / 3, 1.0), "large": (0.0, 1.0, 2.0, 3.0)}
"""Margin of each strength, 1 to 4 (Touvron et al. 2023, Llama 2, table 27)."""
GOOD, BAD = 5, 3
"""For KTO, a rating of 5 or more (of 7) is good, of 3 or less bad; 4 is neither."""


def record_of(item: Item, event: Event, margin: str) -> tuple[str, Fields]:
    """Return the file of a label (preferences, demonstrations, ratings, ties or contradictions) and its record.

    Args:
        item: the labelled item.
        event: the label.
        margin: "none", or a name in `MARGINS`.
    """
    answer, answers = event.content["answer"], item.candidates
    if item.task == "chat":
        answers = tuple(Candidate(one["response"], one.get("source")) for one in answer["responses"])
    made: Fields
    if item.task in ("pair", "chat"):
        kind, made = _compared(answers, _ranks_of(answer["preferred"]), answer.get("criteria"), as_pair=True)
        with_margin = _margin(item, event, margin) if kind != "ties" else None
        made |= {} if with_margin is None else {"margin": with_margin}
    elif item.task == "ranking":
        kind, made = _compared(answers, answer["ranks"], answer.get("criteria"))
    elif item.task == "correction":
        kind, made = _compared((Candidate(answer["text"]), *answers), (0, 1), None, as_pair=True)
    elif item.task == "rating":
        kind, made = "ratings", {"completion": written(answers[0]), "rating": answer["rating"]}
        made |= {"completion_criteria": answer["criteria"][0]} if "criteria" in answer else {}
    else:
        kind, made = "demonstrations", {"completion": answer["text"]}
    kept = {k: v for k, v in item.columns.items() if k not in OURS}
    prompt = answer["messages"] if item.task == "chat" else item.prompt
    followed = {k: v for k, v in event.content.items() if k == "suggestion_followed"}
    return kind, {**kept, "prompt": prompt, **made, **followed, "feedback": _feedback(item, event, answers)}


def _ranks_of(preferred: int | None) -> tuple[int, int]:
    return (0, 0) if preferred is None else (preferred, 1 - preferred)


def _compared(
    answers: Sequence[Candidate], ranks: Sequence[int], criteria: Any, *, as_pair: bool = False
) -> tuple[str, Fields]:
    """The file and columns of compared answers; an answer preferred to itself is a contradiction."""
    responses, ranks = [written(one) for one in answers], [rank - 1 for rank in dense_ranks(ranks)]
    is_apart = any(responses[i] == responses[j] and side for (i, j), side in sides(ranks).items())
    kind = "contradictions" if is_apart else "preferences" if any(ranks) else "ties"
    if as_pair and any(ranks):
        best = ranks.index(0)
        said = {} if criteria is None else _by_criteria(criteria[best], criteria[1 - best])
        return kind, {"chosen": responses[best], "rejected": responses[1 - best], **said}
    return kind, {"responses": responses, "ranks": ranks, **({} if criteria is None else {"criteria": criteria})}


def pairs_of(fields: Fields, group: str) -> list[Fields]:
    """Return a preference as pairs, for trainers that only read pairs: every two answers of a ranking with different ranks.

    ``group_id`` is the same for all pairs of one label.
    """
    if "ranks" not in fields:
        return [{**fields, "group_id": group}]
    rest = {k: v for k, v in fields.items() if k not in ("responses", "ranks", "criteria")}
    said = fields.get("criteria", [None] * len(fields["ranks"]))
    ranked = list(zip(fields["responses"], fields["ranks"], said, strict=True))
    return [
        {**rest, "chosen": better, "rejected": worse, "group_id": group} | _by_criteria(of_better, of_worse)
        for better, rank, of_better in ranked
        for worse, other, of_worse in ranked
        if rank < other
    ]


def _by_criteria(chosen: Any, rejected: Any) -> Fields:
    return {} if chosen is None else {"chosen_criteria": chosen, "rejected_criteria": rejected}


def labelled_of(fields: Fields) -> Fields | None:
    """Return a rating as a good or bad response; None for one that is neither."""
    if BAD < fields["rating"] < GOOD:
        return None
    rest = {k: v for k, v in fields.items() if k != "rating"}
    return {**rest, "label": fields["rating"] >= GOOD}


def item_record(item: Item, labels: Sequence[LabelledItem] = ()) -> Fields:
    """Return an item and its labels as a record that can be imported again."""
    kept = {k: v for k, v in item.columns.items() if k not in OURS}
    fields = {**kept, "prompt": item.prompt}
    if item.candidates:
        fields["responses"] = [
            {"response": one.response} | ({} if one.source is None else {"source": dict(one.source)})
            for one in item.candidates
        ]
    if item.suggestion is not None:
        fields["suggestion"] = dict(item.suggestion)
    known = {"item": item.item_id, "task": item.task, "round": item.round, "chosen_by": item.chosen_by}
    return {
        **fields,
        "feedback": known
        | ({"screening": True} if item.screening else {})
        | ({} if item.gold is None else {"gold": dict(item.gold)})
        | ({"labels": [_label(one) for one in labels]} if labels else {}),
    }


def _label(one: LabelledItem) -> Fields:
    content = one.event.content
    kept = {"comment": content.get("comment"), "flags": list(content.get("flags", ()))}
    known = {"person": one.person.name, "standing": one.person.standing, "answer": dict(content["answer"])}
    followed = {k: v for k, v in content.items() if k == "suggestion_followed"}
    return known | {name: value for name, value in kept.items() if value} | followed


def written(candidate: Candidate) -> Any:
    """Return an answer in the format of the readers: text, or a list of messages."""
    return [candidate.response] if isinstance(candidate.response, Mapping) else candidate.response


def is_imported(event: Event) -> bool:
    """True for an imported label: it has no time."""
    return event.content["seconds"] is None


def _margin(item: Item, event: Event, margin: str) -> float | None:
    """The margin of an imported label, else that of the strength; None if there is neither, or for "none"."""
    if margin == "none":
        return None
    if is_imported(event):
        return item.columns.get("margin")
    strength = event.content["answer"].get("strength")
    return None if strength is None else MARGINS[margin][strength - 1]


def _feedback(item: Item, event: Event, answers: Sequence[Candidate]) -> Fields:
    """The origin of a record. Empty keys are left out."""
    content, answer = event.content, event.content["answer"]
    sources = [None if one.source is None else dict(one.source) for one in answers]
    found = {
        "event": event.event_id,
        "item": item.item_id,
        "person": event.person,
        "task": item.task,
        "round": item.round,
        "chosen_by": item.chosen_by,
        "strength": answer.get("strength"),
        "rating_flags": list(answer.get("flags", ())),
        "flags": list(content.get("flags", ())),
        "comment": content.get("comment"),
        "corrected_by": content.get("corrected_by"),
        "sources": sources if any(sources) else None,
    }
    return {key: value for key, value in found.items() if value not in (None, [], "")}
