"""The experts of a mixture are most of its weights, in parameters of three dimensions: they get adapters too."""

import warnings

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM as Auto
from transformers import GraniteMoeConfig, JambaConfig, MixtralConfig, Qwen3MoeConfig

from heedful.checkpoints.adapters import save_model
from heedful.checkpoints.load import load_causal_lm, load_trunk
from heedful.checkpoints.lora import add_adapters, expert_parameters
from heedful.checkpoints.tiny import byte_tokenizer
from heedful.configs.sft import SFTConfig
from heedful.errors import ConfigError
from heedful.kernels.layout import hidden_states
from heedful.kernels.sampling_copy import same_weights

SHAPE = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "num_experts_per_tok": 2,
}  # fmt: skip
MIXTURES = {
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, num_experts=4, moe_intermediate_size=24, head_dim=8),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, head_dim=8),
    "granitemoe": GraniteMoeConfig(**SHAPE, num_local_experts=4),  # a module for each parameter
}
IDS = byte_tokenizer()("今天天气怎么样？", return_tensors="pt").input_ids


def options(**changes):
    return SFTConfig(**{"model": "m", "data": "d", "output": "o", "lora_rank": 2} | changes)


@pytest.fixture(params=MIXTURES)
def folder(request, tmp_path):
    torch.manual_seed(2)
    lm = Auto.from_config(MIXTURES[request.param])
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(5) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    lm.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def logits(lm):
    with torch.no_grad():
        return lm.eval()(input_ids=IDS).logits


def adapted(folder, **changes):
    """A model with adapters that change something."""
    lm = load_causal_lm(str(folder))
    add_adapters(lm, options(**changes), base=str(folder), seed=3)
    torch.manual_seed(4)
    for name, parameter in lm.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return lm


def test_most_weights_are_experts_and_all_are_adapted(folder):
    lm = load_causal_lm(str(folder))
    before, total = logits(lm), sum(p.numel() for p in lm.base_model.layers.parameters())
    experts = expert_parameters(lm)
    assert sum(lm.get_parameter(name).numel() for name in experts) > 0.6 * total
    reference = same_weights(lm)
    add_adapters(lm, options(), base=str(folder), seed=3)
    # Fresh adapters change nothing but the order of sums: W + 0 is a copy, with a layout of its own.
    torch.testing.assert_close(logits(lm), before, rtol=0.0, atol=1e-6)
    trained = [name for name, p in lm.named_parameters() if p.requires_grad]
    assert all(".lora_" in name for name in trained)
    linear = [m for m in load_trunk(str(folder)).modules() if isinstance(m, torch.nn.Linear)]
    assert len(trained) == 2 * (len(linear) + len(experts))
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if ".lora_B." in name:
                parameter.add_(0.1)
    assert (logits(lm) - before).abs().max() > 0.1
    assert torch.equal(logits(reference), before), "the reference shares the weights, not the adapters"


def test_every_adapter_learns(folder):
    lm = adapted(folder)
    lm.train()(input_ids=IDS).logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in lm.parameters() if p.requires_grad)
    assert all(p.grad is None for p in lm.parameters() if not p.requires_grad)


def test_saved_adapters_come_back_here_and_in_peft(folder, tmp_path):
    """Merged into the model and into its bare trunk."""
    lm = adapted(folder)
    expected = logits(lm)
    save_model(lm, tmp_path / "adapters")
    merged = load_causal_lm(str(tmp_path / "adapters"))
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    assert merged.state_dict().keys() == load_causal_lm(str(folder)).state_dict().keys()
    trunk = load_trunk(str(tmp_path / "adapters")).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            hidden_states(trunk, IDS), hidden_states(merged.eval().base_model, IDS), rtol=1e-4, atol=1e-4
        )
    with warnings.catch_warnings(action="ignore"):
        torch.testing.assert_close(
            logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters")), expected, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("targets", ["q_proj,v_proj", "q_proj,experts.down_proj"])
def test_named_targets(tmp_path, targets):
    """Of one of a module's two parameters too."""
    torch.manual_seed(2)
    Auto.from_config(MIXTURES["qwen3_moe"]).save_pretrained(tmp_path / "base")
    lm = adapted(tmp_path / "base", lora_targets=targets)
    assert any("experts.lora_A" in name for name, _ in lm.named_parameters()) == ("experts" in targets)
    save_model(lm, tmp_path / "adapters")
    torch.testing.assert_close(logits(load_causal_lm(str(tmp_path / "adapters"))), logits(lm), rtol=1e-4, atol=1e-4)


def test_dropout_in_front_of_experts_is_refused(folder):
    with pytest.raises(
        ConfigError, match=r"--lora-dropout 0.1 cannot be in front of .*experts.*--lora-targets .*q_proj"
    ):
        add_adapters(load_causal_lm(str(folder)), options(), base=str(folder), seed=3, dropout=0.1)


def test_a_convolution_is_no_expert():
    lm = Auto.from_config(
        JambaConfig(**SHAPE, num_experts=2, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8)
    )
    assert any(p.ndim == 3 for name, p in lm.named_parameters() if "conv1d" in name)
    assert all("experts" in name for name in expert_parameters(lm))
