"""Shape of StackLLaMA's RL script: LoRA, Adafactor, accumulated gradients, early stopping, saving every few batches."""

import sys

import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig
from transformers import Adafactor, AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, set_seed
from trl.core import LengthSampler

_, model_name, output = sys.argv
config = PPOConfig(
    steps=8,
    model_name=model_name,
    learning_rate=1.4e-3,
    batch_size=4,
    mini_batch_size=1,
    gradient_accumulation_steps=2,
    optimize_cuda_cache=True,
    early_stopping=True,
    target_kl=0.1,
    ppo_epochs=2,
    seed=1,
    init_kl_coef=0.2,
    adap_kl_ctrl=True,
)
tokenizer = AutoTokenizer.from_pretrained(model_name)
questions = ["怎样安装这个软件？", "How do I sort a list?", "什么是递归？", "Why is my loop so slow?"] * 3
queries = [f"Question: {question}\n\nAnswer: " for question in questions]
dataset = Dataset.from_dict({"query": queries, "input_ids": [tokenizer(query)["input_ids"] for query in queries]})
dataset.set_format(type="torch")


def collate(data):
    return dict((key, [one[key] for one in data]) for key in data[0])  # noqa: C402  as such scripts have it


set_seed(config.seed)
current_device = Accelerator().local_process_index
lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM")
device_map = {"": current_device if torch.cuda.is_available() else "cpu"}
model = AutoModelForCausalLMWithValueHead.from_pretrained(model_name, device_map=device_map, peft_config=lora)
optimizer = Adafactor(
    filter(lambda weight: weight.requires_grad, model.parameters()),
    scale_parameter=False,
    relative_step=False,
    warmup_init=False,
    lr=config.learning_rate,
)
trainer = PPOTrainer(
    config, model, ref_model=None, tokenizer=tokenizer, dataset=dataset, data_collator=collate, optimizer=optimizer
)
sampling = {
    "top_k": 0.0,
    "top_p": 1.0,
    "do_sample": True,
    "pad_token_id": tokenizer.pad_token_id,
    "eos_token_id": 100_000,
}
length = LengthSampler(4, 8)
all_stats = []
for epoch, batch in enumerate(trainer.dataloader):
    if epoch >= config.total_ppo_epochs:
        break
    questions = batch["input_ids"]
    responses = trainer.generate(questions, return_prompt=False, length_sampler=length, **sampling)
    batch["response"] = tokenizer.batch_decode(responses, skip_special_tokens=True)
    scores = [torch.tensor(float(len(response)) - 1.0) for response in batch["response"]]
    stats = trainer.step(questions, responses, scores)
    trainer.log_stats(stats, batch, scores)
    all_stats.append(stats)
    if epoch and epoch % 1 == 0:
        trainer.save_pretrained(output + f"step_{epoch}")
