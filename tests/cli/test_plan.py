"""`heedful plan`."""

from pathlib import Path

import pytest

from heedful.configs.plan import trainer_of


def test_a_plan_needs_no_data_and_writes_nothing(heedful, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = heedful("plan", "ppo", "--model", "8B", "--rewards", "model:0.5B", "--gpu-gb", "24", "--lora-rank", "16")
    assert outcome.status == 0, outcome.err
    for part in ("policy, frozen", "reward models", "keys and values", "moments of the optimizer", "together"):
        assert part in outcome.out
    assert list(tmp_path.iterdir()) == []


def test_a_divided_run_is_planned_by_what_a_rank_holds(heedful):
    words = ("--rewards", "model:0.5B", "--shard", "full", "--ranks", "8", "--gpu-gb", "80")
    outcome = heedful("plan", "ppo", "--model", "8B", *words)
    assert outcome.status == 0, outcome.err
    for part in ("whole blocks", "copy that samples", "GB on each of 8 ranks, in the phase", "that fits into 80 GB"):
        assert part in outcome.out
    outcome = heedful("plan", "ppo", "--model", "8B", *words, "--sampler", "vllm:http://127.0.0.1:8000")
    assert outcome.status == 0, outcome.err
    for part in ("sampl", "keys and values"):
        assert part not in outcome.out


RECIPE = "model: 1.5B\nrewards: [model:0.5B]\ndata: 数据.jsonl\noutput: 运行/一\n"


@pytest.mark.parametrize("name", ["礼貌-ppo.yaml", "PPO_v2.yml"])
def test_a_file_is_planned_by_the_trainer_that_its_name_names(heedful, written, name):
    file = written(name, RECIPE + "max_new_tokens: 32\n")
    outcome = heedful("plan", file, "--gpu-gb", "24")
    assert outcome.status == 0, outcome.err
    assert outcome.out == heedful("plan", "ppo", file, "--gpu-gb", "24").out
    assert "that does not fit into 24 GB; these settings would:" in outcome.out


def test_a_file_is_planned_by_the_only_trainer_that_has_its_keys(written):
    for key, trainer in (
        ("desirable_weight", "kto"),
        ("nll_coef", "dpo"),
        ("loss_on", "sft"),
        ("center_coef", "reward"),
    ):
        assert trainer_of(Path(written("配方.yaml", f"model: 0.5B\n{key}: 2\n"))) == trainer


def test_the_settings_of_a_run_are_planned_by_its_trainer(heedful, written):
    file = written("config.yaml", RECIPE)
    written("run.json", '{"algorithm": "grpo"}')
    assert heedful("plan", file).out == heedful("plan", "grpo", file).out


def test_files_that_cannot_be_planned_are_named(heedful, written, tmp_path):
    for name, content, said in (
        ("无.yaml", None, "there is no such YAML file"),
        (
            "配方.yaml",
            RECIPE,
            "it could be that of heedful ppo, a2c, critic, grpo or online-dpo; name the trainer: heedful plan ppo",
        ),
        ("配方.yaml", "project: 标注\n", "no trainer has all of its keys (there are plans of heedful sft, reward,"),
        ("配方.yaml", "- 一\n", "expected 'key: value' lines, found a list"),
        ("ppo.yaml", RECIPE + "temprature: 1\n", "ppo.yaml:5: temprature (--temprature) is not a setting"),
        ("ppo.yaml", RECIPE.replace("1.5B", "3B/没有"), "model 3B/没有 does not exist"),
        ("sft-dpo.yaml", "model: 1.5B\n", "name the trainer: heedful plan sft"),
    ):
        outcome = heedful("plan", str(tmp_path / name) if content is None else written(name, content))
        assert outcome.status == 2
        assert said in outcome.message
        assert name in outcome.message or "没有" in outcome.message
        assert "Traceback" not in outcome.err


def test_mistakes_are_named(heedful):
    for words, said in (
        ("--model 4B --shard full", "give their number (--ranks 8)"),
        ("--model 4B --shard full --ranks 8 --replicas 3", "--replicas 3 does not divide the 8 ranks"),
        ("--model 4B --ranks 4 --replicas 2", "--replicas 2 belongs to --shard full"),
        ("--model 4B --ranks 9 --batch-size 8", "9 ranks, but a step has 8 rows"),
        ("--model 3B/nowhere/at/all", "does not exist"),
        ("--model 4B --quantize 4bit", "freezes the model"),
    ):
        outcome = heedful("plan", "sft", *words.split())
        assert outcome.status == 2
        assert said in outcome.err
        assert "Traceback" not in outcome.err


def test_ranks_share_what_a_step_learns_from(heedful):
    """8 responses are 8 rows, or in online DPO 2 pairs."""
    words = [
        "--model",
        "0.5B",
        "--minibatch-size",
        "8",
        "--rollout-batch-size",
        "16",
        "--samples-per-prompt",
        "4",
        "--ranks",
        "4",
    ]
    outcome = heedful("plan", "grpo", *words)
    assert outcome.status == 0, outcome.err
    outcome = heedful("plan", "online-dpo", *words)
    assert outcome.status == 2
    assert "4 ranks, but a step has 2 rows to divide among them (--minibatch-size 8): raise it to" in outcome.err
