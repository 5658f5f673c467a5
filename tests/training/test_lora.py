"""Every trainer with adapters and the other ways to need less memory: what learns, what stays, what comes back."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cases import often
from gradients import distance, flat_gradient
from heedful import (
    ConfigError,
    DPOConfig,
    GRPOConfig,
    PPOConfig,
    RewardConfig,
    SFTConfig,
    TrainingError,
    core,
    make_tiny_model,
)
from heedful.algorithms import sft
from heedful.algorithms.online.start import start
from heedful.data.batches import collate
from heedful.data.loading import Example
from heedful.engines.generate import generate
from heedful.engines.teacher_forced import token_outputs
from heedful.models import load_policy, load_reward_model, load_tokenizer, load_value_model
from heedful.models.adapters import is_adapter
from heedful.models.heads import disable_dropout
from heedful.models.load import check_bitsandbytes
from heedful.models.source import resolve
from heedful.training.optimization import make_optimizer, optimizer_step, step_metrics
from heedful.training.setup import load_reference, prepare, quantized
from heedful.types import MicroBatch
from jsonl import read_metrics
from trainers import TRAIN

CPU = torch.device("cpu")
FLOAT32 = {"device": CPU, "compute_dtype": torch.float32}
KINDS = [SFTConfig, RewardConfig, DPOConfig, GRPOConfig, PPOConfig]
LORA = {"lora_rank": 4, "dtype": "float32", "sample_every": 0}


@pytest.fixture
def run(tiny, demonstrations, pairs, prompts, tmp_path):
    """``run(Config, **settings)`` trains for two steps and returns the run's folder and its summary."""
    online = {"data": prompts, "steps": 2, "rollout_batch_size": 8, "minibatch_size": 8, "max_new_tokens": 6}
    online |= {"samples_per_prompt": 2, "learning_rate": 1e-2, "eval_fraction": 0.2}
    offline = {"max_steps": 2, "batch_size": 4, "learning_rate": 1e-2, "data": pairs, "eval_fraction": 0.2}
    settings = dict.fromkeys(KINDS, offline) | {GRPOConfig: online, PPOConfig: online}
    settings[SFTConfig] = offline | {"data": demonstrations, "eval_fraction": 0.0}

    def train(kind, name="run", **changes):
        config = kind(**({"model": tiny("qwen3"), "output": tmp_path / name} | settings[kind] | LORA | changes))
        rewards = {"rewards": [count_of_e]} if kind in (GRPOConfig, PPOConfig) else {}
        return tmp_path / name, TRAIN[kind](config, **rewards)

    return train


def count_of_e(completion_ids, **_):
    return [float(sum(i % 7 == 0 for i in ids)) for ids in completion_ids]


def kinds(names):
    """Of parameters: adapters, or the modules that they are in."""
    return {"adapters" if ".lora_" in name else name.partition(".")[0] for name in names}


def logprobs(policy, ids=tuple(range(20, 32))):
    batch = collate([list(ids[:4])], [list(ids[4:])], pad_id=0)
    return token_outputs(policy, batch, temperature=1.0, micro_batch=MicroBatch(1)).logprobs


def test_sft_learns_through_adapters_and_leaves_the_base_as_it_was(run, tmp_path):
    """Five answers, in 40 steps, with a learning rate that suits adapters. The base's weights are wide enough that a frozen
    output head can tell tokens apart."""
    make_tiny_model("qwen3", tmp_path / "wide", hidden_size=32, max_length=128, initializer_range=0.2)
    base = tmp_path / "wide" / "model.safetensors"
    before = base.read_bytes()
    model = str(tmp_path / "wide")
    folder, _ = run(SFTConfig, model=model, max_steps=40, lora_rank=16, learning_rate=3e-2, batch_size=5)
    losses = [line["loss/sft"] for line in read_metrics(folder)]
    assert losses[0] > 5
    assert losses[-1] < 0.3 * losses[0]
    assert base.read_bytes() == before


def test_dropout_of_adapters_changes_what_sft_learns(run):
    """B is 0 in the first step, so that dropping inputs of A shows in the second: the same seed, other losses."""
    folders = [run(SFTConfig, f"dropout-{rate}", lora_dropout=rate)[0] for rate in (0.0, 0.5)]
    plain, dropped = ([line["loss/sft"] for line in read_metrics(folder)] for folder in folders)
    assert plain[0] == dropped[0]
    assert abs(plain[-1] - dropped[-1]) > 1e-4


def test_a_steps_gradient_moves_adapters_and_heads_alone(config, tiny):
    """Bit for bit: every tensor of the base is after the step what it was before."""
    settings = config(model=tiny("qwen3"), critic="separate", learning_rate=0.1, **LORA)
    models = start(settings, [count_of_e]).learner
    before = {name: p.clone() for module in models.trained for name, p in module.named_parameters()}
    optimizer = make_optimizer([(module, 0.1) for module in models.trained], settings)
    mask = torch.ones(1, 4, dtype=torch.bool)
    ids = torch.tensor([[20, 30, 40, 50, 60, 70]])
    for module in models.trained:
        outputs = module(ids, torch.ones_like(ids, dtype=torch.bool), mask)
        is_critic = isinstance(outputs, torch.Tensor)
        ((outputs - 1).square() if is_critic else outputs.logprobs).sum().backward()
        optimizer_step(optimizer, module, 0.0)
    after = {name: p for module in models.trained for name, p in module.named_parameters()}
    assert kinds(name for name in after if not torch.equal(after[name], before[name])) == {"adapters", "value_head"}


@pytest.mark.parametrize("kind", often([SFTConfig, DPOConfig, GRPOConfig, PPOConfig], [DPOConfig, PPOConfig]))
def test_a_policys_final_folder_has_adapters_that_learned(run, tiny, kind):
    """PPO's critic too. The reference can be sampled while the policy learns: score normalisation asks it for responses."""
    folder, summary = run(kind, **({"critic": "separate", "score_norm_samples": 8} if kind is PPOConfig else {}))
    final = str(folder / "final")
    assert is_adapter(final)
    assert not (folder / "final" / "model.safetensors").exists()
    settings = json.loads((folder / "final" / "adapter_config.json").read_text(encoding="utf-8"))
    assert settings["base_model_name_or_path"] == str(Path(tiny("qwen3")).resolve())
    assert settings["r"] == 4
    trained, start = (load_policy(name, **FLOAT32) for name in (final, tiny("qwen3")))
    assert float((logprobs(trained) - logprobs(start)).abs().max()) > 1e-3
    assert 2 in trained.lm.generation_config.eos_token_id  # the template's end of turn
    if kind is DPOConfig:
        assert summary["first_evaluation"]["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    if kind in (GRPOConfig, PPOConfig):
        assert abs(summary["first_evaluation"]["eval/kl"]) < 1e-6
        assert abs(read_metrics(folder)[1]["reference/kl"]) < 1e-5
        assert abs(summary["last_evaluation"]["eval/kl"]) > 1e-3
    if kind is PPOConfig:
        assert is_adapter(folder / "final" / "value_model")
        head = load_value_model(str(folder / "final" / "value_model"), **FLOAT32).value_head
        assert float(head.weight.detach().abs().max()) > 0
        assert summary["score_norm"]["std"] > 0


def test_a_run_writes_down_what_its_adapters_stand_on(run, tiny):
    first, _ = run(SFTConfig, "first")
    second, _ = run(SFTConfig, "second", model=str(first / "final"))
    models = json.loads((second / "environment.json").read_text(encoding="utf-8"))["models"]
    assert set(models) == {str(first / "final"), str(Path(tiny("qwen3")).resolve())}
    assert len(set(models.values())) == 2
    with pytest.raises(ConfigError, match="which this run needs and --overwrite would delete"):
        run(SFTConfig, "first", model=str(second / "final"), overwrite=True)


def test_a_reward_models_final_folder_scores_as_it_did(run):
    """A run that begins with it, on the same held-out pairs, begins with the loss that the first run ended with."""
    folder, summary = run(RewardConfig, max_steps=1)
    tokenizer = load_tokenizer(str(folder / "final"))
    model = load_reward_model(str(folder / "final"), tokenizer, **FLOAT32)
    assert type(model.classifier.score) is torch.nn.Linear
    still = {"learning_rate": 1e-30, "max_steps": 1, "allow": ("learning-rate",)}
    _, second = run(RewardConfig, "again", model=str(folder / "final"), **still)
    assert second["first_evaluation"]["eval/loss"] == pytest.approx(summary["last_evaluation"]["eval/loss"], abs=1e-6)
    assert summary["last_evaluation"]["eval/loss"] != pytest.approx(summary["first_evaluation"]["eval/loss"], abs=1e-3)


def test_the_reference_and_the_separate_critic_are_the_policys_own_weights(config, tiny):
    """No second and third model in memory: their parameters lie where the policy's do, but for adapters and heads."""
    models = start(config(model=tiny("qwen3"), critic="separate", **LORA), [count_of_e]).learner
    policy = {p.data_ptr() for p in models.policy.parameters()}
    assert {p.data_ptr() for p in models.reference.parameters()} <= policy
    assert not any(p.requires_grad for p in models.reference.parameters())
    own = kinds(name for name, p in models.critic.named_parameters() if p.data_ptr() not in policy)
    assert own == {"adapters", "value_head"}
    learned = {p.data_ptr() for p in models.policy.parameters() if p.requires_grad}
    assert not learned & {p.data_ptr() for p in models.critic.parameters()}, "critic and policy share adapters"
    apart = start(config(model=tiny("qwen3"), critic="separate"), [count_of_e]).learner
    assert not {p.data_ptr() for p in apart.reference.parameters()} & {p.data_ptr() for p in apart.policy.parameters()}


def double(policy):
    """In float64, without breaking what shares its weights."""
    for parameter in policy.parameters():
        parameter.data = parameter.data.double()
    for buffer in policy.buffers():
        buffer.data = buffer.data.double() if buffer.is_floating_point() else buffer.data
    return policy


@pytest.mark.parametrize("chain", [False, True], ids=["base", "base + SFT adapters"])
def test_the_reference_is_the_policy_at_the_start(run, tiny, tmp_path, chain):
    """On top of SFT adapters it is the SFT model, not the base. KL is 0 to 1e-10 before the first update, in float64."""
    start = str(run(SFTConfig, "sft")[0] / "final") if chain else tiny("gpt2")
    config = GRPOConfig(model=start, data="d", output=tmp_path, **LORA)
    policy = double(load_policy(start, **FLOAT32))
    reference = load_reference(config, resolve(config.model), policy)
    prepare(policy, config, base=start)
    disable_dropout(policy)
    before = logprobs(reference).clone()
    assert before.dtype == torch.float64
    assert float(core.kl_estimate(logprobs(policy), before, kind="k1").abs().max()) < 1e-10
    torch.testing.assert_close(before, logprobs(double(load_policy(start, **FLOAT32))), rtol=0, atol=1e-12)
    if chain:
        base = logprobs(double(load_policy(tiny("qwen3"), **FLOAT32)))
        assert float((before - base).abs().max()) > 1e-3
    optimizer = make_optimizer([(policy, 0.1)], config)
    batch = collate([[20, 21, 22, 23]], [list(range(24, 32))], pad_id=0)
    policy(batch.ids, batch.attention_mask, batch.response_mask).logprobs.sum().backward()
    optimizer_step(optimizer, policy, 0.0)
    assert float((logprobs(policy) - before).abs().max()) > 1e-3
    assert torch.equal(logprobs(reference), before)


@pytest.mark.parametrize("kind", often([GRPOConfig, DPOConfig], [DPOConfig]))
def test_a_reference_on_the_cpu_gives_the_same_run(run, kind):
    """On a CPU nothing moves, but the code that moves runs; DPO then loads a reference of its own."""
    steps = {"steps": 1} if kind is GRPOConfig else {"max_steps": 1}
    folders = [run(kind, name, lora_rank=0, reference_device=name, **steps)[0] for name in ("same", "cpu")]
    weights = [(folder / "final" / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("kind", often(KINDS, [SFTConfig, RewardConfig]))
def test_gradient_checkpointing_gives_the_same_run(run, kind, monkeypatch):
    """The same numbers to rounding, and layers were computed again."""
    recomputed, checkpoint = [], torch.utils.checkpoint.checkpoint
    patched = "transformers.modeling_utils.checkpoint"
    monkeypatch.setattr(patched, lambda *a, **k: recomputed.append(1) or checkpoint(*a, **k))
    losses = {SFTConfig: "loss/sft", RewardConfig: "loss/reward", DPOConfig: "loss/dpo"}
    metric = losses.get(kind, "optimizer/grad_norm")
    extra = {"critic": "separate"} if kind is PPOConfig else {}
    numbers = []
    for name in ("without", "with"):
        assert not recomputed
        folder, _ = run(kind, name, gradient_checkpointing=name == "with", **extra)
        numbers.append([line[metric] for line in read_metrics(folder, having=metric)])
    assert recomputed
    assert len(numbers[0]) == 2
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-4)


def test_sampling_with_gradient_checkpointing_uses_the_cache(tiny, tmp_path, caplog):
    """The same tokens; transformers would warn where it dropped the cache."""
    config = PPOConfig(model=tiny("qwen3"), data="d", output=tmp_path, max_new_tokens=12, **LORA)
    responses = []
    for checkpointing in (False, True):
        policy = load_policy(tiny("qwen3"), **FLOAT32)
        prepare(policy, SFTConfig(model="m", data="d", output="o", gradient_checkpointing=checkpointing), base="b")
        assert policy.lm.training == checkpointing
        layer = policy.lm.model.layers[0]
        lengths = []
        hook = layer.register_forward_pre_hook(lambda _module, inputs, seen=lengths: seen.append(inputs[0].shape[1]))
        rollouts = generate(
            policy, [[20, 21, 22]], config, stop_ids=(), pad_id=0, generator=torch.Generator().manual_seed(1)
        )
        hook.remove()
        assert lengths == [3] + [1] * 11
        assert policy.lm.training == checkpointing
        responses.append(rollouts.own_ids()[0])
    assert responses[0] == responses[1]
    assert "Caching is incompatible" not in caplog.text


def examples(count):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(6, 200, (count, 12), generator=generator).tolist()
    return [Example(row[:4], row[4:]) for row in ids]


def float16_policy(folder):
    policy = load_policy(folder, device=CPU, compute_dtype=torch.float16)
    prepare(policy, SFTConfig(model="m", data="d", output="o"), base="b")
    return policy


@pytest.mark.parametrize("kind", often(KINDS, [RewardConfig, PPOConfig]))
def test_every_trainer_runs_in_float16(run, kind):
    """A reward model's first gradients are too large for the scale that a run starts with, so it is found first."""
    extra = {PPOConfig: {"critic": "separate", "steps": 1}, RewardConfig: {"max_steps": 8}}.get(kind, {})
    folder, _ = run(kind, dtype="float16", **extra)
    lines = read_metrics(folder, having="optimizer/learning_rate")
    assert lines[0].get("optimizer/skipped_steps") == (1.0 if kind is RewardConfig else None)
    assert 0 < lines[-1]["optimizer/grad_norm"] < 1e4
    assert "optimizer/skipped_steps" not in lines[-1]


def test_gradients_of_float16_are_those_of_float32(tiny):
    """Scaled on the way back and unscaled for the step. The loss is so small that plain float16 would round it to 0."""
    config = SFTConfig(model="m", data="d", output="o")
    gradients = {}
    for name in ("float32", "scaled", "unscaled"):
        policy = float16_policy(tiny("qwen3"))
        if name != "scaled":
            policy.grad_scaler = None
        if name == "float32":
            policy.compute_dtype = torch.float32
        optimizer = make_optimizer([(policy, 1e-3)], config)
        batch = collate([[20, 21, 22, 23]], [list(range(24, 32))], pad_id=0)
        outputs = policy(batch.ids, batch.attention_mask, batch.response_mask)
        (1e-5 * outputs.logprobs.sum()).backward()
        if name == "scaled":
            policy.grad_scaler.unscale_(optimizer)
        gradients[name] = flat_gradient(policy)
    assert distance(gradients["scaled"], gradients["float32"]) < 0.02
    assert distance(gradients["unscaled"], gradients["float32"]) > 0.2


def test_an_overflow_leaves_a_step_out_and_halves_the_scale(tiny):
    policy = float16_policy(tiny("qwen3"))
    optimizer = make_optimizer([(policy, 1e-2)], SFTConfig(model="m", data="d", output="o"))
    start = [p.clone() for p in policy.parameters()]
    norms = []

    def step(overflows):
        sft.accumulate(policy, examples(2), 0, MicroBatch(2))
        if overflows:
            next(policy.parameters()).grad[0, 0] = torch.inf
        norms.append(optimizer_step(optimizer, policy, 1.0))

    step(overflows=True)
    assert policy.grad_scaler.get_scale() == 2.0**15
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), start, strict=True))
    step(overflows=False)
    assert not all(torch.equal(p, q) for p, q in zip(policy.parameters(), start, strict=True))
    metrics = step_metrics(norms)
    assert metrics == {"optimizer/grad_norm": norms[1], "optimizer/skipped_steps": 1.0}
    assert step_metrics([2.0, 4.0]) == {"optimizer/grad_norm": 3.0}
    for _ in range(16):
        step(overflows=True)
    assert policy.grad_scaler.get_scale() == 0.5
    with pytest.raises(TrainingError, match="gradient norm is inf"):
        step(overflows=True)


@pytest.mark.parametrize(
    ("kind", "flag"), [(SFTConfig, "optimizer"), (RewardConfig, "quantize"), (PPOConfig, "quantize")]
)
def test_what_needs_bitsandbytes_says_so(run, tmp_path, monkeypatch, kind, flag):
    settings = {"optimizer": {"optimizer": "adamw-8bit"}, "quantize": {"quantize": "4bit"}}[flag]
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with pytest.raises(ConfigError, match=f"--{flag} .*CUDA device.* on cpu"):  # not: install it, for nothing
        run(kind, device="cpu", **settings)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=rf'--{flag} .*pip install "heedful\[gpu\]"'):
        check_bitsandbytes(SFTConfig(model="m", data="d", output="o", **LORA | settings), [], torch.device("cuda"))


def test_no_adapters_are_merged_into_4_bit_weights(tmp_path, monkeypatch):
    """Those of a reference or a value model neither; a stand-in for the package, and a device that is only named."""
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes" / "__init__.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": "m"}
    (adapters / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    (adapters / "adapter_model.safetensors").touch()
    settings = {"data": "d", "output": "o", "lora_rank": 4, "quantize": "4bit"}
    plain = SFTConfig(model="m", **settings)
    check_bitsandbytes(plain, ["m"], torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"has adapters, .* heedful merge --adapter .*adapters --output"):
        check_bitsandbytes(plain, ["m", str(adapters)], torch.device("cuda"))
    assert quantized(plain) == ["m"]
    ppo = PPOConfig(model="m", reference="r", critic="separate", value_model="v", **settings)
    assert quantized(ppo) == ["m", "v", "r"]
    assert quantized(replace(ppo, reference_device="cpu")) == ["m", "v"]
