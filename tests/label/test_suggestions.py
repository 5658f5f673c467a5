"""Suggested answers: checked at import, shown in the order of the screen, compared on the server, exported, counted."""

import json

import pytest

from heedful import DataError
from heedful.apps.label import ImportOptions, Project, export_project, project_statistics
from heedful.apps.label.importing import add, read_items_text
from heedful.apps.label.server.api import shown_item
from heedful.cli.main import main
from heedful.configs.label import ProjectSettings
from jsonl import lines
from labelling import send
from refusals import refused

PAIR = {"prompt": "问", "responses": ["甲 😀", "乙"]}
THREE = {"prompt": "问", "responses": ["a", "b", "c"]}
RATED = {"prompt": "问", "completion": "答"}
NONE = {"strength": None, "both_bad": False}


def read(*records, **options):
    return read_items_text(lines(records), options=ImportOptions(**options))


@pytest.fixture
def project(new_project):
    return new_project()


TIE = {"preferred": None, "strength": None, "both_bad": True}
MAY = [
    (PAIR, None, {"preferred": 1}, {"preferred": 1} | NONE),
    (PAIR, None, 0, {"preferred": 0} | NONE),
    (PAIR, None, {"preferred": None, "both_bad": True}, TIE),
    (PAIR, None, {"preferred": 0, "strength": 2}, {"preferred": 0, "strength": 2, "both_bad": False}),
    (THREE, None, {"ranks": [3, 1, 1]}, {"ranks": [2, 1, 1]}),
    (THREE, None, [2, 0, 1], {"ranks": [3, 1, 2]}),
    (RATED, "rating", {"rating": 6}, {"rating": 6, "flags": []}),
    (RATED, "rating", 6, {"rating": 6, "flags": []}),
    (RATED, "correction", "更好", {"text": "更好"}),
    ({"prompt": "问"}, None, {"text": "第一\n行"}, {"text": "第一\n行"}),
]
MAY_NOT = [
    (PAIR, None, {"preferred": 2}, "preferred must be one of 0, 1, or null for a tie, got 2"),
    (PAIR, None, "乙", "preferred must be one of 0, 1, or null for a tie, got '乙'"),
    (PAIR, None, {}, "the answer to a pair lacks 'preferred'"),
    (PAIR, None, {"rating": 3}, "the answer to a pair has no field 'rating'; it has preferred, strength, both_bad"),
    (THREE, None, [1, 2], "ranks must be a list of 3 ranks"),
    (THREE, None, [1, 2, "c"], "a rank must be one of 1, 2, 3, got 'c'"),
    (RATED, "rating", 8, "rating must be one of 1, 2, 3, 4, 5, 6, 7, got 8"),
    (RATED, "correction", "答", "the text equals the original answer"),
    ({"prompt": "问"}, None, 3, "text must be a string, got 3"),
    ({"prompt": "问"}, "chat", "好", "a chat takes no suggestion"),
    (THREE, "rating", 3, "one `suggestion` for 3 items"),
]


def test_what_may_be_suggested_and_what_may_not(capsys):
    for record, task, given, kept in MAY:
        (item,) = read(record | {"suggestion": given}, task=task).items
        assert (item.suggestion, item.columns) == (kept, {})
        (plain,) = read(record | {"suggestion": None}, task=task).items
        assert (plain.suggestion, plain.item_id) == (None, item.item_id), "no other item, whatever is suggested"
    assert "suggestion" not in capsys.readouterr().err, "it is read, and no column that only stays"
    for record, task, given, fragment in MAY_NOT:
        with refused(DataError, "import.jsonl:2: ", fragment):
            read(record, record | {"suggestion": given}, task=task)


def test_the_same_item_with_another_suggestion(project):
    """In another order it is the same suggestion; another one is said, and does not change the item."""
    turned = PAIR | {"responses": PAIR["responses"][::-1]}
    same = read(PAIR | {"suggestion": 0}, turned | {"suggestion": 1})
    assert (len(same.items), same.against) == (1, [])
    other = read(PAIR | {"suggestion": 0}, turned | {"suggestion": 0})
    assert [str(one) for one in other.against] == [
        "import.jsonl:2: the suggestion differs from that of an earlier record of the same item"
    ]
    assert add(project, same)["items"] == 1
    assert add(project, read(turned | {"suggestion": 1}))["items"] == 0, "once more the same file"
    assert add(project, read(PAIR))["items"] == 0
    with pytest.raises(DataError, match="is already in the project, with another or no suggestion"):
        add(project, read(turned | {"suggestion": 0}, {"prompt": "新"}))
    assert [one.suggestion for one in project.items()] == [{"preferred": 0} | NONE], "nothing was added"


def on_screen(project, person):
    """What the person's page is told to show as suggested."""
    site = type("Site", (), {"project": project})
    return shown_item(site, person, project.next_item(person))["suggestion"]


def followed(project, person, answer):
    """Whether a label that a page sends, in terms of the screen, is what was suggested."""
    event = send(project, person, answer, token=project.next_item(person).token)
    return event.content.get("suggestion_followed")


def test_a_suggestion_follows_the_order_of_the_screen(project):
    """20 pairs and 20 rankings: what the page is told, taken over as it is, is the suggested candidate in every order."""
    pairs = [PAIR | {"prompt": f"问 {i}", "suggestion": 1} for i in range(20)]
    add(project, read(*pairs, *(THREE | {"prompt": f"排 {i}", "suggestion": [0, 2, 1]} for i in range(20))))
    shown, orders = set(), set()
    for _ in range(40):
        order, said = project.next_item("p2").order, on_screen(project, "p2")
        orders.add(order)
        shown.add(str(said.get("preferred", said.get("ranks"))))
        if "preferred" in said:
            assert order[said["preferred"]] == 1
            said = said | {"strength": 3}
        assert followed(project, "p2", said) is True
    assert len(shown) == len(orders) == 8, "two orders of a pair, six of a ranking"
    for one in project.labels():
        answer = one.event.content["answer"]
        assert answer.get("preferred", 1) == 1
        assert answer.get("ranks", [1, 3, 2]) == [1, 3, 2]


SENT = [
    (RATED, "rating", 6, [{"rating": 6, "flags": ["hallucination"]}], [{"rating": 5, "flags": []}]),
    (PAIR, None, {"preferred": None}, [TIE | NONE], [TIE, {"preferred": 0, "strength": 1, "both_bad": False}]),
    (THREE, None, [1, 1, 1], [{"ranks": [1, 1, 1]}], [{"ranks": [1, 1, 2]}]),
    (RATED, "correction", "一\n二", [{"text": "一\n二"}, {"text": "一\r\n二"}], [{"text": "一\n二。"}]),
    ({"prompt": "问"}, None, "好", [{"text": "好"}], [{"text": "好 "}]),
]


def test_the_server_says_whether_it_was_followed(project):
    for at, (record, task, given, equal, other) in enumerate(SENT):
        prompts = [f"问 {at} {i}" for i in range(len(equal + other))]
        add(project, read(*(record | {"prompt": one, "suggestion": given} for one in prompts), task=task))
        assert [followed(project, "p2", one) for one in equal] == [True] * len(equal)
        assert [followed(project, "p2", one) for one in other] == [False] * len(other)


def test_labels_without_a_page_or_a_suggestion_say_nothing(project):
    add(project, read(RATED | {"suggestion": 6}, RATED | {"prompt": "另"}, task="rating"))
    first, second = (one.item_id for one in project.items())
    rated = {"rating": 6, "flags": []}
    assert project.next_item("p2").item.item_id == first
    project.label("p2", first, rated, nonce="by a program", seconds=1)
    project.add_labels("p3", [(first, rated)])
    assert project.next_item("p2").item.item_id == second
    assert followed(project, "p2", rated) is None, "nothing was suggested"
    assert all("suggestion_followed" not in one.event.content for one in project.labels())
    assert project_statistics(project)["suggestion_followed"] is None


def test_undo_redo_and_an_owners_correction_know_it(project):
    add(project, read(RATED | {"suggestion": 6}, RATED | {"prompt": "另", "suggestion": 6}, task="rating"))
    assert followed(project, "p2", {"rating": 6, "flags": []}) is True
    assert project.undo("p2", "undo")[1].draft["answer"] == {"rating": 6, "flags": []}
    assert project.redo("p2", "redo")[0].content["suggestion_followed"] is True
    (label,) = project.labels()
    project.correct("p1", label.event.event_id, {"rating": 2}, nonce="c", reason="错")
    (one,) = records(project, "ratings")
    assert (one["rating"], one["suggestion_followed"]) == (2, True), "what the person did stays"
    assert followed(project, "p2", {"rating": 6, "flags": []}) is True
    project.undo("p2", "undo-2")
    assert followed(project, "p2", {"rating": 2, "flags": []}) is False


def records(project, kind):
    files = export_project(project).files
    return [json.loads(line) for name in files if name.startswith(kind) for line in files[name].decode().splitlines()]


def test_exported_and_given_back(project, tmp_path):
    """A column of the training files; with items.jsonl suggestions and what became of them come back, and go out again."""
    given = [PAIR | {"prompt": f"问 {i}", "suggestion": {"preferred": 1}, "来源": i} for i in range(3)]
    add(project, read(*given, PAIR | {"prompt": "无"}))
    for i in range(4):
        said = on_screen(project, "p2") or {"preferred": 0}
        side = said["preferred"] if i else 1 - said["preferred"]
        followed(project, "p2", {"preferred": side, "strength": 2, "both_bad": False})
    made = {one["prompt"]: one for one in records(project, "preferences")}
    column = {prompt: one.get("suggestion_followed", "-") for prompt, one in made.items()}
    assert column == {"问 0": False, "问 1": True, "问 2": True, "无": "-"}
    assert all("suggestion" not in one for one in made.values())
    assert (made["问 0"]["chosen"], made["问 0"]["来源"]) == ("甲 😀", 0)
    assert {one["prompt"]: one.get("suggestion_followed", "-") for one in records(project, "pairs")} == column
    items = export_project(project).files["items.jsonl"].decode()
    with Project.create(tmp_path / "again", ProjectSettings()) as copy:
        add(copy, read_items_text(items), with_labels=True)
        assert [one.suggestion for one in copy.items()] == [one.suggestion for one in project.items()]
        again = {one["prompt"]: one for one in records(copy, "preferences")}
        assert {prompt: one.get("suggestion_followed", "-") for prompt, one in again.items()} == column
        assert records(copy, "items")[0]["suggestion"] == {"preferred": 1} | NONE
        assert add(copy, read_items_text(items), with_labels=True)["labels"] == 0


def test_statistics_say_the_share_of_each_person(project, capsys):
    add(project, read(*(RATED | {"prompt": f"问 {i}", "suggestion": 6} for i in range(6)), task="rating"))
    for person, ratings in (("p2", (6, 6, 6, 1)), ("p3", (1, 6))):
        for one in ratings:
            followed(project, person, {"rating": one, "flags": []})
    found = project_statistics(project)
    shares = {one["name"]: one["suggestion_followed"] for one in found["people"]}
    assert (shares["张伟"]["value"], shares["张伟"]["count"]) == (0.75, 4)
    assert (shares["Ada"]["value"], shares["Ada"]["count"], shares["owner"]) == (0.5, 2, None)
    assert found["suggestion_followed"]["count"] == 6
    assert main(["label", "stats", str(project.folder)]) == 0
    said = capsys.readouterr().out
    assert "Suggestions followed: 66.7 %" in said
    (head,), (row,) = ([line for line in said.splitlines() if line.startswith(name)] for name in ("id ", "p2"))
    assert (head.rstrip().endswith("suggestions followed"), "75.0 % (" in row) == (True, True)


def test_by_the_commands(tmp_path, capsys):
    folder, file = tmp_path / "项目", tmp_path / "建议.jsonl"
    assert main(["label", "new", str(folder)]) == 0
    file.write_text(json.dumps(PAIR | {"suggestion": 3}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert main(["label", "import", str(folder), "--data", str(file)]) != 0
    assert "建议.jsonl:1: `suggestion`: preferred must be one of 0, 1" in capsys.readouterr().err
    file.write_text(json.dumps(PAIR | {"suggestion": 1}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert main(["label", "import", str(folder), "--data", str(file)]) == 0
    with Project.open(folder, read_only=True) as project:
        assert project.items()[0].suggestion == {"preferred": 1} | NONE
