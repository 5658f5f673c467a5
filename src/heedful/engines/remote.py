"""Selects the kind of server by the prefix of its address."""

import importlib
from collections.abc import Sequence
from importlib.metadata import entry_points

from heedful.configs.online import ENGINES, RolloutConfig
from heedful.engines.engine import RemoteEngine
from heedful.errors import ConfigError
from heedful.models.policy import Policy

KINDS = {"vllm": "heedful.engines.vllm.servers"}


def put_to_sleep(config: RolloutConfig, *, is_known: bool) -> None:
    """Have servers on the trainer's GPU sleep (``sampler_sleep``), before its memory is looked at. Raises SamplerError."""
    kind = config.servers[0].partition(":")[0] if config.sampler_sleep else ""
    if kind in KINDS:
        importlib.import_module(KINDS[kind]).put_to_sleep(config, is_known=is_known)


def connect(
    config: RolloutConfig, policy: Policy, *, stop_ids: Sequence[int], pad_id: int, longest: int, is_known: bool
) -> RemoteEngine:
    """Connect to the servers of ``--sampler``, and check that they fit the policy. Raises SamplerError, ConfigError.

    Args:
        config: the settings of the run.
        policy: the policy to sample from.
        stop_ids: the tokens that end a response.
        pad_id: the padding token.
        longest: maximum tokens of prompt and response together.
        is_known: whether the servers answered this run before; then unanswered requests are retried longer.
    """
    kind = config.servers[0].partition(":")[0]
    if kind in KINDS:
        function = importlib.import_module(KINDS[kind]).connect
    else:
        (found, *_) = entry_points(group=ENGINES, name=kind)
        try:
            function = found.load()
        except (ImportError, AttributeError) as error:
            package = "" if found.dist is None else f" of the package {found.dist.name}"
            raise ConfigError(
                f"--sampler {config.servers[0]}: {found.value}{package} cannot be loaded: {error}; reinstall the package"
            ) from error
    remote: RemoteEngine = function(
        config, policy, stop_ids=stop_ids, pad_id=pad_id, longest=longest, is_known=is_known
    )
    return remote
