"""Lessons: each as a notebook to download, and each in two languages that lead to one another."""

import re
from pathlib import Path

import jupytext
from sphinx.util.docutils import SphinxDirective
from sphinx.util.osutil import ensuredir

LANGUAGES = {"en": "English", "zh": "中文"}
LESSON = re.compile(r"course/(en|zh)/(.+)")


def add_to_context(app, pagename, templatename, context, doctree):
    """The language of a page; of a lesson also its notebook, and the same lesson in the other language."""
    lesson = LESSON.fullmatch(pagename)
    context["language"] = "zh" if pagename.endswith(".zh") else "en"
    if lesson:
        context["language"] = lesson[1]
        context["notebook"] = f"{lesson[2]}.ipynb"
        code = "en" if lesson[1] == "zh" else "zh"
        if f"course/{code}/{lesson[2]}" in app.env.found_docs:
            context["other_language"] = {"name": LANGUAGES[code], "code": code, "page": f"course/{code}/{lesson[2]}"}


def write_notebooks(app, exception):
    """Write every lesson as a notebook beside its page."""
    if exception or app.builder.format != "html":
        return
    for name in filter(LESSON.fullmatch, app.env.found_docs):
        target = Path(app.outdir, f"{name}.ipynb")
        ensuredir(target.parent)
        jupytext.write(jupytext.read(Path(app.env.doc2path(name)), fmt="md:myst"), target, fmt="ipynb")


def title(path):
    """The first heading of a lesson."""
    return re.search(r"^# (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1]


class Lessons(SphinxDirective):
    """A table of the lessons: their number, and their title in each language."""

    def run(self):
        rows = ["| | English | 中文 |", "|---|---|---|"]
        for path in sorted(Path(self.env.srcdir, "course", "en").glob("*.md")):
            lessons = {language: Path(self.env.srcdir, "course", language, path.name) for language in LANGUAGES}
            cells = [
                f"[{title(found)}](page:course/{code}/{path.stem})" if found.exists() else ""
                for code, found in lessons.items()
            ]
            rows.append(" | ".join([f"| {int(path.name[:2])}", *cells]) + " |")
        return self.parse_text_to_nodes("\n".join(rows))


def setup(app):
    app.add_directive("lessons", Lessons)
    app.connect("html-page-context", add_to_context)
    app.connect("build-finished", write_notebooks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
