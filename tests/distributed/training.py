"""Five steps (or STEPS) of every trainer, one after another, alone or as one of several ranks; see test_equal_numbers.py.

[torchrun --nproc-per-node N] training.py INPUTS OUTPUT CASE ...

CASE@MUTANT plants a mistake of mutants.py. CHANGES holds settings that are others, as JSON; null is a setting's default.

With APART set, the optimizer is that of --optimizer-device cpu, which a run on processors refuses.

With DOUBLE set, everything that would be in float32 is in float64, so that what is left of differences is no rounding. The
models are then GPT-2, as the norms of others compute in float32 whatever they are given.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch
from mutants import planted
from transformers import PreTrainedModel

import heedful
import worlds
from heedful import KTOConfig, OnlineDPOConfig, make_tiny_model, train_kto, train_online_dpo
from heedful.distributed import ranks
from heedful.kernels.device import DTYPES
from heedful.training import optimization
from heedful.training.compact_adamw import CompactAdamW

WORDS = ["red", "blue", "绿色", "dog", "cat", "猫", "run", "jump", "七", "nine"]
STEPS = int(os.environ.get("STEPS", "5"))
OFFLINE = {
    "batch_size": 7,
    "micro_batch_size": 3,
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "eval_every": 2,
    "eval_fraction": 0.2,
    "sample_every": 2,
    "num_samples": 3,
}
ONLINE = {
    "data": "prompts.jsonl",
    "rollout_batch_size": 16,
    "minibatch_size": 8,
    "micro_batch_size": 3,
    "rollout_micro_batch_size": 5,
    "max_new_tokens": 12,
    "steps": STEPS,
    "ppo_epochs": 2,
    "learning_rate": 1e-3,
    "kl_coef": 0.1,
    "eval_every": 2,
    "eval_fraction": 0.2,
    "sample_every": 2,
    "model": "policy",
}
GROUPS = ONLINE | {"samples_per_prompt": 4}
SLOWER = {"learning_rate": 1e-4}
"""For runs that enlarge rounding: at 1e-3, A2C's gradient norm and RLOO's largest ratio differ by up to 8e-5 in float32 after
five steps, and by less than 1e-10 in float64."""
SHORTER = {"max_new_tokens": 6}
"""For a ratio of whole responses, whose log-probs are summed: 12 tokens are some 60 nats here, where float32 has steps of
3.8e-6, and of 7.6e-6 from 64 on, which is nearly all of the bound; 6 tokens are some 30, with steps of 1.9e-6."""
LORA = {"lora_rank": 4}
EVERYTHING = {
    "kl_target": 0.5,
    "kl_horizon": 100,
    "score_norm_samples": 8,
    "ptx_data": "demonstrations.jsonl",
    "ptx_coef": 0.5,
    "ema_decay": 0.9,
    "rollouts": "all",
}


TURNS = {
    "model": "talker",
    "data": "games.jsonl",
    "environment": (f"python:{worlds.__file__}:Talk", f"python:{worlds.__file__}:Faulty"),
    "max_failed_rewards": 0.5,
    "max_new_tokens": 60,
    "action": "turn",
}
"""Episodes of one to three turns, so that ever fewer rows are divided; some fail as they begin, some at their end."""


def letters(completions, **_):
    """A score that differs between responses."""
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


def per_token(completion_ids, **_):
    """One number per token."""
    return [[i % 7 / 7 for i in ids] for ids in completion_ids]


def now_and_then(completions, **_):
    """It fails on some responses."""
    return [float("nan") if sum(map(ord, text)) % 13 == 5 else len(text) / 10 for text in completions]


def case(train, config, settings, *rewards, **more):
    """A run: a trainer, its settings and reward functions."""
    return train, config, {**settings, **more}, rewards


SFT, REWARD = (heedful.train_sft, heedful.SFTConfig, OFFLINE), (heedful.train_reward, heedful.RewardConfig, OFFLINE)
DPO, KTO = (heedful.train_dpo, heedful.DPOConfig, OFFLINE), (train_kto, KTOConfig, OFFLINE)
PPO = (heedful.train_ppo, heedful.PPOConfig, ONLINE)
GRPO = (heedful.train_grpo, heedful.GRPOConfig, GROUPS)
SAO = {"policy_loss": "sao", "ppo_epochs": 1, "kl_in": "loss", "kl_kind": "k3", "rollouts": "all"}
"""No pass before the update, whose minibatches say the KL of each response."""
CASES = {
    "sft": case(*SFT, model="policy", data="demonstrations.jsonl"),
    "sft-lora": case(*SFT, model="policy", data="demonstrations.jsonl", **LORA, loss_on="all"),
    "reward": case(*REWARD, model="policy", data="rankings.jsonl", offset_data="demonstrations.jsonl"),
    "reward-encoder": case(*REWARD, model="encoder", data="rankings.jsonl", center_coef=0.01),
    "dpo": case(*DPO, model="policy", data="pairs.jsonl", nll_coef=0.1),
    "simpo": case(*DPO, model="policy", data="pairs.jsonl", loss="simpo"),
    "kto": case(*KTO, model="policy", data="labelled.jsonl"),
    "ppo": case(*PPO, letters, **EVERYTHING, value_coef=0.1, entropy_coef=0.01, score_clip=2.0),
    "ppo-separate": case(*PPO, per_token, critic="separate", **LORA, score_norm_samples=8, critic_warmup_steps=1),
    "ppo-reward": case(*PPO, rewards=("model:scorer", "rule:digits"), critic="reward", approx_kl_limit=0.05),
    "critic": case(heedful.train_critic, heedful.CriticConfig, ONLINE, letters, kl_coef=0.0),
    "sao": case(*PPO, letters, critic="separate", value_epochs=2, gae_lambda_alpha=1.5, **SAO),
    "ppo-failed": case(*PPO, now_and_then, rewards=("model:scorer",), max_failed_rewards=0.5, mask_truncated=True),
    "ppo-turns": case(*PPO, **TURNS),
    "a2c": case(
        *PPO[:1],
        heedful.A2CConfig,
        ONLINE | SLOWER,
        letters,
        ppo_epochs=1,
        minibatch_size=16,
        gradient_checkpointing=True,
    ),
    "grpo": case(*GRPO, letters, top_p=0.9, importance="token-truncate", overlong_buffer=4, ppo_epochs=2),
    "grpo-dynamic": case(
        *GRPO, rewards=("rule:digits",), dynamic_sampling_rounds=2, ppo_epochs=1, minibatch_size=16, kl_coef=0.04
    ),
    "rloo": case(
        *GRPO,
        letters,
        advantage="rloo",
        importance_level="sequence",
        kl_in="reward",
        missing_eos_penalty=0.5,
        **SLOWER,
        **SHORTER,
    ),
    "gspo": case(*GRPO, letters, importance_level="sequence-mean", kl_coef=0.0, clip_range=0.02, ema_decay=0.5),
    "online-dpo": case(
        train_online_dpo, OnlineDPOConfig, GROUPS, letters, kl_coef=None, minibatch_size=16, ppo_epochs=1
    ),
    "online-dpo-twice": case(
        train_online_dpo,
        OnlineDPOConfig,
        GROUPS,
        letters,
        kl_coef=None,
        ppo_epochs=2,
        rollout_batch_size=32,
        minibatch_size=16,
    ),
}


def compute_in_float64():
    """What would be in float32 is in float64 from now on."""
    load = PreTrainedModel.from_pretrained.__func__

    def in_float64(kind, *names, dtype=None, **options):
        return load(kind, *names, dtype=torch.float64, **options)

    PreTrainedModel.from_pretrained = classmethod(in_float64)
    heedful.models.load.store_matrices = lambda *_, **__: None
    DTYPES["float32"] = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)


def keep_moments_in_main_memory():
    """Every optimizer is the one whose moments are in main memory."""

    def make(groups, *, betas, eps, fused):
        return CompactAdamW(groups, betas=betas, eps=eps, device=torch.device("cpu"))

    optimization.torch.optim.AdamW = make


def make_inputs(decoder):
    """Models and data, in the current folder. ``decoder`` is the policy's architecture."""
    for name, architecture in (("policy", decoder), ("encoder", "deberta-v2")):
        make_tiny_model(architecture, Path(name), hidden_size=32, num_layers=2, max_length=128, initializer_range=0.2)
        path = Path(name, "config.json")
        dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if architecture == "gpt2" else {}
        path.write_text(json.dumps(json.loads(path.read_text()) | dropout))
    pick = torch.Generator().manual_seed(5)

    def text(most):
        count = int(torch.randint(1, most + 1, (), generator=pick))
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (count,), generator=pick).tolist())

    def write(name, records):
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        Path(f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")

    many = range(40)
    write("demonstrations", [{"prompt": f"{i} {text(4)}", "completion": text(6)} for i in many])
    write("prompts", [{"prompt": f"{i} {text(5)}"} for i in many])
    write("pairs", [{"prompt": f"{i} {text(4)}", "chosen": text(3) + " a", "rejected": text(8) + " b"} for i in many])
    write("labelled", [{"prompt": f"{i} {text(4)}", "completion": text(6), "label": i % 3 > 0} for i in many])
    sizes = [2 + i % 3 for i in many]
    ranked = [{"responses": [f"{text(5)} {j}" for j in range(size)], "ranks": list(range(size))} for size in sizes]
    write("rankings", [{"prompt": f"{i}", **record} for i, record in enumerate(ranked)])
    played = {"environment": "Talk"}, {"environment": "Faulty", "at": "reset"}, {"environment": "Faulty", "at": "nan"}
    games = [played[{5: 1, 9: 2}.get(i % 10, 0)] | {"goal": i % 3 + 1} for i in many]
    write("games", [{"prompt": [{"role": "user", "content": f"{i} 局"}], **game} for i, game in enumerate(games)])
    shutil.copytree("policy", "talker")
    worlds.end_turns_soon("talker")
    settings = OFFLINE | {"max_steps": 2, "sample_every": 0}
    heedful.train_reward(
        heedful.RewardConfig(model="policy", data="pairs.jsonl", output=Path("scorer-run"), **settings)
    )
    Path("scorer-run/final").rename("scorer")


def run(name, output, **changes):
    """Train a case into a folder."""
    train, config, settings, rewards = CASES[name]
    settings = {"dtype": "float32", **settings, **changes}
    config = config(**{key: value for key, value in settings.items() if value is not None}, output=output)
    return train(config, list(rewards)) if rewards else train(config)


def main(inputs, output, *names):
    torch.set_num_threads(1)
    if os.environ.get("DOUBLE"):
        compute_in_float64()
    if os.environ.get("APART"):
        keep_moments_in_main_memory()
    seconds = {}
    os.chdir(inputs)
    for name in names:
        started = time.perf_counter()
        case, _, mutant = name.partition("@")
        with planted(mutant):
            run(case, Path(output) / name, **json.loads(os.environ.get("CHANGES", "{}")))
        seconds[name] = round(time.perf_counter() - started, 2)
    print(json.dumps({"rank": ranks.rank(), "seconds": seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
