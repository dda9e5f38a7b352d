"""`precision=`: what each choice stores, computes and updates in; and that it trains, repeats itself and continues."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool, single_world
from loaders import agreed_steps
from reference import EXPORTED
from small import Configure, make_config
from steps import begin, digest_of_state

from llava_fsdp.config import Config
from llava_fsdp.parallel.local_shards import local
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import CheckpointError
from llava_fsdp.train import main as train
from llava_fsdp.train.checkpoints.resume import resume
from llava_fsdp.train.events.save_and_stop import open_saver
from llava_fsdp.train.loop import train_step

SMALL = ["global_batch_size=4", "micro_batch_size=1", "max_steps=5", "optim.schedule=constant", "optim.clip=1.0"]
INT8, BF16_MOMENTS = "bf16 precision.moment_dtype=int8", "bf16 precision.moment_dtype=bf16"
PURE_INT8 = "bf16_pure precision.moment_dtype=int8"
PURE_IN_ALL = "bf16_pure precision.norm_dtype=bf16 precision.moment_dtype=fp32"
QUICK = [INT8]
SLOW = ["fp16", "bf16_pure", "bf16", "fp32", BF16_MOMENTS, PURE_INT8, PURE_IN_ALL]


def of(preset: str) -> list[str]:
    return f"precision={preset}".split()


@dataclass
class Trace:
    losses: list[float]
    digest: str
    """Of this rank's masters and moments at the end."""


def steps(world: World, cfg: Config) -> Trace:
    """From where the run is to its end, with a checkpoint after the third step."""
    state, losses = begin(world, cfg), []
    Path(cfg.output_dir).mkdir(parents=True, exist_ok=True)
    saver = open_saver(state, cfg, resume(state, cfg))
    for step in agreed_steps(state.loader, state.step):
        losses.append(train_step(state, step, cfg, 0.0).loss)
        if state.step == 3:
            saver.save()
    saver.close()
    return Trace(losses, digest_of_state(state))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("preset", [*QUICK, *(pytest.param(preset, marks=pytest.mark.slow) for preset in SLOW)])
def test_trains_repeats_and_continues_on_two_ranks(
    preset: str, configure: Configure, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """Five steps; with checkpointing, and from the checkpoint, to the bit; from it on one rank, nearly."""
    values = [*SMALL, *of(preset), "sharding=zero3"]
    runs = {}
    for name, activation_checkpointing in (("none", "none"), ("full", "full"), ("continued", "none")):
        if name == "continued":
            shutil.copytree(tmp_path / "none" / "checkpoints", tmp_path / name / "checkpoints")
        cfg = configure(*values, f"activation_checkpointing={activation_checkpointing}", to=name)
        runs[name] = pools[2].run(steps, cfg)
    first = runs["none"]
    assert len(first[0].losses) == 5 and first[0].losses[-1] < first[0].losses[0] < 8
    assert runs["full"] == first
    for rank, trace in enumerate(runs["continued"]):
        assert trace == Trace(first[rank].losses[3:], first[rank].digest)
    shutil.copytree(tmp_path / "none" / "checkpoints", tmp_path / "one" / "checkpoints")
    alone = steps(single_world(), configure(*values, to="one"))
    assert alone.losses[0] == pytest.approx(first[0].losses[3], rel=1e-3)
    assert alone.losses[1] == pytest.approx(first[0].losses[4], rel=0.02)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("sharding", "preset"), [("zero0", "bf16_pure"), ("hybrid", PURE_INT8)])
def test_replicas_stay_equal(sharding: str, preset: str, configure: Configure, pools: dict[int, RankPool]) -> None:
    """Ranks that hold the same rows round them alike, although each draws for itself."""
    values = [*SMALL, *of(preset), f"sharding={sharding}", "max_steps=2", "checkpoint.resume=never"]
    if sharding == "hybrid":
        values.append("sharding.shard_size=1")
    found = pools[2].run(steps, configure(*values))
    assert found[0] == found[1]


@pytest.mark.slow
def test_other_dtypes_of_masters_and_moments_are_refused(configure: Configure) -> None:
    """A checkpoint's tensors are what they are; codes of 8 bits read as numbers would be nonsense."""
    steps(single_world(), configure(*SMALL, *of(INT8)))
    for preset, message in (("bf16", "moment_dtype: int8 -> fp32"), (PURE_INT8, "master_dtype: fp32 -> bf16")):
        with pytest.raises(CheckpointError, match=message):
            steps(single_world(), configure(*SMALL, *of(preset)))
    steps(single_world(), configure(*SMALL, *of("fp32 precision.moment_dtype=int8")))


def dtypes(world: World, cfg: Config) -> dict[str, Any]:
    """Of the language model's linear layers: in the files, on this rank, at work, and in the update."""
    state = begin(world, cfg)
    layer = state.model.get_submodule("language_model.layers.0.mlp.up_proj")
    name = "language_model.layers.0.mlp.up_proj.weight"
    at_work = set()
    layer.register_forward_hook(
        lambda module, inputs, output: at_work.update([module.weight.dtype, inputs[0].dtype, output.dtype])
    )
    found = {"loaded": state.sources[name].dtype, "local": state.masters.named[name].dtype}
    source = state.sources[name].rows(0, state.sources[name].shape[0])
    exact = torch.isin(local(state.masters.named[name]).float(), source.float()).all()
    train_step(state, state.loader.steps.prepare(0), cfg, 0.0)
    updated = state.optimizer.state[state.masters.named[name]]
    moments = {updated[moment].dtype for moment in ("exp_avg", "exp_avg_sq")}
    assert exact and len(at_work) == len(moments) == 1
    return found | {"compute": at_work.pop(), "optimizer": moments.pop()}


B, F, H = torch.bfloat16, torch.float32, torch.float16
# "FSDP vs DeepSpeed" of accelerate's concept guides: the dtypes of model loading, of what a rank holds after
# preparation, of training, and of the optimizer.
PUBLISHED = {
    "FSDP, memory-constrained": (B, B, B, B),
    "FSDP, mixed precision": (B, F, B, F),
    "DeepSpeed": (B, F, B, F),
}
AS_HERE = {
    "bf16_pure": "FSDP, memory-constrained",
    "bf16": "FSDP, mixed precision",
    "bf16 precision.reduce_dtype=bf16 precision.norm_dtype=bf16": "DeepSpeed",
}
OTHERS = {
    "fp16": (B, F, H, F),
    "fp32": (B, F, F, F),
    INT8: (B, F, B, torch.uint8),
    BF16_MOMENTS: (B, F, B, B),
}


@pytest.fixture(scope="module")
def in_bf16(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model in a folder, in bf16."""
    folder = tmp_path_factory.mktemp("whole")
    train.train(make_config(parts, dataset, folder, "max_steps=1", *EXPORTED, "export.dtype=bf16"))
    return folder / "export"


@pytest.mark.slow
@pytest.mark.ranks
def test_dtypes_are_the_published_tables(in_bf16: Path, configure: Configure, pools: dict[int, RankPool]) -> None:
    expected = {preset: PUBLISHED[row] for preset, row in AS_HERE.items()} | OTHERS
    whole = ["model.random_weights=false", f"model.checkpoint={in_bf16}"]
    for preset, row in expected.items():
        cfg = configure(*SMALL, *of(preset), *whole, "sharding=zero3")
        wanted = dict(zip(("loaded", "local", "compute", "optimizer"), row, strict=True))
        for found in (*pools[2].run(dtypes, cfg), dtypes(single_world(), cfg)):
            assert found == wanted, preset
