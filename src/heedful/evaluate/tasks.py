"""Benchmarks by lm-evaluation-harness (Gao et al., https://github.com/EleutherAI/lm-evaluation-harness)."""

import difflib
import importlib.util
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from heedful.configs.evaluate import TasksConfig
from heedful.errors import ConfigError, DataError, HeedfulError, MachineError
from heedful.kernels.device import resolve_device, resolve_dtype
from heedful.models.load import load_policy
from heedful.models.source import resolve
from heedful.models.tokenizer import load_tokenizer

UNREACHABLE = {"ConnectionError", "OfflineModeIsEnabled", "ConnectError", "ConnectTimeout", "ReadTimeout"}
UNREACHABLE |= {"LocalEntryNotFoundError"}
"""Names of errors for a task's data set that cannot be downloaded."""


def evaluate_tasks(config: TasksConfig) -> dict[str, Any]:
    """Measure a model on tasks of the harness, with the harness's own prompts, metrics and standard errors.

    The result has ``TASK/METRIC`` and ``TASK/METRIC_stderr`` for each metric (with the harness's filter in brackets if it
    has one), ``TASK/documents``, and the version of the harness.

    Raises ConfigError if the harness is not installed or has no such task, MachineError if a task's data set cannot be
    reached, DataError if a task cannot be read, and CheckpointError.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            'heedful evaluate tasks needs lm-evaluation-harness, which is not installed: pip install "heedful[lm-eval]"'
        )
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=[str(path) for path in config.task_folder] or None)
    check_tasks(config.tasks, manager.all_tasks)
    device = resolve_device(config.device)
    source = resolve(config.model, config)
    dtype = resolve_dtype(config.dtype, device)
    model = load_policy(source, device=device, compute_dtype=dtype).lm.to(dtype).eval()
    try:
        measured = simple_evaluate(
            HFLM(pretrained=model, tokenizer=load_tokenizer(source), batch_size=config.batch_size),
            tasks=list(config.tasks),
            task_manager=manager,
            num_fewshot=config.few_shot,
            limit=config.limit,
            apply_chat_template=config.chat,
            log_samples=False,
            random_seed=config.seed,
            numpy_random_seed=config.seed,
            torch_random_seed=config.seed,
            fewshot_random_seed=config.seed,
        )
    except HeedfulError:
        raise
    except Exception as error:
        raise _explained(config, error) from error
    assert measured is not None
    return numbers_of(measured) | {"harness": f"lm-eval {version('lm-eval')}"}


def check_tasks(wanted: tuple[str, ...], known: list[str]) -> None:
    """Raise ConfigError for a task unknown to the harness, with the nearest known ones."""
    for task in wanted:
        if task not in known:
            near = difflib.get_close_matches(task, known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "lm-eval ls tasks lists them"
            raise ConfigError(
                f"--tasks {task}: lm-evaluation-harness has no such task; {hint} (your own: --task-folder)"
            )


def numbers_of(measured: Mapping[str, Any]) -> dict[str, Any]:
    """The harness's results as flat names and numbers; groups are beside their tasks.

    ``{"arc": {"acc,none": 0.5, "acc_stderr,none": 0.1}}`` becomes ``{"arc/acc": 0.5, "arc/acc_stderr": 0.1}``.
    """
    numbers: dict[str, Any] = {}
    for task, metrics in {**measured["results"], **(measured.get("groups") or {})}.items():
        for name, value in metrics.items():
            metric, _, choice = name.partition(",")
            if isinstance(value, int | float) and name not in ("sample_len", "sample_count"):
                numbers[f"{task}/{metric}" + (f" ({choice})" if choice not in ("", "none") else "")] = float(value)
        documents = (measured.get("n-samples") or {}).get(task)
        if documents:
            numbers[f"{task}/documents"] = documents["effective"]
    return numbers


def _explained(config: TasksConfig, error: Exception) -> HeedfulError:
    """Convert an error of the harness, of its data sets or of a task's own functions to one of heedful's."""
    causes: set[str] = set()
    one: BaseException | None = error
    while one is not None and type(one).__name__ not in causes:
        causes.add(type(one).__name__)
        one = one.__cause__ or one.__context__
    reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    if causes & UNREACHABLE:
        return MachineError(f"--tasks {' '.join(config.tasks)}: a data set cannot be downloaded: {reason:.300}")
    return DataError(f"--tasks {' '.join(config.tasks)}: lm-evaluation-harness cannot measure this: {reason:.300}")
