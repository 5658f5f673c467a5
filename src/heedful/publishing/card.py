"""What a run's folder knows of the model in it, without paths of this machine and without secrets, and its model card."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from heedful.configs.settings import PATHS, REWARDS
from heedful.configs.tools import REPOSITORY, PushConfig
from heedful.errors import DataError
from heedful.files import read_object
from heedful.redact import redact

TEMPLATE = Path(__file__).with_name("card.md.jinja")
MODEL_SETTINGS = ("model", "reference", "value_model")
DATA_SETTINGS = ("data", "eval_data", "ptx_data", "offset_data")
OF_NO_INTEREST = ("track", "track_project", "track_name", "track_offline", "track_wait", "rollouts", "memory_check")
"""Settings on which nothing in a model depends."""
ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s'\"<>][^\s'\"<>]*|(?<![\w.~-])(?:file://)?(?:/[^/\s:'\",]+){2,}", re.I)
"""An absolute path in a text, or a URL, which is none though it has parts like one."""
MOST_GENERATIONS = 20
"""Runs that are followed back to where training began, at most."""
REMEDY = "bring it back, or name the folder of another run"


@dataclass(frozen=True)
class CardSource:
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
    models: tuple[CardSource, ...]
    data: tuple[CardSource, ...]
    base_model: str | None
    """The model on the Hub that training began with; None if it began with a model that is not there."""
    stages: tuple[str, ...]
    """The algorithms of the runs that led here, this one last, as far as they are on this machine; with the loss behind it
    if that is not the usual one (``dpo simpo``)."""


@dataclass(frozen=True)
class Form:
    """What of a model decides how it is loaded and asked."""

    has_adapters: bool
    """LoRA adapters instead of a model."""
    on_adapters: bool
    """They were trained on a base that is adapters too."""
    has_template: bool
    """The tokenizer has a chat template."""
    reads_pairs: bool
    """A reward model that is an encoder, which reads prompt and response as two texts."""


def card(config: PushConfig, facts: RunFacts, form: Form, *, has_curves: bool) -> str:
    """README.md: YAML metadata, how to use the model, what it reached, what it cannot, how it was made.

    Args:
        config: where it goes, under which licence.
        facts: what the run's folder says.
        form: what decides how the model is loaded.
        has_curves: whether curves.png goes out too.
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
    """A number as a table of the card shows it."""
    if value is None:
        return "not measured"
    if isinstance(value, list | tuple):
        return " to ".join(map(number, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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


def _sources(hashes: Mapping[str, str], names: list[Any], paths: Sequence[str]) -> tuple[CardSource, ...]:
    named = {name: hashes.get(name) for name in [*names, *hashes] if name}
    return tuple(CardSource(public(str(name), paths), digest) for name, digest in named.items())


def _settings(run: Path) -> dict[str, Any]:
    return read_object(run / "config.yaml", REMEDY, needs=["model"])


def _object(path: Path) -> dict[str, Any]:
    """What a run has written into a file; nothing if the run has not come so far."""
    return read_object(path, REMEDY) if path.exists() else {}


def _result(path: Path) -> dict[str, Any]:
    remedy = "--results names files that heedful evaluate --output wrote"
    content = read_object(path, remedy, needs=["settings"], error=DataError)
    if not isinstance(content["settings"], dict):
        raise DataError(f"{path}: its settings are no object; {remedy}")
    return content
