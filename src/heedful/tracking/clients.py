"""One client per tracker. A tracker's package is imported only when it is used."""

import contextlib
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from heedful.errors import ConfigError
from heedful.redact import redact


class MetricLine(NamedTuple):
    """One line of metrics.jsonl."""

    step: int
    metrics: dict[str, float]
    """NaN where the file has null (a number that was not finite)."""
    milliseconds: int
    """Time of reading, since 1970."""


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run, sent when a tracker is opened."""

    folder: Path
    """For the tracker's own files, inside the run's folder."""
    identity: str
    """The run's id: 32 hexadecimal digits, unchanged by a resume."""
    project: str
    name: str
    config: Mapping[str, Any]
    """Settings, versions and hashes, without secrets."""
    known: str | None
    """The tracker's own id of this run; None if it was never opened there."""


class Client(Protocol):
    """A run in a tracker. The constructor opens or resumes it there. Any call but `check` may raise, hang or be slow."""

    addresses: ClassVar[tuple[str, ...]]
    """Environment variables that say where runs are sent."""
    known: str
    """The tracker's id of the run, to find it again."""
    where: str
    """Where to see the run."""
    later: str | None = None
    """The tracker's own command that sends what it keeps on this machine."""

    def __init__(self, run: RunInfo) -> None: ...

    @staticmethod
    def check() -> None:
        """Raise ConfigError if you are not logged in, without a network, which may only be down for now."""

    def log(self, line: MetricLine) -> None:
        """Send metrics with their step."""

    def close(self, summary: Mapping[str, Any], *, finished: bool) -> None:
        """Send the summary and wait until everything is sent. ``finished`` is False if the run may be resumed."""


class Wandb(Client):
    """Weights & Biases (https://docs.wandb.ai)."""

    addresses = ("WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_MODE")

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
    def check() -> None:
        import wandb

        sends = os.environ.get("WANDB_MODE", "online") in ("online", "shared")
        if sends and not wandb.login(verify=False, prompt=False):
            raise ConfigError(
                "you are not logged in: run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline to send nothing"
            )

    def log(self, line: MetricLine) -> None:
        self._run.log({"step": line.step, **line.metrics})

    def close(self, summary: Mapping[str, Any], *, finished: bool) -> None:
        self._run.summary.update(summary)
        self._run.finish(exit_code=0 if finished else 1)


class Trackio(Client):
    """trackio (https://huggingface.co/docs/trackio): on this machine, or in the Space that TRACKIO_SPACE_ID names."""

    addresses = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")

    def __init__(self, run: RunInfo) -> None:
        import trackio

        self.known = run.known or f"{run.name}-{run.identity[:8]}"  # trackio identifies runs by name only
        self._run = trackio.init(
            project=run.project,
            name=self.known,
            config=dict(run.config),
            resume="allow" if run.known else "never",
            embed=False,
        )
        self.where = os.environ.get("TRACKIO_SPACE_ID") or f"trackio show --project {shlex.quote(run.project)}"

    @staticmethod
    def check() -> None:
        import huggingface_hub
        import trackio  # noqa: F401  # check that it imports

        if os.environ.get("TRACKIO_SPACE_ID") and huggingface_hub.get_token() is None:
            raise ConfigError(
                "TRACKIO_SPACE_ID names a Space, but you are not logged in: run `hf auth login`, or set HF_TOKEN, or "
                "leave TRACKIO_SPACE_ID out to send nothing"
            )

    def log(self, line: MetricLine) -> None:
        self._run.log(line.metrics, step=line.step)

    def close(self, summary: Mapping[str, Any], *, finished: bool) -> None:  # noqa: ARG002  the interface has it
        """trackio has no summary: its numbers become points at the last step."""
        numbers = {name: value for name, value in summary.items() if isinstance(value, int | float)}
        if numbers:
            self._run.log(numbers, step=summary["summary/steps"])
        self._run.finish()


class MLflow(Client):
    """MLflow (https://mlflow.org): the server or store that MLFLOW_TRACKING_URI names, or MLflow's own default."""

    addresses = ("MLFLOW_TRACKING_URI",)

    def __init__(self, run: RunInfo) -> None:
        import mlflow

        self._client = mlflow.MlflowClient()
        if run.known is None:
            self.known = self._make_run(run)
        else:
            self.known = run.known
            self._client.update_run(self.known, status="RUNNING")
        self.where = f"{redact(mlflow.get_tracking_uri())}, experiment {run.project}, run {run.name}"

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
    def check() -> None:
        import mlflow

        address = mlflow.get_tracking_uri()
        if not address.startswith(("sqlite:", "file:", "/")):
            return
        try:
            mlflow.MlflowClient()  # opens the store on this machine
        except Exception as error:
            raise ConfigError(
                f"the installed part of MLflow cannot write to {redact(address)}; set MLFLOW_TRACKING_URI to a server, or "
                "install the full package: pip install mlflow"
            ) from error

    def log(self, line: MetricLine) -> None:
        from mlflow.entities import Metric

        numbers = [
            Metric(name_for_mlflow(name), value, line.milliseconds, line.step) for name, value in line.metrics.items()
        ]
        self._client.log_batch(self.known, metrics=numbers)

    def close(self, summary: Mapping[str, Any], *, finished: bool) -> None:
        from mlflow.entities import RunTag

        tags = [RunTag(name_for_mlflow(name), str(value)[:5000]) for name, value in summary.items()]
        for start in range(0, len(tags), 100):
            self._client.log_batch(self.known, tags=tags[start : start + 100])
        self._client.set_terminated(self.known, "FINISHED" if finished else "KILLED")


class SwanLab(Client):
    """SwanLab (https://docs.swanlab.cn)."""

    addresses = ("SWANLAB_API_HOST", "SWANLAB_WORKSPACE", "SWANLAB_MODE")

    def __init__(self, run: RunInfo) -> None:
        import swanlab

        files = run.folder / "swanlab"
        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            config=dict(run.config),
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
        newest = os.path.relpath(max(files.glob("run-*"), default=files))
        self.known, self.where, self.later = run.identity[:21], newest, f"swanlab sync {shlex.quote(newest)}"
        with contextlib.suppress(ValueError):  # no address offline
            self.where = self._run.url or self.where

    @staticmethod
    def check() -> None:
        import swanlab

        settings = swanlab.Settings()
        if settings.mode == "online" and settings.api_key is None:
            raise ConfigError(
                "you are not logged in: run `swanlab login`, or set SWANLAB_API_KEY, or SWANLAB_MODE=offline to send nothing"
            )

    def log(self, line: MetricLine) -> None:
        self._run.log(line.metrics, step=line.step)

    def close(self, summary: Mapping[str, Any], *, finished: bool) -> None:
        self._run.config.update(summary)
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
