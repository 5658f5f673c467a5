"""What one of several ranks holds, worked out by hand for a model of round numbers; tests/distributed/test_sharding.py
measures it."""

from dataclasses import replace

import pytest

from heedful import PPOConfig
from heedful.planning.memory import Lengths, plan_of
from heedful.planning.shapes import decoder

SHAPE = decoder(
    vocabulary=1000, hidden=100, layers=10, heads=10, kv_heads=10, head_dim=10, intermediate=400, tied=False
)
"""10 layers of 160,000 weights in matrices and 200 in norms; 100,000 in embeddings and head each, 100 in the last norm."""
PARAMETERS = 10 * 160_200 + 200_000 + 100
BLOCK, ENDS = 160_000, 200_000
RUN = PPOConfig(
    model="m", data="d", output="o", rewards=("rule:digits",), critic="separate", shard="full", micro_batch_size=4,
    minibatch_size=64, rollout_batch_size=64, rollout_micro_batch_size=8, max_new_tokens=50,
)  # fmt: skip
"""64 rows per step, in micro-batches of 4."""


def phases(config, ranks=8, *, shape=SHAPE, lengths=None, device="cuda", half=True):
    lengths = lengths or Lengths(100, 50)
    return plan_of(config, lambda _: shape, lengths, device=device, half=half, ranks=ranks).phases


def test_the_shape_is_as_said():
    assert PARAMETERS == SHAPE.parameters == 1_802_100


def test_a_rank_has_its_rows():
    """8 of 64, and 2 on each of 32: activations of a micro-batch of 4 rows, and of 2."""
    whole = replace(RUN, shard="none")
    eight, few = (phases(whole, ranks)["backward"]["activations"] for ranks in (8, 32))
    assert few < 0.55 * eight
    assert eight == phases(whole, 1)["backward"]["activations"]
    one, eight, few = (phases(whole, ranks)["sampling"]["keys and values"] for ranks in (1, 8, 32))
    assert one == eight == 4 * few


def test_weights_gradients_and_moments_are_divided_and_activations_are_not():
    whole, eight = (phases(replace(RUN, shard=shard)) for shard in ("none", "full"))
    for phase in ("backward", "step"):
        for name in ("policy, trained", "critic, trained", "reference", "moments of the optimizer"):
            assert whole[phase][name] == 8 * eight[phase][name] > 0
    assert eight["step"]["policy, trained"] == 4 * PARAMETERS / 8
    assert eight["step"]["gradients"] == 4 * PARAMETERS / 8  # the policy's; the critic's are there before or after
    trained = 2 * PARAMETERS - 100_000  # the critic has no head of the policy's kind
    assert eight["step"]["moments of the optimizer"] == 8 * trained / 8
    assert eight["backward"]["activations"] == whole["backward"]["activations"]
    assert eight["backward"]["whole blocks"] == 4 * ENDS + 2 * 2 * BLOCK  # two blocks in bfloat16
    float32 = phases(RUN, half=False)
    assert float32["backward"]["whole blocks"] == 4 * ENDS + 2 * 4 * BLOCK


@pytest.mark.parametrize(("device", "size"), [("cpu", 4), ("cuda", 2)])
def test_the_base_of_adapters_stays_in_float32_on_a_cpu(device, size):
    adapters = replace(RUN, lora_rank=2)
    assert phases(adapters, device=device)["backward"]["whole blocks"] == size * (ENDS + 2 * BLOCK)


@pytest.mark.parametrize("recomputes", [False, True])
def test_blocks_are_gathered_in_half_precision_and_only_the_head_is_copied(recomputes):
    backward = phases(replace(RUN, gradient_checkpointing=recomputes))["backward"]
    assert backward["copies in half precision"] == 2 * 100_000


def test_a_whole_weight_of_the_copy_that_samples_may_need_more_than_its_cache():
    """With short responses of one row: the head, in float32, while the copy is made."""
    short = replace(RUN, rollout_micro_batch_size=1, max_new_tokens=1)
    wide = decoder(
        vocabulary=50_000, hidden=100, layers=1, heads=10, kv_heads=10, head_dim=10, intermediate=4, tied=False
    )
    sampling = phases(short, shape=wide, lengths=Lengths(2, 1))["sampling"]
    assert sampling["whole blocks"] == 4 * 50_000 * 100
    assert "keys and values" not in sampling
    assert phases(RUN)["sampling"]["copy that samples"] == 2 * (10 * BLOCK + 100_000) + 4 * 100_000 + 4 * 2_100


ONE_NETWORK = replace(RUN, critic="shared")


def backward(**changes):
    return phases(replace(ONE_NETWORK, **changes))["backward"]["gradients"]


def test_gradients_are_whole_until_they_are_summed():
    """2 micro-batches: all of them and what a block sends; or with a sum after each a block's, embeddings' and head's and
    what the block sends, beside the share."""
    assert backward() == 4 * PARAMETERS + 4 * BLOCK
    by_micro_batch = backward(sync_every="micro-batch")
    assert by_micro_batch == 4 * PARAMETERS / 8 + 2 * BLOCK + 4 * ENDS + 4 * BLOCK
    assert backward(minibatch_size=32, rollout_batch_size=32) == by_micro_batch


def test_gradients_in_bfloat16_are_summed_in_float32():
    """Whole ones are in float32, the embeddings' and head's of a later micro-batch beside them in bfloat16."""
    assert backward(weights_dtype="bfloat16") == 4 * PARAMETERS + 2 * ENDS + 4 * BLOCK
    share = (2 * 1_800_000 + 4 * 2_100) / 8
    each = backward(weights_dtype="bfloat16", sync_every="micro-batch")
    assert each == share + 2 * (BLOCK + ENDS) + 4 * BLOCK


def test_the_root_is_summed_when_the_blocks_are_gone():
    wide = decoder(
        vocabulary=9000, hidden=100, layers=10, heads=10, kv_heads=10, head_dim=10, intermediate=400, tied=False
    )
    found = phases(replace(ONE_NETWORK, sync_every="micro-batch"), shape=wide)["backward"]["gradients"]
    assert found == 4 * wide.parameters / 8 + 8 * 1_800_000


def test_replicas_divide_less():
    assert phases(replace(RUN, replicas=2))["step"]["policy, trained"] == 4 * PARAMETERS / 4
