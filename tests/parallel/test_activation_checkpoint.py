"""What is kept for the backward pass changes no bit of a training."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool, single_world
from small import changed_parts, make_config
from steps import Trace, traces
from tiers import slow_after
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from llava_fsdp.config import ActivationCheckpointing, ActivationCheckpointingConfig, Config
from llava_fsdp.parallel import compile
from llava_fsdp.parallel.memory import activation_checkpoint
from llava_fsdp.parallel.memory.activation_checkpoint import apply_activation_checkpointing, keep_products_and_attention
from llava_fsdp.parallel.memory.activation_offload import HostInputs, OffloadedTensor

CPU = torch.device("cpu")
EXACT = ["full", "selective", "offload"]
TOWER = "model.train=[projector,language,vision]"


@pytest.fixture(scope="module")
def dropping(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parts once more, both with dropout in their attention."""
    dropout = {"attention_dropout": 0.2}
    return changed_parts(parts, tmp_path_factory.mktemp("dropping"), dropout, dropout)


def modes(parts: Path, dataset: Path, folder: Path, names: list[str], *overrides: str) -> list[Config]:
    common = ["sharding=zero3", "micro_batch_size=3", "global_batch_size=12", "max_steps=2", "optim.warmup_ratio=0"]
    common.append("compile=auto")  # off on a CPU, but for a budget
    return [make_config(parts, dataset, folder, f"activation_checkpointing={n}", *common, *overrides) for n in names]


def run(configs: list[Config], size: int, pools: dict[int, RankPool], timeout: float = 60) -> list[list[Trace]]:
    """By rank."""
    return [traces(single_world(), configs)] if size == 1 else pools[size].run(traces, configs, timeout=timeout)


CASES = [
    pytest.param(1, ["precision=bf16", TOWER], False, id="one rank, bf16, packed, tower too"),
    pytest.param(2, ["precision=bf16"], False, id="two ranks, bf16, packed"),
    pytest.param(2, ["precision=fp32", "pack=false", TOWER], True, id="two ranks, fp32, padded, dropout, tower too"),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("size", "overrides", "drops"), slow_after(1, CASES))
@pytest.mark.slow
def test_bits_are_those_of_none(
    size: int, overrides: list[str], drops: bool,
    parts: Path, dropping: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path,
) -> None:  # fmt: skip
    """Losses, gradient norms and weights, with norms in fp32 beside bf16 and two micro-batches a step."""
    configs = modes(dropping if drops else parts, dataset, tmp_path, ["none", *EXACT], *overrides)
    for none, *others in run(configs, size, pools):
        assert len(none[0]) == 2 and none[0][0] != none[0][1]
        for mode, other in zip(EXACT, others, strict=True):
            assert other[:2] == none[:2], mode
            assert all(torch.equal(other[2][n], none[2][n]) for n in none[2]), mode


class Block(nn.Module):
    """Matrix products, attention, and what is neither."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.rows = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, shown: torch.Tensor) -> torch.Tensor:
        query, key, value = self.rows(self.norm(shown))[:, None].chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return shown + nn.functional.silu(self.out(attended[:, 0]))


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


COUNTED = ("aten::addmm", "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::native_layer_norm")
AGAIN = {"none": (0, 0, 0), "full": (2, 2, 2), "selective": (0, 0, 2), "offload": (2, 2, 2)}


@pytest.mark.parametrize("mode", AGAIN)
def test_what_runs_again(mode: str) -> None:
    """Of two blocks, counted in the backward pass."""
    stack = nn.ModuleList(Block() for _ in range(2))
    apply_activation_checkpointing(
        [stack], ActivationCheckpointingConfig(mode=ActivationCheckpointing(mode), budget=None), CPU
    )
    shown = torch.randn(2, 5, 8, requires_grad=True)
    loss = stack[1](stack[0](shown)).sum()
    with Counting() as counting:
        loss.backward()
    assert tuple(counting.counts[name] for name in COUNTED) == AGAIN[mode]


def test_attention_that_drops_runs_again() -> None:
    """Were its result kept, the generator would stand elsewhere for what comes behind it."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    parts: Any = [None] * 3
    assert keep_products_and_attention(None, flash, *parts) is CheckpointPolicy.MUST_SAVE  # type: ignore[arg-type]
    assert keep_products_and_attention(None, flash, *parts, 0.0) is CheckpointPolicy.MUST_SAVE  # type: ignore[arg-type]
    assert keep_products_and_attention(None, flash, *parts, 0.1) is CheckpointPolicy.PREFER_RECOMPUTE  # type: ignore[arg-type]
    assert keep_products_and_attention(None, flash, *parts, dropout_p=0.1) is CheckpointPolicy.PREFER_RECOMPUTE  # type: ignore[arg-type]


def test_inputs_of_blocks_come_back_a_block_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy out for each block; each comes back while the block behind it runs, and once."""
    told: list[tuple[str, float]] = []
    copy = OffloadedTensor.copy

    def spy(self: OffloadedTensor, to: torch.Tensor, source: torch.Tensor) -> None:
        told.append(("out" if to is self.host else "in", float(source.flatten()[0])))
        copy(self, to, source)

    class Add(nn.Module):
        def __init__(self, number: int):
            super().__init__()
            self.number = number
            self.weight = nn.Parameter(torch.ones(()))  # a block without weights is one of another stage

        def forward(self, shown: torch.Tensor) -> torch.Tensor:
            told.append(("run", self.number))
            return (shown * 1.0 + 1).relu() + self.number * 0 + shown.exp() * 0

    monkeypatch.setattr(OffloadedTensor, "copy", spy)
    stack = nn.ModuleList(Add(n) for n in range(3))
    apply_activation_checkpointing(
        [stack], ActivationCheckpointingConfig(mode=ActivationCheckpointing.offload, budget=None), CPU
    )
    shown = torch.zeros(4, requires_grad=True)
    for _ in range(2):
        told.clear()
        found = shown
        for block in stack:
            found = block(found)
        assert told == [("out", 0), ("run", 0), ("out", 1), ("run", 1), ("out", 2), ("run", 2)]
        told.clear()
        found.sum().backward()
        assert told == [("in", 2), ("in", 1), ("run", 2), ("in", 0), ("run", 1), ("run", 0)]


def test_nothing_of_an_abandoned_forward_pass_stays() -> None:
    host = HostInputs(CPU)
    kept = host.pack(torch.zeros(3))
    assert isinstance(kept, OffloadedTensor)
    assert host._last is not None and host._last() is kept
    del kept
    assert host._last() is None
    number = torch.zeros(3, dtype=torch.int64)
    assert host.pack(number) is number and host.unpack(number) is number


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("mode", [own for own in ActivationCheckpointing if own is not ActivationCheckpointing.auto])
def test_which_blocks_are_wrapped_and_compiled(
    mode: ActivationCheckpointing, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled block is wrapped, and only with `selective` is the wrapper compiled. With a budget the compiler
    chooses for the language model, and the tower is wrapped. A block of another stage has no weights and stays."""
    told: list[tuple[nn.ModuleList, float | None, bool, bool]] = []

    def compile_blocks(stack: nn.ModuleList, budget: float | None, count: object, one_row: bool) -> None:
        told.append((stack, budget, one_row, isinstance(stack[0], ActivationWrapper)))

    monkeypatch.setattr(activation_checkpoint, "compile_blocks", compile_blocks)
    language, tower = (nn.ModuleList([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)]) for _ in range(2))
    of_budget = mode is ActivationCheckpointing.budget
    has_share = of_budget or mode is ActivationCheckpointing.dynamic
    cfg = ActivationCheckpointingConfig(mode=mode, budget=0.25 if has_share else None)
    count = compile.Compilations() if compiles else None
    apply_activation_checkpointing([language, tower], cfg, CPU, count, one_row=True)
    wrapped = [[isinstance(block, ActivationWrapper) for block in stack] for stack in (language, tower)]
    whole, none = [True, False, True], [False] * 3
    expected = [none, none] if mode is ActivationCheckpointing.none else [none if of_budget else whole, whole]
    assert wrapped == expected
    within = mode is ActivationCheckpointing.selective
    assert told == ([(language, 0.25 if of_budget else None, True, within)] if compiles or of_budget else [])


def test_the_budget_holds_while_it_compiles_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def compile_fx(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        seen.append(torch._functorch.config.activation_memory_budget)
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    block = Block()
    before = torch._functorch.config.activation_memory_budget
    compile.compile_blocks(nn.ModuleList([block]), 0.25)
    called = []
    block.register_forward_pre_hook(lambda *_: called.append(torch.compiler.is_compiling()))
    for length in (5, 6, 7):
        block(torch.randn(2, length, 8))
    assert seen == [0.25], "lengths are variables of what is compiled"
    assert called == [False] * 3, "hooks stay outside"
    assert torch._functorch.config.activation_memory_budget == before != 0.25


BOUND = {"fp32": 1e-5, "bf16": 0.03}
"""Of a budget's losses, norms and weights, relative: compiled kernels add in another order, and in bf16 round less."""


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("size", "shares", "precision", "pack"), [(1, (0, 1), "fp32", "false"), (2, (0.5,), "bf16", "true")]
)
def test_a_budget_is_near_none(
    size: int, shares: tuple[float, ...], precision: str, pack: str,
    parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path,
) -> None:  # fmt: skip
    """On several ranks with FSDP's hooks beside compiled blocks, and those of norms."""
    common = [f"precision={precision}", f"pack={pack}"]
    configs = modes(parts, dataset, tmp_path, ["none"], *common)
    for share in shares:
        configs += modes(parts, dataset, tmp_path, ["budget"], *common, f"activation_checkpointing.budget={share}")
    by_rank = run(configs, size, pools, timeout=1100)
    bound = BOUND[precision]
    for exact, *others in by_rank:
        for other in others:
            assert other[0] == pytest.approx(exact[0], rel=bound)
            assert other[1] == pytest.approx(exact[1], rel=bound)
            squares = [((other[2][n] - exact[2][n]).square().sum(), exact[2][n].square().sum()) for n in exact[2]]
            assert sum(float(d) for d, _ in squares) < bound**2 * sum(float(n) for _, n in squares)
