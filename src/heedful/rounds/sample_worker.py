"""A process that answers prompts for a server, which itself never loads torch: JSON lines in, JSON lines out.

    python -m heedful.rounds.sample_worker FILE.yaml

FILE.yaml holds the settings of `heedful.configs.tools.SampleWorkerConfig`. The first line on standard output is
``{"ready": {"models": [...]}}``, or ``{"error": sentence}`` if the models cannot be loaded. Then, for each line

    {"id": 1, "prompts": [...], "answers": 2}

on standard input (a prompt is a string or a list of messages), one line comes back, in order:

    {"id": 1, "answers": [[{"response": ..., "source": {...}}, ...], ...]}    or    {"id": 1, "error": sentence}

The same requests in the same order get the same answers. The process ends when its standard input does.
"""

import json
import sys
from typing import IO, Any

from heedful.configs.parse import parse
from heedful.configs.tools import SampleWorkerConfig
from heedful.data.messages import read_conversation
from heedful.data.readers import fault_in, parse_json
from heedful.errors import DataError, HeedfulError
from heedful.files import to_json
from heedful.rounds.sample import Writer, load_writers, write_answers
from heedful.types import Prompt, Text

MOST_ANSWERS = 64
"""Most answers per prompt of one request."""


def serve(config: SampleWorkerConfig, requests: IO[str], answers: IO[str]) -> int:
    """Answer requests until there are no more, and return the exit status."""
    try:
        writers = load_writers(config)
    except HeedfulError as error:
        _say(answers, {"error": str(error)})
        return error.status
    _say(answers, {"ready": {"models": list(config.models)}})
    for number, line in enumerate(requests):
        _say(answers, answer(config, writers, line, seed=(config.seed + 1_000_003 * number) % 2**63))
    return 0


def answer(config: SampleWorkerConfig, writers: list[Writer], line: str, *, seed: int) -> dict[str, Any]:
    """The reply to one request."""
    identity = None
    try:
        request = parse_json(line)
        identity = request.get("id") if isinstance(request, dict) else None
        prompts, count = _read(request)
        return {"id": identity, "answers": write_answers(writers, prompts, config, answers=count, seed=seed)}
    except HeedfulError as error:
        return {"id": identity, "error": str(error)}
    except ValueError as error:
        return {"id": identity, "error": f"not a JSON line: {error}"}


def _read(request: Any) -> tuple[list[Prompt], int]:
    """The prompts of a request, and how many answers each gets. Raises DataError."""
    fault = fault_in(request)
    if fault is not None or not isinstance(request, dict):
        raise DataError(f"a request is an object with id, prompts and answers; {fault or f'got {request!r:.80}'}")
    prompts, count = request.get("prompts"), request.get("answers", 2)
    if not isinstance(prompts, list) or not prompts:
        raise DataError(f"prompts is {prompts!r:.80}; it must be a list of strings or of conversations")
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_ANSWERS:
        raise DataError(f"answers is {count!r:.80}; it must be a number from 1 to {MOST_ANSWERS}")
    return [Prompt(_prompt(one, f"prompts[{i}]"), f"prompts[{i}]") for i, one in enumerate(prompts)], count


def _prompt(value: Any, place: str) -> Text:
    return value if isinstance(value, str) and value.strip() else read_conversation(place, "prompt", value)


def _say(answers: IO[str], content: dict[str, Any]) -> None:
    answers.write(json.dumps(json.loads(to_json(content)), ensure_ascii=True) + "\n")
    answers.flush()


def main() -> int:
    """Run the worker with the settings in the file that the command line names."""
    try:
        config = parse(SampleWorkerConfig, sys.argv[1:], prog="heedful.rounds.sample_worker")
    except HeedfulError as error:
        _say(sys.stdout, {"error": str(error)})
        return error.status
    replies, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no reply
    requests = open(sys.stdin.fileno(), encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115  open to the end
    return serve(config, requests, replies)


if __name__ == "__main__":
    sys.exit(main())
