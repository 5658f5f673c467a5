"""The conversation in the terminal, with a model that learned one answer by heart."""

import io
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from heedful import ChatConfig, ConfigError, Message, SFTConfig, train_sft
from heedful.algorithms.sft import start
from heedful.cli.chat import Conversation, chat, single_turn_run
from heedful.data.chat import Renderer
from heedful.models import freeze, load_policy, load_tokenizer

ANSWER = "您好😀！再见。"


@pytest.fixture(scope="session")
def learned(tiny, tmp_path_factory):
    """A model that answers "你好" with Chinese and an emoji: characters of three and of four bytes, a token a byte."""
    root = tmp_path_factory.mktemp("chat")
    turns = [{"role": "user", "content": "你好"}, {"role": "assistant", "content": ANSWER}]
    (root / "d.jsonl").write_text(json.dumps({"messages": turns}), encoding="utf-8")
    config = SFTConfig(
        model=tiny("gpt2", max_length=128), data=str(root / "d.jsonl"), output=root / "run", dtype="float32",
        eval_fraction=0.0, batch_size=1, max_steps=45, learning_rate=1e-2, sample_every=0, eval_every=0,
    )  # fmt: skip
    train_sft(config)
    return str(root / "run" / "final")


@pytest.fixture
def conversation(learned):
    """``conversation(**settings)`` with the learned model, greedy."""

    def make(model=learned, **settings):
        settings = {"temperature": 0.0, "max_new_tokens": 40, "dtype": "float32"} | settings
        policy = load_policy(model, device=torch.device("cpu"), compute_dtype=torch.float32)
        freeze(policy)
        return Conversation(policy, Renderer(load_tokenizer(model)), ChatConfig(model=model, **settings))

    return make


@pytest.fixture
def say(capsys):
    """``say(config, *lines)``: what is printed when these lines are typed, then the input ends."""

    def run(config, *lines):
        capsys.readouterr()
        typed = iter(lines)

        def read(prompt):
            assert prompt == ""
            try:
                return next(typed)
            except StopIteration:
                raise EOFError from None

        chat(config, read)
        return capsys.readouterr().out

    return run


@pytest.fixture
def settings(learned):
    return ChatConfig(model=learned, temperature=0.0, max_new_tokens=40, dtype="float32")


def test_pieces_are_whole_characters_and_add_up(conversation):
    """A token is a byte here, so no piece may hold half a character, and none may be lost."""
    talk = conversation()
    pieces = list(talk.answer("你好"))
    assert "".join(pieces) == ANSWER
    assert [piece for piece in pieces if piece] == list(ANSWER)
    assert talk.messages == (Message("user", "你好"), Message("assistant", ANSWER))


def test_an_answer_cut_inside_a_character(conversation):
    """What was cut off is shown as transformers decodes it, and nothing twice."""
    for tokens in (1, 2, 3, 8, 10, 25):
        talk = conversation(max_new_tokens=tokens)
        tokenizer = AutoTokenizer.from_pretrained(talk.config.model)
        expected = tokenizer.decode(tokenizer(ANSWER).input_ids[:tokens])
        assert "".join(talk.answer("你好")) == expected, tokens
        assert talk.messages[-1].content == expected


def test_any_bytes_add_up(tiny, conversation):
    """A random model writes bytes that are no UTF-8 at all. The same seed says the same."""
    said = []
    for seed in (0, 0, 1):
        talk = conversation(model=tiny("gpt2"), temperature=1.0, seed=seed, max_new_tokens=40)
        said.append("".join(talk.answer("你好")))
        assert said[-1] == talk.messages[-1].content
    assert said[0] == said[1] != said[2]


def test_the_conversation_is_kept(conversation):
    """The second line is answered in the light of the first: the model is given all messages."""
    talk = conversation(system_prompt="简短", max_new_tokens=4)
    first = "".join(talk.answer("你好"))
    second = "".join(talk.answer("再说"))
    assert talk.messages == (
        Message("system", "简短"),
        Message("user", "你好"),
        Message("assistant", first),
        Message("user", "再说"),
        Message("assistant", second),
    )
    alone = conversation(max_new_tokens=4)
    seen = [alone.renderer.prompt_ids((*talk.messages[:3], Message("user", "再说")))]
    tokenizer = alone.renderer.tokenizer
    assert tokenizer.decode(seen[0]).count("你好") == 1
    model = alone.policy.lm
    ids = torch.tensor(seen)
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert second == tokenizer.decode([i for i in generated[0, ids.shape[1] :].tolist() if i not in talk.stop_ids])
    talk.reset()
    assert talk.messages == (Message("system", "简短"),)


def test_raw_keeps_nothing_and_uses_no_template(conversation):
    talk = conversation(raw=True, max_new_tokens=4)
    said = "".join(talk.answer("你好"))
    assert talk.messages == ()
    ids = torch.tensor([talk.renderer.tokenizer("你好").input_ids])
    generated = talk.policy.lm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    fresh = [i for i in generated[0, ids.shape[1] :].tolist() if i not in talk.stop_ids]
    assert said == talk.renderer.decode(fresh)


def test_too_long_a_conversation_keeps_the_old_one(conversation):
    talk = conversation(max_new_tokens=2)
    list(talk.answer("你好"))
    before = talk.messages
    with pytest.raises(ConfigError, match="/reset starts over"):
        list(talk.answer("很长" * 60))
    assert talk.messages == before


def test_lines_commands_and_the_end_of_the_input(say, settings):
    over = "(the conversation starts over)"
    printed = say(
        settings, "你好", "", "   ", "/reset", "  你好  ", "/重来", "很长" * 60, "/reset", "你好"
    ).splitlines()
    assert printed[:4] == [ANSWER, over, ANSWER, "(no command '/重来': /help lists the commands)"]
    assert "tokens" in printed[4]
    assert "/reset" in printed[4]
    assert printed[5:] == [over, ANSWER]  # a line that is too long ends nothing


def test_exit_ends_and_help_names_every_command(say, settings):
    assert say(settings, "/exit", "你好") == say(settings, "/quit", "你好") == say(settings) == ""
    said = say(settings, "/help")
    for command in ("/help", "/reset", "/exit", "/quit"):
        assert command in said


class Keyboard(io.StringIO):
    """What a person types."""

    def isatty(self):
        return True


def test_a_person_is_greeted_with_the_commands_and_what_was_learned(heedful, learned, monkeypatch):
    for flags, said in (((), "Each line begins a new conversation: "), (("--raw",), "Each line is continued")):
        monkeypatch.setattr("sys.stdin", Keyboard("/exit\n"))
        outcome = heedful("chat", "--model", learned, "--max-new-tokens", "8", *flags)
        assert outcome.out.startswith(f"{learned}. {said}")
        assert "/help lists the commands, /exit ends." in outcome.out
        assert ("trained it on conversations with one answer" in outcome.out) == (not flags)


def test_a_model_that_learned_single_turns_says_so(learned, tmp_path):
    """Also if a later stage came after it; a second answer anywhere in the data is enough to learn from."""
    run = Path(learned).parent
    later = tmp_path / "ppo"
    (later / "final").mkdir(parents=True)
    (later / "summary.json").write_text(json.dumps({"algorithm": "ppo"}), encoding="utf-8")
    (later / "config.yaml").write_text(f"model: {learned}\n", encoding="utf-8")
    assert single_turn_run(learned) == single_turn_run(str(later / "final")) == run
    (later / "config.yaml").write_text(f"model: {learned}\nenvironment: [python:局.py:Talk]\n", encoding="utf-8")
    assert single_turn_run(str(later / "final")) is None, "with an environment it learned to speak several times"
    other = tmp_path / "sft"
    other.mkdir()
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    for count in (1, None):
        summary["data"]["multi_turn"] = count
        (other / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
        assert single_turn_run(str(other / "final")) is None
    assert single_turn_run("org/name") is None


def test_answers_after_the_first_are_counted(tiny, tmp_path):
    """In the counts of a run's data; raw text has none."""
    turns = [{"role": role, "content": "好"} for role in ("user", "assistant")]
    records = [{"messages": turns * 3}, {"messages": turns}, {"prompt": "a", "completion": "b"}]
    for name, chosen, expected in (("chats", records, 2), ("raw", records[2:] * 4, None)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in chosen), encoding="utf-8")
        config = SFTConfig(
            model=tiny("gpt2"), data=str(path), output=tmp_path / name, eval_fraction=0.0, batch_size=2, dtype="float32"
        )
        assert start(config)[1].facts["data"].get("multi_turn") == expected


def test_no_room_for_a_word(heedful, learned, monkeypatch):
    """A context of 128 with 256 new tokens could never answer; /reset, which a long conversation needs, would not help."""
    monkeypatch.setattr("sys.stdin", io.StringIO("你好\n"))
    outcome = heedful("chat", "--model", learned, "--max-new-tokens", "128")
    assert (outcome.status, outcome.out) == (2, "")
    assert "--max-new-tokens 128" in outcome.message
    assert "128 tokens" in outcome.message or "no room" in outcome.message
    assert "/reset" not in outcome.message


def test_no_template(learned, tmp_path, heedful, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(learned)
    tokenizer.chat_template = None
    AutoModelForCausalLM.from_pretrained(learned).save_pretrained(tmp_path / "模型")
    tokenizer.save_pretrained(tmp_path / "模型")
    assert not (tmp_path / "模型" / "chat_template.jinja").exists()
    outcome = heedful("chat", "--model", tmp_path / "模型")
    assert (outcome.status, outcome.out) == (2, "")
    for fragment in ("模型 has no chat template", "--raw", "--chat-template plain"):
        assert fragment in outcome.message
    for flags in (["--raw"], ["--chat-template", "plain"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("你好\n"))
        outcome = heedful("chat", "--model", tmp_path / "模型", *flags, "--max-new-tokens", "4")
        assert outcome.status == 0, outcome.err


def test_in_a_pipe(learned, forked, tmp_path):
    """Lines from standard input, answers on standard output, no prompt sign between."""
    lines = tmp_path / "lines.txt"
    lines.write_text("你好\n/reset\n你好\n", encoding="utf-8")

    def chat():
        sys.argv = ["heedful", "chat", "--model", learned, "--temperature", "0"]
        sys.argv += ["--max-new-tokens", "40", "--dtype", "float32"]
        with lines.open(encoding="utf-8") as sys.stdin:
            runpy.run_module("heedful", run_name="__main__")

    process = forked(chat)
    out, err = process.communicate()
    assert process.returncode == 0
    assert out == f"{ANSWER}\n(the conversation starts over)\n{ANSWER}\n"
    assert err == ""
