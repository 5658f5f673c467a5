"""Every rollout as Parquet: ``rollouts/step-000012.parquet``, a row per response (``--rollouts all``)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from heedful.algorithms.online.experience import TokenNumbers
from heedful.algorithms.online.rollout import ScoredBatch
from heedful.configs.online import RolloutConfig
from heedful.data.chat import plain_text
from heedful.data.messages import as_dict
from heedful.distributed import ranks
from heedful.engines.responses import Responses
from heedful.files import to_json, write_bytes
from heedful.redact import without_secrets_of
from heedful.training.output_folder import real_path
from heedful.types import Conversation

FOLDER = "rollouts"
OF_TOKENS = (
    "old_logprobs",
    "ref_logprobs",
    "values",
    "token_rewards",
    "advantages",
    "returns",
    "entropy",
    "log_ratio",
)
"""Columns with a number for each of ``response_ids``."""


def forget_rollouts(config: RolloutConfig, *, after: int) -> None:
    """Remove the files of steps that a resumed run repeats, and half-written files of a killed run."""
    if not ranks.is_first():
        return
    folder = real_path(config.folder) / FOLDER
    kept = {_name(step) for step in range(after + 1)}
    for path in [*folder.glob("step-*.parquet"), *folder.glob(".step-*.heedful-partial")]:
        if path.name not in kept:
            path.unlink()


def write_rollouts(
    config: RolloutConfig, step: int, scored: ScoredBatch, kl: Tensor, token_numbers: Mapping[str, TokenNumbers]
) -> None:
    """Write the responses of a step, if the settings ask for all of them. The file is whole or not there.

    Columns: ``step``, ``prompt`` and ``response`` (text), ``prompt_ids`` and ``response_ids`` (the stop token included),
    ``logprobs`` (nats, of each of ``response_ids``, as sampling saw them: with the temperature, before top-k and top-p;
    of servers after them and renormalised), ``score`` (as the rewards gave it, combined), ``rewards`` (what each gave, by
    its name), ``shaped_score`` (as training counts it), ``kl`` (to the reference, nats per response), ``length``
    (tokens), ``finish_reason`` (stop or length), ``source`` (where the prompt was read), ``weights_version`` (of the
    weights that drew it: steps that they had learned), ``staleness`` (steps learned since). A number that there is not is
    null: the score and KL of a response on which a reward failed, what a reward gave that did not apply, the KL of a run
    that measures none.

    With an environment also ``prompt_messages`` and ``turns`` (messages; arguments of calls are JSON in a string), ``tools``
    (JSON in a string), ``turn_ends`` (how many of ``response_ids`` there are up to the end of each of the policy's turns;
    those of the other one are not among them), ``other_ids`` (the tokens that the other one wrote behind each turn),
    ``turn_rewards``, ``ended`` (environment, turns or tokens), ``failure`` (why the environment failed, else null).

    Columns with a number for each of ``response_ids``, float32, in nats where they are logarithms:

    - ``old_logprobs``: ``log pi_old``, of the policy before the update, with the temperature;
    - ``ref_logprobs``: ``log ref``, of the reference; ``entropy``: that of ``pi_old`` at the token;
    - ``values``: ``V_t``, the critic's, of the text before the token; ``returns``: ``R_t``, what it learns;
    - ``token_rewards``: ``r_t``, scores and penalties where they fall, minus the price of the KL;
    - ``advantages``: ``A_t``, as the loss takes them (whitened, weighed);
    - ``log_ratio``: ``log pi - log pi_old`` in the last pass over the token, before that pass's optimizer step.

    They are null where a run has none (no critic, no reference) and for a response that was not learned from.

    To be called before the step is logged: if it fails, the step is done again.

    Raises OSError, such as for a full disk.
    """
    if config.rollouts != "all" or not ranks.is_first():
        return
    folder = real_path(config.folder) / FOLDER
    folder.mkdir(exist_ok=True)
    content = pa.BufferOutputStream()
    known_kl = kl if config.needs_reference else None
    table = _table(step, scored, known_kl, token_numbers, hide=without_secrets_of(config))
    pq.write_table(table, content, compression="zstd")
    write_bytes(folder / _name(step), content.getvalue().to_pybytes())


def _table(
    step: int,
    scored: ScoredBatch,
    kl: Tensor | None,
    token_numbers: Mapping[str, TokenNumbers],
    *,
    hide: Callable[[str], str],
) -> pa.Table:
    sampled, given = scored.sampled.responses, scored.sampled.reward_scores
    completions, own, (prompts, *_) = sampled.completions, sampled.mask.cpu().numpy(), sampled.batch.tokens()
    failed = set(given.failed)
    scores = [None if row in failed else total for row, total in enumerate(given.totals)]
    learned = {id(one) for one in scored.completions}  # the others are left out of the step
    shaped, known = iter(scored.shaped.tolist()), iter(() if kl is None else kl.tolist())
    texts, numbers = pa.list_(pa.int32()), pa.list_(pa.float32())
    columns = {
        "step": pa.array([step] * len(completions), pa.int32()),
        "prompt": _strings(hide(plain_text(one.prompt.prompt)) for one in completions),
        "response": _strings(one.response for one in completions),
        "prompt_ids": pa.array(prompts, texts),
        "response_ids": pa.array(sampled.own_ids(), texts),
        "logprobs": pa.array(
            [row[mask] for row, mask in zip(sampled.logprobs.cpu().numpy(), own, strict=True)], numbers
        ),
        "score": pa.array(scores, pa.float64()),
        "rewards": pa.StructArray.from_arrays(
            [pa.array(column, pa.float64()) for column in given.parts.values()], names=_strings(given.parts).to_pylist()
        ),
        "shaped_score": pa.array([next(shaped) if id(one) in learned else None for one in completions], pa.float64()),
        "kl": pa.array(
            [next(known) if kl is not None and id(one) in learned else None for one in completions],
            pa.float64(),
            from_pandas=True,  # what no pass measured is missing
        ),
        "length": pa.array(sampled.lengths.tolist(), pa.int32()),
        "finish_reason": pa.array(["length" if cut else "stop" for cut in sampled.truncated.tolist()], pa.string()),
        "source": _strings(one.prompt.source for one in completions),
    }
    columns |= _of_episodes(sampled, hide)
    if sampled.versions is not None:
        versions = sampled.versions.tolist()
        columns["weights_version"] = pa.array(versions, pa.int32())
        columns["staleness"] = pa.array([step - 1 - version for version in versions], pa.int32())
    of_learned = [place for place, one in enumerate(completions) if id(one) in learned]
    for name in OF_TOKENS:
        columns[name] = _of_tokens(token_numbers.get(name), of_learned, own)
    return pa.table(columns)


FUNCTION = pa.struct({"name": pa.string(), "arguments": pa.string()})
CALL = pa.struct({"type": pa.string(), "function": FUNCTION, "id": pa.string()})
TEXTS = ("role", "content", "reasoning_content", "name", "tool_call_id")
MESSAGES = pa.list_(pa.struct({name: pa.string() for name in TEXTS} | {"tool_calls": pa.list_(CALL)}))
"""Messages with the keys of chat templates. The arguments of calls differ from tool to tool, so they are JSON in a string."""


def _of_episodes(sampled: Responses, hide: Callable[[str], str]) -> dict[str, pa.Array]:
    """What was said in turns, each turn's end and reward, and what ended the episode; nothing without an environment."""
    played = [(one.prompt.prompt, one.episode) for one in sampled.completions if one.episode is not None]
    if not played:
        return {}
    prompts, episodes = zip(*played, strict=True)
    ends, (_, said, own) = [one.ends for one in episodes], sampled.batch.tokens()
    others = [others_ids(*row) for row in zip(said, own, ends, strict=True)]
    ids = pa.list_(pa.int32())
    return {
        "prompt_messages": pa.array([_messages(one, hide) for one in prompts], MESSAGES),
        "tools": pa.array([one[0].tools or None for one in prompts], pa.string()),
        "turns": pa.array([_messages(one.turns) for one in episodes], MESSAGES),
        "turn_ends": pa.array(ends, ids),
        "other_ids": pa.array(others, pa.list_(ids)),
        "turn_rewards": pa.array([one.rewards for one in episodes], pa.list_(pa.float64())),
        "ended": pa.array([one.ended for one in episodes], pa.string()),
        "failure": pa.array([one.failure or None for one in episodes], pa.string()),
    }


def _messages(conversation: Conversation, hide: Callable[[str], str] = str) -> list[dict[str, Any]]:
    """Messages as Parquet holds them."""
    found = [as_dict(message) for message in conversation]
    for message in found:
        message["content"] = hide(message["content"])
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = to_json(call["function"]["arguments"])
    return found


def others_ids(said: Sequence[int], own: Sequence[bool], ends: Sequence[int]) -> list[list[int]]:
    """The tokens of the other one behind each of the policy's turns.

    Args:
        said: all tokens behind the prompt.
        own: which of them are the policy's.
        ends: number of the policy's tokens up to the end of each turn.
    """
    found: dict[int, list[int]] = {end: [] for end in ends}
    count = 0
    for token, is_own in zip(said, own, strict=True):
        count += is_own
        if not is_own:
            found[count].append(token)
    return list(found.values())


def _of_tokens(given: TokenNumbers | None, of_learned: Sequence[int], own: np.ndarray) -> pa.Array:
    """A list of numbers per sampled response, as long as its tokens; null for those that have none.

    Args:
        given: by the response's place among those that are learned from.
        of_learned: the place of each of those among all that were sampled.
        own: the mask of the tokens of each that was sampled.
    """
    rows = [] if given is None else [of_learned[row] for row in given.rows.tolist()]
    numbers = np.empty((0, 0), np.float32) if given is None else given.numbers.float().cpu().numpy()
    place = {row: at for at, row in enumerate(rows)}
    kept = [numbers[place[row]][mask] for row, mask in enumerate(own) if row in place]
    ends = np.cumsum([0, *(mask.sum() if row in place else 0 for row, mask in enumerate(own))])
    flat = pa.array(np.concatenate(kept) if kept else np.empty(0, np.float32), pa.float32())
    absent = pa.array([row not in place for row in range(len(own))])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), flat, mask=absent)


def _strings(texts: Iterable[str]) -> pa.Array:
    """Texts in UTF-8; what it has no form for, such as the name of a file in another encoding, is escaped."""
    return pa.array([text.encode("utf-8", "backslashreplace").decode() for text in texts], pa.string())


def _name(step: int) -> str:
    return f"step-{step:06d}.parquet"
