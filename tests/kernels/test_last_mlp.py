"""The last layer's MLP for the tokens that are read: the same states and gradients, and where it is left as it is."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from heedful.data.batches import collate
from heedful.kernels import last_mlp
from heedful.kernels.last_mlp import MOST_READ, read_states, take
from heedful.kernels.layout import hidden_states
from heedful.models.heads import checkpoint_layers
from heedful.models.load import load_policy, load_reward_model, load_value_model
from heedful.models.tokenizer import load_tokenizer

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
READ = torch.tensor([3, 4, 9, 5])


def load(folder):
    return load_policy(folder, device=CPU, compute_dtype=torch.float32).lm.base_model.double()


@pytest.fixture(params=["llama", "qwen3"])
def trunk(checkpoints, request):
    return load(str(checkpoints[request.param]))


@pytest.fixture
def rows_of():
    """``rows_of(trunk)``: a list that grows with the rows that each layer's MLP multiplies, in their order."""

    def watch(trunk):
        seen = []
        for layer in trunk.layers:
            layer.mlp.down_proj.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[:-1].numel()))
        read_states(trunk, IDS, READ)  # what is tried once per trunk is behind it
        seen.clear()
        return seen

    return watch


def test_golden_taken_rows_and_their_gradient():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.float64, requires_grad=True)
    taken = take(x, torch.tensor([2, 0]))
    assert taken.tolist() == [[5, 6], [1, 2]]
    (gradient,) = torch.autograd.grad(taken, x, torch.tensor([[1.0, 2.0], [3.0, 4.0]]).double())
    assert gradient.tolist() == [[3, 4], [0, 0], [1, 2]]
    assert torch.autograd.gradcheck(lambda x: take(x, torch.tensor([2, 0])), x)


def test_states_and_gradients_are_those_of_all_tokens(trunk, rows_of):
    seen = rows_of(trunk)
    results = []
    for states in (lambda: read_states(trunk, IDS, READ), lambda: hidden_states(trunk, IDS).flatten(0, 1)[READ]):
        found = states()
        trunk.zero_grad()
        (found * torch.linspace(-1, 2, found.numel(), dtype=torch.float64).view_as(found)).sum().backward()
        results.append([found.detach(), *(parameter.grad.clone() for parameter in trunk.parameters())])
    assert seen == [12, 4, 12, 12]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_passes_without_gradients_have_the_numbers_of_those_with(trunk):
    with torch.no_grad():
        read = read_states(trunk, IDS, READ)
    assert torch.equal(read, read_states(trunk, IDS, READ).detach())


def test_policies_and_critics_read_what_stands_before_responses(checkpoints, rows_of):
    """Two texts with 3 and 1 tokens of responses; padding and the last tokens are never read."""
    policy = load_policy(str(checkpoints["llama"]), device=CPU, compute_dtype=torch.float32)
    critic = load_value_model(str(checkpoints["llama"]), device=CPU, compute_dtype=torch.float32)
    batch = collate([[5, 6, 7], [8, 9, 10, 11]], [[12, 13, 14], [15]], pad_id=0)
    for model, trunk in ((policy, policy.lm.base_model), (critic, critic.trunk)):
        seen = rows_of(trunk)
        model(batch.ids, batch.attention_mask, batch.response_mask)
        assert seen[-1] == 4


def test_reward_models_read_the_ends(checkpoints, rows_of):
    folder = str(checkpoints["llama"])
    model = load_reward_model(folder, load_tokenizer(folder), device=CPU, compute_dtype=torch.float32, seed=3)
    model.try_packing()
    for texts in ([[5, 6, 7], [8, 9, 10]], [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]):
        seen = rows_of(model.classifier.base_model)
        scores = model([{"input_ids": text} for text in texts])
        assert seen[-1] == 2
        mask = torch.tensor([[1] * len(text) + [0] * (8 - len(text)) for text in texts])
        ids = torch.tensor([text + [0] * (8 - len(text)) for text in texts])
        expected = model.classifier(input_ids=ids, attention_mask=mask).logits.squeeze(-1)
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------------------- where nothing is left out


def everything(trunk, seen, read=READ):
    """Whether the last layer's MLP multiplies all tokens."""
    seen.clear()
    states = read_states(trunk, IDS, read)
    torch.testing.assert_close(states, hidden_states(trunk, IDS).flatten(0, 1)[read])
    return seen[len(trunk.layers) - 1] == IDS.numel()


def test_nearly_all_tokens_are_read_as_all(trunk, rows_of):
    assert everything(trunk, rows_of(trunk), torch.arange(int(12 * MOST_READ) + 1))
    assert not everything(trunk, rows_of(trunk), torch.arange(int(12 * MOST_READ)))


def test_with_products_compiled_for_each_shape_there_are_no_more_shapes(trunk, rows_of):
    seen = rows_of(trunk.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert everything(trunk, seen)


def test_layers_that_are_recomputed_or_divided(trunk, rows_of):
    checkpointed = copy.deepcopy(trunk).train()
    seen = rows_of(checkpointed)
    assert not everything(checkpointed, seen)
    checkpoint_layers(checkpointed)
    assert everything(checkpointed, seen)
    divided = copy.deepcopy(trunk)
    seen = rows_of(divided)
    divided.layers[-1].unshard = lambda: None
    assert everything(divided, seen)


def test_compiled_layers_are_not_touched(trunk):
    assert last_mlp._last_mlp(trunk) is trunk.layers[-1].mlp
    trunk.layers[-1].compile(backend="eager")
    assert last_mlp._last_mlp(trunk) is None


def test_a_mixture_balances_over_all_tokens(checkpoints):
    trunk = load(str(checkpoints["llama"]))
    trunk.layers[-1].mlp.__class__ = type("LlamaSparseMoeBlock", (type(trunk.layers[-1].mlp),), {})
    assert last_mlp._last_mlp(trunk) is None


def test_a_forward_that_somebody_replaced_is_kept(trunk, rows_of):
    mlp = trunk.layers[-1].mlp
    plain = mlp.forward
    mlp.forward = lambda x: 2 * plain(x)
    assert everything(trunk, rows_of(trunk))
    assert "forward" in vars(mlp)


def test_what_mixes_tokens_behind_the_last_mlp(trunk, rows_of):
    """It is tried before it is believed."""
    trunk.norm.register_forward_hook(lambda _, __, states: states.cumsum(1))
    assert everything(trunk, rows_of(trunk))


def test_an_mlp_that_refuses_rows(trunk, rows_of):
    def refuse(_, inputs):
        if inputs[0].dim() != 3:
            raise ValueError("three dimensions")

    trunk.layers[-1].mlp.register_forward_pre_hook(refuse)
    trunk.layers[-1].mlp.gate_proj.register_forward_pre_hook(refuse)
    assert everything(trunk, rows_of(trunk))


def test_after_an_error_the_mlp_is_as_it_was(trunk):
    read_states(trunk, IDS, READ)
    mlp = trunk.layers[-1].mlp
    hook = mlp.down_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        read_states(trunk, IDS, READ)
    hook.remove()
    assert last_mlp._READ.get() is None
    assert mlp(torch.zeros(1, 3, 32).double()).shape == (1, 3, 32)


def test_threads_and_copies_do_not_meet(trunk):
    """While one pass leaves tokens out, the model gives all states in another thread, and its copy in this one."""
    expected = hidden_states(trunk, IDS)
    read_states(trunk, IDS, READ)
    copied, mlp = copy.deepcopy(trunk), trunk.layers[-1].mlp
    with last_mlp._only_for(mlp, READ), ThreadPoolExecutor() as threads:
        assert not torch.equal(hidden_states(trunk, IDS), expected)
        assert torch.equal(threads.submit(hidden_states, trunk, IDS).result(), expected)
        assert torch.equal(hidden_states(copied, IDS), expected)
    assert torch.equal(read_states(copied, IDS, READ), read_states(trunk, IDS, READ))
    assert list(trunk.state_dict()) == list(copied.state_dict())
