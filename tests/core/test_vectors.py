"""Reference vectors: numbers of numpy and of published implementations, where they follow our conventions.

The file lies beside the repository and may be absent. A vector's tolerance is absolute.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from heedful import core
from tensors import f64

FILE = Path(__file__).resolve().parents[3] / "shared" / "vectors" / "vectors.json"
VECTORS = {v["name"]: v for v in json.loads(FILE.read_text())["vectors"]} if FILE.exists() else {}
pytestmark = pytest.mark.skipif(not VECTORS, reason="no shared/vectors/vectors.json beside the repository")


class Checked:
    """A vector; some of its quantities follow other conventions than ours."""

    def __init__(self, name):
        self.vector = VECTORS[name]
        self.inputs = {k: f64(v) if isinstance(v, list) else v for k, v in self.vector["inputs"].items()}
        for key in ("response_mask", "mask"):
            if key in self.inputs:
                self.inputs[key] = self.inputs[key].bool()

    def __getitem__(self, key):
        return self.inputs[key]

    def expect(self, key, actual):
        expected = f64(self.vector["expected"][key])
        torch.testing.assert_close(
            actual.double(), expected, rtol=0, atol=self.vector["tolerance"], msg=lambda m: f"{key}: {m}"
        )


CHECKS = {}


def covers(name):
    def register(check):
        CHECKS[name] = check
        return check

    return register


@covers("whiten_unmasked")
def _(v):
    everything = torch.ones_like(v["values"], dtype=torch.bool)
    v.expect("biased", core.whiten(v["values"], everything))
    v.expect("biased_keepmean", core.rescale(v["values"], everything))


@covers("kl_shaped_rewards")
def _(v):
    mask, tensors = v["response_mask"], (v["logprobs"], v["ref_logprobs"], v["response_mask"])
    kl = torch.where(mask, core.kl_estimate(v["logprobs"], v["ref_logprobs"], kind="k1"), 0.0)
    no_score = core.kl_shaped_rewards(torch.zeros(3, dtype=torch.float64), *tensors, kl_coef=v["kl_coef"])
    rewards = core.kl_shaped_rewards(v["scores"], *tensors, kl_coef=v["kl_coef"])
    v.expect("kl", kl)
    v.expect("non_score_reward", no_score)
    v.expect("rewards_last_token", rewards)
    v.expect("objective_kl", core.masked_sum(kl, mask) / 3)
    v.expect("objective_non_score_reward", core.masked_sum(no_score, mask) / 3)
    v.expect("rlhf_reward_mean", core.masked_sum(rewards, mask) / 3)


@covers("gae_padded_gamma1_lam095")
def _(v):
    mask = v["response_mask"]
    advantages, returns = core.gae(v["rewards_last_token"], v["values"], mask, gamma=v["gamma"], gae_lambda=v["lam"])
    v.expect("adv_last_token", advantages)
    v.expect("returns_last_token", returns)
    v.expect("adv_last_token_whitened_biased", core.whiten(advantages, mask))


@covers("gae_lam1_equals_mc_return_minus_value")
def _(v):
    advantages, returns = core.gae(v["rewards"], v["values"], v["response_mask"], gamma=1.0, gae_lambda=1.0)
    v.expect("advantages", advantages)
    v.expect("mc_returns", returns)
    v.expect("mc_returns", core.rewards_to_go(v["rewards"], v["response_mask"]))


@covers("logprob_and_entropy_with_temperature")
def _(v):
    ids = v["labels"].long()
    for temperature in (1.0, 0.7):
        v.expect(f"logprobs_T{temperature}", core.token_logprobs(v["logits"], ids, temperature=temperature))
        v.expect(f"entropy_T{temperature}", core.entropy(v["logits"], temperature=temperature))


@covers("kl_k1_k2_k3")
def _(v):
    for kind in ("k1", "k2", "k3"):
        kl = core.kl_estimate(v["logprobs"], v["ref_logprobs"], kind=kind)
        v.expect(kind, kl)
        v.expect(f"masked_mean_{kind}", core.masked_mean(kl, v["mask"]))
        per_response = torch.stack([core.masked_sum(row, inside) for row, inside in zip(kl, v["mask"], strict=True)])
        v.expect(f"seq_sum_{kind}", per_response)
        if kind == "k1":
            v.expect("objective_kl_mean_of_seq_sums_k1", per_response.mean())


@covers("adaptive_kl_controller")
def _(v):
    for name in ("books_n512", "trl_default_n256"):
        case, coefs = v["cases"][name], []
        controller = core.AdaptiveKL(case["init"], target=float(case["target"]), horizon=case["horizon"])
        for kl in v["observed_kl"].tolist():
            controller.update(kl, case["n_steps"])
            coefs.append(controller.coef)
        v.expect(name, f64(coefs))


@covers("ppo_policy_loss_masked")
def _(v):
    new, old, advantages, mask = v["new_logprobs"].requires_grad_(), v["old_logprobs"], v["advantages"], v["mask"]
    clip = {"clip_range": v["cliprange"]}
    loss, metrics = core.ppo_policy_loss(new, old, advantages, mask, **clip)
    log_ratio = torch.where(mask, new - old, 0.0).detach()
    v.expect("pg_loss_token_mean", loss.detach())
    v.expect("clipfrac", metrics["policy/clip_frac"])
    v.expect("approxkl_k3_masked", metrics["policy/approx_kl"])
    v.expect("grad_token_mean_wrt_new_logprobs", torch.autograd.grad(loss, new)[0])
    v.expect(
        "dual_clip_c3_token_mean",
        core.ppo_policy_loss(v["dual_clip_new_logprobs"], *(old, advantages, mask), **clip, dual_clip=3.0)[0],
    )
    v.expect("ratio", log_ratio.exp())
    v.expect("mean_ratio_masked", core.masked_mean(log_ratio.exp(), mask))
    v.expect("approxkl_k1_masked", core.masked_mean(core.kl_estimate(old, new.detach(), kind="k1"), mask))
    # Averages within a response, then over responses: one call a row, each with the number of responses as its share.
    rows = [core.ppo_policy_loss(*(x[i] for x in (new, old, advantages, mask)), **clip)[0] for i in range(len(new))]
    v.expect("pg_loss_seq_mean_of_token_mean", torch.stack(rows).mean().detach())


@covers("rm_pairwise_loss")
def _(v):
    chosen, rejected = v["chosen"].requires_grad_(), v["rejected"].requires_grad_()
    loss, metrics = core.pairwise_reward_loss(chosen, rejected)
    grads = torch.autograd.grad(loss, (chosen, rejected))
    v.expect("loss", loss.detach())
    v.expect("accuracy_strict", metrics["reward/accuracy"])
    v.expect("grad_chosen", grads[0])
    v.expect("grad_rejected", grads[1])
    one_by_one = [
        core.pairwise_reward_loss(chosen[i : i + 1], rejected[i : i + 1])[0].detach() for i in range(len(chosen))
    ]
    v.expect("per_pair", torch.stack(one_by_one))
    v.expect("loss_margin", core.pairwise_reward_loss(chosen, rejected, margin=v["margin"])[0].detach())
    v.expect("loss_centered_0_01", core.pairwise_reward_loss(chosen, rejected, center_coef=0.01)[0].detach())


@covers("dpo_losses")
def _(v):
    chosen = v["policy_chosen"].requires_grad_()
    tensors = (chosen, v["policy_rejected"], v["ref_chosen"], v["ref_rejected"])
    loss, metrics = core.dpo_loss(*tensors, beta=v["beta"])
    v.expect("dpo_loss", loss.detach())
    v.expect("grad_wrt_policy_chosen", torch.autograd.grad(loss, chosen)[0])
    # An accuracy of 2/3 may be held in float32.
    assert math.isclose(metrics["reward/accuracy"], v.vector["expected"]["reward_accuracy"], rel_tol=1e-7)
    v.expect("reward_margin", metrics["reward/margin"])
    alone = [core.dpo_loss(*(x[i : i + 1] for x in tensors), beta=v["beta"])[1] for i in range(3)]
    v.expect("chosen_rewards", torch.stack([m["reward/chosen"] for m in alone]))
    v.expect("rejected_rewards", torch.stack([m["reward/rejected"] for m in alone]))
    v.expect("logits_h", torch.stack([m["reward/margin"] for m in alone]) / v["beta"])
    v.expect("dpo_loss_beta05", core.dpo_loss(*tensors, beta=0.5)[0].detach())
    v.expect("cdpo_eps01", core.dpo_loss(*tensors, beta=v["beta"], label_smoothing=0.1)[0].detach())
    v.expect("ipo_sum", core.dpo_loss(*tensors, beta=v["beta"], kind="ipo")[0].detach())
    v.expect("hinge", core.dpo_loss(*tensors, beta=v["beta"], kind="hinge")[0].detach())


@covers("grpo_advantages")
def _(v):
    scores = v["rewards"].flatten()
    for name, eps in (
        ("trl_group_unbiased_eps1e4", 1e-4),
        ("verl_unbiased_eps1e6", 1e-6),
        ("openrlhf_unbiased_eps1e9", 1e-9),
    ):
        v.expect(name, core.group_advantages(scores, group_size=4, eps=eps).view(3, 4))
    v.expect("dr_grpo_no_std", core.group_advantages(scores, group_size=4, scale="none").view(3, 4))


@covers("a2c_loss")
def _(v):
    logprobs, everything = v["logprobs"].requires_grad_(), torch.ones(4, dtype=torch.bool)
    advantages = v["returns"] - v["values"]
    loss, _ = core.a2c_policy_loss(logprobs, advantages, everything)
    # Twice ours: the factor 1/2 is inside our value loss and not inside theirs.
    square = 2 * core.value_loss(v["values"], v["values"], v["returns"], everything, clip_range=None)[0]
    bonus = core.masked_mean(v["entropies"], everything)
    v.expect("advantages", advantages)
    v.expect("pg_loss", loss.detach())
    v.expect("value_loss_mse", square)
    v.expect("entropy", bonus)
    v.expect("total", (loss - v["ent_coef"] * bonus + v["vf_coef"] * square).detach())
    v.expect("grad_logp", torch.autograd.grad(loss, logprobs)[0])


@covers("loss_aggregation_and_grad_accumulation")
def _(v):
    """Through the loss that is minus the log-probs handed in: every loss divides in the same place."""
    per_token, mask = v["per_token_loss"], v["mask"]
    parts = [[int(i) for i in rows] for rows in v["micro_batches"].tolist()]
    v.expect("token_mean_global", core.sft_loss(-per_token, mask)[0])
    with_count = [core.sft_loss(-per_token[rows], mask[rows], num_tokens=int(mask.sum()))[0] for rows in parts]
    v.expect("token_mean_global", sum(with_count))
    own_count = [core.sft_loss(-per_token[rows], mask[rows])[0] for rows in parts]
    v.expect("mean_of_microbatch_token_means", sum(own_count) / 2)
    rows = [core.sft_loss(-per_token[i], mask[i])[0] for i in range(4)]
    v.expect("seq_mean_token_mean", torch.stack(rows).mean())
    v.expect("token_sum_over_fixed_len4", core.sft_loss(-per_token, mask, num_tokens=4 * 4)[0])


@pytest.mark.parametrize("name", CHECKS)
def test_golden_vector(name):
    CHECKS[name](Checked(name))


def test_a_quantity_that_is_off_by_ten_tolerances_is_refused():
    """Negative control of the comparison."""
    checked = Checked("gae_lam1_equals_mc_return_minus_value")
    off = f64(checked.vector["expected"]["advantages"]) + 10 * checked.vector["tolerance"]
    with pytest.raises(AssertionError, match="advantages"):
        checked.expect("advantages", off)
