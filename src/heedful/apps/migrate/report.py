"""The report of a migration: a page of Markdown."""

from collections.abc import Iterable, Sequence

from heedful.apps.migrate.translate import Fate, Row, Translation

HEADINGS: dict[Fate, tuple[str, str]] = {
    "question": (
        "To be answered",
        "Only you can tell. Replace the `?` in the YAML file, or leave the line out.",
    ),
    "lost": ("Not kept", "heedful has nothing of the kind, or not in this form; the result may differ."),
    "differs": ("Kept, with another meaning", "Written; the last column says what is different."),
    "kept": ("Kept", "The same value and the same meaning."),
    "default": (
        "Defaults that are written",
        "Your file does not set them, and heedful's defaults differ from the library's.",
    ),
    "none": ("Without effect on the numbers", "Left out."),
}


def report(title: str, done: Sequence[str], runs: Sequence[tuple[str, Translation]]) -> str:
    """The page.

    Args:
        title: what was read.
        done: what was written and how to run it, a paragraph each.
        runs: each translated trainer, with its heading.
    """
    lines = [f"# {title}", "", *_paragraphs(done)]
    for heading, run in runs:
        version = f"version {run.version} (the newest with most of the settings, unless --version says another)"
        lines += [f"## {heading}", "", f"Read as {run.peer.title}, {version}.", ""]
        for fate, (name, meaning) in HEADINGS.items():
            rows = [row for row in run.rows if row.fate == fate]
            if rows:
                lines += [f"### {name}", "", meaning, "", *_table(rows), ""]
        differs = run.peer.trainers[run.trainer].differs
        if differs:
            lines += ["### What differs without a setting", "", *(f"- {one}" for one in differs), ""]
    return "\n".join(lines)


def _paragraphs(texts: Iterable[str]) -> Iterable[str]:
    for text in texts:
        yield from (text, "")


def _table(rows: Sequence[Row]) -> Iterable[str]:
    yield "| line | setting | value | heedful | what to know |"
    yield "|---|---|---|---|---|"
    for row in rows:
        cells = (str(row.line or ""), f"`{row.name}`", _code(row.value), _code(row.ours), _cell(row.note))
        yield f"| {' | '.join(cells)} |"


def _code(text: str, limit: int = 100) -> str:
    short = text if len(text) <= limit else f"{text[:limit]} ..."
    return f"`{_cell(short).replace('`', chr(39))}`" if text else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
