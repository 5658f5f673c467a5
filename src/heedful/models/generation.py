"""Generation configs that transformers reads but refuses to write."""

import warnings

from transformers import GenerationConfig, PreTrainedModel

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def mend_generation_config(lm: PreTrainedModel, name: str) -> None:
    """Make a model's generation config one that can be saved, in place, and warn if it was not.

    transformers loads a temperature without ``do_sample`` and ignores it, but refuses to save it, which would be after
    training. The config then samples, as its temperature says it should. Of one that is still refused only the special
    tokens are kept.
    """
    config = lm.generation_config
    reason = _refused(config)
    if reason is None:
        return
    done = "do_sample is set to true"
    config.do_sample = True
    if _refused(config) is not None:
        done = f"only {', '.join(TOKENS)} are kept"
        lm.generation_config = GenerationConfig(**{token: getattr(config, token) for token in TOKENS})
    warnings.warn(f"{name}: transformers refuses to save its generation_config.json ({reason}); {done}", stacklevel=2)


def _refused(config: GenerationConfig) -> str | None:
    """Why transformers refuses to save a config; None if it does not."""
    try:
        config.validate(strict=True)
    except ValueError as error:
        lines = [line for line in str(error).splitlines() if not line.startswith("GenerationConfig is invalid")]
        return lines[0].removeprefix("- ") if lines else str(error)
    return None
