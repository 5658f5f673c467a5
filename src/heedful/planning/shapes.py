"""The sizes of a model that determine its memory; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

ATTENTION = ("self_attn", "attn", "attention")
"""Names of a layer's attention, as ``--value-freeze`` has them."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Parameters by kind, and the widths that determine the activations."""

    embedding: int
    """Parameters of the token embeddings."""
    head: int
    """Parameters of the output head; 0 if it is tied to the embeddings, or there is none."""
    linear: int
    """Parameters of the linear layers' matrices below the head."""
    attention: int
    """Those of attention among them."""
    edges: int
    """Inputs plus outputs of those matrices, summed: adapters of rank r have r * edges parameters."""
    vectors: int
    """All other parameters: norms, biases, and others outside linear layers. They stay in float32."""
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    query: int
    """Width of all heads' queries."""
    key: int
    """Width of the keys, and of the values, of all heads."""
    intermediate: int
    """Width of the MLP; in a mixture of experts, of all active experts of a token together."""
    head_norms: bool = False
    """True if queries and keys are normalised per head."""
    experts: int = 0
    """Parameters of a mixture's experts if all experts of a layer are one tensor, ``[experts, out, in]``."""
    expert_edges: int = 0
    """Inputs plus outputs of each expert's matrices, summed."""
    expert_names: tuple[str, ...] = ()
    """Suffixes of the names of those parameters."""

    @property
    def parameters(self) -> int:
        return self.matrices + self.vectors

    @property
    def matrices(self) -> int:
        """Parameters whose memory depends on the stored dtype."""
        return self.embedding + self.head + self.linear + self.experts

    def has_adapted_experts(self, targets: str) -> bool:
        """Whether ``--lora-targets`` puts adapters on experts."""
        wanted = [target.strip() for target in targets.split(",")]
        return bool(self.experts) and (
            targets == "all-linear"
            or any(
                f".{name}".endswith(f".{t}") or f".{t}".endswith(f".{name}")
                for name in self.expert_names
                for t in wanted
            )
        )

    @property
    def key_heads(self) -> int:
        """Number of key heads; query heads may share them."""
        return self.key * self.heads // self.query

    @property
    def trunk(self) -> "Shape":
        """The model without its head."""
        return replace(self, head=0)

    @property
    def output(self) -> int:
        """Parameters of the output matrix (for the logits), tied or not."""
        return self.vocabulary * self.hidden


def decoder(
    *,
    vocabulary: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    tied: bool,
    biases: bool = False,
    head_norms: bool = False,
) -> Shape:
    """The shape of a Llama, Qwen2 (``biases`` of queries, keys and values) or Qwen3 (``head_norms``) decoder."""
    query, key = heads * head_dim, kv_heads * head_dim
    attention = hidden * (2 * query + 2 * key)
    linear = attention + 3 * hidden * intermediate
    edges = 7 * hidden + 2 * query + 2 * key + 3 * intermediate
    vectors = 2 * hidden + (query + 2 * key if biases else 0) + (2 * head_dim if head_norms else 0)
    return Shape(
        embedding=vocabulary * hidden,
        head=0 if tied else vocabulary * hidden,
        linear=layers * linear,
        attention=layers * attention,
        edges=layers * edges,
        vectors=layers * vectors + hidden,
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        heads=heads,
        query=query,
        key=key,
        intermediate=intermediate,
        head_norms=head_norms,
    )


KNOWN: Mapping[str, Shape] = {
    "0.5B": decoder(  # Qwen2.5-0.5B
        vocabulary=151_936, hidden=896, layers=24, heads=14, kv_heads=2, head_dim=64, intermediate=4864,
        tied=True, biases=True,
    ),
    "1.5B": decoder(  # Qwen2.5-1.5B
        vocabulary=151_936, hidden=1536, layers=28, heads=12, kv_heads=2, head_dim=128, intermediate=8960,
        tied=True, biases=True,
    ),
    "4B": decoder(  # Qwen3-4B
        vocabulary=151_936, hidden=2560, layers=36, heads=32, kv_heads=8, head_dim=128, intermediate=9728,
        tied=True, head_norms=True,
    ),
    "8B": decoder(  # Qwen3-8B
        vocabulary=151_936, hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, intermediate=12_288,
        tied=False, head_norms=True,
    ),
}  # fmt: skip
"""Shapes of well-known models, by their size."""
