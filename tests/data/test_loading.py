"""Records to token ids: what is learned, what is cut, and that everything left out is counted and named."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from heedful import DataError, Demonstration, Message, Prompt, Ranking
from heedful.configs.options import DataOptions
from heedful.data import read_demonstrations, read_prompts, read_rankings
from heedful.data.chat import Renderer, RewardInputs
from heedful.data.fitting import check_dropped
from heedful.data.loading import (
    Example,
    best_first,
    encode_demonstrations,
    encode_prompts,
    encode_rankings,
    encode_split,
    load_split,
)
from heedful.models import byte_tokenizer

TOKENIZER = byte_tokenizer()
RENDERER = Renderer(TOKENIZER)
INPUTS = RewardInputs(TOKENIZER)
EOS = TOKENIZER.eos_token_id


def ids(text):
    return TOKENIZER(text).input_ids


def demonstrations(*pairs, **options):
    return [Demonstration(p, r, f"示例.jsonl:{i}", **options) for i, (p, r) in enumerate(pairs, 1)]


def encode(items, *, max_length=10, action="error", **options):
    return encode_demonstrations(items, RENDERER, max_length=max_length, action=action, **options)


def flat(example):
    return example.prompt + example.response


def test_prompt_and_response():
    conversation = (Message("user", "问"),)
    items = demonstrations(("问", "答"), (conversation, "答"))
    examples, counts = encode(items, max_length=99)
    assert examples == [
        Example(ids("问"), [*ids("答"), EOS]),
        Example(RENDERER.prompt_ids(conversation), [*ids("答"), RENDERER.turn_end_id]),
    ]
    assert not any(counts.values())
    examples, _ = encode(demonstrations(("问", "答"), truncated=True))
    assert examples == [Example(ids("问"), ids("答"))], "what was cut off has no end to learn"


@given(length=st.integers(0, 60), max_length=st.integers(2, 20), truncated=st.booleans())
def test_every_token_of_a_text_but_the_first_is_learned_once(length, max_length, truncated):
    """And from the token before it, in pieces that all fit."""
    text = "".join(chr(33 + i) for i in range(length))
    whole = ids(text) + ([] if truncated else [EOS])
    pieces, counts = encode(demonstrations(("", text), truncated=truncated), max_length=max_length)
    assert [token for piece in pieces for token in piece.response] == whole[1:]
    assert all(len(piece.prompt) == 1 and piece.response for piece in pieces)
    assert all(len(flat(piece)) <= max_length for piece in pieces)
    for i, piece in enumerate(pieces):
        start = i * (max_length - 1)
        assert flat(piece) == whole[start : start + max_length]
    assert counts["text_pieces"] == len(pieces)
    assert counts["truncated"] == counts["dropped_too_long"] == 0


@given(st.integers(0, 8), st.integers(3, 12))
def test_learning_the_prompt_learns_all_but_the_first_token(extra, max_length):
    """Every token of a prompt that fits is in the loss, and every token of one that does not is cut off the end."""
    prompt, response = "pqrst", "abcdefgh"[:extra]
    whole = [*ids(prompt + response), EOS]
    items = demonstrations((prompt, response), ("a", "b"))
    examples, counts = encode(items, max_length=max_length, action="truncate", learn_prompt=True)
    assert examples[-1] == Example(ids("a"), [*ids("b"), EOS])
    if max_length > len(prompt):
        assert examples[0] == Example(whole[:1], whole[1:max_length])
        assert counts["truncated"] == (len(whole) > max_length)
    else:
        assert len(examples) == 1
        assert counts["dropped_too_long"] == 1


def test_only_the_first_five_are_named():
    with pytest.raises(DataError, match=r"示例.jsonl:5 \(12 tokens\), .... Use"):
        encode(demonstrations(*[("ab", "cdefghijk")] * 6))


@given(
    st.integers(1, 50),
    st.lists(st.integers(0, 20), min_size=4, max_size=4),
    st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
)
def test_the_share_is_of_everything_dropped(kept, dropped, share):
    """Shares that floats hold exactly, against whole numbers; all is never dropped."""
    names = ("dropped_unusable", "dropped_too_long", "dropped_too_short", "dropped_equal")
    counts, records = dict(zip(names, dropped, strict=True)), kept + sum(dropped)
    allowed = 4 * sum(dropped) <= round(4 * share) * records
    with contextlib.nullcontext() if allowed else pytest.raises(DataError):
        check_dropped({"records": records, "truncated": 5, "train": kept} | counts, max_dropped=share, path="d")
    shares = rf"{records} of {records} records \(100.0%\) would be dropped \({records} too short\)"
    with pytest.raises(DataError, match=rf"^d: {shares}, more than --max-dropped 1\.0\. "):
        check_dropped({"records": records, "dropped_too_short": records}, max_dropped=1.0, path="d")


def test_too_long_demonstrations_are_named_dropped_or_cut():
    """Of 5, 12, 12 and 10 tokens; the third prompt alone fills the limit of 10. A cut response's end is not learned."""
    items = demonstrations(("ab", "cd"), ("ab", "cdefghijk"), ("abcdefghij", "k"), ("a", "bcdefghi"))
    said = r"2 of 4 demonstrations are longer than 10 tokens: 示例.jsonl:2 \(12 tokens\), 示例.jsonl:3 \(12 tokens\)\. "
    with pytest.raises(DataError, match=f"{said}Use --too-long drop or --too-long truncate, or a model with a longer"):
        encode(items)
    examples, counts = encode(items, action="drop")
    assert [TOKENIZER.decode(e.response[:-1]) for e in examples] == ["cd", "bcdefghi"]
    assert counts == {"dropped_too_long": 2, "dropped_too_short": 0, "truncated": 0, "text_pieces": 0}
    examples, counts = encode(items, action="truncate")
    assert examples[1] == Example(ids("ab"), ids("cdefghij"))
    assert [len(flat(e)) for e in examples] == [5, 10, 10]
    assert [e.response[-1] == EOS for e in examples] == [True, False, True]
    assert counts == {"dropped_too_long": 1, "dropped_too_short": 0, "truncated": 1, "text_pieces": 0}


def test_a_text_of_one_token_is_dropped_and_counted():
    """Nothing comes before its only token, so it would vanish without a word; an empty cut text alike."""
    items = [*demonstrations(("", "a"), ("", "ab"), truncated=True), *demonstrations(("", "a"))]
    examples, counts = encode(items)
    assert examples == [Example(ids("a"), ids("b")), Example(ids("a"), [EOS])]
    assert counts == {"dropped_too_long": 0, "dropped_too_short": 1, "truncated": 0, "text_pieces": 2}


def ranked(responses, ranks=(0, 1), *, line=1, prompt="p", **options):
    return Ranking(prompt, tuple(responses), tuple(ranks), f"排序.jsonl:{line}", **options)


def rankings(*items, max_length=99, action="error", equal_pairs="error", inputs=INPUTS):
    return encode_rankings(items, inputs, max_length=max_length, action=action, equal_pairs=equal_pairs)


def row(text, *, end=True):
    """The ids of prompt and response, one text, as a reward model reads them."""
    return {"input_ids": [*ids(text), *[EOS] * end]}


def test_responses_are_sorted_and_ties_keep_their_order():
    """Ranks may be any integers, also some that no tensor could hold; only their order means anything."""
    sorted_ = best_first(ranked("甲乙丙丁", [7, -3, 10**30, 7]))
    assert sorted_.responses == ("乙", "甲", "丁", "丙")
    assert sorted_.ranks == (0, 1, 1, 2)


def test_every_response_is_a_row():
    """The best first, each with its end, also without a prompt."""
    for prompt in ("问", ""):
        items = ranked(["好", "坏", "中"], [0, 2, 1], prompt=prompt), ranked("差优", [1, 0], prompt=prompt, margin=0.5)
        (one, two), counts = rankings(*items)
        assert one.rows == tuple(row(prompt + response) for response in "好中坏")
        assert two.rows == tuple(row(prompt + response) for response in "优差")
        assert two.ranking.margin == 0.5
        assert counts == {"dropped_too_long": 0, "truncated": 0, "dropped_equal": 0}


def test_a_truncated_pair_has_no_end_on_either_side():
    """Nor needs room for one: ten tokens fit into ten, and cut further it still has none."""
    for prompt in ("p", ""):
        (one,), _ = rankings(ranked(["ab", "cde"], [1, 0], prompt=prompt, truncated=True))
        assert one.rows == (row(f"{prompt}cde", end=False), row(f"{prompt}ab", end=False))
    item = ranked(["abcdefghi", "b"], truncated=True)
    (one,), counts = rankings(item, max_length=10)
    assert (one.rows[0], any(counts.values())) == (row("pabcdefghi", end=False), False)
    (one,), counts = rankings(item, max_length=9, action="truncate")
    assert one.rows == (row("pabcdefgh", end=False), row("pb", end=False))
    assert counts["truncated"] == 1


def test_too_long_pairs_count_their_longer_side():
    """Of 4, 11 and 11 tokens there. Truncation cuts the end of both sides."""
    items = [
        ranked(["ab", "cd"]),
        ranked(["abcdefghi", "b"], line=2, margin=2.0),
        ranked(["c", "xabcdefgh"], line=3, margin=3.0),
    ]
    with pytest.raises(
        DataError, match=r"2 of 3 pairs are longer than 10 tokens: 排序.jsonl:2 \(11 tokens\), 排序.jsonl:3"
    ):
        rankings(*items, max_length=10)
    (kept,), counts = rankings(*items, max_length=10, action="drop")
    assert kept.ranking.source == "排序.jsonl:1"
    assert counts == {"dropped_too_long": 2, "truncated": 0, "dropped_equal": 0}
    (whole, first, second), counts = rankings(*items, max_length=10, action="truncate")
    assert [one.ranking.margin for one in (whole, first, second)] == [None, 2.0, 3.0]
    assert first.rows == (row("pabcdefghi", end=False), row("pb"))
    assert second.rows == (row("pc"), row("pxabcdefgh", end=False))
    assert counts == {"dropped_too_long": 0, "truncated": 2, "dropped_equal": 0}


def test_a_ranking_is_too_long_where_one_of_its_responses_is():
    """ "p" and the responses make 3, 8 and 4 tokens with the end."""
    items = ranked(["a", "bcdefg", "cd"], [0, 1, 2]), ranked("ab", line=2)
    with pytest.raises(DataError, match=r"1 of 2 rankings are longer than 6 tokens: 排序.jsonl:1 \(8 tokens\)"):
        rankings(*items, max_length=6)
    (kept,), counts = rankings(*items, max_length=6, action="drop")
    assert (kept.ranking.source, counts["dropped_too_long"]) == ("排序.jsonl:2", 1)
    (cut, _), counts = rankings(*items, max_length=6, action="truncate")
    assert cut.rows == (row("pa"), row("pbcdef", end=False), row("pcd"))
    assert counts == {"dropped_too_long": 0, "truncated": 1, "dropped_equal": 0}


def test_a_response_in_several_pairs_is_encoded_once():
    """One that is cut off, or answers another prompt, is another."""
    same, other = ranked("好坏"), ranked("中好", [1, 0])
    (one, two, three, four), _ = rankings(same, other, ranked("好坏", prompt="q"), ranked("好坏", truncated=True))
    assert one.rows[0] is two.rows[0]
    assert [one.rows[0], three.rows[0], four.rows[0]] == [row("p好"), row("q好"), row("p好", end=False)]


def test_equal_responses_teach_nothing():
    """Nor do those that are equal after truncation, which differ in what was cut away, or only as tokens: a tokenizer that
    normalises reads two ways to write é as one."""
    equal = ranked("同同", line=2)
    items = [ranked("好坏"), equal, ranked("ab", line=3), ranked("ac", line=4)]
    remedy = "Fix the data, or use --equal-pairs drop or --unusable drop$"
    with pytest.raises(DataError, match=rf"1 of 4 pairs have equal .* responses: 排序.jsonl:2\. {remedy}"):
        rankings(*items)
    kept, counts = rankings(*items, equal_pairs="drop")
    assert [one.ranking for one in kept] == [one for one in items if one is not equal]
    assert counts["dropped_equal"] == 1
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    for pair, options, after in (
        (["abcdeX", "abcdeY"], {"max_length": 6, "action": "truncate"}, "truncation"),
        (["caf\u00e9", "cafe\u0301"], {"inputs": RewardInputs(tokenizer)}, "tokenisation"),
    ):
        items = ranked(pair), ranked("ab", line=2)
        assert len(rankings(*items)[0]) == 2
        said = f"1 of 2 pairs have equal chosen and rejected responses after {after}: 排序.jsonl:1"
        with pytest.raises(DataError, match=said):
            rankings(*items, **options)
        (kept,), counts = rankings(*items, **options, equal_pairs="drop")
        assert kept.ranking.source == "排序.jsonl:2"
        assert counts == {"dropped_too_long": 0, "truncated": int(after == "truncation"), "dropped_equal": 1}


def test_a_ranking_that_prefers_a_response_to_an_equal_one():
    items = ranked("同异同", [0, 1, 2], line=4), ranked("abc", [0, 1, 2], line=5)
    with pytest.raises(DataError, match=r"^1 of 2 rankings prefer a response to an equal one: 排序.jsonl:4\. Fix"):
        rankings(*items)
    (kept,), counts = rankings(*items, equal_pairs="drop")
    assert (kept.ranking.source, counts["dropped_equal"]) == ("排序.jsonl:5", 1)
    (one,), counts = rankings(ranked("同异同", [0, 1, 0]))  # equal ones may tie
    assert one.ranking.responses == ("同", "同", "异")
    assert not any(counts.values())


def test_what_has_pairs():
    (one, tied), _ = rankings(ranked("abc", [0, 1, 1]), ranked("ab", [1, 1]))
    assert (one.has_pairs, tied.has_pairs) == (True, False)


def prompts(*texts):
    return [Prompt(text, f"题.jsonl:{i}", {"expected": i}) for i, text in enumerate(texts, 1)]


def encode_all(items, *, action="error", max_length=4):
    return encode_prompts(items, RENDERER, max_length=max_length, action=action)


def test_prompts_keep_their_columns_and_their_end():
    """A response continues the end of a prompt, so truncation cuts its beginning."""
    items = prompts("abcd", "uvwxyz")
    with pytest.raises(DataError, match=r"1 of 2 prompts are longer than 4 tokens: 题.jsonl:2 \(6 tokens\)"):
        encode_all(items)
    dropped, counts = encode_all(items, action="drop")
    assert [e.ids for e in dropped] == [ids("abcd")]
    assert counts == {"dropped_too_long": 1, "truncated": 0}
    cut, counts = encode_all(items, action="truncate")
    assert [e.ids for e in cut] == [ids("abcd"), ids("wxyz")]
    assert [e.prompt for e in cut] == items
    assert counts == {"dropped_too_long": 0, "truncated": 1}


def test_a_held_out_file_that_repeats_training_prompts_is_counted(written):
    """Not refused: some sets are made so. A system prompt does not hide the repetition."""
    asked = [{"prompt": [{"role": "user", "content": question}]} for question in "一二三四五"]
    with_system = {"prompt": [{"role": "system", "content": "短"}, *asked[1]["prompt"]]}
    train = written("train.jsonl", asked[:3])
    same = written("a.jsonl", [asked[1], asked[3], with_system])
    for system in (None, "有礼"):
        options = DataOptions(data=train, eval_data=same, system_prompt=system)
        items, held_out, counts = load_split(read_prompts, options)
        assert (len(items), len(held_out)) == (3, 3)
        assert counts == {"records": 6, "train": 3, "held_out": 3, "held_out_prompts_also_trained_on": 2}
    other = DataOptions(data=train, eval_data=written("b.jsonl", asked[4:]))
    assert load_split(read_prompts, other)[2] == {"records": 4, "train": 3, "held_out": 1}


def test_few_held_out_prompts_are_reported(written, capsys):
    """Different ones: two records of one prompt are one."""
    data = written("d.jsonl", [{"prompt": "p", "completion": "c"}])
    for prompts, said in ((1, "only 1 held-out prompt:"), (29, "only 29 held-out prompts:"), (30, "")):
        rows = ({"prompt": f"题{i % prompts}", "completion": f"{i}"} for i in range(prompts + 5))
        load_split(read_demonstrations, DataOptions(data=data, eval_data=written("e.jsonl", rows)))
        assert said in (err := capsys.readouterr().err)
        assert bool(err) == bool(said)
    load_split(read_demonstrations, DataOptions(data=data, eval_fraction=0.0))
    assert capsys.readouterr().err == ""


def test_a_split_by_prompt_when_there_is_no_held_out_file(written):
    rows = ({"prompt": f"题{i % 20}", "chosen": f"好{i}", "rejected": "坏"} for i in range(60))
    data = written("p.jsonl", rows)
    train, held_out, counts = load_split(read_rankings, DataOptions(data=data, eval_fraction=0.3))
    assert counts == {"records": 60, "train": len(train), "held_out": len(held_out)}
    assert len(train) + len(held_out) == 60
    assert not {r.prompt for r in train} & {r.prompt for r in held_out}
    nothing_held_out = load_split(read_rankings, DataOptions(data=data, eval_fraction=0.0))
    assert (len(nothing_held_out[0]), nothing_held_out[1]) == (60, [])


def test_counts_of_both_halves_are_added_and_zeros_left_out():
    def halve(items, refused):
        return [f"e{i}" for i in items], {"dropped_too_long": len(items), "truncated": 0}

    options = DataOptions(data="d.jsonl", max_dropped=0.5)
    both = ["e1", "e2"], ["e3"], {"records": 6, "dropped_too_long": 3}
    assert encode_split(halve, ([1, 2], [3], {"records": 6}), options) == both
    few = DataOptions(data="d.jsonl", max_dropped=0.01)
    one = ["e1"], [], {"records": 100, "dropped_too_long": 1}  # the share is of the whole
    assert encode_split(halve, ([1], [], {"records": 100}), few) == one
    with pytest.raises(DataError, match=r"^d\.jsonl: 3 of 5 records \(60.0%\) would be dropped \(3 too long\)"):
        encode_split(halve, ([1, 2], [3], {"records": 5}), options)


def test_unusable_too_long_and_equal_records_share_one_allowance(written):
    """9 + 8 + 7 of 100: each within a tenth, a quarter of the data in all."""
    records = [{"prompt": f"p{i}", "chosen": "ab", "rejected": "cd"} for i in range(76)]
    records += [{"prompt": f"u{i}", "chosen": " ", "rejected": "x"} for i in range(9)]
    records += [{"prompt": f"l{i}", "chosen": "a" * 50, "rejected": "x"} for i in range(8)]
    records += [{"prompt": f"e{i}", "chosen": "x", "rejected": "x"} for i in range(7)]

    def load(rows, max_dropped):
        data = written("偏好.jsonl", rows)
        options = DataOptions(data=data, eval_fraction=0.1, unusable="drop", max_dropped=max_dropped)
        return encode_split(
            lambda items, _: rankings(*items, max_length=20, action="drop", equal_pairs="drop"),
            load_split(read_rankings, options),
            options,
        )

    shares = r"24 of 100 records \(24.0%\) would be dropped \(9 unusable, 8 too long, 7 equal\)"
    with pytest.raises(DataError, match=rf"偏好\.jsonl: {shares}, more than --max-dropped 0\.1\. "):
        load(records, 0.1)
    train, held_out, counts = load(records, 0.24)
    assert len(train) + len(held_out) == 76
    shown = {"dropped_unusable": 9, "dropped_too_long": 8, "dropped_equal": 7}
    assert {name: count for name, count in counts.items() if name.startswith("dropped_")} == shown
    assert (counts["records"], counts["train"], counts["held_out"]) == (100, len(train), len(held_out))
    with pytest.raises(DataError):
        load(records, 0.23)
    load([r for r in records if r["prompt"][0] in "pu"], 0.15)  # a cause alone passes
