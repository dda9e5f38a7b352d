"""Decompress JSON Lines files (gzip, zstd) into the dataset's index folder, and copy remote JSON files there, so that
their records can be read like those of any text file."""

import gzip
import importlib.util
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llava_fsdp.config import is_remote
from llava_fsdp.data.columns import BLOCK, Columns
from llava_fsdp.data.containers.data_files import DataFiles
from llava_fsdp.data.containers.file_reader import Reader
from llava_fsdp.data.containers.parquet.parquet_container import ReaderFile
from llava_fsdp.data.records.record import LINES
from llava_fsdp.runtime.errors import ConfigError, DataError
from llava_fsdp.runtime.files.durable_files import replacing
from llava_fsdp.runtime.text.log import log

GZIP, ZSTD = tuple(f"{own}.gz" for own in LINES), tuple(f"{own}.zst" for own in LINES)
"""Suffixes of compressed JSON Lines files."""
MOST_RATIO = 200
"""Greatest factor by which a file may grow when it is decompressed. Text grows about tenfold, a decompression bomb a
thousandfold."""


def is_copied(path: str) -> bool:
    """Return whether a file of records is a compressed or remote text file, which is read from a copy in the index
    folder."""
    return path.lower().endswith((*GZIP, *ZSTD)) or (is_remote(path) and path.lower().endswith((".json", *LINES)))


def copy_name(path: str) -> str:
    return "copy.json" if path.lower().endswith(".json") else "copy.jsonl"


def check_unpacks(path: str) -> None:
    """Raise ConfigError if a file is compressed with zstd and pyarrow, which decompresses it, is not installed."""
    if path.lower().endswith(ZSTD) and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"{path} is compressed with zstd, which needs pyarrow: pip install 'llava-fsdp[parquet]'")


@dataclass(frozen=True)
class Unpack:
    """Decompresses local files of records and copies remote ones, in worker processes: each call one of `paths`."""

    paths: tuple[str, ...]
    targets: tuple[Path, ...]
    """For each file, the text file to write."""
    data_files: DataFiles

    def __call__(self, chunk: int) -> Columns:
        """Write one file's text, and return its size as the column `bytes`."""
        target = self.targets[chunk]
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, durable=True) as file:
            for block in blocks(self.data_files.open(self.paths[chunk])):
                file.write(block)
        log().info("%s: wrote %d bytes into the index", self.paths[chunk], target.stat().st_size)
        return {"bytes": np.array([target.stat().st_size], dtype=np.int64)}

    def files(self) -> list[Path]:
        return [target.with_name("copy.npz") for target in self.targets]


def blocks(packed: Reader) -> Iterator[bytes]:
    """Yield the decompressed content of a file in blocks; a file without a suffix of GZIP and ZSTD as it is.

    Raises:
        DataError: the file is not whole, is not compressed as its name says, or unpacks to far more than text does.
        SourceError: the file cannot be read.
    """
    path = packed.name
    most, total = MOST_RATIO * max(BLOCK, packed.size), 0
    with refused(path), opened(packed) as file:
        while block := file.read(BLOCK):
            total += len(block)
            if total > most:
                raise DataError(
                    f"{path} unpacks to more than {MOST_RATIO} times its size, as text never does; take it from its "
                    "source again, or unpack it yourself if it is right"
                )
            yield block


@contextmanager
def opened(packed: Reader) -> Iterator[Any]:
    """Context manager that opens a file to read its content, which is decompressed if its suffix is of GZIP or ZSTD."""
    path, raw = packed.name.lower(), io.BufferedReader(ReaderFile(packed), BLOCK)
    if path.endswith(GZIP):
        with gzip.open(raw) as file:
            yield file
    elif path.endswith(ZSTD):
        import pyarrow

        with pyarrow.input_stream(pyarrow.PythonFile(raw, mode="r"), compression="zstd") as file:
            yield file
    else:
        yield raw


@contextmanager
def refused(path: str) -> Iterator[None]:
    """Context manager in which errors of the decompression libraries become DataErrors."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked ({error}); take it from its source again") from error
    except OSError as error:  # pyarrow's errors of damaged files have no errno
        if error.errno is not None:
            raise
        raise DataError(f"{path} cannot be unpacked ({error}); take it from its source again") from error
