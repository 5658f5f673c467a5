"""Shared parts of all pictures: colours for light and dark pages, fonts, saving."""

import functools
import re
import warnings
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib import font_manager
from matplotlib.artist import Artist
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from heedful.errors import ConfigError
from heedful.files import blocking_file

Colour = tuple[float, float, float]
DOTS_PER_INCH = 150
LATIN = "DejaVu Sans"
"""A font that comes with matplotlib."""
CJK = (
    "Noto Sans CJK SC",
    "Noto Sans SC",
    "Source Han Sans SC",
    "Noto Sans CJK JP",
    "PingFang SC",
    "Hiragino Sans GB",
    "Microsoft YaHei",
    "SimHei",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "Droid Sans Fallback",
)
"""Families with Chinese characters, the best first."""
PROGRAM = "heedful"
"""What pictures name as the program that drew them."""
CJK_FILES = re.compile(
    r"CJK|NotoSansSC|SourceHanSans|PingFang|Hiragino|msyh|simhei|wqy|DroidSansFallback", re.IGNORECASE
)
"""Names of their files."""
NO_CJK = (
    "No font for Chinese is installed, so its characters are drawn as codes such as \\u4f60. Install one (Debian and Ubuntu: "
    "apt install fonts-noto-cjk; others: Noto Sans SC from fonts.google.com) and start Python again."
)


class Picture(Figure):
    """A figure that a notebook shows as the value of a cell, even if pyplot was never loaded."""

    def _repr_png_(self) -> bytes:
        content = BytesIO()
        self.savefig(content, format="png", dpi=DOTS_PER_INCH)
        return content.getvalue()


class Theme(NamedTuple):
    """Colours for one page; colour-blind people can distinguish positive and negative."""

    page: Colour
    text: Colour
    muted: Colour
    """Colour of less important labels."""
    positive: Colour
    negative: Colour
    healthy: Colour
    """Colour of the band of healthy values."""

    def shade(self, value: float, limit: float) -> Colour:
        """Return the colour of a number: the page's at 0, the full colour of its sign at ``limit`` and beyond."""
        strength = min(abs(value) / limit, 1.0) if limit > 0 else float(value != 0)
        return mix(self.page, self.positive if value > 0 else self.negative, strength)

    def ink(self, behind: Colour) -> Colour:
        """Return the colour of a text on another colour: the text's or the page's, by contrast."""
        return max(self.text, self.page, key=lambda colour: contrast(colour, behind))


def current_theme() -> Theme:
    """The colours for the page of matplotlib's current style (``figure.facecolor``)."""
    page, text = to_rgb(mpl.rcParams["figure.facecolor"]), to_rgb(mpl.rcParams["text.color"])
    if luminance(page) > 0.5:
        positive, negative, healthy = to_rgb("#2b7bba"), to_rgb("#e0702a"), mix(page, to_rgb("#2e9e62"), 0.12)
    else:
        positive, negative, healthy = to_rgb("#5aa9e6"), to_rgb("#f08c4a"), mix(page, to_rgb("#4fc38a"), 0.25)
    return Theme(page, text, mix(page, text, 0.65), positive, negative, healthy)


def mix(one: Colour, other: Colour, share: float) -> Colour:
    """Return a colour between two; ``share`` is that of the second."""
    red, green, blue = (a + (b - a) * share for a, b in zip(one, other, strict=True))
    return red, green, blue


def luminance(colour: Colour) -> float:
    """Relative luminance (WCAG 2.1), from 0 (black) to 1 (white)."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Colour, other: Colour) -> float:
    """Contrast ratio (WCAG 2.1), from 1 to 21; text needs 4.5."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def picture(width: float, height: float, **options: Any) -> Picture:
    """Return an empty picture of a size in inches."""
    return Picture(figsize=(width, height), dpi=DOTS_PER_INCH, **options)


# Text ------------------------------------------------------------------------------------------------------------------


def families() -> list[str]:
    """Installed fonts, in search order."""
    installed = {font.name for font in font_manager.fontManager.ttflist}
    return [LATIN, *(name for name in CJK if name in installed)]


def drawable(text: str) -> str:
    """Replace characters without a font by codes.

    Warns once per process if a Chinese character is among them.
    """
    missing = _missing(text)
    if any("\u2e80" <= letter <= "\u9fff" or "\uf900" <= letter <= "\uffef" for letter in missing):
        look_for_chinese()
        missing = _missing(text)
    return "".join(letter.encode("unicode_escape").decode() if letter in missing else letter for letter in text)


def _missing(text: str) -> set[str]:
    fonts = [font_manager.get_font(font_manager.findfont(family)) for family in families()]
    return {letter for letter in text if not any(font.get_char_index(ord(letter)) for font in fonts)}


@functools.cache
def look_for_chinese() -> None:
    """Add Chinese fonts installed after matplotlib made its list of fonts. Warns if there are none."""
    for path in font_manager.findSystemFonts():
        if CJK_FILES.search(Path(path).name):
            font_manager.fontManager.addfont(path)
    if len(families()) == 1:
        warnings.warn(NO_CJK, UserWarning, stacklevel=4)


def as_text(artists: Iterable[Artist]) -> None:
    """Set fonts that have the texts' characters, and draw dollar signs literally, not as mathematics."""
    for artist in artists:
        if isinstance(artist, Text):
            artist.set_text(drawable(artist.get_text()))
            artist.set_fontfamily(families())
            artist.set_parse_math(False)


def text_width(text: str, size: float) -> float:
    """Return the drawn width of a text in points, for a font size in points."""
    font = font_manager.get_font([font_manager.findfont(family) for family in families()])
    font.set_size(size, 72)
    font.set_text(text)
    return font.get_width_height()[0] / 64


def format_number(value: float) -> str:
    """Format a number briefly: 0 without decimals, two decimals below 100, none from 100 on; nan and inf unchanged."""
    text = "0" if value == 0 else f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    return "0.00" if text == "-0.00" else text.replace("-", "−")


# Input and output --------------------------------------------------------------------------------------------------------


def floats(values: Any, name: str) -> list[float]:
    """Return a tensor, an array or a list as numbers, flattened. Raises ConfigError if there are none."""
    numbers = listed(values.flatten() if hasattr(values, "flatten") else values)
    if not numbers:
        raise ConfigError(f"{name} is empty; give at least one number")
    return [float(value) for value in numbers]


def listed(values: Any) -> list[Any]:
    """Return the numbers of a tensor, an array or a sequence as a list."""
    found: list[Any] = values.tolist() if hasattr(values, "tolist") else list(values)
    return found


FORMATS = (".png", ".svg", ".pdf")


def check_path(path: str | Path | None) -> None:
    """Raise ConfigError if no picture can be written there, or the ending is not that of a known format."""
    if path is None:
        return
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"path {path} is a folder; name a picture, such as {path / 'picture.png'}")
    if (blocking := blocking_file(path)) is not None:
        raise ConfigError(f"path {path} cannot be written: {blocking} is a file")
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"path {path} must end in .png, .svg or .pdf; got {path.suffix!r}")


def save(figure: Figure, path: str | Path | None) -> None:
    """Write a picture if there is a path. An existing file is replaced once the new one is complete.

    Raises ConfigError as `check_path`.
    """
    check_path(path)
    if path is None:
        return
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.partial{path.suffix}")
    key = "Software" if path.suffix.lower() == ".png" else "Creator"
    figure.savefig(temporary, dpi=DOTS_PER_INCH, facecolor=to_hex(figure.get_facecolor()), metadata={key: PROGRAM})
    temporary.replace(path)
