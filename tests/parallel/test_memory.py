"""The formulas give the bytes that ranks hold, to the byte, for every strategy."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool, single_world
from mixtures import mixture_parts
from small import Configure, make_config
from steps import begin
from tiers import slow_after
from torch import nn
from torch.distributed.fsdp import FSDPModule

from llava_fsdp.config import Config, MomentDType
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.model.weights.quantization import quantized_weights
from llava_fsdp.parallel.fsdp.parts import ModelParts, parts_of
from llava_fsdp.parallel.fsdp.weights import weights_of
from llava_fsdp.parallel.local_shards import local
from llava_fsdp.parallel.memory.memory import Bytes, Weight, bytes_per_rank, sharded_dimension
from llava_fsdp.parallel.precision.precision import DTYPES, MasterWeights
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.parallel.sharding_strategies import SHARD_PLANS, begin_micro_batch


def size(tensors: Any) -> int:
    """Bytes of tensors, each counted once, however many names it has; of what travels in fp8, the codes."""
    kept = [getattr(t, "_data", t) for t in tensors]  # alive while their ids are compared
    return sum({id(t): t.numel() * t.element_size() for t in kept}.values())


def held(model: nn.Module, masters: MasterWeights) -> tuple[int, int]:
    """Bytes of parameters, with what packed ones are unpacked with, and of gradients on this rank, as FSDP's own books
    and the modules have them.

    Gathered weights are the ones that FSDP has registered; gradients are local shards, gradients of gathered weights
    that wait to be synchronised, and shards that wait to be reduced over the replicas.
    """
    parameters = {id(p): local(p) for p in [*model.parameters(), *masters.named.values()]}
    for layer in quantized_weights(model).values():
        parameters |= {id(t): t for t in layer.statistics}
    gradients: list[torch.Tensor] = [local(p.grad) for p in masters.named.values() if p.grad is not None]
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        group = module._get_fsdp_state()._fsdp_param_group
        if group is None:
            continue
        for p in group.fsdp_params:
            parameters[id(p.sharded_param)] = local(p.sharded_param)
            if p.unsharded_accumulated_grad is not None:
                gradients.append(p.unsharded_accumulated_grad)
            elif hasattr(p, "_unsharded_param") and p._unsharded_param.grad is not None:
                gradients.append(p._unsharded_param.grad)
        if group._partial_reduce_output is not None:
            gradients.append(group._partial_reduce_output)
    return size(parameters.values()), size(gradients)


def shapes_of(cfg: Config) -> list[Weight]:
    """The parameters of a configuration's model, for the formulas."""
    model = build_llava(find_parts(cfg.model), cfg.model, DTYPES[cfg.precision.param_dtype])
    return list(weights_of(model, parts_of(model), cfg.precision, 1, cfg.parallel, cfg.optim).values())


def measure(world: World, cfg: Config) -> Bytes:
    """Two micro-batches and an optimizer step on this rank, with the bytes between and after them."""
    state = begin(world, cfg)
    model, masters, loader = state.model, state.masters, state.loader
    step = loader.steps.prepare(0)
    assert len(step.micro_batches) == 2
    for number, micro in enumerate(step.micro_batches):
        begin_micro_batch(model, state.parallelism.plan, is_last=number == 1)
        micro = loader.to_device(micro)
        model(**micro.inputs).backward()
        if number == 0:
            between = held(model, masters)
    state.optimizer.step()
    masters.refresh()
    parameters, gradients = held(model, masters)
    moments = [v for found in state.optimizer.state.values() for n, v in found.items() if n != "step"]
    moments += state.average.named.values() if state.average is not None else ()
    return Bytes(parameters, gradients, size(local(m) for m in moments), *between)


ROWS = {"zero0": 4, "zero1": 4, "zero2": 4, "zero3": 4, "hybrid": 2, "hybrid2": 2}  # and their shard sizes


INT8 = "bf16 precision.moment_dtype=int8"
PURE = "bf16_pure precision.reduce_dtype=fp32"
NF4, INT8_BASE = "bf16 model.quantize.mode=nf4", "bf16 model.quantize.mode=int8"
QUICK = [
    ("finetune", INT8, ("zero3", "hybrid2")), ("finetune", PURE, ("zero1", "zero2")),
    ("pretrain", "bf16", tuple(ROWS)), ("finetune", "fp32", tuple(ROWS)),
    ("finetune", "bf16 optim=muon optim.ema=0.9", tuple(ROWS)),
    ("finetune_qlora", NF4, ("zero2", "zero3", "hybrid")),
]  # fmt: skip
CASES = slow_after(1, [pytest.param(*case, id="-".join(case[:2])) for case in QUICK])
CASES += [
    pytest.param(s, p, tuple(ROWS), id=f"{s}-{p}-all", marks=pytest.mark.slow)
    for s, p in (("pretrain", "fp32"), ("finetune", "bf16"))
]
CASES += [
    pytest.param("finetune", p, tuple(ROWS), id=f"{p}-all", marks=pytest.mark.slow)
    for p in ("bf16_pure", PURE, "fp16", INT8)
]
CASES += [
    pytest.param(stage, p, tuple(ROWS), id=f"{stage}-{p}-all", marks=pytest.mark.slow)
    for stage in ("pretrain", "finetune_qlora")
    for p in (NF4, f"{NF4} model.quantize.double=false", INT8_BASE, "fp32 model.quantize.mode=fp4")
]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("stage", "precision", "rows"), CASES)
def test_bytes_equal_the_formulas(
    stage: str, precision: str, rows: tuple[str, ...], configure: Configure, pools: dict[int, RankPool]
) -> None:
    for row in rows:
        shard_size = ROWS[row]
        cfg = configure(
            *f"sharding={row} precision={precision} pack=false micro_batch_size=1 global_batch_size=8".split(),
            f"sharding.shard_size={shard_size if row.startswith('hybrid') else 'null'}",
            stage=stage,
        )
        weights = shapes_of(cfg)
        for rank, got in enumerate(pools[4].run(measure, cfg)):
            expected = bytes_per_rank(weights, cfg.sharding.strategy, cfg.precision, 4, shard_size, rank)
            assert got == expected, (row, rank)


@pytest.mark.ranks
@pytest.mark.parametrize(("row", "expert", "precision"), slow_after(1, [
    ("zero3", 2, INT8), ("zero1", 1, PURE), ("hybrid2", 1, INT8), ("hybrid", 2, "fp32"),
]))  # fmt: skip
def test_bytes_of_fewer_experts_than_ranks(
    row: str, expert: int, precision: str, parts: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """Two experts, which are cut by columns."""
    values = (
        *f"sharding={row} precision={precision} parallel.expert={expert} pack=false micro_batch_size=1".split(),
        "global_batch_size=8", f"sharding.shard_size={4 if row.startswith('hybrid') else 'null'}",
    )  # fmt: skip
    cfg = make_config(mixture_parts("mixtral", parts, tmp_path / "parts", 2, 128), dataset, tmp_path / "run", *values)
    weights = shapes_of(cfg)
    for rank, got in enumerate(pools[4].run(measure, cfg)):
        assert got == bytes_per_rank(weights, cfg.sharding.strategy, cfg.precision, 4, 4, rank), rank


@pytest.mark.ranks
def test_frozen_experts_need_no_blocks_of_moments(
    parts: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """Two experts of 40 x 40 numbers on four ranks."""
    values = (
        f"sharding=zero3 precision={INT8} pack=false micro_batch_size=1 global_batch_size=8 model.train=[projector]"
    )
    folder = mixture_parts("mixtral", parts, tmp_path / "parts", 2, 40)
    cfg = make_config(folder, dataset, tmp_path / "run", *values.split())
    weights = shapes_of(cfg)
    assert any(weight.dimension(4) == 1 for weight in weights)
    for rank, got in enumerate(pools[4].run(measure, cfg)):
        assert got == bytes_per_rank(weights, cfg.sharding.strategy, cfg.precision, 4, 4, rank), rank


def orders_of_units(world: World, cfg: Config) -> list[tuple[list[str], list[str]]]:
    """For each FSDP unit, the names of its parameters in FSDP's order, and in the planner's."""
    state = begin(world, cfg)
    weights = weights_of(state.model, ModelParts(state.model.blocks()), cfg.precision)
    names_of = {module: name for name, module in state.model.named_modules()}
    found = []
    for module in state.model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        if group is not None:
            infos = [parameter._module_info for parameter in group.fsdp_params]
            names = [f"{names_of[info.module]}.{info.param_name}".removeprefix(".") for info in infos]
            found.append((names, [name for name in weights if name in names]))
    return found


@pytest.mark.ranks
def test_weights_are_in_the_order_of_fsdp(
    parts: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """GPT-OSS has parameters beside modules."""
    folder = mixture_parts("gpt_oss", parts, tmp_path / "parts", 2)
    cfg = make_config(folder, dataset, tmp_path / "run", "sharding=zero3", "precision=fp32", "pack=false")
    orders = pools[2].run(orders_of_units, cfg)[0]
    assert len(orders) > 4
    assert [names for names, _ in orders] == [planned for _, planned in orders]


@pytest.mark.parametrize("precision", slow_after(2, [INT8, "bf16", "fp32", "bf16_pure", "fp16"]))
def test_bytes_of_one_rank(precision: str, configure: Configure) -> None:
    values = f"precision={precision} pack=false micro_batch_size=4 global_batch_size=8".split()
    cfg = configure(*values)
    assert measure(single_world(), cfg) == bytes_per_rank(shapes_of(cfg), cfg.sharding.strategy, cfg.precision, 1, 1)


def test_whole_model_is_gathered_between_no_micro_batches_of_zero3(configure: Configure) -> None:
    """The formulas tell the rows apart; else their agreement with the ranks would show little."""
    cfg = configure()
    weights = shapes_of(cfg)
    rows = {p.zero: bytes_per_rank(weights, s, cfg.precision, 4, 2) for s, p in SHARD_PLANS.items()}
    total = sum(4 * w.numel for w in weights if w.trainable)
    assert rows["zero0"].gradients == total and rows["zero0"].optimizer == 2 * total
    assert rows["zero1"].gradients_between == total > 3 * rows["zero2"].gradients_between
    assert rows["zero1"].parameters_between == rows["zero2"].parameters_between + total
    assert rows["hybrid"].optimizer > 1.9 * rows["zero3"].optimizer


def test_shards_are_those_of_torch_chunk() -> None:
    for rows, shards in itertools.product((1, 2, 5, 7, 8, 9), (1, 2, 3, 4, 8)):
        weight = Weight((rows, 3), trainable=True, whole=False, fp32=False)
        chunks = [chunk.numel() for chunk in torch.zeros(rows, 3).chunk(shards)]
        found = [weight.local(shards, rank) for rank in range(shards)]
        assert found == chunks + [0] * (shards - len(chunks)), (rows, shards)


@pytest.mark.parametrize(
    ("shape", "shards", "moments", "dimension"),
    [
        ((2, 128, 8), 4, "int8", 1), ((2, 64, 8), 4, "int8", 0), ((2, 64, 8), 4, "fp32", 1), ((2, 64, 8), 4, "bf16", 1),
        ((3, 384, 8), 4, "int8", 1), ((3, 384, 8), 5, "fp32", 0), ((4, 128, 8), 4, "fp32", 0),
        ((4, 128, 8), 2, "fp32", 0), ((1, 64, 8), 2, "int8", 1), ((0, 128, 8), 4, "fp32", 0), ((2, 1024), 4, "fp32", 0),
        ((2, 128, 8, 4), 4, "fp32", 0), ((), 4, "fp32", 0), ((2, 256, 8), 1, "fp32", 0),
        ((32, 2880, 5760), 64, "fp32", 1), ((32, 2880, 5760), 64, "int8", 0),  # GPT-OSS-20B
    ],
)  # fmt: skip
def test_matrices_that_are_fewer_than_shards_are_sharded_along_dimension_1(
    shape: tuple[int, ...], shards: int, moments: str, dimension: int
) -> None:
    """If dimension 1 is divided evenly, with int8 moments into whole blocks of 256 numbers."""
    assert sharded_dimension(shape, shards, MomentDType(moments)) == dimension
    weight = Weight(shape, trainable=True, whole=False, fp32=False, moments=MomentDType(moments))
    assert weight.dimension(shards) == dimension
    if dimension:
        assert {weight.local(shards, rank) for rank in range(shards)} == {weight.numel // shards}
        shared = replace(weight, shape=(shape[0] * 5, *shape[1:]), sharers=5)
        assert shared.local(5 * shards, 6) == weight.padded(shards) == weight.numel // shards
