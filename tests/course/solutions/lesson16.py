"""Answers to the exercises of lesson 16, right and typically wrong."""

import torch


def answer_1(ids, speak, end):
    own, speaks = [], False
    for token in ids.tolist():
        own.append(speaks)
        speaks = token != end if speaks else token == speak
    return own


def wrong_1(ids, speak, end):
    """The end token is left out, so the policy never learns to end a turn."""
    own, speaks = [], False
    for token in ids.tolist():
        speaks = speaks and token != end
        own.append(speaks)
        speaks = speaks or token == speak
    return own


def answer_2(own, others, gae_lambda):
    return gae_lambda ** (1 / own)


def wrong_2(own, others, gae_lambda):
    """The environment's tokens are no actions."""
    return gae_lambda ** (1 / (own + others))


def answer_3(rewards, played):
    to_go = (rewards * played).flip(1).cumsum(1).flip(1)
    others = (to_go.sum(dim=0, keepdim=True) - to_go) / (len(rewards) - 1)
    return (to_go - others) * played


def wrong_3(rewards, played):
    """The mean over the others that have such a turn: it depends on who went on."""
    to_go = (rewards * played).flip(1).cumsum(1).flip(1)
    count = played.sum(dim=0, keepdim=True) - played.long()
    others = torch.where(count > 0, (to_go.sum(dim=0, keepdim=True) - to_go) / count, 0.0)
    return (to_go - others) * played
