"""Alarms on histories made by hand: each speaks on its own, is silent on a healthy twin and just inside its threshold."""

import json
import math
import re
from pathlib import Path

import pytest

from heedful import ConfigError, PPOConfig, TrainingError
from heedful.configs.online import ALARM_NAMES
from heedful.training.alarm_rules import FIRST, RECENT, Limits
from heedful.training.alarms import ALARMS, PAGE, RULES, Alarms
from heedful.training.thresholds import STILL_STEPS

LIMITS = Limits(steps=60, learning_rate=1e-6, max_new_tokens=64)
HEALTHY = {
    "rollout/eos_frac": 0.98, "rollout/cut_by_turns_frac": 0.1, "rollout/response_length": 20.0,
    "rollout/repeated_frac": 0.02, "reward/score_mean": 1.0,
    "reward/score_std": 1.0, "reward/tied_frac": 0.1, "rollout/sampler_mismatch": 1e-6, "reference/kl": 1.0,
    "policy/entropy": 1.0, "policy/approx_kl": 1e-3, "policy/ratio_max": 1.5, "value/explained_variance": 0.4,
}  # fmt: skip
PAGE_FILE = Path(__file__).resolve().parents[2] / PAGE
E = 1e-6
"""Just inside a threshold."""
JUST = {
    # alarm: what is sick from step 31 on, and what is just not
    "end-token-lost": ({"rollout/eos_frac": 0.68 - E}, {"rollout/eos_frac": 0.68 + E}),
    "responses-cut": ({"rollout/eos_frac": 0.9 - E}, {"rollout/eos_frac": 0.9 + E}),
    "turns-cut": ({"rollout/cut_by_turns_frac": 0.4 + E}, {"rollout/cut_by_turns_frac": 0.4 - E}),
    "length-drift": ({"rollout/response_length": 40.0}, {"rollout/response_length": 40 - E}),
    "repetition": ({"rollout/repeated_frac": 0.3}, {"rollout/repeated_frac": 0.3 - E}),
    "entropy-collapse": ({"policy/entropy": 0.1 - E}, {"policy/entropy": 0.1 + E}),
    "kl-budget": ({"reference/kl": 20 + E}, {"reference/kl": 20.0}),
    "ratio-tail": ({"policy/ratio_max": 20.0}, {"policy/ratio_max": 20 - E}),
    "stale-sampler": ({"rollout/sampler_mismatch": 1e-3}, {"rollout/sampler_mismatch": 1e-3 - E}),
    "reference-moves": ({"reference/kl": -2e-4 + E}, {"reference/kl": -2e-4 - E}),
    "critic-dead": ({"value/explained_variance": 0.02}, {"value/explained_variance": 0.02 + E}),
    "critic-diverging": ({"value/explained_variance": -1.0}, {"value/explained_variance": -1 + E}),
    "scores-tied": ({"reward/tied_frac": 0.9 + E}, {"reward/tied_frac": 0.9 - E}),
    "ties-unfilled": ({"rollout/unfilled_frac": E}, {"rollout/unfilled_frac": 0.0}),
    "scores-jump": ({"reward/score_std": 15.0}, {"reward/score_std": 14.0}),
    "scores-unread": ({"reward/unread_frac": E}, {"reward/unread_frac": 0.0}),
    "skipped-updates": ({"optimizer/skipped_steps": 1.0}, {"optimizer/skipped_steps": 0.0}),
    "responses-masked": ({"rollout/masked_frac": 1.0}, {"rollout/masked_frac": 1 - E}),
    "weights-light": ({"importance/weight_mean": 0.1 - E}, {"importance/weight_mean": 0.1}),
    "nothing-learned": ({"reward/score_mean": 0.8 - E}, {"reward/score_mean": 0.8 + E}),
}
TOGETHER = {"end-token-lost": {"responses-cut"}}
"""What a disease is besides."""


def run(changes, *, limits=LIMITS, start=31, steps=59, healthy=HEALTHY):
    """The alarms of a run that is healthy until a step."""
    alarms = Alarms(limits)
    for step in range(1, steps + 1):
        alarms.see(step, healthy | (changes if step >= start else {}))
    return alarms


def said(alarms):
    return {one.alarm for one in alarms.raised}


@pytest.mark.parametrize("name", JUST)
def test_each_speaks_and_is_silent_just_inside_its_threshold(name):
    sick, almost = JUST[name]
    (first, *others) = sorted(run(sick).raised, key=lambda one: one.alarm != name)
    assert first.alarm == name
    assert {one.alarm for one in others} == TOGETHER.get(name, set())
    assert first.step >= 31
    assert all(math.isfinite(number) for number in first.evidence.values())
    assert name not in said(run(almost))


OVER_STEPS = {"reference-moves", "nothing-learned"}
"""Alarms whose evidence is a mean over steps."""


@pytest.mark.parametrize("name", sorted(JUST.keys() - OVER_STEPS))
def test_the_evidence_is_of_the_step_that_is_told(name):
    """Numbers that change from step to step, and are sick in each."""
    (metric, sick), just = next(iter(JUST[name][0].items())), next(iter(JUST[name][1].values()))
    alarms, seen = Alarms(LIMITS), {}
    for step in range(1, 60):
        worse = {metric: sick + step * (sick - just) / 1000}
        seen[step] = HEALTHY | (worse if step > 30 else {})
        alarms.see(step, seen[step])
    (found,) = (one for one in alarms.raised if one.alarm == name)
    metrics = found.evidence.keys() & seen[found.step].keys()
    assert {one: found.evidence[one] for one in metrics} == {one: seen[found.step][one] for one in metrics}
    assert metrics or name == "scores-jump"


ALWAYS = {"rollout/response_length": 60.0, "rollout/repeated_frac": 0.45, "policy/entropy": 0.01}
LONG = {"rollout/response_length": 400.0}
OLD = {"rollout/staleness_mean": 2.0, "rollout/sampler_mismatch": 0.2}
MISMATCH = {"rollout/sampler_mismatch": 0.5}
FILTERED = {"healthy": HEALTHY | MISMATCH, "limits": Limits(steps=60, filters_on_servers=True)}
"""With top-p on servers the mismatch has the log of the kept mass in it, from the first step on."""
WHOLE = {"steps": 60, "start": 1}
NOISE = {"value/explained_variance": -70.0, "reward/score_mean": 0.0}
"""While all score the same, returns hold nothing but the KL penalty's noise: a sparse reward that nobody has earned yet."""
TIED = {"reward/score_std": 0.0, "reward/tied_frac": math.nan}


@pytest.mark.parametrize(
    ("changes", "options", "expected"),
    [
        ({}, {}, set()),
        ({"reward/score_mean": 5.0, "rollout/response_length": 12.0, "policy/entropy": 0.3}, {}, set()),
        (ALWAYS, {"healthy": HEALTHY | ALWAYS}, set()),
        ({"reference/kl": 199.0}, {"healthy": HEALTHY | LONG}, set()),
        ({"reference/kl": 201.0}, {"healthy": HEALTHY | LONG}, {"kl-budget"}),
        (OLD, {"limits": Limits(steps=60, async_steps=2)}, set()),
        (OLD, {"limits": Limits(steps=60, async_steps=1)}, {"stale-sampler"}),
        (MISMATCH, {"healthy": HEALTHY | MISMATCH}, {"stale-sampler"}),
        (MISMATCH, FILTERED, set()),
        ({"rollout/sampler_mismatch": 5.1}, FILTERED, {"stale-sampler"}),
        ({"reference/kl": 0.0}, WHOLE, {"reference-moves"}),
        ({"reference/kl": 0.0, "policy/approx_kl": 0.0}, WHOLE, {"nothing-learned"}),
        (NOISE | {"reward/score_std": 0.0}, {}, {"scores-tied", "nothing-learned"}),
        (NOISE | {"reward/score_std": 0.1}, {}, {"critic-diverging", "nothing-learned"}),
        (TIED, {}, {"scores-tied"}),
        (TIED | {"reward/score_std": 1e-5}, {}, set()),
        ({"reward/tied_frac": 1.0, "rollout/unfilled_frac": 0.5}, {}, {"ties-unfilled"}),
    ],
)
def test_what_a_run_is_told_in_the_end(changes, options, expected):
    """What was so from the beginning is no change; the KL's budget of long responses is per token."""
    assert said(run(changes, **options)) == expected


def test_every_alarm_is_tried_and_can_be_named_and_has_its_place_on_the_page():
    offline, others = {"chosen-falling"}, {"judge-falling"}
    assert set(ALARMS) == set(RULES) == set(JUST) | offline | others
    assert set(ALARM_NAMES) == set(ALARMS) - offline
    assert re.findall(r"^## (.+)$", PAGE_FILE.read_text(encoding="utf-8"), re.M) == list(ALARMS)


@pytest.mark.parametrize(
    ("alarm", "name", "sick", "steps"),
    [
        ("length-drift", "rollout/response_length", 10.0, 5),
        ("entropy-collapse", "policy/entropy", 0.01, 5),
        ("ratio-tail", "policy/ratio_max", 99.0, 2),
        ("end-token-lost", "rollout/eos_frac", 0.5, 3),
        ("turns-cut", "rollout/cut_by_turns_frac", 0.9, 3),
        ("critic-diverging", "value/explained_variance", -5.0, 5),
        ("critic-dead", "value/explained_variance", 0.0, 20),
    ],
)
def test_one_step_is_not_enough(alarm, name, sick, steps):
    """What has been sick for one step less than it takes says nothing, nor does what is well once in between."""
    assert alarm not in said(run({name: sick}, steps=30 + steps - 1))
    assert said(run({name: sick}, steps=30 + steps)) == {alarm} | TOGETHER.get(alarm, set())
    alarms = Alarms(LIMITS)
    for step in range(1, 60):
        alarms.see(step, HEALTHY | ({name: sick} if step > 30 and step % steps else {}))
    assert said(alarms) == TOGETHER.get(alarm, set())


def test_a_policy_that_stands_still_is_told_at_the_last_step():
    still = {"reference/kl": 0.0099, "policy/approx_kl": 0.0}
    assert said(run(still, steps=59)) == set()
    alarms = run(still, steps=60)
    assert "Raise --learning-rate (it was 1e-06; try 1e-05) or --steps" in alarms.raised[0].message
    assert said(run({"reference/kl": 0.011, "policy/approx_kl": 0.0}, steps=60)) == set()
    few = Alarms(Limits(steps=STILL_STEPS - 1))
    for step in range(1, STILL_STEPS):
        few.see(step, HEALTHY | still)
    assert said(few) == set()


def test_scores_that_were_nearly_always_the_same_may_fall_by_little():
    """A reward that is 1 for nearly all: its spread in the first steps says little about what is noise."""
    first, later = ({"reward/score_mean": mean, "reward/score_std": std} for mean, std in ((1.0, 0.01), (0.97, 0.17)))
    assert said(run(later, healthy=first, start=20, steps=49)) == set()
    assert "nothing-learned" not in said(run({}, healthy={"reward/score_mean": 1.0, "reward/score_std": 0.0}))


def test_scores_that_fall_within_their_noise_are_not_reported():
    """The steps' means alternate by 0.26, so a difference of eights has the standard error 0.139; six of them are 0.83."""
    for fall, speaks in ((0.84, True), (0.82, False)):
        alarms = Alarms(LIMITS)
        for step in range(1, 51):
            noise = 0.26 * (-1) ** step
            metrics = {"reward/score_mean": noise - (fall if step > 40 else 0), "reward/score_std": 1.0}
            alarms.see(step, metrics)
        assert (said(alarms) == {"nothing-learned"}) == speaks


def test_scores_that_jump_speak_once():
    """Once the first steps are over; what only grows does not, nor the first success of a sparse reward."""
    early = Alarms(LIMITS)
    for step, size in enumerate([1.0, 1.0, 50.0, 50.0, 50.0, 400.0], start=1):
        early.see(step, {"reward/score_mean": 0.0, "reward/score_std": size})
    assert said(early) == set()
    (line,) = early.see(7, {"reward/score_mean": 2424.0, "reward/score_std": 3232.0 + 40})
    assert "the scores are 10.2 times as large as in any step before" in line.message
    sparse = Alarms(LIMITS)
    for step in range(1, 8):
        sparse.see(step, {"reward/score_mean": float(step == 7), "reward/score_std": 0.5 * (step == 7)})
    assert "scores-jump" not in said(sparse)


def judged(judge, score):
    alarms = Alarms(LIMITS)
    for number, values in enumerate(zip(judge, score, strict=True)):
        alarms.see_evaluation(10 * number, dict(zip(("eval/judge_mean", "eval/score_mean"), values, strict=True)))
    return alarms


def test_a_judge_that_falls_while_the_reward_rises():
    rises = [0.0, 1.0, 2.0, 3.0, 4.0]
    (line,) = judged([1.0, 2.0, 1.9, 1.8, 1.7], rises).raised
    assert (line.step, line.alarm) == (40, "judge-falling")
    assert judged([1.0, 2.0, 1.9, 1.8], rises[:4]).raised == [], "one evaluation less"
    assert judged([1.0, 2.0, 1.9, 1.9, 1.7], rises).raised == [], "not each time"
    assert judged([1.0, 2.0, 1.9, 1.8, 1.7], [0.0, 3.0, 2.0, 1.0, 3.0]).raised == [], "the reward is where it was"
    assert judged([1.0, 2.0, 1.9, 1.85, 1.81], rises).raised == [], "by less than a fifth of its range"


def test_dpo_whose_chosen_responses_fall():
    alarms = Alarms(Limits(beta=0.1))
    for step in range(1, 31):
        alarms.see(step, {"reward/chosen": -4.9 if step < 15 else -5.1})
    assert [(one.step, one.alarm) for one in alarms.raised] == [(24, "chosen-falling")]


def test_nan_and_absent_metrics_are_no_measurements():
    """They neither count nor end the row; a run that measures nothing is silent."""
    alarms = Alarms(LIMITS)
    for step, kl in enumerate([1.0, 1.0, 30.0, math.nan, 30.0, math.nan, 30.0], start=1):
        alarms.see(step, {"reference/kl": kl, "rollout/response_length": 20.0})
    assert [(one.step, one.alarm) for one in alarms.raised] == [(7, "kl-budget")]
    nothing = Alarms(LIMITS)
    for step in range(1, 61):
        nothing.see(step, {})
    assert nothing.raised == []


def test_a_run_may_measure_one_thing_alone_or_all_but_one():
    """No alarm stumbles over what is missing, nor speaks of it."""
    sick = {name: value for changes, _ in JUST.values() for name, value in changes.items()}
    for name, value in sick.items():
        of_one = run({}, healthy={name: value}, steps=60).raised
        others = run({}, healthy={other: one for other, one in sick.items() if other != name}, steps=60).raised
        assert {one.partition(" ")[0] for alarm in of_one for one in alarm.evidence} <= {name}
        assert others
        assert name not in {one.partition(" ")[0] for alarm in others for one in alarm.evidence}


def test_an_alarm_speaks_again_only_after_it_was_over_for_long():
    """It holds from the fifth sick step on, here in steps 25 to 39, 89 (50 steps later), and 140 (51 steps later)."""
    alarms, sick = Alarms(Limits(steps=10_000)), {"rollout/repeated_frac": 0.9}
    for step in range(1, 200):
        alarms.see(step, HEALTHY | (sick if 20 < step < 40 or 84 < step < 90 or 135 < step < 141 else {}))
    assert [one.step for one in alarms.raised] == [25, 140]


def test_the_state_goes_through_json_and_an_alarm_does_not_repeat():
    limits = Limits(steps=100, max_new_tokens=64)
    whole, parts, spoken = Alarms(limits), Alarms(limits), []
    for step in range(1, 101):
        sick = {"rollout/eos_frac": 0.3, "reference/kl": math.nan} if step > 50 else {}
        metrics = HEALTHY | {"something/else": 1.0} | sick
        whole.see(step, metrics)
        spoken += parts.see(step, metrics)
        if step % 10 == 0:
            whole.see_evaluation(step, {"eval/judge_mean": -step, "eval/score_mean": step})
            spoken += parts.see_evaluation(step, {"eval/judge_mean": -step, "eval/score_mean": step})
        again = Alarms(limits)
        again.load_state_dict(json.loads(json.dumps(parts.state_dict())))
        parts = again
    assert spoken == whole.raised == parts.raised
    assert [(one.step, one.alarm) for one in spoken] == [
        (40, "judge-falling"), (51, "responses-cut"), (53, "end-token-lost"),
    ]  # fmt: skip
    assert json.dumps(parts.state_dict()) == json.dumps(whole.state_dict())
    history = whole.state_dict()["history"]
    assert (len(history["first"]), len(history["recent"])) == (FIRST, RECENT), "that of a long run is small"
    assert "something/else" not in history["recent"][0]


def test_what_is_to_end_the_run_does_so_for_as_long_as_it_holds():
    sick = HEALTHY | {"rollout/repeated_frac": 0.9}
    alarms = Alarms(LIMITS, ["repetition", "entropy-collapse"])
    for step in range(1, 30):
        alarms.see(step, HEALTHY if step < 20 else sick)
        if step < 24:
            alarms.check()
        else:
            with pytest.raises(TrainingError, match=r"^repetition: 90% .* \(docs/alarms.md#repetition\)$"):
                alarms.check()
    alarms.see(30, HEALTHY)
    alarms.check()
    speaks = Alarms(LIMITS)
    for step in range(1, 30):
        speaks.see(step, HEALTHY if step < 20 else sick)
        speaks.check()
    assert speaks.raised[0].text.startswith("step 24: repetition: 90% of the responses' 4-grams repeat")
    assert speaks.raised[0].text.endswith(f"or raise --kl-coef ({PAGE}#repetition)")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop_on": ("repetition", "entropie")}, "entropie is no alarm; choose from end-token-lost, .*learned$"),
        ({"stop_on": ("judge-falling",)}, "judge-falling needs a judge: add --selection-rewards"),
        ({"stop_on": ("kl-budget",), "kl_coef": 0.0}, "kl-budget needs the KL .* not measured at --kl-coef 0"),
    ],
)
def test_alarms_that_cannot_end_the_run_are_refused(changes, message):
    with pytest.raises(ConfigError, match=f"--stop-on {message}"):
        PPOConfig(model="m", data="d", output="o", rewards=("rule:repetition",), **changes)
