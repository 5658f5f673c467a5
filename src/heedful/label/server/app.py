"""The web application: one table of what can be asked for and by whom, and the checks that every request passes in order.

Host and origin, then the address's rate limit, the session, its rate limit, the role, the CSRF token, the size of the body;
only then does a handler see it. What is not in the table is not there. Handlers wait for the disk, so they run in threads.
"""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from types import MappingProxyType
from typing import Any

import anyio.to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from heedful.data.readers import fault_in, parse_json
from heedful.display import say
from heedful.errors import ConfigError, DataError
from heedful.label.project import NotHeldError
from heedful.label.records import Person
from heedful.label.server import api, owner
from heedful.label.server.pages import load_files, load_pages, load_refusal
from heedful.label.server.request import ApiRequest, Json, Refused, Site
from heedful.label.server.security import (
    HEADERS,
    RateLimit,
    client_address,
    csrf_refusal,
    page_refusal,
    post_refusal,
)
from heedful.label.server.worker import AwayError
from heedful.serving.guard import Refusal

ANYONE: frozenset[str] | None = None
EVERYBODY = frozenset({"owner", "annotator", "viewer"})
LABELLERS = frozenset({"owner", "annotator"})
READERS = frozenset({"owner", "viewer"})
OWNERS = frozenset({"owner"})

SMALL = 10**6
"""Bytes of a request's body."""
LARGE = 64 * 10**6
"""Bytes of a file to import."""
THREADS = 64
"""Requests that wait for the disk at a time."""

Handler = Callable[[Site, ApiRequest], Response | dict[str, Any]]


@dataclass(frozen=True)
class RouteRule:
    """Something that can be asked for."""

    method: str
    path: str
    allows: frozenset[str] | None
    """Roles that may ask for it; `ANYONE` needs no session."""
    handler: Handler
    most_bytes: int = SMALL
    is_costly: bool = False
    """It takes the policy's or the disk's time, so few per minute are enough."""


class Application:
    """Answers requests as the rules say.

    Args:
        site: what handlers work with.
        rules: all that can be asked for; nobody may ask for anything else.
    """

    def __init__(self, site: Site, rules: tuple[RouteRule, ...]) -> None:
        self.site = site
        self.rules = {(rule.method, rule.path): rule for rule in rules}
        assert len(self.rules) == len(rules)
        self.by_address = RateLimit(per_second=100, burst=2000)
        """What needs no session, so that a whole office behind one address can load the pages at once."""
        self.failed = RateLimit(per_second=0.1, burst=10)
        """Failed sign-ins, by address."""
        self.unknown = RateLimit(per_second=0.1, burst=10)
        """Unknown sessions, by address: apart, since sessions that have ended must keep nobody from signing in again."""
        self.by_person = RateLimit(per_second=20, burst=100)
        self.costly = RateLimit(per_second=1, burst=10)
        self.refusal = load_refusal()
        self._threads: anyio.CapacityLimiter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        response = await self._answered(request)
        if "etag" in response.headers and response.headers["etag"] == request.headers.get("if-none-match"):
            response = Response(
                status_code=304, headers={"ETag": response.headers["etag"], "Cache-Control": "no-cache"}
            )
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        await response(scope, receive, send)

    async def _answered(self, request: Request) -> Response:
        try:
            return await self._response(request)
        except Refused as refused:
            is_page = refused.status == 401 and not request.url.path.startswith("/api/")
            if is_page:
                return RedirectResponse("/join", 303)
            return self._refused(request, refused)
        except Exception as error:
            failure = _failure(error)
            status = failure.status
            if status >= 500:
                say(f"{request.method} {request.url.path}: {error}")
            if status == 500:
                traceback.print_exception(error)
            worker = self.site.worker
            is_loading = isinstance(error, AwayError) and worker is not None and not (worker.is_ready or worker.problem)
            return self._refused(request, failure, {"loading": True} if is_loading else {})

    def _refused(self, request: Request, refused: Refused, more: Mapping[str, bool] = MappingProxyType({})) -> Response:
        """A page for whoever went to an address, JSON for scripts."""
        if "text/html" in request.headers.get("accept", ""):
            return _patient(HTMLResponse(self.refusal(refused), refused.status))
        coded = {"code": refused.code, "values": refused.values} if refused.code else {}
        return _patient(Json({"error": refused.message, **coded, **more}, refused.status))

    async def _response(self, request: Request) -> Response:
        headers, access = request.headers, self.site.access
        _refuse(page_refusal(headers, access), "wrong_address")
        peer = request.client.host if request.client is not None else "unknown"
        address = client_address(headers, peer, access)
        rule = self._rule(request)
        if rule.method == "POST":
            _refuse(post_refusal(headers), "elsewhere")
        person, session = None, None
        if rule.allows is not ANYONE:
            person, session = await self._signed_in(request, address)
            _wait(self.by_person.seconds_to_wait(person.person_id))
            allowed = rule.allows or frozenset()
            if person.role not in allowed:
                raise Refused(
                    403, f"this is for {' and '.join(sorted(allowed))}s; your role is {person.role}", "other_role"
                )
            if rule.method == "POST":
                _refuse(csrf_refusal(headers, session), "old_page")
            if rule.is_costly:
                _wait(self.costly.seconds_to_wait(person.person_id))
        else:
            _wait(self.by_address.seconds_to_wait(address))
            if rule.method == "POST":
                _wait(self.failed.seconds_to_wait(address, take=False))
        body = await _body(request, rule.most_bytes) if rule.method == "POST" else b""
        query = dict(request.query_params)
        try:
            return await self._in_thread(
                self._handled, rule, ApiRequest(person, session, {}, query, address, headers["host"]), body
            )
        except Refused as refused:
            if rule.allows is ANYONE and refused.status == 401:
                self.failed.seconds_to_wait(address)
            raise

    def _rule(self, request: Request) -> RouteRule:
        method, path = "GET" if request.method == "HEAD" else request.method, request.url.path
        rule = self.rules.get((method, path))
        if rule is not None:
            return rule
        others = sorted(other for other, known in self.rules if known == path)
        if others:
            raise Refused(405, f"{path} takes {' and '.join(others)}")
        raise Refused(404, "there is nothing here", "nothing_here")

    async def _signed_in(self, request: Request, address: str) -> tuple[Person, str]:
        """Return who asks, and the session's token."""
        session = _cookie(request.headers, self.site.access.cookie)
        if session is None:
            raise Refused(401, "you are not signed in; open your invitation's link", "not_signed_in")
        person = await self._in_thread(self.site.project.session, session)
        if person is None or person.standing == "removed":
            _wait(self.unknown.seconds_to_wait(address))
            raise Refused(401, "your session has ended; ask the owner for a new invitation", "session_ended")
        return person, session

    def _handled(self, rule: RouteRule, call: ApiRequest, body: bytes) -> Response:
        if body:
            call = ApiRequest(call.person, call.session, _fields(body), call.query, call.address, call.host)
        answer = rule.handler(self.site, call)
        return answer if isinstance(answer, Response) else Json(answer)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(THREADS)
        # at the server's end, nobody waits for a chat's answers that are still being written
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self._threads, abandon_on_cancel=True)


STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (NotHeldError, 409),
    (DataError, 422),
    (ConfigError, 422),
    (ClientDisconnect, 400),
    (TimeoutError, 408),
    (OSError, 503),
)
"""The status of an answer to a request that could not be done, by what happened; the first that fits."""


def _failure(error: Exception) -> Refused:
    """What is answered to a request that could not be done."""
    status = next((status for kind, status in STATUSES if isinstance(error, kind)), 500)
    if status == 500:
        return Refused(500, "the server made a mistake; its log says which", "mistake")
    if status == 408:
        return Refused(408, "the request did not arrive in time; send it again", "late")
    if isinstance(error, AwayError | NotHeldError):
        return Refused(status, str(error), error.code)
    if status == 503:  # the page keeps what was not acknowledged
        return Refused(503, "the server cannot write to its disk now, so nothing was confirmed; try again", "disk")
    return Refused(status, str(error))


def _refuse(refusal: Refusal | None, code: str) -> None:
    if refusal is not None:
        raise Refused(*refusal, code)


def _wait(seconds: float) -> None:
    if seconds > 0:
        whole = max(1, round(seconds))
        raise Refused(429, f"too many requests; try again in {whole} seconds", "too_many", n=whole)


def _patient(response: Response) -> Response:
    if response.status_code in (429, 503):
        response.headers["Retry-After"] = "1"
    return response


def _cookie(headers: Mapping[str, str], name: str) -> str | None:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return None
    return None if morsel is None or not 0 < len(morsel.value) <= 200 else morsel.value


async def _body(request: Request, most: int) -> bytes:
    """Read a body, and stop at the first byte that is too many."""
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
    except ValueError as error:  # also not UTF-8
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise Refused(400, "the body must be a JSON object")
    if fault is not None:
        raise Refused(422, fault)
    return fields


# What can be asked

ROLES_OF_PAGES = {
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
    """The API, the pages and their files."""
    pages = [RouteRule("GET", path, ROLES_OF_PAGES[path], page) for path, page in load_pages().items()]
    files = [RouteRule("GET", path, ANYONE, file) for path, file in load_files().items()]
    return (*API, *pages, *files)
