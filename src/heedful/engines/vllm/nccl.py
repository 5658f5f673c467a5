"""Weight transfer from GPU to GPU by NCCL, with vLLM's own code (0.28 and later), which must be installed beside
heedful.

Written from vLLM's sources (0.32, 0.33) and never run: it needs two GPUs.
"""

import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor, nn

from heedful.engines.vllm.client import GoneError, VLLMServer
from heedful.engines.vllm.extension.heedful_vllm import checksum
from heedful.engines.vllm.weights import Weights
from heedful.errors import SamplerError

Do = Callable[[Coroutine[Any, Any, Any]], Any]


class Senders:
    """An NCCL group per server, with the trainer and the server's workers."""

    def __init__(self, servers: Sequence[VLLMServer]) -> None:
        self.servers = servers
        self._groups: dict[str, tuple[str, Named, Any]] = {}
        """For each address: the group's server process, the weights to send, and vLLM's engine."""
        try:
            from vllm.distributed.weight_transfer import base, clients, factory, nccl_engine
        except ImportError as error:
            raise SamplerError(
                f"--sampler-weights nccl needs vLLM in the trainer's environment too ({error}); install it, or use "
                "--sampler-weights folder"
            ) from error
        self._vllm = base, clients, factory, nccl_engine

    def send(self, version: str, weights: Mapping[str, Tensor], do: Do) -> Weights:
        """Broadcast weights to every server. Raises SamplerError.

        Args:
            version: name of the weights.
            weights: plain weights, on the GPU.
            do: runs a coroutine to completion.
        """
        for server in self.servers:
            try:
                state = do(server.ask_state())
                do(server.order("/pause?mode=wait"))
                try:
                    self._engine(server, state.instance, weights, do).send_weights()
                finally:
                    do(server.order("/resume"))
            except GoneError as problem:
                raise server.error(f"could not be sent the weights: {problem}") from problem
            except (OSError, RuntimeError) as problem:  # from requests, torch and NCCL
                raise server.error(f"could not be sent the weights: {type(problem).__name__}: {problem}") from problem
        return Weights(version, checksum(weights.values()), None)

    def _engine(self, server: VLLMServer, instance: str, weights: Mapping[str, Tensor], do: Do) -> Any:
        """vLLM's engine for a server, with the weights to send; made once per server process."""
        base, clients, factory, nccl_engine = self._vllm
        if self._groups.get(server.address, ("",))[0] != instance:
            named = Named()
            workers = int(do(server.ask("/get_world_size?include_dp=false"))["world_size"])
            engine = factory.WeightTransferTrainerFactory.trainer_init(
                nccl_engine.NCCLTrainerInitInfo(
                    master_address=_address_towards(server.address),
                    master_port=_free_port(),
                    world_size=1 + workers,
                    rank=0,
                ),
                client=clients.HTTPVLLMWeightSyncClient(server.address),
                source=base.ModuleSource(named),
            )
            self._groups[server.address] = instance, named, engine
        _, named, engine = self._groups[server.address]
        named.weights = weights
        return engine


class Named(nn.Module):
    """Weights as a module for vLLM's `ModuleSource`, which reads only names and tensors."""

    weights: Mapping[str, Tensor]

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        yield from self.weights.items()


def _address_towards(server: str) -> str:
    """This machine's address on the route to a server."""
    parts = urlsplit(server)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((parts.hostname, parts.port or 80))  # no packet is sent
        address: str = towards.getsockname()[0]
        return address


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("", 0))
        port: int = bound.getsockname()[1]
        return port
