"""What the passes of an update gave: metrics, the KL of each response, and numbers of each token."""

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from heedful import core
from heedful.algorithms.online.experience import Counts, Experience, TokenNumbers
from heedful.algorithms.online.learner import Learner
from heedful.algorithms.online.metrics import pass_metrics, with_effective_frac
from heedful.configs.online import RolloutConfig
from heedful.core.policy_losses import Metrics
from heedful.data.batches import Attempt
from heedful.distributed import ranks
from heedful.models.policy import TokenOutputs
from heedful.training.metric_sums import MetricSums
from heedful.training.performance import online_performance
from heedful.types import MicroBatch


class Learned(NamedTuple):
    """Result of an update."""

    metrics: dict[str, float]
    kl: Tensor
    """KL to the reference per response, ``[batch]``."""
    token_numbers: dict[str, TokenNumbers]
    """What the update's own passes gave, by the columns of ``rollouts/``; nothing if these are not kept."""


class Recorder:
    """Records the passes of an update, one minibatch after the other.

    Args:
        learner: the learner.
        kl: KL to the reference per response, ``[batch]``.
    """

    def __init__(self, learner: Learner[RolloutConfig], kl: Tensor) -> None:
        self.started, self._device = time.perf_counter(), learner.policy.device
        self.kl = kl.clone()
        """KL per response; `set_kl` fills in rows that only the update's own pass computes."""
        self.sums = MetricSums()
        self.sums_before: Metrics = {}
        """The sums without the minibatch."""
        self.minibatches = 0
        """Number of minibatches in the sums."""
        self.approx_kl: float | Tensor = 0.0
        """Sum over the minibatch's micro-batches so far, on this rank."""
        self._rows_with_kl: list[Tensor] = []
        self._keeps_numbers = learner.config.rollouts == "all"
        self._numbers: list[tuple[int, str, TokenNumbers]] = []
        """Numbers of passes by minibatch and column."""
        self._log_ratios: list[tuple[int, str, TokenNumbers]] = []
        """Those of the minibatch."""

    def begin_minibatch(self) -> None:
        """Keep the sums as they are."""
        self.sums_before = dict(self.sums.totals)
        self.minibatches += 1

    @contextlib.contextmanager
    def attempt(self, attempt: Attempt) -> Iterator[MicroBatch]:
        """Record an attempt at the minibatch's gradients from the beginning, and sum over the ranks at its end."""
        self.sums.reset(self.sums_before)
        self.approx_kl, self._rows_with_kl, self._log_ratios = 0.0, [], []
        with attempt as limit:
            yield limit
            self.sums.add_ranks()

    def end_minibatch(self, *, is_skipped: bool) -> None:
        """Keep the log-ratios of a minibatch whose step was taken. A skipped one's are dropped, and it is in no mean."""
        if is_skipped:
            self.minibatches -= 1
        else:
            self._numbers += self._log_ratios

    def add(self, metrics: Metrics) -> None:
        """Add the metrics of a micro-batch."""
        self.sums.add(metrics)
        self.approx_kl = self.approx_kl + metrics.get("policy/approx_kl", 0.0)

    def add_first_pass(self, new: TokenOutputs, part: Experience, counts: Counts) -> None:
        """Add the metrics and the KL of a micro-batch's pass, if the policy has not changed since sampling."""
        kl = None
        if part.ref_logprobs is not None:
            kl = core.response_kl(new.logprobs.detach(), part.ref_logprobs, part.mask)
            self.set_kl(part.rows, kl)
        self.record_first_pass(part.rows, new)
        seen = part.sampler_logprobs
        self.add(pass_metrics(new, seen, kl, part.mask, num_tokens=counts.tokens, num_responses=counts.responses))

    def record_first_pass(self, rows: Tensor, new: TokenOutputs) -> None:
        """Keep log-probs and entropy of the policy that sampled, if the settings ask for them."""
        if self._keeps_numbers:
            for name, numbers in {"old_logprobs": new.logprobs, "entropy": new.entropy}.items():
                self._numbers.append((self.minibatches, name, TokenNumbers(rows.cpu(), numbers.detach().cpu())))

    def record_log_ratio(self, rows: Tensor, logprobs: Tensor, old_logprobs: Tensor) -> None:
        """Keep the log-ratio of each token, if the settings ask for it."""
        if self._keeps_numbers:
            numbers = TokenNumbers(rows.cpu(), (logprobs.detach() - old_logprobs).cpu())
            self._log_ratios.append((self.minibatches, "log_ratio", numbers))

    def set_kl(self, rows: Tensor, kl: Tensor) -> None:
        """Fill in the KL of some responses."""
        self.kl[rows] = kl.to(self.kl.dtype)  # of a policy in float64 that another engine samples for
        self._rows_with_kl.append(rows)

    def share_kl(self, among: Tensor | None = None) -> None:
        """Share KL values among ranks: of all rows, or of the rows ``among``."""
        ranks.raise_peer_errors()
        ranks.all_gather_into(self.kl, self._rows_with_kl, among)

    def means(self) -> dict[str, float]:
        """Means of the metrics over the minibatches."""
        return self.sums.means(max(1, self.minibatches))

    def end(self, metrics: dict[str, float], learned_tokens: Tensor, sampled_tokens: int) -> Learned:
        """The step's metrics with its seconds and speed, the KL per response, and the numbers per token."""
        metrics = with_effective_frac(metrics) | {"time/update": time.perf_counter() - self.started}
        speed = online_performance(metrics, float(learned_tokens), self._device, sampled_tokens=sampled_tokens)
        return Learned(metrics | speed, self.kl, self._token_numbers())

    def _token_numbers(self) -> dict[str, TokenNumbers]:
        """Numbers of all ranks by column; of several passes over the same response the last."""
        if not self._keeps_numbers:
            return {}
        parts = sorted((part for of_rank in ranks.gather(self._numbers) for part in of_rank), key=lambda part: part[0])
        found: dict[str, TokenNumbers] = {}
        for name in dict.fromkeys(name for _, name, _ in parts):
            rows = torch.cat([numbers.rows for _, other, numbers in parts if other == name])
            numbers = torch.cat([numbers.numbers for _, other, numbers in parts if other == name])
            last = {row: place for place, row in enumerate(rows.tolist())}
            found[name] = TokenNumbers(torch.tensor(list(last)), numbers[list(last.values())])
        return found
