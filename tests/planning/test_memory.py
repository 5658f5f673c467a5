"""The planner against what the code holds, and against numbers worked out by hand."""

from dataclasses import replace

import pytest
import torch

from heedful.configs.lora import LoRAOptions
from heedful.kernels import attention, head_logprobs
from heedful.models import value_model
from heedful.models.load import load_policy
from heedful.models.lora import add_adapters
from heedful.models.shape import load_shape
from heedful.models.tiny import make_tiny_model
from heedful.planning import memory
from heedful.planning.memory import FOUR_BIT, GB, Network, Sampling, Work, plan
from heedful.planning.saved import saved_per_token
from heedful.planning.shapes import KNOWN, decoder
from heedful.sampling import kv_cache

SMALL = decoder(
    vocabulary=1000, hidden=10, layers=2, heads=2, kv_heads=1, head_dim=5, intermediate=20, tied=True, head_norms=True
)
"""Per layer 10 * (10 + 5 + 5 + 10 + 3 * 20) = 900 weights in matrices and 10 + 10 + 5 + 5 = 30 in norms."""
SFT = Work(
    device="cpu", half=False, policy=Network(shape=SMALL, trained="all"), rows=4, length=16, responses=16, batch=8
)


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


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("rank", [0, 4])
def test_a_layer_keeps_what_is_planned_to_the_byte(tmp_path, architecture, rank):
    more, tokens, shape = saved_bytes(tmp_path / f"{architecture}-3", rank, 3)
    less, _, _ = saved_bytes(tmp_path / f"{architecture}-2", rank, 2)
    assert (more - less) / tokens == saved_per_token(shape, half=False, rank=rank)


def test_sizes_are_those_of_the_code():
    assert (memory.CHUNK, memory.SMALLEST_CHUNK, memory.BLOCK, memory.KEPT) == (
        head_logprobs.CHUNK,
        head_logprobs.SMALLEST_CHUNK,
        head_logprobs.BLOCK,
        head_logprobs.KEPT,
    )
    assert memory.MOST_SCORES == attention.MOST_SCORES
    assert memory.CACHE_BLOCK == kv_cache.BLOCK
    assert memory.VALUE_HEAD == value_model.WIDTH
    head = value_model.ValueHead(SMALL.hidden)
    with_head = plan(replace(SFT, value_head=True)).phases["step"]["policy, trained"]
    assert with_head - plan(SFT).phases["step"]["policy, trained"] == 4 * sum(p.numel() for p in head.parameters())


def test_weights_by_hand():
    assert (SMALL.embedding, SMALL.linear, SMALL.vectors) == (10_000, 1800, 70)
    assert SMALL.edges == 2 * (20 + 15 + 15 + 20 + 3 * 30)
    step = plan(SFT).phases["step"]
    assert step == {"policy, trained": 4 * 11_870, "moments of the optimizer": 8 * 11_870, "gradients": 4 * 11_870}


def test_lora_by_hand():
    policy = Network(shape=SMALL, trained="adapters", lora_rank=3)
    step = plan(replace(SFT, policy=policy)).phases["step"]
    adapters = 3 * 320
    assert step == {
        "policy, frozen": 4 * 11_870,
        "policy, trained": 4 * adapters,
        "moments of the optimizer": 8 * adapters,
        "gradients": 4 * adapters,
    }
    on_gpu = plan(replace(SFT, policy=policy, device="cuda", half=True)).phases["step"]
    assert on_gpu["policy, frozen"] == 2 * 11_800 + 4 * 70
    in_four_bits = plan(replace(SFT, policy=replace(policy, four_bit=True), device="cuda", half=True)).phases["step"]
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
    learns_few = Network(shape=mixture, trained="adapters", lora_rank=3)
    learns_all = replace(learns_few, adapts_experts=True, float32_experts=True)
    gpu = replace(SFT, device="cuda", half=True)
    few, many, four = (
        plan(replace(gpu, policy=policy)).phases
        for policy in (learns_few, learns_all, replace(learns_few, four_bit=True))
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
    step = plan(replace(SFT, half=True, half_weights=True)).phases["step"]
    weights = 2 * 11_800 + 4 * 70
    assert step == {"policy, trained": weights, "moments of the optimizer": 8 * 11_870, "gradients": weights}
    assert "moments of the optimizer" not in plan(replace(SFT, optimizer_on_device=False)).phases["step"]
    assert "copies in half precision" not in plan(replace(SFT, half=True, half_weights=True)).phases["backward"]


def test_a_first_micro_batch_finds_no_gradients():
    """Of a step with one micro-batch only the head's gradient is there while all activations are."""
    split, whole = plan(SFT).phases["backward"], plan(replace(SFT, batch=4)).phases["backward"]
    assert whole["gradients"] == 4 * SMALL.output
    assert split["gradients"] == 4 * SMALL.output + 4 * SMALL.parameters


def test_keys_and_values_by_hand():
    """Two of width 5, in float32, for 8 rows of 40 tokens in blocks of 32, in two layers and one that grows."""
    sampling = Sampling(rows=8, prompt=24, new_tokens=16)
    phases = plan(replace(SFT, sampling=sampling, rollout=8)).phases
    assert phases["sampling"]["keys and values"] == 2 * 5 * 4 * 8 * 64 * 3


def test_scoring_by_hand():
    """8 rows of 16 tokens are read at a time, not the 4 of a micro-batch: logits over 1,000 words in float32, and three more
    such numbers, of the log-softmax and the entropy."""
    few, many = (plan(replace(SFT, rollout=64, scored_rows=rows)).phases["scoring"] for rows in (None, 8))
    assert many["activations"] == 8 * 16 * 1000 * 4 * (1 + 3) == 2 * few["activations"]


ONLINE = Work(
    device="cuda",
    half=True,
    policy=Network(shape=KNOWN["1.5B"], trained="all"),
    reference=Network(shape=KNOWN["1.5B"]),
    critic=Network(shape=KNOWN["1.5B"].trunk, trained="all", output="score"),
    rewards=(Network(shape=KNOWN["0.5B"].trunk, output="score"),),
    rows=8,
    length=1024,
    responses=512,
    batch=64,
    rollout=64,
    sampling=Sampling(rows=64, prompt=512, new_tokens=512),
)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 4},
        {"scored_rows": 4, "rows": 4},
        {"length": 768, "responses": 256},
        {"checkpointing": True},
        {"optimizer": "adamw-8bit"},
        {"optimizer_on_device": False},
        {"half_weights": True},
        {"reference": None},
        {"reference": replace(ONLINE.reference, on_device=False)},
        {"critic": None},
        {"critic": None, "value_head": True},
        {"rewards": ()},
        {"policy": replace(ONLINE.policy, trained="adapters", lora_rank=16)},
        {"policy": replace(ONLINE.policy, trained="adapters", lora_rank=16, four_bit=True)},
    ],
    ids=str,
)
def test_what_saves_memory_does_so_in_the_plan(change):
    assert plan(replace(ONLINE, **change)).peak < plan(ONLINE).peak - 0.01 * GB


def test_the_peak_is_the_largest_phase():
    found = plan(ONLINE)
    assert set(found.phases) == {"sampling", "scoring", "backward", "step"}
    assert found.peak == max(map(found.total, found.phases)) == found.total(found.peak_phase)
    assert all(size > 0 for parts in found.phases.values() for size in parts.values())


def test_dpo_gives_its_reference_back():
    found = plan(replace(SFT, device="cuda", half=True, reference=Network(shape=SMALL), reference_is_freed=True)).phases
    assert "reference" in found["scoring"]
    assert "reference" not in found["backward"] | found["step"]
    assert "moments of the optimizer" not in found["scoring"]
