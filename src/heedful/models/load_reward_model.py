"""Load reward models, and turn a language model into an untrained one."""

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from heedful.errors import CheckpointError
from heedful.kernels.attention import use_attention
from heedful.kernels.gated_mlp import use_lean_mlps
from heedful.kernels.norms import use_lean_norms
from heedful.kernels.products import use_fast_products
from heedful.kernels.rotary import use_lean_rotations
from heedful.kernels.stored import store_matrices
from heedful.models.adapters import attach_adapter, merge_adapters, whole_weights
from heedful.models.load import learn_every_embedding, refuse_hub_adapters
from heedful.models.lora import experts_but
from heedful.models.quantize import FourBit, say_unquantized
from heedful.models.reward_facts import load_facts
from heedful.models.reward_model import HEADS, RewardModel, padding_id, score_head
from heedful.models.source import Source, explained, resolve
from heedful.models.text_part import read_weights
from heedful.models.tokenizer import PLAIN_TEMPLATE
from heedful.types import Reading


def load_reward_model(
    model: str | Source,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    seed: int | None = None,
    merged: bool = False,
    four_bit: FourBit | None = None,
    stored: torch.dtype = torch.float32,
    float32_experts: str = "",
) -> RewardModel:
    """Load a reward model, or start one from a language model.

    Args:
        model: a folder, an adapter folder, a name on the Hub, or a `Source`.
        tokenizer: that of the model; a padding token may be added to it.
        device: where to put it.
        compute_dtype: dtype of the trunk's matrix products.
        seed: None to score; the checkpoint must then hold a trained head. A number to train, from any language model.
        merged: merge all adapters. They are also merged with a seed. Otherwise the last ones stay beside the weights,
            so that scores are bit for bit those of the run that trained them.
        four_bit: load linear layers in 4 bits; None keeps float32.
        stored: dtype of the trunk's matrices in memory; the head stays in float32.
        float32_experts: the experts of a mixture that stay in float32, named as by ``--lora-targets``.

    With a seed, a missing head gets weights N(0, 1/(d+1)), that is a standard deviation of 1/sqrt(d+1) (Stiennon et al.
    2020), and a padding token is added if the tokenizer has none of its own, because the score is read at the last token
    that is not padding. A trained model keeps the one it has, so it is read at the same token as before.

    What it reads of a conversation (``reads``) is what its `heedful.json` says. Without one it is somebody else's, and
    reads all that its chat template writes; a fresh head learns from texts that end with the turn.

    Raises CheckpointError if the model has more than one output, no head, or no padding token.
    """
    source = resolve(model)
    name, adapters = source.folder, source.adapters
    with explained(name, "sequence classifier"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed or 0)  # for layers below the head that the checkpoint lacks, such as a pooler
        classifier, info = read_weights(
            AutoModelForSequenceClassification,
            source,
            "sequence classifier",
            num_labels=1,
            ignore_mismatched_sizes=True,
            **(four_bit.arguments(keep=[*HEADS, "pooler"]) if four_bit else {}),
        )
        refuse_hub_adapters(classifier, name)
        say_unquantized(classifier, name, four_bit)
        beside = [] if merged or seed is not None else adapters[-1:]
        classifier = merge_adapters(classifier, adapters[: len(adapters) - len(beside)])
        for folder in beside:
            attach_adapter(classifier, folder)
    if info["mismatched_keys"]:
        raise CheckpointError(f"{name}: its classification head has more than one output; a reward model has one score")
    head_missing = _lacks_head(classifier, set(info["missing_keys"]) - whole_weights(adapters), name)
    if head_missing:
        if seed is None:
            raise CheckpointError(
                f"{name} has no reward head, so it is not a reward model yet; train one with: heedful reward"
            )
        _init_head(classifier, seed)
    if head_missing or (adapters and tokenizer.pad_token_id is not None):  # adapters have no config.json to name it
        ensure_distinct_pad(tokenizer, classifier)
    elif padding_id(classifier) is None:
        _name_padding(tokenizer, classifier, name, learns=seed is not None)
    facts = load_facts(name)
    use_attention(learn_every_embedding(classifier))
    reads = "turn-end" if head_missing else facts.reads or _template_or_turn(tokenizer)
    loaded = RewardModel(
        classifier,
        compute_dtype=compute_dtype,
        offset=facts.offset,
        reads=reads if hasattr(classifier, "score") else None,  # the others are encoders
    )
    store_matrices(classifier, stored, but=score_head(classifier), experts=experts_but(classifier, float32_experts))
    use_fast_products(classifier, device, compute_dtype)
    use_lean_norms(classifier, device)
    use_lean_mlps(classifier, device)
    use_lean_rotations(classifier, device)
    return loaded.to(device)


def _name_padding(tokenizer: PreTrainedTokenizerBase, classifier: PreTrainedModel, name: str, *, learns: bool) -> None:
    """Settle which token is padding for a model whose config.json names none. Raises CheckpointError if nothing names one.

    transformers then reads a text at its very end, so the end-of-sequence token must not count as padding.
    """
    if tokenizer.pad_token_id is None and not learns:
        raise CheckpointError(f"{name}: neither config.json nor the tokenizer names a padding token (pad_token_id)")
    ensure_distinct_pad(tokenizer, classifier)


def _lacks_head(classifier: PreTrainedModel, missing: set[str], name: str) -> bool:
    """Whether the head is among the missing weights. Raises CheckpointError if the rest is not complete.

    Below a fresh head a pooler may be missing too, since language models have none.
    """
    head_missing = any(key.split(".")[0] in HEADS for key in missing)
    trunk = f"{classifier.base_model_prefix}."
    lacking = sorted(
        key for key in missing if not head_missing or (key.startswith(trunk) and "pooler" not in key.split("."))
    )
    if lacking:
        raise CheckpointError(f"{name}: not a complete model; it lacks {len(lacking)} weights, first {lacking[0]}")
    return head_missing


def _template_or_turn(tokenizer: PreTrainedTokenizerBase) -> Reading:
    """What somebody else's model reads: its template, unless that is our own, which it was not trained on."""
    own = tokenizer.chat_template or PLAIN_TEMPLATE
    return "turn-end" if PLAIN_TEMPLATE in own else "template"


def _init_head(classifier: PreTrainedModel, seed: int) -> None:
    head = score_head(classifier)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head.weight.normal_(0.0, (head.in_features + 1) ** -0.5, generator=generator)
        if head.bias is not None:
            head.bias.zero_()


def ensure_distinct_pad(tokenizer: PreTrainedTokenizerBase, classifier: PreTrainedModel) -> None:
    """Give tokenizer and classifier a padding token that differs from the end-of-sequence token."""
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    if tokenizer.pad_token_id >= classifier.get_input_embeddings().weight.shape[0]:
        classifier.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for config in (classifier.config, classifier.config.get_text_config()):  # transformers reads that of the text part
        config.pad_token_id = tokenizer.pad_token_id
