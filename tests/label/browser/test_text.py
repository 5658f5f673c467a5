"""What people see of a text: formatted with --markdown, code and tables in letters of one width, every character by a key."""

import pytest

CODE = "用这个：\n```python\ndef f(x):\n    return x*2*3  # __init__\n```\nand `a*b` here.\n"
TABLE = "表\n| 名 | value |\n|----|-------|\n| 甲 | 1     |\nend\n"
BARE = "a | b\n--|--\n1 | 2\n\n后"
INDENTED = "Run:\n    for x in y:\n        print(x)\n\n- a\n    - b\n"
MATH = "积分 $\\int f(x)\\,dx$ 是\nsecond line\n\\[\n a*b*c \\\\\n- d\n\\]\n2*3*4 and __init__"
WIDE = (
    "| "
    + " | ".join(f"column{i}of{i}" for i in range(24))
    + " |\n"
    + "|---" * 24
    + "|\n"
    + "| superlongword " * 24
    + "|"
)


def family(locator):
    return locator.evaluate("node => getComputedStyle(node).fontFamily")


def test_text_keeps_every_character_and_its_code_and_tables_have_one_width(serve, item):
    texts = [
        CODE,
        TABLE,
        BARE,
        INDENTED,
        MATH,
        "a|b or c|d\nx | y",
        "| one",
        "```\nopen",
        "",
        "普通 text",
        "a\r\n    b\r\n",
    ]
    served = serve([item("pair", text, text + "1", text + "2") for text in texts])
    mei = served.labeller()
    mono = {}
    for text in texts:
        assert mei.page.locator(".prompt .text").evaluate("node => node.textContent") == text
        mono[text] = mei.page.locator(".prompt .mono").evaluate_all("nodes => nodes.map(node => node.textContent)")
        assert all("mono" in family(one).lower() for one in mei.page.locator(".prompt .mono").all())
        mei.then_next("t", "Enter")
    assert mono[CODE] == ["```python\ndef f(x):\n    return x*2*3  # __init__\n```\n", "`a*b`"]
    assert mono[TABLE] == ["| 名 | value |\n|----|-------|\n| 甲 | 1     |\n"]
    assert mono[BARE] == ["a | b\n--|--\n1 | 2\n"]
    assert mono[INDENTED] == ["Run:\n    for x in y:\n        print(x)\n"]
    assert [mono[text] for text in texts[5:7]] == [[], []]


def test_a_key_shows_the_text_as_it_was_written_and_formatted_again(serve, item):
    served = serve([item("pair", "题 `x`", MATH, CODE), item("pair", "题", "*a*", "b")], markdown=True)
    mei = served.labeller()
    at = served.project.items()[0].candidates[0].response == MATH
    assert at
    formatted = sorted(mei.page.locator(".answer .text").evaluate_all("nodes => nodes.map(node => node.innerText)"))
    joined = "\n".join(formatted)
    for part in (
        "$\\int f(x)\\,dx$",
        "是\nsecond line",
        "a*b*c \\\\\n- d",
        "2*3*4 and __init__",
        "return x*2*3  # __init__",
    ):
        assert part in joined
    assert all("mono" in family(one).lower() for one in mei.page.locator(".answer code").all())
    button = mei.page.get_by_role("button", name="Text as written")
    assert button.get_attribute("aria-pressed") == "false"
    mei.press("r")
    assert button.get_attribute("aria-pressed") == "true"
    raw = mei.page.locator(".answer .text").evaluate_all("nodes => nodes.map(node => node.textContent)")
    assert sorted(raw) == sorted([MATH, CODE])
    assert all("mono" in family(one).lower() for one in mei.page.locator(".work-area .text").all())
    mei.then_next("t", "Enter")
    assert "*a*" in mei.page.locator(".answer .text").all_text_contents(), "it stays for the next item"
    mei.page.reload()
    button.wait_for()
    assert "*a*" in mei.page.locator(".answer .text").all_text_contents()
    button.click()
    assert sorted(mei.page.locator(".answer .text").all_inner_texts()) == ["a", "b"]
    mei.press("?")
    assert "Text as written" in mei.page.locator("dialog .keys").inner_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("markdown", [False, True])
@pytest.mark.parametrize("size", [{"width": 1280, "height": 800}, {"width": 360, "height": 740}])
def test_a_wide_table_is_scrolled_and_its_words_are_whole(serve, item, markdown, size):
    mei = serve([item("rating", "题", WIDE)], markdown=markdown).labeller(viewport=size)
    table = mei.page.locator(".answer .sideways")
    assert table.evaluate("node => node.scrollWidth > node.clientWidth")
    assert table.get_attribute("tabindex") == "0", "the keyboard scrolls it too"
    assert mei.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    if markdown:
        widths = table.locator("th").evaluate_all("cells => cells.map(cell => cell.clientWidth)")
        assert min(widths) > 70, "a word of twelve letters fits"


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [{"width": 1280, "height": 800}, {"width": 360, "height": 740}])
@pytest.mark.parametrize("task", ["pair", "ranking", "rating", "correction"])
def test_prompt_and_names_of_answers_stay_on_the_screen(serve, item, task, size):
    long = "\n".join(f"第 {i} 行" for i in range(29 if task == "ranking" else 150))
    answers = [long + name for name in ("甲", "乙", "丙")[: {"pair": 2, "ranking": 3}.get(task, 1)]]
    mei = serve([item(task, "为什么？\n" + "x" * 20, *answers)]).labeller(viewport=size)
    bar = mei.page.locator(".prompt-bar button")
    assert not bar.is_visible()
    first = mei.page.locator(".answer h2").first
    bottom = mei.page.locator(".answer").first.bounding_box()
    mei.page.evaluate("to => window.scrollTo(0, to)", bottom["y"] + bottom["height"] - 400)
    bar.wait_for()
    assert "为什么？" in bar.inner_text()
    inside, top = first.bounding_box(), bar.bounding_box()
    assert 0 <= top["y"] < 60
    assert top["y"] + top["height"] - 2 <= inside["y"] < 120, "below the prompt, not under it"
    bar.click()
    bar.wait_for(state="hidden")
    assert mei.page.evaluate("scrollY") == 0


def test_text_from_right_to_left_begins_at_the_right(serve, item):
    mei = serve([item("pair", "ما هي عاصمة فرنسا؟", "باريس", "Paris")]).labeller(
        viewport={"width": 1600, "height": 700}
    )
    card, text = (mei.page.locator(name).bounding_box() for name in (".prompt", ".prompt .text"))
    assert card["x"] + card["width"] - (text["x"] + text["width"]) < 30
