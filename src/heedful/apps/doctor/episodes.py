"""Checks of environments, on episodes that the policy, as it starts, has just played."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch

from heedful.checks.findings import Finding, finding
from heedful.configs.online import RolloutConfig
from heedful.engines.episodes import Episodes, reset_columns, seed_of
from heedful.engines.responses import Responses
from heedful.environments.processes import Environments, Failure
from heedful.rewards.scoring import sample
from heedful.training.thresholds import CALLS_FAIL, CUT_AT_START, OBSERVED, REPLAYED
from heedful.types import Completion, Episode, split_thinking

Heard = list[tuple[str, Any]]
"""What an environment said and paid in an episode: by which method, and what."""


def of(completion: Completion) -> Episode:
    """What was said in turns."""
    assert completion.episode is not None
    return completion.episode


def environments(episodes: Episodes, completions: Sequence[Completion], config: RolloutConfig) -> list[Finding | None]:
    """What is wrong with each environment that has acted in these episodes, sampled with the config's seed, and has not
    failed."""
    seed, found = seed_of(torch.Generator().manual_seed(config.seed)), list[Finding | None]()
    for kind, environment in episodes.environments.items():
        own = [one for one in completions if episodes.kind_of(one.prompt) == kind]
        if own:
            tools = [tool["function"]["name"] for tool in environment.abilities.tools]
            found += [
                endless(kind, own, config.max_turns),
                tools_not_called(kind, own, tools),
                tools_fail(kind, own),
                not_repeatable(environment, own[:REPLAYED], seed),
            ]
    return found


def fails(completions: Sequence[Completion], max_failed: float) -> Finding | None:
    """In how many episodes does the environment fail?"""
    failed = [one for one in completions if of(one).failure]
    if not failed:
        return None
    return finding(
        "environment-fails",
        "fail" if len(failed) > max_failed * len(completions) else "warn",
        f"the environment fails in {len(failed)} of {len(completions)} episodes; {max_failed:.0%} may fail",
        f"{of(failed[0]).failure}; for {sample(failed[0])}",
    )


def endless(kind: str, completions: Sequence[Completion], max_turns: int) -> Finding | None:
    """Does the limit of turns, if it is one of several, end most episodes, and the environment none?"""
    cut = [one for one in completions if of(one).ended == "turns"]
    if max_turns == 1 or len(cut) <= CUT_AT_START * len(completions):
        return None
    if any(of(one).ended == "environment" for one in completions):
        return None
    last = next(turn.content for turn in reversed(of(cut[0]).turns) if turn.role != "assistant")
    return finding(
        "episodes-endless",
        "warn",
        f"--max-turns {max_turns} ends {len(cut)} of {len(completions)} episodes of {kind}, and {kind} itself ends none",
        f"{cut[0].prompt.source}: before the last turn it says {last!r}",
    )


def observations_long(responses: Responses, stop_ids: Sequence[int], max_new_tokens: int) -> Finding | None:
    """Does the environment say so much that episodes end, or that next to nothing is the policy's own?"""
    completions = responses.completions
    unfit = sum(one.truncated and one.ids[-1] in stop_ids for one in completions)  # the policy's turn was not cut
    own, said = int(responses.lengths.sum()), sum(map(len, responses.batch.tokens()[1]))
    if unfit > CUT_AT_START * len(completions):
        what = (
            f"{unfit} of {len(completions)} episodes end because what the environment says does not fit into "
            f"--max-new-tokens {max_new_tokens}"
        )
    elif own < (1 - OBSERVED) * said:
        what = f"{1 - own / said:.0%} of the tokens behind the prompts are what the environment says"
    else:
        return None
    turns = sum(len(of(one).ends) for one in completions)
    return finding(
        "observations-long",
        "warn",
        what,
        f"the policy writes {own / turns:.0f} tokens in a turn of its own, on average",
    )


def tools_not_called(kind: str, completions: Sequence[Completion], tools: Sequence[str]) -> Finding | None:
    """Does no episode call a tool, though there are some?"""
    if not tools or any(of(one).calls for one in completions):
        return None
    first = completions[0]
    return finding(
        "tools-not-called",
        "warn",
        f"no turn in {len(completions)} episodes calls a tool of {kind} ({', '.join(tools)})",
        f"{first.prompt.source}: the first turn is {of(first).turns[0].content!r}",
    )


def tools_fail(kind: str, completions: Sequence[Completion]) -> Finding | None:
    """How many calls of tools fail? Each is a text that the policy reads, and no failure of the environment."""
    calls = sum(of(one).calls for one in completions)
    failed = sum(of(one).failed_calls for one in completions)
    if failed <= CALLS_FAIL * calls:
        return None
    shown = next(filter(None, map(_failed_call, completions)), "their results came behind the last turn")
    return finding("tools-fail", "warn", f"{failed} of {calls} calls of tools of {kind} fail", shown)


def _failed_call(completion: Completion) -> str | None:
    turns = of(completion).turns
    calls = [call for turn in turns for call in turn.tool_calls]
    results = [turn.content for turn in turns if turn.role == "tool"]
    return next(
        (
            f"{completion.prompt.source}: {call.name} with {call.arguments} gives {result}"
            for call, result in zip(calls, results, strict=False)  # the last ones may not have fitted
            if result.startswith("{'error'")
        ),
        None,
    )


def not_repeatable(environments: Environments, completions: Sequence[Completion], seed: int) -> Finding | None:
    """Do the same turns get the same answers and rewards in other processes, also after the episodes of other records?"""

    def heard(*parts: Sequence[Completion]) -> list[Heard]:
        """In new processes, the last of some parts."""
        with closing(Environments(environments.spec, timeout=environments.timeout)) as new:
            return [replay(new, part, seed) for part in parts][-1]

    first, kind = heard(completions), environments.name
    differing = _differing(completions, first, heard([*completions[1:], *completions[:1]], completions))
    if not differing:
        return None
    random = _differing(completions, first, heard(completions))
    number, difference = len(random or differing), (random or differing)[0]
    check = "environment-random" if random else "environment-keeps-state"
    when = "in another process" if random else "after the episode of another record"
    what = f"{kind} answers or pays the same turns differently {when}, in {number} of {len(completions)} episodes"
    return finding(check, "warn", what, difference)


def replay(environments: Environments, completions: Sequence[Completion], seed: int) -> list[Heard]:
    """What environments say and pay, each in its episode, if the policy's turns are those of these completions."""
    begun = environments.begin([reset_columns(one.prompt) for one in completions], seed=seed)
    heard: list[Heard] = [[("reset", text)] for text in begun]
    turns = [[turn for turn in of(one).turns if turn.role == "assistant"] for one in completions]
    going = {place for place, text in enumerate(begun) if not isinstance(text, Failure)}
    for at in range(max(map(len, turns))):
        said = {place: turns[place][at] for place in going if at < len(turns[place])}
        answers = environments.act(
            {place: (turn.tool_calls, split_thinking(turn.content)[1] or "") for place, turn in said.items()}
        )
        for place, answer in answers.items():
            if isinstance(answer, Failure):
                heard[place].append(("the turn", answer))
                going.remove(place)
                continue
            heard[place] += [("a tool", result) for result in answer.results]
            heard[place] += [("_reply", answer.reply), ("_turn_reward", answer.reward)]
    for place, reward in environments.end(sorted(going)).items():
        heard[place].append(("get_reward", reward))
    return heard


def _differing(completions: Sequence[Completion], first: Sequence[Heard], then: Sequence[Heard]) -> list[str]:
    """Where each episode that differs does so first."""
    found = []
    for completion, one, other in zip(completions, first, then, strict=True):
        pairs = zip(one, other, strict=False)  # one may have failed
        for (method, before), (_, after) in [pair for pair in pairs if pair[0] != pair[1]][:1]:
            found.append(f"{completion.prompt.source}: {method} gives {before!r}, then {after!r}")
    return found
