"""Load tokenizers and their chat templates, and check that two models share one."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from heedful.configs.template import TemplateOptions
from heedful.configs.trust import TrustOptions
from heedful.errors import CheckpointError, ConfigError
from heedful.models.context import context_length
from heedful.models.settings_files import check_eos
from heedful.models.source import NO_CODE, Source, explained, load_config, resolve
from heedful.models.template import check_templates, set_defaults

PLAIN_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ 'Assistant: ' + message['content'] + eos_token + '\n' }}"
    "{% else %}{{ message['role'] | capitalize + ': ' + message['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""``--chat-template plain``: lines of ``User: ...``, ``System: ...`` and ``Assistant: ...``; EOS ends each answer.

A prompt ends before the space, because the space and the first word of an answer are one token in most tokenizers."""


def load_tokenizer(model: str | Source, *, chat_template: str = "") -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Args:
        model: a folder, an adapter folder, a name on the Hub, or a `Source`.
        chat_template: replaces the tokenizer's own template: ``plain``, or the path of a Jinja file.

    Raises CheckpointError if the model has no tokenizer, ConfigError if there is no such template.
    """
    source = resolve(model)
    with explained(source.folder, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(_tokenizer_home(source), trust_remote_code=source.runs_code)
        if set(tokenizer.get_vocab()) <= {token.content for token in tokenizer.added_tokens_decoder.values()}:
            raise CheckpointError(
                f"{source.folder}: cannot load a tokenizer from it: no vocabulary; is tokenizer.json missing?"
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
    """Load the tokenizer of a model with the chat template, and the values for it, that settings ask for.

    Raises CheckpointError and ConfigError as `load_tokenizer` and `set_defaults` do.
    """
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
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    options: TrustOptions = NO_CODE,
) -> None:
    """Refuse a reference or value model that cannot read the policy's token ids, before it is loaded.

    Args:
        flag: the flag that names it, for messages.
        model: the companion; for None nothing is checked.
        tokenizer: the policy's. The companion must give each of its tokens the same id, and may know more tokens.
        longest: the most tokens that it has to read.
        options: say whether code in its folder may run.

    Raises ConfigError and CheckpointError.
    """
    if model is None:
        return
    source = resolve(model, options)
    name = source.name
    own, theirs = tokenizer.get_vocab(), load_tokenizer(source).get_vocab()
    different = [token for token, i in own.items() if theirs.get(token) != i]
    if different:
        raise ConfigError(
            f"{flag} {name} has another vocabulary than the policy: {len(different)} of {len(own)} tokens differ, such as "
            f"{different[0]!r}; it must share the policy's tokenizer"
        )
    config = load_config(source)
    if context_length(config) < longest:
        raise ConfigError(
            f"{flag} {name} reads {context_length(config)} tokens, but prompts and responses need {longest}"
        )
    embeddings = getattr(config.get_text_config(decoder=True), "vocab_size", len(own))
    if embeddings <= max(own.values()):
        raise ConfigError(f"{flag} {name} has {embeddings} embeddings, fewer than the policy's {len(own)} tokens")
