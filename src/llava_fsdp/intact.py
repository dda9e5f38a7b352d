"""Whether the models, projectors and adapters of ours that a start reads are what was written, by the digests in their
notes; and how a file that was changed on purpose gets a new digest."""

from collections.abc import Iterable
from pathlib import Path

from llava_fsdp.checkpoint.agree import on_all_ranks
from llava_fsdp.checkpoint.disk import replace_durably
from llava_fsdp.digests import Digest, share
from llava_fsdp.errors import CheckpointError, ConfigError
from llava_fsdp.log import log
from llava_fsdp.notes import (
    NOTES,
    check_digests,
    check_folder,
    checked_name,
    digests,
    files_of,
    is_older,
    listed,
    parse,
    read_bytes,
    read_notes,
    render,
)
from llava_fsdp.refusals import why
from llava_fsdp.words import readable

TOLD = 1 << 30
"""Bytes from which on the reading is told: it takes seconds."""


def check_artifacts(paths: Iterable[Path], local_rank: int = 0, local_size: int = 1, is_first: bool = True) -> None:
    """Every file of these folders is what was written; of a single file, that one. A collective of ranks.

    The ranks of a machine share the files out: each machine may have a copy of its own. What has no notes of ours is
    taken as it is.

    Raises:
        DamagedModel: a file is another, is missing or cannot be read; on every rank alike.
    """
    paths = list(paths)

    def check() -> None:
        wanted: dict[Path, tuple[Path, Digest]] = {}
        for path in paths:
            folder = path.parent if path.is_file() else path
            if path == folder:
                check_folder(folder, largest=0)
            own = {folder / name: digest for name, digest in listed(folder).items()}
            wanted |= {file: (folder, own[file]) for file in own if path in (folder, file)}
        mine = share({file: digest for file, (_, digest) in wanted.items()}, local_rank, local_size)
        tell(wanted, is_first)
        for folder in sorted({wanted[file][0] for file in mine}):
            check_digests({file: wanted[file][1] for file in mine if wanted[file][0] == folder}, folder)

    on_all_ranks(check, "what the run starts from cannot be compared with what was written")
    if is_first:
        warn_of_older(paths)


def tell(wanted: dict[Path, tuple[Path, Digest]], is_first: bool) -> None:
    nbytes = sum(digest.bytes for _, digest in wanted.values())
    if is_first and nbytes >= TOLD:
        folders = ", ".join(sorted({str(folder) for folder, _ in wanted.values()}))
        log().info("comparing %s of %s with their digests", readable(nbytes), folders)


def warn_of_older(paths: Iterable[Path]) -> None:
    for folder in (path.parent if path.is_file() else path for path in paths):
        found = read_notes(folder)
        if found and is_older(found):
            log().warning(
                "%s is of an earlier version of llava_fsdp, without digests: whether its files are what was written "
                "cannot be told; to give it digests as it is: python -m llava_fsdp.export source=%s 'accept=[%s]'",
                folder, folder, NOTES,
            )  # fmt: skip


def accept(folder: Path, names: list[str]) -> None:
    """Take the digests of files anew that were changed, added or removed on purpose. Nothing else is looked at.

    Args:
        names: paths in the folder. That of the notes stands for what these say themselves; where they are of an earlier
            version, without digests, for all files.

    Raises:
        ConfigError: the folder has no notes, or a name is no file of it.
        DamagedModel: the notes themselves are another, and are not among the names.
        CheckpointError: they cannot be written.
    """
    content = read_bytes(folder / NOTES)
    if content is None:
        raise ConfigError(f"source={folder} has no {NOTES}, so nothing in it is compared; of a run, give its export/")
    said = parse(content, folder, is_accepted=NOTES in names)
    files = files_of(said, folder)
    if NOTES in names and is_older(said):
        names = [*names, *(p.relative_to(folder).as_posix() for p in sorted(folder.rglob("*")) if p.is_file())]
    chosen = [name for name in dict.fromkeys(names) if name != NOTES]
    for name in chosen:
        try:
            checked_name(name)
        except ValueError as error:
            raise ConfigError(f"accept={name} is no file's path in {folder}") from error
        if name not in files and not (folder / name).is_file():
            raise ConfigError(f"accept={name}: {folder} has no such file, and never had; give a file's path in it")
    try:
        kept = {name: digest for name, digest in files.items() if name not in chosen}
        found = kept | digests(folder, [name for name in chosen if (folder / name).is_file()])
        mode = (folder / NOTES).stat().st_mode
        replace_durably(folder / NOTES, render(said, dict(sorted(found.items()))))
        (folder / NOTES).chmod(mode)
    except OSError as error:
        raise CheckpointError(f"{folder / NOTES} cannot be written: {why(error, folder)}") from error
    log().info("%s has the digests of %s as they are now", folder / NOTES, ", ".join(chosen) or "no file, but its own")
