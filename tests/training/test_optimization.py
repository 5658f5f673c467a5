"""Schedules, clipping, metrics and patience, against values worked out by hand."""

import copy
import math

import pytest
import torch
from torch import nn

from heedful import SFTConfig
from heedful.training.early_stopping import EarlyStopping
from heedful.training.metric_sums import MetricSums
from heedful.training.optimization import Schedule, lr_factor, make_optimizer, optimizer_step


def options(**changes):
    return SFTConfig(model="m", data="d", output="o", **changes)


def test_golden_linear_schedule_with_warm_up():
    """Two warm-up steps reach 1/3 and 2/3; then a line from 1 down, which would be 0 one step after the last."""
    factors = [lr_factor(i, total_steps=6, options=options(warmup_steps=2)) for i in range(6)]
    assert factors == pytest.approx([1 / 3, 2 / 3, 1.0, 3 / 4, 2 / 4, 1 / 4])


def test_golden_cosine_and_constant_schedules():
    cosine = [lr_factor(i, total_steps=4, options=options(lr_schedule="cosine")) for i in range(4)]
    assert cosine == pytest.approx([1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2])
    assert [lr_factor(i, total_steps=4, options=options(lr_schedule="constant")) for i in range(4)] == [1.0] * 4


def test_weight_decay_acts_on_matrices_alone_and_groups_keep_their_ratio():
    first, second = nn.Linear(3, 2), nn.Linear(2, 1)
    optimizer = make_optimizer([(first, 0.1), (None, 9.0), (second, 0.4)], options(weight_decay=0.5))
    found = {(group["peak_lr"], group["weight_decay"], group["params"][0].dim()) for group in optimizer.param_groups}
    assert found == {(0.1, 0.5, 2), (0.1, 0.0, 1), (0.4, 0.5, 2), (0.4, 0.0, 1)}
    schedule = Schedule(optimizer, 4, options())
    assert [schedule.advance() for _ in range(4)] == pytest.approx([0.1, 0.075, 0.05, 0.025])
    assert {round(group["lr"], 6) for group in optimizer.param_groups} == {0.025, 0.1}
    assert schedule.done == 4


def test_golden_adam_beta2():
    """Gradients 1 and 3 from weight 0: the second moments' mean at step 2 is (9 + beta2) / (1 + beta2)."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    optimizer = make_optimizer([(module, 0.1)], options(adam_beta2=0.5))
    for gradient in (1.0, 3.0):
        module.weight.grad = torch.tensor([[gradient]])
        optimizer.step()
    first_moment = (0.9 * 0.1 * 1 + 0.1 * 3) / (1 - 0.9**2)
    expected = -0.1 - 0.1 * first_moment / math.sqrt((9 + 0.5) / (1 + 0.5))
    assert module.weight.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("changes", [{}, {"weight_decay": 0.3, "adam_beta2": 0.9, "adam_eps": 1e-3}])
def test_adamw_is_one_kernel_and_its_update_the_plain_one(changes):
    """Ten steps beside torch's plain AdamW of the same settings, to float rounding."""
    module = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    plain = copy.deepcopy(module)
    fused = make_optimizer([(module, 0.05)], options(**changes))
    assert all(group["fused"] for group in fused.param_groups)
    settings = options(**changes)
    decayed = [
        {"params": [p for p in plain.parameters() if p.dim() == 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in plain.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    betas = (0.9, settings.adam_beta2)
    reference = torch.optim.AdamW(decayed, lr=0.05, betas=betas, eps=settings.adam_eps, fused=False, foreach=False)
    for _ in range(10):
        for p, q in zip(module.parameters(), plain.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        fused.step()
        reference.step()
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_shared_parameters_are_optimised_once():
    module = nn.Linear(2, 2)
    optimizer = make_optimizer([(module, 0.1), (module, 0.2)], options())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2


def test_the_gradient_of_a_module_is_clipped_to_the_norm():
    """Gradient (3, 4) of norm 5 is scaled to norm 1; another module has none, and stays. SGD shows the steps."""
    module, other = nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False)
    for one in (module, other):
        nn.init.zeros_(one.weight)
    module.weight.grad = torch.tensor([[3.0, 4.0]])
    optimizer = torch.optim.SGD([*module.parameters(), *other.parameters()], lr=1.0)
    assert optimizer_step(optimizer, module, 1.0) == pytest.approx(5.0)
    torch.testing.assert_close(module.weight.detach(), torch.tensor([[-0.6, -0.8]]), rtol=1e-5, atol=1e-6)
    assert float(other.weight.detach()) == 0
    assert module.weight.grad is None


def test_no_clipping_at_0():
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    module.weight.grad = torch.tensor([[300.0]])
    optimizer_step(torch.optim.SGD(module.parameters(), lr=1.0), module, 0.0)
    assert float(module.weight.detach()) == -300.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_changes_nothing(bad):
    """Neither the weights of the gradient nor others, nor their moments and the count of steps: for every optimizer."""
    for changes in ({}, {"weights_dtype": "bfloat16", "dtype": "bfloat16"}):
        first, second = nn.Linear(2, 2, bias=False), nn.Linear(1, 1, bias=False)
        optimizer = make_optimizer([(first, 0.1), (second, 0.1)], SFTConfig(model="m", data="d", output="o", **changes))

        def step(gradient, modules=(first, second), optimizer=optimizer):
            for module in modules:
                module.weight.grad = torch.ones_like(module.weight)
            modules[1].weight.grad.fill_(gradient)
            return optimizer_step(optimizer, nn.ModuleList(modules), 1.0)

        assert step(1.0) == pytest.approx(math.sqrt(5.0))
        before = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in (first.weight, second.weight)]
        assert not math.isfinite(step(bad))
        after = optimizer.state_dict(), [first.weight, second.weight]
        assert all(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))
        assert before[0]["state"].keys() == after[0]["state"].keys()
        for one, same in zip(before[0]["state"].values(), after[0]["state"].values(), strict=True):
            assert all(torch.equal(one[name], same[name]) for name in one), "moments, and Adam's count of steps"
        assert first.weight.grad is second.weight.grad is None
        step(1.0)
        assert not torch.equal(before[1][0], first.weight), "the next step is made"


def test_metrics_add_up_over_micro_batches_and_average_over_steps_but_maxima_stay():
    sums = MetricSums()
    for loss, ratio in ((1.0, 1.5), (2.0, 3.0), (4.0, 2.0)):
        sums.add({"loss/policy": torch.tensor(loss), "policy/ratio_max": torch.tensor(ratio)})
    assert sums.means(2) == {"loss/policy": 3.5, "policy/ratio_max": 3.0}


def test_patience_counts_evaluations_since_the_best():
    patience = EarlyStopping(2, higher_is_better=False)
    found = [patience.update(value, step) for step, value in enumerate([3.0, 2.0, 2.0, 2.5])]
    assert found == [True, True, False, False]
    assert (patience.best, patience.best_step, patience.exhausted) == (2.0, 1, True)
    endless = EarlyStopping(0, higher_is_better=True)
    for step in range(9):
        endless.update(-float(step), step)
    assert not endless.exhausted
