"""Models divided among ranks beside the same models whole, as JSON; run in several ranks by test_sharding.py."""

import copy
import json
import os
import shutil
import sys
import time
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from heedful import ConfigError, GRPOConfig, SFTConfig
from heedful.algorithms.online.average import WeightAverage
from heedful.configs.options import SamplingOptions
from heedful.data.batches import Batch
from heedful.distributed import ranks
from heedful.distributed.sharded_files import as_held
from heedful.distributed.sharding import (
    LockstepForwards,
    divided_like,
    gathered,
    gathered_on_first,
    held,
    is_divided,
    is_sharded,
    make_mesh,
    shard,
    whole_tensor,
)
from heedful.engines.generate import generate
from heedful.engines.teacher_forced import token_outputs
from heedful.engines.vllm import servers, weights
from heedful.kernels.device import autocast
from heedful.kernels.packing import can_pack
from heedful.kernels.weights import as_sampled
from heedful.models import add_adapters, load_policy, load_reward_model, load_tokenizer, load_value_model, save_policy
from heedful.models.heads import checkpoint_layers, disable_dropout
from heedful.training import compact_adamw, provenance, rank_consistency
from heedful.training.checkpoints import DIVIDED, read_state, write_divided, write_state
from heedful.training.fsdp import divide
from heedful.training.optimization import make_optimizer, optimizer_step
from heedful.training.rank_consistency import check_same_weights
from heedful.training.state import load_optimizer_state, load_trained_weights, trained_weights
from heedful.types import MicroBatch

(MODELS, FOLDER), NAMES = (Path(word) for word in sys.argv[1:3]), sys.argv[3:]
CPU, STEPS, ROWS = torch.device("cpu"), int(os.environ["STEPS"]), 5
CONFIG = SFTConfig(model="m", data="d", output="o", learning_rate=1e-3)
APART = replace(CONFIG, optimizer_device="cpu")
HALF = replace(CONFIG, weights_dtype="bfloat16", dtype="bfloat16")


def bytes_held(tensors):
    """Bytes of this rank's parts of some tensors."""
    parts = [held(tensor) for tensor in tensors if tensor is not None]
    return sum(part.numel() * part.element_size() for part in parts)


@cache
def loaded(name, *, value_head, dtype, stored):
    """A policy as its file has it, to be copied."""
    torch.manual_seed(3)
    return load_policy(str(MODELS / name), device=CPU, compute_dtype=dtype, with_value_head=value_head, stored=stored)


def policy(name="gpt2", *, value_head=True, lora=False, checkpointing=False, dtype=torch.float32, stored=torch.float32):
    made = copy.deepcopy(loaded(name, value_head=value_head, dtype=dtype, stored=stored))
    if lora:
        add_adapters(made.lm, replace(CONFIG, lora_rank=4), base=name, seed=0)
    if checkpointing:
        checkpoint_layers(made.lm)
        made.train()
    disable_dropout(made)
    with autocast(CPU, dtype):
        can_pack(made.lm.base_model)
    return made


def value_model(name="qwen3"):
    torch.manual_seed(3)
    made = load_value_model(str(MODELS / name), device=CPU, compute_dtype=torch.float32)
    can_pack(made.trunk)
    return made


def half(name="gpt2", **options):
    """A policy whose matrices are in bfloat16."""
    return policy(name, dtype=torch.bfloat16, stored=torch.bfloat16, **options)


def reward_model(name, dtype=torch.float32, products=None):
    torch.manual_seed(3)
    tokenizer = load_tokenizer(str(MODELS / name))
    made = load_reward_model(
        str(MODELS / name), tokenizer, device=CPU, compute_dtype=products or dtype, seed=1, stored=dtype
    )
    disable_dropout(made)
    made.try_packing()
    return made


ALL_ON_FIRST = [[0, 1, 2, 3, 4], []]


def batches():
    """Rows of different lengths: ids, attention mask, response mask and a weight for each."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        ids = torch.randint(5, 200, (ROWS, 24), generator=generator)
        mask = torch.ones(ROWS, 24, dtype=torch.bool)
        mask[1, :10] = mask[2, -5:] = mask[3, 20:] = False
        weights = torch.rand(ROWS, generator=generator)
        yield ids, mask, mask[:, 12:].clone(), weights


def loss_of(model, ids, mask, responses, weights):
    """A share of the batch's loss: what a trainer would divide by a count of the whole batch."""
    if hasattr(model, "classifier"):
        rows = [{"input_ids": row[real].tolist()} for row, real in zip(ids, mask, strict=True)]
        return (model(rows) * weights).sum() / ROWS
    outputs = model(ids, mask, responses)
    if hasattr(model, "trunk"):
        return (((outputs - weights[:, None]) ** 2) * responses).sum() / 40
    loss = (outputs.logprobs * weights[:, None]).sum()
    if outputs.values is not None:
        loss = loss + (((outputs.values - weights[:, None]) ** 2) * responses).sum()
    return loss / 40


def train(model, rows_of_passes, *, sync_every="step", max_norm=1.0, config=CONFIG):
    """Losses, gradient norms and the optimizer of some steps, in which this rank passes over some rows in micro-batches."""
    torch.manual_seed(7)
    optimizer = make_optimizer([(model, 1e-3)], config)
    losses, norms = [], []
    lockstep = LockstepForwards([model.dummy_loss], [model], sync_every) if is_sharded(model) else None
    number = int(ranks.largest(len(rows_of_passes))) if lockstep else len(rows_of_passes)
    for batch in batches():
        total = torch.zeros((), dtype=torch.float64)
        for i in range(number):
            if lockstep:
                lockstep.before(is_last=i == number - 1)
            if i < len(rows_of_passes):
                loss = loss_of(model, *(part[rows_of_passes[i]] for part in batch))
                loss.backward()
                total += loss.detach()
            else:
                lockstep.nothing()
        if lockstep:
            ranks.add([total])
        losses.append(float(total))
        norms.append(optimizer_step(optimizer, model, max_norm))
    return losses, norms, optimizer


shard_half = partial(shard, compute_dtype=torch.bfloat16)


def compared(make, mine=None, *, sync_every="step", divide=shard, **options):
    """The largest relative differences between a divided and a whole model after some steps."""
    mine = mine or [[0, 2, 4], [1, 3]]
    one = make()
    with ranks.alone():
        losses, norms, _ = train(one, [list(range(ROWS))], **options)
    several = make()
    divide(several, make_mesh(CPU))
    rows = mine[ranks.rank()]
    rows = rows if not rows or isinstance(rows[0], list) else [rows]
    found = train(several, rows, sync_every=sync_every, **options)
    check_same_weights(found[2])
    theirs = dict(several.named_parameters())
    pairs = [(whole_tensor(theirs[name].detach()), weight.detach()) for name, weight in one.named_parameters()]
    distance = sum(float((a - b).double().square().sum()) for a, b in pairs) ** 0.5
    length = sum(float(b.double().square().sum()) for _, b in pairs) ** 0.5
    moved = [float((a - b).detach().abs().max()) for a, b in zip(one.parameters(), make().parameters(), strict=True)]
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(found[0], losses, strict=True)),
        "norm": max(abs(a - b) / abs(b) for a, b in zip(found[1], norms, strict=True)),
        "weights": distance / length,
        "names": [name for name, _ in several.named_parameters()] == [name for name, _ in one.named_parameters()],
        "moved": max(moved),
        "whole": {name: str(weight.dtype) for name, weight in several.named_parameters() if not is_divided(weight)},
    }


class Gathers(TorchDispatchMode):
    """Counts bytes of weights that are gathered."""

    received = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function is torch.ops.c10d._allgather_base_.default:
            self.received += args[0].nbytes
        return made


def gathered_in_half():
    """Steps in bfloat16 with blocks gathered in float32, and in bfloat16: differences, and bytes gathered in a pass."""
    ends, bytes_of_pass = [], []
    for sharded in (shard, shard_half):
        model = policy("qwen3", value_head=False, dtype=torch.bfloat16)
        sharded(model, make_mesh(CPU))
        with Gathers() as gathers, torch.no_grad():
            loss_of(model, *next(batches()))
        bytes_of_pass.append(gathers.received)
        losses, norms, _ = train(model, [[[0], [2, 3], [4]], [[1]]][ranks.rank()], max_norm=0.0)
        ends.append([losses, norms, [whole_tensor(p.detach()) for p in model.parameters()]])
    (losses, norms, weights_), (again, norms_again, weights_again) = ends
    same = losses == again and all(map(torch.equal, weights_, weights_again))
    return {
        "same": same,
        "norm": max(abs(a / b - 1) for a, b in zip(norms, norms_again, strict=True)),
        "bytes": bytes_of_pass,
        "whole": [name for name, weight in model.named_parameters() if not is_divided(weight)],
    }


def stored_in_half():
    """A policy that is in bfloat16 in its file and trained in float32: converted unit by unit while it is sharded, beside the
    same one loaded in float32."""
    folder = FOLDER / f"half-{ranks.rank()}"
    shutil.copytree(MODELS / "qwen3", folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, folder / "model.safetensors")
    stored = iter((torch.float32, None, torch.float32))
    seen = []

    def divide_it(module, mesh):
        seen.append(sorted({str(p.dtype) for p in module.parameters()}))
        shard(module, mesh, trained=torch.float32)
        seen.append(sorted({str(p.dtype) for p in module.parameters()}))

    found = compared(
        lambda: policy(str(folder), dtype=torch.bfloat16, stored=next(stored)), ALL_ON_FIRST, divide=divide_it
    )
    return found | {"dtypes": seen}


def memory():
    """Bytes that this rank holds of a divided model in training, and of the same one whole."""
    found = []
    for divides in (False, True):
        model = policy("qwen3")
        if divides:
            shard(model, make_mesh(CPU))
        optimizer = make_optimizer([(model, 1e-3)], CONFIG)
        batch = next(batches())
        loss_of(model, *batch).backward()
        optimizer.step()
        moments = [values[name] for values in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        parameters = list(model.parameters())
        found.append([bytes_held(tensors) for tensors in (parameters, (p.grad for p in parameters), moments)])
    return found


def states_read():
    """Rows whose states this rank has read for a value head, their bytes and tokens."""
    ids, mask, responses, _ = next(batches())
    model, batch = policy("qwen3", dtype=torch.bfloat16), Batch(ids, mask, responses)
    read = token_outputs(model, batch, temperature=1.0, micro_batch=MicroBatch(2), with_states=True).states
    return {"rows": sorted(read), "bytes": bytes_held(read.values()), "tokens": int(responses[sorted(read)].sum())}


class Casts(TorchDispatchMode):
    """Counts the copies of parameters in bfloat16 that are there, and the bytes of each unit's gradients that are sent."""

    def __init__(self):
        super().__init__()
        self.made, self.sent = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function is torch.ops.fsdp.chunk_cat.default:
            self.sent.append(bytes_held([kwargs["out"]]))
        is_cast = function is torch.ops.aten._to_copy.default and isinstance(args[0], torch.nn.Parameter)
        if is_cast and made.dtype == torch.bfloat16:
            self.made.append((StorageWeakRef(made.untyped_storage()), made.numel() * 2))
        return made

    def there(self):
        return sum(size for storage, size in self.made if not storage.expired())


def whole_for_a_time(checkpointing=False, stored=torch.float32):
    """Bytes that this rank holds of whole weights, of their casts and of whole gradients, in lockstep in bfloat16."""
    model = policy("qwen3", value_head=False, checkpointing=checkpointing, dtype=torch.bfloat16, stored=stored)
    divide(replace(CONFIG, shard="full"), CPU, model)
    groups = [part._get_fsdp_state()._fsdp_param_group for part in model.modules() if isinstance(part, FSDPModule)]
    parameters = [one for group in groups if group is not None for one in group.fsdp_params]
    casts, seen, whole = Casts(), [], []

    def look(*_):
        there = [one._unsharded_param for one in parameters if hasattr(one, "_unsharded_param")]
        whole.append(sum(parameter.untyped_storage().size() for parameter in there))

    first, norm = model.lm.base_model.layers[0], model.lm.base_model.norm
    first.mlp.register_forward_hook(look)
    first.mlp.register_full_backward_pre_hook(look)
    norm.register_forward_hook(lambda *_: seen.append(casts.there()))
    batch = next(batches())
    with casts:
        with torch.no_grad():
            loss_of(model, *batch)
        model.set_requires_gradient_sync(False)
        loss = loss_of(model, *batch)
        seen.append(casts.there())
        loss.backward()
        gradients = [*(one._unsharded_param.grad for one in parameters), *(p.grad for p in model.parameters())]
        gradients += [one.unsharded_accumulated_grad for one in parameters]
        held = {"casts": list(seen), "weights": list(whole), "gradients": bytes_held(gradients)}
        model.set_requires_gradient_sync(True)
        loss_of(model, *batch).backward()
    copy = {id(p): p for p in gathered(model, convert=as_sampled(torch.bfloat16)).lm.parameters()}
    return held | {"sent": casts.sent, "copy that samples": bytes_held(copy.values())}


def copies():
    """What samples and what is saved: whole copies of a divided policy."""
    one, several = policy(), policy()
    shard(several, make_mesh(CPU))
    prompts, options = [[7, 8, 9], [10, 11], [12] * 5], SamplingOptions(max_new_tokens=12)
    drawn = [
        generate(model, prompts, options, stop_ids=(1,), pad_id=0, generator=torch.Generator().manual_seed(9))
        for model in (one, several)
    ]
    same = [
        torch.equal(a, b) for a, b in ((drawn[0].batch.ids, drawn[1].batch.ids), (drawn[0].logprobs, drawn[1].logprobs))
    ]
    heads = [gathered(model).lm.get_output_embeddings().weight for model in (one, several)]
    first = gathered_on_first(several)
    if first is not None:
        tokenizer = load_tokenizer(str(MODELS / "gpt2"))
        for model, name in ((one, "one"), (first, "several")):
            save_policy(model, tokenizer, FOLDER / name, stop_ids=(1,))
    tied = gathered(several).lm
    return {
        "same": same,
        "equal": torch.equal(*heads),
        "tied": tied.get_output_embeddings().weight is tied.get_input_embeddings().weight,
        "on first": first is not None,
        "whole is itself": gathered(one) is one,
    }


def average():
    """An average of weights, put in place and taken out again."""
    several = policy()
    shard(several, make_mesh(CPU))
    mean = WeightAverage(several, 0.5)
    before = [whole_tensor(p.detach()).clone() for p in several.parameters()]
    with torch.no_grad():
        for parameter in several.parameters():
            parameter.mul_(1.5)
    mean.update()
    batch = next(batches())
    with torch.no_grad():
        moved = float(loss_of(several, *batch))
        with mean.in_place():
            inside = [whole_tensor(p.detach()).clone() for p in several.parameters()]
            averaged = float(loss_of(several, *batch))
        after = float(loss_of(several, *batch))
    expected = policy()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.mul_(1.25)
        wanted = float(loss_of(expected, *batch))
    held = max(float((1.25 * a - b).abs().max()) for a, b in zip(before, inside, strict=True))
    return {"held": held, "loss": abs(averaged / wanted - 1), "back": after == moved, "differs": averaged != moved}


def states(name, make=policy, config=CONFIG, divide=shard):
    """A state that all ranks wrote, read by divided models and by whole ones; and that of a whole model by a divided one."""
    several = make()
    divide(several, make_mesh(CPU))
    *_, optimizer = train(several, [[ranks.rank(), 2 + ranks.rank()]], config=config)
    state = {
        "model": trained_weights(several),
        "optimizer": optimizer.state_dict(),
        "seed": torch.arange(3),
        "词": (1, 2.5),
    }
    folder = FOLDER / name
    if ranks.is_first():
        write_state(folder, state)
    ranks.broadcast(None)
    write_divided(folder / DIVIDED, state)
    ranks.broadcast(None)
    read = read_state(folder)
    names = sorted(path.suffix for path in folder.rglob("*") if path.is_file())

    other = make()
    divide(other, make_mesh(CPU))
    second = make_optimizer([(other, 1e-3)], config)
    load_trained_weights(other, read["model"])
    load_optimizer_state(second, read["optimizer"])
    alone = make()
    third = make_optimizer([(alone, 1e-3)], config)
    load_trained_weights(alone, read["model"])
    load_optimizer_state(third, read["optimizer"])
    fourth = make()
    divide(fourth, make_mesh(CPU))
    last = make_optimizer([(fourth, 1e-3)], config)
    load_trained_weights(fourth, trained_weights(alone))
    load_optimizer_state(last, third.state_dict())

    def same(model, its):
        weights = zip(model.parameters(), several.parameters(), strict=True)
        moments = (
            (a[name], b[name])
            for a, b in zip(its.state.values(), optimizer.state.values(), strict=True)
            for name in ("exp_avg", "exp_avg_sq", "step")
        )
        return all(torch.equal(whole_tensor(a.detach()), whole_tensor(b.detach())) for a, b in (*weights, *moments))

    kept = as_held(read["model"]["lm.transformer.wte.weight"], next(iter(alone.parameters())))
    return {
        "suffixes": sorted(set(names)),
        "tree": [read["seed"].tolist(), list(read["词"])],
        "divided": same(other, second),
        "whole": same(alone, third),
        "from whole": same(fourth, last),
        "kind": type(kept).__name__,
    }


def noise():
    """Steps of weights in bfloat16, divided and whole: the largest difference. Blocks of noise end within a rank's part, and
    torch's own generators differ from rank to rank and from one to the other."""
    before, compact_adamw.BLOCK = compact_adamw.BLOCK, 7
    torch.manual_seed(3)
    one = torch.nn.Linear(5, 9).bfloat16()  # the same on every rank
    several = copy.deepcopy(one)
    fully_shard(several, mesh=make_mesh(CPU))
    for made in (one, several):
        generator = torch.Generator().manual_seed(2)
        torch.manual_seed(torch.initial_seed() + 1 + ranks.rank())
        optimizer = make_optimizer([(made, 1e-3)], HALF)
        for _ in range(STEPS):
            for weight in made.parameters():
                weight.grad = divided_like(torch.randn(weight.shape, generator=generator).bfloat16(), weight)
            optimizer.step()
    compact_adamw.BLOCK = before
    pairs = zip(one.parameters(), several.parameters(), strict=True)
    return max(float((a - whole_tensor(b.detach())).detach().abs().max()) for a, b in pairs)


def averaged():
    """Steps whose gradients are averaged over the ranks, as FSDP2 does if nobody says otherwise."""

    def divide(model, mesh):
        shard(model, mesh)
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(float(ranks.size()))

    return compared(policy, divide=divide)


def refused():
    """What is said of what cannot be divided."""
    mixture = policy()
    mixture.lm.config.num_experts = 4
    config = replace(CONFIG, shard="full")
    return [
        message_of(lambda: make_mesh(CPU, 3)),
        message_of(lambda: shard(torch.nn.Linear(2, 2), make_mesh(CPU))),
        message_of(lambda: divide(config, CPU, mixture)),
    ]


def message_of(work):
    try:
        return work()
    except ConfigError as error:
        return str(error)


def patience():
    """Seconds for which ranks of a row and of a column wait for one another."""
    mesh = make_mesh(CPU, 2, timedelta(minutes=7))
    return [group._get_backend(CPU).options._timeout.total_seconds() for group in mesh.get_all_groups()]


def differs():
    """What is said of a rank with another version of a library, and of one whose code differs by a line."""
    here, told = Path(rank_consistency.__file__), []
    other = FOLDER / f"heedful-{ranks.rank()}"
    shutil.copytree(here.parents[1], other)
    for plant in ("versions", "code"):
        with pytest.MonkeyPatch.context() as patched:
            if ranks.rank() == 1 and plant == "versions":
                patched.setattr(rank_consistency, "versions", lambda: provenance.versions() | {"torch": "0.1"})
            elif plant == "code":
                patched.setattr(rank_consistency, "__file__", str(other / "train" / here.name))
                if ranks.rank() == 1:
                    with (other / "errors.py").open("a", encoding="utf-8") as file:
                        file.write("# another line\n")
            told.append(message_of(lambda: ranks.check_same(rank_consistency._facts(CONFIG), rank_consistency.REMEDY)))
    return told


def for_servers():
    """How often whole weights are put together and written down: before the first batch, and after a step; on all ranks."""
    model, all_gather_into = policy(), []
    shard(model, make_mesh(CPU))

    def counted(lm, dtype):
        all_gather_into.append(1)
        return weights.collect(lm, dtype)

    config = GRPOConfig(model="m", data="d", output="o", sampler=("vllm:http://127.0.0.1:9",))
    to = servers.Servers(config, stop_ids=[1], pad_id=0)
    to.folder, servers.collect = FOLDER / "for servers", counted
    to._start = lambda drawing: drawing.close()
    found = []
    for changes in (False, False, True, False):
        if changes and ranks.rank() == 1:  # a part that only this rank has
            with torch.no_grad():
                held(next(model.lm.parameters())).add_(1.0)
        to.begin(model, [[5, 6]], torch.Generator())
        found.append([len(all_gather_into), len(list(to.folder.glob("v-*")))])
    to.close()
    return ranks.gather(found)


class Live(TorchDispatchMode):
    """Keeps account of the memory that operations made and that is still there."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for one in made if isinstance(made, list | tuple) else [made]:
            if (
                type(one) is torch.Tensor and not function.is_view
            ):  # not of divided ones, whose storage is said to be whole
                self.made.append(StorageWeakRef(one.untyped_storage()))
        return made

    def there(self):
        there = {one.cdata: one for one in self.made if not one.expired()}.values()
        return sum(torch.UntypedStorage._new_with_weak_ptr(one.cdata).nbytes() for one in there)


def collected(kinds):
    """What is written for servers in bfloat16, of divided policies beside whole ones, and bytes of it all while it is."""
    found = {}
    for name, make in kinds.items():
        one, several = make(), make()
        for model in (one, several):
            torch.manual_seed(4)
            for part, parameter in model.lm.named_parameters():
                if "lora_B" in part:
                    torch.nn.init.normal_(parameter)
        shard(several, make_mesh(CPU))
        several_bytes = written(several, FOLDER / name / "several")
        if ranks.is_first():
            with ranks.alone():
                written(one, FOLDER / name / "one")
            files = [FOLDER / name / part / "v-000001" / "model.safetensors" for part in ("one", "several")]
            weights = sum(p.numel() for part, p in one.lm.named_parameters() if ".lora_" not in part)
            found[name] = [files[0].read_bytes() == files[1].read_bytes(), several_bytes / weights]
    return found


def written(model, folder):
    """Bytes that are there when a model's weights for servers are saved, on rank 0."""
    config = GRPOConfig(model="m", data="d", output="o", sampler=("vllm:http://127.0.0.1:9",))
    to, live, seen = servers.Servers(config, stop_ids=[1], pad_id=0), Live(), []
    to.folder, to.dtype = folder, torch.bfloat16
    save = PreTrainedModel.save_pretrained

    def looked_at(shell, *args, **kwargs):
        seen.append(live.there())
        return save(shell, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched, live:
        patched.setattr(PreTrainedModel, "save_pretrained", looked_at)
        to.begin(model, [[5, 6]], torch.Generator())
    to.close()
    return sum(seen)


EVERY = {
    "collected": lambda: collected({"tied": policy}),
    "collected, others": lambda: collected(
        {"untied": lambda: policy("qwen3"), "adapters": lambda: policy("llama", lora=True)}
    ),
    "for servers": for_servers,
    "patience": patience,
    "differs": differs,
    "tied, with a value head": lambda: compared(policy),
    "untied": lambda: compared(lambda: policy("qwen3")),
    "adapters": lambda: compared(lambda: policy("llama", lora=True)),
    "layers recomputed": lambda: compared(lambda: policy("qwen2", checkpointing=True)),
    "a rank without rows": lambda: compared(policy, ALL_ON_FIRST),
    "unequal micro-batches": lambda: compared(policy, [[[0], [2, 3], [4]], [[1]]]),
    "sums in every micro-batch": lambda: compared(policy, [[[0], [2, 3], [4]], [[1]]], sync_every="micro-batch"),
    "reward model": lambda: compared(lambda: reward_model("llama")),
    "encoder": lambda: compared(lambda: reward_model("deberta-v2"), [[[0, 1], [2], [3]], [[4]]]),
    "value model": lambda: compared(value_model),
    "in float64": lambda: compared(lambda: policy().double()),
    "moments of its own": lambda: compared(policy, config=APART),
    "bfloat16": lambda: compared(half, ALL_ON_FIRST, config=HALF, max_norm=0.0),
    "stored in half precision": stored_in_half,
    "bfloat16, untied": lambda: compared(lambda: half("qwen3"), ALL_ON_FIRST, config=HALF, max_norm=0.0),
    "bfloat16, reward model": lambda: compared(
        lambda: reward_model("llama", torch.bfloat16), ALL_ON_FIRST, config=HALF, max_norm=0.0
    ),
    "bfloat16, encoder": lambda: compared(
        lambda: reward_model("deberta-v2", torch.bfloat16), ALL_ON_FIRST, config=HALF, max_norm=0.0
    ),
    "bfloat16, rows divided": lambda: compared(half, [[[0], [2, 3], [4]], [[1]]], config=HALF),
    "noise": noise,
    "gathered in half": gathered_in_half,
    "products in bfloat16": lambda: compared(
        lambda: policy(dtype=torch.bfloat16), ALL_ON_FIRST, divide=shard_half, max_norm=0.0
    ),
    "products in bfloat16, encoder": lambda: compared(
        lambda: reward_model("deberta-v2", torch.float32, torch.bfloat16), ALL_ON_FIRST, divide=shard_half, max_norm=0.0
    ),
    "averaged": averaged,
    "refused": refused,
    "memory": memory,
    "states read": states_read,
    "whole for a time": lambda: [whole_for_a_time(checkpointing) for checkpointing in (False, True)],
    "whole for a time, bfloat16": lambda: whole_for_a_time(stored=torch.bfloat16),
    "copies": copies,
    "average": average,
    "states": lambda: states("state"),
    "states, bfloat16": lambda: states("half", half, HALF),
    "states, products in bfloat16": lambda: states("products", lambda: policy(dtype=torch.bfloat16), divide=shard_half),
}


def main():
    ranks.join(CPU, timedelta(seconds=300))
    found = {}
    for name in NAMES:
        started = time.perf_counter()
        found[name] = EVERY[name]()
        print(name, found[name], f"{time.perf_counter() - started:.1f} s", file=sys.stderr)
    print(json.dumps(found))
    ranks.leave()


main()
