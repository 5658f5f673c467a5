"""Answers to the exercises of lesson 4, right and typically wrong."""

import torch


def answer_1(logits, ids, time):
    log_pi = logits[:, -time - 1 : -1].log_softmax(dim=-1)
    return log_pi.gather(-1, ids[:, -time:].unsqueeze(-1)).squeeze(-1)


def wrong_1(logits, ids, time):
    """Does not shift by one."""
    log_pi = logits[:, -time:].log_softmax(dim=-1)
    return log_pi.gather(-1, ids[:, -time:].unsqueeze(-1)).squeeze(-1)


def answer_2(logits, ref_logits):
    log_pi, log_ref = logits.log_softmax(dim=-1), ref_logits.log_softmax(dim=-1)
    return (log_pi.exp() * (log_pi - log_ref)).sum(dim=-1)


def wrong_2(logits, ref_logits):
    """torch's kl_div(input, target) is the KL of the target to the input."""
    log_pi, log_ref = logits.log_softmax(dim=-1), ref_logits.log_softmax(dim=-1)
    return torch.nn.functional.kl_div(log_pi, log_ref, log_target=True, reduction="none").sum(dim=-1)


def answer_3(logprobs, ref_logprobs, mask):
    d = torch.where(mask, logprobs - ref_logprobs, 0.0)
    return (torch.exp(-d) - 1 + d).sum(dim=1)


def wrong_3(logprobs, ref_logprobs, mask):
    """Has the sign of d the wrong way round."""
    d = torch.where(mask, logprobs - ref_logprobs, 0.0)
    return (torch.exp(d) - 1 - d).sum(dim=1)
