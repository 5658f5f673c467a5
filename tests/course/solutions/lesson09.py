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


def answer_2(kind, beta, label_smoothing=0.0):
    if kind == "ipo":
        return 1 / (2 * beta)
    if label_smoothing == 0:
        return math.inf
    return math.log((1 - label_smoothing) / label_smoothing) / beta


def wrong_2(kind, beta, label_smoothing=0.0):  # takes every loss for IPO
    return 1 / (2 * beta)


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
