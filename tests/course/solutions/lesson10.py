"""Right answers of lesson 10, and a typical wrong one each."""

import torch
from torch.nn.functional import softplus


def answer_1(ids, sep, pad):
    labels = torch.full_like(ids, -100)
    start = int((ids == sep).nonzero()[0])
    labels[start:-1] = ids[start + 1 :]
    labels[labels == pad] = -100
    return labels


def wrong_1(ids, sep, pad):  # the mask is not shifted with the labels
    labels = torch.cat([ids[1:], ids[-1:]])
    start = int((ids == sep).nonzero()[0])
    labels[: start + 1] = -100
    labels[ids == pad] = -100
    return labels


def answer_2(r_good, r_bad):
    return softplus(r_bad - r_good).mean()


def wrong_2(r_good, r_bad):  # overflows
    return -torch.log(torch.sigmoid(r_good - r_bad)).mean()


def answer_3(logp_new, logp_old, adv, mask, clip_low, clip_high):
    ratio = (logp_new - logp_old).exp()
    objective = torch.min(ratio * adv, ratio.clamp(clip_low, clip_high) * adv)
    return -objective[mask].mean()


def wrong_3(logp_new, logp_old, adv, mask, clip_low, clip_high):  # without a gradient
    with torch.no_grad():
        return answer_3(logp_new, logp_old, adv, mask, clip_low, clip_high)
