"""Which labels a round counts, on a real project."""

import types

import pytest

from heedful.configs.label import ProjectSettings
from heedful.label.project import Project
from heedful.label.records import Candidate, Item
from heedful.rounds.round import _counts, _labelled


@pytest.mark.parametrize(("standing", "counts"), [("active", True), ("held-out", False), ("refused", False)])
def test_labels_that_are_not_trained_on_do_not_count(tmp_path, standing, counts):
    """Also of somebody who was refused after labelling."""
    with Project.create(tmp_path / "项目", ProjectSettings(name="项目🦊")) as project:
        person = project.add_person("甲", "annotator").person_id
        project.add_items([Item("1" * 20, "pair", "猫\u2028？", (Candidate("喵"), Candidate("🦊")))])
        project.next_item(person)
        answer = {"preferred": 0, "strength": 2, "both_bad": False}
        project.label(person, "1" * 20, answer, nonce="n", seconds=1.0)
        project.set_person(person, standing=standing)
        assert [_counts(one) for one in project.labels()] == [counts]
        config = types.SimpleNamespace(enough=1.0, project=project.folder)
        notes = types.SimpleNamespace(steps={"sample": {"items": ["1" * 20]}})
        assert (_labelled(config, project, notes)[0] == "") == counts
        other = project.add_person("乙", "annotator").person_id
        offered = project.next_item(other)
        assert (offered is None) == counts, "what does not count is asked again, so that the round gets on"
        if offered is not None:
            project.label(other, "1" * 20, answer, nonce="n", seconds=1.0)
            assert _labelled(config, project, notes)[0] == ""
