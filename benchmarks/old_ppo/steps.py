"""Three calls of `PPOTrainer.step` per case, by TRL 0.11.4 or by `heedful.compat.trl`. same_steps.py runs it with both.

PYTHON benchmarks/old_ppo/steps.py LIBRARY FOLDER, where LIBRARY is trl or heedful.compat.trl

Reads models and FOLDER/cases.json; writes FOLDER/LIBRARY/CASE.npz: all stats of each step, and for each trained weight its
displacement, the value after the steps minus the value before. It uses only names that both libraries have.
"""

import importlib
import json
import os
import sys
import warnings
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

library, folder = importlib.import_module(sys.argv[1]), Path(sys.argv[2])
ROWS, STEPS = 8, 3


def batches():
    """Queries, responses, scores, and masks with holes, for each step."""
    draw = np.random.RandomState(0)
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
    trainer = library.PPOTrainer(config, model, reference, tokenizer, optimizer=sgd)
    if sys.argv[1] == "trl" and config.use_score_scaling:
        make_tensors(trainer.running)
    numbers = {}
    for step, (queries, responses, scores, masks) in enumerate(list(batches())[: case["steps"]]):
        stats = trainer.step(queries, responses, scores, *([masks] if case["masks"] else []))
        timeless = {key: value for key, value in stats.items() if not key.startswith("time/")}
        numbers |= {f"{step} {key}": np.asarray(value) for key, value in timeless.items()}
        numbers[f"{step} types"] = np.asarray([f"{key} {type(value).__name__}" for key, value in stats.items()])
    numbers |= {f"moved {key}": (weight.detach() - before[key]).numpy() for key, weight in trained.items()}
    np.savez(folder / sys.argv[1] / f"{name}.npz", **numbers)


(folder / sys.argv[1]).mkdir(exist_ok=True)
for name, case in json.loads((folder / "cases.json").read_text(encoding="utf-8")).items():
    run(name, case)
