"""The page to talk to a model: in a real browser, asked by others than a browser, and what its guard lets through."""

import asyncio
import http.client
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import page
from PIL import Image
from small import command_config

pytest.importorskip("starlette", reason="gradio is not installed")

from llava_fsdp.chat.assistant import Assistant, Question
from llava_fsdp.chat.web import security
from llava_fsdp.chat.web.security import RequestGuard, RequestRefused, check_body, check_call, check_origin, check_route
from llava_fsdp.chat.web.server import listen
from llava_fsdp.chat.web.sessions import Sessions
from llava_fsdp.config import AspectRatio, ChatConfig
from llava_fsdp.data.records.record import IMAGE_TAG, Turn
from llava_fsdp.model.generation import Sampling
from llava_fsdp.runtime.errors import ConfigError, DataError

PATIENCE = 90_000
"""Milliseconds that the browser waits for what must come."""


PACED = """
import time
from llava_fsdp.chat.assistant import Assistant
from llava_fsdp.commands import start

fast = Assistant.stream

def paced(*args):
    stream = fast(*args)
    while True:
        time.sleep(0.03)
        try:
            yield next(stream)
        except StopIteration as end:
            return end.value

Assistant.stream = paced
start("chat")
"""
"""The command, with a model that takes its time as a real one does: a small one is done before a button is found."""


def configured(*overrides: str) -> ChatConfig:
    return command_config(ChatConfig, "chat", *overrides)


class Served:
    """The command, running."""

    def __init__(self, checkpoint: Path, folder: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        words = [f"model.checkpoint={checkpoint}", f"port={self.port}", "max_upload_mb=1", "max_images=3"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PACED, "serve=true", "max_new_tokens=8", *words],
            cwd=folder, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.said: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if "the page is at" in line:
                break
        else:
            raise AssertionError("".join(self.said))
        self.reader = threading.Thread(target=lambda: self.said.extend(self.process.stderr or []), daemon=True)
        self.reader.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def asked(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        link.request(method, path, body or None, named)
        found = link.getresponse()
        return found.status, found.read()

    def post(self, path: str, **body: Any) -> tuple[int, bytes]:
        kind = {"Content-Type": "application/json"}
        return self.asked("POST", f"/gradio_api/{path}", json.dumps(body).encode(), **kind)

    def sent(self, name: str, content: bytes) -> tuple[int, bytes]:
        """A file, as the page sends it."""
        head = f'--x\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'.encode()
        kind = {"Content-Type": "multipart/form-data; boundary=x"}
        return self.asked("POST", "/gradio_api/upload", head + content + b"\r\n--x--\r\n", **kind)


@pytest.fixture(scope="module")
def served(noise: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(noise, tmp_path_factory.mktemp("served"))
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


@pytest.fixture(scope="module")
def hostile_tiff() -> bytes:
    """600 kB, whose 50,000 fields share an array."""
    fields = b"".join(struct.pack("<HHII", tag, 7, 10_000, 8) for tag in range(50_000))
    return b"II*\0" + struct.pack("<I", 10_008) + bytes(10_000) + struct.pack("<H", 50_000) + fields + bytes(4)


@pytest.fixture(scope="module")
def assistant(noise: Path) -> Assistant:
    return Assistant(str(noise), "v1", AspectRatio.pad)


def ask(shown: Any, text: str, *files: Path) -> None:
    if files:
        shown.set_input_files("input[type=file]", [str(file) for file in files])
        shown.wait_for_function(
            f"document.querySelectorAll('.thumbnail-item').length == {len(files)}", timeout=PATIENCE
        )
    shown.fill("textarea", text)
    shown.click("button[aria-label=Submit]", timeout=PATIENCE)


def answers(shown: Any, number: int) -> list[str]:
    """Of the model, once there are so many and the last one is complete."""
    shown.wait_for_function(
        f"document.querySelectorAll('[data-testid=bot]').length == {number} && "
        "!document.querySelector('textarea').disabled",
        timeout=PATIENCE,
    )
    return [text.strip() for text in shown.locator("[data-testid=bot]").all_inner_texts()]


def as_shown(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.e2e
@pytest.mark.slow
def test_a_conversation(served: Served, assistant: Assistant, dataset: Path) -> None:
    """Two images and a question, then another question; nothing comes from elsewhere, texts are no HTML."""
    pictures = [dataset / "images" / name for name in ("0.jpg", "1.png")]
    first, second = "what is <b>left</b> & right", "and above"
    turns = [Turn("human", f"{IMAGE_TAG}\n{IMAGE_TAG}\n{first}")]
    expected = []
    for text in (first, second):
        turns += [Turn("human", text)] if expected else []
        expected += assistant.answers([Question(turns, pictures, "")], 8)
        turns.append(Turn("gpt", expected[-1]))
    with page() as shown:
        asked: list[str] = []
        shown.on("request", lambda request: asked.append(request.url))
        shown.goto(served.address, timeout=PATIENCE)
        shown.wait_for_selector("textarea", timeout=PATIENCE)
        ask(shown, first, *pictures)
        assert list(map(as_shown, answers(shown, 1))) == [as_shown(expected[0])]
        assert first in shown.locator("[data-testid=user]").last.inner_text()
        assert shown.locator("[data-testid=user] b").count() == 0
        sizes = shown.eval_on_selector_all("[data-testid=user] img", "all => all.map(i => i.naturalWidth)")
        assert sizes == [Image.open(path).width for path in pictures]
        labels = shown.eval_on_selector_all("button", "all => all.filter(b => b.offsetParent).map(b => b.ariaLabel)")
        assert "Submit" in labels and not {"Share", "Download"} & set(labels), "buttons that send or fetch files"
        ask(shown, second)
        assert list(map(as_shown, answers(shown, 2))) == [as_shown(text) for text in expected]
        shown.click("text=New conversation")
        shown.wait_for_selector("[data-testid=user]", state="detached", timeout=PATIENCE)
        ask(shown, second)
        alone = assistant.answers([Question([Turn("human", second)], [], "")], 8)
        assert list(map(as_shown, answers(shown, 1))) == [as_shown(alone[0])], "nothing is left of the one before"
    assert asked and all(url.startswith((f"{served.address}/", "data:", "blob:")) for url in asked)


def opened(shown: Any, served: Served, most_tokens: int = 8) -> None:
    shown.goto(served.address, timeout=PATIENCE)
    shown.click("text=How answers are written", timeout=PATIENCE)
    shown.fill("input[aria-label*='max_new_tokens']", str(most_tokens))
    shown.keyboard.press("Tab")


@pytest.mark.slow
@pytest.mark.e2e
def test_an_answer_is_stopped(served: Served, assistant: Assistant) -> None:
    """It ends as a beginning of what would have been said, also while others wait for their turn."""
    most = 1500
    [whole] = assistant.answers([Question([Turn("human", "what")], [], "")], most)
    with page() as shown:
        opened(shown, served, most)
        other = shown.context.browser.new_page()
        opened(other, served)
        ask(shown, "what")
        shown.wait_for_selector("[data-testid=bot]", timeout=PATIENCE)
        for button in ("New conversation", "Stop"):
            ask(other, "taken back")
            other.wait_for_selector("text=/queue: 1/", timeout=PATIENCE)
            other.click(f"button:has-text('{button}')")
            other.wait_for_selector("text=/queue: 1/", state="detached", timeout=PATIENCE)
            left = "taken back" if button == "Stop" else ""
            other.wait_for_function(f"document.querySelector('textarea').value == '{left}'", timeout=PATIENCE)
        shown.click("button:has-text('Stop')")
        [cut] = answers(shown, 1)
        assert cut and as_shown(whole).startswith(as_shown(cut)) and len(cut) < len(whole.strip())
        assert other.locator("[data-testid=bot]").count() == 0
        ask(other, "asked again")
        assert len(answers(other, 1)) == 1, "a stop is for one question"
        ask(shown, "go on")
        shown.wait_for_function("document.querySelectorAll('[data-testid=bot]').length == 2", timeout=PATIENCE)
        shown.click("button:has-text('Stop')")
        assert answers(shown, 2)[0] == cut
        ask(shown, "and again")
        shown.wait_for_function("document.querySelectorAll('[data-testid=bot]').length == 3", timeout=PATIENCE)
        shown.click("text=New conversation")
        for role in ("bot", "user"):
            shown.wait_for_selector(f"[data-testid={role}]", state="detached", timeout=PATIENCE)
        ask(shown, "begun anew")
        shown.wait_for_selector("[data-testid=bot]", timeout=PATIENCE)
        shown.click("button:has-text('Stop')")
        assert len(answers(shown, 1)) == 1, "nothing is left of the one before"


@pytest.mark.e2e
@pytest.mark.slow
def test_one_question_too_many_is_refused_at_once(served: Served) -> None:
    """Gradio's own queue is bounded, and a question that is cancelled frees its place."""
    waiting: list[dict[str, Any]] = []

    question = {"data": [{"text": "what", "files": []}, 0, 1, 400], "fn_index": 0}

    def join(session: str) -> int:
        status, content = served.post("queue/join", **question, session_hash=session)
        if status == 200:
            waiting.append({"fn_index": 0, "session_hash": session, "event_id": json.loads(content)["event_id"]})
        return status

    try:
        assert join("first") == 200
        time.sleep(1)  # its turn begins
        assert [join(f"crowd{number}") for number in range(30)] == [200] * 16 + [503] * 14
        assert served.post("run/predict", **question)[0] == 404, "nothing gets past the queue"
        assert served.post("cancel", **waiting.pop())[0] == 200 and join("last") == 200
    finally:
        for event in reversed(waiting):
            served.post("cancel", **event)


@pytest.mark.e2e
@pytest.mark.slow
def test_requests_of_others(served: Served, tmp_path: Path) -> None:
    """Crafted by hand, against the server itself."""
    inside = json.loads(served.sent("a.txt", b"text")[1])[0]
    assert Path(inside).is_file() and Path(inside).parent.parent.stat().st_mode & 0o077 == 0
    assert served.asked("GET", f"/gradio_api/file={inside}") == (200, b"text")
    both = {"Content-Type": "multipart/form-data; boundary=x", "Content-Length": "10", "Transfer-Encoding": "chunked"}
    assert served.asked("POST", "/gradio_api/upload", b"5\r\nabcde\r\n0\r\n\r\n", **both)[0] == 411
    assert served.asked("GET", "/", Host="[")[0] in (400, 403), "no error of ours"
    for name in ("/etc/passwd", f"{Path(inside).parent}/../../../etc/passwd", "http://127.0.0.1:1/"):
        assert served.asked("GET", f"/gradio_api/file={name}")[0] == 403
        for entry in ({"path": name}, {"path": inside, "url": name}):
            files = [{**entry, "meta": {"_type": "gradio.FileData"}}]
            refused = served.post("queue/join", data=[{"text": "x", "files": files}, 0, 1, 8], fn_index=0)
            assert refused == (403, b"not a file that was sent to this page")
    assert served.sent("large.jpg", bytes((1 << 20) + 1))[0] == 413
    assert served.sent("many.jpg", bytes(5 << 20))[0] == 413
    assert served.asked("GET", "/", Host="evil.example")[0] == 403
    status, text = served.asked("GET", "/")
    assert status == 200 and b"fonts.googleapis" not in text
    for path in ("/gradio_api/api/ask", "/gradio_api/run/ask", "/gradio_api/proxy=http://127.0.0.1:1/x", "/docs"):
        assert served.asked("GET", path)[0] == 404 and served.asked("POST", path, b"{}")[0] == 404


MALFORMED: list[dict[str, Any]] = [
    {}, {"fn_index": 99}, {"fn_index": -1}, {"fn_index": None}, {"fn_index": True}, {"fn_index": [0]}, {"data": 5},
    {"data": []}, {"data": [None, 0, 1, 8]}, {"data": ["x", 0, 1, 8]}, {"data": [{"text": 5, "files": []}, 0, 1, 8]},
    {"data": [{"text": "x", "files": [{}]}, 0, 1, 8]}, {"data": [{"text": "x", "files": []}, "a", 1, 8]},
    {"data": [{"text": "x", "files": []}, 0, -5, 8]}, {"data": [{"text": "x", "files": []}, 0, 1, 1e300]},
    {"data": [{"text": "x", "files": []}, 0, 1, 8, 9]}, {"session_hash": {}}, {"session_hash": "a/b"},
    {"trigger_id": "x"},
]  # fmt: skip


@pytest.mark.e2e
@pytest.mark.slow
def test_malformed_requests_are_refused_without_a_traceback(served: Served) -> None:
    kind, said = {"Content-Type": "application/json"}, len(served.said)
    for path in ("queue/join", "run/predict"):
        for change in MALFORMED:
            body = {"fn_index": 0, "data": [], "session_hash": "a", **change} if change else {}
            assert 400 <= served.post(path, **body)[0] < 500, (path, change)
    for path in ("queue/join", "run/predict", "cancel", "reset"):
        for raw in (b"[[[[", b"\xff", b"5", b"[]", b'"x"', b'{"fn_index": NaN}', b'{"event_id": []}', b"["):
            assert 400 <= served.asked("POST", f"/gradio_api/{path}", raw, **kind)[0] < 500, (path, raw)
    parts = {"Content-Type": "multipart/form-data; boundary=x"}
    for body in (b"x", b'--x\r\nContent-Disposition: form-data; name="files"\r\n\r\nabc\r\n--x--\r\n', b"--x\r\nx"):
        assert served.asked("POST", "/gradio_api/upload", body, **parts)[0] in (200, 400, 422), body
    wide = {"Content-Type": f"multipart/form-data; boundary={'x' * 5000}"}
    assert 400 <= served.asked("POST", "/gradio_api/upload", b"x", **wide)[0] < 500
    assert served.asked("GET", "/assets/" + "a" * 3000)[0] == 414
    assert served.asked("GET", "/")[0] == 200
    assert "Traceback" not in "".join(served.said[said:])


@pytest.mark.e2e
@pytest.mark.slow
def test_a_hostile_image_is_refused_and_others_are_answered(served: Served, hostile_tiff: bytes) -> None:
    name = json.loads(served.sent("a.tiff", hostile_tiff)[1])[0]
    files = [{"path": name, "orig_name": "a.tiff", "meta": {"_type": "gradio.FileData"}}]
    question = {"data": [{"text": "what", "files": files}, 0, 1, 8], "fn_index": 0, "session_hash": "hostile"}
    began = time.monotonic()
    assert served.post("queue/join", **question)[0] == 200
    assert served.asked("GET", "/")[0] == 200
    events = served.asked("GET", "/gradio_api/queue/data?session_hash=hostile")[1].decode()
    assert "a.tiff" in events and "too much time or memory" in events
    assert time.monotonic() - began < 30


@pytest.mark.e2e
@pytest.mark.slow
def test_it_ends_and_leaves_nothing(served: Served) -> None:
    """The last test of this server. SIGTERM is no failure, and files that were sent are gone."""
    folder = Path(json.loads(served.sent("b.txt", b"text")[1])[0]).parents[1]
    assert folder.is_dir()
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(120) == 0
    served.reader.join(10)
    assert not folder.exists()
    assert "Traceback" not in "".join(served.said) and served.said[-1] == "the page has ended\n"


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port={port} cannot be listened on: .*port={port + 1}"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"host=no\.such\.invalid port=1 cannot be listened on"):
        listen("no.such.invalid", 1)


def test_without_the_package(noise: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before a model is loaded."""
    from llava_fsdp.chat.main import chat

    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr("llava_fsdp.chat.web.server.prepare_environment", lambda folder: None)
    with pytest.raises(ConfigError, match=r"serve=true needs gradio: pip install llava-fsdp\[serve\]"):
        chat(configured(f"model.checkpoint={noise}", "serve=true"))


def may_ask(headers: dict[str, str], host: str = "127.0.0.1") -> bool:
    try:
        check_origin(headers, host)
    except RequestRefused:
        return False
    return True


def test_who_may_ask() -> None:
    """By the names that other sites can give themselves, and those that they cannot."""
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    for headers in (
        {"host": "localhost:7860"}, {"host": "127.0.0.1:9000", "origin": "http://127.0.0.1:9000"},
        {"host": "[::1]:7860", "sec-fetch-site": "same-origin"}, {"host": "localhost", **link},
        {"host": "10.0.0.7:7860", "origin": "https://10.0.0.7:7860"}, {"host": f"{socket.gethostname().upper()}:7860"},
        {"host": "LOCALHOST", "sec-fetch-site": "none"},
    ):  # fmt: skip
        assert may_ask(headers), headers
    assert may_ask({"host": "my.page:7860"}, "My.Page") and not may_ask({"host": "my.page:7860"})
    for headers in (
        {}, {"host": "evil.example:7860"}, {"host": "localhost.evil.example"}, {"host": "localhost@evil.example"},
        {"host": "localhost:7860", "origin": "http://evil.example"}, {"host": "localhost:7860", "origin": "null"},
        {"host": "localhost:7860", "origin": "http://localhost:8888"},
        {"host": "localhost:7860", "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
        {"host": "localhost", **link, "sec-fetch-dest": "iframe"},
        {"host": "localhost", **link, "sec-fetch-mode": "cors"},
        {"host": "localhost:7860", "sec-fetch-site": "same-site", "sec-fetch-mode": "cors"},
    ):  # fmt: skip
        with pytest.raises(RequestRefused) as refusal:
            check_origin(headers, "127.0.0.1")
        assert refusal.value.status == 403
    with pytest.raises(RequestRefused):  # a form of another site, sent by navigating, without an Origin
        check_origin({"host": "localhost", **link}, "127.0.0.1", "POST")


def test_what_may_be_asked(tmp_path: Path) -> None:
    inside = tmp_path / "uploads" / "ab" / "a, b.jpg"
    inside.parent.mkdir(parents=True)
    inside.write_bytes(b"x")
    (tmp_path / "uploads" / "link").symlink_to("/etc/passwd")
    fine = {
        "files": [{"path": str(inside), "url": f"http://localhost:1/gradio_api/file={inside}"}, {"path": str(inside)}]
    }
    check_body(json.dumps({"data": [fine, None, 1]}).encode(), tmp_path / "uploads")
    deep: Any = {"path": "/etc/passwd"}
    for _ in range(200):
        deep = [deep]
    for entry in (
        {"path": "/etc/passwd"}, {"path": f"{tmp_path}/uploads/link"}, {"path": f"{tmp_path}/uploads/../x"}, deep,
        {"path": ["/etc/passwd"]}, {"path": None}, {"path": str(inside), "url": "file:///etc/passwd"},
        {"path": str(inside), "url": 5}, {"path": f"{inside}\0"}, {"path": "uploads/ab/a, b.jpg"},
        {"path": str(tmp_path / "uploads")}, {"path": f"{tmp_path}/uploads-of-others/x"},
    ):  # fmt: skip
        with pytest.raises(RequestRefused):
            check_body(json.dumps({"data": [entry]}).encode(), tmp_path / "uploads")
    for path in ("/", "/config", "/assets/a.js", "/gradio_api/queue/data"):
        check_route("GET", path)
    for method, path in (
        ("GET", "/gradio_api/queue/join"),
        ("POST", "/"),
        ("PUT", "/gradio_api/upload"),
        ("GET", "/x"),
    ):
        with pytest.raises(RequestRefused):
            check_route(method, path)


def test_the_guard_answers_for_the_application(tmp_path: Path) -> None:
    """What it reads of a body is given on; what it refuses never arrives; a socket of another kind gets nothing."""
    arrived: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        arrived.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"access-control-allow-origin", b"*")]})
        await send({"type": "http.response.body", "body": b"done"})

    def call(kind: str = "http", size: int = 2, **scope: Any) -> list[Any]:
        said: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"{}" + b" " * (size - 2), "more_body": False}

        async def send(message: Any) -> None:
            said.append(message)

        default = {"method": "POST", "path": "/gradio_api/reset", "headers": [(b"host", b"localhost")]}
        guard = RequestGuard(app, "127.0.0.1", tmp_path, 1 << 20)
        asyncio.run(guard({"type": kind, **default, **scope}, receive, send))
        return said

    start, end = call()
    assert (start["status"], end["body"], arrived) == (200, b"done", [b"{}"])
    sent = dict(start["headers"])
    assert b"access-control-allow-origin" not in sent and b"frame-ancestors 'none'" in sent[b"content-security-policy"]
    assert call(headers=[(b"host", b"evil.example")])[0]["status"] == 403
    assert call(size=(1 << 20) + 1)[0]["status"] == 413
    upload = {"path": "/gradio_api/upload"}
    for length, refused in ((b"", 411), (b"-1", 411), (b"%d" % ((1 << 20) + 1), 413)):
        headers = [(b"host", b"localhost"), (b"content-length", length)]
        assert call(headers=headers, **upload)[0]["status"] == refused
    headers = [(b"host", b"localhost"), (b"content-length", b"2"), (b"transfer-encoding", b"chunked")]
    assert call(headers=headers, **upload)[0]["status"] == 411, "the length that is given does not count"
    assert call("websocket") == [] and arrived == [b"{}"]
    assert call(path="/gradio_api/queue/join")[0]["status"] == 404, "no function has this number"


def test_the_work_for_a_request_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte of path, of names of files, or in pieces of a byte, each of which took minutes; thousands of files."""
    inside = tmp_path / "ab" / "a.jpg"
    inside.parent.mkdir()
    inside.write_bytes(b"x")
    named = [{"path": str(inside)}] * 1001
    began = time.process_time()
    for entry, status in (
        ({"path": "/a" * 500_000}, 403),
        ({"path": f"{tmp_path}{'/..' * 300_000}"}, 403),
        (named, 413),
    ):
        with pytest.raises(RequestRefused) as refusal:
            check_body(json.dumps({"data": entry}).encode(), tmp_path)
        assert refusal.value.status == status
    check_body(json.dumps({"data": named[:1000]}).encode(), tmp_path)
    pieces = iter(range(300_000))

    async def receive() -> Any:
        return {"type": "http.request", "body": b"x", "more_body": next(pieces) < 299_999}

    assert asyncio.run(security.whole_body(receive)) == b"x" * 300_000
    assert time.process_time() - began < 5
    monkeypatch.setattr(security, "MOST_FILES", 3)
    assert security.bytes_in(tmp_path) == 1
    for number in range(4):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "a").write_bytes(b"")
    with pytest.raises(RequestRefused) as refusal:
        security.bytes_in(tmp_path)
    assert refusal.value.status == 507


def test_an_application_that_fails_is_answered_for(tmp_path: Path) -> None:
    """As Starlette fails: it answers 500 and raises. What it answers without raising stays."""

    def call(raises: bool) -> int:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b"Internal Server Error"})
            if raises:
                raise KeyError(99)

        said: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message: Any) -> None:
            said.append(message)

        scope = {"type": "http", "method": "POST", "path": "/gradio_api/reset", "headers": [(b"host", b"localhost")]}
        asyncio.run(RequestGuard(app, "127.0.0.1", tmp_path, 1)(scope, receive, send))
        assert [message["type"] for message in said] == ["http.response.start", "http.response.body"]
        return said[0]["status"]

    assert (call(True), call(False)) == (400, 500)


@pytest.mark.parametrize(("number", "data", "status"), [
    (0, [1, 2], 0), (0, [1], 422), (0, None, 422), (0, ["x", 2], 422), (1, [1, 2], 404), (True, [1, 2], 404),
    (0.0, [1, 2], 404), (None, [1, 2], 404), ("0", [1, 2], 404),
])  # fmt: skip
def test_which_functions_may_be_called(number: Any, data: Any, status: int) -> None:
    def check(values: list[Any]) -> None:
        first, second = values
        assert first < second

    body = {"fn_index": number, "data": data, "session_hash": "a"}
    if not status:
        return check_call(body, {0: check})
    with pytest.raises(RequestRefused) as refusal:
        check_call(body, {0: check})
    assert refusal.value.status == status


def test_files_that_are_refused(assistant: Assistant, dataset: Path, tmp_path: Path) -> None:
    """With a message that names no folder of this machine; the conversation stays as it was."""
    sessions = Sessions(assistant, configured("max_images=3"))
    session, text = sessions.get("one"), tmp_path / "text.jpg"
    text.write_text("no image")
    four = [dataset / "images" / name for name in ("0.jpg", "1.png", "2.jpg", "3.png")]
    for files, said in (([text], "text.jpg: cannot be read: it is none of JPEG"), (four, "3.png: .* at most 3 images")):
        with pytest.raises(DataError, match=said) as refused:
            next(sessions.ask(session, "what", files, Sampling(4)))
        assert str(files[0].parent) not in str(refused.value) and not session.turns and not session.next_images


def test_answers_end_with_their_tab(assistant: Assistant) -> None:
    """A tab that goes, Stop, and the end of the page stop an answer after its next token."""
    long = Sampling(max_new_tokens=300)
    sessions = Sessions(assistant, configured("max_images=2"))
    one = sessions.get("one")
    whole = "".join(sessions.ask(one, "what", [], long))
    for leave in (lambda: sessions.forget("two"), lambda: sessions.stop("two"), sessions.end):
        sessions.forget("two")
        session = sessions.get("two")
        pieces = sessions.ask(session, "what", [], long)
        part = [next(pieces) for _ in range(20)]
        leave()
        part.extend(pieces)
        assert session.exchanges() == [("what", [], "".join(part))]
        assert whole.startswith("".join(part)) and 0 < len("".join(part)) < len(whole) / 4
    with pytest.raises(DataError, match="20001 characters; at most 20000"):
        next(sessions.ask(one, "x" * 20_001, [], long))
    assert len(one.exchanges()) == 1
    for number in range(40):
        sessions.get(str(number))
    assert sessions.get("one") is not one, "the least recently used are dropped"


def test_a_seed_repeats_in_every_conversation(assistant: Assistant) -> None:
    sampling = Sampling(max_new_tokens=12, temperature=1.0)

    def answers(sessions: Sessions, *keys: str) -> list[str]:
        return ["".join(sessions.ask(sessions.get(key), "what", [], sampling)) for key in keys]

    first, again, other = answers(Sessions(assistant, configured("seed=3")), "a", "a", "b")
    assert first == other != again
    assert len(set(answers(Sessions(assistant, configured()), *"abcdef"))) > 1
