"""``heedful merge`` and folders of adapters on the command line: what works, and what is said of what cannot."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from heedful import SFTConfig, train_sft
from heedful.configs.tools import MergeConfig
from heedful.models import load_causal_lm
from heedful.models.merge import merge_model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Where `adapter` keeps the run."""
    return tmp_path_factory.mktemp("made")


@pytest.fixture
def adapter(train, made, tmp_path):
    """The final folder of SFT with LoRA, made once, to change as one likes."""
    if not (made / "运行").exists():
        assert train("sft", "--lora-rank", "2", "--learning-rate", "0.1", output=made / "运行").status == 0
    shutil.copytree(made / "运行", tmp_path / "运行")
    return str(tmp_path / "运行" / "final")


def test_merging_on_the_command_line(heedful, adapter, tmp_path):
    """An output that exists is kept unless told."""
    output = tmp_path / "合并"
    outcome = heedful("merge", "--adapter", adapter, "--output", output)
    assert outcome.status == 0, outcome.err
    assert str(output) in outcome.out
    ours, theirs = load_causal_lm(adapter), AutoModelForCausalLM.from_pretrained(output)
    ids = torch.tensor([[20, 30, 40]])
    torch.testing.assert_close(ours.eval()(ids).logits, theirs.eval()(ids).logits, rtol=0, atol=1e-6)
    (output / "merges.txt").write_text("", encoding="utf-8")
    outcome = heedful("merge", "--adapter", adapter, "--output", output)
    assert outcome.status == 2
    assert "exists; choose another folder, or add --overwrite" in outcome.message
    assert (output / "merges.txt").is_file()
    assert heedful("merge", "--adapter", adapter, "--output", output, "--overwrite").status == 0
    assert not (output / "merges.txt").exists()


def test_adapters_on_adapters_are_said_to_be_for_heedful_only(train, adapter, tmp_path):
    """PEFT's own class leaves the first ones out."""
    outcome = train("sft", "--lora-rank", "2", "--learning-rate", "0.1", model=adapter, output=tmp_path / "第二")
    assert outcome.status == 0
    said = " ".join(outcome.out.split())
    assert f"adapters on top of other adapters ({adapter})" in said
    assert f"heedful merge --adapter {tmp_path / '第二'}/final --output" in said
    outcome = train("sft", model=adapter, output=tmp_path / "第三")
    assert outcome.status == 0, outcome.err
    assert "on top of other adapters" not in outcome.out
    assert (tmp_path / "第三" / "final" / "model.safetensors").is_file()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*tie:UserWarning")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_a_run_starts_from_adapters_that_untie_their_base(train, tiny, written, tmp_path):
    """They part embeddings from the output head (tests/models/test_tied_adapters.py). What is saved keeps them apart."""
    lm = AutoModelForCausalLM.from_pretrained(tiny("qwen3"))
    config = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    theirs = get_peft_model(lm, config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path / "peft")
    shutil.copy(Path(tiny("qwen3")) / "tokenizer.json", tmp_path / "peft")
    held_out = written("对.jsonl", [{"prompt": f"第{i}问", "chosen": "好", "rejected": "不"} for i in range(2)])
    flags = ["--eval-data", held_out, "--beta", "5", "--learning-rate", "0.1"]
    outcome = train("dpo", *flags, model=tmp_path / "peft", output=tmp_path / "偏")
    assert outcome.status == 0, outcome.err
    first = json.loads((tmp_path / "偏" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert first["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)  # the reference is the same model
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "偏" / "final")
    assert trained.lm_head.weight is not trained.model.embed_tokens.weight
    ids = torch.tensor([[20, 30, 40]])
    ours = load_causal_lm(str(tmp_path / "偏" / "final"))
    torch.testing.assert_close(trained.eval()(ids).logits, ours.eval()(ids).logits, rtol=0, atol=1e-6)


def test_merging_what_cannot_be_merged(heedful, adapter, tiny, tmp_path):
    """And nothing is written."""
    (tmp_path / "论文").mkdir()
    (tmp_path / "论文" / "论文.md").write_text("重要", encoding="utf-8")
    (tmp_path / "文").write_text("重要", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    for given, output, message in (
        (tiny(), "合并", f"{tiny()} has no adapters (adapter_config.json), so there is nothing to merge"),
        (tmp_path / "运行" / "finel", "合并", f"did you mean {adapter}?"),
        (adapter, "论文", "which heedful merge does not write and --overwrite would delete"),
        (adapter, "文", "is a file"),
        (adapter, tiny(), f"contains {tiny()}, from which the model is merged"),
    ):
        outcome = heedful("merge", "--adapter", given, "--output", tmp_path / output, "--overwrite")
        assert (outcome.status, outcome.out) == (2, "")
        assert message in outcome.message
    path = Path(adapter) / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"eos_token_id": [1, 264]}), "utf-8")
    outcome = heedful("merge", "--adapter", adapter, "--output", tmp_path / "合并")
    assert outcome.status == 2
    assert f"{path}: eos_token_id is [1, 264]; it must be a token id from 0 to 263, or a list" in outcome.message
    assert sorted(tmp_path.rglob("*")) == before


def test_adapters_chat_learn_are_measured_and_score(heedful, train, adapter, data, tmp_path, monkeypatch):
    reward = tmp_path / "评分"
    assert train("reward", "--lora-rank", "2", model=adapter, output=reward).status == 0
    flags = ["--dtype", "float32", "--max-new-tokens", "4"]
    rewards = ["--rewards", f"model:{reward}/final"]
    outcome = train("ppo", *rewards, model=adapter, output=tmp_path / "ppo")
    assert outcome.status == 0, outcome.err
    assert (tmp_path / "ppo" / "final" / "model.safetensors").is_file()
    given = ["--model", adapter, "--data", data("ppo"), *flags]
    for measure in (["scores", *given, *rewards], ["kl", *given, "--reference", adapter]):
        outcome = heedful("evaluate", *measure)
        assert outcome.status == 0, outcome.err
    assert heedful("evaluate", "accuracy", "--reward-model", reward / "final", "--data", data("reward")).status == 0
    monkeypatch.setattr("heedful.cli.chat.chat.__defaults__", (lambda _: "/quit",))
    assert heedful("chat", "--model", adapter, *flags).status == 0


def test_adapters_that_cannot_be_used(train, adapter, tmp_path):
    """Targets that match nothing; a base that is gone; what is no LoRA."""
    path = tmp_path / "运行" / "final" / "adapter_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    for command in ("sft", "reward", "ppo"):
        outcome = train(command, "--lora-rank", "2", "--lora-targets", "c_atn", output=tmp_path / "新")
        assert outcome.status == 2
        assert "--lora-targets: no linear layer of the model is named 'c_atn'; did you mean c_attn" in outcome.message
        for changes, message in (
            ({"base_model_name_or_path": "/没有/这里"}, "has adapters without their base: model /没有/这里"),
            ({"peft_type": "PROMPT_TUNING"}, "has adapters of type PROMPT_TUNING; heedful supports only LORA"),
        ):
            path.write_text(json.dumps(settings | changes), encoding="utf-8")
            outcome = train(command, model=adapter, output=tmp_path / "新")
            assert outcome.status == 2
            assert message in outcome.message
            assert not (tmp_path / "新").exists()


@pytest.mark.parametrize(("stored", "save_dtype", "expected"), [
    ("bfloat16", "base", torch.bfloat16), ("bfloat16", "float32", torch.float32),
])  # fmt: skip
def test_models_keep_the_dtype_of_their_base(tiny, tmp_path, stored, save_dtype, expected):
    """final/ and merged adapters; checkpoints are exact. The rounded weights are those of the checkpoint."""
    base, rows = tmp_path / "底座", [{"text": f"第{i}句 hello"} for i in range(4)]
    AutoModelForCausalLM.from_pretrained(tiny("llama"), dtype=getattr(torch, stored)).save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny("llama")).save_pretrained(base)
    common = {
        "model": str(base),
        "eval_fraction": 0.0,
        "sample_every": 0,
        "max_steps": 1,
        "batch_size": 4,
        "device": "cpu",
    }
    whole = SFTConfig(**common, output=tmp_path / "run", save_dtype=save_dtype, save_every=1)
    train_sft(whole, data=rows)
    train_sft(SFTConfig(**common, output=tmp_path / "lora", lora_rank=2), data=rows)
    adapter, merged = str(tmp_path / "lora" / "final"), tmp_path / "merged"
    merge_model(MergeConfig(adapter=adapter, output=merged, save_dtype=save_dtype))
    (exact,) = (tmp_path / "run" / "checkpoints").glob("step-*/model.safetensors")
    for folder in (tmp_path / "run" / "final", merged):
        tensors = load_file(folder / "model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {expected}
        assert AutoModelForCausalLM.from_pretrained(folder).dtype == expected
    assert {tensor.dtype for tensor in load_file(exact).values()} == {torch.float32}
    final = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert all(torch.equal(final[name], x.to(expected)) for name, x in load_file(exact).items())
