"""Runs with environments: tokens, masks, rewards, and that one turn is what it was."""

import json
import random
import sys
import types
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import worlds
from heedful import (
    ConfigError,
    CriticConfig,
    DataError,
    GRPOConfig,
    OnlineDPOConfig,
    PPOConfig,
    RewardError,
    SFTConfig,
    core,
    make_tiny_model,
    train_critic,
    train_grpo,
    train_online_dpo,
    train_ppo,
    train_sft,
)
from heedful.algorithms.online.evaluation import evaluate
from heedful.algorithms.online.rollout import rollout
from heedful.algorithms.online.rollout_files import write_rollouts
from heedful.algorithms.online.start import start
from heedful.algorithms.ppo import make_experience
from heedful.apps.label import ImportOptions
from heedful.apps.label.importing import read_items
from heedful.data.batches import collate
from heedful.data.dialogue import CALL_ID
from heedful.data.messages import as_dict, read_conversation
from heedful.engines.responses import Responses
from heedful.models.tiny import byte_tokenizer
from heedful.rewards.scoring import Ensemble, Reward
from heedful.types import Message, ToolCall
from jsonl import write_jsonl

pytestmark = pytest.mark.usefixtures("one_thread")
WORLDS = Path(worlds.__file__)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("环境")
    make_tiny_model("gpt2", root / "policy", hidden_size=32, num_layers=2, max_length=512)
    asked = [{"prompt": [{"role": "user", "content": f"你好 {i}"}], "goal": i % 3 + 1} for i in range(16)]
    write_jsonl(root / "prompts.jsonl", asked)
    return root


@pytest.fixture
def config(files, tmp_path):
    def make(kind=PPOConfig, **changes):
        settings = {"model": str(files / "policy"), "data": str(files / "prompts.jsonl"), "output": tmp_path / "run"}
        settings |= {
            "environment": (f"python:{WORLDS}:Talk",),
            "steps": 2,
            "rollout_batch_size": 8,
            "minibatch_size": 8,
        }
        settings |= {"max_new_tokens": 100, "max_prompt_tokens": 64, "eval_fraction": 0.0, "sample_every": 0}
        settings |= {"samples_per_prompt": 4 if kind is GRPOConfig else 1, "device": "cpu", "dtype": "float32"}
        return kind(**settings | changes)

    return make


def length(completions, **_):
    """Characters of the policy's last turn."""
    return [float(len(completion[-1]["content"])) for completion in completions]


class Forced:
    """In the place of sampling: each row's turns in order, as text, ids or a function of the prompt, then an end token."""

    def __init__(self, sampler, turns):
        self.sampler, self.turns, self.asked = sampler, turns, []

    def generate(self, policy, prompts, generator, version, most):
        said, words = [], self.turns[len(self.asked) % len(self.turns)]
        for prompt, limit in zip(prompts, most, strict=True):
            text = words(prompt.prompt) if callable(words) else words
            ids = self.sampler.renderer.encoder.literal(text) if isinstance(text, str) else text
            said.append([*ids, self.sampler.renderer.turn_end_id][:limit])
        self.asked.append({prompt.prompt.source: prompt.ids for prompt in prompts})
        batch = collate([prompt.ids for prompt in prompts], said, pad_id=self.sampler.renderer.pad_id)
        end = self.sampler.renderer.turn_end_id
        return Responses(
            batch=batch,
            truncated=torch.tensor([ids[-1] != end for ids in said]),
            logprobs=torch.where(batch.response_mask, -1.5, 0.0),
        )

    def take_retries(self):
        return None

    def close(self):
        pass


def forced(settings, rewards=(), turns=("甲", "乙乙")):
    learner = start(settings, list(rewards)).learner
    learner.sampler = replace(learner.sampler, source=Forced(learner.sampler, turns))
    return learner


def test_one_turn_without_tools_is_what_it_was(config, tmp_path):
    """An environment that says nothing and pays nothing: bit for bit the run without one."""
    alone, with_one = (
        train_ppo(config(environment=environment, output=tmp_path / name, max_new_tokens=12), [length])
        for name, environment in (("alone", ()), ("with", (f"python:{WORLDS}:Once",)))
    )
    one, other = (dict(run.policy.named_parameters()) for run in (alone, with_one))
    assert all(torch.equal(one[name], other[name]) for name in one)
    scores = [run.metrics["reward/score_mean"].dropna().tolist() for run in (alone, with_one)]
    assert scores[0] == scores[1]


def by_goal(learner):
    """The rollout batch of a learner, and its rows by the goal of their environment."""
    scored = rollout(learner, next(learner.prompts))
    rows = {int(one.prompt.columns["goal"]): row for row, one in enumerate(scored.completions)}
    return scored, [rows[goal] for goal in (1, 2, 3)]


def test_tokens_mask_and_rewards_of_an_episode(config):
    """Turns 甲, 乙乙, 甲 with their end tokens, and between them what the other one says; a turn's reward is at its end."""
    learner = forced(config(kl_coef=0.0))
    scored, rows = by_goal(learner)
    renderer, experience = learner.sampler.renderer, make_experience(learner, scored)
    decode, end = renderer.tokenizer.decode, renderer.tokenizer.convert_ids_to_tokens(renderer.turn_end_id)
    for goal, row in zip((1, 2, 3), rows, strict=True):
        asked, said, own = (one[row] for one in scored.batch.tokens())
        assert asked == renderer.prompt_ids(scored.completions[row].prompt.prompt)
        turns, between = ["甲", "乙乙", "甲"][:goal], []
        for turn in range(1, goal):
            conversation = (
                *scored.completions[row].prompt.prompt,
                Message("assistant", "x"),
                Message("user", f"问 {turn}"),
            )
            whole = decode(renderer.prompt_ids(conversation))
            between.append(whole[whole.rindex("x" + end) + 1 + len(end) :])
        expected = turns[0] + end + "".join(words + turn + end for words, turn in zip(between, turns[1:], strict=True))
        assert decode(said) == expected
        assert decode([token for token, is_own in zip(said, own, strict=True) if is_own]) == "".join(
            t + end for t in turns
        )

        rewards, mask = experience.rewards[row], experience.mask[row]
        ends = [place for place, token in enumerate(said) if token == renderer.turn_end_id and own[place]]
        paid = {place: 0.5 * (turn + 1) for turn, place in enumerate(ends)}
        paid[ends[-1]] += 10.0
        assert rewards.tolist() == [paid.get(place, 0.0) for place in range(len(mask))]
        assert scored.scores[row] == sum(paid.values())
        assert not scored.responses.logprobs[row][~mask].any()
        episode = scored.completions[row].episode
        assert [message.content for message in episode.turns if message.role == "assistant"] == turns
        assert (episode.ended, scored.completions[row].truncated) == ("environment", False)


def test_each_turn_is_sampled_behind_the_tokens_that_are_learned(config):
    """The policy writes the letters of its end token, and half a character: a text of them, tokenised again, has other
    ids."""
    learner = forced(config(max_turns=3))
    half = learner.sampler.renderer.encoder.literal("乙")[:2]
    learner.sampler.source.turns = ("甲<|end|>", half, "丙")
    scored, sampled = rollout(learner, next(learner.prompts)), learner.sampler.source.asked
    for completion, asked, said, own in zip(scored.completions, *scored.batch.tokens(), strict=True):
        turns = [ids[completion.prompt.source] for ids in sampled if completion.prompt.source in ids]
        assert len(turns) == completion.prompt.columns["goal"]
        starts = [at for at, is_own in enumerate(own) if is_own and not (at and own[at - 1])]
        assert turns == [[*asked, *said[:start]] for start in starts]
        assert scored.completions[0].episode.turns[0].content == "甲<|end|>"
        assert len(completion.ids) + 1 == completion.episode.ends[-1] == sum(own)


def test_each_row_has_what_was_said_to_it(config):
    """Rows end after one, two or three turns, and each says something else and is answered by its own environment."""

    def number(prompt):
        return prompt.prompt[-1].content.rpartition(" ")[2]

    learner = forced(config(environment=(f"python:{WORLDS}:Parrot",), max_turns=3), turns=(number,))
    for completion in rollout(learner, next(learner.prompts)).completions:
        mine, goal = number(completion.prompt), completion.prompt.columns["goal"]
        assert [one.content for one in completion.episode.turns] == [mine, *[f"{mine}？", mine] * (goal - 1)]
        assert completion.episode.rewards == (float(mine),) * goal


def test_a_critic_judges_turns(config):
    """Its targets are at the first tokens of turns: what comes from there on. Advantages are those of the whole turn."""
    learner = forced(config(kl_coef=0.0, action="turn", gae_lambda=1.0, whiten_advantages=False, critic="separate"))
    scored, (_, _, row) = by_goal(learner)
    experience = make_experience(learner, scored)
    own = experience.mask[row]
    starts = core.turn_starts(experience.mask)[row]
    assert experience.returns[row][starts].tolist() == pytest.approx([13.0, 12.5, 11.5], abs=1e-5)
    assert not experience.returns[row][~starts].any()
    turn = starts.long().cumsum(0)[own]
    first = experience.advantages[row][starts]
    torch.testing.assert_close(experience.advantages[row][own], first[turn - 1])
    expected = torch.tensor([13.0, 12.5, 11.5]) - experience.old_values[row][starts]
    torch.testing.assert_close(first, expected)


@pytest.mark.parametrize(("turn", "repeats"), [("一二三", False), ("一一一一", True)])
def test_a_turn_that_begins_as_an_earlier_one_is_no_repetition(config, turn, repeats):
    """Of 4-grams of bytes: a text repeats itself only within a turn."""
    learner = forced(config(max_new_tokens=160), turns=(turn,))
    scored = rollout(learner, next(learner.prompts))
    assert {len(one.episode.ends) for one in scored.completions} == {1, 2, 3}
    assert (make_experience(learner, scored).metrics["rollout/repeated_frac"] > 0) == repeats


@pytest.mark.parametrize(
    ("changes", "turns", "ended", "said"),
    [
        ({"max_turns": 2}, ("甲", "乙乙"), "turns", ["甲", "问 1", "乙乙"]),
        ({"max_new_tokens": 3}, ("甲乙",), "tokens", None),
        ({"max_new_tokens": 8}, ("甲", "乙乙"), "tokens", ["甲"]),
        ({"max_new_tokens": 12}, ("甲", "乙乙"), "tokens", ["甲"]),
        ({"max_new_tokens": 32}, ("甲", "乙" * 30), "tokens", None),
    ],
    ids=["turns", "tokens of a turn", "tokens of the other one", "no token for a turn", "tokens of a later turn"],
)
def test_what_ends_an_episode_has_its_name(config, changes, turns, ended, said):
    learner = forced(config(**changes), turns=turns)
    scored, (_, _, row) = by_goal(learner)
    completion = scored.completions[row]
    assert (completion.episode.ended, completion.truncated) == (ended, ended == "tokens")
    assert bool(scored.responses.truncated[row]) == completion.truncated
    if said is not None:
        assert [message.content for message in completion.episode.turns] == said
    assert scored.batch.response_mask.shape[1] <= learner.config.max_new_tokens
    assert all(own[-1] for own in scored.batch.tokens()[2]), "rewards are at the last token, which is the policy's"


@pytest.mark.parametrize("said", ["raise", "<think>想</think>raise"])
def test_an_environment_that_fails_costs_its_response_only(config, said):
    """Never a score of 0: it is left out and counted, and above --max-failed-rewards the run ends with the reason. The other
    one does not hear what the policy thinks."""
    settings = config(environment=(f"python:{WORLDS}:Faulty",), max_failed_rewards=0.2, max_turns=1)
    learner = forced(settings, [length], turns=(said,))
    with pytest.raises(RewardError, match="environment Faulty raised RuntimeError: 坏了"):
        rollout(learner, next(learner.prompts))


def test_no_reward_or_judge_is_asked_about_an_episode_that_failed(config, tmp_path):
    """Two of eight fail in reset(): there is no text to score, and the reason is the environment's. A judge gives no 0."""
    asked = [{"prompt": [{"role": "user", "content": f"{i}"}], "at": "reset" if i % 4 == 3 else ""} for i in range(8)]
    write_jsonl(tmp_path / "坏.jsonl", asked)
    broken = {"environment": (f"python:{WORLDS}:Faulty",), "data": str(tmp_path / "坏.jsonl"), "shuffle": False}
    learner = forced(config(**broken, max_failed_rewards=0.5, max_turns=1), [length], turns=("甲",))
    scored = rollout(learner, next(learner.prompts))
    assert sorted(scored.sampled.reward_scores.failed) == [3, 7]
    assert "environment Faulty raised RuntimeError: 坏了" in scored.sampled.reward_scores.note
    assert scored.scores == [2.0] * 6

    learner = replace_judges(learner, [Reward("裁判", length)])
    found = evaluate(learner, [learner.prompts.prompts[row] for row in range(8)])
    assert found["eval/judge_mean"] == 1.0
    assert found["eval/judge_failed_frac"] == found["eval/failed_frac"] == 0.25


def test_a_start_goes_on_if_a_trial_episode_fails(config, tmp_path, capsys):
    asked = [{"prompt": [{"role": "user", "content": f"{i}"}], "at": "reset" if i == 0 else ""} for i in range(8)]
    write_jsonl(tmp_path / "一.jsonl", asked)
    broken = {"environment": (f"python:{WORLDS}:Faulty",), "data": str(tmp_path / "一.jsonl"), "shuffle": False}
    start(config(**broken), [length])
    said = capsys.readouterr().err
    assert "WARNING: 1 of 2 trial episodes failed; correct the environment" in said
    assert "environment Faulty raised RuntimeError: 坏了" in said
    with pytest.raises(RewardError, match="environment Faulty raised RuntimeError: 坏了"):
        start(config(**broken, max_failed_rewards=0.0), [length])


def replace_judges(learner, judges):
    learner.judges = Ensemble(tuple(judges), max_failed=0.5)
    return learner


def test_responses_have_the_version_of_their_weights(config):
    learner = forced(config())
    assert rollout(learner, next(learner.prompts)).responses.versions.tolist() == [0] * 8


def test_an_environment_reads_the_prompt(config):
    learner = forced(config(environment=(f"python:{WORLDS}:Reader",)), [length])
    for completion in rollout(learner, next(learner.prompts)).completions:
        asked, _, read = completion.prompt.prompt[-1].content.partition(" user ")
        assert read == f"{asked} {completion.prompt.columns['goal']}"


def test_half_a_character_is_a_question_mark(config):
    """JSON may name it, and no tokenizer takes it."""
    learner = forced(config(environment=(f"python:{WORLDS}:Echo",), max_turns=2), [length], turns=("甲",))
    for completion in rollout(learner, next(learner.prompts)).completions:
        assert completion.prompt.prompt[-1].content.endswith("?")
        assert completion.episode.turns[1].content == "?"


def test_a_long_text_that_cannot_fit_is_not_tokenised(config):
    learner = forced(config(environment=(f"python:{WORLDS}:Endless",)), [length], turns=("甲",))
    assert {one.episode.ended for one in rollout(learner, next(learner.prompts)).completions} == {"tokens"}


def test_an_environment_that_pays_nothing_needs_rewards(config):
    with pytest.raises(ConfigError, match="Once has neither get_reward nor _turn_reward, and there are no --rewards"):
        start(config(environment=(f"python:{WORLDS}:Once",)), [])


def test_rewards_are_added_to_those_of_the_environment(config):
    result = train_grpo(config(GRPOConfig, reward_weights=(0.0,), max_new_tokens=60), [length])
    last = result.metrics.iloc[-1]
    assert last["reward/length"] > 0
    assert last["reward/score_mean"] == pytest.approx(last["reward/environment"])


def test_games_differ_from_step_to_step(config):
    learner = start(config(environment=(f"python:{WORLDS}:Dice",), max_turns=2), []).learner
    drawn = [
        {
            one.prompt.prompt[-1].content.rpartition(" ")[2]
            for one in rollout(learner, next(learner.prompts)).completions
        }
        for _ in range(2)
    ]
    assert len(drawn[0]) == len(drawn[1]) == 8
    assert not drawn[0] & drawn[1]


def test_rollout_files_have_the_turns(config):
    settings = config(rollouts="all", steps=1, environment=(f"python:{WORLDS}:Dice",), max_turns=2)
    train_ppo(settings)
    (path,) = (settings.output / "rollouts").iterdir()
    rows = pq.read_table(path).to_pylist()
    assert {len(row["turn_ends"]) for row in rows} == {1, 2}
    for row in rows:
        assert row["turn_ends"][-1] == len(row["response_ids"])
        assert sum(row["turn_rewards"]) == pytest.approx(row["score"])
        assert [turn["role"] for turn in row["turns"]] == ["assistant", "user", "assistant"][
            : 2 * len(row["turn_ends"]) - 1
        ]
        assert (row["ended"] == "tokens") == (row["finish_reason"] == "length")
        assert row["prompt_messages"][-1]["content"] == row["prompt"]
        decoded = [byte_tokenizer().decode(ids) for ids in row["other_ids"]]
        for message, between in zip(row["turns"][1::2], decoded, strict=False):
            assert message["content"] in between
        assert decoded[-1] == ""


CALLING = (
    "{%- for m in messages %}{{- '<|' + ('user' if m.role == 'tool' else m.role) + '|>' + (m.content or '') }}"
    "{%- for c in m.tool_calls or [] %}"
    """{{- '<call>{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) + '}' }}"""
    "{%- endfor %}{{- '<|end|>' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"
)
"""A chat template that writes calls of tools."""


def test_rollout_files_have_calls_of_tools(config, tmp_path):
    """As a conversation to be read again, by people too (`heedful label import`)."""
    (tmp_path / "工具.jinja").write_text(CALLING, encoding="utf-8")
    settings = config(
        environment=(f"python:{WORLDS}:Guess",),
        chat_template=str(tmp_path / "工具.jinja"),
        system_prompt="令牌 hf_" + "aB3" * 12,
        max_turns=2,
        max_new_tokens=300,
        max_prompt_tokens=128,
        rollouts="all",
    )
    said = 'ok <call>{"name": "guess", "arguments": {"word": "苹果"}}'
    scored = rollout(learner := forced(settings, turns=(said,)), next(learner.prompts))
    settings.output.mkdir()
    write_rollouts(settings, 1, scored, torch.zeros(8), {})
    for row in pq.read_table(settings.output / "rollouts" / "step-000001.parquet").to_pylist():
        conversation = read_conversation("row", "turns", row["prompt_messages"] + row["turns"])
        call = ToolCall("guess", '{"word": "苹果"}', CALL_ID)
        result = Message("tool", "yes", name="guess", tool_call_id=CALL_ID)
        called = Message("assistant", "ok", tool_calls=(call,))
        assert conversation[-3:] == (called, result, called)
        assert conversation[0] == Message("system", "令牌 ***"), "a secret of the settings is in no record"
        assert conversation[1].content.endswith(" It has 2 letters.")
        assert [tool["function"]["name"] for tool in json.loads(row["tools"])] == ["guess", "wait"]
        assert (row["ended"], row["failure"]) == ("turns", None)

    columns = "prompt=prompt_messages,completion=turns"
    items = read_items(str(settings.output / "rollouts"), ImportOptions(task="rating", columns=columns)).items
    played = [one.episode for one in scored.completions]
    assert [one.candidates[0].response for one in items] == [list(map(as_dict, one.turns)) for one in played]


def test_rollout_files_have_the_reason_of_a_failure(config, tmp_path):
    asked = [{"prompt": [{"role": "user", "content": f"{i}"}], "at": "reset" if i == 3 else ""} for i in range(8)]
    write_jsonl(tmp_path / "坏.jsonl", asked)
    settings = config(
        environment=(f"python:{WORLDS}:Faulty",),
        data=str(tmp_path / "坏.jsonl"),
        shuffle=False,
        max_failed_rewards=0.5,
        max_turns=1,
        rollouts="all",
    )
    scored = rollout(learner := forced(settings, [length], turns=("甲",)), next(learner.prompts))
    settings.output.mkdir()
    write_rollouts(settings, 1, scored, torch.zeros(7), {})
    rows = pq.read_table(settings.output / "rollouts" / "step-000001.parquet").to_pylist()
    assert "raised RuntimeError: 坏了" in rows[3]["failure"]
    assert (rows[3]["turns"], rows[3]["turn_ends"], rows[3]["other_ids"]) == ([], [], [])
    assert [row["failure"] for row in rows[:3] + rows[4:]] == [None] * 7


def test_a_run_that_is_resumed_plays_the_same_games(config, tmp_path):
    """Weights and metrics bit for bit; the environment draws numbers of its own."""
    settings = config(environment=(f"python:{WORLDS}:Dice",), max_turns=3, learning_rate=1e-2, steps=3)
    whole = train_ppo(replace(settings, output=tmp_path / "whole"))
    cut = replace(settings, output=tmp_path / "cut", save_every=1)

    def interrupt(step, metrics):
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_ppo(cut, on_step=interrupt)
    resumed = train_ppo(cut)
    one, other = (dict(run.policy.named_parameters()) for run in (whole, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("train", [train_online_dpo, train_critic], ids=["online DPO", "critic"])
def test_other_trainers_have_environments(config, train):
    kinds = {
        train_online_dpo: (OnlineDPOConfig, {"samples_per_prompt": 2}),
        train_critic: (CriticConfig, {"critic": "separate"}),
    }
    kind, changes = kinds[train]
    result = train(config(kind, eval_fraction=0.3, steps=1, rollout_batch_size=4, minibatch_size=4, **changes))
    assert result.metrics["rollout/turns"].dropna().iloc[0] >= 1


def test_a_record_names_its_environment(config, files, tmp_path):
    asked = [
        {"prompt": [{"role": "user", "content": f"{i}"}], "environment": ("Talk", "Once")[i % 2], "goal": 1}
        for i in range(8)
    ]
    both = (f"python:{WORLDS}:Talk", f"python:{WORLDS}:Once")
    data = tmp_path / "两个.jsonl"
    write_jsonl(data, asked)
    learner = forced(config(data=str(data), environment=both), [length], turns=("甲甲",))
    scored = rollout(learner, next(learner.prompts))
    for completion, score in zip(scored.completions, scored.scores, strict=True):
        assert score == 2.0 + (10.5 if completion.prompt.columns["environment"] == "Talk" else 0.0)
    for wrong in ("说", ["Talk"], None):
        write_jsonl(data, [*asked[:-1], asked[-1] | {"environment": wrong}])
        with pytest.raises(DataError, match=r"两个.jsonl:8: the column `environment` is .*; choose from Talk, Once"):
            start(config(data=str(data), environment=both), [length])


def test_raw_prompts_are_refused(config, tmp_path):
    write_jsonl(tmp_path / "raw.jsonl", [{"prompt": f"say {i}"} for i in range(8)])
    with pytest.raises(DataError, match=r"raw.jsonl:1: the prompt is raw text, but an environment speaks in turns"):
        start(config(data=str(tmp_path / "raw.jsonl")), [length])
    write_jsonl(tmp_path / "alone.jsonl", [{"prompt": [{"role": "system", "content": f"{i}"}]} for i in range(8)])
    with pytest.raises(DataError, match=r"alone.jsonl:1: the prompt ends with a message of the system"):
        start(config(data=str(tmp_path / "alone.jsonl")), [length])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": (random.Random(0).random,)}, "environment: random is not at the top of a file"),
        ({"environment": (lambda: None,)}, "environment: <lambda> is not at the top of a file"),
        ({"environment": ("game.py:Talk",)}, "--environment game.py:Talk is no class; use python:FILE.py:CLASS"),
        ({"environment": ("python:a.py:Talk", "python:b.py:Talk")}, "--environment names several classes Talk"),
        ({"environment": ("python:a.py:A", "python:a.py:B", "python:b.py:B")}, "--environment names several classes B"),
        ({"environment": (), "max_turns": 3}, "--max-turns 3 is about an environment, and there is none"),
        ({"overlong_buffer": 3}, "--overlong-buffer 3 is about the policy's own tokens"),
        ({"response_length": "fixed"}, "--response-length fixed does not go with --environment"),
        ({"sampler": ("python:a.py:E",)}, "--environment does not go with a --sampler of yours"),
        (
            {
                "sampler": ("vllm:http://a:1",),
                "async_steps": 1,
                "importance": "token-truncate",
                "sampler_weights": "nccl",
            },
            "--async-steps 1 with --environment needs the weights of an episode's first turn until its last",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(config, changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**changes)


@pytest.mark.parametrize("file", [None, worlds.__file__], ids=["notebook", "script"])
def test_a_class_of_the_main_module_is_refused(config, monkeypatch, file):
    main = types.ModuleType("__main__")
    if file is not None:
        main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(ConfigError, match="environment: Written is not at the top of a file"):
        config(environment=type("Written", (worlds.Talk,), {"__module__": "__main__"}))


def test_a_class_in_python_is_its_file_and_name(config):
    of_flag = config()
    assert config(environment=worlds.Talk) == config(environment=[worlds.Talk]) == of_flag
    assert replace(config(environment=worlds.Talk), seed=of_flag.seed) == of_flag


@pytest.mark.exhaustive
def test_turns_are_learned(tmp_path):
    """SFT on turns of nine letters by chance, an eighth of them a; then PPO by turns. Three turns pay 3 at most."""
    draw, conversations = random.Random(0), []
    for game in range(1024):
        said = [{"role": "user", "content": f"game {game}"}]
        for turn in range(3):
            said.append({"role": "assistant", "content": "".join(draw.choices("abcdefgh", k=9))})
            said += [{"role": "user", "content": "on"}] if turn < 2 else []
        conversations.append({"messages": said})
    common = {"device": "cpu", "dtype": "float32", "eval_fraction": 0.0, "sample_every": 0}
    make_tiny_model("qwen3", tmp_path / "base", hidden_size=64, num_layers=2, max_length=512)
    sft = SFTConfig(
        model=str(tmp_path / "base"),
        output=tmp_path / "sft",
        max_steps=150,
        batch_size=32,
        learning_rate=3e-3,
        **common,
    )
    train_sft(sft, data=conversations)
    settings = PPOConfig(
        model=str(tmp_path / "sft" / "final"),
        output=tmp_path / "ppo",
        environment=(f"python:{WORLDS}:Letters",),
        action="turn",
        gae_lambda=0.5,
        critic="separate",
        max_turns=3,
        max_new_tokens=80,
        max_prompt_tokens=32,
        steps=30,
        rollout_batch_size=64,
        minibatch_size=32,
        ppo_epochs=2,
        learning_rate=1e-3,
        lr_schedule="constant",
        kl_coef=0.0,
        **common,
    )
    asked = [{"prompt": [{"role": "user", "content": f"game {game}"}]} for game in range(256)]
    scores = train_ppo(settings, data=asked).metrics["reward/score_mean"].dropna().tolist()
    assert scores[0] < 0.6
    assert min(scores[-5:]) > 2.5
