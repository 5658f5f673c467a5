"""No output of any command replaces a file or folder that heedful did not write, not even with ``--overwrite``."""

import dataclasses
import json
import shutil

import pytest
from matplotlib.figure import Figure
from safetensors.torch import save_file

from heedful.apps.label import Project
from heedful.cli.command_table import COMMANDS
from heedful.configs.label import ProjectSettings
from heedful.training.output_folder import MARKER

NOTE = "我的笔记：heedful report, heedful exam, made by hand\n"
RUN = ["--model", "模型", "--data", "数据.jsonl"]
FILES = {
    "report": ["run"],
    "sample": ["--models", "模型", "--data", "数据.jsonl"],
    "exam": ["--reward", "rule:digits", "--data", "数据.jsonl"],
    "label stats": ["项目"],
    "evaluate accuracy": ["--reward-model", "模型", "--data", "数据.jsonl"],
    "evaluate win-rate": [*RUN, "--baseline", "模型", "--rewards", "rule:digits"],
    "evaluate scores": [*RUN, "--rewards", "rule:digits"],
    "evaluate best-of-n": [*RUN, "--rewards", "rule:digits"],
    "evaluate pass-at-k": [*RUN, "--rewards", "rule:digits"],
    "evaluate kl": [*RUN, "--reference", "模型"],
    "evaluate perplexity": RUN,
}
"""Commands that write a file, with what they need besides it."""
ENDINGS = {"report": (".html", ".png", ".svg", ".pdf"), "exam": (".html", ".json"), "sample": (".jsonl",)}
ONLINE = [*RUN, "--rewards", "rule:digits"]
FOLDERS = {
    "demo": [],
    "tiny": [],
    "merge": ["--adapter", "适配器"],
    "label export": ["项目"],
    "label backup": ["项目"],
    "migrate": ["脚本.py"],
    **dict.fromkeys(("sft", "reward", "dpo", "kto"), RUN),
    **dict.fromkeys(("ppo", "critic", "a2c", "grpo", "online-dpo", "choose"), ONLINE),
}
"""Commands that write a folder."""
READS_ONLY = ("plan ", "doctor ")
"""Their ``--output`` is the run's that they examine."""


def settings_of(command):
    return {field.name for field in dataclasses.fields(COMMANDS[command].settings())}


def test_the_table_has_every_command_with_an_output():
    known = {*FILES, *FOLDERS}
    writes = {name for name in COMMANDS if "output" in settings_of(name) and not name.startswith(READS_ONLY)}
    assert writes == known


@pytest.fixture
def place(tmp_path, monkeypatch, tiny):
    """A folder with a project, a model and adapters."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny(), "模型")
    (tmp_path / "数据.jsonl").write_text('{"prompt": "问", "chosen": "好", "rejected": "坏"}\n', encoding="utf-8")
    Project.create(tmp_path / "项目", ProjectSettings(name="标注")).close()
    (tmp_path / "适配器").mkdir()
    (tmp_path / "脚本.py").write_text("import trl\ntrl.SFTTrainer('模型')\n", encoding="utf-8")
    config = {"peft_type": "LORA", "base_model_name_or_path": "模型"}
    (tmp_path / "适配器" / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({}, tmp_path / "适配器" / "adapter_model.safetensors")
    return tmp_path


def foreign(ending, path):
    """Write a file of somebody else."""
    if ending in (".png", ".svg", ".pdf"):
        figure = Figure()
        figure.text(0, 0, "heedful")
        figure.savefig(path)
    else:
        path.write_text(f"<html>{NOTE}" if ending == ".html" else '{"notes": "笔记"}\n', encoding="utf-8")


@pytest.mark.parametrize("command", FILES)
def test_a_file(heedful, place, command):
    for ending in ENDINGS.get(command, (".json",)):
        output = place / f"结果{ending}"
        foreign(ending, output)
        before = output.read_bytes()
        overwrite = ["--overwrite"] if "overwrite" in settings_of(command) else []
        said = heedful(*command.split(), *FILES[command], "--output", output, *overwrite)
        assert (said.status, said.out) == (2, ""), said.err
        assert f"--output {output} exists and was not written by heedful {command.split()[0]}" in said.message
        assert output.read_bytes() == before


@pytest.mark.parametrize("command", FOLDERS)
def test_a_folder(heedful, place, command):
    output, name = place / "结果", MARKER if FOLDERS[command][:2] == RUN[:2] else "config.json"
    output.mkdir()
    (output / name).write_text("{}", encoding="utf-8")
    (output / "笔记.txt").write_text(NOTE, encoding="utf-8")
    overwrite = ["--overwrite"] if "overwrite" in settings_of(command) else []
    said = heedful(*command.split(), *FOLDERS[command], "--output", output, *overwrite)
    assert (said.status, said.out) == (2, ""), said.err
    assert f"--output {output}" in said.message
    assert {path.name: path.read_text(encoding="utf-8") for path in output.iterdir()} == {name: "{}", "笔记.txt": NOTE}


def test_what_a_command_wrote_it_replaces(heedful, place):
    for words in (["label", "stats", "项目"], ["tiny", "--overwrite"], ["label", "export", "项目", "--overwrite"]):
        for _ in range(2):
            output = place / f"{words[0]}-{words[1].strip('-')}"
            said = heedful(*words, "--output", output)
            assert said.status == 0, said.err
