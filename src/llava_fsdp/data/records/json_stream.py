"""Find the first and last byte of each record in a JSON or JSON Lines file, in bounded memory."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from llava_fsdp.data.records.record import BYTE_ORDER_MARK, LINES
from llava_fsdp.runtime.errors import DataError
from llava_fsdp.runtime.files.safe_load import LFS_HEAD, LFS_POINTER

Span = tuple[int, int, int]
"""Position of a record in its file: (offset in bytes, size in bytes, number of its first line from 1)."""
BLOCK = 1 << 20
MOST_BYTES = 4 << 20
"""Default of the setting `data.max_record_bytes`, in bytes."""
SIGNS, SIGNS_IN_TEXT = re.compile(r'["{}\[\],]'), re.compile(r'["\\]')
"""The characters that determine where a JSON value ends, outside and inside a JSON string."""
SPACE = " \t\r\n"
JSON_NAMES = {"{": "a JSON object", '"': "text"} | dict.fromkeys("-0123456789", "a number")
HEADS: dict[bytes, str] = {
    b"\x1f\x8b": "a gzip file; unpack it: gunzip",
    b"PK\x03\x04": "a zip file; unpack it: unzip",
    b"\x28\xb5\x2f\xfd": "a zstd file; unpack it: unzstd",
    b"\xfd7zXZ\0": "an xz file; unpack it: unxz",
    b"BZh": "a bzip2 file; unpack it: bunzip2",
    b"PAR1": "a Parquet file; give it a name that ends in .parquet",
    LFS_HEAD: LFS_POINTER,
    b"<!doctype": "a page of HTML, as a download that failed leaves it; download the file again",
    b"<html": "a page of HTML, as a download that failed leaves it; download the file again",
}
"""{first bytes of a file type that users pass by mistake: what the file is, and how to fix that}."""


def spans(
    path: Path, after: Span | None = None, max_bytes: int = MOST_BYTES, name: str | Path | None = None
) -> Iterator[Span]:
    """Yield the position of each record in a JSON list or JSON Lines (`.jsonl`) file, in file order.

    Args:
        after: begin with the record after this one.
        max_bytes: greatest size of a record that is parsed to find its end. In a larger record, only brackets and
            quotes are matched.
        name: name of the file in error messages if `path` is a copy of it; None: `path`.

    Raises:
        DataError: a JSON list is not valid JSON. (The lines of a JSON Lines file are not parsed.)
    """
    find = line_spans if path.suffix.lower() in LINES else list_spans
    return find(path, after, max_bytes, path if name is None else name)


def line_spans(path: Path, after: Span | None, max_bytes: int, name: str | Path) -> Iterator[Span]:
    """Yield the span (offset, size, number of the line) of each non-empty line of a JSON Lines file that comes after
    the span `after`; None: from the beginning. A line may have more bytes than `max_bytes`, unless it is a list: this
    may be a whole JSON list, and not JSON Lines."""
    with path.open("rb") as file:
        offset, number = (begin(file, name), 1) if after is None else (after[0] + after[1], after[2])
        file.seek(offset)
        if after is None:
            check_lines(file, name)
            file.seek(offset)
        while line := file.readline(BLOCK):
            is_list = line.lstrip().startswith(b"[")
            size, kept = 0, 0
            while True:
                kept = size + len(line.rstrip(b"\r\n")) if line.strip() else kept
                size += len(line)
                if is_list and size > max_bytes:
                    raise DataError(
                        f"{name}, line {number} is a list of more than {max_bytes} bytes; is it JSON Lines? A JSON "
                        "list belongs into a file whose name ends in .json"
                    )
                if line.endswith(b"\n") or not (line := file.readline(BLOCK)):
                    break
            if kept:
                yield offset, kept, number
            offset += size
            number += 1


def check_lines(file: BinaryIO, name: str | Path) -> None:
    """Raise DataError if the first line of a JSON Lines file, open where its text begins, shows it is a JSON list."""
    first = b""
    while not first and (line := file.readline(BLOCK)):
        first = line.strip()
    # a line that was not read to its end cannot be parsed here
    if not first.startswith(b"[") or len(first) >= BLOCK - 2:
        return
    try:
        json.loads(first)  # a list of one line is refused as a record
    except (ValueError, RecursionError):
        raise DataError(
            f"{name} is no JSON Lines but a JSON list, which belongs into a file whose name ends in .json: rename it"
        ) from None


def list_spans(path: Path, after: Span | None, max_bytes: int, name: str | Path) -> Iterator[Span]:
    """Yield the span (offset, size, number of its first line) of each element of a JSON list that comes after the span
    `after`; None: from the beginning. In a record with more than `max_bytes` bytes, only brackets and quotes are
    matched. `name`: name of the file in error messages."""
    with path.open("rb") as file:
        window = Window(file, begin(file, name), max_bytes) if after is None else window_behind(file, after, max_bytes)
        try:
            if after is None:
                open_list(window, name)
            yield from elements(window, is_first=after is None)
        except json.JSONDecodeError as error:
            at = window.base + error.pos
            raise DataError(
                f"{name} is not JSON: {error.msg}, line {line_of(path, at)}, byte {at}; fix it there, or take the "
                "file from its source again"
            ) from error
        except RecursionError as error:
            at = window.base + window.at
            raise DataError(f"{name}: the record at byte {at} is nested too deeply to be read; fix it") from error


def window_behind(file: BinaryIO, after: Span, max_bytes: int) -> "Window":
    """Return a Window, the part of the file that is in memory, that begins at the byte after the record `after`."""
    offset, size, line = after
    file.seek(offset)
    for begin in range(0, size, BLOCK):
        line += file.read(min(BLOCK, size - begin)).count(b"\n")
    return Window(file, offset + size, max_bytes, line=line)


def check_head(head: bytes, path: Path | str) -> None:
    """Raise DataError if a file's first bytes, `head`, are missing or those of another file type (gzip, HTML, ...)."""
    if not head:
        raise DataError(f"{path} is empty (0 bytes); take it from its source again")
    found = [
        what
        for sign, what in HEADS.items()
        if head.removeprefix(BYTE_ORDER_MARK).lstrip().lower().startswith(sign.lower())
    ]
    if found:
        raise DataError(f"{path} is {found[0]}")


def begin(file: BinaryIO, path: str | Path) -> int:
    """Return the offset of the first byte of text in a file that is open at its beginning: 3 if it begins with a UTF-8
    byte order mark, else 0. Raise DataError if it is empty, of another type (gzip, HTML, ...), or UTF-16 or UTF-32."""
    head = file.read(64)
    check_head(head, path)
    encoding = json.detect_encoding(head[:4])
    if not encoding.startswith("utf-8"):
        raise DataError(f"{path} is {encoding.upper()}; write it as UTF-8")
    return 3 if encoding == "utf-8-sig" else 0


@dataclass
class Window:
    """Reads JSON values from a file, of which only a part is in memory. The bytes are decoded as Latin-1, one character
    per byte, so that an offset in the file is an offset in `text`, the part in memory, plus `base`.

    Latin-1 is safe: all characters of JSON syntax are below 128, and no byte of a multi-byte UTF-8 character is.
    """

    file: BinaryIO
    base: int
    max_bytes: int = MOST_BYTES
    """Greatest size in bytes of a value that is parsed. If a value is larger, only its end is searched."""
    text: str = ""
    at: int = 0
    """Offset in `text` of the next character to read; text before it may be dropped."""
    line: int = 1
    """Line number, from 1, at the offset `counted`."""
    counted: int = 0
    """Offset in `text` up to which newlines have been counted into `line`."""
    ended: bool = False
    decoder: json.JSONDecoder = field(default_factory=lambda: json.JSONDecoder(parse_int=len))
    """A decoder that does not convert integers. Python would raise an error for one with too many digits."""

    def more(self) -> None:
        """Double the text in memory, by at least 1 MiB, and drop the text that was read past. The text has one
        character for each byte (Latin-1), so that positions in it are offsets in the file."""
        self.count_lines()  # of the text that is dropped
        self.text = self.text[self.at :]
        self.base += self.at
        self.at = self.counted = 0
        self.file.seek(self.base + len(self.text))
        read = self.file.read(max(BLOCK, len(self.text)))
        self.ended = not read
        self.text += read.decode("latin-1")

    def count_lines(self) -> None:
        """Make `line` the number of the line with the next character to read."""
        self.line += self.text.count("\n", self.counted, self.at)
        self.counted = self.at

    def next_sign(self) -> str:
        """Move to the next character that is not white space and return it, or "" at the end of the file."""
        while True:
            self.at = after_space(self.text, self.at)
            if self.at < len(self.text):
                return self.text[self.at]
            if self.ended:
                return ""
            self.more()

    def pass_value(self) -> tuple[int, int]:
        """Move past the JSON value that begins here, and return its range of bytes [begin, end) in the file.

        The value counts as complete only if `,` or `]` follows, because a number may continue after the text in memory.
        More of the file is read until it is. A value of more than `max_bytes` bytes is passed without parsing it.

        Raises:
            json.JSONDecodeError: the file ends before the value does; its position is one of the text in memory.
        """
        begin = self.base + self.at
        while True:
            try:
                _, end = self.decoder.raw_decode(self.text, self.at)
                behind = after_space(self.text, end)
                if self.text[behind : behind + 1] in (",", "]") and behind < len(self.text):
                    self.at = end
                    return begin, self.base + end
                # a whole value of allowed size, at the end of the text in memory: what follows must be read first
                message, wrong_at = "Expecting ',' delimiter", behind
                ends_with_text = end - self.at <= self.max_bytes and behind == len(self.text)
            except json.JSONDecodeError as caught:  # not kept: the exception references this frame and all its text
                message, wrong_at, ends_with_text = caught.msg, caught.pos, False
            if self.ended:
                raise json.JSONDecodeError(message, "", wrong_at)
            if len(self.text) - self.at > self.max_bytes and not ends_with_text:
                return begin, self.pass_large(begin, message, self.base + wrong_at)
            self.more()

    def pass_large(self, begin: int, wrong: str, where: int) -> int:
        """Move past a JSON value of more than `max_bytes` bytes without parsing it, and return the offset in the file
        of its end. Only brackets and quotes are matched.

        Called when the JSON parser has failed on the value although it had more than `max_bytes` bytes of it.

        Args:
            begin: offset in the file at which the value begins.
            wrong: the parser's error message.
            where: offset in the file that the message is about.

        Raises:
            JSONDecodeError: with the message `wrong`: the value has no end, or has at most `max_bytes` bytes, so that
                the parser's error was right.
        """
        depth, in_text, is_closed = 0, False, False
        while not is_closed:
            found = (SIGNS_IN_TEXT if in_text else SIGNS).search(self.text, self.at)
            if found is None:
                if self.ended:
                    break
                self.at = max(self.at, len(self.text))  # an escape may have moved `at` beyond the text
                self.more()
                continue
            sign = found[0]
            if depth == 0 and not in_text and sign in (",", "]"):  # the end of a number, true, false or null
                self.at = found.start()
                break
            self.at = found.end() + (sign == "\\")
            in_text ^= sign == '"'
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(sign, 0)
            is_closed = depth <= 0 and not in_text
        end = self.base + self.at
        if depth or in_text or end - begin <= self.max_bytes or self.next_sign() not in (",", "]"):
            raise json.JSONDecodeError(wrong, "", where - self.base)
        return end


def after_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in SPACE:
        at += 1
    return at


def open_list(window: Window, path: str | Path) -> None:
    """Move past the opening bracket of a JSON list. Raise an error if the file begins otherwise."""
    sign = window.next_sign()
    if sign in JSON_NAMES:
        raise DataError(
            f"{path} holds {JSON_NAMES[sign]}, and is not a list of records; LLaVA data is a JSON list, or JSON Lines "
            "in a file whose name ends in .jsonl"
        )
    if sign != "[":
        raise json.JSONDecodeError("Expecting value", window.text, window.at)
    window.at += 1


def elements(window: Window, is_first: bool) -> Iterator[Span]:
    """Yield the position of each further element of a JSON list. The window is right after the opening bracket
    (`is_first`), or right after an element."""
    while (sign := window.next_sign()) != "]":
        if not is_first:
            if sign != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", window.text, window.at)
            window.at += 1
            if window.next_sign() == "]":
                raise json.JSONDecodeError("Illegal trailing comma before end of array", window.text, window.at)
        is_first = False
        window.count_lines()
        line = window.line
        begin, end = window.pass_value()
        yield begin, end - begin, line
    window.at += 1
    if window.next_sign():
        raise json.JSONDecodeError("Extra data", window.text, window.at)


def line_of(path: Path, at: int) -> int:
    """Return the number, from 1, of the line with the byte at offset `at`."""
    line = 1
    with path.open("rb") as file:
        while at > 0 and (read := file.read(min(at, BLOCK))):
            line += read.count(b"\n")
            at -= len(read)
    return line
