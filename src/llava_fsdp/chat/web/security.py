"""What stands in front of the page: who may ask what of it. Nothing here trusts the framework behind.

The page is for one user on one machine. A browser that shows another site may not use it (the names that it is asked
by, and where a request comes from, are looked at), no request names a file that was not sent to the page itself, and
only the routes are there that the page needs.
"""

import contextlib
import ipaddress
import json
import os
import re
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MiB = 1 << 20
LARGEST_JSON = MiB
"""Most bytes of a request that brings no file: a question, and the names of files that were sent before it."""
ROOM = 2048 * MiB
"""Most bytes of all files that were sent to the page, while it runs."""
FILE = "/gradio_api/file="
UPLOAD = "/gradio_api/upload"
READ = re.compile(
    r"/(config|theme\.css|favicon\.ico|manifest\.json|assets/.*|static/.*|svelte/.*)?"
    r"|/gradio_api/(startup-events|app_id|info|queue/data|upload_progress|heartbeat/\w+|file=.+)"
)
WRITTEN = re.compile(r"/gradio_api/(queue/join|upload|cancel|reset)/?")
# Nothing is loaded from elsewhere, and no other site has the page in a frame. The framework's own scripts stand in the
# page and are made of strings.
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' data: blob:; worker-src 'self' blob:; "
        "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class Refused(Exception):
    """A request that is not let through."""

    def __init__(self, status: int, why: str):
        super().__init__(why)
        self.status = status


@dataclass(frozen=True)
class Guard:
    """ASGI in front of an application."""

    app: App
    host: str
    """That the page listens on."""
    uploads: Path
    """Where the application puts files that are sent to it, and the only folder that files are read from."""
    largest_request: int
    """Bytes of a request that brings files."""
    incoming: list[int] = field(default_factory=list)
    """Bytes of each that is on its way."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return  # nothing of the page uses a WebSocket: it is closed before it opens
        try:
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            check_names(headers, self.host)
            check_route(scope["method"], scope["path"])
            if scope["path"].startswith(FILE):
                check_file(scope["path"].removeprefix(FILE), self.uploads)
            if scope["path"].rstrip("/") == UPLOAD:
                self.check_upload(headers)
                self.incoming.append(int(headers["content-length"]))
                try:
                    return await self.app(scope, receive, with_headers(send))
                finally:
                    self.incoming.remove(int(headers["content-length"]))
            if scope["method"] == "POST":
                body = await whole_body(receive)
                check_body(body, self.uploads)
                receive = replayed(body, receive)
            await self.app(scope, receive, with_headers(send))
        except Refused as refusal:
            await answer(send, refusal)

    def check_upload(self, headers: dict[str, str]) -> None:
        """Raises Refused where files are too large together, or do not say how large they are: the server takes no more
        than is said."""
        said = headers.get("content-length", "")
        if not said.isdecimal() or "transfer-encoding" in headers:  # with both, the length would be a lie
            raise Refused(411, "files are taken with their length alone")
        if int(said) > self.largest_request:
            raise Refused(413, f"more than {self.largest_request // MiB} MiB at once")
        if sum(self.incoming) + int(said) + bytes_in(self.uploads) > ROOM:
            raise Refused(507, f"the page holds {ROOM // MiB} MiB of files, and takes no more: start it again")


def bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def check_names(headers: dict[str, str], host: str) -> None:
    """Raises Refused where a site that the browser shows asks in its user's name.

    A name of such a site can be made to mean this machine (DNS rebinding), an address or `localhost` cannot.
    """
    asked = headers.get("host", "")
    try:
        name = (urlsplit(f"//{asked}").hostname or "").lower()
    except ValueError:  # half of a bracket
        name = ""
    if name not in ("localhost", host.lower(), socket.gethostname().lower()) and not is_address(name):
        raise Refused(403, f"the page is not known as {asked[:100]!r}; open it as localhost or by its address")
    origin = headers.get("origin")
    if origin is not None and origin not in (f"http://{asked}", f"https://{asked}"):
        raise Refused(403, "asked from another site")
    followed_a_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not followed_a_link:
        raise Refused(403, "asked from another site")


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def check_route(method: str, path: str) -> None:
    """Raises Refused for what the page does not use: the framework has many routes, for other programs and uses."""
    if method in ("GET", "HEAD"):
        known = READ.fullmatch(path) is not None
    else:
        known = method == "POST" and WRITTEN.fullmatch(path) is not None
    if not known:
        raise Refused(404, "not found")


def check_file(name: object, uploads: Path) -> None:
    """Raises Refused where a name is none of a file that was sent to the page."""
    folder = os.path.realpath(uploads)
    try:
        inside = isinstance(name, str) and os.path.isabs(name) and os.path.realpath(name).startswith(folder + os.sep)
    except ValueError:  # a zero character
        inside = False
    if not inside:
        raise Refused(403, "no file that was sent to this page")


def check_body(body: bytes, uploads: Path) -> None:
    """Raises Refused where a request is no JSON, or names a file or an address that it should not."""
    if not body:
        return
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "no JSON") from None
    for entry in objects_of(tree):
        if "path" in entry:
            check_file(entry["path"], uploads)
        url = entry.get("url")
        if "url" in entry and url is not None:
            at = url.find(FILE) if isinstance(url, str) else -1
            check_file(url[at + len(FILE) :] if at >= 0 else None, uploads)


def objects_of(tree: Any) -> Iterator[dict[str, Any]]:
    """All objects within a JSON value, without recursion: it may be nested as deep as its parser goes."""
    left = [tree]
    while left:
        own = left.pop()
        if isinstance(own, dict):
            yield own
            left.extend(own.values())
        elif isinstance(own, list):
            left.extend(own)


async def whole_body(receive: Receive) -> bytes:
    """Raises Refused where it is larger than any question."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > LARGEST_JSON:
            raise Refused(413, "the question is too long")
    return body


def replayed(body: bytes, receive: Receive) -> Receive:
    """The body that has been read, and then whatever comes: that the client has gone."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def again() -> Message:
        return next(messages, None) or await receive()

    return again


def with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = [(n, v) for n, v in message["headers"] if not n.lower().startswith(b"access-control-")]
            added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*own, *added]}
        await send(message)

    return sent


async def answer(send: Send, refusal: Refused) -> None:
    text = str(refusal).encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(text)).encode())]
    start = {"type": "http.response.start", "status": refusal.status, "headers": headers}
    await with_headers(send)(start)
    await send({"type": "http.response.body", "body": text})
