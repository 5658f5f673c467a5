"""An examination on the terminal: examples with the learned tokens in colour, findings, one verdict."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text as RichText

from heedful.checks.findings import Finding, LoadedRun, TokenRow, token_texts
from heedful.configs.checks import REFUSED
from heedful.display import harmless, shown
from heedful.redact import redact_printed

BEFORE, AFTER, LAST = 40, 60, 8
"""Tokens of an example that are shown: the end of the prompt, the beginning and the end of the response."""
LEARNED, READ, SPECIAL = "bold green", "dim", "cyan"
"""Styles of tokens: learned (or scored), read only, and special ones among these."""
COLOURS = {"fail": "bold red", "warn": "bold yellow"}
WHITE = str.maketrans({"\n": "↵", "\r": "␍", "\t": "⇥"})


def show_examples(console: Console, loaded_run: LoadedRun, number: int) -> None:
    """Print the first examples: where they were read, which response of their record they are, their text, and their tokens
    with what is learned in brackets."""
    what = "scored" if loaded_run.reward_model is not None else "learned"
    for row in loaded_run.rows[:number]:
        learned = f", {len(row.response):,} of them {what}" if row.response else ""
        named = f" {row.name}" if row.name else ""
        _print(console, f"{row.source}{named}: {len(row.prompt) + len(row.response):,} tokens{learned}", "bold")
        text = loaded_run.tokenizer.decode(row.ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        _print(console, f"  text    {shown(redact_printed(text), 600)}")
        console.print(RichText("  tokens  ").append_text(_tokens(loaded_run, row)), soft_wrap=True)
        console.print()


def _tokens(loaded_run: LoadedRun, row: TokenRow) -> RichText:
    """The tokens of a text with bars between; those that are learned in colour and in brackets, so that both can be seen."""
    specials = {token.content for token in loaded_run.tokenizer.added_tokens_decoder.values() if token.special}

    def joined(texts: Sequence[str], style: str) -> RichText:
        return RichText("|", style=READ).join(
            RichText(harmless(text).translate(WHITE), style=f"{SPECIAL} {style}" if text in specials else style)
            for text in texts
        )

    prompt, response = (token_texts(loaded_run.tokenizer, ids) for ids in (row.prompt, row.response))
    line = RichText("… " if len(prompt) > BEFORE else "").append_text(joined(prompt[-BEFORE:], READ))
    if not response:
        return line
    line.append(" [", style=LEARNED).append_text(joined(response[:AFTER], LEARNED))
    if len(response) > AFTER:
        line.append(" … " if len(response) > AFTER + LAST else "|", style=READ)
        line.append_text(joined(response[max(AFTER, len(response) - LAST) :], LEARNED))
    return line.append("]", style=LEARNED)


def show_findings(console: Console, findings: Sequence[Finding], measured: Mapping[str, Any]) -> None:
    """Print each finding in four lines, and what was measured."""
    for one in findings:
        console.print(
            RichText(f"{one.level.upper()} {one.check}", style=COLOURS[one.level]).append(
                harmless(f": {one.what}"), style="default not bold"
            ),
            soft_wrap=True,
        )
        for name, text in (("evidence", one.evidence), ("why", one.why), ("fix", one.fix)):
            if text:
                _print(console, f"  {name:<9}{text}")
        console.print()
    for name in ("step", "processor"):
        if name in measured:
            _print(console, str(measured[name]))


def show_verdict(console: Console, findings: Sequence[Finding]) -> None:
    """Print one line: whether to train."""
    failed = list(dict.fromkeys(one.check for one in findings if one.level == "fail"))
    warned = list(dict.fromkeys(one.check for one in findings if one.level == "warn"))
    if failed:
        can_allow = [name for name in failed if name != REFUSED]
        how = f"; --allow {' '.join(can_allow)} begins all the same" if can_allow == failed else ""
        _print(console, f"verdict: do not train yet: {', '.join(failed)}{how}", COLOURS["fail"])
    elif warned:
        _print(console, f"verdict: ready to train, with {len(warned)} to look at: {', '.join(warned)}", COLOURS["warn"])
    else:
        _print(console, "verdict: ready to train; no check found anything", "bold green")


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(RichText(harmless(text), style=style), soft_wrap=True)
