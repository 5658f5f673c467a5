"""Who gets which item: overlap, leases, repeats, screening, people whose labels are for evaluation only."""

import random
from collections import Counter

import pytest

from heedful.errors import DataError
from heedful.label.assignment import NotHeldError


@pytest.mark.parametrize("share", [0.0, 0.2, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("batches", [[40], [1] * 40, [7, 0, 13, 1, 19]])
def test_the_overlap_is_exactly_as_set(memory, share, batches):
    """Also if items come one at a time, as from a policy that is sampled meanwhile."""
    project = memory(overlap=share, overlap_people=3)
    for count in batches:
        project.add(count)
    needed = Counter(item.needed for item in project.state.items.values())
    assert needed[3] == round(share * 40)
    assert needed[1] == 40 - needed[3]


def test_the_overlap_is_drawn_by_the_seed(memory):
    chosen = []
    for seed in (0, 0, 1):
        project = memory(overlap=0.5, seed=seed)
        project.add(40)
        chosen.append([item.needed for item in project.state.items.values()])
    assert chosen[0] == chosen[1] != chosen[2]
    assert chosen[0] != sorted(chosen[0])


def test_only_what_can_be_compared_overlaps(memory):
    project = memory(overlap=1.0)
    for task in ("demonstration", "correction", "chat"):
        project.add(4, task)
    project.add(4, "pair", screening=True)
    assert {item.needed for item in project.state.items.values()} == {1}


def test_an_item_that_asks_for_several_people_keeps_that(memory):
    project = memory(overlap=0.5, overlap_people=2)
    project.add(4, needed=5)
    project.add(6)
    assert Counter(item.needed for item in project.state.items.values()) == {5: 4, 2: 1, 1: 5}


def check_nobody_is_too_many(project):
    leases = project.desk.leases()
    for item in project.state.items.values():
        holders = [p for p, lease in leases.items() if lease.item_id == item.item_id and not lease.repeat]
        holders = [p for p in holders if project.state.people[p].standing == "active"]
        held_now = sum(leases[p].until > project.transaction.now for p in holders)
        counted = project.state.counted(item.item_id)
        assert counted + held_now <= item.needed
        assert counted + len(holders) <= max(item.needed, counted), "somebody could send one label too many"


@pytest.mark.parametrize("seed", range(6))
def test_whatever_people_do_each_item_gets_its_labels_and_no_more(memory, seed):
    """Labels, skips, undos, drafts, reloads and breaks in any order; at the end all items have exactly what they need."""
    source = random.Random(seed)
    project = memory(overlap=0.4, overlap_people=2, repeats=0.1, seed=seed)
    project.add(30)
    people = [project.person(f"{i}") for i in range(5)] + [project.person("evaluates", standing="held-out")]
    for _ in range(250):
        person = source.choice(people)
        given = project.next(person)
        action = source.choices(["label", "skip", "undo", "draft", "break", "late"], [60, 3, 12, 5, 3, 8])[0]
        if action == "undo":
            project.undo(person)
        elif action == "break":
            project.pass_minutes(20)
        elif given is not None and action == "late":
            project.pass_minutes(20)
            for other in people:
                if other != person:
                    project.next(other)
            try:
                project.label(person, given.item.item_id)
            except NotHeldError:
                assert project.desk.lease(person) is None
        elif given is not None and action == "skip":
            project.skip(person, given.item.item_id)
        elif given is not None and action == "draft":
            project.draft(person, given.item.item_id, {"answer": None})
        elif given is not None:
            project.label(person, given.item.item_id)
        check_nobody_is_too_many(project)
    people += [project.person(f"late {i}") for i in range(3)]
    for person in people * 2:
        project.work_through(person)
    assert project.state.left == []
    regular = {p for p, one in project.state.people.items() if one.standing == "active"}
    for item in project.state.items.values():
        firsts = [
            event.person
            for event in project.state.counting.values()
            if event.kind == "label" and event.content["item"] == item.item_id and not event.content["repeat"]
        ]
        assert len(set(firsts)) == len(firsts)
        assert len(regular & set(firsts)) == item.needed


def test_items_come_in_the_order_in_which_they_were_added(memory):
    project = memory(overlap=0, repeats=0)
    added = [item.item_id for item in project.add(6)]
    first, second = project.person(), project.person()
    assert project.next(first).item.item_id == added[0]
    assert project.next(second).item.item_id == added[1]
    project.label(first, added[0])
    assert project.next(first).item.item_id == added[2]


def test_a_reload_shows_the_same_item_in_the_same_order(memory):
    project = memory()
    project.add(3, "ranking")
    person = project.person()
    assert project.next(person) == project.next(person)


def test_an_item_is_kept_until_the_lease_ends(memory):
    project = memory(overlap=0, lease_minutes=15)
    (item,) = project.add(1)
    first, second = project.person(), project.person()
    assert project.next(first).lease_until == "1970-01-12T14:01:40.000Z"
    project.pass_minutes(14)
    assert project.next(second) is None
    project.next(first)  # the page was loaded again
    project.pass_minutes(14)
    assert project.next(second) is None
    project.draft(first, item.item_id, {"answer": {"preferred": 1}})
    project.pass_minutes(14)
    assert project.next(second) is None
    project.pass_minutes(2)
    assert project.next(second).item == item
    with pytest.raises(NotHeldError, match="does not hold"):
        project.label(first, item.item_id)
    project.label(second, item.item_id)


def test_a_late_label_counts_if_nobody_else_has_the_item(memory):
    project = memory(lease_minutes=15)
    (item,) = project.add(1)
    person = project.person()
    project.next(person)
    project.pass_minutes(600)
    project.label(person, item.item_id)
    assert project.state.is_done(item)


def test_nobody_labels_what_they_do_not_hold(memory):
    project = memory(repeats=0)
    first, second = project.add(2)
    person = project.person()
    with pytest.raises(NotHeldError):
        project.label(person, first.item_id)
    project.next(person)
    for wrong in (second.item_id,):
        with pytest.raises(NotHeldError):
            project.label(person, wrong)
        with pytest.raises(NotHeldError):
            project.skip(person, wrong)
        with pytest.raises(NotHeldError):
            project.draft(person, wrong, {})
    with pytest.raises(DataError, match="no item 'nothing'"):
        project.label(person, "nothing", {})
    assert project.state.counting == {}


def test_what_was_skipped_goes_to_others(memory):
    project = memory(overlap=0)
    (item,) = project.add(1)
    first, second = project.person(), project.person()
    project.next(first)
    project.skip(first, item.item_id)
    assert project.next(first) is None
    assert project.next(second).item == item


def test_hidden_repeats(memory):
    """As often as set, after ten other labels at the earliest, once per item; they are no work of the project."""
    project = memory(overlap=0, repeats=0.1)
    project.add(300)
    person = project.person()
    project.work_through(person)
    labels = [event for event in project.state.trail[person] if event.kind == "label"]
    repeats = [event for event in labels if event.content["repeat"]]
    assert 0.06 < len(repeats) / len(labels) < 0.14
    assert len(labels) == 300 + len(repeats)
    assert len({event.content["item"] for event in repeats}) == len(repeats)
    place = {event.content["item"]: i for i, event in enumerate(labels) if not event.content["repeat"]}
    assert all(i - place[event.content["item"]] > 10 for i, event in enumerate(labels) if event.content["repeat"])
    first = [labels[place[event.content["item"]]].content["order"] for event in repeats]
    assert 0 < sum(a != b.content["order"] for a, b in zip(first, repeats, strict=True)) < len(repeats)
    assert project.state.left == []
    assert all(project.state.counted(item) == 1 for item in project.state.items)


def test_a_skipped_repeat_does_not_come_back_at_once(memory):
    project = memory(overlap=0, repeats=0.5)
    project.add(40)
    person = project.person()
    skipped = set()
    while (given := project.next(person)) is not None:
        assert given.item.item_id not in skipped
        if given.repeat:
            project.skip(person, given.item.item_id)
            skipped.add(given.item.item_id)
        else:
            project.label(person, given.item.item_id)
    assert skipped
    assert project.state.left == []


LEFT = {"preferred": 0, "strength": 1, "both_bad": False}
RIGHT = {**LEFT, "preferred": 1}
TIE = {"preferred": None, "strength": None, "both_bad": False}


def screened(project, newcomer, owner_first, answers):
    """Let the owner prefer the first answer of each screening item, and a newcomer answer; return the latter's standing."""

    def owner():
        while (given := project.next(project.owner)) is not None and given.item.screening:
            project.label(project.owner, given.item.item_id, LEFT)

    if owner_first:
        owner()
    for answer in answers:
        given = project.next(newcomer)
        assert given.item.screening
        project.label(newcomer, given.item.item_id, answer)
    assert owner_first or project.state.people[newcomer].standing == "screening"
    if not owner_first:
        assert project.next(newcomer) is None
        owner()
    return project.state.people[newcomer].standing


@pytest.mark.parametrize("owner_first", [True, False])
@pytest.mark.parametrize(
    ("answers", "standing"),
    [([LEFT, LEFT, LEFT, RIGHT], "active"), ([LEFT, LEFT, RIGHT, TIE], "refused"), ([LEFT] * 4, "active")],
)
def test_screening(memory, owner_first, answers, standing):
    """With at least 70 % agreement people get work, below it none."""
    project = memory(overlap=0, screening_items=4, screening_agreement=0.7)
    project.add(10)
    project.add(6, screening=True)
    newcomer = project.person()
    assert screened(project, newcomer, owner_first, answers) == standing
    given = project.next(newcomer)
    assert (given is not None) == (standing == "active")
    if given is not None:
        assert not given.item.screening
        assert len(project.work_through(newcomer)) >= 9
    else:
        with pytest.raises(DataError, match="refused and cannot label"):
            project.label(newcomer, next(iter(project.state.items)), LEFT)
    assert project.state.events[-1].kind != "person" or project.state.events[-1].person is None


@pytest.mark.parametrize("owner_first", [True, False])
@pytest.mark.parametrize(
    ("answers", "standing"),
    [
        ([LEFT, LEFT, None, None], "active"),
        ([None, RIGHT, LEFT, RIGHT], "refused"),
        ([LEFT, None, None, None], "screening"),
    ],
)
def test_skipped_screening_items_lead_nowhere_astray(memory, owner_first, answers, standing):
    """The set has no more than are asked for: whoever skipped some is judged by the others, if they are at least half."""
    project = memory(overlap=0, screening_items=4, screening_agreement=0.7)
    project.add(4, screening=True)
    newcomer = project.person()

    def owner():
        while (given := project.next(project.owner)) is not None:
            project.label(project.owner, given.item.item_id, LEFT)

    if owner_first:
        owner()
    for answer in answers:
        given = project.next(newcomer).item.item_id
        project.skip(newcomer, given) if answer is None else project.label(newcomer, given, answer)
    if not owner_first:
        owner()
    assert project.state.people[newcomer].standing == standing


def test_screening_items_are_no_work_of_the_project(memory):
    project = memory(screening_items=2)
    project.add(3, screening=True)
    assert project.state.left == []
    experienced = project.person(standing="active")
    assert project.next(experienced) is None


@pytest.mark.parametrize(
    ("task", "owner", "other", "agreement"),
    [
        ("pair", LEFT, {**LEFT, "strength": 4}, 1),
        ("pair", LEFT, RIGHT, 0),
        ("pair", TIE, {**TIE, "both_bad": True}, 1),
        ("ranking", {"ranks": [1, 2, 3]}, {"ranks": [1, 3, 2]}, 2 / 3),
        ("ranking", {"ranks": [1, 1, 3]}, {"ranks": [2, 2, 1]}, 1 / 3),
        ("rating", {"rating": 4, "flags": []}, {"rating": 5, "flags": []}, 1),
        ("rating", {"rating": 4, "flags": []}, {"rating": 6, "flags": []}, 0),
    ],
)
def test_agreement_with_the_owner(task, owner, other, agreement):
    from heedful.label.people import agreement as measured

    assert measured(task, owner, other) == pytest.approx(agreement, abs=1e-12)
    assert measured(task, other, owner) == pytest.approx(agreement, abs=1e-12)


def test_people_for_evaluation_only_do_not_count(memory):
    """They get every item, done or not, and an item that they hold is not kept from others."""
    project = memory(overlap=0, repeats=0)
    ids = [item.item_id for item in project.add(4)]
    evaluates, regular = project.person(standing="held-out"), project.person()
    project.label(evaluates, project.next(evaluates).item.item_id)
    held = project.next(evaluates).item.item_id
    assert len(project.state.left) == 4
    assert project.work_through(regular) == ids
    assert project.state.left == []
    project.label(evaluates, held)
    assert project.work_through(evaluates) == ids[2:]


@pytest.mark.parametrize(("standing", "left"), [("held-out", 4), ("refused", 4), ("removed", 2)])
def test_standing_can_change(memory, standing, left):
    """Labels of somebody who turns out to be for evaluation only, or wrong, count no more, and the items are open again."""
    project = memory(overlap=0, repeats=0)
    ids = [item.item_id for item in project.add(4)]
    person, other = project.person(), project.person()
    project.work_through(person, 2)
    project.next(person)
    project.change(person, standing=standing)
    assert project.desk.lease(person) is None
    assert len(project.state.left) == left
    assert project.next(other).item.item_id == ids[4 - left]
    project.change(person, standing="active")
    assert len(project.state.left) == 2


@pytest.mark.parametrize("changes", [{"role": "viewer"}, {"standing": "removed"}, {"standing": "refused"}])
def test_who_gets_nothing(memory, changes):
    project = memory()
    (item,) = project.add(1)
    person = project.person()
    project.next(person)
    project.change(person, **changes)
    assert project.next(person) is None
    for call in (project.label, project.skip):
        with pytest.raises(DataError, match="cannot label"):
            call(person, item.item_id)
    with pytest.raises(DataError, match="cannot label"):
        project.undo(person)
    assert project.next(project.owner).item == item


def test_a_lease_that_has_ended_stays_while_there_is_room(memory):
    """Only as many holders go as the item has no need for, the one who left first before the others."""
    project = memory(repeats=0, overlap=0)
    (item,) = project.add(1, needed=2)
    early, late, third = (project.person() for _ in range(3))
    project.next(early)
    project.pass_minutes(1)
    project.next(late)
    project.pass_minutes(60)
    assert project.next(third).item == item
    project.label(late, item.item_id)
    with pytest.raises(NotHeldError):
        project.label(early, item.item_id)
    project.label(third, item.item_id)
    assert project.state.is_done(item)
