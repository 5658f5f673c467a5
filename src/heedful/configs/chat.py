"""Settings of the conversation in the terminal."""

from dataclasses import dataclass
from typing import Annotated

from heedful.configs.options import MachineOptions, SamplingOptions
from heedful.configs.ranges import POSITIVE
from heedful.configs.template import TemplateOptions
from heedful.configs.trust import TrustOptions
from heedful.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ChatConfig(SamplingOptions, TemplateOptions, TrustOptions, MachineOptions):
    """Talk to a model in the terminal. /reset starts over, /quit ends."""

    model: str
    """The policy: a folder in Hugging Face format, a Hub name, or modelscope:ORG/NAME."""
    system_prompt: str | None = None
    """System message at the start of the conversation."""
    raw: bool = False
    """No template: the model continues each line as plain text."""
    max_new_tokens: Annotated[int, POSITIVE] = 256
    """Longest answer, in tokens."""

    def check(self) -> None:
        super().check()
        if self.raw and self.system_prompt is not None:
            raise ConfigError("--system-prompt is a message, and --raw has none; leave one of them out")
        if self.raw and (self.thinking != "default" or self.chat_template_kwargs):
            raise ConfigError("--thinking and --chat-template-kwargs are for a chat template, and --raw uses none")
