"""The page itself, on Gradio. Its settings must be in the environment when this is imported (`server.py`)."""

import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastapi
import gradio as gr

from llava_fsdp.chat.web.security import MiB
from llava_fsdp.chat.web.sessions import Talk, Talks
from llava_fsdp.config import ChatConfig
from llava_fsdp.data.images.check import FORMATS
from llava_fsdp.model.generation import Sampling
from llava_fsdp.runtime.errors import DataError, OutOfMemory

DAY = 24 * 3600
HOUR = 3600
QUIET = 1.0
"""Seconds that a new conversation waits for the last words of the one before, which would be shown in it otherwise."""
SYSTEM_FONTS = ("system-ui", "sans-serif")
CSS = """
footer, button[aria-label="Share"] {display: none}  /* the latter sends a picture to another site */
.about {font-size: 0.9em; overflow-wrap: anywhere}
"""


def make_app(talks: Talks, cfg: ChatConfig) -> Any:
    """The application without its guard: it listens to nothing by itself."""
    page = make_page(talks, cfg)
    app = gr.mount_gradio_app(
        fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None),
        page,
        path="/",
        server_name=cfg.host,
        server_port=cfg.port,
        footer_links=[],
        run_history=False,
        allowed_paths=[],
        show_error=False,
        max_file_size=cfg.max_upload_mb * MiB,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        theme=gr.themes.Default(font=SYSTEM_FONTS, font_mono=("ui-monospace", "monospace")),
        css=CSS,
    )
    page.has_launched = True  # else gradio does not ask whether a file that a request names was sent to it
    return app


def make_page(talks: Talks, cfg: ChatConfig) -> gr.Blocks:
    assistant = talks.assistant
    most = max(1, min(2048, assistant.positions))
    with gr.Blocks(title="llava_fsdp", analytics_enabled=False, delete_cache=(HOUR, DAY)) as page:
        gr.HTML(about(talks), elem_classes="about")
        chat = gr.Chatbot(
            height="65vh", show_label=False, render_markdown=False, buttons=[], feedback_options=None,
            allow_file_downloads=False, placeholder="Add a picture, and ask.",
        )  # fmt: skip
        box = gr.MultimodalTextbox(
            show_label=False, file_count="multiple", file_types=["image"], sources=["upload"], autofocus=True,
            placeholder="Ask; pictures go in by the clip, by dropping or by pasting them", max_plain_text_length=20_000,
        )  # fmt: skip
        with gr.Row():
            stop = gr.Button("Stop", interactive=False)
            clear = gr.Button("New conversation")
        with gr.Accordion("How answers are written", open=False):
            temperature = gr.Slider(0, max(2.0, cfg.temperature), cfg.temperature, step=0.05, label="temperature")
            top_p = gr.Slider(0.05, 1, cfg.top_p, step=0.05, label="top_p")
            tokens = gr.Slider(1, most, min(cfg.max_new_tokens, most), step=1, label="max_new_tokens")

        def ask(said: dict[str, Any], heat: float, share: float, length: float, request: gr.Request) -> Iterator[Any]:
            yield from answered(talks, cfg, said, (heat, share, length), session_of(request))

        def stopped(request: gr.Request) -> None:
            talks.stop(session_of(request))

        def gone(request: gr.Request) -> None:
            talks.forget(session_of(request))

        def cleared(request: gr.Request) -> tuple[Any, ...]:
            talks.forget(session_of(request), QUIET)
            return [], box_with("", []), gr.Button(interactive=False)

        # who waits for the model waits in `talks.line`, from where a question can be taken back at once
        at_once: dict[str, Any] = {"concurrency_limit": None, "api_visibility": "private", "show_progress": "hidden"}
        box.submit(ask, [box, temperature, top_p, tokens], [chat, box, stop], **at_once)
        stop.click(stopped, **at_once)
        for emptied in (clear.click, chat.clear):  # the bin above the conversation empties what is shown alone
            emptied(cleared, None, [chat, box, stop], **at_once)
        page.unload(gone)
    return page.queue(api_open=False)


def about(talks: Talks) -> str:
    name, form = html.escape(talks.assistant.name), html.escape(talks.assistant.template)
    return f"<b>{name}</b>, template {form}; pictures: {', '.join(FORMATS)}, at most {talks.cfg.max_upload_mb} MiB each"


def session_of(request: gr.Request) -> str:
    return str(request.session_hash)


def answered(
    talks: Talks, cfg: ChatConfig, said: dict[str, Any], settings: tuple[float, float, float], session: str
) -> Iterator[Any]:
    """What the page shows while an answer is written: the conversation, the box for questions, the stop button."""
    text, files = said["text"].strip(), [str(name) for name in said["files"]]
    idle, talk = gr.Button(interactive=False), talks.of(session)
    before = history(talk)
    if not text and not files:
        yield before, gr.skip(), idle
        return
    talk.stopped.clear()
    talk.is_silent.clear()
    asked, written = message("user", text, files), ""
    # said with every piece: the browser may take several updates for one, and keep the last
    busy = box_with("", [], interactive=False), gr.Button(interactive=True)
    try:
        yield [*before, asked], *busy
        with talks.line.place(lambda: talks.is_stopped(talk)) as place:
            for ahead in place.ahead():
                yield [*before, asked, message("assistant", waiting(ahead), [])], *busy
            pieces = talks.ask(talk, text, files, sampling(settings))
            for piece in () if talks.is_stopped(talk) else place.through(pieces):
                if not talks.is_kept(session, talk):
                    break
                written += piece
                yield [*before, asked, message("assistant", written, [])], *busy
        if not talks.is_kept(session, talk):  # the conversation was ended, by what shows that itself
            yield gr.skip(), gr.skip(), gr.skip()  # what comes last is sent a second time, over what that shows
        elif talk.stopped.is_set() and len(history(talk)) == len(before):  # before it was its turn
            yield before, box_with(text, files), idle
        else:
            yield history(talk), gr.MultimodalTextbox(interactive=True), idle
    except Exception as error:
        is_kept = talks.is_kept(session, talk)
        yield (before, box_with(text, files), idle) if is_kept else (gr.skip(), gr.skip(), gr.skip())
        if not isinstance(error, (DataError, OutOfMemory)):
            raise  # a fault of ours: in full on the terminal, and the page can still be used
        if is_kept:
            gr.Warning(html.escape(str(error)), duration=None)
    finally:
        talk.is_silent.set()


def box_with(text: str, files: list[str], interactive: bool = True) -> gr.MultimodalTextbox:
    return gr.MultimodalTextbox(value={"text": text, "files": files}, interactive=interactive)


def waiting(ahead: int) -> str:
    return f"(waits for its turn: {ahead} {'question is' if ahead == 1 else 'questions are'} before it)"


def sampling(settings: tuple[float, float, float]) -> Sampling:
    """Of what the page's sliders say, or whoever sent it.

    Raises:
        DataError: it is beyond what they can say.
    """
    temperature, top_p, tokens = settings
    if not (0 <= temperature <= 100 and 0 < top_p <= 1 and 1 <= tokens <= 1 << 20):
        raise DataError(f"temperature={temperature}, top_p={top_p} and max_new_tokens={tokens} go beyond their limits")
    return Sampling(int(tokens), float(temperature), float(top_p))


def history(talk: Talk) -> list[Any]:
    return [
        entry
        for question, files, answer in talk.shown()
        for entry in (message("user", question, files), message("assistant", answer, []))
    ]


def message(role: str, text: str, files: list[str]) -> dict[str, Any]:
    """As gr.Chatbot takes it, which would show HTML in a text as HTML; without files that gradio has deleted."""
    text = html.escape(text, quote=False)
    shown: list[Any] = [{"path": name, "alt_text": Path(name).name} for name in files if Path(name).is_file()]
    return {"role": role, "content": [*shown, *([text] if text or not files else [])]}
