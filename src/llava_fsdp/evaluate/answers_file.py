"""Append a model's answers to JSON Lines that the original LLaVA's scorers read; a later run continues the file.

One process appends to the file itself. With several, each appends to its own part beside it (`FILE.part-0-of-8`), and
rank 0 merges the parts once they hold all answers; the processes do not communicate otherwise. Every line names its
question and the settings, so that any number of processes can continue what any other number has begun.
"""

import contextlib
import fcntl
import glob
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from llava_fsdp.evaluate.question import BenchmarkQuestion
from llava_fsdp.runtime.errors import CommunicationError, ConfigError, StorageError
from llava_fsdp.runtime.jsonl import replace_lines

POLL = 0.5
"""Seconds between two reads of the answers that other processes have written."""
STALL = 1800.0
"""Seconds without a new answer of any process after which rank 0 stops waiting."""


@dataclass(frozen=True)
class Shard:
    """The share of the questions that a process answers: every `size`-th question, beginning with number `rank`."""

    rank: int = 0
    size: int = 1


@dataclass
class AnswersFile:
    """A file of a model's answers, and the parts that several processes write before rank 0 merges them into it.

    Attributes:
        settings: everything but the question that an answer depends on: model, length, template, ...
        texts: answers read or written so far, by the number of their question.
        read: number of bytes read so far of each file, up to the end of a line.
    """

    path: Path
    questions: Sequence[BenchmarkQuestion]
    settings: dict[str, Any]
    model_id: str
    shard: Shard = Shard()
    texts: dict[int, str] = field(default_factory=dict)
    read: dict[Path, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_number = {question.number: question for question in self.questions}
        self.read_new()

    def read_new(self) -> bool:
        """Read the lines added to the answers file and its parts since the last call; return whether there were new
        answers.

        Raises:
            ConfigError: a line does not answer one of these questions with these settings.
        """
        known = len(self.texts)
        for path in [*self.parts(), self.path]:  # parts are deleted only once the file is complete
            for line in self.new_lines(path):
                number, text = self.parse(path, line)
                self.texts.setdefault(number, text)
        return len(self.texts) > known

    def parts(self) -> list[Path]:
        return sorted(self.path.parent.glob(f"{glob.escape(self.path.name)}.part-*-of-*"))

    def new_lines(self, path: Path) -> list[bytes]:
        """Return a file's complete lines after the bytes read so far.

        A last line without a newline is still being written, or was cut off; it does not count yet.
        """
        begin = self.read.get(path, 0)
        try:
            with path.open("rb") as file:
                file.seek(begin)
                content = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"answers={path} cannot be read: {error.strerror or error}") from error
        whole = content[: content.rfind(b"\n") + 1]
        self.read[path] = begin + len(whole)
        return whole.split(b"\n")[:-1]

    def parse(self, path: Path, line: bytes) -> tuple[int, str]:
        """Return the question's number and the answer in a line."""
        cure = "name another file with answers=FILE, or move this one away"
        try:
            row = json.loads(line)
            number, text, settings = row["metadata"]["number"], row["text"], dict(row["metadata"]["how"])
            asked = row["question_id"], row["prompt"], row["metadata"]["image"]
            question = self.by_number.get(number)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} has a line that this program has not written: {line[:100]!r}; {cure}") from error
        if settings != self.settings:
            other = [f"{k}={settings.get(k)} there, {v} here" for k, v in self.settings.items() if settings.get(k) != v]
            raise ConfigError(f"{path} was answered with other settings: {', '.join(other) or settings}; {cure}")
        here = None if question is None else (question.id, question.prompt, list(question.images))
        if asked != here or not isinstance(text, str):
            raise ConfigError(
                f"{path} answers a question {number} (id {asked[0]}, {str(asked[1])[-100:]!r}) that is not among these "
                f"{len(self.questions)}: another file of questions, suffix or limit? Then {cure}"
            )
        return number, text

    def pending(self) -> list[BenchmarkQuestion]:
        """Return the questions of this process's share that have no answer yet, in order."""
        share = self.questions[self.shard.rank :: self.shard.size]
        return [question for question in share if question.number not in self.texts]

    @property
    def own_path(self) -> Path:
        """Path of the file that this process appends its answers to."""
        if self.shard.size == 1:
            return self.path
        return self.path.with_name(f"{self.path.name}.part-{self.shard.rank}-of-{self.shard.size}")

    @contextlib.contextmanager
    def writing(self) -> Iterator[Callable[[Sequence[BenchmarkQuestion], Sequence[str]], None]]:
        """Context manager that gives a function to append answers to this process's file; an incomplete last line is
        removed first.

        Raises:
            ConfigError: another process is writing the file.
            StorageError: the file cannot be written.
        """
        path = self.own_path
        with contextlib.ExitStack() as stack:
            with storing(f"answers={path}"):
                path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(path.open("a+b"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise ConfigError(
                        f"answers={path} is being written by another evaluation; wait for it, or name another"
                    ) from error
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)  # appends go to the end whatever the position

            def add(questions: Sequence[BenchmarkQuestion], texts: Sequence[str]) -> None:
                pairs = list(zip(questions, texts, strict=True))
                with storing(f"answers={path}"):
                    file.write("".join(f"{self.line(question, text)}\n" for question, text in pairs).encode())
                    file.flush()
                self.texts |= {question.number: text for question, text in pairs}

            yield add

    def line(self, question: BenchmarkQuestion, text: str) -> str:
        metadata = {"number": question.number, "image": list(question.images), "how": self.settings}
        row = {
            "question_id": question.id,
            "prompt": question.prompt,
            "text": text,
            "answer_id": xxh3_64_hexdigest(json.dumps([metadata, question.prompt]).encode()),
            "model_id": self.model_id,
            "metadata": metadata,
        }
        return json.dumps(row)

    def wait(self, stall: float = STALL) -> None:
        """Wait until all processes have written their answers; torchrun ends this one if another fails.

        Raises:
            CommunicationError: no answer came for `stall` seconds.
        """
        since = time.monotonic()
        while len(self.texts) < len(self.questions):
            if self.read_new():
                since = time.monotonic()
            elif time.monotonic() - since > stall:
                missing = [n for n, question in enumerate(self.questions) if question.number not in self.texts]
                raise CommunicationError(
                    f"no new answer for {stall:.0f} s, and {len(missing)} are missing, of ranks "
                    f"{sorted({n % self.shard.size for n in missing})}; all ranks must see the folder of "
                    f"answers={self.path}. The same command continues"
                )
            time.sleep(POLL)

    def finish(self) -> list[str]:
        """Write the complete answers file in the order of the questions, delete the parts, and return all answers."""
        lines = [self.line(question, self.texts[question.number]) for question in self.questions]
        parts = self.parts()
        with storing(f"answers={self.path}"):
            if parts or not self.path.is_file() or self.path.read_text() != "".join(f"{line}\n" for line in lines):
                replace_lines(self.path, lines)
            for part in parts:
                part.unlink(missing_ok=True)
        return [self.texts[question.number] for question in self.questions]


@contextlib.contextmanager
def storing(what: str) -> Iterator[None]:
    """Context manager that turns an OSError of writing into a StorageError that names the file."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{what} cannot be written: {error.strerror or error}; fix that, and the same command continues"
        ) from error


def blank_file(path: Path) -> Path:
    """Return the path of the file of the answers given to blank images."""
    return path.with_name(f"{path.stem}_blank{path.suffix}")
