"""Chat completions as OpenAI defines them, and many servers speak them: the request, and what its answer holds."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from heedful.configs.judging import JudgeOptions
from heedful.rewards.endpoint import Endpoint, NoAnswerError
from heedful.rewards.returned import Problem

WHOLE = ("", "stop", "eos", "eos_token", "end_turn", "stop_sequence")
"""What servers call the end of an answer that the model ended itself."""
OF_THE_REQUEST = (400, 413, 422)
"""Statuses that refuse one request, because of its text or its settings. Others refuse all."""


class Said(NamedTuple):
    """What a judge answered."""

    text: str | Problem
    """A problem if there is no text."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_final: bool = False
    """True if the same request would be answered the same."""


@dataclass(frozen=True)
class ChatAPI:
    """The API of a model at an address."""

    endpoint: Endpoint
    model: str
    options: JudgeOptions

    def body(self, messages: Sequence[Mapping[str, str]]) -> bytes:
        """The request with a conversation."""
        settings = {"temperature": self.options.judge_temperature, "max_tokens": self.options.judge_max_tokens}
        request = {"model": self.model, "messages": messages} | {k: v for k, v in settings.items() if v is not None}
        return json.dumps(request, ensure_ascii=False).encode(errors="replace")  # lone surrogates are no text

    def read(self, status: int, answer: bytes) -> Said:
        """What an answer holds. Raises NoAnswerError if it is no chat completion, RewardError if all requests are refused."""
        shown = self.endpoint.shown(answer)
        if status in OF_THE_REQUEST:
            return Said(
                Problem(
                    f"was refused the request with status {status}: {shown}; if the message names a setting, change "
                    "--judge-temperature or --judge-max-tokens (None leaves it out); if the text is too long, lower "
                    "--max-new-tokens"
                ),
                is_final=True,
            )
        if status != 200:
            raise self.endpoint.error(f" refused the request with status {status}: {shown}; {self._remedy(status)}")
        try:
            content = json.loads(answer)
            choice = content["choices"][0]
            message, reason = choice["message"], choice.get("finish_reason")
            text, refusal = message.get("content"), message.get("refusal")
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise NoAnswerError(f"no chat completion, but {shown}") from error
        usage = content.get("usage")
        text = self._text(text, refusal, reason)
        return Said(text, _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))

    def _text(self, text: Any, refusal: Any, reason: Any) -> str | Problem:
        ended = self.endpoint.hidden(repr(reason))[:40]
        if isinstance(refusal, str) and refusal:
            return Problem(f"refused to judge: {self.endpoint.hidden(refusal)!r:.200}")
        if reason == "length":
            limit = self.options.judge_max_tokens
            return Problem(
                f"was cut off before its verdict; raise --judge-max-tokens {limit}, or ask for less in the rubric"
            )
        if not isinstance(text, str) or not text.strip():
            return Problem(f"answered nothing (finish_reason {ended})")
        if reason is not None and str(reason).lower() not in WHOLE:
            return Problem(f"did not end its answer itself (finish_reason {ended})")
        return text

    def _remedy(self, status: int) -> str:
        variable = self.options.judge_key_env
        if status in (401, 403):
            has = "is not accepted" if self.endpoint.token else "is not set"
            return (
                f"it asks for an API key, and the environment variable {variable} {has}; set it, or name another one with "
                "--judge-key-env"
            )
        if status == 404:
            return f"there is no such address, or no model {self.model!r} there; write judge:http://HOST:PORT/v1#MODEL"
        return "correct the address or what the message names"


def address(base: str) -> str:
    """The address of chat completions below a base such as http://HOST/v1; its query stays."""
    parts = urlsplit(base)
    return parts._replace(path=f"{parts.path.rstrip('/')}/chat/completions", fragment="").geturl()


def _count(usage: Any, name: str) -> int:
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if isinstance(count, int) and count > 0 else 0
