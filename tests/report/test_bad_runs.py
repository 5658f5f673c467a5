"""Runs that are damaged, unfinished, of another kind or no runs: one clear line, status 2, and nothing is written."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from logged_runs import GAME, PLAYED, unpacked


@pytest.fixture
def refused(heedful, tmp_path):
    """``refused(*words)`` is the one line with which a command ends; no file is left."""

    def refuse(*words):
        before = sorted(tmp_path.rglob("*"))
        outcome = heedful(*map(str, words))
        assert outcome.status == 2
        assert sorted(tmp_path.rglob("*")) == before
        (line,) = [line for line in outcome.err.splitlines() if line]
        return line

    return refuse


@pytest.fixture(params=["report", "look"])
def command(request, tmp_path):
    """The words of a command about a run."""
    output = ["--output", tmp_path / "page.html"] if request.param == "report" else []
    return lambda run: [request.param, run, *output]


def test_a_folder_that_is_no_run(refused, command, tmp_path):
    assert f"{tmp_path / '没有'} does not exist" in refused(*command(tmp_path / "没有"))
    (tmp_path / "空").mkdir()
    assert f"{tmp_path / '空'} is not a run: it has no metrics.jsonl" in refused(*command(tmp_path / "空"))


@pytest.mark.parametrize("file", ["alarms.jsonl", "samples.jsonl", "metrics.jsonl"])
def test_a_damaged_line_is_named(log_run, refused, tmp_path, file):
    run = log_run()
    good = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0]
    (run / file).write_text(f"{good}\n{{'step': 1\n{good}\n", encoding="utf-8")
    assert f"{file}:2 is damaged" in refused("report", run, "--output", tmp_path / "p.html")


def test_half_written_last_lines_are_left_out(log_run, heedful, tmp_path):
    """The run goes on, or was killed."""
    alarms, samples = [{"step": 1, "alarm": "repetition"}], [{"step": 1, "prompt": "q", "response": "r"}]
    run, files = log_run(alarms=alarms, samples=samples), ("alarms.jsonl", "samples.jsonl", "metrics.jsonl")
    for file in files:
        with (run / file).open("a", encoding="utf-8") as log:
            log.write('{"step": 4, "rew')
    assert heedful("report", str(run), output=tmp_path / "p.html").status == 0
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    for file in files:
        assert f"The last line of {file} is only half-written and is left out." in page


@pytest.mark.parametrize("file", ["config.yaml", "environment.json"])
def test_a_damaged_file_is_named(log_run, refused, command, file):
    run = log_run()
    (run / file).write_text("[1, 2", encoding="utf-8")
    assert str(run / file) in refused(*command(run))


def test_an_alarm_without_a_step(log_run, refused):
    assert "alarms.jsonl: a line has no step" in refused("look", log_run(alarms=[{"alarm": "repetition"}]))


def test_a_file_of_responses_that_is_damaged_or_of_something_else(log_run, refused, command):
    run = log_run(steps=1)
    path = run / "rollouts" / "step-000001.parquet"
    table, content = pq.read_table(path), path.read_bytes()
    path.write_bytes(content[:-20])
    assert f"{path} is damaged" in refused(*command(run))
    pq.write_table(table.drop_columns(["response_ids"]), path)
    assert f"{path} has no column response_ids" in refused(*command(run))
    short = pa.array(np.ones((2, 1)).tolist(), pa.list_(pa.float32()))
    pq.write_table(table.set_column(table.column_names.index("values"), "values", short), path)
    assert "row 0 has 1 values for" in refused(*command(run))


@pytest.mark.parametrize(
    ("name", "column", "said"),
    [
        ("response_ids", pa.array(["a", "b"]), "its response_ids are string, so it is not of heedful's"),
        ("score", pa.array(["好", "b"]), "its score are string"),
        ("rewards", pa.array([1.0, 2.0]), "its rewards are double"),
        ("response_ids", pa.array([None, [1]], pa.list_(pa.int32())), "is damaged: 1 of its response_ids are null"),
        ("step", pa.array([None, None], pa.int32()), "is damaged: 2 of its step are null"),
    ],
)
def test_columns_of_another_kind(log_run, refused, name, column, said):
    run = log_run(steps=1)
    path = run / "rollouts" / "step-000001.parquet"
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.column_names.index(name), name, column), path)
    assert said in (line := refused("look", run))
    assert str(path) in line


@pytest.mark.parametrize("name", ["prompt_ids", "response_ids"])
def test_a_negative_token(log_run, refused, tmp_path, name):
    run = log_run(steps=1)
    path = run / "rollouts" / "step-000001.parquet"
    table = pq.read_table(path)
    ids = table[name].to_pylist()
    ids[0][-1] = -1
    pq.write_table(table.set_column(table.column_names.index(name), name, pa.array(ids, pa.list_(pa.int32()))), path)
    line = refused("report", run, "--output", tmp_path / "p.html")
    assert f"{path}: row 0 has a negative token id; delete the file" in line


@pytest.mark.parametrize(
    "wrong",
    [{"turn_ends": [4, 10]}, {"turn_ends": [4, 10, 14]}, {"turn_ends": [4, 4, 13]}, {"turn_rewards": [1.0]}],
    ids=str,
)
def test_turns_that_do_not_fit(log_run, refused, command, wrong):
    run = log_run(steps=1, responses=PLAYED[:1], episodes=[GAME | wrong])
    assert "step-000001.parquet: the turns of row 0 do not fit to its tokens; delete the file" in refused(*command(run))


def test_a_run_without_rollouts(log_run, heedful, refused, tmp_path):
    """The page has the rest; there is nothing to look at."""
    run = log_run()
    for path in (run / "rollouts").iterdir():
        path.unlink()
    assert "has no responses in rollouts/; train with --rollouts all" in refused("look", run)
    assert heedful("report", str(run), output=tmp_path / "p.html").status == 0
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "Train with --rollouts all to see every token" in page
    assert 'id="data"' not in page


def test_the_file_of_best_of_n(log_run, refused, tmp_path):
    run, measured = log_run(), tmp_path / "best.json"
    for content in ({}, {"best_of": [{"k": 1}]}, {"best_of": 3}, {"best_of": []}):
        measured.write_text(json.dumps(content), encoding="utf-8")
        line = refused("report", run, "--best-of-n", measured, "--output", tmp_path / "p.html")
        assert str(measured) in line
        assert "heedful evaluate best-of-n --output wrote" in line


def test_what_cannot_be_written_or_compared(log_run, refused, tmp_path):
    run = log_run()
    (tmp_path / "file").write_text("x", encoding="utf-8")
    assert "is a file" in refused("report", run, "--output", tmp_path / "file" / "p.html")
    assert "b.json is about the page" in refused("report", run, "--best-of-n", "b.json", "--output", tmp_path / "p.png")
    one = refused("report", run, "--compare", "a", "--output", tmp_path / "p.html")
    assert "--compare takes two models, got 1" in one


def test_a_page_of_something_else_is_left_alone(log_run, heedful, refused, tmp_path):
    """An earlier page is replaced."""
    run, output = log_run(), tmp_path / "p.html"
    output.write_text("<p>mine</p>", encoding="utf-8")
    assert f"{output} exists and was not written by heedful report" in refused("report", run, "--output", output)
    assert output.read_text(encoding="utf-8") == "<p>mine</p>"
    output.unlink()
    assert [heedful("report", str(run), output=output).status for _ in range(2)] == [0, 0]


def test_steps_rows_and_numbers_that_are_not_there(log_run, refused):
    run = log_run()
    assert "--step 9" in (line := refused("look", run, "--step", "9"))
    assert "has steps 1 to 3" in line
    assert "--row 2: the step has 2 responses, 0 to 1" in refused("look", run, "--row", "2")
    path = run / "rollouts" / "step-000003.parquet"
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    assert "--step 3: the step has no responses" in refused("look", run)
    old = log_run("老", columns=False)
    assert "--by advantage: the responses of step 3 have none; they have log-prob" in refused(
        "look", old, "--by", "advantage"
    )


def test_an_unfinished_run_is_shown(log_run, heedful, tmp_path):
    run = log_run()
    heedful("report", str(run), output=tmp_path / "p.html")
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "<td>unfinished</td>" in page
    (run / "summary.json").write_text("{}", encoding="utf-8")
    heedful("report", str(run), output=tmp_path / "p.html")
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "<td>finished</td>" in page
    assert len(unpacked(page)[0]["responses"]) == 6
