"""Model text as Markdown: a list of plain tags without attributes, and nothing that loads or leads anywhere."""

import re

import pytest

from heedful.label.server import markup
from heedful.label.server.markup import TAGS, markdown_to_html

CORPUS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg><animate onbegin=alert(1)>",
    "[a](javascript:alert(1))",
    "[a](data:text/html;base64,PHNjcmlwdD4=)",
    "![a](http://beacon.example/a.png)",
    "[![a](http://beacon.example/a.png)](http://evil.example)",
    "<http://evil.example/x>",
    "[a]: http://evil.example/ref\n\n[a] ![b][a]",
    "<a href='//evil.example'>x</a>",
    "<style>*{background:url(//evil.example)}</style>",
    "<iframe srcdoc='<script>alert(1)</script>'>",
    "```js\n</code></pre><script>alert(1)</script>\n```",
    "`</code><script>alert(1)</script>`",
    "# a <b onclick=alert(1)>b</b>",
    "| a | b |\n|:-:|--:|\n| <script>1</script> | [x](javascript:1) |",
    "1. a\n2. b\n\n7. c",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "<!-- --><noscript><p title='</noscript><img src=x onerror=alert(1)>'>",
    "<math><mtext></form><form><mglyph><style></math><img src onerror=alert(1)>",
]


@pytest.mark.parametrize("text", CORPUS)
def test_only_plain_tags_without_attributes_are_left(text):
    html = markdown_to_html(text)
    for tag in re.findall(r"<[^>]*>", html):
        name = re.fullmatch(r"</?([a-z0-9]+)>", tag)
        assert name is not None, tag
        assert name[1] in TAGS, tag


def test_links_and_images_say_where_they_would_have_gone():
    assert markdown_to_html("[here](https://a.example/b)") == "<p>here (https://a.example/b)</p>\n"
    assert markdown_to_html("![a cat](https://a.example/cat.png)") == "<p>a cat (https://a.example/cat.png)</p>\n"


def test_formatting_and_text_of_all_kinds_stay():
    html = markdown_to_html("**粗** *x* `y` ~~z~~ 😀\u2028\u202eabc\n\n- a\n- b\n\n> q")
    for part in ("<strong>粗</strong>", "<em>x</em>", "<code>y</code>", "<s>z</s>", "😀\u2028\u202eabc", "<li>a</li>"):
        assert part in html
    assert "<blockquote>" in html


def test_markup_in_the_text_is_shown_as_text():
    assert markdown_to_html("a <b>c</b>") == "<p>a &lt;b&gt;c&lt;/b&gt;</p>\n"


def test_the_sanitiser_has_the_last_word(monkeypatch):
    """Also if the renderer let something through."""
    monkeypatch.setattr(markup, "_without_addresses", lambda children: children)
    html = markdown_to_html("[a](https://x.example) ![b](https://x.example/y.png)")
    assert html == "<p>a </p>\n"
