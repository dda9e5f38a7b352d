"""Agree on all ranks: an error that one rank meets is raised on all, and wishes of any rank are counted together."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from llava_fsdp.runtime.errors import CheckpointError, LlavaFsdpError
from llava_fsdp.runtime.os_errors import why

R = TypeVar("R")
Failure = tuple[type[LlavaFsdpError], str]


def on_first_rank(action: Callable[[], R], failing: str, group: dist.ProcessGroup | None = None) -> R:
    """Run something on rank 0 and give its result to every rank; where it fails, fail on every rank alike.

    Args:
        group: of all ranks; None: the run's own.

    Raises:
        LlavaFsdpError: as rank 0 raised it; any other error of rank 0's becomes a CheckpointError with `failing`.
    """
    outcome: list[Any] = [None, None]
    cause: Exception | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:  # peers wait for this broadcast, whatever went wrong
            outcome[1], cause = failure_of(error, failing), error
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        kind, message = outcome[1]
        raise kind(message) from cause
    return outcome[0]


def on_all_ranks(action: Callable[[], R], failing: str, group: dist.ProcessGroup | None = None) -> R:
    """Run something on every rank and return this one's result; where it fails on any, fail on every rank alike.

    Raises:
        LlavaFsdpError: that of the first rank that failed, which its message names where there are several.
    """
    result: Any = None
    own: Failure | None = None
    cause: Exception | None = None
    try:
        result = action()
    except Exception as error:
        own, cause = failure_of(error, failing), error
    for rank, failure in enumerate(gathered(own, group)):
        if failure is not None:
            kind, message = failure
            others = f"rank {rank}: " if dist.is_initialized() and dist.get_world_size() > 1 else ""
            raise kind(others + message) from cause
    return result


def gathered(value: R, group: dist.ProcessGroup | None = None) -> list[R]:
    """Every rank's value, on every rank."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value, group=group)
    return found


def gathered_on_first(value: R, group: dist.ProcessGroup | None = None) -> list[R]:
    """Every rank's value on rank 0; nothing elsewhere."""
    if not dist.is_initialized():
        return [value]
    is_first = dist.get_rank() == 0
    found: list[Any] | None = [None] * dist.get_world_size() if is_first else None
    dist.gather_object(value, found, dst=0, group=group)
    return found or []


def failure_of(error: Exception, failing: str) -> Failure:
    """What travels to the other ranks."""
    if isinstance(error, LlavaFsdpError):
        return type(error), str(error)
    if isinstance(error, OSError):
        return CheckpointError, f"{failing}: {why(error, Path(error.filename or '.'))}"
    return CheckpointError, f"{failing}: {type(error).__name__}: {error}"


@dataclass(frozen=True)
class Votes:
    """What is asked for; of all ranks together, what any of them asks for."""

    stop: bool = False
    save: bool = False
    failed: bool = False
    """A checkpoint that is being written in the background could not be."""
    lost: bool = False
    """The run's folder is not where it was, as rank 0 alone knows."""

    def agreed(self) -> "Votes":
        """A collective."""
        return Votes(*any_rank(self.stop, self.save, self.failed, self.lost))


def any_rank(*flags: bool) -> tuple[bool, ...]:
    """Which of them any rank has set. A collective; 0.13 ms between two processes on gloo, nothing at world size 1."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flags
    votes = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(votes, dist.ReduceOp.MAX)  # a tensor of the CPU goes by gloo, on machines with GPUs too
    return tuple(map(bool, votes.tolist()))
