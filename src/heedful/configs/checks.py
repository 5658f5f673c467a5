"""What is checked before training, by name, and the setting that lets a run begin although a check fails."""

from dataclasses import dataclass
from typing import Literal

from heedful.configs.settings import Settings
from heedful.errors import ConfigError

Levels = Literal["fail", "warn", "fail or warn"]


@dataclass(frozen=True)
class Check:
    """One check. docs/doctor.md has a row for each."""

    levels: Levels
    """fail: it surely ruins the run. warn: it may."""
    looks_at: str
    why: str
    """Why it matters, in one sentence."""
    fix: str
    is_cheap: bool = True
    """Whether every training command makes it too, before it begins."""


CHECKS = {
    "no-end-token": Check(
        "fail or warn",
        "share of learned responses that end where sampling stops",
        "A policy that never learns to end writes to --max-new-tokens every time.",
        "raise --max-length, or take `truncated` out of the data",
    ),
    "stops-early": Check(
        "warn",
        "learned responses with a stop token inside",
        "Sampling ends at that token, so what follows it is learned and never written.",
        "take that token out of the model's generation_config.json",
    ),
    "double-bos": Check(
        "warn",
        "texts that begin with two BOS tokens",
        "Pretrained models have never read two of them, and their first predictions get worse.",
        "take bos_token out of the chat template or the texts",
    ),
    "generation-mask": Check(
        "warn",
        "learned tokens against the template's generation markers",
        "The template's author marked other tokens as the answer than the ones that are learned.",
        "put the markers around the answer",
    ),
    "equal-pairs": Check(
        "warn",
        "share of pairs dropped as equal",
        "Such pairs say nothing, and many of them point at a fault of the data or at a --max-length that cuts differences.",
        "raise --max-length, or correct these records",
    ),
    "share-cut": Check(
        "warn",
        "share of records cut or dropped as too long",
        "Long records are another kind of text, so what is learned is no longer what the data says.",
        "raise --max-length (--max-prompt-tokens)",
    ),
    "held-out-trained-on": Check(
        "warn",
        "held-out prompts that are trained on, whatever their case and white space",
        "Held-out numbers, and the choice of best/ by them, then reward learning by heart.",
        "leave --eval-data out: --eval-fraction splits by prompt",
    ),
    "raw-prompts": Check(
        "warn",
        "prompts that are strings, for a model that learned conversations",
        "A string does not go through the chat template, so the model continues it and does not answer it.",
        "--columns instruction=prompt renders them; --raw-prompts keeps raw text",
    ),
    "templates-differ": Check(
        "warn",
        "chat templates of policy and reward models of one vocabulary",
        "The reward model reads another rendering than the policy writes, which is right only if it was trained on it.",
        "give both the same --chat-template",
    ),
    "score-position": Check(
        "warn",
        "the token at which a reward model's score is read",
        "A score that is read before the end cannot tell a finished response from one that was cut.",
        "give its config.json another pad_token_id than the end token, and train it anew",
    ),
    "untrained-tokens": Check(
        "warn",
        "tokens of the data whose embeddings are zero or the mean of all",
        "A model reads nothing from such a token; adapters, and rows next to zero, leave it so for the whole run.",
        "set these rows, or give a --chat-template without the tokens",
    ),
    "learning-rate": Check(
        "warn",
        "learning rate against width and adapters",
        "Too high a rate ruins a model within tens of steps; adapters hardly move at the rate of all weights.",
        "leave --learning-rate out: its default is ten times as high with --lora-rank",
    ),
    "reward-constant": Check(
        "fail or warn",
        "whether all sampled responses score the same (fail: a reward model)",
        "Advantages are then 0, and nothing is learned.",
        "look at what the reward returns, or choose easier prompts",
        is_cheap=False,
    ),
    "reward-length": Check(
        "warn",
        "rank correlation of score and length",
        "The policy will learn a length, and little else.",
        "balance lengths in the reward model's data, or subtract a price per token",
        is_cheap=False,
    ),
    "reward-fails": Check(
        "fail or warn",
        "share of responses on which a reward raises or gives NaN",
        "Such responses are left out, and above --max-failed-rewards the run stops.",
        "correct the reward for the response that is shown",
        is_cheap=False,
    ),
    "reward-slow": Check(
        "warn",
        "a reward's seconds per step",
        "Most of the run is spent waiting for it.",
        "score in batches, raise --reward-concurrency, or take a smaller model",
        is_cheap=False,
    ),
    "reward-white-space": Check(
        "warn",
        "how far scores move if only white space around responses changes",
        "The policy finds such a change sooner than it finds a better answer.",
        "strip responses in the reward, or add such pairs to its data",
        is_cheap=False,
    ),
    "responses-cut": Check(
        "warn",
        "share of responses that reach --max-new-tokens",
        "A reward then judges beginnings, and learning to end is the first thing that PPO does.",
        "raise --max-new-tokens, run heedful sft first, or set --missing-eos-penalty",
        is_cheap=False,
    ),
    "ratio-not-one": Check(
        "fail",
        "the policy's probability ratio to itself",
        "Two passes over the same tokens disagree, so that clipping and KL measure noise.",
        "look for randomness in the model's code, or give --dtype float32",
        is_cheap=False,
    ),
    "kl-not-zero": Check(
        "fail or warn",
        "KL between policy and reference",
        "Policy and reference start as the same model; if they differ, the penalty pulls towards another one.",
        "name the model that the policy starts from as --reference, or leave it out",
        is_cheap=False,
    ),
    "sampler-mismatch": Check(
        "fail or warn",
        "log-probs of sampler and policy",
        "Responses come from another distribution than the one that learns.",
        "give the server the policy's model and --dtype, or set --importance token-truncate",
        is_cheap=False,
    ),
    "step-not-finite": Check(
        "fail",
        "loss and gradient of one step, taken and forgotten",
        "A step whose numbers are not finite changes nothing, and after a few of them the run ends.",
        "lower --learning-rate, give --dtype float32, or look at the records",
        is_cheap=False,
    ),
    "memory": Check(
        "warn",
        "the plan (heedful plan) against the memory",
        "A few long texts, or another program, are enough to end the run.",
        "lower --micro-batch-size, or see what heedful plan advises",
        is_cheap=False,
    ),
    "disk": Check(
        "fail",
        "free space where --output is",
        "The run would be refused at its first checkpoint.",
        "free some, or lower --save-total-limit",
        is_cheap=False,
    ),
}
REFUSED = "refused"
"""The name of what heedful refuses whatever is allowed, such as a prompt that is too long."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions(Settings):
    """What a run begins with in spite of its checks."""

    SECTION = "devices"

    allow: tuple[str, ...] = ()
    """Checks of heedful doctor that may fail without ending the command, such as no-end-token. Their failures are then
    warnings."""

    def check(self) -> None:
        super().check()
        unknown = [name for name in self.allow if name not in CHECKS]
        if unknown:
            raise ConfigError(f"--allow {unknown[0]} is not a check; there are {', '.join(CHECKS)}")
