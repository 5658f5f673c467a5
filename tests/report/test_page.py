"""The page of heedful report: what is on it is what the run logged, nothing of it is markup, and it needs no network."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import numpy as np
import pyarrow.parquet as pq
import pytest

from heedful import plot
from heedful.algorithms.online.rollout_files import OF_TOKENS
from heedful.apps.report.inspector import inspect
from heedful.apps.report.page import LARGEST_PAGE
from heedful.training.alarms import ALARMS
from logged_runs import BROKEN, GAME, NASTY, PLAYED, UNBEGUN, episode, unpacked


class Elements(HTMLParser):
    """Every element and attribute of a page, and what scripts hold."""

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.scripts, self.inside = [], [], [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.inside = tag

    def handle_endtag(self, _):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts.append(data)


@pytest.fixture
def report(heedful, tmp_path):
    """``report(run, ..., **flags)`` is the page."""

    def make(*runs, **flags):
        output = tmp_path / "页.html"
        outcome = heedful("report", *map(str, runs), output=output, **flags)
        assert outcome.status == 0, outcome.err
        page = output.read_text(encoding="utf-8")
        assert len(page.encode()) <= LARGEST_PAGE
        return page

    return make


def words_of(page):
    return " ".join(re.sub(r"<[^>]*>", " ", page.split("<main>")[1].split("</main>")[0]).split())


def test_every_number_of_every_token_is_on_the_page(log_run, report):
    run = log_run()
    header, texts, columns = unpacked(report(run))
    rows = [row for path in sorted((run / "rollouts").iterdir()) for row in pq.read_table(path).to_pylist()]
    assert [(entry[1], entry[2]) for entry in header["responses"]] == [(s, r) for s in (1, 2, 3) for r in (0, 1)]
    assert [header["prompts"][entry[3]] for entry in header["responses"]] == [row["prompt"] for row in rows]
    assert [entry[-1] for entry in header["responses"]] == [row["response_ids"] for row in rows]
    assert "四" in texts, "a character of three tokens is shown whole"
    exact = {column: np.concatenate([row[column] for row in rows]) for column in OF_TOKENS}
    exact["KL"] = exact["old_logprobs"] - exact["ref_logprobs"]
    named = {
        "advantage": "advantages",
        "log-ratio": "log_ratio",
        "KL": "KL",
        "reward": "token_rewards",
        "value": "values",
    }
    named |= {"return": "returns", "entropy": "entropy", "log-prob": "old_logprobs"}
    assert list(columns) == list(named)
    for name, column in named.items():
        np.testing.assert_allclose(columns[name], exact[column], rtol=5e-4, atol=1e-6)  # float16 times a power of two


@pytest.mark.parametrize("action", ["turn", "token"])
def test_the_turns_of_episodes_are_on_the_page(log_run, report, action):
    run = log_run(steps=1, responses=PLAYED, episodes=[GAME, BROKEN, UNBEGUN], settings={"action": action})
    header, _, _ = unpacked(report(run))
    game, broken, unbegun = ((entry[7], *entry[-3:]) for entry in header["responses"])
    row = pq.read_table(run / "rollouts" / "step-000001.parquet").to_pylist()[0]
    named = {"advantage": "advantages", "value": "values", "return": "returns"} if action == "turn" else {}
    numbers = [{name: row[column][start] for name, column in named.items()} for start in (0, 4, 10)]
    others = [[["tool guess", "{'no': 1}\n<b>再来</b>"]], [["user", "对"]], []]
    calls = [['guess({"word": "苹果"})'], [], []]
    turns = zip([4, 10, 13], [-0.1, 0.25, 7.0], numbers, calls, others, strict=True)
    assert game == ("turns", "", [list(turn) for turn in turns], row["response_ids"])
    assert broken[:2] == ("failed", "Guess raised RuntimeError: 坏了")
    assert unbegun == ("failed", "Guess raised RuntimeError: 没有", [], []), "no token that only fills the place"


def test_a_long_answer_of_an_environment_is_cut_and_says_so(log_run, report):
    played = episode(
        {"role": "assistant", "content": "甲"}, {"role": "user", "content": "长" * 4500}, rewards=[], ended="tokens"
    )
    header, _, _ = unpacked(report(log_run(steps=1, responses=[("q", "甲")], episodes=[played])))
    [[_, reward, _, _, [[_, said]]]] = header["responses"][0][-2]
    assert said == "长" * 4000 + " … (500 characters more)"
    assert reward is None


def test_what_left_its_band_and_alarms_have_their_times(log_run, report):
    alarms = [{"step": 2, "alarm": "kl-budget", "message": "KL is high", "evidence": {"reference/kl": 0.2}}]
    page = report(log_run(steps=9, alarms=alarms))
    said = words_of(page)
    assert "policy/ratio_max at most 4 step 4 6 of 9 10 (step 9)" in said
    assert "policy/approx_kl at most 0.05 step 6 4 of 9 0.09 (step 9)" in said
    assert f"step 2, after 2.0 min kl-budget KL is high {ALARMS['kl-budget'].cause} reference/kl 0.2" in said
    assert page.count('class="ring') == 10
    assert "kl-budget, step 2" in page


def test_the_page_has_the_charts_of_the_picture_and_more(log_run, report):
    """In one order, with accuracies smoothed and the KL coefficient only if it varies."""
    reward, ppo, adaptive = (
        log_run("甲/reward", algorithm="reward"),
        log_run("乙/ppo"),
        log_run("丙/grpo", algorithm="grpo"),
    )
    lines = [{"step": step, "reward/accuracy": step % 2} for step in range(1, 41)]
    (reward / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for run, factor in ((ppo, 0), (adaptive, 1)):
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
        more = [{"reference/kl_coef": 0.1 + factor * one["step"], "loss/positive": 2.0} for one in records]
        text = "".join(json.dumps(one | new) + "\n" for one, new in zip(records, more, strict=True))
        (run / "metrics.jsonl").write_text(text, encoding="utf-8")
    page = report(reward, ppo, adaptive)
    shown = re.findall("<figcaption>(.*?)</figcaption>", page.split('<h2 id="the-critic">')[0])
    drawn = [axes.get_title() for axes in plot.curves([reward, ppo, adaptive]).axes]
    besides = ("largest ratio", "loss of correct responses")
    assert [title for title in shown if title not in besides] == drawn
    assert [shown.count(title) for title in besides] == [2, 2]
    assert ("PPO: KL coefficient" in shown, "GRPO: KL coefficient" in shown) == (False, True)
    assert page.count("step (training: mean of 2 steps)") == 1


def test_texts_of_models_and_data_are_inert(log_run, report):
    """Nothing of them is an element, an attribute or a script; what bidi and terminals obey is not on the page."""
    responses = [(text, text) for text in NASTY]
    samples = [{"step": 1, "prompt": text, "response": text, "score": 1.0} for text in NASTY]
    alarms = [{"step": 1, "alarm": text, "message": text, "evidence": {text: text}} for text in NASTY]
    rewards = [dict.fromkeys(NASTY, 1.0) for _ in NASTY]
    run = log_run(
        NASTY[2], 2, responses, samples=samples, alarms=alarms, rewards=rewards, settings={"system_prompt": NASTY[0]}
    )
    page = report(run, log_run(NASTY[4], 2))
    found = Elements()
    found.feed(page)
    assert len(found.scripts) == 2
    assert "img" not in found.tags
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x07\x1b]", page)
    header, texts, _ = unpacked(page)
    assert NASTY[4] in header["prompts"]
    assert not re.search(
        "[\u202a-\u202e\u2066-\u2069\x07\x1b]", json.dumps(header, ensure_ascii=False) + "".join(texts)
    )
    assert "你好，世界" in page


def test_the_page_runs_its_own_script_only_and_asks_for_nothing(log_run, report):
    page = report(log_run())
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    for name in ("style", "script"):
        (allowed,) = re.findall(rf"{name}-src '([^']*)'", policy)
        content = re.findall(rf"<{name}>(.*?)</{name}>", page, re.DOTALL)[-1]
        assert allowed == "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    assert re.findall(r"https?://|@import|url\(|\bfetch\(", page) == []
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", page) == []


def test_lineage_names_parents_data_and_settings(log_run, report, tmp_path):
    parent = log_run("父/sft", algorithm="sft", steps=1)
    (parent / "final").mkdir()
    model = str(parent / "final")
    settings = {"model": model, "rewards": ["model:reward/final"], "kl_coef": 0.3, "gone_setting": 1}
    one = log_run("一/ppo", settings=settings)
    other = log_run("一/grpo", settings={**settings, "kl_coef": 0.1}, algorithm="grpo")
    said = words_of(report(one, other))
    assert "kl_coef 0.3 0.1" in said, "between the runs"
    assert "kl_coef 0.3 0.05" in said, "beside its default"
    assert "gone_setting 1 —" in said
    assert "prompts.jsonl abababababababab" in said
    assert f"model {model} sft cdcdcdcdcdcdcdcd" in said
    assert "reward reward/final not a run of heedful on this machine" in said


def test_samples_of_one_prompt_are_side_by_side(log_run, report):
    samples = [{"step": s, "prompt": "问", "response": f"答{s}", "score": s / 4} for s in range(1, 9)]
    page = report(log_run(samples=[*samples, {"step": 3, "prompt": "once", "response": "x", "score": 1.0}]))
    block = page.split('<h3 dir="auto">问</h3>')[1].split("</article>")[0]
    assert re.findall(r"<h4>(.*?)</h4>", block) == [f"step {s}" for s in (1, 2, 4, 5, 7, 8)], "six, ends included"
    assert "答8" in block
    assert "score 2" in block


def test_responses_that_nothing_was_learned_from(log_run, report, tiny):
    """They have no numbers of an update; their log-probs are those of sampling."""
    run = log_run(columns=False, settings={"model": f"{tiny()}-gone"})
    page = report(run)
    header, texts, columns = unpacked(page)
    bit = [name for name, _ in header["quantities"]].index("log-prob")
    assert {entry[8] for entry in header["responses"]} == {1 << bit}
    assert set(columns["log-prob"]) == {-0.5}
    assert np.isnan(columns["advantage"]).all()
    assert "no tokenizer was found" in page
    assert texts[0].strip().isdecimal()


def test_the_yardstick_is_the_first_steps_or_what_was_measured(log_run, report, tmp_path):
    rewards = [{"length": float(score)} for score in (0, 1, 2, 3)]
    run = log_run(responses=[("q", str(i)) for i in range(4)], rewards=rewards)
    page = report(run)
    assert "best of n of the first step" in page
    assert "n=4 0.6363: 3" in page, "log 4 − 3/4 nats, and the best score of all four"
    assert "n=2 0.1931: 2" in page, "of the 6 pairs of 0, 1, 2, 3 the best have the mean 2"
    measured = tmp_path / "best.json"
    measured.write_text(json.dumps({"best_of": [{"k": 1, "kl_bound": 0.0, "score": 7.5}]}), encoding="utf-8")
    page = report(run, best_of_n=measured)
    assert "n=1 0: 7.5" in page
    assert "measure it anew" not in page
    content = {"best_of": [{"k": 1, "kl_bound": 0.0, "score": 7.5}], "settings": {"temperature": 0.5}}
    measured.write_text(json.dumps(content), encoding="utf-8")
    said = "It sampled at temperature 0.5, ppo at 1.0: measure it anew."
    assert said in report(run, best_of_n=measured)


@pytest.mark.parametrize(("kl", "score"), [(None, 1.0), (1e308, 1.0), (-1e308, 1e308)])
def test_a_run_whose_kl_is_not_finite(log_run, report, kl, score):
    run = log_run()
    lines = [{"step": s, "reward/score_mean": (-1) ** s * score, "reference/kl": kl} for s in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    pictures = re.findall("<svg.*?</svg>", report(run))
    assert pictures
    assert not re.search(r"\b(nan|inf)\b", "".join(pictures))


def test_a_large_run_is_sampled_and_says_so(log_run, report):
    responses = [(f"q{i}", f"a{i}" * (1 + i % 3)) for i in range(50)]
    run = log_run(steps=2, responses=responses)
    page = report(run, responses=20, seed=3)
    header, _, _ = unpacked(page)
    assert len(header["responses"]) == 20
    assert "20 of 100 responses" in page
    assert "(seed 3)" in page
    assert unpacked(report(run, responses=20, seed=3))[0] == header
    assert unpacked(report(run, responses=20, seed=4))[0] != header


def test_a_page_without_room_says_so(log_run, heedful, tmp_path, monkeypatch):
    """The other parts fill it, as of many long runs: it is made once more, not until nothing is left bit by bit."""
    monkeypatch.setattr("heedful.apps.report.page.LARGEST_PAGE", 10_000)
    made = []
    monkeypatch.setattr(
        "heedful.apps.report.page.inspect", lambda *args, **named: made.append(1) or inspect(*args, **named)
    )
    outcome = heedful("report", str(log_run()), output=tmp_path / "p.html")
    assert outcome.status == 0
    assert "None of 6 responses" in outcome.out
    assert "kept no responses" not in (tmp_path / "p.html").read_text(encoding="utf-8")
    assert len(made) == 2


def test_a_long_response_keeps_its_beginning_and_end(log_run, report):
    page = report(log_run(steps=1, responses=[("q", "a" * 900 + "b" * 599 + "c")]))
    header, texts, _ = unpacked(page)
    assert header["responses"][0][4] == 1500
    assert "".join(texts) == "a" * 800 + "b" * 199 + "c"
    assert "the first 800 and the last 200" in page


@pytest.mark.exhaustive
def test_a_hundred_thousand_responses(log_run, report):
    """The page stays below 2 MB and says of how many its sample is."""
    responses = [
        (f"prompt {i % 300}", f"an answer of some tokens, number {i}, which goes on and on") for i in range(1000)
    ]
    run = log_run(steps=100, responses=responses)
    page = report(run, responses=5000)
    header, texts, _ = unpacked(page)
    assert f"{len(header['responses']):,} of 100,000 responses" in page
    assert 1000 < len(header["responses"]) <= 5000
    assert len(texts) <= 80_000
