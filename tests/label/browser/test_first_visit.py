"""Ways into the project that go wrong: a link in a tab that is open already, an address that is not there or not for one."""

import pytest

from heedful.label.server.security import RateLimit


def test_a_link_opened_in_a_tab_that_is_at_join_already_is_taken(serve, item):
    served = serve([item("pair", "p", "a", "b")])
    person = served.project.add_person("王芳 😀", "annotator")
    page = served.context().new_page()
    page.goto(f"{served.url}/join")
    page.get_by_label("Invitation link").wait_for()
    page.evaluate("token => { location.hash = token; }", served.project.invite(person.person_id))
    page.get_by_text("Your invitation link works once").wait_for()
    assert page.url == f"{served.url}/join", "the token is not left in the address"
    page.get_by_role("button", name="Start").click()
    page.get_by_role("heading", name="Which answer is better?").wait_for()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("path", "status"), [("/nowhere", 404), ("/people", 403), ("/api/export", 403)])
def test_an_address_that_is_not_for_one_leads_back(serve, item, path, status):
    mei = serve([item("pair", "p", "a", "b")]).labeller()
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("language", ["en", "zh-CN"])
def test_a_link_signs_in_also_where_sessions_that_ended_are_limited(serve, item, language):
    served = serve([item("pair", "p", "a", "b")])
    person, other = (served.project.add_person(name, "annotator") for name in ("Mei", "Jonas"))
    mei = served.at_work(person, "/join#none", locale=language)
    words = {"en": ("Sign in with this link", "has been used"), "zh-CN": ("用此链接登录", "此链接已被使用")}[language]
    mei.page.get_by_role("button", name=words[0]).click()
    mei.page.locator("#banner").get_by_text(words[1]).wait_for()
    served.project.set_person(person.person_id, standing="removed")
    served.app.unknown = RateLimit(per_second=0.001, burst=0)
    mei.page.goto("about:blank")
    mei.page.goto(f"{served.url}/join#{served.project.invite(other.person_id)}")
    mei.page.locator("button.main").click()
    mei.page.locator("main.task-pair").wait_for()


def test_the_other_language_keeps_the_link_and_what_was_typed(serve, item):
    served = serve([item("pair", "问题", "a", "b")])
    person = served.project.add_person("王芳 😀", "annotator")
    page = served.context().new_page()
    page.goto(f"{served.url}/join")
    page.get_by_label("Invitation link").fill("half a link")
    page.get_by_role("button", name="中文").click()
    assert page.get_by_label("邀请链接").input_value() == "half a link"
    page.goto(f"{served.url}/join#{served.project.invite(person.person_id)}")
    page.get_by_role("button", name="English").click()
    page.get_by_text("Your invitation link works once").wait_for()
    page.get_by_role("button", name="中文").click()
    assert page.url == f"{served.url}/join", "the token is not left in the address"
    page.locator("button.main").click()
    page.get_by_role("heading", name="哪个回答更好？").wait_for()
