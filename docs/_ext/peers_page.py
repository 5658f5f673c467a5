"""Writes docs/peers.md, the settings of other libraries and heedful's, from heedful.configs.peers, when the site is built."""

from pathlib import Path

from heedful.configs.peers import peers

PAGE = Path(__file__).resolve().parents[1] / "peers.md"
BEGINNING = """# Settings of other libraries

What heedful calls the settings of other libraries, by library and by the class or section that has them: one name may mean
several things. [`heedful migrate`](migrate.md) reads the first three tables for a script or a file of yours; a command that
does not know a name answers from all of them.

*same*: the value means the same. *differs*: heedful takes it, with another meaning. *combined*: it makes heedful's setting
together with other settings. *lost*: heedful has nothing of the kind. Settings that change no number are left out.
"""
FIRST = ("trl-step", "trl", "llamafactory")
KINDS = {"same": "same", "differs": "differs", "combined": "combined", "lost": "lost"}


def rows(settings):
    yield from ("| setting | heedful | what to know |", "|---|---|---|")
    for name, one in settings.items():
        if one.kind in KINDS:
            ours = ", ".join(f"`{mine}`" for mine in one.ours)
            said = f"*{KINDS[one.kind]}*" + (f": {one.note}" if one.note else "")
            cells = (f"`{name}`", ours, said)
            yield "| " + " | ".join(cell.replace("|", "\\|").replace("<", "\\<") for cell in cells) + " |"


def page():
    every = peers()
    lines = [BEGINNING]
    for name in [*FIRST, *(one for one in every if one not in FIRST)]:
        peer = every[name]
        lines += [f"## {peer.title[0].upper()}{peer.title[1:]}", ""]
        if peer.versions:
            lines += [f"Read in its source from {peer.versions[0]} to {peer.versions[-1]}.", ""]
        for trainer, one in peer.trainers.items():
            lines += [f"**{trainer}** is `heedful {one.command}`.", "", *(f"- {text}" for text in one.differs), ""]
        for section, settings in peer.sections.items():
            if any(one.kind in KINDS for one in settings.values()):
                lines += [f"### {section} ({name})", "", *rows(settings), ""]
    return "\n".join(lines).rstrip() + "\n"


def write(app):
    PAGE.write_text(page(), encoding="utf-8")


def setup(app):
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
