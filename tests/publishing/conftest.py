"""Runs to publish, and a Hub that answers as a test says."""

import http.server
import json
import shutil
import threading

import pytest
import yaml

from heedful import (
    CriticConfig,
    DPOConfig,
    RewardConfig,
    SFTConfig,
    train_critic,
    train_dpo,
    train_reward,
    train_sft,
)


@pytest.fixture(scope="session")
def runs(tiny, tmp_path_factory):
    """``runs("sft")``: the folder of a finished run, made once."""
    root = tmp_path_factory.mktemp("发布")
    chats = [
        {"messages": [{"role": "user", "content": f"第{i}问"}, {"role": "assistant", "content": f"好的 {i}"}]}
        for i in range(9)
    ]
    pairs = [{"prompt": f"第{i}问", "chosen": f"好{i}", "rejected": "不"} for i in range(9)]
    for name, records in (("demonstrations", chats), ("pairs", pairs)):
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (root / f"{name}.jsonl").write_text(text, encoding="utf-8")
    common = {"max_steps": 3, "batch_size": 2, "eval_fraction": 0.3, "sample_every": 0, "dtype": "float32"}
    demonstrations, preferences = str(root / "demonstrations.jsonl"), str(root / "pairs.jsonl")

    def make(name):
        output = root / "runs" / name
        if output.is_dir():
            return output
        settings = {**common, "output": output}
        if name == "sft":
            train_sft(SFTConfig(model=tiny("qwen3"), data=demonstrations, **settings))
        elif name == "lora":
            train_sft(SFTConfig(model=tiny("qwen3"), data=demonstrations, lora_rank=2, **settings))
        elif name == "dpo":
            train_dpo(DPOConfig(model=str(make("sft") / "final"), data=preferences, **settings))
        elif name == "reward":
            train_reward(RewardConfig(model=tiny("qwen3"), data=preferences, **settings))
        elif name == "critic":
            prompts = root / "prompts.jsonl"
            prompts.write_text("".join(json.dumps({"prompt": f"题 {i}"}) + "\n" for i in range(16)), encoding="utf-8")
            sizes = {"steps": 2, "rollout_batch_size": 4, "minibatch_size": 4, "max_new_tokens": 6, "output": output}
            some = {"eval_fraction": 0.3, "sample_every": 0, "dtype": "float32", "rewards": ("rule:digits",)}
            train_critic(CriticConfig(model=tiny("qwen3"), data=str(prompts), **sizes, **some))
        elif name == "encoder":
            train_reward(RewardConfig(model=tiny("deberta-v2"), data=preferences, **settings))
        return output

    return make


@pytest.fixture
def edited(runs):
    """``edited("sft", folder, config={...})``: a copy of a run with other values in its files; None removes a file."""

    def edit(name, folder, **files):
        shutil.copytree(runs(name), folder)
        for file, changes in files.items():
            path = folder / (f"{file}.yaml" if file == "config" else f"{file}.json")
            if changes is None:
                path.unlink()
            else:
                content = (yaml.safe_load if file == "config" else json.loads)(path.read_text("utf-8")) | changes
                path.write_text(json.dumps(content), encoding="utf-8")
        return folder

    return edit


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub as a push needs: it makes repositories and takes commits, or refuses."""

    status = 200
    is_private = True
    requests = ()

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.requests.append((self.path, body))
        if self.status != 200:
            return self._answer(self.status, {"error": "refused by the test"})
        if self.path == "/api/repos/create":
            return self._answer(200, {"url": f"{self.address}/org/name"})
        if self.path == "/api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            return self._answer(200, {"files": files, "commitOid": "0" * 40})
        if "/commit/" in self.path:
            oid = "1" * 40
            return self._answer(
                200, {"commitUrl": f"{self.address}/org/name/commit/{oid}", "commitOid": oid, "success": True}
            )
        return self._answer(404, {"error": "not of this Hub"})

    def do_GET(self):
        self.requests.append((self.path, b""))
        if self.status != 200:
            return self._answer(self.status, {"error": "refused by the test"})
        return self._answer(200, {"id": "org/name", "private": self.is_private, "siblings": [], "sha": "0" * 40})

    def _answer(self, status, content):
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def hub():
    """``hub(status=403)``: a Hub's handler, whose address is in ``address``."""
    servers = []

    def serve(**answers):
        handler = type("OneHub", (Hub,), {**answers, "requests": []})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        handler.address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return handler

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()
