"""The trackers of a run, seen from the run: processes that are started, listened to, and ended in time."""

import contextlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.configs.tracking import TrackConfig, Tracker, TrackingOptions
from heedful.display import say
from heedful.errors import ConfigError, MachineError
from heedful.files import read_object
from heedful.redact import redact
from heedful.tracking.clients import CLIENTS
from heedful.tracking.progress import Destination, Progress, identity_of
from heedful.tracking.records import count
from heedful.tracking.worker import Orders

START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from heedful.tracking.worker import main
main()
"""
"""The program of a worker, which finds the same modules as this process."""
LONGEST_CHECK = 30.0
"""Seconds to wait for a tracker's answer whether it can be used; without one the run begins, as a tracker stops none."""
AFTER_AN_INTERRUPTION = 10.0
"""Seconds to wait for trackers at the end of a run that was interrupted: who ended it may not wait longer."""


def check_trackers(config: TrackingOptions, *, offline_flag: str = "--track-offline") -> None:
    """Refuse trackers that are not installed or not logged in, before anything is loaded. Raises ConfigError."""
    for name in config.track:
        check_installed(name)
    started = [(name, _start(Orders(name, "", Destination(), "", config.track_offline, 0.0))) for name in config.track]
    deadline = time.monotonic() + LONGEST_CHECK
    refused = None
    for name, process in started:
        try:
            answer, log = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _kill(process)
            process.communicate()
            say(f"--track {name} has not answered for {LONGEST_CHECK:.0f} s; the run begins all the same")
            continue
        if process.returncode:
            reason = (log.decode("utf-8", "replace").strip().splitlines() or [f"exit status {process.returncode}"])[-1]
            reason = f"it is installed, but cannot be used: {redact(reason):.300}; install it again"
            refused = refused or f"--track {name}: {reason}"
        elif answer:
            why = json.loads(answer)["refused"]
            refused = refused or f"--track {name}: {why}; or add {offline_flag} to send nothing"
    if refused is not None:
        raise ConfigError(refused)


def check_installed(name: Tracker) -> None:
    """Raise ConfigError if a tracker's package is not there. It is not imported."""
    if importlib.util.find_spec(name) is None:
        raise ConfigError(
            f'--track {name}: {name} is not installed; pip install "heedful[{name}]", or leave it out (metrics.jsonl and '
            "tensorboard/ have every number)"
        )


@dataclass
class _Followed:
    orders: Orders
    process: "subprocess.Popen[bytes]"
    unread: bytes = b""

    def news(self) -> list[str]:
        """The lines that came since the last look."""
        assert self.process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self.process.stdout.fileno(), 1 << 16):
                self.unread += piece
        *lines, self.unread = self.unread.split(b"\n")
        return [f"{self.orders.tracker}: {line.decode('utf-8', 'replace')}" for line in lines]


class Trackers:
    """Feeds the trackers that a run's settings name from its metrics.jsonl, each in a process of its own.

    The file is the queue: nothing is held in memory, and no call waits for a tracker but `close`.

    Args:
        config: which trackers, and what they are told.
        run: the run's folder.
    """

    def __init__(self, config: TrackingOptions, run: Path) -> None:
        self._config, self._run = config, run
        self._followed: list[_Followed] | None = None
        self._identity = identity_of(run) if config.track else ""  # now, while the run holds its folder
        self.complete = True
        """False once `close` has found that not everything got out."""

    def follow(self) -> list[str]:
        """Have trackers follow the run, if they do not yet. Returns what they have to say since the last call."""
        config = self._config
        if not config.track:
            return []
        if self._followed is None:
            self._followed = []
            try:
                self._start_all()
            except OSError as error:  # no more processes, say
                return [f"trackers cannot be started: {error}; the run goes on without them"]
        return [line for followed in self._followed for line in followed.news()]

    def _start_all(self) -> None:
        config, followed = self._config, self._followed
        assert followed is not None
        name = config.track_name or self._run.resolve().name
        for tracker in config.track:
            address = CLIENTS[tracker].destination(offline=config.track_offline)
            to = Destination(self._identity, address, config.track_project)
            orders = Orders(tracker, str(self._run), to, name, config.track_offline, config.track_wait)
            followed.append(_Followed(orders, _start(orders)))

    def close(self, *, finished: bool, wait: float | None = None) -> list[str]:
        """Wait, in bounds, until trackers have everything. Returns what they said, and what has not got out.

        Args:
            finished: whether the run is complete; if not, it may go on later, and so does what is in the trackers.
            wait: seconds; None is what the settings say, but little for a run that was interrupted.
        """
        said = self.follow() if finished else []  # a run that went on after its last step has not started them yet
        if not self._followed:
            return said
        if wait is None:
            wait = self._config.track_wait if finished else min(self._config.track_wait, AFTER_AN_INTERRUPTION)
        deadline = time.monotonic() + wait
        try:
            for followed in self._followed:
                _tell(followed.process, b"finished\n" if finished else b"unfinished\n")
            for followed in self._followed:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    followed.process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for followed in self._followed:
                _kill(followed.process)
        said += [line for followed in self._followed for line in followed.news()]
        for followed in self._followed:
            assert followed.process.stdout is not None
            followed.process.stdout.close()
        lacking = [line for followed in self._followed if (line := self._rest(followed, wait))]
        self.complete = not lacking
        return said + lacking

    def _rest(self, followed: _Followed, wait: float) -> str:
        """What has not got out, and how to send it; nothing if all has. A disk that fails now ends no run that is done."""
        if followed.process.returncode == 0:
            return ""
        try:
            return self._lacks(followed, wait)
        except OSError as error:
            orders = followed.orders
            what = f"what it lacks is not known, as the run's files cannot be read ({error})"
            return f"{orders.tracker}: {what}. Send it: {_again(orders)}"

    def _lacks(self, followed: _Followed, wait: float) -> str:
        """The same of a tracker that did not end well. Raises OSError."""
        orders, path = followed.orders, self._run / "metrics.jsonl"
        if identity_of(self._run) != orders.to.run:
            return f"{orders.tracker}: what it lacks is lost, as {self._run} holds another run now"
        progress = Progress.read(self._run / "tracking" / f"{orders.tracker}.json")
        if progress.to != orders.to:  # its process never came to write it
            progress = Progress()
        total, sent = count(path), count(path, progress.sent)
        how = progress.later if sent == total and progress.later else _again(orders)
        what = f"it has {sent} of {total} records" if sent < total else "its last records may not have got out"
        failed = f", after {progress.failures} failed tries" if progress.failures else f" after {wait:.0f} s"
        return f"{orders.tracker}: {what}{failed}; the run's own files have all. Send the rest: {how}"


def _again(orders: Orders) -> str:
    """The command that sends to the same place what a tracker lacks of a run."""
    words = ["heedful", "track", orders.run, orders.tracker, "--project", orders.to.project, "--name", orders.name]
    return shlex.join([*words, *(["--offline"] if orders.offline else [])])


def send_run(config: TrackConfig) -> list[str]:
    """Send a run's metrics to a tracker: what it lacks. Returns what the tracker says, such as where to look.

    Project and name that are not given are those to which the tracker was sent last, or else those of the run's settings.

    Raises ConfigError if there is no run or the tracker cannot be used, and MachineError if not everything has got out in
    time.
    """
    if not (config.run / "metrics.jsonl").is_file() or not (config.run / "config.yaml").is_file():
        raise ConfigError(
            f"{config.run} is no run: it has no metrics.jsonl with a config.yaml; name the folder of a run"
        )
    settings = _settings(config.run)
    last = Progress.read(config.run / "tracking" / f"{config.to}.json")
    if last.to.run != identity_of(config.run):
        last = Progress()
    options = TrackingOptions(
        track=(config.to,),
        track_project=config.project
        or last.to.project
        or settings.get("track_project")
        or TrackingOptions.track_project,
        track_name=config.name or last.name or settings.get("track_name"),
        track_offline=config.offline,
        track_wait=config.wait,
    )
    check_trackers(options, offline_flag="--offline")
    trackers = Trackers(options, config.run)
    said = trackers.follow()
    said += trackers.close(finished=(config.run / "summary.json").is_file(), wait=config.wait)
    if not trackers.complete:
        raise MachineError("; ".join(said))
    return said


def _settings(run: Path) -> dict[str, Any]:
    """The settings of a run. Raises ConfigError."""
    return read_object(run / "config.yaml", "bring it back, or name the folder of another run", error=ConfigError)


def _start(orders: Orders) -> "subprocess.Popen[bytes]":
    checks = not orders.run
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", START, json.dumps(sys.path), orders.to_json()],
        stdin=subprocess.DEVNULL if checks else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if checks else subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for heedful, which then ends it
    )
    if not checks:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
    return process


def _tell(process: "subprocess.Popen[bytes]", word: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended already
        process.stdin.write(word)
        process.stdin.close()


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """End a process with all that it started; one that has ended is let be."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
