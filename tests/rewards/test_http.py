"""Rewards over HTTP, against real servers on this machine that answer rightly, wrongly, late or not at all."""

import datetime
import json
import socket

import pytest

from heedful.configs.evaluate import BestOfNConfig, ScoresConfig
from heedful.configs.ppo import PPOConfig
from heedful.configs.scoring import RewardOptions
from heedful.errors import ConfigError, DataError, RewardError
from heedful.evaluate.policies import evaluate_best_of_n, evaluate_scores
from heedful.rewards import Completion, Reward, http, score
from heedful.rewards.http import HTTPReward
from heedful.rewards.resolve import check_reward_string, load_rewards
from heedful.train.online.engine import train_ppo
from heedful.types import MicroBatch, Prompt


def scores_of(*values):
    return 200, json.dumps({"scores": values}).encode()


def asked(url, completions, **options):
    """Scores of completions by the reward at an address, through the interface that trainers use."""
    return score([Reward(url, HTTPReward(url, **({"first_wait": 0.0} | options)))], completions)[0]


def test_the_request_is_the_documented_one(answering, completions, chat):
    """Raw text and a conversation, Chinese, columns that some records lack; not the policy's token ids."""
    server = answering(lambda count: scores_of(1.5, -2, 0.25, 1e-3))
    assert asked(server.url, [*completions, chat]) == [1.5, -2.0, 0.25, 1e-3]
    assert server.bodies() == [
        {
            "prompts": [
                "一加一等于几？",
                "苹果是什么颜色？",
                "say hi",
                [{"role": "system", "content": "简短"}, {"role": "user", "content": "你好"}],
            ],
            "completions": ["等于2。", "红色", "你好", [{"role": "assistant", "content": "您好！"}]],
            "truncated": [False, False, True, False],
            "columns": {
                "expected": ["2。", "红色", "你好", None],
                "难度": [1, 2, 3, None],
                "weights": [1, 2, 3, None],
            },
        }
    ]
    (path, headers, body), *_ = server.requests
    assert path == "/score"
    assert headers["Content-Type"] == "application/json"
    assert "红色".encode() in body


@pytest.mark.parametrize(("size", "expected"), [(1, [1, 1, 1]), (2, [2, 1]), (3, [3]), (64, [3])])
def test_so_many_responses_a_request(answering, completions, size, expected):
    server = answering(lambda count: scores_of(*range(10 * count, 10 * count + expected[count - 1])))
    scores = asked(server.url, completions, micro_batch_size=size)
    assert [len(body["completions"]) for body in server.bodies()] == expected
    assert [len(body["columns"]["weights"]) for body in server.bodies()] == expected
    assert scores == [10 * r + i for r, n in enumerate(expected, 1) for i in range(n)]


def test_null_does_not_apply(answering, completions):
    server = answering(lambda count: scores_of(1, None, 3))
    rewards = [Reward("h", HTTPReward(server.url)), Reward("f", lambda: [0.5, 0.5, 0.5])]
    assert score(rewards, completions) == ([1.5, 0.5, 3.5], {"h": 2.0, "f": 0.5})


def test_a_column_may_have_any_name(answering):
    server = answering(lambda count: scores_of(1))
    assert asked(server.url, [Completion(Prompt("问", "d:1", {"self": "甲", "url": 2}), "答")]) == [1.0]
    assert server.bodies()[0]["columns"] == {"self": ["甲"], "url": [2]}


@pytest.mark.parametrize(
    "bad",
    [(429, b"slow down"), (500, b""), (502, b""), (503, "忙".encode()), (504, b""), None],
    ids=lambda bad: str(bad and bad[0]),
)
def test_what_may_pass_is_tried_again(answering, completions, bad):
    server = answering(lambda count: bad if count <= 2 else scores_of(1, 2, 3))
    assert asked(server.url, completions, retries=2) == [1.0, 2.0, 3.0]
    bodies = server.bodies()
    assert len(bodies) == 3
    assert bodies[0] == bodies[1] == bodies[2]


@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize(
    ("bad", "fragment"),
    [
        ((503, "忙".encode()), "status 503: '忙'"),
        ((429, b"later"), "status 429: 'later'"),
        (None, "RemoteProtocolError"),
    ],
    ids=["503", "429", "hangs up"],
)
def test_what_does_not_pass_is_told(answering, completions, bad, fragment, retries):
    """Never a score of 0: the address, what happened, how often it was tried, and what to change."""
    server = answering(lambda count: bad)
    with pytest.raises(RewardError) as error:
        asked(server.url, completions, retries=retries)
    tried = f"tried {retries + 1} time{'s' * (retries > 0)}."
    for part in (server.url, fragment, tried, "--reward-timeout 60", f"--reward-retries {retries}", "server running"):
        assert part in str(error.value)
    assert len(server.requests) == retries + 1


def test_a_server_that_is_down(completions):
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/score"
    with pytest.raises(RewardError, match=rf"reward {url} gave no scores: ConnectError.*tried 3 times"):
        asked(url, completions, retries=2)


def test_a_server_that_is_slow(answering, completions):
    """It answers the second time it is asked; without a second time, the flag to raise is named."""
    server = answering(lambda count: scores_of(1, 2, 3) if count == 2 or server.done.wait(30) else None)
    assert asked(server.url, completions, timeout=0.3, retries=1) == [1.0, 2.0, 3.0]
    with pytest.raises(RewardError, match=r"ReadTimeout.*tried 1 time\. .*--reward-timeout 0\.3 "):
        asked(server.url, completions, timeout=0.3, retries=0)


def test_a_server_that_trickles(answering, completions):
    """Each byte comes in time, and still the answer as a whole does not."""
    server = answering(lambda count: (200, [b" "] * 200))
    with pytest.raises(RewardError, match="ReadTimeout: the answer was not complete in time; tried 1 time"):
        asked(server.url, completions, timeout=0.3, retries=0)


@pytest.mark.parametrize(
    ("answer", "fragments"),
    [
        ((400, '{"error": "太长"}'.encode()), ["refused", "status 400", "太长"]),
        ((404, b"not here"), ["refused", "status 404", "not here"]),
        ((307, b""), ["refused", "status 307"]),
        ((200, b"<html>"), ["did not answer in JSON", "<html>", '{"scores": [0.5, null, ...]}']),
        ((200, b"\xff\xfe"), ["did not answer in JSON"]),
        ((200, b"[" * 100_000), ["did not answer in JSON"]),
        ((200, b""), ["did not answer in JSON"]),
        ((200, b"[1, 2, 3]"), ["without a list of scores"]),
        ((200, b'{"score": [1, 2, 3]}'), ["without a list of scores", '"score"']),
        ((200, b'{"scores": 1}'), ["without a list of scores"]),
        ((200, b'{"scores": [1, 2]}'), ["2 scores for 3 responses"]),
        ((200, b'{"scores": [1, 2, 3, 4]}'), ["4 scores for 3 responses"]),
        ((200, b'{"scores": [1, NaN, 3]}'), ["the score nan", "finite number"]),
        ((200, b'{"scores": [1, Infinity, 3]}'), ["the score inf"]),
        ((200, b'{"scores": [1, 1e999, 3]}'), ["the score inf"]),
        ((200, b'{"scores": [1, 1' + b"0" * 400 + b", 3]}"), ["the score 1000"]),
        ((200, b'{"scores": [1, "2", 3]}'), ["the score '2'"]),
        ((200, b'{"scores": [1, true, 3]}'), ["the score True"]),
        ((200, b'{"scores": [1, [2], 3]}'), ["the score [2]"]),
    ],
    ids=lambda x: f"{x[0]} {x[1][:30]!r}" if isinstance(x, tuple) else "",
)  # fmt: skip
def test_a_wrong_answer_is_an_error_at_once(answering, completions, answer, fragments):
    """To ask again would be answered the same."""
    server = answering(lambda count: answer)
    with pytest.raises(RewardError) as error:
        asked(server.url, completions)
    for fragment in (server.url, *fragments):
        assert fragment in str(error.value)
    assert len(server.requests) == 1


def test_the_waits_double_up_to_half_a_minute(answering, completions, monkeypatch):
    waits = []
    monkeypatch.setattr(http.time, "sleep", waits.append)
    with pytest.raises(RewardError, match="tried 9 times"):
        asked(answering(lambda count: (500, b"")).url, completions, retries=8, first_wait=0.5)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_the_settings_reach_the_request(answering, completions, cpu):
    """Each of the three would be noticed if it were ignored."""
    server = answering(lambda count: (500, b"") if count < 3 else server.done.wait(30) or None)
    options = RewardOptions(reward_retries=0, reward_timeout=0.25)
    rewards = load_rewards([server.url], options, micro_batch=MicroBatch(2), **cpu)
    for count, fragment in ((1, "tried 1 time."), (2, "--reward-timeout 0.25 "), (3, "ReadTimeout")):
        with pytest.raises(RewardError, match=fragment):
            score(rewards, completions)
        assert len(server.requests) == count
    assert len(server.bodies()[0]["completions"]) == 2


@pytest.mark.parametrize("changes", [{"reward_timeout": 5.0}, {"reward_retries": 0}])
def test_settings_of_requests_without_a_request_are_refused(tiny, tmp_path, changes):
    """By training and by what evaluates, before anything is loaded; a judge over http is one too."""
    flag = "--" + next(iter(changes)).replace("_", "-")
    said = rf"^{flag} \S+ is about rewards over http, and there is none; leave it out, or name one"
    common = {"model": tiny("gpt2"), "data": "none.jsonl", **changes}
    for rewards in (("rule:digits",), ("rule:digits", "rule:json")):
        with pytest.raises(ConfigError, match=said):
            train_ppo(PPOConfig(**common, output=tmp_path / "run", rewards=rewards))
        with pytest.raises(ConfigError, match=said):
            evaluate_scores(ScoresConfig(**common, rewards=rewards))
        with pytest.raises(ConfigError, match=said):
            evaluate_best_of_n(BestOfNConfig(**common, rewards=rewards, judge=("rule:repetition",)))
    here = "http://127.0.0.1:1/score"
    with pytest.raises(DataError, match=r"none\.jsonl"):
        train_ppo(PPOConfig(**common, output=tmp_path / "run", rewards=("rule:digits",), best_by=(here,)))
    with pytest.raises(DataError, match=r"none\.jsonl"):
        train_ppo(PPOConfig(**common, output=tmp_path / "run"), rewards=[here])
    with pytest.raises(DataError, match=r"none\.jsonl"):
        evaluate_best_of_n(BestOfNConfig(**common, rewards=("rule:digits",), judge=(here,)))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_no_proxy_stands_before_this_machine(answering, completions, monkeypatch, host):
    """A proxy cannot reach it; the environment's NO_PROXY is often not set."""
    proxy = answering(lambda count: (502, b"proxy"))
    server = answering(lambda count: scores_of(1, 2, 3))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert asked(server.url.replace("127.0.0.1", host), completions) == [1.0, 2.0, 3.0]
    assert proxy.requests == []


def test_other_machines_are_asked_through_the_proxy(answering, completions, monkeypatch):
    proxy = answering(lambda count: scores_of(1, 2, 3))
    for name in ("NO_PROXY", "no_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
    assert asked("http://reward.example/score", completions) == [1.0, 2.0, 3.0]
    assert proxy.requests[0][0] == "http://reward.example/score"


@pytest.mark.parametrize("value", [datetime.date(2024, 2, 17), b"x", float("nan"), {1, 2}], ids=repr)
def test_a_column_that_json_cannot_hold(answering, value):
    server = answering(lambda count: scores_of(1))
    with pytest.raises(RewardError, match=r"cannot be written as JSON: .*leave out the column"):
        asked(server.url, [Completion(Prompt("问", "d:1", {"当时": value}), "答")])
    assert server.requests == []


@pytest.mark.parametrize(
    ("url", "fragment"),
    [
        ("http://", "has no host"),
        ("http:score", "has no host"),
        ("https:///score", "has no host"),
        ("http://host:99999/x", "is not an address"),
        ("http://host:port/x", "is not an address"),
        ("http://[::1/x", "is not an address"),
        ("http://me:secret@host/x", "holds a user or password"),
    ],
)
def test_what_is_no_address(url, fragment):
    with pytest.raises(ConfigError) as error:
        check_reward_string(url)
    assert "--rewards" in str(error.value)
    assert fragment in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "url", ["http://host/x", "https://host", "http://127.0.0.1:8001/score", "http://[::1]:80/评分"]
)
def test_what_is_an_address(url):
    check_reward_string(url)
