"""Small models and data for the lessons: questions of the demo's world, few enough that a model learns them in a minute."""

import contextlib
import io
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from heedful.apps.course.catalogue import is_quick, steps
from heedful.display import silence
from heedful.errors import ConfigError, HeedfulError
from heedful.files import complete_or_absent, in_words, to_json, write_text

Name = Literal["base", "sft", "reward", "tiny"]
FOLDER = Path("course-models")
"""In the current folder. The quick form has a subfolder, so that its models are not mistaken for trained ones."""
FAMILIES = ("opposites", "colours", "反义词")
"""The families of the demo's questions that the course uses."""
FEW = 100
"""Number of training records in the quick form."""
HELD_OUT = 0.17
"""The share of held-out prompts."""
MADE_FROM: dict[Name, Name] = {"sft": "base", "reward": "sft"}
"""The initial model of each trained one."""
SHARED: dict[str, Any] = {
    "batch_size": 32,
    "micro_batch_size": 32,
    "lr_schedule": "cosine",
    "adam_beta2": 0.95,
    "dtype": "float32",
    "device": "cpu",
    "eval_fraction": 0.0,
    "sample_every": 0,
}
"""Training settings of the models."""


@dataclass(frozen=True)
class World:
    """Questions with one good answer each, and a judge that knows it."""

    instructions: tuple[Any, ...]
    """`heedful.apps.demo.world.Instruction`: each has ``prompt``, ``answer``, ``good``, and ``flawed`` by kind of flaw."""
    train: tuple[Any, ...]
    """Training prompts of ``demo_model("sft")`` and ``("reward")``, with the judge's columns."""
    held_out: tuple[Any, ...]
    """Held-out prompts."""
    judge: Callable[..., list[float]]
    """A reward function: 1 for a flawless response, 0 for one with nothing right (`heedful.apps.demo.judge`)."""

    def answers(self, index: int) -> list[Any]:
        """All answers to ``instructions[index]``, the good one first: each has ``kind``, ``response``, and the judge's score,
        ``gold``."""
        from heedful.apps.demo.world import answers

        return answers(self.instructions[index])


def demo_world() -> World:
    """The questions of the course, split as for `demo_model`, and the gold judge."""
    from heedful.apps.demo.judge import gold_judge
    from heedful.data import read_prompts, split_by_prompt

    with silence():
        train, held_out = split_by_prompt(read_prompts(demo_data("prompts")), HELD_OUT)
    return World(tuple(_instructions()), tuple(train), tuple(held_out), gold_judge)


def demo_data(name: str) -> str:
    """The path of a data file: demonstrations, preferences, gold_preferences (without wrong labels) or prompts.

    It is written once, into ``course-models/`` of the current folder.

    Raises ConfigError for another name, or a folder that cannot be written to.
    """
    from heedful.apps.demo import world

    known = _instructions()
    made: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "demonstrations": lambda: world.demonstrations(0, known),
        "preferences": lambda: world.preferences(0, known),
        "gold_preferences": lambda: world.preferences(0, known, label_noise=0.0),
        "prompts": lambda: world.prompts(known),
    }
    if name not in made:
        raise ConfigError(f"the course has no data {name!r}; it has {', '.join(made)}")
    path = FOLDER / "data" / f"{name}.jsonl"
    if not path.is_file():
        _make(path.parent, lambda: _write(path, made[name]()))
    return str(path)


def demo_model(name: Name) -> str:
    """The folder of a small model, made once in ``course-models/`` of the current folder.

    base: random weights. sft: fine-tuned on the demonstrations. reward: a reward model trained on the preferences, starting
    from sft. tiny: random weights, even smaller, for code that needs no good answers.

    Raises ConfigError for another name, or a folder that cannot be written to.
    """
    if name not in get_args(Name):
        raise ConfigError(f"the course has no model {name!r}; it has {', '.join(get_args(Name))}")
    folder = _models() / name
    if (folder / "config.json").is_file():
        return str(folder)
    started = time.perf_counter()
    if name in MADE_FROM:
        demo_model(MADE_FROM[name])
    print(f"making {folder} ... ", end="", flush=True)
    with silence(), contextlib.redirect_stderr(io.StringIO()):  # transformers draws progress bars there
        _make(folder.parent, lambda: _TO_MAKE[name](folder))
    print(f"{time.perf_counter() - started:.0f} s")
    return str(folder)


def _models() -> Path:
    return FOLDER / "quick" if is_quick() else FOLDER


def _instructions() -> list[Any]:
    from heedful.apps.demo.world import instructions

    return [one for one in instructions() if one.family in FAMILIES]


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(f"{to_json(row)}\n" for row in rows))


def _make(folder: Path, make: Callable[[], object]) -> None:
    """Call a function that writes into a folder. Raises ConfigError if the folder cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        make()
    except HeedfulError:
        raise
    except OSError as error:
        raise ConfigError(
            f"the course keeps its models in {FOLDER.resolve()}, which cannot be written ({in_words(error)}); start the "
            "notebook in a writable folder"
        ) from error


def _make_base(folder: Path) -> None:
    from heedful.models.tiny import make_tiny_model

    make_tiny_model("qwen3", folder, hidden_size=96, num_layers=2, initializer_range=0.1)


def _make_tiny(folder: Path) -> None:
    from heedful.models.tiny import make_tiny_model

    make_tiny_model("gpt2", folder, hidden_size=32, num_layers=2, max_length=128)


def _make_sft(folder: Path) -> None:
    from heedful.algorithms.sft import train_sft
    from heedful.configs.offline import SFTConfig

    config = SFTConfig(max_steps=steps(600), learning_rate=5e-3, warmup_steps=30, weight_decay=0.1, **SHARED)
    _keep(train_sft(config, model=demo_model("base"), data=_to_learn_from("demonstrations")), folder)


def _make_reward(folder: Path) -> None:
    from heedful.algorithms.reward_model import train_reward
    from heedful.configs.offline import RewardConfig

    config = RewardConfig(max_steps=steps(200), learning_rate=1e-3, warmup_steps=20, weight_decay=0.01, **SHARED)
    _keep(train_reward(config, model=demo_model("sft"), data=_to_learn_from("preferences")), folder)


def _to_learn_from(name: str) -> list[dict[str, Any]]:
    """Training records of a data file (prompts not held out); only a few in the quick form."""
    held_out = {one.prompt[0].content for one in demo_world().held_out}
    lines = Path(demo_data(name)).read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["prompt"][0]["content"] not in held_out]
    return rows[:FEW] if is_quick() else rows


def _keep(result: Any, folder: Path) -> None:
    """Copy the final model of a run to a folder."""
    with complete_or_absent(folder) as partial:
        shutil.copytree(result.folder / "final", partial, dirs_exist_ok=True)


_TO_MAKE = {"base": _make_base, "tiny": _make_tiny, "sft": _make_sft, "reward": _make_reward}
