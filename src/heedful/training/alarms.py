"""Alarms: what ruins a run without an error, each with a name, a cause and a cure (docs/alarms.md)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from heedful.errors import TrainingError
from heedful.training import alarm_rules as rules
from heedful.training.alarm_rules import History, Limits, Symptom

FILE = "alarms.jsonl"
"""Of a run's folder: a line for each alarm."""
PAGE = "docs/alarms.md"
QUIET = 50
"""An alarm speaks again only once it has been over for so many steps."""


@dataclass(frozen=True)
class Alarm:
    """A thing that goes wrong in training."""

    cause: str
    cure: str


class RaisedAlarm(NamedTuple):
    """An alarm that has spoken: a line of alarms.jsonl."""

    step: int
    alarm: str
    message: str
    evidence: dict[str, float]

    @property
    def text(self) -> str:
        """For the terminal."""
        return f"step {self.step}: {self.alarm}: {self.message} ({PAGE}#{self.alarm})"


ALARMS: Mapping[str, Alarm] = {
    "end-token-lost": Alarm(
        "not ending pays, or the end token is not learned",
        "Set --missing-eos-penalty; check that the end token is scored and learned",
    ),
    "responses-cut": Alarm(
        "responses are longer than --max-new-tokens",
        "Raise it if they should come to an end",
    ),
    "turns-cut": Alarm(
        "playing on pays, or episodes need more turns",
        "Pay for ending, or let each turn cost something (_turn_reward); raise --max-turns if they should come to an end",
    ),
    "length-drift": Alarm(
        "the reward pays for length, or for brevity",
        "Read samples.jsonl; correct the reward, raise --kl-coef or set --overlong-buffer",
    ),
    "repetition": Alarm(
        "the reward pays for repeated text",
        "Read samples.jsonl; add --rewards rule:repetition or raise --kl-coef",
    ),
    "entropy-collapse": Alarm(
        "the policy always says the same and finds nothing better",
        "Lower --learning-rate, raise --kl-coef, or set --target-entropy",
    ),
    "kl-budget": Alarm(
        "updates are larger than --kl-coef holds back",
        "Raise --kl-coef or lower --learning-rate; --max-kl sets the limit",
    ),
    "ratio-tail": Alarm(
        "the learning rate is too high, or the sampler is not the policy",
        "Lower --learning-rate or --ppo-epochs, or set --approx-kl-limit",
    ),
    "critic-dead": Alarm(
        "the critic's learning rate is too low, or it reads the wrong tokens",
        "Raise --value-learning-rate (heedful critic: --learning-rate), set --critic-warmup-steps, or train a critic first "
        "by heedful critic",
    ),
    "critic-diverging": Alarm(
        "the critic's learning rate is too high, or the rewards change their scale",
        "Lower --value-learning-rate (heedful critic: --learning-rate); set --score-norm-samples or --score-clip",
    ),
    "scores-tied": Alarm(
        "the reward does not tell responses apart, or the policy answers all alike",
        "Raise --samples-per-prompt or --temperature, or use a reward that tells responses apart",
    ),
    "ties-unfilled": Alarm(
        "prompts are too easy or too hard",
        "Raise --dynamic-sampling-rounds or --samples-per-prompt, or use other prompts",
    ),
    "scores-jump": Alarm(
        "the reward changed its scale, or the policy found an error in it",
        "If the reward did not change its scale on purpose, look at samples.jsonl",
    ),
    "scores-unread": Alarm(
        "responses exceed a reward model's context",
        "Lower --max-new-tokens or use a reward model with a longer context",
    ),
    "judge-falling": Alarm(
        "the policy exploits errors of the reward",
        "Use best/, which the judge chose; raise --kl-coef or stop earlier",
    ),
    "stale-sampler": Alarm(
        "the sampler has older weights, another precision or other settings, or a mask is wrong",
        "Check the sampler's weights and precision; --importance token-truncate corrects small differences",
    ),
    "reference-moves": Alarm(
        "the reference shares the policy's weights, so the KL penalty holds nothing back",
        "Name a frozen model by --reference",
    ),
    "skipped-updates": Alarm(
        "losses or gradients are not finite",
        "Read skipped.jsonl; lower --learning-rate or try --dtype float32",
    ),
    "responses-masked": Alarm(
        "all responses are longer than --max-new-tokens",
        "Raise --max-new-tokens",
    ),
    "weights-light": Alarm(
        "--top-k and --top-p leave much out, or the sampler differs from the policy",
        "If it lasts, set --importance-normalise to divide by the mean, use --importance token-truncate, or relax --top-k "
        "and --top-p",
    ),
    "nothing-learned": Alarm(
        "the learning rate is too low; if scores fall, a sign or a penalty is wrong",
        "Compare reward/score_mean with reward/shaped_mean and reference/kl",
    ),
    "chosen-falling": Alarm(
        "DPO lowers both responses of a pair, the rejected one more",
        "Add --nll-coef, raise --beta or lower --learning-rate",
    ),
}
"""By their names; docs/alarms.md has the same."""
RULES: Mapping[str, Callable[[History], Symptom | None]] = {
    "end-token-lost": rules.end_token_lost,
    "responses-cut": rules.responses_cut,
    "turns-cut": rules.turns_cut,
    "length-drift": rules.length_drift,
    "repetition": rules.repetition,
    "entropy-collapse": rules.entropy_collapse,
    "kl-budget": rules.kl_budget,
    "ratio-tail": rules.ratio_tail,
    "critic-dead": rules.critic_dead,
    "critic-diverging": rules.critic_diverging,
    "scores-tied": rules.scores_tied,
    "ties-unfilled": rules.ties_unfilled,
    "scores-jump": rules.scores_jump,
    "scores-unread": rules.scores_unread,
    "judge-falling": rules.judge_falling,
    "stale-sampler": rules.stale_sampler,
    "reference-moves": rules.reference_moves,
    "skipped-updates": rules.skipped_updates,
    "responses-masked": rules.responses_masked,
    "weights-light": rules.weights_light,
    "nothing-learned": rules.nothing_learned,
    "chosen-falling": rules.chosen_falling,
}
"""What each looks at."""
OFFLINE = ("skipped-updates", "chosen-falling")
"""Those of trainers that learn from data."""


class Alarms:
    """A run's alarms: what they have seen and said. Part of its state.

    Args:
        limits: what the settings say.
        stop_on: names of alarms that end the run.
        names: of those that look.
    """

    def __init__(self, limits: Limits, stop_on: Sequence[str] = (), names: Collection[str] = ALARMS) -> None:
        self.history, self.names = History(limits), names
        self.stop_on = {*stop_on, *(["kl-budget"] if limits.max_kl is not None else [])}
        self.raised: list[RaisedAlarm] = []
        self._held: dict[str, int] = {}
        """The last step at which each alarm held."""

    def see(self, step: int, metrics: Mapping[str, float]) -> list[RaisedAlarm]:
        """Look at a step's metrics. Returns the alarms that speak now."""
        self.history.add(step, metrics)
        return self._look(step)

    def see_evaluation(self, step: int, metrics: Mapping[str, float]) -> list[RaisedAlarm]:
        """Look at the metrics of an evaluation. Returns the alarms that speak now."""
        self.history.add_evaluation(metrics)
        return self._look(step)

    def _look(self, step: int) -> list[RaisedAlarm]:
        speaks = []
        for name in self.names:
            symptom = RULES[name](self.history)
            if symptom is None:
                continue
            if name not in self._held or step - self._held[name] > QUIET:
                speaks.append(RaisedAlarm(step, name, f"{symptom.what}. {ALARMS[name].cure}", symptom.evidence))
            self._held[name] = step
        self.raised += speaks
        return speaks

    def check(self) -> None:
        """Raise TrainingError if an alarm holds that is to end the run."""
        for name in sorted(self.stop_on):
            symptom = RULES[name](self.history)
            if symptom is not None:
                raise TrainingError(f"{name}: {symptom.what}. {ALARMS[name].cure} ({PAGE}#{name})")

    def state_dict(self) -> dict[str, Any]:
        history = {name: value for name, value in vars(self.history).items() if name != "limits"}
        return {"history": history, "raised": [list(one) for one in self.raised], "held": dict(self._held)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history = History(self.history.limits, **state["history"])
        self.raised = [RaisedAlarm(*one) for one in state["raised"]]
        self._held = dict(state["held"])
