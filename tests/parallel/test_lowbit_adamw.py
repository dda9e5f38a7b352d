"""AdamW over fewer bits: the update is torch's own, what is stored is rounded as it should be, whoever holds it."""

import os

import pytest
import torch
from harness import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from llava_fsdp.config import MomentDType
from llava_fsdp.parallel.local_shards import whole
from llava_fsdp.parallel.precision import lowbit_adamw
from llava_fsdp.parallel.precision.lowbit_adamw import LowBitAdamW, dequantise, dynamic_map, quantise, store
from llava_fsdp.parallel.ranks.world import World

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}
BETAS, EPS = (0.9, 0.99), 1e-8


def low_bit(parameters: list[nn.Parameter], moments: MomentDType, seed: int = 0) -> LowBitAdamW:
    return LowBitAdamW([{"params": parameters, **SETTINGS}], moments, BETAS, EPS, seed)


def gradients(shape: tuple[int, ...], steps: int) -> list[torch.Tensor]:
    """Of elements that differ by four decades."""
    dice = torch.Generator().manual_seed(0)
    scale = torch.logspace(-4, 0, shape[-1])
    return [torch.randn(shape, generator=dice) * scale for _ in range(steps)]


def test_in_fp32_it_is_torchs_fused_adamw_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the stretches are: the update of an element knows no other."""
    shapes = [(33, 70), (70,), (3, 4, 5, 2)]
    start = [torch.randn(shape) for shape in shapes]
    monkeypatch.setattr(lowbit_adamw, "CHUNK_ELEMENTS", 300)
    ours, theirs = ([nn.Parameter(s.clone()) for s in start] for _ in range(2))
    optimizers = [low_bit(ours, MomentDType.fp32)]
    optimizers.append(torch.optim.AdamW([{"params": theirs, **SETTINGS}], betas=BETAS, eps=EPS, fused=True))
    for step in range(4):
        for optimizer, parameters in zip(optimizers, (ours, theirs), strict=True):
            for parameter, shape in zip(parameters, shapes, strict=True):
                parameter.grad = gradients(shape, 4)[step]
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizers[0].state[mine][name], optimizers[1].state[other][name])


@pytest.mark.slow
def test_compiled_conversions_give_the_same_bits_on_a_cpu() -> None:
    shapes = [(7, 352), (300, 257), (1, 256), (3, 4, 5, 2)]
    start = [torch.randn(shape, generator=torch.Generator().manual_seed(2)) for shape in shapes]
    sides = [[nn.Parameter(tensor.clone()) for tensor in start] for _ in range(2)]
    group = {"params": sides[0], **SETTINGS}
    optimizers = [LowBitAdamW([group], MomentDType.int8, BETAS, EPS, 0, compiled=True)]
    optimizers.append(low_bit(sides[1], MomentDType.int8))
    for step in range(3):
        for optimizer, parameters in zip(optimizers, sides, strict=True):
            for parameter, shape in zip(parameters, shapes, strict=True):
                parameter.grad = gradients(shape, 3)[step]
            optimizer.step()
    for own, other in zip(*sides, strict=True):
        assert torch.equal(own, other)
        states = [optimizer.state[parameter] for optimizer, parameter in zip(optimizers, (own, other), strict=True)]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


@pytest.mark.parametrize("stretch", [1, 704, 1408])
def test_int8_moments_do_not_depend_on_the_stretches(stretch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row, two rows and four rows of seven at a time."""
    made = []
    for elements in (lowbit_adamw.CHUNK_ELEMENTS, stretch):
        monkeypatch.setattr(lowbit_adamw, "CHUNK_ELEMENTS", elements)
        parameter = nn.Parameter(torch.randn(7, 352, generator=torch.Generator().manual_seed(1)))
        optimizer = low_bit([parameter], MomentDType.int8)
        for gradient in gradients((7, 352), 3):
            parameter.grad = gradient
            optimizer.step()
        made.append([parameter.detach(), *(v for _, v in sorted(optimizer.state[parameter].items()))])
    assert len(made[0]) == 6 and all(torch.equal(whole, cut) for whole, cut in zip(*made, strict=True))


def test_int8_moments_are_torchaos_to_the_code() -> None:
    """Against its own step, uncompiled; what it computes in another order differs in the last bits of fp32."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.optim.adam import single_param_adam
    from torchao.optim.quant_utils import create_dynamic_map
    from torchao.optim.subclass_8bit import OptimState8bit

    assert all(list(dynamic_map(signed)) == create_dynamic_map(signed=signed) for signed in (True, False))
    shape, steps = (8, 512), 6
    ours = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    theirs = ours.detach().clone()
    moments = [OptimState8bit.zeros(shape, signed, lowbit_adamw.BLOCK) for signed in (True, False)]
    optimizer, count = low_bit([ours], MomentDType.int8), torch.zeros(())
    for gradient in gradients(shape, steps):
        ours.grad = gradient.clone()
        optimizer.step()
        count += 1
        single_param_adam(
            theirs, gradient, count, *moments, None, torch.tensor(SETTINGS["lr"]), *BETAS, SETTINGS["weight_decay"],
            EPS, IS_ADAMW=True, BF16_STOCHASTIC_ROUND=False,
        )  # fmt: skip
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=0)
    for name, other in zip(lowbit_adamw.MOMENTS, moments, strict=True):
        differing = (optimizer.state[ours][name].int() - other.codes.int()).abs()
        assert differing.max() <= 1 and (differing != 0).float().mean() < 1e-3
        assert torch.allclose(optimizer.state[ours][name + lowbit_adamw.SCALE].flatten(), other.scale, rtol=1e-4)


def test_a_row_is_quantised_by_itself() -> None:
    """So that any cut along rows has the same codes; the last block of a row may be short."""
    value = torch.randn(6, 600, generator=torch.Generator().manual_seed(0))
    codes, scales = quantise(value.clone(), torch.tensor(dynamic_map(True)))
    assert codes.shape == (6, 600) and scales.shape == (6, 3)
    parts = [quantise(value[rows].clone(), torch.tensor(dynamic_map(True))) for rows in (slice(0, 1), slice(1, 6))]
    assert torch.equal(torch.cat([p[0] for p in parts]), codes) and torch.equal(
        torch.cat([p[1] for p in parts]), scales
    )
    back = dequantise(codes, scales, torch.tensor(dynamic_map(True)))
    largest = value.abs().amax()
    assert ((back - value).abs() <= 0.0071 * largest).all()  # half a step at the top of the map, 0.9 / 64 of the scale


def test_small_values_keep_their_codes() -> None:
    """Second moments of small gradients, about 1e-10, are stored as exactly as large ones."""
    value, small = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)), 2.0**-33
    map_ = torch.tensor(dynamic_map(True))
    codes, scales = quantise(value.clone(), map_)
    small_codes, small_scales = quantise(value * small, map_)
    assert torch.equal(small_codes, codes) and torch.equal(small_scales, scales * small)


def test_rounding_at_random_is_right_on_average() -> None:
    """To one of the two neighbours, with the probability of the distance; what bf16 has stays as it is."""
    value = torch.tensor([1.0 + 1 / 512, -3.0 - 1 / 256, 1e-40, 0.75, -0.0, 3e38]).repeat(100_000, 1)
    target = torch.empty_like(value, dtype=torch.bfloat16)
    store(value.clone(), target, torch.Generator().manual_seed(0))
    neighbours = [set(target[:, n].float().tolist()) for n in range(value.shape[1])]
    assert neighbours[0] == {1.0, 1.0 + 1 / 128} and neighbours[1] == {-3.0, -3.0 - 1 / 64}
    assert neighbours[3] == {0.75} and neighbours[4] == {0.0}
    mean = target.double().mean(0)
    assert mean[0] == pytest.approx(1 + 1 / 512, abs=5e-5) and mean[1] == pytest.approx(-3 - 1 / 256, abs=1e-4)
    assert torch.isfinite(target).all()


def test_small_updates_are_not_lost_in_bf16() -> None:
    """A thousand updates of 1e-5 move weights of 1 by a hundredth; rounded to nearest they would stay at 1."""
    ours = nn.Parameter(torch.ones(512, 8, dtype=torch.bfloat16))
    optimizer = LowBitAdamW(
        [{"params": [ours], "lr": 1e-5, "weight_decay": 0.0}], MomentDType.bf16, (0.9, 0.999), 1e-12, 0
    )
    nearest = torch.ones(512, 8, dtype=torch.bfloat16)
    for _ in range(1000):
        ours.grad = torch.full_like(ours, 1e-3)
        optimizer.step()
        nearest -= 1e-5
    assert (nearest == 1).all()
    assert float(1 - ours.detach().float().mean()) == pytest.approx(0.01, rel=0.05)


def test_the_second_moment_follows_a_change_in_bf16() -> None:
    """Gradients grow by half, so the moment should by 5/4, a thousandth a step; rounding to nearest sees none of it."""
    ours = nn.Parameter(torch.zeros(512, 8))
    optimizer = LowBitAdamW(
        [{"params": [ours], "lr": 0.0, "weight_decay": 0.0}], MomentDType.bf16, (0.9, 0.999), 1e-8, 0
    )
    state = optimizer.new_state(ours)
    optimizer.state[ours] = state
    state["exp_avg_sq"].fill_(1.0)
    nearest = torch.ones((), dtype=torch.bfloat16)
    for _ in range(700):
        ours.grad = torch.full_like(ours, 1.5)
        optimizer.step()
        nearest = nearest.lerp(torch.tensor(2.25, dtype=torch.bfloat16), 0.001)
    exact = 2.25 - 1.25 * 0.999**700
    assert nearest == 1
    assert float(state["exp_avg_sq"].float().mean()) == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("moments", list(MomentDType))
def test_the_same_twice_and_other_noise_with_another_seed(moments: MomentDType) -> None:
    def run(seed: int, touched: bool) -> torch.Tensor:
        ours = nn.Parameter(torch.ones(40, 300, dtype=torch.bfloat16))
        optimizer = low_bit([ours], moments, seed)
        for gradient in gradients((40, 300), 3):
            if touched:
                torch.manual_seed(int.from_bytes(os.urandom(4), "little"))  # nobody else's draws matter
            ours.grad = gradient.bfloat16()
            optimizer.step()
        return ours.detach()

    assert torch.equal(run(0, False), run(0, True))
    assert not torch.equal(run(0, False), run(1, False))


def rounded(seen: list[bool], first_rows: list[int], monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Equal bf16 weights after two steps with equal gradients, which some of them see; each begins at a row."""
    parameters = [nn.Parameter(torch.ones(40, 30, dtype=torch.bfloat16)) for _ in seen]
    begins = {id(own): row for own, row in zip(parameters, first_rows, strict=True)}
    monkeypatch.setattr(lowbit_adamw, "local_rows", lambda own: (begins[id(own)], begins[id(own)] + 40))
    optimizer = LowBitAdamW(
        [{"params": parameters[:1], **SETTINGS}, {"params": parameters[1:], **SETTINGS}],
        MomentDType.fp32,
        BETAS,
        EPS,
        0,
    )
    for gradient in gradients((40, 30), 2):
        for parameter, sees in zip(parameters, seen, strict=True):
            parameter.grad = gradient.bfloat16() if sees else None
        optimizer.step()
    return [own.detach() for own in parameters]


def test_every_shard_of_every_parameter_is_rounded_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are those of all parameters, in every group, also of those without a gradient."""
    first, second, third = rounded([True] * 3, [0, 0, 0], monkeypatch)
    assert not torch.equal(first, second) and not torch.equal(second, third) and not torch.equal(first, third)
    _, alone, _ = rounded([False, True, True], [0, 0, 0], monkeypatch)
    assert torch.equal(alone, second)
    other, same, _ = rounded([True] * 3, [5, 0, 0], monkeypatch)
    assert torch.equal(same, second) and not torch.equal(other, first)


def rounded_columns(first_columns: list[int], monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Equal bf16 shards of a parameter after two steps; each begins at a column."""
    found = []
    for first in first_columns:
        monkeypatch.setattr(lowbit_adamw, "local_columns", lambda own, first=first: (first, first + 30))
        found += rounded([True], [0], monkeypatch)
    return found


def test_shards_with_the_same_first_row_draw_different_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, again = rounded_columns([0, 30, 0], monkeypatch)
    assert torch.equal(first, again) and not torch.equal(first, second)


def cut_moments(world: World, dimension: int) -> list[torch.Tensor]:
    """The whole weights and int8 moments after three steps on two matrices that are sharded along `dimension`."""
    mesh = init_device_mesh("cpu", (world.size,))
    start = torch.randn(2, 6, 256, generator=torch.Generator().manual_seed(1))
    parameter = nn.Parameter(distribute_tensor(start, mesh, [Shard(dimension)]))
    optimizer = low_bit([parameter], MomentDType.int8)
    for gradient in gradients((2, 6, 256), 3):
        parameter.grad = distribute_tensor(gradient, mesh, [Shard(dimension)])
        optimizer.step()
    state = optimizer.state[parameter]
    names = [name + end for name in lowbit_adamw.MOMENTS for end in ("", lowbit_adamw.SCALE)]
    return [whole(parameter), *(whole(state[name]) for name in names)]


@pytest.mark.ranks
def test_int8_moments_do_not_depend_on_the_cut(pools: dict[int, RankPool]) -> None:
    """Two matrices on two ranks, by rows, and on three, by columns."""
    expected = pools[2].run(cut_moments, 0)[0]
    assert expected[2].shape == (2, 6)
    for found in pools[3].run(cut_moments, 1):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_moments_of_vectors_and_scalars_are_whole_numbers_of_bits() -> None:
    """Only matrices are worth 8 bits; blocks do not cross rows, and the last one of a row may be short."""
    shapes = {(3, 257): (3, 2), (2, 256): (2, 1), (2, 3, 100): (2, 2), (70,): None, (): None}
    for shape, blocks in shapes.items():
        parameter = nn.Parameter(torch.ones(shape))
        state = low_bit([parameter], MomentDType.int8).new_state(parameter)
        for name in lowbit_adamw.MOMENTS:
            assert state[name].shape == shape
            assert state[name].dtype == (torch.float32 if blocks is None else torch.uint8)
            assert (name + lowbit_adamw.SCALE in state) == (blocks is not None)
            assert blocks is None or state[name + lowbit_adamw.SCALE].shape == blocks
