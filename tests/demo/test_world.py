"""The built-in world: every fact is trained, every record can be read, and the shares are what they say they are."""

import dataclasses
import itertools
import subprocess
import sys
from collections import Counter, defaultdict

import pytest

from heedful.data import prompt_key, read_demonstrations, read_prompts, read_rankings, split_by_prompt
from heedful.demo.facts import FAMILIES, FILLER, LISTS
from heedful.demo.judge import gold_marks, gold_score
from heedful.demo.world import (
    FLAWS,
    GOOD,
    answers,
    demonstrations,
    instructions,
    preferences,
    prompts,
    write_world,
)
from heedful.rewards.interface import RESERVED

KNOWN = instructions()
ANSWERS = [answers(instruction) for instruction in KNOWN]
BY_PROMPT = {instruction.prompt: instruction for instruction in KNOWN}
FACTS = {(i.family, i.fact) for i in KNOWN}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("世界") / "new", 3)


def asked(row):
    return row["prompt"][0]["content"]


def said(row, column):
    return row[column][0]["content"]


def unordered(rows):
    return {frozenset((said(row, "chosen"), said(row, "rejected"))) | {("of", asked(row))} for row in rows}


def test_the_world_is_as_large_as_it_says():
    assert len(FAMILIES) == 14
    assert len(FACTS) == 330
    assert len(KNOWN) == 1897
    assert all(len(family.wordings) in (5, 6) for family in FAMILIES)
    assert sum(family.language == "zh" for family in FAMILIES) == 4


def test_no_prompt_occurs_twice():
    """Two families that ask the same would have two right answers."""
    assert len(BY_PROMPT) == len(KNOWN)


def test_everything_is_short():
    """In bytes, because that is what the model reads: a question, and a good response, in at most 40."""
    assert max(len(i.prompt.encode()) for i in KNOWN) <= 40
    assert max(len(i.good.encode()) for i in KNOWN) <= 40
    assert max(len(answer.response.encode()) for found in ANSWERS for answer in found) <= 64


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


def test_no_member_belongs_to_two_kinds():
    members = [member for kind in LISTS.values() for member in kind]
    assert len(members) == len(set(members))


def test_frames_are_politeness_and_statement():
    for family in FAMILIES:
        assert family.polite in family.frame
        assert family.statement in family.frame
        assert family.frame.replace(family.polite, "").strip() == family.statement


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.15])
def test_every_fact_and_wording_is_trained(fraction):
    """The split holds out combinations: at least two wordings of every fact stay, and most facts of every wording."""
    train, held_out = (
        [BY_PROMPT[prompt_key(row.prompt)] for row in half]
        for half in split_by_prompt([Asked(i.prompt) for i in KNOWN], fraction)
    )
    left = Counter((i.family, i.fact) for i in train)
    assert set(left) == FACTS
    assert min(left.values()) >= 2
    wordings = Counter((i.family, i.wording) for i in train)
    every = Counter((i.family, i.wording) for i in KNOWN)
    assert all(wordings[key] > 0.5 * every[key] for key in every)
    assert len(train) + len(held_out) == len(KNOWN)


def test_the_default_fraction_holds_out_enough_of_every_family():
    _, held_out = split_by_prompt([Asked(i.prompt) for i in KNOWN], 0.15)
    assert len(held_out) >= 256
    assert {BY_PROMPT[row.prompt].family for row in held_out} == {family.name for family in FAMILIES}


@dataclasses.dataclass(frozen=True)
class Asked:
    prompt: str


def test_responses_to_a_prompt_are_all_different():
    for found in ANSWERS:
        texts = [answer.response for answer in found]
        assert len(texts) == len(set(texts)), texts
        assert {answer.kind for answer in found} == {GOOD, *FLAWS}


def test_flaws_are_what_they_are_called():
    for i in KNOWN:
        assert i.flawed["curt"] == (i.answer,)
        assert all(text.startswith(i.good) and len(text) > len(i.good) + 4 for text in i.flawed["rambling"])
        assert all(i.answer in text for text in i.flawed["rude"])
        assert all(gold_marks(i.family, i.answer, text, True).correct == 0 for text in i.flawed["wrong"])
        assert all(i.good.startswith(text) and i.answer not in text and text for text in i.flawed["cut"])


def test_wrong_answers_are_right_elsewhere():
    """So that nothing but the fact can tell them from a good response."""
    good = defaultdict(set)
    for i in KNOWN:
        good[i.family].add(i.good)
    for i in KNOWN:
        if i.family != "refusals":
            assert set(i.flawed["wrong"]) <= good[i.family] - {i.good}


def test_the_same_seed_makes_the_same_world_and_another_seed_another():
    assert instructions() == KNOWN
    for make in (demonstrations, preferences):
        assert make(1, KNOWN) == make(1, KNOWN)
        assert make(1, KNOWN) != make(2, KNOWN)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_demonstrations_have_their_shares(share):
    rows = demonstrations(0, KNOWN, share)
    kinds = Counter(row["kind"] for row in rows)
    assert kinds[GOOD] == round(share * len(rows))
    flawed = [kinds[kind] for kind in FLAWS]
    assert max(flawed) - min(flawed) <= 1
    per_prompt = Counter(asked(row) for row in rows)
    assert set(per_prompt) == set(BY_PROMPT)
    assert set(per_prompt.values()) == {2, 3}


def test_quality_is_spread_over_all_families():
    """Within four standard deviations of a binomial share."""
    rows = demonstrations(0, KNOWN)
    for family in FAMILIES:
        kinds = Counter(row["kind"] for row in rows if row["family"] == family.name)
        for kind, share in {GOOD: 0.4, **dict.fromkeys(FLAWS, 0.12)}.items():
            size = kinds.total()
            assert abs(kinds[kind] - share * size) <= 4 * (size * share * (1 - share)) ** 0.5, (family.name, kind)


def test_demonstrations_are_responses_of_their_kind():
    for row in demonstrations(0, KNOWN):
        instruction = BY_PROMPT[asked(row)]
        response = said(row, "completion")
        assert response in ((instruction.good,) if row["kind"] == GOOD else instruction.flawed[row["kind"]])
        assert row["truncated"] == (row["kind"] == "cut")
        assert row["family"] == instruction.family


def test_seeds_share_the_quality_among_the_prompts_differently():
    goods = [Counter(asked(row) for row in demonstrations(seed, KNOWN) if row["kind"] == GOOD) for seed in (0, 1)]
    assert goods[0] != goods[1]


@pytest.mark.parametrize("noise", [0.0, 0.06, 1.0])
def test_preferences_have_their_noise_and_no_more(noise):
    rows = preferences(0, KNOWN, label_noise=noise)
    assert len(rows) == 2 * len(KNOWN)
    assert sum(row["flipped"] for row in rows) == round(noise * len(rows))
    for row in rows:
        assert row["flipped"] == (row["chosen_gold"] < row["rejected_gold"])
        assert row["chosen_gold"] != row["rejected_gold"]


def test_preferences_are_the_judges():
    for row in preferences(0, KNOWN, 3):
        instruction = BY_PROMPT[asked(row)]
        for side in ("chosen", "rejected"):
            kind, response = row[f"{side}_kind"], said(row, side)
            assert response in ((instruction.good,) if kind == GOOD else instruction.flawed[kind])
            score = gold_score(instruction.family, instruction.answer, response, ended=kind != "cut")
            assert row[f"{side}_gold"] == score


def test_no_pair_occurs_twice_and_every_prompt_compares_its_good_response():
    for count in (1, 2, 4):
        rows = preferences(0, KNOWN, count)
        assert len(unordered(rows)) == len(rows)
        compared = {asked(row) for row in rows if GOOD in (row["chosen_kind"], row["rejected_kind"])}
        assert compared == set(BY_PROMPT)


def test_all_kinds_are_compared_with_all_others():
    seen = Counter(frozenset((row["chosen_kind"], row["rejected_kind"])) for row in preferences(0, KNOWN))
    expected = {frozenset(pair) for pair in itertools.combinations((GOOD, *FLAWS), 2)}
    assert set(seen) == expected
    assert min(seen.values()) >= 50


def test_noise_is_spread_over_all_families():
    """A family without noise, or with noise alone, would not be independent of the label. Four deviations of a share."""
    rows = preferences(0, KNOWN)
    for family in FAMILIES:
        flips = [row["flipped"] for row in rows if row["family"] == family.name]
        assert abs(sum(flips) - 0.06 * len(flips)) <= 4 * (len(flips) * 0.06 * 0.94) ** 0.5


@pytest.mark.parametrize(("share", "make"), [(1.1, demonstrations), (-0.1, demonstrations)])
def test_shares_beyond_the_whole_are_refused(share, make):
    with pytest.raises(ValueError, match="from 0 to 1"):
        make(0, KNOWN, share)


def test_impossible_preferences_are_refused():
    with pytest.raises(ValueError, match="from 0 to 1"):
        preferences(0, KNOWN, label_noise=2)
    with pytest.raises(ValueError, match="a prompt has only"):
        preferences(0, KNOWN, 1000)


def test_files_are_what_was_generated(written):
    read = read_demonstrations(str(written["demonstrations"]))
    rows = demonstrations(3, KNOWN)
    assert [(prompt_key(d.prompt), d.response, d.truncated) for d in read] == [
        (asked(row), said(row, "completion"), row["truncated"]) for row in rows
    ]
    rankings = read_rankings(str(written["preferences"]))
    assert [(prompt_key(r.prompt), *r.responses) for r in rankings] == [
        (asked(row), said(row, "chosen"), said(row, "rejected")) for row in preferences(3, KNOWN)
    ]
    questions = read_prompts(str(written["prompts"]))
    assert [prompt_key(p.prompt) for p in questions] == [i.prompt for i in KNOWN]
    assert [dict(p.columns) for p in questions] == [
        {name: value for name, value in row.items() if name != "prompt"} for row in prompts(KNOWN)
    ]


def test_no_column_is_reserved_for_rewards(written):
    assert set(written) == {"demonstrations", "preferences", "prompts"}
    for rows in (prompts(KNOWN), preferences(0, KNOWN)):
        assert not set(rows[0]) & set(RESERVED)


def test_chinese_is_written_as_itself(written):
    for path in written.values():
        text = path.read_bytes().decode("utf-8")
        assert "的反义词" in text
        assert "\\u" not in text


def test_the_world_needs_no_torch():
    code = "import sys, heedful.demo.world; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_filler_is_no_answer():
    """Or a rambling response would be marked as wrong."""
    for family in FAMILIES:
        for filler in FILLER[family.language]:
            assert gold_score(family.name, family.facts[0].answer, filler, ended=True) == 0.05
