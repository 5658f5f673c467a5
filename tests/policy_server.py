"""Servers that speak vLLM's API, each in a process of its own, with heedful's sampler inside, and faults that are asked for.

``python policy_server.py`` reads lines of JSON: ``{"start": PORT, "model": FOLDER, ...}`` starts a server (port 0 takes a
free one) and prints its port. With ``"together": false`` it draws each response by itself. What weights it has, and their
checksum, is told by the class that vLLM's workers load. POST /faults with JSON sets `Faults`; GET /seen says what it has
seen.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace

import torch
import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from heedful.configs.options import SamplingOptions
from heedful.engines.decoder import SamplingModel
from heedful.engines.generate import decode
from heedful.engines.vllm.extension.heedful_vllm import HeedfulWorker
from heedful.models import Policy, load_causal_lm


@dataclass
class Faults:
    """What goes wrong, from now on."""

    fail: list[int] = field(default_factory=list)
    """Requests, counted from now, that are answered with 500."""
    busy: list[int] = field(default_factory=list)
    """... with 429."""
    hang_up: list[int] = field(default_factory=list)
    """... not at all."""
    garbage: dict = field(default_factory=dict)
    """What is put in the place of parts of every answer."""
    die_after: int | None = None
    """Responses after which the process ends, as by kill -9, with others on their way."""
    stale: bool = False
    """It says that it has loaded weights, and has not."""
    blind: bool = False
    """It does not see the folder of the weights."""
    swap_after: int | None = None
    """Responses after which somebody else has it load its first weights again."""
    about: dict = field(default_factory=dict)
    """What it says of itself, in the place of the truth."""
    version: str = "0.32.0"
    lacks: list[str] = field(default_factory=list)
    """Routes that its vLLM does not have."""
    waits_for: int = 0
    """Requests that it waits for before it draws the first."""


class Worker(HeedfulWorker):
    """What the extension is mixed into: as much of vLLM's worker as it uses."""

    def __init__(self, folder, faults, max_model_len):
        self.first, self.faults = folder, faults
        lm = load_causal_lm(folder)
        self.policy, config = Policy(lm), lm.config
        self.model_runner = SimpleNamespace(get_model=lambda: self.policy.lm)
        self.vllm_config = SimpleNamespace(
            weight_transfer_config=None, scheduler_config=SimpleNamespace(max_num_seqs=256)
        )
        self.model_config = SimpleNamespace(
            get_vocab_size=lambda: config.vocab_size,
            get_hidden_size=lambda: config.hidden_size,
            get_total_num_hidden_layers=lambda: config.num_hidden_layers,
            hf_text_config=config,
            max_model_len=max_model_len,
            dtype=torch.float32,
            quantization=None,
            logprobs_mode="processed_logprobs",
            enable_sleep_mode=True,
        )

    def reload_weights(self, weights_path):
        if self.faults.blind:
            raise RuntimeError(f"Cannot find any model weights with `{weights_path}`")
        if self.faults.stale:
            return
        weights = {}
        for path in sorted(Path(weights_path).glob("*.safetensors")):
            weights |= load_file(path)
        own = dict(self.policy.lm.named_parameters())
        assert weights.keys() == own.keys(), sorted(weights.keys() ^ own.keys())[:3]
        with torch.no_grad():
            for name, value in weights.items():
                own[name].copy_(value)


class Server:
    """One server."""

    def __init__(self, folder, max_model_len, together=True):
        self.faults = Faults()
        self.together = together
        self.worker = Worker(folder, self.faults, max_model_len)
        self.waiting, self.arrived = [], asyncio.Event()
        self.asleep = set()
        self.count = self.open = 0
        self.answered = 0
        self.seen = self.unseen()

    @staticmethod
    def unseen() -> dict:
        return {"completions": [], "loads": 0, "resets": 0, "orders": [], "most": 0}

    async def completions(self, request: Request) -> Response:
        self.open += 1
        self.seen["most"] = max(self.seen["most"], self.open)
        try:
            return await self.complete(request)
        finally:
            self.open -= 1

    async def complete(self, request: Request) -> Response:
        asked = json.loads(await request.body())
        number, self.count = self.count, self.count + 1
        self.seen["completions"].append(
            {name: asked[name] for name in ("prompt", "seed")} | {"version": self.worker.heedful_state()["version"]}
        )
        if number in self.faults.fail:
            return JSONResponse({"error": "a fault"}, 500)
        if number in self.faults.busy:
            return JSONResponse({"error": "a queue"}, 429, {"Retry-After": "0.1"})
        if number in self.faults.hang_up:
            await request.close()
            raise ConnectionError
        if self.asleep:
            return JSONResponse({"error": "asleep"}, 500)
        if len(asked["prompt"]) + asked["max_tokens"] > self.worker.model_config.max_model_len:
            return JSONResponse({"error": {"message": "maximum context length"}}, 400)
        done = asyncio.get_running_loop().create_future()
        self.waiting.append((asked, done))
        self.arrived.set()
        ids, logprobs = await done
        self.answered += 1
        if self.answered == self.faults.die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.answered == self.faults.swap_after:
            self.worker.heedful_load(self.worker.first, "somebody else's")
        reason = "stop" if ids[-1] in asked["stop_token_ids"] else "length"
        choice = {"token_ids": ids, "prompt_token_ids": asked["prompt"], "finish_reason": reason}
        choice |= {"logprobs": {"token_logprobs": logprobs}, "text": "not read"} | self.faults.garbage
        return JSONResponse({"choices": [choice]})

    async def draw(self) -> None:
        """Draw what waits: together, or one after the other."""
        while True:
            await self.arrived.wait()
            await asyncio.sleep(0.003)  # for others to come
            while len(self.waiting) < self.faults.waits_for:
                await asyncio.sleep(0.01)
            self.faults.waits_for = 0
            self.arrived.clear()
            waiting, self.waiting = self.waiting, []
            for batch in [waiting] if self.together else [[one] for one in waiting]:
                try:
                    found = drawn(self.worker.policy, [asked for asked, _ in batch])
                    for (_, done), one in zip(batch, found, strict=True):
                        if not done.done():
                            done.set_result(one)
                except Exception as error:
                    for _, done in batch:
                        done.set_exception(error)

    async def watch(self) -> None:
        """End with the process that started this one."""
        parent = os.getppid()
        while os.getppid() == parent:
            await asyncio.sleep(0.5)
        os._exit(1)

    async def rpc(self, request: Request) -> Response:
        asked = json.loads(await request.body())
        if not hasattr(self.worker, asked["method"]):
            return JSONResponse({"error": f"no method {asked['method']}"}, 500)
        if "weights" in self.asleep and asked["method"] in ("heedful_load", "heedful_checksum"):
            return JSONResponse({"error": "asleep"}, 500)
        if asked["method"] == "heedful_load":
            self.seen["loads"] += 1
            self.seen["orders"].append("heedful_load")
        try:
            result = getattr(self.worker, asked["method"])(**asked["kwargs"])
        except RuntimeError as error:
            return JSONResponse({"error": str(error)}, 500)
        if asked["method"] == "heedful_about":
            result |= self.faults.about
        return JSONResponse({"results": [result]})

    async def order(self, request: Request) -> Response:
        tags = request.query_params.getlist("tags")
        self.seen["orders"].append(" ".join([request.url.path, *tags]))
        if request.url.path == "/sleep":
            self.asleep = {"weights", "kv_cache"}
        elif request.url.path == "/wake_up":
            self.asleep -= set(tags) or self.asleep
        return JSONResponse({})

    async def reset(self, _: Request) -> Response:
        self.seen["resets"] += 1
        return JSONResponse({"success": True})

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": self.faults.version})

    async def set_faults(self, request: Request) -> Response:
        faults = Faults(**json.loads(await request.body()))
        for one in fields(Faults):
            setattr(self.faults, one.name, getattr(faults, one.name))
        self.count = self.answered = 0
        return JSONResponse(asdict(self.faults))

    async def tell(self, _: Request) -> Response:
        seen, self.seen = self.seen, self.unseen()
        return JSONResponse(seen)

    async def serve(self, listening: socket.socket) -> None:
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/collective_rpc", self.rpc, methods=["POST"]),
            Route("/reset_prefix_cache", self.reset, methods=["POST"]),
            Route("/sleep", self.order, methods=["POST"]),
            Route("/wake_up", self.order, methods=["POST"]),
            Route("/note/{what}", self.order, methods=["POST"]),  # what a test wants to see among the orders
            Route("/faults", self.set_faults, methods=["POST"]),
            Route("/version", self.version),
            Route("/seen", self.tell),
        ]
        app = Starlette(routes=routes)

        async def answer(scope: dict, *channels) -> None:
            lacks = scope["type"] == "http" and scope["path"] in self.faults.lacks
            await (Response(status_code=404) if lacks else app)(scope, *channels)

        config = uvicorn.Config(answer, log_level="critical", lifespan="off")
        tasks = [asyncio.create_task(self.draw()), asyncio.create_task(self.watch())]
        await uvicorn.Server(config).serve([listening])
        for task in tasks:
            task.cancel()


def drawn(policy, requests):
    """Ids and log-probs of a response to each request, each with its own seed."""
    first = requests[0]
    options = SamplingOptions(
        max_new_tokens=max(one["max_tokens"] for one in requests),
        temperature=first["temperature"],
        top_k=first["top_k"],
        top_p=first["top_p"],
    )
    seeds = [torch.Generator().manual_seed(one["seed"]) for one in requests]
    uniforms = torch.stack([torch.rand(options.max_new_tokens, generator=g, dtype=torch.float64) for g in seeds])
    found = [([], []) for _ in requests]
    for step in decode(
        SamplingModel(policy),
        [one["prompt"] for one in requests],
        options,
        uniforms=uniforms,
        lengths=torch.tensor([one["max_tokens"] for one in requests]),
        stop_ids=first["stop_token_ids"],
        pad_id=0,
    ):
        kept = torch.zeros_like(step.logprobs) if step.kept is None else step.kept
        logprobs = (step.logprobs - kept).tolist()  # processed: of what they were drawn from
        for row, token, logprob, active in zip(
            step.rows.tolist(), step.tokens.tolist(), logprobs, step.active.tolist(), strict=True
        ):
            if active:
                found[row][0].append(token)
                found[row][1].append(logprob)
    return found


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        asked = json.loads(line)
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", asked["start"]))
        listening.listen(256)
        if os.fork() == 0:
            sys.stdin.close()
            server = Server(asked["model"], asked.get("max_model_len", 256), asked.get("together", True))
            asyncio.run(server.serve(listening))
            os._exit(0)
        print(listening.getsockname()[1], flush=True)
        listening.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
