"""Verify, by reading them again, that the records and images from which a dataset's index was made are unchanged.

Training recognizes unchanged files by size and modification time, and does not examine an image again that was once
good. Only this check finds a change that leaves both size and time as they were.
"""

import json
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from llava_fsdp.data.columns import ROWS, Columns, column, rows_column
from llava_fsdp.data.containers.data_files import open_folder
from llava_fsdp.data.containers.location import ImageLocation
from llava_fsdp.data.images.check import ImageInContainer, image_in, read_file
from llava_fsdp.data.images.video import video_digest
from llava_fsdp.data.index.build import CHUNKS, Index, Plan, find_index
from llava_fsdp.data.index.examine.examine_passes import PictureNames
from llava_fsdp.data.index.integrity import check_part
from llava_fsdp.data.index.record_store import RecordStore, sources_of
from llava_fsdp.data.index.worker_pool import chunk_file, chunk_files, open_column, run_chunks
from llava_fsdp.data.records.record import INLINE, is_container, is_video
from llava_fsdp.data.records.rows import all_lines
from llava_fsdp.runtime.errors import ConfigError, DataError
from llava_fsdp.runtime.text.progress import Watch

SHOWN = 20
"""Greatest number of changed records and images that an error message lists."""


@dataclass(frozen=True)
class CompareContent:
    """Reads records and images again, and compares them with stored checksums. A call with the number of a chunk of
    records returns the array `rows`, which lists what has changed in it.

    Records of Parquet files and tars are not compared here (see `changed_rows`). Images that have problems or were not
    decoded before have no checksum and are not compared.
    """

    store: RecordStore
    size: int
    """Number of records in a chunk."""
    records_folder: Path
    pictures_folder: Path

    @cached_property
    def names(self) -> PictureNames:
        return PictureNames(self.records_folder)

    @cached_property
    def digests(self) -> tuple[np.ndarray, np.ndarray]:
        """The stored checksums: two uint64 arrays, with one value per record and one per image."""
        return open_column(self.records_folder, "digest"), open_column(self.pictures_folder, "digest")

    def __call__(self, chunk: int) -> Columns:
        """Compare the records of a chunk and their images with the stored checksums. Return the column ROWS: JSON
        Lines, each {"changed": text that names a record or image and says what differs}."""
        changed: list[str] = []
        digests_now: dict[Path | ImageInContainer, int | str] = {}
        records, images = self.digests
        for number in range(chunk * self.size, min(len(self.store), (chunk + 1) * self.size)):
            source, _ = self.store.locate(number)
            in_text = not is_container(source.path)  # `changed_rows` compares other records
            if in_text and records[number] and xxh3_64_intdigest(self.store.read(number)) != records[number]:
                changed.append(f"{self.store.name(number)} is not what it was")
            first = int(self.names.first[number])
            names = self.names.names_of(number)
            inline = self.store.record(number).inline if is_container(source.path) and names else {}
            for place, name in enumerate(names):
                digest_before, location = int(images[first + place]), inline.get(name)
                if isinstance(location, ImageLocation):
                    file: Path | ImageInContainer = ImageInContainer(location, self.store.data_files)
                elif name.startswith(INLINE) or source.images is None:  # an image in the text is in the record's digest
                    continue
                else:
                    file = image_in(open_folder(source.images, self.store.data_files), name)
                if not digest_before:  # the image was not decoded when the index was made, or is bad
                    continue
                digest_now = digests_now[file] if file in digests_now else digests_now.setdefault(file, digest_of(file))
                if digest_now != digest_before:
                    difference = f": {digest_now}" if isinstance(digest_now, str) else " is not what it was"
                    changed.append(f"image {file}{difference}, of {self.store.name(number)}")
        return {ROWS: rows_column([{"changed": difference} for difference in changed])}


def digest_of(path: Path | ImageInContainer) -> int | str:
    """Return the xxh3 checksum of an image or video, or a text with the reason if it cannot be read."""
    try:
        if isinstance(path, Path) and is_video(path):
            return video_digest(path, "now")  # "now" begins the reason
        return xxh3_64_intdigest(read_file(path, "now"))
    except DataError as error:
        return str(error)


def verify_index(plan: Plan, watch: Watch) -> tuple[int, int]:
    """Check that all records and images are those from which the index was made. Return how many records and images
    were compared.

    Raises:
        ConfigError: there is no complete index of the present files.
        DataError: records or images have changed; the message names them.
        DamagedError: a file of the index is not what was written.
    """
    folder = plan.cfg.index_folder
    index = find_index(plan, sources_of(plan.cfg), folder)
    if index is None:
        raise ConfigError(
            f"verify=true: {folder} has no whole index of these files with their present size and time. To make it, "
            "run llava-fsdp prepare with the same keys, without verify"
        )
    for part in (index.store.folder, index.records, index.pictures, index.encoded):
        check_part(part, whole=True)
    changed = changed_rows(index) + compare(index, plan.workers, watch)
    if changed:
        more_line = [f"... and {len(changed) - SHOWN:,} more"] if len(changed) > SHOWN else []
        cure = f"take the files from their source again; if the change is meant, delete {folder}, and it is made again"
        raise DataError("\n".join([
            f"{len(changed):,} records or images are not what the index {folder} was made of",
            *changed[:SHOWN], *more_line, cure,
        ]))  # fmt: skip
    return len(index), int(np.count_nonzero(open_column(index.pictures, "digest")))


def compare(index: Index, workers: int, watch: Watch) -> list[str]:
    """Return a description of each image, and of each record in a text file, that has changed."""
    task = CompareContent(index.store, CHUNKS["pictures"], index.records, index.pictures)
    chunks = -(-len(index) // task.size)
    with tempfile.TemporaryDirectory(prefix="llava_fsdp_verify_") as folder:
        with watch("reading everything again", chunks) as advance:
            run_chunks(task, chunk_files(Path(folder), chunks), workers, advance)
        found = [column(chunk_file(Path(folder), chunk), ROWS).tobytes() for chunk in range(chunks)]
    return [json.loads(line)["changed"] for chunk in found for line in chunk.splitlines()]


def changed_rows(index: Index) -> list[str]:
    """Describe each record in a Parquet file or a tar that has changed since the index was made, and each such file
    that has another number of records."""
    digests_before, store = open_column(index.records, "digest"), index.store
    changed = []
    for part in store.parts:
        path, begin, end = part.file.path, part.first, part.first + part.count
        if not is_container(path):
            continue
        digests = [
            xxh3_64_intdigest(line) for line in all_lines(path, part.file.keys, store.most_bytes, store.data_files)
        ]
        if len(digests) != end - begin:
            changed.append(f"{path} has {len(digests):,} records, and had {end - begin:,}")
        pairs = zip(range(begin, end), digests, strict=False)
        changed += [f"{store.name(n)} is not what it was" for n, digest in pairs if digest != digests_before[n]]
    return changed
