"""The policy's numbers are those of the plain language model, token by token, whatever the padding and the chunks."""

import json

import pytest
import torch
import transformers

from architectures import one_decoder
from heedful import CheckpointError, core
from heedful.data.batches import collate, collate_padding_behind
from heedful.models import Policy, byte_tokenizer, freeze, load_policy, save_policy
from heedful.models.save import VALUE_HEAD

CPU = torch.device("cpu")
TOKENIZER = byte_tokenizer()
PROMPTS = [TOKENIZER(text).input_ids for text in ("你好", "今天天气怎么样？", "a", "Hi!")]
RESPONSES = [[*TOKENIZER(text).input_ids, 1] for text in ("很好！", "晴", "🙂 ok, 当然", "")]
TIGHT = {"rtol": 1e-5, "atol": 1e-5}


def load(folder, **options):
    return load_policy(folder, device=CPU, compute_dtype=options.pop("compute_dtype", torch.float32), **options)


def run(policy, batch, **options):
    return policy(batch.ids, batch.attention_mask, batch.response_mask, **options)


def with_values(folder):
    policy = load(folder, with_value_head=True)
    torch.nn.init.normal_(policy.value_head.weight)
    torch.nn.init.normal_(policy.value_head.bias)
    torch.nn.init.normal_(policy.value_head.out.weight)
    return policy


def single_rows(lm, temperature):
    """Log-probs and entropy of each response from the logits of one unpadded row: softmax written out in float64."""
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        logits = lm(input_ids=torch.tensor([prompt + response])).logits[0].double() / temperature
        logp = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        yield logp[range(len(response)), response], -(logp.exp() * logp).sum(-1)


def check_equals_single_rows(policy, lm, *, temperature, pad_id, tolerance):
    batch = collate(PROMPTS, RESPONSES, pad_id=pad_id)
    with torch.no_grad():
        out = run(policy, batch, temperature=temperature, with_entropy=True)
        for row, (logprobs, entropy) in enumerate(single_rows(lm, temperature)):
            n = len(logprobs)
            torch.testing.assert_close(out.logprobs[row, :n].double(), logprobs, **tolerance)
            torch.testing.assert_close(out.entropy[row, :n].double(), entropy, **tolerance)
            assert not out.logprobs[row, n:].any()
            assert not out.entropy[row, n:].any()


@pytest.mark.parametrize(("temperature", "pad_id"), [(1.0, 0), (0.7, 1)])
def test_a_padded_batch_equals_plain_transformers_row_by_row(decoder, temperature, pad_id):
    """Also where the padding is the end-of-sequence token that every response ends with (id 1)."""
    lm = transformers.AutoModelForCausalLM.from_pretrained(decoder, dtype=torch.float32)
    check_equals_single_rows(load(decoder), lm, temperature=temperature, pad_id=pad_id, tolerance=TIGHT)


def test_the_same_in_float64(checkpoints):
    """No rounding to hide behind. Only gpt2 computes in float64 throughout."""
    lm = transformers.AutoModelForCausalLM.from_pretrained(checkpoints["gpt2"], dtype=torch.float64)
    tolerance = {"rtol": 1e-10, "atol": 1e-10}
    check_equals_single_rows(Policy(lm), lm, temperature=0.7, pad_id=1, tolerance=tolerance)


@one_decoder
def test_gradients_are_finite_with_padding(decoder):
    policy = with_values(decoder)
    out = run(policy, collate(PROMPTS, RESPONSES, pad_id=0), with_entropy=True)
    (out.logprobs.sum() + out.entropy.sum() + out.values.sum()).backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # A key's bias moves all scores of a query alike; positions that nobody reached have no gradient either.
        assert parameter.grad.abs().max() > (0 if "k_proj.bias" not in name else -1), name


def test_entropy_is_zeros_unless_asked_for(checkpoints):
    assert not run(load(checkpoints["gpt2"]), collate(PROMPTS, RESPONSES, pad_id=0)).entropy.any()


@one_decoder
def test_a_head_of_another_kind_gives_the_same(decoder):
    """Quantised heads and those with adapters are called; a plain one is read. Numbers and gradients agree."""

    class Head(torch.nn.Linear):
        pass

    batch = collate(PROMPTS, RESPONSES, pad_id=0)
    results = []
    for kind in (torch.nn.Linear, Head):
        policy = load(decoder)
        policy.lm.get_output_embeddings().__class__ = kind
        out = run(policy, batch, temperature=0.7, with_entropy=True)
        (out.logprobs.sum() + out.entropy.square().sum()).backward()
        results.append([out.logprobs.detach(), out.entropy.detach(), *(p.grad for p in policy.parameters())])
        assert not run(policy, batch).entropy.any()
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5 * float(y.abs().max()))


@one_decoder
def test_values_are_the_head_on_the_trunks_last_hidden_state(decoder):
    """Against the hidden states that plain transformers reports for single rows."""
    policy = with_values(decoder)
    torch.nn.init.zeros_(policy.value_head.out.weight)  # its other part is tested in test_value_head.py
    values = run(policy, collate(PROMPTS, RESPONSES, pad_id=0)).values
    lm = transformers.AutoModelForCausalLM.from_pretrained(decoder, dtype=torch.float32)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        states = lm(input_ids=torch.tensor([prompt + response]), output_hidden_states=True).hidden_states[-1][0]
        expected = states[len(prompt) - 1 : -1] @ policy.value_head.weight[0] + policy.value_head.bias
        torch.testing.assert_close(values[row, : len(response)], expected, **TIGHT)
        assert not values[row, len(response) :].any()


def test_values_start_at_zero_and_are_absent_without_a_head(checkpoints):
    batch = collate(PROMPTS, RESPONSES, pad_id=0)
    assert not run(load(checkpoints["llama"], with_value_head=True), batch).values.any()
    assert run(load(checkpoints["llama"]), batch).values is None


def test_dropout_and_mode_are_left_as_they_are(checkpoints):
    """The probe for rescaled logits at the start does not switch a model in training to evaluation."""
    lm = transformers.AutoModelForCausalLM.from_pretrained(checkpoints["gpt2"]).train()
    assert Policy(lm).lm.training


@one_decoder
def test_a_saved_policy_reloads_and_is_a_plain_folder(decoder, tmp_path):
    policy = with_values(decoder)
    with torch.no_grad():
        policy.lm.get_input_embeddings().weight.add_(0.01)
    save_policy(policy, transformers.AutoTokenizer.from_pretrained(decoder), tmp_path, stop_ids=(1, 3))
    batch = collate(PROMPTS, RESPONSES, pad_id=0)
    out, again = run(policy, batch), run(load(tmp_path, with_value_head=True), batch)
    assert torch.equal(again.logprobs, out.logprobs)
    assert torch.equal(again.values, out.values)
    lm, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    check_equals_single_rows(policy, lm, temperature=1.0, pad_id=0, tolerance=TIGHT)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("你好").input_ids == TOKENIZER("你好").input_ids


def test_the_value_head_lies_in_a_folder_of_its_own(checkpoints, tmp_path):
    """Other tools read every safetensors file beside config.json as weights of the language model."""
    policy = load(checkpoints["qwen3"], with_value_head=True)
    save_policy(policy, TOKENIZER, tmp_path, stop_ids=(1,))
    assert tmp_path / VALUE_HEAD == tmp_path / "value_head" / "value_head.safetensors"
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.safetensors")) == [
        "model.safetensors",
        "value_head/value_head.safetensors",
    ]
    save_policy(load(checkpoints["qwen3"]), TOKENIZER, tmp_path / "without", stop_ids=(1,))
    assert not (tmp_path / "without" / "value_head").exists()


def test_the_stop_tokens_are_saved(checkpoints, tmp_path):
    """So that generation elsewhere ends where it ended here."""
    save_policy(load(checkpoints["llama"]), TOKENIZER, tmp_path, stop_ids=(2, 7, 9))
    settings = json.loads((tmp_path / "generation_config.json").read_text(encoding="utf-8"))
    assert settings["eos_token_id"] == load(tmp_path).lm.generation_config.eos_token_id == [2, 7, 9]
    lm = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        following = int(lm(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].argmax())
    save_policy(load(checkpoints["llama"]), TOKENIZER, tmp_path, stop_ids=(following,))
    written = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).generate(
        torch.tensor([PROMPTS[0]]), do_sample=False, max_new_tokens=5, pad_token_id=0
    )
    assert written[0, len(PROMPTS[0]) :].tolist() == [following]


def test_a_value_head_of_another_width_is_refused(checkpoints, tmp_path):
    policy = load(checkpoints["gpt2"], with_value_head=True)
    policy.value_head = torch.nn.Linear(8, 1)
    save_policy(policy, TOKENIZER, tmp_path, stop_ids=(1,))
    with pytest.raises(CheckpointError, match=r"value_head.safetensors: has .*belongs to another model"):
        load(tmp_path, with_value_head=True)


SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
RESCALING = {
    "capped": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SHAPE, head_dim=16, query_pre_attn_scalar=16)
    ),
    "scaled": lambda: transformers.CohereForCausalLM(transformers.CohereConfig(**SHAPE)),
    "divided": lambda: transformers.GraniteForCausalLM(transformers.GraniteConfig(**SHAPE, logits_scaling=4.0)),
}


@pytest.mark.parametrize(
    ("kind", "expected", "size"),
    [("capped", (1, 30), 1), ("capped", (1, 30), 500), ("scaled", (0.0625, None), 1), ("divided", (0.25, None), 1)],
)
def test_scales_and_caps_after_the_head_are_part_of_the_log_probs(kind, expected, size):
    """Numbers and gradients, at a temperature; with fresh weights, and with such large ones that the cap flattens."""
    lm = RESCALING[kind]().eval()
    with torch.no_grad():
        lm.get_output_embeddings().weight.mul_(size)
    policy, batch = Policy(lm), collate_padding_behind(PROMPTS, RESPONSES, pad_id=0)
    assert policy.logit_map == expected
    outputs = policy(batch.ids, batch.attention_mask, batch.response_mask, temperature=0.7, with_entropy=True)
    where = torch.nn.functional.pad(batch.response_mask, (1, 0))
    found = torch.autograd.grad(outputs.logprobs.sum() + outputs.entropy.sum(), [*lm.parameters()])
    logits = lm(input_ids=batch.ids, attention_mask=batch.attention_mask.long()).logits[:, :-1][where[:, 1:]]
    logprobs = core.token_logprobs(logits, batch.ids[where], temperature=0.7)
    entropy = core.entropy(logits, temperature=0.7)
    torch.testing.assert_close(outputs.logprobs[batch.response_mask], logprobs, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(outputs.entropy[batch.response_mask], entropy, rtol=1e-5, atol=1e-4)
    other = torch.autograd.grad(logprobs.sum() + entropy.sum(), [*lm.parameters()])
    for x, y in zip(found, other, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4 * float(y.abs().max()) + 1e-12)


@pytest.mark.parametrize("kind", ["capped", "divided"])
def test_a_head_that_is_no_plain_layer_has_them_too(kind):
    """As with adapters or four bits."""
    lm = RESCALING[kind]().eval()
    batch = collate_padding_behind(PROMPTS, RESPONSES, pad_id=0)
    plain = Policy(lm)(batch.ids, batch.attention_mask, batch.response_mask, with_entropy=True)

    class Head(torch.nn.Linear):
        pass

    lm.get_output_embeddings().__class__ = Head
    other = Policy(lm)(batch.ids, batch.attention_mask, batch.response_mask, with_entropy=True)
    torch.testing.assert_close(other.logprobs, plain.logprobs)
    torch.testing.assert_close(other.entropy, plain.entropy)


class Shifted(transformers.LlamaForCausalLM):
    """Adds to its logits after the head."""

    def forward(self, **given):
        output = super().forward(**given)
        output.logits = output.logits + 0.5
        return output


OTHERWISE = {
    "shifted": lambda: Shifted(transformers.LlamaConfig(**SHAPE)),
    "a head of two layers": lambda: transformers.BertLMHeadModel(transformers.BertConfig(**SHAPE, is_decoder=True)),
    "without bias": lambda: transformers.ModernBertDecoderForCausalLM(
        transformers.ModernBertDecoderConfig(**SHAPE, cls_token_id=2, sep_token_id=3, decoder_bias=False)
    ),
}


@pytest.mark.parametrize("kind", OTHERWISE)
def test_models_that_make_their_logits_in_another_way_are_refused(kind):
    with pytest.raises(CheckpointError, match="does not compute its logits by an output head"):
        Policy(OTHERWISE[kind]())


@one_decoder
def test_half_precision_computes_in_bfloat16_and_gives_float32(decoder):
    """Autocast rounds (so the numbers differ), the outputs and their sums do not."""
    batch = collate(PROMPTS, RESPONSES, pad_id=0)
    policy = with_values(decoder)
    exact = run(policy, batch, with_entropy=True)
    policy.compute_dtype = torch.bfloat16
    rounded = run(policy, batch, with_entropy=True)
    for x, y in zip(rounded[:3], exact[:3], strict=True):
        assert x.dtype is torch.float32
        assert not torch.equal(x, y)
        # bfloat16 has 8 bits; logits of this model are of size 10, through two layers.
        torch.testing.assert_close(x, y, rtol=0.1, atol=0.6)
    assert all(p.dtype is torch.float32 for p in policy.parameters())


def test_a_frozen_policy_learns_nothing(checkpoints):
    policy = freeze(load(checkpoints["gpt2"], with_value_head=True).train())
    assert not policy.training
    assert not run(policy, collate(PROMPTS, RESPONSES, pad_id=0)).logprobs.requires_grad


def test_the_end_of_sequence_embedding_learns_where_it_is_also_the_padding(tmp_path, checkpoints):
    """transformers freezes the embedding of the padding token, and many models pad with EOS."""
    lm = transformers.AutoModelForCausalLM.from_pretrained(checkpoints["llama"])
    lm.config.pad_token_id = 1
    lm.save_pretrained(tmp_path)
    policy = load(tmp_path, with_value_head=True)
    torch.nn.init.normal_(policy.value_head.weight)
    run(policy, collate([[1, 5]], [[1, 6]], pad_id=1)).values.sum().backward()
    assert policy.lm.get_input_embeddings().weight.grad[1].any()
