"""The cache allocated once, and the loop on it: the numbers of a cache that grows by concatenation, and fewer rows read."""

import copy
import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from cases import often, pairs_often
from heedful.configs.options import SamplingOptions
from heedful.engines import kv_cache
from heedful.engines.decoder import Decoder, SamplingModel
from heedful.engines.generate import decode
from heedful.engines.kv_cache import BLOCK, takes_slots
from heedful.kernels.attention import use_attention
from heedful.models import Policy
from sampling import PAD, PROMPTS, TOKENIZER, greedy, roll, sharpened


class Zeros(TorchDispatchMode):
    """Shapes of the tensors of zeros that are made for keys and values."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **kwargs or {})
        if function is torch.ops.aten.new_zeros.default and made.dim() == 4:
            self.shapes.append(tuple(made.shape))
        return made


@pytest.mark.parametrize(("grows", "stop_ids"), [(False, ()), (True, ()), (True, range(30))])
def test_the_cache_is_allocated_once_or_grows_by_blocks(policies, monkeypatch, stop_ids, grows):
    """For rows that wait, over two blocks: keys and values of each layer, and nothing later but on a CPU."""
    monkeypatch.setattr(kv_cache, "GROWS", ("cpu",) if grows else ())
    policy, n = policies["llama"], BLOCK + 4
    with Zeros() as made:
        roll(policy, PROMPTS * 2, stop_ids=stop_ids, rows=6, max_new_tokens=n)
    config = policy.lm.config
    positions = -(-(max(map(len, PROMPTS)) + n) // BLOCK) * BLOCK
    shapes = [
        (6, config.num_key_value_heads, size, config.head_dim)
        for size in (range(BLOCK, positions + 1, BLOCK) if grows else [positions])
    ]
    expected = [shape for shape in shapes for _ in range(2 * config.num_hidden_layers)]
    if grows and stop_ids:  # where responses end early, it grows less often
        expected = expected[: len(made.shapes)]
    assert made.shapes == expected != []


def test_what_is_stored_has_the_compute_dtype(policies):
    policy = Policy(copy.deepcopy(policies["qwen3"].lm), compute_dtype=torch.bfloat16).eval()
    decoder = Decoder(SamplingModel(policy), num_rows=5, longest=BLOCK, pad_id=PAD)
    decoder.read_prompts(PROMPTS)
    assert {layer.keys.dtype for layer in decoder.slots.layers} == {torch.bfloat16}


def test_the_cache_is_freed_at_once(policies):
    """Its memory is needed for the update that follows; Python's garbage collector may come much later."""
    decoder = Decoder(SamplingModel(policies["llama"]), num_rows=5, longest=BLOCK, pad_id=PAD)
    decoder.read_tokens(decoder.read_prompts(PROMPTS).argmax(-1))
    keys = weakref.ref(decoder.slots.layers[0].keys)
    gc.collect()
    gc.disable()
    try:
        del decoder
        assert keys() is None
    finally:
        gc.enable()


# -------------------------------------------------------------------------------------------------------------- cache

SHAPE = {
    "vocab_size": len(TOKENIZER), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
GEMMA = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWS = {
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=6)),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SHAPE, sliding_window=6, query_pre_attn_scalar=8, layer_types=GEMMA)
    ),
}


@pytest.fixture(params=often([*WINDOWS, "eager", "in place", "sdpa"], ["gemma3", "in place"]))
def attending(request, policies):
    """Policies whose layers attend in every way, and whether their cache can be written in place."""
    if request.param in WINDOWS:
        return Policy(sharpened(use_attention(WINDOWS[request.param]()))), False
    lm = copy.deepcopy(policies["llama"].lm)
    if request.param != "in place":
        lm.set_attn_implementation(request.param)
    return Policy(lm), request.param == "in place"


def test_greedy_tokens_are_those_of_generate(attending):
    """In a batch padded on the left, with every prompt twice and rows that are let go, over a block's end."""
    policy, in_place = attending
    assert takes_slots(policy.lm) == in_place, "rows may begin where every layer attends to all"
    n = BLOCK + 4
    expected = [greedy(policy.lm, prompt, n) for prompt in PROMPTS]
    prompts = [*PROMPTS, *PROMPTS]
    assert roll(policy, prompts, temperature=0.0, max_new_tokens=n).own_ids() == [*expected, *expected]
    stop = expected[1][3]
    ended = roll(policy, prompts, stop_ids=(stop,), temperature=0.0, max_new_tokens=n).own_ids()
    cut = [row[: row.index(stop) + 1] if stop in row else row for row in expected]
    assert ended == [*cut, *cut]
    assert len({tuple(row) for row in expected}) > 1


# --------------------------------------------------------------------------------------------------------------- loop


def reads_of(policy, run):
    """``(rows, tokens)`` of each forward pass that ``run`` makes; a hook on the policy is on its copy too."""
    seen = []
    hook = policy.lm.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    result = run()
    hook.remove()
    return seen, result


def steps_of(policy, prompts, lengths, at_a_time=None, **options):
    return list(
        decode(
            SamplingModel(policy),
            prompts,
            SamplingOptions(max_new_tokens=max(lengths), **options),
            uniforms=torch.rand(len(prompts), max(lengths), dtype=torch.float64),
            lengths=torch.tensor(lengths),
            stop_ids=(),
            pad_id=PAD,
            at_a_time=at_a_time,
        )
    )


def test_waiting_rows_begin_where_others_ended(policies):
    """Sixteen rows of 1 to 16 tokens, eight at a time: a place is free only in the step of its end, and each row's tokens are
    told in order."""
    lengths = [1 + 7 * i % 16 for i in range(16)]
    prompts = [PROMPTS[i % 5] for i in range(16)]
    seen, steps = reads_of(policies["qwen3"], lambda: steps_of(policies["qwen3"], prompts, lengths, at_a_time=8))
    tokens = [rows for rows, width in seen if width == 1 and rows == 8]
    assert sum(lengths) == 136
    assert len(tokens) <= 17  # two groups of eight, each until its longest row ends, take 30
    assert max(rows for rows, _ in seen) == 8
    places = [[] for _ in lengths]
    for found in steps:
        for row, place, active in zip(found.rows.tolist(), found.places.tolist(), found.active.tolist(), strict=True):
            if active:
                places[row].append(place)
    assert places == [list(range(length)) for length in lengths]


def test_rows_that_ended_are_let_go(policies):
    """Sixteen rows of 1 to 16 tokens; they go when at least an eighth of those held has ended, and none is read after."""
    lengths = list(range(1, 17))
    prompts = [PROMPTS[i % 5] for i in range(16)]
    seen, steps = reads_of(policies["gpt2"], lambda: steps_of(policies["gpt2"], prompts, lengths))
    held, rows = 16, []
    for t in range(1, 16):  # after t tokens the rows of t and fewer have ended
        left = 16 - t
        held = left if left <= held * 7 // 8 else held
        rows.append((held, 1))
    assert seen == [(5, max(map(len, PROMPTS))), *rows]
    assert (rows[0], rows[1], rows[-1]) == ((16, 1), (14, 1), (1, 1))
    counts = torch.zeros(16, dtype=torch.long)
    for at, found in enumerate(steps):
        assert sorted(found.rows[found.active].tolist()) == [i for i in range(16) if lengths[i] > at]
        counts[found.rows] += found.active
    assert counts.tolist() == lengths


def test_half_precision_holds_multiples_of_eight_rows(policies):
    """Rows that ended fill up those that go on, which all stay; fewer than eight stay as they are."""
    policy = copy.deepcopy(policies["llama"])
    policy.compute_dtype = torch.bfloat16
    lengths = [1 + 7 * i % 20 for i in range(20)]
    seen, steps = reads_of(policy, lambda: steps_of(policy, [PROMPTS[i % 5] for i in range(20)], lengths))
    assert [rows for rows, _ in seen[1:]] == [20] * 3 + [16] * 8 + [8] * 8
    for at, found in enumerate(steps):
        assert sorted(found.rows[found.active].tolist()) == [i for i in range(20) if lengths[i] > at]
    seen, _ = reads_of(policy, lambda: steps_of(policy, PROMPTS, [1, 2, 3, 4, 5]))
    assert [rows for rows, _ in seen[1:]] == [5] * 4


def test_the_loop_ends_with_its_last_row(policies):
    """Of a limit of 24 tokens, with every token a stop: one token each, and nothing read but the prompts."""
    policy = policies["llama"]
    every = tuple(range(len(TOKENIZER)))
    seen, rollouts = reads_of(policy, lambda: roll(policy, stop_ids=every, max_new_tokens=24))
    assert rollouts.lengths.tolist() == [1] * 5
    assert seen == [(5, max(map(len, PROMPTS)))]


def test_a_prompt_is_read_once_for_all_its_samples(policies):
    """Four of each, not side by side: three rows are read. Every response and log-prob is that of its row by itself."""
    policy, prompts = policies["qwen3"], PROMPTS[:3] * 4
    options = {"max_new_tokens": 12, "seed": 4}
    seen, together = reads_of(policy, lambda: roll(policy, prompts, **options))
    assert seen[0] == (3, max(map(len, PROMPTS[:3])))
    assert seen[1] == (12, 1)
    seen, alone = reads_of(policy, lambda: roll(policy, prompts, rows=1, **options))
    assert seen.count((1, len(PROMPTS[1]))) == 4
    assert together.own_ids() == alone.own_ids()
    torch.testing.assert_close(together.logprobs, alone.logprobs, rtol=1e-5, atol=1e-5)
    assert len({tuple(row) for row in together.own_ids()}) == 12


@pytest.mark.parametrize(
    ("implementation", "compute_dtype"),
    pairs_often(
        ["heedful", "eager"],
        [torch.float32, torch.bfloat16],
        [("heedful", torch.float32), ("heedful", torch.bfloat16)],
    ),
)
def test_logits_after_each_token_are_those_of_the_whole_text(policies, compute_dtype, implementation):
    """Left padding, rows selected and repeated on the way, and more tokens than a block, one given token at a time."""
    policy = Policy(copy.deepcopy(policies["qwen3"].lm), compute_dtype=compute_dtype).eval()
    policy.lm.set_attn_implementation(implementation)
    decoder = Decoder(SamplingModel(policy), num_rows=4, longest=max(map(len, PROMPTS)) + BLOCK + 8, pad_id=PAD)
    assert (decoder.slots is not None) == (implementation == "heedful")
    texts = [list(prompt) for prompt in [*PROMPTS[:3], PROMPTS[0]]]
    tolerance = 1e-4 if compute_dtype == torch.float32 else 0.05
    found = decoder.read_prompts([*PROMPTS[:3], PROMPTS[0]])
    for at in range(BLOCK + 8):
        if at % 4 == 0:
            with torch.no_grad():
                whole = torch.stack([policy.lm(input_ids=torch.tensor([text])).logits[0, -1] for text in texts])
            torch.testing.assert_close(found, whole, rtol=0, atol=tolerance * float(whole.abs().max()))
        if at in {5, BLOCK}:
            chosen = [2, 0, 0, 1] if at == 5 else [3, 1]
            decoder.keep(chosen)
            texts = [list(texts[row]) for row in chosen]
        tokens = torch.randint(8, len(TOKENIZER), (len(texts),))
        for text, token in zip(texts, tokens.tolist(), strict=True):
            text.append(token)
        found = decoder.read_tokens(tokens)
        assert found.dtype == torch.float32


def first_logits(policy):
    return Decoder(SamplingModel(policy), num_rows=5, longest=BLOCK, pad_id=PAD).read_prompts(PROMPTS)


def test_the_weights_are_those_of_the_moment(policies):
    """A decoder made after an optimizer step reads with the new weights, in half precision too."""
    policy = Policy(copy.deepcopy(policies["llama"].lm), compute_dtype=torch.bfloat16).eval()
    before = first_logits(policy)
    with torch.no_grad():
        policy.lm.model.layers[0].self_attn.q_proj.weight.add_(0.1)
    assert (first_logits(policy) - before).abs().max() > 0.01


def test_a_row_that_has_ended_stays_at_its_last_position(policies):
    """While others go on: a position later would be another row's."""
    slots = kv_cache.Slots(policies["llama"].lm, 2, BLOCK)
    slots.fill([0, 1], [BLOCK - 1, 3])
    for _ in range(5):
        slots.begin_step()
        slots.end_step()
    assert slots.positions.tolist() == [BLOCK - 1, 8]
