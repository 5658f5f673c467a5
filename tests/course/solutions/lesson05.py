"""Answers to the exercises of lesson 5, right and typically wrong."""

import torch


def answer_1(rewards, values, gamma, gae_lambda):
    advantages, a, v_next = [], 0.0, 0.0
    for r, v in zip(reversed(rewards), reversed(values), strict=True):
        a = r + gamma * v_next - v + gamma * gae_lambda * a
        advantages.insert(0, a)
        v_next = v
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def wrong_1(rewards, values, gamma, gae_lambda):
    """Forgets gamma in the recursion."""
    advantages, a, v_next = [], 0.0, 0.0
    for r, v in zip(reversed(rewards), reversed(values), strict=True):
        a = r + gamma * v_next - v + gae_lambda * a
        advantages.insert(0, a)
        v_next = v
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def answer_2(time, kept):
    return kept ** (1 / (time - 1))


def wrong_2(time, kept):
    """The last token is time - 1 steps away, not time."""
    return kept ** (1 / time)


def answer_3(rewards, values, mask, gamma, gae_lambda):
    rewards, values = torch.where(mask, rewards, 0.0), torch.where(mask, values, 0.0)
    advantages, a, v_next = torch.zeros_like(rewards), torch.zeros(len(rewards)), torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        a = rewards[:, t] + gamma * v_next - values[:, t] + gamma * gae_lambda * a
        advantages[:, t], v_next = a, values[:, t]
    advantages = torch.where(mask, advantages, 0.0)
    return advantages, advantages + values


def wrong_3(rewards, values, mask, gamma, gae_lambda):
    """Masks only the result, so that the padding has flowed into it."""
    advantages, a, v_next = torch.zeros_like(rewards), torch.zeros(len(rewards)), torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        a = rewards[:, t] + gamma * v_next - values[:, t] + gamma * gae_lambda * a
        advantages[:, t], v_next = a, values[:, t]
    return advantages * mask, (advantages + values) * mask
