"""Every name of torch that the project uses is one of torch 2.11, or stands here with what is done without it.

The names were looked up in the sources of torch 2.11.0, 2.12.0 and 2.13.0. A list cannot name methods of objects, and
arguments that a call gets from a dict: those that differ between the releases stand in `YOUNGER` by hand.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from torch_names import names_of_torch

ROOT = Path(__file__).parents[2]
USERS = ("src", "benchmarks", "tests/gpu", "tests/support")
YOUNGER = {
    # name: the first release that has it, and the test of what happens in an older one
    "torch._C._distributed_c10d._dump_nccl_trace_json": (
        "2.11, if it is built with NCCL",
        "tests/parallel/test_process_group.py::test_progress_on_a_gpu_is_what_its_flight_recorder_says",
    ),
    "torch.distributed._functional_collectives.all_gather_single_autograd": (
        "2.13", "tests/parallel/test_context.py::test_an_older_torch_is_refused",
    ),
    "torch.distributed.fsdp.FSDPModule.set_reduce_scatter_max_input_buffers": (
        "2.13", "tests/parallel/test_units.py::test_an_older_torch_is_refused_but_for_one_reduction",
    ),
    "torch.distributed.pipelining._utils._StageMeta": (
        "2.13", "tests/parallel/test_context.py::test_an_older_torch_is_refused",
    ),
    "torch.distributed.pipelining._utils._TensorMeta": (
        "2.13", "tests/parallel/test_context.py::test_an_older_torch_is_refused",
    ),
    "torch.nn.functional.linear_cross_entropy": (
        "2.13", "tests/model/test_loss.py::test_torchs_kernel_is_refused_where_it_would_round_the_loss",
    ),
    "torch.nn.LinearCrossEntropyOptions": (
        "2.13", "tests/model/test_loss.py::test_torchs_kernel_is_refused_where_it_would_round_the_loss",
    ),
}  # fmt: skip
YOUNGER_BY_HAND = {
    "torch.nn.attention.varlen.varlen_attn(enable_gqa=)": (
        "2.12", "tests/model/test_attention_arguments.py::test_what_torchs_kernel_is_called_with",
    ),
    # benchmarks/strategy_runs.py looks for it in the signature, and passes the older name where it is missing
    "torch.nn.parallel.DistributedDataParallel(forward_sync_buffers=)": ("2.13", None),
}  # fmt: skip


def listed() -> set[str]:
    """The names in torch_names.txt."""
    found: set[str] = set()
    parent = ""
    for line in (ROOT / "tests/runtime/torch_names.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        if not line.startswith(" "):
            parent, _, line = line.partition(":")
        found |= {f"{parent}.{name}" for name in line.split()}
    return found


def used() -> set[str]:
    names: set[str] = set()
    for folder in USERS:
        for path in (ROOT / folder).rglob("*.py"):
            names |= names_of_torch(path)
    return {name for name in names if name != "torch" and not name.startswith("torch.ops.llava_fsdp")}  # its own


def test_every_name_is_in_the_list_or_has_a_guard() -> None:
    names = used()
    younger = {name for name in names if name.partition("(")[0] in YOUNGER}
    new, unused = names - younger - listed(), listed() - names
    assert not new, (
        f"look whether torch 2.11 has {sorted(new)}: add them to torch_names.txt, or to YOUNGER with a guard"
    )
    assert not unused, f"nothing uses {sorted(unused)} any more: take them out of torch_names.txt"
    assert {name.partition("(")[0] for name in younger} == set(YOUNGER)


@pytest.mark.parametrize("name", [*YOUNGER, *YOUNGER_BY_HAND])
def test_the_guard_of_a_younger_name_is_tested(name: str) -> None:
    _, test = (YOUNGER | YOUNGER_BY_HAND)[name]
    if test is not None:
        path, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / path).read_text()


def resolved(name: str) -> Any:
    """The object of a dotted name: the longest part of it that is a module is imported."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"no module of {name}")


@pytest.mark.slow
def test_this_torch_has_every_listed_name() -> None:
    missing = []
    for name in sorted({name.partition("(")[0] for name in listed()}):
        if "tensorboard" in name and importlib.util.find_spec("tensorboard") is None:
            continue
        try:
            resolved(name)
        except (AttributeError, ImportError, AssertionError):
            missing.append(name)
    assert not missing
