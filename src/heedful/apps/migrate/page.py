"""heedful migrate: what a script or a file of another library becomes here."""

import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from heedful.apps.migrate import llamafactory, trl_step, trl_trainers
from heedful.apps.migrate.report import report
from heedful.apps.migrate.script import Script
from heedful.apps.migrate.source import read_settings, read_source
from heedful.apps.migrate.translate import Origin, Row, Translation
from heedful.configs.migrate import MigrateConfig
from heedful.configs.peers import Peer, peers
from heedful.configs.settings import answering_command
from heedful.configs.trainers import TRAINERS
from heedful.display import counted, say
from heedful.errors import ConfigError
from heedful.files import check_output_folder, complete_or_absent

REPORT = "migration.md"
LONGEST_LINE = 300
"""Characters of an open question in a file of settings."""


def migrate(config: MigrateConfig) -> Path:
    """Write what a file of another library becomes in heedful, and say what became of its settings.

    Returns the folder.

    Raises ConfigError for a file that is none of these, or a folder that cannot be written.
    """
    output = config.output or Path(f"{config.file.stem}-heedful")
    files, summary = (_migrate_yaml if config.file.suffix in (".yaml", ".yml") else _migrate_script)(config, output)
    ours = {*files, *(f"{name}.yaml" for name in TRAINERS), trl_trainers.REWARDS, f"{config.file.stem}.py"}
    check_output_folder(output, "heedful migrate", overwrite=config.overwrite, ours=lambda: ours)
    with complete_or_absent(output) as folder:
        for name, content in files.items():
            (folder / name).write_text(content, encoding="utf-8")
    say("\n".join([*summary, f"report: {output / REPORT}"]))
    return output


def _migrate_script(config: MigrateConfig, output: Path) -> tuple[dict[str, str], list[str]]:
    script = Script(config.file, read_source(config.file), _with_file(read_arguments(config.arguments)), _default)
    files: dict[str, str] = {}
    done: list[str] = []
    runs: list[tuple[str, Translation]] = []
    steps, trainers = trl_step.step_calls(script), trl_trainers.trainers(script)
    if script.is_cut and not steps and not trainers:
        raise ConfigError(
            f"{config.file} is too long to be followed to a trainer; leave out what is not of the training"
        )
    if not steps and not trainers:
        raise ConfigError(_nothing_found(config.file, script))
    if steps:
        run = _translation(config, trl_step.read_origin(steps[0].owner, script))
        trl_step.translate_groups(run, steps[0].owner, steps[0])
        if config.file.suffix == ".ipynb":
            done.append("Lines of the notebook that begin with % or ! are comments; `display` is not there.")
        name = f"{config.file.stem}.py"
        files[name], missing = trl_step.with_compat_imports(script)
        run.rows[:0] = missing
        files["ppo.yaml"] = _yaml_of_all(run, config.file)
        runs.append(("PPOTrainer with .step", run))
        done += [
            f"`python {output / name}` runs the script on heedful.compat.trl, whose numbers are TRL 0.11's. Its "
            "imports are changed, and nothing else; docs/compat.md says what is different.",
            f"`heedful ppo {output / 'ppo.yaml'}` is a run of heedful's own, which resumes, evaluates and has a report. "
            "Its numbers are heedful's: what differs is below.",
        ]
    if script.parses and not config.arguments:
        done.append(
            "The script reads a command line, and none was given: where it says nothing, its defaults are below. With "
            '`--arguments="--learning_rate 1e-5"` and so on heedful migrate takes them.'
        )
    for number, trainer in enumerate(trainers, 1):
        run = _translation(config, trl_trainers.read_origin(trainer, script))
        trl_trainers.translate_groups(run, trainer, script, files, output)
        name = f"{run.command}.yaml" if f"{run.command}.yaml" not in files else f"{run.command}-{number}.yaml"
        files[name] = _yaml_of_all(run, config.file)
        runs.append((trainer.short_name, run))
        done.append(f"`heedful {run.command} {output / name}`")
    if script.is_cut:
        runs[0][1].rows.append(
            Row("question", "the script", "", "", "It is too long: what comes last in it was not read.")
        )
    for one, value in script.left_over.items():
        runs[0][1].rows.append(
            Row("question", f"--{one}", str(value), "", "No parser of the script takes this argument.")
        )
    return _add_report(config, files, done, runs)


def _migrate_yaml(config: MigrateConfig, output: Path) -> tuple[dict[str, str], list[str]]:
    run = _translation(config, llamafactory.read_origin(config.file))
    llamafactory.translate_groups(run, config.file)
    name = f"{run.command}.yaml"
    files = {name: _yaml_of_all(run, config.file)}
    return _add_report(config, files, [f"`heedful {run.command} {output / name}`"], [(f"stage {run.trainer}", run)])


def _translation(config: MigrateConfig, origin: Origin) -> Translation:
    return Translation(origin, _version(peers()[origin.peer], origin, config.version), config.processes)


def _yaml_of_all(run: Translation, origin: Path) -> str:
    """heedful's file of a run of which the special settings are read."""
    run.translate_by_table()
    run.add_remaining_rows()
    return yaml_of(run, origin)


def _add_report(
    config: MigrateConfig, files: dict[str, str], done: list[str], runs: list[tuple[str, Translation]]
) -> tuple[dict[str, str], list[str]]:
    files[REPORT] = report(f"{config.file.name} in heedful", done, runs)
    summary = [f"{config.file}: {runs[0][1].peer.title}, read as version {runs[0][1].version}"]
    for heading, run in runs:
        count = Counter(row.fate for row in run.rows)
        summary.append(
            f"{heading}: {count['kept']} kept, {counted(count['default'], 'default')} written, {count['differs']} with "
            f"another meaning, {count['lost']} not kept, {counted(count['question'], 'question')}"
        )
        summary += [f"  ? {row.name}: {row.note}" for row in run.rows if row.fate == "question"]
    return files, [*summary, *(one.replace("`", "") for one in done)]


def _default(of: str, name: str) -> list[Any]:
    """The default of a field of one of TRL's dataclasses, of the newest version, as a list of one."""
    of = of.replace("PPOv2", "PPO")
    for peer in (peers()["trl"], peers()["trl-step"]):
        inherited = [one.config for one in peer.trainers.values() if of in one.config]
        for section in (of, *(name for names in inherited for name in names)):
            if name in peer.sections.get(section, {}):
                return [peer.sections[section][name].default(peer.versions[-1])]
    return []


def _version(peer: Peer, origin: Origin, asked: str | None) -> str:
    """The version that is meant. If nothing is said, the newest one that has the trainer and most of the file's settings."""
    known = [one for one in peer.versions if peer.trainers[origin.trainer].is_in(one)]
    if asked is None:
        table = peer.settings(origin.trainer)
        given = [table[name] for name in origin.given if name in table]
        return origin.version or max(reversed(known), key=lambda one: sum(setting.is_in(one) for setting in given))
    if ".".join(asked.split(".")[:2]) not in known:
        name = peer.trainers[origin.trainer].name or origin.trainer
        raise ConfigError(f"--version {asked}: {peer.title} has {name} in {', '.join(known)}")
    return asked


def _nothing_found(file: Path, script: Script) -> str:
    made = [one for one in script.calls if one.short_name.endswith("Trainer") and not one.name.startswith(".")]
    seen = ", ".join(f"{one.short_name} (line {one.line})" for one in made[:5])
    return (
        f"{file}: it makes no trainer that heedful knows{f'; it makes {seen}' if seen else ''}. There are PPOTrainer with "
        f".step, and {', '.join(sorted(peers()['trl'].trainers))}, imported from trl"
    )


def read_arguments(words: str) -> dict[str, Any]:
    """A command line as names and values: ``--name value``, also several, ``--name=value``, ``--switch``, ``--no_switch``."""
    try:
        parts = shlex.split(words)
    except ValueError as error:
        raise ConfigError(f"--arguments {words!r}: {error}") from None
    found: dict[str, Any] = {}
    name = ""
    for part in parts:
        if part.startswith("--") and len(part) > 2:
            name, has_value, value = part[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = _scalar(value) if has_value else True
            if not has_value and name.startswith("no_"):
                found[name.removeprefix("no_")] = False
        elif not name:
            raise ConfigError(f"--arguments: {part!r} is not the value of a flag; flags start with --")
        else:
            before = found[name]
            found[name] = (
                _scalar(part)
                if before is True
                else [*(before if isinstance(before, list) else [before]), _scalar(part)]
            )
    return found


def _with_file(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, and those of the YAML file that ``--config`` names, as TRL's parser reads it."""
    named = arguments.get("config")
    if not isinstance(named, str) or not named.endswith((".yaml", ".yml")) or not Path(named).is_file():
        return arguments
    return read_settings(Path(named)) | {name: value for name, value in arguments.items() if name != "config"}


def _scalar(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return {"true": True, "false": False, "none": None}.get(word.lower(), word)


def yaml_of(run: Translation, origin: Path) -> str:
    """heedful's settings as a file, with the open questions as comments; what heedful refuses becomes a row."""
    open_ones = [row for row in run.rows if row.fate == "question"]
    lines = [f"# heedful {run.command}, from {origin.name} ({run.peer.title}, version {run.version}); see {REPORT}"]
    asked = [f"# {row.ours}  # {' '.join(row.value.split())}".rstrip("# ") for row in open_ones if row.ours]
    lines += list(dict.fromkeys(one if len(one) < LONGEST_LINE else f"{one[:LONGEST_LINE]} ..." for one in asked))
    written = {name: run.written[name] for name in run.setting_types if name in run.written}
    if "output" not in written:
        written["output"] = f"runs/{origin.stem}"
    _ask_if_refused(run)
    return "\n".join(lines) + "\n" + yaml.safe_dump(written, allow_unicode=True, width=1000, sort_keys=False)


def _ask_if_refused(run: Translation) -> None:
    """A row if heedful would refuse the settings."""
    needed = {"model": "M", "data": "D", "output": Path("O"), "rewards": ("rule:repetition",)}
    values = {name: given for name, given in needed.items() if name in run.setting_types}
    values |= {name: tuple(value) if isinstance(value, list) else value for name, value in run.written.items()}
    try:
        with answering_command():
            run.config_class(**values)
    except ConfigError as error:
        run.rows.append(Row("question", "all of it", "", "", f"heedful {run.command} refuses these settings: {error}"))
