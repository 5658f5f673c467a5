"""Read training and held-out records from files and encode them as token ids; dropped records are counted.

The ``encode_...`` functions share arguments:

    max_length  maximal tokens per record
    action      for longer records: error, drop or truncate
    refused     a list that collects the errors of records that the chat template refuses; None raises the first
    learns      whether the policy learns from the ids (`check_sampling`)

They return the encoded records and the counts of dropped and truncated ones. They raise DataError for a record that is too
long if ``action`` is "error", and CheckpointError as `check_rendering` does.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from typing import Any, TypeVar

from heedful.configs.options import DataOptions, RecordOptions
from heedful.data.chat import Renderer, RewardInputs, Written, plain_text
from heedful.data.fitting import Counts, Refusal, TooLong, added, check_dropped, each_rendered, fitted, settle, too_long
from heedful.data.messages import wrong
from heedful.data.schemas import read_demonstrations
from heedful.data.splits import HasPrompt, item_key, prompt_key, split_by_prompt
from heedful.data.template_check import Sample, check_rendering, check_sampling, ordinary_answers
from heedful.display import counted, say
from heedful.errors import DataError
from heedful.types import (
    Conversation,
    Demonstration,
    Message,
    Prompt,
    Ranking,
    Response,
    Text,
    last_answer,
    plain_response,
)

Item = TypeVar("Item", bound=HasPrompt)
Encoded = TypeVar("Encoded")
Answer = TypeVar("Answer", bound=Demonstration)
FEW_PROMPTS = 30
"""With fewer held-out prompts a run warns that their metrics are noisy."""
Row = dict[str, list[int]]
"""A reward model's input for a prompt and a response."""


@dataclass(frozen=True)
class Example:
    """A prompt and a response as token ids; the loss covers only the response, or what is learned of it."""

    prompt: list[int]
    response: list[int]
    source: str = field(default="", compare=False)
    """Its place as ``file:line``, for messages."""
    learned: list[bool] | None = None
    """For each token of the response whether the loss covers it; None is all."""

    @property
    def length(self) -> int:
        """Number of tokens of prompt and response."""
        return len(self.prompt) + len(self.response)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the loss."""
        return len(self.response) if self.learned is None else sum(self.learned)

    def cut(self, length: int) -> "Example":
        """The first ``length`` tokens of prompt and response."""
        kept = max(0, length - len(self.prompt))
        learned = None if self.learned is None else self.learned[:kept]
        return replace(self, response=self.response[:kept], learned=learned)


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt and its token ids. If it was cut, the ids are the rest; rewards see the whole ``prompt``."""

    prompt: Prompt
    ids: list[int]


@dataclass(frozen=True)
class RankingRows:
    """A ranking as a reward model reads it, best response first."""

    ranking: Ranking
    """The ranking with its responses sorted, best first, and ranks 0, 1, 2, ... (equal if they tie)."""
    rows: tuple[Row, ...]
    """One row per response, in that order."""

    @property
    def source(self) -> str:
        """The ranking's file and line."""
        return self.ranking.source

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all rows."""
        return sum(len(row["input_ids"]) for row in self.rows)

    @property
    def has_pairs(self) -> bool:
        """True if any response is preferred to another."""
        return self.ranking.ranks[-1] > self.ranking.ranks[0]

    @property
    def mean_length(self) -> float:
        """Mean number of tokens per row; batches are sorted by it."""
        return self.num_tokens / len(self.rows)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest row."""
        return max(len(row["input_ids"]) for row in self.rows)


# Reading and splitting --------------------------------------------------------------------------------------------------


def load_split(read: Callable[..., list[Item]], options: DataOptions) -> tuple[list[Item], list[Item], Counts]:
    """Read ``(training records, held-out records, counts)`` with a function such as `read_rankings`.

    Held-out records come from ``options.eval_data``; without it they are split off by prompt. Few different prompts among
    them are reported on standard error. Raises DataError, ConfigError.
    """
    train, refused = read_usable(read, options.data, options)
    shared = 0
    if options.eval_data is None:
        train, held_out = split_by_prompt(train, options.eval_fraction)
    else:
        held_out, refused_held_out = read_usable(read, options.eval_data, options)
        refused = added(refused, refused_held_out)
        seen = {prompt_key(item.prompt) for item in train if item.prompt}
        shared = sum(prompt_key(item.prompt) in seen for item in held_out if item.prompt)
    prompts = len({item_key(item) for item in held_out})
    if 0 < prompts < FEW_PROMPTS:
        say(
            f"only {counted(prompts, 'held-out prompt')}: metrics of so few are noisy, as is the choice of best/; "
            f"hold out {FEW_PROMPTS} or more (--eval-fraction, --eval-data)"
        )
    records = len(train) + len(held_out) + refused["dropped_unusable"]
    more = {"max_samples": options.max_samples, **refused, "held_out_prompts_also_trained_on": shared}
    counts = {"records": records, "train": len(train), "held_out": len(held_out)}
    return train, held_out, counts | {name: count for name, count in more.items() if count}


def read_usable(read: Callable[..., list[Item]], path: str, options: RecordOptions) -> tuple[list[Item], Counts]:
    """Read the records of a file, and drop and count unusable ones if ``options.unusable`` is drop (`settle`).

    Raises DataError for an unusable record that may not be dropped, and if no record is usable.
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


def encode_split(
    encode: Callable[[list[Item], list[Refusal]], tuple[list[Encoded], Counts]],
    split: tuple[list[Item], list[Item], Counts],
    options: DataOptions,
    renderer: Renderer | None = None,
) -> tuple[list[Encoded], list[Encoded], Counts]:
    """Encode the training and held-out records of `load_split`, and add up the counts of both.

    The counts ``train`` and ``held_out`` are without dropped records.

    ``encode`` turns records into token ids and counts; its second argument is ``refused``. With a ``renderer`` that encodes
    special tokens literally, a warning is printed if a chat template has probably rendered the texts already.

    Raises DataError, also if more records were dropped, for any reason, than ``options.max_dropped`` allows.
    """
    train, held_out, counts = split
    if renderer is not None and renderer.special_tokens == "literal":
        _notice_rendered([*train, *held_out], renderer)
    refused: list[Refusal] = []
    encoded_train, done_train = encode(train, refused)
    of_train = len(refused)
    encoded_held_out, done_held_out = encode(held_out, refused) if held_out else ([], {})
    refusals = settle(refused, len(train) + len(held_out) - len(refused), options)
    left = {
        "train": len(train) - of_train - _dropped(done_train),
        "held_out": len(held_out) - (len(refused) - of_train) - _dropped(done_held_out),
    }
    summed = added(counts | left, done_train, done_held_out, refusals)
    counts = {name: count for name, count in summed.items() if count or name in counts}
    check_dropped(counts, max_dropped=options.max_dropped, path=options.data)
    if not encoded_train or (held_out and not encoded_held_out):
        half = "held-out" if encoded_train else "training"
        raise DataError(f"{options.data}: every {half} record was dropped: {counts}")
    return encoded_train, encoded_held_out, counts


def _dropped(counts: Counts) -> int:
    return sum(count for name, count in counts.items() if name.startswith("dropped_"))


def _notice_rendered(records: Sequence[HasPrompt], renderer: Renderer) -> None:
    """Warn if most raw texts hold special tokens, which are encoded as letters."""
    raw = [record for record in records if isinstance(record.prompt, str)]
    found = []
    for record in raw:
        texts = [record.prompt, getattr(record, "response", ""), *getattr(record, "responses", ())]
        if specials := renderer.encoder.specials_in(*(text for text in texts if isinstance(text, str))):
            found.append((record.source, specials))
    if 2 * len(found) <= len(raw):
        return
    counted = Counter(special for _, specials in found for special in specials)
    names = ", ".join(special for special, _ in counted.most_common(4)) + ", ..." * (len(counted) > 4)
    say(
        f"WARNING: {len(found)} of {len(raw)} raw texts ({len(found) / len(raw):.0%}) hold special tokens of this tokenizer "
        f"({names}), first at {found[0][0]}. They are read letter by letter, not as the tokens. If a chat template "
        "has rendered these texts, use --special-tokens read, or give messages instead"
    )


# Demonstrations and labelled responses ----------------------------------------------------------------------------------


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
    """Encode demonstrations as token ids.

    Plain text (without a prompt) is cut into pieces of ``max_length`` tokens that overlap by one, so that every token except
    the first is in the loss once. A text of a single token is dropped, because nothing comes before it. Truncation shortens
    the response, without an end token; a prompt that leaves no room for a response is dropped.

    With ``learn_prompt`` the loss also covers the prompt, except its first token: `whole_conversations`, once each.
    """
    if learn_prompt:
        demonstrations = whole_conversations(demonstrations)
        for d in demonstrations:
            if any(isinstance(message, Message) and not message.learned for message in d.prompt):
                raise DataError(
                    f"{d.source}: a message has weight 0, train false or loss false, but --loss-on all also trains on "
                    "prompts, including this message. Use --loss-on response"
                )
    texts = [_text_pieces(d, renderer, max_length) for d in demonstrations if d.prompt == ""]
    pieces = [piece for cut in texts for piece in cut]
    answered, counts = encode_responses(
        [d for d in demonstrations if d.prompt != ""],
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
    return pieces + kept, {
        "dropped_too_long": counts["dropped_too_long"],
        "dropped_too_short": sum(not cut for cut in texts),
        "truncated": counts["truncated"],
        "text_pieces": len(pieces),
    }


def _text_pieces(demonstration: Demonstration, renderer: Renderer, max_length: int) -> list[Example]:
    ids = renderer.written_ids("", demonstration.response, truncated=demonstration.truncated)
    starts = range(0, len(ids) - 1, max_length - 1)
    return [
        Example(ids[start : start + 1], ids[start + 1 : start + max_length], demonstration.source) for start in starts
    ]


def whole_conversations(demonstrations: Sequence[Demonstration]) -> list[Demonstration]:
    """Return the last demonstration of each conversation: its prompt and response are the whole conversation."""

    def begins(one: Demonstration, later: Demonstration | None) -> bool:
        if later is None or one.source != later.source or isinstance(one.prompt, str):
            return False
        return len(one.prompt) < len(later.prompt) and later.prompt[: len(one.prompt)] == one.prompt

    return [one for one, later in pairwise([*demonstrations, None]) if one is not None and not begins(one, later)]


def read_to_learn(loss_on: str) -> Callable[..., list[Demonstration]]:
    """Return `read_demonstrations`; for ``--loss-on all``, the same with `whole_conversations`."""

    def read(path: str, **options: Any) -> list[Demonstration]:
        return whole_conversations(read_demonstrations(path, **options))

    return read if loss_on == "all" else read_demonstrations


def demonstration_texts(path: str) -> list[str]:
    """All prompts and responses of a file of demonstrations, for a tokenizer to learn from. Raises DataError."""
    return [
        text for one in read_demonstrations(path) for text in (plain_text(one.prompt), plain_response(one.response))
    ]


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
    """Encode demonstrations or labelled responses with a prompt, each with its record; ``what`` names them in messages."""

    def encode(d: Answer) -> Example:
        return as_example(renderer.written(d.prompt, d.response, truncated=d.truncated, prefill=d.prefill), d.source)

    records, pairs = each_rendered(records, encode, refused)
    samples = [Sample(*last_answer(d.prompt, d.response), d.source) for d in records if not d.truncated]
    check_rendering(renderer, samples)
    check_sampling(renderer, samples, learns=learns)

    def shortened(i: int) -> tuple[Answer, Example] | None:
        cut = pairs[i].cut(max_length)
        return (records[i], cut) if cut.num_tokens else None

    lengths, both = [pair.length for pair in pairs], list(zip(records, pairs, strict=True))
    return fitted(both, lengths, [d.source for d in records], shortened, limit=max_length, action=action, what=what)


def as_example(written: Written, source: str) -> Example:
    """The example of a record's ids."""
    prompt, response, learned = written
    return Example(prompt, response, source, None if all(learned) else learned)


# Rankings ---------------------------------------------------------------------------------------------------------------


def encode_rankings(
    rankings: Sequence[Ranking],
    inputs: RewardInputs,
    *,
    max_length: int,
    action: TooLong,
    equal_pairs: str,
    refused: list[Refusal] | None = None,
) -> tuple[list[RankingRows], Counts]:
    """Encode rankings as rows of token ids, best response first. A ranking is too long if one of its responses is.

    ``equal_pairs`` handles a ranking that prefers a response to an equal one, before or after truncation: "error" or "drop".
    "unusable": if all its responses are equal, it goes to ``refused``, otherwise it is an error.
    """

    @functools.cache  # a response is often in several pairs
    def row(prompt: Text, response: Response, truncated: bool, limit: int | None) -> Row:
        return inputs.encode(prompt, response, truncated=truncated, max_length=limit)

    def encode(ranking: Ranking, limit: int | None = None) -> RankingRows:
        rows = (row(ranking.prompt, response, ranking.truncated, limit) for response in ranking.responses)
        return RankingRows(ranking, tuple(rows))

    what = "pairs" if all(len(ranking.responses) == 2 for ranking in rankings) else "rankings"
    rankings, encoded = each_rendered(rankings, lambda ranking: encode(best_first(ranking)), refused)
    if inputs.renderer is not None:
        samples = [
            Sample(*last_answer(r.prompt, text), r.source) for r in rankings if not r.truncated for text in r.responses
        ]
        check_rendering(inputs.renderer, samples, read=not inputs.written)
        if inputs.written:
            check_sampling(inputs.renderer, samples)
    lengths, sources = [one.longest for one in encoded], [ranking.source for ranking in rankings]
    encoded, counts = fitted(
        encoded,
        lengths,
        sources,
        lambda i: encode(encoded[i].ranking, max_length),
        limit=max_length,
        action=action,
        what=what,
    )
    if equal_pairs == "unusable" and refused is not None:
        same = [all(row == one.rows[0] for row in one.rows) for one in encoded]
        refused += [
            wrong(
                one.ranking.source, f"all {len(one.rows)} responses are equal", "different ones", cause="equal answers"
            )
            for one, is_same in zip(encoded, same, strict=True)
            if is_same
        ]
        encoded = [one for one, is_same in zip(encoded, same, strict=True) if not is_same]
    contradictory = [_is_contradictory(one.ranking, [row["input_ids"] for row in one.rows]) for one in encoded]
    equal = [one.ranking.source for one, is_equal in zip(encoded, contradictory, strict=True) if is_equal]
    if equal and equal_pairs != "drop":
        whole = sum(_is_contradictory(one.ranking, one.ranking.responses) for one in encoded)
        how = "truncation" if any(counts.values()) else "tokenisation"
        after = f" after {how}" if len(equal) > whole else ""
        fault = "have equal chosen and rejected responses" if what == "pairs" else "prefer a response to an equal one"
        raise DataError(
            f"{len(equal)} of {len(encoded)} {what} {fault}{after}: {', '.join(equal[:5])}. Fix the data, or use "
            f"--equal-pairs drop{' or --unusable drop' if what == 'pairs' else ''}"
        )
    counts["dropped_equal"] = len(equal)
    return [one for one, is_equal in zip(encoded, contradictory, strict=True) if not is_equal], counts


def best_first(ranking: Ranking) -> Ranking:
    """Sort a ranking's responses by rank and renumber the ranks 0, 1, 2, ...; responses that tie keep their order."""
    order = sorted(range(len(ranking.ranks)), key=ranking.ranks.__getitem__)
    place = {rank: i for i, rank in enumerate(sorted(set(ranking.ranks)))}
    return replace(
        ranking,
        responses=tuple(ranking.responses[i] for i in order),
        ranks=tuple(place[ranking.ranks[i]] for i in order),
    )


def _is_contradictory(ranking: Ranking, items: Sequence[Any]) -> bool:
    """True if one of two equal items is preferred to the other. ``items`` has one entry per response, in the same order."""
    return any(
        one == other and rank != other_rank
        for (one, rank), (other, other_rank) in combinations(zip(items, ranking.ranks, strict=True), 2)
    )


# Prompts ----------------------------------------------------------------------------------------------------------------


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
    """Encode prompts as token ids. `cut_prompt` truncates them; ``remedy`` is further advice in the error of a long one.

    Raises DataError also if a prompt cannot be truncated.
    """
    prompts, encoded = each_rendered(
        prompts, lambda prompt: EncodedPrompt(prompt, renderer.prompt_ids(prompt.prompt, prompt.prefill)), refused
    )
    conversations = [prompt for prompt in prompts if not isinstance(prompt.prompt, str)]
    if conversations:
        first = conversations[0]
        answers = ordinary_answers(renderer, first.prompt)
        check_rendering(renderer, (Sample(one.prompt, answers[-1], one.source) for one in conversations))
        check_sampling(renderer, [Sample(first.prompt, answer, first.source) for answer in answers], learns=learns)
    lengths, sources = [len(one.ids) for one in encoded], [prompt.source for prompt in prompts]

    def shortened(i: int) -> EncodedPrompt:
        prompt = prompts[i]
        cut = cut_prompt(prompt.prompt, renderer, limit=max_length, source=prompt.source, prefill=prompt.prefill)
        return EncodedPrompt(prompt, renderer.prompt_ids(cut, prompt.prefill))

    return fitted(encoded, lengths, sources, shortened, limit=max_length, action=action, what="prompts", remedy=remedy)


def answerable(
    prompts: Sequence[Prompt], renderers: Sequence[Renderer], limits: Sequence[int], options: RecordOptions
) -> tuple[list[Prompt], Counts]:
    """The prompts that all models can read within their limits of tokens, and the counts of unusable or too long ones.

    With ``--too-long truncate`` longer ones stay: `encode_prompts` truncates them.
    """
    refused: list[Refusal] = []
    for renderer in renderers:
        prompts, _ = each_rendered(prompts, lambda one: renderer.prompt_ids(one.prompt, one.prefill), refused)  # noqa: B023  called now
    counts = settle(refused, len(prompts), options)
    found: set[int] = set()
    for renderer, limit in zip(renderers, limits, strict=True):
        lengths = [len(renderer.prompt_ids(prompt.prompt, prompt.prefill)) for prompt in prompts]
        sources = [prompt.source for prompt in prompts]
        found |= too_long(lengths, sources, limit=limit, action=options.too_long, what="prompts")
    if options.too_long == "drop":
        kept = [prompt for i, prompt in enumerate(prompts) if i not in found]
        return kept, {**counts, "dropped_too_long": len(found)}
    return list(prompts), {**counts, "truncated": len(found)}


def cut_prompt(prompt: Text, renderer: Renderer, *, limit: int, source: str, prefill: str = "") -> Text:
    """Return the prompt, shortened until it has at most ``limit`` tokens.

    The end of a prompt is kept, because the response continues it. Raw text loses its beginning but keeps a BOS token. A
    conversation keeps its system message and tools, and loses its oldest turns, up to a user's, one after another. If the
    last user message with the messages after it is still too long, that message loses its beginning. Characters are never
    split. The limit includes everything that the template adds.

    Raises DataError if nothing of the text or of the last user message would be left.
    """

    def fits(candidate: Text) -> bool:
        return len(renderer.prompt_ids(candidate, prefill)) <= limit

    if fits(prompt):
        return prompt
    if isinstance(prompt, str):
        rest = _longest_end(prompt, fits)
        if rest is None:
            raise DataError(f"{source}: the prompt cannot be cut to {limit} tokens; {_REMEDY}")
        return rest
    system = prompt[:1] if prompt[0].role == "system" else ()
    questions = [i for i, message in enumerate(prompt) if message.role == "user"]
    tools = prompt[0].tools  # always on the first message; they count towards the limit

    def with_tools(messages: Conversation) -> Conversation:
        return (replace(messages[0], tools=tools), *messages[1:])

    for start in questions:
        kept = with_tools((*system, *prompt[start:]))
        if fits(kept):
            return kept
    question = prompt[questions[-1]] if questions else None

    def with_end(end: str) -> Conversation:
        assert question is not None
        return with_tools((*system, replace(question, content=end), *prompt[questions[-1] + 1 :]))

    rest = None if question is None else _longest_end(question.content, lambda end: fits(with_end(end)))
    if rest is None:
        raise DataError(
            f"{source}: the prompt has {len(renderer.prompt_ids(prompt, prefill))} tokens and cannot be cut to {limit}: the "
            "system message, the tools, the messages after the last user message and the chat template leave no room for it; "
            f"{_REMEDY}"
        )
    return with_end(rest)


_REMEDY = "raise the limit (--max-prompt-tokens in training), or use --too-long drop"


def _longest_end(text: str, fits: Callable[[str], bool]) -> str | None:
    """The longest end of a text that fits, by bisection; None if only white space would be left.

    It starts at one character and doubles, so that only texts of about the final length are tokenised.
    """
    fitting, beyond = 0, 1
    while beyond < len(text) and fits(text[-beyond:]):
        fitting, beyond = beyond, 2 * beyond
    beyond = min(beyond, len(text))
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        if fits(text[-middle:]):
            fitting = middle
        else:
            beyond = middle
    end = text[len(text) - fitting :]
    return end if end.strip() else None
