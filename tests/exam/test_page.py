"""The page: escaped, self-contained, in both schemes; an earlier page is replaced only if that is asked for."""

import re

import pytest

from exam_cases import length
from heedful.configs.exam import ExamConfig
from heedful.exam.page import html_page

EVIL = [
    {
        "prompt": "<script>alert('猫')</script>",
        "chosen": '好的 <b>&amp; "x"',
        "rejected": "<img src=x onerror=alert(1)>",
    },
    {"prompt": "q", "chosen": "yes\x1b[31m", "rejected": "a much longer one"},
]
SMALL = {"rounds": 1, "edits": 1}


def test_text_of_data_is_escaped(examined):
    """And characters that are obeyed are shown as codes."""
    evil = {"prompt": "q\u202ex", "chosen": "a\x1b[31m\nb", "rejected": "c\x07 d e f g"}
    page = html_page(examined(length, EVIL, **SMALL))
    assert "&lt;script&gt;alert(&#39;猫&#39;)&lt;/script&gt;" in page
    assert "好的 &lt;b&gt;&amp;amp; &#34;x&#34;" in page
    assert not re.search(r"<(script|img|b)\b", page)
    page = html_page(examined(length, [evil] * 2, **SMALL))
    assert not re.search("[\x1b\x07\u202e]", page)
    assert "q\\u202ex" in page
    assert "a\\x1b[31m\nb" in page, "lines stay"


def test_all_parts_are_on_it(examined, tiny):
    """The number, the formula and its terms, ten examples, each part by its title."""
    record = examined(length, policy=tiny(), prompts=2, n=2, max_new_tokens=3, second=[length], **SMALL)
    page = html_page(record)
    assert not re.search(r"https?://|src=|href=|@import|url\(", page), "it needs nothing from elsewhere"
    assert "prefers-color-scheme: dark" in page
    assert "猫在睡觉。" in html_page(examined(length, **SMALL))
    assert f'<span class="score">{record["score"]:.0f}</span> of 100' in page
    assert "score = 100 × geometric mean of the values" in page
    assert page.count('class="example"') == 10
    titles = re.findall("<h2>(.*)</h2>", page)
    assert titles[2:-2] == [
        *("Accuracy", "Calibration", "Margins", "Length", "Baselines", "Other rewards on the pairs", "Probes"),
        *("Random edits of chosen responses", "Search under the policy", "Over-optimisation foretold"),
    ]
    assert titles[-2:] == ["Not done", "Settings"]


@pytest.fixture
def exam(heedful, written):
    data = written("pairs.jsonl", EVIL)

    def run(*words):
        return heedful("exam", "rule:length:1-9", "--data", data, "--rounds", 1, "--edits", 1, *words)

    return run


def test_in_the_terminal(exam, tmp_path):
    page = tmp_path / "new" / "页.html"
    found = exam("--output", page)
    assert found.status == 0, found.err
    assert re.search(r"rule:length:1-9: \d+ of 100", found.out)
    assert "what the score is made of" in found.out
    assert "\x1b[31m" not in found.out
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "页.html" in found.out


def test_only_an_earlier_page_is_replaced(exam, tmp_path):
    page, other = tmp_path / "exam.json", tmp_path / "mine.html"
    other.write_text("<p>mine</p>", encoding="utf-8")
    assert exam("--output", page).status == 0
    assert "--overwrite" in exam("--output", page).message
    assert exam("--output", page, "--overwrite").status == 0
    refused = exam("--output", other, "--overwrite")
    assert (refused.status, other.read_text(encoding="utf-8")) == (2, "<p>mine</p>")
    assert "was not written by heedful exam" in refused.message
    for name in (tmp_path, "x.png"):
        assert exam("--output", name).status == 2
    assert ExamConfig(reward="r", output="x.HTML").output.name == "x.HTML"
