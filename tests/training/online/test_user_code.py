"""Estimators, policy losses and engines of the user's own: as files that flags name, and as functions in Python."""

import hashlib
import json

import pytest
import torch

import heedful
from heedful import ConfigError, GRPOConfig, train_grpo

CODE = """
import torch
import heedful

def centred(rewards, config):
    groups = rewards.per_response.view(-1, config.samples_per_prompt)
    return (groups - groups.mean(dim=1, keepdim=True)).flatten()

def per_token(rewards, config):
    return centred(rewards, config).unsqueeze(1).expand(rewards.response_mask.shape)

def clipped(logprobs, old_logprobs, advantages, response_mask, *, config, reduction):
    return heedful.core.ppo_policy_loss(
        logprobs, old_logprobs, advantages, response_mask, clip_range=config.clip_range, reduction=reduction
    )

class Local:
    def __init__(self, policy, config):
        self.inner = heedful.LocalEngine(policy, max_new_tokens=config.max_new_tokens, seed=7)
    def generate(self, prompts):
        return self.inner.generate(prompts)
    def update_weights(self, policy):
        self.inner.update_weights(policy)
    def close(self):
        pass

class Half(Local):
    def generate(self, prompts):
        return self.inner.generate(prompts[::2])

class Longer(Local):
    def __init__(self, policy, config):
        self.inner = heedful.LocalEngine(policy, max_new_tokens=config.max_new_tokens + 1)

def fails(rewards, config):
    return rewards.nothing

def number(rewards, config):
    return 1.0

def no_tuple(*tensors, config, reduction):
    return reduction.tokens(tensors[0], tensors[3])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("自己")
    heedful.make_tiny_model("gpt2", folder / "tiny", hidden_size=16, max_length=64)
    rows = [{"prompt": text} for text in ("你好", "say ab", "say cd", "say ef")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "我的.py").write_text(CODE, encoding="utf-8")
    return folder


@pytest.fixture
def settings(folder, tmp_path):
    def make(**changes):
        common = {
            "model": str(folder / "tiny"), "data": str(folder / "prompts.jsonl"), "output": tmp_path / "run", "steps": 2,
            "rewards": ("rule:repetition",), "rollout_batch_size": 8, "minibatch_size": 4, "samples_per_prompt": 4,
            "max_new_tokens": 6, "eval_fraction": 0.0, "dtype": "float32", "learning_rate": 1e-2, "device": "cpu",
        }  # fmt: skip
        named = {k: f"python:{folder / '我的.py'}:{v[1:]}" if str(v).startswith("@") else v for k, v in changes.items()}
        if "sampler" in named:
            named["sampler"] = (named["sampler"],)
        return GRPOConfig(**common | named)

    return make


def weights(result):
    return {name: value.clone() for name, value in result.policy.state_dict().items()}


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_own_code_that_does_what_heedfuls_does_gives_the_same_weights(settings, tmp_path):
    ours = weights(train_grpo(settings(advantage="dr_grpo")))
    for number, changes in enumerate(
        ({"advantage": "@centred"}, {"advantage": "@per_token"}, {"advantage": "dr_grpo", "policy_loss": "@clipped"})
    ):
        assert same(ours, weights(train_grpo(settings(**changes, output=tmp_path / str(number))))), changes
    assert not same(ours, weights(train_grpo(settings(output=tmp_path / "other")))), "a negative control"


def test_a_function_in_python_is_what_a_file_is(settings, tmp_path):
    def centred(rewards, config):
        groups = rewards.per_response.view(-1, config.samples_per_prompt)
        return (groups - groups.mean(dim=1, keepdim=True)).flatten()

    ours = weights(train_grpo(settings(advantage="dr_grpo")))
    assert same(ours, weights(train_grpo(settings(advantage=centred, output=tmp_path / "function"))))
    written = (tmp_path / "function" / "config.yaml").read_text(encoding="utf-8")
    assert "python:in Python:centred" in written


def test_an_engine_of_ones_own_samples_what_is_learned_from(settings, tmp_path):
    ours = weights(train_grpo(settings(sampler="@Local")))
    again = weights(train_grpo(settings(sampler="@Local", output=tmp_path / "again")))
    other = weights(train_grpo(settings(output=tmp_path / "other")))
    assert same(ours, again)
    assert not same(ours, other), "another seed, so other responses"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage": "@fails"}, r"--advantage python:.*fails raised AttributeError: .*nothing.*我的\.py, line \d+\)"),
        ({"advantage": "@number"}, r"--advantage .*number returned float, not advantages of shape \[8, 6\] or \[8\]"),
        ({"policy_loss": "@no_tuple"}, r"--policy-loss .*no_tuple must return \(loss, metrics\)"),
        ({"sampler": "@Half"}, r"--sampler: Half.generate returned \d responses? for \d+ prompts?"),
        (
            {"sampler": "@Longer"},
            r"--sampler: Longer.generate returned a response of 7 tokens, above --max-new-tokens 6",
        ),
        ({"advantage": "@missing"}, r"--advantage: .*我的\.py has no function 'missing'; it has centred, .*"),
        ({"policy_loss": "python:/nowhere.py:f"}, r"--policy-loss: the file /nowhere.py of .* does not exist"),
        ({"advantage": "python:in Python:gone"}, r"--advantage: gone was given as a Python object .*; give it again"),
    ],
    ids=lambda x: str(x)[:24],
)
def test_mistakes_in_it_are_named(settings, changes, message):
    with pytest.raises(ConfigError, match=message):
        train_grpo(settings(**changes))


def test_a_run_writes_down_what_the_file_held(settings, folder):
    result = train_grpo(settings(advantage="@centred"))
    written = "".join(path.read_text(encoding="utf-8") for path in result.folder.glob("*.json"))
    assert hashlib.sha256((folder / "我的.py").read_bytes()).hexdigest() in written


def test_the_reduction_of_a_policy_loss_is_that_of_the_whole_minibatch(settings, tmp_path):
    """So micro-batches change no number."""
    whole = weights(train_grpo(settings(policy_loss="@clipped", advantage="dr_grpo")))
    parts = settings(policy_loss="@clipped", advantage="dr_grpo", micro_batch_size=1, output=tmp_path / "parts")
    for name, value in weights(train_grpo(parts)).items():
        torch.testing.assert_close(value, whole[name], rtol=1e-4, atol=1e-5)


def scaled(factor):
    def loss(logprobs, old_logprobs, advantages, response_mask, *, config, reduction):
        surrogate, metrics = heedful.core.ppo_policy_loss(
            logprobs, old_logprobs, advantages, response_mask, clip_range=config.clip_range, reduction=reduction
        )
        return factor * surrogate, metrics

    return loss


def test_functions_of_one_name_are_each_their_own(settings, tmp_path):
    """Made before either is used, by the same factory."""
    ours = weights(train_grpo(settings(advantage="dr_grpo")))
    up, down = (
        settings(advantage="dr_grpo", policy_loss=scaled(sign), output=tmp_path / str(sign)) for sign in (1.0, -1.0)
    )
    assert up != heedful.GRPOConfig(**vars(up) | {"policy_loss": down.policy_loss})
    assert up.policy_loss is not down.policy_loss
    assert same(ours, weights(train_grpo(up)))
    assert not same(ours, weights(train_grpo(down)))


def test_rewards_of_one_name_that_choose_the_best_are_each_their_own(settings, tmp_path):
    def counting(number):
        return lambda completions, **_: [number] * len(completions)

    chosen = {"eval_fraction": 0.5, "rollout_batch_size": 4, "samples_per_prompt": 2}
    configs = [settings(**chosen, selection_rewards=(counting(n),), output=tmp_path / str(n)) for n in (2.0, 3.0)]
    assert [train_grpo(one).summary["last_evaluation"]["eval/judge_mean"] for one in configs] == [2.0, 3.0]


def test_a_run_resumes_with_the_same_function_only(settings):
    """Another object of the same source and closure is the same; another value in the closure is another function."""

    def interrupt(step, metrics):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_grpo(settings(policy_loss=scaled(1.0)), on_step=interrupt)
    loss = r"'python:in Python:loss \(source \w{12}\)'"
    said = f"--policy-loss: {loss} in the run, {loss} now"
    with pytest.raises(ConfigError, match=said):
        train_grpo(settings(policy_loss=scaled(-1.0)))
    assert train_grpo(settings(policy_loss=scaled(1.0))).summary["steps"] == 2


def test_a_file_that_changed_is_read_again_by_the_next_run(settings, folder, tmp_path):
    """As somebody does in a notebook."""
    own, changes = (
        tmp_path / "损失.py",
        {"advantage": "dr_grpo", "policy_loss": f"python:{tmp_path / '损失.py'}:clipped"},
    )
    own.write_text(CODE, encoding="utf-8")
    ours = weights(train_grpo(settings(**changes)))
    own.write_text(CODE.replace("    return heedful.core.ppo", "    return -1 * heedful.core.ppo"), encoding="utf-8")
    with pytest.raises(ConfigError, match="--policy-loss"):
        train_grpo(settings(**changes, output=tmp_path / "broken"))
    own.write_text(CODE, encoding="utf-8")
    assert same(ours, weights(train_grpo(settings(**changes, output=tmp_path / "again"))))


def test_an_engines_class_is_given_by_itself(settings, tmp_path):
    class Local:
        def __init__(self, policy, config):
            self.inner = heedful.LocalEngine(policy, max_new_tokens=config.max_new_tokens, seed=7)
            self.generate, self.update_weights = self.inner.generate, self.inner.update_weights

        def close(self):
            pass

    named = weights(train_grpo(settings(sampler="@Local")))
    config = heedful.GRPOConfig(**vars(settings(output=tmp_path / "class")) | {"sampler": Local})
    assert config.sampler == (Local,)
    assert same(named, weights(train_grpo(config)))
