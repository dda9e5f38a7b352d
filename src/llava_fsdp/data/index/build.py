"""Make or open the index of a dataset: a folder of .npy columns (arrays with one value per record or image) and JSON
files, made once and memory-mapped by all processes.

    known.json               the KEY of each known state of the dataset's files, by the files' sizes and times
    lock                     held by the one process that builds the index
    pictures-KEY.looked      changes whenever all bad images have been examined again
    digests.json             the digest of each file of records, by its size and time
    chunks/PASS/KEY-N.npz    columns of N and the following records of one file of records; KEY depends on its content
    rows/KEY                 the records of a Parquet file, a tar, or a compressed or remote file, as JSON, and an .npz
                             file with counts of bytes that were met while they were read
    KEY/texts                positions of the records (`RecordStore`); KEY depends on the content of all their files
    KEY/records              columns with properties of the records; KEY/records-videos if their videos are read
    KEY/pictures-KEY.N       columns with properties of the records' images; a new N when a bad image was fixed
    KEY/encoded-KEY          columns for one tokenizer, template and maximum length, with a value for each sample
    KEY/kept-KEY             the columns that a training uses, without the skipped records (`shared_column`)
    orders/KEY.npy           the order of the samples of a large epoch (`shared_column`)

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
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from llava_fsdp.config import FULL_WEIGHT, DataConfig, Examine, Pixels, TooLong
from llava_fsdp.data.columns import BLOCK, ROWS, column, write_column
from llava_fsdp.data.containers.data_files import CacheFolder
from llava_fsdp.data.images.image_source import ImageSource
from llava_fsdp.data.index.examine.duplicate_ids import DUPLICATES, read_facts
from llava_fsdp.data.index.examine.examine_passes import NAME_SIZE, UNREAD, DatasetPass, ExaminePictures, ReadRecords
from llava_fsdp.data.index.examine.image_sample import Examined
from llava_fsdp.data.index.integrity import DONE, check_part, damaged_index, read_json, read_rows
from llava_fsdp.data.index.record_store import (
    DataSource,
    FindRecords,
    RecordStore,
    SourceFile,
    TextFile,
    files_of,
    join_positions,
    open_data_files,
    sources_of,
)
from llava_fsdp.data.index.source_state import check_unchanged, find_state, read_known, short_digest, stamp
from llava_fsdp.data.index.token_pass import (
    FIRST_TURN,
    LABEL_WEIGHT,
    LAST_TURN,
    LOSSES,
    LOSSES_COLUMN,
    ROW_COUNTS,
    TAUGHT,
    TAUGHT_COLUMN,
    EncodeRecords,
)
from llava_fsdp.data.index.worker_pool import join, open_column, run_chunks
from llava_fsdp.data.processor.encoder import ProcessorEncoder
from llava_fsdp.data.records.packed_text import Unpack, copy_name, is_copied
from llava_fsdp.data.records.record import is_container
from llava_fsdp.data.records.rows import RowsFile, WriteRows
from llava_fsdp.data.text.encode import Encoder, ExactEncoder
from llava_fsdp.runtime.errors import BuildError, LlavaFsdpError, SourceError
from llava_fsdp.runtime.files.small_json import BadJson, kinds_of, require_kinds
from llava_fsdp.runtime.text.log import log
from llava_fsdp.runtime.text.progress import Watch

LOCK = "lock"
SILENT = 5.0
"""Number of seconds after which waiting for another process that holds the lock is logged."""
DECODED_AT_MOST = 1_000_000
"""Number of images up to which `data.examine=auto` decodes all, which takes more than an hour on one core. From a
larger dataset, it decodes a sample."""
CHUNKS = {"records": 8192, "pictures": 1024, "encoded": 1024}
"""For each pass over the dataset, the number of records in one chunk, which takes a few seconds."""
EXAMINED = "examined"
"""Key for the fields of `Examined` in `done.json`, in the folder of the columns about images."""
ENCODED_FORMAT = 5
"""Version of the columns about tokens, increased whenever the same encoder gives other values (4: a value for each
sample, of which a record may have several; 5: weights)."""


@dataclass(frozen=True)
class Plan:
    """What the index of a dataset is made from, and the number of worker processes that make it."""

    cfg: DataConfig
    encoder: Encoder
    reader: ImageSource
    workers: int

    @property
    def cache(self) -> CacheFolder:
        return CacheFolder(self.cfg.cache_folder / "images", self.cfg.cache_gb)

    @property
    def opens_all(self) -> bool:
        """Whether every image of the dataset is opened before training, at least to read its size. With `data.examine`
        decode and head it is; with sample only if the sizes are needed; with lazy it is not."""
        reader, examine = self.reader, self.cfg.examine
        # LLaVA cannot read an image 1 pixel high: with its pixels, such images are found before training
        by_size = reader.needs_size(1) or reader.pixels is Pixels.llava_v1_5
        return examine in (Examine.decode, Examine.head) or (examine is Examine.sample and by_size)

    @property
    def sized_by_records(self) -> ImageSource | None:
        """With `data.examine=lazy`, the image reader if it counts tokens by sizes, which records must then give."""
        return self.reader if self.cfg.examine is Examine.lazy and self.reader.needs_size(1) else None

    def with_examine_chosen(self, records: Path) -> "Plan":
        """Return this plan with `data.examine=auto` replaced by `decode`, or by `sample` for a dataset with very many
        images. `records`: folder of the columns about records, from which the number of images is read."""
        if self.cfg.examine is not Examine.auto:
            return self
        # the column has the index of each record's first image, and at its end the number of all images
        images = int(open_column(records, "first_picture")[-1])
        how = Examine.decode if images <= DECODED_AT_MOST else Examine.sample
        return replace(self, cfg=replace(self.cfg, examine=how))

    @property
    def records_name(self) -> str:
        """Name of the folder of columns about records, which depend on whether videos are read."""
        return "records" if self.reader.sampling is None else "records-videos"

    @property
    def whole_encoder(self) -> Encoder:
        """The encoder, set (if it can be) to truncate long records, so that the index is the same for every value of
        `data.too_long`. Whether long records are skipped or stop the run is decided when the dataset is opened."""
        encoder = self.encoder
        if isinstance(encoder, ExactEncoder | ProcessorEncoder):
            return replace(encoder, too_long=TooLong.truncate)
        return encoder


@dataclass(frozen=True)
class Index:
    """The opened index of a dataset."""

    folder: Path
    """Folder of the whole index, with a subfolder for each state of the dataset's files."""
    store: RecordStore
    records: Path
    pictures: Path
    encoded: Path
    """Folder of the columns about tokens; `records` and `pictures` likewise for records and images."""
    limits: list[int]
    """Maximum lengths in tokens for which the loss by truncation was counted."""
    losses: np.ndarray
    """Counts of what truncation at each maximum length loses, int64 [data sources, limits, LOSSES]."""
    taught: np.ndarray
    """Counts of what is learnt, int64 [data sources, TAUGHT]."""
    first_sample: np.ndarray | None = None
    """Number of the first sample of each record, followed by the number of all samples, int64 [records + 1]; None if
    each record gives one sample."""
    examined: Examined | None = None
    """With `data.examine=sample` or `lazy`, how many images were decoded; None: all were opened."""
    unread_keys: dict[str, dict[str, int]] = field(default_factory=dict)
    """{data source: {key of its records that is not read and could change what is learnt: number of records}}."""

    def __len__(self) -> int:
        return len(self.store)

    def flags(self, begin: int, end: int) -> np.ndarray:
        """Return the problems of the records begin to end - 1 as bits (`problems.BITS`), uint32 [end - begin]."""
        parts = [open_column(f, "flags")[begin:end] for f in (self.records, self.pictures, self.encoded)]
        return parts[0] | parts[1] | parts[2]

    @property
    def num_samples(self) -> int:
        return len(self) if self.first_sample is None else int(self.first_sample[-1])

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the problems of all records in blocks: (number of the block's first record, uint32 [block])."""
        for begin in range(0, len(self), BLOCK):
            yield begin, self.flags(begin, begin + BLOCK)

    def problems(self) -> Iterator[dict[str, Any]]:
        """Yield the problems as dicts with record (number), id, kind and reason: first those found when reading
        records, then duplicate ids, problems of images, and problems of token counts."""
        for path in (self.records / ROWS, self.records / DUPLICATES, self.pictures / ROWS, self.encoded / ROWS):
            yield from read_rows(path.with_suffix(".jsonl"))


CHUNKS_FOLDER, ROWS_FOLDER = "chunks", "rows"


def open_index(plan: Plan, watch: Watch, look_again: bool = False, since: str | None = None) -> Index:
    """Open the index of a dataset. If it is missing or incomplete, make or complete it first.

    Args:
        plan: what the index is made from.
        watch: shows the progress of long work.
        look_again: whether to read the files of records and every bad image again, because they may have been fixed.
        since: a text that `last_look` returned earlier. If it has changed, another process has examined all bad images
            since then, and they are not examined here.

    Raises:
        DataError: a file is not a list of records.
        ConfigError: a path does not exist.
        BuildError: the index cannot be written.
        SourceError: a file of records cannot be read, or changes while it is read.
        DamagedError: files of the index have changed or are missing.
    """
    sources = sources_of(plan.cfg)
    folder = plan.cfg.index_folder

    def look_up() -> Index | None:
        # with `look_again`, what is there will do only if another process has examined the bad images since then
        is_enough = not look_again or (since is not None and last_look(plan) != since)
        return find_index(plan, sources, folder) if is_enough else None

    found = look_up()
    if found is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with holding_lock(folder / LOCK):
            found = look_up()  # another process may have made the index while this one waited for the lock
            return build_index(plan, sources, folder, watch, look_again) if found is None else found
    except LlavaFsdpError as error:
        error.on_every_rank = False  # only the rank that builds has this error; the others may still wait for the lock
        raise
    except OSError as error:
        # the error is about a file outside the index, such as a file of records
        if is_foreign(error, folder):
            raise SourceError(
                f"{error.filename} cannot be read ({error}); what is done is kept: run it again"
            ) from error
        raise BuildError(
            f"the index of the dataset cannot be written to {folder} ({error}); name another folder: data.index=DIR"
        ) from error


def is_foreign(error: OSError, folder: Path) -> bool:
    """Return whether an OSError is about a file outside `folder`, neither in it nor a folder above it."""
    if not isinstance(error.filename, (str, bytes)):
        return False
    path, index = os.path.abspath(os.fsdecode(error.filename)), os.path.abspath(folder)
    return not (path == index or path.startswith(f"{index}{os.sep}") or index.startswith(f"{path}{os.sep}"))


def look_file(plan: Plan) -> Path:
    return plan.cfg.index_folder / f"{pictures_name(plan)}.looked"


def last_look(plan: Plan) -> str:
    """Return a text that changes whenever a process has examined all bad images of a dataset again."""
    path = look_file(plan)
    return path.read_text(errors="replace") if path.is_file() else ""


def note_look(plan: Plan) -> None:
    """Change the text that `last_look` returns, because all bad images have been examined."""
    look_file(plan).write_text(secrets.token_hex(8))


@contextlib.contextmanager
def holding_lock(path: Path) -> Iterator[None]:
    """Hold a lock on the file `path`; wait for it first. The system releases it if this process dies."""
    with path.open("w") as file:
        until = time.monotonic() + SILENT
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    log().info("another process is making the index of these data; this one waits for it")
                    fcntl.flock(file, fcntl.LOCK_EX)
                    break
                time.sleep(0.02)
        yield


def find_index(plan: Plan, sources: list[DataSource], folder: Path) -> Index | None:
    """Open a dataset's index in `folder` if it is complete for the present sizes and modification times of the
    dataset's files; else return None. It is complete with four folders of columns: the records' positions (`texts`),
    and facts about records (`records_name`), images (`pictures_name`) and tokens (`encoded_name`)."""
    known_state = read_known(folder).get(stamp(sources, plan.cfg.max_record_bytes))
    if known_state is None:
        return None
    state = folder / known_state.key
    if not ((state / "texts").is_dir() and (state / plan.records_name).is_dir()):
        return None
    plan = plan.with_examine_chosen(state / plan.records_name)
    # there may be several versions, as a new one is made when a bad image was fixed
    pictures = newest_version(state / pictures_name(plan))
    if pictures is None:
        return None
    encoded = state / encoded_name(plan, pictures)
    return open_complete(plan, folder, state, pictures, encoded) if encoded.is_dir() else None


def open_complete(plan: Plan, folder: Path, state: Path, pictures: Path, encoded: Path) -> Index:
    """Open a dataset's index, all parts of which are complete. Raise DamagedError if a part is not what was written.

    Args:
        folder: folder of the whole index.
        state: its folder for the present content of the dataset's files.
        pictures: folder of the columns about images.
        encoded: folder of the columns about tokens. Its `done.json` has the maximum lengths (`limits`), and for each
            data source what truncation to each of them loses (`losses`) and how much is learnt (`taught`).
    """
    records = state / plan.records_name
    for part in (state / "texts", records, pictures, encoded):
        check_part(part, whole=False)
    store = RecordStore(state / "texts", plan.reader.sampling is not None, plan.cache)
    facts, counts = read_json(encoded / DONE), read_json(pictures / DONE).get(EXAMINED)
    try:
        limits, losses = facts["limits"], np.array(facts["losses"], dtype=np.int64)
        taught = np.array(facts["taught"], dtype=np.int64)
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise damaged_index(encoded / DONE, "it is not what was written") from error
    try:
        examined = None if counts is None else Examined(**require_kinds(counts, kinds_of(Examined)))
    except (BadJson, TypeError) as error:
        raise damaged_index(pictures / DONE, "it is not what was written") from error
    try:
        by_source = [require_kinds(keys, dict.fromkeys(keys, (int,))) for keys in read_json(records / DONE)[UNREAD]]
        unread_keys = {source.name: keys for source, keys in zip(store.sources, by_source, strict=True)}
    except (BadJson, KeyError, TypeError, ValueError) as error:
        raise damaged_index(records / DONE, "it is not what was written") from error
    has_several = (encoded / f"{FIRST_ROW}.npy").is_file()
    first_sample = open_column(encoded, FIRST_ROW) if has_several else None
    return Index(folder, store, records, pictures, encoded, limits, losses, taught, first_sample, examined, unread_keys)


def build_index(plan: Plan, sources: list[DataSource], folder: Path, watch: Watch, look_again: bool) -> Index:
    """Make all missing parts of the index in `folder`, whose lock the caller holds, and open it. Its parts are folders:
    positions of the records in their files (`texts`), and columns about records, images (`pictures`) and tokens
    (`encoded`).

    Args:
        plan: what the index is made from (configuration, encoder, image reader), and the number of workers.
        look_again: whether to read the files of records and every bad image again, because they may have been fixed.
    """
    most_bytes = plan.cfg.max_record_bytes
    stamp_before = stamp(sources, most_bytes)
    known_state = find_state(sources, folder, most_bytes, watch, look_again)
    state = folder / known_state.key
    state.mkdir(exist_ok=True)
    parts_before = {*state.iterdir(), *chunk_parts(folder)}
    for part in state.iterdir():
        if part.is_dir() and is_complete_folder(part.name):
            check_part(part, whole=look_again)

    def check_files_unchanged() -> None:
        """Raise SourceError if a file of records has changed, after deleting all parts that were made here from it."""
        check_unchanged(sources, most_bytes, stamp_before, lambda: delete_new_parts(folder, state, parts_before))

    if not (state / "texts").is_dir():
        texts = write_record_texts(files_of(sources), known_state.file_keys, plan, watch)
        finding = FindRecords(texts, chunks_of(plan, "texts"), most_bytes)
        with watch("finding records", len(texts)) as advance:
            run_chunks(finding, finding.files(), plan.workers, advance)
        join_positions(sources, finding, state / "texts", known_state.fingerprint, check_files_unchanged)
    records, sampling = state / plan.records_name, plan.reader.sampling
    reading = ReadRecords(state / "texts", CHUNKS["records"], sampling, plan.cache)
    chunks = chunks_of(plan, plan.records_name)
    result = ResultFolder(records, read_facts, [NAME_SIZE, UNREAD])
    run_pass(reading, chunks, result, plan.workers, watch, "reading records")
    pictures = examine_pictures(plan, state, watch, look_again)
    encoded = state / encoded_name(plan, pictures)
    encoding = EncodeRecords(
        state / "texts", CHUNKS["encoded"], sampling, plan.cache, records, pictures, plan.whole_encoder, plan.reader
    )
    chunks = chunks_of(plan, f"encoded-{encoding_of(plan)}")
    result = ResultFolder(encoded, encoded_facts, [LOSSES_COLUMN, TAUGHT_COLUMN])
    run_pass(encoding, chunks, result, plan.workers, watch, "counting tokens")
    check_files_unchanged()
    return open_complete(plan, folder, state, pictures, encoded)


def is_complete_folder(name: str) -> bool:
    """Return whether a folder of the index is complete, by its name: while one is made, its name has a suffix."""
    return name in ("texts", "records", "records-videos") or (
        name.startswith(("pictures-", "encoded-")) and not name.endswith((".parts", ".tmp"))
    )


def chunk_parts(folder: Path) -> list[Path]:
    """Return the paths in the index that were each made from a single file of records."""
    return [*folder.glob(f"{CHUNKS_FOLDER}/*/*"), *folder.glob(f"{ROWS_FOLDER}/*")]


def delete_new_parts(folder: Path, state: Path, parts_before: set[Path]) -> None:
    """Delete all parts of the index except `parts_before`: those made while files of records changed. They may be
    wrong, and would be taken for valid if the files changed back."""
    for path in {*state.iterdir(), *chunk_parts(folder)} - parts_before:
        delete_folder(path) if path.is_dir() else path.unlink(missing_ok=True)


def write_record_texts(files: list[SourceFile], keys: list[str], plan: Plan, watch: Watch) -> tuple[TextFile, ...]:
    """Make a local text file of each file of records, and return these: Parquet files and tars are written as JSON
    Lines, compressed text files are unpacked, and remote ones are copied. A local text file is used itself.

    Args:
        files: the files of records of all data sources.
        keys: for each file, a text that changes with its path and content; the folder for its text file is named by it.
        plan: has the folder of the index and the number of worker processes.
        watch: shows the progress.
    """
    folders = [plan.cfg.index_folder / ROWS_FOLDER / key for key in keys]
    data_files = open_data_files(files, None)
    rows = {
        number: RowsFile(file.path, folder, file.keys)
        for number, (file, folder) in enumerate(zip(files, folders, strict=True))
        if is_container(file.path)
    }
    unwritten = tuple(file for file in rows.values() if not file.whole.is_file())
    for file in {*rows.values()} - {*unwritten}:
        file.delete_parts()  # left by a process that was killed
    if unwritten:
        # with fewer files than worker processes, several processes share the row groups of one Parquet file
        by_group = len(unwritten) < plan.workers
        writing = WriteRows(unwritten, plan.cfg.max_record_bytes, data_files, by_group)
        with watch("reading Parquet files and tars", len(writing.parts)) as advance:
            run_chunks(writing, writing.chunks(), plan.workers, advance)
        writing.join_parts()
    files_and_folders = zip(files, folders, strict=True)
    copies = [(file.path, folder / copy_name(file.path)) for file, folder in files_and_folders if is_copied(file.path)]
    if copies:
        unpack = Unpack(tuple(path for path, _ in copies), tuple(target for _, target in copies), data_files)
        with watch("unpacking", len(copies)) as advance:
            run_chunks(unpack, unpack.files(), plan.workers, advance)
    text_files = []
    for number, (file, folder, key) in enumerate(zip(files, folders, keys, strict=True)):
        text = folder / copy_name(file.path) if is_copied(file.path) else Path(file.path)
        text_files.append(TextFile(file, rows[number].whole if number in rows else text, key))
    return tuple(text_files)


P = TypeVar("P", bound=DatasetPass)
Finish = Callable[[P, Sequence[Path], Path], dict[str, Any]]
"""Function (pass, files with the results of its chunks, folder of its joined columns) -> facts for `done.json`. It may
add files to the folder."""


@dataclass(frozen=True)
class ResultFolder(Generic[P]):
    """The folder with the joined columns of a pass."""

    path: Path
    finish: Finish[P]
    not_joined: Collection[str] = ()
    """Names of columns that are not joined, because only `finish` needs them."""


def run_pass(task: P, chunks: Path, result: ResultFolder[P], workers: int, watch: Watch, label: str) -> None:
    """Run a pass over the dataset and write its result folder, unless that exists.

    Args:
        task: computes the columns of a chunk of records.
        chunks: folder for the results of single chunks, which are kept: later, only files that are new are examined.
        result: the folder to write, what completes the joined columns (`finish`), and the columns that are not joined.
        watch: shows the progress under the name `label`.
    """
    if result.path.is_dir():
        return
    files = task.files(chunks)
    with watch(label, len(files)) as advance:
        run_chunks(task, files, workers, advance)
    finish = result.finish
    join(files, task.file_begins, result.path, lambda staged: finish(task, files, staged), result.not_joined)


def delete_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def scales_wide_values(plan: Plan) -> bool:
    """Return whether training scales images with more than 8 bits per value to 8 bits; LLaVA clips them."""
    return plan.cfg.pixels is not Pixels.llava_v1_5


def pictures_name(plan: Plan) -> str:
    """Return the name, without its number, of the folder of image columns, from the settings that they depend on."""
    cfg = plan.cfg
    settings: list[object] = [cfg.examine.value, cfg.allow_links, scales_wide_values(plan)]
    if plan.reader.sampling is not None:
        settings.append(str(plan.reader.sampling))
    # the sizes are taken from the records, and needed for the tokens of this model
    if plan.sized_by_records is not None:
        settings += ["sizes of records", plan.reader.form]
    elif cfg.examine is Examine.sample:
        # number of images in the sample, and whether the sizes of the others are read
        settings += [cfg.examine_images, plan.opens_all]
    return f"pictures-{short_digest(*settings)}"


def encoded_name(plan: Plan, pictures: Path) -> str:
    """Return the name of the folder with the numbers of tokens, which changes with encoder, image reader and
    `pictures`."""
    return f"encoded-{short_digest(encoding_of(plan), pictures.name)}"


def encoding_of(plan: Plan) -> str:
    """Return a checksum of all settings on which the numbers of tokens depend."""
    reader = plan.reader
    places = reader.fingerprint, reader.form, reader.pixels.value
    return short_digest(ENCODED_FORMAT, plan.encoder.fingerprint, places)


def chunks_of(plan: Plan, name: str) -> Path:
    """Return the folder for the results of the chunks of the pass `name`."""
    return plan.cfg.index_folder / CHUNKS_FOLDER / name


def newest_version(folder: Path) -> Path | None:
    """Return the folder named `folder`.N with the greatest number N; None if no such folder exists."""
    versions = [p for p in folder.parent.glob(f"{folder.name}.*") if p.suffix[1:].isdigit()]
    return max(versions, key=lambda p: int(p.suffix[1:]), default=None)


def examine_pictures(plan: Plan, state: Path, watch: Watch, look_again: bool) -> Path:
    """Examine the images of a dataset, and return the folder of the columns about them. If this has been done, only the
    folder is returned, unless a bad image was fixed.

    Args:
        state: folder of the index for the present content of the dataset's files.
        watch: shows the progress.
        look_again: whether to examine bad images again. The chunks of records with an image that was fixed are then
            computed anew, and all columns are written to a folder with the next number.
    """
    records = state / plan.records_name
    chosen_plan = plan.with_examine_chosen(records)  # `data.examine=auto` is replaced by a mode for so many images
    cfg = chosen_plan.cfg
    task = ExaminePictures(
        folder=state / "texts",
        size=CHUNKS["pictures"],
        sampling=plan.reader.sampling,
        cache=plan.cache,
        records_folder=records,
        how=cfg.examine,
        opens_all=chosen_plan.opens_all,
        sample_size=cfg.examine_images,
        scales_wide_values=scales_wide_values(plan),
        allow_links=cfg.allow_links,
        sized_by_records=chosen_plan.sized_by_records,
    )
    name = pictures_name(chosen_plan)
    base, chunks = state / name, chunks_of(plan, name)
    last_version = newest_version(base)
    if last_version is not None:
        fixed = fixed_chunks(task, last_version) if look_again else []
        if not fixed:
            if look_again:
                note_look(plan)
            return last_version
        files = task.files(chunks)
        for chunk in fixed:
            files[chunk].unlink(missing_ok=True)
    is_new = last_version is not None or not chunks.is_dir()  # otherwise results of an interrupted pass are reused
    target = Path(f"{base}.{0 if last_version is None else int(last_version.suffix[1:]) + 1}")
    run_pass(task, chunks, ResultFolder(target, count_examined), plan.workers, watch, "examining images")
    # tells other processes that all bad images have been examined (`last_look`)
    if is_new:
        note_look(plan)
    return target


def count_examined(task: ExaminePictures, _: Sequence[Path], staged: Path) -> dict[str, Any]:
    """Return the numbers of the images, of those that were decoded and of those that are bad (`Examined`), for
    `done.json`; empty without images, or if `data.examine` is neither `sample` nor `lazy` (which decodes no image).
    `staged`: folder with the columns of the pass."""
    digests = open_column(staged, "digest")
    if task.how not in (Examine.sample, Examine.lazy) or not len(digests):
        return {}
    is_lazy = task.how is Examine.lazy
    return {EXAMINED: asdict(Examined(len(digests)) if is_lazy else Examined.count(task.sample, digests))}


def fixed_chunks(task: ExaminePictures, folder: Path) -> list[int]:
    """Examine the bad images again, which the user may have fixed. Return the numbers of the chunks with a record whose
    problems are no longer those in `folder`."""
    flags = open_column(folder, "flags")
    fixed = {
        task.chunk_of(number)
        for number in np.flatnonzero(flags).tolist()
        if task.of(range(number, number + 1))["flags"][0] != flags[number]
    }
    return sorted(fixed)


FIRST_ROW = "first_row"
"""Column with the number of the first sample of each record; only if a record has several samples."""


def encoded_facts(task: EncodeRecords, chunks: Sequence[Path], staged: Path) -> dict[str, Any]:
    """Complete the columns about tokens, and return facts for `done.json`: the maximum lengths, and for each data
    source what truncation to each of them loses (LOSSES) and what is learnt (TAUGHT).

    The column of the numbers of samples is replaced by FIRST_ROW, the number of each record's first sample. It is
    deleted if each record has one sample, like the columns with the first and last turns of samples. The column of the
    weights is deleted if all are 1.

    Args:
        chunks: files with the results of the pass, over which LOSSES and TAUGHT are summed.
        staged: folder in which `join` has put the columns.
    """
    shape = len(task.limits), len(LOSSES)
    losses = np.zeros((len(task.store.sources), *shape), dtype=np.int64)
    taught = np.zeros((len(task.store.sources), len(TAUGHT)), dtype=np.int64)
    for chunk, first in zip(chunks, task.file_begins, strict=True):
        source = task.store.part(first).source
        losses[source] += column(chunk, LOSSES_COLUMN).reshape(shape)
        taught[source] += column(chunk, TAUGHT_COLUMN)
    counts = np.load(staged / f"{ROW_COUNTS}.npy", mmap_mode="r", allow_pickle=False)
    # "split" counts the records that give several samples
    if taught[:, TAUGHT.index("split")].any():
        write_column(staged / f"{FIRST_ROW}.npy", sums_of(counts), np.dtype(np.int64))
    else:
        for name in (FIRST_TURN, LAST_TURN):
            (staged / f"{name}.npy").unlink()
    (staged / f"{ROW_COUNTS}.npy").unlink()
    labels, weights = (
        np.load(staged / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ("labels", LABEL_WEIGHT)
    )
    blocks = (slice(begin, begin + BLOCK) for begin in range(0, len(labels), BLOCK))
    if all((labels[block].astype(np.int64) * FULL_WEIGHT == weights[block]).all() for block in blocks):
        (staged / f"{LABEL_WEIGHT}.npy").unlink()
    return {"limits": task.limits, "losses": losses.tolist(), "taught": taught.tolist()}


def sums_of(counts: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the sums of the first 0, 1, 2, ... values of an array, in blocks, int64 [block]."""
    total = np.zeros(1, dtype=np.int64)
    yield total
    for begin in range(0, len(counts), BLOCK):
        sums = np.cumsum(counts[begin : begin + BLOCK], dtype=np.int64) + total
        total = sums[-1:]
        yield sums
