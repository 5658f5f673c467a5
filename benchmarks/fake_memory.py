"""Planned memory (heedful plan) beside the live bytes of the same run on CUDA fake tensors; no GPU, no weights.

python benchmarks/fake_memory.py --output runs/fake
python benchmarks/fake_memory.py --output runs/fake --on-cpu

Each run is a trainer's own set-up and two steps (`live_bytes.py` has the device): sampling, scoring, backward, optimizer.
What is not run:

- weights are not read from files, and what heedful tries out on a loaded model is not tried, since there are no numbers;
- sampled tokens are random; only two passes are made: over the prompts, and over the last token for which the cache grows.

With --on-cpu small models run in float32 on the CPU, twice: with numbers, and as shapes only. Prints a table in Markdown: the
largest phase of each run, or with --phases every phase.
"""

import argparse
import contextlib
import itertools
import json
import random
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import peft  # noqa: F401  bitsandbytes, which it imports, would ask the device in a run
import torch
import transformers
from live_bytes import LiveBytes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from workload import END, PAD

from heedful.algorithms.online import start as online_start
from heedful.algorithms.online.rollout import rollout
from heedful.configs.trainers import TRAINERS
from heedful.engines import generate
from heedful.engines.decoder import Decoder
from heedful.kernels.cpu import layers
from heedful.models.heads import LogitMap
from heedful.models.shape import load_shape
from heedful.planning.memory import CUDA_CONTEXT, Lengths, Plan, plan_of
from heedful.planning.shapes import Shape

QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32_768}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 32_768,
    "head_dim": 128,
}
SIZES: dict[str, dict[str, Any]] = {
    "0.5B": QWEN2 | {  # Qwen2.5-0.5B
        "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "1.7B": QWEN3 | {  # Qwen3-1.7B
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "7B": QWEN2 | {  # Qwen2.5-7B
        "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
}  # fmt: skip
ON_CPU: dict[str, dict[str, Any]] = {
    size: QWEN3 | {
        "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": depth,
        "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128, "head_dim": 64,
        "tie_word_embeddings": True,
    }
    for size, vocabulary, hidden, depth in (("34M", 16_384, 512, 8), ("110M", 32_768, 768, 12), ("235M", 32_768, 1024, 16))
}  # fmt: skip
"""Those of benchmarks/memory.py."""
WORDS = ["Ġ" + "".join(letters) for letters in itertools.product(string.ascii_lowercase[:20], repeat=3)]
"""One token each; the models have more rows."""
OFFLINE, ONLINE, SHORT = (512, 512), (384, 128), (64, 64)
"""Tokens of a prompt and of a response: of given texts, of sampled ones, and of both on a CPU."""
LORA = {"lora_rank": 16}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "SFT": ("sft", {}),
    "SFT, float32": ("sft", {"dtype": "float32"}),
    "SFT, recomputed activations": ("sft", {"gradient_checkpointing": True}),
    "SFT, bfloat16 weights": ("sft", {"weights_dtype": "bfloat16"}),
    "SFT, bfloat16 weights, optimizer on the CPU": ("sft", {"weights_dtype": "bfloat16", "optimizer_device": "cpu"}),
    "SFT, LoRA": ("sft", LORA),
    "SFT, LoRA, recomputed activations": ("sft", LORA | {"gradient_checkpointing": True}),
    "reward model": ("reward", {}),
    "reward model, LoRA": ("reward", LORA),
    "DPO": ("dpo", {}),
    "DPO, reference on the CPU": ("dpo", {"reference_device": "cpu"}),
    "DPO, LoRA": ("dpo", LORA),
    "KTO": ("kto", {}),
    "PPO, shared critic": ("ppo", {}),
    "PPO, shared critic, reference on the CPU": ("ppo", {"reference_device": "cpu"}),
    "PPO, shared critic, LoRA": ("ppo", LORA),
    "PPO, critic of its own": ("ppo", {"critic": "separate"}),
    "PPO, critic of its own, LoRA": ("ppo", LORA | {"critic": "separate"}),
    "PPO, critic from the reward model": ("ppo", {"critic": "reward"}),
    "PPO, moving average": ("ppo", {"ema_decay": 0.9}),
    "GRPO": ("grpo", {}),
    "GRPO, float32": ("grpo", {"dtype": "float32"}),
    "GRPO, LoRA": ("grpo", LORA),
    "GRPO, LoRA, recomputed activations": ("grpo", LORA | {"gradient_checkpointing": True}),
    "GRPO, bfloat16 weights, optimizer on the CPU": ("grpo", {"weights_dtype": "bfloat16", "optimizer_device": "cpu"}),
    "online DPO": ("online-dpo", {}),
    "online DPO, LoRA": ("online-dpo", LORA),
}
CPU_RUNS = (
    "SFT",
    "SFT, LoRA",
    "DPO",
    "reward model",
    "GRPO",
    "GRPO, LoRA",
    "PPO, shared critic",
    "PPO, critic of its own",
)


def make(folder: Path, size: str) -> None:
    """A model's folder without weights, and the data."""
    here = folder / size
    here.mkdir(parents=True, exist_ok=True)
    (here / "config.json").write_text(
        json.dumps((SIZES | ON_CPU)[size] | {"eos_token_id": 1, "pad_token_id": 0}), encoding="utf-8"
    )
    (here / "generation_config.json").write_text('{"eos_token_id": 1, "pad_token_id": 0}', encoding="utf-8")
    make_tokenizer().save_pretrained(here)
    chosen = random.Random(0)

    def text(tokens: int) -> str:
        return "".join(chosen.choices(WORDS, k=tokens)).replace("Ġ", " ")

    (prompt, response), (asked, _) = lengths(size, "offline"), lengths(size, "online")
    rows = [{"prompt": text(prompt), "chosen": text(response - 1), "rejected": text(response - 1)} for _ in range(16)]
    prompts = [{"prompt": text(asked)} for _ in range(32)]
    for name, content in {
        "demonstrations": [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows],
        "pairs": rows,
        "labelled": [
            {"prompt": r["prompt"], "completion": r["chosen"], "label": i % 2 == 0} for i, r in enumerate(rows)
        ],
        "prompts": prompts,
    }.items():
        (here / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Bytes, and `WORDS` in the merges of which a Qwen tokenizer finds them."""
    prefixes = list(dict.fromkeys(word[:length] for length in (2, 3, 4) for word in WORDS))
    tokens = [PAD, END, *sorted(pre_tokenizers.ByteLevel.alphabet()), *prefixes]
    merges = [(prefix[:-1], prefix[-1]) for prefix in prefixes]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, END])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)


def lengths(size: str, kind: str) -> tuple[int, int]:
    """Tokens of a prompt and of a response."""
    return SHORT if size in ON_CPU else OFFLINE if kind == "offline" else ONLINE


def settings(folder: Path, size: str, run: str) -> Any:
    """The configuration of a run: two micro-batches of 8 rows a step, two steps."""
    command, changes = RUNS[run]
    here, is_small = folder / size, size in ON_CPU
    data = {"sft": "demonstrations", "reward": "pairs", "dpo": "pairs", "kto": "labelled"}.get(command, "prompts")
    is_pairs = command in ("reward", "dpo", "online-dpo")
    common = {
        "model": str(here), "data": str(here / f"{data}.jsonl"), "output": folder / "run",
        "device": "cpu" if is_small else "cuda", "dtype": "float32" if is_small else "bfloat16", "memory_check": False,
        "eval_fraction": 0.0, "eval_every": 0, "sample_every": 0, "micro_batch_size": 4 if is_pairs else 8, "seed": 0,
    }  # fmt: skip
    if command in ("ppo", "grpo", "online-dpo"):
        common |= {
            "steps": 2, "rollout_batch_size": 32, "minibatch_size": 16, "rollout_micro_batch_size": 16, "ppo_epochs": 1,
            "max_new_tokens": lengths(size, "online")[1], "response_length": "fixed",
            "rewards": (f"model:{here if is_small else folder / '0.5B'}",),
        }  # fmt: skip
        common |= {} if command == "online-dpo" else {"kl_coef": 0.05}
    else:
        common |= {"max_steps": 2, "batch_size": 8 if is_pairs else 16}
    return TRAINERS[command].settings()(**common | changes)


# The run ----------------------------------------------------------------------------------------------------------------


def measure(config: Any, *, has_numbers: bool = False) -> dict[str, int]:
    """The largest number of live bytes in each phase of a run's set-up and first steps, as shapes or ``has_numbers``."""
    trainer = TRAINERS[config.algorithm]
    page: Any = trainer.page()
    with LiveBytes(config.device, has_numbers=has_numbers) as device, shortened(device):
        device.phase = "backward"
        if trainer.is_online:
            _, learner, _, _ = online_start.start(config, ())
            for _ in range(2):
                scored = rollout(learner, next(learner.prompts))
                with device.in_phase("scoring"):
                    experience = page.make_experience(learner, scored)
                page.learn(learner, experience)
                del experience
        else:
            learner, data = page.start(config)
            for _ in range(2):
                page.learn(learner, data.train[: config.batch_size], config)
        return device.peaks


@contextlib.contextmanager
def shortened(device: LiveBytes) -> Iterator[None]:
    """In this context models come from their configuration alone, phases are named, and sampling is shortened."""

    def named(place: str, phase: str) -> Any:
        module, _, name = place.rpartition(".")
        function = getattr(__import__(module, fromlist=[name]), name)

        def in_phase(*args: Any, **kwargs: Any) -> Any:
            with device.in_phase(phase):
                return function(*args, **kwargs)

        return mock.patch(place, in_phase)

    with contextlib.ExitStack() as stack:
        for place, phase in PHASES.items():
            stack.enter_context(named(place, phase))
        for place, stand_in in (STAND_INS | (NO_CPU if device.kind == "cuda" else {})).items():
            stack.enter_context(mock.patch(place, stand_in))
        yield


PHASES = {
    "heedful.engines.sampler.generate": "sampling",
    "heedful.algorithms.online.rollout.score_tokens": "scoring",
    "heedful.algorithms.dpo.with_reference": "scoring",
    "heedful.algorithms.kto.with_reference": "scoring",
    "heedful.algorithms.ppo.learn_values": "values",
    "heedful.algorithms.online.update.optimizer_step": "step",
    "heedful.algorithms.offline.optimizer_step": "step",
}
"""Functions with the phases of the plan that they are; everything else is the phase ``backward``."""


def _made(auto: Any, source: Any, _kind: str = "", **options: Any) -> tuple[Any, dict[str, Any]]:
    """`heedful.models.load.read_weights`: a model without weights."""
    config = transformers.AutoConfig.from_pretrained(source.base)
    config.num_labels = options.get("num_labels", config.num_labels)
    model = auto.from_config(config, dtype=torch.float32)
    return model, {"missing_keys": [], "mismatched_keys": []}


def _decode(
    model: generate.SamplingModel,
    prompts: Sequence[Sequence[int]],
    sampling: Any,
    *,
    uniforms: Tensor,
    pad_id: int,
    num_tokens: int | None,
    at_a_time: int,
    **_: Any,
) -> Iterator[generate.Step]:
    """`heedful.engines.generate.decode`, whose model reads only the prompts and the last token, of the first rows."""
    longest, held = max(map(len, prompts)) + sampling.max_new_tokens, prompts[:at_a_time]
    decoder = Decoder(model, num_rows=len(held), longest=longest, pad_id=pad_id)
    rows = torch.arange(len(prompts), device=model.device)
    active = torch.ones(len(prompts), dtype=torch.bool, device=model.device)
    logits = decoder.read_prompts(held)
    for step in range(sampling.max_new_tokens):
        if step in (0, sampling.max_new_tokens - 1):
            generate._next_tokens(logits, sampling, uniforms[: len(held), step].to(model.device), num_tokens)
        tokens = torch.randint(1000, 1000 + len(WORDS) // 2, (len(prompts),), device=model.device)
        yield generate.Step(
            rows, torch.full_like(rows, step), tokens, torch.zeros(len(prompts), device=model.device), None, active
        )
        if step == 0:
            assert decoder.slots is not None
            decoder.slots.steps = sampling.max_new_tokens - 2
            del logits
            logits = decoder.read_tokens(tokens[: len(held)])


def _shape(model: str) -> Shape:
    """`load_shape`, whose model without numbers is none on the device."""
    with _disable_current_modes():
        return load_shape(model)


def _leave_out(_trunk: Any, mlp: torch.nn.Module) -> bool:
    """The last MLP can leave tokens out."""
    layers._replace(mlp, layers._mlp_of_read)
    return True


STAND_INS: dict[str, Callable[..., Any]] = {
    "heedful.models.load.read_weights": _made,
    "heedful.engines.generate.decode": torch.no_grad()(
        _decode
    ),  # inference mode would hide what composed operators allocate
    "transformers.masking_utils.is_tracing": lambda *_: False,  # it would make masks that full rows do not need
    "heedful.algorithms.ppo.finite_rows": lambda rewards, *_: torch.ones_like(rewards[:, 0], dtype=torch.bool),
    # What is tried out on a loaded model, with the answers of a Qwen model.
    "heedful.models.policy.logit_map": lambda _: LogitMap(),
    "heedful.engines.sampler.tell_textless": lambda *_, **__: None,
    "heedful.models.load.check_causal": lambda *_: None,
    "heedful.models.value_model.check_causal": lambda *_: None,
    "heedful.training.setup.hold_untrained_rows": lambda *_: None,
    "heedful.training.memory_preflight.load_shape": _shape,
    "heedful.kernels.waiting.synchronize": lambda _: None,
    "heedful.models.reward_model.RewardModel._can_pack": lambda _: True,
    "heedful.kernels.cpu.layers._try_leaving_out": _leave_out,
}
NO_CPU: dict[str, Callable[..., Any]] = {
    "heedful.models.load.use_lean_layers": lambda model, _: model,
    "heedful.engines.decoder.join_matrices": lambda *_, **__: None,
    "heedful.engines.one_token.joined": lambda *_: None,
    "heedful.training.memory_preflight.free_memory": lambda _: None,
    "heedful.training.compact_adamw.device_module": lambda _: None,
}
"""Layers for a CPU are compared with those that they replace; on CUDA only a reference on the CPU would have them. Fake
tensors have no addresses, their device has no free memory, and copies of them are not waited for."""


def planned(config: Any, size: str) -> Plan:
    """The plan of the same run."""
    prompt, response = lengths(size, "online" if hasattr(config, "max_new_tokens") else "offline")
    half = config.dtype != "float32"
    return plan_of(config, load_shape, Lengths(prompt + response, prompt), device=config.device, half=half)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for models without weights, and data")
    parser.add_argument("--on-cpu", action="store_true", help="small models on the CPU, with numbers and without")
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES, *ON_CPU])
    parser.add_argument("--runs", nargs="+", choices=list(RUNS))
    parser.add_argument("--phases", action="store_true", help="all phases, not only the largest")
    options = parser.parse_args()
    sizes = options.sizes or (ON_CPU if options.on_cpu else SIZES)
    for size in {*sizes, "0.5B"}:
        make(options.output, size)
    live = " live on the CPU, GB |" if options.on_cpu else ""
    print(f"| model | run | phase | planned, GB | shapes, GB |{live} planned / shapes |")
    print("|---" * (7 if live else 6) + "|")
    for size in sizes:
        for run in options.runs or (CPU_RUNS if options.on_cpu else RUNS):
            config = settings(options.output, size, run)
            with_numbers = measure(config, has_numbers=True) if options.on_cpu else {}
            plan, shapes = planned(config, size), measure(config)
            for phase in plan.phases if options.phases else [max(shapes, key=shapes.__getitem__)]:
                of_plan = plan.total(phase) - (0 if options.on_cpu else CUDA_CONTEXT)
                columns = [of_plan, shapes[phase], *([with_numbers[phase]] if options.on_cpu else [])]
                cells = [
                    size,
                    run,
                    phase,
                    *(f"{column / 1e9:.2f}" for column in columns),
                    f"{of_plan / shapes[phase]:.3f}",
                ]
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
