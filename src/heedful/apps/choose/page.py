"""Show what ``heedful choose`` found: a table in the terminal, JSON, and the page of the runs with the table on top."""

from pathlib import Path
from typing import Any

from heedful.apps.choose.runs import MARK, NAMES, run_all
from heedful.apps.choose.verdict import Change, compare
from heedful.apps.report import sections
from heedful.apps.report.inspector import Tokenizers
from heedful.apps.report.page import build_page
from heedful.apps.report.runs import read_runs
from heedful.apps.report.svg import text
from heedful.configs.choose import ChooseConfig
from heedful.configs.report import ReportConfig
from heedful.display import Screen, harmless, print_table
from heedful.files import read_object, to_json, write_text
from heedful.redact import without_secrets_of

Row = dict[str, str]


def choose(config: ChooseConfig) -> dict[str, Any]:
    """Run what has not been run, write choose.json and choose.html, print the result, and return it."""
    folders: dict[Any, list[Path]] = {method: [] for method in NAMES}
    for method, _, folder in run_all(config):
        folders[method].append(folder)
    found = {
        method: [read_object(one.with_suffix(".json"), "delete it") for one in folders[method]] for method in NAMES
    }
    result = compare(config, read_object(config.output / "start.json", "delete it"), folders, found)
    hide = without_secrets_of(config)
    numbers = hide(to_json({"made by": MARK, **result}, indent=2)) + "\n"
    write_text(config.output / "choose.json", numbers)
    every = [folder for method in NAMES for folder in folders[method]]
    rows = table_of(result)
    cells = [[text(value) for value in row.values()] for row in rows]
    first = sections.section("PPO or GRPO", f"<p>{text(result['sentence'])}</p>{sections.table(list(rows[0]), cells)}")
    settings = ReportConfig(runs=tuple(map(str, every)))
    page, _ = build_page(read_runs(every), settings, Tokenizers(), first=first)
    write_text(config.output / "choose.html", hide(page))
    screen = Screen(soft_wrap=True)
    if config.json:
        screen.print(numbers, end="", markup=False, highlight=False)
        return result
    print_table(screen, "", rows)
    screen.print(harmless(hide(result["sentence"])), markup=False, highlight=False)
    screen.print(harmless(f"the page is {config.output / 'choose.html'}"), markup=False, highlight=False)
    return result


def table_of(result: dict[str, Any]) -> list[Row]:
    """The numbers of both methods, a row each."""
    of = result["methods"]
    named = {
        "held-out score": lambda one: f"{result['start_score']:.3g} -> {one['score']:.3g}",
        "change (95 % interval)": lambda one: str(Change(**one["change"])),
        "KL to the reference": lambda one: _shown(one["kl"]),
        "noise of the policy gradient": lambda one: _shown(one["gradient_noise"]),
        "explained variance": lambda one: _shown(one["explained_variance"]),
        "explained variance, first token": lambda one: _shown(one["explained_variance_first"]),
        "explained variance, by the prompt": lambda one: _shown(one["explained_variance_prompt"]),
        "tied groups": lambda one: _shown(one["tied_frac"]),
        "tokens": lambda one: f"{one['tokens']:,}",
        "seconds": lambda one: f"{one['seconds']:.1f}",
        "tokens per second": lambda one: f"{one['tokens_per_second']:,.0f}",
    }
    rows = [{"": name} | {NAMES[method]: shown(of[method]) for method in NAMES} for name, shown in named.items()]
    return [*rows, {"": "PPO minus GRPO (95 % interval)", "PPO": str(Change(**result["difference"])), "GRPO": ""}]


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"
