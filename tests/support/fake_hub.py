"""A small Hugging Face hub on this machine: one dataset, `org/set`, whose large files lie at a server of another name.

The hub is `127.0.0.1`, and that server is `localhost`, on the same port: the addresses that the hub gives out have a
signature, which expires when `expire` is called.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from faulty_proxy import QuietServer, Request, lower_case

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz0123456789"
REVISIONS = ("main", "v1.0", "refs/convert/parquet", COMMIT)
SMALL = 100
"""Smaller files are kept in git, and sent by the hub itself."""


@dataclass
class FakeHub:
    """Serves `files` (path: content)."""

    files: dict[str, bytes]
    delay: float = 0
    private: bool = False
    """Whether the hub asks for `TOKEN`."""
    signature: str = "signed-1"
    status: int = 503
    """Status of spoilt answers; 0: the answer is cut in its middle."""
    spoilt: str = ""
    """Which answers are spoilt: `api`, `datasets` (the hub's own) or `cdn`."""
    left: int = 0
    seen: list[Request] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.server = QuietServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def spoil(self, where: str, status: int, times: int = 1 << 30) -> None:
        self.spoilt, self.status, self.left = where, status, times

    def expire(self) -> None:
        self.signature += "1"

    def paths(self) -> list[str]:
        """Return the first part of the path of every request seen."""
        return [request.path.split("/")[1].split("?")[0] for request in self.seen]

    def entry(self, path: str) -> dict[str, object]:
        data = self.files[path]
        found = {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": path}
        if len(data) < SMALL:
            return found
        return found | {"lfs": {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urllib.parse.urlsplit(self.path)
        parts = [urllib.parse.unquote(part) for part in url.path.strip("/").split("/")]
        with self.hub.lock:
            self.hub.seen.append(Request(self.command, self.path, lower_case(self.headers)))
            is_spoilt = self.hub.left > 0 and parts[0] == self.hub.spoilt
            self.hub.left -= is_spoilt
        time.sleep(self.hub.delay)
        if is_spoilt and self.hub.status:
            return self.answer(self.hub.status, b"{}")
        if parts[0] == "cdn":
            if urllib.parse.parse_qs(url.query).get("X-Amz-Signature") != [self.hub.signature]:
                return self.answer(403, b"expired")
            return self.send_range(self.hub.files["/".join(parts[1:])], is_cut=is_spoilt)
        if self.hub.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        if parts[:4] == ["api", "datasets", "org", "set"]:
            return self.api(parts[4:], body)
        if parts[:4] == ["datasets", "org", "set", "resolve"]:
            return self.resolve(parts[4:])
        return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def api(self, parts: list[str], body: bytes) -> None:
        what = parts[0] if parts else "revision"
        revision = parts[1] if len(parts) > 1 else "main"
        if revision not in REVISIONS:
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        files = self.hub.files
        if what == "revision":
            found: object = {"id": "org/set", "sha": COMMIT, "private": False, "tags": [], "siblings": []}
        elif what == "tree":
            under = "".join(f"{part}/" for part in parts[2:])
            found = [self.hub.entry(path) for path in files if path.startswith(under)]
            folders = {path.rpartition("/")[0] for path in files if path.startswith(under)} - {"", under.rstrip("/")}
            found += [{"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in folders]
            if not found:
                return self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        else:
            assert what == "paths-info", what
            asked = (
                json.loads(body)["paths"] if body.startswith(b"{") else urllib.parse.parse_qs(body.decode())["paths"]
            )
            found = [self.hub.entry(path) for path in asked if path in files]
        return self.answer(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def resolve(self, parts: list[str]) -> None:
        path = "/".join(parts[1:])
        if parts[0] != COMMIT or path not in self.hub.files:
            return self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        data = self.hub.files[path]
        if len(data) < SMALL and self.command == "HEAD":
            return self.answer(200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"'})
        if len(data) < SMALL:
            return self.send_range(data)
        linked = {"X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Linked-Size": str(len(data))}
        where = f"http://localhost:{self.hub.port}/cdn/{urllib.parse.quote(path)}?X-Amz-Signature={self.hub.signature}"
        return self.answer(302, b"", {"Location": where, "X-Repo-Commit": COMMIT, **linked})

    def send_range(self, data: bytes, is_cut: bool = False) -> None:
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        where = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        self.answer(206, part, {"Content-Range": where}, is_cut)

    def answer(self, status: int, data: bytes, headers: dict[str, str] | None = None, is_cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if is_cut else data)
        self.close_connection |= is_cut

    do_GET = do_HEAD = do_POST = handle_any  # noqa: N815  names of http.server
