"""docs/scale.md is written by the planner: `python tests/planning/test_scale_page.py` writes its tables again."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from heedful.planning.divided import memory
from heedful.planning.memory import GB, Network, Sampling, Work
from heedful.planning.scale import H100, Job, received, seconds
from heedful.planning.shapes import LARGE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scale.md"
CASES = [
    *(("7B", "7B", ranks, {}) for ranks in (8, 16, 64)),
    *(("70B", "70B", ranks, {}) for ranks in (64, 128, 512)),
    *(("405B", "405B", ranks, {}) for ranks in (512, 1024)),
    *(("405B, bfloat16 weights", "405B", ranks, {"half_weights": True}) for ranks in (512, 1024)),
]
"""What a row is called, its shape, its ranks, and what is set."""
SERVER = {"7B": 1, "70B": 4, "405B": 16}
"""GPUs that hold a model together where a server samples."""
ROWS = {"7B": 8, "70B": 4, "405B": 1}
"""Of a micro-batch."""
PROMPT = NEW = 512
RESPONSES = 1024
PARTS = {
    "weights": ("policy, trained", "critic, trained"),
    "gradients": ("gradients",),
    "moments": ("moments of the optimizer",),
    "frozen": ("reference", "reward models"),
    "whole blocks": ("whole blocks", "copies in half precision"),
    "activations, logits": ("activations", "logits"),
}


def work(size, algorithm, **changes):
    """A step of GRPO, or of PPO with a critic of its own, on all weights in bfloat16 products."""
    shape = LARGE[size]
    policy = Network(shape=shape, trained="all")
    critic = Network(shape=shape.trunk, trained="all", output="score") if algorithm == "PPO" else None
    return Work(
        device="cuda", half=True, policy=policy, critic=critic, reference=Network(shape=shape),
        rewards=(Network(shape=LARGE["7B"].trunk, output="score"),), checkpointing=True, rows=ROWS[size], length=PROMPT + NEW,
        responses=NEW, batch=RESPONSES, rollout=RESPONSES, sampling=Sampling(rows=64, prompt=PROMPT, new_tokens=NEW),
        **changes,
    )  # fmt: skip


def job_of(ranks):
    """Gradients are summed after each micro-batch, as whole ones would not fit."""
    return Job(gpu=H100, ranks=ranks, sync_every="micro-batch")


def row(*cells):
    return f"| {' | '.join(map(str, cells))} |"


def number(x):
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}"


def memory_table():
    """Of the phase that learns and needs most; and whether the rank could hold a whole copy to sample from."""
    lines = [
        row("model", "GPUs", "", *PARTS, "CUDA", "together", "sampling by itself"),
        "|" + "---|" * (6 + len(PARTS)),
    ]
    for name, size, ranks, changes in CASES:
        for algorithm in ("GRPO", "PPO"):
            found = memory(work(size, algorithm, **changes), job_of(ranks))
            phase = max(("backward", "step"), key=found.total)
            cells = [sum(found.phases[phase].get(part, 0) for part in parts) for parts in PARTS.values()]
            total, sampling = found.total(phase), found.total("sampling")
            sizes = [number(x / GB) for x in (*cells, found.phases[phase]["CUDA itself"])]
            totals = [number(x / GB) if x <= H100.memory else f"**{number(x / GB)}**" for x in (total, sampling)]
            lines.append(row(name, ranks, algorithm, *sizes, *totals))
    return "\n".join(lines)


def cost_table():
    """Seconds of a step, by what limits them; sampling as the memory allows it."""
    heads = (
        "model",
        "GPUs",
        "",
        "GB received",
        "learning",
        "reading",
        "links",
        "weights to servers",
        "sampling",
        "step",
    )
    lines = [row(*heads, "learning + reading"), "|" + "---|" * (len(heads) + 1)]
    for name, size, ranks, changes in CASES:
        for algorithm in ("GRPO", "PPO"):
            job, step = job_of(ranks), work(size, algorithm, **changes)
            here = memory(step, job).total("sampling") <= H100.memory
            found = seconds(step, job, samples_here=here, sharing=SERVER[size])
            products = found["products, learning"] + found["products, reading"]
            cells = [
                found["products, learning"], found["products, reading"], found["links"],
                found.get("weights to the servers", 0.0), found["sampling"], sum(found.values()),
            ]  # fmt: skip
            share = f"{100 * products / sum(found.values()):.0f} %"
            gigabytes = number(sum(received(step, job).values()) / GB)
            lines.append(row(name, ranks, algorithm, gigabytes, *map(number, cells), share))
    return "\n".join(lines)


def replicas_table():
    """The same model as one, or as several replicas."""
    lines = [row("replicas", "GB of a rank", "GB received", "links, s"), "|---|---|---|---|"]
    for replicas in (1, 2, 4, 8):
        job = replace(job_of(64), replicas=replicas)
        step = work("7B", "GRPO")
        total = memory(step, job).peak / GB
        lines.append(
            row(
                replicas,
                number(total),
                number(sum(received(step, job).values()) / GB),
                number(seconds(step, job)["links"]),
            )
        )
    return "\n".join(lines)


TABLES = {"memory": memory_table, "cost": cost_table, "replicas": replicas_table}


def between(name):
    return re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)


@pytest.mark.parametrize("name", TABLES)
def test_the_page_holds_what_the_planner_says(name):
    found = between(name).search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found.group() == f"<!-- {name} -->\n{TABLES[name]()}\n<!-- /{name} -->"


def test_half_the_work_is_half_the_seconds_of_products():
    """The tables come from functions of the work, not from constants."""
    job = job_of(64)
    whole, half = (seconds(replace(work("7B", "PPO"), batch=n, rollout=n), job) for n in (RESPONSES, RESPONSES // 2))
    assert whole["products, learning"] == pytest.approx(2 * half["products, learning"])


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        text = between(name).sub(lambda found, table=table: found[1] + table() + found[2], text)
    PAGE.write_text(text, encoding="utf-8")
