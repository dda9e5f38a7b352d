"""The field's published figures, from our arithmetic."""

from pathlib import Path

import pytest
from harness import alone
from small import config_of, make_config

from llava_fsdp.config import Config, PrecisionConfig, Strategy
from llava_fsdp.parallel.memory.memory import Weight, bytes_per_rank, checkpoint_bytes
from llava_fsdp.parallel.sharding_strategies import SHARD_PLANS
from llava_fsdp.plan.memory.published_formulas import formulas, zero
from llava_fsdp.plan.planner import Planner
from llava_fsdp.plan.rank_counts import RankCounts
from llava_fsdp.plan.time.hardware import machine_named
from llava_fsdp.plan.time.step_time import volume
from llava_fsdp.runtime.files.run_dir import FOLDER
from llava_fsdp.train import main as train
from llava_fsdp.train.checkpoints.checkpoint_contents import tensors
from llava_fsdp.train.events.save_and_stop import open_saver
from llava_fsdp.train.loop import train_step

STRATEGIES = [Strategy.NO_SHARD, Strategy.SHARD_OPTIMIZER, Strategy.SHARD_GRAD_OP, Strategy.FULL_SHARD]


def thirteen_b() -> tuple[Config, Planner]:
    cfg = config_of(["model=llava_v1_5_13b"])
    return cfg, Planner(cfg, machine_named("a100-80gb", 8))


def test_13b_on_8_gpus() -> None:
    """26.1 GB of states a GPU under ZeRO-3, against 208.8 GB without it."""
    cfg, planner = thirteen_b()
    trainable = [w for w in planner.weights if w.trainable]
    states = {}
    for strategy in STRATEGIES:
        held = bytes_per_rank(trainable, strategy, cfg.precision, 8, 8)
        states[SHARD_PLANS[strategy].zero] = held.parameters + held.gradients + held.optimizer
    assert planner.trainable == 13_047_331_840
    assert states["zero0"] == 16 * planner.trainable and round(states["zero0"] / 1e9, 1) == 208.8
    assert round(states["zero3"] / 1e9, 1) == 26.1
    by_formula = {f.text: f.bytes / 1e9 for f in formulas(planner.trainable, 8)}
    assert {t: round(b, 1) for t, b in by_formula.items()} == {
        "16P": 208.8, "4P + 12P/N": 71.8, "2P + 14P/N": 48.9, "16P/N": 26.1, "2 bytes x 4 x P": 104.4,
    }  # fmt: skip


def test_mistral_7b_in_half_precision() -> None:
    """56 GB, as the rule counts them for 7 billion parameters; what the model has by the same rule, and by ours."""
    assert formulas(7e9, 1)[-1].bytes == 56e9
    pure = ["precision=bf16_pure", "precision.norm_dtype=bf16"]
    cfg = config_of(["model.language=mistralai/Mistral-7B-Instruct-v0.2", "model.train=[language]", *pure])
    planner = Planner(cfg, machine_named("h200", 1))
    language = [w for w in planner.weights if w.trainable]
    assert planner.trainable == 7_241_732_096
    held = bytes_per_rank(language, Strategy.FULL_SHARD, cfg.precision, 1, 1)
    assert held.parameters + held.gradients + held.optimizer == formulas(planner.trainable, 1)[-1].bytes


def test_zero_paper() -> None:
    """7.5B parameters, K = 12, 64 GPUs: arXiv 1910.02054, figure 1."""
    assert [round(zero(stage, 7.5e9, 64) / 1e9, 1) for stage in range(4)] == [120, 31.4, 16.6, 1.9]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_communication_of_our_strategies(precision: str) -> None:
    """1, 1, 1 and 1.5 times data parallelism, in elements; in bytes bf16 weights travel at half the gradients' size."""
    cfg = config_of([f"precision={precision}"])
    weights = [Weight((64 * 48, 1024), True, False, False, unit=f"layers.{n}") for n in range(12)]
    sent = [volume(weights, s, cfg.precision, RankCounts(64, 64, 64), 1).total for s in STRATEGIES]
    numel = sum(w.numel for w in weights) * 63 / 64
    gathered, reduced = (4 if precision == "fp32" else 2) * numel, 4 * numel
    assert sent == [2 * reduced, gathered + reduced, gathered + reduced, 2 * gathered + reduced]
    if precision == "fp32":
        assert [s / sent[0] for s in sent] == [1, 1, 1, 1.5], "ZeRO, section 7"


def test_hybrid_sends_between_nodes_what_replicas_differ_in() -> None:
    cfg = config_of(["precision=bf16"])
    weights = [Weight((4096, 4096), True, False, False, unit=f"layers.{n}") for n in range(12)]
    numel = sum(w.numel for w in weights)
    whole = volume(weights, Strategy.FULL_SHARD, cfg.precision, RankCounts(16, 16, 8), 2)
    hybrid = volume(weights, Strategy.HYBRID_SHARD, cfg.precision, RankCounts(16, 8, 8), 2)
    assert whole.replicated == 0 and whole.sharded == 2 * (2 * 2 + 4) * numel * 15 / 16
    assert hybrid.sharded == 2 * (2 * 2 + 4) * numel * 7 / 8 and hybrid.replicated == 2 * (1 / 2) * 4 * numel / 8
    # a slow network slows all of zero3's rings, and of hybrid's the small one
    link, network = 450e9, 1e9
    assert whole.seconds(link, network) > 1.5 * hybrid.seconds(link, network)
    # a port for every GPU carries a ring of neighbours as fast as they pass it on within a node
    assert whole.seconds(link, link / 8) == whole.seconds(link, link)


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure"])
def test_checkpoint_bytes(precision: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    cfg = make_config(parts, dataset, tmp_path, f"precision={precision}")
    state = train.build_state(cfg, alone(cfg))
    train_step(state, state.loader.steps.prepare(0), cfg, 0.0)
    written = sum(t.numel() * t.element_size() for t in tensors(state).values())
    weights = Planner(cfg, machine_named("auto", 1)).weights
    assert checkpoint_bytes(weights, cfg.precision) == written
    saver = open_saver(state, cfg)
    saver.save()
    saver.close()
    folder = tmp_path / FOLDER / "step-000001"
    on_disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert written < on_disk < 1.5 * written + 100_000


def test_13b_checkpoint() -> None:
    cfg, planner = thirteen_b()
    assert isinstance(cfg.precision, PrecisionConfig)
    assert round(checkpoint_bytes(planner.weights, cfg.precision) / 1e9, 1) == 156.6
