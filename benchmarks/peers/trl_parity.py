"""Peer: TRL's trainers on the cases that parity.py wrote down. parity.py starts it with TRL's Python.

PYTHON-WITH-TRL benchmarks/peers/trl_parity.py FOLDER

Reads FOLDER/cases.json: for each case the trainer, its settings, the model, the records in the order in which they are
learned from, the learning rate of every step, and what replaces parts of the trainer: the completions and rewards of
rollouts, or KTO's responses to other prompts. Writes the loss and the gradient norm of each step, and the weights at the
end; or, if TRL cannot run a case, why.
"""

import json
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "CUDA_VISIBLE_DEVICES": ""}
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer  # noqa: E402
from trl.experimental.cpo import CPOConfig, CPOTrainer  # noqa: E402
from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # noqa: E402

TRAINERS = {
    "SFT": (trl.SFTConfig, trl.SFTTrainer),
    "Reward": (trl.RewardConfig, trl.RewardTrainer),
    "DPO": (trl.DPOConfig, trl.DPOTrainer),
    "KTO": (trl.KTOConfig, trl.KTOTrainer),
    "CPO": (CPOConfig, CPOTrainer),
    "ORPO": (ORPOConfig, ORPOTrainer),
    "GRPO": (trl.GRPOConfig, trl.GRPOTrainer),
    "RLOO": (trl.RLOOConfig, trl.RLOOTrainer),
}
ONLINE = ("GRPO", "RLOO")


def run(case, folder):
    """Losses and gradient norms of the optimizer steps of one case; the weights are saved beside them."""
    kind = AutoModelForSequenceClassification if case["trainer"] == "Reward" else AutoModelForCausalLM
    model = kind.from_pretrained(case["model"], dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None  # else the padding token's row gets no gradient
    tokenizer = AutoTokenizer.from_pretrained(case["model"])
    rates = case["learning_rates"]
    settings, trainer_class = TRAINERS[case["trainer"]]
    common = {
        "output_dir": tempfile.mkdtemp(),
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",
        "max_steps": len(rates),
        "max_grad_norm": 1.0,
        "seed": 0,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.999), eps=case["eps"], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[min(step, len(rates) - 1)])
    arguments = {"reward_funcs": rewards_of(case)} if case["trainer"] in ONLINE else {}
    trainer = trainer_class(
        model=model,
        args=settings(**(common | case["settings"])),
        train_dataset=Dataset.from_list(case["records"]),
        processing_class=tokenizer,
        optimizers=(optimizer, schedule),
        **arguments,
    )
    if case["trainer"] in ONLINE:
        replay(trainer, case["rollouts"])
    if case["other_ids"] is not None:  # else they are the neighbours' responses
        columns = trainer.train_dataset.remove_columns("KL_completion_ids")
        trainer.train_dataset = columns.add_column("KL_completion_ids", case["other_ids"])
    if case["trainer"] in ("CPO", "ORPO"):  # they know no sequential order
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    losses, norms = [], []
    step, clip = trainer.training_step, trainer.accelerator.clip_grad_norm_

    def training_step(*given, **named):
        losses.append(float(step(*given, **named)))
        return torch.tensor(losses[-1])

    def clip_grad_norm(*given, **named):
        norm = clip(*given, **named)
        norms.append(float(norm))
        return norm

    trainer.training_step, trainer.accelerator.clip_grad_norm_ = training_step, clip_grad_norm
    trainer.train()
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    save_file(weights, folder / f"{case['id']}.safetensors")
    return {"losses": losses, "norms": norms}


def rewards_of(case):
    """The rewards that were recorded, one rollout batch after another."""
    batches = iter(case["rollouts"])

    def recorded(*_, **__):
        return next(batches)["scores"]

    return recorded


def replay(trainer, rollouts):
    """Have a trainer take recorded completions in place of what it would sample."""
    batches = iter(rollouts)

    def generate(*_, **__):
        completions = next(batches)["completion_ids"]
        return completions if isinstance(trainer, trl.RLOOTrainer) else (completions, None)

    trainer._generate_single_turn = generate


def main(folder):
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    results = {
        "versions": {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    }
    for case in json.loads((folder / "cases.json").read_text(encoding="utf-8")):
        try:
            results[case["id"]] = run(case, folder)
        except Exception as error:
            traceback.print_exc()
            results[case["id"]] = {"error": f"{type(error).__name__}: {error}"}
        print(case["id"], results[case["id"]].get("error", "done"), flush=True)
    (folder / "theirs.json").write_text(json.dumps(results, ensure_ascii=False), encoding="utf-8")


main(Path(sys.argv[1]))
