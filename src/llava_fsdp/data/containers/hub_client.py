"""Client for datasets on the Hugging Face hub.

The hub answers a request for a file with the address of a server that has the file. The address is used again, so that
most byte ranges take one request instead of two.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from llava_fsdp.data.containers.remote_file import (
    SHA256,
    Failure,
    RemoteFile,
    check_answer,
    check_length,
    failure,
    quiet_loggers,
)
from llava_fsdp.runtime.errors import RemoteAway, RemoteForbidden, SourceError

URL = re.compile(
    r"hf://datasets/(?P<repo>[^/@?*\[]+/[^/@?*\[]+)(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(?P<path>.*))?",
    re.DOTALL,
)
ADDRESS_SECONDS = 600.0
"""Number of seconds for which the address of a file is used again. The hub's addresses are valid for longer."""
MOST_ADDRESSES = 2048
"""Greatest number of addresses that are kept: more than the images of a step."""
REDIRECTS = 5


class HubClient:
    """Client for datasets on the hub; implements `remote_file.Client`. The URL of a file contains the commit. The
    file's version (`RemoteFile.pin`) is the SHA-256 digest of its content or, if it is small, git's id. The environment
    variables of huggingface_hub give the endpoint and the token."""

    def __init__(self, idle: float, in_flight: int):
        """`idle`: seconds without an answer after which a request fails. `in_flight`, the maximum number of requests at
        once, is not used: the hub's library allows more than any caller makes."""
        from huggingface_hub import HfApi

        quiet_loggers("httpx", "httpcore", "httpx2", "httpcore2", "huggingface_hub")
        self.api = HfApi()
        self.idle = idle
        self.addresses: dict[str, tuple[str, float]] = {}
        """{HTTP address at the hub: (address on a server, time until which it is used)}."""

    def find(self, folder: str, start: str, seconds: float) -> dict[str, RemoteFile]:
        """List the files below a folder whose relative paths begin with `start`, as {path: file}; or the file that the
        URL names, with an empty path. A branch or tag in the URL is resolved to its commit. Raise Failure if that takes
        more than `seconds`, or the hub refuses."""
        from huggingface_hub.hf_api import RepoFile

        end = time.monotonic() + seconds
        repo, revision, path = split_url(folder)
        with failures():
            commit = self.api.dataset_info(repo, revision=revision, timeout=min(self.idle, seconds)).sha
            assert commit is not None
            found: list[Any] = []
            if path:
                found = [
                    info
                    for info in self.api.get_paths_info(repo, [path], revision=commit, repo_type="dataset")
                    if isinstance(info, RepoFile)
                ]
                if not found and time.monotonic() > end:
                    raise Failure(RemoteAway, "timeout")
            if not found:
                tree = self.api.list_repo_tree(repo, path or None, recursive=True, revision=commit, repo_type="dataset")
                for info in tree:
                    if time.monotonic() > end:
                        raise Failure(RemoteAway, "timeout")
                    if isinstance(info, RepoFile):
                        found.append(info)
        files = {}
        for info in found:
            pin = f"{SHA256}{info.lfs.sha256}" if info.lfs else f"git:{info.blob_id}"  # changes with the content
            relative = info.path.removeprefix(path).lstrip("/")
            if relative.startswith(start):
                files[relative] = RemoteFile(f"hf://datasets/{repo}@{commit}/{info.path}", info.size, pin)
        return files

    def pin_folder(self, folder: str, seconds: float) -> str:
        """Return the URL of a folder, without a final slash and with its branch or tag replaced by the commit. Raise
        Failure without an answer within `seconds`."""
        repo, revision, path = split_url(folder)
        with failures():
            commit = self.api.dataset_info(repo, revision=revision, timeout=min(self.idle, seconds)).sha
        return f"hf://datasets/{repo}@{commit}/{path}".rstrip("/")

    def stat(self, url: str, seconds: float) -> RemoteFile:
        """Request the size and the version of a file. The answer also has the file's address, which `fetch` uses. Raise
        Failure without an answer within `seconds`."""
        address = self._address(url)
        with failures():
            metadata = self.api.get_hf_file_metadata(url=address, timeout=min(self.idle, seconds))
        if metadata.size is None or metadata.etag is None:
            raise Failure(RemoteAway, "an answer without the file's size")
        if metadata.location != address:
            self._keep(address, metadata.location)
        is_sha256 = re.fullmatch(r"[0-9a-f]{64}", metadata.etag)
        return RemoteFile(url, metadata.size, f"{SHA256 if is_sha256 else 'git:'}{metadata.etag}")

    def _address(self, url: str) -> str:
        """Return the HTTP address of a file at the hub, given its `hf://` URL with the commit."""
        repo, commit, path = split_url(url)
        assert commit is not None and path, url
        return f"{self.api.endpoint}/datasets/{repo}/resolve/{quote(commit, safe='')}/{quote(path)}"

    def _keep(self, url: str, address: str) -> None:
        self.addresses[url] = (address, time.monotonic() + ADDRESS_SECONDS)
        while len(self.addresses) > MOST_ADDRESSES:
            self.addresses.pop(next(iter(self.addresses), ""), None)  # another thread may have taken one out

    def fetch(self, file: RemoteFile, offset: int, size: int, seconds: float) -> bytes:
        """Read a range of a file within `seconds`, following redirects. The address behind them is kept for later reads
        until it expires. Raise Failure if the range cannot be read."""
        end = time.monotonic() + seconds
        url = self._address(file.name)
        address, valid_until = self.addresses.get(url, (url, 0.0))
        is_kept = time.monotonic() < valid_until
        if not is_kept:
            address = url
        for _ in range(REDIRECTS):
            try:
                data, target = self._get(address, file, offset, size, end)
            except Failure as error:
                self.addresses.pop(url, None)
                if is_kept and error.kind is not RemoteAway:
                    raise Failure(RemoteAway, f"a kept address: {error.detail}") from None  # it may have expired
                raise
            if data is not None:
                if address != url and not is_kept:
                    self._keep(url, address)
                return check_length(data, size)
            address = urljoin(address, target)
        raise Failure(RemoteAway, f"more than {REDIRECTS} redirects")

    def _get(self, url: str, file: RemoteFile, offset: int, size: int, end: float) -> tuple[bytes | None, str]:
        """Make one HTTP request to the address `url` for a byte range of a file, until the time `end`
        (`time.monotonic`). Return (the bytes, "") or, if the request was redirected, (None, the new address)."""
        from huggingface_hub import get_session

        headers = {"Range": f"bytes={offset}-{offset + size - 1}", "Accept-Encoding": "identity"}
        if urlsplit(url)[:2] == urlsplit(self.api.endpoint)[:2]:  # the token is for the hub alone
            headers |= self.api._build_hf_headers()
        timeout = max(0.001, min(self.idle, end - time.monotonic()))
        with (
            failures(),
            get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=False) as answer,
        ):
            if answer.has_redirect_location:
                return None, answer.headers["Location"]
            if answer.status_code not in (200, 206):
                raise failure(answer.status_code, error_code(answer.headers))
            length = answer.headers.get("Content-Length", "")
            is_number = re.fullmatch(r"\d{1,19}", length) is not None
            check_answer(file, size, int(length) if is_number else None, answer.headers.get("Content-Range"))
            parts, count = [], 0
            for part in answer.iter_raw():
                parts.append(part)
                count += len(part)
                if time.monotonic() > end:
                    raise Failure(RemoteAway, "timeout")
                if count > size:
                    raise Failure(RemoteAway, f"more than {size} bytes came")
            return b"".join(parts), ""


def split_url(url: str) -> tuple[str, str | None, str]:
    """Split a URL into repository, revision (None: the default branch) and path (may be empty). Raise SourceError if it
    names no dataset."""
    found = URL.fullmatch(url)
    if found is None:
        raise SourceError(
            f"{url.partition('?')[0]} names no dataset of the hub; write hf://datasets/ORG/NAME[@REVISION]/PATH"
        ).about(file=url)
    return found["repo"], found["revision"] and unquote(found["revision"]), found["path"] or ""


def error_code(headers: Any) -> str:
    """Return the hub's code for an error, such as `GatedRepo`, from its answer's headers; empty if there is none."""
    code = headers.get("X-Error-Code", "")
    return code if re.fullmatch(r"[A-Za-z]{1,60}", code) else ""


@contextmanager
def failures() -> Iterator[None]:
    """Context manager that converts errors of huggingface_hub and its HTTP client into `Failure`. Their messages are
    not used, because they may contain a URL with a signature."""
    from huggingface_hub import errors

    try:
        yield
    except errors.OfflineModeIsEnabled:
        found = Failure(RemoteForbidden, "HF_HUB_OFFLINE is set")
    except errors.LocalTokenNotFoundError as error:
        found = Failure(RemoteForbidden, type(error).__name__)
    except (OSError, errors.HTTPError) as error:
        answer = getattr(error, "response", None)
        found = (
            Failure(RemoteAway, type(error).__name__)
            if answer is None
            else failure(answer.status_code, error_code(answer.headers))
        )
    else:
        return
    raise found
