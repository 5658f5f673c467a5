"""The sampling loop against `model.generate`, against itself one row at a time, and against the teacher-forced pass."""

import copy
import itertools

import pytest
import torch

from cases import often
from heedful import Prompt
from heedful.configs.options import SamplingOptions
from heedful.core import token_logprobs
from heedful.data.chat import Renderer
from heedful.data.loading import EncodedPrompt
from heedful.engines import decoder, generate
from heedful.engines.decoder import SamplingModel
from heedful.engines.generate import decode
from heedful.engines.sampler import make_sampler
from heedful.engines.teacher_forced import token_outputs
from heedful.types import MicroBatch
from sampling import PAD, PROMPTS, TOKENIZER, greedy, roll


def stops_midway(policy, **options):
    """Two tokens that end some responses early, some late and one not at all, found by sampling without an end."""
    free = roll(policy, response_length="fixed", **options).own_ids()
    for pair in itertools.combinations(sorted({token for response in free for token in response}), 2):
        ends = [next((i for i, token in enumerate(r) if token in pair), None) for r in free]
        found = {end for end in ends if end is not None and end + 1 < len(free[0])}
        if None in ends and len(found) >= 2 and max(found) >= 2:
            return pair
    raise AssertionError("no stop tokens found that end the responses at different places")


def test_greedy_is_generate_token_for_token(policy):
    """In one ragged batch, with two stop ids that end rows at different steps."""
    stop_ids = stops_midway(policy, temperature=0.0, max_new_tokens=24)
    rollouts = roll(policy, stop_ids=stop_ids, temperature=0.0, max_new_tokens=24)
    expected = [greedy(policy.lm, prompt, 24, stop_ids) for prompt in PROMPTS]
    assert rollouts.own_ids() == expected
    assert rollouts.truncated.tolist() == [response[-1] not in stop_ids for response in expected]
    assert len(set(map(len, expected))) >= 3


@pytest.mark.parametrize("filters", often([{}, {"top_k": 12}, {"top_p": 0.8}], [{"top_p": 0.8}]))
def test_a_row_does_not_depend_on_its_batch(policy, filters):
    """Every row has its own uniform numbers: one at a time, within so many tokens and all together are the same."""
    stop_ids = stops_midway(policy, max_new_tokens=24, **filters)
    together = roll(policy, stop_ids=stop_ids, max_new_tokens=24, **filters)
    for limit in ({"rows": 1}, {"tokens": 70}):
        other = roll(policy, stop_ids=stop_ids, max_new_tokens=24, **limit, **filters)
        assert other.own_ids() == together.own_ids()
        assert torch.equal(other.batch.ids, together.batch.ids)
        assert torch.equal(other.truncated, together.truncated)
        torch.testing.assert_close(other.logprobs, together.logprobs, rtol=1e-5, atol=1e-5)
    assert len(set(map(len, together.own_ids()))) >= 3


def test_samples_are_the_inverse_of_the_cumulative_distribution(policy):
    """Against plain transformers without a cache: each token is the first whose cumulative probability passes u."""
    rollouts = roll(policy, temperature=0.7, max_new_tokens=8, seed=3)
    uniforms = torch.rand(len(PROMPTS), 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for row, prompt in enumerate(PROMPTS):
        ids = list(prompt)
        for step in range(8):
            with torch.no_grad():
                logits = policy.lm(input_ids=torch.tensor([ids])).logits[0, -1].double() / 0.7
            ids.append(int((logits.softmax(-1).cumsum(-1) <= uniforms[row, step]).sum()))
        assert rollouts.own_ids()[row] == ids[len(prompt) :]


def test_the_samplers_logprobs_are_the_teacher_forced_ones(policy):
    """Unfiltered and at the temperature: filters change what is drawn, never a log-prob."""
    filters = {"top_k": 20, "top_p": 0.9}
    stop_ids = stops_midway(policy, temperature=0.7, max_new_tokens=24, **filters)
    rollouts = roll(policy, stop_ids=stop_ids, temperature=0.7, max_new_tokens=24, **filters)
    forced = token_outputs(policy, rollouts.batch, temperature=0.7, micro_batch=MicroBatch(64))
    torch.testing.assert_close(rollouts.logprobs, forced.logprobs, rtol=1e-5, atol=1e-5)
    assert forced.logprobs[rollouts.batch.response_mask].min() < -1


def test_filters_shape_what_is_drawn(policy):
    """With top-k 3 every token is among the three likeliest of its step; without, many are not."""

    def ranks(rollouts):
        for row, prompt in enumerate(PROMPTS):
            response = rollouts.own_ids()[row]
            with torch.no_grad():
                logits = policy.lm(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            yield from (logits > logits.gather(1, torch.tensor(response).unsqueeze(1))).sum(1).tolist()

    assert set(ranks(roll(policy, top_k=3, max_new_tokens=16))) == {0, 1, 2}
    assert set(ranks(roll(policy, top_p=1e-9, max_new_tokens=16))) == {0}
    assert max(ranks(roll(policy, max_new_tokens=16))) > 2


def test_a_response_ends_with_its_stop_token(policies):
    policy = policies["qwen3"]
    stop_ids = stops_midway(policy, max_new_tokens=24)
    fixed = roll(policy, stop_ids=stop_ids, response_length="fixed", max_new_tokens=24)
    assert (fixed.lengths.tolist(), fixed.truncated.all()) == ([24] * len(PROMPTS), True), "which ignores stop tokens"
    rollouts = roll(policy, stop_ids=stop_ids, max_new_tokens=24)
    for row, whole in enumerate(fixed.own_ids()):
        end = next((i for i, token in enumerate(whole) if token in stop_ids), None)
        expected = whole if end is None else whole[: end + 1]
        assert rollouts.own_ids()[row] == expected
        assert bool(rollouts.truncated[row]) == (end is None)
        assert rollouts.lengths[row] == len(expected) == rollouts.batch.response_mask[row].sum()
    assert set(rollouts.truncated.tolist()) == {True, False}


def test_a_stop_token_at_the_last_allowed_place_is_no_truncation(policies):
    """One row, so that a shorter limit reads the same uniform numbers."""
    options = {"seed": 5, "prompts": PROMPTS[:1]}
    free = roll(policies["gpt2"], response_length="fixed", max_new_tokens=8, **options).own_ids()[0]
    n = next(i for i in range(1, 8) if free[i] not in free[:i])
    for stop, truncated in ((free[n], False), (261, True)):
        rollouts = roll(policies["gpt2"], stop_ids=(stop,), max_new_tokens=n + 1, **options)
        assert rollouts.own_ids() == [free[: n + 1]]
        assert rollouts.truncated.tolist() == [truncated]


def noted(monkeypatch):
    """The prompts of every micro-batch that is decoded from now on."""
    seen, right = [], generate.decode

    def decode(model, prompts, *arguments, **options):
        seen.append(prompts)
        return right(model, prompts, *arguments, **options)

    monkeypatch.setattr(generate, "decode", decode)
    return seen


@pytest.mark.parametrize(("rows", "tokens"), [(3, 90), (64, 1)])
def test_rows_are_sampled_in_order_of_length_within_the_limits(policies, monkeypatch, rows, tokens):
    """A prompt takes the room of the longest beside it, and max_new_tokens more; one that has too many goes by itself."""
    seen = noted(monkeypatch)
    asked = [[7] * length for length in (30, 2, 17, 2, 25, 3, 40, 16)]
    roll(policies["gpt2"], asked, max_new_tokens=4, rows=rows, tokens=tokens)
    assert [len(prompt) for part in seen for prompt in part] == sorted(map(len, asked))
    assert len(seen) > 1
    for part in seen:
        widest = max(map(len, part)) + 4
        assert len(part) == 1 or (len(part) <= rows and len(part) * widest <= tokens)


def test_the_seed_decides_and_the_global_random_state_is_neither_read_nor_moved(policies):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = roll(policies["gpt2"], max_new_tokens=8)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again, other = (roll(policies["gpt2"], max_new_tokens=8, seed=seed) for seed in (0, 1))
    assert torch.equal(first.batch.ids, again.batch.ids)
    assert torch.equal(first.logprobs, again.logprobs)
    assert first.own_ids() != other.own_ids()


def test_padding_with_the_end_of_sequence_token(policies):
    """The layout differs in the padding alone; an EOS that was sampled counts, one that pads does not."""
    policy = policies["gpt2"]
    stop = stops_midway(policy, max_new_tokens=24)[0]
    with_pad, with_stop = (roll(policy, stop_ids=(stop,), pad_id=pad, max_new_tokens=24) for pad in (PAD, stop))
    assert with_pad.own_ids() == with_stop.own_ids()
    assert torch.equal(with_pad.batch.attention_mask, with_stop.batch.attention_mask)
    assert torch.equal(with_pad.truncated, with_stop.truncated)
    assert torch.equal(with_pad.logprobs, with_stop.logprobs)


def test_the_weights_are_copied_once_for_all_micro_batches(policies, monkeypatch):
    """In half precision a copy converts every matrix."""
    copies, right = [], decoder.inference_copy
    monkeypatch.setattr(decoder, "inference_copy", lambda *a: copies.append(1) or right(*a))
    roll(policies["llama"], max_new_tokens=4, rows=2)
    assert len(PROMPTS) > 2
    assert len(copies) == 1


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_and_the_policys_mode_is_left_alone(policies, training):
    """Also in the middle of the loop."""
    policy = copy.deepcopy(policies["gpt2"]).train(training)
    dropout = policy.lm.transformer.drop
    assert dropout.p > 0
    first, again = (roll(policy, max_new_tokens=8) for _ in range(2))
    assert torch.equal(first.logprobs, again.logprobs)
    assert policy.training == dropout.training == training
    steps = decode(
        SamplingModel(policy),
        PROMPTS,
        SamplingOptions(max_new_tokens=8),
        uniforms=torch.rand(len(PROMPTS), 8),
        lengths=torch.full((len(PROMPTS),), 8),
        stop_ids=(),
        pad_id=PAD,
    )
    next(steps)
    assert policy.training == dropout.training == training


def test_a_sampler_reads_responses_as_text(policies):
    """Without the stop token that ended them; every end that config, tokenizer and template know is a stop."""
    policy, renderer = policies["qwen3"], Renderer(TOKENIZER)
    prompts = [EncodedPrompt(Prompt(str(i), "x:1"), ids) for i, ids in enumerate(PROMPTS)]
    sampler = make_sampler(SamplingOptions(max_new_tokens=12), renderer, policy, micro_batch=MicroBatch(2))
    assert sampler.stop_ids == (TOKENIZER.eos_token_id, TOKENIZER.convert_tokens_to_ids("<|end|>"))
    policy = copy.deepcopy(policy)
    policy.lm.generation_config.eos_token_id = list(stops_midway(policy, max_new_tokens=12))
    sampler = make_sampler(SamplingOptions(max_new_tokens=12), renderer, policy, micro_batch=MicroBatch(2))
    rollouts = sampler.generate(policy, prompts, torch.Generator().manual_seed(0))
    assert rollouts.own_ids() == roll(policy, stop_ids=sampler.stop_ids, max_new_tokens=12).own_ids()
    for row, (completion, ids) in enumerate(zip(rollouts.completions, rollouts.own_ids(), strict=True)):
        assert completion.ids == (ids if completion.truncated else ids[:-1])
        assert completion.prompt is prompts[row].prompt
        assert completion.response == TOKENIZER.decode(completion.ids)
        assert completion.truncated == bool(rollouts.truncated[row])
    assert {c.truncated for c in rollouts.completions} == {True, False}


def test_half_precision_logits_are_read_in_float32(policies):
    """The sampler's log-probs are those of the same bfloat16 pass of transformers, summed in float32."""
    policy = copy.deepcopy(policies["llama"])
    policy.compute_dtype = torch.bfloat16
    rollouts = roll(policy, PROMPTS[:1], max_new_tokens=1)
    ids = torch.tensor(PROMPTS[:1])
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = policy.lm(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -1]
    assert logits.dtype is torch.bfloat16
    expected = token_logprobs(logits.float(), rollouts.batch.ids[:, -1])
    torch.testing.assert_close(rollouts.logprobs[:, 0], expected, rtol=1e-6, atol=1e-6)
