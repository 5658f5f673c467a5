"""TRL 0.11's PPO written again from its formulas, slowly: rows one at a time without padding, loops over tokens.

It shares no code with `heedful.compat.trl`, which the tests compare with it.
"""

import math
from types import SimpleNamespace

import numpy as np
import torch


class OldPPO:
    """The reference of a trainer: `step` trains `model` as TRL's trainer of the same settings does.

    Args:
        model: language model with a value head; all of its passes are without dropout.
        reference: function of token ids and positions, which returns the reference's logits.
        config: settings under TRL's names.
        optimizer: of the model's trained weights.
        left: padding is on the left. Positions are then counted from the padding on, as GPT-2 counts them.
    """

    def __init__(self, model, reference, config, optimizer, *, left=False):
        self.model, self.reference, self.config, self.optimizer, self.left = (
            model.eval(),
            reference,
            config,
            optimizer,
            left,
        )
        self.coef, self.seen = config.init_kl_coef, []

    def passes(self, ids, pad):
        """Logits and values at every position of one row but the last."""
        positions = torch.arange(pad, pad + len(ids)).unsqueeze(0)
        out = self.model.pretrained_model(
            input_ids=ids.unsqueeze(0), position_ids=positions, output_hidden_states=True, use_cache=False
        )
        head = self.model.v_head.summary
        return out.logits[0, :-1], (out.hidden_states[-1][0, :-1] @ head.weight[0] + head.bias), positions

    def shaped(self, scores):
        c = self.config
        self.seen += scores
        if c.use_score_scaling:
            mean = np.mean(self.seen) if c.use_score_norm else 0.0
            scores = [(s - mean) / np.std(self.seen, ddof=1) for s in scores]
        return scores if c.score_clip is None else [min(max(s, -c.score_clip), c.score_clip) for s in scores]

    def step(self, queries, responses, scores, masks=None):
        c, rows = self.config, [torch.cat(pair) for pair in zip(queries, responses, strict=True)]
        width = max(map(len, rows)) - 1
        scores = self.shaped([float(s) for s in scores])
        batch = []
        for q, r, ids, score, own in zip(queries, responses, rows, scores, masks or [None] * len(rows), strict=True):
            pad = width + 1 - len(ids) if self.left else 0
            inside = [pad + len(q) - 1 + k for k in range(len(r)) if own is None or own[k]]
            with torch.no_grad():
                logits, values, positions = self.passes(ids, pad)
                ref_logp = self.reference(ids.unsqueeze(0), positions)[0, :-1].log_softmax(-1)
                logp = logits.log_softmax(-1)
            one = SimpleNamespace(ids=ids, pad=pad, inside=inside, size=len(ids) - 1)
            one.old = {pad + t: float(logp[t, ids[t + 1]]) for t in range(one.size)}
            one.ref = {pad + t: float(ref_logp[t, ids[t + 1]]) for t in range(one.size)}
            exact = (logp.exp() * (logp - ref_logp)).sum(-1)
            penalties = {
                "kl": lambda t, o=one: o.old[t] - o.ref[t],
                "abs": lambda t, o=one: abs(o.old[t] - o.ref[t]),
                "mse": lambda t, o=one: 0.5 * (o.old[t] - o.ref[t]) ** 2,
                "full": lambda t, e=exact, p=pad: float(e[t - p]),
            }
            one.kl = {t: penalties[c.kl_penalty](t) for t in inside}
            one.values = [float(values[t - pad]) if t in inside else 0.0 for t in range(width)]
            one.rewards = [-self.coef * one.kl[t] if t in inside else 0.0 for t in range(width)]
            one.rewards[inside[-1]] += score
            batch.append(one)
        if c.whiten_rewards:
            mean, var = moments([one.rewards[t] for one in batch for t in one.inside])
            for one in batch:
                one.rewards = [(x - mean) / math.sqrt(var + 1e-8) + mean for x in one.rewards]
        for one in batch:
            one.advantages, later = [0.0] * width, 0.0
            for t in reversed(range(width)):
                following = one.values[t + 1] if t + 1 < width else 0.0
                later = one.rewards[t] + c.gamma * following - one.values[t] + c.gamma * c.lam * later
                one.advantages[t] = later
            one.returns = [a + v for a, v in zip(one.advantages, one.values, strict=True)]
        mean, var = moments([one.advantages[t] for one in batch for t in one.inside])
        for one in batch:
            one.advantages = [(a - mean) / math.sqrt(var + 1e-8) for a in one.advantages]
        stats = self.update(batch)
        kls = [sum(one.kl.values()) for one in batch]
        stats |= {
            "objective/kl": np.mean(kls),
            "objective/kl_dist": np.array(kls),
            "objective/kl_coef": self.coef,
            "objective/entropy": np.mean([-sum(one.old[t] for t in one.inside) for one in batch]),
            "ppo/mean_non_score_reward": np.mean([-self.coef * kl for one in batch for kl in one.kl.values()]),
            "ppo/mean_scores": np.mean(scores),
            "ppo/std_scores": np.std(scores, ddof=1),
            "ppo/val/var_explained": 1 - stats["ppo/val/error"] / stats["ppo/returns/var"],
            "tokens/queries_len_mean": np.mean([len(q) for q in queries]),
            "tokens/responses_len_std": np.std([len(r) for r in responses], ddof=1),
        }
        if c.adap_kl_ctrl:
            error = min(max(np.mean(kls) / c.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * len(batch) / c.horizon
        return stats

    def update(self, batch):
        """``ppo_epochs`` over minibatches, an optimizer step after each ``gradient_accumulation_steps`` of them."""
        c, stats, count = self.config, [], 0
        weights = [w for group in self.optimizer.param_groups for w in group["params"]]
        for _ in range(c.ppo_epochs):
            order = np.random.permutation(len(batch))
            for start in range(0, len(batch), c.mini_batch_size):
                part = [batch[i] for i in order[start : start + c.mini_batch_size]]
                loss, found = self.loss(part)
                (loss / c.gradient_accumulation_steps).backward()
                stats.append(found)
                count += 1
                if count % c.gradient_accumulation_steps == 0:
                    if c.max_grad_norm is not None:
                        torch.nn.utils.clip_grad_norm_(weights, c.max_grad_norm)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            if c.early_stopping and stats[-1]["policy/policykl"] > 1.5 * c.target_kl:
                break
        means = {f"ppo/{k}": np.mean([one[k] for one in stats]) for k in stats[0] if k != "policy/advantages"}
        return means | {"ppo/policy/advantages": np.concatenate([one["policy/advantages"] for one in stats])}

    def loss(self, part):
        c, tokens, entropies = self.config, [], []
        for one in part:
            logits, values, _ = self.passes(one.ids, one.pad)
            for t in one.inside:
                row = logits[t - one.pad].log_softmax(-1)
                entropies.append(float(-(row.exp() * row).sum()))
                tokens.append((row[one.ids[t - one.pad + 1]], values[t - one.pad], one, t))
        policy, value, at = 0.0, 0.0, {"policy": 0, "value": 0}
        found = {key: [] for key in ("approxkl", "policykl", "ratio", "vpred", "error")}
        for logp, v, one, t in tokens:
            old, advantage, target, before = one.old[t], one.advantages[t], one.returns[t], one.values[t]
            ratio = (logp - old).exp()
            plain, bounded = ratio * advantage, ratio.clamp(1 - c.cliprange, 1 + c.cliprange) * advantage
            policy = policy - torch.minimum(plain, bounded) / len(tokens)
            at["policy"] += float(bounded) < float(plain)
            near = v.clamp(before - c.cliprange_value, before + c.cliprange_value)
            value = value + 0.5 * torch.maximum((v - target) ** 2, (near - target) ** 2) / len(tokens)
            at["value"] += float((near - target) ** 2) > float((v - target) ** 2)
            found["approxkl"].append(0.5 * (float(logp) - old) ** 2)
            found["policykl"].append(old - float(logp))
            found["ratio"].append(float(ratio))
            found["vpred"].append(float(v))
            found["error"].append((float(v) - target) ** 2)
        if np.mean(found["ratio"]) > c.ratio_threshold:
            policy, value = 0 * policy, 0 * value
        loss = policy + c.vf_coef * value
        returns, advantages, values = (
            [getattr(one, name)[t] for *_, one, t in tokens] for name in ("returns", "advantages", "values")
        )
        return loss, {
            "loss/policy": float(policy),
            "loss/value": float(value),
            "loss/total": float(loss),
            "policy/entropy": np.mean(entropies),
            "policy/approxkl": np.mean(found["approxkl"]),
            "policy/policykl": np.mean(found["policykl"]),
            "policy/clipfrac": at["policy"] / len(tokens),
            "policy/advantages": np.concatenate([one.advantages for one in part]),
            "policy/advantages_mean": np.mean(advantages),
            "returns/mean": np.mean(returns),
            "returns/var": np.var(returns, ddof=1),
            "val/vpred": np.mean(found["vpred"]),
            "val/error": np.mean(found["error"]),
            "val/clipfrac": at["value"] / len(tokens),
            "val/mean": np.mean(values),
            "val/var": np.var(values, ddof=1),
        }


def moments(numbers):
    """Mean and variance, the latter with Bessel's correction."""
    return float(np.mean(numbers)), float(np.var(numbers, ddof=1))
