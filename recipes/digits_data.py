"""Makes the prompts of the digits recipes: windows of 20 words, each with a number, from any texts.

python recipes/digits_data.py --texts STORIES [MORE ...] --output runs/digits/prompts.jsonl
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from heedful.data import read_records
from heedful.errors import DataError, HeedfulError
from heedful.rewards.rules import WHOLE_NUMBER

WORDS = 20


def windows(path: str) -> Iterator[str]:
    """Windows of `WORDS` words, one after the other, that hold a number. Raises DataError."""
    for record in read_records(path, columns={}):
        text = record.fields.get("text")
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{record.source}: `text` is {text!r:.60}. Accepted: a string that is not empty.")
        words = text.split()
        for start in range(0, len(words) - WORDS + 1, WORDS):
            window = " ".join(words[start : start + WORDS])
            if WHOLE_NUMBER.search(window):
                yield window


def make(options: argparse.Namespace) -> None:
    """Writes the file. Raises HeedfulError and OSError."""
    prompts = list(dict.fromkeys(window for path in options.texts for window in windows(path)))
    if not prompts:
        raise DataError(f"no {WORDS} words in a row hold a number in {', '.join(options.texts)}; give other texts")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts)
    options.output.write_text("".join(lines), encoding="utf-8")
    print(f"{options.output}: {len(prompts):,} records")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", nargs="+", required=True, help="files with the column `text`, as heedful reads them")
    parser.add_argument("--output", type=Path, required=True)
    try:
        make(parser.parse_args())
    except (HeedfulError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {type(error).__name__}: {error}\n")


if __name__ == "__main__":
    main()
