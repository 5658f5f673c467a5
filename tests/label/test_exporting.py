"""Labels become files: what is in each, what is left out and counted, the split, the same bytes, and back again."""

import hashlib
import io
import json
import zipfile
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful import ConfigError, Prompt
from heedful.apps.label import (
    Candidate,
    ExportOptions,
    ImportOptions,
    Item,
    Project,
    export_project,
    item_id,
    project_statistics,
)
from heedful.apps.label.exporting import export
from heedful.apps.label.importing import add, read_items, read_items_text
from heedful.apps.label.records import Event, LabelledItem, Person, Snapshot
from heedful.cli.main import main
from heedful.configs.label import ProjectSettings
from heedful.data import read_demonstrations, read_labelled, read_rankings, split_by_prompt
from jsonl import lines, write_jsonl
from labelling import SEVERAL_TURNS, send

NASTY = "汉字 🙂\u2028新行\u2029 \u202eabc\u202c \u200f\x85 \U0001f1e8\U0001f1f3 é\r\n\t\0"
ALL = ExportOptions(eval_fraction=0)


def records_of(exported, name):
    return [json.loads(line) for line in exported.files.get(name, b"").decode().split("\n") if line]


def without_feedback(records):
    return [{key: value for key, value in record.items() if key != "feedback"} for record in records]


@pytest.fixture
def project(tmp_path):
    with Project.create(tmp_path / "项目", ProjectSettings(overlap=0, repeats=0)) as project:
        yield project


def person_of(project, name="安娜", standing="active"):
    return project.add_person(name, "annotator", standing).person_id


def label_all(project, person, answers):
    """Label as the page does; ``answers`` is by prompt."""
    while (held := project.next_item(person)) is not None:
        prompt = held.item.prompt
        answer, *flags = answers[prompt if isinstance(prompt, str) else prompt[0]["content"]]
        send(project, person, answer, flags=flags, comment="")


def add_records(project, *records, **options):
    return add(project, read_items_text(lines(records), options=ImportOptions(**options)))


FIRST = {"preferred": 0, "strength": 3, "both_bad": False}
SECOND = {"preferred": 1, "strength": 1, "both_bad": False}
TIE = {"preferred": None, "strength": None, "both_bad": True}


def test_what_each_task_becomes(project):
    add_records(
        project,
        {
            "prompt": "pair 一",
            "responses": [{"response": NASTY, "source": {"model": "m1"}}, {"response": "y"}],
            "id": 4,
        },
        {"prompt": "pair 二", "responses": ["x", "y"]},
        {"prompt": "tie", "responses": ["x", "y"]},
        {"prompt": "ranking", "responses": ["x", "y", "z"]},
        {"prompt": "all tie", "responses": ["x", "y", "z"]},
        {"prompt": "twice", "responses": ["x", "y", "x"]},
        {"prompt": "demonstration"},
        {"prompt": "correction", "completion": "x", "feedback": {"task": "correction"}},
        *({"prompt": name, "completion": "x", "rating": 1} for name in ("good", "middle", "bad")),
    )
    answers = {
        "pair 一": [FIRST, "unsafe"],
        "pair 二": [SECOND],
        "tie": [TIE],
        "ranking": [{"ranks": [2, 3, 1]}],
        "all tie": [{"ranks": [1, 1, 1]}],
        "twice": [{"ranks": [1, 2, 3]}],
        "demonstration": [{"text": NASTY}],
        "correction": [{"text": "better"}],
        "good": [{"rating": 5, "flags": ["hallucination"]}],
        "middle": [{"rating": 4, "flags": []}],
        "bad": [{"rating": 3, "flags": []}],
    }
    label_all(project, person_of(project), answers)
    made = export_project(project, ALL)
    preferences = records_of(made, "preferences.train.jsonl")
    assert without_feedback(preferences) == [
        {"id": 4, "prompt": "pair 一", "chosen": NASTY, "rejected": "y", "margin": 2 / 3},
        {"prompt": "pair 二", "chosen": "y", "rejected": "x", "margin": 0.0},
        {"prompt": "ranking", "responses": ["x", "y", "z"], "ranks": [1, 2, 0]},
        {"prompt": "correction", "chosen": "better", "rejected": "x"},
    ]
    assert made.manifest["notes"] == [
        "preferences.train: 2 of 4 records have no margin (corrections, rankings, and imported labels without one); "
        "heedful reward uses 0 for them"
    ]
    none = export_project(project, replace(ALL, margin="none"))
    assert none.manifest["notes"] == [], "where none has one, there is nothing to say"
    feedback = preferences[0]["feedback"]
    assert feedback == {
        "event": feedback["event"], "item": item_id("pair", "pair 一", (Candidate(NASTY), Candidate("y"))), "person": "p2",
        "task": "pair", "round": 1, "chosen_by": "import", "strength": 3, "flags": ["unsafe"],
        "sources": [{"model": "m1"}, None],
    }  # fmt: skip
    pairs = records_of(made, "pairs.train.jsonl")
    assert [(one["chosen"], one["rejected"]) for one in pairs] == [
        (NASTY, "y"), ("y", "x"), ("x", "y"), ("z", "x"), ("z", "y"), ("better", "x"),
    ]  # fmt: skip
    assert len({one["group_id"] for one in pairs}) == 4
    assert pairs[2]["group_id"] == pairs[4]["group_id"]
    assert without_feedback(records_of(made, "demonstrations.train.jsonl")) == [
        {"prompt": "demonstration", "completion": NASTY}
    ]
    labelled = [
        {"prompt": "good", "completion": "x", "label": True},
        {"prompt": "bad", "completion": "x", "label": False},
    ]
    assert without_feedback(records_of(made, "labelled.train.jsonl")) == labelled
    assert [one["rating"] for one in records_of(made, "ratings.jsonl")] == [5, 4, 3]
    assert records_of(made, "ratings.jsonl")[0]["feedback"]["rating_flags"] == ["hallucination"]
    assert [one["ranks"] for one in records_of(made, "ties.jsonl")] == [[0, 0], [0, 0, 0]]
    assert [one["prompt"] for one in records_of(made, "contradictions.jsonl")] == ["twice"]
    assert len(records_of(made, "items.jsonl")) == 11
    assert [one["kind"] for one in records_of(made, "events.jsonl")].count("label") == 11
    assert made.manifest["left_out"] == {"contradictions": 1, "ratings in the middle": 1, "ties": 2}
    large = records_of(export_project(project, ExportOptions(0, "large")), "pairs.train.jsonl")
    assert [one["margin"] for one in large[:2]] == [2, 0]
    bare = export_project(project, ExportOptions(0, "none", "leave-out"))
    assert bare.manifest["left_out"]["flagged"] == 1
    assert [one.get("margin") for one in records_of(bare, "preferences.train.jsonl")] == [None] * 3


def turns_of_chat(chat, *turns):
    """Labels of the turns of a chat, by an owner; each is the first message, both answers, and the preferred one."""
    item, owner = Item(chat, "chat", "谈", columns={"id": 1}), Person("p1", "o", "owner")
    talk = []
    for number, (message, answers, preferred) in enumerate(turns):
        talk.append({"role": "user", "content": message})
        said = [{"response": text, "source": {"model": f"m{i}"}} for i, text in enumerate(answers)]
        answer = {"messages": list(talk), "responses": said, "preferred": preferred, "strength": 4, "both_bad": False}
        content = {"item": chat, "answer": {**answer, "last": False}, "order": [1, 0], "seconds": 1, "flags": []}
        yield LabelledItem(item, owner, Event(number + 1, f"{chat}{number}", "2026-01-01", "p1", "label", content))
        talk.append({"role": "assistant", "content": answers[preferred]})


def exported_chats(labels, options):
    items = {one.item.item_id: one.item for one in labels}
    return export(Snapshot(list(items.values()), labels, [one.event for one in labels], [labels[0].person]), options)


def test_turns_of_a_chat():
    """Each is a preference after the conversation so far; a turn whose answers are equal prefers nothing."""
    labels = list(turns_of_chat("c", ("你好", "甲乙", 1), ("还有", "丙丁", 0), ("再", "同同", 0)))
    made = exported_chats(labels, ALL)
    found = records_of(made, "preferences.train.jsonl")
    assert [(len(one["prompt"]), one["chosen"], one["rejected"], one["margin"]) for one in found] == [
        (1, "乙", "甲", 1), (3, "丙", "丁", 1),
    ]  # fmt: skip
    assert found[1]["prompt"][1] == {"role": "assistant", "content": "乙"}
    assert found[0]["feedback"]["sources"] == [{"model": "m0"}, {"model": "m1"}]
    assert [len(one["prompt"]) for one in records_of(made, "contradictions.jsonl")] == [5]
    # they are split by their first message
    labels = [one for i in range(20) for one in turns_of_chat(f"c{i}", (f"问 {i}", "甲乙", 1), ("还有", "丙丁", 0))]
    made, parts = exported_chats(labels, ExportOptions(eval_fraction=0.5)), ("train", "eval")
    train, held = ({one["prompt"][0]["content"] for one in records_of(made, f"pairs.{part}.jsonl")} for part in parts)
    assert train.isdisjoint(held)
    assert min(len(train), len(held)) > 3
    prompts = [Prompt(f"问 {i}", "") for i in range(20)]
    assert {prompt.prompt for prompt in split_by_prompt(prompts, 0.5)[1]} == held


def test_split_by_prompt_and_people_who_only_evaluate(project):
    """No prompt is on both sides; held-out people are in no training file; the trainers split the same way."""
    names = [f"问题 {i}" for i in range(40)]
    add_records(project, *({"prompt": name, "responses": ["x", "y"]} for name in names))
    add_records(project, *({"prompt": [{"role": "user", "content": name}], "responses": ["z", "y"]} for name in names))
    active, held_out = person_of(project), person_of(project, "后", "held-out")
    for person in (active, held_out):
        label_all(project, person, {name: [FIRST] for name in names})
    made = export_project(project, ExportOptions(eval_fraction=0.25))
    parts = {part: records_of(made, f"preferences.{part}.jsonl") for part in ("train", "eval", "held-out")}
    assert sum(map(len, parts.values())) == 160

    def prompts(part):
        return {one["prompt"] if isinstance(one["prompt"], str) else one["prompt"][0]["content"] for one in parts[part]}

    assert prompts("train").isdisjoint(prompts("eval"))
    assert prompts("train") == prompts("held-out")
    assert {one["feedback"]["person"] for one in parts["train"]} == {active}
    assert {one["feedback"]["person"] for one in parts["held-out"]} == {held_out}
    assert {one["feedback"]["person"] for one in parts["eval"]} == {active, held_out}
    whole = export_project(project, ALL)
    assert "preferences.eval.jsonl" not in whole.files
    (project.folder / "all.jsonl").write_bytes(whole.files["preferences.train.jsonl"])
    train, _ = split_by_prompt(read_rankings(str(project.folder / "all.jsonl")), 0.25)
    assert len(train) == len(parts["train"])


@pytest.mark.parametrize(
    ("fraction", "full", "empty"), [(1e-9, "train", "eval"), (1 - 1e-9, "eval", "train")], ids=["train", "eval"]
)
def test_a_small_project_may_have_an_empty_side_which_is_said(project, fraction, full, empty):
    add_records(project, {"prompt": "问题\u2028🙂", "responses": ["x", "y"]})
    label_all(project, person_of(project), {"问题\u2028🙂": [FIRST]})
    made = export_project(project, ExportOptions(eval_fraction=fraction))
    assert made.manifest["files"][f"preferences.{full}.jsonl"]["records"] == 1
    assert f"preferences.{empty}.jsonl" not in made.files
    said = f"preferences: all records (1) are in preferences.{full}, none in preferences.{empty}"
    assert said in made.manifest["notes"][0]
    assert not any("--eval-data" in note for note in made.manifest["notes"])
    assert export_project(project, ALL).manifest["notes"] == []
    with pytest.raises(ConfigError, match="it must be at least 0 and less than 1"):
        export_project(project, ExportOptions(eval_fraction=1))


def test_screening_items_and_repeats_are_left_out(tmp_path):
    settings = ProjectSettings(overlap=0, repeats=0.5, screening_items=1, screening_agreement=0)
    with Project.create(tmp_path / "p", settings) as project:
        add_records(project, {"prompt": "s", "responses": ["x", "y"]}, screening=True)
        add_records(project, *({"prompt": f"{i}", "responses": ["x", "y"]} for i in range(40)))
        answers = {name: [FIRST] for name in ["s", *map(str, range(40))]}
        owner = project.people()[0].person_id
        first = project.next_item(owner)
        project.label(owner, first.item.item_id, FIRST, nonce="n", seconds=1)
        label_all(project, project.add_person("新", "annotator").person_id, answers)
        made = export_project(project, ALL)
        labels = project.labels()
    screening = sum(one.item.screening for one in labels)
    repeats = sum(one.event.content["repeat"] and not one.item.screening for one in labels)
    assert min(screening, repeats) > 1
    assert made.manifest["left_out"] == {"hidden repeats": repeats, "screening items": screening}
    assert made.manifest["files"]["preferences.train.jsonl"]["records"] == 40


def test_every_label_of_an_item_is_a_record(tmp_path):
    with Project.create(tmp_path / "p", ProjectSettings(overlap=1, overlap_people=2, repeats=0)) as project:
        add_records(project, *({"prompt": name, "responses": ["x", "y"]} for name in "ab"))
        for name, answer in (("安", FIRST), ("博", SECOND)):
            label_all(project, person_of(project, name), {"a": [answer], "b": [answer]})
        made = export_project(project, ALL)
        found = [(one["prompt"], one["chosen"]) for one in records_of(made, "preferences.train.jsonl")]
        assert found == [("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")]
        assert made.manifest["weighting"].startswith("every label is one record")
        (anna, bo) = (one.person_id for one in project.people()[1:])
        only = export_project(project, ExportOptions(0, without=(anna,)))
        assert [one["feedback"]["person"] for one in records_of(only, "preferences.train.jsonl")] == [bo] * 2
        assert only.manifest["left_out"] == {"people": 2}
        with pytest.raises(ConfigError, match="--without p9: there is no such person; the project has p1, p2, p3"):
            export_project(project, ExportOptions(0, without=("p9",)))


def test_no_margins_are_no_imported_margins_either(project):
    text = lines([{"prompt": "问\u2028", "chosen": "好", "rejected": "不", "margin": 0.5}])
    add(project, read_items_text(text), with_labels=True)
    for margin, expected in {"none": None, "small": 0.5, "large": 0.5}.items():
        (record,) = records_of(export_project(project, ExportOptions(0, margin)), "preferences.train.jsonl")
        assert record.get("margin") == expected


def test_labels_of_refused_people_are_left_out(project):
    add_records(project, *({"prompt": name, "responses": ["x", "y"]} for name in "abc"))
    refused = person_of(project, "拒🙂")
    label_all(project, refused, {name: [FIRST] for name in "abc"})
    project.set_person(refused, standing="refused")
    made = export_project(project, ALL)
    assert set(made.files) == {"items.jsonl", "events.jsonl"}
    assert made.manifest["left_out"] == {"refused people": 3}
    project.set_person(refused, standing="removed")
    assert export_project(project, ALL).manifest["files"]["preferences.train.jsonl"]["records"] == 3


def test_an_item_that_anybody_flagged_is_left_out_with_all_its_labels(tmp_path):
    leave_out = ExportOptions(0, flagged="leave-out")
    with Project.create(tmp_path / "p", ProjectSettings(overlap=1, overlap_people=2, repeats=0)) as project:
        add_records(project, *({"prompt": name, "responses": ["x", "y"]} for name in ("a", "b", "c")))
        skips, flags, neither = (person_of(project, name) for name in ("跳", "旗", "安"))
        project.skip(skips, project.next_item(skips).item.item_id, "电话\u2028", ["personal-data"], "skip")
        label_all(project, flags, {"a": [FIRST], "b": [FIRST, "unsafe"], "c": [FIRST]})
        label_all(project, neither, {name: [FIRST] for name in "abc"})
        made = export_project(project, leave_out)
        assert [one["prompt"] for one in records_of(made, "preferences.train.jsonl")] == ["c"] * 2
        assert made.manifest["left_out"] == {"flagged": 4}
        project.undo(skips, "undo")
        assert export_project(project, leave_out).manifest["left_out"] == {"flagged": 2}


def test_the_same_events_are_the_same_bytes(project):
    add_records(project, *({"prompt": f"{i}", "responses": ["x", NASTY]} for i in range(5)))
    person = person_of(project)
    label_all(project, person, {name: [FIRST] for name in "01234"})
    before = export_project(project, ALL)
    again = export_project(project, ALL)
    assert again.zipped() == before.zipped()
    with zipfile.ZipFile(io.BytesIO(before.zipped())) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        manifest = json.loads(archive.read("manifest.json"))
        for name, facts in manifest["files"].items():
            content = archive.read(name)
            assert (content, hashlib.sha256(content).hexdigest()) == (before.files[name], facts["sha256"])
            assert content.count(b"\n") == facts["records"]
        assert sorted(archive.namelist()) == sorted([*manifest["files"], "manifest.json"])
    project.undo(person, "undo")
    after = export_project(project, ALL)
    assert after.manifest["content_hash"] != before.manifest["content_hash"]
    assert after.manifest["files"]["preferences.train.jsonl"]["records"] == 4


def test_exports_and_statistics_are_of_one_moment(memory):
    """Though another person adds an item and labels it whenever somebody looks at the project."""
    store = memory(overlap=0, repeats=0)
    person = store.person()

    def look(work):
        store.add(1)
        store.label(person, store.next(person).item.item_id)
        return store.do(work)

    store.look = look
    made = export_project(store.project, ALL)
    labelled = [event for event in records_of(made, "events.jsonl") if event["kind"] == "label"]
    for name in ("preferences.train.jsonl", "items.jsonl"):
        assert len(records_of(made, name)) == len(labelled) > 0
    assert project_statistics(store.project)["left_out"]["withdrawn"] == 0


def test_a_folder_is_replaced_only_if_asked_and_only_an_export(project, tmp_path):
    made, folder = export_project(project, ALL), tmp_path / "导出"
    made.write(folder, project.folder)
    with pytest.raises(ConfigError, match="add --overwrite"):
        made.write(folder, project.folder)
    add_records(project, {"prompt": NASTY})
    again = export_project(project, ALL)
    assert set(again.files) == {"items.jsonl", "events.jsonl"}, "without labels"
    again.write(folder, project.folder, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"} == again.files
    (folder / "旧").mkdir()
    with pytest.raises(
        ConfigError, match="holds 旧, which heedful label export does not write and --overwrite would delete"
    ):
        made.write(folder, project.folder, overwrite=True)
    other = tmp_path / "run"
    other.mkdir()
    (other / "manifest.json").write_text('{"files": {"items.jsonl": 1}}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"holds manifest\.json"):
        made.write(other, project.folder, overwrite=True)
    (other / "manifest.json").unlink()
    made.write(other, project.folder, overwrite=True)


def test_an_export_never_replaces_a_project(project, monkeypatch, capsys):
    """Neither by its own name, nor one around it, nor by a link to it; and nothing is written into it."""
    add_records(project, {"prompt": NASTY})
    project.close()
    folder = project.folder
    (folder.parent / "link").symlink_to(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.chdir(folder.parent)
    for output in (".", "..", f"{folder.name}/in it", "link"):
        assert main(["label", "export", folder.name, "--output", output, "--overwrite"]) == 2
        assert "overlaps with the project 项目" in capsys.readouterr().err
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


TEXT = st.text(min_size=1).filter(str.strip)
MESSAGES = TEXT.map(lambda text: [{"role": "user", "content": text}])
EXTRA = st.dictionaries(st.sampled_from(["id", "来源", "é\u2028"]), TEXT | st.integers() | st.booleans(), max_size=2)
PAIRS = st.builds(
    lambda extra, prompt, two, margin: {**extra, "prompt": prompt, "chosen": two[0], "rejected": two[1]} | margin,
    EXTRA,
    TEXT | MESSAGES,
    st.lists(TEXT, min_size=2, max_size=2, unique=True),
    st.sampled_from([{}, {"margin": 0.25}, {"margin": -1}]),
)
RANKINGS = st.integers(2, 5).flatmap(
    lambda n: st.builds(
        lambda extra, prompt, responses, order: {**extra, "prompt": prompt, "responses": responses, "ranks": order},
        EXTRA,
        TEXT | MESSAGES,
        st.lists(TEXT, min_size=n, max_size=n, unique=True),
        st.permutations(range(n)) | st.just([0, *[1] * (n - 1)]),
    )
)
RATED = st.builds(
    lambda extra, prompt, text, label: {**extra, "prompt": prompt, "completion": text, "label": label},
    EXTRA,
    TEXT | MESSAGES,
    TEXT,
    st.booleans(),
)


def imported_labels(imported):
    """The labels that a file has, as a project would return them."""
    person = Person("p2", "import", "annotator", "removed")
    for seq, item in enumerate(imported.items, 1):
        content = {"item": item.item_id, "answer": imported.answers[item.item_id], "seconds": None, "repeat": False}
        yield LabelledItem(item, person, Event(seq, f"e{seq}", "", "p2", "label", content))


@pytest.mark.parametrize(
    ("records", "name"),
    [(PAIRS, "preferences"), (RANKINGS, "preferences"), (RATED, "labelled")],
    ids=["pairs", "rankings", "rated"],
)
@given(data=st.data())
def test_import_and_export_is_the_identity(data, records, name):
    given_records = data.draw(st.lists(records, min_size=1, max_size=3, unique_by=identified))
    imported = read_items_text(lines(given_records))
    made = export(Snapshot(imported.items, list(imported_labels(imported))), ALL)
    assert without_feedback(records_of(made, f"{name}.train.jsonl")) == given_records


def identified(record):
    """What makes two records the same item: the order of their answers does not count."""
    answers = record.get("responses") or [record.get(key) for key in ("chosen", "rejected", "completion")]
    return json.dumps([record["prompt"], sorted(map(str, answers))])


def test_answers_of_several_turns_are_exported_as_they_were(project, tmp_path):
    """Preferences and ratings, and items to import again: each message with its calls, results and thinking."""
    turn, short = [{"role": "user", "content": NASTY}], [{"role": "assistant", "content": "苹果"}, *SEVERAL_TURNS[3:]]
    rating = [{"role": "user", "content": "评"}]
    asked = [{"prompt": turn, "responses": [short, SEVERAL_TURNS], "tools": [{"name": "guess"}]}]
    add(project, read_items_text(lines([*asked, {"prompt": rating, "completion": SEVERAL_TURNS, "label": True}])))
    second = {"preferred": 1, "strength": 4, "both_bad": False}
    label_all(project, person_of(project), {NASTY: (second,), "评": ({"rating": 7, "flags": []},)})
    made = export_project(project, ALL)
    for name in ("preferences", "pairs"):
        (record,) = records_of(made, f"{name}.train.jsonl")
        assert (record["prompt"], record["chosen"], record["rejected"]) == (turn, SEVERAL_TURNS, short)
        assert record["tools"] == [{"name": "guess"}]
    (record,) = records_of(made, "labelled.train.jsonl")
    assert (record["prompt"], record["completion"], record["label"]) == (rating, SEVERAL_TURNS, True)
    made.write(tmp_path / "导出", project.folder)
    (ranking,) = read_rankings(str(tmp_path / "导出" / "preferences.train.jsonl"))
    assert [message.learned for message in ranking.responses[0]] == [True, True, False, True, True]
    again = read_items(str(tmp_path / "导出" / "items.jsonl"))
    assert [item.item_id for item in again.items] == [item.item_id for item in project.items()]


def test_a_whole_project_goes_round(project, tmp_path):
    """File -> project -> export -> readers, for every shape that has labels, and items.jsonl into another project."""
    turn = [{"role": "user", "content": NASTY}]
    function = {"type": "function", "function": {"name": "f", "arguments": {"城": 1}}}
    call = [{"role": "assistant", "content": "", "tool_calls": [function]}]
    shapes = {
        "pairs": [
            {"prompt": NASTY, "chosen": NASTY, "rejected": "不\u2028", "margin": 0.5, "truncated": True},
            {"prompt": turn, "chosen": call, "rejected": "不", "tools": [{"name": "f"}]},
            {
                "chosen": [*turn, {"role": "assistant", "content": "好"}],
                "rejected": [*turn, {"role": "assistant", "content": "不"}],
            },
            {"chosen": "\n\nHuman: 你\n\nAssistant: 好", "rejected": "\n\nHuman: 你\n\nAssistant: 不"},
            {"prompt": "排", "responses": ["甲", "乙\u202e", "丙"], "ranks": [1, 0, 1]},
        ],
        "labelled": [
            {"prompt": turn, "completion": NASTY, "label": True},
            {"prompt": "a", "completion": "x", "label": False},
        ],
    }
    readers = {"pairs": (read_rankings, "preferences"), "labelled": (read_labelled, "labelled")}
    for name, records in shapes.items():
        path, count = write_jsonl(tmp_path / f"{name}.jsonl", records), len(records)
        assert add(project, read_items(path), with_labels=True) == {"items": count, "labels": count, "against": 0}
        assert add(project, read_items(path), with_labels=True) == {"items": 0, "labels": 0, "against": 0}
        export_project(project, ALL).write(tmp_path / "导出", project.folder, overwrite=True)
        read, file = readers[name]
        there, back = read(path), read(str(tmp_path / "导出" / f"{file}.train.jsonl"))
        assert [vars(one) | {"source": ""} for one in there] == [vars(one) | {"source": ""} for one in back]
    text = lines([{"prompt": turn, "completion": NASTY}])
    add(project, read_items_text(text, options=ImportOptions(task="demonstration")), with_labels=True)
    made = export_project(project, ALL)
    made.write(tmp_path / "导出", project.folder, overwrite=True)
    (demonstration,) = read_demonstrations(str(tmp_path / "导出" / "demonstrations.train.jsonl"))
    assert (demonstration.prompt[0].content, demonstration.response) == (NASTY, NASTY)
    again = read_items(str(tmp_path / "导出" / "items.jsonl"))
    assert [item.item_id for item in again.items] == [item.item_id for item in project.items()]
