"""Right answers of lesson 8, and a typical wrong one each."""


def answer_1(scores, kl, kl_coef, group_size):
    shaped = (scores - kl_coef * kl).view(-1, group_size)
    others = (shaped.sum(dim=1, keepdim=True) - shaped) / (group_size - 1)
    return (shaped - others).flatten()


def wrong_1(scores, kl, kl_coef, group_size):  # the mean with the response itself
    shaped = (scores - kl_coef * kl).view(-1, group_size)
    return (shaped - shaped.mean(dim=1, keepdim=True)).flatten()


def answer_2(p, group_size):
    return 1 - sum(one**group_size for one in p)


def wrong_2(p, group_size):  # a group also ties if all have a score between the lowest and the highest
    return 1 - p[0] ** group_size - p[-1] ** group_size


def answer_3(mask, how, max_new_tokens):
    weights = mask.float()
    if how == "token":
        return weights / weights.sum()
    if how == "sequence":
        return weights / weights.sum(dim=1, keepdim=True) / len(mask)
    return weights / (len(mask) * max_new_tokens)


def wrong_3(mask, how, max_new_tokens):  # divides by the padded length
    return mask.float() / mask.numel()
