"""YAML, flags and Python say the same thing, and whoever mistypes is told where and what was meant."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from heedful import (
    A2CConfig,
    ChatConfig,
    ConfigError,
    CriticConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    OnlineDPOConfig,
    PassAtKConfig,
    PPOConfig,
    RewardConfig,
    SFTConfig,
)
from heedful.configs.exam import ExamConfig
from heedful.configs.label_server import LabelServeConfig
from heedful.configs.migrate import MigrateConfig
from heedful.configs.parse import parse, to_yaml
from heedful.configs.settings import required
from heedful.configs.tools import SampleConfig

RUN_YAML = "model: m\ndata: d.jsonl\noutput: o\n"


@pytest.fixture
def written(tmp_path):
    """``written(text)`` is the path of a YAML file with that text."""

    def write(text, encoding="utf-8"):
        path = tmp_path / "配置.yaml"
        path.write_bytes(text.encode(encoding))
        return str(path)

    return write


@pytest.fixture
def refused(capsys):
    """``refused(config_class, arguments)`` is what is said on standard error."""

    def run(config_class, arguments):
        with pytest.raises(ConfigError) as stopped:
            parse(config_class, arguments, prog="heedful test")
        assert capsys.readouterr().out == ""
        return str(stopped.value)

    return run


def parsed(config_class, *arguments):
    return parse(config_class, arguments, prog="heedful test")


def as_flags(settings):
    """Settings as a person types them."""
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", *(value if isinstance(value, tuple) else [str(value)])]
    return flags


def in_python(config_class, settings):
    path = {"output": Path(settings["output"])} if "output" in settings else {}
    return config_class(**(settings | path))


def round_trip(config, path, *, whole=False):
    """A configuration from its file, which has the settings that are not at their default, or all of them."""
    fields, needed = dataclasses.fields(config), required(type(config))
    is_default = [one.name for one in fields if getattr(config, one.name) == one.default and one.name not in needed]
    leave_out = [] if whole else is_default
    path.write_text(to_yaml(config, leave_out=leave_out), encoding="utf-8")
    return parsed(type(config), str(path))


def test_yaml_flags_and_python_agree(least, written):
    for kind, settings in least.items():
        if hasattr(kind, "NO_SETTINGS_FILE"):  # its first word is a file of another library
            continue
        path = written(yaml.safe_dump({k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}))
        assert parsed(kind, path) == parsed(kind, *as_flags(settings)) == in_python(kind, settings)


def test_every_field_has_one_name_everywhere(least, of_own_fields, tmp_path):
    """Each setting moved from its default comes back from YAML and from its flag; so no field escapes the parser.

    As many as go together are moved at once, the others one by one. A2C's and a critic's fields are PPO's.
    """
    for kind in set(of_own_fields) - {A2CConfig, CriticConfig, MigrateConfig}:
        config = in_python(kind, least[kind])
        together, by_themselves, names = {}, [], []
        for field in dataclasses.fields(kind):
            value = getattr(config, field.name)
            if isinstance(value, bool):
                new = not value
            elif isinstance(value, int) and field.name not in ("rollout_batch_size", "minibatch_size"):
                new = 8 if value < 8 else 2 * value
            elif isinstance(value, float):
                new = value / 2 or 0.25
            else:
                continue  # hypothesis writes texts below
            names.append(field.name)
            changes = {field.name: new} | _company(kind, field.name)
            if together | changes == changes | together and _is_valid(config, together | changes):
                together |= changes
            else:
                by_themselves.append(changes)
        differing = set()
        for changes in [together, *by_themselves]:
            moved = dataclasses.replace(config, **changes)
            differing |= {name for name in changes if getattr(moved, name) != getattr(config, name)}
            assert parsed(kind, *as_flags(least[kind] | changes)) == moved
            assert round_trip(moved, tmp_path / "设置.yaml", whole=changes is together) == moved
        assert set(names) <= differing, kind


def _is_valid(config, changes):
    try:
        dataclasses.replace(config, **changes)
    except ConfigError:
        return False
    return True


def _company(config_class, name):
    """What another setting must be for this one to be valid."""
    if name in ("answers", "buffer") and config_class is LabelServeConfig:
        return {"policy": ("模型",)}
    if config_class is ExamConfig:
        sampling = ("n", "max_new_tokens", "temperature", "top_k", "top_p", "cuda_graphs")
        return {"policy": "模型"} if name in sampling else {"data": "数据.jsonl"}
    servers, truncated = {"sampler": ("vllm:http://h:1",)}, {"importance": "token-truncate"}
    others = {
        "owner": {"name": None}, "vocab_size": {"texts": "文本.jsonl"}, "back": {"batch": "3"},
        "pool": {"pool": 4.0},  # half of its default is less than a prompt per pair
        "random_share": {"reward_models": 2}, "label_simulated": {"label": True},
        "samples_per_prompt": {"rollout_batch_size": 64}, "lora_dropout": {"lora_rank": 8}, "kl_horizon": {"kl_target": 6.0},
        "replicas": {"shard": "full", "ranks": 8}, "ptx_coef": {"ptx_data": "数据.jsonl"}, "target_margin": {"loss": "simpo"},
        "overlong_penalty": {"overlong_buffer": 16}, "importance_low": {"importance": "token-mask"},
        "dynamic_sampling_rounds": {"advantage": "dr_grpo", "samples_per_prompt": 8, "rollout_batch_size": 64},
        "importance_high": truncated, "importance_normalise": truncated, "async_steps": truncated | servers,
    }  # fmt: skip
    if name.startswith("sampler_"):
        return servers
    if name in ("max_turns", "environment_timeout"):
        return {"environment": ("python:游戏.py:Game",)}
    if issubclass(config_class, GRPOConfig):
        of_a_critic = ("gamma", "gae_lambda", "whiten_rewards", "value_coef", "value_clip_range", "value_epochs")
        others |= {setting: {"advantage": "gae"} for setting in (*of_a_critic, "critic_warmup_steps")}
    return {k: value for k, value in others.get(name, {}).items() if k in config_class.__dataclass_fields__}


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ["null", "no", "off", "yes", "true", "1e-5", "010", "12:30", "0x1f", "-x", "--model", "- a", "'", '"', "# no",
     "a: b", "{a}", "[a]", "你好：世界", "第一行\n第二行\n", "\r\n", " leading", "trailing ", "\t", "*a", "&a", "!t",
     "%", "@", "`", "=", "a=b", "~", "\u2028", "\x85", "\ufeff", "\x00", "😀", "2024-02-17", ".inf", "..", "---", "...", "?"]
)  # fmt: skip


def is_path(text):
    """Of the texts above, those that can be a path and mean themselves."""
    return "\0" not in text and not text.startswith("~")


@pytest.mark.parametrize("weights", [(1.0, -0.5), (-1e-05, 2e30, -0.0)])
def test_negative_weights_are_no_flags(written, tmp_path, weights):
    """From YAML, from flags, and back: a number with a minus is told from a flag."""
    config = in_python(PPOConfig, {"model": "m", "data": "d.jsonl", "output": "o", "reward_weights": weights})
    assert round_trip(config, tmp_path / "c.yaml") == config
    listed = f"reward_weights: [{', '.join(map(str, weights))}]\n"
    assert parsed(PPOConfig, written(RUN_YAML + listed)) == config
    flags = ["--model", "m", "--data", "d.jsonl", "--output", "o"]
    assert parsed(PPOConfig, *flags, "--reward-weights", *map(str, weights), "--steps", "100") == config


@example(text="null")
@example(text="")
@example(text="\x85")  # a line break that YAML would fold into a space
@given(text=TEXTS)
def test_strings_survive_the_round_trip(tmp_path_factory, text):
    """Also in a field that may be None: the quoted text 'null' is a text."""
    path = text if is_path(text) else "m"
    config = SFTConfig(model=path or "m", data=path, columns=text, chat_template=path, output=Path("o"))
    assert round_trip(config, tmp_path_factory.mktemp("y") / "c.yaml") == config
    config = ChatConfig(model="m", system_prompt=text)
    assert round_trip(config, tmp_path_factory.mktemp("y") / "c.yaml") == config


def test_the_text_none_is_told_from_no_text(tmp_path):
    """``--system-prompt none`` is None, as the help writes it."""
    assert parsed(ChatConfig, "--model", "m", "--system-prompt", "none").system_prompt is None
    config = ChatConfig(model="m", system_prompt="None")
    assert round_trip(config, tmp_path / "c.yaml").system_prompt in ("None", None)
    assert round_trip(ChatConfig(model="None"), tmp_path / "c.yaml").model == "None"


@given(
    learning_rate=st.floats(1e-300, 1e300),
    kl_coef=st.floats(0, 1e6),
    gamma=st.floats(0, 1),
    value_clip_range=st.none() | st.floats(1e-9, 10),
    seed=st.integers(0, 2**63 - 1),
    reference=st.none() | TEXTS.filter(lambda text: text.lower() != "none" and is_path(text)),
    output=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(
        lambda s: s.strip("./") and is_path(s)
    ),
    rewards=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(lambda t: t[0] != "-")
    ),
    whiten_rewards=st.booleans(),
)
def test_a_saved_configuration_repeats_the_run(tmp_path_factory, rewards, output, **settings):
    config = PPOConfig(model="m", data="d", output=Path(output), rewards=tuple(rewards), **settings)
    assert round_trip(config, tmp_path_factory.mktemp("y") / "c.yaml") == config


def test_adapters_have_a_learning_rate_of_their_own_if_none_is_set(tmp_path, written):
    base = {"model": "m", "data": "d.jsonl", "output": Path("o")}
    rates = {SFTConfig: 1e-5, RewardConfig: 1e-5, DPOConfig: 1e-6, KTOConfig: 1e-6}
    for kind, of_all in (rates | dict.fromkeys((PPOConfig, A2CConfig, GRPOConfig, OnlineDPOConfig), 3e-6)).items():
        config = kind(**base, lora_rank=8)
        assert (kind(**base).learning_rate, config.learning_rate) == (of_all, pytest.approx(10 * of_all)), kind
        assert type(kind(**base).learning_rate) is type(config.learning_rate) is float
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert yaml.safe_load(path.read_text("utf-8"))["learning_rate"] == 3e-5
    assert parsed(kind, str(path)) == dataclasses.replace(config) == config
    assert parsed(kind, written(RUN_YAML), "--lora-rank", "8") == config
    assert parsed(kind, written(RUN_YAML + f"learning_rate: {of_all}\n"), "--lora-rank", "8").learning_rate == of_all
    assert kind(**base, lora_rank=8, learning_rate=of_all).learning_rate == of_all


def test_a_preset_is_a_name_unless_there_is_a_file_of_it(tmp_path, monkeypatch):
    """A folder of it is none: the output of the run before, which the same command resumes."""
    monkeypatch.chdir(tmp_path)
    run = ("--model", "m", "--data", "题.jsonl", "--rewards", "rule:digits", "--output", "sao")
    assert parsed(PPOConfig, "vapo", *run).gae_lambda_alpha == 0.05
    Path("sao").mkdir()
    assert parsed(PPOConfig, "sao", *run).value_freeze == ("self_attn",)
    Path("sao").rmdir()
    Path("sao").write_text("seed: 7\n", encoding="utf-8")
    assert parsed(PPOConfig, "sao", *run).seed == 7


def test_flags_win_over_the_file(written):
    path = written(RUN_YAML + "learning_rate: 1e-5\nrewards: [rule:digits]\nwhiten_rewards: true\nkl_target: 6\n")
    config = parsed(
        PPOConfig, path, "--learning-rate", "2e-5", "--rewards", "a", "b", "--no-whiten-rewards", "--kl_target=None"
    )
    found = (config.model, config.learning_rate, config.rewards, config.whiten_rewards, config.kl_target)
    assert found == ("m", 2e-5, ("a", "b"), False, None)


SCALARS = [
    ("learning_rate: 1e-5", "learning_rate", 1e-5),
    ("epochs: 3", "epochs", 3.0),
    ("max_steps: 010", "max_steps", 10),
    ("max_steps: '7'", "max_steps", 7),
    ("max_steps: null", "max_steps", None),
    ("max_steps:", "max_steps", None),
    ("max_steps: none", "max_steps", None),
    ("system_prompt: none", "system_prompt", None),
    ("columns: none", "columns", "none"),
    ("columns: 12:30", "columns", "12:30"),
    ("columns: 010", "columns", "010"),
    ("columns: null", "columns", "null"),
    ("system_prompt: 'null'", "system_prompt", "null"),
    ('system_prompt: "~"', "system_prompt", "~"),
    ("system_prompt: ''", "system_prompt", ""),
    ("system_prompt: null", "system_prompt", None),
    ("system_prompt: -请回答", "system_prompt", "-请回答"),
    ("system_prompt: |-\n  第一行\n  第二行", "system_prompt", "第一行\n第二行"),
    ("overwrite: true", "overwrite", True),
    ("overwrite: false", "overwrite", False),
    ("learning-rate: 1e-4", "learning_rate", 1e-4),
    ("eval_every: 0", "eval_every", 0),
    ("max_steps: None", "max_steps", None),
    ("columns: no", "columns", "no"),
    ("whiten-rewards: true", "whiten_rewards", True),
]


def test_yaml_scalars_are_taken_as_written(written):
    """YAML 1.1 would make 1e-5 a text, 010 eight, no false and 12:30 a number of minutes; the flag's type decides."""
    for line, field, value in SCALARS:
        found = getattr(
            parsed(PPOConfig if field == "whiten_rewards" else SFTConfig, written(RUN_YAML + line + "\n")), field
        )
        assert found == value, line
        assert type(found) is type(value)


def test_lists(written):
    for line, expected in (
        ("rewards: [rule:digits, 'python:奖励.py:分']", ("rule:digits", "python:奖励.py:分")),
        ("rewards:\n  - rule:digits\n  - model:a b", ("rule:digits", "model:a b")),
        ("rewards: rule:digits", ("rule:digits",)),
        ("rewards: []", ()),
    ):
        assert parsed(PPOConfig, written(RUN_YAML + line + "\n")).rewards == expected
    config = parsed(PPOConfig, written("rewards: [rule:digits]\n" + RUN_YAML), "--rewards", "a", "b", "--steps", "3")
    assert (config.rewards, config.steps) == (("a", "b"), 3)


def test_an_empty_list_is_not_the_default(written, refused):
    path = written("model: m\ndata: d.jsonl\nk: []\n")
    assert "--k must be numbers from 1 to --samples-per-prompt 16, got none" in refused(PassAtKConfig, [path])
    path = written("models: []\ndata: d.jsonl\noutput: o\n")
    message = refused(SampleConfig, [path])
    assert message.startswith("--models is missing: name one policy or several")
    assert f"{path}:1: models is set here" in message


def test_what_a_file_may_have_besides(written):
    """A byte order mark, comments, a line that begins it; an empty one sets nothing."""
    text = "# 注释\n---\n" + RUN_YAML + "epochs: 2 # two\n"
    assert parsed(SFTConfig, written(text, "utf-8-sig")).epochs == 2
    flags = ["--model", "m", "--data", "d.jsonl", "--output", "o"]
    assert parsed(SFTConfig, written("# nothing\n"), *flags) == parsed(SFTConfig, written(RUN_YAML))


WRONG_LINES = [
    ("learning_rat: 1e-5", ["--learning-rat", "Perhaps you meant", "--learning-rate", "{path}:4"]),
    ("epochs: many", ["--epochs", "many", "{path}:4"]),
    ("max_steps: '1e3'", ["--max-steps", "1e3", "{path}:4"]),
    ("lr_schedule: cosin", ["--lr-schedule", "cosin", "cosine", "{path}:4"]),
    ("overwrite: yes", ["{path}:4", "overwrite", "true or false", "yes"]),
    ("learning_rate: 0", ["--learning-rate", "greater than 0", "{path}:4"]),
    ("learning_rate: nan", ["--learning-rate", "greater than 0", "nan", "{path}:4"]),
    ("batch_size: [1, 2]", ["batch_size", "{path}:4"]),
    ("eval_data: [a, b]", ["eval_data", "{path}:4"]),
    ("model: again", ["{path}:4", "'model'", "twice"]),
    ("learning_rate: 1\nlearning-rate: 2", ["{path}:5", "twice"]),
    ("optimizer:\n  learning_rate: 1", ["{path}:4", "optimizer", "mapping", "flat"]),
    ("eval_data: [[a]]", ["{path}:4", "eval_data"]),
    ("? [a, b]\n: c", ["{path}:4"]),
    ("batch_size: " + "9" * 400, ["--batch-size", "below 2^63", "{path}:4"]),
    ("output=/tmp/x: 1", ["{path}:4", "'output=/tmp/x' is not the name of a setting"]),
    ("columns: !!python/object/apply:os.system ['true']", ["{path}:4", "the tag", "python/object/apply:os.system"]),
    ("!!python/name:os.system : 1", ["{path}:4", "the tag", "python/name:os.system"]),
    ("columns: !!binary aGk=", ["{path}:4", "the tag", "binary"]),
    ("<<: {epochs: 2}", ["{path}:4"]),
    ("help: true", ["{path}:4", "--help"]),
    ("no_overwrite: true", ["{path}:4", "write overwrite: false"]),
    ("eval_data: ~nosuchuser7/x", ["--eval-data", "~nosuchuser7", "there is no such user", "./~nosuchuser7", "{path}:4"]),
    ('eval_data: "a\\0b"', ["--eval-data", "NUL", "{path}:4"]),
]  # fmt: skip


def test_a_wrong_line_is_named_with_its_file(written, refused):
    for line, fragments in WRONG_LINES:
        path = written(RUN_YAML + line + "\n")
        message = refused(SFTConfig, [path])
        assert not [one for one in fragments if one.format(path=path) not in message], message


def test_no_value_of_a_file_is_read_as_a_flag(written, refused):
    """Whatever it begins with."""
    found = parsed(
        PPOConfig,
        written(RUN_YAML + "rewards: [--overwrite]\nselection_rewards: --steps=1\nptx_data: -x\nptx_coef: 1\n"),
    )
    assert (found.rewards, found.selection_rewards, found.ptx_data) == (("--overwrite",), ("--steps=1",), "-x")
    assert not found.overwrite
    message = refused(PPOConfig, [written(RUN_YAML + "reward_weights: --overwrite\n")])
    assert "--reward-weights must be a number, got '--overwrite'" in message


def test_settings_in_python_are_refused_as_flags_are(refusal):
    for settings, said in (
        ({"seed": 10**5000}, "--seed must be below 2^63"),
        ({"reward_weights": (10**400,)}, "finite"),
        ({"learning_rate": "1e-5"}, "--learning-rate must be a number, got '1e-5'"),
        ({"steps": None}, "--steps must be a whole number, got None"),
        ({"seed": [1]}, "--seed must be a whole number, got [1]"),
        ({"kl_coef": 10**400}, "--kl-coef must be below 2^63"),
    ):
        assert said in refusal(PPOConfig, **settings)


def test_what_was_given_is_known(written):
    """Also at its default, switched off, an empty list, with underscores, or after an equals sign; values are no flags."""
    path = written(RUN_YAML + "selection_rewards: last\nrewards: []\n")
    flags = ("--no-overwrite", "--system-prompt=--steps", "--kl_coef", "0.1", "--resume", "early_stopping_patience")
    config = parsed(PPOConfig, path, *flags)
    assert config.given == {
        "model", "data", "output", "selection_rewards", "rewards", "overwrite", "system_prompt", "kl_coef", "resume"
    }  # fmt: skip
    assert parsed(LabelServeConfig, "项目", "--port", "8080").given == {"project", "port"}
    assert PPOConfig(model="m", data="d", output=Path("o")).given == frozenset()


def test_an_error_is_one_sentence(refused):
    """Without the parser's frame, its excerpt of the help or the name of a class."""
    assert (
        refused(ChatConfig, ["--model", "模型", "--temperature", "-1"]) == "--temperature must be at least 0, got -1.0"
    )
    first, second = refused(ChatConfig, ["--model", "模型", "--top-k", "三"]).splitlines()
    assert first == "--top-k must be a whole number, got '三'"
    assert second == "--top-k: Sample only from the k most likely tokens. 0 samples from all."


def test_a_line_that_a_flag_overrides_is_not_blamed(written, refused):
    path = written(RUN_YAML + "learning_rate: 1e-5\n")
    assert f"{path}:4" not in refused(SFTConfig, [path, "--learning-rate", "0"])


def test_a_yaml_file_elsewhere_than_first(written, refused):
    """It would otherwise be taken for a value, or called an unrecognised option."""
    path = written(RUN_YAML)
    for arguments in (["--model", "m", path], ["--overwrite", path], [path, path], ["--rewards", "a", "b", path]):
        message = refused(PPOConfig, arguments)
        assert path in message
        assert "directly after the command" in message


@pytest.mark.parametrize("arguments", [["-h"], ["{path}", "--help"]])
def test_help_is_asked_for_in_two_ways(written, capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        parsed(SFTConfig, *[argument.format(path=written(RUN_YAML)) for argument in arguments])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    assert "--model" in said
    assert "--help-all" in said


def test_a_wrong_flag_is_named(refused):
    for flags, fragments in (
        (["--learning-rat", "1"], ["--learning-rat", "Perhaps you meant", "--learning-rate"]),
        (["--epochs", "三"], ["--epochs", "三"]),
        (["--lr-schedule", "cos"], ["--lr-schedule", "cos", "constant", "linear", "cosine"]),
        (["--learning-rate", "-1"], ["--learning-rate", "greater than 0", "-1"]),
        (["--epochs"], ["--epochs"]),
        (["--overwrite", "yes"], ["yes"]),
        (["plain"], ["plain", "flags start with --"]),
    ):
        message = refused(SFTConfig, ["--model", "m", "--data", "d", "--output", "o", *flags])
        assert not [one for one in fragments if one not in message], message


def test_a_missing_required_flag_is_named(least, refused):
    for kind, settings in least.items():
        for name in settings.keys() - {"folder"}:
            rest = {other: value for other, value in settings.items() if other != name}
            assert "--" + name.replace("_", "-") in refused(kind, as_flags(rest)), (kind, name)


def test_a_value_after_an_equals_sign_may_be_anything():
    for value in ("-x", "--model", "a=b", "", " ", "你好"):
        assert parsed(ChatConfig, "--model", "m", f"--system-prompt={value}").system_prompt == value


def test_a_value_that_is_a_secret_leaves_yaml_that_can_be_read(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "plain-looking-秘密")
    config = SFTConfig(model="m", data="d", output="o", system_prompt="plain-looking-秘密")
    assert yaml.safe_load(to_yaml(config, without_secrets=True))["system_prompt"] == "***"
