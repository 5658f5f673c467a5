"""Answers to lesson 11, and typical wrong ones."""


def answer_1(w, a, b, alpha):
    return w + alpha / a.shape[0] * b @ a


def wrong_1(w, a, b, alpha):
    """Without the division by the rank."""
    return w + alpha * b @ a


def answer_2(reward_scores, policy_log_probs, ref_log_probs, response_mask, kl_beta=0.1):
    kl = (policy_log_probs - ref_log_probs) * response_mask
    return reward_scores - kl_beta * kl.sum(dim=-1)


def wrong_2(reward_scores, policy_log_probs, ref_log_probs, response_mask, kl_beta=0.1):
    """Padding counts too."""
    return reward_scores - kl_beta * (policy_log_probs - ref_log_probs).sum(dim=-1)


def answer_3(tokenizer, reward_tokenizer, prompt, response_ids):
    response = tokenizer.decode(response_ids, skip_special_tokens=True)
    return reward_tokenizer(prompt, response).input_ids


def wrong_3(tokenizer, reward_tokenizer, prompt, response_ids):
    """Joined, as in the notebook."""
    return reward_tokenizer(prompt + tokenizer.decode(response_ids, skip_special_tokens=True)).input_ids
