"""The API for owners, partly for viewers: people and their links, instructions, import, export, statistics, rounds."""

import contextlib
import gc
import re
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import Any, cast, get_args
from weakref import WeakKeyDictionary

from starlette.responses import Response

from heedful.apps.label import listing
from heedful.apps.label.answers import JUDGED
from heedful.apps.label.exporting import ExportOptions, export_project
from heedful.apps.label.importing import FORMATS, ImportOptions, add, read_items_text
from heedful.apps.label.people import LONGEST_NAME, is_import
from heedful.apps.label.project import Project
from heedful.apps.label.records import TASKS, LabelledItem, Person, Role, Standing, Task
from heedful.apps.label.rounds_page import rounds_of
from heedful.apps.label.server import request as fields
from heedful.apps.label.server.api import shown_answer, shown_criteria
from heedful.apps.label.server.request import ApiRequest, Json, Refused, Site
from heedful.apps.label.statistics import project_statistics

Answer = dict[str, Any]
LONGEST_INSTRUCTIONS = 100_000
LONGEST_IMPORT = 64 * 10**6
LONGEST_FILE_NAME = 1000
PAGE = 50
"""Labels per page of the list."""
_ONE_AT_A_TIME = threading.Lock()
COMPUTED: WeakKeyDictionary[Project, tuple[int, dict[Hashable, Mapping[str, Any]]]] = WeakKeyDictionary()
"""Cached statistics and export manifests of each open project, with the number of its last event."""


def people(site: Site, request: ApiRequest) -> Answer:  # noqa: ARG001  every handler has both
    """``GET /api/people``: all people except the one for imported labels; the policy's process, and the number of chats that
    wait for a model."""
    people = [_shown(site, person) for person in site.project.people() if not is_import(person)]
    worker = site.worker
    policy = None if worker is None else {"ready": worker.is_ready, "starts": worker.starts, "problem": worker.problem}
    return {"people": people, "policy": policy, "chats_kept_back": site.project.chats_left() if worker is None else 0}


def change_people(site: Site, request: ApiRequest) -> Answer:
    """``POST /api/people``: add a person (``name``), or change or re-invite one (``person``); returns a new link, if any."""
    body, project = request.body, site.project
    name = fields.text(body, "name", most=LONGEST_NAME).strip() if "name" in body or "person" not in body else None
    role = cast(Role, fields.one_of(body, "role", get_args(Role))) if "role" in body else None
    standing = cast(Standing, fields.one_of(body, "standing", get_args(Standing))) if "standing" in body else None
    if "person" not in body:
        fields.only(body, "name", "role", "standing")
        assert name is not None
        person = project.add_person(name, role or "annotator", standing)
        _note(site, request, "added", person)
        return {"person": _shown(site, person), "link": _link(site, request, person)}
    fields.only(body, "person", "name", "role", "standing", "invite")
    person = _person(site, fields.identifier(body, "person"))
    if body.keys() & {"name", "role", "standing"}:
        person = project.set_person(person.person_id, name=name, role=role, standing=standing)
        _note(site, request, "changed", person)
    link = _link(site, request, person) if fields.switch(body, "invite") else None
    return {"person": _shown(site, person), "link": link}


def set_instructions(site: Site, request: ApiRequest) -> Answer:
    """``POST /api/instructions``: set new instructions for labellers."""
    fields.only(request.body, "text")
    text = fields.text(request.body, "text", most=LONGEST_INSTRUCTIONS, least=0)
    return {"version": site.project.set_instructions(text), "text": text}


@contextlib.contextmanager
def heavy() -> Iterator[None]:
    """Run work on all data (an import, an export, statistics) without blocking labellers: one at a time, and without Python's
    cyclic garbage collection.

    A collection stops all threads, for a second with a million objects. Objects alive afterwards are frozen.
    """
    with _ONE_AT_A_TIME:
        gc.disable()
        try:
            yield
        finally:
            gc.freeze()
            gc.enable()


def import_text(site: Site, request: ApiRequest) -> Answer:
    """``POST /api/import``: add items from the text of a file; with ``preview``, only its contents and errors.

    The file's ``name`` is used in messages only.
    """
    body = request.body
    fields.only(body, "text", "name", "format", "task", "columns", "screening", "gold", "labels", "drop", "preview")
    is_preview = fields.switch(body, "preview")
    task = fields.one_of(body, "task", ("", *TASKS), "")
    options = ImportOptions(
        task=cast(Task, task) if task else None,
        usual=site.project.settings.task,
        columns=fields.text(body, "columns", most=1000, least=0, default=""),
        screening=fields.switch(body, "screening"),
        gold=fields.switch(body, "gold"),
        unusable="drop" if is_preview or fields.switch(body, "drop") else "error",
    )
    ending = fields.one_of(body, "format", FORMATS, FORMATS[0])
    name = re.split(r"[/\\]", fields.text(body, "name", most=LONGEST_FILE_NAME, least=0, default=""))[-1]
    with_labels = fields.switch(body, "labels")
    text = fields.text(body, "text", most=LONGEST_IMPORT)
    with heavy():
        imported = read_items_text(text, ending, options, name=name)
        added = {"items": 0, "labels": 0, "against": 0}
        if not is_preview:
            added = add(site.project, imported, with_labels=with_labels)
    found = imported.preview()
    return found | {"added": added["items"], "labels_added": added["labels"], "labels_against": added["against"]}


def export(site: Site, request: ApiRequest) -> Response:
    """``GET /api/export``: a zip archive of training files; with ``preview``, only its manifest.

    ``without`` lists ids of people to leave out, separated by commas.
    """
    query, project = request.query, site.project
    fields.only(query, "eval_fraction", "margin", "flagged", "without", "gold", "withdrawn", "preview")
    options = ExportOptions(
        eval_fraction=_fraction(query.get("eval_fraction", "0.1")),
        margin=cast(Any, fields.one_of(query, "margin", ("none", "small", "large"), "small")),
        flagged=cast(Any, fields.one_of(query, "flagged", ("keep", "leave-out"), "keep")),
        gold=cast(Any, fields.one_of(query, "gold", ("keep", "leave-out"), "leave-out")),
        withdrawn=cast(Any, fields.one_of(query, "withdrawn", ("keep", "leave-out"), "leave-out")),
        without=tuple(_person(site, one).person_id for one in query.get("without", "").split(",") if one),
    )
    if "preview" in query:
        return Json(_computed(project, options, lambda: export_project(project, options).manifest))
    with heavy():
        packed = export_project(project, options).zipped()
    site.audit.note("exported", person=request.caller.person_id, address=request.address)
    headers = {"Content-Disposition": 'attachment; filename="labels.zip"'}
    return Response(packed, media_type="application/zip", headers=headers)


def _computed(project: Project, key: Hashable, work: Callable[[], Answer | Mapping[str, Any]]) -> Any:
    """The result of ``work``, computed once for the same events and key."""
    then, known = COMPUTED.get(project, (0, {}))
    seq = then + len(project.events(then))
    if then != seq or key not in known:
        with heavy():
            known = {**(known if then == seq else {}), key: work()}
            COMPUTED[project] = seq, known
    return known[key]


def stats(site: Site, request: ApiRequest) -> Answer:  # noqa: ARG001  every handler has both
    """``GET /api/stats``: recomputed only if there are new events."""
    scores = site.project.folder / "scores.jsonl"
    written = (scores.stat().st_mtime_ns, scores.stat().st_size) if scores.is_file() else None
    found: Answer = _computed(site.project, ("statistics", written), lambda: project_statistics(site.project))
    return found


def labels(site: Site, request: ApiRequest) -> Answer:
    """``GET /api/labels``: a page of the labels, the newest first.

    Filters: a ``person``, items on which people ``differ``, items with a text or id (``search``). With ``items``, a page of
    all items instead, the last one first, including those without labels.
    """
    query, project = request.query, site.project
    fields.only(query, "person", "differ", "search", "items", "page")
    search, withdrawn = query.get("search", "").strip(), project.withdrawn()
    everything = project.labels(also_withdrawn=True)
    if query.get("items"):
        counts = Counter(one.item.item_id for one in everything)
        items = [one for one in reversed(project.items(also_withdrawn=True)) if listing.contains(one, search)]
        rows = [partial(listing.row_of_item, one, counts) for one in items]
    else:
        person, differ = query.get("person", ""), bool(query.get("differ"))
        chosen = listing.chosen(everything, person=person, differ=differ, search=search)
        rows = [partial(listing.row, one) for one in chosen]
    page = query.get("page", "1")
    number = int(page) if page.isascii() and page.isdigit() and len(page) < 10 else 0
    if number < 1:
        raise Refused(422, f"page must be a whole number from 1, got {page!r:.60}")
    pages = max(1, -(-len(rows) // PAGE))
    number = min(number, pages)
    shown = [row() for row in rows[PAGE * (number - 1) : PAGE * number]]
    return {
        "rows": [one | {"withdrawn": one["item"] in withdrawn} for one in shown],
        "count": len(rows),
        "page": number,
        "pages": pages,
        "people": [{"person": person.person_id, "name": person.name} for person in project.people()],
    }


def batches(site: Site, request: ApiRequest) -> Answer:  # noqa: ARG001  every handler has both
    """``GET /api/batches``: the imports, the newest first."""
    return {"batches": site.project.batches()}


def withdraw(site: Site, request: ApiRequest) -> Answer:
    """``POST /api/withdraw``: withdraw the items of a ``batch``, or one ``item``, or put them ``back``."""
    body, person = request.body, request.caller.person_id
    fields.only(body, "batch", "item", "back", "reason")
    batch = fields.text(body, "batch", most=300, least=0, default="")
    items = () if batch else (fields.identifier(body, "item"),)
    back = fields.switch(body, "back")
    changed = site.project.withdraw(person, batch=batch, items=items, back=back, reason=body.get("reason", ""))
    site.audit.note("put back" if back else "withdrawn", person=person, address=request.address, items=str(changed))
    return {"changed": changed}


def item(site: Site, request: ApiRequest) -> Answer:
    """``GET /api/item``: an item with everybody's labels and owners' corrections, without the sources of its answers."""
    fields.only(request.query, "item")
    project, identity = site.project, fields.identifier(request.query, "item")
    found = next((one for one in project.items(also_withdrawn=True) if one.item_id == identity), None)
    if found is None:
        raise Refused(404, f"there is no item {identity!r:.80} in this project")
    names = {person.person_id: person.name for person in project.people()}
    said = [one for one in project.labels(also_withdrawn=True) if one.item.item_id == identity]
    return {
        "item": identity,
        "task": found.task,
        "prompt": found.prompt,
        "answers": [shown_answer(found, index) for index in range(len(found.candidates))],
        "criteria": shown_criteria(site) if found.task in JUDGED else [],
        "round": found.round,
        "screening": found.screening,
        "batch": found.batch,
        "gold": None if found.gold is None else dict(found.gold),
        "suggestion": None if found.suggestion is None else dict(found.suggestion),
        "withdrawn": identity in project.withdrawn(),
        "labels": [_with_history(site, one, names) for one in said],
    }


def _with_history(site: Site, one: LabelledItem, names: Mapping[str, str]) -> Answer:
    changes = [listing.of_correction(event, names) for event in site.project.corrections(one.event.event_id)]
    turn = dict(one.event.content["answer"])
    said = {
        "messages": turn["messages"],
        "responses": [response["response"] for response in turn["responses"]],
    } if one.item.task == "chat" else {}  # fmt: skip
    closed = listing.is_closed(site.project.folder, one)
    return {**listing.of_label(one), **said, "standing": one.person.standing, "closed": closed, "history": changes}


def correct(site: Site, request: ApiRequest) -> Answer:
    """``POST /api/correct``: replace a label's answer. ``closed``: a round has already trained on it."""
    body, project, person = request.body, site.project, request.caller.person_id
    fields.only(body, "nonce", "label", "answer", "reason")
    answer, label = fields.answer(body), fields.identifier(body, "label")
    event = project.correct(person, label, answer, nonce=fields.nonce(body), reason=body.get("reason", ""))
    site.audit.note("corrected", person=person, address=request.address, label=label)
    corrected = next(one for one in project.labels(also_withdrawn=True) if one.event.event_id == label)
    return {"correction": event.event_id, "closed": listing.is_closed(project.folder, corrected)}


def rounds(site: Site, request: ApiRequest) -> Answer:  # noqa: ARG001  every handler has both
    """``GET /api/rounds``."""
    return rounds_of(site.project.folder)


def _fraction(value: str) -> float:
    try:
        fraction = float(value)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction < 1:
        raise Refused(422, f"eval_fraction must be a number from 0 to below 1, got {value!r:.60}")
    return fraction


def _shown(site: Site, person: Person) -> Answer:
    return {
        "person": person.person_id,
        "name": person.name,
        "role": person.role,
        "standing": person.standing,
        "progress": site.project.progress(person.person_id),
    }


def _person(site: Site, person_id: str) -> Person:
    found = [person for person in site.project.people() if person.person_id == person_id]
    if not found:
        raise Refused(404, f"there is no person {person_id!r:.60}; reload the page")
    return found[0]


def _link(site: Site, request: ApiRequest, person: Person) -> str:
    base = site.access.public_url or f"http://{request.host}"
    link = f"{base}/join#{site.project.invite(person.person_id, session=request.session)}"
    _note(site, request, "invited", person)
    return link


def _note(site: Site, request: ApiRequest, what: str, person: Person) -> None:
    site.audit.note(
        what,
        person=person.person_id,
        address=request.address,
        by=request.caller.person_id,
        role=person.role,
        standing=person.standing,
    )
