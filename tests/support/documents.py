"""The blocks of code in README.md, CONTRIBUTING.md, tests/README.md and docs/, what stands before them, the commands in
them, and what these ask for.

A block may have a comment of the page's before it, which a reader does not see:

    <!-- norun: WHY -->      it needs what a test has not: GPUs, weights, machines, the network, data of the reader's
    <!-- after: A RUN -->    it is run in a folder in which both stages have been trained
    <!-- run: HOW -->        Python that is run, by `python` or by `torchrun` with two ranks
    <!-- file: PATH -->      the block is that file's text
"""

import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hydra import compose, initialize_config_dir

import llava_fsdp.config as schemas
from llava_fsdp.config import config_dir, load
from llava_fsdp.config.command_line.cli import PATH_KEYS, name_folder, taken_literally
from llava_fsdp.train.launch.launcher import split

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCES = ROOT / "src" / "llava_fsdp"
CONTRIBUTORS = [ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md"]
PAGES = [ROOT / "README.md", *CONTRIBUTORS, *sorted(DOCS.glob("*.md"))]
NOTE = re.compile(r"<!-- (norun|after|run|file): (.+?) -->")
SHELL = re.compile(r"(?:[A-Z_]+=\S+ )*(?:python3?(?:\.\d+)?|torchrun|pip|\.?/?launch/\S+|xxh128sum)(?: |$)")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    """As the fence says; empty for an indented block."""
    text: str
    kind: str = ""
    """norun, after, run or file; empty without a comment."""
    note: str = ""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_shell(self) -> bool:
        if self.language:
            return self.language == "bash"
        return any(SHELL.match(line) for line in self.text.splitlines())

    @cached_property
    def commands(self) -> list[list[str]]:
        """The words of each command, variables and comments left out; a pipe or an `&` ends one."""
        found = []
        for line in self.text.replace("\\\n", " ").splitlines():
            for part in re.split(r"\s+(?:&&|\|\||\||&)(?:\s+|$)", line) if line.strip() else []:
                words = shlex.split(part.strip().rstrip(";"), comments=True)
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words = words[1:]
                found += [words] if words else []
        return found


def blocks_of(path: Path) -> list[Block]:
    """Every block of code of a page, in order: fenced, or indented by four."""
    lines = [*path.read_text().splitlines(), ""]
    found: list[Block] = []
    kind = note = ""
    at = 0
    while at < len(lines):
        begun, line = at, lines[at]
        opening = re.match(r"(```+)\s*(\w*)$", line)
        language = opening[2] or "text" if opening else ""
        if opening:
            at = next(n for n in range(at + 1, len(lines)) if lines[n].strip() == opening[1])
            own = lines[begun + 1 : at]
        elif line.startswith("    ") and line.strip() and not (begun and lines[begun - 1].strip()):
            while lines[at + 1 : at + 2] and (lines[at + 1].startswith("    ") or not lines[at + 1].strip()):
                at += 1
            own = [line[4:] for line in lines[begun : at + 1]]
        else:
            said = NOTE.search(line)
            kind, note = (said[1], said[2]) if said else ("", "") if line.strip() else (kind, note)
            at += 1
            continue
        text = "\n".join(own).rstrip("\n")
        found.append(Block(path.relative_to(ROOT).as_posix(), begun + 1, language, text, kind, note))
        kind = note = ""
        at += 1
    return found


def entries() -> dict[str, tuple[str, str]]:
    """Every entry with keys of Hydra's: the name of its file in conf/, and its schema's name."""
    found = {}
    for path in [*SOURCES.glob("*.py"), *SOURCES.glob("*/main.py")]:
        called = re.search(r'cli\.run\(\s*"(\w+)",\s*(\w+)', path.read_text())
        if called:
            name = path.parent.name if path.stem == "main" else path.stem
            found[f"llava_fsdp.{name}"] = (called[1], called[2])
    return found


def entry_of(words: list[str]) -> tuple[str, list[str]] | None:
    """A command's entry and its arguments; None for a program that is none of ours."""
    if re.fullmatch(r"(?:\./)?launch/(?:node|multinode)\.sh", words[0]):
        return "llava_fsdp.train", words[1:]
    if words[0] == "llava-fsdp" and len(words) > 1 and not words[1].startswith("-"):
        named = split(words[2:])[1] if words[1] == "train" else words[2:]
        return f"llava_fsdp.{words[1]}", name_folder(named, PATH_KEYS.get(words[1]))
    modules = [n for n, word in enumerate(words) if word == "-m" and n + 1 < len(words)]
    if modules and words[modules[0] + 1].startswith("llava_fsdp."):
        return words[modules[0] + 1], words[modules[0] + 2 :]
    return None


def composed(module: str, arguments: tuple[str, ...], folder: Path) -> None:
    """What the command line would make of it, checks of the configuration included; nothing is looked at on disk."""
    name, schema = entries()[module]
    words = [w.replace("|", "_") for w in arguments if not w.startswith("--") and w not in ("job", "my_conf", "-m")]
    searched = [f"hydra.searchpath=[file://{folder / 'my_conf'}]"] if "--config-dir" in arguments else []
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        node = compose(name, [*(taken_literally(w) for w in words), *searched])
    load(getattr(schemas, schema), node)
