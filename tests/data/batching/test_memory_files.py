"""A step crosses from a worker unchanged, whatever room there is in /dev/shm."""

import errno
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from commands import TORCHRUN
from loaders import agreed_steps
from small import write_json
from test_loader import open_loader
from xxhash import xxh3_64_hexdigest

from llava_fsdp.data.batching.batch import Step
from llava_fsdp.data.batching.memory_files import ALIGNMENT, Outbox, transfer_all
from llava_fsdp.runtime.errors import OutOfMemory
from llava_fsdp.runtime.exit_codes import ExitCode


def assert_same(a: Step, b: Step) -> None:
    assert a.facts == b.facts and len(a.micro_batches) == len(b.micro_batches)
    for one, other in zip(a.micro_batches, b.micro_batches, strict=True):
        assert (one.scale, one.lengths) == (other.scale, other.lengths)
        assert one.tensors.keys() == other.tensors.keys()
        for name, left in one.tensors.items():
            right = other.tensors[name]
            assert left.dtype == right.dtype and torch.equal(left, right), name


def test_a_function_is_applied_to_every_tensor(parts: Path, dataset: Path) -> None:
    """Those of the images too."""
    moved = open_loader(parts, dataset).steps.prepare(0).map(lambda values: values.double())
    found = [(name, values.dtype) for micro in moved.micro_batches for name, values in micro.tensors.items()]
    assert ("images.tiles", torch.float64) in found and {dtype for _, dtype in found} == {torch.float64}


@pytest.mark.parametrize(
    "overrides",
    [("pack=false", "micro_batch_size=1"), ("pack=false", "micro_batch_size=5"), ("micro_batch_size=1",), ("text",)],
)
def test_crossing_changes_nothing(overrides: tuple[str, ...], parts: Path, dataset: Path) -> None:
    """Every tensor is what it was and begins where torch's own would, and the file is free for the next step."""
    overrides = (f"data.path={dataset / 'text.json'}",) if overrides == ("text",) else overrides
    steps, outbox = open_loader(parts, dataset, *overrides).steps, Outbox(1)
    for number in (0, 1):
        step = steps.prepare(number)
        sent = outbox.put(step)
        assert len(ForkingPickler.dumps(sent)) < 100_000, "its tensors are in the file"
        arrived = sent.receive()
        assert_same(arrived, step)
        starts = [values.data_ptr() for m in arrived.micro_batches for values in m.tensors.values()]
        assert not any(start % ALIGNMENT for start in starts)
        assert os.fstat(sent.file).st_size == 0


def test_all_bytes_are_moved_where_the_system_moves_some_at_once() -> None:
    moved: list[bytes] = []

    def seven(rest: memoryview, done: int) -> int:
        assert done == 7 * len(moved)
        moved.append(bytes(rest[:7]))
        return len(moved[-1])

    transfer_all(torch.arange(20, dtype=torch.uint8), seven)
    assert b"".join(moved) == bytes(range(20))


def test_files_are_closed_with_their_outbox() -> None:
    outbox = Outbox(2)
    files = list(outbox.files)
    del outbox
    for file in files:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)


def refuse(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_worker_without_memory_for_a_step(parts: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = open_loader(parts, dataset, "data.workers=1")
    monkeypatch.setattr(os, "pwrite", refuse)
    began = time.monotonic()
    with pytest.raises(OutOfMemory, match="fewer data") as caught:
        list(agreed_steps(loader))
    assert caught.value.exit_code is ExitCode.USER and time.monotonic() - began < 15
    outbox, step = Outbox(1), loader.steps.prepare(0)
    with pytest.raises(OSError, match="No space"):
        outbox.put(step)
    monkeypatch.undo()
    assert_same(outbox.put(step).receive(), step)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the DataLoader's own, half made
@pytest.mark.parametrize("what", ["queues", "processes"])
def test_workers_that_cannot_be_started_are_done_without(
    what: str, parts: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same steps, and one warning. Of two processes the first is there when the second fails."""
    before = set(multiprocessing.active_children())
    expected = list(agreed_steps(open_loader(parts, dataset)))
    loader = open_loader(parts, dataset, "data.workers=2")
    if what == "queues":
        monkeypatch.setattr(multiprocessing, "Queue", refuse)
    else:
        fork, forked = os.fork, iter([True, False])
        monkeypatch.setattr(os, "fork", lambda: fork() if next(forked) else refuse())
    with caplog.at_level(logging.WARNING):
        arrived = list(agreed_steps(loader))
    monkeypatch.undo()
    assert len(caplog.records) == 1 and "data.workers=2" in caplog.text and "--shm-size" in caplog.text
    for a, b in zip(arrived, expected, strict=True):
        assert_same(a, b)
    assert set(multiprocessing.active_children()) <= before


SMALL = """
import os, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
from loaders import agreed_steps
from test_memory_files import digest, fill
from test_loader import open_loader
from pathlib import Path

def steps(workers):
    overrides = f"data.workers={workers}", "data.stall=10", "global_batch_size=2", "max_steps=8"
    loader = open_loader(Path(sys.argv[2]), Path(sys.argv[3]), *overrides, image_size=1148)
    return agreed_steps(loader)

def digests(found):
    return [digest(step) for step in found]

expected, crossing = digests(steps(0)), steps(2)
first = digest(next(crossing))
fill(Path("/dev/shm"))
assert [first, *digests(crossing)] == expected, "filled after the start"
assert digests(steps(2)) == expected, "filled before the start"
print("the same")
"""


def fill(folder: Path) -> None:
    with open(folder / "full", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC


def digest(step: Step) -> str:
    sums = [xxh3_64_hexdigest(values.numpy()) for m in step.micro_batches for values in m.tensors.values()]
    return f"{step.facts} {sums}"


UNSHARE = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size="${SHM:-1m}" tmpfs /dev/shm && exec "$@"', "sh"]
"""Runs what follows with a /dev/shm of $SHM bytes."""


needs_mount = pytest.mark.skipif(
    subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode != 0,
    reason="a small /dev/shm needs the right to mount one",
)


def write_large_pictures(parts: Path, folder: Path) -> Path:
    """Parts whose tower takes pictures of 4 MB, in 49 patches."""
    shutil.copytree(parts, folder)
    for name, sizes in (
        ("config.json", {"image_size": 1148, "patch_size": 164}),
        ("preprocessor_config.json", {"size": 1148, "crop_size": 1148}),
    ):
        file = folder / "vision" / name
        write_json(file, json.loads(file.read_text()) | sizes)
    return folder


@pytest.mark.slow
@needs_mount
def test_steps_larger_than_shared_memory(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Pictures of 4 MB, and a /dev/shm of 1 MiB that others fill while steps arrive."""
    large = write_large_pictures(parts, tmp_path / "parts")
    run = subprocess.run(
        [*UNSHARE, sys.executable, "-c", SMALL, os.pathsep.join(sys.path), str(large), str(dataset)],
        check=False, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert run.stdout == "the same\n", run.stderr
    assert run.stderr.count("cannot be started") == 1, run.stderr


@pytest.mark.slow  # four trainings of two ranks
@pytest.mark.e2e
@needs_mount
def test_trainings_in_containers_learn_the_same(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Two ranks of two workers with steps of 24 MB; of 64 KiB not even the locks of the workers take place."""
    large = write_large_pictures(parts, tmp_path / "parts")
    losses = {}
    for size in ("1g", "64k", "1m", "64m"):
        run = subprocess.run(
            [*UNSHARE, *TORCHRUN, "2", "-m", "llava_fsdp.train", "stage=finetune", "model.random_weights=true",
             f"model.language={large / 'language'}", f"model.vision={large / 'vision'}", "model.projector=random",
             "data=llava_json", f"data.path={dataset / 'mixed.json'}", f"data.images={dataset / 'images'}",
             "data.workers=2", "data.max_length=256", "precision=fp32", "export.enabled=false", "compile=false",
             "global_batch_size=6", "micro_batch_size=3", "max_steps=3", f"output_dir={tmp_path / size}"],
            check=False, capture_output=True, text=True, timeout=200,
            env={**os.environ, "SHM": size, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        assert ("data.workers=2 cannot be started" in run.stderr) == (size == "64k")
        rows = (tmp_path / size / "metrics.jsonl").read_text().splitlines()
        losses[size] = [json.loads(row)["loss"] for row in rows]
    assert len(losses["1g"]) == 3 and all(found == losses["1g"] for found in losses.values()), losses
