"""SFT and a reward model by heedful's trainers, then PPO by hand with an advantage function of our own."""

import json
from pathlib import Path

import torch

import heedful
from heedful import core

settings = {"batch_size": 8, "eval_fraction": 0, "sample_every": 0, "overwrite": True, "dtype": "float32"}
ppo_steps, ppo_epochs, gen_len, kl_ctl, gamma, lam = 30, 2, 16, 0.05, 1.0, 0.95
cliprange, cliprange_value, vf_coef, lr = 0.2, 0.5, 0.5, 1e-3
questions, answers = ["你是谁", "今天天气如何", "hello"], ["oh no", "ha ha ha", "not now", "what a day"]
dataset = [{"prompt": q, "completion": a, "chosen": a, "rejected": a.upper()} for q in questions for a in answers]


def advantage(rewards, values):
    """A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t; lam 0: TD error, lam 1: Monte Carlo."""
    advantages, adv_t, value_t1 = [], 0.0, 0.0
    for t in reversed(range(rewards.shape[1])):  # rewards and values are 0 behind the last token of a response
        delta = rewards[:, t] + gamma * value_t1 - values[:, t]
        adv_t, value_t1 = delta + gamma * lam * adv_t, values[:, t]
        advantages.append(adv_t)
    return torch.stack(advantages[::-1], dim=1)


def main(model="runs/tiny", output="runs/by_hand"):
    data, sft, rm = f"{output}.jsonl", f"{output}_sft", f"{output}_rm"
    Path(data).write_text("".join(json.dumps(row) + "\n" for row in dataset), encoding="utf-8")
    heedful.train_sft(heedful.SFTConfig(model=model, data=data, output=sft, epochs=20, learning_rate=5e-3, **settings))
    heedful.train_reward(heedful.RewardConfig(model=f"{sft}/final", data=data, output=rm, learning_rate=lr, **settings))
    actor_model = heedful.Policy.from_pretrained(f"{sft}/final", value_head=True, device="cpu", dtype="float32")
    ref_model, reward_model = actor_model.frozen_copy(), heedful.load_rewards(f"model:{rm}/final")
    engine, mean_scores = heedful.LocalEngine(actor_model, max_new_tokens=gen_len), []
    optimizer = torch.optim.AdamW(actor_model.parameters(), lr=lr)
    for step in range(ppo_steps):
        batch = engine.generate(questions * 10)
        mask, scores, values = batch.mask, heedful.score(reward_model, batch), heedful.values(actor_model, batch)
        old_logprobs, ref_logprobs = heedful.logprobs(actor_model, batch), heedful.logprobs(ref_model, batch)
        rewards = core.kl_shaped_rewards(scores, old_logprobs, ref_logprobs, mask, kl_coef=kl_ctl)
        advantages = advantage(rewards, values)
        returns = advantages + values
        for _ in range(ppo_epochs):
            new = actor_model(batch.ids, batch.attention_mask, mask)
            ratio = torch.exp(new.logprobs - old_logprobs)
            pg_losses = -advantages * ratio
            pg_losses_2 = -advantages * torch.clamp(ratio, 1.0 - cliprange, 1.0 + cliprange)
            loss = core.masked_mean(torch.max(pg_losses, pg_losses_2), mask)
            value_loss, _ = core.value_loss(new.values, values, returns, mask, clip_range=cliprange_value)
            optimizer.zero_grad()
            (loss + vf_coef * value_loss).backward()
            optimizer.step()
        mean_scores.append(float(scores.mean()))
        print(f"step={step} score={mean_scores[-1]:.3f} kl={(old_logprobs - ref_logprobs)[mask].mean():.3f}")
    return mean_scores


if __name__ == "__main__":
    main()
