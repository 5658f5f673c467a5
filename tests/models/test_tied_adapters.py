"""Adapters on embeddings and output heads give PEFT's logits, whether the base ties the two or not.

PEFT trains a layer of its own in the place of one of two tied ones; merging into the one matrix would change both.
"""

import copy
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cases import pairs_often
from heedful import CheckpointError
from heedful.models import load_causal_lm, load_reward_model, load_tokenizer
from heedful.models.shape import load_shape

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*(save_embedding_layers|tie|ensure_weight_tying):UserWarning"),
]

IDS = torch.tensor([[20, 31, 42, 53, 64, 75]])
EMBED, HEAD = "embed_tokens", "lm_head"
SHAPES = {
    "linear layers": {"target_modules": "all-linear"},
    "embeddings in full": {"modules_to_save": [EMBED]},
    "head in full": {"modules_to_save": [HEAD]},
    "both in full": {"modules_to_save": [EMBED, HEAD]},
    "both in full, tied": {"modules_to_save": [EMBED, HEAD], "ensure_weight_tying": True},
    "on embeddings": {"target_modules": ["q_proj", EMBED]},
    "on the head": {"target_modules": ["q_proj", HEAD]},
    "on both": {"target_modules": ["q_proj", EMBED, HEAD]},
    "on both, tied": {"target_modules": ["q_proj", EMBED, HEAD], "ensure_weight_tying": True},
    "on the head, tied": {"target_modules": ["q_proj", HEAD], "ensure_weight_tying": True},
    "on embeddings, rslora": {"target_modules": ["q_proj", EMBED], "use_rslora": True},
    "on both, dora": {"target_modules": ["q_proj", EMBED, HEAD], "use_dora": True},
    "on embeddings, head in full": {"target_modules": ["q_proj", EMBED], "modules_to_save": [HEAD]},
    "tokens": {"trainable_token_indices": [20, 42, 7]},
    "tokens of the head": {"trainable_token_indices": {HEAD: [31, 20]}},
    "tokens of the head, tied": {"trainable_token_indices": {HEAD: [31, 20]}, "ensure_weight_tying": True},
    "tokens of both": {"trainable_token_indices": {EMBED: [20, 42], HEAD: [31]}},
    "tokens, on the head": {"target_modules": ["q_proj", HEAD], "trainable_token_indices": [20, 42, 7]},
    "more tokens": {"tokens": 5},
    "more tokens, embeddings in full": {"tokens": 5, "modules_to_save": [EMBED]},
    "more tokens, embeddings in full, tied": {"tokens": 5, "modules_to_save": [EMBED], "ensure_weight_tying": True},
    "more tokens, on both": {"tokens": 5, "target_modules": ["q_proj", EMBED, HEAD]},
    "more tokens, rows": {"tokens": 5, "trainable_token_indices": [20, 266]},
    "fewer tokens, both in full": {"tokens": -2, "modules_to_save": [EMBED, HEAD]},
}
QUICK = [
    *((shape, True) for shape in ("head in full", "both in full, tied", "on both", "on both, tied", "on both, dora")),
    *((shape, True) for shape in ("tokens", "tokens of both", "more tokens, embeddings in full", "more tokens, rows")),
    *(("fewer tokens, both in full", True), ("on both", False), ("more tokens, rows", False)),
]
"""The others have parts that are each in one of these; they are tried by the exhaustive tests."""


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS, attention_mask=torch.ones_like(IDS), use_cache=False).logits


@pytest.fixture(scope="session")
def bases(checkpoints, tmp_path_factory):
    """A model by whether its embeddings and head are one matrix."""
    untied = tmp_path_factory.mktemp("底座") / "untied"
    lm = AutoModelForCausalLM.from_pretrained(checkpoints["qwen3"])
    lm.config.tie_word_embeddings = False
    lm.lm_head.weight = torch.nn.Parameter(lm.lm_head.weight.detach().flip(1))
    lm.save_pretrained(untied)
    AutoTokenizer.from_pretrained(checkpoints["qwen3"]).save_pretrained(untied)
    return {True: checkpoints["qwen3"], False: untied}


@pytest.fixture
def made(bases, tmp_path):
    """``made(shape, tied)`` is a folder that PEFT wrote, and its model."""

    def make(shape, tied=True):
        settings = {"target_modules": ["q_proj"]} | SHAPES[shape]
        more = settings.pop("tokens", 0)
        lm = AutoModelForCausalLM.from_pretrained(bases[tied])
        if more:
            lm.resize_token_embeddings(lm.config.vocab_size + more, mean_resizing=False)
        model = get_peft_model(lm, LoraConfig(r=4, task_type="CAUSAL_LM", **settings))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
        folder = tmp_path / "适配器"
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(bases[tied]).save_pretrained(folder)
        return folder, model

    return make


@pytest.mark.parametrize(("shape", "tied"), pairs_often(SHAPES, (True, False), QUICK))
def test_the_logits_are_those_of_peft_and_stay_when_merged(made, heedful, tmp_path, shape, tied):
    folder, model = made(shape, tied)
    theirs = logits(model)
    loaded = load_causal_lm(str(folder))
    torch.testing.assert_close(logits(loaded), theirs, rtol=0, atol=1e-5)
    is_tied = loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert (load_shape(str(folder)).head == 0) == is_tied, "what `heedful plan` counts"
    if shape.startswith(("on the head", "tokens of both", "more tokens, on")):  # others are saved in the same way
        assert heedful("merge", "--adapter", folder, "--output", tmp_path / "merged").status == 0
    else:
        loaded.save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), theirs, rtol=0, atol=1e-5)
    one_matrix = merged.lm_head.weight is merged.model.embed_tokens.weight
    assert one_matrix == merged.config.tie_word_embeddings
    if "tied" in shape and not shape.startswith("tokens"):
        assert one_matrix == tied


@pytest.mark.parametrize("shape", ["on both", "tokens"])
def test_a_reward_model_starts_from_the_same_trunk(made, shape):
    folder, model = made(shape)
    reward = load_reward_model(
        str(folder), load_tokenizer(str(folder)), device=torch.device("cpu"), compute_dtype=torch.float32, seed=0
    )
    with torch.no_grad():
        theirs = model.get_base_model().model(input_ids=IDS).last_hidden_state
        ours = reward.classifier.base_model(input_ids=IDS).last_hidden_state
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_adapters_on_adapters_that_untied_their_base(made, tmp_path):
    """The second ones were trained on the merged model, as heedful trains them."""
    folder, _ = made("on the head")
    lm = copy.deepcopy(load_causal_lm(str(folder)))
    model = get_peft_model(lm, LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["v_proj", EMBED]))
    torch.nn.init.normal_(model.get_input_embeddings().lora_embedding_B["default"], std=0.15)
    model.peft_config["default"].base_model_name_or_path = str(folder)
    model.save_pretrained(tmp_path / "second")
    torch.testing.assert_close(logits(load_causal_lm(str(tmp_path / "second"))), logits(model), rtol=0, atol=1e-5)


def test_tying_that_peft_left_out(tiny, tmp_path):
    """PEFT does not know GPT-2's ``wte`` as embeddings: in spite of ``ensure_weight_tying``, its head stays the base's."""
    lm = AutoModelForCausalLM.from_pretrained(tiny("gpt2"))
    settings = {"target_modules": ["c_attn"], "modules_to_save": ["wte"], "ensure_weight_tying": True}
    model = get_peft_model(lm, LoraConfig(r=4, task_type="CAUSAL_LM", fan_in_fan_out=True, **settings))
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.15)
    model.save_pretrained(tmp_path / "适配器")
    torch.testing.assert_close(logits(load_causal_lm(str(tmp_path / "适配器"))), logits(model), rtol=0, atol=1e-5)


def test_new_tokens_without_rows_for_the_head(made):
    folder, _ = made("more tokens, embeddings in full")
    path = folder / "adapter_model.safetensors"
    save_file(
        {name: tensor for name, tensor in load_file(path).items() if HEAD not in name and "orig" not in name}, path
    )
    with pytest.raises(
        CheckpointError, match=r"269 tokens but their base has 264, .* lacks rows of lm_head .*save the resized base"
    ):
        load_causal_lm(str(folder))


def test_tokens_that_the_model_does_not_have(made):
    folder, _ = made("tokens")
    path = folder / "adapter_config.json"
    for ids in ([20, 999, 7], [20, -1, 7], ["a", 3, 7], {"wte": [20, 42, 7]}, 5):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"trainable_token_indices": ids}), encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"indices is .* tokens of model.embed_tokens, from 0 to 263"):
            load_causal_lm(str(folder))
