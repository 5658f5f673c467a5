"""``transformers.pipeline`` for old scripts: with the argument ``return_all_scores``, which transformers 5 ignores."""

from typing import Any

import transformers


def pipeline(*args: Any, return_all_scores: bool = False, **kwargs: Any) -> Any:
    """``transformers.pipeline``. A text classifier takes ``return_all_scores``, here or in its calls.

    With it a call returns, for each text, a list with the ``label`` and ``score`` of every label, in the order of the
    model's labels. (``top_k=None`` of transformers sorts them by score.)
    """
    made = transformers.pipeline(*args, **kwargs)
    is_classifier = isinstance(made, transformers.TextClassificationPipeline)
    return AllScores(made, return_all_scores) if is_classifier else made


class AllScores:
    """A text classifier with ``return_all_scores``. Other attributes are those of the pipeline."""

    def __init__(self, inner: Any, return_all_scores: bool) -> None:
        self.inner, self.return_all_scores = inner, return_all_scores

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, texts: Any, *args: Any, return_all_scores: bool | None = None, **kwargs: Any) -> Any:
        if not (self.return_all_scores if return_all_scores is None else return_all_scores):
            return self.inner(texts, *args, **kwargs)
        place = self.inner.model.config.label2id
        found = self.inner([texts] if isinstance(texts, str) else texts, *args, **kwargs | {"top_k": None})
        return [sorted(scores, key=lambda one: place[one["label"]]) for scores in found]
