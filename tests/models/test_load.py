"""What is wrong with a folder is said before anything else happens, with what to do about it."""

import json
import shutil

import pytest
import torch
from safetensors import torch as safetensors
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


def test_a_missing_folder_names_the_nearest(tmp_path):
    (tmp_path / "tiny-qwen").mkdir()
    for load in LOADERS:
        with pytest.raises(CheckpointError) as error:
            load(f"{tmp_path}/tiny-qwne")
        assert str(error.value) == f"model {tmp_path}/tiny-qwne does not exist; did you mean {tmp_path}/tiny-qwen?"
    with pytest.raises(CheckpointError, match=r"model .*/zzz does not exist$"):
        load_causal_lm(f"{tmp_path}/zzz")


def test_a_name_is_of_the_hub_unless_it_looks_like_a_path_or_nearly_like_a_folder_here(tmp_path, monkeypatch):
    """``runs/sft`` looks like a Hub name; where there is a folder runs, it is a path with a mistake in it."""
    monkeypatch.chdir(tmp_path)
    for folder in ("runs", "tiny-gpt2"):
        for name in ("gpt2", "sft", "Qwen/Qwen3-0.6B"):
            assert resolve(name).folder == name
        (tmp_path / folder).mkdir()
    for name in ("runs/sft/final", "runs/sft", "./sft", "~/sft", "rnus"):
        with pytest.raises(CheckpointError, match=f"model {name} does not exist"):
            load_causal_lm(name)
    with pytest.raises(CheckpointError, match=r"^model tiny-gtp2 does not exist; did you mean tiny-gpt2\?$"):
        resolve("tiny-gtp2")


def test_a_run_folder_points_at_the_models_inside(tmp_path):
    for name in ("final", "best", "logs"):
        (tmp_path / "x" / name).mkdir(parents=True)
    for name in ("final", "best"):
        (tmp_path / "x" / name / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"without a config.json, .*; did you mean .*/x/best or .*/x/final\?$"):
        resolve(f"{tmp_path}/x")


def test_damaged_folders(copy):
    path = copy / "model.safetensors"
    content = path.read_bytes()
    weights = safetensors.load(content)
    with pytest.raises(CheckpointError, match=r"model.safetensors is a file; a model is a folder"):
        resolve(str(path))

    def refused(said, loaders=(load_causal_lm, load_trunk)):
        for load in loaders:
            with pytest.raises(CheckpointError, match=said) as error:
                load(str(copy))
            assert "\n" not in str(error.value)

    for damaged in (content[: len(content) // 2], b"", b"\xff" * 999):
        path.write_bytes(damaged)
        refused(r"model: cannot load a .*model from it: ")
    path.unlink()
    refused(r"model: cannot load a .*model from it: ")
    safetensors.save_file({**weights, "model.norm.weight": torch.ones(7)}, path, metadata={"format": "pt"})
    refused("cannot load a")
    del weights["model.layers.1.mlp.up_proj.weight"]
    safetensors.save_file(weights, path, metadata={"format": "pt"})
    refused(r"lacks .*weights?, first (model\.)?layers.1.mlp.up_proj.weight")
    (copy / "config.json").write_text("{")
    refused(r"config\.json: line 1 is not valid JSON", (load_causal_lm, load_trunk, load_config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    refused(r"cannot load a tokenizer from it|is not valid JSON", (load_tokenizer,))


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
    check_companion("--reference", None, str(copy), tokenizer, 10**9)
    check_companion("--reference", str(copy), str(copy), tokenizer, 512)


def test_a_companion_of_another_vocabulary_is_refused(copy, checkpoints):
    """Two tokens swapped: as many ids, and nothing would fail but the numbers."""
    content = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["b"], vocabulary["c"] = vocabulary["c"], vocabulary["b"]
    (copy / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    own = str(checkpoints["qwen3"])
    policy = load_tokenizer(own)
    assert load_tokenizer(str(copy)).get_vocab().keys() == policy.get_vocab().keys()
    with pytest.raises(ConfigError) as error:
        check_companion("--reference", str(copy), own, policy, 10)
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
    check_companion("--value-model", str(copy), own, load_tokenizer(own), 512)
    with pytest.raises(ConfigError, match=r"--value-model .* has another vocabulary .* 1 of 265 .*'苹果'"):
        check_companion("--value-model", own, str(copy), load_tokenizer(str(copy)), 512)


def test_a_companion_of_shorter_context_is_refused(checkpoints, tmp_path):
    make_tiny_model("gpt2", tmp_path / "short", hidden_size=16, num_layers=1, max_length=64)
    own = str(checkpoints["gpt2"])
    tokenizer = load_tokenizer(own)
    check_companion("--reference", str(tmp_path / "short"), own, tokenizer, 64)
    with pytest.raises(ConfigError, match=r"--reference .*short reads 64 tokens, but .* 65"):
        check_companion("--reference", str(tmp_path / "short"), own, tokenizer, 65)


def test_a_companion_with_too_few_embeddings_is_refused(checkpoints, tmp_path):
    """Its tokenizer knows all tokens, its weights do not: an index error in the middle of training."""
    folder = shutil.copytree(checkpoints["llama"], tmp_path / "small")
    tokenizer = load_tokenizer(str(folder))
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size = len(tokenizer) - 1
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with pytest.raises(ConfigError, match=f"--reference .*small has {config.vocab_size} embeddings, fewer than .* 264"):
        check_companion("--reference", str(folder), str(checkpoints["llama"]), tokenizer, 10)


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


def test_explained_says_whether_there_is_a_folder(tmp_path):
    """A misspelt path that looks like a Hub name fails at the Hub, with a message about the network."""
    before = utils.logging.get_verbosity()
    for name, said in ((str(tmp_path), ""), ("org/m", r" \(and no local folder has that name\)")):
        with (
            pytest.raises(CheckpointError, match=f"^{name}: cannot load a model from it: 无{said}$"),
            explained(name, "model"),
        ):
            raise ValueError("无")
    assert utils.logging.get_verbosity() == before
