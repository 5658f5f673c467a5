"""Raw text that a chat template has already rendered: a warning, and the option that reads its special tokens."""

import json

import pytest
from tokenizers import processors

from heedful import Message
from heedful.cli.main import main
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
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<|cls|>"
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|cls|> $A", pair="<|cls|> $A $B", special_tokens=[("<|cls|>", bos)]
    )
    renderer = Renderer(tokenizer, "read")
    assert renderer.prompt_ids("<|cls|>a") == renderer.prompt_ids("a") == [bos, *renderer.encoder.literal("a")]
    for prompt, response in (("", "<|cls|>ab"), ("<|cls|>a", "b"), ("a", "b"), ("", "ab")):
        asked, answer, _ = renderer.written(prompt, response)
        assert asked + answer == [bos, *renderer.encoder.literal("ab"), EOS]


@pytest.fixture
def run(tiny, tmp_path, capsys, monkeypatch):
    """``run(records, *flags)`` trains one step, and returns what was said and the folder."""

    def train(records, *flags):
        data, output = tmp_path / "sft.jsonl", tmp_path / f"runs {len(flags)}"
        data.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
        words = ["--model", tiny("gpt2"), "--data", data, "--output", output, "--eval-fraction=0", "--device=cpu"]
        words += ["--sample-every=0", "--max-steps=1", "--batch-size=4", *flags]
        monkeypatch.setattr("sys.argv", ["heedful", "sft", *map(str, words)])
        status = main()
        said = capsys.readouterr().err
        assert not status, said
        return said, output

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
