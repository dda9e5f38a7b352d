"""A proxy before a server on this machine that spoils answers: errors, cut and slow answers, broken connections."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

ERRORS = {"503": (503, "SlowDown"), "forbidden": (403, "AccessDenied"), "expired": (400, "ExpiredToken")}


class Request(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    """By names in lower case: clients differ in how they write them."""


def lower_case(headers: Message) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


@dataclass
class FaultyProxy:
    """Passes requests on to 127.0.0.1:`upstream`. The client's endpoint is this proxy's `url`."""

    upstream: int
    delay: float = 0
    """Seconds before each answer."""
    fault: str = ""
    """What happens to GET requests of objects: `503`, `forbidden` or `expired` in their place; `reset` and `hang`
    before the answer; `cut` in the middle of it; `short`: fewer bytes, with a length that says so; `trickle`: a few
    bytes at a time."""
    with_listings: bool = False
    """Whether faults happen to requests for listings too."""
    with_heads: bool = False
    """Whether faults happen to HEAD requests too."""
    left: int = 0
    """How many requests the fault still happens to."""
    seen: list[Request] = field(default_factory=list)
    running: int = 0
    """Number of requests without a fault that are being answered."""
    most_running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.server = QuietServer(("127.0.0.1", 0), type("Handler", (Handler,), {"proxy": self}))
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def spoil(self, fault: str, times: int = 1 << 30) -> None:
        self.fault, self.left = fault, times

    def begin(self, request: Request, is_object: bool) -> str:
        with self.lock:
            self.seen.append(request)
            if is_object and self.left > 0:
                self.left -= 1
                return self.fault
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            return ""

    def end(self) -> None:
        with self.lock:
            self.running -= 1

    def close(self) -> None:
        self.stopped.set()
        self.server.shutdown()
        self.server.server_close()


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that give up are what the faults are for."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultyProxy

    def log_message(self, *_: object) -> None:
        pass

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        methods = ("GET", "HEAD") if self.proxy.with_heads else ("GET",)
        is_object = self.command in methods and (self.proxy.with_listings or self.path.split("?")[0].count("/") > 1)
        fault = self.proxy.begin(Request(self.command, self.path, lower_case(self.headers)), is_object)
        time.sleep(self.proxy.delay)
        if fault:
            return self.spoilt(fault, body)
        try:
            self.spoilt("", body)
        finally:
            self.proxy.end()

    def spoilt(self, fault: str, body: bytes) -> None:
        if fault in ERRORS:
            status, code = ERRORS[fault]
            text = "" if self.command == "HEAD" else f"<Error><Code>{code}</Code></Error>"
            return self.answer(status, {"Content-Type": "application/xml"}, text.encode())
        if fault in ("hang", "reset"):
            if fault == "hang":
                self.proxy.stopped.wait(30)
            else:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self.proxy.upstream, timeout=30)
        upstream.request(self.command, self.path, body=body, headers=dict(self.headers))
        found = upstream.getresponse()
        data = found.read()
        upstream.close()
        left_out = ("transfer-encoding", "connection", "content-length", "server", "date")
        headers = {name: value for name, value in found.getheaders() if name.lower() not in left_out}
        if self.command == "HEAD":
            return self.answer(
                found.status, {**headers, "Content-Length": found.getheader("Content-Length") or "0"}, b""
            )
        self.answer(found.status, headers, data[:-1] if fault == "short" else data, fault)

    def answer(self, status: int, headers: dict[str, str], data: bytes, fault: str = "") -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if fault == "cut":
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif fault == "trickle":
            for place in range(len(data)):
                self.wfile.write(data[place : place + 1])
                if self.proxy.stopped.wait(0.1):
                    return
        else:
            self.wfile.write(data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward  # noqa: N815  names of http.server
