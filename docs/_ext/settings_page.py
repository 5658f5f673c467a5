"""Writes docs/settings.md, every setting of every command, from the same groups as ``--help-all``, when the site is built."""

from pathlib import Path

from heedful.cli.command_table import COMMANDS
from heedful.configs.help import SECTIONS, settings

PAGE = Path(__file__).resolve().parents[1] / "settings.md"
BEGINNING = """# Every setting

Names are flags on the command line (`--kl-coef 0.1`), keys in a YAML file (`kl_coef: 0.1`) and arguments in Python
(`PPOConfig(kl_coef=0.1)`). `heedful COMMAND --help` shows those that people change, `heedful COMMAND --help-all` those of
one command.

A default that differs between commands is listed with them. *required* has none.
"""
TRAINERS = [name for name, command in COMMANDS.items() if command.trains]
ONLINE = ["ppo", "critic", "a2c", "grpo", "online-dpo"]


def config_of(command):
    return COMMANDS[command].settings()


def commands_in_words(commands):
    """Commands by the longest names that they have together."""
    rest, words = list(commands), []
    for members, name in ((TRAINERS, "every trainer"), (ONLINE, "ppo, critic, a2c, grpo, online-dpo")):
        if set(members) <= set(rest):
            words.append(name)
            rest = [one for one in rest if one not in members]
    return ", ".join([*words, *rest])


def table(rows):
    """A table of settings; each row is a flag's values, the defaults with their commands, and the explanation."""
    yield from ("| setting | default | what it does |", "|---|---|---|")
    for name, values, defaults, explanation in rows:
        shown = [
            f"{f'`{default}`' if default else 'none'}{f' ({commands_in_words(who)})' if len(defaults) > 1 else ''}"
            for default, who in defaults.items()
        ]
        cells = [f"`{name}`" + (f" {values}" if values else ""), "; ".join(shown), explanation]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page():
    every = {
        command: settings(config_of(command)) for command in COMMANDS if command.split()[0] not in ("plan", "doctor")
    }
    lines = [BEGINNING]
    for section in SECTIONS:
        found = {}
        for command, members in every.items():
            for one in members:
                if one.section == section:
                    key = (one.flag, one.values, one.explanation)
                    default = "required" if one.is_required else one.default_text
                    found.setdefault(key, {}).setdefault(default, []).append(command)
        names = {}  # a setting's variants side by side, in the order of the setting that came first
        for key, defaults in found.items():
            names.setdefault(key[0], []).append((*key[:2], defaults, key[2]))
        rows = []
        for variants in names.values():
            for name, values, defaults, explanation in variants:
                who = commands_in_words([one for several in defaults.values() for one in several])
                note = f" ({who})" if len(variants) > 1 else ""
                rows.append((name, values, defaults, explanation + note))
        lines += [f"## {section[0].upper()}{section[1:]}", "", *table(rows), ""]
    for command, members in every.items():
        own = [one for one in members if one.section not in SECTIONS]
        shared = [section for section in SECTIONS if any(one.section == section for one in members)]
        if not own:
            continue
        lines += [f"## heedful {command}", ""]
        lines += [
            *table(
                (
                    one.flag,
                    one.values,
                    {"required" if one.is_required else one.default_text: [command]},
                    one.explanation,
                )
                for one in own
            ),
            "",
        ]
        if shared:
            lines += [f"And the settings above for this command under: {', '.join(shared)}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def write(app):
    PAGE.write_text(page(), encoding="utf-8")


def setup(app):
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
