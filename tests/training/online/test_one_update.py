"""One update per rollout batch: the policy that learns is the one that sampled, so its own pass gives the old log-probs."""

from dataclasses import replace

import pytest
import torch

from cases import often
from heedful import A2CConfig, ConfigError, GRPOConfig, OnlineDPOConfig, PPOConfig
from heedful.algorithms import online_dpo, ppo
from heedful.algorithms.online.evaluation import sample_rows
from heedful.algorithms.online.provenance import ONLY_MEASURED
from heedful.algorithms.online.rollout import rollout
from heedful.algorithms.online.start import start
from jsonl import timeless
from trainers import varied

SEPARATE = {"critic": "separate", "ppo_epochs": 1}
ONE_UPDATE = {
    "grpo": (GRPOConfig, {}),
    "grpo without a price on KL": (GRPOConfig, {"kl_coef": 0.0}),
    "entropy": (GRPOConfig, {"entropy_coef": 0.02, "kl_coef": 0.0}),
    "kl-target": (GRPOConfig, {"kl_target": 0.01, "kl_horizon": 20}),
    "cispo": (GRPOConfig, {"policy_loss": "cispo", "kl_coef": 0.0}),
    "gspo": (GRPOConfig, {"importance_level": "sequence-mean", "kl_coef": 0.0}),
    "lora": (GRPOConfig, {"lora_rank": 4}),
    "separate critic": (PPOConfig, SEPARATE | {"kl_coef": 0.0}),
    "separate critic, KL in the loss": (PPOConfig, SEPARATE | {"kl_in": "loss", "kl_kind": "k3"}),
    "reinforce++": (PPOConfig, {"advantage": "reinforce++", "kl_coef": 0.0, "ppo_epochs": 1}),
    "online DPO": (OnlineDPOConfig, {"samples_per_prompt": 2}),
    "online DPO, not every response in a pair": (OnlineDPOConfig, {"samples_per_prompt": 4}),
}
MORE = {
    "two epochs": (GRPOConfig, {"ppo_epochs": 2}),
    "two minibatches": (GRPOConfig, {"minibatch_size": 4}),
    "KL in the reward": (GRPOConfig, {"advantage": "dr_grpo", "kl_in": "reward"}),
    "a value head": (PPOConfig, {"ppo_epochs": 1, "kl_coef": 0.0}),
    "a2c": (A2CConfig, {"minibatch_size": 8}),
    "a critic that warms up": (PPOConfig, SEPARATE | {"kl_coef": 0.0, "critic_warmup_steps": 1}),
    "online DPO in two epochs": (OnlineDPOConfig, {"ppo_epochs": 2}),
}


def trained(settings, passes):
    """Weights, metrics and KL in the tables of samples after the steps of a run, and the passes of policy and reference."""
    learner = start(settings, [varied]).learner
    seen = {"policy": passes(learner.policy)}
    seen["reference"] = [] if learner.reference is None else passes(learner.reference)
    lines, kl = [], []
    algorithm = online_dpo if isinstance(settings, OnlineDPOConfig) else ppo
    for _ in range(settings.steps):
        scored = rollout(learner, next(learner.prompts))
        metrics, kl_of_step, _ = algorithm.learn(learner, algorithm.make_experience(learner, scored))
        lines.append(timeless(metrics))
        kl += [row["kl"] for row in sample_rows(scored, kl_of_step, settings) if "kl" in row]
    weights = torch.cat(
        [parameter.detach().flatten() for module in learner.trained for parameter in module.parameters()]
    )
    return weights, lines, kl, {name: sum(rows for rows, _ in what) for name, what in seen.items()}


@pytest.fixture
def settings(config):
    """``settings(kind, **changes)``: three steps of 8 responses whose rows all fit into one micro-batch."""

    def make(kind, **changes):
        online = {"steps": 3, "samples_per_prompt": 4, "micro_batch_size": 8, "lr_schedule": "constant"}
        return config(kind, **(online | {"learning_rate": 1e-2} | changes))

    return make


OFTEN = ["kl-target", "separate critic, KL in the loss", "online DPO, not every response in a pair"]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", often(ONE_UPDATE, OFTEN))
def test_weights_are_those_of_a_pass_of_its_own_bit_for_bit(settings, passes, reading_first, case):
    """In float32 on one thread: where one micro-batch holds all rows, the two passes see the same products."""
    kind, changes = ONE_UPDATE[case]
    once = trained(settings(kind, **changes), passes)
    twice = trained(settings(reading_first(kind), **changes), passes)
    assert torch.equal(once[0], twice[0])
    for ours, theirs in zip(once[1], twice[1], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert once[2] == pytest.approx(twice[2], rel=1e-5, abs=1e-6)
    assert {"policy/entropy", "rollout/sampler_mismatch"} <= once[1][0].keys()
    assert ("reference/kl" in once[1][0]) == bool(once[2]) == settings(kind, **changes).needs_reference
    if once[2]:
        assert any(abs(kl) > 1e-3 for kl in once[2][-2:]), "the policy has moved, and the table says how far"
    rows = 3 * 8
    assert once[3]["reference"] == twice[3]["reference"]
    if kind is OnlineDPOConfig:  # responses that are in no pair are read for the metrics alone
        assert once[3]["policy"] == rows < twice[3]["policy"]
    else:
        assert (once[3]["policy"], twice[3]["policy"]) == (rows, 2 * rows)


def test_in_micro_batches_the_ratio_is_exactly_1(settings, passes, reading_first):
    """Then the two passes round differently, so that a pass of its own leaves ratios within rounding of 1."""
    once, twice = (
        trained(settings(kind, micro_batch_size=3, kl_coef=0.0), passes)
        for kind in (GRPOConfig, reading_first(GRPOConfig))
    )
    assert [line["policy/approx_kl"] for line in once[1]] == [0.0, 0.0, 0.0]
    torch.testing.assert_close(once[0], twice[0], rtol=0, atol=1e-5)


def test_where_something_needs_them_before_the_update_they_are_read_before(settings):
    for kind, changes in ONE_UPDATE.values():
        assert not settings(kind, **changes).needs_old_pass
    for case, (kind, changes) in MORE.items():
        assert settings(kind, **changes).needs_old_pass, case


# ------------------------------------------------------------------------------------------------------- the reference


@pytest.mark.parametrize("changes", often([{"score_norm_samples": 6}, {"lora_rank": 4}], [{"score_norm_samples": 6}]))
def test_without_a_price_on_kl_no_reference_is_loaded(settings, changes):
    """Nor with normalised scores: before the first step the policy is the reference."""
    free, priced = (start(settings(GRPOConfig, kl_coef=coef, **changes), [varied]) for coef in (0.0, 0.1))
    assert free.learner.reference is None
    assert priced.learner.reference is not None
    assert free.about["facts"]["score_norm"] == priced.about["facts"]["score_norm"]


def test_a_named_reference_is_read_at_evaluations(settings, tiny):
    config = settings(GRPOConfig, kl_coef=0.0, reference=tiny("gpt2"), steps=1)
    assert ONLY_MEASURED in start(config, [varied]).about["notes"]
    assert "eval/kl" in ppo.train_grpo(config, rewards=[varied])["last_evaluation"]


def test_a_reference_that_nothing_reads_is_refused(settings, tiny):
    with pytest.raises(ConfigError, match=r"--reference .* would not be used: --kl-coef 0 .* set --eval-fraction"):
        settings(GRPOConfig, kl_coef=0.0, reference=tiny("gpt2"), eval_fraction=0.0)
    with pytest.raises(ConfigError, match="--reference-device cpu has no effect: --kl-coef 0 needs no reference"):
        settings(PPOConfig, kl_coef=0.0, reference_device="cpu")
    replace(settings(PPOConfig, kl_coef=0.1), reference_device="cpu")
