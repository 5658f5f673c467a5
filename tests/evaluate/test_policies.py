"""Measures of policies on models whose answers are known, and against independent computations."""

import dataclasses
import json
import math
import re
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cases import pairs_often
from heedful import (
    ConfigError,
    DataError,
    KLConfig,
    PerplexityConfig,
    Reward,
    ScoresConfig,
    WinRateConfig,
    evaluate_kl,
    evaluate_perplexity,
    evaluate_scores,
    evaluate_win_rate,
)
from heedful.cli.main import main
from heedful.core import share_interval
from heedful.evaluate.output import report
from heedful.models import RewardModel


@pytest.fixture
def sampled(prompts, cpu):
    """Settings of the measures that sample: short, and of fixed length so that rows differ in content alone."""
    return {"data": prompts, "max_new_tokens": 8, "response_length": "fixed", **cpu}


def letters(completions, **_):
    return [sum(c.isascii() for c in text) / 10 for text in completions]


def test_a_policy_ties_with_itself(tiny, sampled):
    """The same seed gives both the same random numbers, so every response is the same."""
    result = evaluate_win_rate(WinRateConfig(model=tiny(), baseline=tiny(), **sampled), rewards=letters)
    rows = result["samples"]
    assert (result["win_rate"], result["ties"], result["prompts"]) == (0.5, 12, 12)
    assert result["interval_95"] == share_interval([[0.5]] * 12), "twelve ties do not prove that there are no others"
    assert result["score_mean"] == result["baseline_score_mean"]
    assert all(row["response"] == row["baseline"] for row in rows)
    assert len(rows) == 4


def test_rewards_may_be_functions_objects_and_strings(tiny, sampled, tmp_path):
    """As for train_ppo, several or one; they come behind those of the configuration."""
    file = tmp_path / "奖励.py"
    file.write_text(
        "def letters(completions):\n    return [sum(c.isascii() for c in text) / 10 for text in completions]\n"
    )
    reward = f"python:{file}:letters"
    config = ScoresConfig(model=tiny(), num_samples=12, **sampled)
    expected = evaluate_scores(dataclasses.replace(config, rewards=(reward,)))
    assert evaluate_scores(config, rewards=[Reward("letters", letters)]) == expected
    assert evaluate_scores(config, rewards=letters) == expected
    versus = WinRateConfig(model=tiny(), baseline=tiny(seed=1), num_samples=12, **sampled)
    weighted = {"reward_weights": (0.5, 2.0)}
    expected = evaluate_win_rate(dataclasses.replace(versus, rewards=("rule:digits", reward), **weighted))
    both = dataclasses.replace(versus, rewards=("rule:digits",), **weighted)
    assert evaluate_win_rate(both, rewards=letters) == expected
    assert 0 < expected["win_rate"] < 1


def test_missing_rewards_are_told_before_anything_is_loaded(sampled, capsys):
    """The models do not exist, and nobody has noticed yet."""
    missing = (
        "--rewards is missing: model:PATH (a reward model), python:FILE.py:FUNCTION, rule:NAME, verify:math, "
        "http://HOST:PORT/PATH, or judge:http://HOST:PORT/v1#MODEL (a language model); in Python, rewards= takes functions "
        "too"
    )
    with pytest.raises(ConfigError, match=re.escape(missing)):
        evaluate_scores(ScoresConfig(model="没有", **sampled))
    with pytest.raises(ConfigError, match=re.escape(missing)):
        evaluate_win_rate(WinRateConfig(model="没有", baseline="没有", **sampled))
    assert main(["evaluate", "scores", "--model", "没有", "--data", sampled["data"]]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"heedful: ConfigError: {missing}\n")


def test_max_prompts_seed_and_batch(tiny, sampled):
    """The batch changes nothing."""
    config = ScoresConfig(model=tiny(), num_samples=12, **sampled)
    one, other = (evaluate_scores(c, letters) for c in (config, dataclasses.replace(config, micro_batch_size=5)))
    assert one.pop("samples") == other.pop("samples")
    assert one.pop("interval_95") == pytest.approx(other.pop("interval_95"))
    assert one == pytest.approx(other)
    config = dataclasses.replace(config, max_prompts=3)
    first, other = (evaluate_scores(c, letters) for c in (config, dataclasses.replace(config, seed=1)))
    assert first["prompts"] == len(first["samples"]) == 3
    assert [r["response"] for r in other["samples"]] != [r["response"] for r in first["samples"]]


@pytest.mark.parametrize("measure", ["win-rate", "perplexity"])
def test_no_remedy_is_offered_that_the_command_lacks(measure, tiny, written, capsys):
    """Too long a prompt or text: every flag in the message must exist."""
    records = [{"prompt": "长" * 60, "completion": "答"}]
    more = {"win-rate": ["--rewards", "rule:digits", "--baseline", tiny()], "perplexity": []}
    status = main(["evaluate", measure, "--model", tiny(), "--data", written(records), *more[measure]])
    message = capsys.readouterr().err
    assert status == 2
    assert "longer than" in message
    with pytest.raises(SystemExit):
        main(["evaluate", measure, "--help-all"])
    known = capsys.readouterr().out
    for word in message.split():
        if word.startswith("--"):
            assert word.strip(".,:;") in known, f"{word} is no flag of evaluate {measure}"


@pytest.fixture
def letter_models(tiny, tmp_path):
    """Two models that write ASCII letters alone, so that a response's tokens are known from its text."""
    folders = []
    for seed in (0, 1):
        tokenizer = AutoTokenizer.from_pretrained(tiny("llama"))
        model = AutoModelForCausalLM.from_pretrained(tiny("llama", seed=seed))
        letters = tokenizer("abcdefghijklmnop").input_ids
        model.config.tie_word_embeddings = False
        model.lm_head = torch.nn.Linear(32, len(tokenizer), bias=False)
        with torch.no_grad():
            # Part 0 of the state is large after every token; the output weighs it up for letters, down for the rest.
            model.lm_head.weight[:, 0] = -8.0
            model.lm_head.weight[letters, 0] = 8.0
            model.model.embed_tokens.weight[:, 0] = 0.05
        folders.append(str(tmp_path / str(seed)))
        model.save_pretrained(folders[-1])
        tokenizer.save_pretrained(folders[-1])
    return folders


def test_kl_is_the_mean_of_the_summed_log_ratios(letter_models, sampled):
    """Against a plain teacher-forced pass of transformers, at a temperature that divides both models' logits."""
    config = KLConfig(model=letter_models[0], reference=letter_models[1], num_samples=12, temperature=1.5, **sampled)
    result = evaluate_kl(config)
    rows = result["samples"]
    tokenizer = AutoTokenizer.from_pretrained(letter_models[0])
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in letter_models]
    checked = 0
    for row in rows:
        prompt, response = tokenizer(row["prompt"]).input_ids, tokenizer(row["response"]).input_ids
        if not row["response"].isascii():
            continue
        ids = torch.tensor([prompt + response])
        with torch.no_grad():
            one, other = (
                (model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / 1.5).log_softmax(-1) for model in models
            )
        expected = float((one - other)[range(8), response].sum())
        assert row["kl"] == pytest.approx(expected, abs=1e-4)
        checked += 1
    assert checked >= 3
    assert result["kl"] == pytest.approx(sum(row["kl"] for row in rows) / 12)
    assert result["kl_per_token"] == pytest.approx(result["kl"] / 8)
    assert result["kl"] > 0.1


def test_kl_between_vocabularies_is_refused(tiny, sampled, tmp_path):
    """A reference that lacks a token of the policy, or gives it another id; it may know more."""
    model = AutoModelForCausalLM.from_pretrained(tiny())
    tokenizer = AutoTokenizer.from_pretrained(tiny())
    tokenizer.add_tokens(["苹果"])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(tmp_path / "more")
    tokenizer.save_pretrained(tmp_path / "more")
    with pytest.raises(ConfigError, match=r"--reference .* has another vocabulary"):
        evaluate_kl(KLConfig(model=str(tmp_path / "more"), reference=tiny(), **sampled))
    more = evaluate_kl(KLConfig(model=tiny(), reference=str(tmp_path / "more"), **sampled))
    assert 0 < more["kl_per_token"] < 0.1  # the share of one token in 265
    shutil.copytree(tiny(), tmp_path / "other")
    content = json.loads((tmp_path / "other" / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["b"], vocabulary["c"] = vocabulary["c"], vocabulary["b"]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--reference .*other has another vocabulary"):
        evaluate_kl(KLConfig(model=tiny(), reference=str(tmp_path / "other"), **sampled))


def independent_losses(folder, rows, length):
    """Negative log-likelihood of every token but the first of each row, in pieces that overlap by one token."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    losses = []
    for ids in rows:
        for start in range(0, len(ids) - 1, length - 1):
            piece = torch.tensor([ids[start : start + length]])
            with torch.no_grad():
                logits = model(input_ids=piece).logits[0, :-1]
            losses += torch.nn.functional.cross_entropy(logits, piece[0, 1:], reduction="none").tolist()
    return losses


@pytest.mark.parametrize(
    ("length", "architecture"), pairs_often([None, 17], ["gpt2", "qwen3"], [(None, "gpt2"), (17, "qwen3")])
)
def test_perplexity_of_text_longer_than_the_context(tiny, written, cpu, architecture, length):
    folder = tiny(architecture)
    texts = ["从前有一座山，" * 20, "a tale of two cities", "短", "x" * 127, "y" * 128]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in texts]
    losses = independent_losses(folder, rows, length or 128)
    config = PerplexityConfig(
        model=folder, data=written([{"text": t} for t in texts]), max_length=length, micro_batch_size=3, **cpu
    )
    result = evaluate_perplexity(config)
    limited = evaluate_perplexity(dataclasses.replace(config, micro_batch_size=1000, micro_batch_tokens=40))
    assert limited == pytest.approx(result, rel=1e-6)
    assert result["tokens"] == len(losses) == sum(len(t.encode()) for t in texts)
    assert result["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)


def test_perplexity_of_demonstrations(tiny, written, cpu):
    folder, prompt, response = tiny(), "一加一等于几？", "等于二。"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [*tokenizer(prompt + response).input_ids, tokenizer.eos_token_id]
    losses = independent_losses(folder, [ids], 128)
    data = written([{"prompt": prompt, "completion": response}])
    for loss_on, counted in (("all", losses), ("response", losses[len(prompt.encode()) - 1 :])):
        result = evaluate_perplexity(PerplexityConfig(model=folder, data=data, loss_on=loss_on, **cpu))
        assert result["tokens"] == len(counted)
        assert result["loss"] == pytest.approx(sum(counted) / len(counted), abs=1e-5)


def test_a_text_of_one_token_has_nothing_to_measure(tiny, written, cpu):
    """One byte that is marked as cut: no token has another before it. Division by zero would be a traceback."""
    with pytest.raises(DataError, match=r"1 too short"):
        evaluate_perplexity(PerplexityConfig(model=tiny(), data=written([{"text": "a", "truncated": True}]), **cpu))


def strict_json(path):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def test_the_result_as_json(tiny, prompts, tmp_path, capsys):
    output = tmp_path / "结果" / "[a]一.json"
    arguments = ["evaluate", "perplexity", "--model", tiny(), "--data", prompts, "--columns", "text=prompt"]
    assert main([*arguments, "--dtype", "float32", "--output", str(output)]) == 0
    config = PerplexityConfig(model=tiny(), data=prompts, columns="text=prompt", dtype="float32", output=output)
    written = strict_json(output)
    assert written.pop("settings") == dataclasses.asdict(config) | {"output": str(output)}
    assert written == evaluate_perplexity(config)
    assert [path.name for path in output.parent.iterdir()] == ["[a]一.json"]
    printed = capsys.readouterr().out
    assert f"perplexity: {strict_json(output)['perplexity']:.4f}" in printed
    assert f"written to {output}" in printed


def test_a_result_that_cannot_be_written_is_told_before_the_work(tiny, prompts, tmp_path, capsys):
    """Not a traceback after an hour of sampling."""
    (tmp_path / "结果" / "r.json").mkdir(parents=True)
    (tmp_path / "文件").write_text("a file where a folder should be", encoding="utf-8")
    arguments = ["evaluate", "scores", "--model", tiny(), "--data", prompts, "--rewards", "rule:digits"]
    for place in ("结果", "文件"):
        assert main([*arguments, "--max-new-tokens", "3", "--output", str(tmp_path / place / "r.json")]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "--output" in captured.err


def test_report_prints_what_it_is_given(tmp_path, capsys):
    """What was measured, and how, in one file; a number that is not finite becomes null."""
    samples = [{"prompt": "[bold]你好[/bold]", "response": "a\nb", "score": math.nan}]
    config = ScoresConfig(model="m", data="d", rewards=("rule:digits",), output=tmp_path / "x" / "r.json")
    report({"kl": 0.25, "prompts": 3, "score_mean": math.inf, "samples": samples}, config)
    printed = capsys.readouterr().out
    assert "samples:" not in printed
    for fragment in ("kl: 0.2500", "prompts: 3", "[bold]你好[/bold]", "a\\nb"):
        assert fragment in printed
    settings = dataclasses.asdict(config) | {"output": str(config.output)}
    settings |= {name: list(value) for name, value in settings.items() if isinstance(value, tuple)}
    saved = {"score_mean": None, "samples": [samples[0] | {"score": None}], "settings": settings}
    assert strict_json(config.output) == {"kl": 0.25, "prompts": 3, **saved}


def lengths(written, *, fine, long, unusable=0):
    """Prompts of 3 tokens, of 126, and empty ones."""
    texts = ["abc"] * fine + ["x" * 126] * long + [" "] * unusable
    return written([{"prompt": text} for text in texts])


def test_too_long_prompts_are_dropped_or_cut_and_counted(tiny, written, cpu):
    """Of 128 tokens, 4 are for the response."""
    data = lengths(written, fine=9, long=1)
    config = ScoresConfig(model=tiny(), data=data, max_new_tokens=4, num_samples=10, **cpu)

    def measured(**changes):
        return evaluate_scores(dataclasses.replace(config, **changes), letters)

    with pytest.raises(DataError, match=r"1 of 10 prompts are longer than 124 tokens: .*数据\.jsonl:10 \(126 tokens\)"):
        measured()
    dropped = measured(too_long="drop")
    assert (dropped["prompts"], dropped["dropped_too_long"]) == (9, 1)
    assert "truncated" not in dropped
    assert [row["prompt"] for row in dropped["samples"]] == ["abc"] * 9
    cut = measured(too_long="truncate", max_dropped=0.0)
    assert (cut["prompts"], cut["truncated"]) == (10, 1)
    assert "dropped_too_long" not in cut
    said = r"1 of 10 records \(10.0%\) would be dropped \(1 too long\).*--max-dropped 0\.09"
    with pytest.raises(DataError, match=said):
        measured(too_long="drop", max_dropped=0.09)
    assert not {"dropped_too_long", "truncated"} & measured(data=lengths(written, fine=3, long=0)).keys()


def test_each_policy_drops_its_own_and_both_lose_them(tiny, written, cpu):
    """A prompt is counted once, though both models might refuse it."""
    data = written([{"prompt": text} for text in ("甲", "y" * 50, "乙", "x" * 120)])
    models = {"model": tiny(max_length=128), "baseline": tiny(max_length=64)}
    config = WinRateConfig(**models, data=data, max_new_tokens=20, too_long="drop", max_dropped=0.5, **cpu)
    result = evaluate_win_rate(config, letters)
    assert (result["prompts"], result["dropped_too_long"]) == (2, 2)
    assert [row["prompt"] for row in result["samples"]] == ["甲", "乙"]


def test_kl_of_filtered_responses_is_refused(tiny, prompts):
    """They are drawn from another distribution than the one whose log-probabilities are compared."""
    for filtered, flag in (({"top_p": 0.9}, "--top-p"), ({"temperature": 0.0}, "--temperature")):
        with pytest.raises(ConfigError, match=flag):
            evaluate_kl(KLConfig(model=tiny(), reference=tiny(), data=prompts, **filtered))


def test_perplexity_counts_what_it_leaves_out(tiny, written, cpu):
    """Too long a demonstration, a text of one token and an unusable record, each under its own name."""
    records = [{"prompt": "问", "completion": "答"}] * 17
    records += [{"prompt": "长" * 60, "completion": "答"}, {"prompt": "问", "completion": "答" * 60}]
    records += [{"text": "a", "truncated": True}]
    config = PerplexityConfig(model=tiny(), data=written(records), too_long="truncate", max_dropped=0.1, **cpu)
    result = evaluate_perplexity(config)
    assert (result["dropped_too_long"], result["dropped_too_short"], result["truncated"]) == (1, 1, 1)
    assert result["records"] == 20
    with pytest.raises(DataError, match=r"2 of 20 records \(10.0%\) would be dropped \(1 too long, 1 too short\)"):
        evaluate_perplexity(dataclasses.replace(config, max_dropped=0.09))
    dropped = evaluate_perplexity(dataclasses.replace(config, too_long="drop", max_dropped=0.15))
    assert (dropped["dropped_too_long"], dropped["tokens"]) == (2, 17 * 4)


def test_a_perplexity_beyond_all_numbers_is_infinite(uniform_model, written, cpu, monkeypatch):
    """Not an OverflowError after the work; the loss says how large it is."""
    from heedful.evaluate import policies

    def hopeless(policy, batch, **settings):
        outputs = token_outputs(policy, batch, **settings)
        return outputs._replace(logprobs=-1000.0 * batch.response_mask)

    token_outputs = policies.token_outputs
    monkeypatch.setattr(policies, "token_outputs", hopeless)
    result = evaluate_perplexity(PerplexityConfig(model=uniform_model, data=written([{"text": "ab"}]), **cpu))
    assert (result["perplexity"], result["loss"]) == (math.inf, 1000.0)


def test_micro_batches_reach_reward_models(tiny, planted_model, sampled, monkeypatch):
    rows = []
    forward = RewardModel.forward

    def spy(self, batch):
        rows.append(len(batch))
        return forward(self, batch)

    monkeypatch.setattr(RewardModel, "forward", spy)
    short = sampled | {"max_new_tokens": 2}
    config = ScoresConfig(model=tiny(), rewards=(f"model:{planted_model}",), micro_batch_size=5, **short)
    evaluate_scores(config)
    evaluate_scores(dataclasses.replace(config, micro_batch_tokens=1))
    assert rows == [5, 5, 2] + [1] * 12


def test_the_command_takes_the_options_for_records(tiny, written, capsys, tmp_path):
    """One prompt is left: a variance needs two, and NaN is no JSON, which other tools refuse to read."""
    output = tmp_path / "r.json"
    data = lengths(written, fine=1, long=1, unusable=1)
    arguments = ["evaluate", "scores", "--model", tiny(), "--data", data, "--rewards", "rule:digits"]
    more = ["--max-new-tokens", "4", "--too-long", "drop", "--unusable", "drop", "--max-dropped", "0.9"]
    assert main([*arguments, *more, "--output", str(output)]) == 0
    result = strict_json(output)
    assert (result["prompts"], result["dropped_unusable"], result["dropped_too_long"]) == (1, 1, 1)
    assert (result["settings"]["too_long"], result["settings"]["max_dropped"]) == ("drop", 0.9)
    assert (len(result["samples"]), result["interval_95"]) == (1, None)
    assert "dropped_too_long: 1" in capsys.readouterr().out
