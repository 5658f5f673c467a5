"""Raw text that a chat template has already rendered: a warning, and the option that reads its special tokens."""

import pytest

from byte_tokenizers import with_bos
from heedful import Message
from heedful.data.chat import Renderer, RewardInputs
from heedful.models import byte_tokenizer
from heedful.models.tiny import END_OF_TEXT, TURN_END

TOKENIZER = byte_tokenizer()
EOS, END = (TOKENIZER.convert_tokens_to_ids(token) for token in (END_OF_TEXT, TURN_END))
RENDERED = "<|user|>你好<|end|><|assistant|>"
QUESTION = (Message("user", "你好"),)


def test_rendered_text_has_the_ids_of_the_messages():
    """With one end, whether the text has it or not; in reward models too. Without the option all of it is letters."""
    raw, chat = Renderer(TOKENIZER, "read"), Renderer(TOKENIZER)
    expected = chat.written(QUESTION, "好")[:2]
    assert raw.prompt_ids(RENDERED) == chat.prompt_ids(QUESTION)
    assert raw.written(RENDERED, "好<|end|>")[:2] == raw.written(RENDERED, "好<|end|>\n")[:2] == expected
    assert raw.written(RENDERED, "好")[:2] == (expected[0], [*expected[1][:-1], EOS])
    assert raw.written(RENDERED, f"好{END_OF_TEXT}")[:2] == (expected[0], [*expected[1][:-1], EOS])
    assert raw.written(RENDERED, "好", truncated=True)[:2] == (expected[0], expected[1][:-1])
    assert raw.written("", RENDERED + "好<|end|>")[:2] == ([], [*expected[0], *expected[1]])
    inputs = RewardInputs(TOKENIZER, special_tokens="read")
    assert inputs.encode(RENDERED, "好<|end|>")["input_ids"] == [*expected[0], *expected[1]]
    letters = [i for ids in chat.written(RENDERED, "好<|end|>")[:2] for i in ids]
    assert letters.count(END) == 0
    assert chat.decode(letters) == RENDERED + "好<|end|>" + END_OF_TEXT
    assert raw.written(QUESTION, "a<|end|>b") == chat.written(QUESTION, "a<|end|>b")  # messages stay as they are


def test_rendered_text_that_begins_with_bos_gets_no_second_one():
    renderer = Renderer(with_bos(), "read")
    bos = renderer.tokenizer.bos_token_id
    assert renderer.prompt_ids("<|cls|>a") == renderer.prompt_ids("a") == [bos, *renderer.encoder.literal("a")]
    for prompt, response in (("", "<|cls|>ab"), ("<|cls|>a", "b"), ("a", "b"), ("", "ab")):
        asked, answer, _ = renderer.written(prompt, response)
        assert asked + answer == [bos, *renderer.encoder.literal("ab"), EOS]


@pytest.fixture
def run(tiny, tmp_path, written, heedful):
    """``run(records, *flags)`` trains one step, and returns what was said and the folder."""

    def train(records, *flags):
        output = tmp_path / f"runs {len(flags)}"
        words = ["--model", tiny("gpt2"), "--data", written("sft.jsonl", records), "--output", output]
        words += ["--eval-fraction=0", "--device=cpu", "--sample-every=0", "--max-steps=1", "--batch-size=4"]
        done = heedful("sft", *words, *flags)
        assert done.status == 0, done.err
        return done.err, output

    return train


def test_rendered_text_is_warned_of_once(run):
    """The line names the tokens, their share, the first place and the option. With the option there is none."""
    records = [{"prompt": RENDERED, "completion": f"{i} 好<|end|>"} for i in range(4)]
    said, _ = run([*records, {"prompt": "plain 文字", "completion": "好<|end|>"}])
    assert said.count("WARNING") == 1
    (line,) = (line for line in said.splitlines() if "WARNING" in line)
    for fragment in ("5 of 5", "<|end|>", "<|user|>", "sft.jsonl:1", "--special-tokens read", "letter by letter"):
        assert fragment in line
    said, folder = run(records, "--special-tokens=read")
    assert "WARNING" not in said
    assert "special_tokens: read" in (folder / "config.yaml").read_text(encoding="utf-8")
    said, _ = run([records[0], *[{"prompt": "一", "completion": "二"}] * 3], "--seed=1", "--lr-schedule=constant")
    assert "WARNING" not in said, "few of them are no reason to warn"
