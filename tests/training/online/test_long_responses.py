"""Responses that come near the limit or are cut there: the soft penalty, and with --mask-truncated learning nothing from
what was cut, which is seen all the same: in metrics, tables, files and counts."""

import math
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import often
from heedful import A2CConfig, ConfigError, GRPOConfig, OnlineDPOConfig, PPOConfig, core, make_tiny_model, train_ppo
from heedful.algorithms import online_dpo
from heedful.algorithms.online.rollout import rollout
from heedful.algorithms.online.start import start
from heedful.algorithms.online.update import shuffled
from heedful.algorithms.ppo import learn, make_experience
from heedful.core import ScoreNorm
from jsonl import read_jsonl, read_metrics
from trainers import TRAIN, varied


def lines(run):
    return read_metrics(run, having="reward/score_mean")


@pytest.fixture
def some_are_cut(make_learner, config):
    """``some_are_cut(kind, **changes)``: a learner, some of whose responses end by themselves and some at the limit."""

    def make(kind, **changes):
        torch.manual_seed(0)
        learner = make_learner(config(kind, max_new_tokens=12, **changes), noise=0.1)
        object.__setattr__(learner.sampler, "stop_ids", tuple(range(0, 256, 6)))
        return learner

    return make


def test_the_penalty_is_taken_off_normalised_and_clipped_scores(some_are_cut):
    penalties = {"overlong_buffer": 5, "overlong_penalty": 3.0, "missing_eos_penalty": 0.25, "score_clip": 0.5}
    learner = replace(some_are_cut(GRPOConfig, **penalties), score_norm=ScoreNorm(4.0, 2.0))
    scored = rollout(learner, [prompt for prompt in learner.prompts.prompts for _ in range(4)])
    lengths, cut = scored.responses.lengths, scored.responses.truncated
    assert 0 < int(cut.sum()) < len(cut)
    assert len(lengths[lengths > 7].unique()) > 2
    expected = [
        min(0.5, max(-0.5, (score - 4.0) / 2.0)) - 0.25 * bool(c) + 3.0 * max(-1.0, min(0.0, (12 - 5 - int(n)) / 5))
        for score, c, n in zip(scored.scores, cut, lengths, strict=True)
    ]
    torch.testing.assert_close(scored.shaped, torch.tensor(expected))


def test_evaluations_count_it_as_training_does(config):
    """Every response is cut, so it has all of the penalty, and its score is 0."""
    settings = config(steps=1, max_new_tokens=1, overlong_buffer=1, overlong_penalty=2.0, kl_coef=0.0)
    found = train_ppo(settings, rewards=[lambda completions: [0.0] * len(completions)])["first_evaluation"]
    assert found["eval/objective"] == -2.0
    assert lines(settings.output)[0]["reward/shaped_mean"] == -2.0


CASES = {
    "ppo": (PPOConfig, {}),
    "separate": (PPOConfig, {"critic": "separate"}),
    "in minibatches": (PPOConfig, {"minibatch_size": 4, "ppo_epochs": 2, "approx_kl_limit": 100.0}),
    "grpo, one update": (GRPOConfig, {"ppo_epochs": 1, "samples_per_prompt": 4}),
    "gspo": (GRPOConfig, {"importance_level": "sequence-mean", "kl_coef": 0.0, "samples_per_prompt": 4}),
}


@pytest.mark.parametrize("case", often(CASES, ["separate", "grpo, one update"]))
def test_nothing_is_learned_from_what_was_cut(some_are_cut, experience_of, reading_first, gradient, case):
    """The rest has the advantages that it would have had; the gradient does not see the others at all."""
    kind, changes = CASES[case]
    reads_first = reading_first(kind)
    whole = experience_of(some_are_cut(reads_first, **changes))
    learner = some_are_cut(kind, **changes, mask_truncated=True)
    part = experience_of(learner)
    kept = torch.tensor([not completion.truncated for completion in whole.completions])
    assert 0 < int(kept.sum()) < len(kept)
    assert torch.equal(part.advantages, whole.advantages[kept])
    assert torch.equal(part.batch.ids, whole.batch.ids[kept])
    assert [c.truncated for c in part.completions] == [False] * int(kept.sum())
    assert part.scores == [score for score, k in zip(whole.scores, kept.tolist(), strict=True) if k]
    assert part.metrics["rollout/masked_frac"] == pytest.approx(1 - float(kept.double().mean()))
    assert part.metrics["reward/score_mean"] == whole.metrics["reward/score_mean"], "they count in the means"
    before = [p.detach().clone() for p in learner.policy.parameters()]
    found, _, _ = gradient(learner, part)
    assert float(found.norm()) > 0
    same = experience_of(some_are_cut(reads_first, **changes)).only(kept)
    again, _, _ = gradient(learner, same)
    assert torch.equal(found, again)
    learn(learner, part)
    assert any(not torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))


EMPTY = {
    "ppo": (PPOConfig, {"approx_kl_limit": 1.0, "importance": "token-truncate"}),
    "grpo": (GRPOConfig, {}),
    "separate": (PPOConfig, {"critic": "separate"}),
}


@pytest.mark.parametrize("case", often(EMPTY, ["ppo"]))
def test_a_step_in_which_everything_was_cut_changes_nothing_and_says_so(config, length, capsys, case):
    """The first token never ends the response here: no update, no crash, counted, said once."""
    kind, changes = EMPTY[case]
    cut = {"max_new_tokens": 1, "mask_truncated": True, "steps": 3, "learning_rate": 1e-2, "eval_fraction": 0.0}
    settings = config(kind, **cut, **changes)
    train_ppo(settings, rewards=[length])
    found = lines(settings.output)
    masked = [line["rollout/masked_frac"] for line in found]
    assert masked.count(1.0) >= 2
    for line in found:
        assert ("optimizer/grad_norm" not in line) == (line["rollout/masked_frac"] == 1.0)
        assert not (line["rollout/masked_frac"] == 1.0 and any(name.startswith("importance/") for name in line))
        assert "reference/kl" in line, "it is measured all the same"
    assert capsys.readouterr().err.count("every response was cut at --max-new-tokens") == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"overlong_buffer": 4, "response_length": "fixed"},
            "--overlong-buffer 4 penalises responses that end late, but",
        ),
        ({"overlong_buffer": 13}, "--overlong-buffer 13 is larger than --max-new-tokens 12; lower it, such as to 3"),
        ({"overlong_penalty": 2.0}, "--overlong-penalty 2 belongs to --overlong-buffer, which is 0; add it"),
        ({"mask_truncated": True, "response_length": "fixed"}, "--mask-truncated would leave out every response that"),
    ],
)
def test_what_makes_no_sense_is_refused(config, changes, said):
    with pytest.raises(ConfigError) as refused:
        config(PPOConfig, **changes)
    assert said in str(refused.value)


# What was cut is seen all the same

IN_THE_LOSS = {"mask_truncated": True, "kl_in": "loss", "kl_kind": "k3", "kl_coef": 0.1}
ONE_UPDATE = {
    "ppo": (PPOConfig, {"critic": "separate", "ppo_epochs": 1}),
    "a2c": (A2CConfig, {"critic": "separate"}),
    "grpo": (GRPOConfig, {}),
}
"""The algorithms that can mask, each in one update per rollout batch."""


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """A policy that now and then ends a response within 60 tokens, and a reference that is far from it."""
    root = tmp_path_factory.mktemp("远")
    for name, scale in (("policy", 0.02), ("reference", 0.2)):
        make_tiny_model("gpt2", root / name, hidden_size=16, num_layers=1, max_length=128, initializer_range=scale)
    return {name: str(root / name) for name in ("policy", "reference")}


@pytest.mark.parametrize("name", often(ONE_UPDATE, ["ppo", "grpo"]))
def test_kl_and_entropy_are_those_of_all_responses(some_are_cut, name):
    """Worked out by passes of policy and reference before the update."""
    kind, changes = ONE_UPDATE[name]
    learner = some_are_cut(kind, **changes, **IN_THE_LOSS)
    scored = rollout(learner, [p for p in learner.prompts.prompts for _ in range(learner.config.samples_per_prompt)])
    experience, rollouts = make_experience(learner, scored), scored.responses
    assert 0 < len(experience.completions) < len(rollouts.lengths)
    batch, mask = rollouts.batch, rollouts.batch.response_mask
    with torch.no_grad():
        ours, theirs = (
            model(batch.ids, batch.attention_mask, mask, with_entropy=True)
            for model in (learner.policy, learner.reference)
        )
    differences = torch.where(mask, ours.logprobs - theirs.logprobs, 0.0)
    metrics = learn(learner, experience).metrics
    assert metrics["reference/kl"] == pytest.approx(float(differences.sum(dim=1).mean()), rel=1e-5)
    assert metrics["policy/entropy"] == pytest.approx(float(ours.entropy[mask].mean()), rel=1e-5)
    mismatch = (rollouts.logprobs - ours.logprobs).abs()[mask].mean()
    assert metrics["rollout/sampler_mismatch"] == pytest.approx(float(mismatch), abs=1e-9)


def first_fails(completions):
    """On the first response to each prompt; not in the trial of the rewards."""
    return [math.nan if i % 4 == 0 and len(completions) == 16 else float(i) for i in range(len(completions))]


def second_fails(completions):
    """On a response to the second prompt."""
    return [math.nan if i == 5 and len(completions) == 16 else float(i) for i in range(len(completions))]


ALONE = {"advantage": "reinforce", "kl_in": "reward"}
TABLES = {
    "masked": (GRPOConfig, IN_THE_LOSS | {"max_new_tokens": 60}, varied, [0, 4, 8]),
    "a reward that fails": (GRPOConfig, ALONE, first_fails, [1, 5, 9]),
    "groups, a reward that fails": (GRPOConfig, {}, second_fails, [0, 8, 12]),
    "pairs, a reward that fails": (OnlineDPOConfig, {}, second_fails, [0, 8, 12]),
}
"""The rows that are shown, among all that were sampled."""


@pytest.mark.parametrize("name", often(TABLES, ["masked", "groups, a reward that fails"]))
def test_the_table_of_samples_has_a_response_to_each_of_the_first_prompts(config, apart, name):
    """The first that has a score, whether it was cut or not. All are written down, and metrics are those of all of them."""
    kind, changes, reward, shown = TABLES[name]
    sizes = {"rollout_batch_size": 16, "minibatch_size": 16, "samples_per_prompt": 4, "max_new_tokens": 8, "steps": 1}
    tables = {"rollouts": "all", "sample_every": 1, "num_samples": 3, "eval_fraction": 0.0, "max_failed_rewards": 0.5}
    models = {"model": apart["policy"], "reference": apart["reference"]}
    settings = config(kind, **models | sizes | tables | changes)
    TRAIN[kind](settings, [reward])
    everything = pq.read_table(settings.output / "rollouts" / "step-000001.parquet").to_pylist()
    rows = [everything[row] for row in shown]
    assert "length" in {row["finish_reason"] for row in (everything if reward is second_fails else rows)}
    samples = read_jsonl(settings.output / "samples.jsonl")
    named = ("prompt", "response", "score", "kl")
    assert [[one[name] for name in named] for one in samples] == [[row[name] for name in named] for row in rows]
    if name == "masked":
        (metrics,) = read_metrics(settings.output)
        cut = sum(row["finish_reason"] == "length" for row in everything) / 16
        assert 0 < cut < 1
        assert cut == pytest.approx(metrics["rollout/masked_frac"])
        assert all((row["advantages"] is None) == (row["finish_reason"] == "length") for row in everything)
        assert len({row["kl"] for row in everything}) == 16
        assert sum(row["kl"] for row in everything) / 16 == pytest.approx(metrics["reference/kl"], rel=1e-4)
        assert sum(row["length"] for row in everything) / 16 == pytest.approx(metrics["rollout/response_length"])


# ---------------------------------------------------------------------------------------------- minibatches and weights


@given(st.integers(0, 200), st.integers(1, 64), st.integers(0, 3))
def test_minibatches_are_as_few_and_as_equal_as_can_be(count, size, seed):
    """Every row once; a whole batch is cut as it always was."""
    parts = shuffled(count, size, torch.Generator().manual_seed(seed))
    assert sorted(row for part in parts for row in part.tolist()) == list(range(count))
    assert len(parts) == math.ceil(count / size)
    lengths = [len(part) for part in parts]
    assert max(lengths, default=0) <= size
    assert max(lengths, default=0) - min(lengths, default=0) <= 1
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    if count % size == 0:
        assert all(map(torch.equal, parts, order.split(size)))


def test_no_step_is_made_of_a_rest(some_are_cut, experience_of, passes):
    """Rows of each pass of the update over what is left of 16 responses, in minibatches of 8."""
    sizes = {"ppo_epochs": 1, "minibatch_size": 8, "samples_per_prompt": 4, "micro_batch_size": 16}
    learner = some_are_cut(PPOConfig, mask_truncated=True, **sizes)
    experience = experience_of(learner)
    left = len(experience.rows)
    assert 9 <= left <= 14
    seen = passes(learner.policy)
    learn(learner, experience)
    assert [rows for rows, _ in seen] == [math.ceil(left / 2), left // 2]


def test_no_step_is_made_of_a_rest_of_the_pairs(config, passes):
    """One of four prompts ties: three pairs in minibatches of two would leave one; with five of eight, 2, 2 and 1."""
    sizes = {"samples_per_prompt": 2, "rollout_batch_size": 16, "minibatch_size": 8, "ppo_epochs": 2}

    def some_tie(completions):
        return [float(i % 2) if i < 10 else 0.0 for i in range(len(completions))]

    settings = config(OnlineDPOConfig, micro_batch_size=16, eval_fraction=0.0, **sizes)
    learner = start(settings, [some_tie]).learner
    experience = online_dpo.make_experience(learner, rollout(learner, next(learner.prompts)))
    seen = passes(learner.policy)
    online_dpo.learn(learner, experience)
    assert [rows for rows, _ in seen] == [6, 4] * 2, "five pairs in minibatches of at most four"


@pytest.mark.parametrize("importance", often(["token-truncate", "sequence-truncate"], ["sequence-truncate"]))
def test_importance_weights_are_those_of_what_is_learned_from(some_are_cut, experience_of, importance):
    """Their mean, which normalises them and is logged, is over responses that are not masked."""

    def made(**changes):
        settings = {"samples_per_prompt": 4, "top_k": 20, "mask_truncated": True, "gamma": 0.9}
        return experience_of(some_are_cut(PPOConfig, **settings, **changes))

    plain = made()
    mask = plain.batch.response_mask
    if importance.startswith("sequence"):
        mask = core.first_in_mask(mask)
    assert 0 < len(plain.rows) < 16
    for normalise in (True, False):
        weighed = made(importance=importance, importance_high=1e9, importance_normalise=normalise)
        mean = float((weighed.advantages / plain.advantages)[mask].mean())
        assert weighed.metrics["importance/weight_mean"] == pytest.approx(mean, rel=1e-4)
        assert (mean == pytest.approx(1, rel=1e-4)) == normalise
