"""A project that is served on a real socket, and people who look at it in a headless Chromium."""

import asyncio
import contextlib
import sys
import threading
import time
from pathlib import Path

import pytest

from heedful.apps.label import Candidate, Item, Project, item_id
from heedful.apps.label.server.app import Application
from heedful.apps.label.server.policy import PolicyWorker
from heedful.apps.label.server.request import Site
from heedful.apps.label.server.run import Closing, make_server
from heedful.apps.label.server.security import access_of
from heedful.apps.serving.connections import bound
from heedful.configs.label import ProjectSettings

WRITER = (sys.executable, str(Path(__file__).parent / "writer.py"))
WAIT = 120_000
"""Most milliseconds for anything on a page; a busy machine is slow."""


def item(task, prompt, *answers, **more):
    """An item whose candidates have sources that no browser may see."""
    candidates = tuple(Candidate(one, {"checkpoint": f"runs/secret-{i}"}) for i, one in enumerate(answers))
    return Item(item_id(task, prompt, candidates), task, prompt, candidates, **more)


class Labeller:
    """Somebody at a browser of their own."""

    def __init__(self, served, context, person):
        self.served = served
        self.context = context
        self.person = person
        self.page = context.new_page()

    def open(self, path="/", page=None):
        """Go to a page, and wait until it shows what it is about."""
        (page or self.page).goto(f"{self.served.url}{path}")
        (page or self.page).locator("main[aria-busy=false]").wait_for()
        return page or self.page

    def press(self, *keys):
        for key in keys:
            self.page.keyboard.press(key) if key.isascii() else self.page.keyboard.insert_text(key)

    @property
    def item(self):
        """The id of the item on the screen."""
        return self.page.locator("#main").get_attribute("data-item")

    def then_next(self, *keys):
        """Press keys, and wait until another item is there, or none."""
        before = self.item
        self.press(*keys)
        self.page.wait_for_function("before => document.getElementById('main').dataset.item !== before", arg=before)

    @property
    def labels(self):
        """The contents of this person's labels that count."""
        person = self.person.person_id
        return [one.event.content for one in self.served.project.labels() if one.person.person_id == person]


class Served:
    """A project behind a running server, and browsers that look at it."""

    def __init__(self, project, browser, worker=None, closing=None):
        self.project = project
        self.browser = browser
        access = access_of(project.folder, "127.0.0.1", (), None)
        self.app = Application(Site(project, access, worker, closing=closing))
        self.socket = bound("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.server = make_server(self.app)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve(sockets=[self.socket])))
        self.closing = closing
        self.contexts = []

    def start(self):
        self.thread.start()
        while not self.server.started:
            time.sleep(0.002)
        if self.closing is not None:
            threading.Thread(target=self.closing.watch, args=(self.server,), daemon=True).start()

    def stop(self):
        for context in self.contexts:
            context.close()
        self.server.should_exit = True
        self.thread.join()

    def context(self, **options):
        context = self.browser.new_context(**{"viewport": {"width": 1280, "height": 800}, "locale": "en", **options})
        context.set_default_timeout(WAIT)
        self.contexts.append(context)
        return context

    def labeller(self, name="Mei", role="annotator", path="/", **options):
        """Somebody who is signed in and looks at a page."""
        return self.at_work(self.project.add_person(name, role), path, **options)

    def at_work(self, person, path="/", session=None, **options):
        """A person in a browser of their own, signed in; with the ``session`` of another browser, both stay signed in."""
        somebody = Labeller(self, self.context(**options), person)
        session = somebody.session = session or self.project.redeem(self.project.invite(person.person_id))
        somebody.context.add_cookies([{"name": self.app.site.access.cookie, "value": session, "url": self.url}])
        somebody.open(path)
        return somebody

    def invited(self, person, **options):
        """Somebody who signs in through their invitation, as people do."""
        somebody = Labeller(self, self.context(**options), person)
        somebody.page.goto(f"{self.url}/join#{self.project.invite(person.person_id)}")
        with somebody.page.expect_navigation(url=lambda url: not url.endswith("/join")):
            somebody.page.locator("main button").last.press("Enter")
        somebody.page.locator("main[aria-busy=false]").wait_for()
        return somebody


@pytest.fixture
def serve(browser, tmp_path):
    """``serve(items, policy=False, **settings)`` serves a new project; one that "loads" waits for policy.yaml.loads to go."""
    with contextlib.ExitStack() as stack:

        def start(items=(), *, policy=False, instructions="", until_done=None, **settings):
            folder = tmp_path / f"项目{len(list(tmp_path.iterdir()))}"
            options = {"name": "标注 😀", "overlap": 0.0, "repeats": 0.0, **settings}
            project = stack.enter_context(Project.create(folder, ProjectSettings(**options)))
            project.add_items(list(items))
            if instructions:
                project.set_instructions(instructions)
            worker = None
            if policy:
                if policy == "loads":
                    (folder / "policy.yaml.loads").touch()
                worker = stack.enter_context(PolicyWorker(folder / "policy.yaml", folder / "policy.log", WRITER))
                while policy != "loads" and not worker.is_ready:
                    time.sleep(0.01)
            closing = None if until_done is None else Closing(project, until_done)
            served = Served(project, browser, worker, closing)
            served.start()
            stack.callback(served.stop)
            return served

        yield start


@pytest.fixture(name="item")
def _item():
    return item
