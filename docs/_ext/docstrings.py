"""Docstrings as what Sphinx reads.

Docstrings are plain text with a few habits: a first line, equations and tables set in by four spaces, "Args:", and sentences
that begin with "Returns" or "Raises". A function of `heedful.core` also shows its formulas in LaTeX, from docs/formulas.md.
"""

import re
from pathlib import Path

FORMULAS = (Path(__file__).resolve().parents[1] / "formulas.md").read_text(encoding="utf-8")
CODE = re.compile(r"(``.*?``|`[^`]+`)", re.DOTALL)
SPECIAL = re.compile(r"(?P<word>\*\w+\*)|[\\*|]|(?<=\w)_(?!\w)")
"""What reStructuredText would read as markup, and a *word* that is meant so."""
ENTRY = re.compile(r"    ([*\w]+(?:, [*\w]+)*): (.*)")


def formulas():
    """The formulas of each function, in LaTeX, and the anchor of its section in docs/formulas.md."""
    found = {}
    for section in re.split(r"^(?=###? )", FORMULAS, flags=re.MULTILINE):
        heading, _, text = section.partition("\n")
        names = re.findall(r"`(\w+)`", heading)
        mathematics = re.findall(r"^```math\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
        if heading.startswith("### ") and mathematics:
            anchor = re.sub(r"[^\w -]", "", heading[4:].lower()).replace(" ", "-")
            found |= dict.fromkeys(names, (mathematics, anchor))
    return found


LATEX = formulas()


def escape(text):
    """Plain text as reStructuredText, with names in single or double backticks left as they are."""
    pieces = CODE.split(text)
    pieces[::2] = [SPECIAL.sub(lambda found: found["word"] or "\\" + found[0], piece) for piece in pieces[::2]]
    return "".join(pieces)


def blocks(lines):
    """Blocks of lines between empty lines."""
    return [block.splitlines() for block in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")) if block.strip()]


def arguments(lines):
    """The entries under "Args:" as fields."""
    fields = []
    for line in lines:
        entry = ENTRY.fullmatch(line)
        if entry:
            fields += [f":param {name}: {escape(entry[2])}" for name in entry[1].split(", ")]
        else:
            fields.append("    " + escape(line.strip()))
    return fields


def paragraph(lines):
    """A paragraph; what it returns and raises becomes fields, which are returned apart."""
    text = re.split(r"(?<=[.:)`]) (?=Raises [A-Z])|^(?=Raises [A-Z])", " ".join(line.strip() for line in lines))
    fields, left = [], []
    for part in filter(None, text):
        raised = re.match(r"Raises (\w+(?:, \w+)*(?: and \w+)?) (.*)", part, flags=re.DOTALL)
        if raised:
            fields.append(f":raises {raised[1]}: {escape(raised[2])}")
        elif part.startswith("Returns ") and not part.endswith(":"):
            fields.append(f":returns: {escape(part.removeprefix('Returns '))}")
        else:
            left.append(escape(part))
    return left, fields


def set_in(lines):
    """Lines that are set in: an example in Python, or an equation or a table as it stands."""
    language = "python" if lines[0].strip().startswith(">>>") else "text"
    return [f".. code-block:: {language}", "", *(f"   {line}" for line in lines)]


def definitions(lines):
    """The entries under a line such as "Returns a dict:", each in a paragraph of its own."""
    for line in lines:
        yield from ["", f"   {escape(line.strip())}"] if "``: " in line else [f"   {escape(line.strip())}"]
    yield ""


def restructured(lines, latex=()):
    """A docstring as reStructuredText; ``latex`` comes after its first paragraph."""
    out, fields = [], []
    for number, block in enumerate(blocks(lines)):
        if block[0].rstrip() in ("Args:", "Attributes:"):
            fields = arguments(block[1:]) + fields
        elif block[0].startswith(("    ", ">>>")):
            out += [*set_in(block), ""]
        elif re.match(r"- |\d+\. ", block[0]):
            out += [*map(escape, block), ""]
        else:
            has_entries = len(block) > 1 and block[1].startswith("    ")
            text, more = paragraph(block[:1] if has_entries else block)
            out += [*text, "", *definitions(block[1:])] if has_entries else [*text, ""] if text else []
            fields += more
        if number == 0:
            out += latex
    return [*out, *fields, ""]
