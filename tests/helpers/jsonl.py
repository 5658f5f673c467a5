"""JSONL files, as tests write and read them."""

import json


def lines(records):
    """These records as a file has them, a line each."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def write_jsonl(path, records):
    """Write a file of these records; its path as a text."""
    path.write_text(lines(records), encoding="utf-8")
    return str(path)


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_metrics(run, having=""):
    """The lines of a run's metrics.jsonl that have such a metric."""
    return [line for line in read_jsonl(run / "metrics.jsonl") if having in line or not having]


def timeless(metrics):
    """Metrics but for those that another run of the same settings has otherwise."""
    return {name: value for name, value in metrics.items() if not name.startswith(("time/", "perf/"))}
