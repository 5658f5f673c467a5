"""What is wrong with the links of a folder of pages: those that lead nowhere, and pages that no tab leads to."""

from html.parser import HTMLParser
from urllib.parse import unquote, urldefrag, urlparse


class Page(HTMLParser):
    """The ids and the links of a page."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids |= {values.get("id"), values.get("name") if tag == "a" else None}
        self.links += [values[name] for name in ("href", "src") if values.get(name)]


def problems(folder, tabs):
    """The number of pages below ``folder``, and a line for each problem. ``tabs`` are the names of the first pages."""
    folder = folder.resolve()
    pages = {
        path: Page(path.read_text(encoding="utf-8"))
        for path in sorted(folder.rglob("*.html"))
        if "_static" not in path.parts
    }
    found, neighbours = [], {}
    for path, page in pages.items():
        neighbours[path] = set()
        for link in page.links:
            address, anchor = urldefrag(link)
            if urlparse(address).scheme or address.startswith("//"):
                continue
            target = (path.parent / unquote(urlparse(address).path)).resolve() if address else path
            where = path.relative_to(folder)
            if not target.is_relative_to(folder):
                found.append(f"{where}: {link} is outside the site")
            elif not target.is_file():
                found.append(f"{where}: {link} leads to no file")
            elif target in pages:
                neighbours[path].add(target)
                if anchor and unquote(anchor) not in pages[target].ids:
                    found.append(f"{where}: {link} leads to no such place on {target.relative_to(folder)}")
    seen, waiting = set(), [folder / f"{tab}.html" for tab in tabs]
    while waiting:
        page = waiting.pop()
        if page not in seen:
            seen.add(page)
            waiting += neighbours.get(page, ())
    generated = {folder / name for name in ("index.html", "search.html", "genindex.html", "py-modindex.html")}
    found += [f"{page.relative_to(folder)}: no tab leads to it" for page in pages if page not in seen | generated]
    return len(pages), found
