"""Nothing healthy fails: every recipe, on tiny models and a few records, and the demo's world with the demo's recipe."""

import json
from pathlib import Path

import pytest
import torch

from heedful import make_tiny_model
from heedful.apps.demo.world import write_world
from heedful.configs.parse import parse
from heedful.configs.tools import TinyConfig
from heedful.models import load_reward_model, load_tokenizer, save_reward_model

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "launch")
DEMO = ROOT / "src" / "heedful" / "apps" / "demo" / "recipe"
QUESTIONS = ["你好", "2加2等于几？", "What is AI?", "请介绍一下北京。", "Say hello", "猫吃什么？", "1+1?", "谢谢你"]
TEXTS = [f"In {1990 + i} the fox met {i} old crows in a tree near 北京 , and they" for i in range(8)]


def said(role, text):
    return [{"role": role, "content": text}]


DEMONSTRATIONS = [{"prompt": said("user", q), "completion": said("assistant", f"好的，{q}")} for q in QUESTIONS]
PREFERENCES = [
    {"prompt": one["prompt"], "chosen": one["completion"], "rejected": said("assistant", "不")}
    for one in DEMONSTRATIONS
]
PROMPTS = [{"prompt": said("user", q)} for q in QUESTIONS]
NUMBERS = [{"question": said("user", q), "answer": str(i)} for i, q in enumerate(QUESTIONS)]
CONTINUATIONS = [{"prompt": text} for text in TEXTS]
WISHES = [["Chinese for cat?", "chinese", "猫"], ["And in French?", "french", "chat"], ["Again?", "chinese", "猫"]]
DIALOGUES = [row | {"wishes": WISHES} for row in PROMPTS]
PAIRS = [{"prompt": "", "chosen": text, "rejected": text[::-1], "truncated": True} for text in TEXTS]
DATA = {
    "sft": DEMONSTRATIONS,
    "reward": PREFERENCES,
    "ppo": PROMPTS,
    "digits": CONTINUATIONS,
    "sentiment-reward": PAIRS,
    "sentiment-ppo": CONTINUATIONS,
    "gsm8k": NUMBERS,
    "dialogue-ppo": DIALOGUES,
}
"""Records for recipes whose data is the user's, by the beginning or the end of their names."""
SMALL = ["--batch-size=4", "--max-steps=1"]
ONLINE = ["--rollout-batch-size=4", "--micro-batch-size=4", "--max-new-tokens=16", "--steps=2"]
OF_RANDOM_MODELS = {"responses-cut", "reward-white-space", "reward-empty"}
"""True of tiny random models, not of the recipes: they do not end their answers, score white space as any text, and write
nothing that a rule is looking for, so that the shortest response costs least."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny models by name: policies with enough context, an encoder, and a reward model."""
    place = tmp_path_factory.mktemp("模型")
    for name in ("qwen3", "qwen2", "gpt2", "deberta-v2"):
        make_tiny_model(name, place / name, hidden_size=32, max_length=512)
    tokenizer = load_tokenizer(str(place / "qwen3"))
    cpu = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
    scorer = load_reward_model(str(place / "qwen3"), tokenizer, seed=0, **cpu)
    save_reward_model(scorer, tokenizer, place / "scorer")
    return place


def flags_of(path, models, place):
    """What makes a recipe one of a tiny model: its model, its data, its rewards, its sizes."""
    command, text = path.stem.rpartition("-")[2], path.read_text(encoding="utf-8")
    own_data = ("gsm8k", "digits", "sentiment-reward", "sentiment-ppo")
    in_folder = f"{path.parent.name}-{path.stem}"
    name = in_folder if in_folder in DATA else next((key for key in own_data if path.stem.startswith(key)), command)
    flags = [f"--model={models / ('gpt2' if 'gpt2' in text else 'qwen3')}", f"--output={place / 'run'}"]
    own = next((line.split()[1] for line in text.splitlines() if line.startswith("data: recipes/")), None)
    if own is None:
        (place / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in DATA[name]), encoding="utf-8")
        own = str(place / "data.jsonl")
    flags.append(f"--data={ROOT / own if own.startswith('recipes/') else own}")
    if command in ("sft", "reward"):
        flags += SMALL
    else:
        flags += [*ONLINE, f"--samples-per-prompt={4 if command == 'grpo' else 1}"]
        flags += ["--critic-warmup-steps=0"] * (command == "ppo") + ["--minibatch-size=4"] * (command != "a2c")
        flags += ["--score-norm-samples=4"] * ("score_norm_samples" in text)
        if "rewards:" not in text or "model:" in text.partition("rewards:")[2].splitlines()[0]:
            flags.append(f"--rewards=model:{models / ('deberta-v2' if path.stem == 'deberta-ppo' else 'scorer')}")
    flags += ["--thinking=default"] * ("thinking: off" in text) + ["--eval-fraction=0.3"] * (
        "eval_fraction: 0." in text
    )
    return command, flags


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_recipe_fails(path, models, tmp_path, heedful):
    command, flags = flags_of(path, models, tmp_path)
    outcome = heedful("doctor", command, str(path), "--json", *flags)
    assert outcome.status == 0, outcome.out + outcome.err
    assert {one["check"] for one in json.loads(outcome.out)["findings"]} <= OF_RANDOM_MODELS


def test_there_are_twenty_healthy_configurations():
    assert len(RECIPES) >= 20


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The demo's world, and the random model that the demo begins with."""
    place = tmp_path_factory.mktemp("世界")
    write_world(place / "world", seed=0)
    tiny = parse(TinyConfig, [str(DEMO / "tiny.yaml"), f"--output={place / 'base'}"], prog="heedful tiny")
    sizes = {name: getattr(tiny, name) for name in ("hidden_size", "num_layers", "max_length", "initializer_range")}
    make_tiny_model(tiny.architecture, tiny.output, **sizes)
    return place


@pytest.mark.parametrize(("command", "data"), [("sft", "demonstrations"), ("reward", "preferences")])
def test_nothing_is_found_in_the_demo(world, heedful, command, data):
    file = str(DEMO / f"{command}.yaml")
    outcome = heedful("doctor", file, "--json", model=world / "base", data=world / "world" / f"{data}.jsonl")
    assert outcome.status == 0, outcome.err
    assert json.loads(outcome.out)["findings"] == []
