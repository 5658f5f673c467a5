"""Checks of the records as they were read: what they say, whatever the model."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from heedful.data.fitting import Counts
from heedful.data.splits import HasPrompt, item_key
from heedful.doctor.findings import Finding, TokenRow, finding, spread
from heedful.training.thresholds import (
    CONTRADICTED,
    FEWEST,
    MOSTLY_CONTRADICTED,
    MOSTLY_ONE,
    MOSTLY_UNKNOWN,
    REPEATED,
    UNKNOWN,
)
from heedful.types import Demonstration, Labelled, Prompt, Ranking, plain_response

READ = 2000
"""Rows whose tokens are looked at, spread evenly."""


def one_answer(records: Sequence[HasPrompt]) -> Finding | None:
    """Is nearly every answer, or chosen or rejected one, the same, though the prompts are not?

    One canned refusal as the rejected response of every pair may be meant, and what is chosen still differs: a warning.
    """
    for what, answers in _answers(records).items():
        prompts = {prompt for prompt, _ in answers}
        if len(prompts) < FEWEST:
            continue
        (answer, number), *_ = Counter(answer for _, answer in answers).most_common(1)
        if number < MOSTLY_ONE * len(answers):
            continue
        return finding(
            "one-answer",
            "fail" if number == len(answers) and what not in ("rejected responses", "bad responses") else "warn",
            f"{number:,} of {len(answers):,} {what} are the same, for {len(prompts):,} different prompts",
            f"{answer!r}",
        )
    return None


def _answers(records: Sequence[HasPrompt]) -> Mapping[str, list[tuple[str, str]]]:
    """Prompts and answers, by what the answers are. Plain text has no prompt, and so no answer."""
    found: dict[str, list[tuple[str, str]]] = {}
    for one in records:
        if not one.prompt or isinstance(one, Prompt):
            continue
        if isinstance(one, Ranking):
            best, worst = min(one.ranks), max(one.ranks)
            named = [
                ("chosen responses" if rank == best else "rejected responses", text)
                for text, rank in zip(one.responses, one.ranks, strict=True)
                if rank in (best, worst)
            ]
        elif isinstance(one, Labelled):
            named = [("good responses" if one.label else "bad responses", one.response)]
        else:
            assert isinstance(one, Demonstration)
            named = [("completions", one.response)]
        for name, text in named:
            found.setdefault(name, []).append((item_key(one), plain_response(text)))
    return found


def contradictions(records: Sequence[HasPrompt]) -> Finding | None:
    """Is the opposite of what a preference or a label says among the data too?"""
    said: dict[tuple[Hashable, ...], str] = {}
    for one in records:
        if isinstance(one, Ranking) and len(one.responses) == 2 and one.ranks[0] != one.ranks[1]:
            better, worse = one.responses if one.ranks[0] < one.ranks[1] else one.responses[::-1]
            said.setdefault((one.prompt, better, worse), one.source)
        elif isinstance(one, Labelled):
            said.setdefault((one.prompt, one.response, one.label), one.source)
    opposite = [key for key in said if _opposite(key) in said]
    if len(said) < FEWEST or len(opposite) <= CONTRADICTED * len(said):
        return None
    first = opposite[0]
    return finding(
        "contradictions",
        "fail" if len(opposite) >= MOSTLY_CONTRADICTED * len(said) else "warn",
        f"of {len(opposite):,} of {len(said):,} different preferences or labels the opposite is among the data",
        f"{said[first]} and {said[_opposite(first)]}",
    )


def _opposite(key: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    prompt, one, other = key
    return (prompt, one, not other) if isinstance(other, bool) else (prompt, other, one)


def repeated(records: Sequence[HasPrompt]) -> Finding | None:
    """Are most records copies of others?"""
    counts = Counter(map(_content, records))
    if len(records) < FEWEST or len(counts) > (1 - REPEATED) * len(records):
        return None
    content, number = counts.most_common(1)[0]
    source = next(one.source for one in records if _content(one) == content)
    return finding(
        "repeated-records",
        "warn",
        f"only {len(counts):,} of {len(records):,} records are different",
        f"one is there {number:,} times, first in {source}",
    )


def _content(one: HasPrompt) -> tuple[Hashable, ...]:
    """What a record says."""
    answers = one.responses if isinstance(one, Ranking) else one.response if isinstance(one, Demonstration) else ()
    return one.prompt, answers, getattr(one, "label", None), getattr(one, "ranks", None)


def unknown_tokens(rows: Sequence[TokenRow], tokenizer: PreTrainedTokenizerBase) -> Finding | None:
    """How many tokens stand for characters that the tokenizer does not know?"""
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id):
        return None  # a byte-level tokenizer, which knows every text
    looked_at = spread(rows, READ)
    number, total = sum(row.ids.count(unknown) for row in looked_at), sum(len(row.ids) for row in looked_at)
    if number <= UNKNOWN * total:
        return None
    worst = max(looked_at, key=lambda row: row.ids.count(unknown))
    return finding(
        "unknown-tokens",
        "fail" if number > MOSTLY_UNKNOWN * total else "warn",
        f"{number / total:.0%} of the tokens are {tokenizer.unk_token!r}: the tokenizer does not know these characters",
        f"{worst.source} has {worst.ids.count(unknown)} of {len(worst.ids)}",
    )


def held_out_most(counts: Counts, eval_data: str | None) -> Finding | None:
    """Is more split off than is trained on?"""
    if eval_data is not None or counts.get("held_out", 0) <= counts.get("train", 0):
        return None
    return finding(
        "held-out-most",
        "warn",
        f"{counts['held_out']:,} records are held out, and {counts['train']:,} are trained on",
        f"of {counts['records']:,} records",
    )
