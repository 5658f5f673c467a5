"""A conversation in the terminal: answers appear as they are sampled. Lines that begin with a slash are commands (`HELP`)."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from heedful.configs.tools import ChatConfig
from heedful.data.chat import Renderer, stop_ids
from heedful.data.fitting import prompt_room
from heedful.display import harmless
from heedful.engines.decoder import SamplingModel
from heedful.engines.generate import decode
from heedful.engines.probe import check_sampling
from heedful.engines.sampler import with_graphs
from heedful.errors import CheckpointError, ConfigError, DataError
from heedful.files import read_object
from heedful.kernels.device import frozen_place, resolve_device
from heedful.models.load import load_policy
from heedful.models.policy import Policy, freeze
from heedful.models.shape import check_own_tokens, check_rows, context_length, rows_with_text
from heedful.models.source import resolve
from heedful.models.tokenizer import load_chat_tokenizer
from heedful.types import Message, Text

HELP = """/reset  start the conversation over
/help   show these commands
/exit   end, as do /quit and Ctrl-D"""
MOST_RUNS = 20
"""Maximal number of runs to trace back."""


class Conversation:
    """A model and the messages so far.

    With ``config.raw`` no messages are kept, and the model continues each line alone. Without ``keeps_turns`` each line
    begins a new conversation.
    """

    def __init__(self, policy: Policy, renderer: Renderer, config: ChatConfig, *, keeps_turns: bool = True) -> None:
        self.keeps_turns = keeps_turns
        self.policy = policy
        self.renderer = renderer
        self.config = with_graphs(config, policy)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.stop_ids = stop_ids(renderer, policy.lm.generation_config.eos_token_id)
        self.room = prompt_room(config.max_new_tokens, context_length(policy.lm.config))
        self.messages: tuple[Message, ...] = ()
        self.reset()

    def reset(self) -> None:
        """Forget everything except the system prompt."""
        system = self.config.system_prompt
        self.messages = (Message("system", system),) if system else ()

    def answer(self, line: str) -> Iterator[str]:
        """Yield the answer to a line piece by piece, and add both to the conversation.

        Raises ConfigError if the conversation no longer fits into the model's context, and DataError if a token has no row of
        embeddings; the line is then not added.
        """
        prompt: Text = line if self.config.raw else (*self.messages, Message("user", line))
        ids = self.renderer.prompt_ids(prompt)
        check_rows(self.policy.lm, self.renderer.tokenizer, [("this line", ids)])
        if len(ids) > self.room:
            raise ConfigError(
                f"the conversation has {len(ids)} tokens; the model can read {self.room} besides --max-new-tokens; "
                "/reset starts over"
            )
        uniforms = torch.rand(1, self.config.max_new_tokens, generator=self.generator, dtype=torch.float64)
        steps = decode(
            SamplingModel(self.policy, cuda_graphs=self.config.cuda_graphs == "on"),
            [ids],
            self.config,
            uniforms=uniforms,
            lengths=torch.tensor([self.config.max_new_tokens]),
            stop_ids=self.stop_ids,
            pad_id=self.renderer.pad_id,
            num_tokens=rows_with_text(self.policy.lm, self.renderer.tokenizer),
        )
        sampled: list[int] = []
        said = begun = "" if self.config.raw else self.renderer.opening
        if begun:
            yield begun
        for step in steps:
            token = int(step.tokens[0])
            if token in self.stop_ids:
                break
            sampled.append(token)
            text = self._text(sampled, prompt, truncated=True)
            if not text.endswith("\ufffd"):  # the bytes of a character may come in several tokens
                yield text[len(said) :]
                said = text
        whole = self._text(sampled, prompt, truncated=len(sampled) == self.config.max_new_tokens)
        if whole != said:
            yield whole[len(said) :]
        if not self.config.raw and self.keeps_turns:
            self.messages = (*self.messages, Message("user", line), Message("assistant", whole))

    def _text(self, sampled: list[int], prompt: Text, *, truncated: bool) -> str:
        """Return the sampled text, after the thinking tag with which the rendered prompt may end."""
        if isinstance(prompt, str):
            return self.renderer.encoder.decode_after(self.renderer.prompt_ids(prompt), sampled)
        return self.renderer.response_text(sampled, prompt=prompt, truncated=truncated)


def _is_text(line: str) -> bool:
    """Return False if bytes that are not UTF-8 came in through a pipe (they arrive as lone surrogates)."""
    return not any("\ud800" <= character <= "\udfff" for character in line)


def single_turn_run(model: str) -> Path | None:
    """The heedful sft run of a model, if no conversation in its data had a second answer and no environment talked with it
    later; else None."""
    folder = Path(model)
    for _ in range(MOST_RUNS):
        run = folder.parent
        if folder.name not in ("final", "best") or not (run / "summary.json").is_file():
            return None
        with contextlib.suppress(CheckpointError):  # a damaged run has no readable summary
            summary = read_object(run / "summary.json", "")
            if summary.get("algorithm") == "sft":
                return run if summary.get("data", {}).get("multi_turn") == 0 else None
            settings = read_object(run / "config.yaml", "")
            if settings.get("environment"):
                return None
            folder = Path(str(settings.get("model")))
    return None


def greeting(config: ChatConfig, run: Path | None) -> str:
    """The first text of a chat. ``run`` trained the model on single turns (`single_turn_run`)."""
    kept = "Each line is continued as a separate text." if config.raw else "The conversation is kept."
    if run is not None:
        kept = f"Each line begins a new conversation: {run} trained it on conversations with one answer."
    return f"{config.model}. {kept} /help lists the commands, /exit ends."


def chat(config: ChatConfig, read: Callable[[str], str] = input) -> None:
    """Chat until /exit or the end of the input. On a terminal it begins with a greeting.

    Args:
        config: the model and its sampling settings.
        read: asks for the next line; it is called with the prompt sign and raises EOFError at the end of the input.

    Raises ConfigError and CheckpointError.
    """
    device = resolve_device(config.device, graphs=config.cuda_graphs == "on")
    source = resolve(config.model, config)
    renderer = Renderer(load_chat_tokenizer(source, config))
    if not config.raw and not renderer.tokenizer.chat_template:
        raise ConfigError(f"{config.model} has no chat template: use --raw to continue text, or --chat-template plain")
    policy = load_policy(source, **frozen_place(device, config.dtype))
    freeze(policy)
    stops = stop_ids(renderer, policy.lm.generation_config.eos_token_id)
    check_own_tokens(policy.lm, renderer.tokenizer, stop_ids=stops, pad_id=renderer.pad_id)
    check_sampling(policy, pad_id=renderer.pad_id)
    run = None if config.raw else single_turn_run(config.model)
    conversation = Conversation(policy, renderer, config, keeps_turns=run is None)
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        print(greeting(config, run))
    while True:
        try:
            line = read(prompt).strip()
        except EOFError:
            return
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            conversation.reset()
            print("(the conversation starts over)")
        elif line == "/help":
            print(HELP)
        elif line.startswith("/"):
            print(f"(no command {line!r}: /help lists the commands)")
        elif not _is_text(line):
            print("(not valid UTF-8)")
        elif line:
            try:
                for piece in conversation.answer(line):
                    print(harmless(piece), end="", flush=True)
                print()
            except (ConfigError, DataError) as error:
                print(f"({error})")
