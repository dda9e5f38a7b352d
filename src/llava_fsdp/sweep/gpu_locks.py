"""File locks that give each of several trainings on one machine its own GPUs, whichever Hydra launcher starts them.

A lock is on a file named after a GPU, and is released when its process ends, even if that is killed. The files are in a
folder of the user on this machine, so that two sweeps can share the machine as well. Imports no torch.
"""

import contextlib
import fcntl
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.process.visible_devices import visible_gpus
from llava_fsdp.runtime.text.log import log

# A line of `nvidia-smi -L`: a GPU, or a MIG instance of the GPU above it; and its UUID.
GPU_LINE = re.compile(r"(\s*)(GPU|MIG)\b.*?\(UUID:\s*((?:GPU|MIG)-[^)\s]+)\)")
WAIT_SECONDS = 1.0
SMI_SECONDS = 20


@dataclass(frozen=True)
class Device:
    """A GPU, or a MIG instance of a GPU."""

    name: str
    """For CUDA_VISIBLE_DEVICES."""
    key: str
    """UUID, the same in every process of this machine."""

    @property
    def is_part(self) -> bool:
        return self.key.startswith("MIG-")


def list_devices(smi_output: str, visible: str | None) -> list[Device]:
    """Return the GPUs or MIG instances that a process would see.

    Args:
        smi_output: output of `nvidia-smi -L`.
        visible: value of CUDA_VISIBLE_DEVICES; None: not set.
    """
    gpus: list[str] = []
    parts: dict[int, list[str]] = {}  # UUIDs of the MIG instances of a GPU, by its index
    for line in smi_output.splitlines():
        if match := GPU_LINE.match(line):
            if match[2] == "GPU":
                gpus.append(match[3])
            else:
                parts.setdefault(len(gpus) - 1, []).append(match[3])
    if visible is not None:
        return [Device(name, key) for name, key in visible_gpus(gpus, visible)]
    devices_of_gpus = [
        [Device(part, part) for part in parts.get(n, [])] or [Device(str(n), k)] for n, k in enumerate(gpus)
    ]
    return [device for devices in devices_of_gpus for device in devices]


def devices_here() -> list[Device]:
    """Return the devices that this process may use; empty if nvidia-smi fails."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return list_devices(done.stdout, os.environ.get("CUDA_VISIBLE_DEVICES")) if done.stdout else []


def check_devices(devices: list[Device], count: int) -> None:
    """Raise ConfigError if a training with `count` ranks needs more devices than there are, or several MIG instances,
    between which ranks cannot communicate. Empty `devices` (unknown, or not locked) are not checked."""
    if devices and count > len(devices):
        raise ConfigError(
            f"launch.nproc_per_node={count}: a job needs as many GPUs, and there are {len(devices)}; "
            f"set launch.nproc_per_node={len(devices)}"
        )
    if count > 1 and any(device.is_part for device in devices):
        raise ConfigError(
            f"launch.nproc_per_node={count}: the GPUs are cut into parts (MIG), and ranks of one job cannot be on "
            "several of them; set launch.nproc_per_node=1"
        )


@contextlib.contextmanager
def locking_devices(
    devices: list[Device], count: int, name: str, stop_level: Callable[[], int]
) -> Iterator[tuple[list[Device], list[int]]]:
    """Context manager that waits until `count` of `devices` are free of other trainings, and locks them.

    Args:
        devices: the devices of this machine; empty if they are unknown or not to be locked.
        count: number of devices that the training needs.
        name: name of the training, for log messages.
        stop_level: returns 0 while the sweep goes on, more once the user has asked to stop it; then waiting ends.

    Yields:
        The locked devices, and the file descriptors of their locks; both empty if waiting ended or `devices` is empty.
    """
    if not devices:
        yield [], []
        return
    folder, has_logged = lock_folder(), False
    while True:
        locked = lock_free_devices(devices, count, folder)
        if locked or stop_level():
            break
        if not has_logged:
            log().info("%s: waits until %d of %d GPUs are free of other jobs", name, count, len(devices))
            has_logged = True
        time.sleep(WAIT_SECONDS)
    try:
        yield [device for device, _ in locked], [handle for _, handle in locked]
    finally:
        for _, handle in locked:
            os.close(handle)


def lock_free_devices(devices: list[Device], count: int, folder: Path) -> list[tuple[Device, int]]:
    """Lock the first `count` free devices, and return them with the file descriptors of their locks; empty if fewer are
    free. One process does this at a time, as two trainings could each lock half of the devices."""
    with contextlib.ExitStack() as stack:
        entry = open_lock(folder / "door")
        stack.callback(os.close, entry)
        fcntl.flock(entry, fcntl.LOCK_EX)
        locked: list[tuple[Device, int]] = []
        for device in devices:
            handle = open_lock(folder / re.sub(r"[^\w-]", "_", device.key))
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked.append((device, handle))
            except BlockingIOError:
                os.close(handle)
            if len(locked) == count:
                return locked
        for _, handle in locked:
            os.close(handle)
        return []


def open_lock(path: Path) -> int:
    """Open a lock file, or create it; return its descriptor."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def lock_folder() -> Path:
    """Create and return this user's folder of lock files. Raises ConfigError if it belongs to another user."""
    folder = Path(tempfile.gettempdir()) / f"llava_fsdp-devices-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    state = folder.lstat()
    if state.st_uid != os.getuid() or not folder.is_dir() or folder.is_symlink():
        raise ConfigError(
            f"{folder} is another user's, and should hold the locks of this user's GPUs: set TMPDIR to a folder of "
            "your own, or launch.devices=shared"
        )
    return folder
