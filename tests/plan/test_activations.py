"""A model of three blocks stands for a deep one; micro-batches between two measured ones lie on a line."""

from dataclasses import replace
from pathlib import Path

import pytest
from small import make_config

from llava_fsdp.config import ActivationCheckpointing, ActivationCheckpointingConfig
from llava_fsdp.model.attention import Kernel
from llava_fsdp.plan import activations
from llava_fsdp.plan.activations import Measuring, MicroBatch
from llava_fsdp.plan.model_shapes import kernel_for, shapes_of
from llava_fsdp.plan.simulate import blend, inputs_away, inputs_of_blocks

MODES = [ActivationCheckpointing.none, ActivationCheckpointing.full, ActivationCheckpointing.selective]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "train",
    [
        "[projector,language]",
        *(pytest.param(t, marks=pytest.mark.slow) for t in ("[projector]", "[projector,language,vision]")),
    ],
)
def test_deepened_is_what_the_whole_depth_gives(
    train: str,
    mode: ActivationCheckpointing,
    wide_parts: Path,
    dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cfg = make_config(wide_parts, dataset, tmp_path, "precision=bf16", f"model.train={train}")
    parts = shapes_of(cfg.model)
    kernel = kernel_for(cfg, parts.language, "cuda", bf16=True)
    assert isinstance(kernel, Kernel) and parts.language.num_hidden_layers == 5
    activation_checkpointing = ActivationCheckpointingConfig(mode=mode, budget=None)
    micro = MicroBatch(rows=1, length=700, samples=4, tiles=3, labels=90)
    found = Measuring(parts, cfg, activation_checkpointing, kernel).segments(micro)
    monkeypatch.setattr(activations, "CUT", 99)
    assert found == Measuring(parts, cfg, activation_checkpointing, kernel).segments(micro)


def test_recomputing_keeps_less(wide_parts: Path, dataset: Path, tmp_path: Path) -> None:
    cfg = make_config(wide_parts, dataset, tmp_path, "precision=bf16")
    parts = shapes_of(cfg.model)
    kernel = kernel_for(cfg, parts.language, "cpu", bf16=True)
    kept = {}
    for mode in MODES:
        measuring = Measuring(parts, cfg, ActivationCheckpointingConfig(mode=mode, budget=None), kernel)
        found = measuring.segments(MicroBatch(1, 700, 4, 3, 90))
        first = next(s for s in found if s.backward)
        kept[mode] = first.begin.activations
        assert found[-1].end.activations == 0, "everything is let go of in the end"
    assert (
        kept[ActivationCheckpointing.full]
        < kept[ActivationCheckpointing.selective]
        < kept[ActivationCheckpointing.none]
    )


def test_segments_between_two_micro_batches(wide_parts: Path, dataset: Path, tmp_path: Path) -> None:
    cfg = make_config(wide_parts, dataset, tmp_path, "precision=bf16")
    parts = shapes_of(cfg.model)
    kernel = kernel_for(cfg, parts.language, "cpu", bf16=True)
    activation_checkpointing = ActivationCheckpointingConfig(mode=ActivationCheckpointing.none, budget=None)
    small, large = MicroBatch(1, 400, 2, 2, 40), MicroBatch(1, 1200, 6, 6, 120)
    middle = replace(small, length=800, samples=4, tiles=4, labels=80)
    measuring = Measuring(parts, cfg, activation_checkpointing, kernel)
    ends = [measuring.segments(micro) for micro in (small, large)]
    exact = measuring.segments(middle)
    drawn = [blend(one, other, 0.5) for one, other in zip(*ends, strict=True)]
    for one, other in zip(drawn, exact, strict=True):
        assert one.end.total == pytest.approx(other.end.total, rel=1e-3)
        # the larger of two lines lies below a line between its ends: what is drawn is never too little
        assert 0.999 * other.worst.total <= one.worst.total <= 1.1 * other.worst.total


def test_inputs_of_every_stack_go_to_the_host(wide_parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Of a tower that trains, and of the language model behind it, whose inputs are of another size."""
    cfg = make_config(wide_parts, dataset, tmp_path, "precision=bf16", "model.train=[projector,language,vision]")
    parts = shapes_of(cfg.model)
    kernel = kernel_for(cfg, parts.language, "cuda", bf16=True)
    micro = MicroBatch(1, 700, 4, 3, 90)
    segments = Measuring(
        parts, cfg, ActivationCheckpointingConfig(mode=ActivationCheckpointing.full, budget=None), kernel
    ).segments(micro)
    inputs = inputs_of_blocks(segments)
    own = 2 * 700 * parts.language.hidden_size
    assert [size for unit, size in inputs.items() if unit.startswith("language_model.")] == [own] * 5
    assert len(inputs) > 5 and min(inputs.values()) < own
    away = inputs_away(segments)
    last = next(s for s in away if s.backward and s.unit)
    kept = next(s for s in segments if s.backward and s.unit)
    assert kept.begin.activations - last.begin.activations == sum(inputs.values()) - 2 * own
    assert away[-1] == segments[-1] and min(s.begin.activations for s in away) >= 0
