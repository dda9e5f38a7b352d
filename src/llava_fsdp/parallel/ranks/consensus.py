"""Make all ranks act alike: an error on one rank is raised on every rank, and a request on one rank (to stop, to save)
is carried out on every rank.

In this module, `failing` says what could not be done, such as "cannot write FILE". An error that is not a
LlavaFsdpError becomes a CheckpointError whose message begins with it. `group` has all ranks; None is the default one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from llava_fsdp.runtime.errors import CheckpointError, LlavaFsdpError
from llava_fsdp.runtime.files.os_errors import why

R = TypeVar("R")
Failure = tuple[type[LlavaFsdpError], str]
"""Class and message of an error."""


def rank_and_size() -> tuple[int, int]:
    """Return this rank's number and the number of ranks; (0, 1) if there is no process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def on_first_rank(action: Callable[[], R], failing: str, group: dist.ProcessGroup | None = None) -> R:
    """Run a function on rank 0 only, and return its result, or raise its LlavaFsdpError, on every rank. Collective.
    `failing` begins the message of an error that is not one of this package: such an error becomes a CheckpointError.
    """
    outcome: list[Any] = [None, None]
    cause: Exception | None = None
    if rank_and_size()[0] == 0:
        try:
            outcome[0] = action()
        except Exception as error:  # the other ranks wait for the broadcast below, so any error must reach it
            outcome[1], cause = class_and_message(error, failing), error
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        kind, message = outcome[1]
        raise kind(message) from cause
    return outcome[0]


def on_all_ranks(action: Callable[[], R], failing: str, group: dist.ProcessGroup | None = None) -> R:
    """Run a function on every rank and return this rank's result. Collective. `failing` begins the message of an error
    that is not one of this package: such an error becomes a CheckpointError.

    Raises:
        LlavaFsdpError: the error of the lowest rank that failed, on every rank, with that rank's number.
    """
    result: Any = None
    local_failure: Failure | None = None
    cause: Exception | None = None
    try:
        result = action()
    except Exception as error:
        local_failure, cause = class_and_message(error, failing), error
    for rank, failure in enumerate(gathered(local_failure, group)):
        if failure is not None:
            kind, message = failure
            where = f"rank {rank}: " if rank_and_size()[1] > 1 else ""
            raise kind(where + message) from cause
    return result


def gathered(value: R, group: dist.ProcessGroup | None = None) -> list[R]:
    """Return the values of all ranks, which can be pickled, in rank order on every rank. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def gathered_on_first(value: R, group: dist.ProcessGroup | None = None) -> list[R]:
    """Return on rank 0 the (picklable) values of all ranks in rank order, on other ranks an empty list. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values, dst=0, group=group)
    return values or []


def class_and_message(error: Exception, failing: str) -> Failure:
    """Return the class and message of an error, which can be sent to the other ranks. An error that is not one of this
    package becomes a CheckpointError, whose message begins with `failing`."""
    if isinstance(error, LlavaFsdpError):
        return type(error), str(error)
    if isinstance(error, OSError):
        return CheckpointError, f"{failing}: {why(error, Path(error.filename or '.'))}"
    return CheckpointError, f"{failing}: {type(error).__name__}: {error}"


@dataclass(frozen=True)
class Votes:
    """The requests of one rank that all ranks must carry out in the same step."""

    stop: bool = False
    save: bool = False
    failed: bool = False
    """Whether the writing of an earlier checkpoint in the background has failed."""
    lost: bool = False
    """Whether the run's folder was deleted or moved. Only rank 0 checks this."""

    def agreed(self) -> "Votes":
        """Return the requests of all ranks: each one is set if any rank has set it. Collective."""
        stop, save, failed, lost = any_rank(self.stop, self.save, self.failed, self.lost)
        return Votes(stop, save, failed, lost)


def any_rank(*flags: bool) -> tuple[bool, ...]:
    """Return for each flag whether any rank has set it. Collective, 0.13 ms between two processes with gloo."""
    if rank_and_size()[1] == 1:
        return flags
    votes = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(votes, dist.ReduceOp.MAX)  # a CPU tensor is reduced by gloo, also on machines with GPUs
    return tuple(map(bool, votes.tolist()))
