"""`heedful sample`: which model wrote which answer, what is recorded, determinism, what is left out, and refusals."""

import json
from pathlib import Path

import pytest

from heedful.configs.tools import SampleConfig
from heedful.data import read_prompts, split_by_prompt
from heedful.rounds.sample import sample_answers

FAST = ("--max-new-tokens", "6", "--response-length", "fixed", "--device", "cpu", "--dtype", "float32")


def rows_of(path):
    return [json.loads(line) for line in Path(path).read_text("utf-8").split("\n") if line]


@pytest.fixture
def run(heedful, tiny, prompts, tmp_path):
    """``run(name, *flags, models=...)`` samples into a file and returns the outcome and the path."""

    def start(name, *flags, models=("qwen3",)):
        output = tmp_path / name
        words = ["--models", *(tiny(one) for one in models), "--data", prompts, "--output", output, *FAST, *flags]
        return heedful("sample", *words), output

    return start


def test_each_answer_says_what_wrote_it(run, tiny):
    outcome, output = run(
        "回答.jsonl", "--answers", "3", "--temperature", "0.9", "--seed", "5", models=("qwen3", "gpt2")
    )
    assert outcome.status == 0, outcome.err
    rows = rows_of(output)
    assert [row["难度"] for row in rows] == list(range(12)), "columns are kept, in the order of the file"
    assert rows[0]["prompt"] == [{"role": "user", "content": "猫用英文怎么说？ 0"}]
    assert rows[1]["prompt"] == "🦊 line\u2028break 1"
    for row in rows:
        checkpoints = [answer["source"]["checkpoint"] for answer in row["responses"]]
        assert checkpoints == [tiny("qwen3"), tiny("gpt2"), tiny("qwen3")]
        for answer in row["responses"]:
            assert answer["response"].strip()
            assert answer["source"] | {"checkpoint": "", "truncated": None} == {
                "checkpoint": "",
                "temperature": 0.9,
                "top_k": 0,
                "top_p": 1.0,
                "max_new_tokens": 6,
                "seed": 5,
                "truncated": None,
            }
            assert isinstance(answer["source"]["truncated"], bool)
    assert "prompts 12, answers 36; written to" in outcome.out


def test_the_seed_fixes_the_file(run):
    """The same model named twice draws other numbers: it would otherwise write every answer twice."""
    first, again, other = (
        run(name, "--seed", seed, models=("qwen3", "qwen3"))[1] for name, seed in (("甲", 1), ("乙", 1), ("丙", 2))
    )
    assert first.read_bytes() == again.read_bytes()
    texts, others = (
        [[one["response"] for one in row["responses"]] for row in rows_of(file)] for file in (first, other)
    )
    assert not any(mine == theirs for mine, theirs in zip(texts, others, strict=True))
    assert all(one != two for one, two in texts)


def test_prompts_are_drawn_and_held_out_ones_left_out(run, prompts):
    train, held_out = split_by_prompt(read_prompts(str(prompts)), 0.4)
    _, output = run("训练.jsonl", "--eval-fraction", "0.4")
    assert [row["难度"] for row in rows_of(output)] == [prompt.columns["难度"] for prompt in train]
    assert held_out
    drawn = [row["难度"] for row in rows_of(run("四.jsonl", "--max-prompts", "4", "--seed", "3")[1])]
    assert len(drawn) == 4
    assert drawn == sorted(drawn)
    assert drawn != [row["难度"] for row in rows_of(run("又四.jsonl", "--max-prompts", "4", "--seed", "4")[1])]


def test_a_prompt_that_is_too_long_is_refused_dropped_or_cut(run, prompts, written):
    long = written("长.jsonl", [{"prompt": "短"}] * 9 + [{"prompt": "长" * 200}])
    refused, output = run("一.jsonl", "--data", long)
    assert refused.status == 2
    assert "长.jsonl:10" in refused.message
    assert not output.exists()
    dropped, output = run("二.jsonl", "--data", long, "--too-long", "drop")
    assert (dropped.status, len(rows_of(output))) == (0, 9)
    assert "dropped_too_long 1" in dropped.out
    cut, output = run("三.jsonl", "--data", long, "--too-long", "truncate")
    assert (cut.status, len(rows_of(output))) == (0, 10)
    assert "truncated 1" in cut.out


def test_answers_cut_by_their_length_are_reported_with_their_share(run):
    """Not if all are to have one length."""
    outcome, output = run("回答.jsonl", "--response-length", "stop", "--max-new-tokens", "3")
    answers = [answer for row in rows_of(output) for answer in row["responses"]]
    cut = sum(answer["source"]["truncated"] for answer in answers)
    assert cut
    said = f"{cut} of {len(answers)} answers ({cut / len(answers):.1%}) were cut at --max-new-tokens 3; raise it"
    assert said in outcome.message
    assert "were cut" not in run("二.jsonl", "--max-prompts", "2")[0].message


def test_tools_of_a_prompt_are_kept(run, thinker, written):
    tools = [{"type": "function", "function": {"name": "天气", "parameters": {}}}]
    data = written("工具.jsonl", [{"prompt": [{"role": "user", "content": "北京？"}], "tools": tools}])
    outcome, output = run("回答.jsonl", "--data", data, "--models", thinker())
    assert outcome.status == 0, outcome.err
    assert rows_of(output)[0]["tools"] == tools


def test_refusals(run):
    for flags, said in (
        (("--models",), "--models"),
        (("--answers", "1"), "--answers 1 are fewer than the 2 --models"),
        (("--temperature", "0", "--answers", "3"), "need a --temperature above 0"),
        (("--max-new-tokens", "999"), "leaves no room for a prompt in the 128 tokens"),
        (("--models", "/没有"), "/没有"),
    ):
        outcome, output = run("回答.jsonl", *flags, models=("qwen3", "gpt2"))
        assert outcome.status == 2
        assert said in outcome.message
        assert not output.exists()


def test_only_its_own_files_are_replaced(run, tmp_path):
    few = ("--max-prompts", "2")
    assert run("回答.jsonl", *few)[0].status == 0
    assert "add --overwrite" in run("回答.jsonl")[0].message
    assert run("回答.jsonl", *few, "--overwrite")[0].status == 0
    (tmp_path / "日记.jsonl").write_text('{"prompt": "我的"}\n', encoding="utf-8")
    outcome, output = run("日记.jsonl", "--overwrite")
    assert outcome.status == 2
    assert "was not written by heedful sample" in outcome.message
    assert output.read_text("utf-8") == '{"prompt": "我的"}\n'
    (tmp_path / "文件").write_text("")
    assert "is a file" in run("文件/回答.jsonl")[0].message


def test_empty_answers_are_left_out_and_counted(tiny, prompts, tmp_path, monkeypatch):
    """A model that knows only the space: all its answers are white space, beside those of another one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    silent = tmp_path / "无言"
    tokenizer, model = AutoTokenizer.from_pretrained(tiny("gpt2")), AutoModelForCausalLM.from_pretrained(tiny("gpt2"))
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(50 * model.lm_head.weight[tokenizer(" ").input_ids[0]] / 0.02)
    model.save_pretrained(silent)
    tokenizer.save_pretrained(silent)
    settings = {"data": str(prompts), "max_new_tokens": 4, "device": "cpu", "dtype": "float32"}
    output = tmp_path / "回答.jsonl"
    counts = sample_answers(SampleConfig(models=(tiny("gpt2"), str(silent)), output=output, **settings))
    assert counts == {"prompts": 12, "answers": 12, "dropped_empty": 12, "dropped_prompts": 0}
    assert all(len(row["responses"]) == 1 for row in rows_of(output))
