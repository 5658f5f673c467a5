"""A bag of words beside a reward model: a baseline for pairs, and a judge of sentiment that no policy was trained against.

python recipes/bag_of_words.py accuracy --data PAIRS --eval-fraction 0.1
python recipes/bag_of_words.py judge --data REVIEWS --result win_rate.json

Needs scikit-learn. PAIRS is what `heedful reward` reads, REVIEWS has `text` and `label` (1 positive, 0 negative), and the
result is of `heedful evaluate win-rate` with --num-samples as large as the number of prompts.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sentiment_data import labelled
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline

from heedful.data import read_rankings, split_by_prompt
from heedful.errors import ConfigError, DataError, HeedfulError
from heedful.types import Ranking


def fit(texts: Sequence[str], labels: Sequence[int]) -> Pipeline:
    """Logistic regression on which words occur; its decision function is the log odds of label 1."""
    model = make_pipeline(CountVectorizer(binary=True, token_pattern=r"\w+|[^\w\s]"), LogisticRegression(max_iter=1000))
    return model.fit(texts, labels)


def sides(pairs: Sequence[Ranking]) -> tuple[list[str], list[str]]:
    """Chosen and rejected responses. Raises DataError for a ranking of more than two."""
    for pair in pairs:
        if len(pair.responses) != 2:
            raise DataError(f"{pair.source}: a ranking of {len(pair.responses)} responses; only pairs are read here")
    best = [(pair.responses, pair.ranks.index(min(pair.ranks))) for pair in pairs]
    return [responses[i] for responses, i in best], [responses[1 - i] for responses, i in best]


def pair_accuracy(train: Sequence[Ranking], held_out: Sequence[Ranking]) -> float:
    """Share of held-out pairs whose chosen response scores higher, of a model that tells chosen from rejected in ``train``.

    Ties count one half. Raises DataError.
    """
    chosen, rejected = sides(train)
    model = fit(chosen + rejected, [1] * len(chosen) + [0] * len(rejected))
    better, worse = (model.decision_function(texts) for texts in sides(held_out))
    return float(np.mean((better > worse) + 0.5 * (better == worse)))


def judge(texts: Sequence[str], labels: Sequence[int], before: Sequence[str], after: Sequence[str]) -> dict[str, float]:
    """Shares of texts called positive before and after, the standard error of their difference, and the judge's own accuracy.

    ``accuracy`` is the mean of five folds of the labelled texts.
    """
    labels = np.asarray(labels)
    folds = np.random.default_rng(0).permutation(len(texts)) % 5
    right = np.empty(len(texts), bool)
    for fold in range(5):
        inside, outside = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        model = fit([texts[i] for i in inside], labels[inside])
        right[outside] = model.predict([texts[i] for i in outside]) == labels[outside]
    model = fit(texts, labels)
    positive = [model.predict(group) == 1 for group in (before, after)]
    difference = positive[1].astype(float) - positive[0]
    return {
        "accuracy": float(right.mean()),
        "before": float(positive[0].mean()),
        "after": float(positive[1].mean()),
        "standard_error": float(difference.std(ddof=1) / len(difference) ** 0.5),
        "texts": len(difference),
    }


def responses_of(path: Path) -> tuple[list[str], list[str]]:
    """The baseline's and the policy's responses in a win rate's result. Raises DataError."""
    try:
        samples = json.loads(path.read_text(encoding="utf-8"))["samples"]
        before, after = ([str(sample[name]) for sample in samples] for name in ("baseline", "response"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: no result of `heedful evaluate win-rate` with samples ({type(error).__name__}: {error})"
        ) from error
    if len(before) < 2:
        raise DataError(f"{path}: {len(before)} samples; give `heedful evaluate win-rate` a larger --num-samples")
    return before, after


def measure(options: argparse.Namespace) -> dict[str, float]:
    """What the command that was given prints. Raises HeedfulError."""
    if options.command == "accuracy":
        train, held_out = split_by_prompt(read_rankings(options.data), options.eval_fraction)
        if not held_out:
            raise ConfigError("--eval-fraction is 0, so nothing is held out to measure on; give a larger one")
        return {"accuracy": pair_accuracy(train, held_out), "pairs": len(held_out)}
    texts, labels = zip(*labelled(options.data), strict=True)
    if min(labels.count(0), labels.count(1)) < 5:
        raise DataError(f"{options.data}: the judge learns from five texts of each label or more")
    return judge(texts, labels, *responses_of(options.result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    accuracy = commands.add_parser("accuracy", help="pair accuracy of a bag of words on held-out pairs")
    accuracy.add_argument("--data", required=True)
    accuracy.add_argument("--eval-fraction", type=float, default=0.1)
    judging = commands.add_parser("judge", help="how many responses a bag of words calls positive, before and after")
    judging.add_argument("--data", required=True)
    judging.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    try:
        print(json.dumps(measure(options)))
    except HeedfulError as error:
        parser.exit(2, f"{parser.prog}: {type(error).__name__}: {error}\n")


if __name__ == "__main__":
    main()
