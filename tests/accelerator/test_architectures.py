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
ROUNDED_GRADIENTS = {"deepseek_v2"}
"""Its rotations are complex numbers, whose gradients round otherwise; Adam's first step turns that into its whole size."""
WAITING = {
    "afmoe", "bamba", "biogpt", "cohere2", "exaone4", "falcon", "falcon_h1", "gemma3", "gemma3_text", "gemma4_text",
    "gpt_neo", "granitemoehybrid", "jamba", "jetmoe", "lfm2", "lfm2_moe", "lfm3", "longcat_flash", "ministral",
    "nemotron_h", "olmo3", "olmo_hybrid", "phimoe", "qwen3_5", "qwen3_5_text", "qwen3_next", "stablelm",
}  # fmt: skip
"""Architectures for which transformers waits for the device at every token: it looks for padding in a growing mask (1
wait), or uploads a number or a list (up to 11)."""


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
        rollouts = learner.sampler.generate(policy.eval(), prompts, torch.Generator().manual_seed(0))
    sft.learn(learner, loaded.train, SFTConfig(**settings))
    weights = [parameter.detach().float().cpu() for parameter in policy.parameters()]
    return rollouts.own_ids(), [rollouts.logprobs.cpu(), *weights], row


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name, architecture in POLICIES.items() if not architecture.refused])
def test_an_architecture_is_sampled_and_trained_as_on_the_cpu(name, tmp_path):
    architecture = POLICIES[name]
    without_kernels_of_the_cpu()
    torch.set_num_threads(1)
    auto = AutoModelForCausalLM if architecture.text is None else AutoModelForImageTextToText
    with warnings.catch_warnings(action="ignore"):
        FILE["make"](name, name, architecture, tmp_path / "model", auto)
        tokens, numbers, _ = rehearse(tmp_path, "cpu")
        phases.clear()
        found, theirs, row = rehearse(tmp_path, DEVICE)
    waits = phases["decode"].synchronisations.total() / row.tokens
    assert found == tokens
    compared = 1 if name in ROUNDED_GRADIENTS else len(numbers)
    for one, other in zip(numbers[:compared], theirs, strict=False):
        assert torch.equal(one, other)
    assert (waits > 1) == (name in WAITING), phases["decode"].places
