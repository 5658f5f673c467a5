"""Makes conversations of questions that are plain text, so that a chat model reads them through its template.

python recipes/gsm8k_data.py --data gsm8k_train.jsonl.gz --output runs/gsm8k/questions.jsonl

The data has the columns `question` and `answer`: any file, or data set on the Hub, that heedful reads.
"""

import argparse
import json
from pathlib import Path

from heedful.data import Record, read_records
from heedful.errors import DataError, HeedfulError
from heedful.rewards.rules import final_number


def conversation(record: Record) -> dict:
    """The question as one message of a user, and the answer as it is. Raises DataError where the answer is no number."""
    question, answer = record.fields.get("question"), record.fields.get("answer")
    if not isinstance(question, str) or not question.strip():
        raise DataError(f"{record.source}: `question` is {question!r:.60}. Accepted: a string that is not empty.")
    if final_number(str(answer)) is None:
        raise DataError(f"{record.source}: `answer` is {answer!r:.60}. Accepted: a text that holds a number.")
    return {"question": [{"role": "user", "content": question}], "answer": answer}


def make(options: argparse.Namespace) -> None:
    """Writes the file. Raises HeedfulError and OSError."""
    conversations = [conversation(record) for record in read_records(options.data, columns={})]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(fields, ensure_ascii=False) + "\n" for fields in conversations)
    options.output.write_text("".join(lines), encoding="utf-8")
    print(f"{options.output}: {len(conversations):,} records")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="file or Hub data set with the columns `question` and `answer`")
    parser.add_argument("--output", type=Path, required=True)
    try:
        make(parser.parse_args())
    except (HeedfulError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {type(error).__name__}: {error}\n")


if __name__ == "__main__":
    main()
