"""heedful's trainers beside TRL's, step by step: the same model, records, optimizer and learning rates give the same numbers.

python benchmarks/parity.py --trl-python PYTHON --output runs/parity [--only "DPO"] [--page docs/results/parity.md]

PYTHON is that of an environment with TRL: pip install torch==2.13.0 trl==1.16.0 transformers datasets accelerate. For each
case heedful's own command trains a small random model (Qwen3's shape, from `heedful tiny`) for six steps, in micro-batches of
three; then benchmarks/peers/trl_parity.py has TRL train the same model on the same records in the same order, with the same
AdamW and learning rates, in one batch. Online, TRL is given the completions and rewards of heedful's run in place of what it
would sample: from the first step on they are right only if all weights are the same. Both are in float32, with one thread.

Compares the loss and the gradient norm of each step, and the weights at the end. A loss that is 0 in exact arithmetic is
compared as if it were 0.01. The last cases are those in which the two differ on purpose: they show that the comparison sees
it. Exits with 1 if a case is outside the tolerance, or one of the last inside it, or if TRL did not run it.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

import heedful
from heedful.algorithms import kto
from heedful.data.splits import BatchOrder
from heedful.files import write_text

HERE = Path(__file__).parent
STEPS, WARMUP, BATCH, GROUP, NEW_TOKENS, EPS = 6, 2, 8, 4, 12, 1e-5
TOLERANCE = 1e-4
"""Largest relative difference of a loss or a gradient norm, and of the weights beside how far they moved."""
SMALLEST_LOSS = 0.01
COMMON = {
    "learning_rate": 1e-3,
    "warmup_steps": WARMUP,
    "lr_schedule": "linear",
    "adam_eps": EPS,
    "max_grad_norm": 1.0,
    "dtype": "float32",
    "device": "cpu",
    "eval_fraction": 0.0,
    "sample_every": 0,
    "save_every": 0,
}
OFFLINE = COMMON | {"max_steps": STEPS, "batch_size": BATCH, "micro_batch_size": 3}
ONLINE = COMMON | {
    "steps": STEPS,
    "rollout_batch_size": BATCH,
    "minibatch_size": BATCH,
    "micro_batch_size": 3,
    "max_new_tokens": NEW_TOKENS,
    "samples_per_prompt": GROUP,
    "rollouts": "all",
    "kl_coef": 0.0,
}
COMMANDS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "sft": (heedful.SFTConfig, heedful.train_sft),
    "reward": (heedful.RewardConfig, heedful.train_reward),
    "dpo": (heedful.DPOConfig, heedful.train_dpo),
    "kto": (heedful.KTOConfig, heedful.train_kto),
    "grpo": (heedful.GRPOConfig, heedful.train_grpo),
}
LOSSES = {
    "sft": ["loss/sft"],
    "reward": ["loss/reward"],
    "dpo": ["loss/dpo"],
    "kto": ["loss/kto"],
    "grpo": ["loss/policy", "loss/kl"],
}
Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One comparison."""

    name: str
    command: str
    """heedful's."""
    trainer: str
    """TRL's."""
    ours: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)
    data: str = "pairs"
    note: str = ""
    """What is handed to TRL because the definitions differ, or in what they do."""
    differs: bool = False
    """The two define it differently, and nothing makes up for it: the numbers must not agree."""

    @property
    def id(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in self.name.lower())

    @property
    def epochs(self) -> int:
        """Optimizer steps per rollout batch."""
        return int(self.ours.get("ppo_epochs", 1))


TWICE, TWO = {"ppo_epochs": 2, "clip_range": 0.02}, {"num_iterations": 2, "epsilon": 0.02}
PER_TOKEN = {"importance_sampling_level": "token", "beta": 0.0}
CASES = (
    Case("SFT, plain text", "sft", "SFT", data="texts"),
    Case("SFT, prompt and completion", "sft", "SFT", data="strings"),
    Case("SFT, messages", "sft", "SFT", data="messages"),
    Case("Reward model", "reward", "Reward"),
    Case("Reward model, centred", "reward", "Reward", {"center_coef": 0.01}, {"center_rewards_coefficient": 0.01}),
    Case("DPO", "dpo", "DPO", {"beta": 0.1}, {"loss_type": ["sigmoid"], "beta": 0.1}),
    Case("DPO, messages", "dpo", "DPO", {"beta": 0.1}, {"loss_type": ["sigmoid"], "beta": 0.1}, "chats"),
    Case(
        "DPO, conservative",
        "dpo",
        "DPO",
        {"beta": 0.1, "label_smoothing": 0.2, "batch_size": 1},
        {"loss_type": ["aot"], "beta": 0.1, "label_smoothing": 0.2},
        note="TRL's `sigmoid` ignores `label_smoothing`; its `aot` on one pair is the same formula",
    ),
    Case(
        "DPO, robust",
        "dpo",
        "DPO",
        {"loss": "robust", "beta": 0.1, "label_smoothing": 0.2},
        {"loss_type": ["robust"], "beta": 0.1, "label_smoothing": 0.2},
    ),
    Case("DPO, hinge", "dpo", "DPO", {"loss": "hinge", "beta": 0.1}, {"loss_type": ["hinge"], "beta": 0.1}),
    Case("IPO", "dpo", "DPO", {"loss": "ipo", "beta": 0.1}, {"loss_type": ["ipo"], "beta": 0.1}),
    Case("DPO, per token", "dpo", "DPO", {"length_normalise": True}, {"loss_type": ["sigmoid_norm"], "beta": 5.0}),
    Case(
        "DPO with SFT on the chosen",
        "dpo",
        "DPO",
        {"beta": 0.1, "nll_coef": 0.3},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3], "beta": 0.1},
    ),
    Case(
        "SimPO",
        "dpo",
        "CPO",
        {"loss": "simpo", "beta": 2.0, "target_margin": 0.5},
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
        note="`simpo_gamma` is `beta` times `--target-margin`",
    ),
    Case(
        "ORPO",
        "dpo",
        "ORPO",
        {"loss": "orpo", "beta": 0.1},
        {"beta": 0.1},
        "letters",
        "TRL's SFT part learns the prompt too, so prompts are of one token, which neither learns",
    ),
    Case(
        "KTO",
        "kto",
        "KTO",
        {"beta": 0.1},
        {"beta": 0.1},
        "labelled",
        "TRL takes the neighbour's response for the KL; it is given the other responses that heedful drew",
    ),
    Case("GRPO", "grpo", "GRPO", {}, PER_TOKEN | {"loss_type": "grpo"}, "prompts"),
    Case("GRPO, two updates", "grpo", "GRPO", TWICE, PER_TOKEN | TWO | {"loss_type": "grpo"}, "prompts"),
    Case(
        "GRPO, two updates, k3",
        "grpo",
        "GRPO",
        TWICE | {"kl_coef": 0.5},
        PER_TOKEN | TWO | {"loss_type": "grpo", "beta": 0.5, "use_bias_correction_kl": False},
        "prompts",
    ),
    Case(
        "GRPO, two updates, weighted-k3",
        "grpo",
        "GRPO",
        TWICE | {"kl_coef": 0.5, "kl_kind": "weighted-k3"},
        PER_TOKEN | TWO | {"loss_type": "grpo", "beta": 0.5},
        "prompts",
    ),
    Case(
        "Dr. GRPO, two updates",
        "grpo",
        "GRPO",
        TWICE | {"advantage": "dr_grpo", "loss_reduction": "fixed"},
        PER_TOKEN | TWO | {"loss_type": "dr_grpo", "scale_rewards": "none"},
        "prompts",
    ),
    Case(
        "DAPO's loss, two updates",
        "grpo",
        "GRPO",
        TWICE | {"loss_reduction": "token", "clip_range_high": 0.03},
        PER_TOKEN | TWO | {"loss_type": "dapo", "epsilon_high": 0.03},
        "prompts",
    ),
    Case(
        "BNPO, two updates",
        "grpo",
        "GRPO",
        TWICE | {"loss_reduction": "token"},
        PER_TOKEN | TWO | {"loss_type": "bnpo"},
        "prompts",
        "TRL's `bnpo` is a mean over tokens per micro-batch, `--loss-reduction token` over the whole step; TRL has one",
    ),
    Case(
        "CISPO, two updates",
        "grpo",
        "GRPO",
        {
            "ppo_epochs": 2,
            "policy_loss": "cispo",
            "loss_reduction": "token",
            "clip_range": 1.0,
            "clip_range_high": 0.02,
        },
        PER_TOKEN | {"num_iterations": 2, "loss_type": "cispo", "epsilon_high": 1.02},
        "prompts",
        "TRL's `epsilon_high` is the bound itself, and there is no lower one",
    ),
    Case(
        "GSPO, two updates",
        "grpo",
        "GRPO",
        {"ppo_epochs": 2, "importance_level": "sequence-mean", "clip_range": 3e-3, "clip_range_high": 4e-3},
        {
            "num_iterations": 2,
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-3,
            "epsilon_high": 4e-3,
            "beta": 0.0,
        },
        "prompts",
    ),
    Case(
        "RLOO, two updates, KL in the reward",
        "grpo",
        "RLOO",
        {"ppo_epochs": 2, "advantage": "rloo", "importance_level": "sequence", "kl_in": "reward", "kl_coef": 0.05},
        {"num_iterations": 2, "beta": 0.05, "epsilon": 0.2},
        "prompts",
    ),
    Case(
        "IPO per response",
        "dpo",
        "DPO",
        {"loss": "ipo-sum", "beta": 0.1},
        {"loss_type": ["ipo"], "beta": 0.1},
        note="the sum of the paper beside TRL's mean over tokens",
        differs=True,
    ),
    Case(
        "DPO, conservative, by TRL's `sigmoid`",
        "dpo",
        "DPO",
        {"beta": 0.1, "label_smoothing": 0.2},
        {"loss_type": ["sigmoid"], "beta": 0.1, "label_smoothing": 0.2},
        note="TRL ignores `label_smoothing` here",
        differs=True,
    ),
    Case(
        "ORPO, prompts of several tokens",
        "dpo",
        "ORPO",
        {"loss": "orpo", "beta": 0.1},
        {"beta": 0.1},
        note="TRL's SFT part learns the prompt too",
        differs=True,
    ),
    Case(
        "KTO, TRL's other responses",
        "kto",
        "KTO",
        {"beta": 0.1},
        {"beta": 0.1},
        "labelled",
        "TRL takes the response of the neighbour in the batch, heedful one that it drew from all records",
        differs=True,
    ),
    Case(
        "GRPO, two updates, k3 beside TRL's default",
        "grpo",
        "GRPO",
        TWICE | {"kl_coef": 0.5},
        PER_TOKEN | TWO | {"loss_type": "grpo", "beta": 0.5},
        "prompts",
        "TRL's `use_bias_correction_kl` is on by default: `--kl-kind weighted-k3`",
        differs=True,
    ),
)


def records(kind: str) -> tuple[Records, Records]:
    """Sixteen records as heedful reads them, and the same for TRL."""
    rows: list[tuple[str, str, str]] = []
    for i in range(16):
        chosen, rejected = f"答案是{i * 3}，{'很好' * (i % 3 + 1)}。", f"no{' no' * (i % 5)} {i}"
        rows.append((f"第{i}题：{i} + {2 * i} = ？", *((chosen, rejected) if i % 3 else (rejected, chosen))))
    user = [[{"role": "user", "content": prompt}] for prompt, _, _ in rows]
    said = [[[{"role": "assistant", "content": text}] for text in (a, b)] for _, a, b in rows]
    if kind == "texts":
        same = [{"text": f"{prompt} {a}"} for prompt, a, _ in rows]
    elif kind == "strings":
        same = [{"prompt": prompt, "completion": a} for prompt, a, _ in rows]
    elif kind == "labelled":
        same = [{"prompt": p, "completion": (a, b)[i % 2], "label": i % 2 == 0} for i, (p, a, b) in enumerate(rows)]
    elif kind == "prompts":
        same = [{"prompt": prompt} for prompt, _, _ in rows]
    elif kind == "letters":
        same = [{"prompt": "abcdefghijklmnop"[i], "chosen": a, "rejected": b} for i, (_, a, b) in enumerate(rows)]
    elif kind == "messages":
        ours = [{"messages": u + a} for u, (a, _) in zip(user, said, strict=True)]
        return ours, [{"prompt": u, "completion": a} for u, (a, _) in zip(user, said, strict=True)]
    elif kind == "chats":
        same = [{"prompt": u, "chosen": a, "rejected": b} for u, (a, b) in zip(user, said, strict=True)]
    else:
        same = [{"prompt": prompt, "chosen": a, "rejected": b} for prompt, a, b in rows]
    return same, same


def make_models(folder: Path) -> None:
    """The policy that every case starts from, and the reward model."""
    heedful.make_tiny_model("qwen3", folder / "policy", hidden_size=32, num_layers=2, initializer_range=0.05)
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(folder / "policy", num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "reward")
    AutoTokenizer.from_pretrained(folder / "policy").save_pretrained(folder / "reward")


def model_of(case: Case, folder: Path) -> Path:
    return folder / ("reward" if case.command == "reward" else "policy")


def score(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward that differs from response to response."""
    return [sum(token % 7 for token in ids) / 10 for ids in completion_ids]


def train(case: Case, folder: Path) -> dict[str, Any]:
    """heedful's run: losses, gradient norms and the weights at the end, and what TRL is given (`for_peer`)."""
    ours, theirs = records(case.data)
    data = folder / f"{case.data}.jsonl"
    write_text(data, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ours))
    settings_class, run = COMMANDS[case.command]
    common = ONLINE if case.command == "grpo" else OFFLINE
    settings = settings_class(
        model=str(model_of(case, folder)), data=str(data), output=folder / "ours" / case.id, **(common | case.ours)
    )
    others = kto.start(settings)[1].train if case.command == "kto" and not case.differs else None
    run(settings, *([[score]] if case.command == "grpo" else []))
    lines = map(json.loads, (settings.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    steps = [line for line in lines if "optimizer/grad_norm" in line]
    rates = [rate(step) for step in range(STEPS) for _ in range(case.epochs)]
    peer: dict[str, Any] = {"learning_rates": rates, "rollouts": None, "other_ids": None}
    size = settings.batch_size if case.command != "grpo" else BATCH // GROUP
    batches = BatchOrder(len(ours), size, settings.seed)
    order = [row for _ in range(STEPS) for row in next(batches)]
    peer["records"] = [theirs[row] for row in order]
    if others is not None:
        peer["other_ids"] = [others[row].other.response for row in order]
    if case.command == "grpo":
        tables = [pq.read_table(settings.output / "rollouts" / f"step-{step + 1:06d}.parquet") for step in range(STEPS)]
        peer["rollouts"] = [
            {"completion_ids": table["response_ids"].to_pylist(), "scores": table["score"].to_pylist()}
            for table in tables
        ]
        peer["records"] = [{"prompt": text} for table in tables for text in table["prompt"].to_pylist()[::GROUP]]
    sizes = (
        {"max_length": None}
        if case.command != "grpo"
        else {"max_completion_length": NEW_TOKENS, "shuffle_dataset": False}
    )
    sizes |= {"num_generations": GROUP, "temperature": 1.0} if case.command == "grpo" else {}
    sizes |= {"per_device_train_batch_size": size if case.command != "grpo" else BATCH}
    return {
        "losses": [sum(step.get(name, 0.0) for name in LOSSES[case.command]) for step in steps],
        "norms": [step["optimizer/grad_norm"] for step in steps],
        "weights": load_file(settings.output / "final" / "model.safetensors"),
        "for_peer": {
            "id": case.id,
            "trainer": case.trainer,
            "model": str(model_of(case, folder)),
            "eps": EPS,
            "settings": sizes | case.theirs,
            **peer,
        },
    }


def rate(step: int) -> float:
    """The learning rate of a step, from 0."""
    peak = float(COMMON["learning_rate"])
    return peak * ((step + 1) / (WARMUP + 1) if step < WARMUP else 1 - (step - WARMUP) / (STEPS - WARMUP))


@dataclass(frozen=True)
class Row:
    """What came out of one case."""

    case: Case
    loss: float
    """Largest relative difference of a step's loss."""
    norm: float
    """The same of a step's gradient norm."""
    weights: float
    """Largest difference of a weight at the end."""
    moved: float
    """How far the weight that moved most did move."""
    error: str = ""
    """Why TRL did not run it."""

    @property
    def is_as_expected(self) -> bool:
        if self.error:
            return False
        return (max(self.loss, self.norm, self.weights / self.moved) <= TOLERANCE) is not self.case.differs


def compare(case: Case, ours: dict[str, Any], theirs: dict[str, Any], start: dict[str, torch.Tensor]) -> Row:
    """A row from heedful's run, TRL's (with its weights), and the weights that both started from."""
    if "error" in theirs:
        return Row(case, *[float("nan")] * 4, error=theirs["error"])
    losses, norms = (per_batch(theirs[name], case.epochs) for name in ("losses", "norms"))
    assert len(losses) == len(norms) == len(ours["losses"]), (case.name, len(losses), len(norms), len(ours["losses"]))
    scale = max(SMALLEST_LOSS, *map(abs, losses))
    names = ours["weights"].keys() & theirs["weights"].keys()
    assert names == start.keys() & ours["weights"].keys(), sorted(start.keys() ^ names)
    return Row(
        case,
        loss=max(abs(a - b) for a, b in zip(ours["losses"], losses, strict=True)) / scale,
        norm=max(abs(a - b) / b for a, b in zip(ours["norms"], norms, strict=True)),
        weights=max(float((ours["weights"][name] - theirs["weights"][name]).abs().max()) for name in names),
        moved=max(float((theirs["weights"][name] - start[name]).abs().max()) for name in names),
    )


def per_batch(numbers: Sequence[float], epochs: int) -> list[float]:
    """Means over the updates of each rollout batch, as heedful logs them."""
    return [sum(numbers[i : i + epochs]) / epochs for i in range(0, len(numbers), epochs)]


def table(rows: Sequence[Row]) -> str:
    """The comparison as a table in Markdown."""
    lines = [
        "| case | heedful | TRL | loss | gradient norm | weights (moved by) | handed to TRL, or the difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        case = row.case
        ours = " ".join(
            [
                f"heedful {case.command}",
                *(f"--{k.replace('_', '-')}" + ("" if v is True else f" {v}") for k, v in case.ours.items()),
            ]
        )
        theirs = ", ".join([f"{case.trainer}Trainer", *(f"{k}={v}" for k, v in case.theirs.items())])
        numbers = f"{row.loss:.1e} | {row.norm:.1e} | {row.weights:.1e} ({row.moved:.1e})"
        if row.error:
            numbers = f"TRL did not run: {row.error} | | "
        mark = "" if row.is_as_expected else "**not as expected** "
        lines.append(f"| {mark}{case.name} | `{ours}` | `{theirs}` | {numbers} | {case.note} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="the Python of an environment with TRL")
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    parser.add_argument("--only", default="", help="take the cases whose names have this")
    parser.add_argument("--page", type=Path, help="a page whose table is replaced")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.output.absolute()
    (folder / "ours").mkdir(parents=True)
    make_models(folder)
    cases = [case for case in CASES if options.only in case.name]
    ours = {case.id: train(case, folder) for case in cases}
    write_text(folder / "cases.json", json.dumps([run["for_peer"] for run in ours.values()], ensure_ascii=False))
    peer = [options.trl_python, str(HERE / "peers" / "trl_parity.py"), str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(peer, check=True, env=environment | {"OMP_NUM_THREADS": "1"})
    results = json.loads((folder / "theirs.json").read_text(encoding="utf-8"))
    rows = []
    for case in cases:
        theirs = results[case.id]
        if "error" not in theirs:
            theirs["weights"] = load_file(folder / f"{case.id}.safetensors")
        rows.append(compare(case, ours[case.id], theirs, load_file(model_of(case, folder) / "model.safetensors")))
    print(json.dumps(results["versions"]))
    print(table(rows))
    write_text(folder / "table.md", table(rows))
    if options.page:
        before, _, after = options.page.read_text(encoding="utf-8").partition("| case |")
        rest = after.partition("\n\n")[2]
        write_text(options.page, before + table(rows) + ("\n" + rest if rest else ""))
    return 0 if all(row.is_as_expected for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
