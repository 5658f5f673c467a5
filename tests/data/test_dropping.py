"""--unusable drop: named by every error that it solves and by no other, and what it drops is counted by cause."""

import json

import pytest

NO_SYSTEM = """{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system message') }}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
SHORT = ["--eval-fraction", "0", "--sample-every", "0", "--dtype", "float32"]
TRAIN = {
    "sft": ["--max-steps", "1", "--batch-size", "2"],
    "reward": ["--max-steps", "1", "--batch-size", "2"],
    "dpo": ["--max-steps", "1", "--batch-size", "2"],
    "grpo": ["--steps", "1", "--rollout-batch-size", "2", "--minibatch-size", "2", "--samples-per-prompt", "2",
             "--max-new-tokens", "2", "--rewards", "rule:digits"],
}  # fmt: skip
HH = "\n\nHuman: 你好\n\nAssistant:"


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "简短"}


def asked(i, *before):
    return [*before, user(f"第{i}个问题")]


RECORDS = {
    "sft": lambda i, *before: {"messages": [*asked(i, *before), assistant(f"答{i}")]},
    "grpo": lambda i, *before: {"prompt": asked(i, *before)},
}


@pytest.fixture
def train(heedful, thinker, tmp_path):
    """``train(command, path, *flags)`` runs a trainer for a step; its counts, if it ends well."""

    def run(command, path, *flags):
        words = ["--model", thinker(NO_SYSTEM), "--data", path, "--output", tmp_path / "运行", "--overwrite"]
        done = heedful(command, *words, *SHORT, *TRAIN[command], *flags)
        summary = tmp_path / "运行" / "summary.json"
        return done, json.loads(summary.read_text())["data"] if done.status == 0 else None

    return run


@pytest.mark.parametrize("command", ["sft", "grpo"])
def test_a_record_that_the_template_refuses(command, train, written):
    """The error names the flag, and the flag drops the record, with the template's refusal as the cause."""
    make = RECORDS[command]
    path = written("数据.jsonl", [make(i, *([SYSTEM] if i in (3, 7) else [])) for i in range(24)])
    done, _ = train(command, path)
    assert done.status == 2
    for part in (f"{path}:4: the chat template refuses", "no system message", "(2 of 24)", "--unusable drop."):
        assert part in done.message
    assert "--max-dropped" not in done.message
    done, counts = train(command, path, "--unusable", "drop")
    assert done.status == 0, done.err
    assert counts["records"] == 24
    assert counts["dropped_unusable"] == counts["unusable/the chat template refuses it"] == 2
    assert "dropped unusable 2, unusable/the chat template refuses it 2" in done.err


def test_what_dropping_does_not_solve_does_not_name_it(train, written):
    """Every record is refused, by the reader or by the template; or a fault that is always an error."""
    for path in (
        written("一.jsonl", [{"prompt": "问", "completion": ""}] * 5),
        written("二.jsonl", [RECORDS["sft"](i, SYSTEM) for i in range(5)]),
        written("三.jsonl", '{"prompt": "问", "completion": "答"}\n{"prompt": }\n'),
    ):
        done, _ = train("sft", path)
        assert (done.status, f"{path}:" in done.message, "--unusable" in done.err) == (2, True, False), done.err


def test_more_than_may_be_dropped_is_said_with_the_flag(train, written):
    rows = [{"prompt": f"问{i}", "completion": f"答{i}" if i % 3 else " "} for i in range(30)]
    path = written("数据.jsonl", rows)
    done, _ = train("sft", path)
    assert "To leave out such records (10 of 30) and count them: --unusable drop --max-dropped 0.34." in done.message
    done, counts = train("sft", path, "--unusable", "drop", "--max-dropped", "0.34")
    assert (done.status, counts["dropped_unusable"], counts["unusable/empty completion"]) == (0, 10, 10)


def test_raw_dialogues_of_anthropic(train, written):
    """Each cause is counted for itself."""
    rows = [{"chosen": f"{HH} 好{i}", "rejected": f"{HH} 坏{i}"} for i in range(40)]
    rows[8]["rejected"] = " "
    rows[9]["rejected"] = f"{HH} 一\n\nHuman: 二\n\nAssistant: 三"
    rows[11]["chosen"] = HH + " "
    path = written("hh.jsonl", rows)
    done, _ = train("dpo", path)
    assert f"{path}:9: " in done.message
    assert "(3 of 40) and count them: --unusable drop." in done.message
    done, counts = train("dpo", path, "--unusable", "drop")
    causes = {name: n for name, n in counts.items() if name.startswith("unusable/")}
    assert causes == {"unusable/no dialogue": 1, "unusable/no shared prompt": 1, "unusable/empty chosen": 1}
    assert counts["dropped_unusable"] == 3


def test_equal_answers(train, written):
    """--equal-pairs drop counts them for itself; --unusable drop covers them too."""
    rows = [{"prompt": f"问{i}", "chosen": f"好{i}", "rejected": f"坏{i}"} for i in range(30)]
    rows[4]["rejected"] = rows[4]["chosen"]
    path = written("数据.jsonl", rows)
    done, _ = train("dpo", path)
    assert f"{path}:5. Fix the data, or use --equal-pairs drop or --unusable drop" in done.message
    done, counts = train("dpo", path, "--unusable", "drop")
    assert (counts["dropped_unusable"], counts["unusable/equal answers"]) == (1, 1)
    done, counts = train("reward", path, "--unusable", "drop", "--equal-pairs", "drop")
    assert (counts["dropped_equal"], "dropped_unusable" in counts) == (1, False)


def test_rankings_all_of_whose_answers_are_equal(train, written):
    """One of which only two answers are equal, at different ranks, contradicts itself: --equal-pairs."""
    rows = [{"prompt": f"问{i}", "responses": [f"好{i}", f"中{i}", f"坏{i}"], "ranks": [0, 1, 2]} for i in range(30)]
    rows[4]["responses"] = ["好", "好", "好"]
    path = written("数据.jsonl", rows)
    done, counts = train("reward", path, "--unusable", "drop")
    assert (done.status, counts["unusable/equal answers"]) == (0, 1)
    rows[6]["responses"] = ["好", "好", "坏"]
    path = written("数据.jsonl", rows)
    done, _ = train("reward", path, "--unusable", "drop")
    assert f"{path}:7. Fix the data, or use --equal-pairs drop" in done.message


def test_measuring_drops_them_too(heedful, thinker, written, tmp_path):
    for what, command, flags in (
        ("perplexity", "sft", []),
        ("scores", "grpo", ["--rewards", "rule:digits", "--max-new-tokens", "2"]),
    ):
        path = written("数据.jsonl", [RECORDS[command](i, *([SYSTEM] if i == 5 else [])) for i in range(12)])
        words = ["--model", thinker(NO_SYSTEM), "--data", path, "--output", tmp_path / f"{what}.json", *flags]
        done = heedful("evaluate", what, *words)
        assert (done.status, "(1 of 12) and count them: --unusable drop." in done.message) == (2, True), done.err
        done = heedful("evaluate", what, *words, "--unusable", "drop")
        assert done.status == 0, done.err
        result = json.loads((tmp_path / f"{what}.json").read_text())
        assert result["unusable/the chat template refuses it"] == result["dropped_unusable"] == 1
