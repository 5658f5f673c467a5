"""Tables of other libraries' settings (configs/peers): names and values that heedful has, versions in order, notes."""

import itertools
import tomllib
from importlib.resources import files

import pytest

from heedful.cli.command_table import COMMANDS
from heedful.configs.settings import checked, types_of
from heedful.configs.trainers import TRAINERS
from heedful.errors import ConfigError

TABLES = {
    one.name: tomllib.loads(one.read_text(encoding="utf-8"))
    for one in (files("heedful.configs") / "peers").iterdir()
    if one.name.endswith(".toml")
}
CONFIGS = {command: trainer.settings() for command, trainer in TRAINERS.items()}
NEEDED = {"model": "模型", "data": "数据.jsonl", "output": "runs/迁移"}
SETTING_HAS = {"ours", "default", "defaults", "values", "equal", "since", "until", "kind", "note"}
TRAINER_HAS = {"name", "config", "command", "writes", "differs", "since", "until"}
KINDS = {"same", "differs", "combined", "lost", "none"}


@pytest.fixture(params=sorted(TABLES))
def table(request):
    return TABLES[request.param]


def settings_of(table):
    """Where each entry is (section and name), and the entry."""
    return [
        (f"{section}.{name}", entry)
        for section, entries in table.items()
        if isinstance(entries, dict) and section != "trainers"
        for name, entry in entries.items()
    ]


def version(text):
    return [int(part) for part in text.split(".")]


def accepts(name, value):
    """Whether a trainer's setting of this name takes a value."""
    for config in CONFIGS.values():
        if name in types_of(config):
            try:
                checked(config, name, value)
            except ConfigError:
                continue
            return True
    return False


def defaults_of(entry):
    """Their defaults at all versions, but None."""
    every = [*entry.get("defaults", {}).values(), entry.get("default")]
    return [value for value in every if value is not None and (value != "none" or "none" in entry.get("values", {}))]


def wrong(table, is_wrong):
    return [place for place, entry in settings_of(table) if is_wrong(entry)]


def test_entries_have_known_fields_and_kinds(table):
    assert not wrong(table, lambda one: set(one) - SETTING_HAS)
    assert not wrong(table, lambda one: one.get("kind", "same") not in KINDS)
    assert not wrong(table, lambda one: "equal" in one and one["kind"] != "lost")
    for name, trainer in table.get("trainers", {}).items():
        assert not set(trainer) - TRAINER_HAS, name
        assert trainer["command"] in TRAINERS, name
        assert set(trainer["config"]) <= set(table), name


def test_every_name_of_ours_is_a_setting_of_a_trainer(table):
    names = set().union(*(types_of(command.settings()) for command in COMMANDS.values()), {"tokenizer"})
    assert not wrong(table, lambda one: set(one.get("ours", "").split()) - names)
    assert not wrong(table, lambda one: one.get("kind", "same") in ("same", "differs") and not one.get("ours"))


def test_their_values_are_values_of_ours(table):
    for place, entry in settings_of(table):
        for value in entry.get("values", {}).values():
            assert any(accepts(name, value) for name in entry["ours"].split()), (place, value)


def test_a_default_that_is_taken_as_it_is_is_accepted(table):
    for place, entry in settings_of(table):
        if entry.get("kind", "same") not in ("same", "differs") or "values" in entry:
            continue
        for value in defaults_of(entry):
            assert any(accepts(name, value) for name in entry["ours"].split()), (place, value)


def test_defaults_with_values_are_among_them(table):
    for place, entry in settings_of(table):
        if "values" not in entry or entry.get("kind", "same") not in ("same", "differs"):
            continue
        for value in defaults_of(entry):
            text = str(value).lower() if isinstance(value, bool) else str(value)
            assert text in entry["values"], (place, value)


def test_what_a_trainer_writes_is_accepted_by_its_command(table):
    for name, trainer in table.get("trainers", {}).items():
        config = CONFIGS[trainer["command"]]
        made = config(**NEEDED | trainer.get("writes", {}))
        for setting, value in trainer.get("writes", {}).items():
            assert getattr(made, setting) == value, (name, setting)


def test_versions_are_in_order_and_the_last_default_is_the_default(table):
    for place, entry in [*settings_of(table), *table.get("trainers", {}).items()]:
        starts = [version(start) for start in entry.get("defaults", {})]
        assert all(a < b for a, b in itertools.pairwise(starts)), place
        if "defaults" in entry and "default" in entry:
            assert list(entry["defaults"].values())[-1] == entry["default"], place
        if "since" in entry and "until" in entry:
            assert version(entry["since"]) < version(entry["until"]), place
        if "until" in entry:
            assert all(start < version(entry["until"]) for start in starts), place


def test_what_differs_is_combined_or_lost_has_a_short_note(table):
    assert not wrong(table, lambda one: one.get("kind") in ("differs", "combined", "lost") and not one.get("note"))
    assert not wrong(table, lambda one: len(one.get("note", "").split()) > 40)
    assert not wrong(table, lambda one: one.get("note", "").strip().endswith((".", ";", ",")))
    for name, trainer in table.get("trainers", {}).items():
        assert all(text.endswith(".") for text in trainer.get("differs", ())), name
