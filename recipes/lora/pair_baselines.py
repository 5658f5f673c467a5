"""What a reward model has to beat on pairs: the longer response, and a bag of words or characters, on held-out prompts.

python recipes/lora/pair_baselines.py --data PAIRS --eval-fraction 0.1 [--characters]

Needs scikit-learn. PAIRS is what `heedful reward` reads; the held-out prompts are the same. For text without spaces, such as
Chinese, --characters counts characters in the place of words. `heedful evaluate accuracy` gives the reward model's numbers.
"""

import argparse
import json

import numpy as np
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from heedful.data import read_rankings, split_by_prompt
from heedful.errors import DataError, HeedfulError
from heedful.types import Ranking

SIMILAR = 0.25
"""Lengths this close, as a share of the longer one, are similar, as in `heedful evaluate accuracy`."""


def _best_first(pair: Ranking) -> tuple[str, str]:
    """The chosen response and the rejected one. Raises DataError for a ranking of more than two."""
    if len(pair.responses) != 2:
        raise DataError(f"{pair.source}: a ranking of {len(pair.responses)} responses; only pairs are read here")
    best = pair.ranks.index(min(pair.ranks))
    return pair.responses[best], pair.responses[1 - best]


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Accuracy of both baselines over all held-out pairs and over those of similar length, ties one half.

    Raises HeedfulError.
    """
    train, held_out = (
        [_best_first(pair) for pair in part]
        for part in split_by_prompt(read_rankings(options.data), options.eval_fraction)
    )
    pattern = r"\S" if options.characters else r"\w+|[^\w\s]"
    bag = make_pipeline(CountVectorizer(binary=True, token_pattern=pattern), LogisticRegression(max_iter=5000))
    bag.fit([text for pair in train for text in pair], [1, 0] * len(train))
    lengths = np.array([[len(text) for text in pair] for pair in held_out], float)
    margins = {
        "longer": lengths[:, 0] - lengths[:, 1],
        "bag": np.subtract(*(bag.decision_function([pair[side] for pair in held_out]) for side in (0, 1))),
    }
    similar = np.abs(lengths[:, 0] - lengths[:, 1]) <= SIMILAR * lengths.max(axis=1)
    result: dict[str, float] = {"pairs": len(held_out), "pairs_similar_length": int(similar.sum())}
    for name, margin in margins.items():
        right = (margin > 0) + 0.5 * (margin == 0)
        result[f"{name}_accuracy"] = float(right.mean())
        if similar.any():
            result[f"{name}_accuracy_similar_length"] = float(right[similar].mean())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--eval-fraction", type=float, default=0.1)
    parser.add_argument("--characters", action="store_true")
    options = parser.parse_args()
    try:
        print(json.dumps(measure(options), indent=2))
    except (HeedfulError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {type(error).__name__}: {error}\n")


if __name__ == "__main__":
    main()
