"""Which token ids spell text, by hand and against an independent reading of the byte-level alphabet."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from heedful.demo import measure
from heedful.demo.measure import bytes_of_tokens, unreadable
from heedful.models import byte_tokenizer
from heedful.models.tiny import SPECIALS

TOKENIZER = byte_tokenizer()
SPELLING = bytes_of_tokens(TOKENIZER)
LEARNED = byte_tokenizer(texts=["当然，是小。", "Of course! It is 7."] * 2, vocab_size=300)
"""Of tokens of several bytes, such as the first two of 小."""


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False).input_ids


def is_readable(ids):
    return measure.is_readable(ids, SPELLING)


def letter_of(byte):
    """GPT-2's rule, written out: three printable ranges stand for themselves, the n-th other byte is U+0100 + n."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    if byte in printable:
        return chr(byte)
    return chr(256 + sum(other not in printable for other in range(byte)))


def test_what_is_text():
    """Also the character that stands for broken bytes, spelled by its own three bytes. Nothing and white space are none, nor
    is a cut character, or a special token, which decoding would hide."""
    for text in ("a", "当然，是小。", " a ", "é", "😀", "\ufffd", "a\nb", "Of course! It is 7."):
        assert is_readable(ids_of(text)), text
    for text in ("", " ", "\n\t ", "\u3000", "\xa0"):
        assert not is_readable(ids_of(text)), text
    for special in SPECIALS:
        assert not is_readable([*ids_of("a"), TOKENIZER.convert_tokens_to_ids(special), *ids_of("b")])
    for kept in (1, 2):
        assert not is_readable([*ids_of("小")[:kept], *ids_of("大")])


@example(content="你好".encode())
@example(content=b"\xed\xa0\x80")
@example(content=b"\xc0\xaf")
@example(content=b"\xf5\x80\x80\x80")
@given(content=st.binary(max_size=12) | st.text(max_size=6).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes(content):
    """Python's own strict decoder is the judge."""
    try:
        expected = bool(content.decode("utf-8").strip())
    except UnicodeDecodeError:
        expected = False
    assert is_readable([TOKENIZER.convert_tokens_to_ids(letter_of(byte)) for byte in content]) == expected


def test_as_a_reward():
    """One number a response, 1 for those that are no text; other columns are ignored."""
    ids = [ids_of("好"), [], ids_of("好")[:2], ids_of(" ")]
    columns = {"completions": ["好", "", "\ufffd", " "], "truncated": [False] * 4}
    assert unreadable(TOKENIZER)(completion_ids=ids, **columns) == [0, 1, 1, 1]


@pytest.mark.parametrize("text", ["当然，是小。", "Of course! It is 7.", "小大"])
def test_tokens_of_several_bytes_spell_theirs(text):
    """All beginnings of a text: unreadable where the tokenizer itself decodes a broken character."""
    spelling = bytes_of_tokens(LEARNED)
    ids = LEARNED(text, add_special_tokens=False).input_ids
    assert len(ids) < len(text.encode())
    assert b"".join(spelling[token] for token in ids) == text.encode()
    beginnings = [ids[:end] for end in range(1, len(ids) + 1)]
    assert [measure.is_readable(one, spelling) for one in beginnings] == [
        "\ufffd" not in LEARNED.decode(one) for one in beginnings
    ]
