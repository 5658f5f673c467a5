"""Solutions of lesson 1, and a typical wrong answer to each exercise."""

import torch


def answer_1(logits, ids, temperature):
    return torch.log_softmax(logits / temperature, dim=-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def wrong_1(logits, ids, temperature):
    return torch.log_softmax(logits, dim=-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def answer_2(logits, prompt_length):
    return logits[prompt_length - 1 : -1]


def wrong_2(logits, prompt_length):
    return logits[prompt_length:]


def answer_3(logprobs, mask):
    return torch.where(mask, logprobs, 0.0).sum(dim=1)


def wrong_3(logprobs, mask):
    return (logprobs * mask).sum(dim=1)
