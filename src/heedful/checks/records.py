"""Checks of the records as they were read: what they say, whatever the model."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from heedful.checks.findings import Finding, TokenRow, finding, spread
from heedful.data.chat import Renderer
from heedful.data.fitting import Counts
from heedful.data.readers import parse_columns
from heedful.data.splits import HasPrompt, item_key
from heedful.training.thresholds import (
    CONTRADICTED,
    FEWEST,
    GIVEN_AWAY,
    MARKED,
    MOSTLY_CONTRADICTED,
    MOSTLY_ONE,
    MOSTLY_UNKNOWN,
    REFUSALS,
    REPEATED,
    REPEATED_BYTES,
    REPEATS,
    TOLD_APART,
    UNKNOWN,
)
from heedful.types import Demonstration, Labelled, Message, Prompt, Ranking, Response, last_answer, plain_response

READ = 2000
"""Rows or records whose texts are looked at, spread evenly."""
TOKENS = re.compile(
    r"<\|(?:im_start|im_end|endoftext|begin_of_text|start_header_id|end_header_id|eot_id|system|user|assistant|end)\|>"
    r"|</?s>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>|<[be]os>"
)
"""Special tokens of common chat templates."""
ROLES = re.compile(
    r"\A\s*(?:###\s*)?(?:Assistant|User|Human|Instruction|Response)\s*[:：]|^###\s*(?:Instruction|Response):", re.M
)
"""Role names that a message begins with. In raw text they may be the format that a model is to learn."""
REFUSAL = re.compile(
    r"\bI(?: am|['’]m)? (?:can(?:not| not|['’]t)|unable to|not able to|won['’]t|will not) (?:\w+ ){0,3}?"
    r"(?:help(?! but)|assist|comply|fulfil)|(?:无法|不能|没法|没办法)[^。，！？]{0,6}(?:帮|协助|满足)|帮不了",
    re.I,
)
"""A refusal. That an answer is not known, or not in a given text, is another thing."""
PERHAPS = re.compile(
    r"\bsorry\b|\bas an ai\b|can(?:not| not|['’]t)\b|unable|not able|抱歉|对不起|无法|不能|帮不了", re.I
)
"""What may be a refusal in other words."""
WORDS = re.compile(r"[\u3400-\u9fff]|[^\W\u3400-\u9fff]+")
"""Words; of Chinese, characters."""
BETTER = {
    "chosen",
    "accepted",
    "better",
    "best",
    "good",
    "preferred",
    "positive",
    "win",
    "winner",
    "winning",
    "好",
    "优",
}
WORSE = {"rejected", "refused", "worse", "worst", "bad", "negative", "lose", "loser", "losing", "坏", "差"}
"""Words in the names of columns."""
BEGINS_OR_ENDS: Mapping[str, Callable[[str], str]] = {
    "begin with": lambda text: text[:1],
    "begin with the word": lambda text: "".join(text.split()[:1]),
    "end with": lambda text: text[-1:],
}
"""What may give a label away."""


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


def given_away(records: Sequence[HasPrompt]) -> Finding | None:
    """Does one character or word at the beginning or end tell chosen from rejected responses, or good from bad ones?"""
    answers = _answers(records)
    for better, worse in (("chosen responses", "rejected responses"), ("good responses", "bad responses")):
        sides = [[text for _, text in answers.get(side, ())] for side in (better, worse)]
        if min(map(len, sides)) < FEWEST // 2:
            continue
        for how, part in BEGINS_OR_ENDS.items():
            counts = [Counter(map(part, side)) for side in sides]
            shares = {
                mark: [count[mark] / len(side) for count, side in zip(counts, sides, strict=True)]
                for mark in counts[0] | counts[1]
            }
            mark, (first, second) = max(shares.items(), key=lambda item: abs(item[1][0] - item[1][1]))
            if abs(first - second) >= GIVEN_AWAY:
                numbers = [f"{count[mark]:,} of {len(side):,}" for count, side in zip(counts, sides, strict=True)]
                return finding(
                    "label-given-away",
                    "warn",
                    f"{first:.0%} of the {better} {how} {mark!r}, and {second:.0%} of the {worse}",
                    f"{numbers[0]} and {numbers[1]}",
                )
    return None


def refusals(records: Sequence[HasPrompt]) -> Finding | None:
    """Do many completions refuse, with questions like those of the other ones?

    A data set about safety refuses too, and the words of its questions tell when.
    """
    texts = _answers(spread(records, READ)).get("completions", [])
    refused = [one for one in texts if REFUSAL.search(one[1][:100])]
    answered = [question for question, answer in texts if not PERHAPS.search(answer[:100])]
    if min(len(answered), len(refused)) < 2 * FEWEST or len(refused) < REFUSALS * len(texts):
        return None
    told = told_apart([question for question, _ in refused], answered)
    if told >= TOLD_APART:
        return None
    return finding(
        "refusals",
        "warn",
        f"{len(refused):,} of {len(texts):,} completions refuse, and their questions are like those of the others",
        f"{refused[0][1][:60]!r} is the answer to {refused[0][0][:60]!r}; by its words, a refused question is told from an "
        f"answered one with probability {told:.2f}",
    )


def told_apart(texts: Sequence[str], others: Sequence[str]) -> float:
    """The probability that the words of a text are more like those of the texts than the words of one of the others are.

    0.5 is chance. Naive Bayes on the presence of words, each text judged by all but itself.
    """
    sides = [[set(WORDS.findall(text.lower())) for text in side] for side in (texts, others)]
    counts = [Counter(word for text in side for word in text) for side in sides]

    def share(word: str, side: int, own: bool) -> float:
        return (counts[side][word] - own + 0.5) / (len(sides[side]) - own + 1)

    ours, theirs = (
        [sum(math.log(share(word, 0, own) / share(word, 1, not own)) for word in text) for text in side]
        for side, own in zip(sides, (True, False), strict=True)
    )
    return statistics.fmean(one > other for one in ours for other in theirs)


def labels_swapped(records: Sequence[HasPrompt], columns: str) -> Finding | None:
    """Do margins, or the names that ``--columns`` maps, say that the rejected response is the better one?"""
    margins = [(one.margin, one.source) for one in records if isinstance(one, Ranking) and one.margin]
    negative = [source for margin, source in margins if margin < 0]
    named = parse_columns(columns)
    chosen, rejected = (
        set(WORDS.findall(named.get(side, "").lower().replace("_", " "))) for side in ("chosen", "rejected")
    )
    if 2 * len(negative) > len(margins):
        what = f"{len(negative):,} of {len(margins):,} margins are negative: the rejected responses are the better ones"
        return finding("labels-swapped", "warn", what, f"first in {negative[0]}")
    if chosen & WORSE and rejected & BETTER and not (chosen & BETTER or rejected & WORSE):
        return finding("labels-swapped", "warn", "the columns' names say the opposite", f"--columns {columns}")
    return None


def answer_repeats(records: Sequence[HasPrompt]) -> Finding | None:
    """Do answers that are learned begin with their question, or stand in it?"""
    texts = list(_questions_and_answers(spread(records, READ)))
    begin = [(source, q) for source, q, a in texts if len(q.encode()) >= REPEATED_BYTES and a.startswith(q)]
    inside = [(source, a) for source, q, a in texts if len(a.encode()) >= REPEATED_BYTES and a in q]
    for found, what in ((begin, "answers begin with their question"), (inside, "answers stand in their question")):
        if len(texts) >= FEWEST and len(found) > REPEATS * len(texts):
            source, text = found[0]
            return finding(
                "answer-repeats", "warn", f"{len(found):,} of {len(texts):,} {what}", f"{source}: {text[:60]!r}"
            )
    return None


def _questions_and_answers(records: Sequence[HasPrompt]) -> Iterator[tuple[str, str, str]]:
    """Sources, last questions and their answers; the best answer of several, and none that is bad."""
    for one in records:
        if not one.prompt or isinstance(one, Prompt) or (isinstance(one, Labelled) and not one.label):
            continue
        asked, answer = last_answer(one.prompt, _best(one))
        yield (
            one.source,
            (asked if isinstance(asked, str) else asked[-1].content).strip(),
            plain_response(answer).strip(),
        )


def _best(one: HasPrompt) -> Response:
    if isinstance(one, Ranking):
        return one.responses[one.ranks.index(min(one.ranks))]
    assert isinstance(one, Demonstration)
    return one.response


def template_in_text(records: Sequence[HasPrompt], renderer: Renderer | None) -> Finding | None:
    """Do most records have marks of a chat template in their texts?

    Special tokens of the tokenizer in raw text have a warning where the data is read.
    """
    looked_at = spread(records, READ)
    specials = set() if renderer is None else set(renderer.encoder.special_texts)
    found: list[tuple[str, list[str], str]] = []
    for one in looked_at:
        for text in _texts(one):
            if isinstance(one.prompt, str):
                marks = [mark for mark in TOKENS.findall(text) if mark not in specials]
            else:
                own = [] if renderer is None else renderer.encoder.specials_in(text)
                marks = [*own, *TOKENS.findall(text), *(mark[0].strip() for mark in ROLES.finditer(text))]
            if marks:
                found.append((one.source, list(dict.fromkeys(marks)), text))
                break
    if len(found) <= MARKED * len(looked_at):
        return None
    source, marks, text = found[0]
    names = ", ".join(repr(one) for one, _ in Counter(mark for _, marks, _ in found for mark in marks).most_common(4))
    at = max(0, text.index(marks[0]) - 30)
    return finding(
        "template-in-text",
        "warn",
        f"{len(found):,} of {len(looked_at):,} records have marks of a chat template in their texts: {names}",
        f"{source}: {text[at : at + 60]!r}",
    )


def _texts(one: HasPrompt) -> Iterator[str]:
    """The texts of a record: its prompt or each message of it, and its answers."""
    answers = one.responses if isinstance(one, Ranking) else (one.response,) if isinstance(one, Demonstration) else ()
    for text in (one.prompt, *answers):
        for turn in text if isinstance(text, tuple) else (text,):
            yield turn.content if isinstance(turn, Message) else turn


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
        f"{len(opposite):,} of {len(said):,} different {'labels' if isinstance(opposite[0][2], bool) else 'preferences'} are "
        "contradicted by another record, which says the opposite",
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
