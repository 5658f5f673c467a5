"""The lessons, found by the names of their files; torch-free."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from heedful.errors import ConfigError

LESSONS = Path(__file__).parent / "lessons"
Language = Literal["en", "zh"]
SECTIONS: dict[Language, tuple[str, ...]] = {
    "en": (
        "What you will see",
        "The formula",
        "The code",
        "A picture",
        "An experiment",
        "Exercises",
        "What goes wrong in practice",
    ),
    "zh": ("你将看到什么", "公式", "代码", "图", "实验", "练习", "实践中会出什么问题"),
}
"""The second-level headings of every lesson, in order; a colon may add to one."""
QUICK = "HEEDFUL_COURSE_QUICK"


def is_quick() -> bool:
    """Whether lessons run in their quick form: the environment variable HEEDFUL_COURSE_QUICK is 1."""
    return os.environ.get(QUICK) == "1"


def steps(full: int) -> int:
    """The number of steps to take: ``full``, or 2 in the quick form."""
    return 2 if is_quick() else full


@dataclass(frozen=True)
class Lesson:
    """A lesson in one language."""

    number: int
    path: Path

    @property
    def name(self) -> str:
        """The name of its file without the ending, such as ``05_gae``."""
        return self.path.stem

    @property
    def copy(self) -> Path:
        """Its notebook in the current folder: ``05_gae.ipynb``, and ``05_gae.zh.ipynb`` in Chinese."""
        language = self.path.parent.name
        return Path(f"{self.name}.ipynb" if language == "en" else f"{self.name}.{language}.ipynb")

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def title(self) -> str:
        """Its first heading."""
        found = re.search(r"^# (.+)$", self.text, flags=re.MULTILINE)
        return found[1] if found else self.name


def lessons(language: Language = "en") -> list[Lesson]:
    """Every lesson, by number."""
    return [Lesson(int(path.name[:2]), path) for path in sorted((LESSONS / language).glob("[0-9][0-9]_*.md"))]


def lesson(number: int, language: Language = "en") -> Lesson:
    """The lesson of this number. Raises ConfigError if there is none."""
    found = {one.number: one for one in lessons(language)}
    if number not in found:
        raise ConfigError(
            f"there is no lesson {number}; there are {', '.join(map(str, found))}: heedful course lists them"
        )
    return found[number]


LANGUAGES = get_args(Language)
