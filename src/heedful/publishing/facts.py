"""What a run's folder knows of the model in it, without paths of this machine and without secrets."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.configs.paths import PATHS, REWARDS
from heedful.configs.push import REPOSITORY
from heedful.errors import DataError
from heedful.files import read_object
from heedful.redact import redact

MODEL_SETTINGS = ("model", "reference", "value_model")
DATA_SETTINGS = ("data", "eval_data", "ptx_data", "offset_data")
ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s'\"<>][^\s'\"<>]*|(?<![\w.~-])(?:file://)?(?:/[^/\s:'\",]+){2,}", re.I)
"""An absolute path in a text, or a URL, which is none though it has parts like one."""
MOST_GENERATIONS = 20
"""Runs that are followed back to where training began, at most."""


@dataclass(frozen=True)
class Source:
    """A model or data file that a run was made from."""

    name: str
    sha256: str | None
    """Of its content; None if it was not a local file or folder."""


@dataclass(frozen=True)
class RunFacts:
    """What a card says of a run."""

    algorithm: str
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    summary: Mapping[str, Any]
    results: Mapping[str, Mapping[str, Any]]
    """Of ``heedful evaluate``, by the names of their files."""
    models: tuple[Source, ...]
    data: tuple[Source, ...]
    base_model: str | None
    """The model on the Hub that training began with; None if it began with a model that is not there."""
    stages: tuple[str, ...]
    """The algorithms of the runs that led here, this one last, as far as they are on this machine; with the loss behind it
    if that is not the usual one (``dpo simpo``)."""


def read_facts(run: Path, results: tuple[Path, ...]) -> RunFacts:
    """Read a finished run. Raises CheckpointError if the folder is none, DataError for a result that is none."""
    settings = _settings(run)
    environment, summary = (_object(run / name) for name in ("environment.json", "summary.json"))
    measured = {path.name: _result(path) for path in results}
    hashes = {kind: environment.get(kind) or {} for kind in ("models", "data")}
    used = [path for given in (settings, *(one["settings"] for one in measured.values())) for path in paths_in(given)]
    paths = [*used, *hashes["models"], *hashes["data"]]
    stages, base = _lineage(run)
    return RunFacts(
        algorithm=str(environment.get("command", "")).removeprefix("heedful ") or summary.get("algorithm", "unknown"),
        settings=public(settings, paths),
        environment=public(environment, paths),
        summary=public(summary, paths),
        results={name: public(one, paths) for name, one in measured.items()},
        models=_sources(hashes["models"], [settings.get(name) for name in MODEL_SETTINGS], paths),
        data=_sources(hashes["data"], [settings.get(name) for name in DATA_SETTINGS], paths),
        base_model=base,
        stages=stages,
    )


def paths_in(settings: Mapping[str, Any]) -> Iterator[str]:
    """The absolute paths that settings name, whole: there may be spaces in them. Those in ``model:PATH`` too."""
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
    """Content without secrets, and with the last two parts of an absolute path instead of all of it.

    Args:
        content: text, or lists and mappings of it.
        paths: those that are known. Others are found in the text, where a path ends at a space. A URL is none.
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
    """The last two parts of a path; a URL as it is."""
    path = path.removeprefix("file://")
    return path if "://" in path else "/".join(path.rstrip("/").split("/")[-2:]).lstrip("/")


def is_on_hub(name: Any) -> bool:
    """Whether a setting names something on the Hub: ORG/NAME, and no path that is here."""
    return isinstance(name, str) and REPOSITORY.fullmatch(name) is not None and not Path(name).exists()


def _lineage(run: Path) -> tuple[tuple[str, ...], str | None]:
    """The algorithms that led to a run, and the model on the Hub that the first of them began with."""
    stages: list[str] = []
    for _ in range(MOST_GENERATIONS):
        environment = _object(run / "environment.json")
        settings = _settings(run)
        model = settings.get("model")
        command = str(environment.get("command", "")).removeprefix("heedful ")
        loss = settings.get("loss", "sigmoid")
        stages.insert(0, command if loss == "sigmoid" else f"{command} {loss}")
        if is_on_hub(model) and model not in (environment.get("models") or {}):
            return tuple(stages), model
        parent = Path(str(model)).parent
        if Path(str(model)).name not in ("final", "best") or not (parent / "config.yaml").is_file():
            return tuple(stages), None
        run = parent
    return tuple(stages), None


def _sources(hashes: Mapping[str, str], names: list[Any], paths: Sequence[str]) -> tuple[Source, ...]:
    named = {name: hashes.get(name) for name in [*names, *hashes] if name}
    return tuple(Source(public(str(name), paths), digest) for name, digest in named.items())


def _settings(run: Path) -> dict[str, Any]:
    return read_object(run / "config.yaml", "bring it back, or name the folder of another run", needs=["model"])


def _object(path: Path) -> dict[str, Any]:
    """What a run has written into a file; nothing if the run has not come so far."""
    return read_object(path, "bring it back, or name the folder of another run") if path.exists() else {}


def _result(path: Path) -> dict[str, Any]:
    remedy = "--results names files that heedful evaluate --output wrote"
    content = read_object(path, remedy, needs=["settings"], error=DataError)
    if not isinstance(content["settings"], dict):
        raise DataError(f"{path}: its settings are no object; {remedy}")
    return content
