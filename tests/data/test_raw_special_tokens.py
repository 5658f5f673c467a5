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
    """``run(command, records, *flags)`` trains one step, and returns what was said and the folder."""

    def train(command, records, *flags):
        data, output = tmp_path / f"{command}.jsonl", tmp_path / f"runs {command} {len(flags)}"
        data.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
        words = [
            command,
            "--model",
            tiny("gpt2"),
            "--data",
            data,
            "--output",
            output,
            "--eval-fraction=0",
            "--device=cpu",
        ]
        monkeypatch.setattr("sys.argv", ["heedful", *map(str, words), "--sample-every=0", *flags])
        status = main()
        said = capsys.readouterr().err
        assert not status, said
        return said, output

    return train


RECORDS = {
    "sft": [{"prompt": RENDERED, "completion": f"{i} 好<|end|>"} for i in range(4)],
    "reward": [{"prompt": RENDERED, "chosen": f"{i} 好<|end|>", "rejected": "坏<|end|>"} for i in range(4)],
    "dpo": [{"prompt": RENDERED, "chosen": f"{i} 好<|end|>", "rejected": "坏<|end|>"} for i in range(4)],
    "kto": [{"prompt": f"{i}{RENDERED}", "completion": "好<|end|>", "label": i % 2 == 0} for i in range(4)],
    "grpo": [{"prompt": f"{i}{RENDERED}"} for i in range(4)],
}
STEP = dict.fromkeys(("sft", "reward", "dpo", "kto"), ("--max-steps=1", "--batch-size=4"))
STEP["grpo"] = (
    *("--steps=1", "--rollout-batch-size=4", "--samples-per-prompt=2", "--max-new-tokens=4"),
    *("--minibatch-size=4", "--rewards=rule:length:1-4"),
)


@pytest.mark.parametrize(
    "command", [c if c in ("sft", "dpo") else pytest.param(c, marks=pytest.mark.exhaustive) for c in RECORDS]
)
def test_rendered_text_is_warned_of_once(run, command):
    """The line names the tokens, their share, the first place and the option. With the option there is none."""
    said, _ = run(command, [*RECORDS[command], {**RECORDS[command][0], "prompt": "plain 文字"}], *STEP[command])
    assert said.count("WARNING") == 1
    (line,) = (line for line in said.splitlines() if "WARNING" in line)
    count = "5 of 5" if command in ("sft", "reward", "dpo", "kto") else "4 of 5"
    for fragment in (count, "<|end|>", "<|user|>", f"{command}.jsonl:1", "--special-tokens read", "letter by letter"):
        assert fragment in line
    said, folder = run(command, RECORDS[command], *STEP[command], "--special-tokens=read")
    assert "WARNING" not in said
    assert "special_tokens: read" in (folder / "config.yaml").read_text(encoding="utf-8")


def test_few_special_tokens_are_no_reason_to_warn(run):
    said, _ = run("sft", [RECORDS["sft"][0], *({"prompt": "一", "completion": "二"} for _ in range(3))], *STEP["sft"])
    assert "WARNING" not in said
