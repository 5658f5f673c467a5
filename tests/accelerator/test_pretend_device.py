"""The pretend accelerator itself: what it refuses, what it counts, and that its numbers are the CPU's."""

import copy
import re
from functools import partial

import pytest
import torch
from pretend_device import Counts, Module, phase, phases
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

DEVICE = "pretend"


def both(compute):
    """What ``compute(device)`` gives on the CPU and on the device, each with the same random numbers."""
    results = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        results.append([x.detach().cpu().clone() for x in compute(device)])
    return results


def here(*shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


def there(*shape):
    return here(*shape).to(DEVICE)


# What it refuses


MIXED = {
    "add": lambda: there(3) + here(3),
    "add to the host's": lambda: here(3).add_(there(3)),
    "a number of the device": lambda: here(3) * there(1).sum(),
    "matrix product": lambda: there(2, 3) @ here(3, 2),
    "cat": lambda: torch.cat([there(2), here(2)]),
    "stack of numbers": lambda: torch.stack([there(1).sum(), here(1).sum()]),
    "where": lambda: torch.where(there(3) > 1, here(3), 0.0),
    "gather": lambda: there(3).gather(0, torch.tensor([0])),
    "embedding": lambda: F.embedding(torch.tensor([0]), there(3, 2)),
    "index of the device": lambda: here(3)[torch.tensor([0], device=DEVICE)],
    "write values of the host": lambda: there(3).index_put_((torch.tensor([0, 1], device=DEVICE),), here(2)),
    "attention": lambda: F.scaled_dot_product_attention(there(1, 1, 2, 2), here(1, 1, 2, 2), here(1, 1, 2, 2)),
    "layer": lambda: nn.Linear(2, 2)(there(2)),
    "optimizer": lambda: torch._fused_adamw_([there(2)], [here(2)], [there(2)], [there(2)], [], [there(1)], lr=1.0, beta1=0.9,
                                             beta2=0.9, weight_decay=0.0, eps=1.0, amsgrad=False, maximize=False),
}  # fmt: skip


def test_what_cuda_refuses_is_refused():
    for name, mix in MIXED.items():
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device") as refused:
            mix()
        assert "pretend:0 and cpu" in str(refused.value), name
    for read in (lambda x: x.numpy(), lambda x: torch.empty(2).numpy() + x.__array__()):
        with pytest.raises(
            TypeError, match=r"can't convert pretend:0 device type tensor to numpy\. Use Tensor\.cpu\(\)"
        ):
            read(there(2))
    with pytest.raises(RuntimeError, match="'lengths' argument should be a 1D CPU int64 tensor"):
        pack_padded_sequence(there(2, 3, 4), torch.tensor([3, 1], device=DEVICE))
    for draw in (
        lambda g: torch.rand(2, device=DEVICE, generator=g),
        lambda g: torch.multinomial(there(3), 1, generator=g),
        lambda g: there(2).bernoulli_(generator=g),
    ):
        with pytest.raises(RuntimeError, match="Expected a 'pretend' device type for generator but found 'cpu'"):
            draw(torch.Generator())
        assert draw(torch.Generator(DEVICE).manual_seed(1)).device.type == DEVICE


def test_what_cuda_takes_is_taken():
    assert (there(3) + torch.tensor(2.0)).tolist() == [3, 4, 5]
    assert torch.where(there(2) > 1, torch.tensor(1.0), torch.tensor(0.0)).tolist() == [0, 1]
    assert there(2).masked_fill(there(2) > 1, torch.tensor(7.0)).tolist() == [1, 7]
    for device in ("cpu", DEVICE):
        rows = torch.tensor([(there(2).half()[1], 3), there(2)], device=device)
        assert (rows.device.type, rows.dtype, rows.tolist()) == (device, torch.float32, [[2, 3], [1, 2]])
    assert torch.tensor([there(1).half()[0]]).dtype == torch.float16
    assert there(3, 2)[[2, 0]].tolist() == [[5, 6], [1, 2]]
    x = there(3)
    x[[0]] = 7.0
    assert x.tolist() == [7, 2, 3]
    assert torch.histc(torch.tensor([1, 1, 2], dtype=torch.int32, device=DEVICE), 2, 1, 2).tolist() == [2, 1]
    assert f"{there(1).sum() + 0.5:.3f} {there(1).sum()}" == "1.500 1.0"
    assert f"{there(2)}" == str(there(2)) == "DeviceTensor([1.0, 2.0], device='pretend:0', dtype=torch.float32)"
    with pytest.raises(TypeError, match="unsupported format string"):
        f"{there(2):.3f}"


# What it counts


WAITING = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "float": lambda x: float(x[0]),
    "nonzero": lambda x: x.nonzero(),
    "boolean index": lambda x: x[x > 1],
    "boolean index to write": lambda x, values: x.index_put_((x > 1,), values),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "copy_": lambda x: torch.empty(3).copy_(x),
    "unpinned": lambda x: torch.empty(3).copy_(x, non_blocking=True),
    "unique": lambda x: x.unique(),
    "equal": lambda x: x.equal(x),
    "allclose": lambda x: x.allclose(x),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "linalg.inv": lambda x: torch.linalg.inv(x.diag()),
    "linalg.solve": lambda x: torch.linalg.solve(x.diag(), x),
    "linalg.cholesky": lambda x: torch.linalg.cholesky(x.diag()),
    "masked_select": lambda x: x.masked_select(x > 1),
    "gradient of masked_scatter": lambda x: torch.ops.aten.masked_scatter_backward(x, x > 1, [2]),
    "where of a number of the host": lambda x: torch.where(x > 1, torch.tensor(1.0), x),
    "print": str,
    "f-string": lambda x: f"{x}",
    "f-string of a number": lambda x: f"{x.sum():.3f}",
    "tensor from a number of the device": lambda x: torch.tensor([[x[0], 1.0]]),
    "upload": lambda x: x.copy_(here(3)),
    "tensor": lambda _x: torch.tensor([1.0], device=DEVICE),
    "event": lambda _x: Module.Event().synchronize(),
    "synchronize": lambda _x: torch.accelerator.synchronize(),
}
FREE = {
    "arithmetic": lambda x: (x * 2 - x).softmax(0).sum(),
    "write where": lambda x: x.masked_fill_(x > 1, 0.0),
    "write by a mask": lambda x: x.__setitem__(x > 1, 0.0),
    "upload": lambda x: here(3).to(x.device, non_blocking=True),
    "download": lambda x: x.to("cpu", non_blocking=True),
    "factory": lambda x: torch.arange(3, device=x.device) + torch.zeros_like(x),
    "dtype": lambda x: x.to(torch.float64),
    "repeat_interleave of known size": lambda x: x.repeat_interleave(x.long(), output_size=6) + x.repeat_interleave(2),
    "linalg without a check": lambda x: torch.linalg.inv_ex(x.diag()),
    "shape": lambda x: (x.shape, x.stride(), x.device, x.data_ptr(), len(x)),
}


def test_each_wait_is_counted_once_and_nothing_else():
    for name, wait in WAITING.items():
        x, values = there(3), there(2)
        with phase(name) as counts:
            wait(x, values) if "write" in name else wait(x)
        assert counts.synchronisations.total() == 1, (name, counts.synchronisations)
        assert re.search(r"test_pretend_device\.py:\d+", next(iter(counts.places)))
    for name, work in FREE.items():
        x = there(3)
        with phase(f"free: {name}") as counts:
            work(x)
        assert not counts.synchronisations, (name, counts.synchronisations)


def test_copies_are_counted_by_direction_and_bytes():
    """A mask's True positions are looked up on the host, and copied for each of its dimensions. Phases nest and go on."""
    with phase("copies") as counts:
        x = here(10).to(DEVICE)
        x.to("cpu", torch.float64)
        x.double().tolist()
        x.clone()
    assert counts.copies == {"to device": 1, "to host": 2}
    assert counts.bytes == {"to device": 40, "to host": 160}
    x, values, index, mask = there(3, 2), there(5), torch.tensor([2]), here(3, 2) > 1
    for read, copies, size in (
        (lambda: x[index], 1, 8),
        (lambda: x[mask], 2, 80),
        (lambda: x.index_put_((mask,), values), 2, 80),
        (lambda: x.__setitem__(mask, 1.0), 2, 80),
    ):
        with phase("index") as counts:
            read()
        assert counts.synchronisations == {"copy to device": copies}
        assert counts.bytes == {"to device": size}
        phases.clear()
    with phase("outer") as outer:
        for _ in range(2):
            with phase("inner"):
                there(1).item()
        there(1).item()
    assert phases["inner"].synchronisations["item"] == 2
    assert outer.synchronisations["item"] == 3
    assert Counts().synchronisations == {}


def test_memory_is_alive_as_long_as_a_view_of_it_or_what_a_backward_pass_needs():
    with phase("memory") as counts:
        before = Module.memory_allocated()
        x = torch.zeros(1000, device=DEVICE)
        row = x.view(10, 100)[2]
        y = row + 1
        del x
        assert Module.memory_allocated() - before == 4400
        del row
        assert Module.memory_allocated() - before == 400
        del y
    assert Module.memory_allocated() == before
    assert counts.peak - before == 4400
    assert counts.allocations == 2
    x = torch.ones(100, device=DEVICE, requires_grad=True)
    before = Module.memory_allocated()
    loss = x.exp().exp().sum()
    assert Module.memory_allocated() - before == 804
    loss.backward()
    del loss
    assert Module.memory_allocated() - before == 400


def test_a_result_read_before_it_has_arrived_is_wrong():
    x = there(3)
    early = x.to("cpu", non_blocking=True)
    number, is_large = (x.long() + 1).to("cpu", non_blocking=True), (x < 2).to("cpu", non_blocking=True)
    assert early.isnan().all()
    assert (number.tolist(), is_large.tolist()) == ([1, 1, 1], [True, True, True])
    Module.synchronize()
    assert torch.equal(early, here(3))
    assert (number.tolist(), is_large.tolist()) == ([2, 3, 4], [True, False, False])


# Its numbers


def views_and_changes_in_place(device):
    x = here(3, 4).to(device)
    row, column = x[1], x.t()[0]
    row.add_(5)
    column.mul_(2)
    assert row.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert (row.data_ptr() - x.data_ptr(), row.storage_offset(), x.t().stride()) == (16, 4, (1, 4))
    assert row._is_view()
    y = x.clone().t_().unsqueeze_(0)
    assert (y.shape, y.stride()) == ((1, 4, 3), (4, 1, 4))
    grown = torch.empty(0, device=device).resize_(2, 2).fill_(3)
    leaf = here(3).to(device).requires_grad_()
    changed = leaf * 2
    changed[1:].mul_(leaf[1:])
    changed.sum().backward()
    return x, y, grown, torch.arange(5, device=device), leaf.grad


def packed_sequences(device):
    x = here(2, 3, 4).to(device).requires_grad_()
    packed = pack_padded_sequence(x, torch.tensor([1, 3]), batch_first=True, enforce_sorted=False)
    assert packed.batch_sizes.device.type == "cpu"
    padded, lengths = pad_packed_sequence(packed, batch_first=True)
    padded.square().sum().backward()
    return packed.data, padded, lengths, x.grad


def attention_and_its_gradients(device):
    q, k, v = (torch.randn(2, heads, 5, 8).to(device).requires_grad_() for heads in (4, 2, 2))
    mask = torch.ones(5, 5, dtype=torch.bool, device=device).tril()
    results = []
    for options in ({"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask.float(), "scale": 0.3}):
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        results.append(mixed)
        mixed.square().sum().backward()
    with torch.inference_mode():
        results.append(F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True))
    return *results, q.grad, k.grad, v.grad


def autocast(device, dtype):
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.LayerNorm(8), nn.Linear(8, 8)).to(device)
    x = torch.randn(3, 8).to(device)
    with torch.autocast(device, dtype=dtype):
        y = model(model(x))
        loss = F.mse_loss(y, torch.zeros_like(y))
        with torch.inference_mode():
            mixed = F.scaled_dot_product_attention(*[model(x).view(1, 1, 3, 8)] * 3)
    loss.backward()
    assert y.dtype == dtype
    return y, loss, mixed, *(p.grad for p in model.parameters())


def a_weight_that_was_cast_without_gradients(device):
    """The copy is one for the whole region: later passes have its gradient, and do not see a change of the weight."""
    layer, x = nn.Linear(8, 8).to(device), torch.randn(3, 8).to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        with torch.no_grad():
            first = layer(x)
            layer.weight.mul_(2)
        second = layer(x)
        with torch.inference_mode():
            third = layer(x)
    second.float().square().sum().backward()
    return first, second, third, *(p.grad for p in layer.parameters())


def the_widest_dtype(device):
    x, half, at = here(3).to(device), here(3).to(device).bfloat16(), torch.tensor([1], device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        copied = x.index_copy(0, at, half[:1]), half.index_copy(0, at, x[:1])
        return *copied, torch.cat([x, half]), torch.stack([half, x]), torch.cat([half, half]), torch.cat([at, at])


def optimizer(device, **path):
    model = nn.Linear(4, 3).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **path)
    for _ in range(3):
        optimizer.zero_grad()
        model(here(2, 4).to(device)).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return *model.parameters(), *(x for state in optimizer.state.values() for x in state.values())


def vmap(device):
    mask, at = torch.ones(2, 3, dtype=torch.bool, device=device), torch.arange(3, device=device)
    seen = torch.vmap(torch.vmap(lambda q, k: mask[0, k] & (q >= k), (None, 0)), (0, None))
    return [seen(at, at)]


def convolutions_and_other_layers(device):
    layers = nn.Sequential(
        nn.Conv1d(4, 4, 3, groups=2, padding=2), nn.GELU(), nn.Flatten(), nn.Linear(36, 4), nn.Mish()
    )
    layers.to(device)
    x = torch.randn(2, 4, 7).to(device).requires_grad_()
    loss = F.cross_entropy(layers(x), torch.tensor([0, 3], device=device))
    loss.backward()
    return loss, x.grad, *(p.grad for p in layers.parameters()), x.quantile(x.new_tensor([0.1, 0.5]))


def trained_weights_in_inference_mode(device):
    """A transposed weight is still known to be trained, by which PyTorch chooses between two products."""
    x, weight = torch.randn(2, 3, 32).to(device), nn.Parameter(torch.randn(264, 32)).to(device)
    with torch.inference_mode():
        assert weight.t().requires_grad
        return [F.linear((x + 1)[:, -1:], weight), weight.detach().t() @ weight]


def test_its_numbers_are_the_cpus():
    for compute in (
        views_and_changes_in_place,
        packed_sequences,
        attention_and_its_gradients,
        *(partial(autocast, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)),
        a_weight_that_was_cast_without_gradients,
        the_widest_dtype,
        *(partial(optimizer, **path) for path in ({"fused": True}, {"foreach": True}, {})),
        vmap,
        convolutions_and_other_layers,
        trained_weights_in_inference_mode,
    ):
        on_cpu, on_device = both(compute)
        assert len(on_cpu) == len(on_device) > 0
        for ours, theirs in zip(on_device, on_cpu, strict=True):
            assert ours.dtype == theirs.dtype, compute
            assert torch.equal(ours, theirs), compute


def test_random_numbers_are_the_devices_own():
    torch.manual_seed(3)
    module = torch.get_device_module(DEVICE)
    state = module.get_rng_state()
    first, on_host = torch.rand(2, device=DEVICE), torch.rand(2)
    assert first.tolist() == on_host.tolist(), "one stream for both would be drawn from twice"
    module.set_rng_state(state)
    assert torch.equal(first, torch.rand(2, device=DEVICE))
    before = module.get_rng_state()
    with torch.random.fork_rng(device_type=DEVICE):
        torch.rand(5, device=DEVICE)
        assert not torch.equal(module.get_rng_state(), before)
    assert torch.equal(module.get_rng_state(), before)
    generator = torch.Generator(DEVICE)
    assert generator.device.type == DEVICE
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.Generator(), torch.Generator)
    for reentrant in (True, False):  # checkpoints repeat dropout
        w, kept = torch.randn(4, 4).to(DEVICE).requires_grad_(), []

        def layer(w, kept=kept):
            kept.append(F.dropout(w, 0.5))
            return kept[-1].sum()

        checkpoint(layer, w, use_reentrant=reentrant).backward()
        assert torch.equal(kept[0] != 0, w.grad != 0)


def test_modules_keep_ties_types_and_copies():
    """And hooks of gradients can read them."""
    model = nn.ModuleList([nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)])
    model[1].weight = model[0].weight
    model.to(DEVICE)
    assert model[1].weight is model[0].weight
    copied = copy.deepcopy(model)
    assert copied[1].weight is copied[0].weight is not model[0].weight
    assert isinstance(copied[0].weight, nn.Parameter)
    assert copied[0].weight.requires_grad
    model[0].weight.data = model[0].weight.data.to(torch.bfloat16)
    assert (model[0].weight + 1).cpu().dtype == torch.bfloat16
    assert copied.to("cpu")[0].weight.detach().numpy().shape == (5, 4)
    x, seen = there(3).requires_grad_(), []
    y = x * 2
    y.register_hook(lambda gradient: seen.append(gradient.tolist()))
    y.sum().backward()
    assert seen == [[1, 1, 1]]
