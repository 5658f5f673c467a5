"""heedful migrate: what a script or a file of another library becomes here."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
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
    source, arguments = read_source(config.file), _with_file(read_arguments(config.arguments))
    tables = ("trl-step", "trl") if ".step(" in source else ("trl", "trl-step")  # both have a PPOConfig
    script = Script(config.file, source, arguments, partial(_field_default, tables, config.version))
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
        files["ppo.yaml"] = _finish(run, config.file, config.file.stem)
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
        run_name = f"{config.file.stem}-{Path(name).stem}" if runs else config.file.stem
        files[name] = _finish(run, config.file, run_name)
        runs.append((trainer.short_name, run))
        done.append(f"`heedful {run.command} {output / name}`")
    if script.is_cut:
        runs[0][1].rows.append(
            Row("question", "the script", "", "", "It is too long: what comes last in it was not read.")
        )
    for flag in unused_flags(arguments, script.left_over):
        unused = "No parser of the script takes this argument."
        runs[0][1].rows.append(Row("question", f"--{flag}", str(arguments[flag]), "", unused))
    return _add_report(config, files, done, runs)


def _migrate_yaml(config: MigrateConfig, output: Path) -> tuple[dict[str, str], list[str]]:
    run = _translation(config, llamafactory.read_origin(config.file))
    llamafactory.translate_groups(run, config.file)
    name = f"{run.command}.yaml"
    files = {name: _finish(run, config.file, config.file.stem)}
    return _add_report(config, files, [f"`heedful {run.command} {output / name}`"], [(f"stage {run.trainer}", run)])


def _translation(config: MigrateConfig, origin: Origin) -> Translation:
    return Translation(origin, _version(peers()[origin.peer], origin, config.version), config.processes)


def _finish(run: Translation, file: Path, run_name: str) -> str:
    """Translate the settings that are left. Returns heedful's YAML file, in which open questions are comments."""
    run.translate_by_table()
    run.add_remaining_rows()
    lines = [f"# heedful {run.command}, from {file.name} ({run.peer.title}, version {run.version}); see {REPORT}"]
    for row in run.rows:
        if row.fate == "question" and row.ours:
            value = " ".join(row.value.split())
            line = f"# {row.ours}" + (f"  # {value}" if value else "")
            lines.append(line if len(line) < LONGEST_LINE else f"{line[:LONGEST_LINE]} ...")
    _ask_if_refused(run)
    written = {name: run.written[name] for name in run.setting_types if name in run.written}
    written.setdefault("output", f"runs/{run_name}")
    return "\n".join(lines) + "\n" + yaml.safe_dump(written, allow_unicode=True, width=1000, sort_keys=False)


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


def _field_default(tables: Sequence[str], version: str | None, class_name: str, name: str) -> list[Any]:
    """The default of a field of one of TRL's dataclasses, as a list of one; an empty one if no table has the field.

    Of the version that was asked for, if the table has it; otherwise of its newest.
    """
    class_name = class_name.replace("PPOv2", "PPO")
    for peer in (peers()[table] for table in tables):
        inherited = [one.config for one in peer.trainers.values() if class_name in one.config]
        for section in (class_name, *(name for names in inherited for name in names)):
            if name in peer.sections.get(section, {}):
                is_known = version is not None and _two_numbers(version) in peer.versions
                return [peer.sections[section][name].default(version if version and is_known else peer.versions[-1])]
    return []


def _two_numbers(version: str) -> str:
    """Versions in the tables have two numbers: 0.9 of 0.9.6."""
    return ".".join(version.split(".")[:2])


def _version(peer: Peer, origin: Origin, asked: str | None) -> str:
    """The version that is meant. If nothing is said, the newest one that has the trainer and most of the file's settings."""
    known = [one for one in peer.versions if peer.trainers[origin.trainer].is_in(one)]
    if asked is None:
        table = peer.settings(origin.trainer)
        given = [table[name] for name in origin.given if name in table]
        return origin.version or max(reversed(known), key=lambda one: sum(setting.is_in(one) for setting in given))
    if _two_numbers(asked) not in known:
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
    """A command line as names and values: ``--name value``, also several, ``--name=value``, ``--switch``.

    ``--no_switch`` is also ``switch`` with False, as `HfArgumentParser` has it. Raises ConfigError.
    """
    try:
        parts = shlex.split(words)
    except ValueError as error:
        raise ConfigError(f"--arguments {words!r}: {error}") from None
    values: dict[str, list[Any]] = {}
    name = ""
    for part in parts:
        if part.startswith("-") and isinstance(_scalar(part), str) and part.strip("-"):
            name, has_value, value = part.lstrip("-").partition("=")
            name = name.replace("-", "_")
            values[name] = [_scalar(value)] if has_value else []
        elif not name:
            raise ConfigError(f"--arguments: {part!r} is not the value of a flag; flags start with --")
        else:
            values[name].append(_scalar(part))
    found: dict[str, Any] = {}
    for name, given in values.items():
        found[name] = True if not given else given[0] if len(given) == 1 else given
        if not given and name.startswith("no_"):
            found[name.removeprefix("no_")] = False
    return found


def _with_file(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, and those of the YAML file that ``--config`` names, as TRL's parser reads it."""
    named = arguments.get("config")
    if not isinstance(named, str) or not named.endswith((".yaml", ".yml")) or not Path(named).is_file():
        return arguments
    return read_settings(Path(named)) | {name: value for name, value in arguments.items() if name != "config"}


def unused_flags(arguments: Mapping[str, Any], left_over: Mapping[str, Any]) -> list[str]:
    """Flags that no parser took: of ``--no_switch``, neither this nor ``switch``."""

    def is_used(name: str) -> bool:
        return name in arguments and name not in left_over

    return [name for name in left_over if not is_used(name.removeprefix("no_")) and not is_used(f"no_{name}")]


def _scalar(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return {"true": True, "false": False, "none": None}.get(word.lower(), word)


def _ask_if_refused(run: Translation) -> None:
    """Report a question if heedful would refuse the settings."""
    needed = {"model": "M", "data": "D", "output": Path("O"), "rewards": ("rule:repetition",)}
    values = {name: given for name, given in needed.items() if name in run.setting_types}
    values |= {name: tuple(value) if isinstance(value, list) else value for name, value in run.written.items()}
    try:
        with answering_command():
            run.config_class(**values)
    except ConfigError as error:
        run.rows.append(
            Row("question", "the settings together", "", "", f"heedful {run.command} refuses these settings: {error}")
        )
