"""Values of a measurement in groups, for their intervals (`heedful.core.intervals`)."""

from collections.abc import Iterable, Sequence

from heedful.data.splits import HasPrompt, item_key


def by_prompt(values: Sequence[float], items: Iterable[HasPrompt]) -> list[list[float]]:
    """Group values by the prompt that they belong to, wherever in the data it stands.

    Prompts are independent of each other; responses to one prompt, and people's opinions of them, are not. A prompt is what
    the trainers split by (`heedful.data.splits.prompt_key`), so the turns of one conversation are one group.

    Args:
        values: the values to group.
        items: for each value the prompt or ranking that it belongs to.
    """
    groups: dict[str, list[float]] = {}
    for value, item in zip(values, items, strict=True):
        groups.setdefault(item_key(item), []).append(value)
    return list(groups.values())
