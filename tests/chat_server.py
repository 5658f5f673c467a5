"""A server of chat completions in a process of its own: its model is the demo's gold judge, its faults are asked for.

``python chat_server.py PROMPTS.jsonl`` prints its port. What the judge is told to answer decides what it does: a score from 0
to 1 on which the gold judge agrees, the better one of two, or a ranking. POST /faults with JSON sets `Faults`; GET /seen says
what it has seen.
"""

import asyncio
import json
import random
import re
import sys
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from heedful.apps.demo.judge import gold_score

CUT = "\n(It was cut off here, because it had reached the longest length that was allowed.)"
PART = re.compile(r"<(prompt|response(?: \d+)?) (\w{8})>\n(.*?)\n</\1 \2>", re.DOTALL)


@dataclass
class Faults:
    """Shares of requests that are answered wrongly, and how long all take."""

    rate_limited: float = 0.0
    failing: float = 0.0
    html: float = 0.0
    garbage: float = 0.0
    delay: tuple[float, float] = (0.0, 0.0)
    """Shortest and longest."""
    mute: tuple[int, int] | None = None
    """``(n, r)``: it has no verdict on questions whose hash leaves r when divided by n."""
    by_hash: bool = False
    """Its score is a hash of the response, in the place of the gold judge's, which knows few grades of nonsense."""
    prefers: str | None = None
    """What it calls better of two, whatever they are."""
    dies_after: int | None = None
    """Requests after which it only answers 503."""


@dataclass
class Seen:
    """What clients did."""

    requests: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    slowest: float = 0.0
    """Of its own delays since this was set to 0 by POST /faults."""
    faults: int = 0


class GoldJudge:
    """The model."""

    def __init__(self, prompts: Path) -> None:
        records = map(json.loads, prompts.read_text(encoding="utf-8").splitlines())
        self.known = {record["prompt"]: (record["family"], record["answer"]) for record in records}

    def answer(self, system: str, user: str, faults: Faults) -> str:
        (_, prompt), *responses = [(name, text) for name, _, text in PART.findall(user)]
        family, answer = self.known[prompt]
        scores = [
            zlib.crc32(text.removesuffix(CUT).encode()) % 101 / 100
            if faults.by_hash
            else gold_score(family, answer, text.removesuffix(CUT), not text.endswith(CUT))
            for _, text in responses
        ]
        if "Score: NUMBER" in system:
            return f"It is what it is.\n\nScore: {scores[0]}"
        if "Better: tie" in system:
            by_score = "tie" if scores[0] == scores[1] else "1" if scores[0] > scores[1] else "2"
            return f"Better: {faults.prefers or by_score}"
        levels = sorted(set(scores), reverse=True)
        named = [" = ".join(str(i) for i, score in enumerate(scores, 1) if score == level) for level in levels]
        return f"**Ranking: {' > '.join(named)}**"


def application(judge: GoldJudge) -> Starlette:
    """The server."""
    state = {"faults": Faults(), "seen": Seen(), "spoiled": set()}
    draw = random.Random(0)

    async def complete(request: Request) -> Response:
        faults, seen = state["faults"], state["seen"]
        seen.requests += 1
        seen.in_flight += 1
        seen.most_in_flight = max(seen.most_in_flight, seen.in_flight)
        try:
            body = json.loads(await request.body())
            delay = draw.uniform(*faults.delay)
            seen.slowest = max(seen.slowest, delay)
            await asyncio.sleep(delay)
            return respond(body, faults, seen)
        finally:
            seen.in_flight -= 1

    def respond(body: dict, faults: Faults, seen: Seen) -> Response:
        if faults.dies_after is not None and seen.requests > faults.dies_after:
            return PlainTextResponse("gone", 503)
        fate = draw.random()
        for share, response in (
            (faults.rate_limited, PlainTextResponse("slow down", 429, {"Retry-After": "0"})),
            (faults.failing, PlainTextResponse("oh", 500)),
            (faults.html, HTMLResponse("<html>please log in</html>")),
        ):
            if fate < share:
                seen.faults += 1
                return response
            fate -= share
        system, user = (message["content"] for message in body["messages"])
        text = judge.answer(system, user, faults)
        is_mute = faults.mute and zlib.crc32(user.encode()) % faults.mute[0] == faults.mute[1]
        spoiled = fate < faults.garbage and user not in state["spoiled"]  # once: whoever asks again is answered
        if spoiled:
            state["spoiled"].add(user)
        if is_mute or spoiled:
            seen.faults += 1
            text = "好的，我觉得不错。"
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": len(system + user), "completion_tokens": len(text)}
        return JSONResponse(
            {"model": body["model"], "choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
        )

    async def set_faults(request: Request) -> Response:
        state["faults"], state["seen"] = Faults(**json.loads(await request.body())), Seen()
        return JSONResponse({})

    async def what_was_seen(_: Request) -> Response:
        return JSONResponse(asdict(state["seen"]))

    return Starlette(
        routes=[
            Route("/v1/chat/completions", complete, methods=["POST"]),
            Route("/faults", set_faults, methods=["POST"]),
            Route("/seen", what_was_seen),
        ]
    )


class Announced(uvicorn.Server):
    """Says at which port it listens."""

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)


if __name__ == "__main__":
    app = application(GoldJudge(Path(sys.argv[1])))
    Announced(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical")).run()
