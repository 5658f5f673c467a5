"""Takes the Chinese families out of the demo's world: demonstrations, pairs and prompts in files of their own.

python recipes/lora/chinese_data.py --world runs/demo/world --output runs/lora-zh/world
"""

import argparse
import json
from pathlib import Path

from heedful.apps.demo.facts import FAMILIES
from heedful.data import read_records
from heedful.errors import DataError, HeedfulError

FILES = ("demonstrations", "preferences", "gold_preferences", "prompts")


def make(options: argparse.Namespace) -> None:
    """Writes the four files. Raises HeedfulError and OSError."""
    chinese = {family.name for family in FAMILIES if family.language == "zh"}
    texts, counts = {}, {}
    for name in FILES:
        records = [r.fields for r in read_records(f"{options.world}/{name}.jsonl", columns={})]
        kept = [fields for fields in records if fields.get("family") in chinese]
        if not kept:
            raise DataError(f"{options.world}/{name}.jsonl: no record is of a Chinese family; give the world of a demo")
        texts[name] = "".join(json.dumps(fields, ensure_ascii=False) + "\n" for fields in kept)
        counts[name] = f"{len(kept):,} of {len(records):,} records"
    options.output.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (options.output / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{options.output}/{name}.jsonl: {counts[name]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=Path, required=True, help="folder world of a demo")
    parser.add_argument("--output", type=Path, required=True)
    try:
        make(parser.parse_args())
    except (HeedfulError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {type(error).__name__}: {error}\n")


if __name__ == "__main__":
    main()
