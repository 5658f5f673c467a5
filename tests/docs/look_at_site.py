"""Look at the built site in a headless Chromium: every page, on a desktop and a phone, light and dark.

    python docs/build.py
    python tests/docs/look_at_site.py                        # the five tabs, a lesson, the reference; and the search
    python tests/docs/look_at_site.py --all                  # every page
    python tests/docs/look_at_site.py --pictures runs/site   # with a picture of each

It prints what axe-core finds, pages that scroll sideways, messages of the console, and requests that leave the machine. The
exit status is 1 if there was any, or if the search does not find what it should.
"""

import argparse
import functools
import http.server
import os
import shutil
import sys
import threading
from pathlib import Path

from axe_core_python.base import AXE_SCRIPT
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[2]
TABS = ("start", "course", "guides", "reference", "inside")
MORE = (
    "index",
    "api/core-rewards",
    "formulas",
    "course/en/05_gae",
    "course/zh/05_gae",
    "own-model",
    "start.zh",
    "search",
)
SCREENS = {"desktop": {"width": 1280, "height": 800}, "phone": {"width": 390, "height": 844}}
SEARCHES = {"where is the score read": "where the score is read", "优势函数": "优势函数"}
"""What is typed, and what the page of the first result says."""
WAIT = 120_000
VIOLATIONS = """axe.run({resultTypes: ['violations']}).then(found => found.violations.flatMap(
    one => one.nodes.map(node => `${one.id}: ${node.target.join(' ')} ${node.failureSummary.split('\\n').pop().trim()}`)))"""
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


def looked(context, url, name, picture):
    """What is wrong with a page."""
    page, found = context.new_page(), []
    page.set_default_timeout(WAIT)
    page.on("console", lambda message: found.append(f"console: {message.text}") if message.type == "error" else None)
    page.on("pageerror", lambda error: found.append(f"error: {error}"))
    page.on(
        "request",
        lambda request: None if request.url.startswith((url, "data:")) else found.append(f"asks {request.url}"),
    )
    page.goto(f"{url}{name}.html")
    page.evaluate("window.MathJax?.startup?.promise")
    if page.evaluate(SIDEWAYS) > 0:
        found.append(f"scrolls sideways by {page.evaluate(SIDEWAYS)} pixels")
    page.evaluate(AXE_SCRIPT)
    found += [f"axe {one}" for one in page.evaluate(VIOLATIONS)]
    if picture:
        page.screenshot(path=picture)
    page.close()
    return found


def searched(context, url, words):
    """The titles of the results for some words, and the page of the first."""
    page = context.new_page()
    page.set_default_timeout(WAIT)
    page.goto(f"{url}start.html")
    page.keyboard.press("Control+k")
    page.keyboard.type(words)
    page.keyboard.press("Enter")
    page.locator("#search-results h2", has_text="Search Results").wait_for()  # "Searching" until all are there
    links = page.locator("ul.search > li > a")
    titles = links.all_inner_texts()
    text = page.request.get(url + links.first.get_attribute("href")).text() if titles else ""
    page.close()
    return titles, text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, default=ROOT / "build" / "site")
    parser.add_argument("--all", action="store_true", help="every page in place of the most important ones")
    parser.add_argument("--pictures", type=Path, help="folder for a picture of each page")
    options = parser.parse_args()
    site = options.site.resolve()
    pages = [
        p.relative_to(site).with_suffix("").as_posix() for p in sorted(site.rglob("*.html")) if "_static" not in p.parts
    ]
    names = pages if options.all else [name for name in (*TABS, *MORE) if name in pages]
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, problems = f"http://127.0.0.1:{server.server_port}/", 0
    if options.pictures:
        options.pictures.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as started:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
        browser = started.chromium.launch(executable_path=path, args=[*flags, "--disable-gpu"])
        for screen, viewport in SCREENS.items():
            for colours in ("light", "dark"):
                context = browser.new_context(viewport=viewport, color_scheme=colours)
                for name in names:
                    picture = options.pictures and options.pictures / f"{name.replace('/', '-')}-{screen}-{colours}.png"
                    found = looked(context, url, name, picture)
                    problems += len(found)
                    for one in found:
                        print(f"{name}, {screen}, {colours}: {one}", flush=True)
                context.close()
        context = browser.new_context(viewport=SCREENS["desktop"])
        for words, wanted in SEARCHES.items():
            titles, text = searched(context, url, words)
            is_found = wanted in text.lower()
            problems += not is_found
            print(f"search {words}: {len(titles)} results, {'found' if is_found else 'NOT FOUND'} in {titles[:1]}")
        browser.close()
    print(f"{len(names)} pages on 2 screens, light and dark: {problems} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
