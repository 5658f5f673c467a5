"""--max-prompt-tokens: longer prompts are refused, dropped or cut, and it is said."""

import pytest

from cases import often
from heedful import ConfigError, DataError, Message, OnlineDPOConfig, PPOConfig
from heedful.algorithms.online.start import start
from trainers import TRAIN

TALK = [{"role": "system", "content": "有礼"}, {"role": "user", "content": "old " * 30}]
TALK += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and now?"}]
KINDS = pytest.mark.parametrize("kind", often([PPOConfig, OnlineDPOConfig], [PPOConfig]))


@pytest.fixture
def long(config, written):
    """``long(kind, **changes)``: settings with four short prompts and one conversation that is longer than the default."""

    def make(kind=PPOConfig, **changes):
        rows = [{"prompt": prompt} for prompt in ("say ab", "say cd", "say ef", "say 苹果", TALK)]
        return config(kind, data=written("长.jsonl", rows), eval_fraction=0.0, **changes)

    return make


@KINDS
def test_a_prompt_over_the_limit_is_refused_and_named(long, kind, length):
    """Without the option it is what the response leaves of so small a context."""
    named, ways_out = (
        r"长.jsonl:5 \(\d+ tokens\)",
        "--too-long drop or --too-long truncate, or a model with a longer context",
    )
    with pytest.raises(DataError, match=f"1 of 5 prompts are longer than 116 tokens: .*{named}.*{ways_out}"):
        start(long(kind), [length])
    with pytest.raises(DataError, match=r"1 of 5 prompts are longer than 32 tokens.* --max-prompt-tokens above 32"):
        start(long(kind, max_prompt_tokens=32), [length])
    assert not long().output.exists()
    short = start(long(kind, max_prompt_tokens=100, too_long="drop", max_dropped=0.2), [length]).about["facts"]["data"]
    assert short == {"records": 5, "train": 4, "held_out": 0, "dropped_too_long": 1, "max_prompt_tokens": 100}


@KINDS
def test_a_prompt_that_is_cut_is_counted_and_rewards_see_all_of_it(long, kind, capsys):
    seen = []

    def reward(prompts, completions, **_):
        seen.extend(prompts)
        return [float(len(str(completion))) for completion in completions]

    sizes = {"rollout_batch_size": 10, "minibatch_size": 10, "samples_per_prompt": 2, "steps": 1}
    settings = long(kind, too_long="truncate", max_prompt_tokens=32, **sizes)
    _, learner, _, _ = start(settings, [reward])
    kept = (Message(**TALK[0]), Message(**TALK[-1]))
    assert learner.prompts.prompts[-1].ids == learner.sampler.renderer.prompt_ids(kept)
    summary = TRAIN[kind](settings, rewards=[reward])
    assert summary["data"] == {"records": 5, "train": 5, "held_out": 0, "truncated": 1, "max_prompt_tokens": 32}
    assert "truncated 1, max prompt tokens 32" in " ".join(capsys.readouterr().err.split())
    assert TALK in seen


def test_one_that_cannot_be_cut_is_named(long, length):
    with pytest.raises(DataError, match=r"长.jsonl:5: the prompt has \d+ tokens and cannot be cut to 11"):
        start(long(max_prompt_tokens=11, too_long="truncate"), [length])


def test_a_limit_that_leaves_no_room_for_a_response_is_refused(long, length):
    with pytest.raises(ConfigError, match="--max-prompt-tokens 117 and --max-new-tokens 12 together exceed the 128"):
        start(long(max_prompt_tokens=117), [length])
