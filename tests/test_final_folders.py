"""What heedful writes, other tools load: plain transformers in a process of its own gives the same text and scores."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from heedful import Message, PPOConfig, RewardConfig, SFTConfig, make_tiny_model, train_ppo, train_reward, train_sft
from heedful.configs.options import SamplingOptions
from heedful.data.chat import Renderer, RewardInputs, stop_ids
from heedful.engines.generate import generate
from heedful.models import freeze, load_policy, load_reward_model, load_tokenizer
from jsonl import write_jsonl

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
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def answers_here(folder: str) -> list[list[int]]:
    """Greedy answers to the questions by heedful's own sampler."""
    renderer = Renderer(load_tokenizer(folder))
    policy = freeze(load_policy(folder, device=CPU, compute_dtype=torch.float32))
    rollouts = generate(
        policy,
        [renderer.prompt_ids((Message("user", q),)) for q in QUESTIONS],
        SamplingOptions(max_new_tokens=24, temperature=0.0),
        stop_ids=stop_ids(renderer, policy.lm.generation_config.eos_token_id),
        pad_id=renderer.pad_id,
        generator=torch.Generator(),
    )
    return rollouts.own_ids()


def fine_tuned(tmp_path: Path, architecture: str) -> str:
    """A tiny model that learned three answers, from a base that does not know its template's end of turn as a stop."""
    make_tiny_model(architecture, tmp_path / "base", hidden_size=32, max_length=128)
    generation = tmp_path / "base" / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text("utf-8")) | {"eos_token_id": 1}), encoding="utf-8")
    answers = dict(zip(QUESTIONS, ["您好！", "hi there", "4"], strict=True))
    data = write_jsonl(
        tmp_path / "sft.jsonl",
        [
            {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
            for q, a in answers.items()
        ],
    )
    settings = {"eval_fraction": 0.0, "batch_size": 3, "max_steps": 25, "learning_rate": 1e-2, "dtype": "float32"}
    train_sft(SFTConfig(model=str(tmp_path / "base"), data=data, output=tmp_path / "run", sample_every=0, **settings))
    return str(tmp_path / "run" / "final")


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ["gpt2", "qwen3"])
def test_a_policy_generates_the_same_greedy_text_elsewhere(tmp_path, architecture):
    """And stops where it stops here, at the template's end of turn."""
    final = fine_tuned(tmp_path, architecture)
    theirs = run(GENERATE, final, json.dumps(QUESTIONS))
    assert answers_here(final) == theirs
    assert all(len(answer) < 24 for answer in theirs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("critic", ["shared", pytest.param("separate", marks=pytest.mark.exhaustive)])
def test_a_policy_after_ppo_generates_the_same_greedy_text_elsewhere(tmp_path, critic):
    """With the critic in a folder of its own, which nobody else takes for weights of the language model."""
    start = fine_tuned(tmp_path, "qwen3")
    data = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": [{"role": "user", "content": q}]} for q in QUESTIONS])
    settings = {"eval_fraction": 0.0, "rollout_batch_size": 6, "samples_per_prompt": 2, "minibatch_size": 6, "steps": 2}
    config = PPOConfig(
        model=start,
        data=data,
        output=tmp_path / "ppo",
        critic=critic,
        max_new_tokens=12,
        learning_rate=1e-3,
        dtype="float32",
        **settings,
    )
    train_ppo(config, rewards=[lambda completion_ids: [float(len(ids)) for ids in completion_ids]])
    final = str(tmp_path / "ppo" / "final")
    assert [path.name for path in Path(final).glob("*.safetensors")] == ["model.safetensors"]
    weights = [(Path(folder) / "model.safetensors").read_bytes() for folder in (start, final)]
    assert weights[0] != weights[1], "PPO changed nothing, so this would prove nothing"
    assert answers_here(final) == run(GENERATE, final, json.dumps(QUESTIONS))


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "deberta-v2"])
def test_a_reward_model_gives_the_same_scores_elsewhere(tmp_path, architecture):
    make_tiny_model(architecture, tmp_path / "base", hidden_size=32, max_length=128)
    pairs = [("你好", "您好！", "滚"), ("hello", "hi there, friend", "go"), ("2+2?", "4", "five, I think")]
    data = write_jsonl(
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
