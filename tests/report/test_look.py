"""heedful look: tokens above their numbers, in the width that there is; without colour nothing is lost."""

import re

import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len

from logged_runs import BROKEN, GAME, NASTY, PLAYED, UNBEGUN


@pytest.fixture
def look(heedful, monkeypatch):
    """``look(run, *flags, width=80)`` is what is printed."""

    def printed(run, *flags, width=80):
        monkeypatch.setenv("COLUMNS", str(width))
        outcome = heedful("look", str(run), *flags)
        assert outcome.status == 0, outcome.err
        return outcome.out

    return printed


def test_every_number_of_a_row(log_run, look):
    run = log_run()
    said = look(run, "--step", "2", "--row", "1")
    row = pq.read_table(run / "rollouts" / "step-000002.parquet").to_pylist()[1]
    assert "row 1 · score +10.00 · KL +0.40 · 5 tokens · ended" in said
    table = [line.split() for line in said.splitlines() if re.match(r" +\d+  ", line)]
    assert [line[1] for line in table] == list("hello")
    for place, name in {
        2: "advantages",
        3: "log_ratio",
        5: "token_rewards",
        6: "values",
        7: "returns",
        8: "entropy",
    }.items():
        assert [line[place] for line in table] == [shown(number) for number in row[name]]
    kl = [a - b for a, b in zip(row["old_logprobs"], row["ref_logprobs"], strict=True)]
    assert [line[4] for line in table] == [shown(number) for number in kl]


def test_a_run_without_advantages_is_coloured_by_what_it_has(log_run, look):
    """Such as runs of online DPO and of earlier versions."""
    run = log_run(steps=1, columns=False)
    assert "coloured by log-prob" in look(run)
    assert "coloured by advantage" in look(log_run("ppo", steps=1))


def test_a_response_without_tokens(log_run, look):
    said = look(log_run(steps=1, responses=[("q", ""), ("q", "a")]), "--row", "0")
    assert "0 tokens" in said


def shown(number):
    return f"{number:+.2f}" if abs(number) >= 0.01 else f"{number:+.0e}"


def test_the_largest_numbers_come_first(log_run, look):
    run = log_run(steps=1, responses=[(f"q{i}", f"answer {i}") for i in range(6)])
    rows = pq.read_table(run / "rollouts" / "step-000001.parquet").to_pylist()
    order = sorted(range(6), key=lambda row: -max(map(abs, rows[row]["entropy"])))
    said = look(run, "--by", "entropy", "--count", "4")
    assert [int(row) for row in re.findall(r"^row (\d)", said, re.MULTILINE)] == order[:4]
    assert "4 of 6 responses; coloured by entropy" in said


@pytest.mark.parametrize("width", [30, 100])
def test_lines_fit_the_width(log_run, look, width):
    """Chinese characters take two columns; numbers stand below their tokens."""
    said = look(log_run(steps=1, responses=[("问", "天地玄黄，宇宙洪荒。" * 4)]), width=width)
    body = said.split("问\n")[1].splitlines()
    assert max(map(cell_len, body)) <= width
    assert "".join(line for line in body[::2]).replace(" ", "").replace("‥", "") == "天地玄黄，宇宙洪荒。" * 4
    assert len(re.findall(r"[+-]\d", said.split("问\n")[1])) == 120, "a number per token, three tokens per character"


@pytest.mark.parametrize("action", ["turn", "token"])
def test_an_episode_is_shown_in_turns(log_run, look, action):
    """Tokens with their numbers, then the reward, calls, and what the other one said, which has none."""
    run = log_run(steps=1, responses=PLAYED, episodes=[GAME, BROKEN, UNBEGUN], settings={"action": action})
    row = pq.read_table(run / "rollouts" / "step-000001.parquet").to_pylist()[0]
    said = look(run, "--count", "3")
    assert "row 0 · score +5.00 · KL +0.10 · 13 tokens · 3 turns · cut by --max-turns" in said
    _, head, first, numbers, reward, call, *others = said[said.index("row 0") :].splitlines()[1:9]
    named = {"advantage": "advantages", "value": "values", "return": "returns"} if action == "turn" else {}
    assert head == " · ".join(["turn 1", *(f"{name} {shown(row[column][0])}" for name, column in named.items())])
    assert first.split() == ["‥", "‥", "猜", "␣"]
    assert numbers.split() == [shown(number) for number in row["advantages"][:4]]
    assert [reward, call] == ["reward -0.10", 'calls guess({"word": "苹果"})']
    assert others == ["  │ tool guess: {'no': 1}", "  │ <b>再来</b>"]
    assert re.search(r"turn 3.*\n‥ +‥ +好\n.*\nreward \+7\.00\n\n", said)
    assert "3 tokens · 1 turn · failed" in said
    assert "The environment Guess raised RuntimeError: 坏了" in said
    assert "0 tokens · failed\n猜词\nThe environment Guess raised RuntimeError: 没有" in said, "the policy said nothing"
    assert re.findall(r"^turn .*$", look(run, "--row", "0"), re.MULTILINE)[3:] == ["turn 1", "turn 2", "turn 3"]


def test_what_a_terminal_would_obey_is_shown_as_a_code(log_run, look):
    said = look(log_run(steps=1, responses=[(text, text) for text in NASTY]), "--count", "9")
    assert not re.search("[\x1b\x07\u202e\u2066]", said)
    assert r"\x1b[31m" in said
