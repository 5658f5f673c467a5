"""Statistics of a project's labels: tables worked by hand, what is left out, degenerate cases, and the page about them."""

import doctest
import itertools
import json
import re
from pathlib import Path

import pytest

from heedful import DataError
from heedful.apps.label import Candidate, Item
from heedful.apps.label.commands import report
from heedful.apps.label.records import Event, LabelledItem, Person
from heedful.apps.label.statistics import REFERENCES, read_scores, statistics
from heedful.files import to_json

PAGE = Path(__file__).parents[2] / "docs" / "labelling-statistics.md"
ANNA, BO, CHEN = (Person(p, f"{p} 人\u2028", "annotator") for p in ("p2", "p3", "p4"))
OWNER, LATE = Person("p1", "owner", "owner"), Person("p5", "late", "annotator", "screening")
IMPORT = Person("p6", "import", "annotator", "removed")
EVERYBODY = [OWNER, ANNA, BO, CHEN, LATE, IMPORT]


def close(x):
    return pytest.approx(x, rel=1e-12, abs=1e-12)


def pair(name, first="短", second="长长长", **fields):
    return Item(name, "pair", f"问题 {name} 🙂", (Candidate(first), Candidate(second)), **fields)


NUMBERS = itertools.count(1)


def says(person, item, answer, *, order=(0, 1), seconds=10.0, day="2026-03-01", repeat=False, **more):
    content = {"item": item.item_id, "answer": answer, "order": list(order), "seconds": seconds, "repeat": repeat}
    content |= {**more, "instructions": 0, "comment": "", "flags": []}
    number = next(NUMBERS)
    event = Event(number, f"e{number}", f"{day}T12:00:00.000Z", person.person_id, "label", content)
    return LabelledItem(item, person, event)


def prefers(preferred, strength=2, both_bad=False):
    return {"preferred": preferred, "strength": None if preferred is None else strength, "both_bad": both_bad}


FIRST, SECOND, TIE = prefers(0), prefers(1), prefers(None)


def of(found, person):
    return next(one for one in found["people"] if one["person"] == person.person_id)


@pytest.fixture
def four():
    """The four pairs of docs/labelling-statistics.md."""
    a, b, c, d = (pair(name) for name in "abcd")
    return [
        *(says(ANNA, a, FIRST), says(BO, a, FIRST)),
        *(says(ANNA, b, prefers(0, 1)), says(BO, b, TIE)),
        *(says(ANNA, c, prefers(1, 3)), says(BO, c, prefers(1, 3))),
        *(says(ANNA, d, prefers(0, 4)), says(BO, d, FIRST), says(CHEN, d, prefers(1, 1))),
    ]


def test_agreement_is_that_of_the_page(four):
    """The numbers of docs/labelling-statistics.md; strengths become 2 2, 1 0, -3 -3, 4 2 -1 with another sign."""
    found = statistics(four, EVERYBODY)["agreement"]["pair"]
    assert found["items"] == 4
    assert [round(found["share"][end], 3) for end in ("low", "value", "high")] == [0.188, 0.5, 0.812]
    assert found["without_ties"]["value"] == close(3 / 5)  # the comparison with the tie does not count
    assert found["without_ties"]["count"] == 5
    assert round(found["fleiss"], 4) == 0.2814
    assert round(found["alpha_nominal"], 4) == 0.3043
    assert round(found["alpha_ordinal"], 4) == 0.5517
    assert found["alpha_interval"] is None


def test_cohen_of_every_two_people(four):
    """Anna and Bo share four items: 1 1, 1 tie, 2 2, 1 1. p_o = 3/4, p_e = 3/4 * 2/4 + 1/4 * 1/4 = 7/16, kappa = 5/9."""
    rows = {tuple(row["people"]): row for row in statistics(four, EVERYBODY)["agreement"]["pair"]["cohen"]}
    assert rows["p2", "p3"] == {"people": ["p2", "p3"], "units": 4, "kappa": close(5 / 9)}
    assert rows["p2", "p4"]["kappa"] == close(0)
    assert len(rows) == 3


def test_each_person_with_the_others(four):
    """Of d, Anna's others say 1 and 2: split. Bo's too. Chen's others both say 1, which is not what Chen says."""
    found = statistics(four, EVERYBODY)
    anna, bo, chen = (of(found, person) for person in (ANNA, BO, CHEN))
    assert (anna["agreement"]["value"], anna["agreement"]["count"], anna["undecided"]) == (close(2 / 3), 3, 1)
    assert (bo["agreement"]["value"], bo["undecided"]) == (close(2 / 3), 1)
    assert (chen["agreement"]["value"], chen["undecided"]) == (0, 0)


def test_rankings_agree_by_their_pairs():
    """1 2 2 and 1 3 2: the first is best in both; of the other two answers one ties and the other does not: 2 of 3."""
    item = Item("r", "ranking", "排序", tuple(map(Candidate, "甲乙丙")))
    found = statistics([says(ANNA, item, {"ranks": [1, 2, 2]}), says(BO, item, {"ranks": [1, 3, 2]})], EVERYBODY)
    ranking = found["agreement"]["ranking"]
    assert (ranking["share"]["value"], ranking["share"]["count"], ranking["share"]["groups"]) == (close(2 / 3), 3, 1)
    assert ranking["without_ties"]["value"] == 1
    assert found["ties"]["value"] == close(1 / 6)
    assert found["longer"] is None  # all are as long
    assert found["agreement"]["pair"] is None


def test_many_comparisons_of_a_ranking_do_not_hide_what_the_pairs_say():
    """Of the pair the longer answer, of the ranking's three comparisons always the shorter one; a repeat of each."""
    ranked = Item("r", "ranking", "排序", tuple(map(Candidate, ("甲", "乙乙", "丙丙丙"))))
    labels = [
        says(ANNA, pair("a"), SECOND),
        says(ANNA, pair("a"), SECOND, repeat=True),
        says(ANNA, ranked, {"ranks": [1, 2, 3]}, order=(0, 1, 2)),
        says(ANNA, ranked, {"ranks": [1, 3, 2]}, order=(0, 1, 2), repeat=True),
    ]
    found = statistics(labels, EVERYBODY)
    assert (found["longer"]["value"], found["self_consistency"]["value"]) == (close(1 / 4), close(3 / 4))
    each = {
        task: (one["longer"]["value"], one["ties"]["count"], one["self_consistency"]["value"])
        for task, one in found["by_task"].items()
    }
    assert each == {"pair": (1, 1, 1), "ranking": (0, 3, close(2 / 3))}


def test_ratings_have_the_interval_alpha():
    """Ratings 2 4, 5 5: values 2 4 5 5. D_o = 2 * 4 = 8; D_e = 2 (4 + 2 * 9 + 2 * 1) / 3 = 16: alpha 1/2."""
    items = [Item(name, "rating", "x", (Candidate("y"),)) for name in "ab"]
    rated = [(ANNA, 0, 2), (BO, 0, 4), (ANNA, 1, 5), (BO, 1, 5)]
    found = statistics([says(p, items[i], {"rating": r, "flags": []}) for p, i, r in rated], EVERYBODY)
    rating = found["agreement"]["rating"]
    assert (rating["alpha_interval"], rating["share"]["value"], rating["without_ties"]) == (close(1 / 2), 0.5, None)
    assert found["left"] is found["longer"] is found["ties"] is None


def test_left_and_longer():
    """The order on the screen is the person's: candidate 1 on the left and preferred is a choice of the left."""
    a, b, c, same = pair("a"), pair("b"), pair("c"), pair("d", "四四", "🙂🙂")
    labels = [
        says(ANNA, a, SECOND, order=(1, 0)),  # left, longer
        says(ANNA, b, SECOND, order=(0, 1)),  # right, longer
        says(BO, a, FIRST, order=(0, 1)),  # left, shorter
        says(BO, c, prefers(None, both_bad=True), order=(1, 0)),  # no side
        says(BO, same, FIRST, order=(1, 0)),  # right, as long
    ]
    found = statistics(labels, EVERYBODY)
    assert (found["left"]["value"], found["left"]["count"]) == (0.5, 4)
    assert (found["longer"]["value"], found["longer"]["count"]) == (close(2 / 3), 3)
    assert (found["ties"]["value"], found["both_bad"]["value"]) == (close(1 / 5), close(1 / 5))
    assert of(found, ANNA)["left"]["value"] == 0.5
    assert of(found, BO)["longer"]["value"] == 0


def test_an_answer_of_several_turns_is_as_long_as_all_that_it_says():
    one = pair("a", [{"role": "assistant", "content": "一"}] * 2, "二" * 9)
    found = statistics([says(ANNA, one, FIRST)], EVERYBODY)
    assert found["longer"]["value"] == 0, "two messages of one character are shorter than one of nine"
    said = [
        {"role": "assistant", "content": "一" * 6},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "一" * 6},
    ]
    found = statistics([says(ANNA, pair("b", said, "二" * 9), FIRST)], EVERYBODY)
    assert found["longer"]["value"] == 1


def test_turns_of_a_chat_have_habits_and_no_agreement():
    chat = Item("c", "chat", "谈")
    turn = {"messages": [{"role": "user", "content": "你好"}], "last": True, **SECOND}
    turn["responses"] = [{"response": "短", "source": {}}, {"response": {"role": "assistant", "content": "长长"}}]
    found = statistics([says(ANNA, chat, turn, order=(1, 0)), says(BO, chat, turn, order=(1, 0))], EVERYBODY)
    assert [found[name]["value"] for name in ("left", "longer", "ties")] == [1, 1, 0]
    assert set(found["agreement"].values()) == {None}


def test_repeats_screening_and_imports_are_apart():
    a, b, screening = pair("a"), pair("b"), pair("s", screening=True)
    labels = [
        *(says(ANNA, a, FIRST), says(ANNA, a, SECOND, repeat=True)),
        *(says(ANNA, b, SECOND), says(ANNA, b, prefers(1, 4), repeat=True)),
        *(says(OWNER, screening, FIRST), says(LATE, screening, FIRST), says(ANNA, screening, SECOND)),
        says(IMPORT, a, FIRST, seconds=None),
    ]
    found = statistics(labels, EVERYBODY)
    assert (found["labels"], found["items"]) == (2, 2)
    assert found["left_out"] == {"repeats": 2, "screening": 3, "imported": 1, "gold": 0}
    assert (found["self_consistency"]["value"], found["self_consistency"]["count"]) == (0.5, 2)
    assert of(found, ANNA)["self_consistency"]["value"] == 0.5
    assert of(found, LATE)["self_consistency"] is None
    assert [of(found, person)["screening"] for person in (LATE, ANNA, OWNER)] == [
        {**of(found, LATE)["screening"], "value": 1.0, "count": 1},
        {**of(found, ANNA)["screening"], "value": 0.0, "count": 1},
        None,
    ]
    assert found["agreement"]["pair"] is None
    apart = statistics([says(ANNA, a, FIRST), says(LATE, a, SECOND)], EVERYBODY)
    assert (apart["agreement"]["pair"], of(apart, ANNA)["agreement"]) == (None, None), (
        "people in screening are no others"
    )
    assert of(apart, LATE)["agreement"]["value"] == 0
    assert IMPORT.person_id not in {one["person"] for one in found["people"]}


def test_screening_is_by_the_rule_that_lets_people_in():
    """Ratings at most 1 apart agree; a ranking counts once, by the share of its pairs."""
    rated = [Item(f"a{i}", "rating", "问\u2028", (Candidate("y"),), screening=True) for i in range(2)]
    ranked = Item("r", "ranking", "排", tuple(map(Candidate, "甲乙丙")), screening=True)
    said = [
        *((OWNER, one, {"rating": 5, "flags": []}) for one in rated),
        *((LATE, one, {"rating": rating, "flags": []}) for one, rating in zip(rated, (6, 7), strict=True)),
        *((OWNER, ranked, {"ranks": [1, 2, 3]}), (LATE, ranked, {"ranks": [1, 3, 2]})),
    ]
    found = of(statistics([says(*one) for one in said], EVERYBODY), LATE)["screening"]
    assert (found["value"], found["count"]) == (close((1 + 0 + 2 / 3) / 3), 3)


def test_time():
    """Of a label that says when somebody worked on it, only that time counts."""
    a, b = pair("a"), Item("t", "demonstration", "写")
    labels = [says(ANNA, a, FIRST, seconds=s, day=f"2026-03-{day:02}") for s, day in ((5, 2), (90, 2), (7, 10))]
    found = statistics([*labels, says(BO, b, {"text": "答"}, seconds=100, day="2026-03-02")], EVERYBODY)
    assert found["median_seconds"] == {"demonstration": 100, "pair": 7}
    assert found["per_day"] == [{"day": "2026-03-02", "labels": 3}, {"day": "2026-03-10", "labels": 1}]
    assert of(found, ANNA)["median_seconds"] == 7
    assert of(found, CHEN)["median_seconds"] is None
    assert of(found, BO)["per_day"] == [{"day": "2026-03-02", "labels": 1}]
    labels = [says(ANNA, a, FIRST, seconds=90, active=8.5), says(BO, a, FIRST, seconds=7)]
    found = statistics([*labels, says(BO, pair("b"), FIRST, seconds=30, active=1)], EVERYBODY)
    assert found["median_seconds"] == {"pair": 7}
    assert [of(found, one)["median_seconds"] for one in (ANNA, BO)] == [8.5, 4]


def test_people_and_the_reward_model():
    """a: both people prefer what scores lower, by 3. b: one does, by 0.5, and one does not. c: equal scores."""
    a, b, c, unscored = pair("a"), pair("b"), pair("c"), pair("d")
    ranking = Item("r", "ranking", "排序", tuple(map(Candidate, "甲乙丙")))
    labels = [
        *(says(ANNA, a, FIRST), says(BO, a, FIRST), says(ANNA, b, FIRST), says(BO, b, SECOND), says(ANNA, c, FIRST)),
        *(says(ANNA, unscored, FIRST), says(ANNA, ranking, {"ranks": [1, 2, 2]})),
    ]
    scores = {"a": [1.0, 4.0], "b": [0.0, 0.5], "c": [2.0, 2.0], "r": [0.0, 1.0, -0.5]}
    found = statistics(labels, EVERYBODY, scores=scores)["model"]
    assert (found["agreement"]["value"], found["agreement"]["count"]) == (close(2.5 / 7), 7)
    assert [(one["item"], one["margin"]) for one in found["items"]] == [("a", -3), ("r", -0.25)]
    assert found["items"][0]["prompt"] == "问题 a 🙂"
    assert found["items"][0]["answers"] == ["短", "长长长"]
    assert found["items"][0]["labels"] == [FIRST, FIRST]
    with pytest.raises(DataError, match="item a has 1 score for 2 candidates"):
        statistics(labels, EVERYBODY, scores={"a": [1.0]})


@pytest.mark.parametrize("labels", [0, 1])
def test_nothing_to_compare_is_null_everywhere(labels):
    """Neither NaN nor 0, in JSON and in words."""
    found = statistics([says(ANNA, pair("a"), TIE)][:labels], EVERYBODY, scores={})
    text = to_json(found)
    assert json.loads(text) == json.loads(json.dumps(found, allow_nan=False))
    assert (found["left"], found["longer"], found["self_consistency"]) == (None, None, None)
    assert found["model"] == {"agreement": None, "items": []}
    said = "\n".join(report(found))
    assert "Agreement: n/a, because no item has labels of two people" in said
    assert "Left answer preferred: n/a" in said
    assert said.startswith(("0 labels of 0 items", "1 label of 1 item (not among them: 0 repeats, "))
    assert "nan" not in said.lower()


def test_the_report_has_the_numbers(four):
    said = "\n".join(report(statistics(four, EVERYBODY, scores={"a": [1.0, 0.0]})))
    assert "9 labels of 4 items" in said
    assert "Agreement, pair: 50.0 % (18.8 to 81.2) on 4 items" in said
    assert "alpha 0.304 nominal, 0.552 ordinal" in said
    assert "published: 63.0 %, 72.6 %, 77.3 %" in said
    assert "Reward model agrees with people: 100.0 %" in said


def test_scores_are_read_and_the_last_counts(tmp_path):
    path = tmp_path / "scores.jsonl"
    assert read_scores(path) == {}
    path.write_text("", encoding="utf-8")
    assert read_scores(path) == {}
    lines = [{"item": "甲", "scores": [1, 2.5]}, {"item": "甲", "scores": [0.5, -1], "round": 2}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert read_scores(path) == {"甲": [0.5, -1.0]}
    for line in ('{"item": 1, "scores": [1]}', '{"item": "a"}', '{"item": "a", "scores": [true, null]}'):
        path.write_text('{"item": "a", "scores": [1]}\n' + line, encoding="utf-8")
        with pytest.raises(DataError, match=r"scores\.jsonl:2: expected"):
            read_scores(path)


def failures(page):
    """What the page's Python blocks print that is not what they say."""
    said, session = [], {}
    runner = doctest.DocTestRunner(verbose=False)
    blocks = re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    for number, block in enumerate(blocks):
        test = doctest.DocTestParser().get_doctest(block, session, f"block {number}", str(PAGE), 0)
        assert test.examples
        runner.run(test, out=said.append, clear_globs=False)
        session.update(test.globs)
    assert len(blocks) > 5
    return said


def test_the_page_is_true():
    page = PAGE.read_text(encoding="utf-8")
    assert failures(page) == []
    for reference in REFERENCES:
        assert f"{100 * reference['value']:.1f}".removesuffix(".0") in page
        assert re.search(r"arXiv (\d+\.\d+)", reference["paper"])[1] in page
