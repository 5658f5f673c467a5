"""Every page: signing in, what it does, narrow and dark and Chinese, accessible, and inert whatever it shows."""

import ast
import json
import re
from pathlib import Path

import pytest

import heedful.apps.label
from heedful.apps.label.importing import add, read_items_text
from heedful.apps.label.server import api
from heedful.cli.command_table import COMMANDS
from labelling import send

PAGES = Path(heedful.apps.label.__file__).parent / "pages"
PATHS = ("/", "/stats", "/labels", "/people", "/import", "/export", "/rounds", "/instructions")
TASKS = ("pair", "ranking", "rating", "demonstration", "correction", "chat")
LONG = "https://example.com/" + "x" * 300 + " 很长的一行没有空格的文字" * 8
XSS = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)><img src=http://beacon.example/a.png>",
    "<svg/onload=alert(1)>",
    '"><iframe src=javascript:alert(1)></iframe>',
    "javascript:alert(1)",
    "</textarea></script><script>alert(1)</script>",
    "{{7*7}} ${7*7} {{constructor.constructor('alert(1)')()}}",
    "![x](http://beacon.example/b.png) [y](javascript:alert(1)) <http://beacon.example/>",
    "<style>@import 'http://beacon.example/c.css'</style><link rel=prefetch href=http://beacon.example/d>",
    "<form action=http://beacon.example><button autofocus>x</button></form><base href=http://beacon.example/>",
    "<math><mtext><table><mglyph><style><img src=x onerror=alert(1)>",
    "\u202egnp.exe\u2066 \u2028 \u0007 ' onmouseover='alert(1)",
)


def of_task(item, task, text="p"):
    answers = {"pair": 2, "ranking": 5, "rating": 1, "correction": 1}.get(task, 0)
    return item(task, text, *(f"{text} {i}" for i in range(answers)))


WORDS = {name: json.loads((PAGES / "words" / f"{name}.json").read_text(encoding="utf-8")) for name in ("en", "zh")}


def test_every_word_is_in_both_languages_and_used():
    words = WORDS
    assert list(words["en"]) == list(words["zh"])
    for key, english in words["en"].items():
        assert sorted(re.findall(r"\{\w+\}", english)) == sorted(re.findall(r"\{\w+\}", words["zh"][key])), key
        named = set(re.findall(r"heedful ((?:label )?[a-z]+)", f"{english} {words['zh'][key]}"))
        assert named <= COMMANDS.keys(), "a command that there is not"
    scripts = "\n".join(path.read_text(encoding="utf-8") for path in sorted((PAGES / "static").rglob("*.js")))
    used = set(re.findall(r'"([a-z0-9_]+)"', scripts))
    begun = tuple(re.findall(r"`([a-z_]+_)\$\{", scripts)) + tuple(
        f"{p}_" for p in re.findall(r'named\("([a-z]+)"', scripts)
    )
    assert set(re.findall(r'\bt\("([a-z0-9_]+)"', scripts)) <= words["en"].keys()
    assert [key for key in words["en"] if key not in used and not key.startswith(begun)] == []


def test_what_the_server_says_to_labellers_has_chinese_words():
    """Every refusal has a code with words, but for those of fields that no page of ours sends wrongly (422, 400, 405)."""
    words = WORDS["zh"]
    found = set()
    for name in ("app", "api", "policy"):
        tree = ast.parse((PAGES.parent / "server" / f"{name}.py").read_text(encoding="utf-8"))
        calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)]
        for call in calls:
            given = [one.value for one in call.args if isinstance(one, ast.Constant)]
            if call.func.id == "Refused" and given and given[0] not in (400, 405, 422):
                assert len(call.args) == 3, f"{name}.py:{call.lineno}: a refusal without a code"
            if (call.func.id == "Refused" and len(call.args) == 3) or call.func.id in ("_refuse", "AwayError"):
                found |= {one for one in given[-1:] if isinstance(one, str)}
    found |= {"not_held", "turn_answered"}
    assert {"link_used", "old_page", "model_slow", "chat_changed"} <= found
    assert [code for code in sorted(found) if f"said_{code}" not in words] == []
    scripts = {path.name: path.read_text(encoding="utf-8") for path in sorted((PAGES / "static").rglob("*.js"))}
    shown = {name for name, text in scripts.items() if "error.message" in text}
    assert shown == {"api.js", "shell.js", "export.js"}, "what the server says goes through `said`"
    assert [reason for reason in api.WHY_NONE if f"why_{reason}" not in words] == []


def test_the_chinese_words_are_chinese():
    """No sentence was left in English: of Latin letters there are names, commands and keys only."""
    words = WORDS["zh"]
    apart = re.compile(r"heedful [a-z ]+|\{[^}]*\}|--[a-z-]+|JSON Lines")
    english = [key for key, text in words.items() if re.search(r"[A-Za-z]+ [A-Za-z]+ [A-Za-z]+", apart.sub("", text))]
    assert english == []


def test_nothing_is_loaded_from_elsewhere_and_no_markup_is_parsed():
    for path in sorted(PAGES.rglob("*")):
        if path.suffix in (".js", ".css", ".html"):
            text = path.read_text(encoding="utf-8").replace("http://www.w3.org/", "")
            assert re.findall(r"https?://|@import|<script>|style=|\bon\w+=\"", text) == [], path
            assert (
                re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text) == []
            )


def test_an_invitation_works_once_and_leaves_no_trace(serve, item):
    served = serve([item("pair", "p", "a", "b")])
    person = served.project.add_person("王芳", "annotator")
    link = f"{served.url}/join#{served.project.invite(person.person_id)}"
    page = served.context().new_page()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(link)
    page.get_by_role("button", name="Start").wait_for()
    assert page.url == f"{served.url}/join", "the token is not left in the address"
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Which answer is better?").wait_for()
    page.keyboard.press("?")
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("heading", name="Welcome").wait_for()
    page.goto(f"{served.url}/")
    page.get_by_label("Invitation link").fill(link)
    page.keyboard.press("Enter")
    page.get_by_text("this link has been used").wait_for()
    assert not [url for url in asked if link.split("#")[1] in url]


def test_people_instructions_and_the_export(serve, item):
    served = serve([item("pair", f"p{i}", "a", "b") for i in range(4)], instructions="一")
    owner = served.labeller("Mei", "owner", "/instructions")
    owner.page.locator("textarea").fill("先看事实 😀\n<b>然后</b>")
    owner.page.get_by_role("button", name="Save as a new version").click()
    owner.page.get_by_text("Saved as version 2.").first.wait_for()
    owner.open()
    assert owner.page.locator("#instructions .text").text_content() == "先看事实 😀\n<b>然后</b>"
    for key in "12t1":
        owner.then_next(key, "5", "Enter")
    assert owner.labels[0]["instructions"] == 2

    owner.open("/export")
    owner.page.get_by_text("events.jsonl").wait_for()
    with owner.page.expect_download() as download:
        owner.page.get_by_role("link", name="Download labels.zip").click()
    assert Path(download.value.path()).read_bytes()[:2] == b"PK"
    owner.page.get_by_text("Leave out the labels of").click()
    owner.page.get_by_label("Mei", exact=True).check()
    owner.page.get_by_text("Of people left out: 4").wait_for()
    assert "without=" in owner.page.get_by_role("link", name="Download labels.zip").get_attribute("href")

    owner.open("/people")
    owner.page.get_by_label("Name", exact=True).fill("王芳 <b>")
    owner.press("Enter")
    link = owner.page.get_by_label("Invitation link for 王芳 <b>").input_value()
    assert link.startswith(f"{served.url}/join#")
    owner.page.get_by_label("Standing: 王芳 <b>").select_option("held-out")
    owner.page.get_by_text("王芳 <b> is changed.").first.wait_for()
    owner.page.get_by_role("button", name="王芳 <b>").click()
    owner.page.get_by_label("Name", exact=True).last.fill("王芳 😀")
    owner.press("Enter")
    owner.page.get_by_label("Standing: 王芳 😀").wait_for()
    (person,) = (one for one in served.project.people() if one.name == "王芳 😀")
    assert (person.role, person.standing) == ("annotator", "held-out")
    first = served.project.people()[0].name
    owner.page.get_by_label(f"Role: {first}").select_option("viewer")
    owner.page.get_by_text(f"{first} is changed.").first.wait_for()
    owner.page.get_by_label("Role: Mei").select_option("viewer")
    owner.page.get_by_text("Mei is the only owner of the project").wait_for()
    owner.page.wait_for_function("() => document.querySelector('[aria-label=\"Role: Mei\"]').value === 'owner'")
    assert owner.page.get_by_text("Mei is the only owner of the project").is_visible()


@pytest.mark.exhaustive
def test_a_thumb_ranks_answers_where_they_are(serve, item):
    """On a phone the list of ranks is below all answers, so each answer has its own; what is tapped is 44 pixels high."""
    served = serve([item("ranking", "p", *(f"{name} 😀\n" * 20 for name in "甲乙丙")), item("pair", "p", "a", "b")])
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True}
    mei = served.labeller("Mei", "owner", **phone)
    tap = mei.page.get_by_role("button")
    cards = mei.page.locator(".rank-answers .answer")
    cards.nth(2).get_by_role("button", name="Answer 3: rank 1").tap()
    cards.nth(1).get_by_role("button", name="Answer 2: tie with the line above").tap()
    pressed = [card.locator("[aria-pressed=true]").all_inner_texts() for card in cards.all()]
    assert pressed == [["2"], ["2", "="], ["1"]]
    for name in ("Undo", "Skip", "Submit", "Answer 1: rank 1", "Answer 1: move up"):
        box = tap.filter(has_text=name).or_(mei.page.get_by_label(name, exact=True)).first.bounding_box()
        assert min(box["height"], box["width"]) >= 44, name
    tap.filter(has_text="Submit").tap()
    mei.page.locator("main.task-pair").wait_for()
    (label,) = mei.labels
    assert [label["answer"]["ranks"][candidate] for candidate in label["order"]] == [2, 2, 1]
    for name in ("Answer 1 is better", "Undo"):
        assert tap.filter(has_text=name).first.bounding_box()["height"] >= 44, name
    mei.open("/stats")
    size = "chart => 11 * chart.clientWidth / chart.viewBox.baseVal.width"
    assert mei.page.locator("svg.chart").first.evaluate(size) >= 9, "letters of a chart, in pixels"


def test_dark_and_chinese_by_the_switches(serve, item):
    mei = serve([item("pair", "p", "a", "b")]).labeller(color_scheme="dark")

    def brightness():
        return sum(
            map(int, re.findall(r"\d+", mei.page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3])
        )

    assert brightness() < 120, "as the system"
    mei.page.locator("#theme").press("Enter")
    assert brightness() > 600
    mei.page.reload()
    assert brightness() > 600, "the choice is remembered"
    mei.page.locator("main[aria-busy=false]").wait_for()
    mei.page.locator("#language").press("Enter")
    mei.page.get_by_role("heading", name="哪个回答更好？").wait_for()
    assert mei.page.locator("html").get_attribute("lang") == "zh-CN"
    mei.then_next("1", "4", "Enter")
    mei.page.get_by_role("heading", name="目前没有需要标注的内容").wait_for()


@pytest.fixture
def full(serve, item):
    """A project with long words, in which each page has all that it can have."""
    items = [of_task(item, task, LONG) for task in TASKS]
    second = {"preferred": 1, "strength": None, "both_bad": False}
    items[0] = item("pair", LONG, f"{LONG} 0", f"{LONG} 1", suggestion=second)
    helpful = "{name: helpful, scale: 5, question: 'Does it help?'}"
    criteria = (helpful, "{name: 诚实, labels: [否, 部分, 是], required: false}")
    served = serve(items, instructions=LONG, policy=True, criteria=criteria)
    project = served.project
    add(project, read_items_text(json.dumps({"prompt": LONG, "responses": ["甲", "乙"]}), name="错.jsonl"))
    project.withdraw("p1", batch="1")
    late = project.add_person("评 😀", "annotator", "held-out").person_id
    answer = {
        "preferred": 0,
        "strength": 3,
        "both_bad": False,
        "criteria": [{"helpful": 4}, {"helpful": 2, "诚实": "是"}],
    }
    label = send(project, late, answer, comment="备注 😀" + "x" * 300)
    project.correct("p1", label.event_id, {"preferred": 1}, nonce="nonce-12346", reason="x" * 300)
    return served


@pytest.mark.parametrize(
    ("theme", "language"), [("light", "en"), pytest.param("dark", "zh-CN", marks=pytest.mark.exhaustive)]
)
def test_every_page_is_accessible_and_fits_a_phone(full, axe, theme, language):
    """axe finds nothing at 1280 pixels; at 360 nothing scrolls sideways. No page shows a key in place of words."""
    mei = full.labeller(LONG[:60], "owner", "/join#link", color_scheme=theme, locale=language)

    def check(name):
        found = [
            (one["id"], node["html"][:160], node.get("failureSummary"))
            for one in axe(mei.page)
            for node in one["nodes"]
        ]
        assert found == [], name
        text = mei.page.locator("body").inner_text().replace("heedful_", "").replace("corrected_by", "")
        assert not re.findall(r"\b[a-z]+_[a-z]+\b", text), f"{name} shows a key without words"
        mei.page.set_viewport_size({"width": 360, "height": 740})
        wide = mei.page.evaluate("document.scrollingElement.scrollWidth")
        assert wide <= 360, f"{name} is {wide} pixels wide"
        mei.page.set_viewport_size({"width": 1280, "height": 800})

    check("/join")
    (label,) = full.project.labels()
    for path in (*PATHS[1:], "/labels?items=1", f"/labels?item={label.item.item_id}"):
        mei.open(path)
        check(path)
    mei.page.locator("main button", has_text=re.compile("^(Correct|更正)")).first.click()
    check("a correction")
    mei.open("/")
    for task in TASKS:
        check(task)
        if task == "pair":
            mei.press("1", "?")
            check("help")
            mei.press("Escape", "s")
            check("skip")
            mei.press("Escape")
        mei.press("Escape", "s")
        mei.then_next("Enter")
    check("nothing left")


def write_round(project, corpus):
    """Somebody's label, about which a reward model disagrees, and a finished round."""
    person = project.add_person(XSS[2], "annotator").person_id
    held = project.next_item(person)
    answer = {"preferred": 0, "strength": 4, "both_bad": False}
    project.label(person, held.item.item_id, answer, nonce="n", seconds=1.0, comment=corpus[:9000])
    scores = json.dumps({"item": held.item.item_id, "scores": [-1.0, 1.0]})
    (project.folder / "scores.jsonl").write_text(f"{scores}\n", encoding="utf-8")
    (project.folder / "rounds" / "1").mkdir(parents=True)
    sample = {"prompt": corpus, "response": corpus, "previous": corpus, "score": 1.0, "previous_score": 0.0}
    measured = {"over_previous": {"win_rate": 0.6, "interval_95": [0.5, 0.7], "score_mean": 1.0}, "kl": 1.0}
    steps = {"sample": {"asked": 1}, "label": {"labels": 1, "pairs": 1, "statistics": {}}, "reward": {"accuracy": 0.6}}
    steps |= {"ppo": {"kl": 1.0}, "evaluate": measured | {"samples": [sample]}}
    note = json.dumps({"round": 1, "settings": {}, "before": "", "steps": steps}, ensure_ascii=False)
    (project.folder / "rounds" / "1" / "round.json").write_text(note, encoding="utf-8")


@pytest.mark.parametrize("markdown", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_whatever_is_shown_is_inert(serve, item, markdown):
    corpus = "\n".join(XSS).replace("\u0007", "")
    messages = [
        {"role": "user", "content": corpus},
        {"role": "assistant", "content": corpus, "reasoning": corpus},
        {"role": "user", "content": corpus},
    ]
    items = [
        item("pair", messages, corpus, corpus + " 2", needed=2),
        *(of_task(item, task, corpus) for task in TASKS[1:5]),
    ]
    served = serve(items, markdown=markdown, instructions=corpus, name=XSS[0])
    write_round(served.project, corpus)
    mei = served.labeller(XSS[1], "owner", "/people")
    asked, dialogs, violations = [], [], []
    mei.context.on("request", lambda request: asked.append(request.url))
    mei.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    mei.page.on("console", lambda said: "Content Security Policy" in said.text and violations.append(said.text))
    for path in PATHS[1:]:
        mei.open(path)
        if path == "/import":
            mei.page.locator("summary").first.click()
            records = [{"prompt": corpus, "responses": [corpus, "b"]}, {"prompt": corpus, corpus: 1, "chosen": corpus}]
            mei.page.locator("textarea").fill("".join(f"{json.dumps(one)}\n" for one in records))
            mei.page.get_by_role("button", name="Preview").click()
            mei.page.locator(".errors").wait_for()
        shown = mei.page.locator("main").inner_text()
        assert path not in ("/stats", "/rounds", "/import", "/people") or "<svg/onload" in shown, path
        assert mei.page.locator("main :is(script, iframe, img, math, style, link, base)").count() == 0, path
    mei.open("/")
    if not markdown:
        assert mei.page.locator(".answer .text").first.text_content() in (corpus, corpus + " 2")
    for _ in items:
        assert (
            mei.page.locator("main :is(script, iframe, img, svg, math, style, link, form, base, .text a)").count() == 0
        )
        mei.press("Escape", "c")
        mei.page.keyboard.insert_text(corpus[:200])
        mei.press("Escape", "f", "2", "Enter", "s")
        mei.then_next("Enter")
    mei.open("/stats")
    assert dialogs == []
    assert violations == []
    assert [url for url in asked if not url.startswith(served.url)] == []
