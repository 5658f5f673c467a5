"""Good and bad responses with TRL, as people write it: KTO without accumulation, whose KL is that of the whole step."""

import argparse

from datasets import load_dataset
from trl import KTOConfig, KTOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--output", default="out")
args = parser.parse_args()

config = KTOConfig(
    args.output, per_device_train_batch_size=16, max_steps=3, learning_rate=1e-3, bf16=False, use_cpu=True,
    save_strategy="no", report_to="none", lr_scheduler_type="constant", desirable_weight=1.5,
)  # fmt: skip
data = load_dataset("json", data_files=args.data)
trainer = KTOTrainer(args.model, args=config, train_dataset=data["train"])
trainer.train()
trainer.save_model(args.output)
