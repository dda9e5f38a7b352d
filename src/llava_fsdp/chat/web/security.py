"""Check all requests to the web page for chatting with a model before they reach Gradio, without relying on Gradio's
own checks.

The page is for one user on one machine. Requests that other sites make in the user's browser are refused by their Host,
Origin and Sec-Fetch headers. Requests may only name files that were uploaded to the page. Only the routes that the page
uses exist.
"""

import contextlib
import ipaddress
import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llava_fsdp.runtime.text.log import log

MiB = 1 << 20
LARGEST_JSON = MiB
"""Maximum size in bytes of a request that uploads no file."""
MOST_UPLOADED_BYTES = 2048 * MiB
"""Maximum size in bytes of all uploaded files together."""
LONGEST_PATH = 1024
"""Maximum number of characters of the path of a request."""
LONGEST_NAME = 4096
"""Maximum number of characters of a file's path in a request. Linux opens no longer ones, and to resolve one of a
megabyte would take minutes."""
MOST_NAMES = 1000
"""Maximum number of files that a request may name."""
MOST_FILES = 10_000
"""Maximum number of uploaded files, which are counted at each upload."""
FILE = "/gradio_api/file="
UPLOAD = "/gradio_api/upload"
READ_ROUTES = re.compile(
    r"/(config|theme\.css|favicon\.ico|manifest\.json|assets/.*|static/.*|svelte/.*)?"
    r"|/gradio_api/(startup-events|app_id|info|queue/data|upload_progress|heartbeat/\w+|file=.+)"
)
CALL_ROUTES = re.compile(r"/gradio_api/(queue/join|run/predict)/?")
WRITE_ROUTES = re.compile(r"/gradio_api/(queue/join|run/predict|upload|cancel|reset)/?")
# Nothing is loaded from other sites, and no other site may show the page in a frame. Gradio's scripts are inline and
# use eval.
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


class RequestRefused(Exception):
    """Error: a request to the chat page is answered with an HTTP error instead of being passed on."""

    def __init__(self, status: int, why: str):
        super().__init__(why)
        self.status = status


@dataclass(frozen=True)
class RequestGuard:
    """ASGI application that checks requests to the chat page and passes the accepted ones on to the guarded ASGI
    application, Gradio's. A request that makes this one fail is answered with 400, and one line is logged instead of a
    traceback.

    Attributes:
        app: the guarded application.
        host: name or address that the page is served at.
        uploads: folder of the uploaded files; files are served from no other folder.
        largest_request: maximum size in bytes of a request that uploads files.
        functions: {number of a function that the page calls: checks the values of its inputs, with any exception}.
        incoming: sizes in bytes of the uploads that are being received.
    """

    app: ASGIApp
    host: str
    uploads: Path
    largest_request: int
    functions: Mapping[int, Callable[[list[Any]], object]] = field(default_factory=dict)
    incoming: list[int] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and pass it on, or answer it with the error of the check that refused it."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return  # a WebSocket, which the page does not use, is not opened
        headers, send = Headers(scope=scope), with_headers(send)
        try:
            check_origin(headers, self.host, scope["method"])
            check_route(scope["method"], scope["path"])
            if scope["path"].startswith(FILE):
                check_file(scope["path"].removeprefix(FILE), self.uploads)
            if scope["path"].rstrip("/") == UPLOAD:
                self.check_upload(headers)
                self.incoming.append(int(headers["content-length"]))
                try:
                    return await self.pass_on(scope, receive, send)
                finally:
                    self.incoming.remove(int(headers["content-length"]))
            if scope["method"] == "POST":
                body = await whole_body(receive)
                tree = check_body(body, self.uploads)
                if CALL_ROUTES.fullmatch(scope["path"]):
                    check_call(tree, self.functions)
                receive = replay_body(body, receive)
            await self.pass_on(scope, receive, send)
        except RequestRefused as refusal:
            await PlainTextResponse(str(refusal), refusal.status)(scope, receive, send)

    async def pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Give a request to the guarded application (`app`), which answers with `send`. If it raises an exception
        before an answer has begun, raise RequestRefused with status 400: such an exception comes from a request that
        the application cannot read, since the page itself sends no such requests."""
        has_begun, held_back = False, list[Message]()

        async def send_unless_error(message: Message) -> None:
            """Send a part of the answer, or hold it back if the answer's status is 500: Starlette sends such an answer
            to an exception, and raises the exception afterwards."""
            nonlocal has_begun
            if held_back or (message["type"] == "http.response.start" and message["status"] == 500):
                held_back.append(message)
            else:
                has_begun = True
                await send(message)

        try:
            await self.app(scope, receive, send_unless_error)
        except Exception as error:
            log().warning(
                "a request for %s failed: %s: %s", scope["path"][:100], type(error).__name__, str(error)[:200]
            )
            if not has_begun:
                raise RequestRefused(400, "the request cannot be read") from error
            return
        for message in held_back:  # the application answered 500 without an exception
            await send(message)

    def check_upload(self, headers: Mapping[str, str]) -> None:
        """Raise RequestRefused if an upload's Content-Length, beyond which the server reads nothing, is missing or too
        large. `self.incoming`: the lengths of the uploads that are being received."""
        length = headers.get("content-length", "")
        if (
            not length.isdecimal() or "transfer-encoding" in headers
        ):  # with a Transfer-Encoding, Content-Length is ignored
            raise RequestRefused(411, "files need a Content-Length, and no Transfer-Encoding")
        if int(length) > self.largest_request:
            raise RequestRefused(413, f"more than {self.largest_request // MiB} MiB at once")
        if sum(self.incoming) + int(length) + bytes_in(self.uploads) > MOST_UPLOADED_BYTES:
            raise RequestRefused(
                507, f"the page holds {MOST_UPLOADED_BYTES // MiB} MiB of files, and takes no more: start it again"
            )


def bytes_in(folder: Path) -> int:
    """Return the size in bytes of all files in a folder; raise RequestRefused if there are more than MOST_FILES."""
    total = 0
    for number, path in enumerate(folder.rglob("*")):
        if number > 2 * MOST_FILES:  # each file has a folder of its own
            raise RequestRefused(507, f"the page holds {MOST_FILES} files, and takes no more: start it again")
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def check_origin(headers: Mapping[str, str], host: str, method: str = "GET") -> None:
    """Raise RequestRefused if a request's headers show that it comes from another site that is open in the user's
    browser. Another site may only link to the page, not send a form. `host` is the name or address that the page is
    served at.

    Another site can make its name resolve to this machine (DNS rebinding), so the Host must be a name of this machine
    or an IP address.
    """
    requested = headers.get("host", "")
    try:
        name = (urlsplit(f"//{requested}").hostname or "").lower()
    except ValueError:  # an unclosed bracket
        name = ""
    if name not in ("localhost", host.lower(), socket.gethostname().lower()) and not is_address(name):
        raise RequestRefused(403, f"{requested[:100]!r} is not a name of this page; open it as localhost or by address")
    origin = headers.get("origin")
    if origin is not None and origin not in (f"http://{requested}", f"https://{requested}"):
        raise RequestRefused(403, "the request comes from another site")
    followed_a_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    followed_a_link = followed_a_link and method in ("GET", "HEAD")
    if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not followed_a_link:
        raise RequestRefused(403, "the request comes from another site")


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def check_route(method: str, path: str) -> None:
    """Raise RequestRefused for a method and path that the page does not use; Gradio has many such routes."""
    if len(path) > LONGEST_PATH:
        raise RequestRefused(414, "the address is too long")
    routes = {"GET": READ_ROUTES, "HEAD": READ_ROUTES, "POST": WRITE_ROUTES}.get(method)
    if routes is None or routes.fullmatch(path) is None:
        raise RequestRefused(404, "not found")


def check_file(name: object, uploads: Path) -> None:
    """Raise RequestRefused unless `name` is the path of a file in `uploads`, the folder of the uploaded files."""
    folder = os.path.realpath(uploads)
    try:
        inside = (
            isinstance(name, str)
            and len(name) <= LONGEST_NAME
            and os.path.isabs(name)
            and os.path.realpath(name).startswith(folder + os.sep)
        )
    except ValueError:  # a null character
        inside = False
    if not inside:
        raise RequestRefused(403, "not a file that was sent to this page")


def check_body(body: bytes, uploads: Path) -> Any:
    """Return the parsed body of a request. Raises RequestRefused if it is not JSON, or names a URL or a file outside
    `uploads`, the folder of the uploaded files."""
    if not body:
        return None
    try:
        tree = json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        raise RequestRefused(400, "not JSON") from None
    names = 0
    for entry in objects_of(tree):
        names += ("path" in entry) + ("url" in entry)
        if names > MOST_NAMES:
            raise RequestRefused(413, f"it names more than {MOST_NAMES} files")
        if "path" in entry:
            check_file(entry["path"], uploads)
        url = entry.get("url")
        if "url" in entry and url is not None:
            at = url.find(FILE) if isinstance(url, str) else -1
            check_file(url[at + len(FILE) :] if at >= 0 else None, uploads)
    return tree


def refuse_constant(name: str) -> None:
    """Refuse NaN and infinities, which Python reads although they are not JSON."""
    raise ValueError(f"{name} is not JSON")


def check_call(tree: Any, functions: Mapping[int, Callable[[list[Any]], object]]) -> None:
    """Raise RequestRefused unless a parsed request calls a function of the page with the inputs that this function
    takes. `functions`: number of a function -> raises any exception if a list of inputs is wrong."""
    if not isinstance(tree, dict):
        raise RequestRefused(422, "not an object")
    number, data, session = tree.get("fn_index"), tree.get("data"), tree.get("session_hash")
    check = functions.get(number) if type(number) is int else None
    if check is None:
        raise RequestRefused(404, "the page has no such function")
    if session is not None and not (isinstance(session, str) and re.fullmatch(r"[\w-]{1,64}", session)):
        raise RequestRefused(422, "not a session_hash")
    if not isinstance(data, list):
        raise RequestRefused(422, "not the inputs of this function")
    try:
        check(data)
    except Exception as error:
        raise RequestRefused(422, "not the inputs of this function") from error


def objects_of(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects (dicts) within a parsed JSON value, without recursion, because they may be deeply nested."""
    unvisited = [tree]
    while unvisited:
        value = unvisited.pop()
        if isinstance(value, dict):
            yield value
            unvisited.extend(value.values())
        elif isinstance(value, list):
            unvisited.extend(value)


async def whole_body(receive: Receive) -> bytes:
    """Read a request's whole body; raise RequestRefused if it has more than LARGEST_JSON bytes."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > LARGEST_JSON:
            raise RequestRefused(413, "the question is too long")
    return bytes(body)


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI `receive` whose first call gives `body`, already read; later ones are passed to `receive`."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive_again() -> Message:
        return next(messages, None) or await receive()

    return receive_again


def with_headers(send: Send) -> Send:
    """Return an ASGI `send` function that adds security headers to a response (HEADERS) and removes headers that would
    let other sites read it."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name in [name for name in headers if name.startswith("access-control-")]:
                del headers[name]
            headers.update(HEADERS)
        await send(message)

    return send_with_headers
