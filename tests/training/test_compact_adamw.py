"""AdamW on weights in bfloat16, and with its moments apart."""

import copy

import pytest
import torch
from torch import nn

from heedful.configs.options import TrainingOptions
from heedful.core.rounding import stochastic_round
from heedful.training import compact_adamw
from heedful.training.compact_adamw import CompactAdamW
from heedful.training.optimization import make_optimizer
from heedful.training.state import load_optimizer_state
from operations import Operations
from trees import differing

BETAS, EPS = (0.9, 0.999), 1e-8


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((7, 5), (11,), (3, 2, 4))]


def learn(parameters, optimizer, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def compact(parameters, device=None, lr=1e-2, weight_decay=0.1):
    groups = [{"params": parameters, "lr": lr, "weight_decay": weight_decay}]
    return CompactAdamW(groups, betas=BETAS, eps=EPS, device=device)


@pytest.fixture(params=[compact_adamw.PART, 16])
def _parts(request, monkeypatch):
    """Weights in one part, and in several."""
    monkeypatch.setattr(compact_adamw, "PART", request.param)


@pytest.mark.usefixtures("_parts")
def test_float32_weights_get_torchs_own_steps_bit_for_bit():
    ours, theirs = parameters(), parameters()
    learn(ours, compact(ours, torch.device("cpu")), 5)
    learn(theirs, torch.optim.AdamW(theirs, lr=1e-2, betas=BETAS, eps=EPS, weight_decay=0.1, fused=True), 5)
    assert all(map(torch.equal, ours, theirs))


def test_small_steps_are_not_lost():
    """1,000 steps of 1e-5 from 1, where bfloat16 numbers are 2^-8 and 2^-7 apart: to the nearest, none ever counts.

    The mean of 10,000 weights is where float32 weights are, 1 - 1e-2, within four standard errors; a weight's variance is at
    most that of a sum of 1,000 roundings, each p (1 - p) with p = 1e-5 / 2^-8, times 2^-16.
    """
    nearest, ours = (nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16)) for _ in range(2))
    plain = torch.optim.AdamW([nearest], lr=1e-5, betas=BETAS, eps=EPS, weight_decay=0.0)
    rounding = compact([ours], lr=1e-5, weight_decay=0.0)
    for _ in range(1000):
        for weight, optimizer in ((nearest, plain), (ours, rounding)):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
    assert nearest.unique().tolist() == [1.0]
    share = 1e-5 / 2**-8
    error = (1000 * share * (1 - share)) ** 0.5 * 2**-8 / 10_000**0.5
    assert abs(ours.double().mean().item() - 0.99) < 4 * error


@pytest.mark.usefixtures("_parts")
def test_bfloat16_weights_are_torchs_step_rounded_with_the_noise_of_seed_step_and_index():
    """Bit for bit, so that a run goes on as it began."""
    ours = parameters(torch.bfloat16)
    optimizer, moments = compact(ours), {}
    for step in range(3):
        expected = []
        for i, weight in enumerate(ours):
            weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(10 * step + i)).bfloat16()
            whole = nn.Parameter(weight.detach().float())
            whole.grad = weight.grad.float()
            plain = torch.optim.AdamW([whole], lr=1e-2, betas=BETAS, eps=EPS, weight_decay=0.1, fused=True)
            plain.state[whole] = moments.get(i, {})
            plain.step()
            moments[i] = plain.state[whole]
            noise = compact_adamw._noise((0, step, i), weight.numel(), 0, whole.detach().view(-1))
            expected.append(stochastic_round(whole.detach().view(-1), noise).view(weight.shape))
        optimizer.step()
        assert all(map(torch.equal, ours, expected))


def test_moments_stay_in_float32_through_a_state_which_stays_as_it_is():
    weights = parameters(torch.bfloat16)
    optimizer = compact(weights)
    learn(weights, optimizer, 3)
    state, held = copy.deepcopy(optimizer.state_dict()), [weight.detach().clone() for weight in weights]
    learn(weights, optimizer, 2, seed=2)

    again, before = [nn.Parameter(weight) for weight in held], copy.deepcopy(state)
    fresh = compact(again)
    load_optimizer_state(fresh, state)
    for parameter in again:
        assert fresh.state[parameter]["exp_avg"].dtype == torch.float32
    learn(again, fresh, 2, seed=2)
    assert all(map(torch.equal, weights, again))
    assert differing(state, before) == []


def test_a_state_is_copied_once():
    """Not by the optimizer too: a run that resumes has room for its moments, and may not have it twice."""
    weights = parameters(torch.bfloat16)
    optimizer = compact(weights)
    learn(weights, optimizer, 1)
    state, fresh = copy.deepcopy(optimizer.state_dict()), compact(parameters(torch.bfloat16))
    with Operations() as operations:
        load_optimizer_state(fresh, state)
    assert sum(operations.counts[name] for name in ("aten::clone", "aten::_to_copy")) == 2 * len(weights)


def test_noise_is_drawn_from_no_generator_of_torch():
    """Ranks, or a reward, may have drawn other random numbers; the weights are rounded alike, and draw nothing themselves."""
    found = []
    for drawn in (1, 2):
        torch.manual_seed(drawn)
        before = torch.get_rng_state()
        weights = parameters(torch.bfloat16)
        learn(weights, compact(weights), 3)
        assert torch.equal(torch.get_rng_state(), before)
        found.append(weights)
    assert all(map(torch.equal, *found))


def test_each_seed_step_weight_and_block_has_noise_of_its_own(monkeypatch):
    monkeypatch.setattr(compact_adamw, "BLOCK", 50)
    stepped = torch.zeros(50)
    noise = {
        (*of_tensor, first): compact_adamw._noise(of_tensor, 100, first, stepped)
        for of_tensor in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
        for first in (0, 50)
    }
    assert len({tuple(numbers.tolist()) for numbers in noise.values()}) == len(noise)
    across = compact_adamw._noise((0, 0, 0), 100, 25, stepped)
    assert torch.equal(across, torch.cat([noise[0, 0, 0, 0], noise[0, 0, 0, 50]])[25:75])


def test_the_noise_is_that_of_the_runs_seed():
    found = []
    for seed in (0, 0, 1):
        weight = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        options = TrainingOptions(model="m", data="d", output="o", weights_dtype="bfloat16", seed=seed)
        module = nn.ParameterList([weight])
        learn([weight], make_optimizer([(module, 1e-3)], options), 2)
        found.append(weight.detach())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_weights_without_gradients_stay():
    weights = parameters()
    optimizer = compact(weights)
    weights[0].grad = torch.ones_like(weights[0])
    held = weights[1].detach().clone()
    optimizer.step()
    assert torch.equal(weights[1], held)
    assert len(optimizer.state) == 1


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, torch.optim.AdamW),
        ({"weights_dtype": "bfloat16"}, CompactAdamW),
        ({"optimizer_device": "cpu"}, CompactAdamW),
    ],
)
def test_the_options_choose_the_optimizer(settings, kind):
    made = make_optimizer([(nn.Linear(2, 2), 0.1)], TrainingOptions(model="m", data="d", output="o", **settings))
    assert type(made) is kind
