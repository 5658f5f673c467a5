"""Model text as Markdown, for projects that switch it on: rendered without raw HTML, then sanitised to a list of plain tags.

Nothing that is rendered can load or lead anywhere: links and images become their text with the address behind it. Nothing
that people have to judge may vanish: LaTeX and line breaks stay, a mark inside a word (``2*3*4``, ``__init__``) is no
emphasis, a backslash goes only before the marks of Markdown, and lists keep the numbers that were written.
"""

import re
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

TAGS = {
    *("p", "br", "hr", "em", "strong", "s", "code", "pre", "blockquote", "ul", "ol", "li"),
    *("h1", "h2", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td"),
}
"""What may be left in the page; none of it has attributes."""
INLINE_MATH = re.compile(
    r"\$\$(?:(?!\n[ \t]*\n)[^$]){1,2000}\$\$"
    r"|\\\[(?:(?!\n[ \t]*\n).){1,2000}?\\\]"
    r"|\\\((?:(?!\n[ \t]*\n).){1,2000}?\\\)"
    r"|\$(?![\s$])(?:\\.|(?!\n[ \t]*\n)[^$\\`]){1,2000}(?<!\s)\$(?![\d$])",
    re.DOTALL,
)
"""LaTeX in a line: ``$...$`` without spaces at its ends and no digit behind it (so that prices are none), ``$$...$$``,
``\\(...\\)``, ``\\[...\\]``; over several lines, but not over an empty one. At most 2,000 characters, so that a text full of
openings takes no time."""
BLOCK_MATH = re.compile(r"(?:(\$\$)|(\\\[)|\\begin\{(\w+\*?)\})")
"""How LaTeX that has lines of its own begins; what is between may look like lists, headings and quotes."""
LONGEST_MATH = 200
"""Lines of such LaTeX."""
ESCAPABLE = "*_`~|#$"
"""Before these a backslash says that they are no marks; before anything else it is text, as in ``\\,`` of LaTeX or a path."""


def markdown_to_html(text: str) -> str:
    """Return Markdown as HTML of `TAGS` only, without any attribute."""
    import nh3

    parser = _parser()
    html = parser.renderer.render(_numbered(parser.parse(text)), parser.options, {})
    return nh3.clean(html, tags=TAGS, attributes={}, link_rel=None)


@cache
def _parser() -> "MarkdownIt":
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"])
    parser.disable(["lheading", "reference"])  # a line of dashes is one, and a line "[1]: address" is text
    parser.block.ruler.before("code", "math", _block_math, {"alt": ["paragraph", "blockquote", "list"]})
    parser.inline.ruler.before("escape", "math", _inline_math)
    parser.inline.ruler.at("escape", _escape)
    parser.inline.ruler.at("emphasis", _emphasis)
    return parser


def _block_math(state: Any, start: int, end: int, silent: bool) -> bool:
    """LaTeX from the beginning of a line to the end of one, as a block of code with its delimiters."""
    begin = state.bMarks[start] + state.tShift[start]
    opened = BLOCK_MATH.match(state.src, begin)
    if opened is None or state.sCount[start] - state.blkIndent >= 4:
        return False
    closing = "$$" if opened[1] else r"\]" if opened[2] else f"\\end{{{opened[3]}}}"
    for line in range(start, min(end, start + LONGEST_MATH)):
        at = opened.end() if line == start else state.bMarks[line]
        closed = state.src.find(closing, at, state.eMarks[line])
        if closed >= 0:
            if state.src[closed + len(closing) : state.eMarks[line]].strip(" \t.,;:"):
                return False  # something follows, so it is part of a sentence
            break
    else:
        return False
    if silent:
        return True
    token = state.push("code_block", "code", 0)
    token.content = state.getLines(start, line + 1, state.blkIndent, True)
    token.map = [start, line + 1]
    state.line = line + 1
    return True


def _inline_math(state: Any, silent: bool) -> bool:
    if state.src[state.pos] not in "$\\":
        return False
    found = INLINE_MATH.match(state.src, state.pos, state.posMax)
    if found is None:
        return False
    if not silent:
        state.push("code_inline", "code", 0).content = found[0]
    state.pos = found.end()
    return True


def _escape(state: Any, silent: bool) -> bool:
    if state.src[state.pos] != "\\":
        return False
    following = state.src[state.pos + 1 : state.posMax][:1]
    is_escape = following != "" and following in ESCAPABLE
    if not silent:
        state.pending += following if is_escape else "\\"
    state.pos += 2 if is_escape else 1
    return True


def _emphasis(state: Any, silent: bool) -> bool:
    """Emphasis by stars that are not within a word; underscores are text. Languages without spaces may have it anywhere."""
    from markdown_it.rules_inline.emphasis import tokenize

    if state.src[state.pos] != "*":
        return False
    end = state.pos
    while end < state.posMax and state.src[end] == "*":
        end += 1
    before = state.src[state.pos - 1] if state.pos > 0 else " "
    after = state.src[end] if end < state.posMax else " "
    if not (_in_word(before, ")]}") and _in_word(after, "([{\\")):
        return bool(tokenize(state, silent))
    if not silent:
        state.pending += state.src[state.pos : end]
    state.pos = end
    return True


def _in_word(character: str, brackets: str) -> bool:
    """True for letters and digits, but those of Chinese, Japanese and Korean, and for brackets, as in (a)*b*(c)."""
    return (character.isalnum() and ord(character) < 0x2E80) or character in brackets


def _numbered(tokens: list[Any]) -> list[Any]:
    """Write the numbers of lists into their items, as they were given, and the addresses of links behind them."""
    kept: list[Any] = []
    number: list[Any] = []
    for token in tokens:
        if token.type == "inline":
            token.children = _without_addresses([*number, *token.children])
            number = []
        elif (
            number and token.type != "paragraph_open"
        ):  # an item that begins with something else: code, a list, nothing
            kept += number
            number = []
        kept.append(token)
        if token.type == "list_item_open" and token.info:
            number = _text(f"{token.info}{token.markup} ")
    return kept


def _text(content: str) -> list[Any]:
    from markdown_it.token import Token

    return [Token("text", "", 0, content=content)] if content else []


def _without_addresses(children: list[Any]) -> list[Any]:
    """Replace links and images by what they say, with their address behind it in parentheses."""
    kept: list[Any] = []
    addresses: list[str] = []
    for token in children:
        if token.type == "link_open":
            addresses.append(str(token.attrs.get("href", "")))
        elif token.type == "link_close":
            kept += _text(f" ({addresses.pop()})")
        elif token.type == "image":
            kept += _text(f"{token.content} ({token.attrs.get('src', '')})")
        else:
            kept.append(token)
    return kept
