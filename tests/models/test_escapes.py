"""Nothing that a checkpoint names leads out of its folder, and no chat template can be waited for without end."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from heedful import CheckpointError, ConfigError, hub
from heedful.data import read_records
from heedful.data.chat import Renderer
from heedful.models import load_causal_lm, load_tokenizer
from heedful.models.source import resolve


@pytest.fixture
def sharded(tiny, tmp_path):
    """A tiny model in several files, and their index."""
    AutoModelForCausalLM.from_pretrained(tiny("qwen3")).save_pretrained(tmp_path / "模型", max_shard_size="40KB")
    AutoTokenizer.from_pretrained(tiny("qwen3")).save_pretrained(tmp_path / "模型")
    assert len(list((tmp_path / "模型").glob("*.safetensors"))) > 1
    return tmp_path / "模型"


def rename_shard(folder, new):
    """Let the index name a file by another path, at which there is one."""
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text(encoding="utf-8"))
    old = sorted(set(content["weight_map"].values()))[0]
    content["weight_map"] = {name: new if file == old else file for name, file in content["weight_map"].items()}
    index.write_text(json.dumps(content), encoding="utf-8")
    target = folder / new
    target.parent.mkdir(parents=True, exist_ok=True)
    (folder / old).rename(target)


@pytest.mark.parametrize("new", ["../外.safetensors", "a/../../外.safetensors", "{folder}/../外.safetensors"])
def test_weights_outside_the_folder_are_refused(sharded, new):
    """Before, they were read."""
    new = new.format(folder=sharded)
    rename_shard(sharded, new)
    with pytest.raises(CheckpointError) as caught:
        load_causal_lm(str(sharded))
    for part in (f"{sharded}/model.safetensors.index.json: lists a file outside its folder", repr(new)):
        assert part in str(caught.value)


def test_an_index_that_cannot_be_read(sharded):
    for content in ("{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 5000):
        (sharded / "model.safetensors.index.json").write_text(content, encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"index\.json: cannot load a list of weights"):
            resolve(str(sharded))


def test_weights_behind_links_are_read(sharded, tmp_path):
    """The cache of the Hub keeps every file as a link to another folder."""
    (tmp_path / "存").mkdir()
    for path in sharded.iterdir():
        path.rename(tmp_path / "存" / path.name)
        path.symlink_to(tmp_path / "存" / path.name)
    assert load_causal_lm(str(sharded)).config.num_hidden_layers == 2


def test_a_tokenizer_reads_no_file_elsewhere(sharded, tmp_path):
    """What its config names as its files is not opened; the folder's own are."""
    secret = tmp_path / "外.json"
    secret.write_text(
        (sharded / "tokenizer.json").read_text(encoding="utf-8").replace("<|end|>", "<|外|>"), encoding="utf-8"
    )
    config = json.loads((sharded / "tokenizer_config.json").read_text(encoding="utf-8"))
    names = {name: str(secret) for name in ("tokenizer_file", "vocab_file", "chat_template_file", "added_tokens_file")}
    (sharded / "tokenizer_config.json").write_text(json.dumps(config | names), encoding="utf-8")
    assert "<|外|>" not in load_tokenizer(str(sharded)).get_vocab()


def test_a_template_whose_name_leads_elsewhere_is_refused(sharded):
    """It would be saved under that name, after training."""
    config = json.loads((sharded / "tokenizer_config.json").read_text(encoding="utf-8"))
    (sharded / "chat_template.jinja").unlink(missing_ok=True)
    for name in ("../../外", "/外", "a/b", "..\\外", "a\0b", ""):
        config["chat_template"] = [{"name": "default", "template": "a"}, {"name": name, "template": "b"}]
        (sharded / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"a chat template is named .* which is not a file name"):
            load_tokenizer(str(sharded))


def test_a_template_file_that_is_not_utf8(tmp_path, tiny):
    (tmp_path / "a.jinja").write_bytes("模板".encode("gb18030"))
    with pytest.raises(ConfigError, match=r"--chat-template .*a\.jinja: not UTF-8"):
        load_tokenizer(tiny(), chat_template=str(tmp_path / "a.jinja"))


@pytest.mark.parametrize(
    "name", ["modelscope:../..", "modelscope:a/..", "modelscope:./a", "modelscope:a/b/c", "modelscope:/a"]
)
def test_names_on_modelscope_lead_nowhere_else(name):
    with pytest.raises(ConfigError, match="is not a name on ModelScope"):
        hub.local_model(name)
    with pytest.raises(ConfigError, match="is not a name on ModelScope"):
        read_records(name, columns={})


# Templates that never end ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "{{ 9 ** 9 ** 9 }}",
        "{% for m in messages %}{{ 2 ** m.content | int }}{% endfor %}",
        "{% if 0 %}{{ 2 ** 3 }}{% endif %}",
    ],
)
def test_a_template_with_a_power_is_refused(tmp_path, tiny, text):
    """One operation takes for ever, and nothing can interrupt it; the first does so while the template is compiled."""
    (tmp_path / "a.jinja").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"computes a power \(\*\* in line 1\)"):
        load_tokenizer(tiny(), chat_template=str(tmp_path / "a.jinja"))


@pytest.mark.parametrize("text", ["{% for %}", "{{ " + "(" * 5000 + ")" * 5000 + " }}"])
def test_a_template_that_cannot_be_parsed_is_refused_when_it_is_used(tmp_path, tiny, text):
    (tmp_path / "a.jinja").write_text(text, encoding="utf-8")
    tokenizer = load_tokenizer(tiny(), chat_template=str(tmp_path / "a.jinja"))
    with pytest.raises(CheckpointError, match="chat template refuses"):
        Renderer(tokenizer)
