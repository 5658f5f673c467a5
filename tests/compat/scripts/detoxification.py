"""Shape of the detoxification script: a bfloat16 model in memory, shared layers, its own Adam, one query at a time."""

import sys

import torch
from datasets import Dataset
from torch.optim import Adam
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model, set_seed
from trl.core import LengthSampler

_, model_name, judge_name, output = sys.argv
config = PPOConfig(model_name=model_name, learning_rate=3e-5, ppo_epochs=3, mini_batch_size=2, batch_size=4)
tokenizer = AutoTokenizer.from_pretrained(model_name)
tokenizer.pad_token = tokenizer.eos_token
prompts = ["你真是太", "我讨厌这个", "You people are so", "走开，不然我就", "真没想到你这么", "As always, he was"]
rows = {"query": prompts, "input_ids": [tokenizer.encode(prompt) for prompt in prompts]}
dataset = Dataset.from_dict(rows)
dataset.set_format(type="torch")


def collate(data):
    return {key: [one[key] for one in data] for key in data[0]}


set_seed(config.seed)
model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.bfloat16)
model = AutoModelForCausalLMWithValueHead.from_pretrained(model)
ref_model = create_reference_model(model, num_shared_layers=1)
optimizer = Adam(filter(lambda weight: weight.requires_grad, model.parameters()), lr=config.learning_rate)
trainer = PPOTrainer(
    config,
    model,
    ref_model=ref_model,
    tokenizer=tokenizer,
    dataset=dataset,
    data_collator=collate,
    optimizer=optimizer,
)
judge_tokenizer = AutoTokenizer.from_pretrained(judge_name)
judge = AutoModelForSequenceClassification.from_pretrained(judge_name).to(trainer.accelerator.device)
sampling = {"min_length": -1, "top_k": 0.0, "top_p": 1.0, "do_sample": True, "pad_token_id": tokenizer.eos_token_id}
length = LengthSampler(4, 8)
all_stats = []
for epoch, batch in enumerate(trainer.dataloader):
    queries, responses = batch["input_ids"], []
    for query in queries:
        sampling["max_new_tokens"] = length()
        response = trainer.generate(query, **sampling)
        responses.append(response.squeeze()[len(query) :])
    batch["response"] = [tokenizer.decode(response) for response in responses]
    inputs = judge_tokenizer(batch["response"], padding=True, truncation=True, return_tensors="pt")
    logits = judge(**inputs.to(trainer.accelerator.device)).logits.float()
    scores = [torch.tensor(score) for score in logits[:, 0].tolist()]
    all_stats.append(trainer.step(queries, responses, scores))
    trainer.log_stats(all_stats[-1], batch, scores)
    if epoch % 100 == 0 and trainer.accelerator.is_main_process:
        trainer.save_pretrained(output)
