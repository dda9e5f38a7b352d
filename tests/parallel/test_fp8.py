"""fp8 linear layers: which they are, what travels, and that they train; on the CPU in torchao's emulation.

That the products themselves run in fp8 only a GPU can show (tests/gpu).
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool, single_world
from small import Configure, make_config, write_wide_parts
from steps import begin
from test_memory import measure, shapes_of
from test_presets import Trace, steps
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor

from llava_fsdp.checkpoint.reader import saved_weights
from llava_fsdp.checkpoint.verify import verify
from llava_fsdp.config import Config
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.parallel.memory.memory import bytes_per_rank
from llava_fsdp.parallel.precision import fp8
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.train import main as train
from llava_fsdp.train.loop import train_step
from llava_fsdp.train.setup import build_model

FP8 = ["precision=fp8", "global_batch_size=4", "micro_batch_size=1", "max_steps=5", "optim.schedule=constant"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wide_parts(tmp_path_factory.mktemp("wide"))


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """fp8 numbers multiplied in bf16, as torchao does it where the hardware does not; and the door open."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.float8 import Float8LinearConfig

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            fp8,
            "fp8_settings",
            lambda sharded: Float8LinearConfig(enable_fsdp_float8_all_gather=sharded, emulate=True),
        )
        patch.setattr(build_model, "check_fp8", lambda device: None)
        yield


def on_rank(world: World, function: Any, cfg: Config) -> Any:
    with emulated():
        return function(world, cfg)


def test_refused_on_a_cpu_before_anything_is_read(wide: Path, dataset: Path, tmp_path: Path) -> None:
    cfg = make_config(wide, dataset, tmp_path / "run", *FP8, "data.path=nowhere.json")
    with pytest.raises(
        ConfigError, match=r"linear=fp8 needs a CUDA GPU, and this run is on cpu; choose precision=bf16"
    ):
        train.train(cfg)


def test_refused_where_no_layer_fits(configure: Configure) -> None:
    with emulated(), pytest.raises(ConfigError, match="no linear layer of the language model has sizes"):
        steps(single_world(), configure(*FP8))


@pytest.mark.parametrize(("sharded", "has_copies"), [(False, False), (True, False), (False, True)])
def test_what_becomes_fp8(sharded: bool, has_copies: bool, wide: Path, dataset: Path, tmp_path: Path) -> None:
    """By torchao's settings for a GPU: the linear layers of the language model's blocks, under their names."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    cfg = make_config(wide, dataset, tmp_path, *FP8, "model.train=[projector,language,vision]")
    model = build_llava(find_parts(cfg.model), cfg.model, torch.bfloat16)
    names = [name for name, _ in model.named_parameters()]
    model.language_model.layers[0].mlp.up_proj.requires_grad_(False)
    expected = {n for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in n}
    expected = {n for n in expected if n.startswith("language_model.")} - {"language_model.layers.0.mlp.up_proj"}
    expected -= {n for n in expected if n.endswith(("k_proj", "v_proj"))}  # three heads of 8 are no multiple of 16
    fp8.multiply_in_fp8(model.blocks()[0], sharded, has_copies)
    kind = "StoredFp8Linear" if has_copies else "Float8Linear"
    found = {n: m for n, m in model.named_modules() if type(m).__name__ == kind}
    assert set(found) == expected and len(expected) == 3 * 5 - 1
    assert [name for name, _ in model.named_parameters()] == names
    if has_copies:
        return
    for module in found.values():
        settings = module.config
        assert settings.enable_fsdp_float8_all_gather == sharded and settings.pad_inner_dim and not settings.emulate
        kinds = settings.cast_config_input, settings.cast_config_weight, settings.cast_config_grad_output
        assert [kind.target_dtype for kind in kinds] == [torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("tokens", [1, 17])
def test_a_frozen_layer_multiplies_in_fp8(tokens: int) -> None:
    """Rows of other magnitudes keep their precision, forwards and backwards; torch's CPU kernel multiplies."""
    dice = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=dice).to(torch.bfloat16)

    layer = nn.Linear(96, 64, dtype=torch.bfloat16).requires_grad_(False)
    layer.weight.copy_(drawn(64, 96) * torch.logspace(-4, 0, 64)[:, None])
    layer.bias.copy_(drawn(64) * torch.logspace(-4, 0, 64))
    x = (drawn(1, tokens, 96) * torch.logspace(-4, 0, tokens)[:, None]).to(torch.bfloat16).requires_grad_()
    grad = drawn(1, tokens, 64)
    expected = layer(x), torch.autograd.grad(layer(x), x, grad)[0]
    fp8.multiply_in_fp8(nn.ModuleList([layer]), sharded=False, has_copies=True)
    assert type(layer) is fp8.FrozenFp8Linear
    for own, other in zip((layer(x), torch.autograd.grad(layer(x), x, grad)[0]), expected, strict=True):
        assert own.dtype == torch.bfloat16 and own.shape == other.shape
        apart = (own - other).float().norm(dim=2) / other.float().norm(dim=2)
        assert 0 < apart.max() < 0.08, "of each token"


def test_each_row_of_a_frozen_weight_has_a_scale() -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weight *= torch.logspace(-6, 0, 64).to(torch.bfloat16)[:, None]
    x = torch.eye(96, dtype=torch.bfloat16)
    apart = (fp8.fp8_product(x, weight).T - weight).float().norm(dim=1) / weight.float().norm(dim=1)
    assert 0 < apart.max() < 0.04


def frozen_losses(world: World, cfg: Config) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_model, "check_fp8", lambda device: None)
        state = begin(world, cfg)
    blocks = state.model.blocks()[0]
    steps = [train_step(state, state.loader.steps.prepare(n), cfg, 0.0) for n in range(3)]
    return {
        "losses": [step.loss for step in steps],
        "norms": [step.grad_norm for step in steps],
        "in_fp8": sum(isinstance(module, fp8.FrozenFp8Linear) for module in blocks.modules()),
    }


@pytest.mark.ranks
@pytest.mark.parametrize("sharding", ["zero2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_stage_1_is_near_bf16_and_alike_on_ranks(
    sharding: str, wide: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """Frozen blocks, whole and sharded: in fp8 on one rank and on two."""
    values = [*FP8, f"sharding={sharding}", "model.train=[projector]", "pack=false"]
    cfg = make_config(wide, dataset, tmp_path, *values)
    bf16 = frozen_losses(single_world(), make_config(wide, dataset, tmp_path, *values, "precision=bf16"))
    alone, (first, second) = frozen_losses(single_world(), cfg), pools[2].run(frozen_losses, cfg)
    assert (bf16["in_fp8"], alone["in_fp8"], first["in_fp8"]) == (0, 15, 15)
    assert alone["losses"] != bf16["losses"] and alone["losses"] == pytest.approx(bf16["losses"], rel=0.02)
    assert first == second
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-3)
    assert first["norms"] == pytest.approx(alone["norms"], rel=0.02)


def sent(world: World, cfg: Config) -> dict[str, Any]:
    """Bytes that all gathers of weights bring."""
    counted: list[int] = []
    gather = DefaultAllGather.__call__

    def counting(self: DefaultAllGather, output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        counted.append(output_tensor.numel() * output_tensor.element_size())
        return gather(self, output_tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DefaultAllGather, "__call__", counting)
        state = begin(world, cfg)
        losses = [train_step(state, state.loader.steps.prepare(n), cfg, 0.0).loss for n in range(2)]
    shards = [p._local_tensor for p in state.masters.named.values() if isinstance(p, DTensor)]
    prepared = [getattr(p, "_precomputed_scale", None) is not None for p in shards if hasattr(p, "_precomputed_scale")]
    assert all(prepared), "a scale is left to the forward pass, with a collective of its own"
    return {"bytes": sum(counted), "losses": losses, "in_fp8": len(prepared)}


@pytest.mark.slow
@pytest.mark.ranks
def test_weights_travel_in_fp8(wide: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path) -> None:
    """A block's gather is half of bf16's; training comes near to bf16's."""
    found = {}
    for precision in ("bf16", "fp8"):
        values = [*FP8, f"precision={precision}", "sharding=zero3", "max_steps=2"]
        cfg = make_config(wide, dataset, tmp_path / precision, *values)
        found[precision] = pools[2].run(on_rank, sent, cfg)[0]
    model = build_llava(find_parts(cfg.model), cfg.model, torch.bfloat16)
    assert (found["bf16"]["in_fp8"], found["fp8"]["in_fp8"]) == (0, 15)
    in_fp8 = sum(p.numel() for p in fp8.weights_in_fp8(model.blocks()[0]))
    saved = found["bf16"]["bytes"] - found["fp8"]["bytes"]
    assert saved > 0 and saved % in_fp8 == 0, f"no byte less for each of the {in_fp8} elements, each time: {saved}"
    assert found["fp8"]["losses"] == pytest.approx(found["bf16"]["losses"], rel=0.02)
    assert found["fp8"]["losses"] != found["bf16"]["losses"]


@pytest.mark.slow
@pytest.mark.ranks
def test_trains_repeats_and_continues(wide: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path) -> None:
    """As tests/parallel/test_presets.py; and a checkpoint is of plain fp32 weights, whoever reads it."""
    values = [*FP8, "sharding=zero3"]
    runs: dict[str, list[Trace]] = {}
    for name, activation_checkpointing in (("none", "none"), ("full", "full"), ("continued", "none")):
        if name == "continued":
            shutil.copytree(tmp_path / "none" / "checkpoints", tmp_path / name / "checkpoints")
        cfg = make_config(
            wide, dataset, tmp_path / name, *values, f"activation_checkpointing={activation_checkpointing}"
        )
        runs[name] = pools[2].run(on_rank, steps, cfg)
    first = runs["none"]
    assert len(first[0].losses) == 5 and first[0].losses[-1] < first[0].losses[0] < 8
    assert runs["full"] == first
    for rank, trace in enumerate(runs["continued"]):
        assert trace == Trace(first[rank].losses[3:], first[rank].digest)
    folder = tmp_path / "none" / "checkpoints" / "step-000003"
    saved = saved_weights(verify(folder))["language_model.layers.0.mlp.up_proj.weight"]
    assert type(saved.rows(0, 3)) is torch.Tensor and saved.dtype == torch.float32
    shutil.copytree(tmp_path / "none" / "checkpoints", tmp_path / "bf16" / "checkpoints")
    bf16 = steps(single_world(), make_config(wide, dataset, tmp_path / "bf16", *values, "precision=bf16"))
    assert bf16.losses == pytest.approx(first[0].losses[3:], rel=0.02)


@pytest.mark.ranks
@pytest.mark.slow
def test_bytes_equal_the_formulas(wide: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path) -> None:
    """zero1 keeps weights gathered between micro-batches: those in fp8 take a byte."""
    for sharding in ("zero1", "zero3"):
        values = [*FP8, f"sharding={sharding}", "pack=false"]
        cfg = make_config(wide, dataset, tmp_path, *values)
        weights = shapes_of(cfg)
        for rank, got in enumerate(pools[2].run(on_rank, measure, cfg)):
            assert got == bytes_per_rank(weights, cfg.sharding.strategy, cfg.precision, 2, 1, rank)
