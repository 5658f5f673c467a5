"""Every command: its configuration, its function, its line in ``heedful --help``. Nothing is imported until it is used."""

import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from heedful.configs.trainers import TRAINERS, imported
from heedful.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

INSTALLED = "heedful.commands"
"""Group of the entry points by which other packages add commands: NAME, and a function of its settings."""


@dataclass(frozen=True)
class Command:
    """A command. Its configuration and its function are named as ``module:name`` and imported when it is used."""

    config: str
    """The class of its configuration."""
    function: str
    """The function to call with the configuration."""
    summary: str
    """Its line in ``heedful --help``."""
    extended: str = ""
    """A function that makes another class from that of a trainer's configuration; empty: it is taken as it is."""
    trains: bool = False
    """Whether it is a trainer, whose result is reported at the end."""
    serves: bool = False
    """Whether it needs the packages of heedful[label]."""

    def settings(self) -> type[Any]:
        """The class of its configuration."""
        found: type[Any] = imported(self.config)
        return imported(self.extended)(found) if self.extended else found

    def load(self) -> Any:
        """The function."""
        return imported(self.function)


class InstalledCommand:
    """A command of another package: a function whose argument is annotated with its settings, a dataclass of `Settings`.

    Args:
        point: its entry point.
    """

    trains = serves = False

    def __init__(self, point: "EntryPoint") -> None:
        self.point = point

    def settings(self) -> type[Any]:
        """The class of its settings. Raises ConfigError if there is none, or the package cannot be imported."""
        from heedful.configs.settings import Settings

        hints = [hint for name, hint in typing.get_type_hints(self.load()).items() if name != "return"]
        if len(hints) != 1 or not (isinstance(hints[0], type) and issubclass(hints[0], Settings)):
            raise ConfigError(
                f"{self.point.value} (entry point {self.point.name} of {INSTALLED}) must take one argument, annotated with a "
                "subclass of heedful.configs.settings.Settings"
            )
        return hints[0]

    def load(self) -> Any:
        """The function. Raises ConfigError if it cannot be imported."""
        try:
            return self.point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{self.point.value} (entry point {self.point.name} of {INSTALLED}) cannot be imported: {error}"
            ) from error


def installed_commands() -> dict[str, InstalledCommand]:
    """Commands of other packages, without those that have a name of heedful's own."""
    from importlib.metadata import entry_points

    return {
        point.name: InstalledCommand(point)
        for point in entry_points(group=INSTALLED)
        if point.name not in COMMANDS and point.name not in GROUPS
    }


COMMANDS = {
    "demo": Command(
        "configs.tools:DemoConfig", "cli.commands:demo", "watch a tiny model learn from feedback, start to end"
    ),
    "tiny": Command("configs.tools:TinyConfig", "cli.commands:make_tiny", "make a tiny random model to try things on"),
    **{
        name: Command(trainer.config, trainer.function, trainer.summary, trains=True)
        for name, trainer in TRAINERS.items()
    },
    "sample": Command(
        "configs.tools:SampleConfig", "cli.commands:sample", "write several answers per prompt, for people to compare"
    ),
    "round": Command(
        "configs.rounds:RoundConfig", "cli.commands:take_round", "run the next human-feedback round of a project"
    ),
    "merge": Command("configs.tools:MergeConfig", "cli.commands:merge", "write a plain model from LoRA adapters"),
    "evaluate accuracy": Command(
        "configs.evaluate:AccuracyConfig", "cli.commands:evaluate", "how often a reward model orders pairs correctly"
    ),
    "evaluate win-rate": Command(
        "configs.evaluate:WinRateConfig", "cli.commands:evaluate", "compare one policy with another under a reward"
    ),
    "evaluate scores": Command(
        "configs.evaluate:ScoresConfig", "cli.commands:evaluate", "mean score of a policy's responses"
    ),
    "evaluate best-of-n": Command(
        "configs.evaluate:BestOfNConfig",
        "cli.commands:evaluate",
        "score of the best of n responses, chosen by a reward",
    ),
    "evaluate pass-at-k": Command(
        "configs.evaluate:PassAtKConfig", "cli.commands:evaluate", "how often one of k responses is correct"
    ),
    "evaluate kl": Command("configs.evaluate:KLConfig", "cli.commands:evaluate", "KL of a policy to a reference"),
    "evaluate perplexity": Command(
        "configs.evaluate:PerplexityConfig", "cli.commands:evaluate", "perplexity of a model on text"
    ),
    "exam": Command("configs.exam:ExamConfig", "cli.commands:exam", "attack a reward before PPO optimises it"),
    "migrate": Command(
        "configs.migrate:MigrateConfig",
        "apps.migrate.page:migrate",
        "turn a script of TRL, or a file of LLaMA-Factory, into heedful's",
    ),
    "choose": Command(
        "configs.choose:ChooseConfig",
        "apps.choose.page:choose",
        "PPO or GRPO for your prompts and reward: a short budget of both",
    ),
    "serve-reward": Command(
        "configs.scoring:ServeRewardConfig",
        "apps.serving.rewards:serve_reward",
        "serve a reward model over HTTP",
        serves=True,
    ),
    "serve-policy": Command(
        "configs.tools:ServePolicyConfig",
        "engines.vllm.command:serve_policy",
        "start a vLLM server that samples for a trainer",
    ),
    **{
        f"plan {name}": Command(
            trainer.config,
            "cli.commands:plan_memory",
            f"how much memory heedful {name} needs",
            extended="configs.plan:plan_settings",
        )
        for name, trainer in TRAINERS.items()
    },
    **{
        f"doctor {name}": Command(
            trainer.config,
            "cli.doctor:doctor",
            f"check a run of heedful {name} without training",
            extended="configs.doctor:doctor_settings",
        )
        for name, trainer in TRAINERS.items()
    },
    "doctor device": Command(
        "configs.doctor:DoctorDeviceConfig",
        "cli.doctor_device:check_device",
        "check a device: heedful doctor --device cuda",
    ),
    "label new": Command(
        "configs.label:NewProjectConfig", "apps.label.commands:new_project", "make a project in which people label"
    ),
    "label serve": Command(
        "configs.label_server:LabelServeConfig",
        "apps.label.server.run:serve",
        "serve the page on which people label a project",
        serves=True,
    ),
    "label invite": Command(
        "configs.label_server:InviteConfig",
        "apps.label.server.run:invite",
        "add a person to a project and print a sign-in link",
        serves=True,
    ),
    "label import": Command(
        "configs.label_data:ImportConfig",
        "apps.label.commands:import_data",
        "add prompts, answers or preferences to a project",
    ),
    "label export": Command(
        "configs.label_data:ExportConfig",
        "apps.label.commands:export_data",
        "write a project's labels as training data",
    ),
    "label stats": Command(
        "configs.label_data:StatsConfig", "apps.label.commands:show_statistics", "show how well people agree"
    ),
    "label list": Command(
        "configs.label_data:ListConfig", "apps.label.commands:list_labels", "show single labels, by person or text"
    ),
    "label correct": Command(
        "configs.label_data:CorrectConfig",
        "apps.label.commands:correct_label",
        "replace a label's answer; the original is kept",
    ),
    "label withdraw": Command(
        "configs.label_data:WithdrawConfig",
        "apps.label.commands:withdraw_items",
        "take wrongly imported items out of a project, or put them back",
    ),
    "label simulate": Command(
        "configs.rounds:SimulateConfig",
        "cli.commands:simulate_labels",
        "label as simulated people, to try a project out",
    ),
    "label backup": Command(
        "configs.label:BackupConfig", "apps.label.backups:back_up", "back a project up, also while people label"
    ),
    "label restore": Command(
        "configs.label:RestoreConfig",
        "apps.label.backups:restore",
        "put a damaged project right, from a backup and all that can be read",
    ),
    "runs": Command(
        "configs.tools:RunsConfig", "cli.commands:show_runs", "list runs: their state, step and last metric"
    ),
    "track": Command(
        "configs.tracking:TrackConfig",
        "cli.commands:track",
        "send a run's metrics to a tracker: wandb, trackio, mlflow, swanlab",
    ),
    "push": Command(
        "configs.tools:PushConfig", "cli.commands:push", "upload a run's model to the Hugging Face Hub, with a card"
    ),
    "report": Command(
        "configs.report:ReportConfig",
        "cli.commands:report_runs",
        "a page about runs: curves, lineage, alarms, each token's numbers",
    ),
    "look": Command("configs.report:LookConfig", "apps.report.terminal:look", "show a run's responses token by token"),
    "watch": Command(
        "configs.report:WatchConfig", "apps.report.watch:watch", "serve the page of a run while it trains"
    ),
    "chat": Command("configs.tools:ChatConfig", "cli.commands:chat", "talk to a model in the terminal"),
    "course": Command(
        "configs.course:CourseConfig",
        "apps.course.commands:show_lessons",
        "lessons that run as notebooks",
    ),
    "course start": Command(
        "configs.course:CourseStartConfig",
        "apps.course.commands:start",
        "write a lesson into this folder as a notebook",
    ),
    "course check": Command(
        "configs.course:CourseCheckConfig",
        "apps.course.commands:check",
        "check the exercises of a lesson's notebook here",
    ),
}
GROUPS = {
    "evaluate": ("measure", "measure one thing at a time"),
    "plan": ("trainer", "plan the memory of a run: of a YAML file, or of a trainer's flags"),
    "doctor": ("trainer", "examine a run (heedful doctor FILE.yaml) or a device (--device cuda)"),
    "label": ("command", "have people label, in a project"),
    "course": ("command", "learn from lessons that run as notebooks"),
}
"""Commands of two words, by the first: the name of the second, and a summary. A first word that is itself a command, such as
course, is run if no second word follows."""
SHOWN = {
    "first steps": ("demo", "sft", "reward", "ppo", "grpo", "dpo", "evaluate", "chat", "course"),
    "more ways to train": ("a2c", "online-dpo", "kto", "critic"),
    "before a run": ("migrate", "doctor", "exam", "choose", "plan"),
    "runs": ("runs", "report", "look", "watch", "track", "push"),
    "people who label": ("label", "sample", "round"),
    "models and servers": ("merge", "tiny", "serve-reward", "serve-policy"),
}
"""Commands and first words of commands, as ``heedful --help`` shows them."""
