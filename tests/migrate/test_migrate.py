"""heedful migrate: scripts and files of other libraries, written for these tests, and what becomes of them."""

import ast
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import yaml

from heedful.configs.peers import peers

PYTHON = ".".join(map(str, sys.version_info[:2]))
SCRIPTS = Path(__file__).parents[1] / "compat" / "scripts"
SENTIMENT = """
from dataclasses import dataclass, field

import torch
from datasets import load_dataset
from transformers import AutoTokenizer, HfArgumentParser, pipeline

from trl import (
    AutoModelForCausalLMWithValueHead,
    PPOConfig,
    PPOTrainer,
)
from trl.core import LengthSampler  # 长度


@dataclass
class Arguments:
    model_name: str = field(default="影评/gpt2")
    batch_size: int = field(default=64, metadata={"help": "批量"})
    early: bool = field(default=True)


args = HfArgumentParser(Arguments).parse_args_into_dataclasses()[0]
config = PPOConfig(
    model_name=args.model_name,
    learning_rate=1.41e-5 * 2,
    batch_size=args.batch_size,
    mini_batch_size=4,
    gradient_accumulation_steps=2,
    early_stopping=args.early,
    target_kl=0.1,
    log_with="wandb",
    ratio_threshold=3.0,
)


def build(name, longest=8):
    texts = load_dataset(name, split="train")
    return texts.map(lambda row: {"query": row["text"][:longest]})


data = build("影评/评论")
model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
reference = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
tokenizer = AutoTokenizer.from_pretrained(config.model_name)
trainer = PPOTrainer(config, model, reference, tokenizer, dataset=data)
judge = pipeline("sentiment-analysis", model="影评/评分")
sampling = {"min_length": -1, "top_k": 0.0, "do_sample": True}
sampling["max_new_tokens"] = 16
for batch in trainer.dataloader:
    queries = batch["input_ids"]
    answers = trainer.generate(queries, return_prompt=False, **sampling)
    scores = [torch.tensor(one["score"]) for one in judge(answers)]
    stats = trainer.step(queries, answers, scores)
    trainer.log_stats(stats, batch, scores)
trainer.save_pretrained("out")
"""
GRPO = """
import re

from datasets import load_dataset
from peft import LoraConfig

from trl import GRPOConfig, GRPOTrainer

PATTERN = r"答案"


def has_answer(completions, **columns):
    return [float(bool(re.search(PATTERN, text))) for text in completions]


print("这不应该运行" + 1 / 0)


def main():
    settings = GRPOConfig(
        output_dir="runs/数学",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        num_generations=8,
        max_steps=100,
        beta=0.04,
        max_completion_length=256,
        learning_rate=1e-6,
        logging_steps=5,
        warmup_ratio=0.1,
    )
    trainer = GRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        args=settings,
        reward_funcs=[has_answer, "某人/评分"],
        train_dataset=load_dataset("json", data_files="题目.jsonl", split="train"),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train()


if __name__ == "__main__":
    main()
"""
DPO = """
from trl import DPOConfig, DPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from datasets import load_dataset
from transformers import AutoModelForCausalLM

parser = TrlParser((ScriptArguments, DPOConfig, ModelConfig))
script, args, model_args = parser.parse_args_and_config()
model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
peft = get_peft_config(model_args)
reference = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path) if peft is None else None
data = load_dataset(script.dataset_name, name=script.dataset_config)
trainer = DPOTrainer(model, reference, args=args, train_dataset=data[script.dataset_train_split], peft_config=peft)
trainer.train()
"""
FACTORY = """
model_name_or_path: Qwen/Qwen3-0.6B
stage: ppo
do_train: true
finetuning_type: lora
lora_target: all
reward_model: saves/评分
reward_model_type: full
dataset: 问题
dataset_dir: {folder}
template: qwen
cutoff_len: 512
output_dir: saves/ppo
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1e-5
max_steps: 50
lr_scheduler_type: cosine
warmup_ratio: 0.1
top_k: 0
"""


def test_a_script_with_step_keeps_its_text_but_the_imports(migrated):
    outcome, _, folder = migrated("情感.py", SENTIMENT)
    assert outcome.status == 0
    written = (folder / "情感.py").read_text(encoding="utf-8")
    before, after = SENTIMENT.split("from trl import (")
    assert written.startswith(
        before + "from heedful.compat.trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer\n"
    )
    rest = after.split("\n)\n", 1)[1].replace("from trl.core import", "from heedful.compat.trl.core import")
    assert written.endswith(rest)


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_names_that_scripts_import_are_where_the_rewritten_script_looks(migrated, script):
    """Those of tests/compat/scripts, which run on heedful.compat.trl."""
    _, _, folder = migrated(script.name, script.read_text(encoding="utf-8"))
    tree = ast.parse((folder / script.name).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "trl" in node.module]
    assert imports
    for node in imports:
        module = importlib.import_module(node.module)
        assert [one.name for one in node.names if not hasattr(module, one.name)] == []


def test_settings_of_a_script_with_step_are_those_of_heedful_ppo(migrated, row):
    _, settings, folder = migrated("情感.py", SENTIMENT, "--arguments=--batch_size 32 --early false")
    assert settings == {
        "model": "影评/gpt2", "learning_rate": 2.82e-05, "lr_schedule": "constant", "adam_eps": 1e-8, "track": "wandb",
        "micro_batch_size": 4, "minibatch_size": 8, "rollout_batch_size": 32, "max_new_tokens": 16, "top_k": 0,
        "kl_coef": 0.2, "kl_target": 6.0, "kl_horizon": 10000, "value_coef": 0.1, "output": "runs/情感",
    }  # fmt: skip
    assert row(folder, "PPOConfig.target_kl")[0] == "Without effect on the numbers"
    assert row(folder, "PPOConfig.ratio_threshold")[:3] == ["Not kept", "| 33", "`PPOConfig.ratio_threshold`"]
    assert row(folder, "the data")[0] == row(folder, "the scores")[0] == "To be answered"


def test_early_stopping_is_a_limit_half_as_much_again(migrated, row):
    _, settings, folder = migrated("情感.py", SENTIMENT, "--version", "0.9.6")
    assert settings["approx_kl_limit"] == pytest.approx(0.15)
    for name in ("PPOConfig.target_kl", "PPOConfig.early_stopping"):
        assert row(folder, name)[0] == "Kept, with another meaning"


def test_a_grpo_script_becomes_settings_and_a_file_of_its_rewards(migrated):
    outcome, settings, folder = migrated("数学.py", GRPO, "--processes", "2")
    assert outcome.status == 0
    assert settings | {"rewards": None} == {
        "data": "题目.jsonl", "model": "Qwen/Qwen3-0.6B", "output": "runs/数学", "seed": 42, "dtype": "bfloat16",
        "special_tokens": "read", "eval_fraction": 0.0, "learning_rate": 1e-6, "lr_schedule": "linear", "warmup_steps": 10,
        "adam_eps": 1e-8, "lora_rank": 16, "lora_alpha": 32.0, "lora_targets": "q_proj,v_proj", "steps": 100,
        "gradient_checkpointing": True, "max_new_tokens": 256, "samples_per_prompt": 8, "rollout_batch_size": 64,
        "minibatch_size": 64, "micro_batch_size": 8, "loss_reduction": "token", "kl_coef": 0.04,
        "kl_kind": "weighted-k3", "save_every": 500, "rewards": None,
    }  # fmt: skip
    assert settings["rewards"] == [f"python:{folder / 'rewards.py'}:has_answer", "model:某人/评分"]
    spec = importlib.util.spec_from_file_location("migrated_rewards", folder / "rewards.py")
    rewards = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rewards)  # without the lines of the script that fail
    assert rewards.has_answer(["答案是3", "不知道"]) == [1.0, 0.0]


def test_settings_come_from_the_command_line_of_the_script(migrated):
    given = "--dataset_name 某人/偏好 --model_name_or_path Qwen/Qwen3-0.6B --beta 0.2 --per_device_train_batch_size=2"
    outcome, settings, _ = migrated("偏好.py", DPO, f"--arguments={given} --bf16 false")
    assert "0 questions" in outcome.err
    wanted = {
        "data": "某人/偏好",
        "model": "Qwen/Qwen3-0.6B",
        "beta": 0.2,
        "batch_size": 2,
        "epochs": 3,
        "dtype": "float32",
    }
    assert {name: settings.get(name) for name in wanted} == wanted
    assert "lora_rank" not in settings


def test_flags_that_no_parser_takes_are_questions(migrated, row):
    given = "--dataset_name 某人/偏好 --model_name_or_path M --no_remove_unused_columns --没有 3 -q"
    _, settings, folder = migrated("偏好.py", DPO, f"--arguments={given} --score -1")
    assert settings["model"] == "M"
    questions = {name: row(folder, name) for name in ("--没有", "--q", "--score", "--no_remove_unused_columns")}
    assert [name for name, cells in questions.items() if cells] == ["--没有", "--q", "--score"]
    assert questions["--score"][3] == "`-1`"
    assert row(folder, "TrainingArguments.remove_unused_columns")[3] == "`False`"


def test_two_trainers_have_a_file_of_rewards_and_a_run_each(migrated):
    functions = "".join(f"def {name}(completions, **rest):\n    return [{name!r}]\n" for name in ("one", "two"))
    trainers = "".join(
        f"GRPOTrainer('模型', reward_funcs={name}, args=GRPOConfig(max_steps=1))\n" for name in ("one", "two")
    )
    _, _, folder = migrated("两个.py", f"from trl import GRPOConfig, GRPOTrainer\n{functions}{trainers}")
    found = [yaml.safe_load((folder / name).read_text(encoding="utf-8")) for name in ("grpo.yaml", "grpo-2.yaml")]
    assert [settings["output"] for settings in found] == ["runs/两个", "runs/两个-grpo-2"]
    for settings, name in zip(found, ("one", "two"), strict=True):
        (reward,) = settings["rewards"]
        file, function = reward.removeprefix("python:").split(":")
        assert function == name
        assert f"def {name}" in Path(file).read_text(encoding="utf-8")


def test_a_default_that_a_script_reads_is_that_of_its_trainer(migrated):
    """Both of TRL's PPOTrainers have a PPOConfig, with other learning rates."""
    again = "PPOTrainer(PPOConfig(batch_size=64, mini_batch_size=4, learning_rate=config.learning_rate),"
    script = SENTIMENT.replace("learning_rate=1.41e-5 * 2,", "").replace("PPOTrainer(config,", again)
    assert migrated("情感.py", script)[1]["learning_rate"] == 1.41e-5


PPO = """
from trl import PPOConfig, PPOTrainer
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, HfArgumentParser

(args,) = HfArgumentParser(PPOConfig).parse_args_into_dataclasses()
reward = AutoModelForSequenceClassification.from_pretrained(args.reward_model_path)
policy = AutoModelForCausalLM.from_pretrained(args.sft_model_path)
data = load_dataset("某人/问题").filter(lambda row: row)
PPOTrainer(args, None, policy, None, reward, data, value_model=reward).train()
"""


def test_paths_that_the_script_loads_from_are_no_questions(migrated, row):
    _, settings, folder = migrated("新.py", PPO, "--arguments=--sft_model_path 甲 --reward_model_path 乙")
    assert (settings["model"], settings["rewards"], settings["critic"]) == ("甲", ["model:乙"], "reward")
    assert row(folder, "OnPolicyConfig.sft_model_path")[0] == row(folder, "PPOConfig.reward_model_path")[0] == "Kept"
    assert "# model: ?" not in (folder / "ppo.yaml").read_text(encoding="utf-8")


def test_adapters_are_asked_for_their_places(migrated, row):
    outcome, settings, folder = migrated(
        "偏好.py", DPO, "--arguments=--dataset_name 某人/偏好 --model_name_or_path M --use_peft --lora_r 4"
    )
    assert (settings["lora_rank"], settings["lora_alpha"]) == (4, 32)
    assert "? ModelConfig.lora_target_modules" in outcome.err
    assert "# lora_targets: ?" in (folder / "dpo.yaml").read_text(encoding="utf-8")
    assert row(folder, "ModelConfig.lora_dropout")[0] == "Without effect on the numbers"  # DPO switches dropout off


def test_a_file_of_llama_factory_becomes_settings(migrated, row, tmp_path):
    (tmp_path / "dataset_info.json").write_text(json.dumps({"问题": {"file_name": "问题.json"}}), encoding="utf-8")
    outcome, settings, folder = migrated("ppo.yaml", FACTORY.format(folder=tmp_path))
    assert outcome.status == 0
    wanted = {
        "model": "Qwen/Qwen3-0.6B", "rewards": ["model:saves/评分"], "data": str(tmp_path / "问题.json"), "steps": 50,
        "lora_rank": 8, "minibatch_size": 8, "rollout_batch_size": 8, "micro_batch_size": 2, "kl_coef": 0.2, "kl_target": 6.0,
        "temperature": 0.95, "top_p": 0.7, "top_k": 0, "learning_rate": 1e-5, "lr_schedule": "cosine", "warmup_steps": 5,
    }  # fmt: skip
    assert {name: settings.get(name) for name in wanted} == wanted
    assert row(folder, "DataArguments.template")[:2] == ["Kept, with another meaning", "| 11"]


def test_settings_of_adapters_do_nothing_without_adapters(migrated, tmp_path, row):
    content = FACTORY.format(folder=tmp_path).replace("lora\n", "full\n", 1) + "lora_alpha: 8\nuse_rslora: true\n"
    _, settings, folder = migrated("ppo.yaml", content)
    assert not {"lora_rank", "lora_alpha", "lora_targets"} & set(settings)
    for name in ("lora_target", "lora_alpha", "use_rslora"):
        assert row(folder, f"LoraArguments.{name}")[0] == "Without effect on the numbers"


def test_no_setting_is_dropped_in_silence(migrated, row):
    _, _, folder = migrated(
        "数学.py", GRPO.replace("beta=0.04", "beta=0.04, 新参数=3, sapo_temperature_neg=1.1, save_steps=get()")
    )
    assert row(folder, "GRPOConfig.新参数")[0] == row(folder, "TrainingArguments.save_steps")[0] == "To be answered"
    for name in ("GRPOConfig.sapo_temperature_neg", "TrainingArguments.logging_steps", "GRPOConfig.num_generations"):
        assert row(folder, name) is not None, name


@pytest.mark.parametrize("value", ["None", "False", "'别的'"])
@pytest.mark.parametrize(("table", "section"), [("trl", "GRPOConfig"), ("trl", "DPOConfig"), ("trl-step", "PPOConfig")])
def test_every_setting_has_a_row_whatever_its_value(migrated, table, section, value, row):
    names = peers()[table].sections[section]
    trainer = section.replace("Config", "Trainer")
    use = ".step([], [], [])" if table == "trl-step" else ""
    settings = ", ".join(f"{name}={value}" for name in names)
    _, _, folder = migrated(
        "每个.py",
        f"import trl\nconfig = trl.{section}({settings})\ntrl.{trainer}('模型', args=config, config=config){use}\n",
    )
    assert [name for name in names if row(folder, f"{section}.{name}") is None] == []


def test_what_the_trainer_does_without_a_setting_is_reported(migrated):
    _, settings, folder = migrated("情感.py", SENTIMENT)
    assert settings["adam_eps"] == 1e-8
    assert "| `PPOTrainer` |  | `adam_eps: 1e-08` |" in (folder / "migration.md").read_text(encoding="utf-8")


SFT = "import trl\ntrl.SFTTrainer('模型', args=trl.SFTConfig({settings}), train_dataset=[])\n"


def test_warm_up_is_that_of_transformers(migrated, row):
    """A share is rounded up, constant has none, and GRPO counts optimizer steps, of which a rollout batch has two here."""
    share = "max_steps=25, warmup_ratio=0.1"
    _, settings, _ = migrated("a.py", SFT.format(settings=share))
    assert settings["warmup_steps"] == 3
    _, settings, folder = migrated("a.py", SFT.format(settings=share + ", lr_scheduler_type='constant'"), "--overwrite")
    assert "warmup_steps" not in settings
    assert row(folder, "TrainingArguments.warmup_ratio")[0] == "Without effect on the numbers"
    script = GRPO.replace("warmup_ratio=0.1", "warmup_steps=7, steps_per_generation=8")
    (folder / "sft.yaml").unlink()
    _, settings, _ = migrated("数学.py", script, "--overwrite")
    assert (settings["steps"], settings["warmup_steps"]) == (50, 4)


def test_of_steps_and_epochs_the_one_without_effect_is_said_so(migrated, row):
    _, settings, folder = migrated("a.py", SFT.format(settings="max_steps=9, num_train_epochs=2"))
    assert settings["max_steps"] == 9
    assert row(folder, "TrainingArguments.num_train_epochs")[0] == "Without effect on the numbers"
    assert "# epochs" not in (folder / "sft.yaml").read_text(encoding="utf-8")


def test_saving_that_the_file_does_not_set_is_no_question(migrated, tmp_path, row):
    _, _, folder = migrated("ppo.yaml", FACTORY.format(folder=tmp_path))
    assert row(folder, "TrainingArguments.save_steps")[0] == "Defaults that are written"
    _, _, folder = migrated("ppo.yaml", FACTORY.format(folder=tmp_path) + "save_steps: 100\n", "--overwrite")
    assert row(folder, "TrainingArguments.save_steps")[0] == "Kept"
    assert row(folder, "ppo.val_size")[0] == "Defaults that are written"


def test_a_question_shows_the_part_of_a_value_that_is_taken_apart(migrated, row):
    script = SENTIMENT.replace("config = PPO", "_, where = torch.load(1)\nconfig = PPO")
    script = script.replace("(config.model_name)", "(where)")
    assert row(migrated("情感.py", script)[2], "the model")[3:5] == ["`where`", "`model: ?`"]


def test_what_a_run_would_compute_is_a_question(migrated):
    outcome, settings, _ = migrated("数学.py", GRPO.replace("learning_rate=1e-6", "learning_rate=choose(rates)"))
    assert "? TrainingArguments.learning_rate" in outcome.err or "? GRPOConfig.learning_rate" in outcome.err
    assert "learning_rate" not in settings


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.py", "print 'hello'\n", f"a.py:1: not Python {PYTHON}: Missing parentheses in call to 'print'"),
        ("a.py", "import torch\nx = (\n", "a.py:2: not Python"),
        (
            "a.py",
            "import trl\ntrl.BCOTrainer(1)\n",
            "it makes no trainer that heedful knows; it makes BCOTrainer (line 2)",
        ),
        ("a.py", "x = 1\0\n", f"a.py:1: not Python {PYTHON}: source code string cannot contain null bytes"),
        ("a.py", "x = " + "(" * 500 + ")" * 500, "too many nested parentheses"),
        ("a.py", "x = " + "-" * 9000 + "1", "a.py: it is nested too deeply to be read"),
        ("a.ipynb", "{", "a.ipynb: not a notebook"),
        ("a.ipynb", '{"nbformat": 3}', "it has no list of cells"),
        ("a.yaml", "base_model: 模型\ndatasets: []\n", "it looks like one of axolotl"),
        ("a.yaml", "model: 模型\nrewards: []\n", "it looks like one of heedful already"),
        ("a.yaml", "- 1\n", "expected 'key: value' lines, found list"),
        ("a.yaml", "model_name_or_path: 模型\nstage: grpo\n", "stage 'grpo' is none of sft, pt, rm, dpo, kto, ppo"),
        ("a.yaml", "a: [\n", "not valid YAML"),
    ],
)
def test_what_is_not_what_it_seems_is_refused(migrated, name, content, said):
    outcome, _, folder = migrated(name, content)
    assert outcome.status == 2
    assert said in outcome.message
    assert not folder.exists()


@pytest.mark.parametrize("version", ["0.99", "2", "0.11.4", "新"])
def test_a_version_that_never_was_is_refused(migrated, version):
    outcome, _, _ = migrated("数学.py", GRPO, "--version", version)
    assert outcome.status == 2
    assert f"--version {version}: TRL's trainers from 0.12 on has GRPOTrainer in 0.14, 0.15," in outcome.message


def test_a_version_has_its_own_defaults(migrated):
    _, old, _ = migrated("数学.py", GRPO, "--version", "0.16.1")
    assert old["dtype"] == "float32"


def test_a_notebook_is_read_as_a_script(migrated):
    cells = [{"cell_type": "code", "source": ["%matplotlib inline\n", "!pip install trl\n", SENTIMENT]}]
    notebook = {"nbformat": 4, "cells": [{"cell_type": "markdown", "source": "# 题"}, *cells]}
    _, settings, folder = migrated("情感.ipynb", json.dumps(notebook))
    assert settings["rollout_batch_size"] == 64
    assert "# !pip install trl" in (folder / "情感.py").read_text(encoding="utf-8")


HOSTILE = """
import os, sys, trl
open({mark!r}, "w").write("1")
os.system("touch " + {mark!r})
__import__("pathlib").Path({mark!r}).touch()
exec("open({mark!r}, 'w')")
big = 9 ** 9 ** 9 ** 9
text = "a" * 10 ** 12
rows = [0] * 10 ** 12
loop = {{}}
loop["self"] = loop
again = [loop]
again.append(again)
def forever(n): return forever(n + 1) + forever(n + 2)
forever(0)
while True: pass
class Evil:
    def __init_subclass__(cls): open({mark!r}, "w")
    x: int = open({mark!r}, "w")
config = trl.GRPOConfig(learning_rate=big, output_dir=text, run_name=loop, max_steps=forever(1), **loop)
@(lambda f: open({mark!r}, "w"))
def reward(completions, mark=open({mark!r}, "w"), **rest): return [1.0]
trainer = trl.GRPOTrainer(model="模型", args=config, reward_funcs=[reward], train_dataset=again)
sys.exit(1)
"""


def test_a_hostile_script_does_nothing(migrated, tmp_path):
    mark = tmp_path / "坏"
    outcome, _, folder = migrated("hostile.py", HOSTILE.format(mark=str(mark)))
    assert outcome.status == 0
    assert not mark.exists()
    assert sorted(path.name for path in folder.iterdir()) == ["grpo.yaml", "migration.md", "rewards.py"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hostile.py", "迁移"]


def test_its_help_names_no_file_of_settings(heedful):
    """A YAML file that comes first is the one to migrate."""
    assert "A YAML file, given" in heedful("dpo", "--help").out
    assert "A YAML file, given" not in heedful("migrate", "--help").out


def test_only_its_own_folder_is_replaced(heedful, written, tmp_path):
    script, folder = written("数学.py", GRPO), tmp_path / "有"
    folder.mkdir()
    (folder / "我的.txt").write_text("留下", encoding="utf-8")
    assert "exists; choose another folder, or add --overwrite" in heedful("migrate", script, "--output", folder).message
    assert (
        "我的.txt, which heedful migrate does not write"
        in heedful("migrate", script, "--output", folder, "--overwrite").message
    )
    assert (folder / "我的.txt").read_text(encoding="utf-8") == "留下"
    other = tmp_path / "新"
    assert heedful("migrate", script, "--output", other).status == 0
    assert heedful("migrate", script, "--output", other, "--overwrite").status == 0
