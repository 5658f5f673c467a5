"""What a critic knows: calibration, variance explained, bias, and how far it lowers the variance of the advantage."""

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from heedful.apps.plot.critic_charts import KINDS, Judged, critic_charts
from heedful.apps.plot.run_curves import BASELINES, HEIGHT, WIDTH, draw
from heedful.apps.plot.style import Picture, as_text, check_path, current_theme, picture, save
from heedful.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS = 3


def critic(
    values: "Tensor",
    rewards: "Tensor",
    mask: "Tensor",
    *,
    gamma: float = 1.0,
    gae_lambda: "float | Tensor" = 0.95,
    group_size: int = 1,
    path: str | Path | None = None,
) -> Picture:
    """Draw what a critic knows of the returns that came, ``G_t = sum_{k >= t} gamma^(k-t) r_k``.

    >>> plot.critic(experience.old_values, experience.rewards, experience.mask)

    - calibration: mean return by value, in bins of equally many tokens, with the returns' deviation and the diagonal;
    - variance explained and bias (mean of return minus value), by the token's place and by the response's length;
    - variance of the advantage over lambda, as a share of that of the return minus its mean; dotted at ``gae_lambda``.

    Beside the critic are its value of the prompt alone, before the first token, and the mean return of the prompt's other
    responses, if there are any.

    Args:
        values: ``[batch, time]``, of the text before each token.
        rewards: ``[batch, time]``, ``r_t``.
        mask: ``[batch, time]``, True at response tokens; for a critic of whole responses only at the first.
        gamma: discount factor.
        gae_lambda: of the policy's advantages; one for all, or one per response.
        group_size: number of consecutive responses to one prompt.
        path: where to save the picture.

    A chart of one bin is left out. Raises ConfigError if there are no tokens, or the responses are no whole groups.
    """
    check_path(path)
    if not bool(mask.any()):
        raise ConfigError("plot.critic: mask has no token; give at least one response with a token")
    if group_size < 1 or len(mask) % group_size:
        raise ConfigError(f"plot.critic: {len(mask)} responses in groups of {group_size}; groups must be whole")
    judged = Judged(values, rewards, mask, mask.sum(dim=1), gamma, gae_lambda, group_size)
    charts, theme = critic_charts(judged), current_theme()
    rows = -(-len(charts) // COLUMNS)
    columns = min(len(charts), COLUMNS)
    figure = picture(WIDTH * columns, HEIGHT * rows + 0.25, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    for place, chart in enumerate(charts, 1):
        axes = figure.add_subplot(rows, columns, place)
        draw(axes, chart, theme)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    names = list(judged.predicted)
    keys: list[Line2D | Patch] = [
        Line2D([], [], color="C0", linewidth=2, marker="o", markersize=4, label=names[0]),
        *(Line2D([], [], color=theme.muted, label=name, **BASELINES[KINDS[name]]) for name in names[1:]),
        Patch(color="C0", alpha=0.18, label="standard deviation of returns"),
    ]
    legend = figure.legend(
        handles=keys, loc="outside lower center", ncols=len(keys) if columns > 1 else 1, frameon=False
    )
    as_text(legend.get_texts())
    save(figure, path)
    return figure
