"""Nothing that the server says to somebody who labels tells a gold question from the other items."""

import dataclasses

PAIR = {"preferred": 0, "strength": 2, "both_bad": False}


def test_a_gold_question_looks_as_every_other_item(served, pair_item):
    known = {"preferred": 1, "strength": None, "both_bad": False}
    items = [pair_item(i, gold=known) if i % 3 == 0 else pair_item(i) for i in range(12)]
    server = served(items, gold=0.5, repeats=0.0, overlap=0.0)
    ada = server.signed_in("Ada")
    gold = {one.item_id for one in items if one.gold is not None}
    keys, asked = set(), set()
    while True:
        answer = ada.get("/api/next")
        item = answer.json["item"]
        assert b"gold" not in answer.bytes
        if item is None:
            break
        asked.add(item["id"])
        keys.add((frozenset(item), frozenset(answer.json), frozenset(item["instructions"]), item["draft"]))
        sent = ada.label(PAIR, item, version=0)
        keys.add((frozenset(sent.json), frozenset(sent.json["progress"])))
        assert (sent.status, b"gold" in sent.bytes) == (200, False)
        assert sent.json["progress"]["done"] == len(asked)
    assert asked & gold, "some were asked"
    assert len(keys) == 2, "one form of an item, one of a reply"
    stored = [one for one in server.project.labels() if one.item.gold is not None]
    assert {one.item.item_id for one in stored} == asked & gold
    assert all("gold" not in one.event.content for one in stored)
    assert dataclasses.asdict(stored[0].event)["kind"] == "label"
