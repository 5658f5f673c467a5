"""Records that are too long are named and counted; nothing is lost above the share that was allowed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful import ConfigError, DataError
from heedful.data.fitting import check_dropped, max_length, too_long

LENGTHS = [5, 6, 7, 4, 9]
SOURCES = [f"数据.jsonl:{i}" for i in range(1, 6)]


def fit(lengths=LENGTHS, *, limit=6, action="drop"):
    sources = [f"数据.jsonl:{i}" for i in range(1, len(lengths) + 1)]
    return too_long(lengths, sources, limit=limit, action=action, what="pairs")


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(0, 9))
def test_longer_than_the_limit_and_no_other(lengths, limit):
    """A record of exactly the limit fits."""
    assert fit(lengths, limit=limit, action="truncate") == {i for i in range(len(lengths)) if lengths[i] > limit}


def test_an_error_names_records_and_remedies():
    with pytest.raises(DataError) as error:
        fit(action="error")
    assert str(error.value) == (
        "2 of 5 pairs are longer than 6 tokens: 数据.jsonl:3 (7 tokens), 数据.jsonl:5 (9 tokens). "
        "Use --too-long drop or --too-long truncate, or a model with a longer context"
    )
    assert fit(action="error", limit=9) == set()


def test_only_the_first_five_are_named():
    with pytest.raises(DataError) as error:
        fit([9] * 6, action="error")
    assert "数据.jsonl:5 (9 tokens), .... Use" in str(error.value)
    assert "数据.jsonl:6" not in str(error.value)


def test_dropping_and_truncating_report_the_same_records():
    assert fit(action="drop") == fit(action="truncate") == {2, 4}
    assert fit([9, 9], action="drop") == {0, 1}


def check(max_dropped, **counts):
    check_dropped(counts, max_dropped=max_dropped, path="数据.jsonl")


def test_the_share_that_may_be_dropped():
    """Exactly the share is allowed, one record more is not; what was cut or held out asks for no share."""
    check(0.4, records=5, dropped_too_long=2)
    check(0.1, records=100, dropped_too_long=10)
    with pytest.raises(DataError) as error:
        check(0.39, records=5, train=3, held_out=2, dropped_too_long=2)
    assert str(error.value) == (
        "数据.jsonl: 2 of 5 records (40.0%) would be dropped (2 too long), more than --max-dropped 0.39. "
        "Fix the data or raise it; --too-long error names the first"
    )
    with pytest.raises(DataError, match="11 of 100 records"):
        check(0.1, records=100, dropped_too_long=11)
    check(0.0, records=5, truncated=5, text_pieces=9, train=5, held_out=5, held_out_prompts_also_trained_on=5)


def test_causes_add_up():
    """Each alone is within the share; together a quarter of the data would be gone."""
    causes = {"dropped_unusable": 9, "dropped_too_long": 8, "dropped_equal": 7}
    for name, count in causes.items():
        check(0.1, records=100, **{name: count})
    with pytest.raises(
        DataError,
        match=r"24 of 100 records \(24.0%\) would be dropped \(9 unusable, 8 too long, 7 equal\), .*--max-dropped 0\.1\.",
    ):
        check(0.1, records=100, **causes)
    check(0.24, records=100, **causes)
    with pytest.raises(DataError):
        check(0.23, records=100, **causes)


def test_a_cause_of_none_is_not_listed():
    with pytest.raises(DataError, match=r"\(2 too short\)"):
        check(0.1, records=4, dropped_too_long=0, dropped_too_short=2)


@given(
    st.integers(1, 50),
    st.lists(st.integers(0, 20), min_size=3, max_size=3),
    st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
)
def test_the_share_is_of_everything_dropped(kept, dropped, share):
    """Shares that floats hold exactly, against whole numbers."""
    records = kept + sum(dropped)
    names = ("dropped_unusable", "dropped_too_long", "dropped_equal")
    allowed = 4 * sum(dropped) <= round(4 * share) * records
    try:
        check(share, records=records, **dict(zip(names, dropped, strict=True)))
    except DataError:
        assert not allowed
    else:
        assert allowed


def test_everything_is_never_dropped():
    with pytest.raises(DataError, match=r"2 of 2 records \(100.0%\) would be dropped \(2 too long\)"):
        check(1.0, records=2, dropped_too_long=2)
    with pytest.raises(DataError, match=r"3 of 3 records \(100.0%\) would be dropped \(1 unusable, 2 equal\)"):
        check(1.0, records=3, dropped_unusable=1, dropped_equal=2)
    check(1.0, records=3, dropped_too_long=2)
    check(0.0, records=3, dropped_too_long=0)
    check(0.0, records=0)


def test_the_longest_record_that_a_model_can_read():
    assert max_length(None, 512) == 512
    assert max_length(2, 512) == 2
    assert max_length(512, 512) == 512
    for wanted in (513, 1, 0, -5):
        with pytest.raises(ConfigError, match=f"between 2 and the 512 tokens that the model can read, got {wanted}"):
            max_length(wanted, 512)
