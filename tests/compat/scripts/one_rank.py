"""One process of several: its own rows, three steps. Writes its stats and the checksum of the weights."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from transformers import AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

_, model_name, output = sys.argv
rank = PartialState(cpu=True).process_index
model = AutoModelForCausalLMWithValueHead.from_pretrained(model_name)
tokenizer = AutoTokenizer.from_pretrained(model_name)
config = PPOConfig(batch_size=4, mini_batch_size=2, ppo_epochs=2, learning_rate=1e-3, use_score_scaling=True)
trainer = PPOTrainer(config, model, tokenizer=tokenizer)
draw = np.random.RandomState(rank)
all_stats = []
for _ in range(3):
    queries = [torch.tensor(draw.randint(10, 250, 3 + rank)) for _ in range(4)]
    responses = trainer.generate(queries, return_prompt=False, do_sample=True, max_new_tokens=4 + rank)
    scores = [torch.tensor(float(score)) for score in draw.randn(4)]
    all_stats.append(trainer.step(queries, responses, scores))
numbers = [
    {name: value for name, value in stats.items() if isinstance(value, float) and name.startswith(("objective", "ppo"))}
    for stats in all_stats
]
weights = float(sum(weight.double().abs().sum() for weight in model.parameters()))
found = {"stats": numbers, "weights": weights, "seen": trainer.running.count, "scale": trainer.running.std}
Path(output, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
torch.distributed.destroy_process_group()
