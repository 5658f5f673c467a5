"""Push a run's model to the Hugging Face Hub: the model's files, a card and learning curves, nothing else of the run.

The card is written from the run's folder, without local paths and without secrets.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
READ_BY_PEOPLE = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer_config.json",
    "heedful.json",
)
"""Files checked before pushing: local names are removed, secrets are refused."""
TEMPLATES = ".jinja"
"""Extension of text written by people, which may hold secrets too."""
DAMAGED = "restore it, or train the model again"
"""How to fix an unusable model file."""
TEMPLATE = Path(__file__).with_name("card.md.jinja")
MODEL_SETTINGS = ("model", "reference", "value_model")
DATA_SETTINGS = ("data", "eval_data", "ptx_data", "offset_data")
OF_NO_INTEREST = ("track", "track_project", "track_offline", "rollouts", "memory_check", "allow")
"""Settings with no effect on the model."""
ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s'\"<>][^\s'\"<>]*|(?<![\w.~-])(?:file://)?(?:/[^/\s:'\",]+){2,}", re.I)
"""Matches an absolute path in a text, or a URL (so that a URL is not taken for a path)."""
MOST_GENERATIONS = 20
"""Most runs followed back to the start of training."""
REMEDY = "restore it, or name the folder of another run"

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
    folder = config.model_folder
    if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        raise CheckpointError(_why_not(config))
    facts = read_facts(config.run, config.results)
    files: dict[str, Path | bytes] = {}
    stays = []
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.is_symlink() and path.suffix in ENDINGS and not path.name.startswith("."):
            files[path.name] = path
        else:
            stays.append(path.name + "/" * path.is_dir())
    if "adapter_config.json" in files:
        facts = replace(facts, base_model=config.base_model or _base_of_adapters(folder, facts))
    for name in READ_BY_PEOPLE:
        if name in files:
            files[name] = _cleaned(folder / name, facts.base_model)
    for name in files:
        if name.endswith(TEMPLATES):
            _refuse_secrets(folder / name, [(folder / name).read_text(encoding="utf-8", errors="replace")])
    curves = _curves(config.run)
    if curves is not None:
        files["curves.png"] = curves
    tokenizer = files.get("tokenizer_config.json", b"{}")
    assert isinstance(tokenizer, bytes)
    has_adapters = "adapter_config.json" in files
    form = Form(
        has_adapters=has_adapters,
        on_adapters=has_adapters and _is_adapter(_base_in(folder)),
        has_template="chat_template.jinja" in files or bool(json.loads(tokenizer).get("chat_template")),
        reads_pairs=facts.algorithm == "reward" and not _says_reading(files),
    )
    text = card(config, facts, form, has_curves=curves is not None)
    files["README.md"] = text.encode("utf-8", "backslashreplace")
    return files, stays


def _says_reading(files: Files) -> bool:
    """Whether a reward model's facts record its input format; an encoder needs none."""
    facts = files.get("heedful.json", b"{}")
    return isinstance(facts, bytes) and "reads" in json.loads(facts)


def write_folder(files: Files, folder: Path) -> None:
    """Write the files to push. Raises ConfigError if the folder exists."""
    if folder.exists() or blocking_file(folder) is not None:
        raise ConfigError(f"--folder {folder} exists or cannot be created; name another, or remove it")
    with complete_or_absent(folder) as partial:
        for name, content in files.items():
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


def _base_of_adapters(folder: Path, facts: "RunFacts") -> str:
    """The base model of adapters, as recorded in them. Raises ConfigError if it is not on the Hub.

    Training may have started from another model: a run in between may have changed all weights.
    """
    base = _base_in(folder)
    if _is_adapter(base):
        raise ConfigError(
            f"{folder} has adapters whose base is itself adapters ({base}), which other tools ignore; push a plain "
            f"model (heedful merge --adapter {folder}), or merge the base, push it, and name it with --base-model ORG/NAME"
        )
    local = {source.name for source in facts.models if source.sha256 is not None}
    if not is_on_hub(base) or base in local:
        raise ConfigError(
            f"{folder} has adapters whose base model is not known on the Hub, so they could not be loaded; name it with "
            "--base-model ORG/NAME if it is there, or push a plain model (heedful merge)"
        )
    return str(base)


def _base_in(folder: Path) -> Any:
    return read_object(folder / "adapter_config.json", DAMAGED).get("base_model_name_or_path")


def _is_adapter(base: Any) -> bool:
    """Whether the base of adapters is itself a folder of adapters."""
    return (Path(str(base)) / "adapter_config.json").is_file()


def _cleaned(path: Path, base: str | None) -> bytes:
    """A JSON file without local names, with the base of adapters. Raises ConfigError if it has a secret."""
    content = read_object(path, DAMAGED)
    for name in ("_name_or_path", "name_or_path", "tokenizer_file"):
        content.pop(name, None)
    if path.name == "adapter_config.json":
        content["base_model_name_or_path"] = base
    _refuse_secrets(path, _texts(content))  # values, not keys: a tokenizer has an eos_token
    return (to_json(content, indent=2) + "\n").encode()


def _refuse_secrets(path: Path, texts: Iterable[str]) -> None:
    if any(map(holds_secret, texts)):
        raise ConfigError(f"{path} seems to contain a secret, so nothing was pushed; remove it")


def _texts(content: Any) -> Iterator[str]:
    """Every string in a JSON value."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for one in content.values() if isinstance(content, dict) else content:
            yield from _texts(one)


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
    if status == 401:
        return ConfigError(f"the Hub does not know your token (401): run `hf auth login`, or set HF_TOKEN; {kept}")
    if status == 403:
        owner = config.to.partition("/")[0]
        return ConfigError(
            f"your token may not write to {config.to} (403): use one with the right to write to {owner}; {kept}"
        )
    if status == 404:
        return ConfigError(f"the Hub has no {config.to} that you may write to (404): check ORG and your token; {kept}")
    if status is not None and 400 <= status < 500:
        return ConfigError(f"the Hub refuses {config.to} ({status}); {kept}")
    if type(error).__name__ == "OfflineModeIsEnabled":
        return ConfigError(f"HF_HUB_OFFLINE is set, so nothing can be sent: unset it, or add --dry-run; {kept}")
    where = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    what = f"failed ({status})" if status else "cannot be reached"
    return MachineError(f"the Hub at {redact(where)} {what}; try again later: {kept}")


# The card --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CardSource:
    """A model or data file that a run was made from."""

    name: str
    sha256: str | None
    """Hash of its content; None if it was not a local file or folder."""


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run for its card."""

    algorithm: str
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    summary: Mapping[str, Any]
    results: Mapping[str, Mapping[str, Any]]
    """Results of ``heedful evaluate``, by file name."""
    models: tuple[CardSource, ...]
    data: tuple[CardSource, ...]
    others: tuple[CardSource, ...]
    """Sources other than data: reward code, a rubric, a chat template."""
    base_model: str | None
    """The model on the Hub that training started from; None if that model is not on the Hub."""
    stages: tuple[str, ...]
    """Algorithms of the runs that led to this one, this one last, as far as they are on this machine; a loss other than the
    default is appended (``dpo simpo``; ``dpo own`` for the user's)."""


@dataclass(frozen=True)
class Form:
    """Properties of a model that decide how it is loaded and prompted."""

    has_adapters: bool
    """LoRA adapters instead of a model."""
    on_adapters: bool
    """Their base is itself adapters."""
    has_template: bool
    """The tokenizer has a chat template."""
    reads_pairs: bool
    """A reward model that is an encoder, which reads prompt and response as two texts."""


def card(config: PushConfig, facts: RunFacts, form: Form, *, has_curves: bool) -> str:
    """README.md: YAML metadata, usage, results, limits, and how it was made.

    Args:
        config: the repository and the licence.
        facts: read from the run's folder.
        form: how the model is loaded.
        has_curves: whether curves.png is pushed too.
    """
    import jinja2
    from huggingface_hub import ModelCard, ModelCardData

    base = config.base_model or facts.base_model
    elsewhere = [source.name.partition(":")[0] for source in facts.data if source.sha256 is None]
    is_reward = facts.algorithm == "reward"
    metadata = ModelCardData(
        license=config.license,
        library_name="peft" if form.has_adapters else "transformers",
        pipeline_tag="text-classification" if is_reward else "text-generation",
        base_model=base,
        base_model_relation=("adapter" if form.has_adapters else "finetune") if base else None,
        datasets=[name for name in elsewhere if is_on_hub(name)] or None,
        language=list(config.language) or None,
        tags=["heedful", facts.algorithm, *(["reward-model"] if is_reward else [])],
    )
    settings = {name: value for name, value in facts.settings.items() if name not in OF_NO_INTEREST}
    page = jinja2.Environment(keep_trailing_newline=True)
    page.filters |= {"number": number, "cell": lambda text: text.replace("|", "\\|")}
    page.tests["a_number"] = is_number
    text = page.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        card_data=metadata.to_yaml(),
        push=config,
        run=facts,
        form=form,
        has_curves=has_curves,
        settings=yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=1000),
    )
    return str(ModelCard(text))


def is_number(value: Any) -> bool:
    """Whether a result of an evaluation is a number, or an interval of numbers."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(is_number, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(value: Any) -> str:
    """A number, formatted for a table of the card."""
    if value is None:
        return "not measured"
    if isinstance(value, list | tuple):
        return " to ".join(map(number, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def read_facts(run: Path, results: tuple[Path, ...]) -> RunFacts:
    """Read a finished run. Raises CheckpointError if the folder is not one, DataError for a file that is not a result."""
    settings = _settings(run)
    environment, summary = (_object(run / name) for name in ("environment.json", "summary.json"))
    measured = {path.name: _result(path) for path in results}
    hashes = {kind: environment.get(kind) or {} for kind in ("models", "data")}
    used = [path for given in (settings, *(one["settings"] for one in measured.values())) for path in paths_in(given)]
    paths = [*used, *hashes["models"], *hashes["data"]]
    stages, base = _lineage(run)
    data_names = [settings.get(name) for name in DATA_SETTINGS]
    others = {name: content for name, content in hashes["data"].items() if name not in data_names and content != "none"}
    return RunFacts(
        algorithm=str(environment.get("command", "")).removeprefix("heedful ") or summary.get("algorithm", "unknown"),
        settings=public(settings, paths),
        environment=public(environment, paths),
        summary=public(summary, paths),
        results={name: public(one, paths) for name, one in measured.items()},
        models=_sources(hashes["models"], [settings.get(name) for name in MODEL_SETTINGS], paths),
        data=_sources({name: hashes["data"].get(name) for name in data_names if name}, [], paths),
        others=_sources(others, [], paths),
        base_model=base,
        stages=stages,
    )


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


def public(content: Any, paths: Sequence[str] = ()) -> Any:
    """Content without secrets, with each absolute path cut to its last two parts.

    Args:
        content: text, or lists and mappings of it.
        paths: known paths. Others are found in the text, where a path ends at a space. URLs stay.
    """
    if isinstance(content, Mapping):
        return {public(key, paths): public(value, paths) for key, value in redact(content).items()}
    if isinstance(content, list | tuple):
        return [public(one, paths) for one in content]
    if isinstance(content, str):
        text = redact(content)
        for path in sorted({redact(path) for path in paths if path.count("/") > 1}, key=len, reverse=True):
            text = re.sub(rf"(?<![\w.~/-]){re.escape(path)}(?![\w-])", lambda found: _end_of(found[0]), text)
        return ABSOLUTE.sub(lambda found: _end_of(found[0]), text)
    return content


def _end_of(path: str) -> str:
    """The last two parts of a path; a URL unchanged."""
    path = path.removeprefix("file://")
    return path if "://" in path else "/".join(path.rstrip("/").split("/")[-2:]).lstrip("/")


def is_on_hub(name: Any) -> bool:
    """Whether a setting names something on the Hub: ORG/NAME, and not a local path."""
    return isinstance(name, str) and REPOSITORY.fullmatch(name) is not None and not Path(name).exists()


def _lineage(run: Path) -> tuple[tuple[str, ...], str | None]:
    """The algorithms that led to a run, and the Hub model that the first of them started from."""
    stages: list[str] = []
    for _ in range(MOST_GENERATIONS):
        environment = _object(run / "environment.json")
        settings = _settings(run)
        model = settings.get("model")
        command = str(environment.get("command", "")).removeprefix("heedful ")
        loss = settings.get("loss", "sigmoid")
        loss = "own" if is_named(loss) else loss
        stages.insert(0, command if loss == "sigmoid" else f"{command} {loss}")
        if is_on_hub(model) and model not in (environment.get("models") or {}):
            return tuple(stages), model
        parent = Path(str(model)).parent
        if Path(str(model)).name not in ("final", "best") or not (parent / "config.yaml").is_file():
            return tuple(stages), None
        run = parent
    return tuple(stages), None


def _sources(hashes: Mapping[str, str | None], names: list[Any], paths: Sequence[str]) -> tuple[CardSource, ...]:
    named = {name: hashes.get(name) for name in [*names, *hashes] if name}
    return tuple(CardSource(public(str(name), paths), digest) for name, digest in named.items())


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
