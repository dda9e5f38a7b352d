"""Serve the web page for chatting with a model: `python -m llava_fsdp.chat serve=true`."""

import os
import signal
import socket
import tempfile
from pathlib import Path
from types import FrameType

from llava_fsdp.chat.open_assistant import open_assistant
from llava_fsdp.chat.web.sessions import Sessions
from llava_fsdp.config import ChatConfig
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.text.log import log

GRACE_SECONDS = 2
"""Seconds that open connections get to finish when the server ends. Those of a page that is still open in a browser
never close by themselves."""
FORM_BYTES = 64 << 10
"""Maximum number of bytes that an upload request may have for each file besides the file's content."""


def serve(cfg: ChatConfig) -> None:
    """Serve the web page until Ctrl-C or SIGTERM, then delete the uploaded files. Raises ConfigError before the model
    is loaded if gradio is not installed, or the address is taken."""
    with tempfile.TemporaryDirectory(prefix="llava_fsdp-page-") as folder:
        prepare_environment(folder)
        try:
            import gradio  # noqa: F401  app.py imports it too, but only after the model is loaded
            import uvicorn
        except ModuleNotFoundError as error:
            raise ConfigError(f"serve=true needs {error.name}: pip install llava-fsdp[serve]") from error
        from llava_fsdp.chat.web.app import make_app
        from llava_fsdp.chat.web.security import MiB, RequestGuard

        with listen(cfg.host, cfg.port) as listening:
            assistant = open_assistant(cfg.model.checkpoint, limited_images=True)
            assert assistant.image_process is not None
            assistant.image_process.start()
            sessions = Sessions(assistant, cfg)
            largest = cfg.max_images * (cfg.max_upload_mb * MiB + FORM_BYTES)
            app, functions = make_app(sessions, cfg)
            app = RequestGuard(app, cfg.host, Path(folder), largest, functions)
            settings = uvicorn.Config(
                app, log_level="error", access_log=False, use_colors=False, server_header=False, proxy_headers=False,
                ws="none", timeout_graceful_shutdown=GRACE_SECONDS,
            )  # fmt: skip

            class Server(uvicorn.Server):
                def handle_exit(self, sig: int, frame: FrameType | None) -> None:
                    sessions.end()  # called first, so that no waiting question is answered anymore
                    super().handle_exit(sig, frame)

            server = Server(settings)
            log().info("%s", address_line(cfg, listening))
            previous_handlers = [signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)]
            try:
                server.run(sockets=[listening])  # handles both signals, and raises them again at its end
            finally:
                sessions.end()
                for number, handler in zip((signal.SIGINT, signal.SIGTERM), previous_handlers, strict=True):
                    signal.signal(number, handler)
    log().info("the page has ended")


def prepare_environment(folder: str) -> None:
    """Set the environment variables that Gradio reads at import: uploads are stored in `folder`, telemetry is off."""
    for name in [name for name in os.environ if name.startswith("GRADIO_")]:
        del os.environ[name]
    os.environ |= {"GRADIO_TEMP_DIR": folder, "GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises ConfigError if the port is taken or the address is not this machine's."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address, family=family)
    except OSError as error:
        raise ConfigError(
            f"host={host} port={port} cannot be listened on: {error.strerror or error}; is another page running there? "
            f"give another with port={port + 1 if port < 65535 else port - 1}"
        ) from error


def address_line(cfg: ChatConfig, listening: socket.socket) -> str:
    """Return the log message with the page's address, and a warning if other machines can open the page."""
    name = f"[{cfg.host}]" if ":" in cfg.host else cfg.host
    line = f"the page is at http://{name}:{cfg.port}; Ctrl-C ends it"
    if listening.getsockname()[0] not in ("127.0.0.1", "::1"):
        line += f". host={cfg.host}: whoever reaches this machine can use it, without a password"
    return line
