"""Find the files of records that a configuration names by files, folders and patterns."""

import glob
import os
from collections import Counter
from pathlib import Path

from llava_fsdp.config import paths_in
from llava_fsdp.data.records.packed_text import GZIP, ZSTD
from llava_fsdp.data.records.record import PARQUET, TAR
from llava_fsdp.data.records.tar import COMPRESSED
from llava_fsdp.runtime.errors import ConfigError

SUFFIXES = (".json", ".jsonl", PARQUET, TAR, GZIP, ZSTD, *COMPRESSED)
"""Endings of the names of files of records; in a folder, other files are ignored."""
INDEX = ".index"
"""Ending of the name of an index folder, which is not searched for files of records."""


def find_files(value: str, key: str) -> list[str]:
    """Return the files of records that the value of a `path` key names: a file itself, all files of records below a
    folder, or those that a pattern with `*`, `?`, `[...]` or `**` matches. Those of one folder or pattern are sorted by
    the bytes of their names.

    Args:
        key: name of the setting, for messages.

    Raises:
        ConfigError: a path names nothing, a folder or pattern has no file of records, or a file is named twice.
    """
    found: list[str] = []
    for path in paths_in(value):
        if os.path.isfile(path):
            own = [path]
        elif os.path.isdir(path):
            own = in_folder(Path(path))
            if not own:
                raise ConfigError(f"{key}={path} is a folder without a file of records ({', '.join(SUFFIXES)})")
        elif glob.has_magic(path):
            own = sorted((p for p in glob.glob(path, recursive=True) if os.path.isfile(p)), key=os.fsencode)
            if not own:
                raise ConfigError(f"{key}={path} is a pattern that no file matches")
        else:
            raise ConfigError(
                f"{key}={path} is not a file or a folder; give a JSON, JSON Lines or Parquet file, a tar, a folder of "
                "them, a pattern, or several of these separated by commas"
            )
        found += own
    twice = next((path for path, count in Counter(found).items() if count > 1), None)
    if twice is not None:
        raise ConfigError(f"{key} names {twice} twice; name it once (data.sources has epochs and weights)")
    return found


def in_folder(folder: Path) -> list[str]:
    """Return the files of records below a folder, without hidden files and without indexes."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and not name.endswith(INDEX)]
        found += [
            os.path.join(root, name) for name in names if name.lower().endswith(SUFFIXES) and not name.startswith(".")
        ]
    return sorted(found, key=os.fsencode)
