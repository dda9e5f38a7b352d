"""What speed.py compares us with: transformers' model on one device, in the ways people train it.

Nothing of this project is in what is timed here: that is theirs.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from profile_kinds import profiled
from torch import nn

Samples = list[torch.Tensor]
"""int64 [length] texts; each follows an image"""


@dataclass(frozen=True)
class Work:
    """What every way does, as far as a process needs to know it."""

    stage: str
    model: str | None
    """One of conf/model, of which only the shape is taken; None: the small one in `models`."""
    models: Path
    """Folders `language` and `vision` with a config.json each."""
    samples: int
    """In a step; a multiple of `rows`."""
    rows: int
    """In a padded micro-batch."""
    steps: int
    warmup: int
    longest: int
    """Positions of the longest sample."""
    row: int
    """Positions of a packed row, where it is not left to the planner."""
    mean_text: float
    has_masters: bool
    """fp32 masters, gradients and moments; else everything in bf16."""
    profile: bool = False
    """Whether the last step runs once more, under torch's profiler."""


def samples_of_steps(work: Work, image: int, vocabulary: int) -> list[Samples]:
    """The texts of every step, the same for all: lognormal lengths as in LLaVA's second stage, or captions' lengths.

    Args:
        image: tokens of an image.
    """
    dice, draw = random.Random(0), torch.Generator().manual_seed(0)
    sigma = 0.65 if work.stage == "finetune" else 0.3
    steps = []
    for _ in range(work.steps):
        texts = []
        for _ in range(work.samples):
            length = int(work.mean_text * dice.lognormvariate(-(sigma**2) / 2, sigma))
            length = max(4, min(work.longest - image, length))
            texts.append(torch.randint(1, vocabulary - 2, (length,), generator=draw))
        steps.append(texts)
    return steps


def time_steps(
    work: Work,
    device: torch.device,
    run: Callable[[int], float],
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Seconds of every step behind the warm-up, its CPU seconds, losses of all, and the most memory; with
    `work.profile`, seconds of a step by kind.

    Args:
        run: a step by its number; returns its loss, for which it has waited.
        keep: is given what was found so far, after every step.
    """
    losses, seconds, processor, found = [], [], [], {}
    cuda = device.type == "cuda"
    for number in range(work.steps):
        if cuda:
            torch.cuda.synchronize(device)
        started, busy = time.perf_counter(), time.process_time()
        losses.append(run(number))
        if cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
        processor.append(time.process_time() - busy)
        print(f"step {number}: {seconds[-1]:.3f} s", file=sys.stderr, flush=True)
        found = {
            "seconds": seconds[work.warmup :],
            "cpu_seconds": processor[work.warmup :],
            "warmup_seconds": seconds[: work.warmup],
            "losses": losses,
            "max_memory_allocated": torch.cuda.max_memory_allocated(device) if cuda else None,
            "max_memory_reserved": torch.cuda.max_memory_reserved(device) if cuda else None,
        }
        keep(found)
    if work.profile:
        found["profile"] = profiled(lambda: run(work.steps - 1), device)
    return found


def build(work: Work, language: Any, vision: Any, device: torch.device) -> Any:
    """Random weights of the shapes, on the device; the last id but one stands for an image."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config=vision,
        text_config=language,
        image_token_index=language.vocab_size - 1,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
    )
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if work.has_masters else torch.bfloat16)
    try:
        with device:
            model = LlavaForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(dtype)
    model.config.use_cache = False
    model.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(True)
    if work.stage == "finetune":
        model.model.language_model.requires_grad_(True)
        model.lm_head.requires_grad_(True)
    if work.has_masters:  # frozen weights need no master
        for module in (model.model.vision_tower, model.model.language_model, model.lm_head):
            if not any(parameter.requires_grad for parameter in module.parameters()):
                module.to(torch.bfloat16)
    return model.train()


def padded(texts: Samples, image: int, image_id: int, side: int, device: torch.device) -> dict[str, torch.Tensor]:
    """A micro-batch as transformers' model takes it; all of a text but its first id are labels."""
    longest = image + max(map(len, texts))
    ids = torch.zeros((len(texts), longest), dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, text in enumerate(texts):
        end = image + len(text)
        ids[row, :image], ids[row, image:end], mask[row, :end] = image_id, text, 1
        labels[row, image + 1 : end] = text[1:]
    pixels = torch.zeros((len(texts), 3, side, side), dtype=torch.bfloat16)
    fields = {"input_ids": ids, "attention_mask": mask, "labels": labels, "pixel_values": pixels}
    return {name: value.to(device) for name, value in fields.items()}


def even(texts: Samples, rows: int) -> list[Samples]:
    """As the original deals a step: sorted by length, and every micro-batch gets long and short ones."""
    order = sorted(texts, key=len, reverse=True)
    count = len(texts) // rows
    return [order[n::count] for n in range(count)]


def by_length(texts: Samples, rows: int) -> list[Samples]:
    order = sorted(texts, key=len, reverse=True)
    return [order[n : n + rows] for n in range(0, len(order), rows)]


def loop(
    work: Work, model: nn.Module, steps: list[list[dict[str, torch.Tensor]]], device: torch.device
) -> dict[str, Any]:
    """Gradients added up over micro-batches, clipped at 1, fused AdamW; bf16 products over fp32 weights by autocast."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.0, fused=True)

    def run(number: int) -> float:
        labels = sum((micro["labels"] != -100).sum() for micro in steps[number])
        total = torch.zeros((), device=device)
        for micro in steps[number]:
            with torch.autocast(device.type, torch.bfloat16, enabled=work.has_masters):
                loss = model(**micro, num_items_in_batch=labels).loss
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    return time_steps(work, device, run)


def prepared(
    work: Work, model: Any, cut: Callable[[Samples, int], list[Samples]], rows: int, device: torch.device
) -> list[list[dict[str, torch.Tensor]]]:
    vision, vocabulary = model.config.vision_config, model.config.text_config.vocab_size
    image = (vision.image_size // vision.patch_size) ** 2
    return [
        [padded(micro, image, vocabulary - 1, vision.image_size, device) for micro in cut(texts, rows)]
        for texts in samples_of_steps(work, image, vocabulary)
    ]


def as_it_comes(work: Work, language: Any, vision: Any, device: torch.device) -> dict[str, Any]:
    """The original's training: its micro-batches, everything run again in the backward pass."""
    model = build(work, language, vision, device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return loop(work, model, prepared(work, model, even, work.rows, device), device)


def tuned(work: Work, language: Any, vision: Any, device: torch.device) -> dict[str, Any]:
    """What a careful user of transformers does: nothing runs again where it fits, micro-batches of like lengths.

    Micro-batches are halved until they fit, and where one row does not, everything runs again.
    """
    model = build(work, language, vision, device)
    rows, again = work.rows, False
    while True:
        try:
            found = loop(work, model, prepared(work, model, by_length, rows, device), device)
            return found | {"rows": rows, "activation_checkpointing": again}
        except torch.OutOfMemoryError:
            print(f"{rows} rows do not fit, activation checkpointing {again}", file=sys.stderr, flush=True)
        for parameter in model.parameters():
            parameter.grad = None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        if rows == 1 and again:
            raise RuntimeError("not even one row fits")
        rows, again = (work.rows, True) if rows == 1 else (rows // 2, again)
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})


def liger(work: Work, language: Any, vision: Any, device: torch.device) -> dict[str, Any]:
    from liger_kernel.transformers import apply_liger_kernel_to_llava  # type: ignore[import-not-found]

    apply_liger_kernel_to_llava()
    return tuned(work, language, vision, device)


def deepspeed(work: Work, language: Any, vision: Any, device: torch.device) -> dict[str, Any]:
    """ZeRO-3 of one rank, as LLaVA's script has it."""
    import deepspeed

    deepspeed.init_distributed()
    model = build(work, language, vision, device).to(torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    steps = prepared(work, model, even, work.rows, device)
    trained = [p for p in model.parameters() if p.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": work.rows,
        "gradient_accumulation_steps": len(steps[0]),
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
    }
    optimizer = torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.0, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def run(number: int) -> float:
        total = torch.zeros((), device=device)
        for micro in steps[number]:
            loss = engine(**micro).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach() / len(steps[number])
        return float(total)

    return time_steps(work, device, run)


PEERS: dict[str, Callable[[Work, Any, Any, torch.device], dict[str, Any]]] = {
    "as_it_comes": as_it_comes,
    "tuned": tuned,
    "liger": liger,
    "deepspeed": deepspeed,
}
