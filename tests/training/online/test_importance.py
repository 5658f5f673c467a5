"""Importance weights in the engine: what the sampler drew from, and what the weights do to the advantages."""

from dataclasses import replace

import pytest
import torch

from cases import pairs_often, tuples_often
from heedful import A2CConfig, ConfigError, GRPOConfig, OnlineDPOConfig, PPOConfig, core, train_online_dpo, train_ppo
from heedful.algorithms.online.rollout import rollout
from heedful.algorithms.ppo import make_experience
from heedful.engines.draw import filter_logits
from jsonl import read_metrics

KINDS = {
    "ppo": (PPOConfig, {}),
    "a2c": (A2CConfig, {"minibatch_size": 8}),
    "grpo, one update": (GRPOConfig, {"ppo_epochs": 1}),
    "cispo": (GRPOConfig, {"policy_loss": "cispo"}),
    "gspo": (GRPOConfig, {"importance_level": "sequence-mean", "kl_coef": 0.0}),
    "response-level": (PPOConfig, {"importance_level": "sequence"}),
}
IMPORTANCE = ["token-truncate", "token-mask", "sequence-truncate", "sequence-mask"]
WEIGHED = [
    (kind, importance)
    for kind, (_, changes) in KINDS.items()
    for importance in (IMPORTANCE[2:] if "importance_level" in changes else IMPORTANCE)
]
OFTEN = [("ppo", "token-mask"), ("grpo, one update", "sequence-truncate"), ("gspo", "sequence-truncate")]


def logits_of(learner, rollouts):
    """Of every response token, by transformers itself, ``[batch, time, vocab]``."""
    batch = rollouts.batch
    positions = (batch.attention_mask.long().cumsum(dim=1) - 1).clamp_min(0)
    with torch.no_grad():
        logits = learner.policy.lm(
            input_ids=batch.ids, attention_mask=batch.attention_mask.long(), position_ids=positions
        ).logits
    time = batch.response_mask.shape[1]
    return logits[:, -time - 1 : -1] / learner.config.temperature


@pytest.mark.parametrize("filters", [{"top_p": 0.5}, {"top_k": 20, "top_p": 0.7}], ids=str)
def test_the_recorded_log_probs_are_those_of_what_was_drawn_from(config, make_learner, filters):
    """Renormalised after temperature, top-k and top-p; the ratio to the policy is the kept mass, at every token."""
    learner = make_learner(config(GRPOConfig, ppo_epochs=2, temperature=0.5, **filters))
    scored = rollout(learner, next(learner.prompts))
    old_logprobs = make_experience(learner, scored).old_logprobs
    rollouts, mask = scored.responses, scored.responses.batch.response_mask
    logits = logits_of(learner, rollouts)
    filtered = filter_logits(logits.flatten(0, 1), **{"top_k": 0, "top_p": 1.0} | filters).view_as(logits)
    ids = rollouts.batch.ids[:, -mask.shape[1] :]
    expected = core.token_logprobs(filtered, ids)
    torch.testing.assert_close(rollouts.drawn_logprobs[mask].double(), expected[mask], rtol=1e-5, atol=1e-5)
    mass = torch.where(filtered.isfinite(), logits.softmax(dim=-1), 0.0).sum(dim=-1)
    assert float(mass[mask].max() - mass[mask].min()) > 1e-3, "the mass varies"
    torch.testing.assert_close(rollouts.kept_logprobs.exp()[mask].double(), mass[mask], rtol=1e-5, atol=1e-5)
    ratio = (old_logprobs - rollouts.drawn_logprobs).exp()
    torch.testing.assert_close(ratio[mask], mass[mask], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "importance"), tuples_often(WEIGHED, OFTEN))
def test_advantages_are_weighed(config, make_learner, experience_of, reading_first, kind, importance):
    """With the weights of core, after whitening; nothing else of the experience changes."""
    config_class, changes = KINDS[kind]
    level, _, bound = importance.partition("-")

    def learner_with(kind, **options):
        torch.manual_seed(0)  # of the value head
        return make_learner(config(kind, **changes, **options, top_p=0.5, temperature=0.5), noise=0.02)

    plain = learner_with(reading_first(config_class))
    asked = [p for p in plain.prompts.prompts for _ in range(plain.config.samples_per_prompt)]
    scored = rollout(replace(plain, generator=torch.Generator().manual_seed(0)), asked)
    mask, old_logprobs = scored.batch.response_mask, make_experience(plain, scored).old_logprobs
    log_ratio = torch.where(mask, old_logprobs - scored.responses.drawn_logprobs, 0.0)
    ratios = (log_ratio if level == "token" else log_ratio.sum(dim=1, keepdim=True).expand_as(mask)).exp()[mask]
    low, high = (float(ratios.quantile(q)) for q in (0.2, 0.7))  # so that some are beyond each
    bounds = {"importance_high": high} | ({"importance_low": low} if bound == "mask" else {})
    weighed, plain = experience_of(learner_with(config_class, importance=importance, **bounds)), experience_of(plain)
    bounded_by = {"level": level, "bound": bound, "low": bounds.get("importance_low", 0.0), "high": high}
    found = core.importance_weights(old_logprobs, scored.responses.drawn_logprobs, mask, **bounded_by)
    assert 0 < float(found.bounded.float().mean()) < 1
    assert torch.equal(weighed.advantages, plain.advantages * found.weights)
    assert not torch.equal(weighed.advantages, plain.advantages)
    assert torch.equal(weighed.old_logprobs, plain.old_logprobs)
    bounded = found.bounded if level == "token" else found.bounded[:, :1]
    mask = mask if level == "token" else mask[:, :1]
    assert weighed.metrics["importance/bounded_frac"] == pytest.approx(float(bounded[mask].float().mean()))
    assert weighed.metrics["importance/weight_max"] <= high
    assert 0 < weighed.metrics["importance/effective_frac"] <= 1
    assert weighed.metrics["rollout/kept_mass"] == pytest.approx(plain.metrics["rollout/kept_mass"])
    assert 0.5 <= weighed.metrics["rollout/kept_mass"] < 1


def test_if_the_sampler_is_the_policy_the_weights_are_1(config, make_learner, experience_of):
    """Up to rounding."""
    experience = experience_of(make_learner(config(PPOConfig, importance="token-truncate")))
    assert experience.metrics["importance/weight_mean"] == pytest.approx(1.0, abs=1e-5)
    assert experience.metrics["importance/effective_frac"] == pytest.approx(1.0, abs=1e-5)
    assert experience.metrics["importance/bounded_frac"] == 0
    assert "rollout/kept_mass" not in experience.metrics


def test_a_run_says_that_its_sampler_is_not_its_policy(config, length, capsys):
    train_online_dpo(config(OnlineDPOConfig, steps=1, top_p=0.8, eval_fraction=0.0), rewards=[length])
    assert "training is off-policy; --importance corrects for it" in capsys.readouterr().err


@pytest.mark.parametrize(("top_p", "normalise"), pairs_often([0.3, 0.99], [False, True], [(0.3, False)]))
def test_a_corrected_run_says_what_stays(config, length, capsys, top_p, normalise):
    """And once that its weights are next to nothing, if they are: of a response they are a product of kept masses."""
    changes = {"importance": "sequence-truncate", "importance_normalise": normalise}
    settings = config(PPOConfig, steps=2, top_p=top_p, **changes)
    train_ppo(settings, rewards=[length])
    said = capsys.readouterr().err
    assert "excluded ones are never seen, so a bias remains (rollout/kept_mass)" in said
    assert "training is off-policy" not in said
    is_light = top_p == 0.3 and not normalise
    assert said.count("the mean importance weight is below 0.1") == is_light
    assert ("set --importance-normalise to divide by the mean" in said) == is_light
    lines = read_metrics(settings.output)
    assert {name for line in lines for name in line if name.startswith("importance/")} == {
        f"importance/{name}"
        for name in ("weight_mean", "weight_max", "log_ratio_max", "bounded_frac", "effective_frac")
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"importance_high": 3.0}, "--importance-high 3.0 needs --importance; it is off"),
        ({"importance_normalise": True}, "--importance-normalise True needs --importance; it is off"),
        ({"importance": "token-truncate", "importance_level": "sequence"}, "use --importance sequence-truncate"),
        (
            {"importance": "token-truncate", "importance_low": 0.5},
            "--importance-low 0.5 masks tokens, but --importance token-truncate only truncates weights",
        ),
        (
            {"importance": "token-mask", "importance_low": 5.0},
            "--importance-low 5 is not below --importance-high 2, so no token would count",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(config, changes, said):
    with pytest.raises(ConfigError) as refused:
        config(PPOConfig, **changes)
    assert said in str(refused.value)
