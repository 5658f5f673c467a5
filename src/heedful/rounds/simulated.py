"""``heedful label simulate``: label in the place of people, for tests, and to find out how many labels a project will need.

A simulated labeller goes by a judge's scores and errs. One of two laws says how often:

    agreement       P(prefers the better one) = a, whatever the scores            (people: 0.63 to 0.77)
    Bradley-Terry   P(prefers i over j) = sigmoid((s_i - s_j) / t)                (Bradley and Terry 1952)

With the first, equal scores are a tie, which is no error. With the second nobody ever says that two answers are equally good.
Two labellers with agreement a err independently, so they agree with each other on a^2 + (1 - a)^2 of the pairs. The same
labeller asked about the same item gives the same answer, unless it is a hidden repeat: then it is asked anew.
"""

import math
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from heedful.configs.rounds import SimulateConfig
from heedful.errors import DataError
from heedful.label.project import Project
from heedful.label.records import Item
from heedful.rounds.judging import load_judge, scores_of_items

AT_SCALE = 0.73
"""How often the better answer is preferred if scores differ by ``--scale``."""
STRENGTH = 2
"""What a simulated labeller says of every pair that is no tie: it does not know how sure it is."""
Judge = Callable[[Item], Sequence[float]]
"""The score of each candidate of an item; higher is better."""


@dataclass(frozen=True)
class Labeller:
    """Somebody who goes by a judge and errs."""

    name: str
    seed: int = 0
    agreement: float = 0.73
    """Probability of preferring the answer that the judge prefers. Not looked at with a ``temperature``."""
    temperature: float | None = None
    """t of the Bradley-Terry law, in units of the judge's scores; None for the law of a fixed agreement."""

    def answer(self, item: Item, scores: Sequence[float], *, repeat: bool = False) -> dict[str, Any]:
        """The answer of the label, as `heedful.label.records.Event` describes it.

        Raises DataError for a task that is neither pair nor ranking, and for a ranking without a temperature.
        """
        draw = random.Random(f"{self.seed} {self.name} {item.item_id} {repeat}")
        if item.task == "pair":
            preferred = self._preferred(scores[0], scores[1], draw)
            return {"preferred": preferred, "strength": None if preferred is None else STRENGTH, "both_bad": False}
        if item.task == "ranking" and self.temperature is not None:
            return {"ranks": ranks_by(scores, self.temperature, draw)}
        wanted = "--temperature, which says how labellers rank" if item.task == "ranking" else "pairs and rankings only"
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
    """Ranks, 1 for the best, drawn by Plackett and Luce's law, of which every pair follows Bradley and Terry's.

    Each answer gets a score plus Gumbel noise of this scale, and the sums are sorted (Yellott 1977).
    """
    noisy = [score - temperature * math.log(-math.log(draw.random() or 5e-324)) for score in scores]
    order = sorted(range(len(noisy)), key=lambda i: -noisy[i])
    return [order.index(i) + 1 for i in range(len(noisy))]


def simulate(config: SimulateConfig) -> tuple[int, list[str]]:
    """Have simulated people label a project. Returns the number of labels and their names.

    People of an earlier call label on. Raises DataError if there are no items, and for items that are neither pairs nor
    rankings, and what loading and calling rewards raise.
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
    """Have labellers label what a project gives them, in turns, until there is nothing left. Returns the number of labels.

    Args:
        project: the project, open for writing.
        labellers: the person id of each, and how it labels.
        judge: what they go by.
        labels: stop after so many; None goes on until nobody gets an item.
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
            nonce = secrets.token_hex(16)  # one that was used before would return that event, also if it was taken back
            project.label(person, item.item_id, answer, nonce=nonce, seconds=0.0)
            done += 1
    return done


def _by_criteria(project: Project, labeller: Labeller, item: Item) -> dict[str, Any]:
    """What the project's criteria ask of each answer, drawn at random: a judge's score says nothing about them."""
    asked = project.settings.criteria_asked
    draw = random.Random(f"{labeller.seed} {labeller.name} {item.item_id} criteria")
    said = [{one.name: draw.choice(one.values) for one in asked} for _ in item.candidates]
    return {"criteria": said} if asked else {}


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0
