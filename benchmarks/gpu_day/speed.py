"""Rows of ``speed``: tokens and seconds beside the limits of the device and beside others, and memory beside the plan."""

import copy
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flops
import torch
from common import Day, written
from machine import Machine, seconds_of
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from transformers import AutoConfig, GenerationConfig
from workload import make_prompts

from heedful import Policy, SFTConfig, train_sft
from heedful.configs.options import SamplingOptions
from heedful.devices import capabilities
from heedful.engines.generate import generate
from heedful.kernels.device import resolve_dtype
from heedful.kernels.weights import same_weights
from heedful.models.adapters import add_adapters
from heedful.models.shape import load_shape
from heedful.models.tokenizer import load_tokenizer
from heedful.planning.memory import Lengths, plan_of
from heedful.training.memory_preflight import planned_as
from heedful.types import MicroBatch

CASES = ("graphs, {} rows", "eager, {} rows", "generate, {} rows", "LoRA, {} rows")
ONLY_CUDA = {"quantize", "optimizer", "optimizer_device"}
PPO_STEPS, WARM_UP, EPOCHS = 3, 1, 4


def decode(day: Day, model: str = "0.6B", cases: Sequence[str] = ()) -> None:
    """Sampling as the trainers do it, and transformers' `generate` once, all with responses of full length."""
    few, many = day.sizes.rows
    lm, tokenizer = day.policy(model)
    policy = Policy.from_pretrained(lm, tokenizer, dtype="auto")
    machine, shape = Machine(day.device, policy.compute_dtype), flops.decoder_of(lm.config)
    width = policy.compute_dtype.itemsize
    names = cases or (*(case.format(few) for case in CASES), *(case.format(many) for case in CASES[:2]))
    for what in names:
        kind, rows = what.partition(",")[0], int(what.split()[1])
        if kind == "graphs" and not capabilities(day.device).graphs:
            day.tell(f"{model}, {what}", left_out=f"{day.device.type} has no graphs")
            continue
        with day.part(f"{model}, {what}"):
            prompts = make_prompts(lm.config.vocab_size, rows, day.sizes.prompt, 0)
            # Recorded graphs live as long as their policy.
            own = Policy(same_weights(lm), compute_dtype=policy.compute_dtype)
            run = {"generate": generating, "LoRA": adapted}.get(kind, sampling)(own, prompts, graphs=kind == "graphs")
            del own
            day.forget()
            first = day.seconds(partial(run, day.sizes.response if kind == "graphs" else 2))
            seconds, memory = day.seconds(partial(run, day.sizes.response)), day.memory()
            del run
            lengths = [day.sizes.prompt] * rows, [day.sizes.response] * rows
            parts = flops.prefill(shape, lengths[0], width=width), flops.decode(shape, *lengths, width=width)
            found = {"seconds": seconds, "tokens_per_second": rows * day.sizes.response / seconds}
            found |= {"share_of_limit": sum(map(machine.hard, parts)) / seconds, **memory}
            found |= {"capture_seconds": first - seconds} if kind == "graphs" else {}
            day.tell(f"{model}, {what}", **found)


def sampling(policy: Policy, prompts: list[list[int]], *, graphs: bool) -> Callable[[int], object]:
    """Sampling so many tokens, all rows at once."""

    def run(tokens: int) -> object:
        options = SamplingOptions(max_new_tokens=tokens, response_length="fixed", cuda_graphs="on" if graphs else "off")
        one = torch.Generator().manual_seed(0)
        limit = MicroBatch(len(prompts))
        return generate(policy, prompts, options, stop_ids=(), pad_id=0, generator=one, micro_batch=limit)

    return run


def adapted(policy: Policy, prompts: list[list[int]], *, graphs: bool) -> Callable[[int], object]:
    """`sampling` with adapters, which begin as none."""
    lm = copy.deepcopy(policy.lm)
    add_adapters(lm, SFTConfig(model="m", data="d", output="o", lora_rank=16), base="m", seed=0)
    return sampling(Policy(lm, compute_dtype=policy.compute_dtype), prompts, graphs=graphs)


def generating(policy: Policy, prompts: list[list[int]], *, graphs: bool) -> Callable[[int], object]:  # noqa: ARG001
    """transformers' `generate` with weights of half precision, as it comes."""
    lm = copy.deepcopy(policy.lm).to(policy.compute_dtype).eval()
    lm.set_attn_implementation("sdpa")
    lm.generation_config.eos_token_id = None
    ids = torch.tensor(prompts, device=policy.device)

    def run(tokens: int) -> object:
        config = GenerationConfig(
            max_new_tokens=tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0
        )
        return lm.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)

    return run


def profile(day: Day) -> None:
    """Where the time goes: of a token with graphs and without, and of a learning pass over texts of PPO's length."""
    lm, tokenizer = day.policy("0.6B")
    policy, rows, tokens = Policy.from_pretrained(lm, tokenizer, dtype="auto"), day.sizes.rows[0], day.sizes.profiled
    prompts = make_prompts(lm.config.vocab_size, rows, day.sizes.prompt, 0)
    for graphs in (True, False):
        name = f"a token of {rows} rows, {'graphs' if graphs else 'eager'}"
        if graphs and not capabilities(day.device).graphs:
            day.tell(name, left_out=f"{day.device.type} has no graphs")
            continue
        with day.part(name):
            own = Policy(same_weights(lm), compute_dtype=policy.compute_dtype)
            kernels(day, name, partial(sampling(own, prompts, graphs=graphs), tokens), tokens)
            del own
    ids = torch.tensor(prompts, device=day.device).repeat(1, 2)
    mask = torch.ones_like(ids, dtype=torch.bool)

    def learn() -> None:
        policy(ids, mask, mask[:, day.sizes.prompt :]).logprobs.sum().backward()
        policy.zero_grad(set_to_none=True)

    with day.part("a learning pass"):
        kernels(day, f"a learning pass of {rows} rows", learn, 1)


def norms(day: Day) -> None:
    """A learning pass with transformers' RMS norms, six kernels and twelve back, and with torch's, one each: milliseconds,
    memory, and how far gradients are apart."""
    lm, tokenizer = day.policy("0.6B")
    policy, rows = Policy.from_pretrained(lm, tokenizer, dtype="auto"), day.sizes.rows[0]
    ids = torch.tensor(make_prompts(lm.config.vocab_size, rows, 2 * day.sizes.prompt, 0), device=day.device)
    mask = torch.ones_like(ids, dtype=torch.bool)

    def learn() -> None:
        policy.zero_grad(set_to_none=True)
        policy(ids, mask, mask[:, day.sizes.prompt :]).logprobs.sum().backward()

    def fused(norm: Any, x: Tensor) -> Tensor:
        if x.dtype == norm.weight.dtype:
            return rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
        return norm.weight * rms_norm(x, norm.weight.shape, None, norm.variance_epsilon).to(x.dtype)

    gradients: list[list[Tensor]] = []
    for name in ("transformers'", "torch's"):
        if name == "torch's":
            for module in lm.modules():
                if type(module).__name__.endswith("RMSNorm"):
                    vars(module)["forward"] = partial(fused, module)
        with day.part(name):
            learn()
            gradients.append([parameter.grad.cpu() for parameter in policy.parameters() if parameter.grad is not None])
            day.forget()
            day.tell(name, ms=1000 * statistics.median(day.seconds(learn) for _ in range(3)), **day.memory())
    off = sum(float((a - b).square().sum()) for a, b in zip(*gradients, strict=True))
    day.check("gradients apart", (off / sum(float(a.square().sum()) for a in gradients[0])) ** 0.5, 0.06)


def kernels(day: Day, what: str, run: Callable[[], object], parts: int) -> None:
    """Milliseconds by the clock, in kernels and in the host's operations, of one of so many parts; the largest of each."""
    run()
    seconds = day.seconds(run)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if day.device.type == "cuda" else []
    with torch.profiler.profile(activities=kinds) as profiler:
        day.seconds(run)
    events = profiler.key_averages()
    # An operation's device time is that of its kernels, which have rows of their own.
    host = torch.autograd.DeviceType.CPU
    on_device = [(one.key, one.self_device_time_total, one.count) for one in events if one.device_type != host]
    on_host = [(one.key, one.self_cpu_time_total, one.count) for one in events if one.device_type == host]

    def largest(found: list[tuple[str, float, int]]) -> list[tuple[str, float, float]]:
        ordered = sorted(found, key=lambda one: -one[1])[:14]
        return [(name[:90], round(time / parts / 1000, 4), round(count / parts, 1)) for name, time, count in ordered]

    each = {"ms": 1000 * seconds / parts, "kernel_ms": sum(one[1] for one in on_device) / parts / 1000}
    each["kernels"] = sum(one[2] for one in on_device) / parts
    day.tell(what, **each, on_device=largest(on_device), on_host=largest(on_host))


def attention(day: Day) -> None:
    """A query per row over a cache with shared heads, by each kernel: milliseconds a token of 28 layers, and its distance
    from float32."""
    heads, keys, size = 16, 8, 128
    rows, length = day.sizes.rows[0], day.sizes.prompt + day.sizes.response
    dtype = resolve_dtype("auto", day.device)
    k, v = (torch.randn(rows, keys, length, size, device=day.device).to(dtype) for _ in range(2))
    q = torch.randn(rows, heads, 1, size, device=day.device).to(dtype)
    ends = torch.arange(rows, device=day.device) % length
    hidden = torch.arange(length, device=day.device) > ends[:, None]
    mask = torch.zeros(rows, length, device=day.device, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None, None]
    each = mask.expand(rows, heads, 1, length)
    exact = scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=each.float(), enable_gqa=True)

    def stacked() -> Tensor:  # as heedful.kernels.attention
        return scaled_dot_product_attention(q.view(rows, keys, -1, size), k, v, attn_mask=mask)

    def products() -> Tensor:
        scores = (q.view(rows, keys, -1, size) @ k.transpose(2, 3)).float()
        return torch.add(mask, scores, alpha=size**-0.5).softmax(-1).to(dtype) @ v

    def by_cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, attn_mask=each, enable_gqa=True)

    ways: dict[str, Callable[[], Tensor]] = {"as it is": stacked, "plain products": products}
    ways |= {"cuDNN": by_cudnn} if day.device.type == "cuda" else {}
    for name, run in ways.items():
        with day.part(name):
            off = float((run().view(exact.shape).float() - exact).abs().max())
            day.check(name, off, 0.02, ms=1000 * 28 * seconds_of([run], day.device))


def ppo(day: Day, side: str, graphs: str = "auto") -> None:
    """Steps of PPO with a critic of its own, by the scripts that side_by_side.py compares, each in a process of its own."""
    here, folder = Path(__file__).resolve().parents[1], day.folder("0.5B", "policy", "value", "reward")
    rows, micro_batch, response = day.sizes.ppo
    command, paths = [here / "iteration.py", "ppo", f"--cuda-graphs={graphs}"], [os.environ.get("PYTHONPATH", "")]
    if side == "trl":
        command, paths = [here / "peers" / "trl_ppo.py", "--tuned"], [*paths, str(day.work / "trl")]
        if not (day.work / "trl").exists() and importlib.util.find_spec("trl") is None:
            day.tell(side, left_out="trl is not installed; wheels.sh brings it")
            return
    sizes = {"batch": rows, "micro-batch": micro_batch, "response-length": response, "threads": day.sizes.threads}
    sizes |= {"iterations": PPO_STEPS, "warmup": WARM_UP, "ppo-epochs": EPOCHS}
    flags = [f"--{name}={value}" for name, value in sizes.items()]
    done = subprocess.run(
        [sys.executable, *map(str, command), f"--workload={folder}", *flags],
        stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {"PYTHONPATH": ":".join(filter(None, paths))},
    )  # fmt: skip
    found = json.loads(done.stdout.strip().splitlines()[-1])
    lm = flops.decoder_of(AutoConfig.from_pretrained(folder / "policy"))
    lengths = [day.sizes.prompt + response] * rows
    work = flops.train(
        lm, lm, lengths, head_tokens=rows * response, epochs=EPOCHS, steps=EPOCHS, micro_batch_size=micro_batch, width=2
    )
    peak = Machine(day.device, resolve_dtype("auto", day.device)).peak()
    share = work.total_flops / found["phase_seconds"]["update"] / peak
    day.tell(side, update_share_of_peak=share, peak_gb=found["peak_memory_bytes"] / 1e9, **found)


def fit(day: Day, model: str = "0.5B", **settings: Any) -> None:
    """Four steps of SFT on texts of one length: seconds of the second and third (the first loads, and the last saves), and
    memory beside the plan."""
    if day.device.type != "cuda" and ONLY_CUDA & settings.keys():
        day.tell(f"SFT, {model}", left_out=f"{day.device.type} has no {', '.join(ONLY_CUDA & settings.keys())}")
        return
    folder, tokens = day.folder(model, "policy"), day.sizes.text[model]
    rows = settings.get("batch_size", 16)
    tokenizer, config = load_tokenizer(str(folder / "policy")), AutoConfig.from_pretrained(folder / "policy")
    texts = tokenizer.batch_decode(make_prompts(config.vocab_size, 4 * rows, tokens - 1, 0))  # the end is a token too
    halves = [(text[: len(text) // 10 * 5], text[len(text) // 10 * 5 :]) for text in texts]
    common: dict[str, Any] = {"max_steps": 4, "batch_size": rows, "micro_batch_size": rows // 2, "eval_fraction": 0.0}
    common |= {"eval_every": 0, "sample_every": 0, "device": str(day.device), "max_length": tokens}
    marks = [time.perf_counter()]
    day.forget()
    with tempfile.TemporaryDirectory() as output:
        records = [{"prompt": prompt, "completion": completion} for prompt, completion in halves]
        common |= {"model": str(folder / "policy"), "data": written(Path(output) / "texts.jsonl", records)}
        run = SFTConfig(**common | settings | {"output": Path(output) / "run"})
        train_sft(run, on_step=lambda *_: marks.append(time.perf_counter()))
    steps = [end - start for start, end in itertools.pairwise(marks)]
    seconds, dtype = statistics.median(steps[1:3]), resolve_dtype(run.dtype, day.device)
    lengths = Lengths(tokens, tokens // 2)
    plan = plan_of(run, load_shape, lengths, device=planned_as(day.device), half=dtype.itemsize == 2)
    found = {"seconds": seconds, "first_seconds": steps[0], "tokens_per_second": rows * tokens / seconds}
    memory = day.memory()
    if memory:
        planned = (plan.peak - plan.phases[plan.peak_phase].get("CUDA itself", 0)) / 1e9
        found |= {"planned_gb": planned, "planned_by_allocated": planned / memory["allocated_gb"], **memory}
    day.tell(f"SFT, {model}", planned_phase=plan.peak_phase, **found)
