"""Read, write and check `llava_fsdp.json`, the notes in every folder of a model or adapter that this package writes.

The notes record how the model was made, list the size and digest of every file in the folder, and end with a digest of
themselves. Before this package loads such a folder, it compares the files with the notes (docs/artifacts.md). Folders
that other programs wrote have no notes and are not checked.
"""

import json
import re
import shlex
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from llava_fsdp.runtime.errors import DamagedModel
from llava_fsdp.runtime.files.digests import THREADS, Digest, digest_of_file, with_digest, without_digest
from llava_fsdp.runtime.files.safe_load import SMALL, library_errors
from llava_fsdp.runtime.files.small_json import Kinds, parse_object

NOTES = "llava_fsdp.json"
README = "README.md"
"""The model card. It has no digest, because users and the hub write into it."""
WHICH = "which"
"""Key of the notes of an export that does not have the last weights: `best`, those of the step with the best
validation, or `average`, the moving average of the last step."""
FILES, DIGEST = "files", "digest"
KINDS: dict[str, Kinds] = {
    key: (kind, type(None))
    for kind, keys in {
        str: ("run", "stage", "dtype", "template", "image_aspect_ratio", "pixels", "special_tokens", "teaching", "base",
              DIGEST, "language", "vision", "kind"),
        int: ("step", "seed", "max_length", "max_tiles", "video_frames"),
        float: ("video_fps",),
        list: ("train", "grid_pinpoints", "remarks"),
        dict: ("lora", "base_config", "recipe", "license", FILES),
    }.items()
    for key in keys
}  # fmt: skip
"""Allowed types of the values in the notes."""
RELATIVE = re.compile(r"[\w+=-][\w.+= -]*(/[\w+=-][\w.+= -]*)*")
"""Pattern for the path of a listed file, relative to its folder."""
HEX = re.compile(r"[0-9a-f]{32}")
LOADED_NAMES = (
    "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "mm_projector.bin", "mm_projector.safetensors", "adapter_config.json",
    "adapter_model.safetensors", "adapter_model.bin", "non_lora_trainables.safetensors", "non_lora_trainables.bin",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
    "processor_config.json",
)  # fmt: skip
"""Files that programs load from a model folder. Adding one may change which model is loaded."""


def read_notes(folder: Path) -> dict[str, Any]:
    """Return the notes of a model or adapter folder (`llava_fsdp.json`: how the model was made, and digests of its
    files); empty if it has none. Notes of earlier versions of this package contain no digest of themselves, and are not
    checked. Raises DamagedModel if the notes were changed after they were written, or cannot be read."""
    content = read_bytes(folder / NOTES)
    return {} if content is None else parse(content, folder)


def parse(content: bytes, folder: Path, is_accepted: bool = False) -> dict[str, Any]:
    """Parse the content of a model folder's notes (`llava_fsdp.json`), and check it against the digest at its end.

    Args:
        folder: for error messages.
        is_accepted: whether the user changed the notes on purpose; the digest is then not checked.

    Raises:
        DamagedModel: the content does not match the digest, or is not a JSON object with the expected types.
    """
    # the other advice is to accept the change, which the user has already done
    advice = "copy the whole folder again" if is_accepted else cure(folder, NOTES)
    with library_errors(f"{folder / NOTES} is not what was written; {advice}", DamagedModel):
        notes = parse_object(content, KINDS)
        # notes of earlier versions of this package have no digest of themselves
        if not is_older(notes) and not is_accepted and without_digest(content) is None:
            raise DamagedModel(
                f"{folder / NOTES} is not what was written: its digest of itself differs; {cure(folder, NOTES)}"
            )
    return notes


def is_older(notes: Mapping[str, Any]) -> bool:
    """Return whether an earlier version of this package wrote the notes of a model folder. Such notes have no digest of
    themselves; they list no files, or an adapter's tensor files with a digest and no size."""
    return DIGEST not in notes and not any(isinstance(entry, dict) for entry in notes.get(FILES, {}).values())


def read_bytes(path: Path) -> bytes | None:
    """Return a file's content; None if it does not exist. Raises DamagedModel if unreadable or larger than 64 MiB."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > SMALL:
            raise DamagedModel(f"{path} is not what was written: it is not a regular file of at most {SMALL:,} bytes")
        return path.read_bytes()
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) and not path.is_symlink():
            return None
        raise DamagedModel(f"{path} cannot be read: {error.strerror}; {cure(path.parent, path.name)}") from error


def listed_digests(folder: Path) -> dict[str, Digest]:
    """Return the size and digest of each file that a folder's notes list, by relative path; empty without notes. Raises
    DamagedModel if the notes are damaged."""
    return files_of(read_notes(folder), folder)


def files_of(notes: Mapping[str, Any], folder: Path) -> dict[str, Digest]:
    """Return the size and digest of each file that a folder's notes list, by relative path. Raises DamagedModel if a
    path, size or digest in that list is not valid."""
    files = notes.get(FILES, {})
    with library_errors(f"{folder / NOTES} is not what was written; {cure(folder, NOTES)}", DamagedModel):
        return {require_relative(name): read_digest(folder / name, entry) for name, entry in files.items()}


def require_relative(name: str) -> str:
    """Return the path of a file that the notes of a folder list; raise ValueError if it may lead out of the folder."""
    if not RELATIVE.fullmatch(name):
        raise ValueError(f"{name[:200]!r} is not the path of a file in this folder")
    return name


def read_digest(path: Path, entry: Any) -> Digest:
    """Return the size and digest of a file from `entry`, its value in the folder's notes. An earlier version of this
    package listed only a digest; the file's current size is then taken."""
    if isinstance(entry, str):
        entry = {"bytes": path.stat().st_size if path.is_file() else 0, "xxh128": entry}
    digest = Digest(entry["bytes"], entry["xxh128"])
    if type(digest.bytes) is not int or digest.bytes < 0 or not HEX.fullmatch(digest.xxh128):
        raise ValueError(f"{str(entry)[:100]} is not a size and a digest")
    return digest


def check_folder(folder: Path, largest: int | None = None) -> None:
    """Check that all files listed in the notes of a model folder (`llava_fsdp.json`) are unchanged, and that no file
    was added which programs would load as part of the model.

    Args:
        largest: of files with more bytes than this, only the size is checked; None: all files are read.

    Raises:
        DamagedModel: a file was changed, added or removed; the message says what the user can do.
    """
    notes = read_notes(folder)
    files = files_of(notes, folder)
    check_sizes(folder, files)
    if notes and not is_older(notes):  # notes of earlier versions of this package do not list all files
        refuse_added_files(folder, files)
    check_digests({folder / n: d for n, d in files.items() if largest is None or d.bytes <= largest}, folder)


def check_sizes(folder: Path, files: Mapping[str, Digest]) -> None:
    """Check that each file exists and has the listed size; no content is read. Raises DamagedModel if not."""
    for name, expected in files.items():
        path = folder / name
        try:
            stats = path.stat()
        except OSError as error:
            problem = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
            raise DamagedModel(f"{path} {problem}; {cure(folder, name)}") from error
        if not stat.S_ISREG(stats.st_mode) or stats.st_size != expected.bytes:
            raise DamagedModel(
                f"{path} is not what was written: it has {stats.st_size:,} bytes, and {expected.bytes:,} were written; "
                f"{cure(folder, name)}"
            )


def refuse_added_files(folder: Path, files: Mapping[str, Digest]) -> None:
    """Raise DamagedModel if a model folder has a file that its notes do not list and that programs would load."""
    added = [name for name in LOADED_NAMES if name not in files and (folder / name).exists()]
    if added:
        raise DamagedModel(
            f"{folder / added[0]} is no file that was written here, and programs would load it with the files "
            f"that were, or instead of them: take it out; {cure(folder, added[0])}"
        )


def check_digests(files: Mapping[Path, Digest], folder: Path) -> None:
    """Check the sizes and digests of files, which several threads read. Raises DamagedModel if one differs; `folder`,
    in which the files are, is named in the message."""
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(partial(check_digest, folder=folder), files, files.values()))


def check_digest(path: Path, expected: Digest, folder: Path) -> None:
    """Raise DamagedModel if a file below `folder` cannot be read or differs from its listed size and digest."""
    name = path.relative_to(folder).as_posix()
    try:
        digest = digest_of_file(path)
    except OSError as error:
        raise DamagedModel(f"{path} cannot be read: {error.strerror}; {cure(folder, name)}") from error
    if digest != expected:
        raise DamagedModel(f"{path} is not what was written: its digest differs; {cure(folder, name)}")


def cure(folder: Path, name: str) -> str:
    """Return the end of an error message: what to do about a changed, missing or added file `name` of `folder`."""
    again = "copy the whole folder again"
    if (folder.parent / "config.yaml").is_file():  # the folder is the export in a training's output folder
        again = "start its run again, which writes it anew from its checkpoint"
    command = f"llava-fsdp export source={shlex.quote(str(folder))} 'accept=[{name}]'"
    return f"{again}, or, if you changed it on purpose, accept it: {command}"


def write_sealed_notes(folder: Path, entries: Mapping[str, Any]) -> None:
    """Write the notes (`llava_fsdp.json`) into a model folder: `entries` (how the model was made), and the size and
    digest of every other file but `README.md`, which users may change."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    (folder / NOTES).write_bytes(
        render(entries, digests_of_files(folder, (n for n in names if n not in (NOTES, README))))
    )


def digests_of_files(folder: Path, names: Iterable[str]) -> dict[str, Digest]:
    """Return size and digest of each named file. Raises OSError if a file cannot be read."""
    names = list(names)
    with ThreadPoolExecutor(THREADS) as threads:
        return dict(zip(names, threads.map(lambda name: digest_of_file(folder / name), names), strict=True))


def render(entries: Mapping[str, Any], files: Mapping[str, Digest]) -> bytes:
    """Return the content of a model folder's notes (`llava_fsdp.json`): a JSON object with `entries` (how the model was
    made), the size and digest of each file, and at its end a digest of itself."""
    listed = {name: {"bytes": digest.bytes, "xxh128": digest.xxh128} for name, digest in files.items()}
    entries_without_digest = {key: value for key, value in entries.items() if key != DIGEST}
    return with_digest(json.dumps({**entries_without_digest, FILES: listed}, indent=1).removesuffix("\n}").encode())
