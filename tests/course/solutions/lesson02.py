"""Solutions of lesson 2, and a typical wrong answer to each exercise."""


def answer_1(logprobs, mask):
    return -(logprobs * mask).sum() / mask.sum()


def wrong_1(logprobs, mask):
    return -(logprobs * mask).mean()


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
    losses = [answer_1(logprobs, mask) for logprobs, mask in micro_batches]
    return sum(losses) / len(losses)
