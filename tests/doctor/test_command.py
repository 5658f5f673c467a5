"""`heedful doctor` as a command, and the cheap checks before training."""

import json

import pytest

from heedful import ConfigError, OnlineDPOConfig, PPOConfig, SFTConfig, train_sft
from heedful.algorithms.online.start import start
from trainers import CONFIGS, MODULES

RECORDS = [
    {"prompt": [{"role": "user", "content": f"问{i}"}], "completion": [{"role": "assistant", "content": "好的。"}]}
    for i in range(8)
]
CUT = [record | {"truncated": i > 0} for i, record in enumerate(RECORDS)]
SMALL = {"batch_size": 4, "max_steps": 1, "eval_fraction": 0, "sample_every": 0, "dtype": "float32"}
NO_ENDS = {"max_length": 9, "too_long": "truncate", "max_dropped": 0.9}
"""Every response is cut to its first tokens."""


@pytest.fixture
def settings(tiny, written, tmp_path):
    """``settings(records)`` are those of a small SFT run on them."""

    def make(records, **more):
        files = {"model": tiny("gpt2"), "data": written("数据.jsonl", records), "output": str(tmp_path / "运行")}
        return files | SMALL | more

    return make


def test_a_run_without_ends_is_refused_unless_it_is_allowed(heedful, settings, tmp_path):
    """By the command with a status, in Python with an error."""
    with pytest.raises(ConfigError, match="no-end-token"):
        train_sft(SFTConfig(**settings(RECORDS, **NO_ENDS)))
    cut = settings(RECORDS, **NO_ENDS)
    outcome = heedful("sft", **cut)
    assert outcome.status == 2, outcome.err
    assert "ConfigError: no-end-token: 8 of 8 learned responses do not end with" in outcome.message
    assert "heedful doctor shows more; --allow no-end-token begins all the same" in outcome.message
    assert not (tmp_path / "运行").exists()
    outcome = heedful("sft", **cut | {"allow": "no-end-token"})
    assert outcome.status == 0, outcome.err
    lines = [line for line in outcome.err.splitlines() if "WARNING" in line]
    assert len(lines) == 2
    assert lines[0].startswith("heedful: WARNING: no-end-token: 8 of 8 learned responses do not end")
    assert "Fix: " in lines[0]


def beside(records):
    """What each trainer reads: the same prompts and responses in its columns."""
    answers = [record["completion"] for record in records]
    prompts = [{"prompt": record["prompt"]} for record in records]
    worse = [{"role": "assistant", "content": "不知道。"}]
    pairs = [one | {"chosen": answer, "rejected": worse} for one, answer in zip(prompts, answers, strict=True)]
    labelled = [one | {"label": i % 2 == 0} for i, one in enumerate(records)]
    return {"sft": records, "reward": pairs, "dpo": pairs, "kto": labelled, "ppo": prompts, "online-dpo": prompts}


@pytest.mark.parametrize("name", [*CONFIGS, "ppo", "online-dpo"])
def test_every_trainer_examines_its_data_before_it_begins(name, tiny, written, tmp_path, capsys):
    path = str(written("数据.jsonl", beside(RECORDS)[name]))
    given = {"model": tiny("gpt2"), "data": path, "eval_data": path, "output": tmp_path / "run"}
    if name in CONFIGS:
        MODULES[name].start(CONFIGS[name](**given, batch_size=4))
    else:
        kind = {"ppo": PPOConfig, "online-dpo": OnlineDPOConfig}[name]
        start(kind(**given, rewards=("rule:digits",), rollout_batch_size=4, minibatch_size=4, max_new_tokens=4), [])
    assert capsys.readouterr().err.count("WARNING: held-out-trained-on: ") == 1


@pytest.mark.exhaustive
def test_a_run_that_resumes_repeats_no_warnings(heedful, settings, tmp_path):
    run = settings(CUT, max_steps=2, save_every=1)
    assert "WARNING: no-end-token" in heedful("sft", **run).err
    (tmp_path / "运行" / "summary.json").unlink()
    outcome = heedful("sft", **run)
    assert outcome.status == 0, outcome.err
    assert "resumes after step 2 of 2" in outcome.err
    assert "WARNING" not in outcome.err


@pytest.mark.exhaustive
def test_what_is_allowed_may_change_when_a_run_resumes(heedful, settings, tmp_path):
    run = settings(RECORDS, max_steps=2, save_every=1)
    assert heedful("sft", **run).status == 0
    (tmp_path / "运行" / "summary.json").unlink()
    assert heedful("sft", **run | {"allow": "double-bos"}).status == 0


def test_an_unknown_check_is_refused_with_the_list(heedful, settings):
    outcome = heedful("sft", **settings(RECORDS, allow="no-ends"))
    assert outcome.status == 2
    assert "--allow no-ends is not a check; there are no-end-token, stops-early" in outcome.message
    assert "disk" in outcome.message


def test_an_examination_on_the_terminal(heedful, settings, tmp_path):
    file = tmp_path / "数据-sft.yaml"
    run = settings(CUT)
    file.write_text("".join(f"{name}: {value}\n" for name, value in run.items()), encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    outcome = heedful("doctor", str(file), "--examples", "1")
    assert outcome.status == 0, outcome.err
    assert sorted(tmp_path.rglob("*")) == before
    assert f"{run['data']}:1: 17 tokens, 10 of them learned" in outcome.out
    assert "  text    <|user|>问0<|end|><|assistant|>好的。<|end|>" in outcome.out
    assert "  tokens  <|user|>|问|0|<|end|>|<|assistant|> [好|的|。|<|end|>]" in outcome.out
    assert "WARN no-end-token: 7 of 8 learned responses" in outcome.out
    for part in ("evidence", "why", "fix"):
        assert f"\n  {part:<9}" in outcome.out
    assert "one step took " in outcome.out
    assert outcome.out.rstrip().endswith("verdict: ready to train, with 1 to look at: no-end-token")
    assert heedful("doctor", "sft", **run).out.count("WARN no-end-token") == 1


@pytest.mark.parametrize(
    ("command", "names"),
    [("dpo", ["1 chosen", "1 rejected"]), ("reward", ["1 chosen", "1 rejected"]), ("kto", ["1 good", "2 bad"])],
)
def test_an_example_says_which_response_it_is(heedful, settings, command, names):
    """Swapped labels are seen by eye."""
    run = settings(beside(RECORDS)[command])
    out = heedful("doctor", command, **run).out
    assert [line.partition(": ")[0] for line in out.splitlines() if "jsonl" in line] == [
        f"{run['data']}:{name}" for name in names
    ]


def test_a_failure_ends_with_status_2(heedful, settings):
    cut = settings(RECORDS, **NO_ENDS)
    outcome = heedful("doctor", "sft", **cut)
    assert outcome.status == 2
    assert "FAIL no-end-token" in outcome.out
    assert outcome.out.rstrip().endswith(
        "verdict: do not train yet: no-end-token; --allow no-end-token begins all the same"
    )
    assert heedful("doctor", "sft", **cut | {"allow": "no-end-token"}).status == 0


def test_json_is_all_of_standard_output(heedful, settings):
    outcome = heedful("doctor", "sft", "--json", **settings(CUT))
    content = json.loads(outcome.out)
    assert content["verdict"] == "warn"
    (one,) = content["findings"]
    assert one.keys() == {"check", "level", "what", "evidence", "why", "fix"}
    assert content["measured"]["steps"] == 1
    assert content["measured"]["processor"].startswith("processor: ")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("无.yaml", None, "there is no such YAML file"),
        ("一-sft.yaml", "modle: x\n", "modle (--modle) is not a setting"),
        ("一.yaml", "model: x\ndata: y\n", "name the trainer: heedful doctor"),
        ("一-sft.yaml", "model: 没有/这个\ndata: y\n", "没有/这个"),
    ],
)
def test_bad_input_is_one_message(heedful, tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    outcome = heedful("doctor", str(tmp_path / name))
    assert outcome.status == 2
    assert said in outcome.message + " ".join(outcome.out.split())
    assert "Traceback" not in outcome.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ([] if content is None else [name])


def test_what_heedful_refuses_is_its_message_alone(heedful, tmp_path):
    """Which says why, and what to do."""
    outcome = heedful("doctor", "sft", model=tmp_path, data=tmp_path / "没有.jsonl")
    assert outcome.status == 2
    assert "FAIL refused: " in outcome.out
    assert "\n  why" not in outcome.out
    assert "\n  fix" not in outcome.out
