"""The built-in world: its files byte for byte, every fact is trained, and the records are what they say they are."""

import hashlib
import itertools
import json
from collections import Counter, defaultdict

import pytest

from heedful import Prompt
from heedful.apps.demo.facts import FAMILIES, FILLER, LISTS
from heedful.apps.demo.judge import gold_marks, gold_score
from heedful.apps.demo.world import FLAWS, GOOD, answers, demonstrations, instructions, preferences, write_world
from heedful.data import prompt_key, read_prompts, split_by_prompt
from heedful.rewards.scoring import RESERVED

KNOWN = instructions()
BY_PROMPT = {instruction.prompt: instruction for instruction in KNOWN}
FACTS = {(i.family, i.fact) for i in KNOWN}
WRITTEN = {
    "demonstrations": "4dd58d1c329a631afe172d940f65d587c004a0a565e1e5256b409c783a0dc13e",
    "preferences": "a82b3bab0695a8d758ce51000fbf3c94501b2b62565317d897df6dd3061600bb",
    "gold_preferences": "32fe1639ebbf6a12a982503179f8920b40fe3546420cd2e0b991b7c944ee856a",
    "prompts": "d7cb039710800bd8fa0b6947e265a4c79c1b79bf72e8664cfd5d6bcd5d9c2a0c",
}
"""SHA-256 of the files of seed 3. They are the same on every machine, so results of demos stay comparable. What the records
are is in exhaustive tests, to be run when one of these changes."""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("世界") / "new", 3)


@pytest.fixture(scope="module")
def rows(written):
    """The records of each file."""
    return {name: list(map(json.loads, path.read_text("utf-8").split("\n")[:-1])) for name, path in written.items()}


def asked(row):
    return row["prompt"][0]["content"]


def said(row, column):
    return row[column][0]["content"]


def test_files_are_the_same_byte_for_byte(written):
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in written.items()} == WRITTEN
    for path in written.values():
        text = path.read_text("utf-8")
        assert "的反义词" in text
        assert "\\u" not in text


def test_another_seed_makes_another_world():
    assert demonstrations(4, KNOWN[:20]) != demonstrations(3, KNOWN[:20])
    assert preferences(4, KNOWN[:20]) != preferences(3, KNOWN[:20])


def test_no_answer_is_part_of_another():
    """Otherwise a right answer would contain a wrong one. Numbers and English words are told apart as whole words."""
    for family in FAMILIES:
        facts = {fact.answer for fact in family.facts}
        if family.name in ("lists", "refusals"):
            continue
        for one, other in itertools.permutations(facts, 2):
            assert f" {one} " not in f" {other} ", family.name
            if not one.isascii() and not one[0].isascii() and family.name != "french":
                assert one not in other, family.name
    members = [member for kind in LISTS.values() for member in kind]
    assert len(members) == len(set(members)), "no member belongs to two kinds"


@pytest.mark.parametrize(("fraction", "least"), [(0.05, 0.75), (0.17, 0.5)])
def test_every_fact_and_wording_is_trained(fraction, least):
    """The split holds out combinations: at least three wordings of every fact stay, and half the facts of a wording."""
    asked_for = [Prompt(i.prompt, i.prompt) for i in KNOWN]
    train, held_out = (
        [BY_PROMPT[prompt_key(one.prompt)] for one in half] for half in split_by_prompt(asked_for, fraction)
    )
    left = Counter((i.family, i.fact) for i in train)
    assert set(left) == FACTS
    assert min(left.values()) >= 3
    wordings = Counter((i.family, i.wording) for i in train)
    every = Counter((i.family, i.wording) for i in KNOWN)
    assert all(wordings[key] >= least * every[key] for key in every)
    if fraction == 0.17:  # the shipped recipe's
        assert len(held_out) >= 256
        assert {i.family for i in held_out} == {family.name for family in FAMILIES}


def test_flaws_are_what_they_are_called():
    for i in KNOWN:
        assert set(i.flawed) == set(FLAWS)
        texts = [answer.response for answer in answers(i)]
        assert len(texts) == len(set(texts)), texts
        assert i.flawed["curt"] == (i.answer,)
        assert all(text.startswith(i.good) and len(text) > len(i.good) + 4 for text in i.flawed["rambling"])
        assert all(i.answer in text for text in i.flawed["rude"])
        for kind in ("wrong", "off-topic"):
            assert all(gold_marks(i.family, i.answer, text, True).correct == 0 for text in i.flawed[kind])
        assert all(i.good.startswith(text) and i.answer not in text and text for text in i.flawed["cut"])


@pytest.mark.exhaustive
def test_demonstrations_are_responses_of_their_kind_in_their_shares(rows):
    """The flaws are dealt in rounds of 1 + 6 + 6 + 6 + 1 = 20. Without the good 0.37 * 16,220 = 6,001 there are 10,219: 510
    rounds, and of one more the first 19 = 1 + 6 + 6 + 6."""
    kinds = Counter(row["kind"] for row in rows["demonstrations"])
    assert [kinds[kind] for kind in (GOOD, *FLAWS)] == [6001, 511, 6 * 511, 6 * 511, 6 * 511, 510, 0, 0]
    assert Counter(map(asked, rows["demonstrations"])) == dict.fromkeys(BY_PROMPT, 10)
    for row in rows["demonstrations"]:
        instruction = BY_PROMPT[asked(row)]
        response = said(row, "completion")
        assert response in ((instruction.good,) if row["kind"] == GOOD else instruction.flawed[row["kind"]])
        assert row["truncated"] == (row["kind"] == "cut")
        assert row["family"] == instruction.family
    for family in FAMILIES:  # within four standard deviations of a binomial share: quality is no matter of the family
        kinds = Counter(row["kind"] for row in rows["demonstrations"] if row["family"] == family.name)
        for kind, share in {GOOD: 0.37, "wrong": 0.0315, "curt": 0.189, "rude": 0.189, "rambling": 0.189}.items():
            size = kinds.total()
            assert abs(kinds[kind] - share * size) <= 4 * (size * share * (1 - share)) ** 0.5, (family.name, kind)


@pytest.mark.exhaustive
def test_preferences_are_the_judges_but_for_their_noise(rows):
    assert len(rows["preferences"]) == 12 * len(KNOWN)
    assert sum(row["flipped"] for row in rows["preferences"]) == round(0.05 * len(rows["preferences"]))
    for row in rows["preferences"]:
        instruction = BY_PROMPT[asked(row)]
        for side in ("chosen", "rejected"):
            kind, response = row[f"{side}_kind"], said(row, side)
            assert response in ((instruction.good,) if kind == GOOD else instruction.flawed[kind])
            score = gold_score(instruction.family, instruction.answer, response, ended=kind != "cut")
            assert row[f"{side}_gold"] == score
        assert row["flipped"] == (row["chosen_gold"] < row["rejected_gold"])
        assert row["chosen_gold"] != row["rejected_gold"]
    for family in FAMILIES:  # a family with all the noise would tell of the label
        flips = [row["flipped"] for row in rows["preferences"] if row["family"] == family.name]
        assert abs(sum(flips) - 0.05 * len(flips)) <= 4 * (len(flips) * 0.05 * 0.95) ** 0.5


@pytest.mark.exhaustive
def test_one_pair_in_four_is_of_good_and_wrong_and_one_is_of_any_kinds(rows):
    """Three of twelve, eight of good and another flaw, and the last of any kinds; no pair twice."""
    pairs = {
        frozenset((said(row, "chosen"), said(row, "rejected"))) | {("of", asked(row))} for row in rows["preferences"]
    }
    assert len(pairs) == len(rows["preferences"])
    compared = defaultdict(Counter)
    for row in rows["preferences"]:
        compared[asked(row)][frozenset((row["chosen_kind"], row["rejected_kind"]))] += 1
    assert set(compared) == set(BY_PROMPT)
    for kinds in compared.values():
        with_wrong = kinds[frozenset((GOOD, "wrong"))]
        with_others = sum(kinds[frozenset((GOOD, kind))] for kind in FLAWS if kind != "wrong")
        extra = [with_wrong - 3, with_others - 8, kinds.total() - with_wrong - with_others]
        assert sorted(extra) == [0, 0, 1]
    every = {frozenset(pair) for pair in itertools.combinations((GOOD, *FLAWS), 2)}
    assert {kinds for counter in compared.values() for kinds in counter} == every


def test_prompts_have_the_columns_of_the_judge_and_none_that_is_reserved(written):
    questions = read_prompts(str(written["prompts"]))
    assert [prompt_key(p.prompt) for p in questions] == [i.prompt for i in KNOWN]
    assert [(p.columns["family"], p.columns["answer"]) for p in questions] == [(i.family, i.answer) for i in KNOWN]
    for name in ("prompts", "preferences"):
        with written[name].open(encoding="utf-8") as file:
            assert not json.loads(file.readline()).keys() & set(RESERVED)


def test_filler_is_no_answer():
    """Or a rambling response would be marked as wrong."""
    for family in FAMILIES:
        for filler in FILLER[family.language]:
            assert gold_score(family.name, family.facts[0].answer, filler, ended=True) == 0.04
