"""The runs of same_numbers.py: every trainer with the settings that change what it computes, and the recipes cut short.

Paths are relative to the folder that `make_inputs` fills, so that nothing written down depends on where that folder is.
"""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import heedful
from heedful.apps.demo.world import write_world
from heedful.cli import main as cli

TRAINERS: dict[str, tuple[Callable, Callable]] = {
    "sft": (heedful.SFTConfig, heedful.train_sft),
    "reward": (heedful.RewardConfig, heedful.train_reward),
    "dpo": (heedful.DPOConfig, heedful.train_dpo),
    "ppo": (heedful.PPOConfig, heedful.train_ppo),
    "a2c": (heedful.A2CConfig, heedful.train_ppo),
    "grpo": (heedful.GRPOConfig, heedful.train_grpo),
    "critic": (heedful.CriticConfig, heedful.train_critic),
}
EVERY = {"device": "cpu", "dtype": "float32", "learning_rate": 1e-3, "micro_batch_size": 4, "eval_fraction": 0.25}
EVERY |= {"eval_every": 5, "sample_every": 5, "save_every": 5}
OFFLINE = {"max_steps": 10, "batch_size": 8}
ONLINE = {"data": "data/prompts.jsonl", "steps": 10, "rollout_batch_size": 16, "samples_per_prompt": 2}
ONLINE |= {"minibatch_size": 8, "ppo_epochs": 2, "max_new_tokens": 12, "rollout_micro_batch_size": 6}
DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": OFFLINE | {"data": "data/demonstrations.jsonl"},
    "reward": OFFLINE | {"data": "data/pairs.jsonl"},
    "dpo": OFFLINE | {"data": "data/pairs.jsonl"},
    "ppo": ONLINE,
    "a2c": ONLINE | {"ppo_epochs": 1, "minibatch_size": 0},
    "grpo": ONLINE | {"samples_per_prompt": 4},
    "critic": ONLINE | {"critic": "separate"},
}
PRETRAINING = {"max_steps": 60, "batch_size": 16, "learning_rate": 5e-3}
ONE_UPDATE = {"ppo_epochs": 1, "minibatch_size": 16}
SHORT = ["--device", "cpu", "--eval-every", "5", "--sample-every", "5", "--save-every", "5"]
SHORT_DEMO_PPO = ["--rollout-batch-size", "64", "--score-norm-samples", "64"]
RECIPES = Path(heedful.__file__).parents[2] / "recipes"
DEMO = Path(heedful.__file__).parent / "apps" / "demo" / "recipe"
GPT2, QWEN = "runs/start-gpt2/final", "runs/start-qwen3/final"
REWARDS = ("model:runs/start-reward/final",)


@dataclass(frozen=True)
class Case:
    """A run: a trainer with a model, reward functions and settings, or a command with its flags."""

    name: str
    command: str
    model: str = ""
    functions: Sequence[Callable] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    flags: Sequence[str] = ()

    def train(self) -> None:
        output = f"runs/{self.name}"
        if self.flags:
            if cli.main([self.command, *self.flags, "--output", output]):
                raise RuntimeError(f"heedful {self.command} {' '.join(self.flags)} failed")
            return
        make_config, train = TRAINERS[self.command]
        config = make_config(model=self.model, output=output, **EVERY | DEFAULTS[self.command] | self.settings)
        train(config, rewards=self.functions) if self.functions else train(config)


def pleasing(completion_ids: Sequence[Sequence[int]], number: Sequence[int], **_: Any) -> list[float]:
    """A score that differs between responses, and between prompts."""
    return [sum((i + n) % 7 for i in ids) / 20 for ids, n in zip(completion_ids, number, strict=True)]


def brevity(completion_ids: Sequence[Sequence[int]], truncated: Sequence[bool], **_: Any) -> list[float]:
    """More for shorter responses."""
    return [-1.0 if cut else 1 - len(ids) / 12 for ids, cut in zip(completion_ids, truncated, strict=True)]


def dense(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[list[float]]:
    """One number a token."""
    return [[(i % 5 - 2) / 4 for i in ids] for ids in completion_ids]


def one(name: str, command: str, model: str, *functions: Callable, **settings: Any) -> Case:
    """A run with settings of its own."""
    return Case(name, command, model, functions, settings)


def ppo(name: str, model: str, **settings: Any) -> Case:
    """PPO with one reward."""
    return one(f"ppo-{name}", "ppo", model, pleasing, **settings)


def grpo(name: str, model: str, **settings: Any) -> Case:
    """GRPO with one reward."""
    return one(f"grpo-{name}", "grpo", model, pleasing, **settings)


def recipe(folder: str, file: str, *flags: str) -> Case:
    """A stage of a recipe, of ten steps."""
    home = DEMO if folder == "demo" else Path("recipes", folder)
    steps = ["--steps", "10", "--max-new-tokens", "24"] if file.endswith("ppo") else ["--max-steps", "10"]
    words = [str(home / f"{file}.yaml"), *SHORT, *steps, *flags]
    return Case(f"{folder}/{file}", file.removeprefix("lora-"), flags=words)


def demo(file: str, model: str, data: str, *flags: str) -> Case:
    """A stage of the demo."""
    return recipe(
        "demo",
        file,
        "--model",
        f"runs/demo/{model}",
        "--data",
        f"data/world/{data}.jsonl",
        "--max-samples",
        "1000",
        *flags,
    )


def cases() -> list[Case]:
    """All runs, each after those whose models it needs."""
    return [
        one("start-gpt2", "sft", "models/gpt2", **PRETRAINING),
        one("start-qwen3", "sft", "models/qwen3", **PRETRAINING),
        one("start-reward", "reward", GPT2, learning_rate=3e-3),
        ppo("critic-shared", GPT2),
        ppo("critic-shared-qwen3", QWEN, value_learning_rate=3e-3, weight_decay=0.1, warmup_steps=3),
        ppo("critic-separate", QWEN, critic="separate", value_learning_rate=3e-3),
        ppo("critic-other-model", GPT2, critic="separate", value_model="models/gpt2", reference="models/gpt2"),
        one("ppo-critic-reward", "ppo", GPT2, critic="reward", rewards=REWARDS),
        one("ppo-critic-reward-norm", "ppo", GPT2, critic="reward", rewards=REWARDS, score_norm_samples=24),
        ppo("lora", QWEN, lora_rank=4),
        ppo("lora-critic-separate", GPT2, lora_rank=4, critic="separate"),
        ppo("response", QWEN, importance_level="sequence"),
        ppo("response-a2c", GPT2, importance_level="sequence", policy_loss="a2c", **ONE_UPDATE),
        ppo("token-a2c", QWEN, policy_loss="a2c", critic="separate", **ONE_UPDATE),
        ppo("kl-in-loss-k2", GPT2, kl_in="loss", kl_kind="k2", kl_coef=0.2),
        ppo("kl-in-loss-k3-response", QWEN, kl_in="loss", kl_kind="k3", importance_level="sequence", critic="separate"),
        ppo("kl-in-reward-k3", QWEN, kl_kind="k3", kl_coef=0.2),
        ppo("kl-adaptive", GPT2, kl_target=0.5, kl_horizon=100),
        ppo("kl-coef-0", QWEN, kl_coef=0.0),
        ppo("ema", GPT2, ema_decay=0.8),
        ppo("ptx", QWEN, ptx_data="data/demonstrations.jsonl", ptx_coef=0.5),
        ppo("entropy", GPT2, entropy_coef=0.05),
        ppo("dual-clip", QWEN, dual_clip=1.05, clip_range=0.05, clip_range_high=0.1, learning_rate=1e-2),
        ppo("approx-kl-limit", GPT2, approx_kl_limit=0.002, learning_rate=3e-3),
        ppo("critic-warmup", QWEN, critic_warmup_steps=3),
        ppo("critic-warmup-separate", GPT2, critic_warmup_steps=3, critic="separate"),
        one("critic", "critic", GPT2, pleasing, eval_fraction=0.1),
        ppo("critic-first", GPT2, critic="separate", value_model="runs/critic/final", value_lambda=1.0),
        ppo("two-lambdas", QWEN, value_lambda=1.0, gae_lambda=0.9),
        ppo("lambda-by-length", GPT2, gae_lambda_alpha=0.3, positive_coef=0.1, correct_from=0.0),
        ppo("more-critic", QWEN, critic="separate", value_epochs=3, value_freeze=("self_attn",)),
        ppo(
            "sao", GPT2, policy_loss="sao", clip_range=0.3, clip_range_high=5.0, **(ONE_UPDATE | {"minibatch_size": 4})
        ),
        ppo("score-norm-samples", GPT2, score_norm_samples=24),
        ppo("score-clip", QWEN, score_norm_samples=24, score_clip=1.0),
        ppo("whiten-rewards", GPT2, whiten_rewards=True, gamma=0.98),
        ppo("missing-eos-penalty", QWEN, missing_eos_penalty=1.0),
        one("ppo-dense", "ppo", GPT2, dense, score_norm_samples=24),
        one("ppo-dense-mean-std", "ppo", GPT2, dense, brevity, reward_combine="mean-std"),
        one("ppo-two-rewards", "ppo", QWEN, pleasing, brevity, reward_weights=(0.7, 0.3), missing_eos_penalty=0.5),
        ppo("length-fixed", GPT2, response_length="fixed", samples_per_prompt=1),
        ppo("top-p", QWEN, top_k=40, top_p=0.9, temperature=0.8),
        ppo("micro-batch-tokens", GPT2, micro_batch_tokens=120, micro_batch_size=8, gradient_checkpointing=True),
        ppo("patience", QWEN, early_stopping_patience=1, eval_every=1, learning_rate=1e-2),
        one("a2c", "a2c", GPT2, pleasing),
        one("a2c-critic-separate", "a2c", QWEN, pleasing, critic="separate", entropy_coef=0.02),
        grpo("loss-per-sequence", GPT2, ppo_epochs=1),
        grpo("kl-in-reward", QWEN, kl_in="reward", advantage="dr_grpo"),
        grpo("rloo", GPT2, kl_in="reward", advantage="rloo", importance_level="sequence"),
        grpo("reinforce", QWEN, kl_in="reward", advantage="reinforce", samples_per_prompt=1),
        grpo("gspo", GPT2, importance_level="sequence-mean", clip_range=3e-4, kl_coef=0.0),
        grpo("dr-grpo", QWEN, advantage="dr_grpo", loss_reduction="fixed"),
        grpo("dapo", GPT2, loss_reduction="token", clip_range_high=0.28, kl_coef=0.0),
        grpo("kl-coef-0", QWEN, kl_coef=0.0),
        grpo("lora", QWEN, lora_rank=4),
        grpo("other-reference", GPT2, reference="models/gpt2", score_clip=1.0, missing_eos_penalty=0.5),
        one("grpo-two-rewards", "grpo", QWEN, dense, brevity, missing_eos_penalty=1.0),
        one("sft", "sft", "models/gpt2", data="data/messages.jsonl", lr_schedule="cosine", warmup_steps=3),
        one("sft-lora-dropout", "sft", QWEN, lora_rank=4, lora_dropout=0.2, weight_decay=0.1),
        one("sft-loss-on-all", "sft", "models/qwen3", loss_on="all", micro_batch_tokens=150),
        one("sft-text", "sft", "models/gpt2", data="data/text.jsonl", max_length=24),
        one("reward", "reward", QWEN),
        one("reward-rankings", "reward", GPT2, data="data/rankings.jsonl", label_smoothing=0.1),
        one("reward-offset", "reward", QWEN, offset_data="data/demonstrations.jsonl", center_coef=0.01),
        one("reward-lora", "reward", GPT2, lora_rank=4, center_coef=0.01, label_smoothing=0.1),
        one("reward-encoder", "reward", "models/deberta", chat_template="plain"),
        one("dpo", "dpo", GPT2, label_smoothing=0.1),
        one("dpo-ipo-other-reference", "dpo", QWEN, loss="ipo", reference="models/qwen3"),
        one("dpo-hinge", "dpo", GPT2, loss="hinge", micro_batch_tokens=200),
        one("dpo-lora", "dpo", QWEN, lora_rank=4),
        recipe("first", "sft"),
        recipe("first", "reward"),
        recipe("first", "ppo"),
        recipe("scratch", "sft"),
        recipe("scratch", "reward"),
        recipe("scratch", "ppo"),
        recipe("rule", "sft", "--model", "runs/rule/base"),
        recipe("rule", "ppo", "--model", "runs/rule/sft/final"),
        recipe("rule", "lora-ppo", "--model", "runs/rule/sft/final"),
        demo("sft", "base", "demonstrations"),
        demo("reward", "sft/final", "preferences"),
        demo("ppo", "sft/final", "prompts", "--rewards", "model:runs/demo/reward/final", *SHORT_DEMO_PPO),
    ]


def make_inputs() -> None:
    """Data, untrained models and the recipes, in the current folder."""
    draw = random.Random("same numbers")
    things = ["snow", "grass", "night", "lemons", "the sea at noon", "苹果", "天空", "hi", "3 + 4", "bread", "me"]
    prompts = [f"{verb} {thing}" for verb in ("Name", "What is", "说说") for thing in things]

    def text() -> str:
        return draw.choice("bdgklm") + "".join(draw.choices("aeiou nst好", k=draw.randint(0, 13)))

    def asked(index: int) -> Any:  # half of the records are conversations, half are plain text
        return prompts[index] if index % 2 else [{"role": "user", "content": prompts[index]}]

    def said(index: int, answer: str) -> Any:
        return answer if index % 2 else [{"role": "assistant", "content": answer}]

    def turn(index: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": prompts[index]}, {"role": "assistant", "content": text()}]

    def ranked(index: int, count: int) -> dict[str, Any]:
        responses = [said(index, f"{place}{text()}") for place in range(count)]
        return {"responses": responses, "ranks": [0, 1, 1, 2][:count]}

    def write(name: str, make: Callable[[int], dict[str, Any]]) -> None:
        lines = [json.dumps(make(index), ensure_ascii=False) + "\n" for index in range(len(prompts))]
        Path(f"data/{name}.jsonl").write_text("".join(lines), encoding="utf-8")

    Path("data").mkdir()
    write("prompts", lambda i: {"prompt": asked(i), "number": i})
    write("demonstrations", lambda i: {"prompt": asked(i), "completion": said(i, text())})
    write("messages", lambda i: {"messages": [*turn(i), *turn(-i)]})
    write("text", lambda i: {"text": f"{prompts[i]}: {text()}{text()}{text()}"})
    write("pairs", lambda i: {"prompt": asked(i), "chosen": said(i, f"a{text()}"), "rejected": said(i, f"e{text()}")})
    write("rankings", lambda i: {"prompt": asked(i), **ranked(i, 2 + i % 3)})
    write_world(Path("data/world"), seed=0)
    shutil.copytree(RECIPES, "recipes")
    for architecture, name in (("gpt2", "gpt2"), ("qwen3", "qwen3"), ("deberta-v2", "deberta")):
        heedful.make_tiny_model(architecture, f"models/{name}", hidden_size=32, initializer_range=0.1)
    heedful.make_tiny_model("qwen3", "runs/first/tiny")
    heedful.make_tiny_model("qwen3", "runs/scratch/base", num_layers=4)
    heedful.make_tiny_model("qwen3", "runs/rule/base", initializer_range=0.1)
    cli.main(["tiny", str(DEMO / "tiny.yaml"), "--output", "runs/demo/base"])
