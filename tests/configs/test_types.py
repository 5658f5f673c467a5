"""A wrong type or choice is refused alike by flags, files and Python, for every setting of every command."""

import copy
import dataclasses
import pickle
import sys
import typing
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import heedful
from heedful import ConfigError, GRPOConfig, PPOConfig, RewardConfig, SFTConfig
from heedful.cli.main import main
from heedful.configs.parse import parse
from heedful.configs.settings import named, types_of

LEAST = {"model": "模型", "data": "数据.jsonl", "output": "运行"}


def leaves(hint):
    """The types that a setting, or an item of it, may have."""
    parts = [part for part in typing.get_args(hint) if part is not Ellipsis]
    is_whole = not parts or typing.get_origin(hint) is typing.Literal
    if typing.get_origin(hint) is typing.Annotated:
        parts = parts[:1]
    return [hint] if is_whole else [leaf for part in parts for leaf in leaves(part)]


def flag_of(name):
    return f"--{name.replace('_', '-')}"


def test_a_value_of_another_type_is_refused(least, each_field, refusal):
    """With the name of the setting, also by replace()."""
    for kind, name in each_field:
        hint = types_of(kind)[name]
        wrong = [object(), b"bytes", {"a": 1}] + [None] * (type(None) not in leaves(hint))
        wrong += [True] * (bool not in leaves(hint)) + [1.5] * (not {float, typing.Any} & {*leaves(hint)})
        for value in wrong:
            said = refusal(kind, **{name: value})
            assert f"{flag_of(name)} must be " in (said or "accepted"), (kind, name, value)
    for kind in least:
        with pytest.raises(ConfigError, match=f"{flag_of(name := next(iter(types_of(kind))))} must be "):
            dataclasses.replace(kind(**least[kind]), **{name: object()})


def test_a_wrong_text_is_refused_alike_by_flags_files_and_python(each_field, least, refusal, tmp_path):
    path = tmp_path / "设置.yaml"
    for kind, name in each_field:
        if {str, Path} & {*leaves(types_of(kind)[name])} or hasattr(kind, "NO_SETTINGS_FILE"):
            continue
        flags = [f"{flag_of(other)}={value}" for other, value in least[kind].items() if isinstance(value, str | int)]
        lists = [
            part for other, value in least[kind].items() if isinstance(value, tuple) for part in (f"--{other}", *value)
        ]
        whole = {other: list(value) if isinstance(value, tuple) else value for other, value in least[kind].items()}
        path.write_text(yaml.safe_dump(whole | {name: "三不"}, allow_unicode=True), encoding="utf-8")
        with pytest.raises(ConfigError) as in_flags:
            parse(kind, [*flags, *lists, f"{flag_of(name)}=三不"], prog="heedful x")
        with pytest.raises(ConfigError) as in_file:
            parse(kind, [str(path)], prog="heedful x")
        in_python, in_flags, in_file = refusal(kind, **{name: "三不"}), str(in_flags.value), str(in_file.value)
        assert len({said.splitlines()[0] for said in (in_python, in_flags, in_file)}) == 1, (kind, name)
        assert in_python.startswith(f"{flag_of(name)} must be ")
        assert f"{path}:" in in_file


TOLD = [
    ({"kl_in": "rewards"}, "--kl-in must be one of reward, loss, got 'rewards'. Perhaps you meant reward"),
    ({"importance_level": "seq"},
     "--importance-level must be one of token, sequence, sequence-mean, got 'seq'. Perhaps you meant sequence"),
    ({"lr_schedule": "const"},
     "--lr-schedule must be one of constant, linear, cosine, got 'const'. Perhaps you meant constant"),
    ({"optimizer": "sgd"}, "--optimizer must be one of adamw, adamw-8bit, got 'sgd'"),
    ({"critic": "own"}, "--critic must be one of shared, separate, reward, got 'own'"),
    ({"kl_kind": "k4"}, "--kl-kind must be one of k1, k2, k3, weighted-k3 or none, got 'k4'"),
    ({"kl_coef": "0.1"}, "--kl-coef must be a number, got '0.1'"),
    ({"ppo_epochs": 1.5}, "--ppo-epochs must be a whole number, got 1.5"),
    ({"seed": True}, "--seed must be a whole number, got True"),
    ({"whiten_rewards": 1}, "--whiten-rewards must be true or false, got 1"),
    ({"kl_target": "六"}, "--kl-target must be a number or none, got '六'"),
    ({"rewards": ("rule:digits", 1)}, "--rewards must be a text, got 1"),
    ({"reward_weights": ("一",)}, "--reward-weights must be a number, got '一'"),
    ({"track": ("wand",)}, "--track must be one of wandb, trackio, mlflow, swanlab, got 'wand'. Perhaps you meant wandb"),
    ({"dtype": torch.float32}, "--dtype must be one of auto, float32, bfloat16, float16, got torch.float32"),
    ({"system_prompt": Path("提示.txt")}, "--system-prompt must be a text or none, got PosixPath('提示.txt')"),
    ({"advantage": "grp"}, "--advantage must be one of gae, grpo, dr_grpo, rloo, reinforce, reinforce++, python:"),
]  # fmt: skip


def test_what_a_wrong_value_is_told():
    for wrong, said in TOLD:
        with pytest.raises(ConfigError) as error:
            PPOConfig(**LEAST, **wrong)
        assert str(error.value).startswith(said)
        assert str(error.value).splitlines()[1].startswith(f"{flag_of(next(iter(wrong)))}: "), "what it is for"


@pytest.mark.in_python
@pytest.mark.parametrize(("wrong", "said"), [
    ({"kl_in": "loss", "kl_kind": "k1"}, "kl_in='loss' does not go with kl_kind='k1', whose gradient is zero"),
    ({"kl_in": "los"}, "kl_in must be one of reward, loss, got 'los'. Perhaps you meant loss\nkl_in: Where"),
    ({"minibatch_size": 48}, "rollout_batch_size=64 is not a multiple of minibatch_size=48; try"),
    ({"advantage": "grpo"}, "kl_in='reward' does not go with advantage='grpo': the division"),
    ({"shuffle": "好"}, "shuffle must be true or false, got '好'"),
])  # fmt: skip
def test_messages_in_python_have_the_names_of_python(wrong, said, capsys):
    """And those of a command its flags, in the same process."""
    with pytest.raises(ConfigError) as error:
        PPOConfig(**LEAST | wrong)
    assert str(error.value).startswith(said)
    flags = [f"{flag_of(name)}={value}" for name, value in (LEAST | wrong).items()]
    assert main(["ppo", *flags]) == 2
    command = capsys.readouterr().err.removeprefix("heedful: ConfigError: ")
    assert command.startswith("--")
    assert named(command, PPOConfig).startswith(said)


@pytest.mark.in_python
@pytest.mark.parametrize(("flags", "python"), [
    ("use --equal-pairs drop, or raise --max-dropped 0.1.", "use equal_pairs='drop', or raise max_dropped=0.1."),
    ("--no-shuffle keeps the order; --columns a=b,c=d", "shuffle=False keeps the order; columns='a=b,c=d'"),
    ("heedful sft --seed 1, or --seed 2; --to 3 is another's", "heedful sft --seed 1, or seed=2; --to 3 is another's"),
])  # fmt: skip
def test_a_message_in_the_words_of_python(flags, python):
    assert named(flags, RewardConfig) == python


def test_values_that_mean_the_same_are_the_same():
    plain = PPOConfig(
        **LEAST, kl_coef=0.5, seed=3, whiten_rewards=True, rewards=("rule:digits",), reward_weights=(1.0,)
    )
    other = PPOConfig(
        model=Path("模型"), data=Path("数据.jsonl"), output=Path("运行"), kl_coef=np.float32(0.5), seed=np.int64(3),
        whiten_rewards=np.bool_(True), rewards=["rule:digits"], reward_weights=1,
    )  # fmt: skip
    assert plain == other == PPOConfig(**LEAST | vars(other) | {"seed": torch.tensor(3), "rewards": "rule:digits"})
    assert [type(getattr(other, name)) for name in ("model", "output", "kl_coef", "seed", "whiten_rewards")] == [
        str, type(Path()), float, int, bool,
    ]  # fmt: skip
    assert type(PPOConfig(**LEAST, kl_coef=1).kl_coef) is float


def test_copies_of_settings_with_functions():
    config = PPOConfig(**LEAST, policy_loss=lambda: 0, rewards=("rule:digits",))
    assert copy.deepcopy(config) == copy.copy(config) == config
    assert len({config, dataclasses.replace(config), dataclasses.replace(config, policy_loss=lambda: 0)}) == 2


@pytest.mark.parametrize(("name", "said"), [
    ("lr", "PPOConfig has no setting 'lr'; heedful's name is learning_rate"),
    ("kl", "PPOConfig has no setting 'kl'. Perhaps you meant kl_coef"),
    ("learning_rat", "PPOConfig has no setting 'learning_rat'. Perhaps you meant learning_rate"),
    ("kl_loss_coef", "PPOConfig has no setting 'kl_loss_coef'; heedful's name is kl_coef "
     "(Only with use_kl_loss; then kl_in is loss)"),
    ("学习率", "PPOConfig has no setting '学习率'"),
])  # fmt: skip
def test_an_unknown_name_in_python_is_answered_with_that_of_python(name, said):
    with pytest.raises(ConfigError) as error:
        PPOConfig(**LEAST, **{name: 1})
    assert str(error.value) == said
    with pytest.raises(ConfigError, match="has no setting"):
        dataclasses.replace(PPOConfig(**LEAST), **{name: 1})


def test_every_configuration_names_what_it_does_not_know_and_what_it_needs(least):
    """In one sentence, not in a TypeError of Python. Copies are equal."""
    for kind, settings in least.items():
        with pytest.raises(ConfigError, match=f"{kind.__name__} has no setting 'sead'"):
            kind(**settings, sead=1)
        with pytest.raises(ConfigError, match=rf"takes settings by name, such as {kind.__name__}\("):
            kind("模型")
        needed = [one.name for one in dataclasses.fields(kind) if one.default is dataclasses.MISSING]
        for name in needed:
            said = rf"^{kind.__name__} needs {name}; write {kind.__name__}\({name}=\.\.\.\)$"
            with pytest.raises(ConfigError, match=said):
                kind(**{other: value for other, value in settings.items() if other != name})
        if needed:
            with pytest.raises(ConfigError, match=f"needs {', '.join(needed)}; write"):
                kind()
        config = kind(**settings)
        assert copy.deepcopy(config) == copy.copy(config) == config
        if hasattr(sys.modules[kind.__module__], kind.__name__):  # plans and examinations are made when needed
            assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("train", "config", "unknown", "said"),
    [
        (heedful.train_ppo, PPOConfig, "prompts", "there is no argument 'prompts'; heedful's name is data"),
        (heedful.train_grpo, GRPOConfig, "reward_funcs", "; heedful's name is rewards"),
        (heedful.train_sft, SFTConfig, "train_dataset", "; heedful's name is data"),
        (heedful.train_sft, SFTConfig, "processing_class", "; heedful's name is tokenizer"),
        (heedful.train_sft, SFTConfig, "modle", ". Perhaps you meant model"),
        (heedful.train_sft, SFTConfig, "lr", "; heedful's name is learning_rate, a setting of SFTConfig"),
        (heedful.train_sft, SFTConfig, "epochs", r"; it is a setting: SFTConfig\(epochs=...\)"),
    ],
)  # fmt: skip
def test_an_unknown_argument_of_a_trainer_is_answered(train, config, unknown, said):
    with pytest.raises(ConfigError, match=said):
        train(config(), **{unknown: ["你好"]})
