"""Messages of a run: rank 0 speaks, the others only when something is wrong, each with its rank; none tells secrets."""

import logging
import os
import sys

from llava_fsdp.runtime.redact import redact, secrets_of
from llava_fsdp.runtime.terminal_text import guard_streams

LOGGER = "llava_fsdp"


NOISE = {
    "torchao": "Failed to load ",
    "torch.utils._pytree": "<enum ",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
}
"""What other libraries say while they are imported that is nothing to a training, by logger and how it begins: kernels
of torchao's for GPUs that are not here, its calls of torch that will change, an optional kernel of bitsandbytes'."""


class WithoutNoise(logging.Filter):
    def __init__(self, start: str):
        super().__init__()
        self.start = start

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.start)


def leave_noise_out() -> None:
    """Called by an entry before it imports those libraries, which may keep the streams for messages of their own."""
    guard_streams()
    for name, start in NOISE.items():
        logging.getLogger(name).addFilter(WithoutNoise(start))


class WithoutSecrets(logging.Formatter):
    """Hides what looks like a secret, and what the environment says is one."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record), secrets_of())


def setup_logging() -> None:
    """INFO on rank 0, WARNING elsewhere, on standard error. Called by entries, never by an import."""
    guard_streams()
    rank = int(os.environ.get("RANK", "0"))
    handler = logging.StreamHandler(sys.stderr)
    prefix = f"[rank {rank}] " if int(os.environ.get("WORLD_SIZE", "1")) > 1 and rank else ""
    handler.setFormatter(WithoutSecrets(f"{prefix}%(message)s"))
    logger = logging.getLogger(LOGGER)
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False


def log() -> logging.Logger:
    return logging.getLogger(LOGGER)
