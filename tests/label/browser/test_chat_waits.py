"""A chat whose model is still loading: the page says so, and sends the message when it can."""


def test_a_message_waits_for_a_model_that_is_loading(serve, item):
    served = serve([item("chat", "我要提前搬走 😀")], policy="loads")
    mei = served.labeller()
    sent = []
    mei.page.on("request", lambda request: request.url.endswith("/api/chat") and sent.append(request.post_data_json))
    mei.press("Control+Enter")
    mei.page.locator("#banner").get_by_text("The model is loading").wait_for()
    mei.page.wait_for_timeout(1500)
    (served.project.folder / "policy.yaml.loads").unlink()
    mei.page.get_by_role("button", name="Answer 1 is better").wait_for()
    assert not mei.page.locator("#banner").is_visible()
    assert len(sent) >= 2
    assert len({body["nonce"] for body in sent}) == 1
