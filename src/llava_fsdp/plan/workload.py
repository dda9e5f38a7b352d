"""Mean sizes of samples, and the ways to split the samples of a step into micro-batches."""

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llava_fsdp.config import Config, Part, SamplerName, Source
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.plan.activations import MicroBatch
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.safe_load import SMALL
from llava_fsdp.runtime.small_json import read_object

REPORT = "report.json"
"""File name of the report that `python -m llava_fsdp.prepare` writes into a dataset's index folder."""


@dataclass(frozen=True)
class Samples:
    """Mean sizes of a dataset's samples."""

    tokens: float
    tiles: float
    """Mean number of image tiles of a sample."""
    labels: float
    """Mean number of label tokens of a sample."""
    spread: float
    """Standard deviation of the number of tokens of a sample."""
    source: str


def samples_of(cfg: Config, image_tokens: int) -> Samples:
    """Return mean sample sizes: from the dataset's report if there is one, else those of LLaVA's own data.

    LLaVA's instructions: 840 tokens per sample, 300 of text and the others of 0.94 images with 576 tokens each. 624,610
    of llava_v1_5_mix665k's 665,298 records have an image (LLaVA #657); NeMo's packed run of the same file implies at
    most 847 tokens (docs/source/multimodal/mllm/sequence_packing.rst). Label tokens and spread are estimates. LLaVA's
    captions: an image and some 20 tokens.
    """
    path = Path(cfg.data.index_folder) / REPORT
    if cfg.data.source is not Source.shapes:
        # a plan needs no report: one that is missing or says something else is ignored
        with contextlib.suppress(ArithmeticError, ValueError, KeyError, TypeError):
            return samples_of_report(read_object(path, {"kept": (int,)}, SMALL), path, cfg.data.max_length)
    instructs = Part.language in cfg.model.train
    text, tiles, labels, spread = (300.0, 0.94, 180.0, 350.0) if instructs else (20.0, 1.0, 20.0, 15.0)
    tokens = min(text + tiles * image_tokens, cfg.data.max_length)
    what = "instructions" if instructs else "captions"
    return Samples(tokens, tiles, min(labels, text), min(spread, tokens), f"LLaVA's {what}, on average")


def samples_of_report(report: dict[str, Any], path: Path, max_length: int) -> Samples:
    """Return mean sample sizes from the report of a dataset's index. Raises KeyError, TypeError or ValueError if the
    report has another structure."""
    kept, bars = report["kept"], report["lengths"]["histogram"]
    sums = {name: sum(source[name] for source in report["sources"]) for name in ("tokens", "pictures", "label_tokens")}
    mean = sums["tokens"] / kept
    middles = [(min((bar["from"] + bar["to"]) / 2, max_length), bar["records"]) for bar in bars]
    variance = sum(n * (middle - mean) ** 2 for middle, n in middles) / max(1, sum(n for _, n in middles))
    tiles, labels = sums["pictures"] / kept, sums["label_tokens"] / kept
    return Samples(mean, tiles, labels, math.sqrt(variance), f"{kept:,} samples of {path}")


def samples_in(records: Records) -> Samples:
    """Return the mean sizes of the samples that a training makes from these records."""
    lengths, tiles, labels = (np.asarray(c, dtype=np.float64) for c in (records.lengths, records.tiles, records.labels))
    spread = max(1.0, float(lengths.std()))
    source = f"{len(records):,} records"
    return Samples(float(lengths.mean()), float(tiles.mean()), float(labels.mean()), spread, source)


def most_tokens(samples: Samples, count: float) -> int:
    """Estimate the most tokens that `count` random samples have together: three standard deviations above the mean,
    which few steps exceed."""
    return math.ceil(count * samples.tokens + 3 * samples.spread * math.sqrt(count))


def micro_batch(samples: Samples, rows: int, length: int, count: int, image_tokens: int) -> MicroBatch:
    """Estimate the sizes of a micro-batch of `count` samples in `rows` rows of `length` tokens."""
    tokens = rows * length
    tiles = min(tokens // max(1, image_tokens), math.ceil(count * samples.tiles))
    labels = min(tokens, max(1, math.ceil(count * samples.labels)))
    return MicroBatch(rows, length, count, tiles, labels)


def possible_splits(cfg: Config, samples: Samples, world_size: int, image_tokens: int) -> list[list[MicroBatch]]:
    """Return all ways to split a rank's samples of a step into micro-batches of packed or padded rows, those with the
    largest micro-batches first.

    Raises:
        ConfigError: `global_batch_size` is not a multiple of the number of ranks, but the sampler llava_v1_5 needs it.
    """
    per_rank = cfg.global_batch_size / world_size
    splits: dict[MicroBatch, list[MicroBatch]] = {}
    if not cfg.packs:
        for count in range(1, math.ceil(per_rank) + 1):
            rows = math.ceil(per_rank / count)
            if cfg.sampler.name is SamplerName.llava_v1_5 and rows * count != per_rank:
                continue
            micro = micro_batch(samples, rows, cfg.data.max_length, rows, image_tokens)
            splits.setdefault(micro, [micro] * count)
        if not splits:
            raise ConfigError(
                f"global_batch_size={cfg.global_batch_size} is not a multiple of {world_size} ranks, as "
                "sampler=llava_v1_5 needs it to be"
            )
        return list(splits.values())
    most = max(cfg.data.max_length, most_tokens(samples, per_rank))
    for count in range(1, max(1, math.ceil(most / cfg.data.max_length)) + 1):
        tokens = max(cfg.data.max_length, 256 * math.ceil(most / count / 256))
        micro = micro_batch(samples, 1, tokens, max(1, round(tokens / samples.tokens)), image_tokens)
        splits.setdefault(micro, [micro] * count)
    return list(splits.values())


def configured_split(cfg: Config, samples: Samples, world_size: int, image_tokens: int) -> list[MicroBatch]:
    """Split a rank's samples of a step into micro-batches of the size that the configuration sets."""
    per_rank = cfg.global_batch_size / world_size
    if not cfg.packs:
        rows = min(cfg.micro_batch_size, math.ceil(per_rank))
        micro = micro_batch(samples, rows, cfg.data.max_length, rows, image_tokens)
        return [micro] * max(1, math.ceil(per_rank / cfg.micro_batch_size))
    if cfg.sampler.name is SamplerName.llava_v1_5:  # this sampler packs any micro_batch_size samples into a row
        size = cfg.micro_batch_size
        tokens = min(cfg.row_tokens, max(cfg.data.max_length, most_tokens(samples, size)))
        return [micro_batch(samples, 1, tokens, size, image_tokens)] * max(1, math.ceil(per_rank / size))
    most = max(cfg.data.max_length, most_tokens(samples, per_rank))
    count = max(1, math.ceil(per_rank * samples.tokens / cfg.row_tokens))
    tokens = min(cfg.row_tokens, max(cfg.data.max_length, math.ceil(most / count)))
    return [micro_batch(samples, 1, tokens, max(1, round(tokens / samples.tokens)), image_tokens)] * count
