"""Turns as actions: goldens by hand, and a game whose every trajectory is known."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch

from heedful import core
from heedful.core import action_rewards, gae, spread_over_actions, turn_starts
from tensors import close, f64, mask

TURNS = mask("xx.x..xx", ".xxx....")


def test_golden_turns_start_where_own_tokens_begin_again():
    assert turn_starts(TURNS).tolist() == mask("x..x..x.", ".x......").tolist()


def test_golden_rewards_of_turns_stand_at_their_first_tokens():
    rewards = f64([[1, 2, 50, 3, 60, 70, 4, 5], [80, 6, 7, 8, 90, 90, 90, 90]])
    close(
        action_rewards(rewards, TURNS, turn_starts(TURNS)),
        [[1 + 2, 0, 0, 3, 0, 0, 4 + 5, 0], [0, 6 + 7 + 8, 0, 0, 0, 0, 0, 0]],
    )


def test_golden_a_number_of_each_turn_at_all_its_tokens():
    x = f64([[1, 90, 90, 2, 90, 90, 3, 90], [90, 4, 90, 90, 90, 90, 90, 90]])
    close(spread_over_actions(x, TURNS, turn_starts(TURNS)), [[1, 1, 0, 2, 0, 0, 3, 3], [0, 4, 4, 4, 0, 0, 0, 0]])


def test_tokens_before_the_first_start_belong_to_no_action():
    own, starts = mask("xxxx"), mask("..x.")
    close(action_rewards(f64([[1, 2, 3, 4]]), own, starts), [[0, 0, 3 + 4, 0]])
    close(spread_over_actions(f64([[1, 2, 3, 4]]), own, starts), [[0, 0, 3, 3]])


def test_golden_lambda_is_per_turn():
    """Three turns of 2, 1 and 2 tokens; values before each, and rewards of each."""
    starts = turn_starts(mask("xx.x.xx"))
    rewards = action_rewards(f64([[0, 1, 9, 2, 9, 0, 3]]), mask("xx.x.xx"), starts)
    values = f64([[0.5, 9, 9, -0.25, 9, 0.75, 9]])
    d2, d1, d0 = 3 - 0.75, 2 + 0.9 * 0.75 + 0.25, 1 + 0.9 * -0.25 - 0.5
    a1 = d1 + 0.9 * 0.8 * d2
    a0 = d0 + 0.9 * 0.8 * a1
    advantages, returns = gae(rewards, values, starts, gamma=0.9, gae_lambda=0.8)
    close(advantages, [[a0, 0, 0, a1, 0, d2, 0]])
    close(returns, [[a0 + 0.5, 0, 0, a1 - 0.25, 0, d2 + 0.75, 0]])


def test_a_response_of_one_turn_is_one_action():
    own, rewards = mask("xxx.", ".xx."), f64([[1, 2, 3, 9], [9, 4, 5, 9]])
    assert turn_starts(own).tolist() == core.first_in_mask(own).tolist()
    close(action_rewards(rewards, own, turn_starts(own)), core.response_rewards(rewards, own))


def test_numbers_outside_of_turns_do_not_matter():
    rewards = torch.where(TURNS, 1.0, math.nan)
    assert action_rewards(rewards, TURNS, turn_starts(TURNS)).isfinite().all()
    assert spread_over_actions(rewards, TURNS, turn_starts(TURNS)).isfinite().all()


# Stop or continue ------------------------------------------------------------------------------------------------------
#
# A turn: x in {0, 1}; if x is 1, y in {0, 1}; then "stop" (1) or "go on" (0). It pays .1 if y is 1. The other one says one
# token after each turn but the last. The third turn is the last, whatever the policy says. So turns have 2 or 3 tokens,
# there are 66 trajectories, and how many turns there are is the policy's decision.

TURN_TOKENS = [(x, *y, stop) for x in (0, 1) for y in ([()] if x == 0 else [(0,), (1,)]) for stop in (0, 1)]
MOST_TURNS = 3
WIDTH = 3 * MOST_TURNS + MOST_TURNS - 1


def trajectories():
    """All of them, each as turns."""
    for count in range(1, MOST_TURNS + 1):
        for turns in itertools.product(TURN_TOKENS, repeat=count):
            if all(turn[-1] == 0 for turn in turns[:-1]) and (turns[-1][-1] == 1 or count == MOST_TURNS):
                yield turns


def paid(turn):
    return 0.1 if turn[:-1] == (1, 1) else 0.0


class Game(NamedTuple):
    """Every trajectory as a row: own tokens' log-probs, the reward of each turn at its last token, and its probability."""

    logits: torch.Tensor
    """``[states, 2]``, the parameters."""
    states: list
    """The own tokens so far, of each row and column; None outside of the mask."""
    decisions: list
    """The rows of the logits whose token says whether the policy stops."""
    mask: torch.Tensor
    logprobs: torch.Tensor
    rewards: torch.Tensor
    probabilities: torch.Tensor


@pytest.fixture(scope="module")
def game():
    rows = list(trajectories())
    states, chosen = [[None] * WIDTH for _ in rows], torch.zeros(len(rows), WIDTH, dtype=torch.long)
    rewards, decisions = torch.zeros(len(rows), WIDTH, dtype=torch.float64), set()
    for row, turns in enumerate(rows):
        place, said = 0, ()
        for turn in turns:
            for nth, token in enumerate(turn):
                if nth == len(turn) - 1:
                    decisions.add(said)
                states[row][place], chosen[row, place] = said, token
                place, said = place + 1, (*said, token)
            rewards[row, place - 1] = paid(turn)
            place += 1  # what the other one says
    known = {state: i for i, state in enumerate(sorted({s for row in states for s in row if s is not None}))}
    logits = torch.randn(len(known), 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits.requires_grad_()
    own = torch.tensor([[state is not None for state in row] for row in states])
    which = torch.tensor([[known.get(state, 0) for state in row] for row in states])
    logprobs = logits.log_softmax(1)[which].gather(2, chosen.unsqueeze(2)).squeeze(2)
    logprobs = torch.where(own, logprobs, 0.0)
    stops = sorted(known[state] for state in decisions)
    return Game(logits, states, stops, own, logprobs, rewards, logprobs.sum(dim=1).exp())


def test_the_trajectories_are_all(game):
    assert len(game.states) == 66
    assert float(game.probabilities.sum().detach()) == pytest.approx(1, abs=1e-12)


def true_gradient(game):
    """Of the expected sum of rewards."""
    objective = (game.probabilities * game.rewards.sum(dim=1)).sum()
    return torch.autograd.grad(objective, game.logits, retain_graph=True)[0]


def exact_values(game):
    """Of each state the mean of the rewards that come, over all trajectories through it; 0 outside of the mask."""
    given, total = {}, {}
    to_come = game.rewards.flip(1).cumsum(1).flip(1)
    for row, states in enumerate(game.states):
        weight = float(game.probabilities[row].detach())
        for column, state in enumerate(states):
            if state is not None:
                given[state] = given.get(state, 0) + weight
                total[state] = total.get(state, 0) + weight * float(to_come[row, column])
    value = {state: total[state] / given[state] for state in given}
    return f64([[0.0 if state is None else value[state] for state in row] for row in game.states])


def wrong_values(game):
    """The exact ones with an error of each state's own."""
    draw, errors = torch.Generator().manual_seed(1), {}
    for state in sorted({s for row in game.states for s in row if s is not None}):
        errors[state] = float(torch.randn((), generator=draw)) / 10
    return exact_values(game) + f64([[errors.get(state, 0.0) for state in row] for row in game.states])


def expected_gradient(game, advantages, how="token"):
    """The mean over all trajectories of the gradient of ``sum_t A_t log pi_t``."""
    weighted = advantages * game.probabilities.detach().unsqueeze(1)
    sums = core.Reduction(how, num_tokens=1, num_sequences=1)
    loss, _ = core.a2c_policy_loss(game.logprobs, weighted, game.mask, reduction=sums)
    return -torch.autograd.grad(loss, game.logits, retain_graph=True)[0]


def estimated(game, values, size, gae_lambda):
    """Advantages as an update takes them: of tokens, or of turns at all their tokens."""
    if size == "token":
        return gae(game.rewards, values, game.mask, gae_lambda=gae_lambda)[0]
    starts = turn_starts(game.mask)
    of_turns = action_rewards(game.rewards, game.mask, starts)
    return spread_over_actions(gae(of_turns, values, starts, gae_lambda=gae_lambda)[0], game.mask, starts)


def by_the_book(game, values, size, gae_lambda):
    """The same, written apart: ``A_t = sum_k lambda^k delta_{t+k}``, row by row."""
    found = torch.zeros_like(values)
    for row in range(len(values)):
        own = [column for column in range(WIDTH) if game.mask[row, column]]
        actions = [[column] for column in own]
        if size == "turn":
            actions = []
            for column in own:
                if actions and column - 1 == actions[-1][-1]:
                    actions[-1].append(column)
                else:
                    actions.append([column])
        errors = []
        for i, action in enumerate(actions):
            after = float(values[row, actions[i + 1][0]]) if i + 1 < len(actions) else 0.0
            errors.append(sum(float(game.rewards[row, c]) for c in action) + after - float(values[row, action[0]]))
        for i, action in enumerate(actions):
            found[row, action] = sum(gae_lambda**k * error for k, error in enumerate(errors[i:]))
    return found


SIZES = [(size, gae_lambda) for size in ("token", "turn") for gae_lambda in (0.0, 0.5, 0.95, 1.0)]


@pytest.mark.parametrize(("size", "gae_lambda"), SIZES)
def test_with_an_exact_critic_every_lambda_has_the_true_gradient(game, size, gae_lambda):
    found = expected_gradient(game, estimated(game, exact_values(game), size, gae_lambda))
    torch.testing.assert_close(found, true_gradient(game), rtol=0, atol=1e-12)
    assert true_gradient(game).abs().max() > 0.001


@pytest.mark.parametrize(("size", "gae_lambda"), SIZES)
def test_the_bias_of_a_wrong_critic_is_the_known_one(game, size, gae_lambda):
    """An exact critic hides mistakes in lambda. At lambda 1 a wrong one is a baseline, and there is no bias."""
    values = wrong_values(game)
    found = expected_gradient(game, estimated(game, values, size, gae_lambda))
    expected = expected_gradient(game, by_the_book(game, values, size, gae_lambda))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    bias = (expected - true_gradient(game)).abs().max()
    assert bias < 1e-12 if gae_lambda == 1 else bias > 1e-5


def test_a_mean_over_each_trajectory_is_biased(game):
    """It favours few tokens: a trajectory's gradient is divided by a length that the policy chose."""
    found = expected_gradient(game, estimated(game, exact_values(game), "turn", 1.0), how="sequence")
    found = found * float((game.probabilities.detach() * game.mask.sum(dim=1)).sum())
    assert (found - true_gradient(game)).abs().max() > 1e-3


def test_centring_by_turn_is_biased_where_the_policy_decides_when_to_stop(game):
    """Two trajectories: from each turn's reward the mean over those that have such a turn is subtracted, and each sums up to
    its own last turn. Whoever stops early has no share in the later means, so the sum is no baseline (verl#7244)."""
    turns = [[paid(turn) for turn in row] for row in trajectories()]
    weights, advantage = game.probabilities.detach(), torch.zeros(len(turns), dtype=torch.float64)
    plain = torch.zeros_like(advantage)
    for (i, one), (j, other) in itertools.product(enumerate(turns), repeat=2):
        means = [
            sum(row[k] for row in (one, other) if k < len(row)) / sum(k < len(row) for row in (one, other))
            for k in range(len(one))
        ]
        advantage[i] += weights[j] * sum(reward - mean for reward, mean in zip(one, means, strict=True))
        plain[i] += weights[j] * (sum(one) - sum(other)) / 2  # the group's mean of the whole, with oneself in it

    def gradient(of_rows):
        return expected_gradient(game, of_rows.unsqueeze(1).expand_as(game.rewards))

    torch.testing.assert_close(2 * gradient(plain), true_gradient(game), rtol=0, atol=1e-12)
    centred, true = gradient(advantage)[game.decisions, 0], true_gradient(game)[game.decisions, 0]
    assert centred.abs().sum() < true.abs().sum() / 2
