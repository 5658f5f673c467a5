"""What people see of a text: formatted with --markdown, code and tables in letters of one width, every character by a key."""

import pytest

CODE = "用这个：\n```python\ndef f(x):\n    return x*2*3  # __init__\n```\nand `a*b` here.\n"
TABLE = "表\n| 名 | value |\n|----|-------|\n| 甲 | 1     |\nend\n"
BARE = "a | b\n--|--\n1 | 2\n\n后"
INDENTED = "Run:\n    for x in y:\n        print(x)\n\n- a\n    - b\n"
MATH = "积分 $\\int f(x)\\,dx$ 是\nsecond line\n\\[\n a*b*c \\\\\n- d\n\\]\n2*3*4 and __init__"
WIDE = "".join(f"| column{i}of{i} " for i in range(24)) + "|\n" + "|---" * 24 + "|\n" + "| superlongword " * 24 + "|"


def is_mono(mei, selector):
    """Whether letters have one width, of each of these: True, False, or both."""
    families = mei.page.locator(selector).evaluate_all("nodes => nodes.map(one => getComputedStyle(one).fontFamily)")
    return {"mono" in one.lower() for one in families}


def test_text_keeps_every_character_and_its_code_and_tables_have_one_width(serve, item):
    mono = {
        CODE: ["```python\ndef f(x):\n    return x*2*3  # __init__\n```\n", "`a*b`"],
        TABLE: ["| 名 | value |\n|----|-------|\n| 甲 | 1     |\n"],
        BARE: ["a | b\n--|--\n1 | 2\n"],
        INDENTED: ["Run:\n    for x in y:\n        print(x)\n"],
        **{text: [] for text in ("a|b or c|d\nx | y", "| one", "普通 text")},
    }
    texts = [*mono, MATH, "```\nopen"]
    prompt = "a\r\n    b\r\n"
    mei = serve([item("ranking", prompt, *texts)]).labeller()
    found = mei.page.locator(".answer .text").evaluate_all(
        "nodes => nodes.map(node => [node.textContent, [...node.querySelectorAll('.mono')].map(one => one.textContent)])"
    )
    assert sorted(text for text, _ in found) == sorted(texts)
    assert {text: parts for text, parts in found if text in mono} == mono
    assert mei.page.locator(".prompt .text").evaluate("node => node.textContent") == prompt
    assert is_mono(mei, ".answer .mono") == {True}


def test_a_key_shows_the_text_as_it_was_written_and_formatted_again(serve, item):
    served = serve([item("pair", "题 `x`", MATH, CODE), item("pair", "题", "*a*", "b")], markdown=True)
    mei = served.labeller()
    formatted = sorted(mei.page.locator(".answer .text").evaluate_all("nodes => nodes.map(node => node.innerText)"))
    joined = "\n".join(formatted)
    kept = ("$\\int f(x)\\,dx$", "是\nsecond line", "a*b*c \\\\\n- d", "2*3*4 and __init__", "return x*2*3  # __init__")
    assert [part for part in kept if part not in joined] == []
    assert is_mono(mei, ".answer code") == {True}
    button = mei.page.get_by_role("button", name="Text as written")
    assert button.get_attribute("aria-pressed") == "false"
    mei.press("r")
    assert button.get_attribute("aria-pressed") == "true"
    raw = mei.page.locator(".answer .text").evaluate_all("nodes => nodes.map(node => node.textContent)")
    assert sorted(raw) == sorted([MATH, CODE])
    assert is_mono(mei, ".work-area .text") == {True}
    mei.then_next("t", "Enter")
    assert "*a*" in mei.page.locator(".answer .text").all_text_contents(), "it stays for the next item"
    mei.page.reload()
    button.wait_for()
    assert "*a*" in mei.page.locator(".answer .text").all_text_contents()
    button.click()
    assert sorted(mei.page.locator(".answer .text").all_inner_texts()) == ["a", "b"]
    mei.press("?")
    assert "Text as written" in mei.page.locator("dialog .keys").inner_text()


PHONE, SCREEN = {"width": 360, "height": 740}, {"width": 1280, "height": 800}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("markdown", "size"), [(False, PHONE), (True, PHONE), (True, SCREEN)])
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
@pytest.mark.parametrize(
    ("task", "size"), [("pair", SCREEN), ("ranking", PHONE), ("rating", PHONE), ("correction", SCREEN)]
)
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
