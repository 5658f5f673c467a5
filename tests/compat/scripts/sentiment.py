"""Shape of the sentiment scripts: flags by HfArgumentParser, a classifier's pipeline as the reward, reference responses."""

from dataclasses import dataclass, field

import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import AutoTokenizer, HfArgumentParser, pipeline
from trl import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead, PPOConfig, PPOTrainer, set_seed
from trl.core import LengthSampler


@dataclass
class Arguments:
    use_seq2seq: bool = field(default=False, metadata={"help": "an encoder-decoder"})


args, config = HfArgumentParser((Arguments, PPOConfig)).parse_args_into_dataclasses()
model_class = AutoModelForSeq2SeqLMWithValueHead if args.use_seq2seq else AutoModelForCausalLMWithValueHead
tokenizer = AutoTokenizer.from_pretrained(config.model_name)
tokenizer.pad_token = tokenizer.eos_token
length = LengthSampler(4, 9)


def shorten(row):
    row["input_ids"] = tokenizer.encode(row["review"])[: length()]
    row["query"] = tokenizer.decode(row["input_ids"])
    return row


reviews = ["这家餐厅的面条很好吃", "服务员态度很差，再也不来了", "A film that I will see again", "又长又无聊"] * 2
dataset = Dataset.from_dict({"review": reviews, "label": [1, 0, 1, 0] * 2}).map(shorten)
dataset.set_format("torch")


def collate(rows):
    return {key: [row[key] for row in rows] for key in rows[0]}


set_seed(config.seed)
model = model_class.from_pretrained(config.model_name, trust_remote_code=False, device_map=None, peft_config=None)
ref_model = model_class.from_pretrained(config.model_name, trust_remote_code=False)
trainer = PPOTrainer(config, model, ref_model, tokenizer, dataset=dataset, data_collator=collate)
device = trainer.accelerator.device
if trainer.accelerator.num_processes == 1:
    device = 0 if torch.cuda.is_available() else "cpu"
assert trainer.accelerator.state.deepspeed_plugin is None
task, name = config.reward_model.split(":")
classifier = pipeline(task, model=name, device=device)
sampling = {
    "min_length": -1,
    "top_k": 0.0,
    "top_p": 1.0,
    "do_sample": True,
    "pad_token_id": tokenizer.eos_token_id,
    "max_new_tokens": 6,
}
all_stats = []
for epoch, batch in tqdm(enumerate(trainer.dataloader)):
    if epoch >= config.total_ppo_epochs:
        break
    queries = batch["input_ids"]
    responses, ref_responses = trainer.generate(queries, return_prompt=False, generate_ref_response=True, **sampling)
    batch["response"] = tokenizer.batch_decode(responses)
    batch["ref_response"] = tokenizer.batch_decode(ref_responses)
    texts = [q + r for q, r in zip(batch["query"], batch["response"], strict=True)]
    scores = [torch.tensor(one["score"]) for one in classifier(texts, function_to_apply="none", batch_size=4)]
    batch["ref_rewards"] = scores
    all_stats.append(trainer.step(queries, responses, scores))
    trainer.log_stats(all_stats[-1], batch, scores, columns_to_log=["query", "response", "ref_response", "ref_rewards"])
