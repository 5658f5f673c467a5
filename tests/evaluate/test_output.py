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


def test_the_data_is_never_replaced(measure, data):
    """Nor under another spelling."""
    before = data.read_bytes()
    for output in (data, data.parent / "." / "x" / ".." / data.name):
        for flags in ([], ["--overwrite"]):
            status, error = measure(output, *flags)
            assert status == 2
            assert "was not written by heedful evaluate" in error
    assert data.read_bytes() == before


def test_the_files_of_a_run_are_left_alone(measure, tmp_path):
    """Also one that the run has not written yet."""
    run = tmp_path / "运行"
    run.mkdir()
    (run / "environment.json").write_text('{"command": "heedful sft"}')
    (run / "summary.json").write_text('{"settings": {"output": "x"}}')
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    for name in ("summary.json", "metrics.jsonl"):
        status, error = measure(run / name, "--overwrite")
        assert status == 2
        assert f"is a file of the run in {run}" in error
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    assert measure(run / "perplexity.json") == (0, "")


def test_no_other_file_is_replaced(tmp_path):
    """And what is no file is not waited for."""
    os.mkfifo(tmp_path / "管")
    large = b"{}" + b" " * LARGEST_OUTPUT
    contents = ["重要".encode(), b"[]", b'{"settings": 1}', b'{"settings": {}}', b"[" * 5000, b"\xff\xfe", large]
    for name, content in (("管", None), *((f"{i}.json", one) for i, one in enumerate(contents))):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match="was not written by heedful evaluate, so it is left alone"):
            check_output(PerplexityConfig(model="m", data="d", output=tmp_path / name, overwrite=True))


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="a folder in which nobody, root included, makes a file")
def test_a_folder_that_takes_no_file_is_refused_before_any_work(tmp_path):
    with pytest.raises(ConfigError, match=r"--output /sys/新/一.json cannot be written: /sys: no permission; choose"):
        check_output(PerplexityConfig(model="m", data="d", output=Path("/sys/新/一.json")))
    check_output(PerplexityConfig(model="m", data="d", output=tmp_path / "新" / "一.json"))
    assert not list(tmp_path.iterdir())
