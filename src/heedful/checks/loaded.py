"""Checks of models, rewards and settings that need no pass through a model."""

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heedful.checks.encoded import SAMPLE
from heedful.checks.findings import Finding, LoadedRun, TokenRow, ending, finding, spread, token_texts
from heedful.configs.options import ADAPTER_RATE, TrainingOptions
from heedful.data.chat import RewardInputs
from heedful.data.encoding import BYTES
from heedful.data.learned import strings_for_chat
from heedful.errors import CheckpointError
from heedful.files import read_object
from heedful.kernels.weights import SMALLEST_ROW
from heedful.models.reward_model import RewardModel, padding_id
from heedful.rewards import Reward
from heedful.rewards.models import model_rewards
from heedful.rewards.own_answers import say_unmatched, unmatched_answers
from heedful.training.thresholds import (
    ABOVE_MEASURED,
    CHANCE,
    ERRORS,
    MEASURED_ON,
    MEASURED_RATE,
    NEAR_THE_MEAN,
    SLOW_ADAPTERS,
)
from heedful.training.verdict import Verdict
from heedful.types import Prompt, Text

ROWS_FOR_MEDIAN = 4096
"""Rows of an embedding, spread evenly, that say what is usual: all of a large one would take a second."""


def own_answer(rewards: Sequence[Reward], prompts: Sequence[Prompt]) -> Finding | None:
    """Which answers of records can no response match?"""
    found = unmatched_answers(rewards, prompts)
    if not found:
        return None
    evidence = f"{found[0].source}: {found[0].because}"
    return finding("own-answer", "fail", say_unmatched(found, prompts), evidence)


def templates_differ(
    rewards: Sequence[Reward], tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Text]
) -> Finding | None:
    """Do reward models that share the policy's vocabulary have its chat template?

    One of another vocabulary is somebody else's and was trained with its own. Only conversations are rendered.
    """
    if not any(not isinstance(prompt, str) for prompt in prompts):
        return None
    for name, reward in model_rewards(rewards):
        theirs, ours = reward.inputs.tokenizer.chat_template, tokenizer.chat_template
        is_decoder = reward.inputs.renderer is not None
        if is_decoder and theirs != ours and _same_words(reward.inputs.tokenizer, tokenizer):
            at = next((i for i, (a, b) in enumerate(zip(str(ours), str(theirs), strict=False)) if a != b), 0)
            return finding(
                "templates-differ",
                "warn",
                f"{name} has the policy's vocabulary and another chat template",
                f"from character {at} on: policy {str(ours)[at : at + 40]!r}, reward model {str(theirs)[at : at + 40]!r}",
            )
    return None


def raw_prompts(loaded_run: LoadedRun) -> Finding | None:
    """Do strings meet a model, or else a reward model, that learned conversations?"""
    if loaded_run.config.raw_prompts:
        return None
    config = None if loaded_run.reward_model is not None else loaded_run.model.generation_config
    readers = [("", loaded_run.renderer, None if config is None else config.eos_token_id)]
    readers += [(f"{name}: ", reward.inputs.renderer, None) for name, reward in model_rewards(loaded_run.rewards)]
    for name, renderer, generation_eos in readers:
        found = None if renderer is None else strings_for_chat(renderer, loaded_run.records[0], generation_eos)
        if found is not None:
            fix = found.fix(loaded_run.config.columns)
            return finding("raw-prompts", "warn", f"{name}{found.what}", found.evidence, fix=fix)
    return None


def _same_words(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers have the same tokens, but for a few added ones."""
    added = {*one.get_added_vocab(), *other.get_added_vocab()}
    words, others = ({token: i for token, i in each.get_vocab().items() if token not in added} for each in (one, other))
    return words == others


def score_position(model: RewardModel, rows: Sequence[TokenRow], tokenizer: PreTrainedTokenizerBase) -> Finding | None:
    """Is the last token of texts the one at which the score is read?

    transformers, and heedful with it, reads a decoder at its last token that is not padding.
    """
    pad = padding_id(model.classifier)
    found = [row for row in spread(rows, SAMPLE) if row.response and row.response[-1] == pad]
    if model.reads is None or not found:
        return None
    first = found[0]
    return finding(
        "score-position",
        "warn",
        "texts end with the token that the reward model takes for padding, so the score is read before it",
        f"{first.source} ends with {ending(tokenizer, first.ids)}; padding is "
        f"{token_texts(tokenizer, [pad])[0]!r} ({pad})",
    )


def reward_rows(inputs: RewardInputs, prompts: Iterable[tuple[str, Text]]) -> list[TokenRow]:
    """A short answer to each prompt as a reward model reads it. Prompts come with where they were read."""
    return [TokenRow(source, (), inputs.encode(prompt, "an answer")["input_ids"]) for source, prompt in prompts]


def untrained_tokens(
    model: PreTrainedModel, rows: Sequence[TokenRow], tokenizer: PreTrainedTokenizerBase, *, needs: Sequence[int] = ()
) -> Finding | None:
    """Have tokens of the texts, or those that a run ``needs``, embeddings that are next to zero, or the mean of all?

    A matrix that is divided among ranks is passed over.
    """
    weight = model.get_input_embeddings().weight.detach()
    if type(weight) is not torch.Tensor or not weight.is_floating_point():
        return None
    looked_at = spread(rows, SAMPLE)
    used = {i for row in looked_at for ids in (row.prompt, row.response) for i in ids} | set(needs)
    ids = torch.tensor(sorted(i for i in used if 0 <= i < len(weight)), device=weight.device)
    sample = weight[torch.linspace(0, len(weight) - 1, min(len(weight), ROWS_FOR_MEDIAN)).long()].float()
    mean, read = sample.mean(dim=0), weight[ids].float()
    is_zero = read.abs().amax(dim=1) <= SMALLEST_ROW * sample.abs().amax(dim=1).median()
    usual = (sample - mean).norm(dim=1).median()
    is_untrained = is_zero | ((read - mean).norm(dim=1) <= NEAR_THE_MEAN * usual)
    found = [i for i in ids[is_untrained].tolist() if tokenizer.convert_ids_to_tokens(i) not in BYTES]
    if not found:
        return None
    row = next((row for row in looked_at if not set(found).isdisjoint(row.ids)), None)
    where = "the token that ends responses" if row is None else f"first in {row.source}"
    names = ", ".join(f"{tokenizer.convert_ids_to_tokens(i)!r} ({i})" for i in found[:5])
    return finding(
        "untrained-tokens",
        "warn",
        f"{len(found)} token{'s' * (len(found) > 1)} of the texts {'have' if len(found) > 1 else 'has'} an embedding next to "
        "zero, or the mean of all rows",
        f"{names}; {where}",
    )


def zero_layer(model: PreTrainedModel) -> Finding | None:
    """Are all matrices of a layer zero, or the weights of one of its norms?

    Adapters, and matrices that are quantized or divided among ranks, are passed over. So is a norm if all of its kind are
    zero: then their factor is 1 + weight.
    """
    layers = [
        (f"{name}.{i}", layer)
        for name, modules in model.named_modules()
        if isinstance(modules, nn.ModuleList) and not re.search(r"\.\d+(\.|$)", name)
        for i, layer in enumerate(modules)
    ]
    found = []
    for name, layer in layers:
        matrices = [
            weight.detach()
            for of, weight in layer.named_parameters()
            if weight.ndim > 1
            and weight.is_floating_point()
            and type(weight.detach()) is torch.Tensor
            and "lora_" not in of
        ]
        if matrices and not any(weight.any() for weight in matrices):
            found.append((name, len(matrices)))
    if not found:
        return _zero_norm(layers)
    names = ", ".join(name for name, _ in found[:4]) + ", ..." * (len(found) > 4)
    return finding(
        "zero-layer",
        "fail",
        f"all weights of {names} are zero",
        f"{len(found)} of {len(layers)} layers; {found[0][1]} matrices of {found[0][0]}",
    )


def _zero_norm(layers: Sequence[tuple[str, nn.Module]]) -> Finding | None:
    norms = [
        (f"{name}.{inside}", type(module), bool(module.weight.any()))
        for name, layer in layers
        for inside, module in layer.named_modules()
        if "Norm" in type(module).__name__ and type(getattr(module, "weight", None)) is nn.Parameter
    ]
    found = [name for name, kind, works in norms if not works and (kind, True) in {one[1:] for one in norms}]
    if not found:
        return None
    names = ", ".join(found[:4]) + ", ..." * (len(found) > 4)
    evidence = f"{len(found)} of {len(norms)} norms in layers; what is read through one of zeros is always the same"
    return finding("zero-layer", "fail", f"all weights of {names} are zero", evidence)


def guesses(name: str, folder: Path) -> Finding | None:
    """Was a reward model no better than chance on the held-out pairs of its own run? Other folders have no such record."""
    try:
        content = read_object(folder.parent / "summary.json", "") if folder.name == "final" else {}
    except CheckpointError:  # there is none, or it is damaged
        return None
    measured = Verdict.read(content)
    if content.get("algorithm") != "reward" or measured is None or measured.prompts < MEASURED_ON:
        return None
    if measured.last > CHANCE + ERRORS * math.sqrt(CHANCE * (1 - CHANCE) / measured.prompts):
        return None
    what = f"{name} had {measured.last:.0%} of the held-out pairs right when its own run ended, no more than a guess"
    return finding(
        "reward-model-guesses", "warn", what, f"{measured.metric} on {measured.prompts} prompts in {folder.parent}"
    )


def learning_rate(config: TrainingOptions, width: int) -> Finding | None:
    """Is the learning rate too high for a model of this width, or that of all weights given to adapters?"""
    rate, has_adapters = config.learning_rate, config.lora_rank > 0
    default = float(type(config).learning_rate)
    if has_adapters and rate <= SLOW_ADAPTERS * default:
        return finding(
            "learning-rate",
            "warn",
            f"--learning-rate {rate:g} is one for all weights, and with --lora-rank only adapters learn",
            f"the default is {ADAPTER_RATE * default:g} for adapters and {default:g} for all weights",
            fix=f"leave --learning-rate out, or give about {ADAPTER_RATE * default:g}",
        )
    factor = ADAPTER_RATE if has_adapters else 1
    measured = MEASURED_RATE[config.rate_is_of] / width * factor
    if rate <= ABOVE_MEASURED * measured:
        return None
    return finding(
        "learning-rate",
        "warn",
        f"--learning-rate {rate:g} is high for a model of width {width}",
        f"the recipes that were measured stay below {measured:.2g} at this width; the default is {default * factor:g}",
        fix=f"leave --learning-rate out, or lower it to {measured:.2g}",
    )
