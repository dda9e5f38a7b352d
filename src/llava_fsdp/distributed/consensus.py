"""Make all ranks agree: an error of one rank is raised on all ranks, and a request of any rank counts for all."""

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
    """Run a function on rank 0, and return its result or raise its error on every rank. A collective.

    Args:
        failing: what failed, for the message of an error that is not ours.
        group: a group of all ranks; None is the default group.

    Raises:
        LlavaFsdpError: rank 0's error; other errors of rank 0 become a CheckpointError with `failing`.
    """
    outcome: list[Any] = [None, None]
    cause: Exception | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:  # the other ranks wait for this broadcast, whatever happened
            outcome[1], cause = failure_of(error, failing), error
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        kind, message = outcome[1]
        raise kind(message) from cause
    return outcome[0]


def on_all_ranks(action: Callable[[], R], failing: str, group: dist.ProcessGroup | None = None) -> R:
    """Run a function on every rank and return this rank's result; if it fails on any rank, all ranks raise. A
    collective.

    Raises:
        LlavaFsdpError: the error of the first rank that failed; with several ranks, the message names it.
    """
    result: Any = None
    local_failure: Failure | None = None
    cause: Exception | None = None
    try:
        result = action()
    except Exception as error:
        local_failure, cause = failure_of(error, failing), error
    for rank, failure in enumerate(gathered(local_failure, group)):
        if failure is not None:
            kind, message = failure
            where = f"rank {rank}: " if dist.is_initialized() and dist.get_world_size() > 1 else ""
            raise kind(where + message) from cause
    return result


def gathered(value: R, group: dist.ProcessGroup | None = None) -> list[R]:
    """Gather a value from every rank, on every rank, in rank order. A collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def gathered_on_first(value: R, group: dist.ProcessGroup | None = None) -> list[R]:
    """Gather a value from every rank on rank 0; other ranks get an empty list. A collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, dst=0, group=group)
    return values or []


def failure_of(error: Exception, failing: str) -> Failure:
    """Convert an error to a class and a message that can be sent to the other ranks."""
    if isinstance(error, LlavaFsdpError):
        return type(error), str(error)
    if isinstance(error, OSError):
        return CheckpointError, f"{failing}: {why(error, Path(error.filename or '.'))}"
    return CheckpointError, f"{failing}: {type(error).__name__}: {error}"


@dataclass(frozen=True)
class Votes:
    """Requests of one rank (stop the run, save a checkpoint, ...) that all ranks must act on together."""

    stop: bool = False
    save: bool = False
    failed: bool = False
    """Whether writing a checkpoint in the background has failed."""
    lost: bool = False
    """Whether the run's folder was deleted or moved; only rank 0 checks this."""

    def agreed(self) -> "Votes":
        """Combine the requests of all ranks: each is set if any rank sets it. A collective."""
        return Votes(*any_rank(self.stop, self.save, self.failed, self.lost))


def any_rank(*flags: bool) -> tuple[bool, ...]:
    """Whether any rank has set each flag. A collective; it takes 0.13 ms between two processes with gloo."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flags
    votes = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(votes, dist.ReduceOp.MAX)  # CPU tensors use gloo, also on machines with GPUs
    return tuple(map(bool, votes.tolist()))
