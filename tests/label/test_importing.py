"""Records become items: every shape of docs/data.md, the labels they have, errors with file and line."""

import dataclasses
import json

import pytest

from heedful import ConfigError, DataError
from heedful.apps.label import Candidate, ImportOptions, export_project
from heedful.apps.label.commands import _show
from heedful.apps.label.importing import add, read_items, read_items_text
from jsonl import lines
from labelling import SEVERAL_TURNS
from refusals import refused

NASTY = "汉字 🙂\u2028新行\u2029 \u202eabc\u202c \u200f\x85 \U0001f1e8\U0001f1f3 é"
QUESTION = [{"role": "user", "content": NASTY}]
SAID = {"role": "assistant", "content": "答"}


def read(*records, **options):
    """What a file of these records holds."""
    return read_items_text(lines(records), options=ImportOptions(**options))


def one(record, **options):
    imported = read(record, **options)
    (item,) = imported.items
    return item, imported.answers.get(item.item_id)


HH = {"chosen": "\n\nHuman: 你好\n\nAssistant: 好", "rejected": "\n\nHuman: 你好\n\nAssistant: 不"}
WHOLE = {"chosen": [*QUESTION, SAID], "rejected": [*QUESTION, {**SAID, "content": "不"}]}
FIRST = {"preferred": 0, "strength": None, "both_bad": False}
THREE = {"prompt": "a", "responses": ["x", "y", "z"], "ranks": [7, 3, 7]}
SHAPES = [
    ({"prompt": NASTY}, "demonstration", NASTY, [], None),
    ({"messages": QUESTION}, "demonstration", QUESTION, [], None),
    ({"prompt": NASTY, "chosen": "好", "rejected": NASTY}, "pair", NASTY, ["好", NASTY], FIRST),
    (WHOLE, "pair", QUESTION, ["答", "不"], FIRST),
    (HH, "pair", "\n\nHuman: 你好\n\nAssistant:", [" 好", " 不"], FIRST),
    ({"prompt": "a", "responses": ["x", "y"]}, "pair", "a", ["x", "y"], None),
    ({"prompt": "a", "responses": ["x", "y"], "ranks": [1, 0]}, "ranking", "a", ["x", "y"], {"ranks": [2, 1]}),
    (THREE, "ranking", "a", ["x", "y", "z"], {"ranks": [2, 1, 2]}),
    ({"prompt": "a", "responses": ["x", "y"], "ranks": [4, 4]}, "ranking", "a", ["x", "y"], {"ranks": [1, 1]}),
    ({"prompt": QUESTION, "completion": [SAID], "label": True}, "rating", QUESTION, ["答"], {"rating": 7, "flags": []}),
    ({"prompt": "a", "completion": "x", "label": False}, "rating", "a", ["x"], {"rating": 1, "flags": []}),
    ({"prompt": "a", "completion": "x", "rating": 4}, "rating", "a", ["x"], {"rating": 4, "flags": []}),
]


def test_each_shape():
    for record, task, prompt, responses, answer in SHAPES:
        item, found = one(record)
        assert (item.task, item.prompt, found) == (task, prompt, answer)
        assert [candidate.response for candidate in item.candidates] == responses


def test_what_sampling_writes():
    """Responses with their sources, how the record was chosen, other columns, and a message that calls a tool."""
    function = {"type": "function", "function": {"name": "f", "arguments": {}}}
    call = {"role": "assistant", "content": "", "tool_calls": [function]}
    responses = [{"response": NASTY, "source": {"model": "运行/一", "seed": 3}}, {"response": call}]
    record = {"prompt": QUESTION, "responses": responses, "chosen_by": "active", "id": 7, "tools": [{"name": "f"}]}
    item, _ = one(record, round=3)
    assert item.candidates == (Candidate(NASTY, {"model": "运行/一", "seed": 3}), Candidate(call))
    assert (item.task, item.round, item.chosen_by) == ("pair", 3, "active")
    assert item.columns == {"id": 7, "tools": [{"name": "f"}]}


def test_answers_of_several_turns():
    """To compare, rank and rate, as they were; a person who writes or corrects an answer writes one text."""
    short = [{"role": "assistant", "content": "苹果"}, *SEVERAL_TURNS[3:]]
    pair, _ = one({"prompt": QUESTION, "responses": [SEVERAL_TURNS, short]})
    assert (pair.task, [candidate.response for candidate in pair.candidates]) == ("pair", [SEVERAL_TURNS, short])
    rating, _ = one({"prompt": QUESTION, "completion": [*QUESTION, *SEVERAL_TURNS], "rating": 3})
    assert (rating.task, rating.candidates) == ("rating", (Candidate(SEVERAL_TURNS),))
    preferred, label = one({"chosen": [*QUESTION, *SEVERAL_TURNS], "rejected": [*QUESTION, SAID]})
    assert (preferred.prompt, label) == (QUESTION, FIRST)
    assert [candidate.response for candidate in preferred.candidates] == [SEVERAL_TURNS, "答"]
    for task in ("correction", "demonstration"):
        with pytest.raises(DataError, match=f"import.jsonl:1: an answer of several turns, for the task {task}"):
            read({"prompt": QUESTION, "completion": SEVERAL_TURNS}, task=task)


def test_answers_rated_by_themselves_and_two_records_of_one_item():
    """The first counts. Null is what Parquet writes for a column that a record does not have."""
    several = read({"prompt": "a", "responses": ["x", "y", "x"]}, task="rating")
    rated = [(item.task, item.candidates) for item in several.items]
    assert (rated, several.repeated) == ([("rating", (Candidate("x"),)), ("rating", (Candidate("y"),))], 1)
    record = {"prompt": "a", "completion": "x"}
    records = ({**record, "label": True, "id": 1, "note": None}, {**record, "label": False, "id": 2})
    imported = read(*records)
    assert [item.columns for item in imported.items] == [{"id": 1}]
    assert [answer["rating"] for answer in imported.answers.values()] == [7]
    assert (imported.records, imported.repeated) == (2, 1)


PAIR = {"prompt": "问", "chosen": NASTY, "rejected": "不"}
PAIR_TURNED = {"prompt": "问", "chosen": "不", "rejected": NASTY}
RANKED = {"prompt": "排", "responses": ["甲", "乙", "丙"], "ranks": [0, 1, 2]}


def test_labels_that_contradict_an_earlier_one_are_said_with_their_lines(capsys):
    """The same pair, in either order, and the same ranking are one item; what is not taken is said."""
    ranked_the_same = {"prompt": "排", "responses": ["丙", "甲", "乙"], "ranks": [2, 0, 1]}
    records = (PAIR, RANKED, PAIR_TURNED, ranked_the_same, PAIR)
    imported = read(*records)
    assert len(imported.items) == len(imported.answers) == 2
    assert imported.same_labels == 2
    assert [str(error) for error in imported.against] == [
        "import.jsonl:3: the label differs from that of import.jsonl:1"
    ]
    _show(imported)
    assert "import.jsonl:3" in capsys.readouterr().out


@pytest.fixture
def project(new_project):
    return new_project()


def test_a_label_is_of_the_candidates_of_the_item_that_is_there(project):
    turned = {**RANKED, "responses": ["丙", "乙", "甲"]}
    there = read({"prompt": "问", "responses": ["不", NASTY]}, turned | {"ranks": None})
    assert add(project, there)["items"] == 2
    labels = read(PAIR, RANKED)
    assert add(project, labels, with_labels=True) == {"items": 0, "labels": 2, "against": 0}
    first, second = (one.event.content["answer"] for one in project.labels())
    assert (first["preferred"], second["ranks"]) == (1, [3, 2, 1])
    assert add(project, labels, with_labels=True) == {"items": 0, "labels": 0, "against": 0}
    assert add(project, read(PAIR_TURNED), with_labels=True)["against"] == 1


TASKS = [
    ({"prompt": "a", "completion": "x"}, {"task": "correction"}, "correction"),
    ({"prompt": "a", "completion": "x"}, {"usual": "demonstration"}, "demonstration"),
    ({"messages": [*QUESTION, SAID]}, {"usual": "rating"}, "rating"),
    ({"prompt": "a"}, {"usual": "chat"}, "chat"),
    ({"prompt": "a"}, {"usual": "pair"}, "demonstration"),
    ({"prompt": "a", "responses": ["x", "y"]}, {"usual": "ranking"}, "ranking"),
    ({"prompt": "a", "chosen": "x", "rejected": "y"}, {"usual": "ranking"}, "pair"),
    ({"prompt": "a", "responses": ["x"], "feedback": {"task": "correction"}}, {}, "correction"),
    ({"prompt": "a", "responses": ["x"], "feedback": {"task": "correction"}}, {"task": "rating"}, "rating"),
]


def test_who_says_the_task():
    """--task, then what an export wrote, then the project if the columns leave it open, then the columns."""
    assert [one(record, **options)[0].task for record, options, _ in TASKS] == [task for *_, task in TASKS]
    assert one({"prompt": "a", "completion": NASTY}, task="demonstration")[1] == {"text": NASTY}
    assert one({"prompt": "a", "completion": NASTY}, task="correction")[1] is None


WRONG = [
    ({"prompt": "a", "completion": "x"}, {}, "--task rating, --task correction or --task demonstration"),
    ({"text": "a"}, {}, "--columns prompt=text"),
    ({"question": "a"}, {}, "Perhaps: --columns instruction=question"),
    ({"prompt": "a", "responses": ["x", "x"], "ranks": [0, 1]}, {}, "2 answers that are all equal"),
    ({"prompt": "a", "chosen": "x", "rejected": "x"}, {}, "2 answers that are all equal"),
    ({"prompt": "a", "responses": list("abcdefghij")}, {}, "10 answers for the task ranking. Accepted: 2 to 9"),
    ({"prompt": "a", "responses": list("abc")}, {"task": "pair"}, "3 answers for the task pair. Accepted: 2 for each"),
    ({"prompt": "a", "responses": ["x", "y"], "ranks": [0]}, {}, "2 `responses` but 1 `ranks`"),
    ({"prompt": "a", "responses": ["x", "y"], "ranks": [0, True]}, {}, "a list of integers"),
    ({"prompt": "a", "responses": "xy"}, {}, "a list of responses"),
    ({"prompt": "a", "responses": ["x", {"response": "y", "model": "m"}]}, {}, r"{response, source: {...}}"),
    ({"prompt": "a", "responses": ["x", {"response": "y", "source": "m"}]}, {}, r"{response, source: {...}}"),
    ({"prompt": "a", "responses": ["x", "y"], "chosen_by": "me"}, {}, "one of import, random, active"),
    ({"prompt": "a", "completion": "x", "label": 2}, {}, "true or 1 for a good response"),
    ({"prompt": "a", "completion": "x", "rating": 8}, {}, "1 to 7"),
    ({"prompt": "a", "tools": [{"name": "f"}]}, {}, "`tools` beside raw text"),
    ({"prompt": "a", "chosen": "x"}, {}, "`chosen` by itself. Accepted: `chosen` and `rejected` together"),
    ({"prompt": "a", "rejected": NASTY, "chosen": None}, {}, "`rejected` by itself"),
    ({"prompt": "a", "responses": ["x", "y"], "rejected": "y"}, {}, "`rejected` by itself"),
    ({"prompt": " "}, {}, "empty or only white space"),
    ({"prompt": "a", "chosen": "x", "rejected": "y"}, {"task": "chat"}, "2 answers for the task chat"),
]


def test_what_cannot_be_used_is_said_with_its_line():
    for record, options, said in WRONG:
        good = {"prompt": "好"} | ({"responses": ["甲", "乙"]} if options == {"task": "pair"} else {})
        with refused(DataError, "import.jsonl:2: ", said) as error:
            read(good, record, **options)
        kept = read(good, record, unusable="drop", **options)
        assert [str(one) for one in kept.refused] == [str(error.value)]
        assert len(kept.items) == 1


def test_a_broken_line_has_its_number_and_no_folder(tmp_path):
    text = lines([{"prompt": "a\u2028b"}]) + "{\n"
    with pytest.raises(DataError, match=r"^import\.jsonl:2: not JSON"):
        read_items_text(text)
    path = tmp_path / "数据.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"数据\.jsonl:2: not JSON"):
        read_items(str(path))
    with pytest.raises(DataError, match="lone surrogate"):
        read_items_text('{"prompt": "\ud83d"}')
    with pytest.raises(ConfigError, match=r"must be one of \.jsonl, \.json"):
        read_items_text("{}", ".xlsx")


def test_a_json_list_and_other_column_names():
    text = json.dumps([{"question": "a"}, {"question": "b"}])
    imported = read_items_text(text, ".json", ImportOptions(columns="prompt=question"))
    assert [item.prompt for item in imported.items] == ["a", "b"]


def test_the_preview_has_no_sources():
    source = {"model": "秘密/模型"}
    responses = [{"response": "x", "source": source}, {"response": "y", "source": source}]
    records = [{"prompt": f"{i}", "responses": responses} for i in range(7)]
    bad = {"prompt": "", "completion": "x", "label": True}
    facts = read(*records, records[0], bad, unusable="drop").preview(first=2)
    assert facts | {"first": 0, "errors": 0} == {
        "records": 9, "items": 7, "tasks": {"pair": 7}, "labels": 0, "repeated": 1, "refused": 1, "first": 0, "errors": 0,
        "same_labels": 0, "against": 0, "against_at": [], "equal": 0, "equal_at": [],
    }  # fmt: skip
    assert facts["errors"][0].startswith("import.jsonl:9: `prompt` is empty")
    assert facts["first"][1] == {"task": "pair", "prompt": "1", "answers": ["x", "y"]}
    assert "秘密" not in json.dumps(facts, ensure_ascii=False)


def test_items_come_back_from_an_export_as_they_were(project):
    """Screening items do not come back as ordinary work."""
    record = {"prompt": "问\u2028", "responses": ["甲", "乙🙂"]}
    add(project, read(record, screening=True))
    add(project, read({**record, "prompt": "二", "chosen_by": "active"}, round=3))
    text = export_project(project).files["items.jsonl"].decode()
    again = read_items_text(text).items
    assert again == [dataclasses.replace(one, batch="") for one in project.items()]
    facts = [(item.screening, item.chosen_by, item.round) for item in again]
    assert facts == [(True, "import", 1), (False, "active", 3)]
    assert {item.round for item in read_items_text(text, options=ImportOptions(round=2)).items} == {2}
    with pytest.raises(DataError, match=r"import\.jsonl:1: `feedback.round` is"):
        read({**record, "feedback": {"round": "x"}})


def test_items_that_are_there_do_not_become_screening_items(project):
    old, new = ({"prompt": name, "responses": ["甲", "乙"]} for name in ("旧\u2028", "新"))
    add(project, read(old))
    with pytest.raises(DataError, match="outside the screening set"):
        add(project, read(new, old, screening=True))
    assert len(project.items()) == 1
    add(project, read(new, screening=True))
    assert add(project, read(old, new))["items"] == 0


def test_nobody_becomes_the_person_of_imported_labels(project):
    with pytest.raises(DataError, match="give the person another name"):
        project.add_person("import", "annotator")
    anna = project.add_person("安娜\u2028", "annotator").person_id
    with pytest.raises(DataError, match="give the person another name"):
        project.set_person(anna, name="import", standing="removed")
    add(project, read(PAIR), with_labels=True)
    (person,) = {one.person for one in project.labels()}
    for change in ({"standing": "active"}, {"name": "安娜"}):
        with pytest.raises(DataError, match="give the person another name"):
            project.set_person(person.person_id, **change)
    assert add(project, read(RANKED), with_labels=True)["labels"] == 1
    assert {one.person for one in project.labels()} == {person}
