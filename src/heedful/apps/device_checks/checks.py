"""The checks of a device, and running one of them."""

import contextlib
import io
import math
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from heedful.apps.device_checks import memory, passes, sampling, training
from heedful.apps.device_checks.result import CheckError, LeftOutError, Measurement, Workbench
from heedful.devices import capabilities, synchronize
from heedful.display import silence
from heedful.kernels.device import half_dtypes


@dataclass(frozen=True)
class DeviceCheck:
    """Something that must hold on a device."""

    name: str
    measure: Callable[..., Measurement]
    """Called with a `Workbench` and ``settings``."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""
    """The field of `Capabilities` without which it is left out."""


@dataclass(frozen=True)
class Row:
    """What became of a check."""

    check: str
    outcome: Literal["pass", "fail", "skip"]
    value: float | None
    """The measured number. None if there is none, because the check was left out or raised an error."""
    limit: float | None
    """The largest number that passes."""
    note: str
    """What the number is, or why there is none."""
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinite numbers and no NaN: they are strings."""
        is_number = self.value is None or math.isfinite(self.value)
        return asdict(self) | ({} if is_number else {"value": str(self.value)})


LACKED = {"graphs": "CUDA graphs", "bitsandbytes": "kernels of bitsandbytes"}
DTYPES = ("float32", "bfloat16", "float16")
LESS = {
    "moments in main memory": {"optimizer_device": "cpu"},
    "weights in bfloat16": {"weights_dtype": "bfloat16"},
    "both": {"weights_dtype": "bfloat16", "optimizer_device": "cpu"},
}
GRPO: dict[str, dict[str, Any]] = {"reference on the CPU": {"reference_device": "cpu"}, "LoRA": {"lora_rank": 4}}
GRPO["gradient checkpointing"] = {"gradient_checkpointing": True}
EIGHT_BIT, FOUR_BIT = {"optimizer": "adamw-8bit"}, {"quantize": "4bit", "lora_rank": 4}
CHECKS = (
    *(DeviceCheck(f"passes, {dtype}", passes.passes, {"dtype": dtype}) for dtype in DTYPES),
    *(DeviceCheck(f"packed texts, {dtype}", passes.packed_rows, {"dtype": dtype}) for dtype in ("bfloat16", "float32")),
    DeviceCheck("a reference on the CPU", passes.reference_on_the_cpu),
    *(DeviceCheck(f"frozen weights, {dtype}", passes.frozen_weights, {"dtype": dtype}) for dtype in DTYPES[1:]),
    DeviceCheck("AdamW in main memory", passes.moments_in_main_memory),
    DeviceCheck("random numbers on resuming", passes.random_numbers),
    DeviceCheck("greedy sampling", sampling.greedy_sampling),
    *(DeviceCheck(f"sampled log-probs, {dtype}", sampling.sampled_logprobs, {"dtype": dtype}) for dtype in DTYPES),
    *(DeviceCheck(f"PPO's stages, {dtype}", training.three_stages, {"dtype": dtype}) for dtype in DTYPES),
    *(DeviceCheck(f"GRPO, {name}", training.grpo, {"settings": settings}) for name, settings in GRPO.items()),
    *(
        DeviceCheck(f"SFT, {name}", training.less_memory, {"settings": settings, "dtype": "bfloat16"})
        for name, settings in LESS.items()
    ),
    DeviceCheck("8-bit moments", training.bitsandbytes, {"settings": EIGHT_BIT}, "bitsandbytes"),
    DeviceCheck("4-bit weights", training.bitsandbytes, {"settings": FOUR_BIT}, "bitsandbytes"),
    DeviceCheck("a divided model, one rank", training.one_rank),
    DeviceCheck("memory against the plan", memory.planned_memory, {"dtype": "bfloat16"}),
    DeviceCheck("a run far too large", memory.far_too_large),
    *(
        DeviceCheck(f"sampling with graphs, {dtype}", sampling.recorded_sampling, {"dtype": dtype}, "graphs")
        for dtype in DTYPES[:2]
    ),
    *(
        DeviceCheck(f"graphs, {architecture}", sampling.graphs, {"architecture": architecture}, "graphs")
        for architecture in ("gpt2", "llama", "qwen2", "qwen3")
    ),
    *(
        DeviceCheck(
            f"graphs of changed weights, {dtype}", sampling.graphs_of_changed_weights, {"dtype": dtype}, "graphs"
        )
        for dtype in DTYPES[:2]
    ),
    DeviceCheck("no waiting in a step", sampling.steps_without_waiting, needs="graphs"),
    DeviceCheck("a model that waits", sampling.model_that_waits, needs="graphs"),
)
"""In the order of their rows: first what others build on."""


def run_check(check: DeviceCheck, device: torch.device) -> Row:
    """Run a check in a temporary folder, without output. An error of any kind is a failure."""
    started = time.perf_counter()

    def row(outcome: Literal["pass", "fail", "skip"], note: str, found: Measurement | None = None) -> Row:
        value, limit = (None, None) if found is None else (found.value, found.limit)
        return Row(check.name, outcome, value, limit, note, round(time.perf_counter() - started, 2))

    if check.needs and not getattr(capabilities(device), check.needs):
        return row("skip", f"{device.type} has no {LACKED[check.needs]}")
    dtype = check.settings.get("dtype", "float32")
    if dtype != "float32" and getattr(torch, dtype) not in half_dtypes(device):
        return row("skip", f"{device.type} has no {dtype}")
    try:
        with tempfile.TemporaryDirectory(prefix="heedful-device-") as folder, _quiet():
            torch.manual_seed(0)
            found = check.measure(Workbench(device, Path(folder)), **check.settings)
            synchronize(device)
    except LeftOutError as reason:
        return row("skip", str(reason))
    except CheckError as error:
        return row("fail", str(error))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        return row("fail", f"{said} ({Path(last.filename).name}:{last.lineno})")
    return row("pass" if found.value <= found.limit else "fail", found.what, found)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what a run prints away from the table. That sampling does without graphs, which is else a warning, is an error."""
    out, err = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with warnings.catch_warnings(), silence(), out, err:
        warnings.simplefilter("ignore")
        warnings.filterwarnings(
            "error", message=".* (cannot be captured as a CUDA graph|is sampled without CUDA graphs)"
        )
        yield
