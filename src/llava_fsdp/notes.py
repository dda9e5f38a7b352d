"""`llava_fsdp.json`, the notes in every folder that we write for others to load: how the model came to be, which no
other program's file says, and the size and digest of every file beside it.

The file ends in a digest of itself. Who starts from such a folder compares first; docs/artifacts.md says what is
promised. Folders of other programs have no such file, and nothing to compare with.
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

from llava_fsdp.digests import THREADS, Digest, digest_of_file, sealed, unsealed
from llava_fsdp.errors import DamagedModel
from llava_fsdp.small_json import Kinds, parse_object
from llava_fsdp.untrusted import SMALL, foreign

NOTES = "llava_fsdp.json"
FILES, DIGEST = "files", "digest"
KINDS: dict[str, Kinds] = {
    key: (kind, type(None))
    for kind, keys in {
        str: ("run", "stage", "dtype", "template", "image_aspect_ratio", "pixels", "special_tokens", "base", DIGEST,
              "language", "vision"),
        int: ("step", "seed", "max_length"),
        list: ("train", "grid_pinpoints"),
        dict: ("lora", FILES),
    }.items()
    for key in keys
}  # fmt: skip
"""Of what programs read from the notes."""
RELATIVE = re.compile(r"[\w+=-][\w.+= -]*(/[\w+=-][\w.+= -]*)*")
"""A listed file's path in the folder."""
HEX = re.compile(r"[0-9a-f]{32}")
LOADED = (
    "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "mm_projector.bin", "mm_projector.safetensors", "adapter_config.json",
    "adapter_model.safetensors", "adapter_model.bin", "non_lora_trainables.safetensors", "non_lora_trainables.bin",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
    "processor_config.json",
)  # fmt: skip
"""What programs read by its name wherever it lies: one more of them beside the files that were written makes another
model of these."""


def read_notes(folder: Path) -> dict[str, Any]:
    """What the notes of a folder say; nothing where there are none. Those of earlier versions, which have no digest of
    themselves, are taken as they are.

    Raises:
        DamagedModel: they are not what was written, or cannot be read.
    """
    content = read_bytes(folder / NOTES)
    return {} if content is None else parse(content, folder)


def parse(content: bytes, folder: Path, is_accepted: bool = False) -> dict[str, Any]:
    """
    Args:
        is_accepted: what the notes say was changed on purpose.
    """
    with foreign(f"{folder / NOTES} is not what was written; {cure(folder, NOTES)}", DamagedModel):
        found = parse_object(content, KINDS)
        if not is_older(found) and not is_accepted and unsealed(content) is None:
            raise DamagedModel(
                f"{folder / NOTES} is not what was written: its digest of itself differs; {cure(folder, NOTES)}"
            )
    return found


def is_older(notes: Mapping[str, Any]) -> bool:
    """Whether an earlier version wrote the notes, so that there is nothing to compare with, or an adapter's tensors
    alone."""
    return DIGEST not in notes and not any(isinstance(own, dict) for own in notes.get(FILES, {}).values())


def read_bytes(path: Path) -> bytes | None:
    """A small file's content; None where there is no such file."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > SMALL:
            raise DamagedModel(f"{path} is not what was written: it is no regular file of at most {SMALL:,} bytes")
        return path.read_bytes()
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) and not path.is_symlink():
            return None
        raise DamagedModel(f"{path} cannot be read: {error.strerror}; {cure(path.parent, path.name)}") from error


def listed(folder: Path) -> dict[str, Digest]:
    """What the files of a folder must be, by their paths in it, as its notes say; nothing without notes.

    Raises:
        DamagedModel: the notes are not what was written.
    """
    return files_of(read_notes(folder), folder)


def files_of(notes: Mapping[str, Any], folder: Path) -> dict[str, Digest]:
    files = notes.get(FILES, {})
    with foreign(f"{folder / NOTES} is not what was written; {cure(folder, NOTES)}", DamagedModel):
        return {checked_name(name): read_digest(folder / name, own) for name, own in files.items()}


def checked_name(name: str) -> str:
    if not RELATIVE.fullmatch(name):
        raise ValueError(f"{name[:200]!r} is no file beside it")
    return name


def read_digest(path: Path, said: Any) -> Digest:
    """Earlier versions wrote the digests of an adapter's tensors alone, without their files' sizes."""
    said = {"bytes": path.stat().st_size if path.is_file() else 0, "xxh128": said} if isinstance(said, str) else said
    found = Digest(said["bytes"], said["xxh128"])
    if type(found.bytes) is not int or found.bytes < 0 or not HEX.fullmatch(found.xxh128):
        raise ValueError(f"{str(said)[:100]} is no size and digest")
    return found


def check_folder(folder: Path, largest: int | None = None) -> None:
    """Every file that the notes list is what was written, and none is there that would be read beside them.

    Args:
        largest: files of more bytes are looked at by their sizes alone; None: there are none such.

    Raises:
        DamagedModel: naming the file, and what can be done.
    """
    notes = read_notes(folder)
    files = files_of(notes, folder)
    check_sizes(folder, files)
    if notes and not is_older(notes):
        refuse_strangers(folder, files)
    check_digests({folder / n: d for n, d in files.items() if largest is None or d.bytes <= largest}, folder)


def check_sizes(folder: Path, files: Mapping[str, Digest]) -> None:
    """What can be seen without reading."""
    for name, expected in files.items():
        path = folder / name
        try:
            found = path.stat()
        except OSError as error:
            said = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
            raise DamagedModel(f"{path} {said}; {cure(folder, name)}") from error
        if not stat.S_ISREG(found.st_mode) or found.st_size != expected.bytes:
            raise DamagedModel(
                f"{path} is not what was written: it has {found.st_size:,} bytes, and {expected.bytes:,} were written; "
                f"{cure(folder, name)}"
            )


def refuse_strangers(folder: Path, files: Mapping[str, Digest]) -> None:
    strangers = [name for name in LOADED if name not in files and (folder / name).exists()]
    if strangers:
        raise DamagedModel(
            f"{folder / strangers[0]} is no file that was written here, and programs read it with, or instead of, "
            f"those that were: take it out; {cure(folder, strangers[0])}"
        )


def check_digests(files: Mapping[Path, Digest], folder: Path) -> None:
    """Read files whole, several at once.

    Args:
        folder: of the notes that list them.
    """
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(partial(check_digest, folder=folder), files, files.values()))


def check_digest(path: Path, expected: Digest, folder: Path) -> None:
    name = path.relative_to(folder).as_posix()
    try:
        found = digest_of_file(path)
    except OSError as error:
        raise DamagedModel(f"{path} cannot be read: {error.strerror}; {cure(folder, name)}") from error
    if found != expected:
        raise DamagedModel(f"{path} is not what was written: its digest differs; {cure(folder, name)}")


def cure(folder: Path, name: str) -> str:
    """What can be done about a file that is another."""
    is_of_run = (folder.parent / "config.yaml").is_file()
    again = (
        "start its run again, which writes it anew from its checkpoint" if is_of_run else "copy the whole folder again"
    )
    command = f"python -m llava_fsdp.export source={shlex.quote(str(folder))} 'accept=[{name}]'"
    return f"{again}, or, if you changed it on purpose, accept it: {command}"


def seal(folder: Path, said: Mapping[str, Any]) -> None:
    """Write a folder's notes, with the digest of every file that is there.

    Args:
        said: what else they say.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    (folder / NOTES).write_bytes(render(said, digests(folder, (name for name in names if name != NOTES))))


def digests(folder: Path, names: Iterable[str]) -> dict[str, Digest]:
    """Raises OSError where one cannot be read."""
    names = list(names)
    with ThreadPoolExecutor(THREADS) as threads:
        return dict(zip(names, threads.map(lambda name: digest_of_file(folder / name), names), strict=True))


def render(said: Mapping[str, Any], files: Mapping[str, Digest]) -> bytes:
    """The bytes of the notes."""
    found = {name: {"bytes": own.bytes, "xxh128": own.xxh128} for name, own in files.items()}
    plain = {key: value for key, value in said.items() if key != DIGEST}
    return sealed(json.dumps({**plain, FILES: found}, indent=1).removesuffix("\n}").encode())
