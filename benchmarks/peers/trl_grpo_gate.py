"""What TRL 1.16's GRPOTrainer makes of saved rollouts: gate.py runs this and compares.

One iteration in one micro-batch, without a KL penalty. The old log-probs are those of --behaviour, which is what sampled; the
policy that learns is another.
"""

import argparse
import os
import tempfile
import warnings

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name in ("policy", "behaviour", "rollouts", "output"):
    parser.add_argument(f"--{name}", required=True)
parser.add_argument("--group", type=int, required=True)
options = parser.parse_args()
os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

saved = np.load(options.rollouts)
ids, prompt_length = torch.from_numpy(saved["ids"]), int(saved["prompt_length"])
lengths = saved["lengths"].tolist()
tokenizer = AutoTokenizer.from_pretrained(options.policy, padding_side="left")
policy, behaviour = (
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (options.policy, options.behaviour)
)


def saved_rollouts(*_):
    responses = [row[prompt_length : prompt_length + n].tolist() for row, n in zip(ids, lengths, strict=True)]
    return {"prompt_ids": ids[:, :prompt_length].tolist(), "completion_ids": responses, "logprobs": None}


def vowels(completions, **_):
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]


scratch = tempfile.TemporaryDirectory()
config = GRPOConfig(
    output_dir=scratch.name,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    per_device_train_batch_size=len(ids),
    num_generations=options.group,
    max_completion_length=ids.shape[1] - prompt_length,
    max_steps=1,
    beta=0.0,
    temperature=1.0,
    use_cpu=True,
    bf16=False,
    max_grad_norm=0.0,
)
trainer = GRPOTrainer(
    model=policy,
    reward_funcs=vowels,
    args=config,
    processing_class=tokenizer,
    train_dataset=Dataset.from_list([{"prompt": tokenizer.decode(row[:prompt_length])} for row in ids]),
    rollout_func=saved_rollouts,
)
found: dict[str, torch.Tensor] = {}
plain_experience, plain_logprobs = trainer._generate_and_score_completions, trainer._get_per_token_logps_and_entropies
plain_loss, plain_backward = trainer._compute_loss, trainer.accelerator.backward


def recorded_experience(inputs):
    experience = plain_experience(inputs)
    rows = torch.cat([experience["prompt_ids"], experience["completion_ids"]], dim=1)
    mask = torch.cat([experience["prompt_mask"], experience["completion_mask"]], dim=1)
    with torch.no_grad():
        logprobs = behaviour(input_ids=rows, attention_mask=mask).logits[:, prompt_length - 1 : -1].log_softmax(dim=-1)
    logprobs = logprobs.gather(2, experience["completion_ids"].unsqueeze(2)).squeeze(2)
    found["old_logprobs"] = logprobs * experience["completion_mask"]  # 0 at padding, as TRL's own are
    found["advantages"] = experience["advantages"]
    return {**experience, "old_per_token_logps": found["old_logprobs"], "row": torch.arange(len(ids))}


def recorded_loss(model, inputs):
    found["row"] = inputs["row"]  # the trainer shuffles them
    found["policy_loss"] = plain_loss(model, inputs)
    return found["policy_loss"]


def recorded_logprobs(*arguments, **named):
    outputs = plain_logprobs(*arguments, **named)
    found["shuffled_logprobs"] = outputs[0]
    return outputs


def recorded_backward(loss, **named):
    plain_backward(loss, **named)
    norms = [p.grad.norm() for p in policy.parameters() if p.grad is not None]
    found["policy_grad_norm"] = torch.stack(norms).norm()


trainer._generate_and_score_completions, trainer._get_per_token_logps_and_entropies = (
    recorded_experience,
    recorded_logprobs,
)
trainer._compute_loss, trainer.accelerator.backward = recorded_loss, recorded_backward
trainer.train()
found["logprobs"] = found.pop("shuffled_logprobs")[found.pop("row").argsort()]
np.savez(options.output, **{name: tensor.detach().numpy() for name, tensor in found.items()})
