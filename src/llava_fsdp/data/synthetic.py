"""Make synthetic micro-batches of the greatest size that the configuration allows, for a dry run without a dataset."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from llava_fsdp.config import Config
from llava_fsdp.data.batching.batch import ForwardInputs, MicroBatch, Step, StepFacts
from llava_fsdp.data.batching.collate import boundaries
from llava_fsdp.data.batching.context_cut import ContextCut
from llava_fsdp.data.images.anyres import Size
from llava_fsdp.data.images.image_tokens import ImageRule, ImageTokens
from llava_fsdp.data.loader import Loader, ModelShape


@dataclass(frozen=True)
class Contents:
    """How much a synthetic micro-batch contains."""

    lengths: tuple[int, ...]
    """Number of tokens of each sample."""
    images: int
    tiles: int
    labels: int
    image_tokens: int
    ranks_per_row: int = 1
    """Number of ranks that process a row together. All other numbers but `lengths` are those of one rank's part."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths) // self.ranks_per_row


def fullest(cfg: Config, shape: ModelShape, cut: ContextCut | None = None, rule: ImageRule | None = None) -> Contents:
    """Return the largest numbers of tokens, images, tiles and labels that a micro-batch can have. A real micro-batch
    never reaches all of them at once.

    The rows are full of tokens. There are as many images as fit, each followed by one token of text; of all sizes of
    images, that with the most tiles counts. The number of labels is that of samples with `data.max_length` tokens that
    begin with one image of the fewest tokens: all tokens are labels but the first one and those of this image.

    Args:
        cut: how several ranks divide a row; None: a rank has whole rows.
        rule: says how many tokens and tiles an image has; None: `ImageTokens` does.
    """
    length, context = cfg.data.max_length, cut.size if cut else 1
    tokens = cfg.row_tokens if cfg.packs else cfg.micro_batch_size * length
    tokens += cut.padding(tokens) if cut else 0
    lengths = (length,) * (tokens // length) + ((tokens % length,) if tokens % length else ())
    rule = rule or ImageTokens.of_config(cfg, shape.image_size, shape.image_tokens)
    sizes = rule.sizes if rule.needs_size(1) else (None,)
    fewest = min(len(rule.of(size, 1)) for size in sizes)
    labels = tokens - sum(1 + min(n - 1, fewest) for n in lengths)

    def with_images(size: Size | None) -> Contents:
        """Return what a micro-batch contains if all its images have this size."""
        each = len(rule.of(size, 1))
        rank_tokens = tokens // context
        images = max(1, rank_tokens // (each + 1)) if cfg.packs else cfg.micro_batch_size
        if cut:  # a rank has several chunks of the row, and an image may cross the border at each end of a chunk
            chunks = cut.num_chunks // cut.size
            images = min(chunks * (rank_tokens // chunks // (each + 1) + 2), max(1, tokens // (each + 1)))
        tiles, image_tokens = images * rule.count_tiles(size, 1), min(rank_tokens, images * each)
        return Contents(lengths, images, tiles, min(rank_tokens, labels), image_tokens, context)

    return max(map(with_images, sizes), key=lambda contents: (contents.tiles, contents.image_tokens))


def synthetic_micro_batch(
    contents: Contents, shape: ModelShape, pack: bool, blends: bool = False, given: ForwardInputs | None = None
) -> MicroBatch:
    """Return a micro-batch with token ids 0 and black images; the image tokens and the labels are at its beginning.

    Args:
        pack: whether all samples are in one packed row; else each has a padded row.
        blends: whether image tokens are weighted sums of four vision features.
        given: inputs whose token ids, images and boundaries of samples are used instead, for a model of transformers
            that takes images in another form than tiles; None: a model that takes tiles.
    """
    rows = 1 if pack else len(contents.lengths)
    ids = given["input_ids"] if given is not None else torch.zeros((rows, contents.tokens // rows), dtype=torch.int64)
    return MicroBatch(
        input_ids=ids,
        images=black_tiles(contents, shape, blends) if given is None else dict(given["images"]),
        label_positions=torch.arange(contents.labels),
        label_ids=torch.zeros(contents.labels, dtype=torch.int64),
        scale=1 / max(1, contents.labels),
        seeds=torch.zeros((rows, ids.shape[1] if pack else 1), dtype=torch.int64),
        sample_lengths=torch.tensor(contents.lengths),
        **(edges(contents, given) if pack else {}),
    )


def black_tiles(contents: Contents, shape: ModelShape, blends: bool) -> dict[str, torch.Tensor]:
    """Return the image inputs of a micro-batch with black tiles, by their names in `Llava.forward`. `blends`: whether
    image tokens are weighted sums of four vision features."""
    places = torch.arange(contents.image_tokens)
    # for each image token, the number of a vision feature: each tile has `shape.image_tokens` of them
    image_rows = places % (contents.tiles * shape.image_tokens)
    side = shape.image_size
    return {
        "positions": places,
        "rows": image_rows[:, None].repeat(1, 4) if blends else image_rows,
        "tiles": torch.zeros((contents.tiles, 3, side, side), dtype=torch.uint8),
        "weights": torch.full((len(places) if blends else 0, 4), 0.25),
        "seeds": torch.arange(contents.tiles),
    }


def edges(contents: Contents, given: ForwardInputs | None = None) -> dict[str, Any]:
    """Return the fields of MicroBatch that separate the samples of a packed row. They come from `given["segments"]`, if
    `given` has inputs with these, else from the lengths of the samples. If several ranks share the row, the position
    ids have the length of one rank's part."""
    if given is not None and given["segments"] is not None:
        segments = given["segments"]
        return {name: getattr(segments, name) for name in ("position_ids", "cu_seqlens", "lengths")}
    found = boundaries(contents.lengths)
    return {**found, "position_ids": found["position_ids"][:, : contents.tokens]}


def dry_run_micro_batches(contents: Contents, cfg: Config, world_size: int) -> int:
    """Return how many micro-batches a dry run computes for a step, at most as many as a real step has. Two are enough,
    because all later ones would be like the second; with pipeline parallelism, twice as many as the model has stages,
    because a pipeline is then full. `contents`: what one micro-batch contains. `world_size`: number of ranks, in which
    those that divide each layer among them (`parallel.tensor`) count as one."""
    parallel = cfg.parallel
    # samples in one micro-batch of all ranks; a sample counts on every rank that has a part of it or of the model,
    # so that `needed` multiplies by the numbers of these; `num_micro_batches` rounds up to what the pipeline accepts
    at_once = len(contents.lengths) * world_size
    needed = math.ceil(cfg.global_batch_size * contents.ranks_per_row * parallel.pipeline / at_once)
    most = 2 if parallel.pipeline == 1 else parallel.num_micro_batches(2 * parallel.num_stages)
    return min(most, parallel.num_micro_batches(needed))


def synthetic_step(
    number: int,
    contents: Contents,
    shape: ModelShape,
    cfg: Config,
    world_size: int,
    given: ForwardInputs | None = None,
) -> Step:
    """Return a training step with synthetic data: this rank's micro-batches, which are all alike, and the counts over
    all ranks.

    Args:
        world_size: number of ranks, in which the ranks that divide each layer among them count as one.
        given: inputs of a model of transformers that takes images in another form than tiles; None: black tiles are
            made.
    """
    count = dry_run_micro_batches(contents, cfg, world_size)
    # micro-batches of all ranks; those of ranks that share rows are parts, of which `contents.ranks_per_row` make one
    times = count * world_size // cfg.parallel.pipeline
    rows = times // contents.ranks_per_row
    facts = StepFacts(
        number,
        samples=rows * len(contents.lengths),
        tokens=times * contents.tokens,
        token_pairs=rows * sum(length**2 for length in contents.lengths),
        label_tokens=times * contents.labels,
        images=times * contents.images,
        tiles=times * contents.tiles,
    )
    blends = ImageTokens.of_config(cfg, shape.image_size, shape.image_tokens).blends
    micros = [synthetic_micro_batch(contents, shape, cfg.packs, blends, given) for _ in range(count)]
    if cfg.data.pairs:  # samples are pairs of answers: one pair, whose answers have the labels in turn
        zero = torch.zeros(1, dtype=torch.int64)
        micros = [
            replace(micro, label_answers=torch.arange(contents.labels) % 2, pair_sources=zero, pair_numbers=zero)
            for micro in micros
        ]
    return Step(facts, micros)


class SyntheticLoader(Loader):
    """Loader for a dry run without a dataset. It can only copy micro-batches to the device."""

    def __init__(self, device: torch.device, steps: int, has_tiles: bool = True):
        self.device = device
        self.total_steps = steps
        self.table = torch.zeros((3, 256), device=device) if has_tiles else None
