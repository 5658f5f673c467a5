"""What goes wrong for a user, each with a message that says what is wrong, where, and how to fix it.

    HeedfulError
    ├── ConfigError      (also ValueError)     a flag, a YAML key, a setting that does not fit another
    ├── DataError        (also ValueError)     a data file or a record in it
    ├── CheckpointError  (also RuntimeError)   a model, tokenizer or run folder on disk
    ├── RewardError      (also RuntimeError)   a reward function or model that failed
    └── TrainingError    (also RuntimeError)   a loss or gradient that is no longer a number

The command line prints the message on stderr and exits with code 2, without a traceback.
"""


class HeedfulError(Exception):
    """Base of every error that heedful raises for a user."""


class ConfigError(HeedfulError, ValueError):
    """A setting is unknown, of the wrong type, out of range, or contradicts another."""


class DataError(HeedfulError, ValueError):
    """A data file is missing, malformed, or holds what the task cannot use."""


class CheckpointError(HeedfulError, RuntimeError):
    """A model, tokenizer or run folder is missing, incomplete, or of the wrong kind."""


class RewardError(HeedfulError, RuntimeError):
    """A reward raised, or returned something that is not one finite number per response."""


class TrainingError(HeedfulError, RuntimeError):
    """Training cannot go on: a loss or a gradient norm is not finite."""
