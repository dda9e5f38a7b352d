"""Names and pins of remote files, and what is common to the clients of all remote storages."""

import logging
import re
from dataclasses import dataclass
from typing import Protocol

from llava_fsdp.runtime.errors import (
    ConfigError,
    RemoteAway,
    RemoteChanged,
    RemoteForbidden,
    RemoteGone,
    SourceError,
)

KINDS: dict[int, type[SourceError]] = {
    401: RemoteForbidden,
    403: RemoteForbidden,
    404: RemoteGone,
    410: RemoteGone,
    412: RemoteChanged,
    416: RemoteChanged,
}
"""What an HTTP status of a failed request means. Every other status means RemoteAway."""
SHA256 = "sha256:"
"""Beginning of a pin that is the digest of the file's content."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a remote storage, with the content that it had when it was listed."""

    name: str
    """URL of the file. A URL of the Hugging Face hub holds the commit."""
    size: int
    """Number of bytes."""
    pin: str
    """Identifies the content: `etag:`, `generation:`, `sha256:` or `git:`, and the storage's own value."""

    @property
    def content(self) -> str:
        """Identifies the content among all files: two files with the same value have the same bytes."""
        return self.pin if self.pin.startswith(SHA256) else f"{self.name} {self.size} {self.pin}"


class Failure(Exception):
    """Internal: one request failed. Never seen outside of this package."""

    def __init__(self, kind: type[SourceError], detail: str):
        """Create the failure.

        Args:
            kind: class of the error that a caller gets.
            detail: a few words without secrets, such as `HTTP 503 SlowDown`.
        """
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


class Client(Protocol):
    """Connections of one process to one kind of storage. Several threads may use it. It makes single requests and
    repeats none."""

    def find(self, folder: str, start: str, seconds: float) -> dict[str, RemoteFile]:
        """Return the files below a folder whose relative paths begin with `start`, or the file `folder` itself.

        Args:
            folder: URL without a final slash.
            seconds: how long this may take.

        Returns:
            {path relative to `folder`: file}; the path is empty for the file `folder` itself.

        Raises:
            Failure: the request failed.
            SourceError: `folder` is no URL of this storage.
        """
        ...

    def pin_folder(self, folder: str, seconds: float) -> str:
        """Return the URL of a folder to which the names of its files are added; on the hub it holds the commit.

        Args:
            folder: URL without a final slash. Whether the folder exists is not checked.
            seconds: how long this may take.

        Raises:
            Failure: the request failed.
            SourceError: `folder` is no URL of this storage.
        """
        ...

    def stat(self, url: str, seconds: float) -> RemoteFile:
        """Return a file of a folder of `pin_folder`, pinned as it is now. No characters of the URL are special.

        Args:
            seconds: how long this may take.

        Raises:
            Failure: the request failed.
        """
        ...

    def fetch(self, file: RemoteFile, offset: int, size: int, seconds: float) -> bytes:
        """Return exactly `size` bytes from `offset` of the pinned content.

        Args:
            seconds: how long this may take.

        Raises:
            Failure: the request failed.
        """
        ...


def failure(status: int | None, detail: str) -> Failure:
    """Return the failure for an HTTP status; None: there was no answer."""
    return Failure(KINDS.get(status or 0, RemoteAway), detail if status is None else f"HTTP {status} {detail}".rstrip())


def check_answer(file: RemoteFile, size: int, length: int | None, content_range: str | None) -> None:
    """Check the headers of an answer to a request for a range, before its body is read.

    Args:
        length: value of Content-Length.
        content_range: value of Content-Range, such as `bytes 0-9/300`.

    Raises:
        Failure: the file has another size than its pin says, or the answer has another length than asked for.
    """
    found = re.fullmatch(r"bytes \d+-\d+/(\d+)", content_range or "")
    if found and int(found[1]) != file.size:
        raise Failure(RemoteChanged, f"it has {found[1]} bytes, and had {file.size}")
    if length != size:
        raise Failure(RemoteAway, f"the answer has {length} bytes, {size} were asked for")


def check_length(data: bytes, size: int) -> bytes:
    """Return the data, or raise Failure if it has not `size` bytes."""
    if len(data) != size:
        raise Failure(RemoteAway, f"{len(data)} bytes came, {size} were asked for")
    return data


def is_missing(url: str, package: str) -> ConfigError:
    return ConfigError(f"{url} needs the package {package}: pip install 'llava-fsdp[cloud]'")


def quiet_loggers(*names: str) -> None:
    """Let the loggers of libraries report warnings only. Below that level they log URLs with signatures, and headers
    of requests."""
    for name in names:
        logger = logging.getLogger(name)
        logger.setLevel(max(logger.level, logging.WARNING))
