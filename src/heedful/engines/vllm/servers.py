"""The servers that draw a run's responses, as the trainer sees them: it gives a policy and prompts, and gets rollouts."""

import asyncio
import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Sequence
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
from heedful.distributed import ranks
from heedful.distributed.sharding import gathered_on_first, is_sharded
from heedful.engines.rollouts import Rollouts
from heedful.engines.vllm.client import START, Drawn, GoneError, Request, VLLMServer
from heedful.engines.vllm.dispatch import Dispatch
from heedful.engines.vllm.nccl import Senders
from heedful.engines.vllm.weights import Weights, check_adapters, fingerprint, plain_weights, write_weights
from heedful.errors import SamplerError
from heedful.models.policy import Policy
from heedful.retries import Backoff

TOKEN = "HEEDFUL_SAMPLER_TOKEN"
"""The environment variable with the token of servers that were started with vLLM's --api-key."""
CONCURRENCY = 128
"""Most responses in flight at a time to each server; vLLM queues what it cannot draw at once."""
TIMEOUT = 1800.0
"""Seconds for one response, or for loading weights: 32,000 tokens, if many are drawn at once. A process that ends closes its
connections, and is noticed at once."""
FIRST_PATIENCE = 10.0
"""Seconds for which servers are waited for at the start of a new run: an address may be wrong."""
LONGEST_IDLE = 2.0
"""Seconds that a connection is kept for the next request. vLLM closes one after 5, maybe just as a request is sent on it."""
PROTOCOL = 1
"""What `heedful.engines.vllm.extension` says of itself."""


@dataclass
class Pending:
    """A batch that is being drawn."""

    prompts: list[list[int]]
    drawn: "Future[tuple[list[Drawn], int]] | None" = None
    """None on ranks that wait for the first."""


class Servers:
    """vLLM servers with the weights of one policy at a time.

    Before a batch they are given the policy's weights, if those are not the ones they have, and each proves it: the checksum
    of what it computes with is the trainer's (`heedful.engines.vllm.extension.heedful_vllm.checksum`). After the batch each
    proves that nothing has replaced them meanwhile.

    Of several ranks the first talks to the servers, and shares what they draw.

    Requests are made in a thread of its own, one batch after the other, so that a batch can be on its way while the trainer
    does something else.
    """

    def __init__(self, config: RolloutConfig, *, stop_ids: Sequence[int], pad_id: int) -> None:
        self.config, self.stop_ids, self.pad_id = config, list(stop_ids), pad_id
        self.run = secrets.token_hex(4)
        self.number = 0
        """Of the newest weights; each change has its own."""
        self.retries = 0
        self.dtype = torch.float32
        self._seen = ""
        """The fingerprint of the weights of the last batch; of whole models, rank 0's."""
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
            "ignore_eos": True,  # the tokens that end a response are named
            "stop_token_ids": [] if fixed else self.stop_ids,
            "logprobs": 0,  # of the token that was drawn, and no other
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        check_secret(TOKEN, "the token that the servers expect (vLLM's --api-key)")
        headers = {"Authorization": f"Bearer {token}"} if (token := os.environ.get(TOKEN)) else {}
        most = CONCURRENCY * len(config.sampler_addresses) + 8
        limits = httpx2.Limits(max_connections=most, max_keepalive_connections=most, keepalive_expiry=LONGEST_IDLE)
        # servers of one's own are not behind the proxies of the environment
        client = httpx2.AsyncClient(timeout=None, limits=limits, trust_env=False, headers=headers)
        self.servers = [
            VLLMServer(address, client, sampling=sampling, timeout=TIMEOUT) for address in config.sampler_addresses
        ]
        self.senders = Senders(self.servers) if config.sampler_weights == "nccl" else None
        self.folder: Path | None = None
        self._turn = asyncio.Lock()
        self._background = Background(at_end=client.aclose)

    def connect(self, policy: Policy, *, longest: int, is_known: bool = False) -> None:
        """Check that every server is there and fits the policy. Raises SamplerError, ConfigError.

        Args:
            policy: what will be sampled from.
            longest: the most tokens of a prompt and its response.
            is_known: whether they have served this run before; then they are waited for as in the middle of it.
        """
        most = 60 * self.config.sampler_retry_minutes
        patience = most if is_known else min(FIRST_PATIENCE, most)
        check_adapters(policy.lm)

        self._background.run(all_of(self._look(server, policy, longest, patience) for server in self.servers))
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
            self.folder.chmod(0o755)  # the servers may be another user's
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def begin(self, policy: Policy, prompts: Sequence[Sequence[int]], generator: torch.Generator) -> Pending:
        """Have a batch drawn by the policy's weights as they are now. It is on its way when this returns.

        Random numbers are taken now: a seed for each row.
        """
        seeds = torch.randint(0, 2**63 - 1, (len(prompts),), generator=generator).tolist()
        asked = [Request(list(p), self.config.max_new_tokens, seed) for p, seed in zip(prompts, seeds, strict=True)]
        pending, seen = Pending([list(p) for p in prompts]), fingerprint(policy)
        is_kept = is_sharded(policy) and seen == self._seen  # the servers' folder has them: nothing is put together
        whole = None if is_kept else gathered_on_first(policy)

        def start() -> None:
            pending.drawn = self._background.start(self._draw(self._current(whole, seen), asked))

        ranks.on_rank_zero(start)
        self._seen = seen
        return pending

    def finish(self, pending: Pending, device: torch.device) -> Rollouts:
        """Wait for a batch. Raises SamplerError."""

        def wait() -> list[Drawn]:
            assert pending.drawn is not None
            drawn, retries = result(pending.drawn)
            self.retries += retries
            return drawn

        drawn = ranks.on_rank_zero(wait)
        stops = [] if self.config.response_length != "stop" else self.stop_ids
        batch = collate(pending.prompts, [one.ids for one in drawn], pad_id=self.pad_id)
        logprobs = torch.zeros(batch.response_mask.shape)
        logprobs[batch.response_mask] = torch.tensor([x for one in drawn for x in one.logprobs])
        return Rollouts(
            batch=batch.to(device),
            lengths=torch.tensor([len(one.ids) for one in drawn], device=device),
            truncated=torch.tensor([one.ids[-1] not in stops for one in drawn], device=device),
            sampler_logprobs=logprobs.to(device),
        )

    def take_retries(self) -> int:
        """How often a row or a server was asked again, since this was last called."""
        taken, self.retries = self.retries, 0
        return taken

    def close(self) -> None:
        """End all that is on its way."""
        self._background.close()

    def _current(self, policy: Policy | None, seen: str) -> Weights:
        """The policy's weights, written down or sent, unless they are the ones of the last batch.

        ``seen`` is their fingerprint; without a policy it is that of the last batch.
        """
        if seen == self._seen and self._weights is not None:
            version = self._weights.version
            if self.folder or all(
                server.held is not None and server.held.version == version for server in self.servers
            ):
                return self._weights
        assert policy is not None
        self.number += 1
        version = f"{self.run}-{self.number}"
        if self.senders is not None:
            plain = dict(plain_weights(policy.lm, self.dtype))
            self._weights = weights = self.senders.send(version, plain, self._background.run)
            self._background.run(all_of(server.prove_sent(weights) for server in self.servers))
        else:
            assert self.folder is not None
            folder = self.folder / f"v-{self.number:06d}"
            self._weights = Weights(version, write_weights(policy.lm, self.dtype, folder), folder)
        return self._weights

    async def _draw(self, weights: Weights, requests: Sequence[Request]) -> tuple[list[Drawn], int]:
        async with self._turn:  # in the order in which they began
            if self.config.sampler_sleep:
                await all_of(self._order(server, "/wake_up") for server in self.servers)
            patience = 60 * self.config.sampler_retry_minutes
            dispatch = Dispatch(self.servers, weights, requests, concurrency=CONCURRENCY, patience=patience)
            drawn = await dispatch.run()
            if self.config.sampler_sleep:
                await all_of(self._order(server, "/sleep?level=1") for server in self.servers)
            if weights.folder is not None:
                for old in weights.folder.parent.glob("v-*"):
                    if old.name < weights.folder.name:
                        shutil.rmtree(old, ignore_errors=True)
            return drawn, dispatch.retries

    async def _order(self, server: VLLMServer, path: str) -> None:
        try:
            await server.order(path)
        except GoneError:
            server.held = None  # it is looked at again before it draws

    async def _look(self, server: VLLMServer, policy: Policy, longest: int, patience: float) -> None:
        """Check one server. Raises SamplerError, ConfigError."""
        backoff = Backoff(lambda: patience)
        tries = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(GoneError), wait=backoff.wait, stop=backoff.stop
        )
        try:
            async for attempt in tries:
                with attempt:
                    await server.check_version()
                    check_fits(server, await server.ask_about(), policy, self.config, longest)
        except tenacity.RetryError as failed:
            raise server.error(
                f"cannot be reached: {failed.last_attempt.exception()}; tried for {patience:g} s. Is it running, is that its "
                "address? A server takes a minute or more to start"
            ) from failed


def connect(
    config: RolloutConfig, policy: Policy, *, stop_ids: Sequence[int], pad_id: int, longest: int, is_known: bool = False
) -> Servers:
    """The servers that the settings name, once they are known to fit the policy. Raises SamplerError, ConfigError.

    ``is_known``: they have served this run before.
    """
    servers = Servers(config, stop_ids=stop_ids, pad_id=pad_id)
    try:
        ranks.on_rank_zero(lambda: servers.connect(policy, longest=longest, is_known=is_known))
    except BaseException:
        servers.close()
        raise
    return servers


def check_fits(server: VLLMServer, about: dict[str, Any], policy: Policy, config: RolloutConfig, longest: int) -> None:
    """Refuse a server whose model is not the policy's, or which cannot draw as it should. Raises SamplerError."""
    if about.get("protocol") != PROTOCOL:
        raise server.error(
            f"has another version of heedful's extension ({about.get('protocol')}, not {PROTOCOL}); start it again with this "
            "version of heedful"
        )
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
        raise server.error(
            f"serves another model than the policy: {theirs}, the policy has {own}; start it with the policy"
        )
    if about["quantization"] is not None:
        raise server.error(
            f"quantises its weights ({about['quantization']}), so they can never be the policy's; {START}"
        )
    if about["max_model_len"] < longest:
        raise server.error(
            f"reads at most {about['max_model_len']} tokens, but the longest prompt and --max-new-tokens "
            f"{config.max_new_tokens} make {longest}; start it with --max-model-len {longest}, or lower --max-prompt-tokens"
        )
    if about["logprobs_mode"] != "processed_logprobs":
        raise server.error(
            f"gives log-probs as {about['logprobs_mode']}, without temperature and filters; start it with --logprobs-mode "
            "processed_logprobs"
        )
    if config.sampler_sleep and not about["can_sleep"]:
        raise server.error(
            "cannot sleep; start it with --sleep (vLLM's --enable-sleep-mode), or leave out --sampler-sleep"
        )
    if config.sampler_weights == "nccl" and not about["has_nccl"]:
        raise server.error("takes no weights by NCCL; start it with --nccl, or use --sampler-weights folder")
