"""Write the dataset of `planted` into files of other kinds, with what is wrong with each record there."""

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
from planted import planted
from pyarrow import parquet

from llava_fsdp.data.records.record import DECODER

TURNS = pyarrow.list_(
    pyarrow.struct([(name, pyarrow.string()) for name in ("from", "value", "role", "content", "image")])
)
IMAGE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
SCHEMA = pyarrow.schema({
    "id": pyarrow.string(),
    "conversations": TURNS,
    "messages": TURNS,
    "texts": pyarrow.list_(pyarrow.struct([("user", pyarrow.string()), ("assistant", pyarrow.string())])),
    "image": pyarrow.list_(IMAGE),
    "pictures": pyarrow.string(),
    "Video": pyarrow.list_(pyarrow.string()),
    "image_url": pyarrow.struct([("url", pyarrow.string())]),
})  # fmt: skip
Faults = list[str | None]
"""The fault of each record of a file; None: it has none."""


def parsed(raw: bytes) -> Any:
    """Return a record as parsed JSON; None if it cannot be parsed."""
    try:
        return DECODER.decode(raw.decode())
    except ValueError:
        return None


def names_of(record: Any) -> list[Any]:
    named = record.get("image") if isinstance(record, dict) else None
    return named if isinstance(named, list) else [named]


def is_held(name: Any, images: Path) -> bool:
    """Return whether an image is put into the container: a file in the folder of images, and no link out of it."""
    return (
        isinstance(name, str)
        and "\0" not in name
        and (images / name).is_file()
        and (images / name).resolve().parent == images.resolve()
    )


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def write_gzip(path: Path, _: Path) -> Faults:
    records = planted(True)
    path.write_bytes(gzip.compress(b"".join(raw + b"\n" for _, raw in records)))
    return [kind for kind, _ in records]


def write_tar(path: Path, images: Path) -> Faults:
    """Write each record as a sample; images that are files are members of it."""
    records = planted(True)
    with tarfile.open(path, "w") as tar:
        for number, (_, raw) in enumerate(records):
            record, members = parsed(raw), {}
            held = [name for name in names_of(record) if is_held(name, images)]
            if held:
                new = {name: f"{number:05d}.{place}.{name.replace('cut-', '')}" for place, name in enumerate(held)}
                members = {new[name]: (images / name).read_bytes() for name in held}
                named = [new.get(name, name) for name in names_of(record)]
                record["image"] = named if isinstance(record["image"], list) else named[0]
                raw = json.dumps(record).encode()
            for name, data in {f"{number:05d}.json": raw, **members}.items():
                add_member(tar, name, data)
    return [kind for kind, _ in records]


def write_rows(path: Path, images: Path, **options: Any) -> Faults:
    """Write the records that a table can hold; images that are files are bytes in it."""
    found: list[tuple[str | None, dict[str, Any]]] = []
    for kind, raw in planted(True):
        record = parsed(raw)
        if not isinstance(record, dict) or not record.keys() <= {*SCHEMA.names}:
            continue
        if record.get("image") is not None:
            record["image"] = [
                {"bytes": (images / name).read_bytes() if is_held(name, images) else None, "path": name}
                for name in names_of(record)
            ]
        try:
            pyarrow.RecordBatch.from_pylist([record], SCHEMA)
        except (pyarrow.ArrowException, UnicodeEncodeError):
            continue  # a table cannot hold it
        found.append((kind, record))
    table = pyarrow.Table.from_pylist([record for _, record in found], SCHEMA)
    parquet.write_table(table, path, row_group_size=17, **options)
    return [kind for kind, _ in found]


def write_plain_rows(path: Path, images: Path) -> Faults:
    return write_rows(path, images, compression="none", use_dictionary=False)


def write_packed_rows(path: Path, images: Path) -> Faults:
    return write_rows(path, images, compression="zstd")


PLANTED_IN: dict[str, tuple[str, Callable[[Path, Path], Faults]]] = {
    "gzip": (".jsonl.gz", write_gzip),
    "tar": (".tar", write_tar),
    "parquet": (".parquet", write_plain_rows),
    "parquet, compressed": (".parquet", write_packed_rows),
}
"""For each kind of file, the suffix of its name and the function that writes it: (file, folder of images)."""
