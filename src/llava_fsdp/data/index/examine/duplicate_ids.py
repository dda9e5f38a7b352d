"""Complete the first pass over a dataset, which reads all records: find records with the same id, and index the images
by record."""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llava_fsdp.data.columns import BLOCK, column, write_column
from llava_fsdp.data.index.examine.examine_passes import NAME_SIZE, UNREAD, ReadRecords
from llava_fsdp.data.index.worker_pool import open_column
from llava_fsdp.data.problems import BITS, Kind
from llava_fsdp.data.records.keys import count_keys

DUPLICATES = "duplicates"


def read_facts(task: ReadRecords, chunks: Sequence[Path], staged: Path) -> dict[str, Any]:
    """Complete the columns of the pass that reads the records: find records with the same id as an earlier one of their
    data source, and index the images by record.

    It adds the columns first_picture (int64 [records + 1], the index of each record's first image) and name_end (int64
    [images + 1], the end of each image's path in the array of all paths), and a file with the duplicate ids. Their
    records get a bit in the column `flags`.

    Args:
        task: the pass, with the store of the records.
        chunks: files with the results of the pass.
        staged: folder in which `join` has put the columns.

    Returns:
        {UNREAD: for each data source, how many of its records have each key that is not read}.
    """
    for name, counts in (("first_picture", "pictures"), ("name_end", NAME_SIZE)):
        sums = running_sum(column(chunk, counts) for chunk in chunks)
        write_column(staged / f"{name}.npy", sums, np.dtype(np.int64))
    flags = np.load(staged / "flags.npy", mmap_mode="r+")
    hashes = open_column(staged, "id_hash")
    with (staged / f"{DUPLICATES}.jsonl").open("w") as file:
        for begin, end in itertools.pairwise(task.store.source_bounds):
            for number, first in find_duplicates(hashes, begin, end).tolist():
                record = task.store.record(number)
                first_file, first_index = task.store.locate(first)
                line = task.store.line(first)
                at = "" if line is None else f" on line {line}"
                at += "" if first_file == task.store.locate(number)[0] else f" of {first_file.path}"
                reason = f"{record.where}: record {first_index}{at} has the same id; give each its own"
                row = {"record": number, "id": record.id, "kind": Kind.duplicate_id, "reason": reason}
                file.write(json.dumps(row) + "\n")
                flags[number] |= BITS[Kind.duplicate_id]
    unread = [Counter[str]() for _ in task.store.sources]
    for chunk, first in zip(chunks, task.file_begins, strict=True):
        count_keys(unread[task.store.part(first).source], json.loads(column(chunk, UNREAD).tobytes()))
    return {UNREAD: unread}


def running_sum(pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield 0 and the cumulative sums of an array that is given in pieces, int64 [counts + 1] together."""
    total = 0
    yield np.zeros(1, dtype=np.int64)
    for counts in pieces:
        yield total + np.cumsum(counts, dtype=np.int64)
        total += int(counts.sum())


def find_duplicates(hashes: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Find the records begin to end - 1 that have the same id as an earlier one of them.

    Ids are compared by their hashes (uint64 [records], 0 without an id), one part of the hash values at a time, so that
    memory does not grow with the number of records.

    Returns:
        int64 [duplicates, 2]: number of a record whose id is not new, and number of the first record with this id.
    """
    shares = -(-(end - begin) // BLOCK)
    pairs = [np.zeros((0, 2), dtype=np.int64)]
    for share_number in range(shares):
        numbers, values = [], []
        for first in range(begin, end, BLOCK):
            block = hashes[first : min(end, first + BLOCK)]
            at = np.flatnonzero((block % np.uint64(shares) == share_number) & (block != 0))
            numbers.append(at + first)
            values.append(block[at])
        numbers_of_share, hashes_of_share = np.concatenate(numbers), np.concatenate(values)
        order = np.argsort(hashes_of_share, kind="stable")
        numbers_of_share, hashes_of_share = numbers_of_share[order], hashes_of_share[order]
        starts = np.zeros(0, dtype=np.int64)
        if len(hashes_of_share):
            starts = np.flatnonzero(np.r_[True, hashes_of_share[1:] != hashes_of_share[:-1]])
        firsts = np.repeat(numbers_of_share[starts], np.diff(np.r_[starts, len(hashes_of_share)]))
        is_duplicate = numbers_of_share != firsts
        pairs.append(np.stack([numbers_of_share[is_duplicate], firsts[is_duplicate]], axis=1))
    found = np.concatenate(pairs)
    return found[np.argsort(found[:, 0])]
