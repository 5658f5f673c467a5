"""Solutions of lesson 3, and a typical wrong answer to each exercise."""

import torch


def answer_1(r_w, r_l):
    return -torch.nn.functional.logsigmoid(r_w - r_l).mean()


def wrong_1(r_w, r_l):
    return -torch.log(torch.sigmoid(r_w - r_l)).mean()


def answer_2(scores, ranks):
    better = ranks.unsqueeze(1) < ranks.unsqueeze(0)
    differences = scores.unsqueeze(1) - scores.unsqueeze(0)
    return -torch.nn.functional.logsigmoid(differences)[better].mean()


def wrong_2(scores, ranks):
    ordered = scores[ranks.argsort()]
    return -torch.nn.functional.logsigmoid(ordered[:-1] - ordered[1:]).mean()


def answer_3(output, mask):
    positions = torch.arange(mask.shape[1])
    last = torch.where(mask.bool(), positions, -1).argmax(dim=1)
    return output.gather(1, last.unsqueeze(1)).squeeze(1)


def wrong_3(output, mask):
    return output.gather(1, mask.sum(dim=1, keepdim=True) - 1).squeeze(1)
