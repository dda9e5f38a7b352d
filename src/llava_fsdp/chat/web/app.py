"""Build the web page for chatting with a model, with Gradio. Gradio reads its settings from the environment when it is
imported, so `server.py` sets them before it imports this module."""

import html
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fastapi
import gradio as gr

from llava_fsdp.chat.web.security import MiB
from llava_fsdp.chat.web.sessions import MAX_QUESTION_LENGTH, Session, Sessions
from llava_fsdp.config import ChatConfig
from llava_fsdp.data.images.check import FORMATS
from llava_fsdp.model.generation import Sampling
from llava_fsdp.runtime.errors import DataError, OutOfMemory

DAY = 24 * 3600
HOUR = 3600
MAX_WAITING = 16
"""Maximum number of questions that wait for the model, which answers one at a time; Gradio refuses further ones."""
SYSTEM_FONTS = ("system-ui", "sans-serif")
CSS = """
footer, button[aria-label="Share"] {display: none}  /* the latter sends an image to another site */
.about {font-size: 0.9em; overflow-wrap: anywhere}
"""


def make_app(sessions: Sessions, cfg: ChatConfig) -> tuple[Any, dict[int, Callable[[list[Any]], object]]]:
    """Build the web application of the page, without the checks of requests, which `security.py` adds. Also return, for
    the number of each function that the page calls, a function that checks the values of its inputs."""
    page = make_page(sessions, cfg)
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
    page.has_launched = True  # otherwise Gradio does not check that a requested file was sent to it
    return app, {number: partial(check_inputs, function.inputs) for number, function in page.fns.items()}


def check_inputs(blocks: Sequence[Any], data: list[Any]) -> None:
    """Raise an exception if Gradio would not accept these values of the inputs of a function, given the components that
    the inputs come from. Gradio does the same later, where it prints a traceback."""
    for block, value in zip(blocks, data, strict=True):
        if value is None:
            raise ValueError("an input is missing")
        block.preprocess(value if block.data_model is None else block.data_model.model_validate(value))


def make_page(sessions: Sessions, cfg: ChatConfig) -> gr.Blocks:
    """Build the chat page and connect its controls; `sessions` keeps the conversation of each visitor."""
    assistant = sessions.assistant
    most_tokens = max(1, min(2048, assistant.max_tokens))
    about = (
        f"<b>{html.escape(assistant.checkpoint)}</b>, template {html.escape(assistant.template_name)}; "
        f"images: {', '.join(FORMATS)}, at most {cfg.max_upload_mb} MiB each"
    )
    with gr.Blocks(title="llava_fsdp", analytics_enabled=False, delete_cache=(HOUR, DAY)) as page:
        gr.HTML(about, elem_classes="about")
        chat = gr.Chatbot(
            height="65vh", show_label=False, render_markdown=False, buttons=[], feedback_options=None,
            allow_file_downloads=False, placeholder="Add an image, and ask.",
        )  # fmt: skip
        box = gr.MultimodalTextbox(
            show_label=False, file_count="multiple", file_types=["image"], sources=["upload"], autofocus=True,
            placeholder="Ask a question; add images with the clip, by dropping or by pasting them",
            max_plain_text_length=MAX_QUESTION_LENGTH,
        )  # fmt: skip
        with gr.Row():
            stop = gr.Button("Stop")
            clear = gr.Button("New conversation")
        with gr.Accordion("How answers are written", open=False):
            temperature = gr.Slider(0, max(2.0, cfg.temperature), cfg.temperature, step=0.05, label="temperature")
            top_p = gr.Slider(0.05, 1, cfg.top_p, step=0.05, label="top_p")
            tokens = gr.Slider(1, most_tokens, min(cfg.max_new_tokens, most_tokens), step=1, label="max_new_tokens")

        def ask(
            box: dict[str, Any],
            temperature_value: float,
            top_p_value: float,
            max_new_tokens: float,
            request: gr.Request,
        ) -> Iterator[Any]:
            # Gradio passes the values of the components in `box.submit` below, and the request with the tab's key
            yield from answer(
                sessions, str(request.session_hash), box, (temperature_value, top_p_value, max_new_tokens)
            )

        def show(request: gr.Request) -> tuple[Any, ...]:
            return history(sessions.get(str(request.session_hash))), gr.MultimodalTextbox(interactive=True)

        def stop_answer(request: gr.Request) -> None:
            sessions.stop(str(request.session_hash))

        def begin_anew(request: gr.Request) -> tuple[Any, ...]:
            sessions.forget(str(request.session_hash))
            return [], box_with("", [])

        def leave(request: gr.Request) -> None:
            sessions.forget(str(request.session_hash))

        answering = box.submit(
            ask, [box, temperature, top_p, tokens], [chat, box], concurrency_limit=1, api_visibility="private",
            show_progress="minimal", show_progress_on=[chat],
        )  # fmt: skip
        # these events use no queue, so that they need not wait behind questions
        at_once: dict[str, Any] = {"queue": False, "api_visibility": "private", "show_progress": "hidden"}
        # also after a cancelled answer, whose last pieces the browser may show over the result of other events
        answering.then(show, None, [chat, box], **at_once)
        # `cancels` takes a waiting question out of the queue
        stop.click(stop_answer, None, None, cancels=[answering], **at_once)
        for event in (clear.click, chat.clear):  # the bin above the conversation empties only what is shown
            event(begin_anew, None, [chat, box], cancels=[answering], **at_once)
        page.unload(leave)
    return page.queue(api_open=False, max_size=MAX_WAITING)


def answer(sessions: Sessions, key: str, box: dict[str, Any], settings: tuple[float, float, float]) -> Iterator[Any]:
    """Let the model answer a question from the page. Meanwhile yield updates of its conversation and question box.

    Args:
        key: Gradio's key of the browser tab.
        box: content of the question box: text and files.
        settings: temperature, top_p and max_new_tokens.
    """
    text, files = box["text"].strip(), [str(name) for name in box["files"]]
    if not text and not files:
        return
    temperature, top_p, max_new_tokens = settings
    yield gr.skip(), gr.MultimodalTextbox(interactive=False)
    session = sessions.get(key)
    try:
        sampling = checked_sampling(temperature, top_p, max_new_tokens)
        for _ in sessions.ask(session, text, [Path(name) for name in files], sampling):
            # with every piece: the browser may skip updates and show only the last
            yield history(session), box_with("", [])
    except Exception as error:
        yield history(session), box_with(text, files)
        if not isinstance(error, (DataError, OutOfMemory)):
            raise  # a bug: Gradio prints it, and the page can still be used
        gr.Warning(html.escape(str(error)), duration=None)


def box_with(text: str, files: list[str]) -> gr.MultimodalTextbox:
    return gr.MultimodalTextbox(value={"text": text, "files": files})


def checked_sampling(temperature: float, top_p: float, max_new_tokens: float) -> Sampling:
    """Return the values of the page's sliders. Raises DataError if a value is out of range, which is possible if the
    request does not come from the page."""
    if not (0 <= temperature <= 100 and 0 < top_p <= 1 and 1 <= max_new_tokens <= 1 << 20):
        raise DataError(
            f"temperature={temperature}, top_p={top_p} and max_new_tokens={max_new_tokens} are out of range"
        )
    return Sampling(int(max_new_tokens), float(temperature), float(top_p))


def history(session: Session) -> list[Any]:
    """Return the conversation of a browser tab as messages for gr.Chatbot."""
    messages = []
    for question, files, reply in session.exchanges():
        messages += [message("user", question, files), message("assistant", reply, [])]
    return messages


def message(role: str, text: str, files: list[Path]) -> dict[str, Any]:
    """Return a message for gr.Chatbot: `text` with HTML escaped, and its images, except files that Gradio deleted."""
    text = html.escape(text, quote=False)
    images: list[Any] = [{"path": str(path), "alt_text": path.name} for path in files if path.is_file()]
    return {"role": role, "content": [*images, *([text] if text or not files else [])]}
