"""Check the paths, the model and the memory that a training's configuration needs on this machine."""

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from llava_fsdp.config import Config, DType, ModelConfig, Part, Source, paths_in
from llava_fsdp.config.paths import PACKAGED_OR_HUB, check_paths, exists, paths_read
from llava_fsdp.data.records.forms.parse_record import RecordKeys
from llava_fsdp.data.records.record_file import RecordFile
from llava_fsdp.doctor.context import Needs
from llava_fsdp.doctor.findings import Finding, Level, fail, finding_of, ok, warn
from llava_fsdp.runtime.errors import ConfigError, LlavaFsdpError
from llava_fsdp.runtime.files.run_dir import FOLDER, list_checkpoints
from llava_fsdp.runtime.text.humanize import readable

CURE_ON_CPU = "fewer ranks, which share this machine's memory (gpus=N here), sharding=zero3, precision=bf16_pure"
MOST_COUNTED = 16 << 20
"""Bytes of all files of records up to which records are counted; counting more takes too long."""
RECORDS = re.compile(r"\.path(\[\d+\])?$")
"""Keys whose values are files of records; an item of a list has its number."""
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def judge_paths(cfg: Config) -> Iterator[Finding]:
    """Check that every path that the training reads exists, and that its `output_dir` is another path. Paths that a run
    does not read because it continues from a checkpoint may be missing."""
    paths = paths_read(cfg)
    missing = {key: name for key, name in paths.items() if not exists(name)}
    if cfg.checkpoint.resume != "never" and list_checkpoints(Path(cfg.output_dir) / FOLDER):
        # the run continues with the trained projector and the adapters that its checkpoint has
        in_checkpoint = {"model.projector"} if Part.projector in cfg.model.trained else set()
        missing = {key: name for key, name in missing.items() if key not in in_checkpoint | {"model.lora.checkpoint"}}
    for key, name in missing.items():
        yield fail(key, f"{name} does not exist", f"give a path that does; relative paths begin at {os.getcwd()}")
    if missing:
        return
    try:
        check_paths(cfg)
        shown_paths = ", ".join(f"{key}={name}" for key, name in paths.items())
        yield ok("places", shown_paths or "none: data and model are drawn")
    except ConfigError as error:
        yield finding_of(Level.FAIL, "places", error)


def judge_model(cfg: Config, environment: Mapping[str, str], cache: Path) -> Iterator[Finding]:
    """Check where each part of the model is: on this machine, in the Hugging Face cache folder `cache`, or still to be
    downloaded, which environment variables may forbid. A name that begins with `package:` is that of a model in this
    package, with random weights."""
    names = {"model.language": cfg.model.language, "model.vision": cfg.model.vision}
    if cfg.model.checkpoint is not None:
        names = {"model.checkpoint": cfg.model.checkpoint}
    offline = [name for name in OFFLINE if environment.get(name, "0").lower() not in ("", "0", "false")]
    for key, name in names.items():
        if name.startswith("package:"):
            yield ok(key, f"{name}, drawn")
        elif exists(name):
            yield judge_folder(cfg.model, key, name)
        elif not PACKAGED_OR_HUB.fullmatch(name):
            yield fail(key, f"{name} is not a folder", "give a model folder or a hub name")
        elif any((cache / f"models--{name.replace('/', '--')}").glob("snapshots/*/config.json")):
            yield ok(key, f"{name}, in {cache}")
        elif offline:
            cure = f"unset {offline[0]}, or download it elsewhere and give its folder"
            yield fail(key, f"{name} is not in {cache}, and {offline[0]} forbids the download", cure)
        else:
            cure = "HF_HOME names a folder with room for it; or download it first and give its folder"
            yield warn(key, f"{name} is not in {cache}: the first start downloads it", cure)


def judge_folder(cfg: ModelConfig, key: str, name: str) -> Finding:
    """Check that the configuration in a model folder, which `key` names, can be read. Weights are not read."""
    from llava_fsdp.model.sources.pretrained import read_config  # loads torch and transformers
    from llava_fsdp.plan.model_shapes import shapes_of

    if not Path(name).is_dir():
        return fail(key, f"{name} is not a folder", "give a model folder or a hub name")
    try:
        # a checkpoint has the configurations of all parts, in one of several formats; other folders have one
        shapes_of(cfg) if key == "model.checkpoint" else read_config(Path(name), key)
    except LlavaFsdpError as error:
        return finding_of(Level.FAIL, key, error)
    return ok(key, name)


def hub_cache(environment: Mapping[str, str]) -> Path:
    """Return the cache folder of the Hugging Face hub client."""
    home = environment.get("HF_HOME") or str(Path("~/.cache/huggingface").expanduser())
    return Path(environment.get("HF_HUB_CACHE") or f"{home}/hub")


def judge_plan(needs: Needs, on_gpus: bool) -> Iterator[Finding]:
    """Check that the predicted peak memory of a rank fits into its GPU, or, without GPUs, into its share of the host's
    memory."""
    row = needs.plan
    total = row.bytes["total"]
    result = f"{readable(total)} of {readable(row.usable)} for tensors, a rank on {needs.machine}"
    if not row.fits:
        cure = "llava-fsdp plan with the same keys shows what fits; "
        cure += "sharding=zero3, offload, more gpus" if on_gpus else CURE_ON_CPU
        yield fail("memory by the plan", f"{result}, {row.peak_moment}", cure)
    else:
        yield ok("memory by the plan", result)


def judge_taken(needs: Needs, free: Mapping[int, int]) -> Iterator[Finding]:
    """Yield a result only if a rank fits into an empty GPU, but not into what other processes leave. `needs.plan` has
    the bytes that a rank is predicted to take (`total`), and those `usable` on an empty GPU. `free`: GPU index -> free
    bytes."""
    total = needs.plan.bytes["total"]
    gpus_without_room = [index for index, count in free.items() if count < total <= needs.plan.usable]
    if gpus_without_room:
        rest = ", ".join(f"GPU {index}: {readable(free[index])}" for index in gpus_without_room)
        result = f"a rank takes {readable(total)}, and other processes leave {rest}"
        yield fail("free memory", result, "end these processes; nvidia-smi lists them")


def judge_precision(cfg: Config, devices: list[dict], has_bf16: bool) -> Iterator[Finding]:
    """Check that the devices have instructions for the dtype in which the training would compute; name that of `auto`.

    Args:
        devices: `TorchFacts.devices`; empty: the training runs on CPUs.
        has_bf16: whether all devices have instructions for bf16.
    """
    import torch

    from llava_fsdp.parallel.precision.fast_dtype import settle_precision, slow_dtype

    kind, is_auto = "cuda" if devices else "cpu", cfg.precision.param_dtype is DType.auto
    has_bf16_each = [device["bf16"] for device in devices] or [has_bf16]
    settled_precision, chosen = settle_precision(cfg, has_bf16_each, kind)
    dtype = settled_precision.precision.param_dtype
    if devices and not has_bf16 and dtype is DType.bf16:
        first = has_bf16_each.index(False)
        yield fail(
            "precision", f"bf16, which GPU {first} ({devices[first]['name']}) does not support", "precision=fp16"
        )
    elif devices and not has_bf16 and is_auto:
        first = has_bf16_each.index(False)
        result = f"{dtype.value}, as GPU {first} ({devices[first]['name']}) has no bf16"
        yield warn("precision", result, "precision=fp16, with a loss scale, is faster")
    elif not devices and (slow := slow_dtype(settled_precision, torch.device("cpu"), has_bf16)):
        yield finding_of(Level.WARN, "precision", slow)
    else:
        where = devices[0]["name"] if devices else "the CPU"
        yield ok("precision", f"{dtype.value} on {where}{f' ({chosen})' if chosen else ''}")


def count_steps(cfg: Config) -> int | None:
    """Return about how many optimizer steps the training has, from `max_steps` or the number of records. Return None if
    the data files are too large to count their records, cannot be read, or are not all named as local files."""
    if cfg.max_steps is not None:
        return cfg.max_steps
    files = [path for key, path in data_paths(cfg)[0].items() if key.startswith("data.")]
    named = [path for source in cfg.data.sources.values() or [cfg.data] for path in paths_in(str(source.path))]
    if not files or len(files) < len(named) or sum(path.stat().st_size for path in files) > MOST_COUNTED:
        return None
    with contextlib.suppress(LlavaFsdpError):  # other rows of the report, or the training, name the error
        records = sum(len(RecordFile(path, keys=RecordKeys.of_config(cfg.data))) for path in files)
        return math.ceil(records / cfg.global_batch_size) * cfg.epochs
    return None


def data_paths(cfg: Config) -> tuple[dict[str, Path], dict[str, Path]]:
    """Return the files of records and the folders of images, by configuration key; empty for the generated dataset."""
    if cfg.data.source is Source.shapes:
        return {}, {}
    paths = {key: Path(name) for key, name in paths_read(cfg).items() if exists(name)}
    records = {key: path for key, path in paths.items() if RECORDS.search(key) and path.is_file()}
    images = {key: path for key, path in paths.items() if key.endswith(".images") and path.is_dir()}
    return records, images
