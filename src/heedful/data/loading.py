"""Training and held-out records from files, and records to token ids, with everything that is left out counted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from heedful.configs.options import DataOptions, RecordOptions
from heedful.data.chat import Renderer, RewardInputs
from heedful.data.fitting import Counts, TooLong, check_dropped, too_long
from heedful.data.rankings import Row, encode_rankings
from heedful.data.splits import HasPrompt, prompt_key, split_by_prompt
from heedful.errors import DataError
from heedful.types import Demonstration, Prompt, Ranking

Item = TypeVar("Item", bound=HasPrompt)
Encoded = TypeVar("Encoded")


@dataclass(frozen=True)
class Example:
    """A prompt and a response as token ids; only the response is learned."""

    prompt: list[int]
    response: list[int]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class PairRows:
    """A preference pair as a reward model reads it."""

    ranking: Ranking
    chosen: Row
    rejected: Row


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt and its token ids."""

    prompt: Prompt
    ids: list[int]


def load_split(read: Callable[..., list[Item]], options: DataOptions) -> tuple[list[Item], list[Item], Counts]:
    """Training and held-out records. The latter come from ``eval_data``, or are split off by prompt.

    Raises DataError.
    """
    items, refused = read_usable(read, options.data, options)
    if options.eval_data is None:
        train, held_out = split_by_prompt(items, options.eval_fraction)
        counts = {"records": len(items) + refused, "train": len(train), "held_out": len(held_out)}
        counts |= _if_any("max_samples", options.max_samples)
        return train, held_out, counts | _if_any("dropped_unusable", refused)
    held_out, refused_held_out = read_usable(read, options.eval_data, options)
    refused += refused_held_out
    seen = {prompt_key(item.prompt) for item in items if item.prompt}
    shared = sum(prompt_key(item.prompt) in seen for item in held_out if item.prompt)
    counts = {"records": len(items) + len(held_out) + refused, "train": len(items), "held_out": len(held_out)}
    counts |= _if_any("max_samples", options.max_samples) | _if_any("dropped_unusable", refused)
    return items, held_out, counts | _if_any("held_out_prompts_also_trained_on", shared)


def read_usable(read: Callable[..., list[Item]], path: str, options: RecordOptions) -> tuple[list[Item], int]:
    """The records of a file and how many unusable ones were left out, where the options allow it. Raises DataError."""
    refused: list[DataError] | None = [] if options.unusable == "drop" else None
    items = read(
        path,
        columns=options.columns,
        system_prompt=options.system_prompt,
        refused=refused,
        max_samples=options.max_samples,
    )
    if refused and not items:
        raise DataError(f"{path}: none of {len(refused)} records is usable, first: {refused[0]}")
    return items, len(refused or [])


def _if_any(name: str, count: int | None) -> Counts:
    return {name: count} if count else {}


def encode_split(
    encode: Callable[[list[Item]], tuple[list[Encoded], Counts]],
    split: tuple[list[Item], list[Item], Counts],
    options: DataOptions,
) -> tuple[list[Encoded], list[Encoded], Counts]:
    """Training and held-out records of `load_split` as token ids, and the counts of both added up.

    Raises DataError, also where more was dropped, for whatever reason, than ``max_dropped`` allows.
    """
    train, held_out, counts = split
    encoded_train, done_train = encode(train)
    encoded_held_out, done_held_out = encode(held_out) if held_out else ([], {})
    added = {name: done_train[name] + done_held_out.get(name, 0) for name in done_train}
    counts = counts | {name: count for name, count in added.items() if count}
    check_dropped(counts, max_dropped=options.max_dropped, path=options.data)
    if not encoded_train or (split[1] and not encoded_held_out):
        half = "held-out" if encoded_train else "training"
        raise DataError(f"{options.data}: every {half} record was dropped: {counts}")
    return encoded_train, encoded_held_out, counts


def encode_demonstrations(
    demonstrations: Sequence[Demonstration],
    renderer: Renderer,
    *,
    max_length: int,
    action: TooLong,
    learn_prompt: bool = False,
) -> tuple[list[Example], Counts]:
    """Demonstrations as token ids.

    Plain text (no prompt) is cut into pieces of ``max_length`` that overlap by one token, so that every token but the
    first is learned once. ``learn_prompt`` treats prompts the same way, as text to learn. Of the others, those longer
    than ``max_length`` are handled by ``action``: truncation shortens the response (its end is then not learned), and a
    prompt that leaves no room for a response is dropped. So is a text of a single token: nothing comes before it.

    Raises DataError.
    """
    texts = [_text_pieces(d, renderer, max_length) for d in demonstrations if not d.prompt]
    pieces = [piece for cut in texts for piece in cut]
    prompted = [d for d in demonstrations if d.prompt]
    pairs = [
        Example(
            renderer.prompt_ids(d.prompt), renderer.response_ids(d.response, prompt=d.prompt, truncated=d.truncated)
        )
        for d in prompted
    ]
    lengths = [len(pair.prompt) + len(pair.response) for pair in pairs]
    sources = [d.source for d in prompted]
    offenders = set(too_long(lengths, sources, limit=max_length, action=action, what="demonstrations"))
    without_room = [i for i in offenders if len(pairs[i].prompt) >= max_length]
    dropped = offenders if action == "drop" else set(without_room)
    kept = [
        Example(pair.prompt, pair.response[: max_length - len(pair.prompt)])
        for i, pair in enumerate(pairs)
        if i not in dropped
    ]
    if learn_prompt:
        kept = [Example(pair.prompt[:1], pair.prompt[1:] + pair.response) for pair in kept]
    counts = {
        "dropped_too_long": len(dropped),
        "dropped_too_short": sum(not cut for cut in texts),
        "truncated": len(offenders - dropped),
        "text_pieces": len(pieces),
    }
    return pieces + kept, counts


def encode_pairs(
    rankings: Sequence[Ranking],
    inputs: RewardInputs,
    *,
    max_length: int,
    action: TooLong,
    equal_pairs: str,
) -> tuple[list[PairRows], Counts]:
    """Pairs as rows of token ids, as `encode_rankings` makes them.

    Raises DataError, also where a ranking is not a pair.
    """
    for ranking in rankings:
        if len(ranking.responses) != 2:
            raise DataError(
                f"{ranking.source}: a ranking of {len(ranking.responses)} responses; this trainer learns from pairs "
                "(prompt, chosen, rejected). `heedful reward` learns from longer rankings"
            )
    encoded, counts = encode_rankings(rankings, inputs, max_length=max_length, action=action, equal_pairs=equal_pairs)
    return [PairRows(one.ranking, *one.rows) for one in encoded], counts


def encode_prompts(
    prompts: Sequence[Prompt], renderer: Renderer, *, max_length: int, action: TooLong
) -> tuple[list[EncodedPrompt], Counts]:
    """Prompts as token ids; truncation keeps the end of a prompt, which the response continues.

    Raises DataError.
    """
    encoded = [EncodedPrompt(prompt, renderer.prompt_ids(prompt.prompt)) for prompt in prompts]
    lengths = [len(e.ids) for e in encoded]
    sources = [prompt.source for prompt in prompts]
    offenders = set(too_long(lengths, sources, limit=max_length, action=action, what="prompts"))
    counts = {
        "dropped_too_long": len(offenders) if action == "drop" else 0,
        "truncated": len(offenders) if action == "truncate" else 0,
    }
    if action == "drop":
        return [e for i, e in enumerate(encoded) if i not in offenders], counts
    return [EncodedPrompt(e.prompt, e.ids[-max_length:]) for e in encoded], counts


def _text_pieces(demonstration: Demonstration, renderer: Renderer, max_length: int) -> list[Example]:
    ids = renderer.prompt_ids("") + renderer.response_ids(
        demonstration.response, prompt="", truncated=demonstration.truncated
    )
    starts = range(0, len(ids) - 1, max_length - 1)
    return [Example(ids[start : start + 1], ids[start + 1 : start + max_length]) for start in starts]
