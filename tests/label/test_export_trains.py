"""The commands, from a new project to a reward model: what people said is trained on without a change."""

import json

import pytest

from heedful.apps.label import Project
from heedful.cli.main import main
from heedful.data import read_demonstrations, read_labelled, read_rankings
from jsonl import write_jsonl
from labelling import send

NASTY = "汉字 🙂\u2028新行 \u202eabc\u202c"


@pytest.fixture
def command(capsys):
    """Run a command; it must succeed. Returns what it printed, without line breaks that a terminal's width makes."""

    def run(*words):
        status = main([str(word) for word in words])
        said = capsys.readouterr()
        assert status == 0, said.err
        return said.out

    return run


def answer_to(item):
    if item.task == "pair":
        return {"preferred": int(item.candidates[1].response.endswith("谢谢")), "strength": 3, "both_bad": False}
    if item.task == "ranking":
        return {"ranks": [1, 3, 2]}
    return {"rating": 6, "flags": []} if item.task == "rating" else {"text": NASTY}


def test_from_a_new_project_to_a_reward_model(command, tiny, tmp_path):
    project, data, out = tmp_path / "项目", tmp_path / "数据.jsonl", tmp_path / "导出"
    records = [{"prompt": f"问题 {i} {NASTY}", "responses": ["不行", "好的谢谢"]} for i in range(24)]
    records += [{"prompt": [{"role": "user", "content": f"你 {i}"}], "responses": ["甲", "乙", "丙"]} for i in range(8)]
    records += [{"prompt": f"写 {i}"} for i in range(6)]
    records += [{"prompt": f"评 {i}", "completion": "x", "feedback": {"task": "rating"}} for i in range(6)]
    write_jsonl(data, records)

    command("label", "new", project, "--repeats", "0", "--overlap", "0.5", "--seed", "0")
    assert "Nothing was added" in command("label", "import", project, "--data", data, "--preview")
    said = command("label", "import", project, "--data", data)
    assert (
        "44 records: 44 items (24 pairs, 8 rankings, 6 ratings, 6 demonstrations), 0 with a label in the file." in said
    )
    assert "Added 44 items; 0 already there." in said
    assert "Agreement: n/a" in command("label", "stats", project)

    assert "There is nothing to train on yet" in command("label", "export", project, "--output", tmp_path / "empty")

    with Project.open(project) as opened:
        for person in (opened.add_person(name, "annotator").person_id for name in ("安娜", "博")):
            while (held := opened.next_item(person)) is not None:
                send(opened, person, answer_to(held.item))

    said = command("label", "stats", project, "--output", tmp_path / "stats.json")
    assert "Agreement, pair: 100.0 %" in said
    written = json.loads((tmp_path / "stats.json").read_text(encoding="utf-8"))
    assert written["agreement"]["ranking"]["share"]["value"] == 1
    said = command("label", "export", project, "--output", out, "--eval-fraction", "0.25")
    assert "preferences.train.jsonl" in said
    parts = ("train", "eval")
    rankings = [one for part in parts for one in read_rankings(str(out / f"preferences.{part}.jsonl"))]
    assert len(rankings) == 32 + written["agreement"]["pair"]["items"] + written["agreement"]["ranking"]["items"]
    assert {one.margin for one in rankings} == {2 / 3, None}
    assert all(one.responses[0] == "好的谢谢" for one in rankings if one.margin)
    assert all(len(one.responses) == 2 for part in parts for one in read_rankings(str(out / f"pairs.{part}.jsonl")))
    assert {d.response for part in parts for d in read_demonstrations(str(out / f"demonstrations.{part}.jsonl"))} == {
        NASTY
    }
    assert all(one.label for one in read_labelled(str(out / "labelled.train.jsonl")))

    flags = ["--model", tiny("qwen3", max_length=256), "--epochs", "3", "--batch-size", "8", "--learning-rate", "5e-3"]
    flags += ["--data", out / "preferences.train.jsonl", "--eval-data", out / "preferences.eval.jsonl"]
    command("reward", *flags, "--output", tmp_path / "reward", "--dtype", "float32")
    summary = json.loads((tmp_path / "reward" / "summary.json").read_text(encoding="utf-8"))
    assert summary["last_evaluation"]["eval/accuracy"] > 0.9


def test_a_folder_that_is_no_project_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in (["import", "没有", "--data", "x.jsonl"], ["export", "没有", "--output", "x"], ["stats", "没有"]):
        assert main(["label", *words]) == 2
        assert "没有" in capsys.readouterr().err


def test_labels_of_a_file_and_what_cannot_be_used(command, capsys, tmp_path):
    project, data = tmp_path / "p", tmp_path / "data.jsonl"
    good = {"prompt": "a\x1b[31m", "chosen": "x", "rejected": "y", "margin": 0.5}
    data.write_text(json.dumps(good) + '\n{"prompt": "b", "chosen": "x", "rejected": "x"}\n', encoding="utf-8")
    command("label", "new", project)
    assert main(["label", "import", str(project), "--data", str(data)]) == 2
    assert "data.jsonl:2: 2 answers that are all equal" in capsys.readouterr().err
    said = command("label", "import", project, "--data", data, "--unusable", "drop")
    assert "Added 1 item; 0 already there." in said
    assert "1 label of the file not imported (add --with-labels to import them)." in said
    said = command("label", "import", project, "--data", data, "--unusable", "drop", "--with-labels")
    assert "1 record left out as unusable:" in said
    assert "2 records: 1 item (1 pair), 1 with a label in the file." in said
    assert "Added 0 items and 1 label; 1 already there." in said
    assert "\x1b" not in said
    said = command("label", "export", project, "--output", tmp_path / "out", "--eval-fraction", "0")
    (record,) = (tmp_path / "out" / "preferences.train.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(record) | {"feedback": {}} == good | {"feedback": {}}
    assert main(["label", "export", str(project), "--output", str(tmp_path / "out")]) == 2


def test_answers_that_are_all_the_same_are_left_out_with_a_line(command, tmp_path):
    """As `heedful sample` writes them of a model that is sure; the file was refused whole."""
    project = tmp_path / "p"
    rows = [{"prompt": f"问{i}", "responses": ["好"] * 4 if i < 5 else ["好", "坏", "好", "行"]} for i in range(8)]
    data = write_jsonl(tmp_path / "答.jsonl", rows)
    command("label", "new", project)
    for flags in (("--preview",), ()):
        said = command("label", "import", project, "--data", data, *flags)
        assert "8 records: 3 items (3 rankings), 0 with a label in the file." in said
        assert "5 records left out: all answers are equal, so there is nothing to compare:" in said
        assert f"{data}:1: 4 answers that are all equal" in said
    assert "Added 3 items; 0 already there." in said
