"""A file in a remote storage, and the interface and checks that the clients of all remote storages share."""

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

KINDS_OF_STATUS: dict[int, type[SourceError]] = {
    401: RemoteForbidden,
    403: RemoteForbidden,
    404: RemoteGone,
    410: RemoteGone,
    412: RemoteChanged,
    416: RemoteChanged,
}
"""What an HTTP status of a failed request means. Every other status means RemoteAway."""
SHA256 = "sha256:"
"""Prefix of a `RemoteFile.pin` that is the SHA-256 digest of the file's content."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file in the version that it had when it was listed."""

    name: str
    """URL of the file. A URL of the Hugging Face hub holds the commit."""
    size: int
    pin: str
    """The storage's text for this version of the file: `etag:`, `generation:`, `sha256:` or `git:`, followed by its
    value."""

    @property
    def content(self) -> str:
        """Text that identifies the content: two files with the same text have the same bytes."""
        return self.pin if self.pin.startswith(SHA256) else f"{self.name} {self.size} {self.pin}"


class Failure(Exception):
    """A single request failed. Internal to this package: callers get an error of the class `kind`.

    Args:
        kind: class of the error that is raised to the caller if the request is not repeated.
        detail: a few words without secrets, such as `HTTP 503 SlowDown`.
    """

    def __init__(self, kind: type[SourceError], detail: str):
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


class Client(Protocol):
    """The connections of one process to one kind of remote storage. Several threads may use a client. It repeats no
    failed request. Every method has a time limit in seconds, and raises Failure, or SourceError for a wrong URL."""

    def find(self, folder: str, start: str, seconds: float) -> dict[str, RemoteFile]:
        """List the files below a folder (a URL without a final slash) whose paths relative to it begin with `start`, as
        {path: file}. If the URL is that of a file, list this file, with an empty path."""
        ...

    def pin_folder(self, folder: str, seconds: float) -> str:
        """Return the URL of a folder, without a final slash; on the Hugging Face hub, with the branch or tag replaced
        by the commit; the name of a file may be appended. Does not check that it exists. `seconds`: time limit."""
        ...

    def stat(self, url: str, seconds: float) -> RemoteFile:
        """Request the size and the present version of a file in a folder that `pin_folder` returns. No characters of
        the URL are special."""
        ...

    def fetch(self, file: RemoteFile, offset: int, size: int, seconds: float) -> bytes:
        """Return exactly `size` bytes from byte `offset` on, as the file was when it was listed."""
        ...


def failure(status: int | None, detail: str) -> Failure:
    """Return the Failure to raise for a request that failed. `status`: the HTTP status of the answer; None: there was
    no answer."""
    return Failure(
        KINDS_OF_STATUS.get(status or 0, RemoteAway), detail if status is None else f"HTTP {status} {detail}".rstrip()
    )


def check_answer(file: RemoteFile, size: int, length: int | None, content_range: str | None) -> None:
    """Raise Failure if the headers of an answer to a request for a byte range say that the file has another size than
    when it was listed, or the answer another length than was requested.

    Args:
        length: value of the header Content-Length.
        content_range: value of the header Content-Range, such as `bytes 0-9/300`.
    """
    found = re.fullmatch(r"bytes \d+-\d+/(\d+)", content_range or "")
    if found and int(found[1]) != file.size:
        raise Failure(RemoteChanged, f"it has {found[1]} bytes, and had {file.size}")
    if length != size:
        raise Failure(RemoteAway, f"the answer has {length} bytes, {size} were asked for")


def check_length(data: bytes, size: int) -> bytes:
    """Return `data`, the body of an answer; raise Failure if it has not `size` bytes."""
    if len(data) != size:
        raise Failure(RemoteAway, f"{len(data)} bytes came, {size} were asked for")
    return data


def missing_package(url: str, package: str) -> ConfigError:
    """Return the error to raise for a URL whose storage needs a package that is not installed."""
    return ConfigError(f"{url} needs the package {package}: pip install 'llava-fsdp[cloud]'")


def quiet_loggers(*names: str) -> None:
    """Raise the level of loggers to WARNING. Below it, libraries log URLs with signatures, and request headers."""
    for name in names:
        logger = logging.getLogger(name)
        logger.setLevel(max(logger.level, logging.WARNING))
