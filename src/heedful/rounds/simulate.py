"""``heedful label simulate``: people who go by a reward and err, in the place of people."""

import math

from heedful.configs.rounds import SimulateConfig
from heedful.errors import DataError
from heedful.label.project import Project
from heedful.rounds.judging import load_judge, scores_of_items
from heedful.rounds.simulated import Labeller, label_project

AT_SCALE = 0.73
"""How often the better answer is preferred if scores differ by ``--scale``."""


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
