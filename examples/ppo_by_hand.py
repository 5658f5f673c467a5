"""PPO by hand, token by token: every line is a formula. The rewards are a rule; the model is tiny, or one that you name.

python examples/ppo_by_hand.py [MODEL]
"""

import sys
import tempfile

import torch

import heedful
from heedful import core

train_steps, ppo_epochs, max_new_tokens, kl_coef, gamma, gae_lambda = 40, 2, 16, 0.05, 1.0, 0.95
clip_eps, value_clip_eps, vf_coef, ent_coef, max_grad_norm = 0.2, 0.2, 0.5, 0.0, 1.0
prompts = ["2+2等于几？", "请只回答：通义千问", "把“我喜欢机器学习”翻译成英文", "hello"] * 8


def rule_reward(completions, **_):
    """The share of small letters: something that a tiny model learns in a minute."""
    return [sum(c.islower() for c in text) / max(1, len(text)) for text in completions]


def main(model):
    torch.manual_seed(42)
    actor_critic = heedful.Policy.from_pretrained(model, value_head=True, device="cpu", dtype="float32")
    ref_model = actor_critic.frozen_copy()  # pi_ref
    engine = heedful.LocalEngine(actor_critic, max_new_tokens=max_new_tokens)
    optimizer = torch.optim.AdamW(actor_critic.parameters(), lr=2e-3)
    mean_rewards = []
    for step in range(train_steps):
        # 1. rollout: responses of the policy, their rewards, log pi_old, V_old, log pi_ref
        rollout = engine.generate(prompts)
        mask, rm_reward = rollout.mask, heedful.score(rule_reward, rollout)
        logpi_old, logpi_ref = heedful.logprobs(actor_critic, rollout), heedful.logprobs(ref_model, rollout)
        values_old = heedful.values(actor_critic, rollout)
        # 2. r_t = -kl_coef (log pi_old - log pi_ref) + [t = T] rm_reward
        rewards = core.kl_shaped_rewards(rm_reward, logpi_old, logpi_ref, mask, kl_coef=kl_coef)
        # 3. delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lambda A_{t+1},  R_t = A_t + V_t
        advantages, returns = core.gae(rewards, values_old, mask, gamma=gamma, gae_lambda=gae_lambda)
        advantages = core.whiten(advantages, mask)
        # 4. L = -L_clip + c_V L_V - c_ent H, a few times on the same rollout
        for _ in range(ppo_epochs):
            new = actor_critic(rollout.ids, rollout.attention_mask, mask, with_entropy=True)
            policy_loss, metrics = core.ppo_policy_loss(new.logprobs, logpi_old, advantages, mask, clip_range=clip_eps)
            value_loss, _ = core.value_loss(new.values, values_old, returns, mask, clip_range=value_clip_eps)
            optimizer.zero_grad()
            (policy_loss + vf_coef * value_loss - ent_coef * core.masked_mean(new.entropy, mask)).backward()
            torch.nn.utils.clip_grad_norm_(actor_critic.parameters(), max_grad_norm)
            optimizer.step()
        mean_rewards.append(float(rm_reward.mean()))
        print(f"step={step} rm_reward={mean_rewards[-1]:.3f} approx_kl={metrics['policy/approx_kl']:.4f}")
    return mean_rewards


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        if not sys.argv[1:]:
            heedful.make_tiny_model("gpt2", f"{folder}/tiny", hidden_size=64, max_length=128)
        main(sys.argv[1] if sys.argv[1:] else f"{folder}/tiny")
