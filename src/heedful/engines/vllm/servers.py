"""The sampling servers of a run, for the trainer: from policy and prompts to rollouts."""

import asyncio
import gc
import os
import resource
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import tenacity
import torch

from heedful.background import Background, all_of, result
from heedful.configs.online import RolloutConfig
from heedful.configs.settings import check_secret
from heedful.data.batches import collate
from heedful.data.loading import EncodedPrompt
from heedful.devices import empty_cache
from heedful.distributed import ranks
from heedful.distributed.sharding import is_sharded
from heedful.engines.episodes import Say
from heedful.engines.responses import Responses
from heedful.engines.vllm.client import START, Drawn, GoneError, Request, VLLMServer
from heedful.engines.vllm.dispatch import Dispatch
from heedful.engines.vllm.nccl import Senders
from heedful.engines.vllm.weights import (
    Collected,
    Weights,
    check_adapters,
    collect,
    fingerprint,
    plain_weights,
    write_weights,
)
from heedful.errors import SamplerError
from heedful.models.policy import Policy
from heedful.retries import Backoff

TOKEN = "HEEDFUL_SAMPLER_TOKEN"
"""Environment variable with the token of servers started with vLLM's --api-key."""
SPARE_FILES = 256
"""Open files besides connections."""
TIMEOUT = 1800.0
"""Timeout in seconds of one response, or of loading weights: enough for 32,000 tokens under load. A process that ends
closes its connections, which is noticed at once."""
FIRST_PATIENCE = 10.0
"""Seconds to wait for servers at the start of a new run; short, since an address may be wrong."""
LONGEST_IDLE = 2.0
"""Seconds that an idle connection is kept; below vLLM's 5, so that it never closes one while a request is being
sent."""
PROTOCOL = 2
"""Protocol version of `heedful.engines.vllm.extension`."""


@dataclass
class Pending:
    """A batch that is being sampled."""

    prompts: list[list[int]]
    """Empty for episodes."""
    drawn: "Future[tuple[list[Drawn] | Responses, int]] | None" = None
    """Responses, and number of retries. None on ranks other than rank 0."""


class Servers:
    """vLLM servers with the weights of one policy at a time.

    Before a batch they load the policy's weights, unless they have them, and the checksum of the weights they compute
    with is compared with the trainer's (`heedful.engines.vllm.extension.heedful_vllm.checksum`). After the batch each
    is checked to still have them. Servers on the trainer's GPU sleep between batches (``sampler_sleep``).

    Of several ranks only rank 0 uses the servers, and shares the responses.

    Requests run in a separate thread, one batch after the other, so that sampling can overlap with training.
    """

    def __init__(self, config: RolloutConfig, *, stop_ids: Sequence[int], pad_id: int) -> None:
        self.config, self.stop_ids, self.pad_id = config, list(stop_ids), pad_id
        self.run = secrets.token_hex(4)
        self.number = 0
        """Number of the newest weights; increased by each change."""
        self.retries = 0
        self.dtype = torch.float32
        self._seen = ""
        """Fingerprint of the last batch's weights; only on rank 0 for unsharded models."""
        self._weights: Weights | None = None
        fixed = config.response_length != "stop"
        sampling = {
            "temperature": config.temperature,
            "top_k": config.top_k,
            "top_p": config.top_p,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": True,  # stop tokens are listed explicitly
            "stop_token_ids": [] if fixed else self.stop_ids,
            "logprobs": 0,  # only of the sampled token
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        check_secret(TOKEN, "the token that the servers expect (vLLM's --api-key)")
        headers = {"Authorization": f"Bearer {token}"} if (token := os.environ.get(TOKEN)) else {}
        limits = httpx2.Limits(keepalive_expiry=LONGEST_IDLE)  # as many as there are requests
        # own servers are not behind the proxies of the environment
        client = httpx2.AsyncClient(timeout=None, limits=limits, trust_env=False, headers=headers)
        self.servers = [
            VLLMServer(address, client, sampling=sampling, timeout=TIMEOUT, sleeps=config.sampler_sleep)
            for address in config.sampler_addresses
        ]
        self.senders = Senders(self.servers) if config.sampler_weights == "nccl" else None
        self.folder: Path | None = None
        self._turn = asyncio.Lock()
        self._background = Background(at_end=client.aclose)

    def connect(self, policy: Policy, *, longest: int, is_known: bool = False) -> None:
        """Check that every server answers and fits the policy. Raises SamplerError, ConfigError.

        Args:
            policy: the policy to sample from.
            longest: maximum tokens of prompt and response together.
            is_known: whether they answered this run before; then requests are retried as long as in the middle of a
                run.
        """
        check_adapters(policy.lm)
        self.look(is_known=is_known)
        for server in self.servers:
            check_fits(server, policy, self.config, longest)
        allow_files(sum(server.about["max_num_seqs"] for server in self.servers))
        kinds = {server.about["dtype"] for server in self.servers}
        if len(kinds) > 1:
            raise SamplerError(
                f"--sampler: the servers compute in different precisions ({', '.join(sorted(kinds))}); start them with one "
                "--dtype"
            )
        self.dtype = getattr(torch, kinds.pop())
        if self.senders is None:
            given = self.config.sampler_folder
            if given is not None:
                given.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix="heedful-weights-", dir=given))
            self.folder.chmod(0o755)  # the servers may run as another user
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def look(self, *, is_known: bool) -> None:
        """Ask every server what it is; those on the trainer's GPU then sleep. Raises SamplerError."""
        most = 60 * self.config.sampler_retry_minutes
        patience = most if is_known else min(FIRST_PATIENCE, most)
        self._background.run(all_of(self._look(server, patience) for server in self.servers))

    def begin(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        generator: torch.Generator,
        most: Sequence[int] | None = None,
    ) -> Pending:
        """Start sampling a batch with the policy's current weights; returns at once.

        Random numbers are drawn now: a seed per row.
        """
        asked = self._requests(prompts, generator, most)
        return self._begin(policy, Pending([list(p) for p in prompts]), lambda weights: self._draw(weights, asked))

    def begin_episodes(self, policy: Policy, play: Callable[[Say], Responses], generator: torch.Generator) -> Pending:
        """Start playing episodes with the policy's current weights, in a thread of rank 0; returns at once.

        Other batches wait, so that all turns are sampled with the same weights. Random numbers are drawn with each turn.
        """
        return self._begin(policy, Pending([]), lambda weights: self._play(weights, play, generator))

    def _begin(
        self, policy: Policy, pending: Pending, sample: Callable[[Weights], Coroutine[Any, Any, tuple[Any, int]]]
    ) -> Pending:
        """Start sampling with the policy's current weights."""
        seen = fingerprint(policy)
        has_changed = seen != self._seen
        collected = collect(policy.lm, self.dtype) if is_sharded(policy) and has_changed else None
        weights = ranks.on_rank_zero(lambda: self._current(policy, seen, collected))
        if self.config.sampler_sleep:  # before a server wakes, which may be on any rank's GPU
            gc.collect()
            empty_cache()
            ranks.gather(None)

        def start() -> None:
            pending.drawn = self._background.start(sample(weights))

        ranks.on_rank_zero(start)
        self._seen = seen
        return pending

    def finish(self, pending: Pending, device: torch.device) -> Responses:
        """Wait for a batch. Raises SamplerError."""

        def wait() -> list[Drawn] | Responses:
            assert pending.drawn is not None
            drawn, retries = result(pending.drawn)
            self.retries += retries
            return drawn

        drawn = ranks.on_rank_zero(wait)
        return (drawn if isinstance(drawn, Responses) else self._responses(pending.prompts, drawn)).to(device)

    def take_retries(self) -> int:
        """Number of retries of rows and servers since the last call."""
        taken, self.retries = self.retries, 0
        return taken

    def close(self) -> None:
        """Cancel all pending requests."""
        self._background.close()

    def _current(self, policy: Policy, seen: str, collected: Collected | None) -> Weights:
        """The policy's weights, written or sent unless unchanged since the last batch.

        ``seen`` is their fingerprint; ``collected`` are those of a sharded policy, which all ranks collect.
        """
        if seen == self._seen and self._weights is not None:
            version = self._weights.version
            if self.folder or all(
                server.held is not None and server.held.version == version for server in self.servers
            ):
                return self._weights
        self.number += 1
        version = f"{self.run}-{self.number}"
        if self.senders is not None:
            plain = dict(plain_weights(policy.lm, self.dtype))
            self._weights = weights = self.senders.send(version, plain, self._background.run)
            self._background.run(all_of(server.prove_sent(weights) for server in self.servers))
        else:
            assert self.folder is not None
            folder = self.folder / f"v-{self.number:06d}"
            collected = collected or collect(policy.lm, self.dtype)
            assert collected is not None
            write_weights(policy.lm, collected.weights, folder)
            self._weights = Weights(version, collected.checksum, folder)
        return self._weights

    def _requests(
        self, prompts: Sequence[Sequence[int]], generator: torch.Generator, most: Sequence[int] | None
    ) -> list[Request]:
        seeds = torch.randint(0, 2**63 - 1, (len(prompts),), generator=generator).tolist()
        lengths = most or [self.config.max_new_tokens] * len(prompts)
        return [Request(list(p), length, seed) for p, length, seed in zip(prompts, lengths, seeds, strict=True)]

    def _responses(self, prompts: Sequence[Sequence[int]], drawn: Sequence[Drawn]) -> Responses:
        stops = [] if self.config.response_length != "stop" else self.stop_ids
        batch = collate(prompts, [one.ids for one in drawn], pad_id=self.pad_id)
        logprobs = torch.zeros(batch.response_mask.shape)
        logprobs[batch.response_mask] = torch.tensor([x for one in drawn for x in one.logprobs])
        truncated = torch.tensor([one.ids[-1] not in stops for one in drawn])
        return Responses(batch, truncated, logprobs, temperature=self.config.temperature)

    async def _draw(self, weights: Weights, requests: Sequence[Request]) -> tuple[list[Drawn], int]:
        async with self._turn:  # in the order of `begin`
            return await self._sample(weights, requests)

    async def _play(
        self, weights: Weights, play: Callable[[Say], Responses], generator: torch.Generator
    ) -> tuple[Responses, int]:
        retries = list[int]()

        def say(prompts: Sequence[EncodedPrompt], most: Sequence[int]) -> Responses:
            ids = [one.ids for one in prompts]
            drawn, repeated = self._background.run(self._sample(weights, self._requests(ids, generator, most)))
            retries.append(repeated)
            return self._responses(ids, drawn)

        async with self._turn:  # in the order of `begin`
            responses = await asyncio.to_thread(play, say)
        return responses, sum(retries)

    async def _sample(self, weights: Weights, requests: Sequence[Request]) -> tuple[list[Drawn], int]:
        """Responses, and the number of retries."""
        patience = 60 * self.config.sampler_retry_minutes
        dispatch = Dispatch(self.servers, weights, requests, patience=patience)
        drawn = await dispatch.run()
        if self.config.sampler_sleep:
            await all_of(map(_put_to_sleep, self.servers))
        if weights.folder is not None:
            for old in weights.folder.parent.glob("v-*"):
                if old.name < weights.folder.name:
                    shutil.rmtree(old, ignore_errors=True)
        return drawn, dispatch.retries

    async def _look(self, server: VLLMServer, patience: float) -> None:
        """Ask one server. Raises SamplerError."""
        backoff = Backoff(lambda: patience)
        tries = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(GoneError), wait=backoff.wait, stop=backoff.stop
        )
        try:
            async for attempt in tries:
                with attempt:
                    await server.check_routes()
                    about = await server.ask_about()
                    check_protocol(server)
                    if server.sleeps:
                        if not about["can_sleep"]:
                            raise server.error(
                                "cannot sleep; start it with --sleep (vLLM's --enable-sleep-mode), or leave out "
                                "--sampler-sleep"
                            )
                        await server.sleep()
        except tenacity.RetryError as failed:
            raise server.error(
                f"cannot be reached: {failed.last_attempt.exception()}; tried for {patience:g} s. Is it running at this "
                "address? A server takes a minute or more to start"
            ) from failed


def connect(
    config: RolloutConfig, policy: Policy, *, stop_ids: Sequence[int], pad_id: int, longest: int, is_known: bool = False
) -> Servers:
    """Connect to the settings' servers, and check that they fit the policy. Raises SamplerError, ConfigError.

    ``is_known``: they answered this run before.
    """
    servers = Servers(config, stop_ids=stop_ids, pad_id=pad_id)
    try:
        ranks.on_rank_zero(lambda: servers.connect(policy, longest=longest, is_known=is_known))
    except BaseException:
        servers.close()
        raise
    servers.dtype = ranks.broadcast(servers.dtype)
    return servers


def put_to_sleep(config: RolloutConfig, *, is_known: bool = False) -> None:
    """Have the settings' servers sleep, so that the trainer finds their GPU's memory free. Raises SamplerError."""
    servers = Servers(config, stop_ids=(), pad_id=0)
    try:
        ranks.on_rank_zero(lambda: servers.look(is_known=is_known))
    finally:
        servers.close()


async def _put_to_sleep(server: VLLMServer) -> None:
    try:
        await server.sleep()
    except GoneError:
        server.held = None  # verified again before it samples


def allow_files(connections: int) -> None:
    """Raise this process's limit on open files, if it is too low for connections, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (files if hard == resource.RLIM_INFINITY else min(files, hard), hard)
        )


def check_protocol(server: VLLMServer) -> None:
    """Raises SamplerError for a server with another version of the extension."""
    found = server.about.get("protocol")
    if found != PROTOCOL:
        raise server.error(
            f"has another version of heedful's extension ({found}, not {PROTOCOL}); restart it with this version of heedful"
        )


def check_fits(server: VLLMServer, policy: Policy, config: RolloutConfig, longest: int) -> None:
    """Raises SamplerError for a server with another model, or with unsuitable settings."""
    about = server.about
    trained = policy.lm.config.get_text_config()
    ours = {
        "model_type": trained.model_type,
        "hidden_size": trained.hidden_size,
        "num_layers": trained.num_hidden_layers,
        "vocab_size": trained.vocab_size,
    }
    other = {name: about[name] for name, value in ours.items() if about[name] != value}
    if other:
        theirs, own = (", ".join(f"{name} {of[name]}" for name in other) for of in (about, ours))
        raise server.error(f"serves another model ({theirs}) than the policy ({own}); start it with the policy")
    if about["quantization"] is not None:
        raise server.error(
            f"quantises its weights ({about['quantization']}), so they cannot equal the policy's; {START}"
        )
    if about["max_model_len"] < longest:
        raise server.error(
            f"reads at most {about['max_model_len']} tokens, but the longest prompt plus --max-new-tokens "
            f"{config.max_new_tokens} has {longest}; start it with --max-model-len {longest}, or lower --max-prompt-tokens"
        )
    if about["logprobs_mode"] != "processed_logprobs":
        raise server.error(
            f"returns log-probs as {about['logprobs_mode']}, without temperature and filters; start it with --logprobs-mode "
            "processed_logprobs"
        )
    if not about["can_load"]:
        raise server.error(
            f"is vLLM {server.version}, which cannot load weights from a folder (reload_weights has no weights_path); "
            "install another version of vLLM there"
        )
    if config.sampler_weights == "nccl" and not about["has_nccl"]:
        raise server.error("does not accept weights by NCCL; start it with --nccl, or use --sampler-weights folder")
