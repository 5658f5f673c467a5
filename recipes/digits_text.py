"""Is what a policy writes still text? Its responses under the base model, and how varied they are.

python recipes/digits_text.py --models BASE runs/digits-ppo/final ... --data runs/digits/other.jsonl

The first model is the base. To each prompt every model writes one response of --max-new-tokens, at temperature 1. Printed
for each: the mean score of rule:digits, the share of responses with a number, the mean log-prob a token that the base gives
the responses, and distinct bigrams: different pairs of neighbouring tokens over all pairs, of all responses together.
Noise has a low log-prob; one phrase again and again has few distinct bigrams.
"""

import argparse
import itertools

import torch

from heedful.configs.options import SamplingOptions
from heedful.data import read_prompts
from heedful.data.chat import Renderer
from heedful.engines.generate import generate
from heedful.engines.teacher_forced import token_outputs
from heedful.kernels.device import resolve_device, resolve_dtype
from heedful.models.load import load_policy
from heedful.models.policy import freeze
from heedful.models.tokenizer import load_tokenizer
from heedful.rewards.rules import make_rule
from heedful.types import MicroBatch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", required=True, help="the base first")
    parser.add_argument("--data", required=True, help="prompts")
    parser.add_argument("--num-prompts", type=int, default=256)
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    device = resolve_device("auto")
    renderer = Renderer(load_tokenizer(options.models[0]))
    prompts = [renderer.prompt_ids(p.prompt) for p in read_prompts(options.data)[: options.num_prompts]]
    sampling = SamplingOptions(max_new_tokens=options.max_new_tokens, response_length="fixed")
    digits = make_rule("digits")
    base = None
    for name in options.models:
        policy = load_policy(name, device=device, compute_dtype=resolve_dtype("auto", device))
        freeze(policy)
        base = base or policy
        generator = torch.Generator().manual_seed(options.seed)
        rollouts = generate(policy, prompts, sampling, stop_ids=(), pad_id=renderer.pad_id, generator=generator)
        logprobs = token_outputs(base, rollouts.batch, temperature=1.0, micro_batch=MicroBatch(32)).logprobs
        responses = rollouts.own_ids()
        scores = digits([renderer.decode(ids) for ids in responses])
        bigrams = [pair for ids in responses for pair in itertools.pairwise(ids)]
        print(
            f"{name}: score {sum(scores) / len(scores):.3f}, with a number {sum(s > 0 for s in scores) / len(scores):.3f}, "
            f"log-prob a token under the base {float(logprobs[rollouts.batch.response_mask].mean()):.3f}, "
            f"distinct bigrams {len(set(bigrams)) / len(bigrams):.3f}"
        )
        print(f"    {renderer.decode(responses[0])!r}")


if __name__ == "__main__":
    main()
