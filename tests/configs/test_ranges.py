"""Every setting out of range is refused when the configuration is made, and the message names the flag."""

import ast
import dataclasses
import inspect
import math
import typing

import pytest

from heedful import (
    A2CConfig,
    AccuracyConfig,
    BestOfNConfig,
    ChatConfig,
    ConfigError,
    DemoConfig,
    DPOConfig,
    GRPOConfig,
    KLConfig,
    KTOConfig,
    MergeConfig,
    OnlineDPOConfig,
    PassAtKConfig,
    PerplexityConfig,
    PPOConfig,
    RewardConfig,
    ScoresConfig,
    ServeRewardConfig,
    SFTConfig,
    WinRateConfig,
)
from heedful.cli.main import COMMANDS
from heedful.configs.report import ReportConfig
from heedful.configs.settings import Range
from heedful.configs.tools import TinyConfig

NAN, INFINITE = math.nan, math.inf


def flag(name):
    return "--" + name.replace("_", "-")


MACHINE = [{"seed": -1}, {"seed": 2**64}]
RUN = [
    *MACHINE,
    {"eval_every": -1},
    {"save_every": -1},
    {"sample_every": -1},
    {"num_samples": 0},
    {"early_stopping_patience": -1},
]
DATA = [
    *({"eval_fraction": x} for x in (-0.1, 1.0, 1.5, NAN)),
    *({"max_dropped": x} for x in (-0.1, 1.1, NAN)),
    {"max_samples": 0},
]
OPTIMIZER = [
    *({"learning_rate": x} for x in (0, -1e-5, NAN, INFINITE)),
    {"adam_eps": 0},
    {"adam_beta2": 1},
    {"adam_beta2": -0.1},
    {"micro_batch_size": 0},
    {"micro_batch_size": -8},
    {"micro_batch_tokens": 0},
    {"micro_batch_tokens": -1},
    {"warmup_steps": -1},
    {"weight_decay": -0.1},
    {"weight_decay": NAN},
    {"max_grad_norm": -1},
    {"lora_rank": -1},
    {"lora_alpha": 0},
    {"lora_alpha": NAN},
    {"lora_targets": "q_proj,,v_proj"},
    {"lora_targets": ""},
]
SAMPLING = [
    {"max_new_tokens": 0},
    {"top_p": 0},
    {"top_p": 1.1},
    {"top_p": NAN},
    {"top_k": -1},
    {"temperature": -0.5},
    {"temperature": NAN},
    {"temperature": INFINITE},
]
MEASURE = [
    *MACHINE,
    {"max_samples": 0},
    {"micro_batch_size": 0},
    {"micro_batch_tokens": 0},
    {"max_dropped": -0.1},
    {"max_dropped": 1.1},
    *({"eval_fraction": x} for x in (0, -0.1, 1.1, NAN)),
]
SAMPLED = [*MEASURE, *SAMPLING, {"max_prompts": 0}, {"num_samples": 0}, {"samples_per_prompt": 0}]
REWARDS = [
    *({"reward_weights": (1.0, x)} for x in (NAN, INFINITE, -INFINITE)),
    *({"reward_timeout": x} for x in (0, -1, NAN, INFINITE)),
    *({"reward_retry_minutes": x} for x in (-1, NAN, INFINITE)),
    *({"reward_memory_gb": x} for x in (0, -1, NAN, INFINITE)),
    *({"reward_concurrency": x} for x in (0, -1)),
    *({"judge_temperature": x} for x in (-1, NAN, INFINITE)),
    *({"judge_max_tokens": x} for x in (0, -1)),
    *({"max_failed_rewards": x} for x in (-0.1, 1, NAN, INFINITE)),
]
LENGTHS = [{"batch_size": 0}, {"batch_size": -16}, {"epochs": 0}, {"epochs": NAN}, {"max_steps": 0}, {"max_length": -1}]
ONLINE = [
    *RUN,
    *DATA,
    *OPTIMIZER,
    *SAMPLING,
    *REWARDS,
    *({"score_clip": x} for x in (0, -1, NAN)),
    {"temperature": 0},
    *(
        {name: value}
        for name in ("steps", "rollout_batch_size", "samples_per_prompt", "ppo_epochs", "minibatch_size")
        for value in (0, -1)
    ),
    *({name: 0} for name in ("eval_prompts", "rollout_micro_batch_size")),
    {"missing_eos_penalty": -0.1},
    *({name: -1} for name in ("overlong_buffer", "dynamic_sampling_rounds")),
    *({"overlong_penalty": x} for x in (0, -1, NAN)),
]
OBJECTIVE = [
    *({name: x} for name in ("target_entropy", "importance_high") for x in (0, -1, NAN)),
    *({"importance_low": x} for x in (-1, NAN)),
    {"clip_range": 0},
    *({"kl_coef": x} for x in (-0.1, NAN)),
]
PPO = [
    *ONLINE,
    *OBJECTIVE,
    *({name: 0} for name in ("value_clip_range", "value_learning_rate", "kl_target", "kl_horizon")),
    *({name: -0.1} for name in ("entropy_coef", "value_coef")),
    {"score_norm_samples": -1},
    *({name: value} for name in ("gamma", "gae_lambda") for value in (-0.1, 1.01, NAN)),
    *({name: value} for name in ("clip_range_high", "approx_kl_limit") for value in (0, -0.1, NAN)),
    *({"dual_clip": x} for x in (1.0, 0.5, -3.0, NAN, INFINITE)),
    *({"ema_decay": x} for x in (1.0, -0.1, 1.1, NAN)),
    *({"critic_warmup_steps": x} for x in (-1, 100)),
    *({"ptx_coef": x} for x in (-1.0, NAN)),
]

OUT_OF_RANGE = {
    SFTConfig: [*RUN, *DATA, *OPTIMIZER, *LENGTHS, *({"lora_dropout": x} for x in (-0.1, 1.0, NAN))],
    RewardConfig: [
        *RUN,
        *DATA,
        *OPTIMIZER,
        *LENGTHS,
        {"center_coef": -0.01},
        {"label_smoothing": -0.1},
        {"label_smoothing": 1.1},
    ],
    DPOConfig: [
        *RUN,
        *DATA,
        *OPTIMIZER,
        *LENGTHS,
        *({"beta": x} for x in (0, -0.1, NAN)),
        {"label_smoothing": -0.1},
        {"label_smoothing": 1.1},
        *({name: x} for name in ("target_margin", "nll_coef") for x in (-0.1, NAN, INFINITE)),
    ],
    KTOConfig: [
        *RUN,
        *DATA,
        *OPTIMIZER,
        *LENGTHS,
        *({name: x} for name in ("beta", "desirable_weight", "undesirable_weight") for x in (0, -0.1, NAN, INFINITE)),
        {"batch_size": 1},
    ],
    OnlineDPOConfig: [*ONLINE, *({"beta": x} for x in (0, -0.1, NAN))],
    GRPOConfig: [*ONLINE, *OBJECTIVE, *({"clip_range_high": x} for x in (0, -0.1, NAN))],
    PPOConfig: PPO,
    A2CConfig: [wrong for wrong in PPO if wrong != {"minibatch_size": 0}],
    TinyConfig: [*({name: 0} for name in ("hidden_size", "num_layers", "max_length")), *MACHINE, {"hidden_size": 20}],
    ChatConfig: [*MACHINE, *SAMPLING],
    DemoConfig: MACHINE,
    AccuracyConfig: MEASURE,
    PerplexityConfig: [*MEASURE, {"max_length": 0}],
    ScoresConfig: [*SAMPLED, *REWARDS],
    BestOfNConfig: [*SAMPLED, *REWARDS, {"n": 0}],
    PassAtKConfig: [*SAMPLED, *REWARDS, *({"correct_from": x} for x in (NAN, INFINITE))],
    WinRateConfig: [*SAMPLED, *REWARDS],
    ServeRewardConfig: [
        *MACHINE,
        {"micro_batch_size": 0},
        *({"max_request_mb": x} for x in (0, -1, NAN)),
        *({name: x} for name in ("max_held_mb", "receive_timeout") for x in (0, NAN, INFINITE)),
        *({name: 0} for name in ("max_queue", "max_connections")),
        *({"port": x} for x in (-1, 65536)),
    ],
    KLConfig: [*SAMPLED, {"temperature": 0}],
}


@pytest.mark.parametrize(
    ("config_class", "wrong"),
    [(config_class, wrong) for config_class, all_wrong in OUT_OF_RANGE.items() for wrong in all_wrong],
    ids=lambda x: x.__name__ if isinstance(x, type) else "=".join(str(part) for item in x.items() for part in item),
)
def test_out_of_range_names_the_flag_and_what_it_got(make, config_class, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError) as error:
        make(config_class, **wrong)
    assert flag(name) in str(error.value)
    assert str(value) in str(error.value)


@pytest.mark.parametrize(
    ("config_class", "together", "message"),
    [
        (PPOConfig, {"minibatch_size": 128}, "--minibatch-size is 128, larger than --rollout-batch-size 64; lower it"),
        (
            PPOConfig,
            {"minibatch_size": 48},
            "--rollout-batch-size 64 is not a multiple of --minibatch-size 48; try .*48",
        ),
        (PPOConfig, {"samples_per_prompt": 65}, "--samples-per-prompt is 65, larger than --rollout-batch-size 64"),
        (
            PPOConfig,
            {"samples_per_prompt": 3},
            "--rollout-batch-size 64 is not a multiple of --samples-per-prompt 3; try",
        ),
        (PPOConfig, {"score_norm_samples": 1}, "--score-norm-samples must be 0 or at least 2"),
        (PPOConfig, {"kl_target": 6.0, "kl_coef": 0.0}, "--kl-target .*--kl-coef .* above 0"),
        (PPOConfig, {"kl_horizon": 500}, "--kl-horizon 500 belongs to --kl-target"),
        (PPOConfig, {"kl_target": 6.0, "kl_horizon": 12}, "--kl-horizon 12 is too short .*-size 64: .* at least 13"),
        (
            PPOConfig,
            {"importance_level": "sequence", "rollout_batch_size": 1, "minibatch_size": 1},
            "--rollout-batch-size is 1, but with --importance-level sequence .* at least 2",
        ),
        (PPOConfig, {"value_model": "m"}, "--value-model .* add --critic separate"),
        (
            PPOConfig,
            {"critic": "reward", "quantize": "4bit", "lora_rank": 8},
            "--quantize 4bit does not reach .*--critic shared",
        ),
        (PPOConfig, {"value_model": "m", "critic": "reward"}, "--value-model .* add --critic separate"),
        (
            PPOConfig,
            {"importance_level": "sequence", "gamma": 0.9},
            "--gamma 0.9 spreads .* --importance-level sequence",
        ),
        (
            PPOConfig,
            {"importance_level": "sequence", "gae_lambda": 1.0},
            "--gae-lambda 1.0 spreads",
        ),
        (PPOConfig, {"policy_loss": "a2c"}, "--ppo-epochs 1 and --minibatch-size 64, got --ppo-epochs 4 and"),
        (A2CConfig, {"ppo_epochs": 2}, "--policy-loss a2c .* got --ppo-epochs 2 and --minibatch-size 64"),
        (A2CConfig, {"minibatch_size": 32}, "--policy-loss a2c .* --minibatch-size 64, got .* --minibatch-size 32"),
        (A2CConfig, {"clip_range": 0.1}, "--clip-range 0.1 is about the probability ratio, .* --policy-loss a2c"),
        (A2CConfig, {"clip_range_high": 0.3}, "--clip-range-high 0.3 is about .* --policy-loss a2c"),
        (A2CConfig, {"dual_clip": 3.0}, "--dual-clip 3.0 is about .* --policy-loss a2c"),
        (A2CConfig, {"approx_kl_limit": 0.1}, "--approx-kl-limit 0.1 is about .* --policy-loss a2c"),
        (
            PPOConfig,
            {"kl_in": "loss"},
            "--kl-in loss does not go with --kl-kind k1.* k2, .* k3 or --kl-kind weighted-k3",
        ),
        (
            PPOConfig,
            {"kl_kind": "weighted-k3"},
            "--kl-in reward does not go with --kl-kind weighted-k3.* add --kl-kind k1",
        ),
        (PPOConfig, {"ptx_data": "d"}, "--ptx-data has no effect with --ptx-coef 0"),
        (PPOConfig, {"ptx_coef": 0.5}, "--ptx-coef 0.5 .* add --ptx-data"),
        *(
            (
                PPOConfig,
                {"value_coef": 0.5, "critic": critic},
                f"--value-coef 0.5 is about a value head .* --critic {critic} ",
            )
            for critic in ("separate", "reward")
        ),
        *(
            (
                GRPOConfig,
                {name: value},
                f"--{name.replace('_', '-')} {value} is about rewards per token, .* --advantage grpo ",
            )
            for name, value in (("gamma", 0.9), ("whiten_rewards", True))
        ),
        (GRPOConfig, {"gae_lambda": 0.5}, "--gae-lambda 0.5 is about a critic's values, .* --advantage grpo "),
        *(
            (GRPOConfig, {name: value}, f"{flag(name)} {value} belongs to a critic, and --advantage grpo has")
            for name, value in (
                ("critic", "separate"),
                ("value_coef", 0.5),
                ("value_clip_range", 0.5),
                ("value_learning_rate", 1e-3),
                ("critic_warmup_steps", 1),
            )
        ),
        (
            PPOConfig,
            {"advantage": "reinforce++", "importance_level": "sequence"},
            r"--importance-level sequence has one ratio per response, but --advantage reinforce\+\+ gives each",
        ),
        (
            PPOConfig,
            {"importance_level": "sequence", "max_approx_kl": 1.0},
            "--max-approx-kl 1.0 is about ratios per token",
        ),
        (
            A2CConfig,
            {"importance_level": "sequence-mean"},
            "--importance-level sequence-mean is about the probability ratio",
        ),
        (PPOConfig, {"advantage": "gaee"}, "--advantage must be one of gae, grpo, .*got 'gaee'. Perhaps you meant gae"),
        (
            PPOConfig,
            {"policy_loss": "clp"},
            "--policy-loss must be one of clip, a2c, cispo, python:FILE.py:FUNCTION or .*Perhaps you meant clip",
        ),
        (PPOConfig, {"advantage": "python:mine"}, "--advantage: python:mine does not name a function"),
        (PPOConfig, {"sampler": ("python:a.py:E", "vllm:http://a:1")}, "--sampler names python:a.py:E and others"),
        (PPOConfig, {"sampler": ("python:a.py:E",), "sampler_sleep": True}, "--sampler-sleep True is about servers"),
        (
            PPOConfig,
            {"importance_level": "sequence", "loss_reduction": "sequence"},
            "--loss-reduction sequence averages tokens, but --importance-level sequence has one ratio per response",
        ),
        (PPOConfig, {"advantage": "grpo", "kl_coef": 0.0}, "--samples-per-prompt is 1, .* at least 2, or add"),
        (GRPOConfig, {"samples_per_prompt": 1}, "--samples-per-prompt is 1, .* add --advantage reinforce"),
        (
            GRPOConfig,
            {"advantage": "reinforce", "samples_per_prompt": 1, "rollout_batch_size": 1, "minibatch_size": 1},
            "--rollout-batch-size is 1, but --advantage reinforce .* at least 2",
        ),
        (KLConfig, {"temperature": 0}, "--temperature must be greater than 0"),
        *(
            (
                PassAtKConfig,
                {"k": k, "samples_per_prompt": 8},
                f"--k must be .* 1 to --samples-per-prompt 8, got {said}:",
            )
            for k, said in (((9,), "9"), ((1, 16), "1 16"), ((0,), "0"), ((-1, 2), "-1 2"), ((), "none"))
        ),
        (PassAtKConfig, {"k": (2, 2)}, "--k names a number twice, got 2 2"),
        (PassAtKConfig, {"temperature": 0}, "--samples-per-prompt 16 needs a --temperature above 0"),
        (SFTConfig, {"early_stopping_patience": 2, "eval_every": 0}, "--early-stopping-patience .*--eval-every"),
        (RewardConfig, {"early_stopping_patience": 1, "eval_every": 0}, "--early-stopping-patience .*--eval-every"),
        (SFTConfig, {"eval_fraction": 1.0}, "--eval-fraction must be below 1, got 1.0; nothing is left"),
        (
            ReportConfig,
            {"runs": ()},
            "no run is named: heedful report RUN ..., such as heedful report runs/sft runs/ppo",
        ),
        (ReportConfig, {"output": "curves.txt"}, r"--output curves.txt must end in .html, .png, .svg or .pdf"),
        (ReportConfig, {"output": "curves"}, r"--output curves must end in .html"),
        (DemoConfig, {"output": ""}, "--output must name a folder for the demo"),
        (DemoConfig, {"output": "."}, "--output must name a folder for the demo"),
        (TinyConfig, {"hidden_size": 36}, "--hidden-size must be a multiple of 8 .*got 36"),
        (TinyConfig, {"vocab_size": 2000}, "--vocab-size 2000 belongs to --texts, which is not given"),
        (TinyConfig, {"texts": "d.jsonl", "architecture": "qwen2"}, "--texts: .*use --architecture qwen3"),
        (SFTConfig, {"output": ""}, "--output must name a folder"),
        (MergeConfig, {"output": ""}, "--output must name a folder"),
        (SFTConfig, {"lora_alpha": 8}, "--lora-alpha belongs to adapters: add --lora-rank"),
        (SFTConfig, {"lora_dropout": 0.1}, "--lora-dropout belongs to adapters: add --lora-rank"),
        (PPOConfig, {"lora_targets": "q_proj"}, "--lora-targets belongs to adapters: add --lora-rank"),
        (SFTConfig, {"quantize": "4bit"}, "--quantize 4bit .*add --lora-rank"),
        *(
            (trainer, {"lora_rank": 4, "reference_device": "cpu"}, "--reference-device cpu .*--reference")
            for trainer in (PPOConfig, GRPOConfig, DPOConfig)
        ),
        (PPOConfig, {"output": "."}, "--output must name a folder"),
        (ServeRewardConfig, {"max_held_mb": 63}, "--max-held-mb 63 is less than --max-request-mb 64, so the largest"),
        (ServeRewardConfig, {"max_queue": 505}, "--max-connections 512 must be at least 513: those of --max-queue 505"),
        *(
            (ServeRewardConfig, {"allowed_hosts": ("ok", name)}, "--allowed-hosts .* must be only a host name")
            for name in ("", "http://a", "a:80", "a b", "盒")
        ),
        *((ServeRewardConfig, {"token_env": name}, "--token-env .* name of an environment") for name in ("", "A=b")),
    ],
)
def test_settings_that_contradict_each_other(make, config_class, together, message):
    with pytest.raises(ConfigError, match=message):
        make(config_class, **together)


@pytest.mark.parametrize(
    ("config_class", "edge"),
    [
        (
            SFTConfig,
            {
                "eval_fraction": 0.0,
                "max_dropped": 1.0,
                "warmup_steps": 0,
                "max_grad_norm": 0,
                "early_stopping_patience": 1,
            },
        ),
        (SFTConfig, {"batch_size": 1, "epochs": 0.01, "max_steps": 1, "seed": 2**63 - 1}),
        (RewardConfig, {"label_smoothing": 0.0, "center_coef": 0.0}),
        (
            PPOConfig,
            {"gamma": 0.0, "gae_lambda": 1.0, "kl_coef": 0.0, "value_clip_range": None, "score_norm_samples": 2},
        ),
        (PPOConfig, {"minibatch_size": 64, "samples_per_prompt": 64, "top_p": 1.0}),
        (PPOConfig, {"critic": "separate", "value_model": "m", "kl_target": 6.0, "kl_horizon": 13}),
        (PPOConfig, {"importance_level": "sequence", "rollout_batch_size": 2, "minibatch_size": 2}),
        (PPOConfig, {"critic_warmup_steps": 99, "ema_decay": 0.999, "dual_clip": 1.01, "approx_kl_limit": 1e-9}),
        (PPOConfig, {"critic_warmup_steps": 5, "critic": "separate"}),
        (PPOConfig, {"critic": "separate", "value_coef": 0.0}),
        (PPOConfig, {"critic_warmup_steps": 5, "value_coef": 0.0}),
        (PPOConfig, {"ptx_data": "d", "ptx_coef": 27.8, "kl_in": "loss", "kl_kind": "k2", "kl_coef": 0.0}),
        (PPOConfig, {"policy_loss": "a2c", "ppo_epochs": 1, "importance_level": "sequence", "clip_range": 0.2}),
        (A2CConfig, {"policy_loss": "clip", "ppo_epochs": 4, "minibatch_size": 32, "clip_range": 0.1}),
        (GRPOConfig, {"advantage": "reinforce", "samples_per_prompt": 1}),
        (ChatConfig, {"temperature": 0.0, "top_k": 0}),
        (KLConfig, {"eval_fraction": 1.0, "max_prompts": 1}),
        (TinyConfig, {"hidden_size": 8, "num_layers": 1}),
        (DemoConfig, {"seed": 2**63 - 1}),
        (SFTConfig, {"lora_rank": 1, "lora_alpha": 0.5, "lora_dropout": 0.9, "lora_targets": "q_proj, v_proj"}),
        (PPOConfig, {"lora_rank": 4, "reference": "m", "reference_device": "cpu", "quantize": "4bit"}),
        (DPOConfig, {"reference_device": "cpu"}),
        (ScoresConfig, {"rewards": ()}),
        (PassAtKConfig, {"k": (1, 4, 16), "correct_from": -1.0}),
        (PassAtKConfig, {"k": (1,), "samples_per_prompt": 1, "temperature": 0.0}),
        (KTOConfig, {"batch_size": 2, "desirable_weight": 1e-9}),
        (DPOConfig, {"loss": "simpo", "target_margin": 0.0, "nll_coef": 0.0}),
        (ScoresConfig, {"max_failed_rewards": 0.0}),
        (PPOConfig, {"reward_weights": (0.0, -1.0), "score_clip": 1e-3}),
        (ServeRewardConfig, {"port": 0}),
        (ServeRewardConfig, {"port": 65535}),
    ],
)
def test_the_ends_of_the_ranges_are_inside(make, config_class, edge):
    config = make(config_class, **edge)
    assert {name: getattr(config, name) for name in edge} == edge


def test_the_remedy_for_a_size_that_does_not_divide_is_accepted(make):
    """The number that the message proposes must itself be valid."""
    with pytest.raises(ConfigError) as error:
        make(PPOConfig, rollout_batch_size=70, minibatch_size=16)
    proposed = int(str(error.value).rsplit(" ", 1)[1])
    assert make(PPOConfig, rollout_batch_size=proposed, minibatch_size=16).rollout_batch_size == proposed == 64


def test_a2c_learns_from_the_whole_rollout_batch_at_once(make):
    assert make(A2CConfig).minibatch_size == 64
    assert make(A2CConfig, rollout_batch_size=24).minibatch_size == 24


def test_configurations_are_frozen_and_their_defaults_valid(config_class, make):
    config = make(config_class)
    name = dataclasses.fields(config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, None)
    assert all(field.kw_only for field in dataclasses.fields(config))


def test_every_setting_is_documented(every_config_class):
    """A docstring under each field is what --help shows, so a setting without one cannot be understood."""
    for base in {base for kind in every_config_class for base in kind.__mro__ if "__annotations__" in vars(base)}:
        body = ast.parse(inspect.getsource(base)).body[0].body
        for statement, following in zip(body, [*body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign):
                documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                assert documented, f"{base.__name__}.{statement.target.id} has no docstring"
                assert str(following.value.value).strip().endswith("."), f"{base.__name__}.{statement.target.id}"


def outside(allowed):
    """Values that a range does not hold: those at and beyond its bounds, and numbers that are not finite."""
    beyond = [NAN, INFINITE, -INFINITE]
    if math.isfinite(allowed.above):
        beyond += [allowed.above, allowed.above - 1]
    if math.isfinite(allowed.at_least):
        beyond += [allowed.at_least - 1]
    if math.isfinite(allowed.below):
        beyond += [allowed.below, allowed.below + 1]
    if math.isfinite(allowed.at_most):
        beyond += [allowed.at_most + 1]
    return beyond


def ranges_of(config_class):
    hints = typing.get_type_hints(config_class, include_extras=True)
    return {
        name: extra
        for name, hint in hints.items()
        for extra in getattr(hint, "__metadata__", ())
        if isinstance(extra, Range)
    }


def test_a_value_outside_the_range_on_its_field_is_refused(config_class, make):
    """Whatever class the field comes from, and whatever __post_init__ or check a class in between has."""
    for name, allowed in ranges_of(config_class).items():
        for value in outside(allowed):
            with pytest.raises(ConfigError, match=f"{flag(name)} "):
                make(config_class, **{name: value})


def test_every_commands_settings_are_tested(every_config_class):
    assert {command.settings() for command in COMMANDS.values()} == every_config_class


def test_every_number_has_a_range(config_class):
    """A number without one would take NaN. Weights, and k of pass@k, are lists with checks of their own."""
    hints = typing.get_type_hints(config_class)
    numbers = {name for name, hint in hints.items() if {int, float} & {hint, *typing.get_args(hint)}}
    assert numbers - {"reward_weights", "k"} == set(ranges_of(config_class))


def test_every_class_of_settings_passes_checks_on(config_class, make):
    """A check that does not call super() would leave out those of other groups: all are reached, each once."""
    called = []

    def noted(group, check):
        def run(config):
            called.append(group)
            check(config)

        return run

    groups = [group for group in config_class.__mro__ if "check" in vars(group)]
    with pytest.MonkeyPatch.context() as patch:
        for group in groups:
            patch.setattr(group, "check", noted(group, vars(group)["check"]))
        make(config_class)
    assert called == groups


@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        (Range(above=0), "be greater than 0"),
        (Range(at_least=0), "be at least 0"),
        (Range(at_least=0, at_most=1), "lie between 0 and 1"),
        (Range(at_least=0, below=1), "be at least 0 and below 1"),
        (Range(above=0, at_most=1), "be greater than 0 and at most 1"),
        (Range(below=3), "be below 3"),
        (Range(), "be a finite number"),
        (Range(at_least=0, below=2**63), r"be at least 0 and below 2^63"),
    ],
)
def test_a_range_in_words(allowed, words):
    assert allowed.words == words
