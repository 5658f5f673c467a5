"""The demo's texts in two languages: the same texts with the same gaps, in lines that a terminal shows whole."""

import re
import textwrap

import pytest
from rich.cells import cell_len

from heedful import DemoConfig, run_demo
from heedful.apps.demo.story import STORIES, language_of, wrap

GAP = re.compile(r"\{[^}]*\}")


def texts(language):
    """Every text by its name, those of tables too."""
    return {
        f"{name}.{part}" if part else name: text
        for name, value in STORIES[language].items()
        for part, text in (value.items() if isinstance(value, dict) else [("", value)])
    }


def paragraphs(language):
    """Those of the texts between the stages."""
    long = [text.strip() for text in texts(language).values() if text.startswith("\n")]
    return [paragraph for text in long for paragraph in text.split("\n\n")]


def test_both_languages_have_the_same_texts_with_the_same_gaps():
    english, chinese = texts("en"), texts("zh")
    assert list(english) == list(chinese)
    for name, text in english.items():
        assert sorted(GAP.findall(text)) == sorted(GAP.findall(chinese[name])), name
        assert text.count("\n# ") == chinese[name].count("\n# "), name


def test_english_is_broken_at_spaces_and_chinese_not_before_a_full_stop():
    for paragraph in paragraphs("en"):
        assert wrap(paragraph, 72) == textwrap.fill(paragraph, 72, break_on_hyphens=False)
    for width in (40, 100):
        for paragraph in paragraphs("zh"):
            lines = wrap(paragraph, width).split("\n")
            assert max(map(cell_len, lines)) <= width
            assert not [line for line in lines if line[0] in "，。；：、！？）”》" or line[-1] in "（“《"]
            assert re.sub(r"\s", "", "".join(lines)) == re.sub(r"\s", "", paragraph)
            assert len(lines) <= 1.2 * cell_len(paragraph) / width + 1, "lines are filled"


def test_a_line_break_between_chinese_characters_is_no_space():
    """Nor one after Chinese punctuation; between a character and a word it is one."""
    assert wrap("奖励模型\n打分，\nPPO 学习\nKL", 40) == "奖励模型打分，PPO 学习 KL"


@pytest.mark.parametrize(
    ("variables", "setting", "language"),
    [
        ({"LANG": "zh_CN.UTF-8"}, "auto", "zh"),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "zh_TW.UTF-8"}, "auto", "zh"),
        ({"LANG": "zh_CN.UTF-8", "LANGUAGE": "en:zh"}, "auto", "en"),
        ({"LANG": "zh_CN.UTF-8"}, "en", "en"),
        ({"LANG": "de_DE.UTF-8"}, "auto", "en"),
        ({}, "auto", "en"),
        ({}, "zh", "zh"),
    ],
)
def test_the_language_is_that_of_the_environment_or_of_the_setting(monkeypatch, variables, setting, language):
    for name in ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert language_of(setting) == language


@pytest.mark.exhaustive
def test_the_demo_in_chinese(small_world, small_recipe, tmp_path, capsys):
    run_demo(DemoConfig(output=tmp_path / "演示", device="cpu", language="zh"), small_recipe)
    said = capsys.readouterr().out
    for fragment in (
        "监督微调（SFT）",
        "37% 是好的",
        "训练 3 步，每一步模型回答 32 个提示词",
        "毫无毛病的回答",
        "标准裁判的平均分",
    ):
        assert fragment in said.replace("\n", ""), fragment
    gaps = {gap for text in texts("zh").values() for gap in GAP.findall(text)}
    assert not [gap for gap in gaps if gap in said], "a model of random weights may write a brace of its own"
    assert "held-out" not in said
