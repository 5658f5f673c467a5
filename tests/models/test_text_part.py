"""Of a checkpoint that also reads images, the text model is loaded where transformers has a class for it."""

import warnings

import pytest
import torch
import transformers

from heedful import CheckpointError
from heedful.kernels.packing import hidden_states
from heedful.models import byte_tokenizer, load_causal_lm, load_reward_model, load_trunk

TEXT = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 96, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 1,
}  # fmt: skip
IMAGES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
DEEP = {
    "hidden_size": 32, "intermediate_size": 64, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "patch_size": 14,
    "num_position_embeddings": 4, "deepstack_visual_indexes": [0],
}  # fmt: skip
ROTATION = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
CONFIGS = {
    "llava": lambda: transformers.LlavaConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", **IMAGES},
        image_token_index=260,
    ),
    "mistral3": lambda: transformers.Mistral3Config(
        text_config={"model_type": "mistral", **TEXT},
        vision_config={"model_type": "pixtral", **IMAGES},
        image_token_index=260,
    ),
    "gemma3": lambda: transformers.Gemma3Config(
        text_config={**TEXT, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config=IMAGES,
        mm_tokens_per_image=4,
        image_token_index=260,
    ),
    "qwen3_5": lambda: transformers.Qwen3_5Config(
        text_config={
            **TEXT, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        },
        vision_config=DEEP,
        image_token_id=260,
    ),
    "qwen3_vl": lambda: transformers.Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": ROTATION}, vision_config=DEEP, image_token_id=260
    ),
}  # fmt: skip
IDS = byte_tokenizer()("今天天气怎么样？", return_tensors="pt").input_ids


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """``seeing(kind)``: the folder of a tiny model with images, and its logits of a text."""
    root, made = tmp_path_factory.mktemp("图像"), {}

    def folder(kind):
        if kind not in made:
            torch.manual_seed(5)
            model = transformers.AutoModelForImageTextToText.from_config(CONFIGS[kind]()).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(5) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
                logits = model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits
            model.save_pretrained(root / kind)
            byte_tokenizer().save_pretrained(root / kind)
            made[kind] = str(root / kind), logits
        return made[kind]

    return folder


@pytest.mark.parametrize(("kind", "text"), [("llava", "llama"), ("mistral3", "mistral")])
def test_the_text_model_is_loaded_and_the_user_is_told(seeing, tmp_path, kind, text):
    folder, expected = seeing(kind)
    with pytest.warns(
        UserWarning, match=rf"only the text part \({text}\) of this {kind} model is loaded, and saved"
    ) as told:
        lm = load_causal_lm(folder)
    assert len(told) == 1
    assert lm.config.model_type == text
    lm.save_pretrained(tmp_path)
    for model in (lm, transformers.AutoModelForCausalLM.from_pretrained(tmp_path)):
        torch.testing.assert_close(model.eval()(input_ids=IDS).logits, expected)


def test_so_are_its_trunk_and_a_fresh_reward_model(seeing):
    folder, expected = seeing("llava")
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        trunk, lm = load_trunk(folder).eval(), load_causal_lm(folder).eval()
        reward_model = load_reward_model(
            folder, byte_tokenizer(), device=torch.device("cpu"), compute_dtype=torch.float32, seed=1
        )
    for body in (trunk, reward_model.classifier.base_model.eval()):
        torch.testing.assert_close(lm.get_output_embeddings()(hidden_states(body, IDS)), expected)
    assert reward_model([{"input_ids": IDS[0].tolist()}]).shape == (1,)


@pytest.mark.parametrize(("kind", "loaded"), [("gemma3", "gemma3"), ("qwen3_5", "qwen3_5_text")])
def test_what_transformers_loads_by_itself_is_left_to_it(seeing, kind, loaded):
    folder, expected = seeing(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm = load_causal_lm(folder).eval()
    assert lm.config.model_type == loaded
    torch.testing.assert_close(lm(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits, expected)


def test_without_a_class_for_its_text_it_is_refused(seeing):
    folder, _ = seeing("qwen3_vl")
    for load in (load_causal_lm, load_trunk):
        with pytest.raises(
            CheckpointError, match=r"a multimodal qwen3_vl model.*no causal language model for its text part \(qwen3_vl"
        ):
            load(folder)
