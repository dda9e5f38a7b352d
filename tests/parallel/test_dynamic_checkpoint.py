"""Activation checkpointing chosen from measurements: what is measured and chosen, and that it changes no bit."""

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool, single_world
from small import make_config
from steps import Calls, begin, held_masters
from torch import nn

from llava_fsdp.config import ActivationCheckpointing, ActivationCheckpointingConfig, Config
from llava_fsdp.parallel.memory import dynamic_checkpoint
from llava_fsdp.parallel.memory.activation_checkpoint import apply_activation_checkpointing
from llava_fsdp.parallel.memory.dynamic_checkpoint import (
    SIZE_MARGIN,
    WARN_AFTER,
    DynamicBlock,
    DynamicCheckpointing,
    Limit,
    Measured,
    choose,
    worst_of,
)
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.train.loop import fit
from llava_fsdp.train.main import train
from llava_fsdp.train.state import StepResult

WIDTH = 7
TRAINED = ["compile=false", "sharding=zero3", "micro_batch_size=3", "global_batch_size=12", "optim.warmup_ratio=0"]


class Feed(nn.Module):
    """A block that keeps, beyond its input, its inner products and their activations."""

    def __init__(self, inner: int, dropout: float = 0.0):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        found = self.down(nn.functional.silu(self.up(self.dropout(hidden))))
        return found if scale is None else found * scale


def dynamic(stack: nn.ModuleList, share: float = 1.0) -> DynamicCheckpointing:
    cfg = ActivationCheckpointingConfig(mode=ActivationCheckpointing.dynamic, budget=share)
    apply_activation_checkpointing([stack], cfg, torch.device("cpu"))
    return DynamicCheckpointing([stack], cfg, single_world())


def step(stack: nn.ModuleList, rows: int) -> None:
    hidden = torch.ones(rows, WIDTH, requires_grad=True)
    for block in stack:
        hidden = block(hidden)
    hidden.sum().backward()


def test_a_block_measures_what_it_keeps_beyond_its_arguments_and_its_result() -> None:
    """The input, the weights and the result are there in every mode; so is an argument that several blocks share."""
    block = DynamicBlock(Feed(5), torch.device("cpu"))
    block.measures = True
    for rows in (3, 11):
        hidden = torch.ones(rows, WIDTH, requires_grad=True)
        block(hidden, scale=torch.full((rows, WIDTH), 2.0)).sum().backward()
    assert [tuple(run.shape) for run in block.runs] == [(3, WIDTH), (11, WIDTH)]
    inner = 2 * 5 * 4  # silu's input and its result, of each row
    assert [run.nbytes for run in block.runs] == [3 * inner, 11 * inner]
    found = block.measured()
    assert (found.num_elements, found.length, found.nbytes) == (11 * WIDTH, 11, inner / WIDTH) and found.seconds > 0
    assert block.measured() == Measured(0, 0, 0.0, 0.0), "measurements are read once"


def test_a_measured_pass_leaves_nothing_behind() -> None:
    """Also where an operation saves its own output, whose graph it would keep alive."""
    outputs: list[weakref.ref[torch.Tensor]] = []

    class Softmax(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            found = hidden.softmax(-1)
            outputs.append(weakref.ref(found))
            return found * hidden

    block = DynamicBlock(Softmax(), torch.device("cpu"))
    block.measures = True
    for rows in (0, 3):
        block(torch.ones(rows, WIDTH, requires_grad=True)).sum().backward()
    gc.collect()
    assert len(outputs) == 6 and [found() for found in outputs] == [None] * 6
    assert block.measured().num_elements == 3 * WIDTH, "an empty input is not measured"


class Halves(torch.Tensor):
    """A tensor of a class that wraps two others, as weights are that are cast to fp8."""

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> "Halves":
        return torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype)

    def __init__(self, first: torch.Tensor, second: torch.Tensor):
        self.first, self.second = first, second

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> "Halves":
        return Halves(parts["first"], parts["second"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def test_memory_of_a_tensor_that_wraps_others() -> None:
    first, second = torch.zeros(3), torch.zeros(5, dtype=torch.int8)
    found = dynamic_checkpoint.storages_of(Halves(first, second))
    assert found == {first.untyped_storage().data_ptr(): 12, second.untyped_storage().data_ptr(): 5}
    view = first[1:]
    assert dynamic_checkpoint.storages_of(view) == dynamic_checkpoint.storages_of(first)


def test_measuring_draws_no_random_numbers_and_changes_no_gradient() -> None:
    gradients = []
    for measures in (False, True):
        torch.manual_seed(0)
        block = DynamicBlock(Feed(5, dropout=0.5), torch.device("cpu"))
        block.measures = measures
        hidden = torch.randn(4, WIDTH, requires_grad=True)
        block(hidden).square().sum().backward()
        gradients.append([hidden.grad, *(p.grad for p in block.parameters()), torch.rand(3)])
        assert len(block.runs) == measures
    for plain, measured in zip(*gradients, strict=True):
        assert plain is not None and measured is not None and torch.equal(plain, measured)


def test_those_that_take_longest_for_their_bytes_are_chosen() -> None:
    slow, quick, wide = Measured(10, 5, 4.0, 8e-6), Measured(10, 5, 4.0, 2e-6), Measured(10, 5, 400.0, 9e-6)
    never, free = Measured(0, 0, 0.0, 0.0), Measured(10, 5, 0.0, 1e-6)
    blocks = [quick, slow, wide, never, slow, quick, free]
    each = 4 * int(10 * SIZE_MARGIN)

    def chosen(room: float) -> tuple[int, ...]:
        found = choose(blocks, room)
        assert set(found.values()) <= {Limit(11, 5)}
        return tuple(found)

    assert chosen(each - 1) == ()
    assert chosen(each) == (4,), "the later one of two equal ones"
    assert chosen(2 * each) == (1, 4)
    assert chosen(3 * each) == (1, 4, 5)
    assert chosen(4 * each + 1) == (0, 1, 4, 5)
    assert chosen(1e9) == (0, 1, 2, 4, 5)
    assert worst_of([slow, wide, never, Measured(7, 6, 1.0, 1e-6)]) == Measured(10, 6, 400.0, 9e-6)


def test_blocks_measure_in_two_steps_and_larger_inputs_are_still_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = nn.ModuleList([Feed(5), Feed(50), Feed(5)])
    chooser = dynamic(stack, share=0.1)
    blocks: list[Any] = list(stack)
    each = 2 * 5 * 4 / WIDTH * int(SIZE_MARGIN * 20 * WIDTH)
    monkeypatch.setattr(dynamic_checkpoint, "memory_left", lambda world: 10 * (2 * each + 1))
    measured = []
    for rows in (19, 20, 20):
        step(stack, rows)
        measured.append([len(block.runs) for block in blocks])
        assert chooser.kept is None and chooser.state() is None
        chooser.after_step(skipped=False)
    assert measured == [[0] * 3, [1] * 3, [2] * 3]
    limit = Limit(int(SIZE_MARGIN * 20 * WIDTH), 22)
    two = {0: limit, 2: limit}
    assert chooser.kept is not None
    assert chooser.kept.limits == two, "a tenth of what is left has room for two blocks, and all of it for three"
    assert not any(block.measures for block in blocks)
    for rows, again in ((20, 1), (22, 1), (23, 3)):
        runs: list[int] = []
        hooks = [block.up.register_forward_hook(lambda *_, runs=runs: runs.append(1)) for block in blocks]
        step(stack, rows)
        for hook in hooks:
            hook.remove()
        assert len(runs) == 3 + again, rows
    chooser.after_step(skipped=False)
    assert chooser.kept.limits == two, "the choice stays"
    other = dynamic(nn.ModuleList([Feed(5), Feed(50), Feed(5)]))
    other.restore(json.loads(json.dumps(chooser.state())))
    assert other.kept == chooser.kept and [block.limit for block in other.blocks] == [limit, Limit(0, 0), limit]
    other.after_step(skipped=False)
    assert not other.blocks[1].measures, "nothing is measured after a choice was restored"
    other = dynamic(nn.ModuleList([Feed(5), Feed(50), Feed(5)]))
    state = chooser.state()
    assert state is not None
    other.restore(state | {"device": "another, with less memory"})
    assert other.kept is None


def test_a_row_longer_than_measured_is_recomputed() -> None:
    """Also where the input has no more elements, because some attention keeps bytes for each pair of tokens."""
    block = DynamicBlock(Feed(5), torch.device("cpu"))
    block.limit = Limit(12 * WIDTH, 6)
    for rows, length, is_kept in ((2, 6, True), (1, 6, True), (1, 7, False), (3, 6, False)):
        block.had_larger = False
        with torch.no_grad():
            block(torch.ones(rows, length, WIDTH))
        assert not block.had_larger, "a validation recomputes nothing"
        block(torch.ones(rows, length, WIDTH))
        assert block.had_larger is not is_kept


def test_skipped_steps_do_not_count_and_larger_inputs_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Before the first update there may be no optimizer states, which then need memory."""
    chooser = dynamic(nn.ModuleList([Feed(5)]))
    stack = nn.ModuleList(chooser.blocks)
    for skipped in (True, True, False, True, False, False):
        assert chooser.kept is None
        step(stack, 4)
        chooser.after_step(skipped)
    assert chooser.kept is not None and chooser.kept.limits
    for number in range(WARN_AFTER + 5):
        step(stack, 9)
        chooser.after_step(skipped=False)
        warned = [record for record in caplog.records if record.levelname == "WARNING"]
        assert len(warned) == (number >= WARN_AFTER - 1)


def test_a_share_of_zero_keeps_nothing() -> None:
    chooser = dynamic(nn.ModuleList([Feed(5)]), share=0.0)
    for _ in range(3):
        step(nn.ModuleList(chooser.blocks), 4)
        chooser.after_step(skipped=False)
    assert chooser.kept is not None and chooser.kept.limits == {} and chooser.blocks[0].limit.size == 0


def test_memory_left_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share the host, and each needs again what it had at its peak."""
    found = {"VmHWM": 900, "VmRSS": 300}
    host = replace(dynamic_checkpoint.read_host(), available=10_000, limit=None)
    monkeypatch.setattr(dynamic_checkpoint, "process_memory", found.__getitem__)
    monkeypatch.setattr(dynamic_checkpoint, "read_host", lambda: host)
    world = replace(single_world(), local_size=4)
    assert dynamic_checkpoint.memory_left(world) == 10_000 / 4 - 600
    found["VmHWM"] = 9_000
    assert dynamic_checkpoint.memory_left(world) == 0


def fitted(world: World, configs: list[Config], lefts: list[float | None]) -> list[Any]:
    """Losses, norms, weights and the choice of each configuration's run; `lefts`: memory that is said to be left."""
    found = []
    own = dynamic_checkpoint.memory_left
    for cfg, left in zip(configs, lefts, strict=True):
        # ranks differ, and the least counts
        dynamic_checkpoint.memory_left = own if left is None else lambda world, left=left: left * (1 + world.rank)
        state = begin(world, cfg)
        results: list[StepResult] = []
        fit(state, cfg, Calls(results.append))
        kept = state.dynamic.kept if state.dynamic is not None else None
        found.append(([r.loss for r in results], [r.grad_norm for r in results], held_masters(state), kept))
    dynamic_checkpoint.memory_left = own
    return found


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (1, ["precision=bf16", "model.train=[projector,language,vision]"]),
        (2, ["precision=bf16"]),
        (2, ["precision=fp32", "pack=false", "model.train=[projector,language,vision]"]),
    ],
)
def test_bits_are_those_of_none(
    size: int, overrides: list[str], parts: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """With all blocks kept, with one of two, and with none; every rank chooses the same blocks."""
    common = [*TRAINED, "max_steps=5", *overrides]
    none = make_config(parts, dataset, tmp_path, "activation_checkpointing=none", *common)
    every = make_config(parts, dataset, tmp_path, "activation_checkpointing=dynamic", *common)
    run: Any = [none, every, every, every], [None, 1e12, 1.5e6, 0.0]
    by_rank = [fitted(single_world(), *run)] if size == 1 else pools[size].run(fitted, *run, timeout=120)
    counts = {tuple(len(kept.limits) for *_, kept in others) for _, *others in by_rank}
    assert len(counts) == 1, "every rank chooses the same"
    ((most, some, least),) = counts
    assert most > some > least == 0
    for exact, *others in by_rank:
        for other in others:
            assert other[:2] == exact[:2]
            assert all(torch.equal(other[2][n], exact[2][n]) for n in exact[2])


def test_a_resumed_run_takes_the_recorded_choice(
    parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it ends before it could choose again; with another share of the memory it measures anew."""

    def recorded(steps: int) -> Any:
        return json.loads((tmp_path / f"checkpoints/step-{steps:06d}/state.json").read_text())["dynamic"]

    def run(steps: int, left: float, *overrides: str) -> Any:
        monkeypatch.setattr(dynamic_checkpoint, "memory_left", lambda world: left)
        common = ["activation_checkpointing=dynamic", "export.enabled=false", *TRAINED]
        train(make_config(parts, dataset, tmp_path, *common, f"max_steps={steps}", *overrides))
        return recorded(steps)

    first = run(3, 1e12)
    assert first["limits"]
    assert run(4, 0.0) == first
    assert run(7, 0.0, "activation_checkpointing.budget=0.5")["limits"] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_blocks_are_measured_too(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """What a compiled block keeps is the compiler's choice: less than all that autograd keeps of an uncompiled one."""
    common = ["precision=fp32", *TRAINED, "max_steps=5"]
    configs = [
        make_config(parts, dataset, tmp_path, f"activation_checkpointing={mode}", *common, f"compile={compiles}")
        for mode, compiles in (("none", "true"), ("dynamic", "true"), ("dynamic", "false"))
    ]
    found: list[list[Measured]] = []
    own = dynamic_checkpoint.choose

    def noted(blocks: Any, room: float) -> dict[int, Limit]:
        found.append(blocks)
        return own(blocks, room)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_checkpoint, "choose", noted)
        none, compiled, plain = fitted(single_world(), configs, [None, 1e12, 1e12])
    assert compiled[3].limits.keys() == plain[3].limits.keys() != set()
    assert compiled[0] == pytest.approx(none[0], rel=1e-5) and compiled[1] == pytest.approx(none[1], rel=1e-5)
    (of_compiled, *_), (of_plain, *_) = found
    assert of_compiled.num_elements == of_plain.num_elements and 0 < of_compiled.nbytes < of_plain.nbytes
