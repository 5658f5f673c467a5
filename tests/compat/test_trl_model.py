"""The value head, checkpoints in TRL's format, adapters, reference models, reward adapters."""

import math
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, T5Config, T5ForConditionalGeneration

import heedful
from heedful.compat.trl import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    create_reference_model,
    respond_to_batch,
)
from heedful.errors import CheckpointError, ConfigError, MachineError
from refusals import refused

IDS = torch.arange(20, 32).view(2, 6)
LORA = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
load = AutoModelForCausalLMWithValueHead.from_pretrained


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compat")
    for architecture in ("gpt2", "llama"):
        heedful.make_tiny_model(architecture, folder / architecture, hidden_size=16, initializer_range=0.2)
    return SimpleNamespace(gpt2=str(folder / "gpt2"), llama=str(folder / "llama"))


def outputs(model):
    with torch.no_grad():
        logits, _, values = model.eval()(input_ids=IDS, attention_mask=torch.ones_like(IDS))
    return logits, values


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(outputs(one), outputs(other), strict=True))


def test_values_are_a_linear_function_of_the_last_hidden_state(models):
    model = load(models.gpt2)
    logits, values = outputs(model)
    out = model.pretrained_model(input_ids=IDS, output_hidden_states=True)
    head = model.v_head.summary
    torch.testing.assert_close(values, out.hidden_states[-1] @ head.weight[0] + head.bias)
    assert torch.equal(logits, out.logits)
    _, loss, _ = model(input_ids=IDS, labels=IDS)
    assert loss.isfinite()


def test_logits_and_the_head_are_in_float32_whatever_the_model(models):
    assert load(models.gpt2).pretrained_model.dtype == torch.float32
    model = load(models.gpt2, torch_dtype=torch.bfloat16)
    logits, values = outputs(model)
    assert model.pretrained_model.dtype == torch.bfloat16
    assert model.v_head.summary.weight.dtype == logits.dtype == values.dtype == torch.float32


def test_a_checkpoint_without_a_dtype_asked_for_is_loaded_in_float32(models, tmp_path):
    """transformers 5 would take the checkpoint's own, and TRL's scripts were written for float32."""
    AutoModelForCausalLM.from_pretrained(models.gpt2, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert load(str(tmp_path)).pretrained_model.dtype == torch.float32


def test_how_the_head_begins(models):
    normal = load(models.gpt2, v_head_init_strategy="normal", v_head_initializer_range=3.0, summary_dropout_prob=0.3)
    assert normal.v_head.summary.bias.item() == 0
    assert 1 < normal.v_head.summary.weight.std() < 6
    assert normal.v_head.dropout.p == 0.3
    assert load(models.gpt2).v_head.dropout.p == 0.1
    assert load(models.gpt2).v_head.summary.weight.abs().max() <= 1 / math.sqrt(16)
    with refused(ConfigError, "v_head_init_strategy is 'zeros'; choose 'normal' or None"):
        load(models.gpt2, v_head_init_strategy="zeros")


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
def test_a_saved_model_comes_back_with_its_head_and_opens_in_transformers(models, tmp_path, shards, capfd):
    model, folder = load(models.gpt2), tmp_path / "评论"
    model.save_pretrained(folder, **({"max_shard_size": "20KB"} if shards else {}))
    names = {name for path in folder.glob("*.safetensors") for name in load_file(path)}
    assert {"v_head.summary.weight", "v_head.summary.bias", "transformer.wte.weight"} <= names
    assert len(list(folder.glob("*.safetensors"))) > 1 if shards else (folder / "model.safetensors").is_file()
    assert equal(load(str(folder)), model)
    assert "v_head" not in "".join(capfd.readouterr())  # no report of a weight that transformers does not know
    alone = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(alone(input_ids=IDS).logits, outputs(model)[0])


def test_a_checkpoint_of_pytorch_files_as_old_versions_wrote_it(models, tmp_path):
    model = load(models.gpt2)
    model.pretrained_model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert equal(load(str(tmp_path)), model)


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ({"v_head.summary.weight": torch.ones(1, 8), "v_head.summary.bias": torch.ones(1)}, "shape [1, 8]"),
        ({"v_head.1.weight": torch.ones(1, 16)}, "v_head.summary.weight and v_head.summary.bias"),
    ],
    ids=["another size", "another form"],
)
def test_a_head_that_does_not_fit_is_refused(models, tmp_path, head, said):
    model = load(models.gpt2)
    model.pretrained_model.config.save_pretrained(tmp_path)
    torch.save(model.pretrained_model.state_dict() | head, tmp_path / "pytorch_model.bin")
    with refused(CheckpointError, said):
        load(str(tmp_path))


def test_an_adapter_comes_back_with_its_head(models, tmp_path):
    model = load(models.llama, peft_config=LORA)
    assert model.is_peft_model
    assert {name.split(".")[0] for name, weight in model.named_parameters() if weight.requires_grad} == {
        "pretrained_model",
        "v_head",
    }
    model.save_pretrained(tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {"adapter_config.json", "pytorch_model.bin"}
    for trainable in (False, True):
        again = load(str(tmp_path / "adapter"), is_trainable=trainable)
        assert equal(again, model)
        assert any(weight.requires_grad for weight in again.pretrained_model.parameters()) is trainable


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_models_in_memory_are_wrapped_as_they_are(models):
    plain = AutoModelForCausalLM.from_pretrained(models.llama)
    assert load(plain).pretrained_model is plain
    adapted = get_peft_model(plain, LORA)
    assert load(adapted).is_peft_model
    assert isinstance(
        load(AutoModelForCausalLM.from_pretrained(models.llama), peft_config=LORA).pretrained_model, PeftModel
    )
    with refused(ConfigError, "has an adapter already", "is_trainable=True"):
        load(adapted, peft_config=LORA)
    with refused(ConfigError, "torch_dtype cannot change a model that is loaded"):
        load(plain, torch_dtype=torch.float16)


def test_a_reference_is_a_frozen_copy(models):
    model = load(models.gpt2)
    reference = create_reference_model(model)
    assert equal(reference, model)
    assert not any(weight.requires_grad for weight in reference.parameters())
    assert all(weight.requires_grad for weight in model.parameters())
    own = {id(weight) for weight in model.parameters()}
    assert not any(id(weight) in own for weight in reference.parameters())


def test_shared_layers_are_frozen_in_the_policy_and_not_copied(models):
    model = load(models.llama)
    reference = create_reference_model(model, num_shared_layers=1)
    shared = {name for name, weight in model.named_parameters() if weight is reference.get_parameter(name)}
    assert shared == {name for name, weight in model.named_parameters() if not weight.requires_grad}
    assert {".embed_tokens." in name or ".layers.0." in name for name in shared} == {True}
    assert [name for name, _ in model.named_parameters() if ".layers.1." in name and name in shared] == []
    with refused(ConfigError, "num_shared_layers is 7", "numbers end at 1", "pass pattern"):
        create_reference_model(model, num_shared_layers=7)
    assert create_reference_model(load(models.gpt2), 1, pattern="transformer.h.{layer}.")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_reward_adapter_scores_as_its_reward_model_does(models, tmp_path):
    classifier = AutoModelForSequenceClassification.from_pretrained(models.llama, num_labels=2)
    lora = LoraConfig(task_type="SEQ_CLS", r=2, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    reward = get_peft_model(classifier, lora).eval()
    reward.save_pretrained(tmp_path)
    model = load(models.llama, peft_config=LORA, reward_adapter=str(tmp_path))
    next(weight for name, weight in model.named_parameters() if "lora_A.default" in name).requires_grad_(False)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    before = outputs(model)
    scores = model.compute_reward_score(input_ids=IDS, attention_mask=torch.ones_like(IDS))
    assert scores.shape == (*IDS.shape, 2)
    torch.testing.assert_close(scores[:, -1], reward(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits)
    assert [name for name, weight in model.named_parameters() if weight.requires_grad] == trained
    assert all(torch.equal(a, b) for a, b in zip(outputs(model), before, strict=True))
    with refused(ConfigError, "no reward adapter", "reward_adapter=FOLDER"):
        load(models.llama).compute_reward_score(IDS)
    with refused(ConfigError, "pass peft_config too"):
        load(models.llama, reward_adapter=str(tmp_path))
    load(models.llama, peft_config=LORA).save_pretrained(tmp_path / "policy")
    with refused(CheckpointError, "no weight named score", "SEQ_CLS"):
        load(models.llama, peft_config=LORA, reward_adapter=str(tmp_path / "policy"))


def test_a_model_in_8_bits_trains_its_adapter(models):
    """bitsandbytes computes on a CPU too."""
    model = load(models.llama, load_in_8bit=True, peft_config=LORA)
    assert model.is_loaded_in_8bit
    logits, _, values = model(input_ids=IDS)
    (logits.sum() + values.sum()).backward()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert all(weight.grad is not None for name, weight in trained.items())


def test_what_cannot_be_wrapped_is_refused(models, tmp_path):
    small = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with refused(ConfigError, "t5 is an encoder-decoder", "use a causal language model"):
        load(T5ForConditionalGeneration(small))
    for use in (AutoModelForSeq2SeqLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead.from_pretrained):
        with refused(ConfigError, "encoder-decoders such as T5 are not supported"):
            use("t5-small")
    with refused(ConfigError, "has no language model head"):
        load(AutoModelForCausalLM.from_pretrained(models.gpt2).transformer)
    with refused(ConfigError, "peft_config is a dict", "peft.LoraConfig(r=16)"):
        load(models.gpt2, peft_config={"r": 4})
    with refused(ConfigError, "PROMPT_TUNING cannot be trained by PPO"):
        load(models.gpt2, peft_config=PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with refused(ConfigError, "got a int"):
        load(3)
    with refused(CheckpointError, "没有: cannot load a causal language model from it", "no local folder has that name"):
        load("没有")


def test_a_push_is_what_save_pretrained_writes(models, monkeypatch):
    sent = []

    def upload_folder(api, *, folder_path, repo_id):
        sent.append((repo_id, {path.name for path in Path(folder_path).iterdir()}, equal(load(folder_path), model)))

    model = load(models.gpt2)
    with refused(ConfigError, "not logged in", "hf auth login", "hf upload me/评论 FOLDER"):
        model.push_to_hub("me/评论")
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(
        huggingface_hub.HfApi,
        "create_repo",
        lambda api, name, **_: huggingface_hub.RepoUrl(f"https://huggingface.co/{name}"),
    )
    assert model.push_to_hub("me/comments") == "https://huggingface.co/me/comments"
    assert sent == [("me/comments", {"config.json", "generation_config.json", "model.safetensors"}, True)]
    monkeypatch.delattr(huggingface_hub.HfApi, "create_repo")
    with refused(MachineError, "nothing was uploaded to me/comments", "the model is unchanged"):
        model.push_to_hub("me/comments")


def test_respond_to_batch_samples_after_the_queries(models):
    model = load(models.gpt2).eval()
    torch.manual_seed(0)
    assert respond_to_batch(model, IDS, txt_len=5).shape == (2, 5)
    greedy = model.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=4, do_sample=False)
    assert torch.equal(respond_to_batch(model, IDS, txt_len=4, top_k=1), greedy[:, 6:])
    assert torch.equal(respond_to_batch(model, IDS, txt_len=4, top_p=1e-6), greedy[:, 6:])
