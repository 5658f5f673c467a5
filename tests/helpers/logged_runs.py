"""Run folders' responses as trainers write them, made without training; and the data of a page, unpacked."""

import base64
import json
import re
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from heedful.algorithms.online.rollout_files import MESSAGES, OF_TOKENS
from heedful.models import byte_tokenizer

NASTY = (
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "\"'><img src=x onerror=alert(3)>",
    "\u202egnp.exe\u2066 \u0007\x1b[31m ]]> -->",
    "你好，世界",
)
"""What texts of models and data may hold."""


TOKENIZER = byte_tokenizer()


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False).input_ids


def episode(*messages, rewards, ended="environment", failure=None):
    """Columns of an episode. A turn of the policy is the content of a message, a token a byte; so is what others say."""
    ends, others = [], []
    for message in messages:
        ids = ids_of(message["content"])
        if message["role"] == "assistant":
            ends.append(len(ids) + (ends[-1] if ends else 0))
            others.append([])
        else:
            others[-1] += ids
    return {
        "turns": list(messages),
        "turn_ends": ends,
        "other_ids": others,
        "turn_rewards": rewards,
        "ended": ended,
        "failure": failure,
    }


CALLS = [{"type": "function", "function": {"name": "guess", "arguments": '{"word": "苹果"}'}, "id": "call00001"}]
GAME = episode(
    {"role": "assistant", "content": "猜 ", "tool_calls": CALLS},
    {"role": "tool", "content": "{'no': 1}\n<b>再来</b>", "name": "guess", "tool_call_id": "call00001"},
    {"role": "assistant", "content": "是的"},
    {"role": "user", "content": "对"},
    {"role": "assistant", "content": "好"},
    rewards=[-0.1, 0.25, 7.0],
    ended="turns",
)
"""An episode with a tool: three turns of 4, 6 and 3 tokens."""
BROKEN = episode({"role": "assistant", "content": "坏"}, rewards=[0.0], failure="Guess raised RuntimeError: 坏了")
UNBEGUN = episode(rewards=[], failure="Guess raised RuntimeError: 没有")
PLAYED = [("猜词", "猜 是的好"), ("猜词", "坏"), ("猜词", "x")]
"""The prompts and responses of these three; the last one's is what fills the place of one that did not begin."""


OF_EPISODES = {
    "turns": MESSAGES,
    "turn_ends": pa.list_(pa.int32()),
    "other_ids": pa.list_(pa.list_(pa.int32())),
    "turn_rewards": pa.list_(pa.float64()),
    "ended": pa.string(),
    "failure": pa.string(),
}


def write_rollouts(folder, step, responses, *, columns=True, rewards=None, episodes=()):
    generator = np.random.default_rng(step)
    ids = [ids_of(response) for _, response in responses]
    parts = rewards or [{"length": float(len(response))} for _, response in responses]
    table = {
        "step": pa.array([step] * len(ids), pa.int32()),
        "prompt": pa.array([prompt for prompt, _ in responses]),
        "response": pa.array([response for _, response in responses]),
        "prompt_ids": pa.array([ids_of(prompt) for prompt, _ in responses], pa.list_(pa.int32())),
        "response_ids": pa.array(ids, pa.list_(pa.int32())),
        "logprobs": pa.array([[-0.5] * len(one) for one in ids], pa.list_(pa.float32())),
        "score": pa.array([sum(part.values()) * step for part in parts], pa.float64()),
        "rewards": pa.array([{name: value * step for name, value in part.items()} for part in parts]),
        "kl": pa.array([0.1 * step * (row + 1) for row in range(len(ids))], pa.float64()),
        "finish_reason": pa.array(["stop"] * len(ids)),
        "source": pa.array([f"prompts.jsonl:{row + 1}" for row in range(len(ids))]),
    }
    if columns:
        for name in OF_TOKENS:
            numbers = [generator.normal(size=len(one)).tolist() for one in ids]
            table[name] = pa.array(numbers, pa.list_(pa.float32()))
    for name, kind in OF_EPISODES.items() if episodes else ():
        table[name] = pa.array([one[name] for one in episodes], kind)
    pq.write_table(pa.table(table), folder / "rollouts" / f"step-{step:06d}.parquet")


def unpacked(page):
    """The inspector's data in a page: its header, token texts, and by its name each column of numbers."""
    (data,) = re.findall(r'<script type="text/plain" id="data">([^<]*)</script>', page)
    content = zlib.decompress(base64.b64decode(data))
    length = int.from_bytes(content[:4], "little")
    header = json.loads(content[4 : 4 + length])
    count = sum(len(entry[-1]) for entry in header["responses"])
    at = 4 + length
    texts = [header["vocabulary"][i] for i in np.frombuffer(content, "<u4", count, at).tolist()]
    at += 4 * count
    columns = {}
    for (name, _), scale in zip(header["quantities"], header["scales"], strict=True):
        high, low = (np.frombuffer(content, "u1", count, at + part * count).astype("<u2") for part in (0, 1))
        columns[name] = (high << 8 | low).view("<f2").astype(np.float64) * scale
        at += 2 * count
    assert at == len(content)
    return header, texts, columns
