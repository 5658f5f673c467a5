"""The course's commands, its check of exercises, its models and data."""

import importlib.util
import json
from pathlib import Path

import pytest

from heedful import ConfigError, course
from heedful.apps.course import checks, commands
from heedful.data import read_prompts

LESSON = """---
jupytext:
  text_representation: {extension: .md, format_name: myst}
kernelspec: {display_name: Python 3, language: python, name: python3}
---
# 翻倍

```{code-cell} ipython3
from heedful import course
```

```{code-cell} ipython3
:tags: [exercise]
def double(x):
    \"\"\"Twice x.\"\"\"
    ...

course.check("97.1", double)
```

```{code-cell} ipython3
:tags: [exercise]
def negate(x):
    \"\"\"Minus x.\"\"\"
    ...

course.check("97.2", negate)
```
"""


@pytest.fixture
def lesson_97(course_of):
    """A course of one lesson, with two exercises, and the test's folder as the current one."""
    hidden = (
        "from heedful.apps.course.checks import same\n"
        "def check_1(answer):\n    same(answer(3), 6, 'double(3)')\n"
        "def check_2(answer):\n    same(answer(3), -3, 'negate(3)')\n"
    )
    return course_of(97, "double", LESSON, hidden)


def solve(copy, **bodies):
    """Write the bodies of functions into a notebook."""
    notebook = json.loads(copy.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        for name, body in bodies.items():
            if f"def {name}(" in source:
                cell["source"] = source.replace("    ...", body)
    copy.write_text(json.dumps(notebook), encoding="utf-8")


def test_the_lessons_are_listed(heedful, lesson_97):
    outcome = heedful("course")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.splitlines()[0] == " 97  翻倍"
    assert "heedful course start 1 writes the first" in outcome.out
    assert "heedful course start 1 --language zh writes the first" in heedful("course", "--language", "zh").out


def test_a_lesson_is_started_solved_and_checked_in_either_language(heedful, lesson_97):
    assert heedful("course", "start", "97").status == 0
    copy, chinese = lesson_97 / "97_double.ipynb", lesson_97 / "97_double.zh.ipynb"
    cells = json.loads(copy.read_text(encoding="utf-8"))["cells"]
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code", "code", "code"]
    assert cells[2]["metadata"]["tags"] == ["exercise"]
    started = heedful("course", "start", "97", "--language", "zh")
    assert started.status == 0
    assert "open 97_double.zh.ipynb" in started.out
    assert "97_double.zh.ipynb already exists" in heedful("course", "start", "97", "--language", "zh").message
    solve(chinese, double="    return 2 * x", negate="    return -x")
    copy.write_text("", encoding="utf-8")
    assert "97_double.ipynb: it is empty" in heedful("course", "check", "97").message
    copy.unlink()
    right = heedful("course", "check", "97")
    assert (right.status, right.out, right.err) == (0, "97.1: right\n97.2: right\n", "")
    missing = heedful("course", "check", "97", "--language", "en").message
    assert "97_double.ipynb is not here; heedful course start 97 writes it" in missing


def test_a_started_lesson_stays_as_it_is(heedful, lesson_97):
    heedful("course", "start", "97")
    copy = lesson_97 / "97_double.ipynb"
    copy.write_text("mine", encoding="utf-8")
    again = heedful("course", "start", "97")
    assert again.status == 2
    assert "97_double.ipynb already exists and was not changed; open it, or add --overwrite" in again.message
    assert copy.read_text(encoding="utf-8") == "mine"
    assert heedful("course", "start", "97", "--overwrite").status == 0
    assert copy.read_text(encoding="utf-8") != "mine"


def test_an_unknown_lesson(heedful, lesson_97):
    outcome = heedful("course", "check", "96")
    assert outcome.status == 2
    assert "there is no lesson 96; there are 97: heedful course lists them" in outcome.message


@pytest.mark.skipif(
    not Path("/proc/self").is_dir(), reason="a folder in which root cannot write either is Linux's /proc"
)
def test_a_folder_that_cannot_be_written_to(heedful, lesson_97, monkeypatch):
    monkeypatch.chdir("/proc")
    outcome = heedful("course", "start", "97")
    assert outcome.status == 2
    assert "97_double.ipynb cannot be written into /proc" in outcome.message
    assert "change to a writable folder" in outcome.message
    with pytest.raises(ConfigError, match=r"cannot be written .*; start the notebook in a writable folder"):
        course.demo_data("prompts")


def test_a_missing_extra(heedful, lesson_97, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(commands, "find_spec", lambda name: None if name == "nbclient" else found(name))
    outcome = heedful("course", "start", "97")
    assert outcome.status == 2
    assert 'a lesson needs packages that are not installed (nbclient): pip install "heedful[course]"' in outcome.message


def empty(x):
    """Only says what to do."""
    ...


def crashes(x):
    return {}[x]


@pytest.mark.parametrize(
    ("exercise", "answer", "said"),
    [
        ("97.1", empty, "97.1: not done yet"),
        ("97.1", lambda x: 2 * x, "97.1: right"),
        ("97.1", lambda x: None, "97.1: not done yet"),
        ("97.1", 3, '97.1: expected a function, got 3; write course.check("97.1", NAME) with its name'),
        ("97.9", empty, "97.9: lesson 97 has no exercise 9"),
        ("96.1", empty, "96.1: there is no lesson 96; heedful course lists them"),
        ("one", empty, "one: no exercise has this number; they are numbered like 5.1"),
        ("97.1", lambda: 3, "97.1: your function stopped with TypeError"),
        ("97.1", crashes, "97.1: your function stopped with KeyError: 3 (line "),
    ],
)
def test_check_prints_one_line_and_never_raises(lesson_97, capsys, exercise, answer, said):
    course.check(exercise, answer)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert printed.startswith(said)


def test_same_says_what_was_asked_what_came_out_and_what_was_expected():
    import torch

    checks.same(torch.tensor([1.0, 2.0]), [1.0, 2.00001], "f")
    checks.same("a", "a", "f")
    for came_out, expected in ((torch.ones(2), torch.ones(3)), ("1", 1.0), (None, 1.0), (float("nan"), 1.0), (1, "1")):
        with pytest.raises(AssertionError, match=r"f: .* came out, expected "):
            checks.same(came_out, expected, "f")
    with pytest.raises(AssertionError, match=r"f: \[0.1, 0.3333\] came out, expected 0.5"):
        checks.same(torch.tensor([0.1, 1 / 3]), 0.5, "f")
    with pytest.raises(AssertionError) as error:
        checks.same("多\n行" * 500, 1, "f")
    assert len(str(error.value)) < 200
    assert "\n" not in str(error.value)


def test_models_and_data_are_made_once(tmp_path, monkeypatch, capsys):
    import heedful

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEEDFUL_COURSE_QUICK", "1")
    reward = course.demo_model("reward")
    said = capsys.readouterr()
    assert [line.split(" ... ")[0] for line in said.out.splitlines()] == [
        f"making course-models/quick/{name}" for name in ("base", "sft", "reward")
    ]
    assert said.err == ""
    assert course.demo_model("reward") == reward
    assert capsys.readouterr().out == ""
    policy = heedful.Policy.from_pretrained(course.demo_model("sft"), device="cpu", dtype="float32")
    world = course.demo_world()
    responses = heedful.LocalEngine(policy, max_new_tokens=4).generate(world.held_out[:2])
    assert heedful.score([world.judge], responses).shape == (2,)
    assert {path.name for path in (tmp_path / "course-models" / "data").iterdir()} == {
        "demonstrations.jsonl", "preferences.jsonl", "prompts.jsonl"
    }  # fmt: skip


def test_the_world_knows_the_answers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    world = course.demo_world()
    assert (
        len(world.train) + len(world.held_out)
        == len(world.instructions)
        == len(read_prompts(course.demo_data("prompts")))
    )
    best = world.answers(0)[0]
    assert (best.kind, best.gold) == ("good", 1.0)
