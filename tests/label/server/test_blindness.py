"""L4: what wrote an answer never reaches a browser before the answer is judged; nor what would give a hidden repeat away."""

import json
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from heedful.label import Candidate, Item, item_id
from heedful.label.server.app import all_rules
from heedful.label.server.policy import PolicyWorker
from heedful.label.server.security import RateLimit

PROGRAM = (sys.executable, str(Path(__file__).parent / "fake_policy.py"))
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
ANSWERS = {
    "pair": {"preferred": 0, "strength": 2, "both_bad": False},
    "ranking": {"ranks": [1, 2, 2]},
    "rating": {"rating": 4, "flags": []},
    "demonstration": {"text": "好"},
    "correction": {"text": "better"},
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
            made.append(
                Item(
                    item_id(task, prompt, candidates),
                    task,
                    prompt,
                    candidates,
                    chosen_by="active",
                    round=7,
                    columns=columns,
                )
            )
    made.append(Item(item_id("chat", "system"), "chat", "system"))
    return made


def look(found, where, answer):
    """Search everything of an answer: its status, headers and body."""
    everything = f"{answer.status} {answer.headers}".encode() + answer.bytes
    found.update((where, one.decode()) for one in TELLTALES if one in everything)


@pytest.fixture
def policy(tmp_path):
    with PolicyWorker(tmp_path / "policy.yaml", tmp_path / "policy.log", PROGRAM) as worker:
        while not worker.is_ready:
            time.sleep(0.01)
        yield worker


@pytest.mark.parametrize("role", ["annotator", "owner"])
def test_a_crawl_of_every_response_while_labelling(served, policy, role):
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
        assert set(item) == {
            "id",
            "assignment",
            "task",
            "prompt",
            "answers",
            "draft",
            "draft_of",
            "others",
            "suggestion",
            "instructions",
            "criteria",
            "lease_until",
            "markdown",
        }
        done[item["task"]] += 1
        if number % 5 == 0:
            look_everywhere()
        shown = client.shown(item)
        sent = {"nonce": f"{number:012}", **shown, "seconds": 1}
        answer = ANSWERS.get(item["task"])
        if answer is None:
            messages = [{"role": "user", "content": "hi"}]
            turn = ask("POST", "/api/chat", {"nonce": f"c{number:011}", "item": item["id"], "messages": messages}).json
            answer = {"turn": turn["turn"], **ANSWERS["pair"], "last": True}
        ask("POST", "/api/draft", {**shown, "draft": {"answer": answer}})
        ask("POST", "/api/label", sent | {"answer": {}})
        assert ask("POST", "/api/label", sent | {"answer": answer}).status == 200
        if number % 3 == 0:
            undone = ask("POST", "/api/undo", {"nonce": f"u{number:011}"}).json["item"]
            answer = {**answer, "turn": undone["draft"]["answer"]["turn"]} if "turn" in answer else answer
            again = sent | {"nonce": f"v{number:011}", "assignment": undone["assignment"], "answer": answer}
            assert ask("POST", "/api/label", again).status == 200
    look_everywhere()
    assert set(done) == {*ANSWERS, "chat"}
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


def test_an_id_says_nothing_of_what_wrote_the_answers():
    """It is of the text alone, so the same answers by other models have the same id."""
    texts = ("a", "b")
    ids = {item_id("pair", "p", [Candidate(text, {"checkpoint": name}) for text in texts]) for name in ("x", "y")}
    assert len(ids) == 1


def test_a_hidden_repeat_looks_like_any_other_item(served, pair_item):
    server = served([pair_item(i) for i in range(30)], repeats=0.5, overlap=0.0)
    server.app.by_person = RateLimit(1e9, 1e9)
    client = server.signed_in("Ada")
    seen, shapes, repeats = set(), set(), 0
    for _ in range(40):
        item = client.get("/api/next").json["item"]
        if item is None:
            break
        repeats += item["id"] in seen
        seen.add(item["id"])
        shapes.add((tuple(item), item["draft"]))
        assert set(client.label(ANSWERS["pair"], item).json) == {"label", "progress"}
    assert repeats > 3
    assert len(shapes) == 1


def test_left_and_right_say_nothing(served, pair_item):
    """Each candidate is on the left half of the time, for everybody anew, whatever wrote it."""
    server = served([pair_item(i) for i in range(60)], repeats=0.0, overlap=1.0, overlap_people=3)
    server.app.by_person = RateLimit(1e9, 1e9)
    orders = {}
    for name in ("Ada", "Bob", "Cem"):
        client = server.signed_in(name)
        for _ in range(60):
            item = client.get("/api/next").json["item"]
            orders.setdefault(item["id"], []).append(item["answers"][0].startswith("first"))
            assert client.label(ANSWERS["pair"], item).status == 200
    lefts = [left for one in orders.values() for left in one]
    assert len(lefts) == 180
    assert 65 < sum(lefts) < 115  # 3.8 standard deviations around 90
    assert len({tuple(one) for one in orders.values()}) > 4
