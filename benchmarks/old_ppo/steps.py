"""Three calls of `PPOTrainer.step` per case, by TRL 0.11.4 or by `heedful.compat.trl`. same_steps.py runs it with both.

PYTHON benchmarks/old_ppo/steps.py LIBRARY FOLDER [--read], where LIBRARY is trl or heedful.compat.trl

Reads models and FOLDER/cases.json; writes FOLDER/LIBRARY/CASE.npz: all stats of each step, and for each trained weight its
displacement, the value after the steps minus the value before. Saves the models of some cases. Under torchrun it runs the
cases of that many processes. With --read it loads the models that both libraries saved, and writes their logits, values and
scores. It uses only names that both libraries have.
"""

import importlib
import json
import os
import sys
import warnings
from pathlib import Path

os.environ |= {
    "ACCELERATE_USE_CPU": "true",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
}
warnings.filterwarnings("ignore")

import accelerate  # noqa: E402
import datasets  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

accelerate.PartialState(cpu=True)  # joins the processes of torchrun
library, folder = importlib.import_module(sys.argv[1]), Path(sys.argv[2])
ROWS, STEPS = 8, 3
RANK, PROCESSES = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))


def batches():
    """Queries, responses, scores, and masks with holes, for each step."""
    draw = np.random.RandomState(RANK)
    for _ in range(STEPS):
        queries = [torch.tensor(draw.randint(10, 250, draw.randint(3, 8))) for _ in range(ROWS)]
        responses = [torch.tensor(draw.randint(10, 250, draw.randint(5, 11))) for _ in range(ROWS)]
        scores = [torch.tensor(float(score), dtype=torch.float32) for score in 2 * draw.randn(ROWS) + 1]
        masks = [torch.ones_like(response) for response in responses]
        for mask in masks:
            mask[1 : draw.randint(2, 5)] = 0
        masks[0][-1] = 0
        yield queries, responses, scores, masks


def make_tensors(scores):
    """TRL 0.10 to 0.11 call ``running.std.to(...)`` on a float, so score scaling ends in an AttributeError."""

    def update(values):
        result = type(scores).update(scores, values)
        scores.mean, scores.std = torch.tensor(scores.mean), torch.tensor(scores.std)
        return result

    scores.update = update


def without_padding(stats, queries, responses, orders):
    """Log-probs and ratios of padding on the left as 0: transformers 4 and 5 differ there, and no other stat has them."""
    lengths = [len(query) + len(response) - 1 for query, response in zip(queries, responses, strict=True)]
    width = max(lengths)
    inside = np.stack([np.arange(width) >= width - length for length in lengths])
    for name in ("objective/logprobs", "objective/ref_logprobs"):
        stats[name] = np.where(inside, stats[name], 0)
    ratio = stats["ppo/policy/ratio"].reshape(-1, width)
    stats["ppo/policy/ratio"] = np.where(inside[np.concatenate(orders)[: len(ratio)]], ratio, 0)


def run(name, case):
    torch.manual_seed(0)
    model_class = library.AutoModelForCausalLMWithValueHead
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    model = model_class.from_pretrained(case["model"], **({"peft_config": lora} if case["lora"] else {}))
    reference = None if case["lora"] else model_class.from_pretrained(case["reference"])
    trained = {key: weight for key, weight in model.named_parameters() if weight.requires_grad}
    if case["lora"]:
        draw = torch.Generator().manual_seed(0)
        for key in sorted(key for key in trained if "lora_" in key):
            trained[key].data.normal_(std=0.05, generator=draw)
    before = {key: weight.detach().clone() for key, weight in trained.items()}
    file = str(Path(case["model"]) / "tokenizer.json")  # transformers 4 does not know the class that 5 writes beside it
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, pad_token="<|pad|>", eos_token="<|endoftext|>")
    tokenizer.padding_side = case["padding_side"]
    config = library.PPOConfig(learning_rate=1e-3, batch_size=ROWS, **case["config"])
    sgd = torch.optim.SGD(trained.values(), lr=1e-3) if case["optimizer"] == "SGD" else None
    dataset = datasets.Dataset.from_dict({"query": ["今天天气"] * ROWS}) if case["from_dataloader"] else None
    trainer = library.PPOTrainer(
        config, model, reference, tokenizer, optimizer=sgd, dataset=dataset, data_collator=lambda rows: rows
    )
    if sys.argv[1] == "trl" and config.use_score_scaling:
        make_tensors(trainer.running)
    if PROCESSES > 1:  # "cpu:0", of which TRL's gather_stats makes a copy, sums that, and divides the original
        trainer.accelerator.state.device = torch.device("cpu")
    numbers, orders, permutation = {}, [], np.random.permutation
    np.random.permutation = lambda rows: orders.append(permutation(rows)) or orders[-1]
    for step, (queries, responses, scores, masks) in enumerate(list(batches())[: case["steps"]]):
        orders.clear()
        for _ in trainer.dataloader or [None]:  # one batch, which is the last
            stats = trainer.step(queries, responses, scores, *([masks] if case["masks"] else []))
        numbers[f"{step} types"] = np.asarray([f"{key} {type(value).__name__}" for key, value in stats.items()])
        if case["padding_side"] == "left":
            without_padding(stats, queries, responses, orders)
        timeless = {key: value for key, value in stats.items() if not key.startswith("time/")}
        numbers |= {f"{step} {key}": np.asarray(value) for key, value in timeless.items()}
    np.random.permutation = permutation
    numbers |= {f"moved {key}": (weight.detach() - before[key]).numpy() for key, weight in trained.items()}
    if RANK == 0:
        np.savez(folder / sys.argv[1] / f"{name}.npz", **numbers)
    if case["saved"]:
        saved = folder / "saved" / f"{case['saved']} by {sys.argv[1]}"
        saved.mkdir(parents=True)  # TRL writes an adapter's head into a folder that must be there
        model.save_pretrained(str(saved))


def read(saved):
    """Logits and values of a saved model; scores by it and the reward model's adapter, if it is an adapter."""
    is_adapter = (saved / "adapter_config.json").exists()
    rewarded = {"reward_adapter": str(folder / "reward")} if is_adapter else {}
    model = library.AutoModelForCausalLMWithValueHead.from_pretrained(str(saved), **rewarded).eval()
    ids = torch.arange(20, 40).view(2, 10)
    with torch.no_grad():
        logits, _, values = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    scores = model.compute_reward_score(input_ids=ids, attention_mask=torch.ones_like(ids)) if is_adapter else values
    np.savez(
        folder / sys.argv[1] / f"{saved.name}.npz", logits=logits.numpy(), values=values.numpy(), scores=scores.numpy()
    )


(folder / sys.argv[1]).mkdir(exist_ok=True)
cases = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
if "--read" in sys.argv:
    for saved in sorted((folder / "saved").glob("*")):
        read(saved)
else:
    for name in (name for name in cases if cases[name]["processes"] == PROCESSES):
        run(name, cases[name])
