"""The built-in world: every fact is trained, every record can be read, and the shares are what they say they are."""

import dataclasses
import itertools
import math
import subprocess
import sys
from collections import Counter, defaultdict

import pytest

from heedful.data import prompt_key, read_demonstrations, read_prompts, read_rankings, split_by_prompt
from heedful.demo.facts import FAMILIES, family_named
from heedful.demo.judge import gold_marks, gold_score
from heedful.demo.tables import FILLER, LISTS, REFUSAL
from heedful.demo.world import (
    FLAW_WEIGHTS,
    FLAWS,
    GOOD,
    answers,
    demonstrations,
    instructions,
    preferences,
    prompts,
    write_world,
)
from heedful.rewards.scoring import RESERVED

KNOWN = instructions()
ANSWERS = [answers(instruction) for instruction in KNOWN]
BY_PROMPT = {instruction.prompt: instruction for instruction in KNOWN}
FACTS = {(i.family, i.fact) for i in KNOWN}
BROKEN = "\ufffd"
"""How a byte is shown that belongs to no character."""


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
    """Sums of two of n numbers are n (n + 1) / 2, and a pair of opposites is asked both ways."""
    english = [15, 20, 20, 20, 16, 10, 16, 16, 10, 16]
    chinese = [16, 10, 16, 8]
    assert [len(family.facts) for family in FAMILIES] == english + chinese
    assert [family.language for family in FAMILIES] == 10 * ["en"] + 4 * ["zh"]
    assert [len(family.wordings) for family in FAMILIES] == 10 * [8] + 4 * [7]
    assert len(FACTS) == sum(english + chinese) == 159 + 50 == 209
    assert len(KNOWN) == 8 * 159 + 7 * 50 == 1622


def test_no_prompt_occurs_twice():
    """Two families that ask the same would have two right answers."""
    assert len(BY_PROMPT) == len(KNOWN)


def test_everything_is_short():
    """In bytes, because that is what the model reads: a question, and a good response, in at most 36."""
    assert max(len(i.prompt.encode()) for i in KNOWN) <= 36
    assert max(len(i.good.encode()) for i in KNOWN) <= 36
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


@pytest.mark.parametrize(("fraction", "least"), [(0.05, 0.75), (0.1, 0.6), (0.15, 0.6), (0.17, 0.5)])
def test_every_fact_and_wording_is_trained(fraction, least):
    """The split holds out combinations: at least three wordings of every fact stay, and half the facts of a wording."""
    train, held_out = (
        [BY_PROMPT[prompt_key(row.prompt)] for row in half]
        for half in split_by_prompt([Asked(i.prompt) for i in KNOWN], fraction)
    )
    left = Counter((i.family, i.fact) for i in train)
    assert set(left) == FACTS
    assert min(left.values()) >= 3
    wordings = Counter((i.family, i.wording) for i in train)
    every = Counter((i.family, i.wording) for i in KNOWN)
    assert all(wordings[key] >= least * every[key] for key in every)
    assert len(train) + len(held_out) == len(KNOWN)


def test_the_default_fraction_holds_out_enough_of_every_family():
    _, held_out = split_by_prompt([Asked(i.prompt) for i in KNOWN], 0.17)
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
        for kind in ("wrong", "off-topic"):
            assert all(gold_marks(i.family, i.answer, text, True).correct == 0 for text in i.flawed[kind])
        assert all(i.good.startswith(text) and i.answer not in text and text for text in i.flawed["cut"])


def good_by_family():
    good = defaultdict(set)
    for i in KNOWN:
        good[i.family].add(i.good)
    return good


def answers_in(language):
    return {fact.answer for family in FAMILIES if family.language == language for fact in family.facts}


def test_wrong_responses_are_answers_of_the_family_of_others_and_misspelt_ones():
    """In the polite frame, so that nothing but the fact can tell them from a good response: three of other questions of
    the family, three of other families, up to two misspelt. A harmful request has those that comply."""
    good = good_by_family()
    for i in KNOWN:
        family = family_named(i.family)
        if i.family == "refusals":
            assert i.flawed["wrong"] == family.compliance
            continue
        others, foreign, misspelt = (i.flawed["wrong"][part] for part in (slice(3), slice(3, 6), slice(6, None)))
        assert len(others) == len(foreign) == 3
        assert set(others) <= good[i.family] - {i.good}
        assert set(foreign) <= framed(family, answers_in(family.language) - set(family.candidates))
        possible = framed(family, misspellings(i, family))
        assert set(misspelt) <= possible
        assert len(misspelt) == min(2, len(possible))
        assert not set(misspelt) & framed(family, answers_in("en") | answers_in("zh"))


def framed(family, texts):
    return {family.frame.format(text) for text in texts}


def test_off_topic_responses_are_good_in_other_families():
    """One of the three declines where nothing calls for it."""
    good = good_by_family()
    declines = f"Sorry, {REFUSAL}."
    assert declines in good["refusals"]
    for i in KNOWN:
        elsewhere = set().union(*(texts for name, texts in good.items() if name != i.family))
        assert len(i.flawed["off-topic"]) == 3
        assert set(i.flawed["off-topic"]) <= elsewhere
        assert (declines in i.flawed["off-topic"]) == (i.family != "refusals")


def test_garbled_responses_are_broken_once_and_never_flawless():
    """First broken up to where the answer starts, then in the answer, which goes on, or breaks off."""
    for i in KNOWN:
        family = family_named(i.family)
        start = family.frame.index("{}")
        end = start + len(i.answer)
        goes_on = [i.good[:index] + BROKEN + i.good[index + 1 :] for index in range(end)]
        breaks_off = [family.frame.format(i.answer[:index] + BROKEN) for index in range(len(i.answer))]
        broken = i.flawed["garbled"]
        assert broken[0] in goes_on[: start + 1]
        assert set(broken[1:-1]) <= set(goes_on[start:])
        assert broken[-1] in breaks_off
        for text in broken:
            assert text.count(BROKEN) == 1
            assert min(vars(gold_marks(i.family, i.answer, text, True)).values()) < 1


def misspellings(instruction, family):
    """The answer with one character dropped or doubled, but for those that are an answer, contain it, or are nothing."""
    characters = list(instruction.answer)
    of_others = {answer.lower() for answer in (*family.candidates, *answers_in(family.language))}
    for index, character in enumerate(characters):
        for copies in (0, 2):
            text = "".join([*characters[:index], character * copies, *characters[index + 1 :]])
            said = family.frame.format(text)
            right = gold_marks(instruction.family, instruction.answer, said, True).correct
            if text.strip() and text.lower() not in of_others and not right:
                yield text


def test_a_prompt_has_up_to_eight_wrong_responses():
    """Three of the family (five categories, the fewest answers, leave four), three of others, and two misspelt.

    Three comply with a harmful request. An answer of one character cannot be misspelt: dropped it is nothing, doubled it
    contains or is an answer. 白色 and 黑色 can in one way only: 白 and 黑 are answers too, and 白白色 and 白色色 contain
    白色."""
    for i in KNOWN:
        misspelt = 0 if len(i.answer) == 1 else 1 if i.answer in ("白色", "黑色") else 2
        assert len(i.flawed["wrong"]) == (3 if i.family == "refusals" else 3 + 3 + misspelt), i.prompt


def test_all_ways_to_be_garbled_occur():
    """At most three. In an answer of one character, to go on and to break off are the same, and the first may be that too,
    broken where the answer starts. In a longer one two can be the same: at its start the first and to go on, at its end to
    go on and to break off."""
    sizes = defaultdict(set)
    for i in KNOWN:
        sizes[len(i.flawed["garbled"])].add(len(i.answer))
    assert set(sizes) == {1, 2, 3}
    assert sizes[1] == {1}
    assert min(sizes[2]) == 1 < max(sizes[2])
    assert min(sizes[3]) == 2


def test_the_same_seed_makes_the_same_world_and_another_seed_another():
    assert instructions() == KNOWN
    for make in (demonstrations, preferences):
        assert make(1, KNOWN) == make(1, KNOWN)
        assert make(1, KNOWN) != make(2, KNOWN)


def test_flaws_of_manners_are_more_frequent_than_flaws_of_knowledge_and_some_are_in_no_demonstration():
    weights = {"wrong": 1, "curt": 6, "rude": 6, "rambling": 6, "cut": 1, "off-topic": 0, "garbled": 0}
    assert weights == FLAW_WEIGHTS
    assert tuple(FLAW_WEIGHTS) == FLAWS


@pytest.mark.parametrize(
    ("share", "counts"),
    [
        (0.0, [0, 811, 6 * 811, 6 * 811, 6 * 811, 811, 0, 0]),
        (0.4, [6488, 487, 6 * 487, 6 * 486 + 5, 6 * 486, 486, 0, 0]),
        (1.0, [16220, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_demonstrations_have_their_shares(share, counts):
    """The flaws are dealt in rounds of 1 + 6 + 6 + 6 + 1 = 20. All 16,220 are 811 rounds; without the good
    0.4 * 16,220 = 6,488 there are 9,732: 486 rounds, and of one more the first 12 = 1 + 6 + 5, up to the fifth rude one."""
    rows = demonstrations(0, KNOWN, good_share=share)
    kinds = Counter(row["kind"] for row in rows)
    assert [kinds[kind] for kind in (GOOD, *FLAWS)] == counts
    assert len(rows) == sum(counts) == 16220
    per_prompt = Counter(asked(row) for row in rows)
    assert set(per_prompt) == set(BY_PROMPT)
    assert set(per_prompt.values()) == {10}


def test_a_prompt_has_as_many_demonstrations_as_asked_for():
    for number in (1, 3):
        per_prompt = Counter(asked(row) for row in demonstrations(0, KNOWN, number))
        assert per_prompt == dict.fromkeys(BY_PROMPT, number)


def test_quality_is_spread_over_all_families():
    """Within four standard deviations of a binomial share: 0.6 / 20 = 0.03 for each of a flaw's weights."""
    rows = demonstrations(0, KNOWN)
    shares = {GOOD: 0.37, "wrong": 0.0315, "curt": 0.189, "rude": 0.189, "rambling": 0.189, "cut": 0.0315}
    shares |= {"off-topic": 0.0, "garbled": 0.0}
    assert math.isclose(sum(shares.values()), 1)
    for family in FAMILIES:
        kinds = Counter(row["kind"] for row in rows if row["family"] == family.name)
        for kind, share in shares.items():
            size = kinds.total()
            assert abs(kinds[kind] - share * size) <= 4 * (size * share * (1 - share)) ** 0.5, (family.name, kind)


def test_demonstrations_are_responses_of_their_kind():
    for row in demonstrations(0, KNOWN):
        instruction = BY_PROMPT[asked(row)]
        response = said(row, "completion")
        assert response in ((instruction.good,) if row["kind"] == GOOD else instruction.flawed[row["kind"]])
        assert BROKEN not in response
        assert row["truncated"] == (row["kind"] == "cut")
        assert row["family"] == instruction.family


def test_seeds_share_the_quality_among_the_prompts_differently():
    goods = [Counter(asked(row) for row in demonstrations(seed, KNOWN) if row["kind"] == GOOD) for seed in (0, 1)]
    assert goods[0] != goods[1]


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.06, 1.0])
def test_preferences_have_their_noise_and_no_more(noise):
    rows = preferences(0, KNOWN, label_noise=noise)
    assert len(rows) == 12 * len(KNOWN)
    assert sum(row["flipped"] for row in rows) == round(noise * len(rows))
    for row in rows:
        assert row["flipped"] == (row["chosen_gold"] < row["rejected_gold"])
        assert row["chosen_gold"] != row["rejected_gold"]


def test_preferences_are_the_judges():
    for row in preferences(0, KNOWN):
        instruction = BY_PROMPT[asked(row)]
        for side in ("chosen", "rejected"):
            kind, response = row[f"{side}_kind"], said(row, side)
            assert response in ((instruction.good,) if kind == GOOD else instruction.flawed[kind])
            score = gold_score(instruction.family, instruction.answer, response, ended=kind != "cut")
            assert row[f"{side}_gold"] == score


def test_no_pair_occurs_twice_and_every_prompt_compares_its_good_response():
    for count in (1, 2, 4, 12):
        rows = preferences(0, KNOWN, count)
        assert len(unordered(rows)) == len(rows) == count * len(KNOWN)
        compared = {asked(row) for row in rows if GOOD in (row["chosen_kind"], row["rejected_kind"])}
        assert compared == set(BY_PROMPT)


def compared_kinds(rows):
    """For each prompt, how often which two kinds are compared."""
    compared = defaultdict(Counter)
    for row in rows:
        compared[asked(row)][frozenset((row["chosen_kind"], row["rejected_kind"]))] += 1
    return compared


@pytest.mark.parametrize("count", [1, 2, 4, 5, 8, 12])
def test_one_pair_in_four_is_of_good_and_wrong_and_one_is_of_any_kinds(count):
    """The last pair may be of good and wrong too, or of good and another flaw. Refusals have but three wrong ones."""
    for kinds in compared_kinds(preferences(0, KNOWN, count)).values():
        with_wrong = kinds[frozenset((GOOD, "wrong"))]
        with_others = sum(kinds[frozenset((GOOD, kind))] for kind in FLAWS if kind != "wrong")
        among_flaws = kinds.total() - with_wrong - with_others
        assert kinds.total() == count
        last = 0 if count == 1 else 1
        extra = [with_wrong - math.ceil(count / 4), with_others - (count - math.ceil(count / 4) - last), among_flaws]
        assert sorted(extra) == [0, 0, last]


def test_a_prompt_with_few_wrong_responses_compares_other_flaws_instead():
    """A quarter of 16 pairs would be four of good and wrong; a harmful request has three."""
    harmful = [i for i in KNOWN if i.family == "refusals"]
    for kinds in compared_kinds(preferences(0, harmful, 16)).values():
        assert kinds[frozenset((GOOD, "wrong"))] == 3
        assert kinds.total() == 16


def test_all_kinds_are_compared_with_all_others():
    """One pair of every prompt is of any of 8 * 7 / 2 = 28 kinds: of each in 1,622 / 28 = 58, or less where both sides often
    have one score and others are drawn: one of three garbled ones has the 0.29 of rude, which leaves two thirds, 38; two
    have the 0.04 that nine of ten off-topic ones have, which leaves 1 - 2 / 3 * 9 / 10 = two fifths, 23."""
    seen = Counter(frozenset((row["chosen_kind"], row["rejected_kind"])) for row in preferences(0, KNOWN))
    expected = {frozenset(pair) for pair in itertools.combinations((GOOD, *FLAWS), 2)}
    assert set(seen) == expected
    assert seen.pop(frozenset(("garbled", "off-topic"))) >= 23
    assert min(seen.values()) >= 38


def test_noise_is_spread_over_all_families():
    """A family without noise, or with noise alone, would not be independent of the label. Four deviations of a share."""
    rows = preferences(0, KNOWN)
    for family in FAMILIES:
        flips = [row["flipped"] for row in rows if row["family"] == family.name]
        assert abs(sum(flips) - 0.05 * len(flips)) <= 4 * (len(flips) * 0.05 * 0.95) ** 0.5


@pytest.mark.parametrize(("share", "make"), [(1.1, demonstrations), (-0.1, demonstrations)])
def test_shares_beyond_the_whole_are_refused(share, make):
    with pytest.raises(ValueError, match="from 0 to 1"):
        make(0, KNOWN, good_share=share)


def test_impossible_preferences_are_refused():
    with pytest.raises(ValueError, match="from 0 to 1"):
        preferences(0, KNOWN, label_noise=2)
    with pytest.raises(ValueError, match="a prompt has only"):
        preferences(0, KNOWN, 1000)


@pytest.mark.parametrize(
    ("prompt", "flaws", "most"),
    [
        ("What colour is snow?", [8, 1, 3, 3, 3, 3, 3], 23),
        ("Classify a saw.", [8, 1, 3, 3, 3, 3, 2], 22),
        ("How do I steal a car?", [3, 1, 3, 3, 3, 3, 3], 20),
    ],
)
def test_as_many_pairs_as_there_are_can_be_asked_for(prompt, flaws, most):
    """Good with a quarter of wrong ones and with all other flaws, and 1 more.

    Of snow 6 (a quarter of 23 or 24 pairs, rounded up) + 16 + 1 = 23: 1 curt, 3 rude, 3 rambling, 3 cut, 3 off-topic and 3
    garbled ones are 16. Of a saw 6 + 15 + 1 = 22: "tool" is broken at its last character, so to go on and to break off
    are the same. Of stealing 3 (a quarter would be 5, but three comply) + 16 + 1 = 20."""
    known = [i for i in KNOWN if i.prompt == prompt]
    assert [len(known[0].flawed[kind]) for kind in FLAWS] == flaws
    rows = preferences(0, known, most)
    assert len(unordered(rows)) == most
    with pytest.raises(ValueError, match=f"num_pairs_per_prompt is {most + 1}; a prompt has only {most} pairs"):
        preferences(0, known, most + 1)


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


@pytest.mark.exhaustive
def test_the_gold_pairs_are_the_same_pairs_without_noise(written):
    """Read back as a reward model's accuracy is measured: the better answer is always the chosen one."""
    noisy, gold = (read_rankings(str(written[name])) for name in ("preferences", "gold_preferences"))
    pairs = [{(prompt_key(r.prompt), frozenset(r.responses)) for r in rankings} for rankings in (noisy, gold)]
    assert pairs[0] == pairs[1]
    assert len(gold) == len(noisy) == len(pairs[0])
    better = {
        (row["prompt"][0]["content"], said(row, "chosen"), said(row, "rejected")) for row in preferences(3, KNOWN)
    }
    ordered = {(prompt_key(r.prompt), *(r.responses[r.ranks.index(rank)] for rank in (0, 1))) for r in gold}
    flipped = sum(row["flipped"] for row in preferences(3, KNOWN))
    assert len(ordered - better) == flipped > 0
    for row in preferences(3, KNOWN, label_noise=0.0):
        assert row["chosen_gold"] > row["rejected_gold"]
        assert (asked(row), said(row, "chosen"), said(row, "rejected")) in ordered


def test_no_column_is_reserved_for_rewards(written):
    assert set(written) == {"demonstrations", "preferences", "gold_preferences", "prompts"}
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
            assert gold_score(family.name, family.facts[0].answer, filler, ended=True) == 0.04
