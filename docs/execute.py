"""Run lessons for the site, one after another in one folder, so that the small models they share are made once."""

import os
import sys

from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from jupyter_cache.executors.utils import single_nb_execution
from myst_nb.core.config import NbParserConfig
from myst_nb.core.read import create_nb_reader
from myst_parser.config.main import MdParserConfig

LONGEST_CELL = 600


def run(lessons, cache_folder, work):
    """Run each lesson whose code has no outputs in the cache yet, and keep them there, where MyST-NB looks them up.

    Both languages of a lesson have the same code, so one of them is enough. A cell that fails ends the program.
    """
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # a progress bar that says where it is installed
    cache = get_cache(str(cache_folder))
    work.mkdir(parents=True, exist_ok=True)
    for lesson in lessons:
        reader = create_nb_reader(str(lesson), MdParserConfig(), NbParserConfig(), lesson.read_text(encoding="utf-8"))
        notebook = reader.read(lesson.read_text(encoding="utf-8"))
        if not is_kept(cache, notebook):
            done = single_nb_execution(
                notebook, cwd=str(work), timeout=LONGEST_CELL, allow_errors=False, meta_override=True
            )
            if done.err is not None:
                sys.exit(f"{lesson.name}: {done.err}")
            kept = CacheBundleIn(notebook, str(lesson), data={"execution_seconds": done.time})
            cache.cache_notebook_bundle(kept, check_validity=False, overwrite=True)
            print(f"{lesson.stem}: {done.time:.0f} s", flush=True)


def is_kept(cache, notebook):
    """Whether the outputs of a notebook with this code are in the cache."""
    try:
        cache.match_cache_notebook(notebook)
    except KeyError:
        return False
    return True
