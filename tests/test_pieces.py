"""The pieces that people hold in a notebook: a policy, an engine, scores, log-probs; and the examples made of them."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import heedful
from heedful import CheckpointError, ConfigError, DataError, Message, RewardError, core
from heedful.models import load_tokenizer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
QUESTIONS = ["2+2等于几？", "hello", "请只回答：通义千问"]


@pytest.fixture
def policy(tiny):
    return heedful.Policy.from_pretrained(tiny("gpt2"), value_head=True, device="cpu", dtype="float32")


@pytest.fixture
def batch(policy):
    return heedful.LocalEngine(policy, max_new_tokens=6, temperature=0.7).generate(QUESTIONS)


def test_a_batch_is_tensors_and_texts(policy, batch):
    assert len(batch) == len(batch.texts) == 3
    assert batch.ids.shape == batch.attention_mask.shape
    assert batch.mask.shape == batch.logprobs.shape
    assert batch.mask.sum(dim=1).tolist() == batch.rollouts.lengths.tolist()
    written = [row[mask].tolist() for row, mask in zip(batch.ids[:, -batch.mask.shape[1] :], batch.mask, strict=True)]
    for ids, text, cut in zip(written, batch.texts, batch.truncated.tolist(), strict=True):
        assert policy.tokenizer.decode(ids if cut else ids[:-1]) == text
    chosen = batch.select(torch.tensor([2, 0]))
    assert chosen.texts == [batch.texts[2], batch.texts[0]]
    assert torch.equal(chosen.ids, batch.ids[[2, 0]])


def test_log_probs_are_those_of_sampling(policy, batch):
    """At the temperature of the batch; with gradients the policy itself gives the same numbers."""
    found = heedful.logprobs(policy, batch, micro_batch_size=2)
    torch.testing.assert_close(found, batch.logprobs, rtol=1e-4, atol=1e-5)
    policy.train()
    assert policy.lm.config.embd_pdrop > 0, "a model with dropout, which is switched off"
    new = policy(batch.ids, batch.attention_mask, batch.mask, temperature=0.7)
    torch.testing.assert_close(new.logprobs, found)
    assert new.logprobs.requires_grad
    assert not found.requires_grad
    assert not found[~batch.mask].any()


def test_a_frozen_copy_stays_and_learns_nothing(policy, batch):
    reference = policy.frozen_copy()
    before = heedful.logprobs(reference, batch)
    assert torch.equal(before, heedful.logprobs(policy, batch))
    with torch.no_grad():
        policy.lm.get_output_embeddings().weight.mul_(2)
    assert torch.equal(heedful.logprobs(reference, batch), before)
    assert not torch.equal(heedful.logprobs(policy, batch), before)
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert reference.tokenizer is not None


def test_values_are_those_of_the_head(policy, batch, tiny):
    with torch.no_grad():
        policy.value_head.weight.normal_()
    found = heedful.values(policy, batch)
    torch.testing.assert_close(found, policy(batch.ids, batch.attention_mask, batch.mask).values.detach())
    assert found[batch.mask].any()
    without = heedful.Policy.from_pretrained(tiny("gpt2"), device="cpu")
    with pytest.raises(ValueError, match="value_head=True"):
        heedful.values(without, batch)


def test_a_model_in_memory_is_used_as_it_is(tiny):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny("gpt2")), load_tokenizer(tiny("gpt2"))
    policy = heedful.Policy.from_pretrained(model, tokenizer)
    assert policy.lm is model
    assert len(heedful.LocalEngine(policy, max_new_tokens=2).generate(["a"])) == 1
    with pytest.raises(CheckpointError, match=r"pass Policy\.from_pretrained\(model, tokenizer\)"):
        heedful.Policy.from_pretrained(model)


def test_sampling_is_that_of_the_seed_and_of_the_weights_now(policy):
    first, second, other = (
        heedful.LocalEngine(policy, max_new_tokens=8, seed=seed).generate(["好"] * 4).texts for seed in (1, 1, 2)
    )
    assert first == second != other
    engine = heedful.LocalEngine(policy, max_new_tokens=8, seed=1)
    with torch.no_grad():
        policy.lm.get_output_embeddings().weight.normal_(generator=torch.Generator().manual_seed(0))
    assert engine.generate(["好"] * 4).texts != first


def test_prompts_are_texts_conversations_or_rows(tiny):
    policy = heedful.Policy.from_pretrained(tiny("gpt2"), device="cpu", chat_template="plain")
    engine = heedful.LocalEngine(policy, max_new_tokens=3)
    asked = [{"role": "user", "content": "你好"}]
    found = engine.generate(
        ["User: 你好\nAssistant:", asked, [Message("user", "你好")], {"prompt": asked, "answer": "好"}]
    )
    prompts = [row[mask][: -int(n)].tolist() for row, mask, n in zip(
        found.ids, found.attention_mask, found.rollouts.lengths, strict=True)]  # fmt: skip
    assert prompts[0] == prompts[1] == prompts[2] == prompts[3]
    seen = []
    heedful.score(lambda completions, answer=None, **_: seen.append(answer) or [0.0] * len(completions), found)
    assert seen == [[None, None, None, "好"]]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("one text", "takes a list of prompts, got 'one text'"),
        ([], r"takes a list of prompts, got \[\]"),
        ([{"question": "a"}], "prompt 0 has no `prompt`, but question; rename the column"),
        (["a", 3], r"prompt 1: `prompt` is 3"),
        (["好" * 400], r"prompt 0 has 1200 tokens; the model reads \d+ besides max_new_tokens=6"),
    ],
)  # fmt: skip
def test_what_is_no_prompt(policy, prompts, message):
    with pytest.raises(DataError, match=message):
        heedful.LocalEngine(policy, max_new_tokens=6).generate(prompts)


def test_an_engine_that_cannot_sample(policy):
    with pytest.raises(ConfigError, match="temperature"):
        heedful.LocalEngine(policy, temperature=-1)
    policy.tokenizer = None
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        heedful.LocalEngine(policy)


def lengths(completions, **_):
    return [float(len(text)) for text in completions]


def test_scores_are_the_sum_of_the_rewards(batch):
    expected = torch.tensor(lengths(batch.texts))
    assert torch.equal(heedful.score(lengths, batch), expected)
    both = heedful.score([lengths, "rule:repetition"], batch)
    assert torch.equal(both, expected + heedful.score("rule:repetition", batch))
    loaded = heedful.load_rewards([lengths, "rule:repetition"])
    assert torch.equal(heedful.score(loaded, batch), both)


def test_a_reward_that_fails_is_an_error(batch):
    def broken(completions, **_):
        raise KeyError("no")

    with pytest.raises(RewardError, match="no"):
        heedful.score(broken, batch)
    with pytest.raises(RewardError, match="returned 1 scores for 3 responses"):
        heedful.score(lambda completions, **_: [1.0], batch)
    with pytest.raises(ConfigError, match="no rule 'nothing'"):
        heedful.score("rule:nothing", batch)


# Examples -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def example():
    """``example(name, **constants)``: an example's module, with some of its constants changed."""

    def load(name, **constants):
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for constant, value in constants.items():
            assert hasattr(module, constant)
            setattr(module, constant, value)
        return module

    return load


def test_ppo_by_hand_learns(example, tmp_path, capsys):
    heedful.make_tiny_model("gpt2", tmp_path / "tiny", hidden_size=64, max_length=128)
    rewards = example("ppo_by_hand", train_steps=16).main(str(tmp_path / "tiny"))
    assert len(rewards) == 16
    assert sum(rewards[-4:]) > 1.3 * sum(rewards[:4])
    assert "step=15 rm_reward=" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 60


def test_the_core_that_examples_use_is_public():
    assert {"gae", "kl_shaped_rewards", "response_kl", "ppo_policy_loss", "value_loss", "whiten"} <= set(core.__all__)
