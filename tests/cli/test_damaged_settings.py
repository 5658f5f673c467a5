"""A model's settings files that hold nonsense: refused before anything is trained, with file, key and value.

Whatever decides where a response stops, which rows are read, or whether a model can be saved at the end is checked when the
model is named. Nothing ends in a traceback.
"""

import json
import shutil
from pathlib import Path

import pytest

from cases import often

GENERATION, CONFIG, TOKENIZER = "generation_config.json", "config.json", "tokenizer_config.json"
FOLDER = "a folder"
HUGE = 99999999
VALUES = [
    *((GENERATION, "eos_token_id", value) for value in ("x", ["a"], {"a": 1}, 1.5, HUGE, -1, True, [1, None], [1, 264])),
    *((GENERATION, "pad_token_id", value) for value in (-1, -4, 264, "0", True, [0], 0.5)),
    *((GENERATION, "bos_token_id", value) for value in (-7, "<s>", 1.5)),
    *((GENERATION, "temperature", value) for value in ("hot", -1, [0.7], True)),
    *((GENERATION, "top_p", value) for value in (7, -0.1, "0.9")),
    *((GENERATION, "top_k", value) for value in ("50", 2.5, -3, [50])),
    *((GENERATION, key, value) for key, value in [("max_new_tokens", 0), ("do_sample", "yes")]),
    *((GENERATION, key, value) for key, value in [("repetition_penalty", 0), ("min_p", 2)]),
    *((CONFIG, "eos_token_id", value) for value in (HUGE, "x", -2)),
    *((CONFIG, "pad_token_id", value) for value in (-1, 264, "x")),
    *((CONFIG, "vocab_size", value) for value in (-1, 0, "x", 2.5, 600, 100)),
    *((CONFIG, "hidden_size", value) for value in (0, -32, "x", 33, True)),
    *((CONFIG, "num_attention_heads", value) for value in (0, "x", 1.5, 64)),
    *((CONFIG, "num_key_value_heads", value) for value in (0, 3, -1)),
    *((CONFIG, "num_hidden_layers", value) for value in (-1, 0, "x", 7)),
    *((CONFIG, "head_dim", value) for value in (0, 7, "x")),
    *((CONFIG, "max_position_embeddings", value) for value in (0, -1, "x")),
    *((CONFIG, "attention_dropout", value) for value in (2.0, -0.5, "x", [0.1])),
    *((CONFIG, "rms_norm_eps", value) for value in ("x", [])),
    *((CONFIG, "rope_parameters", value) for value in ("x", {"rope_type": "nonsense"}, {"rope_theta": "x"})),
    *((CONFIG, "model_type", value) for value in ("nonsense", 5, None)),
    *((CONFIG, "hidden_act", value) for value in ("nonsense", 5)),
    *((CONFIG, "tie_word_embeddings", value) for value in ("no", 3)),
    *((CONFIG, "dtype", value) for value in ("float99",)),
    *((CONFIG, "layer_types", value) for value in (["nonsense", "nonsense"], ["full_attention"], 5)),
    *((TOKENIZER, "model_max_length", value) for value in ("x", -3, 0, True, [5])),
    *((TOKENIZER, "chat_template", value) for value in (5, True, [5], {"default": 5})),
    *((TOKENIZER, "eos_token", value) for value in (5, "<没有>", ["a"], None, {"content": 5})),
    *((TOKENIZER, "pad_token", value) for value in (5, ["a"])),
    *((TOKENIZER, "added_tokens_decoder", value) for value in (5, {"x": {"content": "y"}}, {"700": 5})),
    *((TOKENIZER, "extra_special_tokens", value) for value in (5, [5])),
    *((TOKENIZER, "tokenizer_class", value) for value in (5,)),
    *((TOKENIZER, "padding_side", value) for value in ("middle", 5)),
]  # fmt: skip
FILES = (
    GENERATION,
    CONFIG,
    TOKENIZER,
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
CONTENTS = {
    "cut": b"{",
    "empty": b"",
    "no UTF-8": b'{"a": "\xff\xfe"}',
    "a list": b"[1]",
    "null": b"null",
    FOLDER: None,
}
"""Of files; that of a chat template may be anything but bytes that are no text."""
HARMLESS = {("chat_template.jinja", content) for content in ("cut", "empty", "a list", "null")}


def damaged(model, file, damage):
    """Damage a file of a model: a key and its value, or the name of a content."""
    path = Path(model) / file
    if isinstance(damage, tuple):
        key, value = damage
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {key: value}, ensure_ascii=False), "utf-8")
        return
    path.unlink(missing_ok=True)
    content = CONTENTS[damage]
    path.mkdir() if content is None else path.write_bytes(content)


@pytest.fixture
def model(tiny, tmp_path):
    return shutil.copytree(tiny("qwen3"), tmp_path / "模型")


DAMAGES = [(file, (key, value)) for file, key, value in VALUES]
DAMAGES += [(file, content) for file in FILES for content in CONTENTS if (file, content) not in HARMLESS]
BY_TRANSFORMERS = ("rms_norm_eps", "rope_parameters", "model_type", "hidden_act", "tie_word_embeddings", "dtype",
                   "layer_types", "added_tokens_decoder", "extra_special_tokens", "tokenizer_class",
                   "padding_side")  # fmt: skip
"""Keys whose values transformers checks when it loads a model; a few of these tests are enough."""
BY_WEIGHTS = [("vocab_size", 600), ("vocab_size", 100), ("hidden_size", 33), ("num_attention_heads", 64),
              ("num_key_value_heads", 3), ("num_hidden_layers", 7), ("head_dim", 7)]  # fmt: skip
"""Values that could be, but not of these weights."""
TWICE = ("head_dim", "num_hidden_layers", "max_position_embeddings", "num_key_value_heads", "bos_token_id", "pad_token")
"""Keys with the same rule as another."""


def _of(file, damage):
    key = damage[0] if isinstance(damage, tuple) else ""
    is_slow = key in (*BY_TRANSFORMERS, *TWICE) or damage in BY_WEIGHTS or damage in ("empty", "a list")
    name = f"{file}-{json.dumps(damage, ensure_ascii=False)}"
    return pytest.param(file, damage, id=name, marks=[pytest.mark.exhaustive] * is_slow)


@pytest.mark.parametrize(("file", "damage"), [_of(*one) for one in DAMAGES])
def test_nonsense_is_refused_before_training(train, model, tmp_path, file, damage):
    damaged(model, file, damage)
    outcome = train("sft", model=model)
    assert outcome.status == 2, outcome.err
    assert outcome.err.startswith(f"heedful: CheckpointError: {model}")
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "运行").exists()
    if (
        isinstance(damage, tuple)
        and damage[0] not in BY_TRANSFORMERS
        and damage not in BY_WEIGHTS
        and damage[1] is not None
    ):
        key, value = damage
        shown = repr(value) if value == "<没有>" else json.dumps(value, ensure_ascii=False)
        assert f"{model / file}: {key} is {shown}" in outcome.message
    elif damage == FOLDER and file in ("tokenizer.json", "chat_template.jinja"):
        assert f"{model / file} is a folder, not a file; download the model again" in outcome.message
    elif isinstance(damage, str) and damage in CONTENTS and file in (GENERATION, "special_tokens_map.json"):
        assert f"{model / file}: " in outcome.message


@pytest.mark.parametrize(
    "command", ["sft", "reward", "dpo", "kto", "ppo", "grpo", "online-dpo", "merge", "chat", "evaluate"]
)
def test_every_command_refuses_what_could_not_be_saved(heedful, data, model, written, tmp_path, command):
    """A negative padding token is what transformers refuses to save, after all steps."""
    damaged(model, GENERATION, ("pad_token_id", -1))
    flags = ["--data", data(command)] if command not in ("online-dpo", "merge", "chat", "evaluate") else []
    words = [command, "--model", model, "--output", tmp_path / "运行", *flags]
    if command in ("ppo", "grpo", "online-dpo"):
        words += ["--rewards", "rule:digits"]
    if command == "online-dpo":
        words += ["--data", data("ppo")]
    if command == "merge":
        adapter = tmp_path / "适配器"
        adapter.mkdir()
        settings = {"peft_type": "LORA", "base_model_name_or_path": str(model)}
        (adapter / "adapter_config.json").write_text(json.dumps(settings), "utf-8")
        (adapter / "adapter_model.safetensors").write_bytes(b"")
        words = ["merge", "--adapter", adapter, "--output", tmp_path / "运行"]
    if command == "chat":
        words = ["chat", "--model", model]
    if command == "evaluate":
        words = ["evaluate", "perplexity", "--model", model, "--data", data("sft")]
    outcome = heedful(*words)
    assert outcome.status == 2
    assert f"{model / GENERATION}: pad_token_id is -1; it must be a token id from 0 to 263" in outcome.message
    assert not (tmp_path / "运行").exists()


SHORT_ONLINE = ("--samples-per-prompt", "2", "--minibatch-size", "2", "--max-new-tokens", "4")


@pytest.mark.parametrize(
    "command",
    often(["sft", "reward", "dpo", "kto", "ppo", "grpo", "online-dpo", "merge"], ["sft", "reward", "ppo", "merge"]),
)
def test_what_is_written_at_the_end_is_tried_before_the_first_step(
    heedful, train, data, tiny, tmp_path, monkeypatch, command
):
    """Here transformers refuses to write a tokenizer that it has read."""
    plain = tiny()
    if command == "merge":
        assert train("sft", "--lora-rank", "2", output=tmp_path / "适配器").status == 0

    def refuse(*_, **__):
        raise TypeError("不能写\nmore")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", refuse)
    if command == "merge":
        outcome = heedful("merge", "--adapter", tmp_path / "适配器" / "final", "--output", tmp_path / "运行")
    elif command == "online-dpo":
        flags = ["--rewards", "rule:digits", "--data", data("grpo"), "--output", tmp_path / "运行", "--steps", "1"]
        outcome = heedful(command, "--model", plain, *flags, "--rollout-batch-size", "2", *SHORT_ONLINE)
    else:
        outcome = train(command, *(["--critic", "separate"] if command == "ppo" else []))
    assert outcome.status == 2, outcome.err
    said = "its tokenizer_config.json or tokenizer.json cannot be saved again (不能写)"
    assert said in outcome.message
    assert "Traceback" not in outcome.err
    assert "loss" not in outcome.out
    assert not (tmp_path / "运行").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"eos_token_id": [1, 7], "pad_token_id": 0, "bos_token_id": None},
        {"temperature": 0.6, "top_p": 0.001, "top_k": -1, "do_sample": True, "min_p": 0, "repetition_penalty": 1},
        {"eos_token_id": None, "max_length": 4096, "some_new_key": {"x": [1]}},
    ],
)
def test_what_models_of_others_have_is_accepted(train, model, settings):
    path = model / GENERATION
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | settings), "utf-8")
    damaged(model, CONFIG, ("use_dropout", True))
    damaged(model, TOKENIZER, ("model_max_length", 1e30))
    outcome = train("sft", model=model)
    assert outcome.status == 0, outcome.err


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        (CONFIG, "bos_token_id", 50256),
        pytest.param(GENERATION, "bos_token_id", 50256, marks=pytest.mark.exhaustive),
        (GENERATION, "eos_token_id", []),
        pytest.param(GENERATION, "top_k", 50.0, marks=pytest.mark.exhaustive),
        (GENERATION, "max_length", 0),
        pytest.param(GENERATION, "num_beams", -1, marks=pytest.mark.exhaustive),
        (GENERATION, "num_return_sequences", 0),
    ],
)
def test_values_that_nothing_here_uses_change_nothing(heedful, data, model, file, key, value):
    words = ["evaluate", "perplexity", "--model", model, "--data", data("sft")]
    before = heedful(*words)
    assert before.status == 0, before.err
    damaged(model, file, (key, value))
    after = heedful(*words)
    assert after.status == 0, after.err
    assert after.out == before.out
