"""The same saved rollouts through heedful and through the peers: the same numbers, in float32 to a relative 1e-4.

python benchmarks/gate.py --peer-ppo PYTHON --peer-grpo PYTHON --workload runs/workload --output runs/gate

Compares scores, log-probs, values, advantages, returns, losses and gradient norms; prints a table and exits with 1 where one
is outside the tolerance. Three different policies make every term count: a perturbed copy samples and gives the old
log-probs, another one is the reference, and the workload's own learns, so that ratios are not 1, some are clipped, and the KL
to the reference is not 0. Responses of full length, and responses that end at EOS.

An error is the largest difference over the root mean square of the peer's tensor. heedful works in micro-batches of
--micro-batch rows, the peers in one. Where the definitions differ, the tolerance stays and the difference is accounted for:

1. Whitening. TRL's variance has n - 1 in its denominator, heedful's n: heedful's `whiten` is handed TRL's variance.
2. After EOS. TRL puts the score one token after EOS (where the response is not of full length) and counts the value of the
   state there in GAE and in the value loss; heedful puts the score on EOS, after which nothing has a value. For responses
   that end, heedful's functions are given a mask with this one more step for the critic, GAE and the value loss.
3. The weight of the value loss. TRL's vf_coef (0.1) is there for a critic of its own too, heedful has none there: TRL's
   gradient norm of the critic is divided by it. (Adam takes such a factor out again.)
4. heedful's value head has a bias, TRL's none: it starts at 0 and is left out of the norm.
5. With several micro-batches, TRL's PPO averages their means, heedful divides by the tokens of the whole step: the same for
   responses of one length; TRL is given one micro-batch.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from iteration import vowels
from learners import learner_of
from torch import Tensor, nn
from workload import END, PAD

from heedful import GRPOConfig, PPOConfig, core
from heedful.algorithms.online.advantages import ADVANTAGES, Rewards
from heedful.algorithms.online.experience import Experience
from heedful.algorithms.online.recorder import Recorder
from heedful.algorithms.online.values import backward_critic
from heedful.algorithms.ppo import backward_minibatch
from heedful.configs.options import SamplingOptions
from heedful.data.batches import Batch
from heedful.data.chat import Renderer, RewardInputs
from heedful.engines.generate import generate
from heedful.engines.responses import Responses
from heedful.engines.teacher_forced import token_outputs, token_values
from heedful.models.load import load_policy, load_reward_model, load_value_model
from heedful.models.policy import Policy
from heedful.models.tokenizer import load_tokenizer
from heedful.rewards.models import ModelReward
from heedful.training.metric_sums import MetricSums
from heedful.types import MicroBatch

HERE = Path(__file__).parent
TOLERANCE = 1e-4
GROUP = 8
KL_COEF = 0.05
CPU: Any = {"device": torch.device("cpu"), "compute_dtype": torch.float32}


@dataclass(frozen=True)
class Case:
    """One kind of rollouts, with the folders of the policies."""

    folder: Path
    workload: Path
    natural: bool

    @property
    def policy(self) -> str:
        return str(self.workload / ("policy-natural" if self.natural else "policy"))


def main() -> None:
    options = parse()
    failed = False
    print("| rollouts | algorithm | quantity | largest error | |\n|---|---|---|---|---|")
    for natural in (False, True):
        kind = "until EOS" if natural else "full length"
        case = Case(options.output / kind.replace(" ", "-"), options.workload, natural)
        rollouts, prompts = make_rollouts(case, options)
        for algorithm, python, ours in (("ppo", options.peer_ppo, our_ppo), ("grpo", options.peer_grpo, our_grpo)):
            theirs = run_peer(algorithm, python, case)
            mine = ours(case, rollouts, prompts, theirs, options)
            for name, (value, mask) in mine.items():
                error = largest_error(value, torch.as_tensor(theirs[name]), mask)
                verdict = "" if error <= TOLERANCE else "OUTSIDE"
                failed |= bool(verdict)
                print(f"| {kind} | {algorithm} | {name.replace('_', ' ')} | {error:.1e} | {verdict} |", flush=True)
    sys.exit(int(failed))


def make_rollouts(case: Case, options: argparse.Namespace) -> tuple[Responses, list[str]]:
    """Responses of a perturbed copy of the policy, also saved for the peers, and their prompts as text."""
    case.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(case.policy)
    for seed, name in enumerate(("behaviour", "reference"), start=1):
        perturbed = load_policy(case.policy, **CPU).lm
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in perturbed.parameters():
                parameter.mul_(1 + options.perturbation * torch.randn(parameter.shape, generator=generator))
        perturbed.save_pretrained(case.folder / name)
        tokenizer.save_pretrained(case.folder / name)
    ids = json.loads((case.workload / "prompts.json").read_text(encoding="utf-8"))[: options.batch // GROUP]
    prompts = [prompt for prompt in ids for _ in range(GROUP)]
    rollouts = generate(
        load_policy(str(case.folder / "behaviour"), **CPU),
        prompts,
        SamplingOptions(max_new_tokens=options.response_length, response_length="stop" if case.natural else "fixed"),
        stop_ids=[tokenizer.convert_tokens_to_ids(END)],
        pad_id=tokenizer.convert_tokens_to_ids(PAD),
        generator=torch.Generator().manual_seed(0),
        micro_batch=MicroBatch(options.batch),
    )
    saved = {"ids": rollouts.batch.ids.numpy(), "lengths": rollouts.lengths.numpy(), "prompt_length": len(prompts[0])}
    np.savez(case.folder / "rollouts.npz", **saved)
    return rollouts, [tokenizer.decode(prompt) for prompt in prompts]


def run_peer(algorithm: str, python: str, case: Case) -> dict[str, np.ndarray]:
    """What the peer makes of the rollouts."""
    output = case.folder / f"{algorithm}.npz"
    command = [python, str(HERE / "peers" / f"trl_{algorithm}_gate.py"), "--policy", case.policy]
    command += ["--behaviour", f"{case.folder}/behaviour", "--rollouts", f"{case.folder}/rollouts.npz"]
    command += ["--output", str(output)]
    if algorithm == "ppo":
        command += ["--reference", f"{case.folder}/reference", "--kl-coef", str(KL_COEF)]
        command += ["--value", f"{case.workload}/value", "--reward", f"{case.workload}/reward"]
        command += ["--natural-eos"] if case.natural else []
    else:
        command += ["--group", str(GROUP)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")
    return dict(np.load(output))


Compared = dict[str, tuple[Tensor, Tensor | None]]
"""What is compared under which name, with the mask of what counts in a tensor of tokens."""


def filled(batch: Batch) -> dict[str, Any]:
    """Fields of an experience that have no part in a loss."""
    mask = batch.response_mask
    return {
        "rows": torch.arange(len(mask)),
        "sampled_tokens": int(mask.sum()),
        "sampler_logprobs": torch.zeros(mask.shape),
        "drawn_logprobs": torch.zeros(mask.shape),
        "is_finite": torch.ones(len(mask), dtype=torch.bool),
    }


def our_ppo(
    case: Case, rollouts: Responses, prompts: list[str], theirs: dict[str, np.ndarray], options: argparse.Namespace
) -> Compared:
    """heedful's PPO on the rollouts."""
    batch, mask = rollouts.batch, rollouts.batch.response_mask
    config = PPOConfig(
        model=case.policy,
        data="",
        output=case.folder / "run",
        critic="separate",
        micro_batch_size=options.micro_batch,
        rollout_batch_size=len(prompts),
        minibatch_size=len(prompts),
    )
    policy, reference = load_policy(case.policy, **CPU), load_policy(str(case.folder / "reference"), **CPU)
    critic = load_value_model(str(case.workload / "value"), **CPU)
    learner = learner_of(config, policy, reference, critic, renderer=Renderer(load_tokenizer(case.policy)))
    old_logprobs = logprobs_of(load_policy(str(case.folder / "behaviour"), **CPU), batch, options)
    ref_logprobs = logprobs_of(reference, batch, options)
    scores = torch.tensor(model_scores(case, rollouts, prompts))
    with_end = one_more_step(batch, rollouts.truncated) if case.natural else batch  # 2.
    values = token_values(critic, with_end, micro_batch=MicroBatch(options.micro_batch))
    rewards = core.kl_shaped_rewards(scores, old_logprobs, ref_logprobs, with_end.response_mask, kl_coef=KL_COEF)
    raw, returns = core.gae(rewards, values, with_end.response_mask, gamma=1.0, gae_lambda=0.95)
    count = mask.sum()
    advantages = core.whiten(raw, mask, var=core.masked_var(raw, mask) * count / (count - 1))  # 1.
    experience = Experience(
        batch=batch,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        old_values=values,
        rewards=rewards[:, : mask.shape[1]],
        advantages=advantages,
        returns=returns,
        kl=torch.zeros(len(prompts)),
        completions=[],
        scores=[],
        kl_coef=KL_COEF,
        metrics={},
        states=None,
        entropy_coef=0.0,
        **filled(batch),
    )
    recorder, critic_sums = Recorder(learner, experience.kl), MetricSums()
    backward_critic(learner, replace(experience, batch=with_end), experience.rows, critic_sums)
    backward_minibatch(learner, experience, recorder, learner.micro_batch)
    sums = recorder.sums
    critic.value_head.bias.grad = None  # 4.
    theirs["critic_grad_norm"] = theirs["critic_grad_norm"] / theirs["vf_coef"]  # 3.
    theirs["returns"] = theirs["raw_advantages"] + theirs["values"]
    log(case, "ppo", rollouts, sums, float((old_logprobs - ref_logprobs).sum(dim=1).mean()))
    return {
        "scores": (scores, None),
        "old_logprobs": (old_logprobs, mask),
        "ref_logprobs": (ref_logprobs, mask),
        "values": (values, with_end.response_mask),
        "raw_advantages": (raw, with_end.response_mask),
        "returns": (returns, with_end.response_mask),
        "advantages": (advantages, mask),
        "logprobs": (logprobs_of(policy, batch, options), mask),
        "policy_loss": (sums.totals["loss/policy"], None),
        "value_loss": (critic_sums.totals["loss/value"], None),
        "policy_grad_norm": (grad_norm(policy), None),
        "critic_grad_norm": (grad_norm(critic), None),
    }


def our_grpo(
    case: Case, rollouts: Responses, prompts: list[str], theirs: dict[str, np.ndarray], options: argparse.Namespace
) -> Compared:
    """heedful's GRPO on the rollouts, its loss averaged over tokens as TRL's is by default."""
    del theirs
    config = GRPOConfig(
        model=case.policy,
        data="",
        output=case.folder / "run",
        micro_batch_size=options.micro_batch,
        rollout_batch_size=len(prompts),
        minibatch_size=len(prompts),
        samples_per_prompt=GROUP,
        loss_reduction="token",
        kl_coef=0.0,
    )
    batch, mask = rollouts.batch, rollouts.batch.response_mask
    policy = load_policy(case.policy, **CPU)
    old_logprobs = logprobs_of(load_policy(str(case.folder / "behaviour"), **CPU), batch, options)
    scores = torch.tensor(vowels(prompts, responses(case, rollouts)))
    rewards = Rewards(per_token=torch.zeros(mask.shape), per_response=scores, values=None, response_mask=mask)
    advantages = ADVANTAGES[config.advantage](rewards, config).advantages
    experience = Experience(
        batch=batch,
        old_logprobs=old_logprobs,
        ref_logprobs=old_logprobs,
        rewards=torch.zeros_like(old_logprobs),
        advantages=advantages,
        old_values=None,
        returns=None,
        kl=torch.zeros(len(prompts)),
        kl_coef=0.0,
        completions=[],
        scores=[],
        metrics={},
        states=None,
        entropy_coef=0.0,
        **filled(batch),
    )
    learner = learner_of(config, policy, policy, None, renderer=Renderer(load_tokenizer(case.policy)))
    recorder = Recorder(learner, experience.kl)
    backward_minibatch(learner, experience, recorder, learner.micro_batch)
    sums = recorder.sums
    log(case, "grpo", rollouts, sums, None)
    return {
        "old_logprobs": (old_logprobs, mask),
        "advantages": (advantages[:, 0], None),
        "logprobs": (logprobs_of(policy, batch, options), mask),
        "policy_loss": (sums.totals["loss/policy"], None),
        "policy_grad_norm": (grad_norm(policy), None),
    }


def logprobs_of(policy: Policy, batch: Batch, options: argparse.Namespace) -> Tensor:
    return token_outputs(policy, batch, temperature=1.0, micro_batch=MicroBatch(options.micro_batch)).logprobs


def responses(case: Case, rollouts: Responses) -> list[str]:
    """The responses as text, without the EOS that ended them."""
    tokenizer = load_tokenizer(case.policy)
    cut = rollouts.truncated.tolist()
    return [tokenizer.decode(ids if is_cut else ids[:-1]) for ids, is_cut in zip(rollouts.own_ids(), cut, strict=True)]


def model_scores(case: Case, rollouts: Responses, prompts: list[str]) -> list[float]:
    """The reward model's scores, from text."""
    name = str(case.workload / "reward")
    tokenizer = load_tokenizer(name)
    reward = ModelReward(load_reward_model(name, tokenizer, **CPU), RewardInputs(tokenizer))
    return reward(prompts, responses(case, rollouts), rollouts.truncated.tolist())


def one_more_step(batch: Batch, truncated: Tensor) -> Batch:
    """The batch with one more step after the end of each response that ended before the last column."""
    mask = batch.response_mask
    ended = (~truncated).unsqueeze(1)
    before = torch.cat([torch.zeros_like(ended), mask[:, :-1]], dim=1)
    extended = mask | (before & ended)
    attention_mask = batch.attention_mask.clone()
    attention_mask[:, -mask.shape[1] :] |= extended
    return Batch(batch.ids, attention_mask, extended)


def grad_norm(module: nn.Module) -> Tensor:
    return torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm()


def largest_error(ours: Tensor, theirs: Tensor, mask: Tensor | None) -> float:
    """The largest difference over the root mean square of the peer's, inside the mask; infinite where one is not finite."""
    if mask is not None:
        ours, theirs = ours[mask], theirs[mask]
    error = (ours.detach().double() - theirs.double()).abs().max() / theirs.double().square().mean().sqrt()
    return float(error) if bool(error.isfinite()) else float("inf")


def log(case: Case, algorithm: str, rollouts: Responses, sums: MetricSums, kl: float | None) -> None:
    """What shows that the comparison is not of zeros."""
    facts = {name: round(float(value), 4) for name, value in sums.totals.items()}
    facts["mean response tokens"] = round(float(rollouts.lengths.float().mean()), 1)
    if kl is not None:
        facts["KL to the reference"] = round(kl, 2)
    print(f"{case.folder.name} {algorithm}: {facts}", file=sys.stderr)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-ppo", required=True, help="Python of an environment with trl==1.12.0")
    parser.add_argument("--peer-grpo", required=True, help="Python of an environment with trl==1.16.0")
    parser.add_argument("--workload", type=Path, required=True, help="folder made by workload.py")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the perturbed policies and what is compared"
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--response-length", type=int, default=64)
    parser.add_argument(
        "--perturbation", type=float, default=0.02, help="relative noise on the other policies' weights"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
