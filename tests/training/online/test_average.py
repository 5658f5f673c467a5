"""The moving average of a policy's weights: its recursion, and that it is what is evaluated and saved."""

import pytest
import torch
from torch import nn

from heedful import train_ppo
from heedful.algorithms.online.average import WeightAverage, averaged
from heedful.models import load_causal_lm
from heedful.models.save import VALUE_HEAD, load_tensors


def test_golden_average():
    """Decay 0.9 over the weights 1 (the start), 2 and 3; a weight that does not train is left alone."""
    module = nn.Linear(1, 1).double()
    nn.init.constant_(module.weight, 1.0)
    nn.init.constant_(module.bias.requires_grad_(False), 7.0)
    average = WeightAverage(module, 0.9)
    for weight in (2.0, 3.0):
        nn.init.constant_(module.weight, weight)
        average.update()
    with average.in_place():
        assert float(module.weight.detach()) == pytest.approx(0.9 * (0.9 * 1 + 0.1 * 2) + 0.1 * 3, rel=1e-12)
        assert module.bias.item() == 7.0
    assert float(module.weight.detach()) == 3.0
    with pytest.raises(RuntimeError, match="full"), averaged(average):
        raise RuntimeError("the disk is full")
    assert float(module.weight.detach()) == 3.0, "the weights come back after an error too"


def test_the_average_of_weights_that_stay_is_those_weights():
    """Bit for bit, also where decay is no binary fraction."""
    module = nn.Linear(50, 50)
    before = module.weight.detach().clone()
    average = WeightAverage(module, 0.992)
    for _ in range(5):
        average.update()
    with average.in_place():
        assert torch.equal(module.weight, before)


def test_the_average_is_evaluated_and_saved_and_the_live_policy_samples(config, length, numbers, tmp_path):
    """Two runs of one seed and one optimizer step a batch: training is the same, the saved models are the average."""
    common = {"rollout_batch_size": 4, "minibatch_size": 4, "samples_per_prompt": 1, "ppo_epochs": 1}
    common |= {"max_new_tokens": 8, "eval_every": 1, "save_every": 1, "learning_rate": 1e-2}
    live = config(output=tmp_path / "live", **common)
    averages = config(output=tmp_path / "averages", ema_decay=0.5, **common)
    train_ppo(live, rewards=[length])
    train_ppo(averages, rewards=[length])
    weights = [load_causal_lm(live.model).state_dict()]
    weights += [load_causal_lm(str(live.output / "checkpoints" / f"step-00000{i}")).state_dict() for i in (1, 2)]
    heads = [load_tensors(live.output / "checkpoints" / f"step-00000{i}" / VALUE_HEAD)["weight"] for i in (1, 2)]
    saved = load_causal_lm(str(averages.output / "final")).state_dict()
    for name, start in weights[0].items():
        expected = 0.25 * start + 0.25 * weights[1][name] + 0.5 * weights[2][name]
        torch.testing.assert_close(saved[name], expected, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(saved["transformer.wte.weight"], weights[2]["transformer.wte.weight"])
    head = load_tensors(averages.output / "final" / VALUE_HEAD)["weight"]
    torch.testing.assert_close(head, 0.25 * heads[0] + 0.5 * heads[1], rtol=1e-5, atol=1e-7)
    a, b = (numbers(run.output) for run in (live, averages))
    steps = [(x, y) for x, y in zip(a, b, strict=True) if "loss/policy" in x]
    assert len(steps) == 2
    assert steps == [(x, x) for x, _ in steps], "training is the same"
    assert [x["eval/kl"] for x in a if "eval/kl" in x] != [x["eval/kl"] for x in b if "eval/kl" in x]
