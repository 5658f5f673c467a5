"""Trackers of a run: one thread per tracker follows metrics.jsonl and sends new lines. Training never waits for them.

The file is the queue: no line is dropped, and a slow tracker does not fill memory. ``tracking/NAME.json`` in the run's
folder records the lines sent, so that a resumed run, or ``heedful track``, sends the rest.
"""

import contextlib
import importlib.util
import json
import math
import shlex
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from heedful.configs.tracking import TrackConfig, Tracker, TrackingOptions
from heedful.display import harmless, say
from heedful.errors import ConfigError, MachineError
from heedful.files import read_object, read_record, write_json
from heedful.redact import redact
from heedful.tracking.clients import CLIENTS, Client, MetricLine, NotReadyError, Place, RunInfo

THREAD = "heedful tracker "
"""Prefix of thread names; the command uses it to find trackers that still hang at its end."""
LONGEST_CHECK = 30.0
"""Seconds to wait for the check of a tracker; without an answer the run starts, because trackers never stop a run."""
POLL, PAUSE = 0.5, 10.0
"""Seconds between reads of metrics.jsonl, and until a retry after a failure."""
SILENCE = 60.0
"""Seconds without an answer until a tracker is reported as hanging."""
BEHIND = 5.0
"""Delay of tracking/NAME.json in seconds: a killed process loses the unsent queue of its clients."""
AT_THE_END = 60.0
"""Longest wait in seconds at the end of a run."""
AFTER_AN_INTERRUPTION = 10.0
"""Longest wait in seconds at the end of a run that was interrupted."""
START = Place(-1, -1)
"""Before the first line."""


def check_trackers(config: TrackingOptions, *, offline_flag: str = "--track-offline") -> None:
    """Refuse trackers that are not installed or not logged in, before anything is loaded. Raises ConfigError."""
    for name in config.track:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f'--track {name}: {name} is not installed; pip install "heedful[{name}]", or leave it out (metrics.jsonl and '
                "tensorboard/ have every number)"
            )
    reasons: dict[str, str] = {}

    def check(name: str) -> None:
        try:
            CLIENTS[name].check(offline=config.track_offline)
        except NotReadyError as error:
            reasons[name] = f"{error}; or add {offline_flag} to send nothing"
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {redact(str(error))}"
            reasons[name] = f"it is installed but does not work: {reason:.300}; install it again"

    for name in config.track:
        thread = threading.Thread(target=check, args=[name], name=THREAD + name, daemon=True)
        thread.start()
        thread.join(LONGEST_CHECK)
        if thread.is_alive():
            say(f"--track {name} has not answered for {LONGEST_CHECK:.0f} s; the run starts anyway")
        if name in reasons:
            raise ConfigError(f"--track {name}: {reasons[name]}")


class Records:
    """Reads the lines of metrics.jsonl after a position, as they are written."""

    def __init__(self, path: Path, sent: Place) -> None:
        self._path, self._sent, self._offset, self._last = path, sent, 0, START

    def read(self, most: int | None = None) -> list[MetricLine]:
        """The next lines. A line cut off by a kill is skipped; a last one without a line feed is read later.

        Values other than numbers are skipped. If the file cannot be read, the next call starts at the same line.
        """
        records: list[MetricLine] = []
        offset, last = self._offset, self._last
        with self._path.open("rb") as file:
            file.seek(offset)
            while len(records) != most and (line := file.readline()).endswith(b"\n"):
                offset += len(line)
                content = read_record(line)
                step = content.pop("step", None) if content else None
                if content is None or not isinstance(step, int):
                    continue
                last = Place(step, last.line + 1 if step == last.step else 0)
                if last > self._sent:
                    numbers = {name: math.nan if value is None else value for name, value in content.items()}
                    metrics = {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}
                    records.append(MetricLine(last, metrics, int(time.time() * 1000)))
        self._offset, self._last = offset, last
        return records


@dataclass
class Progress:
    """Lines of a run sent to one destination (address and project)."""

    address: str
    """See `Client.destination`."""
    project: str
    name: str
    """Name of the run there."""
    known: str | None = None
    """The tracker's id of the run."""
    sent: Place = START
    """The last line given to its client."""
    complete: bool = False
    """True once its client has sent everything."""


def read_progress(path: Path, identity: str) -> list[Progress]:
    """The destinations in tracking/NAME.json, the latest one last; none if the file is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["run"] == identity:
            return [Progress(**{**one, "sent": Place(*one["sent"])}) for one in content["destinations"]]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    return []


def identity_of(run: Path) -> str:
    """The run's id, 32 hexadecimal digits, from run.json; without that file, from the path of its folder."""
    try:
        return str(json.loads((run / "run.json").read_text(encoding="utf-8"))["run"])
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, RecursionError):
        return uuid.uuid5(uuid.NAMESPACE_URL, run.resolve().as_uri()).hex


class Follower(threading.Thread):
    """Sends the lines of a run's metrics.jsonl to one tracker, in order.

    Only this thread calls the tracker's client. A hanging client blocks only this thread, which ends with the process.

    Args:
        tracker: its name.
        config: the destination.
        run: the run's folder.
        identity: see `identity_of`.
        name: of the run there.
    """

    def __init__(self, tracker: Tracker, config: TrackingOptions, run: Path, identity: str, name: str) -> None:
        super().__init__(name=THREAD + tracker, daemon=True)
        self.tracker, self._offline, self._run, self._identity = tracker, config.track_offline, run, identity
        self.calling_since: float | None = None
        self.ended, self.finished, self.abandoned = threading.Event(), False, False
        self._path = run / "tracking" / f"{tracker}.json"
        place = CLIENTS[tracker].destination(offline=self._offline), config.track_project
        every = read_progress(self._path, identity)
        here = [one for one in every if (one.address, one.project) == place]
        self._elsewhere = [one for one in every if one not in here]
        self.progress = here[-1] if here else Progress(*place, "")
        self.progress.name, self.progress.complete = name, False
        self._settled, self._noted, self._writing = self.progress.sent, time.monotonic(), threading.Lock()
        self._client: Client | None = None
        self._later: str | None = None
        self._unsent: list[MetricLine] = []
        self._failures, self._reported = 0, set[str]()

    def run(self) -> None:
        """Send new lines until the run has ended. Failures are retried later, and once more at the end."""
        while not self.abandoned:
            has_ended = self.ended.is_set()  # checked before reading, so that the last read has all lines
            pause = POLL
            try:
                self._send()
                if has_ended and not self.abandoned:
                    self._close()
            except (Exception, SystemExit) as error:
                self._fail(error)
                pause = PAUSE
            if has_ended:
                break
            self.calling_since = None
            self.ended.wait(pause)

    def abandon(self) -> None:
        """Stop waiting: it ends as soon as its client returns, and changes no file."""
        self._note(self.progress.sent, is_last=True)

    def report(self, text: str, kind: str | None = None) -> None:
        """Print a message, once per kind."""
        if kind not in self._reported:
            self._reported |= {kind} if kind else set()
            say(f"{self.tracker}: {harmless(redact(text))}")

    def lacks(self, waited: float) -> str:
        """A message about unsent lines, and how to send them."""
        progress = self.progress
        words = ["heedful", "track", str(self._run), self.tracker]
        words += ["--project", progress.project, "--name", progress.name, *["--offline"] * self._offline]
        again = shlex.join(words)
        try:
            places = [record.place for record in Records(self._run / "metrics.jsonl", START).read()]
        except OSError as error:
            what = f"unsent records are not known, because the run's files cannot be read ({error})"
            return f"{self.tracker}: {what}. Send it: {again}"
        sent = sum(place <= progress.sent for place in places)
        what = f"it has {sent} of {len(places)} records"
        if sent == len(places):
            what, again = "its last records may not have been sent", self._later or again
        failures = f"{self._failures} failed {'try' if self._failures == 1 else 'tries'}"
        failed = f", after {failures}" if self._failures else f" after {waited:.0f} s"
        return f"{self.tracker}: {what}{failed}; all are in the run's files. Send the rest: {again}"

    def _send(self) -> None:
        """Open the tracker if needed, and send all new lines."""
        self.calling_since = time.monotonic()
        if self._client is None:
            self._client = self._open()
        while not self.abandoned and (unsent := self._unsent or self._records.read(self._client.batch)):
            self._unsent, self.calling_since = unsent, time.monotonic()
            self._client.log(unsent)
            self._unsent, self.progress.sent = [], unsent[-1].place
            self._note_settled()
        self._note_settled()

    def _open(self) -> Client:
        progress, config = self.progress, config_of(self._run)
        self._path.parent.mkdir(exist_ok=True)
        client = CLIENTS[self.tracker](
            RunInfo(
                self._path.parent,
                self._identity,
                progress.project,
                progress.name,
                self._offline,
                config,
                progress.known,
            )
        )
        self._records = Records(self._run / "metrics.jsonl", progress.sent)
        progress.known, self._later = client.known, client.later
        self._note(progress.sent)
        self.report(client.where)
        return client

    def _close(self) -> None:
        assert self._client is not None
        self.calling_since = time.monotonic()
        path = self._run / "summary.json"
        summary = redact(read_object(path, "")) if self.finished and path.exists() else {}
        self._client.close(summary, self.progress.sent.step, finished=self.finished)
        self.progress.complete = True

    def _fail(self, error: BaseException) -> None:
        """Count a failure, write it to tracking/NAME.log, and report it if it is the first of its kind."""
        self._failures += 1
        kind, text = type(error).__name__, redact(str(error))  # may contain an address with a password
        log = self._path.with_suffix(".log")
        with contextlib.suppress(OSError), log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            print(f"{kind}: {text}", file=file)
        reason = " ".join(text.split()) or kind
        more = f"the run continues without it, and unsent metrics are sent later; details in {log}"
        self.report(f"failed: {reason:.300} ({kind}); {more}", kind)

    def _note_settled(self) -> None:
        """Every few seconds, record the lines sent by the previous time: they have left the client's queue by now."""
        if time.monotonic() - self._noted > BEHIND:
            settled, self._settled = self._settled, self.progress.sent
            self._note(settled)

    def _note(self, sent: Place, *, is_last: bool = False) -> None:
        """Write tracking/NAME.json. A full disk does not stop sending."""
        self._noted = time.monotonic()
        every = [*map(asdict, self._elsewhere), {**asdict(self.progress), "sent": sent}]
        with self._writing, contextlib.suppress(OSError):  # the main thread records the end
            if not self.abandoned:
                self.abandoned = is_last
                write_json(self._path, {"run": self._identity, "destinations": every})


class Trackers:
    """Feeds the trackers that a run's settings name from its metrics.jsonl. Only `close` waits for a tracker.

    Args:
        config: the trackers and their settings.
        run: the run's folder, which this process holds.
        name: of the run in the trackers; None: the name of its folder.
    """

    def __init__(self, config: TrackingOptions, run: Path, name: str | None = None) -> None:
        self._config, self._run, self._name = config, run, name or run.resolve().name
        self._identity = identity_of(run) if config.track else ""
        self._followers: list[Follower] = []

    def follow(self) -> None:
        """Start the trackers if needed, and report those that hang."""
        if not self._followers:
            for tracker in self._config.track:
                self._followers.append(Follower(tracker, self._config, self._run, self._identity, self._name))
            for follower in self._followers:
                follower.start()
        for follower in self._followers:
            if follower.calling_since is not None and time.monotonic() - follower.calling_since > SILENCE:
                follower.report(f"has not answered for {SILENCE:.0f} s; the run continues without it", "hangs")

    def close(self, *, finished: bool, wait: float | None = None) -> list[str]:
        """Wait, with a time limit, until everything is sent. Returns messages about unsent lines and how to send them.

        Args:
            finished: whether the run is complete; if not, it may be resumed, and its trackers with it.
            wait: seconds; None: a minute, less for an interrupted run.
        """
        if finished:  # not started yet if the run was resumed after its last step
            self.follow()
        if wait is None:
            wait = AT_THE_END if finished else AFTER_AN_INTERRUPTION
        deadline = time.monotonic() + wait
        try:
            for follower in self._followers:
                follower.finished = finished
                follower.ended.set()
            for follower in self._followers:
                follower.join(max(0.0, deadline - time.monotonic()))
        finally:
            for follower in self._followers:
                follower.abandon()
        return [follower.lacks(wait) for follower in self._followers if not follower.progress.complete]


def send_run(config: TrackConfig) -> None:
    """Send a run's unsent metrics to a tracker.

    Project and name default to those of the last time; for the first time, to the project in the run's settings and the name
    of its folder.

    Raises ConfigError if there is no run or the tracker cannot be used, and MachineError if not everything was sent in time.
    """
    if not (config.run / "metrics.jsonl").is_file() or not (config.run / "config.yaml").is_file():
        raise ConfigError(
            f"{config.run} is not a run: it needs metrics.jsonl and config.yaml; name the folder of a run"
        )
    settings = read_settings(config.run)
    last = read_progress(config.run / "tracking" / f"{config.to}.json", identity_of(config.run))[-1:]
    project, name = (last[0].project, last[0].name) if last else (settings.get("track_project"), None)
    options = TrackingOptions(
        track=(config.to,),
        track_project=config.project or project or TrackingOptions.track_project,
        track_offline=config.offline,
    )
    check_trackers(options, offline_flag="--offline")
    trackers = Trackers(options, config.run, config.name or name)
    trackers.follow()
    lacking = trackers.close(finished=(config.run / "summary.json").is_file(), wait=config.wait)
    if lacking:
        raise MachineError("; ".join(lacking))


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
