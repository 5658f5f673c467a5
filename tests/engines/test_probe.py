"""Models with recurrent states are sampled as they are trained; a model that is not is refused before anything is written."""

import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import (
    BertGenerationConfig,
    BertGenerationDecoder,
    GPT2Config,
    JambaConfig,
    Lfm2Config,
    Mamba2Config,
    MambaConfig,
    MiniMaxConfig,
    Qwen2Config,
    Qwen3NextConfig,
    RwkvConfig,
)

from cases import often, pairs_often
from heedful import CheckpointError, SFTConfig, train_sft
from heedful.engines import probe
from heedful.engines.probe import PROVEN, check_sampling
from heedful.engines.teacher_forced import token_outputs
from heedful.kernels.attention import use_attention
from heedful.kernels.packing import hidden_states
from heedful.models import Policy
from heedful.types import MicroBatch
from jsonl import write_jsonl
from sampling import PROMPTS, TOKENIZER, roll, sharpened

TOKENS = {"vocab_size": len(TOKENIZER), "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
SHAPE = TOKENS | {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip
STATES = TOKENS | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
WITH_STATES = {
    "lfm2": Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"] * 2),
    "qwen3_next": Qwen3NextConfig(**SHAPE, **LINEAR),
    "jamba": JambaConfig(
        **SHAPE, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=8, mamba_dt_rank=4
    ),
    "mamba": MambaConfig(**STATES),
    "mamba2": Mamba2Config(**STATES, num_heads=4, head_dim=16, n_groups=1, chunk_size=8),
}
BERT = BertGenerationConfig(**SHAPE, is_decoder=False)
REFUSED = {
    # ignores the cache
    "rwkv": (RwkvConfig(**STATES, attention_hidden_size=32), "differ by [0-9.]+ standard deviations"),
    "minimax": (
        MiniMaxConfig(**SHAPE, num_local_experts=2),
        "cannot be sampled from with a cache: ValueError: MiniMax",
    ),
    "looks ahead": (BERT, "differ by [0-9.]+ standard deviations"),
}


def made(config, dtype=torch.float32):
    lm = BertGenerationDecoder(config) if config is BERT else Auto.from_config(config)
    return Policy(use_attention(sharpened(lm)), compute_dtype=dtype)


@pytest.fixture(params=often([*WITH_STATES], ["qwen3_next", "jamba", "mamba"]))
def with_states(request):
    return made(WITH_STATES[request.param])


def test_sampled_log_probs_are_those_of_the_whole_text(with_states):
    """With every prompt twice, padding on the left, and rows that are let go on the way."""
    rollouts = roll(with_states, PROMPTS * 2, stop_ids=range(20), seed=3, max_new_tokens=24)
    assert len(set(rollouts.lengths.tolist())) > 1
    again = token_outputs(with_states, rollouts.batch, temperature=1.0, micro_batch=MicroBatch(4, 1000)).logprobs
    torch.testing.assert_close(rollouts.logprobs, again, rtol=0, atol=1e-4)


def test_padding_behind_leaves_no_trace_in_training(with_states):
    ids = torch.tensor([[40, 41, 42, 43, 44], [50, 51, 0, 0, 0]])
    trunk = with_states.lm.base_model
    found = hidden_states(trunk, ids)[1, :2]
    torch.testing.assert_close(found, hidden_states(trunk, ids[1:, :2])[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "dtype"),
    pairs_often(
        WITH_STATES,
        [torch.float32, torch.bfloat16],
        [(name, torch.bfloat16) for name in ("lfm2", "jamba", "mamba2")],
    ),
)
def test_the_check_passes_them(name, dtype):
    check_sampling(made(WITH_STATES[name], dtype), pad_id=0)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_samples_otherwise_is_refused(name):
    config, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message) as error:
        check_sampling(made(config), pad_id=0)
    assert "--sample-every 0" in str(error.value)


def test_rounding_in_half_precision_is_no_reason(monkeypatch):
    """Beyond its limit float32 decides: a model that samples otherwise is refused, and one that does not is not."""
    monkeypatch.setattr(probe, "HALF_LIMIT", 1e-9)
    policy = made(WITH_STATES["lfm2"], torch.bfloat16)
    check_sampling(policy, pad_id=0)
    assert policy.compute_dtype == torch.bfloat16
    policy = made(REFUSED["rwkv"][0], torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"more than 0\.001"):
        check_sampling(policy, pad_id=0)
    assert policy.compute_dtype == torch.bfloat16


def forward_passes(policy):
    """How many times the check runs the model."""
    seen = []
    policy.lm.register_forward_pre_hook(lambda *_: seen.append(1))
    policy.lm.base_model.register_forward_pre_hook(lambda *_: seen.append(1))
    check_sampling(policy, pad_id=0)
    return len(seen)


def test_what_is_known_to_pass_is_not_run():
    config = GPT2Config(**TOKENS, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    assert config.model_type in PROVEN
    assert forward_passes(made(config)) == 0
    windows = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    assert windows.model_type in PROVEN
    assert forward_passes(made(windows)) > 0


def test_the_run_is_as_it_was():
    """Its random numbers, its modes, its weights; dropout does not disturb the comparison."""
    policy = made(WITH_STATES["lfm2"])
    policy.lm.model.embed_tokens.register_forward_hook(
        lambda module, _, states: torch.nn.functional.dropout(states, 0.5, module.training)
    )
    policy.train()
    weights = {name: p.clone() for name, p in policy.named_parameters()}
    state = torch.get_rng_state()
    check_sampling(policy, pad_id=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in policy.modules())
    assert all(torch.equal(weights[name], p) for name, p in policy.named_parameters())


def test_sft_says_so_before_it_writes_and_trains_without_samples(tmp_path):
    """It used to train all its steps and to die in the table of samples."""
    lm = made(REFUSED["rwkv"][0]).lm
    lm.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    records = [{"prompt": f"问{i}", "completion": "答。" * (i + 1)} for i in range(4)]
    settings = {
        "model": str(tmp_path / "model"), "data": write_jsonl(tmp_path / "data.jsonl", records), "eval_fraction": 0.0,
        "output": tmp_path / "run", "batch_size": 2, "max_steps": 2, "device": "cpu", "dtype": "float32",
    }  # fmt: skip
    with pytest.raises(CheckpointError, match="RwkvForCausalLM would sample with other probabilities"):
        train_sft(SFTConfig(**settings))
    assert not (tmp_path / "run").exists()
    train_sft(SFTConfig(**settings, sample_every=0))
    assert (tmp_path / "run" / "final" / "config.json").is_file()
