"""Which chat templates are refused; the variables that one reads, and values for them that become its own defaults."""

import re
from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2 import meta, nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from heedful.errors import CheckpointError, ConfigError

SWITCHES = ("enable_thinking", "thinking")
"""Names of the switch for thinking; the first that a template reads is meant."""
PROVIDED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Variables that come with every rendering; the special tokens (``bos_token``) do too."""
PLAIN_NAME = re.compile(r"[\w. -]+")
_ENVIRONMENT = _compile_jinja_template("").environment


def check_templates(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse chat templates that could not be saved, or that no time limit could end.

    Each template is saved in a file of its name, so a name leads nowhere else. A power of numbers such as ``9 ** 9 ** 9`` is
    one operation, in which nothing can interrupt Python; no template needs one.

    Args:
        tokenizer: its templates are looked at; they need not be valid.
        name: the model's, for messages.

    Raises CheckpointError.
    """
    templates = tokenizer.chat_template
    for key, template in (templates if isinstance(templates, dict) else {"default": templates or ""}).items():
        if not PLAIN_NAME.fullmatch(key):
            raise CheckpointError(f"{name}: a chat template is named {key!r}, which is not a file name; rename it")
        try:
            tree = _ENVIRONMENT.parse(template)
        except (jinja2.TemplateSyntaxError, RecursionError):
            continue  # refused when it is used
        power = tree.find(nodes.Pow)
        if power is not None:
            raise CheckpointError(
                f"{name}: the chat template computes a power (** in line {power.lineno}), which could take for ever; give "
                "another --chat-template"
            )


def set_defaults(tokenizer: PreTrainedTokenizerBase, thinking: str, variables: Mapping[str, Any]) -> None:
    """Give variables of a tokenizer's chat template a default, which is saved with it. Whoever renders may say otherwise.

    Args:
        tokenizer: its chat template is changed.
        thinking: ``--thinking``.
        variables: ``--chat-template-kwargs``.

    Raises ConfigError if the template does not read a variable, CheckpointError if it is not a Jinja template.
    """
    if thinking == "default" and not variables:
        return
    name = tokenizer.name_or_path or "the tokenizer"
    flag = "--chat-template-kwargs" if thinking == "default" else f"--thinking {thinking}"
    if not tokenizer.chat_template:
        raise ConfigError(f"{flag}: {name} has no chat template; leave it out, or give a --chat-template that reads it")
    templates = tokenizer.chat_template
    several = templates if isinstance(templates, dict) else {"": templates}
    reads = frozenset().union(*(variables_of(template, name) for template in several.values()))
    known = sorted(one for one in reads - PROVIDED if not one.endswith("_token"))
    which = f"it reads {', '.join(known)}" if known else "it reads no variable of that kind"
    values = dict(variables)
    if thinking != "default":
        switch = next((one for one in SWITCHES if one in known), None)
        if switch is None:
            raise ConfigError(
                f"--thinking {thinking}: the chat template of {name} has no switch for thinking ({' or '.join(SWITCHES)}; "
                f"{which}); leave --thinking out, or give another --chat-template"
            )
        if switch in values:
            raise ConfigError(
                f"--thinking {thinking} and --chat-template-kwargs both set {switch}; leave out one of the two"
            )
        values[switch] = thinking == "on"
    unknown = [one for one in values if one not in known]
    if unknown:
        raise ConfigError(f"--chat-template-kwargs: the chat template of {name} does not read {unknown[0]!r}; {which}")
    with_values = {key: _with_defaults(template, values) for key, template in several.items()}
    tokenizer.chat_template = with_values if isinstance(templates, dict) else with_values[""]


def variables_of(template: str, name: str) -> frozenset[str]:
    """Return the variables that a chat template reads and that a caller may set.

    A variable that the template itself sets somewhere is one of them only if the template asks whether it is defined.

    Raises CheckpointError, with the model's name, if the template is not Jinja.
    """
    try:
        tree = _ENVIRONMENT.parse(template)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(
            f"{name}: the chat template is not valid Jinja: {error.message} (line {error.lineno})"
        ) from error
    own = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "store"}
    asked = {
        node.node.name
        for kind, names in ((nodes.Test, ("defined", "undefined")), (nodes.Filter, ("default", "d")))
        for node in tree.find_all(kind)
        if node.name in names and isinstance(node.node, nodes.Name)
    }
    return (frozenset(meta.find_undeclared_variables(tree)) - (own - asked)) - set(_ENVIRONMENT.globals)


def _with_defaults(template: str, values: Mapping[str, Any]) -> str:
    """Put statements before a template that write nothing and set variables which are not defined."""
    lines = [
        f"{{%- if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}"
        for name, value in values.items()
    ]
    # The line break after a statement belongs to it, so one that the template begins with needs another before it.
    return "".join(lines) + ("\n" if template.startswith("\n") else "") + template
