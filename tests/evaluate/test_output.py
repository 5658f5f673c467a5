"""``--output`` of a measurement replaces nothing but an earlier result, and that only if it is told to."""

import json
import os
from pathlib import Path

import pytest

from heedful import ConfigError, PerplexityConfig
from heedful.cli.main import main
from heedful.evaluate.output import check_output
from heedful.files import LARGEST_OUTPUT


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "数据.json"
    path.write_text(json.dumps([{"text": "从前有座山。" * 3}] * 4, ensure_ascii=False), encoding="utf-8")
    return path


@pytest.fixture
def measure(tiny, data, capsys):
    """``measure(output, *flags)`` is the exit status of a measurement, and what it said on standard error."""

    def run(output, *flags):
        words = ["--model", tiny(), "--data", str(data), "--dtype", "float32", "--output", str(output), *flags]
        capsys.readouterr()
        return main(["evaluate", "perplexity", *words]), capsys.readouterr().err

    return run


def test_an_earlier_result_is_replaced_only_if_told_to(measure, tmp_path):
    output = tmp_path / "结果.json"
    assert measure(output) == (0, "")
    before = output.read_bytes()
    status, error = measure(output, "--seed", "7")
    assert status == 2
    assert f"--output {output} exists; choose another name, or add --overwrite" in error
    assert output.read_bytes() == before
    assert measure(output, "--seed", "7", "--overwrite") == (0, "")
    assert json.loads(output.read_bytes())["settings"]["seed"] == 7


@pytest.mark.parametrize("flags", [[], ["--overwrite"]])
def test_the_data_is_never_replaced(measure, data, flags):
    """Nor under another spelling."""
    before = data.read_bytes()
    for output in (data, data.parent / "." / "x" / ".." / data.name):
        status, error = measure(output, *flags)
        assert status == 2
        assert "was not written by heedful evaluate" in error
    assert data.read_bytes() == before


@pytest.mark.parametrize(("name", "exists"), [("summary.json", True), ("metrics.jsonl", False)])
def test_the_files_of_a_run_are_left_alone(measure, tmp_path, name, exists):
    """Also one that the run has not written yet."""
    run = tmp_path / "运行"
    run.mkdir()
    (run / "environment.json").write_text('{"command": "heedful sft"}')
    if exists:
        (run / name).write_text('{"settings": {"output": "x"}}')
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    status, error = measure(run / name, "--overwrite")
    assert status == 2
    assert f"is a file of the run in {run}" in error
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    assert measure(run / "perplexity.json") == (0, "")


@pytest.mark.parametrize(
    "content",
    [
        "重要",
        "[]",
        '{"settings": 1}',
        '{"settings": {}}',
        "[" * 5000,
        b"\xff\xfe",
        b"{}" + b" " * LARGEST_OUTPUT,
    ],
)
def test_no_other_file_is_replaced(tmp_path, content):
    output = tmp_path / "一.json"
    output.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match="was not written by heedful evaluate, so it is left alone"):
        check_output(PerplexityConfig(model="m", data="d", output=output, overwrite=True))


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "管")
    with pytest.raises(ConfigError, match="was not written by heedful evaluate"):
        check_output(PerplexityConfig(model="m", data="d", output=tmp_path / "管", overwrite=True))


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="a folder in which nobody, root included, makes a file")
def test_a_folder_that_takes_no_file_is_refused_before_any_work(tmp_path):
    with pytest.raises(ConfigError, match=r"--output /sys/新/一.json cannot be written: /sys: no permission; choose"):
        check_output(PerplexityConfig(model="m", data="d", output=Path("/sys/新/一.json")))
    check_output(PerplexityConfig(model="m", data="d", output=tmp_path / "新" / "一.json"))
    assert not list(tmp_path.iterdir())
