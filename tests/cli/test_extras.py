"""What heedful does without the packages of an extra: everything else, and an error that names the extra."""

import os
import subprocess
import sys

import pytest

from heedful.configs.settings import LABEL_EXTRA


@pytest.fixture
def without(tmp_path):
    """``without(words)``: what a command says where the packages of heedful[label] are not installed."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({LABEL_EXTRA}))\n")

    def run(*words):
        path = os.pathsep.join([str(tmp_path), *sys.path])
        command = [sys.executable, "-m", "heedful", *map(str, words)]
        environment = os.environ | {"PYTHONPATH": path}
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)

    return run


def test_what_serves_names_the_extra(without):
    for words, what in (
        (("serve-reward", "--model", "评分"), "heedful serve-reward"),
        (("demo", "--label"), "--label"),
    ):
        done = without(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{what} needs packages that are not installed ({', '.join(LABEL_EXTRA)})" in done.stderr
        assert 'pip install "heedful[label]"' in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.exhaustive
def test_everything_else_works_without_it(without, tmp_path):
    (tmp_path / "数据.jsonl").write_text('{"prompt": "问", "chosen": "好", "rejected": "坏"}\n' * 4, encoding="utf-8")
    for words in (
        ("label", "new", "项目"),
        ("label", "import", "项目", "--data", "数据.jsonl"),
        ("label", "stats", "项目"),
        ("tiny", "--output", "小模型", "--hidden-size", "16", "--num-layers", "1"),
        (
            "dpo",
            "--model",
            "小模型",
            "--data",
            "数据.jsonl",
            "--output",
            "运行",
            "--batch-size",
            "4",
            "--max-steps",
            "1",
            "--eval-fraction",
            "0",
        ),
    ):
        done = without(*words)
        assert done.returncode == 0, (words, done.stderr)
