"""Settings of training on given texts: SFT, reward models, DPO and its relatives, KTO."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from heedful import user_code
from heedful.configs.options import DefaultRate, ReferenceOptions, TrainingOptions
from heedful.configs.settings import BELOW_ONE, FRACTION, NOT_NEGATIVE, POSITIVE, REQUIRED, OwnCode, refuse
from heedful.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EpochOptions(TrainingOptions):
    """Passes over given texts, batch size and length limit."""

    SECTION = "algorithm"

    batch_size: Annotated[int, POSITIVE] = 32
    """Texts per optimizer step."""
    epochs: Annotated[float, POSITIVE] = 1
    """Passes over the data."""
    max_steps: Annotated[int | None, POSITIVE] = None
    """Optimizer steps; overrides epochs."""
    max_length: Annotated[int | None, POSITIVE] = None
    """Longest prompt with response in tokens; None is the model's context."""

    @property
    def step_rows(self) -> int:
        return self.batch_size * (2 if self.learns_pairs else 1)

    @property
    def other_files(self) -> list[str]:
        """What a run reads besides its records and models."""
        return []

    @property
    def summed_strength(self) -> float | None:
        """``strength`` of a loss of log-ratios that are summed over a response; None for others."""
        return None


@dataclass(frozen=True, kw_only=True)
class SFTConfig(EpochOptions):
    """Supervised fine-tuning: learn to imitate demonstrations (or plain text)."""

    algorithm = "sft"
    has_dropout = True
    rate_is_of = "imitation"

    model: Annotated[str, REQUIRED] = ""
    """Language model to start from: a folder in Hugging Face format, a Hub name, or modelscope:ORG/NAME."""
    batch_size: Annotated[int, POSITIVE] = 16
    """Demonstrations per optimizer step."""
    epochs: Annotated[float, POSITIVE] = 3
    """Passes over the data."""
    loss_on: Literal["response", "all"] = "response"
    """Tokens to learn: response, or all, the prompt too (each conversation once, without its first token). Plain text
    is always learned whole."""

    lora_dropout: Annotated[float, BELOW_ONE] = 0.0
    """Dropout of the adapters' inputs. The other trainers have no dropout."""

    @property
    def learns_prompts(self) -> bool:
        return self.loss_on == "all"

    def check(self) -> None:
        super().check()
        self.check_belongs_to_lora("lora_dropout")


@dataclass(frozen=True, kw_only=True)
class RewardConfig(EpochOptions):
    """Reward model: learn from pairs or longer rankings which responses people prefer."""

    algorithm = "reward"
    learns_pairs = True
    learns_scores = True
    rate_is_of = "imitation"

    model: Annotated[str, REQUIRED] = ""
    """Model to start from: the SFT model, any language model, or an encoder."""
    batch_size: Annotated[int, POSITIVE] = 32
    """Pairs, or rankings, per optimizer step."""
    epochs: Annotated[float, POSITIVE] = 1
    """Passes over the data. Reward models overfit after one."""
    equal_pairs: Literal["error", "drop"] = "error"
    """What to do with pairs whose chosen and rejected responses are equal (also after truncation), and with rankings that
    prefer a response to an equal one."""
    center_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Pull of the scores towards mean 0: coefficient of (chosen + rejected)^2. 0.01 is usual."""
    label_smoothing: Annotated[float, FRACTION] = 0.0
    """Share of labels assumed to be wrong. Raising it makes the model less sure."""
    offset_data: str | None = None
    """Demonstrations (columns of sft) that should score 0 on average: their mean score is saved as the model's
    offset."""

    @property
    def other_files(self) -> list[str]:
        return [] if self.offset_data is None else [self.offset_data]


REFERENCE_FREE = ("simpo", "orpo")
"""Losses without a reference."""
SMOOTHED = ("sigmoid", "robust")
"""Losses with label smoothing."""


@dataclass(frozen=True, kw_only=True)
class DPOConfig(ReferenceOptions, EpochOptions):
    """DPO and its relatives: learn from pairs of responses directly, without a reward model and without sampling."""

    algorithm = "dpo"
    learns_pairs = True
    reads_reference_once = True

    model: Annotated[str, REQUIRED] = ""
    """Policy to start from, usually the SFT model: a folder in Hugging Face format, a Hub name, or modelscope:ORG/NAME."""
    loss: Literal["sigmoid", "robust", "ipo", "ipo-sum", "hinge", "simpo", "orpo"] | OwnCode | Callable[..., Any] = (
        "sigmoid"
    )
    """Which loss. sigmoid: DPO. robust: DPO for a known share of wrong labels (label-smoothing). ipo: a squared distance to
    a margin of 1 / (2 beta) nats per token, which does not push certain pairs for ever; ipo-sum: per response, as in the
    paper. hinge: SLiC. simpo and orpo need no reference: the mean log-prob per token with a target margin; the odds ratio
    beside SFT on the chosen responses, which can start from a base model. python:FILE.py:FUNCTION: a function of yours
    (docs/extend.md)."""
    beta: Annotated[float | None, POSITIVE] = None
    """KL penalty coefficient: raising it keeps the policy closer to the reference. simpo: factor of the margin per
    token. orpo: weight of the odds ratio beside SFT. None is 0.1, with simpo 2, with length-normalise 5."""
    label_smoothing: Annotated[float, FRACTION] = 0.0
    """Share of labels assumed to be wrong; only with the losses sigmoid (conservative DPO) and robust (below 0.5)."""
    length_normalise: bool = False
    """Divide each response's log-ratio by its tokens, so that length earns nothing. ipo, simpo and orpo always do."""
    target_margin: Annotated[float, NOT_NEGATIVE] = 0.5
    """simpo: target difference of the log-probs per token, in nats (the paper's gamma / beta)."""
    nll_coef: Annotated[float | None, NOT_NEGATIVE] = None
    """Weight of the SFT loss of the chosen responses, which keeps them from becoming less likely; 0.2 to 1 is usual.
    None is 1 with orpo, else 0."""
    batch_size: Annotated[int, POSITIVE] = 32
    """Pairs per optimizer step."""
    equal_pairs: Literal["error", "drop"] = "error"
    """What to do with pairs whose chosen and rejected responses are equal (also after truncation)."""
    learning_rate: Annotated[float, POSITIVE] = DefaultRate(1e-6)
    """Peak learning rate. With lora-rank the default is ten times as large."""

    @property
    def loads_reference(self) -> bool:
        return self.loss not in REFERENCE_FREE

    @property
    def other_files(self) -> list[str]:
        return [user_code.file_of(self.loss)] if isinstance(self.loss, str) and user_code.is_named(self.loss) else []

    @property
    def is_per_token(self) -> bool:
        """Whether log-ratios to the reference are divided by the tokens of their responses."""
        return self.length_normalise or self.loss == "ipo"

    @property
    def summed_strength(self) -> float | None:
        is_own = user_code.is_named(self.loss)
        return None if is_own or self.is_per_token or not self.loads_reference else self.strength

    @property
    def strength(self) -> float:
        """``beta``, or its default for the loss."""
        if self.beta is not None:
            return self.beta
        if self.loss == "simpo":
            return 2.0
        return 5.0 if self.length_normalise else 0.1

    @property
    def nll_weight(self) -> float:
        """``nll_coef``, or its default for the loss."""
        if self.nll_coef is not None:
            return self.nll_coef
        return 1.0 if self.loss == "orpo" else 0.0

    def check(self) -> None:
        super().check()
        user_code.check_form("--loss", self.loss)
        loss = user_code.name_of(self.loss)
        if self.label_smoothing and self.loss not in SMOOTHED:
            raise ConfigError(
                f"--label-smoothing belongs to --loss sigmoid or robust, got --loss {loss}; leave out one of the two"
            )
        if self.loss == "robust" and not 0 < self.label_smoothing < 0.5:
            raise ConfigError(
                f"--loss robust needs the share of wrong labels: --label-smoothing above 0 and below 0.5, got "
                f"{self.label_smoothing}; without any, --loss sigmoid is the same"
            )
        if not self.loads_reference:
            refuse(
                self,
                *("reference", "reference_device"),
                because=f"has no effect with --loss {loss}, which has no reference; leave it out",
            )
            refuse(
                self,
                "length_normalise",
                because=f"has no effect with --loss {loss}, which always divides by the length; leave it out",
            )
        if self.loss == "ipo-sum":
            refuse(
                self, "length_normalise", because="divides by the length, and --loss ipo-sum does not; use --loss ipo"
            )
        if self.loss != "simpo":
            refuse(
                self,
                "target_margin",
                because=f"belongs to --loss simpo, got --loss {loss}; leave out one of the two",
            )


@dataclass(frozen=True, kw_only=True)
class KTOConfig(ReferenceOptions, EpochOptions):
    """KTO: learn from single responses that people called good or bad, without pairs, reward model and sampling."""

    algorithm = "kto"
    reads_reference_once = True

    model: Annotated[str, REQUIRED] = ""
    """Policy to start from, usually the SFT model: a folder in Hugging Face format, a Hub name, or modelscope:ORG/NAME."""
    beta: Annotated[float, POSITIVE] = 0.1
    """KL penalty coefficient. Raising it keeps the policy closer to the reference."""
    desirable_weight: Annotated[float, POSITIVE] = 1.0
    """Weight of the loss of good responses. If they are few, raise it until weight times number is 1 to 1.5 times that
    of the bad ones."""
    undesirable_weight: Annotated[float, POSITIVE] = 1.0
    """Weight of the loss of bad responses. Raise it if they are few."""
    batch_size: Annotated[int, POSITIVE] = 32
    """Responses per optimizer step, at least 2. The KL to the reference is estimated from them: small batches make it
    noisy."""
    learning_rate: Annotated[float, POSITIVE] = DefaultRate(1e-6)
    """Peak learning rate. With lora-rank the default is ten times as large."""

    @property
    def loads_reference(self) -> bool:
        return True

    @property
    def strength(self) -> float:
        return self.beta

    def check(self) -> None:
        super().check()
        if self.batch_size < 2:
            raise ConfigError(
                f"--batch-size is {self.batch_size}, but KTO estimates the KL to the reference by the mean of a step's "
                "log-ratios; make it at least 2 (32 is usual). --micro-batch-size 1 saves the memory"
            )
