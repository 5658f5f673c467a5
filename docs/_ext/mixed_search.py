"""Search in English and Chinese: words by their stems, Chinese by every two neighbouring characters.

Sphinx indexes a site for one language. Here a run of Chinese characters is cut into pairs (优势函数: 优势, 势函, 函数), both
in the index and in what is typed, so that a page is found by any part of a phrase. _ext/search.js is the same in the browser.
"""

import re
from pathlib import Path

from sphinx.search.en import SearchEnglish

RUN = re.compile(r"[\u3400-\u9fff]+|[^\W\u3400-\u9fff]+")


def words(text):
    """English words, and pairs of Chinese characters; a single character stands for itself."""
    for run in RUN.findall(text):
        if "\u3400" <= run[0] <= "\u9fff" and len(run) > 1:
            yield from (run[i : i + 2] for i in range(len(run) - 1))
        else:
            yield run


class MixedSearch(SearchEnglish):
    lang = "mixed"
    language_name = "English"  # names the stemmer in the browser: EnglishStemmer
    js_splitter_code = (Path(__file__).parent / "search.js").read_text(encoding="utf-8")

    def split(self, text):
        return list(words(text))


def setup(app):
    app.add_search_language(MixedSearch)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
