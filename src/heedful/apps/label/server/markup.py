"""Model text as Markdown, for projects that enable it: rendered without raw HTML, then sanitised to a list of plain tags.

The result loads nothing and has no links: links and images become their text followed by the address. No text to be judged
may be lost: LaTeX and line breaks stay, a mark inside a word (``2*3*4``, ``__init__``) is not emphasis, a backslash is
removed only before Markdown marks, and lists keep their numbers as written.
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
"""Allowed tags, without attributes."""
INLINE_MATH = re.compile(
    r"\$\$(?:(?!\n[ \t]*\n)[^$]){1,2000}\$\$"
    r"|\\\[(?:(?!\n[ \t]*\n).){1,2000}?\\\]"
    r"|\\\((?:(?!\n[ \t]*\n).){1,2000}?\\\)"
    r"|\$(?![\s$])(?:\\.|(?!\n[ \t]*\n)[^$\\`]){1,2000}(?<!\s)\$(?![\d$])",
    re.DOTALL,
)
"""Inline LaTeX: ``$...$`` without spaces at its ends or a digit after it (which excludes prices), ``$$...$$``,
``\\(...\\)``, ``\\[...\\]``; over several lines, but not over an empty one. At most 2,000 characters, so that a text with
many openings stays fast."""
BLOCK_MATH = re.compile(r"(?:(\$\$)|(\\\[)|\\begin\{(\w+\*?)\})")
"""Openings of block LaTeX, whose content may look like lists, headings and quotes."""
LONGEST_MATH = 200
"""Most lines of block LaTeX."""
ESCAPABLE = "*_`~|#$"
"""A backslash escapes these marks; before other characters it is text, as in ``\\,`` of LaTeX or a path."""


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
    parser.disable(["lheading", "reference"])  # a line of dashes is a rule, and a line "[1]: address" is text
    parser.block.ruler.before("code", "math", _block_math, {"alt": ["paragraph", "blockquote", "list"]})
    parser.inline.ruler.before("escape", "math", _inline_math)
    parser.inline.ruler.at("escape", _escape)
    parser.inline.ruler.at("emphasis", _emphasis)
    return parser


def _block_math(state: Any, start: int, end: int, silent: bool) -> bool:
    """LaTeX that starts and ends with whole lines, as a code block with its delimiters."""
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
                return False  # text follows, so it is part of a sentence
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
    """Emphasis by stars outside words; underscores are text. In languages without spaces, anywhere."""
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
    """True for letters and digits, except Chinese, Japanese and Korean, and for brackets, as in (a)*b*(c)."""
    return (character.isalnum() and ord(character) < 0x2E80) or character in brackets


def _numbered(tokens: list[Any]) -> list[Any]:
    """Write list numbers into the items as given, and addresses after their links."""
    kept: list[Any] = []
    number: list[Any] = []
    for token in tokens:
        if token.type == "inline":
            token.children = _without_addresses([*number, *token.children])
            number = []
        elif number and token.type != "paragraph_open":  # the item begins with code or a list, or is empty
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
    """Replace links and images by their text, followed by the address in parentheses."""
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
