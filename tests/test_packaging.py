"""What is given to people beside the code: the wheel and the sdist, versions, both languages, forms, workflows."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

import heedful

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
BOTH = [(f"{name}.md", f"{name}.zh.md") for name in ("README", "docs/first-steps", "docs/critic", "docs/environments")]
LANGUAGE_LINK = re.compile(r"^\[(?:中文|English)\]\(.*\)$", re.MULTILINE)


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def files_of(builder):
    return {file.distribution_path for file in builder(str(ROOT)).recurse_included_files()}


def test_the_wheel_has_every_file_of_the_package_and_no_other():
    source = ROOT / "src"
    here = {str(path.relative_to(source)) for path in (source / "heedful").rglob("*") if path.is_file()}
    expected = {name for name in here if "__pycache__" not in name}
    assert files_of(WheelBuilder) == expected
    assert {
        "heedful/py.typed",
        "heedful/apps/label/pages/static/work.js",
        "heedful/apps/demo/story.zh.toml",
    } <= expected


def test_the_sdist_has_what_builds_and_tests_it():
    """Whatever the repository has at its top, and not what runs leave there."""
    names = files_of(SdistBuilder)
    folders = {name.split("/")[0] for name in names if "/" in name}
    assert folders == {".ci", ".github", "benchmarks", "docs", "examples", "recipes", "src", "tests"}
    assert {
        path.name for pattern in ("*.md", "*.toml", "*.txt", "*.cff", "LICENSE") for path in ROOT.glob(pattern)
    } <= names


def test_there_is_one_version():
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert re.search(r"^## (\S+)", text_of("CHANGELOG.md"), re.MULTILINE)[1] == heedful.__version__
    assert citation["version"] == heedful.__version__
    assert citation["license"] == PROJECT["license"]
    assert PROJECT["dynamic"] == ["version"]


def blocks(text):
    return re.findall(r"^```.*?^```", text, re.DOTALL | re.MULTILINE)


def targets(text):
    """What a page links to, without the link to itself in the other language; links to a translation count as to the page."""
    found = re.findall(r"\]\(([^)]+)\)", LANGUAGE_LINK.sub("", text))
    return {target.replace(".zh.md", ".md") for target in found}


@pytest.mark.parametrize(("english", "chinese"), BOTH)
def test_both_languages_have_the_same_commands_headings_and_links(english, chinese):
    one, other = text_of(english), text_of(chinese)
    assert blocks(one) == blocks(other)
    assert len(blocks(one)) >= 2
    assert re.findall("^#+ ", one, re.MULTILINE) == re.findall("^#+ ", other, re.MULTILINE)
    assert one.count("\n|") == other.count("\n|")
    assert targets(one) - {"docs/first-steps.md"} == targets(other) - {"docs/first-steps.md"}


@pytest.mark.parametrize(
    "name", [name for pair in BOTH for name in pair] + ["CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
)
def test_links_lead_to_files(name):
    folder = (ROOT / name).parent
    local = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text_of(name)) if "://" not in target]
    assert [target for target in local if not (folder / target).exists()] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_have_the_least_permissions_and_versions_of_actions(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    given = [workflow["permissions"], *(job.get("permissions", {}) for job in workflow["jobs"].values())]
    writing = {name for permissions in given for name, level in permissions.items() if level != "read"}
    assert writing == {"docs.yml": {"pages", "id-token"}, "release.yml": {"id-token"}, "tests.yml": set()}[path.name]
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert steps
    for step in steps:
        assert re.fullmatch(r"[\w./-]+@(v\d+|release/v1)", step.get("uses", "a@v1")), step
        assert "${{" not in step.get("run", ""), "a value in a shell's line could be a command"
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False


def test_the_suite_runs_on_every_version_of_python_that_is_promised():
    workflow = yaml.safe_load(text_of(".github/workflows/tests.yml"))
    versions = workflow["jobs"]["tests"]["strategy"]["matrix"]["python"]
    prefix = "Programming Language :: Python :: "
    assert versions == [one.removeprefix(prefix) for one in PROJECT["classifiers"] if one.startswith(prefix)]
    assert PROJECT["requires-python"] == f">={versions[0]}"
