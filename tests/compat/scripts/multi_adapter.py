"""Shape of the multi-adapter script: one base model with the policy's adapter and the reward model's."""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from trl.import_utils import is_npu_available, is_xpu_available

_, model_name, reward_adapter = sys.argv
assert not is_npu_available()
assert not is_xpu_available()
lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM")
model = AutoModelForCausalLMWithValueHead.from_pretrained(
    model_name, peft_config=lora, reward_adapter=reward_adapter, use_safetensors=True
)
tokenizer = AutoTokenizer.from_pretrained(model_name)
tokenizer.pad_token = tokenizer.eos_token
chosen = ["Human: 你好\n\nAssistant:", "Human: What is rain?\n\nAssistant:"] * 4
dataset = Dataset.from_dict({"query": chosen, "input_ids": [tokenizer.encode(text) for text in chosen]})
dataset.set_format("torch")
config = PPOConfig(
    model_name=model_name, learning_rate=1e-3, batch_size=4, mini_batch_size=2, gradient_accumulation_steps=2, seed=0
)
trainer = PPOTrainer(
    config,
    model,
    ref_model=None,
    tokenizer=tokenizer,
    dataset=dataset,
    data_collator=lambda data: {key: [one[key] for one in data] for key in data[0]},
)
sampling = {"top_k": 0.0, "top_p": 0.9, "do_sample": True, "pad_token_id": tokenizer.pad_token_id, "max_new_tokens": 5}
all_stats = []
for batch in trainer.dataloader:
    questions = batch["input_ids"]
    responses = trainer.generate(questions, return_prompt=False, **sampling)
    batch["response"] = tokenizer.batch_decode(responses, skip_special_tokens=True)
    texts = [q + r for q, r in zip(batch["query"], batch["response"], strict=True)]
    inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(trainer.accelerator.device)
    raw = trainer.accelerator.unwrap_model(trainer.model).compute_reward_score(**inputs)
    scores = [raw[i, -1, 1] for i in range(len(raw))]
    stats = trainer.step(questions, responses, scores)
    trainer.log_stats(stats, batch, scores)
    all_stats.append(stats)
assert isinstance(scores[0], torch.Tensor)
