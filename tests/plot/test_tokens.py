"""Tokens with their numbers: every token, number, colour and title is drawn, and what is not a number is seen."""

import math

import matplotlib.style
import pytest
import torch
from matplotlib.colors import to_rgb

import heedful
from heedful import ConfigError, plot
from heedful.apps.plot.style import contrast, current_theme, drawable, luminance
from heedful.apps.plot.token_bands import SHOWN
from heedful.models import byte_tokenizer

TOKENS = ["Of", " course", "!", "\n"]
VALUES = {"advantage": [1.0, -0.5, 0.0, 0.25], "KL": [0.125, None, math.nan, -math.inf]}


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def cells(figure):
    """The rectangles in the order of drawing: of each token its own, then one per quantity."""
    return [patch for patch in figure.axes[0].patches if patch.get_width() > 0]


def test_each_token_stands_above_its_numbers():
    drawn = plot.tokens(TOKENS, VALUES, title="What is 2 + 2 for $5?")
    assert texts(drawn) == [
        "What is 2 + 2 for $5?",
        *("advantage", "KL"),
        *("Of", "1.00", "0.12"),
        *("␣course", "−0.50", ""),
        *("!", "0", "nan"),
        *("↵", "0.25", "−inf"),
    ]
    places = {text.get_text(): text.get_position() for text in drawn.axes[0].texts}
    assert places["Of"][0] == places["1.00"][0] == places["0.12"][0]
    assert places["Of"][1] < places["1.00"][1] < places["0.12"][1]  # y goes down
    assert places["Of"][0] < places["␣course"][0] < places["!"][0]


@pytest.mark.parametrize("style", ["default", "dark_background"])
def test_colours_show_sign_and_size_on_both_pages(style):
    """Blue is positive, orange negative, the page is 0; texts have a contrast of 4.5 on all of them."""
    with matplotlib.style.context(style):
        values = {"advantage": [i / 10 for i in range(-10, 11)]}
        drawn, page = plot.tokens(["x"] * 21, values), current_theme().page
    colours = [to_rgb(cell.get_facecolor()) for cell in cells(drawn)[1::2]]
    heads = [to_rgb(cell.get_facecolor()) for cell in cells(drawn)[::2]]
    assert heads == colours
    assert all(red > blue for red, _, blue in colours[:10])
    assert all(blue > red for red, _, blue in colours[11:])
    assert colours[10] == page == to_rgb(drawn.get_facecolor())
    assert (luminance(page) > 0.5) == (style == "default")
    away = [abs(luminance(colour) - luminance(page)) for colour in colours]
    assert away[:11] == sorted(away[:11], reverse=True)
    assert away[10:] == sorted(away[10:])
    written = [text for text in drawn.axes[0].texts if text.get_text() != "advantage"]
    inks = zip(written, [colour for colour in colours for _ in range(2)], strict=True)
    assert min(contrast(to_rgb(text.get_color()), colour) for text, colour in inks) >= 4.5


def test_what_is_not_a_number_is_hatched_and_nothing_is_empty():
    drawn = plot.tokens(TOKENS, VALUES)
    kl = cells(drawn)[2::3]
    assert [bool(cell.get_hatch()) for cell in kl] == [False, False, True, True]
    assert to_rgb(kl[1].get_facecolor()) == to_rgb(drawn.get_facecolor())
    assert all(not cell.get_hatch() for cell in cells(drawn)[1::3])


def test_numbers_are_short():
    drawn = plot.tokens(["a"] * 6, {"KL": [-0.001, 0.0, 0.126, -99.994, 1234.5, math.inf]})
    assert texts(drawn)[2::2] == ["0.00", "0", "0.13", "−99.99", "1234", "inf"]


def test_limits_make_two_pictures_comparable():
    alone = plot.tokens(["a"], {"value": [0.5]})
    compared = plot.tokens(["a"], {"value": [0.5]}, limits={"value": 1.0})
    one = plot.tokens(["a", "b"], {"value": [0.5, 1.0]})
    assert cells(compared)[0].get_facecolor() == cells(one)[0].get_facecolor()
    assert cells(compared)[0].get_facecolor() != cells(alone)[0].get_facecolor()


def test_long_responses_wrap_and_nothing_leaves_the_picture():
    drawn = plot.tokens([f" token{i}" for i in range(40)] + ["x" * 30], {"KL": [-0.01 * i for i in range(41)]})
    heads = cells(drawn)[::2]
    assert len(heads) == 41
    assert len({cell.get_y() for cell in heads}) > 3
    (width,) = {axes.get_xlim()[1] for axes in drawn.axes}
    assert all(cell.get_x() > 0 and cell.get_x() + cell.get_width() < width for cell in cells(drawn))
    assert max(cell.get_y() + cell.get_height() for cell in cells(drawn)) < drawn.axes[0].get_ylim()[0]
    drawn.draw_without_rendering()
    for cell, text in zip(heads, [t for t in drawn.axes[0].texts if "token" in t.get_text()], strict=False):
        box = text.get_window_extent().transformed(drawn.axes[0].transData.inverted())
        assert cell.get_x() <= box.x0 < box.x1 <= cell.get_x() + cell.get_width()


@pytest.mark.parametrize(
    ("tokens", "values", "message"),
    [
        ([], {"KL": []}, "plot.tokens: tokens is empty; give at least one token"),
        (["a"], {}, "plot.tokens: values is empty; give at least one quantity, such as {'advantage': [0.5, -0.1]}"),
        (["a"], {"KL": [0.1, 0.2]}, "plot.tokens: values['KL'] has 2 numbers for 1 token; give one per token"),
    ],
)
def test_wrong_input_is_one_line(tokens, values, message):
    with pytest.raises(ConfigError) as error:
        plot.tokens(tokens, values)
    assert str(error.value) == message


def test_characters_of_several_tokens_are_shown_with_the_last():
    tokenizer = byte_tokenizer()
    ids = tokenizer("是 2", add_special_tokens=False)["input_ids"]
    end, text = tokenizer.eos_token_id, tokenizer.eos_token
    assert plot.token_texts([*ids, end], tokenizer) == ["‥", "‥", "是", " ", "2", text]
    assert plot.token_texts(ids[:2], tokenizer) == ["�", "�"]
    assert "".join(plot.token_texts([ids[0], *ids], tokenizer)).endswith("是 2")
    assert plot.token_texts([*ids[:2], ids[4], end], tokenizer) == ["‥", "�", "2", text]


def test_a_row_of_a_real_step(tiny):
    """The numbers of the picture are those of the experience."""
    config = heedful.PPOConfig(
        steps=1, rollout_batch_size=4, minibatch_size=4, max_new_tokens=6, seed=1, gae_lambda=0.9
    )
    policy = heedful.Policy.from_pretrained(tiny(), device="cpu", dtype="float32")
    _, experience, _ = next(heedful.ppo_steps(config, policy, ["2 + 2", "你好", "a", "b"], rewards=[length]))
    drawn = plot.experience(experience, 2, policy.tokenizer)
    mask = experience.mask[2]
    shown = texts(drawn)
    prompt, names = shown[0], shown[1:5]
    assert prompt == experience.completions[2].prompt.prompt
    assert names == ["advantage", "KL", "value", "reward"]
    columns = [shown[5 + 5 * t : 10 + 5 * t] for t in range(int(mask.sum()))]
    written = plot.token_texts(experience.completions[2].ids, policy.tokenizer)
    assert [column[0] for column in columns][: len(written)] == [drawable(text.translate(SHOWN)) for text in written]
    rewards = experience.rewards[2][mask]
    assert torch.allclose(torch.tensor([float(c[4].replace("−", "-")) for c in columns]), rewards, atol=0.011)
    assert rewards[-1] == pytest.approx(experience.scores[2], abs=0.02), "the score less the KL's price"
    wanted = [round(x, 2) for x in experience.advantages[2][mask].tolist()]
    assert [float(column[1].replace("−", "-")) for column in columns] == pytest.approx(wanted, abs=0.011)
    kl = (experience.old_logprobs - experience.ref_logprobs)[2][mask]
    assert torch.allclose(torch.tensor([float(c[2].replace("−", "-")) for c in columns]), kl, atol=0.011)
    with pytest.raises(ConfigError, match=r"plot\.experience: row is 4; the experience has 4 responses, 0 to 3"):
        plot.experience(experience, 4, policy.tokenizer)


def length(completions, **_):
    return [float(len(text)) for text in completions]
