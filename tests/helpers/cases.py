"""The cases of a test: some run with the suite, their variants with the exhaustive tests."""

import pytest


def often(cases, kept):
    """All of the cases; those that are not in ``kept`` are exhaustive."""
    return [case if case in kept else pytest.param(case, marks=pytest.mark.exhaustive) for case in cases]


def tuples_often(cases, kept):
    """The same of cases that have several arguments each."""
    return [case if case in kept else pytest.param(*case, marks=pytest.mark.exhaustive) for case in cases]


def pairs_often(firsts, seconds, kept):
    """Each first with each second; the pairs that are not in ``kept`` are exhaustive."""
    return tuples_often([(first, second) for first in firsts for second in seconds], kept)
