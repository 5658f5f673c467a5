"""What docs/rounds.md advises is what docs/results/rounds.md measured."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_settings_of_reward_models_are_those_that_were_measured():
    page, results = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("rounds.md", "results/rounds.md"))
    script = (ROOT / "benchmarks" / "rounds.py").read_text(encoding="utf-8")
    advised = re.search(r"```yaml\n(batch_size.*?)```", page, re.DOTALL)[1].splitlines()
    passes = re.findall(
        r"^\| (\d+) \| (0\.\d+) \| 0\.\d+ \|$", results.partition("and how many steps")[0], re.MULTILINE
    )
    best = max(passes, key=lambda row: float(row[1]))[0]
    assert f"epochs: {best}" in advised
    for line in advised:
        assert f"{line}\\n" in script or line.startswith("epochs"), line
