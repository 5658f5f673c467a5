"""Thinking, template variables and tools on the command line: what they do, what a saved model keeps, what is refused."""

import io
import json

import pytest
from transformers import AutoTokenizer

from cases import often
from heedful.data import sandbox

TRAINERS = ("sft", "reward", "ppo", "a2c", "grpo", "dpo")
each_trainer = pytest.mark.parametrize(
    "command", [pytest.param(name, marks=() if name in ("sft", "ppo") else pytest.mark.exhaustive) for name in TRAINERS]
)
QUESTION = [{"role": "user", "content": "你好"}]
EMPTY = "<think>\n\n</think>\n\n"
CHATS = {
    "sft": {"messages": [*QUESTION, {"role": "assistant", "content": "您好！"}]},
    "reward": {"prompt": QUESTION, "chosen": "您好！", "rejected": "不好"},
    "ppo": {"prompt": QUESTION},
}
CHATS |= {"a2c": CHATS["ppo"], "grpo": CHATS["ppo"], "dpo": CHATS["reward"]}


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


@each_trainer
def test_what_is_set_is_saved(train, chats, thinker, command, tmp_path):
    """In the run's settings, and in the template of the model that comes out, for any tool that reads it."""
    before = prompt_of(thinker())
    outcome = train(command, "--thinking", "off", data_file=chats(command), model=thinker())
    assert outcome.status == 0, outcome.err
    assert "thinking: 'off'" in (tmp_path / "运行" / "config.yaml").read_text()
    final = tmp_path / "运行" / "final"
    assert prompt_of(final) == before + EMPTY
    # The next stage needs no flag, and may have one.
    outcome = train(command, data_file=chats(command), model=final, output=tmp_path / "再来")
    assert outcome.status == 0, outcome.err
    assert prompt_of(tmp_path / "再来" / "final") == before + EMPTY
    outcome = train(command, "--thinking", "on", data_file=chats(command), model=final, output=tmp_path / "又来")
    assert outcome.status == 0, outcome.err
    assert prompt_of(tmp_path / "又来" / "final") == before


def test_unset_it_passes_nothing(train, chats, thinker, tmp_path):
    assert train("sft", data_file=chats("sft"), model=thinker()).status == 0
    own, saved = (
        AutoTokenizer.from_pretrained(folder).chat_template for folder in (thinker(), tmp_path / "运行" / "final")
    )
    assert saved == own


@each_trainer
def test_a_template_without_a_switch(train, refused, chats, tiny, command):
    refused(
        train(command, "--thinking", "on", data_file=chats(command), model=tiny()),
        "--thinking on: the chat template of", "no switch for thinking", "leave --thinking out",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "fragments"),
    [
        ("{", ["--chat-template-kwargs is not JSON"]),
        ("[1]", ["--chat-template-kwargs must be a JSON object", "'[1]'"]),
        ('{"a": NaN}', ["NaN is not JSON"]),
        ('{"effort": 1}', ["does not read 'effort'", "it reads enable_thinking"]),
    ],
)
def test_variables_that_cannot_be_used(train, refused, chats, thinker, value, fragments):
    refused(train("sft", "--chat-template-kwargs", value, data_file=chats("sft"), model=thinker()), *fragments)


def test_variables_are_passed(train, chats, thinker, tmp_path):
    flags = ["--chat-template-kwargs", '{"enable_thinking": false}']
    assert train("sft", *flags, data_file=chats("sft"), model=thinker()).status == 0
    assert prompt_of(tmp_path / "运行" / "final").endswith(EMPTY)
    # The settings that were written down repeat the run.
    again = train("sft", "--chat-template-kwargs", "", data_file=chats("sft"), model=thinker(), output=tmp_path / "空")
    assert again.status == 0, again.err
    assert "enable_thinking" in (tmp_path / "运行" / "config.yaml").read_text()


@pytest.mark.parametrize("thinking", often(["on", "off"], ["off"]))
def test_chat_and_evaluation_take_it(heedful, chats, thinker, monkeypatch, thinking):
    monkeypatch.setattr("sys.stdin", io.StringIO("你好\n再说\n"))
    flags = ["--thinking", thinking, "--max-new-tokens", "4", "--dtype", "float32"]
    assert heedful("chat", "--model", thinker(), *flags).status == 0
    common = ["--data", chats("ppo"), "--model", thinker(), *flags]
    assert heedful("evaluate", "scores", *common, "--rewards", "rule:digits").status == 0
    assert heedful("evaluate", "win-rate", *common, "--rewards", "rule:digits", "--baseline", thinker()).status == 0
    perplexity = ["--data", chats("sft"), "--model", thinker(), "--thinking", thinking, "--dtype", "float32"]
    assert heedful("evaluate", "perplexity", *perplexity).status == 0


def test_chat_and_evaluation_refuse_it(heedful, chats, tiny):
    for command in (["chat"], ["evaluate", "scores", "--rewards", "rule:digits", "--data", chats("ppo")]):
        outcome = heedful(*command, "--model", tiny(), "--thinking", "off")
        assert outcome.status == 2
        assert "no switch for thinking" in outcome.message
    outcome = heedful("chat", "--raw", "--model", tiny(), "--thinking", "off")
    assert outcome.status == 2
    assert "--raw uses none" in outcome.message


def test_demonstrations_that_think_where_thinking_is_off(train, refused, written, thinker):
    thinks = {"messages": [*QUESTION, {"role": "assistant", "content": "<think>\n想\n</think>\n\n您好！"}]}
    path = written("想.jsonl", [CHATS["sft"], thinks])
    refused(
        train("sft", "--thinking", "off", data_file=path, model=thinker()),
        f"{path}:2: the response has thinking",
        "--thinking on",
    )


@each_trainer
def test_a_template_that_loops(train, refused, chats, tiny, written, monkeypatch, command):
    monkeypatch.setattr(sandbox, "SECONDS", 0.5)
    loop = written(
        "圈.jinja", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ messages }}"
    )
    refused(
        train(command, "--chat-template", loop, data_file=chats(command), model=tiny()),
        "did not render a conversation of 1 message within 0.5 seconds", "it probably loops",
    )  # fmt: skip


@each_trainer
def test_a_template_that_renders_apart(train, refused, chats, tiny, written, command):
    """Shown token by token, before anything is written. A reward model only reads, so nothing parts for it."""
    apart = written("分.jinja", "{{ messages | length }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    outcome = train(command, "--chat-template", apart, data_file=chats(command), model=tiny())
    if command == "reward":
        assert outcome.status == 0, outcome.err
        return
    refused(outcome, ":1: the chat template of", "they differ", "> 0 '1' '2'", "another --chat-template")
    assert "\n> 0    '1'" in outcome.err


def test_a_tool_message_without_a_call(train, refused, written, thinker):
    turns = [*QUESTION, {"role": "tool", "content": "2"}, {"role": "assistant", "content": "二"}]
    path = written("工具.jsonl", [CHATS["sft"], {"messages": turns}])
    refused(
        train("sft", data_file=path, model=thinker()), f"{path}:2: `messages[1]` is the result of a tool", "tool_calls"
    )


TOOLS = [{"type": "function", "function": {"name": "加", "parameters": {}}}]
CALLING = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "加", "arguments": {"x": 1}}}]}
TOOL_CHATS = {
    "sft": {"messages": [*QUESTION, CALLING, {"role": "tool", "content": "2"}, {"role": "assistant", "content": "二"}]},
    "reward": {"prompt": [*QUESTION, CALLING, {"role": "tool", "content": "2"}], "chosen": "二", "rejected": [CALLING]},
    "ppo": {"prompt": [*QUESTION, CALLING, {"role": "tool", "content": "2"}]},
}
TOOL_CHATS |= {"a2c": TOOL_CHATS["ppo"], "grpo": TOOL_CHATS["ppo"], "dpo": TOOL_CHATS["reward"]}


@each_trainer
def test_tools(train, written, thinker, command, tmp_path):
    """A reward model reads them too, in this process and over HTTP (tests/rewards/test_serve.py)."""
    path = written("工具.jsonl", [{**TOOL_CHATS[command], "tools": TOOLS}] * 3)
    outcome = train(command, data_file=path, model=thinker())
    assert outcome.status == 0, outcome.err
    if command == "reward":
        prompts = written("问.jsonl", [{**TOOL_CHATS["ppo"], "tools": TOOLS}] * 3)
        reward = ["--rewards", f"model:{tmp_path / '运行' / 'final'}"]
        outcome = train("grpo", *reward, data_file=prompts, model=thinker(), output=tmp_path / "再来")
        assert outcome.status == 0, outcome.err
        summary = json.loads((tmp_path / "再来" / "summary.json").read_text())
        assert summary["rewards"] == [reward[1]]
