"""What TRL 1.12's PPOTrainer makes of saved rollouts: gate.py runs this and compares.

Its loop is one function, so the pieces are taken from the functions that it calls. One iteration, one PPO epoch, one
micro-batch. The old log-probs are those of --behaviour, which is what sampled; the policy that learns is another.
"""

import argparse
import os
import tempfile
import warnings

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name in ("policy", "behaviour", "reference", "value", "reward", "rollouts", "output"):
    parser.add_argument(f"--{name}", required=True)
parser.add_argument("--kl-coef", type=float, required=True)
parser.add_argument("--natural-eos", action="store_true")
options = parser.parse_args()
os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import trl.experimental.ppo.ppo_trainer as ppo_module  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer  # noqa: E402

saved = np.load(options.rollouts)
ids, prompt_length = torch.from_numpy(saved["ids"]), int(saved["prompt_length"])
tokenizer = AutoTokenizer.from_pretrained(options.policy, padding_side="left")
policy, behaviour, reference = (
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for folder in (options.policy, options.behaviour, options.reference)
)
value, reward = (
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    for folder in (options.value, options.reward)
)
scratch = tempfile.TemporaryDirectory()
config = PPOConfig(
    output_dir=scratch.name,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    per_device_train_batch_size=len(ids),
    gradient_accumulation_steps=1,
    num_ppo_epochs=1,
    total_episodes=len(ids),
    response_length=ids.shape[1] - prompt_length,
    stop_token="eos" if options.natural_eos else None,
    local_rollout_forward_batch_size=len(ids),
    temperature=1.0,
    kl_coef=options.kl_coef,
    num_sample_generations=0,
    use_cpu=True,
    bf16=False,
)
prompts = Dataset.from_dict({"input_ids": 2 * ids[:, :prompt_length].tolist()})
trainer = PPOTrainer(
    args=config,
    processing_class=tokenizer,
    model=policy,
    ref_model=reference,
    reward_model=reward,
    value_model=value,
    train_dataset=prompts,
    eval_dataset=prompts,
)
found: dict[str, torch.Tensor] = {}
logprob_calls: list[torch.Tensor] = []
reward_calls: list[tuple[torch.Tensor, ...]] = []
plain_logprobs, plain_reward, plain_whiten = (
    getattr(ppo_module, name) for name in ("selective_log_softmax", "get_reward", "masked_whiten")
)
plain_backward = trainer.accelerator.backward


@torch.no_grad()
def saved_generation(_model, queries, *_, **__):
    queries.copy_(ids[:, :prompt_length])  # the loop goes on with its own, in its own order
    attention_mask = ids != tokenizer.pad_token_id
    return ids.clone(), behaviour(input_ids=ids, attention_mask=attention_mask).logits[:, prompt_length - 1 : -1]


def recorded_logprobs(*arguments):
    logprob_calls.append(plain_logprobs(*arguments))
    return logprob_calls[-1]


def recorded_reward(*arguments):
    reward_calls.append(plain_reward(*arguments))
    return reward_calls[-1]


def recorded_whiten(advantages, mask):
    found["raw_advantages"], found["advantages"] = advantages, plain_whiten(advantages, mask)
    return found["advantages"]


def recorded_backward(loss):
    plain_backward(loss)
    for name, model in (("policy", policy), ("critic", value)):
        found[f"{name}_grad_norm"] = torch.stack(
            [p.grad.norm() for p in model.parameters() if p.grad is not None]
        ).norm()


def record_losses(metrics, *_, **__):
    for name in ("policy", "value"):
        found[f"{name}_loss"] = torch.tensor(metrics[f"loss/{name}_avg"])


ppo_module.batch_generation, ppo_module.selective_log_softmax = saved_generation, recorded_logprobs
ppo_module.get_reward, ppo_module.masked_whiten = recorded_reward, recorded_whiten
trainer.accelerator.backward, trainer.log = recorded_backward, record_losses
np.random.permutation = np.arange  # rows in their order
trainer.train()
found["old_logprobs"], found["ref_logprobs"], found["logprobs"] = logprob_calls
found["values"] = reward_calls[0][0][:, prompt_length - 1 : -1].squeeze(-1)
found["scores"] = reward_calls[1][1]
found["vf_coef"] = torch.tensor(config.vf_coef)
np.savez(options.output, **{name: tensor.detach().numpy() for name, tensor in found.items()})
