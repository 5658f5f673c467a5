"""Shape of the summarisation scripts: the script's own loader, a schedule, scaled and clipped scores, TensorBoard."""

import sys

import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

_, model_name, logs = sys.argv
tokenizer = AutoTokenizer.from_pretrained(model_name, padding_side="left")
posts = ["POST: 昨天我们去爬山，路上下雨了。\nTL;DR:", "POST: My cat hides whenever guests come.\nTL;DR:"] * 4
config = PPOConfig(
    batch_size=4,
    forward_batch_size=2,
    ppo_epochs=2,
    log_with="tensorboard",
    project_kwargs={"logging_dir": logs},
    adap_kl_ctrl=False,
    init_kl_coef=0.1,
    use_score_scaling=True,
    use_score_norm=True,
    score_clip=0.5,
    optimize_cuda_cache=True,
)
model = AutoModelForCausalLMWithValueHead.from_pretrained(model_name)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
trainer = PPOTrainer(config=config, model=model, tokenizer=tokenizer, optimizer=optimizer, lr_scheduler=schedule)
loader = trainer.accelerator.prepare(DataLoader(posts, batch_size=4))
all_stats = []
for texts in loader:
    queries = [tokenizer(text, return_tensors="pt")["input_ids"][0].to(trainer.current_device) for text in texts]
    responses = trainer.generate(queries, batch_size=2, return_prompt=False, max_new_tokens=5, do_sample=True, top_k=0)
    summaries = tokenizer.batch_decode(responses, skip_special_tokens=True)
    scores = [torch.tensor(-1.0 * len(summary)) for summary in summaries]
    stats = trainer.step(queries, responses, scores)
    trainer.log_stats(stats, {"query": texts, "response": summaries}, scores)
    all_stats.append(stats)
