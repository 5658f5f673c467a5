"""Values for a chat template's variables: found in the template, refused if it has none, and saved with it."""

import pytest
from transformers import AutoTokenizer

from heedful import CheckpointError, ConfigError
from heedful.models import byte_tokenizer
from heedful.models.tokenizer import set_defaults, variables_of

QUESTION = [{"role": "user", "content": "你好"}]
EMPTY = "<think>\n\n</think>\n\n"


def with_template(template):
    tokenizer = byte_tokenizer()
    tokenizer.name_or_path = "模型"
    tokenizer.chat_template = template
    return tokenizer


def rendered(tokenizer, **variables):
    return tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True, **variables)


@pytest.fixture
def qwen3(thinker):
    return AutoTokenizer.from_pretrained(thinker())


def test_a_value_becomes_the_templates_default(qwen3, tmp_path):
    """Plain transformers renders with it after the tokenizer was saved, and may still say otherwise."""
    before = rendered(qwen3)
    set_defaults(qwen3, "off", {})
    qwen3.save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert rendered(saved) == before + EMPTY == rendered(saved, enable_thinking=False)
    assert rendered(saved, enable_thinking=True) == before
    # Later settings win over earlier ones.
    set_defaults(saved, "on", {})
    assert rendered(saved) == before
    set_defaults(saved, "off", {})
    assert rendered(saved) == before + EMPTY


def test_without_settings_the_template_stays_as_it_is(qwen3):
    before = qwen3.chat_template
    set_defaults(qwen3, "default", {})
    assert qwen3.chat_template is before


def test_any_json_value_arrives():
    """Also one with quotes, line breaks and Jinja's own signs in it, in a template that begins with a line break."""
    for value in (True, False, None, 3, -0.5, "a'b\"c\\ 中\n%} {{", ["x", {"y": None}], {}):
        tokenizer = with_template("\n{{ wanted | tojson }}{% if wanted is not defined %}nothing{% endif %}")
        expected = rendered(tokenizer, wanted=value)
        set_defaults(tokenizer, "default", {"wanted": value})
        assert rendered(tokenizer) == expected


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_the_switch_is_found_in_the_template(name):
    """Under either name, also where the template has a default of its own (SmolLM3, DeepSeek-V3.1)."""
    tokenizer = with_template(
        f"{{% if {name} is not defined %}}{{% set {name} = true %}}{{% endif %}}{{{{ 'yes' if {name} else 'no' }}}}"
    )
    for thinking, text in (("on", "yes"), ("off", "no")):
        set_defaults(tokenizer, thinking, {})
        assert rendered(tokenizer) == text


def test_a_default_of_the_templates_own():
    """As LFM2.5 writes it."""
    tokenizer = with_template("{% set keep = keep | default(false) %}{{ keep }}")
    set_defaults(tokenizer, "default", {"keep": True})
    assert rendered(tokenizer) == "True"


def test_a_template_may_be_several(qwen3):
    qwen3.chat_template = {"default": qwen3.chat_template, "tool_use": "{{ tools }}"}
    set_defaults(qwen3, "off", {})
    assert rendered(qwen3).endswith(EMPTY)


@pytest.mark.parametrize(
    ("template", "thinking", "variables", "fragments"),
    [
        (None, "on", {}, ["--thinking on", "模型 has no chat template"]),
        ("{{ messages }}", "off", {}, ["--thinking off", "no switch", "enable_thinking or thinking", "reads no variable"]),
        ("{{ messages }}{{ effort }}", "on", {}, ["no switch", "it reads effort", "leave --thinking out"]),
        # A variable of the template's own is no switch.
        ("{% for m in messages %}{% if m %}{% set thinking = m %}{% endif %}{{ thinking }}{% endfor %}", "on", {}, ["no sw"]),
        ("{{ effort }}{{ bos_token }}", "default", {"efort": 1}, ["does not read 'efort'", "it reads effort"]),
        ("{{ messages }}", "default", {"messages": []}, ["does not read 'messages'"]),
        ("{{ thinking }}", "on", {"thinking": True}, ["both set thinking"]),
    ],
)  # fmt: skip
def test_what_a_template_does_not_read_is_refused(template, thinking, variables, fragments):
    tokenizer = with_template(template)
    with pytest.raises(ConfigError) as refused:
        set_defaults(tokenizer, thinking, variables)
    for fragment in fragments:
        assert fragment in str(refused.value)
    assert tokenizer.chat_template == template


def test_no_jinja():
    with pytest.raises(CheckpointError, match=r"模型: the chat template is not valid Jinja: .*\(line 2\)"):
        set_defaults(with_template("{{ messages }}\n{% for m in %}"), "on", {})


def test_variables_are_those_that_a_caller_may_set(qwen3):
    assert variables_of(qwen3.chat_template, "") == {"messages", "tools", "add_generation_prompt", "enable_thinking"}
