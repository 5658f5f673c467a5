"""Right answers of lesson 9, and a typical wrong one each."""

import math

import torch
from torch.nn.functional import logsigmoid


def answer_1(pi_w, pi_l, ref_w, ref_l, n_w, n_l, beta):
    h = (pi_w - ref_w) / n_w - (pi_l - ref_l) / n_l
    return -logsigmoid(beta * h).mean()


def wrong_1(pi_w, pi_l, ref_w, ref_l, n_w, n_l, beta):  # overflows
    h = (pi_w - ref_w) / n_w - (pi_l - ref_l) / n_l
    return -torch.sigmoid(beta * h).log().mean()


def answer_2(kind, beta, share):
    if kind == "ipo":
        return (2 * share - 1) / (2 * beta)
    return math.log(share / (1 - share)) / beta if share < 1 else math.inf


def wrong_2(kind, beta, share):  # IPO stops at its margin whatever the labels say
    if kind == "ipo":
        return 1 / (2 * beta)
    return answer_2(kind, beta, share)


def answer_3(logprobs, ref_logprobs, desirable, beta, kl, good_weight, bad_weight):
    r, z0 = logprobs - ref_logprobs, max(0.0, kl)
    gain = torch.where(desirable, r - z0, z0 - r)
    weight = torch.where(desirable, good_weight, bad_weight)
    return (weight * (1 - torch.sigmoid(beta * gain))).mean()


def wrong_3(logprobs, ref_logprobs, desirable, beta, kl, good_weight, bad_weight):  # a negative KL counts
    r = logprobs - ref_logprobs
    gain = torch.where(desirable, r - kl, kl - r)
    weight = torch.where(desirable, good_weight, bad_weight)
    return (weight * (1 - torch.sigmoid(beta * gain))).mean()
