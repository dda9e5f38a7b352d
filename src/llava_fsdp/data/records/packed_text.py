"""Unpack compressed JSON Lines files (gzip, zstd) into the dataset's index, where they are read like any text file."""

import gzip
import importlib.util
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from llava_fsdp.data.index.worker_pool import BLOCK, Columns
from llava_fsdp.data.records.record import reading
from llava_fsdp.runtime.durable_files import replacing
from llava_fsdp.runtime.errors import ConfigError, DataError
from llava_fsdp.runtime.log import log

GZIP, ZSTD = ".jsonl.gz", ".jsonl.zst"
MOST_RATIO = 200
"""A file that unpacks to more than this many times its size is refused: text shrinks to a tenth, a bomb to a
thousandth."""


def is_packed(path: Path | str) -> bool:
    return str(path).lower().endswith((GZIP, ZSTD))


def check_unpacks(path: Path) -> None:
    """Raise ConfigError if a file is compressed with zstd and pyarrow, which unpacks it, is not installed."""
    if str(path).lower().endswith(ZSTD) and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"{path} is compressed with zstd, which needs pyarrow: pip install 'llava-fsdp[parquet]'")


@dataclass(frozen=True)
class Unpack:
    """Unpacks compressed files, each call one file."""

    paths: tuple[Path, ...]
    targets: tuple[Path, ...]
    """For each file, the text file to write."""

    def __call__(self, chunk: int) -> Columns:
        target = self.targets[chunk]
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, durable=True) as file:
            for block in blocks(self.paths[chunk]):
                file.write(block)
        log().info("%s: unpacked %d bytes into the index", self.paths[chunk], target.stat().st_size)
        return {"bytes": np.array([target.stat().st_size], dtype=np.int64)}

    def files(self) -> list[Path]:
        return [target.with_name("unpacked.npz") for target in self.targets]


def blocks(path: Path) -> Iterator[bytes]:
    """Yield the unpacked content of a file in blocks.

    Raises:
        DataError: the file is not whole, is not compressed as its name says, or unpacks to far more than text does.
        SourceError: the file cannot be read.
    """
    most, total = MOST_RATIO * max(BLOCK, path.stat().st_size), 0
    with reading(path), refused(path), opened(path) as file:
        while block := file.read(BLOCK):
            total += len(block)
            if total > most:
                raise DataError(
                    f"{path} unpacks to more than {MOST_RATIO} times its size, as text never does; take it from its "
                    "source again, or unpack it yourself if it is right"
                )
            yield block


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    if str(path).lower().endswith(GZIP):
        with gzip.open(path) as file:
            yield file  # pyright: ignore[reportReturnType]
        return
    import pyarrow

    with pyarrow.input_stream(str(path), compression="zstd") as file:
        yield file


@contextmanager
def refused(path: Path) -> Iterator[None]:
    """Context manager in which the errors of the unpacking libraries become DataError."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked ({error}); take it from its source again") from error
    except OSError as error:  # pyarrow's errors of damaged files have no errno
        if error.errno is not None:
            raise
        raise DataError(f"{path} cannot be unpacked ({error}); take it from its source again") from error
