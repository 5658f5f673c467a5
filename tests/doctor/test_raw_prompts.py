"""Strings as prompts of a model that learned conversations: asked about in one line with both ways out, wherever."""

import json
import warnings

import pytest
from transformers import AutoTokenizer, GenerationConfig

import heedful as hf
from cases import often

QUESTIONS = [f"{i} 加 {i} 等于几？" for i in range(8)]
CHATS = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "好的。"}]} for q in QUESTIONS]
TABLES = {
    "sft": ("question,answer", "好的。", "prompt=question,completion=answer", "instruction=question,output=answer"),
    "kto": ("question,answer,label", "好的。,1", "prompt=question,completion=answer", "instruction=question,output=answer"),
    "dpo": ("question,good_answer,bad_answer", "好的。,不",
            "prompt=question,chosen=good_answer,rejected=bad_answer",
            "instruction=question,chosen=good_answer,rejected=bad_answer"),
    "ppo": ("question,note", "甲", "prompt=question", "instruction=question"),
}  # fmt: skip
TABLES["reward"], TABLES["grpo"], TABLES["online-dpo"] = TABLES["dpo"], TABLES["ppo"], TABLES["ppo"]
SMALL = {"batch_size": 4, "max_steps": 1, "eval_fraction": 0, "sample_every": 0, "dtype": "float32"}
ONLINE = {
    "rollout_batch_size": 4,
    "minibatch_size": 4,
    "max_new_tokens": 4,
    "eval_fraction": 0,
    "rewards": "rule:digits",
}
SETTINGS = dict.fromkeys(("sft", "reward", "dpo", "kto"), SMALL) | dict.fromkeys(("ppo", "online-dpo"), ONLINE)
SETTINGS["grpo"] = ONLINE | {"samples_per_prompt": 2}


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A tiny model after a step on conversations."""
    place = tmp_path_factory.mktemp("对话")
    hf.make_tiny_model("gpt2", place / "tiny", hidden_size=16, num_layers=1, max_length=128)
    config = hf.SFTConfig(model=str(place / "tiny"), output=place / "sft", **SMALL)
    return hf.train_sft(config, data=CHATS).folder / "final"


@pytest.fixture
def table(written):
    """``table(command)`` is a CSV file of strings for a trainer."""

    def write(command):
        head, rest, *_ = TABLES[command]
        rows = [f"{q},{rest[:-1]}{i % 2}" if command == "kto" else f"{q},{rest}" for i, q in enumerate(QUESTIONS)]
        return written("表.csv", "\n".join([head, *rows]) + "\n")

    return write


def found_in(heedful, command, *words, **settings):
    outcome = heedful("doctor", command, "--json", *words, **SETTINGS[command] | settings)
    return {one["check"]: one for one in json.loads(outcome.out)["findings"]}


@pytest.mark.parametrize("command", often(TABLES, {"dpo", "ppo"}))
def test_the_doctor_asks_and_both_ways_out_end_the_question(heedful, chat_model, table, command):
    _, _, raw, rendered = TABLES[command]
    given = {"model": chat_model, "data": table(command)}
    one = found_in(heedful, command, columns=raw, **given)["raw-prompts"]
    assert one["level"] == "warn"
    assert one["what"].startswith("8 of 8 prompts are strings")
    assert QUESTIONS[0] in one["evidence"]
    assert f"--columns {rendered} " in one["fix"]
    assert "--raw-prompts" in one["fix"]
    assert "raw-prompts" not in found_in(heedful, command, columns=rendered, **given)
    assert "raw-prompts" not in found_in(heedful, command, "--raw-prompts", columns=raw, **given)


def test_a_trainer_asks_in_one_line_before_its_first_step(heedful, chat_model, table, tmp_path):
    """Who keeps raw text has a model that learned it, which is not asked about any more."""
    given = SMALL | {"data": table("dpo"), "columns": TABLES["dpo"][2]}
    outcome = heedful("dpo", model=chat_model, output=tmp_path / "一", **given)
    (line,) = [line for line in outcome.err.splitlines() if "raw-prompts" in line or "WARNING" in line]
    assert line.startswith("heedful: WARNING: raw-prompts: 8 of 8 prompts are strings")
    assert outcome.err.index(line) < outcome.err.index("data: ")
    again = heedful("dpo", model=tmp_path / "一" / "final", output=tmp_path / "二", **given)
    assert again.status == 0
    assert "raw-prompts" not in again.err


def test_an_error_proposes_the_columns_that_render_first(heedful, chat_model, table, tmp_path):
    for command, (_, _, raw, rendered) in TABLES.items():
        data = table(command)
        message = heedful(command, model=chat_model, data=data, output=tmp_path / "无", **SETTINGS[command]).message
        assert message.index(f"--columns {rendered}") < message.index(f"--columns {raw}")


@pytest.mark.parametrize(
    "words",
    [
        ("evaluate", "scores", "--rewards", "rule:digits", "--max-new-tokens", "4", "--model"),
        ("evaluate", "perplexity", "--model"),
        ("sample", "--output", "答.jsonl", "--max-new-tokens", "4", "--models"),
    ],
)
def test_measuring_and_sampling_ask_too(heedful, chat_model, table, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = "sft" if "perplexity" in words else "ppo"
    given = (*words, str(chat_model), "--data", table(command), "--columns", TABLES[command][2])
    outcome = heedful(*given)
    assert outcome.status == 0, outcome.err
    assert outcome.err.count("8 of 8 prompts are strings") == 1
    assert f"--columns {TABLES[command][3]} renders them" in outcome.message
    overwrite = ("--overwrite",) if words[0] == "sample" else ()
    assert "strings" not in heedful(*given, "--raw-prompts", *overwrite).err


def test_a_reward_model_that_learned_conversations_asks(heedful, chat_model, table, tiny, tmp_path):
    """Also if the policy continues text."""
    rendered = SMALL | {"data": table("reward"), "columns": TABLES["reward"][3]}
    assert heedful("reward", model=chat_model, output=tmp_path / "奖", **rendered).status == 0
    scorer = f"model:{tmp_path / '奖' / 'final'}"
    given = {"model": tiny("gpt2"), "rewards": scorer, "data": table("ppo"), "columns": TABLES["ppo"][2]}
    assert found_in(heedful, "ppo", **given)["raw-prompts"]["what"].startswith(f"{scorer}: 8 of 8 prompts are strings")
    batch = hf.LocalEngine(hf.Policy.from_pretrained(tiny("gpt2")), max_new_tokens=2).generate(QUESTIONS[:2])
    with pytest.warns(UserWarning, match="raw-prompts: 2 of 2 prompts are strings"):
        hf.score([scorer], batch)


def test_generate_asks_once_and_reads_an_instruction(chat_model):
    policy = hf.Policy.from_pretrained(chat_model)
    engine = hf.LocalEngine(policy, max_new_tokens=2)
    with pytest.warns(UserWarning, match=r"1 prompt is a string.*\{'instruction': text\}.*raw_prompts=True") as given:
        engine.generate([QUESTIONS[0]])
    assert [one.filename for one in given] == [__file__]
    for prompts in ([QUESTIONS[0]], [{"prompt": QUESTIONS[0]}]):
        with pytest.warns(UserWarning, match="raw-prompts"):
            hf.encode_prompts(policy, prompts)
        with pytest.warns(UserWarning, match="raw-prompts"):
            hf.as_responses(policy, prompts, ["好"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = engine.generate([{"instruction": QUESTIONS[0]}, CHATS[0]["messages"][:1]])
        assert batch.completions[0].prompt.prompt == batch.completions[1].prompt.prompt
        hf.LocalEngine(policy, max_new_tokens=2, raw_prompts=True).generate([QUESTIONS[0]])


def published(folder, *, ends, eos):
    """A model from elsewhere: no record of what it learned, and a generation config that ends at these tokens."""
    hf.make_tiny_model("gpt2", folder, hidden_size=16, num_layers=1, max_length=128)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    del tokenizer.init_kwargs["heedful_learned"]
    tokenizer.eos_token = eos
    tokenizer.save_pretrained(folder)
    config = GenerationConfig.from_pretrained(folder)
    config.eos_token_id = [tokenizer.convert_tokens_to_ids(one) for one in ends]
    config.save_pretrained(folder)
    return hf.Policy.from_pretrained(folder)


@pytest.mark.parametrize(
    ("ends", "eos", "is_asked"),
    [
        (["<|end|>", "<|endoftext|>"], "<|endoftext|>", True),
        (["<|end|>", "<|endoftext|>"], "<|end|>", True),
        (["<|endoftext|>"], "<|endoftext|>", False),
    ],
)
def test_models_from_elsewhere(tmp_path, ends, eos, is_asked):
    """Instruct models stop at an end of turn too; a base model with the same chat template does not."""
    policy = published(tmp_path / "模型", ends=ends, eos=eos)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        hf.LocalEngine(policy, max_new_tokens=2).generate([QUESTIONS[0]])
    assert ["published for chats" in str(one.message) for one in given] == [True] * is_asked


def test_plain_text_and_random_models_are_not_asked_about(heedful, chat_model, tiny, written, table):
    """Language modelling has no prompt, and a random model has learned nothing."""
    data = written("文.jsonl", [{"text": q * 3} for q in QUESTIONS])
    assert "raw-prompts" not in found_in(heedful, "sft", model=chat_model, data=data)
    given = {"model": tiny("gpt2"), "data": table("sft"), "columns": TABLES["sft"][2]}
    assert "raw-prompts" not in found_in(heedful, "sft", **given)
