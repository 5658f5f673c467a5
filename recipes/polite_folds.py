"""How well a reward model tells polite from impolite answers, in five folds by prompt, beside a bag of words.

python recipes/polite_folds.py recipes/polite-reward.yaml --model MODEL --data PAIRS --output runs/polite-folds

Takes the flags of `heedful reward`, but for --eval-data (that is the fold) and --unusable. Needs scikit-learn.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bag_of_words import pair_accuracy

from heedful import AccuracyConfig, Ranking, evaluate_accuracy, train_reward
from heedful.configs.offline import RewardConfig
from heedful.configs.parse import parse
from heedful.data import read_rankings, read_records, split_by_prompt
from heedful.errors import ConfigError, HeedfulError

FOLDS = 5


def folds(pairs: Sequence[Ranking]) -> list[list[Ranking]]:
    """The pairs in fifths of the interval on which `split_by_prompt` places their prompts: the same at every run.

    Raises DataError where one would be empty.
    """
    up_to = [*(split_by_prompt(pairs, index / FOLDS)[1] for index in range(1, FOLDS)), pairs]
    return [split_by_prompt(larger, index / FOLDS)[0] for index, larger in enumerate(up_to)]


def write(path: Path, pairs: Sequence[Ranking], lines: dict[str, str]) -> str:
    path.write_text("".join(lines[pair.source] for pair in pairs), encoding="utf-8")
    return str(path)


def run(config: RewardConfig) -> None:
    """Trains and measures five reward models. Raises HeedfulError and OSError."""
    if config.eval_data is not None or config.unusable != "error":
        raise ConfigError("--eval-data is each fold in turn, and --unusable is always error here; leave them out")
    pairs = read_rankings(config.data, columns=config.columns, system_prompt=config.system_prompt)
    lines = {r.source: json.dumps(r.fields, ensure_ascii=False) + "\n" for r in read_records(config.data, columns={})}
    rows = []
    for index, held_out in enumerate(folds(pairs)):
        output = config.output / f"fold-{index}"
        output.parent.mkdir(parents=True, exist_ok=True)
        sources = {pair.source for pair in held_out}
        train = [pair for pair in pairs if pair.source not in sources]
        data, eval_data = (
            write(output.parent / f"{name}-{index}.jsonl", part, lines)
            for name, part in (("train", train), ("held-out", held_out))
        )
        train_reward(replace(config, data=data, eval_data=eval_data, output=output))
        measured = evaluate_accuracy(
            AccuracyConfig(
                reward_model=f"{output}/final",
                data=eval_data,
                columns=config.columns,
                system_prompt=config.system_prompt,
                device=config.device,
                dtype=config.dtype,
            )
        )
        rows.append((len(held_out), measured["accuracy"], pair_accuracy(train, held_out)))
        print("fold {}: {} pairs, reward model {:.3f}, bag of words {:.3f}".format(index, *rows[-1]), flush=True)
    for name, column in (("reward model", 1), ("bag of words", 2)):
        values = [row[column] for row in rows]
        print(f"{name}: mean {statistics.mean(values):.3f}, standard error {statistics.stdev(values) / FOLDS**0.5:.3f}")


def main() -> None:
    try:
        run(parse(RewardConfig, sys.argv[1:], prog="polite_folds.py"))
    except (HeedfulError, OSError) as error:
        print(f"polite_folds.py: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
