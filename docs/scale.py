"""Writes the computed tables of docs/results/several-devices.md: `python docs/scale.py`. Memory is what `heedful plan`
says; bytes and seconds are counted here, from shapes and published numbers of the hardware. Nothing is measured."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from heedful.configs.online import GRPOConfig, OnlineConfig, PPOConfig
from heedful.planning.memory import GB, Lengths, Plan, plan_of
from heedful.planning.shapes import Shape, decoder

PAGE = Path(__file__).parent / "results" / "several-devices.md"
MODELS = {
    "7B": decoder(  # Qwen2.5-7B
        vocabulary=152_064, hidden=3584, layers=28, heads=28, kv_heads=4, head_dim=128, intermediate=18_944,
        tied=False, biases=True,
    ),
    "70B": decoder(  # Llama-3.1-70B
        vocabulary=128_256, hidden=8192, layers=80, heads=64, kv_heads=8, head_dim=128, intermediate=28_672, tied=False,
    ),
    "405B": decoder(  # Llama-3.1-405B
        vocabulary=128_256, hidden=16_384, layers=126, heads=128, kv_heads=8, head_dim=128, intermediate=53_248,
        tied=False,
    ),
}  # fmt: skip
SERVER = {"7B": 1, "70B": 4, "405B": 16}
"""GPUs that hold a model together where a server samples."""
ROWS = {"7B": 8, "70B": 4, "405B": 1}
"""Of a micro-batch."""
PROMPT = NEW = 512
RESPONSES, SAMPLED = 1024, 64
"""Of a step, and sampled at a time by a rank that samples."""

MEMORY, FLOPS, BANDWIDTH = 80e9, 989e12, 3.35e12
"""H100 SXM: bytes, products in bfloat16 per second times two, bytes of its memory per second."""
LINK, ADAPTER, PER_MACHINE = 450e9, 50e9, 8
"""Bytes per second from GPUs of its machine (NVLink 4), and from other machines (NDR, 400 Gb/s, one per GPU); GPUs."""
OF_FLOPS, OF_BYTES = 0.4, 0.8
"""The part of the published products, and of the published bytes, per second that is reached. Assumed."""


@dataclass(frozen=True)
class Job:
    """A step of GRPO, or of PPO with a critic of its own, on all weights. Gradients are summed after each micro-batch."""

    name: str
    model: str
    ranks: int
    algorithm: str
    weights_dtype: str = "float32"
    replicas: int = 1

    @property
    def shape(self) -> Shape:
        return MODELS[self.model]

    @property
    def shards(self) -> int:
        """Ranks that share a model."""
        return self.ranks // self.replicas

    @property
    def here(self) -> int:
        """Rows of a rank."""
        return math.ceil(RESPONSES / self.ranks)

    @property
    def passes(self) -> int:
        """Micro-batches of a rank."""
        return math.ceil(self.here / ROWS[self.model])

    @property
    def learning(self) -> list[Shape]:
        return [self.shape, *([self.shape.trunk] if self.algorithm == "PPO" else [])]

    @property
    def frozen(self) -> list[Shape]:
        """The reference and the reward model."""
        return [self.shape, MODELS["7B"].trunk]

    def plan(self) -> Plan:
        """The memory of a rank."""
        kind: type[OnlineConfig] = PPOConfig if self.algorithm == "PPO" else GRPOConfig
        settings = {"critic": "separate"} if self.algorithm == "PPO" else {"samples_per_prompt": 8}
        config = kind(
            model=self.model, data="prompts.jsonl", output=Path("run"), rewards=("model:7B",), kl_coef=0.05,
            shard="full", replicas=self.replicas, sync_every="micro-batch", weights_dtype=self.weights_dtype,
            gradient_checkpointing=True, micro_batch_size=ROWS[self.model], rollout_micro_batch_size=SAMPLED,
            rollout_batch_size=RESPONSES, minibatch_size=RESPONSES, ppo_epochs=1, max_new_tokens=NEW, **settings,
        )  # fmt: skip
        lengths = Lengths(PROMPT + NEW, PROMPT)
        return plan_of(config, MODELS.__getitem__, lengths, device="cuda", half=True, ranks=self.ranks)

    @property
    def samples_here(self) -> bool:
        """Whether a rank can hold a whole copy of the policy to sample from. If not, servers sample."""
        return self.plan().total("sampling") <= MEMORY

    def received(self) -> float:
        """Bytes that a rank receives.

            gather              bytes of a model * (S - 1) / S                    S ranks share it
            scatter gradients   bytes of the gradients * (S - 1) / S    in float32, also if weights are in bfloat16
            between replicas    2 * bytes of the gradients / S * (R - 1) / R      R replicas; ring all-reduce

        Blocks are gathered in bfloat16, embeddings and head of what learns as they are stored, and the policy's copy for what
        samples too. A micro-batch that learns gathers twice, for its forward and its backward pass; a pass without gradients
        once.
        Gradients travel once per micro-batch. The policy is gathered once for what samples, here or on servers.
        """
        part = (self.shards - 1) / self.shards
        stored = 2 if self.weights_dtype == "bfloat16" else 4
        learned = sum(shape.parameters for shape in self.learning)
        passing = [2 * shape.linear + stored * (shape.embedding + shape.head) for shape in self.learning]
        reading = 2 * sum(shape.parameters for shape in self.frozen)  # frozen weights are in bfloat16
        values = sum(passing[1:])  # the critic's, before the update
        gathered = self.passes * (2 * sum(passing) + reading + values) + stored * self.shape.parameters
        replicas = 2 * 4 * learned / self.shards * (self.replicas - 1) / self.replicas
        return part * (gathered + self.passes * 4 * learned) + self.passes * replicas

    def seconds(self) -> dict[str, float]:
        """Seconds by what limits them; products and links are taken to overlap not at all.

        As many GPUs serve as there are ranks, and rank 0 sends them the weights through one network adapter. A backward
        pass is two forward passes, and one more as activations are computed again.
        """
        tokens, length = self.here * (PROMPT + NEW), PROMPT + NEW

        def products(shapes: list[Shape]) -> float:
            return sum(flops(shape, tokens, length) for shape in shapes) / (OF_FLOPS * FLOPS)

        link = LINK if self.shards <= PER_MACHINE else min(LINK, PER_MACHINE * ADAPTER)
        sharing, rows, times, sent = 1, min(SAMPLED, self.here), math.ceil(self.here / SAMPLED), 0.0
        if not self.samples_here:
            sharing, rows, times = SERVER[self.model], self.here * SERVER[self.model], 1
            sent = 2 * self.shape.parameters / (OF_BYTES * ADAPTER)
        return {
            "learning": 4 * products(self.learning),
            "reading": products([*self.frozen, *self.learning[1:]]),
            "links": self.received() / (OF_BYTES * link),
            "weights to servers": sent,
            "sampling": times * decode_seconds(self.shape, rows, sharing),
        }


def flops(shape: Shape, tokens: int, length: int) -> float:
    """Multiplications and additions of a forward pass over ``tokens`` tokens in texts of ``length``.

        2 * matrices + 2 * layers * query width * length         per token; causal attention reads half a text on average

    (Kaplan et al. 2020, section 2.1, with the attention's products added.)
    """
    return tokens * (2 * (shape.linear + shape.output) + 2 * shape.layers * shape.query * length)


def decode_seconds(shape: Shape, rows: int, sharing: int) -> float:
    """Seconds to sample a batch: each step reads all weights and the cache so far, in bfloat16, on ``sharing`` GPUs."""
    cached = rows * (PROMPT + NEW / 2) * 4 * shape.layers * shape.key
    return NEW * (2 * (shape.linear + shape.output) + cached) / (sharing * OF_BYTES * BANDWIDTH)


JOBS = [
    Job(name, model, ranks, algorithm, dtype)
    for name, model, sizes, dtype in (
        ("7B", "7B", (8, 16, 64), "float32"),
        ("70B", "70B", (64, 128, 512), "float32"),
        ("405B", "405B", (512, 1024), "float32"),
        ("405B, bfloat16 weights", "405B", (512, 1024), "bfloat16"),
    )
    for ranks in sizes
    for algorithm in ("GRPO", "PPO")
]


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def number(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}"


def large_table() -> list[str]:
    """GB of the learning phase that needs most, and with a whole copy to sample from; seconds, by what limits them."""
    names = ("learning", "reading", "links", "weights to servers", "sampling")
    heads = ("model", "GPUs", "", "GB", "GB, sampling by itself", "GB received", *names, "step", "learning + reading")
    lines = [row(*heads), "|" + "---|" * len(heads)]
    for job in JOBS:
        plan, seconds = job.plan(), job.seconds()
        held = map(plan.total, (max(("backward", "step"), key=plan.total), "sampling"))
        memory = [number(x / GB) if x <= MEMORY else f"**{number(x / GB)}**" for x in held]
        total = sum(seconds.values())
        share = f"{100 * (seconds['learning'] + seconds['reading']) / total:.0f} %"
        cells = [job.received() / GB, *(seconds[name] for name in names), total]
        lines.append(row(job.name, job.ranks, job.algorithm, *memory, *map(number, cells), share))
    return lines


def replicas_table() -> list[str]:
    """The same model as one, or as several replicas."""
    lines = [row("replicas", "GB of a rank", "GB received", "links, s"), "|---|---|---|---|"]
    for job in (Job("7B", "7B", 64, "GRPO", replicas=replicas) for replicas in (1, 2, 4, 8)):
        cells = (job.plan().peak / GB, job.received() / GB, job.seconds()["links"])
        lines.append(row(job.replicas, *map(number, cells)))
    return lines


def written(page: str) -> str:
    """The page with its tables as they are computed."""
    for name, table in {"large": large_table, "replicas": replicas_table}.items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
        page, count = between.subn(lambda found, table=table: found[1] + "\n".join(table()) + found[2], page)
        assert count == 1, f"docs/results/several-devices.md has no table {name!r}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
