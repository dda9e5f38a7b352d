"""Which blocks and parameters each stage of a divided model has, and what it costs."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import make_config

from llava_fsdp.config import (
    ActivationCheckpointing,
    ActivationCheckpointingConfig,
    ParallelConfig,
    PipelineSchedule,
)
from llava_fsdp.model.flops import Flops, count_flops
from llava_fsdp.model.llava.llava import Llava, build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.parallel.pipeline.stages import (
    Passed,
    children_of,
    plan_of_stages,
    plan_stages,
    remove_others,
    stage_of,
)
from llava_fsdp.runtime.errors import ConfigError

TILED = ("data.image_aspect_ratio=anyres", "model.patch_merge=spatial_unpad")
COUNTS = 100.0, 9000.0, 30.0, 2.0
"""Tokens, pairs of tokens, labels and tiles of a sample."""


@pytest.fixture(scope="module")
def model(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Llava:
    cfg = make_config(parts, dataset, tmp_path_factory.mktemp("out"), *TILED).model
    return build_llava(find_parts(cfg), cfg, torch.float32)


def test_the_costs_of_all_stages_are_those_of_the_model(model: Llava) -> None:
    """The tower is with the first stage, and whole on each rank of a layer; the loss is with the last one."""
    flops = count_flops(model, activation_checkpointing=False)
    plan = plan_stages(model, flops, COUNTS, 3)
    assert [list(part) for part in plan.blocks] == [[0], [1], [2]]
    blocks = flops.token * 100 + flops.pair * 9000
    tower, loss = flops.vision * 2, flops.label * 30
    assert plan.costs == pytest.approx((blocks / 3 + tower, blocks / 3, blocks / 3 + loss))
    assert sum(plan.costs) == pytest.approx(flops.of(*COUNTS))
    shared = plan_stages(model, flops, COUNTS, 3, tensor=2)
    assert shared.costs == pytest.approx((blocks / 3 + 2 * tower, blocks / 3, blocks / 3 + loss))
    alone = plan_stages(model, flops, COUNTS, 1)
    assert alone.blocks == (range(3),) and alone.costs == pytest.approx((flops.of(*COUNTS),))
    heavy = Flops(token=1.0, pair=0.0, label=0.0, vision=1e6)
    assert plan_stages(model, heavy, COUNTS, 2).blocks == (range(1), range(1, 3))
    late = Flops(token=1.0, pair=0.0, label=1e6, vision=0.0)
    assert plan_stages(model, late, COUNTS, 2).blocks == (range(2), range(2, 3))


def test_stages_are_planned_for_the_configuration(model: Llava, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """With what runs again in the backward pass, and with the ranks that compute a layer together."""
    base = make_config(parts, dataset, tmp_path, *TILED)
    none, selective, full = (
        ActivationCheckpointingConfig(mode=ActivationCheckpointing(mode), budget=None)
        for mode in ("none", "selective", "full")
    )
    interleaved = PipelineSchedule.interleaved
    for mode, parallel, recomputes, stages, tensor in (
        (none, ParallelConfig(pipeline=3), False, 3, 1),
        (full, ParallelConfig(pipeline=3), True, 3, 1),
        (selective, ParallelConfig(pipeline=3), True, 3, 1),
        (none, ParallelConfig(pipeline=2, tensor=2), False, 2, 2),
        (none, ParallelConfig(pipeline=1, tensor=3), False, 1, 3),
    ):
        cfg = replace(base, activation_checkpointing=mode, parallel=parallel)
        expected = plan_stages(model, count_flops(model, recomputes), COUNTS, stages, tensor)
        assert plan_of_stages(cfg, model, COUNTS) == expected
    with pytest.raises(ConfigError, match="3 blocks"):  # two stages for each of two groups
        plan_of_stages(replace(base, parallel=ParallelConfig(pipeline=2, schedule=interleaved)), model, COUNTS)


def test_each_parameter_is_in_one_stage(model: Llava) -> None:
    """The end-of-line vector is with the projector. The whole model stays as it is."""
    names = {name for name, _ in model.named_parameters()}
    children = children_of(model.language_model)
    assert children is not None and (children.blocks, children.embeddings) == ("layers", "embed_tokens")
    assert children.others == ("norm",)
    ranges = [range(1), range(1, 2), range(2, 3)]
    stages = [stage_of(model, children, part, n == 0, n == 2) for n, part in enumerate(ranges)]
    found = [{name for name, _ in stage.named_parameters()} for stage in stages]
    assert sum(map(len, found)) == len(names) and set().union(*found) == names
    assert {"image_newline", "language_model.embed_tokens.weight"} <= found[0]
    assert {"lm_head.weight", "language_model.norm.weight"} <= found[2]
    assert all(name.startswith("language_model.layers.1.") for name in found[1])
    assert [(stage.is_first, stage.is_last) for stage in stages] == [(True, False), (False, False), (False, True)]
    assert {name for name, _ in model.named_parameters()} == names and model.is_first and model.is_last
    cut = copy.deepcopy(model)
    remove_others(cut, children, {1}, has_first=False, has_last=False)
    assert {name for name, _ in cut.named_parameters()} == found[1], "a rank keeps no more in place"
    assert not any(isinstance(module, Passed) for module in model.modules())
    own = dict(model.named_parameters())
    assert all(parameter is own[name] for stage in stages for name, parameter in stage.named_parameters())


def test_a_module_of_another_stage_returns_its_input() -> None:
    """It keeps the kind of attention, which some models read from their blocks, and can tell of its calls."""
    block = torch.nn.Linear(2, 2)
    block.attention_type = "sliding_attention"  # pyright: ignore[reportAttributeAccessIssue]
    calls: list[str] = []
    passed = Passed(block, calls, "3")
    x = torch.ones(1, 2)
    assert (
        passed(x, 7, mask=None) is x
        and calls == ["3"]
        and getattr(passed, "attention_type", None) == "sliding_attention"
    )
    assert not hasattr(Passed(torch.nn.Identity()), "attention_type") and not list(passed.parameters())
