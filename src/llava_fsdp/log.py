"""Messages of a run: rank 0 speaks, the others only when something is wrong, each with its rank."""

import logging
import os
import sys

LOGGER = "llava_fsdp"


def setup_logging() -> None:
    """INFO on rank 0, WARNING elsewhere, on standard error. Called by entries, never by an import."""
    rank = int(os.environ.get("RANK", "0"))
    handler = logging.StreamHandler(sys.stderr)
    prefix = f"[rank {rank}] " if int(os.environ.get("WORLD_SIZE", "1")) > 1 and rank else ""
    handler.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    logger = logging.getLogger(LOGGER)
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False


def log() -> logging.Logger:
    return logging.getLogger(LOGGER)
