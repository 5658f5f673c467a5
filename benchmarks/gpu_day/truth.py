"""Rows of ``numbers``: what is installed, the checks of the device, the numbers of a large model, and memory.

Every comparison is with the CPU in float32, or with the same thing done in a plainer way. README.md has each limit's reason.
"""

import contextlib
import copy
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from common import Day, written
from torch import Tensor
from workload import make_prompts

import heedful
from heedful import Policy, PPOConfig
from heedful.apps.device_checks.checks import CHECKS, run_check
from heedful.apps.device_checks.result import largest
from heedful.cli.doctor_device import about_device
from heedful.configs.options import SamplingOptions
from heedful.data.batches import AdaptiveMicroBatch, Batch
from heedful.devices import capabilities
from heedful.engines.generate import generate
from heedful.engines.responses import Responses
from heedful.engines.teacher_forced import micro_batches
from heedful.kernels.device import half_dtypes
from heedful.kernels.packing import can_pack, is_worth_packing
from heedful.types import MicroBatch

PACKAGES = ("tokenizers", "huggingface-hub", "peft", "bitsandbytes", "numpy", "triton", "trl", "datasets", "pyarrow")
DTYPES = {"float32": (2e-4, 2e-4, 1e-3), "bfloat16": (0.2, 0.06, 0.05)}
"""Limits of log-probs, of gradients (relative) and of PPO's metrics (relative). On a CPU, with as many and as wide layers,
bfloat16 is 0.056, 0.021 and 0.015 off float32, packed texts in float32 7e-6. TF32 would be above, and must not be on."""
METRICS = ("loss/policy", "loss/value", "optimizer/grad_norm")


def versions(day: Day) -> None:
    """Device, driver and versions. Packages that are not there have no version."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    day.tell("versions", **about_device(day.device), **found)


def doctor(day: Day) -> None:
    """The checks of ``heedful doctor --device``, one at a time, so that none is lost when the time is up."""
    for check in CHECKS:
        found = run_check(check, day.device).as_dict()
        day.tell(found.pop("check"), right=found["outcome"] != "fail", **found)


# Numbers of one model -----------------------------------------------------------------------------------------------


def truth(day: Day) -> None:
    """One model and one batch of responses in every way that they can be computed."""
    lm, tokenizer = day.policy("0.6B")
    texts = [tokenizer.decode(ids) for ids in ragged_prompts(day)]
    dtypes = [name for name in DTYPES if name == "float32" or getattr(torch, name) in half_dtypes(day.device)]

    def fresh(name: str, device: torch.device = day.device) -> Policy:
        return Policy.from_pretrained(copy.deepcopy(lm).to(device), tokenizer, dtype=getattr(torch, name))

    half, on_cpu = fresh(dtypes[-1]), fresh("float32", torch.device("cpu"))
    batch = heedful.LocalEngine(half, max_new_tokens=day.sizes.compared, raw_prompts=True).generate(texts)
    with day.part("sampler beside scorer"):
        apart = farthest(batch.logprobs, heedful.logprobs(half, batch), batch.mask)
        day.check(f"sampler beside scorer, {dtypes[-1]}", apart, DTYPES[dtypes[-1]][0], tokens=int(batch.mask.sum()))
    expected, gradients = learned(on_cpu, batch.batch.to(torch.device("cpu")))
    for name in dtypes:
        policy = fresh(name)
        with day.part(f"beside the CPU, {name}"):
            found, own = learned(policy, batch.batch)
            day.check(f"log-probs beside the CPU's, {name}", farthest(found, expected), DTYPES[name][0])
            day.check(f"gradients beside the CPU's, {name}", relative(own, gradients), DTYPES[name][1])
        with day.part(f"packed, {name}"):
            packed_beside_padded(day, name, policy, batch.batch)
        with day.part(f"graphs, {name}"):
            graphs_beside_eager(day, name, policy, ragged_prompts(day))
    metrics = ppo_step(on_cpu, texts)
    for name in dtypes:
        with day.part(f"PPO, {name}"):
            seen = ppo_step(fresh(name), texts)
            both = {key: [seen[key], metrics[key]] for key in METRICS}
            off = largest(abs(ours / theirs - 1) for ours, theirs in both.values())
            day.check(f"a step of PPO beside the CPU's, {name}", off, DTYPES[name][2], **both)


def ragged_prompts(day: Day) -> list[list[int]]:
    """Eight prompts of different lengths."""
    shape, most = day.sizes.shapes["0.6B"], day.sizes.compared
    return [make_prompts(shape.vocabulary, 1, 2 + row * most // 8, row)[0] for row in range(8)]


def learned(policy: Policy, *parts: Batch) -> tuple[Tensor, list[Tensor]]:
    """Log-probs of the responses, and the gradients of their sum, which are taken from the model."""
    given = [policy(part.ids, part.attention_mask, part.response_mask).logprobs[part.response_mask] for part in parts]
    torch.cat(given).sum().backward()
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    policy.zero_grad(set_to_none=True)
    return torch.cat(given).detach().cpu(), gradients


def farthest(ours: Tensor, theirs: Tensor, mask: Tensor | None = None) -> float:
    """The largest difference, at the True positions of a mask."""
    difference = (ours.cpu() - theirs.cpu()).abs()
    return float((difference if mask is None else difference[mask.cpu()]).max())


def relative(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The length of the difference by the length of the second, all tensors taken as one vector."""
    pairs = [(a.float(), b.to(a.device).float()) for a, b in zip(ours, theirs, strict=True)]
    difference = sum(float((a - b).square().sum()) for a, b in pairs)
    return float((difference / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5)


def packed_beside_padded(day: Day, name: str, policy: Policy, batch: Batch) -> None:
    """Texts in one row beside the same texts one by one."""
    lengths = batch.attention_mask.sum(dim=1).tolist()
    rows = [batch.select(torch.tensor([row], device=batch.ids.device)) for row in range(len(lengths))]
    (ours, own), (theirs, gradients) = learned(policy, batch), learned(policy, *rows)
    packs = is_worth_packing(lengths) and can_pack(policy.lm.base_model)
    off = farthest(ours, theirs) if packs else torch.inf
    day.check(f"packed beside one by one, {name}", off, DTYPES[name][0], packs=packs)
    day.check(f"gradients of packed texts, {name}", relative(own, gradients), DTYPES[name][1])


def graphs_beside_eager(day: Day, name: str, policy: Policy, prompts: Sequence[Sequence[int]]) -> None:
    """Greedy tokens with graphs and without: where they part, both are as likely up to rounding."""
    if not capabilities(day.device).graphs:
        day.tell(f"graph beside eager tokens, {name}", left_out=f"{day.device.type} has no graphs")
        return
    plain, recorded = (greedy(day, policy, prompts, graphs=graphs) for graphs in (False, True))
    day.check(f"graph beside eager tokens, {name}", parting(policy, plain, recorded), DTYPES[name][0])


def greedy(day: Day, policy: Policy, prompts: Sequence[Sequence[int]], *, graphs: bool) -> Responses:
    """Responses of full length."""
    options = SamplingOptions(
        max_new_tokens=day.sizes.compared,
        temperature=0.0,
        response_length="fixed",
        cuda_graphs="on" if graphs else "off",
    )
    return generate(policy, prompts, options, stop_ids=(), pad_id=0, generator=torch.Generator())


def parting(policy: Policy, ours: Responses, theirs: Responses) -> float:
    """How much less likely one token is than the other where two responses to a prompt part, at the most."""
    scores = [heedful.logprobs(policy, one) for one in (ours, theirs)]
    apart = [0.0]
    for row, (a, b) in enumerate(zip(ours.own_ids(), theirs.own_ids(), strict=True)):
        at = next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), None)
        if at is not None:
            apart.append(abs(float(scores[0][row, at] - scores[1][row, at])))
    return largest(apart)


@dataclass
class Given:
    """An engine whose responses do not depend on the device: random words, by the prompt."""

    policy: Policy
    config: PPOConfig

    def generate(self, prompts: Sequence[Any]) -> Responses:
        vocabulary, length = self.policy.lm.config.vocab_size, self.config.max_new_tokens
        words = [make_prompts(vocabulary, 1, length, len(one.prompt))[0] for one in prompts]
        return heedful.as_responses(self.policy, prompts, words, raw_prompts=True)

    def update_weights(self, policy: Policy) -> None:
        self.policy = policy

    def close(self) -> None:
        """Nothing is open."""


def ppo_step(policy: Policy, prompts: Sequence[str]) -> dict[str, float]:
    """Metrics of one step: two minibatches, so that the second shows what the first did to the weights."""
    config = PPOConfig(
        steps=1, rollout_batch_size=8, minibatch_size=4, micro_batch_size=2, ppo_epochs=1, max_new_tokens=16,
        learning_rate=1e-5, sampler=Given, memory_check=False, whiten_advantages=False,  # else the loss is next to 0
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        data = written(Path(folder) / "prompts.jsonl", [{"prompt": text} for text in prompts])
        return next(metrics for _, _, metrics in heedful.ppo_steps(config, model=policy, data=data, rewards=[vowels]))


def vowels(completions: Sequence[str], **_: Any) -> list[float]:
    """The share of vowels."""
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]


# Memory --------------------------------------------------------------------------------------------------------------


def memory(day: Day) -> None:
    """A pass that runs out of memory is halved until it fits, has the gradient of small passes, and leaves nothing behind."""
    lm, tokenizer = day.policy("0.5B")
    policy = Policy.from_pretrained(lm, tokenizer, dtype="auto")
    rows, text = day.sizes.full_rows, day.sizes.full_text
    ids = torch.tensor(make_prompts(day.sizes.shapes["0.5B"].vocabulary, rows, text, 0), device=day.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    batch = Batch(ids, mask, mask[:, 1:])
    few = rows // 8
    with day.part("a pass that runs out"):
        expected, _ = gradients_of(policy, batch, few)
        day.forget()
        before = day.allocated()
        with room_for(day, policy, batch, few):
            found, halvings = gradients_of(policy, batch, rows)
        limit = DTYPES[str(policy.compute_dtype).removeprefix("torch.")][1]
        day.check("gradient after halving", relative(found, expected), limit, halvings=halvings)
        day.check("passes that did not run out", float(halvings == 0), 0)
        del found
        day.forget()
        day.check("memory left behind, GB", day.allocated() - before, 0.1)
    with day.part("a capture that runs out"):
        capture_without_memory(day, policy)


def gradients_of(policy: Policy, batch: Batch, rows: int) -> tuple[list[Tensor], int]:
    """The gradient of all log-probs by passes of so many rows, and how often these had to be halved."""

    def undo() -> None:
        policy.zero_grad(set_to_none=True)

    def work(limit: MicroBatch) -> int:
        for _, part in micro_batches(batch, limit):
            policy(part.ids, part.attention_mask, part.response_mask).logprobs.sum().backward()
        return limit.rows

    undo()
    fits = AdaptiveMicroBatch().run(work, MicroBatch(rows), rows=len(batch.ids), undo=undo)
    found = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    undo()
    return found, (rows // fits).bit_length() - 1


@contextlib.contextmanager
def room_for(day: Day, policy: Policy, batch: Batch, rows: int) -> Iterator[None]:
    """On CUDA something else takes the memory but for what a pass of so many rows took; elsewhere a larger pass asks for
    more than any machine has."""
    if day.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        gradients_of(policy, batch, rows)
        needed = torch.cuda.max_memory_allocated() - held
        day.forget()
        free = torch.cuda.mem_get_info()[0]
        taken = torch.empty(int(free - 1.2 * needed), dtype=torch.uint8, device=day.device)
        try:
            yield
        finally:
            del taken
        return

    def run_out(_module: object, arguments: tuple[Tensor, ...]) -> None:
        if arguments[0].numel() > rows * batch.ids.shape[1]:
            torch.empty(2**60, dtype=torch.uint8)

    hook = policy.lm.get_input_embeddings().register_forward_pre_hook(run_out)
    try:
        yield
    finally:
        hook.remove()


def capture_without_memory(day: Day, policy: Policy) -> None:
    """A graph that memory runs out in is given up with one warning; the tokens come all the same, and others are captured."""
    if not capabilities(day.device).graphs:
        day.tell("a capture that runs out", left_out=f"{day.device.type} has no graphs")
        return

    def run_out(_module: object, _arguments: object) -> None:
        if torch.cuda.is_current_stream_capturing():
            torch.empty(2**45, dtype=torch.uint8, device="cuda")

    prompts = make_prompts(day.sizes.shapes["0.5B"].vocabulary, 8, 8, 1)
    expected = greedy(day, policy, prompts, graphs=False)
    starved = Policy.from_pretrained(copy.deepcopy(policy.lm), policy.tokenizer, dtype=policy.compute_dtype)
    for module in starved.lm.modules():
        if isinstance(module, torch.nn.Embedding):  # copied with the model, so that the copy that samples has it too
            module.register_forward_pre_hook(run_out)
    apart = []
    for one, told in ((starved, 1), (policy, 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            apart.append(parting(policy, greedy(day, one, prompts, graphs=True), expected))
        said = [str(warning.message) for warning in caught if "CUDA graph" in str(warning.message)]
        day.check(
            "warnings of a capture that runs out" if told else "of one after it", abs(len(said) - told), 0, said=said
        )
    limit = DTYPES[str(policy.compute_dtype).removeprefix("torch.")][0]
    day.check("tokens of both beside eager ones", largest(apart), limit)
