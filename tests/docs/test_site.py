"""The site without building it: every page is below a tab that links to it, every public name is in the reference, docstrings
become what Sphinx reads, and dead links are found. `python docs/build.py` builds it, and tests all the rest."""

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import heedful

DOCS = Path(__file__).parents[2] / "docs"
TABS = ("start", "course", "guides", "reference", "inside")


@pytest.fixture(scope="module", autouse=True)
def _modules_of_the_site():
    """docs/ and docs/_ext are scripts beside the pages, not packages."""
    sys.path[:0] = [str(DOCS), str(DOCS / "_ext")]
    yield
    del sys.path[:2]


def children(page):
    """The pages of a page's toctrees; the lists of settings are made when the site is built."""
    if page in ("settings", "peers"):
        return
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```\{toctree\}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line and not line.startswith(":"):
                name = re.sub(r".*<(.+)>", r"\1", line)
                found = [path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.glob(f"{name}.md")]
                yield from found if "*" in name else [name]


def below(page):
    return {page, *(name for child in children(page) for name in below(child))}


def test_every_page_is_below_one_tab():
    assert tuple(children("index")) == TABS
    names = [name for tab in TABS for name in below(tab)]
    assert len(names) == len(set(names))
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    assert pages - set(names) - {name for name in pages if name.startswith("course/")} <= {"index"}


def test_every_public_name_is_in_the_reference():
    pages = (
        "".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("api/*.md")))
        + (DOCS / "errors.md").read_text()
    )
    lists = [line.split() for line in re.findall(r"^\.\. public:: (.+)$", pages, flags=re.MULTILINE)]
    documented = {
        name
        for module, *names in lists
        if module == "heedful" or not names
        for name in names or importlib.import_module(module).__all__
    }
    assert set(heedful.__all__) - {"core", "plot", "course"} | set(heedful.core.__all__) == documented
    assert all(len(names) == len(set(names)) for _, *names in lists)


DOCSTRING = """Discount *before* r_t | a * b (Ouyang et al. 2022, eq. 2), see `gae`.

    r_t = -kl_coef * kl_t

Args:
    rewards: of each token,
        ``[batch, time]``.
    gamma, lam: factors.

Returns rewards, zero outside the mask. Raises ValueError if a row is empty.
""".splitlines()
RESTRUCTURED = r"""Discount *before* r_t \| a \* b (Ouyang et al. 2022, eq. 2), see `gae`.

.. code-block:: text

       r_t = -kl_coef * kl_t

:param rewards: of each token,
    ``[batch, time]``.
:param gamma: factors.
:param lam: factors.
:returns: rewards, zero outside the mask.
:raises ValueError: if a row is empty.
""".splitlines()


def test_a_docstring_becomes_what_sphinx_reads():
    docstrings = importlib.import_module("docstrings")
    assert [line.rstrip() for line in docstrings.restructured(DOCSTRING)] == [*RESTRUCTURED, ""]


def test_a_chinese_page_has_no_english_words_of_the_theme():
    """Each word that a template of the theme looks up is Chinese on a Chinese page, and as it was on an English one."""
    theme = Path(pytest.importorskip("pydata_sphinx_theme").__file__).parent / "theme"
    chinese = pytest.importorskip("sphinx") and importlib.import_module("lessons")
    templates = "".join(path.read_text(encoding="utf-8") for path in sorted(theme.rglob("*.html")))
    words = set(re.findall(r"""_\((?:"([^"]+)"|'([^']+)')\)""", templates))
    assert ("On this page", "") in words or ("", "On this page") in words
    context = {"body": '<a title="Link to this heading">#</a>', "theme_search_bar_text": "Search the docs ..."}
    chinese.use_chinese(context)
    for word in (double or single for double, single in words):
        assert re.search("[\u4e00-\u9fff]", context["_"](word)), word
    assert context["gettext"]("© Copyright %(copyright)s.") % {"copyright": "heedful"} == "© heedful"
    assert not re.search("Link|Search", context["body"] + context["theme_search_bar_text"])


@pytest.mark.parametrize(("page", "is_chinese"), [("course/zh/05_gae", True), ("start.zh", True), ("start", False)])
def test_only_chinese_pages_get_chinese_words(page, is_chinese):
    pytest.importorskip("sphinx")
    app = SimpleNamespace(env=SimpleNamespace(found_docs=set()))
    context = {"body": "", "theme_search_bar_text": ""}
    importlib.import_module("lessons").add_to_context(app, page, "page.html", context, None)
    assert context["language"] == ("zh" if is_chinese else "en")
    assert ("_" in context) is is_chinese


def test_dead_links_and_unreachable_pages_are_found(tmp_path):
    pages = {
        "index": '<a href="start.html">Start</a>',
        "start": '<h1 id="top">Start</h1><a href="a/one.html#here">one</a><a href="https://example.org">far</a>',
        "a/one": '<p id="here"><a href="../start.html#gone">start</a><img src="two.png"><a href="../../etc">up</a></p>',
        "lost": "nobody links here",
    }
    for name, body in pages.items():
        path = tmp_path / f"{name}.html"
        path.parent.mkdir(exist_ok=True)
        path.write_text(body, encoding="utf-8")
    count, found = importlib.import_module("check").problems(tmp_path, ("start",))
    assert count == 4
    assert found == [
        "a/one.html: ../start.html#gone leads to no such place on start.html",
        "a/one.html: two.png leads to no file",
        "a/one.html: ../../etc is outside the site",
        "lost.html: no tab leads to it",
    ]


@pytest.mark.exhaustive
def test_the_page_on_your_own_model_runs(tmp_path, monkeypatch, capsys):
    """Its programs, with few steps."""
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "own-model.md").read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL))
    small = (
        blocks.replace("range(10)", "range(4)")
        .replace("epochs=20", "max_steps=1")
        .replace("tokens=16", "tokens=2")
        .replace("steps=15", "steps=1, rollout_batch_size=4, minibatch_size=4")
    )
    assert small != blocks
    exec(compile(small, "own-model.md", "exec"), {})
    assert sum(line.startswith("[") for line in capsys.readouterr().out.splitlines()) == 3
