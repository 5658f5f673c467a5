"""What holds of every loss: gradients, constants, dtypes, and all that must not change the result.

Each loss is one row of a table: tensors whose first axis is rows, the call, which of the tensors are trained, and how
the rows split into micro-batches. A memory knob, the order of the rows, the padding and what lies in it are all
invisible.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from heedful import core
from losses import grpo_loss, sequence_policy_loss

ROWS, TIME = 6, 7
SPLIT = ([0, 1], [2, 3, 4], [5])
GROUPS_SPLIT = ([0, 1, 2, 3, 4, 5, 6, 7], [8, 9])


FOUR = ("chosen", "rejected", "ref_chosen", "ref_rejected")
PAIR = ("chosen", "rejected")


@dataclass(frozen=True)
class Loss:
    name: str
    call: Callable
    """Tensors by name and counts of the step by keyword -> (loss, metrics)."""
    tensors: tuple[str, ...]
    options: dict = field(default_factory=dict)
    trained: tuple[str, ...] = PAIR
    counts: tuple[str, ...] = ("num_pairs",)
    split: tuple[list[int], ...] = SPLIT

    def __call__(self, batch, **counts):
        return self.call(*(batch[name] for name in self.tensors), **self.options, **counts)


def policy(name, call, tensors, counts="num_tokens", **options):
    tensors = (*tensors.split(), "response_mask")
    return Loss(name, call, tensors, options, trained=tensors[:1], counts=tuple(counts.split()))


CLIP = {"clip_range": 0.2}
DUAL_CLIP = {"clip_range": 0.2, "clip_range_high": 0.3, "dual_clip": 1.3}


def reduced(loss):
    """The loss with its counts as keywords."""

    def call(*tensors, num_tokens=None, **options):
        return loss(*tensors, reduction=core.Reduction(num_tokens=num_tokens), **options)

    return call


ppo, cispo, a2c = reduced(core.ppo_policy_loss), reduced(core.cispo_policy_loss), reduced(core.a2c_policy_loss)
sao = reduced(core.sao_policy_loss)
SEMI_GRADIENTS = (cispo, sao)
OLD = "logprobs old_logprobs"
VALUES = "values old_values returns"
GRPO = {"kl_coef": 0.1, "max_new_tokens": 9}
POLICY_LOSSES = [
    policy("sft", core.sft_loss, "logprobs"),
    policy("ppo", ppo, f"{OLD} advantages", **CLIP),
    policy("ppo-dual-clip", ppo, f"{OLD} advantages", **DUAL_CLIP),
    policy("cispo", cispo, f"{OLD} advantages", **CLIP),
    policy("sao", sao, f"{OLD} advantages", **CLIP),
    policy("a2c", a2c, "logprobs advantages"),
    Loss(
        "positive", core.positive_example_loss, ("logprobs", "response_mask", "desirable"),
        trained=("logprobs",), counts=("num_tokens",),
    ),
    policy("value", core.value_loss, VALUES, **CLIP),
    policy("value-unclipped", core.value_loss, VALUES, clip_range=None),
    policy("sequence", sequence_policy_loss, f"{OLD} scores", "num_sequences", **CLIP),
    policy("sequence-dual-clip", sequence_policy_loss, f"{OLD} scores", "num_sequences", **DUAL_CLIP),
    policy("gspo", sequence_policy_loss, f"{OLD} scores", "num_sequences", **CLIP, length_normalise=True),
    *(
        policy(f"grpo-{how}", grpo_loss, f"{OLD} ref_logprobs scores", "num_tokens num_sequences", how=how, **GRPO)
        for how in ("sequence", "token", "fixed")
    ),
]  # fmt: skip


def pairwise_with_margin(chosen, rejected, margin, **options):
    return core.pairwise_reward_loss(chosen, rejected, margin=margin, **options)


def ranking_with_margin(ranked, ranks, groups, margins, **options):
    return core.ranking_reward_loss(ranked, ranks, groups, margin=margins, **options)


def dpo_per_token(chosen, rejected, ref_chosen, ref_rejected, chosen_tokens, rejected_tokens, **options):
    tokens = {"chosen_tokens": chosen_tokens, "rejected_tokens": rejected_tokens}
    return core.dpo_loss(chosen, rejected, ref_chosen, ref_rejected, **tokens, **options)


WITH_ARGUMENTS = {
    ppo: core.ppo_policy_loss,
    cispo: core.cispo_policy_loss,
    sao: core.sao_policy_loss,
    a2c: core.a2c_policy_loss,
    sequence_policy_loss: core.ppo_policy_loss,
    grpo_loss: core.ppo_policy_loss,
    pairwise_with_margin: core.pairwise_reward_loss,
    ranking_with_margin: core.ranking_reward_loss,
    dpo_per_token: core.dpo_loss,
}
TOKENS = ("chosen_tokens", "rejected_tokens")
RANKED = ("ranked", "ranks", "groups")
SMOOTHED = {"center_coef": 0.1, "label_smoothing": 0.2}
BY_PROMPT = {"trained": ("ranked",), "counts": ("num_prompts",), "split": GROUPS_SPLIT}
PREFERENCE_LOSSES = [
    Loss("pairwise", core.pairwise_reward_loss, PAIR),
    Loss("pairwise-options", pairwise_with_margin, (*PAIR, "margin"), SMOOTHED),
    Loss("ranking", core.ranking_reward_loss, RANKED, **BY_PROMPT),
    Loss("ranking-options", ranking_with_margin, (*RANKED, "margins"), SMOOTHED, **BY_PROMPT),
    Loss("dpo", core.dpo_loss, FOUR, {"beta": 0.7}),
    Loss("cdpo", core.dpo_loss, FOUR, {"beta": 0.7, "label_smoothing": 0.2}),
    Loss("ipo", core.dpo_loss, FOUR, {"beta": 0.7, "kind": "ipo"}),
    Loss("hinge", core.dpo_loss, FOUR, {"beta": 0.7, "kind": "hinge"}),
    Loss("robust", core.dpo_loss, FOUR, {"beta": 0.7, "kind": "robust", "label_smoothing": 0.2}),
    Loss("dpo-per-token", dpo_per_token, (*FOUR, *TOKENS), {"beta": 5.0}),
    Loss("simpo", core.simpo_loss, (*PAIR, *TOKENS), {"beta": 2.0, "target_margin": 0.3}),
    Loss("orpo", core.orpo_loss, ("good", "bad", *TOKENS), {"beta": 0.4}, trained=("good", "bad")),
    Loss(
        "kto", core.kto_loss, ("chosen", "ref_chosen", "desirable"),
        {"beta": 0.7, "kl": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.6},
        trained=("chosen",), counts=("num_responses", "num_desirable"),
    ),
]  # fmt: skip
LOSSES = POLICY_LOSSES + PREFERENCE_LOSSES
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
every_policy_loss = pytest.mark.parametrize("loss", POLICY_LOSSES, ids=lambda loss: loss.name)


@pytest.fixture
def batch():
    """Ragged responses with holes; one row has no response token. Ratios fall on both sides of the clip."""
    randn = partial(torch.randn, dtype=torch.float64)
    mask = torch.zeros(ROWS, TIME, dtype=torch.bool)
    for row, length in enumerate([2, 7, 4, 0, 5, 3]):
        mask[row, :length] = True
    mask[1, 3] = mask[4, 1] = False
    old, old_values = -1 + 0.5 * randn(ROWS, TIME), randn(ROWS, TIME)
    return {
        "old_logprobs": old,
        "logprobs": old + 0.3 * randn(ROWS, TIME),
        "ref_logprobs": old + 0.3 * randn(ROWS, TIME),
        "advantages": randn(ROWS, TIME),
        "scores": randn(ROWS),
        "old_values": old_values,
        "values": old_values + 0.3 * randn(ROWS, TIME),
        "returns": randn(ROWS, TIME),
        "response_mask": mask,
        **{name: randn(ROWS) for name in (*FOUR, "margin")},
        "good": -randn(ROWS).abs() - 0.1,
        "bad": -randn(ROWS).abs() - 0.1,
        "chosen_tokens": torch.tensor([3, 1, 4, 1, 5, 9]),
        "rejected_tokens": torch.tensor([2, 7, 1, 8, 2, 8]),
        "desirable": torch.tensor([True, False, True, False, False, True]),
        "ranked": randn(10),
        "margins": randn(10),
        "ranks": torch.tensor([0, 1, 2, 0, 1, 1, 3, 2, 5, 4]),
        "groups": torch.tensor([4, 4, 4, 1, 1, 1, 1, 1, 9, 9]),
    }


def step_counts(loss, batch):
    mask = batch["response_mask"]
    counts = {
        "num_tokens": int(mask[batch["desirable"]].sum() if loss.name == "positive" else mask.sum()),
        "num_sequences": int(mask.any(1).sum()),
        "num_pairs": ROWS,
        "num_responses": ROWS,
        "num_desirable": 3,
        "num_prompts": 3 if loss.name.startswith("ranking") else ROWS,
    }
    return {name: counts[name] for name in loss.counts}


def take(loss, batch, rows):
    return {name: batch[name][rows] for name in loss.tensors}


def evaluate(loss, batch, **counts):
    """Loss, metrics and the gradients of the trained tensors, together in one dictionary."""
    batch = {name: batch[name].detach().clone() for name in loss.tensors}
    for name in loss.trained:
        batch[name].requires_grad_()
    value, metrics = loss(batch, **counts)
    value.backward()
    gradients = {f"gradient of {name}": batch[name].grad for name in loss.trained}
    return {"loss": value.detach(), **metrics, **gradients}


def assert_same(actual, expected, rtol=1e-9):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert value.isfinite().all(), name
        torch.testing.assert_close(
            actual[name].double(),
            value.double(),
            rtol=rtol,
            atol=1e-12,
            msg=lambda message, name=name: f"{name}: {message}",
        )


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(loss, marks=pytest.mark.exhaustive if loss.name in ("grpo-sequence", "grpo-fixed") else ())
        for loss in LOSSES
        if loss.call not in SEMI_GRADIENTS
    ],
    ids=lambda loss: loss.name,
)
def test_gradcheck_loss(loss, batch):
    """Not of semi-gradients: finite differences would move their weights too (`test_surrogates.py` has them)."""
    trained = [batch[name].clone().requires_grad_() for name in loss.trained]
    assert torch.autograd.gradcheck(lambda *t: loss({**batch, **dict(zip(loss.trained, t, strict=True))})[0], trained)


@every_loss
def test_invariance_micro_batches_add_up(loss, batch):
    """With the counts of the step: loss, metrics and gradient are those of the undivided batch."""
    counts = step_counts(loss, batch)
    whole = evaluate(loss, batch, **counts)
    parts = [evaluate(loss, take(loss, batch, rows), **counts) for rows in loss.split]
    joined = {
        name: torch.cat([part[name] for part in parts]) if "gradient" in name else sum(part[name] for part in parts)
        for name in whole
    }
    if "policy/ratio_max" in whole:
        joined["policy/ratio_max"] = torch.stack([part["policy/ratio_max"] for part in parts]).max()
    assert_same(joined, whole)
    assert_same(evaluate(loss, batch), whole)


@every_policy_loss
def test_invariance_extra_padding_columns(loss, batch):
    """Two columns of numbers in front and three behind, outside the mask."""
    wide = {
        name: torch.cat([x.new_full((ROWS, 2), fill), x, x.new_full((ROWS, 3), fill)], 1) if x.dim() == 2 else x
        for name, x, fill in ((n, batch[n], 0 if n == "response_mask" else -3.5) for n in loss.tensors)
    }
    result, expected = evaluate(loss, wide), evaluate(loss, batch)
    for name in loss.trained:
        gradient = result[f"gradient of {name}"]
        assert (gradient[:, :2] == 0).all()
        assert (gradient[:, -3:] == 0).all()
        result[f"gradient of {name}"] = gradient[:, 2:-3]
    assert_same(result, expected)


@every_policy_loss
def test_invariance_poison_outside_the_mask(loss, batch):
    """Also in the score of a row without response tokens. NaN times 0 is NaN, so a product with the mask fails here."""
    outside, poison = ~batch["response_mask"], math.nan
    dirty = dict(batch)
    for name in loss.tensors:
        if batch[name].is_floating_point():
            dirty[name] = batch[name].masked_fill(outside.all(1) if name == "scores" else outside, poison)
    assert_same(evaluate(loss, dirty), evaluate(loss, batch))


@every_loss
def test_invariance_constants_get_no_gradient(loss, batch):
    """Old and reference log-probs, old values, advantages, returns and margins are targets: nothing flows into them.

    Float64 stays float64, and the loss is among the metrics."""
    tensors = {
        name: x.clone().requires_grad_() if x.is_floating_point() else x
        for name, x in ((n, batch[n]) for n in loss.tensors)
    }
    value, metrics = loss(tensors)
    value.backward()
    got_gradient = {name for name, x in tensors.items() if x.grad is not None}
    assert got_gradient == set(loss.trained)
    assert all((tensors[name].grad != 0).any() for name in loss.trained)
    assert not any(metric.requires_grad for metric in metrics.values())
    assert {value.dtype, *(metric.dtype for metric in metrics.values())} == {torch.float64}
    (name,) = (name for name in metrics if name.startswith("loss/"))
    assert metrics[name] == value


@every_loss
def test_invariance_half_precision_is_float32_of_the_same_numbers(loss, batch):
    half = {n: batch[n].bfloat16() if batch[n].is_floating_point() else batch[n] for n in loss.tensors}
    single = {n: x.float() if x.is_floating_point() else x for n, x in half.items()}
    result, expected = loss(half), loss(single)
    assert result[0].dtype == torch.float32
    assert torch.equal(result[0], expected[0])
    for name, metric in expected[1].items():
        assert torch.equal(result[1][name], metric)


def test_every_loss_of_the_core_is_in_the_table():
    losses = {name for name in core.__all__ if name.endswith("_loss")}
    listed = {WITH_ARGUMENTS.get(loss.call, loss.call) for loss in LOSSES}
    assert {function.__name__ for function in listed} == losses
