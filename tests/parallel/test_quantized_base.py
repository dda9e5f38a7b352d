"""Adapters over a packed base train on any row of the ZeRO table as a plain loop over bitsandbytes' own layers does."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import CPU, RankPool, single_world
from reference import EXPORTED
from small import Configure, config_of, make_config
from steps import begin
from test_adapters import ALL, HYBRID, SAMPLES, assert_continues, assert_plain_loop
from test_compile import trace
from test_working_copy import build_run, run_steps
from torch.distributed.fsdp import FSDPModule

from llava_fsdp.config import Config, DType
from llava_fsdp.data.toy_shapes import draw_shapes
from llava_fsdp.model.weights.quantization import quantized_weights
from llava_fsdp.parallel.local_shards import clean_name, local, whole
from llava_fsdp.parallel.precision.precision import DTYPES
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.train import main as train

LORA = ["model.lora.r=4", "model.lora.alpha=8", "model.lora.dropout=0", "optim.lr=3e-3"]
VARIANTS: dict[str, tuple[str, list[str]]] = {
    "nf4": ("finetune_qlora", []),
    "fp4": ("finetune_qlora", ["model.quantize.mode=fp4", "model.quantize.double=false"]),
    "int8": ("finetune_qlora", ["model.quantize.mode=int8", "model.lora.dropout=0.1"]),
    "frozen-projector": ("finetune_qlora", ["model.train=[language]"]),
    "tower": ("finetune_qlora", ["model.train=[projector,language,vision]"]),
    "pretrain": ("pretrain", ["model.quantize.mode=nf4"]),
}


@pytest.fixture(scope="module")
def starts(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The weights that every run of a stage starts from, for transformers."""
    found = {}
    for stage in ("finetune", "pretrain"):
        folder = tmp_path_factory.mktemp(stage)
        train.train(make_config(parts, dataset, folder, "max_steps=1", "optim.lr=0", *EXPORTED, stage=stage))
        found[stage] = folder / "export"
    return found


def settings(configure: Configure, variant: str, folder: str, *more: str) -> Config:
    stage, own = VARIANTS[variant]
    given = LORA if stage == "finetune_qlora" else []
    return configure(f"global_batch_size={SAMPLES}", *given, *own, *more, to=folder, stage=stage)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("variant", "cases"),
    [
        pytest.param("nf4", [("zero3", 4)], id="nf4", marks=pytest.mark.slow),
        pytest.param("pretrain", [("zero3", 2)], id="pretrain"),
        *[pytest.param(v, ALL, id=f"{v}-all", marks=pytest.mark.slow) for v in VARIANTS],
    ],
)
def test_a_packed_base_trains_as_a_plain_loop_does(
    variant: str,
    cases: list[tuple[str, int]],
    starts: dict[str, Path],
    configure: Configure,
    pools: dict[int, RankPool],
) -> None:
    """Also where blocks run again whose input needs no gradient: no hook on the embeddings is needed."""
    start = starts["pretrain" if variant == "pretrain" else "finetune"]
    assert_plain_loop(partial(settings, configure, variant), start, cases, pools)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_over_a_packed_base_continues_on_another_number_of_ranks(
    configure: Configure, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """The base is not in a checkpoint: it is packed again, to the same bits, and in no other way."""
    cfg = assert_continues(partial(settings, configure, "nf4"), 4, tmp_path, pools)
    with pytest.raises(ConfigError, match=r"model\.quantize\.mode: nf4 -> int8"):
        train.train(settings(configure, "nf4", cfg.output_dir, "max_steps=4", "model.quantize.mode=int8"))


Bits = dict[str, tuple[torch.Tensor, list[torch.Tensor], int]]
EVERYTHING = [(m, p) for m in ("nf4", "fp4", "int8") for p in ("bf16", "fp16", "fp32")]
ROWS = {"zero0": 2, "zero1": 2, "zero2": 2, "zero3": 4, "hybrid": 4, "hybrid2": 4}
"""And their ranks."""
EVEN = (("int8", "bf16"), ("int8", "fp16"))
"""Four ranks cut every weight of the small model into equal parts."""


def bits(world: World, cfg: Config) -> Bits:
    """Of every packed weight: its bytes as the computation has them, its statistics, and elements that lie here."""
    state = begin(world, cfg)
    packed = {clean_name(n): layer for n, layer in quantized_weights(state.model).items()}
    held = {name: local(layer.weight).numel() for name, layer in packed.items()}
    sharded = {name: whole(layer.weight).clone() for name, layer in packed.items()}
    for module in state.model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    found: Bits = {}
    for name, layer in packed.items():
        gathered = local(layer.weight)
        assert gathered.shape == sharded[name].shape and gathered.dtype is sharded[name].dtype
        assert torch.equal(gathered.view(torch.uint8), sharded[name].view(torch.uint8)), name
        found[name] = gathered.view(torch.uint8).clone(), [t.clone() for t in layer.statistics], held[name]
    return found


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("mode", "precision", "rows"),
    [
        pytest.param("nf4", "bf16", {"zero2": 2, "zero3": 4}, id="nf4-bf16"),
        *(pytest.param(m, p, ROWS, id=f"{m}-{p}-all", marks=pytest.mark.slow) for m, p in EVERYTHING),
    ],
)
def test_every_rank_holds_the_bits_of_one_process(
    mode: str, precision: str, rows: dict[str, int], configure: Configure, pools: dict[int, RankPool]
) -> None:
    """Also bits that are no numbers, and shards of different lengths: they are moved, never computed with. Plans that
    shard frozen weights shard packed ones.
    """
    keys = [f"model.quantize.mode={mode}", f"precision={precision}"]
    alone: Any = bits(single_world(), settings(configure, "nf4", "", *keys))
    assert any(own.view(DTYPES[DType(precision)]).isnan().any() for own, _, _ in alone.values())
    uneven = 0
    for row, size in rows.items():
        shards = {"zero3": size, "hybrid": 2}.get(row, 1)
        shard_size = f"sharding.shard_size={2 if row in HYBRID else 'null'}"
        cfg = settings(configure, "nf4", "", *keys, f"sharding={row}", shard_size, "micro_batch_size=2")
        ranks = pools[size].run(bits, cfg)
        for name, (own, statistics, held) in alone.items():
            for rank in ranks:
                assert torch.equal(rank[name][0], own), (row, size, name)
                assert all(torch.equal(a, b) for a, b in zip(rank[name][1], statistics, strict=True))
            assert sum(rank[name][2] for rank in ranks) == held * size // shards
            uneven += len({rank[name][2] for rank in ranks}) > 1
    assert uneven or (mode, precision) in EVEN


def trains_and_keeps_its_bits(cfg: Config, device: torch.device) -> None:
    """On one rank of any device."""
    state = build_run(cfg, device, None)
    layers = quantized_weights(state.model).values()
    assert layers and all(t.device == device for layer in layers for t in (layer.weight, *layer.statistics))
    before = [[t.clone() for t in (layer.weight.detach(), *layer.statistics)] for layer in layers]
    losses = run_steps(state, cfg).losses
    assert losses[-1] < 0.75 * losses[0]
    for layer, held in zip(layers, before, strict=True):
        for own, was in zip((layer.weight.detach(), *layer.statistics), held, strict=True):
            assert torch.equal(own.view(-1).view(torch.uint8), was.view(-1).view(torch.uint8))


EMBEDDED = [
    "stage=finetune_qlora", "model=tiny", "model.projector=random", "max_steps=8", "global_batch_size=32",
    "optim.schedule=constant", "compile=false", "precision=bf16",
]  # fmt: skip


def embedded(folder: Path, *overrides: str) -> Config:
    """The default model over its own pictures."""
    return config_of([*EMBEDDED, f"data.root={folder / 'shapes'}", f"output_dir={folder / 'run'}", *overrides])


@pytest.mark.slow
def test_the_embedded_default_learns_over_a_packed_base(tmp_path: Path) -> None:
    cfg = embedded(tmp_path)
    draw_shapes(cfg.data)
    trains_and_keeps_its_bits(cfg, CPU)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["selective", "offload", "full"])
def test_what_runs_again_gives_the_same_bits(mode: str, configure: Configure) -> None:
    keys = "precision=bf16", "model.lora.dropout=0.1"
    found = []
    for own in ("none", mode):
        cfg = settings(configure, "nf4", "", *keys, f"activation_checkpointing={own}")
        found.append(run_steps(build_run(cfg, CPU, None), cfg))
    assert found[0].losses == found[1].losses and found[0].norms == found[1].norms


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "more", [["model.quantize.mode=nf4"], ["model.quantize.mode=int8", "activation_checkpointing=full"]]
)
def test_one_graph_serves_all_packed_blocks(more: list[str], configure: Configure) -> None:
    found = []
    for on in ("false", "true"):
        found.append(trace(single_world(), settings(configure, "nf4", "", *more, f"compile={on}")))
    plain, compiled = found
    assert compiled[3][0] > 0 and compiled[3] == [compiled[3][0]] * len(compiled[3])
    assert compiled[0] == pytest.approx(plain[0], rel=1e-5)
    assert compiled[1] == pytest.approx(plain[1], rel=1e-4)
