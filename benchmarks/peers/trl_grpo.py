"""Peer: TRL 1.16's GRPOTrainer on the workload of workload.py.

PYTHON-WITH-TRL-1.16 benchmarks/peers/trl_grpo.py --workload runs/workload [--tuned] [--natural-eos] [--dtype float32]

The environment: pip install torch==2.13.0 trl==1.16.0 transformers datasets accelerate. Prints one JSON object. The reward is
the share of vowels in a completion, which costs nothing.

Without --tuned it is as it comes: bf16 and gradient checkpointing. --tuned is without checkpointing, and with the fast
float32 product of oneDNN. With --dtype float32 both are in float32 throughout.
"""

import os
import tempfile
import time
import warnings

from measurement import iteration_arguments, iteration_report, peak_memory, policy_folder, print_report

parser = iteration_arguments(__doc__)
parser.add_argument("--group", type=int, default=8, help="responses to a prompt")
parser.add_argument("--tuned", action="store_true")
options = parser.parse_args()
os.environ |= {"HF_HUB_OFFLINE": "1"}
warnings.filterwarnings("ignore")

import json  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

import_memory = peak_memory()
torch.set_num_threads(options.threads)
torch.manual_seed(options.seed)
is_float32 = options.dtype == "float32"
if options.tuned and not is_float32:
    torch.set_float32_matmul_precision("medium")
on_gpu = torch.cuda.is_available()
folder = policy_folder(options)
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
weights = torch.bfloat16 if options.tuned and on_gpu and not is_float32 else torch.float32
policy = AutoModelForCausalLM.from_pretrained(folder, dtype=weights)
rows = [json.loads(line) for line in Path(options.workload, "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
lengths, marks = [], []


def vowels(completions, completion_ids=None, **_):
    lengths.append(sum(map(len, completion_ids)) / len(completion_ids))
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]


scratch = tempfile.TemporaryDirectory()
config = GRPOConfig(
    output_dir=scratch.name,
    report_to="none",
    save_strategy="no",
    logging_steps=1,
    disable_tqdm=True,
    per_device_train_batch_size=options.micro_batch,
    gradient_accumulation_steps=options.batch // options.micro_batch,
    num_generations=options.group,
    max_completion_length=options.response_length,
    max_steps=options.iterations,
    learning_rate=options.learning_rate,
    beta=0.0,
    temperature=1.0,
    use_cpu=not on_gpu,
    seed=options.seed,
    gradient_checkpointing=not options.tuned,
    bf16=False if is_float32 else None,  # None is on
    max_grad_norm=0.0,
    generation_kwargs=None if options.natural_eos else {"min_new_tokens": options.response_length},
)
trainer = GRPOTrainer(
    model=policy,
    reward_funcs=vowels,
    args=config,
    processing_class=tokenizer,
    train_dataset=Dataset.from_list(rows),
)
phases = {"rollout": [], "score": [], "update": []}
plain_log, plain_generate, plain_experience = trainer.log, trainer._generate, trainer._generate_and_score_completions


def timed_generate(*arguments, **named):
    started = time.perf_counter()
    generated = plain_generate(*arguments, **named)
    phases["rollout"].append(time.perf_counter() - started)
    return generated


def timed_experience(*arguments, **named):
    started = time.perf_counter()
    experience = plain_experience(*arguments, **named)
    phases["score"].append(time.perf_counter() - started - phases["rollout"][-1])
    return experience


def log(metrics, *arguments, **named):
    marks.append(time.perf_counter())
    return plain_log(metrics, *arguments, **named)


trainer.log, trainer._generate, trainer._generate_and_score_completions = log, timed_generate, timed_experience
started = time.perf_counter()
trainer.train()
marks = marks[: options.iterations]  # one more line tells of the whole run
seconds = [end - start for start, end in zip([started, *marks], marks, strict=False)]
phases["update"] = [
    whole - rollout - score for whole, rollout, score in zip(seconds, phases["rollout"], phases["score"], strict=True)
]
print_report(
    iteration_report(
        options,
        side=f"trl 1.16 grpo {'tuned' if options.tuned else 'stock'}",
        seconds=seconds,
        phases=phases,
        lengths=lengths,
        import_memory=import_memory,
        device_memory=torch.cuda.max_memory_allocated() if on_gpu else None,
    )
)
