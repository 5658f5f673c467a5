"""Makes the data of the sentiment recipe: pairs of whole texts, a positive and a negative one, and beginnings of sentences.

python recipes/sentiment_data.py --sentences SENTENCES --stories STORIES --model MODEL --output runs/sentiment

SENTENCES has the columns `text` and `label` (1 positive, 0 negative), STORIES has `text`: any file that heedful reads.
"""

import argparse
import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from heedful.data import Record, read_records
from heedful.data.chat import Renderer
from heedful.errors import DataError, HeedfulError
from heedful.models.tokenizer import load_tokenizer

PROMPT_TOKENS = (8, 16)
RESPONSE_TOKENS = 24
"""As max_new_tokens of sentiment-ppo.yaml: the pairs are cut to the lengths that the reward model will read there."""
SENTENCE_END = re.compile(r"(?<=[.!?…])[\"'”’)]*\s+|(?<=[。！？])[”’」）]*\s*")


def tokens(text: str, renderer: Renderer) -> list[int]:
    """Ids of a text alone: nothing stands before or after it."""
    return renderer.response_ids(text, prompt="", truncated=True)


def cut(ids: list[int], length: int, renderer: Renderer) -> str:
    """Text of the first ``length`` tokens; "" where that text has other tokens, as half a character has."""
    text = renderer.decode(ids[:length])
    return text if tokens(text, renderer) == ids[:length] else ""


def pairs(texts: Iterable[tuple[str, int]], renderer: Renderer, draw: random.Random) -> list[dict]:
    """Every positive text with a random negative one, each text once; the side with more is left over.

    Texts have no end: they are cut to 32 to 40 tokens, and marked as cut where they have fewer too.
    """
    by_label: dict[int, list[str]] = {0: [], 1: []}
    for text, label in dict(texts).items():
        by_label[label].append(text)
    for same in by_label.values():
        draw.shuffle(same)
    shortest, longest = (length + RESPONSE_TOKENS for length in PROMPT_TOKENS)

    def beginning(text: str) -> str:
        ids, drawn = tokens(text, renderer), draw.randint(shortest, longest)
        nearest = sorted(range(shortest, longest + 1), key=lambda length: abs(length - drawn))
        return next(filter(None, (cut(ids, length, renderer) for length in nearest)), renderer.decode(ids[:drawn]))

    return [
        {"prompt": "", "chosen": beginning(positive), "rejected": beginning(negative), "truncated": True}
        for positive, negative in zip(by_label[1], by_label[0], strict=False)
    ]


def beginnings(sentences: Iterable[str], renderer: Renderer, draw: random.Random, *, most: int) -> list[str]:
    """The first 8 to 16 tokens of up to ``most`` sentences that go on after them, different ones, as prompts."""
    found: dict[str, None] = {}
    for sentence in draw.sample(known := sorted(set(sentences)), len(known)):
        if len(found) >= most:
            break
        ids, length = tokens(sentence, renderer), draw.randint(*PROMPT_TOKENS)
        if len(ids) > length and (prompt := cut(ids, length, renderer)):
            found[prompt] = None
    return list(found)


def text_of(record: Record) -> str:
    """Raises DataError."""
    text = record.fields.get("text")
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{record.source}: `text` is {text!r:.60}. Accepted: a string that is not empty.")
    return text


def labelled(path: str) -> list[tuple[str, int]]:
    """Texts with their labels, 1 or 0. Raises DataError."""
    found = []
    for record in read_records(path, columns={}):
        label = record.fields.get("label")
        if type(label) is not int or label not in (0, 1):
            raise DataError(f"{record.source}: `label` is {label!r:.60}. Accepted: 1 (positive) or 0 (negative).")
        found.append((text_of(record), label))
    return found


def sentences_of(path: str) -> Iterator[str]:
    """Sentences of stories, white space made single spaces."""
    for record in read_records(path, columns={}):
        yield from (" ".join(s.split()) for s in SENTENCE_END.split(text_of(record)))


def make(options: argparse.Namespace) -> None:
    """Writes the two files. Raises HeedfulError and OSError."""
    renderer, draw = Renderer(load_tokenizer(options.model)), random.Random(options.seed)
    texts = labelled(options.sentences)
    rows = {"pairs": pairs(texts, renderer, draw)}
    sources = sentences_of(options.stories), (text for text, _ in texts)
    prompts = [prompt for source in sources for prompt in beginnings(source, renderer, draw, most=options.prompts)]
    rows["prompts"] = [{"prompt": prompt} for prompt in dict.fromkeys(prompts)]
    if not all(rows.values()):
        raise DataError("pairs need texts of both labels, and prompts need sentences of more than 8 tokens")
    options.output.mkdir(parents=True, exist_ok=True)
    for name, lines in rows.items():
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (options.output / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{options.output / name}.jsonl: {len(lines):,} records")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--sentences", "--stories", "--model"):
        parser.add_argument(name, required=True)
    parser.add_argument("--output", type=Path, required=True, help="folder for pairs.jsonl and prompts.jsonl")
    parser.add_argument("--prompts", type=int, default=4000, help="most beginnings from each of the two sources")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        make(options)
    except (HeedfulError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {type(error).__name__}: {error}\n")


if __name__ == "__main__":
    main()
