"""All that can be asked of the server, and by whom."""

from heedful.label.server import api, owner, signing
from heedful.label.server.app import ANYONE, EVERYBODY, LABELLERS, LARGE, OWNERS, READERS, Rule
from heedful.label.server.pages import load_files, load_pages

ROLES_OF_PAGES = {
    "/": EVERYBODY,
    "/join": ANYONE,
    "/stats": READERS,
    "/labels": OWNERS,
    "/people": OWNERS,
    "/import": OWNERS,
    "/export": OWNERS,
    "/rounds": READERS,
    "/instructions": EVERYBODY,
}
API = (
    Rule("POST", "/api/join", ANYONE, signing.join),
    Rule("POST", "/api/leave", EVERYBODY, signing.leave),
    Rule("GET", "/api/me", EVERYBODY, api.me),
    Rule("GET", "/api/next", EVERYBODY, api.next_item),
    Rule("GET", "/api/instructions", EVERYBODY, api.instructions),
    Rule("POST", "/api/label", LABELLERS, api.label),
    Rule("POST", "/api/skip", LABELLERS, api.skip),
    Rule("POST", "/api/undo", LABELLERS, api.undo),
    Rule("POST", "/api/redo", LABELLERS, api.redo),
    Rule("POST", "/api/draft", LABELLERS, api.draft),
    Rule("POST", "/api/chat", LABELLERS, api.chat, is_costly=True),
    Rule("GET", "/api/people", OWNERS, owner.people),
    Rule("POST", "/api/people", OWNERS, owner.change_people),
    Rule("POST", "/api/instructions", OWNERS, owner.set_instructions),
    Rule("POST", "/api/import", OWNERS, owner.import_text, most_bytes=LARGE, is_costly=True),
    Rule("GET", "/api/export", OWNERS, owner.export, is_costly=True),
    Rule("GET", "/api/labels", OWNERS, owner.labels),
    Rule("GET", "/api/batches", OWNERS, owner.batches),
    Rule("POST", "/api/withdraw", OWNERS, owner.withdraw),
    Rule("GET", "/api/item", OWNERS, owner.item),
    Rule("POST", "/api/correct", OWNERS, owner.correct),
    Rule("GET", "/api/stats", READERS, owner.stats, is_costly=True),
    Rule("GET", "/api/rounds", READERS, owner.rounds),
)


def all_rules() -> tuple[Rule, ...]:
    """The API, the pages and their files."""
    pages = [Rule("GET", path, ROLES_OF_PAGES[path], page) for path, page in load_pages().items()]
    files = [Rule("GET", path, ANYONE, file) for path, file in load_files().items()]
    return (*API, *pages, *files)
