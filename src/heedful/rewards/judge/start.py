"""Make judges from their strings, and refuse what cannot work, before anything is written."""

import os
from collections.abc import Sequence
from urllib.parse import urlsplit, urlunsplit

from heedful.configs.checks import refuse
from heedful.configs.judging import KEY, JudgeOptions
from heedful.configs.scoring import RewardOptions
from heedful.errors import ConfigError
from heedful.redact import redact
from heedful.rewards.endpoint import Endpoint, check_url
from heedful.rewards.judge.api import ChatAPI, address
from heedful.rewards.judge.cache import check_cache
from heedful.rewards.judge.modes import make_mode
from heedful.rewards.judge.reward import JudgeReward
from heedful.rewards.judge.words import read_rubric

FORM = "judge:http://HOST:PORT/v1#MODEL"
IN_FLIGHT = 64
"""Requests in flight at a time, if nothing else is said."""
FIRST_WAIT = 0.5
"""Seconds before the first new try."""


def is_judge(reward: object) -> bool:
    """Whether a reward is the string of a judge."""
    return isinstance(reward, str) and reward.startswith("judge:")


def check_judge_string(reward: str) -> None:
    """Check the form of a judge's string. Raises ConfigError."""
    url, model = _split(reward)
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--rewards: {redact(reward)!r} is no judge; write {FORM}, or https://")
    check_url(url)
    if not model:
        raise ConfigError(f"--rewards: {redact(reward)!r} names no model; write {FORM}")
    if urlsplit(url).path.rstrip("/").endswith("/chat/completions"):
        raise ConfigError(f"--rewards: {redact(reward)!r} ends in /chat/completions, which heedful adds; write {FORM}")


def check_judges(wanted: Sequence[object], options: RewardOptions) -> None:
    """Refuse settings of judges if there is none, and those that judges cannot work with. Raises ConfigError.

    Args:
        wanted: every reward and whatever else scores responses.
        options: the settings.
    """
    if not any(map(is_judge, wanted)):
        names = [name for name in JudgeOptions.__dataclass_fields__ if name.startswith("judge_")]
        refuse(options, *names, because=f"is about judges, and there is none; leave it out, or name one: {FORM}")
        return
    read_rubric(options.judge_rubric)
    check_cache(options.judge_cache)
    key = os.environ.get(options.judge_key_env, "")
    if options.judge_key_env != KEY and not key:
        raise ConfigError(
            f"--judge-key-env {options.judge_key_env}: this environment variable is not set, or empty; set it to the judge's "
            "API key"
        )
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(
            f"--judge-key-env {options.judge_key_env}: this environment variable holds something else than visible ASCII "
            "characters, so it cannot be sent in a header; set it to the judge's API key"
        )
    if options.judge_compares and options.group_size < 2:
        raise ConfigError(
            f"--judge-mode {options.judge_mode} compares responses to the same prompt, and here each has one: set "
            "--samples-per-prompt in training, use heedful evaluate win-rate or best-of-n to measure, or use --judge-mode "
            "score"
        )


def check_comparing(
    wanted: Sequence[object],
    best_by: Sequence[str],
    options: RewardOptions,
    *,
    holds_out: bool,
    score_norm_samples: int,
) -> None:
    """Refuse a training run that needs a comparing judge's score of responses that stand alone. Raises ConfigError.

    Samples for a score norm without the judge would set the scale of something else than what is trained on. Held-out
    responses without it do not say which model is best; sampled in groups they would not either, as the places within a
    group have the same mean whatever the model.

    Args:
        wanted: the rewards.
        best_by: what judges held-out responses.
        options: the settings.
        holds_out: whether prompts are held out.
        score_norm_samples: how many responses are scored before training.
    """
    if not options.judge_compares:
        return
    has_judge = any(map(is_judge, wanted))
    because = f"--judge-mode {options.judge_mode} compares responses to the same prompt"
    if any(map(is_judge, best_by)):
        raise ConfigError(f"{because}, and --best-by judges held-out responses one by one; name another reward there")
    if has_judge and score_norm_samples:
        raise ConfigError(
            f"{because}, and --score-norm-samples takes one response to each prompt, of which it says nothing; leave it out, "
            "or use --score-norm-running"
        )
    if has_judge and holds_out and (not best_by or all(map(is_judge, wanted))):
        named = "" if all(map(is_judge, wanted)) else ", or choose best/ by another reward (--best-by)"
        raise ConfigError(
            f"{because}, and held-out prompts have one response each, of which it says nothing; hold none out "
            f"(--eval-fraction 0, no --eval-data){named}"
        )


def load_judge(reward: str, options: RewardOptions) -> JudgeReward:
    """The judge of a string. Raises ConfigError."""
    check_judge_string(reward)
    url, model = _split(reward)
    endpoint = Endpoint(
        f"judge:{url}#{model}",
        address(url),
        gives="verdicts",
        remedy=f"fewer requests at a time (--reward-concurrency {options.reward_concurrency or IN_FLIGHT})",
        timeout=options.answer_timeout,
        retry_seconds=60 * options.reward_retry_minutes,
        concurrency=options.reward_concurrency or IN_FLIGHT,
        token=os.environ.get(options.judge_key_env),
        first_wait=FIRST_WAIT,
    )
    mode = make_mode(options.judge_mode, read_rubric(options.judge_rubric), options.judge_scale)
    return JudgeReward(
        ChatAPI(endpoint, model, options),
        mode,
        group_size=options.group_size if options.judge_compares else 1,
        columns=options.judge_columns,
        cache=options.judge_cache,
    )


def _split(reward: str) -> tuple[str, str]:
    """The address and the model of a judge."""
    try:
        parts = urlsplit(reward.removeprefix("judge:"))
    except ValueError as error:
        raise ConfigError(f"--rewards: {redact(reward)!r} is no judge ({error}); write {FORM}") from error
    return urlunsplit(parts._replace(fragment="")), parts.fragment
