"""What people send: once, twice, taken back, in a chat; and who people are."""

import pytest

from heedful import DataError
from heedful.apps.label import NotHeldError


def test_a_label_has_all_that_was_seen(memory, answers):
    project = memory()
    person = project.person()
    project.project.set_instructions("谨慎")
    for task, answer in answers.items():
        (item,) = project.add(1, task)
        given = project.next(person)
        more = {"nonce": f"一 {task}", "comment": "好\u2028🐈", "flags": ["unsafe"]}
        event = project.label(person, item.item_id, answer, seconds=2, **more)
        assert event.content == {
            "item": item.item_id,
            "answer": answer,
            "order": list(given.order),
            "instructions": 1,
            "seconds": 2.0,
            "comment": "好\u2028🐈",
            "flags": ["unsafe"],
            "repeat": False,
        }
        assert (event.person, event.nonce, event.kind) == (person, f"一 {task}", "label")
        assert event.at == "1970-01-12T13:46:40.000Z"


def test_what_is_sent_twice_counts_once(memory):
    project = memory(repeats=0, overlap=0)
    first, second, _ = project.add(3)
    person, other = project.person(), project.person()
    project.next(person)
    event = project.label(person, first.item_id, nonce="n")
    before = project.state.seq
    assert project.label(person, first.item_id, nonce="n") == event
    project.next(person)
    assert project.label(person, first.item_id, nonce="n") == event
    skipped = project.skip(person, second.item_id, nonce="s")
    assert project.skip(person, second.item_id, nonce="s") == skipped
    assert project.state.seq == before + 1
    for wrong in (lambda: project.label(person, second.item_id, nonce="n"), lambda: project.undo(person, "s")):
        with pytest.raises(DataError, match="was used before"):
            wrong()
    project.next(other)
    project.skip(other, second.item_id, nonce="n")  # a nonce is each person's own


WRONG = [
    *(({"seconds": value}, "seconds") for value in (-1, float("nan"), True, "2")),
    *(({"flags": value}, said) for value, said in ((["nice"], "personal-data"), ("unsafe", "a list"))),
    *(
        ({"comment": value}, said)
        for value, said in ((None, "comment"), ("x" * 20_001, "20001 characters"), ("\ud83d", "surrogate"))
    ),
    *(({"nonce": value}, "nonce") for value in ("x" * 129, 5)),
    *(({"version": value}, "0 to 1") for value in (2, True)),
    ({"answer": {"preferred": 0}}, "lacks"),
]


def test_a_label_that_is_refused_changes_nothing(memory):
    project = memory()
    (item,) = project.add(1)
    person = project.person()
    project.project.set_instructions("")
    given = project.next(person)
    before = project.state.seq
    for fields, fragment in WRONG:
        with pytest.raises(DataError, match=fragment):
            project.label(person, item.item_id, **fields)
    assert project.state.seq == before
    assert project.next(person) == given
    assert project.label(person, item.item_id, version=0).content["instructions"] == 0
    with pytest.raises(NotHeldError):
        project.label(person, item.item_id)  # of a second tab, which shows it still
    assert len(project.state.labels()) == 1


def test_undo_gives_the_item_back_with_the_old_answer(memory):
    project = memory(repeats=0, overlap=0)
    added = project.add(3, "ranking")
    person, other = project.person(), project.person()
    given = project.next(person)
    project.label(person, added[0].item_id, {"ranks": [3, 1, 1]}, comment="哦", flags=["broken"])
    project.next(person)
    event, again = project.undo(person, "u")
    assert event.kind == "retract"
    assert (again.item, again.order) == (added[0], given.order)
    on_screen = {"ranks": [[3, 1, 1][candidate] for candidate in given.order]}
    assert again.draft == {"answer": on_screen, "comment": "哦", "flags": ["broken"]}
    assert project.state.labels() == []
    assert project.next(other).item == added[1], "what was on the screen before goes back to the others"
    assert project.undo(person, "u") == (event, again)
    project.label(person, added[0].item_id)
    assert project.undo(person, "u")[0] == event
    assert [one.item for one in project.state.labels()] == [added[0]]


def test_a_skip_that_is_taken_back_takes_nothing_from_others(memory):
    project = memory(repeats=0, overlap=0)
    first, second = project.add(2)
    person, other = project.person(), project.person()
    project.next(person)
    project.skip(person, first.item_id)
    project.next(person)
    project.next(other)
    assert project.undo(person, "u")[1].item == second
    project.label(other, first.item_id)
    assert project.work_through(person) == [second.item_id]
    assert project.state.left == []


def test_a_repeat_that_is_taken_back_is_a_repeat_again(memory):
    project = memory(repeats=0.5, overlap=0)
    project.add(30)
    person = project.person()
    while not (given := project.next(person)).repeat:
        project.label(person, given.item.item_id)
    project.label(person, given.item.item_id)
    again = project.undo(person)[1]
    assert (again.item, again.repeat, again.order) == (given.item, True, given.order)


def test_drafts_stay_until_the_item_is_sent(memory):
    project = memory(repeats=0, overlap=0)
    first, second = project.add(2, "demonstration")
    person = project.person()
    assert project.next(person).draft is None
    draft = {"answer": {"text": "猫\u2028"}, "comment": "", "flags": []}
    project.draft(person, first.item_id, draft)
    assert project.next(person).draft == draft
    project.label(person, first.item_id)
    assert project.next(person).item == second
    assert project.next(person).draft is None
    with pytest.raises(DataError, match="surrogate"):
        project.draft(person, second.item_id, "\ud800")


def turn(before, words, preferred=0, last=False):
    """The label of a turn that continues from the turn before with its preferred answer."""
    messages = []
    if before is not None:
        chosen = before["responses"][0]["response"]
        messages = [*before["messages"], {"role": "assistant", "content": chosen}]
    messages.append({"role": "user", "content": words})
    responses = [{"response": f"{words}, {k}", "source": {"checkpoint": f"secret-{k}"}} for k in range(2)]
    choice = {"preferred": preferred, "strength": 1, "both_bad": False, "last": last}
    return {"messages": messages, "responses": responses, **choice}


def test_a_turn_is_answered_once(memory):
    """A second tab of a chat that sends the same turn again, under a nonce of its own."""
    project = memory()
    (item,) = project.add(1, "chat")
    person = project.person()
    project.next(person)
    first = turn(None, "你好")
    project.label(person, item.item_id, first)
    with pytest.raises(NotHeldError, match="already answered"):
        project.label(person, item.item_id, first)
    with pytest.raises(NotHeldError, match="already answered"):
        project.label(person, item.item_id, turn(None, "something else"))
    project.label(person, item.item_id, turn(first, "再见"))


def test_progress(memory):
    project = memory(repeats=0, overlap=0, screening_items=2)
    project.add(5)
    project.add(3, screening=True)
    regular = project.person(standing="active")
    newcomer, evaluates, viewer = project.person(), project.person(standing="held-out"), project.person(role="viewer")

    def counts(person):
        found = project.project.progress(person)
        return [found[name] for name in ("done", "left", "own", "today")]

    project.work_through(regular, 2)
    project.work_through(newcomer, 1)
    project.work_through(evaluates, 4)
    assert counts(regular) == [2, 3, 2, 2]
    assert counts(newcomer) == [1, 1, 1, 1]
    assert counts(evaluates) == [4, 1, 4, 4]
    assert counts(viewer) == [2, 3, 0, 0]
    project.undo(regular)
    assert counts(regular) == [1, 4, 1, 1]
    assert project.state.tasks == {"pair"}
    project.state.trail.clear()
    assert counts(regular) == [1, 4, 1, 1], "no label is looked at again"
    project.pass_minutes(24 * 60)
    assert counts(regular) == [1, 4, 1, 0]


def test_why_there_is_nothing(memory):
    project = memory(repeats=0, overlap=0, screening_items=1)
    regular, viewer = project.person(standing="active"), project.person(role="viewer")
    newcomer = project.person()

    def why(person):
        assert project.next(person) is None
        return project.project.why_counted(person)[0]

    assert why(regular) == "empty"
    (item,) = project.add(1)
    project.next(project.owner)
    assert [why(regular), why(viewer), why(newcomer)] == ["others", "viewer", "screening"]
    project.label(project.owner, item.item_id)
    assert why(regular) == "done"
    for standing in ("refused", "removed"):
        project.change(regular, standing=standing)
        assert why(regular) == standing


def test_chats_are_kept_back_while_there_is_nobody_to_talk_to(memory):
    project = memory(repeats=0, overlap=0)
    regular, held_out = project.person(standing="active"), project.person(standing="held-out")
    (chat,), (pair,) = project.add(1, "chat"), project.add(1)
    for person in (regular, held_out):
        assert project.next(person, chats=False).item == pair
        project.label(person, pair.item_id)
        assert project.next(person, chats=False) is None
        assert project.project.why_counted(person, chats=False) == ("no-model", 1)
    assert project.project.chats_left() == 1
    assert project.next(regular).item == chat
    assert project.next(regular, chats=False).item == chat, "a chat that somebody holds stays theirs"
    assert project.next(held_out).item == chat


def test_the_last_owner_stays(memory):
    project = memory()
    for changes in ({"role": "annotator"}, {"standing": "removed"}):
        with pytest.raises(DataError, match="only owner"):
            project.change(project.owner, **changes)
    second = project.person("second", "owner")
    project.change(project.owner, standing="removed")
    with pytest.raises(DataError, match="only owner"):
        project.change(second, role="viewer")


def test_people_that_cannot_be(memory):
    project = memory()
    for fields, fragment in (
        ({"name": " \u2028"}, "empty"),
        ({"name": "x" * 201}, "201 characters"),
        ({"name": "\udc00"}, "surrogate"),
        ({"role": "admin"}, "owner, annotator, viewer"),
        ({"standing": "late"}, "screening, active, refused"),
        ({"role": "viewer", "standing": "held-out"}, "is for annotators only"),
    ):
        with pytest.raises(DataError, match=fragment):
            project.person(**fields)
    assert len(project.state.people) == 1
