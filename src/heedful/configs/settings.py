"""What every configuration does when it is made: check each field's range, expand paths, check what fields say together."""

from dataclasses import dataclass

from heedful.configs.paths import expand_paths
from heedful.configs.ranges import check_ranges


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A group of settings. Groups are combined by inheritance and are flat: a name is the flag, YAML key and attribute."""

    given = frozenset[str]()  # without an annotation, which would make it a setting
    """The settings that a command's file or flags named, be it with their default; none if it was made in Python."""

    def __post_init__(self) -> None:
        check_ranges(self)
        expand_paths(self)
        self.check()

    def check(self) -> None:
        """Raise ConfigError if settings contradict each other. Groups add to it and call super()."""
