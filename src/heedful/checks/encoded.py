"""Checks of texts as token ids: where they begin and end, what of them is learned, what was cut, what is held out."""

import contextlib
import copy
import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from heedful.checks.findings import Finding, TokenRow, beginning, ending, finding, spread, token_texts
from heedful.data.chat import ChatTemplate, Renderer
from heedful.data.fitting import Counts
from heedful.data.splits import HasPrompt, item_key
from heedful.errors import DataError, RefusedError
from heedful.training.thresholds import (
    ENDED,
    FEW_ENDS,
    FEWEST,
    MANY_CUT_RECORDS,
    MANY_EQUAL,
    MANY_SHARED,
    MANY_STOPS,
    NOT_ENDED,
)
from heedful.types import Demonstration, Ranking, Response, Text, Turn, as_message, last_answer

SAMPLE = 2000
"""Rows that are looked at, spread evenly, where all of them would take seconds: a share of 1 in 500 is then seldom missed."""
DECODED = 500
"""Rows whose text is looked at."""
RENDERED = 8
"""Conversations that are rendered with the template's markers; a template renders all of them alike."""
MARKER = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
"""What transformers reads for `return_assistant_tokens_mask`, and renders as nothing."""
BEGIN, END = "\ue100", "\ue101"
"""Characters for private use, in the places of markers."""


def end_token(
    rows: Sequence[TokenRow], stop_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, *, marked_frac: float
) -> Finding | None:
    """Do learned responses end with a token at which sampling stops?

    Args:
        rows: learned prompts and responses; not pieces of plain text, which end where the model's context does.
        stop_ids: the tokens that end a response in sampling.
        tokenizer: for the evidence.
        marked_frac: share of the records that say themselves that they were cut off (``truncated``), on purpose maybe.
    """
    ends, stops = 0, set(stop_ids)
    without = None
    for row in rows:
        if row.response and row.response[-1] in stops:
            ends += 1
        elif without is None:
            without = row
    if without is None or not rows or ends / len(rows) >= FEW_ENDS:
        return None
    stop_texts = " or ".join(map(repr, token_texts(tokenizer, stop_ids)))
    return finding(
        "no-end-token",
        "fail" if ends == 0 and marked_frac < 1 else "warn",
        f"{len(rows) - ends:,} of {len(rows):,} learned responses do not end with {stop_texts}, where sampling stops",
        f"{without.source} ends with {ending(tokenizer, without.ids)}",
    )


def stop_inside(
    rows: Sequence[TokenRow], stop_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> Finding | None:
    """Do learned responses have a token inside at which sampling stops?"""
    stops, looked_at = set(stop_ids), spread(rows, SAMPLE)
    found = [row for row in looked_at if not stops.isdisjoint(row.response[:-1])]
    if len(found) <= MANY_STOPS * len(looked_at):
        return None
    first = found[0]
    at = next(i for i, one in enumerate(first.response) if one in stops)
    return finding(
        "stops-early",
        "warn",
        f"{len(found):,} of {len(looked_at):,} learned responses have a token inside at which sampling stops",
        f"{first.source}: token {at + 1} of {len(first.response)} is "
        f"{token_texts(tokenizer, first.response[at : at + 1])[0]!r}",
    )


def answers_cut(
    rows: Sequence[TokenRow], stop_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> Finding | None:
    """Are many learned answers equally long, longer than all others, and without an end that others have?

    They were cut off there when they were written, at a number of tokens or characters. Their end token is there: heedful
    adds it.
    """
    better = [row for row in rows if row.name not in ("rejected", "bad")]
    kept = [row for row in spread(better, DECODED) if row.response and row.response[-1] in stop_ids]
    if len(kept) < FEWEST:
        return None
    texts = tokenizer.batch_decode([row.response[:-1] for row in kept])
    lengths = {"tokens": [len(row.response) - 1 for row in kept], "characters": [len(text) for text in texts]}
    for unit, of_unit in lengths.items():
        longest = max(of_unit)
        cut, others = (
            [t for t, n in zip(texts, of_unit, strict=True) if (n == longest) == is_cut] for is_cut in (True, False)
        )
        is_pile = len(set(cut)) >= max(FEWEST // 2, MANY_CUT_RECORDS * len(kept)) and len(others) >= FEWEST // 2
        if is_pile and _ended(others) >= ENDED and _ended(cut) <= NOT_ENDED:
            return finding(
                "answers-cut",
                "warn",
                f"{len(cut):,} of {len(kept):,} answers have {longest:,} {unit}, none has more, and {1 - _ended(cut):.0%} of "
                f"them end in the middle of a sentence; of the shorter ones {1 - _ended(others):.0%} do",
                f"{kept[of_unit.index(longest)].source} ends with {cut[0][-40:]!r}",
            )
    return None


def _ended(texts: Sequence[str]) -> float:
    """The share of texts that do not end with a letter, a digit or a comma."""
    last = [text.rstrip()[-1:] for text in texts]
    return sum(not one.isalnum() and one not in (",", "，", "、") for one in last) / len(last)


def double_bos(rows: Sequence[TokenRow], tokenizer: PreTrainedTokenizerBase) -> Finding | None:
    """Do texts begin with two BOS tokens?"""
    bos = tokenizer.bos_token_id
    if bos is None:
        return None
    looked_at = spread(rows, SAMPLE)
    found = [row for row in looked_at if [*row.prompt[:2], *row.response[:2]][:2] == [bos, bos]]
    if not found:
        return None
    return finding(
        "double-bos",
        "warn",
        f"{len(found):,} of {len(looked_at):,} texts begin with {tokenizer.bos_token!r} twice",
        f"{found[0].source} begins with {beginning(tokenizer, found[0].ids)}",
    )


def generation_mask(records: Sequence[HasPrompt], renderer: Renderer) -> Finding | None:
    """Is what is learned of an answer what the template's ``{% generation %}`` markers say?

    Templates without markers say nothing. White space, the head of the answer's turn and its end may be on either side.
    """
    templates = renderer.tokenizer.chat_template
    if not isinstance(templates, str) or MARKER.search(templates) is None:
        return None
    template = _with_signs(renderer)
    parted: list[tuple[str, str, str]] = []
    looked_at = 0
    for record in records[:RENDERED]:
        response = _answer_of(record)
        if isinstance(record.prompt, str) or response is None:
            continue
        asked, answer = last_answer(record.prompt, response)
        with contextlib.suppress(DataError, RefusedError):  # it was dropped
            learned = renderer.decode(renderer.response_ids(answer, prompt=asked))
            marked = _marked(asked, answer, template)
            looked_at += 1
            if _bare(learned, renderer) != _bare(marked, renderer):
                parted.append((record.source, learned, marked))
    if 2 * len(parted) < looked_at or not parted:
        return None
    source, learned, marked = parted[0]
    return finding(
        "generation-mask",
        "warn",
        f"in {len(parted)} of {looked_at} conversations other tokens are learned than the template's generation markers "
        "enclose",
        f"{source}: learned {learned[:60]!r}, marked {marked[:60]!r}",
    )


def equal_pairs(counts: Counts) -> Finding | None:
    """How many pairs were dropped because their responses have the same tokens?"""
    equal = counts.get("dropped_equal", 0) + counts.get("unusable/equal answers", 0)
    if equal <= MANY_EQUAL * counts["records"]:
        return None
    cut = counts.get("truncated", 0)
    after = f", {cut:,} were cut" if cut else ", none was cut"
    return finding(
        "equal-pairs",
        "warn",
        f"{equal / counts['records']:.0%} of the pairs had equal responses and were dropped",
        f"{equal:,} of {counts['records']:,} records{after}",
    )


def share_cut(counts: Counts) -> Finding | None:
    """How many records were cut or dropped because they are too long?"""
    cut, dropped = counts.get("truncated", 0), counts.get("dropped_too_long", 0)
    if cut + dropped <= MANY_CUT_RECORDS * counts["records"]:
        return None
    return finding(
        "share-cut",
        "warn",
        f"{(cut + dropped) / counts['records']:.0%} of the records are longer than the model, or its settings, allow",
        f"{cut:,} cut and {dropped:,} dropped of {counts['records']:,} records",
    )


def held_out_trained_on(train: Sequence[HasPrompt], held_out: Sequence[HasPrompt]) -> Finding | None:
    """Are held-out prompts trained on too, as they are or with other case or white space?"""
    if not held_out:
        return None
    keys = [_plain(item_key(one)) for one in held_out]
    trained_on = set(keys).intersection(_plain(item_key(one)) for one in train)  # without a copy of the training data
    found = [one for one, key in zip(held_out, keys, strict=True) if key in trained_on]
    if len(found) <= MANY_SHARED * len(held_out):
        return None
    key = item_key(found[0])
    return finding(
        "held-out-trained-on",
        "warn",
        f"{len(found):,} of {len(held_out):,} held-out records have a prompt that is trained on too",
        f"{found[0].source}: {key[:60]!r}",
    )


def _plain(key: str) -> str:
    """A prompt without white space and case."""
    return "".join(key.split()).casefold()


def _answer_of(record: HasPrompt) -> Response | None:
    """The response of a record, or the first of several; None of a prompt."""
    if isinstance(record, Demonstration):
        return record.response
    return record.responses[0] if isinstance(record, Ranking) else None


def _with_signs(renderer: Renderer) -> ChatTemplate:
    """The chat template with signs that are printed where its generation markers are."""
    tokenizer = copy.copy(renderer.tokenizer)
    tokenizer.chat_template = MARKER.sub(
        lambda found: f"{{%{found[1]} if true %}}{END if found[2] else BEGIN}{{% endif {found[3]}%}}",
        tokenizer.get_chat_template(),
    )
    return ChatTemplate(tokenizer)


def _marked(prompt: Text, answer: Turn, template: ChatTemplate) -> str:
    """What the template marks as the last answer of a conversation, without the head of its turn."""
    assert isinstance(prompt, tuple)
    turn = as_message(answer)
    before, begin, rest = template.text((*prompt, turn), add_generation_prompt=False).rpartition(BEGIN)
    marked = rest.partition(END)[0] if begin else ""
    head = template.text(prompt, add_generation_prompt=True).removeprefix(before)
    return marked.removeprefix(head)


def _bare(text: str, renderer: Renderer) -> str:
    """An answer without the token that ends it and white space around it."""
    for token in (renderer.tokenizer.eos_token, renderer.tokenizer.convert_ids_to_tokens(renderer.turn_end_id)):
        text = text.strip().removesuffix(token)
    return text.strip()


def marked_frac(records: Sequence[HasPrompt]) -> float:
    """The share of records that say that their responses were cut off."""
    return sum(bool(getattr(one, "truncated", False)) for one in records) / max(1, len(records))
