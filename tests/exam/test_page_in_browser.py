"""The page in Chromium: no violation of accessibility, no scrolling sideways, nothing asked of the network, by keyboard."""

import pytest

from exam_cases import RECORDS, length
from heedful.apps.exam.page import html_page

pytestmark = pytest.mark.exhaustive


def test_in_a_browser(examined, browser, axe, tiny, tmp_path):
    settings = {"policy": tiny(), "prompts": 2, "n": 2, "max_new_tokens": 3, "rounds": 2, "edits": 2}
    path = tmp_path / "exam.html"
    path.write_text(html_page(examined(length, RECORDS, second=[length], **settings)), encoding="utf-8")
    for width in (1200, 390):
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
            asked = []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            page.goto(path.as_uri())
            assert asked == [path.as_uri()]
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            page.keyboard.press("Tab")
            assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Terms of the score"
            assert [(one["id"], one["nodes"][0]["html"]) for one in axe(page)] == []
            page.close()
