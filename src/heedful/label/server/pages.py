"""The pages, as the browser gets them: shells that the scripts fill, and the files that they load.

All files are read when the server starts, so no name that a request has is ever a path.
"""

import hashlib
import json
import mimetypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, select_autoescape
from starlette.responses import Response

from heedful.label.server.request import ApiRequest, Refused, Site

FOLDER = Path(__file__).parents[1] / "pages"
PAGES = {
    "/": "work",
    "/join": "join",
    "/stats": "stats",
    "/labels": "labels",
    "/people": "people",
    "/import": "import",
    "/export": "export",
    "/rounds": "rounds",
    "/instructions": "instructions",
}
"""The template of each page's path."""
TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class Page:
    """A page: the same for everybody, because all that differs comes from the API."""

    html: bytes

    def __call__(self, site: Site, request: ApiRequest) -> Response:  # noqa: ARG002  as every handler
        return Response(self.html, media_type="text/html")


@dataclass(frozen=True)
class File:
    """A script, a style, a picture or the words of a language."""

    content: bytes
    kind: str
    tag: str

    def __call__(self, site: Site, request: ApiRequest) -> Response:  # noqa: ARG002  as every handler
        headers = {"ETag": self.tag, "Cache-Control": "no-cache"}
        return Response(self.content, media_type=self.kind, headers=headers)


def load_pages() -> dict[str, Page]:
    """Render the pages, by their paths."""
    templates = _templates()
    return {
        path: Page(templates.get_template(f"{name}.html").render(page=name).encode()) for path, name in PAGES.items()
    }


def load_refusal() -> Callable[[Refused], str]:
    """Return what makes the page for an address that is not there or not for whoever asks, in both languages."""
    template = _templates().get_template("refused.html")
    words = json.loads((FOLDER / "words" / "zh.json").read_text(encoding="utf-8"))

    def page(refused: Refused) -> str:
        said = words.get(f"said_{refused.code}", words["refused"])
        for name, value in {"status": refused.status, **refused.values}.items():
            said = said.replace(f"{{{name}}}", str(value))
        return template.render(status=refused.status, message=refused.message, chinese=said)

    return page


def _templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=select_autoescape(default=True, default_for_string=True),
    )


def load_files() -> dict[str, File]:
    """Read the files of static/, and the words of each language, by their paths."""
    files = {
        f"/static/{path.relative_to(FOLDER / 'static').as_posix()}": path for path in (FOLDER / "static").rglob("*")
    }
    files |= {f"/static/words/{path.name}": path for path in (FOLDER / "words").glob("*.json")}
    return {address: _file(path) for address, path in sorted(files.items()) if path.is_file()}


def _file(path: Path) -> File:
    content = path.read_bytes()
    kind = TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return File(content, kind, f'"{hashlib.sha256(content).hexdigest()[:16]}"')
