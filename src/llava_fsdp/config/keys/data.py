"""Configuration keys of the data: sources of training records, sampling order and validation data."""

import hashlib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from llava_fsdp.config.bounds import AUTO, above_zero, at_least
from llava_fsdp.config.keys.enums import (
    Answers,
    AspectRatio,
    BadRecords,
    EmptyThoughts,
    Examine,
    History,
    LabelWeights,
    Metric,
    Pixels,
    SamplerName,
    Source,
    SpecialTokens,
    Thoughts,
    TooLong,
)
from llava_fsdp.runtime.errors import ConfigError

MOST_EPOCHS = 1000
"""Maximum value of the key `epochs` of a data source."""
MAGIC = re.compile(r"[*?[]")
"""Wildcard characters, which make a path a pattern."""
REMOTE = re.compile(r"(s3|gs|hf)://")
"""Beginning of the URLs of the remote storages that are read."""
ITEM = re.compile(r"""\s*('[^']*'|"[^"]*"|[^,]*)\s*(?:,|$)""")
"""Matches an item of a list of paths, which may be in quotes, and the comma behind it."""
QUOTES = ('"', "'")
OWN_TEMPLATE = "chat_template"
"""Name of a model's own template in `data.template`; a run records it as chat_template-DIGEST."""
FULL_WEIGHT = 1 << 16
"""The weight 1 of a label. Weights are whole numbers, so that their sums do not depend on the order."""
HELDOUT = "heldout.json"
"""Name of the file with the validation records of the embedded dataset (data=shapes)."""


def paths_in(path: str) -> list[str]:
    """Return the paths that the value of a configuration key such as `data.path` names, at least one: the text itself
    if it is an existing path; the items of a list in brackets, `[a.json, "b, c.jsonl"]`, which may be quoted; else the
    parts between commas."""
    if os.path.exists(path):
        return [path]
    if not (path.startswith("[") and path.endswith("]")):
        return [part.strip() for part in path.split(",")]
    items = [item.strip() for item in ITEM.findall(path[1:-1])[:-1]]  # the last one is the empty text at the end
    is_quoted = [len(item) > 1 and item[0] == item[-1] and item[0] in QUOTES for item in items]
    return [item[1:-1] if quoted else item for item, quoted in zip(items, is_quoted, strict=True)] or [""]


def list_text(paths: Sequence[object], key: str) -> str:
    """Return a list of paths as the text from which `paths_in` reads them.

    Args:
        key: name of the configuration key whose value the list is, for messages.

    Raises:
        ConfigError: an item is not a text, is empty, or has both kinds of quotes.
    """
    items = []
    for number, path in enumerate(paths):
        if not isinstance(path, str) or not path.strip():
            raise ConfigError(f"{key}[{number}]={path!r} is not a path; every item of the list must be a text")
        quote = next((quote for quote in QUOTES if quote not in path), None)
        if quote is None:
            raise ConfigError(f"{key}[{number}]={path} has both kinds of quotes; rename it, or name its folder")
        items.append(path if re.fullmatch(r"[^,'\"\s]+", path) else f"{quote}{path}{quote}")
    if not items:
        raise ConfigError(f"{key}=[] names no file; name one")
    return f"[{', '.join(items)}]"


def fixed_part(path: str) -> str:
    """Return `path` unchanged or, if it is a pattern such as `data/*.json`, the folder before its first wildcard."""
    found = MAGIC.search(path)
    return path if found is None or os.path.exists(path) else os.path.dirname(path[: found.start()]) or "."


def is_remote(path: str) -> bool:
    """Return whether a path is the URL of a remote storage that this package can read (s3://, gs:// or hf://)."""
    return REMOTE.match(path) is not None


@dataclass(kw_only=True, slots=True)
class StageConfig:
    name: str
    corpus: str
    """File of the embedded dataset (data=shapes) to train on: captions, instructions or heldout; other datasets ignore
    this key."""


@dataclass(kw_only=True, slots=True)
class SourceConfig:
    """Configuration keys of one data source (one or several files of training records), if a dataset has several
    sources (data.sources.NAME)."""

    path: str
    """Files of records, as in data.path."""
    images: str | None = None
    """Folder of this source's images; null: data.images."""
    epochs: float | None = None
    """How many times each record occurs in an epoch; null: once."""
    weight: float | None = None
    """Share of an epoch's samples, relative to the weights of the other sources. With weights an epoch has as many
    samples as all sources together have records."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a value, or a combination of values, is not allowed."""
        above_zero(f"data.sources: source of {self.path}: epochs", self.epochs)
        above_zero(f"data.sources: source of {self.path}: weight", self.weight)
        if self.epochs is not None and self.epochs > MOST_EPOCHS:
            raise ConfigError(
                f"data.sources: epochs={self.epochs:g} of {self.path} is more than {MOST_EPOCHS:,} in one epoch; raise "
                "the run's own epochs, or give the sources weights"
            )


@dataclass(kw_only=True, slots=True)
class DataConfig:
    source: Source
    """Kind of dataset: shapes (the embedded dataset) or llava_json (records in files)."""
    root: str | None
    """Folder in which the files of the embedded dataset (data=shapes) are generated; other datasets ignore this key."""
    path: str | None
    """Files of records: a file, a folder, a pattern, or a list of these. They are JSON lists, JSON Lines, Parquet or
    tars, and may be remote: s3://, gs://, hf://datasets/ORG/NAME."""
    images: str | None
    """Folder to which the image paths in records are relative. It may be remote, see data.path: then each
    image is a file of its own below it."""
    question: str | None = None
    """Key (in Parquet, column) of the question, if records are a question and an answer; null: another form."""
    answer: str | None = None
    """Key of the answer, set together with data.question."""
    image_column: str | None = None
    """Key of a record's images beside `image` and `images`."""
    sources: dict[str, SourceConfig]
    """Several sources by name, instead of data.path."""
    index: str | None
    """Folder of the dataset's index; null: the first path with `.index` appended. With a pattern it is the pattern's
    folder with `.index` appended, and for remote files a folder below data.cache."""
    cache: str | None = None
    """Folder for copies of remote data; null: `~/.cache/llava_fsdp`, or that of XDG_CACHE_HOME."""
    cache_gb: float = 20.0
    """Maximum GiB of images of remote files that are kept in data.cache."""
    examine: Examine
    """How images are checked before the first training. decode: every image is decoded completely; head: only the size
    of each is read; sample: data.examine_images of them are decoded, drawn at random; lazy: none is opened, and with
    anyres and anyres_max the records' keys width and height must give their sizes; auto: decode for up to a million
    images, sample for more. What has not been decoded is checked when it is read in training."""
    examine_images: int = 3000
    """data.examine=sample: number of images that are decoded. They are drawn at random, besides a few of each file of
    records."""
    allow_links: bool
    """Whether links in the folder of images may lead out of it."""
    bad_records: BadRecords
    """What happens if records cannot be trained on. fail: the run ends; skip: they are left out, and listed in
    skipped_records.jsonl."""
    max_bad_records: str
    """Maximum number of skipped records: a share (`0.1%`) or a number (`20`). A share is of all records, rounded
    down."""
    template: str
    """Name of the conversation template. auto is the one that model.checkpoint was trained with, or chat_template (the
    language model's own), or that of the language model's type."""
    image_aspect_ratio: AspectRatio
    """How an image is fitted into the square input of the vision tower."""
    grid_pinpoints: list[list[int]]
    """anyres and anyres_max: sizes [width, height] in pixels that an image may be fitted into. They are multiples of
    the vision tower's input size. Empty: with anyres LLaVA-NeXT's sizes, which are 1x2, 2x1, 2x2, 3x1 and 1x3 times the
    input size; with anyres_max LLaVA-OneVision's, 1x1 to 6x6 times."""
    max_tiles: int
    """anyres_max: number of tiles to whose features larger images are shrunk. The tile of the whole image does not
    count (`anyres_max_9` of LLaVA-OneVision: 9)."""
    video_fps: float | None = None
    """Frames that are taken of each second of a video. null: 1 with anyres_max; for a whole model as its processor does
    by itself, which may be all frames."""
    video_frames: int | None = None
    """Maximum number of frames of a video. If video_fps would take more, as many of them are taken at equal distances.
    null: 32 with anyres_max; for a whole model no maximum."""
    pixels: Pixels
    """How image files are decoded to pixels. exact: as an image viewer shows them; llava_v1_5: as the original LLaVA
    reads them (no EXIF orientation, wide values clipped, transparency ignored, anyres as square); fast: close to
    exact."""
    max_length: int
    """Maximum number of tokens of a sample, with image tokens. With data.pairs, of the prompt with one of its two
    answers."""
    too_long: TooLong
    """What happens with samples of more than data.max_length tokens."""
    special_tokens: SpecialTokens | None = None
    """How special tokens in a record's text (`</s>`) are tokenized. text: as ordinary text; parse: as
    special tokens; null: parse with labels=llava_v1_5, else text."""
    thoughts: Thoughts = Thoughts.refuse
    """Thoughts of answers. refuse: records with one are refused; train: a thought is learnt, like the answer; context:
    it is read before the answer, and not learnt; drop: it is left out."""
    empty_thoughts: EmptyThoughts = EmptyThoughts.train
    """Answers without a thought, if the chat template knows thoughts. train: the model learns to write the empty
    thought; context: it reads it, and does not learn it."""
    history: History = History.template
    """Thoughts of earlier turns in prompts. template: as the chat template shows them; keep: all, if the template
    has a variable for it."""
    answers: Answers = Answers.all
    """Answers of a record that are learnt: all, or the last one."""
    weights: LabelWeights = LabelWeights.use
    """Weights that records give their answers. use: the loss is the mean over labels by weight; ignore: all are 1."""
    pairs: bool = False
    """Whether records are pairs. They have a chosen and a rejected answer, which training compares (stage=prefer)."""
    prompt_once: bool = False
    """Whether both answers of a pair attend to one copy of their prompt. It takes fewer tokens, and gives the same loss
    up to rounding."""
    max_record_bytes: int = 4 << 20
    """Maximum number of bytes of one record in its file. A larger record is skipped without being parsed, because
    parsing would take too much memory (docs/data.md)."""
    workers: int | None
    """Number of processes that prepare steps for each rank; null: up to 4. It depends on the number of cores. 0: the
    rank itself prepares them between steps."""
    prefetch: int
    """Number of steps that each worker process prepares ahead."""
    stall: int
    """Seconds that a worker may spend on one record while training waits. After that it counts as stalled."""

    @property
    def sample_tokens(self) -> int:
        """Maximum number of tokens that a sample has in a row: a pair has both answers there, each with the prompt."""
        return self.max_length * (2 if self.pairs else 1)

    @property
    def names_template(self) -> bool:
        """Whether data.template names one of LLaVA's templates; if not, the model's folder decides."""
        return self.template != AUTO and self.template.partition("-")[0] != OWN_TEMPLATE

    @property
    def trained_aspect(self) -> AspectRatio:
        """How training really fits an image into the square input of the vision tower: data.image_aspect_ratio, but
        square for anyres (several tiles) with data.pixels=llava_v1_5, as in the original LLaVA (train.py:702-718)."""
        as_square = self.image_aspect_ratio is AspectRatio.anyres and self.pixels is Pixels.llava_v1_5
        return AspectRatio.square if as_square else self.image_aspect_ratio

    @property
    def index_folder(self) -> Path:
        """Folder of the dataset's index: `data.index`, or if that is null, the first data path with `.index` appended;
        of a pattern, the folder before it. For remote files it is in the cache folder, and its name has a hash of the
        URL, so that URLs with equal ends have different indexes."""
        first = next(iter(self.sources.values())).path if self.sources else self.path
        path = fixed_part(paths_in(str(first))[0]).rstrip("/")
        if self.index is None and is_remote(path):
            name = hashlib.sha256(str(first).encode()).hexdigest()[:12]
            return self.cache_folder / "index" / f"{Path(path).name}-{name}.index"
        return Path(self.index or f"{path}.index")

    @property
    def cache_folder(self) -> Path:
        """Folder for copies of remote data: `data.cache`, or if that is null, the user's cache folder. Raise
        ConfigError if it begins with the home folder (`~NAME`) of a user who does not exist."""
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        try:
            return Path(self.cache or f"{base}/llava_fsdp").expanduser()
        except RuntimeError:  # ~NAME of a user who does not exist
            raise ConfigError(f"data.cache={self.cache}: there is no such user; give another folder") from None

    @property
    def source_names(self) -> list[str]:
        """Names of all data sources (files of training records) in order. A single source without a name is named after
        its (first) path, without folder and extension."""
        return list(self.sources) or [Path(paths_in(str(self.path))[0]).stem]

    def budget(self, records: int) -> int:
        """Return how many records of a dataset may be skipped at most because training cannot use them
        (`data.max_bad_records`, a number or a percentage). `records`: number of all records of the dataset."""
        if self.max_bad_records.endswith("%"):
            return math.floor(Fraction(self.max_bad_records[:-1]) * records / 100)
        return int(self.max_bad_records)

    def __post_init__(self) -> None:
        """Raise ConfigError if a value, or a combination of values, is not allowed."""
        if self.path is None and not self.sources:
            raise ConfigError("data.path is not set; give it on the command line: data.path=VALUE")
        if self.path is not None and self.sources:
            raise ConfigError(
                f"data.path={self.path} and data.sources={sorted(self.sources)} are both set; make the file one of the "
                "sources, or set data.path=null"
            )
        if (self.question is None) is not (self.answer is None) or (
            self.question is not None and self.question == self.answer
        ):
            raise ConfigError(
                f"data.question={self.question} and data.answer={self.answer}: name two keys of a record, or none"
            )
        sources = self.sources.values()
        has_both = any(source.weight is not None and source.epochs is not None for source in sources)
        if has_both or len({source.weight is None for source in sources}) > 1:
            raise ConfigError("data.sources: give every source a weight, or none of them; a weight replaces epochs")
        if not re.fullmatch(r"\d+|\d+(\.\d+)?%", self.max_bad_records):
            raise ConfigError(
                f"data.max_bad_records={self.max_bad_records} is neither a share of the records, as 0.1%, nor a number"
            )
        if self.max_bad_records.endswith("%") and Fraction(self.max_bad_records[:-1]) > 100:
            raise ConfigError(f"data.max_bad_records={self.max_bad_records} is more than all records; 100% is the most")
        at_least("data.examine_images", self.examine_images, 1)
        at_least("data.max_length", self.max_length, 2)
        at_least("data.max_record_bytes", self.max_record_bytes, 1024)
        if self.grid_pinpoints and self.image_aspect_ratio not in (AspectRatio.anyres, AspectRatio.anyres_max):
            raise ConfigError(
                f"data.grid_pinpoints is for data.image_aspect_ratio=anyres and anyres_max; with "
                f"{self.image_aspect_ratio.value} an image is one tile: set it to []"
            )
        at_least("data.max_tiles", self.max_tiles, 1)
        above_zero("data.video_fps", self.video_fps)
        at_least("data.video_frames", self.video_frames, 1)
        for size in self.grid_pinpoints:
            if len(size) != 2 or min(size) < 1:
                raise ConfigError(f"data.grid_pinpoints: {size} is not a [width, height] in pixels")
        at_least("data.workers", self.workers, 0)
        at_least("data.prefetch", self.prefetch, 1)
        at_least("data.stall", self.stall, 1)
        if not self.cache_gb >= 0:
            raise ConfigError(f"data.cache_gb={self.cache_gb:g} must be at least 0")


@dataclass(kw_only=True, slots=True)
class SamplerConfig:
    name: SamplerName
    """Order of the samples. shuffle: a permutation that depends on (seed, epoch) and not on the number of ranks;
    computed_shuffle: another such permutation, whose memory does not grow with the number of records; llava_v1_5: the
    order of the original LLaVA's samplers, which depends on the number of ranks and on micro_batch_size."""
    group_by_modality_length: bool
    """sampler=llava_v1_5: whether to group samples by images and length, as the original LLaVA's sampler can."""


@dataclass(kw_only=True, slots=True)
class HeldOutConfig:
    """Configuration keys of one source of validation records, if there are several (val.sources.NAME)."""

    path: str
    """Files of records, as in data.path."""
    images: str | None = None
    """Folder of this source's images; null: val.images."""


@dataclass(kw_only=True, slots=True)
class ValConfig:
    """Configuration keys of validation: the records on which the model is measured during training. Validation does not
    change the training."""

    every: int | None
    """Number of steps between two validations; null: none. The last step is followed by one in any case."""
    path: str | None
    """Files of validation records, as in data.path. null: with data=shapes, the embedded validation set."""
    images: str | None
    """Folder of the validation records' images; null: data.images."""
    sources: dict[str, HeldOutConfig]
    """Several sources by name, instead of val.path. Loss and score are also computed for each source."""
    index: str | None
    """Folder of the validation records' index; null: the first path with `.index` appended."""
    limit: int | None
    """Maximum number of records of each source; null: all. They are spread evenly over the source."""
    answers: int
    """Number of questions that are answered and scored; 0: only the loss. They are spread evenly over the records of
    all sources, but at least one of each source."""
    batch_size: int
    """Maximum number of answers that a rank generates at once. It generates fewer if they would need more than half of
    the tokens of a micro-batch."""
    max_new_tokens: int
    """Maximum number of tokens of an answer."""
    metric: Metric
    """How an answer is scored against the record's."""
    shown: int
    """Number of answers that validation.jsonl and the report page show. There are as many of every source, wrong ones
    first."""
    patience: int | None = None
    """Number of validations without a better one (checkpoint.best), after which training ends."""
    tasks: list[str] = field(default_factory=list)
    """Tasks of lmms-eval that are asked too, `val.answers` documents of each."""
    tasks_folder: str | None = None
    """Folder with tasks of lmms-eval of your own."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a value, or a combination of values, is not allowed."""
        for name in ("every", "limit", "batch_size", "max_new_tokens", "patience"):
            at_least(f"val.{name}", getattr(self, name), 1)
        at_least("val.answers", self.answers, 0, "0 measures the loss alone")
        at_least("val.shown", self.shown, 0)
        if self.tasks and (self.every is None or self.answers == 0):
            raise ConfigError(f"val.tasks={self.tasks} needs val.every=STEPS, and val.answers above 0")
        if self.path is not None and self.sources:
            raise ConfigError(
                f"val.path={self.path} and val.sources={sorted(self.sources)} are both set; make the file one of the "
                "sources, or set val.path=null"
            )

    @property
    def is_named(self) -> bool:
        """Whether the configuration names a file of validation records (`val.path` or `val.sources`)."""
        return self.path is not None or bool(self.sources)
