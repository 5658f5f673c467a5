"""Agreement statistics against published examples, tables worked by hand, brute force and the library's other intervals.

The tests call the module through ``A``, so that `test_every_mistake_is_noticed` can put a mistaken one in its place.
"""

import itertools
import math
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import cohen_kappa_score

from heedful.apps.label import agreement as A
from heedful.core import share_interval


def close(x):
    return pytest.approx(x, rel=1e-12, abs=1e-12)


def units(*people):
    """A string for each person, one character per unit, a point for a missing value."""
    return [[int(v) for v in unit if v != "."] for unit in zip(*people, strict=True)]


KRIPPENDORFF = units("123321412...", "1233224125.3", ".3332342251.", "12332441251.")
"""Krippendorff 2011, "Computing Krippendorff's Alpha-Reliability", section C: four observers, twelve units."""
WIKIPEDIA = units(".....34121133.3", "1.213343.......", "..21344.21133.4")
"""Three coders, fifteen units, of which twelve are judged twice; the example of Wikipedia's article on alpha."""
FLEISS = [
    [0, 0, 0, 6, 0], [0, 3, 0, 0, 3], [0, 1, 4, 0, 1], [0, 0, 0, 0, 6], [0, 3, 0, 3, 0], [2, 0, 4, 0, 0],
    [0, 0, 4, 0, 2], [2, 0, 3, 1, 0], [2, 0, 0, 4, 0], [0, 0, 0, 0, 6], [1, 0, 0, 5, 0], [1, 1, 0, 4, 0],
    [0, 3, 3, 0, 0], [1, 0, 0, 5, 0], [0, 2, 0, 3, 1], [0, 0, 5, 0, 1], [3, 0, 0, 1, 2], [5, 1, 0, 0, 0],
    [0, 2, 0, 4, 0], [1, 0, 2, 0, 3], [0, 0, 0, 0, 6], [0, 1, 0, 5, 0], [0, 2, 0, 1, 3], [2, 0, 0, 4, 0],
    [1, 0, 0, 4, 1], [0, 5, 0, 1, 0], [4, 0, 0, 0, 2], [0, 2, 0, 4, 0], [1, 0, 5, 0, 0], [0, 0, 0, 0, 6],
]  # fmt: skip
"""Fleiss 1971, table 1: how many of six psychiatrists put each of thirty patients into each of five categories."""


def spelt_out(counts):
    return [[category for category, k in enumerate(unit) for _ in range(k)] for unit in counts]


def test_golden_alpha_of_krippendorff_2011():
    """His numbers: 0.743 nominal, 0.815 ordinal, 0.849 interval."""
    found = [A.krippendorff_alpha(KRIPPENDORFF, level) for level in ("nominal", "ordinal", "interval")]
    assert [round(alpha, 3) for alpha in found] == [0.743, 0.815, 0.849]


def test_golden_alpha_of_three_coders():
    """The article's numbers: 0.691 nominal, 0.811 interval."""
    assert round(A.krippendorff_alpha(WIKIPEDIA), 3) == 0.691
    assert round(A.krippendorff_alpha(WIKIPEDIA, "interval"), 3) == 0.811


def test_golden_alpha_of_two_observers():
    """Krippendorff 2011, sections A and B: 0.095 for two values, 0.692 for five categories."""
    assert round(A.krippendorff_alpha(list(zip("0100000010", "1110010000", strict=True))), 3) == 0.095
    assert round(A.krippendorff_alpha(list(zip("aabbdcccedda", "babbbccceddd", strict=True))), 3) == 0.692


def test_golden_alpha_by_hand():
    """Units (1, 1), (1, 2), (2, 2, 3): n = 7 values, of which 1 three times, 2 three times, 3 once.

    Nominal: D_o = 2 * 1 / 1 [1 and 2] + 2 * 2 / 2 [2, 2 and 3] = 4; D_e = 2 (3 * 3 + 3 * 1 + 3 * 1) / 6 = 5.
    Interval: D_o = 2 + 2; D_e = 2 (9 * 1 + 3 * 4 + 3 * 1) / 6 = 8.
    Ordinal: d(1, 2) = (3 + 3 - 3)^2 = 9, d(2, 3) = (3 + 1 - 2)^2 = 4, d(1, 3) = (3 + 3 + 1 - 2)^2 = 25;
    D_o = 2 * 9 + 2 * 4 = 26; D_e = 2 (9 * 9 + 3 * 25 + 3 * 4) / 6 = 56.
    """
    table = [[1, 1], [1, 2], [2, 2, 3], [5]]
    assert A.krippendorff_alpha(table) == close(1 - 4 / 5)
    assert A.krippendorff_alpha(table, "interval") == close(1 - 4 / 8)
    assert A.krippendorff_alpha(table, "ordinal") == close(1 - 26 / 56)


def test_golden_fleiss_1971():
    """His numbers: kappa 0.430; the shares of the categories are 0.144, 0.144, 0.167, 0.306 and 0.239."""
    totals = [sum(unit[c] for unit in FLEISS) / 180 for c in range(5)]
    assert [round(total, 3) for total in totals] == [0.144, 0.144, 0.167, 0.306, 0.239]
    assert round(A.fleiss_kappa(spelt_out(FLEISS)), 3) == 0.430


def test_golden_fleiss_with_units_of_different_size():
    """Units aab and bb: P = 1/3 and 1, mean 2/3. Shares: a (2/3 + 0) / 2 = 1/3, b 2/3; P_e = 5/9.

    (2/3 - 5/9) / (4/9) = 1/4.
    """
    assert A.fleiss_kappa(["aab", "bb", "a"]) == close(1 / 4)


def test_golden_cohen():
    """Of 50 units both say yes to 20 and no to 15; 10 and 5 differ.

    p_o = 0.7, p_e = 0.6 * 0.5 + 0.4 * 0.5 = 0.5, kappa 0.4.
    """
    pairs = [("y", "y")] * 20 + [("y", "n")] * 10 + [("n", "y")] * 5 + [("n", "n")] * 15
    assert A.cohen_kappa(pairs) == close(0.4)


def test_golden_share():
    """Three groups of two: 1 1, 0 0, 1 0. p = 1/2, s^2 = 0.3, s^2 / n = 0.05; sums of deviations 1, -1, 0, so
    V = 3/2 / 36 * 2 = 1/12, design effect 5/3, n' = 3.6.
    """
    found = A.share([[1, 1], [0, 0], [], [1, 0]])
    half = 1.96 * math.sqrt(1 / 4 / 3.6 + 1.96**2 / (4 * 3.6**2)) / (1 + 1.96**2 / 3.6)
    assert (found.value, found.low, found.high) == (0.5, close(0.5 - half), close(0.5 + half))
    assert (found.count, found.groups) == (6, 3)


def test_golden_share_of_groups_that_are_unlike_inside():
    """1 0, 1 0, 1 1: p = 2/3, V = 3/2 / 36 * 2/3 = 1/36, s^2 / n = 2/45: the design effect 5/8 counts as 1, n' = 6."""
    found = A.share([[1, 0], [1, 0], [1, 1]])
    half = 1.96 * math.sqrt(2 / 9 / 6 + 1.96**2 / (4 * 36)) / (1 + 1.96**2 / 6)
    assert found.high - found.low == close(2 * half)


def test_golden_agreements():
    assert A.agreements("aab") == [1.0, 0.0, 0.0]
    assert A.agreements("a") == A.agreements("") == []


@pytest.mark.parametrize(
    ("values", "most"),
    [([0, 0, 1], 0), ([1, 0], None), ([], None), ([0], 0), ([1, 1, 0, 0, 2], None), ("甲甲乙", "甲")],
)
def test_golden_majority(values, most):
    assert A.majority(values) == most


@pytest.mark.parametrize("table", [[], [[]], [[1]], [[1], [2], [3]], [[1, 1], [1, 1, 1]], [[2, 2], [1]]], ids=str)
def test_what_is_not_defined_is_none(table):
    """No units, one rater, everybody always the same: n/a, and no NaN."""
    assert A.fleiss_kappa(table) is None
    for level in ("nominal", "ordinal", "interval"):
        assert A.krippendorff_alpha(table, level) is None


def test_what_is_not_defined_of_two_people_is_none():
    assert A.cohen_kappa([]) is None
    assert A.cohen_kappa([(1, 1), (1, 1)]) is None
    assert A.cohen_kappa([(1, 2), (1, 2)]) == 0
    assert A.share([]) is A.share([[], []]) is None


TABLES = st.lists(st.lists(st.integers(1, 4), max_size=4), max_size=8)
GROUPS = st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4), min_size=1, max_size=8)


def alpha_by_pairs(table, level):
    """Definition: disagreement of all pairs within units over that of all pairs of values, without counting values."""
    table = [unit for unit in table if len(unit) > 1]
    values = [v for unit in table for v in unit]

    def difference(c, k):
        if level == "nominal" or c == k:
            return float(c != k)
        if level == "interval":
            return (c - k) ** 2
        between = sum(min(c, k) <= v <= max(c, k) for v in values)
        return (between - (values.count(c) + values.count(k)) / 2) ** 2

    inside = sum(difference(c, k) / (len(u) - 1) for u in table for c, k in itertools.permutations(u, 2))
    chance = sum(difference(c, k) for c, k in itertools.permutations(values, 2))
    return None if chance == 0 else 1 - inside * (len(values) - 1) / chance


@pytest.mark.parametrize("level", ["nominal", "ordinal", "interval"])
@given(TABLES)
def test_identity_alpha_is_its_definition(level, table):
    expected = alpha_by_pairs(table, level)
    assert A.krippendorff_alpha(table, level) == (None if expected is None else close(expected))


@given(TABLES, st.randoms(use_true_random=False), st.sampled_from(["nominal", "ordinal", "interval"]))
def test_identity_order_does_not_matter(table, random, level):
    """Neither of the units nor of the people in one."""
    shuffled = [random.sample(unit, len(unit)) for unit in random.sample(table, len(table))]
    assert A.krippendorff_alpha(shuffled, level) == pytest.approx(A.krippendorff_alpha(table, level), abs=1e-12)
    assert A.fleiss_kappa(shuffled) == pytest.approx(A.fleiss_kappa(table), abs=1e-12)


@given(TABLES)
def test_identity_ordinal_sees_only_the_order(table):
    far = {1: -7, 2: 0, 3: 1, 4: 1000}
    assert A.krippendorff_alpha([[far[v] for v in unit] for unit in table], "ordinal") == A.krippendorff_alpha(
        table, "ordinal"
    )


@given(TABLES)
def test_identity_alpha_and_fleiss_of_units_of_two(table):
    """Fleiss' kappa of two values each is Scott's pi; alpha = 1 - (1 - pi) (n - 1) / n for n values (Krippendorff 2004)."""
    table = [unit[:2] for unit in table if len(unit) > 1]
    pi, n = A.fleiss_kappa(table), 2 * len(table)
    expected = None if pi is None else close(1 - (1 - pi) * (n - 1) / n)
    assert A.krippendorff_alpha(table) == expected


@given(TABLES)
def test_identity_perfect_agreement_is_one(table):
    same = [[unit[0]] * len(unit) for unit in table if len(unit) > 1]
    if len({unit[0] for unit in same}) > 1:
        assert A.krippendorff_alpha(same, "ordinal") == A.fleiss_kappa(same) == close(1)
        assert A.cohen_kappa([(unit[0], unit[1]) for unit in same]) == close(1)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1))
def test_identity_cohen_is_that_of_scikit_learn(pairs):
    found = A.cohen_kappa(pairs)
    if len({v for pair in pairs for v in pair}) == 1:
        assert found is None
    else:
        assert found == close(cohen_kappa_score(*zip(*pairs, strict=True)))


@given(GROUPS)
def test_identity_the_interval_is_that_of_the_library(groups):
    found = A.share(groups)
    assert (found.low, found.high) == tuple(map(close, share_interval(groups)))
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert (found.count, found.groups) == (sum(map(len, groups)), len(groups))


MISTAKES = {
    "interval without the design effect": ("n / max(1.0, variance", "n / min(1.0, variance", "golden_share"),
    "interval of few that seem many":
        ("max(1.0, variance", "(variance", "golden_share_of_groups_that_are_unlike_inside"),
    "groups that are empty count": ("for group in groups if group]", "for group in groups]", "golden_share"),
    "interval of independent values": ("len(groups) > 1 and squares > 0", "False", "golden_share"),
    "mean of the groups": ("in group) / n\n    sq", "in group) / len(groups)\n    sq", "golden_share"),
    "values agree with themselves": ("combinations(values, 2)]", "zip(values, values)]", "golden_agreements"),
    "a split is a majority": ("first[0][1] > first[1][1]", "first[0][1] >= first[1][1]", "golden_majority"),
    "chance from one person": ("first[c] * second[c]", "first[c] * first[c]", "golden_cohen"),
    "agreement not corrected": ("in pairs) - by_chance)", "in pairs))", "golden_cohen"),
    "cohen 1 if not defined":
        ("== n * n:\n        return None", "== n * n:\n        return 1.0", "what_is_not_defined_of_two_people_is_none"),
    "fleiss: pairs with themselves": ("k * (k - 1)", "k * k", "golden_fleiss_1971"),
    "fleiss: chance by values, not by units":
        ("+= k / n / len(counts)", "+= k / sum(sizes)", "golden_fleiss_with_units_of_different_size"),
    "fleiss: everybody alike is 1":
        ("in count}) < 2:\n        return None", "in count}) < 2:\n        return 1.0", "what_is_not_defined_is_none"),
    "single values count": ("if len(values) > 1]", "if len(values) > -1]", "golden_alpha_by_hand"),
    "alpha: chance as if with replacement":
        ("/ (totals.total() - 1)", "/ totals.total()", "golden_alpha_of_krippendorff_2011"),
    "alpha: large units weigh more": ("/ (count.total() - 1)", "/ 1", "golden_alpha_by_hand"),
    "alpha: everybody alike is 1":
        ("len(totals) < 2:\n        return None", "len(totals) < 2:\n        return 1.0", "what_is_not_defined_is_none"),
    "interval: not squared": ("float(k - c) ** 2", "float(k - c)", "golden_alpha_of_krippendorff_2011"),
    "ordinal: without halves": (" + totals[c] / 2 for", " for", "golden_alpha_of_krippendorff_2011"),
    "ordinal: ranks in place of counts":
        ("sum(totals[g] for g in values[:i]) + totals[c] / 2", "i", "golden_alpha_of_krippendorff_2011"),
}  # fmt: skip
"""What is put into the module: old text, new text, and the test that must notice."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_is_noticed(mistake, monkeypatch):
    """The test of the tests: each mistake, put into the module, makes the named test fail by an assertion."""
    old, new, killer = MISTAKES[mistake]
    source = Path(A.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times; fix the mistake"
    mutant = types.ModuleType("mutant")
    monkeypatch.setitem(sys.modules, "mutant", mutant)
    exec(compile(source.replace(old, new), "mutant", "exec"), mutant.__dict__)  # the point of this test
    monkeypatch.setitem(globals(), "A", mutant)
    with pytest.raises(AssertionError):
        run(globals()[f"test_{killer}"])


def run(test):
    """Call a test with each of its parameters."""
    marks = getattr(test, "pytestmark", [])
    for row in marks[0].args[1] if marks else [()]:
        test(*(row if isinstance(row, tuple) else (row,)))


def test_every_function_has_a_mistake():
    source = Path(A.__file__).read_text(encoding="utf-8")
    heads = [source[: source.index(old)].rpartition("\ndef ")[2].partition("(")[0] for old, *_ in MISTAKES.values()]
    public = {name for name, value in vars(A).items() if isinstance(value, types.FunctionType) and name[0] != "_"}
    assert public - {"dataclass"} <= {*heads}
