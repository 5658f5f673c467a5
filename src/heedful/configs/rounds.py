"""Settings of ``heedful round`` and of simulated labellers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from heedful.configs.options import MachineOptions, SamplingOptions, TrustOptions
from heedful.configs.scoring import RewardOptions
from heedful.configs.settings import FRACTION, POSITIVE, SEED, Range
from heedful.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RoundConfig(SamplingOptions, TrustOptions, MachineOptions):
    """Take a labelling project through a round: sample, label, reward, ppo, evaluate. It resumes where it stopped, and waits
    for people at the second step. After the last step, the next call begins the next round."""

    project: Path
    """The project's folder (heedful label new)."""
    policy: str = ""
    """The policy of the first round, such as runs/sft/final. Reward models start from it in every round. Empty takes the
    settings with which the project's last round began, but for those that are given now."""
    prompts: str = ""
    """Prompts: a file (docs/data.md), or a data set on the Hub or ModelScope. Needed with policy."""
    labels: Annotated[int, POSITIVE] = 300
    """Pairs to ask about per round."""
    answers: Annotated[int, Range(at_least=2, at_most=64)] = 4
    """Answers sampled per prompt, of which one pair is asked about. More give more that differ, and more to choose from."""
    pool: Annotated[float, Range(at_least=1, at_most=1000)] = 1.0
    """Prompts sampled per pair that is asked about. Above 1 there is more to choose from; reward models then choose, if
    random-share is below 1."""
    random_share: Annotated[float, Range(at_least=0.2, at_most=1)] = 1.0
    """Share of pairs drawn at random. The others are those about which the last round's reward models disagree most: needs
    reward-models of 2 or more. The first round has none, so all of its pairs are random."""
    ask_held_out: bool = True
    """Ask about held-out prompts too, so that reward models are measured on labels that they were not trained on. Off, every
    label is trained on."""
    enough: Annotated[float, Range(above=0, at_most=1)] = 1.0
    """Share of the round's pairs that must be labelled before it goes on. Lower it if some were skipped."""
    reward_models: Annotated[int, Range(at_least=1, at_most=16)] = 1
    """Reward models trained per round, with different seeds. PPO takes the mean of their scores."""
    reward_config: Path | None = None
    """YAML file with settings of heedful reward. Model, data, output, seed and device are the round's."""
    ppo_config: Path | None = None
    """YAML file with settings of heedful ppo; max-new-tokens too is the round's."""
    margin: Literal["none", "small", "large"] = "none"
    """Margin of a preference in the reward model's loss, by its strength (heedful label export)."""
    policy_from: Literal["first", "previous"] = "first"
    """Policy that PPO starts from: the first one, or the previous round's. The reference of the KL penalty is the first
    policy either way."""
    eval_fraction: Annotated[float, Range(above=0, below=1)] = 0.1
    """Share of prompts that are held out by every step, chosen by a hash of the prompt."""
    judge: tuple[str, ...] = ()
    """Another reward that compares the policies at the end, in the forms of --rewards; nothing is trained on it."""
    micro_batch_size: Annotated[int, POSITIVE] = 32
    """Rows in memory at a time, in sampling and measuring."""

    POSITIONAL = ("project",)

    def check(self) -> None:
        super().check()
        if bool(self.policy) != bool(self.prompts):
            given, missing = ("--policy", "--prompts") if self.policy else ("--prompts", "--policy")
            raise ConfigError(f"{given} is given, but not {missing}; give both, or neither to keep the last settings")
        if self.random_share < 1 and self.reward_models < 2:
            raise ConfigError(
                f"--random-share {self.random_share:g} chooses pairs by the disagreement of reward models, but "
                f"--reward-models is {self.reward_models}; train at least 2, or leave --random-share out"
            )
        if self.temperature == 0:
            raise ConfigError(
                "--temperature must be greater than 0 here: greedy decoding gives the same answer every time"
            )


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(RewardOptions, MachineOptions):
    """Label a project's pairs and rankings in the place of people who go by a reward and err, to try a project out or to see
    how many labels it needs."""

    project: Path
    """The project's folder."""
    labellers: Annotated[int, Range(at_least=1, at_most=1000)] = 3
    """How many people are simulated. They are added to the project as simulated-1, simulated-2, ..."""
    agreement: Annotated[float, FRACTION] = 0.73
    """How often a labeller prefers the answer that the reward prefers. People: 0.63 to 0.77."""
    scale: Annotated[float | None, POSITIVE] = None
    """Difference of scores at which a labeller prefers the better answer with probability 0.73 (the Bradley-Terry law), in
    place of agreement: clear cases are then easier. Rankings need it."""
    labels: Annotated[int | None, POSITIVE] = None
    """Stop after N labels. None labels everything."""
    seed: Annotated[int, SEED] = 0
    """Seed of the errors."""

    POSITIONAL = ("project",)

    def check(self) -> None:
        super().check()
        if not self.rewards:
            raise ConfigError(
                "--rewards is missing: name a reward for the simulated labellers, such as model:runs/reward/final"
            )
