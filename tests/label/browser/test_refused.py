"""What the server refuses: whoever sent it is told what it was, why, and keeps what they wrote."""

import pytest

TEXT = "按天算，共 12 天。😀\n第二行"


def elsewhere(served, mei, answer, *, undo=False):
    """The item that is on the page is answered in another browser, and maybe taken back there."""
    person = mei.person.person_id
    held = served.project.held(person)
    served.project.label(person, held.item.item_id, answer, nonce=f"elsewhere {held.item.item_id}", seconds=1.0)
    if undo:
        served.project.undo(person, "elsewhere2")


def kept(mei):
    return mei.page.evaluate("Object.keys(localStorage).filter(name => name.includes('outbox'))")


@pytest.mark.exhaustive
def test_a_kept_label_that_is_no_longer_wanted(serve, item):
    """It waited in a browser that was closed; meanwhile the item was labelled in another."""
    served = serve([item("demonstration", f"房租怎么算？{i}\u2028" + 200 * "长") for i in range(2)])
    mei = served.labeller()
    mei.page.route("**/api/label", lambda route: route.abort())
    mei.page.get_by_label("Your answer").fill(TEXT)
    mei.press("Control+Enter")
    mei.page.get_by_text("Your label is kept").wait_for()
    mei.page.close()
    elsewhere(served, mei, {"text": "另一个"})
    mei.page = mei.context.new_page()
    mei.open()
    dialog = mei.page.get_by_role("dialog", name="A label was not saved")
    dialog.get_by_text("the item is no longer yours").wait_for()
    about = dialog.get_by_text("房租怎么算？0").text_content()
    assert about.endswith("长 …")
    assert len(about) < 150
    assert dialog.get_by_label("Your text, to copy").input_value() == TEXT
    assert kept(mei) == []
    mei.press("Escape")
    assert mei.page.get_by_role("region", name="Prompt").get_by_text("房租怎么算？1").is_visible()
    mei.page.reload()
    mei.page.locator("main[aria-busy=false]").wait_for()
    assert mei.page.get_by_role("dialog").count() == 0, "it is said once"
    assert [label["answer"]["text"] for label in mei.labels] == ["另一个"]


def test_what_was_written_is_not_lost_with_the_item(serve, item):
    served = serve([item("demonstration", "题 0"), item("pair", "题 1", "a", "b"), item("pair", "题 2", "a", "b")])
    mei = served.labeller()
    dialog = mei.page.get_by_role("dialog", name="A label was not saved")
    mei.page.get_by_label("Your answer").fill(TEXT)
    elsewhere(served, mei, {"text": "另一个"})
    mei.press("Control+Enter")
    assert dialog.get_by_label("Your text, to copy").input_value() == TEXT
    assert dialog.get_by_text("题 0").is_visible()
    mei.press("Escape")
    dialog.wait_for(state="detached")
    mei.press("2", "6", "c")
    mei.page.keyboard.insert_text(TEXT)
    elsewhere(served, mei, {"preferred": 0, "strength": 1, "both_bad": False})
    mei.press("Control+Enter")
    assert dialog.get_by_label("Comment").input_value() == TEXT
    assert dialog.get_by_text("题 1").is_visible()


@pytest.mark.exhaustive
def test_a_tab_with_a_label_that_was_taken_back(serve, item):
    """The item is this person's again, with what they said in the other browser, so the old page's answer does not count."""
    served = serve([item("pair", "p", "a", "b")])
    mei = served.labeller()
    mei.press("2", "6")
    elsewhere(served, mei, {"preferred": 0, "strength": 1, "both_bad": False}, undo=True)
    mei.press("Enter")
    mei.page.locator("#missing").get_by_text("You no longer hold this item").wait_for()
    assert mei.labels == []
    pressed = mei.page.locator("[aria-pressed=true]").all_inner_texts()
    assert pressed[1].endswith("Negligibly"), "what was said elsewhere is on the screen"
    mei.press("6", "Enter")
    mei.page.get_by_role("heading", name="Nothing to label now").wait_for()
    assert [label["answer"]["strength"] for label in mei.labels] == [4]


@pytest.mark.exhaustive
def test_a_tab_of_an_older_session(serve, item):
    """Its token is refused; what was chosen is there again after the page was loaded anew."""
    served = serve([item("pair", "p", "a", "b")])
    mei = served.labeller()
    session = served.project.redeem(served.project.invite(mei.person.person_id))
    mei.context.add_cookies([{"name": served.app.site.access.cookie, "value": session, "url": served.url}])
    mei.press("2", "6", "Enter")
    mei.page.locator("#banner").get_by_text("reload the page").wait_for()
    assert mei.labels == []
    mei.page.reload()
    mei.page.locator("[aria-pressed=true]").nth(1).wait_for()
    mei.press("Enter")
    mei.page.get_by_role("heading", name="Nothing to label now").wait_for()
    assert [label["answer"]["strength"] for label in mei.labels] == [4]
