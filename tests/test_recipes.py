"""Every recipe is parsed by its own command, and its header's command runs, on tiny models, to one that loads."""

import dataclasses
import functools
import gzip
import io
import json
import math
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from heedful import CheckpointError, Message
from heedful.cli.main import COMMANDS, main
from heedful.configs.parse import parse
from heedful.data.batches import collate
from heedful.data.chat import Renderer, RewardInputs
from heedful.data.messages import as_dict
from heedful.engines.teacher_forced import token_outputs
from heedful.models import load_policy, load_reward_model, load_tokenizer
from heedful.models.adapters import adapter_chain, is_adapter
from heedful.models.tiny import CHAT_TEMPLATE
from heedful.models.tokenizer import set_defaults
from heedful.rewards.models import ModelReward
from heedful.types import MicroBatch
from jsonl import read_jsonl

ROOT = Path(__file__).parents[1] / "recipes"
RECIPES = sorted(path for path in ROOT.rglob("*.yaml") if path.parent.name != "launch")
CPU = {"device": torch.device("cpu"), "compute_dtype": torch.float32}


def config_of(command, words):
    return parse(COMMANDS[command].settings(), words, prog=f"heedful {command}")


def header(path):
    """The command of a recipe's first lines, ``heedful COMMAND recipes/... FLAGS``: COMMAND, its file, its flags."""
    comment = re.match(r"(?:#.*\n)+", path.read_text(encoding="utf-8")).group()
    ((command, file, flags),) = re.findall(r"heedful (\S+) (recipes/\S+)(.*)", comment.replace(" \\\n#", " "))
    return command, file, shlex.split(flags)


@functools.cache
def headed(path):
    """The configuration of a header's command."""
    command, file, flags = header(path)
    return config_of(command, [str(ROOT.parent / file), *flags])


def starts(path):
    """The models that a header's command reads."""
    config = headed(path)
    return [config.model, *(reward.removeprefix("model:") for reward in getattr(config, "rewards", ()))]


def said(value):
    """A value of a configuration as a recipe writes it; numbers stay numbers, because 1e-4 has several spellings."""
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def test_every_recipe_is_parsed_by_its_command():
    """With all that it says, and nothing but the model, the data and the output left for flags."""
    for path in RECIPES:
        command, file, _ = header(path)
        assert file == f"recipes/{path.relative_to(ROOT)}"
        assert command == path.stem.rpartition("-")[2]
        recipe = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
        required = [f"--{name}={name}" for name in ("model", "data", "output") if name not in recipe]
        config = config_of(command, [str(path), *required])
        for key, value in recipe.items():
            found = said(getattr(config, key))
            assert found == (float(value) if isinstance(found, float) else value), f"{file}: {key}"


def test_the_header_of_every_recipe_is_a_whole_command():
    """What the recipe leaves out is in its flags; its files are there, and its models are what other recipes make."""
    assert {header(path)[0] for path in RECIPES} == {"sft", "reward", "ppo", "a2c", "grpo"}
    for path in RECIPES:
        config = headed(path)
        assert bool(getattr(config, "rewards", ())) == (header(path)[0] in ("ppo", "a2c", "grpo")), path
        assert not config.data.startswith("recipes/") or (ROOT.parent / config.data).is_file(), path
        assert {start for start in starts(path) if start.startswith("runs/")} <= made(), path


@functools.cache
def made():
    """The models that recipes and the ``heedful tiny`` of their headers write."""
    tiny = [re.search(r"heedful tiny .*--output (\S+) &&", path.read_text(encoding="utf-8")) for path in RECIPES]
    runs = {f"{headed(path).output}/{name}" for path in RECIPES for name in ("final", "best")}
    return runs | {found[1] for found in tiny if found}


# --------------------------------------------------------------------------------------------------------- from end to end

QUESTIONS = ["你好", "2加2等于几？", "What is AI?", "请介绍一下北京。", "Say hello", "猫吃什么？", "1+1?", "谢谢你"]
NUMBERS = ["3", "#### 42", "她一共有 12 + 30 = 42 个。\n#### 42", "1,000", "-7", "0.5", "$18", "x = \\boxed{6}"]
WORDS = [f"In {1990 + i} the fox met {i} old crows in a tree near 北京 , and they" for i in range(8)]


def said_by(role, text):
    return [{"role": role, "content": text}]


def turns(text):
    """Two answers, with a question of the user between them."""
    return said_by("assistant", text) + said_by("user", "还有呢？") + said_by("assistant", f"{text}，没有了")


def demonstrations(column="completion"):
    return [{"prompt": said_by("user", q), column: said_by("assistant", f"好的，{q}")} for q in QUESTIONS]


PREFERENCES = [record | {"rejected": said_by("assistant", "不")} for record in demonstrations("chosen")]
DATA = {
    "demonstrations.jsonl": demonstrations(),
    "INSTRUCTIONS.jsonl.gz": demonstrations(),
    "preferences.jsonl": PREFERENCES,
    "PAIRS.jsonl.gz": PREFERENCES,
    "prompts.jsonl": [{"prompt": said_by("user", question)} for question in QUESTIONS],
    "runs/dialogue/data/demonstrations.jsonl": [
        {"prompt": said_by("user", q), "completion": turns(q)} for q in QUESTIONS
    ],
    "runs/dialogue/data/pairs.jsonl": [
        {"prompt": said_by("user", q), "chosen": turns("好"), "rejected": turns("不")} for q in QUESTIONS
    ],
    "runs/dialogue/data/prompts.jsonl": [
        {"prompt": said_by("user", q), "wishes": [[q, "反义词", "小"], ["它的反义词呢？", "反义词", "大"]]}
        for q in QUESTIONS
    ],
    "runs/digits/prompts.jsonl": [{"prompt": text} for text in WORDS],
    "runs/gsm8k/questions.jsonl": [
        {"question": said_by("user", question), "answer": n} for question, n in zip(QUESTIONS, NUMBERS, strict=True)
    ],
    "runs/sentiment/pairs.jsonl": [{"prompt": "", "chosen": t, "rejected": t[::-1], "truncated": True} for t in WORDS],
    "runs/sentiment/prompts.jsonl": [{"prompt": text} for text in WORDS],
}
"""A few records under each name that a header has."""

QWEN2, QWEN3, GPT2 = ("--model=models/qwen2", "--model=models/qwen3", "--model=models/gpt2")
SWAPPED = {
    "deberta-ppo": [QWEN3, "--chat-template=thinking.jinja", "--rewards", "model:models/deberta-v2"],
    "dialogue/sft": [QWEN3],
    "digits-a2c": [GPT2],
    "digits-ppo": [GPT2],
    "digits-response-ppo": [GPT2],
    "first/sft": [QWEN3],
    "gsm8k-grpo": [QWEN2],
    "lora/sft": [QWEN3, "--chat-template=thinking.jinja"],
    "polite-sft": [QWEN3],
    "rule/sft": [QWEN2],
    "scratch/sft": [QWEN3],
    "sentiment-reward": [QWEN3],
    "sentiment-ppo": [QWEN3],
}
"""Tiny models for those that do not come from another recipe; all others start as their headers say."""
NO_THOUGHT = "<think>\n\n</think>\n\n"
THINKING = CHAT_TEMPLATE + (
    "{% if add_generation_prompt %}"
    "{% if enable_thinking is not defined or enable_thinking %}{{ raise_exception('it thinks') }}{% endif %}"
    f"{{{{ {json.dumps(NO_THOUGHT)} }}}}{{% endif %}}"
)
"""As Qwen3's, where an empty thought switches thinking off; this one refuses whoever does not ask for that."""


def small(path):
    """The words of a header's command with flags behind them that cut it down to one step of a tiny model."""
    config = headed(path)
    command, file, flags = header(path)
    if command in ("sft", "reward"):
        cut = {"max-steps": 1, "batch-size": 4}
    else:
        cut = {"steps": 1, "rollout-batch-size": 4, "samples-per-prompt": min(2, config.samples_per_prompt)}
        cut |= {"micro-batch-size": 2, "rollout-micro-batch-size": 3, "max-new-tokens": 6}
        cut |= {} if command == "a2c" else {"minibatch-size": 2}
        cut |= {"score-norm-samples": 2} if getattr(config, "score_norm_samples", 0) else {}
    cut |= {"eval-fraction": 0.3} if config.eval_fraction else {}
    swapped = SWAPPED.get(str(path.relative_to(ROOT).with_suffix("")), [])
    return [command, file, *flags, *(f"--{flag}={value}" for flag, value in cut.items()), *swapped]


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (
        content if isinstance(content, str) else "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
    )
    path.write_bytes((gzip.compress if path.suffix == ".gz" else bytes)(text.encode()))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny):
    """``finished(path)`` is the configuration of a recipe's run; what it starts from is run before it, and each once."""
    place = tmp_path_factory.mktemp("菜谱")
    (place / "recipes").symlink_to(ROOT)
    (place / "models").mkdir()
    for name in ("gpt2", "qwen2", "qwen3", "deberta-v2"):
        (place / "models" / name).symlink_to(tiny(name, max_length=256))
    for name, content in (DATA | {"thinking.jinja": THINKING}).items():
        write(place / name, content)

    @functools.cache
    def finish(path):
        for other in RECIPES:
            if any(start.startswith(f"{headed(other).output}/") for start in starts(path)):
                finish(other)
        command, *words = small(path)
        assert main([command, *words]) == 0
        return config_of(command, words)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        yield finish


def loaded(folder, command):
    """What a model makes of a question and an answer: log-probs of a policy, the score of a reward model."""
    tokenizer, question = load_tokenizer(str(folder)), (Message("user", "你好"),)
    if command == "reward":
        model = load_reward_model(str(folder), tokenizer, **CPU)
        return torch.tensor(ModelReward(model, RewardInputs(tokenizer))([[as_dict(question[0])]], ["您好！"], [False]))
    renderer = Renderer(tokenizer)
    rows = [renderer.prompt_ids(question)], [renderer.response_ids("您好！", prompt=question)]
    batch = collate(*rows, pad_id=renderer.pad_id)
    return token_outputs(load_policy(str(folder), **CPU), batch, temperature=1.0, micro_batch=MicroBatch(1)).logprobs


OFTEN = {"lora/sft", "lora/reward", "lora/ppo", "digits-a2c", "gsm8k-grpo", "deberta-ppo"}
"""One of each command, with adapters and without; the others are the same commands with other data and numbers."""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=name, marks=() if name in OFTEN else pytest.mark.exhaustive)
        for path, name in ((path, str(path.relative_to(ROOT).with_suffix(""))) for path in RECIPES)
    ],
)
def test_a_recipe_runs(path, finished):
    """Its header's command with tiny models; the run is of what the recipe says, and its model loads."""
    config, (command, *_) = finished(path), header(path)
    saved = config_of(command, [f"{config.output}/config.yaml", f"--output={config.output}"])
    assert dataclasses.replace(saved, overwrite=config.overwrite) == config
    rows = read_jsonl(config.output / "metrics.jsonl")
    assert rows[-1]["step"] == 1
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert is_adapter(config.output / "final") == (config.lora_rank > 0)
    assert torch.isfinite(loaded(config.output / "final", command)).all()


def test_adapters_lie_on_adapters(finished):
    """The chain with adapters: reward model and PPO each have theirs on those of SFT, on the one base."""
    for name in ("reward", "ppo"):
        finished(ROOT / "lora" / f"{name}.yaml")
        base, folders = adapter_chain(f"runs/lora/{name}/final")
        assert Path(base).samefile("models/qwen3")
        assert [str(folder.resolve().relative_to(Path.cwd())) for folder in folders] == [
            "runs/lora/sft/final",
            f"runs/lora/{name}/final",
        ]


def test_thinking_is_off_from_end_to_end(finished, monkeypatch, capsys):
    """The chain's template refuses to think and came with the models; a prompt has the empty thought, and no other."""
    for name in ("sft", "reward", "ppo"):
        finished(ROOT / "lora" / f"{name}.yaml")
        renderer = Renderer(load_tokenizer(f"runs/lora/{name}/final"))
        prompt = renderer.decode(renderer.prompt_ids((Message("user", "你好"),)))
        assert prompt == f"<|user|>你好<|end|><|assistant|>{NO_THOUGHT}"
        set_defaults(renderer.tokenizer, "on", {})
        with pytest.raises(CheckpointError, match="it thinks"):
            renderer.prompt_ids((Message("user", "再见"),))
    monkeypatch.setattr("sys.stdin", io.StringIO("你好\n"))
    assert main(["chat", "--model", "runs/lora/ppo/final", "--max-new-tokens", "4"]) == 0
    assert "think" not in capsys.readouterr().out
