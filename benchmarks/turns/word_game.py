"""A game with tools, learned by a tiny model: the environment of `same_episodes.py`, in TRL's form.

python benchmarks/turns/word_game.py --seeds 0 1 2 --output runs/word-game

A word is one of eight. A guess costs 1/8, a hint tells a letter and costs nothing, a word that was found pays 1: who
asks first and then guesses right gets .875. SFT shows games that ask and games that guess by chance; PPO by turns
learns the game. Prints the mean reward of each step, and some episodes before and after.
"""

import argparse
import json
import random
import runpy
from pathlib import Path
from typing import Any

from transformers.utils import get_json_schema

import heedful
from heedful.models.tiny import make_tiny_model

FILE = Path(__file__).parents[1] / "peers" / "word_game.py"
WORDS = ["plum", "fig", "kiwi", "lime", "date", "apple", "melon", "grape"]
TEMPLATE = """\
{%- if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}<|end|>{% endif %}
{%- for message in messages %}
{{- '<|assistant|>' if message.role == 'assistant' else '<|user|>' }}
{{- '<tool_response>' + message.content + '</tool_response>' if message.role == 'tool' else message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", ' }}
{{- '"arguments": ' + (call.function.arguments | tojson) + '}</tool_call>' }}
{%- endfor %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""


def environment() -> Any:
    return runpy.run_path(str(FILE))["WordGame"]()


def tools() -> list[dict[str, Any]]:
    game = environment()
    return [get_json_schema(getattr(game, name)) for name in ("guess", "hint", "look")]


def conversation(draw: random.Random) -> dict[str, Any]:
    """A game without much sense: half of the games ask first, and the others guess by chance."""
    game, word = environment(), draw.choice(WORDS)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Find the word." + game.reset(word)}]

    def call(name: str, **arguments: Any) -> None:
        function = {"name": name, "arguments": arguments}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )
        result = getattr(game, name)(**arguments)
        messages.append(
            {"role": "tool", "name": name, "content": result if isinstance(result, str) else json.dumps(result)}
        )

    guess = draw.choice(WORDS)
    if draw.random() < 0.5:
        call("hint", place=0)
        guess = word
    call("guess", word=guess)
    messages.append({"role": "assistant", "content": "Done."})
    return {"messages": messages, "tools": tools()}


def texts(conversations: list[dict[str, Any]]) -> list[str]:
    """What the tokenizer learns from."""
    said = [
        str(message["content"]) + json.dumps(message.get("tool_calls", ""))
        for one in conversations
        for message in one["messages"]
    ]
    return [*said, *[json.dumps(tool) for tool in tools()] * 100]


def sft(output: Path) -> Path:
    draw = random.Random(0)
    conversations = [conversation(draw) for _ in range(4096)]
    base = output / "base"
    if not base.exists():
        make_tiny_model(
            "qwen3",
            base,
            hidden_size=64,
            max_length=1024,
            initializer_range=0.1,
            texts=texts(conversations),
            vocab_size=640,
        )
        (base / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    config = heedful.SFTConfig(
        model=str(base),
        output=output / "sft",
        max_steps=300,
        batch_size=16,
        learning_rate=3e-3,
        device="cpu",
        dtype="float32",
        eval_fraction=0.0,
        sample_every=0,
    )
    if not (config.folder / "final").exists():
        heedful.train_sft(config, data=conversations)
    return config.folder / "final"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/word-game"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    model = sft(options.output)
    draw = random.Random(1)
    prompts = [
        {"prompt": [{"role": "user", "content": "Find the word."}], "word": draw.choice(WORDS)} for _ in range(512)
    ]
    for seed in options.seeds:
        config = heedful.PPOConfig(
            model=str(model),
            output=options.output / f"ppo-{seed}",
            environment=(f"python:{FILE}:WordGame",),
            action="turn",
            seed=seed,
            steps=options.steps,
            max_turns=4,
            max_new_tokens=256,
            max_prompt_tokens=512,
            critic="separate",
            rollout_batch_size=64,
            minibatch_size=32,
            ppo_epochs=2,
            learning_rate=5e-4,
            lr_schedule="constant",
            kl_coef=0.0,
            device="cpu",
            dtype="float32",
            eval_fraction=0.0,
            sample_every=0,
        )
        metrics = heedful.train_ppo(config, data=prompts).metrics
        print(seed, [round(score, 2) for score in metrics["reward/score_mean"].dropna()], flush=True)


if __name__ == "__main__":
    main()
