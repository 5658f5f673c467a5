"""TRL 0.11's `PPOTrainer`: the script's own loop calls `generate` and `step`, and the numbers are TRL's.

One `step` is, from top to bottom: passes of policy and reference, rewards, advantages, ``ppo_epochs`` over shuffled
minibatches, stats. Its processes, gradient accumulation, mixed precision and trackers are accelerate's, as in TRL.
"""

import contextlib
import copy
import gc
import inspect
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration, gather_object
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from heedful import core
from heedful.compat.trl.config import PPOConfig
from heedful.compat.trl.core import set_seed
from heedful.compat.trl.formulas import (
    RunningMoments,
    advantages_and_returns,
    kl_penalty,
    masked_var,
    scaled_rewards,
    token_rewards,
)
from heedful.compat.trl.model import AutoModelForCausalLMWithValueHead, create_reference_model, upload
from heedful.errors import ConfigError, RewardError
from heedful.models.heads import checkpoint_layers, disable_dropout

__all__ = ["KLController", "PPOTrainer"]

Tensors = Sequence[Tensor]


class KLController:
    """The KL coefficient ``value``: `heedful.core.AdaptiveKL` with ``adap_kl_ctrl``, otherwise fixed."""

    def __init__(self, config: PPOConfig) -> None:
        adaptive = config.adap_kl_ctrl
        self._rule: core.AdaptiveKL | core.FixedKL = (
            core.AdaptiveKL(config.init_kl_coef, config.target, config.horizon)
            if adaptive
            else core.FixedKL(config.init_kl_coef)
        )

    @property
    def value(self) -> float:
        """The coefficient, in score units per nat."""
        return self._rule.coef

    @value.setter
    def value(self, coef: float) -> None:
        self._rule.coef = coef

    def update(self, current: float, n_steps: int) -> None:
        """Adapt to the mean KL ``current`` of ``n_steps`` responses, in nats per response."""
        self._rule.update(float(current), n_steps)


class Rollout(NamedTuple):
    """What the passes before the update give of a batch: tensors of B rows."""

    old_logprobs: Tensor
    old_values: Tensor
    mask: Tensor
    advantages: Tensor
    returns: Tensor


class PPOTrainer:
    """PPO with the interface and the numbers of TRL 0.11.4.

    Args:
        config: the settings.
        model: the policy with its value head.
        ref_model: the reference of the KL penalty. None: the policy without its adapter, or a frozen copy of the policy if it
            has none.
        tokenizer: it needs a pad token; its padding side is that of the passes of `step`.
        dataset: of ``datasets`` or torch; gives ``dataloader``, in batches of ``batch_size``, shuffled. None: no dataloader.
        optimizer: of the policy's and the value head's weights; None is Adam at ``learning_rate``.
        data_collator: of ``dataloader``.
        num_shared_layers: of the copy that is made if ``ref_model`` is None; see `create_reference_model`.
        lr_scheduler: of ``optimizer``; it steps once per `step`.
        training_data_collator: pads the rows of `step`; None pads with the tokenizer.

    Attributes: ``config``, ``model``, ``ref_model`` (None if the reference is the policy without its adapter),
    ``tokenizer``, ``optimizer``, ``lr_scheduler``, ``dataset``, ``dataloader``, ``kl_ctl``, ``accelerator`` (of accelerate),
    ``current_device``, ``is_distributed``, ``is_peft_model``.

    Raises ConfigError for what is not supported: encoder-decoders, and DeepSpeed, FSDP or Megatron launches.
    """

    def __init__(  # noqa: PLR0917  TRL's order
        self,
        config: PPOConfig,
        model: AutoModelForCausalLMWithValueHead,
        ref_model: AutoModelForCausalLMWithValueHead | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dataset: "datasets.Dataset | torch.utils.data.Dataset | None" = None,
        optimizer: torch.optim.Optimizer | None = None,
        data_collator: Callable[[list], Any] | None = None,
        num_shared_layers: int | None = None,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        training_data_collator: Callable[[list], Any] | None = None,
    ) -> None:
        _check_arguments(config, model, ref_model, tokenizer, dataset)
        set_seed(config.seed)
        self.config, self.dataset = config, dataset
        self.tokenizer: Any = tokenizer
        self.accelerator = Accelerator(
            log_with=config.log_with,
            project_config=ProjectConfiguration(**config.project_kwargs),
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=config.gradient_accumulation_steps, sync_with_dataloader=False
            ),
            **config.accelerator_kwargs,
        )
        _check_launch(self.accelerator)
        self.is_peft_model, self.is_encoder_decoder = model.is_peft_model, False
        processes = self.accelerator.num_processes
        config.world_size, config.is_peft_model, config.is_encoder_decoder = processes, model.is_peft_model, False
        config.global_backward_batch_size = config.backward_batch_size * processes
        config.global_batch_size = config.batch_size * processes
        if config.log_with is not None:
            settings = config.to_dict()
            self.accelerator.init_trackers(
                config.tracker_project_name,
                config=settings if config.log_with == "tensorboard" else {"trl_ppo_trainer_config": settings},
                init_kwargs=config.tracker_kwargs,
            )
        if ref_model is None and not model.is_peft_model:
            ref_model = create_reference_model(model, num_shared_layers)
        elif num_shared_layers is not None:
            warnings.warn("num_shared_layers has no effect: the trainer makes no copy of the policy", stacklevel=2)
        if config.gradient_checkpointing:
            disable_dropout(model)  # checkpointing works in training mode only
            checkpoint_layers(
                model.pretrained_model.get_base_model() if model.is_peft_model else model.pretrained_model
            )
        self._trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = optimizer or torch.optim.Adam(self._trained, lr=config.learning_rate)
        self.data_collator = training_data_collator or DataCollatorForLanguageModeling(tokenizer, mlm=False)
        prepare = self.accelerator.prepare
        self.model, self.optimizer, self.lr_scheduler = prepare(model, optimizer, lr_scheduler)
        if ref_model is not None:  # no DistributedDataParallel around what has no gradients
            ref_model = self.accelerator.prepare_model(ref_model, evaluation_mode=True)
        self.ref_model = ref_model
        self.dataloader = None if dataset is None else self.prepare_dataloader(dataset, data_collator)
        self.kl_ctl, self.running = KLController(config), RunningMoments()
        self.current_device, self.is_distributed = self.accelerator.device, processes > 1
        self.current_step = 0

    def prepare_dataloader(self, dataset: Any, data_collator: Callable[[list], Any] | None = None) -> DataLoader:
        """Batches of ``batch_size``, shuffled, without the last incomplete one; each process has its own part.

        A ``datasets.Dataset`` keeps only columns that the model's ``forward`` takes, and label, query and response, unless
        ``remove_unused_columns`` is False. Raises ConfigError if there is not a single batch.
        """
        if isinstance(dataset, datasets.Dataset) and self.config.remove_unused_columns:
            used = {*inspect.signature(self._policy.forward).parameters, "label", "query", "response"}
            unused = [name for name in dataset.column_names if name not in used]
            if len(unused) == len(dataset.column_names):
                raise ConfigError(
                    f"PPOTrainer: remove_unused_columns drops all columns of the dataset: {', '.join(unused)}; it keeps "
                    f"{', '.join(sorted(used))}. Rename one, or set remove_unused_columns=False"
                )
            dataset = dataset.remove_columns(unused)
        if len(dataset) < self.config.batch_size * self.accelerator.num_processes:
            raise ConfigError(
                f"PPOTrainer: dataset has {len(dataset)} rows, fewer than a batch: batch_size is {self.config.batch_size} in "
                f"each of {self.accelerator.num_processes} processes; use a smaller batch_size or more data"
            )
        loader = DataLoader(
            dataset, batch_size=self.config.batch_size, collate_fn=data_collator, shuffle=True, drop_last=True
        )
        return self.accelerator.prepare(loader)

    @property
    def _policy(self) -> AutoModelForCausalLMWithValueHead:
        """The model without what accelerate wraps around it."""
        return self.accelerator.unwrap_model(self.model)

    @contextlib.contextmanager
    def _reference(self) -> Iterator[Any]:
        """The reference, for passes: the policy without its adapter if there is no other."""
        if self.ref_model is not None:
            yield self.ref_model
        else:
            with self._policy.pretrained_model.disable_adapter():
                yield self.model

    def generate(
        self,
        query_tensor: Tensor | list[Tensor],
        length_sampler: Callable[[], int] | None = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs: Any,
    ) -> Any:
        """Sample a response to each query, by ``generate`` of transformers, without dropout.

        Args:
            query_tensor: token ids of one query ``[time]``, or a list of them.
            length_sampler: gives ``max_new_tokens``, for each batch anew.
            batch_size: queries of a list that are sampled together, padded on the left.
            return_prompt: whether the query is in front of its response.
            generate_ref_response: sample the reference's responses as well.
            generation_kwargs: of transformers, such as ``do_sample``, ``top_k``, ``top_p``, ``max_new_tokens``.

        Returns for a list a list of tensors ``[time]``, each up to its first end-of-text token; for one query
        ``[1, time]``. With ``generate_ref_response`` a pair of these, the reference's second.
        """

        def settings() -> dict[str, Any]:
            length = {} if length_sampler is None else {"max_new_tokens": length_sampler()}
            return {**generation_kwargs, **length}

        def sample(model: Any) -> Any:
            if isinstance(query_tensor, list):
                parts = [query_tensor[start : start + batch_size] for start in range(0, len(query_tensor), batch_size)]
                return [row for part in parts for row in self._sample_part(model, part, settings(), return_prompt)]
            ids = query_tensor.to(self.current_device).unsqueeze(0)
            tokens = model.generate(input_ids=ids, **settings())
            return tokens if return_prompt else tokens[:, ids.shape[1] :]

        if isinstance(query_tensor, Tensor) and query_tensor.dim() != 1:
            raise ConfigError(
                f"PPOTrainer.generate: query_tensor has shape {list(query_tensor.shape)}; pass one query [time], or a list "
                "of queries: list(query_tensor)"
            )
        self.model.eval()
        responses = sample(self._policy)
        if not generate_ref_response:
            return responses
        with self._reference() as reference:
            return responses, sample(self.accelerator.unwrap_model(reference))

    def _sample_part(
        self, model: Any, queries: list[Tensor], settings: dict[str, Any], return_prompt: bool
    ) -> list[Tensor]:
        """Responses of queries that are sampled together."""
        padding_left = copy.copy(self.tokenizer)
        padding_left.padding_side = "left"
        rows = {"input_ids": queries, "attention_mask": [torch.ones_like(query) for query in queries]}
        inputs = padding_left.pad(rows, padding=True, return_tensors="pt").to(self.current_device)
        responses = []
        for query, row in zip(queries, model.generate(**inputs, **settings), strict=True):
            response = row[inputs["input_ids"].shape[1] :]
            ends = (response == self.tokenizer.eos_token_id).nonzero()
            response = response[: int(ends[0]) + 1] if len(ends) else response
            responses.append(torch.cat([query.to(response.device), response]) if return_prompt else response)
        return responses

    def step(
        self,
        queries: list[Tensor],
        responses: list[Tensor],
        scores: list[Tensor],
        response_masks: list[Tensor] | None = None,
    ) -> dict[str, Any]:
        """One PPO update from ``batch_size`` scored responses.

        Args:
            queries: token ids of each query, ``[time]``.
            responses: token ids of each response, ``[time]``.
            scores: one score per response.
            response_masks: 1 for tokens of a response that the policy wrote, 0 for others, such as a tool's output; None is 1
                everywhere. Tokens with 0 get no loss and no KL penalty. The state before each has value 0 and reward 0,
                and is a time step like others; `advantages_and_returns` has the formula.

        Returns the stats under TRL's names (docs/compat.md lists them). Raises ConfigError for lists of the wrong length,
        type or shape, and RewardError for scores that are not finite.
        """
        began = time.perf_counter()
        config, device = self.config, self.current_device
        _check_batch(config.batch_size, queries, responses, scores, response_masks)
        given = self._shape_scores(torch.tensor([float(score) for score in scores], device=device))
        inputs = self._pad([torch.cat([q.to(device), r.to(device)]) for q, r in zip(queries, responses, strict=True)])
        mask = _response_mask(inputs["attention_mask"], queries, responses, response_masks)
        timing = {}

        started = time.perf_counter()
        with torch.no_grad():
            old_logprobs, old_values, distributions = self._passes(self.model, inputs)
            with self._reference() as reference:
                ref_logprobs, _, ref_distributions = self._passes(reference, inputs)
        timing["time/ppo/forward_pass"], started = time.perf_counter() - started, time.perf_counter()

        if config.kl_penalty == "full":
            penalty = kl_penalty(torch.cat(distributions), torch.cat(ref_distributions), "full")
        else:
            penalty = kl_penalty(old_logprobs, ref_logprobs, config.kl_penalty)
        rewards = token_rewards(given, penalty, mask, self.kl_ctl.value)
        timing["time/ppo/compute_rewards"], started = time.perf_counter() - started, time.perf_counter()

        if config.whiten_rewards:
            rewards = scaled_rewards(rewards, mask)
        advantages, returns = advantages_and_returns(old_values, rewards, mask, gamma=config.gamma, lam=config.lam)
        timing["time/ppo/compute_advantages"], started = time.perf_counter() - started, time.perf_counter()

        rollout = Rollout(old_logprobs, old_values, mask, advantages, returns)
        of_minibatches = self._update(inputs, rollout)
        timing["time/ppo/optimize_step"], started = time.perf_counter() - started, time.perf_counter()

        stats: dict[str, Any] = {
            **_objective_stats(given, (old_logprobs, ref_logprobs), penalty, mask, self.kl_ctl.value),
            **_length_stats(queries, responses),
            **_mean_stats(of_minibatches),
        }
        if self.is_distributed:
            stats = {k: self.accelerator.reduce(v, "mean") if isinstance(v, Tensor) else v for k, v in stats.items()}
        stats = {name: _as_numpy(value) for name, value in stats.items()}
        timing["time/ppo/calc_stats"] = time.perf_counter() - started
        stats["ppo/learning_rate"] = self.optimizer.param_groups[0]["lr"]
        self.kl_ctl.update(stats["objective/kl"], config.batch_size * self.accelerator.num_processes)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        if config.optimize_device_cache:
            gc.collect()
            torch.accelerator.empty_cache() if torch.accelerator.is_available() else None
        timing["time/ppo/total"] = time.perf_counter() - began
        stats |= timing
        if config.log_with == "wandb":
            return stats
        return {k: v.item() if isinstance(v, np.ndarray) and v.shape in ((), (1,)) else v for k, v in stats.items()}

    def _shape_scores(self, scores: Tensor) -> Tensor:
        """Scale by the running moments of all scores so far, these included; then clip."""
        if self.config.use_score_scaling:
            self.running.update(self.accelerator.gather(scores))
            shift = self.running.mean if self.config.use_score_norm else 0.0
            scores = (scores - shift) / (self.running.std + torch.finfo(scores.dtype).eps)
        return core.clip_scores(scores, self.config.score_clip)

    def _pad(self, rows: list[Tensor]) -> dict[str, Tensor]:
        """Token ids and attention mask, padded to the longest row of all processes."""
        batch = self.data_collator([{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows])
        inputs = {name: tensor.to(self.current_device) for name, tensor in batch.items() if name != "labels"}
        if self.is_distributed:
            first = self.tokenizer.padding_side == "left"
            for name, pad in (("input_ids", self.tokenizer.pad_token_id), ("attention_mask", 0)):
                inputs[name] = self.accelerator.pad_across_processes(
                    inputs[name], dim=1, pad_index=pad, pad_first=first
                )
        return inputs

    def _passes(self, model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Log-probs and values of all rows, ``mini_batch_size`` at a time; for the penalty "full" also each part's log-probs
        of the whole vocabulary."""
        model.eval()
        size = self.config.mini_batch_size
        logprobs, values, distributions = [], [], []
        for start in range(0, len(inputs["input_ids"]), size):
            own, value, logits = _forward(model, {name: rows[start : start + size] for name, rows in inputs.items()})
            logprobs.append(own)
            values.append(value)
            if self.config.kl_penalty == "full":
                distributions.append(logits.log_softmax(-1))
        return torch.cat(logprobs), torch.cat(values), distributions

    def _update(self, inputs: dict[str, Tensor], rollout: Rollout) -> list[dict[str, Tensor]]:
        """``ppo_epochs`` passes over shuffled minibatches. Returns the stats of each minibatch."""
        config, stats = self.config, []
        for _ in range(config.ppo_epochs):
            order = np.random.permutation(config.batch_size)
            for start in range(0, config.batch_size, config.mini_batch_size):
                rows = torch.as_tensor(order[start : start + config.mini_batch_size], device=self.current_device)
                part = {name: tensor[rows] for name, tensor in inputs.items()}
                with self.accelerator.accumulate(self.model):
                    stats.append(self._train_minibatch(part, Rollout(*(tensor[rows] for tensor in rollout))))
            if config.early_stopping:
                kl = stats[-1]["policy/policykl"]
                if self.accelerator.reduce(kl.clone(), "mean") > 1.5 * config.target_kl:
                    break
        return stats

    def _train_minibatch(self, inputs: dict[str, Tensor], old: Rollout) -> dict[str, Tensor]:
        """Forward and backward pass of a minibatch, and the optimizer's step if enough gradients are there."""
        self.model.train(self.config.gradient_checkpointing)  # otherwise eval mode: no pass has dropout
        logprobs, values, logits = _forward(self.model, inputs)
        loss, stats = self._loss(logprobs, values, logits, old)
        self.accelerator.backward(loss)
        if self.config.max_grad_norm is not None and self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self._trained, self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return stats

    def _loss(self, logprobs: Tensor, values: Tensor, logits: Tensor, old: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
        """``clipped surrogate + vf_coef * clipped value loss``, means over the minibatch's response tokens; 0 if its mean
        ratio is above ``ratio_threshold``."""
        config, mask = self.config, old.mask
        policy_loss, of_policy = core.ppo_policy_loss(
            logprobs, old.old_logprobs, old.advantages, mask, clip_range=config.cliprange
        )
        value_loss, of_value = core.value_loss(
            values, old.old_values, old.returns, mask, clip_range=config.cliprange_value
        )
        ratio = (logprobs - old.old_logprobs).detach().exp()
        mean_ratio = float(core.masked_mean(ratio, mask))
        if mean_ratio > config.ratio_threshold:
            warnings.warn(
                f"the mean probability ratio of a minibatch is {mean_ratio:.2f}, above ratio_threshold "
                f"{config.ratio_threshold:.2f}: its loss is set to 0",
                stacklevel=2,
            )
            policy_loss, value_loss = 0.0 * policy_loss, 0.0 * value_loss
        loss = policy_loss + config.vf_coef * value_loss
        new = logprobs.detach()
        stats = {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "loss/total": loss,
            "policy/entropy": core.masked_mean(core.entropy(logits.detach()), mask),
            "policy/approxkl": core.masked_mean(core.kl_estimate(new, old.old_logprobs, kind="k2"), mask),
            "policy/policykl": core.masked_mean(old.old_logprobs - new, mask),
            "policy/clipfrac": of_policy["policy/clip_frac"],
            "policy/advantages": old.advantages,
            "policy/advantages_mean": core.masked_mean(old.advantages, mask),
            "policy/ratio": ratio,
            "returns/mean": core.masked_mean(old.returns, mask),
            "returns/var": masked_var(old.returns, mask),
            "val/vpred": core.masked_mean(values, mask),
            "val/error": core.masked_mean((values - old.returns).square(), mask),
            "val/clipfrac": of_value["value/clip_frac"],
            "val/mean": core.masked_mean(old.old_values, mask),
            "val/var": masked_var(old.old_values, mask),
        }
        return loss, {name: value.detach() for name, value in stats.items()}

    def log_stats(
        self,
        stats: dict[str, Any],
        batch: dict[str, Any],
        rewards: Sequence[Tensor] | Tensor,
        columns_to_log: Iterable[str] = ("query", "response"),
    ) -> None:
        """Send stats to the tracker of ``log_with``, with the mean, deviation and values of the scores as ``env/reward_*``.

        Args:
            stats: of `step`.
            batch: columns of the batch. wandb gets a table of ``columns_to_log``.
            rewards: the scores, before scaling.
            columns_to_log: columns of ``batch``. Raises ConfigError if wandb is to get one that is not there.
        """
        columns = list(columns_to_log)
        scores = torch.as_tensor([float(reward) for reward in rewards], device=self.current_device)
        scores = self.accelerator.gather(scores)
        is_table = self.config.log_with == "wandb" and columns
        if is_table and (absent := [name for name in columns if name not in batch]):
            raise ConfigError(
                f"PPOTrainer.log_stats: columns_to_log has {', '.join(absent)}, but the batch has {', '.join(batch)}"
            )
        texts = [batch[name] for name in columns] if is_table else []
        if self.is_distributed:
            texts = [gather_object(list(column)) for column in texts]
        if not self.accelerator.is_main_process:
            return
        logs = dict(stats)
        if is_table:
            import wandb

            rows = [list(row) for row in zip(*texts, scores.tolist(), strict=True)]
            logs["game_log"] = wandb.Table(columns=[*columns, "reward"], rows=rows)
        logs["env/reward_mean"] = float(scores.mean())
        logs["env/reward_std"] = float(scores.std())
        logs["env/reward_dist"] = scores.cpu().numpy()
        self.current_step += 1
        self.accelerator.log(logs, step=self.current_step if self.config.log_with == "tensorboard" else None)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write the model with its value head, or its adapter, and the tokenizer to a folder."""
        self._policy.save_pretrained(save_directory)
        self.tokenizer.save_pretrained(str(save_directory))

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Upload what `save_pretrained` writes to a repository of the Hub. Returns its address."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return upload(folder, repo_id, private=private, token=token)


def _forward(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of every token but the first, value of the state before it, and the logits it was drawn from."""
    logits, _, values = model(**inputs)
    logits = logits[:, :-1]
    return core.token_logprobs(logits, inputs["input_ids"][:, 1:]), values[:, :-1], logits


def _response_mask(
    attention_mask: Tensor, queries: Tensors, responses: Tensors, response_masks: Tensors | None
) -> Tensor:
    """``[B, T]``, True where the predicted token is one of the response, and has 1 in its ``response_masks``."""
    mask = torch.zeros_like(attention_mask[:, 1:], dtype=torch.bool)
    firsts = attention_mask.int().argmax(dim=1).tolist()
    for row, (first, query, response) in enumerate(zip(firsts, queries, responses, strict=True)):
        start = first + len(query) - 1
        mask[row, start : start + len(response)] = (
            True if response_masks is None else response_masks[row].to(mask).bool()
        )
    return mask


def _objective_stats(
    scores: Tensor, policy_and_reference: tuple[Tensor, Tensor], penalty: Tensor, mask: Tensor, kl_coef: float
) -> dict[str, Any]:
    logprobs, ref_logprobs = policy_and_reference
    kl = torch.where(mask, penalty, 0.0).sum(1)
    return {
        "objective/kl": kl.mean(),
        "objective/kl_dist": kl,
        "objective/logprobs": logprobs,
        "objective/ref_logprobs": ref_logprobs,
        "objective/kl_coef": kl_coef,
        "objective/entropy": torch.where(mask, -logprobs, 0.0).sum(1).mean(),
        "ppo/mean_non_score_reward": core.masked_mean(-kl_coef * penalty, mask),
        "ppo/mean_scores": scores.mean(),
        "ppo/std_scores": scores.std(),
    }


def _length_stats(queries: Tensors, responses: Tensors) -> dict[str, Any]:
    stats: dict[str, Any] = {}
    for name, rows in (("queries", queries), ("responses", responses)):
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.float32)
        stats[f"tokens/{name}_len_mean"] = float(lengths.mean())
        stats[f"tokens/{name}_len_std"] = float(lengths.std())
        stats[f"tokens/{name}_dist"] = lengths.numpy()
    return stats


def _mean_stats(of_minibatches: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Means over minibatches; advantages and ratios of all their tokens."""
    stats = {}
    for name in of_minibatches[0]:
        values = torch.stack([one[name] for one in of_minibatches])
        stats[f"ppo/{name}"] = values.flatten() if values.dim() > 1 else values.mean()
    stats["ppo/val/var_explained"] = 1 - stats["ppo/val/error"] / stats["ppo/returns/var"]
    return stats


def _as_numpy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()


def _check_arguments(config: Any, model: Any, ref_model: Any, tokenizer: Any, dataset: Any) -> None:
    if not isinstance(config, PPOConfig):
        raise ConfigError(f"PPOTrainer: config is a {type(config).__name__}; it must be a PPOConfig")
    for name, one in (("model", model), ("ref_model", ref_model)):
        if not isinstance(one, AutoModelForCausalLMWithValueHead) and not (name == "ref_model" and one is None):
            raise ConfigError(
                f"PPOTrainer: {name} is a {type(one).__name__}; wrap it: "
                f"AutoModelForCausalLMWithValueHead.from_pretrained({name})"
            )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(
            f"PPOTrainer: tokenizer is a {type(tokenizer).__name__}; pass AutoTokenizer.from_pretrained(MODEL)"
        )
    if tokenizer.pad_token_id is None:
        raise ConfigError("PPOTrainer: tokenizer has no pad token; set tokenizer.pad_token = tokenizer.eos_token")
    is_dataset = isinstance(dataset, datasets.Dataset | torch.utils.data.Dataset) and hasattr(dataset, "__len__")
    if dataset is not None and not is_dataset:
        raise ConfigError(
            f"PPOTrainer: dataset is a {type(dataset).__name__}; it must be a datasets.Dataset or a torch Dataset with a "
            "length. Of a DatasetDict take a split: dataset['train']; a stream needs a loop of the script's own"
        )
    if config.use_score_scaling and config.batch_size == 1:
        raise ConfigError(
            "PPOTrainer: use_score_scaling with batch_size 1 divides by the deviation of a single score; use a larger "
            "batch_size, or no scaling"
        )


def _check_launch(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type.value
    if kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"):
        raise ConfigError(
            f"PPOTrainer: the script was launched with {kind}, which is not supported; launch it with `accelerate launch "
            "--multi_gpu`, or torchrun, or use `heedful ppo` for models that need sharding"
        )


def _check_batch(batch_size: int, queries: Any, responses: Any, scores: Any, response_masks: Any) -> None:
    lists = {"queries": queries, "responses": responses, "scores": scores}
    if response_masks is not None:
        lists["response_masks"] = response_masks
    for name, rows in lists.items():
        if not isinstance(rows, list) or not all(isinstance(row, Tensor) for row in rows):
            raise ConfigError(
                f"PPOTrainer.step: {name} is a {type(rows).__name__}; it must be a list of tensors, one per response"
            )
        if len(rows) != batch_size:
            raise ConfigError(f"PPOTrainer.step: {name} has {len(rows)} entries, but batch_size is {batch_size}")
    for row, (query, response, score) in enumerate(zip(queries, responses, scores, strict=True)):
        for name, ids in (("queries", query), ("responses", response)):
            if ids.dim() != 1 or not len(ids):
                raise ConfigError(
                    f"PPOTrainer.step: {name}[{row}] has shape {list(ids.shape)}; it must be [time], at least one token"
                )
        if score.numel() != 1:
            raise ConfigError(f"PPOTrainer.step: scores[{row}] has shape {list(score.shape)}; it must be one number")
        if not bool(score.isfinite().all()):
            raise RewardError(f"PPOTrainer.step: scores[{row}] is {float(score)}; every score must be a finite number")
        if response_masks is not None:
            own = response_masks[row]
            if own.shape != response.shape or not bool(own.any()):
                raise ConfigError(
                    f"PPOTrainer.step: response_masks[{row}] has shape {list(own.shape)} and {int(own.sum())} ones; it must "
                    f"have the shape of its response, {list(response.shape)}, and at least one 1"
                )
