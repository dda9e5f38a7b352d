"""Write a checkpoint into a folder with a temporary name, force it to the disk, and only then rename the folder.

A crash at any point leaves earlier checkpoints unchanged, and the new one either complete or without its final name:

| what happens | by | point reached after it |
|---|---|---|
| free space is checked, `step-N.tmp` is created, with permissions 0700 | rank 0 | made |
| each rank's tensors are written and digested, fsync | each rank | file written |
| all ranks have written; if one failed, all raise an error and the folder is deleted | all | agreed |
| `state.json` is written, fsync | rank 0 | state written |
| `adapter/` is written from the ranks' files, if there are adapters; fsync of its files | rank 0 | adapter written |
| `manifest.json` is written (digests of files, places of all rows), fsync | rank 0 | manifest written |
| fsync of the folder | rank 0 | folder synced |
| an existing checkpoint of this step, from before a crash or a new start, is renamed | rank 0 | old one aside |
| `step-N.tmp` is renamed to `step-N` | rank 0 | renamed |
| fsync of the parent folder | rank 0 | parent synced |
| the file `latest` is written | rank 0 | pointed |
| each older checkpoint that is not kept is renamed and then deleted | rank 0 | one deleted |
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
from llava_fsdp.checkpoint.retention import REPLACED, STAGED, point_to, prune
from llava_fsdp.checkpoint.safetensors_stream import write_tensors
from llava_fsdp.checkpoint.state_json import render_facts
from llava_fsdp.checkpoint.verify import Checkpoint, check_files, digest_of_file, naming, verify
from llava_fsdp.config import CheckpointConfig
from llava_fsdp.distributed.consensus import gathered_on_first, on_all_ranks, on_first_rank
from llava_fsdp.runtime.digests import Digest
from llava_fsdp.runtime.durable_files import (
    make_empty,
    make_folder,
    require_room,
    sync_folder,
    sync_tree,
    write_durably,
)
from llava_fsdp.runtime.errors import CheckpointError, LlavaFsdpError
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.run_dir import folder_name, list_checkpoints

Entries = Mapping[str, TensorEntry]


@dataclass(frozen=True)
class AdapterFolder:
    """Function with which rank 0 writes the adapters into each checkpoint in a format that other programs can read, and
    the size of what it writes."""

    nbytes: int
    write: Callable[[Path, Checkpoint], None]
    """Writes the adapter folder; its arguments are the folder's path and the checkpoint, whose manifest does not list
    it yet."""


@dataclass
class Committer:
    """Writes checkpoints into a folder, one at a time, together with all ranks of a process group."""

    parent: Path
    cfg: CheckpointConfig
    group: dist.ProcessGroup | None
    hasher: Executor
    needed: int
    """Bytes of the tensors and adapters of one checkpoint, summed over all ranks."""
    at: Callable[[str], None] = lambda point: None
    """Called with the name of each point of a save (see the table of this module), for tests that end the process
    there."""
    adapter_folder: AdapterFolder | None = None
    good: set[str] = field(default_factory=set)
    """Names of the checkpoints that this process has written or verified."""

    def write(self, facts: dict[str, Any], entries: Entries, values: Mapping[str, torch.Tensor]) -> Path:
        """Write one checkpoint. A collective of the process group.

        Args:
            entries: manifest entries of the rows that this rank writes, by tensor name.
            values: the values of these rows, by tensor name.

        Raises:
            CheckpointError: the checkpoint could not be written. Like NumericError, it is raised on every rank; the
                unfinished checkpoint is deleted, and earlier ones are unchanged.
            NumericError: a tensor has a value that is not finite.
        """
        final = self.parent / folder_name(facts["step"])
        staged = final.with_name(final.name + STAGED)
        failing = f"checkpoint {final} could not be written"
        rank = dist.get_rank() if dist.is_initialized() else 0
        on_first_rank(lambda: self.begin(staged), failing, self.group)
        try:
            self.at("made")
            digest = on_all_ranks(lambda: self.write_own(staged, rank, values), failing, self.group)
            self.at("agreed")
            written = gathered_on_first((digest, entries), self.group)
            on_first_rank(lambda: self.complete(staged, final, facts, written), failing, self.group)
        except LlavaFsdpError:  # raised on all ranks, so none of them is still writing
            on_first_rank(lambda: shutil.rmtree(staged, ignore_errors=True), failing, self.group)
            raise
        self.at("told")
        return final

    def begin(self, staged: Path) -> None:
        make_folder(self.parent)
        make_empty(staged)
        try:
            require_room(staged, self.needed)
        except CheckpointError:
            shutil.rmtree(staged, ignore_errors=True)
            raise

    def write_own(self, staged: Path, rank: int, values: Mapping[str, torch.Tensor]) -> Digest:
        described = {name: (value.dtype, tuple(value.shape)) for name, value in values.items()}
        digest = write_tensors(staged / rank_file(rank), described, values.__getitem__, self.hasher)
        self.at("file written")
        return digest

    def complete(self, staged: Path, final: Path, facts: dict[str, Any], written: list[tuple[Digest, Entries]]) -> None:
        """Write all files of a checkpoint except the ranks' tensor files, which `written` describes, and rename its
        folder to its final name. Called on rank 0."""
        content = render_facts(facts)
        write_durably(staged / STATE_FILE, content)
        self.at("state written")
        files = {rank_file(rank): digest for rank, (digest, _) in enumerate(written)}
        files[STATE_FILE] = Digest(len(content), xxh3_128(content).hexdigest())
        manifest = Manifest(facts["step"], dict(files), joined([entries for _, entries in written]))
        if self.adapter_folder is not None:
            files |= self.write_adapter(self.adapter_folder, Checkpoint(staged, manifest, facts))
            manifest = Manifest(manifest.step, files, manifest.tensors)
            self.at("adapter written")
        write_durably(staged / MANIFEST_FILE, render(manifest))
        self.at("manifest written")
        sync_folder(staged)
        self.at("folder synced")
        replaced = final.with_name(final.name + REPLACED)
        if os.path.lexists(final):  # from before this run started over, or found to be damaged
            os.rename(final, replaced)
            self.at("old one aside")
        try:
            os.rename(staged, final)
        except OSError:
            if replaced.exists():
                os.rename(replaced, final)
            raise
        self.at("renamed")
        sync_folder(self.parent)
        self.at("parent synced")
        self.good.add(final.name)
        try:
            point_to(final)
        except OSError as error:
            log().warning("%s could not be pointed to: %s", final, error)
        self.at("pointed")
        if replaced.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        prune(self.parent, self.cfg.keep, self.cfg.keep_every, self.is_good, self.at)
        self.good &= {folder.name for folder in list_checkpoints(self.parent)}

    def write_adapter(self, adapter_folder: AdapterFolder, checkpoint: Checkpoint) -> dict[str, Digest]:
        """Write the adapter folder of a checkpoint; return the digests of its files, by path within the checkpoint."""
        folder = checkpoint.folder / ADAPTER_FOLDER
        adapter_folder.write(folder, checkpoint)
        sync_tree(folder)
        files = sorted(path for path in folder.rglob("*") if not path.is_dir())
        return {path.relative_to(checkpoint.folder).as_posix(): digest_of_file(path) for path in files}

    def is_good(self, folder: Path) -> bool:
        """Return whether a checkpoint is undamaged. The first call for a checkpoint reads all its bytes; later calls
        check only the names and sizes of its files."""
        try:
            if folder.name in self.good:
                with naming(folder):
                    check_files(folder)
            else:
                verify(folder)
        except CheckpointError as error:
            log().warning("%s; it does not count as kept", error)
            self.good.discard(folder.name)
            return False
        self.good.add(folder.name)
        return True


def joined(ranks: list[Entries]) -> dict[str, TensorEntry]:
    """Merge the manifest entries of all ranks, tensor by tensor. `render` checks later that no row is missing."""
    tensors = {}
    for name in sorted({name for entries in ranks for name in entries}):
        parts = [entries[name] for entries in ranks if name in entries]
        dtype, shape = parts[0].dtype, parts[0].shape
        assert all((part.dtype, part.shape) == (dtype, shape) for part in parts), f"ranks disagree about {name}"
        ranges = sorted((rows for part in parts for rows in part.ranges), key=lambda rows: rows.begin)
        tensors[name] = TensorEntry(dtype, shape, tuple(ranges))
    return tensors
