"""``heedful label new``, ``import``, ``export``, ``stats``, ``list``, ``correct`` and ``withdraw``."""

import dataclasses
import json
import secrets
from typing import Any

from heedful.apps.label import listing
from heedful.apps.label.exporting import ExportOptions, export_project
from heedful.apps.label.importing import Imported, ImportOptions, add, read_items
from heedful.apps.label.people import is_owner
from heedful.apps.label.project import Project
from heedful.apps.label.records import Person
from heedful.apps.label.statistics import project_statistics
from heedful.configs.label import NewProjectConfig, ProjectSettings
from heedful.configs.label_data import (
    CorrectConfig,
    ExportConfig,
    ImportConfig,
    ListConfig,
    StatsConfig,
    WithdrawConfig,
)
from heedful.data.readers import parse_json
from heedful.display import counted, harmless
from heedful.errors import ConfigError
from heedful.files import check_output_file, write_json

STATISTICS = "heedful label stats"
"""What a file of statistics names as its program."""
EXCERPT = 70
"""Most characters of a text in a preview."""


def new_project(config: NewProjectConfig) -> None:
    """Create a project and print the next commands. Raises ConfigError if the folder is in use."""
    settings = ProjectSettings(**_shared(config, ProjectSettings))
    if settings.seed == 0 and "seed" not in config.given:  # the order is drawn from ids that browsers know
        settings = dataclasses.replace(settings, seed=secrets.randbelow(2**63))
    Project.create(config.project, settings).close()
    for line in (
        f"the project {settings.name!r} is in {config.project}; its settings are in {config.project}/project.yaml",
        f"add items to label:  heedful label import {config.project} --data FILE.jsonl",
        f"open its pages:      heedful label serve {config.project}",
    ):
        print(harmless(line))


def import_data(config: ImportConfig) -> dict[str, int]:
    """Add the items of a file to a project, and print the counts."""
    with Project.open(config.project, read_only=config.preview) as project:
        imported = read_items(config.data, ImportOptions(usual=project.settings.task, **_shared(config, ImportOptions)))
        _show(imported)
        if config.preview:
            _show_first(imported)
            print("Nothing was added (--preview).")
            return {}
        added = add(project, imported, with_labels=config.with_labels)
    labels = f" and {counted(added['labels'], 'label')}" if config.with_labels else ""
    print(f"Added {counted(added['items'], 'item')}{labels}; {len(imported.items) - added['items']} already there.")
    if added["against"]:
        print(f"{counted(added['against'], 'label')} left out: the project has a different one from an earlier import.")
    count = len(imported.answers) + len(imported.said)
    if count and not config.with_labels:
        print(f"{counted(count, 'label')} of the file not imported (add --with-labels to import them).")
    return added


def _shared(config: Any, options: Any) -> dict[str, Any]:
    """The settings of a command that are options of a class."""
    return {name: value for name, value in vars(config).items() if name in options.__dataclass_fields__}


def _show(imported: Imported) -> None:
    facts = imported.preview()
    tasks = ", ".join(counted(count, task) for task, count in facts["tasks"].items())
    items = f"{counted(facts['items'], 'item')} ({tasks})" if tasks else "0 items"
    print(f"{counted(facts['records'], 'record')}: {items}, {facts['labels']} with a label in the file.")
    if facts["repeated"]:
        print(f"{counted(facts['repeated'], 'repetition')} of an item left out; each item is imported once.")
    if facts["same_labels"]:
        print(f"{counted(facts['same_labels'], 'repetition')} of a label left out; each label is imported once.")
    if facts["against"]:
        print(f"{counted(facts['against'], 'label')} left out: an earlier record of the same item has a different one:")
        for line in facts["against_at"]:
            print(f"  {harmless(line)}")
    if facts["equal"]:
        print(f"{counted(facts['equal'], 'record')} left out: all answers are equal, so there is nothing to compare:")
        for line in facts["equal_at"]:
            print(f"  {harmless(line)}")
    if facts["refused"]:
        print(f"{counted(facts['refused'], 'record')} left out as unusable:")
        for error in facts["errors"]:
            print(f"  {harmless(error)}")


def _show_first(imported: Imported) -> None:
    for item in imported.preview(first=3)["first"]:
        print(f"  {item['task']}: {_excerpt(item['prompt'])}")
        for answer in item["answers"]:
            print(f"    - {_excerpt(answer)}")


def _excerpt(content: Any) -> str:
    last = content[-1] if isinstance(content, list) and content else content
    text = str(last.get("content") or "") if isinstance(last, dict) else str(last)
    line = " ".join(text.split())
    return harmless(line[:EXCERPT] + ("..." if len(line) > EXCERPT else ""))


def export_data(config: ExportConfig) -> dict[str, Any]:
    """Write a project's labels as training data, and print the counts of each file."""
    with Project.open(config.project, read_only=True) as project:
        result = export_project(project, ExportOptions(**_shared(config, ExportOptions)))
    result.write(config.output, config.project, overwrite=config.overwrite)
    width = max(map(len, result.files))
    for name, fact in result.manifest["files"].items():
        print(f"{name:<{width}}  {counted(fact['records'], 'record'):>15}")
    for reason, count in result.manifest["left_out"].items():
        print(f"left out of the training files: {count} ({reason})")
    for note in result.manifest["notes"]:
        print(note)
    if set(result.files) <= {"items.jsonl", "events.jsonl"}:
        print("There is nothing to train on yet: no exported item has a label.")
    print(f"{config.output}: content hash {result.manifest['content_hash'][:16]}")
    return dict(result.manifest)


def show_statistics(config: StatsConfig) -> dict[str, Any]:
    """Print a project's statistics, and write them if asked."""
    if config.output is not None:
        check_output_file(config.output, STATISTICS, overwrite=None, what="a JSON file")
    with Project.open(config.project, read_only=True) as project:
        found = project_statistics(project)
    for line in report(found):
        print(harmless(line))
    if config.output is not None:
        write_json(config.output, {"made by": STATISTICS, **found})
    return found


def list_labels(config: ListConfig) -> list[dict[str, Any]]:
    """Print single labels of a project, the newest first."""
    with Project.open(config.project, read_only=True) as project:
        person = _person_of(project, config.person).person_id if config.person else ""
        found = listing.chosen(project.labels(), person=person, differ=config.differ, search=config.search)
        rows = [listing.row(one) for one in found[: config.limit]]
    for one in rows:
        marks = " (repeat)" * one["repeat"] + " (corrected by an owner)" * bool(one["corrected_by"])
        answer = json.dumps(one["answer"], ensure_ascii=False)
        print(harmless(f"{one['label']}  {one['at'][:16]}  {one['name']}{marks}  {one['task']} {one['item']}"))
        print(f"  {_excerpt(one['prompt'])}\n  {_excerpt(answer)}")
    print(f"{len(rows)} of {counted(len(found), 'label')}")
    return rows


def correct_label(config: CorrectConfig) -> None:
    """Replace a label's answer, and print the effect."""
    try:
        answer = parse_json(config.answer)
    except ValueError as error:
        raise ConfigError(f"--answer {config.answer!r:.80} is not JSON: {error}") from error
    if not isinstance(answer, dict):
        raise ConfigError(f'--answer must be a JSON object such as {{"rating": 4}}, got {config.answer!r:.80}')
    with Project.open(config.project) as project:
        owner = _person_of(project, config.by) if config.by else next(filter(is_owner, project.people()))
        project.correct(owner.person_id, config.label, answer, nonce=secrets.token_hex(16), reason=config.reason)
        label = next(one for one in project.labels(also_withdrawn=True) if one.event.event_id == config.label)
        closed = listing.is_closed(project.folder, label)
    print(harmless(f"Corrected by {owner.name}: {json.dumps(label.event.content['answer'], ensure_ascii=False):.300}"))
    if closed:
        print("A round has already trained on this label: its models do not change.")


def withdraw_items(config: WithdrawConfig) -> int:
    """Withdraw items or put them back, and print their number; without items, print the imports."""
    if not (config.batch or config.items):
        with Project.open(config.project, read_only=True) as project:
            found = project.batches()
        for one in found:
            gone = f", {one['withdrawn']} withdrawn" if one["withdrawn"] else ""
            counts = f"{counted(one['items'], 'item')}, {counted(one['labels'], 'label')}{gone}"
            print(harmless(f"{one['batch']}  {one['at'][:16]}  {counts}"))
        if not found:
            print("There are no imports yet.")
        return 0
    with Project.open(config.project) as project:
        changed = project.withdraw(None, batch=config.batch, items=config.items, back=config.back, reason=config.reason)
    print(f"{counted(changed, 'item')} {'put back' if config.back else 'withdrawn'}; labels are kept.")
    return changed


def _person_of(project: Project, given: str) -> Person:
    """The person with an id or a name. Raises ConfigError."""
    people = project.people()
    found = [one for one in people if given in (one.person_id, one.name)]
    if not found:
        known = ", ".join(f"{one.person_id} ({one.name})" for one in people)
        raise ConfigError(f"there is no person {given!r:.80} in the project; it has {known}")
    return found[0]


def report(found: dict[str, Any]) -> list[str]:
    """Return statistics as lines of text."""
    left_out, followed = found["left_out"], found["suggestion_followed"]
    apart = (
        f"{counted(left_out['repeats'], 'repeat')}, {left_out['screening']} screening, {left_out['imported']} imported, "
        f"{left_out['gold']} gold"
    )
    lines = [f"{counted(found['labels'], 'label')} of {counted(found['items'], 'item')} (not among them: {apart})"]
    lines += [f"{counted(found['corrected'], 'label')} corrected by an owner", ""] if found["corrected"] else [""]
    for task, agreement in found["agreement"].items():
        if agreement is not None:
            lines += [
                f"Agreement, {task}: {_share(agreement['share'])} on {counted(agreement['items'], 'item')}",
                f"  without ties {_share(agreement['without_ties'])}; Fleiss' kappa {_number(agreement['fleiss'])}; "
                f"Krippendorff's alpha {_number(agreement['alpha_nominal'])} nominal, "
                f"{_number(agreement['alpha_ordinal'])} ordinal",
            ]
    if not any(found["agreement"].values()):
        lines.append("Agreement: n/a, because no item has labels of two people")
    for name, one in found["criteria"].items():
        said = (
            f"mean {one['mean']:.2f}"
            if one["mean"] is not None
            else ", ".join(f"{k} {n}" for k, n in one["counts"].items())
        )
        lines += [
            f"Criterion {name}: {said} of {counted(one['answers'], 'answer')}; agreement {_share(one['agreement'])}",
            f"  Krippendorff's alpha {_number(one['alpha_nominal'])} nominal, {_number(one['alpha_ordinal'])} ordinal",
        ]
    references = ", ".join(f"{100 * one['value']:.1f} %" for one in found["references"])
    lines += [
        f"  published: {references} (docs/labelling-statistics.md)",
        f"Self-consistency on hidden repeats: {_share(found['self_consistency'])}",
        f"Gold questions answered correctly: {_share(found['gold'])}",
        *([] if followed is None else [f"Suggestions followed: {_share(followed)}"]),
        f"Left answer preferred: {_share(found['left'])}",
        f"Longer answer preferred: {_share(found['longer'])}",
        f"Ties: {_share(found['ties'])}",
        "Seconds per label (median): "
        + (", ".join(f"{task} {seconds:.0f}" for task, seconds in found["median_seconds"].items()) or "n/a"),
        "Labels per day: " + (", ".join(f"{one['day']} {one['labels']}" for one in found["per_day"][-7:]) or "n/a"),
    ]
    if found["model"] is not None:
        lines.append(f"Reward model agrees with people: {_share(found['model']['agreement'])}")
    lines += ["", "id    name              labels  with the others         left                    seconds  gold"]
    if followed is not None:
        lines[-1] = f"{lines[-1]:<101}  suggestions followed"
    for one in found["people"]:
        seconds = "n/a" if one["median_seconds"] is None else f"{one['median_seconds']:.0f}"
        agreement, left = _share(one["agreement"]), _share(one["left"])
        name = f"{one['person']:<4}  {one['name'][:16]:<16}"
        line = f"{name}  {one['labels']:>6}  {agreement:<22}  {left:<22}  {seconds:>7}  {_share(one['gold'])}"
        lines.append(line if followed is None else f"{line:<101}  {_share(one['suggestion_followed'])}")
    return lines


def _share(found: dict[str, Any] | None) -> str:
    if found is None:
        return "n/a"
    return f"{100 * found['value']:.1f} % ({100 * found['low']:.1f} to {100 * found['high']:.1f})"


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"
