"""Sampling alone: heedful's sampler, or transformers' `generate`, on the workload of workload.py.

python benchmarks/sampling.py heedful --workload runs/workload [--natural-eos]
python benchmarks/sampling.py transformers --workload runs/workload [--natural-eos]

Both in bf16, or with --dtype float32 both in that.

An iteration samples one response to each prompt of one batch, all rows at once, temperature 1, no filters. heedful's figure
includes what it gives besides the tokens, the log-prob of each; `generate` is asked for tokens alone. Prints one JSON object.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers.measurement import iteration_arguments, iteration_report, peak_memory, policy_folder, print_report

END, PADDING = 1, 0
"""Special tokens of the workload."""


def dtype_of(options: Any) -> Any:
    """bf16 unless float32 is asked for."""
    import torch

    return torch.float32 if options.dtype == "float32" else torch.bfloat16


def heedful_sampler(options: Any) -> Callable[[list[list[int]]], Any]:
    """A function from prompts to the lengths of responses."""
    import torch

    from heedful.configs.options import SamplingOptions
    from heedful.engines.generate import generate
    from heedful.kernels.device import resolve_device
    from heedful.models.load import load_policy
    from heedful.types import MicroBatch

    device = resolve_device("auto")
    policy = load_policy(policy_folder(options), device=device, compute_dtype=dtype_of(options))
    length = "stop" if options.natural_eos else "fixed"
    sampling = SamplingOptions(max_new_tokens=options.response_length, response_length=length)
    generator = torch.Generator().manual_seed(options.seed)

    def respond(prompts: list[list[int]]) -> Any:
        return generate(
            policy,
            prompts,
            sampling,
            stop_ids=[END],
            pad_id=PADDING,
            generator=generator,
            micro_batch=MicroBatch(options.batch),
        ).lengths

    return respond


def transformers_sampler(options: Any) -> Callable[[list[list[int]]], Any]:
    """A function from prompts to the lengths of responses."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(policy_folder(options), dtype=dtype_of(options)).to(device).eval()
    model.generation_config.eos_token_id = END if options.natural_eos else None
    config = GenerationConfig(
        max_new_tokens=options.response_length,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=PADDING,
        eos_token_id=END if options.natural_eos else None,
    )
    torch.manual_seed(options.seed)

    def respond(prompts: list[list[int]]) -> Any:
        ids = torch.tensor(prompts, device=device)
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return (output[:, ids.shape[1] :] != PADDING).sum(dim=1)

    return respond


def main() -> None:
    parser = iteration_arguments(__doc__)
    parser.add_argument("side", choices=["heedful", "transformers"])
    options = parser.parse_args()

    import torch
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401 (loaded late, else it would count as a run's memory)

    if options.side == "heedful":
        import heedful.engines.generate  # noqa: F401
    import_memory = peak_memory()
    torch.set_num_threads(options.threads)
    respond = (heedful_sampler if options.side == "heedful" else transformers_sampler)(options)
    prompts = json.loads(Path(options.workload, "prompts.json").read_text(encoding="utf-8"))
    seconds, lengths = [], []
    for i in range(options.iterations):
        start = i * options.batch % (len(prompts) - options.batch + 1)
        started = time.perf_counter()
        mean = float(respond(prompts[start : start + options.batch]).float().mean())
        seconds.append(time.perf_counter() - started)
        lengths.append(mean)
    print_report(
        iteration_report(
            options,
            side=f"{options.side} sampling",
            seconds=seconds,
            phases={},
            lengths=lengths,
            import_memory=import_memory,
            device_memory=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        )
    )


if __name__ == "__main__":
    main()
