"""`head_divergence` and `core.teacher_divergence` beside the loss of TRL 1.16's DistillationTrainer: losses and gradients.

python benchmarks/distillation/same_loss.py --trl-python PYTHON

PYTHON is that of an environment with TRL: pip install trl==1.16.0. Both get the same float32 hidden states of a student and
a wider teacher, heads, and mask, on the CPU with one thread. TRL's number is that of its trainer's own function of them
(`_chunked_divergence_loss`), divided by the tokens of the batch. Compares the loss, the mean entropy of the student, and
the gradients of its states, matrix and bias. Prints the largest difference relative to TRL's largest number, and how far the
gradients of each are from those in float64. Exits with 1 if a loss or entropy differs by more than 1e-6, or a gradient by
more than 1e-5: float32 rounds logits of size 10 at 1e-6. The last case, a vocabulary in which both models exclude words
(-inf), differs: TRL's numbers are NaN.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

TOLERANCES = {"loss": 1e-6, "entropy": 1e-6, "d states": 1e-5, "d matrix": 1e-5, "d bias": 1e-5}
BATCH, TIME, VOCAB, WIDTH, TEACHER_WIDTH = 4, 37, 1000, 32, 48
BETAS = {"forward KL": 0.0, "JSD 0.1": 0.1, "JSD 0.5": 0.5, "JSD 0.9": 0.9, "reverse KL": 1.0}
MODELS = {
    "plain": {},
    "bias, temperature 0.7": {"bias": True, "temperature": 0.7},
    "scale and cap": {"scale": (0.5, 2.0), "cap": (1.5, 4.0)},
    "words that neither has": {"bias": True, "masked": True},
}
DIFFERS = "words that neither has"


def inputs_of(case, dtype):
    """States, heads and the mask, from one seed: numbers of float32, in this type."""
    torch.manual_seed(0)
    states = torch.randn(BATCH, TIME, WIDTH), torch.randn(BATCH, TIME, TEACHER_WIDTH)
    heads = torch.randn(VOCAB, WIDTH) * WIDTH**-0.5 * 2, torch.randn(VOCAB, TEACHER_WIDTH) * TEACHER_WIDTH**-0.5 * 2
    biases = (torch.randn(VOCAB), torch.randn(VOCAB)) if case.get("bias") else (None, None)
    if case.get("masked"):
        for bias in biases:
            bias[-8:] = -torch.inf
    mask = torch.rand(BATCH, TIME) < 0.7
    return *([None if x is None else x.to(dtype) for x in pair] for pair in (states, heads, biases)), mask


def numbers(case, loss_of, dtype=torch.float32):
    """Loss, mean entropy and the student's gradients."""
    states, heads, biases, mask = inputs_of(case, dtype)
    leaves = [None if x is None else x.requires_grad_() for x in (states[0], heads[0], biases[0])]
    loss, entropy = loss_of(states, heads, biases, mask)
    loss.backward()
    return [loss.detach(), entropy.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


def of_trl(case, beta):
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    def loss_of(states, heads, biases, mask):
        scale, cap = case.get("scale", (1.0, 1.0)), case.get("cap", (None, None))
        loss, entropy, count = _chunked_divergence_loss(
            *states, *heads, mask.long(), beta, mask.sum(), *biases, *scale, *cap, case.get("temperature", 1.0)
        )
        return loss, entropy / count

    return numbers(case, loss_of)


def of_heedful(case, beta, *, dense, dtype=torch.float32):
    from heedful import core
    from heedful.kernels.head_divergence import Head, head_divergence

    temperature = case.get("temperature", 1.0)

    def loss_of(states, heads, biases, mask):
        # TRL's cap bounds the scaled logits, heedful's the head's output before the scale.
        caps = [c and c / s for s, c in zip(case.get("scale", (1.0, 1.0)), case.get("cap", (None, None)), strict=True)]
        both = [Head(*head) for head in zip(heads, biases, case.get("scale", (1.0, 1.0)), caps, strict=True)]
        chosen = [x[mask] for x in states]
        if not dense:
            found = head_divergence(chosen[0], both[0], chosen[1], both[1], beta=beta, temperature=temperature)
            return found.divergence.sum() / mask.sum(), found.entropy.mean()
        outputs = [torch.nn.functional.linear(x, head.weight, head.bias) for x, head in zip(chosen, both, strict=True)]
        logits = [
            head.scale * (x if head.cap is None else head.cap * torch.tanh(x / head.cap))
            for x, head in zip(outputs, both, strict=True)
        ]
        divergence = core.teacher_divergence(*logits, beta=beta, temperature=temperature)
        return divergence.sum() / mask.sum(), core.entropy(logits[0], temperature=temperature).mean()

    return numbers(case, loss_of, dtype)


def difference(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


def compared(ours, theirs, exact):
    """What to print of heedful's and TRL's numbers, and whether they agree."""
    if not all(bool(x.isfinite().all()) for x in theirs):
        return f"TRL's are not finite, heedful's are {difference(ours[2], exact[2]):.1e} from float64", False
    found = {name: difference(x, y) for name, x, y in zip(TOLERANCES, ours, theirs, strict=False)}
    far = [max(map(difference, numbers[2:], exact[2:])) for numbers in (ours, theirs)]
    said = ", ".join(f"{name} {value:.1e}" for name, value in found.items())
    agrees = all(value <= TOLERANCES[name] for name, value in found.items())
    return f"{said}; gradients from float64: heedful {far[0]:.1e}, TRL {far[1]:.1e}", agrees


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="Python of an environment with TRL 1.16.0")
    parser.add_argument("--write", type=Path, help="compute TRL's numbers and write them to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(model, name, beta) for model in MODELS for name, beta in BETAS.items()]
    if options.write:
        torch.save([of_trl(MODELS[model], beta) for model, _, beta in cases], options.write)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "trl.pt"
        environment = os.environ | {"PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([options.trl_python, __file__, "--write", str(place)], check=True, env=environment)
        theirs = torch.load(place)
    failed = False
    for (model, name, beta), of_peer in zip(cases, theirs, strict=True):
        exact = of_heedful(MODELS[model], beta, dense=True, dtype=torch.float64)
        for kind in ("chunks", "dense"):
            ours = of_heedful(MODELS[model], beta, dense=kind == "dense")
            said, agrees = compared(ours, of_peer, exact)
            failed = failed or (not agrees and model != DIFFERS)
            print(f"{model}; {name}; {kind}: loss {float(ours[0]):.6f}; {said}{'' if agrees else '  <-- differs'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
