"""The same code on a CUDA device: trainers run, and sampling is that of the CPU."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config

from heedful import (
    ConfigError,
    GRPOConfig,
    PPOConfig,
    RewardConfig,
    SFTConfig,
    make_tiny_model,
    train_grpo,
    train_ppo,
    train_reward,
    train_sft,
)
from heedful.configs.options import SamplingOptions
from heedful.data.batches import collate
from heedful.distributed.sharded_files import Parts, write_parts
from heedful.distributed.sharding import clip_gradients, gathered, held, is_divided, make_mesh, shard
from heedful.engines.cuda_graph import POSITIONS, GraphDecoder, graph_decoder
from heedful.engines.generate import sample
from heedful.engines.teacher_forced import token_outputs
from heedful.kernels.attention import use_attention
from heedful.kernels.device import resolve_device
from heedful.kernels.packing import can_pack, positions
from heedful.models import Policy, freeze, load_causal_lm, load_policy
from heedful.models.shape import shape_of
from heedful.planning.memory import CUDA_CONTEXT, Lengths, plan_of
from heedful.training.compact_adamw import CompactAdamW
from heedful.training.optimization import make_optimizer
from heedful.training.setup import load_reference, load_trained, prepare
from heedful.types import MicroBatch
from jsonl import write_jsonl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _set_up_as_by_every_command():
    resolve_device("cuda")


def test_greedy_sampling_on_cuda_is_that_of_the_cpu(tmp_path):
    make_tiny_model("qwen3", tmp_path / "m", hidden_size=32)
    prompts = [[10, 11, 12], [40], [77, 78, 79, 80, 81]]
    options = SamplingOptions(max_new_tokens=20, temperature=0.0)
    outputs = []
    for name in ("cpu", "cuda"):
        policy = freeze(load_policy(str(tmp_path / "m"), device=torch.device(name), compute_dtype=torch.float32))
        rollouts = sample(policy, prompts, options, stop_ids=(1,), pad_id=0, generator=torch.Generator())
        outputs.append(rollouts.responses(with_stop=True))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_sampling_is_sampling(tmp_path, dtype):
    """Over two batches, rows leaving on the way, before and after the weights were changed in place.

    In half precision the fixed cache rounds elsewhere, so its tokens are its own; their log-probs are those of the
    teacher-forced pass up to that rounding, 2 ** -8 of logits of a few units.
    """
    make_tiny_model("qwen3", tmp_path / "m", hidden_size=32, initializer_range=0.1)
    policy = load_policy(str(tmp_path / "m"), device=torch.device("cuda"), compute_dtype=dtype)
    stops = tuple(range(3, 60))

    def sampled(cuda_graphs):
        options = SamplingOptions(max_new_tokens=50, temperature=0.0, cuda_graphs=cuda_graphs)
        return sample(
            policy,
            RAGGED,
            options,
            stop_ids=stops,
            pad_id=0,
            generator=torch.Generator(),
            micro_batch=MicroBatch(10),
        )

    responses = []
    for _ in range(2):
        found = sampled(cuda_graphs=True)
        responses.append(found.responses(with_stop=True))
        if dtype == torch.float32:
            assert responses[-1] == sampled(cuda_graphs=False).responses(with_stop=True)
        scored = token_outputs(policy, found.batch, temperature=1.0, micro_batch=MicroBatch(20)).logprobs
        mask = found.batch.response_mask
        limit = 1e-4 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(found.sampler_logprobs[mask], scored[mask], rtol=0, atol=limit)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    assert responses[0] != responses[1]
    assert min(map(len, responses[0])) <= 16 < max(map(len, responses[0]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_three_stages_run_on_cuda(tmp_path, dtype):
    make_tiny_model("qwen3", tmp_path / "base", hidden_size=32)
    pairs = [{"prompt": f"问{i}", "chosen": "好", "rejected": "坏"} for i in range(20)]
    data = write_jsonl(tmp_path / "pairs.jsonl", pairs)
    texts = write_jsonl(tmp_path / "sft.jsonl", [{"prompt": p["prompt"], "completion": p["chosen"]} for p in pairs])
    common = {"device": "cuda", "dtype": dtype, "eval_fraction": 0.3}
    train_sft(
        SFTConfig(
            model=str(tmp_path / "base"), data=texts, output=tmp_path / "sft", max_steps=2, batch_size=8, **common
        )
    )
    start = str(tmp_path / "sft" / "final")
    train_reward(RewardConfig(model=start, data=data, output=tmp_path / "rm", max_steps=2, batch_size=8, **common))
    for critic in ("shared", "separate", "reward"):
        summary = train_ppo(
            PPOConfig(
                model=start,
                rewards=(f"model:{tmp_path}/rm/final",),
                data=data,
                output=tmp_path / critic,
                critic=critic,
                steps=2,
                rollout_batch_size=8,
                minibatch_size=4,
                max_new_tokens=8,
                score_norm_samples=8,
                entropy_coef=0.01,
                **common,
            )
        )
        assert abs(summary["first_evaluation"]["eval/kl"]) < 1e-3


def test_a_reference_on_the_cpu_answers_on_the_policys_device(tmp_path):
    make_tiny_model("qwen3", tmp_path / "m", hidden_size=32)
    config = GRPOConfig(model=str(tmp_path / "m"), data="d", output="o", reference_device="cpu", dtype="float32")
    policy = load_policy(config.model, device=torch.device("cuda"), compute_dtype=torch.float32)
    reference = load_reference(config, config.model, policy)
    assert reference.device.type == "cpu"
    batch = collate([[20, 21, 22], [23]], [[24, 25], [26, 27, 28]], pad_id=0).to(policy.device)
    ours, theirs = (token_outputs(m, batch, temperature=1.0, micro_batch=MicroBatch(1)) for m in (policy, reference))
    assert theirs.logprobs.device == theirs.entropy.device == batch.ids.device
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-4)


def test_packed_rows_on_cuda_have_the_numbers_of_padded_ones(tmp_path, monkeypatch):
    """In half precision by torch's kernel for texts of any length, forwards and backwards; in float32, which it does not
    know, by groups of about one length."""
    make_tiny_model("qwen3", tmp_path / "m", hidden_size=64)
    batch = collate([[20, 21, 22] * 5, [23]], [[24, 25], [26, 27, 28]], pad_id=0).to(torch.device("cuda"))
    for dtype, rtol, atol in ((torch.bfloat16, 0.1, 0.05), (torch.float32, 1e-4, 1e-4)):
        numbers = []
        for most_real in (0.9, 0.0):
            monkeypatch.setattr("heedful.kernels.packing.MOST_REAL", most_real)
            policy = load_policy(str(tmp_path / "m"), device=torch.device("cuda"), compute_dtype=dtype)
            logprobs = policy(batch.ids, batch.attention_mask, batch.response_mask).logprobs
            logprobs.sum().backward()
            numbers.append([logprobs, *(parameter.grad for parameter in policy.lm.parameters())])
            with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
                assert can_pack(policy.lm.base_model)
        for ours, theirs in zip(*numbers, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


def prompts_of(tmp_path):
    return write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"问{i}"} for i in range(20)])


@pytest.mark.parametrize("settings", [{"reference_device": "cpu"}, {"lora_rank": 4}, {"gradient_checkpointing": True}])
def test_grpo_runs_on_cuda_with_less_memory(tmp_path, settings):
    make_tiny_model("qwen3", tmp_path / "m", hidden_size=32)
    online = {"rollout_batch_size": 8, "minibatch_size": 8, "samples_per_prompt": 4, "max_new_tokens": 8, "steps": 2}
    config = GRPOConfig(
        model=str(tmp_path / "m"),
        data=prompts_of(tmp_path),
        output=tmp_path / "run",
        device="cuda",
        **online,
        **settings,
    )
    summary = train_grpo(config, rewards=[lambda completion_ids: [float(ids[0]) for ids in completion_ids]])
    assert abs(summary["first_evaluation"]["eval/kl"]) < 0.1
    load_causal_lm(str(tmp_path / "run" / "final"))


@pytest.mark.parametrize("settings", [{"optimizer": "adamw-8bit"}, {"quantize": "4bit", "lora_rank": 4}])
def test_what_bitsandbytes_does_runs(tmp_path, settings):
    """SFT lowers its loss, PPO starts at KL 0, a reward model comes back; the base of adapters stays in 4 bits."""
    pytest.importorskip("bitsandbytes")
    make_tiny_model("qwen3", tmp_path / "m", hidden_size=64, initializer_range=0.1)
    pairs = [{"prompt": f"问{i}", "chosen": "好", "rejected": "坏"} for i in range(20)]
    texts = write_jsonl(tmp_path / "sft.jsonl", [{"prompt": p["prompt"], "completion": p["chosen"]} for p in pairs])
    common = {"model": str(tmp_path / "m"), "device": "cuda", "learning_rate": 1e-2, **settings}
    summary = train_sft(
        SFTConfig(data=texts, output=tmp_path / "sft", max_steps=20, batch_size=8, eval_data=texts, **common)
    )
    assert summary["last_evaluation"]["eval/loss"] < 0.9 * summary["first_evaluation"]["eval/loss"]
    data = write_jsonl(tmp_path / "pairs.jsonl", pairs)
    train_reward(RewardConfig(data=data, output=tmp_path / "rm", max_steps=2, batch_size=8, **common))
    online = {"rollout_batch_size": 8, "minibatch_size": 4, "max_new_tokens": 8, "steps": 2, "eval_fraction": 0.3}
    for critic in ("shared", "separate"):
        config = PPOConfig(
            rewards=(f"model:{tmp_path}/rm/final",),
            data=data,
            output=tmp_path / critic,
            critic=critic,
            **online,
            **common,
        )
        assert abs(train_ppo(config)["first_evaluation"]["eval/kl"]) < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frozen_weights_on_cuda_are_in_half_precision(tmp_path, dtype):
    """The base of adapters, the reference and a reward model; what learns is in float32, and the first KL is 0."""
    make_tiny_model("qwen3", tmp_path / "m", hidden_size=64, initializer_range=0.1)
    name, device = str(tmp_path / "m"), torch.device("cuda")
    half = "bfloat16" if dtype == torch.bfloat16 else "float16"
    config = GRPOConfig(model=name, data="d", output="o", lora_rank=4, dtype=half)
    policy = load_trained(config, name, device, dtype)
    prepare(policy, config, base=name)
    matrices = [p for p in policy.parameters() if p.dim() == 2]
    assert {p.dtype for p in matrices if not p.requires_grad} == {dtype}
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    whole = load_policy(name, device=device, compute_dtype=dtype)
    reference = load_reference(GRPOConfig(model=name, data="d", output="o", dtype=half), name, whole)
    assert reference.lm.get_input_embeddings().weight.dtype == dtype
    batch = collate([[20, 21, 22], [23]], [[24, 25], [26, 27, 28]], pad_id=0).to(device)
    outputs = [token_outputs(m, batch, temperature=1.0, micro_batch=MicroBatch(2)) for m in (whole, reference)]
    torch.testing.assert_close(outputs[0].logprobs, outputs[1].logprobs, rtol=0, atol=0.05)  # rows of the embedding


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer_device": "cpu"},
        {"weights_dtype": "bfloat16"},
        {"weights_dtype": "bfloat16", "optimizer_device": "cpu"},
    ],
)
def test_sft_learns_on_cuda_with_weights_and_moments_that_take_less(tmp_path, settings):
    make_tiny_model("qwen3", tmp_path / "m", hidden_size=64, initializer_range=0.1)
    rows = [{"prompt": f"问{i}", "completion": "好的，当然"} for i in range(16)]
    texts = write_jsonl(tmp_path / "sft.jsonl", rows)
    common = {"model": str(tmp_path / "m"), "data": texts, "eval_data": texts, "device": "cuda", "dtype": "bfloat16"}
    losses = []
    for name, changes in (("plain", {}), ("less", settings)):
        config = SFTConfig(output=tmp_path / name, max_steps=20, batch_size=8, learning_rate=1e-3, **common, **changes)
        summary = train_sft(config)
        losses.append([summary[f"{when}_evaluation"]["eval/loss"] for when in ("first", "last")])
    fell = [first - last for first, last in losses]
    assert fell[0] > 0.2 * losses[0][0]
    assert fell[1] == pytest.approx(fell[0], rel=0.05)  # the noise of rounding


def test_moments_in_main_memory_give_the_steps_of_the_gpu():
    torch.manual_seed(0)
    here = [torch.nn.Parameter(torch.randn(300, 40, device="cuda")) for _ in range(2)]
    there = [torch.nn.Parameter(p.detach().clone()) for p in here]
    ours = CompactAdamW([{"params": there, "lr": 1e-2, "weight_decay": 0.1}], betas=(0.9, 0.999), eps=1e-8,
                        device=torch.device("cpu"))  # fmt: skip
    theirs = torch.optim.AdamW(here, lr=1e-2, weight_decay=0.1, fused=True)
    for _ in range(3):
        for p, q in zip(here, there, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(here, there, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert ours.state[q]["exp_avg"].device.type == "cpu"


def test_one_rank_divides_by_nccl(tmp_path):
    """All that a divided model does, in a world of one rank: passes, clipping, moments in main memory, gathering, files.

    It says that NCCL takes these calls, not that several ranks agree.
    """
    make_tiny_model("qwen3", tmp_path / "m", hidden_size=32, initializer_range=0.1)
    device = torch.device("cuda")
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        whole, divided = (
            load_policy(str(tmp_path / "m"), device=device, compute_dtype=torch.float32) for _ in range(2)
        )
        shard(divided, make_mesh(device))
        ids = torch.arange(10, 42, device=device).view(2, 16)
        mask = torch.ones_like(ids, dtype=torch.bool)
        settings = SFTConfig(model="m", data="d", output="o", optimizer_device="cpu")
        norms = []
        for policy in (whole, divided):
            optimizer = make_optimizer([(policy, 1e-3)], settings)
            policy(ids, mask, mask[:, 8:]).logprobs.mean().backward()
            norms.append(clip_gradients([p for p in policy.parameters() if p.grad is not None], 0.1))
            optimizer.step()
            assert {held(state["exp_avg"]).device.type for state in optimizer.state.values()} == {"cpu"}
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        write_parts(tmp_path / "parts", {name: p.detach() for name, p in divided.lm.named_parameters()})
        parts, copy = Parts(tmp_path / "parts"), dict(gathered(divided).lm.named_parameters())
        for name, parameter in whole.lm.named_parameters():
            assert is_divided(divided.lm.get_parameter(name))
            torch.testing.assert_close(copy[name], parameter, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(parts.stored(name).read(), parameter.detach().cpu(), rtol=1e-5, atol=1e-6)
    finally:
        dist.destroy_process_group()


def test_a_run_far_too_large_is_refused_before_it_begins(tmp_path, monkeypatch):
    """The free memory is taken to be next to nothing; without the check the same run goes through."""
    make_tiny_model("qwen3", tmp_path / "m", hidden_size=64)
    texts = write_jsonl(tmp_path / "sft.jsonl", [{"prompt": f"问{i}", "completion": "好"} for i in range(8)])
    config = SFTConfig(
        model=str(tmp_path / "m"), data=texts, output=tmp_path / "run", max_steps=1, batch_size=4, device="cuda"
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1000, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 0)
    with pytest.raises(ConfigError, match="--no-memory-check"):
        train_sft(config)
    assert not (tmp_path / "run").exists()
    train_sft(replace(config, memory_check=False))


def test_the_plan_is_what_a_run_takes():
    """Weights, moments, gradients and activations of a small model, within a tenth; the context is not counted here."""
    config = Qwen3Config(
        vocab_size=4096, hidden_size=768, intermediate_size=2304, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=6, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    policy = Policy(use_attention(AutoModelForCausalLM.from_config(config)), compute_dtype=torch.bfloat16).cuda()
    settings = SFTConfig(model="m", data="d", output="o", batch_size=8, micro_batch_size=4, dtype="bfloat16")
    optimizer = make_optimizer([(policy, 1e-4)], settings)
    ids = torch.randint(10, 4000, (4, 512), device="cuda")
    mask = torch.ones_like(ids, dtype=torch.bool)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        for _ in range(2):
            policy(ids, mask, mask[:, 1:]).logprobs.sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    measured = torch.cuda.max_memory_allocated()
    planned = plan_of(settings, lambda _: meta_shape(config), Lengths(512), device="cuda", half=True).peak
    assert planned - CUDA_CONTEXT == pytest.approx(measured, rel=0.1)


def meta_shape(config):
    with torch.device("meta"):
        return shape_of(config)


RAGGED = [[10, 11, 12], [40], [77, 78, 79, 80, 81], [20, 21]] * 5


def cuda_model(tmp_path, architecture):
    make_tiny_model(architecture, tmp_path / "m", hidden_size=32, initializer_range=0.1)
    return load_policy(str(tmp_path / "m"), device=torch.device("cuda"), compute_dtype=torch.float32).lm.eval()


def prompts_read(lm):
    """Cache, mask and next token of the ragged prompts."""
    batch = collate(RAGGED, [[]] * len(RAGGED), pad_id=0).to(lm.device)
    cache = DynamicCache(config=lm.config)
    ids, mask = batch.ids, batch.attention_mask.long()
    with torch.no_grad():
        output = lm(
            input_ids=ids, attention_mask=mask, position_ids=positions(mask), past_key_values=cache, use_cache=True
        )
    return cache, mask, output.logits[:, -1].argmax(-1)


def greedy(decoder, steps, kept):
    """Greedy tokens; halfway, the rows ``kept`` go on alone."""
    cache, mask, ids = prompts_read(decoder.lm)
    decoder.start(cache, mask, steps)
    tokens = []
    for step in range(steps):
        if step == steps // 2:
            decoder.keep(kept)
            ids = ids[kept]
            tokens = [earlier[kept] for earlier in tokens]
        tokens.append(ids)
        ids = decoder.step(ids).argmax(-1)
    return torch.stack(tokens, dim=1).tolist()


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen2", "qwen3"])
def test_a_graph_decodes_what_the_kernels_decode(tmp_path, architecture):
    """Token for token, with rows that leave and with another length of attention on the way; a warning is an error."""
    lm = cuda_model(tmp_path, architecture)
    graphs, kept = graph_decoder(lm, torch.float32), torch.tensor([6, 1, 17], device="cuda")
    expected = greedy(GraphDecoder(lm, torch.float32, capture=False), POSITIONS + 20, kept)
    assert greedy(graphs, POSITIONS + 20, kept) == expected
    assert greedy(graphs, POSITIONS + 20, kept) == expected
    assert len(graphs._graphs) == 3  # twenty rows; three, and then three over more positions


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_an_old_graph_reads_weights_changed_in_place(tmp_path, compute_dtype):
    """Under autocast too, which would keep what it cast; tensors that took the weights' place are found as well."""
    lm = cuda_model(tmp_path, "qwen2")
    decoder, kept = graph_decoder(lm, compute_dtype), torch.arange(20, device="cuda")
    before = greedy(decoder, 12, kept)
    old = dict(decoder._graphs)
    saved = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    after = greedy(decoder, 12, kept)
    assert decoder._graphs == old
    assert after == greedy(GraphDecoder(lm, compute_dtype, capture=False), 12, kept)
    assert after != before
    lm.load_state_dict(saved, assign=True)
    lm.tie_weights()
    assert greedy(decoder, 12, kept) == before


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device_in_a_step(tmp_path):
    lm = cuda_model(tmp_path, "qwen3")
    decoder = graph_decoder(lm, torch.float32)
    cache, mask, ids = prompts_read(lm)
    rows = torch.arange(20, device="cuda")
    decoder.start(cache, mask, 20, rows)
    ids = decoder.step(ids).argmax(-1)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(5):
            ids = decoder.step(ids).argmax(-1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_model_that_waits_for_the_device_is_decoded_without_graphs(tmp_path):
    lm = cuda_model(tmp_path, "llama")
    kept = torch.arange(20, device="cuda")
    expected = greedy(GraphDecoder(lm, torch.float32, capture=False), 12, kept)

    def wait(_module, _inputs, output):
        output.logits.sum().item()

    lm.register_forward_hook(wait)
    decoder, stream = GraphDecoder(lm, torch.float32), torch.cuda.current_stream()
    with pytest.warns(UserWarning, match="cannot be captured as a CUDA graph") as caught:
        assert greedy(decoder, 12, kept) == expected
    assert "previous error" not in str(caught[0].message)  # what broke the recording, not that it was broken
    assert torch.cuda.current_stream() == stream
