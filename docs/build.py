"""Build the site into build/site, offline. A warning, a link or an anchor that leads nowhere, and a page that no tab reaches
are errors.

    python docs/build.py             # lessons without outputs
    python docs/build.py --execute   # runs every lesson; outputs are kept in build/lessons until its code changes

Needs `pip install -e ".[docs]"`.
"""

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from check import problems
from sphinx.cmd.build import main as sphinx_build

DOCS = Path(__file__).resolve().parent
BUILD = DOCS.parent / "build"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--execute", action="store_true", help="run the lessons and show their outputs")
    parser.add_argument("--output", type=Path, default=BUILD / "site", help="folder of the site (default: build/site)")
    given = parser.parse_args()
    began = time.perf_counter()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    shutil.rmtree(given.output, ignore_errors=True)
    options = ["-b", "html", "-q", "-E", "-W", "--keep-going", "-d", str(BUILD / "doctrees")]
    if given.execute:
        from execute import run

        run(sorted((DOCS / "course" / "en").glob("*.md")), BUILD / "lessons", BUILD / "lessons-run")
        options += ["-D", "nb_execution_mode=cache", "-D", f"nb_execution_cache_path={BUILD / 'lessons'}"]
    status = sphinx_build([*options, str(DOCS), str(given.output)])
    if status:
        return status
    pages, found = problems(given.output, tabs=("start", "course", "guides", "reference", "inside"))
    for problem in found:
        print(problem, file=sys.stderr)
    if found:
        return 1
    print(f"{pages} pages in {time.perf_counter() - began:.0f} s: {given.output / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
