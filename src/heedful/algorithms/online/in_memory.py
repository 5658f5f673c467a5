"""Training a policy in memory, in place. Set-up reads temporary files that describe it."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from heedful.algorithms.online.critic import has_head
from heedful.algorithms.online.experience import Experience
from heedful.algorithms.online.loop import alarms_of
from heedful.algorithms.online.rollout import rollout
from heedful.algorithms.online.start import start
from heedful.algorithms.ppo import learn, make_experience
from heedful.configs.online import GRPOConfig, OnlineConfig, PPOConfig, RolloutConfig
from heedful.configs.settings import named, refuse
from heedful.data.in_memory import Records, write_records
from heedful.display import say
from heedful.errors import CheckpointError, ConfigError, reworded
from heedful.kernels.device import resolve_device
from heedful.models.adapters import has_adapters
from heedful.models.policy import Policy
from heedful.models.save import save_all_but_weights
from heedful.models.value_model import ValueHead
from heedful.rewards.resolve import AnyRewards
from heedful.training.callbacks import OnMetrics, wants_stop
from heedful.training.compilation import compile_layers
from heedful.training.from_python import as_given, as_passed, check_given, check_kind

C = TypeVar("C", bound=RolloutConfig)


def ppo_steps(
    config: OnlineConfig,
    model: Policy | str | Path | None = None,
    data: Records | str | Path | None = None,
    rewards: AnyRewards = (),
    *,
    on_step: OnMetrics | None = None,
) -> Iterator[tuple[int, Experience, dict[str, float]]]:
    """The steps of `train_ppo` one at a time, on a policy in memory, trained in place.

    >>> for step, experience, metrics in heedful.ppo_steps(config, model=policy, data=prompts, rewards=brevity):
    ...     if metrics["reference/kl"] > 5: break

    Nothing is written, held out or evaluated. After each step, also before a ``break``, the policy has its updated
    weights. The numbers are those of `train_ppo` with the same settings and ``eval_fraction=0``.

    Args:
        config: the settings; their class is the preset.
        model: the policy to train, with its tokenizer, or the name or folder of one to load; the setting of that name if
            None. It gets a value head if the settings need one, and keeps one that they do not.
        data: prompts: a `datasets.Dataset` or `IterableDataset`, a DataFrame, a list of texts, conversations or dicts with
            the columns of a file, or a file's path; the setting of that name if None. They are shuffled unless
            ``config.shuffle`` is False.
        rewards: added to the config's: functions, `Reward` objects or strings, or one of them.
        on_step: called with each step's number and metrics before they are yielded; `heedful.STOP` as its result makes this
            step the last.

    Yields the step's number, its `Experience`, and its metrics (docs/metrics.md).

    Raises ConfigError, DataError, CheckpointError, RewardError, TrainingError.
    """
    check_kind(config, PPOConfig, GRPOConfig)
    check_given(config, {"model": model, "data": data})
    policy = as_policy(config, model)
    head = policy.value_head
    if not has_head(config):
        policy.value_head = None
    with described(config, policy, config.data if data is None else data) as (settings, files):
        learner, alarms = start(settings, rewards, policy).learner, alarms_of(config)
    learner.prompts.prompts = [
        replace(one, prompt=replace(one.prompt, source=as_given(one.prompt.source, files)))
        for one in learner.prompts.prompts
    ]
    compile_layers(settings, learner.trained)
    with contextlib.closing(learner), kept(policy, head), reworded(lambda text: named(text, type(config))):
        for step in range(1, config.steps + 1):
            experience = make_experience(learner, rollout(learner, next(learner.prompts)))
            metrics = learn(learner, experience).metrics
            stops = on_step is not None and wants_stop("on_step", on_step, step, metrics)
            yield step, experience, metrics
            for alarm in alarms.see(step, metrics):
                if alarm.alarm not in alarms.stop_on:  # the error says those
                    say(alarm.text)
            learner.non_finite_guard.check()
            alarms.check()
            if stops:
                return


def as_policy(config: RolloutConfig, model: Policy | str | Path | None) -> Policy:
    """The policy in memory, or one loaded by its name. Raises ConfigError for anything else."""
    if isinstance(model, Policy):
        return model
    name = config.model if model is None else model
    if not isinstance(name, str | Path):
        raise ConfigError(
            f"model is a {type(name).__name__}; make a policy of it: heedful.Policy.from_pretrained(model, tokenizer)"
        )
    return Policy.from_pretrained(
        name, value_head=has_head(config), device=config.device, dtype=config.dtype, chat_template=config.chat_template
    )


@contextlib.contextmanager
def kept(policy: Policy, head: ValueHead | None) -> Iterator[None]:
    """Give a policy its value head back that these settings have no use for."""
    try:
        yield
    finally:
        if policy.value_head is None:
            policy.value_head = head


@contextlib.contextmanager
def described(config: C, policy: Policy, prompts: Records | str | Path) -> Iterator[tuple[C, dict[str, str]]]:
    """Settings whose ``model`` and ``data`` are temporary files that describe the policy and hold the prompts; and these
    files by the names of the objects, for `as_given`.

    Messages in this context name prompts by their index: ``data[2]``.

    Raises ConfigError, DataError, CheckpointError.
    """
    files: dict[str, str] = {}
    with as_passed(config, files), tempfile.TemporaryDirectory(prefix="heedful-") as name:
        check_policy(config, policy)
        if policy.tokenizer is None:
            raise CheckpointError("the policy has no tokenizer; load it with Policy.from_pretrained")
        folder = Path(name)
        save_all_but_weights(policy, policy.tokenizer, folder / "model")
        is_named = isinstance(prompts, str | Path)
        data = prompts if is_named else write_records(prompts, folder, "data", asks=True)
        settings = replace(
            config,
            model=str(folder / "model"),
            data=str(data),
            output=folder / "run",
            eval_fraction=0.0,
            **machine_of(policy),
        )
        files |= {"model": settings.model} | ({} if is_named else {"data": settings.data})
        yield settings, files


def machine_of(policy: Policy) -> Any:
    """A policy's device and compute dtype as settings."""
    device = "cpu" if policy.device.type == "cpu" else str(policy.device)
    return {"device": device, "dtype": str(policy.compute_dtype).removeprefix("torch.")}


def check_policy(config: RolloutConfig, policy: Policy) -> None:
    """Raises ConfigError unless the policy in memory can be trained in place with these settings."""
    refuse(
        config,
        *("quantize", "weights_dtype", "shard", "ema_decay"),
        because="is for a policy that a run loads and saves; leave it out, or train with heedful.train_ppo",
    )
    if config.device != "auto" and resolve_device(config.device).type != policy.device.type:
        raise ConfigError(
            f"--device {config.device}: the policy is on {policy.device}; leave it out, or move the policy: "
            f"policy.to({config.device!r})"
        )
    name = machine_of(policy)["dtype"]
    if config.dtype not in ("auto", name):
        raise ConfigError(
            f"--dtype {config.dtype}: the policy was loaded with {name}; leave it out, or load it with "
            f"Policy.from_pretrained(..., dtype={config.dtype!r})"
        )
    if not any(parameter.requires_grad for parameter in policy.parameters()):
        raise ConfigError(
            "the policy is frozen, so nothing would be trained; pass the policy that frozen_copy was called on"
        )
    if config.lora_rank and has_adapters(policy.lm):
        raise ConfigError(
            f"--lora-rank {config.lora_rank}: the policy already has adapters, which are trained; leave it out"
        )
