"""Push a run's model to the Hugging Face Hub: the model's files, a card and learning curves, nothing else of the run.

The card is written from the run's folder, without local paths and without secrets.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import yaml

from heedful import plot
from heedful.configs.settings import PATHS, REWARDS
from heedful.configs.tools import REPOSITORY, PushConfig
from heedful.display import counted
from heedful.errors import CheckpointError, ConfigError, DataError, HeedfulError, MachineError
from heedful.files import blocking_file, complete_or_absent, read_object, to_json
from heedful.redact import holds_secret, redact
from heedful.user_code import is_named

ENDINGS = (".safetensors", ".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
"""Names of a model's files."""
CLEANED = ("config.json", "generation_config.json", "adapter_config.json", "tokenizer_config.json", "heedful.json")
"""Files from which local names are removed before pushing."""
VALUE_HEAD = Path("value_head", "value_head.safetensors")
"""As in `heedful.models.save`, which loads torch."""
TEMPLATE = Path(__file__).with_name("card.md.jinja")
MODEL_SETTINGS = ("model", "reference", "value_model")
DATA_SETTINGS = ("data", "eval_data", "ptx_data", "offset_data")
WITHOUT_EFFECT = ("track", "track_project", "rollouts", "memory_check", "allow")
"""Settings with no effect on the model."""
ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s'\"<>][^\s'\"<>]*|(?<![\w.~-])(?:file://)?(?:/[^/\s:'\",]+){2,}", re.I)
"""Matches an absolute path in a text, or a URL (so that a URL is not taken for a path)."""
MOST_STAGES = 20
"""Most runs followed back to the start of training."""
REMEDY = "restore it, or name the folder of another run"
REFUSALS = {
    401: "run `hf auth login`, or set HF_TOKEN",
    403: "your token may not write there; use one with the right to write",
    404: "there is no such repository that you may write to; check ORG and your token",
}
"""How to fix a refusal of the Hub, by its status."""

Files = Mapping[str, Path | bytes]


def push(config: PushConfig) -> list[str]:
    """Upload a run's model with its card, or write the files locally. Returns messages for the user.

    The run is not changed. The upload is one commit: all files or none.

    Raises ConfigError, CheckpointError and DataError before anything is sent; ConfigError if the Hub refuses; MachineError
    if it cannot be reached.
    """
    files, stays = outgoing(config)
    said = [f"not pushed: {', '.join(stays)}"] if stays else []
    if config.dry_run:
        write_folder(files, config.dry_run_folder)
        return [*said, f"the files for {config.to} are in {config.dry_run_folder}: {', '.join(sorted(files))}"]
    return [*said, f"{counted(len(files), 'file')} in {_upload(config, files)}"]


def outgoing(config: PushConfig) -> tuple[dict[str, Path | bytes], list[str]]:
    """The files to push, by their names in the repository, and the names of files beside the model that are not pushed.

    Raises CheckpointError if the run has no such model, ConfigError, DataError.
    """
    folder, run = config.model_folder, config.run
    has_adapters = (folder / "adapter_config.json").is_file()
    if not has_adapters and not (folder / "config.json").is_file():
        raise CheckpointError(_why_not(config))
    stages, base = lineage(run)
    base = config.base_model or (_base_of_adapters(config) if has_adapters else base)
    files: dict[str, Path | bytes] = {}
    stays, cleaned = [], {}
    beside = list(folder.iterdir())
    if stages[-1] == "critic":
        if not (folder / VALUE_HEAD).is_file():
            raise CheckpointError(f"{folder} is a critic without {VALUE_HEAD}; train it again (heedful critic)")
        files[VALUE_HEAD.as_posix()] = folder / VALUE_HEAD
        beside = [path for path in beside if path.name != VALUE_HEAD.parts[0]]
    for path in sorted(beside):
        if not path.is_file() or path.is_symlink() or path.suffix not in ENDINGS or path.name.startswith("."):
            stays.append(path.name + "/" * path.is_dir())
            continue
        files[path.name] = path
        if path.name in CLEANED:
            content = cleaned[path.name] = _cleaned(path, base)
            files[path.name] = (to_json(content, indent=2) + "\n").encode()
        elif path.suffix == ".jinja":
            _refuse_secrets(path, path.read_text(encoding="utf-8", errors="replace"))
    curves = _curves(run)
    if curves is not None:
        files["curves.png"] = curves
    text = card(
        config,
        base=base,
        stages=stages,
        has_curves=curves is not None,
        has_adapters=has_adapters,
        on_adapters=has_adapters and _is_adapter(_base_in(folder)),
        has_template="chat_template.jinja" in files
        or bool(cleaned.get("tokenizer_config.json", {}).get("chat_template")),
        reads="reads" in cleaned.get("heedful.json", {}),
    )
    files["README.md"] = text.encode("utf-8", "backslashreplace")
    return files, stays


def write_folder(files: Files, folder: Path) -> None:
    """Write the files to push. Raises ConfigError if the folder exists."""
    if folder.exists() or blocking_file(folder) is not None:
        raise ConfigError(f"--folder {folder} exists or cannot be created; name another, or remove it")
    with complete_or_absent(folder) as partial:
        for name, content in files.items():
            (partial / name).parent.mkdir(exist_ok=True)
            if isinstance(content, bytes):
                (partial / name).write_bytes(content)
            else:
                shutil.copyfile(content, partial / name)


def _why_not(config: PushConfig) -> str:
    folder = config.model_folder
    if not (config.run / "config.yaml").is_file():
        return f"{config.run} is not a run: it has no config.yaml; name the folder of a run, such as runs/ppo"
    other = config.run / ("final" if config.best else "best")
    there = f"; {other} exists ({'leave out' if config.best else 'add'} --best)" if other.is_dir() else ""
    return f"{folder} has no model: the run is not finished, or saved none{there}"


def _base_of_adapters(config: PushConfig) -> str:
    """The base model of adapters, as recorded in them. Raises ConfigError if it is not on the Hub.

    Training may have started from another model: a run in between may have changed all weights.
    """
    folder = config.model_folder
    base = _base_in(folder)
    if _is_adapter(base):
        raise ConfigError(
            f"{folder} has adapters whose base is itself adapters ({base}), which other tools ignore; push a plain "
            f"model (heedful merge --adapter {folder}), or merge the base, push it, and name it with --base-model ORG/NAME"
        )
    hashes = _object(config.run / "environment.json").get("models") or {}
    if not is_on_hub(base) or hashes.get(base) is not None:
        raise ConfigError(
            f"{folder} has adapters whose base model is not known on the Hub, so they could not be loaded; name it with "
            "--base-model ORG/NAME if it is there, or push a plain model (heedful merge)"
        )
    return str(base)


def _base_in(folder: Path) -> Any:
    remedy = "restore it, or train the model again"
    return read_object(folder / "adapter_config.json", remedy).get("base_model_name_or_path")


def _is_adapter(base: Any) -> bool:
    """Whether the base of adapters is itself a folder of adapters."""
    return (Path(str(base)) / "adapter_config.json").is_file()


def _cleaned(path: Path, base: str | None) -> dict[str, Any]:
    """The content of a JSON file without local names, with the base of adapters. Raises ConfigError if it has a secret."""
    content = read_object(path, "restore it, or train the model again")
    for name in ("_name_or_path", "name_or_path", "tokenizer_file"):
        content.pop(name, None)
    if path.name == "adapter_config.json":
        content["base_model_name_or_path"] = base
    _refuse_secrets(path, content)
    return content


def _refuse_secrets(path: Path, content: Any) -> None:
    """Raise ConfigError if a string in a JSON value holds a secret. Keys are none: a tokenizer has an eos_token."""
    if isinstance(content, str) and holds_secret(content):
        raise ConfigError(f"{path} seems to contain a secret, so nothing was pushed; remove it")
    if isinstance(content, dict | list):
        for one in content.values() if isinstance(content, dict) else content:
            _refuse_secrets(path, one)


def _curves(run: Path) -> bytes | None:
    """The learning curves as PNG; None if the run logged no metrics."""
    try:
        drawn = plot.curves(run)
    except (CheckpointError, DataError):
        return None
    content = BytesIO()
    drawn.savefig(content, format="png", dpi=110)
    return content.getvalue()


def _upload(config: PushConfig, files: Files) -> str:
    """One commit of all files. (`upload_folder` would need a copy of the weights beside the cleaned files.)"""
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    if get_token() is None:
        raise ConfigError(
            "you are not logged in to the Hub: run `hf auth login`, or set HF_TOKEN (with the right to write)"
        )
    api = HfApi(library_name="heedful")
    operations = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=content if isinstance(content, bytes) else str(content))
        for name, content in files.items()
    ]
    try:
        address = api.create_repo(config.to, private=config.private, exist_ok=True)
        if config.private and api.repo_info(config.to).private is False:
            raise ConfigError(f"{config.to} exists and is public; add --no-private to push to it, or name another")
        api.create_commit(config.to, operations, commit_message=config.message)
    except HeedfulError:
        raise
    except Exception as error:  # from the Hub's client, its HTTP library, or the system
        raise _refusal(config, error) from error
    return str(address)


def _refusal(config: PushConfig, error: Exception) -> HeedfulError:
    """The error for a refused or failed upload."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    first = redact(next(iter(str(error).strip().splitlines()), type(error).__name__))
    kept = f"{config.run} is unchanged ({first:.200})"
    if status is not None and 400 <= status < 500:
        remedy = REFUSALS.get(status, "see its message")
        return ConfigError(f"the Hub refuses {config.to} ({status}): {remedy}; {kept}")
    if type(error).__name__ == "OfflineModeIsEnabled":
        return ConfigError(f"HF_HUB_OFFLINE is set, so nothing can be sent: unset it, or add --dry-run; {kept}")
    where = redact(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    what = f"failed ({status})" if status else "cannot be reached"
    return MachineError(f"the Hub at {where} {what}; try again later: {kept}")


def card(config: PushConfig, *, base: str | None, stages: Sequence[str], **names: Any) -> str:
    """README.md: metadata, usage, results, limits, and how the model was made.

    Args:
        config: the repository, the licence, and results to show.
        base: the model on the Hub that training started from; None if it is not on the Hub.
        stages: see `lineage`.
        names: facts about the files, by their names in the template.

    Raises CheckpointError if the folder is not a run, DataError for a file that is not a result.
    """
    from huggingface_hub import ModelCard, ModelCardData

    settings = _settings(config.run)
    environment, summary = (_object(config.run / name) for name in ("environment.json", "summary.json"))
    results = {path.name: _result(path) for path in config.results}
    hashes = {kind: environment.get(kind) or {} for kind in ("models", "data")}
    models = dict.fromkeys(filter(None, map(settings.get, MODEL_SETTINGS))) | hashes["models"]
    data = dict.fromkeys(filter(None, map(settings.get, DATA_SETTINGS))) | hashes["data"]
    on_hub = [name.partition(":")[0] for name in data if not hashes["data"].get(name)]
    algorithm = stages[-1].partition(" ")[0]
    is_reward, is_critic = algorithm == "reward", algorithm == "critic"
    metadata = ModelCardData(
        license=config.license,
        library_name="peft" if names["has_adapters"] else "transformers",
        pipeline_tag="text-classification" if is_reward else None if is_critic else "text-generation",
        base_model=base,
        base_model_relation=("adapter" if names["has_adapters"] else "finetune") if base else None,
        datasets=[name for name in on_hub if is_on_hub(name)] or None,
        language=list(config.language) or None,
        tags=["heedful", algorithm, *(["reward-model"] if is_reward else ["value-model"] if is_critic else [])],
    )
    shown = {name: value for name, value in settings.items() if name not in WITHOUT_EFFECT}
    text = ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        push=config,
        base=base,
        stages=stages,
        algorithm=algorithm,
        settings=settings,
        environment=environment,
        summary=summary,
        results=results,
        models=models,
        data={name: digest for name, digest in data.items() if digest != "none"},  # no function was given
        number=format_number,
        config_yaml=yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=1000),
        **names,
    )
    used = [path for given in (settings, *(one["settings"] for one in results.values())) for path in paths_in(given)]
    return public(f"{text}\n", [*used, *hashes["models"], *hashes["data"]])


def format_number(value: Any) -> str:
    """A number or an interval of numbers, formatted for a table of the card; empty for anything else."""
    if isinstance(value, list | tuple):
        numbers = [format_number(one) for one in value]
        return " to ".join(numbers) if all(numbers) else ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def paths_in(settings: Mapping[str, Any]) -> Iterator[str]:
    """The absolute paths in settings, which may contain spaces; also those in ``model:PATH``."""
    for name, value in settings.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            kind, _, rest = str(one).partition(":")
            if name in REWARDS and kind in ("model", "python"):
                path = rest if kind == "model" else rest.rpartition(":")[0]
            else:
                path = str(one) if name in PATHS else ""
            if path.startswith("/"):
                yield path


def public(text: str, paths: Sequence[str] = ()) -> str:
    """A text without secrets, with each absolute path cut to its last two parts.

    Args:
        text: such as a card.
        paths: known paths. Others are found in the text, where a path ends at a space. URLs stay.
    """
    text = redact(text)
    for path in sorted({redact(path) for path in paths if path.count("/") > 1}, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.~/-]){re.escape(path)}(?![\w-])", lambda found: _end_of(found[0]), text)
    return ABSOLUTE.sub(lambda found: _end_of(found[0]), text)


def _end_of(path: str) -> str:
    """The last two parts of a path; a URL unchanged."""
    path = path.removeprefix("file://")
    return path if "://" in path else "/".join(path.rstrip("/").split("/")[-2:]).lstrip("/")


def is_on_hub(name: Any) -> bool:
    """Whether a setting names something on the Hub: ORG/NAME, and not a local path."""
    return isinstance(name, str) and REPOSITORY.fullmatch(name) is not None and not Path(name).exists()


def lineage(run: Path) -> tuple[list[str], str | None]:
    """The algorithms of the runs that led to a run, this one last, as far as they are on this machine, and the Hub model
    that the first of them started from, if it is known. A loss other than the default is appended (``dpo simpo``; ``dpo own``
    for the user's).
    """
    stages: list[str] = []
    for _ in range(MOST_STAGES):
        environment, settings = _object(run / "environment.json"), _settings(run)
        command = str(environment.get("command", "unknown")).removeprefix("heedful ")
        model = _start_of_critic(settings) if command == "critic" else settings["model"]
        loss = settings.get("loss", "sigmoid")
        loss = "own" if is_named(loss) else loss
        stages.insert(0, command if loss == "sigmoid" else f"{command} {loss}")
        if is_on_hub(model) and model not in (environment.get("models") or {}):
            return stages, model
        run = Path(model).parent
        if Path(model).name not in ("final", "best") or not (run / "config.yaml").is_file():
            break
    return stages, None


def _start_of_critic(settings: Mapping[str, Any]) -> str:
    """The model that a critic's network was at first."""
    if settings.get("critic") == "reward":
        return next(one.removeprefix("model:") for one in settings["rewards"] if one.startswith("model:"))
    return str(settings.get("value_model") or settings["model"])


def _settings(run: Path) -> dict[str, Any]:
    return read_object(run / "config.yaml", REMEDY, needs=["model"])


def _object(path: Path) -> dict[str, Any]:
    """The content of a run's file; empty if it was not written yet."""
    return read_object(path, REMEDY) if path.exists() else {}


def _result(path: Path) -> dict[str, Any]:
    remedy = "--results takes files written by heedful evaluate --output"
    content = read_object(path, remedy, needs=["settings"], error=DataError)
    if not isinstance(content["settings"], dict):
        raise DataError(f"{path}: settings must be an object; {remedy}")
    return content
