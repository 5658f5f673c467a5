"""From the shapes of a run to the bytes of each of its parts, phase by phase.

A run's memory is what it holds all the time (weights, moments of the optimizer) and what a phase adds:

    sampling   the copy of the weights that samples, keys and values, logits
    scoring    one layer's activations, a chunk of logits (DPO with another reference: before the first step)
    values     what a value head reads of a minibatch's states, a few times over
    backward   all activations, a chunk of logits, gradients of earlier micro-batches
    step       all gradients

The peak is the largest of them. Every number below is a tensor that the code holds, counted from its shape; what an
allocator adds is not in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from heedful.planning.saved import saved_per_token
from heedful.planning.shapes import Shape

GB = 10**9
FOUR_BIT = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in NF4: half a byte, a byte for 64 of them, and a float32 for 256 of those bytes (Dettmers et al.
2023)."""
EIGHT_BIT_ADAM = 2 + 8 / 256
"""Bytes of Adam's two moments of a weight in bitsandbytes: a byte each, and a float32 for 256 of them."""
CUDA_CONTEXT = 600 * 10**6
"""What a process holds on a GPU before its first tensor, with the workspaces of cuBLAS. Not measured here."""
CHUNK, SMALLEST_CHUNK, BLOCK, KEPT = 2**22, {"cpu": 256, "cuda": 1024}, {"cpu": 2**19}, 2**24
"""The sizes of `heedful.kernels.head_logprobs`, which a test compares."""
MOST_SCORES = 2**22
"""That of `heedful.kernels.attention`."""
CACHE_BLOCK = 32
"""That of `heedful.sampling.kv_cache`."""
VALUE_HEAD = 128
"""Width of a value head's hidden layer (`heedful.models.value_model`)."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """One network of a run."""

    shape: Shape
    trained: Literal["all", "adapters", "nothing"] = "nothing"
    output: Literal["logits", "score"] = "logits"
    lora_rank: int = 0
    four_bit: bool = False
    on_device: bool = True
    """False: on the CPU beside a GPU, so that it takes nothing there."""
    shares_weights: bool = False
    """Its frozen weights are another network's."""
    adapts_experts: bool = False
    """Adapters are on a mixture's experts too."""
    float32_experts: bool = False
    """Its frozen experts stay in float32 on a GPU: adapters are folded into them, or the policy's are in float32."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How responses are sampled."""

    rows: int
    prompt: int
    new_tokens: int
    keeps_copy: bool = False
    """The copy that samples stays in memory (CUDA graphs)."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What `plan` counts."""

    device: Literal["cpu", "cuda"]
    half: bool
    """Products are computed in a half precision."""
    policy: Network
    critic: Network | None = None
    """One of its own."""
    value_head: bool = False
    reference: Network | None = None
    reference_is_freed: bool = False
    """It is read before the first step and then given back (DPO)."""
    rewards: tuple[Network, ...] = ()
    half_weights: bool = False
    """Trained matrices are stored in bfloat16."""
    optimizer: Literal["adamw", "adamw-8bit"] = "adamw"
    optimizer_on_device: bool = True
    averages_weights: bool = False
    checkpointing: bool = False
    with_entropy: bool = False
    """The entropy is part of the loss."""
    rows: int
    """Of a micro-batch."""
    length: int
    """Tokens of the longest row."""
    responses: int
    """Tokens of a row whose log-probs are computed."""
    batch: int
    """Rows that are learned from in one optimizer step."""
    per_item: int = 1
    """Rows that a rank has together: 2 of a pair."""
    rollout: int = 0
    """Rows of a rollout batch."""
    scored_rows: int | None = None
    """Rows that policy, reference and critic read at a time without gradients; None if as many as in a micro-batch."""
    sampling: Sampling | None = None
    """None also where servers sample."""
    sends_copy: bool = False
    """A copy of the policy goes from this device to servers, and stays for the next time."""

    @property
    def is_split(self) -> bool:
        """A step has several micro-batches."""
        return self.batch > self.rows

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.rows * self.length

    @property
    def bytes_computed(self) -> int:
        return 2 if self.half else 4


@dataclass(frozen=True)
class Plan:
    """Bytes of each part by phase."""

    phases: Mapping[str, Mapping[str, float]]

    def total(self, phase: str) -> float:
        """Bytes that a phase needs."""
        return sum(self.phases[phase].values())

    @property
    def peak_phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> float:
        """Bytes that the run needs."""
        return self.total(self.peak_phase)


def plan(work: Work) -> Plan:
    """The bytes that each part of a run needs in each phase."""
    held = _held(work)
    phases: dict[str, dict[str, float]] = {}
    if work.sampling is not None:
        phases["sampling"] = held | _sampling(work, work.sampling)
    if work.rollout or work.reference_is_freed:
        phases["scoring"] = (_weights(work) if work.reference_is_freed else held) | _scoring(work)
    if work.value_head:
        phases["values"] = held | {"activations": 10 * work.batch * work.responses * 4 * work.policy.shape.hidden}
    of_backward = [_backward(work, network, before) for network, before in _in_order(work)]
    phases["backward"] = held | max(of_backward, key=lambda parts: sum(parts.values()))
    phases["step"] = held | {"gradients": sum(_gradients(work, network) for network in learning(work))}
    if work.reference_is_freed:
        for name in ("backward", "step"):
            del phases[name]["reference"]
    return Plan({phase: {name: size for name, size in parts.items() if size} for phase, parts in phases.items()})


def learning(work: Work) -> list[Network]:
    """The networks that learn."""
    return [network for network in (work.policy, work.critic) if network is not None]


def _in_order(work: Work) -> list[tuple[Network, float]]:
    """The networks in the order of their backward passes, and the bytes of gradients that are there before each."""
    total = sum(_gradients(work, network) for network in learning(work))
    pairs, before = [], 0.0
    for network in learning(work):
        pairs.append((network, total if work.is_split else before))
        before += _gradients(work, network)
    return pairs


def _held(work: Work) -> dict[str, float]:
    """Weights, and what grows with those that learn."""
    learned = sum(_learned(network) for network in learning(work)) + _value_head(work)
    each = 0.0 if not work.optimizer_on_device else EIGHT_BIT_ADAM if work.optimizer == "adamw-8bit" else 8.0
    return _weights(work) | {
        "moving average": trained_bytes(work, work.policy) + 4 * _value_head(work) if work.averages_weights else 0,
        "moments of the optimizer": each * learned,
        "states of the value head": _states(work),  # those of a rollout batch, until the next one has been sampled
    }


def _states(work: Work) -> int:
    """The states ``[batch, time, hidden]`` that a value head learns from, in float32."""
    return work.rollout * work.responses * 4 * work.policy.shape.hidden if work.value_head else 0


def _weights(work: Work) -> dict[str, float]:
    critic, reference = work.critic, work.reference
    sampling = work.sampling
    return {
        "CUDA itself": CUDA_CONTEXT if work.device == "cuda" else 0,
        "policy, frozen": _frozen(work, work.policy),
        "policy, trained": trained_bytes(work, work.policy) + 4 * _value_head(work),
        "critic, frozen": 0 if critic is None else _frozen(work, critic),
        "critic, trained": 0 if critic is None else trained_bytes(work, critic),
        "reference": 0 if reference is None else _frozen(work, reference),
        "reward models": sum(_frozen(work, reward) for reward in work.rewards),
        "copy that samples": _copy(work) if sampling is not None and sampling.keeps_copy else 0,
        "copy for servers": work.bytes_computed * work.policy.shape.parameters if work.sends_copy else 0,
    }


def _value_head(work: Work) -> int:
    hidden = work.policy.shape.hidden
    return (3 * hidden + 2) * VALUE_HEAD + hidden + 1 if work.value_head else 0


def _frozen(work: Work, network: Network) -> float:
    """Bytes of the weights that do not learn: on a GPU, matrices are in the dtype of the products."""
    shape, short = network.shape, work.bytes_computed
    if network.trained == "all" or network.shares_weights or not network.on_device:
        return 0
    rest = 4 * shape.vectors + expert_size(work, network) * shape.experts
    if network.four_bit:  # of linear layers
        return FOUR_BIT * shape.linear + short * (shape.embedding + shape.head) + rest
    if work.device == "cuda":
        return short * (shape.embedding + shape.head + shape.linear) + rest
    if network.trained == "adapters":  # on a CPU the base of adapters stays in float32
        return 4 * (shape.embedding + shape.head + shape.linear) + rest
    return short * (shape.linear + shape.head) + 4 * shape.embedding + rest


def expert_size(work: Work, network: Network) -> int:
    """Bytes of a weight of a mixture's experts as it is stored."""
    if network.trained == "all":
        return 2 if work.half_weights else 4
    return 4 if work.device == "cpu" or network.float32_experts else work.bytes_computed


def folded(work: Work, network: Network) -> float:
    """Bytes of a layer's experts with their adapters added to them, which each pass makes anew and a backward pass needs."""
    shape = network.shape
    if network.trained != "adapters" or not network.adapts_experts:
        return 0
    return expert_size(work, network) * shape.experts / shape.layers


def adapters(network: Network) -> int:
    """Weights of a network's adapters."""
    shape = network.shape
    return network.lora_rank * (shape.edges + (shape.expert_edges if network.adapts_experts else 0))


def _learned(network: Network) -> int:
    """Weights that learn."""
    return {"all": network.shape.parameters, "adapters": adapters(network), "nothing": 0}[network.trained]


def trained_bytes(work: Work, network: Network) -> int:
    """Bytes of the weights that learn, and so of their gradients. Adapters and vectors are in float32."""
    if network.trained == "all" and work.half_weights:
        return 2 * network.shape.matrices + 4 * network.shape.vectors
    return 4 * _learned(network)


_gradients = trained_bytes


def casts(work: Work, network: Network, *, learning: bool) -> float:
    """Copies of float32 matrices in half precision: autocast keeps those of weights that learn until a pass is over, and
    the backward pass those that it needs."""
    shape = network.shape
    if not work.half or (network.trained == "all" and work.half_weights):
        return 0
    head = 2 * shape.output if network.output == "logits" else 0
    if network.trained == "all":
        return 2 * shape.linear + head
    if network.trained == "adapters":
        frozen_is_float32 = work.device == "cpu" and learning
        return (
            2 * _learned(network)
            + (2 * shape.linear if frozen_is_float32 else 0)
            + (head if work.device == "cpu" else 0)
        )
    tied = shape.head == 0 and work.device == "cpu"
    return head if tied else 0


def _sampling(work: Work, sampling: Sampling) -> dict[str, float]:
    shape, size = work.policy.shape, work.bytes_computed
    places = -(-(sampling.prompt + sampling.new_tokens) // CACHE_BLOCK) * CACHE_BLOCK
    logits = sampling.rows * shape.vocabulary * (size + 8 if work.half else 8)
    prefill = sampling.rows * sampling.prompt * _one_layer(work, shape) + folded(work, work.policy)
    return {
        "copy that samples": 0 if sampling.keeps_copy else _copy(work),
        "keys and values": 2
        * shape.key
        * size
        * sampling.rows
        * places
        * (shape.layers + 1),  # one layer grows at a time
        "logits": max(logits, prefill),
    }


def _copy(work: Work) -> float:
    """The copy that samples holds the policy's float32 matrices in half precision."""
    shape = work.policy.shape
    if not work.half:
        return 0
    if work.policy.trained == "adapters":
        return 2 * _learned(work.policy) + (2 * (shape.linear + shape.output) if work.device == "cpu" else 0)
    if work.half_weights:
        return 2 * shape.linear if work.device == "cpu" else 0  # there packed in the order that oneDNN reads
    return 2 * (shape.linear + shape.output)


def _one_layer(work: Work, shape: Shape) -> int:
    """Bytes per token that a layer holds at once without gradients: the stream, its norm, and the MLP between."""
    return 4 * 3 * shape.hidden + work.bytes_computed * max(3 * shape.intermediate, 3 * shape.query + 2 * shape.key)


def _scoring(work: Work) -> dict[str, float]:
    networks = [
        work.policy,
        *(n for n in (work.critic, work.reference, *work.rewards) if n is not None and n.on_device),
    ]
    passes = []
    for network in networks:
        is_reward = any(network is reward for reward in work.rewards)
        part = work if is_reward or work.scored_rows is None else replace(work, rows=work.scored_rows)
        head = _head(part, network, with_entropy=network is work.policy)[0] if network.output == "logits" else 0
        activations = part.tokens * _one_layer(work, network.shape) + folded(work, network)
        passes.append(
            {
                "copies in half precision": casts(work, network, learning=False),
                "activations": max(max(activations, head) + _states(work), 3 * _states(work)),
            }
        )
    return max(passes, key=lambda parts: sum(parts.values()))


def _backward(work: Work, network: Network, gradients_before: float) -> dict[str, float]:
    """What is there when a network's backward pass begins: all activations, before any is given back."""
    shape, rank = network.shape, network.lora_rank if network.trained == "adapters" else 0
    saved = work.tokens * saved_per_token(shape, half=work.half, device=work.device, rank=rank)
    per_layer = saved + _scores(work, shape) + folded(work, network)
    activations: float = shape.layers * per_layer
    transient: float = work.tokens * (2 * work.bytes_computed * shape.intermediate + 8 * shape.hidden)
    transient += folded(work, network)  # the gradients of a layer's, of which those of adapters are made
    if work.checkpointing:  # a layer comes back when the logits are gone
        activations = shape.layers * work.tokens * 4 * shape.hidden
        transient += per_layer
    ends = work.tokens * 4 * shape.hidden * (1 if rank or work.device == "cpu" else 2)  # the last norm
    logits = 0.0
    if network.output == "logits":
        _, logits = _head(work, network, with_entropy=work.with_entropy)
        responses = work.rows * work.responses
        ends += (
            responses * shape.hidden * (8 if not work.half else 10)
        )  # states, their gradient, in half precision a copy
    of_head = 0.0
    if network.trained == "all" and network.output == "logits":
        of_head = shape.output * (2 if work.half_weights else 4)
    # A first micro-batch's gradient of the head becomes the gradient; a later one's is there beside it until it is added.
    gradients = gradients_before + of_head
    if network.four_bit:
        transient = max(transient, 2 * max(shape.hidden * shape.intermediate, shape.hidden * shape.query))
    return {
        "copies in half precision": casts(work, network, learning=True),
        "activations": activations + ends + max(0, transient - logits),
        "logits": logits,
        "gradients": gradients,
    }


def _scores(work: Work, shape: Shape) -> int:
    """Bytes of a layer's attention weights, where plain products attend: few scores, half precision, on a CPU."""
    scores = work.rows * shape.heads * work.length**2
    return 6 * scores if work.device == "cpu" and work.half and scores <= MOST_SCORES else 0


def _head(work: Work, network: Network, *, with_entropy: bool) -> tuple[float, float]:
    """Bytes of logits in the forward and in the backward pass (`heedful.kernels.head_logprobs`)."""
    vocabulary, tokens, size = network.shape.vocabulary, work.rows * work.responses, work.bytes_computed
    chunk = min(tokens, max(SMALLEST_CHUNK[work.device], CHUNK // vocabulary)) * vocabulary
    block = min(chunk, max(vocabulary, BLOCK.get(work.device, chunk)))
    kept = tokens * vocabulary <= KEPT
    log_softmax = 4 * block * (3 if with_entropy else 2)
    forward = size * chunk + log_softmax
    backward = size * (tokens * vocabulary if kept else chunk) + size * chunk + log_softmax
    return forward, backward
