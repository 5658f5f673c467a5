"""Ways into the project that go wrong: a link in a tab that is open already, an address that is not there or not for one."""

import pytest

from heedful.apps.label.server.security import RateLimit

pytestmark = pytest.mark.exhaustive


def test_a_link_in_a_tab_that_is_at_join_and_the_other_language(serve, item):
    """It is taken; the other language keeps it, and what was typed."""
    served = serve([item("pair", "问题", "a", "b")])
    person = served.project.add_person("王芳 😀", "annotator")
    page = served.context().new_page()
    page.goto(f"{served.url}/join")
    page.get_by_label("Invitation link").fill("half a link")
    page.get_by_role("button", name="中文").click()
    assert page.get_by_label("邀请链接").input_value() == "half a link"
    page.get_by_role("button", name="English").click()
    page.evaluate("token => { location.hash = token; }", served.project.invite(person.person_id))
    page.get_by_text("Your invitation link works once").wait_for()
    page.get_by_role("button", name="中文").click()
    assert page.url == f"{served.url}/join", "the token is not left in the address"
    page.locator("button.main").click()
    page.get_by_role("heading", name="哪个回答更好？").wait_for()


def test_an_address_that_is_not_for_one_leads_back(serve, item):
    mei = serve([item("pair", "p", "a", "b")]).labeller()
    for path, status in (("/nowhere", 404), ("/people", 403), ("/api/export", 403)):
        reply = mei.page.goto(f"{mei.served.url}{path}")
        assert (reply.status, reply.headers["content-type"].partition(";")[0]) == (status, "text/html")
        assert str(status) in mei.page.title()
        said = {404: "没有这个页面", 403: "你的角色不能使用此功能"}[status]
        assert mei.page.locator("p[lang=zh-CN]").get_by_text(said).is_visible()
        mei.page.get_by_role("link", name="To the project").click()
        mei.page.get_by_role("heading", name="Which answer is better?").wait_for()


def test_a_browser_that_is_signed_in_goes_on(serve, item):
    """The invitation is clicked again; a page of another site links here, and the browser keeps the cookie back at first."""
    served = serve([item("pair", "p", "a", "b")])
    person = served.project.add_person("王芳 😀", "annotator")
    mei = served.invited(person)
    served.app.failed = RateLimit(per_second=0.001, burst=0)  # looking costs no attempt to sign in
    mei.page.goto(f"{served.url}/join#used-before")
    mei.page.get_by_role("button", name="Continue as 王芳 😀").press("Enter")
    question = mei.page.get_by_role("heading", name="Which answer is better?")
    question.wait_for()
    asked = []
    mei.page.on("request", lambda request: asked.append(request.url))
    mei.page.goto(f"{served.url.replace('127.0.0.1', 'localhost')}/join")  # to the browser, another site
    mei.page.evaluate("url => { location.href = url; }", f"{served.url}/")
    question.wait_for()
    asked = asked[asked.index(f"{served.url}/") :]
    assert f"{served.url}/join" in asked, "the browser has kept the cookie back"
