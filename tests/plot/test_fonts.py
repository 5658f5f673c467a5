"""Chinese is drawn with a font that has it; without one, a single warning says what to install, and codes are drawn."""

import pytest
from matplotlib import font_manager

from heedful import plot
from heedful.apps.plot import style


@pytest.fixture
def only_latin(monkeypatch):
    """matplotlib's list of fonts as it was made on a machine without any font but matplotlib's own."""
    own = [font for font in font_manager.fontManager.ttflist if font.name == style.LATIN]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", own)
    style.look_for_chinese.cache_clear()
    yield
    style.look_for_chinese.cache_clear()


@pytest.mark.skipif(len(style.families()) == 1, reason="no CJK font is installed")
def test_a_font_that_was_installed_since_is_found(only_latin):
    drawn = plot.tokens(["你"], {"KL": [0.1]})
    assert drawn.axes[0].texts[1].get_text() == "你"
    drawn.draw_without_rendering()


def test_without_a_font_one_warning_says_what_to_install(only_latin, monkeypatch):
    monkeypatch.setattr(font_manager, "findSystemFonts", list)
    with pytest.warns(UserWarning, match="apt install fonts-noto-cjk"):
        drawn = plot.tokens(["你", "a", "火"], {"KL": [0.1, 0.2, 0.3]})
    plot.tokens(["你"], {"KL": [0.1]})  # warnings are errors here
    assert [text.get_text() for text in drawn.axes[0].texts][1::2][:2] == [r"\u4f60", "a"]
    drawn.draw_without_rendering()
