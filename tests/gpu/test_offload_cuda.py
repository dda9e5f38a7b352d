"""Offload where there is a device to take states off. Its arithmetic is tested in tests/parallel/test_offload.py."""

from pathlib import Path

import pytest
import torch
from harness import CPU
from small import make_config
from test_working_copy import BF16, Trace, assert_close_losses, assert_same_bits, one_rank_mesh, run_steps
from torch import nn

from llava_fsdp.config import Config, OffloadMode
from llava_fsdp.parallel.local_shards import local
from llava_fsdp.parallel.memory.host_memory import Arena
from llava_fsdp.parallel.memory.streamed_buffers import DeviceStaging
from llava_fsdp.parallel.memory.streamed_optimizer import StreamedOptimizer
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.ranks.mesh import Meshes
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.parallel.sharding_strategies import SHARD_PLANS
from llava_fsdp.train.setup.build_state import build_state
from llava_fsdp.train.state import TrainState


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """With kernels that repeat themselves."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device


def run(cfg: Config, device: torch.device) -> tuple[Trace, TrainState]:
    """Steps of one rank, as `train` builds it; on a mesh of one where offload needs it."""
    world = World(0, 1, 0, 1, device)
    torch.use_deterministic_algorithms(True)
    try:
        if not cfg.offload.mode.moves_weights:
            state = build_state(cfg, Parallelism.of(cfg, world))
            state.model.train()
            return run_steps(state, cfg), state
        with one_rank_mesh(device) as mesh:
            state = build_state(cfg, Parallelism(world, cfg.parallel, SHARD_PLANS[cfg.sharding.strategy], Meshes(mesh)))
            state.model.train()
            return run_steps(state, cfg), state
    finally:
        torch.use_deterministic_algorithms(False)


def configured(parts: Path, dataset: Path, folder: Path, mode: str, *values: str) -> Config:
    return make_config(parts, dataset, folder / mode, *BF16, f"offload={mode}", *values)


def test_moments_on_the_host_give_the_same_bits(cuda: torch.device, parts: Path, dataset: Path, tmp_path: Path) -> None:
    traces = [run(configured(parts, dataset, tmp_path, mode), cuda) for mode in ("none", "optimizer")]
    assert_same_bits(traces[0][0], traces[1][0])
    state = traces[1][1]
    for parameter in state.masters.named.values():
        moments = state.optimizer.state[parameter]
        assert parameter.device.type == "cuda"
        assert all(moments[n].device == CPU and moments[n].is_pinned() for n in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("mode", ["params", "nvme"])
@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_states_leave_the_device(
    sharding: str, mode: str, cuda: torch.device, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """Near the run without offload: the CPU's update and its norm have other last bits."""
    values = [f"sharding={sharding}"]
    plain = run(configured(parts, dataset, tmp_path, "none", *values), cuda)[0]
    trace, state = run(configured(parts, dataset, tmp_path, mode, *values), cuda)
    assert_close_losses(trace, plain, 1e-3)
    for parameter in state.masters.named.values():
        moments = state.optimizer.state[parameter]
        assert all(local(t).device == CPU for t in (parameter, moments["exp_avg"], moments["exp_avg_sq"]))
        assert local(parameter).is_pinned() is (mode == "params")
    frozen = [p for p in state.model.parameters() if not p.requires_grad]
    assert frozen and all(p.device.type == "cuda" for p in frozen)


def test_frozen_shards_are_offloaded_with_the_rest(
    cuda: torch.device, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    cfg = make_config(parts, dataset, tmp_path / "run", *BF16, "offload=params", "sharding=zero3", stage="pretrain")
    _, state = run(cfg, cuda)
    tower = state.model.get_submodule("vision_tower")
    assert all(p.device.type == "cuda" for p in tower.parameters())
    assert local(state.model.get_parameter("lm_head.weight")).device.type in ("cpu", "cuda")
    assert all(b.device.type == "cuda" for b in state.model.buffers())


def test_streams_do_not_race_and_leave_nothing(cuda: torch.device) -> None:
    """Buckets that are copied while others are updated, on a stream that is kept busy; and no byte stays allocated."""
    dice = torch.Generator(cuda).manual_seed(0)
    values = [torch.randn(n, generator=dice, device=cuda) for n in (3_000_000, 7, 1_000_003, 500_000, 64)]
    results = []
    for streamed in (False, True):
        parameters = [nn.Parameter(v.clone()) for v in values]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
        if streamed:
            optimizer = StreamedOptimizer(
                optimizer,
                lambda size: Arena(size, pin=True),
                lambda made: DeviceStaging(made, cuda),
                bucket_bytes=1 << 20,
            )
            assert len(optimizer.buckets) > 20
        gradients = torch.Generator(cuda).manual_seed(1)
        for _ in range(5):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=gradients, device=cuda)
            torch.cuda._sleep(20_000_000)
            before = torch.cuda.memory_allocated(cuda)
            optimizer.step()
            if streamed:
                assert torch.cuda.memory_allocated(cuda) == before
        results.append((parameters, [optimizer.state[p]["exp_avg_sq"].cpu() for p in parameters]))
    for plain, ours in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_the_peak_falls_with_every_mode(cuda: torch.device, parts: Path, dataset: Path, tmp_path: Path) -> None:
    peaks = {}
    for mode in (OffloadMode.none, OffloadMode.optimizer, OffloadMode.params):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(cuda)
        trace, state = run(configured(parts, dataset, tmp_path, mode.value), cuda)
        del trace
        peaks[mode] = torch.cuda.memory_allocated(cuda) - before
        del state
    trained_moments = 8 * 36 * 610  # of the head alone
    assert peaks[OffloadMode.none] > peaks[OffloadMode.optimizer] + trained_moments
    assert peaks[OffloadMode.optimizer] > peaks[OffloadMode.params]
