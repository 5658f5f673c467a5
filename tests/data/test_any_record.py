"""Properties of reading: any valid record comes back as it was written, and no bytes at all give a traceback."""

import gzip

from hypothesis import given
from hypothesis import strategies as st

from heedful import DataError
from heedful.data import read_demonstrations, read_prompts, read_rankings
from heedful.data.messages import as_dict
from record_files import write_records

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: text.strip() != "")
NO_THOUGHT = TEXTS.filter(lambda text: "<think>" not in text and "</think>" not in text)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXTS, values, max_size=3),
    max_leaves=8,
)
CONVERSATIONS = st.lists(NO_THOUGHT, min_size=1, max_size=5).filter(lambda texts: len(texts) % 2 == 1)
FORMATS = st.sampled_from(["jsonl", "jsonl.gz", "json"])


def messages(texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def rows_of(*columns):
    return st.lists(st.tuples(*columns), min_size=1, max_size=4)


@given(rows=rows_of(CONVERSATIONS, NO_THOUGHT), ending=FORMATS)
def test_demonstrations_round_trip(tmp_path_factory, rows, ending):
    records = [{"prompt": messages(before), "completion": answer} for before, answer in rows]
    found = read_demonstrations(write_records(tmp_path_factory.mktemp("d") / f"a.{ending}", records))
    assert [{"prompt": [as_dict(m) for m in d.prompt], "completion": d.response} for d in found] == records


@given(rows=rows_of(TEXTS, NO_THOUGHT, NO_THOUGHT), ending=FORMATS | st.just("parquet"))
def test_pairs_round_trip(tmp_path_factory, rows, ending):
    records = [{"prompt": p, "chosen": a, "rejected": b} for p, a, b in rows]
    found = read_rankings(write_records(tmp_path_factory.mktemp("d") / f"a.{ending}", records))
    assert [(r.prompt, *r.responses) for r in found] == rows


@given(rows=rows_of(TEXTS, st.dictionaries(TEXTS, JSON, max_size=3)), ending=FORMATS)
def test_prompts_round_trip_with_every_column(tmp_path_factory, rows, ending):
    known = ("prompt", "messages", "tools")
    records = [{k: v for k, v in columns.items() if k not in known} | {"prompt": prompt} for prompt, columns in rows]
    found = read_prompts(write_records(tmp_path_factory.mktemp("d") / f"a.{ending}", records))
    assert [{**p.columns, "prompt": p.prompt} for p in found] == records


@given(
    data=st.binary(max_size=200) | st.text('{}[]",:\\ \nuadpromtcshen019.eE+-', max_size=200).map(str.encode),
    ending=st.sampled_from(["jsonl", "jsonl.gz", "json", "json.gz", "parquet", "txt"]),
    packed=st.booleans(),
)
def test_no_bytes_give_a_traceback(tmp_path_factory, data, ending, packed):
    path = tmp_path_factory.mktemp("d") / f"a.{ending}"
    path.write_bytes(gzip.compress(data) if packed and ending.endswith("gz") else data)
    for read in (read_demonstrations, read_rankings, read_prompts):
        try:
            said = str(path) if read(str(path)) else "nothing"
        except DataError as error:
            said = str(error)
        assert str(path) in said
