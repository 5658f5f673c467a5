"""A2C by hand, and PPO, with the whole response as one action: numbers in a text. A callback of our own plots the reward."""

import re

import torch
from matplotlib.figure import Figure

import heedful

STEPS, MAX_NEW_TOKENS, CLIP_EPS, KL_COEFF, VF_COEFF, LR = 40, 16, 0.2, 0.2, 0.5, 4e-3
prompts = ["I will give you a passage of English text.", "The upcoming EURO 2016 in Poland", "Adorable"] * 16


def compute_reward(completions, **_):
    counts = [len(re.findall(r"\b\d+\b", text)) for text in completions]
    return [min(count * 0.2, 1.0) if count > 0 else -0.2 for count in counts]


class Plot:
    def __init__(self, path):
        self.path, self.rewards = path, []

    def __call__(self, step, metrics):
        print(f"step={step} reward={metrics['reward']:.3f}")
        self.rewards.append(metrics["reward"])
        if step % 10 == 9:
            figure = Figure(figsize=(6, 3), layout="tight")
            figure.subplots().plot(self.rewards)
            figure.savefig(self.path)


def main(model="runs/tiny", algorithm="a2c", on_step=print):
    actor = heedful.Policy.from_pretrained(model, device="cpu", dtype="float32")
    critic = heedful.Policy.from_pretrained(model, value_head=True, device="cpu", dtype="float32")
    engine = heedful.LocalEngine(actor, max_new_tokens=MAX_NEW_TOKENS)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=LR)
    for step in range(STEPS):
        if algorithm == "ppo" and step % 2 == 0:
            engine.update_weights(actor.frozen_copy())  # old_actor
        generated = engine.generate(prompts)
        mask, rewards = generated.mask, heedful.score(compute_reward, generated)
        lengths, inputs = mask.sum(dim=1), (generated.ids, generated.attention_mask, mask)
        values = critic(*inputs).values.sum(dim=1) / lengths  # the value head of the mean of the hidden states
        advantages, log_probs = rewards - values.detach(), actor(*inputs).logprobs.sum(dim=1)
        if algorithm == "a2c":  # L = -E[A log pi(y|x)], log pi per token
            actor_loss = -torch.mean(log_probs / lengths * advantages)
        else:  # L = -E[min(ratio A, clip(ratio) A)] + KL_COEFF KL, ratio = pi(y|x) / pi_old(y|x)
            log_probs_old = heedful.logprobs(engine.policy, generated).sum(dim=1)
            ratio = torch.exp(log_probs - log_probs_old)
            policy_loss = -torch.min(ratio * advantages, ratio.clamp(1 - CLIP_EPS, 1 + CLIP_EPS) * advantages).mean()
            actor_loss = policy_loss + KL_COEFF * (log_probs_old - log_probs).mean()
        critic_loss = VF_COEFF * torch.nn.functional.mse_loss(values, rewards)
        optimizer.zero_grad()
        (actor_loss + critic_loss).backward()
        optimizer.step()
        on_step(step, {"reward": rewards.mean().item(), "actor_loss": actor_loss.item()})


if __name__ == "__main__":
    main(on_step=Plot("reward.png"))
