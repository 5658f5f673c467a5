"""One rank, two ranks and four ranks train to the same numbers: metrics, responses, weights (issue's first proof)."""

import pytest

SHORT = ("sft", "ppo")
FLOAT32, FLOAT64 = 1e-5, 1e-10
NEAR_ZERO = 1.0
"""In float32 log-probs and what is made of them (KL, margins, losses that cancel) round at this scale, however small."""
PREFERENCES = ("dpo", "simpo", "kto", "online-dpo", "online-dpo-twice")
ON_A_KNIFE_EDGE = {f"{case} {name}" for case in PREFERENCES for name in ("reward/accuracy", "eval/accuracy")}
"""Before the first step policy and reference agree, so which of two equal rewards is larger is up to rounding."""


@pytest.fixture(scope="module")
def trained(results, inputs, tmp_path_factory):
    """``trained(size, names)`` is a folder with the runs of these cases, made by so many ranks at once."""
    made = {}

    def of(size, names, **variables):
        decoder = "gpt2" if variables else "llama"
        key = (size, names, decoder)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(f"{size}-ranks")
            results(size, "training.py", inputs(decoder), made[key], *names, **variables)
        return made[key]

    return of


def check(comparing, steps, one, several, names, *, tolerance, floor, left_out=()):
    for name in names:
        a, b = one / name, several / name
        largest = [
            found for found in comparing.metric_distances(a, b, floor=floor) if f"{name} {found[2]}" not in left_out
        ]
        assert largest[0][0] <= tolerance, (name, largest[:5])
        assert comparing.weight_distance(a, b) <= tolerance, name
        assert comparing.samples_of(a) == comparing.samples_of(b), name
        assert comparing.samples_of(a), name
        assert {step for step, _ in comparing.metrics_of(a)} == set(range(steps + 1)), name


def test_two_ranks_train_as_one_does(trained, comparing, training):
    """In float32, and with every part of PPO: adaptive KL, score norm, ptx, averaged weights, value and entropy terms."""
    check(
        comparing,
        training.STEPS,
        trained(1, SHORT),
        trained(2, SHORT),
        SHORT,
        tolerance=FLOAT32,
        floor=NEAR_ZERO,
        left_out=ON_A_KNIFE_EDGE,
    )


@pytest.mark.exhaustive
def test_memory_that_runs_out_on_one_rank_changes_nothing(trained, comparing, training, mutants):
    cases = ("sft", "kto", "ppo", "grpo", "online-dpo")
    one, several = trained(1, cases), trained(2, tuple(f"{case}@{name}" for case in cases for name in mutants.HARMLESS))
    for case in cases:
        (several / f"{case}@memory_full_on_one_rank").rename(several / case)
    check(comparing, training.STEPS, one, several, cases, tolerance=FLOAT32, floor=NEAR_ZERO, left_out=ON_A_KNIFE_EDGE)


@pytest.mark.exhaustive
def test_planted_mistakes_are_noticed(trained, comparing, training, mutants):
    """The check above would fail for each of them."""
    names = tuple(f"{case}@{name}" for name, (case, _) in mutants.MUTANTS.items())
    one, several = trained(1, ("sft", "reward", "ppo", "grpo")), trained(2, names)
    for name in names:
        case = name.partition("@")[0]
        distances = [
            comparing.metric_distances(one / case, several / name, floor=NEAR_ZERO)[0][0],
            comparing.weight_distance(one / case, several / name),
        ]
        assert max(distances) > 100 * FLOAT32, (name, distances)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 4])
def test_every_trainer_is_the_same_in_float32(trained, comparing, training, size):
    names = tuple(training.CASES)
    check(
        comparing,
        training.STEPS,
        trained(1, names),
        trained(size, names),
        names,
        tolerance=FLOAT32,
        floor=NEAR_ZERO,
        left_out=ON_A_KNIFE_EDGE,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 4])
def test_every_trainer_is_the_same_in_float64(trained, comparing, training, size):
    names = tuple(name for name in training.CASES if name != "reward-encoder")  # its attention computes in float32
    one, several = trained(1, names, DOUBLE="1"), trained(size, names, DOUBLE="1")
    check(comparing, training.STEPS, one, several, names, tolerance=FLOAT64, floor=1e-2, left_out=ON_A_KNIFE_EDGE)
