"""Set up logging: all messages of rank 0, and warnings of other ranks with their rank. Secrets are hidden."""

import logging
import os
import sys

from llava_fsdp.runtime.home import ensure_home
from llava_fsdp.runtime.launch import env_rank
from llava_fsdp.runtime.text.redact import redact, secrets_of
from llava_fsdp.runtime.text.terminal_text import guard_streams

LOGGER = "llava_fsdp"
NOISE = {
    "torchao": "Failed to load ",
    "torch.utils._pytree": "<enum ",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    "torch.distributed.tensor._redistribute": "While redistributing from ",
    "torch._higher_order_ops.wrap": "\nDetected that context_fn is passed",
}
"""Logger -> beginning of irrelevant messages: about torchao's kernels for other GPUs, torchao's use of deprecated torch
functions, an optional bitsandbytes kernel, two collectives in a row for an exported weight that is sharded over two
dimensions of a mesh, and in-place operations in blocks that are compiled and recomputed in part: the blocks of language
models have none."""


class WithoutNoise(logging.Filter):
    """Log filter that drops messages which begin with a text."""

    def __init__(self, start: str):
        super().__init__()
        self.start = start

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.start)


def leave_noise_out() -> None:
    """Hide irrelevant messages of libraries (`NOISE`), and escape control characters in all output. Call this before
    these libraries are imported: they may keep references to stdout and stderr."""
    guard_streams()
    for name, start in NOISE.items():
        logging.getLogger(name).addFilter(WithoutNoise(start))


class WithoutSecrets(logging.Formatter):
    """Log formatter that replaces secrets, also those in environment variables, by `***`."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record), secrets_of())


def setup_logging() -> None:
    """Log to standard error: INFO on rank 0, WARNING on others. Give a user without a home folder one. Called by the
    main functions of commands, never at import."""
    guard_streams()
    rank = env_rank()
    handler = logging.StreamHandler(sys.stderr)
    prefix = f"[rank {rank}] " if int(os.environ.get("WORLD_SIZE", "1")) > 1 and rank else ""
    handler.setFormatter(WithoutSecrets(f"{prefix}%(message)s"))
    logger = logging.getLogger(LOGGER)
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False
    if (home := ensure_home()) is not None:
        log().info("user %d has no home folder; caches of this command are in HOME=%s", os.getuid(), home)


def log() -> logging.Logger:
    return logging.getLogger(LOGGER)
