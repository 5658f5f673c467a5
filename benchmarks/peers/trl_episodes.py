"""What TRL 1.16's GRPOTrainer makes of an environment and of given turns: same_episodes.py runs this and compares."""

import argparse
import json
import os
import tempfile
import warnings
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--folder", type=Path, required=True)
options = parser.parse_args()
os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
warnings.filterwarnings("ignore")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from word_game import WordGame  # noqa: E402

folder = options.folder
turns = json.loads((folder / "turns.json").read_text(encoding="utf-8"))
rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
said = dict.fromkeys(range(len(rows)), 0)
seen = {}


def forced(prompt_ids, *_args, **_kwargs):
    """The next turn of each row, which is known by the number in its prompt."""
    found = []
    for ids in prompt_ids:
        row = int(tokenizer.decode(ids).partition("Game ")[2].partition(":")[0])
        found.append([*tokenizer(turns[row][said[row]], add_special_tokens=False).input_ids, tokenizer.eos_token_id])
        said[row] += 1
    return found, None


class Watched(GRPOTrainer):
    def _generate(self, prompts):
        found = super()._generate(prompts)
        seen["rows"] = found[:3]
        return found

    def _calculate_rewards(self, *args, **kwargs):
        found = super()._calculate_rewards(*args, **kwargs)
        seen["rewards"] = found.nansum(dim=1).tolist()
        return found


scratch = tempfile.TemporaryDirectory()
trainer = Watched(
    model=model,
    args=GRPOConfig(
        output_dir=scratch.name,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        per_device_train_batch_size=len(rows),
        num_generations=2,
        max_completion_length=2048,
        max_steps=1,
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    environment_factory=WordGame,
)
trainer._generate_single_turn = forced
inputs = [dict(row) for row in rows]
trainer.model.train()
trainer._generate_and_score_completions(inputs)
names = ("prompt_ids", "completion_ids", "mask")
found = [dict(zip(names, row, strict=True)) for row in zip(*seen["rows"], strict=True)]
result = [one | {"reward": reward} for one, reward in zip(found, seen["rewards"], strict=True)]
(folder / "trl.json").write_text(json.dumps(result), encoding="utf-8")
