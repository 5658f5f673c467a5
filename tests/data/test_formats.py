"""Files as other tools publish and want them: each is read without a flag, and every token of it is where it belongs.

Records of each format are made here, and beside each, by hand, the conversation that it stands for. What a trainer
learns from is compared, id by id, with the template's own rendering of that conversation (`apply_chat_template`).
"""

import itertools
import json
import random
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from heedful.data import read_demonstrations, read_labelled, read_prompts, read_rankings
from heedful.data.chat import Renderer, RewardInputs
from heedful.data.loading import encode_demonstrations, encode_prompts, encode_rankings, encode_responses
from jsonl import read_jsonl

CHATML = """
{%- set start, end, first = '<|im_start|>', '<|im_end|>\\n', messages[0] %}
{%- if tools %}{{ start + 'system\\n' + (first.content if first.role == 'system' else '') + (tools | tojson) + end }}
{%- endif %}
{%- for m in messages %}{% if not (tools and loop.first and m.role == 'system') %}
{{- start + m.role + '\\n' + (m.name + ': ' if m.name and m.role != 'tool' else '') + (m.content or '') }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</tool_call>' }}{% endfor %}
{{- end }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ start + 'assistant\\n' }}{% endif %}
"""
WORDS = [
    "你好", "世界", "🐎", "👩‍👩‍👧", "Grüße", "x = 1\n    y", "why?", "“引号”",
    '"quoted"', "{a: 1}", "\ttab", "行一\n行二", "٣", "<b>",
]  # fmt: skip
N = 40


def said(rng, *, at_least=1):
    return " ".join(rng.choices(WORDS, k=rng.randint(at_least, 5)))


def system(text):
    return {"role": "system", "content": text}


def user(text, **more):
    return {"role": "user", "content": text, **more}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def answers(turns, tools=None):
    """What is learned of a conversation: each answer, after what comes before it."""
    return [(turns[:i], turn, tools) for i, turn in enumerate(turns) if turn["role"] == "assistant"]


def dialogue(rng, turns=None):
    """Questions and answers, in turn."""
    return [message for _ in range(turns or rng.randint(1, 3)) for message in (user(said(rng)), assistant(said(rng)))]


# The formats: each a function of a random generator that returns a record and what it stands for ------------------------


def sharegpt(rng):
    turns, expected = [], []
    tools = rng.choice([None, [{"type": "function", "function": {"name": "查询", "parameters": {"type": "object"}}}]])
    for _ in range(rng.randint(1, 3)):
        question, answer = said(rng), said(rng)
        turns.append({"from": rng.choice(["human", "user"]), "value": question})
        expected.append(user(question))
        if tools and rng.random() < 0.7:
            arguments, result = {"城市": said(rng), "n": rng.randint(0, 9)}, said(rng)
            call = {"name": "查询", "arguments": arguments}
            text = json.dumps(rng.choice([call, [call]]), ensure_ascii=False)
            turns += [{"from": "function_call", "value": text}, {"from": "observation", "value": result}]
            called = assistant("", tool_calls=[{"type": "function", "function": call}])
            expected += [called, {"role": "tool", "content": result}]
        turns.append({"from": "gpt", "value": answer})
        expected.append(assistant(answer))
    record = {"id": f"分享_{rng.random()}", "conversations": turns}
    first = said(rng)
    how = rng.choice(["column", "turn", "none", "empty", "null"])
    if how == "turn":
        turns.insert(0, {"from": "system", "value": first})
    elif how != "none":
        record["system"] = {"column": first, "empty": "", "null": None}[how]
    if how in ("turn", "column"):
        expected.insert(0, system(first))
    if tools:
        record["tools"] = rng.choice([tools, json.dumps(tools, ensure_ascii=False)])
    elif rng.random() < 0.5:
        record["tools"] = rng.choice(["", "[]", None])
    return record, answers(expected, tools)


def _asked(rng):
    """Columns of alpaca's that ask, and the conversation that they are."""
    record, turns = {"instruction": said(rng)}, []
    question = record["instruction"]
    if rng.random() < 0.8:
        record["input"] = rng.choice(["", None, said(rng)])
        question += "\n" + record["input"] if record["input"] else ""
    if rng.random() < 0.6:
        record["system"] = rng.choice(["", None, said(rng)])
        turns += [system(record["system"])] if record["system"] else []
    if rng.random() < 0.6:
        before = dialogue(rng, rng.randint(0, 2))
        record["history"] = [[q["content"], a["content"]] for q, a in zip(before[::2], before[1::2], strict=True)]
        turns += before
    return record, [*turns, user(question)]


def alpaca(rng):
    record, turns = _asked(rng)
    record["output"] = said(rng)
    return record, answers([*turns, assistant(record["output"])])


def alpaca_published(rng):
    """With the column ``text``, a rendering of the others, as Stanford published it."""
    question, more, answer = said(rng), rng.choice(["", said(rng)]), said(rng)
    record = {"instruction": question, "input": more, "output": answer, "text": f"Below: {question}\n{more}\n{answer}"}
    return record, answers([user(question + ("\n" + more if more else "")), assistant(answer)])


def dolly(rng):
    question, context, answer = said(rng), rng.choice(["", said(rng)]), said(rng)
    record = {"instruction": question, "context": context, "response": answer, "category": "open_qa"}
    return record, answers([user(question + ("\n" + context if context else "")), assistant(answer)])


def orca(rng):
    first, question, answer = rng.choice(["", said(rng)]), said(rng), said(rng)
    record = {"id": "niv.1", "system_prompt": first, "question": question, "response": answer}
    return record, answers([*([system(first)] if first else []), user(question), assistant(answer)])


def openai(rng):
    turns, expected, masked = [], [], set()
    tools = None
    record = {"messages": turns, "parallel_tool_calls": False} if rng.random() < 0.5 else {"messages": turns}
    if rng.random() < 0.6:
        first = said(rng)
        turns.append({"role": rng.choice(["developer", "system"]), "content": first})
        expected.append(system(first))
    kind = rng.choice(["tools", "functions", "none"])
    if kind != "none":
        function = {"name": "加", "description": said(rng), "parameters": {"type": "object", "properties": {}}}
        tools = [{"type": "function", "function": function}]
        record[kind] = tools if kind == "tools" else [function]
    for i in range(rng.randint(1, 3)):
        question, answer = said(rng), said(rng)
        parts = [{"type": "text", "text": question[:3]}, {"type": "text", "text": question[3:]}]
        named = {"name": "小明"} if rng.random() < 0.3 else {}
        turns.append(user(parts if rng.random() < 0.4 and len(question) > 3 else question, **named))
        expected.append(user(question, **named))
        if kind != "none":
            arguments, result = {"x": said(rng)}, said(rng)
            call = {"name": "加", "arguments": json.dumps(arguments, ensure_ascii=False)}
            if kind == "functions":
                turns.append(assistant(None, function_call=call))
                turns.append({"role": "function", "name": "加", "content": result})
            else:
                calls = [{"id": f"call_{i}", "type": "function", "function": call}]
                turns.append({"role": "assistant", "tool_calls": calls})
                turns.append({"role": "tool", "tool_call_id": f"call_{i}", "content": result})
            called = {"type": "function", "function": {"name": "加", "arguments": arguments}}
            expected += [assistant("", tool_calls=[called]), {"role": "tool", "name": "加", "content": result}]
        turn = assistant(answer, refusal=None, annotations=[], audio=None)
        if rng.random() < 0.3:
            turn |= {"id": f"msg_{i}", "timestamp": 1_700_000_000 + i, "created_at": "2025-01-01"}
        if rng.random() < 0.3 and i == 0:
            turn["weight"] = 0
            masked.add(len(expected))
        elif rng.random() < 0.3:
            turn["weight"] = 1
        turns.append(turn)
        expected.append(assistant(answer))
    if masked and len(expected) - 1 in masked and kind == "none":  # the only answer
        turns[-1]["weight"] = 1
        masked = set()
    return record, [one for one in answers(expected, tools) if len(one[0]) not in masked]


def ultrafeedback_sft(rng):
    record, _ = ultrafeedback(rng)
    turns = [*record["chosen"][:-1], assistant(said(rng))]
    return record | {"messages": turns}, answers(turns)


def ultrafeedback(rng):
    before, chosen, rejected = dialogue(rng, rng.randint(0, 1)), said(rng), said(rng) + "！"
    before += [user(said(rng))]
    record = {
        "prompt": rng.choice([before[0], before[-1]])["content"],
        "prompt_id": "f0e3",
        "chosen": [*before, assistant(chosen)],
        "rejected": [*before, assistant(rejected)],
        "messages": [*before, assistant(chosen)],
        "score_chosen": 8.0,
        "score_rejected": 4.5,
    }
    return record, (before, chosen, rejected, None)


def sharegpt_pairs(rng):
    before = [*dialogue(rng, rng.randint(0, 2)), user(said(rng))]
    chosen, rejected = said(rng), said(rng) + "！"
    names = {"user": "human", "assistant": "gpt"}
    record = {
        "conversations": [{"from": names[m["role"]], "value": m["content"]} for m in before],
        "chosen": {"from": "gpt", "value": chosen},
        "rejected": {"from": "gpt", "value": rejected},
    }
    if rng.random() < 0.5:
        record["system"] = said(rng)
        before = [system(record["system"]), *before]
    return record, (before, chosen, rejected, None)


def messages_pairs(rng):
    before, chosen, rejected = [*dialogue(rng), user(said(rng))], said(rng), said(rng) + "！"
    record = {"messages": before, "chosen": assistant(chosen), "rejected": assistant(rejected)}
    return record, (before, chosen, rejected, None)


def alpaca_pairs(rng):
    record, turns = _asked(rng)
    chosen, rejected = said(rng), said(rng) + "！"
    return record | {"chosen": chosen, "rejected": rejected}, (turns, chosen, rejected, None)


def alpaca_lists(rng):
    record, turns = _asked(rng)
    chosen, rejected = said(rng), said(rng) + "！"
    return record | {"output": [chosen, rejected]}, (turns, chosen, rejected, None)


def orca_pairs(rng):
    first, question, chosen, rejected = rng.choice(["", said(rng)]), said(rng), said(rng), said(rng) + "！"
    record = {"system": first, "question": question, "chosen": chosen, "rejected": rejected}
    return record, ([*([system(first)] if first else []), user(question)], chosen, rejected, None)


def openai_preferences(rng):
    before, chosen, rejected = [*dialogue(rng, rng.randint(0, 2)), user(said(rng))], said(rng), said(rng) + "！"
    tools = [{"type": "function", "function": {"name": "查", "parameters": {}}}] if rng.random() < 0.5 else []
    record = {
        "input": {"messages": before, "tools": tools, "parallel_tool_calls": True},
        "preferred_output": [assistant(chosen)],
        "non_preferred_output": [assistant(rejected)],
    }
    return record, (before, chosen, rejected, tools or None)


def anthropic(rng):
    """Raw text, to the character."""
    prompt = "".join(f"\n\nHuman: {said(rng)}\n\nAssistant: {said(rng)}" for _ in range(rng.randint(0, 2)))
    prompt += f"\n\nHuman: {said(rng)}\n\nAssistant:"
    chosen, rejected = f" {said(rng)}", f" {said(rng)}！"
    return {"chosen": prompt + chosen, "rejected": prompt + rejected}, (prompt, chosen, rejected, None)


def kto_numbers(rng):
    good = rng.random() < 0.5
    before, answer = [user(said(rng))], said(rng)
    record = {"prompt": before, "completion": [assistant(answer)], "label": rng.choice([int(good), good, float(good)])}
    return record, (before, answer, good)


def kto_alpaca(rng):
    record, turns = _asked(rng)
    good, record["output"] = rng.random() < 0.5, said(rng)
    return record | {"kto_tag": good}, (turns, record["output"], good)


def kto_sharegpt(rng):
    record, (before, answer, _, _) = sharegpt_pairs(rng)
    good = rng.random() < 0.5
    turns = [*record.pop("conversations"), record.pop("chosen")]
    del record["rejected"]
    return record | {"conversations": turns, "kto_tag": good}, (before, answer, good)


def kto_messages(rng):
    good, turns = rng.random() < 0.5, dialogue(rng)
    return {"messages": turns, "label": int(good)}, (turns[:-1], turns[-1]["content"], good)


def prompts_alpaca(rng):
    record, turns = _asked(rng)
    return record | {"output": rng.choice(["", said(rng)])}, turns


def prompts_pairs(rng):
    record, (before, *_) = ultrafeedback(rng)
    return record, before


def prompts_openai(rng):
    record, (before, *_) = openai_preferences(rng)
    return {**record, "input": {"messages": before}}, before


SFT = [sharegpt, alpaca, alpaca_published, dolly, orca, openai, ultrafeedback_sft]
PAIRS = [
    ultrafeedback, sharegpt_pairs, messages_pairs, alpaca_pairs, alpaca_lists, orca_pairs, openai_preferences, anthropic,
]  # fmt: skip
KTO = [kto_numbers, kto_alpaca, kto_sharegpt, kto_messages]
PROMPTS = [prompts_alpaca, prompts_pairs, prompts_openai]
of_each = lambda formats: pytest.mark.parametrize("make", formats, ids=lambda make: make.__name__)  # noqa: E731


@pytest.fixture(scope="module")
def model(thinker, tmp_path_factory):
    """A tiny model that reads 4,096 tokens, which are bytes."""
    folder = tmp_path_factory.mktemp("模型") / "小"
    shutil.copytree(thinker(CHATML), folder)
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {key: 4096}))
    return str(folder)


@pytest.fixture(scope="module")
def tokenizer(model):
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture
def made(written):
    """``made(format)``: the path of a file with many records, and what they stand for."""

    def make(generate, number=N):
        rng = random.Random(generate.__name__)
        pairs = [generate(rng) for _ in range(number)]
        return written("数据.jsonl", [record for record, _ in pairs]), [expected for _, expected in pairs]

    return make


def rendered(tokenizer, turns, tools=None, *, ask=False):
    return tokenizer.apply_chat_template(turns, tools=tools, add_generation_prompt=ask, return_dict=False)


def learned_after(tokenizer, before, answer, tools=None):
    """The ids of a prompt and of the answer with its end, cut from the template's rendering of the conversation."""
    prompt = rendered(tokenizer, before, tools, ask=True)
    whole = rendered(tokenizer, [*before, answer], tools)
    newline = tokenizer("\n").input_ids
    assert whole[: len(prompt)] == prompt
    assert whole[-len(newline) :] == newline
    return prompt, whole[len(prompt) : -len(newline)]


# What is learned ------------------------------------------------------------------------------------------------------


@of_each(SFT)
def test_demonstrations(make, made, tokenizer):
    path, expected = made(make)
    found, counts = encode_demonstrations(
        read_demonstrations(path), Renderer(tokenizer), max_length=10**6, action="error"
    )
    wanted = [learned_after(tokenizer, *one) for learned in expected for one in learned]
    assert [(one.prompt, one.response) for one in found] == wanted
    assert len(expected) == N
    assert not any(counts.values())


@of_each(PAIRS)
def test_pairs(make, made, tokenizer):
    path, expected = made(make)
    inputs = RewardInputs(tokenizer, written=True)
    found, _ = encode_rankings(read_rankings(path), inputs, max_length=10**6, action="error", equal_pairs="error")
    rows = [[row["input_ids"] for row in one.rows] for one in found]
    if make is anthropic:
        ids = [[[*tokenizer(p + a).input_ids, tokenizer.eos_token_id] for a in both] for p, *both, _ in expected]
    else:
        ids = [
            [[*itertools.chain(*learned_after(tokenizer, before, assistant(text), tools))] for text in both]
            for before, *both, tools in expected
        ]
    assert rows == ids


@of_each(KTO)
def test_labelled_responses(make, made, tokenizer):
    path, expected = made(make)
    found, _ = encode_responses(
        read_labelled(path), Renderer(tokenizer), max_length=10**6, action="error", what="responses"
    )
    assert [(one.prompt, one.response) for _, one in found] == [
        learned_after(tokenizer, before, assistant(text)) for before, text, _ in expected
    ]
    assert [record.label for record, _ in found] == [good for *_, good in expected]


@of_each(PROMPTS)
def test_prompts(make, made, tokenizer):
    """Reward functions still get every column of the record."""
    path, expected = made(make)
    prompts = read_prompts(path)
    found, _ = encode_prompts(prompts, Renderer(tokenizer), max_length=10**6, action="error")
    assert [one.ids for one in found] == [rendered(tokenizer, before, ask=True) for before in expected]
    for record, prompt in zip(read_jsonl(Path(path)), prompts, strict=True):
        added = {"completion"} | ({"chosen", "rejected"} - record.keys())
        assert record.items() >= {n: v for n, v in prompt.columns.items() if n not in added}.items()
        assert record.keys() - prompt.columns.keys() <= {"prompt"}


# From the command line -------------------------------------------------------------------------------------------------

COMMANDS = {"sft": (sharegpt, "2"), "dpo": (ultrafeedback, "2"), "kto": (kto_alpaca, "4")}


@pytest.mark.parametrize("command", COMMANDS)
def test_one_command(command, made, model, heedful, tmp_path):
    """No flag says what the file is; one line at the start does, and all records are counted."""
    make, size = COMMANDS[command]
    path, expected = made(make, 12)
    files = {"model": model, "data": path, "output": tmp_path / "运行"}
    done = heedful(command, **files, eval_fraction=0, dtype="float32", sample_every=0, max_steps=1, batch_size=size)
    assert done.status == 0, done.err
    counts = json.loads((tmp_path / "运行" / "summary.json").read_text())["data"]
    assert counts["records"] == counts["train"] == (sum(map(len, expected)) if command == "sft" else 12)
    assert not [name for name in counts if name.startswith("dropped")]
    assert f"heedful: {path}: read as " in done.err
