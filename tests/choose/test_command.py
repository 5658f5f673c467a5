"""`heedful choose` as a command, on tiny models: what it recommends, when it abstains, what it refuses, how it goes on."""

import json

import pytest

from heedful import faults

PROMPTS = [{"prompt": f"第{i}题：写一个字。", "offset": 20 * (i % 2)} for i in range(40)]
SMALL = {
    "rewards": "rule:length:20-30", "tokens": 64, "seeds": 2, "eval_fraction": 0.4, "eval_samples": 1, "kl_coef": 0,
    "rollout_batch_size": 16, "minibatch_size": 16, "samples_per_prompt": 4, "max_new_tokens": 4, "ppo_epochs": 1,
    "dtype": "float32",
}  # fmt: skip
ABOUT_SECONDS = ("seconds", "tokens_per_second")
REWARD = """
def easy(prompts, completions, offset):
    '''Each prompt has its own level, far apart; an answer is better for every x in it.'''
    return [level + text.count("x") for text, level in zip(completions, offset)]
"""


@pytest.fixture
def choose(heedful, tiny, written, tmp_path):
    """``choose(**settings)`` runs the command and returns its outcome; ``.result`` is what it wrote, if anything."""

    def run(*words, prompts=PROMPTS, output="选择", **settings):
        files = {"model": tiny(), "data": written("题目.jsonl", prompts), "output": tmp_path / output}
        flags = {name: value for name, value in (files | SMALL | settings).items() if value is not None}
        outcome = heedful("choose", *words, **flags)
        numbers = tmp_path / output / "choose.json"
        outcome.result = json.loads(numbers.read_text(encoding="utf-8")) if numbers.exists() else None
        return outcome

    return run


def without_seconds(result):
    methods = {
        method: {name: value for name, value in numbers.items() if name not in ABOUT_SECONDS}
        for method, numbers in result["methods"].items()
    }
    return result | {"methods": methods}


@pytest.fixture
def edited(choose, tmp_path):
    """``edited(ppo, grpo)``: the command on finished runs, whose held-out scores are the start's plus what the functions of a
    seed and a prompt's number say."""
    folder = tmp_path / "选择"

    def change(**gains):
        start = json.loads((folder / "start.json").read_text(encoding="utf-8"))
        for method, gain in gains.items():
            for seed in (0, 1):
                path = folder / f"{method}-{seed}.json"
                found = json.loads(path.read_text(encoding="utf-8"))
                found["scores"] = [score + gain(seed, i) for i, score in enumerate(start["scores"])]
                path.write_text(json.dumps(found), encoding="utf-8")
        return choose(**EQUAL)

    return change


EQUAL = {"learning_rate": 1e-12, "allow": "learning-rate", "kl_coef": 0.05, "tokens": None, "minutes": 1e-6}
"""Both leave the model as it is. The first run gets a quarter of the minutes and ends after its first step."""


def test_a_table_a_page_and_a_sentence(choose, edited, tmp_path):
    """Nothing is told apart that is equal; then, by other scores of the same runs, each way to tell and not to tell."""
    outcome = choose("--json", **EQUAL)
    assert outcome.status == 0, outcome.err
    found = json.loads(outcome.out)
    assert found == outcome.result
    assert found["recommendation"] is None
    assert found["difference"] == {"mean": 0, "low": 0, "high": 0}
    assert "neither is better than the start" in found["sentence"]
    for numbers in found["methods"].values():
        assert numbers["score"] == found["start_score"]
        assert 2 * 16 <= numbers["tokens"] <= 2 * 3 * 16 * 4
        assert numbers["kl"] == pytest.approx(0, abs=1e-5)
        assert 0.5 < numbers["gradient_noise"] < 1.5  # mostly noise: 1, and 2 if the halves were not compared
    ppo, grpo = found["methods"]["ppo"], found["methods"]["grpo"]
    assert 0 <= grpo["tied_frac"] <= 1
    assert (ppo["tied_frac"], grpo["explained_variance"]) == (None, None)
    assert all(ppo[f"explained_variance{which}"] <= 1 for which in ("", "_first", "_prompt"))

    outcome = edited(ppo=lambda _, i: 0.01 * (i % 3), grpo=lambda seed, i: 0.5 + 0.01 * ((seed + i) % 3))
    assert outcome.result["recommendation"] == "grpo"
    assert outcome.result["sentence"].startswith("GRPO: after ")
    assert outcome.result["sentence"] in " ".join(outcome.out.split())
    for shown in ("held-out score", "tied groups", "tokens per second", "PPO minus GRPO"):
        assert shown in outcome.out
    page = (tmp_path / "选择" / "choose.html").read_text(encoding="utf-8")
    assert page.index("PPO or GRPO") < page.index("GRPO: after ") < page.index("Out of the healthy band")

    better, same = lambda seed, i: 0.5 + 0.01 * ((seed + i) % 3), lambda _, i: 0.01 * (i % 3)
    assert edited(ppo=better, grpo=same).result["recommendation"] == "ppo"
    outcome = edited(ppo=lambda *_: -0.5, grpo=lambda *_: -0.6)
    assert outcome.result["recommendation"] is None, "the better of two that fell"
    assert "neither is better than the start" in outcome.result["sentence"]
    assert "lower --learning-rate, or raise --kl-coef" in outcome.result["sentence"]
    outcome = edited(ppo=lambda *_: 0.5, grpo=lambda seed, _: 0.6 + 0.05 * seed)
    assert outcome.result["recommendation"] is None, "seeds differ"
    assert "may be chance. If it stays as large, --seeds " in outcome.result["sentence"]
    outcome = edited(ppo=lambda *_: 0.5, grpo=lambda _, i: 0.8 + (1 if i % 2 else -1))
    assert outcome.result["recommendation"] is None, "prompts differ"
    assert "held-out prompts would tell (17 so far)" in outcome.result["sentence"]
    outcome = edited(ppo=lambda *_: 0.5, grpo=lambda *_: 0.5)
    assert "With 100 times as many runs or prompts it would still be" in outcome.result["sentence"]


@pytest.mark.exhaustive
def test_the_better_one_is_recommended(choose, written):
    """Prompts with levels far apart: a group has its own mean, and a critic has to learn it first."""
    reward = f"python:{written('奖励.py', REWARD)}:easy"
    more = {"kl_coef": 0.05, "ppo_epochs": 4, "tokens": 1500, "max_new_tokens": 8, "seeds": 3}
    outcome = choose(rewards=reward, learning_rate=0.02, **more)
    assert outcome.status == 0, outcome.err
    assert outcome.result["recommendation"] == "grpo"
    assert outcome.result["difference"]["high"] < 0 < outcome.result["methods"]["grpo"]["change"]["low"]


def test_it_goes_on_where_it_ended(choose, tmp_path):
    """Ended in the third run, it repeats no run that is finished, and finds what it finds without an end; then it does
    nothing, and with more seeds only those."""
    settings = {"learning_rate": 0.01, "tokens": 130}
    whole = choose(output="一次", **settings).result
    assert all(2 * 130 <= numbers["tokens"] < 2 * (130 + 16 * 4) for numbers in whole["methods"].values())
    steps = [
        len((tmp_path / "一次" / f"{name}-0" / "metrics.jsonl").read_bytes().splitlines()) for name in ("ppo", "grpo")
    ]
    faults.plan(f"step.logged:int@{sum(steps) - 4 + 1}")  # evaluations at the start and the end have lines too
    try:
        assert choose(**settings).status == 130
    finally:
        faults.plan("")
    folder = tmp_path / "选择"
    assert [(folder / f"{run}.json").exists() for run in ("ppo-0", "grpo-0", "ppo-1")] == [True, True, False]
    before = {run: (folder / run / "summary.json").read_bytes() for run in ("ppo-0", "grpo-0")}
    assert without_seconds(choose(**settings).result) == without_seconds(whole)
    assert before == {run: (folder / run / "summary.json").read_bytes() for run in before}
    faults.plan("run.started:int@99")
    try:
        assert choose(**settings).result["sentence"] == whole["sentence"]
        assert not {"run.started", "generation"} & faults.visits().keys()
        assert choose(**settings, seeds=3).result["seeds"] == 3
        assert faults.visits()["run.started"] == 2
    finally:
        faults.plan("")
    changed = choose(**settings | {"tokens": 140})
    assert (changed.status, changed.out) == (2, "")
    assert "has runs with other settings: --tokens: 130 there, 140 now" in changed.message
    assert "only --seeds may change" in changed.message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples_per_prompt": 2, "rollout_batch_size": 64, "minibatch_size": 64, "tokens": 512},
         "2 per prompt (--samples-per-prompt), so it needs 32 prompts"),
        ({"samples_per_prompt": 32}, "--samples-per-prompt is 32, larger than --rollout-batch-size 16"),
        ({"samples_per_prompt": 16}, "--rollout-batch-size 16 is a single group of --samples-per-prompt"),
        ({"eval_fraction": 0}, "nothing is held out, so nothing can be compared: set --eval-fraction"),
        ({"prompts": PROMPTS[:30], "eval_fraction": 0.1}, "held out: the interval of fewer than 10 is too short"),
        ({"rewards": "rule:regex:今天天气"}, "the reward ties always: the 4 responses to a prompt scored the same for"),
        ({"tokens": 50}, "--tokens 50 is less than one step may sample: 16 responses (--rollout-batch-size)"),
        ({"minutes": 1}, "are both a budget; leave out one of the two"),
        ({"value_model": "模型"}, "--value-model 模型 belongs to a separate critic: add --critic separate"),
        ({"rewards": None}, "--rewards is missing"),
        ({"rewards": "rule:lenght"}, "there is no rule 'lenght'"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_before_the_first_step(choose, tmp_path, settings, message):
    outcome = choose(**settings)
    assert (outcome.status, outcome.out) == (2, ""), outcome.err
    assert message in outcome.message
    assert not (tmp_path / "选择").exists()
