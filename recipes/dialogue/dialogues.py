"""Data and measurement of recipes/dialogue, in the folder of its runs.

python recipes/dialogue/dialogues.py demonstrations runs/dialogue
    writes data/prompts.jsonl, and data/demonstrations.jsonl, in which people answer the user as well as in heedful demo
python recipes/dialogue/dialogues.py pairs runs/dialogue
    lets sft/final talk to the user, and writes data/pairs.jsonl: the dialogue with the higher mark, and the other one
python recipes/dialogue/dialogues.py measure runs/dialogue
    prints marks of sft/final and ppo/final on held-out prompts, and some of their dialogues
"""

import argparse
import itertools
import json
import random
from pathlib import Path

from user import AGAIN, OTHERS, TURNS, User, gold, marks

from heedful import LocalEngine, Policy
from heedful.apps.demo.facts import FAMILIES, FILLER, RUDE, family_named
from heedful.apps.demo.world import instructions
from heedful.core import mean_interval
from heedful.data import read_prompts, split_by_prompt
from heedful.errors import HeedfulError

EVAL_FRACTION = 0.17
"""The share of prompts that sft.yaml, reward.yaml and ppo.yaml hold out."""
QUALITY = {"good": 37, "rude": 20, "curt": 20, "rambling": 20, "wrong": 3}
"""What answers of people are like, in percent."""
DEMONSTRATIONS = 6
"""Dialogues of people to a prompt."""
DRAWN, PAIRS, NOISE = 8, 8, 0.05
"""Dialogues of the SFT model to a prompt, pairs of them, and the share in the wrong order, as people make mistakes."""
PAIRS_TEMPERATURE = 1.3
"""The reward model has to know rare mistakes too, or PPO finds one that it likes."""
MEASURED = 4
"""Dialogues of a measured policy to a prompt."""
THEN = {
    "chinese": ("And in French?", "And French?", "In French too, please."),
    "french": ("And in Chinese?", "And Chinese?", "In Chinese too, please."),
    "opposites": ("And the opposite of that?", "And its opposite?"),
    "反义词": ("它的反义词呢？", "那反过来呢？"),
    "lists": ("Three others?", "Name three others."),
}
"""Second wishes, by the family of the first."""
FIRST = {"en": ("What did you say first?", "The first again?"), "zh": ("先说的是什么？", "第一个再说一遍。")}
"""Third wishes, by language."""


def prompts():
    """A record for each question of the world that has a second wish, with all three wishes."""
    words = {family.name: {fact.slots[0]: fact.answer for fact in family.facts} for family in FAMILIES}
    rows = []
    for one in instructions():
        second = {
            "chinese": ("french", words["french"].get(one.fact)),
            "french": ("chinese", words["chinese"].get(one.fact)),
            "opposites": ("opposites", one.fact),
            "反义词": ("反义词", one.fact),
            "lists": ("lists", OTHERS),
        }.get(one.family)
        if second is None or second[1] is None:
            continue
        draw = random.Random(one.prompt)
        language = family_named(one.family).language
        then, first = draw.choice(THEN[one.family]), draw.choice(FIRST[language])
        wishes = [(one.prompt, one.family, one.answer), (then, *second), (first, one.family, AGAIN)]
        rows.append({"prompt": said("user", one.prompt), "family": one.family, "wishes": wishes})
    return rows


def said(role, text):
    return [{"role": role, "content": text}]


def demonstrations(draw):
    """Dialogues of the user with people."""
    rows = []
    for row in prompts() * DEMONSTRATIONS:
        user, turns, reply = User(), [], None
        user.reset(row["wishes"])
        while not turns or reply is not None:
            turns += said("user", reply) if turns else []
            turns += said("assistant", answer(draw, user))
            reply = user._reply(turns[-1]["content"])
        rows.append({"prompt": row["prompt"], "completion": turns})
    draw.shuffle(rows)
    return rows


def answer(draw, user):
    """What somebody says who knows what is right, and says it well or badly."""
    family, right = family_named(user._wish()[1]), user._right()
    (quality,) = draw.choices(list(QUALITY), list(QUALITY.values()))
    if quality == "wrong":
        right = draw.choice([fact.answer for fact in family.facts if fact.answer != right])
    if quality == "rude":
        return draw.choice(RUDE[family.language]).format(right)
    good = family.frame.format(right)
    return {"curt": right, "rambling": good + draw.choice(FILLER[family.language])}.get(quality, good)


def talk(model, asked, *, each, seed, temperature=1.0):
    """Dialogues of a model with the user, several to each prompt: what was said, whether it was cut, and the wishes."""
    policy = Policy.from_pretrained(model, device="cpu", dtype="float32")
    user = f"python:{Path(__file__).parent}/user.py:User"
    engine = LocalEngine(
        policy, max_new_tokens=160, temperature=temperature, seed=seed, environment=user, max_turns=TURNS
    )
    drawn = engine.generate([prompt for prompt in asked for _ in range(each)]).completions
    engine.close()
    turns = [[{"role": turn.role, "content": turn.content} for turn in one.episode.turns] for one in drawn]
    return turns, [one.truncated for one in drawn], [one.prompt.columns["wishes"] for one in drawn]


def pairs(draw, asked, model, seed):
    """Pairs of dialogues with different marks, the higher one first but for some noise."""
    turns, cut, wishes = talk(model, asked, each=DRAWN, seed=seed, temperature=PAIRS_TEMPERATURE)
    found, rows = gold(turns, cut, wishes), []
    whole = [not short and all(turn["content"].strip() for turn in one) for one, short in zip(turns, cut, strict=True)]
    for place in range(0, len(turns), DRAWN):
        known = [row for row in range(place, place + DRAWN) if whole[row]]
        possible = [(a, b) for a, b in itertools.permutations(known, 2) if found[a] > found[b]]
        for better, worse in draw.sample(possible, min(PAIRS, len(possible))):
            chosen, rejected = (worse, better) if draw.random() < NOISE else (better, worse)
            prompt = said("user", wishes[place][0][0])
            rows.append({"prompt": prompt, "chosen": turns[chosen], "rejected": turns[rejected]})
    draw.shuffle(rows)
    return rows


def measure(runs, asked, seed):
    """Print both policies' marks, with a 95 % interval over prompts, and their first dialogue of each family."""
    first = {prompt.columns["family"]: place * MEASURED for place, prompt in reversed(list(enumerate(asked)))}
    for name in ("sft", "ppo"):
        talked = talk(runs / name / "final", asked, each=MEASURED, seed=seed)
        total, each = gold(*talked), [marks(*one) for one in zip(*talked, strict=True)]
        low, high = mean_interval([total[place : place + MEASURED] for place in range(0, len(total), MEASURED)])
        of_turns = [sum(found[turn] for found in each if turn < len(found)) / len(each) for turn in range(TURNS)]
        print(f"{name}: gold {sum(total) / len(total):.3f}, 95 % {low:.3f} to {high:.3f}; of its turns", end=" ")
        print(*(f"{mark:.3f}" for mark in of_turns), sep=", ")
        for row in sorted(first.values()):
            print(f"\n{'':6}{talked[2][row][0][0]}")
            scores = iter(each[row])
            for turn in talked[0][row]:
                print(f"{next(scores):4.2f}  " if turn["role"] == "assistant" else " " * 6, turn["content"], sep="")
        print()


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} records")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("demonstrations", "pairs", "measure"))
    parser.add_argument("runs", type=Path, help="folder of the runs and of their data")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    data, draw = options.runs / "data", random.Random(f"{options.what} {options.seed}")
    try:
        if options.what == "demonstrations":
            write(data / "prompts.jsonl", prompts())
            write(data / "demonstrations.jsonl", demonstrations(draw))
        else:
            asked = read_prompts(str(data / "prompts.jsonl"))
        if options.what == "pairs":
            write(data / "pairs.jsonl", pairs(draw, asked, options.runs / "sft" / "final", options.seed))
        if options.what == "measure":
            measure(options.runs, split_by_prompt(asked, EVAL_FRACTION)[1], options.seed)
    except (HeedfulError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
