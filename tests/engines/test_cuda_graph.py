"""Decoding on a fixed cache, kernel by kernel: token for token `model.generate`. Graphs: heedful.device_checks."""

import contextlib
import copy

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, DynamicCache, MistralConfig, MistralForCausalLM

from heedful import ConfigError
from heedful.engines.cuda_graph import POSITIONS, GraphDecoder, graph_decoder, obstacle
from heedful.engines.decoder import SamplingModel
from heedful.kernels.packing import positions
from heedful.models import byte_tokenizer

TOKENIZER = byte_tokenizer()
PROMPTS = [TOKENIZER(text).input_ids for text in ("你好", "今天天气怎么样？", "a", "Hi! ", "再见，")]
PAD = 0
SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def padded(prompts):
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def prefill(lm, prompts):
    """Cache, mask and each prompt's most likely next token."""
    ids, mask = padded(prompts)
    cache = DynamicCache(config=lm.config)
    with torch.no_grad():
        output = lm(
            input_ids=ids, attention_mask=mask, position_ids=positions(mask), past_key_values=cache, use_cache=True
        )
    return cache, mask, output.logits[:, -1].argmax(-1)


def go_on(decoder, ids, steps):
    """The most likely tokens: those given and one more each step, ``[rows, steps + 1]``."""
    tokens = [ids]
    for _ in range(steps):
        tokens.append(decoder.step(tokens[-1]).argmax(-1))
    return torch.stack(tokens, dim=1)


def decode(decoder, prompts, new_tokens, rows=None):
    cache, mask, ids = prefill(decoder.lm, prompts)
    decoder.start(cache, mask, new_tokens - 1, rows)
    return go_on(decoder, ids if rows is None else ids[rows], new_tokens - 1)


def generate(lm, prompts, new_tokens):
    ids, mask = padded(prompts)
    whole = lm.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=new_tokens,
        eos_token_id=None,
        pad_token_id=PAD,
    )
    return whole[:, ids.shape[1] :]


def test_a_ragged_batch_is_generates_token_for_token(policy):
    """Across the length at which attention starts to read another block of positions."""
    steps = POSITIONS + 10
    assert torch.equal(
        decode(GraphDecoder(policy.lm, torch.float32), PROMPTS, steps), generate(policy.lm, PROMPTS, steps)
    )


def test_logits_are_those_of_a_growing_cache(policy):
    decoder = GraphDecoder(policy.lm, torch.float32)
    cache, mask, ids = prefill(policy.lm, PROMPTS)
    decoder.start(cache, mask, 8)
    for _ in range(8):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        with torch.no_grad():
            expected = policy.lm(
                input_ids=ids[:, None],
                attention_mask=mask,
                position_ids=positions(mask)[:, -1:],
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]
        torch.testing.assert_close(decoder.step(ids), expected, rtol=1e-5, atol=1e-5)
        ids = expected.argmax(-1)


def test_rows_that_are_done_leave_the_rest_as_it_was(policy):
    """Twelve rows run as sixteen would, three of them as eight."""
    prompts = [[20 + i, *PROMPTS[i % 5]] for i in range(12)]
    expected = generate(policy.lm, prompts, 15)
    decoder = GraphDecoder(policy.lm, torch.float32)
    first = decode(decoder, prompts, 6)
    assert torch.equal(first, expected[:, :6])
    rows = torch.tensor([9, 2, 7])
    cache, mask, ids = prefill(policy.lm, prompts)
    decoder.start(cache, mask, 14)
    before = go_on(decoder, ids, 5)
    decoder.keep(rows)
    after = go_on(decoder, before[rows, -1], 9)
    assert torch.equal(torch.cat([before[rows], after[:, 1:]], dim=1), expected[rows])


def test_one_decoder_serves_batch_after_batch(policy):
    """Fewer rows and shorter ones in the memory of the batch before; then longer ones, then more, than it holds."""
    decoder = GraphDecoder(policy.lm, torch.float32)
    for prompts, new_tokens in ((PROMPTS, 20), (PROMPTS[:2], 7), (PROMPTS[:2], POSITIONS + 3), (PROMPTS * 2, 7)):
        assert torch.equal(decode(decoder, prompts, new_tokens), generate(policy.lm, prompts, new_tokens))


def test_filling_rows_stay_inside_the_models_context(policies):
    """gpt2 looks positions up in a table: a row left from a long batch would walk past its end in the next ones."""
    lm = policies["gpt2"].lm
    decoder = GraphDecoder(lm, torch.float32)
    long = [[30] * (lm.config.max_position_embeddings - 20)] * 5
    decode(decoder, long, 20)
    for _ in range(2):
        assert torch.equal(decode(decoder, PROMPTS[:1], 30), generate(lm, PROMPTS[:1], 30))


def test_several_rows_continue_one_prompt(policy):
    rows = torch.tensor([1, 0, 1, 1])
    tokens = decode(GraphDecoder(policy.lm, torch.float32), PROMPTS[:2], 9, rows)
    assert torch.equal(tokens, generate(policy.lm, PROMPTS[:2], 9)[rows])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine that cannot capture")
def test_where_capturing_fails_the_same_tokens_come_without_a_graph(policies):
    lm = policies["qwen3"].lm
    decoder = GraphDecoder(lm, torch.float32, capture=True)
    with pytest.warns(UserWarning, match="Qwen3ForCausalLM cannot be captured as a CUDA graph") as caught:
        tokens = decode(decoder, PROMPTS, 12)
    assert torch.equal(tokens, generate(lm, PROMPTS, 12))
    assert len(caught) == 1


def test_a_device_without_graphs_refuses_them(policy):
    with pytest.raises(ConfigError, match="--cuda-graphs: cpu has no CUDA graphs"):
        SamplingModel(policy, cuda_graphs=True)


class Device:
    """torch.cuda's part in recording, without a device: its recordings end as torch's broken ones do, whose last act raises
    before the stream is put back."""

    def __init__(self, monkeypatch):
        self.stream_now = self.outside = self.Stream()
        self.is_recording = False
        for name in ("Stream", "stream", "current_stream", "set_stream", "CUDAGraph", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    class Stream:
        def wait_stream(self, other):
            assert other is not self

    def current_stream(self):
        return self.stream_now

    def set_stream(self, stream):
        self.stream_now = stream

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.stream_now = self.stream_now, stream
        yield
        self.stream_now = before

    def CUDAGraph(self):  # noqa: N802
        return None

    @contextlib.contextmanager
    def graph(self, _graph, **_):
        self.stream_now, self.is_recording = self.Stream(), True
        try:
            yield
        finally:
            self.is_recording = False
            raise RuntimeError("failed due to a previous error during capture")


def test_a_broken_recording_leaves_its_stream_and_its_cause_is_named(policies, monkeypatch):
    lm = copy.deepcopy(policies["llama"].lm)
    device = Device(monkeypatch)

    def wait(*_):
        if device.is_recording:
            raise RuntimeError("it waits for the device")

    lm.register_forward_hook(wait)
    decoder = GraphDecoder(lm, torch.float32, capture=True)
    with pytest.warns(UserWarning, match="cannot be captured as a CUDA graph.*: it waits for the device") as caught:
        tokens = decode(decoder, PROMPTS, 12)
    assert torch.equal(tokens, generate(lm, PROMPTS, 12))
    assert len(caught) == 1
    assert device.stream_now is device.outside


def test_more_steps_than_announced_are_refused(policies):
    """They would be written past the end of the cache."""
    decoder = GraphDecoder(policies["llama"].lm, torch.float32)
    cache, mask, ids = prefill(decoder.lm, PROMPTS)
    decoder.start(cache, mask, 1)
    with pytest.raises(AssertionError, match="more steps"):
        go_on(decoder, ids, POSITIONS)


def test_half_precision_is_that_of_autocast(policies):
    """qwen3 under autocast makes float32 keys of bfloat16 states; a cache in bfloat16 takes them."""
    lm = policies["qwen3"].lm
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache, mask, ids = prefill(lm, PROMPTS)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.bfloat16(), layer.values.bfloat16()
    decoder = GraphDecoder(lm, torch.bfloat16)
    decoder.start(cache, mask, 1)
    logits = decoder.step(ids)
    more = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    whole = torch.cat([padded(PROMPTS)[0], ids[:, None]], dim=1)
    with torch.no_grad():
        expected = lm(input_ids=whole, attention_mask=more, position_ids=positions(more), use_cache=False).logits[:, -1]
    assert logits.dtype == torch.bfloat16
    assert float((logits - expected).abs().max()) < 0.1 * float(expected.std())


def test_the_decoders_have_no_obstacle(policy):
    assert obstacle(policy.lm, torch.float32) is None
    assert obstacle(policy.lm, torch.bfloat16) is None
    assert isinstance(graph_decoder(policy.lm, torch.float32), GraphDecoder)


def other_attention(lm):
    lm.config._attn_implementation = "flex_attention"
    return lm


def other_positions(lm):
    """A model that places a single token at the start, whatever it is told."""

    def first(_module, arguments, options):
        if options["input_ids"].shape[1] == 1:
            options["position_ids"] = torch.zeros_like(options["position_ids"])
        return arguments, options

    lm.register_forward_pre_hook(first, with_kwargs=True)
    return lm


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda _: BloomForCausalLM(BloomConfig(vocab_size=40, hidden_size=16, n_layer=2, n_head=2)),
            "does not declare",
        ),
        (lambda _: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8)), "do not read all positions"),
        (lambda lm: other_attention(copy.deepcopy(lm)), "its attention is flex_attention"),
        (lambda lm: other_positions(copy.deepcopy(lm)), "its logits change by"),
    ],
    ids=["no fixed cache", "sliding window", "attention", "logits"],
)
def test_a_model_that_would_decode_otherwise_is_not_decoded(policies, make, reason):
    lm = make(policies["gpt2"].lm).eval()
    with pytest.warns(UserWarning, match=f"{type(lm).__name__} is sampled without CUDA graphs, so slower: .*{reason}"):
        assert graph_decoder(lm, torch.float32) is None
