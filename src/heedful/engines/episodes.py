"""Episodes: the policy and its environments speak in turn, and what both said is one response with a mask.

    ids = prompt | turn 1 | what the other one said | turn 2 | ...        own tokens: turns, each with its end token

All rows take their turns together: the policy samples a turn of each, then all environments act at the same time.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from heedful.configs.online import EnvironmentOptions
from heedful.data.batches import collate
from heedful.data.chat import Renderer
from heedful.data.dialogue import Dialogue, whole
from heedful.data.loading import EncodedPrompt
from heedful.data.messages import as_dict
from heedful.distributed import ranks
from heedful.engines.responses import Responses
from heedful.environments.processes import Abilities, Environments, Failure, TurnResult
from heedful.errors import DataError
from heedful.types import Completion, Episode, Message, Prompt, as_message, plain_response, split_thinking
from heedful.user_code import PREFIX

LONGEST_TOKEN = 64
"""Characters of a token at most: a longer text is not worth tokenising to see that it does not fit."""
Say = Callable[[Sequence[EncodedPrompt], Sequence[int]], Responses]
"""Samples a turn behind each prompt, of at most so many tokens."""
T = TypeVar("T")


@dataclass
class EpisodeRow:
    """An episode so far."""

    place: int
    """Of its environment, among those of its class."""
    kind: str
    """The name of its environment's class."""
    asked: EncodedPrompt
    """The prompt, with what its environment added."""
    said: list[int] = field(default_factory=list)
    """Tokens behind the prompt."""
    own: list[bool] = field(default_factory=list)
    """Whether each is the policy's."""
    logprobs: list[float] = field(default_factory=list)
    """Of each when it was sampled; 0 of those of the other one."""
    kept: list[float] = field(default_factory=list)
    """Log of the probability mass that top-k and top-p kept."""
    messages: list[Message] = field(default_factory=list)
    text: str = ""
    """The last turn's."""
    rewards: list[float] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Number of own tokens up to the end of each turn."""
    failed_calls: int = 0
    calls: int = 0
    ended: Literal["", "environment", "turns", "tokens"] = ""
    failure: str = ""

    @property
    def goes_on(self) -> bool:
        return not self.ended and not self.failure

    def add(self, ids: Sequence[int], *, own: bool, logprobs: Sequence[float] = (), kept: Sequence[float] = ()) -> None:
        """Add tokens of the policy, or of somebody else."""
        self.said += ids
        self.own += [own] * len(ids)
        self.logprobs += logprobs or [0.0] * len(ids)
        self.kept += kept or [0.0] * len(ids)


def seed_of(generator: torch.Generator) -> int:
    """The seed of what environments draw in episodes that are sampled with this generator."""
    return zlib.crc32(generator.get_state().numpy().tobytes())


class Episodes:
    """Plays episodes.

    Args:
        renderer: the policy's.
        environments: of each class by its name; only on rank 0, which asks them for all.
        abilities: of each class by its name, on all ranks.
        max_turns: most turns of the policy.
        max_new_tokens: most tokens behind the prompt, what the other one says included.
        max_prompt_tokens: most tokens of a prompt, with what ``reset`` returned.
        together: whether all ranks play together; if not, only rank 0 plays, maybe beside other work.

    Raises CheckpointError for a chat template that cannot write such conversations.
    """

    def __init__(
        self,
        renderer: Renderer,
        environments: Mapping[str, Environments],
        abilities: Mapping[str, Abilities],
        *,
        max_turns: int,
        max_new_tokens: int,
        max_prompt_tokens: int,
        together: bool = True,
    ) -> None:
        self.renderer, self.environments, self.abilities = renderer, environments, abilities
        self.dialogues = {name: Dialogue(renderer, one.tools, replies=one.replies) for name, one in abilities.items()}
        self.max_turns, self.max_new_tokens, self.max_prompt_tokens = max_turns, max_new_tokens, max_prompt_tokens
        self.together = together

    @property
    def files(self) -> list[str]:
        """The files with the code of the environments, on rank 0."""
        found = [one.spec.removeprefix(PREFIX).rpartition(":")[0] for one in self.environments.values()]
        return [*found, *(file for one in self.environments.values() for file in one.abilities.files)]

    @classmethod
    def load(
        cls,
        options: EnvironmentOptions,
        renderer: Renderer,
        *,
        max_new_tokens: int,
        max_prompt_tokens: int,
        together: bool = True,
    ) -> "Episodes":
        """Start the environments of ``options``, on rank 0. Raises ConfigError, CheckpointError."""
        environments: dict[str, Environments] = {}

        def start() -> dict[str, Abilities]:
            for spec in options.environment:
                one = Environments(spec, timeout=options.environment_timeout)
                environments[one.name] = one
            return {name: one.abilities for name, one in environments.items()}

        abilities = ranks.on_rank_zero(start)
        return cls(
            renderer,
            environments,
            abilities,
            max_turns=options.max_turns,
            max_new_tokens=max_new_tokens,
            max_prompt_tokens=max_prompt_tokens,
            together=together,
        )

    def play(self, say: Say, prompts: Sequence[EncodedPrompt], generator: torch.Generator) -> Responses:
        """An episode for each prompt. Environments draw numbers of their own, which depend on the generator's state."""
        rows = self._begin(prompts, seed_of(generator))
        parts: list[Responses] = []
        for turn in range(1, self.max_turns + 1):
            playing = [row for row in rows if row.goes_on]
            if not playing:
                break
            left = [self.max_new_tokens - len(row.said) for row in playing]
            before = [replace(row.asked, ids=[*row.asked.ids, *row.said]) for row in playing]
            parts.append(say(before, left))
            self._add_turns(playing, before, parts[-1])
            self._act([row for row in playing if row.goes_on], is_last=turn == self.max_turns)
        self._end(rows)
        return self._responses(rows, parts)

    def close(self) -> None:
        """End all environments."""
        for one in self.environments.values():
            one.close()

    def _of_environments(self, work: Callable[[], T]) -> T:
        """What environments answer: on every rank, or on the only one that plays."""
        return ranks.on_rank_zero(work) if self.together else work()

    def _begin(self, prompts: Sequence[EncodedPrompt], seed: int) -> list[EpisodeRow]:
        """Reset the environments, and write the prompts with their tools and with what they say at the beginning."""
        counts = dict.fromkeys(self.dialogues, 0)
        rows = []
        for one in prompts:
            kind = self.kind_of(one.prompt)
            rows.append(EpisodeRow(counts[kind], kind, one))
            counts[kind] += 1

        def reset() -> dict[str, list[str | Failure | None]]:
            columns = {kind: [reset_columns(row.asked.prompt) for row in rows if row.kind == kind] for kind in counts}
            return {kind: self.environments[kind].begin(of, seed=seed) for kind, of in columns.items() if of}

        said = self._of_environments(reset)
        for row in rows:
            first = said[row.kind][row.place]
            if isinstance(first, Failure):
                row.failure = first
                continue
            prompt = row.asked.prompt
            assert isinstance(prompt.prompt, tuple)
            conversation = prompt.prompt
            if first is not None:
                conversation = (
                    *conversation[:-1],
                    replace(conversation[-1], content=conversation[-1].content + whole(first)),
                )
            conversation = self.dialogues[row.kind].prompt(conversation)
            if conversation == prompt.prompt and conversation[0].tools == prompt.prompt[0].tools:
                continue
            ids = self.renderer.prompt_ids(conversation, prompt.prefill)
            row.asked = EncodedPrompt(replace(prompt, prompt=conversation), ids)
            if len(ids) > self.max_prompt_tokens:
                row.failure = (
                    f"makes a prompt of {len(ids)} tokens, with its tools and what reset() returned, above "
                    f"--max-prompt-tokens {self.max_prompt_tokens}; raise it"
                )
        return rows

    def kind_of(self, prompt: Prompt) -> str:
        """The name of the class of a prompt's environment. Raises DataError for a prompt that is none for an environment."""
        if not isinstance(prompt.prompt, tuple):
            raise DataError(
                f"{prompt.source}: the prompt is raw text, but an environment speaks in turns: give messages, or add "
                "--chat-template plain and use the column `instruction`"
            )
        if prompt.prompt[-1].role != "user":
            raise DataError(
                f"{prompt.source}: the prompt ends with a message of the {prompt.prompt[-1].role}, but an environment adds "
                "what it says at the beginning to one of the user"
            )
        if len(self.dialogues) == 1:
            return next(iter(self.dialogues))
        kind = prompt.columns.get("environment")
        if not isinstance(kind, str) or kind not in self.dialogues:
            raise DataError(
                f"{prompt.source}: the column `environment` is {kind!r:.60}; choose from {', '.join(self.dialogues)}, the "
                "classes of --environment"
            )
        return kind

    def _add_turns(self, rows: Sequence[EpisodeRow], before: Sequence[EncodedPrompt], sampled: Responses) -> None:
        """Add what the policy said."""
        logprobs, kept = sampled.logprobs.tolist(), sampled.kept_logprobs
        masses = [[]] * len(rows) if kept is None else kept.tolist()
        cut = sampled.truncated.tolist()
        for at, (row, ids) in enumerate(zip(rows, sampled.own_ids(), strict=True)):
            written = ids if cut[at] else ids[:-1]
            if row.messages:
                row.text = self.renderer.turn_text(before[at].ids, written, truncated=cut[at])
            else:
                prompt = row.asked.prompt
                row.text = self.renderer.response_text(
                    written, prompt=prompt.prompt, truncated=cut[at], prefill=prompt.prefill
                )
            row.add(ids, own=True, logprobs=logprobs[at][: len(ids)], kept=masses[at][: len(ids)])
            row.ends.append(sum(row.own))
            row.messages.append(self.dialogues[row.kind].message(row.text))
            row.rewards.append(0.0)
            row.ended = "tokens" if cut[at] else ""

    def _act(self, rows: Sequence[EpisodeRow], *, is_last: bool) -> None:
        """Have the environments act on the policy's turns, and add what they say."""
        kinds = {row.kind for row in rows}

        def act() -> dict[str, dict[int, TurnResult | Failure]]:
            return {
                kind: self.environments[kind].act(
                    {
                        row.place: (row.messages[-1].tool_calls, split_thinking(row.text)[1] or "")
                        for row in rows
                        if row.kind == kind
                    }
                )
                for kind in kinds
            }

        answers = self._of_environments(act)
        for row in rows:
            answer = answers[row.kind][row.place]
            if isinstance(answer, Failure):
                row.failure = answer
                continue
            row.rewards[-1] += answer.reward or 0.0
            calls = row.messages[-1].tool_calls
            row.calls, row.failed_calls = row.calls + len(calls), row.failed_calls + answer.failed_calls
            said = [
                Message("tool", whole(result), name=call.name, tool_call_id=call.id)
                for call, result in zip(calls, answer.results, strict=True)
            ]
            said += [] if answer.reply is None else [Message("user", whole(answer.reply))]
            if not said:
                row.ended = "environment"
                continue
            if is_last:
                row.ended = "turns"
                continue
            assert isinstance(row.asked.prompt.prompt, tuple)
            left = self.max_new_tokens - len(row.said)
            fits = sum(len(one.content) for one in said) <= LONGEST_TOKEN * left
            ids = self.dialogues[row.kind].said_ids(tuple(said), row.asked.prompt.prompt) if fits else []
            if fits and len(ids) < left:
                row.add(ids, own=False)
                row.messages += said
            else:
                row.ended = "tokens"

    def _end(self, rows: Sequence[EpisodeRow]) -> None:
        """Add the rewards of the episodes to their last turns."""

        def end() -> dict[str, dict[int, float | Failure | None]]:
            return {
                kind: self.environments[kind].end([row.place for row in rows if row.kind == kind and not row.failure])
                for kind in {row.kind for row in rows}
            }

        found = self._of_environments(end)
        for row in rows:
            if row.failure:
                continue
            reward = found[row.kind][row.place]
            if isinstance(reward, Failure):
                row.failure = reward
            elif reward is not None:
                row.rewards[-1] += reward

    def _responses(self, rows: Sequence[EpisodeRow], parts: Sequence[Responses]) -> Responses:
        """The rows as one batch. One whose environment failed before a turn is a token of padding, which no reward scores."""
        for row in rows:
            if not row.said:
                row.add([self.renderer.turn_end_id], own=True)
        device = parts[0].truncated.device if parts else torch.device("cpu")
        batch = collate(
            [row.asked.ids for row in rows],
            [row.said for row in rows],
            own=[row.own for row in rows],
            pad_id=self.renderer.pad_id,
        ).to(device)

        def placed(numbers: Sequence[Sequence[float]]) -> Tensor:
            found = torch.zeros(batch.response_mask.shape)
            for at, one in enumerate(numbers):
                found[at, : len(one)] = torch.tensor(one)
            return found.to(device)

        kept = any(part.kept_logprobs is not None for part in parts)
        versions = parts[0].versions if parts else None  # one for all rows
        return Responses(
            batch=batch,
            truncated=torch.tensor([row.ended == "tokens" for row in rows], device=device),
            logprobs=placed([row.logprobs for row in rows]),
            completions=[self._completion(row) for row in rows],
            temperature=parts[0].temperature if parts else 1.0,
            kept_logprobs=placed([row.kept for row in rows]) if kept else None,
            versions=None if versions is None else versions[:1].expand(len(rows)).clone(),
        )

    def _completion(self, row: EpisodeRow) -> Completion:
        """What was said as text."""
        own = [token for token, is_own in zip(row.said, row.own, strict=True) if is_own]
        abilities, truncated = self.abilities[row.kind], row.ended == "tokens"
        episode = Episode(
            turns=tuple(row.messages),
            rewards=tuple(row.rewards) if abilities.rewards_turns or abilities.rewards_episodes else (),
            ends=tuple(row.ends),
            calls=row.calls,
            failed_calls=row.failed_calls,
            ended=row.ended or "environment",
            failure=f"{row.kind} {row.failure}" if row.failure else "",
        )
        text = row.text if len(row.messages) == 1 else plain_response(tuple(map(as_message, row.messages)))
        return Completion(
            row.asked.prompt,
            text,
            own if truncated else own[:-1],
            truncated=truncated,
            episode=episode,
        )


def reset_columns(prompt: Prompt) -> dict[str, Any]:
    """What an environment is reset with: the record's fields, and its prompt as messages, as TRL gives it."""
    assert isinstance(prompt.prompt, tuple)
    return {"prompt": [as_dict(message) for message in prompt.prompt], **prompt.columns}
