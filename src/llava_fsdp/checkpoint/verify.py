"""Verify a checkpoint: its manifest, the digests of all its files, and that no row (slice of dimension 0) of its
tensors is missing."""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llava_fsdp.checkpoint.manifest import (
    ADAPTER_FOLDER,
    LARGEST,
    MANIFEST_FILE,
    RANK_FILE,
    STATE_FILE,
    Manifest,
    parse,
)
from llava_fsdp.checkpoint.retention import require_plain_folder, restore_replaced
from llava_fsdp.checkpoint.safetensors_stream import open_file, read_header
from llava_fsdp.checkpoint.state_json import parse_facts
from llava_fsdp.parallel.ranks.consensus import on_all_ranks, on_first_rank, rank_and_size
from llava_fsdp.runtime.errors import CheckpointError
from llava_fsdp.runtime.files.digests import THREADS, Digest, digest_of, files_of_rank
from llava_fsdp.runtime.files.run_dir import list_checkpoints, step_of
from llava_fsdp.runtime.text.log import log


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    folder: Path
    manifest: Manifest
    facts: dict[str, Any]
    """Parsed content of `state.json`: all state of the run except the tensors."""


def verify(folder: Path) -> Checkpoint:
    """Verify all files of a checkpoint in one process. Raises CheckpointError, and no other error, for any invalid
    content; the message names the folder, the file and what is wrong."""
    with name_in_errors(folder):
        checkpoint = check_contents(folder)
        check_digests(checkpoint, sorted(checkpoint.manifest.files))
    return checkpoint


def verify_together(folder: Path) -> Checkpoint:
    """Verify a checkpoint with all ranks, each of which reads some of the files. Collective. If the checkpoint is
    damaged, all ranks raise the same CheckpointError."""
    rank, size = rank_and_size()
    checkpoint = on_first_rank(name_in_errors(folder)(lambda: check_contents(folder)), f"{folder} cannot be read")
    names = files_of_rank(checkpoint.manifest.files, rank, size)
    on_all_ranks(name_in_errors(folder)(lambda: check_digests(checkpoint, names)), f"{folder} cannot be verified")
    return checkpoint


@contextlib.contextmanager
def name_in_errors(folder: Path) -> Iterator[None]:
    """Context manager and decorator that prefixes the messages of CheckpointErrors with the folder's path, and turns
    OSErrors into such CheckpointErrors."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror or error}") from error


def check_contents(folder: Path) -> Checkpoint:
    """Read a checkpoint, check everything except the digests of its tensor files, and return it. Raises CheckpointError
    if something is wrong."""
    manifest = check_files(folder)
    step = step_of(folder)
    if step is not None and step != manifest.step:
        raise CheckpointError(f"it holds step {manifest.step}: it was renamed")
    check_digest(folder, STATE_FILE, manifest)
    facts = parse_facts(read_small(folder / STATE_FILE, LARGEST), manifest)
    check_headers(folder, manifest)
    return Checkpoint(folder, manifest, facts)


def check_files(folder: Path) -> Manifest:
    """Read a checkpoint's manifest, and compare the names and sizes of the files in its folder with it. Raises
    CheckpointError if a file is missing, is not listed or has another size."""
    require_plain_folder(folder)
    entries = {entry.name: entry for entry in os.scandir(folder)}
    if MANIFEST_FILE not in entries:
        raise CheckpointError(f"{MANIFEST_FILE} is missing" if entries else "it is empty")
    manifest = parse(read_small(folder / MANIFEST_FILE, LARGEST))
    if any(name.startswith(f"{ADAPTER_FOLDER}/") for name in manifest.files):
        entries |= adapter_entries(entries.pop(ADAPTER_FOLDER, None))
    missing_names = sorted(manifest.files.keys() - entries.keys())
    if missing_names:
        raise CheckpointError(f"{missing_names[0]} is missing")
    foreign_names = sorted(entries.keys() - manifest.files.keys() - {MANIFEST_FILE})
    if foreign_names:
        raise CheckpointError(f"{foreign_names[0]!r} is no file of this checkpoint")
    for name, expected in manifest.files.items():
        status = entries[name].stat(follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{name} is no regular file")
        if status.st_size != expected.bytes:
            raise CheckpointError(f"{name} has {status.st_size} bytes, {expected.bytes} were written")
    return manifest


def adapter_entries(folder: os.DirEntry[str] | None) -> dict[str, os.DirEntry[str]]:
    """Return the files in `folder`, a checkpoint's folder of LoRA adapters, and in its subfolders, by path within the
    checkpoint. Raises CheckpointError if the folder is missing (None) or a symbolic link. (`open_file` refuses only
    links at the end of a path.)"""
    if folder is None or not folder.is_dir(follow_symlinks=False):
        raise CheckpointError(f"{ADAPTER_FOLDER} is missing, or not a folder")
    entries: dict[str, os.DirEntry[str]] = {}
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            entries |= {f"{ADAPTER_FOLDER}/{entry.name}/{inner.name}": inner for inner in os.scandir(entry)}
        else:
            entries[f"{ADAPTER_FOLDER}/{entry.name}"] = entry
    return entries


def read_small(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file. Raises CheckpointError if it exceeds `most_bytes` or cannot be opened."""
    descriptor = open_file(path)
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > most_bytes:
            raise CheckpointError(f"{path.name} has more than {most_bytes} bytes, which is larger than any such file")
        return file.read()


def check_headers(folder: Path, manifest: Manifest) -> None:
    """Check that tensor files have exactly the manifest's rows. Raises CheckpointError with file and tensor, if not."""
    # {file: {tensor: (dtype, shape of its rows in the file)}}
    expected: dict[str, dict[str, tuple[object, tuple[int, ...]]]] = {
        name: {} for name in manifest.files if RANK_FILE.fullmatch(name)
    }
    for name, entry in manifest.tensors.items():
        for rows in entry.ranges:
            if name in expected[rows.file]:
                raise CheckpointError(f"{MANIFEST_FILE}: {rows.file} cannot hold two ranges of rows of {name}")
            expected[rows.file][name] = (entry.dtype, entry.shape_of(rows))
    for file, in_manifest in expected.items():
        descriptor = open_file(folder / file)
        try:
            in_file = {name: (place.dtype, place.shape) for name, place in read_header(descriptor, file).items()}
        finally:
            os.close(descriptor)
        if in_file != in_manifest:
            names = in_file.keys() | in_manifest.keys()
            differing = sorted(name for name in names if in_file.get(name) != in_manifest.get(name))
            raise CheckpointError(f"{file} does not hold {differing[0]} as {MANIFEST_FILE} says")


def check_digests(checkpoint: Checkpoint, names: list[str]) -> None:
    """Compute the digests of these files of a checkpoint; raise CheckpointError if one is not that in the manifest."""
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(partial(check_digest, checkpoint.folder, manifest=checkpoint.manifest), names))


def check_digest(folder: Path, name: str, manifest: Manifest) -> None:
    """Raise CheckpointError if the size or digest of a file differs from that in the manifest."""
    if digest_of_file(folder / name) != manifest.files[name]:
        raise CheckpointError(f"{name} is not what was written: its digest differs")


def digest_of_file(path: Path) -> Digest:
    """Return a file's size and digest. Raises CheckpointError if it is a link or not regular, or cannot be opened."""
    with os.fdopen(open_file(path), "rb", buffering=0) as file:
        return digest_of(file)


def newest_together(parent: Path, strict: bool) -> Checkpoint | None:
    """Return the newest checkpoint in `parent` that passes verification; None without checkpoints. Collective. A
    damaged newest one is an error with `strict`; else it is logged, and the one before it is used.

    Raises:
        CheckpointError: all checkpoints are damaged; with `strict`, the newest one is.
    """

    def find_checkpoints() -> list[Path]:
        """Return the checkpoints' folders, the newest first, after an interrupted save was undone."""
        restore_replaced(parent)
        return list_checkpoints(parent)[::-1]

    folders = on_first_rank(find_checkpoints, f"cannot look for checkpoints in {parent}")
    return first_undamaged(folders, strict, verify_together)


def newest_alone(parent: Path) -> Checkpoint | None:
    """Return what `newest_together` returns. This runs in one process and changes nothing in the folder."""
    return first_undamaged(list_checkpoints(parent)[::-1], False, verify)


def first_undamaged(folders: list[Path], strict: bool, check: Callable[[Path], Checkpoint]) -> Checkpoint | None:
    """Return the first undamaged checkpoint; None if there are no folders.

    Args:
        folders: folders of checkpoints, the newest first.
        strict: whether it is an error if the newest checkpoint is damaged.
        check: opens and verifies a checkpoint; raises CheckpointError if it is damaged.

    Raises:
        CheckpointError: all are damaged; with `strict`, the newest one is.
    """
    reasons = []
    for folder in folders:
        try:
            return check(folder)
        except CheckpointError as error:
            reasons.append(str(error))
            if strict:
                raise CheckpointError(
                    f"{error}\nThe newest checkpoint does not verify, and checkpoint.strict=true takes no other; with "
                    "checkpoint.strict=false the run continues from the one before it"
                ) from error
            if rank_and_size()[0] == 0:
                log().warning("%s; this checkpoint is not used", error)
    if reasons:
        raise CheckpointError(
            "there are checkpoints, and none of them verifies:\n  "
            + "\n  ".join(reasons)
            + "\nStart over with checkpoint.resume=never (they are set aside, nothing is deleted), or continue from "
            "another copy: checkpoint.resume=DIR"
        )
    return None
