"""docs/thinking.md shows real runs: `python tests/test_thinking_page.py` writes them into it, the test runs them again."""

import json
import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from heedful import GRPOConfig, SFTConfig, train_grpo, train_sft
from heedful.configs.options import SamplingOptions, TemplateOptions
from heedful.data import read_demonstrations, read_prompts
from heedful.data.chat import Renderer
from heedful.data.loading import encode_demonstrations, encode_prompts
from heedful.engines.sampler import make_sampler
from heedful.models import freeze, load_policy, load_tokenizer
from heedful.models.tokenizer import load_chat_tokenizer

PAGE = Path(__file__).parents[1] / "docs" / "thinking.md"
WORDS = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
"""How Qwen's tokenizers cut text before they merge bytes, English contractions left out."""
TEMPLATE = Path(__file__).parent / "templates" / "qwen3_type.jinja"
SUMS = [(1, 2), (2, 2), (3, 4), (5, 3)]
ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}
"""A tool."""


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


DEMONSTRATIONS = [
    {"messages": messages}
    for a, b in SUMS
    for messages in (
        [user(f"Think: {a} + {b}"), assistant(f"<think>\n{a} and {b} is {a + b}\n</think>\n\n{a + b}")],
        [user(f"{a} + {b}"), assistant(f"{a + b}")],
    )
]
TOOLS = {
    "tools": [ADD],
    "messages": [
        user("1 + 2"),
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "reasoning_content": "1 and 2 is 3", "content": "3"},
    ],
}


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def make_model(folder):
    """A tiny model with Qwen3's architecture and a template of its type. Its tokenizer knows the words of the data."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(WORDS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, min_frequency=1, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    texts = [message.get("content") or "" for record in [*DEMONSTRATIONS, TOOLS] for message in record["messages"]]
    tokenizer.train_from_iterator(
        [*texts, json.dumps(TOOLS), TEMPLATE.read_text(encoding="utf-8"), "\n\n"] * 2, trainer
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[0], additional_special_tokens=special[1:]
    )
    fast.add_tokens([f"<{slash}{tag}>" for tag in ("think", "tool_call", "tool_response") for slash in ("", "/")])
    fast.chat_template = TEMPLATE.read_text(encoding="utf-8")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(fast), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=0,
        pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = [0, fast.convert_tokens_to_ids("<|im_end|>")]
    model.save_pretrained(folder)
    fast.save_pretrained(folder)


def marked(renderer, prompt, response, *, said="learned"):
    """A line of text for each turn of the prompt, and one for the tokens that are learned (or were written)."""
    starts = [i for i, token in enumerate(prompt) if token == prompt[0]]
    turns = [prompt[i:j] for i, j in zip(starts, [*starts[1:], len(prompt)], strict=True)]
    system = [turn for turn in turns if renderer.decode(turn[1:2]) == "system"]
    lines = [f"({len(turn)} tokens of the system message, with the tools)" for turn in system]
    lines += [f"prompt   {json.dumps(renderer.decode(turn))}" for turn in turns[len(system) :]]
    return "\n".join([*lines, f"{said:8} {json.dumps(renderer.decode(response))}"])


def learned(folder, record, *, thinking="default"):
    renderer = Renderer(load_chat_tokenizer(folder, TemplateOptions(thinking=thinking)))
    with tempfile.TemporaryDirectory() as place:
        demonstrations = read_demonstrations(write(Path(place) / "d.jsonl", [record]))
    examples, _ = encode_demonstrations(demonstrations, renderer, max_length=256, action="error")
    return [marked(renderer, example.prompt, example.response) for example in examples]


def answered(folder, question):
    """What a model reads and writes, greedily."""
    renderer = Renderer(load_tokenizer(folder))
    policy = load_policy(folder, device=torch.device("cpu"), compute_dtype=torch.float32)
    freeze(policy)
    with tempfile.TemporaryDirectory() as place:
        prompts = read_prompts(write(Path(place) / "p.jsonl", [{"prompt": [user(question)]}]))
    encoded, _ = encode_prompts(prompts, renderer, max_length=200, action="error")
    sampler = make_sampler(SamplingOptions(temperature=0.0, max_new_tokens=32), renderer, policy)
    rollouts = sampler.generate(policy, encoded, torch.Generator().manual_seed(0))
    return marked(renderer, encoded[0].ids, rollouts.own_ids()[0], said="written")


def learned_parts(model):
    """The parts of the page that show what is learned of a record."""
    return {
        "thinks": learned(model, DEMONSTRATIONS[0])[0],
        "plain": learned(model, DEMONSTRATIONS[1])[0],
        "plain-off": learned(model, DEMONSTRATIONS[1], thinking="off")[0],
        "tools": learned(model, TOOLS)[1],
    }


def run(place):
    """The parts of the page by name, and the rows that the rewards saw."""
    make_model(place / "model")
    model = str(place / "model")
    parts = learned_parts(model)
    machine = {"device": "cpu", "dtype": "float32", "eval_fraction": 0.0, "sample_every": 0, "eval_every": 0}
    sft = SFTConfig(
        model=model, data=write(place / "demonstrations.jsonl", DEMONSTRATIONS), output=place / "sft",
        batch_size=8, max_steps=150, learning_rate=5e-3, **machine,
    )  # fmt: skip
    train_sft(sft)
    rows = {}
    for name, thinking, questions, limit in (
        ("on", "on", "Think: {} + {}", 32), ("off", "off", "{} + {}", 32), ("cut", "on", "Think: {} + {}", 6),
    ):  # fmt: skip
        seen = rows[name] = []

        def reward(answer, answer_parts, thinking_parts, truncated, seen=seen, **_):
            seen += zip(thinking_parts, answer_parts, truncated, strict=True)
            return [float(part == right) for part, right in zip(answer_parts, answer, strict=True)]

        prompts = [{"prompt": [user(questions.format(a, b))], "answer": str(a + b)} for a, b in SUMS]
        grpo = GRPOConfig(
            model=str(place / "sft" / "final"), data=write(place / "prompts.jsonl", prompts), output=place / name,
            steps=2, rollout_batch_size=8, minibatch_size=8, samples_per_prompt=2, max_new_tokens=limit, temperature=0.5,
            learning_rate=1e-5, thinking=thinking, **machine,
        )  # fmt: skip
        train_grpo(grpo, rewards=[reward])
    parts["writes-on"] = answered(str(place / "on" / "final"), "Think: 3 + 4")
    parts["writes-off"] = answered(str(place / "off" / "final"), "3 + 4")
    cases = [("on", 32, "on"), ("off", 32, "off"), ("on", 6, "cut")]
    parts["rewards"] = "\n".join(
        f"--thinking {thinking:3} --max-new-tokens {limit:<2}   thinking_parts {thought!r:16} answer_parts {answer!r:4} "
        f"truncated {cut}"
        for thinking, limit, name in cases
        for thought, answer, cut in [of_the_question(rows[name])]
    )
    return parts, rows


def of_the_question(rows):
    """A row of the question 3 + 4."""
    return next(row for row in rows if (row[0] or "").startswith("3 and 4") or (row[0] is None and row[1] == "7"))


def shown(text, name):
    found = re.search(rf"<!-- {name} -->\n```\n(.*?)\n```\n<!-- /{name} -->", text, re.DOTALL)
    assert found, f"docs/thinking.md has no place for {name}"
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return run(tmp_path_factory.mktemp("思考页"))


def test_the_page_shows_what_is_learned(tmp_path):
    make_model(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    for name, part in learned_parts(str(tmp_path)).items():
        assert shown(text, name)[1] == part


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["writes-on", "writes-off", "rewards"])
def test_the_page_shows_what_happens(ran, name):
    assert shown(PAGE.read_text(encoding="utf-8"), name)[1] == ran[0][name]


@pytest.mark.exhaustive
def test_the_rewards_see_the_parts(ran):
    """Nearly all responses of the trained model; one that is cut off in its thought has no answer."""
    _, rows = ran
    right = {str(a + b): f"{a} and {b} is {a + b}" for a, b in SUMS}
    assert sum(right.get(answer) == thought for thought, answer, _ in rows["on"]) >= 0.8 * len(rows["on"])
    assert all(thought is None and answer is not None for thought, answer, _ in rows["off"])
    assert sum(answer in right for _, answer, _ in rows["off"]) >= 0.8 * len(rows["off"])
    assert all(answer is None and thought is not None and cut for thought, answer, cut in rows["cut"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made, _ = run(Path(folder))
    text = PAGE.read_text(encoding="utf-8")
    for part, content in made.items():
        place = shown(text, part)
        text = text[: place.start(1)] + content + text[place.end(1) :]
    PAGE.write_text(text, encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
