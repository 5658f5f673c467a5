"""PPO on a policy of 0.6 billion parameters and a vocabulary of 151,936, with an encoder as reward model, on a CPU.

python benchmarks/large_vocabulary.py --output runs/large --make && python benchmarks/large_vocabulary.py --output runs/large

Both models have the shapes of Qwen3-0.6B and DeBERTa-v3-base and random weights, so nothing is downloaded and nothing is
learned. Three iterations: two prompts, 50 new tokens, two PPO epochs, minibatches of one response, all parameters. Prints the
peak memory of the whole process and the seconds of each part of an iteration.
"""

import argparse
import json
import resource
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DebertaV2Config,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from heedful import PPOConfig, train_ppo
from heedful.models.tiny import CHAT_TEMPLATE, PAD, SPECIALS, TURN_END, byte_tokenizer

VOCABULARY = 151_936
PROMPTS = ("Please tell me how to learn machine learning.", "请告诉我怎样学习机器学习。")


def policy_config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=40_960,
    )


def reward_config(tokenizer: PreTrainedTokenizerFast) -> DebertaV2Config:
    return DebertaV2Config(
        vocab_size=128_100,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=512,
        relative_attention=True,
        position_buckets=256,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        type_vocab_size=0,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )


def large_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and made-up words until the vocabulary is full, so that whatever is sampled can be read."""
    alphabet = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = [f"Ġw{i}" for i in range(VOCABULARY - len(alphabet))]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*alphabet, *words])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=TURN_END)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_inputs(folder: Path) -> None:
    """Both models, with random weights, and the file of prompts."""
    torch.manual_seed(0)
    policy, tokenizer = AutoModelForCausalLM.from_config(policy_config()), large_tokenizer()
    policy.generation_config.eos_token_id = tokenizer.eos_token_id
    policy.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    encoder = byte_tokenizer(encoder=True)
    AutoModelForSequenceClassification.from_config(reward_config(encoder)).save_pretrained(folder / "reward")
    encoder.save_pretrained(folder / "reward")
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "prompts.jsonl").write_text(lines, encoding="utf-8")


def run(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Three iterations; seconds of each and the most memory held."""
    settings = {
        "model": f"{folder}/policy",
        "rewards": (f"model:{folder}/reward",),
        "data": f"{folder}/prompts.jsonl",
        "output": folder / "run",
        "overwrite": True,
        "steps": 3,
        "rollout_batch_size": 2,
        "minibatch_size": 1,
        "micro_batch_size": 1,
        "rollout_micro_batch_size": 2,
        "ppo_epochs": 2,
        "max_new_tokens": 50,
        "eval_fraction": 0.0,
        "eval_every": 0,
        "sample_every": 0,
        "device": "cpu",
    }
    train_ppo(PPOConfig(**settings | changes))
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [step for step in map(json.loads, lines) if "time/update" in step]
    return {
        "peak memory, GB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
        "seconds a PPO epoch": [round(step["time/update"] / 2, 2) for step in steps],
        "seconds of sampling": [round(step["time/rollout"], 2) for step in steps],
        "seconds of scoring": [round(step["time/score"], 2) for step in steps],
        "response tokens": [step["rollout/response_length"] for step in steps],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for models and run, about 8 GB")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument(
        "--make", action="store_true", help="make the models and stop, so that a second call is measured"
    )
    options = parser.parse_args()
    if options.make:
        shutil.rmtree(options.output, ignore_errors=True)
        make_inputs(options.output)
        return
    changes = {"dtype": options.dtype, "gradient_checkpointing": options.gradient_checkpointing}
    print(json.dumps(run(options.output, changes), indent=2))


if __name__ == "__main__":
    main()
