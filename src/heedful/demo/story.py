"""The texts that the demo prints before and after each stage, made from settings and results."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heedful.configs.offline import RewardConfig, SFTConfig
from heedful.configs.online import PPOConfig
from heedful.configs.tools import DemoConfig
from heedful.demo.measure import SAMPLES_FOR_RARE
from heedful.demo.world import FLAW_WEIGHTS

Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How large the world is. Demonstrations and pairs count only those that are trained on."""

    prompts: int
    held_out: int
    demonstrations: int
    good_share: float
    pairs: int
    swapped_share: float
    parameters: int


def opening(sizes: Sizes) -> str:
    """Introduce the world, the gold judge, the held-out prompts and the random model."""
    return (
        "This demo takes a language model from random weights through the three stages of learning from human feedback. "
        f"Users ask {sizes.prompts:,} short questions in English and Chinese. A program that knows every right answer, the "
        "gold judge, takes the place of people: it says which of two answers is better, and it marks the models at the end, "
        "from 0 to 1. Nothing is ever trained on its marks.\n"
        f"{sizes.held_out} of the prompts are held out: no stage trains on them, and whatever is called held out below "
        "is measured on them.\n"
        f"The model has Qwen3's shape and {sizes.parameters:,} random weights. It reads and writes single bytes, and does "
        "not know a single letter yet."
    )


def before_sft(config: SFTConfig, sizes: Sizes) -> str:
    """Explain the SFT stage and its progress line."""
    *flaws, last = (kind for kind, weight in FLAW_WEIGHTS.items() if weight)
    return (
        f"The model learns to continue prompts as {sizes.demonstrations:,} demonstrations do, byte by byte. As in real "
        f"data, their quality is mixed: {_percent(sizes.good_share)} are good, the others are "
        f"{', '.join(flaws)} or {last}. SFT imitates all of them equally.\n"
        "In the progress line, loss is the surprise at the next byte, in nats: blind guessing gives about 5.6, and it cannot "
        "reach 0, because nobody can tell which kind of answer comes next. lr is the learning rate, tokens/s the speed. "
        f"Expect a steep fall early in {_its_steps(config.max_steps)}, then a slow one."
    )


def after_sft(summary: Summary) -> str:
    """Report the loss of the SFT stage."""
    first, last = _change(summary, "eval/loss")
    return (
        f"Held-out loss {first:.2f} -> {last:.2f} nats per byte ({_work(summary)}). The model now answers as its "
        "demonstrations did, well or badly."
    )


def before_reward(config: RewardConfig, sizes: Sizes) -> str:
    """Explain the reward model's stage and its progress line."""
    return (
        "A copy of the SFT model predicts a score instead of the next byte. From "
        f"{sizes.pairs:,} pairs of answers it learns to give the preferred one the higher score. The gold judge chose, and "
        f"then {_percent(sizes.swapped_share)} of the pairs were swapped, because people err too.\n"
        "In the progress line, loss is -log sigmoid(chosen score - rejected score): guessing gives 0.69. accuracy is the "
        "share of pairs in the labelled order: guessing gives 0.5, and more than "
        f"{1 - sizes.swapped_share:.2f} on new pairs would be luck, because nobody can guess the swaps. margin is the "
        f"mean difference of the two scores. Expect most of the rise early in {_its_steps(config.max_steps)}."
    )


def before_labelling(config: DemoConfig) -> str:
    """Say what the user is asked to do."""
    simulated = "A simulated labeller, who agrees with the gold judge on 73 % of pairs, says"
    who = simulated if config.label_simulated else "You say"
    keys = (
        "\nOn the page, 1 and 2 choose an answer, then 1 to 4 say how much better it is; t is a tie, ? shows all keys."
    )
    return (
        f"The model answers {config.label_pairs} prompts several times. {who} which of two answers is better. Nothing else "
        "will tell the reward model what is good: the demo's own preferences are not used."
    ) + ("" if config.label_simulated else keys)


def before_reward_from_labels(config: RewardConfig, labels: int) -> str:
    """Explain the reward model's stage if it learns from the user's labels."""
    return (
        f"A copy of the SFT model predicts a score instead of the next byte. From {labels} preferences, which it reads many "
        "times, it learns to give the preferred answer the higher score.\n"
        "In the progress line, loss is -log sigmoid(preferred score - other score): guessing gives 0.69. accuracy is the "
        f"share of pairs in the labelled order. It comes close to 1 in {_its_steps(config.max_steps)}, as so few can be "
        "learned by heart; what counts is the accuracy on pairs that it has not seen, which the gold judge has ordered."
    )


def after_reward_from_labels(summary: Summary, accuracy: float) -> str:
    """Report the accuracy of the reward model that learned from the user's labels."""
    first, _ = _change(summary, "eval/accuracy")
    return (
        f"It agrees with the gold judge on {100 * accuracy:.0f} of 100 pairs that nobody has labelled, {100 * first:.0f} "
        f"before ({_work(summary)}). If your taste is not the judge's, that is no mistake of the model."
    )


def after_reward(summary: Summary, accuracy: float) -> str:
    """Report the accuracy of the reward model; ``accuracy`` is its share of agreement with the gold judge."""
    first, last = _change(summary, "eval/accuracy")
    return (
        f"It puts {100 * last:.0f} of 100 held-out pairs in the labelled order, {100 * first:.0f} before "
        f"({_work(summary)}). With the swaps undone it agrees with the gold judge on {100 * accuracy:.0f} of 100."
    )


def before_ppo(config: PPOConfig) -> str:
    """Explain the PPO stage and its progress line."""
    hot = (
        f" It samples at temperature {config.temperature:g} while it learns. Mistakes are then more frequent, so there is "
        "more to learn from them; at temperature 1, at which the models are compared, they are rarer."
        if config.temperature > 1
        else ""
    )
    steered = f", a price that is steered towards {config.kl_target:g} nats per answer" if config.kl_target else ""
    return (
        f"In each of {_steps(config.steps)} the model answers {config.rollout_batch_size} prompts and the reward model "
        "scores the answers. PPO makes answers that scored better than expected more likely, and the rest less likely."
        f"{hot} Moving away from the SFT model costs {config.kl_coef:g} per nat of KL{steered}, so the text stays text.\n"
        "In the progress line, score is the reward model's mean and should rise. kl says how far the answers have moved "
        "from the SFT model, in nats per answer; beyond about 20 a policy has usually learned to fool its reward model. "
        "entropy is how undecided the model is at each byte, and falls slowly. length is the number of bytes per answer. eos "
        "is the share of answers that end by themselves."
    )


def after_ppo(summary: Summary) -> str:
    """Report the score and the KL of the PPO stage."""
    first, last = _change(summary, "eval/score_mean")
    kl = summary["last_evaluation"]["eval/kl"]
    return (
        f"Held-out score by the reward model {first:.2f} -> {last:.2f}, at a KL of {kl:.1f} nats per answer, sampled "
        "as in training "
        f"({_work(summary)}). Whether the answers are really better is for the gold judge to say."
    )


def before_measuring(sizes: Sizes) -> str:
    """Explain the comparison of both models and its table."""
    return (
        f"Both models, SFT and PPO, now answer all {sizes.held_out} held-out prompts at temperature 1, with the same "
        "random numbers. reward is the reward model's score, gold is the gold judge's, from 0 to 1.\n"
        "The table shows the first held-out prompt of each of the first twelve kinds of question, so nobody chose them; "
        "answers.jsonl has all answers."
    )


def results(numbers: Summary) -> list[dict[str, str]]:
    """Return the rows of the table of results."""
    rows = [
        ("gold judge, mean score", "{:.2f}", "gold"),
        ("answers without any flaw", "{:.0%}", "flawless_frac"),
        ("reward model, mean score", "{:z.2f}", "reward"),
        (f"answers that end, of {SAMPLES_FOR_RARE} each", "{:.1%}", "eos_frac"),
        ("empty or with broken bytes, of these", "{:.2%}", "empty_frac"),
    ]
    return [
        {
            f"{numbers['prompts']} held-out prompts": name,
            "SFT": form.format(numbers[f"sft.{key}"]),
            "PPO": form.format(numbers[f"ppo.{key}"]),
        }
        for name, form, key in rows
    ]


def after_measuring(numbers: Summary) -> str:
    """Report the win rate and the KL of PPO."""
    return (
        f"Asked which of two answers to the same prompt is better, the gold judge chooses PPO's in "
        f"{_percent(numbers['ppo.win_rate'])} of the cases; a tie counts half. The KL of PPO to SFT is "
        f"{numbers['ppo.kl']:.1f} nats per answer."
    )


def why(numbers: Summary, sizes: Sizes, *, labelled: bool = False) -> str:
    """Explain why the answers got better, or say that they did not.

    Args:
        numbers: the demo's summary.
        sizes: of its world.
        labelled: the reward model learned from the user's labels only.
    """
    before, after = numbers["sft.gold"], numbers["ppo.gold"]
    if after <= before and labelled:
        return (
            f"This time it did not get better: gold {before:.2f} -> {after:.2f}. The reward model agrees with the gold judge "
            f"on {100 * numbers['reward.accuracy']:.0f} of 100 pairs, where guessing gives 50, and PPO raises its score "
            "whether it is right or not. More labels (--label-pairs) make a better reward model, and so do labels that "
            "follow one taste: 30 of a labeller who is wrong on every fourth pair teach too little."
        )
    if after <= before:
        return (
            f"This time it did not get better: gold {before:.2f} -> {after:.2f}. Look at the curves: either the loss or "
            "the accuracy was still changing when its stage ended, or PPO's steps were too few or too large."
        )
    return (
        f"Gold {before:.2f} -> {after:.2f}. SFT imitates every demonstration, the good {_percent(sizes.good_share)} and the "
        f"flawed {_percent(1 - sizes.good_share)} alike, so its answers are the same mixture: the model can answer well, "
        "but does not know that it should. The reward model learned from pairs which kind people prefer. PPO moves "
        "probability to that kind, and the KL penalty makes it costly to move further from the SFT model than necessary."
    )


def what_is_there(config: DemoConfig, seconds: float) -> str:
    """List the contents of the demo's folder; ``seconds`` is the time of the whole demo."""
    return (
        f"All of this took {seconds:.0f} s. The results are in {config.output}: summary.json, answers.jsonl, curves.png (the "
        "learning curves), world/ (the data), base/, sft/, reward/ and ppo/ (the models)."
    )


def next_steps(config: DemoConfig, ppo: PPOConfig) -> list[tuple[str, list[str]]]:
    """Return what to run next: headings, each with commands that can be pasted into a shell."""
    out = str(config.output)
    policy, start, again = f"{out}/ppo/final", f"{out}/sft/final", f"{out}-again"
    length = ["--max-new-tokens", str(ppo.max_new_tokens)]
    machine = ["--dtype", config.dtype, *(["--device", config.device] if config.device != "auto" else [])]
    measured = ["--data", ppo.data, "--eval-fraction", str(ppo.eval_fraction), *length]
    measured += ["--seed", str(config.seed), *machine]
    rewards = ["--rewards", *ppo.rewards]
    return [
        (
            "Talk to the model, and to the one before PPO:",
            [_line("chat", "--model", m, *length) for m in (policy, start)],
        ),
        (
            "Measure it again:",
            [
                _line("evaluate", "win-rate", "--model", policy, "--baseline", start, *measured, *rewards),
                _line("evaluate", "kl", "--model", policy, "--reference", start, *measured),
            ],
        ),
        ("Look at every curve:", [shlex.join(["tensorboard", "--logdir", out])]),
        (
            "Repeat a single stage; a flag such as --kl-coef 0.2 changes it:",
            [
                _line(stage, f"{out}/{stage}/config.yaml", "--output", f"{again}/{stage}")
                for stage in ("sft", "reward", "ppo")
            ],
        ),
    ]


def _line(*words: str) -> str:
    return shlex.join(["heedful", *words])


def _change(summary: Summary, name: str) -> tuple[float, float]:
    return summary["first_evaluation"][name], summary["last_evaluation"][name]


def _work(summary: Summary) -> str:
    return f"{_steps(summary['steps'])}, {summary['seconds']:.0f} s"


def _steps(count: int) -> str:
    return f"{count:,} step{'s' * (count != 1)}"


def _its_steps(count: int | None) -> str:
    return "the run" if count is None else f"its {_steps(count)}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
