"""Decoding, PPO and GRPO on one GPU against its limits, at the shapes of GPT-2, Qwen2.5-0.5B and Llama-3.2-1B.

python benchmarks/gpu.py --output runs/gpu [--minutes 9] [--peer-ppo PYTHON] [--peer-grpo PYTHON]
python benchmarks/gpu.py --output runs/gpu --smoke

Random weights, made on the device; responses of full length, so that every row is real. What does not fit into --minutes is
left out and named. Each measurement is a line of gpu.jsonl; the tables come at the end. --smoke runs the same code with
toy shapes on a CPU, where the figures mean nothing.

The limit (gpu_limits.py) is what the work takes at the maker's peak of a GPU that machine.py names, on other devices at the
speed of a large product and of a copy.
"""

import argparse
import copy
import gc
import json
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_limits import Cost, Rates, Workload, measured_rates, timed
from gpu_models import make_model, make_prompts, shapes, word_tokenizer
from gpu_peers import run_peer, write_workload
from learners import learner_of
from machine import MAKERS
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DynamicCache,
    PreTrainedConfig,
)

from heedful import GRPOConfig, PPOConfig
from heedful.algorithms.online.rollout import rollout
from heedful.algorithms.ppo import learn, make_experience
from heedful.configs.options import SamplingOptions
from heedful.data.chat import Renderer, RewardInputs
from heedful.devices import capabilities
from heedful.engines.cuda_graph import graph_decoder
from heedful.engines.generate import sample
from heedful.kernels.device import resolve_device, resolve_dtype
from heedful.kernels.weights import halve_frozen, same_weights
from heedful.models.policy import Policy, freeze
from heedful.models.reward_model import RewardModel, score_head
from heedful.models.value_model import ValueModel
from heedful.rewards import Reward
from heedful.rewards.models import ModelReward
from heedful.training.setup import halve_reference
from heedful.types import MicroBatch

CAUTIOUS = 0.1
"""Share of the limit that a measurement is expected to reach before the first has been made."""
COLUMNS = {
    "shape": "shape",
    "what": "what",
    "seconds": "s",
    "rollout": "rollout",
    "score": "score",
    "update": "update",
    "tokens_per_second": "tokens/s",
    "limit_seconds": "limit, s",
    "percent_of_limit": "% of limit",
    "update_percent_of_peak": "update, % of peak",
    "peak_gb": "peak, GB",
}


@dataclass
class Report:
    """What has been measured and what was left out, while the time lasts."""

    path: Path
    device: torch.device
    deadline: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)
    """Of the limit, what was reached last by measurements of a kind; larger shapes reach more."""

    def measure(
        self, shape: str, what: str, run: Callable[[], dict[str, Any]], *, limit: float, tokens: int, times: int
    ) -> None:
        """Run it where it fits into the time; ``limit`` is the least one iteration takes, ``times`` how many there are.

        Where the library warns that it goes on without CUDA graphs, there is nothing to measure.
        """
        kind = what.partition(",")[0]
        expected = times * limit / self.shares.get(kind, CAUTIOUS)
        if time.monotonic() + expected > self.deadline:
            self.leave_out(shape, what, f"expected to take {expected:.0f} s")
            return
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*CUDA graph")
                found = run()
        except UserWarning as reason:
            self.leave_out(shape, what, str(reason))
            return
        seconds = found["seconds"]
        self.shares[kind] = limit / seconds
        peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        limits = {"limit_seconds": limit, "percent_of_limit": 100 * limit / seconds, "peak_gb": peak / 1e9}
        self.add({"shape": shape, "what": what, **found, "tokens_per_second": tokens / seconds, **limits})

    def leave_out(self, shape: str, what: str, why: str) -> None:
        self.left_out.append(f"{shape}, {what}: {why}")
        print(f"left out: {self.left_out[-1]}", flush=True)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(
            {key: value if isinstance(value, str) else float(f"{value:.4g}") for key, value in row.items()}
        )
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")
        print(json.dumps(self.rows[-1]), flush=True)

    def table(self) -> str:
        """Markdown: a row a measurement, and what was left out."""
        lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|---" * len(COLUMNS) + "|"]
        lines += ["| " + " | ".join(_cell(row.get(key)) for key in COLUMNS) + " |" for row in self.rows]
        return "\n".join([*lines, "", *(f"Left out: {text}." for text in self.left_out)])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


class Bench:
    """All measurements of one shape."""

    def __init__(self, report: Report, name: str, config: PreTrainedConfig, work: Workload, rates: Rates) -> None:
        self.report, self.name, self.config, self.work, self.rates = report, name, config, work, rates
        self.dtype = resolve_dtype("auto", report.device)
        self.cost = Cost(config, width=self.dtype.itemsize)
        self.renderer = Renderer(word_tokenizer(config.vocab_size))
        self.prompts = make_prompts(work.batch, work.prompt, config.vocab_size)
        lm = make_model(AutoModelForCausalLM.from_config, config, report.device)
        self.policy = Policy(lm, compute_dtype=self.dtype)

    def decoding(self, batch: int, times: int) -> None:
        """The sampler as the trainers use it, by itself and with CUDA graphs, and their bare steps in half precision."""
        work = Workload(batch=batch, prompt=self.work.prompt, response=self.work.response)
        ids = [prompt.ids for prompt in self.prompts[:batch]]
        settings = {"limit": self.cost.rollout(work, self.rates, prompts=batch), "tokens": batch * work.response}
        kinds: dict[str, Callable[[Sequence[list[int]]], Callable[[], object]]] = {
            "sampler": self._sampler,
            "sampler with --cuda-graphs": partial(self._sampler, cuda_graphs=True),
            "graph steps, greedy": self._graph_steps,
        }
        if not capabilities(self.report.device).graphs:
            what = "sampler with --cuda-graphs"
            del kinds[what]  # it would be refused
            self.report.leave_out(self.name, f"{what}, batch {batch}", f"{self.report.device.type} has no CUDA graphs")
        for what, make in kinds.items():

            def seconds(make: Callable[[Sequence[list[int]]], Callable[[], object]] = make) -> dict[str, float]:
                run = make(ids)
                run()  # graphs are captured here
                return {"seconds": timed(run, self.report.device, times)}

            self.report.measure(self.name, f"{what}, batch {batch}", seconds, **settings, times=times + 1)

    def _sampler(self, ids: Sequence[list[int]], *, cuda_graphs: bool = False) -> Callable[[], object]:
        options = SamplingOptions(max_new_tokens=self.work.response, response_length="fixed", cuda_graphs=cuda_graphs)
        policy = self.policy
        if cuda_graphs:  # recordings stay as long as their policy, and what is measured later needs the memory
            policy = Policy(same_weights(policy.lm), compute_dtype=self.dtype)
        return partial(
            sample,
            policy,
            ids,
            options,
            stop_ids=(),
            pad_id=0,
            generator=torch.Generator().manual_seed(0),
            micro_batch=MicroBatch(len(ids)),
        )

    def _graph_steps(self, ids: Sequence[list[int]]) -> Callable[[], object]:
        prompt = torch.tensor(ids, device=self.report.device)
        mask = torch.ones_like(prompt)
        lm = copy.deepcopy(self.policy.lm).to(self.dtype).eval()
        decoder = graph_decoder(lm, lm.dtype)

        def run() -> None:
            assert decoder is not None, "without one there was a warning"
            cache = DynamicCache(config=lm.config)
            with torch.no_grad():
                output = lm(input_ids=prompt, attention_mask=mask, past_key_values=cache, logits_to_keep=1)
            decoder.start(cache, mask, self.work.response)
            logits = output.logits[:, -1]
            for _ in range(self.work.response):
                logits = decoder.step(logits.argmax(-1))

        return run

    def settings(self) -> dict[str, Any]:
        work = self.work
        return {
            "model": self.name,
            "data": "random",
            "output": Path("unused"),
            "rollout_batch_size": work.batch,
            "minibatch_size": work.batch,
            "micro_batch_size": work.micro_batch,
            "rollout_micro_batch_size": work.batch,
            "max_new_tokens": work.response,
            "response_length": "fixed",
        }

    def reference(self) -> Policy:
        return freeze(halve_reference(Policy(copy.deepcopy(self.policy.lm), compute_dtype=self.dtype)))

    def ppo(self, times: int) -> None:
        """With a critic of its own and a reward model, one and four epochs a rollout batch, one optimizer step each."""
        config, device = PPOConfig(**self.settings(), critic="separate", value_model=self.name), self.report.device
        trunk = make_model(AutoModel.from_config, self.config, device)
        self.config.num_labels = 1
        classifier = make_model(AutoModelForSequenceClassification.from_config, self.config, device)
        halve_frozen(classifier, self.dtype, but=[score_head(classifier)])
        value_model = ValueModel(trunk, self.config.hidden_size, compute_dtype=self.dtype).to(device)
        judge = freeze(RewardModel(classifier, compute_dtype=self.dtype))
        inputs = RewardInputs(self.renderer.tokenizer)
        rewards = [Reward("random", ModelReward(judge, inputs, micro_batch=MicroBatch(self.work.micro_batch)))]
        learner = learner_of(
            config, self.policy, self.reference(), value_model, renderer=self.renderer, rewards=rewards, stop_ids=(1,)
        )

        def iteration(epochs: int) -> dict[str, float]:
            now = replace(learner, config=replace(config, ppo_epochs=epochs))
            return learn(now, make_experience(now, rollout(now, self.prompts))).metrics

        for epochs, warm_up in ((1, 1), (4, 0)):
            self._iterations(
                f"PPO, E={epochs}", partial(iteration, epochs), epochs=epochs, times=times, warm_up=warm_up
            )

    def grpo(self, times: int) -> None:
        """One epoch, no critic, a reward that costs nothing."""
        config = GRPOConfig(**self.settings(), samples_per_prompt=self.work.group)
        rewards = [Reward("first", lambda completion_ids, **_: [float(ids[0] % 7) for ids in completion_ids])]
        prompts = [prompt for prompt in self.prompts[:: self.work.group] for _ in range(self.work.group)]
        learner = learner_of(
            config, self.policy, self.reference(), None, renderer=self.renderer, rewards=rewards, stop_ids=(1,)
        )

        def iteration() -> dict[str, float]:
            return learn(learner, make_experience(learner, rollout(learner, prompts))).metrics

        self._iterations("GRPO", iteration, epochs=1, times=times, warm_up=1, critic=False)

    def _iterations(
        self,
        what: str,
        iteration: Callable[[], dict[str, float]],
        *,
        epochs: int,
        times: int,
        warm_up: int,
        critic: bool = True,
    ) -> None:
        def run() -> dict[str, float]:
            steps = [iteration() for _ in range(warm_up + times)][warm_up:]
            phases = {p: statistics.median(step[f"time/{p}"] for step in steps) for p in ("rollout", "score", "update")}
            flops = self.cost.update(self.work, epochs=epochs, critic=critic)
            share = 100 * flops / phases["update"] / self.rates.flops
            return {"seconds": sum(phases.values()), **phases, "update_percent_of_peak": share}

        limit = self.cost.iteration(self.work, self.rates, epochs=epochs, critic=critic)
        tokens = self.work.batch * self.work.response
        self.report.measure(self.name, what, run, limit=limit, tokens=tokens, times=warm_up + times)

    def peers(self, folder: Path, pythons: dict[str, str]) -> None:
        """Others' trainers on the same shape, with what time is left."""
        work, report = self.work, self.report
        write_workload(folder, self.config, self.renderer.tokenizer, self.prompts, report.device)
        if report.device.type == "cuda":  # their processes need the memory that this one would keep
            gc.collect()
            torch.cuda.empty_cache()
        for kind, python in pythons.items():
            what = f"TRL {kind.upper()}{', E=4' * (kind == 'ppo')}, tuned"
            found = run_peer(kind, python, folder, work, max(1.0, report.deadline - time.monotonic()))
            if "why" in found:
                report.leave_out(self.name, what, found["why"])
                continue
            seconds, peak = found["seconds_median"], found["peak_memory_bytes"] / 1e9
            speed = work.batch * work.response / seconds
            report.add(
                {"shape": self.name, "what": what, "seconds": seconds, "tokens_per_second": speed, "peak_gb": peak}
            )


def run(options: argparse.Namespace, device: torch.device) -> Report:
    """Every shape from the smallest, and the peers on it, until the time is up."""
    options.output.mkdir(parents=True, exist_ok=True)
    report = Report(options.output / "gpu.jsonl", device, time.monotonic() + 60 * options.minutes)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    rates = measured_rates(device, resolve_dtype("auto", device))
    peak = Rates(*MAKERS[name]) if name in MAKERS else rates
    for what, found in (("limit, by its maker" if name in MAKERS else "limit, measured", peak), ("measured", rates)):
        print(f"{name}, {what}: {found.flops / 1e12:.4g} TFLOP/s, {found.bytes / 1e12:.4g} TB/s", flush=True)
    work = Workload(batch=8, prompt=6, response=5, micro_batch=4, group=4) if options.smoke else Workload()
    pythons = {kind: python for kind in ("ppo", "grpo") if (python := getattr(options, f"peer_{kind}"))}
    for shape, config in shapes(smoke=options.smoke).items():
        if options.only and shape not in options.only:
            continue
        bench = Bench(report, shape, config, work, peak)
        stages = {f"decoding, batch {batch}": partial(bench.decoding, batch) for batch in (work.batch, work.batch // 4)}
        for what, stage in {**stages, "PPO": bench.ppo, "GRPO": bench.grpo}.items():
            try:
                stage(options.iterations)
            except torch.OutOfMemoryError:
                report.leave_out(shape, what, "out of memory")
        if pythons:
            del bench.policy
            with tempfile.TemporaryDirectory() as folder:
                bench.peers(Path(folder), pythons)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for gpu.jsonl")
    parser.add_argument("--minutes", type=float, default=9.0, help="what would take longer is left out")
    parser.add_argument("--iterations", type=int, default=2, help="measured ones; the median is shown")
    parser.add_argument("--only", nargs="*", choices=list(shapes(smoke=False)), help="these shapes alone")
    parser.add_argument("--peer-ppo", metavar="PYTHON", help="Python of an environment with trl 1.12")
    parser.add_argument("--peer-grpo", metavar="PYTHON", help="Python of an environment with trl 1.16")
    parser.add_argument("--smoke", action="store_true", help="toy shapes on the CPU: does the script run?")
    options = parser.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        parser.exit(1, f"{parser.prog}: no CUDA device here; --smoke runs the same code with toy shapes on the CPU\n")
    print(f"\n{run(options, resolve_device('cpu' if options.smoke else 'cuda')).table()}")


if __name__ == "__main__":
    main()
