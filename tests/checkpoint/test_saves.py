"""Saves: what a step sees of them, what a full disk does, what is kept, and what 50 of them leave behind."""

import contextlib
import errno
import os
import re
import resource
import shutil
import stat
import subprocess
import threading
import time
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import RankPool, single_world
from saves import CONFIG, cut, facts, is_busy, loaded, loaded_alone, save_steps, saver_of, whole_tensors

from llava_fsdp.checkpoint import commit, snapshot
from llava_fsdp.checkpoint import saver as saver_module
from llava_fsdp.checkpoint.retention import delete_old
from llava_fsdp.checkpoint.saver import SavedState, Saver
from llava_fsdp.checkpoint.snapshot import Snapshot
from llava_fsdp.checkpoint.verify import newest_alone, verify
from llava_fsdp.config import OnSaveError
from llava_fsdp.parallel.ranks.mesh import is_lost_peer
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import CheckpointError, NumericError
from llava_fsdp.runtime.files.run_dir import folder_name, list_checkpoints, step_of

WARN = OnSaveError.warn


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


@pytest.mark.parametrize(("code", "is_saved"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_file_systems_that_cannot_force_folders(
    code: int, is_saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SMB for one; an error of a disk is another thing."""
    fsync = os.fsync

    def refused(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refused)
    with contextlib.nullcontext() if is_saved else pytest.raises(CheckpointError, match="Input/output error"):
        save_steps(single_world(), tmp_path, [2])
    assert [path.name for path in list_checkpoints(tmp_path)] == (["step-000002"] if is_saved else [])


def test_each_thing_is_on_the_disk_before_what_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, then the list of them, then their folder, then its name, then the pointer to it."""
    seen: list[str] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def forced(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        seen.append(f"fsync {re.sub('[.][0-9a-f]{8}[.]tmp$', '.tmp', name)}")
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        seen.append(f"rename {Path(source).name} {Path(target).name}")
        rename(source, target)

    def replaced(source: Path, target: Path) -> None:
        seen.append(f"replace {Path(target).name}")
        replace(source, target)

    for name, own in {"fsync": forced, "rename": renamed, "replace": replaced}.items():
        monkeypatch.setattr(os, name, own)
    parent = tmp_path / "checkpoints"
    save_steps(single_world(), parent, [2])
    assert seen == [
        "fsync rank-00000.safetensors",
        "fsync state.json",
        "fsync manifest.json",
        "fsync step-000002.tmp",
        "rename step-000002.tmp step-000002",
        "fsync checkpoints",
        "fsync latest.tmp",
        "replace latest",
        "fsync checkpoints",
    ]


def test_a_checkpoint_put_aside_is_not_swept_away(tmp_path: Path) -> None:
    """A crash between the two renames of a save over another, and then a run that continues from elsewhere."""
    save_steps(single_world(), tmp_path, [2])
    os.rename(tmp_path / "step-000002", tmp_path / "step-000002.replaced.tmp")
    saver_of(tmp_path, cut(whole_tensors(2), single_world(), "shard")).close()
    assert loaded_alone(tmp_path) == 2


def test_what_changes_next_waits_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps continue while the copy is made, up to the update."""
    tensors, fill, may_copy = cut(whole_tensors(2), single_world(), "shard"), Snapshot.fill, threading.Event()

    def late(snapshot: Snapshot, tensors: dict[str, torch.Tensor]) -> None:
        assert may_copy.wait(20)
        fill(snapshot, tensors)

    monkeypatch.setattr(Snapshot, "fill", late)
    saver = saver_of(tmp_path, tensors)
    saver.before_update()  # nothing is under way
    saver.save_step(2)
    assert is_busy(saver), "the save itself does not wait"
    threading.Timer(0.2, may_copy.set).start()
    saver.before_update()
    assert may_copy.is_set()
    for value in tensors.values():
        value.zero_()
    saver.close()
    assert loaded_alone(tmp_path) == 2


class Gate:
    """Holds a save at a named point until it is opened."""

    def __init__(self, point: str):
        self.point, self.opened, self.reached = point, threading.Event(), threading.Event()

    def __call__(self, point: str) -> None:
        if point == self.point:
            self.reached.set()
            assert self.opened.wait(20)


def save_while_training(world: World, parent: Path) -> list[object]:
    """A save that is held while the tensors change, and the next one, which has to wait for it."""
    tensors, gate = cut(whole_tensors(2), world, "shard"), Gate("made")
    saver = saver_of(parent, tensors, at=gate)
    saver.save_step(2)
    assert gate.reached.wait(20) and is_busy(saver) and not saver.failed
    with torch.no_grad():
        for name, value in cut(whole_tensors(4), world, "shard").items():
            tensors[name].copy_(value)
    busy_until = time.monotonic() + 0.3
    threading.Timer(0.3, gate.opened.set).start()
    saver.save_step(4)
    waited = time.monotonic() >= busy_until
    saver.close()
    return [waited, loaded(world, parent), threading.active_count()]


@pytest.mark.ranks
def test_a_save_holds_what_was_there_when_it_began(pools: dict[int, RankPool], tmp_path: Path) -> None:
    found = pools[2].run(save_while_training, tmp_path)
    assert [own[:2] for own in found] == [[True, 4], [True, 4]]
    shutil.rmtree(tmp_path / "step-000004")
    assert loaded_alone(tmp_path) == 2, "the steps after it changed nothing of it"


@pytest.mark.parametrize("asynchronous", [True, False])
def test_folders_are_private_and_nothing_else_is_left(asynchronous: bool, tmp_path: Path) -> None:
    save_steps(single_world(), tmp_path / "made", [1, 2, 3], asynchronous=asynchronous)
    assert names(tmp_path / "made") == ["latest", "step-000002", "step-000003"]
    assert (tmp_path / "made" / "latest").read_text() == "step-000003\n"
    for path in (tmp_path / "made").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert loaded_alone(tmp_path / "made") == 3


def test_the_same_step_is_saved_once(tmp_path: Path) -> None:
    saver = saver_of(tmp_path, whole_tensors(1))
    saver.save_step(1)
    saver.wait()
    before = (tmp_path / "step-000001").stat().st_ino
    saver.save()
    saver.close()
    assert (tmp_path / "step-000001").stat().st_ino == before


def test_what_is_kept(tmp_path: Path) -> None:
    """The newest two that verify, every fourth for good; a damaged one does not count."""
    save_steps(single_world(), tmp_path, list(range(1, 10)), keep_every=4)
    assert [p.name for p in list_checkpoints(tmp_path)] == [f"step-{n:06d}" for n in (4, 8, 9)]
    (tmp_path / "step-000009" / "state.json").write_text("{}")
    save_steps(single_world(), tmp_path, [10])
    assert [p.name for p in list_checkpoints(tmp_path)] == [f"step-{n:06d}" for n in (8, 9, 10)]
    verify(tmp_path / "step-000008")


def test_a_checkpoint_that_cannot_be_deleted_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(folder: Path, **_: object) -> None:
        if "deleted" in Path(folder).name:
            raise PermissionError(1, "Operation not permitted", str(folder))

    with monkeypatch.context() as patched:
        patched.setattr("llava_fsdp.checkpoint.retention.shutil.rmtree", refused)
        save_steps(single_world(), tmp_path, [1, 2, 3])
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-000002", "step-000003"]
    save_steps(single_world(), tmp_path, [4])
    assert names(tmp_path) == ["latest", "step-000003", "step-000004"], "what was left is deleted with the next run"


def fail_on(world: World, parent: Path, culprit: int, asynchronous: bool, policy: OnSaveError) -> list[object]:
    """Step 2 is good; at step 4 one rank's disk refuses; step 6 is good again."""
    tensors = cut(whole_tensors(2), world, "shard")

    def at(point: str) -> None:
        if point == "file written" and world.rank == culprit and saver.step == 4:
            raise OSError(28, "No space left on device", str(parent))

    saver = saver_of(parent, tensors, at=at, asynchronous=asynchronous, on_save_error=policy)
    said: list[object] = []
    for number in (2, 4, 6):
        try:
            saver.save_step(number)
            saver.raise_if_failed()
        except CheckpointError as error:
            said.append(str(error))
            assert saver.failed
            break
    left = sorted(path.name for path in parent.iterdir())
    try:
        saver.close()
    except CheckpointError as error:
        said.append(str(error))
    return [said, left]


@pytest.mark.ranks
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_full_disk_of_one_rank_is_one_error_of_all(
    culprit: int, asynchronous: bool, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    found = pools[2].run(fail_on, tmp_path / "raise", culprit, asynchronous, OnSaveError["raise"])
    assert found[0] == found[1]
    (said, again), left = found[0]
    assert said == again and f"rank {culprit}: " in said and "step-000004" in said
    assert "No space left on device" in said and "are free" in said
    assert left == ["latest", "step-000002"], "what was written of it is gone, the one before is there"
    found = pools[2].run(fail_on, tmp_path / "warn", culprit, asynchronous, WARN)
    assert found[0] == found[1] == [[], ["latest", "step-000002", "step-000006"]]


def poison(world: World, parent: Path, culprit: int, policy: OnSaveError) -> str:
    tensors = cut(whole_tensors(2), world, "shard")
    saver = saver_of(parent, tensors, on_save_error=policy)
    saver.save_step(2)
    saver.wait()
    if world.rank == culprit:
        tensors["model.a.weight"].to_local()[3, 2] = float("nan")
    saver.save_step(4)
    with pytest.raises(NumericError) as caught:
        saver.close()
    return str(caught.value)


@pytest.mark.ranks
def test_weights_that_are_not_finite_are_never_saved(pools: dict[int, RankPool], tmp_path: Path) -> None:
    for culprit, policy in ((0, OnSaveError["raise"]), (1, WARN)):
        parent = tmp_path / str(culprit)
        found = pools[2].run(poison, parent, culprit, policy)
        assert found[0] == found[1]
        assert f"rank {culprit}: model.a.weight holds numbers that are not finite" in found[0]
        assert names(parent) == ["latest", "step-000002"]


def test_no_room_is_said_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"model.a": torch.zeros(1000)}
    monkeypatch.setattr("llava_fsdp.runtime.files.durable_files.free_bytes", lambda _: 4799)
    with pytest.raises(CheckpointError) as caught:
        saver_of(tmp_path, tensors)
    assert "No space left" in str(caught.value) and str(tmp_path) in str(caught.value)
    assert "4.688 KiB" in str(caught.value) and "4.687 KiB" in str(caught.value)


@pytest.mark.parametrize("place", ["file", "file/below", "x" * 300, "/proc/nothing"])
def test_places_that_cannot_be_written_to(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written to") as caught:
        saver_of(tmp_path / place, {"model.a": torch.ones(3)})
    assert place.partition("/")[0] in str(caught.value)


def test_no_permission(tmp_path: Path) -> None:
    if os.getuid() == 0:
        pid = os.fork()  # root ignores modes: as nobody
        if not pid:
            code = 1
            try:
                tmp_path.parent.chmod(0o755)
                os.setgid(65534)
                os.setuid(65534)
                saver_of(tmp_path / "closed", {"model.a": torch.ones(3)})
            except CheckpointError as error:
                code = 0 if "Permission denied" in str(error) and "uid 65534" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    else:
        tmp_path.chmod(0o500)
        with pytest.raises(CheckpointError, match="Permission denied"):
            saver_of(tmp_path / "closed", {"model.a": torch.ones(3)})


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def many(world: World, parent: Path) -> list[tuple[int, int, int]]:
    """Descriptors, threads and staged bytes after 5 and after 50 saves; and when savers have come and gone."""
    tensors = cut(whole_tensors(1), world, "shard")
    saver = saver_of(parent, tensors)
    found, before = [], 0
    for number in range(1, 51):
        saver.save_step(number)
        if number in (5, 50):
            saver.wait()
            assert number == 5 or resident() < before + (4 << 20)
            before = resident()
            found.append(state_of(saver))
    saver.close()
    for number in (51, 52, 53):
        save_steps(world, parent, [number])
        found.append((descriptors(), threading.active_count(), 0))
    return found


def state_of(saver: Saver) -> tuple[int, int, int]:
    assert saver.snapshot is not None
    return descriptors(), threading.active_count(), saver.snapshot.arena.size


@pytest.mark.slow
@pytest.mark.ranks
def test_fifty_saves_leave_nothing_behind(pools: dict[int, RankPool], tmp_path: Path) -> None:
    for after_5, after_50, _, before, after in pools[2].run(many, tmp_path):
        assert all(now <= then for now, then in zip(after_50, after_5, strict=True)), (after_5, after_50)
        assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)
    assert names(tmp_path) == ["latest", "step-000052", "step-000053"]


def test_what_a_lost_group_raised_is_kept(tmp_path: Path) -> None:
    """A rank that is gone is no checkpoint's fault: the cause tells, and the run is started again."""

    def at(point: str) -> None:
        if point == "agreed":
            raise RuntimeError("[gloo] Connection closed by peer")

    saver = saver_of(tmp_path, cut(whole_tensors(1), single_world(), "shard"), at=at)
    saver.save_step(2)
    with pytest.raises(CheckpointError) as caught:
        saver.raise_if_failed()
    assert is_lost_peer(caught.value)


@pytest.mark.parametrize(("keep_every", "left"), [(None, [3, 4, 5, 6]), (2, [2, 3, 4, 5, 6])])
def test_damaged_checkpoints_are_none_of_those_that_are_kept(
    keep_every: int | None, left: list[int], tmp_path: Path
) -> None:
    for step in range(1, 7):
        (tmp_path / folder_name(step)).mkdir()
    damaged = folder_name(4), folder_name(5)
    delete_old(tmp_path, 2, keep_every, lambda folder: folder.name not in damaged, lambda _: None)
    assert [step_of(folder) for folder in list_checkpoints(tmp_path)] == left


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    """A real one, of 3 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip("no right to mount")
    try:
        saver = saver_of(folder, {"model.a": torch.ones(250_000)})
        saver.save_step(1)
        saver.wait()
        (folder / "filler").write_bytes(b"x" * 1_500_000)
        saver.save_step(2)
        with pytest.raises(CheckpointError, match=r"No space left.*step-000002.*KiB, and .* are free"):
            saver.close()
        assert names(folder) == ["filler", "latest", "step-000001"]
        verify(folder / "step-000001")
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_file_size_limit(tmp_path: Path) -> None:
    saver = saver_of(tmp_path, {"model.a": torch.ones(250_000)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        saver.save_step(1)
        with pytest.raises(CheckpointError, match=r"File too large.*rank-00000.*ulimit -f"):
            saver.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == []


def test_every_rank_s_part_and_the_adapters_need_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that has room for the largest part alone is refused before the first step."""
    tensors, other = {"model.a": torch.zeros(1000)}, 2500
    needed = 4000 + 4096 + other
    monkeypatch.setattr(saver_module, "gathered", lambda nbytes, _: [nbytes, other])
    monkeypatch.setattr(saver_module, "fits", lambda *_: False)
    for free, fits in ((int(needed * 1.2), True), (int(needed * 1.2) - 1, False)):
        monkeypatch.setattr("llava_fsdp.runtime.files.durable_files.free_bytes", lambda _, free=free: free)
        with contextlib.nullcontext() if fits else pytest.raises(CheckpointError, match="No space left"):
            saver = saver_of(tmp_path, tensors, with_adapter=True)
            assert saver.committer.nbytes == needed
            saver.close()


@pytest.mark.parametrize(
    ("free", "others", "fit"),
    [(625, [("elsewhere", 500)], True), (624, [("elsewhere", 500)], False), (625, [("elsewhere", None)], False),
     (1250, [("here", 500)], True), (1249, [("here", 500)], False)],
)  # fmt: skip
def test_copies_of_all_ranks_of_a_host_share_its_memory(
    free: int, others: list[tuple[str, int | None]], fit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four fifths of what is free; and where another host has no room, no rank makes a copy."""

    def gathered(value: object, _: object) -> list[object]:
        if isinstance(value, bool):
            return [value, all(nbytes is not None for _, nbytes in others)]
        return [value, *((host, nbytes or 0) for host, nbytes in others)]

    monkeypatch.setattr(snapshot.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(snapshot, "gathered", gathered)
    monkeypatch.setattr(snapshot, "read_host", lambda: SimpleNamespace(free=free))
    assert snapshot.fits(500, None) is fit


def test_a_step_whose_save_failed_is_saved_when_it_is_asked_for_again(tmp_path: Path) -> None:
    """One that is written is not; with the folder its error and its step are forgotten."""
    refuses = [True]

    def at(point: str) -> None:
        if point == "file written" and refuses[0]:
            raise OSError(28, "No space left on device", str(tmp_path))

    saver = saver_of(tmp_path, whole_tensors(3), at=at, on_save_error=WARN)
    saver.save_step(3)
    saver.wait()
    assert not list_checkpoints(tmp_path) and not saver.failed and saver.saved_step is None
    refuses[0] = False
    saver.save_step(3)
    saver.wait()
    assert loaded_alone(tmp_path) == saver.saved_step == 3
    shutil.rmtree(tmp_path / "step-000003")
    saver.error = CheckpointError("the folder is gone")
    saver.reset_saved_step()
    assert not saver.failed
    saver.save()
    saver.close()
    assert loaded_alone(tmp_path) == 3


def test_a_run_that_continues_does_not_save_its_step_again(tmp_path: Path) -> None:
    save_steps(single_world(), tmp_path, [2, 4])
    before = (tmp_path / "step-000004").stat().st_ino
    saver = Saver(
        tmp_path, CONFIG, SavedState(lambda: whole_tensors(4), lambda: facts(4)), undamaged=list_checkpoints(tmp_path)
    )
    saver.save()
    saver.close()
    assert (tmp_path / "step-000004").stat().st_ino == before


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps its place where the new one cannot take it."""
    save_steps(single_world(), tmp_path, [2])
    (tmp_path / "step-000002" / "state.json").write_text("{}")
    rename = os.rename

    def refused(source: Path, target: Path) -> None:
        if Path(target) == tmp_path / "step-000002" and source.name == "step-000002.tmp":
            raise OSError(errno.EIO, "Input/output error", str(target))
        rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refused)
        with pytest.raises(CheckpointError, match="Input/output error"):
            save_steps(single_world(), tmp_path, [2])
    assert names(tmp_path) == ["latest", "step-000002"]
    assert (tmp_path / "step-000002" / "state.json").read_text() == "{}"
    save_steps(single_world(), tmp_path, [2])
    assert names(tmp_path) == ["latest", "step-000002"] and loaded_alone(tmp_path) == 2


def test_a_pointer_that_cannot_be_written_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("llava_fsdp.checkpoint.commit.write_latest", refused)
    save_steps(single_world(), tmp_path, [1, 2, 3])
    assert names(tmp_path) == ["step-000002", "step-000003"] and loaded_alone(tmp_path) == 3


@pytest.mark.parametrize(
    ("asynchronous", "in_place", "fits", "copies"),
    [(True, False, True, True), (False, False, True, False), (True, True, True, False), (True, False, False, False)],
)
def test_whether_a_checkpoint_is_written_from_a_copy(
    asynchronous: bool, in_place: bool, fits: bool, copies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the background alone, of tensors in memory, where there is room; the copy is freed at the end."""
    monkeypatch.setattr(saver_module, "fits", lambda *_: fits)
    cfg, tensors = replace(CONFIG, asynchronous=asynchronous), whole_tensors(3)
    saver = Saver(tmp_path, cfg, SavedState(lambda: tensors, lambda: facts(3), in_place=in_place))
    assert (saver.snapshot is not None) is copies
    saver.save()
    assert saver.current_save is None or copies, "without a copy, training waits until the checkpoint is written"
    saver.close()
    assert saver.snapshot is None and loaded_alone(tmp_path) == 3


@pytest.mark.parametrize("number", [None, 3])
def test_the_thread_that_writes_checkpoints_uses_the_rank_s_gpu(
    number: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its first call on: otherwise CUDA would make a context on GPU 0 for each rank."""
    device = torch.device("cpu") if number is None else torch.device("cuda", number)
    found = snapshot.device_of([torch.zeros(1), SimpleNamespace(device=device)])  # type: ignore[list-item]
    calls: list[tuple[str, object]] = []
    monkeypatch.setattr(saver_module, "device_of", lambda _: found)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda *given: calls.append((threading.current_thread().name, *given))
    )
    touch = Snapshot.touch
    monkeypatch.setattr(
        Snapshot, "touch", lambda self: (calls.append((threading.current_thread().name, "touch")), touch(self))
    )
    saver = saver_of(tmp_path, whole_tensors(2))
    saver.save_step(2)
    saver.close()
    assert calls == [("checkpoint_0", device)] * (number is not None) + [("checkpoint_0", "touch")]


@pytest.mark.parametrize(("policy", "code", "fails"), [(OnSaveError["raise"], 28, True), (WARN, 28, False)])
def test_a_failed_save_is_known_before_the_next_one(
    policy: OnSaveError, code: int, fails: bool, tmp_path: Path
) -> None:
    """While it is being written nothing has failed; nobody waits for it."""
    gate = Gate("made")

    def at(point: str) -> None:
        gate(point)
        if point == "file written":
            raise OSError(code, "No space left on device", str(tmp_path))

    saver = saver_of(tmp_path, whole_tensors(2), at=at, on_save_error=policy)
    saver.save_step(2)
    assert gate.reached.wait(20) and not saver.failed
    gate.opened.set()
    assert saver.current_save is not None
    wait([saver.current_save])
    assert saver.failed is fails
    with pytest.raises(CheckpointError) if fails else contextlib.nullcontext():
        saver.close()


def test_an_update_does_not_wait_for_a_copy_that_failed() -> None:
    copy = Snapshot({"a": torch.zeros(3)})
    copy.begin()
    assert not copy.copy_queued.is_set()
    with pytest.raises(RuntimeError):
        copy.fill({"a": torch.zeros(4)})
    assert copy.copy_queued.is_set()


def test_which_checkpoints_are_read_to_see_if_they_are_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, and none that this process has written or that it began from."""
    read: list[str] = []
    monkeypatch.setattr(commit, "verify", lambda folder: read.append(folder.name) or verify(folder))
    save_steps(single_world(), tmp_path, [1, 2, 3], keep=4)
    assert not read
    cfg, step = replace(CONFIG, keep=4), [4]
    begun_from = [tmp_path / folder_name(3)]
    saver = Saver(
        tmp_path, cfg, SavedState(lambda: whole_tensors(step[0]), lambda: facts(step[0])), undamaged=begun_from
    )
    saver.save()
    saver.wait()
    assert read == [folder_name(2), folder_name(1)]
    step[0] = 5
    saver.save()
    saver.close()
    assert len(read) == 2 and saver.committer.undamaged == {folder_name(number) for number in (2, 3, 4, 5)}


def test_a_checkpoint_that_was_found_damaged_is_read_again(tmp_path: Path) -> None:
    """Before that, only the sizes of its files are looked at."""
    saver = saver_of(tmp_path, whole_tensors(1))
    saver.save_step(1)
    saver.wait()
    folder, is_undamaged = tmp_path / folder_name(1), saver.committer.is_undamaged
    path = folder / "state.json"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert not is_undamaged(folder)
    path.write_bytes(content[:-1] + b" ")
    assert not is_undamaged(folder)
    path.write_bytes(content)
    assert is_undamaged(folder) and folder.name in saver.committer.undamaged
    saver.close()


def test_adapters_are_on_the_disk_before_the_list_of_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of their files, and each folder of them."""
    seen: list[str] = []
    fsync = os.fsync

    def forced(descriptor: int) -> None:
        seen.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", forced)
    save_steps(single_world(), tmp_path, [2], with_adapter=True)
    before = seen[: seen.index("manifest.json")]
    assert {"adapter_model.safetensors", "config.json", "vision_tower", "adapter"} <= {*before}


def test_a_checkpoint_put_aside_is_continued_from(tmp_path: Path) -> None:
    """By a run, which gives it its name back; a reader changes nothing."""
    save_steps(single_world(), tmp_path, [2])
    os.rename(tmp_path / "step-000002", tmp_path / "step-000002.replaced.tmp")
    assert newest_alone(tmp_path) is None and names(tmp_path) == ["latest", "step-000002.replaced.tmp"]
    assert loaded_alone(tmp_path) == 2 and names(tmp_path) == ["latest", "step-000002"]


def test_a_disk_without_room_for_another_checkpoint_has_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = saver_of(tmp_path, whole_tensors(1))
    saver.save_step(1)
    saver.wait()
    monkeypatch.setattr("llava_fsdp.runtime.files.durable_files.free_bytes", lambda _: 0)
    saver.save_step(2)
    with pytest.raises(CheckpointError):
        saver.close()
    assert names(tmp_path) == ["latest", "step-000001"]
