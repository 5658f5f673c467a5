"""Model text as Markdown: a list of plain tags without attributes, and nothing that loads or leads anywhere."""

import re
from html import unescape

import pytest

from heedful.apps.label.server import markup
from heedful.apps.label.server.markup import TAGS, markdown_to_html

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


def test_only_plain_tags_without_attributes_are_left():
    for text in CORPUS:
        for tag in re.findall(r"<[^>]*>", markdown_to_html(text)):
            name = re.fullmatch(r"</?([a-z0-9]+)>", tag)
            assert name is not None, (text, tag)
            assert name[1] in TAGS, (text, tag)


def test_links_images_and_markup_in_the_text_are_shown_as_text():
    assert markdown_to_html("[here](https://a.example/b)") == "<p>here (https://a.example/b)</p>\n"
    assert markdown_to_html("![a cat](https://a.example/cat.png)") == "<p>a cat (https://a.example/cat.png)</p>\n"
    assert markdown_to_html("a <b>c</b>") == "<p>a &lt;b&gt;c&lt;/b&gt;</p>\n"


def test_formatting_and_text_of_all_kinds_stay():
    html = markdown_to_html("**粗** *x* `y` ~~z~~ 😀\u2028\u202eabc\n\n- a\n- b\n\n> q")
    for part in ("<strong>粗</strong>", "<em>x</em>", "<code>y</code>", "<s>z</s>", "😀\u2028\u202eabc", "<li>a</li>"):
        assert part in html
    assert "<blockquote>" in html


def test_the_sanitiser_has_the_last_word(monkeypatch):
    """Also if the renderer let something through."""
    monkeypatch.setattr(markup, "_without_addresses", lambda children: children)
    html = markdown_to_html("[a](https://x.example) ![b](https://x.example/y.png)")
    assert html == "<p>a </p>\n"


def text_of(html):
    """What a browser shows of it, as text; a line break for each <br>."""
    return unescape(re.sub(r"<[^>]*>", "", html.replace("<br>\n", "<br>").replace("<br>", "\n")))


AS_WRITTEN = [
    "2*3*4 = 24, a*b + c*d, 2**3**2, (a)*b*(c), (x)**2 + (y)**2",
    "__init__ and __name__ == '__main__', snake_case_name, _x_",
    r"\int f(x)\,dx, \{a\} \% \\ \; \! C:\new\path",
    "第一行\n第二行\n第三行",
    r"$a*b*c\,dx$ and $x_1$, $\{x\}$",
    r"\(a_b*c*d\,\) \[ x*y*z \]",
    "$$a*b*c \\\\\n d$$",
    "It costs $5 and *args, **kwargs then $6",
    "[1]: https://source.example/a",
    "text\n[^1]: note",
    "\\",
    "a\\\nb",
    "$",
]


def test_what_is_no_markup_stays_as_it_is_written():
    assert [text_of(markdown_to_html(text)) for text in AS_WRITTEN] == [f"{text}\n" for text in AS_WRITTEN]


@pytest.mark.parametrize(
    "text",
    [
        "\\[\n x\n- y \\\\\n# z\n\n+ w\n> v\n\\]",
        "$$\nx\n===\n1. y\n$$",
        "\\begin{align*}\n a &= b*c*d \\\\\n- e\n\\end{align*}",
    ],
)
def test_latex_with_lines_of_its_own_is_one_block(text):
    html = markdown_to_html(f"积分\n{text}\n\n* z")
    assert html.startswith("<p>积分</p>\n<pre><code>")
    assert html.endswith("</code></pre>\n<ul>\n<li>z</li>\n</ul>\n")
    assert text_of(re.search(r"<code>(.*)</code>", html, re.DOTALL)[1]).rstrip("\n") == text


def test_an_opening_that_is_never_closed_is_text():
    assert "\\[ open" in markdown_to_html("\\[ open\n- a")
    assert "<li>a" in markdown_to_html("\\[ open\n- a")
    assert "$$" in markdown_to_html("$$\nb\n\n- c")


def test_emphasis_is_where_words_are_not_cut():
    assert markdown_to_html("这是**粗体**文字, **bold**, *it*") == (
        "<p>这是<strong>粗体</strong>文字, <strong>bold</strong>, <em>it</em></p>\n"
    )
    assert markdown_to_html(r"a \*b\*, \_x\_, \$5") == "<p>a *b*, _x_, $5</p>\n"


def test_lists_keep_the_numbers_that_were_written():
    assert text_of(markdown_to_html("3. 三\n4. 四\n\ntext\n\n7) a")).split() == [
        "3.",
        "三",
        "4.",
        "四",
        "text",
        "7)",
        "a",
    ]
    html = markdown_to_html("1. ```\n   code\n   ```\n2.\n3. x")
    assert [html.count(f"{n}. ") for n in (1, 2, 3)] == [1, 1, 1]
    assert html.index("1. ") < html.index("code") < html.index("2. ") < html.index("3. x")


def test_a_line_of_dashes_under_text_makes_no_heading_of_it():
    assert markdown_to_html("Hello\n---\nWorld") == "<p>Hello</p>\n<hr>\n<p>World</p>\n"
