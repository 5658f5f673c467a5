"""docs/memory.md and docs/results/several-devices.md hold what the planner says. `python tests/planning/test_pages.py`
writes the tables of docs/memory.md again, `python docs/scale.py` those of docs/results/several-devices.md."""

import functools
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from heedful import DPOConfig, GRPOConfig, PPOConfig, SFTConfig
from heedful.configs.plan import plan_settings
from heedful.planning.memory import GB, Lengths, plan_of
from heedful.planning.report import plan_report
from heedful.planning.shapes import KNOWN

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "memory.md"
LENGTHS = {"offline": Lengths(1024), "online": Lengths(1024, 512)}
ONLINE = {"max_new_tokens": 512, "prompt_tokens": 512, "rewards": ("model:0.5B",), "rollout_micro_batch_size": 16}
TRAINERS = {
    "SFT": (plan_settings(SFTConfig), {}),
    "DPO": (plan_settings(DPOConfig), {}),
    "GRPO": (plan_settings(GRPOConfig), ONLINE),
    "PPO": (plan_settings(PPOConfig), ONLINE),
}
METHODS = {
    "full": {},
    "full, `--optimizer adamw-8bit`": {"optimizer": "adamw-8bit"},
    "full, `--weights-dtype bfloat16`": {"weights_dtype": "bfloat16"},
    "full, bfloat16, `--optimizer-device cpu`": {"weights_dtype": "bfloat16", "optimizer_device": "cpu"},
    "LoRA": {"lora_rank": 16},
    "QLoRA": {"lora_rank": 16, "quantize": "4bit"},
}
GPUS = (24, 48, 80)
EXAMPLE = plan_settings(PPOConfig)(model="1.5B", rewards=("model:0.5B",), gpu_gb=24.0)
COMMAND = "heedful plan ppo --model 1.5B --rewards model:0.5B --gpu-gb 24"

DIVIDED = plan_settings(PPOConfig)(model="8B", rewards=("model:0.5B",), shard="full", ranks=8, gpu_gb=80.0)
DIVIDED_COMMAND = "heedful plan ppo --model 8B --rewards model:0.5B --shard full --ranks 8 --gpu-gb 80"


def peak(config):
    """Bytes that a run needs on a GPU in bfloat16."""
    lengths = LENGTHS["online" if hasattr(config, "prompt_tokens") else "offline"]
    return plan_of(config, KNOWN.__getitem__, lengths, device="cuda", half=True).peak


def cells(config):
    """The largest micro-batch that fits into each GPU, with ``r`` if activations must be recomputed; a dash if none does."""

    @functools.cache
    def needed(size, recomputed):
        return peak(replace(config, micro_batch_size=size, gradient_checkpointing=recomputed))

    ways = [(size, recomputed) for recomputed in (False, True) for size in (8, 4, 2, 1)]
    fitting = (next((way for way in ways if needed(*way) <= gpu * GB), None) for gpu in GPUS)
    return "/".join(f"{way[0]}{'r' * way[1]}" if way else "–" for way in fitting)


def what_fits_table():
    lines = [f"| model | | {' | '.join(TRAINERS)} |", "|---" * (2 + len(TRAINERS)) + "|"]
    for model in KNOWN:
        for method, change in METHODS.items():
            runs = [kind(model=model, **own, **change) for kind, own in TRAINERS.values()]
            lines.append(f"| {model} | {method} | {' | '.join(map(cells, runs))} |")
    return "\n".join(lines)


def example():
    return "\n".join(["```", f"$ {COMMAND}", *plan_report(EXAMPLE, KNOWN.__getitem__), "```"])


def divided():
    return "\n".join(["```", f"$ {DIVIDED_COMMAND}", *plan_report(DIVIDED, KNOWN.__getitem__), "```"])


PARTS = {"what fits": what_fits_table, "example": example, "divided": divided}


def between(name):
    return re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)


@pytest.mark.parametrize("name", PARTS)
def test_memory_holds_what_the_planner_says(name):
    found = between(name).search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found.group() == f"<!-- {name} -->\n{PARTS[name]()}\n<!-- /{name} -->"


def test_scale_holds_what_its_script_says():
    script = runpy.run_path(str(DOCS / "scale.py"))
    page = (DOCS / "results" / "several-devices.md").read_text(encoding="utf-8")
    assert script["written"](page) == page
    sizes = {name: round(shape.parameters / 1e9, 2) for name, shape in script["MODELS"].items()}
    assert sizes == {"7B": 7.62, "70B": 70.55, "405B": 405.85}, "as published"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    for name, write in PARTS.items():
        text = between(name).sub(lambda found, write=write: found.group(1) + write() + found.group(2), text)
    PAGE.write_text(text, encoding="utf-8")
