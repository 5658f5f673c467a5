"""One rank, two ranks and four ranks train to the same numbers: metrics, responses, weights; also with divided models."""

import json

import pyarrow.parquet as pq
import pytest

from heedful.algorithms.online.rollout_files import OF_TOKENS

SHORT, FEW = ("sft", "ppo"), 2
"""Cases and steps of the tests that are not exhaustive."""
SHARDED = {"shard": "full", "save_every": 5}
HALF = {
    "dtype": "bfloat16",
    "weights_dtype": "bfloat16",
    "micro_batch_size": 64,
    "max_grad_norm": 0.0,
    "lora_rank": None,
    "ema_decay": None,
    "ptx_data": None,
    "ptx_coef": None,
}
"""Weights in bfloat16, in one pass per step and rank, so that gradients are rounded to it as often either way. With ptx there
are two: a whole model's gradients are rounded to bfloat16 after each, those of a divided one once they are summed."""
FLOAT32, FLOAT64 = 1e-5, 1e-10
NEAR_ZERO = 1.0
"""In float32 log-probs and what is made of them (KL, margins, losses that cancel) round at this scale, however small."""
PREFERENCES = ("dpo", "simpo", "kto", "online-dpo", "online-dpo-twice")
ON_A_KNIFE_EDGE = {f"{case} {name}" for case in PREFERENCES for name in ("reward/accuracy", "eval/accuracy")}
"""Before the first step policy and reference agree, so which of two equal rewards is larger is up to rounding."""


@pytest.fixture(scope="module")
def trained(results, inputs, tmp_path_factory):
    """``trained(size, names, **changes)`` is a folder with the runs of these cases, made by so many ranks at once."""
    made = {}

    def of(size, names, *, double=False, apart=False, steps=None, **changes):
        variables = {"CHANGES": json.dumps(changes)} | ({} if steps is None else {"STEPS": str(steps)})
        variables |= ({"DOUBLE": "1"} if double else {}) | ({"APART": "1"} if apart else {})
        key = (size, names, *variables.items())
        if key not in made:
            made[key] = tmp_path_factory.mktemp(f"{size}-ranks")
            results(size, "training.py", inputs("gpt2" if double else "llama"), made[key], *names, **variables)
        return made[key]

    return of


@pytest.fixture
def tokens_of():
    """``tokens_of(run)``: by the name of a column of rollouts/, the numbers of all tokens."""

    def of(run):
        rows = [row for path in sorted((run / "rollouts").iterdir()) for row in pq.read_table(path).to_pylist()]
        return {name: [number for row in rows for number in row[name] or ()] for name in OF_TOKENS}

    return of


@pytest.fixture
def check(comparing, training):
    """``check(one, several, names)``: the runs of these cases in two folders have the same metrics, weights and samples."""

    def of(one, several, names, *, tolerance=FLOAT32, floor=NEAR_ZERO, steps=training.STEPS):
        for name in names:
            a, b = one / name, several / name
            distances = [
                far
                for far in comparing.metric_distances(a, b, floor=floor)
                if f"{name} {far[2]}" not in ON_A_KNIFE_EDGE
            ]
            assert distances[0][0] <= tolerance, (name, distances[:5])
            assert comparing.weight_distance(a, b) <= tolerance, name
            assert comparing.samples_of(a) == comparing.samples_of(b), name
            assert comparing.samples_of(a), name
            assert {step for step, _ in comparing.metrics_of(a)} == set(range(steps + 1)), name

    return of


def test_two_ranks_train_as_one_does(trained, check):
    """In float32, and with every part of PPO: adaptive KL, score norm, ptx, averaged weights, value and entropy terms."""
    check(trained(1, SHORT, steps=FEW), trained(2, SHORT, steps=FEW), SHORT, steps=FEW)


def test_two_ranks_write_the_numbers_of_every_token(trained, tokens_of):
    """Those of the passes that each made of its own responses, the last of several."""
    one, two = (tokens_of(trained(ranks, SHORT, steps=FEW) / "ppo") for ranks in (1, 2))
    for name in OF_TOKENS:
        assert one[name], name
        assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-4), name
    assert len(set(one["log_ratio"])) > 100


def test_two_ranks_that_divide_their_models_train_as_one_does(trained, check):
    """PPO with every part: a value head, a reference, score norm, ptx, averaged weights. Other trainers are exhaustive.

    A checkpoint holds safetensors and JSON only: each rank has written its parts; the manifest names all files, and is
    checked when a run goes on.
    """
    once, names = {"steps": FEW, "ppo_epochs": 1}, ("ppo", "ppo-turns")
    divided = trained(2, names, **once, **SHARDED | {"save_every": FEW})
    check(trained(1, names, **once), divided, names, steps=FEW)
    folder = divided / "ppo" / "checkpoints"
    step = sorted(folder.glob("step-*"))[-1]
    files = {path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file()}
    parts = {name for name in files if name.startswith("resume/divided/")}
    assert {name.rpartition(".")[2] for name in files if name.startswith("resume/")} == {"safetensors", "json"}
    assert len(parts) == 2
    manifest = json.loads((step / "MANIFEST.json").read_text(encoding="utf-8"))
    assert set(manifest["files"]) == files - {"MANIFEST.json"}
    assert not list(folder.glob(".*"))


@pytest.mark.exhaustive
def test_memory_that_runs_out_on_one_rank_changes_nothing(trained, check, mutants):
    cases = ("sft", "kto", "ppo", "ppo-turns", "grpo", "online-dpo")
    one, several = trained(1, cases), trained(2, tuple(f"{case}@{name}" for case in cases for name in mutants.HARMLESS))
    for case in cases:
        (several / f"{case}@memory_full_on_one_rank").rename(several / case)
    check(one, several, cases)


@pytest.mark.exhaustive
def test_planted_mistakes_are_noticed(trained, comparing, mutants):
    """The check above would fail for each of them."""
    names = tuple(f"{case}@{name}" for name, (case, _) in mutants.MUTANTS.items())
    # without tables of samples: in one mistake two ranks add up the token ids of a row
    one = trained(1, ("sft", "reward", "ppo", "grpo"), sample_every=0)
    several = trained(2, names, sample_every=0)
    for name in names:
        case = name.partition("@")[0]
        distances = [
            comparing.metric_distances(one / case, several / name, floor=NEAR_ZERO)[0][0],
            comparing.weight_distance(one / case, several / name),
        ]
        assert max(distances) > 100 * FLOAT32, (name, distances)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, {}),
        (4, {}),
        (2, SHARDED),
        (2, {**SHARDED, "sync_every": "micro-batch"}),
        (4, SHARDED),
        (4, {**SHARDED, "replicas": 2}),
    ],
    ids=str,
)
def test_every_trainer_is_the_same_in_float32(trained, check, training, size, changes):
    names = tuple(training.CASES)
    check(trained(1, names), trained(size, names, **changes), names)


@pytest.mark.exhaustive
@pytest.mark.parametrize("changes", [{}, SHARDED], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_every_trainer_is_the_same_in_float64(trained, check, training, size, changes):
    names = tuple(name for name in training.CASES if name != "reward-encoder")  # its attention computes in float32
    one, several = trained(1, names, double=True), trained(size, names, double=True, **changes)
    check(one, several, names, tolerance=FLOAT64, floor=1e-2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_trainer_is_the_same_with_moments_in_main_memory(trained, check, training, replicas):
    names = tuple(training.CASES)
    check(trained(1, names), trained(2 * replicas, names, apart=True, replicas=replicas, **SHARDED), names)


@pytest.mark.exhaustive
def test_every_trainer_is_the_same_with_weights_in_bfloat16(trained, check, training):
    """Divided and whole, on two ranks each: a rank's gradients are those of its rows, and rounded to bfloat16."""
    names = tuple(training.CASES)
    check(trained(2, names, **HALF), trained(2, names, **HALF, **SHARDED), names)


@pytest.fixture
def go_on(launch, inputs, tmp_path):
    """``go_on(case, stages)``: a run that is cut short by a signal after a step of each stage but the last."""

    def of(case, stages, **variables):
        for number, (size, changes) in enumerate(stages):
            is_last = number == len(stages) - 1
            faults = {} if is_last else {size - 1: {"HEEDFUL_FAULTS": "step.learned:term@1"}}
            more = {"CHANGES": json.dumps(changes), **variables}
            processes = launch(size, "training.py", inputs(), tmp_path, case, per_rank=faults, **more)
            said = [process.communicate(timeout=300)[1][-3000:] for process in processes]
            assert all((process.returncode == 0) == is_last for process in processes), said
        return tmp_path

    return of


ANOTHER_WAY = (
    [(2, SHARDED), (1, {}), (2, SHARDED)],
    [(1, {}), (2, SHARDED), (4, SHARDED)],
    [(4, {**SHARDED, "replicas": 2}), (2, {}), (2, SHARDED)],
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("case", "variables", "stages"),
    [
        *((case, {}, s) for case in ("sft", "reward", "ppo", "ppo-separate", "grpo-dynamic") for s in ANOTHER_WAY),
        *((case, {"APART": "1"}, s) for case in ("sft", "ppo-separate") for s in ANOTHER_WAY[:2]),
    ],
    ids=str,
)
def test_a_run_goes_on_divided_in_another_way(trained, go_on, check, case, variables, stages):
    """On ranks that divide, on one process, on ranks that do not; also with moments in main memory."""
    check(trained(1, (case,)), go_on(case, stages, **variables), (case,))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["sft", "ppo-separate"])
def test_weights_in_bfloat16_go_on_divided_and_whole(trained, go_on, check, case):
    """Noise included, since each weight has the same however weights are divided."""
    stages = [(2, {**HALF, **SHARDED}), (2, HALF), (2, {**HALF, **SHARDED})]
    check(trained(2, (case,), **HALF), go_on(case, stages), (case,))
