"""The demo's texts in English and Chinese (story.toml, story.zh.toml), and their line breaking."""

import os
import re
import tomllib
from importlib.resources import files
from typing import Any, Literal

from rich.cells import cell_len

STORIES: dict[str, dict[str, Any]] = {
    language: tomllib.loads((files("heedful.apps.demo") / name).read_text(encoding="utf-8"))
    for language, name in (("en", "story.toml"), ("zh", "story.zh.toml"))
}
"""By language."""
WIDE, OPENING, CLOSING = "[\u2e80-\uffef]", "[（“《]*", "[，。；：、！？）”》]*"
LINE_BREAK = re.compile(rf"(?<={WIDE})\n(?={WIDE})|(?<={CLOSING[:-1]})\n")
"""A line break without a space: between Chinese characters, and after their punctuation."""
PIECE = re.compile(rf"\s+|{OPENING}(?:{WIDE}|[^\s\u2e80-\uffef（“《]+){CLOSING}")
"""A unit without line breaks inside: a word or a Chinese character, with its punctuation."""


def language_of(setting: Literal["auto", "en", "zh"]) -> str:
    """The language of the demo's texts; ``auto`` takes it from the environment as gettext does, else English."""
    if setting != "auto":
        return setting
    names = (os.environ.get(name, "") for name in ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG"))
    return "zh" if next((name for name in names if name), "").startswith("zh") else "en"


def wrap(paragraph: str, width: int) -> str:
    """Break a paragraph into lines of at most ``width`` columns: at spaces, and between Chinese characters."""
    lines = [""]
    for piece in PIECE.findall(" ".join(LINE_BREAK.sub("", paragraph).split())):
        if cell_len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece if lines[-1] else piece.lstrip()
    return "\n".join(line.rstrip() for line in lines)
