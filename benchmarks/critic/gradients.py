"""A1: how near the gradient of each estimator is to the true one, while the policy stands still.

python benchmarks/critic/gradients.py runs/critic/sft/final --lengths 20 100 --seeds 0 1 2 3 4 --output runs/critic

For each length and seed two critics learn (`critics`). Then the gradients of every estimator, from the same batches of
responses, are compared with a reference: the mean gradient of many other responses, each token's log-prob times the return
minus what a perfect critic says before it (`perfect_values`). A baseline that knows only the past leaves the mean of the
gradient as it is, whatever it says, and this one makes it less noisy. The reference's halves say how noisy it still is.

Every length and seed is a line of OUTPUT/a1.jsonl; what has its line is not done again. The critics are runs of heedful that
go on where they were interrupted, and so does the reference.
"""

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from results import Results, processor
from settings import ALPHAS, ROLLOUT, Sizes, critic_settings, warmed_critic_settings
from task import error_rate, on_track, prompts, right
from torch import Tensor

import heedful
from heedful import core
from heedful.algorithms.online.advantages import Rewards, estimate_advantages
from heedful.models.load import load_value_model
from heedful.models.value_model import ValueModel

GROUP = 8
PARTS = 10
"""Parts of an answer, for what a critic knows by position."""
LAMBDAS: dict[str, dict[str, float]] = {
    "lambda .95": {"gae_lambda": 0.95},
    "lambda 1": {"gae_lambda": 1.0},
    **{f"alpha {alpha:g}": {"gae_lambda_alpha": alpha} for alpha in ALPHAS},
}
UNWHITENED = ("REINFORCE", "GRPO", "RLOO")
"""Estimators without a critic, whose advantages `heedful.GRPOConfig` leaves as they are."""
UNTRAINED, PRETRAINED, TRAINED_95, PERFECT = "untrained", "pretrained", "trained with lambda .95", "perfect"


def critics(model: str, n: int, seed: int, sizes: Sizes, output: Path) -> dict[str, ValueModel]:
    """The two critics that learn: from returns, and from targets of lambda .95, from as many responses."""
    folder = output / "critics" / f"{n}-{seed}-{sizes.critic_steps}"
    data = prompts(n, sizes.prompts, seed)
    pretrained, warmed = folder / "pretrained", folder / "lambda-95"
    if not (pretrained / "final").exists():
        config, held_out = critic_settings(model, [n], seed, sizes.critic_steps, pretrained), prompts(n, 16, 6000)
        heedful.train_critic(config, rewards=[right], data=data, eval_data=held_out)
    if not (warmed / "final").exists():
        heedful.train_ppo(warmed_critic_settings(model, [n], seed, sizes, warmed), rewards=[right], data=data)
    return {
        PRETRAINED: value_model(pretrained / "final"),
        TRAINED_95: value_model(warmed / "final" / "value_model"),
    }


def value_model(folder: Path) -> ValueModel:
    return load_value_model(str(folder), device=torch.device("cpu"), compute_dtype=torch.float32)


def perfect_values(batch: heedful.Responses, n: int, decay: float) -> Tensor:
    """What a critic that knows the task says before each token ``[B, T]``: how likely all sums will be right.

    decay^k if all were so far, else 0         k are left, decay = 1 - eps
    """
    values = torch.zeros(batch.mask.shape)
    for row, completion in zip(values, batch.completions, strict=True):
        states = [True, *on_track(str(completion.prompt.prompt), completion.response)]
        for place, is_right in enumerate(states[: len(row)]):
            row[place] = decay ** max(n - place, 0) if is_right else 0.0
    return torch.where(batch.mask, values, 0.0)


def estimated_decay(batch: heedful.Responses) -> float:
    """`perfect_values`' decay for the policy that answered, by its share of right answers, decay^n."""
    share = min(max(heedful.score([right], batch).mean().item(), 0.02), 0.98)
    return float(share ** (1 / (len(str(batch.completions[0].prompt.prompt)) - 2)))


# Gradients -------------------------------------------------------------------------------------------------------------


def gradients(policy: heedful.Policy, batch: heedful.Responses, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of ``sum_t weight_t log pi(token_t)`` over the number of tokens, for each of the weights ``[B, T]``.

    It is minus that of `core.a2c_policy_loss`, and of PPO's loss where the policy has not moved."""
    found = {name: torch.zeros(sum(p.numel() for p in policy.parameters())) for name in weights}
    tokens = batch.mask.sum()
    for rows in torch.arange(len(batch)).split(16):
        part = batch[rows]
        width = part.mask.shape[1]
        logprobs = policy(part.ids, part.attention_mask, part.mask, with_values=False).logprobs
        for name, weight in weights.items():
            loss, _ = core.a2c_policy_loss(
                logprobs, weight[rows, :width], part.mask, reduction=core.Reduction("token", tokens, len(batch), width)
            )
            policy.zero_grad()
            loss.backward(retain_graph=True)
            found[name] -= torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    return found


def cosine(one: Tensor, other: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(one, other, dim=0).item()


# The reference ---------------------------------------------------------------------------------------------------------


@dataclass
class Reference:
    """The sums of the gradients of two halves of many responses."""

    halves: tuple[Tensor, Tensor]
    batches: int = 0
    right: float = 0.0
    seconds: float = 0.0

    @property
    def gradient(self) -> Tensor:
        return self.halves[0] + self.halves[1]

    @property
    def reliability(self) -> float:
        """The cosine expected of the whole with another one of its size, from that of the halves (Spearman and Brown)."""
        agreement = cosine(*self.halves)
        return 2 * agreement / (1 + agreement)

    def summary(self) -> dict[str, float]:
        return {
            "responses": self.batches * ROLLOUT,
            "cosine of halves": cosine(*self.halves),
            "reliability": self.reliability,
            "right": self.right / self.batches,
            "seconds": self.seconds,
        }


def reference(policy: heedful.Policy, n: int, sizes: Sizes, output: Path) -> Reference:
    """The reference of a length; it grows to ``sizes.reference[n]`` batches in a file."""
    file = output / f"reference-{n}-{sizes.reference[n]}.pt"
    count = sum(p.numel() for p in policy.parameters())
    found = Reference((torch.zeros(count), torch.zeros(count)))
    if file.exists():
        saved = torch.load(file, weights_only=True)
        found = Reference(tuple(saved["halves"]), saved["batches"], saved["right"], saved["seconds"])
    asked = prompts(n, ROLLOUT * sizes.reference[n], 1000)
    while found.batches < sizes.reference[n]:
        started, at = time.perf_counter(), found.batches
        engine = heedful.LocalEngine(policy, max_new_tokens=n + 1, seed=1000 + at)
        batch = engine.generate(asked[at * ROLLOUT : (at + 1) * ROLLOUT])
        scores = heedful.score([right], batch)
        decay = 1 - error_rate(n)
        advantages = torch.where(batch.mask, scores.unsqueeze(1) - perfect_values(batch, n, decay), 0.0)
        found.halves[at % 2].add_(gradients(policy, batch, {"": advantages})[""])
        found.right += scores.mean().item()
        found.batches += 1
        found.seconds += time.perf_counter() - started
        if found.batches % 10 == 0 or found.batches == sizes.reference[n]:
            torch.save(vars(found), file.with_suffix(".part"))
            file.with_suffix(".part").replace(file)
    return found


# Estimators ------------------------------------------------------------------------------------------------------------


def advantages_of(batch: heedful.Responses, values: Tensor | None, **settings: Any) -> Tensor:
    """Advantages ``[B, T]`` as heedful's PPO makes them of a batch, before they are whitened."""
    scores = heedful.score([right], batch)
    nothing = torch.zeros_like(batch.logprobs)
    per_token = core.kl_shaped_rewards(scores, nothing, nothing, batch.mask, kl_coef=0.0)
    config = heedful.PPOConfig(model="-", data="-", output="-", kl_coef=0.0, **settings)
    return estimate_advantages(Rewards(per_token, scores, values, batch.mask), config).advantages


def whitened(of_raw: Tensor, of_ones: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The gradient of whitened advantages from that of the raw ones: a gradient is linear in them. Its length is not scaled,
    which no cosine sees."""
    return of_raw - core.masked_mean(advantages, mask) * of_ones


@dataclass
class Seen:
    """What the batches of a length and a seed showed of an estimator."""

    cosines: list[float] = field(default_factory=list)
    raw_cosines: list[float] = field(default_factory=list)
    projections: list[float] = field(default_factory=list)
    total: Tensor | float = 0.0

    def add(self, gradient: Tensor, raw: Tensor, true: Tensor) -> None:
        self.cosines.append(cosine(gradient, true))
        self.raw_cosines.append(cosine(raw, true))
        self.projections.append((gradient @ true / true.norm() / gradient.norm()).item())
        self.total = self.total + gradient

    def summary(self, true: Tensor) -> dict[str, Any]:
        assert isinstance(self.total, Tensor)
        return {
            "cosine": fmean(self.cosines),
            "cosine without whitening": fmean(self.raw_cosines),
            "cosine of the mean": cosine(self.total, true),
            "cosines": self.cosines,
        }


def compare(
    policy: heedful.Policy, known: Mapping[str, ValueModel], n: int, seed: int, *, sizes: Sizes, true: Tensor
) -> dict[str, Any]:
    """Cosines of all estimators, and what the critics know, from ``sizes.batches[n]`` batches."""
    seen: dict[str, Seen] = {}
    told: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
    asked = prompts(n, ROLLOUT * sizes.batches[n], 2000 + seed)
    engine = heedful.LocalEngine(policy, max_new_tokens=n + 1, seed=2000 + seed)
    pilot = engine.generate(prompts(n, 4 * ROLLOUT, 3000 + seed))
    decay = estimated_decay(pilot)
    for at in range(sizes.batches[n]):
        single = engine.generate(asked[at * ROLLOUT : (at + 1) * ROLLOUT])
        values = {name: heedful.values(critic, single) for name, critic in known.items()}
        values |= {UNTRAINED: torch.zeros(single.mask.shape), PERFECT: perfect_values(single, n, decay)}
        estimates = {
            f"{how}, {name}": advantages_of(single, values[name], **settings)
            for name in (UNTRAINED, PRETRAINED, TRAINED_95, PERFECT)
            for how, settings in LAMBDAS.items()
        }
        estimates["REINFORCE"] = advantages_of(single, None, advantage="reinforce")
        add(seen, policy, single, estimates, true)

        few = [prompt for prompt in asked[at * ROLLOUT : (at + 1) * ROLLOUT][: ROLLOUT // GROUP] for _ in range(GROUP)]
        groups = engine.generate(few)
        compared = {
            name.upper(): advantages_of(groups, None, advantage=name, samples_per_prompt=GROUP)
            for name in ("grpo", "rloo")
        }
        add(seen, policy, groups, compared, true)

        returns = core.rewards_to_go(
            core.kl_shaped_rewards(
                heedful.score([right], single), *[torch.zeros_like(single.logprobs)] * 2, single.mask, kl_coef=0.0
            ),
            single.mask,
        )
        for name, one in values.items():
            told.setdefault(name, []).append((one, returns, single.mask))
    return {
        "estimators": {name: one.summary(true) for name, one in seen.items()},
        "critics": {name: knowledge(parts, n) for name, parts in told.items()},
    }


def add(
    seen: dict[str, Seen],
    policy: heedful.Policy,
    batch: heedful.Responses,
    estimates: Mapping[str, Tensor],
    true: Tensor,
) -> None:
    ones = batch.mask.float()
    found = gradients(policy, batch, {**estimates, "": ones})
    of_ones = found.pop("")
    for name, raw in found.items():
        gradient = raw if name in UNWHITENED else whitened(raw, of_ones, estimates[name], batch.mask)
        seen.setdefault(name, Seen()).add(gradient, raw, true)


def knowledge(parts: list[tuple[Tensor, Tensor, Tensor]], n: int) -> dict[str, Any]:
    """What values say of the returns that came: explained variance and bias, of all tokens, of the first, and by position."""
    values, returns, mask = (padded([part[i] for part in parts], n + 1) for i in range(3))
    mask = mask.bool()
    first = core.first_in_mask(mask)
    place = torch.arange(n + 1).expand_as(mask)

    def of(where: Tensor) -> dict[str, float]:
        return {
            "explained variance": core.explained_variance(values, returns, where).item(),
            "bias": core.masked_mean(returns - values, where).item(),
        }

    return {
        **of(mask),
        "first": of(first),
        "prompt only": core.explained_variance(core.first_values(values, mask), returns, mask).item(),
        "by position": [of(mask & (place * PARTS // (n + 1) == part)) for part in range(PARTS)],
        "responses": len(mask),
    }


def padded(parts: list[Tensor], width: int) -> Tensor:
    return torch.cat([torch.nn.functional.pad(part.float(), (0, width - part.shape[1])) for part in parts])


def runs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The lines that are not there yet, one after another."""
    policy = heedful.Policy.from_pretrained(options.model, device="cpu", dtype="float32")
    sizes, results = Sizes.of(small=options.small), Results(options.output / "a1.jsonl")
    for n in options.lengths:
        for seed in options.seeds:
            key = {"experiment": "A1", "length": n, "seed": seed, "small": options.small}
            if results.has(key):
                continue
            started = time.perf_counter()
            known = critics(options.model, n, seed, sizes, options.output)
            of_critics = time.perf_counter()
            true = reference(policy, n, sizes, options.output)
            of_reference = time.perf_counter()
            found = compare(policy, known, n, seed, sizes=sizes, true=true.gradient)
            seconds = {"critics": of_critics - started, "compare": time.perf_counter() - of_reference}
            yield results.add(key | {"processor": processor(), "seconds": seconds, "reference": true.summary()} | found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the SFT model of task.py")
    parser.add_argument("--lengths", type=int, nargs="+", default=[20, 100, 400])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, default=Path("runs/critic"))
    parser.add_argument("--small", action="store_true", help="a few responses, to see that it works")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for line in runs(options):
        print(line["length"], line["seed"], line["seconds"], line["reference"])
        for name, one in line["estimators"].items():
            print(f"  {name:40} {one['cosine']:.3f} {one['cosine of the mean']:.3f}")
        for name, one in line["critics"].items():
            print(f"  {name:40} {one['explained variance']:.3f}", one["first"])


if __name__ == "__main__":
    main()
