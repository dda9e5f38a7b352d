"""Save checkpoints in the background: a thread of each rank copies, writes and commits; updates wait for the copy.

One checkpoint is written at a time, on its own process group, so that it neither delays the steps' collectives nor is
subject to their timeout. If the copy does not fit into host memory, or the states lie in files, the step waits until
the checkpoint is written.
"""

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llava_fsdp.checkpoint.commit import AdapterFolder, Committer
from llava_fsdp.checkpoint.layout import written_rows
from llava_fsdp.checkpoint.manifest import TensorEntry, rank_file
from llava_fsdp.checkpoint.retention import recover, sweep
from llava_fsdp.checkpoint.snapshot import Snapshot, fits
from llava_fsdp.config import CheckpointConfig, OnSaveError
from llava_fsdp.distributed.consensus import gathered, on_first_rank
from llava_fsdp.runtime.durable_files import make_folder, require_room
from llava_fsdp.runtime.errors import CheckpointError, LlavaFsdpError
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.run_dir import step_of

TIMEOUT = timedelta(seconds=1800)
"""Timeout of the process group for saves: as long as the slowest rank's disk may take."""
MARGIN = 1.2
"""Factor on the bytes of a checkpoint's tensors that gives the disk space required for it."""


class Saver:
    """Saves a run's state, in the background if possible. All methods but `failed` and `before_update` are
    collectives."""

    def __init__(
        self,
        parent: Path,
        cfg: CheckpointConfig,
        tensors: Callable[[], dict[str, torch.Tensor]],
        facts: Callable[[], dict[str, Any]],
        in_place: bool = False,
        good: Collection[Path] = (),
        at: Callable[[str], None] = lambda point: None,
        adapter_folder: AdapterFolder | None = None,
        check: Callable[[], None] = lambda: None,
    ):
        """Prepare the folder and the buffers, and start the threads that write checkpoints.

        Args:
            parent: the folder of the checkpoints.
            tensors: returns the tensors to save, by name; with the same names, shapes and sharding every time.
            facts: returns all other state to save; it includes `step`.
            in_place: tensors lie in files, and are written from there without a copy.
            good: checkpoints that are known to be undamaged.
            at: called at the named points of `commit.py`.
            adapter_folder: for runs with adapters, on rank 0.
            check: a collective that raises if the current state must not be saved.

        Raises:
            CheckpointError: there is no room for a checkpoint, or no permission.
        """
        self.check = check
        self.cfg, self.tensors, self.facts = cfg, tensors, facts
        self.group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            self.group = dist.new_group(backend="gloo", timeout=TIMEOUT)  # type: ignore[assignment]
        _, values = self.written()
        nbytes = sum(value.nbytes for value in values.values())
        needed = sum(gathered(nbytes + (adapter_folder.nbytes if adapter_folder is not None else 0), self.group))
        on_first_rank(lambda: prepare_folder(parent, needed), f"{parent} cannot be written to", self.group)
        self.hasher = ThreadPoolExecutor(1, "digest")
        self.writer = ThreadPoolExecutor(1, "checkpoint")
        known = {folder.name for folder in good}
        self.committer = Committer(parent, cfg, self.group, self.hasher, needed, at, adapter_folder, known)
        self.snapshot: Snapshot | None = None
        self.touched: Future[None] = Future()
        self.under_way: Future[Path] | None = None
        self.error: LlavaFsdpError | None = None
        self.saved_step = max((step_of(folder) or 0 for folder in good), default=None)
        if cfg.asynchronous and not in_place and fits(nbytes, self.group):
            self.snapshot = Snapshot(values)
            self.touched = self.writer.submit(self.snapshot.touch)

    def written(self) -> tuple[dict[str, TensorEntry], dict[str, torch.Tensor]]:
        """Manifest entries and values of the rows that this rank writes, by tensor name."""
        return written_rows(self.tensors(), rank_file(dist.get_rank() if dist.is_initialized() else 0))

    @property
    def failed(self) -> bool:
        """Whether this rank knows that a save has failed; ranks learn of it at different times."""
        ended = self.under_way if self.under_way is not None and self.under_way.done() else None
        return self.error is not None or (ended is not None and self.is_serious(ended.exception()))

    def save(self) -> None:
        """Begin to save the current state, unless this step is saved already, after waiting for the previous save.

        Raises:
            CheckpointError, NumericError: the previous save failed, or this one if it is synchronous.
            ReplicaError: replicas differ.
        """
        self.raise_if_failed()
        facts = self.facts()
        if facts["step"] == self.saved_step:
            return
        self.check()
        entries, values = self.written()
        self.saved_step = facts["step"]  # reset if the save fails
        if self.snapshot is None:
            self.under_way = self.writer.submit(self.committer.write, facts, entries, values)
            self.raise_if_failed()
        else:
            snapshot = self.snapshot
            self.touched.result()  # it writes into the buffers that are filled next
            snapshot.begin()

            def write() -> Path:
                snapshot.fill(values)
                return self.committer.write(facts, entries, snapshot.ready())

            self.under_way = self.writer.submit(write)

    def before_update(self) -> None:
        """Wait until the state has been copied; call this before the state changes. Not a collective."""
        if self.snapshot is not None:
            self.snapshot.wait()

    def wait(self) -> None:
        """Wait until the current save has ended; a failure is recorded, not raised."""
        if self.under_way is None:
            return
        error = self.under_way.exception()
        self.under_way = None
        if error is None:
            return
        self.saved_step = None
        if not self.is_serious(error):
            if not dist.is_initialized() or dist.get_rank() == 0:
                log().warning("%s; checkpoint.on_save_error=warn continues without it", error)
        elif isinstance(error, LlavaFsdpError):
            self.error = error
        else:  # an error of the process group: a rank is lost
            self.error = CheckpointError(f"a checkpoint could not be written: {type(error).__name__}: {error}")
            self.error.__cause__ = error

    def is_serious(self, error: BaseException | None) -> bool:
        """Whether a save's error must end the run: a full disk need not, non-finite weights and lost ranks do."""
        forgiven = self.cfg.on_save_error is OnSaveError.warn and type(error) is CheckpointError
        return error is not None and not forgiven

    def forget(self) -> None:
        """Discard the record of the last save and its error, because the run's folder was lost."""
        self.wait()
        self.error = self.saved_step = None

    def raise_if_failed(self) -> None:
        """Wait for the current save, and raise its error on every rank if it failed."""
        self.wait()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Wait until the last save is on the disk; then free threads, copy and process group. Raises its error."""
        self.wait()
        self.writer.shutdown()
        self.hasher.shutdown()
        self.snapshot = None
        if self.group is not None:
            dist.barrier(self.group)
            dist.destroy_process_group(self.group)
            self.group = None
        if self.error is not None:
            raise self.error


def prepare_folder(parent: Path, needed: int) -> None:
    """Create the folder of the checkpoints, and check that it is writable and has room for one more (on rank 0)."""
    make_folder(parent)
    recover(parent)  # a run that continues from another folder has not done this yet
    sweep(parent)
    probe = parent / "writable.tmp"
    probe.write_bytes(b"")
    probe.unlink()
    require_room(parent, int(needed * MARGIN))
