"""One client per tracker. A tracker's package is imported only when it is used."""

import contextlib
import math
import os
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from heedful.redact import redact

HERE = "this machine"
"""The destination of a run that is not sent."""


class NotReadyError(Exception):
    """A tracker cannot be used. The text has the cause and the fix."""


class Place(NamedTuple):
    """Position of a line of metrics.jsonl: its step, and its index among the lines of that step (an evaluation may be 1).

    A resumed run writes some lines again, at other bytes of the file but at the same positions, so positions identify the
    lines that a tracker already has.
    """

    step: int
    line: int


@dataclass(frozen=True)
class MetricLine:
    """One line of metrics.jsonl."""

    place: Place
    metrics: dict[str, float]
    """NaN where the file has null (a number that was not finite)."""
    milliseconds: int
    """Time of reading, in seconds since 1970."""


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run, sent when a tracker is opened."""

    folder: Path
    """For the tracker's own files, inside the run's folder."""
    identity: str
    """The run's id: 32 hexadecimal digits, unchanged by a resume."""
    project: str
    name: str
    offline: bool
    config: Mapping[str, Any]
    """Settings, versions and hashes, without secrets."""
    known: str | None
    """The tracker's own id of this run; None if it was never opened there."""


class Client(ABC):
    """A run in a tracker. The constructor opens or resumes the run there. Any call may raise, hang or be slow."""

    addresses: ClassVar[tuple[str, ...]]
    """Environment variables that set the destination."""
    default_address: ClassVar[str]
    """The destination without those variables."""
    batch: ClassVar[int] = 1
    """Most records per call of `log`; if it raises, all of them are sent again."""
    known: str
    """The tracker's id of the run, to find it again."""
    where: str
    """Where to see the run."""
    later: str | None = None
    """The tracker's own command that uploads its local files."""

    @abstractmethod
    def __init__(self, run: RunInfo) -> None:
        """Open the run, and set `known`, `where` and, if there is one, `later`."""

    @classmethod
    def destination(cls, *, offline: bool) -> str:
        """The destination of runs, without secrets. Each destination has its own progress."""
        given = " ".join(f"{name}={os.environ[name]}" for name in cls.addresses if os.environ.get(name))
        return HERE if offline else redact(given) or cls.default_address

    @staticmethod
    @abstractmethod
    def check(*, offline: bool) -> None:
        """Raise NotReadyError if runs cannot be sent: not logged in, or a package is missing."""

    @abstractmethod
    def log(self, records: Sequence[MetricLine]) -> None:
        """Send metrics with their steps."""

    @abstractmethod
    def close(self, summary: Mapping[str, Any], last_step: int, *, finished: bool) -> None:
        """Send the summary and wait until everything is sent. ``finished`` is False if the run may be resumed."""


class Wandb(Client):
    """Weights & Biases (https://docs.wandb.ai)."""

    addresses = ("WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_MODE")
    default_address = "https://api.wandb.ai"

    def __init__(self, run: RunInfo) -> None:
        import wandb

        self._run = wandb.init(
            project=run.project,
            id=run.identity,
            name=run.name,
            config=dict(run.config),
            dir=run.folder,
            resume="allow",
            reinit="create_new",  # an earlier run of this process may still be open
            mode="offline" if run.offline else None,
            settings=wandb.Settings(
                console="off",
                silent=True,
                save_code=False,
                x_disable_meta=True,  # do not send the command line, which may have secrets
            ),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        files = os.path.relpath(Path(self._run.dir).parent)
        self.known, self.where, self.later = run.identity, self._run.url or files, f"wandb sync {shlex.quote(files)}"

    @staticmethod
    def check(*, offline: bool) -> None:
        import wandb

        sends = not offline and os.environ.get("WANDB_MODE", "online") in ("online", "shared")
        # verify would need a network, which may only be down for now
        if sends and not wandb.login(verify=False, prompt=False):
            raise NotReadyError("you are not logged in: run `wandb login`, or set WANDB_API_KEY")

    def log(self, records: Sequence[MetricLine]) -> None:
        for record in records:
            self._run.log({"step": record.place.step, **record.metrics})

    def close(self, summary: Mapping[str, Any], last_step: int, *, finished: bool) -> None:  # noqa: ARG002  the interface has it
        self._run.summary.update(dict(flat("summary", summary)))
        self._run.finish(exit_code=0 if finished else 1)


class Trackio(Client):
    """trackio (https://huggingface.co/docs/trackio): on this machine, or in the Space that TRACKIO_SPACE_ID names."""

    addresses = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
    default_address = HERE

    def __init__(self, run: RunInfo) -> None:
        import trackio

        self.known = run.known or f"{run.name}-{run.identity[:8]}"  # trackio identifies runs by name only
        remote = {name: os.environ.get(name) for name in self.addresses}
        if run.offline:
            for name in remote:
                os.environ.pop(name, None)
        try:
            self._run = trackio.init(
                project=run.project,
                name=self.known,
                config=dict(run.config),
                resume="allow" if run.known else "never",
                embed=False,
            )
        finally:
            os.environ.update({name: value for name, value in remote.items() if value is not None})
        space = None if run.offline else remote["TRACKIO_SPACE_ID"]
        self.where = space or f"trackio show --project {shlex.quote(run.project)}"

    @staticmethod
    def check(*, offline: bool) -> None:
        import huggingface_hub
        import trackio  # noqa: F401  # check that it imports

        if not offline and os.environ.get("TRACKIO_SPACE_ID") and huggingface_hub.get_token() is None:
            raise NotReadyError(
                "TRACKIO_SPACE_ID names a Space, but you are not logged in: run `hf auth login`, or set HF_TOKEN"
            )

    def log(self, records: Sequence[MetricLine]) -> None:
        for record in records:
            self._run.log(record.metrics, step=record.place.step)

    def close(self, summary: Mapping[str, Any], last_step: int, *, finished: bool) -> None:  # noqa: ARG002  the interface has it
        """trackio has no summary: its numbers become points at the last step."""
        numbers = {name: value for name, value in flat("summary", summary) if isinstance(value, int | float)}
        if numbers:
            self._run.log(numbers, step=last_step)
        self._run.finish()


class MLflow(Client):
    """MLflow (https://mlflow.org): the server or store that MLFLOW_TRACKING_URI names, or MLflow's own default."""

    addresses = ("MLFLOW_TRACKING_URI",)
    default_address = "MLflow's default store"
    batch = 8  # one request each; a server accepts 1000 numbers per request

    def __init__(self, run: RunInfo) -> None:
        for variable, value in (("REQUEST_TIMEOUT", "30"), ("REQUEST_MAX_RETRIES", "1")):  # heedful retries itself
            os.environ.setdefault(f"MLFLOW_HTTP_{variable}", value)
        uri = None
        if run.offline:
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
            uri = (run.folder / "mlruns").resolve().as_uri()
        import mlflow

        self._client = mlflow.MlflowClient(tracking_uri=uri)
        if run.known is None:
            self.known = self._make_run(run)
        else:
            self.known = run.known
            self._client.update_run(self.known, status="RUNNING")
        self.where = f"{redact(uri or mlflow.get_tracking_uri())}, experiment {run.project}, run {run.name}"

    def _make_run(self, run: RunInfo) -> str:
        from mlflow.entities import Param

        experiment = self._client.get_experiment_by_name(run.project)
        number = self._client.create_experiment(run.project) if experiment is None else experiment.experiment_id
        made = self._client.create_run(number, run_name=run.name, tags={"heedful.run": run.identity})
        parameters = [Param(name_for_mlflow(name), str(value)[:6000]) for name, value in flat("", run.config)]
        for start in range(0, len(parameters), 100):
            self._client.log_batch(made.info.run_id, params=parameters[start : start + 100])
        return str(made.info.run_id)

    @staticmethod
    def check(*, offline: bool) -> None:
        import mlflow

        if offline:
            return
        try:
            mlflow.MlflowClient()  # creates its store; does not contact a server yet
        except Exception as error:
            raise NotReadyError(
                f"the installed part of MLflow cannot write to {redact(mlflow.get_tracking_uri())}; set MLFLOW_TRACKING_URI "
                "to a server, or install the full package: pip install mlflow"
            ) from error

    def log(self, records: Sequence[MetricLine]) -> None:
        from mlflow.entities import Metric

        numbers = [
            Metric(name_for_mlflow(name), value, record.milliseconds, record.place.step)
            for record in records
            for name, value in record.metrics.items()
        ]
        for start in range(0, len(numbers), 1000):
            self._client.log_batch(self.known, metrics=numbers[start : start + 1000])

    def close(self, summary: Mapping[str, Any], last_step: int, *, finished: bool) -> None:  # noqa: ARG002  the interface has it
        from mlflow.entities import RunTag

        tags = [RunTag(name_for_mlflow(name), str(value)[:5000]) for name, value in flat("summary", summary)]
        for start in range(0, len(tags), 100):
            self._client.log_batch(self.known, tags=tags[start : start + 100])
        self._client.set_terminated(self.known, "FINISHED" if finished else "KILLED")


class SwanLab(Client):
    """SwanLab (https://docs.swanlab.cn)."""

    addresses = ("SWANLAB_API_HOST", "SWANLAB_WORKSPACE", "SWANLAB_MODE")
    default_address = "https://api.swanlab.cn"

    def __init__(self, run: RunInfo) -> None:
        import swanlab

        files = run.folder / "swanlab"
        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            config=dict(run.config),
            mode="offline" if run.offline else None,
            log_dir=str(files),
            id=run.identity[:21],
            resume="allow",
            reinit=True,  # an earlier attempt may have opened the run before it failed
            settings=swanlab.Settings(
                interactive=False,
                terminal={"proxy_type": "none"},  # do not send the terminal's output,
                probe={"runtime": False},  # nor the command line, which may have secrets
            ),
        )
        newest = max(files.glob("run-*"), default=files)
        self.known, self.later = run.identity[:21], f"swanlab sync {shlex.quote(os.path.relpath(newest))}"
        self.where = os.path.relpath(newest)
        with contextlib.suppress(ValueError):  # no address offline
            self.where = self._run.url or self.where

    @staticmethod
    def check(*, offline: bool) -> None:
        import swanlab

        settings = swanlab.Settings()
        if not offline and settings.mode == "online" and settings.api_key is None:
            raise NotReadyError("you are not logged in: run `swanlab login`, or set SWANLAB_API_KEY")

    def log(self, records: Sequence[MetricLine]) -> None:
        for record in records:
            self._run.log(record.metrics, step=record.place.step)

    def close(self, summary: Mapping[str, Any], last_step: int, *, finished: bool) -> None:  # noqa: ARG002  the interface has it
        self._run.config.update(dict(flat("summary", summary)))
        self._run.finish(state="success" if finished else "aborted")


CLIENTS: Mapping[str, type[Client]] = {"wandb": Wandb, "trackio": Trackio, "mlflow": MLflow, "swanlab": SwanLab}
"""Clients by tracker name, which is also the package name."""


def flat(prefix: str, content: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings, as ``prefix/name/name``; lists are leaves; None and non-finite numbers become text."""
    if isinstance(content, Mapping):
        for name, value in content.items():
            yield from flat(f"{prefix}/{name}" if prefix else str(name), value)
    elif isinstance(content, int | str) or (isinstance(content, float) and math.isfinite(content)):
        yield prefix, content
    else:
        yield prefix, str(content)


def name_for_mlflow(name: str) -> str:
    """A name valid in MLflow: only ASCII letters, digits and ``_-. :/``, and no empty part.

    Other characters become codes.
    """
    coded = re.sub(r"[^A-Za-z0-9_\-. :/]", lambda found: f"_{ord(found.group()):x}_", name)[:250]
    return "/".join(part for part in coded.split("/") if part not in ("", ".", ".."))
