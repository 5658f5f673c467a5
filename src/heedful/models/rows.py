"""The tokens that a model has rows of embeddings for; texts with other tokens are refused.

A tokenizer may have more tokens than the model has rows: somebody added some and did not resize the embeddings, or they are
never used (Gemma 3). So what counts is which tokens texts have, and those that a run itself needs.
"""

from collections.abc import Iterable, Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heedful.errors import CheckpointError, DataError


def rows_of(model: PreTrainedModel) -> int:
    """How many tokens a model has rows of embeddings for."""
    return int(model.get_input_embeddings().weight.shape[0])


def check_rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Iterable[tuple[str, Sequence[int]]]
) -> None:
    """Refuse texts with tokens that a model has no row of embeddings for.

    Args:
        model: the model that is to read them.
        tokenizer: its tokenizer.
        texts: where each was read, as ``file:line``, and its token ids.

    Raises DataError.
    """
    rows = rows_of(model)
    for source, ids in texts:
        beyond = [i for i in ids if i >= rows] if len(ids) and max(ids) >= rows else []
        if beyond:
            raise DataError(f"{source}: {_said(tokenizer, beyond[0], rows)}; or take it out of the text")


def check_own_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, stop_ids: Iterable[int], pad_id: int
) -> None:
    """Refuse tokens that sampling needs, and a model has no row of embeddings for.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        stop_ids: the tokens that end a response.
        pad_id: the padding token.

    Raises CheckpointError.
    """
    rows = rows_of(model)
    for name, i in [*(("a token that ends responses", i) for i in stop_ids), ("the padding token", pad_id)]:
        if not 0 <= i < rows:
            raise CheckpointError(f"{tokenizer.name_or_path}: {name}: {_said(tokenizer, i, rows)}; or choose another")


def _said(tokenizer: PreTrainedTokenizerBase, i: int, rows: int) -> str:
    return (
        f"the token {tokenizer.convert_ids_to_tokens(i)!r} has the id {i}, and the model has rows of embeddings only for "
        f"{rows} tokens (0 to {rows - 1}): it was added to the tokenizer in {tokenizer.name_or_path}, and the embeddings "
        f"were not resized. Load both with transformers, call model.resize_token_embeddings({len(tokenizer)}), and save the "
        "model"
    )
