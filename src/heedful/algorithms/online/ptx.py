"""PPO-ptx: an SFT loss on demonstrations or plain text, added to the RL loss."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from heedful import core
from heedful.configs.online import RolloutConfig
from heedful.data.batches import collate_padding_behind
from heedful.data.chat import Renderer
from heedful.data.fitting import Counts, Refusal, added, check_dropped, settle
from heedful.data.loading import Example, encode_demonstrations, read_usable
from heedful.data.schemas import read_demonstrations
from heedful.data.splits import BatchOrder
from heedful.distributed.sharding import lockstep_forwards
from heedful.engines.teacher_forced import micro_batches
from heedful.errors import DataError
from heedful.models.policy import Policy
from heedful.models.shape import context_length
from heedful.models.source import Source, load_config
from heedful.training.metric_sums import MetricSums
from heedful.types import MicroBatch


@dataclass(frozen=True)
class PretrainingMix:
    """Records whose SFT loss is added to each minibatch."""

    examples: Sequence[Example]
    order: BatchOrder
    pad_id: int
    coef: float
    counts: Counts
    """Counts of the file's records: kept, dropped, cut."""

    def accumulate(self, policy: Policy, sums: MetricSums, micro_batch: MicroBatch) -> list[str]:
        """Accumulate gradients of ``coef * L_sft`` on the next records, one per response of a minibatch. Returns their
        sources.

            L_sft = -1/N sum_t log pi(token_t)          over the N learned tokens of these records, at temperature 1

        Ouyang et al. 2022, equation 2, add gamma times the expected log-likelihood of a pretraining text, with gamma =
        27.8 and eight texts per episode; the paper does not specify the average over tokens. Here a token has ``coef``
        times the weight of a token in the policy loss, so their gamma does not carry over.
        """
        chosen = [self.examples[row] for row in next(self.order)]
        batch = collate_padding_behind([e.prompt for e in chosen], [e.response for e in chosen], pad_id=self.pad_id)
        num_tokens = int(batch.response_mask.sum())
        step = lockstep_forwards((policy, lambda: policy.dummy_loss(with_values=False)))
        for _, part in micro_batches(batch.to(policy.device), micro_batch, step):
            logprobs = policy(part.ids, part.attention_mask, part.response_mask, with_values=False).logprobs
            loss, _ = core.sft_loss(logprobs, part.response_mask, num_tokens=num_tokens)
            (self.coef * loss).backward()
            sums.add({"loss/ptx": loss.detach()})
        return [example.source for example in chosen]


def encode_mix(config: RolloutConfig, source: Source, renderer: Renderer) -> tuple[list[Example], Counts] | None:
    """The records of ``ptx_data``, up to the model's context, and their counts; None without ``ptx_data``.

    Read like other records, except that ``columns`` applies only to the prompts. Raises DataError, ConfigError.
    """
    if config.ptx_data is None:
        return None
    records, unusable = read_usable(read_demonstrations, config.ptx_data, replace(config, columns=""))
    limit = context_length(load_config(source))
    refused: list[Refusal] = []
    examples, done = encode_demonstrations(records, renderer, max_length=limit, action=config.too_long, refused=refused)
    done = added(unusable, settle(refused, len(records) - len(refused), config), done)
    counts = {"records": len(records) + unusable["dropped_unusable"]} | {n: count for n, count in done.items() if count}
    check_dropped(counts, max_dropped=config.max_dropped, path=config.ptx_data)
    if not examples:
        raise DataError(f"{config.ptx_data}: every record was dropped: {counts}")
    return examples, counts


def mix_of(mix: tuple[list[Example], Counts], config: RolloutConfig, renderer: Renderer) -> PretrainingMix:
    """The records of `encode_mix`, as many a step as a minibatch has responses."""
    examples, counts = mix
    return PretrainingMix(
        examples=examples,
        order=BatchOrder(len(examples), config.minibatch_size, config.seed, shuffle=config.shuffle),
        pad_id=renderer.pad_id,
        coef=config.ptx_coef,
        counts=counts,
    )
