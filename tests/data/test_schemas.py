"""Records to demonstrations, rankings and prompts: every accepted shape, and what is said about the others."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from heedful import ConfigError, DataError, Demonstration, Labelled, Message, Prompt, Ranking
from heedful.data import (
    prompt_key,
    read_demonstrations,
    read_labelled,
    read_prompts,
    read_rankings,
    read_records,
    split_by_prompt,
)
from record_files import write_records
from refusals import refused

QUESTION, ANSWER, WORSE = "1加1等于几？", "等于2。", "我不知道。"


def turn(role, content):
    return {"role": role, "content": content}


def system(text):
    return turn("system", text)


def user(text=QUESTION):
    return turn("user", text)


def assistant(text=ANSWER):
    return turn("assistant", text)


def conversation(*turns):
    return tuple(Message(**each) for each in turns)


def pair(prompt, chosen, rejected, **more):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def k_wise(responses, ranks, prompt=QUESTION, **more):
    return {"prompt": prompt, "responses": responses, "ranks": ranks, **more}


def hh(*turns):
    """An Anthropic dialogue: people and assistants take turns."""
    names = ["Human", "Assistant"]
    return "".join(f"\n\n{names[i % 2]}: {text}" for i, text in enumerate(turns))


def fault(read, path, *parts, error=DataError, **options):
    """Line 2 of the file is refused in a message that has all of the parts."""
    with refused(error, f"{path}:2", *parts):
        read(path, **options)


# -------------------------------------------------------------------------------------------------------- demonstrations


SHAPES = [
    ({"text": ANSWER, "label": 1}, "", ANSWER),
    ({"prompt": QUESTION, "completion": " 等于2。\n"}, QUESTION, " 等于2。\n"),
    ({"prompt": [user()], "completion": ANSWER}, conversation(user()), ANSWER),
    ({"prompt": [user()], "completion": [assistant()]}, conversation(user()), ANSWER),
    ({"prompt": [user()], "completion": [user(), assistant()]}, conversation(user()), ANSWER),
    ({"prompt": [system(""), user()], "completion": ANSWER}, conversation(system(""), user()), ANSWER),
    ({"messages": [user(), assistant()]}, conversation(user()), ANSWER),
    ({"messages": [user(), assistant()], "text": "x", "prompt": None}, conversation(user()), ANSWER),
    ({"prompt": QUESTION, "completion": ANSWER, "messages": 5, "text": 6}, QUESTION, ANSWER),
]  # fmt: skip


def test_demonstration_shapes(write):
    for record, prompt, response in SHAPES:
        path = write(record)
        assert read_demonstrations(path) == [Demonstration(prompt, response, f"{path}:2")]


def test_every_assistant_turn_is_a_demonstration(write):
    """A user turn after the last answer teaches nothing and is no fault."""
    turns = [system("礼貌"), user("a"), assistant("b"), user("c"), assistant("d"), user("e")]
    path = write({"messages": turns, "truncated": True})
    assert read_demonstrations(path) == [
        Demonstration(conversation(*turns[:2]), "b", f"{path}:2", truncated=False),
        Demonstration(conversation(*turns[:4]), "d", f"{path}:2", truncated=True),
    ]


def test_truncated_is_kept(write):
    for shape in ({"text": ANSWER}, {"prompt": QUESTION, "completion": ANSWER}):
        for truncated in (True, False, None):
            (demonstration,) = read_demonstrations(write({**shape, "truncated": truncated}))
            assert demonstration.truncated is (truncated is True)


def test_columns_choose_the_shape(write):
    """Where several shapes fit, the one that --columns names wins over the order."""
    path = write({"prompt": "p", "completion": "c", "messages": [user(), assistant()], "sentence": "句子"})
    assert read_demonstrations(path)[0].prompt == "p"
    assert read_demonstrations(path, columns="messages=messages")[0].response == ANSWER
    assert read_demonstrations(path, columns="text=sentence")[0].response == "句子"


NO_DEMONSTRATIONS = [
    (
        {"question": QUESTION, "answer": ANSWER, "id": 3},
        [
            ": not a demonstration: found `question` (string), `answer` (string), `id` (integer).",
            "Accepted: `prompt` and `completion`; or `messages`; or `text`; or a format of docs/data.md.",
            "Perhaps: --columns instruction=question,output=answer (rendered by the chat template), or --columns "
            "prompt=question,completion=answer (raw text)",
        ],
    ),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, ["Perhaps: --columns completion=chosen"]),
    ({"Prompt": "a", "completions": "b"},
     ["Perhaps: --columns instruction=Prompt,output=completions", "prompt=Prompt,completion=completions (raw text)"]),
    ({"dialogue": [user()]}, ["`dialogue` (list of objects)", "Perhaps: --columns messages=dialogue"]),
    ({"sentence": "a"}, ["Perhaps: --columns text=sentence"]),
    ({"prompt": "a"}, ["found `prompt` (string)", "Name this file's columns with --columns, for example"]),
    ({}, ["found no columns"]),
    ({"text": 5}, ["`text` is 5 (integer)", "Accepted: a string"]),
    ({"text": ""}, ["`text` is empty or only white space ('')", "Accepted: text; remove the record"]),
    ({"prompt": "", "completion": "b"}, ["`prompt` is empty or only white space"]),
    ({"prompt": 5, "completion": "b"}, ["`prompt` is 5 (integer)", "a string or a list of messages"]),
    ({"prompt": [], "completion": "b"}, ["`prompt` is [] (empty list)", "a list of messages, each {role, content}"]),
    ({"prompt": [user()], "completion": 1.5}, ["`completion` is 1.5 (number)", "a list of messages"]),
    ({"prompt": "a", "completion": [assistant(), 5]}, ["`prompt` is a string but `completion` is [", "both strings"]),
    ({"prompt": "a", "completion": [user(), assistant()]}, ["`prompt` is 'a'", "not a user message of `completion`"]),
    ({"prompt": [user()], "completion": [user()]}, ["`completion` has the turns user after a prompt of user"]),
    ({"prompt": [user()], "completion": [user("other"), assistant()]},
     ["`completion` has the turns user/assistant", "begin and end with the assistant's, perhaps after the prompt's"]),
    ({"prompt": [user()], "completion": [assistant(), user()]}, ["turns assistant/user after a prompt of user"]),
    ({"prompt": [assistant()], "completion": "b"},
     ["`prompt` has the turns assistant, the last with nothing before it", "the first words of the answer"]),
    ({"prompt": ["a"], "completion": "b"}, ["`prompt[0]` is 'a' (string)", "role and content"]),
    ({"messages": "a"}, ["`messages` is 'a' (string)", "a list of messages"]),
    ({"messages": [user()]}, ["`messages` has no assistant turn, only user", "at least one to learn from"]),
    ({"messages": [user(), assistant(" ")]}, ["`messages[1].content` is empty or only white space"]),
    ({"messages": [{"speaker": "human", "value": "a"}]},
     ["`messages[0]` is an object with speaker, value", "role and content"]),
    ({"messages": [{}]}, ["`messages[0]` is an object with no keys"]),
    ({"messages": [{**user(), "tool_calls": [{}]}]}, ["`messages[0].tool_calls[0]` is {}"]),
    ({"messages": [turn("critic", "a")]}, ["`messages[0].role` is 'critic'", "one of system, user, assistant, tool"]),
    ({"messages": [turn(["user"], "a")]}, ["`messages[0].role` is ['user'] (list of strings)"]),
    ({"messages": [user([{"type": "text"}])]}, ["`messages[0].content[0]` is {'type': 'text'}", "a string"]),
    ({"messages": [system(5), user(), assistant()]}, ["`messages[0].content` is 5 (integer)", "a string"]),
    ({"text": "a", "truncated": 1}, ["`truncated` is 1 (integer)", "true or false"]),
    ({"messages": "很" * 500}, [f"'{'很' * 59}... (string)"]),
]  # fmt: skip


def test_what_is_no_demonstration(write):
    for record, parts in NO_DEMONSTRATIONS:
        fault(read_demonstrations, write(record), *parts)


# --------------------------------------------------------------------------------------------------------------- rankings

HH_PROMPT = hh("你好", "你好！", "How?") + "\n\nAssistant:"
RANKINGS = [
    (pair(QUESTION, ANSWER, WORSE), QUESTION),
    (pair([user()], ANSWER, WORSE), conversation(user())),
    (pair([user()], [assistant()], [assistant(WORSE)]), conversation(user())),
    (pair([user()], [user(), assistant()], [user(), assistant(WORSE)]), conversation(user())),
    (pair([user()], [user(), assistant()], [assistant(WORSE)]), conversation(user())),
    (pair(None, [user(), assistant()], [user(), assistant(WORSE)]), conversation(user())),
    ({"chosen": [user(), assistant()], "rejected": [user(), assistant(WORSE)]}, conversation(user())),
    (k_wise([ANSWER, WORSE], [0, 1]), QUESTION),
    (k_wise([[assistant()], [assistant(WORSE)]], [0, 1], prompt=[user()]), conversation(user())),
    (pair("", ANSWER, WORSE), ""),
    (k_wise([ANSWER, WORSE], [0, 1], prompt=""), ""),
]  # fmt: skip


def test_ranking_shapes(write):
    for record, prompt in RANKINGS:
        path = write(record)
        assert read_rankings(path) == [Ranking(prompt, (ANSWER, WORSE), (0, 1), f"{path}:2")]


def test_anthropic_dialogues_are_cut_after_their_last_assistant(write):
    """Raw text, to the character: the prompt ends with a colon and the responses begin with the space."""
    path = write({"chosen": HH_PROMPT + " Good\n\nYes.", "rejected": HH_PROMPT + " Bad"})
    assert read_rankings(path) == [Ranking(HH_PROMPT, (" Good\n\nYes.", " Bad"), (0, 1), f"{path}:2")]


def test_k_wise_ranks_may_tie_and_be_any_integers(write):
    path = write(k_wise(["甲", "乙", "丙"], [3, -1, 3]))
    assert read_rankings(path) == [Ranking(QUESTION, ("甲", "乙", "丙"), (3, -1, 3), f"{path}:2")]


def test_margin_is_a_float_or_none(write):
    for margin, expected in ((2, 2.0), (0.5, 0.5), (-1, -1.0), (None, None)):
        (ranking,) = read_rankings(write(pair(QUESTION, ANSWER, WORSE, margin=margin)))
        assert ranking.margin == expected
        assert isinstance(ranking.margin, float | None)


def test_rankings_are_truncated_as_a_whole_or_not(write):
    hh_pair = {"chosen": HH_PROMPT + " Good", "rejected": HH_PROMPT + " Bad"}
    for shape in (*(record for record, _ in RANKINGS), hh_pair):
        for truncated in (True, False, None):
            (ranking,) = read_rankings(write({**shape, "truncated": truncated}))
            assert ranking.truncated is (truncated is True)
            assert read_rankings(write(shape)) == [replace(ranking, truncated=False)]
        fault(read_rankings, write({**shape, "truncated": 1}), "`truncated` is 1 (integer)", "true or false")
    fault(read_rankings, write({**shape, "truncated": [True, False]}), "`truncated` is [True, False] (list")


def test_equal_responses_are_left_to_the_caller(write):
    (ranking,) = read_rankings(write(pair(QUESTION, ANSWER, ANSWER)))
    assert ranking.responses == (ANSWER, ANSWER)


NO_RANKINGS = [
    (
        {"question": "q", "chosen": 1, "score": 0.5},
        [
            ": not a preference pair or ranking: found `question` (string), `chosen` (integer), `score` (number).",
            "Accepted: `prompt`, `chosen` and `rejected`; or `prompt`, `responses` and `ranks`; or only `chosen`",
            "Name this file's columns with --columns",
        ],
    ),
    ({"query": "q", "better": "a", "worse": "b"}, ["--columns prompt=query,chosen=better,rejected=worse"]),
    ({"prompt": "q", "answers": ["a"], "rank": [1]}, ["--columns responses=answers,ranks=rank"]),
    (pair("  ", "a", "b"), ["`prompt` is empty or only white space ('  ')"]),
    (pair("", "a", [assistant()]), ["`prompt` is a string but `rejected` is ["]),
    (pair("q", " ", "b"), ["`chosen` is empty or only white space"]),
    (pair("q", [assistant()], "b"), ["`prompt` is a string but `chosen` is [", "both strings, or both lists"]),
    (pair([user()], [assistant()], [user()]), ["`rejected` has the turns user after a prompt of user"]),
    (pair("q", "a", ""), ["`rejected` is empty or only white space", "remove the record"]),
    (pair("q", "a", "b", margin=True), ["`margin` is True (boolean)", "a finite number"]),
    (pair("q", "a", "b", margin="2"), ["`margin` is '2' (string)", "a finite number"]),
    (pair("q", "a", "b", margin=10**400), ["`margin` is 1000", "(integer)", "a finite number"]),
    ({"chosen": "a", "rejected": "b"}, ["without `prompt`", "`chosen` 'a' (string)", "are not dialogues", "\\n\\nHuman:"]),
    ({"chosen": hh("a", "b"), "rejected": "b"}, ["are not dialogues", "Anthropic HH dialogues", "or a `prompt`"]),
    ({"chosen": hh("a", "b", "c", "d"), "rejected": hh("a", "b")},
     ["differ before their last Assistant turn", "agree up to and including", "Repair or remove the record"]),
    ({"chosen": hh("a", "b"), "rejected": hh("a", "")}, ["`rejected` is empty or only white space (' ')"]),
    ({"chosen": [user(), assistant()], "rejected": "b"}, ["`rejected` is 'b' (string)", "a list of messages"]),
    (
        {"chosen": [user("a"), assistant()], "rejected": [user("b"), assistant()]},
        [
            "`chosen` (user/assistant) and `rejected` (user/assistant) differ before an answer",
            "equal up to the assistant's turn in which they differ, or a `prompt`",
        ],
    ),
    ({"chosen": [user(), user()], "rejected": [user(), user()]}, ["`chosen` (user/user)", "differ before an answer"]),
    (k_wise(["a", "b"], [0, 1], prompt="\n"), ["`prompt` is empty or only white space"]),
    (k_wise("ab", [0, 1]), ["`responses` is 'ab' (string)", "a list of two or more responses"]),
    (k_wise(["a"], [0]), ["`responses` is ['a'] (list of strings)", "two or more"]),
    (k_wise(["a", 5], [0, 1]), ["`prompt` is a string but `responses[1]` is 5 (integer)"]),
    (k_wise(["a", ""], [0, 1]), ["`responses[1]` is empty"]),
    (k_wise(["a", "b"], 0), ["`ranks` is 0 (integer)", "a list of integers, 0 the best; equal ranks tie"]),
    (k_wise(["a", "b"], [0.0, 1]), ["`ranks` is [0.0, 1]", "a list of integers"]),
    (k_wise(["a", "b"], [False, True]), ["`ranks` is [False, True] (list of booleans)", "a list of integers"]),
    (k_wise(["a", "b"], [0, 1, 2]), ["2 `responses` but 3 `ranks`", "one rank for each response"]),
    (k_wise(["a", "b"], [1, 1]), ["`ranks` are all 1: nothing is preferred", "at least two different ranks"]),
    (k_wise(["a", "b"], [0, 1], margin=1), ["`margin` beside `ranks`", "`margin` only with `chosen` and `rejected`"]),
]  # fmt: skip


def test_what_is_no_ranking(write):
    for record, parts in NO_RANKINGS:
        fault(read_rankings, write(record), *parts)


# ---------------------------------------------------------------------------------------------------------------- prompts


PROMPTS = [
    ({"prompt": QUESTION}, QUESTION, {}),
    ({"prompt": [user()], "answer": "2", "n": None}, conversation(user()), {"answer": "2", "n": None}),
    ({"prompt": QUESTION, "messages": [], "text": "t"}, QUESTION, {"messages": [], "text": "t"}),
    ({"messages": [user()], "id": 1}, conversation(user()), {"id": 1}),
    ({"messages": [user(), assistant()], "id": 1}, conversation(user()), {"id": 1, "completion": ANSWER}),
    ({"messages": [user("a"), assistant("b"), user("c"), assistant("d")]},
     conversation(user("a"), assistant("b"), user("c")), {"completion": "d"}),
]  # fmt: skip


def test_prompt_shapes(write):
    for record, prompt, columns in PROMPTS:
        path = write(record)
        assert read_prompts(path) == [Prompt(prompt, f"{path}:2", columns)]
    (mapped,) = read_prompts(write({"question": "q", "solution": "s"}), columns="prompt=question,completion=solution")
    assert (mapped.prompt, mapped.columns) == ("q", {"completion": "s"})  # under their canonical names


NO_PROMPTS = [
    (
        {"text": "a", "id": 5},
        [
            ": not a prompt: found `text` (string), `id` (integer). Accepted: `prompt`; or `messages`; or a format",
            "`text` is for plain language modelling (sft): it has no prompt",
            "--columns prompt=text",
        ],
    ),
    ({"query": "a"}, ["Perhaps: --columns instruction=query (rendered by the chat template), or --columns prompt=query"]),
    ({"prompt": "  "}, ["`prompt` is empty or only white space"]),
    ({"prompt": [assistant()]}, ["`prompt` has the turns assistant, the last with nothing before it"]),
    ({"messages": [assistant()]}, ["`messages` has only an assistant turn", "a conversation to answer"]),
    ({"messages": [user(), assistant()], "completion": "x"}, ["two reference answers", "Accepted: only one"]),
]  # fmt: skip


def test_what_is_no_prompt(write):
    for record, parts in NO_PROMPTS:
        fault(read_prompts, write(record), *parts)


# ------------------------------------------------------------------------------------------------------ labelled responses


def test_labelled_shapes(write):
    for prompt, expected in ((QUESTION, QUESTION), ([user()], conversation(user()))):
        for label, truncated in ((True, None), (False, True)):
            path = write({"prompt": prompt, "completion": ANSWER, "label": label, "truncated": truncated, "id": 3})
            assert read_labelled(path) == [Labelled(expected, ANSWER, f"{path}:2", truncated is True, label=label)]
    path = write({"q": QUESTION, "a": ANSWER, "ok": False})
    (response,) = read_labelled(path, columns="prompt=q,completion=a,label=ok")
    assert (response.response, response.label) == (ANSWER, False)


def test_a_pair_is_a_good_and_a_bad_response(write):
    for record in (
        pair(QUESTION, ANSWER, WORSE),
        pair([user()], [user(), assistant()], [assistant(WORSE)]),
        {"chosen": [user(), assistant()], "rejected": [user(), assistant(WORSE)]},
    ):
        path = write(record)
        prompt = QUESTION if isinstance(record.get("prompt"), str) else conversation(user())
        assert read_labelled(path) == [
            Labelled(prompt, ANSWER, f"{path}:2", label=True, of_a_pair=True),
            Labelled(prompt, WORSE, f"{path}:2", label=False, of_a_pair=True),
        ]


NO_LABELS = [
    ({"prompt": QUESTION, "completion": ANSWER, "label": 2}, ["`label` is 2 (integer)", "true or 1 for a good response"]),
    ({"question": QUESTION, "answer": ANSWER, "thumbs_up": True},
     ["not a labelled response", "Perhaps: --columns instruction=question,output=answer,label=thumbs_up"]),
    ({"prompt": QUESTION, "completion": ANSWER, "label": None}, ["not a labelled response", "`label` (null)"]),
    (pair(QUESTION, ANSWER, ANSWER), ["`chosen` and `rejected` are equal", "two texts"]),
    (pair("", ANSWER, WORSE), ["`prompt` is empty"]),
    (k_wise([ANSWER, WORSE], [0, 1]), ["not a labelled response"]),
]  # fmt: skip


def test_what_is_no_labelled_response(write):
    for record, parts in NO_LABELS:
        fault(read_labelled, write(record), *parts)


# ---------------------------------------------------------------------------------------------------------- system prompt

READERS = [
    (read_labelled, {"prompt": [user()], "completion": ANSWER, "label": True}),
    (read_demonstrations, {"messages": [user(), assistant()]}),
    (read_demonstrations, {"prompt": [user()], "completion": ANSWER}),
    (read_rankings, pair([user()], [user(), assistant()], [assistant(WORSE)])),
    (read_rankings, {"chosen": [user(), assistant()], "rejected": [user(), assistant(WORSE)]}),
    (read_rankings, k_wise([ANSWER, WORSE], [0, 1], prompt=[user()])),
    (read_prompts, {"prompt": [user()]}),
    (read_prompts, {"messages": [user()]}),
]


def test_a_system_prompt_leads_every_conversation(write):
    """An empty one is a system message too: it keeps a template from adding its own."""
    for read, record in READERS:
        for text in ("你很礼貌。", ""):
            (item,) = read(write(record), system_prompt=text)
            assert item.prompt == conversation(system(text), user())
    (item,) = read_prompts(write({"prompt": [system("mine"), user()]}), system_prompt="other")
    assert item.prompt == conversation(system("mine"), user())


RAW = [
    (read_demonstrations, {"text": ANSWER}),
    (read_demonstrations, {"prompt": QUESTION, "completion": ANSWER}),
    (read_rankings, pair(QUESTION, ANSWER, WORSE)),
    (read_labelled, {"prompt": QUESTION, "completion": ANSWER, "label": True}),
    (read_rankings, {"chosen": hh("a", "b"), "rejected": hh("a", "c")}),
    (read_rankings, k_wise([ANSWER, WORSE], [0, 1])),
    (read_rankings, pair("", ANSWER, WORSE)),
    (read_prompts, {"prompt": QUESTION}),
]  # fmt: skip


def test_raw_text_has_no_place_for_a_system_prompt(write):
    for read, record in RAW:
        parts = ["--system-prompt is set", "raw text", "Leave --system-prompt out, or write the prompt as messages"]
        fault(read, write(record), *parts, error=ConfigError, system_prompt="礼貌")


# ----------------------------------------------------------------------------------------------------------- whole files


def test_columns_and_files_are_checked_by_every_reader(tmp_path):
    for read in (read_demonstrations, read_rankings, read_labelled, read_prompts):
        with pytest.raises(ConfigError, match="unknown name 'promt'"):
            read("absent.jsonl", columns="promt=a")
        with pytest.raises(DataError, match="no such file"):
            read(str(tmp_path / "absent.jsonl"))


def test_parquet_nulls_are_absent(tmp_path):
    """A file whose rows have different shapes, and messages with keys that only some of them have."""
    rows = [
        {"messages": [{**user(), "name": None}, {**assistant(), "name": None}], "text": None, "truncated": None},
        {"messages": None, "text": "句子", "truncated": True},
    ]
    path = write_records(tmp_path / "a.parquet", rows)
    assert read_demonstrations(path) == [
        Demonstration(conversation(user()), ANSWER, f"{path}: row 1"),
        Demonstration("", "句子", f"{path}: row 2", truncated=True),
    ]


# ------------------------------------------------------------------------------------------------------------- real files

COLLECTION = Path(__file__).parents[3] / "shared" / "data"
REAL = [
    (read_demonstrations, "chinese/oasst_zh_sft_train.jsonl.gz", 572, 941),  # 572 conversations, 941 answers in them
    (read_prompts, "chinese/oasst_zh_sft_train.jsonl.gz", 572, 572),
    (read_rankings, "chinese/dpo_zh_demo.messages.jsonl.gz", 300, 300),
]


def real(name):
    if not (COLLECTION / name).is_file():
        pytest.skip(f"the data collection is not beside the repository: no ../shared/data/{name}")
    return str(COLLECTION / name)


@pytest.mark.parametrize(("read", "name", "records", "items"), REAL)
def test_real_files(read, name, records, items):
    """As many records as the collection's table says; the split takes about a tenth and no prompt is on both sides."""
    path = real(name)
    assert len(read_records(path, columns={})) == records
    found = read(path)
    assert len(found) == items
    train, held_out = split_by_prompt(found, 0.1)
    assert len(train) + len(held_out) == items
    assert 0.05 < len(held_out) / items < 0.15
    assert {prompt_key(one.prompt) for one in train}.isdisjoint(prompt_key(one.prompt) for one in held_out)


def test_real_anthropic_strings():
    """Of 4002 records 20 are unusable, and each is refused by its line; the other 3982 are read to the character."""
    path, unusable = real("preferences/hh_rlhf/hh_train.jsonl.gz"), []
    texts = gzip.decompress(Path(path).read_bytes()).decode("utf-8").split("\n")[:-1]
    assert len(texts) == 4002
    rankings = read_rankings(path, refused=unusable)
    lines = [int(str(error).removeprefix(f"{path}:").split(":")[0]) for error in unusable]
    empty = [109, 649, 1055, 1773, 2094, 2459, 2970]
    forked = [154, 316, 503, 651, 877, 1010, 1131, 1249, 3101, 3478, 3694, 3695, 3769]
    assert lines == sorted(empty + forked)
    kept = [json.loads(text) for line, text in enumerate(texts, 1) if line not in lines]
    assert [(r.prompt + r.responses[0], r.prompt + r.responses[1]) for r in rankings] == [
        (record["chosen"], record["rejected"]) for record in kept
    ]
    assert all(r.prompt.endswith("\n\nAssistant:") for r in rankings)
    assert len(rankings) == 3982
