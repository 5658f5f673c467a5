"""Whether a table of configs/peers has every setting of the library that is installed, with its defaults.

PYTHON-WITH-PEER benchmarks/old_ppo/coverage.py src/heedful/configs/peers/trl.toml trl trl.experimental.cpo transformers peft

Looks for the class of each section in the modules; the first module's version decides which entries hold. Prints arguments of
these classes without an entry, entries that this version has no argument for, and defaults that differ. Arguments that come
from TrainingArguments need no entry, as the table has only those that matter: they are listed at the end. Exits with 1 if
there is anything else.
"""

import enum
import importlib
import inspect
import sys
import tomllib
from pathlib import Path

SUMMED_UP = "TrainingArguments"
"""The section with only the settings that matter; its defaults are those of the classes that inherit them."""
COMPUTED = object()
"""In place of a default that is computed."""


def number(version):
    """The first two numbers of a version."""
    return [int(part) for part in version.split(".")[:2]]


def holds(entry, version):
    """Whether a version has a setting, by the table."""
    return number(entry.get("since", "0.0")) <= version < number(entry.get("until", "999.0"))


def default_of(entry, version):
    """The default of a setting at a version, by the table."""
    if "defaults" not in entry:
        return entry.get("default")
    starts = [start for start in entry["defaults"] if number(start) <= version]
    default = entry["defaults"][starts[-1]] if starts else None
    return None if default == "none" else default


def arguments(found):
    """The arguments of a class, and their defaults."""
    given = inspect.signature(found).parameters.values()
    return {one.name: plain(one.default) for one in given if one.kind is not one.VAR_KEYWORD}


def plain(default):
    """A default as TOML writes it."""
    if repr(default) == "<factory>":
        return COMPUTED
    if default is inspect.Parameter.empty:
        return None
    return default.value if isinstance(default, enum.Enum) else default


def differences(section, table, found, version):
    """A line for each difference between a section and its class."""
    given = arguments(found)
    bases = [base.__name__ for base in found.__mro__ if base.__name__ in table]
    for name, default in given.items():
        entries = [table[base][name] for base in [section, *bases] if name in table[base]]
        entry = next((one for one in entries if holds(one, version)), None)
        if entry is None and SUMMED_UP not in bases:
            yield f"{section}.{name}: no entry for this version, default {default!r}"
        elif entry is None:
            own = name not in arguments(next(base for base in found.__mro__ if base.__name__ == SUMMED_UP))
            yield f"{section}.{name}: no entry for this version, default {default!r}" if own else name
        elif default is not COMPUTED and default != default_of(entry, version):
            yield f"{section}.{name}: default {default!r}, in the table {default_of(entry, version)!r}"
    for name, entry in table[section].items():
        if name not in given and holds(entry, version):
            yield f"{section}.{name}: in the table, but not in this version"


def main(path, modules):
    """Compare, print, and return the number of differences."""
    table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    table = {name: value for name, value in table.items() if isinstance(value, dict) and name != "trainers"}
    loaded = [importlib.import_module(name) for name in modules]
    print(f"{loaded[0].__name__} {loaded[0].__version__}, {path}")
    count, left_out = 0, set()
    for section in table:
        found = next((getattr(module, section) for module in loaded if hasattr(module, section)), None)
        if found is None:
            print(f"{section}: not compared, as no module has it")
        elif section != SUMMED_UP:
            for line in differences(section, table, found, number(loaded[0].__version__)):
                if " " in line:
                    print(line)
                    count += 1
                else:
                    left_out.add(line)
    print(f"of {SUMMED_UP} without an entry: {' '.join(sorted(left_out))}")
    print(f"{count} differences")
    return count


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1], sys.argv[2:])))
