"""Trackers of a run: one thread per tracker follows metrics.jsonl and sends new lines. Training never waits for them.

The file is the queue: no line is dropped, and a slow tracker does not fill memory. ``tracking/NAME.json`` in the run's
folder has the last line sent, so that a resumed run, or ``heedful track``, sends the rest.
"""

import importlib.util
import math
import os
import shlex
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from heedful.configs.tracking import TrackConfig, Tracker, TrackingOptions
from heedful.display import harmless, say
from heedful.errors import ConfigError, MachineError
from heedful.files import read_object, read_record, write_json
from heedful.redact import redact
from heedful.tracking.clients import CLIENTS, Client, MetricLine, RunInfo, flat

THREAD = "heedful tracker "
"""Prefix of thread names; the command uses it to find trackers that still hang at its end."""
POLL, PAUSE = 0.5, 10.0
"""Seconds between reads of metrics.jsonl, and until a retry after a failure."""
AT_THE_END, AFTER_AN_INTERRUPTION = 60.0, 10.0
"""Longest wait in seconds at the end of a run, and of one that was interrupted."""


def check_trackers(config: TrackingOptions) -> None:
    """Refuse trackers that are not installed or not logged in, before anything is loaded. Raises ConfigError."""
    for name in config.track:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f'--track {name}: {name} is not installed; pip install "heedful[{name}]", or leave it out (metrics.jsonl and '
                "tensorboard/ have every number)"
            )
        try:
            CLIENTS[name].check()
        except ConfigError as error:
            raise ConfigError(f"--track {name}: {error}") from error
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {redact(str(error))}"
            raise ConfigError(
                f"--track {name}: it is installed but does not work: {reason:.300}; install it again"
            ) from error


@dataclass
class Destination:
    """What one address and project has of a run."""

    project: str
    name: str
    """Name of the run there."""
    known: str | None = None
    """The tracker's id of the run."""
    sent: tuple[int, int] = (-1, -1)
    """The last line sent: its step, and its index among the lines of that step (an evaluation may be 1). A resumed run
    writes some lines again, and they have the same positions."""


def destinations(run: Path, tracker: str) -> dict[str, Destination]:
    """The content of tracking/NAME.json by address and project, the latest last; nothing if it is of another run."""
    path = run / "tracking" / f"{tracker}.json"
    if not path.exists():
        return {}
    remedy = "remove it to send the whole run again"
    content = read_object(path, remedy, error=ConfigError)
    if content.get("run") != identity_of(run):
        return {}
    try:
        return {to: Destination(**{**one, "sent": tuple(one["sent"])}) for to, one in content["destinations"].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: it is damaged; {remedy}") from error


def identity_of(run: Path) -> str:
    """The run's id: 32 hexadecimal digits."""
    return str(read_object(run / "run.json", "restore it", needs=["run"], error=ConfigError)["run"])


class Follower(threading.Thread):
    """Sends the lines of a run's metrics.jsonl to one tracker, in order.

    Only this thread calls the tracker's client. A hanging client blocks only this thread, which ends with the process.

    Args:
        tracker: its name.
        project: the run's project there.
        run: the run's folder.
        name: of the run there; None: the one used before, or else that of its folder.
    """

    def __init__(self, tracker: Tracker, project: str, run: Path, name: str | None = None) -> None:
        super().__init__(name=THREAD + tracker, daemon=True)
        self.tracker, self._project, self._run, self._run_name = tracker, project, run, name
        self.ended = threading.Event()
        self.finished = self.abandoned = self.complete = False
        self.remedy = shlex.join(["heedful", "track", str(run), tracker])
        self._client: Client | None = None
        self._offset, self._position = 0, (-1, -1)
        self._unsent: MetricLine | None = None
        self._has_failed = False

    def run(self) -> None:
        """Send new lines until the run has ended. Failures are retried later, and once more at the end."""
        while not self.abandoned:
            has_ended = self.ended.is_set()  # checked before reading, so that the last read has all lines
            pause = POLL
            try:
                self._client = self._client or self._open()
                self._send(self._client)
                if has_ended and not self.abandoned:
                    self._close(self._client)
            except (Exception, SystemExit) as error:
                pause = PAUSE
                self._report(error)
            if has_ended:
                break
            self.ended.wait(pause)

    def _open(self) -> Client:
        client_class = CLIENTS[self.tracker]
        addresses = [f"{name}={os.environ[name]}" for name in client_class.addresses if os.environ.get(name)]
        place = f"{redact(' '.join(addresses)) or 'default'}, project {self._project}"
        self._identity, self._places = identity_of(self._run), destinations(self._run, self.tracker)
        found = self._places.pop(place, None) or Destination(self._project, self._run.resolve().name)
        found.name = self._run_name or found.name
        folder = self._run / "tracking"
        folder.mkdir(exist_ok=True)
        config = config_of(self._run)
        client = client_class(RunInfo(folder, self._identity, found.project, found.name, config, found.known))
        self._to = self._places[place] = found
        found.known = client.known
        self._note()
        say(f"{self.tracker}: {harmless(redact(client.where))}")
        return client

    def _send(self, client: Client) -> None:
        while not self.abandoned and (line := self._unsent or self._read()):
            self._unsent = line
            client.log(line)
            self._unsent, self._to.sent = None, self._position
            self._note()

    def _read(self) -> MetricLine | None:
        """The next line that the tracker lacks, without values that are no numbers; None until there is one."""
        with (self._run / "metrics.jsonl").open("rb") as file:
            file.seek(self._offset)
            while (line := file.readline()).endswith(b"\n"):  # else it is being written
                self._offset += len(line)
                record = read_record(line) or {}  # none in a line cut off by a kill
                step = record.pop("step", None)
                if not isinstance(step, int):
                    continue
                self._position = step, self._position[1] + 1 if step == self._position[0] else 0
                if self._position > self._to.sent:
                    numbers = {name: math.nan if value is None else value for name, value in record.items()}
                    metrics = {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}
                    return MetricLine(step, metrics, int(time.time() * 1000))
        return None

    def _close(self, client: Client) -> None:
        self.remedy = client.later or self.remedy
        path = self._run / "summary.json"
        summary = redact(read_object(path, "")) if self.finished and path.exists() else {}
        client.close(dict(flat("summary", summary)), finished=self.finished)
        self.complete = True

    def _report(self, error: BaseException) -> None:
        """Report the first failure."""
        if not self._has_failed:
            reason = " ".join(redact(str(error)).split())  # it may have an address with a password
            kind = type(error).__name__
            more = "the run continues without it, and unsent metrics are sent later"
            say(f"{self.tracker}: failed: {harmless(reason or kind):.300} ({kind}); {more}")
        self._has_failed = True

    def _note(self) -> None:
        """Write tracking/NAME.json, unless another run may have the folder by now."""
        if not self.abandoned:
            content = {"run": self._identity, "destinations": {name: asdict(one) for name, one in self._places.items()}}
            write_json(self._run / "tracking" / f"{self.tracker}.json", content)


class Trackers:
    """Feeds the trackers that a run's settings name from its metrics.jsonl. Only `close` waits for a tracker.

    Args:
        config: the trackers and their settings.
        run: the run's folder, which this process holds.
        name: of the run in the trackers; None: the one used there before, or else that of its folder.
    """

    def __init__(self, config: TrackingOptions, run: Path, name: str | None = None) -> None:
        self._followers = [Follower(tracker, config.track_project, run, name) for tracker in config.track]
        self._has_started = False

    def start(self) -> None:
        """Start the trackers. Later calls do nothing."""
        if not self._has_started:
            for follower in self._followers:
                follower.start()
        self._has_started = True

    def close(self, *, finished: bool, wait: float | None = None) -> list[str]:
        """Wait, with a time limit, until everything is sent. Returns messages about unsent lines and how to send them.

        Args:
            finished: whether the run is complete; if not, it may be resumed, and its trackers with it.
            wait: seconds; None: a minute, less for an interrupted run.
        """
        if finished:  # not started yet if the run was resumed after its last step
            self.start()
        followers = self._followers if self._has_started else []
        if wait is None:
            wait = AT_THE_END if finished else AFTER_AN_INTERRUPTION
        deadline = time.monotonic() + wait
        try:
            for follower in followers:
                follower.finished = finished
                follower.ended.set()
            for follower in followers:
                follower.join(max(0.0, deadline - time.monotonic()))
        finally:
            for follower in followers:
                follower.abandoned = True
        what = "not everything was sent; all of it is in the run's files. Send the rest"
        return [f"{one.tracker}: {what}: {one.remedy}" for one in followers if not one.complete]


def send_run(config: TrackConfig) -> None:
    """Send a run's unsent metrics to a tracker.

    Raises ConfigError if there is no run or the tracker cannot be used, and MachineError if not everything was sent in time.
    """
    files = ("run.json", "config.yaml", "metrics.jsonl")
    if not all((config.run / name).is_file() for name in files):
        raise ConfigError(f"{config.run} is not a run: it needs {', '.join(files)}; name the folder of a run")
    used = [one.project for one in destinations(config.run, config.to).values()]
    project = config.project or (used[-1] if used else read_settings(config.run).get("track_project"))
    options = TrackingOptions(track=(config.to,), track_project=project or TrackingOptions.track_project)
    check_trackers(options)
    trackers = Trackers(options, config.run, config.name)
    trackers.start()
    lacking = trackers.close(finished=(config.run / "summary.json").is_file(), wait=config.wait)
    if lacking:
        raise MachineError(lacking[0])


def config_of(run: Path) -> dict[str, Any]:
    """A run's configuration for a tracker: its settings, versions, and hashes of data and models; no secrets."""
    path = run / "environment.json"
    facts = read_object(path, "restore it") if path.exists() else {}
    about = {name: facts[name] for name in ("command", "versions", "revision", "data", "models") if name in facts}
    config: dict[str, Any] = redact({**read_settings(run), "heedful": about})
    return config


def read_settings(run: Path) -> dict[str, Any]:
    """The settings of a run. Raises ConfigError."""
    return read_object(run / "config.yaml", "restore it, or name the folder of another run", error=ConfigError)
