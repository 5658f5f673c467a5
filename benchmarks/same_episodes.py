"""One environment file in TRL 1.16 and in heedful: with the same turns of the policy, tokens, masks and rewards are the same.

python benchmarks/same_episodes.py --trl-python PYTHON --output runs/episodes

PYTHON is that of an environment with TRL: pip install torch==2.13.0 trl==1.16.0 transformers datasets accelerate. Both get a
small random Qwen2 with Qwen2.5's chat template (TRL's copy of it), the same prompts and the environment of
peers/word_game.py, and instead of what the policy would sample the turns below, by row and turn: calls that win, lose, come
twice in one turn, name no tool, have wrong arguments, raise, cannot be read, and words without a call. Exits with 1 if
anything differs.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import heedful
from heedful.algorithms.online.rollout import rollout
from heedful.algorithms.online.start import start
from heedful.data.batches import collate
from heedful.engines.responses import Responses
from heedful.models.tiny import byte_tokenizer

HERE = Path(__file__).parent
TEMPLATE = """
from pathlib import Path
import trl
print((Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text(encoding="utf-8"), end="")
"""


def call(name: str, **arguments: Any) -> str:
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


TURNS = [
    [call("guess", word="pear"), call("guess", word="plum"), "I found it."],
    [call("guess", word="pear") + "\n" + call("guess", word="plum"), "Done."],
    ["I give up."],
    ["Let me see. " + call("hint", place=1), call("fly", to="moon"), call("guess", wort="plum"), "?"],
    [call("hint", place=9), call("hint", place="a"), call("look"), "Hm."],
    ['<tool_call>\n{"name": "guess", "arguments": {"word": "plum"}\n</tool_call>'],
    [call("guess", word="李子<|im_end|>"), "好。"],
    [call("guess", word="pear")] * 6 + ["End."],
]
"""What the policy says, a list for each row."""
PROMPTS = [
    {"prompt": [{"role": "user", "content": f"Game {row}: find the word."}], "word": "plum"}
    for row in range(len(TURNS))
]


def make_model(folder: Path, template: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(
        {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>", "<|endoftext|>"]}
    )
    tokenizer.chat_template = template
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=8192,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


class Forced:
    """In the place of sampling: the next turn of each row, which is known by its prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.said = dict.fromkeys(range(len(TURNS)), 0)

    def generate(self, _policy: Any, prompts: Any, _generator: Any, _version: Any, most: Any, /) -> Responses:
        said = []
        for prompt, limit in zip(prompts, most, strict=True):
            row = int(prompt.prompt.source.rpartition(":")[2]) - 1
            ids = self.tokenizer(TURNS[row][self.said[row]], add_special_tokens=False).input_ids
            said.append([*ids, self.tokenizer.eos_token_id][:limit])
            self.said[row] += 1
        batch = collate([prompt.ids for prompt in prompts], said, pad_id=self.tokenizer.pad_token_id)
        cut = torch.tensor([ids[-1] != self.tokenizer.eos_token_id for ids in said])
        return Responses(batch=batch, truncated=cut, logprobs=torch.zeros(batch.response_mask.shape))

    def take_retries(self) -> None:
        return None

    def close(self) -> None:
        pass


def in_heedful(output: Path, tokenizer: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    config = heedful.GRPOConfig(
        model=str(output / "model"),
        data=str(output / "prompts.jsonl"),
        output=output / "run",
        environment=(f"python:{HERE / 'peers' / 'word_game.py'}:WordGame",),
        max_turns=8,
        max_new_tokens=2048,
        max_prompt_tokens=2048,
        rollout_batch_size=len(TURNS),
        minibatch_size=len(TURNS),
        samples_per_prompt=1,
        advantage="reinforce",
        shuffle=False,
        eval_fraction=0.0,
        device="cpu",
        dtype="float32",
    )
    learner = start(config, []).learner
    learner.sampler = replace(learner.sampler, source=Forced(tokenizer))
    scored = rollout(learner, next(learner.prompts))
    learner.sampler.close()
    asked, said, own = scored.batch.tokens()
    found = {}
    for row, completion in enumerate(scored.completions):
        number = int(completion.prompt.source.rpartition(":")[2]) - 1
        found[number] = {
            "prompt_ids": list(asked[row]),
            "completion_ids": list(said[row]),
            "mask": [int(one) for one in own[row]],
            "reward": scored.scores[row],
        }
    return [found[row] for row in range(len(TURNS))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True)
    parser.add_argument("--output", type=Path, default=Path("runs/episodes"))
    options = parser.parse_args()
    output = options.output
    output.mkdir(parents=True, exist_ok=True)
    template = subprocess.run([options.trl_python, "-c", TEMPLATE], check=True, capture_output=True, text=True).stdout
    tokenizer = make_model(output / "model", template)
    lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in PROMPTS)
    (output / "prompts.jsonl").write_text(lines, encoding="utf-8")
    (output / "turns.json").write_text(json.dumps(TURNS, ensure_ascii=False), encoding="utf-8")
    peer = [options.trl_python, str(HERE / "peers" / "trl_episodes.py"), "--folder", str(output)]
    subprocess.run(peer, check=True)
    theirs = json.loads((output / "trl.json").read_text(encoding="utf-8"))
    ours = in_heedful(output, tokenizer)
    wrong = [
        (row, name)
        for row, (one, other) in enumerate(zip(ours, theirs, strict=True))
        for name in one
        if one[name] != other[name]
    ]
    for row, one in enumerate(ours):
        said = tokenizer.decode([i for i, is_own in zip(one["completion_ids"], one["mask"], strict=True) if not is_own])
        print(
            f"row {row}: {len(one['completion_ids'])} tokens, {sum(one['mask'])} own, reward {one['reward']:g}; {said!r:.150}"
        )
    for row, name in wrong:
        print(f"row {row}: {name} differs:\n  {ours[row][name]}\n  {theirs[row][name]}")
    print(f"{len(wrong)} differences in {len(ours)} episodes")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
