"""Rewards over HTTP, against real servers on this machine that answer rightly, wrongly, late or not at all."""

import contextlib
import dataclasses
import datetime
import email.utils
import gzip
import itertools
import json
import socket
import threading
import time
from concurrent.futures import CancelledError, Future

import pytest

from heedful import (
    BestOfNConfig,
    ConfigError,
    DataError,
    Message,
    PPOConfig,
    Prompt,
    Reward,
    RewardError,
    ScoresConfig,
    evaluate_best_of_n,
    evaluate_scores,
    faults,
    train_ppo,
)
from heedful.configs.scoring import RewardOptions
from heedful.evaluate.output import report
from heedful.redact import redact
from heedful.retries import Backoff, read_retry_after
from heedful.rewards import Completion, Ensemble, http, score, score_tokens
from heedful.rewards.http import HTTPReward, NoAnswerError
from heedful.rewards.resolve import check_reward_string, load_rewards
from heedful.types import MicroBatch
from refusals import refused


def scores_of(*values):
    return 200, json.dumps({"scores": values}).encode()


def asked(url, completions, **options):
    """Scores of completions by the reward at an address, through the interface that trainers use."""
    return score([Reward(url, HTTPReward(url, **({"first_wait": 0.01} | options)))], completions)[0]


def test_the_request_is_the_documented_one(answering, completions):
    """Raw text and a conversation, Chinese, columns that some records lack; not the policy's token ids."""
    turns = (Message("system", "简短"), Message("user", "你好"))
    chat = Completion(Prompt(turns, "chat.jsonl:7"), "您好！", ids=(5,))
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
            "columns": {"expected": ["2。", "红色", "你好", None], "难度": [1, 2, 3, None], "weights": [1, 2, 3, None]},
        }
    ]
    (path, headers, body), *_ = server.requests
    assert path == "/score"
    assert headers["Content-Type"] == "application/json"
    assert "红色".encode() in body


def test_so_many_responses_a_request(answering, completions):
    """Several at the same time; the scores have the order of the responses, whatever comes first."""

    def answer(count):
        body = server.bodies()[count - 1]
        time.sleep(0.2 * ("等于2。" in body["completions"]))  # the first request is answered last
        return scores_of(*body["columns"]["weights"])

    server = answering(answer)
    assert asked(server.url, completions, micro_batch_size=2) == [1, 2, 3]
    assert sorted(len(body["completions"]) for body in server.bodies()) == [1, 2]
    assert sorted(len(body["columns"]["weights"]) for body in server.bodies()) == [1, 2]


@pytest.mark.parametrize(("options", "most"), [({}, 4), ({"concurrency": 2}, 2)], ids=str)
def test_so_many_requests_at_a_time(answering, completions, options, most):
    """No more, and the first do not wait for each other's answers."""
    lock, inside, seen, all_there = threading.Lock(), [0], [], threading.Event()

    def answer(count):
        with lock:
            inside[0] += 1
            seen.append(inside[0])
            if inside[0] == most:
                all_there.set()
        all_there.wait()
        time.sleep(0.05)  # in which more could come
        with lock:
            inside[0] -= 1
        return scores_of(1)

    server = answering(answer)
    assert asked(server.url, completions * 3, micro_batch_size=1, **options) == [1] * 9
    assert max(seen) == most


def test_the_wait_for_a_turn_is_no_part_of_the_timeout(answering, completions):
    """Six requests of 0.25 s, one after the other, none of which may take 1 s."""
    server = answering(lambda count: time.sleep(0.25) or scores_of(1))
    assert asked(server.url, completions * 2, micro_batch_size=1, concurrency=1, timeout=1) == [1] * 6


def test_null_does_not_apply(answering, completions):
    server = answering(lambda count: scores_of(1, None, 3))
    rewards = [Reward("h", HTTPReward(server.url)), Reward("f", lambda: [0.5, 0.5, 0.5])]
    assert score(rewards, completions) == ([1.5, 0.5, 3.5], {"h": 2.0, "f": 0.5})


def test_a_column_may_have_any_name(answering):
    server = answering(lambda count: scores_of(1))
    assert asked(server.url, [Completion(Prompt("问", "d:1", {"self": "甲", "url": 2}), "答")]) == [1.0]
    assert server.bodies()[0]["columns"] == {"self": ["甲"], "url": [2]}
    for value in (datetime.date(2024, 2, 17), float("nan")):
        with pytest.raises(RewardError, match=r"cannot be written as JSON: .*leave out the column"):
            asked(server.url, [Completion(Prompt("问", "d:1", {"当时": value}), "答")])
    assert len(server.requests) == 1


def test_what_may_pass_is_tried_again(answering, completions):
    bad = [(429, b"slow down"), (500, b""), (408, b""), None]
    server = answering(lambda count: bad[count - 1] if count <= 4 else scores_of(1, 2, 3))
    assert asked(server.url, completions) == [1.0, 2.0, 3.0]
    first, *others = server.bodies()
    assert others == [first] * 4


@pytest.mark.parametrize(
    ("bad", "fragment", "minutes"),
    [((503, "忙".encode()), "status 503: '忙'", 0), (None, "RemoteProtocolError", 0.005)],
    ids=["503", "hangs up"],
)
def test_what_does_not_pass_is_told(answering, completions, bad, fragment, minutes):
    """Never a score of 0: the address, what happened, how often it was tried, and what to change."""
    server = answering(lambda count: bad)
    started = time.monotonic()
    flags = ("--reward-timeout 60", f"--reward-retry-minutes {minutes}", "server running")
    with refused(RewardError, server.url, fragment, *flags) as error:
        asked(server.url, completions, retry_seconds=60 * minutes)
    tries = len(server.requests)
    assert (tries == 1) == (minutes == 0)
    assert time.monotonic() - started >= 60 * minutes
    assert f"tried {tries} time{'s' * (tries > 1)}." in str(error.value)


def test_a_server_that_is_slow(answering, completions):
    """It answers the second time it is asked; without a second time, the flag to raise is named."""
    server = answering(lambda count: scores_of(1, 2, 3) if count == 2 or server.done.wait() else None)
    assert asked(server.url, completions, timeout=1) == [1.0, 2.0, 3.0]
    with pytest.raises(RewardError, match=r"ReadTimeout.*tried 1 time\. .*--reward-timeout 0\.3 "):
        asked(server.url, completions, timeout=0.3, retry_seconds=0)


WRONG = [
    ((400, '{"error": "太长"}'.encode()), ["refused", "status 400", "太长"]),
    ((404, b"not here"), ["refused", "status 404", "not here"]),
    ((200, b"<html>"), ["did not answer in JSON", "<html>", '{"scores": [0.5, null, ...]}']),
    ((200, b"[" * 100_000), ["did not answer in JSON"]),
    ((200, b"[1, 2, 3]"), ["without a list of scores"]),
    ((200, b'{"scores": 1}'), ["without a list of scores"]),
    ((200, b'{"scores": [1, 2]}'), ["2 scores for 3 responses"]),
    ((200, b'{"scores": [1, NaN, 3]}'), ["the score nan", "finite number"]),
    ((200, b'{"scores": [1, 1e999, 3]}'), ["the score inf"]),
    ((200, b'{"scores": [1, 1' + b"0" * 400 + b", 3]}"), ["the score 1000"]),
    ((200, b'{"scores": [1, "2", 3]}'), ["the score '2'"]),
    ((200, b'{"scores": [1, true, 3]}'), ["the score True"]),
    ((200, json.dumps({"scores": [1, "s" * 74 + "geheim-42", 3]}).encode()), ["answered with the score"]),
]


def test_a_wrong_answer_is_an_error_at_once(answering, completions):
    """To ask again would be answered the same. A token in the place of a score is not shown."""
    server = answering(lambda count: WRONG[count - 1][0])
    for tries, (_, fragments) in enumerate(WRONG, start=1):
        with refused(RewardError, server.url, *fragments) as error:
            asked(server.url, completions, token="geheim-42")
        assert "gehe" not in str(error.value)
        assert len(server.requests) == tries


def test_the_waits_double_with_jitter():
    """Between half and all of 0.04, 0.08, 0.16, ... seconds; those that are told to wait do not all come back at once."""

    def wait(tries, first=0.04, **asked):
        return Backoff(lambda: 600.0, first=first).wait(Tried(tries, **asked))

    for i in range(5):
        assert 0.02 * 2**i <= wait(i + 1) <= 0.04 * 2**i
    draws = [wait(5) for _ in range(8)]
    assert max(draws) - min(draws) > 0.01
    draws = [wait(1, first=0.8, retry_after=1.0) for _ in range(20)]
    assert all(1.0 <= draw <= 1.4 for draw in draws)
    assert max(draws) - min(draws) > 0.1


class Tried:
    """What a tries' state shows of itself: how many tries there were, and what the last answer asked for."""

    def __init__(self, attempt_number, retry_after=None):
        self.attempt_number, self.seconds_since_start = attempt_number, 0.0
        self.outcome = Future()
        self.outcome.set_exception(NoAnswerError("", retry_after))


def test_the_settings_reach_the_request(answering, completions, cpu, monkeypatch):
    """Each of them would be noticed if it were ignored."""
    server = answering(lambda count: (500, b"") if count < 3 else server.done.wait() or None)
    monkeypatch.setenv("HEEDFUL_REWARD_TOKEN", "geheim")
    options = RewardOptions(reward_retry_minutes=0, reward_timeout=0.75, reward_concurrency=1)
    rewards = load_rewards([server.url], options, micro_batch=MicroBatch(2), **cpu)
    for count, fragment in ((1, "tried 1 time."), (2, "--reward-timeout 0.75 "), (3, "ReadTimeout")):
        with pytest.raises(RewardError, match=fragment):
            score(rewards, completions)
        assert len(server.requests) == count
    assert len(server.bodies()[0]["completions"]) == 2
    assert server.requests[0][1]["Authorization"] == "Bearer geheim"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward_timeout": 5.0}, "python: functions, rule:regex and verify:math, and there is none; leave it out, or name"),
        ({"reward_concurrency": 2}, "rewards over http and judges, and there is none; leave it out, or name one"),
        ({"reward_retry_minutes": 0.0}, "rewards over http and judges, and there is none; leave it out, or name one"),
        ({"reward_memory_gb": 1.0}, "python: functions, rule:regex and verify:math, and there is none"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_settings_without_what_they_are_about_are_refused(tiny, tmp_path, changes, said):
    """By training and by what evaluates, before anything is loaded; a judge over http is one too."""
    flag = "--" + next(iter(changes)).replace("_", "-")
    common = {"model": tiny("gpt2"), "data": "none.jsonl", **changes}
    run, rewards = {**common, "output": tmp_path / "run"}, ("rule:digits", "rule:json")
    judged = BestOfNConfig(**common, rewards=rewards, judge=("rule:repetition",))
    for call in (
        lambda: train_ppo(PPOConfig(**run, rewards=rewards)),
        lambda: evaluate_scores(ScoresConfig(**common, rewards=rewards)),
        lambda: evaluate_best_of_n(judged),
    ):
        with pytest.raises(ConfigError, match=rf"^{flag} \S+ is about .*{said}"):
            call()
    here = "rule:regex:a" if flag == "--reward-memory-gb" else "http://127.0.0.1:1/score"
    for begins in (
        lambda: train_ppo(PPOConfig(**run, rewards=rewards, selection_rewards=(here,))),
        lambda: train_ppo(PPOConfig(**run), rewards=[here]),
        lambda: evaluate_best_of_n(dataclasses.replace(judged, judge=(here,))),
    ):
        with pytest.raises(DataError, match=r"none\.jsonl"):
            begins()


@pytest.mark.parametrize("value", ["a b", "密"])
def test_a_token_that_cannot_be_sent(tiny, tmp_path, monkeypatch, value):
    monkeypatch.setenv("HEEDFUL_REWARD_TOKEN", value)
    config = PPOConfig(
        model=tiny("gpt2"), data="none.jsonl", output=tmp_path / "run", rewards=("http://127.0.0.1:1/score",)
    )
    with pytest.raises(ConfigError, match="HEEDFUL_REWARD_TOKEN contains other characters than visible ASCII") as error:
        train_ppo(config)
    assert value not in str(error.value)


def test_retry_after_is_heeded(answering, completions):
    """A number of seconds, or a date; a past one, or one that nobody can read, asks for nothing."""
    times = []

    def answer(count):
        times.append(time.monotonic())
        return (429, b"", {"Retry-After": "1"}) if count == 1 else scores_of(1, 2, 3)

    assert asked(answering(answer).url, completions) == [1.0, 2.0, 3.0]
    assert times[1] - times[0] >= 0.9
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=20)
    assert 15 < read_retry_after(email.utils.format_datetime(soon, usegmt=True)) <= 20
    assert read_retry_after("Sat, 01 Jan 2000 00:00:00 GMT") == 0
    assert (read_retry_after("soon"), read_retry_after(None)) == (None, None)


def test_a_busy_server_that_asks_for_no_wait_is_not_flooded(answering, completions):
    """Each of 8 requests comes back after at least half of 0.04, 0.08 and 0.16 seconds, not at once."""
    tries = {}

    def answer(count):
        (prompt,) = server.bodies()[count - 1]["prompts"]
        tries.setdefault(prompt, []).append(time.monotonic())
        return scores_of(1) if len(tries[prompt]) == 4 else (429, b"", {"Retry-After": "0"})

    server = answering(answer)
    options = {"first_wait": 0.04, "micro_batch_size": 1, "concurrency": 8}
    asking = [Completion(Prompt(f"第{i}问", "d:1", {}), "答") for i in range(8)]
    assert asked(server.url, asking, **options) == [1.0] * 8
    assert len(tries) == 8
    for times in tries.values():
        assert all(after - before >= 0.02 * 2**i for i, (before, after) in enumerate(itertools.pairwise(times)))


def test_a_server_that_asks_for_more_time_than_there_is(answering, completions):
    """Nothing is gained by waiting out the rest."""
    server = answering(lambda count: (503, b"", {"Retry-After": "3600"}))
    with pytest.raises(
        RewardError, match=r"tried 1 time\..* wait for 3600 s \(Retry-After\).*--reward-retry-minutes 10"
    ):
        asked(server.url, completions)


def raw_server(respond):
    """A server that sends what ``respond`` yields, header included, byte for byte; returns its address and how to stop it."""
    listening, stop = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def serve():
        with contextlib.suppress(OSError):
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                for piece in filter(None, respond()):
                    connection.sendall(piece)
                    if stop.wait(0.05):
                        return

    thread = threading.Thread(target=serve)
    thread.start()

    def end():
        stop.set()
        thread.join()
        listening.close()

    return f"http://127.0.0.1:{listening.getsockname()[1]}/score", end


@pytest.mark.parametrize(
    ("begins", "endless"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"X-Header: 1\r\n"),
        (b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", b" "),
    ],
    ids=["headers", "interim answers", "an answer that trickles"],
)
def test_what_comes_before_the_answer_counts_as_well(completions, begins, endless):
    """Headers one by one, 1xx answers without end, bytes of the answer: each in time, and together more than it may take."""
    url, end = raw_server(lambda: (begins, *[endless] * 400))
    try:
        with pytest.raises(RewardError, match="ReadTimeout: the answer was not complete in time; tried 1 time"):
            asked(url, completions, timeout=0.3, retry_seconds=0)
    finally:
        end()


def test_an_answer_without_end(answering, completions):
    """It is read up to a limit. A compressed one, whose size says nothing, is not asked for and not read."""
    server = answering(lambda count: (200, b'{"scores": [' + b"1," * http.MOST_BYTES))
    with pytest.raises(RewardError, match=f"answered with more than {http.MOST_BYTES} bytes"):
        asked(server.url, completions)
    bomb = gzip.compress(b" " * 100_000_000)
    compressed = answering(lambda count: (200, bomb, {"Content-Encoding": "gzip"}))
    with pytest.raises(RewardError, match="compressed body, which was not requested"):
        asked(compressed.url, completions)
    assert [s.requests[0][1]["Accept-Encoding"] for s in (server, compressed)] == ["identity", "identity"]


@pytest.mark.parametrize("away", [0.7, pytest.param(60.0, marks=pytest.mark.exhaustive)])
def test_a_server_that_dies_and_returns(answering, completions, away):
    server = answering(lambda count: scores_of(1, 2, 3))
    reward = Reward("h", HTTPReward(server.url))
    assert score([reward], completions)[0] == [1.0, 2.0, 3.0]
    server.close()
    back = threading.Timer(away, lambda: answering(lambda count: scores_of(4, 5, 6), port=server.port))
    back.start()
    assert score([reward], completions)[0] == [4.0, 5.0, 6.0]
    back.join()


def test_a_call_that_was_stopped_is_not_made_again_in_parts(answering, completions):
    stopped = threading.Event()
    server = answering(lambda count: stopped.wait() and scores_of(1))
    reward = HTTPReward(server.url)

    def stop():
        while not server.requests:
            time.sleep(0.01)
        reward.stop()

    threading.Thread(target=stop).start()
    with pytest.raises(CancelledError):
        score([Reward("h", reward)], completions)
    stopped.set()
    assert len(server.requests) == 1


def test_a_server_that_is_there_and_busy_is_waited_for(answering, completions, monkeypatch):
    """Its address is right, though it has never answered. A wrong address is told before the run, and soon."""
    monkeypatch.setattr(http, "LONGEST_FIRST", 0.1)
    busy = [(408, b""), (503, b""), (503, b"")]
    server = answering(lambda count: busy[count - 1] if count < 4 else scores_of(1, 2, 3))
    assert asked(server.url, completions, first_wait=0.1) == [1.0, 2.0, 3.0]
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}/score"
    for url in (nobody, answering(lambda count: (500, b"")).url):
        with pytest.raises(RewardError, match=r"It has never answered, so it was tried for 0\.1 s only") as error:
            asked(url, completions, first_wait=0.1)
        assert error.value.status == 2


def test_a_run_that_goes_on_waits_for_a_server_that_is_away(answering, tiny, written, tmp_path, monkeypatch):
    """Its address is right: it began with its answers. If it stays away, the exit status is that of a run that can go on."""
    prompts = written("prompts.jsonl", [{"prompt": text} for text in ("ab", "cd", "ef", "gh")])
    sizes = {"steps": 2, "rollout_batch_size": 4, "minibatch_size": 4, "max_new_tokens": 4, "sample_every": 0}

    def run(url=None, **changes):
        settings = {"model": tiny("gpt2"), "data": prompts, "output": tmp_path / "run", "eval_fraction": 0.0} | sizes
        return train_ppo(PPOConfig(**settings, rewards=(url or server.url,), **changes))

    def answer(count):
        return scores_of(*range(len(asked_now.bodies()[count - 1]["completions"])))

    def again():
        nonlocal asked_now
        asked_now = answering(answer, port=server.port)

    server = asked_now = answering(answer)
    faults.plan("step.logged:raise@2")
    with pytest.raises(RuntimeError, match="a fault point"):
        run()
    faults.plan("")
    server.close()
    monkeypatch.setattr(http, "LONGEST_FIRST", 0.05)
    with pytest.raises(RewardError, match=r"gave no scores: .*--reward-retry-minutes 0\.01$") as away:
        run(reward_retry_minutes=0.01)
    assert away.value.status == 4
    assert "never answered" not in str(away.value)
    with pytest.raises(RewardError, match=r"has never answered, so it was tried for 0\.05 s only") as wrong:
        run(server.url + "r", allow_change=("rewards",))
    assert wrong.value.status == 2, "another address may be a mistake"
    back = threading.Timer(0.3, again)
    back.start()
    assert run(reward_retry_minutes=5)["steps"] == 2
    back.join()


def test_the_query_of_an_address_is_shown_nowhere(answering, completions, cpu):
    """It may hold a password; the server gets it."""
    server = answering(lambda count: (500, b"") if count > 1 else scores_of(1, 2, 3))
    url = f"{server.url}?token=GEHEIM"
    rewards = load_rewards([url, url], RewardOptions(reward_retry_minutes=0), micro_batch=MicroBatch(4), **cpu)
    assert [reward.name for reward in rewards] == [f"{server.url}?token=***", f"{server.url}?token=***#2"]
    assert score(rewards[:1], completions)[1] == {f"{server.url}?token=***": 2.0}
    assert server.requests[0][0] == "/score?token=GEHEIM"
    with refused(RewardError, f"{server.url}?token=***") as error:
        score(rewards, completions)
    assert "GEHEIM" not in str(error.value)
    for broken in ("http://host:port/x?token=GEHEIM", "http:?token=GEHEIM", "https:///x?token=GEHEIM"):
        with refused(ConfigError, "--rewards") as error:
            check_reward_string(broken)
        assert "GEHEIM" not in str(error.value)
    shown = f"- {server.url}?token=***\n- 'http://a/b#***' model:x?y"
    assert redact(f"- {url}\n- 'http://a/b#GEHEIM' model:x?y") == shown


def test_no_query_is_written_down_by_a_measurement(tmp_path, capsys):
    url = "http://127.0.0.1:1/score?token=GEHEIM"
    settings = {"model": "m", "data": "d.jsonl", "output": tmp_path / "r.json", "rewards": (url, "rule:regex:x?y")}
    report({"score_mean": 1.0}, ScoresConfig(**settings))
    written = (tmp_path / "r.json").read_text(encoding="utf-8")
    assert json.loads(written)["settings"]["rewards"] == ["http://127.0.0.1:1/score?token=***", "rule:regex:x?y"]
    assert "GEHEIM" not in written + capsys.readouterr().out
    with pytest.raises(ConfigError, match="--selection-rewards") as error:
        PPOConfig(model="m", data="d.jsonl", output=tmp_path, rewards=(url,), selection_rewards=(url,))
    assert "GEHEIM" not in str(error.value)


def test_a_score_that_is_no_number_fails_alone(answering, completions):
    server = answering(lambda count: (200, b'{"scores": [1, NaN, 3]}'))
    rewards = Ensemble((Reward("h", HTTPReward(server.url)),), max_failed=0.5)
    found = score_tokens(rewards, completions)
    assert (found.failed, found.without_failed().totals, found.means) == ((1,), [1.0, 3.0], {"h": 2.0})
    assert "answered with the score nan" in found.note
    assert len(server.requests) == 1  # a judge that may cost money is not asked again


def test_no_proxy_stands_before_this_machine(answering, completions, monkeypatch):
    """A proxy cannot reach it; the environment's NO_PROXY is often not set."""
    proxy = answering(lambda count: (502, b"proxy"))
    server = answering(lambda count: scores_of(1, 2, 3))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for host in ("127.0.0.1", "localhost"):
        assert asked(server.url.replace("127.0.0.1", host), completions) == [1.0, 2.0, 3.0]
    assert proxy.requests == []


def test_other_machines_are_asked_through_the_proxy(answering, completions, monkeypatch):
    proxy = answering(lambda count: scores_of(1, 2, 3))
    for name in ("NO_PROXY", "no_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
    assert asked("http://reward.example/score", completions) == [1.0, 2.0, 3.0]
    assert proxy.requests[0][0] == "http://reward.example/score"


def test_what_is_no_address():
    for url, fragment in (
        ("http://", "has no host"),
        ("http://host:port/x", "is not an address"),
        ("http://[::1/x", "is not an address"),
        ("http://me:secret@host/x", "holds a user or password"),
    ):
        with refused(ConfigError, "--rewards", fragment) as error:
            check_reward_string(url)
        assert "secret" not in str(error.value)
