"""Every bound of a number in the configuration: the last value that is accepted, and the first that is refused."""

import contextlib
import math
from dataclasses import fields, replace
from enum import Enum
from functools import cache
from typing import Any

import pytest
from small import config_of

from llava_fsdp.config import (
    ActivationCheckpointing,
    ActivationCheckpointingConfig,
    AspectRatio,
    Attention,
    ChatConfig,
    Config,
    DoctorConfig,
    DType,
    EvaluateConfig,
    Examine,
    Format,
    HeldOutConfig,
    LoraConfig,
    OptimConfig,
    OptimName,
    ParallelConfig,
    Parity,
    Part,
    PipelineSchedule,
    PlanConfig,
    PrepareConfig,
    PrepareKeys,
    ScalerConfig,
    Schedule,
    ShownThoughts,
    Source,
    SourceConfig,
    SpecialTokens,
    Strategy,
    SweepKeys,
    SweepMetric,
    Task,
    TrainedModelConfig,
)
from llava_fsdp.runtime.errors import ConfigError

BUDGET = ActivationCheckpointingConfig(mode=ActivationCheckpointing.budget, budget=0.5)
MUON = OptimConfig(
    lr=1.0, projector_lr=None, vision_lr=None, weight_decay=0.0, beta1=0.9, beta2=0.9, eps=1e-8, clip=None,
    schedule=Schedule.cosine, warmup_ratio=0.0, warmup_steps=None, name=OptimName.muon,
)  # fmt: skip
LORA, SOURCE = LoraConfig(enabled=True), SourceConfig(path="a.json")
SMALL = 1e-9
TOO_LARGE = math.inf, math.nan
# What the value is in, its key, values that are accepted, values that are refused.
BOUNDS: list[tuple[Any, str, tuple, tuple]] = [
    *(("train", f"optim.{name}", (0.0, SMALL), (-SMALL, *TOO_LARGE)) for name in ("lr", "weight_decay", "eps")),
    *(("train", f"optim.{name}", (None, 0.0), (-SMALL, *TOO_LARGE)) for name in ("projector_lr", "vision_lr")),
    *(("train", f"optim.{name}", (0.0, 0.9999), (-SMALL, 1.0, math.nan)) for name in ("beta1", "beta2")),
    (MUON, "momentum", (0.0, 0.9999), (-SMALL, 1.0, math.nan)),
    ("train", "optim.clip", (None, SMALL), (0.0, *TOO_LARGE)),
    ("train", "optim.warmup_ratio", (0.0, 1.0), (-SMALL, 1 + SMALL, math.nan)),
    ("train", "optim.warmup_steps", (None, 0), (-1,)),
    ("train", "optim.decay_ratio", (None, 0.0, 1.0), (-SMALL, 1 + SMALL, math.nan)),
    ("train", "optim.min_lr_ratio", (0.0, 1.0), (-SMALL, 1 + SMALL, math.nan)),
    ("train", "optim.ema", (None, SMALL, 0.9999), (0.0, 1.0, math.nan)),
    ("train", "data.max_length", (2,), (1,)),
    ("train", "data.max_record_bytes", (1024,), (1023,)),
    *(("train", f"data.{name}", (1,), (0,)) for name in ("examine_images", "max_tiles", "video_frames")),
    ("train", "data.video_fps", (SMALL,), (0.0, *TOO_LARGE)),
    ("train", "data.cache_gb", (0.0, math.inf), (-SMALL, math.nan)),
    ("train", "parallel.context", (1, 2, "auto"), (0, "2")),
    ("train", "parallel.expert", (1, 2), (0,)),
    ("train", "data.workers", (None, 0), (-1,)),
    ("train", "data.prefetch", (1,), (0,)),
    ("train", "data.stall", (1,), (0,)),
    ("train", "data.max_bad_records", ("0", "7", "0%", "0.05%", "100%", "100.0%"),
     ("", "-1", "1.5", ".5%", "5.%", "5 %", "100.01%")),
    ("train", "sharding.blocks_per_unit", (1,), (0,)),
    ("train", "sharding.prefetch", (None, 1), (0,)),
    ("train", "sharding.reductions", (1,), (0,)),
    ("hybrid", "sharding.shard_size", (None, 1), (0,)),
    ("fp16", "precision.scaler.scale", (None, SMALL), (0.0, *TOO_LARGE)),
    ("fp16", "precision.scaler.window", (1,), (0,)),
    ("fp16", "precision.scaler.hysteresis", (1,), (0,)),
    ("fp16", "precision.scaler.minimum", (SMALL, 65536.0), (0.0, 65536.5, *TOO_LARGE)),
    ("fp16", "precision.scaler.initial_power", (0, 127), (-1, 128)),
    ("budget", "activation_checkpointing.budget", (0.0, 1.0), (None, -SMALL, 1 + SMALL, math.nan)),
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
    ("train", "model.projector_type", ("mlp2x_gelu",), ("mlp0x_gelu", "mlpx_gelu", "mlp2x_gelux", "2x_gelu")),
    ("train", "model.projector_type", ("pixel_shuffle2x_mlp2x_gelu", "pixel_shuffle8x_mlp2x_gelu"),
     ("pixel_shuffle1x_mlp2x_gelu", "pixel_shuffle3x_mlp2x_gelu", "pixel_shuffle2x_mlp3x_gelu")),
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
    ("sweep", "last_steps", (1,), (0,)),
]  # fmt: skip


@cache
def training() -> Config:
    return config_of([])


def own(**values: Any) -> dict[str, Any]:
    """The values of a training, with `values` of another program's keys."""
    return {field.name: getattr(training(), field.name) for field in fields(Config)} | values


def configuration(name: str) -> Any:
    cfg, model = training(), TrainedModelConfig(checkpoint="a")
    match name:
        case "train":
            return cfg
        case "fp16":
            precision = replace(cfg.precision, param_dtype=DType.fp16, norm_dtype=DType.fp32, reduce_dtype=DType.fp32)
            return replace(cfg, precision=precision)
        case "hybrid":
            return changed(cfg, "sharding.strategy", Strategy.HYBRID_SHARD)
        case "budget":
            return replace(cfg, activation_checkpointing=BUDGET)
        case "profiled":
            return replace(cfg, profile=True, max_steps=7)
        case "long":
            return changed(cfg, "data.max_length", 39)
        case "plan":
            return PlanConfig(**own(gpus=1, nodes=1, gpu="auto", rows=1, page="a.html", longest=False))
        case "doctor":
            return DoctorConfig(**own(gpus=None, nodes=1))
        case "prepare":
            return PrepareConfig(**own(prepare=PrepareKeys(workers=None), report=None))
        case "sweep":
            return SweepKeys(metric=SweepMetric.loss, last_steps=1)
        case "chat":
            return ChatConfig(
                model=model, image=None, question=None, messages=None, max_new_tokens=1, temperature=0.0, top_p=1.0,
                seed=None, serve=False, host="", port=1, max_upload_mb=1, max_images=1, thoughts=ShownThoughts.hide,
            )  # fmt: skip
    assert name == "evaluate"
    return EvaluateConfig(
        stage=cfg.stage, data=cfg.data, model=model, task=Task.vqa, questions="q.jsonl", annotations=None,
        suffix=False, answers=None, submission=None, limit=None, batch_size=1, max_new_tokens=1, show=0, blank=None,
        format=Format.text,
    )  # fmt: skip


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
    base = configuration(base) if isinstance(base, str) else base
    for value in good:
        changed(base, key, value)
    for value in bad:
        with pytest.raises(ConfigError, match=f"{key.rpartition('.')[2]}="):
            changed(base, key, value)


# Keys of a training that are set together, and whether that is refused.
TOGETHER: list[tuple[dict[str, Any], bool]] = [
    ({"model.train": ["projector"], "model.lora": LORA}, True),
    ({"model.train": ["projector", "vision"], "model.lora": LORA}, False),
    ({"model.train": ["language"], "model.quantize.mode": "nf4"}, True),
    ({"model.train": ["projector"], "model.quantize.mode": "nf4"}, False),
    ({"model.lora": LORA, "model.quantize.mode": "int8"}, False),
    ({"model.lora": LoraConfig(enabled=True, use_dora=True), "model.quantize.mode": "int8"}, True),
    *(({"model.lora": LORA, "precision.linear": name}, True) for name in ("fp8", "int8_mixed")),
    ({"model.lora": LORA, "model.quantize.mode": "nf4", "offload.mode": "optimizer"}, False),
    ({"model.lora": LORA, "model.quantize.mode": "nf4", "offload.mode": "params"}, True),
    ({"model.lora": LORA, "model.quantize.mode": "nf4", "offload.mode": "nvme"}, True),
    *(({"offload.mode": mode, "sharding.strategy": strategy}, refused)
      for strategy, rows in {"NO_SHARD": (False, True, True, True), "SHARD_OPTIMIZER": (False, False, True, True),
                             "SHARD_GRAD_OP": (False,) * 4, "FULL_SHARD": (False,) * 4}.items()
      for mode, refused in zip(("none", "optimizer", "params", "nvme"), rows, strict=True)),
    *(({"offload.mode": mode, key: "bf16"}, refused)
      for mode, refused in (("none", False), ("optimizer", True), ("params", False), ("nvme", True))
      for key in ("precision.master_dtype", "precision.moment_dtype")),
    *(({"offload.mode": mode, "precision.linear": "int8_mixed"}, False)
      for mode in ("none", "optimizer", "params", "nvme")),
    *(({"offload.mode": mode, "precision.linear": "fp8"}, refused)
      for mode, refused in (("none", False), ("optimizer", False), ("params", True), ("nvme", True))),
    ({"offload.mode": "nvme", "offload.folder": "disk"}, False),
    ({"offload.mode": "params", "offload.folder": "disk"}, True),
    ({"labels": "llava_v1_5"}, False),
    ({"labels": "llava_v1_5", "data.too_long": "skip"}, True),
    ({"labels": "llava_v1_5", "data.special_tokens": SpecialTokens.parse}, False),
    ({"labels": "llava_v1_5", "data.special_tokens": SpecialTokens.text}, True),
    ({"sampler.name": "llava_v1_5", "global_batch_size": 6, "micro_batch_size": 3}, False),
    ({"sampler.name": "llava_v1_5", "global_batch_size": 6, "micro_batch_size": 4}, True),
    ({"sampler.name": "llava_v1_5", "tokens_per_micro_batch": 9999}, True),
    ({"sampler.name": "llava_v1_5", "loss.normalize": "micro_batch"}, False),
    *(({"sampler.name": name, "loss.normalize": "micro_batch"}, True) for name in ("shuffle", "computed_shuffle")),
    ({"sampler.name": "shuffle", "loss.normalize": "micro_batch", "pack": False}, False),
    *(({"pack": False, "attention": name}, refused)
      for name, refused in (("auto", False), ("sdpa", False), ("varlen", True), ("flash", True))),
    ({"pack": False, "tokens_per_micro_batch": 9999}, True),
    ({"sharding.strategy": "_HYBRID_SHARD_ZERO2", "sharding.shard_size": 3}, False),
    ({"sharding.strategy": "auto", "sharding.shard_size": 3}, False),
    ({"sharding.strategy": "SHARD_GRAD_OP", "sharding.shard_size": 3}, True),
    *(({"sharding.strategy": name, "dry_run": 3}, True) for name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")),
    ({"sharding.strategy": "HYBRID_SHARD", "sharding.shard_size": 3, "dry_run": 3}, False),
    *(({"parallel.expert": expert, **more}, refused and expert > 1) for expert in (1, 2)
      for more, refused in (({}, False), ({"compile": "auto"}, False), ({"compile": True}, True),
                            ({"compile": "auto", "activation_checkpointing": BUDGET}, True),
                            ({"offload.mode": "optimizer"}, True), ({"precision.linear": "fp8"}, True),
                            ({"precision.linear": "int8_mixed"}, True),
                            ({"model.balance_loss": 0.01}, False), ({"parallel.context": 2}, False),
                            ({"model.lora": LORA}, False), ({"model.lora": LORA, "model.quantize.mode": "nf4"}, True))),
    ({"compile": False, "activation_checkpointing": BUDGET}, True),
    ({"compile": "auto", "activation_checkpointing": BUDGET}, False),
    ({"compile": "never"}, True),
    ({"pack": "never"}, True),
    ({"pack": False, "parallel.context": 2}, True),
    ({"sampler.name": "llava_v1_5", "global_batch_size": 6, "micro_batch_size": 3, "parallel.context": 2}, True),
    *(({"parallel.context": context, "model.balance_loss": loss}, refused)
      for context, loss, refused in ((2, 0.0, False), (2, 0.01, True), ("auto", 0.01, True), (1, 0.01, False))),
    *(({"compile": compiles, "model.balance_loss": loss}, refused)
      for compiles, loss, refused in ((True, 0.0, False), (True, 0.01, True), ("auto", 0.01, False))),
    ({"activation_checkpointing": BUDGET, "model.balance_loss": 0.01}, True),
    ({"model.balance_loss": -0.01}, True),
    ({"model.balance_loss": float("inf")}, True),
    ({"data.max_length": 100, "tokens_per_micro_batch": 50}, True),
    ({"data.max_length": 100, "tokens_per_micro_batch": 50, "parallel.context": 2}, False),
    ({"data.max_length": 100, "tokens_per_micro_batch": 49, "parallel.context": 2}, True),
    ({"data.max_length": 100, "tokens_per_micro_batch": 1, "parallel.context": "auto"}, False),
    *(({"data.image_aspect_ratio": "anyres_max", "model.patch_merge": "spatial_unpad", **more}, refused)
      for more, refused in (({}, False), ({"data.pixels": "fast"}, False), ({"data.pixels": "llava_v1_5"}, True),
                            ({"labels": "llava_v1_5"}, True), ({"model.patch_merge": "spatial"}, True))),
    ({"data.image_aspect_ratio": "anyres", "labels": "llava_v1_5", "model.patch_merge": "spatial"}, False),
    ({"export.enabled": True, "data.image_aspect_ratio": "anyres", "model.patch_merge": "spatial_unpad"}, False),
    ({"val.every": 1, "data.source": "llava_json"}, True),
    ({"val.every": 1, "data.source": "shapes"}, False),
    ({"val.every": 1, "data.source": "llava_json", "val.path": "a.json"}, False),
    ({"val.path": "a.json", "val.sources": {"b": HeldOutConfig(path="b.json")}}, True),
    ({"data.question": "q"}, True),
    ({"data.question": "q", "data.answer": "q"}, True),
    ({"data.question": "q", "data.answer": "a"}, False),
    ({"data.path": "a.json", "data.sources": {"a": SOURCE}}, True),
    ({"data.path": None}, True),
    *(({"data.path": None, "data.sources": {"a": SOURCE, "b": SourceConfig(path="b", weight=weight)}}, refused)
      for weight, refused in ((None, False), (1.0, True))),
    *(({"data.grid_pinpoints": [size], "data.image_aspect_ratio": "anyres"}, refused)
      for size, refused in (([336, 672], False), ([336, 0], True), ([1, 1, 1], True))),
    ({"model.train": []}, True),
    ({"model.train": ["projector", "projector"]}, True),
    ({"model.quantize.double": False}, True),
    ({"model.train": ["projector"], "model.quantize.mode": "nf4", "model.quantize.double": False}, False),
    ({"model.lora.r": 7}, True),
    ({"profile": True, "max_steps": 7, "profile_steps": [1, 8]}, True),
    ({"profile": False, "max_steps": 7, "profile_steps": [1, 8]}, False),
    *(({"parallel.pipeline": 2, **more}, refused)
      for more, refused in (({}, False), ({"precision.moment_dtype": "int8"}, False), ({"parallel.expert": 2}, False),
                            ({"loss.kernel": "torch"}, False), ({"parallel.schedule": "interleaved"}, False))),
    ({"export.enabled": True, "model.projector_type": "linear"}, True),
    ({"export.enabled": False, "model.projector_type": "linear"}, False),
    ({"export.enabled": True, "model.projector_type": "pixel_shuffle2x_mlp2x_gelu"}, False),
    ({"export.enabled": True, "export.merge": False, "model.projector_type": "linear"}, True),
    ({"export.enabled": True, "export.merge": False, "model.projector_type": "linear", "model.lora": LORA}, False),
    ({"export.enabled": True, "data.image_aspect_ratio": "anyres"}, True),
    ({"export.enabled": True, "data.image_aspect_ratio": "anyres", "data.pixels": "llava_v1_5"}, False),
    ({"export.enabled": False, "data.image_aspect_ratio": "anyres", "data.pixels": "llava_v1_5",
      "model.patch_merge": "spatial"}, True),
    ({"export.enabled": False, "data.image_aspect_ratio": "anyres", "data.pixels": "fast",
      "model.patch_merge": "spatial"}, False),
    *(({"sampler.name": "llava_v1_5", "global_batch_size": 6, "micro_batch_size": 3, "data.path": None,
        "data.sources": {"a": source}}, refused)
      for source, refused in ((SourceConfig(path="a", epochs=1.0), False), (SourceConfig(path="a", epochs=2.0), True),
                              (SourceConfig(path="a", weight=1.0), True))),
    ({"data.path": None, "data.sources": {"a": SourceConfig(path="a", weight=1, epochs=1)}}, True),
    ({"data.grid_pinpoints": [[336, 672]]}, True),
    ({"data.grid_pinpoints": [[336]], "data.image_aspect_ratio": "anyres"}, True),
    ({"model.patch_merge": "spatial"}, True),
    *(({"precision.param_dtype": name, "precision.norm_dtype": "bf16"}, True) for name in ("fp16", "fp32")),
    *(({"precision.param_dtype": name, "precision.master_dtype": "bf16"}, True) for name in ("fp16", "fp32")),
    ({"precision.reduce_dtype": "fp16"}, True),
    *(({"precision.param_dtype": "fp16", "precision.linear": name}, True) for name in ("fp8", "int8_mixed")),
    *(({"precision.linear": name, "model.train": ["projector"]}, refused)
      for name, refused in (("fp8", False), ("int8_mixed", True))),
    ({"precision.scaler": ScalerConfig(window=7)}, True),
    *(({"activation_checkpointing.mode": mode, "activation_checkpointing.budget": 0.5}, True)
      for mode in ("none", "selective", "full", "offload", "auto")),
    ({"offload.mode": "optimizer", "precision.moment_dtype": "int8"}, True),
]  # fmt: skip


def with_values(config: Any, values: dict[str, Any]) -> Any:
    """The same configuration with all of these values, checked when it has them all; a text may name an enum's."""
    found: dict[str, Any] = {}
    for group in {key.partition(".")[0] for key in values if "." in key}:
        inner = {key.removeprefix(f"{group}."): value for key, value in values.items() if key.startswith(f"{group}.")}
        found[group] = with_values(getattr(config, group), inner)
    for key, value in values.items():
        if "." not in key:
            old = getattr(config, key)
            found[key] = type(old)(value) if isinstance(old, Enum) else value
    return replace(config, **found)


@pytest.mark.parametrize(("values", "refused"), TOGETHER, ids=[f"{n}" for n in range(len(TOGETHER))])
def test_what_keys_may_be_set_together(values: dict[str, Any], refused: bool) -> None:
    """From a finetuning that exports nothing, in bf16, with zero3."""
    base = replace(changed(training(), "export.enabled", False), tokens_per_micro_batch=None)
    keys = "|".join(key.partition(".")[0] for key in values)
    with pytest.raises(ConfigError, match=keys) if refused else contextlib.nullcontext():
        with_values(base, values)


def test_of_no_task_but_vqa_there_is_a_submission() -> None:
    for task in Task:
        questions = None if task in (Task.conversations, Task.pairs) else "q.jsonl"
        cfg = replace(configuration("evaluate"), task=task, questions=questions)
        with contextlib.nullcontext() if task in (Task.vqa, Task.textvqa) else pytest.raises(ConfigError):
            replace(cfg, submission="a.json")
        with pytest.raises(ConfigError):
            replace(cfg, questions="q.jsonl" if questions is None else None)


def test_what_other_commands_refuse_together() -> None:
    conversations = {"task": Task.conversations, "questions": None}
    chat = {"question": "what?", "image": None}
    verified = {"verify": True, "data": replace(training().data, examine=Examine.decode)}
    for name, good, bad in (
        ("evaluate", conversations, [{"suffix": True}, {"annotations": "a"}, {"submission": "a"}, {"questions": "q"}]),
        ("chat", chat, [{"question": " "}, {"serve": True}, {"serve": True, "question": None, "image": "a.jpg"}]),
        ("chat", {"image": "a.jpg", "question": ""}, []),
        ("chat", {"serve": True}, []),
        ("chat", {"messages": "a.json"}, [{"image": "a.jpg"}, {"question": "what?"}, {"serve": True}]),
        (
            "prepare",
            verified,
            [{"data": replace(training().data, examine=how)} for how in (Examine.head, Examine.lazy)],
        ),
    ):
        base = replace(configuration(name), **good)
        for values in bad:
            with pytest.raises(ConfigError):
                replace(base, **values)


def test_what_a_training_makes_of_its_keys() -> None:
    cfg = training()
    original = with_values(cfg, {"data.pixels": "llava_v1_5", "export.enabled": False})
    tiled = {"data.image_aspect_ratio": "anyres", "export.enabled": False}
    aspects = [with_values(one, tiled).data for one in (cfg, original)]
    assert [data.trained_aspect for data in aspects] == [AspectRatio.anyres, AspectRatio.square]
    assert changed(original, "data.image_aspect_ratio", AspectRatio.pad).data.trained_aspect is AspectRatio.pad
    shuffled = changed(changed(cfg, "export.enabled", False), "model.projector_type", "pixel_shuffle4x_mlp2x_gelu")
    assert (cfg.model.shuffle_factor, shuffled.model.shuffle_factor) == (1, 4)
    adapted = with_values(cfg, {"model.lora": LORA, "model.train": ["projector", "language"]}).model
    assert (adapted.adapted, cfg.model.adapted) == ([Part.language], [])
    assert (adapted.plain.lora, adapted.plain.train) == (LoraConfig(), adapted.train)
    free = replace(cfg, tokens_per_micro_batch="auto")
    assert free.plans_tokens and not replace(free, pack=False, attention=Attention.auto).plans_tokens
    wide = with_values(cfg, {"parallel.context": 3, "tokens_per_micro_batch": cfg.data.max_length})
    assert wide.row_tokens == 3 * cfg.data.max_length and not wide.has_auto
    either = changed(cfg, "parallel.context", "auto")
    assert either.has_auto and either.parallel.num_context == 1
    assert wide.rank_tokens == cfg.data.max_length and wide.can_share_rows
    assert changed(cfg, "parallel.search", True).has_auto
    orders = {"sampler.name": "llava_v1_5", "global_batch_size": 6, "micro_batch_size": 3}
    for other in (with_values(cfg, {"tokens_per_micro_batch": None, **orders}), replace(cfg, pack=False)):
        assert not other.can_share_rows
    originals = {"labels": Parity.llava_v1_5}
    templates = [
        replace(changed(cfg, "data.template", name), **own) for name in ("v0", "v1") for own in ({}, originals)
    ]
    assert [one.trained_template for one in templates] == ["v0", "v1", "v1", "v1"]
    said = [replace(changed(cfg, "data.special_tokens", None), **own).trained_special_tokens for own in ({}, originals)]
    assert said == [SpecialTokens.text, SpecialTokens.parse]
    assert changed(cfg, "data.special_tokens", SpecialTokens.parse).trained_special_tokens is SpecialTokens.parse
    plain_model = changed(changed(cfg, "export.enabled", False), "model.lora", LoraConfig())
    assert not plain_model.exports_model and changed(plain_model, "export.enabled", True).exports_model
    assert changed(changed(plain_model, "export.enabled", True), "export.merge", False).exports_model
    assert cfg.data.source_names and not cfg.has_auto
    assert changed(cfg, "tokens_per_micro_batch", "auto").has_auto
    assert changed(cfg, "sharding.strategy", Strategy.auto).has_auto
    assert changed(cfg, "activation_checkpointing.mode", ActivationCheckpointing.auto).has_auto
    assert replace(cfg, tokens_per_micro_batch=None, micro_batch_size=3).row_tokens == 3 * cfg.data.max_length
    assert replace(LORA, r=16, alpha=24).scaling == 1.5 and replace(LORA, r=16, alpha=24, use_rslora=True).scaling == 6


def test_each_number_of_ranks_that_divides_them_is_checked() -> None:
    """Ranks of a row and of a layer are within one group of a pipeline, and so are those that share experts."""
    kinds = {"pipeline": 2, "tensor": 3, "context": 2}
    ParallelConfig(**kinds).check_divides(12)
    ParallelConfig(**kinds, expert=6).check_divides(12)
    for more, ranks in (
        ({"pipeline": 5}, 12), ({"tensor": 4}, 12), ({"context": 4}, 12), ({"expert": 4}, 12), ({}, 6), ({}, 1),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"does not divide"):
            ParallelConfig(**(kinds | more)).check_divides(ranks)
    ParallelConfig(expert=4).check_divides(12)
    with pytest.raises(ConfigError, match=r"parallel\.expert=4 does not divide 6"):
        ParallelConfig(pipeline=2, expert=4).check_divides(12)
    shared = ParallelConfig(context=3, tensor=2, pipeline=4, schedule=PipelineSchedule.interleaved)
    assert (shared.ranks_per_row, shared.num_stages) == (6, 8) and replace(shared, context="auto").ranks_per_row == 2


def test_of_held_out_records_nothing_of_the_training_is_read() -> None:
    """They are a file, several, or the embedded set; null images are in the folder of the training's."""
    source = SourceConfig(path="a", images="pictures", epochs=3.0)
    data = replace(
        training().data, path=None, sources={"a": source}, images="all", index="own", source=Source.llava_json
    )
    cfg = replace(training(), data=data, epochs=5, max_steps=9, profile=True)
    files = {"b": HeldOutConfig(path="b", images="others")}
    of_one = replace(cfg, val=replace(cfg.val, path="held.json", images="held", index="there")).held_out
    assert (of_one.data.path, of_one.data.images, of_one.data.index, of_one.data.sources) == (
        "held.json", "held", "there", {},
    )  # fmt: skip
    of_many = replace(cfg, val=replace(cfg.val, sources=files)).held_out
    assert (of_many.data.path, of_many.data.images, of_many.data.index) == (None, "all", None)
    assert of_many.data.sources == {"b": SourceConfig(path="b", images="others")}
    assert (of_one.epochs, of_one.max_steps, of_one.profile) == (1, None, False)
