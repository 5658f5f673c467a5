"""What many GPUs cost, worked out by hand for a model of round numbers."""

from dataclasses import replace

import pytest

from heedful.planning.divided import memory, of_rank, stored
from heedful.planning.memory import Network, Sampling, Work, plan
from heedful.planning.scale import GPU, H100, Job, decode_seconds, flops, received, seconds
from heedful.planning.shapes import LARGE, decoder

SHAPE = decoder(
    vocabulary=1000, hidden=100, layers=10, heads=10, kv_heads=10, head_dim=10, intermediate=400, tied=False
)
"""10 layers of 160,000 weights in matrices and 200 in norms; 100,000 in embeddings and head each, 100 in the last norm."""
POLICY = Network(shape=SHAPE, trained="all")
REFERENCE = Network(shape=SHAPE)
WORK = Work(
    device="cuda", half=True, policy=POLICY, reference=REFERENCE, rows=4, length=100, responses=50, batch=64, rollout=64,
    sampling=Sampling(rows=8, prompt=50, new_tokens=50),
)  # fmt: skip
PARAMETERS = 10 * 160_200 + 200_000 + 100
GPUS = GPU(memory=1e9, flops=1e12, bandwidth=1e11, link=1e10, network=4e9)
JOB = Job(gpu=GPUS, ranks=8, of_flops=0.5, of_bytes=1.0)


def test_the_shape_is_as_said():
    assert PARAMETERS == SHAPE.parameters == 1_802_100


def test_a_rank_has_its_rows():
    mine = of_rank(WORK, JOB)
    assert (mine.batch, mine.rows, mine.sampling.rows) == (8, 4, 8)
    mine = of_rank(WORK, replace(JOB, ranks=32))
    assert (mine.batch, mine.rows, mine.sampling.rows) == (2, 2, 2)


def test_weights_gradients_and_moments_are_divided_and_activations_are_not():
    one, eight = (memory(WORK, replace(JOB, ranks=ranks)) for ranks in (1, 8))
    for phase in ("backward", "step"):
        for name in ("policy, trained", "moments of the optimizer"):
            assert one.phases[phase][name] == 8 * eight.phases[phase][name] > 0
    assert eight.phases["step"]["gradients"] == 4 * PARAMETERS / 8
    assert eight.phases["step"]["policy, trained"] == 4 * PARAMETERS / 8
    assert eight.phases["step"]["moments of the optimizer"] == 8 * PARAMETERS / 8
    whole = plan(of_rank(WORK, JOB)).phases["backward"]
    assert eight.phases["backward"]["activations"] == whole["activations"]
    # embeddings, head and two blocks in float32
    assert eight.phases["backward"]["whole blocks"] == 4 * 200_000 + 2 * 4 * 160_000


@pytest.mark.parametrize(("device", "size"), [("cpu", 4), ("cuda", 2)])
def test_the_base_of_adapters_stays_in_float32_on_a_cpu(device, size):
    """A reference in half precision does not, on either; embeddings, head and two blocks are whole in a pass."""
    adapters = replace(WORK, device=device, policy=replace(POLICY, trained="adapters", lora_rank=2), reference=None)
    whole = 200_000 + 2 * 160_000
    assert memory(adapters, JOB).phases["backward"]["whole blocks"] == size * whole
    assert stored(adapters, REFERENCE) == 2
    assert stored(replace(adapters, half=False), adapters.policy) == 4


def test_autocast_copies_what_a_backward_pass_reads():
    """Of all blocks and the head, or of one block if each is computed again; the critic has no head."""
    kept, again = (memory(replace(WORK, checkpointing=c), JOB).phases for c in (False, True))
    assert kept["backward"]["copies in half precision"] == 2 * (1_600_000 + 100_000)
    assert again["backward"]["copies in half precision"] == 2 * (160_000 + 100_000)
    assert kept["scoring"]["copies in half precision"] == again["scoring"]["copies in half precision"] == 520_000
    assert "copies in half precision" not in memory(replace(WORK, half=False), JOB).phases["backward"]


def test_a_rank_samples_from_a_whole_copy():
    """Matrices in bfloat16, embeddings and norms in float32; or all as they are stored. A cache of 128 tokens of 8 rows."""
    sampling = memory(WORK, JOB).phases["sampling"]
    assert sampling["copy that samples"] == 2 * 1_700_000 + 4 * 102_100
    assert sampling["keys and values"] == 2 * 100 * 2 * 8 * 128 * 11
    assert "whole blocks" not in sampling
    frozen = replace(POLICY, trained="adapters", lora_rank=2)
    for policy, half_weights, more in ((POLICY, True, 0), (frozen, False, 2 * 2 * SHAPE.edges)):
        found = memory(replace(WORK, policy=policy, half_weights=half_weights), JOB).phases["sampling"]
        assert found["copy that samples"] == 2 * 1_800_000 + 4 * 2_100 + more
    whole = memory(replace(WORK, half=False), JOB).phases["sampling"]
    assert whole["copy that samples"] == 4 * PARAMETERS


def test_while_the_copy_is_made_a_weight_is_whole():
    """The head of 100,000 weights in float32, where that is more than the cache and the logits of one short row."""
    short = replace(WORK, sampling=Sampling(rows=1, prompt=1, new_tokens=1))
    sampling = memory(short, JOB).phases["sampling"]
    assert sampling["whole blocks"] == 4 * 100_000
    assert "keys and values" not in sampling


def test_pairs_are_not_divided():
    pairs = replace(WORK, per_item=2, rows=4, batch=6)
    mine = of_rank(pairs, replace(JOB, ranks=2))
    assert (mine.batch, mine.rows) == (4, 4)


def test_gradients_are_whole_until_they_are_summed():
    """2 micro-batches: all of them and what a block sends; or with a sum after each a block's, embeddings' and head's and
    what the block sends, beside the share."""
    assert memory(WORK, JOB).phases["backward"]["gradients"] == 4 * PARAMETERS + 4 * 160_000
    by_micro_batch = memory(WORK, replace(JOB, sync_every="micro-batch")).phases["backward"]["gradients"]
    assert by_micro_batch == 4 * PARAMETERS / 8 + 4 * (160_000 + 200_000) + 4 * 160_000
    one = memory(replace(WORK, batch=32, rollout=32), JOB).phases["backward"]["gradients"]
    assert one == by_micro_batch
    assert received(WORK, replace(JOB, sync_every="micro-batch"))["gradients"] == 2 * received(WORK, JOB)["gradients"]


def test_gradients_in_bfloat16_are_summed_in_float32():
    """Whole ones are in float32, the embeddings' and head's of a later micro-batch beside them in bfloat16."""
    half = replace(WORK, half_weights=True)
    assert memory(half, JOB).phases["backward"]["gradients"] == 4 * PARAMETERS + 2 * 200_000 + 4 * 160_000
    share = (2 * 1_800_000 + 4 * 2_100) / 8
    each = memory(half, replace(JOB, sync_every="micro-batch")).phases["backward"]["gradients"]
    assert each == share + 2 * (160_000 + 200_000) + 4 * 160_000
    assert received(half, JOB)["gradients"] == pytest.approx(4 * PARAMETERS * 7 / 8)


def test_the_root_is_summed_when_the_blocks_are_gone():
    shape = decoder(
        vocabulary=9000, hidden=100, layers=10, heads=10, kv_heads=10, head_dim=10, intermediate=400, tied=False
    )
    work = replace(WORK, policy=replace(POLICY, shape=shape))
    found = memory(work, replace(JOB, sync_every="micro-batch")).phases["backward"]["gradients"]
    assert found == 4 * shape.parameters / 8 + 8 * 1_800_000


def test_replicas_divide_less():
    two = memory(WORK, replace(JOB, replicas=2))
    assert two.phases["step"]["policy, trained"] == 4 * PARAMETERS / 4


def test_without_sampling_here_there_is_no_copy():
    phases = memory(replace(WORK, sampling=None), JOB).phases
    assert "sampling" not in phases
    assert phases["backward"] == memory(WORK, JOB).phases["backward"]


def test_bytes_received():
    """8 of 64 rows are a rank's, in 2 micro-batches of 4; 7/8 of every whole model come from others."""
    assert received(WORK, JOB) == pytest.approx(
        {
            "passes without gradients": 2 * 2 * PARAMETERS * 7 / 8,  # the reference, in bfloat16
            "passes that learn": 2 * 2 * 4 * PARAMETERS * 7 / 8,
            "gradients": 4 * PARAMETERS * 7 / 8,
            "copy that samples": 4 * PARAMETERS * 7 / 8,
        }
    )
    two = received(WORK, replace(JOB, replicas=2))
    assert two["gradients"] == pytest.approx(4 * PARAMETERS * 3 / 4)
    assert two["gradients between replicas"] == pytest.approx(2 * 4 * PARAMETERS / 4 / 2)
    four_updates = received(replace(WORK, batch=16), JOB)  # 2 rows of each minibatch of 16 are a rank's
    assert four_updates["gradients"] == pytest.approx(4 * 4 * PARAMETERS * 7 / 8)
    assert four_updates["passes that learn"] == pytest.approx(4 * 2 * 4 * PARAMETERS * 7 / 8)


def test_one_rank_receives_nothing():
    assert received(WORK, replace(JOB, ranks=1)) == {}


def test_products_of_a_pass():
    assert flops(SHAPE, 1, 100) == 2 * 1_700_000 + 2 * 10 * 100 * 100


def test_a_decoding_step_reads_weights_and_cache():
    """2 bytes of 1.7 million weights, and keys and values of 75 tokens (on average) of 8 rows in 10 layers."""
    step = 2 * 1_700_000 + 8 * 75 * 10 * 2 * 2 * 100
    sampling = Sampling(rows=8, prompt=50, new_tokens=50)
    assert decode_seconds(SHAPE, sampling, JOB) == pytest.approx(50 * step / 1e11)
    assert decode_seconds(SHAPE, sampling, JOB, sharing=4) == pytest.approx(50 * step / 4e11)


def test_seconds():
    found = seconds(WORK, JOB)
    one = flops(SHAPE, 8 * 100, 100)
    assert found["products, learning"] == pytest.approx(3 * one / 0.5e12)
    assert found["products, reading"] == pytest.approx(one / 0.5e12)
    assert found["links"] == pytest.approx(sum(received(WORK, JOB).values()) / 1e10)
    assert found["sampling"] == pytest.approx(decode_seconds(SHAPE, WORK.sampling, JOB))
    again = seconds(replace(WORK, checkpointing=True), JOB)
    assert again["products, learning"] == pytest.approx(4 * one / 0.5e12)
    critic = seconds(replace(WORK, critic=replace(POLICY, output="score")), JOB)
    assert critic["products, learning"] == pytest.approx(6 * one / 0.5e12)
    assert critic["products, reading"] == pytest.approx(2 * one / 0.5e12)


def test_several_machines_are_as_fast_as_the_slower_of_both_links():
    assert JOB.wire == 1e10
    assert replace(JOB, ranks=16).wire == 4e9
    assert replace(JOB, ranks=16, replicas=2).wire == 1e10  # each machine holds a whole model
    assert Job(gpu=H100, ranks=64).wire == pytest.approx(0.8 * 400e9)


def test_servers_that_share_a_model_sample_the_rows_of_all_their_ranks():
    found = seconds(WORK, JOB, samples_here=False, sharing=4)
    rows = replace(WORK.sampling, rows=8 * 4)
    assert found["sampling"] == pytest.approx(decode_seconds(SHAPE, rows, JOB, sharing=4))
    assert found["weights to the servers"] == pytest.approx(2 * PARAMETERS / (4e9 / 8))


def test_adapters_have_small_gradients_and_their_base_travels_in_bfloat16():
    adapters = replace(POLICY, trained="adapters", lora_rank=2)
    found = received(replace(WORK, policy=adapters), JOB)
    assert found["gradients"] == pytest.approx(4 * 2 * SHAPE.edges * 7 / 8)
    assert found["copy that samples"] == pytest.approx(2 * PARAMETERS * 7 / 8)


def test_large_shapes_have_the_parameters_that_are_published():
    assert {name: round(shape.parameters / 1e9, 2) for name, shape in LARGE.items()} == {
        "7B": 7.62,
        "70B": 70.55,
        "405B": 405.85,
    }
