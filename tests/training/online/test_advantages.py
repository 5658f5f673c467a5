"""The table of advantage estimators: numbers by hand, and that each is spread over a response's tokens."""

import typing

import pytest
import torch

from heedful import ConfigError, GRPOConfig, core, train_ppo
from heedful.algorithms.online.advantages import ADVANTAGES, Rewards, of_all_tokens
from heedful.configs.online import ESTIMATORS, Advantage


def of_scores(scores, settings):
    """Advantages of responses of two and three tokens in turn, ``[batch, time]``, and the mask."""
    scores = torch.tensor(scores)
    mask = torch.arange(3) < (2 + torch.arange(len(scores)) % 2).unsqueeze(1)
    nowhere = torch.full(mask.shape, torch.nan)
    return ADVANTAGES[settings.advantage](Rewards(nowhere, scores, None, mask), settings), mask


def test_advantages_by_hand(config):
    """Scores 1, 2, 3, 6 of a group: mean 3, deviations -2, -1, 0, 3, sample variance 14 / 3; the others' means 11/3, 10/3,
    3, 2. The second group's scores are equal."""
    scores = [1.0, 2.0, 3.0, 6.0, 5.0, 5.0, 5.0, 5.0]
    deviation = (14 / 3) ** 0.5 + 1e-4
    for advantage, expected in {
        "grpo": [-2 / deviation, -1 / deviation, 0.0, 3 / deviation],
        "dr_grpo": [-2.0, -1.0, 0.0, 3.0],
        "rloo": [1 - 11 / 3, 2 - 10 / 3, 0.0, 4.0],
    }.items():
        (found, returns), mask = of_scores(scores, config(GRPOConfig, advantage=advantage, kl_in="loss"))
        assert found[:, 0].tolist() == pytest.approx([*expected, 0, 0, 0, 0], abs=1e-5), advantage
        assert torch.equal(found, torch.where(mask, found[:, :1], 0.0)), "each token has its response's"
        assert returns is None
    (found, _), _ = of_scores(scores, config(GRPOConfig, advantage="reinforce", samples_per_prompt=1))
    assert found[:, 0].tolist() == pytest.approx([-3, -2, -1, 2, 1, 1, 1, 1], abs=1e-5), "the mean of all eight is 4"


def test_every_estimator_of_the_settings_has_its_function():
    assert set(ADVANTAGES) == set(ESTIMATORS) == set(typing.get_args(Advantage))


# REINFORCE++ (Hu 2025): the rewards to come at each token, without a critic


@pytest.mark.parametrize(
    ("kl_coef", "gamma", "expected"),
    [(0.1, 1.0, [[0.9, 0.95, 1.05], [-1.2, -1.0, 0.0]]), (0.0, 0.5, [[0.25, 0.5, 1.0], [-0.5, -1.0, 0.0]])],
    ids=["KL", "a discount"],
)
def test_golden_reinforce_plus_plus(config, kl_coef, gamma, expected):
    """Score less 0.1 times the KL that is still to come: 1 - 0.1 (0.5 + 1 - 0.5), 1 - 0.1 (1 - 0.5), 1 + 0.05; -1.2, -1.
    With gamma 1/2 and no KL the score halves with each token before the last."""
    mask = torch.tensor([[True, True, True], [True, True, False]])
    kl, scores = torch.tensor([[0.5, 1.0, -0.5], [2.0, 0.0, 7.0]]), torch.tensor([1.0, -1.0])
    per_token = core.kl_shaped_rewards(scores, kl, torch.zeros_like(kl), mask, kl_coef=kl_coef)
    given = Rewards(per_token, scores - kl_coef * torch.where(mask, kl, 0.0).sum(dim=1), None, mask)
    estimate = ADVANTAGES["reinforce++"]
    advantages, returns = estimate(given, config(advantage="reinforce++", gamma=gamma))
    torch.testing.assert_close(advantages, torch.tensor(expected))
    assert returns is None
    scaled = estimate(given, config(advantage="reinforce++", gamma=gamma, whiten_rewards=True))[0]
    rescaled = given._replace(per_token=core.rescale(per_token, mask))
    assert torch.equal(scaled, estimate(rescaled, config(advantage="reinforce++", gamma=gamma))[0])


def test_what_belongs_to_a_critic_is_refused(config):
    for setting in ({"gae_lambda": 0.9}, {"critic": "separate"}, {"value_coef": 1}):
        with pytest.raises(ConfigError, match="--advantage reinforce\\+\\+ has none"):
            config(advantage="reinforce++", **setting)


# The size of an action ---------------------------------------------------------------------------------------------------


def test_an_action_is_a_token_a_turn_or_the_response(config):
    """Two turns of two tokens and of one, between them one of somebody else; rewards 1 and 2, at gamma 1/2 and lambda 1/2."""
    own = torch.tensor([[True, True, False, True]])
    rewards, values = torch.tensor([[0.0, 1.0, 9.0, 2.0]]), torch.tensor([[0.5, 0.25, 9.0, -1.0]])
    given = Rewards(rewards, torch.tensor([3.0]), values, own)
    both = {"gamma": 0.5, "gae_lambda": 0.5}

    last = 2 + 1
    of_token_2 = 1 + 0.5 * -1 - 0.25 + 0.25 * last
    of_token_1 = 0.5 * 0.25 - 0.5 + 0.25 * of_token_2
    of_turn_1 = 1 + 0.5 * -1 - 0.5 + 0.25 * last
    for changes, expected, targets in [
        ({"action": "token"} | both, [of_token_1, of_token_2, 0, last], [of_token_1 + 0.5, of_token_2 + 0.25, 0, 2]),
        ({"action": "turn"} | both, [of_turn_1, of_turn_1, 0, last], [of_turn_1 + 0.5, 0, 0, 2]),
        ({"action": "response"}, [3 - 0.5, 3 - 0.5, 0, 3 - 0.5], [3, 0, 0, 0]),
        ({"importance_level": "sequence"}, [3 - 0.5, 0, 0, 0], [3, 0, 0, 0]),
    ]:
        settings = config(**changes)
        advantages, returns = ADVANTAGES["gae"](given, settings)
        found = of_all_tokens(advantages, own, settings)
        torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float32), msg=str(settings.action))
        torch.testing.assert_close(returns, torch.tensor([targets], dtype=torch.float32))


def test_a_turn_without_others_is_a_response(config, length):
    """Gamma and lambda do not apply to single turns either. Rewards are added up in another order."""
    settings = {"whiten_rewards": True, "ppo_epochs": 2, "minibatch_size": 4, "critic": "separate"}
    turns, responses = (
        train_ppo(config(action=action, output=config().output.with_name(action), **settings), [length])
        for action in ("turn", "response")
    )
    one, other = (dict(run.policy.named_parameters()) for run in (turns, responses))
    for name in one:
        torch.testing.assert_close(one[name], other[name])
