"""The command: what it prints, for people and for programs, and that what it recommends is a training."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small import command_config, config_of, make_config
from tiers import slow_after

from llava_fsdp.config import (
    ActivationCheckpointing,
    ActivationCheckpointingConfig,
    Config,
    OffloadMode,
    PlanConfig,
    SamplerName,
    Strategy,
    config_dir,
)
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.parallel.memory.memory import bytes_per_rank
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.parallel.sharding_strategies import SHARD_PLANS
from llava_fsdp.plan.main import plan, warn_of_length
from llava_fsdp.plan.memory.micro_batches import MicroBatchSizes
from llava_fsdp.plan.model_shapes import shapes_of
from llava_fsdp.plan.planner import Choice, Planner
from llava_fsdp.plan.rank_counts import RankCounts
from llava_fsdp.plan.search import auto
from llava_fsdp.plan.search.auto import decide
from llava_fsdp.plan.time.hardware import GPUS, MIB, PROCESS_BYTES, Machine, machine_named, this_machine
from llava_fsdp.plan.time.heaviest_rank import heaviest_over_mean
from llava_fsdp.plan.time.step_time import sample_flops
from llava_fsdp.plan.workload import Samples, configured_split
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.train.launch.launcher import split


def plan_of(*overrides: str) -> PlanConfig:
    return command_config(PlanConfig, "plan", *overrides)


def printed(capsys: pytest.CaptureFixture[str], *overrides: str) -> dict:
    plan(plan_of(*overrides, "format=json"), overrides)
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_13b_on_8_a100(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "model=llava_v1_5_13b", "stage=finetune", "gpus=8", "gpu=a100-80gb")
    rows = found["rows"]
    assert {row["strategy"] for row in rows} == {s.value for s in SHARD_PLANS} - {"HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"}
    assert {row["activation_checkpointing"] for row in rows} == {"none", "selective", "full", "budget", "offload"}
    assert {row["offload"] for row in rows} == {"none", "optimizer", "params", "nvme"}
    for row in rows:
        assert row["fits"] == (row["bytes"]["total"] <= found["usable"])
        assert row["bytes"]["total"] == sum(size for name, size in row["bytes"].items() if name != "total")
        assert row["step_seconds"] > 0 and 0 < row["mfu"] < 0.6
    by = {(r["sharding"], r["activation_checkpointing"], r["offload"]): r for r in rows}
    assert found["trainable"] == 13_047_331_840
    assert not by["zero0", "full", "none"]["fits"], "208.8 GB of states"
    assert sum(by["zero3", "full", "none"]["at_rest"].values()) == pytest.approx(26.1e9 + 0.6e9, rel=0.01)
    assert by["zero3", "full", "params"]["bytes"]["parameters"] < 1e9
    best = found["recommended"]
    assert best["fits"] and best["step_seconds"] == min(row["step_seconds"] for row in rows if row["fits"])
    assert best["command"].startswith("llava-fsdp train --nproc-per-node 8 ")


def of_parts(wide_parts: Path) -> list[str]:
    """A model that takes no time."""
    return [f"model.language={wide_parts / 'language'}", f"model.vision={wide_parts / 'vision'}", "data.max_length=256"]


RECOMMENDED = [
    ["pack=false"],
    ["sharding=hybrid", "sharding.shard_size=2"],
    ["offload=nvme", "offload.folder=/somewhere"],
    ["offload.mode=params", "activation_checkpointing.mode=none", "dry_run=4"],
    ["sampler=llava_v1_5", "micro_batch_size=8"],
    pytest.param(["compat=llava_v1_5"], marks=pytest.mark.slow),
    pytest.param(["stage=pretrain", "precision=bf16_pure"], marks=pytest.mark.slow),
]


@pytest.mark.parametrize("more", slow_after(1, RECOMMENDED), ids=lambda more: more[0])
@pytest.mark.slow
def test_recommended_command_is_a_training(
    more: list[str], wide_parts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It sets each key once, and has what the row has, whatever was typed."""
    gpu = "gpu=4090" if more[0] in ("pack=false", "stage=pretrain") else "gpu=v100"
    best = printed(capsys, "gpus=4", gpu, "global_batch_size=64", *of_parts(wide_parts), *more)["recommended"]
    words = shlex.split(best["command"])
    cfg = config_of(split(words[2:])[1])
    assert sum(w.startswith("stage=") for w in words) == 1
    assert cfg.dry_run is None and len({w.partition("=")[0] for w in words if "=" in w}) == sum("=" in w for w in words)
    assert cfg.sharding.strategy.value == best["strategy"] and cfg.offload.mode.value == best["offload"]
    assert cfg.activation_checkpointing.mode.value == best["activation_checkpointing"] and cfg.global_batch_size == 64
    if not cfg.packs:
        assert cfg.micro_batch_size * cfg.data.max_length == best["tokens_per_micro_batch"]
    elif cfg.sampler.name is SamplerName.shuffle:
        assert cfg.row_tokens == best["tokens_per_micro_batch"]


@pytest.mark.slow
def test_rows_of_the_originals_order_are_those_of_its_micro_batches(
    wide_parts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["gpus=4", "gpu=4090", "global_batch_size=64", *of_parts(wide_parts), "sampler=llava_v1_5"]
    assert {r["micro_batches"] for r in printed(capsys, *keys, "micro_batch_size=4")["rows"]} == {4}
    with pytest.raises(ConfigError, match="global_batch_size=64 is not a multiple of 6 ranks"):
        plan(plan_of(*keys, "gpus=6", "pack=false", "micro_batch_size=4"))


@pytest.mark.slow
def test_host_memory_is_said(wide_parts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = printed(capsys, "gpus=2", "gpu=4090", *of_parts(wide_parts))["rows"]
    by = {(r["sharding"], r["activation_checkpointing"], r["offload"]): r for r in rows}
    assert by["zero3", "full", "none"]["host_bytes"] == 0 == by["zero3", "full", "params"]["disk_bytes"]
    cfg = plan_of("gpus=2", *of_parts(wide_parts))
    width, depth = shapes_of(cfg.model).language.hidden_size, shapes_of(cfg.model).language.num_hidden_layers
    inputs = 2 * width * depth * by["zero3", "offload", "none"]["tokens_per_micro_batch"]
    assert by["zero3", "offload", "none"]["host_bytes"] == pytest.approx(inputs, rel=0.02)


@pytest.mark.parametrize("strategy", [Strategy.SHARD_GRAD_OP, Strategy.FULL_SHARD])
@pytest.mark.parametrize("gpu", ["a100-80gb", None])
def test_a_state_is_on_the_device_or_off_it(
    gpu: str | None, strategy: Strategy, wide_parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """And not in both: offloaded is all but the frozen weights that every rank holds whole."""
    cfg = make_config(wide_parts, dataset, tmp_path, "precision=bf16", "model.train=[projector]")
    machine = Machine(None, "test", 1 << 40, 1e9) if gpu is None else machine_named(gpu, 4)
    planner, shards = Planner(cfg, machine, SAMPLES, find_parts(cfg.model)), SHARD_PLANS[strategy]
    sharded = [w for w in planner.weights if w.trainable or (shards.shards_frozen and not w.whole)]
    assert any(not w.trainable for w in sharded) == shards.shards_frozen and len(sharded) < len(planner.weights)
    for mode in OffloadMode:
        args = strategy, cfg.precision, 4, 4, 0, mode, True
        stored, away = bytes_per_rank(planner.weights, *args), bytes_per_rank(sharded, *args)
        off = stored.optimizer
        if mode is not OffloadMode.optimizer:
            off = 0 if mode is OffloadMode.none else away.parameters + away.gradients + away.optimizer
        off *= mode is OffloadMode.nvme or gpu is not None
        assert planner.off_device(mode, shards, stored) == ((0, off) if mode is OffloadMode.nvme else (off, 0))
        states = planner.on_device(mode, shards, stored, 0)
        on = states.parameters + states.gradients + states.optimizer
        assert on + off == stored.parameters + stored.gradients + stored.optimizer, mode
        streams = mode is OffloadMode.optimizer and gpu is not None
        assert states.updating == (min(256 * MIB, 2 * stored.optimizer) if streams else 0)
        assert planner.on_device(mode, shards, replace(stored, optimizer=1 << 30), 0).updating == 256 * MIB * streams


def test_how_fast_a_row_is(wide_parts: Path, dataset: Path, tmp_path: Path) -> None:
    """And the bytes of its inputs, on a GPU and on a CPU."""
    cfg = make_config(wide_parts, dataset, tmp_path, "precision=bf16", "global_batch_size=12")
    planner = Planner(cfg, machine_named("a100-80gb", 2), SAMPLES, find_parts(cfg.model))
    micros = [MicroBatchSizes(1, 40, 2, 3, 9, 7), MicroBatchSizes(1, 30, 1, 1, 5, 4)]
    flops, again = (sample_flops(own, SAMPLES) for own in (planner.flops, planner.recomputing_flops))
    rows = {}
    for mode, computed in ((ActivationCheckpointing.none, flops), (ActivationCheckpointing.full, again)):
        choice = Choice(Strategy.FULL_SHARD, ActivationCheckpointingConfig(mode=mode, budget=None), OffloadMode.none)
        rows[mode] = row = planner.row(choice, RankCounts(2, 2, 2), micros)
        heaviest = heaviest_over_mean(cfg, SAMPLES, planner.flops, 2)
        assert row.step.compute == pytest.approx(12 / 2 * computed * heaviest / (312e12 * 0.6))
        assert row.step.update == pytest.approx(28 * planner.trainable / 2 / (0.8 * 2039e9))
        assert row.samples_per_second == pytest.approx(12 / row.step.seconds)
        assert row.tokens_per_second == pytest.approx(12 * SAMPLES.tokens / row.step.seconds)
        assert row.mfu == pytest.approx(12 * flops / row.step.seconds / (2 * 312e12))
    assert (
        again > flops
        and rows[ActivationCheckpointing.full].bytes["total"] < rows[ActivationCheckpointing.none].bytes["total"]
    )
    pixels = [3 * 3 * planner.parts.image_size**2, 3 * planner.parts.image_size**2]
    numbers = [2 * m.tokens + 2 * m.image_tokens + 2 * m.labels for m in micros]
    on_gpu = tuple(4 * p + 8 * n for p, n in zip(pixels, numbers, strict=True))
    assert planner.input_bytes([*micros, micros[1]]) == (0, on_gpu)
    planner.machine = Machine(None, "test", 1 << 40, 1e9)
    assert planner.input_bytes(micros) == (sum(pixels) + 8 * sum(numbers), tuple(4 * p for p in pixels))


@pytest.mark.slow
def test_for_people(wide_parts: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """What the planner chooses itself is not taken from the command line, and this is said."""
    words = ["gpus=2", "gpu=a10g", "rows=3", *of_parts(wide_parts)]
    caplog.set_level("INFO", "llava_fsdp")
    plan(plan_of(*words, "activation_checkpointing=dynamic"), [*words, "activation_checkpointing=dynamic"])
    assert ("activation_checkpointing",) in [record.args for record in caplog.records]
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].startswith("Use sharding=") and "llava-fsdp train --nproc-per-node 2" in lines[5]
    assert any("more, of which" in line for line in lines) and any("2P + 14P/N" in line for line in lines)


def test_lengths_that_training_refuses_are_told(wide_parts: Path, caplog: pytest.LogCaptureFixture) -> None:
    positions = json.loads((wide_parts / "language" / "config.json").read_text())["max_position_embeddings"]
    for more in (0, 1):
        caplog.clear()
        cfg = plan_of(*of_parts(wide_parts), f"data.max_length={positions + more}")
        warn_of_length(cfg, shapes_of(cfg.model))
        assert len(caplog.records) == more and all(f"={positions + 1}" in told.getMessage() for told in caplog.records)


@pytest.mark.slow
def test_without_bf16_the_plan_is_of_fp16(wide_parts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "gpus=8", "gpu=v100", "stage=pretrain", *of_parts(wide_parts))
    assert "precision=fp16" in found["recommended"]["command"]


@pytest.mark.slow
def test_what_fits_nowhere_is_not_recommended(wide_parts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = ["gpus=1", "gpu=t4", *of_parts(wide_parts), "pack=false", "data.max_length=40000000"]
    assert printed(capsys, *cfg)["recommended"] is None
    plan(plan_of(*cfg))
    assert "Nothing fits" in capsys.readouterr().out


@pytest.mark.slow
def test_several_nodes(wide_parts: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "scaling.html"
    more = ["global_batch_size=64", *of_parts(wide_parts), f"page={page}"]
    found = printed(capsys, "gpus=8", "nodes=4", "gpu=a100-80gb", *more)
    assert {row["sharding"] for row in found["rows"]} >= {"hybrid", "hybrid2"}
    assert page.read_text().count("<path class='line") == 3 and found["page"] == str(page)
    by = {(p["nodes"], p["sharding"]): p for p in found["scaling"]}
    assert set(by) == {(1, "zero3"), (2, "zero3"), (2, "hybrid"), (4, "zero3"), (4, "hybrid")}
    assert by[4, "hybrid"]["communication_seconds"] < by[4, "zero3"]["communication_seconds"]
    assert " --nnodes 4 " in found["recommended"]["command"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("gpu=a1000", "gpu=a1000 is not in the table; choose auto or one of a100-40gb"),
        (
            "model.language=some/model",
            "model.language=some/model is not a folder, and a plan reads nothing from the net",
        ),
        ("gpus=0", "gpus=0 must be at least 1"),
        ("gpu=a100-80gb precision=fp8", "a100-80gb has no fp8; choose precision=bf16"),
        ("gpu=v100 precision=bf16_pure", "v100 has no bf16; choose precision=fp16"),
        ("gpu=v100 attention=varlen", "attention=varlen: varlen_attn needs a GPU of compute capability 8.0"),
        ("gpu=h100 attention=flash precision=fp32", "attention=flash: flash-attn computes in 16 bits"),
    ],
)
def test_mistakes(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(plan_of(*override.split()), override.split())


@pytest.mark.slow
def test_flash_attn_is_planned_where_it_is_not_installed(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [printed(capsys, "gpu=h100", "data.max_length=256", f"attention={a}")["rows"] for a in ("flash", "auto")]
    assert rows[0] == rows[1]


@pytest.mark.slow
def test_more_ranks_than_samples(wide_parts: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    keys = ["gpus=64", "nodes=2", "gpu=h100", *of_parts(wide_parts), "global_batch_size=8"]
    found = printed(capsys, *keys, f"page={tmp_path / 'scaling.html'}")
    assert {p["nodes"] for p in found["scaling"]} == {1}


def test_a_gpu_that_the_table_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_here(name: str, major: int, gib: int) -> Machine:
        found = SimpleNamespace(name=name, major=major, total_memory=gib << 30)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
        return this_machine(1)

    assert is_here("NVIDIA H100 80GB HBM3", 9, 79).name == "NVIDIA H100 80GB HBM3, as h100"
    a6000 = is_here("NVIDIA RTX A6000", 8, 47)
    assert a6000.memory == 47 << 30 and a6000.name == "NVIDIA RTX A6000, which the table of GPUs lacks, timed as l40s"
    turing = is_here("Quadro RTX 8000", 7, 47)
    assert turing.gpu is not None and turing.gpu.bf16 is None


def test_every_gpu_says_where_its_numbers_are_from() -> None:
    assert set(GPUS) == {"a100-40gb", "a100-80gb", "h100", "h200", "b200", "l40s", "a10g", "4090", "v100", "t4"}
    for gpu in GPUS.values():
        assert gpu.source and gpu.fp32 <= gpu.fp16 and gpu.network <= gpu.link


def test_models_of_conf_have_shapes() -> None:
    for path in (config_dir() / "model").glob("*.yaml"):
        cfg = config_of([f"model={path.stem}", *(["model.language=package:tiny-llama"] if path.stem == "own" else [])])
        parts = shapes_of(cfg.model)
        assert parts.language.hidden_size > 0 and parts.vision.hidden_size > 0


WORLD = World(0, 4, 0, 4, torch.device("cpu"))
SAMPLES = Samples(120, 0.6, 12, 30, "test", 4)


def decider(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> Callable[..., auto.Decision]:
    """Decides for four ranks on a machine with so many bytes for the tensors of each."""
    parts = find_parts(cfg.model)

    def decide_on(memory: int, continues: bool = False) -> auto.Decision:
        monkeypatch.setattr(auto, "this_machine", lambda *_: Machine(None, "test", memory + PROCESS_BYTES, 1e9))
        return decide(cfg, WORLD, parts, SAMPLES, continues)

    return decide_on


def test_auto_leaves_out_strategies_that_offload_refuses(wide_parts: Path, dataset: Path, tmp_path: Path) -> None:
    keys = ["sharding=auto", "offload=params", "precision=bf16", "activation_checkpointing=full", "global_batch_size=8"]
    cfg = make_config(wide_parts, dataset, tmp_path, *keys)
    decision = decide(cfg, WORLD, find_parts(cfg.model), SAMPLES)
    assert decision.applied(cfg).sharding.strategy not in (Strategy.NO_SHARD, Strategy.SHARD_OPTIMIZER)


@pytest.mark.slow
def test_auto_takes_what_fits_and_keeps_it(
    wide_parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto_keys = ["sharding=auto", "tokens_per_micro_batch=auto", "precision=bf16", "activation_checkpointing=full"]
    cfg = make_config(wide_parts, dataset, tmp_path, *auto_keys, "global_batch_size=48")
    decide_on = decider(cfg, monkeypatch)
    ample, tight = decide_on(1 << 30), decide_on(9_500_000)
    assert ample.tokens is not None and tight.tokens is not None and tight.tokens < ample.tokens
    settled = tight.applied(cfg)
    assert not settled.has_auto and settled.sharding.strategy in SHARD_PLANS
    with pytest.raises(ConfigError, match="predicts that nothing fits"):
        decide_on(100_000)
    recorded = f"sharding: {{strategy: {Strategy.SHARD_GRAD_OP.value}}}\ntokens_per_micro_batch: "
    (tmp_path / "config.yaml").write_text(f"{recorded}{tight.tokens}\n")
    kept = decide_on(1 << 30, continues=True)
    assert (kept.strategy, kept.tokens) == (Strategy.SHARD_GRAD_OP, tight.tokens)
    assert decide_on(1 << 30) == ample, "a run that starts anew does not keep what an older one recorded"
    (tmp_path / "config.yaml").write_text(f"{recorded}null\n")
    assert decide_on(1 << 30, continues=True) == ample, "without a recorded number the plan decides"


@pytest.mark.slow
def test_auto_recomputes_no_more_than_it_must(
    wide_parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With less and less memory: nothing, the cheap part, the block. The number of tokens stays as configured."""
    keys = ["sharding=zero3", "activation_checkpointing=auto", "precision=bf16", "global_batch_size=48"]
    cfg = make_config(wide_parts, dataset, tmp_path, *keys, "tokens_per_micro_batch=1024")
    assert cfg.has_auto
    planner = Planner(cfg, Machine(None, "test", 1 << 40, 1e9), SAMPLES, find_parts(cfg.model))
    modes = [ActivationCheckpointing.none, ActivationCheckpointing.selective, ActivationCheckpointing.full]
    split, totals = configured_split(cfg, SAMPLES, 4), []
    for mode in modes:
        checkpointing = ActivationCheckpointingConfig(mode=mode, budget=None)
        row = planner.row(Choice(Strategy.FULL_SHARD, checkpointing, OffloadMode.none), RankCounts(4, 4, 4), split)
        totals.append(row.bytes["total"])
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 3
    decide_on = decider(cfg, monkeypatch)
    chosen = [decide_on(total) for total in totals]
    assert [one.activation_checkpointing.mode for one in chosen] == modes
    assert [one.applied(cfg).tokens_per_micro_batch for one in chosen] == [1024] * 3
    assert not chosen[0].applied(cfg).has_auto
    line = chosen[1].summary(cfg)
    assert line.startswith("auto: activation_checkpointing=selective: ") and " GB, " in line and len(line) < 130, line
    with pytest.raises(ConfigError, match="predicts that nothing fits"):
        decide_on(totals[2] - 100_000)
    with monkeypatch.context() as patch:
        patch.setattr(cfg, "compile", True)  # which goes with SDPA in packed rows, but not with selective as well
        assert decide_on(totals[1]).activation_checkpointing.mode is ActivationCheckpointing.full
    recorded = f"sharding: {{strategy: {Strategy.FULL_SHARD.value}}}\nrecompute: {{mode: full, budget: null}}\n"
    (tmp_path / "config.yaml").write_text(recorded + "tokens_per_micro_batch: 1024\n")
    kept = decide_on(totals[0], continues=True)
    assert kept.activation_checkpointing.mode is ActivationCheckpointing.full, "a run continues as it began"
    assert kept.summary(cfg) == "auto: activation_checkpointing=full: as when this run began"
    recorded = recorded.replace("mode: full, budget: null", "mode: budget, budget: 0.5")
    (tmp_path / "config.yaml").write_text(recorded + "tokens_per_micro_batch: 1024\n")
    assert decide_on(totals[0], continues=True) == chosen[0], "a mode that compile=false refuses is planned anew"


def test_auto_is_settled_before_anything_else_sees_it() -> None:
    cfg = config_of(["sharding=auto", "tokens_per_micro_batch=auto"])
    assert cfg.has_auto and cfg.sharding.strategy not in SHARD_PLANS


@pytest.mark.parametrize("keys", [["pack=false"], ["sampler=llava_v1_5"]], ids=lambda keys: keys[0])
def test_auto_tokens_mean_null_where_micro_batch_size_alone_decides(keys: list[str]) -> None:
    cfg = config_of([*keys, "tokens_per_micro_batch=auto", "micro_batch_size=4"])
    assert not cfg.has_auto
    assert cfg.row_tokens == config_of([*keys, "micro_batch_size=4"]).row_tokens == 4 * cfg.data.max_length


def test_real_models_are_planned_by_default_and_the_tiny_one_is_not() -> None:
    for model in ("llava_v1_5_7b", "qwen2_5_siglip"):
        cfg = config_of([f"model={model}"])
        assert cfg.plans_tokens and auto.has_auto_checkpointing(cfg) and cfg.sharding.strategy is Strategy.FULL_SHARD
    assert not config_of([]).has_auto


@pytest.mark.parametrize(
    ("keys", "mode", "device", "compiles"),
    [
        ([], "none", "h100", True),
        ([], "full", "h100", True),
        ([], "none", "cpu", False),
        (["compile=true"], "none", "cpu", True),
        (["compile=true"], "selective", "cpu", False),  # SDPA a sample at a time cuts a block
        (["compile=false"], "none", "h100", False),
        (["deterministic=true"], "none", "h100", False),
        (["parallel.tensor=2"], "none", "h100", False),
    ],
)
def test_what_is_planned_as_compiled(keys: list[str], mode: str, device: str, compiles: bool) -> None:
    machine = Machine(None, "test", 1 << 34, 1e9) if device == "cpu" else machine_named(device, 8)
    planner = Planner(config_of(keys), machine)
    assert planner.compiles(ActivationCheckpointing(mode)) is compiles
    planner.machine = replace(machine, has_compiler=False)
    assert not planner.compiles(ActivationCheckpointing(mode))
