"""The errors that heedful raises for a user. Each message says what is wrong, where, and how to fix it.

    HeedfulError
    ├── ConfigError      (also ValueError)     a flag, a YAML key, or a setting that does not fit another
    ├── DataError        (also ValueError)     a data file or a record in it
    ├── CheckpointError  (also RuntimeError)   a model, tokenizer or run folder on disk
    ├── RewardError      (also RuntimeError)   a reward function or reward model that failed
    └── TrainingError    (also RuntimeError)   a loss or gradient that is no longer a number

The command line prints the message on standard error and exits with status 2, without a traceback.

`Terminated` is not an error: the command line raises it, as Python raises KeyboardInterrupt, to end what is running.
"""


class HeedfulError(Exception):
    """Base class of every error that heedful raises for a user."""


class ConfigError(HeedfulError, ValueError):
    """A setting is unknown, has the wrong type, is out of range, or contradicts another."""


class DataError(HeedfulError, ValueError):
    """A data file is missing or malformed, or holds something that the task cannot use."""


class CheckpointError(HeedfulError, RuntimeError):
    """A model, tokenizer or run folder is missing, incomplete, or of the wrong kind."""


class RewardError(HeedfulError, RuntimeError):
    """A reward failed on more responses than may fail, or did not return one entry per response."""


class TrainingError(HeedfulError, RuntimeError):
    """Training cannot go on: a loss or a gradient norm is not finite."""


class Terminated(BaseException):
    """The process was asked to end (SIGTERM). Not an `Exception`, so that no handler of errors catches it."""
