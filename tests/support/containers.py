"""Write the records of a dataset in LLaVA's form into files of every kind."""

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

Rows = Sequence[dict[str, Any]]


def names_of(row: dict[str, Any]) -> list[str]:
    named = row.get("image") or []
    return [named] if isinstance(named, str) else named


def lines(rows: Rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_json(path: Path, rows: Rows, _: Path) -> None:
    path.write_text(json.dumps(rows))


def write_lines(path: Path, rows: Rows, _: Path) -> None:
    path.write_bytes(lines(rows))


def write_gzip(path: Path, rows: Rows, _: Path) -> None:
    path.write_bytes(gzip.compress(lines(rows)))


def write_zstd(path: Path, rows: Rows, _: Path) -> None:
    with pyarrow.output_stream(str(path), compression="zstd") as file:
        file.write(lines(rows))


def write_paths(path: Path, rows: Rows, _: Path) -> None:
    made = [{**row, "image": names_of(row) or None} for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(made), path, row_group_size=10)


def write_images(path: Path, rows: Rows, images: Path, **options: Any) -> None:
    """As Hugging Face datasets writes it: structs of bytes and path, not compressed."""
    made = [
        {**row, "image": [{"bytes": (images / name).read_bytes(), "path": name} for name in names_of(row)] or None}
        for row in rows
    ]
    options = {"compression": "none", "use_dictionary": False, "row_group_size": 10} | options
    parquet.write_table(pyarrow.Table.from_pylist(made), path, **options)


def write_snappy(path: Path, rows: Rows, images: Path) -> None:
    write_images(path, rows, images, compression="snappy", use_dictionary=True)


def write_tar(path: Path, rows: Rows, images: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for number, row in enumerate(rows):
            members = {"json": json.dumps(row).encode()}
            for place, name in enumerate(names_of(row)):
                members[f"{place}.{name.rpartition('.')[2]}"] = (images / name).read_bytes()
            if len(members) > 2:  # several images are named in the record by their members
                members["json"] = json.dumps({**row, "image": list(members)[1:]}).encode()
            for extension, data in members.items():
                member = tarfile.TarInfo(f"{number:06d}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


CONTAINERS: dict[str, tuple[str, Callable[[Path, Rows, Path], None]]] = {
    "json": (".json", write_json),
    "lines": (".jsonl", write_lines),
    "gzip": (".jsonl.gz", write_gzip),
    "zstd": (".jsonl.zst", write_zstd),
    "parquet with paths": (".parquet", write_paths),
    "parquet with images": (".parquet", write_images),
    "parquet with compressed images": (".parquet", write_snappy),
    "tar": (".tar", write_tar),
}
"""For each kind of file, the suffix of its name and the function that writes it: (file, rows, folder of images)."""
HOLD_IMAGES = ("parquet with images", "parquet with compressed images", "tar")


def write_container(kind: str, folder: Path, rows: Rows, images: Path, files: int = 1) -> list[Path]:
    """Write rows into files of one kind, about as many rows into each."""
    suffix, write = CONTAINERS[kind]
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for number in range(files):
        own = rows[number * len(rows) // files : (number + 1) * len(rows) // files]
        made.append(folder / f"part-{number:04d}{suffix}")
        write(made[-1], own, images)
    return made
