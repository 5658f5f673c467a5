"""Responses that come near the limit or are cut there: the soft penalty, and learning nothing from what was cut."""

from dataclasses import dataclass

import pytest
import torch

from heedful import ConfigError, GRPOConfig, OnlineDPOConfig, PPOConfig, train_grpo, train_ppo
from heedful.algorithms.online.rollout import shape_scores
from heedful.algorithms.ppo import learn
from heedful.core import ScoreNorm
from jsonl import read_metrics


def lines(run):
    return read_metrics(run, having="reward/score_mean")


@pytest.fixture
def some_are_cut(make_learner, config):
    """``some_are_cut(kind, **changes)``: a learner, some of whose responses end by themselves and some at the limit."""

    def make(kind, **changes):
        torch.manual_seed(0)
        settings = config(kind, max_new_tokens=12, **changes)
        learner = make_learner(settings)
        stops = set(range(0, 256, 6))
        object.__setattr__(learner.sampler, "stop_ids", tuple(stops))
        return learner

    return make


def test_the_penalty_is_taken_off_normalised_and_clipped_scores(some_are_cut, experience_of):
    learner = some_are_cut(
        GRPOConfig, overlong_buffer=5, overlong_penalty=3.0, missing_eos_penalty=0.25, score_clip=0.5
    )
    experience = experience_of(learner)
    lengths = experience.batch.response_mask.sum(dim=1)
    cut = torch.tensor([completion.truncated for completion in experience.completions])
    assert 0 < int(cut.sum()) < len(cut)
    assert len(lengths[lengths > 7].unique()) > 2
    expected = [
        min(0.5, max(-0.5, (score - 4.0) / 2.0)) - 0.25 * bool(c) + 3.0 * max(-1.0, min(0.0, (12 - 5 - int(n)) / 5))
        for score, c, n in zip(experience.scores, cut, lengths, strict=True)
    ]

    class Sampled:
        truncated = cut

    Sampled.lengths = lengths
    found = shape_scores(torch.tensor(experience.scores), Sampled, ScoreNorm(4.0, 2.0), learner.config)
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("kind", [PPOConfig, GRPOConfig])
def test_evaluations_count_it_as_training_does(config, kind):
    """Every response is cut, so it has all of the penalty, and its score is 0."""
    train = train_ppo if kind is PPOConfig else train_grpo
    settings = config(kind, steps=1, max_new_tokens=1, overlong_buffer=1, overlong_penalty=2.0, kl_coef=0.0)
    found = train(settings, rewards=[lambda completions: [0.0] * len(completions)])["first_evaluation"]
    assert found["eval/objective"] == -2.0
    assert lines(settings.output)[0]["reward/shaped_mean"] == -2.0


@dataclass(frozen=True, kw_only=True)
class GRPOReadingFirst(GRPOConfig):
    """GRPO that reads the rollout batch before its update, as --mask-truncated does."""

    needs_old_pass = True


CASES = {
    "ppo": (PPOConfig, {}),
    "separate": (PPOConfig, {"critic": "separate"}),
    "in minibatches": (PPOConfig, {"minibatch_size": 4, "ppo_epochs": 2, "approx_kl_limit": 100.0}),
    "grpo, one update": (GRPOConfig, {"ppo_epochs": 1, "samples_per_prompt": 4}),
    "gspo": (GRPOConfig, {"importance_level": "sequence-mean", "kl_coef": 0.0, "samples_per_prompt": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_learned_from_what_was_cut(some_are_cut, experience_of, gradient, case):
    """The rest has the advantages that it would have had; the gradient does not see the others at all."""
    kind, changes = CASES[case]
    reads_first = GRPOReadingFirst if kind is GRPOConfig else kind
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


@pytest.mark.parametrize(
    ("kind", "changes"),
    [(PPOConfig, {"approx_kl_limit": 1.0}), (GRPOConfig, {}), (PPOConfig, {"critic": "separate"})],
    ids=["ppo", "grpo", "separate"],
)
def test_a_step_in_which_everything_was_cut_changes_nothing_and_says_so(config, length, capsys, kind, changes):
    """The first token never ends the response here: no update, no crash, counted, said once."""
    train = train_ppo if kind is PPOConfig else train_grpo
    settings = config(
        kind, max_new_tokens=1, mask_truncated=True, steps=3, learning_rate=1e-2, eval_fraction=0.0, **changes
    )
    train(settings, rewards=[length])
    found = lines(settings.output)
    masked = [line["rollout/masked_frac"] for line in found]
    assert masked.count(1.0) >= 2
    for line in found:
        assert ("optimizer/grad_norm" not in line) == (line["rollout/masked_frac"] == 1.0)
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
        ({"overlong_buffer": -1}, "--overlong-buffer must be at least 0, got -1"),
        ({"overlong_penalty": 0.0}, "--overlong-penalty must be greater than 0, got 0.0"),
        ({"mask_truncated": True, "response_length": "fixed"}, "--mask-truncated would leave out every response that"),
    ],
)
def test_what_makes_no_sense_is_refused(config, changes, said):
    with pytest.raises(ConfigError) as refused:
        config(PPOConfig, **changes)
    assert said in str(refused.value)


def test_the_penalty_works_for_pairs_too(make_learner, config):
    settings = config(OnlineDPOConfig, overlong_buffer=12)
    rollouts = type("Sampled", (), {"truncated": torch.tensor([True]), "lengths": torch.tensor([12])})
    assert shape_scores(torch.tensor([3.0]), rollouts, ScoreNorm(), settings).tolist() == [2.0]
