"""Whether Python code that comes with a model may run."""

from dataclasses import dataclass

from heedful.configs.settings import Settings


@dataclass(frozen=True, kw_only=True)
class TrustOptions(Settings):
    """Whether Python code that comes with a model may run."""

    SECTION = "model and data"

    trust_remote_code: bool = False
    """Run the Python code in model folders (auto_map in config.json), which may do whatever you may do: read it first. Only
    for folders on this machine: models by name never run code. For models that transformers does not know."""
