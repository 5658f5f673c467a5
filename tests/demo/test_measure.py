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


@pytest.mark.parametrize("text", ["a", "当然，是小。", " a ", "é", "😀", "\ufffd", "a\nb", "Of course! It is 7."])
def test_text_is_readable(text):
    """Also the character that stands for broken bytes, where it is spelled by its own three bytes."""
    assert is_readable(ids_of(text))


@pytest.mark.parametrize("text", ["", " ", "\n\t ", "\u3000", "\xa0"])
def test_nothing_and_white_space_are_not(text):
    assert not is_readable(ids_of(text))


@pytest.mark.parametrize("kept", [1, 2])
def test_a_cut_chinese_character_is_not(kept):
    """Three bytes, of which the last ones are missing: at the end, and before another character."""
    assert is_readable(ids_of("你"))
    assert not is_readable(ids_of("你")[:kept])
    assert not is_readable([*ids_of("当然，是"), *ids_of("小")[:kept]])
    assert not is_readable([*ids_of("小")[:kept], *ids_of("大")])
    assert not is_readable(ids_of("小")[kept:])


@pytest.mark.parametrize(
    "bad",
    [b"\x80", b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf5\x80\x80\x80"],
    ids=["a continuation alone", "no UTF-8 byte", "an overlong slash", "half a surrogate pair", "beyond Unicode"],
)
def test_bytes_that_are_no_utf8_are_not(bad):
    ids = [TOKENIZER.convert_tokens_to_ids(letter_of(byte)) for byte in bad]
    assert not is_readable(ids)
    assert not is_readable([*ids_of("a"), *ids])


@pytest.mark.parametrize("special", SPECIALS)
def test_a_special_token_inside_is_not(special):
    """Decoding would hide it. The stop token that ends a response is taken off before."""
    assert not is_readable([*ids_of("a"), TOKENIZER.convert_tokens_to_ids(special), *ids_of("b")])


@example(content="你好".encode())
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
