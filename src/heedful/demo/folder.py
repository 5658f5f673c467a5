"""The demo's folder: check that it is free, and start it with the world's data and a random model."""

from heedful.checkpoints.tiny import make_tiny_model
from heedful.configs.demo import DemoConfig
from heedful.configs.tiny import TinyConfig
from heedful.demo.world import write_world
from heedful.errors import ConfigError
from heedful.files import complete_or_absent
from heedful.train.run_folder import check_folder

CONTENTS = {"world", "base", "sft", "reward", "ppo", "answers.jsonl", "curves.png", "summary.json"}
"""Everything that a demo writes."""


def check_output(config: DemoConfig) -> None:
    """Check that the output folder is free, or holds only a demo that may be replaced. Raises ConfigError."""
    output = config.output
    check_folder(output)
    found = {path.name for path in output.iterdir()} if output.is_dir() else set()
    if not found:
        return
    foreign = sorted(found - CONTENTS) or ([] if "world" in found else sorted(found))
    if foreign:
        raise ConfigError(
            f"--output {output} holds files that no demo wrote ({', '.join(foreign[:3])}), so it is left alone; choose "
            "another folder"
        )
    if not config.overwrite:
        raise ConfigError(
            f"--output {output} already holds a demo; choose another folder, or add --overwrite to replace it"
        )


def make_beginning(config: DemoConfig, tiny: TinyConfig) -> None:
    """Write the world's data and the random model, which replaces an older demo.

    Args:
        config: the demo's folder and seed.
        tiny: the size and the seed of the random model.

    Raises ConfigError if the folder cannot be made.
    """
    try:
        with complete_or_absent(config.output) as folder:
            write_world(folder / "world", config.seed)
            make_tiny_model(
                tiny.architecture,
                folder / "base",
                hidden_size=tiny.hidden_size,
                num_layers=tiny.num_layers,
                max_length=tiny.max_length,
                initializer_range=tiny.initializer_range,
                seed=tiny.seed,
            )
    except OSError as error:
        raise ConfigError(f"--output {config.output} cannot be made: {error.strerror or error}") from error
