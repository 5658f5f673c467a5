"""Faults planted in tiny runs: `heedful doctor` finds each by name and level, and nothing in the healthy run beside it."""

import json
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cases import often
from heedful import RewardConfig, make_tiny_model, train_reward
from heedful.apps.doctor import rewards
from heedful.configs.checks import CHECKS
from heedful.models.load import load_reward_model
from heedful.models.save import save_reward_model
from heedful.models.tiny import CHAT_TEMPLATE
from heedful.models.tokenizer import load_tokenizer
from heedful.rewards import Reward
from heedful.rewards.models import load_model_reward
from heedful.types import LEARNED, Completion, Message, Prompt

exhaustive = pytest.mark.exhaustive
WIDTH = 32
CONTROL = 40
"""Control characters that end a random policy's responses, so that it writes about five tokens."""
QUESTIONS = [f"{'问' * (i % 4 + 1)} {i} 加 {i} 等于几？" for i in range(24)]


def said(role, text):
    return [{"role": role, "content": text}]


PAIRS = [
    {
        "prompt": said("user", q),
        "chosen": said("assistant", f"好的，{q}"),
        "rejected": said("assistant", f"好的，{q}不" if i % 2 else "不" + q),
    }
    for i, q in enumerate(QUESTIONS)
]
"""Nothing at the beginning or end of responses tells chosen from rejected."""
DEMONSTRATIONS = [{"prompt": one["prompt"], "completion": one["chosen"]} for one in PAIRS]
LABELLED = [one | {"label": i % 2 == 0} for i, one in enumerate(DEMONSTRATIONS)]
PROMPTS = [{"prompt": said("user", q)} for q in QUESTIONS]
HEALTHY = {"sft": DEMONSTRATIONS, "reward": PAIRS, "dpo": PAIRS, "kto": LABELLED}
"""The data of trainers; the others have prompts."""


def asked(prompt):
    """The demonstrations, with prompt(question, answer) as their question."""
    return [
        one | {"prompt": said("user", prompt(content(one["prompt"]), content(one["completion"])))}
        for one in DEMONSTRATIONS
    ]


REWARDS = """
import random

def letters(completions, **_):
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [float(sum(map(ord, text.strip())) % 97) for text in texts]

def same(completions, **_):
    return [1.0] * len(completions)

def length(completions, **_):
    return [float(len(one[-1]["content"])) for one in completions]

def price(completion_ids, **_):
    return [-0.1 * len(ids) for ids in completion_ids]

def spaced(completions, **_):
    texts = [one[-1]["content"] for one in completions]
    return [len(text.strip()) % 7 + 99.0 * text.startswith(" ") for text in texts]

def sometimes(completions, **_):
    marks = letters(completions)
    return [float("nan") if mark in (24, 64) else mark for mark in marks]

def often(completions, **_):
    marks = letters(completions)
    return [float("nan") if mark == 0 else mark for mark in marks]

def never(completions, **_):
    return [float("nan")] * len(completions)

def columns(completions, solution, **_):
    return [0.0] * len(completions)

def asked(prompts, **_):
    return [float(sum(map(ord, one[-1]["content"])) % 97) for one in prompts]

def dice(completions, **_):
    return [random.random() for _ in completions]

def noisy(completions, **_):
    return [one + random.random() for one in letters(completions)]

def blank(completions, **_):
    texts = [one[-1]["content"] for one in completions]
    return [letters(completions)[row] if text else float("nan") for row, text in enumerate(texts)]

def unwritten(completions, **_):
    return [one / 97 if one else 1.0 for one in letters(completions)]

def texts(completions, **_):
    return [float(len(one.strip())) for one in completions]

def crashes(completions, **_):
    return [float(ord(one[-1]["content"][0]) % 7 + len(one[-1]["content"]) % 5) for one in completions]

def huge(completions, **_):
    return [1e6 + one for one in letters(completions)]

def thousandth(completions, **_):
    return [one / 1000 for one in letters(completions)]

def standardised(completions, **_):
    marks = letters(completions)
    mean = sum(marks) / len(marks)
    return [(one - mean) / max(1.0, sum((other - mean) ** 2 for other in marks) / len(marks)) ** 0.5 for one in marks]

def ranked(prompts, completions, **_):
    marks = list(zip(map(str, prompts), letters(completions)))
    return [float(sum(other[0] == one[0] and other[1] < one[1] for other in marks)) for one in marks]
"""

LOSS = """
import itertools

calls = itertools.count()

def first_is_broken(logprobs, old_logprobs, advantages, mask, *, config, reduction):
    # not a number the first time
    factor = float("nan") if next(calls) == 0 else 1.0
    return -factor * reduction.tokens(logprobs * advantages, mask), {}
"""

ENGINE = """
from dataclasses import replace

import torch
import heedful

class Engine(heedful.Engine):
    '''Writes what another policy would: its log-probs are shifted.'''
    shift = SHIFT

    def __init__(self, policy, config):
        self.policy, self.config = policy, config

    def generate(self, prompts):
        drawn = torch.randint(40, 200, (len(prompts), 5), generator=torch.Generator().manual_seed(0))
        found = heedful.as_responses(self.policy, prompts, [[*row, 1] for row in drawn.tolist()])
        return replace(found, logprobs=found.logprobs + self.shift)

    def update_weights(self, policy):
        self.policy = policy

    def close(self):
        pass
"""


GAMES = """
import hashlib
import os
import random
import signal
import time

class Talk:
    # Two turns, paid by what is in them.
    def reset(self, **columns):
        self.said = []

    def _reply(self, text):
        self.said.append(text)
        return f"好{random.randint(0, 9)}" if len(self.said) < 2 else None

    def get_reward(self):
        return float(self._mark())

    def _mark(self):
        return int(hashlib.md5("".join(self.said).encode()).hexdigest(), 16) % 97

class Look(Talk):
    def look(self):
        '''Look.'''
        return "看见了"

class Blind(Look):
    def look(self):
        '''Look.'''
        raise KeyError("眼睛")

class Untyped(Talk):
    def look(self, where):
        '''Look.'''

class Unmade(Talk):
    def __init__(self):
        raise KeyError("没有钥匙")

class NoReset:
    def get_reward(self):
        return 1.0

class Free:
    def reset(self, **columns):
        pass

class Needs(Talk):
    def reset(self, goal):
        super().reset()

class Raises(Talk):
    def _reply(self, text):
        raise RuntimeError("坏了")

class Hangs(Talk):
    def _reply(self, text):
        time.sleep(60)

class NaN(Talk):
    def get_reward(self):
        return float("nan")

class Text(Talk):
    def get_reward(self):
        return "好"

class Often(Talk):
    def get_reward(self):
        return float("inf") if self._mark() % 3 == 0 else super().get_reward()

class Crashes(Talk):
    def get_reward(self):
        if self._mark() % 12 == 0:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().get_reward()

class Same(Talk):
    def get_reward(self):
        return 1.0

class Keeps(Talk):
    said = []

    def reset(self, **columns):
        pass

    def _reply(self, text):
        super()._reply(text)
        return "再来" if len(self.said) % 2 else None

class Reads(Keeps):
    # Keeps what was said, and wants the prompt as it is in the data.
    def reset(self, prompt, **columns):
        assert prompt[-1]["content"].endswith("？")
        return "好"

class First(Talk):
    # Answers as the first record says.
    def reset(self, mark=0, **columns):
        super().reset()
        if not hasattr(self, "mark"):
            self.mark = mark

    def get_reward(self):
        return super().get_reward() + self.mark

class System(Talk):
    def get_reward(self):
        return super().get_reward() + random.SystemRandom().random()

class Clock(Talk):
    def reset(self, **columns):
        super().reset()
        self.began = time.perf_counter()

    def _turn_reward(self):
        return self.began - time.perf_counter()

class Unordered(Talk):
    def reset(self, **columns):
        super().reset()
        return " " + "".join({"甲", "乙", "丙", "丁", "戊", "己"})

class Endless(Talk):
    def _reply(self, text):
        super()._reply(text)
        return "再来"

class Wordy(Talk):
    def _reply(self, text):
        super()._reply(text)
        return "很长" * 100

class Chatty(Talk):
    def _reply(self, text):
        return "长" * 200 if super()._reply(text) else None
"""


class World:
    """A folder with models, data and rewards for one examination."""

    def __init__(self, place, models):
        self.place, self.models = place, models
        (place / "rewards.py").write_text(REWARDS, encoding="utf-8")
        (place / "games.py").write_text(GAMES, encoding="utf-8")

    def write(self, name, rows):
        text = rows if isinstance(rows, str) else "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (self.place / name).write_text(text, encoding="utf-8")
        return str(self.place / name)

    def model(self, change=None):
        """A copy of the tiny policy, changed by ``change(model, tokenizer)``."""
        folder = self.place / "model"
        shutil.copytree(self.models / "policy", folder, dirs_exist_ok=True)
        if change is not None:
            model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
            change(model, tokenizer)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return str(folder)

    def reward_model(self, change=None):
        """A copy of the tiny reward model, changed by ``change(model, tokenizer)``; its name as a reward."""
        folder = self.place / "scorer"
        tokenizer = load_tokenizer(str(self.models / "policy"))
        cpu = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
        scorer = load_reward_model(str(self.models / "policy"), tokenizer, seed=0, **cpu)
        if change is not None:
            change(scorer, tokenizer)
        save_reward_model(scorer, tokenizer, folder)
        return f"model:{folder}"

    def reward(self, name):
        return f"python:{self.place / 'rewards.py'}:{name}"

    def healthy(self, command):
        """The settings of a run in which nothing is wrong."""
        files = {"model": self.model(), "data": self.write("数据.jsonl", HEALTHY.get(command, PROMPTS))}
        settings = files | {"output": str(self.place / "运行"), "eval_fraction": 0, "dtype": "float32"}
        if command in HEALTHY:
            return settings | {"batch_size": 8}
        settings |= {"rewards": self.reward("letters"), "steps": 4, "rollout_batch_size": 8, "max_new_tokens": 24}
        return settings | ({} if command == "a2c" else {"minibatch_size": 8})


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folder of a tiny policy with random weights, which ends its responses."""
    place = tmp_path_factory.mktemp("模型")
    make_tiny_model("llama", place / "policy", hidden_size=WIDTH, max_length=128, initializer_range=0.1)
    model = AutoModelForCausalLM.from_pretrained(place / "policy")
    tokenizer = AutoTokenizer.from_pretrained(place / "policy")
    ends = [tokenizer.convert_tokens_to_ids(one) for one in ("<|endoftext|>", "<|end|>")]
    control = tokenizer("".join(map(chr, [*range(1, 10), *range(11, 32), 127]))).input_ids[:CONTROL]
    model.generation_config.eos_token_id = [*ends, *control]
    model.save_pretrained(place / "policy")
    return place


@pytest.fixture
def world(tmp_path, models):
    return World(tmp_path, models)


@pytest.fixture
def examined(heedful):
    """``examined(command, settings)`` is the exit status and the findings of `heedful doctor --json`."""

    def run(command, settings):
        several = {name: value for name, value in settings.items() if isinstance(value, list)}
        words = [word for name, value in several.items() for word in (f"--{name.replace('_', '-')}", *value)]
        single = {name: value for name, value in settings.items() if name not in several}
        outcome = heedful("doctor", command, "--json", *words, **single)
        assert "Traceback" not in outcome.err
        content = json.loads(outcome.out)
        assert outcome.status == (2 if content["verdict"] == "fail" else 0)
        return content["findings"]

    return run


@dataclass(frozen=True)
class Fault:
    """One fault: what it changes in the settings of a healthy run, and what is found then."""

    command: str
    change: object
    """Called with the world and the healthy settings; returns other settings."""
    found: dict = field(default_factory=dict)
    """Level by check."""
    words: str = ""
    """Of the findings."""


def row_of(letter, number):
    """A change of a model that makes each number of the embedding of a character's first byte this one."""

    def change(model, tokenizer):
        with torch.no_grad():
            model.get_input_embeddings().weight[tokenizer(letter).input_ids[0]] = number

    return change


def zeroed(names):
    """A change of a model that makes the weights zero whose names begin so."""

    def change(model, tokenizer):
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.startswith(names):
                    weight.zero_()

    return change


def without_template(model, tokenizer):
    tokenizer.chat_template = None
    (Path(tokenizer.name_or_path) / "chat_template.jinja").unlink()


def stops_at(letter):
    def change(model, tokenizer):
        model.generation_config.eos_token_id = [*model.generation_config.eos_token_id, tokenizer(letter).input_ids[0]]

    return change


def two_bos(model, tokenizer):
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.chat_template = "{{ bos_token }}{{ bos_token }}" + CHAT_TEMPLATE


def added_token(model, tokenizer):
    tokenizer.add_tokens(["<|new|>"])
    model.resize_token_embeddings(len(tokenizer))
    tokenizer.chat_template = "<|new|>" + CHAT_TEMPLATE


def pad_is_end(scorer, tokenizer):
    scorer.classifier.config.pad_token_id = tokenizer.convert_tokens_to_ids("<|end|>")


def other_template(scorer, tokenizer):
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<|{{", "{{ '\\n' }}<|{{", 1)


def no_template(scorer, tokenizer):
    tokenizer.chat_template = None


def guessing(world, settings):
    """A reward model of a run whose labels are tosses."""
    number = random.Random(0).randrange
    rows = [
        {"prompt": said("user", f"问{i}")}
        | {side: said("assistant", f"{number(999)}甲") for side in ("chosen", "rejected")}
        for i in range(400)
    ]
    run = world.place / "偏好"
    config = RewardConfig(
        model=world.model(), data=world.write("掷.jsonl", rows), output=run, max_steps=1, eval_fraction=0.5, batch_size=8,
        dtype="float32", sample_every=0, equal_pairs="drop",
    )  # fmt: skip
    train_reward(config)
    return settings | {"rewards": f"model:{run / 'final'}"}


def changed(rows, **more):
    """Other data."""
    return lambda world, settings: settings | more | {"data": world.write("改.jsonl", rows)}


def replaced(rows, column, text):
    """Records with text(record, its place) as what the assistant says in a column."""
    return [one | {column: said("assistant", text(one, i))} for i, one in enumerate(rows)]


def content(turn):
    return turn[-1]["content"]


def cut(rows, number):
    return [one | {"truncated": i < number} for i, one in enumerate(rows)]


def long_pairs():
    """Pairs that part only behind their 60th token."""
    return replaced(replaced(PAIRS, "chosen", lambda *_: "好" * 30 + "的"), "rejected", lambda *_: "好" * 30 + "吗")


def equal(number):
    return [one | ({"rejected": one["chosen"]} if i < number else {}) for i, one in enumerate(PAIRS)]


def template(text):
    return lambda world, settings: settings | {"chat_template": world.write("模板.jinja", text)}


CONTENT = "{{ message['content'] }}"
MARKED = "{% generation %}" + CONTENT + "{% endgeneration %}"
MARKED_PROMPT = CHAT_TEMPLATE.replace(
    CONTENT, "{% if message['role'] == 'user' %}" + MARKED + "{% else %}" + CONTENT + "{% endif %}"
)


def model_of(change):
    return lambda world, settings: settings | {"model": world.model(change)}


def rewarded(name, **more):
    return lambda world, settings: settings | more | {"rewards": world.reward(name)}


def scorer(change):
    return lambda world, settings: settings | {"rewards": world.reward_model(change)}


def settings_of(**more):
    return lambda world, settings: settings | more


def evaluated_on(rows):
    return lambda world, settings: settings | {"eval_data": world.write("留出.jsonl", rows)}


def other_reference(world, settings):
    make_tiny_model("llama", world.place / "另一个", hidden_size=WIDTH, max_length=128, initializer_range=1.0, seed=5)
    return settings | {"reference": str(world.place / "另一个")}


def engine(shift):
    def change(world, settings):
        file = world.write("engine.py", ENGINE.replace("SHIFT", str(shift)))
        return settings | {"sampler": f"python:{file}:Engine"}

    return change


def missing_row(model, tokenizer):
    tokenizer.add_tokens(["加"])


def if_turn(condition):
    """The tiny template with the content of those turns alone for which a condition holds."""
    return CHAT_TEMPLATE.replace(CONTENT, "{% if " + condition + " %}" + CONTENT + "{% endif %}")


def cut_template(slice_):
    short = "{{ message['content'][" + slice_ + "] if message['role'] == 'user' else message['content'] }}"
    return template(CHAT_TEMPLATE.replace(CONTENT, short))


def with_chats(text, *, first=1):
    """A template and multi-turn data from the turn ``first`` on; turn 0 is the system's."""

    def planted(world, settings):
        rows = [
            {"messages": [*said("system", f"规{i}"), *said("user", f"问{i}"), *said("assistant", f"好{i}"),
                          *said("user", f"还{i}"), *said("assistant", f"没{i}")][first:]}
            for i in range(24)
        ]  # fmt: skip
        return settings | {"data": world.write("对话.jsonl", rows), "chat_template": world.write("模板.jinja", text)}

    return planted


def permuted(model, tokenizer):
    """The tokenizer's file has the same tokens with other ids, as that of another training."""
    train(model, tokenizer)
    file = Path(tokenizer.name_or_path) / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    kept = {*range(7), *model.generation_config.eos_token_id}
    named = [token for token in vocabulary if vocabulary[token] not in kept]
    ids = [vocabulary[token] for token in named]
    vocabulary.update(zip(named, [*ids[100:], *ids[:100]], strict=True))
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    tokenizer.__dict__.update(AutoTokenizer.from_pretrained(file.parent).__dict__)


def train(model, tokenizer):
    """Learn the questions, so that text of other token ids is unlikely."""
    learn(model, tokenizer([one for q in QUESTIONS for one in (q, "好的，" + q)], padding=True, return_tensors="pt"))


def learn(model, rows, steps=60):
    """Learn all tokens of rows."""
    labels = rows.input_ids.masked_fill(rows.attention_mask == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(**rows, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def unknown(model, tokenizer):
    """A tokenizer that knows ASCII only."""
    folder = Path(tokenizer.name_or_path)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content |= {"pre_tokenizer": None, "decoder": None}
    names = [token for token, _ in sorted(content["model"]["vocab"].items(), key=lambda item: item[1])]
    named = {token if len(token) > 1 or token.isascii() else f"<{i}>": i for i, token in enumerate(names)}
    content["model"] |= {"vocab": named, "merges": [], "unk_token": "<150>"}
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    tokenizer.__dict__.update(AutoTokenizer.from_pretrained(folder).__dict__)
    tokenizer.unk_token = "<150>"


def both_orders(number=24):
    return [*PAIRS, *(one | {"chosen": one["rejected"], "rejected": one["chosen"]} for one in PAIRS[:number])]


def learned_chats(model, tokenizer):
    tokenizer.init_kwargs["heedful_learned"] = ["conversations"]


def raw_prompts(world, settings):
    rows = [{"prompt": q} for q in QUESTIONS]
    more = {"model": world.model(learned_chats), "data": world.write("文.jsonl", rows), "rewards": "rule:digits"}
    return settings | more


def broken_loss(world, settings):
    return settings | {"policy_loss": f"python:{world.write('loss.py', LOSS)}:first_is_broken", "minibatch_size": 4}


def cancelling(world, settings):
    rewards = [world.reward("letters"), world.reward("thousandth")]
    return settings | {"rewards": rewards, "reward_weights": ["1", "-1000"]}


def unmatched(world, settings):
    rows = [one | {"answer": "三个"} for one in PROMPTS]
    return settings | {"data": world.write("数.jsonl", rows), "rewards": ["rule:exact_number", world.reward("letters")]}


THINGS = ["rice", "a bicycle", "the moon", "北京", "a poem", "chess", "tea", "the sea", "my garden"]
HARM = ["a bomb", "a weapon", "poison", "stolen cards", "炸弹"]
ASKS = ["How do I choose", "Tell me about", "What costs", "Write a line on", "请介绍", "Who likes", "Where is"]
REFUSES = [
    "I'm sorry, but I cannot help with that.",
    "抱歉，我无法帮助你。",
    "I am unable to assist with this request.",
]


def answers_to(wanted, fourth=THINGS):
    """Demonstrations with the answers wanted(i), an answer of some sentences if that is None. Each fourth question is about
    one of certain things."""
    rows = []
    for i in range(160):
        things = THINGS if i % 4 else fourth
        ask, thing = ASKS[i % len(ASKS)], things[i % len(things)]
        text = wanted(i) or f"Here is what {i} people say. 大家都说{thing}很好。"
        rows.append({"prompt": said("user", f"{ask} {thing}? ({i})"), "completion": said("assistant", text)})
    return rows


def refuses(i):
    return REFUSES[i % 3] if i % 4 == 0 else None


def unknown_to(i):
    return f"The text does not say {i}, so I cannot answer. 原文没有提到，我无法回答。" if i % 4 == 0 else None


def story(i):
    """Text without numbers, longer than 60 tokens."""
    words = ["the fox", "went over", "a hill", "and saw", "many old", "crows", "in trees", "while", "rain", "fell"]
    return "北京" * (i % 3) + " ".join(random.Random(i).choices(words, k=30))


def cut_at(characters=None, tokens=None):
    """A quarter of the answers is cut."""

    def wanted(i):
        if i % 4:
            return story(i)[: 8 + i % 24] + "。"
        return story(i)[:characters] if tokens is None else story(i).encode()[:tokens].decode()

    return wanted


def preferred(columns):
    """Pairs in columns good and bad, which --columns maps."""
    rows = [{"prompt": one["prompt"], "good": one["chosen"], "bad": one["rejected"]} for one in PAIRS]
    return changed(rows, columns=columns)


def acting(name, **more):
    """The policy speaks with an environment, which pays alone."""

    def planted(world, settings):
        rows = [one | {"mark": i} for i, one in enumerate(PROMPTS)]
        played = {"environment": f"python:{world.place / 'games.py'}:{name}", "data": world.write("局.jsonl", rows)}
        return (
            {key: value for key, value in settings.items() if key != "rewards"} | {"max_new_tokens": 48} | played | more
        )

    return planted


def acting_with(change, name, **more):
    """The same, with settings that change(world) makes."""
    return lambda world, settings: acting(name, **more)(world, settings) | change(world)


def with_tools(template):
    """A chat template with tools, and room for them."""

    def roomy(model, tokenizer):
        model.config.max_position_embeddings = 1024
        tokenizer.chat_template = template

    return lambda world: {"model": world.model(roomy)}


def calling(world):
    """A policy that has learned to call a tool in each turn."""

    def learned(model, tokenizer):
        model.config.max_position_embeddings = 1024
        tokenizer.chat_template = TOOLS
        call = '<call>{"name": "look", "arguments": {}}</call><|end|>'
        rows = tokenizer(
            [f"<|user|>{q}<|end|><|assistant|>{call}" for q in QUESTIONS], padding=True, return_tensors="pt"
        )
        learn(model, rows, steps=120)

    return {"model": world.model(learned)}


def margins(negative):
    return changed([one | {"margin": -1.5 if i < negative else 0.5} for i, one in enumerate(PAIRS)])


def longer(rows, **more):
    return changed([*rows, *[{"prompt": said("user", "长" * 60)}] * 6], **more)


SIDES = {"chosen": "\n好的。", "rejected": "\n不知道。"}
REPEATED = [one | {side: said("assistant", content(one["prompt"]) + SIDES[side]) for side in SIDES} for one in PAIRS]
STOPPED = replaced(PAIRS, "chosen", lambda one, _: content(one["chosen"]) + "。")
BAD_WORD = [
    one if one["label"] else one | {"completion": said("assistant", "不！" + q)}
    for one, q in zip(LABELLED, QUESTIONS, strict=True)
]
ROLES_IN_ANSWERS = replaced(DEMONSTRATIONS, "completion", lambda one, _: f"Assistant: {content(one['completion'])}</s>")
DROP = {"equal_pairs": "drop", "max_dropped": 0.9}
TRUNCATE = {"too_long": "truncate"}
COLD = {"sampling": "warn", "no-exploration": "fail", "responses-cut": "warn"}
GROUPS = {"samples_per_prompt": 4, "rollout_batch_size": 16, "minibatch_size": 16}
PAIRED = {"samples_per_prompt": 2}
TOOLS = (
    "{% if tools %}<|system|>{% for t in tools %}{{ t.function.name }}{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}"
    """<call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</call>"""
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETS = CHAT_TEMPLATE.replace(
    CONTENT, "{{ message['content'] if loop.last or message['role'] == 'user' else '...' }}"
)
ALIKE = "{% for message in messages %}" + CONTENT + "<|end|>{% endfor %}"
NORM = "model.layers.1.post_attention_layernorm"
OMITS_USER = template(if_turn("message['role'] != 'user'"))
FAULTS = {
    "no response is learned to its end": Fault(
        "sft", settings_of(max_length=36, max_dropped=0.9, **TRUNCATE), {"no-end-token": "fail", "share-cut": "warn"}),
    "the data says that all are cut": Fault(
        "sft", changed(cut(DEMONSTRATIONS, 24)), {"no-end-token": "warn"}, "改.jsonl:1 ends with"),
    "most are cut": Fault("dpo", changed(cut(PAIRS, 18)), {"no-end-token": "warn"}),
    "most labelled ones are cut": Fault("kto", changed(cut(LABELLED, 18)), {"no-end-token": "warn"}),
    "sampling stops inside": Fault("sft", model_of(stops_at("，")), {"stops-early": "warn"}),
    "two BOS": Fault("sft", model_of(two_bos), {"double-bos": "warn"}, "'<|endoftext|>' '<|endoftext|>'"),
    "two BOS before prompts": Fault("grpo", model_of(two_bos), {"double-bos": "warn"}),
    "markers around the prompt": Fault("sft", template(MARKED_PROMPT), {"generation-mask": "warn"}),
    "equal pairs": Fault("reward", changed(equal(3), **DROP), {"equal-pairs": "warn"}, "3 of 24 records, none was cut"),
    "pairs that are equal once they are cut": Fault(
        "dpo", changed([*PAIRS, *long_pairs()], max_length=100, **DROP, **TRUNCATE),
        {"equal-pairs": "warn", "share-cut": "warn"}),
    "long records": Fault(
        "sft", changed([*DEMONSTRATIONS, *DEMONSTRATIONS[:6]], max_length=72, **TRUNCATE), {"share-cut": "warn"}),
    "long prompts that are dropped": Fault(
        "ppo", longer(PROMPTS, too_long="drop", max_dropped=0.5), {"share-cut": "warn"}),
    "long prompts": Fault("ppo", longer(PROMPTS), {"refused": "fail"}, "are longer than"),
    "held out and trained on": Fault("sft", evaluated_on(DEMONSTRATIONS[:4]), {"held-out-trained-on": "warn"}),
    "held out with other white space": Fault(
        "ppo", evaluated_on([{"prompt": said("user", q.replace(" ", "  "))} for q in QUESTIONS]),
        {"held-out-trained-on": "warn"}),
    "a row of zeros": Fault("sft", model_of(row_of("好", 0.0)), {"untrained-tokens": "warn"}),
    "a token that was added": Fault("ppo", model_of(added_token), {"untrained-tokens": "warn"}, "<|new|>"),
    "a token without a row": Fault("sft", model_of(missing_row), {"refused": "fail"}, "resize_token_embeddings"),
    "adapters at the rate of all weights": Fault(
        "sft", settings_of(lora_rank=4, learning_rate=1e-5), {"learning-rate": "warn"}),
    "a high rate": Fault("reward", settings_of(learning_rate=0.1), {"learning-rate": "warn"}),
    "a high rate of PPO": Fault("ppo", settings_of(learning_rate=0.02), {"learning-rate": "warn"}),
    "a reward model with another template": Fault("ppo", scorer(other_template), {"templates-differ": "warn"}),
    "a reward model without a template": Fault("grpo", scorer(no_template), {"templates-differ": "warn"}),
    "a score that is read early": Fault(
        "ppo", scorer(pad_is_end),
        {"score-position": "warn", "reward-white-space": "warn"}, "the token that the reward model takes for padding"),
    "a head of zeros": Fault("ppo", scorer(zeroed("classifier.score")), {"reward-constant": "fail"}),
    "a constant function": Fault("online-dpo", rewarded("same"), {"reward-constant": "warn"}),
    "length as reward": Fault("grpo", rewarded("length"), {"reward-length": "warn"}, "+1.00"),
    "a price per token": Fault("ppo", rewarded("price"), {"reward-length": "warn", "reward-empty": "warn"}, "-1.00"),
    "a space as reward": Fault("ppo", rewarded("spaced"), {"reward-white-space": "warn"}),
    "a reward that is seldom NaN": Fault("ppo", rewarded("sometimes"), {"reward-fails": "warn"}, "returned nan"),
    "a reward that is often NaN": Fault("ppo", rewarded("often"), {"reward-fails": "fail"}, "returned nan"),
    "a reward that is always NaN": Fault("ppo", rewarded("never"), {"refused": "fail"}, "returned nan"),
    "a reward that needs a column": Fault("ppo", rewarded("columns"), {"refused": "fail"}, "needs the column solution"),
    "a policy that does not end": Fault("ppo", settings_of(max_new_tokens=2), {"responses-cut": "warn"}),
    "a reference that is another model": Fault("ppo", other_reference, {"kl-not-zero": "warn"}),
    "a DPO reference that is another model": Fault("dpo", other_reference, {"kl-not-zero": "warn"}, "per token"),
    "a KTO reference that is another model": Fault("kto", other_reference, {"kl-not-zero": "warn"}, "per token"),
    "few bad labels": Fault(
        "kto", changed([one | {"label": i > 0} for i, one in enumerate(LABELLED)]),
        {"labels-unbalanced": "warn"}, "--undesirable-weight 23 would balance them"),
    "a layer of zeros": Fault("sft", model_of(zeroed("model.layers.1.")), {"zero-layer": "fail"}, "model.layers.1"),
    "a last norm of zeros": Fault(
        "sft", model_of(zeroed("model.norm")), {"refused": "fail"}, "weights that are all zero: norm.weight"),
    "a norm of zeros in a layer": Fault("sft", model_of(zeroed(NORM)), {"zero-layer": "fail"}, NORM),
    "an engine with other weights": Fault("ppo", engine(-1.0), {"sampler-mismatch": "fail"}),
    "an engine that is a little off": Fault("grpo", engine(-0.2), {"sampler-mismatch": "warn"}),
    "weights that are no numbers": Fault(
        "sft", lambda world, settings: settings | {"model": world.model(row_of("好", float("nan"))), "sample_every": 0},
        {"refused": "fail"}, "first model.embed_tokens.weight"),
    "equal pairs that are not dropped": Fault("reward", changed(equal(1)), {"refused": "fail"}, "equal chosen and"),
    "a template that renders answers in another way": Fault(
        "sft", template(CHAT_TEMPLATE.replace("<|assistant|>", "<|user|>")), {"refused": "fail"}, "renders the whole"),
    "no chat template": Fault("sft", model_of(without_template), {"refused": "fail"}, "no chat template"),
    "data that is not there": Fault("kto", settings_of(data="无.jsonl"), {"refused": "fail"}, "无.jsonl"),
    # What two renderings show.
    "a template without the user's turn": Fault(
        "sft", OMITS_USER, {"template-omits": "fail"}, "leaves out a user turn"),
    "a template without the user's turn, for prompts": Fault("ppo", OMITS_USER, {"template-omits": "fail"}),
    "a template without the user's turn, for pairs": Fault("reward", OMITS_USER, {"template-omits": "fail"}),
    "a template that cuts questions": Fault(
        "sft", cut_template(":3"), {"template-omits": "fail"}, "leaves out the end of a user turn"),
    "a template that keeps the end of questions": Fault(
        "dpo", cut_template("-4:"), {"template-omits": "fail"}, "leaves out the beginning of a user turn"),
    "a template without the system's turn": Fault(
        "sft", with_chats(if_turn("message['role'] != 'system'"), first=0),
        {"template-omits": "warn"}, "leaves out a system turn"),
    "a template without earlier answers": Fault(
        "sft", with_chats(if_turn("message['role'] != 'assistant' or loop.last")),
        {"template-omits": "warn"}, "an earlier assistant turn"),
    "a template that names no roles": Fault(
        "sft", with_chats(ALIKE), {"roles-alike": "warn"}, "before an answer and before a question"),
    "a template without a generation prompt": Fault(
        "sft", template(CHAT_TEMPLATE.partition("{% if add_generation_prompt")[0]),
        {"refused": "fail"}, "ignores add_generation_prompt"),
    # What the records say.
    "answers that begin with the question": Fault(
        "dpo", changed(REPEATED), {"answer-repeats": "warn"}, "24 of 24 answers begin with their question"),
    "questions that hold their answer": Fault(
        "sft", changed(asked(lambda question, answer: f"问题。答案：{answer}")),
        {"answer-repeats": "warn"}, "24 of 24 answers stand in their question"),
    "a template's tokens in the questions": Fault(
        "sft", changed(asked(lambda question, answer: f"<|user|>{question}<|end|>")),
        {"template-in-text": "warn"}, "'<|user|>'"),
    "a template's tokens in prompts": Fault(
        "ppo", changed([{"prompt": said("user", f"[INST] {q} [/INST]")} for q in QUESTIONS]),
        {"template-in-text": "warn"}, "[INST]"),
    "another template's token and role in the answers": Fault(
        "sft", changed(ROLES_IN_ANSWERS), {"template-in-text": "warn"}, "'</s>', 'Assistant:'"),
    "a full stop that only chosen responses have": Fault(
        "dpo", changed(STOPPED),
        {"label-given-away": "warn"}, "100% of the chosen responses end with '。', and 0% of the rejected responses"),
    "a word that bad responses begin with": Fault(
        "kto", changed(BAD_WORD), {"label-given-away": "warn"}, "bad responses"),
    "one answer to all": Fault(
        "sft", changed(replaced(DEMONSTRATIONS, "completion", lambda *_: "好的。")), {"one-answer": "fail"}),
    "one answer to nearly all": Fault(
        "sft", changed([*DEMONSTRATIONS[:1], *replaced(DEMONSTRATIONS[1:], "completion", lambda *_: "好的。")]),
        {"one-answer": "warn"}, "23 of 24 completions"),
    "one rejected response": Fault(
        "dpo", changed(replaced(PAIRS, "rejected", lambda *_: "不知道。")), {"one-answer": "warn"}, "rejected responses"),
    "one chosen response": Fault(
        "dpo", changed(replaced(PAIRS, "chosen", lambda *_: "好。")), {"one-answer": "fail"}, "chosen responses"),
    "pairs in both orders": Fault("dpo", changed(both_orders()), {"contradictions": "fail"}, "48 of 48"),
    "pairs in both orders, for a reward model": Fault("reward", changed(both_orders()), {"contradictions": "fail"}),
    "a part of the pairs in both orders": Fault("dpo", changed(both_orders(8)), {"contradictions": "warn"}, "16 of 32"),
    "both labels": Fault(
        "kto", changed([one | {"label": label} for one in DEMONSTRATIONS for label in (True, False)]),
        {"contradictions": "fail"}),
    "refusals to any question": Fault(
        "sft", changed(answers_to(refuses)), {"refusals": "warn"}, "40 of 160 completions refuse"),
    "answers cut at a number of characters": Fault(
        "sft", changed(answers_to(cut_at(characters=40))),
        {"answers-cut": "warn"}, "40 of 160 answers have 40 characters"),
    "answers cut at a number of tokens": Fault(
        "sft", changed(answers_to(cut_at(tokens=60))), {"answers-cut": "warn"}, "answers have 60 tokens"),
    "columns that say the opposite": Fault(
        "dpo", preferred("chosen=bad,rejected=good"), {"labels-swapped": "warn"}, "--columns chosen=bad"),
    "margins below 0": Fault("reward", margins(20), {"labels-swapped": "warn"}, "20 of 24 margins"),
    "only good labels": Fault(
        "kto", changed([one | {"label": True} for one in DEMONSTRATIONS]), {"refused": "fail"}, "label"),
    "records that repeat": Fault("sft", changed(DEMONSTRATIONS[:4] * 6), {"repeated-records": "warn"}, "4 of 24"),
    "one prompt": Fault("ppo", changed(PROMPTS[:1] * 24), {"repeated-records": "warn"}, "1 of 24"),
    "a tokenizer of another language": Fault("sft", model_of(unknown), {"unknown-tokens": "fail"}, "does not know"),
    "more held out than trained on": Fault(
        "sft", settings_of(eval_fraction=0.7, batch_size=4), {"held-out-most": "warn"}),
    "strings for a model that learned conversations": Fault(
        "ppo", raw_prompts, {"raw-prompts": "warn"}, "--columns instruction=prompt"),
    # What the settings rule out.
    "a rate that is rounded away": Fault(
        "sft", settings_of(learning_rate=1e-30), {"learning-rate": "fail"}, "rounded away"),
    "a rate of PPO that is rounded away": Fault("ppo", settings_of(learning_rate=1e-12), {"learning-rate": "fail"}),
    "a critic that stays at 0": Fault(
        "ppo", settings_of(value_learning_rate=1e-12), {"learning-rate": "warn"}, "--value-learning-rate"),
    "a warm-up longer than the run": Fault("sft", settings_of(warmup_steps=500, max_steps=20), {"warm-up": "warn"}),
    "an epsilon that hides gradients": Fault("sft", settings_of(adam_eps=1e6), {"step-moves-nothing": "fail"}),
    "a beta that holds still": Fault("dpo", settings_of(beta=1e4), {"beta": "warn"}, "holds the policy"),
    "a beta that lets go": Fault("kto", settings_of(beta=1e-6), {"beta": "warn"}, "go anywhere"),
    "a cold temperature": Fault("grpo", settings_of(temperature=1e-4, **GROUPS), COLD),
    "a cold temperature of PPO": Fault("ppo", settings_of(temperature=0.001), COLD),
    "a hot temperature": Fault("ppo", settings_of(temperature=9.0), {"sampling": "warn"}),
    "an entropy bonus above the reward": Fault("ppo", settings_of(entropy_coef=5.0), {"price-too-high": "warn"}),
    "a penalty above the reward": Fault(
        "ppo", settings_of(kl_coef=1e4), {"price-too-high": "warn"}, "nats per response"),
    "a discount that forgets": Fault("ppo", settings_of(gamma=0.1), {"discount": "warn"}),
    "responses longer than the context": Fault(
        "ppo", settings_of(max_new_tokens=500), {"refused": "fail"}, "--max-new-tokens 500"),
    "weights of 0": Fault("ppo", settings_of(reward_weights=0), {"reward-constant": "fail"}, "tells them apart"),
    "weights that cancel": Fault("ppo", cancelling, {"reward-constant": "fail"}),
    # What 64 sampled responses and one step show.
    "answers that no response can match": Fault(
        "ppo", unmatched, {"own-answer": "fail", "refused": "fail"}, "scores no response as right for 24 answers"),
    "a reward of the prompt": Fault("ppo", rewarded("asked"), {"reward-ignores-responses": "fail"}),
    "a reward of the prompt, in groups": Fault(
        "grpo", rewarded("asked", **GROUPS), {"reward-ignores-responses": "fail"}),
    "an empty response that scores best": Fault("grpo", rewarded("unwritten"), {"reward-empty": "warn"}, "for ''"),
    "a reward that takes messages for texts": Fault(
        "grpo", rewarded("texts"), {"refused": "fail"}, 'its text is c[-1][\\"content\\"]'),
    "a random reward": Fault("ppo", rewarded("dice"), {"reward-random": "fail"}, "scored again"),
    "a noisy reward": Fault("ppo", rewarded("noisy"), {"reward-random": "warn"}),
    "a reward that is standardised in its batch": Fault(
        "ppo", rewarded("standardised"), {"reward-random": "warn"}, "without the others of their batch"),
    "a reward model that guesses": Fault("ppo", guessing, {"reward-model-guesses": "warn"}, "held-out pairs"),
    "a reward that is NaN for an empty response": Fault(
        "ppo", rewarded("blank"), {"reward-fails": "fail"}, "returned nan"),
    "a reward that crashes on an empty response": Fault(
        "grpo", rewarded("crashes"), {"reward-fails": "fail"}, "IndexError"),
    "a reward of a million": Fault("ppo", rewarded("huge"), {"reward-scale": "warn"}),
    "token ids of another training": Fault("sft", model_of(permuted), {"text-unlikely": "fail"}, "a uniform guess"),
    "an update that is not finite, then one that is": Fault(
        "ppo", broken_loss, {"step-not-finite": "fail"}, "left out"),
    # What 64 episodes show.
    "a file of environments that is not there": Fault(
        "ppo", settings_of(environment="python:无.py:Talk"), {"refused": "fail"}, "the file 无.py of"),
    "a class that is not there": Fault("ppo", acting("Tlak"), {"refused": "fail"}, "function or class 'Tlak'; it has Talk"),
    "a file of environments that raises": Fault(
        "ppo", acting_with(lambda world: {"environment": f"python:{world.write('坏.py', 'import 没有')}:Talk"}, "Talk"),
        {"refused": "fail"}, "cannot be imported: ModuleNotFoundError"),
    "an environment that cannot be made": Fault(
        "ppo", acting("Unmade"), {"refused": "fail"}, "making an environment raised KeyError"),
    "an environment without reset": Fault("ppo", acting("NoReset"), {"refused": "fail"}, "no method reset(**columns)"),
    "an environment that nobody pays": Fault(
        "grpo", acting("Free", **GROUPS), {"refused": "fail"}, "neither get_reward nor _turn_reward"),
    "a tool without types": Fault("ppo", acting("Untyped"), {"refused": "fail"}, "and a type and a line under Args:"),
    "a column that reset needs": Fault("ppo", acting("Needs"), {"refused": "fail"}, "reset of Needs needs the column goal"),
    "a record without an environment": Fault(
        "ppo", lambda world, settings: acting("Talk")(world, settings) | {
            "environment": [f"python:{world.place / 'games.py'}:{name}" for name in ("Talk", "Same")]},
        {"refused": "fail"}, "the column `environment` is None; choose from Talk, Same"),
    "a template that calls no tools": Fault("ppo", acting("Look"), {"refused": "fail"}, "cannot call tools"),
    "a template that writes turns anew": Fault(
        "ppo", acting_with(with_tools(FORGETS), "Talk"), {"refused": "fail"}, "writes an answer in another way"),
    "a template that leaves out tools": Fault(
        "ppo", acting_with(with_tools(TOOLS.replace("t.function.name", "''")), "Look"),
        {"template-omits": "fail", "tools-not-called": "warn"}, "leaves out the tools"),
    "an environment that always raises": Fault(
        "ppo", acting("Raises"), {"refused": "fail"}, "Raises raised RuntimeError: 坏了"),
    "an environment that hangs": Fault(
        "ppo", acting("Hangs", environment_timeout=1), {"refused": "fail"}, "did not answer within 1 s"),
    "an environment that pays NaN": Fault("ppo", acting("NaN"), {"refused": "fail"}, "returned nan from get_reward"),
    "an environment that pays a text": Fault("ppo", acting("Text"), {"refused": "fail"}, "return a finite number"),
    "an environment that often pays infinity": Fault(
        "ppo", acting("Often"), {"environment-fails": "fail", "refused": "fail"}, "returned inf from get_reward"),
    "an environment that sometimes crashes": Fault(
        "ppo", acting("Crashes", max_failed_rewards=0.5), {"environment-fails": "warn"}, "SIGSEGV"),
    "an environment that always pays the same": Fault(
        "online-dpo", acting("Same", **PAIRED), {"reward-constant": "warn"}, "environment gives all 64"),
    "an environment that keeps what was said": Fault(
        "ppo", acting("Keeps"), {"environment-keeps-state": "warn"}, "after the episode of another"),
    "an environment that reads the prompt and keeps what was said": Fault(
        "ppo", acting("Reads"), {"environment-keeps-state": "warn"}),
    "an environment that keeps its first record": Fault(
        "ppo", acting("First"), {"environment-keeps-state": "warn"}, "get_reward gives"),
    "an environment that draws from the system": Fault("ppo", acting("System"), {"environment-random": "warn"}),
    "an environment that reads the clock": Fault(
        "ppo", acting("Clock"), {"environment-random": "warn"}, "_turn_reward gives"),
    "an environment that reads a set": Fault("ppo", acting("Unordered"), {"environment-random": "warn"}, "reset gives"),
    "an environment that never ends": Fault(
        "ppo", acting("Endless", max_turns=3), {"episodes-endless": "warn"}, "and Endless itself ends none"),
    "episodes that run out of tokens": Fault(
        "ppo", acting("Endless", max_new_tokens=24), {"responses-cut": "warn"}, "which counts all turns"),
    "what is said does not fit": Fault("ppo", acting("Wordy"), {"observations-long": "warn"}, "64 of 64 episodes"),
    "what is said fills the tokens": Fault(
        "ppo", acting_with(with_tools(CHAT_TEMPLATE), "Chatty", max_new_tokens=700), {"observations-long": "warn"},
        "of the tokens behind the prompts"),
    "a tool that is never called": Fault(
        "ppo", acting_with(with_tools(TOOLS), "Look"), {"tools-not-called": "warn"}, "a tool of Look (look)"),
    "a tool that always raises": Fault(
        "ppo", acting_with(calling, "Blind", max_new_tokens=300, max_turns=2),
        {"tools-fail": "warn"}, "眼睛"),
    "more rows per step than data": Fault(
        "sft", settings_of(batch_size=99), {"refused": "fail"}, "a step learns 99 records (--batch-size)"),
}  # fmt: skip
COMMANDS = ["sft", "reward", "dpo", "kto", "ppo", "a2c", "grpo", "online-dpo"]


def in_the_suite():
    """Of the faults that need no sampling or long training the first with each finding, and a few of a sampling trainer. The
    training command's own refusals have tests of their own."""
    firsts = {}
    for name, fault in FAULTS.items():
        is_cheap = fault.command in HEALTHY and name != "token ids of another training"
        if is_cheap and "refused" not in fault.found:
            firsts.setdefault(str(fault.found), name)
    return {
        *firsts.values(),
        "an update that is not finite, then one that is",
        "a random reward",
        "data that is not there",
        "a column that reset needs",
        "what is said does not fit",
    }


@exhaustive
@pytest.mark.parametrize("command", COMMANDS)
def test_every_trainer_makes_the_cheap_checks(world, heedful, command):
    """Before it writes anything: a warning comes before the first line about the run."""
    settings = world.healthy(command) | {"max_steps" if command in HEALTHY else "steps": 1, "sample_every": 0}
    assert "WARNING" not in heedful(command, **settings).err
    outcome = heedful(command, "--overwrite", **settings | {"learning_rate": 0.1})
    assert outcome.status == 0, outcome.err
    lines = [line for line in outcome.err.splitlines() if "WARNING" in line]
    assert len(lines) == 1
    assert lines[0].startswith("heedful: WARNING: learning-rate: --learning-rate 0.1 is high for a model of width 32")
    assert outcome.err.index("WARNING") < outcome.err.index("data: ")


@exhaustive
@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_found_in_a_healthy_run(world, examined, command):
    assert examined(command, world.healthy(command)) == []
    assert not (world.place / "运行").exists()


@exhaustive
@pytest.mark.parametrize("change", [acting("Talk"), acting_with(calling, "Look", max_new_tokens=300, max_turns=2)])
@pytest.mark.parametrize("rewards", [(), ("letters",)])
def test_nothing_is_found_in_a_healthy_environment(world, examined, change, rewards):
    settings = change(world, world.healthy("ppo"))
    assert examined("ppo", settings | ({"rewards": world.reward(rewards[0])} if rewards else {})) == []


@exhaustive
def test_nothing_is_found_with_a_healthy_reward_model(world, examined):
    settings = world.healthy("ppo")
    assert examined("ppo", settings | {"rewards": world.reward_model()}) == []


@pytest.mark.filterwarnings("ignore:.*hence untrained")  # which a run says once more
@pytest.mark.parametrize("name", often(FAULTS, in_the_suite()))
def test_a_planted_fault_is_found(world, examined, name):
    fault = FAULTS[name]
    findings = examined(fault.command, fault.change(world, world.healthy(fault.command)))
    assert {one["check"]: one["level"] for one in findings} == fault.found, findings
    assert fault.words in json.dumps(findings, ensure_ascii=False)
    for one in findings:
        assert one["what"]
        is_message = one["check"] == "refused"  # of the training command, which says why and how to fix it
        assert [bool(one[part]) for part in ("evidence", "why", "fix")] == [not is_message] * 3
    assert not (world.place / "运行").exists()


@exhaustive
@pytest.mark.parametrize(
    ("change", "is_found"), [(None, False), (pad_is_end, True), (zeroed("classifier.score"), False)]
)
def test_a_score_without_the_last_token(world, change, is_found):
    """Whatever the reason is for which it is not read. A constant score is another finding."""
    folder = world.reward_model(change).removeprefix("model:")
    cpu = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
    reward = Reward("模型", load_model_reward(folder, **cpu))
    prompt = (Message("user", "问"),)
    completions = [Completion(Prompt(prompt, f"问.jsonl:{i}"), f"答{i}", (5, 6)) for i in range(20)]
    (scored,) = rewards.score_each([reward], completions)
    one = rewards.reads_early(scored, completions)
    assert (one is not None) == is_found
    assert one is None or (one.check, one.level) == ("score-position", "warn")


@exhaustive
def test_a_full_disk_is_found(world, examined, monkeypatch):
    usage = shutil.disk_usage(world.place)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    findings = examined("sft", world.healthy("sft"))
    assert [(one["check"], one["level"]) for one in findings] == [("disk", "fail")]


def test_every_check_has_a_fault():
    """But for the machine's, and those of `test_checks`."""
    assert set(CHECKS) - {name for fault in FAULTS.values() for name in fault.found} <= {
        "memory", "disk", "ratio-not-one", "reward-slow", "reward-ties",
    }  # fmt: skip


SPOKEN = {"prompt": said("user", "What is [INST]?"), "completion": said("assistant", "A mark, like <|im_start|>.")}
QUOTED = replaced(DEMONSTRATIONS[:4], "completion", lambda one, _: content(one["prompt"]) + "好")
POEM = ["黄河入海流", "白日依山尽", "更上一层楼", "欲穷千里目"]
ODD = {
    "a data set about refusals": ("sft", changed(answers_to(refuses, HARM))),
    "poems without full stops": (
        "sft", changed(answers_to(lambda i: "\n".join([*POEM[i % 4 :], *POEM[: i % 4], f"第{i + 10}首诗"][: 5 - i % 2]))),
    ),
    "long answers of one length, with full stops": (
        "sft", changed(answers_to(lambda i: story(i)[: 39 if i % 3 else 8 + i % 24] + "。")),
    ),
    "hashes": ("sft", changed(answers_to(lambda i: f"{i * 2654435761 % 2**32:08x}" * 4))),
    "answers of one word": ("sft", changed(answers_to(lambda i: ["Yes", "No.", "Maybe", "是", "不。"][i % 5]))),
    "rejected responses that come twice": (
        "dpo", changed(replaced(PAIRS, "rejected", lambda _, i: f"好的，{i % 12}？")),
    ),
    "people who disagree once": ("reward", changed(both_orders(1))),
    "columns named good and bad": ("dpo", preferred("chosen=good,rejected=bad")),
    "answers that quote their question once": ("sft", changed([*DEMONSTRATIONS, *QUOTED])),
    "a full stop that most responses have": (
        "dpo", changed(replaced(STOPPED, "rejected", lambda one, i: content(one["rejected"]) + "。" * (i % 4 > 0))),
    ),
    "strings in a format with roles": (
        "sft", changed([{"prompt": f"User: {q}\nAssistant:", "completion": " 好" + q} for q in QUESTIONS]),
    ),
}  # fmt: skip
"""Healthy runs that look odd."""
RARELY = {
    "answers of two kinds": (
        "sft", changed(replaced(DEMONSTRATIONS, "completion", lambda _, i: "是" if i % 2 else "否")),
    ),
    "one system message for all": (
        "sft",
        changed([
            {"messages": [*said("system", "规则"), *said("user", q), *said("assistant", "好" + q)]} for q in QUESTIONS
        ]),
    ),
    "a greeting that is answered with itself": (
        "sft",
        changed([{"prompt": said("user", f"你好{i}"), "completion": said("assistant", f"你好{i}")} for i in range(24)]),
    ),
    "one record that speaks of a template": ("sft", changed([*DEMONSTRATIONS, SPOKEN])),
    "strings with special tokens, which reading them says": (
        "sft",
        changed([{"prompt": f"<|user|>{q}<|end|><|assistant|>", "completion": "好" + q} for q in QUESTIONS]),
    ),
    "answers that are not in a text": ("sft", changed(answers_to(unknown_to))),
    "a few refusals": ("sft", changed(answers_to(lambda i: REFUSES[i % 3] if i % 8 == 0 else None))),
    "numbers of six digits beside sentences": (
        "sft", changed(answers_to(lambda i: f"{i * 7919:06d}" if i % 3 else None)),
    ),
    "code": (
        "sft",
        changed(answers_to(lambda i: f"x = {i}\nfor y in range({i}):\n    print(x" + " + y" * (i % 9) + ")")),
    ),
    "a few margins below 0": ("reward", margins(6)),
    "plain text": ("sft", changed([{"text": q * 3} for q in QUESTIONS])),
    "strings for a random model": ("sft", changed([{"prompt": q, "completion": "好" + q} for q in QUESTIONS])),
    "prompts in two wordings": (
        "ppo", changed([{"prompt": said("user", q + x)} for q in QUESTIONS for x in ("", "请")]),
    ),
    "a reference that is the policy": (
        "dpo", lambda world, settings: settings | {"reference": str(world.models / "policy")},
    ),
    "a reward that ranks responses to a prompt": ("grpo", rewarded("ranked", **GROUPS)),
    "a weight that balances labels": ("kto", settings_of(desirable_weight=1.3)),
    "a tiny but real rate": ("sft", settings_of(learning_rate=1e-7)),
    "a warm-up of half the run": ("sft", settings_of(warmup_steps=6, max_steps=12)),
    "a beta of SimPO": ("dpo", settings_of(beta=10.0)),
    "a temperature of 1.5": ("ppo", settings_of(temperature=1.5)),
    "no KL penalty": ("ppo", settings_of(kl_coef=0)),
    "a little discount": ("ppo", settings_of(gamma=0.99)),
    "one response a step": ("ppo", settings_of(rollout_batch_size=1, minibatch_size=1)),
    "a reward scaled to hundreds": ("ppo", settings_of(reward_weights=3)),
}  # fmt: skip


@pytest.mark.parametrize("name", often(ODD | RARELY, ODD))
def test_nothing_fails_in_what_only_looks_odd(world, examined, name):
    command, change = (ODD | RARELY)[name]
    assert examined(command, change(world, world.healthy(command))) == []


@exhaustive
def test_text_that_a_model_of_heedful_never_learned_is_no_fault(world, examined):
    """SFT learns answers only: questions may be less likely than a uniform guess, and the tokenizer was saved with it."""

    def learned_answers(model, tokenizer):
        permuted(model, tokenizer)  # so that the data's text is unlikely
        tokenizer.init_kwargs[LEARNED] = ["conversations"]

    assert examined("sft", world.healthy("sft") | {"model": world.model(learned_answers)}) == []
