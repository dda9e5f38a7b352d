"""The table of planted bugs, and the place of each in the source."""

import ast
import re
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("bugs.toml")
SOURCE = "src/llava_fsdp"
TOKEN = re.compile(
    r'''
    \s+ | \\\n | \#[^\n]*                                      # ignored
    | ( [bBfFrRuU]{0,2} (?: """ (?: \\. | [^\\] )*? """ | \'{3} (?: \\. | [^\\] )*? \'{3}
                          | " (?: \\. | [^"\\\n] )* " | ' (?: \\. | [^'\\\n] )* ' )
      | \d [\w.]* (?: (?<= [eE] ) [-+] \d+ )? | \w+
      | \.{3} | << =? | >> =? | \*\* =? | // =? | -> | := | [-+*/%&|^@<>=!] = | . )
    ''',
    re.VERBOSE | re.DOTALL,
)
"""Python's tokens. The module `tokenize` refuses a part of a statement, such as one that begins with a bracket."""


@dataclass(frozen=True)
class Bug:
    """One row: `new` in place of `old`, and the test that must fail."""

    area: str
    bug: str
    """What it does wrong, in words; no two rows have the same."""
    where: str
    """The function, method (`Class.method`), class or constant that holds `old`, without its module."""
    old: str
    """Some of its code, whose tokens it holds once."""
    new: str
    test: str
    """pytest's node id; without brackets, one of its cases must fail."""
    module: str = ""
    """The last name of the module, if functions of this name in other modules hold `old` too."""
    path: str = ""
    """The file, if it is outside the package."""

    @property
    def name(self) -> str:
        return f"[{self.area}] {self.bug}"

    @property
    def test_file(self) -> str:
        return self.test.partition("::")[0]


@dataclass(frozen=True)
class Planted:
    """A file with a bug in it."""

    bug: Bug
    path: str
    content: str


@dataclass(frozen=True)
class Part:
    """The definition of a function, a class or a constant, from character `start` to `end` of a file."""

    name: str
    path: str
    start: int
    end: int

    @property
    def module(self) -> str:
        path = PurePosixPath(self.path)
        return path.parent.name if path.stem == "__init__" else path.stem


def read_bugs(path: Path = TABLE) -> list[Bug]:
    """The table, area by area."""
    areas = tomllib.loads(path.read_text(encoding="utf-8"))
    return [Bug(area, **row) for area, rows in areas.items() for row in rows]


class Tree:
    """The source below a folder, in which bugs are planted. Each file is read once."""

    def __init__(self, root: Path = ROOT):
        self.root = root
        self.contents: dict[str, str] = {}

    @cached_property
    def package(self) -> list[Part]:
        files = sorted((self.root / SOURCE).rglob("*.py"))
        return [part for file in files for part in self.parts(file.relative_to(self.root).as_posix())]

    def parts(self, path: str) -> list[Part]:
        """What a file defines."""
        content = self.contents[path] = (self.root / path).read_text(encoding="utf-8")
        starts = [0]
        for line in content.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return [Part(name, path, starts[first - 1], starts[last]) for name, first, last in defined(ast.parse(content))]

    def plant(self, bug: Bug) -> Planted:
        """The file of a bug with the bug in it.

        Raises:
            ValueError: what the row names does not hold its old text exactly once.
        """
        parts = [part for part in (self.parts(bug.path) if bug.path else self.package) if part.name == bug.where]
        places = [(part, *span) for part in parts for span in self.spans(part, bug.old)]
        if len(places) > 1 and bug.module:
            places = [place for place in places if place[0].module == bug.module]
        if len(places) != 1:
            held = ", ".join(sorted({part.path for part in [place[0] for place in places] or parts}))
            times = f"holds the old text {len(places)} times, not once" if parts else "is not defined"
            raise ValueError(f"{bug.name}: {bug.where} {times} ({held or bug.path or SOURCE})")
        part, start, end = places[0]
        content = self.contents[part.path]
        line = content[content.rfind("\n", 0, start) + 1 : start]
        indentation = re.match(r"\s*", line)[0]  # type: ignore[index]  # it always matches
        new = textwrap.dedent(bug.new).strip().replace("\n", "\n" + indentation)
        return Planted(bug, part.path, content[:start] + new + content[end:])

    def spans(self, part: Part, snippet: str) -> Iterator[tuple[int, int]]:
        """From where to where in the file each occurrence of the snippet in a definition is."""
        wanted = [text for text, _, _ in tokens(snippet)]
        found = tokens(self.contents[part.path][part.start : part.end])
        texts = [text for text, _, _ in found]
        for first in range(len(texts) - len(wanted) + 1):
            if wanted and texts[first : first + len(wanted)] == wanted:
                yield part.start + found[first][1], part.start + found[first + len(wanted) - 1][2]


def tokens(text: str) -> list[tuple[str, int, int]]:
    """Tokens of a piece of Python and where each begins and ends, without white space, comments and trailing commas."""
    found = [(match[1], *match.span()) for match in TOKEN.finditer(text) if match[1] is not None]
    after = [text for text, _, _ in found[1:]] + [""]
    return [one for one, next_one in zip(found, after, strict=False) if one[0] != "," or next_one not in (*")]}",)]


def defined(node: ast.AST, within: str = "") -> Iterator[tuple[str, int, int]]:
    """The functions, methods, classes and assigned names of a module or class, with their first and last lines."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min(line.lineno for line in (child, *child.decorator_list))
            yield within + child.name, first, child.end_lineno or first
            if isinstance(child, ast.ClassDef):
                yield from defined(child, f"{within}{child.name}.")
        elif isinstance(child, ast.Assign | ast.AnnAssign) and not within:
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            names = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            yield from ((name, child.lineno, child.end_lineno or child.lineno) for name in sorted(names))
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from defined(child, within)
