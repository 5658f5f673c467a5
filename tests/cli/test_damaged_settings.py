"""A model's settings files that hold nonsense: refused before anything is trained, with file, key and value.

Whatever decides where a response stops, which rows are read, or whether a model can be saved at the end is checked when the
model is named. Nothing ends in a traceback.
"""

import json
import shutil
from pathlib import Path

import pytest

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
"""Keys whose values transformers checks when it loads a model; they are exhaustive."""
BY_WEIGHTS = [("vocab_size", 600), ("vocab_size", 100), ("hidden_size", 33), ("num_attention_heads", 64),
              ("num_key_value_heads", 3), ("num_hidden_layers", 7), ("head_dim", 7)]  # fmt: skip
"""Values that could be, but not of these weights; they are exhaustive."""


def test_values_that_are_nonsense_are_refused_before_training(train, model, tmp_path):
    for file, key, value in VALUES:
        if key not in BY_TRANSFORMERS and (key, value) not in BY_WEIGHTS:
            refused(train, model, tmp_path, file, (key, value))


@pytest.mark.exhaustive
def test_values_that_the_weights_or_transformers_refuse(train, model, tmp_path):
    for file, key, value in VALUES:
        if key in BY_TRANSFORMERS or (key, value) in BY_WEIGHTS:
            refused(train, model, tmp_path, file, (key, value))


@pytest.mark.parametrize("file", FILES)
def test_files_that_are_nonsense_are_refused_before_training(train, model, tmp_path, file):
    for content in CONTENTS:
        if (file, content) not in HARMLESS:
            refused(train, model, tmp_path, file, content)


def refused(train, model, tmp_path, file, damage):
    """A model with this file damaged is refused, and is then whole again."""
    path = model / file
    before = path.read_bytes() if path.exists() else None
    damaged(model, file, damage)
    outcome = train("sft", model=model)
    assert outcome.status == 2, (file, damage, outcome.err)
    assert outcome.err.startswith(f"heedful: CheckpointError: {model}"), (file, damage, outcome.err)
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "运行").exists()
    is_ours = isinstance(damage, tuple) and damage[0] not in BY_TRANSFORMERS and damage not in BY_WEIGHTS
    if is_ours and damage[1] is not None:
        key, value = damage
        shown = repr(value) if value == "<没有>" else json.dumps(value, ensure_ascii=False)
        assert f"{path}: {key} is {shown}" in outcome.message
    elif damage == FOLDER and file in ("tokenizer.json", "chat_template.jinja"):
        assert f"{path} is a folder, not a file; download the model again" in outcome.message
    elif isinstance(damage, str) and file in (GENERATION, "special_tokens_map.json"):
        assert f"{path}: " in outcome.message
    path.rmdir() if path.is_dir() else path.unlink()
    if before is not None:
        path.write_bytes(before)


def test_every_command_refuses_what_could_not_be_saved(heedful, data, model, tmp_path):
    """A negative padding token is what transformers refuses to save, after all steps."""
    damaged(model, GENERATION, ("pad_token_id", -1))
    adapter = tmp_path / "适配器"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(model)}
    (adapter / "adapter_config.json").write_text(json.dumps(settings), "utf-8")
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    run = ["--model", model, "--output", tmp_path / "运行"]
    trainers = [[name, *run, "--data", data(name)] for name in ("sft", "reward", "dpo", "kto")]
    online = [[name, *run, "--data", data("ppo"), "--rewards", "rule:digits"] for name in ("ppo", "grpo", "online-dpo")]
    others = [["merge", "--adapter", adapter, "--output", tmp_path / "运行"], ["chat", "--model", model]]
    for words in (*trainers, *online, *others, ["evaluate", "perplexity", "--model", model, "--data", data("sft")]):
        outcome = heedful(*words)
        assert outcome.status == 2, words
        assert f"{model / GENERATION}: pad_token_id is -1; it must be a token id from 0 to 263" in outcome.message
        assert not (tmp_path / "运行").exists()


def test_what_is_written_at_the_end_is_tried_before_the_first_step(heedful, train, tmp_path, monkeypatch):
    """Here transformers refuses to write a tokenizer that it has read."""
    assert train("sft", "--lora-rank", "2", output=tmp_path / "适配器").status == 0

    def refuse(*_, **__):
        raise TypeError("不能写\nmore")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", refuse)
    for words in (["sft"], ["reward"], ["ppo", "--critic", "separate"], ["merge"]):
        merge = ("merge", "--adapter", tmp_path / "适配器" / "final", "--output", tmp_path / "运行")
        outcome = heedful(*merge) if words == ["merge"] else train(*words)
        assert outcome.status == 2, outcome.err
        assert "its tokenizer_config.json or tokenizer.json cannot be saved again (不能写)" in outcome.message
        assert "Traceback" not in outcome.err
        assert "loss" not in outcome.out
        assert not (tmp_path / "运行").exists()


def test_what_models_of_others_have_is_accepted(train, model, tmp_path):
    path = model / GENERATION
    own = json.loads(path.read_text("utf-8"))
    damaged(model, CONFIG, ("use_dropout", True))
    damaged(model, TOKENIZER, ("model_max_length", 1e30))
    sampling = {"temperature": 0.6, "top_p": 0.001, "top_k": -1, "do_sample": True, "min_p": 0, "repetition_penalty": 1}
    for i, settings in enumerate((
        {"eos_token_id": [1, 7], "pad_token_id": 0, "bos_token_id": None, **sampling},
        {"eos_token_id": None, "max_length": 4096, "some_new_key": {"x": [1]}},
    )):  # fmt: skip
        path.write_text(json.dumps(own | settings), "utf-8")
        outcome = train("sft", model=model, output=tmp_path / f"{i}")
        assert outcome.status == 0, outcome.err


def test_values_that_nothing_here_uses_change_nothing(heedful, data, model):
    words = ["evaluate", "perplexity", "--model", model, "--data", data("sft")]
    before = heedful(*words)
    assert before.status == 0, before.err
    damaged(model, CONFIG, ("bos_token_id", 50256))
    for key, value in (("eos_token_id", []), ("max_length", 0), ("num_return_sequences", 0)):
        damaged(model, GENERATION, (key, value))
    after = heedful(*words)
    assert after.status == 0, after.err
    assert after.out == before.out
