"""The function behind each command: it calls a public function and prints the result."""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from heedful.cli.chat import chat
from heedful.configs.evaluate import (
    AccuracyConfig,
    BestOfNConfig,
    KLConfig,
    PassAtKConfig,
    PerplexityConfig,
    ScoresConfig,
    WinRateConfig,
)
from heedful.configs.exam import ExamConfig
from heedful.configs.options import RunOptions, TrainingOptions
from heedful.configs.rounds import RoundConfig, SimulateConfig
from heedful.configs.tools import (
    DemoConfig,
    MergeConfig,
    PushConfig,
    RunsConfig,
    SampleConfig,
    TinyConfig,
)
from heedful.configs.tracking import TrackConfig
from heedful.data.loading import demonstration_texts
from heedful.display import Screen, counted, harmless
from heedful.errors import ConfigError
from heedful.evaluate import policies, reward_models
from heedful.evaluate.output import check_output, report
from heedful.files import check_output_file, check_output_folder, is_made_by, model_names
from heedful.models.adapters import is_adapter
from heedful.models.merge import merge_model
from heedful.models.tiny import make_tiny_model
from heedful.redact import redact
from heedful.training.alarms import PAGE
from heedful.training.verdict import Verdict

if TYPE_CHECKING:
    from heedful.configs.report import ReportConfig

__all__ = ["chat"]


def demo(config: DemoConfig) -> None:
    """Run the demo, which prints its progress."""
    from heedful.apps.demo.pipeline import run_demo

    run_demo(config)


def make_tiny(config: TinyConfig) -> None:
    """Write a tiny model. Raises ConfigError if the folder is in use."""
    check_output_folder(
        config.output, "heedful tiny", overwrite=config.overwrite, ours=lambda: model_names(config.output)
    )
    texts = demonstration_texts(config.texts) if config.texts else []
    make_tiny_model(
        config.architecture,
        config.output,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        max_length=config.max_length,
        initializer_range=config.initializer_range,
        seed=config.seed,
        texts=texts,
        vocab_size=config.vocab_size if texts else 0,
    )
    _print(f"a random {config.architecture} model is in {config.output}")


def sample(config: SampleConfig) -> None:
    """Write answers of models into a file and print where they are."""
    from heedful.apps.rounds.sample import sample_answers

    counts = sample_answers(config)
    said = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    _print(f"{said}; written to {config.output}")
    _print(f"have them compared:  heedful label import PROJECT --data {config.output}")


def take_round(config: RoundConfig) -> None:
    """Run a project's round as far as possible, and print the next step."""
    from heedful.apps.rounds.round import run_round

    run_round(config, _print)


def simulate_labels(config: SimulateConfig) -> None:
    """Label a project as simulated people, and print the number of labels."""
    from heedful.apps.rounds.judging import simulate

    count, names = simulate(config)
    _print(f"{counted(count, 'label')} by {', '.join(names)}")
    if not count:
        _print(
            "nothing is left to label: each item has as many labels as the project asks for; add items, or --labellers"
        )


def merge(config: MergeConfig) -> None:
    """Merge adapters into their model and print its folder."""
    merge_model(config)
    _print(f"a plain model is in {config.output}")


def report_training(config: RunOptions, summary: dict[str, Any], *, was_complete: bool = False) -> None:
    """Print what a training run did to its model, the alarms that it raised, its folder, and the next commands.

    Args:
        config: the run's settings.
        summary: the trainer's summary.
        was_complete: whether the run had finished before this command, which then trained nothing.
    """
    verdict, has_evaluations = Verdict.read(summary), bool(summary["first_evaluation"])
    if was_complete:
        _print(f"the run in {config.output} is complete already: nothing to do (--overwrite replaces it by a new run)")
    _print(f"{counted(summary['steps'], 'step')} in {summary['seconds']:.1f} s")
    if verdict is not None:
        _print(str(verdict))
    elif not has_evaluations:
        _print("better or worse is not known: nothing was held out (--eval-fraction, --eval-data)")
    if summary["alarms"]:
        said = ", ".join(f"{one['alarm']} (step {one['step']})" for one in summary["alarms"])
        _print(f"alarms: {said}; {PAGE} has their causes and cures")
    models = "final/ and best/" if has_evaluations else "final/"
    _print(f"the run is in {config.output}: {models}, metrics.jsonl, samples.jsonl, tensorboard/, summary.json")
    _print(f"look closer:  heedful report {config.output}")
    base = getattr(config, "model", "")
    if getattr(config, "lora_rank", 0) and is_adapter(base):
        _print(
            f"final/ holds adapters on top of other adapters ({base}): heedful loads both, PEFT's Auto classes ignore the "
            f"earlier ones. For other tools:  heedful merge --adapter {config.output}/final --output FOLDER"
        )
    model = f"{config.output}/final"
    if verdict is not None and verdict.verdict == "worse":
        best = summary["best"]["step"]
        if not best:
            _print("no evaluation was better than the model that the run started from: do not use final/")
            return
        _print(f"final/ is worse than the model that the run started from; the best evaluation was that of step {best}")
        model = f"{config.output}/best"
    if summary["algorithm"] == "reward":
        _print(f"use it:  heedful ppo --rewards model:{model} ...")
    elif summary["algorithm"] == "critic":
        _print(f"use it:  heedful ppo --critic separate --value-model {model} ...")
    else:
        _print(f"talk to it:  heedful chat --model {model}")


MEASURES: dict[type, Callable[[Any], dict[str, Any]]] = {
    AccuracyConfig: reward_models.evaluate_accuracy,
    WinRateConfig: policies.evaluate_win_rate,
    ScoresConfig: policies.evaluate_scores,
    BestOfNConfig: policies.evaluate_best_of_n,
    PassAtKConfig: policies.evaluate_pass_at_k,
    KLConfig: policies.evaluate_kl,
    PerplexityConfig: policies.evaluate_perplexity,
}


def evaluate(config: Any) -> None:
    """Print the result of a measure of ``heedful evaluate``, and save it if ``config.output`` names a file."""
    check_output(config)
    report(MEASURES[type(config)](config), config)


def exam(config: ExamConfig) -> None:
    """Examine a reward, print what was found, and write the page if ``config.output`` names a file."""
    from heedful.apps.exam.examine import examine
    from heedful.apps.exam.page import check_page, show

    check_page(config)
    show(examine(config), config)


def plan_memory(config: TrainingOptions) -> None:
    """Print a run's memory, part by part, whether it fits, and if not, settings that would fit."""
    from heedful.models.shape import load_shape
    from heedful.models.source import resolve
    from heedful.planning.report import plan_report
    from heedful.planning.shapes import KNOWN, Shape

    def shape(name: str) -> Shape:
        return KNOWN[name] if name in KNOWN else load_shape(resolve(name, config))

    for line in plan_report(config, cache(shape)):
        _print(line)


def show_runs(config: RunsConfig) -> None:
    """Print a table of the runs in a folder."""
    from heedful.display import print_table
    from heedful.training.runs import find_runs

    rows = [
        {
            "run": str(run.path),
            "command": run.algorithm,
            "state": run.state,
            "step": f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step),
            "last evaluation": run.metric,
            "": run.note,
        }
        for run in find_runs(config.folder)
    ]
    if rows:
        print_table(Screen(), "", rows)
    else:
        _print(f"there are no runs in {config.folder}")


def track(config: TrackConfig) -> None:
    """Send a run's metrics to a tracker and print a line when done. Raises ConfigError for a run that is being written."""
    from heedful.lock import is_locked
    from heedful.tracking.trackers import send_run

    if is_locked(config.run):
        raise ConfigError(
            f"{config.run} is being written; wait for its end, or give the run itself --track {config.to}"
        )
    send_run(config)
    _print(f"{config.to} has all of {config.run}")


def push(config: PushConfig) -> None:
    """Upload a run's model, or write the upload to a folder. Raises ConfigError for a run that is being written."""
    from heedful.apps.publishing import push as sending
    from heedful.lock import is_locked

    if is_locked(config.run):
        raise ConfigError(f"{config.run} is being written; wait for its end")
    for line in sending.push(config):
        _print(line)


def report_runs(config: "ReportConfig") -> None:
    """Write the page about runs, or draw only their curves, and print where it is."""
    from heedful.configs.report import PICTURES

    if config.output.suffix.lower() not in PICTURES:
        from heedful.apps.report.page import write_report

        for line in write_report(config):
            _print(line)
        return
    from heedful import plot
    from heedful.apps.plot.style import PROGRAM

    check_output_file(
        config.output,
        "heedful report",
        overwrite=None,
        what="a picture",
        is_ours=lambda: is_made_by(config.output, PROGRAM),
    )
    plot.curves(list(config.runs), path=config.output)
    _print(f"the learning curves of {counted(len(config.runs), 'run')} are in {config.output}")


def _print(text: str) -> None:
    Screen(soft_wrap=True).print(harmless(redact(text)), markup=False, highlight=False)
