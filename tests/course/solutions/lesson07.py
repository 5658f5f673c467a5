"""Right answers of lesson 7, and a typical wrong one each."""

import torch

from heedful import core


def answer_1(rewards, values, mask):
    first = core.first_in_mask(mask)
    return (rewards * mask).sum(dim=1) - (values * first).sum(dim=1)


def wrong_1(rewards, values, mask):  # the value of the last state, and what is outside the mask
    return rewards.sum(dim=1) - values[:, -1]


def answer_2(logprobs, rewards, values, mask):
    to_come = (rewards * mask).flip(1).cumsum(dim=1).flip(1)
    return -((to_come - values) * logprobs)[mask].sum() / mask.sum()


def wrong_2(logprobs, rewards, values, mask):  # every token gets the whole return, also what came before it
    total = (rewards * mask).sum(dim=1, keepdim=True)
    return -((total - values) * logprobs)[mask].sum() / mask.sum()


def answer_3(logprobs, old_logprobs, mask, eps):
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    of_tokens = ((log_ratio.exp() - 1).abs() > eps)[mask].float().mean()
    of_responses = ((log_ratio.sum(dim=1).exp() - 1).abs() > eps).float().mean()
    return of_tokens.item(), of_responses.item()


def wrong_3(logprobs, old_logprobs, mask, eps):  # the mean ratio of a response, not the product
    ratio = torch.where(mask, logprobs - old_logprobs, 0.0).exp()
    of_responses = ((ratio.mean(dim=1) - 1).abs() > eps).float().mean()
    return ((ratio - 1).abs() > eps).float().mean().item(), of_responses.item()
