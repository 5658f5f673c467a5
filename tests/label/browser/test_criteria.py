"""Criteria of each answer, by keyboard, by pointer, kept in drafts."""

import pytest

HELPFUL = "{name: helpful, scale: 5, question: 'Does it help?'}"
HONEST = "{name: 诚实, labels: [否, 部分, 是], required: false}"


@pytest.fixture
def mei(serve, item):
    items = [item("pair", f"问题 {i}", "甲 😀", "乙") for i in range(2)] + [
        item("ranking", "排序", "a", "b", "c"),
        item("rating", "打分", "x"),
    ]
    return serve(items, criteria=(HELPFUL, HONEST)).labeller()


def checked(somebody):
    """What is chosen of each criterion, by answer."""
    return somebody.page.locator(".criterion").evaluate_all(
        "sets => sets.map(set => set.querySelector(':checked')?.parentElement.querySelector('span').textContent ?? null)"
    )


def test_by_keyboard(mei):
    """k goes to the first criterion; a digit chooses and goes on; after the last one digits are for the answers again.

    Every task that shows answers asks.
    """
    mei.press("1", "5", "Enter")
    assert "Choose a value for helpful of answer 1 first" in mei.page.locator("#missing").text_content()
    mei.press("4", "3", "2", "1")
    assert checked(mei) == ["4", "是", "2", "否"]
    mei.then_next("k", "Escape", "2", "6", "k", "ArrowRight", "Enter")
    mei.press("k", "1", "1", "1", "1", "t")
    mei.then_next("Enter")
    mei.press("k", "5", "1", "4", "1", "3", "1", "Shift+ArrowDown")
    mei.then_next("Enter")
    mei.press("k", "2", "2", "7", "Enter")
    mei.page.get_by_role("heading", name="Nothing to label now").wait_for()
    label, _, ranking, rating = mei.labels
    at, answer = label["order"], label["answer"]
    assert (answer["preferred"], answer["strength"]) == (at[1], 4), "2 and 6 were for the answers"
    assert [answer["criteria"][one] for one in at] == [{"helpful": 5, "诚实": "是"}, {"helpful": 2, "诚实": "否"}]
    assert [ranking["answer"]["criteria"][at]["helpful"] for at in ranking["order"]] == [5, 4, 3]
    assert rating["answer"] == {"rating": 7, "flags": [], "criteria": [{"helpful": 2, "诚实": "部分"}]}


@pytest.mark.exhaustive
def test_kept_in_a_draft_and_given_back_by_undo(mei):
    mei.press("k", "4", "Backspace", "k", "3", "2")
    mei.page.locator(".criterion").nth(2).get_by_label("5", exact=True).click()
    mei.press("t")  # a click leaves keys to the question
    assert checked(mei)[2] == "5"
    mei.page.reload()
    mei.page.locator(".criterion :checked").first.wait_for(state="attached")
    before = checked(mei)
    assert before[2] == "5"
    mei.then_next("Enter")
    mei.then_next("u")
    assert checked(mei) == before
