"""A dataset opened for one model, and its steps as they arrive from worker processes, on the device.

A worker prepares whole steps, so that the position of a run is one number, the step, whatever the number of ranks and
workers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from llava_fsdp.config import BadRecords, Config, Parity
from llava_fsdp.data.batching.batch import LeftOut, MicroBatch, Step
from llava_fsdp.data.batching.cost_model import CostModel
from llava_fsdp.data.batching.packing import num_micro_batches
from llava_fsdp.data.batching.sampler import Order, open_order
from llava_fsdp.data.batching.step_dataset import Steps
from llava_fsdp.data.batching.workers import Watch, from_workers
from llava_fsdp.data.images.anyres import grid_sizes
from llava_fsdp.data.images.preprocess import PictureReader, Preprocessor, read_preprocessor
from llava_fsdp.data.index.bad_records import open_records, remarks
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.text.conversation import IM_END, IM_START
from llava_fsdp.data.text.encode import Encoder, ExactEncoder, OriginalEncoder
from llava_fsdp.data.text.llava_v1_5 import Original
from llava_fsdp.data.text.templates import template
from llava_fsdp.data.text.tokenizer import Tokenizer, open_tokenizer
from llava_fsdp.runtime.errors import ConfigError, DataError, LlavaFsdpError
from llava_fsdp.runtime.host import read_host
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.progress import watch, watch_silently

PAD_OF_V0 = "[PAD]"
Gather = Callable[[list[LeftOut]], list[LeftOut]]
"""This rank's items -> every rank's, in the order of ranks."""


@dataclass(frozen=True)
class ModelShape:
    """What the data must know of the model."""

    image_tokens: int
    """Positions that a picture takes."""
    image_size: int
    """Pixels on a side."""
    max_length: int
    """Positions that the language model was made for."""
    vocab_size: int
    cost: CostModel = field(default_factory=CostModel)
    """What a sample costs; without it, its positions."""


def build_loader(
    cfg: Config,
    language_folder: Path,
    vision_folder: Path,
    shape: ModelShape,
    rank: int,
    world_size: int,
    device: torch.device,
    gather: Gather = list,
    choose: Callable[[Records], Order] | None = None,
) -> Loader:
    """Open the dataset for one model.

    Args:
        choose: gives the order of the records; None: the one that `sampler=` names.

    Raises:
        ConfigError: the dataset, the model and the configuration do not fit together.
        DataError: the dataset file is not one.
    """
    encoder, pictures = open_encoding(cfg, language_folder, vision_folder, shape)
    records = open_records(cfg, encoder, pictures, watch if rank == 0 else watch_silently)
    if rank == 0 and (said := remarks(records)):
        log().warning(said)
    order = open_order(records.words, cfg, world_size, records.source_counts) if choose is None else choose(records)
    workers = cfg.data.workers
    if workers is None:
        workers = read_host().data_workers(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    watched = replace(pictures, watch=Watch(workers))
    return Loader(Steps(records, order, encoder, watched, cfg, rank, world_size, shape.cost), cfg, device, gather)


def open_encoding(
    cfg: Config, language_folder: Path, vision_folder: Path, shape: ModelShape
) -> tuple[Encoder, PictureReader]:
    """What makes samples of records, for one model.

    Raises:
        ConfigError: the model and the configuration do not fit together.
    """
    pictures = open_pictures(cfg, vision_folder, shape)
    encoder = open_encoder(cfg, language_folder, shape, pictures)
    check_fit(cfg, shape, encoder.tokenizer.size, pictures, vision_folder)
    return encoder, pictures


def open_pictures(cfg: Config, vision_folder: Path, shape: ModelShape) -> PictureReader:
    return PictureReader(
        folder=Path(cfg.data.images) if cfg.data.images is not None else None,
        preprocessor=read_preprocessor(vision_folder),
        aspect=cfg.data.trained_aspect,
        pixels=cfg.data.pixels,
        image_tokens=shape.image_tokens,
        sizes=tuple(grid_sizes(cfg.data.grid_pinpoints, shape.image_size)),
        merge=cfg.model.patch_merge,
    )


def open_encoder(cfg: Config, folder: Path, shape: ModelShape, pictures: PictureReader) -> Encoder:
    """What `labels=` names.

    Raises:
        ConfigError: `data.template` is none, or the tokenizer lacks the tokens of `model.image_start_end`.
    """
    form, start_end = template(cfg.data.template), cfg.model.image_start_end
    if cfg.labels is Parity.exact:
        tokenizer = open_tokenizer(folder, shape.vocab_size)
        check_start_end(tokenizer, start_end, folder)
        return ExactEncoder(
            tokenizer, form, pictures.places, cfg.data.max_length, cfg.data.too_long, start_end,
            cfg.trained_special_tokens,
        )  # fmt: skip
    # --version v0 adds a padding token
    is_v0 = cfg.data.template == "v0"
    tokenizer = open_tokenizer(folder, shape.vocab_size, extra=(PAD_OF_V0,) if is_v0 else ())
    check_start_end(tokenizer, start_end, folder)
    pad = tokenizer.special(PAD_OF_V0 if is_v0 else "<unk>")
    if pad is None:
        raise ConfigError(
            f"labels=llava_v1_5: the tokenizer of {folder} has no <unk>, which the original takes for padding; it was "
            "made for Llama tokenizers: set labels=exact"
        )
    own = Original(tokenizer, template(cfg.trained_template), cfg.data.max_length, pad, start_end)
    return OriginalEncoder(own, pictures.places)


def check_start_end(tokenizer: Tokenizer, start_end: bool, folder: Path) -> None:
    for token in (IM_START, IM_END) if start_end else ():
        if tokenizer.special(token) is None:
            raise ConfigError(
                f"model.image_start_end=true, and the tokenizer of {folder} has no {token}; only checkpoints that were "
                "trained with it have it: set it to false"
            )


def check_fit(cfg: Config, shape: ModelShape, tokenizer_size: int, pictures: PictureReader, folder: Path) -> None:
    preprocessor = pictures.preprocessor
    for width, height in pictures.sizes if pictures.in_tiles else ():
        if width % preprocessor.size or height % preprocessor.size:
            raise ConfigError(
                f"data.grid_pinpoints: [{width}, {height}] is no multiple of the tower's {preprocessor.size} pixels"
            )
    if preprocessor.size != shape.image_size:
        raise ConfigError(
            f"model.vision: {folder / 'preprocessor_config.json'} makes pictures of {preprocessor.size} pixels, and "
            f"the tower takes {shape.image_size}: a picture would not be {shape.image_tokens} tokens; "
            "use the files of one model"
        )
    if cfg.data.max_length > shape.max_length:
        raise ConfigError(
            f"data.max_length={cfg.data.max_length} is above the {shape.max_length} positions of the language model; "
            f"set data.max_length={shape.max_length} or less"
        )
    if pictures.most_positions >= cfg.data.max_length:
        raise ConfigError(
            f"data.max_length={cfg.data.max_length} has no room for a picture of {pictures.most_positions} tokens; "
            "raise it"
        )
    if tokenizer_size > shape.vocab_size + (cfg.labels is Parity.llava_v1_5 and cfg.data.template == "v0"):
        raise ConfigError(
            f"model.language: the tokenizer has {tokenizer_size} tokens, and the model {shape.vocab_size} rows for "
            "them; use the files of one model"
        )


class Loader:
    """Iterates over the steps of a run, from any step on."""

    def __init__(self, steps: Steps, cfg: Config, device: torch.device, gather: Gather = list):
        self.steps = steps
        self.gather = gather
        self.broken: set[int] = set()
        """Records that turned out broken in training."""
        self.device = device
        self.watch = steps.pictures.watch or Watch()
        self.data = cfg.data
        self.total_steps = cfg.max_steps or cfg.epochs * steps.per_epoch
        self.table = pixel_table(steps.pictures.preprocessor, device)

    @property
    def num_micro_batches(self) -> int:
        """Of a full step on each rank, where rows are padded; packed, each step has its own number."""
        return num_micro_batches(self.steps.global_batch_size, self.steps.world_size, self.steps.micro_batch_size)

    def from_step(self, first: int) -> Iterator[Step]:
        """Steps `first` to `total_steps`, on every rank alike."""
        for step in self.prepared(first):
            assert step is not None, "nobody gives up"
            yield self.agree(step)

    def prepared(self, first: int, give_up: Callable[[], bool] = lambda: False) -> Iterator[Step | None]:
        """Steps `first` to `total_steps`, as this rank prepared them: `agree` makes of each what all ranks see.

        Args:
            give_up: asked while a step is waited for; where it says yes, None comes instead of it, and no more.

        Raises:
            DataError: a record or a picture of the step is wrong; or a worker died or stalled (WorkerError).
            OutOfMemory: a worker has no memory to hand a step over.
        """
        self.steps.order.draw(self.total_steps)
        if first < self.total_steps:  # what workers would each make for themselves is made before they are forked
            self.steps.facts(first, self.steps.order.samples(first))
        numbers, pin_memory = range(first, self.total_steps), self.device.type == "cuda"
        prefetch, stall = self.data.prefetch, self.data.stall
        for step in from_workers(self.steps, numbers, self.watch, prefetch, stall, pin_memory, give_up):
            if isinstance(step, LlavaFsdpError):
                raise step
            assert step is None or isinstance(step, Step)
            yield step

    def agree(self, step: Step) -> Step:
        """The step without what any rank had to leave out, on every rank alike.

        Raises:
            DataError: more records are wrong than `data.max_bad_records` allows.
        """
        if self.data.bad_records is BadRecords.fail:
            return step
        left_out = self.gather(step.facts.left_out)
        new = {sample.number for sample in left_out} - self.broken
        self.broken |= new
        records = self.steps.records
        total = len(records.index)
        wrong, budget = records.out + len(self.broken), self.data.budget(total)
        if new and wrong > budget:
            raise DataError(
                f"{wrong} of {total} records are wrong, more than the {budget} of data.max_bad_records="
                f"{self.data.max_bad_records}; the last one: {left_out[-1].reason}"
            )
        return step.without(left_out, self.steps.collate.normalize)

    def check_workers(self) -> None:
        """Raises WorkerError where one has died: the DataLoader says so by a RuntimeError wherever the process is."""
        self.watch.check()

    def to_device(self, micro: MicroBatch) -> MicroBatch:
        """The micro-batch on the device, its pictures normalised by table: the processor's very numbers."""
        moved = micro.map(lambda values: values.to(self.device, non_blocking=True))
        return replace(moved, images=normalize(moved.images, self.table))


def pixel_table(preprocessor: Preprocessor, device: torch.device) -> torch.Tensor:
    """float32 [3, 256] on the device: the normalised value of every byte, by channel.

    Copied, because the memory of a NumPy array begins at any multiple of 16 bytes. Kernels may give other last bits
    for floats that do not begin at a multiple of 64, as all memory of torch's own allocators does.
    """
    return torch.tensor(preprocessor.pixel_table(), device=device)


def normalize(images: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 3, height, width] -> float32, each byte looked up in its channel's row of `table` [3, 256]."""
    channel = torch.arange(3, device=images.device).view(1, 3, 1, 1)
    return table[channel, images.long()]
