"""Every bad input that issue 2 lists, through the command line.

Each ends with status 2 and a message on standard error that says what, where, and how to mend it; nothing on standard
output, no traceback, and no trace of a run on disk. Then the inputs that look bad and must work.
"""

import json
import math
import shutil

import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from cases import often, pairs_often

TRAINERS = ("sft", "reward", "ppo", "grpo", "dpo", "kto")
ONLINE = ("ppo", "grpo")
PAIRS = ("reward", "dpo")


def of_commands(commands):
    """Of commands that read the same data in the same way, the first; the others are exhaustive."""
    return pytest.mark.parametrize(
        "command", [pytest.param(one, marks=pytest.mark.exhaustive) if one in ALIKE else one for one in commands]
    )


ALIKE = ("grpo", "dpo")
each_trainer, each_online, on_pairs = map(of_commands, (TRAINERS, ONLINE, PAIRS))
offline_and_online = pytest.mark.parametrize("command", often(TRAINERS, ("sft", "ppo")))
"""Of what does not depend on the kind of data, one trainer of each; the others are exhaustive."""
LONG = "很长的问题" * 20
UNIT = {"sft": "demonstrations", "reward": "pairs", "ppo": "prompts", "grpo": "prompts", "dpo": "pairs"}
UNIT["kto"] = "labelled responses"
LONG_RECORD = {
    "sft": {"prompt": LONG, "completion": "答"},
    "reward": {"prompt": LONG, "chosen": "好", "rejected": "坏"},
    "ppo": {"prompt": LONG},
}
LONG_RECORD |= {"grpo": LONG_RECORD["ppo"], "dpo": LONG_RECORD["reward"]}
LONG_RECORD["kto"] = LONG_RECORD["sft"] | {"label": True}
RECORD = {
    "sft": {"prompt": "问", "completion": "答"},
    "reward": {"prompt": "问", "chosen": "好", "rejected": "坏"},
    "ppo": {"prompt": "问"},
}
RECORD |= {"grpo": RECORD["ppo"], "dpo": RECORD["reward"]}
RECORD["kto"] = RECORD["sft"] | {"label": False}


def different(command, number):
    """Records with prompts and answers of their own."""
    answers = RECORD[command].keys() & {"completion", "chosen", "rejected"}
    return [
        RECORD[command] | {"prompt": f"第{i}问"} | {name: f"{RECORD[command][name]}{i}" for name in answers}
        for i in range(number)
    ]


@pytest.fixture
def refused(tmp_path):
    """``refused(outcome, *fragments)``: a user's mistake, told; nothing written but what the test wrote itself."""

    def check(outcome, *fragments, output=None):
        assert outcome.status == 2, outcome.err
        assert outcome.out == ""
        assert "Traceback" not in outcome.err
        for fragment in fragments:
            assert fragment in outcome.message, outcome.message
        assert not (output or tmp_path / "运行").exists()
        left = [p.name for p in tmp_path.iterdir() if p.name.startswith(".") or p.name.endswith(".partial")]
        assert left == []
        return outcome.message

    return check


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Where `finished` keeps runs."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def finished(train, kept, tmp_path):
    """``finished(command)`` puts a finished run of a trainer, made once, to where `train` writes; its files are returned."""

    def put(command):
        if not (kept / command).exists():
            assert train(command, output=kept / command).status == 0
        shutil.copytree(kept / command, tmp_path / "运行")
        return contents(tmp_path / "运行")

    return put


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Keys, types and files ------------------------------------------------------------------------------------------------


@offline_and_online
def test_unknown_key_in_yaml(train, heedful, refused, written, command, tmp_path):
    path = written("配置.yaml", f"model: m\ndata: d\noutput: {tmp_path / '运行'}\nlearning_rat: 1e-5\n")
    refused(heedful(command, path), "--learning-rat", "Perhaps you meant", "--learning-rate", f"{path}:4")


@offline_and_online
def test_wrong_type_in_yaml(heedful, refused, written, command, tmp_path):
    path = written("配置.yaml", f"model: m\ndata: d\noutput: {tmp_path / '运行'}\nmicro_batch_size: 许多\n")
    refused(heedful(command, path), "--micro-batch-size", "许多", f"{path}:4")


@offline_and_online
def test_unknown_flag(train, refused, command):
    refused(train(command, "--micro-batch", "2"), "--micro-batch", "Perhaps you meant", "--micro-batch-size")


@offline_and_online
def test_wrong_type_of_a_flag(train, refused, command):
    refused(train(command, "--warmup-steps", "1.5"), "--warmup-steps", "1.5")


@offline_and_online
def test_missing_data(train, refused, command, tmp_path, data):
    near = data(command)
    missing = near.replace("数据", "数居")
    refused(train(command, data_file=missing), missing, "no such file", "Perhaps you meant", f"{command}-数据.jsonl")


@offline_and_online
def test_missing_eval_data(train, refused, command, tmp_path):
    refused(train(command, "--eval-data", tmp_path / "没有.jsonl"), "没有.jsonl", "no such file")


@offline_and_online
def test_missing_model(train, refused, command, tmp_path):
    (tmp_path / "故事模型").mkdir()
    refused(train(command, model=tmp_path / "故事摸型"), "故事摸型 does not exist", "did you mean", "故事模型")


@offline_and_online
def test_a_folder_that_holds_no_model(train, refused, command, tmp_path):
    """The run's folder instead of its final/ is the likely mistake, so the message proposes it."""
    (tmp_path / "旧" / "final").mkdir(parents=True)
    (tmp_path / "旧" / "final" / "config.json").write_text("{}")
    refused(
        train(command, model=tmp_path / "旧"), "not a Hugging Face model", f"did you mean {tmp_path / '旧' / 'final'}"
    )


@pytest.mark.parametrize("command", ["grpo", "dpo"])
def test_a_missing_reference(train, refused, command, tmp_path):
    refused(train(command, "--reference", tmp_path / "没有"), "没有 does not exist")


@pytest.mark.parametrize("flag", ["--reference", "--value-model"])
def test_missing_models_of_ppo(train, refused, flag, tmp_path):
    refused(train("ppo", "--critic", "separate", flag, tmp_path / "没有"), "没有 does not exist")


@offline_and_online
def test_missing_yaml(heedful, refused, command, tmp_path):
    refused(heedful(command, tmp_path / "没有.yaml"), "没有.yaml", "no such YAML file")


@offline_and_online
def test_missing_template_file(train, refused, command):
    refused(train(command, "--chat-template", "没有.jinja"), "--chat-template", "没有.jinja", "plain")


# Data -----------------------------------------------------------------------------------------------------------------


@each_trainer
def test_malformed_line(train, refused, written, command):
    lines = json.dumps(RECORD[command], ensure_ascii=False)
    path = written("坏.jsonl", f'{lines}\n\n{lines}\n{{"prompt": "问",}}\n')
    refused(train(command, data_file=path), f"{path}:4", "not JSON", "column", "near", "one whole JSON object per line")


def ranked(responses, ranks, **more):
    return {"prompt": "一", "responses": responses, "ranks": ranks, **more}


@each_trainer
def test_malformed_record(train, refused, written, command):
    path = written("坏.jsonl", '["问"]\n')
    refused(train(command, data_file=path), f"{path}:1", "list of strings", "every record must be an object")


@pytest.mark.parametrize(
    ("command", "record", "fragments"),
    [
        ("sft", {"问题": "一", "回答": "二"}, ["`问题` (string)", "`prompt` and `completion`", "--columns"]),
        ("sft", {"question": "一", "answer": "二"}, ["--columns prompt=question,completion=answer"]),
        ("reward", {"prompt": "一", "chosen": "二"}, ["`chosen` (string)", "`rejected`"]),
        ("reward", {"prompt": "一", "completion": "二"}, ["`prompt`, `chosen` and `rejected`"]),
        ("grpo", {"question": "一"}, ["--columns prompt=question"]),
        ("dpo", {"prompt": "一", "chosen": "二"}, ["`chosen` (string)", "`rejected`"]),
        ("dpo", {"prompt": "", "chosen": "一", "rejected": "二"}, ["the prompt is empty", "no BOS", "heedful reward"]),
        ("ppo", {"question": "一"}, ["--columns prompt=question"]),
        ("ppo", {"text": "一"}, ["--columns prompt=text"]),
        ("sft", {"prompt": 1, "completion": "二"}, ["`prompt` is 1 (integer)", "a string or a list of messages"]),
        ("sft", {"prompt": "一", "completion": ["二"]}, ["`completion`", "both strings"]),
        ("ppo", {"prompt": "  "}, ["`prompt` is empty or only white space", "remove the record"]),
        ("reward", {"prompt": "一", "chosen": "", "rejected": "二"}, ["`chosen` is empty"]),
        ("reward", ranked(["二"], [0]), ["`responses` is ['二']", "a list of two or more responses"]),
        ("reward", ranked(["二", "三"], [0, 1, 2]), ["2 `responses` but 3 `ranks`", "one rank for each response"]),
        ("reward", ranked(["二", "三"], [0.5, 1]), ["`ranks` is [0.5, 1]", "a list of integers, 0 the best"]),
        ("reward", ranked(["二", "三"], [float("nan"), 1]), ["found NaN, which is not JSON"]),
        ("reward", ranked(["二", "三"], [1, 1]), ["`ranks` are all 1: nothing is preferred"]),
        (
            "reward",
            ranked(["二", "三"], [0, 1], margin=1),
            ["`margin` beside `ranks`", "`margin` only with `chosen` and `rejected`"],
        ),
        (
            "sft",
            {"messages": [{"role": "assistent", "content": "二"}]},
            ["assistent", "one of system, user, assistant"],
        ),
        ("sft", {"messages": [{"role": "user", "content": "一"}]}, ["no assistant turn"]),
    ],
)
def test_wrong_columns(train, refused, written, command, record, fragments):
    path = written("数据.jsonl", [RECORD[command], record])
    refused(train(command, data_file=path), f"{path}:2", *fragments)


@each_trainer
def test_columns_that_are_not_there(train, refused, command):
    refused(train(command, "--columns", "prompt=问题"), ":1", "no column '问题'", "--columns prompt=问题", "prompt")
    refused(train(command, "--columns", "promt=问题"), "--columns", "unknown name 'promt'", "perhaps 'prompt'")
    refused(train(command, "--columns", "问题"), "--columns", "NAME=COLUMN")


@each_trainer
@pytest.mark.parametrize("text", ["", "\n\n"])
def test_empty_data(train, refused, written, command, text):
    path = written("空.jsonl", text)
    refused(train(command, data_file=path), path, "empty", "at least one record")


@each_trainer
def test_too_long(train, refused, written, command):
    """The count and the first of them, with file and line; by option they are dropped or cut, and that is told."""
    path = written("长.jsonl", [*different(command, 19), LONG_RECORD[command]])
    refused(
        train(command, data_file=path),
        f"1 of 20 {UNIT[command]}",
        f"{path}:20",
        "tokens",
        "--too-long drop",
        "--too-long truncate",
    )


@each_trainer
def test_too_long_is_dropped_by_option_and_reported(train, written, command, tmp_path):
    records = different(command, 19)
    if command == "kto":
        records[0]["label"] = True
    path = written("长.jsonl", [*records, LONG_RECORD[command]])
    outcome = train(command, "--too-long", "drop", data_file=path)
    assert outcome.status == 0, outcome.err
    summary = json.loads((tmp_path / "运行" / "summary.json").read_text(encoding="utf-8"))
    assert summary["data"]["dropped_too_long"] == 1
    assert "records 20, train 19, held out 0, dropped too long 1" in outcome.message


@each_online
def test_a_too_long_prompt_is_cut_by_option_and_reported(train, written, command, tmp_path):
    path = written("长.jsonl", [{"prompt": "问"}, {"prompt": "再问"}, {"prompt": LONG}])
    outcome = train(command, "--too-long", "truncate", data_file=path)
    assert outcome.status == 0, outcome.err
    summary = json.loads((tmp_path / "运行" / "summary.json").read_text(encoding="utf-8"))
    assert summary["data"]["truncated"] == 1
    assert ", truncated 1" in outcome.message


@each_trainer
def test_dropping_too_many(train, refused, written, command):
    path = written("长.jsonl", [RECORD[command], LONG_RECORD[command]])
    refused(train(command, "--too-long", "drop", data_file=path), "1 of 2 records (50.0%)", "--max-dropped 0.1", path)
    path = written("长.jsonl", [LONG_RECORD[command]])
    refused(train(command, "--too-long", "drop", "--max-dropped", "1", data_file=path), "1 of 1 records", path)


@pytest.mark.parametrize("words", [
    "ppo --data d --output o --rewards rule:digits", "chat", "evaluate scores --data d --rewards rule:digits",
])  # fmt: skip
def test_graphs_on_a_device_without_them(heedful, refused, words):
    """Before any model is loaded, or even looked for."""
    outcome = heedful(*words.split(), "--model", "nowhere", "--device", "cpu", "--cuda-graphs")
    refused(outcome, "--cuda-graphs: cpu has no CUDA graphs; leave it out")


@each_online
def test_max_new_tokens_that_leave_no_room(train, refused, command):
    refused(train(command, "--max-new-tokens", "128"), "--max-new-tokens 128", "no room")


@each_trainer
@pytest.mark.parametrize("length", ["1", "129"])
def test_max_length_that_the_model_cannot_read(train, refused, command, length):
    if command not in ONLINE:
        refused(train(command, "--max-length", length), "--max-length", "between 2 and the 128 tokens", length)


@on_pairs
def test_chosen_equal_to_rejected(train, refused, written, command):
    same = {"prompt": "问", "chosen": "一样", "rejected": "一样"}
    path = written("偏好.jsonl", [RECORD["reward"], same, RECORD["reward"]])
    refused(train(command, data_file=path), "1 of 3 pairs", "equal", f"{path}:2", "--equal-pairs drop")


@on_pairs
def test_chosen_equal_to_rejected_after_truncation(train, refused, written, command):
    """They differ in their last characters alone, which the model never reads."""
    same = {"prompt": "问", "chosen": "好" * 50 + "一", "rejected": "好" * 50 + "二"}
    path = written("偏好.jsonl", [RECORD["reward"], same])
    outcome = train(command, "--too-long", "truncate", data_file=path)
    refused(outcome, "1 of 2 pairs", "equal", "after truncation", f"{path}:2", "--equal-pairs drop")


@on_pairs
def test_equal_pairs_are_dropped_by_option_and_reported(train, written, command, tmp_path):
    same = {"prompt": "问", "chosen": "一样", "rejected": "一样"}
    path = written("偏好.jsonl", [*[RECORD["reward"]] * 19, same])
    outcome = train(command, "--equal-pairs", "drop", data_file=path)
    assert outcome.status == 0, outcome.err
    assert json.loads((tmp_path / "运行" / "summary.json").read_text(encoding="utf-8"))["data"]["dropped_equal"] == 1


def test_rankings_are_no_pairs(train, refused, written):
    path = written("排序.jsonl", [ranked(["一", "二", "三"], [0, 1, 2])])
    refused(train("dpo", data_file=path), f"{path}:1", "3 responses", "pairs", "`heedful reward` trains on longer")


def test_rankings_for_a_reward_model(train, written, tmp_path):
    path = written("排序.jsonl", [ranked(["一", "二", "三"], [0, 1, 1]), RECORD["reward"]])
    outcome = train("reward", data_file=path)
    assert outcome.status == 0, outcome.err
    assert (tmp_path / "运行" / "final" / "config.json").is_file()


def test_a_file_of_nothing_but_ties(train, refused, written):
    path = written("排序.jsonl", [ranked(["一", "二"], [3, 3])] * 4)
    refused(train("reward", data_file=path), f"{path}:1", "`ranks` are all 3: nothing is preferred")
    dropped = train("reward", "--unusable", "drop", "--max-dropped", "1", data_file=path)
    refused(dropped, path, "none of 4 records is usable", "`ranks` are all 3")


def test_rankings_that_prefer_a_response_to_an_equal_one(train, refused, written):
    path = written("排序.jsonl", [RECORD["reward"], ranked(["一", "二", "一"], [0, 1, 2])])
    refused(train("reward", data_file=path), f"{path}:2", "1 of 2 rankings prefer", "--equal-pairs drop")


def test_offset_data_that_are_no_demonstrations(train, refused, written):
    path = written("偏好.jsonl", [RECORD["reward"]])
    refused(train("reward", "--offset-data", path), f"--offset-data: {path}:1", "not a demonstration", "only to --data")
    refused(train("reward", "--offset-data", path[:-1]), "--offset-data", "no such file", "Perhaps you meant")


def test_an_offset_that_cannot_be_read(train, refused, tmp_path):
    """A reward model with a damaged heedful.json: its rewards would be shifted."""
    assert train("reward", output=tmp_path / "评分").status == 0
    final = tmp_path / "评分" / "final"
    (final / "heedful.json").write_text('{"offset": "零"}', encoding="utf-8")
    outcome = train("ppo", "--rewards", f"model:{final}")
    refused(outcome, "offset in its heedful.json is '零'", "a finite number")


@each_trainer
def test_a_system_prompt_for_raw_text(train, refused, command):
    refused(train(command, "--system-prompt", "你是助手"), "--system-prompt", "raw text", "messages", ":1")


# Rewards --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "fragments"),
    [
        ("raise ValueError('坏了')", ["raised ValueError: 坏了"]),
        ("return [1.0] * (len(completions) - 1)", ["returned 1 score for 2 responses"]),
        pytest.param(
            "return [1.0] * (len(completions) + 1)",
            ["returned 3 scores for 2 responses"],
            marks=pytest.mark.exhaustive,
        ),
        ("return '好' * len(completions)", ["returned str"]),
        pytest.param(
            "return ['1.0'] * len(completions)",
            ["returned '1.0' (str)", "one finite number"],
            marks=pytest.mark.exhaustive,
        ),
        ("return [float('nan')] * len(completions)", ["returned nan (float)", "one finite number"]),
        pytest.param(
            "return [float('inf')] * len(completions)",
            ["returned inf (float)", "one finite number"],
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("return None", ["returned NoneType"], marks=pytest.mark.exhaustive),
        ("return [None] * len(completions)", ["no reward applies"]),
    ],
)
def test_a_reward_function_that_fails(train, refused, written, body, fragments):
    """It fails while the first batch is scored, and still nothing half-written is left behind."""
    path = written("奖励.py", f"def 评分(completions):\n    {body}\n")
    reward = f"python:{path}:评分"
    message = refused(train("ppo", "--rewards", reward), reward, *fragments)
    assert "个问题" in message  # the sample's prompt
    assert "ppo-数据.jsonl:" in message


def test_a_reward_that_needs_a_column(train, refused, written, tmp_path):
    path = written("无.jsonl", [{"prompt": "一", "answer": "1"}, {"prompt": "二", "answer": "2"}])
    outcome = train("ppo", "--rewards", "rule:contains_expected", data_file=path)
    refused(outcome, "rule:contains_expected", "column expected", "have answer", "--columns", f"{path}:")


def test_a_failing_reward_leaves_an_existing_run_alone(train, finished, written, tmp_path):
    """--overwrite must not throw the old run away before the new one can begin."""
    before = finished("ppo")
    path = written("奖励.py", "def 评分(completions):\n    raise ValueError('坏了')\n")
    assert train("ppo", "--overwrite", "--rewards", f"python:{path}:评分").status == 2
    assert contents(tmp_path / "运行") == before


@pytest.mark.parametrize(
    ("reward", "fragments"),
    [
        ("digits", ["--rewards", "'digits'", "rule:NAME"]),
        ("rule:digit", ["rule 'digit'", "did you mean rule:digits"]),
        ("python:没有.py:f", ["没有.py", "does not exist"]),
        ("model:没有", ["没有 does not exist"]),
        ("model:{tiny}", ["no reward head", "heedful reward"]),
    ],
)
def test_rewards_that_do_not_exist(train, refused, tiny, reward, fragments):
    refused(train("ppo", "--rewards", reward.format(tiny=tiny())), *fragments)


@each_online
def test_no_reward_at_all(heedful, refused, tiny, data, command, tmp_path):
    outcome = heedful(command, "--model", tiny(), "--data", data(command), "--output", tmp_path / "运行")
    refused(outcome, "--rewards is missing", "model:PATH", "rule:NAME")


# Output ---------------------------------------------------------------------------------------------------------------


@offline_and_online
def test_an_output_that_holds_a_run(train, finished, command, tmp_path):
    before = finished(command)
    outcome = train(command, "--seed", "7")
    assert (outcome.status, outcome.out) == (2, "")
    for fragment in (str(tmp_path / "运行"), "already has a", "--overwrite"):
        assert fragment in outcome.message
    assert contents(tmp_path / "运行") == before


@offline_and_online
def test_overwrite_replaces_a_run(train, finished, command, tmp_path):
    """Wholly: nothing of the old run stays among the new one's files."""
    finished(command)
    (tmp_path / "运行" / "checkpoints").mkdir(exist_ok=True)
    (tmp_path / "运行" / "checkpoints" / "step-000099").write_text("旧")
    outcome = train(command, "--seed", "7", "--overwrite")
    assert outcome.status == 0, outcome.err
    assert yaml.safe_load((tmp_path / "运行" / "config.yaml").read_text(encoding="utf-8"))["seed"] == 7
    assert not (tmp_path / "运行" / "checkpoints" / "step-000099").exists()
    assert len((tmp_path / "运行" / "metrics.jsonl").read_text().splitlines()) == 1


@offline_and_online
def test_overwrite_with_bad_input_leaves_the_run_alone(train, finished, command, tmp_path, written):
    before = finished(command)
    assert train(command, "--overwrite", data_file=written("坏.jsonl", "{\n")).status == 2
    assert train(command, "--overwrite", "--learning-rate", "0").status == 2
    assert contents(tmp_path / "运行") == before


@offline_and_online
@pytest.mark.parametrize("flags", [[], ["--overwrite"]])
def test_overwrite_touches_nothing_but_a_run(train, command, flags, tmp_path):
    output = tmp_path / "论文"
    output.mkdir()
    (output / "第一章.md").write_text("重要", encoding="utf-8")
    outcome = train(command, *flags, output=output)
    assert outcome.status == 2
    assert "not from a heedful run" in outcome.message
    assert [p.name for p in output.iterdir()] == ["第一章.md"]


@offline_and_online
def test_overwrite_does_not_delete_what_the_run_is_made_from(train, finished, command, tmp_path):
    """``--model 运行/final --output 运行 --overwrite``: the model it starts from lies in what would be replaced."""
    before = finished("sft")
    outcome = train(command, "--overwrite", model=tmp_path / "运行" / "final")
    assert (outcome.status, outcome.out) == (2, "")
    assert "--output" in outcome.message
    assert contents(tmp_path / "运行") == before


@offline_and_online
def test_an_output_that_is_a_file(train, command, written, tmp_path):
    path = written("运行.txt", "重要")
    outcome = train(command, "--overwrite", output=path)
    assert (outcome.status, outcome.out) == (2, "")
    assert "is a file; name a folder" in outcome.message
    assert (tmp_path / "运行.txt").read_text(encoding="utf-8") == "重要"


@offline_and_online
def test_an_output_below_a_file(train, command, written):
    path = written("运行.txt", "重要")
    outcome = train(command, output=f"{path}/一")
    assert (outcome.status, outcome.out) == (2, "")
    assert "Traceback" not in outcome.err
    assert "--output" in outcome.message


@offline_and_online
def test_an_empty_folder_is_a_good_output(train, command, tmp_path):
    (tmp_path / "运行").mkdir()
    assert train(command).status == 0


# Ranges ---------------------------------------------------------------------------------------------------------------


@offline_and_online
@pytest.mark.parametrize(
    ("flag", "value", "fragment"),
    [
        ("--learning-rate", "0", "greater than 0, got 0.0"),
        ("--learning-rate", "nan", "greater than 0, got nan"),
        ("--micro-batch-size", "-1", "greater than 0, got -1"),
        ("--warmup-steps", "-1", "at least 0, got -1"),
        ("--max-grad-norm", "-1", "at least 0, got -1"),
        ("--eval-fraction", "1", "below 1"),
        ("--seed", "-1", "got -1"),
        ("--seed", "99999999999999999999", "--seed"),
        ("--device", "gpu", "auto, cpu, cuda, cuda:N, mps"),
    ],
)
def test_out_of_range(train, refused, command, flag, value, fragment):
    refused(train(command, flag, value), flag, fragment)


@pytest.mark.parametrize("command", ["sft", "reward", "dpo", "kto"])
def test_a_batch_larger_than_the_data(train, refused, command):
    unit = {"sft": "records", "kto": "responses"}.get(command, "pairs")
    refused(
        train(command, "--batch-size", "9"),
        f"a step learns 9 {unit} (--batch-size); there are 8 {unit} to train on. Set --batch-size 8, or give more {unit}",
    )


def test_sizes_of_ppo(train, refused):
    refused(train("ppo", "--minibatch-size", "4"), "--minibatch-size is 4, larger than --rollout-batch-size 2", "lower")
    sizes = ["--rollout-batch-size", "10", "--minibatch-size", "4"]
    refused(train("ppo", *sizes), "--rollout-batch-size 10 is not a multiple of --minibatch-size 4", "8")
    refused(
        train("ppo", "--rollout-batch-size", "10"),
        "a step has 10 responses (--rollout-batch-size), 1 per prompt (--samples-per-prompt), so it needs 10 prompts",
        "there are 8 prompts to train on. Set --rollout-batch-size 5 --minibatch-size 1, or --samples-per-prompt 2",
    )
    refused(train("ppo", "--rollout-batch-size", "-2"), "--rollout-batch-size must be greater than 0, got -2")


@offline_and_online
def test_the_place_in_the_yaml_of_a_value_out_of_range(heedful, refused, written, command, tmp_path):
    path = written("配置.yaml", f"model: m\ndata: d\noutput: {tmp_path / '运行'}\nlearning_rate: 0\n")
    refused(heedful(command, path), "--learning-rate must be greater than 0", f"{path}:4")


# Tokenizers and vocabularies: what must work --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare_model(tmp_path_factory):
    """``bare_model(**names)``: a gpt2 with a byte tokenizer without chat template that has these special tokens."""

    def make(**names):
        folder = tmp_path_factory.mktemp("bare") / "模型"
        vocabulary = {t: i for i, t in enumerate(["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
        config = GPT2Config(
            vocab_size=len(vocabulary),
            n_embd=16,
            n_layer=1,
            n_head=2,
            n_positions=128,
            eos_token_id=0,
            bos_token_id=None,
        )
        GPT2LMHeadModel(config).save_pretrained(folder)
        return str(folder)

    return make


PADS = {"no pad token": {"eos_token": "<eos>"}, "pad is eos": {"eos_token": "<eos>", "pad_token": "<eos>"}}


@pytest.mark.parametrize(
    ("pad", "command"),
    pairs_often(PADS, TRAINERS, [*zip(PADS, ("sft", "ppo"), strict=True), *((pad, "reward") for pad in PADS)]),
)
def test_no_padding_token_of_its_own(train, heedful, bare_model, command, pad, tmp_path, data):
    """Both are common (gpt2, llama); padding is told by masks, and a reward model is given a token of its own."""
    model = bare_model(**PADS[pad])
    outcome = train(command, model=model)
    assert outcome.status == 0, outcome.err
    metrics = [json.loads(line) for line in (tmp_path / "运行" / "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(v) for m in metrics for v in m.values())
    final = tmp_path / "运行" / "final"
    if command == "reward":
        scorer = AutoModelForSequenceClassification.from_pretrained(final)
        assert scorer.config.pad_token_id not in (None, 0)
        outcome = train("ppo", "--rewards", f"model:{final}", model=model, output=tmp_path / "下一步")
        assert outcome.status == 0, outcome.err
    else:
        AutoModelForCausalLM.from_pretrained(final)


@offline_and_online
def test_no_end_of_sequence_token(train, refused, bare_model, command):
    refused(train(command, model=bare_model(pad_token="<eos>")), "no end-of-sequence token", "tokenizer_config.json")


CHATS = {
    "sft": {"messages": [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "您好！"}]},
    "reward": {"prompt": [{"role": "user", "content": "你好"}], "chosen": "您好！", "rejected": "不好"},
    "ppo": {"prompt": [{"role": "user", "content": "你好"}]},
}
CHATS |= {"grpo": CHATS["ppo"], "dpo": CHATS["reward"]}


def chats(command):
    """Three conversations for a trainer; KTO needs other prompts and both labels."""
    if command != "kto":
        return [CHATS[command]] * 3
    questions = [[{"role": "user", "content": f"你好{i}"}] for i in range(3)]
    return [{"prompt": q, "completion": "您好！", "label": i > 0} for i, q in enumerate(questions)]


@offline_and_online
def test_messages_without_a_template(train, refused, bare_model, written, command, tmp_path):
    path = written("对话.jsonl", chats(command))
    model = bare_model(eos_token="<eos>")
    refused(train(command, data_file=path, model=model), "no chat template", "--chat-template plain", "strings")
    outcome = train(command, "--chat-template", "plain", data_file=path, model=model)
    assert outcome.status == 0, outcome.err
    # The model that comes out needs no flag any more.
    again = train(command, data_file=path, model=tmp_path / "运行" / "final", output=tmp_path / "再来")
    assert again.status == 0, again.err


@pytest.mark.parametrize("text", ["{% for m in messages %}", "{{ raise_exception('只要系统消息') }}"])
@offline_and_online
def test_a_template_that_does_not_work(train, refused, bare_model, written, command, text):
    path, template = written("对话.jsonl", chats(command)), written("模板.jinja", text)
    model = bare_model(eos_token="<eos>")
    refused(train(command, "--chat-template", template, data_file=path, model=model), "chat template")


@pytest.mark.parametrize("architecture", often(["qwen2", "deberta-v2"], ["deberta-v2"]))
def test_policy_and_reward_model_with_different_vocabularies(train, bare_model, tiny, data, architecture, tmp_path):
    """The reward model reads text, so its ids need not be the policy's; a decoder and an encoder."""
    policy = bare_model(eos_token="<eos>")
    outcome = train("reward", model=tiny(architecture), output=tmp_path / "评分")
    assert outcome.status == 0, outcome.err
    outcome = train("ppo", "--rewards", f"model:{tmp_path / '评分' / 'final'}", model=policy)
    assert outcome.status == 0, outcome.err
    metrics = [json.loads(line) for line in (tmp_path / "运行" / "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(v) for m in metrics for v in m.values())


def test_an_encoder_is_no_policy(train, refused, tiny):
    for command in ("sft", "ppo"):
        refused(train(command, model=tiny("deberta-v2")), "deberta-v2", "causal language model")
