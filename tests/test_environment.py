"""The suite passes whatever the environment of the person holds: `conftest.py` makes it known."""

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest

from heedful import faults

HOSTILE = {
    "HF_HUB_OFFLINE": "1", "HF_HOME": "/nowhere", "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz0123456789",
    "HF_ENDPOINT": "http://127.0.0.1:9", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LC_ALL": "C",
    "LANGUAGE": "zh", "COLUMNS": "40", "NO_COLOR": "1", "FORCE_COLOR": "1", "TERM": "dumb", "PYTHONWARNINGS": "error",
    "http_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "TZ": "Asia/Shanghai", "WANDB_MODE": "offline",
    "HEEDFUL_FAULTS": "run.finished:raise", "HEEDFUL_REWARD_TOKEN": "a", "WORLD_SIZE": "2", "RANK": "1",
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]


def test_nothing_of_the_persons_is_left():
    assert os.environ.keys() & HOSTILE.keys() == {"HF_HOME", "TERM", "TZ"}
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
    assert not [*Path(huggingface_hub.constants.HF_HOME).iterdir()] or huggingface_hub.get_token() is None
    assert faults.visits() == {}


@pytest.mark.exhaustive
def test_rooms_that_read_the_environment_pass(tmp_path):
    place = tmp_path / "临时 目录"
    place.mkdir()
    environment = {**os.environ, **HOSTILE, "TMPDIR": str(place)}
    environment.pop("HOME", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/publishing", "tests/test_hub.py"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, umask=0o077, capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
