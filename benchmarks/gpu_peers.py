"""Others' trainers on a shape of gpu.py, each in a process of its own, by the scripts in benchmarks/peers/."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_limits import Workload
from gpu_models import make_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from heedful.data.loading import EncodedPrompt

ITERATIONS, WARM_UP = 4, 2


def write_workload(
    folder: Path,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[EncodedPrompt],
    device: torch.device,
) -> None:
    """policy/, value/ and reward/ with random weights, and more prompts than the peers use, as ids and as text."""
    if config.model_type == "qwen2":  # in a folder of its kind transformers reads no tokenizer but its own
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        names += ("num_key_value_heads", "tie_word_embeddings", "pad_token_id", "eos_token_id", "bos_token_id")
        config = LlamaConfig(**{name: getattr(config, name) for name in names}, attention_bias=True)
    config.num_labels = 1
    for kind, part in (("policy", AutoModelForCausalLM), ("value", AutoModelForSequenceClassification)):
        make_model(part.from_config, config, device).save_pretrained(folder / kind)
        tokenizer.save_pretrained(folder / kind)
    (folder / "reward").symlink_to(folder / "value", target_is_directory=True)
    many = [*prompts] * (ITERATIONS + WARM_UP)
    (folder / "prompts.json").write_text(json.dumps([prompt.ids for prompt in many]), encoding="utf-8")
    lines = "".join(json.dumps({"prompt": prompt.prompt.prompt}) + "\n" for prompt in many)
    (folder / "prompts.jsonl").write_text(lines, encoding="utf-8")


def run_peer(kind: str, python: str, folder: Path, work: Workload, seconds: float) -> dict[str, Any]:
    """What the peer's script prints last, or ``{"why": ...}`` where it came to no end."""
    script = Path(__file__).parent / "peers" / f"trl_{kind}.py"
    sizes = {"batch": work.batch, "micro-batch": work.micro_batch, "response-length": work.response}
    flags = [f"--{name}={value}" for name, value in (sizes | {"iterations": ITERATIONS, "warmup": WARM_UP}).items()]
    command = [python, str(script), f"--workload={folder}", "--tuned", *flags]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds)
        report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"why": f"not finished in the {seconds:.0f} s that were left"}
    except subprocess.CalledProcessError as error:
        return {"why": (error.stderr.strip().splitlines() or [str(error)])[-1]}
    except (OSError, ValueError, IndexError) as error:
        return {"why": f"{type(error).__name__}: {error}"}
    return report
