"""Records that are too long are named and counted; nothing is lost above the share that was allowed."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.data.fitting import check_share, max_length, too_long
from heedful.errors import ConfigError, DataError

LENGTHS = [5, 6, 7, 4, 9]
SOURCES = [f"数据.jsonl:{i}" for i in range(1, 6)]


def fit(lengths=LENGTHS, *, limit=6, action="drop", max_dropped=1.0):
    sources = [f"数据.jsonl:{i}" for i in range(1, len(lengths) + 1)]
    return too_long(lengths, sources, limit=limit, action=action, max_dropped=max_dropped, what="pairs")


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(0, 9))
def test_longer_than_the_limit_and_no_other(lengths, limit):
    """A record of exactly the limit fits."""
    assert fit(lengths, limit=limit, action="truncate") == [i for i in range(len(lengths)) if lengths[i] >= limit + 1]


def test_an_error_names_records_and_remedies():
    with pytest.raises(DataError) as error:
        fit(action="error")
    assert str(error.value) == (
        "2 of 5 pairs are longer than 6 tokens: 数据.jsonl:3 (7 tokens), 数据.jsonl:5 (9 tokens). "
        "Use --too-long drop or --too-long truncate, or a model with a longer context"
    )
    assert fit(action="error", limit=9) == []


def test_only_the_first_five_are_named():
    with pytest.raises(DataError) as error:
        fit([9] * 6, action="error")
    assert "数据.jsonl:5 (9 tokens), .... Use" in str(error.value)
    assert "数据.jsonl:6" not in str(error.value)


def test_the_share_that_may_be_dropped():
    """Exactly the share is allowed; truncation drops nothing and asks for no share."""
    assert fit(max_dropped=0.4) == [2, 4]
    message = "more than --max-dropped 0.39"
    with pytest.raises(DataError, match=rf"3 \(7 tokens\).*would lose 40.0% of the data, {re.escape(message)}"):
        fit(max_dropped=0.39)
    assert fit(action="truncate", max_dropped=0.0) == [2, 4]


def test_everything_is_never_dropped():
    with pytest.raises(DataError, match=r"would lose 100\.0% of the data"):
        fit([9, 9], max_dropped=1.0)
    with pytest.raises(DataError, match=r"^some text\. Dropping them would lose 100.0%"):
        check_share(3, 3, max_dropped=1.0, found="some text")
    check_share(0, 3, max_dropped=0.0, found="some text")


def test_the_longest_record_that_a_model_can_read():
    assert max_length(None, 512) == 512
    assert max_length(2, 512) == 2
    assert max_length(512, 512) == 512
    for wanted in (513, 1, 0, -5):
        with pytest.raises(ConfigError, match=f"between 2 and the 512 tokens that the model can read, got {wanted}"):
            max_length(wanted, 512)
