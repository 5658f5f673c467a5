"""What only measures or answers keeps its matrices in the precision of the products, as a GPU has little memory."""

import pytest
import torch

from heedful import (
    AccuracyConfig,
    ChatConfig,
    KLConfig,
    PerplexityConfig,
    ScoresConfig,
    evaluate_accuracy,
    evaluate_kl,
    evaluate_perplexity,
    evaluate_scores,
)
from heedful.apps.rounds.sample import load_writers
from heedful.cli.chat import chat
from heedful.configs.tools import SampleConfig
from heedful.evaluate.measuring import machine_of
from heedful.kernels import device
from heedful.models import Policy, RewardModel

SHORT = {"device": "cpu", "dtype": "bfloat16", "micro_batch_size": 4}
SHORT_CHAT = {"device": "cpu", "dtype": "bfloat16", "max_new_tokens": 2}
SAMPLED = SHORT | {"max_new_tokens": 2, "max_prompts": 2}


def ended(_prompt):
    raise EOFError


RUNS = {
    "scores": lambda model, _, data: evaluate_scores(
        ScoresConfig(model=model, data=data, rewards=("rule:digits",), **SAMPLED)
    ),
    "kl": lambda model, _, data: evaluate_kl(KLConfig(model=model, reference=model, data=data, **SAMPLED)),
    "perplexity": lambda model, _, data: evaluate_perplexity(PerplexityConfig(model=model, data=data, **SHORT)),
    "accuracy": lambda _, reward, data: evaluate_accuracy(AccuracyConfig(reward_model=reward, data=data, **SHORT)),
    "chat": lambda model, _reward, _data: chat(ChatConfig(model=model, raw=True, **SHORT_CHAT), ended),
    "sample and round": lambda model, _, data: load_writers(
        SampleConfig(models=(model,), data=data, output="o", **SHORT)
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_loaded_as_the_products_read_it(tiny, planted_model, written, monkeypatch, name):
    """On a CPU that keeps frozen models so, as every other device does."""
    seen = []
    for kind in (Policy, RewardModel):

        def arrives(model, *args, to=kind.to):
            seen.append({m.weight.dtype for m in model.modules() if type(m).__name__.endswith(("Linear", "Conv1D"))})
            return to(model, *args)

        monkeypatch.setattr(kind, "to", arrives)
    monkeypatch.setattr(device, "frozen_dtype", lambda _device, compute_dtype: compute_dtype)
    records = [{"prompt": "甲", "completion": "ab", "chosen": "a!", "rejected": "b?"}]
    RUNS[name](tiny(), planted_model, written(records * 2))
    assert seen
    assert all(torch.bfloat16 in dtypes for dtypes in seen)


def test_reward_models_are_loaded_as_the_settings_say():
    """For measurements and for the exam: their scores depend on each of these."""
    given = {"device": "cpu", "dtype": "bfloat16", "micro_batch_size": 3, "special_tokens": "read"}
    found = machine_of(ScoresConfig(model="m", data="d", rewards=("rule:digits",), **given))
    assert found["special_tokens"] == "read"
    assert found["compute_dtype"] == torch.bfloat16
    assert found["device"] == torch.device("cpu")
    assert found["micro_batch"].rows == 3
