"""Training from Python: objects instead of files, functions to call, a temporary folder, a result, and PPO step by step."""

import builtins
import contextlib
import copy
import dataclasses
import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import datasets
import numpy
import pandas
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import heedful
from cases import often
from heedful import CheckpointError, ConfigError, DataError, Message, Policy
from heedful.data import BatchOrder
from heedful.data.in_memory import write_records
from heedful.models import load_tokenizer
from jsonl import read_jsonl, write_jsonl

pytestmark = pytest.mark.in_python

CPU = {"device": "cpu", "dtype": "float32", "seed": 3, "eval_fraction": 0.0, "sample_every": 0, "learning_rate": 1e-3}
OFFLINE = {**CPU, "batch_size": 4, "max_steps": 2}
ONLINE = {**CPU, "steps": 2, "rollout_batch_size": 4, "minibatch_size": 2, "max_new_tokens": 4}
QUESTIONS = [f"问题 {i}: hello" for i in range(8)]
ROWS = {
    "sft": [{"prompt": question, "completion": f"答 {len(question)}"} for question in QUESTIONS],
    "dpo": [{"prompt": question, "chosen": "好", "rejected": f"no {i}"} for i, question in enumerate(QUESTIONS)],
    "ppo": [{"prompt": question, "mark": i} for i, question in enumerate(QUESTIONS)],
}
ROWS |= {"reward": ROWS["dpo"], "kto": ROWS["dpo"], "grpo": ROWS["ppo"], "online-dpo": ROWS["ppo"]}


def first_token(completion_ids, **_):
    return [float(ids[0]) / 100 for ids in completion_ids]


TRAINERS = {
    "sft": lambda **changes: (heedful.train_sft, heedful.SFTConfig(**OFFLINE | changes)),
    "dpo": lambda **changes: (heedful.train_dpo, heedful.DPOConfig(**OFFLINE | changes)),
    "kto": lambda **changes: (heedful.train_kto, heedful.KTOConfig(**OFFLINE | changes)),
    "reward": lambda **changes: (heedful.train_reward, heedful.RewardConfig(**OFFLINE | changes)),
    "ppo": lambda **changes: (heedful.train_ppo, heedful.PPOConfig(**ONLINE | changes)),
    "grpo": lambda **changes: (heedful.train_grpo, heedful.GRPOConfig(**ONLINE | {"samples_per_prompt": 2} | changes)),
    "online-dpo": lambda **changes: (
        heedful.train_online_dpo,
        heedful.OnlineDPOConfig(**ONLINE | {"samples_per_prompt": 2} | changes),
    ),
}


def train(name, settings=None, **objects):
    function, config = TRAINERS[name](**settings or {})
    rewards = {"rewards": [first_token]} if name in ("ppo", "grpo", "online-dpo") else {}
    return function(config, **rewards, **objects)


@pytest.fixture
def model(tiny):
    return tiny("gpt2")


@pytest.fixture
def policy(model):
    return Policy.from_pretrained(model, device="cpu", dtype="float32")


def weights(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def is_same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def saved(result):
    return load_file(result.folder / "final" / "model.safetensors")


def as_messages(question):
    return [{"role": "user", "content": question}]


LABELLED = [{**row, "label": i % 2 == 0} for i, row in enumerate(ROWS["sft"])]
ARRAYS = [
    {"prompt": question, "responses": numpy.array(["好", f"no {i}"], dtype=object), "ranks": numpy.array([0, 1])}
    for i, question in enumerate(QUESTIONS)
]
CHATS = [[*as_messages(question), {"role": "assistant", "content": "好"}] for question in QUESTIONS]
KINDS = {
    "conversations": (
        "sft",
        [tuple(Message(**message) for message in chat) for chat in CHATS],
        [{"messages": chat} for chat in CHATS],
    ),
    "a part of a data set": ("dpo", datasets.Dataset.from_list(ROWS["dpo"] * 2).select(range(8)), ROWS["dpo"]),
    "a frame": ("kto", pandas.DataFrame(LABELLED), LABELLED),
    "arrays": ("reward", [row | {"times": pandas.Timestamp(i)} for i, row in enumerate(ARRAYS)], ROWS["dpo"]),
    "prompts": ("ppo", QUESTIONS, [{"prompt": question} for question in QUESTIONS]),
    "streamed prompts": ("online-dpo", datasets.Dataset.from_list(ROWS["ppo"]).to_iterable_dataset(), ROWS["ppo"]),
}
WRITTEN = {
    "records of a frame": ([row | {"label": numpy.bool_(row["label"])} for row in LABELLED], LABELLED),
    "prompts as messages": ([as_messages(q) for q in QUESTIONS], [{"prompt": as_messages(q)} for q in QUESTIONS]),
    "a column": (pandas.Series(QUESTIONS, index=range(9, 17)), QUESTIONS),
    "an array": (numpy.array(QUESTIONS), QUESTIONS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_objects_train_as_their_files_do(kind, model, policy, tmp_path):
    """To the same weights, bit for bit; the policy that is given stays as it is."""
    name, records, rows = KINDS[kind]
    template = {"chat_template": "plain"}
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    by_path = train(name, {"model": model, "data": file, "output": tmp_path / "run", **template})
    before = weights(policy)
    in_memory = train(name, template, model=policy, data=records)
    assert is_same(saved(in_memory), saved(by_path))
    assert not is_same(saved(in_memory), load_file(Path(model) / "model.safetensors")), "nothing was learned"
    assert is_same(weights(policy), before)
    assert policy.tokenizer.chat_template != in_memory.config.chat_template


@pytest.mark.parametrize("kind", WRITTEN)
def test_objects_of_other_kinds_are_written_as_plain_ones(kind, tmp_path):
    given, plain = (write_records(records, tmp_path, "data", asks=True) for records in WRITTEN[kind])
    assert given == plain


@pytest.mark.parametrize("name", often(["sft", "dpo", "reward", "ppo", "grpo", "online-dpo"], {"sft", "grpo"}))
def test_the_given_order(name, model):
    """A run that shuffles is one that keeps the order of data that were shuffled before."""
    settings = {"chat_template": "plain"}
    prompts_per_step = {"ppo": 4, "grpo": 2, "online-dpo": 2}.get(name, 4)
    order = itertools.chain.from_iterable(itertools.islice(BatchOrder(8, prompts_per_step, seed=3), 4))
    given = [ROWS[name][i] for i in order][:8]
    shuffled = train(name, settings, model=model, data=ROWS[name])
    kept = train(name, settings | {"shuffle": False}, model=model, data=given)
    assert is_same(saved(kept), saved(shuffled))
    assert not is_same(saved(train(name, settings | {"shuffle": False}, model=model, data=ROWS[name])), saved(kept))


def test_a_stream_is_read_in_its_order(policy):
    """To its end, and then from its beginning again."""
    stream = datasets.IterableDataset.from_generator(lambda: iter({"prompt": question} for question in QUESTIONS[:5]))
    asked = []

    def note(prompts, completions, **_):
        asked.append(prompts)
        return [0.0] * len(completions)

    config = heedful.PPOConfig(**ONLINE | {"shuffle": False, "steps": 3})
    for _ in heedful.ppo_steps(config, policy, stream, rewards=[note]):
        pass
    assert list(itertools.chain(*asked[-3:])) == [*QUESTIONS[:5], *QUESTIONS[:5], *QUESTIONS[:2]]


def test_a_model_of_transformers_is_trained_with_its_tokenizer(model, tmp_path):
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    end = lm.generation_config.eos_token_id
    file = write_jsonl(tmp_path / "rows.jsonl", ROWS["dpo"])
    by_path = train("dpo", {"model": model, "data": file, "eval_data": file, "output": tmp_path / "run"})
    result = train(
        "dpo", model=lm, tokenizer=tokenizer, data=ROWS["dpo"], eval_data=datasets.Dataset.from_list(ROWS["dpo"])
    )
    assert is_same(saved(result), saved(by_path))
    assert result["last_evaluation"] == by_path["last_evaluation"] != {}
    assert lm.generation_config.eos_token_id == end


def test_a_trained_reward_model_is_learned_from_again(model, tmp_path):
    first = train("reward", {"model": model, "output": tmp_path / "run"}, data=ROWS["reward"])
    tokenizer = load_tokenizer(str(first.folder / "final"))
    again = train("reward", model=first.reward_model, tokenizer=tokenizer, data=ROWS["reward"])
    by_path = train("reward", {"model": str(first.folder / "final")}, data=ROWS["reward"])
    assert is_same(saved(again), saved(by_path))
    with pytest.raises(CheckpointError, match=r"is a reward model, not a policy; load it with result\.reward_model"):
        _ = again.policy


# The result and the folder ------------------------------------------------------------------------------------------------


def test_a_result_has_the_policy_the_metrics_and_the_summary(model, policy):
    result = train("ppo", {"eval_fraction": 0.5}, model=policy, data=QUESTIONS)
    assert result.summary == json.loads((result.folder / "summary.json").read_text("utf-8"))
    assert result["steps"] == 2
    assert repr(result) == f"TrainingResult(folder={result.folder!r})"
    table = result.metrics
    assert list(table.index) == [0, 1, 2]
    assert table["reward/score_mean"].isna().tolist() == [True, False, False]
    assert table["eval/score_mean"].isna().tolist() == [False, True, False]
    for line in read_jsonl(result.folder / "metrics.jsonl"):
        assert table.loc[line["step"]].to_dict().items() >= {k: v for k, v in line.items() if k != "step"}.items()
    assert isinstance(result.policy, Policy)
    assert result.policy is result.policy
    assert result.policy.value_head is not None
    assert result.policy.tokenizer.get_vocab() == policy.tokenizer.get_vocab()
    assert is_same(
        weights(result.policy.lm), weights(Policy.from_pretrained(str(result.folder / "final"), device="cpu").lm)
    )


def test_a_temporary_folder_is_gone_when_python_ends(forked, tmp_path):
    def work():
        from heedful.training.from_python import temporary_folder

        tempfile.tempdir = str(tmp_path)
        (temporary_folder() / "run").mkdir()
        print(len(list(tmp_path.iterdir())))

    process = forked(work)
    assert process.communicate()[0].strip() == "1"
    assert list(tmp_path.iterdir()) == []


def stop_after(last):
    def stop(step, _):
        if step == last:
            raise StopError

    return stop


class StopError(Exception):
    pass


def test_an_unfinished_run_goes_on_with_the_same_objects_only(policy, tmp_path):
    settings = {"max_steps": 3, "output": tmp_path / "run"}
    with pytest.raises(StopError):
        train("sft", settings, model=policy, data=ROWS["sft"], on_step=stop_after(1))
    with pytest.raises(
        ConfigError, match=r"(?s)unfinished run with other settings.*  data: .*inputs/data-.* in the run"
    ):
        train("sft", settings, model=policy, data=ROWS["sft"][:-1])
    other = Policy.from_pretrained(policy.lm.name_or_path, device="cpu")
    other.lm.transformer.ln_f.weight.data.add_(1)
    with pytest.raises(
        ConfigError, match=r"(?s)unfinished run with other settings.*  model: .*inputs/model-.* in the run"
    ):
        train("sft", settings, model=other, data=ROWS["sft"])
    assert len(list((tmp_path / "run" / "inputs").iterdir())) == 2
    whole = train("sft", {"max_steps": 3}, model=policy, data=ROWS["sft"])
    gone_on = train("sft", settings, model=policy, data=ROWS["sft"])
    assert is_same(saved(gone_on), saved(whole))


def test_a_run_that_is_replaced_leaves_nothing_of_its_objects(policy, tmp_path):
    settings = {"output": tmp_path / "run"}
    train("sft", settings, model=policy, data=ROWS["sft"])
    before = {path.name for path in (tmp_path / "run" / "inputs").iterdir()}
    with pytest.raises(DataError):
        train("sft", settings | {"overwrite": True}, model=policy, data=[{"prompt": 3}])
    assert {path.name for path in (tmp_path / "run" / "inputs").iterdir()} == before
    result = train("sft", settings | {"overwrite": True}, model=policy, data=ROWS["sft"][:-1])
    after = {path.name for path in (tmp_path / "run" / "inputs").iterdir()}
    assert after == {Path(result.config.model).name, Path(result.config.data).name}
    assert len(before & after) == 1, "the same model, other data"


def test_what_a_user_has_in_the_folder_stays(policy, tmp_path):
    kept = tmp_path / "run" / "inputs"
    (kept / "model").mkdir(parents=True)
    (kept / "model" / "mine").touch()
    (kept / "data-1.jsonl").touch()
    result = train("sft", {"output": tmp_path / "run"}, model=policy, data=ROWS["sft"])
    ours = {Path(result.config.model).name, Path(result.config.data).name}
    assert {path.name for path in kept.iterdir()} == {"model", "data-1.jsonl"} | ours
    assert (kept / "model" / "mine").exists()


# What is wrong ------------------------------------------------------------------------------------------------------------


def unknown_token(policy):
    policy.tokenizer.add_tokens(["<new>"])
    return {"model": policy, "data": ["hello there", "a <new> word", *QUESTIONS]}


def on_meta(policy):
    policy.lm.to("meta")
    return {"model": policy, "data": QUESTIONS}


WRONG = (  # of data, and of other arguments
    ([{"frage": "?"}], "data[0]: not a prompt: found `frage`"),
    (datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": None}]), "data[1]: "),
    (pandas.DataFrame({"prompt": ["a", None]}), "data[1]: not a prompt"),
    (["a", "b", ""], "data[2]: "),
    ([], "data: the data set is empty"),
    (["a", 7], "data[1]: got int; a record is a dict"),
    (pandas.Series([1, 2]), "data[0]: got int"),
    ([{"prompt": "a", "x": {1, 2}}], "data[0]: it holds set"),
    ([{"prompt": "a", "x": float("nan")}], "data[0]: "),
    ([{"prompt": "a", "x": {"y": numpy.array([0.5, numpy.inf])}}], "data[0]: found Infinity"),
    ({"prompt": ["a"]}, "data must be a datasets.Dataset, a DataFrame, or a list"),
    (datasets.DatasetDict(test=datasets.Dataset.from_list([{}])), "data['test']"),
)
NO_MODELS = {
    "held-out data": (DataError, {"eval_data": [{"x": 1}]}, "eval_data[0]: not a prompt"),
    "no data": (ConfigError, {"data": None}, "data is missing: set it in the settings (PPOConfig(data=...)), or pass"),
    "no model": (ConfigError, {"model": None}, "model is missing: "),
    "another object": (ConfigError, {"model": torch.nn.Linear(1, 1)}, "got a Linear; save it and pass its folder"),
    "a name": (ConfigError, {"model": "name", "tokenizer": object()}, "tokenizer is only for a model in memory"),
    "no tokenizer": (CheckpointError, lambda policy: {"model": policy.lm}, "pass it too (tokenizer=...)"),
    "a tokenizer's name": (CheckpointError, lambda one: {"model": one.lm, "tokenizer": "gpt2"}, "got 'gpt2'; pass it"),
    "another tokenizer": (DataError, unknown_token, "data[1]: the token '<new>' has the id"),
    "another device": (CheckpointError, on_meta, "weights are on the meta device"),
}


@pytest.mark.parametrize("case", [*range(len(WRONG)), *NO_MODELS])
def test_wrong_objects_are_refused_like_wrong_files(case, policy, tmp_path):
    """With the element that is wrong, before anything is written."""
    kind, objects, words = (
        NO_MODELS[case] if case in NO_MODELS else (DataError, {"data": WRONG[case][0]}, WRONG[case][1])
    )
    objects = {"model": policy, "data": QUESTIONS, **(objects(policy) if callable(objects) else objects)}
    with pytest.raises(kind) as caught:
        train("ppo", {"output": tmp_path / "run"}, **objects)
    assert words in str(caught.value)
    assert str(tmp_path) not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_settings_of_another_trainer_are_refused(policy):
    for function, config in (
        (heedful.train_sft, heedful.DPOConfig()),
        (heedful.train_reward, heedful.SFTConfig()),
        (heedful.train_dpo, heedful.KTOConfig()),
        (heedful.train_kto, heedful.DPOConfig()),
        (heedful.train_online_dpo, heedful.PPOConfig()),
        (heedful.train_ppo, heedful.OnlineDPOConfig()),
        (heedful.train_grpo, heedful.PPOConfig()),
        (heedful.train_grpo, {"steps": 1}),
        (heedful.train_ppo, heedful.PPOConfig),
        (lambda config, **given: next(heedful.ppo_steps(config, **given)), heedful.SFTConfig()),
    ):
        with pytest.raises(ConfigError, match=r"^config is an? \w+; make it with heedful\.\w+Config\(\.\.\.\)"):
            function(config, model=policy, data=QUESTIONS)


def test_messages_name_settings_as_python_does(policy, capsys):
    """A command's flags are another person's words; what else is typed in a shell stays."""
    same = [*ROWS["dpo"][:3], {"prompt": "问题", "chosen": "好", "rejected": "好"}]
    with pytest.raises(
        DataError, match=r"rejected responses: data\[3\]\. .* use equal_pairs='drop' or unusable='drop'$"
    ):
        train("dpo", model=policy, data=same)
    train("dpo", {"learning_rate": 1.0}, model=policy, data=ROWS["dpo"])
    said = capsys.readouterr().err
    assert re.search(r"learning_rate=1 is high .* leave learning_rate out", said)
    assert "--" not in said


def test_what_is_in_the_settings_is_not_given_again(policy, model):
    with pytest.raises(ConfigError, match=r"model is both in the settings \(.*\) and an argument; leave out"):
        train("sft", {"model": model}, model=policy, data=ROWS["sft"])
    with pytest.raises(ConfigError, match=r"there is no argument 'modle'\. Perhaps you meant model"):
        train("sft", modle=policy, data=ROWS["sft"])


# Callbacks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sft", "ppo"])
def test_callbacks_are_called_with_steps_metrics_and_folders(name, policy):
    seen = []
    result = train(
        name,
        {"eval_fraction": 0.4, "eval_every": 1, "save_every": 1},
        model=policy,
        data=ROWS[name],
        on_step=lambda step, metrics: seen.append(("step", step, dict(metrics))),
        on_evaluation=lambda step, metrics: seen.append(("evaluation", step, dict(metrics))),
        on_save=lambda step, folder: seen.append(("save", step, sorted(path.name for path in folder.iterdir()) != [])),
    )
    logged = [{k: v for k, v in line.items() if k != "step"} for line in read_jsonl(result.folder / "metrics.jsonl")]
    assert [metrics for what, _, metrics in seen if what != "save"] == logged
    assert [(what, step) for what, step, _ in seen if what != "save"] == [
        *(("evaluation", 0), ("step", 1), ("evaluation", 1), ("step", 2), ("evaluation", 2))
    ]
    saves = [step for what, step, _ in seen if what == "save"]
    assert saves.count(0) == 1, "best/"
    assert saves.count(1) >= 1, "a checkpoint"
    assert saves.count(2) >= 2, "a checkpoint and final/"
    assert all(is_whole for what, _, is_whole in seen if what == "save")


@pytest.mark.parametrize("name", often(["on_step", "on_evaluation", "on_save"], {"on_save"}))
def test_an_error_of_a_callback_ends_the_run_and_says_where(name, policy, tmp_path, capsys):
    def broken(step, _):
        if step == 1:
            raise KeyError("mine")

    settings = {"output": tmp_path / "run", "eval_fraction": 0.4, "eval_every": 1, "save_every": 1}
    with pytest.raises(KeyError) as caught:
        train("sft", settings, model=policy, data=ROWS["sft"], **{name: broken})
    assert caught.value.__notes__ == [f"raised by {name} (broken) at step 1"]
    assert "the same command resumes from" in capsys.readouterr().err
    assert train("sft", settings, model=policy, data=ROWS["sft"])["steps"] == 2


OF_TWO_RANKS = """
import sys
import heedful

policy = heedful.Policy.from_pretrained(sys.argv[1], device="cpu", dtype="float32")
config = heedful.SFTConfig(device="cpu", dtype="float32", max_steps=2, batch_size=4, eval_fraction=0.0, sample_every=0)
steps = []
data = [{"prompt": f"{i}", "completion": "a"} for i in range(8)]
result = heedful.train_sft(config, model=policy, data=data, on_step=lambda step, metrics: steps.append(step))
print("done", result.folder, steps, flush=True)
"""


@pytest.mark.exhaustive
def test_of_several_ranks_the_first_writes_and_calls(model, tmp_path):
    (tmp_path / "two.py").write_text(OF_TWO_RANKS, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, "two.py", model], capture_output=True, text=True, check=True, cwd=tmp_path)
    said = sorted(line.split(maxsplit=2) for line in done.stdout.splitlines() if line.startswith("done"))
    assert [steps for _, _, steps in said] == ["[1, 2]", "[]"]
    assert len({folder for _, folder, _ in said}) == 1


# PPO step by step ---------------------------------------------------------------------------------------------------------

STEPS = {
    "ppo": (heedful.PPOConfig, {"entropy_coef": 0.01, "ppo_epochs": 2, "score_norm_samples": 4, "kl_target": 0.1}),
    "separate critic": (heedful.PPOConfig, {"critic": "separate"}),
    "adapters": (heedful.PPOConfig, {"lora_rank": 2}),
    "no reference": (heedful.GRPOConfig, {"samples_per_prompt": 2, "kl_coef": 0.0}),
}


@pytest.mark.parametrize("case", STEPS)
def test_steps_are_those_of_a_run(case, model, policy, tmp_path, monkeypatch):
    """The same weights and metrics, bit for bit, in place; and no file is left."""
    kind, changes = STEPS[case]
    config = kind(**ONLINE | changes)
    run = heedful.train_ppo(config, rewards=[first_token], model=model, data=ROWS["ppo"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    embedding = policy.lm.get_input_embeddings().weight
    seen = []
    for step, experience, metrics in heedful.ppo_steps(config, policy, ROWS["ppo"], rewards=[first_token]):
        assert experience.advantages.shape == experience.mask.shape
        seen.append((step, {k: v for k, v in metrics.items() if not k.startswith(("time/", "perf/"))}))
    table = run.metrics
    assert [step for step, _ in seen] == [1, 2]
    for step, metrics in seen:
        assert table.loc[step, list(metrics)].to_dict() == pytest.approx(metrics, rel=0, abs=0, nan_ok=True)
    trained = weights(policy.lm)
    if "lora_rank" in changes:
        file = load_file(run.folder / "final" / "adapter_model.safetensors")
        trained = {
            f"base_model.model.{name.replace('.default', '')}": x for name, x in trained.items() if ".lora_" in name
        }
        assert is_same(trained, file)
    else:
        assert is_same(trained, weights(run.policy.lm))
        assert policy.lm.get_input_embeddings().weight is embedding
    assert (policy.value_head is None) == (run.policy.value_head is None)
    if policy.value_head is not None:
        assert is_same(weights(policy.value_head), weights(run.policy.value_head))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_precision_is_that_of_the_policy(model, dtype):
    """Also of what is loaded or copied beside it, whatever auto would be here."""
    settings = ONLINE | {"critic": "separate", "steps": 1}
    config = heedful.PPOConfig(**settings | {"dtype": dtype})
    run = heedful.train_ppo(config, rewards=[first_token], model=model, data=ROWS["ppo"])
    policy = Policy.from_pretrained(model, device="cpu", dtype=dtype)
    config = heedful.PPOConfig(**settings | {"dtype": "auto", "device": "auto"})
    for _ in heedful.ppo_steps(config, policy, ROWS["ppo"], rewards=[first_token]):
        pass
    assert is_same(weights(policy.lm), weights(run.policy.lm))


def test_a_loop_that_is_left_leaves_a_policy_that_goes_on(policy):
    """After a break the policy is what it had learned; it samples, and learns on."""
    config = heedful.PPOConfig(**ONLINE | {"steps": 5, "eval_fraction": 0.05})
    before = weights(policy)
    for step, _, _ in heedful.ppo_steps(config, policy, QUESTIONS, rewards=[first_token]):
        after = weights(policy)
        if step == 2:
            break
    assert is_same(weights(policy), after)
    assert not is_same(after, before | {name: after[name] for name in after.keys() - before.keys()})
    assert len(heedful.LocalEngine(policy, max_new_tokens=3).generate(QUESTIONS)) == 8
    config = dataclasses.replace(config, learning_rate=1e-4)
    steps = heedful.ppo_steps(config, policy, QUESTIONS, rewards=[first_token])
    assert [step for step, _, _ in itertools.islice(steps, 2)] == [1, 2]
    assert not is_same(weights(policy), after)


def test_an_alarm_that_ends_the_loop_speaks_once(policy, capsys):
    """Its error says it; the others are lines."""
    config = heedful.PPOConfig(**ONLINE | {"steps": 5, "eval_fraction": 0.05, "stop_on": ("scores-tied",)})
    with pytest.raises(heedful.TrainingError, match="scores-tied"):
        for _ in heedful.ppo_steps(config, policy, QUESTIONS, rewards=[lambda completions: [0.0] * len(completions)]):
            pass
    said = capsys.readouterr().err
    assert "scores-tied" not in said
    assert "responses-cut" in said


NO_STEPS = {
    "dtype='bfloat16': the policy was loaded with float32": {"dtype": "bfloat16"},
    "ema_decay=0.9 is for a policy that a run loads": {"ema_decay": 0.9},
    "model is both in the settings (m) and an argument": {"model": "m"},
}


def test_a_policy_that_cannot_be_trained_in_place_is_refused(policy):
    def refused(one, data=QUESTIONS, kind=ConfigError, **settings):
        with pytest.raises(kind) as caught:
            next(heedful.ppo_steps(heedful.PPOConfig(**ONLINE | settings), one, data, rewards=[first_token]))
        return str(caught.value)

    for words, settings in NO_STEPS.items():
        assert words in refused(policy, **settings)
    assert refused(policy, [{"prompt": "a"}, {"text": "b"}], DataError).startswith("data[1]: not a prompt")
    assert "the policy is frozen" in refused(policy.frozen_copy())
    tokenizer, policy.tokenizer = policy.tokenizer, None
    assert "the policy has no tokenizer; load it with" in refused(policy, kind=CheckpointError)
    policy.tokenizer = tokenizer
    policy.lm.to("meta")
    assert "device cpu: the policy is on meta; leave it out, or move the policy" in refused(policy)


def test_steps_take_their_inputs_by_the_names_of_the_trainers(policy, tiny):
    """A folder, settings with model and data, and one function by itself give the steps of a policy in memory."""
    config = heedful.PPOConfig(**ONLINE)
    _, _, expected = next(heedful.ppo_steps(config, policy, QUESTIONS, rewards=[first_token]))
    folder = tiny("gpt2")
    _, _, found = next(heedful.ppo_steps(config, model=folder, data=QUESTIONS, rewards=first_token))
    assert found["reward/score_mean"] == expected["reward/score_mean"]
    _, _, found = next(
        heedful.ppo_steps(heedful.PPOConfig(**ONLINE, model=folder), data=QUESTIONS, rewards=first_token)
    )
    assert found["reward/score_mean"] == expected["reward/score_mean"]


def test_steps_without_a_critic_keep_a_value_head(policy):
    next(heedful.ppo_steps(heedful.PPOConfig(**ONLINE), policy, QUESTIONS, rewards=first_token))
    head = policy.value_head
    assert head is not None
    grpo = heedful.GRPOConfig(**ONLINE | {"samples_per_prompt": 2})
    with contextlib.closing(heedful.ppo_steps(grpo, policy, QUESTIONS, rewards=first_token)) as steps:
        _, experience, _ = next(steps)
        assert experience.old_values is None
    assert policy.value_head is head


def broken(logprobs, old_logprobs, advantages, mask, *, config, reduction):
    return (logprobs * float("nan")).sum(), {}


def test_the_steps_name_prompts_by_their_index(policy, capsys):
    """Not by the line of a temporary file: in the experience, in what an advantage function gets, and in messages."""
    seen = []

    def looks(rewards, config):
        seen.extend(rewards.prompts)
        assert len(repr(rewards)) < 600
        return rewards.per_response

    config = heedful.PPOConfig(**ONLINE | {"advantage": looks, "policy_loss": broken})
    _, experience, metrics = next(heedful.ppo_steps(config, policy, QUESTIONS, rewards=first_token))
    assert metrics["optimizer/skipped_steps"] > 0
    for prompt in (*seen, *(one.prompt for one in experience.completions)):
        assert prompt.source in {f"data[{i}]" for i, question in enumerate(QUESTIONS) if question == prompt.prompt}
    said = capsys.readouterr().err
    assert re.search(r"skipped a non-finite update .*records data\[\d\]", said)
    assert "lists them all" not in said, "there is no file of them"


def test_what_is_printed_names_records_as_they_were_passed(policy, capsys):
    """Not by a line of a file that the user never wrote."""
    rows = [{"prompt": question, "说": "x"} for question in QUESTIONS]
    train("ppo", {"policy_loss": broken}, model=policy, data=rows)
    said = capsys.readouterr().err
    assert "data: beside the prompt: `说`" in said
    assert re.search(r"skipped a non-finite update .*records data\[\d\]", said)
    assert "inputs/" not in said
    assert ".jsonl:" not in said


@pytest.mark.parametrize("per_token", [False, True])
def test_an_advantage_that_is_not_finite_ends_the_loop(policy, per_token):
    """A division by a spread of 0, say: the message names the function, and no update is tried."""

    def divided(rewards, config):
        size = rewards.response_mask.shape if per_token else rewards.per_response.shape
        return torch.full(size, float("nan"))

    config = heedful.PPOConfig(**ONLINE | {"advantage": divided})
    before = weights(policy)
    with pytest.raises(
        heedful.ConfigError, match=r"^advantage divided returned numbers that are not finite for (\d+) of \1 responses"
    ):
        next(heedful.ppo_steps(config, policy, QUESTIONS, rewards=first_token))
    assert is_same(weights(policy), before)


def test_pieces_take_the_experience_of_a_step(policy):
    policy.add_value_head()
    before = copy.deepcopy(policy)
    config = heedful.PPOConfig(**ONLINE | {"temperature": 0.7})
    _, experience, _ = next(heedful.ppo_steps(config, policy, QUESTIONS, rewards=first_token))
    torch.testing.assert_close(heedful.logprobs(before, experience), experience.old_logprobs)
    torch.testing.assert_close(heedful.values(before, experience), experience.old_values)
    torch.testing.assert_close(heedful.score(first_token, experience).tolist(), experience.scores)
    rows, time = experience.mask.shape
    assert len(repr(experience)) < 1500
    assert re.search(rf"^  advantages +\[{rows}, {time}\] float32$", repr(experience), re.MULTILINE)


def test_a_loss_may_have_a_metric_of_its_own_under_any_name(policy):
    def loss(logprobs, old_logprobs, advantages, mask, *, config, reduction):
        ratio = (logprobs - old_logprobs).exp()
        return -reduction.tokens(ratio * advantages, mask), {"policy/ratio_mean": torch.tensor(7.0)}

    config = heedful.PPOConfig(**ONLINE | {"policy_loss": loss})
    _, _, metrics = next(heedful.ppo_steps(config, policy, QUESTIONS, rewards=first_token))
    assert metrics["policy/ratio_mean"] == pytest.approx(7.0)


def test_what_is_no_policy_and_no_batch_is_refused_in_one_sentence(policy):
    lm, batch = policy.lm, heedful.LocalEngine(policy, max_new_tokens=2).generate(["a"])
    for call in (
        lambda: heedful.logprobs(lm, batch),
        lambda: heedful.logprobs(policy, ["文本"]),
        lambda: next(heedful.ppo_steps(heedful.PPOConfig(**ONLINE), lm, QUESTIONS, rewards=first_token)),
        lambda: heedful.values(lm, batch),
        lambda: heedful.score(first_token, ["文本"]),
        lambda: heedful.as_responses(lm, ["a"], ["b"]),
    ):
        with pytest.raises(ConfigError, match=r"is a (GPT2LMHeadModel|list).*make (it|a policy of it)"):
            call()


def test_a_saved_policy_is_read_again_by_heedful_and_transformers(policy, tmp_path):
    policy.add_value_head()
    with torch.no_grad():
        policy.value_head.weight.fill_(0.25)
    policy.save(tmp_path / "策略")
    again = heedful.Policy.from_pretrained(tmp_path / "策略", value_head=True, device="cpu", dtype="float32")
    batch = heedful.LocalEngine(policy, max_new_tokens=3).generate(["你好"])
    assert torch.equal(heedful.logprobs(again, batch), heedful.logprobs(policy, batch))
    assert torch.equal(heedful.values(again, batch), heedful.values(policy, batch))
    AutoModelForCausalLM.from_pretrained(tmp_path / "策略")


def test_scores_per_token_are_on_their_tokens(policy):
    batch = heedful.LocalEngine(policy, max_new_tokens=4).generate(["你好", "a"])
    dense = lambda completion_ids, **_: [[float(token % 5) for token in ids] for ids in completion_ids]  # noqa: E731
    found = heedful.score(dense, batch, per_token=True)
    assert found.shape == batch.mask.shape
    torch.testing.assert_close(found.sum(dim=1), heedful.score(dense, batch))
    assert found[0, 0] == float(batch.completions[0].ids[0] % 5)
    whole = heedful.score(first_token, batch, per_token=True)
    assert (whole != 0).sum() <= 2


def test_adapters_are_put_on_once(policy):
    config = heedful.PPOConfig(**ONLINE | {"lora_rank": 2})
    next(heedful.ppo_steps(config, policy, QUESTIONS, rewards=[first_token]))
    with pytest.raises(ConfigError, match="lora_rank=2: the policy already has adapters"):
        next(heedful.ppo_steps(config, policy, QUESTIONS, rewards=[first_token]))
    assert next(heedful.ppo_steps(heedful.PPOConfig(**ONLINE), policy, QUESTIONS, rewards=[first_token]))[0] == 1


# In a notebook ------------------------------------------------------------------------------------------------------------


class Handle:
    """What IPython's display returns: the place of an output."""

    def __init__(self, shown, place):
        self.shown, self.place = shown, place

    def update(self, what):
        self.shown[self.place] = what


@pytest.fixture
def notebook(monkeypatch):
    """What a cell shows, as HTML, in a process that looks like a notebook's."""
    shown, module = [], ModuleType("IPython.display")

    def display(what, **options):
        shown.append(what)
        return Handle(shown, len(shown) - 1)

    module.display, module.HTML = (
        display,
        lambda text: SimpleNamespace(_repr_mimebundle_=lambda *_: {"text/html": text}),
    )
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    return lambda: [one._repr_mimebundle_((), ())["text/html"] for one in shown]


def test_a_notebook_has_one_bar_and_tables(policy, notebook, capsys):
    train("ppo", {"sample_every": 1}, model=policy, data=[f"<b>{i}" for i in range(8)])
    shown = notebook()
    bars = [text for text in shown if "<progress" in text]
    assert len(bars) == 1
    assert "<progress value='2' max='2'></progress> 2/2" in bars[0]
    assert "score" in bars[0]
    tables = [text for text in shown if text.startswith("<table>")]
    assert [text.partition("</caption>")[0] for text in tables] == ["<table><caption>step 1", "<table><caption>step 2"]
    assert "<th>response</th>" in tables[0]
    assert "&lt;b&gt;" in tables[0]
    assert "<b>" not in tables[0]
    assert any("rewards: first_token" in text for text in shown)
    assert "ppo 1/2" not in capsys.readouterr().err


def test_a_notebook_shows_an_error_in_three_lines(policy):
    with pytest.raises(DataError) as caught:
        train("ppo", model=policy, data=[3])
    place, code, message = "\n".join(caught.value._render_traceback_()).splitlines()
    assert place.startswith(f'File "{__file__}", line ')
    assert place.endswith(", in train")
    assert code == "    return function(config, **rewards, **objects)"
    assert message == f"DataError: {caught.value}"
