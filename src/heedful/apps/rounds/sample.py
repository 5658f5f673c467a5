"""``heedful sample``: several answers per prompt, in a file for labelling; and answers for the labelling server.

The server never loads torch. It starts this process for answers and exchanges JSON lines with it:

    python -m heedful.apps.rounds.sample FILE.yaml

FILE.yaml holds the settings of `heedful.configs.tools.SampleWorkerConfig`. The first line on standard output is
``{"ready": {"models": [...]}}``, or ``{"error": sentence}`` if the models cannot be loaded. Then for each line

    {"id": 1, "prompts": [...], "answers": 2}

on standard input (a prompt is a string or a list of messages), one line comes back, in order:

    {"id": 1, "answers": [[{"response": ..., "source": {...}}, ...], ...]}    or    {"id": 1, "error": sentence}

The same requests in the same order get the same answers. The process ends when its standard input does.
"""

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from heedful.configs.parse import parse
from heedful.configs.tools import AnswerOptions, SampleConfig, SampleWorkerConfig
from heedful.data.chat import Renderer
from heedful.data.fitting import added, check_dropped, prompt_room
from heedful.data.learned import ask
from heedful.data.loading import answerable, encode_prompts, read_usable
from heedful.data.messages import as_dict, read_conversation
from heedful.data.readers import fault_in, parse_json
from heedful.data.schemas import read_prompts
from heedful.data.splits import split_by_prompt
from heedful.display import say
from heedful.engines.sampler import Sampler, make_sampler, with_graphs
from heedful.errors import DataError, HeedfulError
from heedful.evaluate.measuring import load_frozen
from heedful.files import check_output_file, to_json, write_text
from heedful.models.policy import Policy
from heedful.models.shape import context_length
from heedful.models.source import load_config, resolve
from heedful.models.tokenizer import load_chat_tokenizer
from heedful.types import Prompt, SpecialTokens

MOST_ANSWERS = 64
"""Most answers per prompt of one request to the process."""
Row = dict[str, Any]
Answer = dict[str, Any]
"""``response``, its text, and ``source``: ``checkpoint``, ``temperature``, ``top_k``, ``top_p``, ``max_new_tokens``, ``seed``
and ``truncated`` (True if the answer was cut off by its length)."""


@dataclass(frozen=True)
class Writer:
    """A policy that is ready to answer."""

    name: str
    """As given by the user."""
    policy: Policy
    sampler: Sampler
    longest_prompt: int
    """In tokens; leaves room for an answer."""


def sample_answers(config: SampleConfig) -> dict[str, int]:
    """Write answers to prompts into ``config.output``, and return their counts and the counts of dropped ones.

    A line has ``prompt``, ``responses`` (each with ``response`` and ``source``) and the record's other columns. An answer
    that is empty or only white space is dropped and counted (``dropped_empty``), and so is a prompt without answers
    (``dropped_prompts``). Raises ConfigError, DataError and CheckpointError before anything is written.
    """
    _check_output(config)
    prompts, unusable = read_usable(read_prompts, config.data, config)
    counts = {"records": len(prompts) + unusable["dropped_unusable"], **unusable}
    check_dropped(counts, max_dropped=config.max_dropped, path=config.data)
    if config.eval_fraction:
        prompts = split_by_prompt(prompts, config.eval_fraction)[0]
    if config.max_prompts is not None and config.max_prompts < len(prompts):
        chosen = random.Random(f"prompts {config.seed}").sample(range(len(prompts)), config.max_prompts)
        prompts = [prompts[row] for row in sorted(chosen)]
    writers = load_writers(config, config.special_tokens)
    renderers, limits = [one.sampler.renderer for one in writers], [one.longest_prompt for one in writers]
    prompts, long = answerable(prompts, renderers, limits, config)
    _ask(writers, prompts, config, columns=config.columns)
    written = write_answers(writers, prompts, config, answers=config.answers, seed=config.seed)
    rows = [_row(prompt, answers) for prompt, answers in zip(prompts, written, strict=True)]
    rows = [row for row in rows if row["responses"]]
    counts = added(counts, long)
    check_dropped(counts, max_dropped=config.max_dropped, path=config.data)
    if not rows:
        raise DataError(f"every answer to {config.data} is empty: {config.models[0]} has not learned to answer yet")
    kept = [answer for row in rows for answer in row["responses"]]
    cut = sum(answer["source"]["truncated"] for answer in kept)
    if cut and config.response_length == "stop":
        say(
            f"{cut} of {len(kept)} answers ({cut / len(kept):.1%}) were cut at --max-new-tokens {config.max_new_tokens}; "
            "raise it, or people compare unfinished texts"
        )
    write_rows(config.output, rows)
    empty = {"dropped_empty": len(prompts) * config.answers - len(kept), "dropped_prompts": len(prompts) - len(rows)}
    dropped = {name: count for name, count in counts.items() if name != "records" and count}
    return {"prompts": len(rows), "answers": len(kept), **empty, **dropped}


def _row(prompt: Prompt, answers: Sequence[Answer]) -> Row:
    """A line of the file, without the answers that are empty."""
    said = prompt.prompt
    asked = said if isinstance(said, str) else [as_dict(message) for message in said]
    tools = "" if isinstance(said, str) else said[0].tools
    columns = {name: value for name, value in prompt.columns.items() if name not in ("prompt", "responses", "tools")}
    responses = [answer for answer in answers if answer["response"].strip()]
    return {"prompt": asked, "responses": responses, **({"tools": json.loads(tools)} if tools else {}), **columns}


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write JSON Lines; the file is complete or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(f"{to_json(row)}\n" for row in rows))


def _check_output(config: SampleConfig) -> None:
    """Check that the output can be written and overwrites no other file. Raises ConfigError."""
    output = config.output
    check_output_file(
        output, "heedful sample", overwrite=config.overwrite, what="a .jsonl file", is_ours=lambda: _is_sample(output)
    )


def _is_sample(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            return "checkpoint" in json.loads(file.readline())["responses"][0]["source"]
    except (OSError, ValueError, LookupError, TypeError):
        return False


def load_writers(options: AnswerOptions, special_tokens: SpecialTokens = "literal") -> list[Writer]:
    """Load the models; ``special_tokens`` sets how they read special tokens in raw prompts.

    Raises ConfigError if the longest answer does not fit into a model's context, and CheckpointError.
    """
    sources = [resolve(name, options) for name in options.models]
    limits = [prompt_room(options.max_new_tokens, context_length(load_config(source))) for source in sources]
    writers = []
    for name, source, limit in zip(options.models, sources, limits, strict=True):
        policy = load_frozen(source, options)
        renderer = Renderer(load_chat_tokenizer(source, options), special_tokens)
        sampler = make_sampler(with_graphs(options, policy), renderer, policy, micro_batch=options.micro_batch)
        writers.append(Writer(name, policy, sampler, limit))
    return writers


def _ask(writers: Sequence[Writer], prompts: Sequence[Prompt], options: AnswerOptions, *, columns: str = "") -> None:
    """Warn once for each writer that learned conversations and is to answer strings."""
    for one in writers if not options.raw_prompts else ():
        generation_eos = one.policy.lm.generation_config.eos_token_id
        ask(one.name, one.sampler.renderer, prompts, generation_eos, columns=columns)


def write_answers(
    writers: Sequence[Writer], prompts: Sequence[Prompt], options: AnswerOptions, *, answers: int, seed: int
) -> list[list[Answer]]:
    """Sample ``answers`` answers per prompt; the i-th comes from writer i modulo their number.

    The same arguments give the same answers on one machine. Each writer has its own random numbers. A prompt that leaves no
    room for an answer is truncated, as trainers truncate it.
    """
    written: list[dict[int, Answer]] = [{} for _ in prompts]
    for place, writer in enumerate(writers):
        places = range(place, answers, len(writers))
        renderer = writer.sampler.renderer
        encoded, _ = encode_prompts(
            prompts, renderer, max_length=writer.longest_prompt, action="truncate", learns=False
        )
        generator = torch.Generator().manual_seed((seed + place) % 2**63)
        responses = writer.sampler.generate(writer.policy, [one for one in encoded for _ in places], generator)
        rows = ((row, at) for row in range(len(prompts)) for at in places)
        for (row, at), completion in zip(rows, responses.completions, strict=True):
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
    return [[row[at] for at in range(answers)] for row in written]


def serve(config: SampleWorkerConfig, requests: IO[str], answers: IO[str]) -> int:
    """Answer requests until the input ends, and return the exit status."""
    try:
        writers = load_writers(config)
    except HeedfulError as error:
        _say(answers, {"error": str(error)})
        return error.status
    _say(answers, {"ready": {"models": list(config.models)}})
    for number, line in enumerate(requests):
        identity = None
        seed = (config.seed + 1_000_003 * number) % 2**63
        try:
            request = parse_json(line)
            identity = request.get("id") if isinstance(request, dict) else None
            prompts, count = _read_request(request)
            if number == 0:
                _ask(writers, prompts, config)
            _say(
                answers, {"id": identity, "answers": write_answers(writers, prompts, config, answers=count, seed=seed)}
            )
        except HeedfulError as error:
            _say(answers, {"id": identity, "error": str(error)})
        except ValueError as error:
            _say(answers, {"id": identity, "error": f"not a JSON line: {error}"})
    return 0


def _read_request(request: Any) -> tuple[list[Prompt], int]:
    """The prompts of a request, and how many answers each gets. Raises DataError."""
    fault = fault_in(request)
    if fault is not None or not isinstance(request, dict):
        raise DataError(f"a request must be an object with id, prompts and answers; {fault or f'got {request!r:.80}'}")
    prompts, count = request.get("prompts"), request.get("answers", 2)
    if not isinstance(prompts, list) or not prompts:
        raise DataError(f"prompts must be a list of strings or of conversations, got {prompts!r:.80}")
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_ANSWERS:
        raise DataError(f"answers must be a number from 1 to {MOST_ANSWERS}, got {count!r:.80}")
    read = []
    for i, one in enumerate(prompts):
        is_text = isinstance(one, str) and one.strip()
        read.append(Prompt(one if is_text else read_conversation(f"prompts[{i}]", "prompt", one), f"prompts[{i}]"))
    return read, count


def _say(answers: IO[str], content: dict[str, Any]) -> None:
    answers.write(json.dumps(json.loads(to_json(content)), ensure_ascii=True) + "\n")
    answers.flush()


def main() -> int:
    """Answer a server's requests; the command line names the settings file."""
    try:
        config = parse(SampleWorkerConfig, sys.argv[1:], prog="heedful.apps.rounds.sample")
    except HeedfulError as error:
        _say(sys.stdout, {"error": str(error)})
        return error.status
    replies, sys.stdout = sys.stdout, sys.stderr  # keep prints of libraries out of the replies
    requests = open(sys.stdin.fileno(), encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115  open to the end
    return serve(config, requests, replies)


if __name__ == "__main__":
    sys.exit(main())
