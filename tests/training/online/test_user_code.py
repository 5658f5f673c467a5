"""Estimators, policy losses and engines of the user's own: as files that flags name, and as functions in Python."""

import hashlib
import inspect
import json

import pytest
import torch

import heedful
from heedful import ConfigError, GRPOConfig, train_grpo
from trees import differing


def centred(rewards, config):
    groups = rewards.per_response.view(-1, config.samples_per_prompt)
    return (groups - groups.mean(dim=1, keepdim=True)).flatten()


class Local:
    def __init__(self, policy, config):
        self.inner = heedful.LocalEngine(policy, max_new_tokens=config.max_new_tokens, seed=7)

    def generate(self, prompts):
        return self.inner.generate(prompts)

    def update_weights(self, policy):
        self.inner.update_weights(policy)

    def close(self):
        pass


CODE = f"""
import heedful

{inspect.getsource(centred)}
{inspect.getsource(Local)}
def per_token(rewards, config):
    return centred(rewards, config).unsqueeze(1).expand(rewards.response_mask.shape)

def clipped(logprobs, old_logprobs, advantages, response_mask, *, config, reduction):
    return heedful.core.ppo_policy_loss(
        logprobs, old_logprobs, advantages, response_mask, clip_range=config.clip_range, reduction=reduction
    )

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


COMMON = {
    "steps": 2, "rewards": ("rule:repetition",), "rollout_batch_size": 8, "minibatch_size": 4, "samples_per_prompt": 4,
    "max_new_tokens": 6, "eval_fraction": 0.0, "dtype": "float32", "learning_rate": 1e-2, "device": "cpu",
}  # fmt: skip


def of(folder):
    return {"model": str(folder / "tiny"), "data": str(folder / "prompts.jsonl")}


@pytest.fixture
def settings(folder, tmp_path):
    def make(**changes):
        common = COMMON | of(folder) | {"output": tmp_path / "run"}
        named = {k: f"python:{folder / '我的.py'}:{v[1:]}" if str(v).startswith("@") else v for k, v in changes.items()}
        if isinstance(named.get("sampler"), str):
            named["sampler"] = (named["sampler"],)
        return GRPOConfig(**common | named)

    return make


def weights(result):
    return {name: value.clone() for name, value in result.policy.state_dict().items()}


@pytest.fixture(scope="module")
def ours(folder):
    """The weights after two steps of ``settings(advantage="dr_grpo")``."""
    return weights(train_grpo(GRPOConfig(**COMMON | of(folder), output=folder / "ours", advantage="dr_grpo")))


@pytest.mark.parametrize(
    "changes",
    [{"advantage": "@centred"}, {"advantage": "@per_token"}, {"policy_loss": "@clipped"}, {"advantage": centred}],
    ids=lambda changes: "-".join(map(str, *changes.items())).split(" ")[0],
)
def test_own_code_that_does_what_heedfuls_does_gives_the_same_weights(settings, folder, ours, changes):
    """And the run writes down what the file held, or that there is none."""
    result = train_grpo(settings(**{"advantage": "dr_grpo"} | changes))
    assert differing(ours, weights(result)) == []
    if centred in changes.values():
        assert "python:in Python:centred" in (result.folder / "config.yaml").read_text(encoding="utf-8")
    else:
        written = "".join(path.read_text(encoding="utf-8") for path in result.folder.glob("*.json"))
        assert hashlib.sha256((folder / "我的.py").read_bytes()).hexdigest() in written


def test_an_engine_of_ones_own_samples_what_is_learned_from(settings, ours, tmp_path):
    """Named by its file, or its class given by itself."""
    named = weights(train_grpo(settings(sampler="@Local", advantage="dr_grpo")))
    config = settings(output=tmp_path / "class", sampler=Local, advantage="dr_grpo")
    assert config.sampler == (Local,)
    assert differing(named, weights(train_grpo(config))) == []
    assert differing(named, ours), "another seed, so other responses"


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
        ({"advantage": "@missing"}, r"--advantage: .*我的\.py has no function or class 'missing'; it has centred, .*"),
        ({"policy_loss": "python:/nowhere.py:f"}, r"--policy-loss: the file /nowhere.py of .* does not exist"),
        ({"advantage": "python:in Python:gone"}, r"--advantage: gone was given as a Python object .*; give it again"),
    ],
    ids=lambda x: str(x)[:24],
)
def test_mistakes_in_it_are_named(settings, changes, message):
    with pytest.raises(ConfigError, match=message):
        train_grpo(settings(**changes))


def test_the_reduction_of_a_policy_loss_is_that_of_the_whole_minibatch(settings, ours):
    """So micro-batches change no number."""
    found = weights(train_grpo(settings(policy_loss="@clipped", advantage="dr_grpo", micro_batch_size=1)))
    torch.testing.assert_close(found, ours, rtol=1e-4, atol=1e-5)


def scaled(factor):
    def loss(logprobs, old_logprobs, advantages, response_mask, *, config, reduction):
        surrogate, metrics = heedful.core.ppo_policy_loss(
            logprobs, old_logprobs, advantages, response_mask, clip_range=config.clip_range, reduction=reduction
        )
        return factor * surrogate, metrics

    return loss


def test_functions_of_one_name_are_each_their_own(settings, tmp_path):
    """Made before either is used, by the same factory; as rewards that choose the best, too."""

    def counting(number):
        return lambda completions, **_: [number] * len(completions)

    chosen = {"advantage": "dr_grpo", "eval_fraction": 0.5, "steps": 1}
    chosen |= {"rollout_batch_size": 4, "samples_per_prompt": 2}
    up, down = (
        settings(**chosen, policy_loss=scaled(sign), selection_rewards=(counting(sign),), output=tmp_path / str(sign))
        for sign in (1.0, -1.0)
    )
    assert up != GRPOConfig(**vars(up) | {"policy_loss": down.policy_loss})
    assert up.policy_loss is not down.policy_loss
    results = [train_grpo(one) for one in (up, down)]
    assert [one.summary["last_evaluation"]["eval/judge_mean"] for one in results] == [1.0, -1.0]
    plain = settings(**chosen, output=tmp_path / "plain")
    expected = weights(train_grpo(plain))
    assert [differing(expected, weights(one)) == [] for one in results] == [True, False]


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


def test_a_file_that_changed_is_read_again_by_the_next_run(settings, ours, tmp_path):
    """As somebody does in a notebook."""
    own = tmp_path / "损失.py"
    config = settings(advantage="dr_grpo", policy_loss=f"python:{own}:clipped")
    own.write_text(CODE.replace("    return heedful.core.ppo", "    return -1 * heedful.core.ppo"), encoding="utf-8")
    with pytest.raises(ConfigError, match="--policy-loss"):
        train_grpo(config)
    own.write_text(CODE, encoding="utf-8")
    assert differing(ours, weights(train_grpo(config))) == []
