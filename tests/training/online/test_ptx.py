"""PPO-ptx: the mixed-in loss is the mean log-likelihood of the records' tokens, and it keeps their likelihood up."""

import json
from dataclasses import replace

import pytest
import torch

from gradients import distance, flat_gradient
from heedful import ConfigError, DataError, train_ppo
from heedful.algorithms.online import ptx
from heedful.algorithms.online.rollout import rollout
from heedful.algorithms.online.start import start
from heedful.algorithms.ppo import learn, make_experience
from heedful.data.chat import Renderer
from heedful.models import Policy, load_causal_lm, load_tokenizer
from heedful.models.source import resolve
from heedful.training.metric_sums import MetricSums


@pytest.fixture
def settings(config, demonstrations):
    def make(**changes):
        sizes = {"rollout_batch_size": 4, "minibatch_size": 4, "samples_per_prompt": 1, "max_new_tokens": 8}
        return config(**(sizes | {"ppo_epochs": 1, "ptx_data": demonstrations, "ptx_coef": 2.0} | changes))

    return make


def double_policy(folder):
    return Policy(load_causal_lm(folder).double().eval())


def mix_of(config):
    renderer = Renderer(load_tokenizer(config.model))
    return ptx.mix_of(ptx.encode_mix(config, resolve(config.model), renderer), config, renderer)


@pytest.mark.parametrize(("size", "tokens", "times"), [(3, None, 2), (4, 1, 4)])
def test_the_gradient_is_coef_times_the_mean_nll_of_as_many_records_as_a_minibatch(
    settings, passes, size, tokens, times
):
    """By plain transformers on single rows, whatever the micro-batches."""
    config = settings(micro_batch_size=size, micro_batch_tokens=tokens, temperature=0.7)
    mix, again = mix_of(config), mix_of(config)
    policy, sums = double_policy(config.model), MetricSums()
    seen = passes(policy)
    mix.accumulate(policy, sums, config.micro_batch)
    assert len(seen) == times
    found = flat_gradient(policy)
    rows = [again.examples[i] for i in next(again.order)]
    assert len(rows) == 4
    assert len({len(row.response) for row in rows}) > 1
    policy.zero_grad()
    losses = []
    for row in rows:
        ids = torch.tensor([row.prompt + row.response])
        logp = policy.lm(input_ids=ids).logits.log_softmax(dim=-1)[0, len(row.prompt) - 1 : -1]
        losses += [-logp[t, token] for t, token in enumerate(row.response)]
    mean = torch.stack(losses).mean()
    (2.0 * mean).backward()
    assert distance(found, flat_gradient(policy)) < 1e-12
    assert sums.means(1)["loss/ptx"] == pytest.approx(float(mean.detach()), rel=1e-9)


@pytest.mark.exhaustive
def test_it_keeps_the_likelihood_of_the_demonstrations_up(settings, tmp_path, length):
    losses = {}
    for coef in (0.0, 5.0):
        changes = {"ptx_coef": coef} if coef else {"ptx_coef": 0.0, "ptx_data": None}
        config = settings(steps=6, learning_rate=5e-3, output=tmp_path / str(coef), **changes)
        summary = train_ppo(config, rewards=[length])
        mix = mix_of(settings())
        policy, sums = double_policy(str(config.output / "final")), MetricSums()
        mix.accumulate(policy, sums, config.micro_batch)
        losses[coef] = sums.means(1)["loss/ptx"]
        assert ("loss/ptx" in summary["last_step"]) == bool(coef)
    assert losses[5.0] < losses[0.0] - 0.5


def test_plain_text_will_do_and_is_written_down(settings, tmp_path, length):
    """A text is cut into pieces of the model's context (128 tokens), and the file's hash goes with the run."""
    text = tmp_path / "文.txt"
    text.write_text("从前有一只猫。" * 100, encoding="utf-8")
    config = settings(ptx_data=str(text), steps=1)
    summary = train_ppo(config, rewards=[length])
    bytes_and_end = 100 * len("从前有一只猫。".encode()) + 1
    assert summary["ptx"] == {"records": 1, "text_pieces": -(-(bytes_and_end - 1) // 127)}
    assert str(text) in json.loads((config.output / "environment.json").read_text(encoding="utf-8"))["data"]


def test_columns_are_those_of_the_prompts_alone(settings, written, length):
    questions = written("问.jsonl", [{"q": f"问{i}"} for i in range(12)])
    summary = train_ppo(settings(data=questions, columns="prompt=q", steps=1), rewards=[length])
    assert summary["ptx"] == {"records": 5}


def test_records_that_cannot_be_used_are_refused(settings, written, length):
    few = r"learns 6 records of --ptx-data \(--minibatch-size\), which has 5 records. Set"
    with pytest.raises(ConfigError, match=few):
        train_ppo(settings(rollout_batch_size=6, minibatch_size=6), rewards=[length])
    with pytest.raises(DataError, match=r"坏\.jsonl:1"):
        train_ppo(settings(ptx_data=written("坏.jsonl", [{"prompt": "问"}])), rewards=[length])
    assert not settings().output.exists()


def test_a_minibatch_that_is_discarded_uses_up_no_records(config, demonstrations, length):
    """Those of --ptx-data come in their order, each learned from: with approx_kl_limit reached at the second minibatch."""
    ptx = {"ptx_data": demonstrations, "ptx_coef": 0.5, "minibatch_size": 4, "eval_fraction": 0.0}
    settings = config(learning_rate=0.1, ppo_epochs=4, **ptx)
    for limit, records in ((None, 32), (1e-9, 4)):
        learner = start(replace(settings, approx_kl_limit=limit), [length]).learner
        done = learn(learner, make_experience(learner, rollout(learner, next(learner.prompts)))).metrics
        assert 8 * done.get("policy/update_frac", 1) == records / 4, "four for each update that was made"
        state = learner.ptx.order.state_dict()
        assert 5 * state["epoch"] + state["cursor"] == records
