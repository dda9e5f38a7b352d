"""A model's answers as JSON Lines, as the original's scorers read them: written as they come, and continued.

One process appends to the file itself. Of several, each appends to a part of its own beside it (`FILE.part-0-of-8`),
and the first one puts the whole file together when all parts have everything: they need no word from each other. Every
line says which question it answers and how it was asked, so that any number of processes continues what any other
number has begun.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from xxhash import xxh3_64_hexdigest

from llava_fsdp.evaluate.question import Asked
from llava_fsdp.runtime.errors import CommunicationError, ConfigError, StorageError
from llava_fsdp.runtime.jsonl import replace_lines
from llava_fsdp.runtime.log import log

LOOK = 0.5
"""Seconds between looks at the parts of other processes."""
STALL = 1800.0
"""Seconds without a new answer of any process after which the first one no longer waits."""


@dataclass(frozen=True)
class Place:
    """Where a process stands among those that share the questions."""

    rank: int = 0
    size: int = 1


@dataclass
class Answers:
    """The answers to some questions, by their numbers."""

    path: Path
    asked: Sequence[Asked]
    how: dict[str, Any]
    """What the answers depend on besides the question: model, length, template, ..."""
    model_id: str
    place: Place = Place()
    texts: dict[int, str] = field(default_factory=dict)
    read: dict[Path, int] = field(default_factory=dict)
    """Bytes of each file that have been read, up to the end of a line."""

    def __post_init__(self) -> None:
        self.by_number = {a.number: a for a in self.asked}
        self.look()

    def look(self) -> bool:
        """Take up what the file and its parts have now; whether that was anything.

        Raises:
            ConfigError: a line is not an answer to these questions, asked in this way.
        """
        known = len(self.texts)
        for path in [*self.parts(), self.path]:  # parts are gone only once the file is whole
            for line, content in self.new_lines(path):
                number, text = self.parse(f"{path}, line {line}" if line else str(path), content)
                self.texts.setdefault(number, text)
        return len(self.texts) > known

    def parts(self) -> list[Path]:
        return sorted(self.path.parent.glob(f"{glob_escaped(self.path.name)}.part-*-of-*"))

    def new_lines(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """Whole lines behind what has been read, each with its number where this begins at the first. A last line
        without its end is being written, or was cut; either way it is not there yet."""
        begin = self.read.get(path, 0)
        try:
            with path.open("rb") as file:
                file.seek(begin)
                content = file.read()
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(f"answers={path} cannot be read: {error.strerror or error}") from error
        whole = content[: content.rfind(b"\n") + 1]
        self.read[path] = begin + len(whole)
        for number, line in enumerate(whole.split(b"\n")[:-1], 1):
            yield 0 if begin else number, line

    def parse(self, where: str, line: bytes) -> tuple[int, str]:
        cure = "name another file with answers=FILE, or move this one away"
        try:
            row = json.loads(line)
            number, text, how = row["metadata"]["number"], row["text"], row["metadata"]["how"]
            asked = self.by_number.get(number)
            same = asked is not None and (row["question_id"], row["prompt"], row["metadata"]["image"]) == (
                asked.id,
                asked.prompt,
                list(asked.images),
            )
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ConfigError(f"{where} is no answer that this program has written; {cure}") from error
        if how != self.how:
            other = [f"{k}={how.get(k)} there, {v} here" for k, v in self.how.items() if how.get(k) != v]
            raise ConfigError(f"{where}: it was asked in another way: {', '.join(other) or how}; {cure}")
        if asked is None:
            raise ConfigError(
                f"{where} answers question {number} (id {row['question_id']}), which is none of the {len(self.asked)} "
                f"that are asked here (a lower limit, or another file of questions?); {cure}"
            )
        if not same or not isinstance(text, str):
            raise ConfigError(
                f"{where} answers question {number} (id {row['question_id']}), whose text, pictures or id are others "
                f"here (another file of questions, or suffix?): {str(row['prompt'])[-100:]!r} there, "
                f"{asked.prompt[-100:]!r} here; {cure}"
            )
        return number, text

    def pending(self) -> list[Asked]:
        """This process's share of what has no answer yet: every size-th question, in order."""
        mine = self.asked[self.place.rank :: self.place.size]
        return [a for a in mine if a.number not in self.texts]

    @property
    def own(self) -> Path:
        if self.place.size == 1:
            return self.path
        return self.path.with_name(f"{self.path.name}.part-{self.place.rank}-of-{self.place.size}")

    @contextlib.contextmanager
    def writing(self) -> Iterator[Callable[[Sequence[Asked], Sequence[str]], None]]:
        """What adds answers to this process's file; a last line that was cut is taken off first.

        Raises:
            ConfigError: another process is writing it.
            StorageError: it cannot be written.
        """
        with contextlib.ExitStack() as stack:
            with storing(f"answers={self.own}"):
                self.own.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(self.own.open("a+b"))
                lock(file, self.own)
                drop_cut_line(file)

            def add(asked: Sequence[Asked], texts: Sequence[str]) -> None:
                lines = [self.line(a, t) + "\n" for a, t in zip(asked, texts, strict=True)]
                with storing(f"answers={self.own}"):
                    file.write("".join(lines).encode())
                    file.flush()
                self.texts |= {a.number: t for a, t in zip(asked, texts, strict=True)}

            yield add

    @contextlib.contextmanager
    def told_when_interrupted(self) -> Iterator[None]:
        """Nothing is lost, which whoever pressed Ctrl-C wants to know."""
        try:
            yield
        except KeyboardInterrupt:
            kept, most = len(self.texts), len(self.asked)
            log().info("%s keeps %d of %d answers; the same command goes on there", self.own, kept, most)
            raise

    def line(self, asked: Asked, text: str) -> str:
        metadata = {"number": asked.number, "image": list(asked.images), "how": self.how}
        row = {
            "question_id": asked.id,
            "prompt": asked.prompt,
            "text": text,
            "answer_id": xxh3_64_hexdigest(json.dumps([metadata, asked.prompt]).encode()),
            "model_id": self.model_id,
            "metadata": metadata,
        }
        return json.dumps(row)

    def wait(self, stall: float = STALL) -> None:
        """Until all processes have written all answers.

        torchrun ends this one where another fails; so only one that lives and does nothing could keep it waiting.

        Raises:
            CommunicationError: no answer came for `stall` seconds.
        """
        since = time.monotonic()
        while len(self.texts) < len(self.asked):
            if self.look():
                since = time.monotonic()
            elif time.monotonic() - since > stall:
                lacking = {n % self.place.size for n, a in enumerate(self.asked) if a.number not in self.texts}
                raise CommunicationError(
                    f"no new answer for {stall:.0f} s, and {len(self.asked) - len(self.texts)} are lacking, of ranks "
                    f"{sorted(lacking)}; all ranks must see the folder of answers={self.path}. The same command goes on"
                )
            else:
                time.sleep(LOOK)

    def finish(self) -> list[str]:
        """All answers in the order of the questions; the file has them so, and there are no parts any more."""
        lines = [self.line(a, self.texts[a.number]) for a in self.asked]
        parts = self.parts()
        with storing(f"answers={self.path}"):
            if parts or not self.path.is_file() or self.path.read_text() != "".join(f"{line}\n" for line in lines):
                replace_lines(self.path, lines)
            for part in parts:
                part.unlink(missing_ok=True)
        return [self.texts[a.number] for a in self.asked]


def glob_escaped(name: str) -> str:
    return "".join(f"[{sign}]" if sign in "*?[" else sign for sign in name)


@contextlib.contextmanager
def storing(what: str) -> Iterator[None]:
    """Raises StorageError where a file cannot be written."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{what} cannot be written: {error.strerror or error}; mend that, and the same command goes on"
        ) from error


def lock(file: BinaryIO, path: Path) -> None:
    """Until the file is closed, or the process ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"answers={path} is being written by another evaluation; wait for it, or name another"
        ) from error


def drop_cut_line(file: BinaryIO) -> None:
    file.seek(0)
    content = file.read()
    file.truncate(content.rfind(b"\n") + 1)
    file.seek(0, os.SEEK_END)


def check_answers_file(path: Path) -> None:
    """Raises ConfigError where it cannot be a file of answers."""
    if path.suffix != ".jsonl":
        raise ConfigError(f"answers={path} is JSON Lines; give it a name that ends in .jsonl")
    if path.is_dir():
        raise ConfigError(f"answers={path} is a folder; name a file in it")


def blank_file(path: Path) -> Path:
    """Where the answers to pictures of the mean colour are kept."""
    return path.with_name(f"{path.stem}_blank{path.suffix}")
