"""The public names work as the documents show them."""

import json
import re
import shlex
from pathlib import Path

import heedful
from heedful.cli.main import COMMANDS
from heedful.configs.parse import parse

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = sorted([*ROOT.glob("README*.md"), *(ROOT / "docs").rglob("*.md")])


def commands_of(document):
    """Every heedful command in a document's shell blocks, as words without ``heedful``."""
    blocks = re.findall(r"```sh\n(.*?)```", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [part for block in blocks for line in block.splitlines() for part in line.split("&&")]
    words = [shlex.split(line.partition(" > ")[0], comments=True) for line in lines]
    return [line[1:] for line in words if line and Path(line[0]).name == "heedful"]


def test_the_readmes_python_runs(tmp_path, monkeypatch, capsys):
    """And the step that examples/README.md shows, as they stand, on a tiny model in the place of the SFT model's folder."""
    monkeypatch.chdir(tmp_path)
    heedful.make_tiny_model("qwen3", "runs/sft/final", hidden_size=32)
    records = [{"prompt": [{"role": "user", "content": f"问题 {i}"}]} for i in range(80)]
    Path("prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    pages = README + (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    block, *_, pieces = re.findall(r"```python\n(.*?)```", pages, flags=re.DOTALL)
    small = block.replace("kl_coef=0.1", "kl_coef=0.1, steps=1, max_new_tokens=8")
    assert small != block
    names = {}
    exec(compile(small, "README.md", "exec"), names)
    exec(compile(pieces, "examples/README.md", "exec"), names)
    assert names["advantages"].shape == names["batch"].mask.shape
    printed = capsys.readouterr().out
    assert "eval/score_mean" in printed
    scores = [json.loads(line)["score"] for line in Path("runs/ppo/samples.jsonl").read_text("utf-8").splitlines()]
    assert len(set(scores)) > 1 or scores[0] < 0.93, "the reward must tell responses apart"


def test_the_page_on_python_runs(tmp_path, monkeypatch, capsys):
    """Its blocks one after another, in a few steps of a tiny model."""
    monkeypatch.chdir(tmp_path)
    heedful.make_tiny_model("qwen3", "runs/sft/final", hidden_size=32)
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL))
    small = blocks.replace("steps=100", "steps=1, rollout_batch_size=4, minibatch_size=4, max_new_tokens=4")
    small = small.replace("max_new_tokens=4, max_new_tokens=32", "max_new_tokens=4")
    sizes = "steps=1, rollout_batch_size=4, minibatch_size=4, max_new_tokens=4, advantage=remax"
    small = small.replace("steps=2, advantage=remax, max_new_tokens=32", sizes)
    names = {}
    exec(compile(small, "python.md", "exec"), names)
    assert list(names["result"].metrics.index) == [0, 1]
    assert names["step"] == 1
    assert capsys.readouterr().out.count("1 0.9") == 3


def test_every_command_of_the_documents_is_parsed(tmp_path, monkeypatch):
    """With the recipes where they are, and a run's own config.yaml as a run would have left it."""
    monkeypatch.chdir(tmp_path)
    Path("recipes").symlink_to(ROOT / "recipes")
    commands = [(document, words) for document in DOCUMENTS for words in commands_of(document)]
    assert len(commands) >= 30
    for document, words in commands:
        name = max((name for name in COMMANDS if name.split() == words[: len(name.split())]), key=len)  # course start
        rest = words[len(name.split()) :]
        if rest and rest[0].endswith(("/config.yaml", "-heedful/ppo.yaml")):
            Path(rest[0]).parent.mkdir(parents=True, exist_ok=True)
            Path(rest[0]).write_text("model: m\ndata: d.jsonl\noutput: o\n", encoding="utf-8")
        try:
            parse(COMMANDS[name].settings(), rest, prog=f"heedful {name}")
        except heedful.ConfigError as error:
            raise AssertionError(f"{document}: heedful {shlex.join(words)}: {error}") from error
