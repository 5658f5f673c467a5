"""What people who label do, over HTTP: every task, undo, skip, drafts, chats, instructions; and what owners do."""

import io
import json
import threading
import zipfile
from unittest.mock import ANY

import pytest

from heedful import faults
from heedful.apps.label import Candidate, Item, item_id
from heedful.apps.label.server import owner as owner_api
from heedful.apps.label.server.policy import Buffer
from heedful.apps.label.server.security import RateLimit
from jsonl import lines, write_jsonl
from labelling import send

LEFT = {"preferred": 0, "strength": 1, "both_bad": False}
TEXT = "答 😀\u2028\u202eabc\u2069"
WRONG = [
    *(("nonce", value, "nonce") for value in ("short", None, "x" * 65, "with space 123")),
    *(("item", value, "item") for value in (5, "nothing")),
    *(("answer", value, "answer") for value in ([1], "0")),
    *(("seconds", value, "seconds") for value in (-1, "2", True, 10**400)),
    *(("active", value, "active") for value in (2.6, -1, "1", None)),
    *(("comment", value, "comment") for value in (5, "x" * 20_001)),
    *(("flags", value, "flags") for value in ("broken", ["unknown"], [1])),
    *((name, 7, name) for name in ("version", "extra", "person")),
]
"""A field of a label, a value that is wrong, and what the refusal must name."""


def make(task, answers, prompt="题 1", **more):
    candidates = tuple(Candidate(answer, {"checkpoint": "secret", "seed": i}) for i, answer in enumerate(answers))
    return Item(item_id(task, prompt, candidates), task, prompt, candidates, **more)


class TestTasks:
    def test_a_pair_is_kept_in_terms_of_candidates(self, served, pair_item):
        server = served([pair_item(i) for i in range(12)], repeats=0.0)
        ada = server.signed_in("Ada")
        for i in range(12):
            item = ada.get("/api/next").json["item"]
            side = i % 2
            chosen = item["answers"][side]
            assert ada.label({"preferred": side, "strength": 3, "both_bad": False}, comment=TEXT).status == 200
            label = server.project.labels()[-1]
            content = label.event.content
            assert label.item.candidates[content["answer"]["preferred"]].response == chosen
            assert content["order"][side] == content["answer"]["preferred"]
            assert content["comment"] == TEXT
        orders = {tuple(one.event.content["order"]) for one in server.project.labels()}
        assert orders == {(0, 1), (1, 0)}

    def test_other_tasks(self, served):
        tasks = [
            ("rating", ["x"], {"rating": 7, "flags": ["hallucination", "harmful-advice"]}),
            ("demonstration", [], {"text": TEXT}),
            ("demonstration", ["a draft"], {"text": TEXT}),
            ("correction", ["wrong"], {"text": TEXT}),
        ]
        server = served([make("ranking", list("abcd")), *(make(task, answers) for task, answers, _ in tasks)])
        ada = server.signed_in("Ada")
        shown = ada.get("/api/next").json["item"]["answers"]
        best, tied = shown[2], {shown[0], shown[3]}
        assert ada.label({"ranks": [2, 3, 1, 2]}).status == 200
        ranks = dict(zip("abcd", server.project.labels()[0].event.content["answer"]["ranks"], strict=True))
        assert (ranks[best], {ranks[one] for one in tied}) == (1, {2})
        for task, answers, answer in tasks:
            shown = ada.get("/api/next").json["item"]
            assert (shown["task"], shown["answers"]) == (task, answers)
            assert ada.label(answer).status == 200
            assert server.project.labels()[-1].event.content["answer"] == answer
        last = ada.get("/api/next").json
        assert (last["item"], last["reason"]) == (None, "done")

    def test_what_is_wrong_is_refused_and_named(self, served, pair_item):
        """An answer that the task does not take (each kind is tried in tests/label/store), and every other field."""
        server = served([pair_item(0)])
        ada = server.signed_in("Ada")
        for answer, said in (
            ({}, "lacks 'preferred'"),
            ({"ranks": [1, 2]}, "no field 'ranks'"),
            ({**LEFT, "preferred": True}, "preferred must be"),
            ({**LEFT, "strength": 5}, "strength must be"),
            ({**LEFT, "more": 1}, "no field 'more'"),
        ):
            refused = ada.label(answer)
            assert (refused.status, said in refused.error) == (422, True), (answer, refused.error)
        for name, value, said in WRONG:
            refused = ada.label(LEFT, **{name: value})
            assert (refused.status, said in refused.error) == (422, True), (name, refused.bytes)
        assert server.project.labels() == []
        assert ada.label(LEFT).status == 200


class TestWork:
    def test_each_tab_has_a_draft_and_replaces_what_it_began_with(self, served, pair_item):
        ada = served([pair_item(0)]).signed_in("Ada")

        def save(tab, number, text, **more):
            body = {**ada.shown(), "draft": {"answer": {}, "comment": text}, "tab": tab, "save": number, **more}
            return ada.post("/api/draft", body).json

        assert save("one", 1, "一") == {"saved": True}
        assert save("two", 1, "二")["others"] == [{"text": "", "comment": "一"}]
        item = ada.get("/api/next").json["item"]
        assert (item["draft"]["comment"], item["draft_of"]) == ("二", "two.1")
        assert item["others"] == [{"text": "", "comment": "一"}]
        assert "others" in save("one", 2, "一一"), "the other tab's is still there"
        save("two", 3, "二二二")
        assert save("two", 2, "二二")["saved"], "one that comes late replaces nothing"
        assert save("three", 1, "三", **{"from": "two.3"})["others"] == [{"text": "", "comment": "一一"}]
        assert len(save("four", 1, "四", **{"from": "one.1"})["others"]) == 2, "it was changed since"
        assert ada.post("/api/draft", {**ada.shown(), "draft": None}).status == 200
        assert ada.get("/api/next").json["item"]["draft"]["comment"] == "四"
        assert ada.post("/api/draft", {**ada.shown(), "draft": {"text": "x" * 600_000}}).status == 413
        assert ada.post("/api/draft", {**ada.shown(), "draft": {"answer": {"responses": []}}}).status == 422
        for wrong in ({"draft": [1]}, {"tab": "a b"}, {"save": -1}, {"save": True}, {"from": "x"}, {"from": 1}):
            refused = ada.post("/api/draft", {**ada.shown(), "draft": {}, **wrong})
            assert refused.status == 422
            assert next(iter(wrong)) in refused.error
        drafts = [{**ada.shown(), "draft": {"comment": f"{i}"}, "tab": f"t{i}"} for i in range(9)]
        statuses = [ada.post("/api/draft", draft).status for draft in drafts]
        assert (statuses[:4], statuses[-1]) == ([200] * 4, 409), "none is thrown away for a new one"

    def test_active_time_is_part_of_the_time(self, served, pair_item):
        server = served([pair_item(i) for i in range(2)])
        ada = server.signed_in("Ada")
        for active in (1.5, 2.5):
            assert ada.label(LEFT, active=active).status == 200
        contents = [one.event.content for one in server.project.labels()]
        assert [(one["seconds"], one["active"]) for one in contents] == [(2.5, 1.5), (2.5, 2.5)]

    def test_skip_with_a_reason(self, served, pair_item):
        server = served([pair_item(i) for i in range(2)])
        ada = server.signed_in("Ada")
        first = ada.shown()
        body = {"nonce": "s" * 12, **first, "reason": TEXT, "flags": ["personal-data"]}
        assert ada.post("/api/skip", body).status == 200
        assert ada.post("/api/skip", body).status == 200
        assert ada.get("/api/next").json["item"]["id"] != first["item"]
        skips = [event for event in server.project.events() if event.kind == "skip"]
        assert [(one.content["reason"], one.content["flags"]) for one in skips] == [(TEXT, ["personal-data"])]

    def test_a_page_that_shows_an_item_as_it_was_given_before_is_409(self, served, pair_item):
        """Its places may be those of another order: of a hidden repeat, or of before the item came back."""
        server = served([pair_item(i) for i in range(22)], repeats=0.5, overlap=0.0)
        server.app.by_person = RateLimit(1e9, 1e9)
        ada = server.signed_in("Ada")
        old, repeats, turned = {}, 0, 0
        answer = {"preferred": 0, "strength": 4, "both_bad": False}
        while (item := ada.get("/api/next").json["item"]) is not None:
            if item["id"] in old:
                repeats += 1
                before, answers = old[item["id"]]
                turned += answers != item["answers"]
                stale = {"nonce": f"stale{repeats:08}", **before}
                assert ada.post("/api/label", {**stale, "answer": answer, "seconds": 1}).status == 409
                assert ada.post("/api/skip", stale).status == 409
                assert ada.post("/api/draft", {**before, "draft": {"answer": answer}}).status == 409
                assert ada.get("/api/next").json["item"] == item | {"lease_until": ANY}
            old[item["id"]] = ada.shown(), item["answers"]
            assert ada.label(answer).status == 200
            label = server.project.labels()[-1]
            assert label.item.candidates[label.event.content["answer"]["preferred"]].response == item["answers"][0]
        assert repeats > turned > 1
        undone = ada.post("/api/undo", {"nonce": "u" * 12}).json["item"]
        before, _ = old[undone["id"]]
        assert ada.post("/api/label", {"nonce": "late" * 3, **before, "answer": answer, "seconds": 1}).status == 409
        assert ada.label(answer).status == 200

    def test_what_comes_without_its_assignment_is_refused(self, served, pair_item):
        ada = served([pair_item(0)]).signed_in("Ada")
        sent = {"nonce": "n" * 12, "item": ada.shown()["item"]}
        for path, more in {"label": {"answer": LEFT, "seconds": 1}, "skip": {}}.items():
            refused = ada.post(f"/api/{path}", sent | more)
            assert (refused.status, "assignment" in refused.error) == (422, True)
        assert ada.post("/api/draft", {"item": sent["item"], "draft": {}}).status == 422

    def test_markdown_is_off_unless_the_project_says_so(self, served):
        text = "**bold** <script>alert(1)</script> ![x](http://beacon.example/a.png)"
        plain = served([make("rating", [text])]).signed_in("Ada").get("/api/next").json["item"]
        assert (plain["markdown"], plain["answers"]) == ([None], [text])
        shown = served([make("rating", [text])], markdown=True).signed_in("Ada").get("/api/next").json["item"]
        (html,) = shown["markdown"]
        assert shown["answers"] == [text]
        assert "<strong>bold</strong>" in html
        assert [one for one in ("<script", "<img", "src=") if one in html] == []

    @pytest.mark.parametrize("point", ["label.began", "label.committed"])
    def test_a_disk_that_is_full_is_said_and_what_is_sent_again_counts_once(self, served, pair_item, point, capsys):
        server = served([pair_item(0)])
        ada = server.signed_in("Ada")
        body = {"nonce": "n" * 12, **ada.shown(), "answer": LEFT, "seconds": 1}
        faults.plan(f"{point}:enospc")
        first = ada.post("/api/label", body)
        faults.plan("")
        assert (first.status, "disk" in first.error, str(server.folder) in first.error) == (503, True, False)
        assert first.headers["Retry-After"]
        assert "No space left" in capsys.readouterr().err
        assert ada.post("/api/label", body).status == 200
        assert len(server.project.labels()) == 1


def test_a_chat_that_was_given_while_there_was_a_model(served):
    """Nothing is said to its annotator that is for the owner."""
    server = served([Item(item_id("chat", "聊聊😀"), "chat", "聊聊😀")])
    ada, owner = server.signed_in("Ada"), server.signed_in("Olga", "owner")
    item = server.project.next_item(ada.person.person_id).item.item_id
    assert ada.get("/api/next").json["item"]["id"] == item, "it stays theirs, with what they wrote"
    body = {"nonce": "c" * 12, "item": item, "messages": [{"role": "user", "content": "你好"}]}
    answer = ada.post("/api/chat", body)
    assert (answer.status, answer.error) == (409, "there is no model to talk to now; skip this chat")
    assert ada.post("/api/skip", {"nonce": "s" * 12, **ada.shown()}).status == 200
    reply = owner.get("/api/next").json
    assert (reply["item"], reply["reason"]) == (None, "no-model")
    assert owner.get("/api/people").json["chats_kept_back"] == 1


class TestPolicy:
    def test_a_chat(self, served, policy):
        server = served([Item(item_id("chat", ""), "chat", "")], options={"worker": policy})
        ada = server.signed_in("Ada")
        item = ada.get("/api/next").json["item"]
        messages = [{"role": "user", "content": "你好"}]
        server.app.by_person = server.app.costly = RateLimit(1e9, 1e9)
        roles = ([{"role": role, "content": "x"}] for role in ("x", "assistant"))
        for wrong in (None, [], "hi", *roles, [{"content": "x"}]):
            assert ada.post("/api/chat", {"nonce": "w" * 12, "item": item["id"], "messages": wrong}).status == 422
        asking = {"nonce": "c" * 12, "item": item["id"], "messages": messages}
        turn = ada.post("/api/chat", asking).json
        assert sorted(turn["answers"]) == ["你好 😀\u20280", "你好 😀\u20281"]
        assert ada.post("/api/chat", asking).json == turn, "asked again after a lost answer, it is the same turn"
        choice = {"turn": turn["turn"], "preferred": 1, "strength": 2, "both_bad": False, "last": False}
        assert ada.label(choice).status == 200
        kept = server.project.labels()[0].event.content["answer"]
        assert kept["responses"][kept["preferred"]]["response"] == turn["answers"][1]
        assert kept["responses"][0]["source"]["checkpoint"] == "runs/secret-policy/final"
        resumed = ada.get("/api/next").json["item"]["draft"]["answer"]["messages"]
        assert resumed == [*messages, {"role": "assistant", "content": turn["answers"][1]}]
        messages = [*resumed, {"role": "user", "content": "more"}]
        made = {"role": "assistant", "content": "made up"}
        for made_up in (messages[-1:], [*messages[:1], made, messages[-1]], [{**made, "role": "system"}, *messages]):
            forged = ada.post("/api/chat", {"nonce": "f" * 12, "item": item["id"], "messages": made_up})
            assert (forged.status, forged.json["code"]) == (409, "chat_changed")
        second = ada.post("/api/chat", {"nonce": "d" * 12, "item": item["id"], "messages": messages}).json
        assert ada.label(choice | {"turn": second["turn"], "last": True}).status == 200
        assert ada.get("/api/next").json["item"] is None
        undone = ada.post("/api/undo", {"nonce": "u" * 12})
        assert b"secret" not in undone.bytes
        draft = undone.json["item"]["draft"]["answer"]
        assert draft["answers"] == second["answers"]
        assert draft["choice"]["preferred"] == 1
        assert ada.label(choice | {"turn": draft["turn"], "last": True}).status == 200
        assert server.project.labels()[-1].event.content["answer"]["responses"][0]["source"]["seed"] in (0, 1)

    def test_a_turn_is_of_one_person_and_one_item(self, served, policy):
        """Also if two people have the same chat, or one has skipped the first."""
        items = [Item(item_id("chat", prompt), "chat", prompt, needed=2) for prompt in ("a", "b")]
        server = served(items, options={"worker": policy})
        ada, bob = server.signed_in("Ada"), server.signed_in("Bob")
        item = ada.get("/api/next").json["item"]["id"]
        assert bob.get("/api/next").json["item"]["id"] == item
        messages = [{"role": "user", "content": "hi"}]
        turn = ada.post("/api/chat", {"nonce": "c" * 12, "item": item, "messages": messages}).json["turn"]
        choice = {"turn": turn, "preferred": 1, "strength": 2, "both_bad": False, "last": True}
        assert bob.label(choice).status == 409
        assert ada.post("/api/skip", {"nonce": "s" * 12, **ada.shown()}).status == 200
        assert ada.label(choice).status == 409
        assert ada.post("/api/chat", {"nonce": "d" * 12, "item": item, "messages": messages}).status == 409
        assert server.project.labels() == []

    def test_a_policy_that_dies_is_said_and_comes_back(self, served, policy, until):
        server = served([Item(item_id("chat", ""), "chat", "")], options={"worker": policy})
        server.app.by_person = RateLimit(1e9, 1e9)
        ada, owner = server.signed_in("Ada"), server.signed_in("Olga", "owner")
        item = ada.get("/api/next").json["item"]["id"]
        body = {"nonce": "c" * 12, "item": item, "messages": [{"role": "user", "content": "die"}]}
        answer = ada.post("/api/chat", body)
        assert answer.status == 503
        assert "ended while it answered" in answer.error
        refused = {"nonce": "f" * 12, "item": item, "messages": [{"role": "user", "content": "fail"}]}
        until(lambda: policy.is_ready)
        answer = ada.post("/api/chat", refused)
        assert (answer.status, b"secret" in answer.bytes) == (503, False)
        until(lambda: owner.get("/api/people").json["policy"] == {"ready": True, "starts": 2, "problem": None})
        body = {"nonce": "e" * 12, "item": item, "messages": [{"role": "user", "content": "fine"}]}
        assert ada.post("/api/chat", body).status == 200

    def test_items_are_kept_ready_and_people_go_on_while_more_are_written(self, served, policy, until):
        server = served(repeats=0.0)
        server.app.by_person = RateLimit(1e9, 1e9)
        prompts = [f"题目 {i}" for i in range(16)]
        with Buffer(server.project, policy, prompts, 2, 6) as buffer:
            until(lambda: len(server.project.items()) >= 6)
            assert len(server.project.items()) < 16
            ada = server.signed_in("Ada")
            for _ in range(16):
                until(lambda: ada.get("/api/next").json["item"] is not None)
                assert ada.label(LEFT).status == 200
            assert not buffer.left
        items = server.project.items()
        assert [item.prompt for item in items] == prompts
        assert {item.chosen_by for item in items} == {"random"}
        again = Buffer(server.project, policy, [*prompts, "new"], 2, 6)
        assert again.left == ["new"]

    def test_what_only_others_can_label_does_not_hold_up_new_items(self, served, policy, until):
        """Items that overlap, or that she skipped, still need others; there is nobody else."""
        server = served(repeats=0.0, overlap=1.0)
        server.app.by_person = RateLimit(1e9, 1e9)
        with Buffer(server.project, policy, [f"题目 {i}" for i in range(10)], 2, 3):
            ada = server.signed_in("Ada")
            for i in range(10):
                until(lambda: ada.get("/api/next").json["item"] is not None)
                if i < 5:
                    assert ada.post("/api/skip", {"nonce": f"skip{i:08}", **ada.shown()}).status == 200
                else:
                    assert ada.label(LEFT).status == 200
        assert len(server.project.items()) == 10


def test_prompts_that_the_policy_cannot_answer_hold_up_no_other(new_worker, served, until, monkeypatch, capsys):
    for name in ("FIRST_WAIT", "LONGEST_WAIT", "LOOK_SECONDS"):
        monkeypatch.setattr(f"heedful.apps.label.server.policy.{name}", 0.02)
    server, worker = served(), new_worker()
    with Buffer(server.project, worker, ["a", "fail", "b", "die", "c", "d"], 2, 50) as buffer, worker:
        until(lambda: not buffer.left)
    assert [item.prompt for item in server.project.items()] == ["a", "b", "c", "d"]
    said = capsys.readouterr().err
    assert "failed 3 times on it: 'fail'" in said
    assert "failed 3 times on it: 'die'" in said


def test_the_server_ends_while_somebody_waits_for_the_policy(new_worker, served, until, monkeypatch):
    monkeypatch.setattr("heedful.apps.label.server.policy.END_SECONDS", 0.3)
    worker = new_worker()
    server = served([Item(item_id("chat", ""), "chat", "")], options={"worker": worker})
    with worker:
        until(lambda: worker.is_ready)
        ada = server.signed_in("Ada")
        item = ada.get("/api/next").json["item"]["id"]
        body = {"nonce": "c" * 12, "item": item, "messages": [{"role": "user", "content": "hang"}]}
        found = []
        asking = threading.Thread(target=lambda: found.append(ada.post("/api/chat", body).status))
        asking.start()
        until(lambda: worker._pending)
    asking.join(120)
    assert found == [503]


class TestOwners:
    def test_import_preview_then_import(self, served):
        server = served()
        owner = server.signed_in("Olga", "owner")
        text = lines({"prompt": f"题 {i}", "responses": [TEXT, f"b {i}"]} for i in range(4))
        found = owner.post("/api/import", {"text": text, "preview": True}).json
        assert (found["records"], found["items"], found["added"]) == (4, 4, 0)
        assert server.project.items() == []
        done = owner.post("/api/import", {"text": text}).json
        assert done["added"] == 4
        assert server.project.items()[0].candidates[0].response == TEXT
        assert owner.post("/api/import", {"text": text}).json["added"] == 0
        text = lines([{"prompt": "题", "chosen": TEXT, "rejected": "b"}])
        done = owner.post("/api/import", {"text": text, "labels": True}).json
        assert (done["added"], done["labels_added"], len(server.project.labels())) == (1, 1, 1)
        assert {one["name"] for one in owner.get("/api/people").json["people"]} == {"owner", "Olga"}, "of nobody"
        text = '{"prompt": "a", "responses": ["b", "c"]}\n{"prompt": "a", "responses": []}\n'
        found = owner.post("/api/import", {"text": text, "preview": True}).json
        assert (found["refused"], ":2" in found["errors"][0]) == (1, True)
        broken = owner.post("/api/import", {"text": "{\n", "preview": True})
        assert (broken.status, ":1" in broken.error, "/tmp" in broken.error) == (422, True, False)

    def test_export_is_a_zip_of_what_trainers_read(self, served, pair_item):
        server = served([pair_item(i) for i in range(6)], repeats=0.0)
        owner = server.signed_in("Olga", "owner")
        for _ in range(6):
            owner.label({"preferred": 0, "strength": 4, "both_bad": False})
        manifest = owner.get("/api/export?preview=1").json
        answer = owner.get("/api/export")
        assert answer.headers["Content-Type"] == "application/zip"
        with zipfile.ZipFile(io.BytesIO(answer.bytes)) as archive:
            assert json.loads(archive.read("manifest.json"))["content_hash"] == manifest["content_hash"]
        assert owner.get("/api/export").bytes == answer.bytes
        for wrong in ("eval_fraction=2", "margin=../x", "file=events.sqlite"):
            assert owner.get(f"/api/export?{wrong}").status == 422
        assert owner.get("/api/stats").json["labels"] == 6
        assert owner.get("/api/rounds").json["rounds"] == []

    def test_people_are_added_invited_changed(self, served):
        server = served()
        owner = server.signed_in("Olga", "owner")
        added = owner.post("/api/people", {"name": f" {TEXT} ", "role": "annotator"}).json
        assert added["person"]["name"] == TEXT
        token = added["link"].partition("/join#")[2]
        assert server.anonymous().join(token).status == 200
        again = owner.post("/api/people", {"person": added["person"]["person"], "invite": True}).json
        assert again["link"] != added["link"]
        assert owner.post("/api/people", {"person": "p999", "role": "owner"}).status == 404
        assert owner.post("/api/people", {"name": "x", "role": "king"}).status == 422
        assert owner.post("/api/people", {"name": "  ", "role": "viewer"}).status == 422
        held_out = owner.post("/api/people", {"name": "Hel", "standing": "held-out"}).json
        assert held_out["person"]["standing"] == "held-out"

    def test_people_are_left_out_by_their_ids_and_statistics_are_computed_only_if_something_happened(
        self, served, pair_item, monkeypatch
    ):
        server = served([pair_item(i) for i in range(4)], repeats=0.0, overlap=1.0, overlap_people=2)
        reader = server.signed_in("Olga", "owner")
        computed, real = [], owner_api.project_statistics
        monkeypatch.setattr(
            owner_api, "project_statistics", lambda *given, **more: computed.append(1) or real(*given, **more)
        )
        assert reader.get("/api/stats").json == reader.get("/api/stats").json
        assert len(computed) == 1
        anna, bo = (server.project.add_person(name, "annotator").person_id for name in ("安娜", "Bo\u2028🙂"))
        for person in (anna, bo):
            while send(server.project, person, LEFT):
                pass
        assert reader.get("/api/stats").json["labels"] == 8
        scores = ({"item": item.item_id, "scores": [1.0, 0.0]} for item in server.project.items())
        write_jsonl(server.project.folder / "scores.jsonl", scores)
        assert reader.get("/api/stats").json["model"]["agreement"]["value"] == 1.0
        assert len(computed) == 3
        query = "/api/export?eval_fraction=0"
        with zipfile.ZipFile(io.BytesIO(reader.get(f"{query}&without={anna}").bytes)) as archive:
            records = archive.read("preferences.train.jsonl").decode().split("\n")
        assert [json.loads(line)["feedback"]["person"] for line in records if line] == [bo] * 4
        assert reader.get(f"{query}&without={anna},{bo}&preview=1").json["left_out"] == {"people": 8}
        unknown = reader.get(f"{query}&without=p999")
        assert (unknown.status, "p999" in unknown.error) == (404, True)
