"""Model text as Markdown, for projects that switch it on: rendered without raw HTML, then sanitised to a list of plain tags.

Nothing that is rendered can load or lead anywhere: links and images become their text with the address behind it.
"""

from typing import Any

TAGS = {
    *("p", "br", "hr", "em", "strong", "s", "code", "pre", "blockquote", "ul", "ol", "li"),
    *("h1", "h2", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td"),
}
"""What may be left in the page; none of it has attributes."""


def markdown_to_html(text: str) -> str:
    """Return Markdown as HTML of `TAGS` only, without any attribute."""
    import nh3
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    tokens = parser.parse(text)
    for token in tokens:
        if token.children:
            token.children = _without_addresses(token.children)
    html = parser.renderer.render(tokens, parser.options, {})
    return nh3.clean(html, tags=TAGS, attributes={}, link_rel=None)


def _without_addresses(children: list[Any]) -> list[Any]:
    """Replace links and images by what they say, with their address behind it in parentheses."""
    from markdown_it.token import Token

    kept: list[Any] = []
    addresses: list[str] = []
    for token in children:
        if token.type == "link_open":
            addresses.append(str(token.attrs.get("href", "")))
        elif token.type == "link_close":
            kept.append(Token("text", "", 0, content=f" ({addresses.pop()})"))
        elif token.type == "image":
            kept.append(Token("text", "", 0, content=f"{token.content} ({token.attrs.get('src', '')})"))
        else:
            kept.append(token)
    return kept
