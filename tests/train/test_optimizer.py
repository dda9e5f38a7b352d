"""Schedules are the ones they are named after; parameter groups are LLaVA's."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import alone
from small import Configure
from torch import nn
from transformers.optimization import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from llava_fsdp.config import MasterDType, MomentDType, Schedule
from llava_fsdp.parallel.precision.fused_adamw import FusedAdamW
from llava_fsdp.parallel.precision.lowbit_adamw import LowBitAdamW, dequantise, requantise
from llava_fsdp.parallel.precision.precision import MasterWeights
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.train import main as train
from llava_fsdp.train.optimizer import SCHEDULES, LearningRate, build_optimizer, decayed_names, prepare_moments

THEIRS = {
    Schedule.cosine: get_cosine_schedule_with_warmup,
    Schedule.linear: get_linear_schedule_with_warmup,
    Schedule.constant: lambda o, w, t: get_constant_schedule_with_warmup(o, w),
}


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize(("total", "warmup"), [(50, 7), (10, 0), (3, 3), (1, 1)])
def test_schedules_equal_transformers(name: Schedule, total: int, warmup: int) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = THEIRS[name](optimizer, warmup, total)
    for step in range(total):
        assert SCHEDULES[name](step, total, warmup) == scheduler.get_last_lr()[0], step
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("least", [0.0, 0.2])
@pytest.mark.parametrize(("total", "warmup", "ratio"), [(50, 7, 0.31), (10, 0, 0.1), (9, 3, 1.0), (7, 2, 0.0)])
@pytest.mark.parametrize(("name", "decay"), [("linear", "linear"), ("cosine", "cosine"), ("sqrt", "1-sqrt")])
def test_a_rate_that_falls_at_the_end_is_that_of_transformers(
    name: str, decay: str, total: int, warmup: int, ratio: float, least: float, configure: Configure
) -> None:
    """`get_wsd_schedule`, whose warm-up begins at the smallest rate instead of 0."""
    keys = f"optim.schedule={name}", f"optim.decay_ratio={ratio}", f"optim.min_lr_ratio={least}"
    rate = LearningRate(configure(*keys, f"optim.warmup_steps={warmup}").optim, total)
    falling = min(math.ceil(ratio * total), total - warmup)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_wsd_schedule(optimizer, warmup, falling, total, decay_type=decay, min_lr_ratio=least)
    for step in range(total):
        expected = scheduler.get_last_lr()[0]
        assert rate.factor(step) == (pytest.approx(expected, abs=1e-12) if step >= warmup else step / warmup), step
        optimizer.step()
        scheduler.step()


def test_the_smallest_rate_of_a_cosine_is_that_of_transformers(configure: Configure) -> None:
    rate = LearningRate(configure("optim.min_lr_ratio=0.15", "optim.warmup_steps=4").optim, 23)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_cosine_with_min_lr_schedule_with_warmup(optimizer, 4, 23, min_lr_rate=0.15)
    for step in range(23):
        assert step < 4 or rate.factor(step) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("key", ["decay_ratio=0.1", "min_lr_ratio=0.1"])
@pytest.mark.parametrize("schedule", ["constant", "warmup_decay", "warmup_log"])
def test_other_schedules_have_no_end_of_their_own(key: str, schedule: str, configure: Configure) -> None:
    with pytest.raises(ConfigError, match=f"optim.{key}"):
        configure(f"optim.schedule={schedule}", f"optim.{key}")


def test_steps_before_the_rate_falls_do_not_depend_on_their_number(configure: Configure, tmp_path: Path) -> None:
    def losses(steps: int) -> list[float]:
        keys = "optim.decay_ratio=0.5", "optim.warmup_steps=2", "optim.schedule=sqrt", f"max_steps={steps}"
        cfg = configure(*keys, f"output_dir={tmp_path / str(steps)}")
        train.train(cfg)
        rows = map(json.loads, (tmp_path / str(steps) / "metrics.jsonl").read_text().splitlines())
        return [row["loss"] for row in rows if "loss" in row]

    short, long = losses(8), losses(12)
    assert (len(short), len(long)) == (8, 12)
    assert short[:6] == long[:6] and short[6] != long[6]  # the sixth step is the first with a lower rate


def test_warmup_decay_is_logarithmic_then_linear() -> None:
    """DeepSpeed's WarmupDecayLR: log(step + 1) / log(warmup), then a straight line to 0."""
    values = [SCHEDULES[Schedule.warmup_decay](step, 20, 5) for step in range(20)]
    assert values[:5] == [math.log(s + 1) / math.log(5) for s in range(5)]
    assert values[5:] == pytest.approx([(20 - s) / 15 for s in range(5, 20)])
    for warmup in (0, 1, 2):  # it is at least two steps long there
        values = [SCHEDULES[Schedule.warmup_decay](step, 5, warmup) for step in range(5)]
        assert values == pytest.approx([0.0, 1.0, 1.0, 2 / 3, 1 / 3])


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_learning_rate_is_never_negative(name: Schedule) -> None:
    """Not even behind the last step, nor where the warm-up is as long as the run or longer."""
    for total, warmup in ((5, 2), (3, 3), (2, 7), (1, 0)):
        values = [SCHEDULES[name](step, total, warmup) for step in range(total + 3)]
        assert all(0 <= value <= 1 + 1e-12 or step < warmup for step, value in enumerate(values)), values
        assert min(values) >= 0


def test_warmup_log_is_logarithmic_then_constant() -> None:
    """DeepSpeed's WarmupLR: log(step + 1) / log(warmup), then 1; a warm-up is at least two steps long there."""
    values = [SCHEDULES[Schedule.warmup_log](step, 20, 5) for step in range(20)]
    assert values == [math.log(s + 1) / math.log(5) for s in range(5)] + [1.0] * 15
    assert [SCHEDULES[Schedule.warmup_log](step, 9, 0) for step in range(3)] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(("override", "expected"), [("null", 2), ("3", 3), ("0", 0)])
def test_a_number_of_warmup_steps_wins_over_the_ratio(override: str, expected: int, configure: Configure) -> None:
    """ceil(0.3 x 4 steps) = 2, unless the number is given."""
    cfg = configure("optim.warmup_ratio=0.3", f"optim.warmup_steps={override}", "max_steps=4")
    state = train.build_state(cfg, alone(cfg))
    assert state.learning_rate.warmup_steps == expected


def test_groups(configure: Configure) -> None:
    """No decay for norms and biases; the projector and the vision tower with their own learning rates."""
    cfg = configure("model.train=[projector,language,vision]", "optim.lr=1e-3", "optim.weight_decay=0.1",
        "optim.projector_lr=2e-3", "optim.vision_lr=3e-4")  # fmt: skip
    state = train.build_state(cfg, alone(cfg))
    names = {id(p): n for n, p in state.masters.named.items()}
    found = {}
    for group in state.optimizer.param_groups:
        for parameter in group["params"]:
            found[names[id(parameter)]] = (group["base_lr"], group["weight_decay"])
    assert set(found) == set(state.masters.named)
    assert found["language_model.layers.0.mlp.up_proj.weight"] == (1e-3, 0.1)
    assert found["language_model.embed_tokens.weight"] == found["lm_head.weight"] == (1e-3, 0.1)
    assert found["language_model.layers.0.input_layernorm.weight"] == (1e-3, 0.0)
    assert found["multi_modal_projector.linear_1.weight"] == (2e-3, 0.1)
    assert found["multi_modal_projector.linear_1.bias"] == (2e-3, 0.0)
    assert found["vision_tower.encoder.layers.0.layer_norm1.weight"] == (3e-4, 0.0)
    assert found["vision_tower.encoder.layers.0.mlp.fc1.weight"] == (3e-4, 0.1)
    assert "vision_tower.encoder.layers.2.mlp.fc1.weight" not in found, "it lies behind the selected layer"
    assert "vision_tower.post_layernorm.weight" not in found
    assert "language_model.norm.weight" not in decayed_names(state.model)


def test_a_learning_rate_of_zero_is_one(configure: Configure) -> None:
    """It holds a part still; only null gives the part `optim.lr`."""
    cfg = configure("model.train=[projector,language,vision]", "optim.lr=1e-3", "optim.projector_lr=0",
        "optim.vision_lr=null")  # fmt: skip
    state = train.build_state(cfg, alone(cfg))
    rates = {id(p): group["base_lr"] for group in state.optimizer.param_groups for p in group["params"]}
    by_part = {name.partition(".")[0]: rates[id(p)] for name, p in state.masters.named.items()}
    assert by_part == {"language_model": 1e-3, "lm_head": 1e-3, "vision_tower": 1e-3, "multi_modal_projector": 0.0}


@pytest.mark.parametrize("master", MasterDType)
@pytest.mark.parametrize("moment", MomentDType)
def test_torchs_kernel_updates_what_is_in_fp32_alone(
    master: MasterDType, moment: MomentDType, configure: Configure
) -> None:
    """Weights or moments of fewer bits need another optimizer, which is told the dtype of moments and the seed."""
    cfg = configure("seed=7", "precision=bf16")
    cfg = replace(cfg, precision=replace(cfg.precision, master_dtype=master, moment_dtype=moment))
    layer = nn.Linear(2, 2)
    masters = MasterWeights(dict(layer.named_parameters()))
    optimizer, _ = build_optimizer(layer, masters, cfg, 5)
    if (master, moment) == (MasterDType.fp32, MomentDType.fp32):
        assert type(optimizer) is FusedAdamW
    else:
        assert type(optimizer) is LowBitAdamW and (optimizer.moments, optimizer.seed) == (moment, 7)
        compiled, _ = build_optimizer(layer, masters, cfg, 5, compiles=True)
        assert isinstance(compiled, LowBitAdamW)
        assert optimizer.conversions == (dequantise, requantise) and requantise not in compiled.conversions


def test_only_a_part_of_a_model_may_train_nothing(configure: Configure) -> None:
    cfg, layer, nothing = configure(), nn.Linear(2, 2), MasterWeights({})
    optimizer, _ = build_optimizer(layer, nothing, cfg, 5, is_part=True)
    optimizer.step()
    assert [group["params"] for group in optimizer.param_groups] == [[]]
    with pytest.raises(ConfigError):
        build_optimizer(layer, nothing, cfg, 5)


def test_moments_that_exist_are_kept(configure: Configure) -> None:
    """Only those are made that do not exist yet, as after steps in which a weight had no gradient."""
    layer = nn.Linear(2, 2)
    optimizer, _ = build_optimizer(layer, MasterWeights(dict(layer.named_parameters())), configure(), 5)
    layer.weight.grad = torch.ones(2, 2)
    optimizer.step()
    before = optimizer.state[layer.weight]["exp_avg"]
    assert before.all() and not optimizer.state[layer.bias]
    prepare_moments(optimizer)
    assert optimizer.state[layer.weight]["exp_avg"] is before
    assert not optimizer.state[layer.bias]["exp_avg"].any() and float(optimizer.state[layer.bias]["step"]) == 0


def test_the_end_of_a_line_decays_and_has_the_rate_of_the_language_model(configure: Configure) -> None:
    """`image_newline` is no norm and no bias; it belongs to no module but the model itself. The original's group of the
    projector has the names with `mm_projector`."""
    tiled = ["data.image_aspect_ratio=anyres", "model.patch_merge=spatial_unpad"]
    cfg = configure(*tiled, "optim.lr=1e-3", "optim.projector_lr=2e-3", "optim.weight_decay=0.1", to="run")
    state = train.build_state(cfg, alone(cfg))
    decayed = decayed_names(state.model)
    assert "image_newline" in decayed
    own = state.masters.named["image_newline"]
    group = next(g for g in state.optimizer.param_groups if any(own is parameter for parameter in g["params"]))
    assert (group["base_lr"], group["weight_decay"]) == (1e-3, 0.1)
    assert decayed <= {name for name, _ in state.model.named_parameters()}


@pytest.mark.parametrize("part", ["projector", "language"])
def test_the_end_of_a_line_trains_with_the_projector(part: str, configure: Configure) -> None:
    tiled = ["data.image_aspect_ratio=anyres", "model.patch_merge=spatial_unpad"]
    cfg = configure(*tiled, f"model.train=[{part}]", to="run")
    state = train.build_state(cfg, alone(cfg))
    assert ("image_newline" in state.masters.named) is (part == "projector")
