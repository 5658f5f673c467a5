"""What is wrong with a folder is said before anything else happens, with what to do about it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, utils

from heedful import CheckpointError, ConfigError, Message, make_tiny_model
from heedful.data.chat import Renderer, RewardInputs
from heedful.models import load_causal_lm, load_tokenizer, load_trunk
from heedful.models.save import load_tensors, save_tensors
from heedful.models.source import explained, load_config, resolve
from heedful.models.tokenizer import check_companion

LOADERS = [load_causal_lm, load_trunk, load_tokenizer, load_config]


@pytest.fixture
def copy(checkpoints, tmp_path):
    """A folder to damage."""
    return shutil.copytree(checkpoints["qwen3"], tmp_path / "model")


@pytest.mark.parametrize("load", LOADERS)
def test_a_missing_folder_names_the_nearest(load, checkpoints, tmp_path):
    (tmp_path / "tiny-qwen").mkdir()
    with pytest.raises(CheckpointError) as error:
        load(f"{tmp_path}/tiny-qwne")
    assert str(error.value) == f"model {tmp_path}/tiny-qwne does not exist; did you mean {tmp_path}/tiny-qwen?"
    with pytest.raises(CheckpointError) as error:
        load(f"{tmp_path}/zzz")
    assert str(error.value) == f"model {tmp_path}/zzz does not exist"


@pytest.mark.parametrize("name", ["runs/sft/final", "runs/sft", "./sft", "~/sft", "rnus"])
def test_a_relative_path_is_not_asked_of_the_hub(tmp_path, monkeypatch, name):
    """``runs/sft`` looks like a Hub name; where there is a folder runs, it is a path with a mistake in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(CheckpointError, match=f"model {name} does not exist"):
        load_causal_lm(name)


@pytest.mark.parametrize("name", ["gpt2", "sft", "Qwen/Qwen3-0.6B"])
def test_a_bare_name_is_left_to_the_hub(tmp_path, monkeypatch, name):
    """``gpt2`` is a model there; only where a folder of nearly that name lies here is it a mistake."""
    monkeypatch.chdir(tmp_path)
    assert resolve(name).folder == name
    (tmp_path / "runs").mkdir()
    assert resolve(name).folder == name


def test_a_bare_name_near_a_folder_is_a_mistake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-gpt2").mkdir()
    with pytest.raises(CheckpointError) as error:
        resolve("tiny-gtp2")
    assert str(error.value) == "model tiny-gtp2 does not exist; did you mean tiny-gpt2?"


@pytest.mark.parametrize("load", LOADERS)
def test_a_run_folder_points_at_the_models_inside(load, tmp_path):
    for name in ("final", "best", "logs"):
        (tmp_path / "x" / name).mkdir(parents=True)
    for name in ("final", "best"):
        (tmp_path / "x" / name / "config.json").write_text("{}")
    with pytest.raises(CheckpointError) as error:
        load(f"{tmp_path}/x")
    assert str(error.value).endswith(
        f"without a config.json, so it is not a Hugging Face model; did you mean {tmp_path}/x/best or {tmp_path}/x/final?"
    )


@pytest.mark.parametrize("load", LOADERS)
def test_a_file_is_no_model(load, copy):
    with pytest.raises(CheckpointError, match=r"model.safetensors is a file; a model is a folder"):
        load(f"{copy}/model.safetensors")


@pytest.mark.parametrize("load", [load_causal_lm, load_trunk])
@pytest.mark.parametrize("damage", ["truncated", "empty", "noise", "absent"])
def test_damaged_weights(load, copy, damage):
    weights = copy / "model.safetensors"
    content = weights.read_bytes()
    if damage == "absent":
        weights.unlink()
    else:
        weights.write_bytes({"truncated": content[: len(content) // 2], "empty": b"", "noise": b"\xff" * 999}[damage])
    with pytest.raises(CheckpointError, match=r"model: cannot load a .*model from it: ") as error:
        load(str(copy))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("load", LOADERS[:2])
def test_missing_weights_are_not_filled_with_random_numbers(load, copy):
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks .*weights?, first (model\.)?layers.1.mlp.up_proj.weight"):
        load(str(copy))


@pytest.mark.parametrize("load", LOADERS[:2])
def test_weights_of_another_shape(load, copy):
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="cannot load a"):
        load(str(copy))


def test_a_configuration_that_is_no_json(copy):
    (copy / "config.json").write_text("{")
    for load in (load_causal_lm, load_trunk, load_config):
        with pytest.raises(CheckpointError, match=r"config\.json: line 1 is not valid JSON"):
            load(str(copy))


def test_a_folder_without_a_tokenizer(copy):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    with pytest.raises(CheckpointError, match="cannot load a tokenizer from it"):
        load_tokenizer(str(copy))


def test_a_tokenizer_without_an_end(copy):
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(CheckpointError, match=r'a response could never end; set "eos_token" in its tokenizer_config'):
        Renderer(load_tokenizer(str(copy)))


def test_an_encoders_tokenizer_needs_no_end(checkpoints, tmp_path):
    """BERT's has CLS and SEP and no EOS."""
    folder = shutil.copytree(checkpoints["deberta-v2"], tmp_path / "encoder")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.eos_token_id, tokenizer.cls_token, tokenizer.sep_token) == (None, "<|cls|>", "<|sep|>")
    assert RewardInputs(tokenizer).encode("问", "答")["input_ids"]
    with pytest.raises(CheckpointError, match="no end-of-sequence token"):
        Renderer(tokenizer)


def with_bos(folder, *, adds):
    """The tokenizer in a folder gets a BOS token (<|user|>), put before every text where it ``adds`` one."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = "<|user|>"
    if adds:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|user|> $A", special_tokens=[("<|user|>", tokenizer.bos_token_id)]
        )
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("adds", [True, False])
def test_the_plain_template_begins_as_texts_do(checkpoints, tmp_path, adds):
    """Exactly one BOS where the tokenizer puts one before a text, none where it only knows one."""
    folder = shutil.copytree(checkpoints["llama"], tmp_path / "model")
    with_bos(folder, adds=adds)
    plain = load_tokenizer(str(folder), chat_template="plain")
    assert (plain("a").input_ids[0] == plain.bos_token_id) is adds
    rendered = plain.apply_chat_template([{"role": "user", "content": "你好"}], tokenize=False)
    assert rendered == ("<|user|>" if adds else "") + "User: 你好\n"
    ids = Renderer(plain).prompt_ids((Message("user", "你好"),))
    assert ids.count(plain.bos_token_id) == adds
    text = plain("User: 你好\nAssistant:", add_special_tokens=False).input_ids
    assert ids == [plain.bos_token_id] * adds + text


def test_a_companion_of_the_same_vocabulary_is_accepted(copy):
    tokenizer = load_tokenizer(str(copy))
    check_companion("--reference", None, tokenizer, 10**9)
    check_companion("--reference", str(copy), tokenizer, 512)


def test_a_companion_of_another_vocabulary_is_refused(copy, checkpoints):
    """Two tokens swapped: as many ids, and nothing would fail but the numbers."""
    content = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["b"], vocabulary["c"] = vocabulary["c"], vocabulary["b"]
    (copy / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    policy = load_tokenizer(str(checkpoints["qwen3"]))
    assert load_tokenizer(str(copy)).get_vocab().keys() == policy.get_vocab().keys()
    with pytest.raises(ConfigError) as error:
        check_companion("--reference", str(copy), policy, 10)
    for fragment in (f"--reference {copy} has another vocabulary", f"2 of {len(policy.get_vocab())} tokens differ"):
        assert fragment in str(error.value)
    assert any(f"such as {token!r}" in str(error.value) for token in "bc")


def test_a_companion_may_know_more_tokens_and_not_fewer(copy, checkpoints):
    tokenizer, model = load_tokenizer(str(copy)), load_causal_lm(str(copy))
    tokenizer.add_tokens(["苹果"])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(copy)
    tokenizer.save_pretrained(copy)
    own = str(checkpoints["qwen3"])
    check_companion("--value-model", str(copy), load_tokenizer(own), 512)
    with pytest.raises(ConfigError, match=r"--value-model .* has another vocabulary .* 1 of 265 .*'苹果'"):
        check_companion("--value-model", own, load_tokenizer(str(copy)), 512)


def test_a_companion_of_shorter_context_is_refused(checkpoints, tmp_path):
    make_tiny_model("gpt2", tmp_path / "short", hidden_size=16, num_layers=1, max_length=64)
    tokenizer = load_tokenizer(str(checkpoints["gpt2"]))
    check_companion("--reference", str(tmp_path / "short"), tokenizer, 64)
    with pytest.raises(ConfigError, match=r"--reference .*short reads 64 tokens, but .* 65"):
        check_companion("--reference", str(tmp_path / "short"), tokenizer, 65)


@pytest.mark.parametrize("missing", [1, 100])
def test_a_companion_with_too_few_embeddings_is_refused(checkpoints, tmp_path, missing):
    """Its tokenizer knows all tokens, its weights do not: an index error in the middle of training."""
    folder = shutil.copytree(checkpoints["llama"], tmp_path / "small")
    tokenizer = load_tokenizer(str(folder))
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size = len(tokenizer) - missing
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with pytest.raises(ConfigError, match=f"--reference .*small has {config.vocab_size} embeddings, fewer than .* 264"):
        check_companion("--reference", str(folder), tokenizer, 10)


def test_a_companion_that_does_not_exist(checkpoints, tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        check_companion("--reference", f"{tmp_path}/none", load_tokenizer(str(checkpoints["gpt2"])), 10)


def test_chat_templates(copy):
    turns = [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "好"}]
    plain = load_tokenizer(str(copy), chat_template="plain")
    assert plain.apply_chat_template(turns, tokenize=False) == "User: 你好\nAssistant: 好<|endoftext|>\n"
    system = [{"role": "system", "content": "有礼"}, turns[0]]
    rendered = plain.apply_chat_template(system, tokenize=False, add_generation_prompt=True)
    assert rendered == "System: 有礼\nUser: 你好\nAssistant:"
    (copy / "own.jinja").write_text("[{{ messages[0].content }}]", encoding="utf-8")
    own = load_tokenizer(str(copy), chat_template=str(copy / "own.jinja"))
    assert own.apply_chat_template(turns, tokenize=False) == "[你好]"
    with pytest.raises(
        ConfigError, match=r"--chat-template: 'nope\.jinja' is neither 'plain' nor an existing Jinja file"
    ):
        load_tokenizer(str(copy), chat_template="nope.jinja")


def test_weights_become_float32(copy):
    lm = load_causal_lm(str(copy)).to(torch.bfloat16)
    lm.save_pretrained(copy)
    for load in (load_causal_lm, load_trunk):
        assert {p.dtype for p in load(str(copy)).parameters()} == {torch.float32}


def test_tensors_come_back(tmp_path):
    """Views too, which safetensors alone refuses."""
    tensors = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.ones(1, requires_grad=True)}
    save_tensors(tensors, tmp_path / "new" / "x.safetensors")
    (tmp_path / "new" / "x.safetensors").rename(tmp_path / "x.safetensors")
    loaded = load_tensors(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    (tmp_path / "x.safetensors").write_bytes(b"123")
    with pytest.raises(CheckpointError, match="cannot load a safetensors file"):
        load_tensors(tmp_path / "x.safetensors")


def test_explained_puts_the_verbosity_back():
    before = utils.logging.get_verbosity()
    for error in (ValueError("第一行\nsecond"), KeyError()):
        with pytest.raises(CheckpointError) as raised, explained("m", "model"):
            raise error
        assert raised.value.__cause__ is error
    assert str(raised.value) == "m: cannot load a model from it: KeyError (and no local folder has that name)"
    assert utils.logging.get_verbosity() == before


def test_explained_says_whether_there_is_a_folder(tmp_path):
    """A misspelt path that looks like a Hub name fails at the Hub, with a message about the network."""
    with pytest.raises(CheckpointError) as raised, explained(str(tmp_path), "model"):
        raise KeyError
    assert str(raised.value) == f"{tmp_path}: cannot load a model from it: KeyError"
    with pytest.raises(CheckpointError) as raised, explained("org/m", "tokenizer"):
        raise ValueError("无")
    assert str(raised.value) == "org/m: cannot load a tokenizer from it: 无 (and no local folder has that name)"


def test_the_tokenizer_is_that_of_the_folder(copy):
    assert load_tokenizer(str(copy))("你").input_ids == AutoTokenizer.from_pretrained(copy)("你").input_ids
