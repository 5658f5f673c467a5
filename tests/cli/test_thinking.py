"""Thinking, template variables and tools on the command line: what they do, what a saved model keeps, what is refused."""

import io
import json

import pytest
from transformers import AutoTokenizer

from heedful.data import sandbox

QUESTION = [{"role": "user", "content": "你好"}]
EMPTY = "<think>\n\n</think>\n\n"
CHATS = {
    "sft": {"messages": [*QUESTION, {"role": "assistant", "content": "您好！"}]},
    "ppo": {"prompt": QUESTION},
}


@pytest.fixture
def chats(written):
    """``chats(command)`` is a file of conversations for a trainer."""
    return lambda command: written("对话.jsonl", [CHATS[command]] * 3)


@pytest.fixture
def refused(tmp_path):
    def check(outcome, *fragments):
        assert outcome.status == 2, outcome.err
        assert outcome.out == ""
        assert "Traceback" not in outcome.err
        for fragment in fragments:
            assert fragment in outcome.message, outcome.message
        assert not (tmp_path / "运行").exists()

    return check


def prompt_of(folder):
    return AutoTokenizer.from_pretrained(folder).apply_chat_template(
        QUESTION, tokenize=False, add_generation_prompt=True
    )


def test_what_is_set_is_saved(train, chats, thinker, tmp_path):
    """In the run's settings, and in the template of the model that comes out, for any tool that reads it."""
    before, final = prompt_of(thinker()), tmp_path / "运行" / "final"
    outcome = train("ppo", "--thinking", "off", data_file=chats("ppo"), model=thinker())
    assert outcome.status == 0, outcome.err
    assert "thinking: 'off'" in (tmp_path / "运行" / "config.yaml").read_text()
    assert prompt_of(final) == before + EMPTY
    # The next stage needs no flag, and may have one.
    outcome = train("sft", data_file=chats("sft"), model=final, output=tmp_path / "再来")
    assert outcome.status == 0, outcome.err
    assert prompt_of(tmp_path / "再来" / "final") == before + EMPTY
    outcome = train("sft", "--thinking", "on", data_file=chats("sft"), model=final, output=tmp_path / "又来")
    assert outcome.status == 0, outcome.err
    assert prompt_of(tmp_path / "又来" / "final") == before


def test_unset_it_passes_nothing_and_variables_are_passed(train, chats, thinker, tmp_path):
    assert train("sft", data_file=chats("sft"), model=thinker(), output=tmp_path / "空").status == 0
    own, saved = (AutoTokenizer.from_pretrained(one).chat_template for one in (thinker(), tmp_path / "空" / "final"))
    assert saved == own
    flags = ["--chat-template-kwargs", '{"enable_thinking": false}']
    assert train("sft", *flags, data_file=chats("sft"), model=thinker()).status == 0
    assert prompt_of(tmp_path / "运行" / "final").endswith(EMPTY)
    assert "enable_thinking" in (tmp_path / "运行" / "config.yaml").read_text()


def test_what_cannot_be_used(train, heedful, refused, chats, thinker, tiny):
    for value, fragments in (
        ("{", ["--chat-template-kwargs is not JSON"]),
        ("[1]", ["--chat-template-kwargs must be a JSON object", "'[1]'"]),
        ('{"a": NaN}', ["NaN is not JSON"]),
        ('{"effort": 1}', ["does not read 'effort'", "it reads enable_thinking"]),
    ):
        refused(train("sft", "--chat-template-kwargs", value, data_file=chats("sft"), model=thinker()), *fragments)
    no_switch = ["--thinking on: the chat template of", "no switch for thinking", "leave --thinking out"]
    refused(train("sft", "--thinking", "on", data_file=chats("sft"), model=tiny()), *no_switch)
    for command in (["chat"], ["evaluate", "scores", "--rewards", "rule:digits", "--data", chats("ppo")]):
        refused(heedful(*command, "--model", tiny(), "--thinking", "off"), "no switch for thinking")
    refused(heedful("chat", "--raw", "--model", tiny(), "--thinking", "off"), "--raw uses none")


def test_chat_and_evaluation_take_it(heedful, chats, thinker, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("你好\n再说\n"))
    flags = ["--thinking", "off", "--max-new-tokens", "4", "--dtype", "float32"]
    assert heedful("chat", "--model", thinker(), *flags).status == 0
    common = ["--data", chats("ppo"), "--model", thinker(), *flags]
    assert heedful("evaluate", "scores", *common, "--rewards", "rule:digits").status == 0
    assert heedful("evaluate", "win-rate", *common, "--rewards", "rule:digits", "--baseline", thinker()).status == 0
    perplexity = ["--data", chats("sft"), "--model", thinker(), "--thinking", "off", "--dtype", "float32"]
    assert heedful("evaluate", "perplexity", *perplexity).status == 0


def test_a_template_that_loops(train, refused, chats, tiny, written, monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 0.1)
    loop = written(
        "圈.jinja", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ messages }}"
    )
    refused(
        train("ppo", "--chat-template", loop, data_file=chats("ppo"), model=tiny()),
        "did not render a conversation of 1 message within 0.1 seconds", "it probably loops",
    )  # fmt: skip


def test_a_template_that_renders_apart(train, refused, chats, tiny, written):
    """Shown token by token, before anything is written. A reward model only reads, so nothing parts for it."""
    apart = written("分.jinja", "{{ messages | length }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    for command in ("sft", "ppo"):
        outcome = train(command, "--chat-template", apart, data_file=chats(command), model=tiny())
        refused(outcome, ":1: the chat template of", "they differ", "> 0 '1' '2'", "another --chat-template")
        assert "\n> 0    '1'" in outcome.err
    pairs = written("对.jsonl", [{"prompt": QUESTION, "chosen": "您好！", "rejected": "不好"}] * 3)
    outcome = train("reward", "--chat-template", apart, data_file=pairs, model=tiny())
    assert outcome.status == 0, outcome.err


TOOLS = [{"type": "function", "function": {"name": "加", "parameters": {}}}]
CALLING = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "加", "arguments": {"x": 1}}}]}


def test_tools(train, written, thinker, tmp_path):
    """A reward model reads them too, in this process and over HTTP (tests/rewards/test_serve.py)."""
    asked = {"prompt": [*QUESTION, CALLING, {"role": "tool", "content": "2"}], "tools": TOOLS}
    path = written("工具.jsonl", [asked | {"chosen": "二", "rejected": [CALLING]}] * 3)
    outcome = train("reward", data_file=path, model=thinker())
    assert outcome.status == 0, outcome.err
    reward = f"model:{tmp_path / '运行' / 'final'}"
    prompts = written("问.jsonl", [asked] * 3)
    outcome = train("grpo", "--rewards", reward, data_file=prompts, model=thinker(), output=tmp_path / "再来")
    assert outcome.status == 0, outcome.err
    assert json.loads((tmp_path / "再来" / "summary.json").read_text())["rewards"] == [reward]
