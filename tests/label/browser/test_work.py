"""The pointer, undo, other tabs, lost connections, the back button, drafts: nothing is lost and nothing is counted twice."""

import time

import pytest


def drag(mei, moved, onto, share):
    """Drag a line of the ranking to a height (0 top, 1 bottom) of another."""
    start, end = (mei.page.locator(f".rank-row[data-place='{place}'] .grip").bounding_box() for place in (moved, onto))
    mouse = mei.page.mouse
    mouse.move(start["x"] + 40, start["y"] + start["height"] / 2)
    mouse.down()
    mouse.move(end["x"] + 42, (start["y"] + end["y"]) / 2, steps=3)
    mouse.move(end["x"] + 42, end["y"] + share * end["height"], steps=3)
    mouse.up()


def order(mei):
    rows = mei.page.locator(".rank-row")
    return [(int(row.get_attribute("data-place")), int(row.locator(".rank").text_content())) for row in rows.all()]


@pytest.mark.exhaustive
def test_ranking_by_dragging(serve, item):
    """Long answers are folded meanwhile."""
    long = "\n".join(f"行 {i}" for i in range(400))
    mei = serve([item("ranking", "p", *"甲乙丙丁"), item("ranking", "p", "甲 😀", long)]).labeller()
    drag(mei, 3, 0, 0.1)
    assert order(mei) == [(3, 1), (0, 2), (1, 3), (2, 4)]
    drag(mei, 2, 0, 0.5)
    assert order(mei) == [(3, 1), (0, 2), (2, 2), (1, 4)]
    drag(mei, 3, 1, 0.95)
    assert order(mei) == [(0, 1), (2, 1), (1, 3), (3, 4)]
    mei.page.locator(".rank-row[data-place='3']").get_by_label("move up").click()
    assert order(mei) == [(0, 1), (2, 1), (3, 3), (1, 4)]
    mei.then_next("Enter")
    (label,) = mei.labels
    assert label["answer"]["ranks"] == [{0: 1, 2: 1, 3: 3, 1: 4}[label["order"].index(i)] for i in range(4)]

    high = mei.page.locator(".rank-answers .answer", has_text="行 399")
    show = mei.page.get_by_role("button", name="Show all of it")
    assert high.bounding_box()["height"] < 900
    assert show.count() == 1
    show.press("Enter")
    assert high.bounding_box()["height"] > 4000
    assert show.count() == 0
    assert len(mei.labels) == 1


def test_two_tabs_label_one_item_once(serve, item):
    """Also if the second one is on another machine, which no channel of the browser reaches."""
    served = serve([item("pair", f"p{i}", "a", "b") for i in range(3)])
    mei = served.labeller()
    other = mei.open(page=mei.context.new_page())
    first = mei.item
    assert other.locator("#main").get_attribute("data-item") == first
    mei.page.bring_to_front()
    mei.then_next("1", "3", "Enter")
    other.wait_for_function("id => document.getElementById('main').dataset.item === id", arg=mei.item)
    assert len(mei.labels) == 1

    person = mei.person.person_id
    held, answer = served.project.next_item(person), {"preferred": 0, "strength": 1, "both_bad": False}
    served.project.label(person, held.item.item_id, answer, nonce="elsewhere1", seconds=1.0)
    mei.then_next("2", "6", "Enter")
    mei.page.locator("#missing").get_by_text("no longer yours").wait_for()
    assert [label["answer"]["strength"] for label in mei.labels] == [1, 1]


@pytest.mark.parametrize("seconds", [0.3, pytest.param(10, marks=pytest.mark.exhaustive)])
def test_offline(serve, item, seconds):
    served = serve([item("pair", f"p{i}", "a", "b") for i in range(2)])
    mei = served.labeller()
    sent = []
    mei.page.on("request", lambda request: request.url.endswith("/api/label") and sent.append(request.post_data_json))
    mei.context.set_offline(True)
    mei.press("1", "5", "Enter")
    mei.page.get_by_text("Your label is kept in this browser").wait_for()
    time.sleep(seconds)
    assert mei.labels == []
    assert mei.page.evaluate("Object.keys(localStorage).filter(name => name.includes('outbox')).length") == 1
    before = mei.item
    mei.context.set_offline(False)
    mei.page.wait_for_function("before => document.getElementById('main').dataset.item !== before", arg=before)
    assert [label["answer"]["strength"] for label in mei.labels] == [3]
    assert len({body["nonce"] for body in sent}) == 1
    assert len(sent) >= 2
    assert not mei.page.locator("#banner").is_visible()


def test_what_a_server_does_not_take_at_once_is_sent_again(serve, item):
    """A reply is lost, the disk is full, the session has ended, the tab is closed: each label counts once."""
    served = serve([item("pair", f"p{i}", "a", "b") for i in range(5)])
    mei = served.labeller()

    def strengths():
        return [label["answer"]["strength"] for label in mei.labels]

    lost = []

    def lose(route):  # the server has the label, the page does not know
        if lost:
            return route.continue_()
        lost.append(route.fetch().status)
        return route.abort()

    mei.page.route("**/api/label", lose)
    mei.then_next("2", "3", "Enter")
    mei.page.unroute_all()
    assert lost == [200]
    assert len([event for event in served.project.events() if event.kind == "label"]) == 1

    replies = [503]
    mei.page.route(
        "**/api/label",
        lambda route: route.fulfill(status=replies.pop(), json={"error": "full"}) if replies else route.continue_(),
    )
    mei.then_next("1", "4", "Enter")
    mei.page.unroute_all()
    assert strengths() == [1, 2]

    mei.context.clear_cookies()
    mei.press("1", "5", "Enter")
    mei.page.get_by_role("heading", name="Welcome").wait_for()
    session = served.project.redeem(served.project.invite(mei.person.person_id))
    mei.context.add_cookies([{"name": served.app.site.access.cookie, "value": session, "url": served.url}])
    mei.open()
    assert strengths() == [1, 2, 3], "what was not sent is sent after signing in"

    mei.page.route("**/api/label", lambda route: route.abort())
    mei.press("1", "6", "Enter")
    mei.page.get_by_text("Your label is kept").wait_for()
    mei.page.close()
    mei.page = mei.context.new_page()
    mei.open()
    assert strengths() == [1, 2, 3, 4]


def test_what_waits_of_one_person_is_never_sent_as_another(serve, item):
    served = serve([item("pair", "p", "a", "b", needed=2)])
    mei = served.labeller()
    mei.page.route("**/api/label", lambda route: route.abort())
    mei.press("1", "6", "Enter")
    mei.page.get_by_text("Your label is kept").wait_for()
    person = served.project.add_person("Jonas", "annotator")
    assert served.project.next_item(person.person_id), "it is an item that both may label"
    session = served.project.redeem(served.project.invite(person.person_id))
    mei.context.add_cookies([{"name": served.app.site.access.cookie, "value": session, "url": served.url}])
    mei.page.unroute_all()
    mei.open()
    assert mei.page.locator("[aria-pressed=true]").count() == 0, "nor is a draft shown to another"
    assert served.project.labels() == []


def test_drafts_survive_a_reload_and_another_browser(serve, item):
    served = serve([item("pair", "p", "a", "b")])
    mei = served.labeller()
    with mei.page.expect_response("**/api/draft"):
        mei.press("2", "5", "c", "备注 😀")
    mei.page.reload()
    pressed = mei.page.locator("[aria-pressed=true]")
    pressed.first.wait_for()
    assert pressed.all_inner_texts() == ["2\nAnswer 2 is better", "5\nBetter"]
    assert mei.page.get_by_label("Comment", exact=True).input_value() == "备注 😀"
    mei.page.evaluate("localStorage.clear()")
    mei.page.reload()
    pressed.first.wait_for()
    assert pressed.all_inner_texts() == ["2\nAnswer 2 is better", "5\nBetter"]


@pytest.mark.exhaustive
def test_undo_keeps_what_was_just_typed(serve, item):
    """Sooner than the draft would have been saved. Redo does not throw away what was changed since."""
    mei = serve([item("demonstration", f"题 {i}") for i in range(3)]).labeller()
    text = mei.page.get_by_label("Your answer")
    text.fill("一")
    mei.then_next("Control+Enter")
    text.fill("二 😀\n很长")
    mei.then_next("Escape", "u")
    assert text.input_value() == "一"
    mei.then_next("Control+Enter")
    assert text.input_value() == "二 😀\n很长"
    mei.then_next("Control+Enter")
    mei.then_next("Escape", "u")
    text.fill("变了")
    mei.press("Escape", "y")
    mei.page.locator("#missing").get_by_text("changed this since").wait_for()
    assert text.input_value() == "变了"
    mei.then_next("Control+Enter")
    assert [label["answer"]["text"] for label in mei.labels] == ["一", "变了"]


@pytest.mark.exhaustive
def test_the_back_button_is_harmless(serve, item):
    served = serve([item("pair", f"p{i}", "a", "b") for i in range(3)])
    mei = served.labeller()
    mei.open("/instructions")
    mei.open("/")
    mei.then_next("1", "3", "Enter")
    now = mei.item
    mei.page.go_back()
    mei.page.wait_for_url("**/instructions")
    mei.page.go_forward()
    mei.page.wait_for_function("id => document.getElementById('main').dataset.item === id", arg=now)
    mei.then_next("2", "4", "Enter")
    assert [label["answer"]["strength"] for label in mei.labels] == [1, 2]


@pytest.mark.exhaustive
def test_a_server_that_ends_says_so_first(serve, item):
    """The last label can be taken back for a while; then the page asks for nothing, and says nothing of a lost connection."""
    served = serve([item("pair", "p", "a", "b")], until_done=600.0)
    mei = served.labeller()
    mei.then_next("1", "3", "Enter")
    title = mei.page.get_by_role("heading", name="All labelled")
    title.wait_for()
    mei.then_next("u")
    assert mei.labels == []
    served.closing.seconds = 1.0
    mei.then_next("2", "4", "Enter")
    title.wait_for()
    served.thread.join(timeout=120)
    assert not served.thread.is_alive()
    asked = []
    mei.page.on("request", lambda request: asked.append(request.url))
    mei.press("u")
    mei.page.evaluate("window.dispatchEvent(new Event('heedful:retry'))")
    mei.page.wait_for_timeout(300)
    assert asked == []
    assert title.is_visible()
    assert not mei.page.locator("#banner").is_visible()
    assert mei.page.get_by_role("button", name="Undo").count() == 0
    assert [label["answer"]["strength"] for label in mei.labels] == [2]


@pytest.mark.parametrize("renewed", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_an_order_that_nobody_made_is_not_recorded_as_made(serve, item, renewed):
    """A comment on a ranking, a reload, Submit: the order is still the random one of the screen."""
    mei = serve([item("ranking", f"题 {i}", *"甲乙丙丁") for i in range(2)]).labeller()
    if renewed:
        mei.page.add_init_script("const slow = setInterval; window.setInterval = (f, ms) => slow(f, Math.min(ms, 300))")
        with mei.page.expect_response("**/api/draft"):
            mei.open()  # the lease is renewed for somebody who reads, here after a moment
    else:
        with mei.page.expect_response("**/api/draft"):
            mei.press("c", "只有备注")
    mei.page.evaluate("localStorage.clear()")  # as in another browser
    mei.open()
    mei.page.locator("#submit").click()
    mei.page.locator("#missing").get_by_text("Nothing moved yet").wait_for()
    assert mei.labels == []
    mei.page.locator("#submit").dblclick()  # a second click of the first one confirms nothing
    mei.page.wait_for_function("document.getElementById('main').dataset.item")
    mei.page.wait_for_timeout(100)
    assert len(mei.labels) == 1


@pytest.mark.exhaustive
def test_a_message_waits_for_a_model_that_is_loading(serve, item):
    served = serve([item("chat", "我要提前搬走 😀")], policy="loads")
    mei = served.labeller()
    sent = []
    mei.page.on("request", lambda request: request.url.endswith("/api/chat") and sent.append(request.post_data_json))
    mei.press("Control+Enter")
    mei.page.locator("#banner").get_by_text("The model is loading").wait_for()
    while len(sent) < 2:
        mei.page.wait_for_timeout(20)
    (served.project.folder / "policy.yaml.loads").unlink()
    mei.page.get_by_role("button", name="Answer 1 is better").wait_for()
    assert not mei.page.locator("#banner").is_visible()
    assert len({body["nonce"] for body in sent}) == 1


@pytest.mark.exhaustive
def test_a_message_that_is_never_answered_is_not_sent_without_end(serve, item):
    """The person is told, still has the words, and may send others."""
    served = serve([item("chat", "")], policy=True)
    mei = served.labeller()
    sent = []
    mei.page.on("request", lambda request: request.url.endswith("/api/chat") and sent.append(request.post_data_json))
    box = mei.page.get_by_label("Your message")
    box.fill("fail")
    mei.press("Control+Enter")
    said = mei.page.locator("#banner").get_by_text("The model did not answer this message")
    while not said.is_visible():
        mei.page.evaluate("window.dispatchEvent(new Event('heedful:retry'))")  # as "Try now" does
        mei.page.wait_for_timeout(50)
    assert "The server's owner can see the reason. Change it" in said.text_content()
    assert (len(sent), len({body["nonce"] for body in sent})) == (4, 1)
    assert box.input_value() == "fail"
    box.fill("换一个问题 😀")
    mei.press("Control+Enter")
    mei.page.get_by_role("button", name="Answer 1 is better").wait_for()
    assert not mei.page.locator("#banner").is_visible()
