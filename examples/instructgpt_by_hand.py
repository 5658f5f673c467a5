"""InstructGPT by hand: supervised fine-tuning, a reward model from preferences, PPO. Every line is a formula."""

from copy import deepcopy

import torch

import heedful
from heedful import core

sft_steps, rm_steps, ppo_steps, ppo_epochs, lr = 60, 10, 30, 4, 1e-3
clip_low, clip_high, vf_clip, vf_coef, ent_coef, kl_coef, gamma, lam = 0.8, 1.2, 0.2, 0.5, 0.0, 0.02, 0.99, 0.95
prompts, answers = ["What is AI?", "What is 1+1?", "Write a greeting"], ["AI is technology.", "1+1 equals 2.", "Hello!"]
good_answers, bad_answers = ["AI simulates intelligence.", "It is 2.", "Hello! I'm glad."], ["Robots.", "3?", "Hey."]


def reward(model, batch):  # r(x, y): the linear head of the mean of the hidden states, which is the mean of the values
    return model(batch.ids, batch.attention_mask, batch.mask).values.sum(dim=1) / batch.mask.sum(dim=1)


def update(model, opt, loss):
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()


def main(model="runs/tiny"):
    policy = heedful.Policy.from_pretrained(model, value_head=True, device="cpu", dtype="float32")
    data, opt = heedful.as_responses(policy, prompts, answers), torch.optim.Adam(policy.parameters(), lr=lr)
    for _ in range(sft_steps):  # 1. SFT: L = -E[log pi(y|x)]
        update(policy, opt, core.sft_loss(policy(data.ids, data.attention_mask, data.mask).logprobs, data.mask)[0])
    reward_model, ref_policy, mean_rewards = deepcopy(policy), policy.frozen_copy(), []
    good, bad = (heedful.as_responses(policy, prompts, texts) for texts in (good_answers, bad_answers))
    opt = torch.optim.Adam(reward_model.parameters(), lr=lr)
    for _ in range(rm_steps):  # 2. RM: L = -E[log sigmoid(r(x, y_w) - r(x, y_l))]
        r_good, r_bad = reward(reward_model, good), reward(reward_model, bad)
        update(reward_model, opt, core.pairwise_reward_loss(r_good, r_bad)[0])
    engine, opt = heedful.LocalEngine(policy, max_new_tokens=24), torch.optim.Adam(policy.parameters(), lr=lr)
    for step in range(ppo_steps):  # 3. PPO
        full = engine.generate(prompts * 8)
        mask, R, v_old = full.mask, reward(reward_model, full).detach(), heedful.values(policy, full)
        logp_old, logp_ref = heedful.logprobs(policy, full), heedful.logprobs(ref_policy, full)
        rewards = core.kl_shaped_rewards(R, logp_old, logp_ref, mask, kl_coef=0.0)  # R, with the last token
        adv, ret = core.gae(rewards, v_old, mask, gamma=gamma, gae_lambda=lam)
        adv = core.whiten(adv, mask)
        for _ in range(ppo_epochs):
            new = policy(full.ids, full.attention_mask, mask, with_entropy=True)
            ratio = (new.logprobs - logp_old).exp()
            L_actor = -core.masked_mean(torch.min(ratio * adv, ratio.clamp(clip_low, clip_high) * adv), mask)
            L_value, _ = core.value_loss(new.values, v_old, ret, mask, clip_range=vf_clip)
            L_kl = kl_coef * core.masked_mean(core.kl_estimate(new.logprobs, logp_ref, kind="k2"), mask)
            entropy = core.masked_mean(new.entropy, mask)
            update(policy, opt, L_actor + vf_coef * L_value - ent_coef * entropy + L_kl)
        mean_rewards.append(float(R.mean()))
        print(f"step={step} R={mean_rewards[-1]:.3f} L_kl={L_kl:.4f}")
    return mean_rewards


if __name__ == "__main__":
    main()
