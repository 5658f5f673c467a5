"""Ranks: real processes that meet as torchrun's do."""

import functools
import importlib.util
import json
import runpy
import sys
from pathlib import Path

import pytest

from launched import environment, free_port

HERE = Path(__file__).parent


def beside(name):
    """A module of this folder, which is not on the path."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="session")
def comparing():
    """What two runs have that differs."""
    return beside("comparing")


@pytest.fixture(scope="session")
def training():
    """The runs."""
    sys.path.insert(0, str(HERE))
    try:
        return beside("training")
    finally:
        sys.path.remove(str(HERE))


@pytest.fixture(scope="session")
def mutants():
    """Planted mistakes."""
    return beside("mutants")


@pytest.fixture(scope="session")
def launch(forked):
    """``launch(size, script, *words)`` starts a script of this folder, or ``heedful``, in ranks. Returns processes."""

    def start(size, script, *words, per_rank=None, cwds=None, port=None, **variables):
        port = port or free_port()

        def work(rank):
            sys.argv = [script, *(str(word).replace("{rank}", str(rank)) for word in words)]
            if script.endswith(".py"):
                sys.path.insert(0, str(HERE))
                runpy.run_path(str(HERE / script), run_name="__main__")
            else:
                runpy.run_module(script, run_name="__main__")

        return [
            forked(
                functools.partial(work, rank),
                cwd=None if cwds is None else cwds[rank],
                env=environment(rank, size, port) | variables | (per_rank or {}).get(rank, {}),
            )
            for rank in range(size)
        ]

    return start


@pytest.fixture(scope="session")
def finished():
    """``finished(processes)`` is the exit status of each rank and what it said on standard error."""

    def of(processes, timeout=600):
        try:
            said = [process.communicate(timeout=timeout)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        return [process.returncode for process in processes], said

    return of


@pytest.fixture(scope="session")
def inputs(tmp_path_factory, forked, training):
    """``inputs(decoder)`` is a folder with what `training.py` trains on, made once."""
    made = {}

    def of(decoder="llama"):
        if decoder not in made:
            made[decoder] = tmp_path_factory.mktemp("输入")
            process = forked(functools.partial(training.make_inputs, decoder), cwd=made[decoder])
            said = process.communicate(timeout=300)[1]
            assert process.returncode == 0, said[-4000:]
        return made[decoder]

    return of


@pytest.fixture(scope="session")
def results(launch):
    """``results(size, script)`` is what the script printed last in each rank, read as JSON."""

    def of(size, script, *words, timeout=900, **variables):
        found = []
        processes = launch(size, script, *words, **variables)
        try:
            for process in processes:
                out, err = process.communicate(timeout=timeout)
                assert process.returncode == 0, err[-4000:]
                found.append(json.loads(out.splitlines()[-1]))
        finally:
            for process in processes:
                process.kill()
        return found

    return of
