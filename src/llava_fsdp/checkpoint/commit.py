"""The one way a checkpoint comes to be: written beside, forced to the disk, and only then given its name.

A crash at any point leaves the checkpoints from before, and of the new one either nothing of its name or all of it:

| what happens | by | named point behind it |
|---|---|---|
| room on the disk is looked for, `step-N.tmp` made, 0700 | rank 0 | made |
| its tensors, digested while they are written, fsync | each rank | file written |
| all ranks have written, or all of them fail and the folder goes | all | agreed |
| `state.json`, fsync | rank 0 | state written |
| `adapter/`, where the run has adapters, from the ranks' files; fsync of all in it | rank 0 | adapter written |
| `manifest.json`: digests, coverage of every tensor; fsync | rank 0 | manifest written |
| fsync of the folder | rank 0 | folder synced |
| a checkpoint of this step, from before a crash or a new start, gives up its name | rank 0 | old one aside |
| `step-N.tmp` becomes `step-N` | rank 0 | renamed |
| fsync of the parent | rank 0 | parent synced |
| `latest` | rank 0 | pointed |
| older ones are deleted, name first | rank 0 | one deleted |
| all ranks know how it went | all | told |
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

from llava_fsdp.checkpoint.layout import Part
from llava_fsdp.checkpoint.manifest import (
    BESIDE,
    MANIFEST_FILE,
    STATE_FILE,
    Manifest,
    Piece,
    Saved,
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

Rows = dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]


@dataclass(frozen=True)
class Beside:
    """What a run writes into each of its checkpoints for other programs. Rank 0 alone has one."""

    nbytes: int
    """That it takes on the disk."""
    write: Callable[[Path, Checkpoint], None]
    """Makes the folder, of a checkpoint whose files are there; their digests are not in its manifest yet."""


def nowhere(point: str) -> None:
    """What happens at a named point: nothing, but where a test ends the process there."""


@dataclass
class Committer:
    """Writes checkpoints into a folder, one after the other, with all ranks of a group."""

    parent: Path
    cfg: CheckpointConfig
    group: dist.ProcessGroup | None
    hasher: Executor
    needed: int
    """Bytes of a checkpoint, of all ranks together."""
    at: Callable[[str], None] = nowhere
    beside: Beside | None = None
    good: set[str] = field(default_factory=set)
    """Names of checkpoints that were written or verified by this process: rank 0's are pruned by it."""

    def write(self, facts: dict[str, Any], parts: Mapping[str, Part], values: Mapping[str, torch.Tensor]) -> Path:
        """A collective of the group.

        Args:
            parts: which rows of which tensors this rank writes.
            values: those rows.

        Raises:
            CheckpointError: it could not be written; NumericError: something is not finite. Both on every rank alike;
                what was written of it is gone, and earlier checkpoints are as they were.
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
            rows: Rows = {name: (p.dtype, p.shape, p.begin, p.end) for name, p in parts.items()}
            every = gathered_on_first((digest, rows), self.group)
            on_first_rank(lambda: self.complete(staged, final, facts, every), failing, self.group)
        except LlavaFsdpError:  # all ranks have it, and none writes any more
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
        digest = write_tensors(staged / rank_file(rank), values, self.hasher)
        self.at("file written")
        return digest

    def complete(self, staged: Path, final: Path, facts: dict[str, Any], every: list[tuple[Digest, Rows]]) -> None:
        """On rank 0, when every rank's file is on the disk."""
        content = render_facts(facts)
        write_durably(staged / STATE_FILE, content)
        self.at("state written")
        files = {rank_file(rank): digest for rank, (digest, _) in enumerate(every)}
        files[STATE_FILE] = Digest(len(content), xxh3_128(content).hexdigest())
        manifest = Manifest(facts["step"], dict(files), joined([rows for _, rows in every]))
        if self.beside is not None:
            files |= self.write_beside(self.beside, Checkpoint(staged, manifest, facts))
            manifest = Manifest(manifest.step, files, manifest.tensors)
            self.at("adapter written")
        write_durably(staged / MANIFEST_FILE, render(manifest))
        self.at("manifest written")
        sync_folder(staged)
        self.at("folder synced")
        replaced = final.with_name(final.name + REPLACED)
        if os.path.lexists(final):  # left by a run that was told to start over, or that did not trust it
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
        self.warn_of_deleted()
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

    def write_beside(self, beside: Beside, found: Checkpoint) -> dict[str, Digest]:
        """The digests of its files, by their paths in the checkpoint."""
        folder = found.folder / BESIDE
        beside.write(folder, found)
        sync_tree(folder)
        files = sorted(path for path in folder.rglob("*") if not path.is_dir())
        return {path.relative_to(found.folder).as_posix(): digest_of_file(path) for path in files}

    def is_good(self, folder: Path) -> bool:
        """By all its bytes where this process has not seen it whole yet, else by names and sizes of its files."""
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

    def warn_of_deleted(self) -> None:
        """Say which checkpoints this process has seen whole, has not deleted, and does not find any more."""
        gone = sorted(self.good - {folder.name for folder in list_checkpoints(self.parent)})
        if gone:
            log().warning("%s: %s was deleted or moved away while the run is under way", self.parent, ", ".join(gone))
        self.good.difference_update(gone)


def joined(ranks: list[Rows]) -> dict[str, Saved]:
    """What all ranks have written, tensor by tensor; whether that is all of it, `render` asks."""
    pieces: dict[str, list[Piece]] = {}
    described: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for rank, rows in enumerate(ranks):
        for name, (dtype, shape, begin, end) in rows.items():
            assert described.setdefault(name, (dtype, shape)) == (dtype, shape), f"ranks disagree about {name}"
            pieces.setdefault(name, []).append(Piece(rank_file(rank), begin, end))
    return {
        name: Saved(*described[name], tuple(sorted(own, key=lambda piece: piece.begin)))
        for name, own in sorted(pieces.items())
    }
