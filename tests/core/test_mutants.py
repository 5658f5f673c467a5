"""The tests of the tests: every mistake below is put into the mathematics, and the tests named beside it must fail.

A mutant replaces a text that occurs once in a module's source. The mutated functions take the place of the real ones by
their code object, so every reference sees them; the named tests run in this process; then the real code is put back.
A mutant counts as killed where a test fails by an assertion. Run with ``-s`` to see the count.
"""

import ast
import contextlib
import importlib
import inspect
import io
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.autograd.gradcheck import GradcheckError

import heedful.core

ROOMS = {"head_logprobs": "kernels", "layers": "kernels.cpu"}
"""Where a module is, if not in core; its tests are in tests/kernels."""
CORE = Path(heedful.core.__file__).parent
TESTS = {
    path.stem: path for room in ("core", "kernels") for path in (Path(__file__).parents[1] / room).glob("test_*.py")
}


@dataclass(frozen=True)
class Mutant:
    module: str
    mistake: str
    old: str
    new: str
    killers: tuple[str, ...]

    def kills_with(self, file, test):
        return any(killer in (f"{file}::{test}", f"{file}::{test.partition('[')[0]}") for killer in self.killers)


def in_module(module, *rows):
    """Rows of mistake, old text, new text and killers (``::test`` is in the test file of the same name)."""
    return [
        Mutant(module, mistake, old, new, tuple(f"test_{module}{k}" if k.startswith("::") else k for k in killers))
        for mistake, old, new, *killers in rows
    ]


def alike(test, *losses):
    return tuple(f"test_losses_alike::test_invariance_{test}[{loss}]" for loss in losses)


MUTANTS = [
    *in_module(
        "importance",
        (
            "the ratio upside down",
            "at_least_float32(logprobs) - at_least_float32(sampler_logprobs)",
            "at_least_float32(sampler_logprobs) - at_least_float32(logprobs)",
            "::test_golden_importance_weights",
        ),
        (
            "padding has a part in the product",
            "log_ratio = torch.where(response_mask, log_ratio, 0.0)",
            "log_ratio = torch.nan_to_num(log_ratio, nan=1.0)",
            "::test_golden_importance_weights",
        ),
        (
            "the mean of a response in place of its product",
            "log_ratio.sum(dim=1, keepdim=True)",
            "log_ratio.mean(dim=1, keepdim=True)",
            "::test_golden_importance_weights",
        ),
        (
            "truncation leaves out",
            "ratio.clamp(max=high), ratio > high",
            "torch.where(ratio > high, 0.0, ratio), ratio > high",
            "::test_golden_importance_weights",
        ),
        (
            "no lower bound",
            "(ratio < low) | (ratio > high)",
            "ratio > high",
            "::test_golden_importance_weights",
        ),
        (
            "a ratio at its bound is left out",
            "(ratio < low) | (ratio > high)",
            "(ratio <= low) | (ratio >= high)",
            "::test_golden_bounds_themselves_count",
        ),
        (
            "what is masked counts once",
            "torch.where(bounded, 0.0, ratio)",
            "torch.where(bounded, 1.0, ratio)",
            "::test_golden_importance_weights",
        ),
        (
            "the mean over tokens normalises responses",
            "actions = first_in_mask(response_mask)",
            "pass",
            "::test_golden_normalised_weights",
        ),
        (
            "normalised by the sum",
            "weights / masked_mean(weights, actions)",
            "weights / masked_sum(weights, actions)",
            "::test_golden_normalised_weights",
        ),
        (
            "the effective sample size is no share",
            "(mask.sum() * squares)",
            "squares",
            "::test_golden_effective_sample_size",
        ),
        (
            "the sum is not squared",
            "masked_sum(scaled, mask).square() /",
            "masked_sum(scaled, mask) /",
            "::test_golden_effective_sample_size",
        ),
        (
            "squares overflow",
            "scaled = weights / torch.where(largest > 0, largest, 1.0)",
            "scaled = weights / 1.0",
            "::test_golden_effective_sample_size",
        ),
    ),
    *in_module(
        "entropy_control",
        (
            "it falls below the target",
            "self.step if entropy < self.target else -self.step",
            "-self.step if entropy < self.target else self.step",
            "::test_golden_it_rises_below_the_target_and_is_off_above_it",
        ),
        (
            "the bonus stays on above the target",
            "self._held if entropy <= self.target else 0.0",
            "self._held",
            "::test_golden_it_rises_below_the_target_and_is_off_above_it",
        ),
        (
            "off at the target",
            "self._held if entropy <= self.target else 0.0",
            "self._held if entropy < self.target else 0.0",
            "::test_golden_it_rises_below_the_target_and_is_off_above_it",
        ),
        (
            "a negative coefficient",
            "max(0.0, self._held + (",
            "(self._held + (",
            "::test_golden_it_never_becomes_negative",
        ),
        (
            "it moves at the target",
            "if entropy != self.target:",
            "if True:",
            "::test_golden_it_rises_below_the_target_and_is_off_above_it",
        ),
        (
            "what was held is forgotten",
            'self.coef, self._held = state["coef"], state["held"]',
            'self.coef = self._held = state["coef"]',
            "::test_identity_state_dict_round_trip_continues_where_it_was",
        ),
    ),
    *in_module(
        "responses",
        (
            "the penalty begins too late",
            "(max_new_tokens - buffer - lengths) / buffer",
            "(max_new_tokens - lengths) / buffer",
            "::test_golden_overlong_penalty",
        ),
        (
            "the penalty is divided by the longest length",
            "- lengths) / buffer)",
            "- lengths) / max_new_tokens)",
            "::test_golden_overlong_penalty",
        ),
        (
            "short responses are rewarded",
            ".clamp(-1.0, 0.0)",
            ".clamp(-1.0, 1.0)",
            "::test_golden_overlong_penalty",
        ),
        (
            "n-grams reach into the padding",
            "inside = response_mask.unfold(1, n, 1).all(dim=-1)",
            "inside = response_mask.unfold(1, n, 1).any(dim=-1)",
            "::test_golden_repeated_ngrams",
        ),
        (
            "only neighbours are compared",
            "-1 - place).sort(dim=1).values",
            "-1 - place)",
            "::test_golden_repeated_ngrams",
        ),
        (
            "the share of all places",
            "repeated / inside.sum(dim=1).clamp_min(1)",
            "repeated / places",
            "::test_it_is_that_of_sets",
        ),
        (
            "only the last token of an n-gram",
            "keys = begins * vocabulary + ids[:, length:]",
            "keys = begins * 0 + ids[:, length:]",
            "::test_it_is_that_of_sets",
        ),
    ),
    *in_module(
        "masking",
        (
            "bfloat16 stays bfloat16",
            "(torch.float16, torch.bfloat16)",
            "(torch.float16,)",
            "::test_golden_half_precision_is_computed_in_float32",
        ),
        (
            "float64 becomes float32",
            "return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x",
            "return x.float()",
            "::test_golden_result_dtypes",
        ),
        (
            "the mask is ignored",
            "torch.where(mask, at_least_float32(x), 0.0).sum()",
            "at_least_float32(x).sum()",
            "::test_golden_masked_sum",
        ),
        (
            "the mask is a factor",
            "torch.where(mask, at_least_float32(x), 0.0).sum()",
            "(at_least_float32(x) * mask).sum()",
            "::test_invariance_value_under_poison_outside_the_mask[masked_sum-nan]",
        ),
        (
            "the first column in place of the first in the mask",
            "mask & (mask.cumsum(dim=1) == 1)",
            "mask & (torch.ones_like(mask).cumsum(dim=1) == 1)",
            "::test_golden_first_in_mask",
        ),
        (
            "all entries before the second",
            "mask & (mask.cumsum(dim=1) == 1)",
            "mask.cumsum(dim=1) == 1",
            "::test_golden_first_in_mask",
        ),
        (
            "the mean ignores the count",
            "(mask.sum() if count is None else count)",
            "mask.sum()",
            "::test_identity_masked_mean_with_explicit_counts_adds_up_over_a_split",
        ),
        (
            "the mean counts padding",
            "(mask.sum() if count is None else count)",
            "(mask.numel() if count is None else count)",
            "::test_golden_masked_mean",
        ),
        (
            "Bessel's correction",
            ".square(), mask)",
            ".square(), mask, count=mask.sum() - 1)",
            "::test_golden_masked_var_is_the_population_variance",
        ),
        (
            "whitening does not centre",
            "- mean) / std, 0.0)",
            ") / std, 0.0)",
            "::test_identity_whitened_values_have_mean_zero_and_variance_one",
        ),
        ("whitening leaves padding at -mean / std", "/ std, 0.0)", "/ std, -mean / std)", "::test_golden_whiten"),
        ("rescaling loses the mean", "/ std + mean, 0.0)", "/ std, 0.0)", "::test_golden_rescale"),
        (
            "no floor on the standard deviation",
            ".clamp_min(STD_FLOOR)",
            "",
            "::test_golden_whiten_divides_by_the_floor_where_the_spread_is_tiny",
        ),
        (
            "another floor",
            "STD_FLOOR = 1e-4",
            "STD_FLOOR = 1e-8",
            "::test_golden_whiten_divides_by_the_floor_where_the_spread_is_tiny",
        ),
        ("division by the variance", "var.sqrt().clamp_min", "var.clamp_min", "::test_golden_whiten"),
        (
            "the variance handed in is ignored",
            "masked_var(x, mask) if var is None else",
            "masked_var(x, mask) if True else",
            "::test_golden_whiten_with_statistics_handed_in",
        ),
    ),
    *in_module(
        "logprobs",
        (
            "log-probs without temperature",
            "scaled = at_least_float32(logits) / temperature",
            "scaled = at_least_float32(logits)",
            "::test_golden_token_logprobs_at_temperature_one_half",
        ),
        (
            "log-probs in half precision",
            "scaled = at_least_float32(logits) / temperature",
            "scaled = logits / temperature",
            "::test_golden_half_precision_is_computed_in_float32",
        ),
        (
            "log-probs without normalisation",
            ".squeeze(-1) - scaled.logsumexp(-1)",
            ".squeeze(-1)",
            "::test_golden_token_logprobs",
        ),
        (
            "entropy at the inverse temperature",
            "at_least_float32(logits) / temperature, dim=-1",
            "at_least_float32(logits) * temperature, dim=-1",
            "::test_golden_entropy_at_temperature_one_half",
        ),
        ("entropy with its sign flipped", "return -(p *", "return (p *", "::test_golden_entropy"),
        (
            "entropy of masked vocabulary is NaN",
            "torch.where(p > 0, logp, 0.0)",
            "logp",
            "::test_golden_entropy_with_masked_vocabulary",
        ),
        (
            "the entropy's gradient misses a term",
            "p = logp.exp()",
            "p = logp.exp().detach()",
            "::test_gradcheck_entropy",
        ),
        (
            "KL from the wrong side",
            "at_least_float32(logprobs) - at_least_float32(ref_logprobs)",
            "at_least_float32(ref_logprobs) - at_least_float32(logprobs)",
            "::test_identity_estimate_is_unbiased",
        ),
        (
            "k2 for k1",
            'if kind == "k1":\n        return d',
            'if kind == "k1":\n        return 0.5 * d.square()',
            "::test_identity_estimate_is_unbiased",
        ),
        ("k2 without its half", "0.5 * d.square()", "d.square()", "::test_golden_kl_estimate"),
        (
            "KL of a response counts padding",
            "torch.where(response_mask, kl_estimate(logprobs, ref_logprobs, kind=kind), 0.0).sum(dim=1)",
            "kl_estimate(logprobs, ref_logprobs, kind=kind).sum(dim=1)",
            "::test_golden_response_kl",
        ),
        (
            "KL of a response is a mean",
            "kind=kind), 0.0).sum(dim=1)",
            "kind=kind), 0.0).mean(dim=1)",
            "::test_golden_response_kl",
        ),
        (
            "k3 with the sign of d flipped",
            "torch.expm1(-d) + d",
            "torch.expm1(d) - d",
            "::test_identity_estimate_is_unbiased",
        ),
        (
            "k3 without its -1",
            "torch.expm1(-d) + d",
            "torch.exp(-d) + d",
            "::test_identity_estimate_is_zero_where_the_policies_agree",
        ),
        (
            "the penalty's ratio upside down",
            "at_least_float32(logprobs) - at_least_float32(old_logprobs.detach())",
            "at_least_float32(old_logprobs.detach()) - at_least_float32(logprobs)",
            "::test_golden_k3_times_the_ratio",
        ),
        (
            "the penalty's ratio without a gradient",
            "return ratio * kl_estimate",
            "return ratio.detach() * kl_estimate",
            "::test_identity_k3_times_the_ratio_has_the_gradient_ratio_times_d",
        ),
        (
            "the penalty's ratio with a gradient into the old policy",
            "old_logprobs.detach())",
            "old_logprobs)",
            "::test_identity_k3_times_the_ratio_has_the_gradient_ratio_times_d",
        ),
        (
            "no ratio",
            "return ratio * kl_estimate",
            "return kl_estimate",
            "::test_golden_k3_times_the_ratio",
        ),
        (
            "k3 by a difference that cancels",
            "torch.expm1(-d) + d",
            "torch.exp(-d) - 1 + d",
            "::test_golden_k3_of_a_tiny_difference_keeps_its_digits",
        ),
    ),
    *in_module(
        "advantages",
        (
            "the score on the first token",
            "torch.where(response_mask, time, -1).amax(",
            "torch.where(response_mask, time, 10**6).amin(",
            "::test_golden_score_lands_on_the_last_real_token",
        ),
        (
            "the score one token late",
            "time == last,",
            "time == last + 1,",
            "::test_golden_score_lands_on_the_last_real_token",
        ),
        (
            "the score at the end of the buffer",
            "time == last,",
            "time == time.amax(),",
            "::test_golden_score_lands_on_the_last_real_token",
        ),
        (
            "the score in the middle of a response with holes",
            "torch.where(response_mask, time, -1).amax(dim=1, keepdim=True)",
            "response_mask.sum(dim=1, keepdim=True) - 1",
            "::test_golden_score_lands_on_the_last_token_behind_a_hole",
        ),
        (
            "the penalty is a bonus",
            "placed - kl_coef * kl",
            "placed + kl_coef * kl",
            "::test_identity_shaped_rewards_sum_to_the_score_minus_the_penalty",
        ),
        (
            "the whole response's reward at every token",
            "torch.where(first_in_mask(response_mask), total, 0.0)",
            "torch.where(response_mask, total, 0.0)",
            "::test_golden_response_rewards_stand_at_the_first_token",
        ),
        (
            "padding counts in the whole response's reward",
            "torch.where(response_mask, at_least_float32(rewards), 0.0).sum(dim=1, keepdim=True)",
            "at_least_float32(rewards).sum(dim=1, keepdim=True)",
            "::test_golden_response_rewards_stand_at_the_first_token",
        ),
        (
            "rewards on padding",
            "torch.where(response_mask, placed - kl_coef * kl, 0.0)",
            "placed - kl_coef * kl",
            "::test_golden_score_lands_on_the_last_real_token",
        ),
        (
            "a score without a place is lost",
            "if not bool(response_mask.any(dim=1).all()):",
            "if False:",
            "::test_a_score_without_a_response_token_is_refused",
        ),
        (
            "the value is not carried over a hole",
            "nn.functional.pad(v[:, 1:], (0, 1))",
            "compact(nn.functional.pad(torch.where(response_mask, values, 0.0)[:, 1:], (0, 1)))",
            "::test_golden_gae_carries_value_and_advantage_across_a_hole",
        ),
        (
            "a hole is a step",
            "place = (response_mask.cumsum(dim=1) - 1).clamp(min=0)",
            "place = torch.ones_like(response_mask).cumsum(dim=1) - 1",
            "::test_golden_gae_carries_value_and_advantage_across_a_hole",
        ),
        (
            "advantages stay where they were packed",
            "advantages.gather(1, place)",
            "advantages",
            "::test_golden_gae_ignores_left_padding",
        ),
        (
            "padding is bootstrapped from",
            "nn.functional.pad(v[:, 1:], (0, 1))",
            "nn.functional.pad(values[:, 1:], (0, 1))",
            "::test_golden_gae_bootstraps_nothing_from_right_padding",
        ),
        (
            "padding is added to the token before it",
            "torch.where(response_mask, x, 0.0)",
            "x",
            "::test_golden_gae_bootstraps_nothing_from_right_padding",
        ),
        (
            "the last token is followed by the first",
            "nn.functional.pad(v[:, 1:], (0, 1))",
            "v.roll(-1, 1)",
            "::test_golden_gae",
        ),
        (
            "the next value is not discounted",
            "+ gamma * nn",
            "+ nn",
            "::test_identity_gae_lambda_zero_is_the_one_step_error",
        ),
        (
            "lambda is forgotten",
            "gamma * gae_lambda, 1",
            "gamma, 1",
            "::test_identity_gae_equals_the_double_sum_of_its_docstring",
        ),
        (
            "gamma is forgotten in the sum",
            "gamma * gae_lambda, 1",
            "gae_lambda, 1",
            "::test_identity_gae_with_zero_values_is_a_discounted_sum",
        ),
        (
            "the value is added to the error",
            "(0, 1)) - v",
            "(0, 1)) + v",
            "::test_identity_gae_lambda_one_is_reward_to_go_minus_value",
        ),
        (
            "returns are advantages",
            "advantages + values, 0.0",
            "advantages, 0.0",
            "::test_identity_returns_are_advantages_plus_values",
        ),
        (
            "advantages on padding",
            "torch.where(response_mask, advantages.gather(1, place), 0.0)",
            "advantages.gather(1, place)",
            "::test_golden_gae_ignores_left_padding",
        ),
        (
            "time runs forward",
            "advantages[:, :-span] += decay**span * advantages[:, span:]",
            "advantages[:, span:] += decay**span * advantages[:, :-span]",
            "::test_golden_gae",
        ),
        ("a span of steps decays as one", "decay**span", "decay", "::test_golden_gae"),
        ("the spans overlap", "span *= 2", "span += 1", "::test_identity_gae_equals_the_double_sum_of_its_docstring"),
        ("the spans leave gaps", "span *= 2", "span *= 4", "::test_golden_gae"),
        (
            "the last span is left out",
            "span < advantages.shape[1]",
            "2 * span < advantages.shape[1]",
            "::test_golden_gae",
        ),
        (
            "another default lambda",
            "gae_lambda: float = 0.95",
            "gae_lambda: float = 1.0",
            "::test_golden_gae_defaults_are_gamma_one_lambda_095",
        ),
        (
            "another default eps",
            "eps: float = 1e-4",
            "eps: float = 1e-6",
            "::test_golden_group_advantages_divide_by_the_sample_standard_deviation",
        ),
        (
            "rounding dust of equal scores is divided by eps",
            "torch.where(_is_tied(groups), 0.0, centred)",
            "centred",
            "::test_golden_group_of_equal_scores_is_exactly_zero",
        ),
        (
            "groups are strided",
            ".view(-1, group_size)",
            ".view(group_size, -1).T",
            "::test_golden_groups_are_consecutive_rows",
        ),
        (
            "leave-one-out divides by the whole group",
            "/ (group_size - 1)",
            "/ group_size",
            "::test_identity_rloo_is_the_deviation_from_the_mean_scaled",
        ),
        (
            "leave-one-out leaves nothing out",
            "groups.sum(dim=1, keepdim=True) - groups)",
            "groups.sum(dim=1, keepdim=True))",
            "::test_golden_rloo_advantages",
        ),
        (
            "ties of strided groups",
            "scores.unflatten(0, (-1, group_size))",
            "scores.unflatten(0, (group_size, -1)).T",
            "::test_golden_tied_groups",
        ),
        (
            "population standard deviation in a group",
            "groups.std(dim=1, keepdim=True)",
            "groups.std(dim=1, keepdim=True, correction=0)",
            "::test_golden_group_advantages_divide_by_the_sample_standard_deviation",
        ),
        (
            "groups of one",
            "group_size < 2",
            "group_size < 1",
            "::test_groups_that_cannot_be_compared_are_refused[rloo_advantages]",
        ),
    ),
    *in_module(
        "intervals",
        ("no correction for few groups", "g / (g - 1) / _count", "1 / _count", "::test_golden_mean_interval_of_pairs"),
        (
            "values of a group are squared one by one",
            "math.fsum(x - mean for x in group) ** 2 for group",
            "math.fsum((x - mean) ** 2 for x in group) for group",
            "::test_golden_design_effect",
        ),
        (
            "two groups have no interval",
            "if len(groups) < 2:",
            "if len(groups) < 3:",
            "::test_golden_mean_interval_of_unequal_groups",
        ),
        (
            "the variance in place of its root",
            "Z * math.sqrt(_clust",
            "Z * (_clust",
            "::test_golden_mean_interval_of_pairs",
        ),
        (
            "groups are taken for values",
            "_count(groups) / max(1.0, effect)",
            "len(groups) / max(1.0, effect)",
            "::test_golden_share_interval_of_groups",
        ),
        (
            "an effect below one narrows",
            "/ max(1.0, effect)",
            "/ max(1e-9, effect)",
            "::test_values_that_even_out_within_their_group_do_not_narrow_it",
        ),
        (
            "at the borders every value counts",
            "n = len(groups) if effect is None",
            "n = _count(groups) if effect is None",
            "::test_golden_share_interval_at_the_borders[100-10]",
        ),
        (
            "the middle is the share",
            "middle = p + Z**2 / (2 * n)",
            "middle = p",
            "::test_golden_share_interval_of_single_values",
        ),
        (
            "the root loses its second part",
            "p * (1 - p) / n + Z**2 / (4 * n**2)",
            "p * (1 - p) / n",
            "::test_golden_share_interval_of_single_values",
        ),
        (
            "no scale",
            "scale = 1 + Z**2 / n",
            "scale = 1",
            "::test_golden_share_interval_of_single_values",
        ),
        (
            "population variance of the values",
            "squares / (n - 1) / n",
            "squares / n / n",
            "::test_golden_design_effect",
        ),
    ),
    *in_module(
        "layers",
        (
            "turned the other way",
            "y1.sub_(second * s1)",
            "y1.add_(second * s1)",
            "::test_golden_a_quarter_of_a_turn",
        ),
        (
            "the gradient turns on",
            "d2.addcmul_(g1, s1, value=-1)",
            "d2.addcmul_(g1, s1)",
            "::test_golden_gradients_of_a_rotation_turn_back",
        ),
        (
            "the sine's halves stay in their places",
            "d1.addcmul_(g2, s2)",
            "d1.addcmul_(g2, s1)",
            "::test_gradients_of_a_rotation_are_those_of_the_formula",
        ),
        (
            "one half turns by the other's angle",
            "y2.add_(first * s2)",
            "y2.add_(first * s1)",
            "::test_gradients_of_a_rotation_are_those_of_the_formula",
        ),
    ),
    *in_module(
        "head_logprobs",
        (
            "the temperature is forgotten",
            "if options.temperature == 1 else scaled / options.temperature",
            "if True else scaled",
            "::test_golden_temperature_one_half_squares_the_odds",
        ),
        (
            "the temperature is a factor",
            "else scaled / options.temperature",
            "else scaled * options.temperature",
            "::test_golden_temperature_one_half_squares_the_odds",
        ),
        (
            "the temperature is forgotten in the gradient",
            "(upstream[chunk][block] / temperature)",
            "(upstream[chunk][block])",
            "::test_golden_gradient_of_a_logprob",
        ),
        (
            "entropy by default",
            "with_entropy: bool = False",
            "with_entropy: bool = True",
            "::test_golden_logprobs",
        ),
        ("entropy with its sign flipped", "= -logp.exp()", "= logp.exp()", "::test_golden_entropy"),
        (
            "entropy of masked vocabulary is NaN",
            ".mul_(_finite(logp))",
            ".mul_(logp)",
            "::test_golden_masked_vocabulary",
        ),
        (
            "the gradient of masked vocabulary is NaN",
            "else _finite(logp)  # kept",
            "else logp  # kept",
            "::test_golden_masked_vocabulary",
        ),
        (
            "the entropy's gradient misses the entropy",
            "(finite + entropy)",
            "finite",
            "::test_golden_gradient_of_the_entropy",
        ),
        (
            "with entropy the softmax of the log-prob has no gradient",
            ".add_(g)).neg_()",
            ").neg_()",
            "::test_identity_without_entropy_the_logprobs_are_the_same",
        ),
        (
            "one-hot in place of one-hot minus softmax",
            "scatter_add_(",
            "scatter_(",
            "::test_golden_gradient_of_a_logprob",
        ),
        (
            "the last chunk alone learns",
            "d_weight[part] += ",
            "d_weight[part] = ",
            "::test_identity_it_is_token_logprobs_and_entropy_of_the_logits",
        ),
        (
            "the first part of the weights alone learns",
            "range(0, matrix.shape[0], PART)",
            "range(0, PART, PART)",
            "::test_identity_it_is_token_logprobs_and_entropy_of_the_logits",
        ),
        (
            "the gradients of all weights at once",
            "slice(start, start + PART) for start in range(0, matrix.shape[0], PART)",
            "slice(0, None)",
            "::test_a_product_makes_the_gradients_of_a_part_of_the_weights",
        ),
        (
            "every other chunk reads the logits before its own",
            "kept[i]",
            "kept[i // 2 * 2]",
            "::test_identity_it_is_token_logprobs_and_entropy_of_the_logits",
        ),
        (
            "logits without bias the second time",
            "kept else linear(states[chunk], matrix, shift)",
            "kept else linear(states[chunk], matrix)",
            "::test_identity_it_is_token_logprobs_and_entropy_of_the_logits",
        ),
        (
            "all logits are kept",
            "ids.shape[0] * weight.shape[0] <= KEPT",
            "True",
            "::test_logits_are_kept_up_to_the_limit_alone",
        ),
        (
            "one chunk",
            "size = max(smallest, ",
            "size = max(10**9, ",
            "::test_no_operation_makes_the_logits_of_all_tokens",
        ),
        (
            "single tokens of a large vocabulary",
            "size = max(smallest, ",
            "size = max(1, ",
            "::test_a_chunk_has_some_tokens_however_large_the_vocabulary",
        ),
        (
            "the compute dtype is ignored",
            "compute_dtype or hidden.dtype",
            "hidden.dtype",
            "::test_half_precision_products_and_float32_beyond",
        ),
        (
            "kept log-probs are taken for logits",
            "x = kept if are_logprobs else _scaled(kept, options)",
            "x = _scaled(kept, options)",
            "::test_identity_it_is_token_logprobs_and_entropy_of_the_logits",
        ),
        (
            "log-probs are kept that a cap's slope cannot be made of",
            "return options.cap is None and ",
            "return ",
            "::test_gradcheck",
        ),
        (
            "log-probs in half precision",
            "scaled = at_least_float32(logits)\n",
            "scaled = logits\n",
            "::test_half_precision_products_and_float32_beyond",
        ),
        (
            "gradients add up in half precision",
            "torch.zeros_like(x, dtype=dtype)",
            "torch.zeros_like(x)",
            "::test_golden_gradients_of_many_chunks_add_up_in_float32",
        ),
        (
            "one block of float32",
            "size = max(1, BLOCK.get(",
            "size = max(10**9, BLOCK.get(",
            "::test_no_operation_makes_more_float32_than_a_block",
        ),
    ),
    *in_module(
        "rounding",
        (
            "rounded towards zero",
            "(x.view(torch.int32) + noise) & -(2**16)",
            "x.view(torch.int32) & -(2**16)",
            "::test_golden_a_quarter_of_the_way",
            "::test_property_the_mean_is_the_number",
        ),
        (
            "a bit more is dropped",
            "& -(2**16)",
            "& -(2**17)",
            "::test_property_what_bfloat16_holds_stays",
        ),
        (
            "the bits below are kept, and rounded to the nearest once more",
            " & -(2**16)",
            "",
            "::test_golden_a_quarter_of_the_way",
            "::test_property_the_mean_is_the_number",
        ),
        (
            "what is no number is rounded too",
            "x.isfinite()",
            "x.isfinite() | x.isnan()",
            "::test_what_is_no_number_stays_what_it_is",
        ),
    ),
    *in_module(
        "kl_control",
        (
            "the error is not clipped",
            "min(max(kl / self.target - 1, -0.2), 0.2)",
            "kl / self.target - 1",
            "::test_golden_adaptive_kl_clips_the_error_at_both_ends",
        ),
        (
            "the error is clipped above alone",
            "min(max(kl / self.target - 1, -0.2), 0.2)",
            "min(kl / self.target - 1, 0.2)",
            "::test_golden_adaptive_kl_clips_the_error_at_both_ends",
        ),
        (
            "the controller runs away",
            "1 + error * num_episodes",
            "1 - error * num_episodes",
            "::test_golden_adaptive_kl_raises_the_coefficient_above_the_target",
        ),
        (
            "the horizon counts batches",
            "error * num_episodes / self.horizon",
            "error / self.horizon",
            "::test_golden_adaptive_kl_raises_the_coefficient_above_the_target",
        ),
        (
            "the step is added, not multiplied",
            "self.coef *= 1 + error * num_episodes",
            "self.coef += error * num_episodes",
            "::test_golden_adaptive_kl_compounds",
        ),
        (
            "a target of zero",
            "if target <= 0",
            "if target < 0",
            "::test_targets_and_horizons_that_are_not_positive_are_refused",
        ),
        (
            "the fixed coefficient drifts",
            '"""Do nothing: the coefficient is fixed."""',
            "self.coef *= 1.01",
            "::test_golden_fixed_kl_stays",
        ),
    ),
    *in_module(
        "policy_losses",
        ("the likelihood falls", "-masked_mean(logprobs, ", "masked_mean(logprobs, ", "::test_golden_sft_loss"),
        (
            "SFT averages averages",
            "masked_mean(logprobs, response_mask, count=num_tokens)",
            "masked_mean(logprobs, response_mask)",
            *alike("micro_batches_add_up", "sft"),
        ),
        (
            "SFT divides by the padded size",
            "-masked_mean(logprobs, response_mask, count=num_tokens)",
            "-torch.where(response_mask, logprobs, 0.0).mean()",
            *alike("extra_padding_columns", "sft"),
        ),
        (
            "half of the value's gradient is cut",
            "torch.maximum(square, clipped_square)",
            "torch.maximum(square, clipped_square.detach())",
            "test_losses_alike::test_gradcheck_loss[value]",
        ),
        (
            "advantages go to another row",
            "per_token = advantages.unsqueeze(1).expand_as(logprobs)\n    surrogate = clipped_ratio(",
            "per_token = advantages.flip(0).unsqueeze(1).expand_as(logprobs)\n    surrogate = clipped_ratio(",
            *alike("row_order", "grpo-token"),
        ),
        (
            "PPO averages averages",
            (
                "masked_mean(surrogate.objective, response_mask, count=num_tokens)\n"
                '    return loss, {"loss/policy": loss.detach(), **'
            ),
            'masked_mean(surrogate.objective, response_mask)\n    return loss, {"loss/policy": loss.detach(), **',
            *alike("micro_batches_add_up", "ppo"),
        ),
        (
            "PPO's sign is flipped",
            (
                "-masked_mean(surrogate.objective, response_mask, count=num_tokens)\n"
                '    return loss, {"loss/policy": loss.detach(), **'
            ),
            (
                "masked_mean(surrogate.objective, response_mask, count=num_tokens)\n"
                '    return loss, {"loss/policy": loss.detach(), **'
            ),
            "::test_identity_ppo_at_ratio_one_is_minus_the_mean_advantage",
        ),
        (
            "the upper bound is ignored",
            "Bounds(clip_range, clip_range if clip_range_high is None else clip_range_high, dual_clip)\n    surrogate",
            "Bounds(clip_range, clip_range, dual_clip)\n    surrogate",
            "::test_golden_ppo_policy_loss_with_a_higher_upper_bound",
        ),
        (
            "metrics average averages",
            "masked_mean(ratio_kl(surrogate.log_ratio), mask, count=count)",
            "masked_mean(ratio_kl(surrogate.log_ratio), mask)",
            *alike("micro_batches_add_up", "ppo"),
        ),
        (
            "the value loss loses its half",
            "0.5 * masked_mean(",
            "masked_mean(",
            "::test_golden_value_loss_without_clip",
        ),
        (
            "the smaller square",
            "torch.maximum(square, clipped_square)",
            "torch.minimum(square, clipped_square)",
            "::test_golden_value_loss_takes_the_larger_square",
        ),
        (
            "values are clipped around the returns",
            "old_values - clip_range, old_values + clip_range",
            "returns - clip_range, returns + clip_range",
            "::test_golden_value_loss_takes_the_larger_square",
        ),
        (
            "values are clipped above alone",
            "old_values - clip_range, old_values + clip_range",
            "old_values - 1e9, old_values + clip_range",
            "::test_golden_value_loss_cuts_downward_moves_too",
        ),
        (
            "gradient into the returns",
            "returns.detach()",
            "returns",
            *alike("constants_get_no_gradient", "value"),
        ),
        (
            "values are masked after the square",
            "values = torch.where(response_mask, at_least_float32(values), 0.0)",
            "values = at_least_float32(values)",
            "test_losses_alike::test_invariance_poison_outside_the_mask[nan-value]",
        ),
        (
            "equal squares count as clipped",
            "clipped_square > square",
            "clipped_square >= square",
            "::test_golden_value_loss_without_clip",
        ),
        (
            "A2C's sign is flipped",
            (
                "-masked_mean(surrogate.objective, response_mask, count=num_tokens)\n"
                '    return loss, {"loss/policy": loss.detach()}'
            ),
            (
                "masked_mean(surrogate.objective, response_mask, count=num_tokens)\n"
                '    return loss, {"loss/policy": loss.detach()}'
            ),
            "::test_identity_a2c_gradient_is_ppo_gradient_at_ratio_one",
        ),
        (
            "A2C averages averages",
            (
                "masked_mean(surrogate.objective, response_mask, count=num_tokens)\n"
                '    return loss, {"loss/policy": loss.detach()}'
            ),
            'masked_mean(surrogate.objective, response_mask)\n    return loss, {"loss/policy": loss.detach()}',
            *alike("micro_batches_add_up", "a2c"),
        ),
        (
            "sequences without dual clip",
            "Bounds(clip_range, clip_range if clip_range_high is None else clip_range_high, dual_clip)\n    per_token",
            "Bounds(clip_range, clip_range if clip_range_high is None else clip_range_high)\n    per_token",
            "::test_golden_sequence_policy_loss_dual_clip",
        ),
        (
            "sequences average averages",
            "masked_mean(surrogate.objective, surrogate.mask, count=num_sequences)",
            "masked_mean(surrogate.objective, surrogate.mask)",
            *alike("micro_batches_add_up", "sequence"),
        ),
        (
            "the reference repels",
            "loss = kl_coef * mean(kl)",
            "loss = -kl_coef * mean(kl)",
            "::test_golden_grpo_loss_penalises_k3",
        ),
        ("k1 in the loss", 'kind="k3"', 'kind="k1"', "::test_golden_grpo_loss_penalises_k3"),
        (
            "the upper bound of sequences is ignored",
            "Bounds(clip_range, clip_range if clip_range_high is None else clip_range_high, dual_clip)\n    per_token",
            "Bounds(clip_range, clip_range, dual_clip)\n    per_token",
            "::test_golden_sequence_policy_loss_bounds_and_count",
        ),
        (
            "the upper bound of GRPO is ignored",
            "Bounds(clip_range, clip_range if clip_range_high is None else clip_range_high)",
            "Bounds(clip_range, clip_range)",
            "::test_golden_grpo_loss_with_a_higher_upper_bound",
        ),
    ),
    *in_module(
        "surrogates",
        (
            "the maximum of the surrogates",
            "clipped = at_bound < ratio * advantages",
            "clipped = at_bound > ratio * advantages",
            "test_policy_losses::test_golden_ppo_policy_loss_keeps_the_gradient_that_mends_a_mistake",
        ),
        (
            "always the clipped surrogate",
            "return torch.where(is_constant, constant, unclipped), clipped",
            "return at_bound, clipped",
            "test_policy_losses::test_golden_ppo_policy_loss_keeps_the_gradient_that_mends_a_mistake",
        ),
        (
            "an advantage of 0 meets an infinite ratio",
            "clipped | (advantages == 0)",
            "clipped",
            "test_policy_losses::test_identity_no_advantage_no_gradient_also_where_the_ratio_overflows",
        ),
        (
            "the floor of the dual clip keeps its gradient",
            "is_constant | at_floor",
            "is_constant",
            "test_policy_losses::test_identity_dual_clip_has_no_gradient_also_where_the_ratio_overflows",
        ),
        (
            "the bounds are swapped",
            "clamp(1 - bounds.low, 1 + bounds.high) * advantages",
            "clamp(1 - bounds.high, 1 + bounds.low) * advantages",
            "test_policy_losses::test_golden_ppo_policy_loss_with_a_higher_upper_bound",
        ),
        (
            "ties count as clipped",
            "at_bound < ratio * advantages",
            "at_bound <= ratio * advantages",
            "test_policy_losses::test_golden_ppo_clip_frac_does_not_count_ties",
        ),
        (
            "every ratio out of range counts as clipped",
            "at_bound < ratio * advantages",
            "at_bound != ratio * advantages",
            "test_policy_losses::test_golden_ppo_policy_loss_keeps_the_gradient_that_mends_a_mistake",
        ),
        (
            "the ratio is inverted",
            "at_least_float32(logprobs) - at_least_float32(old_logprobs.detach())",
            "at_least_float32(old_logprobs.detach()) - at_least_float32(logprobs)",
            "test_policy_losses::test_golden_ppo_policy_loss_where_the_clip_binds",
        ),
        (
            "gradient into the old log-probs",
            "at_least_float32(old_logprobs.detach())",
            "at_least_float32(old_logprobs)",
            *alike("constants_get_no_gradient", "ppo", "grpo-token"),
        ),
        (
            "the ratio's mask is a factor",
            "torch.where(mask, at_least_float32(logprobs) - at_least_float32(old_logprobs.detach()), 0.0)",
            "mask * (at_least_float32(logprobs) - at_least_float32(old_logprobs.detach()))",
            "test_losses_alike::test_invariance_poison_outside_the_mask[nan-sequence]",
        ),
        (
            "no dual clip",
            "if bounds.dual is not None:",
            "if False:",
            "test_policy_losses::test_golden_ppo_policy_loss_dual_clip",
        ),
        (
            "the dual clip also raises good tokens",
            "(advantages < 0) & (ratio > bounds.dual)",
            "ratio > bounds.dual",
            "test_policy_losses::test_golden_ppo_policy_loss_dual_clip",
        ),
        (
            "approx_kl of the other direction",
            "torch.expm1(log_ratio) - log_ratio",
            "torch.expm1(-log_ratio) + log_ratio",
            "test_policy_losses::test_identity_approx_kl_is_k3_of_the_old_policy",
        ),
        (
            "gradient into A2C's advantages",
            "advantages.detach()), 0.0)\n    logprobs = ",
            "advantages), 0.0)\n    logprobs = ",
            *alike("constants_get_no_gradient", "a2c"),
        ),
        (
            "the mean log-ratio of a sequence",
            "_log_ratio(logprobs, old_logprobs, response_mask).sum(dim=1)",
            "_log_ratio(logprobs, old_logprobs, response_mask).mean(dim=1)",
            "test_policy_losses::test_golden_sequence_policy_loss",
        ),
        (
            "lengths count padding",
            "response_mask.sum(dim=1).clamp_min(1)",
            "response_mask.shape[1]",
            "test_policy_losses::test_golden_sequence_policy_loss_normalised_by_length",
        ),
        (
            "always normalised by length",
            "if length_normalise:",
            "if True:",
            "test_policy_losses::test_golden_sequence_policy_loss",
        ),
        (
            "empty responses count",
            "Surrogate(objective, response_mask.any(dim=1), ",
            "Surrogate(objective, torch.ones_like(response_mask[:, 0]), ",
            "test_policy_losses::test_golden_sequence_policy_loss_leaves_empty_rows_out",
        ),
        (
            "gradient into GRPO's advantages",
            "at_least_float32(advantages.detach()), 0.0)\n    objective",
            "at_least_float32(advantages), 0.0)\n    objective",
            *alike("constants_get_no_gradient", "grpo-sequence"),
        ),
        (
            "long responses count more",
            "mask / mask.sum(dim=1, keepdim=True).clamp_min(1) / sequences",
            "mask / sequences",
            "test_policy_losses::test_golden_grpo_loss_averages_within_then_over_responses",
        ),
        (
            "the number of sequences is ignored",
            "mask.any(dim=1).sum() if num_sequences is None else num_sequences",
            "mask.any(dim=1).sum()",
            *alike("micro_batches_add_up", "grpo-sequence", "grpo-fixed"),
        ),
        (
            "the number of tokens is ignored",
            "masked_mean(x, response_mask, count=num_tokens)",
            "masked_mean(x, response_mask)",
            *alike("micro_batches_add_up", "grpo-token"),
        ),
        (
            "the fixed length alone",
            "(sequences * max_new_tokens)\n",
            "max_new_tokens\n",
            "test_policy_losses::test_golden_grpo_loss_over_a_fixed_length",
        ),
        (
            "GRPO's approx_kl of the other direction",
            "torch.expm1(log_ratio) - log_ratio",
            "torch.expm1(-log_ratio) + log_ratio",
            "test_policy_losses::test_golden_grpo_loss_over_tokens",
        ),
        (
            "gradient into the advantages of responses",
            "at_least_float32(advantages.detach()), 0.0).sum(dim=1)",
            "at_least_float32(advantages), 0.0).sum(dim=1)",
            *alike("constants_get_no_gradient", "sequence"),
        ),
        (
            "a response's advantage is the sum of its tokens'",
            "torch.where(first_in_mask(mask), ",
            "torch.where(mask, ",
            "::test_golden_the_advantage_of_a_response_is_that_of_its_first_token",
        ),
        (
            "a response's advantage is in the first column",
            "torch.where(first_in_mask(mask), at_least_float32(advantages.detach()), 0.0).sum(dim=1)",
            "at_least_float32(advantages.detach())[:, 0]",
            "::test_golden_the_advantage_of_a_response_is_that_of_its_first_token",
        ),
        (
            "the policy gradient's sign is flipped",
            "Surrogate(advantages * logprobs",
            "Surrogate(-advantages * logprobs",
            "test_policy_losses::test_golden_a2c_policy_loss",
        ),
        (
            "the policy gradient does not mask advantages",
            "torch.where(response_mask, at_least_float32(advantages.detach()), 0.0)\n    logprobs",
            "at_least_float32(advantages.detach())\n    logprobs",
            "::test_padding_is_nothing_whatever_it_holds",
        ),
        (
            "the policy gradient does not mask log-probs",
            "logprobs = torch.where(response_mask, at_least_float32(logprobs), 0.0)\n",
            "logprobs = at_least_float32(logprobs)\n",
            "::test_padding_is_nothing_whatever_it_holds",
        ),
        (
            "a response's log-prob is a mean",
            "whole = torch.where(response_mask, at_least_float32(logprobs), 0.0).sum(dim=1)",
            "whole = torch.where(response_mask, at_least_float32(logprobs), 0.0).mean(dim=1)",
            "::test_golden_sequence_policy_gradient",
        ),
        (
            "a response's log-prob has its padding",
            "whole = torch.where(response_mask, at_least_float32(logprobs), 0.0)",
            "whole = at_least_float32(logprobs)",
            "::test_golden_sequence_policy_gradient",
        ),
        (
            "empty responses count in the policy gradient",
            "_of_responses(advantages, response_mask), response_mask.any(dim=1), bounds",
            "_of_responses(advantages, response_mask), torch.ones_like(response_mask[:, 0]), bounds",
            "::test_golden_sequence_policy_gradient",
        ),
        (
            "CISPO's weight is not detached",
            (
                "weight = ratio.clamp(1 - bounds.low, 1 + bounds.high)\n"
                "    gradient = policy_gradient(logprobs, old_logprobs, weight * "
                "at_least_float32(advantages.detach()), response_mask)"
            ),
            (
                "weight = (logprobs - old_logprobs).exp().clamp(1 - bounds.low, 1 + bounds.high)\n"
                "    gradient = Surrogate(torch.where(response_mask, weight * advantages * logprobs, 0.0), "
                "response_mask)"
            ),
            "::test_every_token_learns_beyond_the_bounds_too",
        ),
        (
            "CISPO's log-ratio is not detached",
            "_log_ratio(logprobs, old_logprobs, response_mask).detach()\n    ratio",
            "_log_ratio(logprobs, old_logprobs, response_mask)\n    ratio",
            "::test_golden_cispo",
        ),
        (
            "CISPO ignores the lower bound",
            "weight = ratio.clamp(1 - bounds.low, 1 + bounds.high)",
            "weight = ratio.clamp(max=1 + bounds.high)",
            "::test_golden_cispo",
        ),
        (
            "CISPO ignores the upper bound",
            "weight = ratio.clamp(1 - bounds.low, 1 + bounds.high)",
            "weight = ratio.clamp(min=1 - bounds.low)",
            "::test_golden_cispo",
        ),
        (
            "CISPO's bounds are swapped",
            "weight = ratio.clamp(1 - bounds.low, 1 + bounds.high)",
            "weight = ratio.clamp(1 - bounds.high, 1 + bounds.low)",
            "::test_golden_cispo",
        ),
        (
            "CISPO without its weight",
            "weight * at_least_float32(advantages.detach())",
            "at_least_float32(advantages.detach())",
            "::test_golden_cispo",
        ),
        (
            "gradient into CISPO's advantages",
            "weight * at_least_float32(advantages.detach()), response_mask)\n    return Surrogate(gradient.objective",
            (
                "weight, response_mask)\n"
                "    gradient = Surrogate(gradient.objective * torch.where(response_mask, advantages, 0.0), "
                "response_mask)\n"
                "    return Surrogate(gradient.objective"
            ),
            "::test_cispo_gives_its_constants_no_gradient",
        ),
        ("CISPO counts what is within the bounds", "(weight != ratio)", "(weight == ratio)", "::test_golden_cispo"),
        (
            "tokens are averaged without the mask",
            "return masked_mean(x, response_mask, count=num_tokens)",
            "return x.mean() if num_tokens is None else x.sum() / num_tokens",
            "::test_golden_aggregate[token]",
        ),
        (
            "the sum of a response in place of its mean",
            "mask / mask.sum(dim=1, keepdim=True).clamp_min(1) / sequences",
            "mask / sequences",
            "::test_golden_aggregate[sequence]",
        ),
        (
            "empty responses are averaged over",
            "mask.any(dim=1).sum() if num_sequences",
            "mask.shape[0] if num_sequences",
            "::test_golden_aggregate[sequence]",
        ),
        (
            "the longest response here in place of the longest allowed",
            "(sequences * max_new_tokens)\n",
            "(sequences * x.shape[1])\n",
            "::test_golden_aggregate[fixed]",
        ),
        (
            "padding counts in the weighted sum",
            "torch.where(response_mask, x, 0.0)).sum()",
            "x).sum()",
            "::test_golden_aggregate[fixed]",
        ),
    ),
    *in_module(
        "preference_losses",
        (
            "chosen and rejected are swapped",
            "difference = chosen - rejected",
            "difference = rejected - chosen",
            "::test_golden_pairwise_reward_loss",
        ),
        (
            "the margin is granted",
            "difference - margin.detach()",
            "difference + margin.detach()",
            "::test_golden_pairwise_reward_loss_with_margins",
        ),
        (
            "gradient into the margin",
            "difference - margin.detach()",
            "difference - margin",
            *alike("constants_get_no_gradient", "pairwise-options"),
        ),
        (
            "smoothing towards the label",
            "label_smoothing * logsigmoid(-logit)",
            "label_smoothing * logsigmoid(logit)",
            "::test_golden_pairwise_reward_loss_with_label_smoothing",
        ),
        (
            "pairs average averages",
            "chosen.shape[0] if num_pairs is None else num_pairs",
            "chosen.shape[0]",
            *alike("micro_batches_add_up", "pairwise"),
        ),
        (
            "the difference is centred",
            "(chosen + rejected).square()",
            "(chosen - rejected).square()",
            "::test_golden_pairwise_reward_loss_with_centring",
        ),
        (
            "equal scores are accurate",
            '"reward/accuracy": (difference.detach() > 0)',
            '"reward/accuracy": (difference.detach() >= 0)',
            "::test_golden_pairwise_reward_loss",
        ),
        (
            "a higher rank is better",
            "ranks.unsqueeze(1) < ranks.unsqueeze(0)",
            "ranks.unsqueeze(1) > ranks.unsqueeze(0)",
            "::test_golden_ranking_reward_loss",
        ),
        (
            "ties make pairs",
            "ranks.unsqueeze(1) < ranks.unsqueeze(0)",
            "ranks.unsqueeze(1) <= ranks.unsqueeze(0)",
            "::test_golden_ranking_reward_loss_makes_no_pair_of_a_tie",
        ),
        (
            "pairs across prompts",
            "(groups.unsqueeze(1) == groups.unsqueeze(0)) & ",
            "",
            "::test_golden_ranking_reward_loss",
        ),
        (
            "the mean over pairs, not over prompts",
            "weight = 1.0 / pairs[pair_group].to(scores.dtype)",
            "weight = count / pairs.sum().to(scores.dtype)",
            "::test_golden_ranking_reward_loss",
        ),
        (
            "prompts without pairs count",
            "(pairs > 0).sum() if",
            "num_groups if",
            "::test_golden_ranking_reward_loss_leaves_prompts_without_pairs_out_of_the_count",
        ),
        (
            "equal scores rank accurately",
            "weight * (difference.detach() > 0)",
            "weight * (difference.detach() >= 0)",
            "::test_golden_ranking_equal_scores_are_not_accurate",
        ),
        (
            "the margin of the worse response",
            "margin[winner]",
            "margin[loser]",
            "::test_golden_ranking_options_are_those_of_each_pair",
        ),
        (
            "the mean margin over pairs, not over prompts",
            "(weight * difference.detach()).sum()",
            "difference.detach().sum()",
            "::test_golden_ranking_options_are_those_of_each_pair",
        ),
        ("the best is pushed down", "-picked.sum()", "picked.sum()", "::test_identity_best_of_two_is_pairwise"),
        (
            "the best is not compared",
            "torch.log_softmax(scores, dim=1)",
            "scores",
            "::test_golden_best_of_k_reward_loss",
        ),
        (
            "choices average averages",
            "scores.shape[0] if num_prompts is None else num_prompts",
            "scores.shape[0]",
            *alike("micro_batches_add_up", "best-of-k"),
        ),
        (
            "log-ratios are added",
            "chosen_ratio - rejected_ratio",
            "chosen_ratio + rejected_ratio",
            "::test_golden_dpo_loss",
        ),
        (
            "the reference is left out",
            "at_least_float32(chosen) - at_least_float32(ref_chosen.detach())",
            "at_least_float32(chosen)",
            "::test_identity_dpo_where_the_policy_is_the_reference_is_log_two",
        ),
        (
            "DPO in half precision",
            "at_least_float32(chosen) - at_least_float32(ref_chosen.detach())",
            "(chosen - ref_chosen.detach()).float()",
            *alike("half_precision_is_float32_of_the_same_numbers", "dpo"),
        ),
        (
            "gradient into the reference",
            "ref_rejected.detach()",
            "ref_rejected",
            *alike("constants_get_no_gradient", "dpo"),
        ),
        (
            "DPO without beta",
            "* logsigmoid(beta * h) - label",
            "* logsigmoid(h) - label",
            "::test_golden_dpo_loss",
        ),
        (
            "robust DPO hedges as conservative DPO does",
            "logsigmoid(beta * h) + label_smoothing * logsigmoid(-beta * h)",
            "logsigmoid(beta * h) - label_smoothing * logsigmoid(-beta * h)",
            "::test_golden_robust_dpo_loss",
        ),
        (
            "robust DPO without its scale",
            "hedged / (1 - 2 * label_smoothing)",
            "hedged",
            "::test_identity_robust_dpo_on_wrong_labels_is_dpo_on_right_ones_in_expectation",
        ),
        (
            "robust DPO of labels that say nothing",
            "if label_smoothing >= 0.5:",
            "if False:",
            "::test_robust_dpo_refuses_labels_that_say_nothing",
        ),
        (
            "lengths of the other response",
            "chosen_ratio / chosen_tokens, rejected_ratio / rejected_tokens",
            "chosen_ratio / rejected_tokens, rejected_ratio / chosen_tokens",
            "::test_golden_length_normalised_dpo_loss",
        ),
        (
            "lengths of one side are taken",
            "if (chosen_tokens is None) != (rejected_tokens is None):",
            "if False:",
            "::test_dpo_refuses_lengths_of_one_side",
        ),
        (
            "implicit rewards without beta",
            "beta * h.detach().sum()",
            "h.detach().sum()",
            "::test_golden_dpo_loss",
        ),
        (
            "conservative DPO is not",
            "logsigmoid(beta * h) - label_smoothing * logsigmoid(-beta * h)",
            "logsigmoid(beta * h) - label_smoothing * logsigmoid(beta * h)",
            "::test_golden_conservative_dpo_loss",
        ),
        ("IPO's target is doubled", "1 / (2 * beta)", "1 / beta", "::test_golden_ipo_loss"),
        ("the hinge never closes", "torch.relu(1 - beta * h)", "(1 - beta * h)", "::test_golden_hinge_loss"),
        (
            "label smoothing is silently ignored",
            'if label_smoothing and kind not in ("sigmoid", "robust"):',
            "if False:",
            "::test_dpo_refuses_label_smoothing_that_it_would_ignore",
        ),
        (
            "DPO averages averages",
            "h.shape[0] if num_pairs is None else num_pairs",
            "h.shape[0]",
            *alike("micro_batches_add_up", "dpo"),
        ),
    ),
    *in_module(
        "direct_losses",
        (
            "SimPO is granted its margin",
            "rejected_mean - target_margin",
            "rejected_mean + target_margin",
            "::test_golden_simpo_loss",
        ),
        (
            "SimPO's margin is gamma, not gamma over beta",
            "-logsigmoid(beta * (chosen_mean - rejected_mean - target_margin))",
            "-logsigmoid(beta * (chosen_mean - rejected_mean) - target_margin)",
            "::test_golden_simpo_loss",
        ),
        (
            "SimPO of sums",
            "at_least_float32(logprobs) / tokens",
            "at_least_float32(logprobs)",
            "::test_golden_simpo_loss",
        ),
        (
            "SimPO averages averages",
            """count = chosen.shape[0] if num_pairs is None else num_pairs
    loss = -logsigmoid""",
            """count = chosen.shape[0]
    loss = -logsigmoid""",
            *alike("micro_batches_add_up", "simpo"),
        ),
        (
            "SimPO's rewards without beta",
            "_pair_metrics(beta * chosen_mean, beta * rejected_mean, count)",
            "_pair_metrics(chosen_mean, rejected_mean, count)",
            "::test_golden_simpo_loss",
        ),
        (
            "probabilities in place of odds",
            "mean_logprobs - (-torch.expm1(mean_logprobs)).clamp_min(SMALLEST_REST).log()",
            "mean_logprobs",
            "::test_golden_orpo_loss",
        ),
        (
            "odds turned over",
            "mean_logprobs - (-torch.expm1",
            "mean_logprobs + (-torch.expm1",
            "::test_golden_orpo_loss",
        ),
        (
            "1 - p loses its digits",
            "(-torch.expm1(mean_logprobs))",
            "(1 - mean_logprobs.exp())",
            "::test_orpo_keeps_small_probabilities_of_failure",
        ),
        (
            "infinite odds",
            ".clamp_min(SMALLEST_REST).log()",
            ".log()",
            "::test_orpo_of_a_response_that_is_certain_is_finite",
        ),
        (
            "ORPO without its weight",
            "-beta * logsigmoid(chosen_odds",
            "-logsigmoid(chosen_odds",
            "::test_golden_orpo_loss",
        ),
        (
            "equal odds are accurate",
            "(chosen > rejected)",
            "(chosen >= rejected)",
            "::test_golden_simpo_accuracy_asks_for_no_margin_and_a_tie_is_wrong",
        ),
        (
            "KTO without z0",
            "torch.where(desirable, ratio - z0, z0 - ratio)",
            "torch.where(desirable, ratio, -ratio)",
            "::test_golden_kto_loss",
        ),
        (
            "bad responses are learned as good ones",
            "torch.where(desirable, ratio - z0, z0 - ratio)",
            "ratio - z0",
            "::test_golden_kto_loss_weighs_good_and_bad_responses",
        ),
        ("a negative z0", ".detach().clamp_min(0)", ".detach()", "::test_golden_a_negative_kl_counts_as_zero"),
        (
            "gradient into z0",
            "device=ratio.device).detach()",
            "device=ratio.device)",
            "::test_no_gradient_flows_into_the_kl",
        ),
        (
            "gradient into KTO's reference",
            "ref_logprobs.detach()",
            "ref_logprobs",
            *alike("constants_get_no_gradient", "kto"),
        ),
        (
            "KTO's weights are swapped",
            "ratio.new_tensor(desirable_weight), ratio.new_tensor(undesirable_weight)",
            "ratio.new_tensor(undesirable_weight), ratio.new_tensor(desirable_weight)",
            "::test_golden_kto_loss_weighs_good_and_bad_responses",
        ),
        (
            "KTO's logarithm, which is DPO's",
            "torch.sigmoid(-beta * gain)",
            "-logsigmoid(beta * gain)",
            "::test_golden_kto_loss",
        ),
        (
            "KTO averages averages",
            "ratio.shape[0] if num_responses is None else num_responses",
            "ratio.shape[0]",
            "::test_golden_kto_loss_divides_by_the_counts_handed_in",
        ),
        (
            "good responses of the micro-batch",
            "desirable.sum() if num_desirable is None else num_desirable",
            "desirable.sum()",
            *alike("micro_batches_add_up", "kto"),
        ),
        (
            "a mean of nothing",
            "    if good > 0:",
            "    if True:",
            "::test_golden_kto_of_one_label_has_no_mean_of_the_other",
        ),
        (
            "at z0 a response is right",
            "(gain.detach() > 0)",
            "(gain.detach() >= 0)",
            "::test_golden_kto_loss",
        ),
    ),
    *in_module(
        "best_of_n",
        (
            "pass@k by powers, which is biased",
            "return (subsets - math.comb(n - correct, k)) / subsets",
            "return 1 - (1 - correct / n) ** k",
            "::test_pass_at_k_by_hand",
        ),
        (
            "the share that fails",
            "(subsets - math.comb(n - correct, k))",
            "math.comb(n - correct, k)",
            "::test_pass_at_k_by_hand",
        ),
        (
            "no try at all",
            "if not 1 <= k <= n:",
            "if not 0 <= k <= n:",
            "::test_pass_at_k_refuses_what_has_no_meaning",
        ),
        (
            "the lowest score is taken",
            "return max(range",
            "return min(range",
            "::test_the_best_is_the_first_of_the_highest",
        ),
        (
            "of equal scores the last is taken",
            "return max(range(len(scores)), key=lambda row: (scores[row], -row))",
            "return max(range(len(scores)), key=lambda row: (scores[row], row))",
            "::test_the_best_is_the_first_of_the_highest",
        ),
        (
            "of equal scores the last is expected",
            "sorted(range(n), key=lambda row: (scores[row], -row))",
            "sorted(range(n), key=lambda row: (scores[row], row))",
            "::test_expected_best_is_the_mean_over_all_subsets",
        ),
        (
            "the judge is not asked",
            "values[row] for row in sorted",
            "scores[row] for row in sorted",
            "::test_expected_best_by_hand",
        ),
        ("the best of all is left out", "range(1, n + 1)", "range(1, n)", "::test_expected_best_by_hand"),
        (
            "subsets with repetition",
            "math.comb(below, k - 1) / math.comb(n, k)",
            "((below + 1) ** k - below**k) / n**k",
            "::test_expected_best_by_hand",
        ),
        ("the KL in bits", "math.log(n) -", "math.log2(n) -", "::test_kl_bound_by_hand"),
        (
            "the KL without what the choice leaves open",
            "math.log(n) - (n - 1) / n",
            "math.log(n)",
            "::test_kl_bound_is_the_kl_where_no_two_score_the_same",
        ),
    ),
    *in_module(
        "agreement",
        (
            "a tie is accurate",
            "margin > 0 for margin",
            "margin >= 0 for margin",
            "::test_agreement_counts_every_pair_alike",
        ),
        (
            "the worse response is compared with the better",
            "better - worse for own",
            "worse - better for own",
            "::test_agreement_counts_every_pair_alike",
        ),
        (
            "lengths at the limit are not similar",
            "min(two) >= SIMILAR",
            "min(two) > SIMILAR",
            "::test_lengths_are_similar_within_a_quarter_of_the_longer",
        ),
        (
            "another limit of similar lengths",
            "SIMILAR = 0.75",
            "SIMILAR = 0.6",
            "::test_lengths_are_similar_within_a_quarter_of_the_longer",
        ),
        (
            "a correlation that is not defined is reported",
            "if length_correlation is not None:",
            "if True:",
            "::test_what_is_not_defined_is_absent",
        ),
        ("equal ranks make pairs", "if better < worse", "if better <= worse", "::test_pairs_of_a_ranking"),
        ("a higher rank is better", "if better < worse", "if better > worse", "::test_pairs_of_a_ranking"),
        ("other bins", "BINS = 10", "BINS = 20", "::test_calibration_error_has_bins_of_a_twentieth"),
        (
            "a tie is wrong",
            "correct = 0.5 if margin == 0",
            "correct = 0.0 if margin == 0",
            "::test_calibration_error_at_the_ends",
        ),
        (
            "confidence from 0 in place of 1/2",
            "correct - (1 + certainty) / 2",
            "correct - certainty",
            "::test_golden_calibration_error",
        ),
        ("twice the margin", "abs(margin) / 2)", "abs(margin))", "::test_golden_calibration_error"),
        (
            "errors of two bins make up for each other",
            "abs(gap) for gap in gaps",
            "gap for gap in gaps",
            "::test_golden_calibration_error",
        ),
        (
            "covariance in place of correlation",
            "statistics.correlation(x, y)",
            "statistics.covariance(x, y)",
            "::test_golden_correlation",
        ),
        (
            "a correlation with a constant is 0",
            "return None",
            "return 0.0",
            "::test_a_correlation_with_a_constant_is_not_defined",
        ),
    ),
    *in_module(
        "score_norm",
        ("low scores are not clipped", "clamp(-limit, limit)", "clamp(max=limit)", "::test_golden_clip"),
        ("dense scores keep their scale", "shaped.device) / std", "shaped.device)", "::test_golden_spread_scores"),
        ("dense scores count twice", "+= shaped - placed.sum(dim=1)", "+= shaped", "::test_golden_spread_scores"),
        ("the last token loses its own score", "last] += shaped", "last] = shaped", "::test_golden_spread_scores"),
        (
            "the rest on the first token",
            "response_mask.sum(dim=1) - 1",
            "response_mask.sum(dim=1) * 0",
            "::test_golden_spread_scores",
        ),
    ),
]


HARMLESS = Mutant("masking", "none", "0.0).sum()", "0).sum()", ("test_masking::test_golden_masked_sum",))


def full_name(module):
    return f"heedful.{ROOMS.get(module, 'core')}.{module}"


def source_of(module):
    return Path(importlib.import_module(full_name(module)).__file__).read_text(encoding="utf-8")


def own_functions(namespace, module):
    """The innermost functions that a module defines, by qualified name; classes stand for their methods."""
    found = {}
    for name, value in namespace.items():
        members = {f"{name}.{k}": v for k, v in vars(value).items()} if inspect.isclass(value) else {name: value}
        for qualified, member in members.items():
            getter = member.fget if isinstance(member, property) else member
            inner = inspect.unwrap(getter) if callable(getter) else None
            if inspect.isfunction(inner) and inner.__module__ == module:
                found[qualified] = inner
    return found


@contextlib.contextmanager
def planted(module, source):
    """Give a module the functions and constants of another source, for as long as the block runs."""
    real = importlib.import_module(full_name(module))
    namespace = {"__name__": full_name(module)}
    exec(compile(source, f"<{module}>", "exec"), namespace)  # the point of this file
    parts = ("__code__", "__defaults__", "__kwdefaults__")
    theirs, ours = own_functions(namespace, full_name(module)), own_functions(vars(real), full_name(module))
    assert theirs.keys() == ours.keys()
    saved = {name: [getattr(function, part) for part in parts] for name, function in ours.items()}
    constants = {k: v for k, v in vars(real).items() if k.isupper() and isinstance(v, int | float | str)}
    caches = [value for value in vars(real).values() if hasattr(value, "cache_clear")]
    try:
        for cached in caches:
            cached.cache_clear()
        for name, function in ours.items():
            for part in parts:
                setattr(function, part, getattr(theirs[name], part))
        for name in constants:
            setattr(real, name, namespace[name])
        yield
    finally:
        for name, function in ours.items():
            for part, value in zip(parts, saved[name], strict=True):
                setattr(function, part, value)
        for name, value in constants.items():
            setattr(real, name, value)
        for cached in caches:
            cached.cache_clear()


class Laboratory:
    """A plugin of the inner pytest run: it replaces the loop over tests by a loop over mutants."""

    def __init__(self):
        self.errors = []
        self.problems = {}
        """Why a mutant was not killed, by mutant; None where it was. The key None is the real code."""

    def pytest_exception_interact(self, call):
        self.errors.append((call.when, call.excinfo.value))

    def pytest_runtestloop(self, session):
        everything = [item for m in MUTANTS for item in self.items(session, m)]
        with contextlib.ExitStack() as stack:
            for module in sorted({mutant.module for mutant in MUTANTS}):
                stack.enter_context(planted(module, source_of(module)))
            errors = [error for item in dict.fromkeys(everything) for error in self.run(session, item)]
        self.problems[None] = f"the real code fails: {errors}" if errors or session.testsfailed else None
        for mutant in (*MUTANTS, HARMLESS):
            self.problems[mutant] = self.examine(session, mutant)
        return True

    def items(self, session, mutant):
        return [i for i in session.items if mutant.kills_with(i.path.stem, i.name)]

    def run(self, session, item):
        self.errors = []
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return self.errors

    def examine(self, session, mutant):
        source = source_of(mutant.module)
        if source.count(mutant.old) != 1:
            return f"{mutant.old!r} occurs {source.count(mutant.old)} times in {mutant.module}; fix the mutant"
        items = self.items(session, mutant)
        if len(items) < len(mutant.killers):
            return f"not all of {mutant.killers} exist; fix the mutant"
        with planted(mutant.module, source.replace(mutant.old, mutant.new)):
            errors = next(filter(None, (self.run(session, item) for item in items)), [])
        if not errors:
            return f"{mutant.killers} passed with this mistake"
        if all(when == "call" and isinstance(e, DEATHS) for when, e in errors):
            return None
        return f"died of {errors}, not of a test's assertion"


@pytest.fixture(scope="module")
def problems():
    laboratory = Laboratory()
    files = sorted({str(TESTS[killer.partition("::")[0]]) for m in MUTANTS for killer in m.killers})
    options = ["-q", "--capture=no", "--assert=plain", "--tb=native", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        pytest.main([*options, *files], plugins=[laboratory])
    assert laboratory.problems, f"the inner run did not get to its tests:\n{output.getvalue()}"
    return laboratory.problems


DEATHS = (AssertionError, pytest.fail.Exception, GradcheckError)
"""What a test says no with; a mutant that merely crashes is not killed."""

TALLY = {}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.module}: {m.mistake}")
def test_mutant_is_killed(mutant, problems):
    TALLY[mutant] = problems[mutant] is None
    assert problems[mutant] is None


def test_without_a_mistake_the_killers_pass(problems):
    """Negative control: the same machinery, planting the real sources."""
    assert problems[None] is None


def test_a_harmless_change_survives(problems):
    """Negative control of the other kind: what changes no result is not reported as killed."""
    assert problems[HARMLESS] == "('test_masking::test_golden_masked_sum',) passed with this mistake"


def test_the_real_code_is_put_back():
    function = inspect.unwrap(heedful.core.masked_sum)
    before = function.__code__
    with planted("masking", source_of("masking").replace("0.0).sum()", "1.0).sum()")):
        assert function.__code__ is not before
    assert function.__code__ is before


def public_names():
    """Functions, classes and constants of core; its records (`Bounds`, `Surrogate`) have nothing to be mistaken in."""
    modules = [importlib.import_module(f"heedful.core.{path.stem}") for path in CORE.glob("[a-z]*.py")]
    found = {name: getattr(module, name) for module in modules for name in module.__all__}
    return {name for name, value in found.items() if not (inspect.isclass(value) and issubclass(value, tuple))}


def test_every_public_name_of_the_core_has_a_mutant():
    mutated = set()
    for mutant in MUTANTS:
        source = source_of(mutant.module)
        line = source[: source.index(mutant.old)].count("\n") + 1
        for node in ast.parse(source).body:
            if node.lineno <= line <= node.end_lineno:
                names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
                mutated.update(names or [target.id for target in getattr(node, "targets", [])])
    assert {"gae", "cispo", "SMALLEST_STD"} <= public_names()
    assert {*public_names(), "head_logprobs"} <= mutated


def test_mutants_killed_of_tried(record_property):
    """The count, for whoever runs this file with ``-s``."""
    killed, tried = sum(TALLY.values()), len(TALLY)
    record_property("mutants_killed", killed)
    record_property("mutants_tried", tried)
    print(f"\nmutants killed: {killed} of {tried}")
    assert killed == tried
    assert len(MUTANTS) >= 34
