"""Responses that think, in templates that open the thought, close it, strip it or know nothing of it."""

import pytest
from transformers import AutoTokenizer

from heedful import CheckpointError, DataError, Message, Prompt
from heedful.data.chat import Renderer, RewardInputs
from heedful.data.template_check import Sample, check_rendering
from heedful.models import byte_tokenizer
from heedful.models.tokenizer import set_defaults
from heedful.rewards import Completion
from heedful.types import plain_response, split_thinking
from refusals import refused

QUESTION = (Message("user", "一加一？"),)
ASKED = "<|im_start|>user\n一加一？<|im_end|>\n<|im_start|>assistant\n"
THOUGHT = "<think>\n1+1\n</think>\n\n二"
EMPTY = "<think>\n\n</think>\n\n"

TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}CONTENT{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}PROMPT{% endif %}"
)


def template(content="{{ m.content }}", prompt=""):
    return TURNS.replace("CONTENT", content).replace("PROMPT", prompt)


SHOWING = (
    "{% if m.reasoning_content is defined %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content }}"
)
TEMPLATES = {
    "plain": template(),
    "strips white space": template("{{ m.content | trim }}"),
    # As QwQ and Qwen3.5: the generation prompt opens the thought.
    "opens": template(SHOWING, "{{ '<think>\n' }}"),
    # As DeepSeek-R1: it opens the thought, and never shows one.
    "opens and strips": template("{{ m.content.split('</think>')[-1] }}", "{{ '<think>\n' }}"),
    # As LFM2.5: what stands in the content stays as it is, thinking apart is written without line breaks.
    "without line breaks": template(
        "{% if m.thinking is defined %}{{ '<think>' + m.thinking + '</think>' }}{% endif %}{{ m.content }}"
    ),
    # As GLM-4.5: no token ends a turn, and an answer begins with a line break.
    "without an end": (
        "{% for m in messages %}<|user|>{% if m.role == 'assistant' %}<|assistant|>{{ '\n<think></think>\n' }}{% endif %}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|user|><|assistant|>{% endif %}"
    ),
    # As DeepSeek-V3.1: the thought that is open in the prompt is an empty one in the conversation.
    "opens and closes": template(
        "{% if m.role == 'assistant' %}</think>{% endif %}{{ m.content.split('</think>')[-1] }}", "<think>"
    ),
    "closes": template("{% if m.role == 'assistant' %}</think>{% endif %}{{ m.content }}", "</think>"),
    "closes in the prompt alone": template(prompt="{{ '<think>\n\n</think>\n\n' }}"),
}


@pytest.fixture
def renderer(thinker):
    """``renderer(template, thinking)``: of the Qwen3-type model, or of one with another template."""

    def make(name=None, thinking="default"):
        tokenizer = AutoTokenizer.from_pretrained(thinker(TEMPLATES.get(name, name)))
        set_defaults(tokenizer, thinking, {})
        return Renderer(tokenizer)

    return make


def learned(renderer, response, prompt=QUESTION, **options):
    return renderer.decode(renderer.response_ids(response, prompt=prompt, **options))


def test_thinking_and_answer():
    for text, thinking, answer in (
        ("二", None, "二"),
        (THOUGHT, "1+1", "二"),
        ("  <think>a</think>b", "a", "b"),
        (EMPTY + "二", "", "二"),
        ("<think>\n没完", "没完", None),
        ("<think>", "", None),
        ("", None, ""),
        ("a <think>b</think>", None, "a <think>b</think>"),
        ("<think>a</think>b</think>c", "a", "b</think>c"),
        ("</think>b", None, "</think>b"),
    ):
        assert split_thinking(text) == (thinking, answer)
        completion = Completion(Prompt("问", "d:1"), text)
        assert (completion.thinking, completion.answer) == (thinking, answer)


def test_what_follows_the_generation_prompt_is_learned(renderer):
    """Qwen3's: an empty thought where there is none, line breaks around one. It is the template's own rendering, id by id."""
    for response, shown in (
        ("二", EMPTY + "二"),
        (THOUGHT, THOUGHT),
        ("<think>1+1</think>二", THOUGHT),
        (EMPTY + "二", EMPTY + "二"),
    ):
        own = renderer()
        assert learned(own, response) == shown + "<|im_end|>"
        whole = own.tokenizer.apply_chat_template(
            [{"role": "user", "content": QUESTION[0].content}, {"role": "assistant", "content": response}],
            tokenize=True,
        )["input_ids"]
        assert own.written_ids(QUESTION, response) == whole[:-1]
        assert own.decode(whole[-1:]) == "\n"
        assert learned(own, response, truncated=True) == shown


def test_thinking_that_is_off_is_in_the_prompt(renderer):
    own = renderer(thinking="off")
    assert own.decode(own.prompt_ids(QUESTION)) == ASKED + EMPTY
    assert learned(own, "二") == learned(own, EMPTY + "二") == "二<|im_end|>"
    with pytest.raises(DataError, match=r"the response has thinking .*thinking is off\. Use --thinking on"):
        learned(own, THOUGHT)
    with pytest.raises(DataError, match="the response has thinking"):
        learned(own, "<think>\n没完", truncated=True)


def test_earlier_thinking_is_what_the_template_makes_of_it(renderer):
    """Qwen3's leaves it out, whether it stands in the content or by itself."""
    for answer in (Message("assistant", THOUGHT), Message("assistant", "二", thinking="1+1")):
        own = renderer()
        prompt = (*QUESTION, answer, Message("user", "再加一？"))
        text = own.decode(own.prompt_ids(prompt))
        assert text == f"{ASKED}二<|im_end|>\n<|im_start|>user\n再加一？<|im_end|>\n<|im_start|>assistant\n"
        assert learned(own, THOUGHT, prompt) == THOUGHT + "<|im_end|>"


OTHERS = [
    # Learned as it is where the template knows nothing of thinking.
    ("plain", "<think>1+1</think>二", "<think>1+1</think>二"),
    ("plain", EMPTY + "二", EMPTY + "二"),
    ("plain", " 二 ", " 二 "),
    # Where the prompt opens the thought, the response goes on inside.
    ("opens", THOUGHT, "1+1\n</think>\n\n二"),
    ("opens", EMPTY + "二", "\n</think>\n\n二"),
    ("opens and strips", THOUGHT, "1+1\n</think>\n\n二"),
    ("opens and strips", "<think>1+1</think>二", "1+1</think>二"),
    ("without line breaks", "<think>\n1+1</think>\n二", "<think>\n1+1</think>\n二"),
    ("without line breaks", Message("assistant", "二", thinking="1+1"), "<think>1+1</think>二"),
    ("plain", Message("assistant", "二", thinking="1+1"), THOUGHT),
    ("opens", Message("assistant", "二", thinking="1+1"), "1+1\n</think>\n\n二"),
    ("opens", "<think>1+1</think>二", "1+1</think>二"),
    ("opens and closes", "<think>1+1</think>二", "1+1</think>二"),
    ("closes", "二", "二"),
    ("closes in the prompt alone", "二", "二"),
]  # fmt: skip


def test_other_templates(renderer):
    for name, response, shown in OTHERS:
        own = renderer(name)
        assert learned(own, response) == shown + "<|im_end|>"
        # What a policy writes is given back whole, also where the prompt had begun it.
        ids = own.response_ids(response, prompt=QUESTION)[:-1]
        said = own.response_text(ids, prompt=QUESTION)
        assert split_thinking(said)[1] == split_thinking(plain_response(response))[1]
        assert own.turn_text(own.prompt_ids(QUESTION), ids, truncated=False) == said, "in later turns too"
        check_rendering(own, [Sample(QUESTION, response, "d:1")])


def test_a_template_without_an_end_of_turn(renderer):
    """Then EOS ends a response, where the template goes on with the next turn's token."""
    own = renderer("without an end")
    assert learned(own, "二") == "\n<think></think>\n二<|endoftext|>"
    assert own.decode(own.read_ids(QUESTION, "二", truncated=True)).endswith("<|assistant|>\n<think></think>\n二")
    check_rendering(own, [Sample(QUESTION, "二", "d:1")])


def test_a_raw_prompt_may_open_a_thought(renderer):
    own = renderer()
    assert own.response_text(own.encoder.literal("a</think>b"), prompt="问 <think>\n") == "<think>\na</think>b"
    assert own.response_text(own.encoder.literal("a"), prompt="问") == "a"


def test_tags_that_are_special_tokens(renderer):
    """In an answer they are the tokens that the model writes; typed by a user they are letters, as every special token."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]})
    tokenizer.chat_template = TEMPLATES["plain"]
    own, tags = Renderer(tokenizer), {tokenizer.convert_tokens_to_ids(tag) for tag in ("<think>", "</think>")}
    assert tags <= set(own.response_ids(THOUGHT, prompt=QUESTION))
    assert tags <= set(own.prompt_ids((*QUESTION, Message("assistant", THOUGHT), *QUESTION)))
    assert tags.isdisjoint(own.prompt_ids((Message("user", THOUGHT),)))
    assert own.decode(own.prompt_ids((Message("user", THOUGHT),))).count("<think>") == 1


READ = [
    (None, THOUGHT, THOUGHT + "<|im_end|>"),
    (None, "二", EMPTY + "二<|im_end|>"),
    (None, "<think>\n没完", "<think>\n没完<|im_end|>"),
    # A template that knows nothing of thinking shows the answer.
    ("plain", THOUGHT, "二<|im_end|>"),
    ("plain", "<think>\n没完", "<|im_end|>"),
    ("plain", "二", "二<|im_end|>"),
    ("opens and strips", THOUGHT, "二<|im_end|>"),
    ("without line breaks", THOUGHT, "<think>1+1</think>二<|im_end|>"),
]  # fmt: skip


def test_a_reward_model_reads_what_its_template_shows(renderer):
    for name, response, shown in READ:
        own = renderer(name)
        ids = RewardInputs(own.tokenizer).encode(QUESTION, response)["input_ids"]
        assert own.decode(ids) == ASKED + shown
        cut = RewardInputs(own.tokenizer).encode(QUESTION, response, truncated=True)["input_ids"]
        assert own.decode(cut) == ASKED + shown.removesuffix("<|im_end|>")


def test_a_reward_model_whose_thinking_is_off_reads_what_a_policy_thinks(renderer):
    """A thought that was cut off is no reason to stop: it is no answer."""
    own = renderer(thinking="off")
    assert own.decode(own.read_ids(QUESTION, THOUGHT)) == ASKED + THOUGHT + "<|im_end|>"
    assert own.decode(own.read_ids(QUESTION, "<think>\n没完", truncated=True)) == ASKED + EMPTY


def test_an_encoder_reads_the_answer():
    inputs = RewardInputs(byte_tokenizer(encoder=True))
    assert inputs.encode(QUESTION, THOUGHT) == inputs.encode(QUESTION, "二")
    assert inputs.encode(QUESTION, "<think>没完") == inputs.encode(QUESTION, "")
    assert inputs.encode("一加一？", THOUGHT) != inputs.encode("一加一？", "二")


def test_a_template_that_strips_white_space_is_learned_as_it_renders(renderer):
    own = renderer("strips white space")
    for response in (" 二\n", "二"):
        assert learned(own, response) == "二<|im_end|>"
        assert learned(own, response, truncated=True) == "二"
        check_rendering(own, [Sample(QUESTION, response, "d:1")])


def test_a_token_of_prompt_and_response_belongs_to_the_response(renderer):
    """ "\n" at the end of the prompt and "\n" at the beginning of the response are one token in the whole."""
    own = renderer("opens")
    own.tokenizer.add_tokens(["\n\n"])
    prompt, response, _ = own.written(QUESTION, EMPTY + "二")
    assert [*prompt, *response] == own.whole_ids(QUESTION, EMPTY + "二")[: len(prompt + response)]
    assert own.decode(response) == "\n\n</think>\n\n二<|im_end|>"
    assert prompt == own.prompt_ids(QUESTION)[:-1]
    check_rendering(own, [Sample(QUESTION, EMPTY + "二", "d:1")])


@pytest.mark.parametrize(("name", "response", "fragments"), [
    # Without a generation prompt the header of the answer would never be learned.
    ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}", "二",
     ["ignores add_generation_prompt"]),
    # The prompt opens a thought that the demonstration does not have.
    ("opens and strips", "二", ["opens a thought and this response has none", "--thinking off"]),
    # The prompt changes once there is an answer.
    ("{{ messages | length }}" + TEMPLATES["plain"], "二", ["a prompt ends in another way", "another --chat-template"]),
])  # fmt: skip
def test_a_template_that_renders_apart(renderer, name, response, fragments):
    """The report shows both sides token by token around the place where they part, which is marked."""
    own = renderer(name)
    with refused(CheckpointError, "d:7: the chat template of ", *fragments) as error:
        check_rendering(own, [Sample(QUESTION, response, "d:7")])
    message = str(error.value)
    rows = message.splitlines()[1:-1]
    parted = [row for row in rows if row.startswith(">")]
    assert len(parted) == 1
    ours, theirs = own.written_ids(QUESTION, response), own.whole_ids(QUESTION, response)
    index = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    assert parted[0].split()[1:] == [str(index), *(repr(own.decode(ids[index : index + 1])) for ids in (ours, theirs))]
    around = ours[max(0, index - 4) : index + 5]
    assert [token for token in around if repr(own.decode([token])) not in message] == []


def test_all_that_is_read_of_a_strange_template_is_its_own_rendering(renderer):
    """A reward model writes nothing, so its prompt may end as it likes."""
    own = renderer("opens and strips")
    check_rendering(own, [Sample(QUESTION, THOUGHT, "d:1"), Sample(QUESTION, "二", "d:2")], read=True)
