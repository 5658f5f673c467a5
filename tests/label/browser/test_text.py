"""What people see of a text: formatted with --markdown, code and tables in letters of one width, every character by a key."""

import pytest

from labelling import SEVERAL_TURNS

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


def test_answers_of_several_turns_are_shown_with_their_roles(serve, item):
    """In pairs and ratings, at work and to the owner: what was called, with what, and what came back."""
    prompt = [{"role": "system", "content": "简短"}, {"role": "user", "content": "猜"}]
    short = [{"role": "assistant", "content": "苹果?"}, *SEVERAL_TURNS[3:]]
    served = serve([item("pair", prompt, SEVERAL_TURNS, short), item("rating", prompt, SEVERAL_TURNS)])
    mei = served.labeller(role="owner")
    expected = [
        ["Assistant", "Calls a tool", 'guess({"词":"<b>香蕉</b>"})'],
        ["Tool · guess", "{'no': 1}"],
        ["Assistant", "你喜欢\n水果吗?"],
        ["Person", "喜欢 🍎"],
        ["Assistant", "reasoning_content", "也许", "是苹果。"],
    ]
    second = [["Assistant", "苹果?"], *expected[3:]]

    def shown(where):
        """The texts of each message of each answer."""
        cards = mei.page.locator(f"{where} .messages").all()
        parts = "nodes => nodes.map(one => [...one.querySelectorAll('.role, .text')].map(part => part.innerText))"
        return [card.locator(".message").evaluate_all(parts) for card in cards]

    assert shown(".prompt") == [[["System", "简短"], ["Person", "猜"]]]
    assert sorted(shown(".answer"), key=len) == [second, expected]
    mei.then_next("1", "4", "Enter")
    assert shown(".answer") == [expected]
    assert mei.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    mei.then_next("6", "Enter")
    assert [label["answer"].get("rating") for label in mei.labels] == [None, 6]
    mei.open(f"/labels?item={served.project.items()[0].item_id}")
    assert expected in shown(".answer")


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
