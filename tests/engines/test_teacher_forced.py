"""The teacher-forced pass: what one call of the policy says, whatever the micro-batches."""

import copy

import pytest
import torch

from heedful.data.batches import collate
from heedful.engines.teacher_forced import micro_batches, token_outputs, token_values
from heedful.models import ValueModel
from heedful.types import MicroBatch
from sampling import PROMPTS, TOKENIZER

RESPONSES = [[*TOKENIZER(text).input_ids, 1] for text in ("很好！", "晴", "🙂 ok, 当然", "", "bye")]
BATCH = collate(PROMPTS, RESPONSES, pad_id=1)


@pytest.mark.parametrize("micro_batch_size", [2, 64])
def test_micro_batches_change_nothing(policy, micro_batch_size):
    with torch.no_grad():
        direct = policy(BATCH.ids, BATCH.attention_mask, BATCH.response_mask, temperature=0.7, with_entropy=True)
    options = {"temperature": 0.7, "with_entropy": True}
    outputs = token_outputs(policy, BATCH, micro_batch=MicroBatch(micro_batch_size), **options)
    for x, y in zip(outputs[:3], direct[:3], strict=True):
        assert not x.requires_grad
        # Numbers up to 20: the relative 1e-6 is of the largest, since a sum over hidden states may cancel.
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6 * max(1.0, float(y.abs().max())))
    if micro_batch_size >= 5:
        assert all(torch.equal(x, y) for x, y in zip(outputs[:3], direct[:3], strict=True))


def test_the_temperature_and_entropy_are_handed_on(policies):
    cold, warm = (
        token_outputs(policies["gpt2"], BATCH, temperature=t, micro_batch=MicroBatch(2), with_entropy=True)
        for t in (0.5, 2.0)
    )
    assert (warm.entropy > cold.entropy)[BATCH.response_mask].all()
    policy = copy.deepcopy(policies["gpt2"])
    policy.value_head = None
    plain = token_outputs(policy, BATCH, temperature=1.0, micro_batch=MicroBatch(2))
    assert (plain.entropy.any(), plain.values) == (False, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_what_the_value_head_reads_and_take_no_more_than_their_tokens(policies, dtype):
    policy = copy.deepcopy(policies["gpt2"])
    policy.compute_dtype = dtype
    found = token_outputs(policy, BATCH, temperature=1.0, micro_batch=MicroBatch(2), with_states=True)
    states = [found.states[row] for row in range(len(RESPONSES))]
    assert [list(x.shape) for x in states] == [[len(response), 32] for response in RESPONSES]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in states if len(x)}
    assert sum(storages.values()) == sum(map(len, RESPONSES)) * 32 * dtype.itemsize
    values = policy.value_head(torch.cat(states), BATCH.response_mask)
    torch.testing.assert_close(values, found.values[BATCH.response_mask], rtol=1e-6, atol=1e-5)
    assert not any(x.requires_grad for x in states)


def test_values_of_a_model_of_its_own(policy):
    policy = copy.deepcopy(policy)
    torch.nn.init.zeros_(policy.value_head.out.weight)  # what is left of its head is linear, as the model's
    model = ValueModel(policy.lm.base_model, 32)
    model.value_head.load_state_dict({name: policy.value_head.state_dict()[name] for name in ("weight", "bias")})
    values = token_values(model, BATCH, micro_batch=MicroBatch(2))
    shared = token_outputs(policy, BATCH, temperature=1.0, micro_batch=MicroBatch(5)).values
    torch.testing.assert_close(values, shared, rtol=1e-6, atol=1e-5)
    assert not values.requires_grad


def test_micro_batches_cover_all_rows_once():
    parts = list(micro_batches(BATCH, MicroBatch(2)))
    assert [len(rows) for rows, _ in parts] == [2, 2, 1]
    order = torch.cat([rows for rows, _ in parts])
    assert sorted(order.tolist()) == list(range(5))
    for name in ("ids", "attention_mask", "response_mask"):
        assert torch.equal(torch.cat([getattr(part, name) for _, part in parts]), getattr(BATCH, name)[order])
    lengths = BATCH.attention_mask.sum(dim=1)[order].tolist()
    assert lengths == sorted(lengths) != BATCH.attention_mask.sum(dim=1).tolist()


def test_a_limit_of_tokens_splits_further():
    lengths = BATCH.attention_mask.sum(dim=1)
    shortest, *_, longest = lengths.sort().values.tolist()
    for tokens in (1, 2 * shortest + 2, 2 * longest):
        parts = [rows for rows, _ in micro_batches(BATCH, MicroBatch(5, tokens))]
        taken = [len(rows) * int(lengths[rows].max()) for rows in parts]
        assert all(len(rows) == 1 or used <= tokens for rows, used in zip(parts, taken, strict=True))
        assert torch.cat(parts).tolist() == lengths.argsort(stable=True).tolist()
        assert 1 < len(parts) <= 5


@pytest.mark.parametrize("limit", [MicroBatch(5), MicroBatch(5, 5 * int(BATCH.attention_mask.sum(dim=1).max()))])
def test_one_micro_batch_is_the_batch_as_it_stands(limit):
    [(rows, part)] = micro_batches(BATCH, limit)
    assert rows.tolist() == list(range(5))
    assert torch.equal(part.ids, BATCH.ids)
