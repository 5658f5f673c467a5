"""Check before sampling: a model's log-probs in decoding must equal those in training."""

import warnings

import torch
from transformers import PreTrainedTokenizerBase

from heedful.core import token_logprobs
from heedful.data.batches import collate
from heedful.engines.decoder import Decoder, SamplingModel
from heedful.engines.kv_cache import takes_slots
from heedful.errors import CheckpointError, is_out_of_memory
from heedful.kernels.device import HALF
from heedful.models.policy import Policy
from heedful.models.shape import rows_of, rows_with_text

PROVEN = {
    "gpt2", "llama", "qwen2", "qwen3", "gpt_neox", "gpt_bigcode", "opt", "phi", "phi3", "starcoder2", "gemma",
    "granite", "cohere", "olmo", "olmo2", "smollm3", "seed_oss", "helium", "glm", "glm4", "hunyuan_v1_dense",
    "nemotron", "apertus", "arcee", "ernie4_5", "persimmon", "diffllama", "bitnet", "nanochat", "ministral3", "jais2",
    "doge", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe", "ernie4_5_moe", "dots1", "glm4_moe",
    "hunyuan_v1_moe", "minimax_m2", "flex_olmo", "jetmoe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu",
    "minicpm3", "longcat_flash",
}  # fmt: skip
"""Model types that need no check if their cache is written in place; docs/architectures.md has the measurements."""
LIMIT, HALF_LIMIT = 1e-3, 0.1
"""Maximum difference of a log-prob, as a share of the logits' standard deviation. In float32 rounding gives less than a
tenth of the limit, a wrong state a hundred times as much. In half precision rounding may also change a mixture's choice
of experts; beyond the limit the check is repeated in float32."""
TEXT = "Hello! 你好！ 1 + 1 = 2"
SMALL_SHARE = 1e-3
"""Probability of ids without text that is not worth a warning."""
PROMPT_LENGTHS, NEW_TOKENS = (7, 2), 6
"""The second prompt is shorter, hence padded, and shorter than the usual convolution over four tokens."""
ADVICE = (
    "docs/architectures.md lists the architectures that work. `heedful sft` and `dpo` can train without samples: "
    "--sample-every 0 skips this check"
)


def check_sampling(policy: Policy, *, pad_id: int) -> None:
    """Raises CheckpointError if a model's log-probs in decoding with a cache differ from those of a pass over the whole
    text.

    Args:
        policy: the model. Its mode does not change, and the run's random numbers are not used.
        pad_id: the padding token.

    Uses two short texts of different length, padded to one batch. Architectures known to pass are not checked.
    """
    lm, was_training, compute_dtype = policy.lm, policy.training, policy.compute_dtype
    name = f"{lm.config._name_or_path}: {type(lm).__name__}"
    try:
        if lm.config.model_type in PROVEN and takes_slots(lm):
            return
        policy.eval()
        for dtype in dict.fromkeys((compute_dtype, torch.float32)):
            policy.compute_dtype = dtype
            found, limit = _difference(policy, pad_id), LIMIT if _is_exact(policy) else HALF_LIMIT
            if found <= limit:
                return
    except Exception as error:  # a cache, a mask or arguments of another kind
        if is_out_of_memory(error):
            raise
        first_line = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise CheckpointError(f"{name} cannot be sampled from with a cache: {first_line}. {ADVICE}") from error
    finally:
        policy.compute_dtype = compute_dtype
        policy.train(was_training)
    raise CheckpointError(
        f"{name} would sample with other probabilities than it trains on: log-probs of decoding with a cache and of whole "
        f"texts differ by {found:.2g} standard deviations of the logits, more than {limit:g}. {ADVICE}"
    )


@torch.no_grad()
def tell_textless(policy: Policy, tokenizer: PreTrainedTokenizerBase, *, pad_id: int) -> None:
    """Warn if ids without text, which are not sampled, have a share of the probability.

    Log-probs are those of all rows, as on servers and in other tools. So without such ids the sampler differs from the
    policy by their share: about 0 for the unused rows of a trained model, much for rows that were added without training.
    """
    count, rows = rows_with_text(policy.lm, tokenizer), rows_of(policy.lm)
    if count == rows:
        return
    ids = [i for i in tokenizer(TEXT, add_special_tokens=False)["input_ids"] if i < rows]
    decoder = Decoder(SamplingModel(policy), num_rows=1, longest=len(ids) + 1, pad_id=pad_id)
    logits = decoder.read_prompts([ids or [0]])
    share = float(logits.softmax(dim=-1)[:, count:].sum())
    if share > SMALL_SHARE:
        name = policy.lm.config._name_or_path or type(policy.lm).__name__
        warnings.warn(
            f"{name}: {rows - count} of the model's {rows} embedding rows have no token in its tokenizer ({count} tokens), "
            f"and {share:.2g} of the probability after {TEXT!r}. They are not sampled, but count in log-probs: load the "
            f"model with transformers, call model.resize_token_embeddings({count}), and save it",
            stacklevel=3,
        )


@torch.no_grad()
def _difference(policy: Policy, pad_id: int) -> float:
    """The largest difference of log-probs, in standard deviations of the logits. Also repeats a row and drops one."""
    vocabulary = policy.lm.get_input_embeddings().weight.shape[0]
    tokens = iter(i % vocabulary for i in range(vocabulary // 2, 2 * vocabulary))  # special tokens are at both ends
    prompts = [[next(tokens) for _ in range(length)] for length in PROMPT_LENGTHS]
    responses = [[next(tokens) for _ in range(NEW_TOKENS)] for _ in prompts]
    batch = collate(prompts, responses, pad_id=pad_id).to(policy.device)
    expected = policy(batch.ids, batch.attention_mask, batch.response_mask, with_values=False).logprobs
    given, rows = batch.ids[:, -NEW_TOKENS:], [0, 1, 0]
    decoder = Decoder(SamplingModel(policy), num_rows=3, longest=max(PROMPT_LENGTHS) + NEW_TOKENS, pad_id=pad_id)
    logits, differences = decoder.read_prompts([prompts[row] for row in rows]), []
    for step in range(NEW_TOKENS):
        difference = token_logprobs(logits, given[rows, step]) - expected[rows, step]
        differences.append(difference.abs().max() / logits.std())
        if step == NEW_TOKENS // 2:
            rows = [rows[2], rows[1]]
            decoder.keep([2, 1])
        logits = decoder.read_tokens(given[rows, step])
    return float(torch.stack(differences).max())


def _is_exact(policy: Policy) -> bool:
    """Whether a pass computes in float32 throughout; weights may be stored in fewer bits."""
    return policy.compute_dtype not in HALF and all(
        p.dtype in (torch.float32, torch.float64) for p in policy.parameters()
    )
