"""Links as they hold in the repository lead to the pages of the site.

A page links to what is beside it in the repository, so that its links hold wherever the repository is browsed. Here a link
to a file that is a page leads to that page (also to README.md, CHANGELOG.md and the like, which are pages by symbolic
links), and a link to other text leads to a page with that text. No link leaves the site for a host.
"""

import inspect
import pkgutil
import posixpath
import re
from pathlib import Path

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.util import logging

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
README = ROOT / "README.md"
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^()\s#]+)(#[^()\s]*)?(?=\))")
PICTURES = (".png", ".svg")
logger = logging.getLogger(__name__)


def pages_by_file(env):
    """The page that each file of the repository is; README.md is where the site starts."""
    pages = {Path(env.doc2path(name)).resolve(): name for name in env.found_docs}
    return pages | {README: "start", ROOT / "examples": "examples", DOCS / "results": "results"}


def site_links(text, docname, env):
    """The text of a page with the links of the repository as links of the site."""
    file = Path(env.doc2path(docname))
    folder, pages = file.resolve().parent, pages_by_file(env)
    here = posixpath.dirname(docname)

    def link(match):
        path, anchor = match[1], match[2] or ""
        target = (folder / path).resolve()
        if target in pages:
            return f"page:{pages[target]}{'' if target == README else anchor}"
        if not target.exists():
            logger.warning("%s links to %s, which does not exist", file.name, path, location=docname)
            return path
        inside = target.relative_to(ROOT).as_posix()
        if target.suffix in PICTURES:
            return posixpath.relpath(inside, posixpath.join("docs", here))
        return f"source:{inside}{anchor}"

    pieces, end = [], 0
    for fence in [*FENCE.finditer(text), None]:
        start = len(text) if fence is None else fence.start()
        pieces += [LINK.sub(link, text[end:start]), fence[0] if fence else ""]
        end = fence.end() if fence else start
    return "".join(pieces)


def read(app, docname, source):
    source[0] = site_links(source[0], docname, app.env)


def resolve(app, doctree, docname):
    """Give references to pages and to files their addresses, and remember which files are needed."""
    if app.builder.format != "html":
        return
    for reference in list(doctree.findall(nodes.reference)):
        scheme, _, rest = reference.get("refuri", "").partition(":")
        name, _, anchor = rest.partition("#")
        if scheme == "page":
            slugs = app.env.metadata[name].get("myst_slugs", {})
            anchor = slugs[anchor][1] if anchor in slugs else anchor  # check.py finds those that are nowhere
        elif scheme == "source" and (ROOT / name).is_dir():
            reference.replace_self(reference.children)
            continue
        elif scheme == "source":
            app.env.heedful_sources.add(name)
            name = f"source/{name}"
        else:
            continue
        reference["refuri"] = app.builder.get_relative_uri(docname, name) + (anchor and f"#{anchor}")
        reference["internal"] = True


def linked_files(app):
    """A page for each file that a page links to."""
    formatter = HtmlFormatter(linenos="inline", lineanchors="L", wrapcode=True)
    for path in sorted(app.env.heedful_sources):
        text = (ROOT / path).read_text(encoding="utf-8")
        try:
            lexer = get_lexer_for_filename(path)
        except ClassNotFound:
            lexer = TextLexer()
        body = f'<h1>{path}</h1><div class="source">{highlight(text, lexer, formatter)}</div>'
        yield (
            f"source/{path}",
            {"title": path, "body": body, "meta": {"html_theme.sidebar_secondary.remove": True}},
            "page.html",
        )


def linkcode_resolve(domain, info):
    """Where the source of a name of the Python API is."""
    found = pkgutil.resolve_name(info["module"])
    for name in info["fullname"].split("."):
        found = inspect.unwrap(getattr(found, name, None))
    try:
        file, line = inspect.getsourcefile(found), inspect.getsourcelines(found)[1]
    except TypeError:  # an attribute has no source of its own
        return None
    if domain != "py" or not Path(file).is_relative_to(ROOT):
        return None
    return f"source:{Path(file).relative_to(ROOT).as_posix()}#L-{line}"


def begin(app):
    app.env.heedful_sources = set()


def setup(app):
    app.config.linkcode_resolve = linkcode_resolve
    app.connect("builder-inited", begin)
    app.connect("source-read", read)
    app.connect("doctree-resolved", resolve, priority=900)
    app.connect("html-collect-pages", linked_files)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
