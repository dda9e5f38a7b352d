"""Turns and images of a conversation, the page's sessions and its guard, without a model."""

import asyncio
import importlib
import signal
import threading
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from small import command_config, write_json

from llava_fsdp import commands
from llava_fsdp.chat import assistant as module
from llava_fsdp.chat import main, open_model
from llava_fsdp.chat.assistant import Assistant, LoadedImage, images_after
from llava_fsdp.chat.conversation import Conversation
from llava_fsdp.commands import start
from llava_fsdp.config import AspectRatio, ChatConfig, ConversionConfig, Pixels, SpecialTokens, TrainedModelConfig
from llava_fsdp.config.command_line import cli
from llava_fsdp.data.records.record import IMAGE_TAG, Turn
from llava_fsdp.data.text.tokens.constants import IMAGE_ID
from llava_fsdp.export.source_model import Opened
from llava_fsdp.export.write.formats import SourceModel
from llava_fsdp.model.generation import PrefixCache, Prompt, Sampling
from llava_fsdp.model.llava.llava import Llava
from llava_fsdp.runtime.errors import DataError, OutOfMemory

HOW = Sampling(max_new_tokens=5)


def image(name: str, tokens: int = 1, images: int = 1) -> LoadedImage:
    return LoadedImage(0, Path(name), np.zeros(0), np.arange(tokens), images)


class Answers:
    """An assistant that answers with the text of the question, in two pieces, and never ends an answer itself."""

    device = "cpu"
    ends = False
    text = None

    def load_image(self, path: Path, where: str, images: int = 1) -> LoadedImage:
        return image(path.name)

    def prepare_images(self, images: list[LoadedImage]) -> list[LoadedImage]:
        return list(images)

    def stream(self, turns: list[Turn], *_: Any) -> Generator[str, None, bool]:
        text = turns[-1].text.replace(IMAGE_TAG, "").strip()
        yield text[:1]
        if "fail" in text:
            raise OutOfMemory("no room")
        yield text[1:]
        return self.ends


@pytest.fixture
def talk() -> Conversation:
    own: Any = Answers()
    return Conversation(own, max_images=3)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in "abcd"]
    for path in paths:
        path.write_text("x")
    return paths


def names(images: list[LoadedImage]) -> list[str]:
    return [Path(str(one.path)).name for one in images]


def test_images_that_are_taken_back_come_before_those_added_since(talk: Conversation, files: list[Path]) -> None:
    for path in files[:2]:
        talk.add(path, "")
    assert "".join(talk.ask("one", HOW)) == "one" and talk.turns[0].text == f"{IMAGE_TAG}\n" * 2 + "one"
    "".join(talk.ask("two", HOW))
    talk.add(files[2], "")
    with pytest.raises(DataError, match="at most 3 images"):
        talk.add(files[3], "")
    assert talk.undo() and names(talk.images) == ["a", "b"] and names(talk.next_images) == ["c"]
    assert talk.undo() and not talk.images and names(talk.next_images) == ["a", "b", "c"]
    "".join(talk.ask(f"{IMAGE_TAG} x {IMAGE_TAG}{IMAGE_TAG}", HOW))
    assert names(talk.images) == ["a", "b", "c"] and not talk.next_images
    assert [(text, [path.name for path in shown], answer) for text, shown, answer in talk.exchanges()] == [
        ("x", ["a", "b", "c"], "x")
    ]
    with pytest.raises(DataError, match="at most 3 images"):
        talk.add(files[3], "")
    talk.reset()
    talk.add(files[3], "")
    assert not talk.turns and not talk.images and names(talk.next_images) == ["d"] and not talk.exchanges()


def test_a_question_that_fails_changes_nothing(talk: Conversation, files: list[Path]) -> None:
    talk.add(files[0], "")
    "".join(talk.ask("one", HOW))
    talk.add(files[1], "")
    turns = list(talk.turns)
    with pytest.raises(OutOfMemory):
        "".join(talk.ask("fail", HOW))
    assert talk.turns == turns and names(talk.images) == ["a"] and names(talk.next_images) == ["b"]
    with pytest.raises(DataError, match=r"has <image> 2 times, and 1 new images"):
        next(talk.ask(f"{IMAGE_TAG}{IMAGE_TAG}", HOW))
    talk.turns[1] = Turn("gpt", "")
    "".join(talk.ask("two", HOW))
    assert [turn.role for turn in talk.turns] == ["human", "gpt"] * 2


def test_whether_an_answer_was_cut(talk: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    "".join(talk.ask("one", HOW))
    assert talk.was_cut
    monkeypatch.setattr(Answers, "ends", True)
    "".join(talk.ask("one", HOW))
    assert not talk.was_cut

    def writes_a_tag(*_: Any) -> Generator[str, None, bool]:
        yield f"a{IMAGE_TAG}b"
        return True

    monkeypatch.setattr(Answers, "stream", writes_a_tag)
    "".join(talk.ask("one", HOW))
    assert talk.turns[-1] == Turn("gpt", "ab"), "it would take the place of an image"


def test_commands_of_a_terminal(talk: Conversation, files: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    own = main.Terminal(talk, command_config(ChatConfig, "chat", "temperature=0.5", "top_p=0.25", "max_new_tokens=7"))
    assert own.sampling == Sampling(7, 0.5, 0.25)
    "".join(talk.ask("one", HOW))
    with caplog.at_level("INFO", "llava_fsdp"):
        assert not own.run_command(f'/image "{files[0]}"') and names(talk.next_images) == ["a"]
        assert not own.run_command("/reset") and not talk.turns and not talk.next_images
        assert not own.run_command("/undo") and own.run_command("/exit") and own.run_command("/quit")
    assert caplog.messages[1:] == ["a new conversation, without images", "there is no question yet"]
    with pytest.raises(DataError, match="/resets is not a command"):
        own.run_command("/resets")


def test_what_a_cached_beginning_has_of_images() -> None:
    """An image of three tokens, of which the beginning has none, some or all, before one of two."""
    both = [image("a", 3), image("b", 2)]
    for cached, left in ((0, [(0, 1, 2), (0, 1)]), (2, [(2,), (0, 1)]), (3, [(0, 1)]), (4, [(1,)]), (5, [])):
        tokens = np.array([7, *[IMAGE_ID] * cached, 8])
        assert [tuple(one.rows.tolist()) for one in images_after(both, tokens)] == left


def test_images_are_read_again_where_their_number_decides() -> None:
    """Of a model that cuts the only image into tiles; a video is not counted and never read again."""
    read: list[tuple[str, int]] = []

    def load(path: Path, where: str, images: int) -> LoadedImage:
        read.append((path.name, images))
        return image(path.name, 1, images)

    tokens = SimpleNamespace(needs_size=lambda images: images == 1)
    own: Any = SimpleNamespace(reader=SimpleNamespace(tokens=tokens), load_image=load)
    video = image("c.mp4")
    alone = image("a")
    first, other = Assistant.prepare_images(own, [alone, video])
    assert first is alone and other is video
    assert not read
    both = Assistant.prepare_images(own, [image("a", images=1), video, image("b", images=2)])
    assert read == [("a", 2)] and [one.images for one in both] == [2, 1, 2] and both[1] is video
    assert [one.images for one in Assistant.prepare_images(own, [image("a", images=2)])] == [1]


def test_a_conversation_that_does_not_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the cache holds is then not known."""

    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(module, "write_tokens", fails)
    before = PrefixCache(tokens=[1, 2])
    monkeypatch.setattr(before, "reuse", lambda *_: (None, 0))
    own: Any = SimpleNamespace(
        encode_question=lambda *_: (np.arange(9), []), max_tokens=20, new_text=SimpleNamespace, prefix=before,
        model=None, to_device=lambda *_: (None, ()), device=torch.device("cpu"),
    )  # fmt: skip
    with pytest.raises(OutOfMemory, match="a conversation of 9 tokens"):
        next(Assistant.stream(own, [], [], HOW, torch.Generator()))
    assert own.prefix is not before and own.prefix.tokens == []


def test_tags_are_those_of_the_images() -> None:
    own: Any = SimpleNamespace()
    for turns in ([Turn("human", "a")], [Turn("human", f"{IMAGE_TAG}{IMAGE_TAG}")], [Turn("gpt", IMAGE_TAG)]):
        with pytest.raises(DataError, match=r"^here: \d <image> tags for 1 images"):
            Assistant.encode_question(own, turns, [image("a")], "here")


@pytest.mark.parametrize("command", ["chat", "evaluate"])
def test_which_model_is_opened_is_said_before_it_takes_time(
    command: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []
    own = importlib.import_module(f"llava_fsdp.{command}.main")
    monkeypatch.setattr(own, command, lambda cfg: said.extend(caplog.messages))
    cfg = SimpleNamespace(model=TrainedModelConfig(checkpoint="outputs/a"))
    monkeypatch.setattr(cli, "run", lambda name, keys, task: task(cfg))
    monkeypatch.setattr(commands, "prepare_python", lambda: None)
    with caplog.at_level("INFO", "llava_fsdp"):
        start(command)
    (line,) = said
    assert "model.checkpoint=outputs/a" in line


def test_a_later_checkpoint_than_the_export_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = [tmp_path / "step-000003", tmp_path / "step-000009"]
    monkeypatch.setattr(open_model, "list_checkpoints", lambda _: kept)
    for step, warned in ((8, True), (9, False), (2, True)):
        write_json(tmp_path / "export" / "llava_fsdp.json", {"step": step})
        caplog.clear()
        open_model.warn_of_later_checkpoint(tmp_path)
        assert [f"export of step {step}" in line and "step-000009" in line for line in caplog.messages] == [
            True
        ] * warned
    monkeypatch.setattr(open_model, "list_checkpoints", lambda _: [])
    open_model.warn_of_later_checkpoint(tmp_path)
    assert len(caplog.messages) == 1


def test_whether_a_folder_says_how_images_are_fitted(tmp_path: Path) -> None:
    """transformers' LLaVA alone leaves it open, if its preprocessor does not pad and the folder is not ours."""
    assert not open_model.lacks_padding(tmp_path), "a run or a checkpoint has no config.json"
    for kind, lacks in (("llava", True), ("llava_next", False), ("llava_onevision", False), ("llava_llama", False)):
        write_json(
            tmp_path / "config.json",
            {"model_type": kind, "mm_vision_tower": "x"} if kind == "llava_llama" else {"model_type": kind},
        )
        assert open_model.lacks_padding(tmp_path) is lacks
    write_json(tmp_path / "config.json", {"model_type": "llava"})
    write_json(tmp_path / "preprocessor_config.json", {"do_pad": True})
    assert not open_model.lacks_padding(tmp_path)
    write_json(tmp_path / "preprocessor_config.json", {"do_pad": False})
    assert open_model.lacks_padding(tmp_path)
    write_json(tmp_path / "llava_fsdp.json", {})
    assert not open_model.lacks_padding(tmp_path)


def test_the_page_keeps_the_conversations_used_last() -> None:
    pytest.importorskip("starlette", reason="gradio is not installed")
    from llava_fsdp.chat.web.sessions import MAX_SESSIONS, Sessions, without_folders

    own: Any = Answers()
    sessions = Sessions(own, command_config(ChatConfig, "chat", "max_images=2"))
    first = sessions.get("first")
    second = sessions.get("second")
    for number in range(MAX_SESSIONS - 2):
        sessions.get(str(number))
    assert sessions.get("first") is first
    sessions.get("one more")
    assert sessions.get("first") is first and sessions.get("second") is not second
    assert first.max_images == 2
    text = "image /tmp/x/a.jpg cannot be read: /tmp/x/a.jpg is none of JPEG, in /tmp/x/b.jpg"
    assert (
        without_folders(text, [Path("/tmp/x/a.jpg"), Path("/tmp/x/b.jpg")])
        == "cannot be read: a.jpg is none of JPEG, in "
    )


def test_uploads_are_bounded_and_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the files that are there and those that come at the same time; each counts until it has arrived."""
    pytest.importorskip("starlette", reason="gradio is not installed")
    from llava_fsdp.chat.web import security

    monkeypatch.setattr(security, "MOST_UPLOADED_BYTES", 100)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_bytes(b"x" * 60)
    seen: list[list[int]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(list(guard.incoming))
        await security.PlainTextResponse("done")(scope, receive, send)

    guard = security.RequestGuard(app, "localhost", tmp_path, 50)

    def status(method: str, path: str, size: int = 0) -> int:
        said: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            said.append(message)

        headers = [(b"host", b"localhost"), (b"content-length", b"%d" % size)]
        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        asyncio.run(guard(scope, receive, send))
        return said[0]["status"]

    assert [status("POST", security.UPLOAD, size) for size in (40, 41, 51)] == [200, 507, 413]
    assert seen == [[40]] and guard.incoming == []
    guard.incoming.append(30)
    assert [status("POST", security.UPLOAD, size) for size in (10, 11)] == [200, 507]
    assert status("GET", f"{security.FILE}{tmp_path / 'in' / 'a'}") == 200
    assert status("GET", f"{security.FILE}/etc/passwd") == 403 and status("POST", "/gradio_api/reset") == 200
    for body in (b"{", b"[" * 100_000):
        with pytest.raises(security.RequestRefused) as refusal:
            security.check_body(body, tmp_path)
        assert refusal.value.status == 400


def test_where_the_page_is_and_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("starlette", reason="gradio is not installed")
    from llava_fsdp.chat.web.server import address_line, prepare_environment

    def line(host: str, bound: str) -> str:
        cfg = command_config(ChatConfig, "chat", f"host='{host}'", "port=81")
        own: Any = SimpleNamespace(getsockname=lambda: (bound, 81))
        return address_line(cfg, own)

    assert line("localhost", "127.0.0.1") == "the page is at http://localhost:81; Ctrl-C ends it"
    assert line("::1", "::1") == "the page is at http://[::1]:81; Ctrl-C ends it"
    assert "http://0.0.0.0:81; " in line("0.0.0.0", "0.0.0.0") and "without a password" in line("0.0.0.0", "0.0.0.0")
    environment = {"GRADIO_SHARE": "True", "HOME": "/h"}
    monkeypatch.setattr("llava_fsdp.chat.web.server.os.environ", environment)
    prepare_environment("/folder")
    assert "GRADIO_SHARE" not in environment and environment["HOME"] == "/h"
    assert (environment["GRADIO_TEMP_DIR"], environment["GRADIO_ANALYTICS_ENABLED"]) == ("/folder", "False")


def test_in_which_dtype_a_model_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits on a GPU, and on a CPU as its memory allows."""
    own: Any = None
    monkeypatch.setattr(open_model, "compute_dtype", lambda _: torch.float32)
    for has_bf16, dtype in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has_bf16=has_bf16: has_bf16)
        assert open_model.choose_dtype(own, torch.device("cuda", 1)) is dtype
        assert open_model.choose_dtype(own, torch.device("cpu")) is torch.float32


def test_answers_of_a_batch_end_where_its_longest_prompt_leaves_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, Any]] = []

    def write(model: Any, prompt: Prompt, cache: Any, sampling: Sampling) -> list[Any]:
        given.append((sampling.max_new_tokens, prompt.mask.tolist()))
        return []

    monkeypatch.setattr(module, "write_tokens", write)
    monkeypatch.setattr(module, "DynamicCache", lambda **_: None)
    own: Any = SimpleNamespace(
        encode_question=lambda turns, images, *_: (np.arange(len(turns)), images), max_tokens=9,
        new_text=lambda: SimpleNamespace(close=lambda: "", text="", ended=False, is_thought_cut=True),
        to_device=lambda ids, images, blank: (ids, ()), device=torch.device("cpu"),
        model=SimpleNamespace(language=SimpleNamespace(config=None)), answers_one_by_one=False,
    )  # fmt: skip
    turn = Turn("human", "a")
    asked = [module.Question([turn] * turns, [], "here") for turns in (1, 3)]
    for most in (5, 6, 7):
        assert Assistant.answers(own, asked, most) == ["", ""]
    mask = [[False, False, True], [True, True, True]]
    assert given == [(5, mask), (6, mask), (6, mask)] and own.thoughts_cut == [True, True]


def test_tokens_of_an_image_are_its_own() -> None:
    """In the beginning of a conversation: neither those of another image, nor others of the same."""
    first, other = (LoadedImage(number, Path("a"), np.zeros(0), np.arange(2)) for number in (0, 1))
    tokens = np.array([7, IMAGE_ID, IMAGE_ID, 8, IMAGE_ID, IMAGE_ID])
    found = module.with_image_numbers(tokens, [first, other])
    assert (found[0], found[3]) == (7, 8) and len({*found}) == 6 and max(found[1], found[2], *found[4:]) < 0
    assert module.with_image_numbers(tokens, [first, first])[:3] == found[:3] != found[3:]
    assert tokens[1] == IMAGE_ID and module.with_image_numbers(np.array([7, 8]), []) == [7, 8]


@pytest.mark.parametrize(("is_exported", "says_padding"), [(True, True), (True, False), (False, True)])
def test_which_folder_is_asked_and_how_its_images_are_fitted(
    is_exported: bool, says_padding: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export of a run, if it has one; what the folder does not say is as it is asked for."""
    own = SourceModel(
        model=cast(Llava, None), template="plain", aspect=AspectRatio.square, grid_pinpoints=[], max_tiles=1,
        pixels=Pixels.exact, special_tokens=SpecialTokens.text, max_length=9, language="", vision="",
        renamed_tower=None, history={},
    )  # fmt: skip
    asked: list[ConversionConfig] = []
    monkeypatch.setattr(open_model, "open_source", lambda cfg: asked.append(cfg) or Opened(own, {}, tmp_path))
    monkeypatch.setattr(open_model, "lacks_padding", lambda _: not says_padding)
    if is_exported:
        write_json(tmp_path / "export" / "config.json", {})
    opened = open_model.open_model(str(tmp_path), "v0", AspectRatio.pad)
    assert opened.source.aspect is (AspectRatio.square if says_padding else AspectRatio.pad)
    (cfg,) = asked
    assert (cfg.source, cfg.template) == (str(tmp_path / "export" if is_exported else tmp_path), "v0")
    assert cfg.image_aspect_ratio is None and cfg.vision is None and not cfg.accept


def terminal(talk: Conversation) -> main.Terminal:
    return main.Terminal(talk, command_config(ChatConfig, "chat"))


def test_errors_of_a_line_are_told_and_the_next_one_is_read(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until a command ends the program, or there are no more lines; a space makes a command a question."""
    lines = iter(["one", "  ", "fail", "/nonsense", " /undo ", "/quit", "never asked", "last"])

    def typed(_: str) -> str:
        for line in lines:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", typed)
    with caplog.at_level("ERROR", "llava_fsdp"):
        terminal(talk).run()
    assert [turn.text for turn in talk.turns[::2]] == ["one", "/undo"] and len(caplog.records) == 2
    assert next(lines) == "never asked"
    terminal(talk).run()
    assert [turn.text for turn in talk.turns[::2]] == ["one", "/undo", "last"]


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(
    talk: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = threading.Event()
    terminal(talk).answer("one", stopped)
    stopped.set()
    terminal(talk).answer("two", stopped)
    assert [turn.text for turn in talk.turns[1::2]] == ["one", "t"] and capsys.readouterr().out == "one\nt\n"


def test_the_first_interrupt_stops_an_answer_and_the_second_the_program() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), main.stop_on_interrupt() as stopped:
        assert not stopped.is_set()
        signal.raise_signal(signal.SIGINT)
        assert stopped.is_set()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
