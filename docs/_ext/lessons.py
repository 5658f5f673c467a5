"""Lessons: each as a notebook to download, and in two languages that link to one another; Chinese pages of the theme.

Sphinx builds a site in one language, so the templates of the theme are English. On a Chinese page their ``_`` and ``gettext``
look words up in `CHINESE` instead; a test compares it with the templates.
"""

import re
from pathlib import Path

import jupytext
from sphinx.util.docutils import SphinxDirective
from sphinx.util.osutil import ensuredir

LANGUAGES = {"en": "English", "zh": "中文"}
LESSON = re.compile(r"course/(en|zh)/(.+)")
CHINESE = {
    "© Copyright %(copyright)s.": "© %(copyright)s",
    "Announcement": "公告",
    "Back to top": "回到顶部",
    "Breadcrumb": "当前位置",
    "Collapse Sidebar": "收起侧栏",
    "Color mode": "颜色模式",
    "Dark": "深色",
    "Expand Sidebar": "展开侧栏",
    "General Index": "总索引",
    "Global Module Index": "全局模块索引",
    "Home": "首页",
    "Index": "索引",
    "Indices": "索引",
    "Light": "浅色",
    "Link to this heading": "本节链接",
    "next": "下一页",
    "next page": "下一页",
    "On this page": "本页目录",
    "previous": "上一页",
    "previous page": "上一页",
    "Python Module Index": "Python 模块索引",
    "Search": "搜索",
    "Search the docs ...": "搜索文档……",
    "Section Navigation": "章节导航",
    "Show Source": "查看源文件",
    "Site navigation": "网站导航",
    "Skip to main content": "跳到正文",
    "System Settings": "跟随系统",
    "Version warning": "版本提示",
}
"""Words of the theme, and of Sphinx's own templates."""


def add_to_context(app, pagename, templatename, context, doctree):
    """Set the language of a page; for a lesson also its notebook, and the same lesson in the other language."""
    lesson = LESSON.fullmatch(pagename)
    context["language"] = "zh" if pagename.endswith(".zh") else "en"
    if lesson:
        context["language"] = lesson[1]
        context["notebook"] = f"{lesson[2]}.ipynb"
        code = "en" if lesson[1] == "zh" else "zh"
        if f"course/{code}/{lesson[2]}" in app.env.found_docs:
            context["other_language"] = {"name": LANGUAGES[code], "code": code, "page": f"course/{code}/{lesson[2]}"}
    if context["language"] == "zh":
        use_chinese(context)


def use_chinese(context):
    """Make the theme's words Chinese on one page."""
    context["_"] = context["gettext"] = lambda word: CHINESE.get(word, word)
    context["theme_search_bar_text"] = CHINESE["Search the docs ..."]
    english = "Link to this heading"  # written before the templates are filled
    context["body"] = context.get("body", "").replace(f'title="{english}"', f'title="{CHINESE[english]}"')


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
