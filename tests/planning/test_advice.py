"""What `heedful plan` says, and what a run that cannot fit is told."""

from dataclasses import replace

import pytest

from cases import often
from heedful import ConfigError, DPOConfig, GRPOConfig, KTOConfig, PPOConfig, SFTConfig
from heedful.configs.plan import plan_settings
from heedful.planning.memory import GB, Lengths, plan_of
from heedful.planning.report import plan_report, what_fits
from heedful.planning.shapes import KNOWN
from heedful.training.memory_preflight import refuse_beside_gpu, refuse_on_gpu

BASE = {"data": "d", "output": "o"}
RUNS = {
    "sft": SFTConfig(model="4B", **BASE),
    "dpo": DPOConfig(model="1.5B", reference="1.5B", **BASE),
    "kto": KTOConfig(model="1.5B", reference="1.5B", **BASE),
    "grpo": GRPOConfig(model="8B", max_new_tokens=512, **BASE),
    "ppo": PPOConfig(model="4B", critic="separate", rewards=("model:0.5B",), **BASE),
}


def peak(config):
    lengths = Lengths(1024, 512 if hasattr(config, "max_new_tokens") else 0)
    return plan_of(config, KNOWN.__getitem__, lengths, device="cuda", half=True).peak


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("gigabytes", often([16, 24, 48, 80], [16]))
def test_what_is_said_to_fit_fits(name, gigabytes):
    config = RUNS[name]
    if peak(config) <= gigabytes * GB:
        return
    found = what_fits(config, peak, gigabytes * GB)
    assert found, "adapters on 4-bit weights fit everywhere here"
    for flags, size in found:
        assert size <= gigabytes * GB
        words = flags.split("--")[1:]
        pairs = [word.split() for word in words]
        change = {pair[0].replace("-", "_"): pair[1] if len(pair) > 1 else True for pair in pairs}
        change = {name: int(value) if str(value).isdigit() else value for name, value in change.items()}
        assert peak(replace(config, **change)) == size


def test_a_single_change_is_preferred_to_several():
    found = what_fits(replace(RUNS["sft"], model="1.5B"), peak, 40 * GB)
    assert [flags for flags, _ in found[:2]] == ["--micro-batch-size 2", "--gradient-checkpointing"]
    assert not any("micro-batch-size" in flags for flags, _ in found[1:])


def test_several_changes_are_all_needed():
    """Without any one of them it would not fit."""
    config = RUNS["sft"]
    flags, _ = what_fits(config, peak, 45 * GB)[0]
    assert flags == "--micro-batch-size 1 --gradient-checkpointing --optimizer-device cpu"
    needed = {"micro_batch_size": 1, "gradient_checkpointing": True, "optimizer_device": "cpu"}
    for name in needed:
        fewer = {other: value for other, value in needed.items() if other != name}
        assert peak(replace(config, **fewer)) > 45 * GB


def test_nothing_fits_into_next_to_nothing():
    assert what_fits(RUNS["grpo"], peak, 1 * GB) == []
    with pytest.raises(ConfigError, match="use a smaller model or shorter texts"):
        refuse_on_gpu(RUNS["grpo"], KNOWN.__getitem__, Lengths(1024, 512), half=True, free=1 * GB)


def test_a_run_that_is_more_than_a_tenth_too_large_is_refused_with_what_would_fit():
    config, lengths = RUNS["sft"], Lengths(1024)
    need = peak(config) - 0.8 * GB
    refuse_on_gpu(config, KNOWN.__getitem__, lengths, half=True, free=need / 1.09)
    with pytest.raises(ConfigError) as caught:
        refuse_on_gpu(config, KNOWN.__getitem__, lengths, half=True, free=need / 1.11)
    said = str(caught.value)
    assert said.startswith(
        f"this run needs about {need / GB:.1f} GB, and {need / 1.11 / GB:.1f} GB of the GPU are free"
    )
    for part in ("heedful plan lists the parts", "--lora-rank 16", "--no-memory-check"):
        assert part in said


def test_a_preset_keeps_its_defaults_in_a_plan():
    """What a plan adds takes nothing of a trainer's own defaults away."""
    plain, planned = GRPOConfig(model="4B", **BASE), plan_settings(GRPOConfig)(model="4B")
    assert {
        name: value
        for name, value in vars(planned).items()
        if name not in ("gpu_gb", "ranks", "prompt_tokens", "data", "output")
    } == {name: value for name, value in vars(plain).items() if name not in ("data", "output")}


def test_a_plan_on_a_cpu_has_no_gpu_in_it():
    lines = plan_report(plan_settings(PPOConfig)(model="0.5B", device="cpu"), KNOWN.__getitem__)
    assert not any("CUDA" in line or "half precision" in line for line in lines)
    assert lines[-1].startswith("peak: ")


def phases(config):
    lengths = Lengths(1024)
    return plan_of(config, KNOWN.__getitem__, lengths, device="cuda", half=True).phases


@pytest.mark.parametrize("loss", ["simpo", "orpo"])
def test_a_loss_without_a_reference_is_planned_without_one(loss):
    """DPO with another reference holds it before the first step; its own is read by the policy itself."""
    apart, free = phases(RUNS["dpo"]), phases(DPOConfig(model="1.5B", loss=loss, **BASE))
    assert apart["scoring"]["reference"] > 3 * GB
    assert "scoring" not in free
    assert all("reference" not in parts for parts in free.values())
    assert free["step"] == apart["step"]


def phases_of_ranks(config, ranks=8):
    lengths = Lengths(1024, 512 if hasattr(config, "max_new_tokens") else 0)
    return plan_of(config, KNOWN.__getitem__, lengths, ranks=ranks, device="cuda", half=True).phases


def test_divided_models_share_no_weights():
    """Adapters share a base with the reference and with a critic of its own, unless each has its own part of it."""
    config = replace(RUNS["ppo"], lora_rank=16)
    whole, divided = phases_of_ranks(config), phases_of_ranks(replace(config, shard="full"))
    base = whole["step"]["policy, frozen"]
    assert "reference" not in whole["step"]
    assert "critic, frozen" not in whole["step"]
    for name in ("policy, frozen", "reference", "critic, frozen"):
        assert divided["step"][name] == base / 8


def test_the_reference_of_divided_pairs_is_there_before_the_first_step():
    """In one process the policy is its own reference."""
    config = DPOConfig(model="1.5B", **BASE)
    whole, divided = phases_of_ranks(config), phases_of_ranks(replace(config, shard="full"))
    assert "scoring" not in whole
    assert divided["scoring"]["reference"] == phases(RUNS["dpo"])["scoring"]["reference"] / 8
    assert "reference" not in divided["backward"]
    assert "scoring" not in phases_of_ranks(DPOConfig(model="1.5B", loss="simpo", shard="full", **BASE))


@pytest.mark.parametrize(("tokens", "rows"), [(5 * 1024 - 1, 4), (100, 1), (10**9, 64)])
def test_sampling_is_planned_with_its_limit_of_tokens(tokens, rows):
    config = replace(RUNS["ppo"], rollout_micro_batch_size=64, rollout_micro_batch_tokens=tokens)
    by_rows = replace(config, rollout_micro_batch_tokens=None, rollout_micro_batch_size=rows)
    assert phases_of_ranks(config, 1)["sampling"] == phases_of_ranks(by_rows, 1)["sampling"]


def test_what_is_loaded_is_planned():
    """A judge of best/; a reference that only evaluations read; and none where nothing reads it."""
    plain = GRPOConfig(model="4B", kl_coef=0.0, rewards=("model:0.5B",), **BASE)
    judged = replace(plain, selection_rewards=("model:1.5B", "rule:digits"))
    one, two = (phases(config)["step"]["reward models"] for config in (plain, judged))
    assert two - one == pytest.approx(2 * KNOWN["1.5B"].trunk.parameters, rel=1e-3)
    for config in (plain, replace(plain, score_norm_samples=8)):
        assert not config.loads_reference
        assert "reference" not in phases(config)["step"]
    named = replace(plain, reference="4B", eval_fraction=0.1)
    assert named.loads_reference
    assert phases(named)["step"]["reference"] == phases(replace(plain, kl_coef=0.1))["step"]["reference"]


def test_adapters_beside_the_experts_are_offered_where_those_on_them_do_not_fit():
    """Qwen3-30B-A3B: 29 of 30.5 billion weights are experts, which are in float32 under adapters, and so is each sum."""
    mixture = replace(
        KNOWN["4B"],
        linear=1_200_000_000,
        experts=48 * 128 * 3 * 768 * 2048,
        expert_edges=48 * 128 * 3 * (768 + 2048),
        expert_names=("mlp.experts.down_proj", "mlp.experts.gate_up_proj"),
        layers=48,
    )
    config = SFTConfig(model="m", lora_rank=16, micro_batch_size=1, gradient_checkpointing=True, **BASE)

    def peak(settings):
        return plan_of(settings, lambda _: mixture, Lengths(1024), device="cuda", half=True).peak

    assert peak(config) > 4 * mixture.experts
    ((flags, size),) = what_fits(config, peak, 80 * GB)
    assert flags == "--lora-rank 16 --lora-targets q_proj,k_proj,v_proj,o_proj"
    assert size < 2.2 * mixture.parameters
    whole = SFTConfig(model="m", **BASE)
    assert [flags for flags, _ in what_fits(whole, peak, 66 * GB)] == [
        f"{flags} --micro-batch-size 1 --gradient-checkpointing"
    ]
    assert peak(replace(config, quantize="4bit")) > 4 * mixture.experts, "4 bits are for linear layers"


SERVER = ("vllm:http://127.0.0.1:8000",)


def test_what_a_server_samples_takes_nothing_here():
    config = replace(RUNS["grpo"], shard="full")
    here, there = phases_of_ranks(config), phases_of_ranks(replace(config, sampler=SERVER))
    assert there == {name: parts for name, parts in here.items() if name != "sampling"}


def test_weights_that_go_from_gpu_to_gpu_are_a_copy():
    """It stays for the next step. Divided models are refused."""
    config = replace(RUNS["grpo"], sampler=SERVER, sampler_weights="nccl")
    sent = {"copy for servers": 2 * KNOWN["8B"].parameters}
    without = phases_of_ranks(replace(config, sampler_weights="folder"))
    assert phases_of_ranks(config) == {name: parts | sent for name, parts in without.items()}
    with pytest.raises(ConfigError, match="--sampler-weights nccl does not go with --shard full"):
        replace(config, shard="full")


def test_weights_in_bfloat16_are_offered_where_they_help_only():
    """Until gradients of several micro-batches are summed they are whole in float32, whatever weights are stored in."""
    config = SFTConfig(
        model="8B", batch_size=256, micro_batch_size=1, shard="full", gradient_checkpointing=True, **BASE
    )
    narrow = replace(config, weights_dtype="bfloat16")
    whole = 4 * KNOWN["8B"].parameters
    for settings in (config, narrow):
        assert phases_of_ranks(settings)["backward"]["gradients"] > whole

    def peak(settings):
        return max(sum(parts.values()) for parts in phases_of_ranks(settings).values())

    limit = whole + 2 * GB
    found = what_fits(config, peak, limit)
    assert found
    assert all("--sync-every micro-batch" in flags for flags, _ in found if "--lora-rank" not in flags)


def test_how_responses_are_sampled_is_said():
    for graphs, said in (("auto", ", with CUDA graphs, with merged adapters"), ("off", ", with merged adapters")):
        settings = plan_settings(PPOConfig)(model="0.5B", gpu_gb=80.0, lora_rank=16, cuda_graphs=graphs)
        (line,) = [one for one in plan_report(settings, KNOWN.__getitem__) if one.startswith("sampling: ")]
        assert line.partition(" responses at a time")[2] == said


def test_dividing_is_offered_to_several_ranks_only():
    lines = plan_report(plan_settings(GRPOConfig)(model="4B", gpu_gb=80.0, ranks=8), KNOWN.__getitem__)
    assert "GB on each of 8 ranks, in the phase" in lines[-3]
    assert lines[-2].startswith("main memory of 8 ranks together: ")
    assert "\n  --shard full  (" in lines[-1]
    assert "--shard" not in plan_report(plan_settings(GRPOConfig)(model="4B", gpu_gb=80.0), KNOWN.__getitem__)[-1]
    divided = plan_settings(SFTConfig)(
        model="8B", shard="full", ranks=8, replicas=2, batch_size=256, micro_batch_size=1, gpu_gb=72.0
    )
    said = plan_report(divided, KNOWN.__getitem__)[-1]
    assert "\n  --sync-every micro-batch  (" in said
    assert "--shard" not in said


def test_a_rank_that_has_too_little_memory_is_told_what_would_fit():
    config, lengths = replace(RUNS["grpo"], shard="full"), Lengths(1024, 512)
    need = max(sum(parts.values()) for parts in phases_of_ranks(config).values()) - 0.8 * GB
    refuse_on_gpu(config, KNOWN.__getitem__, lengths, half=True, number=8, free=need / 1.09)
    with pytest.raises(ConfigError) as caught:
        refuse_on_gpu(config, KNOWN.__getitem__, lengths, half=True, number=8, free=need / 1.11)
    assert f"each of the 8 ranks needs about {need / GB:.1f} GB" in str(caught.value)
    assert "heedful plan --ranks 8 lists the parts" in str(caught.value)


def test_moments_that_main_memory_has_no_room_for_are_refused():
    config = replace(RUNS["grpo"], optimizer_device="cpu")
    need = sum(plan_of(config, KNOWN.__getitem__, Lengths(64), device="cuda", half=True).main_memory(1).values())
    refuse_beside_gpu(config, KNOWN.__getitem__, Lengths(64), half=True, memory=need)
    with pytest.raises(
        ConfigError, match=r"(?s)GB of main memory beside the GPU, but this machine has .*--lora-rank 16"
    ):
        refuse_beside_gpu(config, KNOWN.__getitem__, Lengths(64), half=True, memory=need - 1)
