"""What the tests of heedful migrate have in common."""

import pytest
import yaml


@pytest.fixture
def migrated(heedful, written, tmp_path):
    """``migrated("脚本.py", text)`` are the outcome, the settings of the YAML file, and the folder."""

    def run(name, content, *flags):
        folder = tmp_path / "迁移"
        outcome = heedful("migrate", written(name, content), "--output", folder, *flags)
        files = sorted(folder.glob("*.yaml"))
        return outcome, yaml.safe_load(files[0].read_text(encoding="utf-8")) if files else {}, folder

    return run


@pytest.fixture
def row():
    """``row(folder, name)``: the cells of a setting's row in the report, the heading above it first; None without one."""

    def find(folder, name):
        heading = ""
        for line in (folder / "migration.md").read_text(encoding="utf-8").splitlines():
            heading = line[4:] if line.startswith("### ") else heading
            if f"| `{name}` |" in line:
                return [heading, *(cell.strip() for cell in line.split(" | "))]
        return None

    return find
