"""Models divided among two ranks train, sample, are saved and go on as whole ones do. Cases share a launch."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

import heedful
from heedful import ConfigError, MemoryFullError
from heedful.data.batches import AdaptiveMicroBatch
from heedful.distributed import rank_failures
from heedful.errors import RankError
from heedful.models.shape import load_shape
from heedful.planning.memory import Lengths, plan_of
from heedful.training.fsdp import divide, divides, loading_device
from heedful.types import MicroBatch

LEAST = {"model": "m", "data": "d", "output": "o", "rewards": ("rule:digits",), "shard": "full"}
OFTEN = ("tied, with a value head", "bfloat16, untied", "stored in half precision")
SELDOM = (
    "untied", "a rank without rows", "sums in every micro-batch", "encoder", "in float64", "adapters", "layers recomputed",
    "unequal micro-batches", "reward model", "value model", "moments of its own", "bfloat16", "bfloat16, reward model",
    "bfloat16, encoder", "products in bfloat16", "products in bfloat16, encoder",
)  # fmt: skip
OTHERS = (
    "bfloat16, rows divided", "noise", "refused", "memory", "states read", "whole for a time", "collected",
    "gathered in half", "differs", "patience", "whole for a time, bfloat16", "copies", "average", "states",
)  # fmt: skip
STATES = ("states, bfloat16", "states, products in bfloat16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("分")


@pytest.fixture(scope="module")
def launched(results, checkpoints, folder):
    """``launched(steps, names)`` is what two ranks found of these cases."""
    models = checkpoints["gpt2"].parent
    return lambda steps, names: results(2, "divided.py", models, folder, *names, STEPS=str(steps))


@pytest.fixture(scope="module")
def two(launched):
    return launched(2, (*OFTEN, *OTHERS))


@pytest.fixture(scope="module")
def seldom(launched):
    return launched(5, (*SELDOM, *OFTEN, "averaged", "for servers", "collected, others", *STATES))


@pytest.mark.exhaustive
def test_weights_are_put_together_for_servers_when_they_have_changed_and_only_then(seldom):
    """Each rank looks at its own parts, and all decide the same; [times put together, times written] after each batch."""
    for first, second in (found["for servers"] for found in seldom):
        assert [times for times, _ in first] == [times for times, _ in second] == [1, 1, 2, 2]
        assert [written for _, written in first] == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("cases", "name"),
    [("two", "collected"), pytest.param("seldom", "collected, others", marks=pytest.mark.exhaustive)],
)
def test_weights_for_servers_are_rounded_and_proven_one_by_one(request, cases, name):
    """On the rank's device: main memory holds what is written, 2 bytes per weight, and the bits are those of whole models."""
    for kind, (same, size) in request.getfixturevalue(cases)[0][name].items():
        assert same, kind
        assert size < 2.1, kind


@pytest.mark.parametrize(
    ("cases", "name"),
    [
        *(("two", name) for name in OFTEN),
        *(pytest.param("seldom", name, marks=pytest.mark.exhaustive) for name in (*SELDOM, *OFTEN)),
    ],
)
def test_steps_give_the_numbers_of_one_process(request, cases, name):
    """Sums are made in another order: rounding, and what AdamW makes of it, is all that may differ.

    In bfloat16 all rows are on one rank: each rank's gradients are rounded to it before they are summed.
    """
    for found in request.getfixturevalue(cases):
        most = 1e-10 if name == "in float64" else 1e-5
        assert found[name]["loss"] < most
        assert found[name]["norm"] < most
        assert found[name]["weights"] < most
        assert found[name]["moved"] > 1e-3, "nothing was learned"
        assert found[name]["names"]


def test_weights_in_bfloat16_learn_from_the_rows_of_all_ranks(two):
    """Gradients are rounded to bfloat16, which is 2^-9 of each at most, on each rank and for each micro-batch."""
    for found in two:
        numbers = found["bfloat16, rows divided"]
        assert max(numbers["loss"], numbers["norm"], numbers["weights"]) < 2**-9
        assert found["noise"] == 0, "they are rounded alike on any number of ranks"
        # matrices wait in half precision for their parts in float32: else each rank has all of them in float32 at first
        assert found["stored in half precision"]["dtypes"] == [["torch.bfloat16", "torch.float32"], ["torch.float32"]]


def test_blocks_are_gathered_in_the_dtype_of_their_products(two, planned):
    """With the same bits: autocast would convert their weights. Embeddings, head and norms stay in float32."""
    shape, _ = planned
    for found in two:
        numbers = found["gathered in half"]
        assert numbers["same"]
        assert numbers["norm"] < 1e-6, "sums of squares are in another order"
        wide, narrow = numbers["bytes"]
        vectors = shape.vectors - shape.hidden
        assert wide - narrow == 2 * shape.linear + 4 * vectors
        assert numbers["whole"]
        assert all("norm" in name for name in numbers["whole"])


def test_one_dtype_of_a_block_is_divided(two):
    """With matrices in bfloat16 what is beside them in float32 stays whole, but for a value head, which is by itself."""
    for found in two:
        whole = found["bfloat16, untied"]["whole"]
        assert set(whole.values()) == {"torch.float32"}
        assert all(name.endswith("norm.weight") for name in whole)
        assert found["tied, with a value head"]["whole"] == {}


def test_each_rank_holds_half(two):
    """Weights, gradients and Adam's moments; a tensor whose rows are odd has one more on rank 0."""
    for place, whole in enumerate(two[0]["memory"][0]):
        parts = [found["memory"][1][place] for found in two]
        assert sum(parts) == whole
        assert max(parts) < 0.51 * whole


def test_each_rank_has_the_states_of_its_own_rows_in_half_precision(two):
    """Of 5 rows, 32 numbers a token in bfloat16."""
    found = [numbers["states read"] for numbers in two]
    assert sorted(found[0]["rows"] + found[1]["rows"]) == [0, 1, 2, 3, 4]
    assert all(numbers["rows"] and numbers["bytes"] == numbers["tokens"] * 32 * 2 for numbers in found)


@pytest.fixture
def planned(checkpoints):
    """``planned(**settings)`` is what `heedful plan` says of the phases of a run of the model that these ranks divide."""
    shape = load_shape(str(checkpoints["qwen3"]))

    def phases(**settings):
        config = heedful.PPOConfig(**LEAST | {"minibatch_size": 16, "micro_batch_size": 4} | settings)
        half = config.dtype == "bfloat16"
        found = plan_of(config, lambda name: shape, Lengths(64, 32), ranks=2, device="cpu", half=half)
        return found.phases

    return shape, phases


def test_a_plan_says_what_each_rank_holds(two, planned):
    """Tensors whose rows are odd have one more on rank 0: a few of 32 rows here, few in a model of any size."""
    shape, phases = planned
    step = phases()["step"]
    gradients_of_head = (step["policy, trained"] * 2 - 4 * shape.parameters) / 2  # which learns in passes of its own
    said = [step["policy, trained"], step["gradients"] + gradients_of_head, step["moments of the optimizer"]]
    for found in two:
        assert found["memory"][1] == pytest.approx(said, rel=0.01)


def test_a_plan_says_what_is_whole_for_a_time(two, planned):
    """The plan counts a second block, which GPUs fetch ahead, and leaves norms out."""
    shape, phases = planned
    block = 2 * shape.linear / shape.layers
    for checkpointing in (False, True):
        plan = phases(dtype="bfloat16", gradient_checkpointing=checkpointing)
        backward = plan["backward"]
        for found in (found["whole for a time"][checkpointing] for found in two):
            assert found["weights"] == pytest.approx(
                [backward["whole blocks"] - block] * len(found["weights"]), rel=0.01
            )
            assert len(found["weights"]) == 3
            assert (
                found["gradients"] == backward["gradients"] - max(2 * block, 4 * shape.output) == 4 * shape.parameters
            )
            assert found["copy that samples"] == plan["sampling"]["copy that samples"]


def test_a_plan_says_what_sums_gradients(two, planned):
    """Each unit's gradients once more, in float32: a block's beside whole ones, the root's where each micro-batch is summed.
    Those in bfloat16 are whole in float32 too. Norms are sent with their units in float32, and are left out here."""
    shape, phases = planned
    block, root = shape.linear / shape.layers, shape.embedding + shape.head
    share = shape.parameters * 4 / 2
    for found in two:
        wide, narrow = found["whole for a time"][0], found["whole for a time, bfloat16"]
        for measured in (wide, narrow):
            *blocks, of_root = measured["sent"]
            assert blocks == pytest.approx([4 * block] * shape.layers, rel=0.02)
            assert of_root == pytest.approx(4 * root, rel=0.02)
        assert narrow["gradients"] == wide["gradients"] == 4 * shape.parameters
        half = {"dtype": "bfloat16", "weights_dtype": "bfloat16"}
        said = phases(**half)["backward"]["gradients"]
        assert said == narrow["gradients"] + 2 * root + 4 * block
    assert phases()["backward"]["gradients"] == 4 * shape.parameters + 4 * max(block, shape.output)
    each = phases(sync_every="micro-batch")["backward"]["gradients"]
    assert each == share + max(4 * root + 8 * block, 8 * root)


def test_autocast_keeps_no_copy_of_blocks(two, planned):
    """They are gathered in the dtype of their products; the head is not."""
    shape, phases = planned
    for found in two:
        (alone, learning, _), (alone_again, recomputed, of_head) = (one["casts"] for one in found["whole for a time"])
        assert (alone, learning, alone_again, recomputed) == (0, 0, 0, 0)
        assert of_head == 2 * shape.output
        for checkpointing in (False, True):
            said = phases(dtype="bfloat16", gradient_checkpointing=checkpointing)["backward"][
                "copies in half precision"
            ]
            assert said == of_head


def test_copies_are_whole(two, folder):
    """They sample the same tokens with the same log-probs, and are saved as the same files, by rank 0 only."""
    for here, found in enumerate(two):
        assert found["copies"] == {
            "same": [True, True],
            "equal": True,
            "tied": True,
            "on first": here == 0,
            "whole is itself": True,
        }
    one, several = folder / "one", folder / "several"
    names = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(several) for path in several.rglob("*") if path.is_file())
    for name in names:
        assert (one / name).read_bytes() == (several / name).read_bytes(), name


def test_an_average_is_put_in_place_and_taken_out(two):
    for found in two:
        assert found["average"]["held"] < 1e-6
        assert found["average"]["loss"] < 1e-6
        assert found["average"]["back"]
        assert found["average"]["differs"]


@pytest.mark.parametrize(
    ("cases", "name"),
    [("two", "states"), *(pytest.param("seldom", name, marks=pytest.mark.exhaustive) for name in STATES)],
)
def test_a_state_goes_to_ranks_and_to_one_process_and_back(request, cases, name):
    for found in request.getfixturevalue(cases):
        assert found[name] == {
            "suffixes": [".json", ".safetensors"],
            "tree": [[0, 1, 2], [1, 2.5]],
            "divided": True,
            "whole": True,
            "from whole": True,
            "kind": "Tensor",
        }


def test_each_rank_writes_its_parts_only(two, folder):
    """Every number is in one file, and the header says where it belongs: there is nothing else beside it."""
    files = sorted((folder / "state" / "divided").iterdir())
    assert len(files) == 2
    sizes = [sum(tensor.numel() for tensor in load_file(path).values()) for path in files]
    tree = json.loads((folder / "state" / "state.json").read_text(encoding="utf-8"))
    assert sum(sizes) == sum(math.prod(shape) for _, shape in divided(tree))
    assert max(sizes) < 0.51 * sum(sizes)


def divided(tree):
    """What is written in a state's tree of divided tensors."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from [value] if name == "$divided" else divided(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from divided(value)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (
            torch.OutOfMemoryError("the device has none"),
            MemoryFullError,
            "--micro-batch-size 3, and the run resumes from its newest checkpoint",
        ),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"),
            RankError,
            "Connection closed by peer",
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError, "mat1 and mat2"),
    ],
)
def test_an_error_in_a_pass_of_all_ranks_ends_the_run(monkeypatch, error, kind, said):
    """The others wait in the middle of the pass: doing it again would be answered by nobody. Elsewhere it is halved. One of
    the connection names a rank."""
    monkeypatch.setattr(rank_failures._Passes, "are_open", False)
    tried = []

    def work(limit):
        tried.append(limit.rows)
        with rank_failures.in_lockstep():
            raise error

    with pytest.raises(kind, match=said) as raised:
        AdaptiveMicroBatch().run(work, MicroBatch(6), rows=20)
    assert (type(raised.value), tried) == (kind, [6])
    assert rank_failures.others_wait()
    assert not rank_failures.all_stop(KeyboardInterrupt()), "whoever left a pass unfinished cannot act with the others"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"compile": "on"}, "--compile on does not go with --shard full"),
        ({"quantize": "4bit", "lora_rank": 4}, "--quantize 4bit does not go"),
        ({"optimizer": "adamw-8bit"}, "--optimizer adamw-8bit does not go"),
        ({"dtype": "float16"}, "--dtype float16 does not go with --shard full: .* use --dtype bfloat16"),
        ({"reference_device": "cpu"}, "--reference-device cpu does not go"),
        ({"cuda_graphs": "on"}, "--cuda-graphs on does not go"),
        (
            {"sampler": ("vllm:http://h:1",), "sampler_weights": "nccl"},
            "--sampler-weights nccl does not go with --shard full",
        ),
        ({"shard": "none", "replicas": 2}, "--replicas .*belongs to --shard full"),
        ({"shard": "none", "sync_every": "micro-batch"}, "--sync-every .*belongs to --shard full"),
    ],
    ids=str,
)
def test_what_cannot_be_divided_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        heedful.PPOConfig(**LEAST | settings)


def test_in_one_process_there_is_nothing_to_divide(tmp_path):
    config = heedful.SFTConfig(model="m", data="d", output=tmp_path, shard="full")
    assert not divides(config)
    assert loading_device(config, torch.device("cuda")) == torch.device("cuda")
    divide(config, torch.device("cpu"), None)


def test_groups_of_ranks_and_models_that_do_not_divide_are_refused(two):
    """And groups wait as long as the settings say: torch gives rows and columns a timeout of its own, 30 minutes."""
    for found in two:
        assert found["patience"] == [420.0, 420.0]
        assert found["refused"] == [
            "--replicas 3 does not divide the 2 ranks; choose one of 1, 2, or start a multiple of 3 ranks",
            "--shard full: Linear has no list of layers to shard; leave out --shard",
            "--shard full: GPT2LMHeadModel is a mixture of experts with a module per expert, and ranks would differ "
            "in the experts that get gradients; leave out --shard",
        ]


def test_ranks_with_another_version_or_other_code_are_refused(two):
    for found in two:
        versions, code = found["differs"]
        assert versions.startswith("rank 1 differs from rank 0 in versions: heedful ")
        assert " torch 0.1 " in versions
        assert versions.endswith("; install the same versions on every machine")
        assert code.startswith("rank 1 differs from rank 0 in code: ")
        assert code.endswith("; install the same heedful on every machine")


@pytest.mark.exhaustive
def test_gradients_that_are_averaged_would_be_noticed(seldom):
    """A planted mistake: FSDP2's own choice is the mean over ranks."""
    for found in seldom:
        assert found["averaged"]["norm"] > 0.1
