"""Save checkpoints in the background: a thread of each rank copies the state to host memory and writes the copy. The
optimizer updates the state only after the copy is complete.

One checkpoint is written at a time, with a process group of its own, so that a save neither delays the collectives of
training steps nor is limited by their timeout. If the copy does not fit into host memory, or if the state is offloaded
to files, training waits until the checkpoint is written.
"""

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llava_fsdp.checkpoint.commit import AdapterCopy, Committer
from llava_fsdp.checkpoint.layout import written_rows
from llava_fsdp.checkpoint.manifest import TensorEntry, rank_file
from llava_fsdp.checkpoint.retention import delete_temporary, restore_replaced
from llava_fsdp.checkpoint.snapshot import Snapshot, device_of, fits, use_device
from llava_fsdp.config import CheckpointConfig, OnSaveError
from llava_fsdp.parallel.ranks.consensus import gathered, on_first_rank, rank_and_size
from llava_fsdp.runtime.errors import CheckpointError, LlavaFsdpError
from llava_fsdp.runtime.files.durable_files import make_folder, require_room
from llava_fsdp.runtime.files.run_dir import step_of
from llava_fsdp.runtime.text.log import log

SAVE_TIMEOUT = timedelta(seconds=1800)
"""Timeout of the process group for saves: the longest time that the disk of the slowest rank may take."""
ROOM_FACTOR = 1.2
"""The free disk space that is required at the start of a run, as a multiple of the bytes of a checkpoint's tensors."""


@dataclass(frozen=True)
class SavedState:
    """What the checkpoints of a run contain, and how it is saved."""

    tensors: Callable[[], dict[str, torch.Tensor]]
    """Returns the tensors of which this rank holds a part, by name, with the same names, shapes and sharding at every
    call."""
    facts: Callable[[], dict[str, Any]]
    """Returns all other state, including `step`."""
    check: Callable[[], None] = lambda: None
    """Called on all ranks before each save; raises an error if the current state must not be saved."""
    in_place: bool = False
    """Whether the tensors are offloaded to files, and are saved from there without a copy in memory."""
    equal_ranks: tuple[int, int] | None = None
    """(i, n): this rank is number i of the n ranks that hold the same tensors; None: all ranks do."""


class Saver:
    """Saves a run's state as checkpoints, in the background if possible. Every method is a collective, except `failed`
    and `before_update`."""

    def __init__(
        self,
        parent: Path,
        cfg: CheckpointConfig,
        state: SavedState,
        undamaged: Collection[Path] = (),
        reached_point: Callable[[str], None] = lambda point: None,
        adapter_folder: AdapterCopy | None = None,
    ):
        """Create the folder of the checkpoints, start the threads that write them, and allocate the buffers for copies
        of the state.

        Args:
            parent: the folder of the checkpoints.
            state: what is saved: the tensors that this rank holds, and functions that return all other facts.
            undamaged: folders of checkpoints that are known to be undamaged.
            reached_point: for tests, called with the name of each point that a save reaches (listed in `commit.py`).
            adapter_folder: how a folder with LoRA adapters is written into each checkpoint. None if the model has no
                adapters, and on ranks other than 0.

        Raises:
            CheckpointError: the disk has no room for a checkpoint, or the folder is not writable.
        """
        self.cfg, self.state = cfg, state
        self.group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            self.group = dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT)  # type: ignore[assignment]
        _, values = self.rows_to_write()
        nbytes = sum(value.nbytes for value in values.values())
        needed_bytes = sum(gathered(nbytes + (adapter_folder.nbytes if adapter_folder is not None else 0), self.group))
        on_first_rank(lambda: prepare_folder(parent, needed_bytes), f"{parent} cannot be written to", self.group)
        self.hasher = ThreadPoolExecutor(1, "digest")
        self.writer = ThreadPoolExecutor(
            1, "checkpoint", initializer=use_device, initargs=(device_of(values.values()),)
        )
        undamaged_names = {folder.name for folder in undamaged}
        self.committer = Committer(
            parent, cfg, self.group, self.hasher, needed_bytes, reached_point, adapter_folder, undamaged_names
        )
        self.snapshot: Snapshot | None = None
        self.pages_written: Future[None] = Future()
        """The task that writes to every page of the snapshot's buffers."""
        self.current_save: Future[Path] | None = None
        """The save that has begun last, until `wait` is called."""
        self.error: LlavaFsdpError | None = None
        """The error of a save that has failed, which ends the run."""
        self.forgiven: CheckpointError | None = None
        """The error of the last save, if it has failed and `checkpoint.on_save_error=warn` lets the run continue."""
        self.saved_step = max((step_of(folder) or 0 for folder in undamaged), default=None)
        # a save in the background writes from a copy of the state in memory (`snapshot`); tensors that are offloaded to
        # files (`in_place`) are saved from these, without a copy
        if cfg.asynchronous and not state.in_place and fits(nbytes, self.group):
            self.snapshot = Snapshot(values)
            self.pages_written = self.writer.submit(self.snapshot.touch)

    def rows_to_write(self) -> tuple[dict[str, TensorEntry], dict[str, torch.Tensor]]:
        """Return what `layout.written_rows` returns for this rank."""
        return written_rows(self.state.tensors(), rank_file(rank_and_size()[0]), self.state.equal_ranks)

    @property
    def failed(self) -> bool:
        """Whether a save has failed, as far as this rank knows, so that the run must end. Others may learn it later."""
        if self.error is not None:
            return True
        save = self.current_save
        return save is not None and save.done() and self.ends_run(save.exception())

    def save(self) -> None:
        """Save the run's current state as a checkpoint, in the background if possible, unless this step is already
        saved. Waits first until the previous save has ended.

        Raises:
            CheckpointError, NumericError: the previous save failed, or, without background saves, this one.
            ReplicaError: ranks that must hold identical values hold different ones.
        """
        self.raise_if_failed()
        facts = self.state.facts()
        if facts["step"] == self.saved_step:
            return
        self.state.check()
        entries, values = self.rows_to_write()
        self.saved_step = facts["step"]  # `wait` resets it if the save fails
        if self.snapshot is None:
            self.current_save = self.writer.submit(self.committer.write, facts, entries, values)
            self.raise_if_failed()
        else:
            snapshot = self.snapshot
            self.pages_written.result()  # `touch` must no longer write into the buffers
            snapshot.begin()

            def write() -> Path:
                """Copy the state, and write the checkpoint from the copy. Runs in the thread `writer`."""
                snapshot.fill(values)
                return self.committer.write(facts, entries, snapshot.wait_for_copies())

            self.current_save = self.writer.submit(write)

    def before_update(self) -> None:
        """Wait until the copy of the state is complete. To be called before the optimizer changes the state."""
        if self.snapshot is not None:
            self.snapshot.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete or has failed. An error is not raised but
        recorded: in `error` if it must end the run, else in `forgiven`."""
        if self.current_save is None:
            return
        error = self.current_save.exception()
        self.current_save = None
        self.forgiven = None
        if error is None:
            return
        self.saved_step = None
        if not self.ends_run(error):
            assert isinstance(error, CheckpointError)
            self.forgiven = error
            if rank_and_size()[0] == 0:
                log().warning("%s; checkpoint.on_save_error=warn continues without it", error)
        elif isinstance(error, LlavaFsdpError):
            self.error = error
        else:  # an error of the process group, because a rank is lost
            self.error = CheckpointError(f"a checkpoint could not be written: {type(error).__name__}: {error}")
            self.error.__cause__ = error

    def ends_run(self, error: BaseException | None) -> bool:
        """Return whether an error of a save must end the run. With `checkpoint.on_save_error=warn`, a full disk lets
        the run continue; weights that are not finite and lost ranks end the run."""
        is_forgiven = self.cfg.on_save_error is OnSaveError.warn and type(error) is CheckpointError
        return error is not None and not is_forgiven

    def keep_best(self, step: int | None) -> None:
        """Keep the checkpoint of the step with the best validation beside the newest ones, as soon as it is complete.
        Does not wait for it. `step`: None if no validation is the best yet."""
        self.writer.submit(self.committer.keep_best, step)  # behind the save that is under way

    def reset_saved_step(self) -> None:
        """Forget which step was saved last, and the error of a failed save. To be called when the run's folder was
        lost, with the checkpoints in it."""
        self.wait()
        self.error = self.saved_step = None

    def raise_if_failed(self) -> None:
        """Wait until no checkpoint is being written. If one could not be written, raise its error on every rank."""
        self.wait()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Wait until the last checkpoint is on the disk, and free the threads, the buffers and the process group. If a
        save has failed, raise its error."""
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


def prepare_folder(parent: Path, needed_bytes: int) -> None:
    """Create the folder of the checkpoints, and check that it is writable and has room for another one of
    `needed_bytes` bytes. Called on rank 0."""
    make_folder(parent)
    restore_replaced(parent)  # a run that continues from another folder has not done this for its own folder yet
    delete_temporary(parent)
    probe = parent / "writable.tmp"
    probe.write_bytes(b"")
    probe.unlink()
    require_room(parent, int(needed_bytes * ROOM_FACTOR))
