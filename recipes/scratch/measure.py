"""What came of the three runs of recipes/scratch: greedy answers, the order of the pairs, and how likely both sides are.

python recipes/scratch/measure.py runs/scratch
"""

import argparse
import json
from pathlib import Path

import torch

from heedful.configs.options import SamplingOptions
from heedful.data import read_demonstrations, read_rankings
from heedful.data.batches import collate
from heedful.data.chat import Renderer, RewardInputs, plain_text
from heedful.data.loading import EncodedPrompt
from heedful.data.messages import as_dict
from heedful.engines.sampler import make_sampler
from heedful.engines.teacher_forced import token_outputs
from heedful.errors import HeedfulError
from heedful.models.load import load_policy, load_reward_model
from heedful.models.policy import Policy
from heedful.models.tokenizer import load_tokenizer
from heedful.rewards.models import ModelReward
from heedful.types import MicroBatch, Prompt, Ranking, Text

HERE = Path(__file__).parent
CPU = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
SAMPLES = 100
"""Responses to each instruction, for the mean reward."""


def answers(policy: Policy, renderer: Renderer, prompts: list[Text], temperature: float) -> list[tuple[str, bool]]:
    """A response to each prompt, and whether it was cut by length."""
    sampler = make_sampler(SamplingOptions(max_new_tokens=128, temperature=temperature), renderer, policy)
    encoded = [EncodedPrompt(Prompt(prompt, "measure"), renderer.prompt_ids(prompt)) for prompt in prompts]
    completions = sampler.generate(policy, encoded, torch.Generator().manual_seed(0)).completions
    return [(completion.response, completion.truncated) for completion in completions]


def log_odds(policy: Policy, renderer: Renderer, rankings: list[Ranking]) -> list[float]:
    """Log of how much likelier the chosen response of each pair is than the rejected one."""
    prompts = [renderer.prompt_ids(ranking.prompt) for ranking in rankings for _ in ranking.responses]
    responses = [
        renderer.response_ids(response, prompt=ranking.prompt, truncated=False)
        for ranking in rankings
        for response in ranking.responses
    ]
    batch = collate(prompts, responses, pad_id=renderer.pad_id)
    total = token_outputs(policy, batch, temperature=1.0, micro_batch=MicroBatch(len(prompts))).logprobs.sum(dim=1)
    chosen, rejected = total.view(-1, 2).unbind(dim=1)
    return (chosen - rejected).tolist()


def measure(runs: Path) -> dict:
    """All that is printed. Raises HeedfulError."""
    demonstrations, rankings = (
        read_demonstrations(f"{HERE}/demonstrations.jsonl"),
        read_rankings(f"{HERE}/preferences.jsonl"),
    )
    renderer = Renderer(load_tokenizer(f"{runs}/sft/final"))
    reward_tokenizer = load_tokenizer(f"{runs}/reward/final")
    reward_model = load_reward_model(f"{runs}/reward/final", reward_tokenizer, **CPU)
    reward = ModelReward(reward_model, RewardInputs(reward_tokenizer, reward_model.reads))

    def scores(prompts: list[Text], responses: list[tuple[str, bool]]) -> list[float]:
        asked = [prompt if isinstance(prompt, str) else [as_dict(message) for message in prompt] for prompt in prompts]
        return reward(asked, [r for r, _ in responses], truncated=[cut for _, cut in responses])

    pairs = [scores([r.prompt] * 2, [(response, False) for response in r.responses]) for r in rankings]
    wanted = {d.prompt: {d.response} for d in demonstrations}
    for ranking in rankings:
        wanted[ranking.prompt].add(ranking.responses[0])
    prompts = list(wanted)
    result: dict = {"reward": {"pairs in order": sum(chosen > rejected for chosen, rejected in pairs)}}
    for name in ("sft", "ppo"):
        policy = load_policy(f"{runs}/{name}/final", **CPU)
        greedy = answers(policy, renderer, prompts, 0.0)
        sampled = answers(policy, renderer, prompts * SAMPLES, 1.0)
        rewards = scores(prompts * SAMPLES, sampled)
        result[name] = {
            "greedy": {
                plain_text(prompt): response + (" (cut)" if cut else "")
                for prompt, (response, cut) in zip(prompts, greedy, strict=True)
            },
            "exact": sum(
                not cut and response == d.response for d, (response, cut) in zip(demonstrations, greedy, strict=True)
            ),
            "wanted": sum(
                not cut and response in wanted[p] for p, (response, cut) in zip(prompts, greedy, strict=True)
            ),
            "mean reward": sum(rewards) / len(rewards),
            "log odds of chosen": log_odds(policy, renderer, rankings),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of the runs sft, reward and ppo")
    try:
        print(json.dumps(measure(parser.parse_args().runs), ensure_ascii=False, indent=2))
    except (HeedfulError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {type(error).__name__}: {error}\n")


if __name__ == "__main__":
    main()
