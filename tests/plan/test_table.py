"""How a plan is printed and drawn, from rows whose numbers are given."""

import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from small import command_config, config_of
from transformers import LlamaConfig, Qwen3Config

from llava_fsdp.config import (
    ActivationCheckpointing,
    ActivationCheckpointingConfig,
    Attention,
    OffloadMode,
    PlanConfig,
    Source,
    Strategy,
)
from llava_fsdp.model.parts import Parts
from llava_fsdp.plan import main
from llava_fsdp.plan.memory.activations import blocks_to_measure, with_depth
from llava_fsdp.plan.memory.micro_batches import MicroBatchSizes
from llava_fsdp.plan.model_shapes import kernel_for
from llava_fsdp.plan.planner import Choice, PlanRow
from llava_fsdp.plan.rank_counts import RankCounts
from llava_fsdp.plan.search.layouts import Planned
from llava_fsdp.plan.search.longest import MOST_TOKENS
from llava_fsdp.plan.show import longest_page, scaling_page, table
from llava_fsdp.plan.time import hardware
from llava_fsdp.plan.time.hardware import GPUS, Machine, machine_named
from llava_fsdp.plan.time.step_time import StepTime, Volume
from llava_fsdp.plan.workload import Samples
from llava_fsdp.runtime.errors import ConfigError, ModelError

SAMPLES = Samples(tokens=1000.0, tiles=1.5, labels=200.0, spread=10.0, source="", tile_tokens=400.0)
GB = 10**9

POINTS = [
    {"gpus": 1, "context": 1, "tokens": 0, "bytes": None},
    {"gpus": 2, "context": 1, "tokens": 5120, "bytes": 7},
    {"gpus": 2, "context": 2, "tokens": MOST_TOKENS, "bytes": 8},
]


def test_the_longest_samples_are_printed_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each number of GPUs; no point where nothing fits."""
    console = Console(record=True, width=120, file=(tmp_path / "out").open("w"))
    table.show_longest(console, POINTS, "a model")
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.export_text().splitlines()]
    assert [line for line in lines if line] == [["1", "none", ""], ["2", "5,120", "at least 1,048,576"]]
    drawn: list[Any] = []
    monkeypatch.setattr(longest_page, "write_chart", lambda *args: drawn.extend(args))
    longest_page.write_page(POINTS, "title", tmp_path / "page.html")
    path, page = drawn
    assert (path, page.title) == (tmp_path / "page.html", "title")
    assert page.names == ["gpus", "context", "tokens", "bytes"]
    assert page.rows == [[1, 1, 0, None], [2, 1, 5120, 7], [2, 2, MOST_TOKENS, 8]]
    points = {line.name: [(point.step, point.mean) for point in line.points] for line in page.chart.lines}
    assert points == {"1 rank per row": [(2, 5120.0)], "2 ranks per row": [(2, float(MOST_TOKENS))]}


def a_row(**change: Any) -> PlanRow:
    """A planned way to train in which no two numbers are alike."""
    names = "parameters", "gradients", "optimizer", "gathered", "reducing", "activations", "logits", "buffers"
    sizes = {name: (number + 1) * GB for number, name in enumerate(names)}
    mode = ActivationCheckpointingConfig(mode=ActivationCheckpointing.budget, budget=0.3)
    values: dict[str, Any] = {
        "choice": Choice(Strategy.SHARD_GRAD_OP, mode, OffloadMode.params), "world_size": 4, "shard_size": 4,
        "micro_batches": (MicroBatchSizes(1, 3000, 2, 1, 9, 4), MicroBatchSizes(1, 2000, 2, 1, 9, 4)),
        "bytes": {**sizes, "total": 36 * GB}, "peak_moment": "at rest", "at_rest": {"parameters": 1}, "host": 41 * GB,
        "disk": 0, "usable": 36 * GB, "step": StepTime(1.0, 0.5, 4.0, 2.0, 0.25), "sent": Volume(3e9, 2e9, context=1e9),
        "samples_per_second": 12.5, "tokens_per_second": 34_567.0, "mfu": 0.456,
    }  # fmt: skip
    return PlanRow(**(values | change))


def test_every_number_stands_in_its_column() -> None:
    """Gigabytes by what they are for; the largest micro-batch; a row that does not fit says so."""
    made = table.rows_table([a_row(), a_row(usable=36 * GB - 1)])
    columns = {str(column.header): list(column.cells) for column in made.columns}
    assert columns.pop("fits") == ["yes", "NO"]
    assert {name: cells[0] for name, cells in columns.items()} == {
        "sharding": "zero2", "activation_checkpointing": "budget", "offload": "params",
        "tokens x micro-batches": "3,000 x 2", "total GB": "36.0", "states": "14.0", "gathered": "4.0",
        "reducing": "5.0", "acts.": "6.0", "logits": "7.0", "s/step": "3.75", "tokens/s": "34,567", "MFU": "46%",
        "sent GB": "6.0",
    }  # fmt: skip
    assert table.ranks_of_a_row([a_row()]) == ""
    shared = a_row(micro_batches=(MicroBatchSizes(1, 3000, 2, 1, 9, 4, 2, 1),))
    assert table.ranks_of_a_row([shared]) == "; 2 ranks process a row together (parallel.context=2)"
    assert table.off_device(a_row()) == "; 41.0 GB of host memory a rank"
    assert table.off_device(a_row(host=0, disk=5 * GB)) == "; 5.0 GB of files a rank"
    words = "sharding=zero2 activation_checkpointing=budget activation_checkpointing.budget=0.3 offload=params"
    assert table.overrides_of(a_row().choice) == words
    none = ActivationCheckpointingConfig(mode=ActivationCheckpointing.none, budget=None)
    plain = Choice(Strategy.FULL_SHARD, none, OffloadMode.none)
    assert table.overrides_of(plain) == "sharding=zero3 activation_checkpointing=none"


def test_every_number_of_a_row_has_its_key() -> None:
    found = table.row_object(a_row())
    assert found.pop("bytes") == a_row().bytes and found.pop("at_rest") == {"parameters": 1}
    assert found == {
        "sharding": "zero2", "strategy": "SHARD_GRAD_OP", "activation_checkpointing": "budget", "budget": 0.3,
        "offload": "params", "tokens_per_micro_batch": 3000, "micro_batches": 2, "context": 1, "moment": "at rest",
        "host_bytes": 41 * GB, "disk_bytes": 0, "fits": True, "step_seconds": 3.75, "samples_per_second": 12.5,
        "tokens_per_second": 34_567.0, "mfu": 0.456, "communication_bytes": 6e9, "exposed_seconds": 2.0,
    }  # fmt: skip


def test_what_a_plan_says_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine, samples and the number of rows that are not shown; without a command, that nothing fits."""
    monkeypatch.setattr(table, "checkpoint_bytes", lambda *_: 9 * GB)
    cfg = SimpleNamespace(
        model=SimpleNamespace(name="tiny", checkpoint=None),
        stage=SimpleNamespace(name="pretrain"),
        global_batch_size=77,
        max_steps=None,
        epochs=2,
        precision=None,
        can_share_rows=True,
        parallel=SimpleNamespace(num_context=1),
    )
    machine = Machine(GPUS["h100"], "a gpu", 80 * GB, 0.0)
    planner: Any = SimpleNamespace(machine=machine, samples=SAMPLES, cfg=cfg, trainable=1234567, whole_weights=[])
    small, large = a_row(), a_row(usable=36 * GB - 1, world_size=4)

    def printed(command: str | None, shown: int) -> str:
        console = Console(record=True, width=300, file=(tmp_path / "out").open("w"))
        table.show_plan(console, planner, [small, large, a_row(host=1), a_row(usable=0)], shown, command)
        return console.export_text()

    text = printed("do this", 2)
    for part in (
        "tiny, stage=pretrain: 1,234,567 parameters train, on 4 x a gpu of 80.0 GB, 36.0 GB for tensors",
        "a checkpoint: 9.0 GB; samples: 1000 tokens, 600 of them image tokens, 1.50 image tiles, 200 label tokens",
        "a step: 77 samples", ": 36.0 GB, 12.5 samples/s, 3.75 s a step (predicted); 41.0 GB of host memory a rank",
        "  do this\n", "2 more, of which 1 fit but are slower: rows=4 shows all", "P = 1,234,567, N = 4",
    ):  # fmt: skip
        assert part in text
    cfg.model.checkpoint, planner.samples = "some/model", replace(SAMPLES, tiles=600.0, tile_tokens=1.0)
    text = printed("do this", 2)
    assert "some/model, stage=pretrain: " in text and "600 of them image tokens, 200 label tokens" in text
    planner.samples = replace(SAMPLES, count=77 * 10 - 1)
    assert "(predicted); about 1m15s for 20 steps; 41.0 GB" in printed("do this", 2)
    cfg.max_steps = 16
    assert "(predicted); about 1m00s for 16 steps; 41.0 GB" in printed("do this", 2)
    planner.machine = Machine(None, "6 CPU cores", 8 * GB, 0.0)
    assert " train, 4 ranks on 6 CPU cores, 8.0 GB for each rank, 36.0 GB" in printed("do this", 2)
    planner.machine = machine
    cfg.model.checkpoint, planner.samples = None, SAMPLES
    assert "more, of which" not in printed("do this", 4) and "Nothing fits" in printed(None, 4)
    whole = table.as_object(planner, [large, small], "do this", {"page": "p"})
    assert whole["recommended"] == table.row_object(small) | {"command": "do this"} and len(whole["rows"]) == 2
    assert (whole["capacity"], whole["usable"], whole["world_size"]) == (80 * GB, 36 * GB - 1, 4)
    assert (whole["trainable"], whole["checkpoint_bytes"], whole["page"]) == (1234567, 9 * GB, "p")
    assert whole["samples"] == {"tokens": 1000, "image_tokens": 600, "tiles": 1.5, "labels": 200, "source": ""}
    assert whole["formulas"]["ZeRO-3"]["bytes"] == 16 * 1234567 / 4
    assert table.as_object(planner, [large], None, {})["recommended"] is None


def test_speed_against_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A step's samples limit the ranks; hybrid sharding is within a node; the line of proportion starts at one node."""
    tried: list[tuple[RankCounts, str]] = []

    def rows(planner: Any, choices: list[Choice], ranks: RankCounts, splits: Any, watch: Any) -> list[PlanRow]:
        tried.append((ranks, choices[0].zero))
        return [a_row(tokens_per_second=1000.0 * ranks.world_size), a_row(usable=0)]

    monkeypatch.setattr(scaling_page, "plan_rows", rows)
    monkeypatch.setattr(scaling_page, "splits_to_try", lambda *_: [])
    cfg = config_of(["global_batch_size=16", "micro_batch_size=1"])
    machine = SimpleNamespace(device="cuda", name="gpu", gpu=None, has_compiler=True)
    planner: Any = SimpleNamespace(cfg=cfg, machine=machine, samples=Samples(9, 1, 2, 3, "guessed", 4))
    points = scaling_page.scale(planner, 8, 4, True)
    assert [(p["nodes"], p["sharding"]) for p in points] == [(1, "zero3"), (2, "zero3"), (2, "hybrid")]
    assert tried == [(RankCounts(8, 8, 8), "zero3"), (RankCounts(16, 8, 8), "zero3"), (RankCounts(16, 8, 8), "hybrid")]
    assert points[2] == {
        "nodes": 2, "sharding": "hybrid", "layout": "", "activation_checkpointing": "budget", "fits": True,
        "tokens_per_second": 16_000.0, "step_seconds": 3.75, "communication_seconds": 4.0, "exposed_seconds": 2.0,
    }  # fmt: skip

    drawn: list[Any] = []
    monkeypatch.setattr(scaling_page, "write_chart", lambda *args: drawn.extend(args))
    scaling_page.write_page([*points, points[1] | {"nodes": 4, "fits": False}], planner, tmp_path / "p.html")
    lines = {line.name: [(point.step, point.mean) for point in line.points] for line in drawn[1].chart.lines}
    assert lines == {
        "zero3": [(1, 8000.0), (2, 16_000.0)], "hybrid": [(2, 16_000.0)],
        "in proportion to the nodes": [(1, 8000.0), (2, 16_000.0), (4, 32_000.0)],
    }  # fmt: skip
    assert len(drawn[1].rows) == 3 and "fits" not in drawn[1].names
    assert drawn[1].title == "tiny, gpu, 16 samples a step"
    drawn.clear()
    scaling_page.write_page([points[1]], planner, tmp_path / "p.html")
    assert [(point.step, point.mean) for point in drawn[1].chart.lines[-1].points] == [(2, 16_000.0)]
    assert [scaling_page.shown(value) for value in (999.94, 1000.4, -2000.6, 7, None)] == [
        "999.9",
        1000,
        -2001,
        7,
        None,
    ]


def test_the_fastest_layout_against_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where no layout is possible there is no point, and zero3 needs a sample for each rank."""

    def search(ranks: int) -> Planned:
        if ranks == 16:
            raise ConfigError("no layout")
        cfg = config_of([f"parallel.tensor={ranks // 4}", "parallel.context=2"])
        planner: Any = SimpleNamespace(cfg=cfg)
        return Planned(planner, RankCounts(ranks, 8, 8), a_row(tokens_per_second=float(ranks)))

    def refused(*_: object) -> list[PlanRow]:
        raise ConfigError("no such sharding")

    monkeypatch.setattr(scaling_page, "plan_rows", lambda *_: [a_row(tokens_per_second=1.0)])
    monkeypatch.setattr(scaling_page, "splits_to_try", lambda *_: [])
    cfg = config_of(["global_batch_size=8", "micro_batch_size=1"])
    machine = machine_named("h100", 8)
    planner: Any = SimpleNamespace(cfg=cfg, machine=machine, samples=Samples(9, 1, 2, 3, "guessed", 4))
    points = scaling_page.scale(planner, 8, 4, True, search)
    found = [(p["nodes"], p["sharding"], p["layout"], p["tokens_per_second"]) for p in points]
    zero = a_row().choice.zero
    assert found == [
        (1, "zero3", "", 1.0), (1, scaling_page.SEARCHED, f"{zero}, context 2, tensor 2", 8.0),
        (4, scaling_page.SEARCHED, f"{zero}, context 2, tensor 8", 32.0),
    ]  # fmt: skip
    monkeypatch.setattr(scaling_page, "plan_rows", refused)
    assert scaling_page.scale(planner, 8, 2, True) == []
    page = scaling_page.write_page(points, planner, tmp_path / "p.html").read_text()
    assert all(line in page for line in ("Assumptions", "450 GB/s", "context 2, tensor 8"))


def test_the_command_has_what_was_typed_and_what_was_planned() -> None:
    """Each key once; keys of the plan itself are left out; what a way to train needs beside its name is kept."""
    base = command_config(PlanConfig, "plan", "gpus=3", "data.source=llava_json", "data.path=x", "data.max_length=256")
    none = ActivationCheckpointingConfig(mode=ActivationCheckpointing.none, budget=None)
    plain = Choice(Strategy.FULL_SHARD, none, OffloadMode.none)
    hybrid = Choice(Strategy.HYBRID_SHARD, none, OffloadMode.nvme)

    def command(typed: str, choice: Choice = plain, micro: tuple[int, int] = (1, 1), **change: Any) -> list[str]:
        rows, context = micro
        cfg = replace(base, **change)
        row = a_row(choice=choice, micro_batches=(MicroBatchSizes(rows, 3000, 2, 1, 9, 4, context),))
        start, *words = main.command(cfg, row, replace(cfg.parallel, context=context), shlex.split(typed)).split(
            " stage=", 1
        )
        assert start.startswith("llava-fsdp train --nproc-per-node 3")
        return [start.removeprefix("llava-fsdp train --nproc-per-node 3").strip(), *shlex.split("".join(words))]

    ways, tokens = ["sharding=zero3", "activation_checkpointing=none"], "tokens_per_micro_batch=3000"
    typed = "gpus=3 gpu=t4 rows=5 'data.path=a b' dry_run=4 ++sharding.prefetch=2 tokens_per_micro_batch=4096"
    assert command(typed) == ["", "finetune", "data.path=a b", *ways, tokens]
    nodes = "--nnodes 2 --rdzv-endpoint HOST:29500"
    assert command("stage=pretrain micro_batch_size=8", nodes=2) == [
        nodes, "pretrain", "micro_batch_size=8", *ways, tokens,
    ]  # fmt: skip
    padded = command("stage=pretrain micro_batch_size=8", micro=(4, 1), pack=False)
    assert padded == ["", "pretrain", *ways, "micro_batch_size=4"], "it replaces the number that was typed"
    own = {
        "sharding": replace(base.sharding, strategy=Strategy.HYBRID_SHARD, shard_size=1),
        "offload": replace(base.offload, mode=OffloadMode.nvme, folder="/x y"),
    }
    assert command("", hybrid, **own) == [
        "", "finetune", "sharding=hybrid", "activation_checkpointing=none", "offload=nvme", "sharding.shard_size=1",
        "offload.folder=/x y", tokens,
    ]  # fmt: skip
    assert command("", **own) == ["", "finetune", *ways, tokens]
    params = Choice(Strategy.FULL_SHARD, none, OffloadMode.params)
    assert command("", params, **own) == ["", "finetune", *ways, "offload=params", tokens], "it has no files"
    shares = replace(base.parallel, context="auto")
    assert command("parallel.context=auto parallel.context_how=gather", micro=(1, 2), parallel=shares) == [
        "", "finetune", "parallel.context_how=gather", *ways, "parallel.context=2", tokens,
    ]  # fmt: skip
    toy = replace(base, data=replace(base.data, source=Source.shapes), model=replace(base.model, name="own"))
    assert main.command(toy, a_row(choice=plain), toy.parallel, []).endswith(
        " data=llava_json data.path=FILE.json data.images=DIR"
    )


def test_a_model_that_cannot_be_planned_is_an_error_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise TypeError("no such\nargument")

    monkeypatch.setattr(main, "print_plan", fails)
    own: Any = None
    with pytest.raises(ModelError, match=r"cannot compute this model \(TypeError: no such argument\)"):
        main.plan(own)


def test_the_kernel_and_the_machine_that_are_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded rows need none; a GPU that this machine lacks is an A100; ranks share a CPU machine's cores and memory."""
    cfg = config_of(["precision=bf16", "data.max_length=256", "micro_batch_size=1", "compile=false"])
    language = LlamaConfig(num_attention_heads=2, hidden_size=64)
    assert kernel_for(replace(cfg, pack=False), language, "cuda", True) is None
    sdpa = kernel_for(replace(cfg, attention=Attention.sdpa), language, "cuda", True)
    assert sdpa is not None and (sdpa.attention, sdpa.reason) == (Attention.sdpa, "attention=sdpa")
    kinds = [kernel_for(cfg, language, "cuda", bf16) for bf16 in (True, False)]
    assert [kind and kind.attention for kind in kinds] == [Attention.varlen, Attention.sdpa]
    monkeypatch.setattr(hardware.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(hardware, "read_host", lambda: SimpleNamespace(usable_cores=6, usable_memory=12 * GB))
    assert hardware.machine_for("cuda", 3).name == "a100-80gb"
    cores = hardware.machine_for("cpu", 3)
    assert (cores.gpu, cores.name, cores.memory, cores.flops) == (None, "6 CPU cores", 4 * GB, 60e9)


def test_a_shorter_model_stands_for_one_of_equal_blocks() -> None:
    """Its list of layers is cut too; few blocks, and kinds of blocks that do not repeat, stay as they are."""

    def parts(depth: int, kinds: list[str] | None) -> Any:
        language = Qwen3Config(num_hidden_layers=depth, layer_types=kinds)
        return Parts(Path(), Path(), language, language, None)

    deep = parts(5, ["full_attention"] * 5)
    assert blocks_to_measure(deep.language, 1) == (3, 1)
    short = with_depth(deep, 3)
    assert (short.language.num_hidden_layers, len(short.language.layer_types), deep.language.num_hidden_layers) == (
        3,
        3,
        5,
    )
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    assert blocks_to_measure(parts(11, [*kinds * 3, *kinds[:2]]).language, 1) == (5, 3)
    assert blocks_to_measure(parts(12, kinds * 4).language, 1) == (6, 3)
    for few in (parts(3, None), parts(4, ["full_attention", *["sliding_attention"] * 3])):
        count, _ = blocks_to_measure(few.language, 1)
        assert with_depth(few, count) is few
