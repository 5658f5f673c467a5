"""Packed rows: the states that each text has by itself, without padding."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers

from architectures import one_decoder
from heedful.data.batches import collate, collate_padding_behind
from heedful.devices import CAPABILITIES
from heedful.kernels.attention import Segments, use_attention
from heedful.kernels.packing import (
    MOST_REAL,
    can_pack,
    hidden_states,
    is_worth_packing,
    packed_states,
    response_tokens,
    token_states,
)
from heedful.models import RewardModel, load_policy
from heedful.models.heads import checkpoint_layers
from operations import operations_of

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14], [15]]
RESPONSES = [[20, 21, 22, 23, 24, 25], [26, 27], [28], [29, 30]]
TEXTS = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
TOKENS = [token for text in TEXTS for token in text]
LENGTHS = [13, 3, 3, 3]


def load(folder, dtype=torch.float32, **options):
    return load_policy(str(folder), device=CPU, compute_dtype=dtype, **options)


def read_rows(module, seen):
    """The shapes of ids that a trunk is called with, from now on."""

    def note(_module, arguments, given):
        seen.append(tuple((arguments[0] if arguments else given["input_ids"]).shape))

    return module.register_forward_pre_hook(note, with_kwargs=True)


def test_response_tokens_are_told_among_the_real_ones_with_a_hole_too():
    attention = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    responses = torch.tensor([[True, False, True], [True, False, False]])
    found = response_tokens(attention, responses)
    assert found.tolist() == [False, True, False, True, False, False, False, True]


def test_it_is_worth_it_where_a_tenth_would_be_padding():
    assert MOST_REAL == 0.9
    assert [lengths for lengths in ([10, 9], [10, 8], [9], [100, 1, 1], [100, 0]) if is_worth_packing(lengths)] == [
        [10, 8],
        [100, 1, 1],
    ]


def test_packed_texts_have_the_states_that_each_has_alone(decoder):
    """Texts of one length stand side by side, so that a mistake in their order shows."""
    trunk = load(decoder).lm.base_model
    assert can_pack(trunk)
    alone = [hidden_states(trunk, torch.tensor([text]))[0] for text in TEXTS]
    together = packed_states(trunk, torch.tensor(TOKENS), LENGTHS)
    torch.testing.assert_close(together, torch.cat(alone))


@one_decoder
@pytest.mark.parametrize("make", [collate, collate_padding_behind])
def test_a_batch_with_much_padding_is_read_as_one_row(decoder, make):
    trunk = load(decoder).lm.base_model
    batch, seen = make(PROMPTS, RESPONSES, pad_id=0), []
    can_pack(trunk)
    with read_rows(trunk, seen):
        token_states(trunk, batch.ids, batch.attention_mask)
        even = collate([[1, 2], [3]], [[4], [5, 6]], pad_id=0)
        token_states(trunk, even.ids, even.attention_mask)
    assert seen == [(1, 22), (2, 3)]


@pytest.mark.parametrize(("decoder", "checkpointing"), [("gpt2", False), ("qwen3", True)], indirect=["decoder"])
def test_packed_and_padded_rows_have_the_same_outputs_and_gradients(decoder, monkeypatch, checkpointing):
    packed, padded = load(decoder, with_value_head=True).train(), load(decoder, with_value_head=True).train()
    batch = collate(PROMPTS, RESPONSES, pad_id=0)
    torch.nn.init.constant_(packed.value_head.weight, 0.1)
    torch.nn.init.constant_(packed.value_head.out.weight, 0.1)
    padded.value_head.load_state_dict(packed.value_head.state_dict())
    for policy in (packed, padded):
        for module in policy.modules():
            module.p = 0.0 if isinstance(module, torch.nn.Dropout) else getattr(module, "p", None)
        if checkpointing:
            checkpoint_layers(policy.lm)
    outputs = []
    for policy in (packed, padded):
        if policy is padded:
            monkeypatch.setattr("heedful.kernels.packing.MOST_REAL", 0.0)
        result = policy(batch.ids, batch.attention_mask, batch.response_mask, with_entropy=True)
        (result.logprobs.sum() + result.entropy.sum() + result.values.sum()).backward()
        outputs.append(result[:3])
    for x, y in zip(*outputs, strict=True):
        torch.testing.assert_close(x, y)
    for (name, x), y in zip(packed.named_parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4, msg=name)


@one_decoder
def test_a_row_is_filled_up_where_products_are_compiled_for_each_length(decoder):
    """Up to 64 tokens, by texts no longer than the longest: a model may not have more positions. Elsewhere it is not."""
    trunk, lengths = load(decoder).lm.base_model, []

    def note(_module, _arguments, given):
        lengths.append(given["segments"].lengths)

    with trunk.register_forward_pre_hook(note, with_kwargs=True):
        plain = packed_states(trunk, torch.tensor(TOKENS), LENGTHS)
        with torch.autocast("cpu", torch.bfloat16):
            filled = packed_states(trunk, torch.tensor(TOKENS), LENGTHS)
            packed_states(trunk, torch.tensor(TOKENS * 32), LENGTHS * 32)
    assert lengths == [LENGTHS, [*LENGTHS, 13, 13, 13, 3], LENGTHS * 32]
    assert filled.shape == plain.shape
    torch.testing.assert_close(filled.float(), plain, rtol=0.05, atol=0.05 * float(plain.detach().abs().max()))


@one_decoder
def test_half_precision_has_the_gradients_of_padded_rows(decoder, monkeypatch):
    """What fills a row up and what fills the head's products up adds nothing to them."""
    batch, gradients, seen = collate(PROMPTS, RESPONSES, pad_id=0), [], []
    for most_real in (0.9, 0.0):
        monkeypatch.setattr("heedful.kernels.packing.MOST_REAL", most_real)
        policy = load(decoder, torch.bfloat16)
        can_pack(policy.lm.base_model)
        with read_rows(policy.lm.base_model, seen):
            result = policy(batch.ids, batch.attention_mask, batch.response_mask, with_entropy=True)
        (result.logprobs.sum() + result.entropy.sum()).backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters()})
        monkeypatch.setattr("heedful.models.policy.filling", lambda *_, **__: 0)
    assert seen == [(1, 64), (4, 13)]
    for name, gradient in gradients[1].items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(gradients[0][name], gradient, rtol=2e-2, atol=2e-2 * largest, msg=name)


def kernel_of_211(
    query, key, value, edges, _edges, _max_q, _max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    """torch's attention for texts of any length, computed text by text, with the arguments that it has in torch 2.11."""
    assert window_size == (-1, 0)
    assert return_aux is None
    texts = []
    for start, end in edges.unfold(0, 2, 1).tolist():
        q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
        texts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(0, 1))
    return torch.cat(texts)


def kernel_that_shares(query, key, value, *arguments, enable_gqa=False, **options):
    """The same with the argument of later versions."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    groups = query.shape[1] // key.shape[1]
    return kernel_of_211(query, *(x.repeat_interleave(groups, dim=1) for x in (key, value)), *arguments, **options)


def mistral(**options):
    config = {"num_attention_heads": 4, "num_key_value_heads": 4, "sliding_window": None} | options
    return use_attention(
        transformers.MistralModel(
            transformers.MistralConfig(
                vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2, **config
            )
        )
    )


@pytest.mark.parametrize(("kernel", "kv_heads"), [(kernel_of_211, 2), (kernel_that_shares, 2), (kernel_that_shares, 4)])
def test_the_kernel_of_every_torch_packs_shared_key_heads(monkeypatch, kernel, kv_heads):
    """torch 2.11 wants a key head for each query head; an argument that it lacks must not turn packing off."""
    calls = []

    @functools.wraps(kernel)  # keeps its signature
    def counted(*arguments, **options):
        calls.append(options)
        return kernel(*arguments, **options)

    monkeypatch.setattr("heedful.kernels.attention.varlen_attn", counted)
    trunk = mistral(num_key_value_heads=kv_heads).bfloat16()
    expected = packed_states(trunk, torch.tensor(TOKENS), LENGTHS)
    assert not calls
    monkeypatch.setitem(CAPABILITIES, "cpu", replace(CAPABILITIES["cpu"], varlen_attention=True))
    assert can_pack(trunk)
    found = packed_states(trunk, torch.tensor(TOKENS), LENGTHS)
    assert len(calls) == 4  # two layers, in the trial and in the pass
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05 * float(expected.detach().abs().max()))


def test_a_kernel_that_fails_is_told(monkeypatch):
    """Padded batches are slower: without a word nobody would know why."""
    monkeypatch.setattr("heedful.kernels.attention.varlen_attn", lambda *_, other: None)
    monkeypatch.setitem(CAPABILITIES, "cpu", replace(CAPABILITIES["cpu"], varlen_attention=True))
    with pytest.warns(
        UserWarning, match="^MistralModel pads its batches, which is slower: the faster way fails with TypeError"
    ):
        assert not can_pack(mistral().bfloat16())


def test_a_window_that_slides_is_not_packed():
    """Its mask would be as large as the square of all tokens of the row."""
    assert can_pack(mistral())
    assert not can_pack(mistral(sliding_window=4))


def test_a_model_with_a_config_inside_its_config_can_be_tried():
    """As those for pictures and text have it."""
    text = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    config = transformers.Gemma3Config(
        text_config={**text, "num_key_value_heads": 1, "vocab_size": 40, "sliding_window": 8}
    )
    with torch.device("meta"):
        trunk = transformers.Gemma3Model(config)
    assert not can_pack(trunk)


def test_a_trunk_with_masks_of_its_own_is_padded():
    """Doge makes a mask of its own in every layer, also without padding."""
    config = transformers.DogeConfig(
        vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    trunk, batch = use_attention(transformers.DogeModel(config).eval()), collate(PROMPTS, RESPONSES, pad_id=0)
    assert not can_pack(trunk)
    alone = [hidden_states(trunk, torch.tensor([text]))[0] for text in TEXTS]
    torch.testing.assert_close(token_states(trunk, batch.ids, batch.attention_mask), torch.cat(alone))


@one_decoder
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("none left"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_memory_that_runs_out_while_trying_is_told(decoder, error):
    trunk = load(decoder).lm.base_model

    def fail(*_):
        raise error

    with trunk.register_forward_pre_hook(fail), pytest.raises(type(error)):
        can_pack(trunk)
    assert can_pack(trunk)


@one_decoder
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_what_attends_in_another_way_is_not_packed(decoder, implementation):
    trunk = load(decoder).lm.base_model
    trunk.set_attn_implementation(implementation)
    assert not can_pack(trunk)
    batch, seen = collate(PROMPTS, RESPONSES, pad_id=0), []
    token_states(trunk, batch.ids, batch.attention_mask)  # what is tried once per trunk is behind it
    with read_rows(trunk, seen):
        states = token_states(trunk, batch.ids, batch.attention_mask)
    assert seen == [(4, 13)]
    alone = [hidden_states(trunk, torch.tensor([text]))[0] for text in TEXTS]
    torch.testing.assert_close(states, torch.cat(alone))


@one_decoder
def test_a_trunk_that_mixes_tokens_outside_attention_is_not_packed(decoder):
    """Here: the mean of all states so far is added, which runs on from one text into the next."""
    trunk = load(decoder).lm.base_model

    def add_mean(_module, _given, output):
        output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.cumsum(dim=1)
        return output

    trunk.register_forward_hook(add_mean)
    assert not can_pack(trunk)


@one_decoder
def test_a_trunk_that_loses_the_lengths_is_not_packed(decoder):
    """Not even where nothing would show: here the layers add nothing to the embeddings."""
    trunk = load(decoder).lm.base_model
    for name, parameter in trunk.named_parameters():
        if parameter.ndim > 1 and "emb" not in name and "wte" not in name and "wpe" not in name:
            torch.nn.init.zeros_(parameter)
    trunk.register_forward_pre_hook(
        lambda _, args, given: (args, {name: value for name, value in given.items() if name != "segments"}),
        with_kwargs=True,
    )
    assert not can_pack(trunk)


def scored(folder, tmp_path, pad_id=0):
    """A reward model whose head is far from zero."""
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder)
    lm.config.pad_token_id = pad_id
    lm.save_pretrained(tmp_path)
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=1, dtype=torch.float32
    )
    torch.nn.init.constant_(classifier.score.weight, 0.3)
    return RewardModel(use_attention(classifier).eval(), compute_dtype=torch.float32)


@one_decoder
def test_scores_of_packed_rows_are_those_of_each(decoder, tmp_path):
    model = scored(decoder, tmp_path)
    rows, seen = [{"input_ids": text} for text in TEXTS], []
    alone = torch.cat([model([row]) for row in rows])
    model._can_pack()
    with read_rows(model.classifier.base_model, seen):
        together = model(rows)
        model(rows[1:])
    assert seen == [(1, 22), (3, 3)]
    torch.testing.assert_close(together, alone)


@one_decoder
def test_a_score_is_read_before_the_padding_that_a_text_ends_with(decoder, tmp_path):
    """As transformers reads it, which tells padding by its id."""
    model = scored(decoder, tmp_path)
    rows = [{"input_ids": TEXTS[0]}, {"input_ids": [12, 26, 0, 0]}, {"input_ids": [0, 0]}]
    expected = model._padded_logits(rows).squeeze(-1)
    torch.testing.assert_close(model(rows), expected)


@one_decoder
def test_a_classifier_that_reads_elsewhere_is_not_packed(decoder, tmp_path):
    model = scored(decoder, tmp_path)

    def move(_module, _given, output):
        output.logits = output.logits + 1
        return output

    model.classifier.register_forward_hook(move)
    assert not model._can_pack()


def test_where_tokens_belong_takes_no_more_operations_for_many_texts():
    def of(texts):
        segments = Segments([3, 9] * texts, CPU)
        return operations_of(lambda: (segments.positions, segments.places))

    assert of(40) == of(2)
