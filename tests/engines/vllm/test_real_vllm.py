"""A real vLLM server, in an environment of its own (docs/vllm.md says how to make it):

HEEDFUL_VLLM_PYTHON=~/vllm/bin/python HEEDFUL_VLLM_MODEL=storyteller-8m python -m pytest -m exhaustive tests/engines/vllm

The model is any small language model with its tokenizer that vLLM knows.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "vllm.py"
NEEDED = ("HEEDFUL_VLLM_PYTHON", "HEEDFUL_VLLM_MODEL")
missing = [name for name in NEEDED if not os.environ.get(name)]
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(bool(missing), reason=f"no environment with vLLM and no model: set {' and '.join(NEEDED)}"),
]


def measured(tmp_path, *flags):
    """What benchmarks/vllm.py finds. Weights are proven in every step, or it ends with an error."""
    words = [sys.executable, SCRIPT, "--model", os.environ["HEEDFUL_VLLM_MODEL"], "--output", tmp_path, *flags]
    subprocess.run([str(word) for word in words], check=True)
    return json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))


def test_learning_on_vllm_is_learning_in_one_process(tmp_path):
    """Three seeds of 20 steps: scores of the last five steps within two standard errors; log-probs agree in every step."""
    found = measured(tmp_path, "--only", "curves")
    for algorithm in ("grpo", "ppo"):
        there, here = found[f"{algorithm}, vllm"], found[f"{algorithm}, in process"]
        assert there["mismatch_max"] < 1e-4
        assert min(there["last"] - there["first"], here["last"] - here["first"]) > 0.1, "both learn"
        errors = 2 * (there["last_std"] + here["last_std"]) / 3**0.5
        assert abs(there["last"] - here["last"]) <= errors


def test_a_server_that_is_killed_and_comes_back(tmp_path):
    """In mid-batch, as by kill -9: the run goes on, by proven weights."""
    found = measured(tmp_path, "--only", "killed")["killed"]
    assert found["steps"] == 8
    assert max(found["retries"]) > 0
    assert max(found["mismatch"]) < 1e-4
