"""Records to token ids: what is learned, what is cut, and that everything left out is counted and named."""

import contextlib
import json

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
    st.lists(st.integers(0, 20), min_size=3, max_size=3),
    st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
)
def test_the_share_is_of_everything_dropped(kept, dropped, share):
    """Shares that floats hold exactly, against whole numbers; all is never dropped."""
    names = ("dropped_unusable", "dropped_too_long", "dropped_equal")
    counts, records = dict(zip(names, dropped, strict=True)), kept + sum(dropped)
    allowed = 4 * sum(dropped) <= round(4 * share) * records
    with contextlib.nullcontext() if allowed else pytest.raises(DataError):
        check_dropped({"records": records, "truncated": 5, "train": kept} | counts, max_dropped=share, path="d")
    with pytest.raises(DataError, match=rf"{records} of {records} records \(100.0%\) would be dropped"):
        check_dropped({"records": records, "dropped_unusable": records}, max_dropped=1.0, path="d")


def check_share(records, done, *, exactly, too_little, listed):
    """These counts pass `encode_split` with the first share of --max-dropped and are refused, listed, with the second."""
    split = ["record"] * records, [], {"records": records, "train": records}

    def encoded(items, refused):
        return items, done

    left = records - sum(count for name, count in done.items() if name.startswith("dropped_"))
    shown = {"records": records, "train": left} | {name: count for name, count in done.items() if count}
    assert encode_split(encoded, split, DataOptions(data="d.jsonl", max_dropped=exactly))[2] == shown
    with pytest.raises(DataError) as error:
        encode_split(encoded, split, DataOptions(data="d.jsonl", max_dropped=too_little))
    assert str(error.value).startswith(f"d.jsonl: {listed}, more than --max-dropped {too_little}. ")


MIXED = demonstrations(("ab", "cd"), ("ab", "cdefghijk"), ("abcdefghij", "k"), ("a", "bcdefghi"))
"""Of 5, 12, 12 and 10 tokens; the limit is 10 and the third prompt alone fills it."""


def test_too_long_demonstrations_are_named_dropped_or_cut():
    """A cut response's end is not learned."""
    message = (
        r"2 of 4 demonstrations are longer than 10 tokens: 示例.jsonl:2 \(12 tokens\), 示例.jsonl:3 \(12 tokens\). "
    )
    with pytest.raises(
        DataError, match=message + "Use --too-long drop or --too-long truncate, or a model with a longer"
    ):
        encode(MIXED)
    examples, counts = encode(MIXED, action="drop")
    assert [TOKENIZER.decode(e.response[:-1]) for e in examples] == ["cd", "bcdefghi"]
    assert counts == {"dropped_too_long": 2, "dropped_too_short": 0, "truncated": 0, "text_pieces": 0}
    check_share(4, counts, exactly=0.5, too_little=0.4, listed="2 of 4 records (50.0%) would be dropped (2 too long)")
    examples, counts = encode(MIXED, action="truncate")
    assert examples[1] == Example(ids("ab"), ids("cdefghij"))
    assert [len(flat(e)) for e in examples] == [5, 10, 10]
    assert [e.response[-1] == EOS for e in examples] == [True, False, True]
    assert counts == {"dropped_too_long": 1, "dropped_too_short": 0, "truncated": 1, "text_pieces": 0}
    check_share(4, counts, exactly=0.25, too_little=0.2, listed="1 of 4 records (25.0%) would be dropped (1 too long)")


def test_a_text_of_one_token_is_dropped_and_counted():
    """Nothing comes before its only token, so it would vanish without a word; an empty cut text alike."""
    items = [*demonstrations(("", "a"), ("", "ab"), truncated=True), *demonstrations(("", "a"))]
    examples, counts = encode(items)
    assert examples == [Example(ids("a"), ids("b")), Example(ids("a"), [EOS])]
    assert counts == {"dropped_too_long": 0, "dropped_too_short": 1, "truncated": 0, "text_pieces": 2}
    check_share(
        3, counts, exactly=0.34, too_little=0.33, listed="1 of 3 records (33.3%) would be dropped (1 too short)"
    )


def ranking(chosen, rejected, *, prompt="问", line=1, margin=None, swap=False, truncated=False):
    responses, ranks = ((rejected, chosen), (1, 0)) if swap else ((chosen, rejected), (0, 1))
    return Ranking(prompt, responses, ranks, f"偏好.jsonl:{line}", margin, truncated)


def pairs(rankings, *, max_length=99, action="error", equal_pairs="error", inputs=INPUTS):
    return encode_rankings(rankings, inputs, max_length=max_length, action=action, equal_pairs=equal_pairs)


def test_the_lower_rank_is_the_chosen_one():
    for swap in (False, True):
        rows, counts = pairs([ranking("好", "坏", swap=swap, margin=0.5)])
        assert rows[0].rows == ({"input_ids": [*ids("问好"), EOS]}, {"input_ids": [*ids("问坏"), EOS]})
        assert rows[0].ranking.margin == 0.5
        assert not any(counts.values())


A, P = 72, 87
"""Token ids of "a" and "p": eight special tokens, then bytes from "!" (33) on."""


def test_a_truncated_pair_has_no_end_on_either_side():
    """And a whole one has both, also without a prompt."""
    for prompt, before, swap in (("p", [P], False), ("", [], True)):
        (row,), _ = pairs([ranking("ab", "cde", prompt=prompt, swap=swap, truncated=True)])
        assert row.rows[0] == {"input_ids": [*before, A, A + 1]}
        assert row.rows[1] == {"input_ids": [*before, A + 2, A + 3, A + 4]}
        (row,), _ = pairs([ranking("ab", "cde", prompt=prompt, swap=swap)])
        assert row.rows[0] == {"input_ids": [*before, A, A + 1, 1]}
        assert row.rows[1] == {"input_ids": [*before, A + 2, A + 3, A + 4, 1]}


def test_a_truncated_pair_needs_no_room_for_an_end():
    """Ten tokens fit into ten; cut further it still has none."""
    items = [ranking("abcdefghi", "b", prompt="p", truncated=True)]
    rows, counts = pairs(items, max_length=10)
    assert len(rows[0].rows[0]["input_ids"]) == 10
    assert not any(counts.values())
    rows, counts = pairs(items, max_length=9, action="truncate")
    assert rows[0].rows[0] == {"input_ids": ids("pabcdefgh")}
    assert rows[0].rows[1] == {"input_ids": [P, A + 1]}
    assert counts["truncated"] == 1


LONG = [
    ranking("ab", "cd", prompt="p", line=1),
    ranking("abcdefghi", "b", prompt="p", line=2, margin=2.0),
    ranking("c", "xabcdefgh", prompt="p", line=3, margin=3.0),
]
"""Of 4, 11 and 11 tokens on the longer side."""


def test_too_long_pairs_count_their_longer_side():
    """Truncation cuts the end of both sides."""
    message = r"2 of 3 pairs are longer than 10 tokens: 偏好.jsonl:2 \(11 tokens\), 偏好.jsonl:3"
    with pytest.raises(DataError, match=message):
        pairs(LONG, max_length=10)
    rows, counts = pairs(LONG, max_length=10, action="drop")
    assert [row.ranking.source for row in rows] == ["偏好.jsonl:1"]
    assert counts == {"dropped_too_long": 2, "truncated": 0, "dropped_equal": 0}
    check_share(3, counts, exactly=0.67, too_little=0.5, listed="2 of 3 records (66.7%) would be dropped (2 too long)")
    rows, counts = pairs(LONG, max_length=10, action="truncate")
    assert [row.ranking.margin for row in rows] == [None, 2.0, 3.0]
    assert rows[1].rows[0]["input_ids"] == ids("pabcdefghi")
    assert rows[1].rows[1]["input_ids"] == [*ids("pb"), EOS]
    assert rows[2].rows[1]["input_ids"] == ids("pxabcdefgh")
    assert counts == {"dropped_too_long": 0, "truncated": 2, "dropped_equal": 0}


def test_equal_responses_teach_nothing():
    items = [ranking("好", "坏", line=1), ranking("同", "同", line=2), *(ranking("a", f"{i}", line=i) for i in (3, 4))]
    message = (
        "1 of 4 pairs have equal chosen and rejected responses: 偏好.jsonl:2. Fix the data, or use --equal-pairs drop or "
        "--unusable drop$"
    )
    with pytest.raises(DataError, match=message):
        pairs(items)
    rows, counts = pairs(items, equal_pairs="drop")
    assert [row.ranking.source for row in rows] == ["偏好.jsonl:1", "偏好.jsonl:3", "偏好.jsonl:4"]
    assert counts["dropped_equal"] == 1
    check_share(4, counts, exactly=0.25, too_little=0.1, listed="1 of 4 records (25.0%) would be dropped (1 equal)")


def test_pairs_that_are_equal_only_after_truncation():
    """They differ in what was cut away; training on them would be noise."""
    items = [ranking("abcdeX", "abcdeY", prompt="p", line=1), ranking("a", "b", prompt="p", line=2)]
    assert len(pairs(items)[0]) == 2
    message = "1 of 2 pairs have equal chosen and rejected responses after truncation: 偏好.jsonl:1"
    with pytest.raises(DataError, match=message):
        pairs(items, max_length=6, action="truncate")
    rows, counts = pairs(items, max_length=6, action="truncate", equal_pairs="drop")
    assert [row.ranking.source for row in rows] == ["偏好.jsonl:2"]
    assert counts == {"dropped_too_long": 0, "truncated": 1, "dropped_equal": 1}


def test_pairs_that_are_equal_only_as_tokens():
    """A tokenizer that normalises reads two ways to write é as one; nothing was truncated, and nothing says so."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    items = [ranking("caf\u00e9", "cafe\u0301", line=1), ranking("a", "b", line=2)]
    message = "1 of 2 pairs have equal chosen and rejected responses after tokenisation: 偏好.jsonl:1"
    with pytest.raises(DataError, match=message):
        pairs(items, inputs=RewardInputs(tokenizer))
    assert len(pairs(items)[0]) == 2


def ranked(responses, ranks, *, line=1, prompt="问", **options):
    return Ranking(prompt, tuple(responses), tuple(ranks), f"排序.jsonl:{line}", **options)


def several(*rankings, **options):
    return pairs(rankings, **options)


def row(response, *, prompt="问", truncated=False):
    return INPUTS.encode(prompt, response, truncated=truncated)


def test_responses_are_sorted_and_ties_keep_their_order():
    """Ranks may be any integers, also some that no tensor could hold; only their order means anything."""
    sorted_ = best_first(ranked("甲乙丙丁", [7, -3, 10**30, 7]))
    assert sorted_.responses == ("乙", "甲", "丁", "丙")
    assert sorted_.ranks == (0, 1, 1, 2)


def test_every_response_is_a_row():
    (one, two), counts = several(ranked(["好", "坏", "中"], [0, 2, 1]), ranked(["差", "优"], [1, 0], margin=0.5))
    assert one.rows == tuple(map(row, ("好", "中", "坏")))
    assert two.rows == (row("优"), row("差"))
    assert two.ranking.margin == 0.5
    assert counts == {"dropped_too_long": 0, "truncated": 0, "dropped_equal": 0}


def test_a_response_in_several_pairs_is_encoded_once():
    """One that is cut off, or answers another prompt, is another."""
    same, other = ranked(["好", "坏"], [0, 1]), ranked(["中", "好"], [1, 0])
    asked, cut = ranked(["好", "坏"], [0, 1], prompt="答"), ranked(["好", "坏"], [0, 1], truncated=True)
    (one, two, three, four), _ = several(same, other, asked, cut)
    assert one.rows[0] is two.rows[0]
    assert three.rows[0] == row("好", prompt="答") != one.rows[0]
    assert four.rows[0] == row("好", truncated=True) != one.rows[0]


def test_a_ranking_is_too_long_where_one_of_its_responses_is():
    """ "p" and the responses make 3, 8 and 4 tokens with the end."""
    items = ranked(["a", "bcdefg", "cd"], [0, 1, 2], prompt="p"), ranked(["a", "b"], [0, 1], prompt="p", line=2)
    with pytest.raises(DataError, match=r"1 of 2 rankings are longer than 6 tokens: 排序.jsonl:1 \(8 tokens\)"):
        several(*items, max_length=6)
    (kept,), counts = several(*items, max_length=6, action="drop")
    assert (kept.ranking.source, counts["dropped_too_long"]) == ("排序.jsonl:2", 1)
    (cut, _), counts = several(*items, max_length=6, action="truncate")
    assert [len(r["input_ids"]) for r in cut.rows] == [3, 6, 4]
    assert cut.rows[1]["input_ids"] == row("bcdefg", prompt="p")["input_ids"][:6]
    assert counts == {"dropped_too_long": 0, "truncated": 1, "dropped_equal": 0}


def test_a_ranking_that_prefers_a_response_to_an_equal_one():
    items = ranked(["同", "异", "同"], [0, 1, 2], line=4), ranked(["a", "b", "c"], [0, 1, 2], line=5)
    with pytest.raises(DataError, match=r"^1 of 2 rankings prefer a response to an equal one: 排序.jsonl:4\. Fix"):
        several(*items)
    (kept,), counts = several(*items, equal_pairs="drop")
    assert (kept.ranking.source, counts["dropped_equal"]) == ("排序.jsonl:5", 1)
    (one,), counts = several(ranked(["同", "异", "同"], [0, 1, 0]))  # equal ones may tie
    assert one.ranking.responses == ("同", "同", "异")
    assert not any(counts.values())


def test_what_has_pairs():
    (one,), _ = several(ranked(["a", "b", "c"], [0, 1, 1]))
    (tied,), _ = several(ranked(["a", "b"], [1, 1]))
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


def write(path, *records):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return str(path)


def test_a_held_out_file_that_repeats_training_prompts_is_counted(tmp_path):
    """Not refused: some sets are made so. A system prompt does not hide the repetition."""
    asked = [{"prompt": [{"role": "user", "content": question}]} for question in "一二三四五"]
    with_system = {"prompt": [{"role": "system", "content": "短"}, *asked[1]["prompt"]]}
    train = write(tmp_path / "train.jsonl", *asked[:3])
    same = write(tmp_path / "a.jsonl", asked[1], asked[3], with_system)
    for system in (None, "有礼"):
        options = DataOptions(data=train, eval_data=same, system_prompt=system)
        items, held_out, counts = load_split(read_prompts, options)
        assert (len(items), len(held_out)) == (3, 3)
        assert counts == {"records": 6, "train": 3, "held_out": 3, "held_out_prompts_also_trained_on": 2}
    other = DataOptions(data=train, eval_data=write(tmp_path / "b.jsonl", asked[4]))
    assert load_split(read_prompts, other)[2] == {"records": 4, "train": 3, "held_out": 1}


def test_few_held_out_prompts_are_reported(tmp_path, capsys):
    """Different ones: two records of one prompt are one."""
    data = write(tmp_path / "d.jsonl", {"prompt": "p", "completion": "c"})
    for prompts, said in ((1, "only 1 held-out prompt:"), (29, "only 29 held-out prompts:"), (30, "")):
        rows = ({"prompt": f"题{i % prompts}", "completion": f"{i}"} for i in range(prompts + 5))
        held_out = write(tmp_path / "e.jsonl", *rows)
        load_split(read_demonstrations, DataOptions(data=data, eval_data=held_out))
        assert said in (err := capsys.readouterr().err)
        assert bool(err) == bool(said)
    load_split(read_demonstrations, DataOptions(data=data, eval_fraction=0.0))
    assert capsys.readouterr().err == ""


def test_a_split_by_prompt_when_there_is_no_held_out_file(tmp_path):
    data = write(
        tmp_path / "p.jsonl", *({"prompt": f"题{i % 20}", "chosen": f"好{i}", "rejected": "坏"} for i in range(60))
    )
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
    both, counts = (["e1", "e2"], ["e3"]), {"records": 6, "dropped_too_long": 3}
    assert encode_split(halve, ([1, 2], [3], {"records": 6}), options) == (*both, counts)
    one, counts = (["e1"], []), {"records": 100, "dropped_too_long": 1}  # the share is of the whole
    assert encode_split(halve, ([1], [], {"records": 100}), DataOptions(data="d.jsonl", max_dropped=0.01)) == (
        *one,
        counts,
    )
    with pytest.raises(DataError, match=r"^d\.jsonl: 3 of 5 records \(60.0%\) would be dropped \(3 too long\)"):
        encode_split(halve, ([1, 2], [3], {"records": 5}), options)


def test_unusable_too_long_and_equal_records_share_one_allowance(tmp_path):
    """9 + 8 + 7 of 100: each within a tenth, a quarter of the data in all."""
    records = [{"prompt": f"p{i}", "chosen": "ab", "rejected": "cd"} for i in range(76)]
    records += [{"prompt": f"u{i}", "chosen": " ", "rejected": "x"} for i in range(9)]
    records += [{"prompt": f"l{i}", "chosen": "a" * 50, "rejected": "x"} for i in range(8)]
    records += [{"prompt": f"e{i}", "chosen": "x", "rejected": "x"} for i in range(7)]
    data = write(tmp_path / "偏好.jsonl", *records)

    def load(rows, max_dropped):
        path = write(tmp_path / "偏好.jsonl", *rows)
        options = DataOptions(data=path, eval_fraction=0.1, unusable="drop", max_dropped=max_dropped)
        split = load_split(read_rankings, options)
        return encode_split(
            lambda items, refused: pairs(items, max_length=20, action="drop", equal_pairs="drop"), split, options
        )

    with pytest.raises(DataError) as error:
        load(records, 0.1)
    assert str(error.value).startswith(
        f"{data}: 24 of 100 records (24.0%) would be dropped (9 unusable, 8 too long, 7 equal), "
        "more than --max-dropped 0.1. "
    )
    train, held_out, counts = load(records, 0.24)
    assert len(train) + len(held_out) == 76
    shown = {"dropped_unusable": 9, "dropped_too_long": 8, "dropped_equal": 7}
    assert {name: count for name, count in counts.items() if name.startswith("dropped_")} == shown
    assert (counts["records"], counts["train"], counts["held_out"]) == (100, len(train), len(held_out))
    with pytest.raises(DataError):
        load(records, 0.23)
    load([r for r in records if r["prompt"][0] in "pu"], 0.15)  # a cause alone passes


def test_unusable_records_are_dropped_and_counted_when_asked(tmp_path):
    """An empty answer among ten: an error that names it by default; dropped within the share."""
    path = write(
        tmp_path / "d.jsonl",
        *({"prompt": f"问{i}", "completion": "答"} for i in range(9)),
        {"prompt": "x", "completion": " "},
    )
    with pytest.raises(DataError, match=r"d\.jsonl:10"):
        load_split(read_demonstrations, DataOptions(data=path, eval_fraction=0.0))
    train, _, counts = load_split(read_demonstrations, DataOptions(data=path, eval_fraction=0.0, unusable="drop"))
    assert len(train) == 9
    assert counts == {"records": 10, "train": 9, "held_out": 0, "dropped_unusable": 1, "unusable/empty completion": 1}
