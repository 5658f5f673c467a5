"""A chat whose model is still loading: the page says so, and sends the message when it can."""


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
