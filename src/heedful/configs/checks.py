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
    "template-omits": Check(
        "fail or warn",
        "conversations that differ in one turn, or in the tools, and are rendered alike (fail: user, tools)",
        "What the template leaves out is never read: different questions are the same prompt.",
        "give a --chat-template that writes every turn whole",
    ),
    "roles-alike": Check(
        "warn",
        "how the template tells a user's turn from an assistant's",
        "The model cannot know who said what, and learns to write the user's turns too.",
        "give a --chat-template with the roles",
    ),
    "template-in-text": Check(
        "warn",
        "share of records with special tokens or role names of a chat template in their texts",
        "The chat template writes them itself; in the texts they are letters, which the policy learns to write.",
        "give the texts alone, without what a chat template adds",
    ),
    "answer-repeats": Check(
        "warn",
        "share of answers that begin with their question, or stand in it",
        "The model learns to copy: to repeat the question, or to look for the answer in it.",
        "look at how the columns were filled",
    ),
    "refusals": Check(
        "warn",
        "share of completions that refuse (I cannot help), if the questions do not tell why",
        "The model learns to refuse anything, now and then.",
        "remove these records; they are right only if something else than the question's words tells when to refuse",
    ),
    "answers-cut": Check(
        "warn",
        "answers of the greatest length, in tokens or characters, that end in the middle of a sentence",
        "They were cut off there, and the model learns to end in the middle of a sentence.",
        "write them anew with a higher limit, remove them, or set `truncated` in these records",
    ),
    "labels-swapped": Check(
        "warn",
        "negative margins, and names in --columns that say the opposite",
        "The model learns the opposite of what people prefer.",
        "exchange the columns: --columns chosen=REJECTED,rejected=CHOSEN",
    ),
    "label-given-away": Check(
        "warn",
        "whether the first character or word, or the last character, tells chosen from rejected (good from bad)",
        "The model learns this mark, and nothing else of what makes a response better.",
        "look at how the two were made; bring both into the same form",
        is_cheap=False,
    ),
    "labels-unbalanced": Check(
        "warn",
        "numbers of good and bad responses with their weights (KTO)",
        "The few hardly count: the model learns mostly from one label.",
        "set --desirable-weight or --undesirable-weight",
        is_cheap=False,
    ),
    "zero-layer": Check(
        "fail",
        "whether all matrices of a layer, or the weights of one of its norms, are zero",
        "Such a layer does nothing, and what is zero has no gradient, or gives none to the rest.",
        "use an earlier checkpoint, or download it again",
    ),
    "one-answer": Check(
        "fail or warn",
        "share of equal completions, or of equal chosen or rejected responses, to different prompts",
        "The model learns this one text, or to avoid it, and to ignore the prompt.",
        "look at how the column was filled",
        is_cheap=False,
    ),
    "contradictions": Check(
        "fail or warn",
        "preferences and labels whose opposite is in the data too",
        "Opposite preferences cancel: what is left of them is noise.",
        "keep one of each (heedful label export agrees on one), or compare how often people disagree",
    ),
    "repeated-records": Check(
        "warn",
        "share of records that are copies",
        "An epoch then passes over the same record many times, which is learned by heart.",
        "remove the copies; --epochs says how often data are read",
    ),
    "unknown-tokens": Check(
        "fail or warn",
        "share of tokens that stand for unknown characters",
        "Texts in this language are the same row of unknown tokens to the model.",
        "take a model whose tokenizer knows the language",
    ),
    "held-out-most": Check(
        "warn",
        "whether more is held out than trained on",
        "Most of the data are then only measured on.",
        "lower --eval-fraction; 0.05 is its default",
    ),
    "warm-up": Check(
        "warn",
        "the warm-up against the steps of the run",
        "The learning rate that was asked for is never reached.",
        "lower --warmup-steps, or train longer",
    ),
    "sampling": Check(
        "warn",
        "temperature and filters of the responses that are learned from",
        "A policy learns from differences among its own responses, as long as they are text.",
        "leave --temperature and --top-k out",
    ),
    "beta": Check(
        "warn",
        "the strength of the pull to the reference in DPO, KTO and relatives",
        "The loss is then flat wherever the policy is, or far from it.",
        "leave --beta out: its default is of the loss's paper",
    ),
    "templates-differ": Check(
        "warn",
        "chat templates of policy and reward models of one vocabulary",
        "The reward model reads another rendering than the policy writes, which is right only if it was trained on it.",
        "none if its own template is the one that it was trained with; else train it anew with the policy's (heedful reward "
        "--chat-template)",
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
        "fail or warn",
        "learning rate against width, adapters and the rounding of weights (fail)",
        "Too high a rate ruins a model within tens of steps; too low a one is rounded away, or hardly moves adapters.",
        "leave --learning-rate out: its default is ten times as high with --lora-rank",
    ),
    "own-answer": Check(
        "fail",
        "whether each record's own answer scores as right (verify:math, exact_number, contains_expected)",
        "No response to such a record is ever right, so that its group teaches nothing, or the wrong thing.",
        r"give the final answer alone (also in \boxed{} or after ####), a list of right ones, or null",
    ),
    "reward-model-guesses": Check(
        "warn",
        "accuracy on held-out pairs in the record of the reward model's own run",
        "Its scores are noise to the people whose preferences it was to learn.",
        "train it on more or better pairs (heedful reward), or longer",
    ),
    "reward-constant": Check(
        "fail or warn",
        "whether all sampled responses score the same (fail: a reward model, or weights that cancel)",
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
    "reward-empty": Check(
        "warn",
        "the score of an empty response against the best of the sampled ones",
        "The policy learns to end at once: nothing that it can write scores more.",
        "give an empty response the lowest score",
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
    "reward-random": Check(
        "fail or warn",
        "whether the same responses score the same when they are scored again, in another order or in a smaller batch",
        "The policy learns noise: what was good in one step is bad in the next.",
        "score each response by itself; seed the reward, switch off its dropout, or average several calls",
        is_cheap=False,
    ),
    "reward-ignores-responses": Check(
        "fail",
        "whether a score changes with the response of another prompt",
        "All responses to a prompt score equally, so none is better than another.",
        "look at which argument the reward reads: completions are the responses",
        is_cheap=False,
    ),
    "reward-ties": Check(
        "warn",
        "share of prompts whose sampled responses all score equally",
        "Responses that tie have no advantage over each other, and teach nothing.",
        "give partial credit, raise --samples-per-prompt, or choose other prompts",
        is_cheap=False,
    ),
    "reward-scale": Check(
        "warn",
        "size of the scores against a critic that starts at 0",
        "The critic explains nothing until it has got there, and its errors are what is learned.",
        "divide the scores, or set --score-norm-samples",
        is_cheap=False,
    ),
    "price-too-high": Check(
        "warn",
        "KL penalty and entropy bonus against the spread of scores",
        "The best that the policy can do is to stay where it is, or to write at random.",
        "lower --kl-coef or --entropy-coef",
        is_cheap=False,
    ),
    "discount": Check(
        "warn",
        "what --gamma leaves of a score for the first token",
        "Beginnings of responses learn nothing.",
        "leave --gamma out: a response has one score, so its default is 1",
        is_cheap=False,
    ),
    "no-exploration": Check(
        "fail or warn",
        "whether responses to the same prompt differ",
        "Equal responses have no advantage over each other, and nothing else is ever tried.",
        "raise --temperature to 1, leave --top-k and --top-p out, or start from an earlier model",
        is_cheap=False,
    ),
    "text-unlikely": Check(
        "fail",
        "log-probs of the data's text against a uniform guess; not of a model that heedful trained: it may know answers only",
        "The tokenizer's ids are not those of the model's training, so that it reads another text.",
        "take tokenizer and model from the same place",
        is_cheap=False,
    ),
    "step-moves-nothing": Check(
        "fail",
        "how far one step, taken and forgotten, moves the weights",
        "A run of such steps ends with the model that it began with.",
        "leave --adam-eps out, and look at what has a gradient",
        is_cheap=False,
    ),
    "responses-cut": Check(
        "warn",
        "share of responses, or of episodes, that reach --max-new-tokens",
        "A reward then judges beginnings, and the first thing that the policy learns is to end.",
        "raise --max-new-tokens, run heedful sft first, or set --missing-eos-penalty",
        is_cheap=False,
    ),
    "environment-fails": Check(
        "fail or warn",
        "share of episodes in which the environment raises, crashes, hangs or gives no number",
        "Such episodes are left out, and above --max-failed-rewards the run stops.",
        "correct the environment for the episode that is shown",
        is_cheap=False,
    ),
    "environment-random": Check(
        "warn",
        "whether an environment answers and pays the same turns alike in another process",
        "A resumed run plays other games, and the same turns are good in one step and bad in the next.",
        "draw from random or numpy.random, which are seeded for each episode; not from the clock, os.urandom, SystemRandom, "
        "a generator without a seed, or the order of a set",
        is_cheap=False,
    ),
    "environment-keeps-state": Check(
        "warn",
        "whether an environment answers and pays the same turns alike after the episode of another record",
        "An episode is paid for what another one did, and a resumed run begins without it.",
        "set everything in reset, and keep nothing in the class, the module, or a generator of your own",
        is_cheap=False,
    ),
    "episodes-endless": Check(
        "warn",
        "whether --max-turns ends most episodes, and the environment none",
        "The environment has not once said that an episode is over, so each costs all turns.",
        "let _reply return None at the end of an episode, or raise --max-turns",
        is_cheap=False,
    ),
    "observations-long": Check(
        "warn",
        "share of the tokens behind the prompts that the environment says, and of episodes that end because it says too much",
        "--max-new-tokens counts these tokens too, and the policy learns from its own only.",
        "shorten what tools and _reply return, or raise --max-new-tokens",
        is_cheap=False,
    ),
    "tools-not-called": Check(
        "warn",
        "whether any episode of an environment with tools calls one",
        "What is never tried is never paid: a policy that calls no tool does not learn to.",
        "run heedful sft on conversations with calls first, or say in the prompts when to call",
        is_cheap=False,
    ),
    "tools-fail": Check(
        "warn",
        "share of the calls of tools that raise, or name none",
        "The policy reads an error, and learns to leave tools alone.",
        "correct the tool for the call that is shown, or describe its arguments better",
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
