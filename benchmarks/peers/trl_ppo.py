"""Peer: TRL 1.12's PPOTrainer, of the last release that has one, on the workload of workload.py.

PYTHON-WITH-TRL-1.12 benchmarks/peers/trl_ppo.py --workload runs/workload [--tuned] [--natural-eos] [--dtype float32]

The environment: pip install torch==2.13.0 trl==1.12.0 transformers datasets accelerate. Prints one JSON object.

Without --tuned it is as it comes (float32, whatever its bf16 option says). --tuned sets what its documentation offers:
bf16 in the training forward, the fast float32 product of oneDNN, one batch for generation and scoring; with --dtype float32
only the last. Either way one
optimizer step a PPO epoch, as num_mini_batches does not change their number, no gradient clipping (it has none), and a critic
of its own.
"""

import os
import sys
import tempfile
import time
import warnings

from measurement import iteration_arguments, iteration_report, peak_memory, policy_folder, print_report

parser = iteration_arguments(__doc__)
parser.add_argument("--ppo-epochs", type=int, default=4)
parser.add_argument("--kl-coef", type=float, default=0.05)
parser.add_argument("--tuned", action="store_true")
options = parser.parse_args()
os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
is_half = options.tuned and options.dtype != "float32"
if is_half:
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
warnings.filterwarnings("ignore")

import json  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import trl.experimental.ppo.ppo_trainer as ppo_module  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer  # noqa: E402

import_memory = peak_memory()
torch.set_num_threads(options.threads)
torch.manual_seed(options.seed)
if is_half:
    torch.set_float32_matmul_precision("medium")
on_gpu = torch.cuda.is_available()
folder = policy_folder(options)
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
policy, reference = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
value, reward = (
    AutoModelForSequenceClassification.from_pretrained(f"{options.workload}/{name}", num_labels=1, dtype=torch.float32)
    for name in ("value", "reward")
)
prompts = json.loads(Path(options.workload, "prompts.json").read_text(encoding="utf-8"))
if len(prompts) < options.batch * (options.iterations + 2):  # on a dataset's last batch it steps once a micro-batch
    sys.exit(f"this run needs {options.batch * (options.iterations + 2)} prompts, the workload has {len(prompts)}")
scratch = tempfile.TemporaryDirectory()
config = PPOConfig(
    output_dir=scratch.name,
    report_to="none",
    save_strategy="no",
    logging_steps=1,
    disable_tqdm=True,
    per_device_train_batch_size=options.micro_batch,
    gradient_accumulation_steps=options.batch // options.micro_batch,
    num_mini_batches=1,
    num_ppo_epochs=options.ppo_epochs,
    total_episodes=options.batch * options.iterations,
    response_length=options.response_length,
    stop_token="eos" if options.natural_eos else None,
    local_rollout_forward_batch_size=options.batch if options.tuned else 64,
    learning_rate=options.learning_rate,
    temperature=1.0,
    kl_coef=options.kl_coef,
    num_sample_generations=0,
    missing_eos_penalty=None,
    whiten_rewards=False,
    use_cpu=not on_gpu,
    seed=options.seed,
    bf16=False,  # these two have no effect in this version
    gradient_checkpointing=False,
)
trainer = PPOTrainer(
    args=config,
    processing_class=tokenizer,
    model=policy,
    ref_model=reference,
    reward_model=reward,
    value_model=value,
    train_dataset=Dataset.from_dict({"input_ids": prompts}),
    eval_dataset=Dataset.from_dict({"input_ids": prompts[:8]}),
)

generated, scored, marks = [], [], []
rollout_seconds, lengths = [], []
plain_generation, plain_whiten = ppo_module.batch_generation, ppo_module.masked_whiten


def timed_generation(*arguments, **named):
    started = time.perf_counter()
    query_responses, logits = plain_generation(*arguments, **named)
    generated.append(time.perf_counter())
    rollout_seconds.append(generated[-1] - started)
    response = query_responses[:, -options.response_length :]
    ended = (response == tokenizer.eos_token_id).cumsum(1) if options.natural_eos else torch.zeros_like(response)
    lengths.append(((ended == 0).sum(1) + (ended[:, -1] > 0)).float().mean().item())
    return query_responses, logits


def marked_whiten(*arguments, **named):  # once an iteration: the last thing before the update
    whitened = plain_whiten(*arguments, **named)
    scored.append(time.perf_counter())
    return whitened


ppo_module.batch_generation, ppo_module.masked_whiten = timed_generation, marked_whiten
trainer.log = lambda *_, **__: marks.append(time.perf_counter())
started = time.perf_counter()
trainer.train()
print_report(
    iteration_report(
        options,
        side=f"trl 1.12 ppo {'tuned' if options.tuned else 'stock'}",
        seconds=[end - start for start, end in zip([started, *marks], marks, strict=False)],
        phases={
            "rollout": rollout_seconds,
            "score": [end - start for start, end in zip(generated, scored, strict=True)],
            "update": [end - start for start, end in zip(scored, marks, strict=True)],
        },
        lengths=lengths,
        import_memory=import_memory,
        device_memory=torch.cuda.max_memory_allocated() if on_gpu else None,
    )
)
