"""Trackers by their own clients. Each is imported only in the process that feeds it (`heedful.tracking.worker`)."""

import contextlib
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from heedful.redact import redact
from heedful.tracking.records import Record

HERE = "this machine"
"""The destination of what is sent nowhere."""


class NotReadyError(Exception):
    """A tracker cannot be used as it is. The text says why and what to do."""


@dataclass(frozen=True)
class About:
    """What a tracker is told of a run when it is opened."""

    folder: Path
    """For the tracker's own files, inside the run's folder."""
    identity: str
    """The run's own name, 32 hexadecimal digits: the same when it goes on."""
    project: str
    name: str
    offline: bool
    config: Mapping[str, Any]
    """Settings, versions and hashes, without secrets."""
    known: str | None
    """What the tracker called this run when it was first opened; None at first."""


class Client(Protocol):
    """A tracker. Calls come from one thread, in this order: `check` alone, or `open`, any number of `send`, `close`.

    Any of them may raise, hang or be slow; a call that raised is made again.
    """

    most: ClassVar[int]
    """The most records of one `send`, which are sent again together if it raises."""
    known: str
    """What the tracker calls the run, to find it again."""
    where: str
    """Where to look at the run."""
    later: str | None
    """The command that sends what has not got out; None if ``heedful track`` does."""

    @staticmethod
    def destination(*, offline: bool) -> str:
        """Return where runs go, as the environment says it, without secrets. What was sent elsewhere is not there."""

    def check(self, *, offline: bool) -> None:
        """Raise NotReadyError if runs cannot be sent: nobody is logged in, or a part is not installed."""

    def open(self, about: About) -> None:
        """Make the run, or go on with it."""

    def send(self, records: Sequence[Record]) -> None:
        """Write metrics with their step."""

    def close(self, summary: Mapping[str, Any], last_step: int, *, finished: bool) -> None:
        """Write the summary, and wait until everything has got out. ``finished`` is False for a run that may go on."""


class Wandb:
    """Weights & Biases (https://docs.wandb.ai)."""

    most: ClassVar = 1
    known = where = ""
    later: str | None = None

    @staticmethod
    def destination(*, offline: bool) -> str:
        """See `Client`."""
        server = (os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").rstrip("/")
        return _address("WANDB_MODE", server, os.environ.get("WANDB_ENTITY", ""), offline=offline)

    def check(self, *, offline: bool) -> None:
        """See `Client`."""
        import wandb

        try:
            if not offline:
                wandb.login(verify=False)  # the key alone: a network that is away may be back before the first step
        except wandb.errors.UsageError as error:
            raise NotReadyError("nobody is logged in: run `wandb login`, or set WANDB_API_KEY") from error

    def open(self, about: About) -> None:
        """See `Client`."""
        import wandb

        self._run = wandb.init(
            project=about.project,
            id=about.identity,
            name=about.name,
            config=dict(about.config),
            dir=about.folder,
            resume="allow",
            mode="offline" if about.offline else None,
            settings=wandb.Settings(console="off", save_code=False),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        files = os.path.relpath(Path(self._run.dir).parent)
        self.known, self.where, self.later = about.identity, self._run.url or files, f"wandb sync {shlex.quote(files)}"

    def send(self, records: Sequence[Record]) -> None:
        """See `Client`."""
        for record in records:
            self._run.log({"step": record.place.step, **record.metrics})

    def close(self, summary: Mapping[str, Any], last_step: int, *, finished: bool) -> None:  # noqa: ARG002  the interface has it
        """See `Client`."""
        self._run.summary.update(dict(flat("summary", summary)))
        self._run.finish(exit_code=0 if finished else 1)


class Trackio:
    """trackio (https://huggingface.co/docs/trackio): on this machine, or in the Space that TRACKIO_SPACE_ID names."""

    most: ClassVar = 1
    known = where = ""
    later: str | None = None

    @staticmethod
    def destination(*, offline: bool) -> str:
        """See `Client`. Without a Space or a server it is the same folder of this machine, online and offline."""
        there = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        folder = os.environ.get("TRACKIO_DIR")
        return redact(there) if there and not offline else str(Path(folder).resolve()) if folder else HERE

    def check(self, *, offline: bool) -> None:
        """See `Client`."""
        import huggingface_hub
        import trackio  # noqa: F401  # that it can be imported

        if not offline and os.environ.get("TRACKIO_SPACE_ID") and huggingface_hub.get_token() is None:
            raise NotReadyError(
                "TRACKIO_SPACE_ID names a Space, and nobody is logged in: run `hf auth login`, or set HF_TOKEN"
            )

    def open(self, about: About) -> None:
        """See `Client`."""
        if about.offline:
            for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
                os.environ.pop(variable, None)
        import trackio

        self.known = about.known or f"{about.name}-{about.identity[:8]}"  # trackio knows runs by their names alone
        trackio.init(
            project=about.project,
            name=self.known,
            config=dict(about.config),
            resume="allow" if about.known else "never",
            embed=False,
        )
        self.where = os.environ.get("TRACKIO_SPACE_ID") or f"trackio show --project {about.project}"

    def send(self, records: Sequence[Record]) -> None:
        """See `Client`."""
        import trackio

        for record in records:
            trackio.log(record.metrics, step=record.place.step)

    def close(self, summary: Mapping[str, Any], last_step: int, *, finished: bool) -> None:  # noqa: ARG002  the interface has it
        """See `Client`. trackio has no summary: its numbers become points at the last step."""
        import trackio

        numbers = {name: value for name, value in flat("summary", summary) if isinstance(value, int | float)}
        if numbers:
            trackio.log(numbers, step=last_step)
        trackio.finish()


class MLflow:
    """MLflow (https://mlflow.org): the server or store that MLFLOW_TRACKING_URI names, or MLflow's own default."""

    most: ClassVar = 8  # a request each; a server takes 1000 numbers at a time
    known = where = ""
    later: str | None = None

    @staticmethod
    def destination(*, offline: bool) -> str:
        """See `Client`. A store may be named by a path below the working folder."""
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        path = uri.removeprefix("sqlite:///").removeprefix("file://").removeprefix("file:")
        is_relative = re.match(r"/|[\w+.-]+://|databricks|uc:", path) is None
        return HERE if offline else redact(uri) + f" in {Path.cwd()}" * is_relative

    def check(self, *, offline: bool) -> None:
        """See `Client`."""
        import mlflow

        if offline:
            return
        try:
            mlflow.MlflowClient()  # makes its store; a server is not asked yet
        except Exception as error:
            raise NotReadyError(
                f"what is installed of MLflow cannot write to {redact(mlflow.get_tracking_uri())}; set MLFLOW_TRACKING_URI "
                "to a server, or install all of it, with its own store: pip install mlflow"
            ) from error

    def open(self, about: About) -> None:
        """See `Client`."""
        for variable, value in (("REQUEST_TIMEOUT", "30"), ("REQUEST_MAX_RETRIES", "1")):  # heedful tries again itself
            os.environ.setdefault(f"MLFLOW_HTTP_{variable}", value)
        uri = None
        if about.offline:
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
            uri = (about.folder / "mlruns").resolve().as_uri()
        import mlflow

        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._may_have = about.known is not None
        if about.known is None:
            self.known = self._make_run(about)
        else:
            self.known = about.known
            self._client.update_run(self.known, status="RUNNING")
        self.where = f"{redact(uri or mlflow.get_tracking_uri())}, experiment {about.project}, run {about.name}"

    def _make_run(self, about: About) -> str:
        from mlflow.entities import Param

        experiment = self._client.get_experiment_by_name(about.project)
        number = self._client.create_experiment(about.project) if experiment is None else experiment.experiment_id
        run: str = self._client.create_run(
            number, run_name=about.name, tags={"heedful.run": about.identity}
        ).info.run_id
        parameters = [Param(name_for_mlflow(name), str(value)[:6000]) for name, value in flat("", about.config)]
        for start in range(0, len(parameters), 100):
            self._client.log_batch(run, params=parameters[start : start + 100])
        return run

    def send(self, records: Sequence[Record]) -> None:
        """See `Client`."""
        from mlflow.entities import Metric

        numbers = [
            Metric(name_for_mlflow(name), value, record.milliseconds, record.place.step)
            for record in records
            for name, value in record.metrics.items()
        ]
        if self._may_have:  # a process that was killed may have sent these and not noted it
            numbers = [number for number in numbers if not self._has(number.key, number.step)]
        for start in range(0, len(numbers), 1000):
            self._client.log_batch(self.known, metrics=numbers[start : start + 1000])
        self._may_have = False

    def _has(self, key: str, step: int) -> bool:
        return any(point.step == step for point in self._client.get_metric_history(self.known, key))

    def close(self, summary: Mapping[str, Any], last_step: int, *, finished: bool) -> None:  # noqa: ARG002  the interface has it
        """See `Client`."""
        from mlflow.entities import RunTag

        tags = [RunTag(name_for_mlflow(name), str(value)[:5000]) for name, value in flat("summary", summary)]
        for start in range(0, len(tags), 100):
            self._client.log_batch(self.known, tags=tags[start : start + 100])
        self._client.set_terminated(self.known, "FINISHED" if finished else "KILLED")


class SwanLab:
    """SwanLab (https://docs.swanlab.cn)."""

    most: ClassVar = 1
    known = where = ""
    later: str | None = None

    @staticmethod
    def destination(*, offline: bool) -> str:
        """See `Client`."""
        server = (os.environ.get("SWANLAB_API_HOST") or "https://api.swanlab.cn").rstrip("/")
        return _address("SWANLAB_MODE", server, os.environ.get("SWANLAB_WORKSPACE", ""), offline=offline)

    def check(self, *, offline: bool) -> None:
        """See `Client`."""
        import swanlab

        settings = swanlab.Settings()
        if not offline and settings.mode == "online" and settings.api_key is None:
            raise NotReadyError("nobody is logged in: run `swanlab login`, or set SWANLAB_API_KEY")

    def open(self, about: About) -> None:
        """See `Client`."""
        import swanlab

        files = about.folder / "swanlab"
        self._run = swanlab.init(
            project=about.project,
            name=about.name,
            config=dict(about.config),
            mode="offline" if about.offline else None,
            log_dir=str(files),
            id=about.identity[:21],
            resume="allow",
            reinit=True,  # an earlier try may have come half the way
        )
        newest = max(files.glob("run-*"), default=files)
        self.known, self.later = about.identity[:21], f"swanlab sync {shlex.quote(os.path.relpath(newest))}"
        self.where = os.path.relpath(newest)
        with contextlib.suppress(ValueError):  # there is no address offline
            self.where = self._run.url or self.where

    def send(self, records: Sequence[Record]) -> None:
        """See `Client`."""
        for record in records:
            self._run.log(record.metrics, step=record.place.step)

    def close(self, summary: Mapping[str, Any], last_step: int, *, finished: bool) -> None:  # noqa: ARG002  the interface has it
        """See `Client`."""
        self._run.config.update(dict(flat("summary", summary)))
        self._run.finish(state="success" if finished else "aborted")


CLIENTS: Mapping[str, type[Client]] = {"wandb": Wandb, "trackio": Trackio, "mlflow": MLflow, "swanlab": SwanLab}
"""By the name of the tracker, which is that of its package."""


def _address(mode: str, server: str, owner: str, *, offline: bool) -> str:
    """A server and who has the project there, unless the environment says by a mode that nothing is sent."""
    chosen = os.environ.get(mode) or "online"
    return (
        HERE if offline else redact(f"{server} {owner}".strip()) if chosen == "online" else f"{HERE}, {mode}={chosen}"
    )


def flat(prefix: str, content: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings, as ``prefix/name/name``; lists are leaves, and what is None or not finite is text."""
    if isinstance(content, Mapping):
        for name, value in content.items():
            yield from flat(f"{prefix}/{name}" if prefix else str(name), value)
    elif isinstance(content, int | str) or (isinstance(content, float) and math.isfinite(content)):
        yield prefix, content
    else:
        yield prefix, str(content)


def name_for_mlflow(name: str) -> str:
    """A name that MLflow takes: it has no characters but letters and digits of ASCII and ``_-. :/``, and no empty part.

    Other characters become codes.
    """
    coded = re.sub(r"[^A-Za-z0-9_\-. :/]", lambda found: f"_{ord(found.group()):x}_", name)[:250]
    return "/".join(part for part in coded.split("/") if part not in ("", ".", ".."))
