"""Tensors sharded as a run's are, saved and loaded without a model."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import single_world
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from llava_fsdp.checkpoint.commit import AdapterCopy
from llava_fsdp.checkpoint.reader import SavedTensor, load
from llava_fsdp.checkpoint.saver import SavedState, Saver
from llava_fsdp.checkpoint.verify import Checkpoint, newest_together, verify_together
from llava_fsdp.config import CheckpointConfig, OnSaveError
from llava_fsdp.parallel.ranks.world import World

CONFIG = CheckpointConfig(
    every=1, keep=2, keep_every=None, resume="auto", strict=False, asynchronous=True, on_save_error=OnSaveError["raise"]
)
LAYOUTS = ("shard", "replicate", "hybrid")
Tensors = dict[str, torch.Tensor]


def whole_tensors(seed: int) -> Tensors:
    """Rows that nothing divides, fewer rows than ranks, a single number, and the dtypes of our optimizers."""
    dice = torch.Generator().manual_seed(seed)
    return {
        "model.a.weight": torch.randn(31, 6, generator=dice),
        "model.a.bias": torch.randn(37, generator=dice).bfloat16(),
        "model.b": torch.randn(1, 4, 3, generator=dice),
        "optim.a.weight.exp_avg": torch.randint(0, 255, (31, 6), generator=dice, dtype=torch.uint8),
        "optim.a.weight.exp_avg_scale": torch.rand(31, 1, generator=dice),
        "optim.a.weight.step": torch.tensor(float(seed)),
        "optim.b.step": torch.tensor(float(seed + 1)),
    }


def cut(tensors: Tensors, world: World, layout: str) -> Tensors:
    """As a strategy of that mesh cuts them; whole in a process that is alone."""
    if world.size == 1:
        return {name: tensor.clone() for name, tensor in tensors.items()}
    if layout == "shard":
        mesh, placements = init_device_mesh("cpu", (world.size,)), [Shard(0)]
    else:
        shape = (world.size // 2, 2) if layout == "hybrid" else (world.size, 1)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        placements = [Replicate(), Shard(0)]
    return {
        name: distribute_tensor(tensor, mesh, placements) if tensor.ndim else tensor.clone()
        for name, tensor in tensors.items()
    }


def facts(step: int) -> dict[str, Any]:
    return {
        "format": 6, "run": "one", "step": step, "samples": 12 * step, "skipped": 0, "consecutive": 0, "seed": 0,
        "scaler": None, "dynamic": None, "broken": [],
        "fingerprints": dict.fromkeys(("dataset", "encoding", "order", "model"), "same"),
        "trainable": ["a.weight", "a.bias", "b"], "versions": {}, "written_by": {}, "config": {},
    }  # fmt: skip


def write_adapter(folder: Path, checkpoint: Checkpoint) -> None:
    """A folder with a folder in it, made from what the ranks have just written."""
    (folder / "vision_tower").mkdir(parents=True)
    (folder / "vision_tower" / "config.json").write_text("{}")
    name = "model.a.weight"
    saved = SavedTensor(checkpoint.folder, name, checkpoint.manifest.tensors[name])
    save_file({"a": saved.rows(0, saved.entry.rows)}, folder / "adapter_model.safetensors")


class StepSaver(Saver):
    """A saver of given tensors, as those of whatever step."""

    counter: list[int]
    """The step that is saved. Not a field of the saver: its facts would refer to it in a circle, and it would not be
    freed with its process group once a test is done with it."""

    @property
    def step(self) -> int:
        return self.counter[0]

    def save_step(self, step: int) -> None:
        self.counter[0] = step
        self.save()


def saver_of(
    parent: Path,
    tensors: Tensors,
    at: Callable[[str], None] = lambda _: None,
    with_adapter: bool = False,
    **values: Any,
) -> StepSaver:
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    adapter = AdapterCopy(4096, write_adapter) if with_adapter and is_first else None
    cfg = replace(CONFIG, **values)
    counter = [0]
    saver = StepSaver(
        parent, cfg, SavedState(lambda: tensors, lambda: facts(counter[0])), reached_point=at, adapter_folder=adapter
    )
    saver.counter = counter
    return saver


def is_busy(saver: Saver) -> bool:
    return saver.current_save is not None and not saver.current_save.done()


def save_steps(world: World, parent: Path, steps: list[int], layout: str = "shard", **values: Any) -> None:
    """A checkpoint a step, of tensors that the step's number draws."""
    tensors = cut(whole_tensors(0), world, layout)
    saver = saver_of(parent, tensors, **values)
    for number in steps:
        saver.before_update()
        with torch.no_grad():
            for name, value in cut(whole_tensors(number), world, layout).items():
                tensors[name].copy_(value)
        saver.save_step(number)
    saver.close()


def loaded(world: World, parent: Path, layout: str = "shard") -> int:
    """The step of the newest checkpoint that verifies, whose bits are those of its step. 0: there is none."""
    found = newest_together(parent, strict=False)
    if found is None:
        return 0
    into = cut(whole_tensors(999), world, layout)
    load(found, into)
    for name, expected in whole_tensors(found.manifest.step).items():
        got = into[name].full_tensor() if isinstance(into[name], DTensor) else into[name]
        assert torch.equal(got, expected) and got.dtype == expected.dtype, name
    assert verify_together(found.folder).facts == facts(found.manifest.step)
    return found.manifest.step


def loaded_alone(parent: Path) -> int:
    return loaded(single_world(), parent)


def interrupted(whole_run: Path, folder: Path, step: int) -> Path:
    """What a crash after `step` leaves: its checkpoint, and the metrics of steps that were done after it."""
    kept = f"checkpoints/step-{step:06d}"
    shutil.copytree(whole_run / kept, folder / kept)
    rows = (whole_run / "metrics.jsonl").read_text().splitlines()[: step + 1]
    (folder / "metrics.jsonl").write_text("\n".join([*rows, '{"step": 99, "lo']))
    return folder
