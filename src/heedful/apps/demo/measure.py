"""Measure the demo: both models answer the held-out prompts; the judge, the reward model and a check of bytes score them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase

from heedful.apps.demo.judge import gold_judge
from heedful.configs.evaluate import AccuracyConfig, KLConfig, ScoresConfig, WinRateConfig
from heedful.configs.online import PPOConfig
from heedful.data import prompt_key, read_prompts, split_by_prompt
from heedful.evaluate.policies import evaluate_kl, evaluate_scores, evaluate_win_rate
from heedful.evaluate.reward_models import evaluate_accuracy
from heedful.models.tokenizer import load_tokenizer

FLAWLESS = 1.0
"""The gold judge's score of a flawless answer."""
SAMPLES_FOR_RARE = 8
"""Answers per prompt for shares near 0: with one answer per prompt, a single broken one shifts the rate by 0.3 points."""
Row = dict[str, Any]


def measure_accuracy(config: PPOConfig, output: Path) -> float:
    """Accuracy of a demo's reward model: the share of held-out pairs, without label noise, in the gold judge's order.

    ``config`` has the settings of the PPO stage, ``output`` is the demo's folder.
    """
    settings = AccuracyConfig(
        reward_model=f"{output}/reward/final",
        data=f"{output}/world/gold_preferences.jsonl",
        eval_fraction=config.eval_fraction,
        device=config.device,
        dtype=config.dtype,
    )
    return float(evaluate_accuracy(settings)["accuracy"])


def measure_policies(config: PPOConfig, output: Path) -> tuple[dict[str, float], list[Row]]:
    """Measure the SFT and the PPO model on every held-out prompt. Returns numbers for the summary, and both models' answers.

    It calls the public evaluation functions; with the same seed all calls get the same responses. ``config`` has the settings
    of the PPO stage, ``output`` is the demo's folder.
    """
    held_out = split_by_prompt(read_prompts(config.data), config.eval_fraction)[1]
    settings: dict[str, Any] = {
        "data": config.data,
        "eval_fraction": config.eval_fraction,
        "max_new_tokens": config.max_new_tokens,
        "num_samples": len(held_out),
        "seed": config.seed,
        "device": config.device,
        "dtype": config.dtype,
    }
    sft, ppo = config.model, f"{output}/ppo/final"
    versus = WinRateConfig(model=ppo, baseline=sft, **settings)
    gold = evaluate_win_rate(versus, rewards=[gold_judge])
    learned = evaluate_win_rate(versus, rewards=config.rewards)
    several = settings | {"samples_per_prompt": SAMPLES_FOR_RARE, "micro_batch_size": config.rollout_micro_batch.rows}
    rare = unreadable(load_tokenizer(sft))
    before, after = (evaluate_scores(ScoresConfig(model=m, **several), rewards=[rare]) for m in (sft, ppo))
    kl = evaluate_kl(KLConfig(model=ppo, reference=sft, **settings))
    asked = zip(held_out, gold["samples"], learned["samples"], strict=True)
    answers = [_answer(p.columns["family"], prompt_key(p.prompt), by_gold, by_model) for p, by_gold, by_model in asked]
    numbers = {
        "prompts": len(held_out),
        "sft.gold": gold["baseline_score_mean"],
        "ppo.gold": gold["score_mean"],
        "sft.flawless_frac": _flawless(answers, "sft"),
        "ppo.flawless_frac": _flawless(answers, "ppo"),
        "ppo.win_rate": gold["win_rate"],
        "sft.reward": learned["baseline_score_mean"],
        "ppo.reward": learned["score_mean"],
        "ppo.reward_win_rate": learned["win_rate"],
        "ppo.kl": kl["kl"],
        "sft.eos_frac": before["eos_frac"],
        "ppo.eos_frac": after["eos_frac"],
        "sft.empty_frac": before["score_mean"],
        "ppo.empty_frac": after["score_mean"],
    }
    return numbers, answers


def _answer(family: str, prompt: str, by_gold: Row, by_model: Row) -> Row:
    """Make one line of answers.jsonl from the scores of the same responses by the gold judge and the reward model."""
    same = ("prompt", "response", "baseline")
    assert [by_gold[name] for name in same] == [by_model[name] for name in same], "the seed no longer fixes responses"
    assert by_gold["prompt"] == prompt
    return {
        "family": family,
        "prompt": prompt,
        "sft_response": by_gold["baseline"],
        "sft_reward": by_model["baseline score"],
        "sft_gold": by_gold["baseline score"],
        "ppo_response": by_gold["response"],
        "ppo_reward": by_model["score"],
        "ppo_gold": by_gold["score"],
    }


def _flawless(answers: Sequence[Row], model: str) -> float:
    return sum(row[f"{model}_gold"] == FLAWLESS for row in answers) / len(answers)


def unreadable(tokenizer: PreTrainedTokenizerBase) -> Callable[..., list[float]]:
    """A reward function for measuring: 1 for a response that is empty, white space or invalid UTF-8, else 0.

    It reads ids of this byte-level tokenizer, without the stop token. Any other special token is invalid.
    """
    spelling = bytes_of_tokens(tokenizer)

    def is_unreadable(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [float(not is_readable(ids, spelling)) for ids in completion_ids]

    return is_unreadable


def is_readable(ids: Sequence[int], spelling: Mapping[int, bytes]) -> bool:
    """Return whether tokens spell text: valid UTF-8 that is more than white space. ``spelling`` has the bytes of each."""
    if any(token not in spelling for token in ids):
        return False
    try:
        return bool(b"".join(spelling[token] for token in ids).decode("utf-8").strip())
    except UnicodeDecodeError:
        return False


def bytes_of_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """The bytes of each token of a byte-level tokenizer. Special tokens have none.

    The byte-level alphabet writes printable bytes of Latin-1 as themselves, and the others, in order, from U+0100 on.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    themselves = [ord(letter) for letter in alphabet if ord(letter) < 256]
    others = [byte for byte in range(256) if byte not in themselves]
    byte_of = dict(zip(alphabet, themselves + others, strict=True))
    special = tokenizer.added_tokens_decoder
    return {
        token: bytes(byte_of[letter] for letter in letters)
        for letters, token in tokenizer.get_vocab().items()
        if token not in special
    }
