"""Reward scores of items, and simulated labellers that use them (``heedful label simulate``).

A simulated labeller prefers by a judge's scores, with errors. One of two models sets their rate:

    agreement       P(prefers the better one) = a, for any scores                 (people: 0.63 to 0.77)
    Bradley-Terry   P(prefers i over j) = sigmoid((s_i - s_j) / t)                (Bradley and Terry 1952)

In the first, equal scores give a tie, which is not an error. The second never gives a tie. Two labellers with agreement a
err independently, so they agree with each other on a^2 + (1 - a)^2 of the pairs. A labeller answers the same item the same
way each time, except a hidden repeat, for which the answer is drawn again.
"""

import math
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heedful.apps.label.project import Project
from heedful.apps.label.records import Item
from heedful.configs.options import MachineOptions
from heedful.configs.rounds import SimulateConfig
from heedful.configs.scoring import RewardOptions
from heedful.data.messages import read_conversation, read_message
from heedful.errors import DataError, RewardError
from heedful.kernels.device import resolve_device, resolve_dtype
from heedful.rewards import Completion, Ensemble, score_tokens
from heedful.rewards.resolve import load_rewards
from heedful.types import MicroBatch, Prompt, plain_response

AT_SCALE = 0.73
"""Probability of preferring the better answer if scores differ by ``--scale``."""
STRENGTH = 2
"""Strength of every simulated preference that is not a tie: a simulated labeller has no confidence."""
Judge = Callable[[Item], Sequence[float]]
"""The score of each candidate of an item; higher is better."""
Answered = tuple[Any, Sequence[Mapping[str, Any]], Mapping[str, Any]]
"""A prompt as JSON, its answers (``response``, ``source``), and its columns."""


def load_judge(rewards: Sequence[str], options: RewardOptions, machine: MachineOptions) -> Ensemble:
    """Load rewards to score items with. Raises ConfigError, CheckpointError and RewardError."""
    device = resolve_device(machine.device)
    dtype = resolve_dtype(machine.dtype, device)
    return load_rewards(list(rewards), options, device=device, compute_dtype=dtype, micro_batch=MicroBatch(32))


def scores_of(judge: Ensemble, asked: Sequence[Answered]) -> list[list[float]]:
    """The score of each answer to each prompt, in order. Raises RewardError, also if a reward fails on any answer."""
    completions = []
    for number, (prompt, answers, columns) in enumerate(asked, start=1):
        place = f"item {number}"
        text = prompt if isinstance(prompt, str) else read_conversation(place, "prompt", prompt)
        kept = {name: value for name, value in columns.items() if name not in ("prompt", "responses")}
        for answer in answers:
            response = answer["response"]
            if isinstance(response, list):
                response = plain_response(read_conversation(place, "response", response))
            elif not isinstance(response, str):
                response = plain_response(read_message(place, "response", response))
            truncated = bool((answer.get("source") or {}).get("truncated"))
            completions.append(Completion(Prompt(text, place, kept), response, truncated=truncated))
    if not completions:
        return [[] for _ in asked]
    given = score_tokens(judge, completions)
    if given.failed:
        raise RewardError(f"a reward failed on {len(given.failed)} of {len(completions)} answers: {given.note}")
    totals = iter(given.totals)
    return [[next(totals) for _ in answers] for _, answers, _ in asked]


def scores_of_items(judge: Ensemble, items: Sequence[Item]) -> dict[str, list[float]]:
    """The score of each candidate, by item; items without candidates are left out. Raises RewardError."""
    with_answers = [item for item in items if item.candidates]
    asked = [(item.prompt, [vars(one) for one in item.candidates], item.columns) for item in with_answers]
    return {item.item_id: scores for item, scores in zip(with_answers, scores_of(judge, asked), strict=True)}


@dataclass(frozen=True)
class Labeller:
    """A simulated labeller: prefers by a judge's scores, with errors."""

    name: str
    seed: int = 0
    agreement: float = 0.73
    """Probability of preferring the answer that the judge prefers. Ignored if ``temperature`` is set."""
    temperature: float | None = None
    """t of the Bradley-Terry model, in units of the judge's scores; None for a fixed agreement."""

    def answer(self, item: Item, scores: Sequence[float], *, repeat: bool = False) -> dict[str, Any]:
        """The answer of the label, as `heedful.apps.label.records.Event` describes it.

        Raises DataError for a task that is neither pair nor ranking, and for a ranking without a temperature.
        """
        draw = random.Random(f"{self.seed} {self.name} {item.item_id} {repeat}")
        if item.task == "pair":
            preferred = self._preferred(scores[0], scores[1], draw)
            return {"preferred": preferred, "strength": None if preferred is None else STRENGTH, "both_bad": False}
        if item.task == "ranking" and self.temperature is not None:
            return {"ranks": ranks_by(scores, self.temperature, draw)}
        wanted = "--temperature, the noise of their rankings" if item.task == "ranking" else "pairs and rankings only"
        raise DataError(f"item {item.item_id} is a {item.task}: simulated labellers need {wanted}")

    def _preferred(self, first: float, second: float, draw: random.Random) -> int | None:
        chance = draw.random()
        if self.temperature is not None:
            return int(chance >= _sigmoid((first - second) / self.temperature))
        if first == second:
            return None
        better = int(second > first)
        return better if chance < self.agreement else 1 - better


def ranks_by(scores: Sequence[float], temperature: float, draw: random.Random) -> list[int]:
    """Ranks, 1 for the best, drawn from the Plackett-Luce model, in which every pair follows Bradley-Terry.

    Gumbel noise of scale ``temperature`` is added to each score, and the sums are sorted (Yellott 1977).
    """
    noisy = [score - temperature * math.log(-math.log(draw.random() or 5e-324)) for score in scores]
    order = sorted(range(len(noisy)), key=lambda i: -noisy[i])
    return [order.index(i) + 1 for i in range(len(noisy))]


def simulate(config: SimulateConfig) -> tuple[int, list[str]]:
    """Have simulated labellers label a project. Returns the number of labels and the labellers' names.

    Labellers of an earlier call are used again. Raises DataError if there are no items, or for items that are neither pairs
    nor rankings, and the errors of loading and calling rewards.
    """
    temperature = None if config.scale is None else config.scale / math.log(AT_SCALE / (1 - AT_SCALE))
    names = [f"simulated-{number}" for number in range(1, config.labellers + 1)]
    judge = load_judge(config.rewards, config, config)
    with Project.open(config.project) as project:
        items = project.items()
        if not items:
            raise DataError(
                f"{config.project} has no items to label; add some with heedful label import {config.project} --data FILE, "
                "or with heedful round"
            )
        other = next((item for item in items if item.task not in ("pair", "ranking")), None)
        if other is not None:
            raise DataError(
                f"item {other.item_id} is a {other.task}: simulated labellers label pairs and rankings only"
            )
        scores = scores_of_items(judge, items)
        known = {person.name: person.person_id for person in project.people()}
        people = {name: known.get(name) or project.add_person(name, "annotator").person_id for name in names}
        labellers = [
            (person, Labeller(name, seed=config.seed, agreement=config.agreement, temperature=temperature))
            for name, person in people.items()
        ]
        count = label_project(project, labellers, lambda item: scores[item.item_id], labels=config.labels)
    return count, names


def label_project(
    project: Project, labellers: Sequence[tuple[str, Labeller]], judge: Judge, *, labels: int | None = None
) -> int:
    """Have labellers, each with a person id, take turns at labelling an open project. Returns the number of labels.

    They stop after ``labels`` labels, or when no items are left for them.
    """
    done, left = 0, list(labellers)
    while left and (labels is None or done < labels):
        for person, labeller in list(left):
            if labels is not None and done == labels:
                break
            assignment = project.next_item(person)
            if assignment is None:
                left.remove((person, labeller))
                continue
            item = assignment.item
            answer = labeller.answer(item, judge(item), repeat=assignment.repeat)
            answer |= _by_criteria(project, labeller, item)
            nonce = secrets.token_hex(16)  # a nonce used before returns its old event, even a retracted one
            project.label(person, item.item_id, answer, nonce=nonce, seconds=0.0)
            done += 1
    return done


def _by_criteria(project: Project, labeller: Labeller, item: Item) -> dict[str, Any]:
    """Random values for the project's criteria: a judge's score says nothing about them."""
    asked = project.settings.criteria_asked
    draw = random.Random(f"{labeller.seed} {labeller.name} {item.item_id} criteria")
    said = [{one.name: draw.choice(one.values) for one in asked} for _ in item.candidates]
    return {"criteria": said} if asked else {}


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0
