"""Run lessons as a student does, one after another, and print the seconds of each. Needs heedful[course], installed.

python tests/course/run_lessons.py                 # the quick form of all: a few steps each
python tests/course/run_lessons.py --full 5 6      # the full form of two
python tests/course/run_lessons.py --outputs out 5 # with what each cell printed, and its pictures, in a folder

They share a folder for their models. The exit status is 1 if a cell stopped with an error.
"""

import argparse
import base64
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from heedful.apps.course.catalogue import LANGUAGES, QUICK, lessons

LONGEST_CELL = 600


def run(lesson, folder):
    """Execute a lesson in a folder. Returns the notebook, how it failed (or nothing), its seconds, and those of the CPU."""
    notebook = jupytext.reads(lesson.text, fmt="md:myst")
    client = NotebookClient(
        notebook,
        timeout=LONGEST_CELL,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=["--log-level=ERROR"],  # a kernel warns each time that it talks over TCP, on this machine
    )
    started, cpu, failure = time.monotonic(), cpu_seconds(), ""
    try:
        client.execute()
    except CellExecutionError as error:
        failure = str(error)
    return notebook, failure, time.monotonic() - started, cpu_seconds() - cpu


def cpu_seconds():
    """Of the kernels that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write_outputs(notebook, folder):
    """Write the notebook, what its cells printed as text, and its pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, folder / "executed.ipynb")
    lines = []
    for number, cell in enumerate(cell for cell in notebook.cells if cell.cell_type == "code"):
        lines += [f"--- cell {number}", cell.source, "---"]
        for index, output in enumerate(cell.get("outputs", [])):
            data = output.get("data", {})
            lines.append(output.get("text") or data.get("text/plain") or "\n".join(output.get("traceback", [])))
            if "image/png" in data:
                picture = folder / f"cell{number:02d}-{index}.png"
                picture.write_bytes(base64.b64decode(data["image/png"]))
    (folder / "outputs.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, help="lessons; all if none is named")
    parser.add_argument("--full", action="store_true", help="the full form, not the quick one")
    parser.add_argument("--language", choices=LANGUAGES, default="en")
    parser.add_argument("--outputs", type=Path, help="folder for what the cells printed and drew")
    parser.add_argument("--folder", type=Path, help="folder to run in, which keeps the models; a temporary one if none")
    options = parser.parse_args()
    os.environ[QUICK] = "0" if options.full else "1"
    found = [one for one in lessons(options.language) if not options.numbers or one.number in options.numbers]
    failed = sorted(set(options.numbers) - {one.number for one in found})
    for number in failed:
        print(f"there is no lesson {number}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for lesson in found:
            notebook, failure, seconds, cpu = run(lesson, folder)
            print(
                f"{lesson.name:<24}  {seconds:6.1f} s, {cpu:6.1f} s of CPU{'  FAILED' if failure else ''}", flush=True
            )
            if options.outputs:
                write_outputs(notebook, options.outputs / lesson.name)
            if failure:
                print(failure, file=sys.stderr)
                failed.append(lesson.number)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
