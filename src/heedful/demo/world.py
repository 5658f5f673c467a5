"""The built-in world as records: instructions, demonstrations of mixed quality, and preferences of the gold judge.

What a prompt is asked about and how it is worded meet in many combinations; all facts and all wordings are trained, and
what `heedful.data.split_by_prompt` holds out is combinations. Every function returns the same for the same arguments.
"""

import itertools
import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.demo.facts import FAMILIES, Fact, Family
from heedful.demo.judge import gold_marks, gold_score
from heedful.demo.tables import FILLER, REFUSAL, RUDE
from heedful.files import to_json

GOOD = "good"
FLAW_WEIGHTS = {"wrong": 1, "curt": 6, "rude": 6, "rambling": 6, "cut": 1, "off-topic": 0, "garbled": 0}
"""Flaws, and in which proportion they occur in demonstrations: people know such facts, and mind their manners less.

People answer the question and write characters, so two flaws are in no demonstration. Models have them, so pairs do too.
"""
FLAWS = tuple(FLAW_WEIGHTS)
VARIANTS = 3
"""How many different responses a flaw has for one prompt, where there are so many ways; ``wrong`` has several kinds."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Instruction:
    """A prompt, the one good response to it, and flawed ones."""

    family: str
    fact: str
    """What is asked about, whatever the wording."""
    wording: int
    prompt: str
    answer: str
    """What a correct response contains: the answer without its frame."""
    good: str
    flawed: Mapping[str, tuple[str, ...]]
    """For each of `FLAWS`, different responses with that flaw."""


@dataclass(frozen=True)
class Answer:
    """A response to an instruction, what is wrong with it (or ``good``), and the gold judge's score."""

    kind: str
    response: str
    gold: float


def instructions() -> list[Instruction]:
    """Every fact in every wording, family by family."""
    return [
        _instruction(family, fact, wording)
        for family in FAMILIES
        for fact in family.facts
        for wording in range(len(family.wordings))
    ]


def answers(instruction: Instruction) -> list[Answer]:
    """All responses that the world has for an instruction, the good one first."""
    texts = [(GOOD, instruction.good)] + [(kind, text) for kind in FLAWS for text in instruction.flawed[kind]]
    return [
        Answer(kind, text, gold_score(instruction.family, instruction.answer, text, kind != "cut"))
        for kind, text in texts
    ]


def demonstrations(
    seed: int, known: Sequence[Instruction], num_per_prompt: int = 10, good_share: float = 0.37
) -> list[Row]:
    """Demonstrations of mixed quality, ``num_per_prompt`` for each prompt: records for `read_demonstrations`, shuffled.

    ``good_share`` of them, to the nearest one, are good; the flaws share the rest in proportion to `FLAW_WEIGHTS`. A
    prompt may show a response more than once, as two people may write the same. Raises ValueError for a share outside
    [0, 1].
    """
    if not 0 <= good_share <= 1:
        raise ValueError(f"good_share is {good_share}; it is a share: from 0 to 1")
    draw = random.Random(f"demonstrations {seed}")
    asked = [instruction for instruction in known for _ in range(num_per_prompt)]
    num_good = round(good_share * len(asked))
    flaws = [kind for kind, weight in FLAW_WEIGHTS.items() for _ in range(weight)]
    kinds = [GOOD] * num_good + [flaws[index % len(flaws)] for index in range(len(asked) - num_good)]
    draw.shuffle(kinds)
    rows = [_demonstration(instruction, kind, draw) for instruction, kind in zip(asked, kinds, strict=True)]
    draw.shuffle(rows)
    return rows


def preferences(
    seed: int, known: Sequence[Instruction], num_pairs_per_prompt: int = 12, label_noise: float = 0.05
) -> list[Row]:
    """Pairs of responses that the gold judge tells apart, better one chosen: records for `read_rankings`, shuffled.

    Of a prompt's pairs one in four, rounded up, compares the good response with a wrong one, while there are wrong ones;
    one compares any two kinds, and the others compare the good response with one of another flaw. No pair occurs twice.
    Then ``label_noise`` of all pairs, to the nearest one, are flipped. Columns besides the pair: ``family``, ``flipped``,
    and for both sides the kind and the gold score. Raises ValueError for a share outside [0, 1], or where a prompt has
    fewer such pairs than asked for.
    """
    if not 0 <= label_noise <= 1:
        raise ValueError(f"label_noise is {label_noise}; it is a share: from 0 to 1")
    draw = random.Random(f"preferences {seed}")
    pairs = [
        (instruction, *pair)
        for instruction in known
        for pair in _pairs(answers(instruction), num_pairs_per_prompt, draw)
    ]
    flipped = set(draw.sample(range(len(pairs)), round(label_noise * len(pairs))))
    rows = [_preference(*pair, flipped=index in flipped) for index, pair in enumerate(pairs)]
    draw.shuffle(rows)
    return rows


def prompts(known: Sequence[Instruction]) -> list[Row]:
    """Records for `read_prompts`, with the columns that the gold judge reads: ``family`` and ``answer``."""
    return [
        {"prompt": _asked(i), "family": i.family, "fact": i.fact, "wording": i.wording, "answer": i.answer}
        for i in known
    ]


def write_world(folder: Path, seed: int) -> dict[str, Path]:
    """Write demonstrations.jsonl, preferences.jsonl and prompts.jsonl (UTF-8), and return their paths by stem.

    gold_preferences.jsonl are the pairs of preferences.jsonl without label noise: to measure a reward model, not to train.
    """
    known = instructions()
    files = {
        "demonstrations": demonstrations(seed, known),
        "preferences": preferences(seed, known),
        "gold_preferences": preferences(seed, known, label_noise=0.0),
        "prompts": prompts(known),
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, rows in files.items():
        paths[name] = folder / f"{name}.jsonl"
        paths[name].write_text("".join(f"{to_json(row)}\n" for row in rows), encoding="utf-8")
    return paths


def _instruction(family: Family, fact: Fact, wording: int) -> Instruction:
    prompt = family.wordings[wording].format(*fact.slots)
    good = family.frame.format(fact.answer)
    draw = random.Random(prompt)
    wrong = _wrong(family, fact, draw)
    flawed = {
        "wrong": wrong,
        "curt": (fact.answer,),
        "rude": tuple(text.format(fact.answer) for text in RUDE[family.language]),
        "rambling": tuple(good + filler for filler in FILLER[family.language]),
        "cut": _cut(good, good.index(fact.answer) + len(fact.answer), draw),
        "off-topic": _off_topic(family, fact, wrong, draw),
        "garbled": _garbled(family, fact, draw),
    }
    return Instruction(family.name, " ".join(fact.slots), wording, prompt, fact.answer, good, flawed)


def _wrong(family: Family, fact: Fact, draw: random.Random) -> tuple[str, ...]:
    """In the same polite frame: answers to other questions of the family, answers of other families, and misspelt ones.

    A misspelt answer has a character dropped or doubled, and is no answer of any family. For a harmful request, responses
    that comply.
    """
    if family.compliance:
        return family.compliance
    others = {other.answer for other in family.facts} - {fact.answer}
    elsewhere = {f.answer for other in FAMILIES for f in other.facts if other.language == family.language}
    spelt = {fact.answer[:i] + twice + fact.answer[i + 1 :] for i, c in enumerate(fact.answer) for twice in ("", 2 * c)}
    known = {answer.casefold() for answer in family.candidates}
    unknown = {answer for answer in elsewhere if answer.casefold() not in known}
    known |= {answer.casefold() for answer in elsewhere}
    misspelt = {text for text in spelt if text.strip() and text.casefold() not in known}
    answers = _some_not_right(family, fact, others, VARIANTS, draw)
    answers += _some_not_right(family, fact, unknown, VARIANTS, draw)
    answers += _some_not_right(family, fact, misspelt, VARIANTS - 1, draw)
    return _framed(family, answers)


def _off_topic(family: Family, fact: Fact, wrong: Sequence[str], draw: random.Random) -> tuple[str, ...]:
    """A refusal where nothing calls for one, and good responses to questions of other families.

    Without these a reward model would only ever see an apology where it is right, and would like it everywhere.
    """
    elsewhere = [other for other in FAMILIES if other.name != family.name]
    texts = [other.frame.format(REFUSAL) for other in elsewhere if other.compliance]
    while len(texts) < VARIANTS:
        other = draw.choice(elsewhere)
        text = other.frame.format(draw.choice(other.facts).answer)
        if text not in (*texts, *wrong) and not gold_marks(family.name, fact.answer, text, True).correct:
            texts.append(text)
    return tuple(texts)


def _garbled(family: Family, fact: Fact, draw: random.Random) -> tuple[str, ...]:
    """The good response with a broken character up to where the answer starts; its frame with an answer broken within.

    A broken answer goes on after the broken character, or ends with it.
    """
    broken = "\ufffd"  # how bytes that are no UTF-8 are read
    good, answer = family.frame.format(fact.answer), fact.answer
    start, inside = draw.randrange(family.frame.index("{}") + 1), draw.randrange(len(answer))
    answers = (answer[:inside] + broken + answer[inside + 1 :], answer[:inside] + broken)
    return tuple(dict.fromkeys((good[:start] + broken + good[start + 1 :], *_framed(family, answers))))


def _framed(family: Family, answers: Iterable[str]) -> tuple[str, ...]:
    return tuple(family.frame.format(answer) for answer in answers)


def _some_not_right(family: Family, fact: Fact, answers: Collection[str], count: int, draw: random.Random) -> list[str]:
    """Up to ``count`` of the answers, none of which the gold judge takes for the right one, as where that is part of one."""
    shuffled = draw.sample(sorted(answers), len(answers))
    return list(itertools.islice((answer for answer in shuffled if not _is_right(family, fact, answer)), count))


def _is_right(family: Family, fact: Fact, answer: str) -> bool:
    return gold_marks(family.name, fact.answer, family.frame.format(answer), ended=True).correct == 1


def _cut(good: str, answer_end: int, draw: random.Random) -> tuple[str, ...]:
    """The first characters of the good response, at least two where it has them, without the answer's last one."""
    possible = range(min(2, answer_end - 1), answer_end)
    lengths = draw.sample(possible, min(VARIANTS, len(possible)))
    return tuple(good[:length] for length in sorted(lengths))


def _pairs(found: Sequence[Answer], num_pairs: int, draw: random.Random) -> list[tuple[Answer, Answer]]:
    """Different pairs, better answer first, of the kinds that `preferences` names."""
    taken: list[tuple[Answer, Answer]] = []
    by_kind = {kind: [answer for answer in found if answer.kind == kind] for kind in (GOOD, *FLAWS)}
    num_wrong = min(len(by_kind["wrong"]), math.ceil(num_pairs / 4))
    possible = num_wrong + sum(answer.kind not in (GOOD, "wrong") for answer in found) + 1
    if possible < num_pairs:
        raise ValueError(f"num_pairs_per_prompt is {num_pairs}; a prompt has only {possible} pairs")
    while len(taken) < num_pairs:
        if len(taken) < num_wrong:
            kinds = [GOOD, "wrong"]
        elif len(taken) == num_pairs - 1:
            kinds = draw.sample((GOOD, *FLAWS), 2)
        else:
            kinds = [GOOD, draw.choice([kind for kind in FLAWS if kind != "wrong"])]
        better, worse = sorted((draw.choice(by_kind[kind]) for kind in kinds), key=lambda answer: -answer.gold)
        if better.gold > worse.gold and (better, worse) not in taken:
            taken.append((better, worse))
    return taken


def _asked(instruction: Instruction) -> list[dict[str, str]]:
    return [{"role": "user", "content": instruction.prompt}]


def _said(response: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": response}]


def _demonstration(instruction: Instruction, kind: str, draw: random.Random) -> Row:
    response = instruction.good if kind == GOOD else draw.choice(instruction.flawed[kind])
    return {
        "prompt": _asked(instruction),
        "completion": _said(response),
        "truncated": kind == "cut",
        "family": instruction.family,
        "kind": kind,
    }


def _preference(instruction: Instruction, better: Answer, worse: Answer, *, flipped: bool) -> Row:
    chosen, rejected = (worse, better) if flipped else (better, worse)
    return {
        "prompt": _asked(instruction),
        "chosen": _said(chosen.response),
        "rejected": _said(rejected.response),
        "flipped": flipped,
        "chosen_gold": chosen.gold,
        "rejected_gold": rejected.gold,
        "chosen_kind": chosen.kind,
        "rejected_kind": rejected.kind,
        "family": instruction.family,
    }
