"""A token per row in few operations: the numbers of transformers' code, and a budget of operations."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from cases import often
from heedful import SFTConfig
from heedful.configs.options import SamplingOptions
from heedful.engines.decoder import Decoder, SamplingModel
from heedful.engines.generate import generate
from heedful.engines.one_token import OneToken
from heedful.kernels.attention import use_attention
from heedful.kernels.cpu.layers import use_lean_layers
from heedful.kernels.weights import inference_copy, join_matrices, refresh
from heedful.models import Policy, add_adapters
from sampling import PROMPTS, TOKENIZER

SHAPE = {
    "vocab_size": len(TOKENIZER), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
CPU = torch.device("cpu")


def nothing(_module, _inputs, _output):
    """A hook, for which a model's own code is called."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", often(["llama", "qwen2", "qwen3"], ["qwen2", "qwen3"]))
def test_logits_are_those_of_the_models_own_code(policies, architecture, dtype):
    """With rows of different lengths, rows that leave, and one that begins later."""
    known = Policy(copy.deepcopy(policies[architecture].lm), compute_dtype=dtype).eval()
    own = copy.deepcopy(known)
    own.lm.register_forward_hook(nothing)
    assert (OneToken.is_known(known.lm), OneToken.is_known(own.lm)) == (True, False)
    decoders = [Decoder(SamplingModel(policy), num_rows=5, longest=64, pad_id=0) for policy in (known, own)]

    def both(read):
        found, expected = map(read, decoders)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        return found.argmax(-1)

    tokens = both(lambda decoder: decoder.read_prompts(PROMPTS))
    for _ in range(3):
        tokens = both(lambda decoder: decoder.read_tokens(tokens))  # noqa: B023  called at once
    for decoder in decoders:
        decoder.keep([3, 1, 4])
    tokens = tokens[[3, 1, 4]]
    tokens = both(lambda decoder: decoder.read_tokens(tokens))
    tokens[1:2] = both(lambda decoder: decoder.read_prompts(PROMPTS[:1], [1]))
    both(lambda decoder: decoder.read_tokens(tokens))


ROTATION = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("kind", "is_known"), [("yarn", True), ("linear", True), ("dynamic", False)], ids=["yarn", "linear", "dynamic"]
)
def test_rotations_that_depend_on_the_text_are_left_to_the_model(kind, is_known):
    lm = LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=ROTATION | {"rope_type": kind}))
    assert OneToken.is_known(lm) == is_known


def test_other_models_are_left_to_their_own_code():
    assert not OneToken.is_known(MistralForCausalLM(MistralConfig(**SHAPE)))


class Operations(TorchDispatchMode):
    """Counts operations that compute: not those that return another view of their input."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **kwargs or {})
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        is_view = isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() in given
        self.count += function._schema.is_mutable or not (is_view or isinstance(made, list | tuple))
        return made


def operations(policy, tokens, **options):
    with Operations() as counted:
        generate(
            policy, [[5 + i, 6, 7] for i in range(8)], SamplingOptions(max_new_tokens=tokens, response_length="fixed"),
            stop_ids=(), pad_id=0, generator=torch.Generator().manual_seed(0), **options,
        )  # fmt: skip
    return counted.count


@pytest.mark.parametrize(("adapters", "most"), [("none", 830), ("merged", 830), ("beside", 1620)])
def test_a_token_takes_few_operations(tmp_path, adapters, most):
    """Of the 28 layers of Qwen3-0.6B, each of which adds as many as the one before. By transformers' code it took 1,485, and
    2,269 with adapters; its generate takes 1,379."""
    counts = []
    for layers in (1, 2):
        lm = Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"num_hidden_layers": layers}))
        lm = use_lean_layers(use_attention(lm.eval()), CPU)
        if adapters != "none":
            add_adapters(lm, SFTConfig(model="m", data="d", output="o", lora_rank=4), base=str(tmp_path), seed=3)
        options = {"merge_adapters": adapters == "merged"}
        counts.append((operations(Policy(lm), 8, **options) - operations(Policy(lm), 4, **options)) / 4)
    assert counts[0] + 27 * (counts[1] - counts[0]) <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_adapters_sample_as_those_beside_the_matrices(policies, tmp_path, dtype):
    """Up to rounding, with the adapters of the moment, and without a change of the model in training."""
    policy = Policy(copy.deepcopy(policies["qwen3"].lm), compute_dtype=dtype).eval()
    add_adapters(policy.lm, SFTConfig(model="m", data="d", output="o", lora_rank=4), base=str(tmp_path), seed=3)
    for _ in range(2):
        with torch.no_grad():
            for name, parameter in policy.lm.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.3)
        before = {name: tensor.clone() for name, tensor in policy.lm.state_dict().items()}
        models = [SamplingModel(policy, merge_adapters=merges) for merges in (False, True)]
        beside, merged = (
            Decoder(model, num_rows=5, longest=64, pad_id=0).read_prompts(PROMPTS).log_softmax(-1) for model in models
        )
        assert not any("lora" in name for name, _ in models[1].lm.named_modules())
        tolerance = 1e-4 if dtype == torch.float32 else 0.1 * float(beside.std())
        torch.testing.assert_close(merged, beside, rtol=0, atol=tolerance)
        assert all(torch.equal(tensor, before[name]) for name, tensor in policy.lm.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_matrices_beside_each_other_are_one_product(policies, architecture, dtype):
    """Of queries, keys and values, and of gate and up, as on a GPU: up to rounding the same, in fewer operations, and weights
    that are refreshed in place are the new ones. qwen2's have biases, and stay apart."""
    policy = Policy(copy.deepcopy(policies[architecture].lm), compute_dtype=dtype).eval()
    lm = copy.deepcopy(policy.lm)
    copied = inference_copy(lm, dtype)
    join_matrices(copied, but=[policy.lm.lm_head.weight])
    found = []
    for _ in range(2):
        model = SamplingModel(policy)
        model.lm = inference_copy(policy.lm, dtype)
        slots = [Decoder(model, num_rows=5, longest=64, pad_id=0) for _ in range(2)]
        model.lm = copied
        slots[1].step = OneToken(copied, dtype)
        counts = []
        for decoder in slots:
            tokens = decoder.read_prompts(PROMPTS).argmax(-1)
            with Operations() as counted:
                found.append(decoder.read_tokens(tokens))
            counts.append(counted.count)
        layers = lm.config.num_hidden_layers
        assert counts[0] - counts[1] == layers * (1 if architecture == "qwen2" else 3)
        rounding = 1e-6 if dtype == torch.float32 else 2**-7  # of the largest logit
        torch.testing.assert_close(found[-1], found[-2], rtol=0, atol=10 * rounding * float(found[-2].abs().max()))
        with torch.no_grad():
            policy.lm.model.layers[0].self_attn.q_proj.weight.add_(0.1)
        refresh(copied, policy.lm)
    assert (found[-1] - found[1]).abs().max() > 0.01
