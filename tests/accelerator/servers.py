"""Servers that runs of the rehearsal ask, each a process of its own on the CPU: a judge, and a sampler with vLLM's API."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2

TESTS = Path(__file__).parents[1]
JUDGE, SAMPLER = "judge:http://127.0.0.1:{judge}/v1#gold", "vllm:http://127.0.0.1:{sampler}"


@contextlib.contextmanager
def _asked(script: str, *arguments: str, first_line: str = "") -> Iterator[int]:
    """The port of a server, as its script prints it."""
    command = [sys.executable, str(TESTS / script), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdin.write(first_line)
        process.stdin.flush()
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@contextlib.contextmanager
def judge(prompts: Path) -> Iterator[int]:
    """A judge whose score is a hash of the response."""
    known = prompts.with_name("known.jsonl")
    records = map(json.loads, prompts.read_text(encoding="utf-8").splitlines())
    lines = [json.dumps({"prompt": record["prompt"], "family": "", "answer": ""}) for record in records]
    known.write_text("\n".join(lines), encoding="utf-8")
    with _asked("chat_server.py", str(known)) as port:
        httpx2.post(f"http://127.0.0.1:{port}/faults", json={"by_hash": True}, trust_env=False).raise_for_status()
        yield port


@contextlib.contextmanager
def sampler(model: str) -> Iterator[int]:
    """A sampler that draws each response by itself: which ones arrive together is chance, and rounds otherwise."""
    order = json.dumps({"start": 0, "model": model, "together": False})
    with _asked("policy_server.py", first_line=f"{order}\n") as port:
        yield port


@contextlib.contextmanager
def ports(names: str, model: str, prompts: Path) -> Iterator[dict[str, int]]:
    """Ports of the servers that names of rewards and samplers ask for."""
    with contextlib.ExitStack() as running:
        found = {}
        if "{judge}" in names:
            found["judge"] = running.enter_context(judge(prompts))
        if "{sampler}" in names:
            found["sampler"] = running.enter_context(sampler(model))
        yield found
