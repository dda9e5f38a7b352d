"""Write answers to a JSON Lines file that the original LLaVA's scorers can read. An interrupted evaluation that is
started again keeps them and adds the missing ones.

A single process appends to the answers file itself. With several processes, each appends to its own part file beside it
(`FILE.part-0-of-8`), and rank 0 merges the part files once every question has an answer; the processes do not
communicate in any other way. Every line contains the number of its question and the evaluation's settings, so that an
evaluation can continue with another number of processes.
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
from llava_fsdp.runtime.files.jsonl import replace_lines

POLL = 0.5
"""Seconds between two looks of rank 0 for new answers of other processes."""
STALL = 1800.0
"""Seconds without a new answer after which rank 0 stops waiting."""


@dataclass(frozen=True)
class QuestionShard:
    """The questions that one of `size` processes answers: every `size`-th question, from number `rank` on."""

    rank: int = 0
    size: int = 1


@dataclass
class AnswersFile:
    """A file of answers, and the part files that rank 0 merges into it.

    Attributes:
        questions: all questions of the benchmark.
        settings: everything on which an answer depends: model, maximum length, template, ...
        model_id: name of the model, which every line contains.
        shard: the questions that this process answers.
        texts: answers read or written so far, by the number of the question.
        thoughts_cut: numbers of the questions whose answers ended within a thought, at the maximum number of tokens.
        read: bytes of each file that have been read so far; they end with a complete line.
    """

    path: Path
    questions: Sequence[BenchmarkQuestion]
    settings: dict[str, Any]
    model_id: str
    shard: QuestionShard = QuestionShard()
    texts: dict[int, str] = field(default_factory=dict)
    thoughts_cut: set[int] = field(default_factory=set)
    read: dict[Path, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_number = {question.number: question for question in self.questions}
        self.read_new()

    def read_new(self) -> bool:
        """Read the lines added since the last call; return whether they contain new answers. Raise ConfigError if a
        line has the wrong form, answers a question that is not in this evaluation, or was written with other settings,
        such as another model."""
        before = len(self.texts)
        for path in [*self.parts(), self.path]:  # the answers file last, as it is complete before parts are deleted
            for line in self.new_lines(path):
                number, text, is_cut = self.parse(path, line)
                if is_cut and number not in self.texts:
                    self.thoughts_cut.add(number)
                self.texts.setdefault(number, text)
        return len(self.texts) > before

    def parts(self) -> list[Path]:
        return sorted(self.path.parent.glob(f"{glob.escape(self.path.name)}.part-*-of-*"))

    def new_lines(self, path: Path) -> list[bytes]:
        """Return the complete lines added to a file since the last call. A last line without a newline is left for
        later: its process is still writing it, or was stopped while writing."""
        begin = self.read.get(path, 0)
        try:
            with path.open("rb") as file:
                file.seek(begin)
                content = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"answers={path} cannot be read: {error.strerror or error}") from error
        complete = content[: content.rfind(b"\n") + 1]
        self.read[path] = begin + len(complete)
        return complete.split(b"\n")[:-1]

    def parse(self, path: Path, line: bytes) -> tuple[int, str, bool]:
        """Return the question's number and the answer in a line, and whether the answer ended within a thought. Raise
        ConfigError if the line has the wrong form, or if its question or settings are not those of this evaluation."""
        cure = "name another file with answers=FILE, or move this one away"
        try:
            row = json.loads(line)
            number, text, settings = row["metadata"]["number"], row["text"], dict(row["metadata"]["how"])
            question_there = row["question_id"], row["prompt"], row["metadata"]["image"], row["metadata"].get("tools")
            is_cut = bool(row["metadata"].get("thought_cut"))
            question = self.by_number.get(number)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{path} has a line that this program has not written: {line[:100]!r}; {cure}") from error
        if settings != self.settings:
            differences = [
                f"{k}={settings.get(k)} there, {v} here" for k, v in self.settings.items() if settings.get(k) != v
            ]
            raise ConfigError(f"{path} was answered with other settings: {', '.join(differences) or settings}; {cure}")
        question_here = None
        if question is not None:
            question_here = question.id, question.prompt, list(question.images), tools_digest(question)
        if question_there != question_here or not isinstance(text, str):
            prompt_there = str(question_there[1])[-100:]
            raise ConfigError(
                f"{path} answers a question {number} (id {question_there[0]}, {prompt_there!r}) that is not "
                f"among these {len(self.questions)}: other questions or tools, another suffix or limit? Then {cure}"
            )
        return number, text, is_cut

    def missing_questions(self) -> list[BenchmarkQuestion]:
        """Return the questions that this process must still answer."""
        share = self.questions[self.shard.rank :: self.shard.size]
        return [question for question in share if question.number not in self.texts]

    @property
    def path_to_write(self) -> Path:
        """The answers file if there is one process, else this process's part file."""
        if self.shard.size == 1:
            return self.path
        return self.path.with_name(f"{self.path.name}.part-{self.shard.rank}-of-{self.shard.size}")

    @contextlib.contextmanager
    def open_for_writing(self) -> Iterator[Callable[[Sequence[BenchmarkQuestion], Sequence[str]], None]]:
        """Context manager that yields a function which appends the answers to questions to the file that this process
        writes. An answer whose question is in `thoughts_cut`, because it ended within a thought, is marked in its line.
        An incomplete last line of the file is removed first.

        Raises:
            ConfigError: another process has opened the file for writing.
            StorageError: the file cannot be written.
        """
        path = self.path_to_write
        with contextlib.ExitStack() as stack:
            with storage_errors(f"answers={path}"):
                path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(path.open("a+b"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise ConfigError(
                        f"answers={path} is being written by another evaluation; wait for it, or name another"
                    ) from error
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)  # mode a appends to the end at any position

            def add(questions: Sequence[BenchmarkQuestion], texts: Sequence[str]) -> None:
                pairs = list(zip(questions, texts, strict=True))
                with storage_errors(f"answers={path}"):
                    file.write("".join(f"{self.line(question, text)}\n" for question, text in pairs).encode())
                    file.flush()
                self.texts |= {question.number: text for question, text in pairs}

            yield add

    def line(self, question: BenchmarkQuestion, text: str) -> str:
        """Return an answer as a line of JSON in LLaVA's format, with the settings of this evaluation (`how`) in its
        metadata. `answer_id` is a hash of question and settings, so it is the same in each run."""
        metadata = {"number": question.number, "image": list(question.images), "how": self.settings}
        if question.tools:
            metadata["tools"] = tools_digest(question)
        row = {
            "question_id": question.id,
            "prompt": question.prompt,
            "text": text,
            "answer_id": xxh3_64_hexdigest(json.dumps([metadata, question.prompt]).encode()),
            "model_id": self.model_id,
            # marked if the answer reached the maximum number of tokens within a thought
            "metadata": metadata | ({"thought_cut": True} if question.number in self.thoughts_cut else {}),
        }
        return json.dumps(row)

    def wait(self, stall: float = STALL) -> None:
        """Wait until the files contain an answer to every question. If another process fails, torchrun ends this one.

        Raises:
            CommunicationError: no process has written a new answer for `stall` seconds.
        """
        last_answer_at = time.monotonic()
        while len(self.texts) < len(self.questions):
            if self.read_new():
                last_answer_at = time.monotonic()
            elif time.monotonic() - last_answer_at > stall:
                missing = [n for n, question in enumerate(self.questions) if question.number not in self.texts]
                raise CommunicationError(
                    f"no new answer for {stall:.0f} s, and {len(missing)} are missing, of ranks "
                    f"{sorted({n % self.shard.size for n in missing})}; all ranks must see the folder of "
                    f"answers={self.path}. The same command continues"
                )
            time.sleep(POLL)

    def finish(self) -> list[str]:
        """Write all answers to the answers file in the order of the questions, delete the part files; return them."""
        lines = [self.line(question, self.texts[question.number]) for question in self.questions]
        parts = self.parts()
        with storage_errors(f"answers={self.path}"):
            if parts or not self.path.is_file() or self.path.read_text() != "".join(f"{line}\n" for line in lines):
                replace_lines(self.path, lines)
            for part in parts:
                part.unlink(missing_ok=True)
        return [self.texts[question.number] for question in self.questions]


@contextlib.contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Context manager in which an OSError becomes a StorageError about `what`, the file that is written."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{what} cannot be written: {error.strerror or error}; fix that, and the same command continues"
        ) from error


def tools_digest(question: BenchmarkQuestion) -> str | None:
    """Return a digest of the tools that the answer to a question may call; None without tools."""
    return xxh3_64_hexdigest(json.dumps(question.tools).encode()) if question.tools else None


def blank_file(path: Path) -> Path:
    """Return the path of a second file beside an answers file, for answers to the same questions with blank images."""
    return path.with_name(f"{path.stem}_blank{path.suffix}")
