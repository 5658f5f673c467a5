"""Solutions of lesson 2, and a typical wrong answer to each exercise."""

import torch


def answer_1(logits, ids, mask):
    log_pi = logits[:, :-1].log_softmax(dim=-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return -log_pi[mask[:, 1:]].mean()


def wrong_1(logits, ids, mask):
    """The mean of the means of each text."""
    log_pi = logits[:, :-1].log_softmax(dim=-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return torch.stack([-row[learned].mean() for row, learned in zip(log_pi, mask[:, 1:], strict=True)]).mean()


def answer_2(prompt_ids, response_ids, end_id, truncated):
    response = [*response_ids, *([] if truncated else [end_id])]
    return [*prompt_ids, *response], [False] * len(prompt_ids) + [True] * len(response)


def wrong_2(prompt_ids, response_ids, end_id, truncated):
    ids = [*prompt_ids, *response_ids, *([] if truncated else [end_id])]
    return ids, [False] * len(prompt_ids) + [True] * len(response_ids) + [False] * (not truncated)


def answer_3(micro_batches):
    total = sum(mask.sum() for _, mask in micro_batches)
    return sum(-(logprobs * mask).sum() for logprobs, mask in micro_batches) / total


def wrong_3(micro_batches):
    losses = [-logprobs[mask].mean() for logprobs, mask in micro_batches]
    return sum(losses) / len(losses)
