"""Ways into the project that go wrong: a link in a tab that is open already, an address that is not there or not for one."""

import pytest


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


@pytest.mark.parametrize(("path", "status"), [("/nowhere", 404), ("/people", 403), ("/api/export", 403)])
def test_an_address_that_is_not_for_one_leads_back(serve, item, path, status):
    mei = serve([item("pair", "p", "a", "b")]).labeller()
    reply = mei.page.goto(f"{mei.served.url}{path}")
    assert (reply.status, reply.headers["content-type"].partition(";")[0]) == (status, "text/html")
    assert str(status) in mei.page.title()
    mei.page.get_by_role("link", name="To the project").click()
    mei.page.get_by_role("heading", name="Which answer is better?").wait_for()
