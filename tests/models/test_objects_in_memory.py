"""Models in memory: the kinds that are refused from a folder are refused as objects too."""

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

import heedful
from heedful.models import byte_tokenizer, load_policy

TOKENIZER = byte_tokenizer()
TEXT = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
ROPE = {
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    "bos_token_id": None,
}
VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 1}
BERT = {"vocab_size": len(TOKENIZER), "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
REFUSED = {
    "multimodal": (
        lambda: transformers.Qwen2VLForConditionalGeneration(
            transformers.Qwen2VLConfig(text_config=TEXT | ROPE, vision_config=VISION)
        ),
        "is a multimodal qwen2_vl model, and transformers has no causal language model for its text part",
    ),
    "encoder and decoder": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=264, d_model=32, d_kv=16, d_ff=32, num_layers=1)
        ),
        "T5",
    ),
    "encoder": (lambda: transformers.BertForMaskedLM(transformers.BertConfig(**BERT, num_attention_heads=2)), "Bert"),
    "reward model": (
        lambda: transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**TEXT, num_labels=1)),
        "is a reward model",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_object_gets_the_answer_of_its_folder(kind, tmp_path):
    make, said = REFUSED[kind]
    model = make()
    with pytest.raises(heedful.CheckpointError, match=said):
        heedful.Policy.from_pretrained(model, TOKENIZER, device="cpu", dtype="float32")
    model.save_pretrained(tmp_path / "模型")
    TOKENIZER.save_pretrained(tmp_path / "模型")
    with pytest.raises(heedful.CheckpointError):
        load_policy(str(tmp_path / "模型"), device=torch.device("cpu"), compute_dtype=torch.float32)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks for an older name of gradient checkpointing
def test_wrapped_by_peft():
    wrapped = get_peft_model(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)), LoraConfig(target_modules=["q_proj"])
    )
    with pytest.raises(heedful.CheckpointError, match=r"is a PeftModel, .* model\.merge_and_unload"):
        heedful.Policy.from_pretrained(wrapped, TOKENIZER)
    merged = wrapped.merge_and_unload()
    assert heedful.Policy.from_pretrained(merged, TOKENIZER, device="cpu", dtype="float32").lm is merged


def test_labels_in_a_config_do_not_make_a_reward_model():
    policy = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, num_labels=3))
    assert heedful.Policy.from_pretrained(policy, TOKENIZER, device="cpu", dtype="float32").lm is policy


def unused_rows(*, likely):
    """A model with 200 more embedding rows than its tokenizer has tokens."""
    lm = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT | {"vocab_size": len(TOKENIZER) + 200}))
    with torch.no_grad():
        lm.lm_head.weight[len(TOKENIZER) :] *= 20 if likely else 0
        lm.lm_head.weight[: len(TOKENIZER)] *= 1 if likely else 300
    return heedful.Policy.from_pretrained(lm, TOKENIZER, device="cpu", dtype="float32")


@pytest.mark.parametrize("options", [{"top_k": 50}, {"temperature": 0.0}], ids=str)
def test_rows_beyond_the_tokenizer_are_never_sampled(options):
    """A reward would see no text. Log-probs stay those of all rows, for the sampler as for every pass."""
    policy, tokens = unused_rows(likely=True), len(TOKENIZER)
    with pytest.warns(
        UserWarning, match=rf"200 of the model's {tokens + 200} embedding rows have no token .*resize_token"
    ):
        engine = heedful.LocalEngine(policy, max_new_tokens=8, **options)
    batch = engine.generate(["你好"] * 16)
    sampled = batch.ids[:, -batch.mask.shape[1] :][batch.mask]
    assert len(sampled) >= 16
    assert int(sampled.max()) < tokens
    if "temperature" not in options:  # the log-probs of greedy responses are at temperature 1
        torch.testing.assert_close(heedful.logprobs(policy, batch), batch.logprobs, rtol=1e-4, atol=1e-5)


def test_unlikely_rows_beyond_the_tokenizer_need_no_word():
    """As in models whose embeddings are padded to a round number."""
    engine = heedful.LocalEngine(unused_rows(likely=False), max_new_tokens=4)
    assert len(engine.generate(["你好"]).completions) == 1
