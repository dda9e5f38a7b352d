"""Make or open the index of a dataset: a folder of .npy columns and JSON, made once and memory-mapped by all readers.

    known.json               the KEY of each known state of the source files, by the files' sizes and times
    lock                     held by the one process that builds the index
    pictures-KEY.looked      changes whenever all bad images have been examined again
    KEY/texts                positions of the records (`Texts`); KEY depends on the content of the source files
    KEY/records              columns with properties of the records
    KEY/pictures-KEY.N       columns with properties of the records' images; a new N when a bad image was fixed
    KEY/encoded-KEY          columns for one tokenizer, template and maximum length

A folder gets its final name when it is complete, so any folder that exists may be read. Ranks need no collectives: the
first process builds the index, under a lock that the system releases if the process dies; the next process then
continues its work.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from llava_fsdp.config import DataConfig, Pixels, TooLong
from llava_fsdp.data.images.preprocess import ImageReader
from llava_fsdp.data.index.duplicate_ids import DUPLICATES, read_facts
from llava_fsdp.data.index.examine_passes import ExaminePictures, Pass, ReadRecords
from llava_fsdp.data.index.integrity import DONE, check_part, damaged, read_json, read_rows
from llava_fsdp.data.index.record_store import SourceFile, Texts, sources_of, split
from llava_fsdp.data.index.source_state import check_unchanged, find_state, read_known, short, stamp
from llava_fsdp.data.index.token_pass import LOSSES, EncodeRecords
from llava_fsdp.data.index.worker_pool import BLOCK, ROWS, chunk_file, join, open_column, run_chunks
from llava_fsdp.data.records import parquet
from llava_fsdp.data.text.encode import Encoder, ExactEncoder
from llava_fsdp.runtime.errors import BuildError, LlavaFsdpError, SourceError
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.progress import Watch

LOCK = "lock"
SILENT = 5.0
"""If another process holds the lock, waiting for it is logged only after this many seconds."""
CHUNKS = {"records": 8192, "pictures": 1024, "encoded": 1024}
"""For each pass over the dataset, the number of records in a chunk; a chunk takes a few seconds."""
ENCODED_FORMAT = 2
"""Version of what the pass over tokens makes of a record with the same encoder. 2: system turns are read."""


@dataclass(frozen=True)
class Plan:
    """Everything that an index is made from (dataset, encoder, image reader), and the number of worker processes to
    make it."""

    cfg: DataConfig
    encoder: Encoder
    reader: ImageReader
    workers: int

    @property
    def whole_encoder(self) -> Encoder:
        """The encoder, changed to truncate long records. Whether they are skipped or stop the run is decided each time
        the index is used."""
        encoder = self.encoder
        return replace(encoder, too_long=TooLong.truncate) if isinstance(encoder, ExactEncoder) else encoder


@dataclass(frozen=True)
class Index:
    """An opened dataset index: its folders of columns, and counts of what is lost by truncation."""

    folder: Path
    """Folder of the whole index, with a subfolder for each state of the dataset's files."""
    texts: Texts
    records: Path
    pictures: Path
    encoded: Path
    limits: list[int]
    """Maximum lengths in tokens for which the losses by truncation were counted."""
    losses: np.ndarray
    """What is lost by truncation at each maximum length, int64 [sources, limits, counts]; LOSSES names the counts."""

    def __len__(self) -> int:
        return len(self.texts)

    def flags(self, begin: int, end: int) -> np.ndarray:
        """Return the problems of the records [begin, end) as bits (`problems.BITS`), uint32 [end - begin]."""
        parts = [open_column(f, "flags")[begin:end] for f in (self.records, self.pictures, self.encoded)]
        return parts[0] | parts[1] | parts[2]

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the problem bits of all records in blocks, as pairs (number of the block's first record, bits uint32
        [block])."""
        for begin in range(0, len(self), BLOCK):
            yield begin, self.flags(begin, begin + BLOCK)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each problem found as a dict with record, id, kind and reason, in the order of the passes over the
        dataset, and of the records within a pass."""
        for path in (self.records / ROWS, self.records / DUPLICATES, self.pictures / ROWS, self.encoded / ROWS):
            yield from read_rows(path.with_suffix(".jsonl"))


def open_index(plan: Plan, watch: Watch, look_again: bool = False, since: str | None = None) -> Index:
    """Open the dataset's index. If it is missing or incomplete, make or complete it first.

    Args:
        look_again: read the sources and every bad image again, because they may have been fixed.
        since: an earlier result of `last_look`. If another process has examined all bad images since then, they are not
            examined once more.

    Raises:
        DataError: a source is not a list of records.
        ConfigError: a path does not exist.
        BuildError: the index cannot be written.
        SourceError: a source cannot be read, or changes while it is read.
        DamagedError: files of the index have changed or are missing.
    """
    sources = sources_of(plan.cfg)
    folder = plan.cfg.index_folder

    def look_up() -> Index | None:
        looked = not look_again or (since is not None and last_look(plan) != since)
        return find(plan, sources, folder) if looked else None

    found = look_up()
    if found is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / LOCK):
            found = look_up()  # another process may have made the index while this one waited for the lock
            return build(plan, sources, folder, watch, look_again) if found is None else found
    except LlavaFsdpError as error:
        error.on_every_rank = False  # only the rank that builds has this error; the others may still wait for the lock
        raise
    except OSError as error:
        if is_foreign(error, folder):
            raise SourceError(
                f"{error.filename} cannot be read ({error}); what is done is kept: run it again"
            ) from error
        raise BuildError(
            f"the index of the dataset cannot be written to {folder} ({error}); name another folder: data.index=DIR"
        ) from error


def is_foreign(error: OSError, folder: Path) -> bool:
    """Return whether an OSError is about a file that is not part of the index in `folder`."""
    if not isinstance(error.filename, (str, bytes)):
        return False
    path, own = os.path.abspath(os.fsdecode(error.filename)), os.path.abspath(folder)
    return not (path == own or path.startswith(f"{own}{os.sep}") or own.startswith(f"{path}{os.sep}"))


def look_file(plan: Plan) -> Path:
    return plan.cfg.index_folder / f"{pictures_name(plan)}.looked"


def last_look(plan: Plan) -> str:
    """Return a text that changes each time a process has examined all bad images of the index again."""
    path = look_file(plan)
    return path.read_text(errors="replace") if path.is_file() else ""


def note_look(plan: Plan) -> None:
    look_file(plan).write_text(secrets.token_hex(8))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Context manager that holds a file lock; the system releases the lock if this process dies."""
    with path.open("w") as file:
        until = time.monotonic() + SILENT
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    log().info("the index is being made by another rank of this run, or by another run; waiting for it")
                    fcntl.flock(file, fcntl.LOCK_EX)
                    break
                time.sleep(0.02)
        yield


def find(plan: Plan, sources: list[SourceFile], folder: Path) -> Index | None:
    """Return the existing index of the sources. None if there is no complete one for the present sizes and modification
    times of the source files."""
    known = read_known(folder).get(stamp(sources, plan.cfg.max_record_bytes))
    if known is None:
        return None
    state = folder / known["key"]
    pictures = newest(state / pictures_name(plan))
    if pictures is None or not ((state / "texts").is_dir() and (state / "records").is_dir()):
        return None
    encoded = state / encoded_name(plan, pictures)
    return opened(folder, state, pictures, encoded) if encoded.is_dir() else None


def opened(folder: Path, state: Path, pictures: Path, encoded: Path) -> Index:
    for part in (state / "texts", state / "records", pictures, encoded):
        check_part(part, whole=False)
    texts = Texts(state / "texts")
    facts = read_json(encoded / DONE)
    try:
        limits, losses = facts["limits"], np.array(facts["losses"], dtype=np.int64)
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise damaged(encoded / DONE, "it is not what was written") from error
    return Index(folder, texts, state / "records", pictures, encoded, limits, losses)


def build(plan: Plan, sources: list[SourceFile], folder: Path, watch: Watch, look_again: bool) -> Index:
    """Make all missing parts of the index and open it. The caller must hold the lock."""
    most = plan.cfg.max_record_bytes
    begun = stamp(sources, most)
    known = find_state(sources, folder, most, watch, look_again)
    state = folder / known["key"]
    state.mkdir(exist_ok=True)
    before = set(state.iterdir())
    for part in before:
        if part.is_dir() and is_part(part.name):
            check_part(part, whole=look_again)

    def check() -> None:
        check_unchanged(sources, most, begun, lambda: undo(state, before))

    if not (state / "texts").is_dir():
        written = [write_texts(s, state / f"rows-{n}", plan, watch) for n, s in enumerate(sources)]
        with watch("finding records", 1) as advance:
            own = [source for source, _ in written]
            split(own, state / "texts", [text for _, text in written], known["fingerprint"], most, check)
            advance(1)
    for parts in (state / "texts.parts", *state.glob("rows-*.parts")):
        clear(parts)
    reading = ReadRecords(state / "texts", CHUNKS["records"])
    make(reading, state / "records", plan.workers, watch, "reading records", read_facts)
    pictures = examine_pictures(plan, state, watch, look_again)
    encoded = state / encoded_name(plan, pictures)
    encoding = EncodeRecords(
        state / "texts", CHUNKS["encoded"], state / "records", pictures, plan.whole_encoder, plan.reader
    )
    make(encoding, encoded, plan.workers, watch, "counting tokens", encoded_facts)
    check()
    return opened(folder, state, pictures, encoded)


def is_part(name: str) -> bool:
    """Return whether a folder is a complete part of an index, judged by the folder's name."""
    return name in ("texts", "records") or (
        name.startswith(("pictures-", "encoded-")) and not name.endswith((".parts", ".tmp"))
    )


def undo(state: Path, before: set[Path]) -> None:
    """Delete the parts of an index that were made while the source files changed. These parts may be wrong, and they
    would be taken for valid if the files changed back.

    Args:
        state: folder of the index for one state of the source files.
        before: content of `state` before the parts were made, which is kept.
    """
    for path in state.iterdir():
        if path not in before or path.suffix == ".parts":
            clear(path)


def write_texts(source: SourceFile, folder: Path, plan: Plan, watch: Watch) -> tuple[SourceFile, Path]:
    """Write the rows of a Parquet source as a JSON Lines file; do nothing for a source that is a text file.

    Returns:
        (source, path of the text file with its records). If images were embedded in the rows, `images` of the source is
        the folder to which they were extracted.
    """
    path = Path(source.path)
    if not parquet.is_parquet(path):
        return source, path
    file = parquet.open_file(path, source.keys)
    task = parquet.WriteRows(path.absolute(), folder.absolute(), plan.cfg.max_record_bytes, source.keys)
    groups = file.num_row_groups
    if not task.whole.is_file():
        with watch("reading Parquet", groups) as advance:
            run_chunks(task, parts_of(folder), groups, plan.workers, advance)
        task.gather(groups, parts_of(folder))
    task.drop_groups(groups)
    images = task.images()
    return source if images is None else replace(source, images=str(images)), task.whole


P = TypeVar("P", bound=Pass)
Finish = Callable[[P, Path, Path], dict[str, Any]]
"""Function that completes a pass over the dataset: (pass, folder of its chunks, folder of the joined columns) -> facts
to store in `done.json`. It may add files to the folder of joined columns."""


def make(task: P, target: Path, workers: int, watch: Watch, label: str, finish: Finish[P], keep: bool = False) -> None:
    if target.is_dir():
        return
    parts = parts_of(target)
    with watch(label, task.chunks) as advance:
        run_chunks(task, parts, task.chunks, workers, advance)
    join(parts, task.chunks, target, lambda staged: finish(task, parts, staged))
    if not keep:
        clear(parts)


def parts_of(target: Path) -> Path:
    """Return the folder of the chunk files that are joined to `target`, the result folder of a pass over the dataset.
    All versions of the result (NAME.0, NAME.1, ...) share it."""
    return target.with_name(f"{target.name.partition('.')[0]}.parts")


def clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def scaled(plan: Plan) -> bool:
    return plan.cfg.pixels is not Pixels.llava_v1_5


def pictures_name(plan: Plan) -> str:
    return f"pictures-{short(plan.cfg.examine.value, plan.cfg.allow_links, scaled(plan))}"


def encoded_name(plan: Plan, pictures: Path) -> str:
    """Return the name of the folder with the columns that depend on the encoder. The name also depends on the image
    reader and on the version of the columns about images."""
    reader = plan.reader
    places = reader.fingerprint, reader.tokens.aspect.value, reader.pixels.value, pictures.name
    return f"encoded-{short(ENCODED_FORMAT, plan.encoder.fingerprint, places)}"


def newest(folder: Path) -> Path | None:
    """Return the newest version of a pass's result: of the folders named `folder`.N, the one with the highest N. None
    if there is no such folder."""
    versions = [p for p in folder.parent.glob(f"{folder.name}.*") if p.suffix[1:].isdigit()]
    return max(versions, key=lambda p: int(p.suffix[1:]), default=None)


def examine_pictures(plan: Plan, state: Path, watch: Watch, look_again: bool) -> Path:
    """Run the pass that examines all images, and return the folder of its result.

    With `look_again`, bad images are examined again, and chunks with an image that was fixed are computed anew. This
    needs all chunk files, so they are kept.
    """
    cfg = plan.cfg
    looking = cfg.examine, scaled(plan), cfg.allow_links
    task = ExaminePictures(state / "texts", CHUNKS["pictures"], state / "records", *looking)
    base = state / pictures_name(plan)
    last = newest(base)
    if last is not None:
        fixed = fixed_chunks(task, last) if look_again else []
        if not fixed:
            if look_again:
                note_look(plan)
            return last
        for chunk in fixed:
            chunk_file(parts_of(base), chunk).unlink(missing_ok=True)
    is_new = last is not None or not parts_of(base).is_dir()  # otherwise chunks of an interrupted pass are reused
    target = Path(f"{base}.{0 if last is None else int(last.suffix[1:]) + 1}")
    make(task, target, plan.workers, watch, "examining images", lambda *_: {}, keep=True)
    if is_new:
        note_look(plan)
    return target


def fixed_chunks(task: ExaminePictures, folder: Path) -> list[int]:
    """Examine the bad images again, and return the numbers of the chunks that have a record whose problems have
    changed.

    Args:
        folder: result of the earlier pass.
    """
    flags = open_column(folder, "flags")
    fixed = {
        number // task.size
        for number in np.flatnonzero(flags).tolist()
        if task.of(range(number, number + 1))["flags"][0] != flags[number]
    }
    return sorted(fixed)


def encoded_facts(task: EncodeRecords, parts: Path, staged: Path) -> dict[str, Any]:
    shape = len(task.texts.sources), len(task.limits), len(LOSSES)
    losses = open_column(staged, "losses").reshape(-1, *shape).sum(axis=0)
    (staged / "losses.npy").unlink()
    return {"limits": task.limits, "losses": losses.tolist()}
