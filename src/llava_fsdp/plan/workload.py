"""What a sample is like: of the dataset, where it has been examined, else LLaVA's means."""

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
"""What `python -m llava_fsdp.prepare` leaves in the index."""


@dataclass(frozen=True)
class Samples:
    """Means over samples."""

    positions: float
    tiles: float
    """Of pictures."""
    labels: float
    spread: float
    """Standard deviation of positions."""
    source: str


def samples_of(cfg: Config, image_tokens: int) -> Samples:
    """Of the dataset's report, where there is one, else of LLaVA's own data.

    Instructions: 840 positions and 0.94 pictures of 576 (624,610 of llava_v1_5_mix665k's 665,298 records have one,
    LLaVA #657; NeMo's packed run of the same file implies at most 847 positions,
    docs/source/multimodal/mllm/sequence_packing.rst), so 300 of text; labels and spread are estimates. Captions: a
    picture and some 20 tokens.
    """
    found = of_report(cfg)
    if found is not None:
        return found
    instructs = Part.language in cfg.model.train
    text, tiles, labels, spread = (300.0, 0.94, 180.0, 350.0) if instructs else (20.0, 1.0, 20.0, 15.0)
    positions = min(text + tiles * image_tokens, cfg.data.max_length)
    what = "instructions" if instructs else "captions"
    return Samples(positions, tiles, min(labels, text), min(spread, positions), f"LLaVA's {what}, on average")


def of_report(cfg: Config) -> Samples | None:
    if cfg.data.source is Source.shapes:
        return None
    path = Path(cfg.data.index_folder) / REPORT
    try:
        return samples_said(read_object(path, {"kept": (int,)}, SMALL), path, cfg.data.max_length)
    except (ArithmeticError, ValueError, KeyError, TypeError):
        return None  # a plan needs no report


def samples_said(report: dict[str, Any], path: Path, max_length: int) -> Samples:
    """By the report of an index; whatever a report raises that says something else."""
    kept, bars = report["kept"], report["lengths"]["histogram"]
    sums = {name: sum(own[name] for own in report["sources"]) for name in ("tokens", "pictures", "label_tokens")}
    mean = sums["tokens"] / kept
    middles = [(min((bar["from"] + bar["to"]) / 2, max_length), bar["records"]) for bar in bars]
    variance = sum(n * (middle - mean) ** 2 for middle, n in middles) / max(1, sum(n for _, n in middles))
    tiles, labels = sums["pictures"] / kept, sums["label_tokens"] / kept
    return Samples(mean, tiles, labels, math.sqrt(variance), f"{kept:,} samples of {path}")


def samples_in(records: Records) -> Samples:
    """Of the very records that a training has."""
    lengths, tiles, labels = (np.asarray(c, dtype=np.float64) for c in (records.lengths, records.tiles, records.labels))
    spread = max(1.0, float(lengths.std()))
    found = f"{len(records):,} records"
    return Samples(float(lengths.mean()), float(tiles.mean()), float(labels.mean()), spread, found)


def share(samples: Samples, each: float) -> int:
    """Positions of `each` samples in all but few steps: three standard deviations above the mean."""
    return math.ceil(each * samples.positions + 3 * samples.spread * math.sqrt(each))


def micro_batch(samples: Samples, rows: int, length: int, count: int, image_tokens: int) -> MicroBatch:
    """`count` samples in rows of so many positions."""
    tokens = rows * length
    tiles = min(tokens // max(1, image_tokens), math.ceil(count * samples.tiles))
    labels = min(tokens, max(1, math.ceil(count * samples.labels)))
    return MicroBatch(rows, length, count, tiles, labels)


def cuts(cfg: Config, samples: Samples, world_size: int, image_tokens: int) -> list[list[MicroBatch]]:
    """Ways to cut a rank's part of a step into micro-batches, the largest first; packed or in padded rows.

    Raises:
        ConfigError: there is none.
    """
    each = cfg.global_batch_size / world_size
    found: dict[MicroBatch, list[MicroBatch]] = {}
    if not cfg.pack:
        for count in range(1, math.ceil(each) + 1):
            rows = math.ceil(each / count)
            if cfg.sampler.name is SamplerName.llava_v1_5 and rows * count != each:
                continue
            micro = micro_batch(samples, rows, cfg.data.max_length, rows, image_tokens)
            found.setdefault(micro, [micro] * count)
        if not found:
            raise ConfigError(
                f"sampler=llava_v1_5 needs global_batch_size to be a multiple of the ranks, and "
                f"{cfg.global_batch_size} "
                f"is none of {world_size}"
            )
        return list(found.values())
    most = max(cfg.data.max_length, share(samples, each))
    for count in range(1, max(1, math.ceil(most / cfg.data.max_length)) + 1):
        tokens = max(cfg.data.max_length, 256 * math.ceil(most / count / 256))
        held = max(1, round(tokens / samples.positions))
        micro = micro_batch(samples, 1, tokens, held, image_tokens)
        found.setdefault(micro, [micro] * count)
    return list(found.values())


def asked_for(cfg: Config, samples: Samples, world_size: int, image_tokens: int) -> list[MicroBatch]:
    """The micro-batches that the configuration's own keys make."""
    each = cfg.global_batch_size / world_size
    if not cfg.pack:
        rows = min(cfg.micro_batch_size, math.ceil(each))
        micro = micro_batch(samples, rows, cfg.data.max_length, rows, image_tokens)
        return [micro] * max(1, math.ceil(each / cfg.micro_batch_size))
    if cfg.sampler.name is SamplerName.llava_v1_5:  # any micro_batch_size samples make a row
        held = cfg.micro_batch_size
        tokens = min(cfg.row_tokens, max(cfg.data.max_length, share(samples, held)))
        return [micro_batch(samples, 1, tokens, held, image_tokens)] * max(1, math.ceil(each / held))
    most = max(cfg.data.max_length, share(samples, each))
    count = max(1, math.ceil(each * samples.positions / cfg.row_tokens))
    tokens = min(cfg.row_tokens, max(cfg.data.max_length, math.ceil(most / count)))
    held = max(1, round(tokens / samples.positions))
    return [micro_batch(samples, 1, tokens, held, image_tokens)] * count
