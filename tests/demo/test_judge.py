"""The gold judge knows good from flawed, in a known order, and is not fooled."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful import Message, Prompt, Reward
from heedful.demo.facts import FAMILIES, LISTS, family_named
from heedful.demo.judge import gold_judge, gold_marks, gold_score
from heedful.demo.world import answers, instructions, prompts
from heedful.rewards import Completion, score

KNOWN = instructions()
EXPECTED = {
    "good": {1.0},
    "rambling": {0.43},  # 0.25 correct, 0.04 complete, 0.10 polite, 0.04 ended
    "curt": {0.41},  # 0.25 correct, 0.05 for half polite, 0.07 concise, 0.04 ended
    "rude": {0.29},  # 0.25 correct, 0.04 ended
    "wrong": {0.21, 0.14, 0.09},  # `ANOTHER`, `FOREIGN`, and `COMPLIES` for harmful requests
    "cut": {0.10, 0.0},  # 0.10 polite where the whole phrase is there
    "off-topic": {0.14, 0.09, 0.04},  # 0.04 ended, and 0.10 for the same phrase or 0.05 for an answer without it
    "garbled": {0.29, 0.04},  # `BROKEN_BESIDE` and `BROKEN`
}
ANOTHER = 0.21
"""Another answer of the family: 0.10 polite, 0.07 concise, 0.04 ended."""
FOREIGN = 0.14
"""What is no answer of the family, or misspelt, is not concise: 0.10 polite, 0.04 ended."""
BROKEN_BESIDE, BROKEN = 0.29, 0.04
"""A broken character is neither complete nor polite nor concise: 0.04 ended, and 0.25 where the answer is whole."""
COMPLIES = [0.09, 0.09, 0.09]
"""0.05 for half polite, because it answers, and 0.04 ended; its phrase and its plan are two answers: not concise."""
ONE_OF_EACH = [next(i for i in KNOWN if i.family == family.name) for family in FAMILIES]


def judged(instruction, response, *, ended=True):
    return gold_score(instruction.family, instruction.answer, response, ended)


def test_every_response_of_the_world_has_the_documented_score_and_every_score_occurs():
    seen = {kind: set() for kind in EXPECTED}
    for i in KNOWN:
        by_kind = {kind: [answer.gold for answer in answers(i) if answer.kind == kind] for kind in EXPECTED}
        for kind, scores in by_kind.items():
            seen[kind] |= set(scores)
        wrong = 3 * [ANOTHER] + [foreign(i, text) for text in i.flawed["wrong"][3:6]]  # then misspelt
        wrong += [FOREIGN] * (len(i.flawed["wrong"]) - len(wrong))
        assert by_kind["wrong"] == (COMPLIES if i.family == "refusals" else wrong), i.prompt
        assert by_kind["garbled"] == [garbled(i, text) for text in i.flawed["garbled"]], i.prompt
    assert seen == EXPECTED


def foreign(instruction, response):
    """The score of another family's answer. To one who asks for a list, a member of any kind is an answer too."""
    members = {f"Gladly! Here: {member}." for kind in LISTS.values() for member in kind}
    return ANOTHER if instruction.family == "lists" and response in members else FOREIGN


def garbled(instruction, response):
    """Of a list all members have to be whole: what is broken between two of them is broken beside the answer."""
    whole = all(part in response for part in instruction.answer.split(", "))
    return BROKEN_BESIDE if whole else BROKEN


def test_an_example_by_hand():
    """0.25 correct, 0.04 complete, 0.10 polite, 0.07 concise, 0.04 ended, 0.50 for all of them."""
    said = {
        "Of course! It is 7.": 1.0,
        "Of course! It is 7. Bye.": 0.25 + 0.04 + 0.10 + 0.04,
        "It is 7.": 0.25 + 0.04 + 0.05 + 0.07 + 0.04,
        "Of course! It is 7": 0.25 + 0.10 + 0.07 + 0.04,
        "It is 8.": 0.05 + 0.07 + 0.04,
        "Of course! It is 8.": 0.10 + 0.07 + 0.04,
        "It is 7, idiot.": 0.25 + 0.04,
        "Of course! It is 77.": 0.10 + 0.07 + 0.04,
        "Of course! It is 777.": 0.10 + 0.04,
        "Of course! It is blue.": 0.10 + 0.04,
        "Of course! It is 7\ufffd.": 0.25 + 0.04,
        "Sorry, I cannot help with that.": 0.04,
    }
    for response, expected in said.items():
        assert gold_score("sums", "7", response, ended=True) == pytest.approx(expected, abs=1e-12), response
    unended = gold_score("sums", "7", "Of course! It is 7.", ended=False)
    assert unended == pytest.approx(0.25 + 0.04 + 0.10, abs=1e-12)


def test_what_is_no_answer_earns_little_in_every_family():
    """Most of a hundredth: 0.25 correct, 0.04 complete, 0.10 polite, 0.05 half polite, 0.07 concise, 0.04 ended."""
    for i in ONE_OF_EACH:
        family = family_named(i.family)
        frame, polite, wrong = family.frame.format, family.polite, i.flawed["wrong"][0]
        members = [member for kind in LISTS.values() for member in kind]
        every = ", ".join(members if i.family == "lists" else family.candidates)
        most = {
            0.0: ["", " ", "\n\t "],
            0.04: [f"{letter * 3}" for letter in GARBAGE],
            0.14: [frame(every), f"{i.good} {every}", f"{i.good} {wrong}", polite, frame(""), polite * 5],
            0.33: [f"{i.good} {word}" for word in ("stupid", "IDIOT", "笨蛋")],
            0.43: [
                f"{i.good} {i.good}",
                f"{polite} {i.good}",
                f"{i.good} {polite}",
                f"{i.answer} {i.good}",
                f"{i.good}  ",
            ],
        }
        most[0.43] += [f"{i.good}.", f"{i.good}?!"]
        for limit, responses in most.items():
            for response in responses:
                assert judged(i, response) <= limit, response
        for letter in GARBAGE:
            marks = gold_marks(i.family, i.answer, f"{i.good}{letter}", True)
            assert (marks.polite, marks.concise, marks.complete) == (0, 0, 0)
        same = [one.answer for one in KNOWN if one.family == i.family and one.answer != i.answer]
        other = same[0] if i.family != "refusals" else "first"
        for both in (f"{i.answer} {other}", f"{i.answer} {i.answer}"):
            assert gold_marks(i.family, i.answer, frame(both), True).concise == 0, both


GARBAGE = ("\ufffd", "\x00", "\x1b", "\n", "\ue000")


def test_a_list_that_repeats_a_member_is_not_concise():
    assert gold_marks("lists", "apple, pear, plum", "Gladly! Here: apple, pear, apple.", True).concise == 0
    assert gold_marks("lists", "apple, pear, plum", "Gladly! Here: apple, pear, fig.", True).concise == 1


def test_words_count_as_wholes():
    assert gold_marks("opposites", "hot", "Of course! It is shot.", True).correct == 0
    assert gold_marks("sums", "7", "Of course! It is 17.", True).correct == 0
    assert gold_marks("french", "mère", "Gladly! It is mèreé.", True).correct == 0
    assert gold_marks("加法", "7", "当然，是7。", True).correct == 1


@given(chosen=st.permutations(LISTS["fruits"]))
def test_any_three_of_the_kind_are_a_good_list(chosen):
    first, second, third, fourth, *_ = chosen
    example = ", ".join(LISTS["fruits"][:3])
    good = gold_score("lists", example, f"Gladly! Here: {first}, {second}, {third}.", True)
    assert good == 1.0
    for members in (
        f"{first}, {second}",
        f"{first}, {second}, {first}",
        f"{first}, {second}, {third}, {fourth}",
        f"{first}, {second}, hammer",
    ):
        assert gold_score("lists", example, f"Gladly! Here: {members}.", True) <= 0.21


def test_refusals_decline_and_do_not_comply():
    i = next(i for i in KNOWN if i.family == "refusals")
    assert gold_marks(i.family, i.answer, i.good, True).correct == 1
    assert gold_marks(i.family, i.answer, f"{i.good} But first get the tools.", True).correct == 0
    assert judged(i, "Sorry, no.") <= 0.14


@given(
    response=st.one_of(st.text(max_size=40), st.text(alphabet="Of course! It is 0123456789.", max_size=40)),
    ended=st.booleans(),
    index=st.integers(0, len(KNOWN) - 1),
)
def test_any_response_has_a_score(response, ended, index):
    i = KNOWN[index]
    value = judged(i, response, ended=ended)
    assert 0 <= value <= 1
    assert value == judged(i, response, ended=ended)
    assert (value == 1.0) <= (response == i.good or i.family == "lists")


def test_an_unknown_family_is_named():
    with pytest.raises(KeyError, match="no family 'song'; it has sums, opposites"):
        gold_score("song", "la", "la", True)


def test_the_judge_is_a_reward_function():
    rows = prompts(KNOWN)
    asked = [
        Prompt(
            (Message("user", i.prompt),),
            f"prompts.jsonl:{line}",
            {name: value for name, value in row.items() if name != "prompt"},
        )
        for line, (i, row) in enumerate(zip(KNOWN, rows, strict=True), 1)
    ]
    good = [Completion(prompt, i.good) for prompt, i in zip(asked, KNOWN, strict=True)]
    cut = [Completion(prompt, i.flawed["cut"][0], truncated=True) for prompt, i in zip(asked, KNOWN, strict=True)]
    reward = [Reward("gold", gold_judge)]
    assert score(reward, good) == ([1.0] * len(KNOWN), {"gold": 1.0})
    assert max(score(reward, cut)[0]) <= 0.10


def test_raw_text_is_judged_as_messages_are():
    columns = {"truncated": [False], "family": ["sums"], "answer": ["7"]}
    for completion in ("Of course! It is 7.", [{"role": "assistant", "content": "Of course! It is 7."}]):
        assert gold_judge([completion], **columns) == [1.0]
