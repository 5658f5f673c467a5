"""PPO by hand in minibatches, with an engine of our own that samples token by token, with top-k and top-p filters."""

import torch

import heedful
from heedful import core

epochs, ppo_epochs_per_rollout, minibatch_size, max_new_tokens, learning_rate = 30, 2, 16, 12, 2e-3
gamma, lambda_, clip_param, vf_coef, ent_coef, kl_beta, top_k, top_p = 0.99, 0.95, 0.2, 0.5, 0.005, 0.01, 50, 0.9
all_prompts = ["写一个关于机器学习的短介绍。", "PPO算法的核心思想是什么？", "推荐一本学习PyTorch的书籍。"] * 11


class TopEngine(heedful.Engine):
    def __init__(self, policy):
        self.policy = policy

    @torch.no_grad()
    def generate(self, prompts):
        ids, mask = heedful.encode_prompts(self.policy, prompts)
        for _ in range(max_new_tokens):
            places = (mask.cumsum(dim=1) - 1).clamp(min=0)
            logits, top = self.policy.lm(ids, attention_mask=mask, position_ids=places).logits[:, -1].topk(top_k)
            probs = logits.softmax(dim=-1)
            probs[probs.cumsum(dim=-1) - probs > top_p] = 0.0
            next_tokens = top.gather(1, torch.multinomial(probs, num_samples=1))
            ids, mask = torch.cat([ids, next_tokens], dim=1), torch.nn.functional.pad(mask, (0, 1), value=True)
        return heedful.as_responses(self.policy, prompts, ids[:, -max_new_tokens:].tolist())  # cut behind the end token


def main(model="runs/tiny", reward_model="rule:digits"):
    torch.manual_seed(0)
    policy_model = heedful.Policy.from_pretrained(model, value_head=True, device="cpu", dtype="float32")
    ref_model, engine = policy_model.frozen_copy(), TopEngine(policy_model)
    optimizer, mean_rewards = torch.optim.Adam(policy_model.parameters(), lr=learning_rate), []
    for epoch in range(epochs):
        rollout = engine.generate(all_prompts)
        log_probs, response_mask = heedful.logprobs(policy_model, rollout), rollout.mask
        ref_log_probs, values = heedful.logprobs(ref_model, rollout), heedful.values(policy_model, rollout)
        kl = core.response_kl(log_probs, ref_log_probs, response_mask)
        rewards = heedful.score(reward_model, rollout) - kl_beta * kl  # R, which comes with the last token
        per_step = core.kl_shaped_rewards(rewards, log_probs, ref_log_probs, response_mask, kl_coef=0.0)
        advantages, returns = core.gae(per_step, values, response_mask, gamma=gamma, gae_lambda=lambda_)
        for _ in range(ppo_epochs_per_rollout):
            for idx in torch.randperm(len(rollout)).split(minibatch_size):
                mb, adv = rollout.select(idx), core.whiten(advantages[idx], response_mask[idx])
                new = policy_model(mb.ids, mb.attention_mask, mb.mask, with_entropy=True)
                # L = -L_clip + vf_coef (V - returns)^2 - ent_coef H
                policy_loss, _ = core.ppo_policy_loss(new.logprobs, log_probs[idx], adv, mb.mask, clip_range=clip_param)
                value_loss = core.masked_mean((new.values - returns[idx]) ** 2, mb.mask)
                optimizer.zero_grad()
                (policy_loss + vf_coef * value_loss - ent_coef * core.masked_mean(new.entropy, mb.mask)).backward()
                torch.nn.utils.clip_grad_norm_(policy_model.parameters(), max_norm=0.5)
                optimizer.step()
        mean_rewards.append(float(rewards.mean()))
        print(f"epoch={epoch} reward={mean_rewards[-1]:.3f} kl={kl.mean():.3f}")
    return mean_rewards


if __name__ == "__main__":
    main()
