"""A checkpoint is whole, or it is found out: every damage is detected, none of it runs, and the run falls back."""

import json
import os
import pickle
import resource
import shutil

import pytest
import torch

from heedful import CheckpointError
from heedful.files import to_json
from heedful.training import checkpoints as checkpoints_module
from heedful.training.checkpoints import MANIFEST, Checkpoints, read_state, verify, write_manifest, write_state
from heedful.training.provenance import digest
from trees import differing


class Model:
    """A learner that saves two files."""

    def save(self, folder):
        (folder / "model.safetensors").write_bytes(bytes(range(200)))
        (folder / "config.json").write_text('{"名": "小"}', encoding="utf-8")


STATE = {"learner": {"weights": torch.arange(6.0).view(2, 3), "steps": 3}, "logs": {}}


@pytest.fixture
def checkpoints(tmp_path):
    made = Checkpoints(tmp_path, "this run", keep=0)
    for step in (1, 2):
        made.save(step, Model(), STATE)
    return made


def every_file(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def link(path):
    path.symlink_to(path.rename(path.parents[2] / "elsewhere"))


DAMAGES = {
    "one bit": flip,
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "by one": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "deleted": lambda path: path.unlink(),
    "link": link,
}
FILES = ["config.json", "model.safetensors", "resume/state.json", "resume/tensors-00000.safetensors", MANIFEST]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_and_the_one_before_is_used(checkpoints, name, damage):
    """Unless it was asked for: that one is never replaced by another."""
    newest = checkpoints.path(2)
    assert [path.relative_to(newest).as_posix() for path in every_file(newest)] == sorted(FILES)
    DAMAGES[damage](newest / name)
    with pytest.raises(CheckpointError):
        checkpoints.read(newest)
    found, said = checkpoints.newest()
    assert found.step == 1
    assert torch.equal(found.state["learner"]["weights"], STATE["learner"]["weights"])
    assert len(said) == 1
    assert "step-000002" in said[0]
    aside = checkpoints.folder / "bad-step-000002"
    assert (aside / "REASON.txt").read_text("utf-8").strip() in said[0]
    assert checkpoints.newest()[1] == [], "it is set aside once"


def swap(a, b):
    aside = a.rename(a.with_name("x"))
    b.rename(a)
    aside.rename(b)


def test_swapped_files_are_found(checkpoints):
    swap(checkpoints.path(2) / "config.json", checkpoints.path(2) / "model.safetensors")
    assert checkpoints.newest()[0].step == 1


def test_swapped_checkpoints_are_found(checkpoints):
    swap(checkpoints.path(1), checkpoints.path(2))
    found, said = checkpoints.newest()
    assert found is None
    assert "it is of step 1" in said[0]


def test_the_newest_is_by_step_whatever_the_clock_says(checkpoints):
    os.utime(checkpoints.path(2), (0, 0))
    assert checkpoints.newest()[0].step == 2


def test_of_another_run(checkpoints, tmp_path):
    other = Checkpoints(tmp_path, "another", keep=0)
    assert other.newest()[0] is None
    assert (other.folder / "bad-step-000001" / "REASON.txt").read_text() == "it is from another run\n"


def resigned(folder, **changes):
    """Write a manifest that is right in itself, with other content."""
    content = json.loads((folder / MANIFEST).read_text("utf-8")) | changes
    content.pop("sha256")
    (folder / MANIFEST).write_text(to_json({**content, "sha256": digest(content)}), encoding="utf-8")


@pytest.mark.parametrize("schema", [2, "1", None])
def test_of_another_schema(checkpoints, schema):
    resigned(checkpoints.path(2), schema=schema)
    with pytest.raises(CheckpointError, match="schema"):
        verify(checkpoints.path(2))


@pytest.mark.parametrize("name", ["../../outside", "/etc/passwd", "a/../../../b"])
def test_names_outside_are_refused(checkpoints, name, tmp_path):
    (tmp_path / "outside").write_text("x")
    files = json.loads((checkpoints.path(2) / MANIFEST).read_text("utf-8"))["files"]
    resigned(checkpoints.path(2), files=files | {name: {"bytes": 1, "sha256": "0"}})
    with pytest.raises(CheckpointError, match="outside the folder"):
        verify(checkpoints.path(2))


class Canary:
    """Runs code if it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def vouched_for(folder):
    """With a manifest for what is in it now."""
    (folder / MANIFEST).unlink()
    write_manifest(folder, {"run": "this run", "step": 2})


@pytest.mark.parametrize("name", ["resume/optimizer.pt", "training_args.bin", "resume/tensors-00000.safetensors"])
@pytest.mark.parametrize("is_listed", [True, False])
def test_a_planted_pickle_never_runs(checkpoints, tmp_path, name, is_listed):
    """A file of the manifest that nobody reads does no harm; one beside it, or in the place of another, is damage."""
    canary = tmp_path / "canary"
    (checkpoints.path(2) / name).write_bytes(pickle.dumps(Canary(canary)))
    if is_listed:
        vouched_for(checkpoints.path(2))
    assert checkpoints.newest()[0].step == (2 if is_listed and "tensors" not in name else 1)
    assert not canary.exists()


HEADER = b'{"0":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}'
BOMBS = {
    "length": b"\xff" * 8 + b"{}",
    "length of a terabyte": (1 << 40).to_bytes(8, "little") + b"{}",
    "tensor": len(HEADER).to_bytes(8, "little") + HEADER,
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_header_that_declares_more_than_there_is(checkpoints, bomb):
    """With a manifest that vouches for it: refused, and no such memory is asked for."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (checkpoints.path(2) / "resume" / "tensors-00000.safetensors").write_bytes(BOMBS[bomb])
    vouched_for(checkpoints.path(2))
    found, said = checkpoints.newest()
    assert found.step == 1
    assert "step-000002 is incomplete or damaged" in said[0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "kilobytes"


def test_a_checkpoint_that_is_a_link(checkpoints, tmp_path):
    shutil.move(checkpoints.path(2), tmp_path / "elsewhere")
    checkpoints.path(2).symlink_to(tmp_path / "elsewhere")
    found, said = checkpoints.newest()
    assert found.step == 1
    assert "it is a link" in said[0]


def test_an_interrupted_save_is_removed(checkpoints):
    partial = checkpoints.folder / ".step-000003.heedful-partial"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    assert checkpoints.newest()[0].step == 2
    assert not partial.exists()


STATES = [
    {"a": 1, "b": [1.5, None, "文", True], "c": (1, (2, [3]))},
    {"numbers": {0: {"step": torch.tensor(3.0)}, 1: {}}, "$odd": 1},
    {"inf": float("inf"), "minus": float("-inf"), "nan": float("nan"), "third": 1 / 3, "big": 2**70},
    {"bf16": torch.randn(3).bfloat16(), "empty": torch.zeros(0, 2), "bytes": torch.arange(5, dtype=torch.uint8)},
    {"view": torch.arange(6.0).view(2, 3).t(), "scalar": torch.tensor(7)},
]


def test_a_state_is_read_back_equal(tmp_path, monkeypatch):
    """Its dictionaries in their order; in several files too."""
    for i, state in enumerate(STATES):
        write_state(tmp_path / f"{i}", state)
        found = read_state(tmp_path / f"{i}")
        assert differing(state, found) == []
        assert list(state) == list(found)
    monkeypatch.setattr(checkpoints_module, "MOST_BYTES", 100)
    state = {str(i): torch.randn(i, 7) for i in range(9)}
    write_state(tmp_path / "several files", state)
    assert len(list((tmp_path / "several files").glob("tensors-*"))) > 4
    assert differing(state, read_state(tmp_path / "several files")) == []


def test_what_a_state_cannot_hold_is_refused(tmp_path):
    with pytest.raises(TypeError, match="a state cannot contain set"):
        write_state(tmp_path / "state", {"a": {1, 2}})
