"""`write_report`: the page about runs, one HTML file that needs no network and stays below `LARGEST_PAGE`."""

import base64
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from heedful.apps.report import sections
from heedful.apps.report.critics import critics
from heedful.apps.report.inspector import MOST_TOKENS, Inspected, Tokenizers, inspect, packed
from heedful.apps.report.runs import RunRecord, read_runs
from heedful.apps.report.svg import text
from heedful.configs.report import ReportConfig
from heedful.errors import DataError
from heedful.files import check_output_file, read_object, write_text

LARGEST_PAGE = 2_000_000
"""Bytes."""
ASSETS = files("heedful.apps.report") / "assets"
MARK = "heedful report"
"""The generator that a page names, and by which an earlier page is known."""
NO_RESPONSES = (
    "The runs kept no responses. Train with --rollouts all to see every token with its advantage, ratio, KL, reward, value, "
    "return and entropy here."
)
CONTROLS = """<div class="controls" id="controls" hidden>
<label>Colour by <select id="by"></select></label>
<label>Order <select id="order">
<option value="run">as in the run</option>
<option value="kl">highest KL</option>
<option value="ratio">highest ratio</option>
<option value="advantage">largest advantage</option>
<option value="high">highest score</option>
<option value="low">lowest score</option>
<option value="divergence">score up, another reward down</option>
</select></label>
<label>Run <select id="run"></select></label>
<label>Steps <span class="pair"><input id="from" inputmode="numeric" size="4" aria-label="first step">
to <input id="to" inputmode="numeric" size="4" aria-label="last step"></span></label>
<label>End <select id="end"><option value="">any</option><option value="stop">ended</option>
<option value="length">cut</option></select></label>
<label>Text <input id="text" type="search" size="12"></label>
<label id="beside" hidden><input id="compare" type="checkbox"> two models side by side</label>
</div>
<p class="small" id="keys">Keys: <kbd>←</kbd> <kbd>→</kbd> token, <kbd>↑</kbd> <kbd>↓</kbd> response, <kbd>Home</kbd>
<kbd>End</kbd> first and last token. Blue is positive, orange negative; the strongest colour is <span id="limit"></span>.</p>
<p id="count" role="status"></p>
<ol id="responses"></ol>
<div id="numbers" role="status" aria-live="polite" hidden></div>"""


def write_report(config: ReportConfig) -> list[str]:
    """Write the page. Returns what to tell: where it is, and what was left out.

    Raises CheckpointError, DataError and ConfigError before anything is written; ConfigError too if the file exists and is no
    earlier page.
    """
    output = config.output
    check_output_file(output, MARK, overwrite=None, what="a page")
    runs = read_runs([Path(run) for run in config.runs])
    measured = None if config.best_of_n is None else read_best_of_n(config.best_of_n)
    page, found = build_page(runs, config, Tokenizers(), measured=measured)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, page)
    size = _size(page) / 1e6
    told = [f"the page is in {output} ({size:.1f} MB); open it in a browser"]
    told.append(found.chosen or NO_RESPONSES)
    return [*told, *found.notes]


def build_page(
    runs: Sequence[RunRecord],
    config: ReportConfig,
    tokenizers: Tokenizers,
    *,
    measured: sections.MeasuredBestOfN | None = None,
    first: str = "",
    version: str = "",
) -> tuple[str, Inspected]:
    """Return the page, and what its inspector shows: fewer responses until all is below `LARGEST_PAGE`.

    Args:
        runs: what it is about.
        config: how many responses, and the seed of their sample; the models to compare.
        tokenizers: those that have been loaded.
        measured: best-of-n as somebody measured it.
        first: a section to begin with.
        version: of the files, for a page that is served and asks for news; empty for a file.

    Raises CheckpointError and DataError.
    """
    parts = [
        first,
        sections.overview(runs),
        sections.alarms(runs),
        sections.curves(runs),
        critics(runs),
        sections.yardstick(runs, measured),
        sections.samples(runs),
        sections.lineage(runs),
    ]
    most, most_tokens = config.responses, MOST_TOKENS
    room = LARGEST_PAGE - _size(_page(runs, "".join(parts), version))
    while True:
        found = inspect(runs, most=most, most_tokens=most_tokens, seed=config.seed, tokenizers=tokenizers)
        if config.compare and found.responses:
            from heedful.apps.report.compare import compared

            found = compared(found, config)
        inspector = _inspector(found, runs)
        if _size(inspector) <= room or not found.responses or not most_tokens:
            return _page(runs, "".join([*parts, inspector]), version), found  # last, since it is long
        most_tokens = int(most_tokens * 0.9 * max(room, 0) / _size(inspector))
        most = min(most, len(found.responses))


def read_best_of_n(path: Path) -> sections.MeasuredBestOfN:
    """What ``heedful evaluate best-of-n --output`` wrote. Raises DataError."""
    remedy = "--best-of-n names a file that heedful evaluate best-of-n --output wrote"
    content = read_object(path, remedy, needs=["best_of"], error=DataError)
    try:
        rows = [(int(row["k"]), float(row["kl_bound"]), float(row["score"])) for row in content["best_of"]]
        if not rows:
            raise ValueError("empty")
        temperature = (content.get("settings") or {}).get("temperature")
        return sections.MeasuredBestOfN(rows, None if temperature is None else float(temperature))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: its best_of is no table of k, kl_bound and score; {remedy}") from error


def _inspector(found: Inspected, runs: Sequence[RunRecord]) -> str:
    if not found.responses:
        return sections.section("Token inspector", f"<p>{found.chosen or NO_RESPONSES}</p>")
    notes = "".join(f"<p>{text(note)}</p>" for note in found.notes)
    data = f'<script type="text/plain" id="data">{packed(found, runs)}</script>'
    needs = "<noscript><p>The inspector needs JavaScript; all else on this page does not.</p></noscript>"
    return sections.section("Token inspector", f"<p>{text(found.chosen)}</p>{notes}{needs}{CONTROLS}{data}")


def _page(runs: Sequence[RunRecord], content: str, version: str) -> str:
    style = (ASSETS / "report.css").read_text(encoding="utf-8")
    script = (ASSETS / "inspector.js").read_text(encoding="utf-8")
    if version:
        script += (ASSETS / "watch.js").read_text(encoding="utf-8")
    title = "heedful: " + ", ".join(run.name for run in runs)
    connect = "; connect-src 'self'" if version else ""
    policy = f"default-src 'none'; style-src '{_sum(style)}'; script-src '{_sum(script)}'; img-src data:{connect}"
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    news = '<p id="news" role="status"></p>' if version else ""
    return f"""<!doctype html>
<html lang="en" data-version="{text(version)}">
<head>
<meta charset="utf-8">
<meta name="generator" content="{MARK}">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{text(title)}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{text(title)}</h1><p class="small">Made by heedful report on {made}.</p>{news}</header>
<main>{content}</main>
<script>{script}</script>
</body>
</html>
"""


def _size(content: str) -> int:
    """Bytes of a text in the file."""
    return len(content.encode("utf-8", "backslashreplace"))


def _sum(content: str) -> str:
    """The source expression of an inline style or script in a Content-Security-Policy: nothing else runs on the page."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
