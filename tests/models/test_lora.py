"""Adapters change nothing until they learn, learn alone, and are the same model wherever they are loaded."""

import copy
import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
)

from architectures import one_decoder
from heedful import CheckpointError, ConfigError, MergeConfig, SFTConfig, merge_model
from heedful.data.chat import RewardInputs
from heedful.engines.decoder import SamplingModel
from heedful.kernels.weights import same_weights
from heedful.models import (
    Policy,
    add_adapters,
    byte_tokenizer,
    load_causal_lm,
    load_policy,
    load_reward_model,
    load_tokenizer,
    load_trunk,
    load_value_model,
    save_policy,
    save_reward_model,
    save_value_model,
)
from heedful.models.adapters import adapter_chain, attach_adapter, has_adapters, save_model
from heedful.models.heads import checkpoint_layers, disable_dropout
from heedful.models.source import load_config, resolve

# PEFT's own classes ask a transformers property by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

CPU = torch.device("cpu")
IDS = torch.tensor([[20, 31, 42, 53, 64, 75]])
LORA_NAMES = {"lora_A", "lora_B"}


def options(**settings):
    return SFTConfig(model="m", data="d", output="o", **({"lora_rank": 4} | settings))


def with_adapters(model, base, *, trained=True, dropout=0.0, **settings):
    """Adapters on a model; trained ones change its weights as much as the weights are large."""
    add_adapters(model, options(**settings), base=str(base), seed=3, dropout=dropout)
    if trained:
        randomise(model)
    return model


def randomise(model):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))


def logits(model, ids=IDS):
    with torch.no_grad():
        return model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits


@pytest.fixture
def adapter(decoder, tmp_path):
    """A folder of trained adapters on each decoder in turn, and the logits of the model that was saved."""
    lm = with_adapters(load_causal_lm(decoder), decoder)
    save_policy(Policy(lm), load_tokenizer(decoder), tmp_path / "适配器", stop_ids=[1, 7])
    return str(tmp_path / "适配器"), logits(lm)


def test_fresh_adapters_change_nothing_and_are_all_that_learns(decoder):
    plain = load_causal_lm(decoder)
    lm = with_adapters(load_causal_lm(decoder), decoder, trained=False)
    assert type(lm) is type(plain)
    assert torch.equal(logits(lm), logits(plain))
    trained = {name for name, p in lm.named_parameters() if p.requires_grad}
    assert trained
    assert all(LORA_NAMES & set(name.split(".")) for name in trained)


def test_targets_choose_layers_by_the_end_of_their_names(checkpoints):
    lm = with_adapters(load_causal_lm(str(checkpoints["llama"])), "b", lora_targets="q_proj, 1.mlp.up_proj")
    adapted = {name.removesuffix(".lora_A") for name, _ in lm.named_modules() if name.endswith(".lora_A")}
    assert adapted == {*(f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)), "model.layers.1.mlp.up_proj"}


def test_targets_that_match_nothing_are_told_with_the_nearest_names(checkpoints):
    lm = load_causal_lm(str(checkpoints["llama"]))
    with pytest.raises(ConfigError, match=r"--lora-targets: .* 'q_prj'; did you mean q_proj.*gate_proj"):
        add_adapters(lm, options(lora_targets="v_proj,q_prj"), base="b", seed=0)
    with pytest.raises(ConfigError, match="'lm_head'"):
        add_adapters(lm, options(lora_targets="lm_head"), base="b", seed=0)


def test_rank_and_alpha_are_those_of_the_paper(checkpoints):
    """y = W x + alpha / rank * B A x, with alpha twice the rank unless it is given."""
    for settings, factor in (({"lora_rank": 3}, 2.0), ({"lora_rank": 3, "lora_alpha": 0.75}, 0.25)):
        lm = load_causal_lm(str(checkpoints["llama"])).double()
        weight = lm.model.layers[0].mlp.down_proj.weight.detach().clone()
        layer = with_adapters(lm, "b", **settings).model.layers[0].mlp.down_proj
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        assert list(a.shape) == [3, weight.shape[1]]
        x = torch.randn(5, weight.shape[1], dtype=torch.float64)
        torch.testing.assert_close(layer(x), x @ (weight + factor * b @ a).T, rtol=0, atol=1e-12)


def test_adapters_start_the_same_for_the_same_seed(checkpoints):
    def start(seed):
        torch.rand(seed + 1)  # whatever was drawn before
        lm = load_causal_lm(str(checkpoints["gpt2"]))
        before = torch.random.get_rng_state()
        add_adapters(lm, options(), base="b", seed=seed)
        assert torch.equal(torch.random.get_rng_state(), before)
        return torch.cat([p.flatten() for p in lm.parameters() if p.requires_grad])

    assert torch.equal(start(1), start(1))
    assert not torch.equal(start(1), start(2))


def test_dropout_of_adapters_is_on_in_training_and_can_be_switched_off(checkpoints):
    policy = Policy(with_adapters(load_causal_lm(str(checkpoints["llama"])), "b", dropout=0.5)).train()
    mask = torch.ones_like(IDS, dtype=torch.bool)

    def logprobs():
        return policy(IDS, mask, mask[:, 2:]).logprobs

    assert not torch.equal(logprobs(), logprobs())
    disable_dropout(policy)
    assert torch.equal(logprobs(), logprobs())


@one_decoder
def test_the_same_weights_are_no_copy_and_stay_without_adapters(decoder):
    """The reference of LoRA: parameters at the same address, and what is learned later is not on it."""
    policy = load_policy(decoder, device=CPU, compute_dtype=torch.float32, with_value_head=True)
    start = logits(policy.lm).clone()
    twin = same_weights(policy)
    assert {p.data_ptr() for p in twin.parameters()} == {p.data_ptr() for p in policy.parameters()}
    with_adapters(policy.lm, decoder)
    assert len(list(twin.parameters())) < len(list(policy.parameters()))
    assert torch.equal(logits(twin.lm), start)
    assert float((logits(policy.lm) - start).abs().max()) > 0.1
    both = {p.data_ptr(): p for module in (policy, twin) for p in module.parameters()}
    assert sum(p.numel() for p in both.values()) == sum(p.numel() for p in policy.parameters())


def test_an_adapter_folder_is_the_model_everywhere(adapter, decoder):
    """Merged on loading, as language model, trunk and policy; and PEFT reads it as well."""
    folder, wanted = adapter
    assert not torch.allclose(logits(load_causal_lm(decoder)), wanted, atol=0.1), "nothing was learned"
    lm = load_causal_lm(folder)
    assert type(lm) is type(load_causal_lm(decoder))
    assert set(dict(lm.named_parameters())) == set(dict(load_causal_lm(decoder).named_parameters()))
    assert all(p.requires_grad for p in lm.parameters())
    assert lm.generation_config.eos_token_id == [1, 7]
    torch.testing.assert_close(logits(lm), wanted, rtol=0, atol=1e-5)
    hidden = load_trunk(folder).eval()(input_ids=IDS).last_hidden_state
    torch.testing.assert_close(lm.get_output_embeddings()(hidden), wanted, rtol=0, atol=1e-5)
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(decoder, dtype=torch.float32), folder)
    torch.testing.assert_close(logits(peft), wanted, rtol=0, atol=1e-6)
    auto = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(logits(auto), wanted, rtol=0, atol=1e-6)
    assert load_config(folder).vocab_size == lm.config.vocab_size
    assert load_tokenizer(folder).get_vocab() == load_tokenizer(decoder).get_vocab()


@one_decoder
def test_adapters_on_adapters_are_merged_in_turn(adapter, decoder, tmp_path):
    """SFT with LoRA, then PPO with LoRA: what the second was trained on is the base with the first in it."""
    first, _ = adapter
    lm = load_causal_lm(first)
    on_first = logits(lm).clone()
    with_adapters(lm, first)
    save_model(lm, tmp_path / "second")
    second = str(tmp_path / "second")
    assert adapter_chain(second) == (decoder, [tmp_path / "适配器", tmp_path / "second"])
    torch.testing.assert_close(logits(load_causal_lm(second)), logits(lm), rtol=0, atol=1e-5)
    assert float((logits(lm) - on_first).abs().max()) > 0.1


@one_decoder
def test_tokenizer_and_generation_config_of_the_nearest_folder_that_has_one(adapter, tmp_path):
    """Adapters of other tools often come without them."""
    bare = tmp_path / "bare"
    shutil.copytree(adapter[0], bare)
    for path in bare.iterdir():
        if not path.name.startswith("adapter_"):
            path.unlink()
    assert load_tokenizer(str(bare)).get_vocab() == load_tokenizer(adapter[0]).get_vocab()
    assert load_causal_lm(str(bare)).generation_config.eos_token_id != [1, 7]


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"use_rslora": True}, {"bias": "lora_only"}])
def test_adapters_that_peft_made(checkpoints, tmp_path, settings):
    """Its own classes wrote the folder, with variants that heedful does not train."""
    base = str(checkpoints["gpt2" if "bias" in settings else "llama"])
    targets = ["c_attn", "c_proj"] if "bias" in settings else ["q_proj", "down_proj"]
    config = LoraConfig(
        r=4, target_modules=targets, task_type="CAUSAL_LM", fan_in_fan_out="bias" in settings, **settings
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    randomise(model)
    model.save_pretrained(tmp_path / "theirs")
    torch.testing.assert_close(logits(load_causal_lm(str(tmp_path / "theirs"))), logits(model), rtol=0, atol=2e-5)
    policy = Policy(load_causal_lm(base))
    attach_adapter(policy.lm, tmp_path / "theirs")
    copied = SamplingModel(policy, merge_adapters=True).lm  # not if DoRA's: its magnitudes are no part of B A
    torch.testing.assert_close(logits(copied), logits(model), rtol=0, atol=2e-5)


QUESTIONS = [("你好", "您好！"), ("2+2?", "four, I think"), ("hello", "再见")]


def scores(model, tokenizer):
    inputs = RewardInputs(tokenizer)
    with torch.no_grad():
        return model([inputs.encode(question, answer) for question, answer in QUESTIONS])


@pytest.mark.parametrize(("architecture", "pad"), [("gpt2", "eos"), ("deberta-v2", "own")])
def test_a_reward_model_comes_back_exactly(checkpoints, tmp_path, architecture, pad):
    """The head, and where there is one the pooler, are trained whole. Scores equal bit for bit, for PEFT nearly."""
    base = str(checkpoints[architecture])
    tokenizer = load_tokenizer(base)
    if pad == "eos":
        tokenizer.pad_token = tokenizer.eos_token
    model = load_reward_model(base, tokenizer, device=CPU, compute_dtype=torch.float32, seed=1)
    with_adapters(model.classifier, base)
    folder = tmp_path / "reward"
    save_reward_model(model.eval(), tokenizer, folder)
    wanted = scores(model, tokenizer)
    assert float(wanted.std()) > 0.01
    tokenizer = load_tokenizer(str(folder))
    loaded = load_reward_model(str(folder), tokenizer, device=CPU, compute_dtype=torch.float32).eval()
    assert torch.equal(scores(loaded, tokenizer), wanted)
    for settings in ({"seed": 9}, {"merged": True}):
        again = load_reward_model(str(folder), tokenizer, device=CPU, compute_dtype=torch.float32, **settings).eval()
        assert not has_adapters(again.classifier)
        torch.testing.assert_close(scores(again, tokenizer), wanted, rtol=0, atol=1e-5)
    theirs = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32, num_labels=1)
    theirs.resize_token_embeddings(max(len(tokenizer), theirs.config.vocab_size), mean_resizing=False)
    theirs = PeftModel.from_pretrained(theirs, folder).eval()
    theirs.base_model.model.config.pad_token_id = tokenizer.pad_token_id
    again.classifier = theirs.base_model.model
    torch.testing.assert_close(scores(again, tokenizer), wanted, rtol=0, atol=1e-6)


def test_a_pooler_inside_the_trunk_is_trained_whole(tmp_path):
    """BERT's: a checkpoint of its language model has none, so what a run starts with is random and must be saved."""
    tokenizer = byte_tokenizer(encoder=True)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    bert = BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), pad_token_id=0, **shape))
    base = str(tmp_path / "bert")
    bert.save_pretrained(base)
    tokenizer.save_pretrained(base)
    model = load_reward_model(base, tokenizer, device=CPU, compute_dtype=torch.float32, seed=1)
    with_adapters(model.classifier, base)
    save_reward_model(model.eval(), tokenizer, tmp_path / "reward")
    loaded = load_reward_model(str(tmp_path / "reward"), tokenizer, device=CPU, compute_dtype=torch.float32).eval()
    assert torch.equal(scores(loaded, tokenizer), scores(model, tokenizer))
    theirs = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    loaded.classifier = PeftModel.from_pretrained(theirs, tmp_path / "reward").eval().base_model.model
    torch.testing.assert_close(scores(loaded, tokenizer), scores(model, tokenizer), rtol=0, atol=1e-6)


@one_decoder
def test_a_reward_model_from_adapters_of_a_language_model(adapter, tmp_path):
    """SFT with LoRA, then a reward model, with LoRA or all of it: its trunk is the SFT model's, and the chain comes back."""
    folder, _ = adapter
    tokenizer = load_tokenizer(folder)
    model = load_reward_model(folder, tokenizer, device=CPU, compute_dtype=torch.float32, seed=1)
    trunk = load_trunk(folder)
    for name, parameter in model.classifier.base_model.named_parameters():
        assert torch.equal(parameter, trunk.get_parameter(name))
    with_adapters(model.classifier, folder)
    save_reward_model(model.eval(), tokenizer, tmp_path / "reward")
    loaded = load_reward_model(str(tmp_path / "reward"), tokenizer, device=CPU, compute_dtype=torch.float32).eval()
    assert torch.equal(scores(loaded, tokenizer), scores(model, tokenizer))
    with pytest.raises(CheckpointError, match="no reward head"):
        load_reward_model(folder, tokenizer, device=CPU, compute_dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"weights for score.weight, which \w+ForCausalLM does not have|LMHead"):
        load_causal_lm(str(tmp_path / "reward"))


@one_decoder
def test_a_critic_comes_back_with_its_head_and_is_merged(decoder, tmp_path):
    model = load_value_model(decoder, device=CPU, compute_dtype=torch.float32)
    with_adapters(model.trunk, decoder)
    with torch.no_grad():
        model.value_head.weight.normal_()
    mask = torch.ones_like(IDS, dtype=torch.bool)
    save_value_model(model.eval(), load_tokenizer(decoder), tmp_path / "adapters")
    merge_model(MergeConfig(adapter=str(tmp_path / "adapters"), output=tmp_path / "plain"))
    AutoModel.from_pretrained(tmp_path / "plain")
    loaded, merged = (
        load_value_model(str(tmp_path / name), device=CPU, compute_dtype=torch.float32).eval()(IDS, mask, mask[:, 2:])
        for name in ("adapters", "plain")
    )
    torch.testing.assert_close(loaded, model.eval()(IDS, mask, mask[:, 2:]), rtol=0, atol=1e-4)
    assert torch.equal(loaded, merged)


@one_decoder
def test_merging_writes_a_plain_model(adapter, tmp_path):
    folder, wanted = adapter
    policy = load_policy(folder, device=CPU, compute_dtype=torch.float32, with_value_head=True)
    with torch.no_grad():
        policy.value_head.weight.normal_()
    with_adapters(policy.lm, folder)
    save_policy(policy, load_tokenizer(folder), tmp_path / "with head", stop_ids=[1])
    merge_model(MergeConfig(adapter=str(tmp_path / "with head"), output=tmp_path / "plain"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert plain.dtype == torch.float32
    assert not (tmp_path / "plain" / "adapter_config.json").exists()
    torch.testing.assert_close(logits(plain), logits(policy.lm), rtol=0, atol=1e-5)
    assert not torch.allclose(logits(plain), wanted, atol=0.1)
    assert plain.generation_config.eos_token_id in (1, [1])
    assert AutoTokenizer.from_pretrained(tmp_path / "plain").get_vocab() == load_tokenizer(folder).get_vocab()
    head = load_policy(str(tmp_path / "plain"), device=CPU, compute_dtype=torch.float32, with_value_head=True)
    assert torch.equal(head.value_head.weight, policy.value_head.weight)


@pytest.mark.parametrize(("task", "architecture"), [("SEQ_CLS", "deberta-v2"), (None, "llama")])
def test_merging_a_reward_model(checkpoints, tmp_path, architecture, task):
    base = str(checkpoints[architecture])
    tokenizer = load_tokenizer(base)
    model = load_reward_model(base, tokenizer, device=CPU, compute_dtype=torch.float32, seed=1)
    with_adapters(model.classifier, base)
    model.offset = 0.75
    save_reward_model(model.eval(), tokenizer, tmp_path / "adapters")
    path = tmp_path / "adapters" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"task_type": task}), encoding="utf-8")
    merge_model(MergeConfig(adapter=str(tmp_path / "adapters"), output=tmp_path / "plain"))
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain")
    plain = load_reward_model(str(tmp_path / "plain"), tokenizer, device=CPU, compute_dtype=torch.float32).eval()
    assert plain.offset == 0.75
    torch.testing.assert_close(scores(plain, tokenizer), scores(model, tokenizer), rtol=0, atol=1e-5)


def edited(folder, tmp_path, **changes):
    """A copy of an adapter folder with another configuration."""
    copied = tmp_path / "edited"
    shutil.copytree(folder, copied)
    path = copied / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), encoding="utf-8")
    return str(copied)


@pytest.fixture(scope="module")
def small_adapter(checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("小") / "small"
    save_model(with_adapters(load_causal_lm(str(checkpoints["llama"])), checkpoints["llama"]), folder)
    return str(folder)


def test_a_base_that_is_gone_is_named(small_adapter, tmp_path):
    gone = str(tmp_path / "没有" / "final")
    folder = edited(small_adapter, tmp_path, base_model_name_or_path=gone)
    for load in (resolve, load_tokenizer, load_causal_lm, load_trunk, load_config):
        with pytest.raises(CheckpointError, match=f"{folder} has adapters without their base: model {gone} does not"):
            load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_model_name_or_path": None}, "base_model_name_or_path is None"),
        ({"peft_type": "IA3"}, "adapters of type IA3"),
        ({"peft_type": "PREFIX_TUNING"}, "adapters of type PREFIX_TUNING"),
        ({"peft_type": None}, "adapter_config.json: it has no peft_type"),
    ],
)
def test_adapter_folders_that_cannot_be_used(small_adapter, tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        load_causal_lm(edited(small_adapter, tmp_path, **changes))


def test_adapters_that_are_their_own_base(small_adapter, tmp_path):
    folder = edited(small_adapter, tmp_path, base_model_name_or_path=str(tmp_path / "edited"))
    with pytest.raises(CheckpointError, match="leads back"):
        resolve(folder)


def test_weights_that_are_missing_or_do_not_fit(small_adapter, checkpoints, tmp_path):
    other = edited(small_adapter, tmp_path, base_model_name_or_path=str(checkpoints["gpt2"]))
    with pytest.raises(CheckpointError, match="GPT2LMHeadModel does not have"):
        load_causal_lm(other)
    shutil.rmtree(other)
    wrong_rank = edited(small_adapter, tmp_path, r=5)
    with pytest.raises(CheckpointError, match="do not fit their base"):
        load_causal_lm(wrong_rank)
    (tmp_path / "edited" / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_causal_lm(wrong_rank)
    (tmp_path / "edited" / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no adapter_model.safetensors"):
        resolve(wrong_rank)
    (tmp_path / "edited" / "adapter_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"adapter_config.json: line 1 is not valid JSON"):
        resolve(wrong_rank)


def test_only_adapters_are_written(small_adapter):
    names = load_file(f"{small_adapter}/adapter_model.safetensors")
    assert names
    assert all(name.startswith("base_model.model.model.layers.") and ".lora_" in name for name in names)


@pytest.mark.parametrize(("decoder", "lora"), [("gpt2", False), ("qwen3", True)], indirect=["decoder"])
def test_gradient_checkpointing_changes_no_gradient(decoder, lora):
    """And it is on: layers compute again in the backward pass."""
    policy = load_policy(decoder, device=CPU, compute_dtype=torch.float32, with_value_head=True).double()
    if lora:
        with_adapters(policy.lm, decoder)
    disable_dropout(policy)
    again = copy.deepcopy(policy)
    checkpoint_layers(again.lm)
    again.train()
    mask = torch.ones_like(IDS, dtype=torch.bool)
    layer_calls = []
    layer = next(m for name, m in again.lm.named_modules() if name.endswith((".h.0", ".layers.0")))
    next(layer.children()).register_forward_hook(lambda *_: layer_calls.append(1))
    gradients = []
    for module in (policy, again):
        outputs = module(IDS, mask, mask[:, 1:])
        (outputs.logprobs.sum() + outputs.values.square().sum()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]))
    assert len(layer_calls) == 2
    assert float(gradients[0].norm()) > 0
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < 1e-12
