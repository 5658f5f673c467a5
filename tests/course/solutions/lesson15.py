"""Answers to the exercises of lesson 15, right and typically wrong."""

from heedful import core


def answer_1(values, rewards, mask):
    rewards = rewards * mask
    returns = rewards.flip(1).cumsum(1).flip(1)
    return 1 - (returns - values)[mask].var() / returns[mask].var()


def wrong_1(values, rewards, mask):
    """Against lambda-returns, which hold the values themselves."""
    returns = core.gae(rewards, values, mask, gamma=1.0, gae_lambda=0.95)[1]
    return core.explained_variance(values, returns, mask)


def answer_2(length, kept):
    return 1 / (length * (1 - kept ** (1 / (length - 1))))


def wrong_2(length, kept):
    """The last token is length - 1 steps away, not length."""
    return 1 / (length * (1 - kept ** (1 / length)))


def answer_3(scores, group_size):
    groups = scores.view(-1, group_size)
    others = (groups.sum(dim=1, keepdim=True) - groups) / (group_size - 1)
    return 1 - (groups - others).var() / scores.var()


def wrong_3(scores, group_size):
    """The mean of the group holds the score that it predicts."""
    groups = scores.view(-1, group_size)
    return 1 - (groups - groups.mean(dim=1, keepdim=True)).var() / scores.var()
