"""Every architecture of tests/test_architectures.py on the pretend accelerator: sampled and trained as on the CPU."""

import runpy
import warnings
from pathlib import Path

import pytest
import torch
from pretend_device import phases
from rehearsal import DEVICE, Row, watch, without_kernels_of_the_cpu
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from heedful import SFTConfig
from heedful.algorithms import sft

FILE = runpy.run_path(str(Path(__file__).parents[1] / "test_architectures.py"))
POLICIES, TEXTS = FILE["POLICIES"], FILE["TEXTS"]
ROUNDED = 1e-4
"""The most that the two may differ where transformers itself takes another path on another device."""
OTHERWISE: set[str] = set()
"""Architectures that transformers computes otherwise on a CPU: mixtures of experts, states."""
WAITING: set[str] = set()
"""Architectures for which transformers waits for the device at every token."""


def rehearse(root, device):
    """Tokens, their log-probs, and the weights after a step."""
    records = [{"prompt": text, "completion": f"{text} 是" * (i + 1)} for i, text in enumerate(TEXTS)]
    data = FILE["write"](root / "data.jsonl", records)
    settings = FILE["settings_of"](root, data, batch_size=4, max_steps=1) | {"device": device}
    learner, loaded = sft.start(SFTConfig(**settings))
    policy, renderer = learner.model, learner.sampler.renderer
    prompts = [FILE["EncodedPrompt"](FILE["Prompt"](text, "p"), renderer.prompt_ids(text)) for text in TEXTS]
    row = Row()
    with watch(row):
        rollouts, _ = learner.sampler.respond(policy.eval(), prompts, torch.Generator().manual_seed(0))
    sft.learn(learner, loaded.train, loaded.pad_id, SFTConfig(**settings))
    weights = [parameter.detach().float().cpu() for parameter in policy.parameters()]
    return rollouts.responses(with_stop=True), [rollouts.sampler_logprobs.cpu(), *weights], row


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", POLICIES)
def test_an_architecture_is_sampled_and_trained_as_on_the_cpu(name, tmp_path):
    architecture = POLICIES[name]
    if architecture.refused:
        pytest.skip(f"refused: {architecture.refused}")
    without_kernels_of_the_cpu()
    torch.set_num_threads(1)
    auto = AutoModelForCausalLM if architecture.text is None else AutoModelForImageTextToText
    with warnings.catch_warnings(action="ignore"):
        FILE["make"](name, name, architecture, tmp_path / "model", auto)
        tokens, numbers, _ = rehearse(tmp_path, "cpu")
        phases.clear()
        found, theirs, row = rehearse(tmp_path, DEVICE)
    waits = phases["decode"].synchronisations.total() / row.tokens
    same = found == tokens and all(torch.equal(one, other) for one, other in zip(numbers, theirs, strict=True))
    print(f"RESULT {name} same {same} waits {waits:.2f} {phases['decode'].places.most_common(3)}")
    if name not in OTHERWISE:
        assert same
    assert found == tokens
    for one, other in zip(numbers, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=ROUNDED)
    assert (waits < 1) == (name not in WAITING), phases["decode"].places
