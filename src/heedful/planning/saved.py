"""What a layer keeps for its backward pass."""

from heedful.planning.shapes import Shape


def saved_per_token(shape: Shape, *, half: bool, device: str = "cpu", rank: int = 0) -> int:
    """Bytes per token that a layer keeps for its backward pass.

    Args:
        shape: the model.
        half: products are computed in a half precision; the stream between layers stays in float32.
        device: where it is; on a CPU norms in float32 keep less (`heedful.kernels.norms`).
        rank: of the adapters; 0 means that all weights learn.

    Counted on transformers' Qwen3 (and Qwen2, which has no norms of heads). Per norm: its input, its inverse root, and, if
    autograd differentiates it, what its weights multiply if they learn. Per product: its input, once for each product in half
    precision, as each casts for itself. Rotated queries, keys and values; what attention gives; the MLP's gate, before and
    after its activation, its other half, and their product.
    """
    learns_norms = rank == 0
    keeps_scaled, keeps_scaled_heads = learns_norms and device != "cpu", learns_norms and (half or device != "cpu")
    hidden, query, key, middle = shape.hidden, shape.query, shape.key, shape.intermediate
    size = 2 if half else 4
    norms = 2 * (hidden * 4 * (2 if keeps_scaled else 1) + 4)
    inputs = hidden * (5 * 2 if half else 2 * 4)
    of_heads = 0
    if shape.head_norms:
        of_heads = (query + key) * (4 + (size if keeps_scaled_heads else 0)) + 4 * (shape.heads + shape.key_heads)
    attention = size * (2 * query + 2 * key) + 4 * shape.heads  # with a number per head and query, of its softmax
    if rank and half:
        attention += 2 * query  # PEFT casts the adapters' input to float32, and autocast that back
    adapters = size * rank * 7
    return norms + inputs + of_heads + attention + 4 * middle * size + adapters
