"""What is written is whole or not there: folders that replace one another, and JSON."""

import math
import os
from pathlib import Path
from types import MappingProxyType

import pytest

from heedful.files import complete_or_absent, to_json, write_json


def files(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_a_folder_is_replaced_when_complete(tmp_path):
    target = tmp_path / "a" / "final"
    for content in ("old", "new"):
        with complete_or_absent(target) as partial:
            (partial / content).write_text(content)
            assert not (target / content).exists()
    assert files(tmp_path) == {"a/final/new": "new"}
    assert [p.name for p in target.parent.iterdir()] == ["final"]


@pytest.mark.parametrize(("error", "old"), [(ValueError, True), (KeyboardInterrupt, False)])
def test_a_failure_midway_leaves_what_was_there(tmp_path, error, old):
    target = tmp_path / "final"
    if old:
        target.mkdir()
        (target / "weights").write_text("old")

    def write_half():
        with complete_or_absent(target) as partial:
            (partial / "weights").write_text("half")
            raise error

    with pytest.raises(error):
        write_half()
    assert files(tmp_path) == ({"final/weights": "old"} if old else {})
    assert [p.name for p in tmp_path.iterdir()] == (["final"] if old else [])


def test_debris_of_a_killed_process_is_swept_away(tmp_path):
    for name in (".final.heedful-partial", ".final.heedful-replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "junk").write_text("junk")
    with complete_or_absent(tmp_path / "final") as partial:
        (partial / "weights").write_text("new")
    assert files(tmp_path) == {"final/weights": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


@pytest.mark.parametrize("name", [".final.partial", ".final.replaced", ".final.old"])
def test_what_somebody_else_named_so_is_left_alone(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "论文.txt").write_text("重要", encoding="utf-8")
    for _ in range(2):
        with complete_or_absent(tmp_path / "final") as partial:
            (partial / "weights").write_text("new")
    assert files(tmp_path) == {"final/weights": "new", f"{name}/论文.txt": "重要"}


def test_json_is_readable_text(tmp_path):
    write_json(tmp_path / "x.json", {"名": "好", "a": math.inf})
    assert (tmp_path / "x.json").read_text(encoding="utf-8") == '{\n  "名": "好",\n  "a": null\n}\n'
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {"a": object()})
    assert files(tmp_path).keys() == {"x.json"}


def test_all_of_it_is_synchronised_before_it_has_its_name(tmp_path, monkeypatch):
    """So that a power cut leaves no empty files under the name of a whole model; and the new name itself, after it."""
    order, fsync, replace = [], os.fsync, Path.replace

    def synchronised(descriptor):
        fsync(descriptor)
        order.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    def renamed(path, target):
        order.append(f"-> {Path(target).name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synchronised)
    monkeypatch.setattr(Path, "replace", renamed)
    with complete_or_absent(tmp_path / "final") as partial:
        (partial / "weights").write_text("new")
        (partial / "inside").mkdir()
        (partial / "inside" / "head").write_text("new")
    assert set(order[:-2]) == {"weights", "head", "inside", ".final.heedful-partial"}
    assert order[-2:] == ["-> final", tmp_path.name]


def test_json_has_no_number_that_is_not_finite():
    assert to_json({"a": [math.nan, {"b": -math.inf}], "c": 0.0}) == '{"a": [null, {"b": null}], "c": 0.0}'
    assert to_json({"汉": MappingProxyType({"b": (1, None)})}) == '{"汉": {"b": [1, null]}}'
