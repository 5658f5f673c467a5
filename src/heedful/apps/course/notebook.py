"""A student's notebook: its cells, which of them an exercise needs, and a kernel of Jupyter that runs those."""

import ast
import os
import queue
import re
import subprocess
import symtable
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from heedful.errors import ConfigError
from heedful.files import read_object

RESTART_HINT = "start the lesson again with --overwrite"
LINE = re.compile(r"Cell\s*In\[\d+\], line (\d+)")
"""Where IPython's traceback says which line of a cell it is about."""
COLOUR = re.compile(r"\x1b\[[\d;]*m")


@dataclass(frozen=True)
class Cell:
    """A cell of code. Its number counts all cells of the notebook from 1."""

    number: int
    source: str

    @cached_property
    def names(self) -> "Names":
        """The names that its code reads, binds and changes; none if it is not Python."""
        from IPython.core.inputtransformer2 import TransformerManager

        magic = re.match(r"\s*%%(\w+).*\n", self.source)  # of %%time the other lines are Python
        source = TransformerManager().transform_cell(self.source[magic.end() :] if magic else self.source)
        try:
            return Names.of(source)
        except (SyntaxError, ValueError, RecursionError):
            return Names()


@dataclass(frozen=True)
class Names:
    """Global names of a cell."""

    read: frozenset[str] = frozenset()
    """Without those that the cell itself imports or defines."""
    bound: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()
    """What a statement like ``name.key = 1``, ``name["key"] = 1`` or ``name.append(1)`` may change; no imported modules."""
    imported: frozenset[str] = frozenset()
    binds_unknown: bool = False
    """``from module import *`` or ``%run file.py``."""

    @classmethod
    def of(cls, source: str) -> Self:
        """The names of Python code. Raises SyntaxError."""
        top = symtable.symtable(source, "cell", "exec")
        symbols = top.get_symbols()
        read = {one.get_name() for one in symbols if one.is_referenced()}
        inner = list(top.get_children())
        while inner:
            table = inner.pop()
            read |= {one.get_name() for one in table.get_symbols() if one.is_global() and one.is_referenced()}
            inner += table.get_children()
        changed, tree = set[str](), ast.parse(source)
        for statement in _statements(tree.body):
            targets: list[ast.expr] = statement.targets if isinstance(statement, ast.Assign) else []
            if isinstance(statement, ast.AugAssign):
                targets = [statement.target]
                read |= {statement.target.id} if isinstance(statement.target, ast.Name) else set()
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                targets = [statement.value.func]
            changed |= {root for one in targets if (root := _root(one))}
        imported = frozenset(one.get_name() for one in symbols if one.is_imported())
        defined = frozenset(one.get_name() for one in symbols if one.is_namespace())
        return cls(
            frozenset(read) - imported - defined,
            imported | defined | {one.get_name() for one in symbols if one.is_assigned()},
            frozenset(changed),
            imported,
            any(isinstance(one, ast.ImportFrom) and one.names[0].name == "*" for one in tree.body)
            or "run_line_magic('run'" in source,
        )


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements and those in their blocks, but not in functions and classes."""
    for statement in body:
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _statements([one for one in ast.iter_child_nodes(statement) if isinstance(one, ast.stmt)])


def _root(target: ast.expr) -> str:
    """``name`` of ``name.key`` and ``name[key]``, or nothing."""
    inside = False
    while isinstance(target, ast.Attribute | ast.Subscript):
        target, inside = target.value, True
    return target.id if inside and isinstance(target, ast.Name) else ""


def code_cells(copy: Path) -> list[Cell]:
    """The cells with code of a notebook. Raises ConfigError if the file is no notebook, or has no such cell."""
    content = read_object(copy, RESTART_HINT, error=ConfigError, needs=["cells"])
    version = content.get("nbformat")
    if not isinstance(version, int) or version < 4:
        raise ConfigError(
            f"{copy}: its nbformat is {version!r}, and must be 4 (Jupyter and VS Code write it); {RESTART_HINT}"
        )
    if not isinstance(content["cells"], list):
        raise ConfigError(f"{copy}: its cells must be a list; {RESTART_HINT}")
    found = []
    for number, cell in enumerate(content["cells"], start=1):
        where = f"{copy}: cell {number}"
        if not isinstance(cell, dict) or not isinstance(cell.get("cell_type"), str):
            raise ConfigError(f"{where} has no cell_type; {RESTART_HINT}")
        if cell["cell_type"] != "code":
            continue
        lines = cell.get("source")
        lines = [lines] if isinstance(lines, str) else lines
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise ConfigError(f"{where} has no source, which must be a text or a list of texts; {RESTART_HINT}")
        source = "".join(lines)
        try:
            source.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{where} holds half a character ({error.object[error.start]!r}); {RESTART_HINT}"
            ) from error
        found.append(Cell(number, source))
    if not found:
        raise ConfigError(f"{copy} has no cell with code; {RESTART_HINT}")
    return found


def needed(cells: list[Cell], exercise: Cell) -> list[Cell]:
    """The cells to run for an exercise, in order: the first, those that bind or change a name it reads, and itself.

    The others are left out, because those of a lesson train for minutes.
    """
    modules = frozenset[str]().union(*(cell.names.imported for cell in cells))
    chosen, wanted = [exercise], set(exercise.names.read)
    for cell in reversed(cells[: cells.index(exercise)]):
        names = cell.names
        if cell is cells[0] or names.binds_unknown or wanted & (names.bound | (names.changed - modules)):
            chosen.insert(0, cell)
            wanted = (wanted - names.bound) | names.read
    return chosen


class Kernel:
    """A Jupyter kernel of this Python, in the current folder; ``with Kernel(60, {}) as kernel: kernel.run(cell)``.

    Args:
        seconds: longest time for a cell.
        environment: variables for the kernel's process, besides those of this one.
    """

    def __init__(self, seconds: float, environment: dict[str, str]) -> None:
        self.seconds = seconds
        self.environment = environment
        self._failures: dict[int, str] = {}
        """How each cell that ran failed, or nothing, by its number."""
        self._manager: Any = None
        self._client: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def run(self, cell: Cell) -> str:
        """Run a cell, if it has not run yet. Returns how it failed in one line, or ``""``."""
        if cell.number not in self._failures:
            self._failures[cell.number] = self._run(cell)
        return self._failures[cell.number]

    def _run(self, cell: Cell) -> str:
        if self._client is None:
            self._start()
        asked = self._client.execute(cell.source, store_history=True, allow_stdin=False, stop_on_error=False)
        deadline = time.monotonic() + self.seconds
        while True:
            try:
                reply = self._client.get_shell_msg(timeout=0.2)
            except queue.Empty:
                is_alive = self._manager.is_alive()
                if is_alive and time.monotonic() < deadline:
                    continue
                self._stop()
                happened = f"ran longer than {self.seconds:g} s and was stopped" if is_alive else "ended Python"
                return f"cell {cell.number} {happened}"
            if reply["parent_header"].get("msg_id") == asked:
                break
        content = reply["content"]
        if content["status"] == "ok":
            return ""
        line = LINE.search(COLOUR.sub("", "\n".join(content["traceback"])))
        where = f" (line {line[1]} of the cell)" if line else ""
        if content["ename"] == "StdinNotImplementedError":
            return f"cell {cell.number} asks for input, which nobody can give in a check{where}"
        said = re.sub(r" \(\d+\.py, line \d+\)$", "", " ".join(f"{content['ename']}: {content['evalue']}".split()))
        return f"cell {cell.number} stopped with {said}{where}"

    def _start(self) -> None:
        from jupyter_client.kernelspec import KernelSpecManager
        from jupyter_client.manager import KernelManager

        # without folders of kernels, "python3" is this Python, whatever a person has registered by that name
        self._manager = KernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
        self._manager.start_kernel(
            env=os.environ | self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=120)

    def _stop(self) -> None:
        if self._client is not None:
            self._client.stop_channels()
            self._manager.shutdown_kernel(now=True)
        self._client = self._manager = None
        self._failures = {number: failure for number, failure in self._failures.items() if failure}
