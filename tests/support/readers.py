"""Everything of ours that reads somebody else's file: what it reads, and how it is asked to."""

import functools
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file
from small import make_config, record, write_parts

from llava_fsdp.config import AspectRatio, Config
from llava_fsdp.data.images.preprocess import load_image, read_preprocessor
from llava_fsdp.data.index.build import Plan, open_index
from llava_fsdp.data.index.dataset import Records
from llava_fsdp.data.loader import ModelShape, open_encoding
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer
from llava_fsdp.migrate.command import migrate
from llava_fsdp.migrate.reading.inputs import read_runs
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.model.weights.tensor_files import open_tensors
from llava_fsdp.plan.search.auto import recorded_decision
from llava_fsdp.runtime.text.progress import watch_silently
from llava_fsdp.train.setup.build_model import shape_of

TENSORS = {"a.weight": torch.arange(12.0).view(4, 3), "b.weight": torch.ones(5, dtype=torch.bfloat16)}
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 5e8},
}  # fmt: skip
ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 4\nmixed_precision: bf16\n"
SCRIPT = """#!/bin/bash
deepspeed llava/train/train_mem.py --deepspeed ./scripts/zero3.json --model_name_or_path lmsys/vicuna-7b-v1.5 \\
    --version v1 --data_path ./data/mix.json --image_folder ./data --bf16 True --num_train_epochs 1 \\
    --per_device_train_batch_size 16 --learning_rate 2e-5
"""
FITS = ModelShape(image_tokens=4, image_size=28, max_length=512, vocab_size=10_000)
"""The model of `write_parts`."""
PICTURES = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "gif": "GIF", "bmp": "BMP", "tif": "TIFF"}


@dataclass(frozen=True)
class Reader:
    """A file that is written whole, and the reading of it."""

    write: Callable[[Path], Path]
    """Into a new folder; the file that is then damaged."""
    read: Callable[[Path], object]
    """Given the damaged file."""
    raises: bool = True
    """Damage is an error; else it is noted, or what can be had without the file is taken."""


def written(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_safetensors(folder: Path) -> Path:
    save_file(TENSORS, folder / "model.safetensors")
    return folder / "model.safetensors"


def write_bin(folder: Path, zipped: bool) -> Path:
    torch.save(TENSORS, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    return folder / "pytorch_model.bin"


def write_index(folder: Path) -> Path:
    save_file({"a.weight": TENSORS["a.weight"]}, folder / "model-00001-of-00002.safetensors")
    save_file({"b.weight": TENSORS["b.weight"]}, folder / "model-00002-of-00002.safetensors")
    names = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
    index = {"metadata": {"total_size": 58}, "weight_map": names}
    return written(folder / "model.safetensors.index.json", json.dumps(index))


def read_tensors(path: Path) -> None:
    for tensor in open_tensors(path.parent).values():
        _ = tensor.dtype
        tensor.rows(0, tensor.shape[0] if tensor.shape else 0)


@functools.cache
def config_of(folder: Path, *overrides: str) -> Config:
    """Of the parts in `folder`; Hydra is slower than all readers together."""
    return make_config(folder, folder, folder / "output", *overrides)


def part_file(part: str, name: str) -> Callable[[Path], Path]:
    return lambda folder: write_parts(folder) / part / name


def read_model(path: Path) -> None:
    """The folders `language` and `vision` around a file: their shapes, tokenizer and preparation of pictures."""
    parts = path.parents[1]
    cfg = config_of(parts)
    model = build_llava(find_parts(cfg.model), cfg.model, torch.float32)
    shape_of(model)
    read_preprocessor(parts / "vision").pixel_table()
    tokenizer = open_tokenizer(parts / "language")
    tokenizer.decode([token.id for token in tokenizer.encode("USER: what is it? ASSISTANT: größe</s>")])


def write_sentencepiece(folder: Path) -> Path:
    import sentencepiece

    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
        sentence_iterator=iter(["a red circle is left of the blue square", "what colour is the small triangle"] * 9),
        model_writer=made, vocab_size=40, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    return written(folder / "tokenizer.model", made.getvalue())


def read_sentencepiece(path: Path) -> None:
    tokenizer = open_tokenizer(path.parent)
    tokenizer.decode([token.id for token in tokenizer.encode("a red circle</s> is")])


def write_records(folder: Path, suffix: str) -> Path:
    import random

    dice = random.Random(0)
    write_parts(folder / "parts")
    rows = [record(dice, n, n % 2 == 0) for n in range(6)]
    (folder / "images").mkdir()
    for number in range(12):
        name = f"{number}.{'png' if number % 2 else 'jpg'}"
        Image.new("RGB", (20, 20), (number, 9, 9)).save(folder / "images" / name)
    path = folder / f"records.{suffix}"
    if suffix == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    return written(path, "\n".join(map(json.dumps, rows)) if suffix == "jsonl" else json.dumps(rows))


def read_records(path: Path) -> None:
    parts = path.parent / "parts"
    here = f"data.path={path}", f"data.images={path.parent / 'images'}", f"data.index={path.parent / 'index'}"
    cfg = config_of(parts, *here)
    plan = Plan(cfg.data, *open_encoding(cfg, parts / "language", parts / "vision", FITS), 1)
    records = Records(open_index(plan, watch_silently, False), cfg.labels, cfg.data.too_long)
    for number in range(len(records)):
        _ = records[number]
    list(records.index.problems())


def write_picture(folder: Path, suffix: str) -> Path:
    write_parts(folder / "parts")
    Image.effect_noise((40, 30), 80).convert("RGB").save(folder / f"a.{suffix}")
    return folder / f"a.{suffix}"


def read_picture(path: Path) -> None:
    load_image(path, read_preprocessor(path.parent / "parts" / "vision"), AspectRatio.pad, "a record")


def read_settings(path: Path) -> None:
    """A script, or a file that the script beside it names."""
    starts = {".sh": "", ".json": "deepspeed train.py --deepspeed", ".yaml": "accelerate launch --config_file"}
    if start := starts[path.suffix]:
        script = written(path.parent / "train.sh", f"{start} {path} {'train.py' * (path.suffix == '.yaml')}")
    else:
        script = path
    for run in read_runs([str(script)], {}, 8):
        migrate(run)


def write_run(folder: Path) -> Path:
    return written(folder / "config.yaml", "sharding:\n  strategy: FULL_SHARD\ntokens_per_micro_batch: 512\n")


def read_run(path: Path) -> None:
    recorded_decision(config_of(path.parent, f"output_dir={path.parent}"))


READERS: dict[str, Reader] = {
    "safetensors": Reader(write_safetensors, read_tensors),
    "bin": Reader(lambda folder: write_bin(folder, True), read_tensors),
    "bin, legacy": Reader(lambda folder: write_bin(folder, False), read_tensors),
    "index of shards": Reader(write_index, read_tensors),
    "language config": Reader(part_file("language", "config.json"), read_model),
    "vision config": Reader(part_file("vision", "config.json"), read_model),
    "preprocessor": Reader(part_file("vision", "preprocessor_config.json"), read_model),
    "tokenizer.json": Reader(part_file("language", "tokenizer.json"), read_model),
    "tokenizer_config.json": Reader(part_file("language", "tokenizer_config.json"), read_model),
    "tokenizer.model": Reader(write_sentencepiece, read_sentencepiece),
    **{
        f"records, {s}": Reader(lambda f, s=s: write_records(f, s), read_records, s != "jsonl")
        for s in ("json", "jsonl", "parquet")
    },
    **{f"picture, {s}": Reader(lambda folder, s=s: write_picture(folder, s), read_picture) for s in PICTURES},
    "DeepSpeed": Reader(lambda folder: written(folder / "zero3.json", json.dumps(DEEPSPEED)), read_settings),
    "Accelerate": Reader(lambda folder: written(folder / "accelerate.yaml", ACCELERATE), read_settings),
    "script": Reader(lambda folder: written(folder / "train.sh", SCRIPT), read_settings),
    "a run's config.yaml": Reader(write_run, read_run, raises=False),
}
