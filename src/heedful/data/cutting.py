"""Cut a prompt that is too long, where it hurts least: its beginning goes, but not its system message and its tools."""

from collections.abc import Callable
from dataclasses import replace

from heedful.data.chat import Renderer
from heedful.errors import DataError
from heedful.types import Conversation, Text


def cut_prompt(prompt: Text, renderer: Renderer, *, limit: int, source: str) -> Text:
    """Return the prompt, shortened until it has at most ``limit`` tokens.

    The response continues the end of a prompt, so that is kept. Raw text loses its beginning; a BOS token before it stays. A
    conversation keeps its system message and its tools, and loses its oldest turns, up to a user's, one after another. If
    the last user message with what follows it is still too long, that message loses its beginning. Characters are never
    split.

    Args:
        prompt: raw text or messages.
        renderer: of the policy's tokenizer.
        limit: the most tokens, with all that the template adds.
        source: where the prompt was read, for messages.

    Raises DataError if nothing of the text or of the last user message would be left.
    """

    def fits(candidate: Text) -> bool:
        return len(renderer.prompt_ids(candidate)) <= limit

    if fits(prompt):
        return prompt
    if isinstance(prompt, str):
        rest = _longest_end(prompt, fits)
        if rest is None:
            raise DataError(f"{source}: the prompt cannot be cut to {limit} tokens; {_REMEDY}")
        return rest
    system = prompt[:1] if prompt[0].role == "system" else ()
    questions = [i for i, message in enumerate(prompt) if message.role == "user"]
    tools = prompt[0].tools  # they stand on the first message, whichever that is, and count towards the limit

    def with_tools(messages: Conversation) -> Conversation:
        return (replace(messages[0], tools=tools), *messages[1:])

    for start in questions:
        kept = with_tools((*system, *prompt[start:]))
        if fits(kept):
            return kept
    question = prompt[questions[-1]] if questions else None

    def with_end(end: str) -> Conversation:
        assert question is not None
        return with_tools((*system, replace(question, content=end), *prompt[questions[-1] + 1 :]))

    rest = None if question is None else _longest_end(question.content, lambda end: fits(with_end(end)))
    if rest is None:
        raise DataError(
            f"{source}: the prompt has {len(renderer.prompt_ids(prompt))} tokens and cannot be cut to {limit}: the system "
            "message, the tools, what follows the last user message and the chat template leave no room for that message; "
            f"{_REMEDY}"
        )
    return with_end(rest)


_REMEDY = "raise the limit (--max-prompt-tokens in training), or use --too-long drop"


def _longest_end(text: str, fits: Callable[[str], bool]) -> str | None:
    """The longest end of a text that fits, found by halving; None if only white space would be left.

    It starts at one character and doubles, so that only texts of about the final length are tokenised.
    """
    fitting, beyond = 0, 1
    while beyond < len(text) and fits(text[-beyond:]):
        fitting, beyond = beyond, 2 * beyond
    beyond = min(beyond, len(text))
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        if fits(text[-middle:]):
            fitting = middle
        else:
            beyond = middle
    end = text[len(text) - fitting :]
    return end if end.strip() else None
