"""``heedful doctor --device cuda``: run the checks of a device, and print one table to send."""

import json
import platform
import shutil
import subprocess
from importlib.metadata import version
from typing import Any

import torch
from rich.text import Text as RichText

from heedful import __version__
from heedful.apps.device_checks.checks import CHECKS, Row, run_check
from heedful.configs.doctor import DoctorDeviceConfig
from heedful.devices import device_module, total_memory
from heedful.display import Screen, harmless
from heedful.kernels.device import resolve_device, resolve_dtype

WIDEST = max(len(check.name) for check in CHECKS)
LONGEST = 10
"""Seconds to wait for nvidia-smi, which hangs on some broken GPUs."""
COLOURS = {"pass": "green", "fail": "bold red", "skip": "dim"}


def check_device(config: DoctorDeviceConfig) -> None:
    """Run all checks on a device and print each as it ends. Raises ConfigError for a device that is not there; SystemExit
    with status 2 if a check fails.
    """
    device = resolve_device(config.device)
    console = Screen(soft_wrap=True, quiet=config.json)
    about = about_device(device)
    for name, value in about.items():
        console.print(harmless(f"{name:<12} {value}"), markup=False, highlight=False)
    console.print()
    rows = []
    for check in CHECKS:
        row = run_check(check, device)
        console.print(RichText(harmless(line(row)), style=COLOURS[row.outcome]))
        rows.append(row)
    counts = {outcome: sum(row.outcome == outcome for row in rows) for outcome in ("pass", "fail", "skip")}
    if config.json:
        print(json.dumps({"about": about, **counts, "checks": [row.as_dict() for row in rows]}, indent=1))
    said = f"{counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped"
    console.print(f"\n{said} in {sum(row.seconds for row in rows):.0f} s", highlight=False)
    if counts["fail"]:
        raise SystemExit(2)


def line(row: Row) -> str:
    """A check's row of the table."""
    number = "" if row.value is None else f"{row.value:.2g} (at most {row.limit:g}) "
    return f"{row.outcome}  {row.check:<{WIDEST}}  {row.seconds:6.1f} s  {number}{row.note}"


def about_device(device: torch.device) -> dict[str, Any]:
    """What the table is about: device, driver, versions."""
    module, memory = device_module(device), total_memory(device)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else platform.machine()
    return {
        "device": f"{device}: {name}" + ("" if memory is None else f", {memory / 1e9:.1f} GB"),
        "driver": _driver() if device.type == "cuda" else "none",
        "precision": str(resolve_dtype("auto", device)).removeprefix("torch."),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}" if torch.version.cuda else torch.__version__,
        "transformers": version("transformers"),
        "heedful": __version__,
        "python": f"{platform.python_version()}, {platform.platform()}",
    }


def _driver() -> str:
    """Version of NVIDIA's driver, or of ROCm, as far as it can be known."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return f"ROCm {torch.version.hip}" if torch.version.hip else "unknown"
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, check=True, timeout=LONGEST)
    except (subprocess.SubprocessError, OSError):
        return "unknown"
    return asked.stdout.partition("\n")[0].strip() or "unknown"
