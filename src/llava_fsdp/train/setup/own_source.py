"""Train on records that a program gives as an object. They are written to a file once, so that everything that reads a
dataset reads them: the index with its checks, data workers, and a run that continues."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from llava_fsdp.config import Config, Source
from llava_fsdp.runtime.errors import CommunicationError, ConfigError, SourceError
from llava_fsdp.runtime.files.durable_files import replacing
from llava_fsdp.runtime.files.run_dir import make_run_folder
from llava_fsdp.runtime.launch import env_rank
from llava_fsdp.train.events.reporting.metrics import storage_errors
from llava_fsdp.train.events.run_events import describe

FOLDER = "records"
"""Name of the folder, in the run's folder, with the records of a program's source."""


class RecordSource(Protocol):
    """Records by number. Each is a dict in one of the forms that a file may have (docs/data.md), such as
    `{"image": "7.jpg", "conversations": [...]}`."""

    @property
    def fingerprint(self) -> str:
        """A text that changes when a record changes. With the same text, a run that continues reads the records that
        were written before, and asks for none again."""
        ...

    @property
    def images(self) -> str | None:
        """Folder that the images' paths are relative to; None: no record has an image."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> dict[str, Any]: ...


def with_source(cfg: Config, source: RecordSource | None) -> Config:
    """Return a configuration that trains on the records of a program's source, which rank 0 writes into a file in
    `output_dir`. Other ranks wait for it, up to `comm.init_timeout` seconds. Without a source, return `cfg` unchanged.

    Raises:
        CommunicationError: rank 0 has not written the file in time.
        ConfigError: a dataset other than the generated one (`shapes`) is also configured, or the source lacks a member.
        SourceError: the source has raised an exception.
    """
    if source is None:
        return cfg
    if cfg.data.source is not Source.shapes:
        raise ConfigError(f"data.path={cfg.data.path} and the program's source are both given; leave one out")
    for name in ("fingerprint", "images", "__len__", "__getitem__"):
        if not hasattr(source, name):
            raise ConfigError(f"the program's source {type(source).__name__} has no {name}")
    name = hashlib.sha256(str(source.fingerprint).encode()).hexdigest()[:16]
    path = Path(cfg.output_dir) / FOLDER / f"{name}.jsonl"
    if path.parent.is_symlink():
        raise ConfigError(f"output_dir={cfg.output_dir}: {FOLDER} is a link, and a run writes there; remove it")
    if env_rank() == 0 and not path.is_file():
        make_run_folder(Path(cfg.output_dir), cfg.private)
        write_records(source, path)
    until = time.monotonic() + cfg.comm.init_timeout
    while not path.is_file():
        if time.monotonic() > until:
            raise CommunicationError(f"rank 0 has not written {path} within comm.init_timeout={cfg.comm.init_timeout}")
        time.sleep(0.2)
    data = replace(cfg.data, source=Source.llava_json, path=str(path), images=source.images, sources={})
    return replace(cfg, data=data)


def write_records(source: RecordSource, path: Path) -> None:
    """Write all records of a program's source into the file `path`, each as a line of JSON."""
    with storage_errors(path):
        path.parent.mkdir(exist_ok=True)
        with replacing(path, durable=True) as file:
            for number in range(len(source)):
                file.write(line_of(source, number))


def line_of(source: RecordSource, number: int) -> bytes:
    """Return record `number` of a program's source as a line of JSON. Raises SourceError if it gives no JSON dict."""
    try:
        record = source[number]
        if not isinstance(record, dict):
            raise TypeError(f"{record!r:.100} is no dict")
        return json.dumps(record).encode() + b"\n"
    except Exception as error:
        name = type(source).__name__
        raise SourceError(f"record {number} of the program's source {name} cannot be had: {describe(error)}") from error
