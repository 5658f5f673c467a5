"""Decoding on a fixed cache, kernel by kernel: token for token `model.generate`. Graphs: heedful.apps.device_checks."""

import contextlib
import copy
from dataclasses import replace

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, MistralConfig, MistralForCausalLM

from heedful import ConfigError
from heedful.configs.options import SamplingOptions
from heedful.devices import CAPABILITIES
from heedful.engines.cuda_graph import POSITIONS, GraphDecoder, graph_decoder, obstacle
from heedful.engines.decoder import Decoder, SamplingModel
from heedful.engines.sampler import with_graphs
from heedful.models import Policy
from sampling import PAD, PROMPTS

SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def recording(policy, *, capture=False, lm=None):
    """A sampling model with a graph's steps."""
    model = SamplingModel(policy if lm is None else Policy(lm))
    model.graph = GraphDecoder(model.lm, model.compute_dtype, capture=capture)
    return model


def begun(model, prompts, new_tokens):
    """A decoder that has read the prompts, and each prompt's most likely next token."""
    decoder = Decoder(model, num_rows=len(prompts), longest=max(map(len, prompts)) + new_tokens, pad_id=PAD)
    with torch.no_grad():
        return decoder, decoder.read_prompts(prompts).argmax(-1)


def go_on(decoder, ids, steps):
    """The most likely tokens: those given and one more each step, ``[rows, steps + 1]``."""
    tokens = [ids]
    for _ in range(steps):
        tokens.append(decoder.read_tokens(tokens[-1]).argmax(-1))
    return torch.stack(tokens, dim=1)


def decode(model, prompts, new_tokens):
    return go_on(*begun(model, prompts, new_tokens), new_tokens - 1)


def generate(lm, prompts, new_tokens):
    """The most likely responses, by transformers, to prompts that are padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return lm.generate(
        input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=PAD
    )[:, width:]  # fmt: skip


def test_a_ragged_batch_is_generates_token_for_token(policy):
    """Across the length at which attention starts to read another block of positions."""
    steps = POSITIONS + 10
    assert torch.equal(decode(recording(policy), PROMPTS, steps), generate(policy.lm, PROMPTS, steps))


def test_rows_that_are_done_leave_the_rest_as_it_was(policy):
    """Twelve rows run as sixteen would, three of them as eight."""
    prompts = [[20 + i, *PROMPTS[i % 5]] for i in range(12)]
    expected = generate(policy.lm, prompts, 15)
    decoder, ids = begun(recording(policy), prompts, 15)
    before, rows = go_on(decoder, ids, 5), [9, 2, 7]
    assert torch.equal(before, expected[:, :6])
    decoder.keep(rows)
    after = go_on(decoder, before[rows, -1], 9)
    assert torch.equal(torch.cat([before[rows], after[:, 1:]], dim=1), expected[rows])


def test_one_decoder_serves_batch_after_batch(policies):
    """Fewer rows and shorter ones in the memory of the batch before; then longer ones, then more, than it holds."""
    policy = policies["qwen3"]
    model = recording(policy)
    for prompts, new_tokens in ((PROMPTS, 12), (PROMPTS[:2], 7), (PROMPTS[:2], POSITIONS + 3), (PROMPTS * 2, 7)):
        assert torch.equal(decode(model, prompts, new_tokens), generate(policy.lm, prompts, new_tokens))


def test_all_graphs_share_one_tensor_of_logits(policies):
    """Of 12, then 3 rows, and over more positions: with a large vocabulary each such tensor would take gigabytes."""
    model = recording(policies["llama"])
    decoder, ids = begun(model, [[20 + i] for i in range(12)], POSITIONS + 9)
    first = decoder.read_tokens(ids)
    decoder.keep([0, 1, 2])
    places = {decoder.read_tokens(ids[:3]).data_ptr() for _ in range(POSITIONS + 5)}
    assert places == {first.data_ptr()}


def test_a_longer_prompt_within_the_settings_limit_keeps_the_graphs_memory(policies):
    """The cache of the graphs has room for the longest prompt that the settings allow, from the first batch on."""
    policy = policies["llama"]
    model = recording(policy)
    model.longest = max(map(len, PROMPTS)) + 6
    decoder, _ = begun(model, PROMPTS[2:3] * 5, 6)
    first = decoder.slots
    for prompts in (PROMPTS, PROMPTS[:2]):
        assert begun(model, prompts, 6)[0].slots is first


def test_filling_rows_stay_inside_the_models_context(policies):
    """gpt2 looks positions up in a table: a row left from a long batch would walk past its end in the next ones."""
    policy = policies["gpt2"]
    model = recording(policy)
    long = [[30] * (policy.lm.config.max_position_embeddings - 20)] * 5
    decode(model, long, 20)
    for _ in range(2):
        assert torch.equal(decode(model, PROMPTS[:1], 30), generate(policy.lm, PROMPTS[:1], 30))


def test_graphs_are_turned_on_where_the_device_has_them(policies, monkeypatch):
    policy = policies["gpt2"]
    auto = SamplingOptions()
    assert with_graphs(auto, policy) is auto, "a CPU has none"
    monkeypatch.setitem(CAPABILITIES, "cpu", replace(CAPABILITIES["cpu"], graphs=True))
    assert with_graphs(auto, policy) == SamplingOptions(cuda_graphs="on")
    off = SamplingOptions(cuda_graphs="off")
    assert with_graphs(off, policy) is off
    cannot = Policy(BloomForCausalLM(BloomConfig(**SMALL)))
    assert with_graphs(auto, cannot) is auto, "and nothing is said about it"
    quantised = Policy(copy.deepcopy(policy.lm))
    quantised.lm.is_quantized = True
    assert with_graphs(auto, quantised) is auto


def test_a_device_without_graphs_refuses_them(policies):
    policy = policies["gpt2"]
    with pytest.raises(ConfigError, match="--cuda-graphs on: cpu has no CUDA graphs"):
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
    with pytest.warns(UserWarning, match="cannot be captured as a CUDA graph.*: it waits for the device") as caught:
        tokens = decode(recording(None, capture=True, lm=lm), PROMPTS, 12)
    assert torch.equal(tokens, generate(lm, PROMPTS, 12))
    assert len(caught) == 1
    assert device.stream_now is device.outside


def test_the_decoders_have_no_obstacle(policy):
    assert obstacle(policy.lm) is None
    assert isinstance(graph_decoder(policy.lm, torch.float32), GraphDecoder)


def other_attention(lm):
    lm.config._attn_implementation = "flex_attention"
    return lm


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda _: BloomForCausalLM(BloomConfig(**SMALL)), "its attention is not heedful's"),
        (lambda _: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8)), "do not read all positions"),
        (lambda lm: other_attention(copy.deepcopy(lm)), "its attention is not heedful's"),
    ],
    ids=["no fixed cache", "sliding window", "attention"],
)
def test_a_model_that_would_decode_otherwise_is_not_decoded(policies, make, reason):
    lm = make(policies["gpt2"].lm).eval()
    with pytest.warns(UserWarning, match=f"{type(lm).__name__} is sampled without CUDA graphs, so slower: .*{reason}"):
        assert graph_decoder(lm, torch.float32) is None
