"""Validate answers by task, and convert them between places on the screen and candidates."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from heedful.apps.label.records import ITEM_FLAGS, MOST_ANSWERS, RATING_FLAGS, STRENGTHS, TASKS, Item
from heedful.configs.label import Criterion
from heedful.errors import DataError

LONGEST_COMMENT = 20_000
"""Most characters of a comment or of a reason for a skip."""
LONGEST_SECONDS = 1e7
"""Most seconds for one label."""
CANDIDATES = {
    "pair": (2, 2),
    "ranking": (2, MOST_ANSWERS),
    "rating": (1, 1),
    "demonstration": (0, 1),
    "correction": (1, 1),
    "chat": (0, 0),
}
"""Minimum and maximum number of candidates, by task."""
JUDGED = ("pair", "ranking", "rating")
"""Tasks with answers comparable between people; only these are used for overlap, hidden repeats and screening."""


def may_overlap(item: Item) -> bool:
    """True if several people may label an item."""
    return item.task in JUDGED and not item.screening and item.gold is None


def from_screen(answer: Any, order: Sequence[int]) -> Any:
    """Return an answer with places on the screen replaced by candidates. Raises DataError if it names no place.

    ``order`` is the index of the candidate at each place. For a pair and a chat turn, ``preferred`` is a place; for a
    ranking, ``ranks`` has one rank per place. Other answers are unchanged.
    """
    return _turned(answer, list(order), [list(order).index(i) for i in range(len(order))])


def to_screen(answer: Any, order: Sequence[int]) -> Any:
    """Return an answer with candidates replaced by their places on the screen: the inverse of `from_screen`."""
    return _turned(answer, [list(order).index(i) for i in range(len(order))], list(order))


def _turned(answer: Any, target: list[int], origin: list[int]) -> Any:
    """Replace the preferred index i by ``target[i]``, and move the rank at ``origin[i]`` to index i."""
    if not isinstance(answer, Mapping):
        raise _wrong("an answer", answer, "an object")
    turned = dict(answer)
    preferred = turned.get("preferred")
    if preferred is not None:
        _is_one_of("preferred", preferred, range(len(target)))
        turned["preferred"] = target[preferred]
    if "ranks" in turned:
        ranks = turned["ranks"]
        if not isinstance(ranks, list | tuple) or len(ranks) != len(origin):
            raise _wrong("ranks", ranks, f"a list of {len(origin)} ranks")
        turned["ranks"] = [ranks[i] for i in origin]
    if "criteria" in turned:
        said = turned["criteria"]
        if not isinstance(said, list | tuple) or len(said) != len(origin):
            raise _wrong("criteria", said, f"a list of {len(origin)} objects, one for each answer")
        turned["criteria"] = [said[i] for i in origin]
    return turned


def check_answer(
    item: Item, answer: Any, *, strength_known: bool = True, criteria: Sequence[Criterion] = ()
) -> dict[str, Any]:
    """Return an answer, in terms of candidates, with exactly the fields of its task. Raises DataError for anything else.

    ``strength_known=False`` is for imported labels: the strength of a preference may be None, and required ``criteria`` may
    be missing. ``criteria`` are those of the project.
    """
    if not isinstance(answer, Mapping):
        raise _wrong("an answer", answer, "an object")
    asked = criteria if item.task in JUDGED else ()
    said = _criteria(item, answer.get("criteria"), asked, strength_known)
    answer = {name: value for name, value in answer.items() if name != "criteria" or not asked}
    fields = FIELDS[item.task]
    if unknown := [name for name in answer if name not in fields]:
        raise DataError(f"the answer to a {item.task} has no field {unknown[0]!r:.80}; it has {', '.join(fields)}")
    if missing := [name for name in fields if name not in answer]:
        raise DataError(f"the answer to a {item.task} lacks {missing[0]!r}; it has {', '.join(fields)}")
    CHECKS[item.task](item, answer, strength_known)
    return {name: answer[name] for name in fields} | ({} if said is None else {"criteria": said})


def _criteria(item: Item, said: Any, asked: Sequence[Criterion], all_required: bool) -> list[dict[str, Any]] | None:
    """Values of the criteria for each answer, in their order; None if there are no criteria or no values."""
    needed = [one.name for one in asked if one.required and all_required]
    if not asked or (said is None and not needed):
        return None
    count = len(item.candidates)
    if not isinstance(said, list | tuple) or len(said) != count or not all(isinstance(one, Mapping) for one in said):
        raise _wrong("criteria", said, f"a list of {count} objects, one for each answer")
    known = {one.name: one for one in asked}
    for of_answer in said:
        if missing := [name for name in needed if name not in of_answer]:
            raise DataError(f"criteria lacks {missing[0]!r} for an answer; each answer needs {', '.join(needed)}")
        for name, value in of_answer.items():
            if name not in known:
                raise DataError(f"there is no criterion {name!r:.80}; the project has {', '.join(known)}")
            if type(value) is not type(known[name].values[0]) or value not in known[name].values:
                raise _wrong(f"the criterion {name}", value, f"one of {', '.join(map(str, known[name].values))}")
    found = [{name: of_answer[name] for name in known if name in of_answer} for of_answer in said]
    return found if any(found) else None


def _preference(item: Item, answer: Mapping[str, Any], strength_known: bool) -> None:
    tie = answer["preferred"] is None
    if not tie:
        _is_one_of("preferred", answer["preferred"], (0, 1), "null for a tie")
    if not isinstance(answer["both_bad"], bool):
        raise _wrong("both_bad", answer["both_bad"], "true or false")
    if answer["both_bad"] and not tie:
        raise DataError("both_bad is true with a preferred answer; it is only allowed with a tie (preferred null)")
    if tie and answer["strength"] is not None:
        raise _wrong("strength", answer["strength"], "null with a tie")
    if not tie and (strength_known or answer["strength"] is not None):
        _is_one_of("strength", answer["strength"], STRENGTHS)
    if item.task == "chat":
        _turn(answer)


def _turn(answer: Mapping[str, Any]) -> None:
    messages, responses = answer["messages"], answer["responses"]
    if not isinstance(answer["last"], bool):
        raise _wrong("last", answer["last"], "true or false")
    if not isinstance(messages, list) or not all(isinstance(one, Mapping) and "role" in one for one in messages):
        raise _wrong("messages", messages, "a list of messages, each with a role")
    if not messages or messages[-1]["role"] != "user":
        raise DataError("the messages of a turn must end with the person's message (role user)")
    fields = {"response", "source"}
    if (
        not isinstance(responses, list)
        or len(responses) != 2
        or not all(isinstance(one, Mapping) and set(one) == fields for one in responses)
    ):
        raise DataError("responses must be two objects with response and source")


def _ranking(item: Item, answer: Mapping[str, Any], _: bool) -> None:
    ranks, count = answer["ranks"], len(item.candidates)
    if not isinstance(ranks, list | tuple) or len(ranks) != count:
        raise _wrong("ranks", ranks, f"a list of {count} ranks, one for each answer")
    for rank in ranks:
        _is_one_of("a rank", rank, range(1, count + 1))
    if 1 not in ranks:
        raise DataError(f"no answer has rank 1, the best; the ranks are {list(ranks)}")


def _rating(_item: Item, answer: Mapping[str, Any], _: bool) -> None:
    _is_one_of("rating", answer["rating"], range(1, 8))
    check_flags(answer["flags"], RATING_FLAGS)


def _text(item: Item, answer: Mapping[str, Any], _: bool) -> None:
    text = answer["text"]
    if not isinstance(text, str):
        raise _wrong("text", text, "a string")
    if not text.strip():
        raise DataError("the text is empty; write an answer, or skip the item")
    if item.task == "correction" and _lines(text) == _lines(response_text(item.candidates[0].response)):
        raise DataError("the text equals the original answer; correct it, or skip the item")


def _lines(text: Any) -> Any:
    """A text with normalised line breaks, as in a browser's text field; other line breaks are not a correction."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if isinstance(text, str) else text


def response_text(response: Any) -> Any:
    """Return the text of a response or message, of several messages the texts of all; None if it has none."""
    if isinstance(response, list | tuple):
        return "\n".join(str(response_text(one) or "") for one in response)
    return response.get("content") if isinstance(response, Mapping) else response


def sides(ranks: Sequence[int]) -> dict[tuple[int, int], int]:
    """Return for every two answers of a ranking -1 if the first is better, 1 if the second is, 0 for a tie."""
    return {(i, j): (ranks[i] > ranks[j]) - (ranks[i] < ranks[j]) for i, j in combinations(range(len(ranks)), 2)}


def dense_ranks(ranks: Sequence[int]) -> list[int]:
    """Return ranks as 1, 2, 3, ... without gaps, in the same order."""
    return [sorted(set(ranks)).index(rank) + 1 for rank in ranks]


def follows(answer: Mapping[str, Any], suggestion: Mapping[str, Any]) -> bool:
    """True if an answer equals the suggestion for its item.

    Compares the preferred answer (or tie, or both bad), the order of a ranking, the rating, or the text; ignores strength,
    flags, criteria and the kind of line break.
    """
    if "ranks" in suggestion:
        return dense_ranks(answer["ranks"]) == dense_ranks(suggestion["ranks"])
    return all(
        _lines(answer[name]) == _lines(suggestion[name])
        for name in ("preferred", "both_bad", "rating", "text")
        if name in suggestion
    )


Check = Callable[[Item, Mapping[str, Any], bool], None]
PREFERENCE = ("preferred", "strength", "both_bad")
FIELDS: dict[str, tuple[str, ...]] = {
    "pair": PREFERENCE,
    "ranking": ("ranks",),
    "rating": ("rating", "flags"),
    "demonstration": ("text",),
    "correction": ("text",),
    "chat": ("messages", "responses", *PREFERENCE, "last"),
}
"""The fields of an answer, by task."""
UNSAID: dict[str, dict[str, Any]] = {"pair": {"strength": None, "both_bad": False}, "rating": {"flags": []}}
"""Defaults of a suggestion's fields."""
CHECKS: dict[str, Check] = {
    "pair": _preference,
    "ranking": _ranking,
    "rating": _rating,
    "demonstration": _text,
    "correction": _text,
    "chat": _preference,
}


def check_item(item: Item) -> None:
    """Raise DataError if an item is invalid for its task."""
    if item.task not in TASKS:
        raise _wrong("task", item.task, f"one of {', '.join(TASKS)}")
    if not isinstance(item.item_id, str) or not item.item_id:
        raise _wrong("item_id", item.item_id, "a non-empty string")
    least, most = CANDIDATES[item.task]
    if not least <= len(item.candidates) <= most:
        allowed = f"{least}" if least == most else f"{least} to {most}"
        raise DataError(f"a {item.task} needs {allowed} answers, got {len(item.candidates)}: item {item.item_id}")
    if not isinstance(item.needed, int) or isinstance(item.needed, bool) or item.needed < 1:
        raise _wrong("needed", item.needed, "a whole number from 1")
    if item.screening and item.task not in JUDGED:
        raise DataError(f"a screening item must be one of {', '.join(JUDGED)}; item {item.item_id} is a {item.task}")
    if item.gold is not None:
        if item.task not in JUDGED or item.screening:
            what = "for screening" if item.screening else f"a {item.task}"
            raise DataError(f"a gold question must be one of {', '.join(JUDGED)}; item {item.item_id} is {what}")
        check_answer(item, item.gold, strength_known=False)
    if item.suggestion is not None:
        check_answer(item, item.suggestion, strength_known=False)


def check_suggestion(item: Item, suggestion: Any) -> dict[str, Any]:
    """Return a suggested answer with all its fields. Raises DataError if it is invalid for the item's task.

    A value other than an object is the first field of the task's answer: ``preferred``, ``ranks``, ``rating`` or ``text``.
    Strength and flags are optional, and only the order of ranks counts, from any number.
    """
    if item.task == "chat":
        raise DataError("a chat takes no suggestion: its answers are written during the chat")
    named = suggestion if isinstance(suggestion, Mapping) else {FIELDS[item.task][0]: suggestion}
    said = {**UNSAID.get(item.task, {}), **named}
    ranks = said.get("ranks")
    if isinstance(ranks, list | tuple) and all(type(rank) is int for rank in ranks):
        said["ranks"] = dense_ranks(ranks)
    return check_answer(item, said, strength_known=False)


def check_flags(flags: Any, allowed: Sequence[str] = ITEM_FLAGS) -> list[str]:
    """Return flags as a list. Raises DataError for an unknown or repeated flag."""
    if not isinstance(flags, list | tuple) or any(one not in allowed for one in flags) or len({*flags}) < len(flags):
        raise _wrong("flags", flags, f"a list of {', '.join(allowed)}, each at most once")
    return list(flags)


def check_words(name: str, text: Any, longest: int = LONGEST_COMMENT) -> str:
    """Return a short text. Raises DataError if it is not a string or too long."""
    if not isinstance(text, str):
        raise _wrong(name, text, "a string")
    if len(text) > longest:
        raise DataError(f"{name} has {len(text)} characters, at most {longest} are allowed; shorten it")
    return text


def check_nonce(nonce: Any) -> str:
    """Return the nonce of a submission. Raises DataError if it is invalid."""
    if not isinstance(nonce, str) or not 1 <= len(nonce) <= 128:
        raise _wrong("nonce", nonce, "a string of 1 to 128 characters, new for each submission")
    return nonce


def check_seconds(seconds: Any, name: str = "seconds", most: float = LONGEST_SECONDS) -> float:
    """Return the time of a label in seconds. Raises DataError if it is invalid."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= most:
        raise _wrong(name, seconds, f"a number from 0 to {most:g}")
    return float(seconds)


def worked_seconds(content: Mapping[str, Any]) -> float | None:
    """Return the working time of a label: its active time, else its whole time; None if imported."""
    active = content.get("active")
    return content["seconds"] if active is None else active


def _is_one_of(name: str, value: Any, allowed: Sequence[int], other: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
        words = ", ".join(map(str, allowed)) + (f", or {other}" if other else "")
        raise _wrong(name, value, f"one of {words}")


def _wrong(name: str, value: Any, allowed: str) -> DataError:
    return DataError(f"{name} must be {allowed}, got {value!r:.80}")
