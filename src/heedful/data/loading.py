"""Read training and held-out records from files and encode them as token ids; whatever is left out is counted."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from heedful.configs.options import DataOptions, RecordOptions
from heedful.data.chat import Renderer, RewardInputs
from heedful.data.cutting import cut_prompt
from heedful.data.fitting import Counts, Refusal, TooLong, added, check_dropped, each_rendered, settle, too_long
from heedful.data.rankings import Row, encode_rankings
from heedful.data.schemas import read_demonstrations
from heedful.data.splits import HasPrompt, prompt_key, split_by_prompt
from heedful.data.template import naming
from heedful.data.template_check import Sample, check_rendering, check_sampling, ordinary_answers
from heedful.display import say
from heedful.errors import DataError
from heedful.types import Demonstration, Message, Prompt, Ranking

Item = TypeVar("Item", bound=HasPrompt)
Encoded = TypeVar("Encoded")
Answer = TypeVar("Answer", bound=Demonstration)
COUNTED = ("dropped_too_long", "dropped_too_short", "truncated", "text_pieces")
"""What is counted of demonstrations, in the order in which it is shown."""


@dataclass(frozen=True)
class Example:
    """A prompt and a response as token ids; the loss covers only the response."""

    prompt: list[int]
    response: list[int]
    source: str = field(default="", compare=False)
    """Where it was read, as ``file:line``, for messages."""

    @property
    def length(self) -> int:
        """Number of tokens of prompt and response."""
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class PairRows:
    """A preference pair as a reward model reads it."""

    ranking: Ranking
    chosen: Row
    rejected: Row


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt and its token ids. If it was cut, the ids are what is left; rewards see the whole ``prompt``."""

    prompt: Prompt
    ids: list[int]


def load_split(read: Callable[..., list[Item]], options: DataOptions) -> tuple[list[Item], list[Item], Counts]:
    """Read ``(training records, held-out records, counts)``.

    Held-out records come from ``options.eval_data``; without it they are split off by prompt.

    Args:
        read: `read_demonstrations`, `read_rankings` or `read_prompts`.
        options: the data settings of a trainer.

    Raises DataError and ConfigError.
    """
    items, refused = read_usable(read, options.data, options)
    if options.eval_data is None:
        train, held_out = split_by_prompt(items, options.eval_fraction)
        counts = {"records": len(items) + refused["dropped_unusable"], "train": len(train), "held_out": len(held_out)}
        counts |= _if_any("max_samples", options.max_samples)
        return train, held_out, counts | _not_zero(refused)
    held_out, refused_held_out = read_usable(read, options.eval_data, options)
    refused = added(refused, refused_held_out)
    seen = {prompt_key(item.prompt) for item in items if item.prompt}
    shared = sum(prompt_key(item.prompt) in seen for item in held_out if item.prompt)
    records = len(items) + len(held_out) + refused["dropped_unusable"]
    counts = {"records": records, "train": len(items), "held_out": len(held_out)}
    counts |= _if_any("max_samples", options.max_samples) | _not_zero(refused)
    return items, held_out, counts | _if_any("held_out_prompts_also_trained_on", shared)


def read_usable(read: Callable[..., list[Item]], path: str, options: RecordOptions) -> tuple[list[Item], Counts]:
    """Read the records of a file, and count the unusable ones that ``options.unusable`` says to drop (`settle`).

    Args:
        read: `read_demonstrations`, `read_rankings` or `read_prompts`.
        path: the file or data set.
        options: how to read it.

    Raises DataError for an unusable record that is not to be dropped, and if no record is usable.
    """
    refused: list[DataError] = []
    items = read(
        path,
        columns=options.columns,
        system_prompt=options.system_prompt,
        refused=refused,
        max_samples=options.max_samples,
    )
    if refused and not items and options.unusable == "drop":
        raise DataError(f"{path}: none of {len(refused)} records is usable, first: {refused[0]}")
    return items, settle(refused, len(items), options)


def _if_any(name: str, count: int | None) -> Counts:
    return {name: count} if count else {}


def _not_zero(counts: Counts) -> Counts:
    return {name: count for name, count in counts.items() if count}


def encode_split(
    encode: Callable[[list[Item], list[Refusal]], tuple[list[Encoded], Counts]],
    split: tuple[list[Item], list[Item], Counts],
    options: DataOptions,
    renderer: Renderer | None = None,
) -> tuple[list[Encoded], list[Encoded], Counts]:
    """Encode the training and held-out records of `load_split`, and add up the counts of both.

    Args:
        encode: turns records into token ids and counts, such as `encode_demonstrations`; a list collects those that a chat
            template refuses.
        split: what `load_split` returned.
        options: the data settings of a trainer.
        renderer: if given, say so if it reads texts letter by letter that a chat template has probably rendered.

    Raises DataError, also if more records were dropped, for any reason, than ``options.max_dropped`` allows.
    """
    train, held_out, counts = split
    if renderer is not None:
        _notice_rendered([*train, *held_out], renderer)
    refused: list[Refusal] = []
    encoded_train, done_train = encode(train, refused)
    encoded_held_out, done_held_out = encode(held_out, refused) if held_out else ([], {})
    refusals = settle(refused, len(train) + len(held_out) - len(refused), options)
    summed = added(counts, done_train, done_held_out, refusals)
    counts = {name: count for name, count in summed.items() if count or name in counts}
    check_dropped(counts, max_dropped=options.max_dropped, path=options.data)
    if not encoded_train or (split[1] and not encoded_held_out):
        half = "held-out" if encoded_train else "training"
        raise DataError(f"{options.data}: every {half} record was dropped: {counts}")
    return encoded_train, encoded_held_out, counts


def _notice_rendered(records: Sequence[HasPrompt], renderer: Renderer) -> None:
    """Say so if most raw texts hold special tokens that are read as letters."""
    if renderer.special_tokens == "read":
        return
    raw = [record for record in records if isinstance(record.prompt, str)]
    found = [(record, renderer.encoder.specials_in(*_texts(record))) for record in raw]
    found = [(record, specials) for record, specials in found if specials]
    if 2 * len(found) <= len(raw):
        return
    counted = Counter(special for _, specials in found for special in specials)
    names = ", ".join(special for special, _ in counted.most_common(4)) + ", ..." * (len(counted) > 4)
    say(
        f"WARNING: {len(found)} of {len(raw)} raw texts ({len(found) / len(raw):.0%}) hold special tokens of this tokenizer "
        f"({names}), first at {found[0][0].source}. They are read letter by letter, not as the tokens. If a chat template "
        "has rendered these texts, use --special-tokens read, or give messages instead"
    )


def _texts(record: HasPrompt) -> list[str]:
    """Return a record's prompt and responses, as far as they are raw text."""
    responses = [getattr(record, "response", ""), *getattr(record, "responses", ())]
    return [text for text in (record.prompt, *responses) if isinstance(text, str)]


def encode_demonstrations(
    demonstrations: Sequence[Demonstration],
    renderer: Renderer,
    *,
    max_length: int,
    action: TooLong,
    learn_prompt: bool = False,
    learns: bool = True,
    refused: list[Refusal] | None = None,
) -> tuple[list[Example], Counts]:
    """Encode demonstrations as token ids, and count what was dropped, truncated or cut into pieces.

    Plain text (without a prompt) is cut into pieces of ``max_length`` tokens that overlap by one, so that every token except
    the first is learned once. A text of a single token is dropped, because nothing comes before it.

    Args:
        demonstrations: the demonstrations to encode.
        renderer: of the model's tokenizer.
        max_length: the most tokens per demonstration or piece.
        action: what to do with longer demonstrations that have a prompt. Truncation shortens the response, whose end is then
            not learned; a prompt that leaves no room for a response is dropped.
        learn_prompt: learn the prompt too, except its first token: `whole_conversations`, once each.
        learns: as `check_sampling` says.
        refused: collects what is wrong with records that the chat template refuses; None raises the first.

    Raises DataError if a demonstration is too long and ``action`` is "error", CheckpointError as `check_rendering` does.
    """
    if learn_prompt:
        demonstrations = whole_conversations(demonstrations)
    texts = [_text_pieces(d, renderer, max_length) for d in demonstrations if not d.prompt]
    pieces = [piece for cut in texts for piece in cut]
    prompted = [d for d in demonstrations if d.prompt]
    masked = [
        d.source for d in prompted if learn_prompt and any(not m.learned for m in d.prompt if isinstance(m, Message))
    ]
    if masked:
        raise DataError(
            f"{masked[0]}: a message has weight 0, train false or loss false, but --loss-on all learns prompts too, and "
            "with them this message. Use --loss-on response"
        )
    answered, counts = encode_responses(
        prompted,
        renderer,
        max_length=max_length,
        action=action,
        what="demonstrations",
        learns=learns,
        refused=refused,
    )
    kept = [example for _, example in answered]
    if learn_prompt:
        kept = [Example(pair.prompt[:1], pair.prompt[1:] + pair.response, pair.source) for pair in kept]
    counts |= {"dropped_too_short": sum(not cut for cut in texts), "text_pieces": len(pieces)}
    return pieces + kept, {name: counts[name] for name in COUNTED}


def whole_conversations(demonstrations: Sequence[Demonstration]) -> list[Demonstration]:
    """Return the last demonstration of each conversation: its prompt and its response are the whole of it."""
    return [one for one, later in pairwise([*demonstrations, None]) if one is not None and not _begins(one, later)]


def _begins(one: Demonstration, later: Demonstration | None) -> bool:
    """True if the later demonstration is of a later turn of the same conversation."""
    if later is None or one.source != later.source or isinstance(one.prompt, str):
        return False
    return len(one.prompt) < len(later.prompt) and later.prompt[: len(one.prompt)] == one.prompt


def read_to_learn(loss_on: str) -> Callable[..., list[Demonstration]]:
    """Return `read_demonstrations`, or for the loss on ``all`` tokens the same with `whole_conversations`."""

    def read(path: str, **options: Any) -> list[Demonstration]:
        return whole_conversations(read_demonstrations(path, **options))

    return read if loss_on == "all" else read_demonstrations


def encode_responses(
    records: Sequence[Answer],
    renderer: Renderer,
    *,
    max_length: int,
    action: TooLong,
    what: str,
    learns: bool = True,
    refused: list[Refusal] | None = None,
) -> tuple[list[tuple[Answer, Example]], Counts]:
    """Encode records with a prompt and a response as token ids, each with its record, and count what was dropped or cut.

    Args:
        records: demonstrations or labelled responses, all with a prompt.
        renderer: of the model's tokenizer.
        max_length: the most tokens per record.
        action: what to do with longer ones, as `encode_demonstrations` says.
        what: what the records are called in messages.
        learns: as `check_sampling` says.
        refused: as `encode_demonstrations` says.

    Raises DataError if a record is too long and ``action`` is "error", CheckpointError as `check_rendering` does.
    """
    records, pairs = each_rendered(records, lambda d: _encoded(d, renderer), refused)
    samples = [Sample(d.prompt, d.response, d.source) for d in records if not d.truncated]
    check_rendering(renderer, samples)
    check_sampling(renderer, samples, learns=learns)
    offenders = set(
        too_long([p.length for p in pairs], [d.source for d in records], limit=max_length, action=action, what=what)
    )
    dropped = offenders if action == "drop" else {i for i in offenders if len(pairs[i].prompt) >= max_length}
    kept = [
        (records[i], Example(pair.prompt, pair.response[: max_length - len(pair.prompt)], pair.source))
        for i, pair in enumerate(pairs)
        if i not in dropped
    ]
    return kept, {"dropped_too_long": len(dropped), "truncated": len(offenders - dropped)}


def encode_pairs(
    rankings: Sequence[Ranking],
    inputs: RewardInputs,
    *,
    max_length: int,
    action: TooLong,
    equal_pairs: str,
    refused: list[Refusal] | None = None,
) -> tuple[list[PairRows], Counts]:
    """Encode pairs as rows of token ids; the arguments are those of `encode_rankings`.

    Raises DataError, also if a ranking is not a pair.
    """
    for ranking in rankings:
        if len(ranking.responses) != 2:
            raise DataError(
                f"{ranking.source}: a ranking of {len(ranking.responses)} responses; this trainer learns from pairs "
                "(prompt, chosen, rejected). `heedful reward` learns from longer rankings"
            )
    encoded, counts = encode_rankings(
        rankings, inputs, max_length=max_length, action=action, equal_pairs=equal_pairs, refused=refused
    )
    return [PairRows(one.ranking, *one.rows) for one in encoded], counts


def encode_prompts(
    prompts: Sequence[Prompt],
    renderer: Renderer,
    *,
    max_length: int,
    action: TooLong,
    remedy: str = "a model with a longer context",
    learns: bool = True,
    refused: list[Refusal] | None = None,
) -> tuple[list[EncodedPrompt], Counts]:
    """Encode prompts as token ids, and count what was dropped or truncated.

    Args:
        prompts: the prompts to encode.
        renderer: of the policy's tokenizer.
        max_length: the most tokens per prompt.
        action: what to do with longer prompts. `cut_prompt` truncates them.
        remedy: what else to advise if a prompt is too long.
        learns: as `check_sampling` says.
        refused: as `encode_demonstrations` says.

    Raises DataError if a prompt is too long and ``action`` is "error", or if it cannot be truncated; CheckpointError as
    `check_rendering` does.
    """
    prompts, encoded = each_rendered(prompts, lambda prompt: encoded_prompt(prompt, renderer), refused)
    conversations = [prompt for prompt in prompts if not isinstance(prompt.prompt, str)]
    for first in conversations[:1]:
        answers = ordinary_answers(renderer, first.prompt)
        check_rendering(renderer, (Sample(one.prompt, answers[-1], one.source) for one in conversations))
        check_sampling(renderer, [Sample(first.prompt, answer, first.source) for answer in answers], learns=learns)
    lengths = [len(e.ids) for e in encoded]
    sources = [prompt.source for prompt in prompts]
    offenders = set(too_long(lengths, sources, limit=max_length, action=action, what="prompts", remedy=remedy))
    counts = {
        "dropped_too_long": len(offenders) if action == "drop" else 0,
        "truncated": len(offenders) if action == "truncate" else 0,
    }
    if action == "drop":
        return [e for i, e in enumerate(encoded) if i not in offenders], counts
    for i in offenders:
        cut = cut_prompt(prompts[i].prompt, renderer, limit=max_length, source=sources[i])
        encoded[i] = EncodedPrompt(prompts[i], renderer.prompt_ids(cut))
    return encoded, counts


def encoded_prompt(prompt: Prompt, renderer: Renderer) -> EncodedPrompt:
    """Encode one prompt as token ids, without a limit. Raises CheckpointError with the prompt's place."""
    with naming(prompt.source):
        return EncodedPrompt(prompt, renderer.prompt_ids(prompt.prompt))


def _encoded(demonstration: Demonstration, renderer: Renderer) -> Example:
    with naming(demonstration.source):
        prompt, response = renderer.written(
            demonstration.prompt, demonstration.response, truncated=demonstration.truncated
        )
        return Example(prompt, response, demonstration.source)


def _text_pieces(demonstration: Demonstration, renderer: Renderer, max_length: int) -> list[Example]:
    ids = renderer.written_ids("", demonstration.response, truncated=demonstration.truncated)
    starts = range(0, len(ids) - 1, max_length - 1)
    return [
        Example(ids[start : start + 1], ids[start + 1 : start + max_length], demonstration.source) for start in starts
    ]
