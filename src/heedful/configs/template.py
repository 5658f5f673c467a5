"""Settings of the chat template."""

import json
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from heedful.configs.settings import Settings
from heedful.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TemplateOptions(Settings):
    """How conversations are rendered. What is set here becomes the default of the template that a trainer saves."""

    SECTION = "model and data"

    chat_template: str = ""
    """Chat template in place of the model's own: plain, or a Jinja file. Trainers save it with the model."""
    thinking: Literal["default", "on", "off"] = "default"
    """Switch the thinking of a chat template on or off, if it has a switch (enable_thinking or thinking). default leaves it
    to the template: Qwen3's then thinks. Trainers save it with the model."""
    chat_template_kwargs: str = ""
    """Other variables of the chat template, as a JSON object such as '{"reasoning_effort": "low"}'. Trainers save them with
    the model."""

    @property
    def template_variables(self) -> dict[str, Any]:
        """What ``chat_template_kwargs`` says. Raises ConfigError if it is not a JSON object."""
        if not self.chat_template_kwargs.strip():
            return {}
        try:
            variables = json.loads(self.chat_template_kwargs, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"--chat-template-kwargs is not JSON: {error}: {self.chat_template_kwargs!r:.80}; write an object such as "
                + """'{"reasoning_effort": "low"}'"""
            ) from error
        if not isinstance(variables, dict):
            raise ConfigError(
                f"--chat-template-kwargs must be a JSON object of names and values, got {self.chat_template_kwargs!r:.80}"
            )
        return variables

    def check(self) -> None:
        super().check()
        _ = self.template_variables


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
