"""Every setting out of range is refused when the configuration is made, and the message names the flag."""

import dataclasses
import math
import re
import typing

import pytest

from heedful import (
    A2CConfig,
    AccuracyConfig,
    ChatConfig,
    ConfigError,
    DemoConfig,
    DPOConfig,
    GRPOConfig,
    KLConfig,
    KTOConfig,
    MergeConfig,
    PassAtKConfig,
    PPOConfig,
    RewardConfig,
    ServeRewardConfig,
    SFTConfig,
)
from heedful.configs.report import ReportConfig
from heedful.configs.settings import Range, marks_of, types_of
from heedful.configs.tools import TinyConfig

NAN, INFINITE = math.nan, math.inf
RANGES = {
    "be a finite number": "correct_from",
    "be greater than 0": (
        "adam_eps answers approx_kl_limit batch_size beta buffer clip_range clip_range_high count desirable_weight "
        "distributed_timeout_minutes edits epochs eval_prompts gpu_gb hidden_size importance_high initializer_range "
        "judge_max_tokens kl_horizon kl_target labels learning_rate lease_minutes lora_alpha max_approx_kl max_connections "
        "max_held_mb max_kl max_length max_model_len max_new_tokens max_prompt_tokens max_prompts max_queue max_request_mb "
        "max_samples max_steps micro_batch_size micro_batch_tokens minibatch_size n num_layers num_samples overlong_penalty "
        "ppo_epochs processes prompt_tokens prompts ranks receive_timeout replicas responses reward_concurrency "
        "reward_memory_gb reward_timeout rollout_batch_size rollout_micro_batch_size rollout_micro_batch_tokens rounds "
        "samples_per_prompt scale score_clip step steps target_entropy temperature tensor_parallel undesirable_weight "
        "value_clip_range value_epochs value_learning_rate gae_lambda_alpha eval_samples "
        "minutes tokens max_turns environment_timeout"
    ),
    "be at least 0": (
        "async_steps center_coef critic_warmup_steps dynamic_sampling_rounds early_stopping_patience entropy_coef eval_every "
        "examples importance_low judge_temperature kl_coef lora_rank max_grad_norm minibatch_size missing_eos_penalty "
        "nll_coef overlong_buffer positive_coef ptx_coef reward_retry_minutes row sample_every sampler_retry_minutes "
        "save_every save_minutes save_total_limit score_norm_samples screening_items target_margin temperature top_k "
        "until_done value_coef wait warmup_steps weight_decay"
    ),
    "lie between 0 and 1": (
        "agreement eval_fraction gae_lambda gamma label_smoothing max_dropped overlap screening_agreement value_lambda"
    ),
    "be at least 0 and below 1": "adam_beta2 ema_decay eval_fraction lora_dropout max_failed_rewards",
    "be greater than 0 and below 1": "eval_fraction",
    "be greater than 0 and at most 1": "enough eval_fraction gpu_memory top_p",
    "be greater than 1": "dual_clip",
    "be at least 1": "limit max_samples round seconds",
    "be at least 2": "n overlap_people pairs samples_per_prompt",
    "be at least 264": "vocab_size",
    "be at least 0 and below 2^63": "seed",
    "be at least 0 and below 65536": "port",
    "be at least 0 and at most 65535": "port",
    "be at least 1 and at most 65535": "label_port port",
    "be at least 0 and at most 0.5": "gold repeats",
    "be at least 0.2 and at most 1": "random_share",
    "be at least 1 and at most 16": "reward_models",
    "be at least 1 and at most 99": "lesson",
    "be at least 1 and at most 1000": "labellers pool",
    "be at least 2 and at most 9": "answers",
    "be at least 2 and at most 64": "answers",
    "be at least 2 and at most 100": "seeds",
    "be at least 10 and at most 5000": "label_pairs",
}
"""Of every setting that is a number, in the words of its message; some have another in another command."""


def flag(name):
    return "--" + name.replace("_", "-")


def outside(allowed):
    """Values that a range does not hold: those at and beyond its bounds, and numbers that are not finite."""
    beyond = [
        allowed.above,
        allowed.above - 1,
        allowed.at_least - 1,
        allowed.below,
        allowed.below + 1,
        allowed.at_most + 1,
    ]
    return [NAN, INFINITE, -INFINITE, *filter(math.isfinite, beyond)]


def ranges_of(config_class):
    return {
        name: extra
        for name, hint in types_of(config_class).items()
        for extra in marks_of(hint)
        if isinstance(extra, Range)
    }


def test_every_number_has_its_range(least):
    """A number without one would take NaN. Weights, and k of pass@k, are lists with checks of their own."""
    found = {(allowed.words, name) for kind in least for name, allowed in ranges_of(kind).items()}
    assert found == {(words, name) for words, names in RANGES.items() for name in names.split()}
    for kind in least:
        hints = typing.get_type_hints(kind)
        numbers = {name for name, hint in hints.items() if {int, float} & {hint, *typing.get_args(hint)}}
        assert numbers - {"reward_weights", "k"} == set(ranges_of(kind)), kind


def test_a_value_outside_the_range_on_its_field_is_refused(least, each_field, refusal):
    """With the flag and the value, whatever class the field comes from, and whatever __post_init__ is in between."""
    cases = [
        (kind, name, x) for kind, name in each_field if name in ranges_of(kind) for x in outside(ranges_of(kind)[name])
    ]
    cases += [(kind, name, NAN) for kind in least for name in ranges_of(kind)]
    said = [(*case, refusal(case[0], **{case[1]: case[2]}) or "") for case in cases]
    assert not [one for one in said if f"{flag(one[1])} " not in one[3] or str(one[2]) not in one[3]]


CONTRADICTIONS = [
    *((PPOConfig, {"reward_weights": (1.0, x)}, f"--reward-weights .*{x}") for x in (NAN, INFINITE, -INFINITE)),
    *((SFTConfig, {"lora_targets": x}, "--lora-targets") for x in ("q_proj,,v_proj", "")),
    (KTOConfig, {"batch_size": 1}, "--batch-size .*1"),
    *((PPOConfig, {"critic_warmup_steps": x}, f"--critic-warmup-steps .*{x}") for x in (-1, 100)),
    (PPOConfig, {"temperature": 0}, "--temperature must be greater than 0"),
    *((kind, {"eval_fraction": 0}, "--eval-fraction must be greater than 0") for kind in (KLConfig, AccuracyConfig)),
    (SFTConfig, {"seed": 2**64}, f"--seed must be below .*{2**64}"),
    (PPOConfig, {"minibatch_size": 128}, "--minibatch-size is 128, larger than --rollout-batch-size 64; lower it"),
    (PPOConfig, {"minibatch_size": 48}, "--rollout-batch-size 64 is not a multiple of --minibatch-size 48; try .*48"),
    (PPOConfig, {"samples_per_prompt": 65}, "--samples-per-prompt is 65, larger than --rollout-batch-size 64"),
    (PPOConfig, {"samples_per_prompt": 3}, "--rollout-batch-size 64 is not a multiple of --samples-per-prompt 3; try"),
    (PPOConfig, {"score_norm_samples": 1}, "--score-norm-samples must be 0 or at least 2"),
    (PPOConfig, {"kl_target": 6.0, "kl_coef": 0.0}, "--kl-target .*--kl-coef .* above 0"),
    (PPOConfig, {"kl_horizon": 500}, "--kl-horizon 500 belongs to --kl-target"),
    (PPOConfig, {"kl_target": 6.0, "kl_horizon": 12}, "--kl-horizon 12 is too short .*-size 64: .* at least 13"),
    (PPOConfig, {"importance_level": "sequence", "rollout_batch_size": 1, "minibatch_size": 1},
     "--rollout-batch-size is 1, but with --importance-level sequence .* at least 2"),
    (PPOConfig, {"value_model": "m"}, "--value-model .* add --critic separate"),
    (PPOConfig, {"critic": "reward", "quantize": "4bit", "lora_rank": 8},
     "--quantize 4bit does not reach .*--critic shared"),
    (PPOConfig, {"value_freeze": ("注意力", "mlp")}, "^--value-freeze 注意力 mlp names parts .* --critic shared .* separate"),
    (PPOConfig, {"value_model": "m", "critic": "reward"}, "--value-model .* add --critic separate"),
    (PPOConfig, {"importance_level": "sequence", "gamma": 0.9}, "--gamma 0.9 spreads .* --importance-level sequence"),
    (PPOConfig, {"importance_level": "sequence", "gae_lambda": 1.0}, "--gae-lambda 1.0 spreads"),
    (PPOConfig, {"action": "response", "gamma": 0.9}, "--gamma 0.9 spreads .* with --action response the response"),
    (PPOConfig, {"action": "response", "rollout_batch_size": 1, "minibatch_size": 1},
     "--rollout-batch-size is 1, but with --action response .* at least 2"),
    *((PPOConfig, {"action": action, "importance_level": "sequence"},
       f"--importance-level sequence has one ratio per response, but with --action {action} it has several advantages")
      for action in ("token", "turn")),
    (PPOConfig, {"action": "turn", "gae_lambda_alpha": 0.5}, "--gae-lambda-alpha 0.5 makes lambda .* --action token"),
    (GRPOConfig, {"action": "turn"}, "--action turn is about a critic's values, .* --advantage grpo "),
    (PPOConfig, {"policy_loss": "a2c"}, "--ppo-epochs 1 and --minibatch-size 64, got --ppo-epochs 4 and"),
    (A2CConfig, {"ppo_epochs": 2}, "--policy-loss a2c .* got --ppo-epochs 2 and --minibatch-size 64"),
    (A2CConfig, {"minibatch_size": 32}, "--policy-loss a2c .* --minibatch-size 64, got .* --minibatch-size 32"),
    (A2CConfig, {"clip_range": 0.1}, "--clip-range 0.1 is about the probability ratio, .* --policy-loss a2c"),
    (A2CConfig, {"clip_range_high": 0.3}, "--clip-range-high 0.3 is about .* --policy-loss a2c"),
    (A2CConfig, {"dual_clip": 3.0}, "--dual-clip 3.0 is about .* --policy-loss a2c"),
    (A2CConfig, {"approx_kl_limit": 0.1}, "--approx-kl-limit 0.1 is about .* --policy-loss a2c"),
    (PPOConfig, {"kl_in": "loss"}, "--kl-in loss does not go with --kl-kind k1.* k2, .* k3 or --kl-kind weighted-k3"),
    (PPOConfig, {"kl_kind": "weighted-k3"}, "--kl-in reward does not go with --kl-kind weighted-k3.* add --kl-kind k1"),
    (PPOConfig, {"ptx_data": "d"}, "--ptx-data has no effect with --ptx-coef 0"),
    (PPOConfig, {"ptx_coef": 0.5}, "--ptx-coef 0.5 .* add --ptx-data"),
    *((PPOConfig, {"value_coef": 0.5, "critic": critic}, f"--value-coef 0.5 is about a value head .* --critic {critic} ")
      for critic in ("separate", "reward")),
    *((GRPOConfig, {name: value}, f"{flag(name)} {value} is about rewards per token, .* --advantage grpo ")
      for name, value in (("gamma", 0.9), ("whiten_rewards", True))),
    (GRPOConfig, {"gae_lambda": 0.5}, "--gae-lambda 0.5 is about a critic's values, .* --advantage grpo "),
    *((GRPOConfig, {name: value}, f"{flag(name)} {value} belongs to a critic, and --advantage grpo has")
      for name, value in (("critic", "separate"), ("value_coef", 0.5), ("value_clip_range", 0.5),
                          ("value_learning_rate", 1e-3), ("critic_warmup_steps", 1))),
    (PPOConfig, {"advantage": "reinforce++", "importance_level": "sequence"},
     r"--importance-level sequence has one ratio per response, but --advantage reinforce\+\+ gives each"),
    (PPOConfig, {"importance_level": "sequence", "max_approx_kl": 1.0}, "--max-approx-kl 1.0 is about ratios per token"),
    (A2CConfig, {"importance_level": "sequence-mean"}, "--importance-level sequence-mean is about the probability ratio"),
    (PPOConfig, {"advantage": "gaee"}, "--advantage must be one of gae, grpo, .*got 'gaee'. Perhaps you meant gae"),
    (PPOConfig, {"policy_loss": "clp"},
     "--policy-loss must be one of clip, a2c, cispo, sao, python:FILE.py:FUNCTION or .*Perhaps you meant clip"),
    (PPOConfig, {"advantage": "python:mine"}, "--advantage: python:mine does not name a function"),
    (PPOConfig, {"sampler": ("python:a.py:E", "vllm:http://a:1")}, "--sampler names python:a.py:E and others"),
    (PPOConfig, {"sampler": ("python:a.py:E",), "sampler_sleep": True}, "--sampler-sleep True is about servers"),
    (PPOConfig, {"importance_level": "sequence", "loss_reduction": "sequence"},
     "--loss-reduction sequence averages tokens, but --importance-level sequence has one ratio per response"),
    (PPOConfig, {"advantage": "grpo", "kl_coef": 0.0}, "--samples-per-prompt is 1, .* at least 2, or add"),
    (GRPOConfig, {"samples_per_prompt": 1}, "--samples-per-prompt is 1, .* add --advantage reinforce"),
    (GRPOConfig, {"advantage": "reinforce", "samples_per_prompt": 1, "rollout_batch_size": 1, "minibatch_size": 1},
     "--rollout-batch-size is 1, but --advantage reinforce .* at least 2"),
    (KLConfig, {"temperature": 0}, "--temperature must be greater than 0"),
    *((PassAtKConfig, {"k": k, "samples_per_prompt": 8}, f"--k must be .* 1 to --samples-per-prompt 8, got {said}:")
      for k, said in (((9,), "9"), ((1, 16), "1 16"), ((0,), "0"), ((), "none"))),
    (PassAtKConfig, {"k": (2, 2)}, "--k names a number twice, got 2 2"),
    (PassAtKConfig, {"temperature": 0}, "--samples-per-prompt 16 needs a --temperature above 0"),
    (SFTConfig, {"early_stopping_patience": 2, "eval_every": 0}, "--early-stopping-patience .*--eval-every"),
    (RewardConfig, {"early_stopping_patience": 1, "eval_every": 0}, "--early-stopping-patience .*--eval-every"),
    (SFTConfig, {"eval_fraction": 1.0}, "--eval-fraction must be below 1, got 1.0; nothing is left"),
    (ReportConfig, {"runs": ()}, "no run is named: heedful report RUN ..., such as heedful report runs/sft runs/ppo"),
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
    *((trainer, {"lora_rank": 4, "reference_device": "cpu"}, "--reference-device cpu .*--reference")
      for trainer in (PPOConfig, DPOConfig)),
    (PPOConfig, {"output": "."}, "--output must name a folder"),
    (ServeRewardConfig, {"max_held_mb": 63}, "--max-held-mb 63 is less than --max-request-mb 64, so the largest"),
    (ServeRewardConfig, {"max_queue": 505}, "--max-connections 512 must be at least 513: those of --max-queue 505"),
    *((ServeRewardConfig, {"allowed_hosts": ("ok", name)}, "--allowed-hosts .* must be only a host name")
      for name in ("", "http://a", "a:80", "a b", "盒")),
    *((ServeRewardConfig, {"token_env": name}, "--token-env .* name of an environment") for name in ("", "A=b")),
]  # fmt: skip


def test_settings_that_contradict_each_other(refusal):
    said = [(kind, together, message, refusal(kind, **together)) for kind, together, message in CONTRADICTIONS]
    assert not [one for one in said if not re.search(one[2], one[3] or "")]


EDGES = [
    (SFTConfig, {"eval_fraction": 0.0, "max_dropped": 1.0, "early_stopping_patience": 1, "epochs": 0.01}),
    (SFTConfig, {"lora_rank": 1, "lora_alpha": 0.5, "lora_dropout": 0.9, "lora_targets": "q_proj, v_proj"}),
    (KTOConfig, {"batch_size": 2, "desirable_weight": 1e-9}),
    (DPOConfig, {"loss": "simpo", "target_margin": 0.0, "nll_coef": 0.0}),
    (DPOConfig, {"reference_device": "cpu"}),
    (PPOConfig, {"kl_coef": 0.0, "value_clip_range": None, "score_norm_samples": 2, "reward_weights": (0.0, -1.0)}),
    (PPOConfig, {"minibatch_size": 64, "samples_per_prompt": 64, "critic_warmup_steps": 99}),
    (PPOConfig, {"critic": "separate", "value_model": "m", "kl_target": 6.0, "kl_horizon": 13}),
    (PPOConfig, {"importance_level": "sequence", "rollout_batch_size": 2, "minibatch_size": 2}),
    (PPOConfig, {"action": "response", "importance_level": "sequence"}),
    (PPOConfig, {"action": "turn", "gamma": 0.9, "gae_lambda": 0.5, "value_lambda": 1.0}),
    (PPOConfig, {"critic": "separate", "value_coef": 0.0, "critic_warmup_steps": 5}),
    (PPOConfig, {"critic": "separate", "value_freeze": ("self_attn",), "value_epochs": 2, "value_clip_range": None}),
    (PPOConfig, {"gae_lambda_alpha": 1e-9, "value_lambda": 0.9, "value_clip_range": 0.1}),
    (PPOConfig, {"gae_lambda": 1.0, "value_lambda": 0.0, "value_epochs": 1, "value_clip_range": 0.1}),
    (PPOConfig, {"policy_loss": "sao", "clip_range": 0.999, "clip_range_high": 5.0, "ppo_epochs": 2}),
    (PPOConfig, {"positive_coef": 1e-9, "correct_from": -1.0}),
    (PPOConfig, {"critic_warmup_steps": 5, "value_coef": 0.0}),
    (PPOConfig, {"ptx_data": "d", "ptx_coef": 27.8, "kl_in": "loss", "kl_kind": "k2", "kl_coef": 0.0}),
    (PPOConfig, {"policy_loss": "a2c", "ppo_epochs": 1, "importance_level": "sequence", "clip_range": 0.2}),
    (PPOConfig, {"lora_rank": 4, "reference": "m", "reference_device": "cpu", "quantize": "4bit"}),
    (A2CConfig, {"policy_loss": "clip", "ppo_epochs": 4, "minibatch_size": 32, "clip_range": 0.1}),
    (GRPOConfig, {"advantage": "reinforce", "samples_per_prompt": 1}),
    (ChatConfig, {"temperature": 0.0}),
    (KLConfig, {"eval_fraction": 1.0, "max_prompts": 1}),
    (TinyConfig, {"hidden_size": 8, "num_layers": 1}),
    (PassAtKConfig, {"k": (1, 4, 16), "correct_from": -1.0}),
    (PassAtKConfig, {"k": (1,), "samples_per_prompt": 1, "temperature": 0.0, "rewards": ()}),
]  # fmt: skip


def test_the_ends_of_the_ranges_are_inside(each_field, refusal, make):
    """Where another check refuses one, it says something else."""
    for config_class, name in each_field:
        allowed = ranges_of(config_class).get(name, Range())
        for value in filter(math.isfinite, (allowed.at_least, allowed.at_most)):
            said = refusal(config_class, **{name: value}) or ""
            assert f"{flag(name)} must {allowed.words}" not in said, (config_class, name, value)
    for config_class, edge in EDGES:
        config = make(config_class, **edge)
        assert {name: getattr(config, name) for name in edge} == edge, config_class


def test_the_remedy_for_a_size_that_does_not_divide_is_accepted(make):
    """The number that the message proposes must itself be valid."""
    with pytest.raises(ConfigError) as error:
        make(PPOConfig, rollout_batch_size=70, minibatch_size=16)
    proposed = int(str(error.value).rsplit(" ", 1)[1])
    assert make(PPOConfig, rollout_batch_size=proposed, minibatch_size=16).rollout_batch_size == proposed == 64


def test_a2c_learns_from_the_whole_rollout_batch_at_once(make):
    assert make(A2CConfig).minibatch_size == 64
    assert make(A2CConfig, rollout_batch_size=24).minibatch_size == 24


def test_configurations_are_frozen_and_their_defaults_valid(least, make):
    for config_class in least:
        fields = dataclasses.fields(make(config_class))
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(make(config_class), fields[0].name, None)
        assert all(field.kw_only for field in fields), config_class


def test_every_class_of_settings_passes_checks_on(least, make, monkeypatch):
    """A check that does not call super() would leave out those of other groups: all are reached, each once."""
    called = []

    def noted(group, check):
        def run(config):
            called.append(group)
            check(config)

        return run

    for group in {group for kind in least for group in kind.__mro__ if "check" in vars(group)}:
        monkeypatch.setattr(group, "check", noted(group, vars(group)["check"]))
    for config_class in least:
        called.clear()
        make(config_class)
        assert called == [group for group in config_class.__mro__ if "check" in vars(group)]
