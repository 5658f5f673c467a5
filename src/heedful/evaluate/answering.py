"""A policy's responses to the prompts of a measurement: read, sampled, ready to be scored."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from heedful.configs.evaluate import SampledOptions, ScoresConfig
from heedful.data.chat import Renderer
from heedful.data.fitting import Counts, Refusal, added, check_dropped, each_rendered, prompt_room, settle, too_long
from heedful.data.loading import encode_prompts, encoded_prompt
from heedful.data.schemas import read_prompts
from heedful.errors import DataError
from heedful.evaluate.reward_models import held_out, left_out
from heedful.kernels.device import frozen_place, resolve_device, resolve_dtype
from heedful.models.load import load_policy
from heedful.models.policy import Policy, freeze
from heedful.models.shape import context_length
from heedful.models.source import load_config, resolve
from heedful.models.tokenizer import load_chat_tokenizer, load_tokenizer
from heedful.rewards import Completion, Ensemble, Reward, RewardFunction
from heedful.rewards.models import check_context
from heedful.rewards.resolve import check_reward_options, check_wanted, load_rewards
from heedful.sampling.rollouts import Rollouts
from heedful.sampling.sampler import make_sampler
from heedful.types import Prompt


@dataclass(frozen=True)
class Answered:
    """A policy and its responses to prompts. Responses to the same prompt are consecutive."""

    policy: Policy
    rollouts: Rollouts
    completions: list[Completion]

    @property
    def prompts(self) -> list[Prompt]:
        """The prompt of each response."""
        return [completion.prompt for completion in self.completions]

    def select(self, rows: list[int]) -> "Answered":
        """Return the responses at these indices, in this order."""
        return Answered(self.policy, self.rollouts.select(torch.tensor(rows)), [self.completions[row] for row in rows])


def reward_functions(
    config: ScoresConfig,
    rewards: Sequence[str | Reward | RewardFunction],
    judges: Sequence[str | Reward | RewardFunction] = (),
) -> Ensemble:
    """Load the config's rewards and those given in Python. Raises ConfigError if there are none."""
    wanted = [*config.rewards, *rewards]
    check_wanted(wanted, config)
    check_reward_options([*wanted, *judges], config)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    return load_rewards(
        wanted,
        config,
        device=device,
        compute_dtype=dtype,
        micro_batch=config.micro_batch,
        special_tokens=config.special_tokens,
    )


def prompts_of(
    config: SampledOptions, models: Sequence[str], rewards: Sequence[Reward] = ()
) -> tuple[list[Prompt], Counts]:
    """Read the prompts that every model can read with room for a response, and count what was left out or truncated.

    Raises ConfigError if a reward model among ``rewards`` cannot read them with a response.
    """
    prompts, counts = held_out(read_prompts, config)
    prompts = prompts[: config.max_prompts]
    too_long_for: set[int] = set()
    sources = [resolve(name, config) for name in models]
    renderers = [Renderer(load_chat_tokenizer(source, config), config.special_tokens) for source in sources]
    refused: list[Refusal] = []
    for renderer in renderers:
        prompts, _ = each_rendered(prompts, partial(encoded_prompt, renderer=renderer), refused)
    counts = added(counts, settle(refused, len(prompts), config))
    for source, renderer in zip(sources, renderers, strict=True):
        too_long_for |= set(
            too_long(
                [len(renderer.prompt_ids(prompt.prompt)) for prompt in prompts],
                [prompt.source for prompt in prompts],
                limit=prompt_room(config.max_new_tokens, context_length(load_config(source))),
                action=config.too_long,
                what="prompts",
            )
        )
    counts["dropped_too_long" if config.too_long == "drop" else "truncated"] = len(too_long_for)
    check_dropped(counts, max_dropped=config.max_dropped, path=config.data)
    if config.too_long == "drop":
        prompts = [prompt for i, prompt in enumerate(prompts) if i not in too_long_for]
    if not prompts:
        raise DataError(f"{config.data}: every prompt was dropped: {left_out(counts)}")
    for name in models:
        tokenizer = load_tokenizer(resolve(name, config), chat_template=config.chat_template)
        renderer = Renderer(tokenizer, config.special_tokens)
        check_context(rewards, prompts, renderer, max_new_tokens=config.max_new_tokens)
    return prompts, counts


def answer(config: SampledOptions, name: str, prompts: Sequence[Prompt], *, best_of: int = 1) -> Answered:
    """Load a policy and sample responses to each prompt. With the same seed every policy gets the same random numbers."""
    device = resolve_device(config.device)
    source = resolve(name, config)
    renderer = Renderer(load_chat_tokenizer(source, config), config.special_tokens)
    policy = load_policy(source, **frozen_place(device, config.dtype))
    freeze(policy)
    room = prompt_room(config.max_new_tokens, context_length(policy.lm.config))
    encoded, _ = encode_prompts(prompts, renderer, max_length=room, action="truncate", learns=False)
    encoded = [prompt for prompt in encoded for _ in range(config.samples_per_prompt * best_of)]
    sampler = make_sampler(config, renderer, policy, micro_batch=config.micro_batch)
    rollouts, completions = sampler.respond(policy, encoded, torch.Generator().manual_seed(config.seed))
    return Answered(policy, rollouts, completions)


def counted(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Counts:
    """Count the prompts, and the responses if a prompt has several."""
    counts = {"prompts": len(prompts)}
    return counts | ({"responses": len(completions)} if len(completions) > len(prompts) else {})


def shown_rows(prompts: Sequence[Prompt], config: SampledOptions) -> list[int]:
    """Return the indices of the responses to show: the first one to each of the first prompts."""
    return [i * config.samples_per_prompt for i in range(len(prompts))][: config.num_samples]


def shape_of(answered: Answered) -> dict[str, float]:
    """Mean length of the responses, and the shares that ended and that are empty."""
    return {
        "response_length": float(answered.rollouts.lengths.float().mean()),
        "eos_frac": 1 - float(answered.rollouts.truncated.float().mean()),
        "empty_frac": sum(not c.response.strip() for c in answered.completions) / len(answered.completions),
    }
