"""The table of planted bugs."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("bugs.toml")


@dataclass(frozen=True)
class Bug:
    """One row: `new` in place of `old`, and the test that must fail."""

    area: str
    bug: str
    """What it does wrong, in words; no two rows have the same."""
    path: str
    old: str
    """Exactly once in the file."""
    new: str
    test: str
    """pytest's node id; without brackets, one of its cases must fail."""

    @property
    def test_file(self) -> str:
        return self.test.partition("::")[0]


def read_bugs(path: Path = TABLE) -> list[Bug]:
    """The table, area by area."""
    areas = tomllib.loads(path.read_text(encoding="utf-8"))
    return [Bug(area, **row) for area, rows in areas.items() for row in rows]


def planted(content: str, bug: Bug) -> str:
    """A file's content with the bug in it.

    Raises:
        ValueError: the row's old text is not in the file exactly once.
    """
    found = content.count(bug.old)
    if found != 1:
        raise ValueError(f"{bug.path} holds the old text {found} times, not once")
    return content.replace(bug.old, bug.new)
