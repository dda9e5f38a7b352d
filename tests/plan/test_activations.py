"""A model of three blocks stands for a deep one; micro-batches between two measured ones lie on a line."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import CPU
from small import make_config
from tiers import slow_after
from torch.utils._pytree import tree_map_only

from llava_fsdp.config import ActivationCheckpointing, ActivationCheckpointingConfig
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.parallel.compile import Compilations
from llava_fsdp.parallel.memory.activation_checkpoint import apply_activation_checkpointing
from llava_fsdp.parallel.memory.memory import OUTPUT
from llava_fsdp.plan.memory import activations
from llava_fsdp.plan.memory.activations import ActivationMeter, inputs_of
from llava_fsdp.plan.memory.micro_batches import MicroBatchSizes
from llava_fsdp.plan.memory.simulate import inputs_of_blocks, inputs_on_host, interpolate
from llava_fsdp.plan.model_shapes import kernel_for, shapes_of
from llava_fsdp.plan.planner import Planner
from llava_fsdp.plan.time.hardware import machine_for

MICRO = MicroBatchSizes(rows=1, length=700, samples=4, tiles=3, labels=90, image_tokens=12)
MakeMeter = Callable[..., ActivationMeter]


@pytest.fixture
def make_meter(wide_parts: Path, dataset: Path, tmp_path: Path) -> MakeMeter:
    """Makes meters of a model of five blocks."""

    def make(mode: str, train: str = "projector,language", device: str = "cuda") -> ActivationMeter:
        cfg = make_config(wide_parts, dataset, tmp_path, "precision=bf16", f"model.train=[{train}]")
        parts = shapes_of(cfg.model)
        kernel = kernel_for(cfg, parts.language, device, bf16=True)
        assert kernel is not None and parts.language.num_hidden_layers == 5
        checkpointing = ActivationCheckpointingConfig(mode=ActivationCheckpointing(mode), budget=None)
        return ActivationMeter(parts, cfg, checkpointing, kernel)

    return make


SLOW = [pytest.param(train, marks=pytest.mark.slow) for train in ("projector", "projector,language,vision")]


@pytest.mark.parametrize("mode", slow_after(1, ["selective", "none", "full"]))
@pytest.mark.parametrize("train", ["projector,language", *SLOW])
def test_deepened_is_what_the_whole_depth_gives(
    train: str, mode: str, make_meter: MakeMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    deepened = make_meter(mode, train).segments(MICRO)
    monkeypatch.setattr(activations, "UNLIKE", 99)
    assert deepened == make_meter(mode, train).segments(MICRO)


@pytest.mark.parametrize("train", ["projector", "projector,language"])
def test_the_output_layer_is_a_segment_also_if_it_is_frozen(train: str, make_meter: MakeMeter) -> None:
    """Last of a forward pass and first of a backward pass; its gradient is that of its weight alone, in bf16."""
    meter = make_meter("full", train)
    segments = meter.segments(MICRO)
    forward, backward = ([s for s in segments if s.block and s.backward is there] for there in (False, True))
    assert (forward[-1].block, backward[0].block) == (OUTPUT, OUTPUT)
    weight = meter.model.get_parameter("lm_head.weight")
    assert backward[0].gradient_bytes == (2 * weight.numel() if weight.requires_grad else 0)
    blocks = inputs_of_blocks(segments)
    assert blocks and OUTPUT not in blocks


def test_recomputing_keeps_less(make_meter: MakeMeter) -> None:
    kept = []
    for mode in ("full", "selective", "none"):
        segments = make_meter(mode, device="cpu").segments(MICRO)
        kept.append(next(s for s in segments if s.backward).begin.activations)
        assert segments[-1].end.activations == 0, "everything is freed at the end"
    assert kept[0] < kept[1] < kept[2]


def test_segments_between_two_micro_batches(make_meter: MakeMeter) -> None:
    small, large = MicroBatchSizes(1, 400, 2, 2, 40, 8), MicroBatchSizes(1, 1200, 6, 6, 120, 24)
    meter = make_meter("none", device="cpu")
    ends = [meter.segments(micro) for micro in (small, large)]
    interpolated = [interpolate(first, second, 0.5) for first, second in zip(*ends, strict=True)]
    middle = meter.segments(replace(small, length=800, samples=4, tiles=4, labels=80, image_tokens=16))
    for between, exact in zip(interpolated, middle, strict=True):
        assert between.end.total == pytest.approx(exact.end.total, rel=1e-3)
        # the larger of two lines lies below a line between its ends: what is interpolated is never too little
        assert 0.999 * exact.peak_with_fsdp.total <= between.peak_with_fsdp.total <= 1.1 * exact.peak_with_fsdp.total


def test_inputs_of_every_stack_go_to_the_host(make_meter: MakeMeter) -> None:
    """Those of a vision tower that trains, and of the language model behind it, which are of another size."""
    meter = make_meter("full", "projector,language,vision")
    segments = meter.segments(MICRO)
    inputs = inputs_of_blocks(segments)
    size = 2 * 700 * meter.model.parts.language.hidden_size
    assert [nbytes for unit, nbytes in inputs.items() if unit.startswith("language_model.")] == [size] * 5
    assert len(inputs) > 5 and min(inputs.values()) < size
    moved = inputs_on_host(segments)
    last, kept = (next(s for s in each if s.backward and s.block) for each in (moved, segments))
    assert kept.begin.activations - last.begin.activations == sum(inputs.values()) - 2 * size
    assert moved[-1] == segments[-1] and min(s.begin.activations for s in moved) >= 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["selective", "none"])
def test_compiled_blocks_keep_what_inductor_keeps(mode: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Bytes to the last one, of padded rows of an odd length, although the configuration has one row."""
    own = "pack=false", "micro_batch_size=1", "compile=true", f"activation_checkpointing={mode}"
    cfg = make_config(parts, dataset, tmp_path, *own)
    shapes = shapes_of(cfg.model)
    planner = Planner(cfg, machine_for("cpu", 1))
    micro = MicroBatchSizes(
        rows=3, length=37, samples=3, tiles=3, labels=40, image_tokens=3 * planner.model.image_tokens
    )
    segments = planner.segments(cfg.activation_checkpointing.mode, micro)
    planned = [s.end - s.begin for s in segments if not s.backward and s.block.startswith("language_model")]

    torch._dynamo.reset()
    model = build_llava(shapes, cfg.model, torch.float32, None, cfg.loss)
    apply_activation_checkpointing(model.blocks(), cfg.activation_checkpointing, CPU, Compilations())
    model.to_empty(device=CPU).train()
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.detach().zero_()
    inputs = tree_map_only(torch.Tensor, lambda t: torch.zeros_like(t, device=CPU), inputs_of(model, micro, False))
    known = {p.untyped_storage()._cdata for p in [*model.parameters(), *model.buffers()]}
    kept = []
    for node in nodes_of(model(**inputs).grad_fn):
        if "Compiled" in node.name():
            storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in node.saved_tensors}
            kept.append(sum(size for key, size in storages.items() if key not in known))
            known |= set(storages)
    last, *others = kept
    assert [each.activations for each in planned[:-1]] == others and len(others) == 2
    assert last > planned[-1].activations  # here also what all blocks share: rotary embeddings


def nodes_of(node: Any) -> list[Any]:
    """All nodes of an autograd graph, the last operation's first."""
    found: list[Any] = []
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.append(node)
            waiting += [following for following, _ in node.next_functions]
    return found
