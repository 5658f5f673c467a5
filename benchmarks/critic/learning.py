"""A2 and B: what is learned from equal numbers of sampled tokens, with and without a critic.

python benchmarks/critic/learning.py A2 runs/critic/sft/final --alpha 0.05 --output runs/critic
python benchmarks/critic/learning.py B runs/critic/sft/final --alpha 0.05 --output runs/critic
python benchmarks/critic/learning.py lag runs/critic/sft/final --alpha 0.05 --output runs/critic
python benchmarks/critic/learning.py "tune critic" runs/critic/sft/final --output runs/critic
python benchmarks/critic/learning.py tune runs/critic/sft/final --output runs/critic

Each run is a line of OUTPUT/learning.jsonl: tokens, seconds and success by length after each step, and success on held-out
prompts at its end. What has its line is not done again; a run that was interrupted goes on from its checkpoint. A run whose
critic is pretrained has as many steps less as the pretraining had, whose tokens and seconds are its own.
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from results import Results, processor
from settings import ROLLOUT, Sizes, critic_settings, grpo_settings, ppo_settings
from task import prompts, right

import heedful
from gradients import GROUP

MIXED, SINGLE, TUNED = (20, 100, 400), (100,), (50,)
POLICY_RATES, CRITIC_RATES = (1e-5, 3e-5, 1e-4, 3e-4), (3e-4, 1e-3, 3e-3)
LAG = 4
"""Steps for which `Lagging` keeps its snapshot."""
Run = tuple[dict[str, Any], "Arm", Sequence[int], int]
"""What names a run, its arm, lengths, and number of different prompts."""


class Lagging:
    """An engine that samples from a snapshot of the policy, and takes a new one every `LAG` batches: weights are 0 to LAG - 1
    steps old. A resumed run takes one when it begins."""

    def __init__(self, policy: heedful.Policy, config: heedful.PPOConfig) -> None:
        self.calls = 0
        self.inner = heedful.LocalEngine(policy, max_new_tokens=config.max_new_tokens, seed=config.seed)

    def update_weights(self, policy: heedful.Policy) -> None:
        if self.calls % LAG == 0:
            self.inner.update_weights(policy.frozen_copy())
        self.calls += 1

    def generate(self, asked: Sequence[Any]) -> heedful.Responses:
        return self.inner.generate(asked)

    def close(self) -> None:
        self.inner.close()


def reward_of(n: int) -> Callable[..., list[float | None]]:
    """`task.right` for prompts of n digits; None for others, so that each length has a metric of its own."""

    def reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float | None]:
        marks = right(prompts, completions)
        return [mark if len(prompt) == n + 2 else None for prompt, mark in zip(prompts, marks, strict=True)]

    reward.__name__ = f"right_{n}"
    return reward


# Arms ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """Settings that differ from `settings.ppo_settings` or `settings.grpo_settings`."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    has_critic: bool = True
    is_pretrained: bool = True
    is_adaptive: bool = True
    """Lambda 1 for values, and for advantages a lambda by length."""

    def config(
        self, place: tuple[Any, ...], critic: Path, alpha: float | None
    ) -> heedful.PPOConfig | heedful.GRPOConfig:
        """The settings of a run. ``place``: model, lengths, seed, steps and folder."""
        if not self.has_critic:
            return grpo_settings(*place, **self.changes)
        pretrained = {"value_model": str(critic)} if self.is_pretrained else {}
        adaptive = {"value_lambda": 1.0, "gae_lambda_alpha": alpha} if self.is_adaptive else {}
        return ppo_settings(*place, **pretrained, **adaptive, **self.changes)


def without_critic(**changes: Any) -> Arm:
    return Arm(changes, has_critic=False, is_pretrained=False, is_adaptive=False)


A2 = {
    "vanilla": Arm(is_pretrained=False, is_adaptive=False),
    "+ pretraining": Arm(is_adaptive=False),
    "+ lambda 1 for values": Arm({"value_lambda": 1.0}, is_adaptive=False),
    "+ adaptive lambda": Arm(),
    "GRPO of 8": without_critic(samples_per_prompt=GROUP),
}
B = {
    "1 response, critic": Arm(),
    "1 response, REINFORCE": without_critic(advantage="reinforce", samples_per_prompt=1),
    "8 responses, critic": Arm({"samples_per_prompt": GROUP}),
    "8 responses, GRPO": without_critic(samples_per_prompt=GROUP),
}
LATE: dict[str, Any] = {"sampler": [Lagging]}
LAGS = {
    "no lag": Arm(),
    "no correction": Arm(LATE),
    "truncated weights": Arm(LATE | {"importance": "token-truncate"}),
    "SAO's mask": Arm(LATE | {"policy_loss": "sao", "clip_range": 0.3, "clip_range_high": 5.0}),
}


# A run -----------------------------------------------------------------------------------------------------------------


def rewards_of(lengths: Sequence[int]) -> list[Any]:
    return [reward_of(n) for n in lengths] if len(lengths) > 1 else [right]


def steps_of(folder: Path, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Sampled tokens, seconds and success by length of each step of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = {}
    for line in lines:
        if "rollout/response_length" not in line:
            continue
        found[line["step"]] = {
            "tokens": line["rollout/response_length"] * ROLLOUT,
            "seconds": sum(line[f"time/{part}"] for part in ("rollout", "score", "update")),
            "right": {
                n: line.get(f"reward/right_{n}") if len(lengths) > 1 else line["reward/score_mean"] for n in lengths
            },
            "explained variance": line.get("value/explained_variance"),
        }
    return [found[step] for step in sorted(found)]


def success(model: Path, lengths: Sequence[int], sizes: Sizes) -> dict[int, float]:
    """The share of right answers to held-out prompts."""
    policy = heedful.Policy.from_pretrained(str(model), device="cpu", dtype="float32")
    found = {}
    for n in lengths:
        engine = heedful.LocalEngine(policy, max_new_tokens=n + 1, seed=5000)
        batch = engine.generate([one["prompt"] for one in prompts(n, sizes.held_out, 5000)])
        found[n] = heedful.score([right], batch).mean().item()
    return found


def run(
    key: Mapping[str, Any], arm: Arm, lengths: Sequence[int], count: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One arm with one seed, from its critic's pretraining on. ``count``: different prompts."""
    sizes, seed, rewards = Sizes.of(small=options.small), key["seed"], rewards_of(lengths)
    data = [record for n in lengths for record in prompts(n, count // len(lengths), seed)]
    critic = options.output / "critics" / "-".join(map(str, [*lengths, "of", count, "seed", seed, sizes.pretraining]))
    before = []
    if arm.is_pretrained:  # once for all arms with this seed and these prompts
        if not (critic / "final").exists():
            settings = critic_settings(options.model, lengths, seed, sizes.pretraining, critic)
            held_out = [record for n in lengths for record in prompts(n, 16 // len(lengths), 6000)]
            heedful.train_critic(settings, rewards=rewards, data=data, eval_data=held_out)
        before = steps_of(critic, lengths)
    folder = options.output / "learning" / re.sub(r"\W+", "-", "-".join(map(str, key.values())))
    if not (folder / "final").exists():
        place = (options.model, lengths, seed, sizes.steps - len(before), folder)
        heedful.train_ppo(arm.config(place, critic / "final", options.alpha), rewards=rewards, data=data)
    both = [*before, *steps_of(folder, lengths)]
    totals = {part: list(accumulate(step[part] for step in both)) for part in ("tokens", "seconds")}
    return {
        "processor": processor(),
        "steps of pretraining": len(before),
        "seconds": totals["seconds"][-1],
        "tokens": totals["tokens"],
        "seconds after": totals["seconds"],
        "right": {n: [step["right"][n] for step in both] for n in lengths},
        "explained variance": [step["explained variance"] for step in both],
        "held out": success(folder / "final", lengths, sizes),
    }


def experiment(name: str, options: argparse.Namespace) -> list[Run]:
    """The runs of an experiment."""
    arms, lengths, counts = {
        "A2": (A2, MIXED, (3 * 4096,)),
        "B": (B, SINGLE, (64, 4096)),
        "lag": (LAGS, SINGLE, (4096,)),
    }[name]
    return [
        (
            {
                "experiment": name,
                "arm": arm,
                "prompts": count,
                "seed": seed,
                "alpha": options.alpha,
                "small": options.small,
            },
            arms[arm],
            lengths,
            count,
        )
        for seed in options.seeds
        for count in counts
        for arm in arms
        if options.only is None or arm in options.only
    ]


def tuning(options: argparse.Namespace) -> list[Run]:
    """Learning rates of PPO, with a pretrained critic and lambda 1 for values, and of GRPO, at 50 digits and seed 100."""
    arms = {
        f"ppo {rate:g}": Arm({"value_lambda": 1.0, "learning_rate": rate}, is_adaptive=False) for rate in POLICY_RATES
    }
    arms |= {f"grpo {r:g}": without_critic(samples_per_prompt=GROUP, learning_rate=r) for r in POLICY_RATES}
    return [
        ({"experiment": "tune", "arm": name, "prompts": 4096, "seed": 100, "small": options.small}, arm, TUNED, 4096)
        for name, arm in arms.items()
        if options.only is None or name in options.only
    ]


def tune_critic(options: argparse.Namespace, results: Results) -> None:
    """The critic's learning rates: explained variance of its last ten rollout batches, before it learns from each."""
    for rate in CRITIC_RATES:
        key = {"experiment": "tune critic", "rate": rate, "seed": 100, "small": options.small}
        if results.has(key):
            continue
        folder = options.output / "critics" / f"tune-{rate:g}"
        settings = critic_settings(options.model, TUNED, 100, Sizes.of(small=options.small).critic_steps, folder)
        if not (folder / "final").exists():
            data, held_out = prompts(TUNED[0], 4096, 100), prompts(TUNED[0], 16, 6000)
            settings = replace(settings, learning_rate=rate)
            heedful.train_critic(settings, rewards=[right], data=data, eval_data=held_out)
        steps = steps_of(folder, TUNED)
        explained = [step["explained variance"] or 0.0 for step in steps]
        seconds = sum(step["seconds"] for step in steps)
        line = {"processor": processor(), "seconds": seconds, "explained variance": explained}
        print(results.add(key | line | {"last ten": fmean(explained[-10:])}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=["A2", "B", "lag", "tune", "tune critic"])
    parser.add_argument("model", help="the SFT model of task.py")
    parser.add_argument("--alpha", type=float, help="of the adaptive lambda: what A1 chose")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--only", nargs="+", help="some arms")
    parser.add_argument("--output", type=Path, default=Path("runs/critic"))
    parser.add_argument("--small", action="store_true", help="a few steps, to see that it works")
    options = parser.parse_args()
    if options.alpha is None and options.experiment in ("A2", "B", "lag"):
        parser.error("--alpha is what A1 chose: README.md")
    results = Results(options.output / "learning.jsonl")
    if options.experiment == "tune critic":
        tune_critic(options, results)
        return
    todo = tuning(options) if options.experiment == "tune" else experiment(options.experiment, options)
    for key, arm, lengths, count in todo:
        if not results.has(key):
            line = results.add({**key, **run(key, arm, lengths, count, options)})
            print(key, round(line["seconds"]), "s", line["held out"], flush=True)


if __name__ == "__main__":
    main()
