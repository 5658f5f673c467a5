"""Draws the pictures of docs/label: every page, in a real Chromium, with made-up people, labels and numbers.

python tests/label/browser/pictures.py --output docs/label

Needs the extra `test`, and Chromium. About a minute. Pictures have 128 colours, so that they stay small.
"""

import argparse
import itertools
import json
import math
import random
import shutil
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path

import pictures_content as content
from PIL import Image
from playwright.sync_api import sync_playwright

from conftest import Labeller, Served, item
from heedful.apps.label import Project
from heedful.apps.label.server.policy import PolicyWorker
from heedful.configs.label import ProjectSettings

DAY = 86400.0
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True}
WRITER = (sys.executable, str(Path(__file__).parent / "pictures_writer.py"))


def items():
    """One item of each task, in the order in which they come."""
    return [
        item("pair", content.RENT, content.RENT_LONG, content.RENT_SHORT),
        item("pair", content.SLEEP, content.SLEEP_A, content.SLEEP_B),
        item("ranking", content.FIREWALL, *content.FIREWALL_ANSWERS),
        item("rating", content.REMINDER, content.REMINDER_ANSWER),
        item("demonstration", content.POLITE),
        item("correction", content.EGGS, content.EGGS_ANSWER),
        item("chat", ""),
    ]


def others_work(project):
    """Items of which somebody else has labelled a third, with ours next."""
    jonas = project.add_person("Jonas", "annotator")
    asked = [
        item("pair", text.format(topic), content.GOOD.format(topic), content.POOR.format(topic))
        for text in content.ASKED
        for topic in content.TOPICS
    ]
    project.add_items(asked[:41])
    for at in range(41):
        held = project.next_item(jonas.person_id)
        project.label(
            jonas.person_id,
            held.item.item_id,
            {"preferred": 0, "strength": 3, "both_bad": False},
            nonce=f"before-{at}",
            seconds=20.0,
        )
    project.add_items(items())
    project.add_items(asked[41:])


def fill(project, clock):
    """Two weeks of three people's labels, with a reward model's scores of what they labelled."""
    drawn = random.Random(0)
    asked, best = [], {}
    for n, (text, topic) in enumerate(itertools.product(content.ASKED, content.TOPICS)):
        good, poor = (content.GOOD, content.POOR) if n % 3 else (content.GOOD_SHORT, content.POOR_LONG)
        texts = [good.format(topic), poor.format(topic)][:: 1 if drawn.random() < 0.5 else -1]
        asked.append(item("pair", text.format(topic), *texts, needed=2))
        best[asked[-1].item_id] = texts.index(good.format(topic))
    project.add_items([item("pair", content.RENT, content.RENT_LONG, content.RENT_SHORT), *asked])
    names = (("Mei", "annotator"), ("王芳", "annotator"), ("Jonas", "annotator"), ("Amira", "viewer"))
    people = [project.add_person(name, role) for name, role in names]
    project.set_person(people[2].person_id, standing="held-out")
    for day in range(14):
        clock[0] += DAY
        for person, pace in zip(people[:3], (9, 7, 4), strict=True):
            for turn in range(pace + drawn.randrange(4)):
                held = project.next_item(person.person_id)
                if held is None or (day % 7 > 4 and turn > 1):
                    break
                better = best.get(held.item.item_id, 0)
                preferred = better if drawn.random() < 0.86 else 1 - better
                tie = drawn.random() < 0.12
                answer = {
                    "preferred": None if tie else preferred,
                    "strength": None if tie else drawn.randint(1, 4),
                    "both_bad": False,
                }
                project.label(
                    person.person_id,
                    held.item.item_id,
                    answer,
                    nonce=f"{day}-{turn}-nonce",
                    seconds=round(drawn.lognormvariate(3, 0.4), 1),
                )
    scores = [
        {
            "item": one.item_id,
            "scores": [drawn.gauss(0.9 if at == best.get(one.item_id, 0) else 0, 0.9) for at in (0, 1)],
        }
        for one in project.items()
    ]
    scores[0]["scores"] = [-1.9, 1.6]
    (project.folder / "scores.jsonl").write_text("".join(json.dumps(one) + "\n" for one in scores), encoding="utf-8")


def write_rounds(folder):
    """Three rounds as heedful round writes them."""
    drawn = random.Random(1)
    for number in (1, 2, 3):
        at = folder / "rounds" / str(number)
        win = 0.74 - 0.06 * number
        samples = [
            {
                "prompt": prompt,
                "response": after,
                "previous": before,
                "score": 1.1 + 0.2 * number,
                "previous_score": 0.3 * number,
            }
            for prompt, before, after in content.ROUND_PROMPTS
        ]
        steps = {
            "sample": {"prompts": 400, "asked": 300, "random": 90, "active": 210},
            "label": {
                "labels": 318,
                "pairs": 300,
                "statistics": {"agreement": {"pair": {"share": {"value": 0.70 + 0.02 * number}}}},
            },
            "reward": {"accuracy": 0.64 + 0.03 * number, "train_pairs": 270 * number, "eval_pairs": 30 * number},
            "ppo": {"kl": 4.1 + number, "steps": 60},
            "evaluate": {
                "over_previous": {"win_rate": win, "interval_95": [win - 0.05, win + 0.05], "score_mean": 1.0},
                "kl": 4.1 + number,
                "samples": samples,
            },
        }
        for run in ("reward", "ppo"):
            (at / run).mkdir(parents=True)
            lines = [
                {
                    "step": step,
                    "reward/accuracy": 0.5
                    + (0.12 + 0.04 * number) * (1 - math.exp(-step / 15))
                    + drawn.gauss(0, 0.008),
                    "reward/score_mean": 0.4 * number + 1.2 * (1 - math.exp(-step / 20)) + drawn.gauss(0, 0.04),
                    "reference/kl": abs((4 + number) * (1 - math.exp(-step / 25)) + drawn.gauss(0, 0.1)),
                }
                for step in range(0, 61, 2)
            ]
            (at / run / "metrics.jsonl").write_text(
                "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
            )
        (at / "round.json").write_text(
            json.dumps({"round": number, "settings": {}, "before": "", "steps": steps}, ensure_ascii=False),
            encoding="utf-8",
        )


class Camera:
    """Takes pictures into a folder."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def take(self, somebody, name, **options):
        somebody.page.evaluate("document.querySelectorAll('.toast').forEach(one => one.remove())")
        somebody.page.wait_for_timeout(250)
        picture = Image.open(BytesIO(somebody.page.screenshot(**options))).convert("RGB")
        path = self.folder / f"{name}.png"
        picture.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
        print(f"{path} {picture.width} x {picture.height}, {path.stat().st_size // 1000} kB")


def work(camera, served):
    """The page on which people label, task by task."""
    mei = served.labeller("Mei", "annotator")
    mei.press("1" if "Usually not" in mei.page.locator(".answer").first.text_content() else "2", "5")
    camera.take(mei, "work")
    phone = served.at_work(mei.person, session=mei.session, **PHONE)
    phone.press("i")
    camera.take(phone, "work-phone")
    mei.open()
    mei.then_next("Enter")
    dark = served.at_work(mei.person, session=mei.session, locale="zh-CN", color_scheme="dark")
    dark.press("1" if "慢慢来" in dark.page.locator(".answer").first.text_content() else "2", "6")
    camera.take(dark, "work-chinese-dark")
    mei.then_next("t", "Enter")
    answers = mei.page.locator(".answer .text").all_text_contents()
    for rank, text in enumerate(content.FIREWALL_ANSWERS, 1):
        mei.page.locator(f".rank-row[data-place='{answers.index(text)}'] .grip").focus()
        mei.press(str(rank))
    mei.press("=")
    camera.take(mei, "ranking")
    thumb = served.at_work(mei.person, session=mei.session, **PHONE)
    thumb.page.locator(".rank-answers .answer").first.scroll_into_view_if_needed()
    camera.take(thumb, "ranking-phone")
    thumb.page.close()
    mei.open()
    mei.then_next("Enter")
    mei.press("6", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown", "Space")
    camera.take(mei, "rating")
    mei.page.locator("#question").focus()
    mei.then_next("Enter")
    mei.page.keyboard.insert_text(content.POLITE_ANSWER)
    camera.take(mei, "demonstration")
    mei.then_next("Control+Enter")
    mei.page.locator("textarea.writing").fill(content.EGGS_ANSWER.replace(content.EGGS_FROM, content.EGGS_TO))
    camera.take(mei, "correction")
    mei.then_next("Control+Enter")
    mei.page.keyboard.insert_text(content.DEPOSIT)
    mei.press("Control+Enter")
    mei.page.locator(".answer").first.wait_for()
    mei.press("1", "6")
    camera.take(mei, "chat")
    mei.press("?")
    camera.take(mei, "help")


def owner_pages(camera, served, folder):
    """What the owner sees."""
    guest = Labeller(served, served.context(), None)
    guest.open("/join#a-link")
    camera.take(guest, "join")
    owner = served.labeller("Mei Lin", "owner", "/stats")
    camera.take(owner, "stats", full_page=True)
    owner.open("/rounds")
    camera.take(owner, "rounds", full_page=True)
    owner.open("/people")
    owner.page.get_by_label("Name", exact=True).fill("Noor")
    owner.press("Enter")
    owner.page.locator(".link-made").wait_for()
    camera.take(owner, "people", full_page=True)
    owner.open("/import")
    lines = [
        {"prompt": content.SLEEP, "responses": [content.SLEEP_A, content.SLEEP_B]},
        {"prompt": content.RENT, "chosen": content.RENT_LONG},
        {"prompt": content.RENT, "responses": [content.RENT_LONG, content.RENT_SHORT]},
        {"prompt": 17, "responses": ["a", "b"]},
    ]
    path = folder / "answers.jsonl"
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    owner.page.set_input_files("#file", path)
    owner.page.locator("#result section").first.wait_for()
    camera.take(owner, "import")
    owner.open("/export")
    camera.take(owner, "export")
    owner.open("/instructions")
    camera.take(owner, "instructions")


def main():
    """Serve two projects and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the pictures")
    camera = Camera(parser.parse_args().output)
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        folder = Path(temporary)
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        settings = ProjectSettings(name="Tenants' advice", overlap=0.0, repeats=0.0)
        with (
            Project.create(folder / "work", settings) as project,
            PolicyWorker(folder / "p", folder / "log", WRITER) as worker,
        ):
            others_work(project)
            project.set_instructions(content.INSTRUCTIONS)
            while not worker.is_ready:
                time.sleep(0.05)
            served = Served(project, browser, worker)
            served.start()
            try:
                work(camera, served)
            finally:
                served.stop()
        clock = [time.time() - 15 * DAY]
        with Project.create(folder / "owner", settings, clock=lambda: clock[0]) as project:
            fill(project, clock)
            project.set_instructions(content.INSTRUCTIONS)
            write_rounds(project.folder)
            clock[0] = time.time()
            served = Served(project, browser)
            served.start()
            try:
                owner_pages(camera, served, folder)
            finally:
                served.stop()
        browser.close()


if __name__ == "__main__":
    main()
