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


@pytest.mark.exhaustive
def test_both_texts_outlive_the_tabs(tabs):
    mei, other = tabs
    write(mei, mei.page, "第一")
    write(mei, other, "完全不同")
    other.close()
    mei.page.close()
    mei.page = mei.context.new_page()
    mei.page.goto("about:blank")
    mei.page = mei.open(page=mei.context.new_page())
    assert sorted([answer(mei.page).input_value(), *elsewhere(mei.page)]) == ["完全不同", "第一"]


@pytest.mark.exhaustive
def test_both_texts_of_two_browsers(serve, item):
    served = serve([item("demonstration", "题")])
    mei = served.labeller()
    session = mei.context.cookies()
    phone = served.context()
    phone.add_cookies(session)
    other = mei.open(page=phone.new_page())
    write(mei, mei.page, "第一")
    write(mei, other, "完全不同")
    write(mei, mei.page, "第一，更多")
    assert elsewhere(mei.page) == ["完全不同"]
    mei.then_next("Control+Enter")
    answer(other).press("Control+Enter")
    other.locator("dialog").wait_for()
    assert other.locator("dialog textarea").input_value() == "完全不同"
    assert [label["answer"]["text"] for label in mei.labels] == ["第一，更多"]


@pytest.mark.exhaustive
def test_a_second_tab_that_nothing_is_written_in_is_no_trouble(tabs):
    mei, other = tabs
    write(mei, mei.page, "第一")
    mei.open(page=other)
    assert (answer(other).input_value(), elsewhere(other)) == ("第一", [])
    write(mei, other, "第一，更多")
    mei.open(page=other)
    assert (answer(other).input_value(), elsewhere(other)) == ("第一，更多", [])
    mei.page.bring_to_front()
    answer(mei.page).focus()
    mei.then_next("Control+Enter")
    other.locator("dialog").wait_for()
    assert other.locator("dialog textarea").input_value() == "第一，更多"


def set_visible(page, state):
    page.evaluate(
        "state => { Object.defineProperty(document, 'visibilityState', { value: state, configurable: true });"
        "document.dispatchEvent(new Event('visibilitychange')); }",
        state,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("why", ["hidden", "blur"])
def test_time_in_the_background_is_no_work(serve, item, why):
    mei = serve([item("rating", f"题 {i}", "答") for i in range(2)]).labeller()
    mei.press("4")
    if why == "hidden":
        set_visible(mei.page, "hidden")
    else:
        mei.page.evaluate("window.dispatchEvent(new Event('blur'))")
    mei.page.wait_for_timeout(3000)
    if why == "hidden":
        set_visible(mei.page, "visible")
    else:
        mei.page.evaluate("window.dispatchEvent(new Event('focus'))")
    mei.page.wait_for_timeout(300)
    mei.then_next("Enter")
    (label,) = mei.labels
    assert label["seconds"] >= 3
    assert 0.2 <= label["active"] <= label["seconds"] - 2.9


def test_time_without_any_use_ends_after_a_minute(serve, item):
    served = serve([item("rating", f"题 {i}", "答") for i in range(2)])
    mei = served.labeller()
    mei.page.add_init_script(
        "{ const now = performance.now.bind(performance); window.later = 0; performance.now = () => now() + window.later; }"
    )
    mei.open()
    mei.press("4")
    mei.page.evaluate("window.later = 10 * 60 * 1000")  # ten minutes of nothing
    mei.page.wait_for_timeout(100)
    mei.then_next("Enter")
    (label,) = mei.labels
    assert label["seconds"] >= 600
    assert 59 <= label["active"] < 500
