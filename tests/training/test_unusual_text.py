"""Texts and tokenizers at the edges: nothing is scored or learned at the wrong place, and no number stops being one."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cases import often, pairs_often
from heedful import A2CConfig, GRPOConfig, OnlineDPOConfig, PPOConfig
from heedful.algorithms.online.rollout import rollout
from heedful.algorithms.online.start import start
from heedful.algorithms.ppo import learn, make_experience
from heedful.data.chat import Renderer
from heedful.models import load_tokenizer
from heedful.models.shape import context_length
from jsonl import timeless
from trainers import step_online

KINDS = {"ppo": PPOConfig, "a2c": A2CConfig, "grpo": GRPOConfig, "online-dpo": OnlineDPOConfig}


def steps(settings, rewards):
    """Metrics of every step, and the responses of the first."""
    learner = start(settings, rewards).learner
    found, texts = [], None
    for _ in range(settings.steps):
        metrics, scored = step_online(learner)
        found.append(metrics)
        texts = texts or [completion.response for completion in scored.completions]
    return found, texts


@pytest.fixture
def changed(tiny, tmp_path):
    """``changed(name, change)``: the folder of a tiny gpt2 after ``change(model, tokenizer)``."""

    def make(name, change):
        model, tokenizer = (kind.from_pretrained(tiny("gpt2")) for kind in (AutoModelForCausalLM, AutoTokenizer))
        change(model, tokenizer)
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return make


@pytest.mark.parametrize("name", often(["ppo", "a2c", "grpo", "separate", "online-dpo"], ["ppo", "online-dpo"]))
def test_responses_that_are_empty(config, changed, reward_model, length, name):
    """The first token ends every response: it alone is learned from and scored, and all numbers are finite."""

    def end_at_once(model, _tokenizer):
        model.generation_config.eos_token_id = list(range(model.config.vocab_size))

    kind, critic = (PPOConfig, {"critic": "separate"}) if name == "separate" else (KINDS[name], {})
    settings = config(kind, model=changed("ends", end_at_once), rewards=(reward_model,), eval_fraction=0.0, **critic)
    found, texts = steps(settings, [length])
    assert set(texts) == {""}
    for metrics in found:
        assert all(map(math.isfinite, metrics.values()))
        assert metrics["rollout/response_length"] == 1
        assert metrics["rollout/eos_frac"] == 1
        assert metrics["reward/length"] == 0
        assert "optimizer/skipped_steps" not in metrics


@pytest.mark.parametrize(("name", "token"), pairs_often(KINDS, [" ", "pad"], [("grpo", " "), ("ppo", "pad")]))
def test_responses_of_white_space_or_padding(config, changed, reward_model, length, name, token):
    """A policy that has collapsed to one token: every response is the same, and the advantages are 0, not NaN."""

    def only(model, tokenizer):
        chosen = tokenizer.pad_token_id if token == "pad" else tokenizer(" ", add_special_tokens=False).input_ids[0]
        with torch.no_grad():  # the final norm's bias, along one token's own vector
            model.transformer.wte.weight[chosen] = 5.0
            model.transformer.ln_f.weight.zero_()
            model.transformer.ln_f.bias.fill_(5.0)

    settings = config(KINDS[name], model=changed("only", only), rewards=(reward_model,), eval_fraction=0.0)
    found, texts = steps(settings, [length])
    assert set(texts) == {(" " if token == " " else "<|pad|>") * settings.max_new_tokens}
    for metrics in found:
        assert all(map(math.isfinite, metrics.values()))
        assert "optimizer/skipped_steps" not in metrics


@pytest.mark.parametrize("name", often(KINDS, ["ppo"]))
def test_prompts_of_one_token_and_of_all_the_context_that_is_left(config, written, tiny, length, name):
    """The longest prompt and the longest response fill the context exactly."""
    model, new = tiny("gpt2"), 12
    renderer = Renderer(load_tokenizer(model))
    room = context_length(AutoModelForCausalLM.from_pretrained(model).config) - new
    texts = ["x", "x" * room]
    assert [len(renderer.prompt_ids(text)) for text in texts] == [1, room]
    data = written("edges.jsonl", [{"prompt": text} for text in texts])
    sizes = {"rollout_batch_size": 8, "samples_per_prompt": 4, "response_length": "fixed", "max_prompt_tokens": room}
    settings = config(KINDS[name], data=data, eval_fraction=0.0, steps=1, max_new_tokens=new, **sizes)
    found, _ = steps(settings, [length])
    for metrics in found:
        assert all(map(math.isfinite, metrics.values()))
        assert metrics["rollout/response_length"] == new


@pytest.mark.parametrize("name", often(KINDS, ["ppo"]))
def test_padding_with_eos_changes_no_number(config, tiny, changed, length, name):
    """Neither the policy's nor, as ids are never compared, what is learned; the end of a response is learned too."""

    def pad_is_eos(_model, tokenizer):
        tokenizer.pad_token = tokenizer.eos_token

    found = []
    for model in (tiny("gpt2"), changed("as", pad_is_eos)):
        metrics, texts = steps(config(KINDS[name], model=model, eval_fraction=0.0, steps=1), [length])
        found.append(([timeless(step) for step in metrics], texts))
    assert found[0] == found[1]


LAWS = {
    "hotter": {"temperature": 2.0},
    "top-k": {"top_k": 3},
    "top-p and colder": {"top_p": 0.5, "temperature": 0.5},
    "fixed lengths": {"response_length": "fixed"},
}


@pytest.mark.parametrize(
    ("name", "law"),
    pairs_often(["ppo", "grpo"], LAWS, [("ppo", "hotter"), ("grpo", "top-p and colder"), ("ppo", "fixed lengths")]),
)
def test_the_first_ratio_is_1_and_the_first_kl_0_however_it_was_sampled(config, length, law, name):
    """Log-probs are recomputed under the temperature, without the filters, which only a note can make good."""
    options = {"eval_fraction": 0.0, "steps": 1, "ppo_epochs": 1, "kl_coef": 0.1, "micro_batch_size": 3}
    settings = config(KINDS[name], **options, **LAWS[law])
    learner, about = start(settings, [length])[1::2]
    experience = make_experience(learner, rollout(learner, next(learner.prompts)))
    old = experience.old_logprobs
    metrics = learn(learner, experience).metrics
    assert metrics["policy/approx_kl"] < 1e-10
    assert metrics["policy/clip_frac"] == 0
    assert metrics["reference/kl"] == pytest.approx(0, abs=1e-4)
    assert (old is None) == (name == "grpo")
    filters = law.startswith("top")
    assert any("off-policy" in note for note in about["notes"]) == filters
    assert metrics["rollout/sampler_mismatch"] < 1e-5, "what sampling saw, unfiltered, is what training sees"


@pytest.mark.parametrize("name", often(["ppo", "grpo", "online-dpo"], ["ppo"]))
def test_a_last_micro_batch_that_is_not_full_changes_nothing(config, length, name):
    """Eight responses in parts of eight and of three."""
    found = []
    for size in (8, 3):
        settings = config(KINDS[name], eval_fraction=0.0, micro_batch_size=size, steps=1)
        metrics, _ = steps(settings, [length])
        found.append([timeless(step) for step in metrics])
    for a, b in zip(*found, strict=True):
        assert b == pytest.approx(a, rel=1e-4, abs=1e-5)
