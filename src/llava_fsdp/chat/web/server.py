"""The page behind an address: `python -m llava_fsdp.chat serve=true`."""

import os
import signal
import socket
import tempfile
from pathlib import Path
from types import FrameType

from llava_fsdp.chat.assistant import Assistant
from llava_fsdp.chat.web.security import Guard, MiB
from llava_fsdp.chat.web.sessions import Talks
from llava_fsdp.config import AspectRatio, ChatConfig
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.log import log

GRACE = 2
"""Seconds that a page which is being shown has to hear the end: its connections never end by themselves."""
FORM = 64 << 10
"""Bytes of a request around its files."""


def serve(cfg: ChatConfig) -> None:
    """Until Ctrl-C or SIGTERM. Files that were sent are gone then.

    Raises:
        ConfigError: gradio is missing, or the address is taken; before the model is loaded.
        ModelError: there is no model.
    """
    with tempfile.TemporaryDirectory(prefix="llava_fsdp-page-") as folder:
        prepare_environment(folder)
        try:
            import gradio  # noqa: F401  the page's own import would be as late, and behind the model
            import uvicorn
        except ModuleNotFoundError as error:
            raise ConfigError(f"serve=true needs {error.name}: pip install llava-fsdp[serve]") from error
        from llava_fsdp.chat.web.app import make_app

        with bound(cfg.host, cfg.port) as listening:
            talks = Talks(Assistant(cfg.model.checkpoint, form="v1", aspect=AspectRatio.pad), cfg)
            largest = cfg.max_images * (cfg.max_upload_mb * MiB + FORM)
            app = Guard(make_app(talks, cfg), cfg.host, Path(folder), largest)
            settings = uvicorn.Config(
                app, log_level="error", access_log=False, use_colors=False, server_header=False, proxy_headers=False,
                ws="none", timeout_graceful_shutdown=GRACE,
            )  # fmt: skip

            class Server(uvicorn.Server):
                def handle_exit(self, sig: int, frame: FrameType | None) -> None:
                    talks.end()  # first: whoever waits would begin to compute as those before are closed
                    super().handle_exit(sig, frame)

            server = Server(settings)
            log().info("%s", where(cfg, listening))
            before = [signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)]
            try:
                server.run(sockets=[listening])  # takes both signals itself, and hands them on once it has ended
            finally:
                talks.end()
                for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
                    signal.signal(number, handler)
    log().info("the page has ended")


def prepare_environment(folder: str) -> None:
    """Gradio reads its settings from the environment while it is imported: none but these, and nothing is reported to
    anybody."""
    for name in [name for name in os.environ if name.startswith("GRADIO_")]:
        del os.environ[name]
    os.environ |= {
        "GRADIO_TEMP_DIR": folder,
        "GRADIO_ANALYTICS_ENABLED": "False",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        ConfigError: somebody else does already, or the address is none of this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address, family=family)
    except OSError as error:
        raise ConfigError(
            f"host={host} port={port} cannot be listened on: {error.strerror or error}; is another page running there? "
            f"give another with port={port + 1 if port < 65535 else port - 1}"
        ) from error


def where(cfg: ChatConfig, listening: socket.socket) -> str:
    name = f"[{cfg.host}]" if ":" in cfg.host else cfg.host
    said = f"the page is at http://{name}:{cfg.port}; Ctrl-C ends it"
    if listening.getsockname()[0] not in ("127.0.0.1", "::1"):
        said += f". host={cfg.host}: whoever reaches this machine can use it, without a password"
    return said
