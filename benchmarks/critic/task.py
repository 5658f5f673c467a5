"""The task of the experiments with critics: a running sum modulo 10 with its working, and a model that gets it right in .3.

python benchmarks/critic/task.py --output runs/critic/sft

A prompt is a letter for the length, n digits and "=": ``a314...=``. The answer is the n running sums, ``348...``, and an end
token. From the first error on they are written in letters, A for 0 to J for 9: ``34JA``. The reward is 1 if the answer has n
sums, all of them right. So the reward says nothing of where an error was, but the text does, as an error message does.

The demonstrations have errors: each step is wrong with probability eps_n (one of the nine other digits, equally likely), and
the sum goes on from the wrong digit. All of n steps are right with probability

    (1 - eps)^n = 3/10  if  eps_n = 1 - (3/10)^(1/n)        .0584 at 20, .0238 at 50, .0120 at 100, .0030 at 400

A model that has learned this samples right answers with probability .3 at every length, if it makes no errors of its own. It
is trained until it does so in .25 to .35 at each, and never on the reward.
"""

import argparse
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import heedful
from heedful.core import share_interval

LETTERS = {20: "a", 50: "b", 100: "c", 400: "d"}
"""The first token of a prompt, by its number of digits. 50 is for choosing learning rates, and in no experiment."""
PAD, END = "<pad>", "<end>"
DIGITS, WRONG = "0123456789", "ABCDEFGHIJ"
"""How sums are written, and how from the first error on."""
VOCABULARY = [PAD, END, "=", *LETTERS.values(), *DIGITS, *WRONG]
START = 0.3
"""How often the policy is right before it learns from rewards."""


def error_rate(n: int) -> float:
    """eps_n: how often a step of a demonstration is wrong, so that `START` of the answers are right."""
    return float(1 - START ** (1 / n))


def prompt_of(n: int, draw: random.Random) -> str:
    return LETTERS[n] + "".join(draw.choices(DIGITS, k=n)) + "="


def prompts(n: int, count: int, seed: int) -> list[dict[str, str]]:
    """Records of ``count`` different prompts with n digits."""
    draw, found = random.Random(f"prompts {n} {seed}"), dict[str, None]()
    while len(found) < count:
        found[prompt_of(n, draw)] = None
    return [{"prompt": prompt} for prompt in found]


def demonstrations(n: int, count: int, seed: int) -> Iterator[dict[str, str]]:
    """Records with answers whose steps are wrong with probability `error_rate`."""
    draw, eps = random.Random(f"demonstrations {n} {seed}"), error_rate(n)
    for _ in range(count):
        prompt, total, said, signs = prompt_of(n, draw), 0, "", DIGITS
        for digit in prompt[1:-1]:
            error = draw.randint(1, 9) if draw.random() < eps else 0
            total, signs = (total + int(digit) + error) % 10, WRONG if error else signs
            said += signs[total]
        yield {"prompt": prompt, "completion": said}


def right(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """1 if the answer has as many sums as the prompt digits, and all of them are right."""
    return [
        float(len(said) == len(prompt) - 2 and on_track(prompt, said)[-1])
        for prompt, said in zip(prompts, completions, strict=True)
    ]


def on_track(prompt: str, said: str) -> list[bool]:
    """Whether all sums so far are right, after each of an answer; for the values that a perfect critic would give."""
    true, found, is_right = 0, [], True
    for digit, step in zip(prompt[1:-1], said, strict=False):
        true = (true + int(digit)) % 10
        is_right = is_right and step == str(true)
        found.append(is_right)
    return found


def copies(n: int, count: int, seed: int) -> Iterator[dict[str, str]]:
    """Records whose answers are their digits, from some place on in letters: for a model that first learns where to look, and
    what the letters are."""
    draw = random.Random(f"copies {n} {seed}")
    for record in prompts(n, count, seed):
        digits, place = record["prompt"][1:-1], draw.randint(0, n)
        yield record | {"completion": digits[:place] + "".join(WRONG[int(digit)] for digit in digits[place:])}


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each character of `VOCABULARY`."""
    inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=PAD, eos_token=END, unk_token=PAD)


def make_model(folder: Path, *, seed: int = 0) -> None:
    """A random Qwen2 of 0.3M weights with the task's tokenizer."""
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=192,
        max_position_embeddings=1024,
        initializer_range=0.1,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


# SFT -------------------------------------------------------------------------------------------------------------------

STAGES: dict[str, dict[str, Any]] = {
    "copy-20": {"records": copies, "lengths": [20], "max_steps": 40, "batch_size": 64},
    "copy": {"records": copies, "lengths": [*LETTERS], "max_steps": 120, "batch_size": 16},
    "sum-20": {"records": demonstrations, "lengths": [20], "max_steps": 120, "batch_size": 64},
    "sum": {
        "records": demonstrations,
        "lengths": [*LETTERS],
        "max_steps": 1500,
        "batch_size": 16,
        "lr_schedule": "linear",
    },
}
"""Who has not found the digit can guess nothing of the sum, so the model learns to copy first: short answers, then all."""
WANTED = (0.25, 0.35)


def train(model: Path, name: str, seed: int, *, records: Any, lengths: Sequence[int], **settings: Any) -> Path:
    """A stage of SFT; returns the folder of its model."""
    count = settings["max_steps"] * settings["batch_size"] // len(lengths) + 1
    config = heedful.SFTConfig(
        model=str(model),
        output=model.parents[1] / name,
        seed=seed,
        device="cpu",
        dtype="float32",
        micro_batch_size=settings["batch_size"],
        micro_batch_tokens=2048,
        warmup_steps=10,
        adam_beta2=0.98,
        eval_fraction=0,
        eval_every=0,
        sample_every=0,
        **{"learning_rate": 3e-3, "lr_schedule": "constant"} | settings,
    )
    if not (config.folder / "final").exists():
        heedful.train_sft(config, data=[record for n in lengths for record in records(n, count, seed)])
    return config.folder / "final"


def measure(model: Path, count: int, seed: int) -> dict[int, dict[str, Any]]:
    """The share of right answers to ``count`` prompts of each length, with its interval, and of answers as long as asked."""
    policy, found = heedful.Policy.from_pretrained(str(model), device="cpu", dtype="float32"), {}
    for n in LETTERS:
        engine = heedful.LocalEngine(policy, max_new_tokens=n + 1, seed=seed)
        batch = engine.generate([record["prompt"] for record in prompts(n, count, seed)])
        marks = heedful.score([right], batch)
        found[n] = {
            "right": marks.mean().item(),
            "interval": share_interval([[mark] for mark in marks.tolist()]),
            "length": sum(len(text) == n for text in batch.texts) / count,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/critic/sft"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1024, help="answers of each length by which the model is measured")
    options = parser.parse_args()
    model = options.output / "base" / "final"
    if not model.exists():
        make_model(model, seed=options.seed)
    for name, stage in STAGES.items():
        model = train(model, name, options.seed, **stage)
    for again in range(1, 11):
        measured = measure(model, options.count, 4000 + again)
        print(json.dumps(measured), flush=True)
        if all(WANTED[0] <= one["right"] <= WANTED[1] for one in measured.values()):
            break
        more = STAGES["sum"] | {"max_steps": 100, "learning_rate": 1e-3}
        model = train(model, f"sum-{again}", options.seed + again, **more)
    shutil.copytree(model, options.output / "final", dirs_exist_ok=True)


if __name__ == "__main__":
    main()
