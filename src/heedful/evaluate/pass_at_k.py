"""pass@k: how often at least one of k responses to a prompt is correct."""

from collections.abc import Sequence
from typing import Any

from heedful import core
from heedful.configs.evaluate import PassAtKConfig
from heedful.core.intervals import share_interval
from heedful.data.chat import plain_text
from heedful.evaluate.answering import answer, counted, prompts_of, reward_functions, shape_of, shown_rows
from heedful.evaluate.failures import without_failed
from heedful.evaluate.intervals import by_prompt
from heedful.evaluate.reward_models import left_out
from heedful.rewards import Reward, RewardFunction, score_tokens


def evaluate_pass_at_k(config: PassAtKConfig, rewards: Sequence[str | Reward | RewardFunction] = ()) -> dict[str, Any]:
    """Measure pass@k for each k of ``config``, with its 95 % interval over prompts, and the share of correct responses.

    Every k is estimated without bias from the ``samples_per_prompt`` responses to a prompt (`heedful.core.pass_at_k`). A
    prompt is left out and counted if a reward failed on one of its responses.

    Args:
        config: the settings of the measurement.
        rewards: rewards besides those of ``config``, summed with them; a response is correct from ``correct_from`` on.

    Raises ConfigError, DataError, CheckpointError and RewardError.
    """
    functions = reward_functions(config, rewards)
    prompts, counts = prompts_of(config, [config.model], functions)
    answered = answer(config, config.model, prompts)
    given, n = score_tokens(functions, answered.completions), config.samples_per_prompt
    measured, failed = without_failed([given], len(prompts), each=n)
    kept = [prompt * n + i for prompt in measured for i in range(n)]
    correct = [sum(given.totals[prompt * n + i] >= config.correct_from for i in range(n)) for prompt in measured]
    found: dict[str, Any] = {}
    for k in config.k:
        passed = [core.pass_at_k(n, right, k) for right in correct]
        found[f"pass_at_{k}"] = sum(passed) / len(passed)
        found[f"interval_95_at_{k}"] = share_interval(by_prompt(passed, [prompts[i] for i in measured]))
    return {
        **found,
        "correct_frac": sum(correct) / len(kept),
        **shape_of(answered.select(kept)),
        **counted(prompts, answered.completions),
        **failed,
        **left_out(counts),
        "samples": [
            {
                "prompt": plain_text(prompts[row // n].prompt),
                "response": answered.completions[row].response,
                "score": given.totals[row],
                f"correct of {n}": correct[measured.index(row // n)],
            }
            for row in shown_rows(prompts, config)
            if row // n in measured
        ],
    }
