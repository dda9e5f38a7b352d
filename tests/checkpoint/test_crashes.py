"""A rank that ends at any point of a save: what is found afterwards, and that the next save is as good as any."""

import multiprocessing
import os
import shutil
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import CPU, single_world
from saves import cut, loaded_alone, save_steps, saver_of, whole_tensors
from tiers import slow_after

from llava_fsdp.checkpoint import commit, safetensors_stream
from llava_fsdp.checkpoint.verify import verify
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.files.run_dir import list_checkpoints

BEFORE = [
    "made", "file half", "file written", "agreed", "state written", "adapter half", "adapter written",
    "manifest written", "folder synced",
]  # fmt: skip
REPLACING = ["old one aside"]
AFTER = ["renamed", "parent synced", "pointed", "one deleted", "told"]
FIRST_RANK_ALONE = {*BEFORE[4:], *REPLACING, *AFTER[:-1]}
CRASHES = [(0, point) for point in BEFORE + REPLACING + AFTER] + [
    (1, point) for point in BEFORE + AFTER if point not in FIRST_RANK_ALONE
]


def test_every_named_point_is_here() -> None:
    """The table of `commit.py` is the list."""
    assert commit.__doc__ is not None
    named = [line.split("|")[3].strip() for line in commit.__doc__.splitlines() if line.startswith("| ")][1:]
    assert set(named) | {"file half", "adapter half"} == {*BEFORE, *REPLACING, *AFTER}


def save_and_crash(rank: int, parent: Path, crash: tuple[int, str]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(parent.parent / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    world = World(rank, 2, rank, 2, CPU)
    tensors = cut(whole_tensors(4), world, "shard")

    def at(point: str) -> None:
        if (rank, point) == crash:
            os._exit(9)

    if crash == (rank, "file half"):

        def write_some(descriptor: int, content: memoryview) -> None:
            os.write(descriptor, content[: len(content) // 2])
            os._exit(9)

        safetensors_stream.write_all = write_some
    if crash == (rank, "adapter half"):
        commit.sync_tree = lambda folder: os._exit(9)
    saver = saver_of(parent, tensors, at=at, with_adapter=True)
    saver.save_step(4)
    saver.close()


@pytest.mark.ranks
@pytest.mark.parametrize(("rank", "point"), slow_after(10, CRASHES))
def test_the_newest_whole_checkpoint_is_found(rank: int, point: str, tmp_path: Path) -> None:
    parent = tmp_path / "checkpoints"
    save_steps(single_world(), parent, [1, 2], with_adapter=True)
    if point in REPLACING:  # of the same step, but damaged: never in the way, never trusted
        shutil.copytree(parent / "step-000002", parent / "step-000004")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=save_and_crash, args=(n, parent, (rank, point)), daemon=True) for n in (0, 1)]
    for process in processes:
        process.start()
    processes[rank].join(30)
    code = processes[rank].exitcode
    if rank == 1 and point in ("agreed", "told"):  # the first rank may finish what is its own, or not
        time.sleep(0.3)
    for process in processes:
        process.kill()
        process.join()
    assert code == 9, "the process ended at that point"
    certain = {True: {4}, False: {2}}[point in AFTER]
    found = loaded_alone(parent)
    assert found in ({2, 4} if (rank, point) == (1, "agreed") else certain)
    good = [folder for folder in list_checkpoints(parent) if folder.name != "step-000004" or found == 4]
    assert len(good) >= 2 or point == "one deleted"
    for folder in good:
        verify(folder)
    save_steps(single_world(), parent, [6, 8])
    assert loaded_alone(parent) == 8
    assert not list(parent.glob("*.tmp")), "what was left is swept up"
