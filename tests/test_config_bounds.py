"""Every bound of a number in the configuration: the last value that is accepted, and the first that is refused."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from small import config_of

from llava_fsdp.config import (
    ChatConfig,
    DoctorConfig,
    EvaluateConfig,
    LoraConfig,
    PlanConfig,
    PrepareConfig,
    SourceConfig,
    SweepConfig,
    config_dir,
    load,
)
from llava_fsdp.errors import ConfigError

PROGRAMS: dict[str, tuple[type, list[str]]] = {
    "chat": (ChatConfig, []),
    "doctor": (DoctorConfig, []),
    "evaluate": (EvaluateConfig, []),
    "plan": (PlanConfig, []),
    "prepare": (PrepareConfig, []),
    "sweep": (SweepConfig, []),
}
TRAININGS = {
    "train": [],
    "fp16": ["precision=fp16"],
    "hybrid": ["sharding=hybrid"],
    "budget": ["recompute=budget"],
    "profiled": ["profile=true", "max_steps=7"],
    "long": ["data.max_length=39"],
}
LORA, SOURCE = LoraConfig(enabled=True), SourceConfig(path="a.json")
SMALL = 1e-9
TOO_LARGE = math.inf, math.nan
# What the value is in, its key, values that are accepted, values that are refused.
BOUNDS: list[tuple[Any, str, tuple, tuple]] = [
    *(("train", f"optim.{name}", (0.0, SMALL), (-SMALL, *TOO_LARGE)) for name in ("lr", "weight_decay", "eps")),
    *(("train", f"optim.{name}", (None, 0.0), (-SMALL, *TOO_LARGE)) for name in ("projector_lr", "vision_lr")),
    *(("train", f"optim.{name}", (0.0, 0.9999), (-SMALL, 1.0, math.nan)) for name in ("beta1", "beta2")),
    ("train", "optim.clip", (None, SMALL), (0.0, *TOO_LARGE)),
    ("train", "optim.warmup_ratio", (0.0, 1.0), (-SMALL, 1 + SMALL, math.nan)),
    ("train", "optim.warmup_steps", (None, 0), (-1,)),
    ("train", "data.max_length", (2,), (1,)),
    ("train", "data.max_record_bytes", (1024,), (1023,)),
    ("train", "data.workers", (None, 0), (-1,)),
    ("train", "data.prefetch", (1,), (0,)),
    ("train", "data.stall", (1,), (0,)),
    ("train", "data.bad_budget", ("0", "7", "0%", "0.05%", "100%", "100.0%"),
     ("", "-1", "1.5", ".5%", "5.%", "5 %", "100.01%")),
    ("train", "sharding.blocks_per_unit", (1,), (0,)),
    ("train", "sharding.prefetch", (None, 1), (0,)),
    ("hybrid", "sharding.shard_size", (None, 1), (0,)),
    ("fp16", "precision.scaler.scale", (None, SMALL), (0.0, *TOO_LARGE)),
    ("fp16", "precision.scaler.window", (1,), (0,)),
    ("fp16", "precision.scaler.hysteresis", (1,), (0,)),
    ("fp16", "precision.scaler.minimum", (SMALL, 65536.0), (0.0, 65536.5, *TOO_LARGE)),
    ("fp16", "precision.scaler.initial_power", (0, 127), (-1, 128)),
    ("budget", "recompute.budget", (0.0, 1.0), (None, -SMALL, 1 + SMALL, math.nan)),
    ("train", "loss.chunk_tokens", (1,), (0,)),
    ("train", "checkpoint.every", (None, 1), (0,)),
    ("train", "checkpoint.keep_every", (None, 1), (0,)),
    ("train", "checkpoint.keep", (2,), (1,)),
    *(("train", f"comm.{name}", (1,), (0,)) for name in ("timeout", "init_timeout", "warn_after")),
    *(("train", f"val.{name}", (None, 1), (0,)) for name in ("every", "limit")),
    *(("train", f"val.{name}", (0,), (-1,)) for name in ("answers", "shown")),
    *(("train", f"val.{name}", (1,), (0,)) for name in ("batch_size", "max_new_tokens")),
    ("train", "numeric.max_consecutive_skips", (0,), (-1,)),
    ("train", "numeric.spike_sigma", (None, SMALL), (0.0, *TOO_LARGE)),
    *(("train", name, (1,), (0,)) for name in ("epochs", "global_batch_size", "micro_batch_size", "log_every")),
    *(("train", name, (None, 1), (0,)) for name in ("max_steps", "gc_every", "dry_run")),
    ("train", "seed", (0,), (-1,)),
    ("train", "profile_steps", (None, [1, 1], [3, 7]), ([0, 3], [4, 3], [3], [1, 2, 3], [])),
    ("profiled", "profile_steps", ([1, 7],), ([1, 8],)),
    ("long", "tokens_per_micro_batch", (None, 39, "auto"), (38, "39")),
    ("train", "model.projector_type", ("mlp2x_gelu",), ("mlp0x_gelu", "mlpx_gelu", "mlp2x_gelux", "2x_gelu", "linear2")),
    (LORA, "r", (1,), (0,)),
    (LORA, "alpha", (SMALL,), (0.0, *TOO_LARGE)),
    (LORA, "dropout", (0.0, 0.999), (-SMALL, 1.0, math.nan)),
    (SOURCE, "epochs", (None, SMALL, 1000.0), (0.0, 1000.5, *TOO_LARGE)),
    (SOURCE, "weight", (None, SMALL, 5000.0), (0.0, *TOO_LARGE)),
    ("chat", "temperature", (0.0, 3.0), (-SMALL, *TOO_LARGE)),
    ("chat", "top_p", (SMALL, 1.0), (0.0, 1 + SMALL, math.nan)),
    ("chat", "port", (1, 65535), (0, 65536)),
    ("chat", "seed", (None, 0, (1 << 63) - 1), (-1, 1 << 63)),
    *(("chat", name, (1,), (0,)) for name in ("max_new_tokens", "max_upload_mb", "max_images")),
    *(("evaluate", name, (1,), (0,)) for name in ("batch_size", "max_new_tokens")),
    ("evaluate", "limit", (None, 1), (0,)),
    ("evaluate", "show", (0,), (-1,)),
    *(("plan", name, (1,), (0,)) for name in ("gpus", "nodes", "rows")),
    ("doctor", "gpus", (None, 1), (0,)),
    ("doctor", "nodes", (1,), (0,)),
    ("prepare", "prepare.workers", (None, 1), (0,)),
    ("sweep", "sweep.last_steps", (1,), (0,)),
]  # fmt: skip


@cache
def composed(name: str) -> Any:
    if name in TRAININGS:
        return config_of(TRAININGS[name])
    schema, words = PROGRAMS[name]
    with initialize_config_dir(str(config_dir()), version_base=None):
        return load(schema, compose(name, words))


def changed(config: Any, key: str, value: object) -> Any:
    """The same configuration, checked anew, with another value of a dotted key."""
    name, _, rest = key.partition(".")
    return replace(config, **{name: changed(getattr(config, name), rest, value) if rest else value})


@pytest.mark.parametrize(
    ("base", "key", "good", "bad"),
    BOUNDS,
    ids=[f"{b if type(b) is str else type(b).__name__}:{k}" for b, k, *_ in BOUNDS],
)
def test_a_bound_is_where_it_is_said_to_be(base: Any, key: str, good: tuple, bad: tuple) -> None:
    base = composed(base) if isinstance(base, str) else base
    for value in good:
        changed(base, key, value)
    for value in bad:
        with pytest.raises(ConfigError):
            changed(base, key, value)
