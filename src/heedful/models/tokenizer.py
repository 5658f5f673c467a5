"""Load tokenizers and chat templates, and check that two models share a tokenizer."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from heedful.configs.options import TemplateOptions, TrustOptions
from heedful.errors import CheckpointError, ConfigError
from heedful.models.shape import context_length
from heedful.models.source import NO_CODE, Source, check_eos, explained, load_config, resolve

PLAIN_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ 'Assistant: ' + message['content'] + eos_token + '\n' }}"
    "{% else %}{{ message['role'] | capitalize + ': ' + message['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""``--chat-template plain``: lines of ``User: ...``, ``System: ...`` and ``Assistant: ...``; EOS ends each answer.

A prompt ends before the space, because the space and the first word of an answer are one token in most tokenizers."""


def load_tokenizer(model: str | Source, *, chat_template: str = "") -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model. ``chat_template`` replaces its own: ``plain``, or the path of a Jinja file.

    Raises CheckpointError if the model has no tokenizer, ConfigError if there is no such template.
    """
    source = resolve(model)
    with explained(source.folder, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(_tokenizer_home(source), trust_remote_code=source.runs_code)
        if set(tokenizer.get_vocab()) <= {token.content for token in tokenizer.added_tokens_decoder.values()}:
            raise CheckpointError(
                f"{source.folder}: cannot load a tokenizer from it: it has no vocabulary; is tokenizer.json missing?"
            )
        if tokenizer.eos_token is not None:
            check_eos(Path(_tokenizer_home(source)), tokenizer.eos_token)
    if chat_template == "plain":
        adds_bos = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
        tokenizer.chat_template = ("{{ bos_token }}" if adds_bos else "") + PLAIN_TEMPLATE
    elif chat_template:
        tokenizer.chat_template = _read_template(Path(chat_template))
    check_templates(tokenizer, source.folder)
    return tokenizer


def _read_template(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(f"--chat-template: {str(path)!r} is neither 'plain' nor an existing Jinja file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template {path}: not UTF-8: {error}; save the file as UTF-8") from error


def load_chat_tokenizer(model: str | Source, options: TemplateOptions) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, with the settings' chat template and values of its variables."""
    tokenizer = load_tokenizer(model, chat_template=options.chat_template)
    set_defaults(tokenizer, options.thinking, options.template_variables)
    return tokenizer


def _tokenizer_home(source: Source) -> str:
    """The model's folder; for adapters saved without a tokenizer, the folder of the nearest base that has one."""
    with_one = [str(folder) for folder in source.adapters if (folder / "tokenizer_config.json").is_file()]
    return with_one[-1] if with_one else source.base


def check_companion(
    flag: str,
    model: str | Source | None,
    policy: str | Source,
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    *,
    options: TrustOptions = NO_CODE,
) -> None:
    """Raises ConfigError or CheckpointError if a reference or value model (of ``flag``) cannot read the policy's token
    ids.

    It must have every token of the policy's ``tokenizer`` with the same id, may have more, must have an embedding for each
    that the policy has one for, and must read ``longest`` tokens. Called before the model is loaded.
    """
    if model is None:
        return
    source = resolve(model, options)
    name = source.name
    own, known = tokenizer.get_vocab(), load_tokenizer(source).get_vocab()
    different = [token for token, i in own.items() if known.get(token) != i]
    if different:
        raise ConfigError(
            f"{flag} {name} has another vocabulary than the policy: {len(different)} of {len(own)} tokens differ, such as "
            f"{different[0]!r}; use a model with the policy's tokenizer"
        )
    config = load_config(source)
    if context_length(config) < longest:
        raise ConfigError(
            f"{flag} {name} reads {context_length(config)} tokens, but prompts and responses need {longest}"
        )
    ours, theirs = (
        getattr(one.get_text_config(decoder=True), "vocab_size", len(own)) for one in (load_config(policy), config)
    )
    needed = min(ours, max(own.values()) + 1)  # a tokenizer may add a token that its model has no embedding for
    if theirs < needed:
        raise ConfigError(
            f"{flag} {name} has {theirs} embeddings, fewer than the policy's {needed}; use a model with the policy's tokens"
        )


# Chat templates: checks, and default values of their variables --------------------------------------------------------


SWITCHES = ("enable_thinking", "thinking")
"""Names of the switch for thinking; the first one that a template reads is used."""
PROVIDED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Variables of every rendering, besides the special tokens (``bos_token``)."""
PLAIN_NAME = re.compile(r"[\w. -]+")
_ENVIRONMENT = _compile_jinja_template("").environment


def check_templates(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raises CheckpointError for chat templates that cannot be saved safely, or that no time limit could interrupt.

    Each template is saved in a file of its name, so the name must be a plain file name. A power such as ``9 ** 9 ** 9``
    is a single operation, during which Python cannot be interrupted; no template needs one.
    """
    templates = tokenizer.chat_template
    for key, template in (templates if isinstance(templates, dict) else {"default": templates or ""}).items():
        if not PLAIN_NAME.fullmatch(key):
            raise CheckpointError(f"{name}: a chat template is named {key!r}, which is not a file name; rename it")
        try:
            tree = _ENVIRONMENT.parse(template)
        except (jinja2.TemplateSyntaxError, RecursionError):
            continue  # raises when it is used
        power = tree.find(nodes.Pow)
        if power is not None:
            raise CheckpointError(
                f"{name}: the chat template computes a power (** in line {power.lineno}), which could take forever; use "
                "another --chat-template"
            )


def set_defaults(tokenizer: PreTrainedTokenizerBase, thinking: str, variables: Mapping[str, Any]) -> None:
    """Set defaults of a chat template's variables from --thinking and --chat-template-kwargs, saved with the tokenizer.

    Raises ConfigError if the template does not read a variable, CheckpointError if it is not a Jinja template.
    """
    if thinking == "default" and not variables:
        return
    name = tokenizer.name_or_path or "the tokenizer"
    flag = "--chat-template-kwargs" if thinking == "default" else f"--thinking {thinking}"
    if not tokenizer.chat_template:
        raise ConfigError(f"{flag}: {name} has no chat template; leave it out, or add a --chat-template that reads it")
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
                f"{which}); leave --thinking out, or use another --chat-template"
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
    """Return the variables that a chat template reads and a caller may set.

    A variable that the template itself sets is included only if the template tests whether it is defined.

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
    """Prepend statements, without output, that set undefined variables."""
    lines = [
        f"{{%- if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}"
        for name, value in values.items()
    ]
    # Jinja drops the line break after a statement, so a leading one of the template must be doubled.
    return "".join(lines) + ("\n" if template.startswith("\n") else "") + template
