"""Loading of PPO's critic, and checks that it can read the policy's tokens."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from heedful.configs.online import OnlineConfig, RolloutConfig
from heedful.core.score_norm import ScoreNorm
from heedful.data.chat import Renderer, RewardInputs
from heedful.data.loading import EncodedPrompt
from heedful.errors import ConfigError
from heedful.kernels.weights import same_weights
from heedful.models.load import four_bit, load_reward_model, load_value_model
from heedful.models.policy import Policy
from heedful.models.source import Source, resolve
from heedful.models.tokenizer import check_companion, load_tokenizer
from heedful.models.value_model import ValueModel, normalise_values, value_model_from
from heedful.rewards import Reward
from heedful.rewards.models import ModelReward
from heedful.training.fsdp import divides, loading_device
from heedful.training.setup import float32_experts, prepare, stored_dtype


def critic_options_of(config: RolloutConfig) -> OnlineConfig | None:
    """The settings, if they have a critic, else None."""
    return config if isinstance(config, OnlineConfig) and config.estimator.critic else None


def has_head(config: RolloutConfig) -> bool:
    """Whether the policy carries the critic's value head."""
    options = critic_options_of(config)
    return options is not None and options.critic == "shared"


def check_critic(config: OnlineConfig, policy: Source, tokenizer: PreTrainedTokenizerBase, longest: int) -> None:
    """Raises ConfigError or CheckpointError for a critic that cannot read ``longest`` of the policy's token ids."""
    check_companion("--value-model", config.value_model, policy, tokenizer, longest, options=config)
    if config.critic == "reward":
        name = first_reward_model(config)
        if RewardInputs(load_tokenizer(resolve(name, config))).renderer is None:
            raise ConfigError(
                f"--critic reward needs a decoder, which does not see later tokens, but {name} is an encoder; use "
                "--critic separate"
            )
        check_companion("--critic reward:", name, policy, tokenizer, longest, options=config)


def first_reward_model(config: OnlineConfig) -> str:
    """The first reward model among the rewards. Raises ConfigError if there is none."""
    for reward in config.rewards:
        if reward.startswith("model:"):
            return reward.removeprefix("model:")
    raise ConfigError(
        "--critic reward starts from a reward model, but there is none in --rewards; add --rewards model:PATH, or use "
        "--critic separate"
    )


def load_critic(
    config: OnlineConfig,
    policy: Policy,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    is_in_memory: bool = False,
) -> ValueModel | None:
    """A separate critic, ready for training, or None if the value head is on the policy's trunk.

    With LoRA, a separate critic initialised from the policy shares its frozen weights, unless they will be sharded over
    ranks; its adapters are its own. The policy has no adapters yet. If it ``is_in_memory``, the critic's trunk is a
    copy. Raises ConfigError, CheckpointError.
    """
    if config.critic == "shared":
        return None
    machine: Any = {
        "device": loading_device(config, device),
        "compute_dtype": compute_dtype,
        "stored": stored_dtype(config, device, compute_dtype),
        "float32_experts": float32_experts(config),
    }
    if config.critic == "reward":
        start = first_reward_model(config)
        source = resolve(start, config)
        critic = value_model_from(load_reward_model(source, load_tokenizer(source), merged=True, **machine), start)
    else:
        start = config.value_model or config.model
        shares = config.lora_rank and start == config.model and not divides(config)
        trunk = same_weights(policy.lm.base_model) if shares else None
        if is_in_memory and start == config.model and not shares:
            trunk = copy.deepcopy(policy.lm.base_model)
        source = resolve(start, config)
        critic = load_value_model(source, trunk=trunk, four_bit=four_bit(config, device, compute_dtype), **machine)
    prepare(critic, config, base=start)
    freeze(critic, config.value_freeze)
    return critic


def freeze(critic: ValueModel, parts: Sequence[str]) -> None:
    """Leave the parts of a critic with these names (``self_attn``, ``layers.0``) as they are.

    Raises ConfigError for a name that no weight has, or none that would learn, or if only the head is left.
    """
    for part in parts:
        found = [weight for name, weight in critic.trunk.named_parameters() if f".{part}." in f".{name}."]
        if not found:
            names = sorted({word for name, _ in critic.trunk.named_parameters() for word in name.split(".")})
            raise ConfigError(
                f"--value-freeze {part} is no part of the critic; choose from "
                f"{', '.join(word for word in names if not word.isdigit())}"
            )
        if not any(weight.requires_grad for weight in found):
            raise ConfigError(f"--value-freeze {part} has no weight that would learn; leave it out")
        for weight in found:
            weight.requires_grad_(False)
    if parts and not any(weight.requires_grad for weight in critic.trunk.parameters()):
        raise ConfigError(
            f"--value-freeze {' '.join(parts)} leaves nothing of the critic but its head; leave a part out, or use --critic "
            "shared"
        )


def check_same_text(
    config: OnlineConfig, rewards: Sequence[Reward], prompts: Sequence[EncodedPrompt], renderer: Renderer
) -> None:
    """Raises ConfigError for a critic initialised from a reward model whose chat template renders prompts differently.

    The critic reads prompts as the policy's template renders them, the reward model as its own does.
    """
    if config.critic != "reward":
        return
    name = f"model:{first_reward_model(config)}"
    scores = next(reward.function for reward in rewards if reward.name == name)
    assert isinstance(scores, ModelReward)
    for prompt in prompts:
        written = renderer.prompt_ids(prompt.prompt.prompt)
        if scores.inputs.encode(prompt.prompt.prompt, "a")["input_ids"][: len(written)] != written:
            raise ConfigError(
                f"--critic reward: the chat template of {name} renders the prompt at {prompt.prompt.source} differently "
                "from the policy's, so the critic would read another text than the reward model; use --critic separate, "
                "or give the policy the reward model's template with --chat-template"
            )


def start_from_scores(
    critic: ValueModel, rewards: Sequence[Reward], score_norm: ScoreNorm, config: OnlineConfig
) -> None:
    """Rescale a critic initialised from a reward model to the scale of training scores.

    Scores are multiplied by the reward's weight, then normalised.
    """
    if config.critic != "reward":
        return
    name = f"model:{first_reward_model(config)}"
    weight = next(reward.weight for reward in rewards if reward.name == name)
    normalise_values(critic, reward_weight=weight, mean=score_norm.mean, std=score_norm.std)
