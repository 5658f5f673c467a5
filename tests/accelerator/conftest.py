"""Tests of this folder run in a copy of the process, because a device stays known to torch until the process ends."""

import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import pretend_device


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    for name in ("heedful.faults", "torch._dynamo"):  # what every copy would load anew, half a second each time
        importlib.import_module(name)
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    def work():
        pretend_device.install()
        pyfuncitem.obj(**arguments)

    process = pyfuncitem._request.getfixturevalue("forked")(work)
    out, err = process.communicate(timeout=1800)
    print(out, err)
    if process.returncode:
        pytest.fail(err, pytrace=False)
    return True
