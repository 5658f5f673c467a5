"""Right answers of lesson 8, and a typical wrong one each."""


def answer_1(scores):
    others = (scores.sum(dim=1, keepdim=True) - scores) / (scores.shape[1] - 1)
    return scores - others


def wrong_1(scores):  # the mean with the response itself
    return scores - scores.mean(dim=1, keepdim=True)


def answer_2(p, group_size):
    return 1 - p**group_size - (1 - p) ** group_size


def wrong_2(p, group_size):  # a group also ties if all answers are right
    return 1 - (1 - p) ** group_size


def answer_3(mask, how, max_new_tokens):
    weights = mask.float()
    if how == "token":
        return weights / weights.sum()
    if how == "sequence":
        return weights / weights.sum(dim=1, keepdim=True) / len(mask)
    return weights / (len(mask) * max_new_tokens)


def wrong_3(mask, how, max_new_tokens):  # divides by the padded length
    return mask.float() / mask.numel()
