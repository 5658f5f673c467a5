"""`heedful plan`."""

import pytest


def test_a_plan_needs_no_data_and_writes_nothing(heedful, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = heedful("plan", "ppo", "--model", "8B", "--rewards", "model:0.5B", "--gpu-gb", "24", "--lora-rank", "16")
    assert outcome.status == 0, outcome.err
    for part in ("policy, frozen", "reward models", "keys and values", "moments of the optimizer", "together"):
        assert part in outcome.out
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_planned_by_its_configuration(heedful, tiny):
    outcome = heedful("plan", "sft", "--model", tiny("qwen3"), "--max-length", "128")
    assert outcome.status == 0, outcome.err
    assert "most: 0.6 GB" in outcome.out


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--shard", "full"), "say among how many (--ranks 8)"),
        (("--shard", "full", "--ranks", "8", "--replicas", "3"), "--replicas 3 does not divide the 8 ranks"),
        (("--ranks", "4", "--replicas", "2"), "--replicas 2 belongs to --shard full"),
        (("--ranks", "9", "--batch-size", "8"), "9 ranks, but a step has 8 rows"),
        (("--ranks", "0"), "--ranks must be"),
        (("--gpu-gb", "0"), "--gpu-gb must be greater than 0"),
        (("--model", "3B/nowhere/at/all"), "does not exist"),
        (("--quantize", "4bit"), "freezes the model"),
    ],
)
def test_mistakes_are_named(heedful, words, said):
    outcome = heedful("plan", "sft", *(("--model", "4B") if "--model" not in words else ()), *words)
    assert outcome.status == 2
    assert said in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(("words", "status"), [([], 2), (["-h"], 0), (["pppo"], 2)])
def test_plan_alone_lists_its_trainers(heedful, words, status):
    outcome = heedful("plan", *words)
    assert outcome.status == status
    said = outcome.err if status else outcome.out
    for name in ("sft", "reward", "ppo", "a2c", "grpo", "online-dpo", "dpo", "kto"):
        assert f"heedful plan {name}" in said
    if words == ["pppo"]:
        assert "plan has no trainer 'pppo'" in said
