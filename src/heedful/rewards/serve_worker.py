"""A process that holds a reward model and answers requests for its scores; `heedful.rewards.serve` starts it."""

import json
import math
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from heedful.configs.scoring import ServeRewardConfig
from heedful.display import harmless
from heedful.errors import CheckpointError, DataError, HeedfulError, RewardError, is_out_of_memory
from heedful.kernels.device import resolve_device, resolve_dtype
from heedful.models.source import resolve
from heedful.redact import redact
from heedful.rewards.models import ModelReward, load_model_reward
from heedful.rewards.score_request import RequestError, read_request
from heedful.serving.channel import FAILED, READY, receive, send
from heedful.types import MicroBatch

SHORTEST_LIMIT = 100_000
"""A text of so many characters is always tokenised, whatever the model can read."""
QUIET_SECONDS = 10.0
"""The least time between two lines about requests that failed."""
SAMPLE = (["你好"], ["Hi!"], [False])
"""What every worker scores when it starts, so that one that would score otherwise than its predecessor is noticed."""


def main(life: int, channel: int) -> None:
    """Load the model of the order that comes first, say that it is ready, and answer requests.

    Args:
        life: file descriptor of the socket to the process that has started this one, and with which it ends.
        channel: file descriptor of the socket to the process that receives requests.
    """
    with socket.socket(fileno=life) as starter, socket.socket(fileno=channel) as requests:
        order = receive(starter)
        if order is None:
            return
        threading.Thread(target=_end_with, args=(starter,), daemon=True).start()
        try:
            reward = _load(*pickle.loads(order[1]))
            device = next(reward.model.parameters()).device
            about = {"device": str(device), "threads": torch.get_num_threads(), "score": _sample(reward)}
            max_characters = longest_text(reward)
        except Exception as error:
            send(starter, FAILED, json.dumps(_reason(error)).encode())
            return
        send(starter, READY, json.dumps(about).encode())
        answer_requests(requests, reward, max_characters=max_characters)


def device_of(device: torch.device, index: int, count: int) -> torch.device:
    """Return where a worker computes: on a machine with several GPUs, on the one whose turn it is.

    Args:
        device: what ``--device`` means. One that it names with its number is for all workers.
        index: the worker, from 0.
        count: how many CUDA devices there are.
    """
    return torch.device("cuda", index % count) if device.type == "cuda" and device.index is None else device


def threads_of(config: ServeRewardConfig, device: torch.device) -> int:
    """Return with how many threads a worker computes: on a CPU its share, unless OMP_NUM_THREADS says how many."""
    threads = torch.get_num_threads()
    return threads if device.type != "cpu" or "OMP_NUM_THREADS" in os.environ else max(1, threads // config.workers)


def answer_requests(channel: socket.socket, reward: ModelReward, *, max_characters: int) -> None:
    """Answer one request after the other, until the process that receives them ends.

    Args:
        channel: where they come from.
        reward: scores the responses.
        max_characters: the longest text that is tokenised.
    """
    log = _Log()
    while (message := receive(channel)) is not None:
        status, content = answer(reward, message[1], max_characters=max_characters, log=log)
        send(channel, status, json.dumps(content, ensure_ascii=False).encode())


def answer(
    reward: ModelReward, body: bytes | bytearray, *, max_characters: int, log: Callable[[str], None]
) -> tuple[int, dict[str, Any]]:
    """Return the status and the content of the answer to one request.

    What is wrong with the request is said to whoever sent it; what is wrong with the server, only to ``log``. Raises
    SystemExit, with what to say of it, if the GPU can compute nothing any more in this process.
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
            raise SystemExit(
                redact(harmless(f"heedful: scoring failed for good: {type(error).__name__}: {error}"))
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


class _Log:
    """Writes lines to standard error, but not more often than every `QUIET_SECONDS`."""

    def __init__(self) -> None:
        self._next = 0.0
        self._left_out = 0

    def __call__(self, text: str) -> None:
        if time.monotonic() < self._next:
            self._left_out += 1
            return
        more = f" ({self._left_out} more since the last such line)" if self._left_out else ""
        self._next, self._left_out = time.monotonic() + QUIET_SECONDS, 0
        print(f"heedful: {redact(harmless(text))}{more}", file=sys.stderr, flush=True)


def _load(config: ServeRewardConfig, index: int) -> ModelReward:
    device = device_of(resolve_device(config.device), index, torch.cuda.device_count())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(threads_of(config, device))
    return load_model_reward(
        resolve(config.model, config),
        device=device,
        compute_dtype=resolve_dtype(config.dtype, device),
        micro_batch=MicroBatch(config.micro_batch_size),
    )


def _sample(reward: ModelReward) -> float | None:
    """Score the sample; None if the model cannot."""
    try:
        (score,) = reward(*SAMPLE)
    except (RewardError, DataError):
        return None
    return score if math.isfinite(score) else None


def _reason(error: Exception) -> dict[str, str]:
    """What kind of error it is, and its text. Raises it again if it is a mistake of our own."""
    if isinstance(error, HeedfulError):
        return {"kind": type(error).__name__, "text": str(error)}
    if is_out_of_memory(error):
        return {"kind": "MemoryFullError", "text": "memory ran out while a worker loaded the model"}
    raise error


def _is_end_of_device(error: Exception) -> bool:
    """Whether every later call on the GPU would fail in this process too, as after an illegal access to its memory."""
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)


def _end_with(starter: socket.socket) -> None:
    """End this process, whatever it does, when the one that has started it has ended."""
    receive(starter)
    os._exit(0)
