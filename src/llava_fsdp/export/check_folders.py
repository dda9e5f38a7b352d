"""Compare the model files that a program loads with the digests (sizes and hashes) recorded in their folders, and
record new digests of files that a user changed on purpose."""

from collections.abc import Iterable
from pathlib import Path

from llava_fsdp.checkpoint.manifest import STATE_FILE
from llava_fsdp.model.adapters.lora_files import ADAPTER_CONFIG
from llava_fsdp.model.adapters.lora_files import FOLDER as ADAPTER
from llava_fsdp.model.sources.llava_v1_5_config import TOWER
from llava_fsdp.model.sources.pretrained_config import is_whole
from llava_fsdp.model.weights.tensor_files import PROJECTOR
from llava_fsdp.parallel.ranks.consensus import on_all_ranks
from llava_fsdp.runtime.errors import CheckpointError, ConfigError
from llava_fsdp.runtime.files.digests import Digest, files_of_rank
from llava_fsdp.runtime.files.durable_files import replace_file
from llava_fsdp.runtime.files.os_errors import why
from llava_fsdp.runtime.files.provenance import (
    NOTES,
    check_digests,
    check_folder,
    digests_of_files,
    files_of,
    is_older,
    listed_digests,
    parse,
    read_bytes,
    read_notes,
    render,
    require_relative,
)
from llava_fsdp.runtime.files.unfinished import EXPORT
from llava_fsdp.runtime.text.humanize import readable
from llava_fsdp.runtime.text.log import log

OWN_FILES = (
    "non_lora_trainables.safetensors",
    "mm_projector.safetensors",
    f"{TOWER}/config.json",
    "original/config.json",
)
"""Files that llava_fsdp writes into folders of adapters and models, and no other program."""
LOGGED = 1 << 30
"""Bytes of compared files above which `check_artifacts` logs a message, since comparing them takes seconds."""


def check_artifacts(paths: Iterable[Path], local_rank: int = 0, local_size: int = 1, is_first: bool = True) -> None:
    """Compare model files, or all files of model folders, with the digests recorded in `llava_fsdp.json` in their
    folders. Files without a digest are not checked, which is logged for models. Collective: the ranks of one machine
    divide the files among themselves. Only the rank with `is_first` logs.

    Raises:
        DamagedModel: a file has changed, is missing or cannot be read; raised on every rank.
    """
    paths = list(paths)

    def check() -> None:
        """Compare this rank's share of the files with their recorded digests."""
        wanted: dict[Path, tuple[Path, Digest]] = {}
        for path in paths:
            folder = path.parent if path.is_file() else path
            if path == folder:
                check_folder(folder, largest=0)
            files = {folder / name: digest for name, digest in listed_digests(folder).items()}
            wanted |= {file: (folder, digest) for file, digest in files.items() if path in (folder, file)}
        mine = files_of_rank({file: digest for file, (_, digest) in wanted.items()}, local_rank, local_size)
        nbytes = sum(digest.bytes for _, digest in wanted.values())
        if is_first and nbytes >= LOGGED:
            folders = ", ".join(sorted({str(folder) for folder, _ in wanted.values()}))
            log().info("comparing %s in %s with the digests of what was written", readable(nbytes), folders)
        for folder in sorted({wanted[file][0] for file in mine}):
            check_digests({file: wanted[file][1] for file in mine if wanted[file][0] == folder}, folder)

    on_all_ranks(check, "the files that the run loads cannot be compared with their digests")
    if is_first:
        warn_of_older(paths)


def warn_of_older(paths: Iterable[Path]) -> None:
    """Log which of the folders with a whole model, a projector or an adapter have no digests. These are in the folder's
    `llava_fsdp.json`, which is missing if another program wrote the folder or a copy left the file out; earlier
    versions of llava_fsdp wrote the file without digests. Folders of a language model or a vision tower never have it,
    and are not logged. `paths`: such folders, or files in them."""
    for folder in (path.parent if path.is_file() else path for path in paths):
        notes = read_notes(folder)
        if notes and is_older(notes):
            log().warning(
                "%s was written by an earlier version of llava_fsdp, without digests: whether its files have changed "
                "cannot be told. To add digests of the files now: llava-fsdp export source=%s 'accept=[%s]'",
                folder, folder, NOTES,
            )  # fmt: skip
        elif not notes and is_written_here(folder):
            log().warning(
                "%s has no %s, which llava_fsdp wrote into it: whether its files have changed cannot be told, and "
                "what they do not say, such as the template, is guessed; copy the whole folder again", folder, NOTES,
            )  # fmt: skip
        elif not notes and holds_model(folder):
            log().info("%s has no %s: whether its files have changed is not checked", folder, NOTES)


def is_written_here(folder: Path) -> bool:
    """Return whether llava_fsdp wrote a folder, by its place in a run or by files that no other program writes."""
    in_run = folder.name in (EXPORT, ADAPTER) and (
        (folder.parent / "config.yaml").is_file() or (folder.parent / STATE_FILE).is_file()
    )
    return in_run or any((folder / name).is_file() for name in OWN_FILES)


def holds_model(folder: Path) -> bool:
    """Return whether a folder holds an adapter, a projector alone, or a whole vision-language model."""
    if any((folder / name).is_file() for name in (ADAPTER_CONFIG, *PROJECTOR)):
        return True
    return (folder / "config.json").is_file() and is_whole(folder)


def accept(folder: Path, names: list[str]) -> None:
    """Record new digests, in `llava_fsdp.json` of a model folder, of files that a user has changed, added or removed.

    Args:
        names: paths of these files, relative to the folder. `llava_fsdp.json` itself may be among them: its present
            content is then accepted. If it has no digests, because an earlier version of llava_fsdp wrote it, digests
            of all files of the folder are recorded.

    Raises:
        ConfigError: the folder has no `llava_fsdp.json`, or a name is not a file of the folder.
        DamagedModel: `llava_fsdp.json` itself was changed, and is not in `names`.
        CheckpointError: `llava_fsdp.json` cannot be written.
    """
    content = read_bytes(folder / NOTES)
    if content is None:
        raise ConfigError(f"source={folder} has no {NOTES}, so it has no digests to renew; for a run, give its export/")
    notes = parse(content, folder, is_accepted=NOTES in names)
    files = files_of(notes, folder)
    if NOTES in names and is_older(notes):
        names = [*names, *(p.relative_to(folder).as_posix() for p in sorted(folder.rglob("*")) if p.is_file())]
    chosen = [name for name in dict.fromkeys(names) if name != NOTES]
    for name in chosen:
        try:
            require_relative(name)
        except ValueError as error:
            raise ConfigError(f"accept={name} is no file's path in {folder}") from error
        if name not in files and not (folder / name).is_file():
            raise ConfigError(f"accept={name}: {folder} has no such file, nor do its notes list one; give a path in it")
    try:
        kept = {name: digest for name, digest in files.items() if name not in chosen}
        renewed = kept | digests_of_files(folder, [name for name in chosen if (folder / name).is_file()])
        mode = (folder / NOTES).stat().st_mode
        replace_file(folder / NOTES, render(notes, dict(sorted(renewed.items()))), 0o600, durable=True)
        (folder / NOTES).chmod(mode)
    except OSError as error:
        raise CheckpointError(f"{folder / NOTES} cannot be written: {why(error, folder)}") from error
    log().info("%s: wrote new digests of %s", folder / NOTES, ", ".join(chosen) or "the notes alone")
