"""Bad input through the command line.

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

LONG = "很长的问题" * 20
RECORD = {
    "sft": {"prompt": "问", "completion": "答"},
    "reward": {"prompt": "问", "chosen": "好", "rejected": "坏"},
    "ppo": {"prompt": "问"},
    "kto": {"prompt": "问", "completion": "答", "label": False},
}
UNIT = {"sft": "demonstrations", "reward": "pairs", "ppo": "prompts", "kto": "labelled responses"}


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

    def check(outcome, *fragments):
        assert outcome.status == 2, outcome.err
        assert outcome.out == ""
        assert "Traceback" not in outcome.err
        assert not [fragment for fragment in fragments if fragment not in outcome.message], outcome.message
        assert not (tmp_path / "运行").exists()
        assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".") or p.name.endswith(".partial")] == []
        return outcome.message

    return check


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Where `finished` keeps runs."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def finished(train, kept, tmp_path):
    """``finished(command)`` puts a finished run of a trainer, made once, to where `train` writes; its files are returned."""

    def put(command, folder="运行"):
        if not (kept / command).exists():
            assert train(command, output=kept / command).status == 0
        shutil.copytree(kept / command, tmp_path / folder)
        return contents(tmp_path / folder)

    return put


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def summary_of(run):
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


# Flags and files ------------------------------------------------------------------------------------------------------


def test_what_is_named_wrongly(train, refused, data, tmp_path):
    near = data("sft")
    missing = near.replace("数据", "数居")
    (tmp_path / "故事模型").mkdir()
    (tmp_path / "旧" / "final").mkdir(parents=True)
    (tmp_path / "旧" / "final" / "config.json").write_text("{}")
    none = tmp_path / "没有"
    for words, given, fragments in (
        (["sft", "--micro-batch", "2"], {}, ["--micro-batch", "Perhaps you meant", "--micro-batch-size"]),
        (["ppo", "--warmup-steps", "-1"], {}, ["--warmup-steps must be at least 0, got -1"]),
        (["sft", "--device", "gpu"], {}, ["auto, cpu, cuda, cuda:N, mps"]),
        (["sft"], {"data_file": missing}, [missing, "no such file", "Perhaps you meant", "sft-数据.jsonl"]),
        (["sft", "--eval-data", f"{none}.jsonl"], {}, ["没有.jsonl", "no such file"]),
        (["sft"], {"model": tmp_path / "故事摸型"}, ["故事摸型 does not exist", "did you mean", "故事模型"]),
        (["ppo"], {"model": tmp_path / "旧"}, ["not a Hugging Face model", f"did you mean {tmp_path / '旧' / 'final'}"]),
        (["sft", "--chat-template", "没有.jinja"], {}, ["--chat-template", "没有.jinja", "plain"]),
        (["dpo", "--reference", none], {}, ["没有 does not exist"]),
        (["ppo", "--critic", "separate", "--value-model", none], {}, ["没有 does not exist"]),
        (["ppo", "--max-new-tokens", "128"], {}, ["--max-new-tokens 128", "no room"]),
        (["sft", "--max-length", "1"], {}, ["--max-length", "between 2 and the 128 tokens"]),
        (["reward", "--max-length", "129"], {}, ["--max-length", "between 2 and the 128 tokens", "129"]),
        (["sft", "--system-prompt", "你是助手"], {}, ["--system-prompt", "raw text", "messages", ":1"]),
    ):  # fmt: skip
        refused(train(*words, **given), *fragments)


def test_graphs_on_a_device_without_them(heedful, refused):
    """Before any model is loaded, or even looked for."""
    for words in (
        "ppo --data d --output o --rewards rule:digits",
        "chat",
        "evaluate scores --data d --rewards rule:digits",
    ):
        outcome = heedful(*words.split(), "--model", "nowhere", "--device", "cpu", "--cuda-graphs", "on")
        refused(outcome, "--cuda-graphs on: cpu has no CUDA graphs; leave it out")


# Data -----------------------------------------------------------------------------------------------------------------


def ranked(responses, ranks):
    return {"prompt": "一", "responses": responses, "ranks": ranks}


def test_wrong_records(train, refused, written):
    for command, record, fragments in (
        (
            "sft",
            {"question": "一", "answer": "二"},
            ["`question` (string)", "--columns prompt=question,completion=answer"],
        ),
        (
            "sft",
            {"messages": [{"role": "assistent", "content": "二"}]},
            ["assistent", "one of system, user, assistant"],
        ),
        ("reward", {"prompt": "一", "chosen": "二"}, ["`chosen` (string)", "`rejected`"]),
        ("reward", ranked(["二", "三"], [float("nan"), 1]), ["found NaN, which is not JSON"]),
        ("dpo", {"prompt": "", "chosen": "一", "rejected": "二"}, ["the prompt is empty", "no BOS", "heedful reward"]),
        ("dpo", ranked(["一", "二", "三"], [0, 1, 2]), ["3 responses", "pairs", "`heedful reward` trains on longer"]),
        ("ppo", {"text": "一"}, ["--columns prompt=text"]),
        ("kto", {"prompt": "  ", "completion": "二", "label": 1}, ["`prompt` is empty or only white space"]),
    ):
        path = written("数据.jsonl", [RECORD.get(command, RECORD["reward"]), record])
        refused(train(command, data_file=path), f"{path}:2", *fragments)
    path = written("坏.jsonl", f'{json.dumps(RECORD["sft"])}\n\n{{"prompt": "问",}}\n')
    refused(train("sft", data_file=path), f"{path}:3", "not JSON", "column", "near", "one whole JSON object per line")
    refused(train("sft", "--columns", "prompt=问题"), ":1", "no column '问题'", "--columns prompt=问题", "prompt")
    path = written("空.jsonl", "\n\n")
    refused(train("sft", data_file=path), path, "empty", "at least one record")


@pytest.mark.parametrize("command", UNIT)
def test_too_long(train, refused, written, command):
    """The count and the first of them, with file and line; by option they are dropped or cut."""
    path = written("长.jsonl", [*different(command, 19), RECORD[command] | {"prompt": LONG}])
    refused(
        train(command, data_file=path),
        *(f"1 of 20 {UNIT[command]}", f"{path}:20", "tokens", "--too-long drop", "--too-long truncate"),
    )


def test_what_is_dropped_or_cut_by_option_is_reported(train, written, tmp_path):
    path = written("长.jsonl", [*different("sft", 19), RECORD["sft"] | {"prompt": LONG}])
    outcome = train("sft", "--too-long", "drop", data_file=path)
    assert outcome.status == 0, outcome.err
    assert summary_of(tmp_path / "运行")["data"]["dropped_too_long"] == 1
    assert "records 20, train 19, held out 0, dropped too long 1" in outcome.message
    path = written("长.jsonl", [{"prompt": "问"}, {"prompt": "再问"}, {"prompt": LONG}])
    outcome = train("ppo", "--too-long", "truncate", data_file=path, output=tmp_path / "下一步")
    assert outcome.status == 0, outcome.err
    assert summary_of(tmp_path / "下一步")["data"]["truncated"] == 1
    assert ", truncated 1" in outcome.message


def test_dropping_too_many(train, refused, written):
    long = RECORD["sft"] | {"prompt": LONG}
    path = written("长.jsonl", [RECORD["sft"], long])
    refused(train("sft", "--too-long", "drop", data_file=path), "1 of 2 records (50.0%)", "--max-dropped 0.1", path)
    path = written("长.jsonl", [long])
    refused(train("sft", "--too-long", "drop", "--max-dropped", "1", data_file=path), "1 of 1 records", path)


def test_rankings_for_a_reward_model(train, refused, written, tmp_path):
    path = written("排序.jsonl", [ranked(["一", "二"], [3, 3])] * 4)
    refused(train("reward", data_file=path), f"{path}:1", "`ranks` are all 3: nothing is preferred")
    dropped = train("reward", "--unusable", "drop", "--max-dropped", "1", data_file=path)
    refused(dropped, path, "none of 4 records is usable", "`ranks` are all 3")
    path = written("排序.jsonl", [ranked(["一", "二", "三"], [0, 1, 1]), RECORD["reward"]])
    outcome = train("reward", data_file=path)
    assert outcome.status == 0, outcome.err
    assert (tmp_path / "运行" / "final" / "config.json").is_file()


def test_offset_data_that_are_no_demonstrations(train, refused, written):
    path = written("偏好.jsonl", [RECORD["reward"]])
    refused(train("reward", "--offset-data", path), f"--offset-data: {path}:1", "not a demonstration", "only to --data")
    refused(train("reward", "--offset-data", path[:-1]), "--offset-data", "no such file", "Perhaps you meant")


# Rewards --------------------------------------------------------------------------------------------------------------


def failing(written, body):
    return f"python:{written('奖励.py', f'def 评分(completions):{chr(10)}    {body}')}:评分"


def test_a_reward_function_that_fails(train, refused, written):
    """It fails while the first batch is scored, and still nothing half-written is left behind."""
    reward = failing(written, "return [float('nan')] * len(completions)")
    message = refused(train("ppo", "--rewards", reward), reward, "returned nan (float)", "one finite number")
    assert "个问题" in message  # the sample's prompt
    assert "ppo-数据.jsonl:" in message


def test_a_failing_reward_leaves_an_existing_run_alone(train, finished, written, tmp_path):
    """--overwrite must not throw the old run away before the new one can begin."""
    before = finished("ppo")
    outcome = train("ppo", "--overwrite", "--rewards", failing(written, "raise ValueError('坏了')"))
    assert outcome.status == 2
    assert "raised ValueError: 坏了" in outcome.message
    assert contents(tmp_path / "运行") == before


def test_rewards_that_do_not_exist(heedful, train, finished, refused, written, tiny, data, tmp_path):
    path = written("无.jsonl", [{"prompt": "一", "answer": "1"}, {"prompt": "二", "answer": "2"}])
    outcome = train("ppo", "--rewards", "rule:contains_expected", data_file=path)
    refused(outcome, "rule:contains_expected", "column expected", "have answer", "--columns", f"{path}:")
    for reward, fragments in (
        ("digits", ["--rewards", "'digits'", "rule:NAME"]),
        ("rule:digit", ["rule 'digit'", "did you mean rule:digits"]),
        ("python:没有.py:f", ["没有.py", "does not exist"]),
        ("model:没有", ["没有 does not exist"]),
        (f"model:{tiny()}", ["no reward head", "heedful reward"]),
    ):
        refused(train("ppo", "--rewards", reward), *fragments)
    outcome = heedful("ppo", "--model", tiny(), "--data", data("ppo"), "--output", tmp_path / "运行")
    refused(outcome, "--rewards is missing", "model:PATH", "rule:NAME")
    # A reward model with a damaged heedful.json: its rewards would be shifted.
    finished("reward", "评分")
    final = tmp_path / "评分" / "final"
    (final / "heedful.json").write_text('{"offset": "零"}', encoding="utf-8")
    outcome = train("ppo", "--rewards", f"model:{final}")
    refused(outcome, "offset in its heedful.json is '零'", "a finite number")


# Output ---------------------------------------------------------------------------------------------------------------


def test_an_output_that_holds_a_run(train, finished, written, tmp_path):
    """Kept unless told; replaced wholly: nothing of the old run stays among the new one's files."""
    finished("sft")
    run = tmp_path / "运行"
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "checkpoints" / "step-000099").write_text("旧")
    before = contents(run)
    outcome = train("sft", "--seed", "7")
    assert (outcome.status, outcome.out) == (2, "")
    for fragment in (str(run), "already has a", "--overwrite"):
        assert fragment in outcome.message
    assert train("sft", "--overwrite", data_file=written("坏.jsonl", "{\n")).status == 2
    assert train("sft", "--overwrite", "--learning-rate", "0").status == 2
    outcome = train("sft", "--overwrite", model=run / "final")  # the model it starts from would be replaced
    assert (outcome.status, outcome.out) == (2, "")
    assert "--output" in outcome.message
    assert contents(run) == before
    outcome = train("sft", "--seed", "7", "--overwrite")
    assert outcome.status == 0, outcome.err
    assert yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["seed"] == 7
    assert not (run / "checkpoints" / "step-000099").exists()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1


def test_overwrite_touches_nothing_but_a_run(train, written, tmp_path):
    output = tmp_path / "论文"
    output.mkdir()
    (output / "第一章.md").write_text("重要", encoding="utf-8")
    path = written("运行.txt", "重要")
    for flags, given, said in (
        ([], output, "not from a heedful run"),
        (["--overwrite"], output, "not from a heedful run"),
        (["--overwrite"], path, "is a file; name a folder"),
        ([], f"{path}/一", "--output"),
    ):
        outcome = train("sft", *flags, output=given)
        assert (outcome.status, outcome.out) == (2, "")
        assert "Traceback" not in outcome.err
        assert said in outcome.message
    assert [p.name for p in output.iterdir()] == ["第一章.md"]
    assert (tmp_path / "运行.txt").read_text(encoding="utf-8") == "重要"


# Sizes ----------------------------------------------------------------------------------------------------------------


def test_a_batch_larger_than_the_data(train, refused):
    for command, unit in (("sft", "records"), ("kto", "responses"), ("reward", "pairs"), ("dpo", "pairs")):
        refused(
            train(command, "--batch-size", "9"),
            f"a step learns 9 {unit} (--batch-size); there are 8 {unit} to train on. Set --batch-size 8, or give more",
        )
    refused(
        train("ppo", "--rollout-batch-size", "10"),
        "a step has 10 responses (--rollout-batch-size), 1 per prompt (--samples-per-prompt), so it needs 10 prompts",
        "there are 8 prompts to train on. Set --rollout-batch-size 5 --minibatch-size 1, or --samples-per-prompt 2",
    )


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
        size = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 128}
        config = GPT2Config(vocab_size=len(vocabulary), **size, eos_token_id=0, bos_token_id=None)
        GPT2LMHeadModel(config).save_pretrained(folder)
        return str(folder)

    return make


@pytest.mark.parametrize(
    ("command", "pad"),
    [("reward", {"eos_token": "<eos>"}), ("sft", {"eos_token": "<eos>", "pad_token": "<eos>"})],
    ids=["no pad token", "pad is eos"],
)
def test_no_padding_token_of_its_own(train, bare_model, command, pad, tmp_path):
    """Both are common (gpt2, llama); padding is told by masks, and a reward model is given a token of its own."""
    model = bare_model(**pad)
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


def test_a_policy_and_a_reward_model_with_different_vocabularies(train, bare_model, tiny, tmp_path):
    """The reward model reads text, so its ids need not be the policy's; it may be an encoder."""
    outcome = train("reward", model=tiny("deberta-v2"), output=tmp_path / "评分")
    assert outcome.status == 0, outcome.err
    policy, reward = bare_model(eos_token="<eos>"), f"model:{tmp_path / '评分' / 'final'}"
    outcome = train("ppo", "--rewards", reward, model=policy)
    assert outcome.status == 0, outcome.err
    metrics = [json.loads(line) for line in (tmp_path / "运行" / "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(v) for m in metrics for v in m.values())


def test_messages_without_a_template(train, refused, bare_model, written, tiny, tmp_path):
    turns = [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "您好！"}]
    path = written("对话.jsonl", [{"messages": turns}] * 3)
    refused(train("sft", model=bare_model(pad_token="<eos>")), "no end-of-sequence token", "tokenizer_config.json")
    refused(train("ppo", model=tiny("deberta-v2")), "deberta-v2", "causal language model")
    model = bare_model(eos_token="<eos>")
    refused(train("sft", data_file=path, model=model), "no chat template", "--chat-template plain", "strings")
    for text in ("{% for m in messages %}", "{{ raise_exception('只要系统消息') }}"):
        template = written("模板.jinja", text)
        refused(train("sft", "--chat-template", template, data_file=path, model=model), "chat template")
    outcome = train("sft", "--chat-template", "plain", data_file=path, model=model)
    assert outcome.status == 0, outcome.err
    # The model that comes out needs no flag any more.
    again = train("sft", data_file=path, model=tmp_path / "运行" / "final", output=tmp_path / "再来")
    assert again.status == 0, again.err
