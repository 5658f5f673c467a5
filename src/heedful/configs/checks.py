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
        "the share of learned responses that end with a token at which sampling stops",
        "A policy that never learns to end writes to --max-new-tokens every time.",
        "raise --max-length so that responses are whole, or take `truncated` out of the data",
    ),
    "stops-early": Check(
        "warn",
        "learned responses with a token inside at which sampling stops",
        "Sampling ends at that token, so what follows it is learned and never written.",
        "take that token out of eos_token_id in the model's generation_config.json, or out of the data",
    ),
    "double-bos": Check(
        "warn",
        "texts that begin with two beginning-of-sequence tokens",
        "Pretrained models have never read two of them, and their first predictions get worse.",
        "take bos_token out of the chat template, or out of raw texts that a template has rendered",
    ),
    "generation-mask": Check(
        "warn",
        "whether the learned tokens are those between the template's generation markers",
        "The template's author marked other tokens as the answer than the ones that are learned.",
        "move {% generation %} and {% endgeneration %} around the answer, or give another --chat-template",
    ),
    "equal-pairs": Check(
        "warn",
        "the share of pairs that were dropped because both responses have the same tokens",
        "Such pairs say nothing, and many of them point at a fault of the data or at a --max-length that cuts differences.",
        "raise --max-length, or look at the responses of these records",
    ),
    "share-cut": Check(
        "warn",
        "the share of records that were cut or dropped because they are too long",
        "Long records are another kind of text, so what is learned is no longer what the data says.",
        "raise --max-length (or --max-prompt-tokens), or take a model with a longer context",
    ),
    "held-out-trained-on": Check(
        "warn",
        "held-out prompts that are trained on too, but for case and white space",
        "Held-out numbers, and the choice of best/ by them, then reward learning by heart.",
        "leave --eval-data out (--eval-fraction splits by prompt), or take these prompts out of one of the files",
    ),
    "templates-differ": Check(
        "warn",
        "chat templates of the policy and of reward models that share its vocabulary",
        "The reward model reads another rendering than the policy writes, which is right only if it was trained on it.",
        "train the reward model from this policy's SFT model, or give both the same --chat-template",
    ),
    "score-position": Check(
        "warn",
        "the token at which a reward model's score is read",
        "A score that is read before the end cannot tell a finished response from one that was cut.",
        "give the reward model another pad_token_id in its config.json than its end token, and train it anew",
    ),
    "untrained-tokens": Check(
        "warn",
        "tokens of the data whose embeddings nobody has trained",
        "A model reads nothing from such a token; adapters, and rows next to zero, leave it so for the whole run.",
        "set these rows to the mean of the others, or give a --chat-template without these tokens",
    ),
    "learning-rate": Check(
        "warn",
        "the learning rate against the width of the model and against adapters",
        "Too high a rate ruins a model within tens of steps; adapters hardly move at the rate of all weights.",
        "leave --learning-rate out: its default is ten times as high with --lora-rank",
    ),
    "reward-constant": Check(
        "fail or warn",
        "whether all sampled responses have the same score",
        "Advantages are then 0, and nothing is learned.",
        "look at what the reward returns; a task may be too hard for this policy, or a reward model have no trained head",
        is_cheap=False,
    ),
    "reward-length": Check(
        "warn",
        "the rank correlation of score and length over the sampled responses",
        "The policy will learn a length, and little else.",
        "compare responses of similar length in the data of the reward model, or subtract a price per token",
        is_cheap=False,
    ),
    "reward-fails": Check(
        "fail or warn",
        "the share of sampled responses on which a reward fails: an exception, a timeout, NaN",
        "Such responses are left out, and above --max-failed-rewards the run stops.",
        "correct the reward for the response that is shown",
        is_cheap=False,
    ),
    "reward-slow": Check(
        "warn",
        "the seconds that a reward takes per step, against the rest of the step",
        "Most of the run is spent waiting for it.",
        "score in batches, use a server with more requests in flight (--reward-concurrency), or a smaller reward model",
        is_cheap=False,
    ),
    "reward-white-space": Check(
        "warn",
        "how far scores move when only white space around the responses changes",
        "The policy finds such a change sooner than it finds a better answer.",
        "strip responses in the reward, or add pairs to its data that differ only in white space",
        is_cheap=False,
    ),
    "responses-cut": Check(
        "warn",
        "the share of sampled responses that reach --max-new-tokens without an end",
        "A reward then judges beginnings, and learning to end is the first thing that PPO does.",
        "raise --max-new-tokens, start from a model that ends its answers (heedful sft), or set --missing-eos-penalty",
        is_cheap=False,
    ),
    "ratio-not-one": Check(
        "fail",
        "the probability ratio of the policy to itself before the first step",
        "Two passes over the same tokens disagree, so that clipping and KL measure noise.",
        "look for randomness in the model's code, or give --dtype float32",
        is_cheap=False,
    ),
    "kl-not-zero": Check(
        "fail or warn",
        "the KL between policy and reference before the first step",
        "Policy and reference start as the same model; if they differ, the penalty pulls towards another one.",
        "name the model that the policy starts from as --reference, or leave it out",
        is_cheap=False,
    ),
    "sampler-mismatch": Check(
        "fail or warn",
        "log-probs of sampled tokens under the sampler and under the policy",
        "Responses come from another distribution than the one that learns.",
        "give the server the policy's own model and --dtype, or correct with --importance token-truncate",
        is_cheap=False,
    ),
    "step-not-finite": Check(
        "fail",
        "loss and gradient of one step, which is taken and forgotten",
        "A step whose numbers are not finite changes nothing, and after a few of them the run ends.",
        "lower --learning-rate, try --dtype float32, or look at the records that are named",
        is_cheap=False,
    ),
    "memory": Check(
        "warn",
        "the plan of the run (heedful plan) against the memory of the device",
        "A few long texts, or another program, are enough to end the run.",
        "lower --micro-batch-size, or see what heedful plan advises",
        is_cheap=False,
    ),
    "disk": Check(
        "fail",
        "the free space of the disk that --output is on",
        "The run would be refused at its first checkpoint.",
        "free some, choose another disk, or keep fewer checkpoints (--save-total-limit)",
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
