"""Decide before training whether bad records (those that cannot be trained on) are skipped or stop the run. All ranks
decide the same."""

import itertools
import os
from pathlib import Path

from llava_fsdp.config import BadRecords, Config, DataConfig, TooLong
from llava_fsdp.data.images.image_source import ImageSource
from llava_fsdp.data.index.build import Plan, last_look, open_index
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.index.statistics import PAGE, write_report
from llava_fsdp.data.problems import PROBLEMS, Kind
from llava_fsdp.data.records.keys import describe_unread
from llava_fsdp.data.records.record import IMAGE_TAG
from llava_fsdp.data.text.encode import Encoder
from llava_fsdp.runtime.errors import BuildError, DataError
from llava_fsdp.runtime.process.host import read_host
from llava_fsdp.runtime.text.log import log
from llava_fsdp.runtime.text.progress import Watch

SHOWN = 5
"""Number of bad records that an error message lists."""
WARNINGS = {
    Kind.tag_without_image: f"have {IMAGE_TAG} in their text but no image, and train as text: is the key called image?",
    Kind.media_not_read: "name video, audio or images in a key or a tag that is not read, and train without them",
    Kind.special_token: "have a special token in their text (data.special_tokens says what becomes of it)",
    Kind.empty_answer: "have an answer without text",
    Kind.no_labels: "have no label tokens",
    Kind.too_long: "are longer than data.max_length, and are truncated",
    Kind.duplicate_id: "have the id of an earlier one",
}
"""{kind of problem: warning about records that have it and are trained on}, to follow the number of these records."""


def open_records(cfg: Config, encoder: Encoder, reader: ImageSource, watch: Watch) -> Records:
    """Open the records of the configured dataset, and check whether training may begin with them. If the dataset has no
    index, make it first; `watch` shows the progress. If training may not begin, the bad records are examined again,
    because the user may have fixed their files.

    Raises:
        DataError: there are more bad or long records than `data.bad_records`, `data.max_bad_records` and
            `data.too_long` allow.
        ConfigError: a path does not exist.
        BuildError: the index cannot be written.
    """
    plan = Plan(cfg.data, encoder, reader, read_host().usable_cores)
    since = last_look(plan)  # a text that changes when any process has examined the bad images again
    records = Records(open_index(plan, watch), cfg.labels, cfg.data.too_long)
    try:
        refuse_bad_records(records, cfg.data)
    except DataError:
        records = examine_bad_again(plan, cfg, records, watch, since)
        write_report_or_warn(records, cfg, plan)
        refuse_bad_records(records, cfg.data)
    return records


def examine_bad_again(plan: Plan, cfg: Config, records: Records, watch: Watch, since: str) -> Records:
    """Examine the bad records again, because the user may have fixed their files, and return the dataset as it is now.
    If the result cannot be written, log a warning and return `records` unchanged. `since`: what `last_look` returned
    before `records` were opened; if it has changed, another process has examined them again already."""
    try:
        index = open_index(plan, watch, look_again=True, since=since)
    except BuildError as error:
        log().warning("the bad images of the index were not examined again: %s", error)
        return records
    return Records(index, cfg.labels, cfg.data.too_long)


def write_report_or_warn(records: Records, cfg: Config, plan: Plan) -> None:
    """Write the dataset's report. If that is not possible, log a warning."""
    try:
        write_report(records, cfg, (plan.encoder, plan.reader), cfg.data.index_folder)
    except OSError as error:
        log().warning("the report was not written: %s", error)


def describe_same_files(records: Records) -> str:
    """Return a warning about files that several data sources contain; empty without such files."""
    names: dict[str, list[str]] = {}
    for part in records.index.store.parts:
        names.setdefault(os.path.realpath(part.file.path), []).append(part.file.name)
    sentences = [
        f"sources {' and '.join(names_of_file)} are the same file, {path}"
        for path, names_of_file in names.items()
        if len(names_of_file) > 1
    ]
    return "; ".join(sentences)


def remarks(records: Records) -> str:
    """Return warnings, or an empty text: records that have a problem but are trained on, data sources whose records
    have no image or have keys that are not read, and files that several sources contain."""
    counted = [
        f"{records.counts[kind]:,} {words}"
        for kind, words in WARNINGS.items()
        if kind not in records.dropped_kinds and records.counts[kind]
    ]
    sentences = (
        [f"of {len(records.index):,} records, {'; '.join(counted)} (llava-fsdp prepare lists them)"] if counted else []
    )
    ends = itertools.accumulate(records.source_counts)
    for source, count, end in zip(records.index.store.sources, records.source_counts, ends, strict=True):
        if source.images is not None and count and not records.pictures[end - count : end].any():
            sentences.append(
                f"no record of {source.path} has an image, but {source.images} is set: is the key called image?"
            )
    sentences += describe_unread(records.index.unread_keys)
    return "; ".join([*sentences, *filter(None, [describe_same_files(records)])])


def refuse_bad_records(records: Records, cfg: DataConfig) -> None:
    """Raise DataError if there are more bad or too long records than the configuration allows."""
    report = cfg.index_folder / PAGE
    if cfg.too_long is TooLong.fail and records.counts[Kind.too_long]:
        how = "raise data.max_length, or set data.too_long=truncate or skip"
        raise DataError(refusal(records, [Kind.too_long], "too long", how, report))
    kinds = [kind for kind in records.dropped_kinds if kind is not Kind.too_long and records.counts[kind]]
    budget = cfg.budget(len(records.index))
    if records.num_wrong and cfg.bad_records is BadRecords.fail:
        limit = f" data.max_bad_records={records.num_wrong}" if records.num_wrong > budget else ""
        how = f"fix them, or leave them out: data.bad_records=skip{limit}" if len(records) else "fix them"
        raise DataError(refusal(records, kinds, "wrong", how, report))
    if records.num_wrong > budget:
        how = (
            f"fix them, or raise data.max_bad_records={cfg.max_bad_records}, which allows {budget}: "
            f"data.max_bad_records={records.num_wrong}"
        )
        raise DataError(refusal(records, kinds, "wrong", how, report))
    if not len(records):
        raise DataError(f"{records.index.store.sources[0].path}: no record is left to train on; see {report}")


def refusal(records: Records, kinds: list[Kind], what: str, how: str, report: Path) -> str:
    """Return an error message: how many records are `what` (wrong, too long) because of `kinds` of problems, with the
    first reasons, the file with all of them (`report`) and the cure (`how`)."""
    files = ", ".join(source.path for source in records.index.store.sources)
    total = records.counts[Kind.too_long] if kinds == [Kind.too_long] else records.num_wrong
    lines = [f"{files}: {total} of {len(records.index)} records are {what}"]
    lines += [f"  {kind}: {records.counts[kind]} ({PROBLEMS[kind].meaning})" for kind in kinds]
    reasons = (row["reason"] for row in records.index.problems() if row["kind"] in kinds)
    lines += [reason for reason, _ in zip(reasons, range(SHOWN), strict=False)]
    return "\n".join([*lines, f"All of them are in {report}; {how}"])
