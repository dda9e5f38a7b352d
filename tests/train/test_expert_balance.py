"""A mixture of experts is trained with a load-balance loss: the same on any number of ranks, for any micro-batches, and
whatever activations are kept."""

import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import RankPool, single_world
from mixtures import mixture_parts
from reference import TOLERANCE, train_on
from small import Configure, make_config
from steps import begin, held_masters, run_steps
from tiers import slow_after

from llava_fsdp.config import Config
from llava_fsdp.data.batching.batch import StepFacts
from llava_fsdp.parallel.compile import choose_compiling
from llava_fsdp.train.events.reporting.metrics import metrics_row
from llava_fsdp.train.events.reporting.step_warnings import COLLAPSED_STEPS, ExpertWarnings
from llava_fsdp.train.state import ExpertLoad, StepResult

NUMBERS = ("loss", "grad_norm", "balance_loss", "expert_load_max", "experts_idle")
Mixture = Callable[..., Config]


@pytest.fixture
def mixture(parts: Path, dataset: Path, tmp_path: Path) -> Mixture:
    """Makes configurations of trainings of a mixture of experts, of three steps, into the named folder."""

    def configure(kind: str, to: str, *values: str) -> Config:
        folder = tmp_path / "parts" / kind
        if not folder.is_dir():
            mixture_parts(kind, parts, folder)
        common = ("global_batch_size=8", "max_steps=3", "optim.warmup_ratio=0", "model.balance_loss=0.5")
        return make_config(folder, dataset, tmp_path / to, *common, *values)

    return configure


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "strategy", "more"),
    slow_after(0, [("qwen3_moe", "zero3", ("pack=false", "activation_checkpointing=full")),
                   *itertools.product(("qwen3_moe", "mixtral"), ("zero0", "zero2", "zero3"),
                                      (("pack=true",), ("pack=false", "activation_checkpointing=selective")))]),
)  # fmt: skip
def test_ranks_and_micro_batches_do_not_matter(
    kind: str, strategy: str, more: tuple[str, ...], mixture: Mixture, pools: dict[int, RankPool]
) -> None:
    """One rank with one micro-batch, and two ranks with several, padded or packed: metrics and loads. Those of the
    second and third step show that the weights are the same, too."""
    one = train_on(1, mixture(kind, "one", "micro_batch_size=8", "pack=false"), pools)
    values = (f"sharding={strategy}", "micro_batch_size=2", "tokens_per_micro_batch=null", *more)
    two = train_on(2, mixture(kind, "two", *values), pools)
    for ours, theirs in zip(rows_of(two), rows_of(one), strict=True):
        assert [ours[key] for key in NUMBERS] == pytest.approx([theirs[key] for key in NUMBERS], rel=TOLERANCE)
    loads = [json.loads((folder / "expert_load.json").read_text()) for folder in (one, two)]
    assert loads[0] == loads[1] and loads[0]["step"] == 3
    tokens = rows_of(one)[-1]["tokens"]
    assert [sum(own) for own in loads[0]["loads"].values()] == [2 * tokens] * (2 if kind == "qwen3_moe" else 3)


@pytest.mark.parametrize(
    ("kind", "mode"),
    slow_after(2, [("qwen3_moe", "full"), ("mixtral", "selective"), ("qwen3_moe", "selective"),
                   ("qwen3_moe", "offload"), ("mixtral", "full"), ("mixtral", "offload")]),
)  # fmt: skip
def test_activation_checkpointing_changes_no_bit(kind: str, mode: str, mixture: Mixture) -> None:
    """Blocks run again in the backward pass, in which routers must not be counted again, and nothing be kept."""
    found = []
    for own in ("none", mode):
        cfg = mixture(kind, own, f"activation_checkpointing={own}")
        state = begin(single_world(), cfg)
        results = run_steps(state, cfg)
        assert state.routers is not None and state.expert_loads is not None
        assert all(hook.outputs is None for hook in state.routers.hooks)
        found.append(([(r.loss, r.grad_norm, r.expert_load) for r in results], held_masters(state), state.expert_loads))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][2], found[1][2])
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


def test_the_loss_balances_and_stays_out_of_the_reported_loss(mixture: Mixture) -> None:
    """Without its coefficient it is reported, too."""
    found = {}
    for coefficient in (0.0, 5.0):
        cfg = mixture("mixtral", f"{coefficient}", f"model.balance_loss={coefficient}")
        state = begin(single_world(), cfg)
        found[coefficient] = run_steps(state, cfg)
    plain, balanced = found[0.0], found[5.0]
    assert plain[0].loss == balanced[0].loss and plain[0].expert_load == balanced[0].expert_load
    assert plain[0].grad_norm != balanced[0].grad_norm
    last, other = plain[-1].expert_load, balanced[-1].expert_load
    assert last is not None and other is not None and other.balance_loss < last.balance_loss


def test_a_dense_model_has_no_numbers_of_experts(configure: Configure) -> None:
    state = begin(single_world(), configure("max_steps=1"))
    result = run_steps(state, configure("max_steps=1"))[0]
    assert state.routers is None and result.expert_load is None
    assert not {"balance_loss", "expert_load_max", "experts_idle"} & set(metrics_row(result))


def test_a_row_has_the_numbers_of_experts() -> None:
    load = ExpertLoad(1.5, 3.0, float("nan"))
    row = metrics_row(StepResult(StepFacts(0, tokens=5), 1.0, 1.0, 1.0, 1.0, expert_load=load))
    assert [row[key] for key in NUMBERS[2:]] == [1.5, 3.0, None]


def test_collapsed_experts_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    warnings = ExpertWarnings()
    steps = [0.6] * (COLLAPSED_STEPS - 1) + [0.5] + [0.6] * (COLLAPSED_STEPS + 9)
    with caplog.at_level(logging.WARNING):
        for step, idle in enumerate(steps):
            facts = StepFacts(step)
            result = StepResult(facts, 1.0, 1.0, 1.0, 1.0, expert_load=ExpertLoad(1.0, 1.0, idle))
            warnings.step({}, result)
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [2 * COLLAPSED_STEPS]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["none", "full", "offload", "budget"])
def test_compiled_blocks_have_the_same_loads(mode: str, mixture: Mixture) -> None:
    """In the two graphs that these blocks have without hooks, too."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = []
    for values in (("compile=false",), ("compile=auto" if mode == "budget" else "compile=true",)):
        checkpointing = f"activation_checkpointing={'full' if values[0] == 'compile=false' else mode}"
        cfg = mixture(
            "mixtral", values[0].replace("=", "-"), *values, checkpointing, "model.balance_loss=0", "pack=false"
        )
        state = begin(single_world(), cfg)
        found.append(([result.expert_load for result in run_steps(state, cfg)], state.expert_loads))
    assert state.compilations is not None and state.compilations.total == 2
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch.equal(found[0][1], found[1][1])
    for ours, theirs in zip(found[0][0], found[1][0], strict=True):
        assert vars(ours) == pytest.approx(vars(theirs), rel=TOLERANCE)


def test_routers_are_not_watched_where_that_would_break_a_graph(mixture: Mixture) -> None:
    values = ("compile=true", "activation_checkpointing=selective", "pack=false", "model.balance_loss=0")
    assert begin(single_world(), mixture("mixtral", "run", *values)).routers is None


def test_blocks_are_not_compiled_for_it(mixture: Mixture) -> None:
    compiling = choose_compiling(mixture("mixtral", "auto", "compile=auto"), torch.device("cuda"), None)
    assert not compiling.on and "model.balance_loss" in compiling.reason
