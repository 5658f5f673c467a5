"""Weights in bfloat16 and the optimizer in main memory, in whole runs, and where they are refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from cases import often
from heedful import ConfigError, DPOConfig, GRPOConfig, PPOConfig, RewardConfig, SFTConfig, make_tiny_model, train_sft
from heedful.algorithms import sft
from heedful.models import load_policy
from heedful.models.shape import load_shape
from heedful.training import memory_preflight
from heedful.training.setup import load_reference, load_trained, resolve_machine
from trainers import TRAIN

HALF = {"dtype": "bfloat16", "weights_dtype": "bfloat16"}
TRAINERS = [SFTConfig, RewardConfig, DPOConfig]
ONLINE = {GRPOConfig: {}, PPOConfig: {"critic": "separate"}}


@pytest.fixture
def model(tmp_path):
    make_tiny_model("qwen3", tmp_path / "model", hidden_size=64, initializer_range=0.1, max_length=128)
    return str(tmp_path / "model")


@pytest.fixture
def data(written):
    pairs = [{"prompt": f"问{i}", "chosen": "好的，当然", "rejected": "不"} for i in range(12)]
    texts = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
    texts, pairs = written("texts.jsonl", texts), written("pairs.jsonl", pairs)
    return {SFTConfig: texts, RewardConfig: pairs, DPOConfig: pairs}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", TRAINERS)
def test_a_run_with_weights_in_bfloat16_learns_as_one_in_float32(kind, model, data, tmp_path):
    """The loss falls by nearly as much, and what is saved is in bfloat16 and loads in plain transformers."""
    losses = {}
    for name, settings in (("float32", {"dtype": "bfloat16"}), ("bfloat16", HALF)):
        config = kind(
            model=model, data=data[kind], output=tmp_path / name, eval_data=data[kind], max_steps=20, batch_size=4,
            learning_rate=1e-3, sample_every=0, device="cpu", **settings,
        )  # fmt: skip
        summary = TRAIN[kind](config)
        losses[name] = [summary[f"{when}_evaluation"]["eval/loss"] for when in ("first", "last")]
    assert losses["bfloat16"][0] == pytest.approx(losses["float32"][0], rel=1e-2)  # a float32 checkpoint is rounded
    assert losses["float32"][1] < 0.8 * losses["float32"][0]
    fell = [first - last for first, last in losses.values()]
    assert fell[1] == pytest.approx(fell[0], rel=0.05)  # the noise of rounding
    if kind is SFTConfig:
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "bfloat16" / "final", dtype="auto")
        assert saved.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", often(ONLINE, [PPOConfig]))
def test_online_runs_start_at_their_reference(kind, model, data, tmp_path):
    config = kind(
        model=model, data=data[DPOConfig], output=tmp_path / "run", steps=1, rollout_batch_size=8, samples_per_prompt=2,
        minibatch_size=4, max_new_tokens=6, eval_fraction=0.3, learning_rate=1e-3, device="cpu", **HALF, **ONLINE[kind],
    )  # fmt: skip
    summary = TRAIN[kind](config, rewards=[lambda completion_ids, **_: [float(len(ids) % 3) for ids in completion_ids]])
    assert summary["first_evaluation"]["eval/kl"] == 0
    assert summary["steps"] == 1


def test_on_a_cpu_frozen_weights_stay_as_they_were(model):
    """The base of adapters in float32, with its numbers unchanged; the reference too."""
    config = GRPOConfig(model=model, data="d", output="o", lora_rank=4, dtype="bfloat16", device="cpu")
    device, dtype = resolve_machine(config)
    assert {p.dtype for p in load_trained(config, model, device, dtype).parameters()} == {torch.float32}
    whole = GRPOConfig(model=model, data="d", output="o", dtype="bfloat16", device="cpu")
    policy = load_policy(model, device=device, compute_dtype=dtype)
    reference = load_reference(whole, model, policy)
    assert reference.lm.get_input_embeddings().weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer_device": "cpu"}, "--optimizer-device cpu has no effect: the run is on the CPU; leave it out"),
        (
            {"weights_dtype": "bfloat16", "dtype": "float16"},
            "--weights-dtype bfloat16 needs matrix products in bfloat16",
        ),
    ],
)
def test_what_the_machine_cannot_do_is_refused(settings, said, model, data, tmp_path):
    config = SFTConfig(model=model, data=data[SFTConfig], output=tmp_path / "run", device="cpu", **settings)
    with pytest.raises(ConfigError, match=said):
        train_sft(config)
    assert not (tmp_path / "run").exists()


def test_weights_beyond_the_machines_memory_are_refused_before_a_run(heedful, model, data, tmp_path, monkeypatch):
    """16 bytes per weight: itself, its gradient, two moments. What would fit is what a CPU can do, and fits."""
    weights = load_shape(model).parameters
    flags = {"model": model, "data": data[SFTConfig], "output": tmp_path / "run", "device": "cpu", "dtype": "float32"}
    flags |= {"batch_size": 4, "max_steps": 1, "eval_fraction": 0, "sample_every": 0}
    monkeypatch.setattr(memory_preflight, "main_memory", lambda: 16 * weights - 1)
    refused = heedful("sft", **flags)
    assert refused.status == 2
    said = refused.err
    assert f"needs about {16 * weights / 1e9:.1f} GB for weights, gradients and the optimizer's moments alone" in said
    assert "these settings would:" in said
    assert "--lora-rank 16  (" in said
    assert not any(flag in said for flag in ("4bit", "8bit", "-device", "bfloat16"))
    assert not (tmp_path / "run").exists()
    for changes in ({"lora_rank": 16}, {"memory_check": False}):
        sft.start(SFTConfig(**flags, **changes))
    monkeypatch.setattr(memory_preflight, "main_memory", lambda: 16 * weights)
    sft.start(SFTConfig(**flags))
    monkeypatch.undo()
    assert 10**8 < memory_preflight.main_memory() < 10**14


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (SFTConfig, {"weights_dtype": "bfloat16", "lora_rank": 4}, "--weights-dtype bfloat16 is for trained matrices"),
        (SFTConfig, {"optimizer_device": "cpu", "optimizer": "adamw-8bit"}, "--optimizer-device cpu does not go with"),
        (
            PPOConfig,
            {"weights_dtype": "bfloat16", "ema_decay": 0.9},
            "--ema-decay 0.9 does not go with --weights-dtype",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(kind, settings, said):
    with pytest.raises(ConfigError, match=said):
        kind(model="m", data="d", output="o", **settings)
