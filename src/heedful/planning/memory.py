"""Compute a run's memory from its settings and the shapes of its models: no torch, no download.

A run always holds weights, moments of the optimizer and the like. Each phase adds:

    sampling   a copy of the weights for sampling, keys and values, logits
    scoring    one layer's activations, a chunk of logits (DPO with another reference: before the first step)
    values     the value head's input states of a minibatch, a few times over
    backward   all activations, a chunk of logits, gradients of earlier micro-batches
    step       all gradients

The peak is the largest phase. Every number is the size of a tensor in the code, computed from its shape; the allocator's
overhead is not included. The activations are those of dense decoders such as Llama, Qwen2 and Qwen3.

Each of several ranks has its share of the rows. With ``--shard full`` it also has its share of the stored tensors, and
temporarily holds in full: a copy of the policy (sampling); two blocks in the dtype of the products, embeddings and head
(scoring and backward); gradients of a block and the ends (embeddings and head), or of everything until they are summed
(backward).
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from heedful.configs.online import OnlineConfig, RolloutConfig
from heedful.configs.options import ReferenceOptions, TrainingOptions
from heedful.planning.shapes import ATTENTION, Shape

ShapeOf = Callable[[str], Shape]
"""Returns the shape of a model by its name."""
Parts = dict[str, float]
"""Bytes of each part."""

GB = 10**9
FOUR_BIT = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes per weight in NF4: half a byte, a byte per 64 weights, and a float32 per 256 of those (Dettmers et al. 2023)."""
MOMENTS = {"adamw": 8.0, "adamw-8bit": 2 + 8 / 256}
"""Bytes per weight of Adam's two moments. In bitsandbytes: a byte each, and a float32 per 256 of them."""
CUDA_CONTEXT = 800 * 10**6
"""Bytes of a process on a GPU besides its tensors, with the workspaces of cuBLAS: as on an H200 (torch 2.11, CUDA 13)."""
CHUNK, SMALLEST_CHUNK, LEARNED_CHUNK, BLOCK, CPU_BLOCK, KEPT = 2**22, 256, 1024, 2**25, 2**19, 2**24
"""Sizes as in `heedful.kernels.head_logprobs`; a test compares them."""
MOST_SCORES = 2**22
"""As in `heedful.kernels.attention`."""
PART = 2**24
"""As in `heedful.training.compact_adamw`."""
MOST_READ = 0.9
"""As in `heedful.kernels.cpu.layers`."""
CACHE_BLOCK, GRAPH_BLOCK = 32, 128
"""As in `heedful.engines.kv_cache` and `heedful.engines.cuda_graph`."""
VALUE_HEAD = 128
"""Width of a value head's hidden layer (`heedful.models.value_model`)."""
SAVED = "copy that is saved"
"""A sharded policy, whole, on the first rank."""
IN_FLIGHT = 2
"""Unsharded blocks of a sharded model at a time: the current one, and the next, which is prefetched."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest text, and of the longest prompt in it."""

    longest: int
    prompt: int = 0


@dataclass(frozen=True)
class Plan:
    """Bytes of each part by phase."""

    phases: Mapping[str, Mapping[str, float]]
    host: Mapping[str, float]
    """Bytes of main memory of a rank with a GPU by part; empty on a CPU, whose memory the phases are about. Only one rank has
    the `SAVED`."""
    merges_adapters: bool = False
    """Whether adapters are merged in the copy that samples: there is room for the merged matrices."""
    sampled_rows: int = 0
    """Responses that are sampled at a time."""
    graphs: bool = False
    """Whether sampling has CUDA graphs: the settings say so, or there is room for them."""

    def total(self, phase: str) -> float:
        """Bytes needed by a phase."""
        return sum(self.phases[phase].values())

    def main_memory(self, ranks: int) -> Parts:
        """Bytes of main memory of a machine with this many ranks, the first of them included, by part."""
        return {name: size * (1 if name == SAVED else ranks) for name, size in self.host.items()}

    @property
    def peak_phase(self) -> str:
        """The phase with the peak."""
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> float:
        """Bytes needed by the run."""
        return self.total(self.peak_phase)


def plan_of(
    config: TrainingOptions,
    shape_of: ShapeOf,
    lengths: Lengths,
    *,
    device: Literal["cpu", "cuda"],
    half: bool,
    ranks: int = 1,
    free: float = 0,
) -> Plan:
    """Compute the bytes of each part of a run on each of its ranks, phase by phase.

    Args:
        config: the settings.
        shape_of: returns the shape of each model named in the settings.
        lengths: of the texts. Every text is assumed to be as long as the longest.
        device: the run's device.
        half: whether matrix products are in half precision.
        ranks: processes that train together, each with a device of its own.
        free: bytes that the run may use. What makes sampling faster is planned if it fits, or takes no more than another
            phase: CUDA graphs if they are ``auto``, merged adapters, and, if the settings do not say how many responses are
            sampled at a time, more of them.
    """
    shape_of = functools.cache(shape_of)

    def planned(*, graphs: bool, merges: bool = False, rows: int | None = None) -> Plan:
        return _Run(config, shape_of, lengths, device, half, ranks, graphs, merges, rows).plan()

    online = config if isinstance(config, RolloutConfig) else None
    plan = planned(graphs=online is not None and online.cuda_graphs == "on")
    room = max(plan.peak, free)
    if online is None or "sampling" not in plan.phases:
        return plan
    is_whole = config.shard == "none" or ranks == 1
    if online.cuda_graphs == "auto" and device == "cuda" and is_whole and config.quantize == "none":
        recorded = planned(graphs=True)
        plan = recorded if recorded.peak <= room else plan
    if config.lora_rank and config.trains_policy and config.quantize != "4bit":
        merged = planned(graphs=plan.graphs, merges=True)
        plan = merged if merged.peak <= room else plan
    while online.rollout_micro_batch_size is None and plan.sampled_rows < math.ceil(online.rollout_batch_size / ranks):
        more = planned(graphs=plan.graphs, merges=plan.merges_adapters, rows=2 * plan.sampled_rows)
        if more.peak > room or more.sampled_rows == plan.sampled_rows:
            break
        plan = more
    return plan


@dataclass(frozen=True, kw_only=True)
class _Network:
    """One network of a run, with stored bytes per weight of each kind. Vectors have 4."""

    shape: Shape
    trained: Literal["all", "adapters", "nothing"]
    has_logits: bool
    rank: int = 0
    """Number of its adapters' weights."""
    adapts_experts: bool = False
    shares_weights: bool = False
    """True if its frozen weights are shared with another network."""
    still: int = 0
    """Number of its linear layers' weights that stay although all is trained."""
    linear: float
    head: float
    embedding: float
    experts: float

    @property
    def stored(self) -> float:
        """Bytes of all weights except adapters."""
        shape = self.shape
        matrices = self.linear * shape.linear + self.head * shape.head + self.embedding * shape.embedding
        return matrices + self.experts * shape.experts + 4 * shape.vectors

    @property
    def frozen(self) -> float:
        """Bytes of the frozen weights."""
        if self.trained == "all":
            return self.linear * self.still
        return 0 if self.shares_weights else self.stored

    @property
    def learned(self) -> int:
        """Number of trained weights."""
        if self.trained == "all":
            return self.shape.parameters - self.still
        return self.rank * (self.shape.edges + (self.shape.expert_edges if self.adapts_experts else 0))

    @property
    def gradients(self) -> float:
        """Bytes of the trained weights, and so of their gradients. Adapters are in float32."""
        return self.stored - self.frozen if self.trained == "all" else 4 * self.learned

    @property
    def folded(self) -> float:
        """Bytes of a layer's experts with adapters added: computed in each pass, and needed by the backward pass."""
        return self.experts * self.shape.experts / self.shape.layers if self.adapts_experts else 0

    @property
    def block(self) -> float:
        """Weights of one block's matrices."""
        return (self.shape.linear + self.shape.experts) / self.shape.layers

    @property
    def ends(self) -> int:
        """Weights of embeddings and head."""
        return self.shape.embedding + self.shape.head


@dataclass
class _Run:
    """The parts of a run that use memory: its networks, and the rows of one rank at a time."""

    config: TrainingOptions
    shape_of: ShapeOf
    lengths: Lengths
    device: Literal["cpu", "cuda"]
    half: bool
    ranks: int
    graphs: bool = False
    """Sampling has CUDA graphs, whose copy of the weights and cache stay."""
    merges: bool = False
    """Adapters are merged in the copy that samples."""
    rows_at_a_time: int | None = None
    """Responses sampled at a time, if not as many as the settings say."""

    def __post_init__(self) -> None:
        self.online = self.config if isinstance(self.config, RolloutConfig) else None
        self.is_divided = self.config.shard == "full" and self.ranks > 1
        self.shards = self.ranks // self.config.replicas if self.is_divided else 1
        self.computed = 2 if self.half else 4
        """Bytes per number in matrix products."""
        self.responses = self.lengths.longest - self.lengths.prompt
        """Tokens per row with log-probs."""
        self._count_rows()
        self._find_networks()

    def _count_rows(self) -> None:
        """Rows of one rank: per optimizer step, per micro-batch, per pass without gradients, and sampled at a time."""
        config, longest = self.config, self.lengths.longest
        limit, together = (config.micro_batch.of_pairs, 2) if config.learns_pairs else (config.micro_batch, 1)
        batch = config.step_rows
        rows = min(limit.rows, batch)
        if limit.tokens is not None:
            rows = min(rows, max(together, limit.tokens // longest // together * together))
        self.batch = together * math.ceil(batch / together / self.ranks)
        self.rows = min(rows, self.batch)
        self.is_split = self.batch > self.rows
        """A step has several micro-batches."""
        self.tokens = self.rows * longest
        self.rollout = self.scored_rows = self.sampled_rows = 0
        if self.online is not None:
            self.rollout = self.online.rollout_batch_size
            here = math.ceil(self.rollout / self.ranks)
            sampled = self.online.rollout_micro_batch
            limits = (self.online.scoring_micro_batch, replace(sampled, rows=self.rows_at_a_time or sampled.rows))
            self.scored_rows, self.sampled_rows = (
                min(most.rows, here, self.rollout if most.tokens is None else max(1, most.tokens // longest))
                for most in limits
            )

    def _find_networks(self) -> None:
        """Set the networks on the device."""
        config, shape_of = self.config, self.shape_of
        shape = shape_of(config.model)
        self.policy = self._network(
            shape.trunk if config.learns_scores else shape,
            learns=config.trains_policy,
            has_logits=not config.learns_scores,
            four_bit=config.quantize == "4bit",
        )
        self.reference: _Network | None = None
        self.reference_is_freed = self.reference_waits = False
        """Whether the reference is used only before the first step and then freed; whether it waits in main memory and is on
        the GPU only for its pass."""
        if isinstance(config, ReferenceOptions) and config.loads_reference and self._is_apart(config):
            self.reference_is_freed = config.reads_reference_once
            as_policy = self.policy.adapts_experts if config.lora_rank else config.weights_dtype == "float32"
            self.reference_waits = config.reference_device == "cpu" and self.device == "cuda"
            self.reference = self._network(
                shape if config.reference is None else shape_of(config.reference),
                four_bit=config.quantize == "4bit" and config.reference_device == "same",
                float32_experts=config.reference is None and as_policy,
            )
        self.critic: _Network | None = None
        self.has_value_head = False
        if isinstance(config, OnlineConfig) and config.estimator.critic:
            self.has_value_head = config.critic == "shared"
            self.critic = None if self.has_value_head else self._critic(config)
        scorers = () if self.online is None else (*self.online.rewards, *self.online.selection_rewards)
        names = [one.removeprefix("model:") for one in scorers if isinstance(one, str) and one.startswith("model:")]
        self.rewards = [self._network(shape_of(name).trunk, has_logits=False) for name in names]

    def _is_apart(self, config: ReferenceOptions) -> bool:
        """Whether the reference has weights of its own, not the policy's beneath adapters or before the first step."""
        shares = bool(self.config.lora_rank) or self.config.reads_reference_once
        return not shares or config.reference is not None or config.reference_device == "cpu" or self.is_divided

    def _critic(self, config: OnlineConfig) -> _Network:
        """A critic with a network of its own."""
        start = config.value_model or config.model
        if config.critic == "reward":
            start = next((r.removeprefix("model:") for r in config.rewards if r.startswith("model:")), config.model)
        is_policy = bool(config.lora_rank) and config.critic == "separate" and start == config.model
        shares_weights = is_policy and not self.is_divided
        shape = self.shape_of(start).trunk
        network = self._network(shape, learns=True, has_logits=False, shares_weights=shares_weights)
        stays = {*ATTENTION} & {*config.value_freeze}  # other parts are planned as if they learned
        return replace(network, still=shape.attention if stays else 0)

    def _network(
        self,
        shape: Shape,
        *,
        learns: bool = False,
        has_logits: bool = True,
        four_bit: bool = False,
        float32_experts: bool = False,
        shares_weights: bool = False,
    ) -> _Network:
        """A network that is trained by the settings, or frozen. Frozen matrices are in the dtype of the products; on a CPU
        embeddings, experts and matrices with adapters are in float32."""
        config, size, on_cpu = self.config, self.computed, self.device == "cpu"
        if learns and not config.lora_rank:
            size = 2 if config.weights_dtype == "bfloat16" else 4
            return _Network(
                shape=shape, trained="all", has_logits=has_logits, linear=size, head=size, embedding=size, experts=size
            )
        adapts_experts = learns and shape.has_adapted_experts(config.lora_targets)
        four_bit = four_bit or (learns and config.quantize == "4bit")
        base = 4 if on_cpu and learns else size
        return _Network(
            shape=shape,
            trained="adapters" if learns else "nothing",
            has_logits=has_logits,
            rank=config.lora_rank if learns else 0,
            adapts_experts=adapts_experts,
            shares_weights=shares_weights,
            linear=FOUR_BIT if four_bit else base,
            head=size if four_bit else base,
            embedding=4 if on_cpu and not four_bit else size,
            experts=4 if on_cpu or adapts_experts or float32_experts else size,
        )

    @property
    def learning(self) -> list[_Network]:
        """The trained networks: each has minibatches and steps of its own."""
        policy = [self.policy] if self.config.trains_policy else []
        return policy if self.critic is None else [*policy, self.critic]

    @property
    def reading(self) -> list[_Network]:
        """All networks with forward passes."""
        policy = [] if self.config.trains_policy else [self.policy]
        return [*policy, *self.learning, *([] if self.reference is None else [self.reference]), *self.rewards]

    def plan(self) -> Plan:
        """The bytes of each part in each phase."""
        weights, held = self._weights(), self._weights() | self._kept()
        without = held | ({"reference": 0.0} if self.reference_waits or self.reference_is_freed else {})
        phases: dict[str, Parts] = {}
        if self.online is not None and not self.online.sampler:
            phases["sampling"] = without | self._sampling(self.online)
        states = {"states of the value head": self._states}
        held, without = held | states, without | states
        if self.online is not None or self.reference_is_freed:
            phases["scoring"] = (weights if self.reference_is_freed else held) | self._scoring()
        held = without
        if self.has_value_head:
            read = self.batch * self._state * (30 if self.half else 28)  # seven times in float32, and in half precision
            phases["values"] = held | {"activations": read}
        phases["backward"] = held | self._backward()
        gradients = max(network.gradients for network in self.learning) / self.shards
        phases["step"] = held | {"gradients": gradients, "a chunk of weights in float32": self._chunk()}
        named = {phase: {name: size for name, size in parts.items() if size} for phase, parts in phases.items()}
        host = {name: size for name, size in self._main_memory().items() if size}
        return Plan(named, host, self.merges, self.sampled_rows, self.graphs)

    def _main_memory(self) -> Parts:
        """Bytes of main memory of a rank on a GPU. Weights are read from mapped files, whose pages all ranks share, and go to
        the GPU weight by weight; experts are put together first. A layer at a time is tried out in float32, and a head
        that is tied to the embeddings."""
        if self.device == "cpu":
            return {}
        config, learned = self.config, sum(network.learned for network in self.learning) + self._value_head
        tied = [n.shape.embedding for n in self.reading if n.has_logits and not n.shape.head]
        tried = 4 * max([*(n.block for n in self.reading), *tied])
        experts = max(self.computed * network.shape.experts for network in self.reading)
        whole = self.policy.stored if self.policy.trained == "all" else 0
        moments = MOMENTS[config.optimizer] * learned / self.shards if config.optimizer_device == "cpu" else 0
        return {
            "a model while it is loaded": tried + experts,
            "moments of the optimizer": moments,
            "reference": self.reference.frozen if self.reference and self.reference_waits else 0,
            SAVED: whole if self.is_divided else 0,
        }

    def _weights(self) -> Parts:
        """Weights; a rank has its share of them if models are sharded."""
        stored: Parts = {
            "policy, frozen": self.policy.frozen,
            "policy, trained": self.policy.gradients + 4 * self._value_head,
            "critic, frozen": self.critic.frozen if self.critic else 0,
            "critic, trained": self.critic.gradients if self.critic else 0,
            "reference": self.reference.frozen if self.reference else 0,
            "reward models": sum(reward.frozen for reward in self.rewards),
        }
        copies: Parts = {}
        if self.online is not None and not self.online.sampler:
            copies["copy that samples"] = self._copy() if self.graphs else 0
            copies["cache and logits of graphs"] = self._of_graphs()
        if self.online is not None and self.online.sampler_weights == "nccl":
            copies["copy for servers"] = self.computed * self.policy.shape.parameters
        cuda = {"CUDA itself": CUDA_CONTEXT if self.device == "cuda" else 0}
        return cuda | {name: size / self.shards for name, size in stored.items()} | copies

    def _kept(self) -> Parts:
        """Parts that grow with the trained weights."""
        config, learned = self.config, sum(network.learned for network in self.learning) + self._value_head
        averages = self.online is not None and self.online.ema_decay > 0
        moments = MOMENTS[config.optimizer] * learned if config.optimizer_device == "same" else 0
        average = self.policy.gradients + 4 * self._value_head if averages else 0
        return {
            "moving average": average / self.shards,
            "moments of the optimizer": moments / self.shards,
        }

    def _chunk(self) -> float:
        """Bytes of a chunk of bfloat16 weights while it is stepped (`heedful.training.compact_adamw`): in float32, with its
        noise and what rounding makes of it; its gradient in float32 too, unless that is in main memory."""
        if self.config.weights_dtype != "bfloat16":
            return 0
        shape = self.policy.shape
        largest = max(shape.embedding, shape.head, shape.hidden * shape.intermediate, shape.experts // shape.layers)
        return (23 if self.config.optimizer_device == "same" else 19) * min(PART, largest / self.shards)

    @property
    def _value_head(self) -> int:
        """Weights of the value head."""
        hidden = self.policy.shape.hidden
        return (3 * hidden + 2) * VALUE_HEAD + hidden + 1 if self.has_value_head else 0

    @property
    def _state(self) -> int:
        """Numbers in the states of a response, ``[time, hidden]``."""
        return self.responses * self.policy.shape.hidden

    @property
    def _states(self) -> int:
        """Bytes of the states of a rank's rows of a rollout batch, on which a value head is trained."""
        rows = math.ceil(self.rollout / self.ranks) if self.has_value_head else 0
        return self.computed * rows * self._state

    def _copy(self) -> float:
        """Bytes of the copy for sampling: the policy's float32 matrices in half precision, and merged ones."""
        shape, on_cpu = self.policy.shape, self.device == "cpu"
        if self.merges:
            return self.computed * shape.linear + (2 * shape.output if on_cpu and self.half else 0)
        if not self.half:
            return 0
        if self.policy.trained == "adapters":
            return 2 * self.policy.learned + (2 * (shape.linear + shape.output) if on_cpu else 0)
        if self.policy.linear == 2:
            return 2 * shape.linear if on_cpu else 0  # packed for oneDNN
        return 2 * (shape.linear + shape.output)

    def _whole_copy(self) -> float:
        """Bytes of a sharded policy's copy for sampling, which is unsharded: matrices of linear layers in the dtype of the
        products, embeddings and vectors as stored."""
        policy, shape = self.policy, self.policy.shape
        copy = policy.linear * (policy.ends + shape.linear)
        if self.half and policy.linear == 4:
            copy = 2 * (shape.linear + shape.output) + 4 * shape.embedding
        adapters = self.computed * policy.learned if policy.trained == "adapters" and not self.merges else 0
        return copy + 4 * shape.vectors + policy.experts * shape.experts + adapters

    def _keys_and_values(self, block: int) -> float:
        """Bytes of the cache: of the rows that are sampled together, with room for the longest text."""
        places = -(-self.lengths.longest // block) * block
        return 2 * self.policy.shape.key * self.computed * self.sampled_rows * places * self.policy.shape.layers

    def _of_graphs(self) -> float:
        """Bytes that CUDA graphs read and write, which stay."""
        if not self.graphs:
            return 0
        return self._keys_and_values(GRAPH_BLOCK) + self.sampled_rows * self.policy.shape.vocabulary * self.computed

    def _sampling(self, online: RolloutConfig) -> Parts:
        shape, rows, prompt = self.policy.shape, self.sampled_rows, self.lengths.prompt
        logits = rows * shape.vocabulary * (self.computed + 8 if self.half else 8)
        prompts = math.ceil(rows / online.group_size)  # each is read once
        prefill = prompts * prompt * self._one_layer(self.policy) + self.policy.folded
        written: Parts = {
            "keys and values": 0 if self.graphs else self._keys_and_values(CACHE_BLOCK),
            "logits": max(logits, prefill),
        }
        if not self.is_divided:
            return written if self.graphs else {"copy that samples": self._copy()} | written
        weight = self.policy.linear * shape.head  # while the copy is made, one weight at a time is whole
        if sum(written.values()) < weight:
            written = {"whole blocks": weight}
        return {"copy that samples": self._whole_copy()} | written

    def _one_layer(self, network: _Network) -> int:
        """Bytes per token in a layer at once without gradients: the residual stream, its norm, and the MLP. Adapters read
        copies of their inputs in float32."""
        shape, is_adapted = network.shape, network.trained == "adapters"
        mlp = self.computed * max((4 if is_adapted else 3) * shape.intermediate, 3 * shape.query + 2 * shape.key)
        return 4 * (4 if is_adapted and self.half else 3) * shape.hidden + mlp

    def _scoring(self) -> Parts:
        """The largest pass without gradients. A reference that waits is on the GPU only in its own."""
        passes: list[Parts] = []
        reading = [self.reference] if self.reference_is_freed and self.reference else self.reading
        for network in reading:
            rows = self.rows if self.online is None else self.scored_rows
            activations: float = rows * self.lengths.longest * self._one_layer(network) + network.folded
            if network.has_logits:
                activations = max(activations, self._logits(network.shape, rows, learns=False)[0])
            passes.append(
                {"copies in half precision": self._casts(network, learning=False), "activations": activations}
            )
            if self.reference_waits:
                passes[-1]["reference"] = network.frozen if network is self.reference else 0.0
        return max(passes, key=lambda parts: sum(parts.values())) | self._whole_in_pass(reading, learning=False)

    def _backward(self) -> Parts:
        """The largest backward pass at its beginning, when all activations are in memory."""
        passes = []
        for network in self.learning:
            gradients = network.gradients if self.is_split else 0.0
            passes.append(self._activations(network) | {"gradients": gradients})
            if network.trained == "all" and network.has_logits:
                # A first micro-batch's gradient of the head becomes the gradient; a later one's is beside it until added.
                passes[-1]["gradients"] += network.head * network.shape.output
        most = max(passes, key=lambda parts: sum(parts.values())) | self._whole_in_pass(self.learning, learning=True)
        if self.is_divided and most["gradients"]:
            most["gradients"] = self._divided_gradients()
        return most

    def _activations(self, network: _Network) -> Parts:
        """Tensors needed by a network's backward pass."""
        shape, adapted = network.shape, network.trained == "adapters"
        per_layer: float = self.tokens * saved_per_token(shape, half=self.half, device=self.device, rank=network.rank)
        per_layer += self._scores(shape) + network.folded
        activations: float = shape.layers * per_layer - self._unread(network)
        temporary: float = self.tokens * (2 * self.computed * shape.intermediate + 8 * shape.hidden)
        temporary += network.folded  # their gradients in one layer, from which the adapters' gradients are computed
        if self.config.gradient_checkpointing:  # a layer is recomputed when the logits are freed
            activations = shape.layers * self.tokens * 4 * shape.hidden
            temporary += per_layer
        if network.linear == FOUR_BIT:
            temporary = max(temporary, 2 * max(shape.hidden * shape.intermediate, shape.hidden * shape.query))
        ends = self.tokens * 4 * shape.hidden * (1 if adapted or self.device == "cpu" else 2)  # the last norm
        logits, copies, freed = 0.0, self._casts(network, learning=True), 0.0
        if network.has_logits:
            has_entropy = self.config.has_entropy_bonus
            learns = network.trained == "all"
            forward, logits = self._logits(shape, self.rows, learns=learns, has_entropy=has_entropy)
            freed = logits - forward + (network.head * shape.output if network.trained == "all" else 0)
            states = 10 if self.half else 8  # bytes of a state, its gradient, and a copy in half precision
            ends += self.rows * self.responses * shape.hidden * states
        if self.config.gradient_checkpointing:
            # All copies are there until the forward pass is over; the backward pass, with its logits and the head's gradient,
            # makes those of a block at a time.
            copies = max(copies - freed, self._casts(network, learning=True, blocks=1))
        return {
            "copies in half precision": copies,
            "activations": activations + ends + max(0, temporary - logits),
            "logits": logits,
        }

    def _unread(self, network: _Network) -> float:
        """Bytes of the last layer's MLP for unread tokens, which in float32 on a CPU is not computed. The output for the
        other tokens is kept twice."""
        shape, read = network.shape, self.rows * (1 if self.config.learns_scores else self.responses)
        as_written = not (self.half or self.is_divided or self.config.compile == "on" or shape.experts)
        if self.device != "cpu" or not as_written or read > MOST_READ * self.tokens:
            return 0
        kept = shape.hidden + 4 * shape.intermediate + 3 * network.rank
        return 4 * ((self.tokens - read) * kept - read * shape.hidden)

    def _scores(self, shape: Shape) -> int:
        """Bytes of a layer's attention weights if attention uses plain products: few scores, half precision, on a CPU."""
        scores = self.rows * shape.heads * self.lengths.longest**2
        return 6 * scores if self.device == "cpu" and self.half and scores <= MOST_SCORES else 0

    def _logits(self, shape: Shape, rows: int, *, learns: bool, has_entropy: bool = False) -> tuple[float, float]:
        """Bytes of logits in the forward and in the backward pass (`heedful.kernels.head_logprobs`). ``learns``: the head's
        matrix has a gradient."""
        vocabulary, tokens, on_cpu = shape.vocabulary, rows * self.responses, self.device == "cpu"
        smallest = LEARNED_CHUNK if learns and not on_cpu else SMALLEST_CHUNK
        chunk = min(tokens, max(smallest, CHUNK // vocabulary)) * vocabulary
        block = min(chunk, max(1, (CPU_BLOCK if on_cpu else BLOCK) // vocabulary) * vocabulary)
        kept = tokens * vocabulary if tokens * vocabulary <= KEPT else chunk
        softmax = 4 * block
        forward = self.computed * chunk + 2 * softmax
        backward = self.computed * (kept + chunk) + softmax * (3 if has_entropy else 2 if self.half else 0)
        return forward, max(forward, backward)

    def _casts(self, network: _Network, *, learning: bool, blocks: int | None = None) -> float:
        """Copies of float32 matrices in half precision: autocast keeps those of trained weights until a pass is over, and
        the backward pass those that it needs. ``blocks``: count only this many blocks."""
        shape, on_cpu = network.shape, self.device == "cpu"
        if not self.half or (network.trained == "all" and network.linear == 2):
            return 0
        head = 2 * shape.output if network.has_logits else 0
        if self._gathers_half(network):
            return head
        linear = shape.linear if blocks is None else blocks * (shape.linear // shape.layers)
        if network.trained == "all":
            return 2 * linear + head
        if network.trained == "adapters":
            learned = network.learned if blocks is None else blocks * network.learned // shape.layers
            return 2 * learned + (2 * linear if on_cpu and learning else 0) + (head if on_cpu else 0)
        return head if on_cpu and shape.head == 0 else 0  # a tied head's matrix is stored in float32

    def _whole_in_pass(self, through: Sequence[_Network], *, learning: bool) -> Parts:
        """Unsharded tensors in a pass through sharded models: blocks as gathered and ends as stored, and autocast's copies of
        the current blocks, or of all blocks if the backward pass needs them."""
        if not self.is_divided:
            return {}
        blocks = None if learning and not self.config.gradient_checkpointing else 1
        of_blocks = (
            n.linear * n.ends
            + IN_FLIGHT * (self._gathered(n) * n.shape.linear + n.experts * n.shape.experts) / n.shape.layers
            for n in through
        )
        copies = (self._casts(network, learning=learning, blocks=blocks) for network in through)
        return {"whole blocks": max(of_blocks), "copies in half precision": max(copies)}

    def _gathers_half(self, network: _Network) -> bool:
        """Whether a network's float32 blocks are gathered in half precision (`heedful.distributed.sharding.shard`)."""
        is_wide = network.trained == "all" and network.linear == 4 and not network.shape.experts
        return self.is_divided and self.half and is_wide

    def _gathered(self, network: _Network) -> float:
        """Bytes of a gathered weight of a block's linear layers, and of its gradient."""
        return 2 if self._gathers_half(network) else network.linear

    def _divided_gradients(self) -> float:
        """Bytes of a rank's gradients in a backward pass.

        If gradients are summed once per step, those of earlier micro-batches are unsharded and in float32, even for bfloat16
        weights. In addition there is a block's send buffer in float32, and for bfloat16 weights the micro-batch's gradients
        of the ends, for others those of the head, if larger. Otherwise a rank has its share, and until the sum a block's and
        the ends' gradients and the block's send buffer; or, if larger, the ends' gradients and their send buffer, after the
        blocks' are freed.
        """
        trained = [network for network in self.learning if network.trained == "all"]
        if self.is_split and self.config.sync_every == "step":
            beside = (
                2 * n.ends + 4 * n.block if n.linear == 2 else 4 * max(n.block, n.shape.output if n.has_logits else 0)
                for n in trained
            )
            return 4 * max(network.learned for network in self.learning) + max(beside, default=0.0)
        until_summed = (
            max(n.linear * n.ends + (self._gathered(n) + 4) * n.block, (n.linear + 4) * n.ends) for n in trained
        )
        return max(network.gradients for network in self.learning) / self.shards + max(until_summed, default=0.0)


def saved_per_token(shape: Shape, *, half: bool, device: str = "cpu", rank: int = 0) -> int:
    """Bytes per token that a layer saves for its backward pass.

    Counted on transformers' Qwen3 (and Qwen2, which has no head norms). Per norm: its input, its inverse root, and, if
    autograd differentiates it and its weights are trained, the normalised input. Per matrix product: its input, once for each
    product in half precision, because each makes its own cast. Rotated queries, keys and values; attention's output; the
    MLP's gate before and after its activation, its other half, and their product.

    Args:
        shape: the model.
        half: matrix products are in half precision; the residual stream stays in float32.
        device: the model's device; on a CPU norms in float32 save less (`heedful.kernels.cpu.layers`).
        rank: of the adapters; 0 means that all weights are trained.
    """
    hidden, query, key, size = shape.hidden, shape.query, shape.key, 2 if half else 4
    keeps_scaled = rank == 0 and device != "cpu"
    norms = 2 * (hidden * 4 * (2 if keeps_scaled else 1) + 4)
    if shape.head_norms:
        keeps_scaled_heads = rank == 0 and (half or device != "cpu")
        norms += (query + key) * (4 + (size if keeps_scaled_heads else 0)) + 4 * (shape.heads + shape.key_heads)
    inputs = hidden * (5 * 2 if half else 2 * 4)
    is_repeated = device != "cpu" and not half  # keys and values, for attention's kernel for float32 on a GPU
    attention = size * 2 * (query + (query if is_repeated else key))
    attention += 4 * shape.heads  # one softmax statistic per head and query
    if rank and half:
        attention += 2 * query  # PEFT casts the adapters' input to float32, and autocast casts it back
    return norms + inputs + attention + 4 * shape.intermediate * size + size * rank * 7
