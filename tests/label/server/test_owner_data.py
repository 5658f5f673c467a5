"""What owners get of the labels: the export and the statistics."""

import io
import json
import zipfile

from heedful.label.server import owner

FIRST = {"preferred": 0, "strength": 4, "both_bad": False}


def label_all(project, person):
    number = 0
    while (held := project.next_item(person)) is not None:
        number += 1
        project.label(person, held.item.item_id, FIRST, nonce=f"nonce-{person}-{number:04}", seconds=1)


class TestExport:
    def test_people_are_left_out_by_their_ids(self, served, pair_item):
        server = served([pair_item(i) for i in range(4)], repeats=0.0, overlap=1.0, overlap_people=2)
        reader = server.signed_in("Olga", "owner")
        anna, bo = (server.project.add_person(name, "annotator").person_id for name in ("安娜", "Bo\u2028🙂"))
        for person in (anna, bo):
            label_all(server.project, person)
        query = "/api/export?eval_fraction=0"
        with zipfile.ZipFile(io.BytesIO(reader.get(f"{query}&without={anna}").bytes)) as archive:
            lines = archive.read("preferences.train.jsonl").decode().split("\n")
        assert [json.loads(line)["feedback"]["person"] for line in lines if line] == [bo] * 4
        both = reader.get(f"{query}&without={anna},{bo}&preview=1").json
        assert both["left_out"] == {"people": 8}
        unknown = reader.get(f"{query}&without=p999")
        assert (unknown.status, "p999" in unknown.error) == (404, True)


class TestStatistics:
    def test_they_are_computed_again_only_if_something_happened(self, served, pair_item, monkeypatch):
        server = served([pair_item(i) for i in range(3)], repeats=0.0)
        reader = server.signed_in("Olga", "owner")
        computed = []
        real = owner.project_statistics
        monkeypatch.setattr(
            owner, "project_statistics", lambda *given, **more: computed.append(1) or real(*given, **more)
        )
        assert reader.get("/api/stats").json == reader.get("/api/stats").json
        assert len(computed) == 1
        anna = server.project.add_person("安娜\u2028", "annotator").person_id
        label_all(server.project, anna)
        assert reader.get("/api/stats").json["labels"] == 3
        scores = [{"item": item.item_id, "scores": [1.0, 0.0]} for item in server.project.items()]
        path = server.project.folder / "scores.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in scores), encoding="utf-8")
        assert reader.get("/api/stats").json["model"]["agreement"]["value"] == 1.0
        assert len(computed) == 3
