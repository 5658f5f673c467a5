"""The demo's preferences by its user: pairs of the fine-tuned model's answers, labelled in the browser.

With ``heedful demo --label`` the reward model learns only from these labels, so they shape the policy: labels for rude
answers give a rude model.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from heedful.apps.demo.folder import LABELS
from heedful.apps.demo.judge import gold_score
from heedful.apps.label.exporting import ExportOptions, export_project
from heedful.apps.label.project import Project
from heedful.apps.label.records import Item
from heedful.apps.rounds.judging import Labeller, label_project
from heedful.apps.rounds.pairs import choose, different_pairs, item_of
from heedful.apps.rounds.sample import sample_answers
from heedful.configs.label import ProjectSettings
from heedful.configs.online import PPOConfig
from heedful.configs.tools import DemoConfig, SampleConfig
from heedful.data import read_prompts, split_by_prompt
from heedful.errors import ConfigError
from heedful.files import to_json, write_text

TRAIN, EVAL = "exported/preferences.train.jsonl", "held-out.jsonl"
TAKE_BACK_SECONDS = 10.0
"""Seconds to undo the last label after the page has reported that all pairs are labelled."""


def label_pairs(config: DemoConfig, ppo: PPOConfig, story: Mapping[str, Any], say: Callable[[str], None]) -> int:
    """Have pairs labelled, unless done, and write the reward model's data. Returns the number of preferences.

    Args:
        config: the demo's settings.
        ppo: the settings of held-out prompts and answer lengths.
        story: the texts in the demo's language.
        say: prints a paragraph.

    Raises ConfigError if all labels are ties or skips, or the server cannot start.
    """
    folder = config.output / LABELS
    if not (folder / "exported").is_dir():
        _ask(config, ppo, folder, story["instructions"])
        if config.label_simulated:
            with Project.open(folder) as project:
                known = [person.person_id for person in project.people() if person.name == "simulated"]
                person = known[0] if known else project.add_person("simulated", "annotator").person_id
                label_project(project, [(person, Labeller("simulated", seed=config.seed))], _gold)
        else:
            _wait_for_labels(config, folder, story["waiting"], say)
        _held_out(config, ppo, folder / EVAL)
        with Project.open(folder, read_only=True) as project:
            exported = export_project(project, ExportOptions(eval_fraction=0.0, margin="none"))
        if Path(TRAIN).name not in exported.files:
            raise ConfigError(
                f"every label in {folder} is a tie or a skip, so there is nothing to learn from; label again"
            )
        exported.write(folder / "exported", None)
    return (folder / TRAIN).read_bytes().count(b"\n")


def _ask(config: DemoConfig, ppo: PPOConfig, folder: Path, instructions: str) -> None:
    """Make the project with ``config.label_pairs`` pairs."""
    settings = ProjectSettings(name="heedful demo", overlap=0.0, repeats=0.0, seed=config.seed)
    if not (folder / "project.yaml").is_file():
        Project.create(folder, settings).close()
    answers = folder / "answers.jsonl"
    if not answers.is_file():
        sample_answers(
            SampleConfig(
                models=(ppo.model,),
                data=ppo.data,
                output=answers,
                answers=4,
                max_prompts=config.label_pairs,
                eval_fraction=ppo.eval_fraction,
                max_new_tokens=ppo.max_new_tokens,
                micro_batch_size=ppo.rollout_micro_batch.rows,
                seed=config.seed,
                device=config.device,
                dtype=config.dtype,
            )
        )
    rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").split("\n") if line]
    pairs = [different_pairs([answer["response"] for answer in row["responses"]]) for row in rows]
    chosen = choose(pairs, config.label_pairs, f"demo {config.seed}")
    with Project.open(folder) as project:
        project.add_items([item_of(rows[choice.prompt], choice, 1) for choice in chosen])
        if project.instructions()[0] == 0:
            project.set_instructions(instructions)


def _gold(item: Item) -> list[float]:
    return [
        gold_score(
            item.columns["family"], item.columns["answer"], one.response, not (one.source or {}).get("truncated")
        )
        for one in item.candidates
    ]


def _wait_for_labels(config: DemoConfig, folder: Path, text: str, say: Callable[[str], None]) -> None:
    """Serve the page in a process of its own until every pair is labelled or skipped, and the page has reported it."""
    done, asked = _progress(folder)
    if done == asked:
        return
    say(text.format(left=asked - done, asked=asked))
    command = [sys.executable, "-m", "heedful", "label", "serve", str(folder), "--port", str(config.label_port)]
    with subprocess.Popen([*command, "--until-done", str(TAKE_BACK_SECONDS)]) as server:
        try:
            server.wait()
        finally:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(timeout=10)
            server.kill()
    if _progress(folder)[0] < asked:
        raise ConfigError(
            f"the label server ended with status {server.returncode} before all pairs were labelled; run the same command "
            "again, or choose another --label-port"
        )


def _progress(folder: Path) -> tuple[int, int]:
    """Number of pairs labelled or skipped, and number of all pairs."""
    with Project.open(folder, read_only=True) as project:
        items = {item.item_id for item in project.items()}
        taken_back = {event.content["event"] for event in project.events() if event.kind == "retract"}
        done = {
            event.content["item"]
            for event in project.events()
            if event.kind in ("label", "skip") and event.event_id not in taken_back
        }
    return len(items & done), len(items)


def _held_out(config: DemoConfig, ppo: PPOConfig, file: Path) -> None:
    """Write the world's pairs of held-out prompts, ordered by the gold judge, to evaluate the reward model."""
    held_out = split_by_prompt(read_prompts(ppo.data), ppo.eval_fraction)[1]
    texts = {prompt.prompt[0].content for prompt in held_out if not isinstance(prompt.prompt, str)}
    with (config.output / "world" / "gold_preferences.jsonl").open(encoding="utf-8") as lines:
        rows = [row for row in map(json.loads, lines) if row["prompt"][0]["content"] in texts]
    write_text(file, "".join(f"{to_json(row)}\n" for row in rows))
