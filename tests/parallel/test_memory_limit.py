"""A finetune whose states exceed a limit on private memory completes with `offload=nvme`, and says what to do without.

RLIMIT_DATA counts private writable memory, touched or not: heap, stacks and anonymous mappings, no mapped files.
"""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from harness import RankPool
from reference import EXPORTED, assert_same_bits, outcome
from small import make_config, write_json, write_parts

from llava_fsdp.config import Config
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import OutOfMemory
from llava_fsdp.train import main as train

MIB = 1 << 20
STATE_BYTES = 16  # of a trained parameter in fp32: weight, gradient, two moments


def write_language(folder: Path, hidden: int, intermediate: int, layers: int) -> Path:
    """A model of another size than the small one's."""
    write_parts(folder)
    path = folder / "language" / "config.json"
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    write_json(path, json.loads(path.read_text()) | sizes | {"num_attention_heads": 8, "num_key_value_heads": 8})
    return folder


def private_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


def train_within(world: World, cfg: Config, more: int | None) -> str:
    """Train with so many bytes of private memory more than there are; what went wrong, if anything."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if more is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (private_bytes() + more, before[1]))
    try:
        train.train(cfg)
    except OutOfMemory as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    return ""


def assert_trained_beyond(nbytes: float, folder: Path) -> None:
    """Runs with and without a limit trained the same bits, whose states take more bytes than this."""
    free, nvme = outcome(folder / "free"), outcome(folder / "nvme")
    trained = sum(v.numel() for n, v in nvme.weights.items() if not n.startswith("vision_tower"))
    assert STATE_BYTES * trained > nbytes
    assert_same_bits(nvme, free, "nvme")


@pytest.mark.slow
@pytest.mark.ranks
def test_states_beyond_a_limit_on_private_memory(dataset: Path, tmp_path: Path) -> None:
    parts = write_language(tmp_path / "parts", 512, 1408, 7)
    values = ["pack=false", "micro_batch_size=1", "global_batch_size=2", "max_steps=2", *EXPORTED]
    limit = 192 * MIB
    said = {}
    for name, mode, more in (("free", "none", None), ("nvme", "nvme", limit), ("none", "none", limit)):
        pool = RankPool(1)  # a process of its own: what an earlier run has freed is still its
        cfg = make_config(parts, dataset, tmp_path / name, *values, f"offload={mode}")
        said[name] = pool.run(train_within, cfg, more)[0]
        pool.close()
    assert (said["free"], said["nvme"]) == ("", "")
    assert "out of host memory" in said["none"] and "offload=nvme" in said["none"]
    assert_trained_beyond(1.5 * limit, tmp_path)


LIMITED = """
import resource, sys
import llava_fsdp.train.main
from llava_fsdp.train import run as entry
limit = int(sys.argv.pop(1))
if limit:
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
entry.run()
"""


@pytest.mark.slow
@pytest.mark.e2e
def test_three_gigabytes_of_states_under_two(dataset: Path, tmp_path: Path) -> None:
    """2 GiB on the process, set after its imports; 200 million trained parameters."""
    parts = write_language(tmp_path / "parts", 1024, 2816, 16)
    values = [
        "stage=finetune", f"model.language={parts / 'language'}", f"model.vision={parts / 'vision'}",
        "model.projector=random", "model.random_weights=true", "data=llava_json", f"data.path={dataset / 'mixed.json'}",
        f"data.images={dataset / 'images'}", "data.workers=0", "data.max_length=256", "precision=fp32", "pack=false",
        "micro_batch_size=1", "global_batch_size=2", "max_steps=2", "optim.clip=0.5", *EXPORTED,
    ]  # fmt: skip
    ended = {}
    for name, mode, limit in (("nvme", "nvme", 2 << 30), ("none", "none", 2 << 30), ("free", "none", 0)):
        command = [sys.executable, "-c", LIMITED, str(limit), *values, f"offload={mode}"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        command.append(f"output_dir={tmp_path / name}")
        done = subprocess.run(command, check=False, env=env, capture_output=True, text=True)
        ended[name] = done.returncode, done.stderr
    assert ended["nvme"][0] == ended["free"][0] == 0, ended["nvme"][1]
    code, said = ended["none"]
    assert code == 2 and "OutOfMemory: out of host memory" in said and "offload=nvme" in said
    assert_trained_beyond(3 << 30, tmp_path)
