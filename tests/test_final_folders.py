"""What heedful writes, other tools load: plain transformers in a process of its own gives the same text and scores."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from heedful.configs.options import SamplingOptions
from heedful.configs.reward import RewardConfig
from heedful.configs.sft import SFTConfig
from heedful.data.chat import Renderer, RewardInputs, stop_ids
from heedful.models.checkpoints import load_tokenizer
from heedful.models.policy import freeze, load_policy
from heedful.models.reward_model import load_reward_model
from heedful.models.tiny import make_tiny_model
from heedful.rollout.generate import sample
from heedful.train.reward import train_reward
from heedful.train.sft import train_sft
from heedful.types import Message

CPU = torch.device("cpu")
QUESTIONS = ["你好", "hello", "2+2?"]
GENERATE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, questions = sys.argv[1], json.loads(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
answers = []
for question in questions:
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    answers.append(output[0, inputs["input_ids"].shape[1]:].tolist())
assert not any(name.startswith("heedful") for name in sys.modules)
print(json.dumps(answers))
"""
SCORE = """
import json, sys, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
folder, questions = sys.argv[1], json.loads(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
if tokenizer.cls_token is None:
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": q}, {"role": "assistant", "content": a}], tokenize=False
        ).removesuffix("\\n")
        for q, a in questions
    ]
    batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
else:
    batch = tokenizer([q for q, _ in questions], [a for _, a in questions], padding=True, return_tensors="pt")
with torch.no_grad():
    print(json.dumps(model(**batch).logits[:, 0].tolist()))
"""


def run(script: str, *arguments: str):
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def write(path: Path, records) -> str:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3"])
def test_a_policy_generates_the_same_greedy_text_elsewhere(tmp_path, architecture):
    make_tiny_model(architecture, tmp_path / "base", hidden_size=32, max_length=128)
    answers = dict(zip(QUESTIONS, ["您好！", "hi there", "4"], strict=True))
    data = write(
        tmp_path / "sft.jsonl",
        [
            {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
            for q, a in answers.items()
        ],
    )
    settings = {"eval_fraction": 0.0, "batch_size": 3, "max_steps": 25, "learning_rate": 1e-2, "dtype": "float32"}
    train_sft(SFTConfig(model=str(tmp_path / "base"), data=data, output=tmp_path / "run", sample_every=0, **settings))
    final = str(tmp_path / "run" / "final")
    theirs = run(GENERATE, final, json.dumps(QUESTIONS))
    tokenizer = load_tokenizer(final)
    renderer = Renderer(tokenizer)
    policy = freeze(load_policy(final, device=CPU, compute_dtype=torch.float32))
    rollouts = sample(
        policy,
        [renderer.prompt_ids((Message("user", q),)) for q in QUESTIONS],
        SamplingOptions(max_new_tokens=24, temperature=0.0),
        stop_ids=stop_ids(renderer, policy.lm.generation_config.eos_token_id),
        pad_id=renderer.pad_id,
        generator=torch.Generator(),
    )
    assert [rollouts.response_ids(row, with_stop=True) for row in range(len(QUESTIONS))] == theirs


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "deberta-v2"])
def test_a_reward_model_gives_the_same_scores_elsewhere(tmp_path, architecture):
    make_tiny_model(architecture, tmp_path / "base", hidden_size=32, max_length=128)
    pairs = [("你好", "您好！", "滚"), ("hello", "hi there, friend", "go"), ("2+2?", "4", "five, I think")]
    data = write(
        tmp_path / "pairs.jsonl",
        [
            {
                "prompt": [{"role": "user", "content": q}],
                "chosen": [{"role": "assistant", "content": good}],
                "rejected": [{"role": "assistant", "content": bad}],
            }
            for q, good, bad in pairs
        ],
    )
    settings = {"eval_fraction": 0.0, "batch_size": 3, "max_steps": 30, "learning_rate": 5e-3, "dtype": "float32"}
    train_reward(
        RewardConfig(model=str(tmp_path / "base"), data=data, output=tmp_path / "run", sample_every=0, **settings)
    )
    final = str(tmp_path / "run" / "final")
    asked = [(q, answer) for q, *answers in pairs for answer in answers]
    theirs = run(SCORE, final, json.dumps(asked))
    tokenizer = load_tokenizer(final)
    model = load_reward_model(final, tokenizer, device=CPU, compute_dtype=torch.float32).eval()
    inputs = RewardInputs(tokenizer)
    with torch.no_grad():
        ours = model([inputs.encode((Message("user", q),), a) for q, a in asked])
    torch.testing.assert_close(ours, torch.tensor(theirs), rtol=1e-5, atol=1e-5)
    assert float(ours.std()) > 0.1
