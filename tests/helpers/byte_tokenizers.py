"""Tokenizers of bytes with what those of other models have."""

from tokenizers import processors

from heedful.models import byte_tokenizer
from heedful.models.tiny import CLS


def with_template(template):
    """One with this chat template; its model is called 模型."""
    tokenizer = byte_tokenizer()
    tokenizer.name_or_path, tokenizer.chat_template = "模型", template
    return tokenizer


def with_bos(before=""):
    """One that puts a BOS before whatever it encodes, as llama's, and whose chat template begins with ``before``."""
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = CLS
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A", pair=f"{CLS} $A $B", special_tokens=[(CLS, tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = before + tokenizer.chat_template
    return tokenizer
