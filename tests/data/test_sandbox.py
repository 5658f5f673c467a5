"""A chat template that computes too much in one operation, or holds too much, is refused at once; others render as before."""

import re
import resource
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from byte_tokenizers import with_template
from cases import often
from heedful import CheckpointError, Message
from heedful.data import sandbox
from heedful.data.chat import Renderer
from heedful.data.sandbox import LARGEST
from heedful.errors import RefusedError
from heedful.models import byte_tokenizer
from refusals import refused

GROWTH = (
    "{{% set ns = namespace(x={start}) %}}"
    "{{% for i in range(60) %}}{{% set ns.x = {step} %}}{{% endfor %}}{{{{ {use} }}}}"
)
X = '{% set x = "a" * 8000000 %}'
TOO_MUCH = {
    "the issue's integer": '{% set x = ("f" * (3000000 * messages|length))|int(base=16) %}{{ (x*x*x) % 7 }}',
    "a squared integer": GROWTH.format(start="3", step="ns.x * ns.x", use="ns.x % 7"),
    "an integer of bytes": X + '{{ (5).from_bytes(x.encode(), "big") % 7 }}',
    "an integer's bytes": '{{ (5).to_bytes(10000000000, "big")|length }}',
    "rounding": "{{ 5|round(-1000000000) }}",
    "repeated text": '{{ "a" * 10000000000 }}',
    "repeated text, turned round": '{{ 10000000000 * "a" }}',
    "a repeated list": "{{ [1] * 10000000000 }}",
    "ljust": '{{ "x".ljust(10000000000) }}',
    "rjust, by a name": '{% set f = "x".rjust %}{{ f(10000000000) }}',
    "rjust, by attr": '{{ ("x"|attr("rjust"))(10000000000) }}',
    "zfill": '{{ "x".zfill(10000000000) }}',
    "center": '{{ "x".center(10000000000) }}',
    "the filter center": '{{ "x"|center(width=10000000000) }}',
    "many of the filter center": '{{ range(100000)|map("center", 60000)|list|length }}',
    "percent": '{{ "%1000000000d" % 5 }}',
    "percent with a star": '{{ "%*d" % (10000000000, 5) }}',
    "percent with decimals": '{{ "%.1000000000f" % 5 }}',
    "percent with names": X + '{{ ("%(a)s" * 1000) % {"a": x} }}',
    "the filter format": '{{ "%1000000000d"|format(5) }}',
    "format": '{{ "{:1000000000d}".format(5) }}',
    "format with a width given": '{{ "{:{w}d}".format(5, w=10000000000) }}',
    "format with one value in many places": X + '{{ ("{0}" * 1000).format(x) }}',
    "format_map": '{{ "{x:>10000000000}".format_map({"x": 5}) }}',
    "tabs": '{{ "\\t".expandtabs(10000000000) }}',
    "translate": '{{ ("a" * 100000).translate({97: "b" * 100000}) }}',
    "batch": '{{ [1, 2]|batch(1000000000, "x")|list|length }}',
    "slice": '{{ [1, 2]|slice(1000000000)|list|length }}',
    "indent": '{{ ("\\n" * 1000000)|indent(100000) }}',
    "tojson": "{{ [1, 2]|tojson(indent=1000000000) }}",
    "wordwrap": '{{ ("a " * 99999)|wordwrap(1, wrapstring="b" * 9999999) }}',
    "urlize": '{{ ("a@" * 8000000)|urlize }}',
    "sum of lists": "{{ (range(100000)|batch(1)|list)|sum(start=[])|length }}",
    "a search from the right": X + '{{ (x + x).rfind("b" + x) }}',
    "strip": X + '{{ x.strip("b" * 8000000 ~ "a") }}',
    "trim": X + '{{ x|trim("b" * 8000000 ~ "a") }}',
    "doubled by ~": GROWTH.format(start='"ab"', step="ns.x ~ ns.x", use="ns.x|length"),
    "doubled by +": GROWTH.format(start='"ab"', step="ns.x + ns.x", use="ns.x|length"),
    "doubled by output": '{% set ns = namespace(x="ab") %}'
    "{% for i in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "replace": GROWTH.format(start='"ab"', step='ns.x.replace("a", ns.x)', use="ns.x|length"),
    "the filter replace": GROWTH.format(start='"ab"', step='ns.x|replace("a", ns.x)', use="ns.x|length"),
    "join": GROWTH.format(start='"ab"', step="ns.x.join(ns.x)", use="ns.x|length"),
    "the filter join": GROWTH.format(start='"ab"', step="ns.x|join(ns.x)", use="ns.x|length"),
    "lists of lists": GROWTH.format(start='["ab"]', step="[ns.x, ns.x]", use="ns.x|tojson"),
    "tuples of tuples": GROWTH.format(start='["ab"]', step="(ns.x, ns.x)", use="ns.x"),
    "dictionaries of dictionaries": GROWTH.format(start='["ab"]', step='{"a": ns.x, "b": ns.x}', use="ns.x|string"),
    "dict of dict": GROWTH.format(start='["ab"]', step="dict(a=ns.x, b=ns.x)", use="ns.x == 1"),
    "namespaces of namespaces": GROWTH.format(start='["ab"]', step="namespace(a=ns.x, b=ns.x)", use="ns.x"),
    "output": '{% for i in range(100000) %}{{ "a" * 1000000 }}{% endfor %}',
    "center of what is safe": '{{ ("x"|safe).center(10000000000) }}',
    "a power": "{{ 9 ** 9 ** 9 }}",
    "the time of a long format": '{{ strftime_now("%1000000000Y") }}',
    "much in all": '{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = "a" * 1000000 %}{% endfor %}',
}  # fmt: skip


@pytest.fixture
def little_memory():
    """2 GB of address space more than now, so that a template that is not refused cannot take all there is."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2 * 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", TOO_MUCH)
def test_it_is_refused(little_memory, monkeypatch, name):
    """For what it would compute, not for the time that it took."""
    if re.fullmatch(r"(\w+) of \1|dict.* of dict.*", name):  # their entries are counted one by one
        monkeypatch.setattr(sandbox, "LARGEST", LARGEST // 16)
    with refused(CheckpointError, "the chat template of 模型 computes too much for a conversation: ", "--chat-temp"):
        Renderer(with_template(TOO_MUCH[name]))


ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": "{% macro m(n) %}{{ m(n - 1) ~ m(n - 1) if n }}{% endmacro %}{{ m(60) }}",
    "a loop that calls itself": "{% for i in [range(9)] recursive %}{% if loop.depth < 60 %}"
    "{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    "filters in filters": "{% for i in range(99999) %}{{ range(99999)|map('abs')|map('abs')|sum }}{% endfor %}",
}


@pytest.mark.parametrize("name", often(ENDLESS, ["loops", "filters in filters"]))
def test_one_that_does_not_end_is_ended(name, monkeypatch):
    """It is refused with the tokenizer's name; what is rendered next is not."""
    monkeypatch.setattr(sandbox, "SECONDS", 0.2)
    renderer = Renderer(byte_tokenizer())
    own, renderer.template.name = renderer.tokenizer.chat_template, "模型"
    renderer.tokenizer.chat_template = own + ENDLESS[name]
    with pytest.raises(CheckpointError, match=r"模型 did not render a conversation of 1 message within 0.2 seconds"):
        renderer.prompt_ids((Message("user", "a"),))
    renderer.tokenizer.chat_template = own
    assert renderer.prompt_ids((Message("user", "a"),))


def test_no_text_of_any_length_is_made_up():
    with pytest.raises(RefusedError, match="'lipsum' is undefined"):
        Renderer(with_template("{{ lipsum(n=1000000000) }}"))


MANY_FEATURES = """
{%- macro shown(message, sep='|') -%}{{ message.role ~ sep ~ message['content']|trim }}{{ caller() if caller }}
{%- endmacro -%}
{%- set ns = namespace(n=0, texts=[], last=messages[-1].content) -%}
{%- for message in messages -%}
{%- if loop.index0 == 1 %}{% continue %}{% endif -%}
{%- set ns.n = ns.n + 1 -%}{%- set ns.texts = ns.texts + [message.content|upper, {'角色': message.role}, ('a', ns.n)] -%}
{{ shown(message) }}{{ loop.cycle('甲', '乙') }}{{ '%s: %03d %(a)s' | replace('%(a)s', '') | format(message.role, ns.n) }}
{{- '{0:>8}|{x}'.format(message.role, x=ns.n) }}{{ '<' * 3 }}{{ 7 // 2 - 3 * 1.5 }}{{ (ns.n + 2) % 3 }}
{%- endfor -%}
{{ ns.texts|tojson }}{{ ns.texts|tojson(indent=2) }}{{ messages|tojson(separators=(',', ':')) }}{{ ns.texts }}
{{ messages|map(attribute='role')|join(', ') }}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}
{{ ', '.join(messages|map(attribute='content')) }}
{{ [1, 2]|sum }}{{ 'a b'.split()|reverse|list }}
{{ 'ab\\ncd'|indent(2) }}{{ 3.14159|round(2) }}{{ '12'|int + 1 }}{{ 'ff'|int(base=16) }}
{%- set block %}{% generation %}{{ bos_token }}{{ ns.last }}{% endgeneration %}{% endset -%}{{ block|length }}{{ nothing }}
{{ messages[0].content.rsplit('o', 1) }}{{ 'abc'.strip('ac') }}{{ messages[1:]|length }}
{%- call shown(messages[0], sep='=') %}呼{% endcall %}{{ '<b>'|e }}{{ (1, 2) in [(1, 2)] }}{{ dict(a=1).items()|list }}
"""


def test_within_the_limits_it_is_the_rendering_of_transformers():
    tokenizer = with_template(MANY_FEATURES)
    turns = [("user", " 你好 o o \n"), ("assistant", "好"), ("user", "再问 <b>&amp; {0} %s")]
    messages = [{"role": role, "content": content} for role, content in turns]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    renderer = Renderer(byte_tokenizer())
    renderer.template.tokenizer = tokenizer
    assert "角色" in expected
    assert "呼" in expected
    conversation = tuple(Message(role, content) for role, content in turns)
    assert renderer.template.text(conversation, add_generation_prompt=True) == expected


def test_what_others_render_in_the_same_process_has_no_limits(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny("qwen3"))
    assert Renderer(tokenizer).prompt_ids((Message("user", "a"),))
    tokenizer.chat_template = f'{{{{ ("a" * {LARGEST + 1})|length }}}}{{{{ ("f" * 2000)|int(base=16) % 7 }}}}'
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False).startswith(
        str(LARGEST + 1)
    )


@pytest.mark.exhaustive
def test_a_long_conversation_may_be_copied_a_few_times():
    """A book of three times the largest value that a short conversation may have."""
    tokenizer = with_template("{{ (messages[0].content * 2)|trim|replace('x', 'yy')|length }}")
    renderer = Renderer(byte_tokenizer())
    renderer.template.tokenizer = tokenizer
    rendered = renderer.template.text((Message("user", "书x" * (LARGEST * 3 // 2)),), add_generation_prompt=True)
    assert rendered == str(LARGEST * 3 // 2 * 6)
