"""Every task from the first key to the last without a pointer; what is stored is what was seen on the screen."""

import pytest

TEXT = "租约 😀\u2028第二行\n\u202eabc\u202c "


def shown(somebody):
    """The answers in the order of the screen."""
    return somebody.page.locator(".answer .text").all_text_contents()


def test_pairs(serve, item):
    served = serve([item("pair", f"{TEXT}{i}", f"甲{i} 😀\u2028x", f"乙{i}") for i in range(4)])
    mei = served.labeller()
    first = shown(mei)
    mei.press("Enter")
    assert mei.page.locator("#missing").text_content() == "Choose an answer first"
    mei.press("1", "Enter")
    assert mei.page.locator("#missing").text_content() == "How much better? Press 3 to 6"
    mei.press("5", "2", "Enter")  # another answer, and not a strength of the first
    assert mei.page.locator("[aria-pressed=true]").all_inner_texts() == ["2\nAnswer 2 is better"]
    assert mei.labels == [], "how much better was said of the other answer"
    mei.then_next("6", "Enter")
    mei.press("Backspace", "3", "6", "7", "t", "4")  # a strength without a side does nothing
    assert mei.page.locator("[aria-pressed=true]").all_inner_texts() == ["t\nTie"]
    mei.then_next("Enter")
    mei.then_next("b", "c", "都", "Escape", "Enter")
    mei.then_next("ArrowLeft", "3", "Enter")
    mei.page.get_by_role("heading", name="Nothing to label now").wait_for()
    one, two, three, four = mei.labels
    assert one["answer"] == {"preferred": one["order"][1], "strength": 4, "both_bad": False}
    responses = {i.item_id: [c.response for c in i.candidates] for i in served.project.items()}[one["item"]]
    assert first == [responses[at] for at in one["order"]], "the order on the screen is the one that is stored"
    assert two["answer"] == {"preferred": None, "strength": None, "both_bad": False}
    assert three["answer"] == {"preferred": None, "strength": None, "both_bad": True}
    assert three["comment"] == "都"
    assert four["answer"] == {"preferred": four["order"][0], "strength": 1, "both_bad": False}
    assert all(label["seconds"] < 60 for label in mei.labels)


def test_rankings_ratings_and_texts(serve, item):
    items = [
        item("ranking", TEXT, *(f"{name} 😀\u2028" for name in "甲乙丙丁戊")),
        item("rating", TEXT, "答案 😀"),
        item("demonstration", TEXT),
        item("correction", TEXT, "Rent is 1,200.\r\n😀\u2028房租"),
    ]
    mei = serve(items).labeller()
    missing = mei.page.locator("#missing")
    mei.press("Enter")
    assert "Nothing moved yet" in missing.text_content()
    mei.press("ArrowDown", "Shift+ArrowDown", "Shift+ArrowDown")  # the first row to the third place: 2 3 1 4 5
    mei.press("ArrowDown", "=")  # 2 3 1=4 5
    mei.press("ArrowDown", "1")  # 5 2 3 1=4
    assert mei.page.locator(".rank").all_text_contents() == ["1", "2", "3", "4", "4"]
    mei.then_next("Enter")

    mei.press("6", "ArrowDown", "Space", "ArrowDown", "ArrowDown", "Space")
    mei.then_next("2", "Enter")

    mei.press("Control+Enter")
    assert missing.text_content() == "Write an answer first"
    mei.page.keyboard.type("第一行 s f u ? 😀")  # letters are text here, not commands
    mei.press("Enter")
    mei.page.keyboard.type("second line")
    mei.then_next("Control+Enter")

    mei.press("Control+Enter")
    assert "Change the answer first" in missing.text_content()
    mei.press("Control+End")
    mei.page.keyboard.type("，按月")
    assert mei.page.locator("ins").all_text_contents() == ["，按月"]
    assert mei.page.locator("del").count() == 0
    mei.press("Escape")
    mei.then_next("Enter")

    ranking, rating, written, corrected = mei.labels
    places = dict(zip(ranking["order"], range(5), strict=True))
    by_place = [4, 2, 3, 4, 1]
    assert ranking["answer"] == {"ranks": [by_place[places[candidate]] for candidate in range(5)]}
    assert rating["answer"] == {"rating": 2, "flags": ["fails-instruction", "hallucination"]}
    assert written["answer"] == {"text": "第一行 s f u ? 😀\nsecond line"}
    assert corrected["answer"] == {"text": "Rent is 1,200.\r\n😀\u2028房租，按月"}, "with its line breaks"


def test_chat(serve, item):
    """Nothing to choose is offered while a message is written."""
    served = serve([item("chat", "我要提前搬走 😀")], policy=True)
    mei = served.labeller()
    submit = mei.page.locator("#submit")
    assert not submit.is_visible()
    mei.press("Control+Enter")  # what the item suggests to begin with
    mei.page.locator(".answer").first.wait_for()
    assert submit.is_visible()
    chosen = shown(mei)[1]
    mei.press("2", "5", "Enter")
    mei.page.get_by_role("heading", name="Your message").wait_for()
    assert not submit.is_visible()
    assert chosen in mei.page.locator(".message.assistant .text").all_text_contents()
    mei.page.keyboard.type("And the deposit?")
    mei.press("Control+Enter")
    mei.page.locator(".answer").first.wait_for()
    mei.then_next("t", "e")
    one, two = (label["answer"] for label in mei.labels)
    assert one["messages"] == [{"role": "user", "content": "我要提前搬走 😀"}]
    assert [m["role"] for m in two["messages"]] == ["user", "assistant", "user"]
    assert two["messages"][1]["content"] == one["responses"][one["preferred"]]["response"] == chosen
    assert (one["strength"], one["last"], two["preferred"], two["last"]) == (3, False, None, True)


def test_skip_flag_comment_and_undo(serve, item):
    served = serve([item("pair", f"p{i}", "a", "b") for i in range(2)])
    mei = served.labeller()
    first = mei.item
    mei.press("f", "2", "Enter")
    assert "Unsafe" in mei.page.locator(".flag-note").text_content()
    mei.press("s", "3", "Tab", "太", "难")
    mei.then_next("Enter")
    (skip,) = (event.content for event in served.project.events() if event.kind == "skip")
    assert (skip["item"], list(skip["flags"]), skip["reason"]) == (first, ["unsafe"], "cannot-decide: 太难")
    mei.then_next("u")
    assert mei.item == first, "a skip that is taken back brings its item again"
    mei.then_next("1", "4", "Enter")
    mei.then_next("u")
    assert mei.item == first
    assert mei.page.locator(".sides [aria-pressed=true]").get_attribute("aria-label") == "Answer 1 is better", (
        "with the old answer"
    )
    mei.then_next("2", "Backspace", "2", "3", "Enter")
    (label,) = mei.labels
    assert label["answer"] == {"preferred": label["order"][1], "strength": 1, "both_bad": False}


def test_help_instructions_and_single_keys(serve, item):
    """Help and instructions open and close. WCAG 2.1.4: somebody who dictates must not label by speaking."""
    mei = serve([item("pair", f"p{i}", "a", "b") for i in range(2)], instructions="先看事实。").labeller()
    for key, name, closes in (("i", "#instructions", "i"), ("?", "dialog", "Escape")):
        pane = mei.page.locator(name)
        assert pane.is_visible() == (key == "i"), "instructions that were not seen yet are open"
        mei.press(key)
        assert pane.is_visible() == (key == "?")
        mei.press(closes)
        assert pane.is_visible() == (key == "i")
    # Caps lock, and a Cyrillic layout, on which the key of t is е
    dispatch(mei, "е", "KeyT")
    mei.then_next("Enter")
    mei.then_next("U")
    mei.then_next("B", "Enter")
    assert [label["answer"]["both_bad"] for label in mei.labels] == [True]
    mei.press("?")
    mei.page.get_by_label("Single-key shortcuts").uncheck()
    mei.press("Escape")
    mei.page.locator("dialog").wait_for(state="detached")  # the browser tells the page later that it has closed it
    mei.press("1", "s")
    assert mei.page.locator("[aria-pressed=true], dialog").count() == 0


def test_undo_that_is_held_down_takes_one_label_back_and_redo_puts_it_there_again(serve, item):
    served = serve([item("pair", f"题 {i}", "甲", "乙") for i in range(6)])
    mei = served.labeller()
    for _ in range(5):
        mei.then_next("1", "5", "c", "好", "Escape", "Enter")
    before = mei.labels
    last = before[-1]["item"]
    mei.page.keyboard.down("u")
    for _ in range(40):  # what a keyboard sends while a key is held down
        mei.page.keyboard.down("u")
        mei.page.wait_for_timeout(20)
    mei.page.keyboard.up("u")
    mei.page.wait_for_function("id => document.getElementById('main').dataset.item === id", arg=last)
    assert mei.labels == before[:-1]
    mei.page.get_by_role("button", name="Redo").wait_for()
    mei.then_next("y")
    (again,) = mei.labels[4:]
    assert again.pop("again")
    assert [*before[:-1], again] == before
    mei.press("y")
    mei.page.locator("#missing").get_by_text("nothing to redo").wait_for()
    assert len(mei.labels) == 5


AZERTY = {"Digit1": "&", "Digit2": "é", "Digit3": '"', "Digit4": "'", "Digit5": "(", "Digit6": "-", "Digit7": "è"}


def dispatch(mei, key, code, **more):
    """A key of another keyboard: Chromium's own has none of them."""
    event = {"key": key, "code": code, "bubbles": True, "cancelable": True, **more}
    mei.page.evaluate("init => document.activeElement.dispatchEvent(new KeyboardEvent('keydown', init))", event)


@pytest.mark.exhaustive
def test_digits_are_keys_by_their_place(serve, item):
    """A French keyboard writes other characters there, a Persian one other digits, a keypad has codes of its own."""
    mei = serve([item("pair", "p", "甲", "乙"), item("rating", "q", "答"), item("ranking", "r", *"甲乙丙")]).labeller()
    dispatch(mei, AZERTY["Digit2"], "Digit2")
    assert mei.page.locator(".sides [aria-pressed=true]").inner_text() == "2\nAnswer 2 is better"
    dispatch(mei, "1", "Digit1", shiftKey=True)  # digits are above the others there
    assert mei.page.locator(".sides [aria-pressed=true]").inner_text() == "1\nAnswer 1 is better"
    dispatch(mei, "۶", "Digit6")
    mei.then_next("Enter")
    dispatch(mei, AZERTY["Digit7"], "Digit7")
    assert mei.page.locator(".rates [aria-pressed=true]").inner_text() == "7"
    dispatch(mei, "3", "Numpad3")
    assert mei.page.locator(".rates [aria-pressed=true]").inner_text() == "3"
    dispatch(mei, "End", "Numpad1")  # a keypad without num lock
    assert mei.page.locator(".rates [aria-pressed=true]").inner_text() == "3"
    mei.press("s")
    dispatch(mei, AZERTY["Digit2"], "Digit2")
    assert mei.page.locator("dialog input:checked").get_attribute("value") == "not-my-field"
    mei.press("Escape")
    mei.page.locator("dialog").wait_for(state="detached")
    mei.then_next("Enter")
    mei.press("ArrowDown", "ArrowDown")
    dispatch(mei, "=", "Digit0", shiftKey=True)  # a German keyboard
    assert mei.page.locator(".rank").all_text_contents() == ["1", "1", "3"]
    mei.then_next("Enter")
    assert [label["answer"].get("strength", label["answer"].get("rating")) for label in mei.labels] == [4, 3, None]
