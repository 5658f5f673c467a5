"""One item in two tabs or browsers: what is written in each survives. And the time in which nobody works on an item."""

import pytest


def answer(page):
    return page.get_by_label("Your answer", exact=True)


def write(mei, page, text):
    """Write, until the server has it."""
    page.bring_to_front()
    with page.expect_response("**/api/draft"):
        answer(page).fill(text)


@pytest.fixture
def tabs(serve, item):
    """Somebody with one demonstration in two tabs."""
    served = serve([item("demonstration", f"题 {i}") for i in range(2)])
    mei = served.labeller()
    return mei, mei.open(page=mei.context.new_page())


def elsewhere(page):
    return page.locator(".others textarea").evaluate_all("boxes => boxes.map(box => box.value)")


def test_each_tab_keeps_its_own_text_over_a_reload_and_shows_the_others(tabs):
    """Also when one of them sends its own, and when it takes that back before the other one's was saved."""
    mei, other = tabs
    first = mei.item
    write(mei, mei.page, "第一 😀\n第二行")
    write(mei, other, "完全不同")
    assert elsewhere(other) == ["第一 😀\n第二行"]
    mei.open()
    mei.open(page=other)
    assert answer(mei.page).input_value() == "第一 😀\n第二行"
    assert answer(other).input_value() == "完全不同"
    assert elsewhere(mei.page) == ["完全不同"]
    assert elsewhere(other) == ["第一 😀\n第二行"]
    mei.page.bring_to_front()
    answer(mei.page).focus()
    mei.then_next("Control+Enter")
    dialog = other.locator("dialog")
    dialog.wait_for()
    assert dialog.locator("textarea").input_value() == "完全不同"
    assert "题" in dialog.inner_text()
    other.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    assert other.locator("#main").get_attribute("data-item") == mei.item != first
    assert [label["answer"]["text"] for label in mei.labels] == ["第一 😀\n第二行"]
    other.route("**/api/draft", lambda route: route.abort())
    answer(other).fill("还没有保存")
    mei.then_next("Escape", "u")
    dialog.wait_for()
    assert dialog.locator("textarea").input_value() == "还没有保存"


def set_visible(page, state):
    page.evaluate(
        "state => { Object.defineProperty(document, 'visibilityState', { value: state, configurable: true });"
        "document.dispatchEvent(new Event('visibilitychange')); }",
        state,
    )


NOW = """window.later = 0; const now = performance.now.bind(performance);
performance.now = () => now() + window.later;"""


@pytest.mark.exhaustive
def test_time_in_the_background_and_without_any_use_is_no_work(serve, item):
    """Nobody is at work while the page is hidden, or has lost the focus, or a minute after the last key."""
    mei = serve([item("rating", f"题 {i}", "答") for i in range(4)]).labeller()
    mei.page.add_init_script(NOW)
    mei.open()
    for leave, back in (
        (lambda: set_visible(mei.page, "hidden"), lambda: set_visible(mei.page, "visible")),
        *[[lambda n=n: mei.page.evaluate(f"window.dispatchEvent(new Event('{n}'))") for n in ("blur", "focus")]],
        (lambda: None, lambda: None),
    ):
        mei.press("4")
        leave()
        mei.page.evaluate("window.later += 10 * 60 * 1000")  # ten minutes of nothing
        mei.page.wait_for_timeout(100)
        back()
        mei.page.wait_for_timeout(300)
        mei.then_next("Enter")
    hidden, blurred, idle = mei.labels
    assert min(label["seconds"] for label in mei.labels) >= 600
    assert max(hidden["active"], blurred["active"]) < 59 <= idle["active"] < 500
