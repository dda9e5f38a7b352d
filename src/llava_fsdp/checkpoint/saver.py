"""Saves of a run, beside the steps: a thread of each rank copies, writes and commits; updates wait for the copy.

One is written at a time, on a process group of its own, so that its waiting neither stands in a step's way nor runs
into a step's time limit. Where the copy does not fit the host's memory, or the states lie in files, a step waits for
all of it.
"""

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llava_fsdp.checkpoint.commit import Beside, Committer, nowhere
from llava_fsdp.checkpoint.layout import estimated_bytes, written_parts
from llava_fsdp.checkpoint.retention import recover, sweep
from llava_fsdp.checkpoint.snapshot import Staging, fits
from llava_fsdp.config import CheckpointConfig, OnSaveError
from llava_fsdp.distributed.consensus import gathered, on_first_rank
from llava_fsdp.runtime.durable_files import make_folder, require_room
from llava_fsdp.runtime.errors import CheckpointError, LlavaFsdpError
from llava_fsdp.runtime.humanize import readable
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.os_errors import free_bytes
from llava_fsdp.runtime.run_dir import list_checkpoints, step_of

TIMEOUT = timedelta(seconds=1800)
"""Of the saver's group: as long as the slowest rank's disk may take."""
MARGIN = 1.2
"""Room that a checkpoint needs, over its tensors."""


class Saver:
    """Saves what it is given, when it is told to. All but `failed`, `is_busy` and `before_update` are collectives."""

    def __init__(
        self,
        parent: Path,
        cfg: CheckpointConfig,
        tensors: Callable[[], dict[str, torch.Tensor]],
        facts: Callable[[], dict[str, Any]],
        in_place: bool = False,
        good: Collection[Path] = (),
        at: Callable[[str], None] = nowhere,
        beside: Beside | None = None,
        check: Callable[[], None] = lambda: None,
    ):
        """
        Args:
            parent: the folder of the checkpoints.
            tensors: what is saved, by name; the same names, shapes and cut every time.
            facts: what is saved of the rest, with `step` among it.
            in_place: tensors lie in files, and are written from there.
            good: checkpoints that are known to be whole.
            at: called at the named points of `commit.py`.
            beside: on rank 0, what each checkpoint holds for other programs.
            check: a collective that raises where what is there must not be saved.

        Raises:
            CheckpointError: there is no room for a checkpoint, or no permission.
        """
        self.check = check
        self.cfg, self.tensors, self.facts = cfg, tensors, facts
        self.group = own_group()
        parts = written_parts(tensors())
        own = estimated_bytes(parts)
        needed = sum(gathered(own + (beside.nbytes if beside is not None else 0), self.group))
        on_first_rank(lambda: require_start(parent, needed, cfg.keep), f"{parent} cannot be written to", self.group)
        self.hasher = ThreadPoolExecutor(1, "digest")
        self.writer = ThreadPoolExecutor(1, "checkpoint")
        known = {folder.name for folder in good}
        self.committer = Committer(parent, cfg, self.group, self.hasher, needed, at, beside, known)
        self.staging: Staging | None = None
        self.touched: Future[None] = Future()
        self.under_way: Future[Path] | None = None
        self.error: LlavaFsdpError | None = None
        self.saved_step = max((step_of(folder) or 0 for folder in good), default=None)
        if cfg.asynchronous and not in_place and fits(own, self.group):
            self.staging = Staging(parts)
            self.touched = self.writer.submit(self.staging.touch)

    @property
    def failed(self) -> bool:
        """Whether a save has failed, as this rank knows by now. All will know, each in its time: vote, then act."""
        ended = self.under_way if self.under_way is not None and self.under_way.done() else None
        return self.error is not None or (ended is not None and self.is_serious(ended.exception()))

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        return self.under_way is not None and not self.under_way.done()

    def save(self) -> None:
        """Begin to save what there is now; waits for the save before it. The same step is not saved twice.

        Raises:
            CheckpointError, NumericError: the one before, or this one where it is synchronous, could not be written.
            ReplicaError: ranks hold other numbers where they must hold the same.
        """
        self.raise_if_failed()
        facts = self.facts()
        if facts["step"] == self.saved_step:
            return
        self.check()
        parts = written_parts(self.tensors())
        self.saved_step = facts["step"]  # taken back where it fails
        if self.staging is None:
            future: Future[Path] = Future()
            self.under_way = future
            try:
                future.set_result(self.committer.write(facts, parts, {n: p.values for n, p in parts.items()}))
            except Exception as error:
                future.set_exception(error)
            self.raise_if_failed()
        else:
            self.touched.result()  # it writes into what is filled next
            self.staging.begin()
            self.under_way = self.writer.submit(self.write_staged, self.staging, facts, parts)

    def write_staged(self, staging: Staging, facts: dict[str, Any], parts: dict[str, Any]) -> Path:
        """In the thread."""
        staging.fill(parts)
        return self.committer.write(facts, parts, staging.ready())

    def before_update(self) -> None:
        """Before what is saved changes: the copy of it must have been made. Not a collective."""
        if self.staging is not None:
            self.staging.wait()

    def wait(self) -> None:
        """Until the save that is under way has ended. Raises nothing: see `raise_if_failed`."""
        if self.under_way is None:
            return
        error = self.under_way.exception()
        self.under_way = None
        if error is None:
            return
        self.saved_step = None
        if not self.is_serious(error):
            if not dist.is_initialized() or dist.get_rank() == 0:
                log().warning("%s; checkpoint.on_save_error=warn goes on without it", error)
        elif isinstance(error, LlavaFsdpError):
            self.error = error
        else:  # of the group: a rank is gone
            self.error = CheckpointError(f"a checkpoint could not be written: {type(error).__name__}: {error}")
            self.error.__cause__ = error

    def is_serious(self, error: BaseException | None) -> bool:
        """Whether a save's error ends the run. A full disk need not; weights that are not finite and lost ranks do."""
        forgiven = self.cfg.on_save_error is OnSaveError.warn and type(error) is CheckpointError
        return error is not None and not forgiven

    def forget(self) -> None:
        """What was saved is gone, and so is what it failed of: the next save begins anew. A collective."""
        self.wait()
        self.error = self.saved_step = None

    def raise_if_failed(self) -> None:
        """Wait for the save that is under way, and raise what it met, on every rank alike.

        Raises:
            CheckpointError, NumericError
        """
        self.wait()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """The last save is on the disk when this returns; the thread, the copy and the group are gone.

        Raises:
            CheckpointError, NumericError: it could not be written.
        """
        self.wait()
        self.writer.shutdown()
        self.hasher.shutdown()
        self.staging = None
        if self.group is not None:
            dist.barrier(self.group)
            dist.destroy_process_group(self.group)
            self.group = None
        if self.error is not None:
            raise self.error


def own_group() -> dist.ProcessGroup | None:
    """Of all ranks, on the CPU. A collective."""
    if not dist.is_initialized():
        return None
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    return group


def require_start(parent: Path, needed: int, keep: int) -> None:
    """On rank 0, before the first step: a folder that can be written to, on a disk with room.

    Raises:
        CheckpointError: there is no room for one more checkpoint.
        OSError: the folder cannot be made, or written to.
    """
    make_folder(parent)
    recover(parent)  # a run that continues from elsewhere has not looked here
    sweep(parent)
    probe = parent / "writable.tmp"
    probe.write_bytes(b"")
    probe.unlink()
    require_room(parent, int(needed * MARGIN))
    more = max(1, keep + 1 - len(list_checkpoints(parent)))
    if (free := free_bytes(parent)) < int(needed * more * MARGIN):
        log().warning(
            "checkpoint.keep=%d: %d checkpoints more take %s in %s, where %s are free",
            keep, more, readable(needed * more), parent, readable(free),
        )  # fmt: skip
