"""A matrix that embedding and head share has the gradient that torch gives it, bit for bit, and only one of its size."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from architectures import one_decoder
from heedful.data.batches import collate
from heedful.kernels.weights import TiedMatrix, UntrainedRows
from heedful.models import byte_tokenizer, load_policy
from heedful.models import policy as policy_module

TOKENIZER = byte_tokenizer()
PROMPTS = [TOKENIZER(text).input_ids for text in ("你好", "今天天气怎么样？", "a", "Hi! Hi! Hi!")]
RESPONSES = [[*TOKENIZER(text).input_ids, 1] for text in ("很好！", "晴，晴，晴", "🙂 ok, 当然", "")]


def plain(lm):
    """Torch's own gradients."""
    return contextlib.nullcontext(SimpleNamespace(weight=lm.get_output_embeddings().weight))


def policy_gradients(folder, compute_dtype, *, of_values=False):
    """After two backward passes, as of two micro-batches."""
    torch.manual_seed(1)  # of the value head's hidden layer
    policy = load_policy(folder, device=torch.device("cpu"), compute_dtype=compute_dtype, with_value_head=True).eval()
    torch.nn.init.constant_(policy.value_head.weight, 0.1)
    torch.nn.init.constant_(policy.value_head.out.weight, 0.1)
    for rows in (slice(0, 3), slice(1, 4)):
        batch = collate(PROMPTS[rows], RESPONSES[rows], pad_id=0)
        output = policy(batch.ids, batch.attention_mask, batch.response_mask)
        (output.values if of_values else output.logprobs).square().sum().backward()
    return {name: p.grad for name, p in policy.named_parameters()}


@pytest.mark.parametrize(
    ("decoder", "compute_dtype", "of_values"),
    [("gpt2", torch.float32, True), ("qwen3", torch.float32, False), ("qwen3", torch.bfloat16, False)],
    indirect=["decoder"],
)
def test_identity_every_gradient_of_a_policy_is_torchs_own(decoder, compute_dtype, of_values, monkeypatch):
    found = policy_gradients(decoder, compute_dtype, of_values=of_values)
    monkeypatch.setattr(policy_module, "TiedMatrix", plain)
    wanted = policy_gradients(decoder, compute_dtype, of_values=of_values)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient is found[name] is None or torch.equal(found[name], gradient), name


class Made(TorchDispatchMode):
    """How many tensors of a shape operations make, views and what is done in place left out."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape == self.shape and not func.is_view:
            self.count += not func._schema.is_mutable
        return result


@one_decoder
def test_a_policys_pass_makes_one_gradient_of_the_matrix(decoder, monkeypatch):
    """And the product that is added to it, of all 264 words at once; two more by torch."""
    policy = load_policy(decoder, device=torch.device("cpu"), compute_dtype=torch.float32)
    batch, counts = collate([[5]], [[6, 7]], pad_id=0), []
    for lm_part in (TiedMatrix, plain):
        monkeypatch.setattr(policy_module, "TiedMatrix", lm_part)
        output = policy(batch.ids, batch.attention_mask, batch.response_mask)
        policy.zero_grad()
        with Made(policy.lm.get_input_embeddings().weight.shape) as made:
            output.logprobs.sum().backward()
        counts.append(made.count)
    assert counts == [2, 4]


class Tied(nn.Module):
    """An embedding and a head with one matrix, or two."""

    def __init__(self, embedding, head=None):
        super().__init__()
        self.embedding, self.head = embedding, nn.Linear(4, 10, bias=False)
        self.head.weight = embedding.weight if head is None else head

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.head


IDS = torch.tensor([[3, 3, 5], [0, 3, 9]])
LOSSES = {
    "embedding and head": lambda states, weight: (states @ weight.t()).square().sum(),
    "head alone": lambda states, weight: (states.detach() @ weight.t()).square().sum(),
    "embedding alone": lambda states, _weight: states.square().sum(),
}


def gradient(tied, loss, lm_part):
    tied.zero_grad()
    for ids in (IDS, (IDS + 4) % 10):
        with lm_part(tied) as matrix:
            loss(tied.embedding(ids), matrix.weight).backward()
    return tied.embedding.weight.grad


@pytest.mark.parametrize("loss", LOSSES)
def test_identity_whatever_has_part_in_the_loss(loss):
    tied = Tied(nn.Embedding(10, 4))
    wanted = gradient(tied, LOSSES[loss], plain)
    assert torch.equal(gradient(tied, LOSSES[loss], TiedMatrix), wanted)
    assert (wanted[1:3] == 0).all() == (loss == "embedding alone")


def test_an_embedding_that_is_read_twice():
    """Such as for two texts, before one backward pass: each reading gives its part."""
    tied = Tied(nn.Embedding(10, 4))
    found = []
    for lm_part in (plain, TiedMatrix):
        tied.zero_grad()
        with lm_part(tied) as matrix:
            states = tied.embedding(IDS) + tied.embedding(IDS.flip(0))
            (states @ matrix.weight.t()).square().sum().backward()
        found.append(tied.embedding.weight.grad)
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


class Scaled(nn.Embedding):
    def forward(self, ids):
        return 2 * super().forward(ids)


def with_noise(embedding):
    embedding.register_forward_hook(lambda _module, _inputs, rows: rows + 1)
    return embedding


OTHERS = {
    "another matrix": lambda: Tied(nn.Embedding(10, 4), head=nn.Parameter(torch.randn(10, 4))),
    "a frozen matrix": lambda: Tied(nn.Embedding(10, 4).requires_grad_(False)),
    "an embedding that scales": lambda: Tied(Scaled(10, 4)),
    "a row that does not learn": lambda: Tied(nn.Embedding(10, 4, padding_idx=3)),
    "rows weighed by their count": lambda: Tied(nn.Embedding(10, 4, scale_grad_by_freq=True)),
    "rows that are shortened": lambda: Tied(nn.Embedding(10, 4, max_norm=0.5)),
    "a gradient of read rows": lambda: Tied(nn.Embedding(10, 4, sparse=True)),
    "rows that a hook changes": lambda: Tied(with_noise(nn.Embedding(10, 4))),
}


def test_rows_that_nobody_trained_are_held_and_the_gradient_is_still_one():
    """What torch gives the head at such a row, and nothing of what was read."""
    torch.manual_seed(3)
    embedding, row = nn.Embedding(10, 4), int(IDS.flatten()[0])
    embedding.weight.data[row] = 0
    head = Tied(embedding)
    with TiedMatrix(head) as matrix:
        (head.embedding(IDS) @ matrix.weight.t() - 1).square().sum().backward()
    wanted, embedding.weight.grad = embedding.weight.grad, None
    of_rows = embedding(IDS).detach()
    (of_rows @ embedding.weight.t() - 1).square().sum().backward()
    of_head, embedding.weight.grad = embedding.weight.grad[row].clone(), None
    embedding.register_forward_hook(UntrainedRows(torch.tensor([row]), "m"))
    with TiedMatrix(head) as matrix:
        rows = head.embedding(IDS)
    with pytest.warns(UserWarning, match=f"reads token {row}, whose embedding is"):
        (rows @ matrix.weight.t() - 1).square().sum().backward()
    assert matrix.weight is not embedding.weight
    torch.testing.assert_close(embedding.weight.grad[row], of_head)
    others = [i for i in range(10) if i != row]
    torch.testing.assert_close(embedding.weight.grad[others], wanted[others])


@pytest.mark.parametrize("kind", OTHERS)
def test_other_embeddings_are_left_alone(kind):
    tied = OTHERS[kind]()
    with TiedMatrix(tied) as matrix:
        rows = tied.embedding(IDS)
    assert matrix.weight is tied.head.weight
    assert "TiedRows" not in str(rows.grad_fn)


def test_nothing_is_left_on_the_embedding():
    """Nor anything done without gradients."""
    tied = Tied(nn.Embedding(10, 4))
    with TiedMatrix(tied) as matrix, torch.no_grad():
        tied.embedding(IDS)
    assert matrix.weight is tied.head.weight
    with TiedMatrix(tied), contextlib.suppress(IndexError):
        tied.embedding(IDS + 10)
    assert not tied.embedding._forward_hooks
