"""What an exam is made of: pairs, rewards that score texts, and a policy's answers."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from heedful.configs.evaluate import SampledOptions
from heedful.configs.exam import ExamConfig
from heedful.configs.scoring import RewardOptions
from heedful.core.agreement import ordered_pairs
from heedful.data.fitting import Counts
from heedful.data.schemas import read_prompts, read_rankings
from heedful.data.splits import prompt_key
from heedful.display import silence
from heedful.errors import DataError
from heedful.evaluate.measuring import answer, held_out, left_out, machine_of
from heedful.models.source import resolve
from heedful.models.tokenizer import load_chat_tokenizer
from heedful.rewards import Completion, Ensemble, score_tokens
from heedful.rewards.models import model_rewards
from heedful.rewards.resolve import AnyReward, check_reward_options, load_judges
from heedful.types import Message, Prompt, plain_response

KINDS = ("model", "python", "rule", "verify", "http", "https", "judge")
"""What may stand before the colon of a reward; anything else is a reward model."""
QUESTIONS = (
    ("What is the capital of France?", "The capital of France is Paris.", "France is a big country, I guess."),
    ("How many legs does a spider have?", "A spider has eight legs.", "A spider has six legs."),
    ("Why is the sky blue?", "Air scatters blue light more than red light.", "Because it reflects the sea."),
    ("Give me a tip for sleeping better.", "Go to bed at the same hour every day.", "Sleep is for weak people."),
    ("What is 12 times 12?", "12 times 12 is 144.", "12 times 12 is 124."),
    ("Name three fruits.", "Apples, pears and plums are fruits.", "Apples, cars and carpets."),
    ("中国的首都是哪里？", "中国的首都是北京。", "中国的首都是上海。"),
    ("一年有几个月？", "一年有十二个月。", "不知道，别问我。"),
)
"""Questions with a good and a bad answer, in the place of --data."""


@dataclass(frozen=True)
class ChosenRejected:
    """A prompt with a response that people prefer and one that they do not."""

    prompt: Prompt
    chosen: str
    rejected: str
    truncated: bool = False


@dataclass(frozen=True)
class ScoredPairs:
    """Pairs and a reward's scores of both sides."""

    pairs: Sequence[ChosenRejected]
    chosen: Sequence[float]
    rejected: Sequence[float]

    @property
    def margins(self) -> list[float]:
        """By how much each chosen response scores higher."""
        return [chosen - rejected for chosen, rejected in zip(self.chosen, self.rejected, strict=True)]

    @property
    def prompts(self) -> list[Prompt]:
        """The prompt of each pair."""
        return [pair.prompt for pair in self.pairs]

    @property
    def scale(self) -> float:
        """Standard deviation of all scores, the unit in which scores are compared; 1 if all are equal."""
        scores = [*self.chosen, *self.rejected]
        mean = sum(scores) / len(scores)
        return (sum((one - mean) ** 2 for one in scores) / len(scores)) ** 0.5 or 1.0


@dataclass(frozen=True)
class Scorer:
    """A reward, or several whose scores are summed, with the tokens that reward functions see of a text."""

    rewards: Ensemble
    ids: Callable[[str], list[int]]

    @property
    def name(self) -> str:
        """What it is called on the page."""
        return " + ".join(reward.name for reward in self.rewards)

    def scores(self, completions: Sequence[Completion]) -> list[float]:
        """Score responses; no response may be without a score. Raises RewardError."""
        return score_tokens(self.rewards, completions).totals if completions else []

    def of_texts(
        self, prompts: Sequence[Prompt], texts: Sequence[str], *, truncated: Sequence[bool] = ()
    ) -> list[float]:
        """Score texts as responses that ended, but for those that are ``truncated``."""
        cut = truncated or [False] * len(texts)
        return self.scores(
            [Completion(p, text, self.ids(text), one) for p, text, one in zip(prompts, texts, cut, strict=True)]
        )

    def of_pairs(self, pairs: Sequence[ChosenRejected]) -> ScoredPairs:
        """Score both sides of pairs, in one call."""
        prompts, cut = [pair.prompt for pair in pairs], [pair.truncated for pair in pairs]
        texts = [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)]
        scores = self.of_texts([*prompts, *prompts], texts, truncated=[*cut, *cut])
        return ScoredPairs(pairs, scores[: len(pairs)], scores[len(pairs) :])


def load_scorers(
    config: ExamConfig, reward: AnyReward, judge: Sequence[AnyReward], second: Sequence[AnyReward]
) -> tuple[Scorer, Scorer | None, list[Scorer]]:
    """Load the examined reward, the judge and the others. Of a text that is too long, reward models read the beginning.

    Functions see the tokens of the policy's tokenizer, or, without a policy, the bytes of a text.

    Raises ConfigError that names the setting, CheckpointError and RewardError.
    """
    machine = machine_of(config)
    options = RewardOptions(trust_remote_code=config.trust_remote_code, max_failed_rewards=0.0)
    ids = _ids(config)

    def load(flag: str, rewards: Sequence[AnyReward]) -> Scorer:
        wanted = [_named(one) for one in rewards]
        check_reward_options(wanted, options)
        ensemble = load_judges(flag, wanted, options, **machine)
        for _, model in model_rewards(ensemble):
            model.reads_beginnings = True
        return Scorer(ensemble, ids)

    examined = load("REWARD", [reward])
    trusted = load("--judge", judge) if judge else None
    return examined, trusted, [load("--second", [one]) for one in second]


def _ids(config: ExamConfig) -> Callable[[str], list[int]]:
    if not config.policy:
        return lambda text: list(text.encode())
    tokenizer = load_chat_tokenizer(resolve(config.policy, config), config)
    return lambda text: list(tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)


def _named(reward: AnyReward) -> AnyReward:
    if not isinstance(reward, str) or reward.partition(":")[0] in KINDS:
        return reward
    return f"model:{reward}"


def read_pairs(config: ExamConfig) -> tuple[list[ChosenRejected], Counts]:
    """Read the pairs of ``config.data``, at most ``config.pairs`` drawn with the seed, or take the built-in ones.

    A ranking gives all its pairs; equal ranks give none. Prompts have the columns of their records, for rewards that need
    them, where ``prompt`` is a column.

    Raises DataError.
    """
    if not config.data:
        prompts = [Prompt((Message("user", asked),), "built-in question") for asked, _, _ in QUESTIONS]
        return [ChosenRejected(p, good, bad) for p, (_, good, bad) in zip(prompts, QUESTIONS, strict=True)], {}
    rankings, counts = held_out(read_rankings, config)
    of_one_answer = [one for one in rankings if not any(isinstance(response, tuple) for response in one.responses)]
    if not of_one_answer:
        raise DataError(f"{config.data}: all responses have several turns; the exam is for single answers")
    counts |= {"dropped_several_turns": len(rankings) - len(of_one_answer)}
    found = [(one, two) for one in of_one_answer for two in ordered_pairs(one.ranks, range(len(one.ranks)))]
    columns = _columns(config)
    drawn = random.Random(f"pairs {config.seed}").sample(found, min(config.pairs, len(found)))
    found_pairs = []
    for one, (better, worse) in drawn:
        chosen, rejected = (plain_response(one.responses[at]) for at in (better, worse))
        prompt = Prompt(one.prompt, one.source, columns.get(one.source, {}))
        found_pairs.append(ChosenRejected(prompt, chosen, rejected, one.truncated))
    return found_pairs, left_out(counts)


def _columns(config: ExamConfig) -> dict[str, Mapping[str, Any]]:
    """The other columns of each record by where it was read; none if prompts are not a column of their own."""
    try:
        with silence():  # the pairs were read before, and what there is to say was said
            prompts, _ = held_out(read_prompts, replace(config, unusable="drop", max_dropped=1.0))
    except DataError:
        return {}
    return {prompt.source: prompt.columns for prompt in prompts}


def prompts_of(pairs: Sequence[ChosenRejected], count: int) -> list[ChosenRejected]:
    """The first pair of each of the first ``count`` different prompts."""
    first: dict[str, ChosenRejected] = {}
    for pair in pairs:
        first.setdefault(prompt_key(pair.prompt.prompt), pair)
    return list(first.values())[:count]


def answers_of(config: ExamConfig, pairs: Sequence[ChosenRejected]) -> list[Sequence[Completion]]:
    """Draw ``config.n`` answers of the policy to the prompt of each pair."""
    named = (
        "data", "eval_fraction", "max_new_tokens", "response_length", "temperature", "top_k", "top_p", "seed", "device",
        "dtype", "micro_batch_size", "micro_batch_tokens", "trust_remote_code", "special_tokens", "chat_template", "thinking",
        "chat_template_kwargs", "system_prompt", "columns", "raw_prompts",
    )  # fmt: skip
    sampled = SampledOptions(model=config.policy, **{name: getattr(config, name) for name in named})
    drawn = answer(sampled, config.policy, [pair.prompt for pair in pairs], best_of=config.n).completions
    return [drawn[start : start + config.n] for start in range(0, len(drawn), config.n)]
