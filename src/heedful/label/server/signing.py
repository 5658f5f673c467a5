"""Signing in with an invitation's one-time link, and out."""

from typing import Any

from starlette.responses import Response

from heedful.label.people import SESSION_HOURS
from heedful.label.server import asked as fields
from heedful.label.server.asked import Asked, Refused
from heedful.label.server.replies import Json
from heedful.label.server.site import Site


def join(site: Site, asked: Asked) -> Response:
    """``POST /api/join``: a link's token for a session, once."""
    fields.only(asked.body, "token")
    session = site.project.redeem(fields.text(asked.body, "token", most=200))
    person = None if session is None else site.project.session(session)
    if session is None or person is None or person.standing == "removed":
        site.audit.note("refused", person=None, address=asked.address)
        raise Refused(
            401,
            "this link has been used, has expired, or is not one of this project; ask the owner for a new one",
            "link_used",
        )
    site.audit.note("signed in", person=person.person_id, address=asked.address)
    answer = Json({"role": person.role})
    answer.headers["Set-Cookie"] = site.access.set_cookie(session, round(3600 * SESSION_HOURS))
    return answer


def leave(site: Site, asked: Asked) -> Response:
    """``POST /api/leave``: end the session."""
    fields.only(asked.body)
    assert asked.session is not None
    site.project.end_session(asked.session)
    site.audit.note("signed out", person=asked.caller.person_id, address=asked.address)
    answer: dict[str, Any] = {"signed_out": True}
    response = Json(answer)
    response.headers["Set-Cookie"] = site.access.set_cookie("", 0)
    return response
