"""Clients for S3 and Google Cloud Storage, based on s3fs and gcsfs. These libraries take endpoints and credentials from
their own environment variables and files."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from llava_fsdp.data.containers.remote_file import (
    Failure,
    RemoteFile,
    check_answer,
    check_length,
    failure,
    missing_package,
    quiet_loggers,
)
from llava_fsdp.runtime.errors import RemoteAway, RemoteForbidden, RemoteGone, SourceError

T = TypeVar("T")

EXPIRED = ("ExpiredToken", "InvalidToken")
"""Error codes by which S3 refuses credentials with HTTP status 400 instead of 403."""


def run_within(fs: Any, request: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Run a coroutine on the event loop of an fsspec file system, and return its result. After `seconds`, it is
    cancelled, and TimeoutError raised."""
    from fsspec.asyn import sync

    async def bounded() -> T:
        async with asyncio.timeout(max(seconds, 0.001)):
            return await request()

    result: Any = sync(fs.loop, bounded)
    return result


def split_url(url: str) -> tuple[str, str, str | None]:
    """Split a URL into bucket, key and version (S3's `?versionId=`; else None). Raise SourceError without a bucket."""
    found = re.fullmatch(r"\w+://([^/?*\[]+)(?:/(.*?))?(?:\?versionId=([^?]+))?", url, re.DOTALL)
    if found is None:
        scheme = url.partition(":")[0]
        raise SourceError(f"{url.partition('?')[0]} names no bucket; write {scheme}://BUCKET/PATH").about(file=url)
    return found[1], found[2] or "", found[3]


def check_folder(url: str) -> str:
    """Return a folder's URL. Raise SourceError if it has no bucket, or a version, which only single objects have."""
    if split_url(url)[2] is not None:
        raise SourceError(f"{url.partition('?')[0]}: a folder has no versionId; leave it out").about(file=url)
    return url


def files_in_listing(
    folder: str, listed: dict[str, Any], pin: Callable[[dict[str, Any]], str]
) -> dict[str, RemoteFile]:
    """Convert fsspec's listing {path that begins with the bucket: entry} to {path relative to `folder`: file}, without
    subfolders and the empty objects that stand for them. `pin` returns the version of a file by its entry."""
    scheme = folder.partition("://")[0]
    files = {}
    for path, info in listed.items():
        if info["type"] == "file" and not path.endswith("/"):
            url = f"{scheme}://{path}"
            files[url.removeprefix(folder).lstrip("/")] = RemoteFile(url, info["size"], pin(info))
    return files


class S3Client:
    """Client for S3 and storages with the same interface; implements `remote_file.Client`. Every request sends the ETag
    of the listed object as If-Match, so that a changed object is noticed."""

    def __init__(self, idle: float, in_flight: int):
        """`idle`: seconds without an answer after which a request fails; `in_flight`: maximum number of requests at
        once. Raise ConfigError if s3fs is not installed."""
        try:
            import s3fs
        except ImportError as error:
            raise missing_package("s3://", "s3fs") from error
        quiet_loggers("s3fs", "botocore", "aiobotocore", "fsspec")
        settings = {
            "connect_timeout": idle,
            "read_timeout": idle,
            "retries": {"total_max_attempts": 1},
            "max_pool_connections": in_flight,
        }
        self.fs: Any = s3fs.S3FileSystem(config_kwargs=settings, use_listings_cache=False, skip_instance_cache=True)
        self.fs.retries = 1  # RemoteStorage repeats requests, within its deadline

    def find(self, folder: str, start: str, seconds: float) -> dict[str, RemoteFile]:
        """List the files below a folder whose relative paths begin with `start`, as {path: file}; or the version of an
        object that the URL names, with an empty path. Raise Failure if that takes more than `seconds`."""
        bucket, key, version = split_url(folder)
        path = f"{bucket}/{key}"
        if version is None:
            listed = self._finish(lambda: self.fs._find(path, detail=True, prefix=start), seconds)
            return files_in_listing(folder, listed, lambda info: f"etag:{info['ETag']}")
        info = self._finish(lambda: self.fs._call_s3("head_object", Bucket=bucket, Key=key, VersionId=version), seconds)
        return {"": RemoteFile(folder, info["ContentLength"], f"etag:{info['ETag']}")}

    def pin_folder(self, folder: str, seconds: float) -> str:
        return check_folder(folder)

    def stat(self, url: str, seconds: float) -> RemoteFile:
        """Request the size and the ETag of an object."""
        bucket, key, _ = split_url(url)
        try:
            info = self._finish(lambda: self.fs._call_s3("head_object", Bucket=bucket, Key=key), seconds)
        except Failure as found:
            if found.detail.startswith("HTTP 400"):  # an answer to HEAD has no code: most likely ExpiredToken
                raise Failure(RemoteForbidden, found.detail) from None
            raise
        return RemoteFile(url, info["ContentLength"], f"etag:{info['ETag']}")

    def fetch(self, file: RemoteFile, offset: int, size: int, seconds: float) -> bytes:
        """Read a range of an object; fails if the object's ETag is no longer `file.pin`."""
        bucket, key, version = split_url(file.name)

        async def get() -> bytes:
            """Send the request and read the answer's body."""
            answer = await self.fs._call_s3(
                "get_object",
                Bucket=bucket,
                Key=key,
                Range=f"bytes={offset}-{offset + size - 1}",
                IfMatch=file.pin.removeprefix("etag:"),
                **({} if version is None else {"VersionId": version}),
            )
            try:
                check_answer(file, size, answer.get("ContentLength"), answer.get("ContentRange"))
                return await answer["Body"].read()
            finally:
                answer["Body"].close()

        return check_length(self._finish(get, seconds), size)

    def _finish(self, request: Callable[[], Awaitable[T]], seconds: float) -> T:
        """Return the result of a request that runs for at most `seconds`; its errors are raised as `Failure`."""
        from aiohttp import ClientError as HttpError
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return run_within(self.fs, request, seconds)
        except (OSError, BotoCoreError, ClientError, HttpError) as error:
            raise s3_failure(error) from None


def s3_failure(error: BaseException) -> Failure:
    """Convert an error of s3fs, botocore or aiohttp into a `Failure`, by the HTTP status of the answer if there is one:
    access refused (RemoteForbidden), no such object (RemoteGone), or another error, after which a request may be
    repeated (RemoteAway). The message of the error is not used, because it may contain a URL with a signature."""
    from botocore.exceptions import (
        NoCredentialsError,
        ParamValidationError,
        PartialCredentialsError,
        ProfileNotFound,
        SSOError,
    )

    name = type(error).__name__
    for part in error_and_causes(error):
        answer = getattr(part, "response", None)
        if isinstance(answer, dict):
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
            code = str(answer.get("Error", {}).get("Code", ""))
            if not re.fullmatch(r"[A-Za-z]{1,60}", code):
                code = ""
            return failure(403 if code in EXPIRED else status, code)
    if isinstance(error, NoCredentialsError | PartialCredentialsError | ProfileNotFound | SSOError):
        return Failure(RemoteForbidden, name)
    if isinstance(error, FileNotFoundError | ParamValidationError):
        return Failure(RemoteGone, name)
    return Failure(RemoteAway, name)


def error_and_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that and so on."""
    while error is not None:
        yield error
        error = error.__cause__


class GsClient:
    """Client for Google Cloud Storage; implements `remote_file.Client`. Every request names the generation of the
    listed object, which is gone if the object was replaced. Not tested against a server."""

    def __init__(self, idle: float, in_flight: int):
        """Open gcsfs, which gives up a request after `idle` seconds; `in_flight` is not used. Raise ConfigError if
        gcsfs is not installed. It takes seconds without credentials: gcsfs then asks the metadata server."""
        try:
            from gcsfs.core import GCSFileSystem  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise missing_package("gs://", "gcsfs") from error
        quiet_loggers("gcsfs", "google", "fsspec")
        self.fs: Any = GCSFileSystem(
            version_aware=True, use_listings_cache=False, skip_instance_cache=True, requests_timeout=idle
        )

    def find(self, folder: str, start: str, seconds: float) -> dict[str, RemoteFile]:
        """List files below a folder whose relative paths begin with `start`: {path: file}. `seconds`: time limit."""
        bucket, key, _ = split_url(folder)
        listed = self._finish(lambda: self.fs._find(f"{bucket}/{key}", detail=True, prefix=start), seconds)
        return files_in_listing(folder, listed, lambda info: f"generation:{info['generation']}")

    def pin_folder(self, folder: str, seconds: float) -> str:
        return check_folder(folder)

    def stat(self, url: str, seconds: float) -> RemoteFile:
        """Request the size and the generation (the number of the version) of an object."""
        bucket, key, _ = split_url(url)
        info = self._finish(lambda: self.fs._info(f"{bucket}/{key}"), seconds)
        if info["type"] != "file":
            raise failure(404, "")
        return RemoteFile(url, info["size"], f"generation:{info['generation']}")

    def fetch(self, file: RemoteFile, offset: int, size: int, seconds: float) -> bytes:
        """Read a range of an object; fails if its generation is no longer `file.pin`."""
        bucket, key, _ = split_url(file.name)
        generation = file.pin.removeprefix("generation:")
        data = self._finish(
            lambda: self.fs._cat_file(f"{bucket}/{key}", start=offset, end=offset + size, generation=generation),
            seconds,
        )
        return check_length(data, size)

    def _finish(self, request: Callable[[], Awaitable[T]], seconds: float) -> T:
        """Run a request for at most `seconds`, and return its result. Errors of gcsfs, Google's authentication and
        HTTP, and a timeout, are raised as `Failure`."""
        from aiohttp import ClientError as HttpError
        from gcsfs.retry import HttpError as StatusError  # pyright: ignore[reportMissingImports]
        from google.auth.exceptions import GoogleAuthError  # pyright: ignore[reportMissingImports]
        from requests.exceptions import RequestException

        try:
            return run_within(self.fs, request, seconds)
        except StatusError as error:
            found = failure(int(error.code) if error.code else None, "")
        except GoogleAuthError as error:
            found = Failure(RemoteForbidden, type(error).__name__)
        except FileNotFoundError:
            found = failure(404, "")
        except (OSError, HttpError, RequestException) as error:
            # gcsfs tells an answer 403 from other errors only by its text
            found = failure(403 if str(error).startswith("Forbidden") else None, type(error).__name__)
        raise found
