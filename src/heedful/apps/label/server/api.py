"""The API for labellers: sign in and out, get the next item, label, skip, undo, save a draft, chat.

The browser gets of an item only the fields in `shown_item`: not its sources, its round, or the reason for its selection, and
not whether it is a repeat or a screening item.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from starlette.responses import Response

from heedful.apps.label.answers import JUDGED, check_seconds, from_screen, response_text, to_screen
from heedful.apps.label.people import SESSION_HOURS
from heedful.apps.label.records import Assignment, Event, Item
from heedful.apps.label.server import request as fields
from heedful.apps.label.server.markup import markdown_to_html
from heedful.apps.label.server.policy import Turn
from heedful.apps.label.server.request import ApiRequest, Json, Refused, Site
from heedful.apps.label.server.security import csrf_token
from heedful.data.messages import read_conversation

Answer = dict[str, Any]
LONGEST_DRAFT = 500_000
"""Most characters of a draft."""
WHY_NONE = {
    "viewer": "You are a viewer: viewers do not label.",
    "removed": "You are no longer part of this project.",
    "refused": "Your answers to the first items differed too much from the owner's. Thank you for trying.",
    "screening": "Your first items are done or not ready yet; the owner has to look at them.",
    "empty": "There is nothing to label yet.",
    "sampling": "The model is writing the next answers.",
    "no-model": "Only chats are left for you, and there is no model to talk to.",
    "others": "Other people hold the items that are left for you.",
    "second": "Nothing is left for you. Other people in the project still have to label some items.",
    "people": "Nothing is left for you. Some items need more labellers: the owner can invite somebody on the "
    "page People. Finished labels can be exported already.",
    "done": "Everything is labelled. Thank you.",
    "through": "You have been through every item. Thank you.",
    "closing": "Every item was labelled or skipped, and this server stops. Go back to the terminal.",
}
"""Messages for a person without an item, by reason."""


def join(site: Site, request: ApiRequest) -> Response:
    """``POST /api/join``: exchange a link's token for a session, once."""
    fields.only(request.body, "token")
    session = site.project.redeem(fields.text(request.body, "token", most=200))
    person = None if session is None else site.project.session(session)
    if session is None or person is None or person.standing == "removed":
        site.audit.note("refused", person=None, address=request.address)
        reason = "this link has been used, has expired, or belongs to another project; ask the owner for a new one"
        raise Refused(401, reason, "link_used")
    site.audit.note("signed in", person=person.person_id, address=request.address)
    cookie = site.access.set_cookie(session, round(3600 * SESSION_HOURS))
    return Json({"role": person.role}, headers={"Set-Cookie": cookie})


def leave(site: Site, request: ApiRequest) -> Response:
    """``POST /api/leave``: end the session."""
    fields.only(request.body)
    assert request.session is not None
    site.project.end_session(request.session)
    site.audit.note("signed out", person=request.caller.person_id, address=request.address)
    return Json({"signed_out": True}, headers={"Set-Cookie": site.access.set_cookie("", 0)})


def me(site: Site, request: ApiRequest) -> Answer:
    """``GET /api/me``."""
    person, project = request.caller, site.project
    assert request.session is not None
    return {
        "id": person.person_id,
        "name": person.name,
        "role": person.role,
        "standing": person.standing,
        "csrf": csrf_token(request.session),
        "project": project.settings.name,
        "tasks": project.tasks(),
        "has_policy": site.worker is not None,
        "progress": project.progress(person.person_id),
    }


def next_item(site: Site, request: ApiRequest) -> Answer:
    """``GET /api/next``: the item that the person holds, or the next one, or the reason why there is none."""
    project, person = site.project, request.caller.person_id
    assignment = project.next_item(person, chats=site.worker is not None)
    answer: Answer = {"item": None, "progress": project.progress(person)}
    if assignment is not None:
        return answer | {"item": shown_item(site, person, assignment), "redo": project.undone(person)}
    seconds = None if site.closing is None else site.closing.tell()
    if seconds is not None:
        return answer | {"reason": "closing", "why": WHY_NONE["closing"], "seconds": seconds}
    reason, count = project.why_counted(person, chats=site.worker is not None)
    is_filling = site.buffer is not None and site.buffer.left
    if is_filling and reason in ("empty", "done", "others", "second", "people"):
        reason, count = "sampling", 0
    return answer | {"reason": reason, "why": WHY_NONE[reason], "count": count}


def label(site: Site, request: ApiRequest) -> Answer:
    """``POST /api/label``: the answer uses places on the screen; for a chat it has the ``turn``."""
    body, person = request.body, request.caller.person_id
    fields.only(body, "nonce", "item", "assignment", "answer", "seconds", "active", "comment", "flags", "version")
    item, answer = fields.identifier(body, "item"), fields.answer(body)
    event = site.project.label(
        person,
        item,
        _of_turn(site, person, item, answer) if "turn" in answer else answer,
        nonce=fields.nonce(body),
        seconds=cast(float, body.get("seconds")),
        comment=body.get("comment", ""),
        flags=body.get("flags", []),
        expected_version=body.get("version"),
        token=fields.identifier(body, "assignment"),
        active=check_seconds(body["active"], "active") if "active" in body else None,
    )
    return {"label": event.event_id, "progress": site.project.progress(person)}


def skip(site: Site, request: ApiRequest) -> Answer:
    """``POST /api/skip``."""
    body, person = request.body, request.caller.person_id
    fields.only(body, "nonce", "item", "assignment", "reason", "flags")
    event = site.project.skip(
        person,
        fields.identifier(body, "item"),
        body.get("reason", ""),
        body.get("flags", []),
        fields.nonce(body),
        token=fields.identifier(body, "assignment"),
    )
    return {"skip": event.event_id, "progress": site.project.progress(person)}


def undo(site: Site, request: ApiRequest) -> Answer:
    """``POST /api/undo``: take back the last label or skip since sign-in; its item returns with the old answer."""
    fields.only(request.body, "nonce")
    return _moved(
        site, request, site.project.undo(request.caller.person_id, fields.nonce(request.body), session=request.session)
    )


def redo(site: Site, request: ApiRequest) -> Answer:
    """``POST /api/redo``: restore the last label or skip that undo took back."""
    fields.only(request.body, "nonce")
    return _moved(site, request, site.project.redo(request.caller.person_id, fields.nonce(request.body)))


def _moved(site: Site, request: ApiRequest, moved: tuple[Event, Assignment | None] | None) -> Answer:
    """The reply to an undo or redo: ``done`` is the id of the event taken back or restored, or null."""
    person = request.caller.person_id
    assignment = None if moved is None else moved[1]
    return {
        "done": None if moved is None else moved[0].event_id,
        "item": None if assignment is None else shown_item(site, person, assignment),
        "redo": site.project.undone(person),
        "progress": site.project.progress(person),
    }


def draft(site: Site, request: ApiRequest) -> Answer:
    """``POST /api/draft``: save a draft; null only renews the item. ``others`` are the drafts of other tabs."""
    body, person = request.body, request.caller.person_id
    fields.only(body, "item", "assignment", "draft", "tab", "save", "from")
    value = body.get("draft")
    if value is not None and not isinstance(value, dict):
        raise Refused(422, f"draft must be an object or null, got {value!r:.60}")
    if value and isinstance(value.get("answer"), dict) and "responses" in value["answer"]:
        # only undo writes responses into drafts
        raise Refused(422, "a draft must not contain responses")
    if len(repr(value)) > LONGEST_DRAFT:
        raise Refused(413, f"the draft is longer than {LONGEST_DRAFT} characters", "too_large", n=LONGEST_DRAFT)
    item, token = fields.identifier(body, "item"), fields.identifier(body, "assignment")
    others = site.project.save_draft(person, item, value, token=token, saved=fields.saved(body))
    return {"saved": True, **({"others": list(others)} if others else {})}


def chat(site: Site, request: ApiRequest) -> Answer:
    """``POST /api/chat``: two answers to the conversation so far, in screen order."""
    body, person = request.body, request.caller.person_id
    fields.only(body, "nonce", "item", "messages")
    nonce = fields.nonce(body)
    turn = site.turns.same(person, nonce)
    if turn is None:
        item, held = fields.identifier(body, "item"), site.project.held(person)
        if held is None or held.item.item_id != item or held.item.task != "chat":
            raise Refused(409, "you no longer hold this chat; reload the page", "chat_gone")
        messages = body.get("messages")
        if read_conversation("chat", "messages", messages)[-1].role != "user":
            raise Refused(422, "the last message must be the person's (role user)")
        assert isinstance(messages, list)
        if messages[:-1] != _so_far(held):
            raise Refused(
                409, "the server has another version of this conversation; reload the page to continue", "chat_changed"
            )
        if site.worker is None:
            # the chat was given while there was a model
            raise Refused(409, "there is no model to talk to now; skip this chat", "no_model")
        responses = site.worker.answers([messages], 2)[0]
        turn = site.turns.add(Turn(person, item, nonce, messages, responses, held.order))
    return {"turn": turn.turn_id, "answers": turn.shown}


def instructions(site: Site, request: ApiRequest) -> Answer:  # noqa: ARG001  every handler has both
    """``GET /api/instructions``."""
    version, text = site.project.instructions()
    return {"version": version, "text": text}


def shown_item(site: Site, person: str, assignment: Assignment) -> Answer:
    """All fields of an item that the browser gets."""
    item, is_formatted = assignment.item, site.project.settings.markdown
    version, text = site.project.instructions()
    answers = [] if item.task == "chat" else [shown_answer(item, index) for index in assignment.order]
    return {
        "id": item.item_id,
        "assignment": assignment.token,
        "task": item.task,
        "prompt": item.prompt,
        "answers": answers,
        "draft": _chat_draft(site, person, assignment) if item.task == "chat" else assignment.draft,
        "draft_of": assignment.draft_of,
        "others": list(assignment.others),
        "instructions": {"version": version, "text": text},
        "lease_until": assignment.lease_until,
        "markdown": [markdown_to_html(one) if is_formatted and isinstance(one, str) else None for one in answers],
        "criteria": shown_criteria(site) if item.task in JUDGED else [],
        "suggestion": None if item.suggestion is None else to_screen(item.suggestion, assignment.order),
    }


def shown_criteria(site: Site) -> list[Answer]:
    """The criteria that the page asks about each answer."""
    return [dataclasses.asdict(one) for one in site.project.settings.criteria_asked]


def shown_answer(item: Item, index: int) -> Any:
    """A candidate as shown: its text, or its messages with only the keys of messages."""
    return _shown(item.candidates[index].response)


def _shown(response: Any) -> Any:
    if isinstance(response, list | tuple):
        return [_shown(message) for message in response]
    if not isinstance(response, Mapping):
        return response
    known = ("role", "name", "content", "reasoning_content", "thinking", "reasoning", "tool_calls")
    return {key: value for key, value in response.items() if key in known}


def _of_turn(site: Site, person: str, item: str, answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """An answer about a turn of a chat, with its responses filled in."""
    fields.only(answer, "turn", "preferred", "strength", "both_bad", "last")
    turn = site.turns.get(person, fields.identifier(answer, "turn"))
    if turn is None or turn.item != item:
        gone = "these answers are gone (the server was restarted); send the message again"
        raise Refused(409, gone, "answers_gone")
    choice = from_screen({name: value for name, value in answer.items() if name != "turn"}, turn.order)
    return {"messages": list(turn.messages), "responses": list(turn.responses), **choice}


def _so_far(held: Assignment) -> list[Any]:
    """The conversation before the person's next message: the item's prompt, or the turns answered so far.

    If the prompt ends with a user message, that message is a proposal for the person's first one.
    """
    if held.turns:
        last = held.turns[-1].content
        answer, place = last["answer"], last["answer"]["preferred"]
        said = answer["responses"][last["order"][0] if place is None else place]["response"]
        return [*answer["messages"], {"role": "assistant", "content": response_text(said)}]
    prompt = held.item.prompt
    if isinstance(prompt, str):
        return []
    return list(prompt[:-1]) if prompt and prompt[-1]["role"] == "user" else list(prompt)


def _chat_draft(site: Site, person: str, assignment: Assignment) -> Any:
    """State of a chat: the saved draft, a turn taken back by undo, or the conversation so far.

    A turn taken back contains the sources of its answers; the page gets only the texts and a turn id.
    """
    draft, item = assignment.draft, assignment.item.item_id
    answer = draft.get("answer") if isinstance(draft, Mapping) else None
    if not isinstance(answer, Mapping) or "responses" not in answer:
        if draft is not None or not assignment.turns:
            return draft
        return {"answer": {"messages": _so_far(assignment), "turn": None, "answers": None}}
    messages = answer["messages"]
    label = next(
        event.content
        for event in reversed(site.project.events())
        if event.kind == "label" and event.person == person and event.content["item"] == item
        and event.content["answer"]["messages"] == messages
    )  # fmt: skip
    turn = site.turns.add(Turn(person, item, "", messages, label["answer"]["responses"], tuple(label["order"])))
    choice = {name: answer[name] for name in ("preferred", "strength", "both_bad")}
    shown = {"messages": messages, "turn": turn.turn_id, "answers": turn.shown, "choice": choice}
    return {**draft, "answer": shown}
