"""Write a checkpoint into a folder with a temporary name, force it to the disk, and only then rename the folder.

A crash at any point leaves earlier checkpoints unchanged, and the new one either complete or without its final name.
The table's last column names the point that a save has reached after each action; tests end the process at these
points.

| what happens | by | name of the point after it |
|---|---|---|
| free space is checked, `step-N.tmp` is created, with permissions 0700 | rank 0 | made |
| each rank's tensors are written and digested, fsync | each rank | file written |
| all ranks have written; if one failed, all raise an error and the folder is deleted | all | agreed |
| `state.json` (all state except tensors) is written, fsync | rank 0 | state written |
| a folder with LoRA adapters, if any, is written from the ranks' files; fsync of them | rank 0 | adapter written |
| `manifest.json` (digests of files, which file holds which rows) is written, fsync | rank 0 | manifest written |
| fsync of the folder | rank 0 | folder synced |
| an existing checkpoint of this step, from before a crash or a new start, is renamed | rank 0 | old one aside |
| `step-N.tmp` is renamed to `step-N` | rank 0 | renamed |
| fsync of the parent folder | rank 0 | parent synced |
| the newest checkpoint's name is written into the file `latest` | rank 0 | pointed |
| each older checkpoint that need not be kept is renamed and then deleted | rank 0 | one deleted |
| all ranks are told whether the save succeeded | all | told |
"""

import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from xxhash import xxh3_128

from llava_fsdp.checkpoint.manifest import (
    ADAPTER_FOLDER,
    MANIFEST_FILE,
    STATE_FILE,
    Manifest,
    TensorEntry,
    rank_file,
    render,
)
from llava_fsdp.checkpoint.retention import REPLACED, STAGED, delete_old, write_best, write_latest
from llava_fsdp.checkpoint.safetensors_stream import write_tensors
from llava_fsdp.checkpoint.state_json import render_facts
from llava_fsdp.checkpoint.verify import Checkpoint, check_files, digest_of_file, name_in_errors, verify
from llava_fsdp.config import CheckpointConfig
from llava_fsdp.parallel.ranks.consensus import gathered_on_first, on_all_ranks, on_first_rank, rank_and_size
from llava_fsdp.runtime.errors import CheckpointError, LlavaFsdpError
from llava_fsdp.runtime.files.digests import Digest
from llava_fsdp.runtime.files.durable_files import (
    make_empty,
    make_folder,
    require_room,
    sync_folder,
    sync_tree,
    write_durably,
)
from llava_fsdp.runtime.files.run_dir import folder_name, list_checkpoints
from llava_fsdp.runtime.text.log import log

Entries = Mapping[str, TensorEntry]


@dataclass(frozen=True)
class AdapterCopy:
    """The folder with the LoRA adapters that rank 0 adds to each checkpoint, in peft's format for other programs."""

    nbytes: int
    """Size of the adapter folder in bytes."""
    write: Callable[[Path, Checkpoint], None]
    """Writes the folder with this path. The checkpoint's manifest does not list it yet."""


@dataclass
class Committer:
    """Writes checkpoints, one at a time: each rank a file with its tensors, and rank 0 the other files."""

    parent: Path
    """The folder that contains all checkpoints."""
    cfg: CheckpointConfig
    group: dist.ProcessGroup | None
    hasher: Executor
    """Computes digests in another thread."""
    nbytes: int
    """Bytes of the tensors and adapters of one checkpoint, summed over all ranks."""
    reached_point: Callable[[str], None] = lambda point: None
    """Called with the name of each point of a save (see the table of this module), for tests that end the process
    there."""
    adapter_folder: AdapterCopy | None = None
    undamaged: set[str] = field(default_factory=set)
    """Names of the checkpoints that this process has written or verified."""
    best: int | None = None
    """Step of the checkpoint that is not deleted because its validation is the best; None if none is known."""

    def write(self, facts: dict[str, Any], entries: Entries, values: Mapping[str, torch.Tensor]) -> Path:
        """Write one checkpoint and return its folder. Collective. (Tests end the process at `reached_point`.)

        Args:
            facts: the content of `state.json`: all state except tensors, including `step`.
            entries: what the manifest records of the rows (slices of dimension 0) of this rank, by tensor name.
            values: the values of these rows, by tensor name.

        Raises:
            CheckpointError: the checkpoint could not be written. Like NumericError, it is raised on every rank; the
                unfinished checkpoint is deleted, and earlier ones are unchanged.
            NumericError: a tensor has a value that is not finite.
        """
        target = self.parent / folder_name(facts["step"])
        staged = target.with_name(target.name + STAGED)
        failure = f"checkpoint {target} could not be written"
        rank, _ = rank_and_size()
        on_first_rank(lambda: self.begin(staged), failure, self.group)
        try:
            self.reached_point("made")
            digest = on_all_ranks(lambda: self.write_rank_file(staged, rank, values), failure, self.group)
            self.reached_point("agreed")
            digests_and_entries = gathered_on_first((digest, entries), self.group)
            on_first_rank(lambda: self.complete(staged, target, facts, digests_and_entries), failure, self.group)
        except LlavaFsdpError:  # raised on all ranks, so none of them is still writing
            on_first_rank(lambda: shutil.rmtree(staged, ignore_errors=True), failure, self.group)
            raise
        self.reached_point("told")
        return target

    def begin(self, staged: Path) -> None:
        """Create the temporary folder of a checkpoint. Raises CheckpointError if the disk has no room for a
        checkpoint."""
        make_folder(self.parent)
        make_empty(staged)
        try:
            require_room(staged, self.nbytes)
        except CheckpointError:
            shutil.rmtree(staged, ignore_errors=True)
            raise

    def write_rank_file(self, staged: Path, rank: int, values: Mapping[str, torch.Tensor]) -> Digest:
        """Write the file with the rows that this rank writes, `values`, into the temporary folder `staged`. Return the
        file's size and digest. (`reached_point` is for tests, which end the process there.)"""
        described = {name: (value.dtype, tuple(value.shape)) for name, value in values.items()}
        digest = write_tensors(staged / rank_file(rank), described, values.__getitem__, self.hasher)
        self.reached_point("file written")
        return digest

    def complete(
        self, staged: Path, target: Path, facts: dict[str, Any], digests_and_entries: list[tuple[Digest, Entries]]
    ) -> None:
        """Write all files of a checkpoint except the ranks' tensor files into the temporary folder `staged`, rename it
        to its final name `target`, and delete old checkpoints. Called on rank 0. `digests_and_entries`: for each rank,
        the digest of its tensor file, and what the manifest records of the tensors in it. (Tests end the process at
        `reached_point`.)"""
        content = render_facts(facts)
        write_durably(staged / STATE_FILE, content)
        self.reached_point("state written")
        files = {rank_file(rank): digest for rank, (digest, _) in enumerate(digests_and_entries)}
        files[STATE_FILE] = Digest(len(content), xxh3_128(content).hexdigest())
        manifest = Manifest(facts["step"], dict(files), merge_entries([entries for _, entries in digests_and_entries]))
        if self.adapter_folder is not None:
            files |= self.write_adapter(self.adapter_folder, Checkpoint(staged, manifest, facts))
            manifest = Manifest(manifest.step, files, manifest.tensors)
            self.reached_point("adapter written")
        write_durably(staged / MANIFEST_FILE, render(manifest))
        self.reached_point("manifest written")
        sync_folder(staged)
        self.reached_point("folder synced")
        replaced = target.with_name(target.name + REPLACED)
        if os.path.lexists(target):  # a checkpoint from before the run started over, or one that is damaged
            os.rename(target, replaced)
            self.reached_point("old one aside")
        try:
            os.rename(staged, target)
        except OSError:
            if replaced.exists():
                os.rename(replaced, target)
            raise
        self.reached_point("renamed")
        sync_folder(self.parent)
        self.reached_point("parent synced")
        self.undamaged.add(target.name)
        try:
            write_latest(target)
        except OSError as error:
            log().warning("%s is saved, but the file `latest` beside it could not be written: %s", target, error)
        self.reached_point("pointed")
        if replaced.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        delete_old(self.parent, self.cfg.keep, self.cfg.keep_every, self.is_undamaged, self.reached_point, self.best)
        self.undamaged &= {folder.name for folder in list_checkpoints(self.parent)}

    def keep_best(self, step: int | None) -> None:
        """Never delete the checkpoint of `step` as an old one and, on rank 0, write its name into a file
        (`retention.BEST`); None: no checkpoint is kept so, and the file is removed. Nothing changes if the checkpoint
        is missing because its save failed."""
        if step is None or (self.parent / folder_name(step)).is_dir():
            self.best = step
            if rank_and_size()[0] == 0:
                write_best(self.parent, step)

    def write_adapter(self, adapter_folder: AdapterCopy, checkpoint: Checkpoint) -> dict[str, Digest]:
        """Write the LoRA adapters' folder into a checkpoint; return its files' digests, by path in the checkpoint."""
        folder = checkpoint.folder / ADAPTER_FOLDER
        adapter_folder.write(folder, checkpoint)
        sync_tree(folder)
        files = sorted(path for path in folder.rglob("*") if not path.is_dir())
        return {path.relative_to(checkpoint.folder).as_posix(): digest_of_file(path) for path in files}

    def is_undamaged(self, folder: Path) -> bool:
        """Return whether a checkpoint is undamaged. The first call for a checkpoint reads all its bytes; later calls
        check only the names and sizes of its files."""
        try:
            if folder.name in self.undamaged:
                with name_in_errors(folder):
                    check_files(folder)
            else:
                verify(folder)
        except CheckpointError as error:
            log().warning("%s; this checkpoint is not counted in checkpoint.keep", error)
            self.undamaged.discard(folder.name)
            return False
        self.undamaged.add(folder.name)
        return True


def merge_entries(ranks: list[Entries]) -> dict[str, TensorEntry]:
    """Merge the entries of all ranks for a checkpoint's manifest into one entry per tensor. `manifest.render` checks
    later that no row (slice of dimension 0) of a tensor is missing."""
    tensors = {}
    for name in sorted({name for entries in ranks for name in entries}):
        parts = [entries[name] for entries in ranks if name in entries]
        dtype, shape = parts[0].dtype, parts[0].shape
        assert all((part.dtype, part.shape) == (dtype, shape) for part in parts), f"ranks disagree about {name}"
        ranges = sorted(
            (rows for part in parts for rows in part.ranges), key=lambda rows: (rows.columns or (0, 0), rows.begin)
        )
        tensors[name] = TensorEntry(dtype, shape, tuple(ranges))
    return tensors
