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


def answer_3(R, logp_old, logp_ref, mask, kl_coef):  # noqa: N803
    rewards = torch.where(mask, -kl_coef * (logp_old - logp_ref), 0.0)
    rewards[torch.arange(len(R)), mask.sum(dim=1) - 1] += R
    return rewards


def wrong_3(R, logp_old, logp_ref, mask, kl_coef):  # R in the last column, which may be padding  # noqa: N803
    rewards = torch.where(mask, -kl_coef * (logp_old - logp_ref), 0.0)
    rewards[:, -1] += R
    return rewards
