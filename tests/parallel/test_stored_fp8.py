"""On one rank the linear layers of an fp8 run keep their weight in fp8 between updates.

They compute the same bits as torchao's float8 layers. The products run in torch's CPU kernels for fp8, not in torchao's
emulation.
"""

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import single_world
from small import make_config, write_wide_parts
from steps import begin
from test_memory import shapes_of
from test_presets import Trace, steps
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils._python_dispatch import TorchDispatchMode

from llava_fsdp.parallel.compile import Compilations, compile_blocks
from llava_fsdp.parallel.memory.memory import bytes_per_rank
from llava_fsdp.parallel.precision import fp8, low_precision
from llava_fsdp.parallel.precision.precision import MasterWeights
from llava_fsdp.train.loop import train_step
from llava_fsdp.train.setup import build_model
from llava_fsdp.train.state import TrainState

pytest.importorskip("torchao", reason="torchao is not installed")

RUN = ["precision=fp8", "global_batch_size=4", "micro_batch_size=1", "max_steps=5", "optim.schedule=constant"]


class Block(nn.Module):
    """Two linear layers, the first with a bias or without. The second has none."""

    def __init__(self, inward: int, outward: int, biased: bool):
        super().__init__()
        self.up = nn.Linear(inward, outward, bias=biased, dtype=torch.bfloat16)
        self.down = nn.Linear(outward, inward, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Pair:
    """The same blocks twice: with torchao's layers, and with those that store their weight, and its masters."""

    def __init__(self, inward: int, outward: int, biased: bool, blocks: int = 1):
        torch.manual_seed(0)
        self.own = nn.ModuleList(Block(inward, outward, biased) for _ in range(blocks))
        self.torchao = copy.deepcopy(self.own)
        fp8.multiply_in_fp8(self.torchao, sharded=False, has_copies=False)
        fp8.multiply_in_fp8(self.own, sharded=False, has_copies=True)
        assert type(self.torchao[0].up).__name__ == "Float8Linear" and type(self.own[0].up) is fp8.StoredFp8Linear
        self.masters = MasterWeights(dict(self.own.named_parameters()), blocks=self.own)
        self.load()

    @torch.no_grad()
    def load(self) -> None:
        for name, master in self.masters.named.items():
            master.copy_(self.torchao.get_parameter(name))
        self.masters.refresh()

    @torch.no_grad()
    def update(self) -> None:
        """An update of the master weights, with numbers that bf16 rounds."""
        for name, master in self.masters.named.items():
            master.add_(master.grad, alpha=-1e-3)
            master.grad = None
            theirs = self.torchao.get_parameter(name)
            theirs.copy_(master)
            theirs.grad = None
        self.masters.refresh()

    def assert_equal(self, x: torch.Tensor) -> torch.Tensor:
        """Add the gradients of an input to those of both, compare outputs and input gradients, return the output."""
        results = []
        for blocks in (self.own, self.torchao):
            output = own = x.detach().clone().requires_grad_(x.requires_grad)
            for block in blocks:
                output = block(output)
            output.backward(torch.linspace(-1, 2, output.numel()).reshape(output.shape).to(output.dtype))
            assert output.isfinite().all()
            results.append((output, own.grad))
        (output, grad), (expected, expected_grad) = results
        assert torch.equal(output, expected)
        assert (grad is None and expected_grad is None) or torch.equal(grad, expected_grad)
        return output.detach()

    def assert_same_gradients(self) -> None:
        """After a single micro-batch."""
        for name, master in self.masters.named.items():
            assert torch.equal(master.grad, self.torchao.get_parameter(name).grad.float()), name


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inward", "outward"), [(48, 80), (272, 16)])
@pytest.mark.parametrize("shape", [(1, 37), (37,), (3, 16), (2, 65), (1, 1)])
def test_same_bits_as_torchao(shape: tuple[int, ...], inward: int, outward: int, biased: bool) -> None:
    """Output, and gradients of input, weight and bias; before and after an update, which changes the output."""
    pair = Pair(inward, outward, biased)
    x = torch.randn(*shape, inward, dtype=torch.bfloat16, requires_grad=True)
    outputs = []
    for _ in range(3):
        outputs.append(pair.assert_equal(x))
        pair.assert_same_gradients()
        pair.update()
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[1], outputs[2])


def test_an_input_without_gradient() -> None:
    pair = Pair(48, 80, True)
    pair.assert_equal(torch.randn(1, 37, 48, dtype=torch.bfloat16))
    pair.assert_same_gradients()


def test_several_micro_batches_are_added_in_fp32() -> None:
    pair = Pair(48, 80, True)
    total: dict[str, torch.Tensor] = {}
    for tokens in (37, 16, 5):
        pair.assert_equal(torch.randn(1, tokens, 48, dtype=torch.bfloat16, requires_grad=True))
        for name, parameter in pair.torchao.named_parameters():
            total[name] = total.get(name, torch.zeros(())) + parameter.grad.float()
            parameter.grad = None
    for name, master in pair.masters.named.items():
        assert torch.equal(master.grad, total[name])


def test_the_weight_has_no_memory_and_its_values_are_nan() -> None:
    pair = Pair(48, 80, True)
    layer = pair.own[0].up
    assert layer.weight.shape == (80, 48) and layer.weight.untyped_storage().nbytes() == 2
    assert layer.weight.isnan().all() and layer.bias.isfinite().all()
    stored = [getattr(layer, name) for name in fp8.STORED]
    assert [t.untyped_storage().nbytes() for t in stored] == [80 * 48, 80 * 48, 4]
    assert torch.equal(stored[0].float(), stored[1].t().float())
    assert set(layer.state_dict()) == {"weight", "bias"}
    pair.masters.refresh()
    assert all(getattr(layer, name) is tensor for name, tensor in zip(fp8.STORED, stored, strict=True)), "in place"


def test_a_forward_pass_before_the_first_refresh_is_refused() -> None:
    layer = nn.Linear(48, 80, dtype=torch.bfloat16)
    fp8.multiply_in_fp8(nn.ModuleList([layer]), sharded=False, has_copies=True)
    with pytest.raises(AssertionError, match=r"MasterWeights\.refresh"):
        layer(torch.zeros(1, 48, dtype=torch.bfloat16))


class WeightCasts(TorchDispatchMode):
    """Counts casts to fp8 of tensors with the shape of a weight, also transposed."""

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes = shapes | {shape[::-1] for shape in shapes}
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype.itemsize == 1:
            self.count += tuple(result.shape) in self.shapes
        return result


def test_weights_are_cast_once_per_update() -> None:
    """Two blocks with two layers, three micro-batches."""
    pair = Pair(48, 80, False, blocks=2)
    counts = {}
    for name, blocks in (("own", pair.own), ("torchao", pair.torchao)):
        with WeightCasts({(48, 80)}) as casts:
            for _ in range(3):
                x = torch.randn(1, 37, 48, dtype=torch.bfloat16, requires_grad=True)
                for block in blocks:
                    x = block(x)
                x.sum().backward()
            if name == "own":
                pair.masters.refresh()
        counts[name] = casts.count
    assert counts == {"own": 4, "torchao": 4 * 3 * 2}


@pytest.mark.parametrize("compiler", [aot_eager, pytest.param(None, marks=pytest.mark.slow)])
def test_blocks_are_compiled_once(compiler: Any) -> None:
    """One graph for all blocks, numbers of tokens and updates. Uncompiled kernels also give the same bits."""
    pair = Pair(48, 80, True, blocks=3)
    count = Compilations(compiler)
    compile_blocks(pair.own, None, count, one_row=True)
    for _ in range(2):
        for tokens in (37, 64, 61, 133):
            x = torch.randn(1, tokens, 48, dtype=torch.bfloat16, requires_grad=True)
            if compiler is not None:
                pair.assert_equal(x)
                continue
            for block in pair.own:
                x = block(x)
            x.sum().backward()
        for master in pair.masters.named.values():
            assert master.grad is not None and master.grad.isfinite().all()
        pair.update()
    assert count.total == 1


@pytest.mark.slow
def test_the_compiled_cast_of_a_weight_has_the_same_bits() -> None:
    torch.manual_seed(0)
    found = []
    for compiled in (False, True):
        layer = nn.Linear(48, 80, bias=False, dtype=torch.bfloat16)
        master = torch.randn(80, 48, generator=torch.Generator().manual_seed(0))
        fp8.multiply_in_fp8(nn.ModuleList([layer]), sharded=False, has_copies=True)
        layer.store(master, fp8.weight_storer(compiled))
        found.append([getattr(layer, name).float() for name in fp8.STORED])
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


# Whole runs


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wide_parts(tmp_path_factory.mktemp("wide"))


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_model, "check_fp8", lambda device: None)


@pytest.fixture
def layers_of_torchao(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A patch under which a run on one rank has torchao's layers. The test undoes it."""
    own = fp8.multiply_in_fp8
    with monkeypatch.context() as patch:
        patch.setattr(low_precision, "multiply_in_fp8", lambda blocks, sharded, has_copies: own(blocks, sharded, False))
        yield patch


def stored_layers(state: TrainState) -> list[fp8.StoredFp8Linear]:
    return [module for module in state.model.modules() if isinstance(module, fp8.StoredFp8Linear)]


@pytest.mark.slow
def test_a_run_has_the_bits_of_one_with_torchaos_layers(
    wide: Path, dataset: Path, tmp_path: Path, layers_of_torchao: pytest.MonkeyPatch
) -> None:
    """Losses, master weights and moments; with activation checkpointing, and continued from a checkpoint."""

    def run(name: str, *values: str) -> Trace:
        return steps(single_world(), make_config(wide, dataset, tmp_path / name, *RUN, *values))

    expected = run("torchao")
    layers_of_torchao.undo()
    assert run("own") == expected and len(set(expected.losses)) == 5
    for mode in ("full", "selective"):
        assert run(mode, f"activation_checkpointing={mode}") == expected, mode
    shutil.copytree(tmp_path / "own" / "checkpoints", tmp_path / "continued" / "checkpoints")
    assert run("continued") == Trace(expected.losses[3:], expected.digest)


@pytest.mark.parametrize(
    ("precision", "layers"), [("fp8", 15), ("fp8 precision.master_dtype=bf16", 0), ("int8_mixed", 0)]
)
def test_which_runs_store_weights(precision: str, layers: int, wide: Path, dataset: Path, tmp_path: Path) -> None:
    """Those whose parameters are copies of separate master weights."""
    values = [*RUN, *f"precision={precision}".split()]
    state = begin(single_world(), make_config(wide, dataset, tmp_path, *values))
    assert len(stored_layers(state)) == layers


def test_bytes_of_a_run_are_those_of_the_formula(wide: Path, dataset: Path, tmp_path: Path) -> None:
    """But for a float32 and a NaN of each layer."""
    cfg = make_config(wide, dataset, tmp_path, *RUN)
    state = begin(single_world(), cfg)
    train_step(state, state.loader.steps.prepare(0), cfg, 0.0)
    layers = stored_layers(state)
    held = [*state.model.parameters(), *state.masters.named.values()]
    held += [getattr(layer, name) for layer in layers for name in fp8.STORED]
    found = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())
    planned = bytes_per_rank(shapes_of(cfg), cfg.sharding.strategy, cfg.precision, 1, 1).parameters
    assert found - planned == (4 + 2) * len(layers)
