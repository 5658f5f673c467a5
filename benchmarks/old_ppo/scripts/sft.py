"""Supervised fine-tuning with TRL, as people write it."""

import argparse

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--output", default="out")
args = parser.parse_args()

config = SFTConfig(
    output_dir=args.output,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    max_steps=3,
    learning_rate=1e-3,
    max_length=64,
    bf16=False,
    use_cpu=True,
    save_strategy="no",
    report_to="none",
    completion_only_loss=True,
)
trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(args.model),
    args=config,
    train_dataset=load_dataset("json", data_files=args.data, split="train"),
    processing_class=AutoTokenizer.from_pretrained(args.model),
)
trainer.train()
trainer.save_model(args.output)
