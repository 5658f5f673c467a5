"""The owner's list of labels, one item with what everybody says, and a correction."""

import pytest

from labelling import send

FIRST = {"preferred": 0, "strength": 3, "both_bad": False}
SECOND = {"preferred": 1, "strength": 2, "both_bad": False}
HELPFUL = "{name: 有用, scale: 5}"


@pytest.fixture
def served(serve, item):
    """Two people, who differ about the first of 60 pairs, and a ranking with criteria."""
    many = [item("pair", f"问题 {i} 😀", f"甲 {i}", f"乙 {i}", needed=2) for i in range(30)]
    served = serve([*many, item("ranking", "排序", "a", "b", "c"), item("demonstration", "写")], criteria=(HELPFUL,))
    for name in ("王芳", "Ada"):
        person = served.project.add_person(name, "annotator").person_id
        while (held := served.project.next_item(person)) is not None:
            pair = SECOND if name == "Ada" and held.item == many[0] else FIRST
            answers = {"pair": pair, "ranking": {"ranks": [1, 2, 3]}, "demonstration": {"text": "好 <b>"}}
            said = {"criteria": [{"有用": 3} for _ in held.item.candidates]} if held.item.candidates else {}
            send(served.project, person, answers[held.item.task] | said)
    return served


def rows(owner):
    return owner.page.locator("tbody tr")


@pytest.mark.exhaustive
def test_the_list_is_filtered_and_paged(served):
    owner = served.labeller("Mei", "owner", "/labels")
    owner.page.get_by_text("62 labels", exact=True).wait_for()
    assert rows(owner).count() == 50
    owner.page.get_by_role("button", name="Next page").press("Enter")
    owner.page.get_by_text("Page 2 of 2").wait_for()
    assert rows(owner).count() == 12
    owner.page.get_by_label("Name").select_option(label="Ada")
    owner.page.get_by_label("Only where people differ").press("Space")
    owner.press("Tab", "Enter")
    owner.page.get_by_text("1 label", exact=True).wait_for()
    assert "问题 0 😀" in rows(owner).inner_text()
    assert "Answer 2 is better · Slightly · 有用: 3 / 3" in rows(owner).inner_text()
    owner.page.reload()
    owner.page.get_by_text("1 label", exact=True).wait_for()
    owner.page.go_back()
    owner.page.get_by_text("Page 2 of 2").wait_for()
    owner.page.get_by_label("Search texts").fill("乙 17")
    owner.press("Enter")
    owner.page.get_by_text("2 labels", exact=True).wait_for()
    cem = served.labeller("Cem", "annotator")
    assert cem.page.get_by_role("link", name="Labels", exact=True).count() == 0


def test_labels_are_corrected(served):
    """A pair by the keyboard; a text and a ranking."""
    owner = served.labeller("Mei", "owner", "/labels?differ=1")
    owner.page.get_by_role("link", name="问题 0 😀").first.press("Enter")
    card = owner.page.get_by_label("Label of Ada")
    card.get_by_role("button", name="Correct").press("Enter")
    owner.page.get_by_label("Which answer is better").select_option("0")
    owner.page.get_by_label("Answer 2: 有用").select_option(label="5")
    owner.page.get_by_label("Reason, if you like").fill("看错了 <b>")
    owner.press("Enter")
    history = card.get_by_role("list", name="History")
    history.wait_for()
    assert "Answer 2 is better · Slightly · 有用: 3 / 3" in history.locator("del").inner_text()
    assert "Answer 1 is better · Slightly · 有用: 3 / 5" in history.locator("ins").inner_text()
    assert "看错了 <b>" in history.inner_text()
    (label,) = (one for one in served.project.labels() if one.event.content.get("corrected_by"))
    assert (label.person.name, label.event.content["answer"]["preferred"]) == ("Ada", 0)
    assert label.event.content["answer"]["criteria"] == [{"有用": 3}, {"有用": 5}]
    owner.page.get_by_role("button", name="Back to the list").press("Enter")
    owner.page.get_by_text("No label matches.").wait_for()

    owner.open("/labels")
    owner.page.get_by_role("link", name="写").click()
    owner.page.get_by_role("button", name="Correct").click()
    owner.page.get_by_label("Text", exact=True).fill("更好")
    owner.page.get_by_role("button", name="Correct").last.click()
    owner.page.get_by_role("list", name="History").wait_for()
    owner.open("/labels?search=排序")
    owner.page.get_by_role("link", name="排序").click()
    owner.page.get_by_role("button", name="Correct").click()
    owner.page.get_by_role("combobox", name="Answer 1", exact=True).select_option("3")
    owner.page.get_by_role("combobox", name="Answer 2", exact=True).select_option("1")
    owner.page.get_by_role("button", name="Correct").last.click()
    owner.page.get_by_role("list", name="History").wait_for()
    said = [one.event.content["answer"] for one in served.project.labels() if "corrected_by" in one.event.content]
    assert [one["ranks"] for one in said if "ranks" in one] == [[3, 1, 3]]
    assert [one["text"] for one in said if "text" in one] == ["更好"]
