"""docs/extend.md as a contributor follows it: each example's patches, files, commands and tests, in a copy of the source."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
SHELL = ("sh", "bash")
"""Commands of heedful as it is (test_public.py parses them), and those that only the patches make."""
HUNK = re.compile(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@.*\n", re.MULTILINE)
DRIVER = """
import json, sys
import pytest
from heedful.cli.main import main
commands, tests = json.loads(sys.argv[1])
for words in commands:
    print("$ heedful", *words, flush=True)
    if status := main(words):
        sys.exit(status)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *tests]) if tests else 0)
"""


def blocks(text):
    """Language and content of each block."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def examples(page):
    """The text of each section, by heading; the introduction is under the empty heading."""
    intro, *parts = re.split(r"^## ", page, flags=re.MULTILINE)
    return {"": intro} | {part.partition("\n")[0]: part for part in parts}


def apply(patch, root):
    """What ``git apply`` does, for hunks whose old lines occur once: fails if the source is not as the patch says."""
    for part in re.split(r"^(?=--- a/)", patch, flags=re.MULTILINE):
        if not part:
            continue
        old_name, new_name = re.match(r"--- a/(\S+)\n\+\+\+ b/(\S+)\n", part).groups()
        assert old_name == new_name
        path = root / old_name
        text = path.read_text(encoding="utf-8")
        _, *hunks = HUNK.split(part)
        assert hunks, f"{old_name}: no hunk"
        for old_count, new_count, body in zip(hunks[::3], hunks[1::3], hunks[2::3], strict=True):
            lines = [line or " " for line in body.splitlines()]  # editors strip the space of an empty line of context
            old = [line[1:] for line in lines if line[0] in " -"]
            new = [line[1:] for line in lines if line[0] in " +"]
            assert (len(old), len(new)) == (int(old_count or 1), int(new_count or 1)), f"{old_name}: counts of a hunk"
            before = "".join(f"{line}\n" for line in old)
            assert text.count(before) == 1, f"{old_name} has {text.count(before)} places for the hunk\n{body}"
            text = text.replace(before, "".join(f"{line}\n" for line in new))
        path.write_text(text, encoding="utf-8")


def follow(page, headings, root):
    """Do what sections say in a folder that holds a checkout's ``src`` and ``recipes``. Returns the finished process."""
    commands, tests = [], []
    for language, content in [block for heading in ("", *headings) for block in blocks(examples(page)[heading])]:
        if language == "diff":
            apply(content, root)
        elif language == "python":
            name = re.match(r"# (\S+\.py)\n", content)[1]
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content, encoding="utf-8")
            tests += [name] if Path(name).name.startswith("test_") else []
        elif language in SHELL:
            commands += [shlex.split(line)[1:] for line in content.splitlines() if line.startswith("heedful ")]
    return subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps([commands, tests])],
        cwd=root,
        env=os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def checkout(tmp_path):
    """With compiled files, so that not all is compiled anew."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    return tmp_path


HEADINGS = [heading for heading in examples(PAGE) if heading]


@pytest.mark.exhaustive
def test_examples_work(checkout):
    """All in one source, as in a project that has extended everything; each by itself is an exhaustive test."""
    before = {path: path.read_bytes() for path in (checkout / "src").rglob("*.py")}
    done = follow(PAGE, HEADINGS, checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    touched = [str(path.relative_to(checkout)) for path, content in before.items() if path.read_bytes() != content]
    assert touched == ["src/heedful/rewards/rules.py"], "all but a rule are files of one's own"
    texts = [examples(PAGE)[heading] for heading in ("", *HEADINGS)]
    commands = [line for text in texts for line in re.findall("^heedful .*", text, re.MULTILINE)]
    assert done.stdout.count("$ heedful") == len(commands) >= len(HEADINGS)
    assert " passed" in done.stdout


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('+    "sentence": sentence,\n', "", "counts of a hunk"),
        ('     "repetition": partial(repetition, 3),\n', '     "repetition": repetition,\n', "0 places"),
    ],
)
def test_a_patch_that_does_not_fit_is_noticed(old, new, said, checkout):
    """Negative controls."""
    assert old in PAGE
    with pytest.raises(AssertionError, match=said):
        follow(PAGE.replace(old, new), ["A rule"], checkout)


@pytest.mark.exhaustive
def test_an_example_that_fails_is_noticed(checkout):
    """Negative control: a wrong number in an example's own test."""
    old = "== [1.0, 0.5, 0.5, 0.0]"
    assert old in PAGE
    done = follow(PAGE.replace(old, "== [1.0, 0.5, 0.5, 0.5]"), ["A rule"], checkout)
    assert done.returncode != 0
    assert "1 failed" in done.stdout
