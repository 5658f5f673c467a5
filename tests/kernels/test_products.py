"""Float32 products by oneDNN: the numbers and gradients of plain ones, and where each is used."""

import importlib

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from cases import pairs_often
from heedful import make_tiny_model
from heedful.configs.options import LoRAOptions
from heedful.kernels.cpu.products import FastConv1D, FastLinear, is_plain_linear, linear, product, use_fast_products
from heedful.kernels.head_logprobs import head_logprobs
from heedful.kernels.weights import inference_copy
from heedful.models import add_adapters, load_policy, load_reward_model, load_tokenizer, load_value_model

MODULE = importlib.import_module("heedful.kernels.cpu.products")
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"),
    reason="this torch has no oneDNN",
)


@pytest.fixture(autouse=True)
def on_such_a_processor(monkeypatch):
    """oneDNN multiplies everywhere; only how fast depends on the processor, and on a size that takes tests too long."""
    monkeypatch.setattr(MODULE, "USES_ONEDNN", True)
    monkeypatch.setattr(MODULE, "SMALLEST_PRODUCT", 2**20)


class Products(TorchDispatchMode):
    """Remembers what oneDNN multiplied: the matrix on the right, by size and strides."""

    def __init__(self):
        super().__init__()
        self.right = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.mkldnn._linear_pointwise.default:
            self.right.append((tuple(args[1].shape), args[1].stride()))
        return function(*args, **(kwargs or {}))


def is_dense(shape, strides):
    (rows, columns), (down, right) = shape, strides
    return (down, right) in ((columns, 1), (1, rows))


def error(numbers, exact):
    """The largest, as a share of the largest number."""
    return float((numbers.double() - exact).abs().max() / exact.abs().max())


def as_exact_as_plain(numbers, plain, exact):
    assert error(numbers, exact) <= max(4 * error(plain, exact), 1e-6)


def numbers_and_gradients(function, tensors, upstream):
    """What ``function`` makes of leaves, and the gradient of each."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    numbers = function(*leaves)
    numbers.backward(upstream.to(numbers.dtype))
    return [numbers.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize(
    ("sides", "is_biased", "is_transposed"),
    [((256, 256, 128), True, False), ((128, 96, 768), False, True), ((1000, 520, 17), True, True)],
)
def test_numbers_and_gradients_are_those_of_plain_products(sides, is_biased, is_transposed):
    """Against float64: no further from it than torch's own float32."""
    rows, terms, columns = sides
    x, upstream = torch.randn(2, rows // 2, terms), torch.randn(2, rows // 2, columns)
    weight = torch.randn(terms, columns) if is_transposed else torch.randn(columns, terms)
    tensors = [x, weight, torch.randn(columns)][: 3 if is_biased else 2]

    def by(multiply):
        return lambda x, weight, *bias: multiply(x, weight.t() if is_transposed else weight, *bias)

    with Products() as products:
        ours = numbers_and_gradients(by(linear), tensors, upstream)
    plain = numbers_and_gradients(by(nn.functional.linear), tensors, upstream)
    exact = numbers_and_gradients(by(nn.functional.linear), [tensor.double() for tensor in tensors], upstream)
    assert len(products.right) == 3  # forward, and both gradients
    assert all(is_dense(*right) for right in products.right)
    for one, other, true in zip(ours, plain, exact, strict=True):
        assert one.shape == true.shape
        as_exact_as_plain(one, other, true)


def test_a_gradient_that_nobody_wants_is_not_computed():
    x, weight = torch.randn(256, 256), torch.randn(256, 256, requires_grad=True)
    with Products() as products:
        linear(x, weight).sum().backward()
    assert len(products.right) == 2
    with Products() as products, torch.no_grad():
        assert not linear(x, weight).requires_grad
    assert len(products.right) == 1


@pytest.mark.parametrize("learns", ["x", "weight", "bias"])
def test_nothing_is_kept_for_a_gradient_that_nobody_wants(learns):
    """A frozen layer below adapters keeps only its matrix, as torch's own does, and its input may be overwritten."""
    tensors = {"x": torch.randn(256, 256), "weight": torch.randn(256, 256), "bias": torch.randn(256)}
    tensors[learns].requires_grad_()

    def kept(multiply):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.data_ptr()) or t, lambda t: t):
            multiply(**tensors).sum().backward()
        names = {tensor.data_ptr(): name for name, tensor in tensors.items()}
        return {names[pointer] for pointer in sizes if pointer in names}

    def plain(x, weight, bias):
        return nn.functional.linear(x, weight, bias)

    assert kept(linear) == kept(plain) == {"x": {"weight"}, "weight": {"x"}, "bias": set()}[learns]


def test_a_head_with_more_words_than_fit_one_product(monkeypatch):
    """The gradient of its matrix is computed in parts, of a matrix that is neither contiguous nor transposed."""
    torch.manual_seed(2)
    hidden, weight, ids = torch.randn(64, 48), torch.randn(9000, 48) / 7, torch.arange(64)

    def gradients(dtype):
        leaves = [tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in (hidden, weight)]
        head_logprobs(*leaves, ids)[0].sum().backward()
        return [leaf.grad for leaf in leaves]

    with Products() as products:
        ours = gradients(torch.float32)
    assert len(products.right) == 4  # forward, the states' gradient, two parts of the matrix's
    assert all(is_dense(*right) for right in products.right)
    exact = gradients(torch.float64)
    monkeypatch.setattr(MODULE, "USES_ONEDNN", False)
    for one, plain, true in zip(ours, gradients(torch.float32), exact, strict=True):
        as_exact_as_plain(one, plain, true)


def columns_of(rows, columns):
    """Some columns of a wider matrix: neither it nor its transposed is contiguous."""
    return torch.randn(rows, columns + 100)[:, 30 : 30 + columns]


LAYOUTS = {
    "as it is": torch.randn,
    "transposed": lambda rows, columns: torch.randn(columns, rows).t(),
    "columns": columns_of,
    "transposed columns": lambda rows, columns: columns_of(columns, rows).t(),
    "every other column": lambda rows, columns: torch.randn(rows, 2 * columns)[:, ::2],
}


@pytest.mark.parametrize("left", LAYOUTS)
def test_matrices_in_any_order_of_memory(left):
    """oneDNN would multiply by one that is neither contiguous nor transposed, but a thousand times slower."""
    for right, make in LAYOUTS.items():
        for rows, columns in ((512, 96), (96, 512)):
            a, b = LAYOUTS[left](rows, 256), make(256, columns)
            with Products() as products:
                ours = product(a, b)
            assert len(products.right) == 1
            assert is_dense(*products.right[0]), right
            as_exact_as_plain(ours, a @ b, a.double() @ b.double())


@pytest.mark.parametrize(
    ("why", "make"),
    [
        ("few multiplications", lambda: (torch.randn(64, 64), torch.randn(64, 64))),
        ("one row", lambda: (torch.randn(1, 1024), torch.randn(1024, 1024))),
        ("one term", lambda: (torch.randn(1024, 1), torch.randn(1024, 1))),
        ("float64", lambda: (torch.randn(256, 256).double(), torch.randn(256, 256).double())),
        ("bfloat16", lambda: (torch.randn(256, 256).bfloat16(), torch.randn(256, 256).bfloat16())),
    ],
)
def test_what_gains_nothing_is_left_to_torch(why, make):
    x, weight = make()
    with Products() as products:
        assert torch.equal(linear(x, weight), nn.functional.linear(x, weight)), why
        assert torch.equal(product(x, weight.t()), x @ weight.t()), why
    assert products.right == []


@pytest.mark.parametrize(("shape", "count"), [((64, 1, 256), 1), ((1, 64, 256), 0), ((64, 256), 0)])
def test_sampling_has_the_same_sizes_at_every_step(monkeypatch, shape, count):
    monkeypatch.undo()
    monkeypatch.setattr(MODULE, "USES_ONEDNN", True)
    with Products() as products:
        linear(torch.randn(shape), torch.randn(768, 256))
    assert len(products.right) == count


def test_under_autocast_its_precision_holds():
    x, weight = torch.randn(256, 256), torch.randn(256, 256)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16


def test_other_processors_go_on_as_before(monkeypatch):
    monkeypatch.setattr(MODULE, "USES_ONEDNN", False)
    x, weight = torch.randn(256, 256), torch.randn(256, 256)
    with Products() as products:
        linear(x, weight)
        product(x, weight)
    assert products.right == []
    model = nn.Sequential(nn.Linear(4, 4))
    assert type(use_fast_products(model, CPU, torch.float32)[0]) is nn.Linear


@pytest.mark.parametrize(
    ("name", "has_avx512", "slow"),
    [
        ("AMD EPYC 9654", True, True),
        ("AMD EPYC 7763", False, False),
        ("Intel(R) Xeon(R) Platinum 8280", True, False),
        ("", True, False),
    ],
)
def test_processors_at_half_speed(monkeypatch, name, has_avx512, slow):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": name, "avx512_f": has_avx512})
    assert MODULE._multiplies_at_half_speed() == (slow and torch.backends.mkl.is_available())


# ---- in models ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models whose products are large enough: by architecture."""
    root = tmp_path_factory.mktemp("模型")
    for architecture in ("gpt2", "qwen3", "deberta-v2"):
        make_tiny_model(architecture, root / architecture, hidden_size=256, num_layers=1, max_length=128)
    return root


IDS = torch.arange(4 * 64).view(4, 64) % 250
MASK = torch.ones_like(IDS, dtype=torch.bool)


def loss_and_gradients(policy):
    outputs = policy(IDS, MASK, MASK[:, 1:])
    outputs.logprobs.sum().backward()
    return outputs.logprobs.detach(), {
        name: parameter.grad.clone() for name, parameter in policy.lm.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize(("rank", "architecture"), pairs_often([0, 4], ["gpt2", "qwen3"], [(0, "gpt2"), (4, "qwen3")]))
def test_a_policy_learns_the_same(monkeypatch, folders, architecture, rank):
    def run(uses_onednn):
        monkeypatch.setattr(MODULE, "USES_ONEDNN", uses_onednn)
        policy = load_policy(str(folders / architecture), device=CPU, compute_dtype=torch.float32)
        if rank:
            add_adapters(policy.lm, LoRAOptions(lora_rank=rank), base=str(folders / architecture), seed=3)
        with Products() as products:
            return *loss_and_gradients(policy), len(products.right)

    (logprobs, gradients, count), (plain_logprobs, plain_gradients, plain_count) = run(True), run(False)
    assert count >= 8
    assert plain_count == 0
    torch.testing.assert_close(logprobs, plain_logprobs, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == plain_gradients.keys() != set()
    for name, gradient in gradients.items():
        plain = plain_gradients[name]
        assert error(gradient, plain.double()) < 1e-5 or (gradient - plain).abs().max() < 1e-6, name


def test_the_same_files_are_written(monkeypatch, folders, tmp_path):
    for name, uses_onednn in (("快", True), ("plain", False)):
        monkeypatch.setattr(MODULE, "USES_ONEDNN", uses_onednn)
        policy = load_policy(str(folders / "qwen3"), device=CPU, compute_dtype=torch.float32)
        assert isinstance(policy.lm.get_output_embeddings(), FastLinear) == uses_onednn
        assert is_plain_linear(policy.lm.get_output_embeddings())
        policy.lm.save_pretrained(tmp_path / name)
    written = {file.name: file.read_bytes() for file in (tmp_path / "快").iterdir()}
    assert written == {file.name: file.read_bytes() for file in (tmp_path / "plain").iterdir()}
    AutoModelForCausalLM.from_pretrained(tmp_path / "快")


def test_every_kind_of_model_has_them(folders):
    options = {"device": CPU, "compute_dtype": torch.float32}
    value_model = load_value_model(str(folders / "gpt2"), **options)
    assert any(isinstance(module, FastConv1D) for module in value_model.modules())
    folder = str(folders / "deberta-v2")
    reward_model = load_reward_model(folder, load_tokenizer(folder), seed=0, **options)
    assert any(isinstance(module, FastLinear) for module in reward_model.modules())
    policy = load_policy(str(folders / "qwen3"), **options)
    copied = inference_copy(policy.lm, torch.float32)
    assert isinstance(copied.get_output_embeddings(), FastLinear)


def test_half_precision_is_left_as_it_is(folders):
    policy = load_policy(str(folders / "qwen3"), device=CPU, compute_dtype=torch.bfloat16)
    assert not any(isinstance(module, FastLinear | FastConv1D) for module in policy.modules())


@pytest.mark.exhaustive
@pytest.mark.parametrize("learns", [True, False])
def test_texts_of_every_length_are_compiled_once(learns):
    """Both libraries' sizes are one compiled code: which of them multiplies is decided when it runs."""
    model = use_fast_products(nn.Sequential(nn.Linear(96, 288), nn.Linear(288, 96)), CPU, torch.float32)
    counter = importlib.import_module("torch._dynamo.testing").CompileCounter()
    compiled = torch.compile(model, backend=counter, dynamic=True, fullgraph=True)
    with torch.set_grad_enabled(learns):
        for rows in (2, 5, 17, 30, 60, 200, 500, 1000):  # with the sizes of tests both libraries multiply
            compiled(torch.randn(rows, 96))
    assert counter.frame_count == 1
