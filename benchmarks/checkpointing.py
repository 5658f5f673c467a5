"""What a checkpoint after every step costs the demo's PPO, and what fault points cost while none is set.

    python benchmarks/checkpointing.py --output FOLDER

It makes the demo's world, fine-tuned model and reward model, and runs its PPO with no checkpoint and with --save-every 1 by
turns, so that what else the machine does falls on both. The rest is the same, --save-total-limit as by default. Seconds
are those of the whole run (summary.json), with everything that is saved at its end. The bound is 10 %.
"""

import argparse
import json
import statistics
import timeit
from dataclasses import replace
from pathlib import Path

from heedful import faults
from heedful.algorithms.ppo import train_ppo
from heedful.algorithms.reward_model import train_reward
from heedful.algorithms.sft import train_sft
from heedful.apps.demo.folder import make_beginning
from heedful.apps.demo.pipeline import RECIPE, read_recipe
from heedful.configs.tools import DemoConfig

CALLS = 1_000_000


def world(output, quick):
    """The settings of the demo's PPO, with the models that it begins with."""
    config = DemoConfig(output=output, device="cpu")
    settings = read_recipe(config, RECIPE)
    if not (output / "reward" / "final").is_dir():
        make_beginning(config, settings.tiny).release()
        few = {"max_steps": 20, "eval_every": 0} if quick else {}
        train_sft(replace(settings.sft, **few))
        train_reward(replace(settings.reward, **few))
    return settings.ppo


def seconds_of(ppo, output, steps, save_every):
    """The time of one run."""
    train_ppo(
        replace(ppo, output=output, overwrite=True, steps=steps or ppo.steps, save_every=save_every, save_minutes=0.0)
    )
    return json.loads((output / "summary.json").read_text(encoding="utf-8"))["seconds"]


def nanoseconds_of_a_point():
    """What a call of `heedful.faults.hit` takes while no fault is set, less what the loop around it takes."""
    faults.plan("")
    calls = [timeit.timeit("hit('reward')", globals={"hit": faults.hit}, number=CALLS) for _ in range(5)]
    loops = [timeit.timeit("pass", number=CALLS) for _ in range(5)]
    return 1e9 * (min(calls) - min(loops)) / CALLS


def visits_of(ppo, output):
    """How often a run of two steps comes to fault points; a plan that never acts has them counted."""
    faults.plan("run.opened:hang@999999999")
    seconds = seconds_of(ppo, output, 2, 1)
    visits = sum(faults.visits().values())
    faults.plan("")
    return visits, seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=3, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=0, help="of each run; 0 is the demo's default")
    parser.add_argument("--quick", action="store_true", help="begin with models of 20 steps, to try the script")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    ppo = world(options.output / "world", options.quick)
    found = {0: [], 1: []}
    for turn in range(options.turns):
        for save_every in (0, 1) if turn % 2 == 0 else (1, 0):
            output = options.output / f"every-{save_every}"
            found[save_every].append(seconds_of(ppo, output, options.steps, save_every))
            print(f"turn {turn}: --save-every {save_every} {found[save_every][-1]:.2f} s", flush=True)
    without, with_all = (statistics.median(found[kind]) for kind in (0, 1))
    point = nanoseconds_of_a_point()
    visits, seconds = visits_of(ppo, options.output / "counted")
    result = {
        "seconds": {"no checkpoint": found[0], "--save-every 1": found[1]},
        "cost of checkpoints": with_all / without - 1,
        "nanoseconds of a fault point that is off": point,
        "share of a run that they take": point * 1e-9 * visits / seconds,
    }
    (options.output / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(f"a checkpoint after every step: {100 * (with_all / without - 1):+.1f} % (medians of {options.turns})")
    print(f"a fault point that is off: {point:.0f} ns, {100 * result['share of a run that they take']:.4f} % of a run")


if __name__ == "__main__":
    main()
