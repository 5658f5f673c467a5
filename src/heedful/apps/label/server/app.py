"""The web application: one table of routes and their roles, and the checks that every request passes, in this order.

Host and origin, rate limit per address, session, rate limit per session, role, CSRF token, size of the body; only then is
the handler called. Other paths are 404. Handlers wait for the disk, so they run in threads.

Pages are shells filled by scripts; all files are read when the server starts, so a path in a request never opens a file.
"""

import hashlib
import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any

import anyio.to_thread
from jinja2 import Environment, FileSystemLoader, select_autoescape
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from heedful.apps.label.assignment import NotHeldError
from heedful.apps.label.records import Person
from heedful.apps.label.server import api, owner
from heedful.apps.label.server.policy import AwayError
from heedful.apps.label.server.request import ApiRequest, Json, Refused, Site
from heedful.apps.label.server.security import (
    HEADERS,
    RateLimit,
    client_address,
    csrf_refusal,
    page_refusal,
    post_refusal,
)
from heedful.data.readers import fault_in, parse_json
from heedful.display import say
from heedful.errors import ConfigError, DataError
from heedful.hosts import Refusal

ANYONE: frozenset[str] | None = None
EVERYBODY = frozenset({"owner", "annotator", "viewer"})
LABELLERS = frozenset({"owner", "annotator"})
READERS = frozenset({"owner", "viewer"})
OWNERS = frozenset({"owner"})

SMALL = 10**6
"""Most bytes of a request body."""
LARGE = 64 * 10**6
"""Most bytes of a file to import."""
THREADS = 64
"""Most requests that wait for the disk at a time."""

Handler = Callable[[Site, ApiRequest], Response | dict[str, Any]]


@dataclass(frozen=True)
class RouteRule:
    """A route."""

    method: str
    path: str
    allows: frozenset[str] | None
    """Roles allowed to use it; `ANYONE` needs no session."""
    handler: Handler
    most_bytes: int = SMALL
    is_costly: bool = False
    """Costs time of the policy or the disk, so only a few per minute are allowed."""


class Application:
    """Answers requests by the rules.

    Args:
        site: the project as served.
        rules: all routes; None: `all_rules`.
    """

    def __init__(self, site: Site, rules: tuple[RouteRule, ...] | None = None) -> None:
        self.site = site
        rules = all_rules() if rules is None else rules
        self.rules = {(rule.method, rule.path): rule for rule in rules}
        assert len(self.rules) == len(rules)
        self.by_address = RateLimit(per_second=100, burst=2000)
        """Limit for routes without a session; high, so that an office behind one address can load the pages at once."""
        self.failed = RateLimit(per_second=0.1, burst=10)
        """Failed sign-ins, by address."""
        self.unknown = RateLimit(per_second=0.1, burst=10)
        """Unknown sessions, by address; separate, so that an expired session does not prevent signing in."""
        self.by_person = RateLimit(per_second=20, burst=100)
        self.costly = RateLimit(per_second=1, burst=10)
        self.refusal = load_refusal()
        self._threads: anyio.CapacityLimiter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            response = await self._response(request)
        except Exception as error:
            response = self._refused(request, error)
        tag = response.headers.get("etag")
        if tag is not None and tag == request.headers.get("if-none-match"):
            response = Response(status_code=304, headers={"ETag": tag, "Cache-Control": "no-cache"})
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        if response.status_code in (429, 503):
            response.headers["Retry-After"] = "1"
        await response(scope, receive, send)

    def _refused(self, request: Request, error: Exception) -> Response:
        """A refusal as a page for browsers, as JSON for scripts."""
        refused, path = _refusal(error), request.url.path
        if isinstance(error, Refused) and refused.status == 401 and not path.startswith("/api/"):
            return RedirectResponse("/join", 303)
        if not isinstance(error, Refused) and refused.status >= 500:
            say(f"{request.method} {path}: {error}")
        if error is not refused and refused.status == 500:
            traceback.print_exception(error)
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(self.refusal(refused), refused.status)
        content: dict[str, Any] = {"error": refused.message}
        if refused.code:
            content |= {"code": refused.code, "values": refused.values}
        worker = self.site.worker
        if isinstance(error, AwayError) and worker is not None and not (worker.is_ready or worker.problem):
            content["loading"] = True
        return Json(content, refused.status)

    async def _response(self, request: Request) -> Response:
        headers, access = request.headers, self.site.access
        _refuse(page_refusal(headers, access), "wrong_address")
        peer = request.client.host if request.client is not None else "unknown"
        address = client_address(headers, peer, access)
        rule = self._rule(request)
        is_post = rule.method == "POST"
        if is_post:
            _refuse(post_refusal(headers), "elsewhere")
        person, session = None, None
        if rule.allows is not None:
            person, session = await self._signed_in(request, address)
            _wait(self.by_person.seconds_to_wait(person.person_id))
            if person.role not in rule.allows:
                allowed = " and ".join(sorted(rule.allows))
                raise Refused(403, f"this is only for {allowed}s; your role is {person.role}", "other_role")
            if is_post:
                _refuse(csrf_refusal(headers, session), "old_page")
            if rule.is_costly:
                _wait(self.costly.seconds_to_wait(person.person_id))
        else:
            _wait(self.by_address.seconds_to_wait(address))
            if is_post:
                _wait(self.failed.seconds_to_wait(address, take=False))
        body = await _body(request, rule.most_bytes) if is_post else b""
        call = ApiRequest(person, session, {}, dict(request.query_params), address, headers["host"])
        try:
            return await self._in_thread(self._handled, rule, call, body)
        except Refused as refused:
            if rule.allows is None and refused.status == 401:
                self.failed.seconds_to_wait(address)
            raise

    def _rule(self, request: Request) -> RouteRule:
        method, path = "GET" if request.method == "HEAD" else request.method, request.url.path
        rule = self.rules.get((method, path))
        if rule is not None:
            return rule
        others = sorted(other for other, known in self.rules if known == path)
        if others:
            raise Refused(405, f"{path} accepts {' and '.join(others)}")
        raise Refused(404, "there is no such page", "nothing_here")

    async def _signed_in(self, request: Request, address: str) -> tuple[Person, str]:
        """Return the person and the session's token."""
        session = _cookie(request.headers, self.site.access.cookie)
        if session is None:
            raise Refused(401, "you are not signed in; open your invitation's link", "not_signed_in")
        person = await self._in_thread(self.site.project.session, session)
        if person is None or person.standing == "removed":
            _wait(self.unknown.seconds_to_wait(address))
            raise Refused(401, "your session has ended; ask the owner for a new invitation", "session_ended")
        return person, session

    def _handled(self, rule: RouteRule, call: ApiRequest, body: bytes) -> Response:
        answer = rule.handler(self.site, replace(call, body=_fields(body)) if body else call)
        return answer if isinstance(answer, Response) else Json(answer)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(THREADS)
        # when the server stops, unfinished chat answers are not waited for
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self._threads, abandon_on_cancel=True)


def _refusal(error: Exception) -> Refused:
    """The reply to a request that was refused or failed."""
    match error:
        case Refused():
            refused = error
        case NotHeldError():
            refused = Refused(409, str(error), error.code)
        case AwayError():
            refused = Refused(503, str(error), error.code)
        case DataError() | ConfigError():
            refused = Refused(422, str(error))
        case ClientDisconnect():
            refused = Refused(400, str(error))
        case TimeoutError():
            refused = Refused(408, "the request did not arrive in time; send it again", "late")
        case OSError():  # the page keeps unconfirmed requests
            said = "the server cannot write to its disk now, so nothing was confirmed; try again"
            refused = Refused(503, said, "disk")
        case _:
            refused = Refused(500, "internal server error; see the server's log", "mistake")
    return refused


def _refuse(refusal: Refusal | None, code: str) -> None:
    if refusal is not None:
        raise Refused(*refusal, code)


def _wait(seconds: float) -> None:
    if seconds > 0:
        whole = max(1, round(seconds))
        raise Refused(429, f"too many requests; try again in {whole} seconds", "too_many", n=whole)


def _cookie(headers: Mapping[str, str], name: str) -> str | None:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return None
    return None if morsel is None or not 0 < len(morsel.value) <= 200 else morsel.value


async def _body(request: Request, most: int) -> bytes:
    """Read a body, and stop at the first byte over the limit."""
    length = request.headers.get("content-length", "0")
    body = bytearray()
    if length.isdigit() and int(length) > most:
        raise Refused(413, f"the request is larger than {most} bytes", "too_large", n=most)
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise Refused(413, f"the request is larger than {most} bytes", "too_large", n=most)
    return bytes(body)


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = parse_json(body.decode())
        fault = fault_in(fields)
    except ValueError as error:  # also for invalid UTF-8
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise Refused(400, "the body must be a JSON object")
    if fault is not None:
        raise Refused(422, fault)
    return fields


# The pages and their files

FOLDER = Path(__file__).parents[1] / "pages"
PAGES = {
    "/": EVERYBODY,
    "/join": ANYONE,
    "/stats": READERS,
    "/labels": OWNERS,
    "/people": OWNERS,
    "/import": OWNERS,
    "/export": OWNERS,
    "/rounds": READERS,
    "/instructions": EVERYBODY,
}
"""Roles for each page. The template has the page's name; that of the first is work.html."""
TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}


TEMPLATES = Environment(
    loader=FileSystemLoader(FOLDER / "templates"),
    autoescape=select_autoescape(default=True, default_for_string=True),
)


def load_refusal() -> Callable[[Refused], str]:
    """Return a function that renders the page for a refused request, in both languages."""
    template = TEMPLATES.get_template("refused.html")
    words = json.loads((FOLDER / "words" / "zh.json").read_text(encoding="utf-8"))

    def page(refused: Refused) -> str:
        said = words.get(f"said_{refused.code}", words["refused"])
        for name, value in {"status": refused.status, **refused.values}.items():
            said = said.replace(f"{{{name}}}", str(value))
        return template.render(status=refused.status, message=refused.message, chinese=said)

    return page


# Routes

API = (
    RouteRule("POST", "/api/join", ANYONE, api.join),
    RouteRule("POST", "/api/leave", EVERYBODY, api.leave),
    RouteRule("GET", "/api/me", EVERYBODY, api.me),
    RouteRule("GET", "/api/next", EVERYBODY, api.next_item),
    RouteRule("GET", "/api/instructions", EVERYBODY, api.instructions),
    RouteRule("POST", "/api/label", LABELLERS, api.label),
    RouteRule("POST", "/api/skip", LABELLERS, api.skip),
    RouteRule("POST", "/api/undo", LABELLERS, api.undo),
    RouteRule("POST", "/api/redo", LABELLERS, api.redo),
    RouteRule("POST", "/api/draft", LABELLERS, api.draft),
    RouteRule("POST", "/api/chat", LABELLERS, api.chat, is_costly=True),
    RouteRule("GET", "/api/people", OWNERS, owner.people),
    RouteRule("POST", "/api/people", OWNERS, owner.change_people),
    RouteRule("POST", "/api/instructions", OWNERS, owner.set_instructions),
    RouteRule("POST", "/api/import", OWNERS, owner.import_text, most_bytes=LARGE, is_costly=True),
    RouteRule("GET", "/api/export", OWNERS, owner.export, is_costly=True),
    RouteRule("GET", "/api/labels", OWNERS, owner.labels),
    RouteRule("GET", "/api/batches", OWNERS, owner.batches),
    RouteRule("POST", "/api/withdraw", OWNERS, owner.withdraw),
    RouteRule("GET", "/api/item", OWNERS, owner.item),
    RouteRule("POST", "/api/correct", OWNERS, owner.correct),
    RouteRule("GET", "/api/stats", READERS, owner.stats, is_costly=True),
    RouteRule("GET", "/api/rounds", READERS, owner.rounds),
)


def all_rules() -> tuple[RouteRule, ...]:
    """The API, the pages and their files. Pages are the same for everybody; all differences come from the API."""
    rules, static = [*API], FOLDER / "static"
    for page, allows in PAGES.items():
        name = page[1:] or "work"
        html = TEMPLATES.get_template(f"{name}.html").render(page=name).encode()
        rules.append(RouteRule("GET", page, allows, _serving(html, "text/html")))
    files = {f"/static/{path.relative_to(static).as_posix()}": path for path in static.rglob("*") if path.is_file()}
    files |= {f"/static/words/{path.name}": path for path in (FOLDER / "words").glob("*.json")}
    for address, path in sorted(files.items()):
        content = path.read_bytes()
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"', "Cache-Control": "no-cache"}
        kind = TYPES.get(path.suffix, "application/octet-stream")
        rules.append(RouteRule("GET", address, ANYONE, _serving(content, kind, headers)))
    return tuple(rules)


def _serving(content: bytes, kind: str, headers: Mapping[str, str] | None = None) -> Handler:
    return lambda _site, _request: Response(content, media_type=kind, headers=headers)
