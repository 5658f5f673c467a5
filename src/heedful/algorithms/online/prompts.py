"""Iterator over the prompts of a run, a rollout batch at a time."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from heedful.configs.online import RolloutConfig
from heedful.configs.settings import flag
from heedful.data.loading import EncodedPrompt
from heedful.data.splits import BatchOrder
from heedful.display import counted
from heedful.errors import ConfigError


class Prompts(Iterator[list[EncodedPrompt]]):
    """Prompts of each rollout batch, in an endless shuffled order, each repeated ``samples_per_prompt`` times."""

    def __init__(self, prompts: Sequence[EncodedPrompt], order: BatchOrder, samples_per_prompt: int) -> None:
        self.prompts, self.order, self.samples_per_prompt = prompts, order, samples_per_prompt

    def __next__(self) -> list[EncodedPrompt]:
        return self._repeated(next(self.order))

    def take(self, count: int) -> list[EncodedPrompt]:
        """The next ``count`` prompts, each repeated ``samples_per_prompt`` times."""
        return self._repeated(self.order.take(count))

    def ahead(self, batches: int) -> list[EncodedPrompt]:
        """The prompts of a later batch (1 is the next), without advancing the order."""
        looked_at = Prompts(self.prompts, copy.copy(self.order), self.samples_per_prompt)
        return [next(looked_at) for _ in range(batches)][-1]

    def _repeated(self, rows: Sequence[int]) -> list[EncodedPrompt]:
        return [self.prompts[row] for row in rows for _ in range(self.samples_per_prompt)]


def check_sizes(config: RolloutConfig, prompts: int, held_out: int, ptx_records: int | None) -> None:
    """Check the sizes of a step against those of the data.

    Args:
        config: the settings.
        prompts: number of prompts to train on.
        held_out: number of prompts that are split off for evaluation.
        ptx_records: number of records of ``ptx_data``; None without it.

    Raises ConfigError with all of them, and settings that fit.
    """
    responses, each, minibatch = config.rollout_batch_size, config.samples_per_prompt, config.minibatch_size
    wrong = []
    if prompts < responses // each:
        besides = f", besides {held_out} held out (--eval-fraction {config.eval_fraction:g})" if held_out else ""
        wrong.append(
            f"a step has {counted(responses, 'response')} (--rollout-batch-size), {each} per prompt (--samples-per-prompt), "
            f"so it needs {counted(responses // each, 'prompt')}; there {'is' if prompts == 1 else 'are'} "
            f"{counted(prompts, 'prompt')} to train on{besides}"
        )
    if ptx_records is not None and ptx_records < minibatch:
        wrong.append(
            f"an optimizer step learns {counted(minibatch, 'record')} of --ptx-data (--minibatch-size), which has "
            f"{counted(ptx_records, 'record')}"
        )
    if not wrong:
        return
    updates = min(responses // minibatch, prompts)
    rows = min(each * (prompts // updates), minibatch if ptx_records is None else ptx_records)
    rows -= rows % (each * (8 if rows >= 16 * each else 1))
    ways = [{"rollout_batch_size": updates * rows, "minibatch_size": rows}]
    if ptx_records is None:
        more = (count for count in range(each + 1, responses + 1) if responses % count == 0)
        ways += [{"samples_per_prompt": count} for count in more if responses // count <= prompts]
    fitting = [way for way in ways if _is_allowed(config, way)][:2]
    settings = (" ".join(f"{flag(name)} {size}" for name, size in way.items()) for way in fitting)
    needed = "more prompts" if ptx_records is None else "more data"
    raise ConfigError(f"{'; '.join(wrong)}. Set {', or '.join([*settings, f'give {needed}'])}")


def _is_allowed(config: RolloutConfig, sizes: dict[str, Any]) -> bool:
    try:
        replace(config, **sizes)
    except ConfigError:
        return False
    return True
