"""With --mask-truncated, what was cut is learned from nowhere and seen everywhere: in metrics, tables, files and counts."""

import json

import pyarrow.parquet as pq
import pytest
import torch

from heedful.checkpoints.tiny import make_tiny_model
from heedful.configs.a2c import A2CConfig
from heedful.configs.grpo import GRPOConfig
from heedful.configs.ppo import PPOConfig
from heedful.errors import TrainingError
from heedful.train.online.engine import train_online
from heedful.train.online.update import learn

IN_THE_LOSS = {"mask_truncated": True, "kl_in": "loss", "kl_kind": "k3", "kl_coef": 0.1}
ONE_UPDATE = {
    "ppo": (PPOConfig, {"critic": "separate", "ppo_epochs": 1}),
    "a2c": (A2CConfig, {"critic": "separate"}),
    "grpo": (GRPOConfig, {}),
}
"""The algorithms that can mask, each in one update per rollout batch."""
EIGHT = {"rollout_batch_size": 8, "minibatch_size": 8}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """A policy that now and then ends a response within 60 tokens, and a reference that is far from it."""
    root = tmp_path_factory.mktemp("远")
    for name, scale in (("policy", 0.02), ("reference", 0.2)):
        make_tiny_model("gpt2", root / name, hidden_size=16, num_layers=1, max_length=128, initializer_range=scale)
    return {name: str(root / name) for name in ("policy", "reference")}


@pytest.fixture
def some_end(config, apart):
    """``some_end(kind, **changes)``: settings of two steps, in which most of 16 responses are cut."""

    def make(kind, **changes):
        sizes = {"rollout_batch_size": 16, "minibatch_size": 16, "samples_per_prompt": 4, "max_new_tokens": 60}
        models = {"model": apart["policy"], "reference": apart["reference"], "learning_rate": 1e-3}
        return config(kind, **models | sizes | {"eval_fraction": 0.0} | IN_THE_LOSS | changes)

    return make


def steps_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def varied(completions, **_):
    """A number that hardly two responses share."""
    return [float(sum(map(ord, completion)) % 101) for completion in completions]


@pytest.mark.parametrize("name", ONE_UPDATE)
def test_every_response_is_written_down_with_its_kl(some_end, name):
    """Also those that were cut, and the metrics of a step are those of all of them."""
    kind, changes = ONE_UPDATE[name]
    settings = some_end(kind, **changes, rollouts="all")
    train_online(settings, [varied])
    for step, metrics in enumerate(steps_of(settings.output), 1):
        rows = pq.read_table(settings.output / "rollouts" / f"step-{step:06d}.parquet").to_pylist()
        cut = sum(row["finish_reason"] == "length" for row in rows) / 16
        assert cut == pytest.approx(metrics["rollout/masked_frac"])
        assert 0 < cut < 1
        assert len({row["kl"] for row in rows}) == 16
        assert sum(row["kl"] for row in rows) / 16 == pytest.approx(metrics["reference/kl"], rel=1e-4)
        assert sum(row["length"] for row in rows) / 16 == pytest.approx(metrics["rollout/response_length"])


@pytest.mark.parametrize("name", ONE_UPDATE)
def test_kl_and_entropy_are_those_of_all_responses(config, make_learner, experience_of, name):
    """Worked out by passes of policy and reference before the update."""
    kind, changes = ONE_UPDATE[name]
    learner = make_learner(config(kind, **changes, **IN_THE_LOSS), noise=0.1)
    object.__setattr__(learner.sampler, "stop_ids", tuple(range(0, 256, 6)))
    experience = experience_of(learner)
    rollouts = experience.scored.rollouts
    assert 0 < len(experience.completions) < len(rollouts.lengths)
    batch, mask = rollouts.batch, rollouts.batch.response_mask
    with torch.no_grad():
        ours, theirs = (
            model(batch.ids, batch.attention_mask, mask, with_entropy=True)
            for model in (learner.policy, learner.reference)
        )
    differences = torch.where(mask, ours.logprobs - theirs.logprobs, 0.0)
    metrics = learn(learner, experience)
    assert metrics["reference/kl"] == pytest.approx(float(differences.sum(dim=1).mean()), rel=1e-5)
    assert metrics["policy/entropy"] == pytest.approx(float(ours.entropy[mask].mean()), rel=1e-5)
    mismatch = (rollouts.sampler_logprobs - ours.logprobs).abs()[mask].mean()
    assert metrics["rollout/sampler_mismatch"] == pytest.approx(float(mismatch), abs=1e-9)


def test_a_policy_that_never_stops_is_stopped_by_its_kl(some_end):
    """All its responses are cut, so nothing is learned; KL is measured all the same."""
    settings = some_end(GRPOConfig, max_new_tokens=3, steps=6, max_kl=1e-4, seed=1, **EIGHT)
    with pytest.raises(TrainingError, match=r"at step 3, has been above --max-kl 0\.0001 in 3 steps"):
        train_online(settings, [varied])
    assert [step["rollout/masked_frac"] for step in steps_of(settings.output)] == [1.0] * 3
