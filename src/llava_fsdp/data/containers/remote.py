"""List the files of remote storages, and read byte ranges of them within a time limit.

URLs have the form `s3://BUCKET/KEY`, `gs://BUCKET/KEY` or `hf://datasets/ORG/NAME[@REVISION]/PATH`. Credentials come
from the environment variables and files of each storage's own library, and appear in no message.

Errors: RemoteGone (there is no such file), RemoteForbidden, RemoteAway (no answer before the deadline), SourceError
(the URL is not one of a remote storage) and ConfigError (a package is not installed).
"""

import os
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from llava_fsdp.data.containers.hub_client import HubClient
from llava_fsdp.data.containers.object_store import GsClient, S3Client
from llava_fsdp.data.containers.remote_file import Client, Failure, RemoteFile
from llava_fsdp.runtime.errors import RemoteAway, RemoteChanged, RemoteForbidden, RemoteGone, SourceError
from llava_fsdp.runtime.text.log import log
from llava_fsdp.runtime.text.redact import redact
from llava_fsdp.runtime.text.terminal_text import shown_name

T = TypeVar("T")
Range = tuple[RemoteFile, int, int]
"""(file, first byte, number of bytes)."""

CLIENTS: dict[str, Callable[[float, int], Client]] = {"s3": S3Client, "gs": GsClient, "hf": HubClient}
LONGEST_URL = 1024
"""Greatest number of bytes of the URL of a file in a folder. S3 and Google Cloud Storage allow no longer names."""
VERSION = "?versionId="
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 8.0
"""Seconds of the first pause before a failed request is repeated, and of the longest one."""
WARN_AFTER = 5
"""Number of failed requests, about 3 seconds, after which a warning is logged."""
JITTER = random.SystemRandom()
"""Varies the pauses. The functions of `random` are not used, because a user may have seeded them."""
MEANINGS: dict[type[SourceError], str] = {
    RemoteGone: "does not exist; was it deleted or renamed? Check the address, or prepare the data again",
    RemoteChanged: "was changed after the data was prepared; restore it, or prepare the data again",
    RemoteForbidden: "may not be read with these credentials, or does not exist; check the variables of the storage "
    "(AWS_PROFILE or AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN) and that they have access",
    RemoteAway: "could not be read before the deadline; check the network and the storage's state, and start again",
}


class RemoteStorage:
    """Lists and reads remote files. Several threads may use it. After a fork, or when it is pickled to another process,
    that process makes connections of its own.

    Args:
        deadline: seconds within which a range must be read, repeated requests included.
        idle: seconds without receiving a byte after which a request is given up and repeated.
        in_flight: greatest number of simultaneous requests.
    """

    def __init__(self, deadline: float = 60.0, idle: float = 10.0, in_flight: int = 16):
        """`deadline`: seconds within which a range must be read; `idle`: seconds without a byte after which a request
        is repeated; `in_flight`: greatest number of simultaneous requests."""
        assert deadline > 0 and idle > 0 and in_flight > 0
        self.deadline = deadline
        self.idle = idle
        self.in_flight = in_flight
        self._objects: dict[tuple[int, str], Any] = {}
        """{(process id, URL scheme or `pool`): the client of the scheme, or the thread pool}."""

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteStorage, (self.deadline, self.idle, self.in_flight)

    def list_files(self, url: str) -> list[RemoteFile]:
        """Return the file that a URL names, all files below a folder, or those that match a pattern, sorted by name.

        Args:
            url: URL of a file or a folder, or a pattern with `*`, `?`, `[...]` (within a name) or `**` (any folders). A
                URL of a file of S3 may end with `?versionId=ID`. A branch or tag of the hub becomes its commit.
        """
        folder, start, pattern = split_pattern(url)
        client = self._client(url)
        files = self._repeat(url, lambda seconds: client.find(folder, start, seconds))
        found = [file for path, file in files.items() if pattern is None or pattern.fullmatch(path)]
        if not found:
            raise error_about(url, RemoteGone, "no file found")
        return sorted(found, key=lambda file: file.name)  # code points have the order of their bytes in UTF-8

    def pin_folder(self, url: str) -> str:
        """Return the URL of a folder, with a branch or tag of the hub replaced by its commit. `stat` takes this URL
        with the name of a file appended. Whether the folder exists is not checked."""
        client = self._client(url)
        return self._repeat(url, lambda seconds: client.pin_folder(url.rstrip("/"), seconds))

    def stat(self, url: str) -> RemoteFile:
        """Request the size and the present version of a file. `url`: URL of a folder that `pin_folder` returns, with
        the name of the file appended. Raise RemoteGone if there is no such file. A URL with a version (VERSION,
        `?versionId=`) counts as one of no file."""
        if len(url.encode()) > LONGEST_URL or VERSION in url:
            raise error_about(url, RemoteGone, "no file has such a name")
        client = self._client(url)
        return self._repeat(url, lambda seconds: client.stat(url, seconds))

    def stat_files(self, urls: Iterable[str]) -> dict[str, RemoteFile | None]:
        """Call `stat` for several URLs, up to `in_flight` requests at once; None for a missing file."""

        def stat(url: str) -> RemoteFile | None:
            try:
                return self.stat(url)
            except RemoteGone:
                return None

        distinct_urls = list(dict.fromkeys(urls))
        return dict(zip(distinct_urls, all_results([self.submit(stat, url) for url in distinct_urls]), strict=True))

    def read_range(self, file: RemoteFile, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes from byte `offset` on, with the content that the file had when it was listed;
        raise RemoteChanged if it has other content now. The range must not go past the end of the file."""
        assert 0 <= offset and 0 <= size and offset + size <= file.size, (file, offset, size)
        if size == 0:
            return b""
        client = self._client(file.name)
        return self._repeat(file.name, lambda seconds: client.fetch(file, offset, size, seconds))

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run a function in one of this process's `in_flight` threads."""
        pool = self._of_this_process("pool", lambda: ThreadPoolExecutor(self.in_flight, thread_name_prefix="remote"))
        return pool.submit(function, *arguments)

    def _client(self, url: str) -> Client:
        """Return this process's client for the storage of a URL; raise SourceError if it is not a URL of a storage."""
        scheme = url.partition("://")[0]
        if scheme not in CLIENTS:
            raise SourceError(
                f"{shown_url(url)} is no URL of a remote storage; it must begin with s3://, gs:// or hf://datasets/"
            ).about(file=shown_url(url))
        return self._of_this_process(scheme, lambda: CLIENTS[scheme](self.idle, self.in_flight))

    def _of_this_process(self, name: str, make: Callable[[], Any]) -> Any:
        """Return an object that belongs to this process alone, such as a client; the first call with its name makes it.
        There is no lock, because a fork could copy a held one; if two threads make the object, the first is kept."""
        key = (os.getpid(), name)
        found = self._objects.get(key)
        return found if found is not None else self._objects.setdefault(key, make())

    def _repeat(self, url: str, request: Callable[[float], T]) -> T:
        """Return the result of `request`, which is called with the number of seconds left. If it raises Failure of the
        kind RemoteAway, the storage did not answer, and the request is repeated after a pause. A Failure of another
        kind, or the last one before the deadline, is raised as an error of its kind about `url`."""
        begin = time.monotonic()
        end = begin + self.deadline
        attempts, kind, detail = 0, RemoteAway, ""
        while True:
            attempts += 1
            try:
                return request(end - time.monotonic())
            except Failure as failure:
                kind, detail = failure.kind, failure.detail
                if attempts == WARN_AFTER and kind is RemoteAway:
                    log().warning(
                        "%s does not answer (%s); asked again for %d s", shown_url(url), detail, self.deadline
                    )
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (attempts - 1)) * JITTER.uniform(0.5, 1)
            if kind is not RemoteAway or time.monotonic() + pause >= end:
                break
            time.sleep(pause)
        if kind is RemoteAway:
            detail += f"; {attempts} requests in {time.monotonic() - begin:.0f} s"
        # outside of the except clause: a library's error as the context would be printed, with signed URLs in its text
        raise error_about(url, kind, detail)


def all_results(futures: Sequence[Future[T]]) -> list[T]:
    """Return the results of all futures; raise the first error, and cancel what has not begun."""
    try:
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future in done and (error := future.exception()) is not None:
                raise error
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


def split_pattern(url: str) -> tuple[str, str, re.Pattern[str] | None]:
    """Split a URL, which may be a pattern with `*`, `?` or `[...]`.

    Returns:
        (URL of the folder to list; fixed beginning of the paths below it; regular expression for them or, without a
        pattern, None)
    """
    from fsspec.utils import glob_translate

    sign = re.search(r"[*\[]|\?(?!versionId=)", url)  # `?versionId=` names a version of a file
    if sign is None:
        return url.rstrip("/"), "", None
    folder, _, start = url[: sign.start()].rpartition("/")
    try:
        return folder, start, re.compile(glob_translate(url[len(folder) + 1 :]))
    except (ValueError, re.error) as error:
        raise SourceError(
            f"{shown_url(url)} is no valid pattern: {error}; ** must be a whole part of the path"
        ) from None


def error_about(url: str, kind: type[SourceError], detail: str) -> SourceError:
    """Return the error of the class `kind` to raise about a URL: what the class means, what to do, and `detail`."""
    name = shown_url(url)
    return kind(f"{name} {MEANINGS[kind]} ({detail})").about(file=name)


def shown_url(url: str) -> str:
    """Return a URL without its query, which may hold a signature, and without secrets."""
    return shown_name(redact(re.sub(r"\?[^/?]*=.*", "", url, flags=re.DOTALL)))
