"""Answers to lesson 14, and typical wrong ones."""


def answer_1(trained, frozen):
    return (16 * trained + 2 * frozen) / 1e9


def wrong_1(trained, frozen):
    """Without Adam's moments."""
    return (8 * trained + 2 * frozen) / 1e9


def answer_2(shapes, rank):
    return sum(rank * (out + into) for out, into in shapes)


def wrong_2(shapes, rank):
    """As many as the matrices have."""
    return sum(out * into for out, into in shapes)


def answer_3(have, gpu_gb, weights):
    rules = [("checker", "grpo"), ("reward model", "ppo"), ("pairs", "dpo"), ("thumbs", "kto")]
    found = next((algorithm for what, algorithm in rules if what in have), "sft")
    return found + " with lora" * (16 * weights > gpu_gb * 1e9)


def wrong_3(have, gpu_gb, weights):
    """Pairs before everything else."""
    return "dpo" if "pairs" in have else answer_3(have, gpu_gb, weights)
