"""Attention by plain products against torch's fused kernel, alone and inside the models that use it."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from architectures import one_decoder
from heedful.data.chat import RewardInputs
from heedful.kernels import attention as attention_module
from heedful.kernels.attention import ATTENTION, attention, use_attention
from heedful.models import byte_tokenizer, load_causal_lm, load_reward_model, save_reward_model

CPU = torch.device("cpu")
ROWS, HEADS, SIZE = 3, 4, 8
SHAPES = {"one query": (1, 11), "several": (6, 11), "square": (7, 7)}
CLOSE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-7}
"""What the order of sums may change; in bfloat16 the rounding of the attention weights, as well."""


def states(queries, keys, *, kv_heads=HEADS, dtype=torch.float32, value_size=SIZE):
    """Queries, keys and values that learn, and the module that attends with them."""
    shapes = (HEADS, queries, SIZE), (kv_heads, keys, SIZE), (kv_heads, keys, value_size)
    tensors = [torch.randn(ROWS, *shape, dtype=dtype, requires_grad=True) for shape in shapes]
    return SimpleNamespace(num_key_value_groups=HEADS // kv_heads, is_causal=True), tensors


def masks(queries, keys, dtype=torch.float32):
    """Rows with 0, 2 and 5 keys of padding in front, as each kind of mask."""
    attended = (torch.arange(keys) >= torch.tensor([[0], [2], [5]]))[:, None, None].expand(ROWS, 1, queries, keys)
    additive = torch.zeros(attended.shape, dtype=dtype).masked_fill(~attended, -torch.inf)
    penalty = torch.linspace(-3, 3, keys, dtype=dtype).expand(attended.shape)
    return {"none": None, "boolean": attended, "additive": additive, "one row for all": penalty[:1]}


@pytest.fixture
def always(monkeypatch):
    """Plain products also where they are no faster, so that float32 and float64 are compared at all shapes."""
    monkeypatch.setattr(attention_module, "_is_faster", lambda query, key: True)


def both(module, tensors, mask, **options):
    """Results and gradients of the plain products and of the fused attention."""
    found = []
    for function in (attention, sdpa_attention_forward):
        output, nothing = function(module, *tensors, mask, **options)
        assert nothing is None
        assert output.is_contiguous()
        upstream = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
        found.append([output.detach(), *torch.autograd.grad(output, tensors, upstream)])
    return found


def check_close(found, tolerance):
    for ours, fused in zip(*found, strict=True):
        assert ours.dtype == fused.dtype
        scale = float(fused.abs().max())
        torch.testing.assert_close(ours, fused, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "kv_heads"), [(torch.float64, 2), (torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.usefixtures("always")
def test_it_is_the_fused_attention_and_so_are_its_gradients(dtype, shape, kv_heads):
    for mask in masks(*SHAPES[shape], dtype).values():
        module, tensors = states(*SHAPES[shape], kv_heads=kv_heads, dtype=dtype)
        check_close(both(module, tensors, mask), CLOSE[dtype])


@pytest.mark.usefixtures("always")
def test_every_option_is_heeded():
    """An argument goes before the module's own word, and a module that has none is causal."""
    module, tensors = states(6, 11, dtype=torch.float64)
    for options in ({"is_causal": False}, {"is_causal": True}, {"scaling": 0.9}, {"scaling": None}):
        for module.is_causal in (True, False):
            check_close(both(module, tensors, None, **options), 1e-12)
        del module.is_causal
        check_close(both(module, tensors, None, **options), 1e-12)


@pytest.mark.parametrize("queries", [1, 6])
@pytest.mark.usefixtures("always")
def test_a_row_that_may_attend_to_nothing_is_finite(queries):
    """A whole batch must not turn into NaN for one row of padding; the other rows do not notice."""
    module, tensors = states(queries, 6)
    mask = torch.ones(ROWS, 1, queries, 6, dtype=torch.bool)
    everything = attention(module, *tensors, mask)[0]
    mask[1] = False
    output = attention(module, *tensors, mask)[0]
    assert output.isfinite().all()
    assert torch.equal(output[[0, 2]], everything[[0, 2]])
    gradients = torch.autograd.grad(output.sum(), tensors)
    assert all(gradient.isfinite().all() for gradient in gradients)


BEYOND = {
    "masks by head": {"attention_mask": torch.randn(ROWS, HEADS, 1, 11)},
    "biases of positions": {"position_bias": torch.randn(1, HEADS, 1, 11)},
    "dropout": {"dropout": 0.5},
}


@pytest.mark.parametrize("kind", BEYOND)
def test_what_only_the_fused_attention_knows_is_left_to_it(kind):
    """Bit for bit, from the same random numbers; and it does change the result."""
    module, tensors = states(1, 11)
    options = {"attention_mask": None} | BEYOND[kind]
    results = []
    for function in (attention, sdpa_attention_forward):
        torch.manual_seed(5)
        results.append(function(module, *tensors, **options)[0])
    assert torch.equal(*results)
    assert (results[0] - attention(module, *tensors, None)[0]).abs().max() > 0.1


def test_capped_scores_are_refused_as_by_the_fused_attention():
    """Gemma 2 caps them: without the cap its numbers would be silently wrong."""
    module, tensors = states(1, 11)
    with pytest.raises(ValueError, match="does not support `softcap`"):
        attention(module, *tensors, None, softcap=30.0)


def test_many_scores_are_left_to_the_fused_attention(monkeypatch):
    """It holds none of them. A single query stays, and so does everything below the limit; float32 is left to it too."""
    module, tensors = states(6, 6)
    fused, halves = sdpa_attention_forward(module, *tensors, None)[0], [x.bfloat16() for x in tensors]
    fused_halves = sdpa_attention_forward(module, *halves, None)[0]
    assert torch.equal(attention(module, *tensors, None)[0], fused)
    assert not torch.equal(attention(module, *halves, None)[0], fused_halves)
    monkeypatch.setattr(attention_module, "MOST_SCORES", ROWS * HEADS * 6 * 6)
    assert not torch.equal(attention(module, *halves, None)[0], fused_halves)
    monkeypatch.setattr(attention_module, "MOST_SCORES", ROWS * HEADS * 6 * 6 - 1)
    assert torch.equal(attention(module, *halves, None)[0], fused_halves)
    monkeypatch.setattr(attention_module, "MOST_SCORES", 0)
    single = [tensors[0][:, :, :1].bfloat16(), *halves[1:]]
    assert not torch.equal(attention(module, *single, None)[0], sdpa_attention_forward(module, *single, None)[0])


# ------------------------------------------------------------------------------------------------------------- models

IDS = byte_tokenizer()(["今天天气怎么样？", "Hello, world! Hello, hello"], return_tensors="pt", padding=True)


def logits_and_gradients(model, compute_dtype):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=compute_dtype == torch.bfloat16):
        logits = model(**IDS).logits.float()
    (logits.square() * IDS["attention_mask"].unsqueeze(-1)).mean().backward()
    return logits[IDS["attention_mask"].bool()], {name: p.grad for name, p in model.named_parameters()}


@one_decoder
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_a_language_model_is_the_same_with_it(decoder, compute_dtype):
    """With padding on the left. In bfloat16 it is as near the numbers of float32 as the fused attention."""
    model, plain = load_causal_lm(decoder).eval(), AutoModelForCausalLM.from_pretrained(decoder, dtype=torch.float32)
    assert model.config._attn_implementation == ATTENTION
    assert plain.config._attn_implementation == "sdpa"
    ours, our_gradients = logits_and_gradients(model, compute_dtype)
    fused, fused_gradients = logits_and_gradients(plain, compute_dtype)
    if compute_dtype == torch.float32:
        assert torch.equal(ours, fused)
        return
    plain.zero_grad()
    exact, gradients = logits_and_gradients(plain, torch.float32)
    assert not torch.equal(ours, fused), "the plain products were not used"
    assert (ours - exact).norm() < 1.2 * (fused - exact).norm()
    distances = torch.tensor(
        [[(found[name] - gradients[name]).norm() for name in gradients] for found in (our_gradients, fused_gradients)]
    )
    assert distances[0].norm() < 1.2 * distances[1].norm()


@pytest.mark.parametrize(
    ("architecture", "compute_dtype"),
    [("qwen3", torch.float32), ("qwen3", torch.bfloat16), ("deberta-v2", torch.float32)],
)
def test_a_reward_model_scores_as_before(checkpoints, tmp_path, architecture, compute_dtype):
    """Against the folder as plain transformers loads it; DeBERTa attends in its own way and stays as it is."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoints[architecture])
    model = load_reward_model(
        str(checkpoints[architecture]), tokenizer, device=CPU, compute_dtype=compute_dtype,
        seed=None if architecture == "deberta-v2" else 3,
    )  # fmt: skip
    name = model.classifier.config._attn_implementation
    assert name == ("eager" if architecture == "deberta-v2" else ATTENTION)
    save_reward_model(model, tokenizer, tmp_path)
    assert ATTENTION not in (tmp_path / "config.json").read_text(encoding="utf-8"), "others do not know it"
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32)
    row = RewardInputs(tokenizer).encode("今天天气怎么样？", "晴，二十度左右。")
    inputs = {key: torch.tensor([value]) for key, value in row.items()}
    with torch.no_grad():
        score, exact = model([row])[0], plain(**inputs).logits[0, 0]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=compute_dtype == torch.bfloat16):
            fused = plain(**inputs).logits[0, 0].float()
    if compute_dtype == torch.float32:
        torch.testing.assert_close(score, exact, rtol=1e-5, atol=1e-5)
    else:
        torch.testing.assert_close(score, fused, rtol=0.05, atol=0.05 * float(exact.abs()) + 0.02)


def test_other_attentions_stay_as_they_are(checkpoints):
    model = AutoModelForCausalLM.from_pretrained(checkpoints["llama"], attn_implementation="eager")
    assert use_attention(model).config._attn_implementation == "eager"
