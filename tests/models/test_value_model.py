"""A value model of its own: values of the state before each token, equal to those of single unpadded rows."""

import pytest
import torch
from transformers import AutoModel

from architectures import one_decoder
from heedful import CheckpointError
from heedful.data.batches import collate
from heedful.models import byte_tokenizer, load_value_model, save_value_model
from heedful.models.save import VALUE_HEAD

CPU = torch.device("cpu")
TOKENIZER = byte_tokenizer()
PROMPTS = [TOKENIZER(text).input_ids for text in ("你好", "今天天气怎么样？", "a")]
RESPONSES = [[*TOKENIZER(text).input_ids, 1] for text in ("很好！", "晴", "🙂 ok, 当然")]


def load(folder):
    model = load_value_model(str(folder), device=CPU, compute_dtype=torch.float32)
    torch.nn.init.normal_(model.value_head.weight)
    torch.nn.init.normal_(model.value_head.bias)
    return model


def run(model, batch):
    return model(batch.ids, batch.attention_mask, batch.response_mask)


def check_equals_single_rows(model, trunk, *, pad_id, tolerance):
    """The head, applied by hand to what plain transformers says of each row without padding or mask."""
    with torch.no_grad():
        values = run(model, collate(PROMPTS, RESPONSES, pad_id=pad_id))
        for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            states = trunk(input_ids=torch.tensor([prompt + response])).last_hidden_state[0, len(prompt) - 1 : -1]
            expected = states @ model.value_head.weight[0] + model.value_head.bias
            torch.testing.assert_close(values[row, : len(response)], expected, rtol=tolerance, atol=tolerance)
            assert not values[row, len(response) :].any()


@pytest.mark.parametrize(("decoder", "pad_id"), [("gpt2", 0), ("qwen3", 1)], indirect=["decoder"])
def test_a_padded_batch_equals_plain_transformers_row_by_row(decoder, pad_id):
    trunk = AutoModel.from_pretrained(decoder, dtype=torch.float32)
    check_equals_single_rows(load(decoder), trunk, pad_id=pad_id, tolerance=1e-5)


@one_decoder
def test_values_start_at_zero_and_every_weight_learns(decoder):
    model = load_value_model(decoder, device=CPU, compute_dtype=torch.float32)
    batch = collate(PROMPTS, RESPONSES, pad_id=0)
    assert not run(model, batch).any()
    torch.nn.init.normal_(model.value_head.weight)
    run(model, batch).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert "k_proj.bias" in name or parameter.grad.any(), name


@one_decoder
def test_half_precision_gives_float32_values(decoder):
    model = load(decoder)
    batch = collate(PROMPTS, RESPONSES, pad_id=0)
    exact = run(model, batch)
    model.compute_dtype = torch.bfloat16
    rounded = run(model, batch)
    assert rounded.dtype is torch.float32
    assert not torch.equal(rounded, exact)
    # bfloat16 has 8 bits; the head adds up 32 hidden states of size 1.
    torch.testing.assert_close(rounded, exact, rtol=0.1, atol=0.6)


def test_an_encoder_is_refused(checkpoints):
    """Its values would know the rest of the response."""
    with pytest.raises(CheckpointError, match=r"DebertaV2Model looks at later tokens; a value model must be causal"):
        load_value_model(str(checkpoints["deberta-v2"]), device=CPU, compute_dtype=torch.float32)


@one_decoder
def test_a_saved_value_model_reloads_with_trunk_and_head(decoder, tmp_path):
    model = load(decoder)
    with torch.no_grad():
        model.trunk.get_input_embeddings().weight.add_(0.01)
    save_value_model(model, TOKENIZER, tmp_path)
    again = load_value_model(str(tmp_path), device=CPU, compute_dtype=torch.float32)
    batch = collate(PROMPTS, RESPONSES, pad_id=0)
    assert torch.equal(run(again, batch), run(model, batch))
    assert (tmp_path / VALUE_HEAD).is_file()
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
