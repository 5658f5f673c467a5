"""What the rows share: sizes, models with random weights, results, memory and time of a device."""

import contextlib
import gc
import json
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM
from workload import Shape, make_policy, make_tokenizer, make_workload

from heedful.devices import device_module, synchronize
from heedful.kernels.device import resolve_device

VOCABULARY = 151_936
TINY = Shape(vocabulary=600, layers=2, hidden=32, heads=4, kv_heads=2, intermediate=64, head_dim=16)
QWEN3_06B = Shape(
    vocabulary=VOCABULARY, layers=28, hidden=1024, heads=16, kv_heads=8, intermediate=3072, head_dim=128, context=8192
)
QWEN25_05B = Shape(vocabulary=VOCABULARY, layers=24, hidden=896, heads=14, kv_heads=2, intermediate=4864, context=8192)
QWEN3_8B = Shape(
    vocabulary=VOCABULARY, layers=36, hidden=4096, heads=32, kv_heads=8, intermediate=12_288, head_dim=128, context=8192
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of everything that is measured."""

    shapes: Mapping[str, Shape] = field(default_factory=lambda: {"0.6B": QWEN3_06B, "0.5B": QWEN25_05B, "8B": QWEN3_8B})
    compared: int = 48
    """Tokens of the responses in ``truth``."""
    rows: tuple[int, int] = (64, 256)
    """Rows of ``decode``."""
    prompt: int = 128
    response: int = 512
    profiled: int = 16
    """Tokens of ``profile``."""
    text: Mapping[str, int] = field(default_factory=lambda: {"0.5B": 1024, "8B": 4096})
    """Tokens of the texts of ``fit``."""
    ppo: tuple[int, int, int] = (64, 16, 128)
    """Responses of ``ppo``, rows of its micro-batches, tokens of a response."""
    full_rows: int = 64
    """Rows of ``memory``, of which an eighth fits into memory."""
    full_text: int = 512
    threads: int = 16


SMALL = Sizes(
    shapes=dict.fromkeys(("0.6B", "0.5B", "8B"), TINY),
    compared=6,
    rows=(4, 8),
    prompt=8,
    response=4,
    profiled=4,
    text={"0.5B": 32, "8B": 32},
    ppo=(4, 2, 4),
    full_rows=16,
    full_text=8,
    threads=1,
)


@dataclass(frozen=True)
class Day:
    """Where a row runs, how large it is, and where its results go."""

    row: str
    device: torch.device
    sizes: Sizes
    results: Any
    """Has ``add``, for a line of JSON."""
    work: Path
    """A folder that stays between calls."""

    def tell(self, what: str, **found: Any) -> None:
        """A result."""
        self.results.add({"row": self.row, "what": what, **{key: _short(value) for key, value in found.items()}})

    def check(self, what: str, value: float, limit: float, **found: Any) -> None:
        """A number that must not be above its limit, nor NaN."""
        self.tell(what, value=value, limit=limit, right=bool(value <= limit), **found)

    @contextlib.contextmanager
    def part(self, what: str) -> Iterator[None]:
        """An error in here is a wrong result of this name, and the row goes on. So is sampling that does without its graphs,
        which is else a warning."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*CUDA graph")
                yield
        except Exception as error:
            traceback.print_exc()
            self.tell(what, right=False, error=f"{type(error).__name__}: {error}"[:500])

    @property
    def drawing(self) -> torch.device:
        """Where random weights are drawn: on a GPU, since a billion of them take a CPU long."""
        return self.device if self.device.type == "cuda" else torch.device("cpu")

    def policy(self, name: str) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerBase]:
        """A model of this shape on the device."""
        with self.drawing:
            model = make_policy(self.sizes.shapes[name], seed=0)
        return model.to(self.device), make_tokenizer(self.sizes.shapes[name].vocabulary)

    def folder(self, name: str, *kinds: str) -> Path:
        """The folder of models of this shape, of these kinds, with prompts (workload.py); made if it is not there."""
        folder = self.work / "-".join([name, *kinds, str(self.sizes.prompt)])
        if not (folder / "workload.json").exists():
            shape, prompt = self.sizes.shapes[name], self.sizes.prompt
            with self.drawing:
                make_workload(folder, shape, num_prompts=512, prompt_length=prompt, kinds=kinds, dtype=torch.bfloat16)
            self.forget()
        return folder

    def memory(self) -> dict[str, float]:
        """GB allocated and reserved at their most, and what the process takes besides, where the device tells."""
        module, device = device_module(self.device), self.device
        if not hasattr(module, "max_memory_reserved"):
            return {}
        allocated, reserved = module.max_memory_allocated(device), module.max_memory_reserved(device)
        free, total = module.mem_get_info(device)
        context = total - free - module.memory_reserved(device)
        return {"allocated_gb": allocated / 1e9, "reserved_gb": reserved / 1e9, "beside_torch_gb": context / 1e9}

    def allocated(self) -> float:
        """GB of all tensors, 0 where the device does not tell."""
        return getattr(device_module(self.device), "memory_allocated", lambda _: 0)(self.device) / 1e9

    def forget(self) -> None:
        """What `memory` tells begins here."""
        gc.collect()
        module = device_module(self.device)
        if hasattr(module, "empty_cache"):
            module.empty_cache()
        if hasattr(module, "reset_peak_memory_stats"):
            module.reset_peak_memory_stats(self.device)

    def seconds(self, run: Callable[[], object]) -> float:
        """Of a call, the device's work included."""
        synchronize(self.device)
        started = time.perf_counter()
        run()
        synchronize(self.device)
        return time.perf_counter() - started


def written(file: Path, records: Iterable[Mapping[str, str]]) -> str:
    """The path of a file of these records. Data in memory would load `datasets`, and so pandas, needlessly."""
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(file)


def _short(value: Any) -> Any:
    """Four digits of a number; JSON has no NaN."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if abs(value) < float("inf") else str(value)


def day(row: str, device: str, results: Any, work: Path, *, dry: bool) -> Day:
    """A row's day, on a device that is set up as for a run."""
    return Day(row, resolve_device(device), SMALL if dry else Sizes(), results, work)
