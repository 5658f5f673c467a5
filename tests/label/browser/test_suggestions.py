"""A suggestion is shown as one, in the order of the screen, and counts only once somebody takes it over and sends it."""

import pytest


@pytest.fixture
def mei(serve, item):
    tie = {"strength": None, "both_bad": False}
    items = [
        item("pair", "问题", "甲 😀", "乙", suggestion={"preferred": 1} | tie),
        item("ranking", "排序", "a", "b", "c", suggestion={"ranks": [2, 1, 2]}),
        item("rating", "打分", "x", suggestion={"rating": 6, "flags": []}),
        item("demonstration", "写", suggestion={"text": "你好 😀\n第二行"}),
        item("pair", "无建议", "丙", "丁"),
    ]
    return serve(items, repeats=0, overlap=0).labeller()


def test_shown_taken_over_and_sent(mei):
    page, box = mei.page, mei.page.get_by_role("region", name="Suggested")
    cards = page.locator(".answer .text").all_text_contents()
    assert f"Answer {cards.index('乙') + 1} is better" in box.text_content()
    mei.press("Enter")
    assert "Choose" in page.locator("#missing").text_content()
    assert (mei.labels, page.locator(".choice[aria-pressed=true]").count()) == ([], 0), "nothing was chosen for her"
    mei.press("a")
    assert page.locator(".answer.chosen .text").text_content() == "乙"
    assert mei.labels == []
    mei.press("5")
    mei.then_next("Enter")
    assert (mei.labels[-1]["answer"]["preferred"], mei.labels[-1]["suggestion_followed"]) == (1, True)

    cards = page.locator(".answer .text").all_text_contents()
    assert f"Answer {cards.index('b') + 1} > " in box.text_content()
    mei.press("a")
    mei.then_next("Enter")
    assert (mei.labels[-1]["answer"], mei.labels[-1]["suggestion_followed"]) == ({"ranks": [2, 1, 2]}, True)

    assert "Quality 6 of 7" in box.text_content()
    mei.press("3")
    mei.then_next("Enter")
    assert mei.labels[-1]["suggestion_followed"] is False

    text = page.locator("textarea.writing")
    assert text.input_value() == ""
    mei.press("我")
    box.get_by_role("button").click()
    assert text.input_value() == "你好 😀\n第二行"
    mei.press("Control+z")
    assert text.input_value() == "我", "what was written is not lost"
    mei.press("Escape", "a")
    mei.then_next("Control+Enter")
    assert (mei.labels[-1]["answer"], mei.labels[-1]["suggestion_followed"]) == ({"text": "你好 😀\n第二行"}, True)

    assert box.count() == 0
    mei.press("a", "t", "Enter")
    page.get_by_role("heading", name="Nothing to label now").wait_for()
    assert "suggestion_followed" not in mei.labels[-1]
    owner = mei.served.labeller("Owner", "owner", "/stats")
    assert owner.page.get_by_role("columnheader", name="Followed").count() == 1
    assert "75.0 %" in owner.page.locator(".tile", has_text="Suggestions followed").text_content()
    owner.open(f"/labels?item={mei.served.project.items()[0].item_id}")
    assert "Suggested: Answer 2 is better" in owner.page.locator("#main").text_content()
