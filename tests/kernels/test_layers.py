"""Layers that read memory less often: the numbers and gradients of the formulas, and which layers they replace."""

import copy
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.glm.modeling_glm import GlmAttention
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as of_neighbours
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    rotate_half,
)

from heedful.data.batches import collate
from heedful.kernels.cpu import layers
from heedful.kernels.cpu.layers import MOST_READ, SMALLEST_ROW, rms_norm, rotate, take, use_lean_layers
from heedful.kernels.packing import hidden_states, read_states
from heedful.models import load_policy, load_reward_model, load_tokenizer, load_value_model
from heedful.models.heads import checkpoint_layers

CPU = torch.device("cpu")


def test_policies_critics_and_reward_models_have_them(tiny):
    folder, options = tiny("qwen3"), {"device": CPU, "compute_dtype": torch.float32}
    reward = load_reward_model(folder, load_tokenizer(folder), seed=3, **options)
    for model in (load_policy(folder, **options), load_value_model(folder, **options), reward):
        for kind, count in (("MLP", 2), ("Attention", 2), ("RMSNorm", 9)):
            found = [module for module in model.modules() if type(module).__name__.endswith(kind)]
            assert [type(one).__name__[:4] for one in found] == ["Lean"] * count


def test_layers_on_other_devices_stay(tiny):
    for layer in (norm(LlamaRMSNorm), mlp(), attention_layer(tiny)):
        kind = type(layer)
        assert type(use_lean_layers(layer, torch.device("cuda"))) is kind


@pytest.mark.parametrize(
    ("kind", "in_place"),
    [
        ("mlp", "mul_"),
        pytest.param("norm", "square", marks=pytest.mark.exhaustive),
        pytest.param("rotation", "sub_", marks=pytest.mark.exhaustive),
    ],
)
def test_compiled_code_makes_its_own(tiny, kind, in_place):
    made = {"norm": lambda: norm(LlamaRMSNorm), "mlp": mlp, "rotation": lambda: attention_layer(tiny)}[kind]()
    if kind == "rotation":
        made.config._attn_implementation = "eager"
    arguments = inputs(made) if kind == "rotation" else (torch.randn(4, 8 if kind == "norm" else 16),)
    lean, seen = use_lean_layers(made, CPU), []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(lean, backend=backend)(*arguments), lean(*arguments))
    assert seen
    assert not any(in_place in target for target in seen)


@pytest.mark.parametrize(
    "function", [lambda x: rms_norm(x, torch.ones(8), 1e-6), lambda x: rotate(x, x.detach(), x.detach())]
)
def test_numbers_do_not_depend_on_whether_something_learns(function):
    """The ratio before the first update is 1: the pass without gradients has the numbers of the one with them."""
    x = torch.randn(5, 8, requires_grad=True)
    with torch.no_grad():
        read = function(x)
    assert torch.equal(read, function(x).detach())


# ------------------------------------------------------------------------------------------------------------ RMS norms


def plain_norm(x, weight, eps):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


@pytest.mark.parametrize("shape", [(5,), (0, 130), (2, 2, 130)])
@pytest.mark.parametrize(("learns_x", "learns_weight"), [(True, True), (True, False), (False, True)])
def test_gradients_of_a_norm_are_those_of_the_formula(shape, learns_x, learns_weight):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=learns_x)
    weight = torch.randn(shape[-1], dtype=torch.float64, requires_grad=learns_weight)
    if x.numel() == 5:
        assert torch.autograd.gradcheck(lambda *of: rms_norm(*of, 1e-3), (x, weight))
    upstream = torch.randn(shape, dtype=torch.float64).transpose(0, -1).contiguous().transpose(0, -1)
    inputs = [one for one in (x, weight) if one.requires_grad]
    own = torch.autograd.grad(rms_norm(x, weight, 1e-3), inputs, upstream)
    torch.testing.assert_close(own, torch.autograd.grad(plain_norm(x, weight, 1e-3), inputs, upstream))


@pytest.mark.parametrize("size", [SMALLEST_ROW - 1, SMALLEST_ROW])
def test_wide_rows_learn_by_the_kernel_of_a_layer_norm(size):
    """It centres what it normalises, which an RMS norm does not: here the mean of w g is far from 0."""
    x = (torch.randn(6, size, dtype=torch.float64) + 3).requires_grad_()
    weight, upstream = torch.rand(size, dtype=torch.float64).requires_grad_(), torch.rand(6, size, dtype=torch.float64)
    with torch.profiler.profile() as profile:
        own = torch.autograd.grad(rms_norm(x, weight, 1e-3), (x, weight), upstream)
    names = {event.name for event in profile.events()}
    assert ("aten::native_layer_norm_backward" in names) == (size >= SMALLEST_ROW)
    torch.testing.assert_close(own, torch.autograd.grad(plain_norm(x, weight, 1e-3), (x, weight), upstream))


@pytest.mark.parametrize("shape", [(7, 33), (130, 256)])
def test_numbers_of_a_norm_are_those_of_transformers_bit_for_bit(shape):
    layer, x = norm(LlamaRMSNorm, shape[-1]), torch.randn(shape)
    assert torch.equal(rms_norm(x, layer.weight, layer.variance_epsilon), layer(x))


def test_it_keeps_its_input_once():
    """Autograd keeps the input and the input over its root."""

    def kept(function):
        numbers = []
        x, weight = torch.randn(16, 64, requires_grad=True), torch.randn(64, requires_grad=True)
        with saved_tensors_hooks(lambda tensor: numbers.append(tensor.data_ptr()) or tensor, lambda tensor: tensor):
            function(x, weight, 1e-6)
        return len({*numbers} - {weight.data_ptr()})

    assert kept(rms_norm) == 2  # and the roots, one number per row
    assert kept(plain_norm) == 3


def norm(kind, size=8):
    made = kind(size, eps=1e-5)
    with torch.no_grad():
        made.weight.normal_()
    return made


def test_norms_of_the_formula_are_replaced_with_the_same_numbers_and_files():
    layer = norm(LlamaRMSNorm)
    before, x = copy.deepcopy(layer), torch.randn(2, 3, 8, requires_grad=True)
    use_lean_layers(layer, CPU)
    assert type(layer) is not LlamaRMSNorm
    assert isinstance(layer, LlamaRMSNorm)
    assert list(layer.state_dict()) == list(before.state_dict())
    torch.testing.assert_close(layer(x), before(x))
    assert "RMSNorm" in layer(x).grad_fn.name()
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    use_lean_layers(layer, CPU)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


class TwiceRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


class Norm(LlamaRMSNorm):
    """The formula under another name: nobody promised that it is a norm."""


class BiasedRMSNorm(LlamaRMSNorm):
    def __init__(self, size, eps):
        super().__init__(size, eps)
        self.bias = nn.Parameter(torch.zeros(size))


def test_norms_in_other_precisions_are_computed_as_before():
    """What is rounded when is part of the numbers of a half precision."""
    dtype = torch.bfloat16
    layer, x = norm(LlamaRMSNorm), torch.randn(2, 8, dtype=dtype)
    assert torch.equal(use_lean_layers(copy.deepcopy(layer), CPU)(x), layer(x))
    half = layer.to(dtype)
    assert torch.equal(use_lean_layers(copy.deepcopy(half), CPU)(x.float()), half(x.float()))


# ---------------------------------------------------------------------------------------------------------- rotations


QUARTER = torch.tensor([[math.pi / 2, math.pi / 2]], dtype=torch.float64)
"""Angles of one pair of numbers: a quarter of a turn."""


def plain_rotation(x, cos, sin):
    return x * cos + rotate_half(x) * sin


def test_golden_a_quarter_of_a_turn():
    """(3, 4) becomes (-4, 3)."""
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    torch.testing.assert_close(rotate(x, QUARTER.cos(), QUARTER.sin()), torch.tensor([[-4.0, 3.0]]).double())


def test_golden_halves_turn_with_each_other_not_neighbours():
    """Of (1, 2, 3, 4), 1 turns with 3 and 2 with 4."""
    x, angles = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).double(), QUARTER.repeat(1, 2)
    expected = torch.tensor([[-3.0, -4.0, 1.0, 2.0]]).double()
    torch.testing.assert_close(rotate(x, angles.cos(), angles.sin()), expected)


def test_golden_gradients_of_a_rotation_turn_back():
    """y = (-x2, x1), so the upstream (5, 7) is (7, -5) of x."""
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64, requires_grad=True)
    (rotate(x, QUARTER.cos(), QUARTER.sin()) @ torch.tensor([5.0, 7.0]).double()).backward()
    torch.testing.assert_close(x.grad, torch.tensor([[7.0, -5.0]]).double())


@pytest.mark.parametrize("shape", [(6,), (0, 6), (2, 3, 4, 6)])
def test_gradients_of_a_rotation_are_those_of_the_formula(shape):
    """Also of angles whose halves differ, and of tensors that are not contiguous."""
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    cos, sin = torch.randn(2, *shape[-2:], dtype=torch.float64)
    if x.numel():
        assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), x)
    upstream = torch.randn(shape, dtype=torch.float64).transpose(0, -1).contiguous().transpose(0, -1)
    own = torch.autograd.grad(rotate(x, cos, sin), x, upstream)
    torch.testing.assert_close(own, torch.autograd.grad(plain_rotation(x, cos, sin), x, upstream))


def test_numbers_of_a_rotation_are_those_of_transformers_bit_for_bit():
    q, k, cos, sin = torch.randn(2, 4, 9, 64), torch.randn(2, 2, 9, 64), torch.randn(1, 9, 64), torch.randn(1, 9, 64)
    for found, expected in zip(
        (rotate(x, cos, sin) for x in (q, k)), apply_rotary_pos_emb(q, k, cos, sin), strict=True
    ):
        assert torch.equal(found, expected)


def test_it_keeps_only_the_angles():
    kept = []
    x, cos, sin = torch.randn(5, 8, requires_grad=True), torch.randn(5, 8), torch.randn(5, 8)
    with saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()) or tensor, lambda tensor: tensor):
        rotate(x, cos, sin)
    assert set(kept) == {cos.data_ptr(), sin.data_ptr()}


def attention_layer(tiny, kind=LlamaAttention):
    return kind(AutoConfig.from_pretrained(tiny("llama")), layer_idx=0)


def inputs(layer, dtype=torch.float32):
    x = torch.randn(2, 5, layer.config.hidden_size, dtype=dtype)
    angles = torch.rand(1, 5, layer.head_dim // 2, dtype=dtype).repeat(1, 1, 2)
    mask = torch.zeros(1, 1, 5, 5, dtype=dtype)
    return x, (angles.cos(), angles.sin()), mask


@pytest.fixture
def layer(tiny):
    made = attention_layer(tiny)
    made.config._attn_implementation = "eager"
    return made


def test_layers_of_the_formula_are_replaced_with_the_same_numbers_gradients_and_files(layer):
    before, x = copy.deepcopy(layer), inputs(layer)
    use_lean_layers(layer, CPU)
    assert type(layer) is not LlamaAttention
    assert isinstance(layer, LlamaAttention)
    assert list(layer.state_dict()) == list(before.state_dict())
    ours, theirs = (one(*x)[0] for one in (layer, before))
    torch.testing.assert_close(ours, theirs)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    for own, other in zip(layer.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    use_lean_layers(layer, CPU)
    assert torch.equal(copy.deepcopy(layer)(*x)[0], ours)


def test_it_is_our_function_that_rotates(layer, monkeypatch):
    calls, x = [], inputs(layer)
    monkeypatch.setattr(layers, "rotate", lambda x, cos, sin: calls.append(x.shape) or plain_rotation(x, cos, sin))
    before = copy.deepcopy(layer)
    use_lean_layers(layer, CPU)
    layer(*x)
    assert len(calls) == 2
    before(*x)
    assert len(calls) == 2, "layers of other models of this process stay as they are"
    assert LlamaAttention.forward.__globals__["apply_rotary_pos_emb"] is apply_rotary_pos_emb


def test_rotations_in_other_precisions_are_computed_as_before(layer, monkeypatch):
    """What is rounded when is part of the numbers of a half precision."""
    layer, x = layer.bfloat16(), inputs(layer, torch.bfloat16)
    before = layer(*x)[0]
    monkeypatch.setattr(layers, "rotate", None)
    assert torch.equal(use_lean_layers(layer, CPU)(*x)[0], before)


class OwnAttention(LlamaAttention):
    """Its forward is that of another class."""


class ClosedAttention(LlamaAttention):
    def forward(self, *arguments, **options):
        return super().forward(*arguments, **options)  # super() is a closure


def test_a_class_that_inherits_the_formula_is_replaced(tiny):
    assert issubclass(type(use_lean_layers(attention_layer(tiny, OwnAttention), CPU)), OwnAttention)


# --------------------------------------------------------------------------------------------------------- gated MLPs


def mlp(kind=LlamaMLP, activation="silu", **options):
    return kind(
        LlamaConfig(hidden_size=16, intermediate_size=40, num_attention_heads=4, hidden_act=activation, **options)
    )


def storages(layer, x):
    """Where the gate's product was, and where the input of the last product is."""
    seen = {}
    layer.gate_proj.register_forward_hook(lambda _, __, output: seen.update(gate=output.data_ptr()))
    layer.down_proj.register_forward_pre_hook(lambda _, inputs: seen.update(last=inputs[0].data_ptr()))
    layer(x)
    return seen["gate"], seen["last"]


@pytest.mark.parametrize(
    ("activation", "has_bias", "dtype"), [("silu", False, torch.float32), ("gelu", True, torch.bfloat16)]
)
def test_numbers_of_an_mlp_are_those_of_transformers_bit_for_bit(activation, has_bias, dtype):
    plain = mlp(activation=activation, mlp_bias=has_bias).to(dtype)
    lean, x = use_lean_layers(copy.deepcopy(plain), CPU), torch.randn(2, 9, 16, dtype=dtype)
    assert type(lean) is not LlamaMLP
    assert isinstance(lean, LlamaMLP)
    assert list(lean.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(lean(x), plain(x))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(lean(x), plain(x))
    results = []
    for layer in (lean, plain):
        output = layer(x)
        output.square().sum().backward()
        results.append([output.detach(), *(parameter.grad for parameter in layer.parameters())])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


def test_without_gradients_products_are_written_over_and_with_them_kept():
    layer, x = use_lean_layers(mlp(), CPU), torch.randn(3, 16)
    with torch.no_grad():
        gate, last = storages(layer, x)
    assert gate == last
    gate, last = storages(layer, x)
    assert gate != last


def test_the_activation_is_that_of_the_layer_not_of_the_class():
    first, second = use_lean_layers(mlp(), CPU), use_lean_layers(mlp(activation="gelu"), CPU)
    assert type(first) is type(second)
    x = torch.randn(3, 16)
    with torch.no_grad():
        for layer, activation in ((first, nn.functional.silu), (second, nn.functional.gelu)):
            assert torch.equal(layer(x), layer.down_proj(activation(layer.gate_proj(x)) * layer.up_proj(x)))


class TwiceMLP(LlamaMLP):
    def forward(self, x):
        return 2 * super().forward(x)


class NormedMLP(LlamaMLP):
    """As BitNet's: a norm of its own, which happens to do nothing yet."""

    def __init__(self, config):
        super().__init__(config)
        self.norm = nn.Identity()


class GatedBlock(LlamaMLP):
    """The formula under another name: nobody promised that it is an MLP."""


class TiedMLP(LlamaMLP):
    """Its gate gives out what it holds."""

    def __init__(self, config):
        super().__init__(config)
        self.gate_proj = nn.Identity()


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        *((norm, kind) for kind in (GemmaRMSNorm, TwiceRMSNorm, Norm, BiasedRMSNorm)),
        *((mlp, kind) for kind in (TwiceMLP, NormedMLP, GatedBlock, TiedMLP)),
        *((attention_layer, kind) for kind in (GlmAttention, ClosedAttention)),
    ],
)
def test_layers_of_another_formula_stay(tiny, make, kind):
    assert of_neighbours is GlmAttention.forward.__globals__["apply_rotary_pos_emb"]
    made = attention_layer(tiny, kind) if make is attention_layer else make(kind)
    assert type(use_lean_layers(made, CPU)) is kind


# ------------------------------------------------------------------------------------------------------- the last MLP


IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
READ = torch.tensor([3, 4, 9, 5])


def load(folder):
    return load_policy(folder, device=CPU, compute_dtype=torch.float32).lm.base_model.double()


@pytest.fixture
def trunk(checkpoints):
    return load(str(checkpoints["qwen3"]))


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


def replace_forward(trunk):
    mlp = trunk.layers[-1].mlp
    plain = mlp.forward
    mlp.forward = lambda x: 2 * plain(x)


def recompute(trunk):
    checkpoint_layers(trunk.train())


def mix(trunk):
    """Behind the last MLP: it is tried before it is believed."""
    trunk.norm.register_forward_hook(lambda _, __, states: states.cumsum(1))


def balance(trunk):
    mlp = trunk.layers[-1].mlp
    mlp.__class__ = type("LlamaSparseMoeBlock", (type(mlp),), {})


def divide(trunk):
    trunk.layers[-1].unshard = lambda: None


@pytest.mark.parametrize("spoil", [replace_forward, recompute, mix, balance, divide])
def test_all_tokens_are_read_where(trunk, rows_of, spoil):
    spoil(trunk)
    assert everything(trunk, rows_of(trunk))


def test_all_tokens_are_read_where_products_are_compiled_for_each_shape_or_layers_are_compiled(trunk, rows_of):
    seen = rows_of(trunk.float())
    assert not everything(trunk, seen)
    with torch.autocast("cpu", torch.bfloat16):
        assert everything(trunk, seen)
    trunk.layers[-1].compile(backend="eager")
    assert layers._last_mlp(trunk) is None


def test_nearly_all_tokens_are_read_as_all(trunk, rows_of):
    assert everything(trunk, rows_of(trunk), torch.arange(int(12 * MOST_READ) + 1))
    assert not everything(trunk, rows_of(trunk), torch.arange(int(12 * MOST_READ)))


def test_an_mlp_that_refuses_rows(trunk, rows_of):
    def refuse(_, inputs):
        if inputs[0].dim() != 3:
            raise ValueError("three dimensions")

    trunk.layers[-1].mlp.register_forward_pre_hook(refuse)
    trunk.layers[-1].mlp.gate_proj.register_forward_pre_hook(refuse)
    with pytest.warns(UserWarning, match=r"computes all tokens in its last MLP, which is slower: .* three dimensions"):
        assert everything(trunk, rows_of(trunk))


def test_after_an_error_the_mlp_is_as_it_was(trunk):
    read_states(trunk, IDS, READ)
    mlp = trunk.layers[-1].mlp
    hook = mlp.down_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        read_states(trunk, IDS, READ)
    hook.remove()
    assert layers._READ.get() is None
    assert mlp(torch.zeros(1, 3, 32).double()).shape == (1, 3, 32)


def test_threads_and_copies_do_not_meet(trunk):
    """While one pass leaves tokens out, the model gives all states in another thread, and its copy in this one."""
    expected = hidden_states(trunk, IDS)
    read_states(trunk, IDS, READ)
    copied, mlp = copy.deepcopy(trunk), trunk.layers[-1].mlp
    with layers._only_for(mlp, READ), ThreadPoolExecutor() as threads:
        assert not torch.equal(hidden_states(trunk, IDS), expected)
        assert torch.equal(threads.submit(hidden_states, trunk, IDS).result(), expected)
        assert torch.equal(hidden_states(copied, IDS), expected)
    assert torch.equal(read_states(copied, IDS, READ), read_states(trunk, IDS, READ))
    assert list(trunk.state_dict()) == list(copied.state_dict())
