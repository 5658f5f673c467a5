"""The page in a real browser: the keyboard alone, numbers as logged, axe, phones and dark screens, and smooth scrolling."""

import json
import os
import re

import pyarrow.parquet as pq
import pytest

from heedful import make_tiny_model
from logged_runs import BROKEN, GAME, NASTY, PLAYED, UNBEGUN, episode

pytestmark = pytest.mark.exhaustive
WAIT = 60_000
PAUSES = """async () => {  // scrolls through all of the responses, and returns the milliseconds between frames
    const list = document.getElementById("responses"), pauses = [];
    list.scrollIntoView();
    await new Promise(requestAnimationFrame);
    let before = await new Promise(requestAnimationFrame);
    const end = document.documentElement.scrollHeight - innerHeight;
    for (let frame = 0; frame < 300 && scrollY < end - 1; frame++) {
        scrollBy(0, Math.max(400, (end - scrollY) / (300 - frame)));
        const now = await new Promise(requestAnimationFrame);
        pauses.push(now - before);
        before = now;
    }
    return pauses;
}"""


@pytest.fixture
def opened(heedful, browser, tmp_path):
    """``opened(run, ..., phone=..., dark=...)`` is the page of a report, in a browser that has no network."""
    contexts = []

    def open_page(*runs, phone=False, dark=False):
        outcome = heedful("report", *map(str, runs), "--output", str(tmp_path / "p.html"))
        assert outcome.status == 0, outcome.err
        size = {"width": 390, "height": 844} if phone else {"width": 1280, "height": 900}
        context = browser.new_context(viewport=size, color_scheme="dark" if dark else "light", offline=True)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT)
        page.wrong = []
        page.on("console", lambda message: page.wrong.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: page.wrong.append(str(error)))
        page.on("dialog", lambda dialog: page.wrong.append(dialog.message))
        page.on("request", lambda one: one.url.startswith("file:") or page.wrong.append(one.url))
        page.goto(f"file://{tmp_path / 'p.html'}")
        page.wait_for_function("document.documentElement.dataset.ready")
        return page

    yield open_page
    for context in contexts:
        context.close()


def numbers(page):
    """What the bar at the bottom says of the token: its heading, and each number."""
    pairs = page.locator("#numbers dl > div").all_inner_texts()
    found = dict(re.split(r"\s+", pair, maxsplit=1) for pair in (one.replace("\n", " ") for one in pairs))
    return page.locator("#numbers .what").inner_text(), found


def value(text):
    return float(text.split(" (")[0].replace("\u2212", "-"))


def test_the_keyboard_alone_reaches_every_number(log_run, opened):
    run = log_run(steps=2, responses=[("二加二？", "四 4"), ("hi", "hello")])
    page = opened(run)
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.className") == "tokens":
            break
    rows = [row for path in sorted((run / "rollouts").iterdir()) for row in pq.read_table(path).to_pylist()]
    for step, row in ((0, rows[0]), (1, rows[1]), (2, rows[2])):
        page.keyboard.press("Home")
        for t in range(len(row["response_ids"])):
            heading, found = numbers(page)
            assert f"id {row['response_ids'][t]}, token {t + 1} of {len(row['response_ids'])}" in heading
            assert value(found["advantage"]) == pytest.approx(row["advantages"][t], rel=5e-3)
            assert value(found["log-ratio"]) == pytest.approx(row["log_ratio"][t], rel=5e-3)
            assert value(found["KL"]) == pytest.approx(row["old_logprobs"][t] - row["ref_logprobs"][t], rel=5e-3)
            assert value(found["reward"]) == pytest.approx(row["token_rewards"][t], rel=5e-3)
            assert value(found["value"]) == pytest.approx(row["values"][t], rel=5e-3)
            assert value(found["return"]) == pytest.approx(row["returns"][t], rel=5e-3)
            assert value(found["entropy"]) == pytest.approx(row["entropy"][t], rel=5e-3)
            page.keyboard.press("ArrowRight")
        assert step < 3
        page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("End")
    assert "token 5 of 5, step 2, row 0" in numbers(page)[0], "up from the last row, then to its end"
    assert page.wrong == []


def test_chinese_characters_are_whole_and_the_mouse_shows_numbers(log_run, opened):
    page = opened(log_run(steps=1, responses=[("问", "天地")]))
    spans = page.locator(".tokens").first.locator("span").all_inner_texts()
    assert spans == ["‥", "‥", "天", "‥", "‥", "地"]
    page.locator(".tokens span", has_text="地").hover()
    assert numbers(page)[0].startswith('"地", id ')


def test_an_episode_is_shown_in_turns(log_run, opened):
    """The policy's tokens have numbers; what the other one said is text beside them. Arrows go on from turn to turn."""
    run = log_run(steps=1, responses=PLAYED, episodes=[GAME, BROKEN, UNBEGUN], settings={"action": "turn"})
    page = opened(run)
    row = pq.read_table(run / "rollouts" / "step-000001.parquet").to_pylist()[0]
    game = page.locator("#responses > li").first
    assert game.locator(".tokens").all_inner_texts() == ["‥‥猜 ", "‥‥是‥‥的", "‥‥好"]
    assert game.locator(".reward").all_inner_texts() == ["reward \u22120.1", "reward 0.25", "reward 7"]
    assert game.locator(".call").all_inner_texts() == ['calls guess({"word": "苹果"})']
    assert game.locator(".other").all_inner_texts() == ["tool guess\n\n{'no': 1}\n<b>再来</b>", "user\n\n对"]
    for head, start in zip(game.locator(".whose").all_inner_texts(), (0, 4, 10), strict=True):
        assert value(re.search("advantage (\\S+)", head)[1]) == pytest.approx(row["advantages"][start], rel=5e-3)
    assert "3 turns · cut by --max-turns" in game.locator(".head").first.inner_text()

    page.locator(".tokens").first.focus()
    page.keyboard.press("Tab")
    assert "turn 2, token 5 of 13" in numbers(page)[0], "the next turn's first token"
    page.keyboard.press("ArrowLeft")
    assert "turn 1, token 4 of 13" in numbers(page)[0]
    page.keyboard.press("Home")
    for t in range(13):
        heading, found = numbers(page)
        assert f"turn {(t >= 4) + (t >= 10) + 1}, token {t + 1} of 13" in heading
        assert value(found["advantage"]) == pytest.approx(row["advantages"][t], rel=5e-3)
        page.keyboard.press("ArrowRight")

    page.locator("#text").fill("对")
    assert page.locator("#count").inner_text().startswith("1 of 3"), "words of the other one are found"
    page.locator("#text").fill("")
    page.locator("#end").select_option("failed")
    assert page.locator("#count").inner_text().startswith("2 of 3")
    page.locator(".failure", has_text="The environment Guess raised RuntimeError: 坏了").wait_for()
    assert page.wrong == []


def test_turns_of_a_long_episode_and_of_two_models(log_run, opened, tiny, tmp_path):
    """Tokens that are left out are counted within their turns; each model has its own turns."""
    texts, reply = ["x" * 700, "y" * 500, "z" * 100], {"role": "user", "content": "再"}
    said = [message for text in texts for message in ({"role": "assistant", "content": text}, reply)]
    played = episode(*said, rewards=[1.0, 2.0, 3.0])
    page = opened(log_run(steps=1, responses=[("q", "".join(texts))], episodes=[played]))
    shown = page.locator(".tokens").all_inner_texts()
    assert [text.count(letter) for text, letter in zip(shown, "xyz", strict=True)] == [700, 200, 100]
    assert page.locator(".gap").all_inner_texts() == [" ⋯ 300 tokens ⋯ "]
    page.locator(".tokens").first.focus()
    page.keyboard.press("End")
    assert "turn 3, token 1300 of 1300" in numbers(page)[0]

    make_tiny_model("gpt2", tmp_path / "other", hidden_size=32, max_length=128, seed=7)
    run = log_run("两", steps=1, responses=PLAYED[:1], episodes=[GAME])
    page = opened(run, "--compare", tiny(), str(tmp_path / "other"))
    page.locator("#compare").check()
    sides = page.locator("#responses > li .two > div")
    assert [side.locator(".tokens").count() for side in sides.all()] == [3, 3]
    sides.last.locator(".tokens").nth(1).focus()
    page.keyboard.press("ArrowRight")
    assert "turn 2, token 6 of 13" in numbers(page)[0]
    assert sides.last.locator(".now").count() == 1, "it stays on its side"
    assert page.wrong == []


def test_filters_and_orders(log_run, opened):
    rewards = [{"score": float(row), "judge": 3.0 - row} for row in range(4)]
    run = log_run(steps=3, responses=[(f"q{i}", f"a{i}") for i in range(4)], rewards=rewards)
    page = opened(run)

    def heads():
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        page.wait_for_timeout(300)
        return page.locator("#responses .head").all_inner_texts()

    page.locator("#from").fill("2")
    page.locator("#to").fill("2")
    assert [re.match(r"step (\d), row (\d)", head).groups() for head in heads()] == [("2", str(i)) for i in range(4)]
    page.locator("#order").select_option("kl")
    assert [float(re.search(r"KL ([\d.]+)", head)[1]) for head in heads()] == pytest.approx([0.8, 0.6, 0.4, 0.2])
    page.locator("#from").fill("")
    page.locator("#to").fill("")
    page.locator("#text").fill("q3")
    assert [re.match(r"step (\d), row (\d)", head).groups() for head in heads()] == [(s, "3") for s in "321"]
    page.locator("#text").fill("")
    page.locator("#end").select_option("length")
    assert page.locator("#count").inner_text().startswith("0 of 12")
    assert page.wrong == []


@pytest.mark.parametrize("phone", [False, True])
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_on_any_screen(log_run, opened, axe, phone, dark):
    alarms = [{"step": 2, "alarm": "repetition", "message": "m", "evidence": {}}]
    samples = [{"step": s, "prompt": "q", "response": "r " * 200, "score": 1.0} for s in (1, 2, 3)]
    one = log_run(steps=9, alarms=alarms, samples=samples, responses=[(text, text) for text in NASTY])
    games = log_run("运行/局", steps=1, responses=PLAYED, episodes=[GAME, BROKEN, UNBEGUN])
    page = opened(games, one, log_run("运行/二", settings={"kl_coef": 0.2}), phone=phone, dark=dark)
    page.locator(".tokens").first.focus()
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    assert [(one["id"], [node["target"] for node in one["nodes"]][:3]) for one in axe(page)] == []
    assert page.wrong == []


def test_two_models_are_side_by_side(log_run, opened, tiny, tmp_path):
    make_tiny_model("gpt2", tmp_path / "other", hidden_size=32, max_length=128, seed=7)
    page = opened(log_run(steps=1), "--compare", tiny(), str(tmp_path / "other"))
    page.locator("#compare").check()
    sides = page.locator("#responses > li").first.locator(".two > div")
    assert sides.count() == 2
    assert len(set(sides.locator(".head").all_inner_texts())) == 2
    page.locator(".tokens").first.focus()
    assert sum("log-prob" in name for name in page.locator("#numbers dt").all_inner_texts()) == 3


def test_two_thousand_responses_scroll_smoothly(log_run, opened, browser):
    """No task of the page's thread takes 100 ms of its processor, so on a quiet machine no frame waits that long.

    Where other programs take the processor, frames wait for these.
    """
    run = log_run(steps=20, responses=[(f"prompt {i}", f"an answer of some tokens, number {i}") for i in range(100)])
    page = opened(run)
    assert page.locator("#count").inner_text().startswith("2,000 of 2,000")
    browser.start_tracing(page=page, categories=["toplevel", "devtools.timeline"])
    pauses = sorted(page.evaluate(PAUSES))
    events = json.loads(browser.stop_tracing())["traceEvents"]
    threads = {(e["pid"], e["tid"]) for e in events if e.get("args", {}).get("name") == "CrRendererMain"}
    tasks = sorted(
        e.get("tdur", 0) / 1000 for e in events if (e["pid"], e["tid"]) in threads and "RunTask" in e["name"]
    )
    load = os.getloadavg()[0]
    print(
        f"{len(pauses)} frames at load {load:.1f}: median {pauses[len(pauses) // 2]:.0f}, longest {pauses[-1]:.0f} ms; ",
        end="",
    )
    print(f"longest task {tasks[-1]:.0f} ms of the processor")
    assert len(pauses) > 100
    assert 0 < tasks[-1] <= 100
    assert pauses[-1] <= 100 or load > os.cpu_count()
    page.locator("#responses > li").last.locator(".tokens span").first.wait_for()
