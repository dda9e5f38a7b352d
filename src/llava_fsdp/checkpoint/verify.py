"""Whether a checkpoint is what was written: its manifest, its files to the last bit, and every row of every tensor."""

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from llava_fsdp.checkpoint.manifest import (
    BESIDE,
    LARGEST,
    MANIFEST_FILE,
    RANK_FILE,
    STATE_FILE,
    Manifest,
    parse,
)
from llava_fsdp.checkpoint.retention import recover, report_strangers, require_plain_folder
from llava_fsdp.checkpoint.safetensors_stream import open_file, read_header
from llava_fsdp.checkpoint.state_json import parse_facts
from llava_fsdp.distributed.consensus import on_all_ranks, on_first_rank
from llava_fsdp.runtime.digests import THREADS, Digest, digest_of, share
from llava_fsdp.runtime.errors import CheckpointError
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.run_dir import list_checkpoints, step_of


@dataclass(frozen=True)
class Checkpoint:
    """A folder that has been verified."""

    folder: Path
    manifest: Manifest
    facts: dict[str, Any]
    """of `state.json`"""


def verify(folder: Path) -> Checkpoint:
    """In one process.

    Raises:
        CheckpointError: naming the folder, the file and what is wrong with it; nothing else, whatever the bytes are.
    """
    with naming(folder):
        found = inspect(folder)
        digest_files(found, sorted(found.manifest.files))
    return found


def verify_together(folder: Path) -> Checkpoint:
    """The same with the files shared out over the ranks, by size. A collective; what one rank finds, all raise."""

    def look() -> Checkpoint:
        with naming(folder):
            return inspect(folder)

    found = on_first_rank(look, f"{folder} cannot be looked at")
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def digest() -> None:
        with naming(folder):
            digest_files(found, share(found.manifest.files, rank, size))

    on_all_ranks(digest, f"{folder} cannot be verified")
    return found


@contextlib.contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Whatever is wrong with a checkpoint is said with its folder."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror or error}") from error


def inspect(folder: Path) -> Checkpoint:
    """All but the digests of the tensors' files: names, sizes, formats, and that rows lie where the manifest says."""
    manifest = check_files(folder)
    step = step_of(folder)
    if step is not None and step != manifest.step:
        raise CheckpointError(f"it holds step {manifest.step}: it was renamed")
    check_digest(folder, STATE_FILE, manifest)
    facts = parse_facts(read_small(folder / STATE_FILE, LARGEST), manifest)
    check_headers(folder, manifest)
    return Checkpoint(folder, manifest, facts)


def check_files(folder: Path) -> Manifest:
    """What the manifest says, with the names and sizes of the files compared.

    Raises:
        CheckpointError: a file is missing, foreign or of another size.
    """
    require_plain_folder(folder)
    entries = {entry.name: entry for entry in os.scandir(folder)}
    if MANIFEST_FILE not in entries:
        raise CheckpointError(f"{MANIFEST_FILE} is missing" if entries else "it is empty")
    manifest = parse(read_small(folder / MANIFEST_FILE, LARGEST))
    if any(name.startswith(f"{BESIDE}/") for name in manifest.files):
        entries |= entries_beside(entries.pop(BESIDE, None))
    missing = sorted(manifest.files.keys() - entries.keys())
    if missing:
        raise CheckpointError(f"{missing[0]} is missing")
    foreign = sorted(entries.keys() - manifest.files.keys() - {MANIFEST_FILE})
    if foreign:
        raise CheckpointError(f"{foreign[0]!r} is no file of this checkpoint")
    for name, expected in manifest.files.items():
        found = entries[name].stat(follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{name} is no regular file")
        if found.st_size != expected.bytes:
            raise CheckpointError(f"{name} has {found.st_size} bytes, {expected.bytes} were written")
    return manifest


def entries_beside(beside: os.DirEntry[str] | None) -> dict[str, os.DirEntry[str]]:
    """What lies in the folder for other programs, and in its folders, by its path in the checkpoint.

    Raises:
        CheckpointError: a folder of them is missing, or a link: `open_file` looks at the last name of a path alone.
    """
    if beside is None or not beside.is_dir(follow_symlinks=False):
        raise CheckpointError(f"{BESIDE} is missing, or no folder")
    found: dict[str, os.DirEntry[str]] = {}
    for entry in os.scandir(beside):
        if entry.is_dir(follow_symlinks=False):
            found |= {f"{BESIDE}/{entry.name}/{inner.name}": inner for inner in os.scandir(entry)}
        else:
            found[f"{BESIDE}/{entry.name}"] = entry
    return found


def read_small(path: Path, largest: int) -> bytes:
    descriptor = open_file(path)
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > largest:
            raise CheckpointError(f"{path.name} is larger than any that was written")
        return file.read()


def check_headers(folder: Path, manifest: Manifest) -> None:
    """Every file of tensors holds exactly the pieces that the manifest says lie in it.

    Raises:
        CheckpointError: naming the file and the tensor.
    """
    expected: dict[str, dict[str, tuple[object, tuple[int, ...]]]] = {
        name: {} for name in manifest.files if RANK_FILE.fullmatch(name)
    }
    for name, saved in manifest.tensors.items():
        for piece in saved.pieces:
            shape = (piece.end - piece.begin, *saved.shape[1:]) if saved.shape else ()
            if name in expected[piece.file]:
                raise CheckpointError(f"{MANIFEST_FILE}: {piece.file} cannot hold two pieces of {name}")
            expected[piece.file][name] = (saved.dtype, shape)
    for file, wanted in expected.items():
        descriptor = open_file(folder / file)
        try:
            found = {name: (own.dtype, own.shape) for name, own in read_header(descriptor, file).items()}
        finally:
            os.close(descriptor)
        if found != wanted:
            differing = sorted(n for n in found.keys() | wanted.keys() if found.get(n) != wanted.get(n))
            raise CheckpointError(f"{file} does not hold {differing[0]} as {MANIFEST_FILE} says")


def digest_files(found: Checkpoint, names: Iterable[str]) -> None:
    names = list(names)
    if not names:
        return
    with ThreadPoolExecutor(min(THREADS, len(names))) as threads:
        list(threads.map(partial(check_digest, found.folder, manifest=found.manifest), names))


def check_digest(folder: Path, name: str, manifest: Manifest) -> None:
    """Raises CheckpointError where a file is not what was written."""
    if digest_of_file(folder / name) != manifest.files[name]:
        raise CheckpointError(f"{name} is not what was written: its digest differs")


def digest_of_file(path: Path) -> Digest:
    """
    Raises:
        CheckpointError: it is a link, no file, or cannot be opened.
    """
    with os.fdopen(open_file(path), "rb", buffering=0) as file:
        return digest_of(file)


def newest_together(parent: Path, strict: bool) -> Checkpoint | None:
    """The newest checkpoint that verifies; None where there is none at all. A collective.

    Args:
        strict: one that does not verify is an error, instead of a warning and the one before it.

    Raises:
        CheckpointError: there are checkpoints, and none verifies; or, with `strict`, the newest does not.
    """

    def look() -> list[Path]:
        recover(parent)
        report_strangers(parent)
        return list_checkpoints(parent)[::-1]

    return first_good(on_first_rank(look, f"cannot look for checkpoints in {parent}"), strict, verify_together)


def newest_alone(parent: Path) -> Checkpoint | None:
    """The same in one process."""
    return first_good(list_checkpoints(parent)[::-1], False, verify)


def first_good(folders: list[Path], strict: bool, check: Callable[[Path], Checkpoint]) -> Checkpoint | None:
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
            if not dist.is_initialized() or dist.get_rank() == 0:
                log().warning("%s; this checkpoint is not used", error)
    if reasons:
        raise CheckpointError(
            "there are checkpoints, and none of them verifies:\n  "
            + "\n  ".join(reasons)
            + "\nStart over with checkpoint.resume=never (they are set aside, nothing is deleted), or continue from "
            "another copy: checkpoint.resume=DIR"
        )
    return None
