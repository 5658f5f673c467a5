"""Courses of one lesson, which kernels find too."""

import sys

import pytest

from heedful.apps.course import catalogue, checks


@pytest.fixture
def course_of(tmp_path, monkeypatch):
    """``course_of(97, "double", text, hidden)`` makes a course of one lesson in the current folder."""
    made = []

    def make(number, name, text, hidden):
        for language in ("en", "zh"):
            (tmp_path / "lessons" / language).mkdir(parents=True)
            (tmp_path / "lessons" / language / f"{number}_{name}.md").write_text(text, encoding="utf-8")
        (tmp_path / f"lesson{number}.py").write_text(hidden, encoding="utf-8")
        (tmp_path / "sitecustomize.py").write_text(  # Python runs it at the start of a kernel
            f"from heedful.apps.course import checks\nchecks.__path__.append({str(tmp_path)!r})\n", encoding="utf-8"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(catalogue, "LESSONS", tmp_path / "lessons")
        monkeypatch.setattr(checks, "__path__", [*checks.__path__, str(tmp_path)])
        monkeypatch.chdir(tmp_path)
        made.append(f"heedful.apps.course.checks.lesson{number}")
        return tmp_path

    yield make
    for module in made:
        sys.modules.pop(module, None)
