"""An installed package adds servers of its own kind: an entry point of the group ``heedful.engines``, no file of heedful."""

import shutil
import sys

import pytest

from heedful import make_tiny_model

COMMAND = (
    "ppo --model tiny --data prompts.jsonl --rewards rule:repetition --steps 1 --rollout-batch-size 4 --minibatch-size 4 "
    "--max-new-tokens 4 --eval-fraction 0 --device cpu"
)
PACKAGE = '''
"""Servers that are in this process."""

from heedful.engines import generate


class Nearby:
    def __init__(self, config, stop_ids, pad_id):
        self.options = {"stop_ids": tuple(stop_ids), "pad_id": pad_id, "micro_batch": config.rollout_micro_batch}
        self.config = config
        print("nearby samples for", config.sampler)

    def begin(self, policy, prompts, generator):
        return generate.generate(policy, prompts, self.config, generator=generator, **self.options)

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
def installed(tmp_path, monkeypatch):
    """A package as pip leaves it, in a folder on the path: a module, and what its distribution says of it."""
    folder = tmp_path / "site"
    about = folder / "nearby-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / "nearby.py").write_text(PACKAGE, encoding="utf-8")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: nearby\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[heedful.engines]\nnearby = nearby:connect\n")
    monkeypatch.syspath_prepend(folder)
    yield folder
    sys.modules.pop("nearby", None)


@pytest.fixture
def _here(tmp_path, monkeypatch, written):
    """A tiny model and prompts in the current folder."""
    make_tiny_model("gpt2", tmp_path / "tiny", hidden_size=16, max_length=64)
    written("prompts.jsonl", [{"prompt": prompt} for prompt in ("你好", "ab", "cd", "ef")])
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_here")
def test_a_package_samples(heedful, installed, tmp_path):
    there = heedful(*COMMAND.split(), "--sampler", "nearby:anywhere", "--output", "there")
    assert there.status == 0, there.err
    assert "nearby samples for ('nearby:anywhere',)" in there.out
    assert "nearby is closed" in there.out
    assert heedful(*COMMAND.split(), "--output", "here").status == 0
    weights = [(tmp_path / name / "final" / "model.safetensors").read_bytes() for name in ("there", "here")]
    assert weights[0] == weights[1], "it samples with the policy's weights and the run's random numbers"


@pytest.mark.usefixtures("_here")
def test_a_package_that_is_broken_or_gone(heedful, installed):
    (installed / "nearby.py").unlink()
    sys.modules.pop("nearby", None)
    broken = heedful(*COMMAND.split(), "--sampler", "nearby:anywhere", "--output", "nowhere")
    assert broken.status == 2
    assert "--sampler nearby:anywhere: nearby:connect of the package nearby cannot be loaded: No module" in broken.err
    shutil.rmtree(installed / "nearby-1.0.dist-info")
    gone = heedful(*COMMAND.split(), "--sampler", "nearby:anywhere", "--output", "nowhere")
    assert gone.status == 2
    assert "--sampler 'nearby:anywhere' is not a sampler" in gone.err
