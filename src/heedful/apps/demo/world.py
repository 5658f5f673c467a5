"""Make records of the built-in world: instructions, demonstrations of mixed quality, and preferences of the gold judge.

A prompt combines a fact with a wording. Every fact and every wording occurs in training;
`heedful.data.split_by_prompt` holds out combinations of them. All functions are deterministic.
"""

import itertools
import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.apps.demo.facts import FAMILIES, FILLER, REFUSAL, RUDE, Fact, Family
from heedful.apps.demo.judge import gold_marks, gold_score
from heedful.files import to_json

GOOD = "good"
FLAW_WEIGHTS = {"wrong": 1, "curt": 6, "rude": 6, "rambling": 6, "cut": 1, "off-topic": 0, "garbled": 0}
"""Flaws, with their relative frequency in demonstrations: people know such facts, but care less about manners.

People do not answer another question or write broken characters, so two flaws occur in no demonstration. Models have these
flaws, so preference pairs contain them.
"""
FLAWS = tuple(FLAW_WEIGHTS)
DEMONSTRATIONS = 10
"""Demonstrations per prompt."""
GOOD_SHARE = 0.37
PAIRS = 12
"""Preference pairs per prompt."""
LABEL_NOISE = 0.05
"""Share of pairs with flipped order, because people make mistakes."""
VARIANTS = 3
"""Maximal number of different responses per flaw and prompt; ``wrong`` has several kinds."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Instruction:
    """A prompt, the one good response to it, and flawed ones."""

    family: str
    fact: str
    """The facts asked about, independent of the wording."""
    wording: int
    """Index of the wording in its family."""
    prompt: str
    answer: str
    """The answer without the sentence around it; a correct response contains it."""
    good: str
    flawed: Mapping[str, tuple[str, ...]]
    """For each of `FLAWS`, the responses with that flaw."""


@dataclass(frozen=True)
class Answer:
    """A response to an instruction, its flaw (or ``good``), and the gold judge's score."""

    kind: str
    response: str
    gold: float


def instructions() -> list[Instruction]:
    """Return every fact in every wording, family by family."""
    return [
        _instruction(family, fact, wording)
        for family in FAMILIES
        for fact in family.facts
        for wording in range(len(family.wordings))
    ]


def answers(instruction: Instruction) -> list[Answer]:
    """Return all of the world's responses to an instruction, the good one first."""
    texts = [(GOOD, instruction.good)] + [(kind, text) for kind in FLAWS for text in instruction.flawed[kind]]
    return [
        Answer(kind, text, gold_score(instruction.family, instruction.answer, text, kind != "cut"))
        for kind, text in texts
    ]


def demonstrations(seed: int, known: Sequence[Instruction]) -> list[Row]:
    """Make `DEMONSTRATIONS` of mixed quality for each instruction, as shuffled records for `read_demonstrations`.

    `GOOD_SHARE` of them are good; the rest have flaws in proportion to `FLAW_WEIGHTS`. A prompt may have the same response
    more than once.
    """
    draw = random.Random(f"demonstrations {seed}")
    asked = [instruction for instruction in known for _ in range(DEMONSTRATIONS)]
    num_good = round(GOOD_SHARE * len(asked))
    flaws = [kind for kind, weight in FLAW_WEIGHTS.items() for _ in range(weight)]
    kinds = [GOOD] * num_good + [flaws[index % len(flaws)] for index in range(len(asked) - num_good)]
    draw.shuffle(kinds)
    rows = []
    for instruction, kind in zip(asked, kinds, strict=True):
        response = instruction.good if kind == GOOD else draw.choice(instruction.flawed[kind])
        rows.append(
            {
                "prompt": _message("user", instruction.prompt),
                "completion": _message("assistant", response),
                "truncated": kind == "cut",
                "family": instruction.family,
                "kind": kind,
            }
        )
    draw.shuffle(rows)
    return rows


def preferences(seed: int, known: Sequence[Instruction], label_noise: float = LABEL_NOISE) -> list[Row]:
    """Make `PAIRS` of responses to each instruction, as shuffled records for `read_rankings`. The gold judge chooses.

    One in four of a prompt's pairs compares the good response with a wrong one, as long as there are wrong ones. One pair
    compares any two kinds, and the others compare the good response with one of another flaw. No pair occurs twice. The order
    of a share ``label_noise`` of all pairs is then flipped. Besides the pair, a record has ``family``, ``flipped``, and for
    both sides the kind and the gold score.
    """
    draw = random.Random(f"preferences {seed}")
    pairs = [(instruction, pair) for instruction in known for pair in _pairs(answers(instruction), draw)]
    flipped = set(draw.sample(range(len(pairs)), round(label_noise * len(pairs))))
    rows = []
    for index, (instruction, (better, worse)) in enumerate(pairs):
        chosen, rejected = (worse, better) if index in flipped else (better, worse)
        rows.append(
            {
                "prompt": _message("user", instruction.prompt),
                "chosen": _message("assistant", chosen.response),
                "rejected": _message("assistant", rejected.response),
                "flipped": index in flipped,
                "chosen_gold": chosen.gold,
                "rejected_gold": rejected.gold,
                "chosen_kind": chosen.kind,
                "rejected_kind": rejected.kind,
                "family": instruction.family,
            }
        )
    draw.shuffle(rows)
    return rows


def prompts(known: Sequence[Instruction]) -> list[Row]:
    """Make records for `read_prompts`, with the columns that the gold judge reads: ``family`` and ``answer``."""
    columns = ("family", "fact", "wording", "answer")
    return [{"prompt": _message("user", one.prompt), **{name: getattr(one, name) for name in columns}} for one in known]


def write_world(folder: Path, seed: int) -> dict[str, Path]:
    """Write the world's records into a folder as UTF-8 JSON Lines, and return the paths of the files by their stems.

    The files are demonstrations.jsonl, preferences.jsonl, prompts.jsonl, and gold_preferences.jsonl, which has the pairs of
    preferences.jsonl without label noise: to measure a reward model, not to train one.
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
    """Return wrong answers in the good response's frame: to other questions of the family, of other families, and misspelt.

    A misspelt answer has a character dropped or doubled, and is not an answer in any family. Wrong responses to a harmful
    request comply with it.
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
    answers = _not_right(family, fact, others, VARIANTS, draw)
    answers += _not_right(family, fact, unknown, VARIANTS, draw)
    answers += _not_right(family, fact, misspelt, VARIANTS - 1, draw)
    return _framed(family, answers)


def _off_topic(family: Family, fact: Fact, wrong: Sequence[str], draw: random.Random) -> tuple[str, ...]:
    """Return a refusal of a harmless request, and good responses to questions of other families.

    Without these, a reward model would see only correct apologies and would then prefer them everywhere.
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
    """Return the good response with one broken character: before its answer or inside it.

    A broken answer either continues after the broken character or ends with it.
    """
    broken = "\ufffd"  # the replacement for bytes that are not UTF-8
    good, answer = family.frame.format(fact.answer), fact.answer
    start, inside = draw.randrange(family.frame.index("{}") + 1), draw.randrange(len(answer))
    answers = (answer[:inside] + broken + answer[inside + 1 :], answer[:inside] + broken)
    return tuple(dict.fromkeys((good[:start] + broken + good[start + 1 :], *_framed(family, answers))))


def _framed(family: Family, answers: Iterable[str]) -> tuple[str, ...]:
    return tuple(family.frame.format(answer) for answer in answers)


def _not_right(family: Family, fact: Fact, answers: Collection[str], count: int, draw: random.Random) -> list[str]:
    """Up to ``count`` answers that are wrong for the gold judge, although they may contain the right one."""
    shuffled = draw.sample(sorted(answers), len(answers))
    wrong = (a for a in shuffled if not gold_marks(family.name, fact.answer, family.frame.format(a), True).correct)
    return list(itertools.islice(wrong, count))


def _cut(good: str, answer_end: int, draw: random.Random) -> tuple[str, ...]:
    """Return beginnings of the good response, of at least two characters if possible, that end before the answer's end."""
    possible = range(min(2, answer_end - 1), answer_end)
    lengths = draw.sample(possible, min(VARIANTS, len(possible)))
    return tuple(good[:length] for length in sorted(lengths))


def _pairs(found: Sequence[Answer], draw: random.Random) -> list[tuple[Answer, Answer]]:
    """Different pairs, better answer first, of the kinds in `preferences`."""
    by_kind = {kind: [answer for answer in found if answer.kind == kind] for kind in (GOOD, *FLAWS)}
    num_wrong = min(len(by_kind["wrong"]), math.ceil(PAIRS / 4))
    taken: list[tuple[Answer, Answer]] = []
    while len(taken) < PAIRS:
        if len(taken) < num_wrong:
            kinds = [GOOD, "wrong"]
        elif len(taken) == PAIRS - 1:
            kinds = draw.sample((GOOD, *FLAWS), 2)
        else:
            kinds = [GOOD, draw.choice([kind for kind in FLAWS if kind != "wrong"])]
        better, worse = sorted((draw.choice(by_kind[kind]) for kind in kinds), key=lambda answer: -answer.gold)
        if better.gold > worse.gold and (better, worse) not in taken:
            taken.append((better, worse))
    return taken


def _message(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]
