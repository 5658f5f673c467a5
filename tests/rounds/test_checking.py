"""A round refuses before people label what would end it later, and says no more of its result than it knows."""

import pytest

from heedful.rounds.round import verdict

REWARD = "batch_size: 2\nmax_steps: 2\n"
PPO = "steps: 1\nrollout_batch_size: 2\nminibatch_size: 2\nppo_epochs: 1\n"


@pytest.fixture
def begin(heedful, tiny, tmp_path, written):
    """``begin(*flags, reward=..., ppo=...)`` begins the first round of a new project."""
    assert heedful("label", "new", tmp_path / "项目", "--seed", "0").status == 0

    def start(*flags, reward=REWARD, ppo=PPO):
        files = ("--reward-config", written("评分.yaml", reward), "--ppo-config", written("策略.yaml", ppo))
        prompts = written("题.jsonl", [{"prompt": f"第{i}个：{i} + {i} = ?", "难度": i} for i in range(30)])
        words = ("--policy", tiny("qwen3"), "--prompts", prompts, "--labels", "6", "--max-new-tokens", "4")
        words += ("--response-length", "fixed", "--eval-fraction", "0.4", "--dtype", "float32", *files, *flags)
        return heedful("round", tmp_path / "项目", *words)

    return start


REFUSED = {
    "no reward config": (("--reward-config", "NOPE.yaml"), {}, "NOPE.yaml: there is no such YAML file"),
    "an unknown key": ((), {"reward": "learning_rat: 1\n"}, "learning_rat (--learning-rat) is not a setting"),
    "a wrong value": ((), {"ppo": PPO + "kl_coef: viel\n"}, "--kl-coef"),
    "settings that contradict each other": ((), {"ppo": PPO.replace("nibatch_size: 2", "nibatch_size: 3")}, "--minib"),
    "a batch of more prompts than there are": (
        (), {"ppo": PPO.replace("batch_size: 2", "batch_size: 64")}, "heedful ppo reads its settings from --ppo-config"
    ),
    "no value model": ((), {"ppo": PPO + "critic: separate\nvalue_model: ./没有\n"}, "没有"),
    "no room for answers": (("--max-new-tokens", "100000"), {}, "--max-new-tokens 100000"),
    "no model": (("--policy", "./没有"), {}, "没有"),
    "a judge whose file is missing": (("--judge", "python:没有.py:f"), {}, "没有.py"),
    "a judge that fails": (("--judge", "python:评.py:fails"), {}, "坏了"),
    "a judge that needs a column": (("--judge", "rule:exact_number"), {}, "reward rule:exact_number needs the column answer"),
}  # fmt: skip


JUDGES = """
def fails(completions, **_):
    raise ValueError('坏了')

def works(completions, 难度, **_):
    return [float(one) for one in 难度]
"""


def test_what_would_end_the_round_later(begin, tmp_path, written, monkeypatch):
    """Most of it was found after people had labelled: the first returned 0 and asked for labels."""
    monkeypatch.chdir(tmp_path)
    written("评.py", JUDGES)
    for name, (flags, files, said) in REFUSED.items():
        outcome = begin(*flags, **files)
        assert (outcome.status, said in outcome.message) == (2, True), (name, outcome.err + outcome.out)
        assert "are ready to be labelled" not in outcome.out, name
    works = ("--judge", "python:评.py:works")
    outcome = begin(*works)  # and it was no false alarm: nothing of the refused settings stays
    assert (outcome.status, "6 pairs are ready to be labelled" in outcome.out) == (0, True), outcome.err
    later = begin(*works, "--ppo-config", "NOPE.yaml")  # while people label
    assert (later.status, "NOPE.yaml: there is no such YAML file" in later.message) == (2, True)
    assert "NOPE" not in (tmp_path / "项目" / "rounds" / "1" / "round.json").read_text(encoding="utf-8")


def test_what_is_seen_once_the_pairs_are_chosen(begin):
    """A batch of more labels than there will be is refused before anybody is asked; fewer pairs than --labels are told."""
    flags = ("--labels", "60", "--answers", "2")
    outcome = begin(*flags, reward="batch_size: 320\n")
    assert outcome.status == 2
    assert "in a round, heedful reward reads its settings from --reward-config" in outcome.message
    assert "are ready to be labelled" not in outcome.out
    outcome = begin(*flags)
    assert "pairs are ready to be labelled, fewer than --labels 60; for more in the next round: a higher" in outcome.out


def test_a_disk_without_room(begin, monkeypatch):
    import shutil

    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    outcome = begin()
    assert outcome.status == 3
    assert "ready to be labelled" not in outcome.out


def test_what_an_interval_says():
    assert (verdict((0.501, 0.9)), verdict((0.1, 0.499))) == ("better", "worse")
    unknown = [(0.5, 0.9), (0.499, 0.9), (0.1, 0.501), (0.1, 0.5), (0.0, 1.0), None, (float("nan"), float("nan"))]
    assert {verdict(interval) for interval in unknown} == {"not distinguishable"}
