"""The model card of a run: README.md, with the metadata that the Hub reads."""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from heedful.configs.push import PushConfig
from heedful.publishing.facts import RunFacts, Source, is_on_hub
from heedful.publishing.usage import Form, usage

TITLES = {
    "sft": "supervised fine-tuning",
    "reward": "reward modelling",
    "dpo": "DPO",
    "dpo robust": "robust DPO",
    "dpo ipo": "IPO",
    "dpo ipo-sum": "IPO",
    "dpo hinge": "SLiC",
    "dpo simpo": "SimPO",
    "dpo orpo": "ORPO",
    "kto": "KTO",
    "ppo": "PPO",
    "a2c": "A2C",
    "grpo": "GRPO",
    "online-dpo": "online DPO",
    "online-dpo ipo": "online IPO",
    "online-dpo ipo-sum": "online IPO",
    "online-dpo hinge": "online SLiC",
}
"""Of algorithms, with their loss if it is not the usual one."""
OF_NO_INTEREST = ("track", "track_project", "track_name", "track_offline", "track_wait", "rollouts", "memory_check")
"""Settings on which nothing in a model depends."""
LIMITS = {
    "sft": "It imitates its demonstrations, their mistakes and habits included.",
    "reward": "Its scores compare responses to the same prompt, of the kind that it was trained on. A policy that is trained "
    "against it finds responses unlike those, and what it says of them was never checked.",
    "dpo": "It learned which of two responses was preferred, not why. It has seen no response of its own.",
    "kto": "It learned which responses were called good and which bad, not why. It has seen no response of its own.",
}
MEANINGS = {
    "eval/loss": "the loss of training; lower is better",
    "eval/perplexity": "e to the mean negative log-likelihood of a token; lower is better",
    "eval/accuracy": "share of pairs that it orders as their labels do",
    "eval/score_mean": "mean score of its responses under what it was trained on; higher is better",
    "eval/objective": "the score as training shapes it, minus the price of the KL; higher is better",
    "eval/judge_mean": "mean score under rewards that training did not use; higher is better",
    "eval/kl": "distance from the reference in nats per response",
    "eval/response_length": "tokens of a response",
    "eval/eos_frac": "share of responses that ended by themselves",
}
"""Of metrics of evaluations, for those who do not know heedful."""
ON_ADAPTERS = (
    "These adapters were trained on a base with earlier adapters merged into it. They fit only a base that holds those "
    "too."
)
ONLINE_LIMIT = (
    "It was trained to score high under {rewards}. What they do not see has not improved and may be worse: read samples "
    "before you trust the score."
)


def card(config: PushConfig, facts: RunFacts, form: Form, *, has_curves: bool) -> str:
    """README.md: YAML metadata, how to use the model, what it reached, what it cannot, how it was made.

    Args:
        config: where it goes, under which licence.
        facts: what the run's folder says.
        form: what decides how the model is loaded.
        has_curves: whether curves.png goes out too.
    """
    parts = [
        f"---\n{metadata(config, facts, has_adapters=form.has_adapters)}---",
        f"# {config.to.partition('/')[2]}",
        _opening(config, facts),
        "## How to use it",
        usage(config.to, facts, form),
        "## Results",
        *_results(config, facts, has_curves=has_curves),
        "## Limits",
        "\n".join(f"- {limit}" for limit in [*_limits(facts), *([ON_ADAPTERS] if form.on_adapters else [])]),
        "## How it was made",
        *_making(config, facts),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def metadata(config: PushConfig, facts: RunFacts, *, has_adapters: bool) -> str:
    """The YAML between the dashes (https://huggingface.co/docs/hub/model-cards)."""
    base = config.base_model or facts.base_model
    elsewhere = [source.name.partition(":")[0] for source in facts.data if source.sha256 is None]
    datasets = [name for name in elsewhere if is_on_hub(name)]
    content: dict[str, Any] = {
        "license": config.license,
        "library_name": "peft" if has_adapters else "transformers",
        "pipeline_tag": "text-classification" if facts.algorithm == "reward" else "text-generation",
        "base_model": base,
        "base_model_relation": ("adapter" if has_adapters else "finetune") if base else None,
        "datasets": datasets,
        "language": list(config.language),
        "tags": ["heedful", facts.algorithm, *(["reward-model"] if facts.algorithm == "reward" else [])],
    }
    kept = {name: value for name, value in content.items() if value}
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)


def _opening(config: PushConfig, facts: RunFacts) -> str:
    base = config.base_model or facts.base_model
    what = "A reward model" if facts.algorithm == "reward" else "A language model"
    start = f"[{base}](https://huggingface.co/{base})" if base else "a model that is not on the Hub"
    stages = [TITLES.get(stage, stage) for stage in facts.stages]
    how = " and then ".join(filter(None, [", ".join(stages[:-1]), stages[-1]])) if stages else facts.algorithm
    steps = facts.summary.get("steps")
    which = "the model that did best on held-out data" if config.best else "the model of the last step"
    whose = "Training" if len(facts.stages) < 2 else "The last stage"
    counted = f" {whose} had {steps} steps; this is {which}." if steps else f" This is {which}."
    return f"{what} made from {start} by {how}, with heedful.{counted}"


def _results(config: PushConfig, facts: RunFacts, *, has_curves: bool) -> Iterator[str]:
    first, last = facts.summary.get("first_evaluation") or {}, facts.summary.get("last_evaluation") or {}
    if last:
        count = (facts.summary.get("data") or {}).get("held_out")
        what = f"On {count} records that were held out" if count else "On data that was held out"
        when = "training" if len(facts.stages) < 2 else "the last stage"
        yield f"{what} from training (not a public benchmark), before and after {when}:"
        rows = [
            [f"`{name}`", _number(first.get(name)), _number(value), MEANINGS.get(name, "")]
            for name, value in last.items()
        ]
        yield _table(["metric", "before", "after", "what it is"], rows)
        yield _best(config, facts)
    elif facts.summary:
        yield "Nothing was held out from training, so how well it does on other data was not measured."
    else:
        yield "Training has not come to its end, so how well it does on other data was not measured."
    for name, result in facts.results.items():
        rows = [[f"`{key}`", _number(value)] for key, value in result.items() if _is_number(value)]
        settings = result["settings"]
        on = settings.get("data") or ", ".join(settings.get("tasks") or ())
        by = ", ".join(f"`{reward}`" for reward in settings.get("rewards") or ())
        seen = (
            " (the file that it was trained on)"
            if on in (facts.settings.get("data"), facts.settings.get("ptx_data"))
            else ""
        )
        yield f"`{name}`, measured with heedful evaluate on {on}{seen}" + (f" under {by}:" if by else ":")
        yield _table(["measure", "value"], rows)
    if has_curves:
        yield "![learning curves](curves.png)"


def _best(config: PushConfig, facts: RunFacts) -> str:
    """Which evaluation was the best, and whether it is that of this model."""
    step = (facts.summary.get("best") or {}).get("step")
    if step is None:
        return ""
    which = "the one before training" if step == 0 else f"that of step {step}"
    if config.best or step == facts.summary.get("steps"):
        return f"The best evaluation was {which}, and this is that model."
    return f"The best evaluation was {which}, so this model is not the one that did best."


def _limits(facts: RunFacts) -> Iterator[str]:
    settings, summary = facts.settings, facts.summary
    weights = settings.get("reward_weights") or ()
    names = [f"`{name}`" for name in summary.get("rewards", ())]
    if len(weights) == len(names):
        names = [f"{name} (weight {weight:g})" for name, weight in zip(names, weights, strict=True)]
    rewards = ", ".join(names)
    if facts.algorithm in LIMITS:
        yield LIMITS[facts.algorithm]
    elif rewards:
        yield ONLINE_LIMIT.format(rewards=rewards)
    kl = (summary.get("last_evaluation") or {}).get("eval/kl")
    if kl is not None:
        yield f"It is {_number(kl)} nats per response away from its reference (KL on held-out prompts)."
    if settings.get("max_new_tokens"):
        yield f"It was trained on responses of at most {settings['max_new_tokens']} tokens."
    if summary.get("stopped_early"):
        yield "Training stopped before its last step, as evaluations no longer improved."
    yield "Its safety, its biases and the truth of what it writes were not measured, unless the results above say so."


def _making(config: PushConfig, facts: RunFacts) -> Iterator[str]:
    if facts.models:
        yield "Models that the last stage began with or learned from:"
        yield _table(["model", "SHA-256 of its files"], [_source(one) for one in facts.models])
    if facts.data:
        yield "Data of the last stage:"
        yield _table(["data", "SHA-256"], [_source(one) for one in facts.data])
    versions = facts.environment.get("versions") or {}
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    device = ", ".join(map(str, facts.environment.get("gpus") or ())) or "a CPU"
    yield f"Made with {said}, on {device}, seed {facts.environment.get('seed', 'unknown')}. The settings of the last stage:"
    settings = {name: value for name, value in facts.settings.items() if name not in OF_NO_INTEREST}
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=1000)
    yield f"<details><summary>config.yaml of heedful {facts.algorithm}</summary>\n\n```yaml\n{text}```\n\n</details>"
    if config.license == "other":
        yield "The licence is described by whoever published this model."


def _source(source: Source) -> list[str]:
    return [f"`{source.name}`", f"`{source.sha256}`" if source.sha256 else "not a local file"]


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _is_number(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_number, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, list | tuple):
        return " to ".join(map(_number, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def has_chat_template(files: Mapping[str, Any], tokenizer_config: Mapping[str, Any]) -> bool:
    """Whether the tokenizer among these files has a chat template."""
    return "chat_template.jinja" in files or bool(tokenizer_config.get("chat_template"))
