"""Estimate the mean sizes of a dataset's samples, and list the ways to split a step into micro-batches."""

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llava_fsdp.config import Config, Part, SamplerName, Source
from llava_fsdp.data.columns import BLOCK
from llava_fsdp.data.images.image_tokens import PHOTO, ImageRule
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.plan.memory.micro_batches import MicroBatchSizes
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.files.safe_load import SMALL
from llava_fsdp.runtime.files.small_json import read_object

REPORT = "report.json"
"""Name of the report that `python -m llava_fsdp.prepare` writes into a dataset's index folder."""


@dataclass(frozen=True)
class Samples:
    """Mean sizes of a dataset's samples."""

    tokens: float
    tiles: float
    """Number of image tiles."""
    labels: float
    """Number of label tokens."""
    spread: float
    """Standard deviation of the number of tokens."""
    source: str
    tile_tokens: float
    """Number of image tokens for each tile. It differs from the number of features of a tile if features of padding are
    left out, tokens for ends of lines added, or a grid of many tiles shrunk."""
    count: int | None = None
    """Number of samples of the dataset, if it is known."""

    @property
    def image_tokens(self) -> float:
        return self.tiles * self.tile_tokens

    @property
    def counts(self) -> tuple[float, float, float, float]:
        """Tokens, pairs of tokens, labels and tiles of a sample, by which a model is divided into stages."""
        return self.tokens, self.tokens**2 + self.spread**2, self.labels, self.tiles


def samples_of(cfg: Config, rule: ImageRule) -> Samples:
    """Return mean sample sizes: from the dataset's report if there is one, else those of LLaVA's own data.

    LLaVA's instructions have 840 tokens per sample: 300 of text, and 0.94 images of 576 tokens. 624,610 of the 665,298
    records of llava_v1_5_mix665k have an image (LLaVA #657); NeMo's packed run of the same file implies at most 847
    tokens (docs/source/multimodal/mllm/sequence_packing.rst). The numbers of label tokens and the spread are estimates.
    A caption of LLaVA has an image and about 20 tokens of text. Images have PHOTO pixels, where their size matters.
    """
    path = Path(cfg.data.index_folder) / REPORT
    if cfg.data.source is not Source.shapes:
        # a plan needs no report, so a report that is missing or has another structure is ignored
        with contextlib.suppress(ArithmeticError, ValueError, KeyError, TypeError):
            return samples_of_report(read_object(path, {"kept": (int,)}, SMALL), path, cfg.data.sample_tokens, rule)
    instructs = Part.language in cfg.model.trained
    text, images, labels, spread = (300.0, 0.94, 180.0, 350.0) if instructs else (20.0, 1.0, 20.0, 15.0)
    tiles, each = tiles_and_tokens_of_photo(rule)
    tokens = min(text + images * each, cfg.data.sample_tokens)
    source = f"LLaVA's {'instructions' if instructs else 'captions'}, on average"
    if cfg.data.path or cfg.data.sources:
        source += "; `llava-fsdp prepare` with the same keys measures yours"
    if rule.needs_size(1):
        source += f", with images of {PHOTO[0]} x {PHOTO[1]} pixels"
    return Samples(tokens, images * tiles, min(labels, text), min(spread, tokens), source, each / tiles)


def tiles_and_tokens_of_photo(rule: ImageRule) -> tuple[int, int]:
    """Return the numbers of tiles and of tokens that the model makes of an image of the size `PHOTO`."""
    return rule.count_tiles(PHOTO, 1), len(rule.of(PHOTO, 1))


def samples_of_report(report: dict[str, Any], path: Path, max_length: int, rule: ImageRule) -> Samples:
    """Return mean sample sizes from the report of a dataset's index. `path` is the report's file, which the result
    names as its source. Reports of older versions do not count image tiles and image tokens: their images are assumed
    to have the size `PHOTO`. Lengths are corrected if the dataset was prepared with another number of tokens an image.

    Raises:
        KeyError, TypeError, ValueError: the report has another structure.
    """
    bars, sources = report["lengths"]["histogram"], report["sources"]
    kept = report.get("samples", report["kept"])  # in reports of older versions every record is one sample
    sums = {name: sum(source[name] for source in sources) for name in ("tokens", "pictures", "label_tokens")}
    counts: list[int | None] = [
        None if any(source.get(name) is None for source in sources) else sum(source[name] for source in sources)
        for name in ("tiles", "image_tokens")
    ]
    mean = sums["tokens"] / kept
    middles = [(min((bar["from"] + bar["to"]) / 2, max_length), bar["records"]) for bar in bars]
    variance = sum(n * (middle - mean) ** 2 for middle, n in middles) / max(1, sum(n for _, n in middles))
    tiles = sums["pictures"] * tiles_and_tokens_of_photo(rule)[0] if counts[0] is None else counts[0]
    each = tokens_of_a_tile(tiles, counts[1], rule)
    labels, source = sums["label_tokens"] / kept, f"{kept:,} samples of {path}"
    own_tiles, own_tokens = tiles_and_tokens_of_photo(rule)
    # Correct the lengths if each image has the same number of tokens (`needs_size`: it depends on the image's size). A
    # small difference does not count: truncated samples may lack some image tokens.
    if tiles and not rule.needs_size(1) and not math.isclose(each, own_tokens / own_tiles, rel_tol=0.05):
        mean += (own_tokens / own_tiles - each) * tiles / kept
        source += f", prepared with {each:.3g} tokens an image and corrected"
        each = own_tokens / own_tiles
    return Samples(mean, tiles / kept, labels, math.sqrt(variance), source, each, kept)


def tokens_of_a_tile(tiles: int, image_tokens: int | None, rule: ImageRule | None) -> float:
    """Return the mean number of tokens of an image tile in a dataset with `tiles` tiles and `image_tokens` image tokens
    in all; if it has none, or their number is unknown, that of an image of the size `PHOTO`. `rule`: how the model
    makes tokens of an image; None: it has no tiles, and each image token counts as one."""
    if rule is None:
        return 1.0
    if not tiles or not image_tokens:
        tiles, image_tokens = tiles_and_tokens_of_photo(rule)
    return image_tokens / tiles


def samples_in(records: Records, rule: ImageRule | None) -> Samples:
    """Return the mean sizes of the samples that a training makes from these records. If the index does not count image
    tokens, `rule` gives an image's; it is None for a model without tiles, where each image token counts as a tile."""
    count, image_tokens = len(records), records.image_tokens
    tokens, tiles, labels = (total_of(column) for column in (records.lengths, records.tiles, records.labels))
    each = tokens_of_a_tile(tiles, None if image_tokens is None else total_of(image_tokens), rule)
    # in blocks, because a copy of the whole column with more bits takes gigabytes for 100 million records
    blocks = (records.lengths[at : at + BLOCK].astype(np.int64) for at in range(0, count, BLOCK))
    squares = sum(int(np.square(block).sum()) for block in blocks)
    spread = max(1.0, math.sqrt(squares * count - tokens**2) / count)  # standard deviation of the lengths
    return Samples(tokens / count, tiles / count, labels / count, spread, f"{count:,} records", each, count)


def total_of(column: np.ndarray) -> int:
    return int(column.sum(dtype=np.int64))


def likely_most_tokens(samples: Samples, count: float) -> int:
    """Estimate the most tokens of `count` random samples: three standard deviations above the mean, rarely exceeded."""
    return math.ceil(count * samples.tokens + 3 * samples.spread * math.sqrt(count))


def micro_batch(samples: Samples, rows: int, length: int, count: int, context: int = 1) -> MicroBatchSizes:
    """Estimate the sizes of a micro-batch of `count` samples in `rows` rows of `length` tokens. If `context` ranks
    process a row together, the sizes are those of the last rank, which needs the most memory if it gathers keys."""
    part = math.ceil(length / context)
    part += part % 2 if context > 1 else 0  # gathered keys need two chunks of equal length
    tokens = rows * part
    tiles = min(int(tokens // samples.tile_tokens), math.ceil(count * samples.tiles / context))
    if context > 1 and samples.tiles:  # an image on a border is encoded on both sides
        tiles = min(tiles + 2, math.ceil(count * samples.tiles))
    labels = min(tokens, max(1, math.ceil(count * samples.labels / context)))
    image_tokens = min(tokens, math.ceil(tiles * samples.tile_tokens))
    return MicroBatchSizes(rows, part, count, tiles, labels, image_tokens, context=context, part=context - 1)


def packed_row(samples: Samples, tokens: int, context: int) -> MicroBatchSizes:
    """Estimate the sizes of a micro-batch of one row of `tokens` tokens, packed with samples."""
    return micro_batch(samples, 1, tokens, max(1, round(tokens / samples.tokens)), context)


def possible_splits(cfg: Config, samples: Samples, world_size: int) -> list[list[MicroBatchSizes]]:
    """Return all ways to split a rank's samples of a step into micro-batches of packed or padded rows, those with the
    largest micro-batches first. Ranks that process a row together share its samples.

    Raises:
        ConfigError: `global_batch_size` is not a multiple of the number of ranks, but the sampler llava_v1_5 needs it.
    """
    # `rounded` raises a number of micro-batches to one that the pipeline's schedule can run
    context, rounded = cfg.parallel.num_context, cfg.parallel.num_micro_batches
    # samples of a step for each group of ranks that process the same rows
    samples_per_row_group = cfg.global_batch_size * cfg.parallel.ranks_per_row * cfg.parallel.pipeline / world_size
    splits: dict[MicroBatchSizes, list[MicroBatchSizes]] = {}
    if not cfg.packs:
        for count in range(1, math.ceil(samples_per_row_group) + 1):
            rows = math.ceil(samples_per_row_group / count)
            # this sampler needs micro-batches of equal size
            if cfg.sampler.name is SamplerName.llava_v1_5 and rows * count != samples_per_row_group:
                continue
            micro = micro_batch(samples, rows, cfg.data.sample_tokens, rows)
            splits.setdefault(micro, [micro] * rounded(count))
        if not splits:
            raise ConfigError(
                f"global_batch_size={cfg.global_batch_size} is not a multiple of {world_size} ranks, as "
                "sampler=llava_v1_5 needs it to be"
            )
        return list(splits.values())
    most = max(cfg.data.sample_tokens, likely_most_tokens(samples, samples_per_row_group))
    for count in range(1, max(1, math.ceil(most / cfg.data.sample_tokens)) + 1):
        # rows of a multiple of 256 tokens, which have room for the longest sample
        tokens = max(cfg.data.sample_tokens, 256 * math.ceil(most / count / 256))
        micro = packed_row(samples, tokens, context)
        splits.setdefault(micro, [micro] * rounded(count))
    return list(splits.values())


def configured_split(cfg: Config, samples: Samples, world_size: int) -> list[MicroBatchSizes]:
    """Split a rank's samples of a step into micro-batches of the size that the configuration sets."""
    # `rounded` raises a number of micro-batches to one that the pipeline's schedule can run
    context, rounded = cfg.parallel.num_context, cfg.parallel.num_micro_batches
    # samples of a step for each group of ranks that process the same rows
    samples_per_row_group = cfg.global_batch_size * cfg.parallel.ranks_per_row * cfg.parallel.pipeline / world_size
    if not cfg.packs:
        rows = min(cfg.micro_batch_size, math.ceil(samples_per_row_group))
        micro = micro_batch(samples, rows, cfg.data.sample_tokens, rows)
        return [micro] * rounded(max(1, math.ceil(samples_per_row_group / cfg.micro_batch_size)))
    if cfg.sampler.name is SamplerName.llava_v1_5:  # this sampler packs any micro_batch_size samples into a row
        size = cfg.micro_batch_size
        tokens = min(cfg.row_tokens, max(cfg.data.sample_tokens, likely_most_tokens(samples, size)))
        return [micro_batch(samples, 1, tokens, size)] * rounded(max(1, math.ceil(samples_per_row_group / size)))
    most = max(cfg.data.sample_tokens, likely_most_tokens(samples, samples_per_row_group))
    count = rounded(max(1, math.ceil(samples_per_row_group * samples.tokens / cfg.row_tokens)))
    tokens = min(cfg.row_tokens, max(cfg.data.sample_tokens, math.ceil(most / count)))
    return [packed_row(samples, tokens, context)] * count
