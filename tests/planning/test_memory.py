"""The planner against what the code holds, and against numbers worked out by hand."""

from dataclasses import replace

import pytest
import torch

from cases import pairs_often
from heedful import CriticConfig, DPOConfig, GRPOConfig, PPOConfig, RewardConfig, SFTConfig, make_tiny_model
from heedful.algorithms.online.critic import freeze
from heedful.configs.options import LoRAOptions
from heedful.engines import cuda_graph, kv_cache
from heedful.kernels import attention, head_logprobs
from heedful.kernels.cpu import layers
from heedful.models import add_adapters, load_policy, value_model
from heedful.models.load import load_value_model
from heedful.models.shape import load_shape
from heedful.planning import memory
from heedful.planning.memory import FOUR_BIT, GB, Lengths, plan_of, saved_per_token
from heedful.planning.shapes import KNOWN, decoder
from heedful.training import compact_adamw, memory_preflight
from heedful.types import MicroBatch

SMALL = decoder(
    vocabulary=1000, hidden=10, layers=2, heads=2, kv_heads=1, head_dim=5, intermediate=20, tied=True, head_norms=True
)
"""Per layer 10 * (10 + 5 + 5 + 10 + 3 * 20) = 900 weights in matrices and 10 + 10 + 5 + 5 = 30 in norms."""
CPU = torch.device("cpu")
BASE = {"model": "m", "data": "d", "output": "o"}
SFT = SFTConfig(**BASE, batch_size=8, micro_batch_size=4)


def phases(config, shape=SMALL, *, lengths=None, device="cpu", half=False):
    return plan_of(config, lambda _: shape, lengths or Lengths(16), device=device, half=half).phases


def saved_bytes(folder, rank, layers):
    """Bytes of the different memory that autograd keeps for a batch, weights left out."""
    make_tiny_model(folder.name.split("-")[0], folder, hidden_size=32, num_layers=layers)
    policy = load_policy(str(folder), device=torch.device("cpu"), compute_dtype=torch.float32)
    if rank:
        add_adapters(policy.lm, LoRAOptions(lora_rank=rank), base=str(folder), seed=0)
    own = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    seen, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    ids = torch.randint(20, 200, (4, 24))
    mask = torch.ones_like(ids, dtype=torch.bool)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs = policy(ids, mask, mask[:, 8:]).logprobs
    assert logprobs.requires_grad
    return sum(seen.values()), ids.numel(), load_shape(str(folder))


@pytest.mark.parametrize(
    ("rank", "architecture"), pairs_often([0, 4], ["qwen2", "qwen3", "llama"], [(0, "qwen2"), (4, "qwen3")])
)
def test_a_layer_keeps_what_is_planned_to_the_byte(tmp_path, architecture, rank):
    more, tokens, shape = saved_bytes(tmp_path / f"{architecture}-3", rank, 3)
    less, _, _ = saved_bytes(tmp_path / f"{architecture}-2", rank, 2)
    assert (more - less) / tokens == saved_per_token(shape, half=False, rank=rank)


@pytest.mark.parametrize("rank", [4])
def test_the_last_layer_keeps_nothing_of_its_mlp_for_tokens_that_are_not_read(tmp_path, monkeypatch, rank):
    """16 of 24 tokens of each row are read. The switch is the share of tokens from which on all are computed."""
    part, tokens, shape = saved_bytes(tmp_path / "qwen3-a", rank, 2)
    monkeypatch.setattr(layers, "MOST_READ", 0.0)
    whole, _, _ = saved_bytes(tmp_path / "qwen3-b", rank, 2)
    kept = shape.hidden + 4 * shape.intermediate + 3 * rank
    unread, read = tokens // 3, 2 * tokens // 3
    assert whole - part == 4 * (unread * kept - read * shape.hidden)


def test_sizes_are_those_of_the_code():
    for name in ("CHUNK", "SMALLEST_CHUNK", "LEARNED_CHUNK", "BLOCK", "CPU_BLOCK", "KEPT"):
        assert getattr(memory, name) == getattr(head_logprobs, name)
    assert memory.MOST_SCORES == attention.MOST_SCORES
    assert memory.PART == compact_adamw.PART
    assert (memory.CACHE_BLOCK, memory.GRAPH_BLOCK) == (kv_cache.BLOCK, cuda_graph.POSITIONS)
    assert memory.VALUE_HEAD == value_model.WIDTH
    assert memory.MOST_READ == layers.MOST_READ
    head = value_model.ValueHead(SMALL.hidden)
    ppo = {**BASE, "rewards": ("rule:digits",), "max_new_tokens": 8}
    shared, none = (phases(kind(**ppo), lengths=Lengths(16, 8))["step"] for kind in (PPOConfig, GRPOConfig))
    assert shared["policy, trained"] - none["policy, trained"] == 4 * sum(p.numel() for p in head.parameters())


def test_weights_by_hand():
    assert (SMALL.embedding, SMALL.linear, SMALL.vectors) == (10_000, 1800, 70)
    assert SMALL.edges == 2 * (20 + 15 + 15 + 20 + 3 * 30)
    step = phases(SFT)["step"]
    assert step == {"policy, trained": 4 * 11_870, "moments of the optimizer": 8 * 11_870, "gradients": 4 * 11_870}


def test_lora_by_hand():
    adapted = replace(SFT, lora_rank=3)
    adapters = 3 * 320
    assert phases(adapted)["step"] == {
        "policy, frozen": 4 * 11_870,
        "policy, trained": 4 * adapters,
        "moments of the optimizer": 8 * adapters,
        "gradients": 4 * adapters,
    }
    on_gpu = phases(adapted, device="cuda", half=True)["step"]
    assert on_gpu["policy, frozen"] == 2 * 11_800 + 4 * 70
    in_four_bits = phases(replace(adapted, quantize="4bit"), device="cuda", half=True)["step"]
    assert in_four_bits["policy, frozen"] == pytest.approx(1800 * (0.5 + 1 / 64 + 1 / 4096) + 2 * 10_000 + 4 * 70)


def test_a_mixture_by_hand():
    """Two layers of 4 experts with matrices [40, 10] and [10, 20]: 2 * 4 * (400 + 200) weights, 2 * 4 * (50 + 30) edges."""
    mixture = replace(
        SMALL, experts=4800, expert_edges=640, expert_names=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    )
    assert mixture.parameters == SMALL.parameters + 4800
    assert mixture.has_adapted_experts("all-linear")
    assert mixture.has_adapted_experts("q_proj, experts.down_proj")
    assert not mixture.has_adapted_experts("q_proj,v_proj,gate_proj")
    assert not SMALL.has_adapted_experts("all-linear")
    all_layers = replace(SFT, lora_rank=3)
    attention_only = replace(all_layers, lora_targets="q_proj,k_proj,v_proj,o_proj")
    few, many, four = (
        phases(config, mixture, device="cuda", half=True)
        for config in (attention_only, all_layers, replace(attention_only, quantize="4bit"))
    )
    assert few["step"]["policy, frozen"] == 2 * (11_800 + 4800) + 4 * 70
    assert few["step"]["policy, trained"] == 4 * 3 * 320
    assert many["step"]["policy, frozen"] == 2 * 11_800 + 4 * (4800 + 70)
    assert many["step"]["policy, trained"] == 4 * 3 * (320 + 640)
    assert four["step"]["policy, frozen"] == pytest.approx(1800 * FOUR_BIT + 2 * (10_000 + 4800) + 4 * 70)
    # Experts with their adapters added, of both layers, and the gradients of one layer's.
    extra = many["backward"]["activations"] - few["backward"]["activations"]
    assert extra == 4 * 4800 or extra == 4 * (4800 + 2400)


def test_weights_in_bfloat16_by_hand():
    """Matrices and their gradients in two bytes, norms in four; the moments stay in float32, or are on the CPU."""
    narrow = phases(replace(SFT, weights_dtype="bfloat16"), half=True)
    weights = 2 * 11_800 + 4 * 70
    largest = 10_000  # the embeddings: weights, gradient, noise, rounded bits twice, which are finite, and bfloat16
    assert narrow["step"] == {
        "policy, trained": weights, "moments of the optimizer": 8 * 11_870, "gradients": weights,
        "a chunk of weights in float32": (4 + 4 + 4 + 4 + 4 + 1 + 2) * largest,
    }  # fmt: skip
    assert "copies in half precision" not in narrow["backward"]
    assert "moments of the optimizer" not in phases(replace(SFT, optimizer_device="cpu"))["step"]


def test_a_first_micro_batch_finds_no_gradients():
    """Of a step with one micro-batch only the head's gradient is there while all activations are."""
    split, whole = (phases(replace(SFT, batch_size=size))["backward"] for size in (8, 4))
    assert whole["gradients"] == 4 * SMALL.output
    assert split["gradients"] == 4 * SMALL.output + 4 * SMALL.parameters


def test_the_last_layers_mlp_reads_what_is_scored_on_a_cpu():
    """Of 8 rows of 16 tokens a reward model reads 8 states; for the others nothing is kept of the last MLP: its input, and
    four times its width; of the 8 its output is kept. In half precision, recomputed or compiled the MLP reads all tokens."""
    config = RewardConfig(**BASE, micro_batch_size=4)
    kept = 4 * ((10 + 4 * 20) * (8 * 16 - 8) - 10 * 8)
    whole, read = (phases(c)["backward"]["activations"] for c in (replace(config, compile="on"), config))
    assert whole - read == kept
    adapted = replace(config, lora_rank=3)
    whole, read = (phases(c)["backward"]["activations"] for c in (replace(adapted, compile="on"), adapted))
    assert whole - read == kept + 4 * 3 * 3 * (8 * 16 - 8)
    for options in ({"half": True}, {"device": "cuda", "half": True}):
        assert phases(config, **options) == phases(replace(config, compile="on"), **options)


ONLINE = PPOConfig(
    model="1.5B", data="d", output="o", critic="separate", rewards=("model:0.5B",), micro_batch_size=8, minibatch_size=64,
    rollout_batch_size=64, rollout_micro_batch_size=64, max_new_tokens=512,
)  # fmt: skip


def on_gpu(config, length=1024, ranks=1):
    lengths = Lengths(length, 512)
    return plan_of(config, KNOWN.__getitem__, lengths, device="cuda", half=True, ranks=ranks)


def test_keys_and_values_by_hand():
    """Two of width 5, in float32, for 8 rows of 40 tokens in blocks of 32, in two layers."""
    config = GRPOConfig(**BASE, rewards=("rule:digits",), rollout_micro_batch_size=8, max_new_tokens=16)
    assert phases(config, lengths=Lengths(40, 24))["sampling"]["keys and values"] == 2 * 5 * 4 * 8 * 64 * 2


def test_scoring_by_hand():
    """As many rows of 16 tokens are read as are sampled, not the 4 of a micro-batch: logits over 1,000 words in float32,
    and two more such numbers, of the log-softmax and the entropy. Each of 16 ranks reads its 4 rows."""
    config = GRPOConfig(**BASE, rewards=("rule:digits",), micro_batch_size=4, max_new_tokens=16)
    sizes = []
    for rows, ranks in ((4, 1), (8, 1), (8, 16)):
        found = plan_of(
            replace(config, rollout_micro_batch_size=rows),
            lambda _: SMALL, Lengths(16), device="cpu", half=False, ranks=ranks,
        )  # fmt: skip
        sizes.append(found.phases["scoring"]["activations"])
    assert sizes[1] == 8 * 16 * 1000 * 4 * (1 + 2) == 2 * sizes[0] == 2 * sizes[2]


def test_what_graphs_use_stays():
    """The copy that samples, the cache and one tensor of logits, in all phases; otherwise they are only there to sample."""
    plain = on_gpu(replace(ONLINE, critic="shared", cuda_graphs="off")).phases
    kept = on_gpu(replace(ONLINE, critic="shared", cuda_graphs="on")).phases
    copy, cache = plain["sampling"]["copy that samples"], plain["sampling"]["keys and values"]
    shape = KNOWN["1.5B"]
    assert cache == 2 * shape.key * 2 * 64 * 1024 * shape.layers
    stays = {"copy that samples": copy, "cache and logits of graphs": cache + 64 * shape.vocabulary * 2}
    assert kept["sampling"] == {n: x for n, x in plain["sampling"].items() if n != "keys and values"} | stays
    for phase in ("scoring", "backward", "step"):
        assert kept[phase] == plain[phase] | stays


@pytest.mark.parametrize(
    ("changes", "free", "graphs"),
    [
        ({}, 80 * GB, True),
        ({}, 0, False),  # they would be the peak
        ({"cuda_graphs": "off"}, 80 * GB, False),
        ({"cuda_graphs": "on"}, 0, True),
        ({"shard": "full"}, 80 * GB, False),  # no weights at fixed addresses
        ({"quantize": "4bit", "lora_rank": 16}, 80 * GB, False),
    ],
    ids=["room", "no room", "off", "on", "sharded", "4-bit"],
)
def test_graphs_are_planned_where_there_is_room(changes, free, graphs):
    config = replace(ONLINE, critic="shared", **changes)
    of, ranks = (config, KNOWN.__getitem__, Lengths(1024, 512)), 2 if "shard" in changes else 1
    found = plan_of(*of, device="cuda", half=True, free=free, ranks=ranks)
    assert found.graphs is graphs
    assert ("cache and logits of graphs" in found.phases["backward"]) is graphs


def test_graphs_stay_with_more_rows_and_merged_adapters():
    """What is planned after them does not forget them."""
    config = replace(ONLINE, critic="shared", lora_rank=16, rollout_batch_size=256, rollout_micro_batch_size=None)
    found = plan_of(config, KNOWN.__getitem__, Lengths(1024, 512), device="cuda", half=True, free=400 * GB)
    assert (found.sampled_rows, found.merges_adapters, found.graphs) == (256, True, True)
    assert "cache and logits of graphs" in found.phases["backward"]


def test_a_cpu_has_no_graphs_to_plan():
    found = plan_of(ONLINE, KNOWN.__getitem__, Lengths(1024, 512), device="cpu", half=False, free=800 * GB)
    assert not found.graphs


def test_adapters_are_merged_where_there_is_room():
    """Where another phase needs as much, or so much is free; never on a 4-bit base."""
    config = replace(ONLINE, lora_rank=16, critic="shared", gradient_checkpointing=True, micro_batch_size=1)
    tight, roomy = (
        plan_of(config, KNOWN.__getitem__, Lengths(1024, 512), device="cuda", half=True, free=free)
        for free in (0, 80 * GB)
    )
    assert (tight.merges_adapters, roomy.merges_adapters) == (False, True)
    assert roomy.phases["sampling"]["copy that samples"] == 2 * KNOWN["1.5B"].linear
    assert on_gpu(replace(config, gradient_checkpointing=False, micro_batch_size=32)).merges_adapters
    assert not plan_of(
        replace(config, quantize="4bit"), KNOWN.__getitem__, Lengths(1024, 512), device="cuda", half=True, free=80 * GB
    ).merges_adapters


@pytest.mark.parametrize(
    ("asked", "free", "ranks", "rows"),
    [(None, 0, 1, 128), (None, 80 * GB, 1, 512), (None, 80 * GB, 4, 256), (64, 80 * GB, 1, 64), (8, 0, 1, 8)],
    ids=["another phase's memory", "the whole batch", "a rank's share", "as asked", "fewer as asked"],
)
def test_as_many_rows_are_sampled_as_fit(asked, free, ranks, rows):
    """At least 64; twice as many as long as they fit, or take no more than another phase; or those of the settings."""
    config = replace(ONLINE, rollout_batch_size=512 if ranks == 1 else 1024, rollout_micro_batch_size=asked)
    config = replace(config, micro_batch_size=2, gradient_checkpointing=False, minibatch_size=512)
    lengths = Lengths(1024, 512)
    found = plan_of(config, KNOWN.__getitem__, lengths, device="cuda", half=True, ranks=ranks, free=free)
    assert found.sampled_rows == rows
    assert found.peak <= max(free, on_gpu(replace(config, rollout_micro_batch_size=asked or 64), ranks=ranks).peak)


def test_what_saves_memory_does_so_in_the_plan():
    most = on_gpu(ONLINE).peak - 0.01 * GB
    for change in (
        *({"micro_batch_size": 4}, {"rollout_micro_batch_size": 4, "micro_batch_size": 4}, {"max_new_tokens": 256}),
        *({"gradient_checkpointing": True}, {"optimizer": "adamw-8bit"}, {"optimizer_device": "cpu"}),
        *({"weights_dtype": "bfloat16"}, {"reference_device": "cpu"}, {"critic": "shared"}),
        *({"rewards": ("rule:digits",)}, {"lora_rank": 16}, {"lora_rank": 16, "quantize": "4bit"}),
    ):
        length = 512 + change.get("max_new_tokens", 512)
        assert on_gpu(replace(ONLINE, **change), length).peak < most, change


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_attention_that_stays_has_no_gradients_and_no_moments(tmp_path, architecture):
    make_tiny_model(architecture, tmp_path)
    shape = load_shape(str(tmp_path))
    critic = load_value_model(str(tmp_path), device=CPU, compute_dtype=torch.float32)
    freeze(critic, ["attn" if architecture == "gpt2" else "self_attn"])
    matrices = [p for p in critic.trunk.parameters() if p.dim() == 2 and not p.requires_grad]
    assert shape.attention == sum(p.numel() for p in matrices) > 0

    ppo = PPOConfig(**BASE, rewards=("rule:digits",), max_new_tokens=8, critic="separate")
    names = ("attn",) if architecture == "gpt2" else ("self_attn",)
    whole, frozen = (
        phases(config, shape, lengths=Lengths(16, 8))["step"] for config in (ppo, replace(ppo, value_freeze=names))
    )
    assert "critic, frozen" not in whole
    assert frozen["critic, frozen"] == whole["critic, trained"] - frozen["critic, trained"] == 4 * shape.attention
    assert whole["moments of the optimizer"] - frozen["moments of the optimizer"] == 8 * shape.attention


def test_the_peak_is_the_largest_phase():
    found = on_gpu(ONLINE)
    assert set(found.phases) == {"sampling", "scoring", "backward", "step"}
    assert found.peak == max(map(found.total, found.phases)) == found.total(found.peak_phase)
    assert all(size > 0 for parts in found.phases.values() for size in parts.values())


def test_a_policy_that_only_samples_has_no_adapters_to_merge():
    critic = CriticConfig(model="1.5B", data="d", output="o", rewards=("rule:digits",), lora_rank=16, eval_fraction=0.1)
    plan = plan_of(critic, KNOWN.__getitem__, Lengths(512), device="cuda", half=True, free=80 * GB)
    assert not plan.merges_adapters
    assert "copy that samples" not in plan.phases["sampling"]


def test_dpo_gives_its_reference_back():
    found = phases(DPOConfig(**BASE, reference="r"), device="cuda", half=True)
    assert "reference" in found["scoring"]
    assert "copies in half precision" not in found["scoring"], "the policy, in float32, has no pass there"
    assert "reference" not in found["backward"] | found["step"]
    assert "moments of the optimizer" not in found["scoring"]


def test_a_reference_that_waits_is_on_the_gpu_in_no_pass_but_its_own():
    """The policy's own pass is the largest beside a smaller reference."""
    waits, stays = (on_gpu(replace(ONLINE, reference="0.5B", reference_device=place)) for place in ("cpu", "same"))
    assert "reference" not in waits.phases["scoring"]
    assert waits.total("scoring") == stays.total("scoring") - stays.phases["scoring"]["reference"]


def test_main_memory_beside_a_gpu_has_what_is_put_there():
    """Not the weights: they are read from mapped files."""
    assert on_gpu(ONLINE).host == {"a model while it is loaded": 4 * KNOWN["1.5B"].embedding}, "its head is tied"
    untied = on_gpu(replace(ONLINE, model="8B"))
    assert untied.host == {"a model while it is loaded": 4 * KNOWN["8B"].linear / 36}, "a layer in float32"
    moved = on_gpu(replace(ONLINE, optimizer_device="cpu", reference_device="cpu"))
    weights = KNOWN["1.5B"].parameters
    assert moved.host["moments of the optimizer"] == pytest.approx(8 * 2 * weights, rel=0.001), "and of the critic"
    assert moved.host["reference"] == pytest.approx(2 * weights, rel=0.001)
    assert moved.host["reference"] == moved.phases["scoring"]["reference"], "it is on the GPU for its pass"
    assert all("reference" not in parts for phase, parts in moved.phases.items() if phase != "scoring")
    assert plan_of(ONLINE, KNOWN.__getitem__, Lengths(512), device="cpu", half=False).host == {}


def test_ranks_of_a_machine_need_main_memory_for_each_and_one_copy_to_save():
    divided = plan_of(replace(ONLINE, shard="full"), KNOWN.__getitem__, Lengths(512), device="cuda", half=True, ranks=8)
    one, eight = divided.main_memory(1), divided.main_memory(8)
    assert eight["a model while it is loaded"] == 8 * one["a model while it is loaded"]
    assert eight["copy that is saved"] == one["copy that is saved"] > 4 * KNOWN["1.5B"].linear


@pytest.mark.parametrize(
    ("device", "changes", "free", "graphs"),
    [
        ("cuda", {}, 80, True),
        ("cuda", {}, 0, False),
        ("cuda", {"cuda_graphs": "on"}, 0, True),
        ("mps", {"rollout_batch_size": 512, "rollout_micro_batch_size": None}, 88, False),
    ],
)
def test_a_run_on_a_gpu_has_the_graphs_that_fit(monkeypatch, device, changes, free, graphs):
    monkeypatch.setattr(memory_preflight, "free_memory", lambda _: free * GB)
    monkeypatch.setattr(memory_preflight, "load_shape", KNOWN.__getitem__)
    config = replace(ONLINE, critic="shared", **changes)
    planned = memory_preflight.sampling_plan(config, Lengths(1024, 512), torch.device(device), torch.bfloat16)
    rows = config.rollout_batch_size  # with graphs that it has not, a device would have room for fewer
    assert planned == memory_preflight.SamplingPlan(MicroBatch(rows), graphs=graphs)
