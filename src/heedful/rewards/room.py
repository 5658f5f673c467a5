"""Whether reward models can read what a policy may write, before it writes anything."""

import math
from collections.abc import Iterator, Sequence

from heedful.data.chat import Renderer, RewardInputs, plain_text
from heedful.errors import ConfigError
from heedful.rewards.interface import Reward
from heedful.rewards.model import ModelReward
from heedful.types import Prompt

MEASURED = 1000
"""Prompts over which two tokenizers are compared, at most."""


def model_rewards(rewards: Sequence[Reward]) -> Iterator[tuple[str, ModelReward]]:
    """The reward models among rewards, with their names."""
    for reward in rewards:
        if isinstance(reward.function, ModelReward):
            yield reward.name, reward.function


def check_room(
    rewards: Sequence[Reward],
    prompts: Sequence[Prompt],
    renderer: Renderer,
    *,
    max_new_tokens: int,
    can_leave_out: bool = False,
) -> None:
    """Refuse a reward model that cannot read the longest prompt with the longest response.

    A response's length in the reward model's tokens is ``max_new_tokens`` times how many of its tokens the prompts have for
    one of the policy's: exactly 1 for the same tokenizer. A text may need more, if it is unlike the prompts or the policy
    splits it in another way than its tokenizer would.

    Args:
        rewards: any rewards; only reward models are checked.
        prompts: every prompt that may be answered.
        renderer: of the policy's tokenizer.
        max_new_tokens: the longest response, in the policy's tokens.
        can_leave_out: there is ``--max-prompt-tokens``, by which ``--too-long drop`` leaves prompts out. Cutting them would
            not help: rewards see the whole prompt.

    Raises ConfigError with the setting that would fit, and CheckpointError for a prompt that a chat template refuses.
    """
    for name, reward in model_rewards(rewards):
        inputs, limit = reward.inputs, reward.model.max_length
        lengths = [len(inputs.encode(prompt.prompt, "", truncated=True)["input_ids"]) for prompt in prompts]
        longest = max(lengths)
        ratio = _tokens_for_one(inputs, renderer, prompts[:MEASURED])
        response = math.ceil(ratio * max_new_tokens)
        if longest + response <= limit:
            continue
        fitting = int((limit - longest) / ratio)
        ways = [f"lower --max-new-tokens to {fitting}"] if fitting > 0 else []
        beyond = [prompt for prompt, length in zip(prompts, lengths, strict=True) if length + response > limit]
        kept = min(len(renderer.prompt_ids(prompt.prompt)) for prompt in beyond) - 1
        if can_leave_out and kept > 0:
            drop = f"--max-prompt-tokens {kept} --too-long drop"
            ways.append(
                f"leave out the longest prompts with {drop} (truncate does not help, as rewards see whole prompts)"
            )
        ways.append("shorten the longest prompts")
        about = "" if ratio == 1 else f", {ratio:.2f} of its tokens for one of the policy's,"
        raise ConfigError(
            f"{name} reads {limit} tokens, but the prompt at {prompts[lengths.index(longest)].source} has {longest} there "
            f"and a response of --max-new-tokens {max_new_tokens}{about} {response}: {', '.join(ways)}, or use a "
            "reward model that reads more"
        )


def _tokens_for_one(inputs: RewardInputs, renderer: Renderer, prompts: Sequence[Prompt]) -> float:
    """How many tokens the texts have for a reward model, for each one that they have for the policy."""
    texts = [plain_text(prompt.prompt) for prompt in prompts]
    theirs, ours = (
        sum(len(tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids) for text in texts)
        for tokenizer in (inputs.tokenizer, renderer.tokenizer)
    )
    return theirs / ours if ours else 1.0
