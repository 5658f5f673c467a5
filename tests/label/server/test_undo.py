"""What undo may take back and redo puts there again, by the API, where no page counts keys; and what a nonce stands for."""

import json

import pytest

from heedful.apps.label import Candidate, Item

PAIR = {"preferred": 0, "strength": 3, "both_bad": False}


def label(client, nonce, answer=PAIR, **more):
    body = {"nonce": nonce, **client.shown(), "answer": answer, "seconds": 2, "comment": "好 😀", "flags": [], **more}
    assert client.post("/api/label", body).status == 200
    return body


def write_round(folder, number, events):
    """The labels of a round that has trained, as heedful round leaves them."""
    labels = folder / "rounds" / str(number) / "labels"
    labels.mkdir(parents=True)
    (labels / "numbers.json").write_text(json.dumps({"labels": 3, "pairs": 3, "events": events}), encoding="utf-8")


def counted(server):
    return [one.event.content["item"] for one in server.project.labels()]


@pytest.mark.parametrize("since", ["signing in", "a round"])
def test_labels_of_an_earlier_session_and_those_that_a_round_has_trained_on_stay(served, pair_item, since):
    server = served([pair_item(i) for i in range(3)], repeats=0.0, overlap=0.0)
    server.project.add_items([pair_item(9, round=2), pair_item(10, round=2)])
    ada = server.signed_in("Ada")
    for i in range(3):
        label(ada, f"first-{i:08}")
    if since == "signing in":
        ada.join(server.project.invite(ada.person.person_id))
    else:
        write_round(server.folder, 1, len(server.project.events()))
    label(ada, "second-00000")
    before = counted(server)
    answers = [ada.post("/api/undo", {"nonce": f"undo-{i:08}"}) for i in range(5)]
    assert [one.status for one in answers] == [200, 409, 409, 409, 409]
    assert answers[1].json["code"] == ("undo_session" if since == "signing in" else "undo_trained")
    assert ("round" in answers[1].error) == (since != "signing in")
    assert counted(server) == before[:3]
    assert ada.post("/api/redo", {"nonce": "redo-0000000"}).status == 200
    assert counted(server) == before


def test_redo_puts_back_step_by_step_and_once(served, pair_item):
    server = served([pair_item(i) for i in range(5)], repeats=0.0, overlap=0.0)
    ada = server.signed_in("Ada")
    for i in range(2):
        label(ada, f"first-{i:08}", {"preferred": i, "strength": 1, "both_bad": False})
    skip = {"nonce": "skip-0000000", **ada.shown(), "reason": "难", "flags": ["broken"]}
    assert ada.post("/api/skip", skip).status == 200
    then = ada.shown()["item"]
    before = [one.event.content for one in server.project.labels()]
    for i in range(3):
        assert ada.post("/api/undo", {"nonce": f"undo-{i:08}"}).json["redo"]
    assert counted(server) == []
    again = {"nonce": "redo-0000000"}
    first = ada.post("/api/redo", again)
    assert first.json["done"] == ada.post("/api/redo", again).json["done"], "sent twice, done once"
    assert ada.get("/api/next").json["redo"], "a reload still offers it"
    assert ada.post("/api/redo", {"nonce": "redo-0000001"}).json["redo"]
    last = ada.post("/api/redo", {"nonce": "redo-0000002"}).json
    assert (last["redo"], last["item"]["id"]) == (False, then)
    assert ada.post("/api/redo", {"nonce": "redo-0000003"}).json["done"] is None
    labels = [dict(one.event.content) for one in server.project.labels()]
    assert all(one.pop("again") for one in labels)
    assert labels == before
    (skip,) = [one for one in server.project.events() if one.kind == "skip" and "again" in one.content]
    assert (skip.content["reason"], skip.content["flags"]) == ("难", ["broken"])


def test_redo_takes_nothing_from_others_and_ends_with_a_new_label(served, pair_item):
    server = served([pair_item(i) for i in range(2)], repeats=0.0, overlap=0.0)
    ada, bob = server.signed_in("Ada"), server.signed_in("Bob")
    for i in range(2):
        label(ada, f"first-{i:08}")
    for i in range(2):
        ada.post("/api/undo", {"nonce": f"undo-{i:08}"})
    label(bob, "bob-00000000")  # the second item, which Ada no longer holds
    assert ada.post("/api/redo", {"nonce": "redo-0000000"}).status == 200
    refused = ada.post("/api/redo", {"nonce": "redo-0000001"})
    assert (refused.status, refused.json["code"]) == (409, "redo_gone")
    assert len(set(counted(server))) == len(counted(server)) == 2
    ada.post("/api/undo", {"nonce": "undo-0000002"})
    label(ada, "second-00000", {"preferred": None, "strength": None, "both_bad": True})
    assert ada.post("/api/redo", {"nonce": "redo-0000002"}).json["done"] is None, "a new label ends it"


@pytest.mark.parametrize(
    ("task", "answers", "answer", "other"),
    [
        ("pair", ("甲", "乙"), PAIR, {**PAIR, "preferred": 1}),
        ("ranking", ("甲", "乙", "丙"), {"ranks": [1, 2, 2]}, {"ranks": [2, 1, 2]}),
        ("rating", ("甲",), {"rating": 3, "flags": []}, {"rating": 3, "flags": ["hallucination"]}),
        ("demonstration", (), {"text": "一"}, {"text": "二"}),
    ],
)
def test_a_nonce_with_another_answer_is_refused_and_says_what_is_recorded(served, task, answers, answer, other):
    candidates = tuple(Candidate(one, None) for one in answers)
    server = served([Item(f"{number:020}", task, "题", candidates) for number in range(2)], repeats=0.0, overlap=0.0)
    ada = server.signed_in("Ada")
    body = label(ada, "n" * 12, answer)
    for changed in ({"answer": other}, {"comment": "别的"}, {"flags": ["unsafe"]}, {"item": f"{1:020}"}):
        refused = ada.post("/api/label", body | changed)
        assert (refused.status, refused.json["code"]) == (409, "nonce_used"), changed
        assert next(iter(changed)) in refused.error
        assert "is recorded" in refused.error
    again = ada.post("/api/label", body | {"seconds": 9})
    assert again.status == 200
    assert len(server.project.labels()) == 1


def test_the_nonce_of_another_thing_is_refused(served, pair_item):
    server = served([pair_item(i) for i in range(3)], repeats=0.0, overlap=0.0)
    ada = server.signed_in("Ada")
    body = label(ada, "label-000000")
    skip = {"nonce": "skip-0000000", **ada.shown(), "reason": "难", "flags": []}
    assert ada.post("/api/skip", skip).status == 200
    assert ada.post("/api/skip", skip | {"reason": "别的"}).status == 409
    for path in ("undo", "redo"):
        assert ada.post(f"/api/{path}", {"nonce": body["nonce"]}).status == 409
    assert ada.post("/api/label", body | {"nonce": skip["nonce"]}).status == 409
    assert len(server.project.labels()) == 1
