"""Scripts written for TRL 0.4 to 0.11 run after their import lines are changed. scripts/ has the classic shapes."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForSequenceClassification

import heedful
from heedful.compat.trl import AutoModelForCausalLMWithValueHead
from launched import environment, free_port

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compat")
    for architecture in ("gpt2", "llama", "deberta-v2"):
        heedful.make_tiny_model(architecture, folder / architecture, hidden_size=16, initializer_range=0.2)
    reward = AutoModelForSequenceClassification.from_pretrained(folder / "llama", num_labels=2)
    lora = LoraConfig(task_type="SEQ_CLS", r=2, init_lora_weights=False, target_modules=["q_proj"])
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
        get_peft_model(reward, lora).save_pretrained(folder / "reward")
    return SimpleNamespace(**{path.name.replace("-v2", ""): str(path) for path in folder.iterdir()})


def run(name, *arguments, monkeypatch):
    """The names that a script defines, once its import lines are changed."""
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    changed, count = re.subn(r"^from trl", "from heedful.compat.trl", text, flags=re.MULTILINE)
    assert count >= 1
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    names = {"__name__": "__main__"}
    exec(compile(changed, f"{name}.py", "exec"), names)  # the point of this file
    assert names["all_stats"]
    for stats in names["all_stats"]:
        assert all(math.isfinite(value) for key, value in stats.items() if isinstance(value, float))
    return SimpleNamespace(**names)


def moved(model, folder):
    """Names of the trained weights that differ from those of a folder's model."""
    before = dict(AutoModelForCausalLMWithValueHead.from_pretrained(folder).pretrained_model.named_parameters())
    return [
        key
        for key, weight in model.pretrained_model.named_parameters()
        if not torch.equal(weight, before[key].to(weight))
    ]


def test_sentiment(models, monkeypatch):
    flags = ["--model_name", models.gpt2, "--reward_model", f"text-classification:{models.deberta}", "--steps", "8"]
    flags += ["--batch_size", "4", "--mini_batch_size", "2", "--ppo_epochs", "2", "--learning_rate", "1e-3"]
    script = run("sentiment", *flags, monkeypatch=monkeypatch)
    assert len(script.all_stats) == 2
    assert script.config.seed == 0
    assert script.trainer.kl_ctl.value != 0.2
    assert len(moved(script.model, models.gpt2)) == len(list(script.model.pretrained_model.parameters()))
    assert {*script.batch} == {"label", "input_ids", "query", "response", "ref_response", "ref_rewards"}


def test_detoxification(models, tmp_path, monkeypatch):
    script = run("detoxification", models.gpt2, models.deberta, str(tmp_path / "毒性"), monkeypatch=monkeypatch)
    changed = moved(script.model, models.gpt2)
    assert changed
    assert not [name for name in changed if ".h.0." in name or "wte" in name]
    assert (
        script.ref_model.pretrained_model.transformer.wte.weight is script.model.pretrained_model.transformer.wte.weight
    )
    saved = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path / "毒性"))
    assert torch.equal(saved.v_head.summary.weight, script.model.v_head.summary.weight)


def test_summarisation(models, tmp_path, monkeypatch):
    script = run("summarisation", models.gpt2, str(tmp_path), monkeypatch=monkeypatch)
    assert [stats["ppo/learning_rate"] for stats in script.all_stats] == [1e-4, 5e-5]
    assert abs(script.all_stats[0]["ppo/mean_scores"]) <= 0.5
    script.trainer.accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "trl"))
    events.Reload()
    for name in ("objective/kl", "ppo/loss/total", "env/reward_mean"):
        assert [event.step for event in events.Scalars(name)] == [1, 2]
    assert events.Scalars("objective/kl")[1].value == pytest.approx(script.all_stats[1]["objective/kl"], rel=1e-5)


def test_stack_llama(models, tmp_path, monkeypatch):
    script = run("stack_llama", models.llama, f"{tmp_path}/", monkeypatch=monkeypatch)
    assert len(script.all_stats) == script.config.total_ppo_epochs == 2
    end = script.tokenizer.eos_token_id
    assert all(4 <= len(response) < 8 or response[-1] == end for response in script.responses)
    assert not any(end in response[:-1] for response in script.responses)
    again = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path / "step_1"))
    ids = torch.arange(20, 30).unsqueeze(0)
    script.model.eval()
    for ours, theirs in zip(again.eval()(ids), script.model(ids), strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


def test_multi_adapter(models, monkeypatch):
    script = run("multi_adapter", models.llama, models.reward, monkeypatch=monkeypatch)
    assert len(script.all_stats) == 2
    trained = {name for name, weight in script.model.named_parameters() if weight.requires_grad}
    assert {name.split(".")[-2] for name in trained} == {"default", "summary"}


@pytest.mark.exhaustive
def test_processes_hold_the_same_weights_and_average_their_stats(models, tmp_path):
    """benchmarks/old_ppo/same_steps.py compares two processes with TRL's."""
    text = (SCRIPTS / "one_rank.py").read_text(encoding="utf-8").replace("from trl", "from heedful.compat.trl")
    (tmp_path / "script.py").write_text(text, encoding="utf-8")
    port, command = free_port(), [sys.executable, tmp_path / "script.py", models.gpt2, tmp_path]
    ranks = [subprocess.Popen(command, env=environment(rank, 2, port)) for rank in range(2)]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["seen"] == 2 * 4 * 3
    assert first["stats"][0]["objective/kl_coef"] != first["stats"][2]["objective/kl_coef"]
