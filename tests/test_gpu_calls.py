"""tests/test_gpu.py calls functions as they are, also where no GPU is there to run it."""

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest

PATH = Path(__file__).with_name("test_gpu.py")


@pytest.fixture(scope="module")
def names():
    """What the file's own names are, imported ones among them."""
    spec = importlib.util.spec_from_file_location("gpu_tests", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


def calls(text):
    """Every call of a plain name: the name, the line, how many arguments, names of arguments, whether others are unpacked."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            words = [keyword.arg for keyword in node.keywords]
            is_open = None in words or any(isinstance(one, ast.Starred) for one in node.args)
            yield node.func.id, node.lineno, len(node.args), [word for word in words if word is not None], is_open


def refused(text, names):
    """Calls that Python would refuse."""
    found = []
    for name, line, count, words, is_open in calls(text):
        callee = names.get(name)
        if callee is None or not getattr(callee, "__module__", "").startswith("heedful"):
            continue
        signature = inspect.signature(callee)
        try:
            (signature.bind_partial if is_open else signature.bind)(*[None] * count, **dict.fromkeys(words))
        except TypeError as error:
            found.append(f"{PATH.name}:{line}: {name}: {error}")
    return found


def test_every_call_fits_its_function(names):
    text = PATH.read_text(encoding="utf-8")
    assert len([1 for name, *_ in calls(text) if name in names]) > 50, "the walk is broken"
    assert refused(text, names) == []


def test_a_call_that_does_not_fit_would_be_noticed(names):
    """Negative control."""
    assert len(refused("sample(policy, prompts, options, micro_batch_size=10)", names)) == 1
    assert len(refused("sample(policy, prompts, options, micro_batch_size=10, **more)", names)) == 1
