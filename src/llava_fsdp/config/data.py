"""Keys of the data: sources, sampling order and the validation set."""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from llava_fsdp.config.checks import at_least
from llava_fsdp.config.enums import (
    AspectRatio,
    BadRecords,
    Examine,
    Metric,
    Pixels,
    SamplerName,
    Source,
    SpecialTokens,
    TooLong,
)
from llava_fsdp.runtime.errors import ConfigError

MOST_EPOCHS = 1000
"""Most times that an epoch shows a source's records."""
HELDOUT = "heldout.json"
"""The embedded dataset's file of held-out records."""


@dataclass(kw_only=True, slots=True)
class StageConfig:
    name: str
    corpus: str
    """Which file of the embedded dataset: captions, instructions or heldout. Other datasets ignore it."""


@dataclass(kw_only=True, slots=True)
class SourceConfig:
    """One of several sources of a dataset."""

    path: str
    images: str | None = None
    """null: data.images"""
    epochs: float | None = None
    """How often each of its records is seen in an epoch; null: once."""
    weight: float | None = None
    """Its share of an epoch's samples, against the other sources' weights; an epoch then has as many samples as all
    sources together have records."""

    def __post_init__(self) -> None:
        for name in ("epochs", "weight"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"data.sources: {name}={value} of {self.path} must be a finite number above 0")
        if self.epochs is not None and self.epochs > MOST_EPOCHS:
            raise ConfigError(
                f"data.sources: epochs={self.epochs:g} of {self.path} is more than {MOST_EPOCHS:,} in one epoch; raise "
                "the run's own epochs, or give the sources weights"
            )


@dataclass(kw_only=True, slots=True)
class DataConfig:
    source: Source
    root: str | None
    """Where the embedded dataset is drawn; other datasets ignore it."""
    path: str | None
    """A JSON list, JSON Lines or Parquet file of LLaVA records."""
    images: str | None
    """The folder that the records' pictures are relative to."""
    sources: dict[str, SourceConfig]
    """Several sources by name, instead of `path`."""
    index: str | None
    """Where the dataset's index is kept; null: beside the (first) file of records, named as it with `.index` behind."""
    examine: Examine
    """decode: every picture is read to its end before the first training; head: its size alone."""
    allow_links: bool
    """Whether symbolic links in the folder of pictures may lead out of it."""
    bad_records: BadRecords
    """Records that cannot be trained on: fail stops before training begins, or where a picture breaks later; skip
    goes on without them, on every rank alike, and lists them in skipped_records.jsonl."""
    max_bad_records: str
    """Most that data.bad_records=skip leaves out: a share of the records (`0.1%`, rounded down) or a number (`20`)."""
    template: str
    image_aspect_ratio: AspectRatio
    grid_pinpoints: list[list[int]]
    """anyres only: sizes [width, height] in pixels that a picture may be fitted into, multiples of the tower's; empty:
    LLaVA-NeXT's, 1x2, 2x1, 2x2, 3x1 and 1x3 times the tower's."""
    pixels: Pixels
    """exact: pictures as a viewer shows them; llava_v1_5: as the original reads them (no EXIF orientation, 16-bit
    and floating point values clipped, transparency ignored, anyres as square); fast: as exact, in fewer operations, not
    to the bit (data/images/fast_resize.py)."""
    max_length: int
    """Longest sample in positions, image positions included."""
    too_long: TooLong
    special_tokens: SpecialTokens | None = None
    """text: special tokens in a record's text (`</s>`) are tokenized as any other text; parse: they become the tokens
    that they name; null: text, and with labels=llava_v1_5 parse, which is what the original does."""
    max_record_bytes: int = 4 << 20
    """Most bytes of one record in its file; a larger one is left out without being parsed. Counting the tokens of a
    text takes memory (docs/data.md), in every process that does so."""
    workers: int | None
    """Processes that prepare batches on each rank; 0 prepares them between steps; null: up to 4, as cores allow."""
    prefetch: int
    """Steps that each worker prepares ahead."""
    stall: int
    """Seconds without progress on one record after which a worker that is waited for counts as stalled."""

    @property
    def trained_aspect(self) -> AspectRatio:
        """The original trains anyres as square (LLaVA train.py:702-718)."""
        as_square = self.image_aspect_ratio is AspectRatio.anyres and self.pixels is Pixels.llava_v1_5
        return AspectRatio.square if as_square else self.image_aspect_ratio

    @property
    def index_folder(self) -> Path:
        first = next(iter(self.sources.values())).path if self.sources else self.path
        return Path(self.index or f"{first}.index")

    @property
    def source_names(self) -> list[str]:
        """Of every source in their order; a single one that has no name is called as its file is."""
        return list(self.sources) or [Path(str(self.path)).stem]

    def budget(self, records: int) -> int:
        """Most of so many records that may be left out."""
        if self.max_bad_records.endswith("%"):
            return math.floor(Fraction(self.max_bad_records[:-1]) * records / 100)
        return int(self.max_bad_records)

    def __post_init__(self) -> None:
        if self.path is None and not self.sources:
            raise ConfigError("data.path is not set; give it on the command line: data.path=VALUE")
        if self.path is not None and self.sources:
            raise ConfigError(
                f"data.path={self.path} and data.sources={sorted(self.sources)} are both set; make the file one of the "
                "sources, or set data.path=null"
            )
        if len({own.weight is None for own in self.sources.values()}) > 1 or any(
            own.weight is not None and own.epochs is not None for own in self.sources.values()
        ):
            raise ConfigError("data.sources: give every source a weight, or none of them; a weight replaces epochs")
        if not re.fullmatch(r"\d+|\d+(\.\d+)?%", self.max_bad_records):
            raise ConfigError(
                f"data.max_bad_records={self.max_bad_records} is neither a share of the records, as 0.1%, nor a "
                f"number of them"
            )
        if self.max_bad_records.endswith("%") and Fraction(self.max_bad_records[:-1]) > 100:
            raise ConfigError(f"data.max_bad_records={self.max_bad_records} is more than all records; 100% is the most")
        at_least("data.max_length", self.max_length, 2)
        at_least("data.max_record_bytes", self.max_record_bytes, 1024)
        if self.grid_pinpoints and self.image_aspect_ratio is not AspectRatio.anyres:
            raise ConfigError(
                f"data.grid_pinpoints is for data.image_aspect_ratio=anyres; with {self.image_aspect_ratio.value} a "
                "picture is one tile: set it to []"
            )
        for size in self.grid_pinpoints:
            if len(size) != 2 or min(size) < 1:
                raise ConfigError(f"data.grid_pinpoints: {size} is not a [width, height] in pixels")
        if self.workers is not None:
            at_least("data.workers", self.workers, 0)
        at_least("data.prefetch", self.prefetch, 1)
        at_least("data.stall", self.stall, 1)


@dataclass(kw_only=True, slots=True)
class SamplerConfig:
    name: SamplerName
    """shuffle: a permutation of (seed, epoch), cut anew for any number of ranks; llava_v1_5: the original's samplers,
    whose order depends on the number of ranks and on micro_batch_size."""
    group_by_modality_length: bool
    """llava_v1_5 only: its sampler that groups pictures and text, and like lengths; else its plain one."""


@dataclass(kw_only=True, slots=True)
class HeldOutConfig:
    """One of several files of held-out records."""

    path: str
    images: str | None = None
    """null: val.images"""


@dataclass(kw_only=True, slots=True)
class ValConfig:
    """Held-out records, which a run is measured on while it trains. Nothing here changes what is trained."""

    every: int | None
    """Steps between two validations, and one after the last step; null: none at all."""
    path: str | None
    """A file of records as data.path takes them; null: with data=shapes the embedded held-out pictures."""
    images: str | None
    """The folder of their pictures; null: data.images."""
    sources: dict[str, HeldOutConfig]
    """Several files by name, instead of `path`; each has a loss of its own."""
    index: str | None
    """Where their index is kept; null: beside the (first) file."""
    limit: int | None
    """Most records of each file, spread evenly over it; null: all."""
    answers: int
    """Questions that are answered and scored, spread evenly over the records; 0: the loss alone."""
    batch_size: int
    """Most answers that a rank writes at once; fewer where half of a micro-batch's positions do not hold them."""
    max_new_tokens: int
    metric: Metric
    shown: int
    """Answers that validation.jsonl keeps of each validation."""

    def __post_init__(self) -> None:
        for name in ("every", "limit"):
            if (value := getattr(self, name)) is not None:
                at_least(f"val.{name}", value, 1)
        at_least("val.answers", self.answers, 0, "0 measures the loss alone")
        at_least("val.batch_size", self.batch_size, 1)
        at_least("val.max_new_tokens", self.max_new_tokens, 1)
        at_least("val.shown", self.shown, 0)
        if self.path is not None and self.sources:
            raise ConfigError(
                f"val.path={self.path} and val.sources={sorted(self.sources)} are both set; make the file one of the "
                "sources, or set val.path=null"
            )

    @property
    def is_named(self) -> bool:
        """Some held-out file is."""
        return self.path is not None or bool(self.sources)
