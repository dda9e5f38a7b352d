"""Compiled blocks give the numbers of uncompiled ones, and are compiled once."""

import contextlib
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import CPU, RankPool, single_world
from loaders import agreed_steps
from small import Configure
from steps import begin
from torch import nn
from transformers import AutoConfig, AutoModel

from llava_fsdp.config import ActivationCheckpointing, ActivationCheckpointingConfig, Attention, Config
from llava_fsdp.data.batching.batch import Segments, StepFacts
from llava_fsdp.data.batching.collate import boundaries
from llava_fsdp.model.blocks import find_blocks
from llava_fsdp.model.packed_attention.attention import Kernel
from llava_fsdp.model.packed_attention.row_mask import attention_arguments, register_attention
from llava_fsdp.parallel import compile
from llava_fsdp.parallel.compile import WARM_UP, Compilations, Compiling, choose_compiling
from llava_fsdp.parallel.local_shards import local
from llava_fsdp.parallel.memory.activation_checkpoint import apply_activation_checkpointing
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import CompileError, ConfigError
from llava_fsdp.train.events.reporting.step_warnings import CompileWarnings
from llava_fsdp.train.loop import train_step
from llava_fsdp.train.state import StepResult

EPOCHS = ["global_batch_size=43", "micro_batch_size=3", "max_steps=4", "epochs=2", "sharding=zero3"]
"""Two epochs of 44 samples: the last step of each has one, so that one of two ranks has none, and runs a position."""
Trace = tuple[list[float], list[float], dict[str, torch.Tensor], list[int], set[tuple[int, ...]]]


def trace(world: World, cfg: Config) -> Trace:
    """Losses, norms, weights, graphs compiled after each step, and shapes of rows."""
    torch._inductor.config.compile_threads = 1  # a pool of a process that was forked from waits for nobody here
    torch._dynamo.reset()
    state = begin(world, cfg)
    results, graphs, shapes = [], [], set()
    for step in agreed_steps(state.loader):
        shapes |= {tuple(micro.input_ids.shape) for micro in step.micro_batches}
        results.append(train_step(state, step, cfg, 0.0))
        graphs.append(state.compilations.total if state.compilations is not None else 0)
    weights = {name: local(p).clone() for name, p in state.masters.named.items()}
    return [r.loss for r in results], [r.grad_norm for r in results], weights, graphs, shapes


CASES = {
    "one rank, padded": (1, ["pack=false"]),
    "two ranks, packed": (2, ["pack=true", "tokens_per_micro_batch=512"]),
    "one rank, packed, full": (1, ["pack=true", "activation_checkpointing=full"]),
    "two ranks, padded, selective": (2, ["pack=false", "activation_checkpointing=selective"]),
    "two ranks, packed, offload": (2, ["pack=true", "activation_checkpointing=offload"]),
}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("size", "overrides"), CASES.values(), ids=CASES)
def test_an_epoch_of_mixed_lengths_compiles_nothing_anew(
    size: int, overrides: list[str], configure: Configure, pools: dict[int, RankPool]
) -> None:
    """Rows of all lengths, one row, one position, steps without pictures: all by what the first step has compiled."""
    found = []
    for on in ("false", "true"):
        cfg = configure(*EPOCHS, *overrides, f"compile={on}")
        run = [trace(single_world(), cfg)] if size == 1 else pools[size].run(trace, cfg, timeout=1100)
        found.append(run)
    for plain, other in zip(*found, strict=True):
        assert len({length for _, length in other[4]}) > 5
        assert plain[3] == [0] * 4
        assert other[3][0] > 0 and other[3] == [other[3][0]] * 4
        assert other[0] == pytest.approx(plain[0], rel=1e-5)
        assert other[1] == pytest.approx(plain[1], rel=1e-4)
        for name, weight in plain[2].items():
            torch.testing.assert_close(other[2][name], weight, rtol=1e-3, atol=1e-4)
    shapes = set().union(*(run[4] for run in found[1]))
    assert size == 1 or (1, 1) in shapes


def layers(number: int) -> nn.ModuleList:
    register_attention()
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=8, use_cache=False, num_hidden_layers=number, **shape)
    return AutoModel.from_config(config, attn_implementation=Kernel(Attention.varlen, "").name)


def test_one_graph_serves_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any number of samples; the first of them fills its row alone, so that two lengths are alike."""
    graphs = []

    def compile_fx(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append({str(node.target) for node in graph.graph.nodes})
        # the kernel itself needs CUDA
        return lambda *given: (next(g for g in given if torch.is_tensor(g) and g.ndim == 3 and g.shape[-1] == 32) * 1,)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    torch._dynamo.reset()
    model, count = layers(3), Compilations()
    compile.compile_blocks(find_blocks(model), count=count, one_row=True)
    for lengths in ((7,), (3, 4), (2, 5, 6), (1, 1, 1, 9), (8, 2), (31,)):
        held = boundaries(lengths)
        segments = Segments(**held)
        flat = torch.randn(sum(lengths), 32, requires_grad=True).clone()
        embeds = flat.view(1, sum(lengths), 32)
        model(inputs_embeds=embeds, **attention_arguments(embeds, segments, model.config._attn_implementation))
    assert len(graphs) == count.total == 1 and any("varlen_attn" in target for target in graphs[0])


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "products"),
    [("selective", 14), *(pytest.param(mode, 14, marks=pytest.mark.slow) for mode in ("none", "full"))],
)
def test_products_that_selective_keeps_do_not_run_again(
    mode: str, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven in the forward pass of a block, fourteen behind it; a block that runs again does so by the first graph."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    counted: dict[str, list[int]] = {"forward": [], "backward": []}

    def counting(name: str) -> Any:
        def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            counted[name].append(sum(node.target in PRODUCTS for node in graph.graph.nodes))
            return graph.forward

        return count

    def compile_fx(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        return aot_autograd(
            fw_compiler=counting("forward"),
            bw_compiler=counting("backward"),
            partition_fn=min_cut_rematerialization_partition,
        )(graph, inputs)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    torch._dynamo.reset()
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = AutoConfig.for_model("llama", vocab_size=8, use_cache=False, **shape)
    model = AutoModel.from_config(config)
    apply_activation_checkpointing(
        [find_blocks(model)],
        ActivationCheckpointingConfig(mode=ActivationCheckpointing(mode), budget=None),
        CPU,
        Compilations(),
    )
    found = model(inputs_embeds=torch.randn(2, 9, 32, requires_grad=True)).last_hidden_state
    found.sum().backward()
    assert counted["forward"] == [7] and counted["backward"] == [products]


@pytest.mark.parametrize(
    ("overrides", "device", "attention", "on", "reason"),
    [
        ([], "cpu", None, False, "on cpu compiling takes longer"),
        (["compile=true"], "cpu", None, True, "as configured"),
        (["compile=true", "activation_checkpointing=selective"], "cpu", None, True, "as configured"),
        (["compile=false"], "cuda", None, False, "compile=false"),
        ([], "cuda", Attention.varlen, True, "Triton"),
        (["deterministic=true"], "cuda", Attention.varlen, False, "deterministic=true"),
        (["activation_checkpointing=selective"], "cuda", Attention.sdpa, False, "in one piece"),
        (["activation_checkpointing=budget"], "cpu", Attention.sdpa, True, "activation_checkpointing=budget"),
        ([], "cuda", Attention.sdpa, True, "Triton"),
        (["activation_checkpointing=selective"], "cuda", Attention.varlen, True, "Triton"),
        (["model.balance_loss=0.1"], "cuda", Attention.varlen, False, "model.balance_loss"),
        (["parallel.tensor=2"], "cuda", Attention.varlen, False, "parallel.tensor"),
        (["parallel.expert=2"], "cuda", Attention.varlen, False, "parallel.expert"),
        (["parallel.pipeline=2"], "cuda", Attention.varlen, False, "parallel.pipeline"),
        (["compile=true", "deterministic=true"], "cuda", Attention.varlen, True, "as configured"),
    ],
)
def test_what_is_compiled_and_why(
    overrides: list[str],
    device: str,
    attention: Attention | None,
    on: bool,
    reason: str,
    configure: Configure,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device == "cuda":
        monkeypatch.setattr(compile, "compiler_missing", lambda device: None)
    cfg = configure("compile=auto", *overrides)
    found = choose_compiling(cfg, torch.device(device), attention)
    assert isinstance(found, Compiling) and found.on is on and reason in found.reason


@pytest.mark.parametrize(
    ("setting", "attention", "message"),
    [
        ("compile=true", None, r"compile=true compiles blocks .* no C.. compiler.*set compile=auto"),
        ("activation_checkpointing=budget", None, "budget compiles .* no C.. compiler.*=selective"),
        ("activation_checkpointing=selective", Attention.sdpa, "selective needs a block in one piece"),
    ],
)
def test_compiling_is_refused_without_a_compiler_and_where_attention_cuts_blocks_in_two(
    setting: str, attention: Attention | None, message: str, configure: Configure
) -> None:
    cfg = configure(f"compile={'auto' if 'budget' in setting else 'true'}", setting, "pack=true")
    without = torch._inductor.config.patch({} if attention else {"cpp.cxx": ("no-such-compiler",)})
    with without, pytest.raises(ConfigError, match=message):
        choose_compiling(cfg, CPU, attention)


@pytest.mark.parametrize(
    ("free", "flag", "key"), [(31, 0, "31 MiB left of 32 MiB"), (200, os.ST_NOEXEC, "noexec"), (32, 0, None)]
)
def test_a_cache_without_room_or_programs_is_refused(
    free: int, flag: int, key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(f_bavail=free * 256, f_frsize=4096, f_flag=flag)
    monkeypatch.setattr(compile, "os", SimpleNamespace(statvfs=lambda _: disk, ST_NOEXEC=os.ST_NOEXEC))
    with contextlib.nullcontext() if key is None else pytest.raises(CompileError, match=f"{key}.*{compile.CACHE_KEY}"):
        compile.check_cache()


def test_a_cache_that_is_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configure: Configure
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(compile.CACHE_KEY, str(tmp_path / "file"))
    with pytest.raises(CompileError, match=r"file.*set compile=false"):
        choose_compiling(configure("compile=true"), CPU, None)


@pytest.mark.parametrize(
    ("shape", "one_row", "gradients", "compiles"),
    [
        ((3, 7, 4), False, True, True), ((1, 7, 4), False, True, False), ((1, 7, 4), True, True, True),
        ((3, 1, 4), False, True, False), ((1, 1, 4), True, True, False), ((3, 7, 4), True, True, False),
        ((3, 7, 4), False, False, False), ((7, 4), True, True, True),
    ],
)  # fmt: skip
def test_rare_shapes_run_uncompiled(shape: tuple[int, ...], one_row: bool, gradients: bool, compiles: bool) -> None:
    """A size of 1 would be compiled for anew; without gradients validation would use up what may be compiled. A view
    is made none."""
    seen: list[torch.Tensor] = []

    def forward(kind: str, hidden: torch.Tensor, *rest: Any, **named: Any) -> str:
        seen.append(hidden)
        assert (rest, named) == ((5,), {"key": 6})
        return kind

    def compiled(block: nn.Module, *given: Any, **named: Any) -> str:
        assert isinstance(block, nn.Identity)
        return forward("compiled", *given, **named)

    hidden = torch.zeros(shape).view(shape)
    with torch.set_grad_enabled(gradients):
        found = compile.run_block(
            nn.Identity(),
            partial(forward, "plain"),
            compiled,
            contextlib.nullcontext(),
            one_row,
            hidden,
            5,
            key=6,
        )
    assert found == ("compiled" if compiles else "plain")
    assert seen[0].shape == shape and seen[0]._is_view() is not compiles


def test_late_compilations_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings = []

    class Log:
        def warning(self, *told: object) -> None:
            warnings.append(told)

    monkeypatch.setattr("llava_fsdp.train.events.reporting.step_warnings.log", Log)
    observer = CompileWarnings()
    for step, recompiles in enumerate([0] * (WARM_UP + 1) + [2, 2]):
        facts = StepFacts.__new__(StepFacts)
        object.__setattr__(facts, "step", step)
        observer.after_step(StepResult(facts, 1.0, 1.0, 1.0, 1.0, recompiles=recompiles))
    ((text, *values),) = warnings
    assert (text % tuple(values)).startswith(f"step {WARM_UP + 2}: 2 graphs were compiled again")
