"""Does the policy wait for one environment at a time? Episodes with an environment that thinks for 50 ms, beside a quick one.

python benchmarks/slow_environment.py [--rows 64] [--turns 4] [--seconds 0.05] [--repetitions 5]

A small random model plays ROWS episodes of TURNS turns together. One environment after the other would add
rows * turns * seconds, 12.8 s by default; all at the same time turns * seconds, 0.2 s.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

import heedful
from heedful.data.chat import Renderer
from heedful.data.loading import EncodedPrompt
from heedful.engines.episodes import Episodes
from heedful.engines.generate import generate
from heedful.environments.processes import Environments
from heedful.types import Message, Prompt

ENVIRONMENT = """
import time


class Slow:
    def reset(self, **columns):
        self.turns = 0

    def _reply(self, text):
        time.sleep({seconds})
        return "go on"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder, found = Path(place), dict[str, list[float]]()
        heedful.make_tiny_model("qwen3", folder / "model", hidden_size=256, num_layers=4, max_length=1024)
        policy = heedful.Policy.from_pretrained(str(folder / "model"), device="cpu", dtype="float32")
        renderer = Renderer(policy.tokenizer)
        sampling = heedful.PPOConfig(model="-", data="-", output="-", rewards=("rule:digits",), max_new_tokens=16)
        asked = Prompt((Message("user", "hello"),), "a prompt")
        prompts = [EncodedPrompt(asked, renderer.prompt_ids(asked.prompt))] * options.rows
        worlds = {}
        for name, seconds in (("quick", 0.0), ("slow", options.seconds)):
            file = folder / f"{name}.py"
            file.write_text(ENVIRONMENT.format(seconds=seconds), encoding="utf-8")
            worlds[name] = Environments(f"python:{file}:Slow", timeout=60.0)
        ends = torch.Generator()
        for repetition in range(options.repetitions + 1):  # the first starts processes
            for name, world in worlds.items():
                episodes = Episodes(
                    renderer,
                    {"Slow": world},
                    {"Slow": world.abilities},
                    max_turns=options.turns,
                    max_new_tokens=40 * options.turns,
                    max_prompt_tokens=100,
                )

                def say(before, most):
                    ids, limits = [one.ids for one in before], [16] * len(most)
                    pad = renderer.pad_id
                    said = generate(policy, ids, sampling, stop_ids=(), pad_id=pad, generator=ends, most=limits)
                    return replace(said, truncated=torch.zeros_like(said.truncated))

                started = time.perf_counter()
                episodes.play(say, prompts, ends.manual_seed(repetition))
                if repetition:
                    found.setdefault(name, []).append(time.perf_counter() - started)
        for name, seconds in found.items():
            print(
                f"{name}: {median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f}), "
                f"{options.rows / median(seconds):.0f} episodes per second"
            )
            worlds[name].close()


if __name__ == "__main__":
    main()
