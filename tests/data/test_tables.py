"""Tables of other libraries: what Arrow adds to a row is no part of it, and what datasets decodes is decoded."""

import json

import datasets
import pandas
import pyarrow
import pytest
from pyarrow import feather, parquet

import heedful
from heedful import DataError
from heedful.data import read_prompts
from heedful.data.in_memory import write_records
from heedful.data.messages import as_dict
from jsonl import write_jsonl


def tool(name, parameters):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"} | parameters}}


def row(question, name, arguments, parameters):
    called = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
    calling = {"role": "assistant", "content": "", "tool_calls": called}
    result = {"role": "tool", "content": "3", "name": name}
    return {"prompt": [{"role": "user", "content": question}, calling, result], "tools": [tool(name, parameters)]}


ROWS = [
    row("一加二？", "add", {"a": 1, "b": 2}, {"properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    row("奥斯陆在哪？", "find", {"city": "Oslo"}, {"properties": {"city": {"type": "string"}}}),
]
MIXED = [ROWS[0], row("一加 x？", "add", {"a": "x"}, {"properties": {"a": {}}})]
NULLS = [
    row("一加？", "add", {"a": 1, "b": None}, {"default": None, "enum": [None, 1]}),
    row("一加二？", "add", {"b": {"c": [{"d": None}]}}, {}),
]
TEXT = datasets.Value("string")
CALLS = datasets.List({"type": TEXT, "function": {"name": TEXT, "arguments": datasets.Json()}})
TURN = {"role": TEXT, "content": TEXT, "name": TEXT, "tool_calls": CALLS}
DEEP = datasets.Features({"prompt": datasets.List(TURN), "tools": datasets.List(datasets.Json())})
WHOLE = datasets.Features({"prompt": datasets.Json(), "tools": datasets.Json()})


def of(rows, features=None):
    return datasets.Dataset.from_list(rows, features=features)


def jsonl(rows, folder):
    return write_jsonl(folder / "数据.jsonl", rows)


def in_parquet(data, folder):
    data.to_parquet(folder / "数据.parquet")
    return str(folder / "数据.parquet")


def in_arrow(data, folder):
    feather.write_feather(data.with_format("arrow")[:], folder / "数据.arrow", compression="uncompressed")
    return str(folder / "数据.arrow")


def on_disk(data, folder):
    data.save_to_disk(folder / "数据")
    return str(folder / "数据")


def streamed(rows, features=None):
    return datasets.IterableDataset.from_generator(lambda: iter(rows), features=features)


def loaded(rows, folder, **options):
    return datasets.load_dataset(
        "json", data_files=jsonl(rows, folder), split="train", cache_dir=str(folder / "cache"), **options
    )


def read(rows, folder):
    return pandas.read_parquet(in_parquet(of(rows), folder))


TABLES = {
    # what is given: how it is made of rows, and which
    "Parquet": (lambda rows, folder: in_parquet(of(rows), folder), ROWS),
    "Arrow": (lambda rows, folder: in_arrow(of(rows), folder), ROWS),
    "a saved data set": (lambda rows, folder: on_disk(of(rows), folder), ROWS),
    "Dataset": (lambda rows, _: of(rows), ROWS),
    "IterableDataset": (lambda rows, _: of(rows).to_iterable_dataset(), ROWS),
    "a mapped IterableDataset": (lambda rows, _: of(rows).to_iterable_dataset().map(dict), ROWS),
    "an IterableDataset of a generator": (lambda rows, _: streamed(rows), MIXED),
    "pyarrow.Table": (lambda rows, _: of(rows).with_format("arrow")[:], ROWS),
    "DataFrame": (lambda rows, _: pandas.DataFrame(rows), ROWS),
    "a DataFrame of mixed types": (lambda rows, _: pandas.DataFrame(rows), MIXED),
    "a DataFrame with a missing cell": (lambda rows, _: pandas.DataFrame([*rows, {"prompt": "甲"}])[:2], MIXED),
    "a DataFrame of a file": (read, ROWS),
    "its records": (lambda rows, folder: read(rows, folder).to_dict("records"), ROWS),
    "Json in Parquet": (lambda rows, folder: in_parquet(of(rows, DEEP), folder), NULLS),
    "Json in Arrow": (lambda rows, folder: in_arrow(of(rows, DEEP), folder), NULLS),
    "Json in a saved data set": (lambda rows, folder: on_disk(of(rows, DEEP), folder), NULLS),
    "Json": (lambda rows, _: of(rows, DEEP), NULLS),
    "Json of whole columns": (lambda rows, _: of(rows, WHOLE), NULLS),
    "Json of an IterableDataset": (lambda rows, _: of(rows, DEEP).to_iterable_dataset(), NULLS),
    "Json of a generator": (lambda rows, _: streamed(rows, DEEP), NULLS),
    "use_json": (lambda rows, _: datasets.Dataset.from_list(rows, on_mixed_types="use_json"), MIXED),
    "loaded JSON Lines": (loaded, ROWS),
    "streamed JSON Lines": (lambda rows, folder: loaded(rows, folder, streaming=True), ROWS),
    "JSON Lines": (jsonl, NULLS),
    "dicts": (lambda rows, _: rows, NULLS),
}


def expected(rows):
    """The prompts as the chat template and reward functions see them, by their questions."""
    found = {}
    for one in json.loads(json.dumps(rows)):
        question, *others = one["prompt"]
        found[question["content"]] = [question | {"tools": one["tools"]}, *others]
    return found


@pytest.mark.parametrize("case", TABLES)
def test_a_row_has_its_own_keys_only(case, tmp_path):
    """At any depth: a null that Arrow wrote for the key of another row is none. Nulls in JSON stay."""
    make, rows = TABLES[case]
    data = make(rows, tmp_path)
    path = data if isinstance(data, str) else write_records(data, tmp_path, "data", asks=True)
    found = {}
    for one in read_prompts(str(path)):
        question, *others = map(as_dict, one.prompt)
        found[question["content"]] = [question | {"tools": json.loads(one.prompt[0].tools)}, *others]
    assert found == expected(rows)


def test_reward_functions_see_a_row_as_it_was(thinker):
    seen = {}

    def reward(prompts, completions, **_):
        seen.update({prompt[0]["content"]: prompt for prompt in prompts})
        return [0.0] * len(completions)

    config = heedful.PPOConfig(
        device="cpu", dtype="float32", eval_fraction=0.0, sample_every=0, steps=1, max_new_tokens=1, rollout_batch_size=2,
        minibatch_size=2, max_prompt_tokens=480,
    )  # fmt: skip
    heedful.train_ppo(config, model=thinker(), data=of(NULLS, DEEP), rewards=[reward])
    assert seen == expected(NULLS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"role"', "Expecting"),
        ("[NaN]", "Numbers must be finite"),
        ("[" * 10**6, "nested too deeply"),
        ("[" * 200 + "]" * 200, "nested too deeply, more than 100 levels"),
        ('{"角色": 1, "角色": 2}', "appears twice"),
    ],
    ids=["cut", "NaN", "deep", "rather deep", "a key twice"],
)
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_json_in_a_table_is_held_to_the_rules_of_json(tmp_path, text, words, ending):
    path = tmp_path / f"数据.{ending}"
    table = pyarrow.table({"prompt": pyarrow.array(['"问"', text], pyarrow.json_())})
    if ending == "parquet":
        parquet.write_table(table, path)
    else:
        feather.write_feather(table, path, compression="uncompressed")
    with pytest.raises(DataError, match=words) as caught:
        read_prompts(str(path))
    assert f"{path}: " in str(caught.value)


def test_a_column_that_a_row_lacks_is_none_for_rewards(tmp_path):
    """Its objects have the keys of their own row."""
    rows = [{"prompt": "甲", "note": "z", "answer": {"x": 1}}, {"prompt": "乙", "answer": {"y": [None, {"z": 2}]}}]
    first, second = read_prompts(in_parquet(of(rows), tmp_path))
    assert first.columns == {"answer": {"x": 1}, "note": "z"}
    assert second.columns == {"answer": {"y": [None, {"z": 2}]}, "note": None}


def test_a_number_of_fewer_bits_is_what_was_written(tmp_path):
    """0.1 of 32 bits is no 0.10000000149011612, with which no answer agrees."""
    numbers = pandas.DataFrame({"prompt": ["零点一？", "空"], "answer": pandas.array([0.1, None], dtype="Float32")})
    table = pyarrow.table(numbers).append_column("half", pyarrow.array([[0.3], []], pyarrow.list_(pyarrow.float16())))
    parquet.write_table(table, tmp_path / "题.parquet")
    found = read_prompts(str(tmp_path / "题.parquet"))
    assert [one.columns for one in found] == [{"answer": 0.1, "half": [0.3]}, {"answer": None, "half": []}]


def test_strings_as_polars_holds_them(tmp_path):
    """Arrow's views of text, in lists."""
    answers = pyarrow.array([["甲一", "a"], ["乙二"]], pyarrow.list_(pyarrow.string_view()))
    table = pyarrow.table({"prompt": ["甲", "乙"], "answer": answers})
    found = read_prompts(str(write_records(table, tmp_path, "data", asks=True)))
    assert [(one.prompt, one.columns) for one in found] == [
        ("甲", {"answer": ["甲一", "a"]}),
        ("乙", {"answer": ["乙二"]}),
    ]
