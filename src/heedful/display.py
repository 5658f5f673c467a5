"""Show the progress of a run to a person: a progress bar with the main numbers, tables of samples, notes.

In a notebook the bar and the tables are HTML: rich's bar needs ipywidgets there, and its tables are drawn with characters.
"""

import contextlib
import errno
import html
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text as RichText

from heedful.redact import redact_printed

PLAIN_LINES = 20
"""How many progress lines a run prints if standard error is not a terminal."""
COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and line feed, bidirectional overrides, and lone surrogates."""


class Screen(Console):
    """A console that stops printing when its reader is gone, as after ``2>&1 | head``, so that the run continues."""

    def _write_buffer(self) -> None:
        try:
            super()._write_buffer()
        except OSError as error:
            if error.errno == errno.EIO:  # a terminal that was closed
                raise BrokenPipeError from error
            raise

    def on_broken_pipe(self) -> None:
        """Discard all further output."""
        self.quiet = True
        with contextlib.suppress(OSError, ValueError):  # a stream that is no file has no number
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


class NotebookBar:
    """A progress bar in the output of a notebook's cell, replaced in place."""

    def __init__(self, title: str, total_steps: int) -> None:
        self.title, self.total_steps, self._started = title, total_steps, time.monotonic()
        self._handle: Any = None

    def update(self, step: int, numbers: str) -> None:
        """Show the bar at a step."""
        from IPython.display import HTML, display

        seconds = time.monotonic() - self._started
        left = f", {_clock(seconds / step * (self.total_steps - step))} left" if 0 < step < self.total_steps else ""
        bar = HTML(
            f"<b>{html.escape(self.title)}</b> <progress value='{step}' max='{self.total_steps}'></progress> "
            f"{step}/{self.total_steps} {_clock(seconds)}{left}&ensp;{html.escape(numbers)}"
        )
        if self._handle is None:
            self._handle = display(bar, display_id=True)
        else:
            self._handle.update(bar)


class Display:
    """Shows a run's progress: a live bar on a terminal (standard error) or in a notebook, plain lines otherwise."""

    def __init__(self, title: str, total_steps: int, shown: Mapping[str, str]) -> None:
        """Make a display; it starts when it is entered as a context.

        Args:
            title: the label of the bar and of plain lines.
            total_steps: the number of steps at which the run ends.
            shown: maps names of metrics to the short labels under which they are shown.
        """
        self.console = Screen(stderr=True, soft_wrap=not _is_terminal(), quiet=_silent)
        self.title = title
        self.total_steps = total_steps
        self.shown = shown
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=total_steps, numbers="")
        self._notebook_bar = NotebookBar(title, total_steps) if self.console.is_jupyter and not _silent else None

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step."""
        numbers = "  ".join(f"{label} {metrics[name]:.4g}" for name, label in self.shown.items() if name in metrics)
        self._progress.update(self._task, completed=step, numbers=numbers)
        every = max(1, self.total_steps // PLAIN_LINES)
        if self._notebook_bar is not None:
            self._notebook_bar.update(step, numbers)
        elif not self.console.is_terminal and (step % every == 0 or step == self.total_steps):
            self.note(f"{self.title} {step}/{self.total_steps}  {numbers}")

    def note(self, text: str) -> None:
        """Print a line of text above the bar."""
        self.console.print(harmless(_worded(text)), markup=False, highlight=False)

    def table(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print a table of samples above the bar."""
        print_table(self.console, title, rows)

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


_silent = False


def fall_silent() -> None:
    """Show nothing more from this process: another process of the same run shows its progress."""
    global _silent  # noqa: PLW0603  one screen per process
    _silent = True


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Show nothing of the runs inside, neither bars nor notes."""
    global _silent  # noqa: PLW0603  one screen per process
    before, _silent = _silent, True
    try:
        yield
    finally:
        _silent = before


_worded: Callable[[str], str] = str


@contextlib.contextmanager
def worded(words: Callable[[str], str]) -> Iterator[None]:
    """Lines of text inside go through a function, such as one that names objects as they were passed."""
    global _worded  # noqa: PLW0603  one screen per process
    before, _worded = _worded, words
    try:
        yield
    finally:
        _worded = before


def say(text: str) -> None:
    """Print a line on standard error from anywhere; beside a live bar it comes above it."""
    if _silent:
        return
    with contextlib.suppress(OSError):  # nobody reads it: a terminal that was closed, a pipe's end
        print(f"heedful: {_worded(text)}", file=sys.stderr, flush=True)


def print_table(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of samples. Line breaks and control characters are shown as escapes, long texts end in an ellipsis.

    Columns of numbers are as narrow as possible, with one word per line in their headings; texts share the rest of the width.

    Args:
        console: where to print.
        title: the text above the table.
        rows: at least one row; all rows have the same columns, by their headings.
    """
    hidden = [
        {name: redact_printed(value) if isinstance(value, str) else value for name, value in row.items()}
        for row in rows
    ]  # before a secret is broken into lines
    if console.is_jupyter:
        from IPython.display import HTML, display

        display(HTML(_html_table(title, hidden)))
        return
    table = Table(title=title, title_justify="left", show_lines=True)
    for name, value in rows[0].items():
        if isinstance(value, float | int | tuple):
            table.add_column(RichText(name.replace(" ", "\n")), justify="right", no_wrap=True)
        else:
            table.add_column(RichText(name), overflow="fold", ratio=1)
    for row in hidden:
        table.add_row(*(RichText(shown(value)) for value in row.values()))
    console.print(table, soft_wrap=False)


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number of things in words: 1 prompt, 1,622 prompts."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _html_table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A table for a notebook, in which texts have their line breaks."""
    style = "white-space: pre-wrap; text-align: left"
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    body = "".join(
        f"<tr>{''.join(f'<td style={style!r}>{html.escape(shown(value))}</td>' for value in row.values())}</tr>"
        for row in rows
    )
    return f"<table><caption>{html.escape(title)}</caption><tr>{head}</tr>{body}</table>"


def _clock(seconds: float) -> str:
    """Seconds as hours, minutes and seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def harmless(text: str) -> str:
    """Escape the control characters of an untrusted text, except line feeds and tabs, so that it is safe on a terminal."""
    return COMMANDS.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def shown(value: Any, limit: int = 300) -> str:
    """Return a value as text for a table, with at most ``limit`` characters."""
    if isinstance(value, float):
        return f"{value:z.2f}"
    if isinstance(value, tuple):  # an interval
        return " to ".join(f"{end:z.2f}" for end in value)
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _is_terminal() -> bool:
    return Console(stderr=True).is_terminal
