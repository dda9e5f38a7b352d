"""Open a dataset for one model, and iterate over its training steps.

A data worker prepares whole steps. So a run can be resumed given only the number of a step, on any number of ranks and
workers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from llava_fsdp.config import AspectRatio, BadRecords, Config, LossKernel, Parity, is_remote
from llava_fsdp.data.batching.batch import MicroBatch, SkippedSample, Step
from llava_fsdp.data.batching.context_cut import ContextCut
from llava_fsdp.data.batching.cost_model import CostModel
from llava_fsdp.data.batching.packing import num_micro_batches
from llava_fsdp.data.batching.sampler import Sampler, open_sampler
from llava_fsdp.data.batching.step_dataset import Steps
from llava_fsdp.data.batching.tile_inputs import with_normalized_tiles
from llava_fsdp.data.batching.workers import WorkerStatus, steps_from_workers
from llava_fsdp.data.images.image_source import ImageSource
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.data.images.preprocess import ImageReader, Preprocessor, read_preprocessor
from llava_fsdp.data.images.video import VideoSampling
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.index.examine.bad_records import open_records, remarks
from llava_fsdp.data.processor.encoder import ProcessorEncoder, check_processor
from llava_fsdp.data.processor.frames import open_frames
from llava_fsdp.data.processor.image_template import open_image_template
from llava_fsdp.data.processor.images import Positions, ProcessorImages
from llava_fsdp.data.processor.processor import Processor, open_processor
from llava_fsdp.data.text.chat_template.jinja_template import ChatTemplate, open_template
from llava_fsdp.data.text.conversation import IM_END, IM_START
from llava_fsdp.data.text.encode import Encoder, ExactEncoder, OriginalEncoder
from llava_fsdp.data.text.llava_v1_5 import Original
from llava_fsdp.data.text.teaching import Teaching
from llava_fsdp.data.text.templates import template
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer
from llava_fsdp.runtime.errors import ConfigError, DataError, LlavaFsdpError
from llava_fsdp.runtime.process.host import read_host
from llava_fsdp.runtime.text.log import log
from llava_fsdp.runtime.text.progress import watch, watch_silently

PAD_OF_V0 = "[PAD]"
"""Padding token that LLaVA adds to the tokenizer with its option `--version v0`."""
Gather = Callable[[list[SkippedSample]], list[SkippedSample]]
"""Collective operation: the skipped samples of this rank -> those of all ranks, in rank order."""


@dataclass(frozen=True)
class ModelShape:
    """Properties of a model that determine how its training data is prepared."""

    image_tokens: int
    """Number of image tokens of a tile."""
    image_size: int
    """Width and height of a tile in pixels."""
    max_length: int
    """Greatest number of tokens in a sequence of the language model."""
    vocab_size: int
    grid_pinpoints: list[list[int]] | None = None
    """Sizes [width, height] in pixels to which the model requires images to be resized before they are cut into tiles;
    None: any."""
    max_tiles: int | None = None
    """Value of `data.max_tiles` that a LLaVA-OneVision model requires; None: any."""
    cost: CostModel = field(default_factory=CostModel)
    """By default, the cost is the number of tokens."""
    processor_folder: Path | None = None
    """Folder of the processor that prepares the model's texts and images; None: images are cut into tiles."""
    needs_blank: bool = False
    """With a processor: whether a micro-batch without images gets a sample with a black image and without labels, and
    one without videos a sample with a black video if the dataset has videos."""
    positions: Positions | None = None
    """With a processor: numbers the tokens of a sample; None: they count from 0."""


def build_loader(
    cfg: Config,
    language_folder: Path,
    vision_folder: Path,
    shape: ModelShape,
    rank: int,
    world_size: int,
    device: torch.device,
    gather: Gather = list,
    choose: Callable[[Records], Sampler] | None = None,
    cut: ContextCut | None = None,
    is_first: bool = True,
) -> Loader:
    """Open the dataset, and what encodes its records for one model. Return a Loader of training steps.

    Args:
        language_folder: folder of the language model, with its tokenizer.
        vision_folder: folder of the vision tower, with its preprocessor.
        shape: sizes and other properties of the model on which its inputs depend.
        rank: number of this rank among those that process different rows.
        world_size: number of ranks that process different rows at the same time.
        device: the device that micro-batches are moved to.
        gather: collective operation that collects the skipped samples of all ranks.
        choose: function that makes the sampler from the opened records; None: the setting `sampler` selects it.
        cut: which positions of each packed row this rank processes; None: all.
        is_first: whether this rank reports about the dataset.

    Raises:
        ConfigError: the dataset, the model and the configuration do not fit together.
        DataError: a dataset file cannot be read, or training may not begin because of bad records.
    """
    encoder, image_reader = open_encoding(cfg, language_folder, vision_folder, shape)
    records = open_records(cfg, encoder, image_reader, watch if is_first else watch_silently)
    if isinstance(encoder, ProcessorEncoder):
        check_kinds(cfg, records, encoder.processor)
    if cfg.loss.kernel is LossKernel.torch and records.weights is not None:
        raise ConfigError(
            f"loss.kernel=torch: torch's kernel returns the sum of all losses, and records of {records.index.folder} "
            "give labels weights between 0 and 1; set loss.kernel=auto, or data.weights=ignore"
        )
    # blank images and videos for micro-batches without any, so that all ranks run the same modules
    if shape.needs_blank and isinstance(image_reader, ProcessorImages):
        assert isinstance(encoder, ProcessorEncoder)
        image_reader = replace(image_reader, blanks=encoder.blanks(records.has_videos))
    if is_first and (message := remarks(records)):
        log().warning(message)
    sampler = open_sampler(records, cfg, world_size) if choose is None else choose(records)
    workers = cfg.data.workers
    if workers is None:
        workers = read_host().data_workers(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    assert isinstance(image_reader, ImageReader | ProcessorImages)
    watched = replace(image_reader, status=WorkerStatus(workers))
    steps = Steps(records, sampler, encoder, watched, cfg, rank, world_size, shape.cost, cut)
    return Loader(steps, cfg, device, gather)


def open_encoding(
    cfg: Config, language_folder: Path, vision_folder: Path, shape: ModelShape
) -> tuple[Encoder, ImageSource]:
    """Build the two objects that convert records to the input of one model: the encoder, which makes token ids and
    labels, and the source of images. Raise ConfigError if the model and the configuration do not fit together.

    Args:
        language_folder: folder of the language model, with its tokenizer.
        vision_folder: folder of the vision tower, with its preprocessor.
        shape: properties of the model on which its inputs depend.
    """
    images = cfg.data.images
    folder = None if images is None or is_remote(images) else Path(images)
    if shape.processor_folder is not None:
        return open_processor_encoding(cfg, folder, shape.processor_folder, shape)
    image_reader = ImageReader(
        folder=folder,
        preprocessor=read_preprocessor(vision_folder),
        tokens=ImageTokens.of_config(cfg, shape.image_size, shape.image_tokens),
        pixels=cfg.data.pixels,
        sampling=VideoSampling.of_config(cfg.data),
        allow_links=cfg.data.allow_links,
    )
    encoder = open_encoder(cfg, language_folder, shape, image_reader)
    check_fit(cfg, shape, encoder.tokenizer.size, image_reader, vision_folder)
    return encoder, image_reader


def open_processor_encoding(
    cfg: Config, images: Path | None, folder: Path, shape: ModelShape
) -> tuple[ProcessorEncoder, ProcessorImages]:
    """Build the two objects that convert records to the input of a model with a processor, which is in `folder`.
    `images`: folder of the images; None: it is not set.

    Raises:
        ConfigError: the model and the configuration do not fit together.
        ModelError: the processor cannot be opened.
    """
    if cfg.data.max_length > shape.max_length:
        raise ConfigError(
            f"data.max_length={cfg.data.max_length} is above the {shape.max_length} tokens of the language model; "
            f"set data.max_length={shape.max_length} or less"
        )
    processor = open_processor(folder)
    tokenizer = open_tokenizer(folder, shape.vocab_size)
    teaching = Teaching.of_config(cfg.data)
    template = teaching.template(open_image_template(cfg.data.template, folder, tokenizer))
    frames = open_frames(template, processor, cfg.data.video_fps, cfg.data.video_frames)
    reader = ProcessorImages(images, processor, cfg.data.pixels, frames, {}, shape.positions, cfg.data.allow_links)
    encoder = ProcessorEncoder(
        tokenizer,
        template,
        processor,
        reader.shape,
        cfg.data.max_length,
        cfg.data.too_long,
        cfg.trained_special_tokens,
        teaching,
        cfg.data.prompt_once,
    )
    check_processor(encoder, has_videos=frames is not None)
    return encoder, reader


def check_kinds(cfg: Config, records: Records, processor: Processor) -> None:
    """Raise ConfigError if images and videos may come into one micro-batch, and their tokens have the same id, so that
    the model cannot tell them apart. If both become inputs of the same names (`shares_inputs`), it need not tell them
    apart: these inputs are in the order of the tokens."""
    has_rows = cfg.packs or cfg.micro_batch_size > 1
    if not (has_rows and records.has_videos and records.has_images) or processor.shares_inputs:
        return
    if processor.shares_tokens:
        raise ConfigError(
            f"{processor.folder}: the tokens of videos are those of images, so that the model takes only one of both "
            "in a micro-batch, and the dataset has both: set pack=false and micro_batch_size=1, or train on one of both"
        )


def open_encoder(cfg: Config, folder: Path, shape: ModelShape, image_reader: ImageReader) -> Encoder:
    """Build the encoder that the setting `labels` selects. Raise ConfigError if `data.template` does not exist or
    cannot be trained with, or the tokenizer lacks tokens that the settings need. `folder`: folder of the language
    model; `image_reader` says which tokens an image has."""
    start_end = cfg.model.image_start_end
    # the padding token that LLaVA adds to the tokenizer with its option `--version v0`
    extra = (PAD_OF_V0,) if has_padding_token(cfg) else ()
    tokenizer = open_tokenizer(folder, shape.vocab_size, extra)
    form = open_template(cfg.data.template, folder, tokenizer)
    for token in (IM_START, IM_END) if start_end else ():
        if tokenizer.special(token) is None:
            raise ConfigError(
                f"model.image_start_end=true, and the tokenizer of {folder} has no {token}; only checkpoints that were "
                "trained with it have it: set it to false"
            )
    if cfg.labels is Parity.exact:
        teaching = Teaching.of_config(cfg.data)
        form = teaching.template(form) if isinstance(form, ChatTemplate) else form
        return ExactEncoder(
            tokenizer, form, image_reader.image_rows, cfg.data.max_length, cfg.data.too_long, start_end,
            cfg.trained_special_tokens, teaching, cfg.data.prompt_once,
        )  # fmt: skip
    if isinstance(form, ChatTemplate):
        raise ConfigError(f"labels=llava_v1_5 knows LLaVA's templates, and data.template={cfg.data.template}; set v1")
    pad = tokenizer.special(extra[0] if extra else "<unk>")
    if pad is None:
        raise ConfigError(
            f"labels=llava_v1_5: the tokenizer of {folder} has no <unk>, which LLaVA pads with; use a Llama "
            "tokenizer, or set labels=exact"
        )
    original = Original(tokenizer, template(cfg.trained_template), cfg.data.max_length, pad, start_end)
    return OriginalEncoder(original, image_reader.image_rows, Teaching.of_config(cfg.data))


def has_padding_token(cfg: Config) -> bool:
    """Return whether a padding token is added to the tokenizer, as LLaVA does with its option `--version v0`."""
    return cfg.labels is Parity.llava_v1_5 and cfg.data.template == "v0"


def check_fit(cfg: Config, shape: ModelShape, tokenizer_size: int, image_reader: ImageReader, folder: Path) -> None:
    """Raise ConfigError if the model, its tokenizer, image preprocessing and the configuration do not fit together."""
    preprocessor, rule = image_reader.preprocessor, image_reader.tokens
    tiled = rule.needs_size(1)
    if tiled and rule.side**2 != shape.image_tokens:
        raise ConfigError(
            f"data.image_aspect_ratio={rule.aspect.value} needs a square of features, and the vision tower gives "
            f"{shape.image_tokens} for a tile; set model.select_feature=patch if one is of a CLS token, or choose "
            "square or pad"
        )
    if shape.max_tiles is not None and (rule.aspect, rule.max_tiles) != (AspectRatio.anyres_max, shape.max_tiles):
        raise ConfigError(
            f"model.checkpoint={cfg.model.checkpoint} is a LLaVA-OneVision model; train it as it was, with "
            f"data.image_aspect_ratio=anyres_max (it is {rule.aspect.value}) and data.max_tiles={shape.max_tiles} (it "
            f"is {rule.max_tiles})"
        )
    # a model that was no LLaVA-OneVision before may become one, with another grid
    starts_onevision = rule.aspect is AspectRatio.anyres_max and shape.max_tiles is None
    if tiled and not starts_onevision and shape.grid_pinpoints not in (None, [list(size) for size in rule.sizes]):
        raise ConfigError(
            f"model.checkpoint={cfg.model.checkpoint} was trained with images fitted into {shape.grid_pinpoints}, and "
            f"this configuration says data.grid_pinpoints={cfg.data.grid_pinpoints}; set data.grid_pinpoints="
            f"{str(shape.grid_pinpoints).replace(' ', '')}"
        )
    for width, height in rule.sizes if tiled else ():
        if width % preprocessor.size or height % preprocessor.size:
            raise ConfigError(
                f"data.grid_pinpoints: [{width}, {height}] is no multiple of the vision tower's "
                f"{preprocessor.size} pixels"
            )
    if preprocessor.size != shape.image_size:
        raise ConfigError(
            f"model.vision: {folder / 'preprocessor_config.json'} makes images of {preprocessor.size} pixels, and "
            f"the vision tower takes {shape.image_size}; use the files of one model"
        )
    if cfg.data.max_length > shape.max_length:
        raise ConfigError(
            f"data.max_length={cfg.data.max_length} is above the {shape.max_length} tokens of the language model; "
            f"set data.max_length={shape.max_length} or less"
        )
    if rule.most_tokens >= cfg.data.max_length:
        raise ConfigError(
            f"data.max_length={cfg.data.max_length} has no room for an image of {rule.most_tokens} tokens; raise it"
        )
    if tokenizer_size > shape.vocab_size + has_padding_token(cfg):
        raise ConfigError(
            f"model.language: the tokenizer has {tokenizer_size} tokens, and the model has embeddings for "
            f"{shape.vocab_size}; use the files of one model"
        )


class Loader:
    """Iterates over the training steps of a run, starting from any step."""

    def __init__(self, steps: Steps, cfg: Config, device: torch.device, gather: Gather = list):
        """`steps`: prepares this rank's part of steps; `gather`: collective that collects skipped samples of ranks."""
        self.steps = steps
        self.gather = gather
        self.broken: set[int] = set()
        """Numbers of the samples that any rank could not read during training."""
        self.device = device
        status = steps.image_reader.status
        self.status = status if isinstance(status, WorkerStatus) else WorkerStatus()
        self.data = cfg.data
        self.total_steps = cfg.max_steps or cfg.epochs * steps.sampler.per_epoch
        reader = steps.image_reader
        # normalizes tiles on the device; images that a model's processor prepares are normalized before
        self.table = pixel_table(reader.preprocessor, device) if isinstance(reader, ImageReader) else None

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Digests of the records, of their encoding, and of how images are read: of all that samples consist of."""
        steps = self.steps
        return steps.records.fingerprint, steps.encoder.fingerprint, steps.image_reader.fingerprint

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches that each rank has in a full step, if each sample is a padded row (not packed with
        others). A pipeline may need more of them than the samples fill."""
        steps = self.steps
        needed = num_micro_batches(steps.global_batch_size, steps.world_size, steps.micro_batch_size)
        return steps.round_micro_batches(needed)

    def steps_from(self, first: int, give_up: Callable[[], bool] = lambda: False) -> Iterator[Step | None]:
        """Yield this rank's part of each step from number `first` to the last. Before using a step, the caller must
        pass it to `agree`, which takes out the samples that any rank could not read. `give_up` is called about every
        second while waiting for a step; once it returns True, None is yielded and the iteration ends.

        Raises:
            DataError: a record or an image of the step is invalid; or a worker died or stalled (WorkerError).
            OutOfMemory: there is no memory to transfer a step from a worker.
        """
        self.steps.sampler.draw(self.total_steps)
        if first < self.total_steps:  # fills caches before workers are forked, so that all workers share them
            self.steps.facts(first, self.steps.sampler.samples(first))
        numbers, pin_memory = range(first, self.total_steps), self.device.type == "cuda"
        for step in steps_from_workers(self.steps, numbers, self.status, self.data, pin_memory, give_up):
            if isinstance(step, LlavaFsdpError):  # that a worker has caught and sent
                raise step
            assert step is None or isinstance(step, Step)
            yield step

    def agree(self, step: Step) -> Step:
        """Return this rank's part of a step without the samples that any rank skipped. Collective. Raise DataError if
        more records are bad than `data.max_bad_records` allows."""
        if self.data.bad_records is BadRecords.fail:
            return step
        skipped = self.gather(step.facts.skipped)
        # several ranks may have reported the same sample
        if skipped and self.steps.shares_rows:
            skipped = self.every_occurrence(step.facts.step, skipped)
        new = {sample.number for sample in skipped} - self.broken
        self.broken |= new
        records = self.steps.records
        total = len(records.index)
        num_broken = len({records.number_in_index(number) for number in self.broken})
        wrong, budget = records.num_wrong + num_broken, self.data.budget(total)
        if new and wrong > budget:
            raise DataError(
                f"{wrong} of {total} records are wrong, more than the {budget} of data.max_bad_records="
                f"{self.data.max_bad_records}; the last one: {skipped[-1].reason}"
            )
        return step.without(skipped, self.steps.collate.normalize)

    def every_occurrence(self, step: int, skipped: list[SkippedSample]) -> list[SkippedSample]:
        """Return each skipped sample as often as the step has it: several ranks of one row may have reported it."""
        numbers = self.steps.sampler.samples(step)
        found = {sample.number: sample for sample in skipped}
        return [found[number] for number in numbers if number in found]

    def to_device(self, micro: MicroBatch) -> MicroBatch:
        """Return a micro-batch on the device, with its tiles normalized unless the model's processor did it before."""
        moved = micro.map(lambda values: values.to(self.device, non_blocking=True))
        return moved if self.table is None else replace(moved, images=with_normalized_tiles(moved.images, self.table))


def pixel_table(preprocessor: Preprocessor, device: torch.device) -> torch.Tensor:
    """Return the normalised value of each byte value in each colour channel, float32 [3, 256], on a device. It is in
    memory that torch allocates, for the reason given at `tile_inputs.aligned`."""
    return torch.tensor(preprocessor.pixel_table(), device=device)
