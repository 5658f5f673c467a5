"""What the cheap checks of `heedful doctor` cost before a training command: seconds on many made-up records.

    python benchmarks/doctor.py --rows 100000

Records have prompts of 40 and answers of 200 tokens, a tenth of them held out. Encoding them is not counted: the trainer has
done it when it calls the checks.
"""

import argparse
import random
import time

from transformers import AutoModelForCausalLM

from heedful import SFTConfig
from heedful.checks.findings import LoadedRun, TokenRow
from heedful.checks.preflight import cheap_findings
from heedful.data.chat import Renderer
from heedful.models.tiny import byte_tokenizer, tiny_config
from heedful.types import Demonstration, Message

WORDS = [chr(0x4E00 + i) for i in range(2000)]


def loaded_run_of(rows: int, vocabulary: int) -> LoadedRun:
    """Records that nothing is wrong with."""
    draw, tokenizer = random.Random(0), byte_tokenizer()
    shape = {"hidden_size": 64, "num_layers": 1, "max_length": 512}
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3", vocab_size=vocabulary, **shape))
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    records, encoded = [], []
    for i in range(rows):
        prompt = "".join(draw.choices(WORDS, k=80))
        records.append(Demonstration((Message("user", f"{i} {prompt}"),), prompt * 5, f"data.jsonl:{i + 1}"))
        ids = [draw.randrange(10, 200) for _ in range(40)]
        encoded.append(TokenRow(f"data.jsonl:{i + 1}", ids, [*ids * 5, end]))
    held_out = rows // 10
    return LoadedRun(
        config=SFTConfig(learning_rate=1e-4),
        tokenizer=tokenizer,
        model=model,
        rows=encoded[held_out:],
        records=(records[held_out:], records[:held_out]),
        counts={"records": rows},
        renderer=Renderer(tokenizer),
        stop_ids=(tokenizer.eos_token_id, end),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    loaded_run = loaded_run_of(asked.rows, asked.vocabulary)
    seconds = []
    for _ in range(asked.repeats):
        started = time.process_time()
        found = cheap_findings(loaded_run)
        seconds.append(time.process_time() - started)
    print(
        f"{asked.rows:,} records: {min(seconds):.2f} to {max(seconds):.2f} s of processor time, {len(found)} findings"
    )


if __name__ == "__main__":
    main()
