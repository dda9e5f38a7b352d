"""A small Hugging Face hub on this machine to which models are pushed. Large files go to a store, and a commit names
them by their digests."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from fake_hub import TOKEN
from faulty_proxy import QuietServer
from huggingface_hub import constants

LARGE = 2000
"""Size in bytes from which a file goes to the store."""


@dataclass
class FakeModelHub:
    """Keeps models and what was sent."""

    models: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    """Name of a model -> branch -> path -> content."""
    private: dict[str, bool] = field(default_factory=dict)
    store: dict[str, bytes] = field(default_factory=dict)
    """SHA-256 -> content of a large file."""
    sent: list[str] = field(default_factory=list)
    """Digests in the order in which the store got them."""
    commits: list[str] = field(default_factory=list)
    refuse_after: int = 1 << 30
    """Number of large files after which the store refuses more."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.server = QuietServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def download(self, name: str, to: Path, branch: str = "main") -> Path:
        """Write a model's files into a folder, as a download would."""
        for path, content in self.models[name][branch].items():
            (to / path).parent.mkdir(parents=True, exist_ok=True)
            (to / path).write_bytes(content)
        return to

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def model_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModelHub]:
    """Starts a hub to which huggingface_hub's client in this process pushes."""
    made = FakeModelHub()
    monkeypatch.setattr(constants, "ENDPOINT", made.url)
    template = made.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield made
    made.close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeModelHub

    def log_message(self, *_: object) -> None:
        pass

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = [urllib.parse.unquote(part) for part in urllib.parse.urlsplit(self.path).path.strip("/").split("/")]
        with self.hub.lock:
            if parts[0] == "store":
                return self.put(parts[1], body)
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.answer(401, {"error": "Invalid username or password."})
            if parts[:2] == ["api", "whoami-v2"]:
                return self.answer(200, {"name": "user", "type": "user", "orgs": [{"name": "group"}]})
            if parts[:2] == ["api", "validate-yaml"]:
                return self.answer(200, {"errors": [], "warnings": []})
            if parts[:3] == ["api", "repos", "create"]:
                return self.create(json.loads(body))
            if parts[-3:] == ["lfs", "objects", "batch"]:
                return self.batch(json.loads(body))
            if parts[2:3] == ["resolve"]:
                return self.resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
            name = "/".join(parts[2:4])
            if name not in self.hub.models:
                return self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            return self.model(name, parts[4], parts[5], body)

    def create(self, asked: dict[str, object]) -> None:
        name = f"{asked['organization'] or 'user'}/{asked['name']}"
        if name in self.hub.models:
            return self.answer(409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"})
        self.hub.models[name] = {"main": {}}
        self.hub.private[name] = asked.get("visibility") == "private" or bool(asked.get("private"))
        return self.answer(200, {"url": f"{self.hub.url}/{name}", "name": name, "id": name})

    def model(self, name: str, what: str, branch: str, body: bytes) -> None:
        branches = self.hub.models[name]
        if what == "branch":
            status = 409 if branch in branches else 200
            branches.setdefault(branch, dict(branches["main"]))
            return self.answer(status, {})
        files = branches[branch]
        if what == "tree":
            found = [
                {"type": "file", "oid": oid(data), "size": len(data), "path": path} for path, data in files.items()
            ]
            return self.answer(200, found)
        if what == "revision":
            return self.answer(200, {"id": name, "sha": "0" * 40, "private": True, "tags": [], "siblings": []})
        if what == "preupload":
            asked = json.loads(body)["files"]
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["size"] >= LARGE else "regular",
                    "shouldIgnore": False,
                    "oid": oid(files[file["path"]]) if file["path"] in files else None,
                }
                for file in asked
            ]
            return self.answer(200, {"files": modes})
        assert what == "commit", what
        changed = dict(files)
        for line in map(json.loads, body.splitlines()):
            key, value = line["key"], line["value"]
            if key == "header":
                self.hub.commits.append(value["summary"])
            elif key == "file":
                changed[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                changed[value["path"]] = self.hub.store[value["oid"]]
            else:
                assert key == "deletedFile", key
                del changed[value["path"]]
        branches[branch] = changed
        return self.answer(200, {"commitUrl": f"{self.hub.url}/{name}/commit/{'1' * 40}", "commitOid": "1" * 40})

    def resolve(self, name: str, branch: str, path: str) -> None:
        data = self.hub.models[name][branch].get(path)
        if data is None:
            return self.answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{oid(data)}"', "X-Repo-Commit": "1" * 40}
        return self.send(200, data, headers)

    def batch(self, asked: dict[str, list[dict[str, object]]]) -> None:
        objects = []
        for wanted in asked["objects"]:
            entry = dict(wanted)
            if wanted["oid"] not in self.hub.store:
                entry["actions"] = {"upload": {"href": f"{self.hub.url}/store/{wanted['oid']}", "header": {}}}
            objects.append(entry)
        self.answer(200, {"transfer": "basic", "objects": objects})

    def put(self, digest: str, body: bytes) -> None:
        if len(self.hub.sent) >= self.hub.refuse_after:
            return self.answer(403, {"error": "no"})
        assert hashlib.sha256(body).hexdigest() == digest
        self.hub.store[digest] = body
        self.hub.sent.append(digest)
        return self.answer(200, {})

    def answer(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        self.send(status, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})

    def send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815  names of http.server


def oid(data: bytes) -> str:
    """The id by which git knows a small file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
