"""``heedful sample``: several answers to each prompt, in a file for people to compare.

`load_writers` and `write_answers` are for all who want answers of models with a note of what wrote them and how.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from heedful.configs.tools import AnswerOptions, SampleConfig
from heedful.data.chat import Renderer
from heedful.data.fitting import Counts, Refusal, added, check_dropped, each_rendered, prompt_room, settle, too_long
from heedful.data.loading import encode_prompts, encoded_prompt, read_usable
from heedful.data.messages import as_dict
from heedful.data.schemas import read_prompts
from heedful.data.splits import split_by_prompt
from heedful.errors import ConfigError, DataError
from heedful.files import blocking_file, to_json, write_text
from heedful.kernels.device import frozen_place, resolve_device
from heedful.models.load import load_policy
from heedful.models.policy import Policy, freeze
from heedful.models.shape import context_length
from heedful.models.source import load_config, resolve
from heedful.models.tokenizer import load_chat_tokenizer
from heedful.sampling.sampler import Sampler, make_sampler
from heedful.types import Prompt, SpecialTokens, Text

Row = dict[str, Any]
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


def sample(config: SampleConfig) -> dict[str, int]:
    """Write answers to prompts into ``config.output``, and return counts of both and of what was left out.

    A line has ``prompt``, ``responses`` (each with ``response`` and ``source``) and the record's other columns. An answer
    that is empty or only white space is left out and counted (``dropped_empty``), as is a prompt that then has none
    (``dropped_prompts``). Raises ConfigError, DataError and CheckpointError before anything is written.
    """
    check_output(config)
    prompts, counts = chosen_prompts(config)
    writers = load_writers(config, config.special_tokens)
    prompts, long = _readable(writers, prompts, config)
    rows, done = sampled_rows(writers, prompts, config)
    counts = added(counts, long)
    check_dropped(counts, max_dropped=config.max_dropped, path=config.data)
    if not rows:
        raise DataError(f"every answer to {config.data} is empty: {config.models[0]} has not learned to answer yet")
    config.output.parent.mkdir(parents=True, exist_ok=True)
    write_text(config.output, "".join(f"{to_json(row)}\n" for row in rows))
    return done | {name: count for name, count in counts.items() if name != "records" and count}


def check_output(config: SampleConfig) -> None:
    """Check that the output can be written and that no file is lost that nobody gave up. Raises ConfigError."""
    output = config.output
    if output.is_dir():
        raise ConfigError(f"--output {output} is a folder; name a .jsonl file")
    blocking = blocking_file(output)
    if blocking is not None:
        raise ConfigError(f"--output {output} cannot be written: {blocking} is a file")
    if not output.exists():
        return
    if not _is_ours(output):
        raise ConfigError(
            f"--output {output} exists and is not what heedful sample writes, so it is left alone; choose another name"
        )
    if not config.overwrite:
        raise ConfigError(f"--output {output} exists; choose another name, or add --overwrite to replace it")


def chosen_prompts(config: SampleConfig) -> tuple[list[Prompt], Counts]:
    """Read the prompts to answer: without those that trainers hold out, and as many as the settings say; and the counts.

    Raises DataError, also if more records were dropped than ``config.max_dropped`` allows.
    """
    prompts, unusable = read_usable(read_prompts, config.data, config)
    counts = {"records": len(prompts) + unusable["dropped_unusable"], **unusable}
    check_dropped(counts, max_dropped=config.max_dropped, path=config.data)
    if config.eval_fraction:
        prompts = split_by_prompt(prompts, config.eval_fraction)[0]
    return drawn(prompts, config.max_prompts, f"prompts {config.seed}"), counts


def drawn(prompts: Sequence[Prompt], number: int | None, seed: str) -> list[Prompt]:
    """Draw ``number`` prompts without replacement, in their own order; all if there are not more, or it is None."""
    if number is None or number >= len(prompts):
        return list(prompts)
    return [prompts[row] for row in sorted(random.Random(seed).sample(range(len(prompts)), number))]


def _readable(
    writers: Sequence[Writer], prompts: Sequence[Prompt], config: SampleConfig
) -> tuple[list[Prompt], Counts]:
    """The prompts that leave every writer room for an answer, or all of them if longer ones are cut; and how many do not."""
    found: set[int] = set()
    refused: list[Refusal] = []
    for writer in writers:
        prompts, _ = each_rendered(prompts, partial(encoded_prompt, renderer=writer.sampler.renderer), refused)
    unusable = settle(refused, len(prompts), config)
    for writer in writers:
        lengths = [len(writer.sampler.renderer.prompt_ids(prompt.prompt)) for prompt in prompts]
        sources = [prompt.source for prompt in prompts]
        found |= set(too_long(lengths, sources, limit=writer.room, action=config.too_long, what="prompts"))
    if config.too_long == "truncate":
        return list(prompts), unusable | {"truncated": len(found)}
    kept = [prompt for row, prompt in enumerate(prompts) if row not in found]
    return kept, unusable | {"dropped_too_long": len(found)}


def sampled_rows(
    writers: Sequence[Writer], prompts: Sequence[Prompt], config: SampleConfig
) -> tuple[list[Row], dict[str, int]]:
    """The lines of the file, and the counts that `sample` returns."""
    written = write_answers(writers, prompts, config, answers=config.answers, seed=config.seed)
    kept = [[answer for answer in answers if _has_text(answer)] for answers in written]
    rows = [_row(prompt, answers) for prompt, answers in zip(prompts, kept, strict=True) if answers]
    answers = sum(map(len, kept))
    return rows, {
        "prompts": len(rows),
        "answers": answers,
        "dropped_empty": len(prompts) * config.answers - answers,
        "dropped_prompts": len(prompts) - len(rows),
    }


def _row(prompt: Prompt, answers: Sequence[Answer]) -> Row:
    tools = "" if isinstance(prompt.prompt, str) else prompt.prompt[0].tools
    columns = {name: value for name, value in prompt.columns.items() if name not in ("prompt", "responses", "tools")}
    offered = {"tools": json.loads(tools)} if tools else {}
    return {"prompt": as_json(prompt.prompt), "responses": list(answers), **offered, **columns}


def _has_text(answer: Answer) -> bool:
    return bool(answer["response"].strip())


def _is_ours(path: Any) -> bool:
    """Whether a file is what `sample` writes: its first line has answers that say where they come from."""
    try:
        with path.open(encoding="utf-8") as file:
            first = json.loads(file.readline())
        return "checkpoint" in first["responses"][0]["source"]
    except (OSError, ValueError, LookupError, TypeError):
        return False


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
