"""What an iteration of PPO has to compute and to move at the least: FLOPs and bytes of its phases, from shapes and lengths.

Pure functions. Real tokens alone count, once each: no padding, nothing computed twice, and so not the pass for the old
log-probs either, which the sampler has had in its hands. With N_b weights in the layers, N_h = hidden x vocabulary in the
head, L layers, h heads of d and A(T) = 2 L h d T (T + 1) for causal attention over T tokens, of prompts P, responses R,
T = P + R and U different prompts:

    prefill    sum_U [2 N_b P + A(P)] + 2 N_h U
    decode     sum [2 (N_b + N_h) (R - 1) + A(T - 1) - A(P)]     the first token is the prefill's, the last is not fed back
    reference  sum [2 N_b T + A(T) + 2 N_h R]
    value, reward model: sum [2 N_b T + A(T)]
    train      3 a PPO epoch times the reference's, and with a critic of its own 3 times the value's
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Product(NamedTuple):
    """A shape of matrix products: ``batch`` at once of ``[rows, inner] @ [inner, columns]``."""

    batch: int
    rows: int
    inner: int
    columns: int
    weights: int = 1
    """How many different right sides come one after the other: one a layer."""


Flops = Mapping[Product, float]
"""FLOPs by the shape of the products that they are done in."""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """What a decoder's cost depends on."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    gated: bool = True
    """Three matrices in the feed-forward part, not two."""
    tied: bool = True

    @property
    def layer_matrices(self) -> list[tuple[int, int]]:
        """Inputs and outputs of a layer's matrices: query, key, value, output, feed-forward."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = [(self.hidden, queries), (self.hidden, keys), (self.hidden, keys), (queries, self.hidden)]
        up = (self.hidden, self.intermediate)
        return [*attention, *[up] * (2 if self.gated else 1), up[::-1]]

    @property
    def body_weights(self) -> int:
        """N_b: weights in the matrices of all layers."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.layer_matrices)

    @property
    def head_weights(self) -> int:
        """N_h: weights of the head, which an embedding has as well."""
        return self.hidden * self.vocabulary

    def parameters(self, *, head: bool) -> int:
        """All weights, the small ones (norms, biases, positions) left out. Without its head it is a critic's trunk."""
        return self.body_weights + self.head_weights * (1 if self.tied or not head else 2)

    def cache_bytes(self, width: int) -> int:
        """Of a token's keys and values in all layers, ``width`` bytes a number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * width

    def attention(self, cached: int, total: int) -> int:
        """A(total) - A(cached): FLOPs of the tokens after ``cached``, each reading itself and all before it."""
        return 2 * self.layers * self.heads * self.head_dim * (total * (total + 1) - cached * (cached + 1))


def decoder_of(config: Any) -> Decoder:
    """From a Hugging Face configuration of the GPT-2, Llama, Qwen2 and Qwen3 kinds."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    gpt2 = config.model_type == "gpt2"
    return Decoder(
        layers=config.num_hidden_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        intermediate=(config.n_inner or 4 * hidden) if gpt2 else config.intermediate_size,
        vocabulary=config.vocab_size,
        gated=not gpt2,
        tied=config.tie_word_embeddings,
    )


@dataclass(frozen=True)
class Work:
    """What a part of an iteration does at the least."""

    flops: Flops = field(default_factory=dict)
    bytes: float = 0.0
    held: float = 0.0
    """Bytes that it goes over again and again: which memory they come from depends on it."""

    @property
    def total_flops(self) -> float:
        """FLOPs of all shapes together."""
        return sum(self.flops.values())


def near(number: float) -> int:
    """The nearest of 1, 2, 3, 4, 6, 8, 12, 16, ...: products of about the same size are measured as one."""
    power = 2 ** int(math.log2(max(1.0, number)))
    return min((power, power + power // 2, 2 * power), key=lambda candidate: abs(candidate - number))


def total(parts: Iterable[Flops]) -> Flops:
    """The sum, shape by shape."""
    sums: defaultdict[Product, float] = defaultdict(float)
    for part in parts:
        for product, flops in part.items():
            sums[product] += flops
    return dict(sums)


def forward(model: Decoder, lengths: Sequence[int], *, head_tokens: int, micro_batch_size: int) -> Flops:
    """One pass over rows of these lengths, with logits at ``head_tokens`` of their tokens.

    The products are as large as a micro-batch's real tokens make them, in the mean over micro-batches.
    """
    micro_batches = math.ceil(len(lengths) / micro_batch_size)
    tokens, length = near(sum(lengths) / micro_batches), near(sum(lengths) / len(lengths))
    rows = round(len(lengths) / micro_batches) * model.heads
    attention = sum(model.attention(0, one) for one in lengths)
    parts: list[Flops] = [
        {Product(1, tokens, inputs, outputs, model.layers): 2 * model.layers * inputs * outputs * sum(lengths)}
        for inputs, outputs in model.layer_matrices
    ]
    parts.append({Product(rows, length, model.head_dim, length): attention / 2})
    parts.append({Product(rows, length, length, model.head_dim): attention / 2})
    if head_tokens:
        head = Product(1, near(head_tokens / micro_batches), model.hidden, model.vocabulary)
        parts.append({head: 2 * model.head_weights * head_tokens})
    return total(parts)


def backward(flops: Flops) -> Flops:
    """The two products behind each of a forward pass: gradients of its left and of its right side."""
    left = {p._replace(inner=p.columns, columns=p.inner): f for p, f in flops.items()}
    right = {p._replace(rows=p.inner, inner=p.rows): f for p, f in flops.items()}
    return total([left, right])


def prefill(model: Decoder, prompts: Sequence[int], *, width: int) -> Work:
    """Each different prompt once, all at a time, and the logits behind it; ``width`` bytes a weight."""
    flops = forward(model, prompts, head_tokens=len(prompts), micro_batch_size=len(prompts))
    weights = width * (model.body_weights + model.head_weights)
    return Work(flops, bytes=weights, held=weights)


def decode(model: Decoder, prompts: Sequence[int], responses: Sequence[int], *, width: int) -> Work:
    """A token a step for the rows that are not finished, as many as those are; weights and cache are read in each step."""
    flops: defaultdict[Product, float] = defaultdict(float)
    weights, moved = width * (model.body_weights + model.head_weights), 0
    for step in range(1, max(responses)):
        live = [prompt for prompt, response in zip(prompts, responses, strict=True) if response > step]
        read = sum(live) + step * len(live)
        rows, context = near(len(live)), near(read / len(live))
        for inputs, outputs in model.layer_matrices:
            flops[Product(1, rows, inputs, outputs, model.layers)] += 2 * model.layers * inputs * outputs * len(live)
        flops[Product(1, rows, model.hidden, model.vocabulary)] += 2 * model.head_weights * len(live)
        group, caches = model.heads // model.kv_heads, rows * model.kv_heads
        for product in (
            Product(caches, group, model.head_dim, context, model.layers),
            Product(caches, group, context, model.head_dim, model.layers),
        ):
            flops[product] += 2 * model.layers * model.heads * model.head_dim * read
        moved += weights + model.cache_bytes(width) * read
    cache = model.cache_bytes(width) * (sum(prompts) + sum(responses))
    return Work(dict(flops), bytes=moved, held=weights + cache)


def sampling(model: Decoder, responses: Sequence[int]) -> Work:
    """Every row of float32 logits read once."""
    row = 4 * model.vocabulary
    return Work(bytes=row * sum(responses), held=row * len(responses))


def score(model: Decoder, lengths: Sequence[int], *, head_tokens: int, micro_batch_size: int, width: int) -> Work:
    """One pass without gradients: a reference with logits at the response tokens, a critic or reward model with none."""
    flops = forward(model, lengths, head_tokens=head_tokens, micro_batch_size=micro_batch_size)
    weights = width * (model.body_weights + (model.head_weights if head_tokens else 0))
    return Work(flops, bytes=weights, held=weights)


def train(
    policy: Decoder,
    critic: Decoder | None,
    lengths: Sequence[int],
    *,
    head_tokens: int,
    epochs: int,
    steps: int,
    micro_batch_size: int,
    width: int,
) -> Work:
    """Forward and backward passes of ``epochs`` PPO epochs in ``steps`` optimizer steps; a shared critic costs nothing."""
    passes = [forward(policy, lengths, head_tokens=head_tokens, micro_batch_size=micro_batch_size)]
    weights = policy.body_weights + policy.head_weights
    if critic is not None:
        passes.append(forward(critic, lengths, head_tokens=0, micro_batch_size=micro_batch_size))
        weights += critic.body_weights
    one_epoch = total([*passes, *map(backward, passes)])
    moved = 2 * width * weights
    return Work({product: epochs * flops for product, flops in one_epoch.items()}, bytes=steps * moved, held=moved)


def optimizer(parameters: int, *, steps: int, width: int) -> Work:
    """Adam: gradient, weight and two moments read, the last three written, and a copy in half precision."""
    return Work(bytes=steps * parameters * (28 + (width if width < 4 else 0)), held=16 * parameters)
