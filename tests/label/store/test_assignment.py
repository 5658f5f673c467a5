"""Who gets which item: overlap, leases, repeats, screening, people whose labels are for evaluation only."""

import random
from collections import Counter

import pytest

from cases import often
from heedful import DataError
from heedful.apps.label import NotHeldError
from heedful.apps.label.people import agreement as measured


@pytest.mark.parametrize("batches", [[40], [1] * 40, [7, 0, 13, 1, 19]])
def test_the_overlap_is_exactly_as_set(memory, batches):
    """Also if items come one at a time, as from a policy that is sampled meanwhile."""
    for share in (0.0, 0.2, 0.25, 1.0):
        project = memory(overlap=share, overlap_people=3)
        for count in batches:
            project.add(count)
        needed = Counter(item.needed for item in project.state.items.values())
        assert (needed[3], needed[1]) == (round(share * 40), 40 - round(share * 40))


def test_the_overlap_is_drawn_by_the_seed(memory):
    chosen = []
    for seed in (0, 0, 1):
        project = memory(overlap=0.5, seed=seed)
        project.add(40)
        chosen.append([item.needed for item in project.state.items.values()])
    assert chosen[0] == chosen[1] != chosen[2]
    assert chosen[0] != sorted(chosen[0])


def test_only_what_can_be_compared_overlaps_and_what_asks_for_several_people_keeps_that(memory):
    project = memory(overlap=1.0)
    for task in ("demonstration", "correction", "chat"):
        project.add(4, task)
    project.add(4, "pair", screening=True)
    assert {item.needed for item in project.state.items.values()} == {1}
    project = memory(overlap=0.5, overlap_people=2)
    project.add(4, needed=5)
    project.add(6)
    assert Counter(item.needed for item in project.state.items.values()) == {5: 4, 2: 1, 1: 5}


def check_nobody_is_too_many(project):
    leases = project.leases.by_person()
    for item in project.state.items.values():
        holders = [p for p, lease in leases.items() if lease.item_id == item.item_id and not lease.repeat]
        holders = [p for p in holders if project.state.people[p].standing == "active"]
        held_now = sum(leases[p].until > project.now for p in holders)
        counted = project.state.counted(item.item_id)
        assert counted + held_now <= item.needed
        assert counted + len(holders) <= max(item.needed, counted), "somebody could send one label too many"


@pytest.mark.parametrize("seed", often(range(6), (0, 1)))
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
                assert project.leases.of(person) is None
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


def oracle(project, person):
    """What a person could be given, and why nothing if it is nothing, worked out from the events and leases only."""
    people = project.state.people
    counted, touched = {}, {}
    taken_back = {e.content["event"] for e in project.state.events if e.kind == "retract"}
    for event in project.state.events:
        if event.kind in ("label", "skip") and event.event_id not in taken_back and not event.content["repeat"]:
            touched.setdefault(event.person, set()).add(event.content["item"])
            if event.kind == "label" and people[event.person].standing not in ("held-out", "refused"):
                counted.setdefault(event.content["item"], set()).add(event.person)
    held = Counter(
        lease.item_id
        for other, lease in project.leases.by_person().items()
        if other != person and lease.until > project.now and not lease.repeat
        and people[other].standing != "held-out"
    )  # fmt: skip
    missing = {item.item_id: item.needed - len(counted.get(item.item_id, ())) for item in project.state.items.values()}
    open_items = {item for item, count in missing.items() if count > 0}
    mine = open_items - touched.get(person, set())
    if people[person].standing == "held-out":
        unseen = set(missing) - touched.get(person, set())
        return unseen, None if unseen else ("through", 0)
    if free := {item for item in mine if missing[item] > held[item]}:
        return free, None
    able = [one for one, who in people.items() if who.standing == "active" and who.role != "viewer"]
    lacking = sum(sum(item not in touched.get(one, set()) for one in able) < missing[item] for item in open_items)
    if mine:
        return set(), ("others", len(mine))
    if not open_items:
        return set(), ("done", 0)
    return set(), ("people", lacking) if lacking else ("second", len(open_items))


@pytest.mark.parametrize("seed", often(range(40), range(5)))
def test_whoever_gets_nothing_is_told_why(memory, seed):
    """Any overlap, number of people and of people wanted, leases that ended, people who leave: work that can be given is
    given, and what is said about the rest is true."""
    source = random.Random(seed)
    overlap, wanted = source.choice([0.0, 0.2, 0.5, 1.0]), source.choice([2, 3, 5])
    project = memory(overlap=overlap, overlap_people=wanted, repeats=source.choice([0.0, 0.1]), seed=seed)
    people = [project.owner] + [project.person(f"{i}") for i in range(source.choice([0, 1, 2, 3]))]
    project.add(source.choice([1, 4, 12]))

    def look(person):
        who = project.state.people[person]
        if who.role == "viewer" or who.standing in ("removed", "refused"):
            assert project.next(person) is None
            assert project.project.why_counted(person) == ("viewer" if who.role == "viewer" else who.standing, 0)
            return None
        had, (could, why) = project.leases.of(person), oracle(project, person)
        given = project.next(person)
        if given is None:
            assert (could, project.project.why_counted(person)) == (set(), why)
        else:
            assert had is not None or given.repeat or given.item.item_id in could
        return given

    for _ in range(120):
        person = source.choice(people)
        given = look(person)
        action = source.choices(["label", "skip", "undo", "break", "leave", "change", "join"], [60, 4, 6, 6, 10, 3, 1])[
            0
        ]
        if action == "break":
            project.pass_minutes(20)
        elif action == "change" and person != project.owner:
            standing = source.choice(["removed", "refused", "held-out", "active", "active"])
            project.change(person, standing=standing)
        elif action == "join" and len(people) < 6:
            people.append(project.person("late"))
        elif given is not None and action == "label":
            project.label(person, given.item.item_id)
        elif given is not None and action == "skip":
            project.skip(person, given.item.item_id)
        elif action == "undo" and project.state.people[person].standing in ("active", "held-out"):
            project.undo(person)
    project.pass_minutes(20)
    for person in people:
        project.work_through(person)
    for person in people:
        look(person)
    for _ in range(wanted):
        people.append(project.person("enough"))
        project.work_through(people[-1])
    assert project.state.left == []
    assert project.project.why_counted(project.owner) == ("done", 0)


def test_it_is_not_over_while_somebody_is_at_work(memory):
    """A server that ends by itself ends under nobody who has an item on the screen."""
    project = memory(overlap=1.0, repeats=0)
    project.add(2, screening=True)

    def over():
        return project.project.is_over()

    assert not over(), "there are screening items only"
    project.add(1)
    first, second = project.person(), project.person()
    project.work_through(first)
    assert over()
    project.next(second)
    assert not over()
    project.pass_minutes(20)
    assert over(), "who has left keeps no server alive"


def test_a_chat_that_was_left_in_the_middle_is_given_again(memory):
    project = memory(repeats=0)
    (chat,) = project.add(1, "chat")
    person = project.person()
    messages = [{"role": "user", "content": "你好"}]
    responses = [{"response": "a", "source": {}}, {"response": "b", "source": {}}]
    turn = {"messages": messages, "responses": responses, "preferred": 0, "strength": 1, "both_bad": False}
    project.next(person)
    project.label(person, chat.item_id, {**turn, "last": False})
    project.change(person, standing="removed")
    project.change(person, standing="active")
    again = project.next(person)
    assert (again.item, len(again.turns)) == (chat, 1)
    longer = [*messages, {"role": "assistant", "content": "a"}, {"role": "user", "content": "再见"}]
    project.label(person, chat.item_id, {**turn, "messages": longer, "last": True})
    assert project.state.is_done(chat)
    assert project.next(person) is None


def test_items_come_in_the_order_in_which_they_were_added(memory):
    project = memory(overlap=0, repeats=0)
    added = [item.item_id for item in project.add(6, "ranking")]
    first, second = project.person(), project.person()
    assert project.next(first).item.item_id == added[0]
    assert project.next(first) == project.next(first), "a reload shows the same, in the same order"
    assert project.next(second).item.item_id == added[1]
    project.label(first, added[0])
    assert project.next(first).item.item_id == added[2]


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


def test_nobody_labels_what_they_do_not_hold(memory):
    project = memory(repeats=0)
    first, second = project.add(2)
    person = project.person()
    with pytest.raises(NotHeldError):
        project.label(person, first.item_id)
    project.next(person)
    for call in (project.label, project.skip, lambda *given: project.draft(*given, {})):
        with pytest.raises(NotHeldError):
            call(person, second.item_id)
    with pytest.raises(DataError, match="no item 'nothing'"):
        project.label(person, "nothing", {})
    assert project.state.counting == {}
    project.pass_minutes(600)
    project.label(person, first.item_id)  # late, but nobody else has it
    assert project.state.is_done(first)


def test_hidden_repeats(memory):
    """As often as set, after ten other labels at the earliest, once per item; they are no work of the project."""
    project = memory(overlap=0, repeats=0.1)
    project.add(200)
    person = project.person()
    project.work_through(person)
    labels = [event for event in project.state.trail[person] if event.kind == "label"]
    repeats = [event for event in labels if event.content["repeat"]]
    assert 0.06 < len(repeats) / len(labels) < 0.14
    assert len(labels) == 200 + len(repeats)
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
    """Let the owner prefer the first answer of each screening item, and a newcomer answer, or skip an item (None)."""

    def owner():
        while (given := project.next(project.owner)) is not None and given.item.screening:
            project.label(project.owner, given.item.item_id, LEFT)

    if owner_first:
        owner()
    for answer in answers:
        given = project.next(newcomer)
        assert given.item.screening
        item = given.item.item_id
        project.skip(newcomer, item) if answer is None else project.label(newcomer, item, answer)
    if not owner_first:
        assert project.state.people[newcomer].standing == "screening"
        assert project.next(newcomer) is None
        owner()
    return project.state.people[newcomer].standing


@pytest.mark.parametrize("owner_first", [True, False])
@pytest.mark.parametrize(
    ("answers", "standing"), [([LEFT, LEFT, LEFT, RIGHT], "active"), ([LEFT, LEFT, RIGHT, TIE], "refused")]
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
    changes = [one for one in project.state.events if one.kind == "person" and one.content["person_id"] == newcomer]
    assert (changes[-1].content["standing"], changes[-1].person) == (standing, None), "nobody has decided it"


SKIPPED = [
    ([LEFT, LEFT, None, None], "active"),
    ([None, RIGHT, LEFT, RIGHT], "refused"),
    ([LEFT, None, None, None], "screening"),
]


@pytest.mark.parametrize("owner_first", [True, False])
def test_skipped_screening_items_lead_nowhere_astray(memory, owner_first):
    """The set has no more than are asked for: whoever skipped some is judged by the others, if they are at least half."""
    for answers, standing in SKIPPED:
        project = memory(overlap=0, screening_items=4, screening_agreement=0.7)
        project.add(4, screening=True)
        assert screened(project, project.person(), owner_first, answers) == standing


def test_agreement_with_the_owner():
    for task, owner, other, agreement in (
        ("pair", LEFT, {**LEFT, "strength": 4}, 1),
        ("pair", LEFT, RIGHT, 0),
        ("pair", TIE, {**TIE, "both_bad": True}, 1),
        ("ranking", {"ranks": [1, 2, 3]}, {"ranks": [1, 3, 2]}, 2 / 3),
        ("ranking", {"ranks": [1, 1, 3]}, {"ranks": [2, 2, 1]}, 1 / 3),
        ("rating", {"rating": 4, "flags": []}, {"rating": 5, "flags": []}, 1),
        ("rating", {"rating": 4, "flags": []}, {"rating": 6, "flags": []}, 0),
    ):
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
    assert project.leases.of(person) is None
    assert len(project.state.left) == left
    assert project.next(other).item.item_id == ids[4 - left]
    project.change(person, standing="active")
    assert len(project.state.left) == 2


def test_who_gets_nothing(memory):
    for changes in ({"role": "viewer"}, {"standing": "removed"}, {"standing": "refused"}):
        project = memory()
        (item,) = project.add(1)
        person = project.person()
        project.next(person)
        project.change(person, **changes)
        assert project.next(person) is None
        for call, *more in ((project.label, item.item_id), (project.skip, item.item_id), (project.undo,)):
            with pytest.raises(DataError, match="cannot label"):
                call(person, *more)
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
