"""Online DPO: pairs of the policy's own responses, and the loss of DPO on them."""

import pytest
import torch

from cases import often
from gradients import distance, flat_gradient
from heedful import ConfigError, OnlineDPOConfig, core
from heedful.algorithms.online.recorder import Recorder
from heedful.algorithms.online.rollout import rollout
from heedful.algorithms.online.start import start
from heedful.algorithms.online_dpo import backward_minibatch, best_and_worst, make_experience
from trainers import varied


@pytest.fixture
def pairs_config(config):
    """``pairs_config(**changes)``: settings of online DPO with three responses to a prompt."""

    def make(**changes):
        sizes = {"rollout_batch_size": 12, "samples_per_prompt": 3, "minibatch_size": 12, "max_new_tokens": 8}
        return config(OnlineDPOConfig, **(sizes | {"learning_rate": 1e-3, "device": "cpu"} | changes))

    return make


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("groups.argmax(dim=1)", "groups.argmin(dim=1)"),
        ("groups.argmin(dim=1)", "groups.argmax(dim=1)"),
        (" if best != worst", ""),
        ("(i * group_size + best, i * group_size + worst)", "(i * group_size + worst, i * group_size + best)"),
        ("(i * group_size + best", "(best"),
    ],
    ids=["the worst is best", "the best is worst", "ties make pairs", "the order", "rows of the first group"],
)
def test_the_best_and_the_worst_of_each_group_and_a_mistake_is_noticed(mistake, old, new):
    """Groups of 3: rows 1 and 0; rows 3 (the first of equal ones) and 5; the third ties and makes no pair."""
    scores = torch.tensor([0.0, 2.0, 1.0, 5.0, 5.0, -1.0, 3.0, 3.0, 3.0])
    assert best_and_worst(scores, 3) == [(1, 0), (3, 5)]
    mistake(best_and_worst, old, new)
    assert best_and_worst(scores, 3) != [(1, 0), (3, 5)]


def ready(config):
    """A learner in float64 whose reference is a little away from it, and a rollout batch."""
    learner = start(config, [varied]).learner
    learner.policy.double()
    learner.reference.double()
    with torch.no_grad():
        for parameter in learner.reference.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    experience = make_experience(learner, rollout(learner, next(learner.prompts)))
    assert len(best_and_worst(experience.scored.shaped, 3)) > 2
    return learner, experience


@pytest.mark.parametrize("loss", often(["sigmoid", "ipo", "ipo-sum", "hinge"], ["ipo", "ipo-sum"]))
def test_the_gradient_is_that_of_dpo_on_whole_responses(pairs_config, loss):
    """Whatever the micro-batches. IPO takes the mean over a response's tokens, as in its authors' runs; ipo-sum does not."""
    sizes = {"micro_batch_size": 1} if loss == "ipo" else {"micro_batch_size": 8, "micro_batch_tokens": 40}
    learner, experience = ready(pairs_config(loss=loss, beta=0.3, temperature=0.8, **sizes))
    scored = experience.scored
    pairs = best_and_worst(scored.shaped, 3)
    recorder = Recorder(learner, experience.kl)
    backward_minibatch(learner, experience, pairs, recorder, learner.micro_batch)
    ours = flat_gradient(learner.policy)
    batch, mask = scored.batch, scored.batch.response_mask
    learner.policy.zero_grad()
    logprobs = learner.policy(batch.ids, batch.attention_mask, mask, temperature=0.8).logprobs.sum(dim=1)
    ref = experience.ref_logprobs.sum(dim=1)
    best, worst = ([pair[i] for pair in pairs] for i in (0, 1))
    tokens = mask.sum(dim=1) if loss == "ipo" else torch.ones(len(mask))
    ratio = (logprobs - ref) / tokens
    nothing_off, kind = torch.zeros(len(pairs), dtype=torch.float64), loss.removesuffix("-sum")
    value, expected = core.dpo_loss(ratio[best], ratio[worst], nothing_off, nothing_off, beta=0.3, kind=kind)
    value.backward()
    assert distance(ours, flat_gradient(learner.policy)) < 1e-10
    assert recorder.sums.means(1)["reward/margin"] == pytest.approx(float(expected["reward/margin"]), rel=1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples_per_prompt": 1}, "--samples-per-prompt is 1, but a pair needs two"),
        ({"minibatch_size": 4}, "--minibatch-size 4 is not a multiple of --samples-per-prompt 3"),
    ],
)
def test_settings_that_make_no_pairs_are_refused(pairs_config, changes, message):
    with pytest.raises(ConfigError, match=message):
        pairs_config(**changes)
