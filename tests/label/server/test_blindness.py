"""L4: what wrote an answer never reaches a browser before the answer is judged; nor what would give a hidden repeat away."""

import json
from collections import Counter

import pytest

from heedful.apps.label import Candidate, Item, item_id
from heedful.apps.label.server.app import all_rules
from heedful.apps.label.server.security import RateLimit

SEED, TEMPERATURE = 90210077413900, 0.7312507741
"""So long that no random id or time has them by chance."""
SOURCE = {"checkpoint": "runs/secret-policy/final", "temperature": TEMPERATURE, "seed": SEED, "secret_setting": 1}
TELLTALES = (
    b"secret",
    str(TEMPERATURE).encode(),
    str(SEED)[:12].encode(),
    b'"source"',
    b"chosen_by",
    b'"screening":true',
    b'"screening":false',
    b'"repeat":',
    b'"order"',
    b"checkpoint",
)
"""What only the records know; none of it may be in an answer to somebody who labels."""
SHOWN = {
    *("id", "assignment", "task", "prompt", "answers", "draft", "draft_of", "others", "suggestion"),
    *("instructions", "criteria", "lease_until", "markdown"),
}


def items():
    """Two of each task, with sources, secret columns and messages with keys that no message has."""
    made = []
    for i in range(2):
        for task, count in (("pair", 2), ("ranking", 3), ("rating", 1), ("demonstration", 1), ("correction", 1)):
            texts = [f"{task} {i} {'abc'[n]}" for n in range(count)]
            responses = [{"role": "assistant", "content": text, "secret_key": 1} for text in texts] if i else texts
            if task in ("demonstration", "correction"):
                responses = texts
            candidates = tuple(Candidate(one, SOURCE | {"seed": SEED + n}) for n, one in enumerate(responses))
            prompt = [{"role": "user", "content": f"题 {i}"}] if i else f"题 {i}"
            columns = {"secret_column": "runs/secret-policy/final"}
            more = {"chosen_by": "active", "round": 7, "columns": columns}
            made.append(Item(item_id(task, prompt, candidates), task, prompt, candidates, **more))
    made.append(Item(item_id("chat", "system"), "chat", "system"))
    return made


def look(found, where, answer):
    """Search everything of an answer: its status, headers and body."""
    everything = f"{answer.status} {answer.headers}".encode() + answer.bytes
    found.update((where, one.decode()) for one in TELLTALES if one in everything)


@pytest.mark.parametrize("role", ["annotator", "owner"])
def test_a_crawl_of_every_response_while_labelling(served, policy, answers, role):
    server = served(items(), options={"worker": policy}, repeats=0.5, overlap=0.0)
    server.app.by_person = server.app.costly = RateLimit(1e9, 1e9)
    client = server.signed_in("Ada", role)
    found, done = Counter(), Counter()

    def ask(method, path, body=None):
        answer = client.ask(method, path, body)
        look(found, path, answer)
        return answer

    def look_everywhere():
        for rule in all_rules():
            closed = ("/api/export", "/api/labels") if role == "owner" else ()  # what was labelled, with all of it
            if rule.method == "GET" and rule.path not in closed and not rule.path.startswith("/static/"):
                ask("GET", rule.path)

    for number in range(60):
        item = ask("GET", "/api/next").json["item"]
        if item is None:
            break
        assert set(item) == SHOWN
        done[item["task"]] += 1
        if number % 5 == 0:
            look_everywhere()
        shown = client.shown(item)
        sent = {"nonce": f"{number:012}", **shown, "seconds": 1}
        answer = answers.get(item["task"])
        if answer is None:
            messages = [{"role": "user", "content": "hi"}]
            turn = ask("POST", "/api/chat", {"nonce": f"c{number:011}", "item": item["id"], "messages": messages}).json
            answer = {"turn": turn["turn"], **answers["pair"], "last": True}
        ask("POST", "/api/draft", {**shown, "draft": {"answer": answer}})
        ask("POST", "/api/label", sent | {"answer": {}})
        assert ask("POST", "/api/label", sent | {"answer": answer}).status == 200
        if number % 3 == 0:
            undone = ask("POST", "/api/undo", {"nonce": f"u{number:011}"}).json["item"]
            answer = {**answer, "turn": undone["draft"]["answer"]["turn"]} if "turn" in answer else answer
            again = sent | {"nonce": f"v{number:011}", "assignment": undone["assignment"], "answer": answer}
            assert ask("POST", "/api/label", again).status == 200
    look_everywhere()
    assert set(done) == {*answers, "chat"}
    assert found == Counter()
    assert "secret" in json.dumps([item.columns for item in server.project.items()], default=dict), (
        "there was something to find"
    )


def test_a_crawl_would_notice(served):
    """Negative control: a source in an answer is found."""
    server = served(items())
    found = Counter()
    client = server.signed_in("Ada", "owner")
    client.post("/api/draft", {**client.shown(), "draft": SOURCE})
    look(found, "/api/next", client.get("/api/next"))
    assert {told for _, told in found} == {"secret", "checkpoint", str(TEMPERATURE), str(SEED)[:12]}


def test_repeats_gold_questions_and_sides_tell_nothing(served, pair_item, answers):
    """Each item has one form, whatever it is; each candidate is on the left half of the time, for everybody anew."""
    known = {"preferred": 1, "strength": None, "both_bad": False}
    items = [pair_item(i, gold=known) if i % 5 == 0 else pair_item(i) for i in range(50)]
    server = served(items, repeats=0.3, overlap=1.0, overlap_people=2, gold=0.5)
    server.app.by_person = RateLimit(1e9, 1e9)
    gold, shapes, replies, orders = {one.item_id for one in items if one.gold is not None}, set(), set(), {}
    for name in ("Ada", "Bob"):
        client, seen, repeats = server.signed_in(name), set(), 0
        while True:
            answer = client.get("/api/next")
            item = answer.json["item"]
            assert b"gold" not in answer.bytes
            if item is None:
                break
            repeats += item["id"] in seen
            if item["id"] not in seen:
                orders.setdefault(item["id"], []).append(item["answers"][0].startswith("first"))
            seen.add(item["id"])
            shapes.add((tuple(item), frozenset(answer.json), frozenset(item["instructions"]), item["draft"]))
            sent = client.label(answers["pair"], item, version=0)
            replies.add((frozenset(sent.json), frozenset(sent.json["progress"])))
            assert (sent.status, b"gold" in sent.bytes) == (200, False)
        assert repeats > 3
        assert seen & gold, "some were asked"
    assert (len(shapes), [set(one) for one, _ in replies]) == (1, [{"label", "progress"}])
    lefts = [left for one in orders.values() for left in one]
    assert len(lefts) > 80
    assert abs(sum(lefts) - len(lefts) / 2) < 3.8 * len(lefts) ** 0.5 / 2
    assert {(a, b) for a in (True, False) for b in (True, False)} <= {tuple(one) for one in orders.values()}
    stored = [one for one in server.project.labels() if one.item.gold is not None]
    assert {one.item.item_id for one in stored} <= gold
    assert all("gold" not in one.event.content for one in stored)
