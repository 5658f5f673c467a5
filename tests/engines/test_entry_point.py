"""An installed package adds servers of its own kind: an entry point of the group ``heedful.engines``, no file of heedful."""

import json
import os
import subprocess
import sys

import pytest

from heedful import make_tiny_model

PACKAGE = '''
"""Servers that are in this process."""

from heedful.engines import generate


class Nearby:
    def __init__(self, config, stop_ids, pad_id):
        self.options = {"stop_ids": tuple(stop_ids), "pad_id": pad_id, "micro_batch": config.rollout_micro_batch}
        self.config = config
        print("nearby samples for", config.sampler)

    def begin(self, policy, prompts, generator):
        return generate.sample(policy, prompts, self.config, generator=generator, **self.options)

    def finish(self, ticket, device):
        return ticket.to(device)

    def take_retries(self):
        return 0

    def close(self):
        print("nearby is closed")


def connect(config, policy, *, stop_ids, pad_id, longest, is_known):
    return Nearby(config, stop_ids, pad_id)
'''


@pytest.fixture
def installed(tmp_path):
    """A folder on the path with a package as pip leaves it: a module, and what its distribution says of it."""
    folder = tmp_path / "site"
    about = folder / "nearby-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / "nearby.py").write_text(PACKAGE, encoding="utf-8")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: nearby\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[heedful.engines]\nnearby = nearby:connect\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))}


def test_a_package_samples(installed, tmp_path):
    make_tiny_model("gpt2", tmp_path / "tiny", hidden_size=16, max_length=64)
    rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("你好", "ab", "cd", "ef"))
    (tmp_path / "prompts.jsonl").write_text(rows, encoding="utf-8")
    command = (
        "ppo --model tiny --data prompts.jsonl --rewards rule:repetition --steps 2 --rollout-batch-size 4 "
        "--minibatch-size 4 --max-new-tokens 4 --eval-fraction 0 --device cpu"
    )

    def run(environment, *more):
        arguments = [sys.executable, "-m", "heedful", *command.split(), *more]
        return subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    there = run(installed, "--sampler", "nearby:anywhere", "--output", "there")
    assert there.returncode == 0, there.stderr
    assert "nearby samples for ('nearby:anywhere',)" in there.stdout
    assert "nearby is closed" in there.stdout
    assert run(installed, "--output", "here").returncode == 0
    weights = [(tmp_path / name / "final" / "model.safetensors").read_bytes() for name in ("there", "here")]
    assert weights[0] == weights[1], "it samples with the policy's weights and the run's random numbers"
    (tmp_path / "site" / "nearby.py").unlink()
    broken = run(installed, "--sampler", "nearby:anywhere", "--output", "nowhere")
    assert broken.returncode == 2
    assert (
        "--sampler nearby:anywhere: nearby:connect of the package nearby cannot be loaded: No module" in broken.stderr
    )
    without = run(os.environ, "--sampler", "nearby:anywhere", "--output", "nowhere")
    assert without.returncode == 2
    assert "--sampler 'nearby:anywhere' is not a sampler" in without.stderr
