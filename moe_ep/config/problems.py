"""What is wrong with a configuration: plain data, collected first and raised all at once."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that cannot work, and the way out.

    field: the name as the user wrote it (a flag's field, or a key of config.json). given: the
    value found. allowed: what would work. fix: what to do about it, one sentence.
    """

    field: str
    given: object
    allowed: str
    fix: str

    def __str__(self) -> str:
        return f"{self.field}: got {self.given!r}, allowed: {self.allowed}. {self.fix}"


class ConfigError(ValueError):
    """Raised with every problem found; ``problems`` keeps them apart."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = f"{count} configuration problem{'' if count == 1 else 's'}:"
        super().__init__("\n  - ".join([head, *map(str, self.problems)]))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[Problem, ...]]]:
        # The default rebuilds from the message; ranks and launcher are different processes.
        return (ConfigError, (self.problems,))
