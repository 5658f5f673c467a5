"""On-policy distillation by hand: a student samples, and its teacher marks each token, exactly or by one log-prob.

python examples/distil_by_hand.py [STUDENT TEACHER]
"""

import sys
import tempfile

import torch

import heedful
from heedful import core

steps, max_new_tokens, learning_rate, beta = 40, 16, 4e-3, 1.0
prompts = ["2+2等于几？", "请只回答：通义千问", "把“我喜欢机器学习”翻译成英文", "hello"] * 8


def logits_of(policy, batch):
    """The prediction of each response token, read one position before it."""
    positions = (batch.attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
    found = policy.lm(batch.ids, attention_mask=batch.attention_mask.long(), position_ids=positions, use_cache=False)
    return found.logits[:, -batch.mask.shape[1] - 1 : -1]


def main(student, teacher, exact=True):
    torch.manual_seed(0)
    student = heedful.Policy.from_pretrained(student, device="cpu", dtype="float32")
    teacher = heedful.Policy.from_pretrained(teacher, device="cpu", dtype="float32").frozen_copy()
    engine = heedful.LocalEngine(student, max_new_tokens=max_new_tokens)
    optimizer = torch.optim.Adam(student.parameters(), lr=learning_rate)
    kls = []
    for step in range(steps):
        batch = engine.generate(prompts)
        mask, response = batch.mask, batch.ids[:, -batch.mask.shape[1] :]
        logits = logits_of(student, batch)
        with torch.no_grad():
            of_teacher = logits_of(teacher, batch)
            kl = core.masked_mean(core.teacher_divergence(logits, of_teacher), mask).item()
            agreement = core.masked_mean(core.same_top_token(logits, of_teacher).float(), mask).item()
        if exact:  # beta 1: KL(student || teacher) over the whole vocabulary
            loss = core.masked_mean(core.teacher_divergence(logits, of_teacher, beta=beta), mask)
        else:  # A_t = log q(y_t) - log p(y_t), with discount 0: the same gradient in expectation
            logprobs, marks = core.token_logprobs(logits, response), core.token_logprobs(of_teacher, response)
            advantages = core.teacher_advantages(logprobs, marks, mask)
            loss = -core.masked_mean(core.policy_gradient(logprobs, advantages, mask).objective, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kls.append(kl)
        print(f"step={step} kl={kl:.3f} agreement={agreement:.2f}")
    return kls


if __name__ == "__main__":
    folders = sys.argv[1:3] or [tempfile.mkdtemp(), tempfile.mkdtemp()]
    for seed, folder in enumerate(folders if len(sys.argv) < 3 else []):
        heedful.make_tiny_model("qwen3", folder, seed=seed, initializer_range=0.02 + 0.06 * seed)
    main(*folders)
