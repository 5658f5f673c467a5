"""Answer a request for scores (docs/rewards.md has the protocol). What is wrong with it is said to whoever sent it."""

import json
import math
import reprlib
from collections.abc import Callable
from typing import Any

from heedful.data.messages import read_message, read_tools
from heedful.errors import CheckpointError, DataError, MachineError, RewardError, is_out_of_memory
from heedful.rewards.models import ModelReward

SHORTEST_LIMIT = 100_000
"""A text of so many characters is always tokenised, whatever the model can read."""

Answer = tuple[int, dict[str, Any]]
"""The status and the content of an answer."""


class RequestError(ValueError):
    """A request that does not follow the protocol; the message says where."""


def answer(reward: ModelReward, body: bytes | bytearray, *, max_characters: int, log: Callable[[str], None]) -> Answer:
    """Answer one request.

    Args:
        reward: scores the responses.
        body: the request.
        max_characters: the longest text that is tokenised; `longest_text` says what suits the model.
        log: is told what is wrong with the server; what is wrong with the request is only answered.

    Raises MachineError if the GPU can compute nothing any more in this process.
    """
    try:
        prompts, completions, truncated = read_request(body, max_characters=max_characters)
        scores = reward(prompts, completions, truncated) if completions else []
    except (RequestError, RewardError, DataError) as error:
        return 400, {"error": str(error)}
    except CheckpointError as error:
        log(f"a conversation could not be rendered: {error}")
        return 400, {"error": "the model's chat template cannot render a conversation; the server's log says why"}
    except Exception as error:
        if _is_end_of_device(error):
            raise MachineError(
                f"the GPU can compute nothing any more in this process ({type(error).__name__}: {error}); start the server "
                "again"
            ) from error
        log(f"scoring failed: {type(error).__name__}: {error}")
        return 500, {"error": "scoring failed; the server's log says why"}
    if not all(map(math.isfinite, scores)):
        log("the reward model gave a score that is not finite")
        return 500, {"error": "the reward model gave a score that is not finite"}
    return 200, {"scores": scores}


def longest_text(reward: ModelReward) -> int:
    """Return the most characters that a text may have to be tokenised at all: more cannot be short enough for the model.

    No token stands for more characters than its own name has, unless a tokenizer drops or merges what it does not know,
    which `SHORTEST_LIMIT` leaves room for.
    """
    longest_token = max(map(len, reward.inputs.tokenizer.get_vocab()))
    return max(SHORTEST_LIMIT, reward.model.max_length * longest_token)


def read_request(body: bytes | bytearray, *, max_characters: int) -> tuple[list[Any], list[Any], list[bool]]:
    """Return the prompts, completions and ``truncated`` flags of a request. Raises RequestError.

    Each prompt and completion is a string or a list of messages.

    Args:
        body: the request.
        max_characters: the most characters of a prompt or completion; no longer one could be short enough for the model.
    """
    content = _read_json(body)
    if not isinstance(content, dict):
        raise RequestError(f'the request must be a JSON object with "prompts" and "completions", got {_short(content)}')
    for key in ("prompts", "completions"):
        if not isinstance(content.get(key), list):
            raise RequestError(f'"{key}" must be a list, got {_short(content.get(key))}')
    prompts, completions = content["prompts"], content["completions"]
    truncated = content.get("truncated", [False] * len(completions))
    if not isinstance(truncated, list) or not all(isinstance(cut, bool) for cut in truncated):
        raise RequestError(f'"truncated" must be a list of true and false, got {_short(truncated)}')
    if not len(prompts) == len(completions) == len(truncated):
        raise RequestError(
            f'"prompts", "completions" and "truncated" must have the same length, got {len(prompts)}, {len(completions)} and '
            f"{len(truncated)}"
        )
    for key, texts in (("prompts", prompts), ("completions", completions)):
        for i, text in enumerate(texts):
            _check_text(f"{key}[{i}]", text, max_characters)
    return prompts, completions, truncated


def _read_json(body: bytes | bytearray) -> Any:
    try:
        return json.loads(body, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise RequestError(f"the request is not JSON: {error}") from error
    except UnicodeDecodeError as error:
        raise RequestError("the request is not JSON: it is not UTF-8") from error
    except RecursionError as error:
        raise RequestError("the request is not JSON that can be read: it is nested too deeply") from error
    except ValueError as error:
        raise RequestError("the request is not JSON that can be read: a number has too many digits") from error


def _integer(digits: str) -> int:
    """An integer, read by Python code: within a long list of them other threads have their turn, which json's C code does not
    give them."""
    return int(digits)


def _check_text(place: str, text: Any, max_characters: int) -> None:
    """Raise RequestError if a text is not a string or a list of messages, is too long, or cannot be written as UTF-8."""
    is_chat = isinstance(text, list) and bool(text) and all(_is_message(message) for message in text)
    if not isinstance(text, str) and not is_chat:
        raise RequestError(
            f'{place} must be a string or a list of messages {{"role": "...", "content": "..."}}, got {_short(text)}'
        )
    written = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    if len(written) > max_characters:
        raise RequestError(
            f"{place} has {len(written)} characters; the reward model cannot read more than {max_characters}, "
            "whatever they are"
        )
    try:
        written.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{place} contains half a character (a lone surrogate), which is not text") from error
    for i, message in enumerate(text if isinstance(text, list) else []):
        _check_extras(f"{place}[{i}]", message)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _check_extras(place: str, message: dict[str, Any]) -> None:
    """Raise RequestError if a message has thinking, tools or calls of another form than heedful sends."""
    more = {key: value for key, value in message.items() if key != "tools"}
    try:
        read_tools("the request", message.get("tools"))
        if more.keys() != {"role", "content"}:
            read_message("the request", place, more)
    except DataError as error:
        raise RequestError(str(error)) from error


def _short(value: Any) -> str:
    """Return the beginning of a value's repr, without making all of it, which may be long."""
    return f"{reprlib.repr(value):.80}"


def _is_end_of_device(error: Exception) -> bool:
    """Whether every later call on the GPU would fail in this process too, as after an illegal access to its memory."""
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)
