"""Find the files of records (JSON, Parquet, tar) that a configuration names by files, folders and patterns."""

import glob
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote, urlsplit

from llava_fsdp.config import is_remote, paths_in
from llava_fsdp.config.keys.data import MAGIC
from llava_fsdp.data.containers.hub_client import split_url
from llava_fsdp.data.containers.remote import RemoteStorage
from llava_fsdp.data.containers.remote_file import RemoteFile
from llava_fsdp.data.records.packed_text import GZIP, ZSTD
from llava_fsdp.data.records.record import COMPRESSED_TARS, LINES, PARQUET, TAR
from llava_fsdp.runtime.errors import ConfigError

SUFFIXES = (".json", *LINES, PARQUET, TAR, *GZIP, *ZSTD, *COMPRESSED_TARS)
"""Endings of the names of files of records; other files of a folder are ignored."""
HUB_METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Names of files that describe a dataset of the Hugging Face hub."""
OTHER_SPLIT = re.compile(r"(^|[/._-])(test|val|valid|validation|dev|eval)([/._-]|$)", re.IGNORECASE)
"""Finds paths of those parts of a dataset that are not for training, such as `test`."""
INDEX = ".index"
"""Ending of the name of an index folder, which is not searched for files of records."""


def find_files(value: str, key: str) -> list[str | RemoteFile]:
    """Return the files of records that a setting names: a local one as its path, a remote one as a RemoteFile.

    Args:
        value: a file, a folder, in which all files of records are found, a pattern with `*`, `?`, `[...]` or `**`, a
            URL, or a list of these (see `paths_in`). The files of a folder or pattern are sorted by the bytes of their
            names.
        key: name of the setting, for messages.

    Raises:
        ConfigError: a path names nothing, a folder or pattern has no file of records, or a file is named twice.
        SourceError: a remote storage cannot be listed.
    """
    found: list[str | RemoteFile] = []
    for path in paths_in(value):
        if not path:
            raise ConfigError(f"{key}={value} has an empty path; name a file, or files with one comma between two")
        refuse_other_forms(path, key)
        if is_remote(path):
            files: Sequence[str | RemoteFile] = remote_files(path, key)
        elif os.path.isfile(path):
            files = [path]
        elif os.path.isdir(path):
            files = files_below(Path(path))
            if not files:
                raise ConfigError(f"{key}={path} is a folder without a file of records ({', '.join(SUFFIXES)})")
        elif glob.has_magic(path):
            matches = (match for match in glob.glob(path, recursive=True) if os.path.isfile(match))
            files = sorted((match for match in matches if not is_in_index(match)), key=os.fsencode)
            if not files:
                raise ConfigError(f"{key}={path} is a pattern that no file matches")
        else:
            raise ConfigError(
                f"{key}={path} is not a file or a folder; give a JSON, JSON Lines or Parquet file, a tar, a folder of "
                "them, a pattern, s3://, gs:// or hf://datasets/ORG/NAME, or a list of these: [a.json, b.jsonl]"
            )
        found += files
    names = (file.name if isinstance(file, RemoteFile) else os.path.realpath(file) for file in found)
    named_twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if named_twice is not None:
        raise ConfigError(f"{key} names {named_twice} twice; name it once (data.sources has epochs and weights)")
    return found


def refuse_other_forms(path: str, key: str) -> None:
    """Raise ConfigError if a path is an address `file:`, or what `save_to_disk` of Hugging Face datasets writes: a
    folder with files `.arrow` and without files of records, or such a file."""
    if path[:5].lower() == "file:":
        raise ConfigError(f"{key}={path} is an address; give the path: {unquote(urlsplit(path).path)}")
    if os.path.isdir(path) and files_below(Path(path)):
        return
    names = os.listdir(path) if os.path.isdir(path) else [path]
    is_dictionary = "dataset_dict.json" in names
    if is_dictionary or any(name.endswith(".arrow") for name in names):
        folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
        split = "['train']" if is_dictionary else ""
        raise ConfigError(
            f"{key}={path} was written by save_to_disk of datasets; write it as Parquet: "
            f"datasets.load_from_disk({folder!r}){split}.to_parquet('train.parquet')"
        )


def find_images(value: str, key: str) -> str:
    """Return the folder of images that the setting `key` names: a local path as it is, or a URL, in which a branch or
    tag of the Hugging Face hub is replaced by its commit.

    Raises:
        ConfigError: the local folder does not exist.
        SourceError: the URL has no bucket, or the hub does not tell the commit.
    """
    if is_remote(value):
        return RemoteStorage().pin_folder(value)
    if value[:5].lower() == "file:":
        raise ConfigError(f"{key}={value} is an address; give the path: {unquote(urlsplit(value).path)}")
    if not Path(value).is_dir():
        raise ConfigError(
            f"{key}={value} is not a folder; give the one with the records' images, or its URL: s3://, gs:// or "
            "hf://datasets/ORG/NAME"
        )
    return value


def remote_files(url: str, key: str) -> list[RemoteFile]:
    """Return the files of records that a URL names.

    Args:
        url: URL of a file, or of a folder, in which all files of records are found, or a pattern.
        key: name of the setting that has the URL, for messages.

    Raises:
        ConfigError: no file of records is found; or a folder on the hub also has files such as a test set.
        SourceError: the remote storage cannot be listed.
    """
    listed = RemoteStorage().list_files(url)
    found = [file for file in listed if is_records(file.name.rpartition("/")[2])]
    if not found:
        raise ConfigError(f"{key}={url} has no file of records ({', '.join(SUFFIXES)})")
    if url.startswith("hf://") and not MAGIC.search(url):
        folder_path = split_url(url.rstrip("/"))[2]
        paths = (split_url(file.name)[2].removeprefix(folder_path) for file in found)
        other_split = next((path for path in paths if OTHER_SPLIT.search(path)), None)
        if other_split is not None and len(found) > 1:
            raise ConfigError(
                f"{key}={url} has files that are not for training, such as {other_split.lstrip('/')}; name those to "
                "train on by a pattern such as 'hf://datasets/ORG/NAME/data/train-*'"
            )
    return found


def is_records(name: str) -> bool:
    """Return whether a file with this base name, when it is found in a folder, is taken as a file of records."""
    name = name.partition("?versionId=")[0]
    return name.lower().endswith(SUFFIXES) and not name.startswith(".") and name not in HUB_METADATA


def is_in_index(path: str) -> bool:
    """Return whether a file is in the folder of an index."""
    return any(part.endswith(INDEX) for part in Path(path).parts[:-1])


def files_below(folder: Path) -> list[str]:
    """Return the paths of the files of records below a folder, without hidden files and files of an index. Links to
    folders are not followed."""
    found: list[str] = []
    for root, folders, names in os.walk(folder, onerror=cannot_list):
        folders[:] = [name for name in folders if not name.startswith(".") and not name.endswith(INDEX)]
        found += [os.path.join(root, name) for name in names if is_records(name)]
    wrong = next((path for path in found if not os.path.isfile(path)), None)
    if wrong is not None:
        raise ConfigError(f"{wrong} is no regular file, or a link to none; take it out of the folder")
    return sorted(found, key=os.fsencode)


def cannot_list(error: OSError) -> NoReturn:
    raise ConfigError(f"{error.filename} cannot be listed ({error.strerror}); let this user read it") from error
