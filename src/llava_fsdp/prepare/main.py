"""Examine and index a dataset before training: `python -m llava_fsdp.prepare data=llava_json data.path=... model=...`.

The command takes the configuration keys of `train`. It reports the lengths of the samples, and how many of their tokens
are labels, in a training with the same keys.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from llava_fsdp.config import Format, PrepareConfig
from llava_fsdp.config.paths import check_paths
from llava_fsdp.data.images.image_source import ImageSource
from llava_fsdp.data.index.build import Plan, open_index
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.index.examine.bad_records import describe_same_files, refuse_bad_records
from llava_fsdp.data.index.record_store import sources_of
from llava_fsdp.data.index.statistics import PAGE, write_report
from llava_fsdp.data.index.verify import verify_index
from llava_fsdp.data.loader import open_encoding
from llava_fsdp.data.records.keys import describe_unread
from llava_fsdp.data.text.encode import Encoder
from llava_fsdp.data.toy_shapes import draw_shapes
from llava_fsdp.model.build import build_architecture
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.parallel.precision.fast_dtype import has_bf16, settle_precision
from llava_fsdp.parallel.precision.precision import DTYPES
from llava_fsdp.runtime.errors import ConfigError, DataError
from llava_fsdp.runtime.process.host import read_host
from llava_fsdp.runtime.text.console import TextConsole
from llava_fsdp.runtime.text.log import log
from llava_fsdp.runtime.text.progress import watch
from llava_fsdp.train.setup.build_model import shape_of
from llava_fsdp.train.setup.preflight import warn_if_refused, with_template

MOST_FILES = 20
"""Number of files of a data source up to which the table of sources shows each."""


def prepare(cfg: PrepareConfig) -> None:
    """Examine and index the dataset and the validation set, if there is one. Write and print a report about each. With
    `cfg.verify`, only check that the existing indexes match the files of the datasets.

    Raises:
        DataError: no record of a dataset is left to train on. Other bad records are reported without an error.
    """
    draw_shapes(cfg.data)  # generates the dataset of data.source=shapes, if there is none
    check_paths(cfg)
    typed, parts = cfg, find_parts(cfg.model)
    cfg = with_template(cfg, parts)
    cfg, _ = settle_precision(cfg, [has_bf16(torch.device("cpu"))], "cpu")  # replaces `auto` by dtypes
    model = build_architecture(parts, cfg.model, DTYPES[cfg.precision.param_dtype])  # on meta: shapes only
    encoding = open_encoding(cfg, parts.language_folder, parts.vision_folder, shape_of(model))
    sources_of(cfg.data)  # raises an error if a file is missing
    # warns if a training would refuse this configuration. Called last, because it would also print the errors of the
    # lines above, which end this command. The remark says if a projector is still to be trained
    remark = warn_if_refused(typed)
    if cfg.verify:
        return verify(cfg, encoding)
    folder = Path(cfg.report or cfg.data.index_folder)
    reports = {"": (examine(cfg, encoding, folder), folder)}
    if cfg.val.every is not None:
        val = cfg.held_out
        sources_of(val.data, "val")  # its errors name the keys of val
        folder = folder / "val" if cfg.report else val.data.index_folder
        reports["val"] = examine(val, encoding, folder), folder
    if cfg.format is Format.json:
        objects = {name: {**report, "report": str(folder)} for name, (report, folder) in reports.items()}
        print(json.dumps(objects.pop("") | objects))
    else:
        for report, folder in reports.values():
            show(report, folder)
    if remark:
        log().info("%s", remark)
    for name, (report, folder) in reports.items():
        if not report["kept"]:
            kinds = ", ".join(f"{kind} ({problem['records']:,})" for kind, problem in report["problems"].items())
            raise DataError(
                f"{name or 'data'}: none of {report['records']:,} records is left to train on ({kinds}); fix them: all "
                f"reasons are in {folder / PAGE}"
            )


def verify(cfg: PrepareConfig, encoding: tuple[Encoder, ImageSource]) -> None:
    """Check that the indexes match the files of the datasets; print a line for each, or one JSON object. Raises
    DataError, which names them, if samples or images have changed since an index was made. `encoding`: the encoder,
    which makes token ids of records, and the reader of their images."""
    (encoder, reader), results = encoding, {}
    workers = cfg.prepare.workers or read_host().usable_cores
    for name, dataset in {"": cfg, **({} if cfg.val.every is None else {"val": cfg.held_out})}.items():
        sources_of(dataset.data, name or "data")
        records, images = verify_index(Plan(dataset.data, encoder, reader, workers), watch)
        results[name] = {"index": str(dataset.data.index_folder), "records": records, "images": images}
    if cfg.format is Format.json:
        print(json.dumps(results.pop("") | results))  # the entries of the training data, and `val` as one more entry
        return
    for one in results.values():
        print(f"{one['records']:,} records and {one['images']:,} images are what the index {one['index']} was made of")


def examine(cfg: PrepareConfig, encoding: tuple[Encoder, ImageSource], folder: Path) -> dict[str, Any]:
    """Examine and index a dataset, write a report about its samples to `folder`, and return it. `encoding` is the
    encoder, which makes token ids of records, and the reader of their images."""
    encoder, reader = encoding
    plan = Plan(cfg.data, encoder, reader, cfg.prepare.workers or read_host().usable_cores)
    # `look_again`: bad images and the files of records may have been fixed since the last time
    records = Records(open_index(plan, watch, look_again=True), cfg.labels, cfg.data.too_long)
    if warning := describe_same_files(records):
        log().warning(warning)
    try:
        refuse_bad_records(records, cfg.data)
    except DataError as error:
        lines = str(error).splitlines()
        said = ". ".join(dict.fromkeys((lines[0], lines[-1])))  # without the records between, which the report lists
        log().warning("a training with these keys would end before its first step: %s", said)
    try:
        return write_report(records, cfg, encoding, folder)
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written to {folder} ({error}); name another folder: report=DIR"
        ) from error


def show(report: dict[str, Any], folder: Path) -> None:
    """Print the tables of a report; its page, which is named at the end, is in `folder`."""
    console = TextConsole(width=None if sys.stdout.isatty() else 120)
    names = ["records", "left_out", "text_only", "pictures", "tokens", "label_tokens"]
    title = "records; tokens after truncation to data.max_length, image tokens included"
    sources = Table("source", *(name.replace("_", " ") for name in names), title=title, title_justify="left")
    for source in report["sources"]:
        files = [file for file in report["files"] if file["name"] == source["name"]]
        rows = [(source["name"], source)]
        if 1 < len(files) <= MOST_FILES:
            rows = [
                (f"{source['name']} (of {len(files)} files)", source),
                *((f"  {counts['file']}", counts) for counts in files),
            ]
        for label, counts in rows:
            sources.add_row(label, *(f"{counts[name]:,}" for name in names))
    console.print(sources)
    for line in describe_unread(report["unread_keys"]):
        console.print(line, soft_wrap=True)
    lengths = report["lengths"]
    if lengths["samples"]:
        percentiles = ", ".join(f"{p} % {n:,}" for p, n in lengths["percentiles"].items())
        console.print(f"tokens of a sample before truncation: mean {lengths['mean']:.1f}; up to {percentiles}")
    sums = {name: sum(source["taught"][name] for source in report["sources"]) for name in ("split", "repeated")}
    if sums["split"]:
        console.print(
            f"{report['samples']:,} samples of {report['kept']:,} records: the template rewrites earlier turns of "
            f"{sums['split']:,} records, of whose tokens {sums['repeated']:,} are read repeatedly"
        )
    labels, weight = (sum(source[name] for source in report["sources"]) for name in ("label_tokens", "label_weight"))
    if weight != labels:
        console.print(f"mean weight of a label: {weight / labels:.3g}")
    if report["examined"] is not None:
        console.print(report["examined"]["summary"])
    columns = ["records_cut", "positions_lost", "label_tokens_lost", "left_without_labels"]
    lost = Table("data.max_length", *(c.replace("_", " ") for c in columns), title="cost of a maximum length")
    lost.title_justify = "left"
    for row in report["truncation"]:
        lost.add_row(f"{row['max_length']:,}", *(f"{row[c]:,}" for c in columns))
    console.print(lost)
    problems = Table("problem", "records", "", "meaning", title="problems", title_justify="left")
    for kind, problem in report["problems"].items():
        problems.add_row(kind, f"{problem['records']:,}", "kept" if problem["kept"] else "skipped", problem["meaning"])
    console.print(problems if report["problems"] else "no problems")
    for kind, problem in report["problems"].items():
        console.print(f"{kind}, for example: {problem['first'][0]['reason']}", soft_wrap=True)
    console.print(f"{report['kept']:,} of {report['records']:,} records are kept; everything is in {folder / PAGE}")
