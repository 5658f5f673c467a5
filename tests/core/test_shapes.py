"""At run time, without the type checker of the tests: a shape that torch would repeat is refused, with both shapes named.

The annotations are the oracle: what they refuse, the functions refuse by themselves.
"""

import inspect

import jaxtyping
import pytest
import torch

from heedful import core
from heedful.kernels.head_logprobs import head_logprobs

ALONE = {"entropy", "ratio_kl"}
"""One tensor of any shape: there is nothing that it could disagree with."""


def arguments(rows, columns):
    """Arguments of every public function that takes tensors, and of the methods that do."""
    x, mask = (
        torch.linspace(-2.0, -0.1, rows * columns).view(rows, columns),
        torch.ones(rows, columns, dtype=torch.bool),
    )
    ids, of_row = torch.ones(rows, columns, dtype=torch.long), torch.linspace(-3.0, -1.0, rows)
    lengths, level = torch.arange(1, rows + 1), {"level": "token", "bound": "truncate"}
    tokens = {"logprobs": x, "response_mask": mask}
    ratio = {"logprobs": x, "old_logprobs": x, "advantages": x, "response_mask": mask}
    to_sampler = {"logprobs": x, "sampler_logprobs": x, "advantages": x, "response_mask": mask}
    pairs = {"chosen": of_row, "rejected": of_row}
    long_pairs = {**pairs, "chosen_tokens": lengths, "rejected_tokens": lengths, "beta": 0.1}
    bounds, moments = core.Bounds(0.2, 0.2), {"mean": torch.tensor(0.5), "var": torch.tensor(2.0)}
    kl = {"logprobs": x, "ref_logprobs": x, "response_mask": mask}
    references = {"ref_chosen": of_row, "ref_rejected": of_row}
    ranked = {"scores": of_row, "ranks": lengths, "groups": torch.zeros(rows, dtype=torch.long), "margin": of_row}
    good = {"logprobs": of_row, "ref_logprobs": of_row, "desirable": lengths > 1, "kl": torch.tensor(0.1), "beta": 0.1}
    return {
        "a2c_policy_loss": {**tokens, "advantages": x},
        "a2c_policy_loss of responses": {**tokens, "advantages": x, "importance_level": "sequence"},
        "adaptive_lambda": {"lengths": lengths, "alpha": 0.5},
        "calibration": {"values": x, "returns": x, "mask": mask},
        "cispo": {**ratio, "bounds": bounds},
        "cispo_policy_loss": {**ratio, "clip_range": 0.2},
        "clip_scores": {"scores": of_row, "limit": 1.0},
        "clipped_ratio": {**ratio, "bounds": bounds},
        "clipped_sequence_ratio": {**ratio, "bounds": bounds},
        "double_sided": {**to_sampler, "bounds": bounds},
        "dpo_loss": {**long_pairs, **references},
        "effective_sample_size": {"weights": -x, "mask": mask},
        "explained_variance": {"values": x, "returns": x, "mask": mask},
        "first_in_mask": {"mask": mask},
        "first_values": {"values": x, "mask": mask},
        "gae": {"rewards": x, "values": x, "response_mask": mask},
        "gae of a lambda per row": {
            "rewards": x,
            "values": x,
            "response_mask": mask,
            "gae_lambda": torch.linspace(0.1, 0.9, rows),
        },
        "action_rewards": {"rewards": x, "response_mask": mask, "starts": mask},
        "spread_over_actions": {"x": x, "response_mask": mask, "starts": mask},
        "turn_starts": {"response_mask": mask},
        "group_advantages": {"scores": of_row, "group_size": 2},
        "importance_weights": {"logprobs": x, "sampler_logprobs": x, "response_mask": mask, **level},
        "kl_estimate": {"logprobs": x, "ref_logprobs": x, "old_logprobs": x, "kind": "k3"},
        "kl_shaped_rewards": {"scores": of_row, **kl, "kl_coef": 0.1},
        "kl_shaped_rewards of dense scores": {"scores": x, **kl, "kl_coef": 0.1},
        "kto_loss": good,
        "masked_mean": {"x": x, "mask": mask},
        "masked_sum": {"x": x, "mask": mask},
        "masked_var": {"x": x, "mask": mask},
        "orpo_loss": long_pairs,
        "others_mean": {"returns": of_row, "group_size": 2},
        "overlong_penalty": {"lengths": lengths, "max_new_tokens": 4, "buffer": 2},
        "pairwise_reward_loss": {**pairs, "margin": of_row},
        "policy_gradient": {**tokens, "advantages": x},
        "positive_example_loss": {**tokens, "correct": lengths > 1},
        "ppo_policy_loss": {**ratio, "clip_range": 0.2},
        "ppo_policy_loss of responses": {**ratio, "clip_range": 0.2, "importance_level": "sequence"},
        "ranking_reward_loss": ranked,
        "repeated_ngrams": {"ids": ids, "response_mask": mask, "n": 2},
        "rescale": {"x": x, "mask": mask, **moments},
        "response_kl": kl,
        "response_rewards": {"rewards": x, "response_mask": mask},
        "rewards_to_go": {"rewards": x, "response_mask": mask},
        "rloo_advantages": {"scores": of_row, "group_size": 2},
        "sao_policy_loss": {**to_sampler, "clip_range": 0.3},
        "sequence_policy_gradient": {**tokens, "advantages": x},
        "sft_loss": tokens,
        "simpo_loss": {**long_pairs, "target_margin": 0.1},
        "spread_scores": {"shaped": of_row, "tokens": [[0.5]] * rows, "response_mask": mask},
        "stochastic_round": {"x": x, "noise": torch.ones(rows, columns, dtype=torch.int32)},
        "same_top_token": {"logits": x, "teacher_logits": x.flip(1)},
        "teacher_advantages": {"logprobs": x, "teacher_logprobs": x.flip(1), "response_mask": mask},
        "teacher_divergence": {"logits": x, "teacher_logits": x.square(), "beta": 0.3},
        "tied_groups": {"scores": of_row, "group_size": 2},
        "explained_in_bins": {"values": x, "returns": x.square(), "mask": mask, "by": x, "bins": 2},
        "token_logprobs": {"logits": x.unsqueeze(2).expand(-1, -1, 5), "ids": ids},
        "value_loss": {"values": x, "old_values": x, "returns": x, "response_mask": mask, "clip_range": 0.2},
        "whiten": {"x": x, "mask": mask, **moments},
        "Reduction.tokens": {"self": core.Reduction("sequence"), "x": x, "response_mask": mask},
        "Reduction.sequences": {"self": core.Reduction(), "x": of_row, "mask": lengths > 1},
        "ScoreNorm.of": {"scores": of_row},
        "ScoreNorm.__call__": {"self": core.ScoreNorm(), "scores": of_row},
    }


def call(name, given):
    function = core
    for part in name.partition(" ")[0].split("."):
        function = getattr(function, part)
    return function(**given)


def breaks_annotation(name, given):
    try:
        call(name, given)
    except jaxtyping.TypeCheckError:
        return True
    except (ValueError, RuntimeError):  # not a wrong shape: one score cannot be split into groups
        return False
    return False


def wrong_shapes(x):
    """A tensor without a dimension, with one more, with one row or column, transposed: shapes that torch may repeat."""
    found = [x.reshape(-1)[0], x.reshape(-1)[:1], x.unsqueeze(0), x.unsqueeze(-1)]
    if x.dim() > 1:
        found += [x[0], x[:, 0], x[:1], x[:, :1], x.transpose(0, 1)]
    return [wrong for wrong in found if wrong.shape != x.shape]


@pytest.fixture
def as_installed():
    """People's programs do not check annotations."""

    def switch(checked):
        jaxtyping.config.update("jaxtyping_disable", not checked)

    switch(checked=False)
    yield switch
    switch(checked=True)


@pytest.mark.parametrize("shape", [(2, 3), (4, 4)], ids=["2 of 3", "4 of 4"])
def test_shapes_that_would_be_repeated_are_refused(shape, as_installed, monkeypatch):
    # What jaxtyping would write of a refusal takes ten times as long as to refuse.
    monkeypatch.setattr("jaxtyping._decorator._get_problem_arg", lambda *_: "", raising=False)
    for name, right in arguments(*shape).items():
        call(name, right)
        for argument, x in right.items():
            for wrong in wrong_shapes(x) if isinstance(x, torch.Tensor) else ():
                given = {**right, argument: wrong}
                as_installed(checked=True)
                breaks = breaks_annotation(name, given)
                as_installed(checked=False)
                if breaks:
                    with pytest.raises(ValueError, match=r"has shape \[") as refused:
                        call(name, given)
                    assert str(list(wrong.shape)) in str(refused.value), (name, argument)
                    assert argument in str(refused.value), (name, argument)


def test_annotations_are_enforced_while_the_tests_run():
    """The oracle of the test above."""
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    assert core.masked_mean(x, mask) == 0
    for refused in (
        lambda: core.masked_mean(x[:1], mask),
        lambda: core.masked_mean(x, mask.long()),
        lambda: core.pairwise_reward_loss(torch.zeros(3), torch.zeros(1)),
        lambda: core.token_logprobs(torch.zeros(2, 3, 5, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long)),
        lambda: head_logprobs(torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(2, dtype=torch.long)),
    ):
        with pytest.raises(TypeError, match="Type-check error"):
            refused()


def test_every_public_function_of_tensors_is_among_them():
    functions = {name: getattr(core, name) for name in core.__all__ if inspect.isfunction(getattr(core, name))}
    of_tensors = {name for name, f in functions.items() if any("Tensor" in str(a) for a in f.__annotations__.values())}
    assert {"gae", "ppo_policy_loss"} <= of_tensors <= arguments(2, 3).keys() | ALONE


def test_the_message_names_both_arguments_and_both_shapes(as_installed):
    x, mask = torch.zeros(3, 3), torch.ones(3, 3, dtype=torch.bool)
    message = "^advantages has shape [3], but logprobs has [3, 3]; they must be equal$"
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        core.ppo_policy_loss(x, x, torch.zeros(3), mask, clip_range=0.2)
    message = (
        "^ids has shape [3], but logits has [3, 3, 5]; ids must have the shape of logits without the last dimension$"
    )
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        core.token_logprobs(torch.zeros(3, 3, 5), torch.zeros(3, dtype=torch.long))
    message = (
        "^scores has shape [1], but response_mask has [3, 3]; scores must have the shape of response_mask without the"
    )
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        core.kl_shaped_rewards(torch.zeros(1), x, x, mask, kl_coef=0.1)
    with pytest.raises(ValueError, match=r"^scores has shape \[2, 1\]; it must have 1 dimension$"):
        core.group_advantages(torch.zeros(2, 1), group_size=2)
    with pytest.raises(ValueError, match=r"^gae_lambda has shape \[1\], but response_mask has \[3, 3\]; "):
        core.gae(x, x, mask, gae_lambda=torch.zeros(1))
    with pytest.raises(ValueError, match=r"^correct has shape \[1\], but response_mask has \[3, 3\]; "):
        core.positive_example_loss(x, mask, torch.tensor([True]))
    with pytest.raises(ValueError, match=r"^returns has shape \[3, 3\], but values has \[3\]; they must be equal"):
        core.explained_variance(x[0], x, mask)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("sft_loss", "num_tokens"),
        ("value_loss", "num_tokens"),
        ("positive_example_loss", "num_tokens"),
        ("masked_mean", "count"),
        ("dpo_loss", "num_pairs"),
        ("simpo_loss", "num_pairs"),
        ("orpo_loss", "num_pairs"),
        ("pairwise_reward_loss", "num_pairs"),
        ("ranking_reward_loss", "num_prompts"),
        ("kto_loss", "num_responses"),
        ("kto_loss", "num_desirable"),
    ],
)
def test_a_count_is_one_number(name, count, as_installed):
    """A count per row would make a loss per row; a tensor of no dimension, as from a sum over ranks, is a number."""
    given = arguments(2, 3)[name]
    call(name, {**given, count: torch.tensor(2.0)})
    with pytest.raises(ValueError, match=r"has shape \[2\]; it must be one number"):
        call(name, {**given, count: torch.tensor([2.0, 2.0])})


def test_the_kernel_outside_core_refuses_fewer_ids_than_states(as_installed):
    """A gather would read the first states only."""
    with pytest.raises(ValueError, match=r"ids has shape \[1\], but hidden has \[3, 4\]"):
        head_logprobs(torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(1, dtype=torch.long))


def test_lists_of_other_lengths_are_refused():
    """They too would be read in part."""
    with pytest.raises(ValueError, match="scores has 2 responses, but values has 3"):
        core.expected_best([1.0, 2.0], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="ranks has 2 responses, but values has 3"):
        core.ordered_pairs([0, 1], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="tokens has 1 responses, but shaped has 2"):
        core.spread_scores(torch.zeros(2), [[0.5]], torch.ones(2, 3, dtype=torch.bool))


def tensors_of(found):
    """The floating tensors of a function's result, in order."""
    if isinstance(found, torch.Tensor):
        return [found] if found.is_floating_point() else []
    parts = found.values() if isinstance(found, dict) else found if isinstance(found, tuple) else ()
    return [x for part in parts for x in tensors_of(part)]


def test_half_precision_is_computed_in_float32():
    def given(name, dtype):
        """Numbers that bfloat16 holds exactly, in another type."""
        return {
            key: x.bfloat16().to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for key, x in arguments(4, 4)[name].items()
        }

    for name in arguments(4, 4).keys() - {"stochastic_round"}:
        half, single = (tensors_of(call(name, given(name, dtype))) for dtype in (torch.bfloat16, torch.float32))
        assert [x.dtype for x in half] == [torch.float32] * len(single), name
        assert all(map(torch.equal, half, single)), name


@pytest.mark.usefixtures("as_installed")
def test_scores_may_be_integers_or_booleans():
    right, mask = torch.tensor([True, False, False, True]), torch.ones(4, 2, dtype=torch.bool)
    for scores in (right, right.long()):
        for read in (
            lambda s: core.group_advantages(s, group_size=2),
            lambda s: core.rloo_advantages(s, group_size=2),
            lambda s: core.spread_scores(s, [[0.25]] * 4, mask),
            lambda s: core.gae(torch.stack([s, s], dim=1), torch.zeros(4, 2), mask)[0],
            core.ScoreNorm.of(scores),
        ):
            assert torch.equal(read(scores), read(right.float()))


@pytest.mark.usefixtures("as_installed")
def test_masks_are_boolean_and_lists_are_no_tensors():
    for name, right in arguments(2, 3).items():
        masks = [key for key in right if key.endswith("mask") and name != "spread_scores"]  # which reads integers too
        for argument in masks:
            message = f"^{argument} has dtype torch.int64; masks are boolean: {argument}.bool"
            with pytest.raises(ValueError, match=message):
                call(name, {**right, argument: right[argument].long()})
    with pytest.raises(ValueError, match=r"^scores is a list; it must be a tensor"):
        core.group_advantages([1.0, 0.0], group_size=2)


@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize(("name", "level"), [("ppo_policy_loss", "seq"), ("a2c_policy_loss", "sequence-mean")])
def test_an_unknown_level_is_refused(name, level):
    with pytest.raises(ValueError, match=f"^{name}: importance_level is '{level}'; choose 'token'"):
        call(name, {**arguments(2, 3)[name], "importance_level": level})
