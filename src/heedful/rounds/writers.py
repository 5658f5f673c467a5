"""Models that write answers to prompts, each answer with a note of what wrote it and how."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from heedful.configs.sample import AnswerOptions
from heedful.data.chat import Renderer
from heedful.data.fitting import prompt_room
from heedful.data.loading import encode_prompts
from heedful.data.messages import as_dict
from heedful.kernels.device import frozen_place, resolve_device
from heedful.models.context import context_length
from heedful.models.load import load_policy
from heedful.models.policy import Policy, freeze
from heedful.models.source import load_config, resolve
from heedful.models.tokenizer import load_chat_tokenizer
from heedful.sampling.sampler import Sampler, make_sampler
from heedful.types import Prompt, SpecialTokens, Text

Answer = dict[str, Any]
"""``response``, its text, and ``source``: ``checkpoint``, ``temperature``, ``top_k``, ``top_p``, ``max_new_tokens``, ``seed``
and ``truncated`` (True if the answer was cut off by its length)."""


@dataclass(frozen=True)
class Writer:
    """A policy that is ready to answer."""

    name: str
    """As the user called it."""
    policy: Policy
    sampler: Sampler
    room: int
    """The longest prompt in tokens that leaves room for an answer."""


def load_writers(options: AnswerOptions, special_tokens: SpecialTokens = "literal") -> list[Writer]:
    """Load the models, which read special tokens in raw prompts as ``special_tokens`` says.

    Raises ConfigError if the longest answer does not fit into one's context, CheckpointError.
    """
    device = resolve_device(options.device)
    sources = [resolve(name, options) for name in options.models]
    rooms = [prompt_room(options.max_new_tokens, context_length(load_config(source))) for source in sources]
    writers = []
    for name, source, room in zip(options.models, sources, rooms, strict=True):
        policy = load_policy(source, **frozen_place(device, options.dtype))
        freeze(policy)
        renderer = Renderer(load_chat_tokenizer(source, options), special_tokens)
        writers.append(
            Writer(name, policy, make_sampler(options, renderer, policy, micro_batch=options.micro_batch), room)
        )
    return writers


def write_answers(
    writers: Sequence[Writer], prompts: Sequence[Prompt], options: AnswerOptions, *, answers: int, seed: int
) -> list[list[Answer]]:
    """Sample answers to each prompt; the i-th of a prompt is by the i-th writer, counted in a circle.

    The same arguments give the same answers on one machine. Every writer draws with random numbers of its own. A prompt that
    leaves no room for an answer is cut, as trainers cut it.

    Args:
        writers: the models.
        prompts: what to answer.
        options: how to sample.
        answers: how many per prompt.
        seed: of the random numbers.
    """
    written: list[list[Answer | None]] = [[None] * answers for _ in prompts]
    for place, writer in enumerate(writers):
        places = range(place, answers, len(writers))
        renderer = writer.sampler.renderer
        encoded, _ = encode_prompts(prompts, renderer, max_length=writer.room, action="truncate", learns=False)
        generator = torch.Generator().manual_seed((seed + place) % 2**63)
        _, completions = writer.sampler.respond(writer.policy, [one for one in encoded for _ in places], generator)
        rows = ((row, at) for row in range(len(prompts)) for at in places)
        for (row, at), completion in zip(rows, completions, strict=True):
            written[row][at] = {
                "response": completion.response,
                "source": {
                    "checkpoint": writer.name,
                    "temperature": options.temperature,
                    "top_k": options.top_k,
                    "top_p": options.top_p,
                    "max_new_tokens": options.max_new_tokens,
                    "seed": seed,
                    "truncated": completion.truncated,
                },
            }
    return [[answer for answer in row if answer is not None] for row in written]


def as_json(prompt: Text) -> Any:
    """A prompt as JSON has it: raw text, or a list of messages."""
    return prompt if isinstance(prompt, str) else [as_dict(message) for message in prompt]
